"""Classes of atomic axes over both sides of a pair: which stretches of dimensions have to keep equal lengths.

Takes the ties of the lowered graphs (:mod:`emerge.facts`), finds how finely every dimension is divided (the fixpoint
of ``datalog/analysis/axes.dl``, here in Python because it is wanted without a derivation and with a few more ties),
and joins atomic axes that are tied. All axes of one class have one size; a class may be *pinned* to the size it has.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from emerge.facts.base import MESH, FactBase

#: (tensor, dim, stride, tensor, dim, stride, positions): strides of one are strides of the other, so far.
Tie = tuple[int, int, int, int, int, int, int]

#: Kinds of operators whose created (``pos``) and ordered (``o``) axes may have any length: no attribute speaks of them.
FREE_KINDS = {"one_hot", "iota", "lookup", "cumsum", "cumprod", "sdpa", "arg", "uninitialised", "const", "stat"}


class Atom(NamedTuple):
    """An atomic axis of a dimension: stride and size in captured sizes, and its class."""

    stride: int
    size: int
    cls: int


@dataclass(frozen=True)
class Op:
    """What is needed of an operator form: its number, result, kind of body and operands."""

    id: int
    value: int
    kind: str
    args: tuple[int, ...]
    iters: tuple[tuple[int, str], ...]
    body: str = ""


class AxisClasses:
    """Atomic axes and their classes.

    Args:
        base: the facts of both sides and of the statements.
        extra: further ties, between lowered tensors.
    """

    def __init__(self, base: FactBase, extra: Iterable[Tie] = ()) -> None:
        self.extents: dict[tuple[int, int], int] = {(x, d): n for x, d, n in base.facts["extent"]}
        self.ranks: dict[int, int] = {}
        for x, d in self.extents:
            if d >= 0:
                self.ranks[x] = max(self.ranks.get(x, 0), d + 1)
        self.ties = [t for t in [*_ties(base), *extra] if t[2] > 0 and t[5] > 0 and t[6] > 1]
        self.conflicts: set[tuple[int, int]] = set()
        self._atoms: dict[tuple[int, int], list[tuple[int, int]]] = {}
        self._parent: dict[tuple[int, int, int], tuple[int, int, int]] = {}
        self._pins: dict[tuple[int, int, int], str] = {}
        self._numbers: dict[tuple[int, int, int], int] = {}
        self._divide(base)
        self._join()
        for key, n in self.extents.items():
            if key[0] == MESH and n > 1:
                self.pin(*key, "the mesh")
        for x, d in self.conflicts:
            self.pin(x, d, "boundaries that do not nest")

    # ---- atomic axes ------------------------------------------------------------------------------------------------

    def _divide(self, base: FactBase) -> None:
        """All strides at which dimensions are divided, to a fixpoint."""
        cuts: dict[tuple[int, int], set[int]] = {k: {1} for k, n in self.extents.items() if n > 1}
        links: dict[tuple[int, int], list[tuple[int, int, int, int, int]]] = {}
        pending: list[tuple[int, int, int]] = []

        def cut(x: int, d: int, s: int) -> None:
            known = cuts.setdefault((x, d), set())
            if s not in known or s == 1:
                known.add(s)
                pending.append((x, d, s))

        for x, dx, ox, y, dy, oy, n in self.ties:
            links.setdefault((x, dx), []).append((ox, y, dy, oy, n))
            links.setdefault((y, dy), []).append((oy, x, dx, ox, n))
        for x, dx, ox, y, dy, oy, n in self.ties:
            for a, d, o in ((x, dx, ox), (y, dy, oy)):
                cut(a, d, o)
                if o * n < self.extents.get((a, d), 0):
                    cut(a, d, o * n)
        for _, d, o, n in base.facts["group_tie"]:
            cut(MESH, d, o)
            if o * n < self.extents.get((MESH, d), 0):
                cut(MESH, d, o * n)
        seen: set[tuple[int, int, int]] = set()
        while pending:
            item = pending.pop()
            if item in seen:
                continue
            seen.add(item)
            x, d, s = item
            for ox, y, dy, oy, n in links.get((x, d), ()):
                if ox <= s < ox * n:
                    if s % ox:
                        self.conflicts.add((x, d))
                    else:
                        cut(y, dy, s // ox * oy)
        for key, strides in cuts.items():
            n = self.extents.get(key, 1)
            ordered = [*sorted(strides), n]
            if n <= 1:
                continue
            if key in self.conflicts or any(b % a for a, b in pairwise(ordered)) or ordered[-2] >= n:
                self.conflicts.add(key)
                self._atoms[key] = [(1, n)]
            else:
                self._atoms[key] = [(a, b // a) for a, b in pairwise(ordered)][::-1]

    def _join(self) -> None:
        for x, dx, ox, y, dy, oy, n in self.ties:
            for s, size in self._within(x, dx, ox, n):
                other = (y, dy, s // ox * oy)
                if (other[2], size) in self._atoms.get((y, dy), ()) and (y, dy) not in self.conflicts:
                    self._union((x, dx, s), other)
                else:
                    self._pins.setdefault(self._find((x, dx, s)), "tied to boundaries that do not nest")
            if (x, dx) in self.conflicts:
                for s, _ in self._within(y, dy, oy, n):
                    self._pins.setdefault(self._find((y, dy, s)), "tied to boundaries that do not nest")

    def _within(self, x: int, d: int, stride: int, n: int) -> list[tuple[int, int]]:
        """Atoms of a dimension inside a stretch of it."""
        if (x, d) in self.conflicts:
            return []
        return [(s, size) for s, size in self._atoms.get((x, d), ()) if stride <= s < stride * n and s % stride == 0]

    def _find(self, key: tuple[int, int, int]) -> tuple[int, int, int]:
        parent = self._parent
        while parent.setdefault(key, key) != key:
            parent[key] = parent[parent[key]]
            key = parent[key]
        return key

    def _union(self, a: tuple[int, int, int], b: tuple[int, int, int]) -> None:
        a, b = self._find(a), self._find(b)
        if a != b:
            self._parent[a] = b
            if a in self._pins:
                self._pins.setdefault(b, self._pins.pop(a))

    def atoms(self, x: int, d: int) -> list[Atom]:
        """Atomic axes of dimension ``d`` of ``x``, outermost first; none for a dimension of one position."""
        return [Atom(s, n, self._number((x, d, s))) for s, n in self._atoms.get((x, d), ())]

    def tensor_atoms(self, x: int) -> list[list[Atom]]:
        """Atomic axes of every dimension of tensor ``x``."""
        return [self.atoms(x, d) for d in range(self.ranks.get(x, 0))]

    def _number(self, key: tuple[int, int, int]) -> int:
        return self._numbers.setdefault(self._find(key), len(self._numbers))

    # ---- pins -------------------------------------------------------------------------------------------------------

    def pin(self, x: int, d: int, why: str) -> bool:
        """Keeps all axes of a dimension at their size; True when one of them was free before."""
        new = False
        for s, _ in self._atoms.get((x, d), ()):
            key = self._find((x, d, s))
            if key not in self._pins:
                self._pins[key] = why
                new = True
        return new

    def pin_outer(self, x: int, d: int, stride: int, why: str) -> None:
        """Keeps the axes of a dimension from a stride upwards at their size."""
        for s, _ in self._atoms.get((x, d), ()):
            if s >= stride:
                self._pins.setdefault(self._find((x, d, s)), why)

    def pin_tensor(self, x: int, why: str) -> bool:
        """Keeps all axes of a tensor (or iteration space) at their size."""
        pinned = [self.pin(x, d, why) for d in range(self.ranks.get(x, 0))]
        return any(pinned)

    def pin_classes(self, classes: Iterable[int], why: str) -> bool:
        """Keeps classes at their size."""
        wanted, new = set(classes), False
        for key, number in list(self._numbers.items()):
            if number in wanted and key not in self._pins:
                self._pins[key] = why
                new = True
        return new

    def pinned(self) -> dict[int, str]:
        """Pinned classes with the reason."""
        return {self._number(key): why for key, why in self._pins.items()}

    def sizes(self) -> dict[int, int]:
        """Size of every class that a tensor or operator has (after :meth:`atoms` was asked for it)."""
        out: dict[int, int] = {}
        for (x, d), atoms in self._atoms.items():
            for s, n in atoms:
                key = self._find((x, d, s))
                if key in self._numbers:
                    out[self._numbers[key]] = n
        return out


def _ties(base: FactBase) -> list[Tie]:
    f = base.facts
    value_of = {o: v for o, v, _, _ in f["op"]}
    arg_of = {(o, k): a for o, k, a in f["op_arg"]}
    out: list[Tie] = [(v, dv, ov, a, da, oa, n) for v, dv, ov, a, da, oa, n in f["layout_tie"]]
    out += [(o, i, oi, arg_of[o, k], d, od, n) for o, k, i, oi, d, od, n in f["arg_tie"]]
    out += [(o, i, oi, value_of[o], d, od, n) for o, i, oi, d, od, n in f["out_tie"]]
    out += [(o, i, oi, MESH, d, od, n) for name in ("from_mesh_tie", "to_mesh_tie") for o, i, oi, d, od, n in f[name]]
    for kind in ("given", "expected"):
        ends = {g: (s, d) for g, s, d in f[kind]}
        out += [(ends[g][0], ds, os, ends[g][1], dd, od, n) for g, ds, os, dd, od, n in f[f"{kind}_tie"]]
        out += [(ends[g][0], ds, os, MESH, dd, od, n) for g, ds, os, dd, od, n in f[f"{kind}_mesh_tie"]]
    return out


def operators(base: FactBase) -> list[Op]:
    """All operator forms of the facts."""
    f = base.facts
    kinds = dict(f["body_kind"])
    args: dict[int, list[tuple[int, int]]] = {}
    for o, k, a in f["op_arg"]:
        args.setdefault(o, []).append((k, a))
    iters: dict[int, list[tuple[int, str]]] = {}
    for o, i, role in f["iter"]:
        iters.setdefault(o, []).append((i, role))
    return [
        Op(o, v, kinds.get(b, ""), tuple(a for _, a in sorted(args.get(o, ()))), tuple(iters.get(o, ())), b)
        for o, v, b, _ in f["op"]
    ]


def broadcast_ties(x: int, shape: Sequence[int], y: int, other: Sequence[int]) -> list[Tie]:
    """Ties between two tensors that broadcast against each other, dimensions aligned from the right."""
    out = []
    for k in range(1, min(len(shape), len(other)) + 1):
        if shape[-k] == other[-k] and shape[-k] > 1:
            out.append((x, len(shape) - k, 1, y, len(other) - k, 1, shape[-k]))
    return out
