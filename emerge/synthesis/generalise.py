"""From two tensors with the same values to a rewrite that holds for all shapes, or nothing.

Both terms are cut out down to tensors that are aligned. Their operands become variables. Rearrangements are how the two
sides differ without computing anything else, so the right side is written in the places of the left: rearrangements move
inwards to the variables, where they must be those of the left side. Where operators depend on dimensions, both tensors must
have the same shape, and every dimension on the right must stand on the left too: a rule holds no size of the graph it
was found in.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import numpy as np

from emerge.algebra.encode import rational as rational_text
from emerge.algebra.rulefile import CONSTRUCTORS, App, Lit, Term, Var, rational
from emerge.facts.lower import Lowering, Tensor
from emerge.rules.term_values import NoValue, place
from emerge.synthesis.exchange import Law
from emerge.synthesis.terms import (
    LAYOUT,
    POINTWISE,
    NoTerm,
    TooLarge,
    bare,
    cheapest,
    condition,
    constants,
    constructors,
    cut,
    formula,
    operators,
    parse,
    vector,
    write,
)
from emerge.synthesis.values import Executed, Matching

#: A rule spans at most so many operators on a side, and at most one block so.
MOST_NODES = 24
#: How often a cut is moved further down.
MOST_CUTS = 6


@dataclass
class Side:
    """One side while rules are looked for.

    Attributes:
        aligned: roots with an alignment. root: of every tensor.
        chosen: tensor -> the equal one with the simplest term.
    """

    low: Lowering
    number: int
    aligned: frozenset[int]
    root: Mapping[int, int]
    executed: Executed
    chosen: Mapping[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.chosen = cheapest(self.low, self.is_aligned)

    def is_aligned(self, tensor: Tensor) -> bool:
        """Whether a tensor, or what it rearranges, has an alignment."""
        return self.root.get(tensor.id, tensor.id) in self.aligned


@dataclass(frozen=True)
class Proposal:
    """A rewrite that has not been validated.

    Attributes:
        canonical: both sides with variables named in order; equal for rules that differ in names only.
        left, right: terms over the same variables.
        when: side conditions.
    """

    left: Term
    right: Term
    canonical: str
    when: tuple[Term, ...] = ()

    @property
    def name(self) -> str:
        """A name that only this rule has."""
        words = [w for w in re.findall(r'Map\d "([a-z_]+)', write(self.left)) if w not in ("mul", "add")]
        words = words or [c.lower() for c in constructors(self.left) if not c.startswith("Map")]
        head = "-".join(["synth", *words[:2]]).replace("_", "-")
        return f"{head}-{hashlib.sha256(self.canonical.encode()).hexdigest()[:8]}"

    @property
    def meaning(self) -> str:
        """The equation."""
        when = f" where {', '.join(map(condition, self.when))}" if self.when else ""
        return f"{bare(formula(self.left))} = {bare(formula(self.right))}{when}"

    def text(self) -> str:
        """The rule as it stands in a file."""
        return (
            f"; @meaning {self.meaning}\n(rewrite {write(self.left)}\n  {write(self.right)}\n"
            f'  {f":when ({chr(32).join(map(write, self.when))}) " if self.when else ""}'
            f':ruleset algebra :name "{self.name}")\n'
        )


@dataclass
class _Leaf:
    """A variable under the rearrangements above it: its term, and its values per draw and rank."""

    term: Term
    values: list[list[Any]]


@dataclass
class _Cut:
    """One term, with its variables.

    Attributes:
        leaves: tensors at which it was cut, by name. shown: variable -> what it is in terms of them.
        pushed: the term with all rearrangements moved to its variables; ``effective``: those variables.
    """

    side: Side
    tensor: Tensor
    term: Term
    leaves: dict[str, Tensor]
    shown: dict[str, Term] = field(default_factory=dict)
    pushed: Term = field(default_factory=lambda: Lit(0))
    effective: dict[str, _Leaf] = field(default_factory=dict)

    @property
    def pointwise(self) -> bool:
        return all(c in POINTWISE or c in LAYOUT for c in constructors(self.term))


def proposals(ref: Side, imp: Side, s: Tensor, d: Tensor, matching: Matching) -> Iterator[Proposal]:
    """Rewrites that would make two tensors with the same values equal, the nearest cut first."""
    opened: dict[int, set[int]] = {1: set(), 2: set()}
    for _ in range(MOST_CUTS):
        try:
            left, right = _cut(ref, s, opened[1]), _cut(imp, d, opened[2])
        except (NoTerm, TooLarge, NoValue, ValueError):
            return
        pairs = _pairs(left, right, matching)
        yield from _written(left, right, pairs)
        lone_left = [n for n in left.effective if n not in {a for a, _ in pairs}]
        lone_right = [n for n in right.effective if n not in {b for _, b in pairs}]
        grown = False
        for side, one, lone in ((ref, left, lone_left), (imp, right, lone_right)):
            grown |= _open(side, one, lone, opened[side.number])
        if not grown:
            for side, one in ((ref, left), (imp, right)):
                grown |= _open(side, one, list(one.effective), opened[side.number])
        if not grown:
            return


def _cut(side: Side, tensor: Tensor, opened: set[int]) -> _Cut:
    term, leaves = cut(side.low, tensor, lambda t: side.is_aligned(t) and t.id not in opened, side.chosen, MOST_NODES)
    made = _Cut(side, tensor, term, leaves)
    made.term = _collapsed(made, term)
    if made.pointwise:
        made.pushed = _push(made, made.term, [])
    else:
        made.pushed = made.term
        for name in made.shown:
            made.effective[name] = _Leaf(Var(name), _shown_values(made, name))
    return made


def _collapsed(made: _Cut, term: Term) -> Term:
    """The term with every rearranged variable as one variable, whose name is its text."""
    if isinstance(term, App) and term.op in CONSTRUCTORS:
        term = App(term.op, tuple(_collapsed(made, a) if _is_tensor(a) else a for a in term.args))
        inner = term.args[0]
        if term.op not in LAYOUT or not isinstance(inner, Var):
            return term
        term = App(term.op, (made.shown.pop(inner.name, inner), *term.args[1:]))
    if isinstance(term, (Var, App)):
        name = write(term)
        made.shown[name] = term
        return Var(name)
    return term


def _shown_values(made: _Cut, name: str) -> list[list[Any]]:
    """Values of a variable."""

    def at(term: Term) -> list[list[Any]]:
        if isinstance(term, Var):
            return _values(made.side, made.leaves[term.name])
        assert isinstance(term, App)
        return [[_rearranged(v, term) for v in per] for per in at(term.args[0])]

    return at(made.shown[name])


def _values(side: Side, tensor: Tensor) -> list[list[Any]]:
    found = side.executed.of(side.number, tensor.id)
    if found is None:
        raise NoValue("not executed")
    return found


def _push(made: _Cut, term: Term, above: list[App]) -> Term:
    """The term with its rearrangements moved to the variables; ``above``: those over it, the outermost first."""
    if isinstance(term, Var):
        shown: Term = term
        values = _shown_values(made, term.name)
        for layout in reversed(above):
            shown = App(layout.op, (shown, *layout.args[1:]))
            values = [[_rearranged(v, layout) for v in per] for per in values]
        made.effective.setdefault(write(shown), _Leaf(shown, values))
        return Var(write(shown))
    assert isinstance(term, App)
    if term.op in LAYOUT:
        return _push(made, term.args[0], [*above, term])
    return App(term.op, tuple(_push(made, a, above) if _is_tensor(a) else a for a in term.args))


def _is_tensor(term: Term) -> bool:
    return isinstance(term, Var) or (isinstance(term, App) and term.op in CONSTRUCTORS)


def _rearranged(value: Any, layout: App) -> Any:
    import torch

    dims = vector(layout.args[1])
    assert dims is not None
    if layout.op == "View":
        return value.reshape(dims)
    shape = vector(layout.args[2])
    assert shape is not None
    return place(torch.from_numpy(np.ascontiguousarray(value)), dims, shape).numpy()


def _open(side: Side, made: _Cut, names: Sequence[str], opened: set[int]) -> bool:
    """Moves the cut below variables; whether anything changed."""
    grown = False
    for name in names:
        for base, tensor in made.leaves.items():
            recipe = side.low.recipes.get(tensor.id)
            if base in re.findall(r"\$t\d+", name) and recipe is not None and tensor.id not in opened:
                opened.add(tensor.id)
                grown = True
    return grown


def _pairs(left: _Cut, right: _Cut, matching: Matching) -> list[tuple[str, str]]:
    """Variables of both terms that hold the same values at the same places."""
    found = []
    for a, one in left.effective.items():
        for b, other in right.effective.items():
            if left.pointwise and right.pointwise:
                same = matching.carries(one.values, other.values)
            else:
                same = matching.identity and _equal(one.values, other.values)
            if same:
                found.append((a, b))
    return found


def _equal(one: list[list[Any]], other: list[list[Any]]) -> bool:
    for (a,), (b,) in zip(one, other):
        if a.shape != b.shape or not np.allclose(a, b, rtol=1e-11, atol=1e-11 * float(np.abs(a).max(initial=0.0))):
            return False
    return True


def _written(left: _Cut, right: _Cut, pairs: list[tuple[str, str]]) -> Iterator[Proposal]:
    """The rewrites of a cut, in the direction in which all variables are known."""
    if not operators(left.term) or not operators(right.term):
        return
    for one, other, known in ((left, right, pairs), (right, left, [(b, a) for a, b in pairs])):
        names: dict[str, str] = {}
        for a, b in sorted(known, key=lambda p: len(p[0])):
            names.setdefault(b, a)
        if any(n not in names for n in other.effective):
            continue
        for generous in (True, False):
            made = _proposal(one, other, names, generous)
            if made is not None:
                yield made


def _proposal(one: _Cut, other: _Cut, names: dict[str, str], general: bool) -> Proposal | None:
    """``one`` rewritten to ``other``; None where sizes of the graph would stand in it, or nothing is rewritten.

    Args:
        names: variable of ``other`` -> that of ``one``. general: constants on both sides become variables.
    """
    shared = {c for _, c in constants(one.term)} & {c for _, c in constants(other.term)}
    if general and not shared:
        return None
    scheme = _Scheme(shared if general else set())
    left = scheme.pattern(one.term)
    if other.pointwise and one.pointwise:
        right = scheme.use(_renamed(other.pushed, {n: one.effective[names[n]].term for n in other.effective}))
    else:
        right = scheme.use(_renamed(other.term, {n: Var(names[n]) for n in other.effective}))
    if right is None or not isinstance(left, App) or write(left) == write(right):
        return None
    if not general and any(op == "Scale" and _is_size(one, c) for t in (one.term, other.term) for op, c in constants(t)):
        return None
    return _proposed(left, right)


def _proposed(left: App, right: Term, when: tuple[Term, ...] = ()) -> Proposal:
    return Proposal(left, right, " ".join([f"{write(left)} => {write(right)}", *map(write, when)]), when)


def of_law(law: Law) -> Proposal:
    """A law of exchange as a proposal."""
    return _proposed(law.left, law.right, law.when)


def inner(proposal: Proposal) -> Proposal | None:
    """The proposal without what both sides have around it in common; None where there is nothing of that kind."""
    left, right = proposal.left, proposal.right
    while isinstance(left, App) and isinstance(right, App) and left.op == right.op and len(left.args) == len(right.args):
        differing = [(a, b) for a, b in zip(left.args, right.args) if a != b]
        if len(differing) != 1 or not all(isinstance(t, App) and t.op in CONSTRUCTORS for t in differing[0]):
            break
        left, right = differing[0]
    if left == proposal.left or not isinstance(left, App) or not operators(left) or not operators(right):
        return None
    if not set(_variables(right)) <= set(_variables(left)):
        return None
    return _renumbered(left, right)


def _renumbered(left: App, right: Term) -> Proposal:
    names: dict[str, Term] = {}
    counts: dict[str, int] = {}
    for name in _variables(left):
        if name not in names:
            kind = name[0] if re.fullmatch(r"[cdn]\d+", name) else ""
            k = counts[kind] = counts.get(kind, 0) + 1
            names[name] = Var(f"{kind}{k}" if kind else _letter(k - 1))

    def fresh(term: Term) -> Term:
        if isinstance(term, Var):
            return names[term.name]
        return App(term.op, tuple(map(fresh, term.args))) if isinstance(term, App) else term

    made = fresh(left)
    assert isinstance(made, App)
    return _proposed(made, fresh(right))


def _letter(k: int) -> str:
    letters = "xyzuvwabcdefgh"
    return letters[k] if k < len(letters) else f"x{k}"


def reverse(proposal: Proposal) -> Proposal | None:
    """The proposal read from right to left, where that can be a rule."""
    right = proposal.right
    if not isinstance(right, App) or not set(_variables(proposal.left)) <= set(_variables(right)):
        return None
    return _renumbered(right, proposal.left)


def is_instance(proposal: Proposal, rule: Proposal) -> bool:
    """Whether a rule says what a proposal says, once terms are put for its variables."""
    return (not rule.when or rule.when == proposal.when) and stands_for(
        (rule.left, rule.right), (proposal.left, proposal.right)
    )


def stands_for(patterns: Sequence[Term], terms: Sequence[Term]) -> bool:
    """Whether terms put for the variables of the patterns give the terms."""
    put: dict[str, Term] = {}

    def fits(pattern: Term, term: Term) -> bool:
        if isinstance(pattern, Var):
            return put.setdefault(pattern.name, term) == term
        if isinstance(pattern, App) and isinstance(term, App):
            alike = pattern.op == term.op and len(pattern.args) == len(term.args)
            return alike and all(map(fits, pattern.args, term.args))
        return pattern == term

    return all(map(fits, patterns, terms))


def _variables(term: Term) -> Iterator[str]:
    if isinstance(term, Var):
        yield term.name
    elif isinstance(term, App):
        for a in term.args:
            yield from _variables(a)


def _is_size(made: _Cut, c: Fraction) -> bool:
    """Whether a constant is one over a size of the tensors at hand, as in a mean."""
    sizes = {n for t in (made.tensor, *made.leaves.values()) for n in t.shape if n > 2}
    return c.numerator == 1 and c.denominator in sizes


def _renamed(term: Term, names: Mapping[str, Term]) -> Term:
    if isinstance(term, Var):
        return names[term.name]
    return App(term.op, tuple(_renamed(a, names) if _is_tensor(a) else a for a in term.args)) if isinstance(
        term, App
    ) else term


def _exact(c: Fraction) -> Term:
    """A constant; numbers that fit a machine word are written as such."""
    if max(abs(c.numerator), c.denominator) < 1 << 62:
        return App("bigrat", (App("bigint", (Lit(c.numerator),)), App("bigint", (Lit(c.denominator),))))
    return parse(rational_text(c))


class _Scheme:
    """Names for what a pattern leaves open: tensors, dimensions, numbers, constants."""

    def __init__(self, shared: set[Fraction]) -> None:
        self.shared = shared
        self.tensors: dict[str, str] = {}
        self.dims: dict[tuple[int, ...], str] = {}
        self.numbers: dict[int, str] = {}
        self.factors: dict[Fraction, str] = {}

    def pattern(self, term: Term) -> Term:
        """The left side: everything that is no operator becomes a variable."""
        if isinstance(term, Var):
            return Var(self.tensors.setdefault(term.name, _letter(len(self.tensors))))
        if isinstance(term, Lit):
            if isinstance(term.value, int):
                return Var(self.numbers.setdefault(term.value, f"n{len(self.numbers) + 1}"))
            return term
        dims = vector(term)
        if dims is not None:
            return Var(self.dims.setdefault(dims, f"d{len(self.dims) + 1}"))
        constant = rational(term)
        if constant is not None:
            if constant in self.shared:
                return Var(self.factors.setdefault(constant, f"c{len(self.factors) + 1}"))
            return _exact(constant)
        return App(term.op, tuple(map(self.pattern, term.args)))

    def use(self, term: Term) -> Term | None:
        """The right side; None where it holds a dimension or number that the left side does not give."""
        if isinstance(term, Var):
            found = self.tensors.get(term.name)
            return None if found is None else Var(found)
        if isinstance(term, Lit):
            if isinstance(term.value, int):
                return Var(self.numbers[term.value]) if term.value in self.numbers else None
            return term
        dims = vector(term)
        if dims is not None:
            return Var(self.dims[dims]) if dims in self.dims else None
        constant = rational(term)
        if constant is not None:
            return Var(self.factors[constant]) if constant in self.factors else _exact(constant)
        args = [self.use(a) for a in term.args]
        return None if any(a is None for a in args) else App(term.op, tuple(a for a in args if a is not None))
