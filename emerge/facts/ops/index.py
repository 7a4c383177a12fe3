"""Look-ups. A look-up is a contraction with the one-hot form of its index: ``out[t, h] = sum_v [T[t] = v] W[v, h]``.

So sharded tables need no law of their own: the one-hot tensor is sharded along ``v`` and the sum becomes partial.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from math import prod
from typing import Any

from emerge.facts.families import FamilyNode
from emerge.facts.lower import (
    Iter,
    Lowering,
    Tensor,
    Unsupported,
    axis,
    lowers,
    result_dtype,
    scalar_constant,
    whole,
)
from emerge.facts.ops.blocks import looked_up
from emerge.facts.ops.layout import slice_plain, view
from emerge.facts.ops.pointwise import fill
from emerge.facts.routing import note_lookup, note_put
from emerge.facts.shapes import normalize_dim
from emerge.graph.model import is_integer


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
    known = looked_up(low, table, index)
    if known is not None:
        return known
    if not parallel and (single := _one_position(low, index)) is not None:
        row = lookup(low, table, single, d)
        before, after = table.shape[:d], table.shape[d + 1 :]
        row = view(low, row, [*before, *[1] * len(index.shape), *after])
        return low.broadcast_to(row, [*before, *index.shape, *after])
    hot = one_hot(low, index, table.shape[d], table.dtype)
    source = low.source_input(index)
    if source is not None:
        low.index_limits[source] = min(table.shape[d], low.index_limits.get(source, table.shape[d]))
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
    result = contract(low, hot, table, iters, shape, rank, d)
    if not parallel:
        low.remember(result, "lookup", [table, index], d)
        note_lookup(low, result, table, d, index)
    return result


def _one_position(low: Lowering, index: Tensor) -> Tensor | None:
    """The position [1] that an index repeats, None where it is not one element laid out along all dimensions."""
    inner = low.innermost(index)
    return view(low, inner, [1]) if prod(inner.shape) == 1 < prod(index.shape) else None


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
        _padded_forms(low, hot, table, iters, result, v, d)
    low.lookup_of[result.id] = (hot, table, summed)
    return result


def _padded_forms(
    low: Lowering, hot: Tensor, table: Tensor, iters: list[Iter], result: Tensor, v: int, d: int
) -> None:
    """Where the table is the leading part of a longer one: the look-up in that one, and its contraction."""
    found = low.recipes.get(table.id)
    made = low.made_by.get(hot.id)
    if found is None or made is None or found.name != "slice" or found.params[0] != d or found.params[1] != 0:
        return
    longer = found.args[0]
    n = longer.shape[d]
    wide = one_hot(low, made.args[0], n, hot.dtype)
    where = ((0, whole(n, v)), (1, whole(n, d)))
    for body, role in (("lookup", "o"), ("dot", "sum")):
        form = low.form(body, body, [wide, longer], [*iters, Iter(n, role, (), where)], result)
        if form is not None:
            low.base.add("padded_lookup_form", form, low.op_of[result.id])


def never_negative(low: Lowering, x: Tensor) -> bool:
    """Whether integers are positions that some operator counted from 0, or made of such."""
    known, made = low.range_of.get(x.id), low.made_by.get(x.id)
    if known is not None:
        return min(known[0]) >= 0 and known[1] >= 0
    if x.id in low.position_limits or x.id in low.permutations:
        return True
    if made is None or not made.args:
        return False
    body, _, attribute = made.body.partition("#")
    if body in ("argmax", "argmin") or (body == "remainderc" and _positive(attribute)):
        return True
    if body == "put_permutation":  # it holds what is written
        return never_negative(low, made.args[1])
    rounded = body == "floor_dividec" and _positive(attribute)
    return (made.kind == "layout" or rounded) and never_negative(low, made.args[0])


def _positive(text: str) -> bool:
    return text.isdigit() and int(text) > 0


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
        at = i.constant
        if isinstance(at, Fraction) and -x.shape[d] <= at < x.shape[d]:
            # one position: a slice
            start = int(at) % x.shape[d]
            piece = slice_plain(low, x, d, start, start + 1, 1)
            lead, rest = x.shape[:d], x.shape[d + 1 :]
            piece = view(low, piece, [*lead, *[1] * len(i.shape), *rest])
            return low.broadcast_to(piece, [*lead, *i.shape, *rest])
        known = low.range_of.get(i.id)
        if known is not None and min(known[0]) < 0:
            raise Unsupported("its positions are negative, which count from the end")
        result = lookup(low, x, i, d)
        if known is None and low.source_input(i) is None and not never_negative(low, i):
            # a computed index may be negative and count from the end, which a look-up of the algebra does not
            low.recipes.pop(result.id, None)
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
    result = low.op("put_permutation", "put_permutation", [index, value], iters, x.shape, x.dtype)
    note_put(low, result, index, value)
    return result


@lowers("aten.scatter")
def scatter(low: Lowering, node: FamilyNode, args: list[Any], kwargs: dict[str, Any]) -> Tensor:
    """``(x, dim, index, value)``: where the dimension has one position, everything is overwritten."""
    x, i, c = args[0], args[2], scalar_constant(args[3])
    d = normalize_dim(args[1], len(x.shape))
    whole_ = isinstance(i, Tensor) and i.shape == x.shape and x.shape[d] == 1
    if not whole_ or len(args) > 4 or kwargs or c is None or isinstance(args[3], Tensor):
        raise Unsupported("scatters")
    return low.constant(c, x.shape, result_dtype(node, x.dtype))


@lowers("aten.one_hot")
def one_hot_op(low: Lowering, node: FamilyNode, args: list[Any], kwargs: dict[str, Any]) -> Tensor:
    classes = args[1] if len(args) > 1 else kwargs.get("num_classes", -1)
    if not isinstance(classes, int) or classes < 0:
        raise Unsupported("number of classes depends on data")
    return one_hot(low, args[0], classes, result_dtype(node, "int64"))
