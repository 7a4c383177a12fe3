"""The device mesh: named axes over the ranks, process groups as blocks of it, integers that depend on the rank.

Ranks are row-major over the axes in the order written. In facts the mesh is tensor 0 and its axis ``k`` is dimension
``-1 - k``; a :data:`Block` names part of an axis: positions ``stride * i`` for ``0 <= i < size``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple


class Block(NamedTuple):
    """Part of a mesh axis: dimension (negative), stride and number of positions."""

    dim: int
    stride: int
    size: int


@dataclass(frozen=True)
class RankAffine:
    """An integer per rank: ``base + sum(step_i * coordinate in block_i)``; blocks with the largest step first."""

    base: int
    terms: tuple[tuple[int, Block], ...]


class Mesh:
    """Named mesh axes with sizes, e.g. ``{"dp": 2, "tp": 4}``."""

    def __init__(self, axes: dict[str, int]) -> None:
        self.axes = dict(axes)
        self.names = list(axes)
        self.sizes = list(axes.values())
        self.ranks = prod(self.sizes)
        self._steps: list[int] = []
        step = 1
        for size in reversed(self.sizes):
            self._steps.insert(0, step)
            step *= size

    def dim(self, axis: int) -> int:
        """Fact dimension of axis number ``axis``."""
        return -1 - axis

    def coordinate(self, rank: int, dim: int) -> int:
        """Coordinate of a rank on fact dimension ``dim``."""
        axis = -1 - dim
        return rank // self._steps[axis] % self.sizes[axis]

    def block_coordinate(self, rank: int, block: Block) -> int:
        """Position of a rank within a block."""
        return self.coordinate(rank, block.dim) // block.stride % block.size

    def rank_step(self, block: Block) -> int:
        """Distance in ranks between neighbours along a block."""
        return self._steps[-1 - block.dim] * block.stride

    def whole(self) -> list[Block]:
        """All axes, outermost first."""
        return [Block(self.dim(i), 1, n) for i, n in enumerate(self.sizes) if n > 1]

    def varying(self, values: Sequence[object]) -> list[Block]:
        """The mesh axes along which a value per rank is not constant, outermost first."""
        out = []
        for axis, size in enumerate(self.sizes):
            step = self._steps[axis]
            starts = [r for r in range(self.ranks) if r // step % size == 0]
            if any(values[r + i * step] != values[r] for r in starts for i in range(size)):
                out.append(Block(self.dim(axis), 1, size))
        return out

    def differ(self, a: int, b: int) -> set[int]:
        """Fact dimensions along which two ranks have different coordinates."""
        return {d for d in map(self.dim, range(len(self.sizes))) if self.coordinate(a, d) != self.coordinate(b, d)}

    def fixed(self, ranks: Sequence[int]) -> dict[int, int] | None:
        """The coordinates that these ranks share, by fact dimension, where they are all the ranks that have them.

        Returns:
            ``{}`` for all ranks; None when the ranks are no such part of the mesh.
        """
        shared = {}
        for axis in range(len(self.sizes)):
            found = {self.coordinate(r, self.dim(axis)) for r in ranks}
            if len(found) == 1 and self.sizes[axis] > 1:
                shared[self.dim(axis)] = found.pop()
        size = prod(n for axis, n in enumerate(self.sizes) if self.dim(axis) not in shared)
        return shared if len(set(ranks)) == size else None

    def home(self, rank: int, fixed: dict[int, int]) -> int:
        """The rank with these coordinates, and with those of ``rank`` along all other axes."""
        return rank + sum((c - self.coordinate(rank, d)) * self._steps[-1 - d] for d, c in fixed.items())

    def blocks_of_groups(self, groups: Sequence[Sequence[int]]) -> list[Block] | None:
        """The blocks, outermost first, whose row-major order is the order of every group.

        Args:
            groups: for each rank the ranks of its process group, in group order.
        Returns:
            None when the groups are not translates of one block structure in rank order.
        """
        first = list(groups[0])
        if len(first) == 1:
            return [] if all(list(g) == [r] for r, g in enumerate(groups)) else None
        blocks: list[Block] = []
        count, size = 1, len(first)
        while count < size:
            step = first[count] - first[0]
            run = 2
            while run < size // count and first[count * run] - first[0] == step * run:
                run += 1
            while size // count % run:
                run -= 1
            parts = self._split(step, run)
            if parts is None:
                return None
            blocks = parts + blocks
            count *= run
        for rank, group in enumerate(groups):
            if list(group) != self.group_of(rank, blocks):
                return None
        return blocks

    def _split(self, step: int, size: int) -> list[Block] | None:
        """A run of ``size`` ranks at distance ``step`` as blocks of mesh axes, outermost first."""
        blocks: list[Block] = []
        while size > 1:
            for axis, (base, extent) in enumerate(zip(self._steps, self.sizes)):
                if step >= base and step < base * extent and step % base == 0:
                    stride = step // base
                    if extent % stride:
                        return None
                    room = extent // stride
                    take = min(room, size)
                    if room % take or size % take:
                        return None
                    blocks.insert(0, Block(self.dim(axis), stride, take))
                    size //= take
                    step = step * take
                    break
            else:
                return None
        return blocks

    def group_of(self, rank: int, blocks: Sequence[Block]) -> list[int]:
        """Ranks that differ from ``rank`` only along ``blocks``, in row-major order of the blocks."""
        base = rank - sum(self.block_coordinate(rank, b) * self.rank_step(b) for b in blocks)
        out = [base]
        for b in blocks:
            out = [r + i * self.rank_step(b) for r in out for i in range(b.size)]
        return out

    def affine(self, values: Sequence[int]) -> RankAffine | None:
        """Writes one integer per rank as an affine function of the mesh coordinates, or None when it is none."""
        base = values[0]
        terms: list[tuple[int, Block]] = []
        for axis, size in enumerate(self.sizes):
            step = self._steps[axis]
            line = [values[i * step] - base for i in range(size)]
            found = _block_of(line)
            if found is None:
                return None
            slope, stride, count = found
            if slope:
                terms.append((slope, Block(self.dim(axis), stride, count)))
        for rank, value in enumerate(values):
            if base + sum(s * self.block_coordinate(rank, b) for s, b in terms) != value:
                return None
        terms.sort(key=lambda t: -abs(t[0]))
        return RankAffine(base, tuple(terms))

    def affine_below(self, values: Sequence[int], limit: int) -> list[int] | None:
        """An affine function of one mesh coordinate that agrees with ``values`` where they are below ``limit`` and is at least
        ``limit`` where they are; None when there is none. With one value below the limit the slope is that value."""
        for step, size in zip(self._steps, self.sizes):
            if size == 1:
                continue
            line = [values[i * step] for i in range(size)]
            if any(values[r] != line[r // step % size] for r in range(self.ranks)):
                continue
            known = [i for i, v in enumerate(line) if v < limit]
            if not known:
                continue
            first, last = known[0], known[-1]
            slope = (line[last] - line[first]) // (last - first) if last > first else line[first]
            fitted = [line[first] + slope * (i - first) for i in range(size)]
            if all(f == v if v < limit else f >= limit for f, v in zip(fitted, line)):
                return [fitted[r // step % size] for r in range(self.ranks)]
        return None


def _block_of(line: Sequence[int]) -> tuple[int, int, int] | None:
    """(slope, stride, size) with ``line[c] == slope * (c // stride % size)``; slope 0 when constant."""
    n = len(line)
    if all(v == 0 for v in line):
        return 0, 1, 1
    stride = next(i for i, v in enumerate(line) if v)
    slope = line[stride]
    if n % stride:
        return None
    for size in range(n // stride, 1, -1):
        if (n // stride) % size == 0 and all(v == slope * (c // stride % size) for c, v in enumerate(line)):
            return slope, stride, size
    return None
