"""Captures a vLLM model: builds it for every rank, loads it, traces the loading, and records its forward pass."""

from __future__ import annotations

import contextlib
import copy
import inspect
from collections.abc import Callable, Iterator, Sequence
from types import MethodType
from typing import Any

import torch

from emerge.capture.base import CaptureError
from emerge.capture.distributed import fake_rank
from emerge.capture.hf import HFSpec, make_model
from emerge.capture.recorder import Recorder
from emerge.capture.sequences import kept_of_past
from emerge.capture.session import Program, Settings, run_capture
from emerge.capture.vllm import runtime
from emerge.capture.vllm.sequences import cached_boxes, describe_sequences
from emerge.capture.vllm.spec import VllmSpec
from emerge.capture.vllm.weights import Checkpoint, Checkpoints, dropped, trace_loading
from emerge.graph.model import Graph


def capture_vllm(
    spec: VllmSpec,
    *,
    name: str | None = None,
    ranks: str | Sequence[int] = "all",
    progress: Callable[[str], None] | None = None,
    files: set[str] | None = None,
) -> list[Graph]:
    """The graphs of a vLLM model, one per rank.

    The inputs are vLLM's parameters, labelled by vLLM's names, with ``loaded``: which boxes of which Transformers
    parameters they hold. The program is the forward pass of packed sequences, from ``input_ids`` [tokens] to the logits
    of every token. With a past the caches ``past.L.key`` and ``past.L.value`` [past tokens, heads, size] of every layer are
    inputs, and ``present.L.key``, ``present.L.value``, which the next step reads, are outputs. ``weights`` of a graph says
    what was dropped, never loaded, or loaded and not used.

    Raises:
        CaptureError: vLLM is missing, refuses the config, or the model cannot be captured.
    """
    runtime.import_vllm()
    chosen = list(range(spec.tp_size)) if ranks == "all" else [int(r) for r in ranks]
    name = name or spec.architecture
    dtype = getattr(torch, spec.dtype)
    # Built before any process group exists: save_pretrained writes nothing on other ranks than 0.
    reference = make_model(HFSpec(spec.architecture, dict(spec.config), attention="eager"), "float32")
    weights = Checkpoints(reference, dtype)
    coded, plain = list(weights.coded()), weights.random()
    graphs, loaded = [], []
    for rank in chosen:
        if progress is not None and spec.tp_size > 1:
            progress(f"{name}: rank {rank} of {spec.tp_size}")
        run = _Rank(spec, reference.config, weights, coded, plain, rank)
        graph, found, took_part = run.capture(f"{name}/rank{rank}" if spec.tp_size > 1 else name)
        graphs.append(graph)
        loaded.append(found)
        if files is not None:
            files |= took_part
    lost = dropped(weights.numbering, loaded) if len(chosen) == spec.tp_size else []
    for key in ("never_loaded", "not_used"):  # of no rank: a bias may be added on rank 0 only
        first, *others = [graph.extra["weights"][key] for graph in graphs]
        common = [label for label in first if all(label in other for other in others)]
        for graph in graphs:
            graph.extra["weights"][key] = common
    for graph in graphs:
        graph.extra["weights"]["dropped"] = lost
        graph.extra["packed"] = list(spec.seqs)
        if spec.past:
            graph.extra["past"] = list(spec.past)
    return graphs


class _Rank:
    """The capture of one rank."""

    def __init__(
        self, spec: VllmSpec, hf_config: Any, weights: Checkpoints, coded: list[tuple[int, int, Checkpoint]],
        plain: Checkpoint, rank: int,
    ) -> None:  # fmt: skip
        self.spec, self.hf_config, self.weights, self.rank = spec, hf_config, weights, rank
        self.coded, self.plain = coded, plain
        self.found: dict[str, Any] = {}
        self.parameters: set[str] = set()
        self.recorder: Recorder | None = None
        self.cache = runtime.KvCache()
        self.layout: dict[str, list[dict[str, Any]]] = {}  # label of an input or output -> what it holds

    def capture(self, name: str) -> tuple[Graph, dict[str, Any], set[str]]:
        spec = self.spec
        _forget()
        mesh = {"tp": spec.tp_size} if spec.tp_size > 1 else {}
        settings = Settings(name, "eval", False, mesh, self.rank, spec.tp_size)
        with contextlib.ExitStack() as stack:
            config = stack.enter_context(runtime.engine_config(spec, copy.deepcopy(self.hf_config)))
            stack.enter_context(fake_rank(self.rank, spec.tp_size))
            stack.enter_context(runtime.process_groups(config, self.rank, spec.tp_size))
            done = stack.enter_context(runtime.patched(spec, self.cache))
            stack.enter_context(_context(config, sum(spec.seqs)))
            if spec.tp_size > 1:
                done.append(runtime.GATHER)
            if spec.positions == "arange":
                done.append(runtime.POSITIONS if not spec.past else runtime.POSITIONS_AFTER)
            graph = run_capture(lambda: self.build(config), settings, prepare=self.prepare)
            graph.extra["substitutions"] = [s.as_json() for s in done] + graph.extra.get("substitutions", [])
        self.describe_weights(graph)
        describe_sequences(graph, spec, self.layout)
        graph.extra["captured_with"] |= {"vllm": _version("vllm"), "transformers": _version("transformers")}
        return graph, self.found, settings.files

    def prepare(self, recorder: Recorder) -> None:
        self.recorder = recorder

    def build(self, config: Any) -> Program:
        """The loaded model with its example inputs; what is computed while it is built is recorded."""
        from vllm.model_executor.model_loader.utils import initialize_model, process_weights_after_loading
        from vllm.utils.torch_utils import set_default_torch_dtype

        spec = self.spec
        with set_default_torch_dtype(getattr(torch, spec.dtype)), torch.device("cpu"):
            model = initialize_model(vllm_config=config).eval()
        assert self.recorder is not None
        with self.recorder.pause():
            tensors = _loadable(model)
            weights, coded = self.weights.exact_in(tensors.values()), self.coded
            if weights is not self.weights:
                coded = list(weights.coded())
            self.parameters = {label for label, _ in model.named_parameters()}
            try:
                self.found = trace_loading(
                    tensors, coded, weights, lambda items: model.load_weights(iter(items.items()))
                )
                model.load_weights(iter(self.plain.items()))
            except CaptureError:
                raise
            except Exception as error:
                text = " ".join(str(error).split())[:300]
                raise CaptureError(
                    f"load_weights of {type(model).__name__} failed: {type(error).__name__}: {text}", "vllm"
                ) from error
            process_weights_after_loading(model, config.model_config, torch.device("cpu"))
            for module in model.modules():
                if type(module).__name__ == "LogitsProcessor":
                    module.use_all_gather = True
        if not hasattr(model, "compute_logits"):
            raise CaptureError(f"{type(model).__name__} gives no logits; only language models are captured", "vllm")
        kwargs: dict[str, Any] = {"input_ids": torch.zeros(sum(spec.seqs), dtype=torch.int64)}
        if spec.positions == "input":
            kwargs["positions"] = _positions(spec)
        if spec.past:
            kwargs["past"] = self.past(model, config)
        return Program(MethodType(_forward(model, spec, self.cache), model), (), kwargs)

    def past(self, model: Any, config: Any) -> dict[str, dict[str, Any]]:
        """Example caches of every layer, and notes which heads of the model's they hold."""
        out: dict[str, dict[str, Any]] = {}
        dtype = getattr(torch, self.spec.dtype)
        for number, layer in runtime.attention_layers(model).items():
            here = layer.num_kv_heads
            total = here if self.spec.tp_size == 1 else config.model_config.get_total_num_kv_heads()
            first = self.rank * total // self.spec.tp_size
            window = runtime.window_of(layer)
            kept = [kept_of_past(p, window) for p in self.spec.past]
            out[number] = {
                name: torch.zeros(sum(kept), here, size, dtype=dtype)
                for name, size in (("key", layer.head_size), ("value", layer.head_size_v))
            }
            both = [kept_of_past(p + n, window) for p, n in zip(kept, self.spec.seqs)]
            for name, tensor in out[number].items():
                for what, lengths in (("past", kept), ("present", both)):
                    boxes = cached_boxes(
                        f"{what}.{{}}{number}.{name}", lengths, (first, first + here), tensor.shape[-1]
                    )
                    self.layout[f"{what}.{number}.{name}"] = boxes
        return out

    def describe_weights(self, graph: Graph) -> None:
        """Writes where every parameter came from, and which are left over."""
        used = {r for n in graph.nodes for r in n.refs()} | set(graph.outputs)
        unset, unused, kept = [], [], []
        for item in graph.inputs:
            numbers = self.found.get(item.label or "")
            boxes = self.weights.numbering.boxes(numbers) if numbers is not None else []
            loaded = any(b.label is not None for b in boxes)
            if boxes and not loaded and item.name not in used and item.label not in self.parameters:
                continue  # a buffer that neither the checkpoint nor the program knows, such as kv-cache scales
            known = item.label in ("input_ids", "positions", *self.layout) or (item.label or "").startswith("const:")
            if numbers is None and not known:
                if item.name not in used:
                    continue
                note = f"{item.label} is made from other weights after loading; nothing is known about its content"
                graph.extra.setdefault("capture_notes", []).append(note)
            kept.append(item)
            if not boxes:
                continue
            item.extra["loaded"] = [b.as_json() for b in boxes]
            if not loaded:
                unset.append(item.label)
            elif item.name not in used:
                unused.append(item.label)
        graph.inputs = kept
        graph.extra["weights"] = {"never_loaded": unset, "not_used": unused, "dropped": []}


def _forward(model: Any, spec: VllmSpec, cache: runtime.KvCache) -> Any:
    """The forward pass as a method of the model: hidden states, then logits of every token."""
    name = next((n for n in ("positions", "position_ids") if n in inspect.signature(model.forward).parameters), None)

    def run(self: Any, input_ids: Any, positions: Any, past: Any = None) -> Any:
        cache.past = past or {}
        hidden = self(input_ids=input_ids, **({name: positions} if name else {}))
        found = {"logits": self.compute_logits(hidden)}
        return {**found, "present": dict(cache.present)} if past else found

    def prefill(self: Any, input_ids: Any, positions: Any) -> Any:
        return run(self, input_ids, positions)

    def prefill_from_start(self: Any, input_ids: Any) -> Any:
        return run(self, input_ids, _positions(spec))

    def step(self: Any, input_ids: Any, positions: Any, past: Any) -> Any:
        return run(self, input_ids, positions, past)

    def step_after_past(self: Any, input_ids: Any, past: Any) -> Any:
        return run(self, input_ids, _positions(spec), past)

    given = spec.positions == "input"
    chosen: Any = (step if given else step_after_past) if spec.past else (prefill if given else prefill_from_start)
    # What the wrapper itself computes has its place at the model's own forward.
    chosen.__signature__, chosen.__wrapped__ = inspect.signature(chosen), type(model).forward
    return chosen


def _positions(spec: VllmSpec) -> Any:
    """What the scheduler gives: every sequence counts on from its past."""
    past = spec.past or (0,) * len(spec.seqs)
    if len(set(past)) == len(set(spec.seqs)) == 1:
        found = torch.arange(past[0], past[0] + spec.seqs[0])
        return found.repeat(len(past)) if len(past) > 1 else found
    return torch.cat([torch.arange(p, p + n) for p, n in zip(past, spec.seqs)])


def _loadable(model: Any) -> dict[str, Any]:
    """Parameters and floating persistent buffers by their first names."""
    out: dict[str, Any] = dict(model.named_parameters())
    saved = set(model.state_dict())
    out |= {k: b for k, b in model.named_buffers() if k in saved and b.is_floating_point()}
    return out


@contextlib.contextmanager
def _context(config: Any, tokens: int) -> Iterator[None]:
    from vllm.config import set_current_vllm_config
    from vllm.forward_context import set_forward_context

    with set_current_vllm_config(config), set_forward_context(None, config, num_tokens=tokens):
        yield


def _forget() -> None:
    """Clears what vLLM keeps per process: rotary embeddings are shared between models of one shape."""
    from vllm.model_executor.layers import rotary_embedding

    rotary_embedding._ROPE_DICT.clear()


def _version(package: str) -> str:
    from importlib import metadata

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "unknown"
