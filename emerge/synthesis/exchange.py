"""Laws of exchange: how an operator moves past the one that makes its operand.

Two tensors with the same values are computed by different operators in a different order: one side looks up a table of
cosines, the other takes the cosine of what was looked up. For two neighbouring operators of such a term this module writes the
left side with every size, bound, dimension, constant and function as a variable, and tries right sides of at most three
operators: the inner operator drops out, the outer one does, they change places, or another operator of these terms does both.
What the right side needs is an expression over the variables of the left. Small random ground terms, of shapes that have
nothing to do with the pair, decide among the expressions and find the side condition; the certifier decides then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, product

from emerge.algebra.rulefile import CONSTRUCTORS, App, Lit, Term, Var
from emerge.synthesis.ground import ENOUGH, QUICK, Terrain, computing, decided
from emerge.synthesis.sketches import Left, Place, Pools, casts, lefts, operators_in, sketches

#: So many right sides are handed to the certifier per left side, and so many are tried.
MOST_OFFERED, MOST_TRIED, MOST_PARTIAL = 3, 3000, 12
#: Whole numbers up to here are exact in 32-bit floats.
EXACT = 1 << 24


@dataclass(frozen=True)
class Law:
    """A rewrite with its side conditions, not validated."""

    left: App
    right: Term
    when: tuple[Term, ...] = ()


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
            size = sum(1 for _ in operators_in(right))
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
    terms = [*operators_in(left.pattern), *operators_in(right)]
    texts = {str(a.value) for t in terms for a in t.args if isinstance(a, Lit)}
    whole = sum(t.op == "Range" for t in operators_in(left.pattern)) == sum(t.op == "Range" for t in operators_in(right))
    if not any(t.startswith("cast") for t in texts) and (whole or "float" not in texts):
        return ()
    made: list[Term] = []
    for term in operators_in(left.pattern):
        if term.op == "Range":
            _, start, step, n = term.args
            made += [App(">=", (a, Lit(0))) for a in (start, step) if not isinstance(a, Lit)]
            made.append(App("<=", (App("+", (start, App("*", (step, n)))), Lit(EXACT))))
    return tuple(made)
