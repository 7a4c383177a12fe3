"""Operators that stand for vLLM's kernels, against torch and against their definition element by element."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pytest
import torch
from execute_graphs import Builder, Text

from emerge.execute.lockstep import run_sequential
from emerge.util.errors import ExecutionError

T, H, G, D = 7, 4, 2, 6


def rand(*shape: int, seed: int = 0) -> Any:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


Q, K, V = rand(T, H, D), rand(T, G, D, seed=1), rand(T, G, D, seed=2)


def run(op: str, inputs: dict[str, Any], args: list[Any], shape: tuple[int, ...]) -> Any:
    b = Builder()
    for name, value in inputs.items():
        b.input(name, tuple(value.shape), "int32" if value.dtype == torch.int32 else "float32")
    node = b.add(op, *args, shape=shape)
    return run_sequential(b.done(node), inputs)[node]


def attention(starts: Any = (0, T), scale: float = 0.3, causal: bool = True, window: int = 0, softcap: float = 0.0,
              slopes: Any = None, sinks: Any = None, chunk: int = 0) -> Any:  # fmt: skip
    inputs = {"q": Q, "k": K, "v": V}
    if slopes is not None:
        inputs["slopes"] = slopes
    if sinks is not None:
        inputs["sinks"] = sinks
    args = ["q", "k", "v", list(starts), scale, causal, window, softcap, "slopes" if slopes is not None else None,
            "sinks" if sinks is not None else None, chunk]  # fmt: skip
    return run("emerge_vllm.attention.default", inputs, args, (T, H, D))


def by_definition(starts: Any = (0, T), scale: float = 0.3, causal: bool = True, window: int = 0, softcap: float = 0.0,
                  slopes: Any = None, sinks: Any = None, chunk: int = 0) -> Any:  # fmt: skip
    out = torch.zeros(T, H, D, dtype=torch.float64)
    for low, high in pairwise(starts):
        for h in range(H):
            for i in range(high - low):
                scores = {}
                for j in range(high - low):
                    seen = (j <= i or not causal) and (not chunk or i // chunk == j // chunk)
                    seen = seen and (not window or (j > i - window and (causal or j < i + window)))
                    if not seen:
                        continue
                    s = float(Q[low + i, h] @ K[low + j, h // (H // G)]) * scale
                    s = math.tanh(s / softcap) * softcap if softcap else s
                    scores[j] = s + (float(slopes[h]) * (j - i) if slopes is not None else 0.0)
                total = sum(math.exp(s) for s in scores.values())
                total += math.exp(float(sinks[h])) if sinks is not None else 0.0
                for j, s in scores.items():
                    out[low + i, h] += math.exp(s) / total * V[low + j, h // (H // G)]
    return out


@pytest.mark.parametrize(
    "options",
    [
        {}, {"causal": False}, {"window": 3}, {"window": 3, "causal": False}, {"softcap": 0.7}, {"chunk": 3},
        {"slopes": rand(H, seed=3)}, {"sinks": rand(H, seed=4)}, {"starts": (0, 2, T)}, {"starts": (0, 3, 5, T), "window": 2},
    ],
)  # fmt: skip
def test_attention_is_its_definition(options: dict[str, Any]) -> None:
    assert torch.allclose(attention(**options), by_definition(**options), rtol=1e-12, atol=1e-12)


def test_plain_causal_attention_is_torch_s() -> None:
    q, k, v = (x.transpose(0, 1) for x in (Q, K.repeat_interleave(2, 1), V.repeat_interleave(2, 1)))
    want = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.3).transpose(0, 1)
    assert torch.allclose(attention(), want, rtol=1e-12, atol=1e-12)


def test_sequences_must_cover_the_tokens() -> None:
    with pytest.raises(ExecutionError, match="do not cover"):
        attention(starts=(0, 3))


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh", "swigluoai"])
@pytest.mark.parametrize("biased", [False, True])
def test_experts_are_their_definition(activation: str, biased: bool) -> None:
    experts, size, model = 3, 4, 5
    inputs = {
        "ids": torch.tensor([[i % 3, -1 if i % 2 else (i + 1) % 3] for i in range(T)], dtype=torch.int32),
        "x": rand(T, model), "w13": rand(experts, 2 * size, model, seed=1), "w2": rand(experts, model, size, seed=2),
        "weights": rand(T, 2, seed=3),
    }  # fmt: skip
    if biased:
        inputs |= {"b13": rand(experts, 2 * size, seed=4), "b2": rand(experts, model, seed=5)}
    args = [
        "x",
        "w13",
        "w2",
        "b13" if biased else None,
        "b2" if biased else None,
        "weights",
        "ids",
        Text(activation),
        False,
    ]
    found = run("emerge_vllm.experts.default", inputs, args, (T, model))
    want = torch.zeros(T, model, dtype=torch.float64)
    for t in range(T):
        for k in range(2):
            e = int(inputs["ids"][t, k])
            if e < 0:
                continue
            hidden = inputs["w13"][e] @ inputs["x"][t] + (inputs["b13"][e] if biased else 0)
            if activation == "swigluoai":
                gate, up = hidden[0::2].clamp(max=7), hidden[1::2].clamp(-7, 7)
                act = (up + 1) * gate * torch.sigmoid(1.702 * gate)
            else:
                gate, up = hidden[:size], hidden[size:]
                kind = {"gelu": "none", "gelu_tanh": "tanh"}.get(activation)
                act = (torch.nn.functional.gelu(gate, approximate=kind) if kind else gate * torch.sigmoid(gate)) * up
            want[t] += inputs["weights"][t, k] * (inputs["w2"][e] @ act + (inputs["b2"][e] if biased else 0))
    assert torch.allclose(found, want, rtol=1e-12, atol=1e-12)
