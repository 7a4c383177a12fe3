"""Neural-network composites: normalisation, attention and losses."""

from __future__ import annotations

from emerge.facts.shape_rules.algebra import Size, broadcast, expands_to, product, same_shape, show
from emerge.facts.shape_rules.core import (
    Call,
    Result,
    Rule,
    Rules,
    Spec,
    common_dtype,
    like,
    require_same_shape,
    require_same_size,
    table,
)
from emerge.facts.shape_rules.indexing import require_index
from emerge.facts.shape_rules.promotion import result_type
from emerge.graph.model import Shape, TensorType, is_floating
from emerge.util.errors import GraphError

# --- normalisation -------------------------------------------------------------------------------------------------


def normalized_lead(operand: TensorType, normalized: Shape, *scales: TensorType | None) -> Shape:
    """The dimensions before the normalised ones; the scales have the normalised shape.

    Raises:
        GraphError: ``normalized`` is not the end of the operand's shape, or a scale has another shape.
    """
    lead = len(operand.shape) - len(normalized)
    if lead < 0 or not normalized or not same_shape(operand.shape[lead:], normalized):
        raise GraphError(f"normalised shape {show(normalized)} is not the end of {show(operand.shape)}")
    for scale in scales:
        if scale is not None:
            require_same_shape("a weight or bias", scale.shape, normalized)
    return operand.shape[:lead]


def _statistics_dtype(operand: TensorType) -> str | None:
    """Mean and 1/std are kept in the input's dtype or in float32, depending on the device, for 16-bit types."""
    return operand.dtype if operand.dtype in ("float32", "float64") else None


def _layer_norm(call: Call) -> Result:
    operand = call.tensor(0, "input")
    normalized_lead(
        operand, call.size(1, "normalized_shape"), call.optional_tensor(2, "weight"), call.optional_tensor(3, "bias")
    )
    return like(operand)


def _rms_norm(call: Call) -> Result:
    operand, weight = call.tensor(0, "input"), call.optional_tensor(2, "weight")
    normalized_lead(operand, call.size(1, "normalized_shape"), weight)
    return Spec(common_dtype(operand, weight), operand.shape)


def _native_layer_norm(call: Call) -> Result:
    operand, normalized = call.tensor(0, "input"), call.size(1, "normalized_shape")
    lead = normalized_lead(operand, normalized, call.optional_tensor(2, "weight"), call.optional_tensor(3, "bias"))
    statistic = Spec(_statistics_dtype(operand), lead + (1,) * len(normalized))
    return [like(operand), statistic, statistic]


def _fused_rms_norm(call: Call) -> Result:
    operand, normalized = call.tensor(0, "input"), call.size(1, "normalized_shape")
    weight = call.optional_tensor(2, "weight")
    lead = normalized_lead(operand, normalized, weight)
    return [
        Spec(common_dtype(operand, weight), operand.shape),
        Spec(_statistics_dtype(operand), lead + (1,) * len(normalized)),
    ]


def _native_layer_norm_backward(call: Call) -> Result:
    grad, operand, normalized = call.tensor(0, "grad_out"), call.tensor(1, "input"), call.size(2, "normalized_shape")
    require_same_shape("the gradient", grad.shape, operand.shape)
    weight, bias = call.optional_tensor(5, "weight"), call.optional_tensor(6, "bias")
    rows = product(normalized_lead(operand, normalized, weight, bias))
    for name, value in (("mean", call.tensor(3, "mean")), ("inverse deviation", call.tensor(4, "rstd"))):
        require_same_size(f"the number of elements of the {name}", product(value.shape), rows)
    return [like(operand), like(weight) if weight else None, like(bias) if bias else None]


def _group_norm(call: Call) -> Result:
    operand, groups = call.tensor(0, "input"), call.integer(1, "num_groups")
    _require_channels(operand, groups, call.optional_tensor(2, "weight"), call.optional_tensor(3, "bias"))
    return like(operand)


def _require_channels(operand: TensorType, groups: int, *scales: TensorType | None) -> None:
    if len(operand.shape) < 2:
        raise GraphError(f"group norm needs [batch, channels, ...], found {show(operand.shape)}")
    channels = operand.shape[1]
    if groups <= 0 or (isinstance(channels, int) and channels % groups):
        raise GraphError(f"{channels} channels do not divide into {groups} groups")
    for scale in scales:
        if scale is not None:
            require_same_shape("a weight or bias", scale.shape, (channels,))


def _native_group_norm(call: Call) -> Result:
    operand, groups = call.tensor(0, "input"), call.integer(6, "group")
    _require_channels(operand, groups, call.optional_tensor(1, "weight"), call.optional_tensor(2, "bias"))
    batch, channels, rest = call.size(3, "N")[0], call.size(4, "C")[0], call.size(5, "HxW")[0]
    require_same_size("the batch size N", batch, operand.shape[0])
    require_same_size("the number of channels C", channels, operand.shape[1])
    require_same_size("HxW", rest, product(operand.shape[2:]))
    statistic = Spec(_statistics_dtype(operand), (operand.shape[0], groups))
    return [like(operand), statistic, statistic]


# --- attention -----------------------------------------------------------------------------------------------------


def attention_shape(query: Shape, key: Shape, value: Shape, grouped: bool = False) -> Shape:
    """[..., queries, head size of the value] of scaled dot-product attention over [..., tokens, head size].

    ``grouped``: the query may have a multiple of the key's and value's heads (dimension -3).

    Raises:
        GraphError: the operands do not fit.
    """
    if min(len(query), len(key), len(value)) < 2:
        raise GraphError("attention operands need [..., tokens, head size]")
    require_same_size("the head size of the key", key[-1], query[-1])
    require_same_size("the number of value tokens", value[-2], key[-2])
    leads = [query[:-2], key[:-2], value[:-2]]
    if grouped and min(len(lead) for lead in leads) >= 1:
        for name, lead in (("key", leads[1]), ("value", leads[2])):
            heads, own = query[-3], lead[-1]
            if isinstance(heads, int) and isinstance(own, int) and (own == 0 or heads % own):
                raise GraphError(f"{heads} query heads are not a multiple of {own} {name} heads")
        leads = [leads[0], (*leads[1][:-1], query[-3]), (*leads[2][:-1], query[-3])]
    return (*broadcast(leads), query[-2], value[-1])


def _attention_operands(call: Call) -> tuple[TensorType, TensorType, TensorType]:
    return call.tensor(0, "query"), call.tensor(1, "key"), call.tensor(2, "value")


def _attention(call: Call) -> Result:
    query, key, value = _attention_operands(call)
    shape = attention_shape(query.shape, key.shape, value.shape, call.flag(-1, "enable_gqa"))
    mask = call.optional_tensor(3, "attn_mask")
    scores = (*shape[:-1], key.shape[-2])
    if mask is not None and not expands_to(mask.shape, scores):
        raise GraphError(f"mask {show(mask.shape)} does not broadcast to the scores {show(scores)}")
    return Spec(query.dtype, shape)


def _attention_math(call: Call) -> Result:
    out = _attention(call)
    query, key, _ = _attention_operands(call)
    lead = broadcast([query.shape[:-2], key.shape[:-2]])
    return [out, Spec(None, (*lead, query.shape[-2], key.shape[-2]))] if isinstance(out, Spec) else out


def _fused_attention(outputs: int, logsumexp: bool) -> Rule:
    """Fused kernels on [batch, heads, tokens, head size]: output, logsumexp [batch, heads, queries], scratch values."""

    def rule(call: Call) -> Result:
        query, key, value = _attention_operands(call)
        for operand in (query, key, value):
            if len(operand.shape) != 4:
                raise GraphError(f"fused attention needs [batch, heads, tokens, head size], not {show(operand.shape)}")
        heads, kv_heads = query.shape[1], key.shape[1]
        shape = attention_shape(query.shape, key.shape, value.shape, grouped=heads != kv_heads)
        rest: list[Spec | None] = [None] * (outputs - 1)
        if logsumexp:
            require_same_size("the head size of the value", value.shape[-1], query.shape[-1])
            rest[0] = Spec("float64" if query.dtype == "float64" else "float32", query.shape[:3])
        return [Spec(query.dtype, shape), *rest]

    return rule


def _attention_backward(outputs: int) -> Rule:
    def rule(call: Call) -> Result:
        query, key, value = call.tensor(1, "query"), call.tensor(2, "key"), call.tensor(3, "value")
        gradient = call.tensor(0, "grad_out_" if "grad_out_" in call.kwargs else "grad_out")
        grouped = query.shape[1:2] != key.shape[1:2]
        expected = attention_shape(query.shape, key.shape, value.shape, grouped)
        require_same_shape("the gradient", gradient.shape, expected)
        specs: list[Spec | None] = [like(query), like(key), like(value)]
        return specs + [None] * (outputs - 3)

    return rule


# --- losses --------------------------------------------------------------------------------------------------------


def _nll_shape(scores: TensorType, target: TensorType, weight: TensorType | None) -> Shape:
    """Per-element loss of class indices: scores [batch, classes] or [classes], target [batch] or []."""
    require_index("the target", target)
    if len(scores.shape) not in (1, 2):
        raise GraphError(f"class scores have shape {show(scores.shape)}, expected [batch, classes] or [classes]")
    if len(scores.shape) == 1 and target.shape in ((), (1,)):
        pass
    else:
        require_same_shape("the target", target.shape, scores.shape[:-1])
    if weight is not None:
        require_same_shape("the class weight", weight.shape, scores.shape[-1:])
    return scores.shape[:-1]


def _reduced(call: Call, position: int) -> bool:
    """True when the loss is one number: reduction 0 none, 1 mean, 2 sum."""
    reduction = call.integer(position, "reduction", 1)
    if reduction not in (0, 1, 2):
        raise GraphError(f"loss reduction {reduction}, expected 0 (none), 1 (mean) or 2 (sum)")
    return reduction != 0


def _nll_loss_forward(call: Call) -> Result:
    scores, target = call.tensor(0, "self"), call.tensor(1, "target")
    each = _nll_shape(scores, target, call.optional_tensor(2, "weight"))
    return [Spec(scores.dtype, () if _reduced(call, 3) else each), Spec(scores.dtype, ())]


def _nll_loss(call: Call) -> Result:
    scores, target = call.tensor(0, "self"), call.tensor(1, "target")
    each = _nll_shape(scores, target, call.optional_tensor(2, "weight"))
    return Spec(scores.dtype, () if _reduced(call, 3) else each)


def _nll_loss_backward(call: Call) -> Result:
    scores, target = call.tensor(1, "self"), call.tensor(2, "target")
    each = _nll_shape(scores, target, call.optional_tensor(3, "weight"))
    expected: Shape = () if _reduced(call, 4) else each
    require_same_shape("the gradient", call.tensor(0, "grad_output").shape, expected)
    return like(scores)


def _cross_entropy(call: Call) -> Result:
    scores, target = call.tensor(0, "self"), call.tensor(1, "target")
    if not scores.shape:
        raise GraphError("cross entropy needs class scores, found a 0-dimensional tensor")
    at = 0 if len(scores.shape) == 1 else 1
    each = scores.shape[:at] + scores.shape[at + 1 :]
    if is_floating(target.dtype):
        require_same_shape("the target probabilities", target.shape, scores.shape)
    else:
        require_index("the target", target)
        require_same_shape("the target", target.shape, each)
    weight = call.optional_tensor(2, "weight")
    if weight is not None:
        require_same_shape("the class weight", weight.shape, (scores.shape[at],))
    return Spec(scores.dtype, () if _reduced(call, 3) else each)


#: elementwise losses -> position of ``reduction``.
ELEMENTWISE_LOSSES = {
    "mse_loss": 2,
    "l1_loss": 2,
    "smooth_l1_loss": 2,
    "huber_loss": 2,
    "kl_div": 2,
    "soft_margin_loss": 2,
    "binary_cross_entropy": 3,
    "binary_cross_entropy_with_logits": 4,
}


def _elementwise_loss(name: str, position: int) -> Rule:
    def rule(call: Call) -> Result:
        operand, target = call.tensor(0, "self"), call.tensor(1, "target")
        if name == "binary_cross_entropy":
            require_same_shape("the target", target.shape, operand.shape)
        each = broadcast([operand.shape, target.shape])
        return Spec(result_type([operand, target]), () if _reduced(call, position) else each)

    return rule


def _loss_backward(call: Call) -> Result:
    grad, operand, target = call.tensor(0, "grad_output"), call.tensor(1, "self"), call.tensor(2, "target")
    shape = broadcast([operand.shape, target.shape, grad.shape])
    return Spec(common_dtype(grad, operand, target), shape)


def _cosine_similarity(call: Call) -> Result:
    left, right = call.tensor(0, "x1"), call.tensor(1, "x2")
    shape = broadcast([left.shape, right.shape])
    at = call.dim(2, "dim", len(shape), 1)
    return Spec(result_type([left, right]), shape[:at] + shape[at + 1 :])


def _glu(call: Call) -> Result:
    operand = call.tensor(0, "self")
    if not operand.shape:
        raise GraphError("glu needs at least one dimension")
    at = call.dim(1, "dim", len(operand.shape), -1)
    size = operand.shape[at]
    if isinstance(size, int) and size % 2:
        raise GraphError(f"glu halves dimension {at}, whose size {size} is odd")
    half: Size = size // 2 if isinstance(size, int) else "?"
    return Spec(operand.dtype, (*operand.shape[:at], half, *operand.shape[at + 1 :]))


RULES: Rules = {
    **table("layer_norm", _layer_norm),
    **table("rms_norm", _rms_norm),
    **table("native_layer_norm", _native_layer_norm),
    **table("native_layer_norm_backward", _native_layer_norm_backward),
    **table("_fused_rms_norm", _fused_rms_norm),
    **table("group_norm", _group_norm),
    **table("native_group_norm", _native_group_norm),
    **table("scaled_dot_product_attention", _attention),
    **table("_scaled_dot_product_attention_math", _attention_math),
    **table("_scaled_dot_product_flash_attention", _fused_attention(9, logsumexp=True)),
    **table("_scaled_dot_product_flash_attention_for_cpu", _fused_attention(2, logsumexp=True)),
    **table("_scaled_dot_product_efficient_attention", _fused_attention(4, logsumexp=False)),
    **table(
        "_scaled_dot_product_cudnn_attention _scaled_dot_product_fused_attention_overrideable",
        _fused_attention(9, logsumexp=False),
    ),
    **table(
        "_scaled_dot_product_flash_attention_backward _scaled_dot_product_flash_attention_for_cpu_backward",
        _attention_backward(3),
    ),
    **table("_scaled_dot_product_efficient_attention_backward", _attention_backward(4)),
    **table("nll_loss_forward", _nll_loss_forward),
    **table("nll_loss nll_loss_nd", _nll_loss),
    **table("nll_loss_backward", _nll_loss_backward),
    **table("cross_entropy_loss", _cross_entropy),
    **{f"aten.{n}": _elementwise_loss(n, at) for n, at in ELEMENTWISE_LOSSES.items()},
    **table("mse_loss_backward smooth_l1_loss_backward huber_loss_backward", _loss_backward),
    **table("cosine_similarity", _cosine_similarity),
    **table("glu", _glu),
}
