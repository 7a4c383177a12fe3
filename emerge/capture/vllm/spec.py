"""The ``vllm:`` source of a campaign file.

vllm:
  architecture: LlamaForCausalLM            # class of Transformers, and of vLLM unless vllm_architecture says so
  config: {hidden_size: 64, num_hidden_layers: 2, ...}
  tp_size: 2
  enable_expert_parallel: true
inputs: {tokens: 24}                        # or seqs: [8, 16], several packed sequences; past: 7, after cached tokens
python_env: DIR                             # an environment with vLLM
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from emerge.capture.base import CaptureError
from emerge.capture.sequences import past_lengths, sequence_lengths

CUSTOM_OPS = ("none", "all")
DTYPES = ("float32", "bfloat16", "float16")
POSITIONS = ("arange", "input")
_INPUTS = ("tokens", "seqs", "past", "positions")


@dataclass
class VllmSpec:
    """A vLLM model.

    Attributes:
        architecture: class name in Transformers. config: fields of its config; the rest keeps its defaults.
        vllm_architecture: class name in vLLM's registry, where it is another one.
        vllm_config: further fields of the config that only vLLM gets.
        tp_size, enable_expert_parallel: vLLM's own parallelism.
        custom_ops: ``none`` = vLLM's torch code everywhere, ``all`` = its kernels where it has them.
        engine: further arguments of ``EngineArgs``.
        seqs: lengths of the packed sequences. past: cached tokens of every sequence; empty = a prefill.
        positions: ``arange`` = computed in the graph as the scheduler does for a prefill, ``input`` = a graph input.
    """

    architecture: str
    config: dict[str, Any] = field(default_factory=dict)
    vllm_architecture: str | None = None
    vllm_config: dict[str, Any] = field(default_factory=dict)
    tp_size: int = 1
    enable_expert_parallel: bool = False
    dtype: str = "float32"
    max_model_len: int | None = None
    custom_ops: str = "none"
    engine: dict[str, Any] = field(default_factory=dict)
    seqs: tuple[int, ...] = (16,)
    past: tuple[int, ...] = ()
    positions: str = "arange"

    @staticmethod
    def from_mapping(vllm: Any, inputs: Mapping[str, Any] | None = None) -> VllmSpec:
        """The spec of a campaign file.

        Raises:
            CaptureError: an unknown key, or a value of the wrong kind.
        """
        if not isinstance(vllm, Mapping):
            raise CaptureError(f"expected a mapping with 'architecture', found {vllm!r}; correct it", "vllm")
        known = [k for k in VllmSpec.__dataclass_fields__ if k not in ("seqs", "past", "positions")]
        _check_keys(vllm, known, "vllm")
        if not isinstance(vllm.get("architecture"), str):
            raise CaptureError("expected the class name of a model as 'architecture', e.g. LlamaForCausalLM", "vllm")
        for key, kind, word in (
            ("config", Mapping, "a mapping"),
            ("vllm_config", Mapping, "a mapping"),
            ("engine", Mapping, "a mapping"),
            ("vllm_architecture", str, "a class name"),
            ("enable_expert_parallel", bool, "true or false"),
        ):
            if key in vllm and not isinstance(vllm[key], kind):
                raise CaptureError(f"expected {word} for {key!r}, found {vllm[key]!r}; correct it", "vllm")
        for key, choices in (("dtype", DTYPES), ("custom_ops", CUSTOM_OPS)):
            if key in vllm and vllm[key] not in choices:
                raise CaptureError(f"expected {' or '.join(choices)} for {key!r}, found {vllm[key]!r}", "vllm")
        for key in ("tp_size", "max_model_len"):
            if key in vllm and (type(vllm[key]) is not int or vllm[key] < 1):
                raise CaptureError(f"expected a positive integer for {key!r}, found {vllm[key]!r}; correct it", "vllm")
        given: dict[str, Any] = {k: dict(v) if isinstance(v, Mapping) else v for k, v in vllm.items()}
        sizes = dict(inputs or {})
        _check_keys(sizes, _INPUTS, "inputs")
        positions = sizes.get("positions", "arange")
        if positions not in POSITIONS:
            raise CaptureError(f"expected {' or '.join(POSITIONS)} for 'positions', found {positions!r}", "inputs")
        seqs = _sequences(sizes)
        return VllmSpec(**given, seqs=seqs, past=past_lengths(sizes, len(seqs)), positions=positions)


def _check_keys(given: Mapping[str, Any], known: Any, place: str) -> None:
    for key in given:
        if key not in known:
            near = difflib.get_close_matches(str(key), known, 1)
            hint = f"did you mean {near[0]!r}?" if near else "known: " + ", ".join(known)
            raise CaptureError(f"expected known keys, found {key!r}; {hint}", place)


def _sequences(sizes: Mapping[str, Any]) -> tuple[int, ...]:
    if "tokens" in sizes and "seqs" in sizes:
        raise CaptureError("expected 'tokens' (one sequence) or 'seqs' (several), found both; drop one", "inputs")
    if "seqs" in sizes:
        return sequence_lengths(sizes)
    if type(sizes.get("tokens", 16)) is not int or sizes.get("tokens", 16) < 1:
        raise CaptureError(f"expected a positive number of tokens, e.g. tokens: 24, found {sizes['tokens']!r}", "inputs")
    return (sizes.get("tokens", 16),)
