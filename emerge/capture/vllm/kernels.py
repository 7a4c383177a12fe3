"""Operators that stand for vLLM's kernels in captured graphs.

They are functional, look nothing up, and take everything that changes the result as an argument. While a model is
captured they only give results of the right shape; what they compute is written in ``emerge/execute/ops/vllm.py``.

``emerge_vllm.attention(q [T,h,d], k [T,g,d], v [T,g,e], query_start_loc, scale, causal, window, softcap, alibi_slopes,
sinks, chunk, key_start_loc) -> [T,h,e]``
    Tokens of several sequences lie one after another; sequence ``i`` is ``query_start_loc[i]:query_start_loc[i+1]``
    and sees only itself. Scores are ``q k^T * scale``, then ``tanh(s/softcap)*softcap`` where softcap is not 0, plus
    ``alibi_slopes[h] * (key - query)``. Query ``i`` sees key ``j`` where ``j <= i`` if causal, ``j > i - window`` (and
    ``j < i + window`` if not causal) if window > 0, and ``i // chunk == j // chunk`` if chunk > 0. ``sinks[h]`` is one
    more score in the denominator of the softmax. With ``key_start_loc`` there are more keys than queries: those of
    sequence ``i`` are ``key_start_loc[i]:key_start_loc[i+1]``, the past first, and queries count from the end of the past.
    ``h`` is a multiple of ``g``: query heads share key heads in groups.

``emerge_vllm.experts(x [T,m], w13 [E,2i,m] , w2 [E,m,i], b13 [E,2i], b2 [E,m], weights [T,k], ids [T,k], activation,
weight_on_input) -> [T,m]``
    ``sum_k weights * (act(x w13[e]^T + b13[e]) w2[e]^T + b2[e])`` with ``e = ids[t, k]``; experts with id -1 are held
    by another rank and add nothing. w13 is gate over up; ``swigluoai`` reads them interleaved. With
    ``weight_on_input`` the weights are not applied here.
"""

from __future__ import annotations

from typing import Any

import torch

NAMESPACE = "emerge_vllm"
ATTENTION = (
    "attention(Tensor query, Tensor key, Tensor value, int[] query_start_loc, float scale, bool causal, int window, "
    "float softcap, Tensor? alibi_slopes, Tensor? sinks, int chunk, int[]? key_start_loc=None) -> Tensor"
)
EXPERTS = (
    "experts(Tensor hidden_states, Tensor w13, Tensor w2, Tensor? w13_bias, Tensor? w2_bias, Tensor topk_weights, "
    "Tensor topk_ids, str activation, bool weight_on_input) -> Tensor"
)
#: What reports say about the two.
CONTRACTS = {
    f"{NAMESPACE}.attention.default": "attention of packed sequences, softmax(scale * q k^T + masks) v",
    f"{NAMESPACE}.experts.default": "sum over the chosen experts of weight * (act(x w13^T) w2^T); id -1 adds nothing",
}


def _attention(query: Any, key: Any, value: Any, *rest: Any) -> Any:
    return query.new_zeros(query.shape[0], query.shape[1], value.shape[2])


def _experts(hidden_states: Any, w13: Any, w2: Any, *rest: Any) -> Any:
    return hidden_states.new_zeros(hidden_states.shape[0], w2.shape[1])


_library: Any = None


def operators() -> Any:
    """The namespace ``torch.ops.emerge_vllm``, defined at the first call."""
    global _library
    if _library is None:
        _library = torch.library.Library(NAMESPACE, "DEF")
        for schema, function in ((ATTENTION, _attention), (EXPERTS, _experts)):
            _library.define(schema)
            _library.impl(schema.split("(")[0], function, "CompositeExplicitAutograd")
    return getattr(torch.ops, NAMESPACE)
