"""Operators that stand for vLLM's kernels in captures of vLLM models; their contract is in emerge/capture/vllm/kernels.py.

Sources: vLLM's own reference implementations of its kernels (``vllm/v1/attention/backends/cpu_attn.py``,
``vllm/model_executor/layers/fused_moe/experts/cpu_moe.py`` and ``activation.py``), documentation of its arguments.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from emerge.execute._torch import torch
from emerge.execute.ops.base import Call, op


@op("emerge_vllm.attention")
def attention(call: Call) -> Any:
    """``[tokens, heads, value size]``."""
    b = call.bind(
        "query", "key", "value", "query_start_loc", "scale", "causal", "window", "softcap", "alibi_slopes", "sinks",
        "chunk", "key_start_loc",
    )  # fmt: skip
    starts = b["query_start_loc"]
    key_starts = starts if b["key_start_loc"] is None else b["key_start_loc"]
    for what, found in (("query", starts), ("key", key_starts)):
        if len(found) != len(starts) or found[0] != 0 or found[-1] != b[what].shape[0]:
            raise call.error(f"sequences {list(found)} do not cover the {b[what].shape[0]} rows of {what!r}")
    parts = []
    for (low, high), (first, last) in zip(pairwise(starts), pairwise(key_starts)):
        if last - first < high - low:
            raise call.error(f"a sequence of {high - low} queries has {last - first} keys")
        parts.append(_sequence(b, slice(low, high), slice(first, last)))
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _sequence(b: dict[str, Any], tokens: slice, keys: slice) -> Any:
    query, key, value = (b[n][at].transpose(0, 1) for n, at in (("query", tokens), ("key", keys), ("value", keys)))
    groups = query.shape[0] // key.shape[0]
    key, value = key.repeat_interleave(groups, 0), value.repeat_interleave(groups, 0)
    scores = query @ key.transpose(1, 2) * b["scale"]
    if b["softcap"]:
        scores = torch.tanh(scores / b["softcap"]) * b["softcap"]
    length, total = query.shape[1], key.shape[1]
    i, j = torch.arange(total - length, total, device=query.device)[:, None], torch.arange(total, device=query.device)[None]
    if b["alibi_slopes"] is not None:
        scores = scores + b["alibi_slopes"][:, None, None] * (j - i)
    visible = torch.ones(length, total, dtype=torch.bool, device=query.device)
    if b["causal"]:
        visible = visible & (j <= i)
    if b["window"] > 0:
        visible = visible & (j > i - b["window"])
        if not b["causal"]:
            visible = visible & (j < i + b["window"])
    if b["chunk"] > 0:
        visible = visible & (i // b["chunk"] == j // b["chunk"])
    scores = scores.masked_fill(~visible, float("-inf"))
    if b["sinks"] is not None:
        sinks = b["sinks"].to(scores.dtype)[:, None, None].expand(-1, length, 1)
        weights = torch.softmax(torch.cat([scores, sinks], -1), -1)[..., :-1]
    else:
        weights = torch.softmax(scores, -1)
    return (weights @ value).transpose(0, 1)


_GATED = {
    "silu": lambda x: torch.nn.functional.silu(x),
    "gelu": lambda x: torch.nn.functional.gelu(x),
    "gelu_tanh": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
}


def _activate(call: Call, hidden: Any, name: str) -> Any:
    if name == "swigluoai":
        gate, up = hidden[..., 0::2].clamp(max=7.0), hidden[..., 1::2].clamp(-7.0, 7.0)
        return (up + 1) * (gate * torch.sigmoid(1.702 * gate))
    if name not in _GATED:
        raise call.error(f"activation {name!r} is not modelled")
    gate, up = hidden.chunk(2, dim=-1)
    return _GATED[name](gate) * up


@op("emerge_vllm.experts")
def experts(call: Call) -> Any:
    """``[tokens, model]``."""
    b = call.bind(
        "hidden_states", "w13", "w2", "w13_bias", "w2_bias", "topk_weights", "topk_ids", "activation", "weight_on_input"
    )
    x, ids = b["hidden_states"], b["topk_ids"]
    out = x.new_zeros(x.shape[0], b["w2"].shape[1])
    for e in range(b["w13"].shape[0]):
        token, choice = torch.where(ids == e)
        if not token.numel():
            continue
        hidden = x[token] @ b["w13"][e].t()
        if b["w13_bias"] is not None:
            hidden = hidden + b["w13_bias"][e]
        result = _activate(call, hidden, b["activation"]) @ b["w2"][e].t()
        if b["w2_bias"] is not None:
            result = result + b["w2_bias"][e]
        if not b["weight_on_input"]:
            result = result * b["topk_weights"][token, choice].to(result.dtype)[:, None]
        out = out.index_add(0, token, result)
    return out
