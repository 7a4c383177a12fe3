"""Helpers of the engine tests: engine fixtures, Soufflé on the text as written, and a naive reference evaluator."""

from __future__ import annotations

import itertools
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from emerge.engine.program import Program
from emerge.engine.run import available_engines
from emerge.engine.syntax import Agg, Atom, Cmp, Literal, Neg, Nil, Num, Op, Rec, Str, Term, Var, Wild

needs_souffle = pytest.mark.skipif(
    "souffle" not in available_engines(), reason="no working souffle binary on PATH; only the embedded engine is tested"
)
ENGINES = ["embedded", pytest.param("souffle", marks=[pytest.mark.souffle, needs_souffle])]
Relations = dict[str, set[tuple[Any, ...]]]


def souffle_as_written(text: str, outputs: tuple[str, ...], folder: Path) -> dict[str, set[str]]:
    """Lines that souffle prints for the program as a person wrote it (no lowering of ours in between)."""
    binary = shutil.which("souffle")
    assert binary is not None
    program = folder / "raw.dl"
    program.write_text(text)
    command = [binary, "-w", "--no-preprocessor", "-D", str(folder), str(program)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return {name: set((folder / f"{name}.csv").read_text().splitlines()) for name in outputs}


def as_souffle_prints(rows: set[tuple[Any, ...]]) -> set[str]:
    """Rows as lines of a Soufflé result file (symbols without special characters)."""

    def value(item: Any) -> str:
        if item is None:
            return "nil"
        return f"[{', '.join(map(value, item))}]" if isinstance(item, tuple) else str(item)

    return {"\t".join(map(value, row)) if row else "()" for row in rows}


# --- a reference that shares nothing with the engines but the parser ------------------------------------------------


def wrap(value: int) -> int:
    return (value + 2**31) % 2**32 - 2**31


def arithmetic(op: str, a: int, b: int) -> int:
    if op in ("/", "%"):
        quotient = abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)
        return wrap(quotient if op == "/" else a - b * quotient)
    functions = {
        "+": lambda: a + b,
        "-": lambda: a - b,
        "*": lambda: a * b,
        "band": lambda: a & b,
        "bor": lambda: a | b,
        "bxor": lambda: a ^ b,
        "bshl": lambda: a << (b & 31),
        "bshr": lambda: a >> (b & 31),
        "min": lambda: min(a, b),
        "max": lambda: max(a, b),
    }
    return wrap(functions[op]())


class _Unbound(Exception):
    pass


class Reference:
    """Naive bottom-up evaluation of a program's clauses, stratum by stratum found by trial: slow and simple."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.facts: Relations = {name: set() for name in program.relations}

    def run(self) -> Relations:
        """Strata by negative dependencies: a relation is complete once all it reads are."""
        for stratum in self._strata():
            clauses = [c for c in self.program.clauses if c.head.name in stratum]
            changed = True
            while changed:
                found = [
                    (c.head.name, tuple(self.value(a, s) for a in c.head.args))
                    for c in clauses
                    for s in self.solutions(list(c.body), {}, c.head.args)
                ]
                before = sum(map(len, self.facts.values()))
                for name, row in found:
                    self.facts[name].add(row)
                changed = sum(map(len, self.facts.values())) != before
        return self.facts

    def _strata(self) -> Iterator[set[str]]:
        level = dict.fromkeys(self.program.relations, 0)
        for _ in range(len(level) + 1):
            for clause in self.program.clauses:
                for atom, below in _reads(clause.body + tuple(Cmp("=", a, a, clause.pos) for a in clause.head.args)):
                    level[clause.head.name] = max(level[clause.head.name], level[atom.name] + below)
        assert max(level.values(), default=0) <= len(level), "not stratified"
        for number in range(max(level.values(), default=0) + 1):
            yield {name for name, at in level.items() if at == number}

    def solutions(
        self, body: list[Literal], bound: dict[str, Any], outside: tuple[Term, ...]
    ) -> Iterator[dict[str, Any]]:
        if not body:
            yield bound
            return
        for index, literal in enumerate(body):  # the first literal that can be evaluated
            rest = body[:index] + body[index + 1 :]
            scope = (*outside, *(t for r in rest for t in _terms(r)))
            try:
                extended = list(self.matches(literal, bound, scope))
            except _Unbound:
                continue
            for solution in extended:
                yield from self.solutions(rest, solution, outside)
            return
        raise AssertionError("no literal can be evaluated")

    def matches(self, literal: Literal, bound: dict[str, Any], scope: tuple[Term, ...]) -> Iterator[dict[str, Any]]:
        if isinstance(literal, Atom):
            for row in self.facts[literal.name]:
                solution: dict[str, Any] | None = dict(bound)
                for arg, value in zip(literal.args, row):
                    solution = self.unify(arg, value, solution) if solution is not None else None
                if solution is not None:
                    yield solution
        elif isinstance(literal, Neg):
            names = [a for a in literal.atom.args if not isinstance(a, Wild)]
            wanted = tuple(self.value(a, bound, scope) for a in names)
            columns = [i for i, a in enumerate(literal.atom.args) if not isinstance(a, Wild)]
            if not any(tuple(row[i] for i in columns) == wanted for row in self.facts[literal.atom.name]):
                yield bound
        else:
            yield from self.comparison(literal, bound, scope)

    def comparison(self, literal: Cmp, bound: dict[str, Any], scope: tuple[Term, ...]) -> Iterator[dict[str, Any]]:
        left, right = literal.left, literal.right
        if literal.op == "=":
            for one, other in ((left, right), (right, left)):
                try:
                    value = self.value(other, bound, (*scope, one))
                except _Unbound:
                    continue
                if value is _FAILS:
                    return
                solution = self.unify(one, value, dict(bound))
                if solution is not None:
                    yield solution
                return
            raise _Unbound
        a, b = self.value(left, bound, (*scope, right)), self.value(right, bound, (*scope, left))
        if a is _FAILS or b is _FAILS:
            return
        tests = {"!=": a != b} if literal.op == "!=" else {"<": a < b, "<=": a <= b, ">": a > b, ">=": a >= b}
        if tests[literal.op]:
            yield bound

    def unify(self, term: Term, value: Any, bound: dict[str, Any]) -> dict[str, Any] | None:
        if isinstance(term, Wild):
            return bound
        if isinstance(term, Var):
            if bound.setdefault(term.name, value) != value:
                return None
            return bound
        if isinstance(term, Rec):
            if value is None:
                return None
            solution: dict[str, Any] | None = bound
            for item, part in zip(term.items, value):
                solution = self.unify(item, part, solution) if solution is not None else None
            return solution
        return bound if self.value(term, bound) == value else None

    def value(self, term: Term, bound: dict[str, Any], scope: tuple[Term, ...] = ()) -> Any:
        match term:
            case Num() | Str():
                return term.value
            case Nil():
                return None
            case Var():
                if term.name not in bound:
                    raise _Unbound
                return bound[term.name]
            case Rec():
                return tuple(self.value(i, bound, scope) for i in term.items)
            case Op():
                args = [self.value(a, bound, scope) for a in term.args]
                if term.op == "neg":
                    return wrap(-args[0])
                return ~args[0] if term.op == "bnot" else arithmetic(term.op, *args)
            case Agg():
                return self.aggregate(term, bound, scope)
        raise _Unbound

    def aggregate(self, agg: Agg, bound: dict[str, Any], scope: tuple[Term, ...]) -> Any:
        outside = {v for t in scope for v in _names(t)} | set(bound)
        shared = {v for literal in agg.body for t in _terms(literal) for v in _names(t)} & outside
        if not shared <= set(bound):
            raise _Unbound
        counter = itertools.count()
        body = [_name_wildcards(literal, counter) for literal in agg.body]
        inner = list(self.solutions(body, {v: bound[v] for v in shared}, ()))
        if agg.op == "count":
            return len(inner)
        values = [self.value(agg.target, s) for s in inner if agg.target is not None]
        if agg.op == "sum":
            return wrap(sum(values))
        return {"min": min, "max": max}[agg.op](values) if values else _FAILS


_FAILS = object()


def _terms(literal: Literal) -> tuple[Term, ...]:
    if isinstance(literal, Cmp):
        return (literal.left, literal.right)
    return literal.atom.args if isinstance(literal, Neg) else literal.args


def _names(term: Term) -> Iterator[str]:
    """Variables outside aggregates."""
    if isinstance(term, Var):
        yield term.name
    for part in getattr(term, "items", None) or getattr(term, "args", ()):
        yield from _names(part)


def _name_wildcards(literal: Literal, counter: Iterator[int]) -> Literal:
    if not isinstance(literal, Atom):
        return literal
    args = tuple(Var(f"_{next(counter)}?", a.pos) if isinstance(a, Wild) else a for a in literal.args)
    return Atom(literal.name, args, literal.pos)


def _reads(body: tuple[Literal, ...]) -> Iterator[tuple[Atom, int]]:
    for literal in body:
        if isinstance(literal, Atom):
            yield literal, 0
        elif isinstance(literal, Neg):
            yield literal.atom, 1
        for term in _terms(literal):
            for agg in _aggregates(term):
                yield from ((atom, 1) for atom, _ in _reads(agg.body))


def _aggregates(term: Term) -> Iterator[Agg]:
    if isinstance(term, Agg):
        yield term
    elif not isinstance(term, (Var, Wild, Num, Str, Nil)):
        for part in getattr(term, "items", None) or getattr(term, "args", ()):
            yield from _aggregates(part)
