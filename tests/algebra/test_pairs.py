"""Ways to write parts of a model that the algebra and the lowering bring together; each with a twin that differs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import emerge

torch = pytest.importorskip("torch")
pytest.importorskip("egglog")

Function = Callable[..., Any]


def halves(x: Any) -> Any:
    n = x.shape[-1] // 2
    return torch.cat((-x[..., n:], x[..., :n]), -1)


def rotary_joined(q: Any, f: Any) -> Any:
    table = torch.cat((f, f), -1)[:, None]
    return q * table.cos() + halves(q) * table.sin()


def rotary_parts(q: Any, f: Any, sign: int = 1) -> Any:
    cos, sin = f.cos()[:, None], f.sin()[:, None]
    a, b = q.chunk(2, -1)
    return torch.cat((a * cos - sign * (b * sin), b * cos + a * sin), -1)


def rotary_repeated(q: Any, f: Any) -> Any:
    cos, sin = f.cos().repeat(1, 2)[:, None], f.sin().repeat(1, 2)[:, None]
    return q * cos + halves(q) * sin


def pairs_joined(q: Any, f: Any) -> Any:
    table = f.repeat_interleave(2, -1)[:, None]
    turned = torch.stack((-q[..., 1::2], q[..., ::2]), -1).flatten(-2)
    return q * table.cos() + turned * table.sin()


def pairs_parts(q: Any, f: Any) -> Any:
    cos, sin = f.cos()[:, None], f.sin()[:, None]
    a, b = q[..., ::2], q[..., 1::2]
    return torch.stack((a * cos - b * sin, b * cos + a * sin), -1).flatten(-2)


def stretched_frequencies(q: Any, f: Any, factor: float = 4.0) -> Any:
    positions = torch.arange(q.shape[0], dtype=torch.float32)
    return rotary_joined(q, positions[:, None] * (f[0] / factor)[None, :])


def stretched_positions(q: Any, f: Any) -> Any:
    table = (torch.arange(16, dtype=torch.float32) / 4.0)[:, None] * f[0][None, :]
    return rotary_parts(q, table[torch.arange(q.shape[0])])


def scaled_queries(q: Any, k: Any, c: float = 0.3) -> Any:
    return ((q * c) @ k.transpose(-1, -2)).softmax(-1)


def scaled_scores(q: Any, k: Any, c: float = 0.3) -> Any:
    return ((q @ k.transpose(-1, -2)) * c).softmax(-1)


def window_of_truth(s: Any) -> Any:
    i, j = torch.arange(6)[:, None], torch.arange(6)[None, :]
    seen = i.new_ones((), dtype=torch.bool) & (j > i - 3) & (j <= i)
    return (s + torch.where(seen, 0.0, torch.finfo(torch.float32).min)).softmax(-1)


def window_of_infinity(s: Any, window: int = 3) -> Any:
    i, j = torch.arange(6)[:, None], torch.arange(6)[None, :]
    return s.masked_fill(~((j <= i) & (j > i - window)), float("-inf")).softmax(-1)


def slow_growth(x: Any, limit: int = 16) -> Any:
    factor = ((torch.arange(x.shape[0]) / limit).floor() + 1).log() * 0.1 + 1
    return x * factor[:, None]


def counted(table: Any, x: Any) -> Any:
    ones = torch.ones(4)
    return x + table[(ones.cumsum(0) * ones - 1).long() + 2]


def ranged(table: Any, x: Any, start: int = 2) -> Any:
    return x + table[torch.arange(4) + start]


def rms(x: Any, w: Any) -> Any:
    return w * (x * (x.pow(2).mean(-1, keepdim=True) + 1e-5).rsqrt())


def rms_divided(x: Any, w: Any, eps: float = 1e-5) -> Any:
    return (x / ((x * x).mean(-1, keepdim=True) + eps).sqrt()) * w


def silu_gate(x: Any, y: Any) -> Any:
    return torch.nn.functional.silu(x) * y


def silu_written(x: Any, y: Any, sign: int = -1) -> Any:
    return y * (x / (1 + (sign * x).exp()))


def inputs(*shapes: tuple[int, ...]) -> tuple[Any, ...]:
    random = torch.Generator().manual_seed(0)
    return tuple(torch.randn(s, generator=random) for s in shapes)


PAIRS: dict[str, tuple[Function, Function, Function, tuple[tuple[int, ...], ...]]] = {
    "rotary": (rotary_joined, rotary_parts, lambda q, f: rotary_parts(q, f, -1), ((5, 3, 8), (5, 4))),
    "rotary-repeated-table": (rotary_joined, rotary_repeated, lambda q, f: rotary_repeated(q, 2 * f), ((5, 3, 8), (5, 4))),
    "rotary-pairs": (pairs_joined, pairs_parts, rotary_parts, ((5, 3, 8), (5, 4))),
    "rotary-stretched": (
        stretched_frequencies, stretched_positions, lambda q, f: stretched_frequencies(q, f, 2.0), ((5, 3, 8), (5, 4)),
    ),
    "scaled-queries": (scaled_queries, scaled_scores, lambda q, k: scaled_scores(q, k, 0.09), ((2, 5, 8), (2, 6, 8))),
    "window": (window_of_truth, window_of_infinity, lambda s: window_of_infinity(s, 4), ((2, 6, 6),)),
    "constant-of-one-number": (slow_growth, lambda x: x * 1.0, lambda x: slow_growth(x, 4), ((6, 5),)),
    "counted-positions": (counted, ranged, lambda table, x: ranged(table, x, 1), ((9, 5), (4, 5))),
    "constant-index": (
        lambda x: x[:, torch.tensor([-2])].exp(), lambda x: x.exp()[:, 3:4], lambda x: x[:, -1:].exp(), ((4, 5),),
    ),
    "rms-norm": (rms, rms_divided, lambda x, w: rms_divided(x, w, 1e-2), ((3, 8), (8,))),
    "silu": (silu_gate, silu_written, lambda x, y: silu_written(x, y, 1), ((3, 8), (3, 8))),
}  # fmt: skip


@pytest.mark.parametrize("name", PAIRS)
def test_two_ways_to_write_it_are_equivalent(name: str) -> None:
    reference, right, _, shapes = PAIRS[name]
    found = emerge.compare(reference, right, inputs=inputs(*shapes), relations="auto")
    assert found.verdict == "EQUIVALENT", found.reason


@pytest.mark.parametrize("name", PAIRS)
def test_its_twin_is_not(name: str) -> None:
    reference, _, wrong, shapes = PAIRS[name]
    found = emerge.compare(reference, wrong, inputs=inputs(*shapes), relations="auto")
    assert found.verdict == "NOT_EQUIVALENT", found.reason
