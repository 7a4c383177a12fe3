"""Relations from the values of weights: where each element of a reference tensor lies in the implementation.

Distinct random weights tell by their content which tensor they are and how it is laid out: permuted, reshaped, a
slice of a fused tensor, split over ranks. Positions are read off a few lines of the tensor, factored into strides,
and the relation so found is then checked on every element of every rank. Tensors whose values repeat (ones, zeros,
tables of few values) say nothing and are left alone, and so is everything that has two readings.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from emerge.facts.mesh import Block, Mesh
from emerge.relate.consistency import box_of, overlap
from emerge.relate.statement import AxisPlacement, Piece, Statement, describe

#: A tensor says which one it is where at least this part of its values occur once.
DISTINCT = 0.25
#: .. and has at least so many elements.
FEWEST = 4
#: Lines along a dimension from which positions are taken (equal values elsewhere disturb single ones).
LINES = 9


@dataclass(frozen=True)
class _Factor:
    """Positions ``0 .. size-1`` along part of a dimension, ``stride`` elements apart in the implementation."""

    size: int
    stride: int


class ValueIndex:
    """Finds values in an implementation tensor.

    Args:
        parts: the local tensor of every rank, all of one shape.
    """

    def __init__(self, parts: Sequence[Any]) -> None:
        self.parts = [np.asarray(p) for p in parts]
        self.shape = self.parts[0].shape
        local = prod(self.shape)
        forward = np.concatenate([p.ravel() for p in self.parts])
        backward = np.concatenate([p.ravel()[::-1] for p in self.parts])
        self.values, first = np.unique(forward, return_index=True)
        _, last = np.unique(backward, return_index=True)
        #: Flat position (rank-major) of every value: its first, and its last on the first rank that has it.
        self.found = (first, last // local * local + (local - 1 - last % local))

    def positions(self, value: Any, which: int) -> Any:
        """Position of equal elements, the first (0) or last (1) one; -1 where there is none."""
        at = np.searchsorted(self.values, value).clip(max=len(self.values) - 1)
        return np.where(self.values[at] == value, self.found[which][at], -1)


def telling(value: Any) -> bool:
    """True for a floating tensor whose content says which one it is."""
    array = np.asarray(value)
    if array.dtype.kind != "f" or array.size < FEWEST or not np.isfinite(array).all():
        return False
    return len(np.unique(array)) >= max(FEWEST, DISTINCT * array.size)


def value_statements(
    reference: Mapping[str, Any], implementation: Mapping[str, Sequence[Any]], mesh: Mesh
) -> tuple[list[Statement], dict[str, list[Statement]]]:
    """Relations by content.

    Args:
        reference: tensor name -> values. implementation: family name -> values on every rank.

    Returns:
        What is decided, and by reference tensor the readings that contradict each other.
    """
    index = {
        name: ValueIndex(parts)
        for name, parts in implementation.items()
        if len(parts) == mesh.ranks and len({np.shape(p) for p in parts}) == 1 and any(telling(p) for p in parts)
    }
    found: list[Statement] = []
    for name, value in reference.items():
        if telling(value):
            whole = np.asarray(value)
            for other, table in index.items():
                matches = [_match(name, whole, other, table, mesh, which) for which in (0, 1)]
                found += [m for k, m in enumerate(matches) if m is not None and m not in matches[:k]]
    ours, theirs = {n: np.shape(v) for n, v in reference.items()}, {n: t.shape for n, t in index.items()}
    doubtful: dict[str, list[Statement]] = {}
    for i, a in enumerate(found):
        for b in found[i + 1 :]:
            if _compete(a.reference, b.reference, ours) or _compete(a.implementation, b.implementation, theirs):
                for s in (a, b):
                    others = doubtful.setdefault(s.reference.name, [])
                    others += [t for t in (a, b) if t not in others]
    return [s for s in found if s.reference.name not in doubtful], doubtful


def _compete(a: Piece, b: Piece, shapes: Mapping[str, Any]) -> bool:
    """Both speak of the same elements of one tensor."""
    return a.name == b.name and overlap(box_of(a, shapes[a.name]), box_of(b, shapes[b.name])) is not None


def _match(name: str, whole: Any, other: str, table: ValueIndex, mesh: Mesh, which: int) -> Statement | None:
    positions = table.positions(whole.ravel(), which).reshape(whole.shape)
    box = _box(positions >= 0)
    if box is None:
        return None
    cut = whole[tuple(slice(a, b) for a, b in box)]
    inside = positions[tuple(slice(a, b) for a, b in box)]
    boundaries = _boundaries(table.shape, mesh)
    factors: list[list[_Factor]] = []
    for dim in range(inside.ndim):
        found = _radix(_line(inside, dim))
        split = None if found is None else _split(found, boundaries)
        if split is None:
            return None
        factors.append(split)
    base = _base(inside, factors)
    return None if base is None else _statement(name, whole.shape, box, cut, factors, base, other, table, mesh)


def _box(found: Any) -> list[tuple[int, int]] | None:
    """The box in which (almost) all elements were found."""
    box = []
    for dim in range(found.ndim):
        rest = tuple(d for d in range(found.ndim) if d != dim)
        hits = found.any(axis=rest) if rest else found
        at = np.flatnonzero(hits)
        if not len(at):
            return None
        share = found.mean(axis=rest) if rest else found.astype(float)
        full = np.flatnonzero(share > 0.5 * share.max())
        box.append((int(full[0]), int(full[-1]) + 1))
    inside = found[tuple(slice(a, b) for a, b in box)]
    return box if inside.mean() > 0.9 and inside.size >= FEWEST else None


def _line(positions: Any, dim: int) -> Any:
    """Distance of every index along a dimension from the first, as most lines have it."""
    lines = np.moveaxis(positions, dim, -1).reshape(-1, positions.shape[dim])
    good = lines[(lines >= 0).all(axis=1)]
    if not len(good):
        return None
    picked = good[np.unique(np.linspace(0, len(good) - 1, LINES).astype(int))]
    return np.median(picked - picked[:, :1], axis=0).astype(np.int64)


def _radix(line: Any) -> list[_Factor] | None:
    """Distances as a sum over digits, innermost first; None where they are no such sum."""
    out: list[_Factor] = []
    while line is not None and len(line) > 1:
        step = int(line[1] - line[0])
        wrong = np.flatnonzero(line != line[0] + step * np.arange(len(line)))
        run = int(wrong[0]) if len(wrong) else len(line)
        if step <= 0 or len(line) % run:
            return None
        rows = line.reshape(-1, run)
        if (rows - rows[:, :1] != step * np.arange(run)).any():
            return None
        out.append(_Factor(run, step))
        line = line[::run]
    return None if line is None else out


def _boundaries(shape: tuple[int, ...], mesh: Mesh) -> list[int]:
    """Strides at which dimensions of the local tensor and axes of the mesh begin."""
    local = prod(shape)
    out = [prod(shape[d + 1 :]) for d in range(len(shape))]
    return sorted({*out, *(prod(mesh.sizes[i + 1 :]) * local for i in range(len(mesh.sizes)))})


def _split(factors: list[_Factor], boundaries: list[int]) -> list[_Factor] | None:
    """Factors that lie within one dimension or mesh axis each."""
    out: list[_Factor] = []
    for f in factors:
        size, stride = f.size, f.stride
        for b in boundaries:
            if stride < b < stride * size:
                if b % stride or size % (b // stride):
                    return None
                out.append(_Factor(b // stride, stride))
                size, stride = size // (b // stride), b
        out.append(_Factor(size, stride))
    return out


def _base(positions: Any, factors: list[list[_Factor]]) -> int | None:
    """Position of the first element, from what most elements say."""
    offsets = np.zeros(positions.shape, dtype=np.int64)
    for dim, found in enumerate(factors):
        line = np.zeros(1, dtype=np.int64)
        for f in found:
            line = (f.stride * np.arange(f.size)[:, None] + line[None, :]).ravel()
        shape = [1] * positions.ndim
        shape[dim] = len(line)
        offsets = offsets + line.reshape(shape)
    known = (positions - offsets)[positions >= 0]
    return int(np.median(known)) if len(known) else None


def _statement(
    name: str, shape: tuple[int, ...], box: list[tuple[int, int]], cut: Any, factors: list[list[_Factor]], base: int,
    other: str, table: ValueIndex, mesh: Mesh,
) -> Statement | None:  # fmt: skip
    local = prod(table.shape)
    strides = [prod(table.shape[d + 1 :]) for d in range(len(table.shape))]
    if base < 0 or base >= local:
        return None  # the first element is not on the first rank: not blocks in rank order
    axes: list[AxisPlacement] = []
    lengths = [1] * len(strides)
    for dim, found in enumerate(factors):
        inner = 1
        for f in found:
            at = (dim, inner)
            inner *= f.size
            if f.stride >= local:
                block = _block(f, f.stride // local, mesh)
                if block is None or f.stride % local:
                    return None
                axes.append(AxisPlacement(f.size, at, None, block))
                continue
            d = next(d for d, s in enumerate(strides) if s <= f.stride)
            axes.append(AxisPlacement(f.size, at, (d, f.stride // strides[d])))
            lengths[d] *= f.size
    starts = [base // s % n for s, n in zip(strides, table.shape)]
    for d in range(len(strides)):
        own = sorted(p.implementation[1] for p in axes if p.implementation and p.implementation[0] == d)
        sizes = {p.implementation[1]: p.size for p in axes if p.implementation and p.implementation[0] == d}
        expected = 1
        for stride in own:
            if stride != expected:
                return None
            expected *= sizes[stride]
        if starts[d] + lengths[d] > table.shape[d]:
            return None
    region = tuple(slice(a, a + n) for a, n in zip(starts, lengths))
    if not all(np.array_equal(_expected(cut, factors, axes, rank, mesh, lengths), p[region])
               for rank, p in enumerate(table.parts)):  # fmt: skip
        return None
    ref_cuts = tuple((d, a, b) for d, (a, b) in enumerate(box) if (a, b) != (0, shape[d]))
    imp_cuts = tuple((d, a, a + n) for d, (a, n) in enumerate(zip(starts, lengths)) if (a, n) != (0, table.shape[d]))
    placed = tuple(sorted(axes, key=lambda p: (p.reference[0], -p.reference[1])))
    text = describe(placed, mesh, len(shape), len(table.shape))
    return Statement(Piece(name, ref_cuts), Piece(other, imp_cuts), placed, "values", text, f"values of {other!r}")


def _block(f: _Factor, step: int, mesh: Mesh) -> Block | None:
    for axis, size in enumerate(mesh.sizes):
        own = prod(mesh.sizes[axis + 1 :])
        if own <= step < own * size and step % own == 0 and size % (step // own * f.size) == 0:
            return Block(mesh.dim(axis), step // own, f.size)
    return None


def _expected(
    cut: Any, factors: list[list[_Factor]], axes: list[AxisPlacement], rank: int, mesh: Mesh, lengths: list[int]
) -> Any:
    """What a rank holds in its region, if the relation is right. ``axes`` stand dimension by dimension, innermost first."""
    split = cut.reshape([f.size for found in factors for f in reversed(found)])
    order: list[AxisPlacement] = []
    position = 0
    for found in factors:
        order += reversed(axes[position : position + len(found)])
        position += len(found)
    index = tuple(mesh.block_coordinate(rank, p.mesh) if p.mesh is not None else slice(None) for p in order)
    kept = [p.implementation for p in order if p.implementation is not None]
    by_place = sorted(range(len(kept)), key=lambda i: (kept[i][0], -kept[i][1]))
    return split[index].transpose(by_place).reshape(lengths)
