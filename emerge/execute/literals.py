"""Numbers in a graph that may be a function of a dimension's length: table bounds, 1/n, sqrt(n), ...

A number that equals a simple function of a length, and that no rule of :mod:`emerge.execute.rewrite` explains, forbids
shrinking that length: it might stand for it. Bounds and offsets of index tensors are explained by the table that the
index reaches (``ids >= 49152`` beside a table of 49152 rows).
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable
from math import prod, sqrt
from typing import Any

from emerge.execute.aliasing import split_op
from emerge.execute.axes import AxisClasses
from emerge.graph.model import Graph, Ref, is_integer, iter_refs

#: Lengths up to this one are never shrunk, so a number that equals a function of them is harmless.
SMALL = 4
#: No length shrinks below this one, so positions below it stay valid.
SHORTEST = 3


def _rounded(value: float) -> set[float]:
    """The value, and what is left of it in float32, bfloat16 and float16."""
    out = {value}
    try:
        single = struct.unpack("<f", struct.pack("<f", value))[0]
        bits = struct.unpack("<I", struct.pack("<f", value))[0]
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
        out |= {single, struct.unpack("<f", struct.pack("<I", rounded & 0xFFFFFFFF))[0]}
        if value > 1e-4:  # a smaller one loses digits or vanishes in float16
            out.add(struct.unpack("<e", struct.pack("<e", value))[0])
    except (OverflowError, struct.error):
        pass
    return out


def functions_of(n: int) -> set[float]:
    """Simple functions of a length as they occur in graphs, in every precision they may have been stored in."""
    out: set[float] = {float(k) for k in (n, n - 1, n + 1, 2 * n)}
    for value in (1 / n, sqrt(n), 1 / sqrt(n), n**-0.25, n**0.25, 1 / (n - 1) if n > 1 else 1.0):
        out |= _rounded(value)
    return out


class LengthTable:
    """Finds the lengths that a number may stand for.

    Args:
        classes: axis classes of both sides.
        tensors: identifiers of all lowered tensors of interest.
    """

    def __init__(self, classes: AxisClasses, tensors: Iterable[int]) -> None:
        self._found: dict[float, set[int]] = {}
        seen: set[tuple[tuple[int, int], ...]] = set()
        lengths: dict[int, set[int]] = {}
        for x in tensors:
            atoms = tuple((a.size, a.cls) for d in classes.tensor_atoms(x) for a in d)
            if atoms in seen:
                continue
            seen.add(atoms)
            for i in range(len(atoms)):
                for j in range(i + 1, len(atoms) + 1):
                    n = prod(s for s, _ in atoms[i:j])
                    if n > SMALL:
                        lengths.setdefault(n, set()).update(c for s, c in atoms[i:j] if s > 1)
        for n, found in lengths.items():
            for value in functions_of(n):
                self._found.setdefault(value, set()).update(found)

    def classes_of(self, value: int | float) -> set[int]:
        """Classes of the lengths that this number is a function of; empty when it is none."""
        return self._found.get(abs(float(value)), set())


#: Operators whose integer result is no function of the *values* of their integer operands.
_NEW_VALUES = {"index", "gather", "embedding", "index_select", "take", "nonzero", "bincount", "searchsorted", "one_hot"}


class IndexTables:
    """For every integer tensor of a graph the table dimensions that it, or what is computed from it, looks up.

    Attributes:
        of: name -> number of the connected group of integer tensors it belongs to.
        tables: group -> list of (table name, dimension).
    """

    def __init__(self, graph: Graph) -> None:
        types = graph.types()
        self._parent: dict[str, str] = {}
        self.tables: dict[str, list[tuple[str, int]]] = {}
        looked: list[tuple[str, str, int]] = []

        def integer(name: str) -> bool:
            return name in types and is_integer(types[name].dtype) and types[name].dtype != "bool"

        for node in graph.nodes:
            op = split_op(node.op)[1]
            for index, table, dim in _lookups(node.args, op):
                if integer(index) and table in types:
                    looked.append((index, table, dim))
            if op in ("argmax", "argmin", "topk", "sort", "max", "min", "argsort"):
                self._note_positions(node, op, looked, types)
            if op not in _NEW_VALUES and integer(node.name):
                for name in iter_refs([*node.args, *node.kwargs.values()]):
                    if integer(name):
                        self._parent[self.find(name)] = self.find(node.name)
            if op == "getitem" and integer(node.name) and isinstance(node.args[0], Ref):
                self._parent[self.find(f"{node.args[0].name}#1")] = self.find(node.name)
        for index, table, dim in looked:
            self.tables.setdefault(self.find(index), []).append((table, dim))

    def _note_positions(self, node: Any, op: str, looked: list[tuple[str, str, int]], types: dict[str, Any]) -> None:
        """Results that are positions along a dimension of the operand: that dimension is their table."""
        source = node.args[0].name if node.args and isinstance(node.args[0], Ref) else None
        if source not in types:
            return
        position = 2 if op == "topk" else 1
        dim = node.kwargs.get("dim", node.args[position] if len(node.args) > position else -1)
        if isinstance(dim, int) and not isinstance(dim, bool):
            name = f"{node.name}#1" if node.dtype is None else node.name
            looked.append((name, source, dim % len(types[source].shape)))

    def find(self, name: str) -> str:
        """Representative of the group of an integer tensor."""
        while self._parent.setdefault(name, name) != name:
            self._parent[name] = self._parent[self._parent[name]]
            name = self._parent[name]
        return name

    def tables_of(self, name: str) -> list[tuple[str, int]]:
        """Table dimensions that values of this integer tensor are positions of."""
        return self.tables.get(self.find(name), [])


#: Operators with (table, dimension, index) as their first arguments.
_ALONG = {"index_select", "gather", "scatter", "scatter_add", "index_add"}


def _lookups(args: list[Any], op: str) -> list[tuple[str, str, int]]:
    """(index, table, dimension) of an operator that looks up positions."""
    if op == "embedding" and len(args) > 1 and isinstance(args[0], Ref) and isinstance(args[1], Ref):
        return [(args[1].name, args[0].name, 0)]
    if op in _ALONG and len(args) > 2:
        table, dim, index = args[:3]
        known = isinstance(table, Ref) and isinstance(dim, int) and isinstance(index, Ref)
        return [(index.name, table.name, dim)] if known else []
    if (
        op in ("index", "index_put", "_unsafe_index")
        and len(args) > 1
        and isinstance(args[0], Ref)
        and isinstance(args[1], list)
    ):
        return [(i.name, args[0].name, d) for d, i in enumerate(args[1]) if isinstance(i, Ref)]
    if (
        op in ("nll_loss", "nll_loss_forward")
        and len(args) > 1
        and isinstance(args[0], Ref)
        and isinstance(args[1], Ref)
    ):
        return [(args[1].name, args[0].name, 1)]
    return []


NewLength = Callable[[str, int], "tuple[int, int] | None"]
"""(tensor name, dimension) -> (captured length, new length), None where it is not known."""


def rescaled_bound(value: int, tables: list[tuple[str, int]], length: NewLength) -> int | None:
    """A bound or offset of an index tensor at new table lengths; None when the tables do not explain it.

    Multiples of the table's length are offsets and bounds of blocks of that length; one less is the last position.
    """
    if value in (-1, -100) or 0 <= value < SHORTEST:
        return value
    found: set[int] = set()
    for table, dim in tables:
        known = length(table, dim)
        if known is None:
            return None
        old, new = known
        if old == new:
            found.add(value)
        elif value % old == 0:
            found.add(value // old * new)
        elif (value + 1) % old == 0:
            found.add((value + 1) // old * new - 1)
        else:
            return None
    return found.pop() if len(found) == 1 else None
