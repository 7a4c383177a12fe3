"""Layout operators: the elements stay, their arrangement changes (view, permute, expand, squeeze, flip, ...)."""

from __future__ import annotations

from emerge.facts.shape_rules.algebra import (
    Size,
    checked_size,
    is_static,
    multiply,
    normalize_dim,
    normalize_dims,
    product,
    replace,
    resolve_view,
    same_size,
    show,
)
from emerge.facts.shape_rules.core import Call, Result, Rules, Spec, Undecided, like, require_rank, table
from emerge.facts.shape_rules.promotion import to_complex, to_real
from emerge.graph.model import DTYPES, DType, Shape
from emerge.util.errors import GraphError


def _view(call: Call) -> Result:
    operand = call.tensor(0, "self")
    if isinstance(call.get(1, "dtype"), DType):
        return _reinterpret(operand.dtype, operand.shape, call.get(1, "dtype").name)
    return Spec(operand.dtype, resolve_view(operand.shape, call.size(1, _size_name(call))))


def _size_name(call: Call) -> str:
    """view and friends name their argument ``size``, reshape ``shape``."""
    return "shape" if "shape" in call.kwargs else "size"


def _reinterpret(old: str, shape: Shape, new: str) -> Spec:
    """view.dtype: the last dimension changes by the ratio of the widths."""
    if old not in DTYPES or new not in DTYPES:
        raise Undecided
    before, after = DTYPES[old][1], DTYPES[new][1]
    if before == after:
        return Spec(new, shape)
    if not shape:
        raise GraphError(f"a 0-dimensional {old} tensor cannot be viewed as {new}: the widths differ")
    last = shape[-1]
    if isinstance(last, str):
        return Spec(new, (*shape[:-1], "?"))
    if last * before % after:
        raise GraphError(f"last size {last} of {old} is not a whole number of {new} elements")
    return Spec(new, (*shape[:-1], last * before // after))


def _view_as(call: Call) -> Result:
    operand, other = call.tensor(0, "self"), call.tensor(1, "other")
    return Spec(operand.dtype, resolve_view(operand.shape, other.shape))


def _expand_to(shape: Shape, requested: Shape) -> Shape:
    offset = len(requested) - len(shape)
    if offset < 0:
        raise GraphError(f"{show(shape)} cannot be expanded to the lower rank of {show(requested)}")
    out: list[Size] = []
    for i, want in enumerate(requested):
        have = shape[i - offset] if i >= offset else None
        if want == -1:
            if have is None:
                raise GraphError(f"size -1 of {show(requested)} stands for no dimension of {show(shape)}")
            out.append(have)
        elif isinstance(want, int) and want < 0:
            raise GraphError(f"negative size in {show(requested)}")
        elif have is None or have == 1 or same_size(have, want):
            out.append(want)
        else:
            raise GraphError(f"{show(shape)} cannot be expanded to {show(requested)}: size {have} is not 1 or {want}")
    return tuple(out)


def _expand(call: Call) -> Result:
    operand = call.tensor(0, "self")
    return Spec(operand.dtype, _expand_to(operand.shape, call.size(1, "size")))


def _expand_as(call: Call) -> Result:
    operand, other = call.tensor(0, "self"), call.tensor(1, "other")
    return Spec(operand.dtype, _expand_to(operand.shape, other.shape))


def _permute(call: Call) -> Result:
    operand = call.tensor(0, "self")
    dims = call.integers(1, "dims") or []
    if len(dims) != len(operand.shape):
        raise GraphError(f"permutation {dims} of {len(dims)} dimensions, but the operand has {len(operand.shape)}")
    return Spec(operand.dtype, tuple(operand.shape[d] for d in normalize_dims(dims, len(operand.shape))))


def _transpose(call: Call) -> Result:
    operand = call.tensor(0, "self")
    rank = len(operand.shape)
    # swapaxes names its arguments axis0, axis1.
    first, second = (
        call.dim(1, "axis0" if "axis0" in call.kwargs else "dim0", rank),
        call.dim(2, "axis1" if "axis1" in call.kwargs else "dim1", rank),
    )
    shape = list(operand.shape)
    if shape:
        shape[first], shape[second] = shape[second], shape[first]
    return Spec(operand.dtype, tuple(shape))


def _t(call: Call) -> Result:
    operand = call.tensor(0, "self")
    if len(operand.shape) > 2:
        raise GraphError(f"t expects at most 2 dimensions, found {len(operand.shape)}; transpose names two of them")
    return Spec(operand.dtype, operand.shape[::-1])


def _reversed(call: Call) -> Result:
    operand = call.tensor(0, "self")
    return Spec(operand.dtype, operand.shape[::-1])


def _matrix_transpose(call: Call) -> Result:
    operand = call.tensor(0, "self")
    if len(operand.shape) < 2:
        raise GraphError(f"a matrix transpose needs 2 dimensions, found {len(operand.shape)}")
    return Spec(operand.dtype, (*operand.shape[:-2], operand.shape[-1], operand.shape[-2]))


def _matrix_h(call: Call) -> Result:
    require_rank("the operand", call.tensor(0, "self"), 2)
    return _reversed(call)


def _movedim(call: Call) -> Result:
    operand = call.tensor(0, "self")
    rank = len(operand.shape)
    source, target = call.integers(1, "source") or [], call.integers(2, "destination") or []
    if len(source) != len(target):
        raise GraphError(f"{len(source)} source but {len(target)} destination dimensions")
    moved = dict(zip(normalize_dims(target, rank), normalize_dims(source, rank)))
    rest = iter(d for d in range(rank) if d not in moved.values())
    order = [moved[i] if i in moved else next(rest) for i in range(rank)]
    return Spec(operand.dtype, tuple(operand.shape[d] for d in order))


def _squeeze(call: Call) -> Result:
    operand = call.tensor(0, "self")
    dims = call.integers(1, "dim", None)
    if dims is None and not is_static(operand.shape):
        raise Undecided
    rank = len(operand.shape)
    chosen = range(rank) if dims is None else normalize_dims(dims, rank)
    if any(isinstance(operand.shape[d], str) for d in chosen if operand.shape):
        raise Undecided
    return Spec(operand.dtype, tuple(s for i, s in enumerate(operand.shape) if not (i in chosen and s == 1)))


def _unsqueeze(call: Call) -> Result:
    operand = call.tensor(0, "self")
    dim = call.dim(1, "dim", len(operand.shape) + 1)
    return Spec(operand.dtype, (*operand.shape[:dim], 1, *operand.shape[dim:]))


def _flatten(call: Call) -> Result:
    operand = call.tensor(0, "self")
    rank = len(operand.shape)
    first, last = call.dim(1, "start_dim", rank, 0), call.dim(2, "end_dim", rank, -1)
    if first > last:
        raise GraphError(f"flatten from dimension {first} to the earlier dimension {last}")
    if not operand.shape:
        return Spec(operand.dtype, (1,))
    merged = product(operand.shape[first : last + 1])
    return Spec(operand.dtype, (*operand.shape[:first], merged, *operand.shape[last + 1 :]))


def _unflatten(call: Call) -> Result:
    operand = call.tensor(0, "self")
    dim = call.dim(1, "dim", len(operand.shape))
    sizes = resolve_view((operand.shape[dim],), call.size(2, "sizes"))
    return Spec(operand.dtype, (*operand.shape[:dim], *sizes, *operand.shape[dim + 1 :]))


def _repeat(call: Call) -> Result:
    """repeat, and tile, which accepts fewer repeats than dimensions."""
    operand = call.tensor(0, "self")
    tile = ".tile." in call.op
    repeats = call.size(1, "dims" if tile else "repeats")
    missing = len(operand.shape) - len(repeats)
    if missing > 0:
        if not tile:
            raise GraphError(f"{len(repeats)} repeats for {len(operand.shape)} dimensions")
        repeats = (1,) * missing + repeats
    if any(isinstance(r, int) and r < 0 for r in repeats):
        raise GraphError(f"negative repeat in {show(repeats)}")
    padded = (1,) * (len(repeats) - len(operand.shape)) + operand.shape
    return Spec(operand.dtype, tuple(multiply(s, r) for s, r in zip(padded, repeats)))


def _repeat_interleave(call: Call) -> Result:
    given = call.get(-1, "output_size")
    total: Size | None = given if isinstance(given, int) else None
    if call.overload in ("Tensor", "Tensor_out"):
        repeats = call.tensor(0, "repeats")
        if len(repeats.shape) != 1:
            raise GraphError(f"the repeats have rank {len(repeats.shape)}, expected 1")
        return Spec(repeats.dtype, ("?" if total is None else total,))
    operand, count = call.tensor(0, "self"), call.get(1, "repeats")
    dim = call.optional_integer(2, "dim")
    shape: Shape = (product(operand.shape),) if dim is None else operand.shape
    at = 0 if dim is None else normalize_dim(dim, len(shape))
    if not shape:
        raise Undecided
    if isinstance(count, int) and not isinstance(count, bool):
        if count < 0:
            raise GraphError(f"negative repeat {count}")
        return Spec(operand.dtype, replace(shape, at, multiply(shape[at], count)))
    return Spec(operand.dtype, replace(shape, at, "?" if total is None else total))


def _view_as_complex(call: Call) -> Result:
    operand = call.tensor(0, "self")
    if not operand.shape or not same_size(operand.shape[-1], 2):
        raise GraphError(f"the last size of {show(operand.shape)} has to be 2 (real and imaginary part)")
    return Spec(to_complex(operand.dtype), operand.shape[:-1])


def _view_as_real(call: Call) -> Result:
    operand = call.tensor(0, "self")
    if not operand.dtype.startswith("complex"):
        raise GraphError(f"view_as_real of {operand.dtype}, expected a complex dtype")
    return Spec(to_real(operand.dtype), (*operand.shape, 2))


def _flip(call: Call) -> Result:
    operand = call.tensor(0, "self")
    normalize_dims(call.integers(1, "dims") or [], len(operand.shape))
    return like(operand)


def _roll(call: Call) -> Result:
    operand = call.tensor(0, "self")
    if 0 not in operand.shape:
        for dim in call.integers(2, "dims", None) or []:
            normalize_dim(dim, len(operand.shape))
    return like(operand)


def _as_strided(call: Call) -> Result:
    # The storage behind the operand is not declared, so only the result is known.
    size, strides = checked_size(call.size(1, "size")), call.integers(2, "stride") or []
    if len(strides) != len(size) or min(strides, default=0) < 0:
        raise GraphError(f"strides {strides} do not fit size {show(size)}")
    return Spec(call.tensor(0, "self").dtype, size)


def _diagonal(call: Call) -> Result:
    operand = call.tensor(0, "self")
    rank = len(operand.shape)
    offset = call.integer(1, "offset", 0)
    first, second = call.dim(2, "dim1", rank, 0), call.dim(3, "dim2", rank, 1)
    if first == second:
        raise GraphError(f"the diagonal of dimension {first} with itself")
    rows, columns = operand.shape[first], operand.shape[second]
    rest = tuple(s for i, s in enumerate(operand.shape) if i not in (first, second))
    if isinstance(rows, str) or isinstance(columns, str):
        return Spec(operand.dtype, (*rest, "?"))
    length = max(min(rows, columns - offset) if offset >= 0 else min(rows + offset, columns), 0)
    return Spec(operand.dtype, (*rest, length))


RULES: Rules = {
    **table("view view_copy _unsafe_view reshape _reshape_copy", _view),
    **table("view_as reshape_as", _view_as),
    **table("expand expand_copy", _expand),
    **table("expand_as", _expand_as),
    **table("permute permute_copy", _permute),
    **table("transpose transpose_copy swapaxes swapdims", _transpose),
    **table("t t_copy", _t),
    **table("numpy_T", _reversed),
    **table("mT mH adjoint", _matrix_transpose),
    **table("matrix_H", _matrix_h),
    **table("movedim moveaxis", _movedim),
    **table("squeeze squeeze_copy", _squeeze),
    **table("unsqueeze unsqueeze_copy", _unsqueeze),
    **table("flatten", _flatten),
    **table("unflatten", _unflatten),
    **table("repeat tile", _repeat),
    **table("repeat_interleave", _repeat_interleave),
    **table("view_as_complex view_as_complex_copy", _view_as_complex),
    **table("view_as_real view_as_real_copy", _view_as_real),
    **table("flip", _flip),
    **table("roll", _roll),
    **table("as_strided as_strided_copy _reshape_alias", _as_strided),
    **table("diagonal diagonal_copy", _diagonal),
}

#: layout operators whose in-place form legitimately changes the shape of its operand.
RESHAPES_IN_PLACE = frozenset(table("t transpose swapaxes swapdims squeeze unsqueeze as_strided", _view))
