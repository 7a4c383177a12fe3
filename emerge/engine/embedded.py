"""The engine that needs nothing but pip: the grounder of clingo evaluates the lowered program.

A stratified program without choices has one model, and grounding alone computes it: every atom comes out as a fact.
That is verified for every atom read back. What clingo does differently from Soufflé is bridged here:

* ``min``/``max`` of nothing are ``#sup``/``#inf`` in clingo: such a match is dropped, as in Soufflé.
* clingo solves linear equations for any variable; ``?0`` (bitwise or) keeps arithmetic one-way, so 32-bit
  wrap-around (the same in both, measured) cannot lose a solution.
* a clingo sum wraps around where it is assigned, but saturates where it is compared: it is always assigned first.
* clingo has no shifts, ``min``/``max`` functions or trap for ``-2147483648 / -1``: arithmetic, or Python callbacks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from emerge.engine.checks import guard_of, may_overflow_division
from emerge.engine.lower import Assign, Step
from emerge.engine.program import LogRule, Program
from emerge.engine.syntax import (
    INT_MIN,
    Atom,
    Cmp,
    Neg,
    Nil,
    Num,
    Op,
    Rec,
    Str,
    Term,
    Var,
    Wild,
    literal_terms,
    variables,
)
from emerge.util.errors import EngineError

Rows = list[tuple[Any, ...]]
_MODULO = "\\"


@dataclass(slots=True)
class Job:
    """What one embedded run needs; holds plain data only, so it can be sent to another process.

    Attributes:
        text: the clingo program.
        facts: (predicate, rows of Python values).
        wanted: predicate -> arity, to be read back.
        names: predicate -> relation name, for messages.
    """

    text: str
    facts: list[tuple[str, Rows]]
    wanted: dict[str, int]
    names: dict[str, str] = field(default_factory=dict)


def translate(
    program: Program, facts: Mapping[str, Iterable[tuple[Any, ...]]], outputs: Iterable[str], logs: Sequence[LogRule]
) -> tuple[Job, dict[str, str]]:
    """The clingo program of ``program`` and the predicate of every relation that is read back.

    Facts must have been checked; ground clauses without arithmetic join them as terms.
    """
    predicate = {name: f"p{index}" for index, name in enumerate(program.relations)}
    rows: dict[str, Rows] = {}
    for name, given in facts.items():
        rows.setdefault(name, []).extend(given)
    lines: list[str] = []
    logged = {log.rule.clause.index: log for log in logs}
    for index, rule in enumerate(program.rules):
        if not rule.body:
            rows.setdefault(rule.head.name, []).append(tuple(value_of(a) for a in rule.head.args))
        elif index in logged:
            lines += _Emitter(predicate).logged(logged[index])
        else:
            emitter = _Emitter(predicate)
            lines.append(f"{emitter.atom(rule.head)} :- {'; '.join(emitter.body(rule.body))}.")
    wanted = {name: predicate[name] for name in outputs}
    arities = {predicate[name]: program.relations[name].arity for name in wanted}
    for log in logs:
        if log.rule.body:
            wanted[log.name] = log.name
            arities[log.name] = len(log.rule.variables)
    names = {p: name for name, p in wanted.items()}
    fact_list = [(predicate[name], given) for name, given in rows.items() if given]
    return Job("\n".join(lines), fact_list, arities, names), wanted


def value_of(term: Term) -> Any:
    """The Python value of a ground term without arithmetic."""
    match term:
        case Num() | Str():
            return term.value
        case Nil():
            return None
        case Rec():
            return tuple(value_of(i) for i in term.items)
    raise AssertionError(f"not ground: {term}")


class _Emitter:
    def __init__(self, predicate: Mapping[str, str]) -> None:
        self.predicate = predicate
        self.numbers: dict[str, str] = {}

    def logged(self, log: LogRule) -> list[str]:
        """The body derives the log, the log the head: no join runs twice, and the recursion binds it as without log."""
        args = ",".join(self.var(v) for v in log.rule.variables)
        instance = f"{log.name}({args})" if args else log.name
        return [
            f"{instance} :- {'; '.join(self.body(log.rule.body))}.",
            f"{self.atom(log.rule.head)} :- {instance}.",
        ]

    def body(self, steps: Sequence[Step]) -> list[str]:
        return [part for step in steps for part in self.step(step, steps)]

    def step(self, step: Step, around: Sequence[Step]) -> list[str]:
        match step:
            case Atom():
                return [self.atom(step)]
            case Neg():
                return ["not " + self.atom(step.atom)]
            case Cmp():
                return [f"{self.side(step.left, around)} {step.op} {self.side(step.right, around)}"]
            case Assign():
                return self.aggregate(step)

    def aggregate(self, step: Assign) -> list[str]:
        agg = step.agg
        locals_: dict[str, None] = {}
        for literal in agg.body:
            for term in literal_terms(literal):
                locals_.update((v.name, None) for v in variables(term) if v.name not in step.shared)
        weight = [] if agg.target is None else [self.side(agg.target, agg.body)]
        # One tuple per match, so equal values of different matches are all summed; for min and max only values matter.
        elements = weight if agg.op in ("min", "max") else weight + [self.var(v) for v in locals_]
        tuple_text = ",".join(elements) or "0"
        # A variable of its own, which nothing else can bind: a sum that clingo only compares with a known value
        # saturates at 32 bits instead of wrapping around.
        own = self.var(f"{step.var.name} alone")
        parts = [f"{own} = #{agg.op} {{ {tuple_text} : {', '.join(self.body(agg.body))} }}"]
        empty = {"min": "#sup", "max": "#inf"}.get(agg.op)
        if empty is not None:
            parts.append(f"{own} != {empty}")
        return [*parts, f"{self.var(step.var.name)} = ({own}?0)"]

    def atom(self, atom: Atom) -> str:
        name = self.predicate[atom.name]
        return f"{name}({','.join(self.term(a) for a in atom.args)})" if atom.args else name

    def var(self, name: str) -> str:
        return self.numbers.setdefault(name, f"V{len(self.numbers)}")

    def term(self, term: Term) -> str:
        match term:
            case Var():
                return self.var(term.name)
            case Wild():
                return "_"
            case Num():
                # The lowest number cannot be written: clingo reads its digits before the sign.
                return str(term.value) if term.value != INT_MIN else f"({INT_MIN + 1}-1)"
            case Str():
                return '"' + term.value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n") + '"'
            case Nil():
                return "nil"
            case Rec():
                return f"r({','.join(self.term(i) for i in term.items)})"
        raise AssertionError(f"not a simple term: {term}")

    def side(self, term: Term, around: Sequence[Step]) -> str:
        """A side of a comparison or the head of an aggregate: a simple term or one-way arithmetic."""
        return f"({self.arithmetic(term, around)}?0)" if isinstance(term, Op) else self.term(term)

    def arithmetic(self, term: Term, around: Sequence[Step]) -> str:
        if not isinstance(term, Op):
            return f"({self.term(term)})" if isinstance(term, Num) else self.term(term)
        args = [self.arithmetic(a, around) for a in term.args]
        a, b = args[0], args[-1]
        match term.op:
            case "neg":
                return f"(0-{a})"
            case "bnot":
                return f"(-1-{a})"
            case "+" | "-" | "*":
                return f"({a}{term.op}{b})"
            case "/" | "%" if may_overflow_division(term):
                divisor = term.args[1]
                if isinstance(divisor, Var) and guard_of(divisor.name, around) == "positive":
                    # clingo may divide before it looks at the guard: without its sign no divisor can trap (-2**31 / -1)
                    return f"({a}{'/' if term.op == '/' else _MODULO}({b}&2147483647))"
                return f"@{ {'/': 'divide', '%': 'modulo'}[term.op] }({a},{b})"
            case "/" | "%":
                return f"({a}{'/' if term.op == '/' else _MODULO}{b})"
            case "band" | "bor" | "bxor":
                return f"({a}{ {'band': '&', 'bor': '?', 'bxor': '^'}[term.op] }{b})"
            case "bshl":
                return f"({a}*2**({b}&31))"
            case "bshr":
                # Floor division by a power of two in two halves, as 2**31 is not a positive number here.
                half = f"(({b}&31)/2)"
                return self._floor_shift(self._floor_shift(a, half), f"(({b}&31)-{half})")
            case _:
                return f"@{term.op}imum({a},{b})"

    @staticmethod
    def _floor_shift(a: str, count: str) -> str:
        return f"(({a}-({a}&(2**{count}-1)))/2**{count})"


class _Functions:
    """Callbacks of the clingo program; symbols in, a symbol or (undefined) an empty list out."""

    def __init__(self) -> None:
        from clingo import Number

        self._number = Number

    def divide(self, a: Any, b: Any) -> Any:
        return self._divide(a.number, b.number, 0)

    def modulo(self, a: Any, b: Any) -> Any:
        return self._divide(a.number, b.number, 1)

    def minimum(self, a: Any, b: Any) -> Any:
        return a if a.number <= b.number else b

    def maximum(self, a: Any, b: Any) -> Any:
        return a if a.number >= b.number else b

    def _divide(self, a: int, b: int, which: int) -> Any:
        """Quotient (0) or remainder (1), rounded toward zero; nothing where the guard of the body drops the match."""
        if b == 0:
            return []
        if a == INT_MIN and b == -1:
            raise EngineError("a division overflows 32 bits: -2147483648 by -1; guard the divisor with 'x > 0'")
        quotient = abs(a) // abs(b)
        quotient = quotient if (a < 0) == (b < 0) else -quotient
        return self._number((quotient, a - b * quotient)[which])


def evaluate(job: Job) -> dict[str, Rows]:
    """Ground ``job`` and read the wanted predicates back.

    Raises:
        EngineError: clingo failed, or an atom is not a fact.
    """
    import clingo

    from emerge.engine.terms import TermBuilder, TermReader

    problems: list[str] = []

    def keep_errors(code: Any, message: str) -> None:
        if code == clingo.MessageCode.RuntimeError:
            problems.append(message.strip())

    try:
        control = clingo.Control(["--warn=none"], logger=keep_errors)
        control.add("base", [], job.text)
        builder = TermBuilder()
        with control.backend() as backend:
            for predicate, rows in job.facts:
                for symbol in builder.atoms(predicate, rows):
                    backend.add_rule((backend.add_atom(symbol),))
        control.ground([("base", [])], context=_Functions())
    except EngineError as error:  # raised by a callback; clingo wraps it in another of its type
        raise EngineError(str(error)) from None
    except (RuntimeError, MemoryError) as error:
        detail = problems[-1] if problems else str(error)
        raise EngineError(f"the embedded Datalog engine failed ({detail})") from error
    reader = TermReader(control)
    result: dict[str, Rows] = {}
    for predicate, arity in job.wanted.items():
        rows, undecided = reader.rows(predicate, arity)
        if undecided is not None:
            name = job.names.get(predicate, predicate)
            raise EngineError(
                f"the embedded Datalog engine left {name}{undecided} undecided; please report the program"
            )
        result[predicate] = rows
    return result


def version() -> str:
    """Version of the engine, e.g. ``clingo 5.8.0`` ("" when clingo is not installed)."""
    try:
        import clingo
    except ImportError:
        return ""
    return f"clingo {clingo.__version__}"
