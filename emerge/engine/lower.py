"""From clauses as written to rules that both engines read alike.

Splitting: several heads and disjunctions become several clauses. Lowering: arithmetic inside atoms and records and
every aggregate move into equations of their own, so atoms hold only variables, constants and records of these.
A hoisted expression is named by its own text, so equal expressions of a clause share one variable.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import product

from emerge.engine.syntax import (
    Agg,
    Atom,
    Body,
    Clause,
    Cmp,
    Literal,
    Neg,
    Op,
    Pos,
    Rec,
    SourceClause,
    Term,
    Var,
    Wild,
    literal_terms,
    subterms,
    term_text,
    variables,
)
from emerge.util.errors import RuleError

_MAX_CHOICES = 256


@dataclass(frozen=True, slots=True)
class Assign:
    """``var = aggregate``. Variables of the aggregate in ``shared`` are bound outside, the others are its own."""

    var: Var
    agg: Agg
    shared: frozenset[str]


Step = Atom | Neg | Cmp | Assign


@dataclass(frozen=True, slots=True, eq=False)
class Rule:
    """A lowered clause.

    Attributes:
        variables: every variable outside aggregates, in order of occurrence: body first, then head.
    """

    clause: Clause
    head: Atom
    body: tuple[Step, ...]
    variables: tuple[str, ...]

    @property
    def premises(self) -> tuple[Atom, ...]:
        """Positive atoms of the body, outside aggregates."""
        return tuple(s for s in self.body if isinstance(s, Atom))


def split(source: SourceClause) -> list[tuple[Atom, tuple[Literal, ...]]]:
    """Heads times disjunctive choices of a written clause.

    Raises:
        RuleError: more than 256 choices.
    """
    bodies = _choices(source.body, source.pos)
    return [(head, body) for head in source.heads for body in bodies]


def _choices(body: Body, pos: Pos) -> list[tuple[Literal, ...]]:
    result: list[tuple[Literal, ...]] = []
    for choice in body.choices:
        options = [_choices(item, pos) if isinstance(item, Body) else [(item,)] for item in choice]
        for combination in product(*options):
            result.append(tuple(literal for part in combination for literal in part))
            if len(result) > _MAX_CHOICES:
                raise RuleError(f"the clause has more than {_MAX_CHOICES} disjunctive choices; split it", str(pos))
    return result


def lower(clause: Clause) -> Rule:
    """Lower one clause.

    Raises:
        RuleError: an aggregate inside an aggregate, a wildcard where it has no meaning, or an aggregate variable that
            is also used outside in a way Soufflé would read as a witness.
    """
    return _Lowering(clause).rule()


class _Lowering:
    def __init__(self, clause: Clause) -> None:
        self.clause = clause
        self.outer = {v.name for t in self._outer_terms() for v in variables(t)}
        self.hoisted: dict[str, Cmp | Assign] = {}
        self.done: set[str] = set()
        self.aggregates = 0
        self.wildcards = 0

    def _outer_terms(self) -> Iterable[Term]:
        yield from self.clause.head.args
        for literal in self.clause.body:
            yield from literal_terms(literal)

    def rule(self) -> Rule:
        body: list[Step] = []
        for literal in self.clause.body:
            step = self.literal(literal, None)
            body += self._drain()
            body.append(step)
        for arg in self.clause.head.args:
            _refuse_wildcards(arg, "a head")
        head = self._atom(self.clause.head, None)
        body += self._drain()
        order: dict[str, None] = {}
        for body_step in body:
            for term in (body_step.var,) if isinstance(body_step, Assign) else literal_terms(body_step):
                order.update((v.name, None) for v in variables(term))
        order.update((v.name, None) for a in head.args for v in variables(a))
        return Rule(self.clause, head, tuple(body), tuple(order))

    def _drain(self) -> list[Cmp | Assign]:
        steps = list(self.hoisted.values())
        self.done.update(self.hoisted)
        self.hoisted = {}
        return steps

    # `rename` is None outside aggregates; inside, it maps the aggregate's own variables to private names.
    def literal(self, literal: Literal, rename: dict[str, str] | None) -> Atom | Neg | Cmp:
        match literal:
            case Atom():
                return self._atom(literal, rename)
            case Neg():
                for arg in literal.atom.args:
                    if not isinstance(arg, Wild):
                        _refuse_wildcards(arg, "a record of a negated atom")
                return replace(literal, atom=self._atom(literal.atom, rename))
            case Cmp():
                pattern = literal.op == "=" and (isinstance(literal.left, Rec) != isinstance(literal.right, Rec))
                if not pattern:
                    _refuse_wildcards(literal.left, "a comparison")
                    _refuse_wildcards(literal.right, "a comparison")
                if isinstance(literal.left, Rec) and isinstance(literal.right, Rec):
                    raise RuleError("two records are compared; compare their fields instead", str(literal.pos))
                left, right = self._side(literal.left, rename), self._side(literal.right, rename)
                return replace(literal, left=left, right=right)

    def _atom(self, atom: Atom, rename: dict[str, str] | None) -> Atom:
        return replace(atom, args=tuple(self.flat(a, rename) for a in atom.args))

    def _side(self, term: Term, rename: dict[str, str] | None) -> Term:
        """A side of a comparison: arithmetic stays, aggregates and records' insides are hoisted."""
        if isinstance(term, Op):
            return replace(term, args=tuple(self._side(a, rename) for a in term.args))
        return self.flat(term, rename)

    def flat(self, term: Term, rename: dict[str, str] | None) -> Term:
        match term:
            case Var():
                return replace(term, name=rename.get(term.name, term.name)) if rename else term
            case Rec():
                return replace(term, items=tuple(self.flat(i, rename) for i in term.items))
            case Op():
                _refuse_wildcards(term, "arithmetic")
                expression = self._side(term, rename)
                var = Var(term_text(expression), term.pos)
                if rename is not None or var.name not in self.done:
                    self.hoisted[var.name] = Cmp("=", var, expression, term.pos)
                return var
            case Agg():
                return self._aggregate(term, rename)
            case _:
                return term

    def _aggregate(self, agg: Agg, rename: dict[str, str] | None) -> Var:
        if rename is not None:
            raise RuleError("an aggregate inside an aggregate is outside the Datalog subset", str(agg.pos))
        inner_terms = [t for literal in agg.body for t in literal_terms(literal)]
        if agg.target is not None:
            inner_terms.append(agg.target)
        names = {v.name for t in inner_terms for v in variables(t, into_aggregates=True)}
        shared = names & self.outer
        if agg.target is not None:
            _refuse_wildcards(agg.target, "the head of an aggregate")
            for var in variables(agg.target):
                if var.name in shared:
                    raise RuleError(
                        f"the aggregated variable '{var.name}' is also used outside the aggregate; rename it",
                        str(var.pos),
                    )
        if agg.op in ("count", "sum"):
            _check_counted_wildcards(agg)
        self.aggregates += 1
        rename = {name: f"{name}@{self.aggregates}" for name in names - shared}
        outer_hoisted, self.hoisted = self.hoisted, {}
        body: list[Literal] = []
        for literal in agg.body:
            step = self.literal(literal, rename)
            for extra in self.hoisted.values():
                assert isinstance(extra, Cmp)
                body.append(extra)
            self.hoisted = {}
            body.append(self._name_wildcards(step))
        target = None if agg.target is None else self._side(agg.target, rename)
        self.hoisted = outer_hoisted
        lowered = replace(agg, target=target, body=tuple(body))
        var = Var(f"{term_text(agg)}#{self.aggregates}", agg.pos)
        self.hoisted[var.name] = Assign(var, lowered, frozenset(shared))
        return var

    def _name_wildcards(self, literal: Atom | Neg | Cmp) -> Atom | Neg | Cmp:
        """In an aggregate every match counts, so ``_`` of a positive atom is a variable like any other."""
        if not isinstance(literal, Atom):
            return literal
        named, self.wildcards = name_wildcards(literal, self.wildcards, "_@")
        return named


def _check_counted_wildcards(agg: Agg) -> None:
    """Raises RuleError where Soufflé would count ``_`` differently: it projects ``_`` away in all but simple bodies."""
    positive = [literal for literal in agg.body if isinstance(literal, Atom)]
    simple = len(positive) == 1 and not any(isinstance(a, (Op, Rec)) for a in positive[0].args)
    if simple:
        names = [a.name for a in positive[0].args if isinstance(a, Var)]
        simple = len(names) == len(set(names))
    wild = [a for atom in positive for arg in atom.args for a in subterms(arg) if isinstance(a, Wild)]
    if wild and not simple:
        raise RuleError(
            f"'_' in this '{agg.op}' is read differently by Soufflé, which joins before it counts; name the variable",
            str(wild[0].pos),
        )


def name_wildcards(atom: Atom, count: int, prefix: str) -> tuple[Atom, int]:
    """``atom`` with its wildcards named ``prefix1``, ``prefix2``, ..., and the last number used."""

    def name(term: Term) -> Term:
        nonlocal count
        if isinstance(term, Wild):
            count += 1
            return Var(f"{prefix}{count}", term.pos)
        if isinstance(term, Rec):
            return replace(term, items=tuple(name(i) for i in term.items))
        return term

    return replace(atom, args=tuple(name(a) for a in atom.args)), count


def with_named_wildcards(rule: Rule) -> Rule:
    """``rule`` with the wildcards of its premises named ``_#n``, so that an instance makes all premises ground."""
    count = 0
    body: list[Step] = []
    names: dict[str, None] = {}
    for step in rule.body:
        if isinstance(step, Atom):
            step, count = name_wildcards(step, count, "_#")
        elif isinstance(step, Cmp):
            left, count = _name_in_pattern(step.left, count)
            right, count = _name_in_pattern(step.right, count)
            step = replace(step, left=left, right=right)
        body.append(step)
    for step in body:
        for term in (step.var,) if isinstance(step, Assign) else literal_terms(step):
            names.update((v.name, None) for v in variables(term))
    names.update((v, None) for v in rule.variables)
    return replace(rule, body=tuple(body), variables=tuple(names))


def _name_in_pattern(term: Term, count: int) -> tuple[Term, int]:
    if not isinstance(term, Rec):
        return term, count
    atom, count = name_wildcards(Atom("", (term,), term.pos), count, "_#")
    return atom.args[0], count


def _refuse_wildcards(term: Term, where: str) -> None:
    """Raises RuleError when ``_`` occurs in ``term``, outside aggregates."""
    match term:
        case Wild():
            raise RuleError(f"'_' has no meaning in {where}; name the variable", str(term.pos))
        case Rec():
            for item in term.items:
                _refuse_wildcards(item, where)
        case Op():
            for arg in term.args:
                _refuse_wildcards(arg, where)
        case _:
            pass
