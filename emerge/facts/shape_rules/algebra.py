"""Arithmetic on shapes, without operators: broadcasting, dimensions, slices, views and reductions.

A size is an ``int``, or a ``str`` for a data-dependent symbol such as ``u0``. Statements that involve a symbol are
not checked: a symbol fits any size, and a result that would depend on one is :data:`UNKNOWN_SIZE`.
Semantics are those of PyTorch 2.x tensors (https://pytorch.org/docs/stable/tensors.html).
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from emerge.graph.model import Shape
from emerge.util.errors import GraphError

#: a size that depends on a symbol in a way that is not tracked; it fits every size.
UNKNOWN_SIZE = "?"

Size = int | str


def show(shape: Shape) -> str:
    """``[2, u0, 4]``."""
    return "[" + ", ".join(str(s) for s in shape) + "]"


def is_static(shape: Shape) -> bool:
    """True when no size is a symbol."""
    return not any(isinstance(size, str) for size in shape)


def numel(shape: Shape) -> int | None:
    """Number of elements, None when it depends on a symbol (unless some size is 0)."""
    known = [s for s in shape if isinstance(s, int)]
    if len(known) == len(shape):
        return prod(known)
    return 0 if 0 in known else None


def same_size(left: Size, right: Size) -> bool:
    """Equal, or one of them is a symbol."""
    return left == right or isinstance(left, str) or isinstance(right, str)


def same_shape(left: Shape, right: Shape) -> bool:
    """Same rank and sizes that agree (:func:`same_size`)."""
    return left == right or (len(left) == len(right) and all(same_size(a, b) for a, b in zip(left, right)))


def merge_size(left: Size, right: Size) -> Size:
    """The more precise one of two sizes that agree."""
    return right if isinstance(left, str) else left


def multiply(size: Size, factor: Size) -> Size:
    """Product of two sizes."""
    if isinstance(size, str) or isinstance(factor, str):
        return 0 if 0 in (size, factor) else UNKNOWN_SIZE
    return size * factor


def add(left: Size, right: Size) -> Size:
    """Sum of two sizes."""
    return UNKNOWN_SIZE if isinstance(left, str) or isinstance(right, str) else left + right


def product(sizes: Shape) -> Size:
    """Product of all sizes."""
    total = numel(sizes)
    return UNKNOWN_SIZE if total is None else total


def checked_size(shape: Shape) -> Shape:
    """The shape itself.

    Raises:
        GraphError: a size is negative.
    """
    if any(isinstance(s, int) and s < 0 for s in shape):
        raise GraphError(f"negative size in {show(shape)}")
    return shape


def _broadcast_size(left: Size, right: Size) -> Size | None:
    if left == right or right == 1:
        return left
    if left == 1:
        return right
    if isinstance(left, str):
        # A symbol against a size above 1 can only be 1 or that size; against another symbol nothing is known.
        return UNKNOWN_SIZE if isinstance(right, str) else right
    return left if isinstance(right, str) else None


def broadcast(shapes: Sequence[Shape]) -> Shape:
    """Shape of an elementwise operator over operands of these shapes.

    >>> broadcast([(4, 1, 3), (5, 1)])
    (4, 5, 3)

    Raises:
        GraphError: two sizes differ and neither is 1.
    """
    if not shapes:
        return ()
    result = shapes[0]
    for shape in shapes[1:]:
        if shape == result:
            continue
        long, short = (result, shape) if len(result) >= len(shape) else (shape, result)
        offset = len(long) - len(short)
        merged = list(long)
        for i, size in enumerate(short):
            joined = _broadcast_size(long[offset + i], size)
            if joined is None:
                raise GraphError(
                    f"shapes {show(result)} and {show(shape)} do not broadcast: "
                    f"sizes {long[offset + i]} and {size} differ and neither is 1"
                )
            merged[offset + i] = joined
        result = tuple(merged)
    return result


def expands_to(shape: Shape, target: Shape) -> bool:
    """True when ``shape`` broadcasts to exactly ``target``."""
    offset = len(target) - len(shape)
    return offset >= 0 and all(s == 1 or same_size(s, target[offset + i]) for i, s in enumerate(shape))


def normalize_dim(dim: int, rank: int) -> int:
    """Dimension counted from the front; a tensor of rank 0 is treated as rank 1, as PyTorch does.

    Raises:
        GraphError: ``dim`` is outside ``[-rank, rank)``.
    """
    bound = rank or 1
    if not -bound <= dim < bound:
        raise GraphError(f"dimension {dim} is out of range for rank {rank}: expected {-bound} to {bound - 1}")
    return dim + bound if dim < 0 else dim


def normalize_dims(dims: Sequence[int], rank: int) -> tuple[int, ...]:
    """Every dimension counted from the front, in the order given.

    Raises:
        GraphError: one is out of range, or two are the same.
    """
    out = tuple(normalize_dim(d, rank) for d in dims)
    if len(set(out)) != len(out):
        raise GraphError(f"dimensions {list(dims)} name one dimension twice")
    return out


def slice_bounds(size: int, start: int | None, end: int | None, step: int = 1) -> tuple[int, int]:
    """First index and end of ``x[start:end:step]`` along a dimension of ``size`` elements.

    Negative bounds count from the end, both are clamped, and an end before the start gives an empty slice.

    >>> slice_bounds(8, -3, 9223372036854775807)
    (5, 8)

    Raises:
        GraphError: ``step`` is not positive.
    """
    if step <= 0:
        raise GraphError(f"slice step {step} is not positive")
    first = 0 if start is None else start
    stop = size if end is None else end
    first = min(max(first + size if first < 0 else first, 0), size)
    stop = min(max(stop + size if stop < 0 else stop, 0), size)
    return first, max(first, stop)


def slice_length(size: int, start: int | None, end: int | None, step: int = 1) -> int:
    """Number of elements of ``x[start:end:step]``."""
    first, stop = slice_bounds(size, start, end, step)
    return -(-(stop - first) // step)


def resolve_view(shape: Shape, requested: Shape) -> Shape:
    """Shape of ``x.view(requested)``; one size may be -1.

    >>> resolve_view((6, 4), (2, -1))
    (2, 12)

    Raises:
        GraphError: the element counts differ, or the -1 has no unique integer value.
    """
    infer = [i for i, s in enumerate(requested) if s == -1]
    for size in requested:
        if isinstance(size, int) and size < -1:
            raise GraphError(f"view size {size} in {show(requested)} is negative")
    if len(infer) > 1:
        raise GraphError(f"view size {show(requested)} has more than one -1")
    have = numel(shape)
    rest = numel(tuple(s for s in requested if s != -1))
    if not infer:
        if have is not None and rest is not None and have != rest:
            raise GraphError(f"view of {show(shape)} ({have} elements) as {show(requested)} ({rest} elements)")
        return requested
    if have is None or rest is None:
        inferred: Size = UNKNOWN_SIZE
    elif rest == 0 or have % rest:
        raise GraphError(f"view of {show(shape)} ({have} elements) as {show(requested)}: the -1 has no unique value")
    else:
        inferred = have // rest
    return replace(requested, infer[0], inferred)


def reduce_shape(shape: Shape, dims: Sequence[int] | None, keepdim: bool = False) -> Shape:
    """Shape after reducing ``dims`` (None or empty: all of them).

    Raises:
        GraphError: a dimension is out of range or named twice.
    """
    gone = set(normalize_dims(dims, len(shape))) if dims else set(range(len(shape)))
    if keepdim:
        return tuple(1 if i in gone else s for i, s in enumerate(shape))
    return tuple(s for i, s in enumerate(shape) if i not in gone)


def replace(shape: Shape, dim: int, size: Size) -> Shape:
    """``shape`` with another size at ``dim`` (already normalised)."""
    return (*shape[:dim], size, *shape[dim + 1 :])
