"""Laws of exchange: how an operator moves past the one that makes its operand.

Two tensors with the same values are computed by different operators in a different order: one side looks up a table of
cosines, the other takes the cosine of what was looked up. For two neighbouring operators of such a term this module writes the
left side with every size, bound, dimension, constant and function as a variable, and tries right sides of at most three
operators: the inner operator drops out, the outer one does, they change places, or another operator of these terms does both.
What the right side needs is an expression over the variables of the left. Small random ground terms, of shapes that have
nothing to do with the pair, decide among the expressions and find the side condition; the certifier decides then.
"""

from __future__ import annotations

import operator
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations, permutations, product
from typing import Any

from emerge.algebra.rulefile import CONSTRUCTORS, App, EqualityRule, Lit, Term, Var, rational
from emerge.rules.term_instances import Filler, Ground, Retry
from emerge.rules.term_values import NoValue, Value, difference, evaluate, leaf
from emerge.synthesis.terms import vector, write

#: Ground terms per left side; a right side must hold on so many of them, and on one of the first ``QUICK``.
GROUND, ENOUGH, QUICK = 44, 8, 10
#: So many right sides are handed to the certifier per left side, and so many are tried.
MOST_OFFERED, MOST_TRIED, MOST_PARTIAL = 3, 3000, 12
#: Whole numbers up to here are exact in 32-bit floats.
EXACT = 1 << 24

#: Kind of every argument that is no tensor: what may stand there on the right.
KINDS: dict[str, tuple[str, ...]] = {
    "Map1": ("body1", ""), "Map2": ("body2", "", ""), "Map3": ("body3", "", "", ""), "Scale": ("factor", ""),
    "Shift": ("factor", ""), "Place": ("", "dims", "shape"), "View": ("", "shape"),
    "Slice": ("", "axis", "bound", "bound"), "Cat": ("", "", "axis"), "Fold": ("fold", "role", "", "dims", "shape"),
    "Einsum": ("spec", "", "", "shape"), "Along": ("along", "role", "", "axis"), "Range": ("kind", "bound", "step", "bound"),
    "Lookup": ("", "", "axis"),
}  # fmt: skip

#: Laws move an operator one way only, or saturation would not end: of two neighbours the one named first goes inside. A right
#: side of fewer operators than the left is always welcome.
INWARD = {"Slice": 0, "Lookup": 1, "Fold": 2, "Einsum": 2, "Along": 2, "Map1": 3, "Map2": 3, "Map3": 3, "Shift": 3, "Range": 3,
          "Cat": 4, "Place": 5, "View": 6, "Scale": 7}  # fmt: skip


@dataclass(frozen=True)
class Law:
    """A rewrite with its side conditions, not validated."""

    left: App
    right: Term
    when: tuple[Term, ...] = ()


@dataclass
class Place:
    """Two neighbouring operators of a graph.

    Attributes:
        term: the outer operator over the inner one over tensors, with the sizes of the graph.
        shapes: of those tensors. at: which operand of the outer one the inner one is.
    """

    term: App
    at: int
    shapes: Mapping[str, tuple[int, ...]]

    @property
    def inner(self) -> App:
        found = self.term.args[self.at]
        assert isinstance(found, App)
        return found

    @property
    def key(self) -> str:
        """Equal for places at which the same laws could hold: the operators, and the dimensions that they work on."""
        return f"{_head(self.term)} at {self.at}: {_head(self.inner)}"


def _head(term: App) -> str:
    return " ".join([term.op, *(write(a) for k, a in zip(KINDS[term.op], term.args) if k not in ("", "shape", "bound"))])


def tensors_of(term: App) -> list[int]:
    """Positions of the arguments that are tensors."""
    return [k for k, sort in enumerate(CONSTRUCTORS[term.op]) if sort == "Value"]


# ---- left sides -----------------------------------------------------------------------------------------------------


@dataclass
class Left:
    """A left side, from most general to least.

    Attributes:
        pattern: with variables. bound: variable -> what stands there in the graph. kinds: variable -> kind of argument.
    """

    pattern: App
    bound: dict[str, Any]
    kinds: dict[str, str]
    tensors: list[str] = field(default_factory=list)

    def of_kind(self, *kinds: str) -> list[Term]:
        """Variables and literals of a kind, in order."""
        found: list[Term] = [Var(n) for n, k in self.kinds.items() if k in kinds]
        for term in _terms(self.pattern):
            for kind, a in zip(KINDS[term.op], term.args):
                if kind in kinds and isinstance(a, Lit) and a not in found:
                    found.append(a)
        return found


_LETTERS = {"": "xyzuvw", "axis": "d", "bound": "i", "step": "s", "dims": "p", "shape": "t", "factor": "c",
            "body1": "f", "body2": "f", "body3": "f", "kind": "k"}  # fmt: skip


def lefts(place: Place) -> Iterator[Left]:
    """Left sides of a place, the most general first: functions as variables, then as they are, then small numbers too."""
    made: list[App] = []
    for open_bodies, open_numbers in ((True, ("bound", "step")), (False, ("bound", "step")), (False, ("bound",)), (False, ())):
        found = _left(place, open_bodies, open_numbers)
        if found.pattern not in made:
            made.append(found.pattern)
            yield found


def _left(place: Place, open_bodies: bool, open_numbers: Sequence[str]) -> Left:
    bound: dict[str, Any] = {}
    kinds: dict[str, str] = {}
    tensors: list[str] = []

    def name(kind: str) -> str:
        letters = _LETTERS[kind]
        k = sum(_LETTERS[other] == letters for other in kinds.values())
        return letters[k] if len(letters) > 1 else f"{letters}{k + 1}"

    def build(term: App, inside: int | None) -> App:
        args: list[Term] = []
        for k, (kind, a) in enumerate(zip(KINDS[term.op], term.args)):
            literal = isinstance(a, Lit)
            if not kind and k == inside:
                assert isinstance(a, App)
                args.append(build(a, None))
                continue
            fixed = kind in ("fold", "role", "spec", "along") or (
                (kind.startswith("body") or kind == "kind") and (not open_bodies or _is_parametric(a))
            )
            small = literal and term.op == "Range" and kind not in open_numbers and a.value in (0, 1)
            if fixed or small:
                args.append(a)
                continue
            same = [n for n, v in bound.items() if not kind and v == a] if isinstance(a, Var) else []
            fresh = same[0] if same else name(kind)
            kinds[fresh], bound[fresh] = kind, a
            if not kind and fresh not in tensors:
                tensors.append(fresh)
            args.append(Var(fresh))
        return App(term.op, tuple(args))

    pattern = build(place.term, place.at)
    return Left(pattern, bound, kinds, tensors)


def _is_parametric(a: Term) -> bool:
    """Bodies that are conversions: what they do depends on the operand's type."""
    return isinstance(a, Lit) and str(a.value).startswith("cast")


def _terms(term: Term) -> Iterator[App]:
    if isinstance(term, App) and term.op in CONSTRUCTORS:
        yield term
        for a in term.args:
            yield from _terms(a)


# ---- right sides ----------------------------------------------------------------------------------------------------


def sketches(left: Left, at: int, heads: Sequence[App]) -> Iterator[Term]:
    """Right sides with holes ``?kind:wanted`` for what is not a tensor.

    Args:
        heads: further operators that may stand there.
    """
    outer = left.pattern
    inner = outer.args[at]
    assert isinstance(inner, App)
    xs = [inner.args[k] for k in tensors_of(inner)]
    others = [outer.args[k] for k in tensors_of(outer) if k != at]

    def over(x: Term) -> App:
        """The outer operator over another operand, the others as they are."""
        return _holed(outer, {k: (x if k == at else outer.args[k]) for k in tensors_of(outer)})

    def under(operands: Sequence[Term]) -> App:
        return _holed(inner, dict(zip(tensors_of(inner), operands)))

    inward = INWARD[outer.op] < INWARD[inner.op]
    if xs and inward:
        yield under([over(x) for x in xs])
    for x in xs:
        yield over(x)
    if len(xs) > 1 and inward:
        for k in range(len(xs)):
            yield under([over(x) if j == k else x for j, x in enumerate(xs)])
    if len(xs) == 1 and others and inward:
        wrapped = {k: (xs[0] if k == at else under([outer.args[k]])) for k in tensors_of(outer)}
        yield under([_holed(outer, wrapped)])
    yield under(xs)
    if inner.op == "Range" and _is_parametric(outer.args[0]) and str(outer.args[0].value).startswith("cast#float"):
        made = under([])
        yield App("Range", (Lit("float"), *made.args[1:]))
    available = [*xs, *others]
    for head in heads:
        spots = tensors_of(head)
        for chosen in permutations(available, len(spots)) if len(spots) <= len(available) else ():
            yield _holed(head, dict(zip(spots, chosen)), True)
    yield from available


def _holed(term: App, operands: Mapping[int, Term], foreign: bool = False) -> App:
    """An operator with holes for all that is no operand; an operator from elsewhere keeps its strings."""
    args: list[Term] = []
    for k, (kind, a) in enumerate(zip(KINDS[term.op], term.args)):
        if k in operands:
            args.append(operands[k])
        elif (isinstance(a, Lit) and isinstance(a.value, str)) or kind.startswith("body") or kind == "kind":
            args.append(a)
        else:
            first = f"!{k}" if foreign else _written(a)
            args.append(Var(f"?{kind}:{first}"))
    return App(term.op, tuple(args))


def _written(a: Term) -> str:
    return a.name if isinstance(a, Var) else ""


class Pools:
    """What may stand in a hole: expressions over the variables of the left side, the likeliest first."""

    def __init__(self, left: Left) -> None:
        get: Callable[..., App] = lambda v, k: App("vec-get", (v, k))  # noqa: E731
        tensors: list[Term] = [Var(n) for n in left.tensors]
        axes = left.of_kind("axis")
        dims, shapes = left.of_kind("dims"), left.of_kind("shape")
        bounds, steps = left.of_kind("bound"), left.of_kind("step")
        self.axes = axes
        moved = [get(p, a) for p in dims for a in axes]
        sizes = [get(App("shape", (x,)), a) for x in tensors for a in axes]
        plus = [App("+", pair) for pair in combinations(bounds, 2)]
        minus = [App("-", pair) for pair in permutations(bounds, 2)]
        far = [App("-", pair) for b in bounds for s in sizes for pair in ((b, s), (s, b))]
        far += [App("+", (b, s)) for b in bounds for s in sizes]
        strided = [App("+", (a, App("*", (s, b)))) for a in bounds for b in bounds for s in steps if a != b]
        lengths = [get(App("shape", (x,)), Lit(0)) for x in tensors]
        whole: list[Term] = [App("shape", (x,)) for x in tensors]
        spans: list[Term] = [*sizes, *minus, *lengths, *plus]
        changed = [App("vec-set", (t, a, n)) for t in [*shapes, *whole] for a in axes for n in spans]
        factors = left.of_kind("factor")
        one = App("bigrat", (App("bigint", (Lit(1),)), App("bigint", (Lit(1),))))
        self.options: dict[str, list[Term]] = {
            "axis": [*axes, *moved, Lit(0)],
            "bound": [*bounds, Lit(0), *sizes, *plus, *minus, *strided, *far, *lengths],
            "step": [*steps, Lit(1), *(App("*", pair) for pair in combinations(steps, 2))],
            "dims": dims,
            "shape": [*shapes, *whole, *changed],
            "factor": [*factors, *(App(op, p) for op in ("*", "+") for p in combinations(factors, 2)),
                       *(App("/", (one, c)) for c in factors)],
        }  # fmt: skip
        self.moved, self.sizes, self.bounds, self.plus, self.steps = moved, sizes, bounds, plus, steps

    def narrow(self, ground: Terrain) -> None:
        """Leaves one of those expressions that have the same value on all ground terms, and none without a value."""
        for kind, options in self.options.items():
            seen: set[Any] = set()
            kept = []
            for option in options:
                values = [filler.compute(option) for filler in ground.fillers]
                fits = [v is not None and (kind != "bound" or v >= 0) for v in values]
                if kind == "factor":
                    fits = [v is not None for v in values]
                if sum(fits) >= ENOUGH and tuple(values) not in seen:
                    seen.add(tuple(values))
                    kept.append(option)
            self.options[kind] = kept

    def of(self, hole: str) -> list[Term]:
        """Expressions for a hole, what stands there on the left first."""
        kind, _, first = hole[1:].partition(":")
        found = self.options.get(kind, [])
        return sorted(found, key=lambda t: t != Var(first)) if first else found

    def guards(self) -> list[App]:
        """Side conditions to choose from."""
        made = [App(op, pair) for pair in combinations(self.axes, 2) for op in ("!=", "=")]
        made += [App("=", (m, Lit(-1))) for m in self.moved] + [App(">=", (m, Lit(0))) for m in self.moved]
        ends = [*self.bounds, *self.plus]
        made += [App("<=", (e, s)) for e in ends for s in self.sizes]
        made += [App(">=", (e, s)) for e in ends for s in self.sizes]
        made += [App(">=", (b, Lit(0))) for b in self.bounds]
        made += [App("=", (b, Lit(0))) for b in self.bounds]
        made += [App("=", (s, Lit(1))) for s in self.steps]
        return made


# ---- ground terms ---------------------------------------------------------------------------------------------------


class Terrain:
    """Ground terms of a left side, with their values."""

    def __init__(self, pattern: App, seed: int = 0) -> None:
        import torch

        rule = EqualityRule("exchange", "", "", "", False, (("", pattern),), (), (), (), False, "")
        rng = random.Random(f"{pattern} {seed}")
        generator = torch.Generator().manual_seed(seed + 77)
        self.fillers: list[Filler] = []
        self.leaves: list[dict[str, Value]] = []
        self.values: list[Value] = []
        for _ in range(GROUND * 30):
            if len(self.fillers) >= GROUND:
                break
            filler = Filler(rule, rng, 0, len(self.fillers))
            try:
                instance = filler.fill()
            except (Retry, ValueError):
                continue
            drawn = {}
            for n, (name, shape) in instance.leaves.items():
                if n in instance.indices:
                    x = torch.randint(0, instance.indices[n], shape, generator=generator).to(torch.float64)
                else:
                    x = torch.randn(shape, generator=generator, dtype=torch.float64)
                drawn[name] = leaf(x)
            try:
                value = self.value(pattern, filler, drawn)
            except NoValue:
                continue
            if bool((value.undefined | value.unsure).all()):
                continue
            self.fillers.append(filler)
            self.leaves.append(drawn)
            self.values.append(value)

    def value(self, term: Term, filler: Filler, leaves: Mapping[str, Value]) -> Any:
        """The value of a term on one ground term.

        Raises:
            NoValue: it has none.
        """
        if isinstance(term, Var) and term.name in leaves:
            return leaves[term.name]
        if isinstance(term, App) and term.op in CONSTRUCTORS:
            return evaluate(term.op, [self.value(a, filler, leaves) for a in term.args])
        found = filler.compute(term)
        if found is None:
            raise NoValue(str(term))
        return found

    def some_value(self, term: Term) -> bool:
        """Whether a term has a value on one of the first ground terms."""
        for k in range(min(QUICK, len(self.fillers))):
            try:
                self.value(term, self.fillers[k], self.leaves[k])
            except NoValue:
                continue
            return True
        return False

    def holds(self, term: Term, k: int) -> bool:
        """Whether a right side has the value of the left one on ground term ``k``."""
        try:
            found = self.value(term, self.fillers[k], self.leaves[k])
        except NoValue:
            return False
        return isinstance(found, Value) and found.shape == self.values[k].shape and difference(found, self.values[k]) is None

    def condition(self, guard: App, k: int) -> bool:
        """Whether a side condition holds on ground term ``k``."""
        return decided(guard, self.fillers[k].compute)


_COMPARED: dict[str, Callable[[Any, Any], bool]] = {
    "=": operator.eq, "!=": operator.ne, "<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge,
}  # fmt: skip


def decided(guard: App, compute: Callable[[Term], Any]) -> bool:
    """Whether a comparison holds; not where a side of it cannot be computed."""
    a, b = (compute(t) for t in guard.args)
    if a is None or b is None:
        return False
    return bool(_COMPARED[guard.op](a, b))


def laws(place: Place, heads: Sequence[App], in_time: Callable[[], bool]) -> Iterator[Law]:
    """Laws of exchange for a place, the best first: no side condition before one, few operators before many."""
    for left in lefts(place):
        ground = Terrain(left.pattern)
        if len(ground.fillers) < ENOUGH:
            continue
        found: list[tuple[tuple[int, ...], Law]] = []
        for order, (right, holding) in enumerate(_rights(left, place, heads, ground, in_time)):
            when = _conditions(left, place, ground, holding)
            if when is None:
                continue
            size = sum(1 for _ in _terms(right))
            rank = (len(when), -len(holding), size, order)
            lifted: dict[Term, str] = {}
            right = _lifted(right, lifted)
            equations = [App("=", (Var(n), t)) for t, n in lifted.items()]
            found.append((rank, Law(left.pattern, right, (*equations, *when, *_exactness(left, right)))))
        found.sort(key=lambda f: f[0])
        yield from (law for _, law in found[:MOST_OFFERED])
        if found:
            return  # a law for any function makes those for one superfluous; a refused one is not tried in special cases


def _rights(
    left: Left, place: Place, heads: Sequence[App], ground: Terrain, in_time: Callable[[], bool]
) -> Iterator[tuple[Term, list[int]]]:
    """Right sides that hold on some ground terms, and on which."""
    pools = Pools(left)
    pools.narrow(ground)
    for narrow, most in ((True, 8), (False, MOST_TRIED)):
        found = False
        for sketch in sketches(left, place.at, heads):
            partial: list[tuple[Term, list[int]]] = []
            for tried, right in enumerate(_candidates(sketch, pools, ground, narrow)):
                if tried >= most or not in_time():
                    break
                if right == left.pattern or casts(right) != casts(left.pattern):
                    continue
                if not any(ground.holds(right, k) for k in range(min(QUICK, len(ground.fillers)))):
                    continue
                holding = [k for k in range(len(ground.fillers)) if ground.holds(right, k)]
                if len(holding) == len(ground.fillers):
                    found = True
                    yield right, holding
                    break
                if len(holding) >= ENOUGH:
                    partial.append((right, holding))
            partial.sort(key=lambda p: -len(p[1]))
            yield from partial[:MOST_PARTIAL]
        if found:
            return


def casts(term: Term) -> list[str]:
    """Conversions of a term, a range of floats being one of whole numbers: none may get lost, for they round, and a whole
    number is not the float of the same value."""
    found = []
    for t in _terms(term):
        for kind, a in zip(KINDS[t.op], t.args):
            if (kind == "kind" and a != Lit("int")) or (kind == "body1" and _is_parametric(a)):
                found.append("cast")
    return found


def _candidates(sketch: Term, pools: Pools, ground: Terrain, narrow: bool) -> Iterator[Term]:
    """A sketch with its holes filled, operands before the operators over them: what has no value is not completed.

    Args:
        narrow: only what stands there on the left.
    """
    order = list(_inside_out(sketch))

    def fill(k: int, put: dict[str, Term]) -> Iterator[Term]:
        if k == len(order):
            yield _put(sketch, put)
            return
        open_ = [h for h in dict.fromkeys(a.name for a in order[k].args if _is_hole(a)) if h not in put]
        for chosen in product(*(pools.of(h)[: 1 if narrow else None] for h in open_)):
            more = put | dict(zip(open_, chosen))
            if k + 1 == len(order) or not open_ or ground.some_value(_put(order[k], more)):
                yield from fill(k + 1, more)

    yield from fill(0, {})


def _inside_out(term: Term) -> Iterator[App]:
    if isinstance(term, App) and term.op in CONSTRUCTORS:
        for a in term.args:
            yield from _inside_out(a)
        yield term


def _is_hole(term: Term) -> bool:
    return isinstance(term, Var) and term.name.startswith("?")


def _put(term: Term, put: Mapping[str, Term]) -> Term:
    if isinstance(term, Var):
        return put.get(term.name, term)
    return App(term.op, tuple(_put(a, put) for a in term.args)) if isinstance(term, App) else term


def _conditions(left: Left, place: Place, ground: Terrain, holding: list[int]) -> tuple[Term, ...] | None:
    """Side conditions that exclude the ground terms on which a right side does not hold; None where there are none.

    They must hold at the place of the graph.
    """
    failing = set(range(len(ground.fillers))) - set(holding)
    if not failing:
        return ()
    compute, _ = computing(left.bound, place.shapes)
    atoms = []
    for guard in Pools(left).guards():
        if not decided(guard, compute):
            continue
        true = {k for k in range(len(ground.fillers)) if ground.condition(guard, k)}
        if len(true & set(holding)) >= ENOUGH and failing - true:
            atoms.append((guard, true))
    best: tuple[int, tuple[Term, ...]] | None = None
    for count in (1, 2, 3):
        for chosen in combinations(atoms, count):
            true = set.intersection(*(t for _, t in chosen))
            kept = len(true & set(holding))
            if kept >= ENOUGH and not true & failing and (best is None or kept > best[0]):
                best = (kept, tuple(g for g, _ in chosen))
        if best is not None:
            return best[1]
    return None


def computing(
    bound: Mapping[str, Term], shapes: Mapping[str, tuple[int, ...]]
) -> tuple[Callable[[Term], Any], dict[str, Any]]:
    """Computes expressions over variables for which terms stand, and the values of those variables.

    Args:
        shapes: of the tensors that are named in ``bound``.
    """
    filler = Filler(EqualityRule("", "", "", "", False, (), (), (), (), False, ""), random.Random(0), 0)
    for name, term in bound.items():
        if isinstance(term, Var) and term.name in shapes:
            filler.env[name] = Ground("", tuple(shapes[term.name]))
        elif isinstance(term, Lit):
            filler.env[name] = term.value
        elif isinstance(term, App):
            constant = rational(term)
            filler.env[name] = constant if constant is not None else vector(term)
    return filler.compute, filler.env


def _lifted(term: Term, names: dict[Term, str]) -> Term:
    """A right side with a name for every entry of a shape or vector: an entry that is not there is then a condition that
    fails, and shapes may be read in conditions only."""
    if not isinstance(term, App):
        return term
    if term.op == "vec-get" or term.op == "shape":
        return Var(names.setdefault(term, f"n{len(names) + 1}"))
    return App(term.op, tuple(_lifted(a, names) for a in term.args))


def _exactness(left: Left, right: Term) -> tuple[Term, ...]:
    """Ranges that are converted to floats, or read where they are floats, must be exact: rounding would make a difference
    that no value of a ground term shows."""
    terms = [*_terms(left.pattern), *_terms(right)]
    texts = {str(a.value) for t in terms for a in t.args if isinstance(a, Lit)}
    whole = sum(t.op == "Range" for t in _terms(left.pattern)) == sum(t.op == "Range" for t in _terms(right))
    if not any(t.startswith("cast") for t in texts) and (whole or "float" not in texts):
        return ()
    made: list[Term] = []
    for term in _terms(left.pattern):
        if term.op == "Range":
            _, start, step, n = term.args
            made += [App(">=", (a, Lit(0))) for a in (start, step) if not isinstance(a, Lit)]
            made.append(App("<=", (App("+", (start, App("*", (step, n)))), Lit(EXACT))))
    return tuple(made)
