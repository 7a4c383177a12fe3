"""Scaled dot-product attention, written out, for all of torch's kernels.

``softmax(q k^T * scale + mask) v`` with ``scale = 1/sqrt(head size)`` unless given; causal = query i sees keys
``0..i`` (aligned at the top left). A row without any visible key is 0, as in ``_safe_softmax``.
Source: documentation of torch.nn.functional.scaled_dot_product_attention.
"""

from __future__ import annotations

import math
from typing import Any

from emerge.execute._torch import torch
from emerge.execute.ops.base import Call, op
from emerge.execute.ops.tensors import dropout_parts


def _scores(call: Call, b: dict[str, Any]) -> tuple[Any, float]:
    query, key = b["query"], b["key"]
    scale = 1.0 / math.sqrt(query.shape[-1]) if b.get("scale") is None else float(b["scale"])
    scores = (query @ key.transpose(-2, -1)) * scale
    mask = b["attn_bias"] if "attn_bias" in b else b.get("attn_mask")
    if b.get("is_causal"):
        visible = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        scores = scores.masked_fill(~visible, float("-inf"))
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else scores + mask
    return scores, scale


def _repeat_heads(b: dict[str, Any]) -> int:
    """Repeat key and value heads to the number of query heads; the number of repetitions."""
    heads, kv_heads = b["query"].shape[-3], b["key"].shape[-3]
    if heads == kv_heads or b["query"].dim() < 4 or kv_heads == 0 or heads % kv_heads:
        return 1
    times = heads // kv_heads
    b["key"], b["value"] = (b[k].repeat_interleave(times, dim=-3) for k in ("key", "value"))
    return int(times)


def _forward(call: Call) -> tuple[Any, Any]:
    """Output and log-sum-exp ``[batch, heads, queries]``."""
    b = call.bind_schema()
    _repeat_heads(b)
    scores, _ = _scores(call, b)
    weights = torch.ops.aten._safe_softmax.default(scores, -1)
    if b["dropout_p"]:
        weights, _ = dropout_parts(call, weights, float(b["dropout_p"]))
    return weights @ b["value"], torch.logsumexp(scores, -1)


@op("aten.scaled_dot_product_attention")
def attention(call: Call) -> Any:
    """``[..., queries, value size]``."""
    return _forward(call)[0]


@op("aten._scaled_dot_product_flash_attention_for_cpu", "aten._scaled_dot_product_attention_math")
def attention_cpu(call: Call) -> Any:
    """``(output, logsumexp)``; the math variant's second output (the weights) is not modelled."""
    out, lse = _forward(call)
    if "_math" in call.node.op:
        return out, None
    return out, lse


@op("aten._scaled_dot_product_flash_attention")
def attention_flash(call: Call) -> Any:
    """Nine outputs; all but the first two are bookkeeping of the kernel and are not modelled."""
    out, lse = _forward(call)
    return (out, lse, *[None] * 7)


@op("aten._scaled_dot_product_efficient_attention")
def attention_efficient(call: Call) -> Any:
    """``(output, logsumexp, seed, offset)``; logsumexp is padded to its recorded length, which nothing may read."""
    out, lse = _forward(call)
    declared = call.node.elements.get(1)
    if declared is not None and declared.shape and isinstance(declared.shape[-1], int):
        lse = torch.nn.functional.pad(lse, (0, max(0, declared.shape[-1] - lse.shape[-1])), value=float("nan"))
    return out, lse, None, None


def _backward(call: Call) -> tuple[Any, Any, Any, Any]:
    """Gradients of query, key, value and of the scores before scaling by softmax (for a bias)."""
    b = call.bind_schema()
    if b["dropout_p"]:
        raise call.error("the dropout mask of the forward kernel is not known in its backward")
    times = _repeat_heads(b)
    scores, scale = _scores(call, b)
    weights = torch.ops.aten._safe_softmax.default(scores, -1)
    grad = b.get("grad_out") if b.get("grad_out") is not None else b["grad_out_"]
    d_value = weights.transpose(-2, -1) @ grad
    d_weights = grad @ b["value"].transpose(-2, -1)
    d_scores = weights * (d_weights - (d_weights * weights).sum(-1, keepdim=True))
    d_query = d_scores @ b["key"] * scale
    d_key = d_scores.transpose(-2, -1) @ b["query"] * scale
    if times > 1:
        d_key, d_value = (g.unflatten(-3, (-1, times)).sum(-3) for g in (d_key, d_value))
    return d_query, d_key, d_value, d_scores


@op("aten._scaled_dot_product_flash_attention_for_cpu_backward", "aten._scaled_dot_product_flash_attention_backward")
def attention_backward(call: Call) -> Any:
    """``(grad query, grad key, grad value)``; recomputed from the operands."""
    return _backward(call)[:3]


@op("aten._scaled_dot_product_efficient_attention_backward")
def attention_efficient_backward(call: Call) -> Any:
    """``(grad query, grad key, grad value, grad bias)``."""
    b = call.bind_schema()
    *grads, d_scores = _backward(call)
    bias = b["attn_bias"]
    d_bias = None
    if bias is not None and b["grad_input_mask"][3]:
        d_bias = d_scores.sum_to_size(bias.shape) if bias.shape != d_scores.shape else d_scores
    return (*grads, d_bias)
