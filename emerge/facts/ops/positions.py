"""Positions: ranges seen through views, comparisons of ranges in one spelling, triangular and causal masks.

A causal mask has many spellings (``arange`` compared, ``tril``, ``triu``, a flag of fused attention, an offset that
depends on the rank). All become ``rows < columns`` of two ranges, negated or not, with the columns starting at 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import Any

from emerge.facts.families import FamilyNode
from emerge.facts.lower import Iter, Lowering, Tensor, Tie, Unsupported, lowers, result_dtype, whole
from emerge.facts.ops.layout import view
from emerge.graph.model import is_floating, is_integer


@lowers("aten.arange")
def arange(low: Lowering, node: FamilyNode, args: list[Any], kwargs: dict[str, Any]) -> Tensor:
    """Positions. Where the start is a multiple of the length per rank, the ranks together hold one longer range."""
    if node.shape is None or not isinstance(node.shape[0], int):
        raise Unsupported("its length depends on data")
    n = int(node.shape[0])
    start: Any = 0 if len(args) == 1 else args[0]
    step: Any = args[2] if len(args) > 2 else kwargs.get("step", 1)
    dtype = result_dtype(node, "int64")
    starts = low.integers(start)
    if starts is None or not isinstance(step, int):
        if isinstance(start, float) or isinstance(step, float):
            iters = [Iter(n, "pos", whole(n, 0))]
            return low.op(f"range#{start}#{step}#{n}", "iota", [], iters, [n], dtype)
        raise Unsupported("its bounds are not integers")
    if is_floating(dtype):  # the numbers of the integer range
        from emerge.facts.ops.pointwise import converted

        whole_numbers = positions(low, n, starts, step, "int64")
        found = low.recipes.get(whole_numbers.id)
        result = converted(low, whole_numbers, dtype)
        if found is not None and dtype in ("float32", "float64") and max(abs(starts[0]), abs(starts[0] + step * n)) <= 2**24:
            low.recipes[result.id] = found  # exact: for the algebra it is a range, of floats
        return result
    return positions(low, n, starts, step, dtype)


def positions(low: Lowering, n: int, starts: Sequence[int], step: int, dtype: str) -> Tensor:
    """``starts[rank] + step * i`` for ``0 <= i < n``.

    Raises:
        Unsupported: the ranks' ranges are not consecutive parts of one range.
    """
    if len(set(starts)) == 1:
        result = low.op(f"iota#{starts[0]}#{step}#{n}", "iota", [], [Iter(n, "pos", whole(n, 0))], [n], dtype)
        low.range_of[result.id] = (tuple(starts), step)
        if low.is_range(result, n):
            low.base.add("counting", result.id)
        return low.remember(result, "range", [], starts[0], step, n)
    form = low.mesh.affine(starts)
    if form is None:
        raise Unsupported("its start is not an affine function of the rank")
    size, ties = n, []
    for slope, block in reversed(form.terms):
        if slope != size * step:
            raise Unsupported(f"its ranges of {n} elements start {slope} apart")
        ties.append(Tie(size, block.dim, block.stride, block.size))
        size *= block.size
    it = Iter(size, "pos", (Tie(1, 0, 1, n),), to_mesh=tuple(ties))
    result = low.op(f"iota#{form.base}#{step}#{size}", "iota", [], [it], [n], dtype)
    low.range_of[result.id] = (tuple(starts), step)
    return result


def negated(low: Lowering, mask: Tensor) -> Tensor:
    """The negation of a mask; two negations cancel."""
    if mask.constant is not None and mask.dtype == "bool":
        return low.constant(not mask.constant, mask.shape, "bool")
    made = low.made_by.get(mask.id)
    if made is not None and made.kind == "not" and mask.dtype == "bool" and made.args[0].shape == mask.shape:
        return made.args[0]
    if made is not None and made.kind == "layout":
        return low.layout(negated(low, made.args[0]), mask.shape, made.ties, made.broadcast)
    return low.pointwise("not", "not", [mask], "bool")


def range_along(low: Lowering, x: Tensor) -> tuple[tuple[int, ...], int, int] | None:
    """``(starts per rank, step, dimension)`` where ``x`` is a range along one dimension and constant along all others."""
    known = low.range_of.get(x.id)
    if known is not None:
        return (*known, 0)
    made = low.made_by.get(x.id)
    if made is None or made.kind != "layout":
        return None
    inner = range_along(low, made.args[0])
    if inner is None:
        return None
    size = made.args[0].shape[inner[2]]
    places = [t for t in made.ties if t[2] == inner[2]]
    if len(places) != 1 or places[0] != (places[0][0], 1, inner[2], 1, size) or x.shape[places[0][0]] != size:
        return None
    return inner[0], inner[1], places[0][0]


def shifted(low: Lowering, x: Tensor, shift: Sequence[int]) -> Tensor:
    """A range seen through views plus an integer per rank.

    Raises:
        Unsupported: the ranks' ranges are then no consecutive parts of one range.
    """
    known = low.range_of.get(x.id)
    if known is not None:
        starts, step = known
        return positions(low, x.shape[0], [a + b for a, b in zip(starts, shift)], step, x.dtype)
    made = low.made_by[x.id]
    return low.layout(shifted(low, made.args[0], shift), x.shape, made.ties, made.broadcast)


def compared(low: Lowering, name: str, x: Tensor, y: Tensor) -> Tensor:
    """``x name y`` for one of lt, le, gt, ge. Integers are compared by ``<`` alone; ranges with the columns from 0 on."""
    if name in ("gt", "ge"):
        return compared(low, {"gt": "lt", "ge": "le"}[name], y, x)
    if not (is_integer(x.dtype) and is_integer(y.dtype)):
        return low.pointwise(name, name, [x, y], "bool")
    if name == "le":
        return negated(low, compared(low, "lt", y, x))
    if x.dtype == y.dtype == "int64":
        found = _ranges_compared(low, x, y)
        if found is not None:
            return found
    return low.pointwise("lt", "lt", [x, y], "bool")


def _ranges_compared(low: Lowering, x: Tensor, y: Tensor) -> Tensor | None:
    """``x < y`` of two ranges along different dimensions, the later one starting at 0."""
    rx, ry = range_along(low, x), range_along(low, y)
    if rx is None or ry is None or rx[1] != 1 or ry[1] != 1:
        return None
    dx, dy = rx[2] - len(x.shape), ry[2] - len(y.shape)
    if dx == dy:
        return None
    try:
        if dx > dy:  # columns < rows  ==  not (rows <= columns)  ==  not (rows - 1 < columns)
            ranks = [-1] * low.mesh.ranks
            return negated(low, _from_zero(low, shifted(low, y, ranks), x))
        return _from_zero(low, x, y)
    except Unsupported:
        return None


def _from_zero(low: Lowering, rows: Tensor, columns: Tensor) -> Tensor:
    found = range_along(low, columns)
    assert found is not None
    back = [-min(found[0])] * low.mesh.ranks
    return low.pointwise("lt", "lt", [shifted(low, rows, back), shifted(low, columns, back)], "bool")


def positions_sliced(low: Lowering, x: Tensor, d: int, starts: Sequence[int], size: int) -> Tensor | None:
    """Rank r's ``x[starts[r] : starts[r] + size]`` along ``d`` where x is a range, or a comparison of ranges: the same of
    the rank's own positions. None for everything else."""
    made = low.made_by.get(x.id)
    if made is None:
        return None
    shape = [size if k == d else n for k, n in enumerate(x.shape)]
    known = low.range_of.get(x.id)
    if known is not None:
        try:
            return positions(low, size, [a + known[1] * b for a, b in zip(known[0], starts)], known[1], x.dtype)
        except Unsupported:
            return None
    if made.kind == "layout":
        if d in made.broadcast:
            return low.layout(made.args[0], shape, made.ties, made.broadcast)
        places = [t for t in made.ties if t[0] == d]
        if len(places) != 1 or places[0] != (d, 1, places[0][2], 1, x.shape[d]):
            return None
        source = places[0][2]
        if made.args[0].shape[source] != x.shape[d]:
            return None
        inner = positions_sliced(low, made.args[0], source, starts, size)
        ties = [(*t[:4], size) if t[0] == d else t for t in made.ties]
        return None if inner is None else low.layout(inner, shape, ties, made.broadcast)
    if made.kind == "convert" and made.args[0].shape == x.shape:
        part = positions_sliced(low, made.args[0], d, starts, size)
        return None if part is None else low.pointwise(made.body, made.kind, [part], x.dtype)
    if made.body not in ("lt", "not"):
        return None
    parts = []
    for a in made.args:
        own = d - (len(x.shape) - len(a.shape))
        if own < 0 or a.shape[own] == 1:
            parts.append(a)
            continue
        part = positions_sliced(low, a, own, starts, size)
        if part is None:
            return None
        parts.append(part)
    return compared(low, "lt", *parts) if made.body == "lt" else negated(low, parts[0])


def later(low: Lowering, rows: int, columns: int, first: Sequence[int]) -> Tensor:
    """Mask [rows, columns]: column > row + first (an integer per rank)."""
    down = view(low, positions(low, rows, first, 1, "int64"), [rows, 1])
    across = positions(low, columns, [0] * low.mesh.ranks, 1, "int64")
    return low.pointwise("lt", "lt", [down, across], "bool")


def hidden_by_causality(low: Lowering, rows: int, columns: int) -> Tensor:
    """What a causal mask hides from queries and keys that both start at position 0."""
    return later(low, rows, columns, [0] * low.mesh.ranks)


@lowers("aten.tril", "aten.triu", "aten.tril_", "aten.triu_")
def triangle(low: Lowering, node: FamilyNode, args: list[Any], kwargs: dict[str, Any]) -> Tensor:
    """Zeros written above or below a diagonal, which may depend on the rank."""
    from emerge.facts.ops.pointwise import fill

    x = args[0]
    first = low.integers(kwargs.get("diagonal", args[1] if len(args) > 1 else 0))
    if first is None:
        raise Unsupported("its diagonal is not an integer")
    rows, columns = x.shape[-2:]
    if ".tril" in node.op:
        outside = later(low, rows, columns, first)
    else:
        # below the diagonal: column < row + d, that is not column > row + d - 1
        outside = negated(low, later(low, rows, columns, [d - 1 for d in first]))
    if x.dtype == "bool" and x.constant is None:
        return low.pointwise("and", "and", [x, negated(low, outside)], "bool", commutative=True)
    return fill(low, x, outside if x.constant is None else low.broadcast_to(outside, x.shape), Fraction(0), x.dtype)
