"""Programs for tests/capture/test_megatron.py: a GPT in plain PyTorch, and wrong twins of megatron-core's."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional


class _Attention(nn.Module):
    def __init__(self, hidden: int, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.size = heads, kv_heads, hidden // heads
        self.linear_qkv = nn.Linear(hidden, (heads + 2 * kv_heads) * self.size)
        self.linear_proj = nn.Linear(hidden, hidden)

    def forward(self, x: torch.Tensor, hidden: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """x: b s h; hidden: what a position must not see, s s.

        The projection holds, per group, the queries of the group, its key and its value.
        """
        b, s, _ = x.shape
        groups = self.heads // self.kv_heads
        qkv = self.linear_qkv(x).view(b, s, self.kv_heads, (groups + 2) * self.size)
        q, k, v = qkv.split([groups * self.size, self.size, self.size], -1)
        q = q.reshape(b, s, self.heads, self.size)
        q, k = _rotated(q, cos, sin).transpose(1, 2), _rotated(k, cos, sin).transpose(1, 2)
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 2)
        scores = q @ k.transpose(-1, -2) / self.size**0.5
        weights = scores.masked_fill(hidden, -10000.0).softmax(-1)
        return self.linear_proj((weights @ v.transpose(1, 2)).transpose(1, 2).reshape(b, s, -1))


def _rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    a, b = x.chunk(2, -1)
    return x * cos[:, None] + torch.cat((-b, a), -1) * sin[:, None]


class _MLP(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.linear_fc1, self.linear_fc2 = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear_fc2(functional.gelu(self.linear_fc1(x)))


class _Layer(nn.Module):
    def __init__(self, hidden: int, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.input_layernorm, self.pre_mlp_layernorm = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.self_attention, self.mlp = _Attention(hidden, heads, kv_heads), _MLP(hidden)

    def forward(self, x: torch.Tensor, hidden: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        x = x + self.self_attention(self.input_layernorm(x), hidden, cos, sin)
        return x + self.mlp(self.pre_mlp_layernorm(x))


class PlainGPT(nn.Module):
    """A GPT with rotary positions; parameters have megatron-core's names."""

    def __init__(self, vocab: int, hidden: int, layers: int, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.size = hidden // heads
        self.embedding = nn.ModuleDict({"word_embeddings": nn.Embedding(vocab, hidden)})
        self.decoder = nn.ModuleDict(
            {
                "layers": nn.ModuleList(_Layer(hidden, heads, kv_heads) for _ in range(layers)),
                "final_layernorm": nn.LayerNorm(hidden),
            }
        )
        self.output_layer = nn.Linear(hidden, vocab, bias=False)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        """Ids: b s. Returns the logits: b s v."""
        frequencies = 1.0 / 10000 ** (torch.arange(0, self.size, 2, dtype=torch.float32) / self.size)
        angles = torch.outer(torch.arange(input_ids.shape[1]).float(), frequencies)
        angles = torch.cat((angles, angles), -1)
        x = self.embedding["word_embeddings"](input_ids)
        for layer in self.decoder["layers"]:  # type: ignore[union-attr]
            x = layer(x, attention_mask, angles.cos(), angles.sin())
        return self.output_layer(self.decoder["final_layernorm"](x))


def plain(batch: int = 2, seq: int = 8, vocab: int = 64, kv_heads: int = 2) -> Any:
    """The reference: two layers, four heads of 16 (their scale is an exact number)."""
    ids = torch.zeros(batch, seq, dtype=torch.int64)
    mask = torch.ones(1, 1, seq, seq, dtype=torch.bool).triu(1)
    return PlainGPT(vocab, 64, 2, 4, kv_heads), {"input_ids": ids, "attention_mask": mask}


def without_reduction(mesh: Any, rank: int, **options: Any) -> Any:
    """Megatron's program whose row-parallel layers only scatter along the sequence: the partial sums are not added."""
    from megatron.core.tensor_parallel import layers, mappings  # type: ignore[import-not-found]

    from emerge.capture.megatron import gpt

    program = gpt(mesh, rank, **options)
    reduce, close = layers.reduce_scatter_to_sequence_parallel_region, program.close

    def scatter(x: Any, *_: Any, group: Any = None, **__: Any) -> Any:
        return mappings.scatter_to_sequence_parallel_region(x, group=group)

    def restore() -> None:
        layers.reduce_scatter_to_sequence_parallel_region = reduce
        close()

    layers.reduce_scatter_to_sequence_parallel_region = scatter
    program.close = restore
    return program
