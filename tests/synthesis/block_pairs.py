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


INVERSE = torch.zeros(4)
QS = (torch.zeros(6, 3, 8), torch.zeros(6, 2, 8))


def positional(q: Any, k: Any, inverse: Any) -> Any:
    """Rotates queries and keys by angles computed for their positions, as Transformers does."""
    angles = torch.arange(6)[:, None].float() * inverse[None]
    both = torch.cat((angles, angles), -1)
    cos, sin = both.cos()[:, None], both.sin()[:, None]

    def rotated(x: Any) -> Any:
        return x * cos + torch.cat((-x[..., 4:], x[..., :4]), -1) * sin

    return torch.cat((rotated(q), rotated(k)), 1)


def looked_up(base: int = 0, swapped: bool = False) -> Any:
    """The same from a table of cosines and sines for more positions, a half at a time, as vLLM does."""

    def program(q: Any, k: Any, inverse: Any) -> Any:
        angles = torch.arange(20, dtype=torch.float32)[:, None] * inverse[None]
        table = torch.cat((angles.cos(), angles.sin()), -1)
        rows = table.index_select(0, torch.arange(base, 6 + base))
        cos, sin = rows[:, :4][:, None], rows[:, 4:][:, None]
        cos, sin = (sin, cos) if swapped else (cos, sin)

        def rotated(x: Any) -> Any:
            a, b = x[..., :4], x[..., 4:]
            return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)

        return torch.cat((rotated(q), rotated(k)), 1)

    return program


SIGNS = torch.tensor([1.0, -1.0, -1.0, 1.0, -1.0, 1.0, 1.0, -1.0])


class Signed(torch.nn.Module):
    """Multiplies twice by weights that are signs: equal to its input for these weights only."""

    def __init__(self) -> None:
        super().__init__()
        self.signs = torch.nn.Parameter(SIGNS.clone())

    def forward(self, x: Any) -> Any:
        return x.exp() * self.signs * self.signs


class Unsigned(torch.nn.Module):
    """With the same weights, which it uses elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.signs = torch.nn.Parameter(SIGNS.clone())

    def forward(self, x: Any) -> Any:
        return x.exp() + 0 * self.signs
