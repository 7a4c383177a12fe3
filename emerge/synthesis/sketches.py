"""Left sides of laws of exchange, sketches of right sides, and the expressions that may stand in them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations, permutations
from typing import Any

from emerge.algebra.rulefile import CONSTRUCTORS, App, Lit, Term, Var
from emerge.synthesis.ground import ENOUGH, Terrain
from emerge.synthesis.terms import write

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
        for term in operators_in(self.pattern):
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


def operators_in(term: Term) -> Iterator[App]:
    """The operators of a term, the outermost first."""
    if isinstance(term, App) and term.op in CONSTRUCTORS:
        yield term
        for a in term.args:
            yield from operators_in(a)


def casts(term: Term) -> list[str]:
    """Conversions of a term, a range of floats being one of whole numbers: none may get lost, for they round, and a whole
    number is not the float of the same value."""
    found = []
    for t in operators_in(term):
        for kind, a in zip(KINDS[t.op], t.args):
            if (kind == "kind" and a != Lit("int")) or (kind == "body1" and _is_parametric(a)):
                found.append("cast")
    return found


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
