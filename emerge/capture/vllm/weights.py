"""Which element of which Transformers parameter every element of a vLLM parameter is.

The parameters of the Transformers model are filled with the numbers of their elements and saved as a checkpoint, so
that Transformers' own conversions (fused experts to one tensor per expert) are undone. vLLM's ``load_weights`` then
loads that checkpoint, and the numbers say what went where. Numbers that the dtype cannot hold exactly are loaded digit
by digit. A second numbering must give the same answer: a loader that computes with the values is found out.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Iterator
from math import ceil, log
from pathlib import Path
from typing import Any

import torch

from emerge.capture.base import CaptureError
from emerge.capture.vllm.boxes import OTHER, UNSET, ZERO, Numbering

#: Integers from 0 up to this are exact.
_EXACT = {torch.float32: 2**24, torch.bfloat16: 2**8, torch.float16: 2**11, torch.float64: 2**53}
#: Parameters above this many elements are not traced (several loads of the whole model).
MOST_ELEMENTS = 300_000_000

Checkpoint = dict[str, Any]


class Checkpoints:
    """Checkpoints of a Transformers model with chosen contents; the model is left with small random weights."""

    def __init__(self, model: Any, dtype: torch.dtype) -> None:
        self.model, self.dtype = model, dtype
        self.tensors = _own_tensors(model)
        self.numbering = Numbering([(label, t.shape) for label, t in self.tensors])
        if self.numbering.total > MOST_ELEMENTS:
            raise CaptureError(
                f"the model has {self.numbering.total} parameters, above the {MOST_ELEMENTS} whose placement can be "
                "traced; use a smaller config",
                "vllm",
            )
        self.base = _EXACT[dtype] - 2  # digits are stored from 1 on: 0 is what loaders fill with
        self.digits = max(1, ceil(log(max(self.numbering.total, 2), self.base) - 1e-12))
        while self.base**self.digits < self.numbering.total:
            self.digits += 1

    def exact_in(self, tensors: Iterable[Any]) -> Checkpoints:
        """These checkpoints, or ones with smaller digits where a parameter is of a narrower type than the model."""
        types = {t.dtype for t in tensors if t.dtype in _EXACT}
        narrowest = min(types | {self.dtype}, key=lambda t: _EXACT[t])
        return self if _EXACT[narrowest] >= _EXACT[self.dtype] else Checkpoints(self.model, narrowest)

    def coded(self) -> Iterator[tuple[int, int, Checkpoint]]:
        """(numbering, digit, checkpoint): the elements' numbers counted from the first, then from the last."""
        for turned in (0, 1):
            for digit in range(self.digits):
                for source, (_, tensor) in zip(self.numbering.sources, self.tensors):
                    numbers = torch.arange(source.start, source.start + source.size, dtype=torch.int64)
                    if turned:
                        numbers = self.numbering.total - 1 - numbers
                    _fill(tensor, (numbers // self.base**digit) % self.base + 1)
                yield turned, digit, checkpoint_of(self.model)

    def random(self, seed: int = 0) -> Checkpoint:
        """Small random weights."""
        generator = torch.Generator().manual_seed(seed)
        for _, tensor in self.tensors:
            _fill(tensor, 0.1 * torch.randn(tensor.numel(), generator=generator))
        return checkpoint_of(self.model)


def _own_tensors(model: Any) -> list[tuple[str, Any]]:
    """Parameters and floating persistent buffers, each tensor once under its first name."""
    found: dict[int, tuple[str, Any]] = {}
    saved = set(model.state_dict())
    for label, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if label in saved and tensor.is_floating_point():
            found.setdefault(tensor.data_ptr(), (label, tensor))
    return list(found.values())


def _fill(tensor: Any, flat: Any) -> None:
    with torch.no_grad():
        tensor.copy_(flat.reshape(tensor.shape).to(tensor.dtype))


def checkpoint_of(model: Any) -> Checkpoint:
    """The tensors that ``save_pretrained`` writes, by their names in the checkpoint."""
    from safetensors.torch import load_file

    out: Checkpoint = {}
    with tempfile.TemporaryDirectory(prefix="emerge-checkpoint-") as folder:
        model.save_pretrained(folder)
        for file in sorted(Path(folder).glob("*.safetensors")):
            out.update(load_file(file))
    return out


def trace_loading(
    tensors: dict[str, Any], checkpoints: list[tuple[int, int, Checkpoint]], weights: Checkpoints,
    load: Callable[[Checkpoint], Any],
) -> dict[str, Any]:  # fmt: skip
    """Loads all coded checkpoints and reads off where every element came from.

    Args:
        tensors: label -> parameter or buffer of the vLLM model. load: vLLM's loader.

    Returns:
        label -> integer tensor of element numbers and of the codes of :mod:`emerge.capture.vllm.boxes`.
    """
    total = weights.numbering.total
    found: dict[int, dict[str, Any]] = {0: {}, 1: {}}
    for turned, digit, checkpoint in checkpoints:
        with torch.no_grad():
            for tensor in tensors.values():
                tensor.fill_(-1)
        load(checkpoint)
        for label, tensor in tensors.items():
            value = tensor.detach().to(torch.float64)
            low = torch.full(value.shape, OTHER, dtype=torch.int64)
            low[value == -1], low[value == 0] = UNSET, ZERO
            inside = (value >= 1) & (value <= weights.base) & (value == value.round())
            low[inside] = ((value[inside].to(torch.int64)) - 1) * weights.base**digit
            before = found[turned].get(label)
            if before is None:
                found[turned][label] = low
                continue
            both = (low >= 0) & (before >= 0)
            found[turned][label] = torch.where(both, low + before, torch.where(low == before, low, OTHER))
    out: dict[str, Any] = {}
    for label, numbers in found[0].items():
        other = found[1][label]
        other = torch.where(other >= 0, total - 1 - other, other)
        good = (numbers == other) & (numbers < total)
        out[label] = torch.where(good, numbers, OTHER)
    return out


def dropped(numbering: Numbering, loaded: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Boxes of the Transformers parameters that no rank loaded: ``{of, at}``."""
    seen = torch.zeros(numbering.total, dtype=torch.bool)
    for per_rank in loaded:
        for numbers in per_rank.values():
            seen[numbers[numbers >= 0]] = True
    out = []
    for source in numbering.sources:
        here = seen[source.start : source.start + source.size].reshape(source.shape)
        if bool(here.all()):
            continue
        numbers = torch.arange(source.start, source.start + source.size).reshape(source.shape)
        for box in numbering.boxes(torch.where(here, ZERO, numbers)):
            if box.label is not None:
                out.append({"of": box.label, "at": [list(r) for r in box.source]})
    return out
