"""Causal attention, alone and under context parallelism: every rank holds a block of the sequence.

Written as people write it: keys and values gathered from all ranks (with the causal mask shifted by the rank's
position), or queries, keys and values exchanged so that every rank holds some heads of the whole sequence (Ulysses).
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.nn.functional as F
from torch import nn

BATCH, SEQ, HIDDEN, HEADS, HEAD = 2, 8, 24, 4, 6


def hide(scores: torch.Tensor, first: int, how: str) -> torch.Tensor:
    """Scores [.., rows, keys] of the queries at positions first, first + 1, ..; later keys count for nothing."""
    rows, keys = scores.shape[-2:]
    if how in ("arange", "strict"):
        hidden = torch.arange(keys)[None, :] > (first + torch.arange(rows))[:, None] + (how == "strict")
        return scores.masked_fill(hidden, float("-inf"))
    if how == "tril":
        seen = torch.ones(rows, keys, dtype=torch.bool).tril(diagonal=first)
        return torch.where(seen, scores, float("-inf"))
    return scores + torch.triu(torch.full((rows, keys), float("-inf")), diagonal=first + 1)


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, first: int, how: str) -> torch.Tensor:
    """Causal attention of queries [.., rows, head] that start at a position of the keys [.., keys, head]."""
    if how == "fused" and q.shape[-2] == k.shape[-2]:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)
    if how == "fused":
        seen = first + torch.arange(q.shape[-2])[:, None] >= torch.arange(k.shape[-2])
        return F.scaled_dot_product_attention(q, k, v, attn_mask=seen)
    scores = q @ k.transpose(-1, -2) / math.sqrt(HEAD)
    return torch.softmax(hide(scores, first, how), -1) @ v


class Attention(nn.Module):
    """Multi-head causal attention over [batch, seq, hidden]."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.q, self.k, self.v = (nn.Linear(HIDDEN, HEADS * HEAD) for _ in range(3))
        self.o = nn.Linear(HEADS * HEAD, HIDDEN)

    def heads(self, x: torch.Tensor) -> torch.Tensor:
        return x.view(x.shape[0], x.shape[1], -1, HEAD).transpose(1, 2)

    def core(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return attend(q, k, v, 0, self.how)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (self.heads(p(x)) for p in (self.q, self.k, self.v))
        y = self.core(q, k, v).transpose(1, 2)
        return self.o(y.reshape(x.shape[0], x.shape[1], -1))


class GatheredKV(Attention):
    """Keys and values of all ranks, the rank's own queries."""

    def __init__(self, how: str, group: Any, shift: bool = True, reversed_blocks: bool = False) -> None:
        super().__init__(how)
        self.group, self.shift, self.reversed_blocks = group, shift, reversed_blocks

    def core(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        k, v = (funcol.all_gather_tensor(t.contiguous(), 2, self.group) for t in (k, v))
        if self.reversed_blocks:
            k, v = (torch.cat(t.chunk(self.group.size(), 2)[::-1], 2) for t in (k, v))
        first = self.group.rank() * q.shape[2] if self.shift else 0
        return attend(q, k, v, first, self.how)


class Ulysses(Attention):
    """From a block of the sequence to some heads of all of it, and back."""

    def __init__(self, how: str, group: Any, style: str = "single", swapped: bool = False) -> None:
        super().__init__(how)
        self.group, self.style, self.swapped = group, style, swapped

    def exchange(self, x: torch.Tensor) -> torch.Tensor:
        """[n * a, ..] -> [n * a, ..]: block j of this rank goes to rank j."""
        out = torch.empty_like(x)
        if self.style == "list":
            n = self.group.size()
            dist.all_to_all(list(out.chunk(n)), [c.contiguous() for c in x.chunk(n)], group=self.group)
        else:
            dist.all_to_all_single(out, x.contiguous(), group=self.group)
        return out

    def to_heads(self, x: torch.Tensor) -> torch.Tensor:
        """[batch, heads, block, head] -> [batch, heads / n, seq, head]."""
        n, (b, h, s, e) = self.group.size(), x.shape
        y = self.exchange(x.reshape(b, n, h // n, s, e).transpose(0, 1).contiguous())
        return y.permute(1, 2, 0, 3, 4).reshape(b, h // n, n * s, e)

    def to_sequence(self, x: torch.Tensor) -> torch.Tensor:
        """[batch, heads / n, seq, head] -> [batch, heads, block, head]."""
        n, (b, h, s, e) = self.group.size(), x.shape
        y = self.exchange(x.reshape(b, h, n, s // n, e).permute(2, 0, 1, 3, 4).contiguous())
        if self.swapped:
            return y.permute(1, 2, 0, 3, 4).reshape(b, n * h, s // n, e)  # heads of all ranks interleaved
        return y.transpose(0, 1).reshape(b, n * h, s // n, e)

    def core(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        q, k, v = (self.to_heads(t) for t in (q, k, v))
        return self.to_sequence(attend(q, k, v, 0, self.how))


def alone(how: str = "arange") -> Any:
    return Attention(how), (torch.randn(BATCH, SEQ, HIDDEN),)


def gathered(mesh: Any, rank: int, how: str = "arange", shift: bool = True, reversed_blocks: bool = False) -> Any:
    group = mesh.get_group("cp")
    return GatheredKV(how, group, shift, reversed_blocks), (torch.randn(BATCH, SEQ // group.size(), HIDDEN),)


def ulysses(mesh: Any, rank: int, how: str = "arange", style: str = "single", swapped: bool = False) -> Any:
    group = mesh.get_group("cp")
    return Ulysses(how, group, style, swapped), (torch.randn(BATCH, SEQ // group.size(), HIDDEN),)
