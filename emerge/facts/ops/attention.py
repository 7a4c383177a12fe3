"""Fused attention: softmax(scale * q k^T + mask) v, batched over heads."""

from __future__ import annotations

import math
from typing import Any

from emerge.facts.base import constant_text
from emerge.facts.families import FamilyNode
from emerge.facts.lower import Iter, Lowering, Multi, Tensor, Tie, Unsupported, lowers, result_dtype, whole
from emerge.facts.ops.positions import hidden_by_causality, negated


def sdpa(
    low: Lowering, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float | None, dtype: str
) -> Tensor:
    """``[..., h, s, e], [..., g, t, e], [..., g, t, f] -> [..., h, s, f]``; ``h`` is a multiple of ``g`` (grouped heads).

    Queries are independent of one another and keys form one whole axis whose order does not matter: a causal flag is
    the mask it stands for.
    """
    rank = len(q.shape)
    if rank < 3 or len(k.shape) != rank or len(v.shape) != rank:
        raise Unsupported("attention over operands of different rank")
    h, g = q.shape[-3], k.shape[-3]
    s, t, e, f = q.shape[-2], k.shape[-2], q.shape[-1], v.shape[-1]
    if h % g or any(x.shape[:-3] != q.shape[:-3] for x in (k, v)) or v.shape[-3] != g:
        raise Unsupported("its heads or batch dimensions do not match")
    text = constant_text(1.0 / math.sqrt(e) if scale is None else scale)
    if causal and mask is not None:
        raise Unsupported("a mask beside the causal one")
    if causal:
        mask = negated(low, hidden_by_causality(low, s, t))
    args = [q, k, v] + ([mask] if mask is not None else [])

    def masked(dim: int, size: int) -> tuple[tuple[int, Any], ...]:
        if mask is None:
            return ()
        own = dim - (rank - len(mask.shape))
        return ((3, whole(size, own)),) if own >= 0 and mask.shape[own] == size else ()

    iters = [
        Iter(n, "p", whole(n, d), (*((i, whole(n, d)) for i in range(3)), *masked(d, n)))
        for d, n in enumerate(q.shape[:-3])
    ]
    hd, sd, ld = rank - 3, rank - 2, rank - 1
    group = h // g
    if group == 1:
        iters.append(Iter(h, "p", whole(h, hd), (*((i, whole(h, hd)) for i in range(3)), *masked(hd, h))))
    else:
        if masked(hd, h):
            raise Unsupported("grouped heads with a mask per head")
        iters.append(
            Iter(g, "p", (Tie(1, hd, group, g),), ((0, (Tie(1, hd, group, g),)), (1, whole(g, hd)), (2, whole(g, hd))))
        )
    iters.append(Iter(s, "p", whole(s, sd), ((0, whole(s, sd)), *masked(sd, s))))
    iters.append(Iter(f, "p", whole(f, ld), ((2, whole(f, ld)),)))
    if group > 1:
        iters.append(Iter(group, "p", (Tie(1, hd, 1, group),), ((0, (Tie(1, hd, 1, group),)),)))
    iters.append(Iter(t, "w", (), ((1, whole(t, sd)), (2, whole(t, sd)), *masked(ld, t))))
    iters.append(Iter(e, "w", (), ((0, whole(e, ld)), (1, whole(e, ld)))))
    kind = f"sdpa#{text}#{mask.dtype == 'bool' if mask is not None else None}"
    return low.op(kind, "sdpa", args, iters, [*q.shape[:-1], f], dtype)


def _arguments(args: list[Any], kwargs: dict[str, Any], names: list[str]) -> dict[str, Any]:
    found = dict(zip(names, args))
    found.update(kwargs)
    return found


def _refuse_dropout(a: dict[str, Any]) -> None:
    if a.get("dropout_p"):
        raise Unsupported("attention with dropout")


def _fused(low: Lowering, a: dict[str, Any], dtype: str) -> Tensor:
    """Attention from named arguments; a mask that is known to be the causal one is the causal flag."""
    _refuse_dropout(a)
    mask, causal = a.get("attn_mask"), bool(a.get("is_causal"))
    if isinstance(mask, Tensor) and low.causal_masks.intersection(low.nodes_of.get(mask.id, ())):
        result = sdpa(low, a["query"], a["key"], a["value"], None, True, a.get("scale"), dtype)
        low.assume("equal_constants", result, "its mask is a constant, executed here, and the causal one")
        return result
    return sdpa(low, a["query"], a["key"], a["value"], mask, causal, a.get("scale"), dtype)


@lowers("aten.scaled_dot_product_attention")
def scaled_dot_product_attention(low: Lowering, node: FamilyNode, args: list[Any], kwargs: dict[str, Any]) -> Tensor:
    a = _arguments(args, kwargs, ["query", "key", "value", "attn_mask", "dropout_p", "is_causal"])
    return _fused(low, a, result_dtype(node, a["query"].dtype))


@lowers(
    "aten._scaled_dot_product_flash_attention_for_cpu",
    "aten._scaled_dot_product_flash_attention",
    "aten._scaled_dot_product_efficient_attention",
)
def flash(low: Lowering, node: FamilyNode, args: list[Any], kwargs: dict[str, Any]) -> Multi:
    if "efficient" in node.op:
        a = _arguments(
            args, kwargs, ["query", "key", "value", "attn_mask", "compute_log_sumexp", "dropout_p", "is_causal"]
        )
        a["attn_mask"] = a.get("attn_bias", a.get("attn_mask"))
    else:
        a = _arguments(args, kwargs, ["query", "key", "value", "dropout_p", "is_causal"])
    _refuse_dropout(a)

    def output(i: int) -> Tensor:
        if i:
            raise Unsupported("its log-sum-exp has no signature")
        return _fused(low, a, a["query"].dtype)

    return Multi(output)
