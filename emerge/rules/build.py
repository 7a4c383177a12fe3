"""Simulates how a program is sharded, so that random right (and, with faults, wrong) implementations can be written.

A :class:`Val` is one value of both programs with the placement a correct implementation would have. Faults are drawn at
the places where real programs go wrong; after a fault the placement kept here is what a careless author believes, and
the derivation must not believe it.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from emerge.graph.model import Ref
from emerge.relate.statement import AxisPlacement, Piece, Statement
from emerge.rules.pair import Pair, placed
from emerge.rules.writer import PerRank, Writer


@dataclass(frozen=True)
class Val:
    """A value in both programs.

    Attributes:
        names: names of its dimensions (equal names have equal sizes). dims: mesh axis that shards each, or None.
        partial: mesh axes over which the implementation holds parts, combined with ``how``.
        kind: ``f`` float, ``i`` integer, ``b`` boolean. positive: all elements > 0.
    """

    ref: Ref
    imp: Ref
    names: tuple[str, ...]
    dims: tuple[str | None, ...]
    partial: tuple[str, ...] = ()
    how: str = "none"
    kind: str = "f"
    positive: bool = False

    def arguments(self, *rest: Any) -> Callable[[bool], list[Any]]:
        """For :meth:`Build.both`: this value, then values and plain attributes."""
        return lambda r: [v.at(r) if isinstance(v, Val) else v for v in (self, *rest)]

    def at(self, reference: bool) -> Ref:
        """The reference's or the implementation's value."""
        return self.ref if reference else self.imp

    def axes(self) -> set[str]:
        """Mesh axes in use."""
        return {a for a in self.dims if a} | set(self.partial)


class Build:
    """A pair under construction.

    Args:
        fault_rate: chance that a place where a fault is possible is faulty.
        ones: some dimensions have size 1.
    """

    def __init__(
        self, seed: int, mesh: dict[str, int], fault_rate: float = 0.0, ones: bool = False, tag: str = ""
    ) -> None:
        self.rng = random.Random(seed)
        self.mesh = dict(mesh)
        self.tag = f"{tag}seed={seed} mesh={mesh}"
        self.reference = Writer("seq")
        self.imp = Writer("dist", mesh)
        self.statements: list[Statement] = []
        self.ranges: dict[str, tuple[int, int]] = {}
        self.masks: list[tuple[str | None, ...]] = []
        self.scenes: list[str] = []
        self.faults: list[str] = []
        self.fault_rate = fault_rate
        self.ones = ones
        self.equal: list[tuple[int, str, str]] = []
        self.algebra = False
        self.vals: list[Val] = []
        self.sizes: dict[str, int] = {}
        self._used: set[int] = set()
        self._inputs = 0

    # ---- sizes and choices --------------------------------------------------------------------------------------

    def fault(self, name: str) -> bool:
        """True where the implementation is to be wrong here."""
        if self.rng.random() >= self.fault_rate:
            return False
        self.faults.append(name)
        return True

    def pick(self, options: Sequence[Any]) -> Any:
        """A random element."""
        return options[self.rng.randrange(len(options))]

    def axis(self) -> str:
        """A random mesh axis."""
        return str(self.pick(list(self.mesh)))

    def dim(self, name: str, axes: Sequence[str] = ()) -> str:
        """Declares a dimension whose size is divisible over ``axes``; sizes are pairwise different and not 1."""
        if name in self.sizes:
            return name
        unit = prod(self.mesh[a] for a in axes)
        if self.ones and not axes and self.rng.random() < 0.3:
            self.sizes[name] = 1
            return name
        candidates = [unit * k for k in (2, 3, 4, 5, 6, 7, 9, 11, 13) if unit * k not in self._used]
        small = [n for n in candidates if n <= max(14, 3 * unit)] or candidates
        self.sizes[name] = self.pick(small[:5])
        self._used.add(self.sizes[name])
        return name

    def shape(self, names: Sequence[str]) -> tuple[int, ...]:
        """Whole shape of named dimensions."""
        return tuple(self.sizes[n] for n in names)

    def local(self, names: Sequence[str], dims: Sequence[str | None]) -> tuple[int, ...]:
        """Local shape."""
        return tuple(self.sizes[n] // (self.mesh[a] if a else 1) for n, a in zip(names, dims))

    # ---- inputs -------------------------------------------------------------------------------------------------

    def input(
        self,
        names: Sequence[str],
        dims: Sequence[str | None] | None = None,
        dtype: str = "float64",
        low: int = 0,
        high: int = 0,
        keep: bool = True,
    ) -> Val:
        """An input of both programs, sharded as told."""
        names, dims = tuple(names), tuple(dims or [None] * len(names))
        name = f"in{self._inputs}"
        self._inputs += 1
        shape = self.shape(names)
        ref = self.reference.input(name, shape, dtype)
        imp = self.imp.input(name, self.local(names, dims), dtype)
        if dtype != "bool" and not dtype.startswith("float"):
            self.ranges[name] = (low, high)
        self.statements.append(placed(name, shape, dims, self.mesh))
        kind = "b" if dtype == "bool" else "f" if dtype.startswith("float") else "i"
        return self.keep(Val(ref, imp, names, dims, kind=kind)) if keep else Val(ref, imp, names, dims, kind=kind)

    def odd_input(self, names: Sequence[str], dims: Sequence[str | None]) -> Val:
        """An input that the implementation holds permuted and with merged dimensions; it views it back at once."""
        names, dims = tuple(names), tuple(dims)
        name = f"in{self._inputs}"
        self._inputs += 1
        shape, local = self.shape(names), self.local(names, dims)
        ref = self.reference.input(name, shape)
        order = list(range(len(names)))
        self.rng.shuffle(order)
        held = [local[d] for d in order]
        merge = len(held) > 1 and self.rng.random() < 0.7
        stored = [held[0] * held[1], *held[2:]] if merge else held
        where: dict[int, tuple[int, int]] = {}
        for k, d in enumerate(order):
            where[d] = ((0, held[1]) if k == 0 else (0, 1) if k == 1 else (k - 1, 1)) if merge else (k, 1)
        imp = self.imp.input(name, stored)
        plain = placed(name, shape, dims, self.mesh)
        axes = tuple(
            a if a.mesh is not None else AxisPlacement(a.size, a.reference, where[a.reference[0]]) for a in plain.axes
        )
        self.statements.append(Statement(Piece(name), Piece(name), axes))
        value = self.imp.op("view", imp, held)
        back = [order.index(d) for d in range(len(names))]
        if self.fault("wrong order of an input's dimensions") and len({held[k] for k in range(len(held))}) < len(held):
            back = back[::-1]
        if back != sorted(back):
            value = self.imp.op("permute", value, back)
        return self.keep(Val(ref, value, names, dims))

    def keep(self, val: Val) -> Val:
        """Makes a value available to later steps."""
        self.vals.append(val)
        return val

    # ---- operators ----------------------------------------------------------------------------------------------

    def both(self, op: str, args: Callable[[bool], list[Any]], **kwargs: Any) -> tuple[Ref, Ref]:
        """The same operator in both programs; ``args(is_reference)``."""
        return self.reference.op(op, *args(True), **kwargs), self.imp.op(op, *args(False), **kwargs)

    def map(self, op: str, val: Val, *rest: Any, **changes: Any) -> Val:
        """An operator with one value and plain attributes, placement unchanged unless told."""
        ref, imp = self.both(op, lambda r: [val.ref if r else val.imp, *rest])
        return self.keep(self.like(val, ref, imp, **changes))

    @staticmethod
    def like(val: Val, ref: Ref, imp: Ref, **changes: Any) -> Val:
        """``val`` with other references and, where told, another placement."""
        fields = {"names": val.names, "dims": val.dims, "partial": val.partial, "how": val.how, "kind": val.kind,
                  "positive": False, **changes}  # fmt: skip
        return Val(ref, imp, **fields)

    def per_rank(self, function: Callable[[int], Any]) -> PerRank:
        """An argument that depends on the rank."""
        return self.imp.per_rank(function)

    def finish(self) -> Pair:
        """The pair, with the last values as outputs."""
        last = self.vals[-3:]
        reference = self.reference.finish(*[v.ref for v in last])[0]
        ranks = self.imp.finish(*[v.imp for v in last])
        fault = "; ".join(self.faults)
        return Pair(f"{self.tag} scenes={'+'.join(self.scenes)}", reference, ranks, self.mesh, self.statements,
                    self.ranges, self.masks, self.scenes, fault, self.equal, self.algebra)  # fmt: skip


def floats(b: Build, where: Callable[[Val], bool] = lambda v: True) -> Val | None:
    """A random float value with a property, later ones more likely."""
    found = [v for v in b.vals if v.kind == "f" and where(v)]
    return found[-1 - min(int(b.rng.expovariate(0.4)), len(found) - 1)] if found else None
