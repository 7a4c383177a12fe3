"""Operators with index operands: index, index_put, gather, scatter, embedding, one_hot, nonzero."""

from __future__ import annotations

from collections.abc import Sequence

from emerge.facts.shape_rules.algebra import broadcast, expands_to, normalize_dim, product, replace, same_size, show
from emerge.facts.shape_rules.core import (
    UNKNOWN,
    Call,
    Result,
    Rules,
    Spec,
    Undecided,
    like,
    require_rank,
    require_same_shape,
    require_same_size,
    table,
)
from emerge.graph.model import Shape, TensorType, is_integer
from emerge.util.errors import GraphError


def require_index(what: str, value: TensorType) -> None:
    """Raises:
    GraphError: the tensor holds floating or boolean values.
    """
    if not is_integer(value.dtype) or value.dtype == "bool":
        raise GraphError(f"{what} has dtype {value.dtype}, expected an integer dtype")


def _index_operands(call: Call) -> list[TensorType | None]:
    value = call.get(1, "indices")
    if not isinstance(value, list):
        raise GraphError("expected operand 'indices' to be a list of tensors and None")
    if any(item is UNKNOWN for item in value):
        raise Undecided
    if any(not (item is None or isinstance(item, TensorType)) for item in value):
        raise GraphError("expected every index to be a tensor or None")
    return value


def indexed_shape(shape: Shape, indices: Sequence[TensorType | None]) -> Shape:
    """Shape of ``x[i0, i1, ...]`` with tensor indices; None keeps a dimension.

    A boolean mask of rank k replaces k dimensions by one of data-dependent size. The broadcast shape of the indices
    takes the place of the indexed dimensions where these are adjacent, else it comes first.

    Raises:
        GraphError: too many indices, a mask of another shape, a floating index, or indices that do not broadcast.
    """
    parts: list[Shape | None] = []
    for number, index in enumerate(indices):
        if index is None:
            parts.append(None)
        elif index.dtype in ("bool", "uint8"):
            rank = len(index.shape)
            if rank == 0:
                raise Undecided
            covered = shape[len(parts) : len(parts) + rank]
            if len(covered) == rank:
                require_same_shape(f"mask {number}", index.shape, covered)
            parts.extend([("?",)] * rank)
        else:
            require_index(f"index {number}", index)
            parts.append(index.shape)
    if len(parts) > len(shape):
        raise GraphError(f"{len(parts)} indices for a tensor of rank {len(shape)}")
    parts.extend([None] * (len(shape) - len(parts)))
    at = [i for i, p in enumerate(parts) if p is not None]
    if not at:
        return shape
    block = broadcast([p for p in parts if p is not None])
    adjacent = at[-1] - at[0] + 1 == len(at)
    before = tuple(s for i, s in enumerate(shape) if parts[i] is None and (adjacent and i < at[0]))
    after = tuple(s for i, s in enumerate(shape) if parts[i] is None and not (adjacent and i < at[0]))
    return before + block + after


def _index(call: Call) -> Result:
    operand = call.tensor(0, "self")
    return Spec(operand.dtype, indexed_shape(operand.shape, _index_operands(call)))


def _index_put(call: Call) -> Result:
    operand, values = call.tensor(0, "self"), call.tensor(2, "values")
    indices = _index_operands(call)
    target = indexed_shape(operand.shape, indices)
    # One value for all masked positions is a masked fill, whatever its rank.
    fill = product(values.shape) == 1 and any(i is not None and i.dtype == "bool" for i in indices)
    if not fill and not expands_to(values.shape, target):
        raise GraphError(f"values of shape {show(values.shape)} do not broadcast to the indexed part {show(target)}")
    return like(operand)


def _at_least_1d(shape: Shape) -> Shape:
    return shape or (1,)


def _require_inside(what: str, index: Shape, bound: Shape, skip: int | None, bound_name: str) -> None:
    """Every size of the index but ``skip`` is at most that of ``bound``."""
    for i, (size, limit) in enumerate(zip(index, bound)):
        if i != skip and isinstance(size, int) and isinstance(limit, int) and size > limit:
            raise GraphError(f"{what} size {size} at dimension {i} exceeds size {limit} of the {bound_name}")


def _require_equal_ranks(left: str, a: Shape, right: str, b: Shape) -> None:
    if len(a) != len(b):
        raise GraphError(f"{left} has rank {len(a)}, but {right} rank {len(b)}; they have to be equal")


def _gather(call: Call) -> Result:
    operand, index = call.tensor(0, "self"), call.tensor(2, "index")
    at = call.dim(1, "dim", len(operand.shape))
    require_index("the index", index)
    shape, base = _at_least_1d(index.shape), _at_least_1d(operand.shape)
    if 0 not in shape:
        _require_equal_ranks("the index", shape, "the operand", base)
        _require_inside("index", shape, base, at, "operand")
    return Spec(operand.dtype, index.shape)


def _scatter(call: Call) -> Result:
    operand, index = call.tensor(0, "self"), call.tensor(2, "index")
    at = call.dim(1, "dim", len(operand.shape))
    require_index("the index", index)
    shape, base = _at_least_1d(index.shape), _at_least_1d(operand.shape)
    if 0 not in shape:
        _require_equal_ranks("the index", shape, "the operand", base)
        _require_inside("index", shape, base, at, "operand")
        source = call.get(3, "src", call.kwargs.get("value"))
        if isinstance(source, TensorType) and "value" not in call.overload:
            _require_equal_ranks("the index", shape, "the source", _at_least_1d(source.shape))
            _require_inside("index", shape, _at_least_1d(source.shape), None, "source")
    return like(operand)


def _index_vector(call: Call, operand: TensorType) -> tuple[int, TensorType]:
    at, index = call.dim(1, "dim", len(operand.shape)), call.tensor(2, "index")
    require_index("the index", index)
    require_rank("the index", index, 0, 1)
    return at, index


def _index_select(call: Call) -> Result:
    operand = call.tensor(0, "self")
    at, index = _index_vector(call, operand)
    if not operand.shape:
        return like(operand)
    return Spec(operand.dtype, replace(operand.shape, at, index.shape[0] if index.shape else 1))


def _index_add(call: Call) -> Result:
    operand = call.tensor(0, "self")
    at, index = _index_vector(call, operand)
    source = call.tensor(3, "source")
    if operand.shape and source.shape:
        _require_equal_ranks("the source", source.shape, "the operand", operand.shape)
        count = index.shape[0] if index.shape else 1
        require_same_size(f"size {at} of the source", source.shape[at], count)
        for i, (size, expected) in enumerate(zip(source.shape, operand.shape)):
            if i != at:
                require_same_size(f"size {i} of the source", size, expected)
    return like(operand)


def _index_fill(call: Call) -> Result:
    operand = call.tensor(0, "self")
    _index_vector(call, operand)
    return like(operand)


def _take(call: Call) -> Result:
    index = call.tensor(1, "index")
    require_index("the index", index)
    return Spec(call.tensor(0, "self").dtype, index.shape)


def _take_along_dim(call: Call) -> Result:
    operand, index = call.tensor(0, "self"), call.tensor(1, "indices")
    require_index("the index", index)
    dim = call.optional_integer(2, "dim")
    if dim is None:
        return Spec(operand.dtype, (product(index.shape),))
    _require_equal_ranks("the index", index.shape, "the operand", operand.shape)
    at = normalize_dim(dim, len(operand.shape))
    joined = broadcast([replace(operand.shape, at, 1), replace(index.shape, at, 1)])
    return Spec(operand.dtype, replace(joined, at, index.shape[at]))


def _embedding(call: Call) -> Result:
    weight, indices = call.tensor(0, "weight"), call.tensor(1, "indices")
    require_rank("the table", weight, 2)
    require_index("the index", indices)
    return Spec(weight.dtype, (*indices.shape, weight.shape[1]))


def _embedding_backward(call: Call) -> Result:
    grad, indices = call.tensor(0, "grad_output"), call.tensor(1, "indices")
    require_index("the index", indices)
    rows = call.size(2, "num_weights")
    if not grad.shape:
        raise GraphError("the gradient of an embedding has no dimensions")
    require_same_size("the number of gradient rows", product(grad.shape[:-1]), product(indices.shape))
    return Spec(grad.dtype, (*rows, grad.shape[-1]))


def _one_hot(call: Call) -> Result:
    operand, classes = call.tensor(0, "self"), call.integer(1, "num_classes", -1)
    require_index("the index", operand)
    return Spec("int64", (*operand.shape, "?" if classes == -1 else classes))


def _nonzero(call: Call) -> Result:
    return Spec("int64", ("?", len(call.tensor(0, "self").shape)))


def _masked_select(call: Call) -> Result:
    operand, mask = call.tensor(0, "self"), call.tensor(1, "mask")
    broadcast([operand.shape, mask.shape])
    return Spec(operand.dtype, ("?",))


def _masked_scatter(call: Call) -> Result:
    operand, mask = call.tensor(0, "self"), call.tensor(1, "mask")
    return Spec(operand.dtype, broadcast([operand.shape, mask.shape]))


def _bucketize(call: Call) -> Result:
    values = call.operand(0, "self")
    require_rank("the boundaries", call.tensor(1, "boundaries"), 1)
    return Spec(
        "int32" if call.flag(-1, "out_int32") else "int64", values.shape if isinstance(values, TensorType) else ()
    )


def _searchsorted(call: Call) -> Result:
    boundaries, values = call.tensor(0, "sorted_sequence"), call.operand(1, "self")
    dtype = "int32" if call.flag(-1, "out_int32") else "int64"
    if not isinstance(values, TensorType):
        return Spec(dtype, ())
    if len(boundaries.shape) != 1:
        _require_equal_ranks("the values", values.shape, "the boundaries", boundaries.shape)
        if not all(same_size(a, b) for a, b in zip(values.shape[:-1], boundaries.shape[:-1])):
            raise GraphError(f"boundaries {show(boundaries.shape)} and values {show(values.shape)} have different rows")
    return Spec(dtype, values.shape)


RULES: Rules = {
    **table("index _unsafe_index", _index),
    **table("index_put _unsafe_index_put _index_put_impl_", _index_put),
    **table("gather", _gather),
    **table("scatter scatter_add scatter_reduce", _scatter),
    **table("index_select", _index_select),
    **table("index_add index_copy", _index_add),
    **table("index_fill", _index_fill),
    **table("take", _take),
    **table("take_along_dim", _take_along_dim),
    **table("embedding", _embedding),
    **table("embedding_dense_backward", _embedding_backward),
    **table("one_hot", _one_hot),
    **table("nonzero argwhere", _nonzero),
    **table("masked_select", _masked_select),
    **table("masked_scatter", _masked_scatter),
    **table("bucketize", _bucketize),
    **table("searchsorted", _searchsorted),
}
