"""Kernels outside ATen: apex, Megatron and vLLM, and the ``auto_functionalized`` wrapper of mutating kernels."""

from __future__ import annotations

from collections.abc import Callable

from emerge.facts.shape_rules.algebra import Shape, numel, product, show
from emerge.facts.shape_rules.core import (
    Call,
    Result,
    Rules,
    Spec,
    Undecided,
    like,
    require_same_shape,
    require_same_size,
)
from emerge.facts.shape_rules.nn import normalized_lead
from emerge.graph.model import TensorType
from emerge.util.errors import GraphError


def _apex_norm_forward(call: Call) -> Result:
    """(input, weight, bias, normalized_shape, eps) -> output, mean, 1/std; statistics are flat float32."""
    operand = call.tensor(0, "input")
    lead = normalized_lead(operand, call.size(3, "normalized_shape"), call.tensor(1, "weight"), call.tensor(2, "bias"))
    rows: Shape = (product(lead),)
    return [like(operand), Spec("float32", rows), Spec("float32", rows)]


def _apex_norm_backward(call: Call) -> Result:
    """(gradient, mean, 1/std, input, normalized_shape, weight, bias, eps) -> gradients of input, weight, bias."""
    grad, operand = call.tensor(0, "grad_output"), call.tensor(3, "input")
    weight, bias = call.tensor(5, "weight"), call.tensor(6, "bias")
    require_same_shape("the gradient", grad.shape, operand.shape)
    rows: Shape = (product(normalized_lead(operand, call.size(4, "normalized_shape"), weight, bias)),)
    require_same_shape("the mean", call.tensor(1, "mean").shape, rows)
    require_same_shape("the inverse deviation", call.tensor(2, "invvar").shape, rows)
    return [like(operand), like(weight), like(bias)]


# --- auto_functionalized -------------------------------------------------------------------------------------------


def _kernel_rms_norm(call: Call) -> None:
    result, operand = call.tensor(-1, "result"), call.tensor(-1, "input")
    require_same_shape("the result buffer", result.shape, operand.shape)
    require_same_shape("the weight", call.tensor(-1, "weight").shape, operand.shape[-1:])


def _kernel_fused_add_rms_norm(call: Call) -> None:
    operand = call.tensor(-1, "input")
    require_same_shape("the residual", call.tensor(-1, "residual").shape, operand.shape)
    require_same_shape("the weight", call.tensor(-1, "weight").shape, operand.shape[-1:])


def _kernel_rotary(call: Call) -> None:
    tokens, head = numel(call.tensor(-1, "positions").shape), call.integer(-1, "head_size")
    for name in ("query", "key"):
        operand = call.optional_tensor(-1, name)
        count = None if operand is None else numel(operand.shape)
        if count is None or tokens is None:
            continue
        if tokens == 0 or head <= 0 or count % (tokens * head):
            raise GraphError(f"the {name} does not hold whole heads of size {head} for {tokens} positions")


def _kernel_act_and_mul(call: Call) -> None:
    out, operand = call.tensor(-1, "out"), call.tensor(-1, "input")
    if not operand.shape or not out.shape:
        raise GraphError("a gated activation needs at least one dimension")
    require_same_shape("the result buffer without its last dimension", out.shape[:-1], operand.shape[:-1])
    if isinstance(out.shape[-1], int):
        require_same_size("the last size of the input", operand.shape[-1], 2 * out.shape[-1])


def _kernel_attention(call: Call) -> None:
    query, key, value = (call.tensor(-1, n) for n in ("query", "key", "value"))
    output = call.tensor(-1, "output")
    require_same_shape("the output buffer without its last dimension", output.shape[:-1], query.shape[:-1])
    if key.shape and value.shape:
        require_same_size("the number of value tokens", value.shape[0], key.shape[0])


#: kernel -> (names of the mutated operands in schema order, check of the operands).
MUTATING_KERNELS: dict[str, tuple[tuple[str, ...], Callable[[Call], None]]] = {
    "_C.rms_norm": (("result",), _kernel_rms_norm),
    "_C.fused_add_rms_norm": (("input", "residual"), _kernel_fused_add_rms_norm),
    "_C.rotary_embedding": (("query", "key"), _kernel_rotary),
    "_C.silu_and_mul": (("out",), _kernel_act_and_mul),
    "_C.gelu_and_mul": (("out",), _kernel_act_and_mul),
    "_C.gelu_tanh_and_mul": (("out",), _kernel_act_and_mul),
    "vllm.unified_attention_with_output": (("output",), _kernel_attention),
}


def wrapped_kernel(name: object) -> str:
    """Kernel name without its overload: ``_C.rms_norm.default`` -> ``_C.rms_norm``."""
    text = name if isinstance(name, str) else ""
    base, _, overload = text.rpartition(".")
    return base if "." in base and overload else text


def _auto_functionalized(call: Call) -> Result:
    """(kernel, **operands) -> what the kernel returns (nothing), then every mutated operand."""
    kernel = wrapped_kernel(call.get(0, "kernel"))
    if kernel not in MUTATING_KERNELS:
        raise Undecided
    mutated, check = MUTATING_KERNELS[kernel]
    check(call)
    written = [call.optional_tensor(-1, name) for name in mutated]
    return [None, *(like(t) if t is not None else None for t in written)]


def _vllm_fused_add_rms_norm(call: Call) -> Result:
    operand, residual = call.tensor(0, "x"), call.tensor(1, "x_residual")
    require_same_shape("the residual", residual.shape, operand.shape)
    weight = call.optional_tensor(2, "weight")
    if weight is not None:
        require_same_shape("the weight", weight.shape, operand.shape[-1:])
    return [Spec(None, operand.shape), Spec(None, residual.shape)]


def _vllm_rms_norm(call: Call) -> Result:
    operand, weight = call.tensor(0, "x"), call.optional_tensor(1, "weight")
    if weight is not None:
        require_same_shape("the weight", weight.shape, operand.shape[-1:])
    return Spec(None, operand.shape)


def _captured_attention(call: Call) -> Result:
    """emerge_vllm.attention: query [T,h,d], key [S,g,d], value [S,g,e] -> [T,h,e], h a multiple of g; S = T without a past."""
    query, key, value = (call.tensor(i, n) for i, n in enumerate(("query", "key", "value")))
    for name, operand in (("query", query), ("key", key), ("value", value)):
        if len(operand.shape) != 3:
            raise GraphError(f"the {name} has shape {show(operand.shape)}, expected [tokens, heads, size]")
    require_same_size("the head size of the key", key.shape[2], query.shape[2])
    require_same_shape("the value without its head size", value.shape[:2], key.shape[:2])
    heads, shared = query.shape[1], key.shape[1]
    if isinstance(heads, int) and isinstance(shared, int) and (shared == 0 or heads % shared):
        raise GraphError(f"{heads} query heads are no multiple of {shared} key heads")
    starts = _sequence_starts(call.integers(3, "query_start_loc"), query.shape[0], "query")
    given = call.integers(11, "key_start_loc", None)
    if given is None:
        require_same_size("the number of key tokens", key.shape[0], query.shape[0])
    else:
        ends = _sequence_starts(given, key.shape[0], "key")
        if len(ends) != len(starts):
            raise GraphError(f"{len(starts) - 1} sequences of queries and {len(ends) - 1} of keys, expected as many")
        short = [i for i in range(len(ends) - 1) if ends[i + 1] - ends[i] < starts[i + 1] - starts[i]]
        if short:
            raise GraphError(f"sequence {short[0]} has fewer keys than queries: {ends} against {starts}")
    for index, name in ((8, "alibi_slopes"), (9, "sinks")):
        per_head = call.optional_tensor(index, name)
        if per_head is not None:
            require_same_shape(f"{name}, one per head,", per_head.shape, query.shape[1:2])
    return Spec(query.dtype, (*query.shape[:2], value.shape[2]))


def _sequence_starts(given: list[int] | None, rows: object, what: str) -> list[int]:
    starts = given or []
    ascending = sorted(set(starts)) == starts
    if not ascending or not starts or starts[0] != 0 or (isinstance(rows, int) and starts[-1] != rows):
        raise GraphError(f"the sequences start at {starts}, which does not divide the {rows} rows of the {what}")
    return starts


def _captured_experts(call: Call) -> Result:
    """emerge_vllm.experts: tokens [T,m], w13 [E,2i,m], w2 [E,m,i], biases, weights and ids [T,k] -> [T,m]."""
    tokens, w13, w2 = (call.tensor(i, n) for i, n in enumerate(("hidden_states", "w13", "w2")))
    for name, operand, rank in (("tokens", tokens, 2), ("w13", w13, 3), ("w2", w2, 3)):
        if len(operand.shape) != rank:
            raise GraphError(f"the {name} have shape {show(operand.shape)}, expected rank {rank}")
    require_same_size("the number of experts in w2", w2.shape[0], w13.shape[0])
    require_same_size("the input size of w13", w13.shape[2], tokens.shape[1])
    if isinstance(w2.shape[2], int):
        require_same_size("the output size of w13", w13.shape[1], 2 * w2.shape[2])
    for index, name, weight in ((3, "w13_bias", w13), (4, "w2_bias", w2)):
        bias = call.optional_tensor(index, name)
        if bias is not None:
            require_same_shape(f"the {name}", bias.shape, weight.shape[:2])
    weights, ids = call.tensor(5, "topk_weights"), call.tensor(6, "topk_ids")
    require_same_shape("the chosen experts", ids.shape, weights.shape)
    require_same_size("the tokens of the chosen experts", ids.shape[0], tokens.shape[0])
    return Spec(tokens.dtype, (tokens.shape[0], w2.shape[1]))


def _sinkhorn(call: Call) -> Result:
    operand: TensorType = call.tensor(0, "cost")
    if len(operand.shape) != 2:
        raise GraphError(f"router costs have shape {show(operand.shape)}, expected [tokens, experts]")
    return like(operand)


RULES: Rules = {
    "apex.fused_layer_norm_affine_fwd": _apex_norm_forward,
    "apex.fused_layer_norm_affine_bwd": _apex_norm_backward,
    "megatron.sinkhorn": _sinkhorn,
    "auto_functionalized": _auto_functionalized,
    "emerge_vllm.attention": _captured_attention,
    "emerge_vllm.experts": _captured_experts,
    "vllm_ir.rms_norm": _vllm_rms_norm,
    "vllm_ir.fused_add_rms_norm": _vllm_fused_add_rms_norm,
}
