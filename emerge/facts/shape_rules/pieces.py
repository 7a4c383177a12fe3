"""Taking tensors apart and putting them together: slice, select, split, cat, stack, pad and their gradients."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from emerge.facts.shape_rules.algebra import (
    Size,
    add,
    checked_size,
    expands_to,
    is_static,
    merge_size,
    normalize_dim,
    product,
    replace,
    same_shape,
    same_size,
    show,
    slice_bounds,
    slice_length,
)
from emerge.facts.shape_rules.core import Call, Result, Rules, Spec, Symbol, Undecided, like, table
from emerge.facts.shape_rules.promotion import result_type
from emerge.graph.model import Shape, TensorType
from emerge.util.errors import GraphError

#: ``x[:]`` is captured with this end.
_NO_END = 2**63 - 1


def _bound(value: object) -> int | None:
    """A slice bound; None for an absent one. Bounds that are scalars of the graph are not known."""
    if value is None or isinstance(value, int):
        return value
    raise Undecided


def _sliced(call: Call, shape: Shape, first_index: int) -> tuple[int, Shape]:
    """Dimension and result of slicing ``shape`` by (dim, start, end, step), which begin at this argument."""
    if not shape:
        raise GraphError("a 0-dimensional tensor cannot be sliced")
    at = call.dim(first_index, "dim", len(shape), 0)
    start, end = call.get(first_index + 1, "start"), call.get(first_index + 2, "end")
    step = call.integer(first_index + 3, "step", 1)
    size = shape[at]
    if isinstance(size, str) or isinstance(start, (Symbol, str)) or isinstance(end, (Symbol, str)):
        slice_bounds(1, None, None, step)
        whole = start in (None, 0) and step == 1 and (end is None or end == _NO_END)
        return at, replace(shape, at, size if whole else "?")
    return at, replace(shape, at, slice_length(size, _bound(start), _bound(end), step))


def _slice(call: Call) -> Result:
    operand = call.tensor(0, "self")
    return Spec(operand.dtype, _sliced(call, operand.shape, 1)[1])


def _slice_scatter(call: Call) -> Result:
    operand, source = call.tensor(0, "self"), call.tensor(1, "src")
    _, target = _sliced(call, operand.shape, 2)
    if not same_shape(source.shape, target):
        raise GraphError(f"the source has shape {show(source.shape)}, but the slice it replaces {show(target)}")
    return like(operand)


def _slice_backward(call: Call) -> Result:
    grad, sizes = call.tensor(0, "grad_output"), checked_size(call.size(1, "input_sizes"))
    _, target = _sliced(call, sizes, 2)
    if not expands_to(grad.shape, target):
        raise GraphError(f"the gradient has shape {show(grad.shape)}, but the slice {show(target)}")
    return Spec(grad.dtype, sizes)


def _selected(call: Call, shape: Shape, first_index: int) -> Shape:
    """``shape`` without the dimension that (dim, index) picks one element of."""
    if not shape:
        raise GraphError("select needs at least one dimension")
    at = call.dim(first_index, "dim", len(shape))
    index, size = call.get(first_index + 1, "index"), shape[at]
    if isinstance(index, int) and isinstance(size, int) and not -size <= index < size:
        raise GraphError(f"index {index} is out of range for dimension {at} of size {size}")
    return shape[:at] + shape[at + 1 :]


def _select(call: Call) -> Result:
    operand = call.tensor(0, "self")
    return Spec(operand.dtype, _selected(call, operand.shape, 1))


def _select_scatter(call: Call) -> Result:
    operand, source = call.tensor(0, "self"), call.tensor(1, "src")
    target = _selected(call, operand.shape, 2)
    if not same_shape(source.shape, target):
        raise GraphError(f"the source has shape {show(source.shape)}, but the selection it replaces {show(target)}")
    return like(operand)


def _select_backward(call: Call) -> Result:
    grad, sizes = call.tensor(0, "grad_output"), checked_size(call.size(1, "input_sizes"))
    target = _selected(call, sizes, 2)
    if not expands_to(grad.shape, target):
        raise GraphError(f"the gradient has shape {show(grad.shape)}, but the selection {show(target)}")
    return Spec(grad.dtype, sizes)


def _narrow(call: Call) -> Result:
    operand = call.tensor(0, "self")
    if not operand.shape:
        raise GraphError("a 0-dimensional tensor cannot be narrowed")
    at = call.dim(1, "dim", len(operand.shape))
    start, length, size = call.get(2, "start"), call.get(3, "length"), operand.shape[at]
    if isinstance(length, int) and length < 0:
        raise GraphError(f"negative length {length}")
    if isinstance(start, int) and isinstance(length, int) and isinstance(size, int):
        first = start + size if start < 0 else start
        if not 0 <= first <= size or first + length > size:
            raise GraphError(f"[{start}, {start} + {length}) is outside dimension {at} of size {size}")
    return Spec(operand.dtype, replace(operand.shape, at, length if isinstance(length, int) else "?"))


def _cut(operand: TensorType, dim: int, sizes: Sequence[Size]) -> list[Spec | None]:
    return [Spec(operand.dtype, replace(operand.shape, dim, s)) for s in sizes]


def _split_dim(call: Call, operand: TensorType) -> int:
    if not operand.shape:
        raise GraphError("a 0-dimensional tensor cannot be split")
    return call.dim(2, "dim", len(operand.shape), 0)


def _split_with_sizes(call: Call) -> Result:
    operand = call.tensor(0, "self")
    at = _split_dim(call, operand)
    sizes = call.size(1, "split_size" if "split_size" in call.kwargs else "split_sizes")
    for size in sizes:
        if isinstance(size, int) and size < 0:
            raise GraphError(f"negative split size {size}")
    total = sum(s for s in sizes if isinstance(s, int))
    if is_static(sizes) and not same_size(total, operand.shape[at]):
        raise GraphError(f"split sizes {show(sizes)} add up to {total}, but dimension {at} has {operand.shape[at]}")
    if isinstance(operand.shape[at], int) and len(sizes) == 1 and isinstance(sizes[0], str):
        sizes = (merge_size(sizes[0], operand.shape[at]),)
    return _cut(operand, at, sizes)


def _even_pieces(size: int, piece: int, at_least: int = 1) -> list[int]:
    """Sizes of the pieces of ``piece`` elements, the last one smaller."""
    count = max(-(-size // piece), at_least) if piece else at_least
    return [min(piece, size - i * piece) for i in range(count)]


def _split(call: Call) -> Result:
    operand = call.tensor(0, "self")
    if isinstance(call.get(1, "split_size"), list) or "split_sizes" in call.kwargs:
        return _split_with_sizes(call)
    at, piece = _split_dim(call, operand), call.integer(1, "split_size")
    size = operand.shape[at]
    if isinstance(size, str):
        raise Undecided
    if piece < 0 or (piece == 0 and size != 0):
        raise GraphError(f"split size {piece} for dimension {at} of size {size}")
    return _cut(operand, at, _even_pieces(size, piece))


def _chunk(call: Call) -> Result:
    operand = call.tensor(0, "self")
    if not operand.shape:
        raise GraphError("a 0-dimensional tensor cannot be chunked")
    at, count = call.dim(2, "dim", len(operand.shape), 0), call.integer(1, "chunks")
    if count <= 0:
        raise GraphError(f"chunk into {count} pieces")
    size = operand.shape[at]
    if isinstance(size, str):
        raise Undecided
    if size == 0:
        return _cut(operand, at, [0] * count)
    return _cut(operand, at, _even_pieces(size, -(-size // count)))


def _tensor_split(call: Call) -> Result:
    operand = call.tensor(0, "self")
    at, how = _split_dim(call, operand), call.get(1, "sections", call.kwargs.get("indices"))
    size = operand.shape[at]
    if isinstance(size, str) or not isinstance(how, (int, list)):
        raise Undecided
    if isinstance(how, int):
        if how <= 0:
            raise GraphError(f"tensor_split into {how} sections")
        return _cut(operand, at, [size // how + (1 if i < size % how else 0) for i in range(how)])
    cuts: list[int | None] = [0, *(call.integers(1, "indices") or []), None]
    return _cut(operand, at, [slice_length(size, a, b) for a, b in pairwise(cuts)])


def _unbind(call: Call) -> Result:
    operand = call.tensor(0, "self")
    if not operand.shape:
        raise GraphError("a 0-dimensional tensor cannot be unbound")
    at = call.dim(1, "dim", len(operand.shape), 0)
    size = operand.shape[at]
    if isinstance(size, str):
        raise Undecided
    return [Spec(operand.dtype, operand.shape[:at] + operand.shape[at + 1 :])] * size


def _cat(call: Call) -> Result:
    tensors = call.tensors(0, "tensors")
    if not tensors:
        raise GraphError("cat of no tensors")
    dtype = result_type(tensors)
    # A tensor of shape [0] is skipped whatever the rank of the others (PyTorch keeps this for old programs).
    parts = [t.shape for t in tensors if t.shape != (0,)] or [tensors[0].shape]
    first = parts[0]
    if any(not t.shape for t in tensors):
        raise GraphError("a 0-dimensional tensor cannot be concatenated; stack adds a dimension")
    at = call.dim(1, "axis" if "axis" in call.kwargs else "dim", len(first), 0)
    result = list(first)
    total: Size = first[at]
    for shape in parts[1:]:
        if len(shape) != len(first):
            raise GraphError(f"cat of {show(first)} and {show(shape)}: the ranks differ")
        for i, size in enumerate(shape):
            if i != at and not same_size(result[i], size):
                raise GraphError(f"cat of {show(first)} and {show(shape)} along {at}: sizes differ at dimension {i}")
            result[i] = merge_size(result[i], size)
        total = add(total, shape[at])
    result[at] = total
    return Spec(dtype, tuple(result))


def _stack(call: Call) -> Result:
    tensors = call.tensors(0, "tensors")
    if not tensors:
        raise GraphError("stack of no tensors")
    first = tensors[0].shape
    for other in tensors[1:]:
        if not same_shape(first, other.shape):
            raise GraphError(f"stack of {show(first)} and {show(other.shape)}: the shapes differ")
    at = call.dim(1, "dim", len(first) + 1, 0)
    return Spec(result_type(tensors), (*first[:at], len(tensors), *first[at:]))


def chunk_cat_shape(tensors: Sequence[TensorType], dim: int, chunks: int) -> Shape:
    """Shape of ``_chunk_cat``: every tensor is padded to a multiple of ``chunks`` along ``dim``, chunked, flattened.

    Raises:
        GraphError: the dimensions before ``dim`` differ, or there is nothing to chunk.
    """
    if not tensors or chunks <= 0:
        raise GraphError(f"chunk_cat of {len(tensors)} tensors into {chunks} chunks")
    row: Size = 0
    lead: Shape | None = None
    for tensor in tensors:
        at = normalize_dim(dim, len(tensor.shape))
        if not tensor.shape or 0 in tensor.shape:
            raise GraphError(f"chunk_cat of a tensor of shape {show(tensor.shape)}, expected elements and dimensions")
        if lead is not None and not same_shape(lead, tensor.shape[:at]):
            raise GraphError(f"chunk_cat: leading sizes {show(lead)} and {show(tensor.shape[:at])} differ")
        lead = tensor.shape[:at]
        size = tensor.shape[at]
        piece: Size = "?" if isinstance(size, str) else -(-size // chunks)
        row = add(row, product((piece, *tensor.shape[at + 1 :])))
    return (*(lead or ()), chunks, row)


def _chunk_cat(call: Call) -> Result:
    tensors = call.tensors(0, "tensors")
    shape = chunk_cat_shape(tensors, call.integer(1, "dim"), call.integer(2, "num_chunks"))
    return Spec(tensors[0].dtype, shape)


def _pad(call: Call) -> Result:
    operand, amounts = call.tensor(0, "self"), call.integers(1, "pad") or []
    if len(amounts) % 2 or len(amounts) > 2 * len(operand.shape):
        raise GraphError(f"padding {amounts} does not consist of pairs for at most {len(operand.shape)} dimensions")
    shape = list(operand.shape)
    for i, (before, after) in enumerate(zip(amounts[::2], amounts[1::2])):
        at = len(shape) - 1 - i
        kept = add(shape[at], min(before, 0) + min(after, 0))
        shape[at] = add(shape[at], before + after)
        if isinstance(kept, int) and kept < 0:
            raise GraphError(f"padding ({before}, {after}) makes dimension {at} of size {operand.shape[at]} negative")
    return Spec(operand.dtype, tuple(shape))


RULES: Rules = {
    **table("slice slice_copy", _slice),
    **table("slice_scatter", _slice_scatter),
    **table("slice_backward", _slice_backward),
    **table("select select_copy", _select),
    **table("select_scatter", _select_scatter),
    **table("select_backward", _select_backward),
    **table("narrow narrow_copy", _narrow),
    **table("split unsafe_split split_copy", _split),
    **table("split_with_sizes split_with_sizes_copy unsafe_split_with_sizes", _split_with_sizes),
    **table("chunk unsafe_chunk", _chunk),
    **table("tensor_split", _tensor_split),
    **table("unbind unbind_copy", _unbind),
    **table("cat concat concatenate", _cat),
    **table("stack", _stack),
    **table("_chunk_cat", _chunk_cat),
    **table("constant_pad_nd pad", _pad),
}
