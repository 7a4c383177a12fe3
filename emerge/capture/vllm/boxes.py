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
class Level:
    """``count`` steps of ``step`` positions along axis ``axis`` of a source."""

    axis: int
    count: int
    step: int


@dataclass(frozen=True)
class Box:
    """``local`` is one range per axis of the array.

    Attributes:
        label: the source, or None; then ``code`` says what stands there.
        source: one range per axis of the source.
        levels: per axis of the array, how it runs through the source, outermost first; empty for an axis of one
            element. Together the levels reach every element of the source's box once.
    """

    local: tuple[tuple[int, int], ...]
    label: str | None = None
    source: tuple[tuple[int, int], ...] = ()
    levels: tuple[tuple[Level, ...], ...] = ()
    code: int = 0

    def as_json(self) -> dict[str, Any]:
        """The form in graph files: ``{of, at, local, axes}``, or ``{value, local}``."""
        local = [list(r) for r in self.local]
        if self.label is None:
            return {"value": CODES[self.code], "local": local}
        axes: list[Any] = []
        for levels in self.levels:
            if len(levels) == 1 and levels[0].step == 1:
                axes.append(levels[0].axis)
            else:
                axes.append([[v.axis, v.count, v.step] for v in levels] or None)
        return {"of": self.label, "at": [list(r) for r in self.source], "local": local, "axes": axes}


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
        first = int(values.flatten()[0])
        if first < 0:
            extents = [1] * values.dim()
            for d in reversed(range(values.dim())):
                extents[d] = _equal(_lines(values, d, extents), first)
            return Box(tuple((a, a + n) for (a, _), n in zip(block, extents)), code=first)
        source = self.find(first)
        levels: list[list[Level]] = [[] for _ in range(values.dim())]  # innermost first
        extents = [1] * values.dim()
        for d in reversed(range(values.dim())):
            lines = _lines(values, d, extents)
            jumps = [int(v) for v in lines[:, 0] - first]
            good = (lines - lines[:, :1] == lines[:1] - first).all(1) & (lines[:, 0] >= 0)
            limit = len(jumps) if bool(good.all()) else int((~good).nonzero()[0])
            while extents[d] < limit:
                level = self._level(source, first, levels, jumps, extents[d], limit)
                if level is None:
                    break
                levels[d].append(level)
                extents[d] *= level.count
        while (gap := _with_gap(levels)) is not None:
            extents[gap] //= levels[gap].pop().count
        at = _unravel(first - source.start, source.shape)
        ranges = tuple((i, i + prod(v.count for own in levels for v in own if v.axis == k)) for k, i in enumerate(at))
        local = tuple((a, a + n) for (a, _), n in zip(block, extents))
        return Box(local, source.label, ranges, tuple(tuple(reversed(own)) for own in levels))

    def _level(
        self, source: Source, first: int, levels: list[list[Level]], jumps: list[int], have: int, limit: int
    ) -> Level | None:
        """The next level of an axis of which ``have`` positions are explained; None where it does not repeat."""
        if not source.start <= first + jumps[have] < source.start + source.size:
            return None
        at = _unravel(first - source.start, source.shape)
        to = _unravel(first + jumps[have] - source.start, source.shape)
        moved = [k for k, (a, b) in enumerate(zip(at, to)) if a != b]
        if len(moved) != 1 or to[moved[0]] < at[moved[0]]:
            return None
        axis = moved[0]
        step, reached = (
            to[axis] - at[axis],
            sum((v.count - 1) * v.step for own in levels for v in own if v.axis == axis),
        )
        count = 1
        while (
            (count + 1) * have <= limit
            and at[axis] + reached + count * step < source.shape[axis]
            and all(jumps[count * have + i] == count * jumps[have] + jumps[i] for i in range(have))
        ):
            count += 1
        return Level(axis, count, step) if count > 1 else None


def _lines(values: Any, d: int, extents: list[int]) -> Any:
    """Axis ``d`` in full against the box so far: [size, elements of the box]."""
    part = values[tuple(slice(None) if e == d else slice(0, n) for e, n in enumerate(extents))]
    return part.movedim(d, 0).reshape(values.shape[d], -1)


def _equal(lines: Any, value: int) -> int:
    fit = (lines == value).all(1)
    return int(fit.shape[0]) if bool(fit.all()) else int((~fit).nonzero()[0])


def _with_gap(levels: list[list[Level]]) -> int | None:
    """The axis of the array that runs through a source axis with gaps; None where every source axis is counted through a
    range without gaps."""
    own: dict[int, list[tuple[Level, int]]] = {}
    for d, found in enumerate(levels):
        for level in found:
            own.setdefault(level.axis, []).append((level, d))
    for ordered in (sorted(found, key=lambda v: v[0].step) for found in own.values()):
        expected = 1
        for level, _ in ordered:
            if level.step != expected:
                return ordered[-1][1]
            expected *= level.count
    return None


def _unravel(index: int, shape: tuple[int, ...]) -> list[int]:
    out = []
    for n in reversed(shape):
        out.append(index % n)
        index //= n
    return out[::-1]
