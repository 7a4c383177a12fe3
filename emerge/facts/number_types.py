"""Floating types of computed values, for ``datalog/analysis/precision.dl``.

Casts between floating types are identities for the alignments; what they round is kept here. A *computation* is an input
or a node that computes a floating value; casts, views and nodes that only move elements are the way from one
computation to the next. Nothing is compared here.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, TypeGuard

from emerge.graph.model import is_floating

if TYPE_CHECKING:
    from emerge.facts.base import FactBase
    from emerge.facts.families import FamilyGraph, FamilyNode
    from emerge.facts.lower import Lowering, Tensor

#: Bits of the significand, the hidden one included: how finely a type rounds.
SIGNIFICAND = {"float64": 53, "float32": 24, "float16": 11, "bfloat16": 8}
#: Kinds of operators that move elements and round nothing.
MOVING = {"layout", "slice", "cat", "lookup", "keep", "fill", "fill0", "pos", "where", "select"}


class Way(NamedTuple):
    """A value on its way: what computed it, the coarsest type it has had since, and the node that rounded it so."""

    source: str
    dtype: str
    rounded: str


class Computation(NamedTuple):
    """Node or input ``name`` computes ``tensor`` in type ``dtype``, reading values that came by ``ways``."""

    name: str
    operator: str
    tensor: int
    dtype: str
    ways: tuple[Way, ...]


@dataclass
class NumberTypes:
    """The computations of one side, noted while it is lowered.

    Attributes:
        ways: node -> the ways by which its value came. read: ways of the graph's outputs.
        ids: identifier in the facts -> node or input.
    """

    computations: dict[str, Computation] = field(default_factory=dict)
    ways: dict[str, tuple[Way, ...]] = field(default_factory=dict)
    read: tuple[Way, ...] = ()
    ids: dict[int, str] = field(default_factory=dict)

    def note_input(self, name: str, tensor: Tensor) -> None:
        """An input, which rounds nothing but has a type."""
        self._computes(name, "", tensor, tensor.dtype, ())

    def note(self, low: Lowering, node: FamilyNode, result: Any) -> None:
        """A node, right after it was lowered (in-place operators may change what names stand for later)."""
        refs = list(dict.fromkeys(node.refs()))
        ways = tuple(dict.fromkeys(w for r in refs for w in self.ways.get(r, ())))
        if not is_tensor(result):
            self.ways[node.name] = ways  # several results: the nodes that pick one of them compute it
            return
        if result.constant is not None:
            return
        root = low.innermost(result).id
        operands = {r: t for r in refs if is_tensor(t := low.tensors.get(r))}
        same = [r for r, t in operands.items() if low.innermost(t).id == root]
        made = low.made_by.get(root)
        reduces = made is not None and made.relocation is not None and made.relocation[1] != "none"
        moves = made is not None and not reduces and (made.kind in MOVING or made.relocation is not None)
        if same or moves:
            passed = tuple(dict.fromkeys(w for r in same for w in self.ways.get(r, ()))) if same else ways
            self.ways[node.name] = tuple(_rounded(w, node) for w in passed)
            return
        dtype = result.dtype
        if not is_floating(dtype):  # a choice or a comparison is made in the type of what is compared
            found = sorted(
                (t.dtype for t in operands.values() if is_floating(t.dtype)), key=lambda d: -SIGNIFICAND.get(d, 0)
            )
            if not found:
                return
            dtype = found[0]
        self._computes(node.name, _operator(node), result, dtype, ways, is_floating(result.dtype))

    def alias(self, target: str, node: str) -> None:
        """``target`` now stands for what ``node`` computed: it was written in place."""
        if node in self.ways:
            self.ways[target] = self.ways[node]

    def outputs(self, graph: FamilyGraph) -> None:
        """The graph's outputs are read by whoever calls it."""
        self.read = tuple(dict.fromkeys(w for o in graph.outputs if o.name for w in self.ways.get(o.name, ())))

    def types(self) -> set[str]:
        """All types that occur."""
        ways = (w for c in self.computations.values() for w in c.ways)
        return {c.dtype for c in self.computations.values()} | {w.dtype for w in (*ways, *self.read)}

    def _computes(
        self, name: str, operator: str, tensor: Tensor, dtype: str, ways: tuple[Way, ...], floating: bool = True
    ) -> None:
        if dtype not in SIGNIFICAND:
            return
        self.computations[name] = Computation(name, operator, tensor.id, dtype, ways)
        if floating:
            self.ways[name] = (Way(name, dtype, name),)


def write_types(base: FactBase, sides: Iterable[NumberTypes]) -> None:
    """Facts about both sides; none where everything has one type, for then nothing can differ."""
    sides = list(sides)
    if len(set().union(*(s.types() for s in sides))) < 2:
        return
    base.add_all("float_type", sorted(SIGNIFICAND.items()))
    for side in sides:
        number: dict[str, int] = {}

        def id_of(name: str, side: NumberTypes = side, number: dict[str, int] = number) -> int:
            if name not in number:
                number[name] = base.new_id()
                side.ids[number[name]] = name
            return number[name]

        for c in side.computations.values():
            base.add("computation", id_of(c.name), c.tensor, c.operator, c.dtype)
            for way in c.ways:
                base.add("result_read", id_of(c.name), id_of(way.source), way.dtype, id_of(way.rounded))
        for way in side.read:
            base.add("result_read", 0, id_of(way.source), way.dtype, id_of(way.rounded))


def is_tensor(value: Any) -> TypeGuard[Tensor]:
    """Whether a lowered value is one tensor (not a number, nor several results)."""
    return hasattr(value, "id") and hasattr(value, "constant")


def _rounded(way: Way, node: FamilyNode) -> Way:
    dtype = node.dtype
    if dtype is None or SIGNIFICAND.get(dtype, 99) >= SIGNIFICAND[way.dtype]:
        return way
    return Way(way.source, dtype, node.name)


def _operator(node: FamilyNode) -> str:
    """``aten._softmax.default`` -> ``softmax``."""
    return (node.op.split(".")[1] if node.op.count(".") else node.op).strip("_")
