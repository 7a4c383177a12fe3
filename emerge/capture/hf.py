"""Hugging Face Transformers models from their configs: tiny with random weights, or full size without data.

No file is downloaded and no hub is asked: the class and its config are built from the spec.

    hf:
      architecture: LlamaForCausalLM
      config: {hidden_size: 64, num_hidden_layers: 2, ...}
      tp_size: 2                      # Transformers' own tensor-parallel plan; with ep_size its expert-parallel one
    inputs: {batch: 2, seq: 16}         # seqs: [8, 16] = one sequence after another; past: 7 = after 7 cached tokens
"""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from emerge.capture.base import CaptureError, Substitution
from emerge.capture.sequences import past_lengths, sequence_lengths
from emerge.graph.model import Graph

_KNOWN = ("architecture", "config", "tp_size", "ep_size", "ep_implementation", "dtype", "attention", "experts")

PACKED_SEQUENCES = Substitution(
    "transformers.masking_utils.find_packed_sequence_indices", "a function that returns None",
    "it reads position ids in Python to find packed sequences; inputs are taken to hold one sequence per row",
)  # fmt: skip


@dataclass
class HFSpec:
    """A Transformers model.

    Attributes:
        architecture: class name, e.g. ``LlamaForCausalLM``. config: fields of its config; the rest keeps its defaults.
        batch, seq: sizes of ``input_ids``. seqs: lengths of sequences that the model is run on one after another, instead.
        past: cached tokens of every row or sequence; empty = no cache. tp_size, ep_size: Transformers' own parallelism.
        dtype: of the parameters; default float32 with data, bfloat16 without.
        attention: ``sdpa`` or ``eager``. experts: implementation of expert layers.
        weights: folder of local safetensors files; default random weights.
    """

    architecture: str
    config: dict[str, Any] = field(default_factory=dict)
    batch: int = 1
    seq: int = 16
    seqs: tuple[int, ...] = ()
    past: tuple[int, ...] = ()
    tp_size: int = 1
    ep_size: int = 1
    ep_implementation: str | None = None
    dtype: str | None = None
    attention: str = "sdpa"
    experts: str | None = None
    inputs: dict[str, Any] = field(default_factory=dict)
    weights: Path | None = None

    @staticmethod
    def from_mapping(hf: Mapping[str, Any], inputs: Mapping[str, Any] | None = None) -> HFSpec:
        """The spec of a campaign file.

        Raises:
            CaptureError: an unknown key, or a value of the wrong kind.
        """
        unknown = [k for k in hf if k not in _KNOWN]
        if unknown:
            near = difflib.get_close_matches(str(unknown[0]), _KNOWN, 1)
            hint = f"did you mean {near[0]!r}?" if near else "known: " + ", ".join(_KNOWN)
            raise CaptureError(f"expected known keys, found {unknown[0]!r}; {hint}", "hf")
        if not isinstance(hf.get("architecture"), str):
            raise CaptureError(
                "expected the class name of a model as 'architecture', e.g. LlamaForCausalLM; add it", "hf"
            )
        sizes = dict(inputs or {})
        for key in ("batch", "seq"):
            if type(sizes.get(key, 1)) is not int or sizes.get(key, 1) < 1:
                raise CaptureError(
                    f"expected a positive integer for {key!r}, found {sizes[key]!r}; correct it", "inputs"
                )
        if "seqs" in sizes and ("batch" in sizes or "seq" in sizes):
            raise CaptureError("expected 'batch' and 'seq', or 'seqs', found both; drop one", "inputs")
        seqs = sequence_lengths(sizes) if "seqs" in sizes else ()
        sizes.pop("seqs", None)
        batch, seq = sizes.pop("batch", 1), sizes.pop("seq", 16)
        past = past_lengths(sizes, len(seqs) or batch)
        sizes.pop("past", None)
        if past and not seqs and len(set(past)) > 1:
            raise CaptureError(
                f"expected one length for the past of all rows, found {list(past)}; use 'seqs' instead of 'batch'",
                "inputs",
            )
        given: dict[str, Any] = {k: (dict(v) if k == "config" else v) for k, v in hf.items()}
        return HFSpec(**given, batch=batch, seq=seq, seqs=seqs, past=past, inputs=sizes)


def capture_hf(
    spec: HFSpec,
    *,
    name: str | None = None,
    mode: str = "eval",
    fake: bool = False,
    ranks: str | Sequence[int] = "all",
    progress: Any = None,
    files: set[str] | None = None,
) -> list[Graph]:
    """The graphs of a Transformers model: one, or one per rank of its tensor-parallel plan.

    Outputs are the logits (or the last hidden state), without kv cache unless there is a past. In train mode the inputs
    are their own labels, and loss and gradients are the outputs.

    Raises:
        CaptureError: Transformers is missing, the config is wrong, or the model cannot be captured.
    """
    from emerge.capture.distributed import capture_ranks
    from emerge.capture.session import Settings, run_capture

    name = name or spec.architecture
    stored = _stored(spec, fake, files)
    with patched() as substitutions:
        if spec.tp_size == 1 and spec.ep_size == 1:
            settings = Settings(name, mode, fake, loss=_loss)
            graphs = [run_capture(lambda: _build(spec, mode, fake, stored), settings, substitutions)]
            if stored:
                graphs[0].extra["weights"] = str(spec.weights)
            if files is not None:
                files |= settings.files
            return graphs

        def build(mesh: Any, rank: int) -> Any:
            return _build(spec, mode, fake, stored)

        return capture_ranks(
            build, {"tp": spec.tp_size}, ranks, name=name, mode=mode, fake=fake, loss=_loss,
            substitutions=substitutions, progress=progress, files=files,
        )  # fmt: skip


def _loss(result: Any) -> Any:
    return result["loss"]


def _stored(spec: HFSpec, fake: bool, files: set[str] | None) -> dict[str, Any]:
    """The values of the spec's weights; none without data, where they are only checked."""
    if spec.weights is None:
        return {}
    from torch._subclasses.fake_tensor import FakeTensorMode

    from emerge.capture.weights import check_headers, load_weights, weight_files

    if files is not None:
        files |= {str(p.resolve()) for p in weight_files(spec.weights)}
    with FakeTensorMode(allow_non_fake_inputs=True):
        shell = make_model(spec, _dtype(spec, fake))
        if fake:
            check_headers(shell, spec.weights)
            return {}
    return load_weights(shell, spec.weights)


def _dtype(spec: HFSpec, fake: bool) -> str:
    return spec.dtype or ("bfloat16" if fake else "float32")


def _build(spec: HFSpec, mode: str, fake: bool, stored: dict[str, Any]) -> Any:
    import torch

    model = make_model(spec, _dtype(spec, fake))
    if stored:
        from emerge.capture.weights import put_weights

        put_weights(model, stored)
    if spec.tp_size > 1 or spec.ep_size > 1:
        model = distribute(model, spec)
    if spec.seqs or spec.past:
        if mode == "train":
            raise CaptureError("'seqs' and 'past' are for mode eval; drop them or the mode", "inputs")
        from emerge.capture.hf_past import sequence_program

        return sequence_program(model, spec)
    ids = torch.zeros(spec.batch, spec.seq, dtype=torch.int64)
    kwargs: dict[str, Any] = {"use_cache": False, "return_dict": True, **spec.inputs}
    if mode == "train":
        kwargs["labels"] = ids
    return model, {"input_ids": ids}, kwargs


def make_model(spec: HFSpec, dtype: str) -> Any:
    """The model of a spec, with random weights.

    Raises:
        CaptureError: Transformers is missing, does not know the class, or refuses the config.
    """
    import torch

    try:
        import transformers
    except ImportError:
        raise CaptureError(
            "hf: needs the package transformers; install it, or name its environment with python_env", "hf"
        ) from None
    cls = getattr(transformers, spec.architecture, None)
    if cls is None or not hasattr(cls, "config_class"):
        near = difflib.get_close_matches(
            spec.architecture, [n for n in dir(transformers) if n.endswith(("LM", "Model"))], 1
        )
        hint = f"; did you mean {near[0]}?" if near else ""
        raise CaptureError(
            f"transformers {transformers.__version__} has no model {spec.architecture!r}{hint}", "hf: architecture"
        )
    try:
        config = cls.config_class(**spec.config)
        config.use_cache = False
        config._attn_implementation = spec.attention
        if spec.experts is not None:
            config._experts_implementation = spec.experts
        model = cls._from_config(config, dtype=getattr(torch, dtype))
    except CaptureError:
        raise
    except Exception as error:
        raise CaptureError(
            f"transformers refuses the config: {type(error).__name__}: {error}", f"hf: {spec.architecture}"
        ) from error
    return model


def distribute(model: Any, spec: HFSpec) -> Any:
    """Transformers' own tensor and expert parallelism for the rank this process pretends to be."""
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    try:
        from transformers.distributed import DistributedConfig
    except ImportError:
        raise CaptureError(
            "tp_size needs a transformers with DistributedConfig (5.x); use a DTensor plan instead", "hf: tp_size"
        ) from None
    options: dict[str, Any] = {"tp_size": spec.tp_size}
    if spec.ep_size > 1:
        options["ep_size"] = spec.ep_size
        options["ep_implementation"] = spec.ep_implementation or "all_reduce"
    cls = type(model)
    with unset_fake_temporarily():
        config, _, mesh = cls.prepare_distribute_model(DistributedConfig(**options))
    return cls.maybe_distribute_model(model, config, mesh)


@contextmanager
def patched() -> Iterator[list[Substitution]]:
    """Replaces what cannot be captured in Transformers; gives the list of what was replaced."""
    done: list[Substitution] = []
    with ExitStack() as stack:
        masks: Any = None
        with suppress(ImportError):
            masks = importlib.import_module("transformers.masking_utils")
        if hasattr(masks, "find_packed_sequence_indices"):
            before = masks.find_packed_sequence_indices
            masks.find_packed_sequence_indices = lambda position_ids: None
            stack.callback(setattr, masks, "find_packed_sequence_indices", before)
            done.append(PACKED_SEQUENCES)
        yield done
