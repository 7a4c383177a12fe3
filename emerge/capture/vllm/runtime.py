"""vLLM in one process without an engine: its config, its process groups of a pretended rank, and what is replaced."""

from __future__ import annotations

import contextlib
import logging
import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from emerge.capture.base import CaptureError, Substitution
from emerge.capture.sequences import kept_of_past, starts
from emerge.capture.vllm import kernels
from emerge.capture.vllm.spec import VllmSpec

#: Read by vLLM when it is imported.
_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_DO_NOT_TRACK": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_USE_LAYERNAME": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_DIST_IDENT": "emerge",
    "VLLM_TARGET_DEVICE": "cpu",
}

_KERNEL = "a functional operator whose arguments say everything that changes its result"
ATTENTION = Substitution(
    "vllm.model_executor.layers.attention.Attention.forward (kv-cache update and attention kernel)",
    kernels.CONTRACTS["emerge_vllm.attention.default"] + ": emerge_vllm.attention",
    f"prefill without a past; {_KERNEL}",
)
CACHED = Substitution(
    "vllm.model_executor.layers.attention.Attention.forward (paged kv-cache, slot mapping and attention kernel)",
    kernels.CONTRACTS["emerge_vllm.attention.default"] + ": emerge_vllm.attention on the past joined with the new keys",
    "the cache is an input that holds the keys and values of the past by position, as its block table and slot mapping "
    f"find them; with a window only those that a query sees; {_KERNEL}",
)
MLA = Substitution(
    "vllm.model_executor.layers.attention.MLAAttention.forward (latent kv-cache and attention kernel)",
    "kv_b_proj as a matrix product, then emerge_vllm.attention",
    f"prefill without a past, keys and values expanded; {_KERNEL}",
)
EXPERTS = Substitution(
    "vllm CPUUnquantizedExperts.apply (cpu_fused_moe on prepacked weights)",
    kernels.CONTRACTS["emerge_vllm.experts.default"] + ": emerge_vllm.experts",
    _KERNEL,
)
GEMM = Substitution(
    "vllm.model_executor.layers.utils.dispatch_cpu_unquantized_gemm (weights prepacked for oneDNN)",
    "torch.nn.functional.linear on the plain weight",
    "prepacked weights are handles that no graph can show",
)
IR = Substitution(
    "vllm.ir operators (rms_norm, fused_add_rms_norm, ...)",
    "their implementations in vLLM, as torch operators",
    "one vocabulary with other captures",
)
GATHER = Substitution(
    "vllm LogitsProcessor gathers logits on rank 0", "all_gather on every rank", "every rank then has the logits"
)
POSITIONS_AFTER = Substitution(
    "the scheduler's positions", "p, p + 1, ... in every sequence after its p cached tokens, computed in the graph",
    "a step after a past",
)
POSITIONS = Substitution(
    "the scheduler's positions", "0, 1, 2, ... in every sequence, computed in the graph", "a prefill without a past"
)


def import_vllm() -> Any:
    """vLLM, imported for use in this process.

    Raises:
        CaptureError: it is missing, or its import fails.
    """
    for key, value in _ENVIRONMENT.items():
        os.environ.setdefault(key, value)
    os.environ.setdefault("VLLM_CACHE_ROOT", os.path.join(tempfile.gettempdir(), "emerge-vllm-cache"))
    try:
        import vllm
        from vllm.model_executor.models import registry
    except ImportError as error:
        if (error.name or "").split(".")[0] == "vllm":
            raise CaptureError(
                "vllm: needs the package vllm; install it, or name its environment with python_env", "vllm"
            ) from None
        raise CaptureError(f"importing vllm fails: {type(error).__name__}: {error}", "vllm") from error
    logging.getLogger("vllm").setLevel(logging.ERROR)
    # A model class is otherwise inspected in a process of its own, which takes longer than the whole capture.
    registry._run_in_subprocess = lambda function: function()
    return vllm


@contextlib.contextmanager
def engine_config(spec: VllmSpec, hf_config: Any) -> Iterator[Any]:
    """vLLM's config of a model; the folder it was read from exists inside the block, since some models read it again.

    Raises:
        CaptureError: vLLM refuses it, or does not know the architecture.
    """
    from vllm.engine.arg_utils import EngineArgs

    hf_config.architectures = [spec.vllm_architecture or spec.architecture]
    for key, value in spec.vllm_config.items():
        setattr(hf_config, key, value)
    with tempfile.TemporaryDirectory(prefix="emerge-vllm-") as folder:
        hf_config.save_pretrained(folder)
        given: dict[str, Any] = {
            "model": folder, "tokenizer": folder, "skip_tokenizer_init": True, "load_format": "dummy",
            "dtype": spec.dtype, "max_model_len": spec.max_model_len or max(sum(spec.seqs) + sum(spec.past), 64), "seed": 0,
            "tensor_parallel_size": spec.tp_size, "enable_expert_parallel": spec.enable_expert_parallel,
            "distributed_executor_backend": "mp" if spec.tp_size > 1 else None, "enable_prefix_caching": False,
            "compilation_config": {"mode": 0, "custom_ops": [spec.custom_ops]},
        }  # fmt: skip
        try:
            config = EngineArgs(**{**given, **spec.engine}).create_engine_config()
        except Exception as error:
            text = " ".join(str(error).split())[:300]
            raise CaptureError(
                f"vLLM refuses the config: {type(error).__name__}: {text}", f"vllm: {spec.architecture}"
            ) from error
        yield config


@contextlib.contextmanager
def process_groups(config: Any, rank: int, world: int) -> Iterator[None]:
    """vLLM's process groups over the fake group of this process, which exists already."""
    from unittest.mock import patch

    import torch.distributed as dist
    from vllm.config import set_current_vllm_config
    from vllm.distributed import parallel_state
    from vllm.distributed.device_communicators import shm_broadcast
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator

    new_group = dist.new_group

    def fake_group(ranks: Any = None, *args: Any, backend: Any = None, **kwargs: Any) -> Any:
        return new_group(ranks, backend="fake", **{k: v for k, v in kwargs.items() if k == "group_desc"})

    with contextlib.ExitStack() as stack:
        stack.enter_context(set_current_vllm_config(config))
        stack.enter_context(patch.object(dist, "new_group", fake_group))
        # Shared memory between ranks needs the other ranks; without it vLLM uses torch.distributed.
        nothing = classmethod(lambda cls, *args, **kwargs: None)
        stack.enter_context(patch.object(shm_broadcast.MessageQueue, "create_from_process_group", nothing))
        stack.enter_context(patch.object(CpuCommunicator, "_all_group_ranks_share_shm_group_name", lambda self: False))
        stack.enter_context(patch.object(parallel_state, "_node_count", lambda group: 1))
        parallel_state.init_distributed_environment(
            world_size=world, rank=rank, local_rank=rank, distributed_init_method="env://", backend="fake"
        )
        parallel_state.initialize_model_parallel(world, 1)
    try:
        yield
    finally:
        for key in _GROUPS:
            if hasattr(parallel_state, key):
                setattr(parallel_state, key, None)


_GROUPS = (
    "_TP", "_ETP", "_ENGRAM_DP", "_DCP", "_PCP", "_PP", "_DP", "_EP", "_EPLB", "_WORLD", "_INNER_DP_WORLD",
    "_NODE_COUNT",
)  # fmt: skip


@dataclass
class KvCache:
    """Keys and values by layer (its number as text): ``{"key": [tokens, heads, size], "value": ...}``, one sequence after
    another. ``past`` is given to the kernels, ``present`` is what the next step reads: the past with the new tokens."""

    past: dict[str, dict[str, Any]] = field(default_factory=dict)
    present: dict[str, dict[str, Any]] = field(default_factory=dict)


def attention_layers(model: Any) -> dict[str, Any]:
    """Layers with a kv-cache of their own, by number.

    Raises:
        CaptureError: one caches something else than keys and values of all heads.
    """
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
    from vllm.model_executor.models.utils import extract_layer_index

    found: dict[str, Any] = {}
    for name, layer in model.named_modules():
        if not isinstance(layer, AttentionLayerBase) or getattr(layer, "kv_sharing_target_layer_name", None) is not None:
            continue
        if type(layer).__name__ != "Attention":
            raise CaptureError(
                f"{name} is a {type(layer).__name__}; a past is captured where every layer caches keys and values of its "
                "heads; drop 'past'",
                "inputs",
            )
        found[str(extract_layer_index(layer.layer_name))] = layer
    return found


def window_of(layer: Any) -> int:
    """The sliding window of an attention layer, 0 without one."""
    return max(int(getattr(layer.impl, "sliding_window", None) or 0), 0)


@contextlib.contextmanager
def patched(spec: VllmSpec, cache: KvCache) -> Iterator[list[Substitution]]:
    """Replaces what cannot be captured; gives the list of what was replaced, filled while the model runs."""
    from unittest.mock import patch

    import torch
    from vllm.ir.op import enable_torch_wrap
    from vllm.model_executor.layers import utils
    from vllm.model_executor.layers.attention import attention, mla_attention
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts

    done: list[Substitution] = [GEMM, IR]

    def note(substitution: Substitution) -> None:
        if substitution not in done:
            done.append(substitution)

    def linear(layer: Any, remove_weight: bool) -> None:
        layer.cpu_linear = torch.nn.functional.linear

    calls = _Kernels(spec, cache, note)
    with contextlib.ExitStack() as stack:
        stack.enter_context(patch.object(utils, "dispatch_cpu_unquantized_gemm", linear))
        stack.enter_context(patch.object(attention.Attention, "forward", calls.attention()))
        stack.enter_context(patch.object(mla_attention.MLAAttention, "forward", calls.latent_attention()))
        stack.enter_context(
            patch.object(CPUUnquantizedExperts, "process_weights_after_loading", lambda self, layer: None)
        )
        stack.enter_context(patch.object(CPUUnquantizedExperts, "apply", calls.experts()))
        stack.enter_context(enable_torch_wrap(False))
        # Helpers that vLLM compiles by itself run as they are written.
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        yield done


def _last(joined: Any, ends: list[tuple[int, int]]) -> Any:
    """Of sequences of ``total`` rows that lie one after another the last ``kept`` rows each; ``ends``: (total, kept)."""
    import torch

    if all(total == kept for total, kept in ends):
        return joined
    parts = [part[total - kept :] for part, (total, kept) in zip(joined.split([t for t, _ in ends]), ends)]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


class _Kernels:
    """Calls of the operators that stand for kernels."""

    def __init__(self, spec: VllmSpec, cache: KvCache, note: Any) -> None:
        self.ops, self.note, self.cache = kernels.operators(), note, cache
        self.lengths, self.past = spec.seqs, spec.past
        self.shared: dict[str, tuple[Any, Any]] = {}

    def attention(self) -> Any:
        outer = self

        def forward(
            self: Any, query: Any, key: Any, value: Any, output_shape: Any = None, output_dtype: Any = None
        ) -> Any:
            outer.note(CACHED if outer.past else ATTENTION)
            q = query.view(-1, self.num_heads, self.head_size)
            if self.kv_sharing_target_layer_name is not None:
                k, v = outer.shared[self.kv_sharing_target_layer_name]
            else:
                k = key.view(-1, self.num_kv_heads, self.head_size)
                v = value.view(-1, self.num_kv_heads, self.head_size_v)
                if outer.past:
                    k, v = outer.with_past(self, k, v)
                outer.shared[self.layer_name] = (k, v)
            out = outer.call(self, q, k, v, float(self.impl.scale))
            if output_dtype is not None and output_dtype != out.dtype:
                out = out.to(output_dtype)
            return out.reshape(output_shape if output_shape is not None else (out.shape[0], -1))

        return forward

    def call(self, layer: Any, q: Any, k: Any, v: Any, scale: float) -> Any:
        kind = getattr(layer, "attn_type", "decoder")
        kind = getattr(kind, "value", kind)
        if kind not in ("decoder", "encoder_only", "encoder"):
            raise CaptureError(f"attention of kind {kind!r} has no form in a graph file yet", "vllm")
        if self.past and kind != "decoder":
            raise CaptureError(f"attention of kind {kind!r} has no past; drop 'past'", "inputs")
        impl = layer.impl
        past = [starts(self.totals(layer))] if self.past else []
        return self.ops.attention(
            q, k, v, starts(self.lengths), scale, kind == "decoder", window_of(layer),
            float(getattr(impl, "logits_soft_cap", None) or 0.0), getattr(impl, "alibi_slopes", None),
            getattr(impl, "sinks", None), int(getattr(layer, "attention_chunk_size", 0) or 0), *past,
        )  # fmt: skip

    def totals(self, layer: Any) -> tuple[int, ...]:
        """How many keys of every sequence a layer reads."""
        return tuple(kept_of_past(p, window_of(layer)) + n for p, n in zip(self.past, self.lengths))

    def with_past(self, layer: Any, key: Any, value: Any) -> tuple[Any, Any]:
        """The past of every sequence, each joined with its new tokens."""
        import torch
        from vllm.model_executor.models.utils import extract_layer_index

        number = str(extract_layer_index(layer.layer_name))
        before = [t - n for t, n in zip(self.totals(layer), self.lengths)]
        found = {}
        for name, new in (("key", key), ("value", value)):
            past = self.cache.past[number][name]
            if len(set(before)) == len(set(self.lengths)) == 1:
                rows = [t.view(len(before), -1, *t.shape[1:]) for t in (past, new)]
                found[name] = torch.cat(rows, 1).view(-1, *new.shape[1:])
            else:
                pieces = zip(past.split(before), new.split(list(self.lengths)))
                found[name] = torch.cat([part for pair in pieces for part in pair])
        # what the next step reads of it
        ends = [(t, kept_of_past(t, window_of(layer))) for t in self.totals(layer)]
        self.cache.present[number] = {name: _last(joined, ends) for name, joined in found.items()}
        return found["key"], found["value"]

    def latent_attention(self) -> Any:
        import torch

        outer = self

        def forward(
            self: Any, q: Any, kv_c_normed: Any, k_pe: Any, output_shape: Any = None, q_dcp_replicated: Any = None
        ) -> Any:
            outer.note(MLA)
            if outer.past:
                raise CaptureError("latent attention caches no keys and values; a past is not captured, drop it", "inputs")
            tokens, heads = q.shape[0], q.shape[1]
            kv = torch.nn.functional.linear(kv_c_normed, self.kv_b_proj.weight)
            kv = kv.view(tokens, heads, self.qk_nope_head_dim + self.v_head_dim)
            k_nope, v = kv.split([self.qk_nope_head_dim, self.v_head_dim], dim=-1)
            k_pe = k_pe.reshape(tokens, 1, -1)
            k = torch.cat([k_nope, k_pe.expand(tokens, heads, k_pe.shape[-1])], dim=-1)
            return outer.call(self, q, k, v, float(self.scale)).reshape(output_shape)

        return forward

    def experts(self) -> Any:
        outer = self

        def apply(
            self: Any, output: Any, hidden_states: Any, w1: Any, w2: Any, topk_weights: Any, topk_ids: Any,
            activation: Any, global_num_experts: Any, expert_map: Any, a1q_scale: Any, a2_scale: Any,
            workspace13: Any, workspace2: Any, expert_tokens_meta: Any, apply_router_weight_on_input: bool,
        ) -> None:  # fmt: skip
            outer.note(EXPERTS)
            ids = topk_ids if expert_map is None else expert_map[topk_ids.long()].to(topk_ids.dtype)
            output.copy_(
                outer.ops.experts(
                    hidden_states, w1, w2, self.w1_bias, self.w2_bias, topk_weights, ids,
                    str(getattr(activation, "value", activation)), bool(apply_router_weight_on_input),
                )
            )  # fmt: skip

        return apply
