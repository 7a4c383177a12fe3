"""Boxes of equally spaced indices: where the elements of one tensor stand in others.

Elements of all source tensors are numbered, tensor after tensor in row-major order. An array of such numbers (which
element of which source stands here) is divided into boxes in which every axis steps along one axis of one source.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

#: Codes of elements that are no copy of a source element.
UNSET, ZERO, OTHER = -1, -2, -3
CODES = {UNSET: "unset", ZERO: "zero", OTHER: "computed"}


@dataclass(frozen=True)
class Source:
    """A numbered tensor: its elements have the numbers ``start`` up to ``start + size``."""

    label: str
    shape: tuple[int, ...]
    start: int

    @property
    def size(self) -> int:
        return prod(self.shape)

    def strides(self) -> list[int]:
        return [prod(self.shape[d + 1 :]) for d in range(len(self.shape))]


@dataclass(frozen=True)
class Box:
    """``local`` is one range per axis of the array.

    Attributes:
        label: the source, or None; then ``code`` says what stands there.
        source: one range per axis of the source. axes: per axis of the array, the source axis it steps along; None
            for an axis of one element.
    """

    local: tuple[tuple[int, int], ...]
    label: str | None = None
    source: tuple[tuple[int, int], ...] = ()
    axes: tuple[int | None, ...] = ()
    code: int = 0

    def as_json(self) -> dict[str, Any]:
        """The form in graph files: ``{of, at, local, axes}``, or ``{value, local}``."""
        local = [list(r) for r in self.local]
        if self.label is None:
            return {"value": CODES[self.code], "local": local}
        return {"of": self.label, "at": [list(r) for r in self.source], "local": local, "axes": list(self.axes)}


class Numbering:
    """The sources in order of their numbers."""

    def __init__(self, tensors: Sequence[tuple[str, Sequence[int]]]) -> None:
        self.sources: list[Source] = []
        start = 0
        for label, shape in tensors:
            self.sources.append(Source(label, tuple(int(n) for n in shape), start))
            start += self.sources[-1].size
        self.total = start
        self._starts = [s.start for s in self.sources]

    def find(self, number: int) -> Source:
        """The source that an element belongs to."""
        return self.sources[bisect_right(self._starts, number) - 1]

    def boxes(self, numbers: Any) -> list[Box]:
        """Divides an integer tensor of numbers and codes into boxes, in row-major order of their first elements."""
        if numbers.dim() == 0:
            numbers = numbers.reshape(1)
            return [Box((), b.label, b.source, (), b.code) for b in self.boxes(numbers)]
        found: list[Box] = []
        open_blocks = [tuple((0, int(n)) for n in numbers.shape)] if numbers.numel() else []
        while open_blocks:
            block = open_blocks.pop()
            box = self._first(numbers[tuple(slice(a, b) for a, b in block)], block)
            found.append(box)
            for d, (inner, outer) in enumerate(zip(box.local, block)):
                if inner[1] < outer[1]:
                    open_blocks.append((*box.local[:d], (inner[1], outer[1]), *block[d + 1 :]))
        return sorted(found, key=lambda b: [r[0] for r in b.local])

    def _first(self, values: Any, block: tuple[tuple[int, int], ...]) -> Box:
        """The largest box at the first corner of a block."""
        import torch

        first = int(values.flatten()[0])
        source = self.find(first) if first >= 0 else None
        at = _unravel(first - source.start, source.shape) if source is not None else []
        strides = source.strides() if source is not None else []
        axes: list[int | None] = [None] * values.dim()
        extents = [1] * values.dim()
        for d in reversed(range(values.dim())):
            if values.shape[d] == 1:
                continue
            corner = [0] * values.dim()
            corner[d] = 1
            step = int(values[tuple(corner)]) - first
            limit, axis = values.shape[d], None
            if source is not None:
                fits = [
                    k for k, n in enumerate(strides)
                    if n == step and k not in axes and at[k] + 1 < source.shape[k]
                ]  # fmt: skip
                if not fits:
                    continue
                axis = fits[0]
                limit = min(limit, source.shape[axis] - at[axis])
            elif step:
                continue
            lines = values[tuple(slice(0, limit if e == d else extents[e]) for e in range(values.dim()))]
            lines = lines.movedim(d, 0).reshape(limit, -1)
            fit = (lines == lines[0] + step * torch.arange(limit)[:, None]).all(1)
            extents[d] = limit if bool(fit.all()) else int((~fit).nonzero()[0])
            axes[d] = axis if extents[d] > 1 else None
        local = tuple((a, a + n) for (a, _), n in zip(block, extents))
        if source is None:
            return Box(local, code=first)
        ranges = [(i, i + 1) for i in at]
        for d, k in enumerate(axes):
            if k is not None:
                ranges[k] = (at[k], at[k] + extents[d])
        return Box(local, source.label, tuple(ranges), tuple(axes))


def _unravel(index: int, shape: tuple[int, ...]) -> list[int]:
    out = []
    for n in reversed(shape):
        out.append(index % n)
        index //= n
    return out[::-1]
