"""Contractions: matrix products, einsum, grouped matrix products and convolutions.

Operands of one call share a dtype in PyTorch; where they do not, only the shape is computed.
"""

from __future__ import annotations

from emerge.facts.shape_rules.algebra import (
    Size,
    broadcast,
    expands_to,
    merge_size,
    normalize_dims,
    same_size,
    show,
)
from emerge.facts.shape_rules.core import (
    Call,
    Result,
    Rules,
    Spec,
    Undecided,
    common_dtype,
    require_rank,
    require_same_size,
    table,
)
from emerge.graph.model import DType, Shape, TensorType
from emerge.util.errors import GraphError


def _require_inner(left: Size, right: Size) -> None:
    if not same_size(left, right):
        raise GraphError(f"inner sizes {left} and {right} differ")


def _out_dtype(call: Call, *operands: TensorType | None) -> str | None:
    """The ``dtype`` overloads end with the dtype of the result."""
    for value in (*call.args, *call.kwargs.values()):
        if isinstance(value, DType):
            return value.name
    return common_dtype(*operands)


def _mm_shape(left: TensorType, right: TensorType) -> Shape:
    require_rank("the left operand", left, 2)
    require_rank("the right operand", right, 2)
    _require_inner(left.shape[1], right.shape[0])
    return (left.shape[0], right.shape[1])


def _bmm_shape(left: TensorType, right: TensorType) -> Shape:
    require_rank("the left operand", left, 3)
    require_rank("the right operand", right, 3)
    require_same_size("the batch size of the right operand", right.shape[0], left.shape[0])
    _require_inner(left.shape[2], right.shape[1])
    return (merge_size(left.shape[0], right.shape[0]), left.shape[1], right.shape[2])


def _mm(call: Call) -> Result:
    left, right = call.tensor(0, "self"), call.tensor(1, "mat2")
    return Spec(_out_dtype(call, left, right), _mm_shape(left, right))


def _int_mm(call: Call) -> Result:
    return Spec("int32", _mm_shape(call.tensor(0, "self"), call.tensor(1, "mat2")))


def _scaled_mm(call: Call) -> Result:
    shape = _mm_shape(call.tensor(0, "self"), call.tensor(1, "mat2"))
    return Spec(call.dtype(None, 6, "out_dtype"), shape)


def _bmm(call: Call) -> Result:
    left, right = call.tensor(0, "self"), call.tensor(1, "mat2")
    return Spec(_out_dtype(call, left, right), _bmm_shape(left, right))


def _require_addend(addend: TensorType, shape: Shape) -> None:
    if not expands_to(addend.shape, shape):
        raise GraphError(f"the addend of shape {show(addend.shape)} does not broadcast to {show(shape)}")


def _addmm(call: Call) -> Result:
    addend, left, right = call.tensor(0, "self"), call.tensor(1, "mat1"), call.tensor(2, "mat2")
    shape = _mm_shape(left, right)
    _require_addend(addend, shape)
    return Spec(_out_dtype(call, addend, left, right), shape)


def _baddbmm(call: Call) -> Result:
    addend, left, right = call.tensor(0, "self"), call.tensor(1, "batch1"), call.tensor(2, "batch2")
    shape = _bmm_shape(left, right)
    _require_addend(addend, shape)
    return Spec(_out_dtype(call, addend, left, right), shape)


def matmul_shape(left: Shape, right: Shape) -> Shape:
    """Shape of ``left @ right``: vectors are promoted to matrices, leading dimensions broadcast.

    Raises:
        GraphError: an operand has rank 0, inner sizes differ, or the leading dimensions do not broadcast.
    """
    if not left or not right:
        raise GraphError("a matrix product needs operands of rank 1 or more")
    a = (1, *left) if len(left) == 1 else left
    b = (*right, 1) if len(right) == 1 else right
    _require_inner(a[-1], b[-2])
    lead = broadcast([a[:-2], b[:-2]])
    rows: Shape = () if len(left) == 1 else (a[-2],)
    columns: Shape = () if len(right) == 1 else (b[-1],)
    return lead + rows + columns


def _matmul(call: Call) -> Result:
    left, right = call.tensor(0, "self"), call.tensor(1, "other")
    return Spec(common_dtype(left, right), matmul_shape(left.shape, right.shape))


def _linear(call: Call) -> Result:
    operand, weight, bias = call.tensor(0, "input"), call.tensor(1, "weight"), call.optional_tensor(2, "bias")
    require_rank("the weight", weight, 1, 2)
    if not operand.shape:
        raise GraphError("linear needs an input of rank 1 or more")
    _require_inner(operand.shape[-1], weight.shape[-1])
    shape = (*operand.shape[:-1], *weight.shape[:-1])
    # Which biases of rank 2 are accepted depends on the ranks of the other operands and on the kernel.
    if bias is not None and len(bias.shape) < 2:
        _require_addend(bias, weight.shape[:-1])
    return Spec(common_dtype(operand, weight, bias), shape)


def _dot(call: Call) -> Result:
    left, right = call.tensor(0, "self"), call.tensor(1, "tensor" if "tensor" in call.kwargs else "other")
    require_rank("the left operand", left, 1)
    require_rank("the right operand", right, 1)
    _require_inner(left.shape[0], right.shape[0])
    return Spec(common_dtype(left, right), ())


def _mv(call: Call) -> Result:
    matrix, vector = call.tensor(0, "self"), call.tensor(1, "vec")
    require_rank("the matrix", matrix, 2)
    require_rank("the vector", vector, 1)
    _require_inner(matrix.shape[1], vector.shape[0])
    return Spec(common_dtype(matrix, vector), (matrix.shape[0],))


def _outer(call: Call) -> Result:
    left, right = call.tensor(0, "self"), call.tensor(1, "vec2")
    require_rank("the left operand", left, 1)
    require_rank("the right operand", right, 1)
    return Spec(common_dtype(left, right), left.shape + right.shape)


def _tensordot(call: Call) -> Result:
    left, right = call.tensor(0, "self"), call.tensor(1, "other")
    a = normalize_dims(call.integers(2, "dims_self") or [], len(left.shape))
    b = normalize_dims(call.integers(3, "dims_other") or [], len(right.shape))
    if len(a) != len(b):
        raise GraphError(f"{len(a)} dimensions of the left operand against {len(b)} of the right one")
    for i, j in zip(a, b):
        if 1 not in (left.shape[i], right.shape[j]):  # PyTorch sums the other operand against a size of 1
            _require_inner(left.shape[i], right.shape[j])
    rest = tuple(s for i, s in enumerate(left.shape) if i not in a)
    return Spec(common_dtype(left, right), rest + tuple(s for j, s in enumerate(right.shape) if j not in b))


def einsum_shape(equation: str, shapes: list[Shape]) -> Shape:
    """Shape of ``einsum(equation, ...)``; ``...`` and implicit outputs are allowed, sizes of 1 broadcast.

    Raises:
        GraphError: the equation is malformed or does not fit the ranks and sizes.
    """
    inputs, arrow, output = equation.replace(" ", "").partition("->")
    terms = inputs.split(",")
    if len(terms) != len(shapes):
        raise GraphError(f"einsum '{equation}' names {len(terms)} operands, found {len(shapes)}")
    sizes: dict[str, Size] = {}
    ellipses: list[Shape] = []
    for term, shape in zip(terms, shapes):
        before, dots, after = term.partition("...")
        free = len(shape) - len(before) - len(after)
        if free < 0 or (free and not dots):
            raise GraphError(f"einsum term '{term}' does not fit rank {len(shape)}")
        if dots:
            ellipses.append(shape[len(before) : len(before) + free])
        tail = shape[len(shape) - len(after) :] if after else ()
        own: dict[str, Size] = {}
        for label, size in zip(before + after, shape[: len(before)] + tail):
            if not same_size(own.setdefault(label, size), size):
                raise GraphError(f"einsum label '{label}' is repeated in '{term}' with sizes {own[label]} and {size}")
            known = sizes.get(label, 1)
            if size != 1 and known != 1 and not same_size(known, size):
                raise GraphError(f"einsum label '{label}' has sizes {known} and {size}")
            sizes[label] = size if known == 1 else (known if size == 1 else merge_size(known, size))
    rest = broadcast(ellipses) if ellipses else ()
    if not arrow:
        labels = "".join(terms).replace("...", "")
        output = "..." + "".join(sorted(c for c in set(labels) if labels.count(c) == 1))
    before, dots, after = output.partition("...")
    unknown = [c for c in before + after if c not in sizes]
    if unknown:
        raise GraphError(f"einsum output label '{unknown[0]}' is in no operand")
    if rest and not dots:
        raise Undecided  # PyTorch sums over the dimensions of a dropped ellipsis
    return tuple(sizes[c] for c in before) + rest + tuple(sizes[c] for c in after)


def _einsum(call: Call) -> Result:
    equation, operands = call.get(0, "equation"), call.tensors(1, "tensors")
    if not isinstance(equation, str):
        raise GraphError("expected operand 'equation' to be a string")
    return Spec(common_dtype(*operands), einsum_shape(equation, [o.shape for o in operands]))


def _grouped_mm(call: Call) -> Result:
    left, right, offsets = call.tensor(0, "self"), call.tensor(1, "mat2"), call.optional_tensor(2, "offs")
    require_rank("the left operand", left, 2, 3)
    require_rank("the right operand", right, 2, 3)
    _require_inner(left.shape[-1], right.shape[-2])
    ranks = (len(left.shape), len(right.shape))
    dtype = call.dtype(common_dtype(left, right), 4, "out_dtype")
    if ranks == (3, 3):
        return Spec(dtype, _bmm_shape(left, right))
    if offsets is None:
        raise GraphError(f"operands of ranks {ranks[0]} and {ranks[1]} need group offsets")
    require_rank("the offsets", offsets, 1)
    groups = offsets.shape[0]
    if ranks == (2, 2):
        return Spec(dtype, (groups, left.shape[0], right.shape[1]))
    batched = right if ranks == (2, 3) else left
    require_same_size("the number of groups", batched.shape[0], groups)
    return Spec(dtype, (left.shape[-2], right.shape[-1]))


def _per_dim(values: list[int] | None, count: int, default: int) -> list[int]:
    values = values or [default]
    if len(values) not in (1, count):
        raise GraphError(f"{values} gives {len(values)} values for {count} spatial dimensions")
    return values * count if len(values) == 1 else values


def _convolution(call: Call) -> Result:
    """conv1d/2d/3d (input, weight, bias, stride, padding, dilation, groups) and the general aten.convolution."""
    operand, weight = call.tensor(0, "input"), call.tensor(1, "weight")
    general = "convolution." in call.op
    spatial = len(weight.shape) - 2 if general else int(call.op.removeprefix("aten.conv")[0])
    if spatial < 1 or len(weight.shape) != spatial + 2 or len(operand.shape) not in (spatial + 1, spatial + 2):
        raise GraphError(f"input {show(operand.shape)} and weight {show(weight.shape)} have unfitting ranks")
    if general:
        require_rank("the input", operand, spatial + 2)
    if isinstance(call.get(4, "padding", 0), str):
        raise Undecided
    stride = _per_dim(call.integers(3, "stride", None), spatial, 1)
    padding = _per_dim(call.integers(4, "padding", None), spatial, 0)
    dilation = _per_dim(call.integers(5, "dilation", None), spatial, 1)
    if min(stride) <= 0 or min(dilation) <= 0 or min(padding) < 0:
        raise GraphError(f"stride {stride}, padding {padding} or dilation {dilation} is out of range")
    transposed = general and call.flag(6, "transposed")
    extra = _per_dim(call.integers(7, "output_padding", None) if general else None, spatial, 0)
    groups = call.integer(8 if general else 6, "groups", 1)
    if groups <= 0 or (isinstance(weight.shape[0], int) and weight.shape[0] % groups):
        raise GraphError(f"{weight.shape[0]} channels of the weight do not divide into {groups} groups")
    channels, per_group = operand.shape[-spatial - 1], weight.shape[0 if transposed else 1]
    if isinstance(per_group, int):
        require_same_size("the channel size of the input", channels, per_group if transposed else per_group * groups)
    made: Size = weight.shape[0]
    if transposed:
        made = weight.shape[1] * groups if isinstance(weight.shape[1], int) else "?"
    lengths: list[Size] = []
    for size, kernel, s, p, d, e in zip(operand.shape[-spatial:], weight.shape[2:], stride, padding, dilation, extra):
        if isinstance(size, str) or isinstance(kernel, str):
            lengths.append("?")
            continue
        span = d * (kernel - 1)
        length = (size - 1) * s - 2 * p + span + e + 1 if transposed else (size + 2 * p - span - 1) // s + 1
        if length <= 0:
            raise GraphError(f"kernel of size {kernel} does not fit the padded size {size + 2 * p}")
        lengths.append(length)
    lead: Shape = operand.shape[:1] if len(operand.shape) == spatial + 2 else ()
    return Spec(common_dtype(operand, weight), (*lead, made, *lengths))


RULES: Rules = {
    **table("mm", _mm),
    **table("_int_mm", _int_mm),
    **table("_scaled_mm", _scaled_mm),
    **table("bmm", _bmm),
    **table("addmm", _addmm),
    **table("baddbmm", _baddbmm),
    **table("matmul", _matmul),
    **table("linear", _linear),
    **table("dot vdot", _dot),
    **table("mv", _mv),
    **table("outer ger", _outer),
    **table("tensordot", _tensordot),
    **table("einsum", _einsum),
    **table("_grouped_mm", _grouped_mm),
    **table("conv1d conv2d conv3d convolution _convolution", _convolution),
}
