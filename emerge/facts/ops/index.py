"""Look-ups. A look-up is a contraction with the one-hot form of its index: ``out[t, h] = sum_v [T[t] = v] W[v, h]``.

So sharded tables need no law of their own: the one-hot tensor is sharded along ``v`` and the sum becomes partial.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from emerge.facts.families import FamilyNode
from emerge.facts.lower import (
    Iter,
    Lowering,
    Tensor,
    Tie,
    Unsupported,
    axis,
    lowers,
    result_dtype,
    scalar_constant,
    whole,
)
from emerge.facts.ops.pointwise import converted, fill
from emerge.facts.shapes import normalize_dim
from emerge.graph.model import is_floating, is_integer


def one_hot(low: Lowering, index: Tensor, size: int, dtype: str) -> Tensor:
    """``[index[t] = v]`` for ``0 <= v < size``: shape [*t, size]."""
    rank = len(index.shape)
    iters = [axis(n, "p", d, a0=d) for d, n in enumerate(index.shape)]
    iters.append(Iter(size, "pos", whole(size, rank)))
    return low.op("one_hot", "one_hot", [index], iters, [*index.shape, size], dtype)


def lookup(low: Lowering, table: Tensor, index: Tensor, d: int, parallel: Sequence[tuple[int, int]] = ()) -> Tensor:
    """Rows of dimension ``d`` of ``table``; ``parallel`` pairs (index dim, table dim) that run together.

    The result has the table's dimensions before ``d`` (without parallel ones), the index's dimensions, and the rest.
    """
    hot = one_hot(low, index, table.shape[d], table.dtype)
    rank = len(index.shape)
    together = dict(parallel)
    shape: list[int] = []
    iters: list[Iter] = []

    def table_dims(dims: Sequence[int]) -> None:
        for k in dims:
            if k != d and k not in together.values():
                iters.append(axis(table.shape[k], "p", len(shape), a1=k))
                shape.append(table.shape[k])

    table_dims(range(d))
    for t, n in enumerate(index.shape):
        iters.append(axis(n, "p", len(shape), a0=t, a1=together.get(t)))
        shape.append(n)
    table_dims(range(d + 1, len(table.shape)))
    return contract(low, hot, table, iters, shape, rank, d)


def contract(
    low: Lowering, hot: Tensor, table: Tensor, iters: list[Iter], shape: Sequence[int], v: int, d: int
) -> Tensor:
    """The native look-up, which needs its index in range, and its form as a contraction."""
    n = table.shape[d]
    where = ((0, whole(n, v)), (1, whole(n, d)))
    result = low.op("lookup", "lookup", [hot, table], [*iters, Iter(n, "o", (), where)], shape, table.dtype)
    summed = [*iters, Iter(n, "sum", (), where)]
    if low.side == 1:
        form = low.form("dot", "dot", [hot, table], summed, result)
        if form is not None:
            low.base.add("lookup_form", form, low.op_of[result.id])
    low.lookup_of[result.id] = (hot, table, summed)
    return result


@lowers("aten.embedding")
def embedding(low: Lowering, node: FamilyNode, args: list[Any], kwargs: dict[str, Any]) -> Tensor:
    if not is_integer(args[1].dtype):
        raise Unsupported("its index is not an integer tensor")
    return lookup(low, args[0], args[1], 0)


@lowers("aten.index_select")
def index_select(low: Lowering, node: FamilyNode, args: list[Any], kwargs: dict[str, Any]) -> Tensor:
    return lookup(low, args[0], args[2], normalize_dim(args[1], len(args[0].shape)))


@lowers("aten.index")
def index(low: Lowering, node: FamilyNode, args: list[Any], kwargs: dict[str, Any]) -> Tensor:
    """One index tensor, or (arange, index) over the first two dimensions (a gather row by row)."""
    x, indices = args[0], args[1]
    used = [(d, i) for d, i in enumerate(indices) if i is not None]
    if any(not isinstance(i, Tensor) or not is_integer(i.dtype) or i.dtype == "bool" for _, i in used):
        raise Unsupported("indexes with a boolean mask: its shape depends on data")
    if len(used) == 1:
        d, i = used[0]
        result = lookup(low, x, i, d)
    elif (
        len(used) == 2
        and used[0][0] == 0
        and used[1][0] == 1
        and low.is_range(used[0][1], x.shape[0])
        and used[1][1].shape[:1] == x.shape[:1]
    ):
        result = lookup(low, x, used[1][1], 1, [(0, 0)])
    else:
        raise Unsupported("indexes several dimensions at once")
    low.assume("index_range", result, "indices lie in [0, size): negative ones would count from the end")
    return result


@lowers("aten.gather")
def gather(low: Lowering, node: FamilyNode, args: list[Any], kwargs: dict[str, Any]) -> Tensor:
    """``out[..t..] = x[..index[..t..]..]`` along ``dim``; all other dimensions run together."""
    x, i = args[0], args[2]
    d = normalize_dim(args[1], len(x.shape))
    if any(n != x.shape[k] for k, n in enumerate(i.shape) if k != d):
        raise Unsupported("gathers from part of a dimension")
    hot = one_hot(low, i, x.shape[d], x.dtype)
    iters = [axis(n, "p", k, a0=k, a1=k if k != d else None) for k, n in enumerate(i.shape)]
    return contract(low, hot, x, iters, i.shape, len(i.shape), d)


@lowers("aten.index_put", "aten.index_put_", "aten._index_put_impl")
def index_put(low: Lowering, node: FamilyNode, args: list[Any], kwargs: dict[str, Any]) -> Tensor:
    """Writing one constant where a mask holds; other writes are not related."""
    x, indices, value = args[0], args[1], args[2]
    accumulate = kwargs.get("accumulate", args[3] if len(args) > 3 else False)
    c = scalar_constant(value)
    if (
        len(indices) == 1
        and isinstance(indices[0], Tensor)
        and indices[0].dtype == "bool"
        and c is not None
        and not accumulate
    ):
        mask = indices[0]
        if mask.shape != x.shape[: len(mask.shape)]:
            raise Unsupported("its mask does not have the leading dimensions of the tensor")
        if len(mask.shape) < len(x.shape):
            from emerge.facts.ops.layout import view

            mask = view(low, mask, [*mask.shape, *[1] * (len(x.shape) - len(mask.shape))])
        return fill(low, x, mask, c, x.dtype)
    if len(indices) == 1 and isinstance(indices[0], Tensor) and isinstance(value, Tensor) and not accumulate:
        written = _put_permutation(low, x, indices[0], value)
        if written is not None:
            return written
    raise Unsupported("writes by index")


def _put_permutation(low: Lowering, x: Tensor, index: Tensor, value: Tensor) -> Tensor | None:
    """``x[index] = value`` where the index is a permutation of the rows: every row is overwritten, ``x`` is not read."""
    n = x.shape[0] if x.shape else 0
    if index.id not in low.permutations or index.shape != (n,) or value.shape != x.shape:
        return None
    iters = [Iter(n, "pos", whole(n, 0))]
    iters += [axis(m, "p", d, a1=d) for d, m in enumerate(x.shape) if d > 0]
    iters.append(Iter(n, "o", (), ((0, whole(n, 0)), (1, whole(n, 0)))))
    return low.op("put_permutation", "put_permutation", [index, value], iters, x.shape, x.dtype)


@lowers("aten.one_hot")
def one_hot_op(low: Lowering, node: FamilyNode, args: list[Any], kwargs: dict[str, Any]) -> Tensor:
    classes = args[1] if len(args) > 1 else kwargs.get("num_classes", -1)
    if not isinstance(classes, int) or classes < 0:
        raise Unsupported("number of classes depends on data")
    return one_hot(low, args[0], classes, result_dtype(node, "int64"))


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
        return converted(low, positions(low, n, starts, step, "int64"), dtype)
    return positions(low, n, starts, step, dtype)


def positions(low: Lowering, n: int, starts: Sequence[int], step: int, dtype: str) -> Tensor:
    """``starts[rank] + step * i`` for ``0 <= i < n``.

    Raises:
        Unsupported: the ranks' ranges are not consecutive parts of one range.
    """
    if len(set(starts)) == 1:
        result = low.op(f"iota#{starts[0]}#{step}#{n}", "iota", [], [Iter(n, "pos", whole(n, 0))], [n], dtype)
        low.range_of[result.id] = (tuple(starts), step)
        return result
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
