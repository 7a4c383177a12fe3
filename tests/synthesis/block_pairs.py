"""Blocks written in two ways, and twins with a fault."""

from __future__ import annotations

import math
from typing import Any

import torch

X, Y, W = torch.zeros(2, 3, 8), torch.zeros(2, 3, 8), torch.zeros(8)
Q, ANGLES = torch.zeros(5, 3, 8), torch.zeros(5, 4)


def swiglu(x: Any, y: Any) -> Any:
    return torch.nn.functional.silu(x) * y


def swiglu_written_out(x: Any, y: Any) -> Any:
    return x * torch.sigmoid(x) * y


def swiglu_wrong(x: Any, y: Any) -> Any:
    return x * torch.sigmoid(y) * y


def rms_norm(x: Any, w: Any) -> Any:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * w


def rms_norm_by_division(x: Any, w: Any) -> Any:
    return x / torch.sqrt((x * x).sum(-1, keepdim=True) / 8 + 1e-6) * w


def rms_norm_wrong(x: Any, w: Any) -> Any:
    return x / torch.sqrt((x * x).sum(-1, keepdim=True) / 8 + 1e-5) * w


def gelu(x: Any) -> Any:
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x.pow(3))))


def gelu_factored(x: Any) -> Any:
    return x * 0.5 * (1 + torch.tanh(0.7978845608028654 * x * (1 + 0.044715 * x * x)))


def gelu_wrong(x: Any) -> Any:
    return x * 0.5 * (1 + torch.tanh(0.7978845608028654 * x * (1 + 0.0447 * x * x)))


def rotary(q: Any, angles: Any) -> Any:
    """Rotates halves, with tables of full width, as Transformers does."""
    both = torch.cat((angles, angles), -1)
    cos, sin = both.cos()[:, None], both.sin()[:, None]
    half = q.shape[-1] // 2
    return q * cos + torch.cat((-q[..., half:], q[..., :half]), -1) * sin


def rotary_by_halves(q: Any, angles: Any) -> Any:
    """The same with tables of half width, as vLLM does."""
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    a, b = q.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


def rotary_wrong(q: Any, angles: Any) -> Any:
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    a, b = q.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos - a * sin), -1)


def two_layers(x: Any, y: Any) -> Any:
    for _ in range(2):
        x = torch.nn.functional.silu(x + y) * y
    return x


def two_layers_of_tokens(x: Any, y: Any) -> Any:
    """Without batch dimension inside, and the gate written out."""
    x, y = x.reshape(6, 8), y.reshape(6, 8)
    for _ in range(2):
        h = x + y
        x = h * torch.sigmoid(h) * y
    return x.reshape(2, 3, 8)


def clipped_far_away(x: Any) -> Any:
    """Equal to the next one at all values that are drawn, and not in general."""
    return torch.relu(x + 1e6)


def not_clipped(x: Any) -> Any:
    return x + 1e6


def mlp(x: Any, gate: Any, up: Any, down: Any) -> Any:
    return (torch.nn.functional.silu(x @ gate) * (x @ up)) @ down


def mlp_of_rank(reduce: bool) -> Any:
    def build(mesh: Any, rank: int) -> Any:
        def program(x: Any, gate: Any, up: Any, down: Any) -> Any:
            g = x @ gate
            out = (g * torch.sigmoid(g) * (x @ up)) @ down
            if reduce:
                torch.distributed.all_reduce(out)
            return out

        return program, (torch.zeros(6, 8), torch.zeros(8, 5), torch.zeros(8, 5), torch.zeros(5, 8))

    return build


MLP_INPUTS = (torch.zeros(6, 8), torch.zeros(8, 10), torch.zeros(8, 10), torch.zeros(10, 8))
MLP_RELATIONS = {"x": "a b ~ a b", "gate": "a (tp b) ~ a b", "up": "a (tp b) ~ a b", "down": "(tp a) b ~ a b"}
