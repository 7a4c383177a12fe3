"""Transformers models under DTensor plans with sequence parallelism, and a small model for captures without them.

``plan`` and ``alone`` are plain torch; ``hf_plan`` and ``hf_alone`` take the name of a model of Transformers.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

BATCH, SEQ, HIDDEN, INNER, VOCAB = 2, 8, 16, 32, 48


class Feed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(HIDDEN, eps=1e-5)
        self.up, self.down = nn.Linear(HIDDEN, INNER), nn.Linear(INNER, HIDDEN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


class Small(nn.Module):
    """Embedding, two feed-forward blocks, norm and logits."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, HIDDEN)
        self.blocks = nn.ModuleList(Feed() for _ in range(2))
        self.norm = nn.RMSNorm(HIDDEN, eps=1e-5)
        self.head = nn.Linear(HIDDEN, VOCAB, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def ids() -> torch.Tensor:
    return torch.zeros(BATCH, SEQ, dtype=torch.int64)


def alone() -> Any:
    return Small(), (ids(),)


def plan(mesh: Any, rank: int) -> Any:
    """Row-wise embedding, sequence-parallel norms, column- and row-wise layers."""
    steps: dict[str, Any] = {
        "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    for i in range(2):
        steps |= {
            f"blocks.{i}.norm": SequenceParallel(),
            f"blocks.{i}.up": ColwiseParallel(input_layouts=Shard(1)),
            f"blocks.{i}.down": RowwiseParallel(output_layouts=Shard(1)),
        }
    return parallelize_module(Small(), mesh, steps), (ids(),)


SIZES = {
    "vocab_size": VOCAB, "hidden_size": HIDDEN, "intermediate_size": INNER, "num_hidden_layers": 2,
    "num_attention_heads": 8, "num_key_value_heads": 8,
}  # fmt: skip
HF: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", SIZES),
    "qwen3": ("Qwen3ForCausalLM", {**SIZES, "head_dim": 4}),
    "mixtral": ("MixtralForCausalLM", {**SIZES, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "gpt2": ("GPT2LMHeadModel", {
        "vocab_size": VOCAB, "n_embd": HIDDEN, "n_layer": 2, "n_head": 4, "n_positions": 16,
    }),
}  # fmt: skip


def _model(name: str) -> Any:
    import transformers

    architecture, sizes = HF[name]
    cls = getattr(transformers, architecture)
    config = cls.config_class(**sizes)
    config.use_cache = False
    config._attn_implementation = "sdpa"
    return cls._from_config(config, dtype=torch.float32)


def _inputs() -> Any:
    return {"input_ids": ids()}, {"use_cache": False, "return_dict": True}


def hf_alone(model: str = "llama") -> Any:
    return _model(model), *_inputs()


def hf_plan(mesh: Any, rank: int, model: str = "llama") -> Any:
    """Between the layers the sequence is divided; the first layer takes its block of what the embedding gives."""
    module = _model(model)
    steps = _gpt2_plan() if model == "gpt2" else _llama_plan(model)
    return parallelize_module(module, mesh, steps), *_inputs()


def _whole(*names: str) -> PrepareModuleInput:
    """A layer that takes the whole sequence where its caller holds a block of it."""
    if names:
        return PrepareModuleInput(
            input_kwarg_layouts={n: Shard(1) for n in names}, desired_input_kwarg_layouts={n: Replicate() for n in names},
            use_local_output=True,
        )  # fmt: skip
    return PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),), use_local_output=True)


def _llama_plan(model: str) -> dict[str, Any]:
    steps: dict[str, Any] = {
        "model.embed_tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=Replicate()),
        "model.layers.0": PrepareModuleInput(
            input_layouts=(Replicate(),), desired_input_layouts=(Shard(1),), use_local_output=True
        ),
        "model.norm": SequenceParallel(use_local_output=True),
        "lm_head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    for i in range(2):
        at = f"model.layers.{i}"
        steps |= {
            f"{at}.input_layernorm": SequenceParallel(use_local_output=True),
            f"{at}.self_attn": _whole("hidden_states"),
            **{f"{at}.self_attn.{n}_proj": ColwiseParallel() for n in "qkv"},
            f"{at}.self_attn.o_proj": RowwiseParallel(output_layouts=Shard(1)),
            f"{at}.post_attention_layernorm": SequenceParallel(use_local_output=True),
        }
        if model == "mixtral":  # the router sorts all tokens: it takes the whole sequence, and its block goes on
            steps[f"{at}.mlp"] = PrepareModuleInputOutput(
                input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),), use_local_input=True,
                output_layouts=(Replicate(),), desired_output_layouts=(Shard(1),), use_local_output=True,
            )  # fmt: skip
        else:
            steps |= {
                f"{at}.mlp": _whole(),
                **{f"{at}.mlp.{n}_proj": ColwiseParallel() for n in ("gate", "up")},
                f"{at}.mlp.down_proj": RowwiseParallel(output_layouts=Shard(1)),
            }
    return steps


def _gpt2_plan() -> dict[str, Any]:
    """GPT-2 keeps q, k and v in one Conv1D, for which DTensor has no plan: attention and feed-forward stay
    whole, and so do the logits, whose weight is that of the embedding."""
    steps: dict[str, Any] = {
        "transformer.h.0": PrepareModuleInput(
            input_layouts=(Replicate(), None, None, None),
            desired_input_layouts=(Shard(1), None, None, None),
            use_local_output=True,
        ),
        "transformer.h.1": PrepareModuleOutput(
            output_layouts=(Shard(1),), desired_output_layouts=(Replicate(),), use_local_output=True
        ),
    }
    for i in range(2):
        at = f"transformer.h.{i}"
        steps |= {f"{at}.ln_1": SequenceParallel(use_local_output=True)}
        steps |= {f"{at}.ln_2": SequenceParallel(use_local_output=True)}
        # a tuple goes in and out of the attention: only its first part is divided
        steps[f"{at}.attn"] = PrepareModuleInputOutput(
            input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),), use_local_input=True,
            output_layouts=(Replicate(), None), desired_output_layouts=(Shard(1), None), use_local_output=True,
        )  # fmt: skip
    return steps
