"""Elementwise operators: the result has the broadcast shape of the tensor operands.

A family is a dtype policy and the names of its operators; one entry covers all overloads (``add.Tensor``,
``add.Scalar``, ...) and the in-place form.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from emerge.facts.shape_rules import promotion
from emerge.facts.shape_rules.algebra import broadcast, expands_to, show
from emerge.facts.shape_rules.core import Call, Result, Rule, Rules, Spec, Symbol, Undecided, like, table
from emerge.graph.model import TensorType
from emerge.util.errors import GraphError

DtypePolicy = Callable[[Sequence[object]], "str | None"]


def _same(operands: Sequence[object]) -> str | None:
    first = operands[0]
    return first.dtype if isinstance(first, TensorType) else None


def _boolean(_: Sequence[object]) -> str | None:
    return "bool"


def _floating(operands: Sequence[object]) -> str | None:
    return promotion.to_floating(promotion.result_type(operands))


def _uncertain(_: Sequence[object]) -> str | None:
    return None


def _real(operands: Sequence[object]) -> str | None:
    return promotion.to_real(_same(operands))


def _branches(operands: Sequence[object]) -> str | None:
    """dtype of ``where``: its first operand is the condition."""
    return promotion.result_type(operands[1:])


#: one operand, dtype kept: arithmetic, rounding and activations that are defined on floating tensors only.
UNARY_SAME = (
    "neg negative positive relu relu6 floor ceil round trunc fix frac square sign sgn bitwise_not conj _conj "
    "_conj_physical conj_physical resolve_conj resolve_neg nan_to_num "
    "gelu silu mish softplus hardswish hardsigmoid selu celu log_sigmoid softshrink hardshrink threshold "
    "dropout alpha_dropout feature_dropout bernoulli zero fill "
    "clone contiguous alias alias_copy detach detach_copy lift lift_fresh lift_fresh_copy "
    "uniform_ normal_ exponential_ random_"
)
#: one operand, result floating: integers and booleans become the default floating dtype.
UNARY_FLOATING = (
    "exp exp2 expm1 log log2 log10 log1p sqrt rsqrt reciprocal sigmoid tanh sin cos tan asin acos atan sinh cosh "
    "asinh acosh atanh erf erfc erfinv lgamma digamma deg2rad rad2deg logit special_expit i0 sinc"
)
#: one operand, result boolean.
UNARY_BOOLEAN = "logical_not isnan isinf isfinite isposinf isneginf signbit"
#: one operand with a dtype that is not worked out here.
UNARY_UNCERTAIN = "elu leaky_relu hardtanh"

#: two operands under type promotion.
BINARY_PROMOTED = (
    "add sub subtract mul multiply rsub floor_divide remainder fmod maximum minimum fmax fmin "
    "bitwise_and bitwise_or bitwise_xor __or__ __and__ __xor__ bitwise_left_shift bitwise_right_shift "
    "__lshift__ __rshift__ logaddexp logaddexp2 hypot"
)
#: two operands under type promotion, result floating.
BINARY_FLOATING = "true_divide atan2 arctan2 xlogy special_xlogy copysign"
#: two operands, result boolean.
BINARY_BOOLEAN = (
    "eq ne lt le gt ge greater greater_equal less less_equal not_equal logical_and logical_or logical_xor isclose"
)

#: gradient of a unary function: (gradient, saved operand).
BACKWARD_PAIRS = (
    "gelu_backward silu_backward sigmoid_backward tanh_backward threshold_backward hardtanh_backward "
    "leaky_relu_backward softplus_backward hardswish_backward hardsigmoid_backward mish_backward "
    "log_sigmoid_backward native_dropout_backward"
)


def pointwise(names: Sequence[str], policy: DtypePolicy) -> Rule:
    """Rule of an elementwise operator with these operand names."""

    def rule(call: Call) -> Result:
        operands = [call.operand(i, name) for i, name in enumerate(names)]
        shapes = [o.shape for o in operands if isinstance(o, TensorType)]
        if not shapes:
            raise Undecided
        return Spec(policy(operands), shapes[0] if len(shapes) == 1 else broadcast(shapes))

    return rule


def _unary(policy: DtypePolicy) -> Rule:
    def rule(call: Call) -> Result:
        if isinstance(call.get(0, "self"), (int, float, Symbol)):
            raise Undecided  # a function of Python numbers
        operand = call.tensor(0, "self")
        return Spec(policy([operand]), operand.shape)

    return rule


def _div(call: Call) -> Result:
    operands = [call.operand(0, "self"), call.operand(1, "other")]
    dtype = promotion.result_type(operands)
    if call.get(2, "rounding_mode") is None:
        dtype = promotion.to_floating(dtype)
    return Spec(dtype, broadcast([o.shape for o in operands if isinstance(o, TensorType)]))


def _masked_fill(call: Call) -> Result:
    operand, mask = call.tensor(0, "self"), call.tensor(1, "mask")
    if mask.dtype != "bool":
        raise GraphError(f"the mask has dtype {mask.dtype}, expected bool")
    value = call.operand(2, "value")
    if isinstance(value, TensorType) and value.shape:
        raise GraphError(f"the fill value has shape {show(value.shape)}, expected a number or a 0-dimensional tensor")
    return Spec(operand.dtype, broadcast([operand.shape, mask.shape]))


def _where(call: Call) -> Result:
    if len(call.args) + len(call.kwargs) < 3:
        raise Undecided  # where(condition) = nonzero
    return pointwise(("condition", "self", "other"), _branches)(call)


def _copy(call: Call) -> Result:
    target, source = call.tensor(0, "self"), call.tensor(1, "src")
    if not expands_to(source.shape, target.shape):
        raise GraphError(f"a value of shape {show(source.shape)} cannot be copied into {show(target.shape)}")
    return like(target)


def _triangle(call: Call) -> Result:
    operand = call.tensor(0, "self")
    if len(operand.shape) < 2:
        raise GraphError(f"a triangle of {show(operand.shape)}, expected at least 2 dimensions")
    return like(operand)


def _elu_backward(call: Call) -> Result:
    """(gradient, alpha, scale, input scale, is_result, operand or result)."""
    grad, saved = call.tensor(0, "grad_output"), call.tensor(5, "self_or_result")
    return Spec(promotion.result_type([grad, saved]), broadcast([grad.shape, saved.shape]))


def _native_dropout(call: Call) -> Result:
    operand = call.tensor(0, "input")
    # The CPU kernel returns a floating mask for an empty operand.
    return [like(operand), Spec(None if 0 in operand.shape else "bool", operand.shape)]


def _log_sigmoid_forward(call: Call) -> Result:
    # The second output is a scratch buffer whose shape depends on the device.
    return [like(call.tensor(0, "self")), None]


def _frexp(call: Call) -> Result:
    operand = call.tensor(0, "self")
    return [like(operand), Spec("int32", operand.shape)]


RULES: Rules = {
    **table(UNARY_SAME, _unary(_same)),
    **table(UNARY_FLOATING, _unary(_floating)),
    **table(UNARY_BOOLEAN, _unary(_boolean)),
    **table(UNARY_UNCERTAIN, _unary(_uncertain)),
    **table("abs absolute real imag angle", _unary(_real)),
    **table(BINARY_PROMOTED, pointwise(("self", "other"), promotion.result_type)),
    **table(BINARY_FLOATING, pointwise(("self", "other"), _floating)),
    **table(BINARY_BOOLEAN, pointwise(("self", "other"), _boolean)),
    **table(BACKWARD_PAIRS, pointwise(("grad_output", "self"), promotion.result_type)),
    **table("elu_backward", _elu_backward),
    **table("tril triu", _triangle),
    **table("pow", pointwise(("self", "exponent"), promotion.result_type)),
    **table("div divide", _div),
    **table("clamp_min", pointwise(("self", "min"), promotion.result_type)),
    **table("clamp_max", pointwise(("self", "max"), promotion.result_type)),
    **table("clamp clip", pointwise(("self", "min", "max"), promotion.result_type)),
    **table("lerp", pointwise(("self", "end", "weight"), _same)),
    **table("addcmul addcdiv", pointwise(("self", "tensor1", "tensor2"), promotion.result_type)),
    **table("masked_fill", _masked_fill),
    **table("where", _where),
    **table("copy", _copy),
    **table("native_dropout", _native_dropout),
    **table("log_sigmoid_forward", _log_sigmoid_forward),
    **table("frexp", _frexp),
}
