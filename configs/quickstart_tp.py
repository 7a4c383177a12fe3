"""A tensor-parallel Llama written by hand, as user code that `quickstart.yaml` captures rank by rank.

Every rank is a smaller Llama: its share of the heads and of the MLP's width. What the layers' two row-parallel products
give is a partial sum on every rank, so both have to be all-reduced.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer


class ParallelLayer(LlamaDecoderLayer):
    """A decoder layer whose attention and MLP hold this rank's part only."""

    def forward(self, hidden_states: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        attention, _ = self.self_attn(hidden_states=self.input_layernorm(hidden_states), **kwargs)
        dist.all_reduce(attention)
        hidden_states = hidden_states + attention
        mlp = self.mlp(self.post_attention_layernorm(hidden_states))
        dist.all_reduce(mlp)
        return hidden_states + mlp


class ForgetfulLayer(ParallelLayer):
    """The same with a fault: the attention's partial sums are added to the residual as they are."""

    def forward(self, hidden_states: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        attention, _ = self.self_attn(hidden_states=self.input_layernorm(hidden_states), **kwargs)
        hidden_states = hidden_states + attention
        mlp = self.mlp(self.post_attention_layernorm(hidden_states))
        dist.all_reduce(mlp)
        return hidden_states + mlp


def build(mesh: Any, rank: int, *, config: dict[str, Any], layer: type = ParallelLayer) -> Any:
    """One rank's model and its example inputs.

    Args:
        config: fields of the whole model's config that replace those of ``llama-3.1-8b.json``.
    """
    tp = mesh.size()
    fields = json.loads(Path(__file__).with_name("llama-3.1-8b.json").read_text()) | config
    fields["head_dim"] = fields["hidden_size"] // fields["num_attention_heads"]
    for part in ("num_attention_heads", "num_key_value_heads", "intermediate_size"):
        fields[part] //= tp
    model = LlamaForCausalLM._from_config(LlamaConfig(**fields), dtype=torch.float32)
    for decoder_layer in model.model.layers:
        decoder_layer.__class__ = layer
    return model, {"input_ids": torch.zeros(2, 12, dtype=torch.int64), "use_cache": False, "return_dict": True}


def build_without_all_reduce(mesh: Any, rank: int, **options: Any) -> Any:
    """The faulty program."""
    return build(mesh, rank, layer=ForgetfulLayer, **options)
