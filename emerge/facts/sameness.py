"""What the zip of rank graphs needs to know about one rank: which nodes only hand a value on, and what is written when.

Two calls on different ranks read the same if their operands agree after *identities* (clone, a view to the same shape,
a cast to the same dtype, ...). That holds while nobody writes in place, so an identity is looked through only where
neither its operand nor its result, nor anything that may share memory with them, may be written on that rank.

Where memory is written, a name stands for several values, one after another. A read is told apart by how many writes
came before it, and reads and writes of one memory are kept in the order of their rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, cast

from emerge.facts.collectives import collective_of
from emerge.facts.mutation import MAY_ALIAS, written
from emerge.graph.model import Graph, Node, Ref, TensorType, iter_refs

#: Operators whose result is their first operand whenever both have one dtype and shape.
IDENTITIES = frozenset(
    [f"aten.{n}" for n in (
        "clone", "detach", "detach_copy", "alias", "alias_copy", "contiguous", "lift", "lift_fresh", "lift_fresh_copy",
        "positive", "_to_copy", "to", "float", "double", "half", "bfloat16",
        "view", "view_copy", "reshape", "_unsafe_view", "_reshape_alias", "flatten", "squeeze", "expand",
    )]
    + ["prims.convert_element_type", "_c10d_functional.wait_tensor", "c10d_functional.wait_tensor"]
    + ["hlo.reshape", "hlo.convert", "hlo.copy"]
)  # fmt: skip

#: Operators of two tensors in which these may be exchanged. ``add`` is one only while ``alpha`` is 1.
COMMUTATIVE = frozenset(
    [f"aten.{n}" for n in (
        "add", "mul", "maximum", "minimum", "eq", "ne", "logical_and", "logical_or", "logical_xor",
        "bitwise_and", "bitwise_or", "bitwise_xor",
    )]
    + [f"hlo.{n}" for n in ("add", "multiply", "maximum", "minimum", "and", "or", "xor")]
)  # fmt: skip

#: Namespaces of operators that write only where their name or arguments say so.
_PURE = frozenset(
    [
        "aten", "prims", "operator", "hlo", "emerge", "get_attr", "auto_functionalized", "auto_functionalized_v2",
        "_c10d_functional", "c10d_functional", "_c10d_functional_autograd", "_dtensor",
    ]
)  # fmt: skip

#: Operators of other namespaces that write nothing.
_FUNCTIONAL = frozenset(
    [f"apex.fused_{n}_affine_{d}" for n in ("layer_norm", "rms_norm") for d in ("fwd", "bwd")] + ["megatron.sinkhorn"]
)

#: More operators than those of :data:`MAY_ALIAS` whose result may be (a view of) their first operand.
_MORE_ALIASES = frozenset(
    [f"aten.{n}" for n in (
        "lift", "double", "int", "long", "bool", "_conj", "_neg_view", "imag", "T", "H", "mH", "matrix_H", "adjoint",
        "moveaxis", "data", "unsafe_chunk",
    )]
    + ["c10d_functional.wait_tensor"]
)  # fmt: skip


def base_name(op: str) -> str:
    """An operator without its overload: ``aten.add.Tensor`` -> ``aten.add``, ``operator.getitem`` as it is."""
    return op.rpartition(".")[0] if op.count(".") >= 2 else op


@dataclass(frozen=True, slots=True)
class _Traits:
    """What the name of an operator says."""

    base: str
    identity: bool
    commutative: bool
    aliases: bool
    in_place: bool
    suspect: bool


@cache
def _traits(op: str) -> _Traits:
    base = base_name(op)
    namespace = base.partition(".")[0]
    known = namespace in _PURE or base in _FUNCTIONAL
    known = known or (namespace != "c10d" and collective_of(Node("", op)) is not None)
    in_place = base.endswith("_") and not base.endswith("__")
    odd = base.endswith("_out") or ("batch_norm" in base and "_functional" not in base)
    aliases = base in MAY_ALIAS or base in _MORE_ALIASES
    return _Traits(base, base in IDENTITIES, base in COMMUTATIVE, aliases, in_place, odd or not known)


def identity_operand(node: Node, types: Mapping[str, TensorType]) -> str | None:
    """The one operand that ``node`` hands on unchanged (same elements, dtype and shape), None if it does not.

    Args:
        types: of the operands, by name; sizes that depend on data are never taken to agree.
    """
    if not _traits(node.op).identity or node.dtype is None or node.shape is None:
        return None
    if not node.args or not isinstance(node.args[0], Ref) or len(list(node.refs())) != 1:
        return None
    name = node.args[0].name
    fixed = all(isinstance(n, int) for n in node.shape)
    return name if fixed and types.get(name) == TensorType(node.dtype, tuple(node.shape)) else None


def is_commutative(node: Node) -> bool:
    """True where the operands of ``node`` are two tensors whose order does not matter."""
    if not _traits(node.op).commutative or len(node.args) != 2:
        return False
    if not all(isinstance(a, Ref) for a in node.args):
        return False
    return all(k == "alpha" and type(v) is int and v == 1 for k, v in node.kwargs.items())


def _writes(node: Node) -> list[str]:
    """Names that the operator says it writes to."""
    traits = _traits(node.op)
    if not traits.in_place and "out" not in node.kwargs:
        return []
    found = written(cast(Any, node))
    simple = traits.base.startswith(("aten.", "prims.")) and node.args and isinstance(node.args[0], Ref)
    if traits.in_place and (not simple or traits.base.startswith("aten._fused")):
        # a list as in _foreach_add_, or an operator whose schema is unknown here: whatever it reads
        found = [*found, *node.refs()]
    return list(dict.fromkeys(found))


def _may_write(node: Node) -> list[str]:
    """Names that it may write to: of an operator of unknown schema, all that it reads."""
    return list(dict.fromkeys(node.refs())) if _traits(node.op).suspect else _writes(node)


class _Classes:
    """Names that may share memory, as disjoint sets."""

    def __init__(self, graph: Graph, writers: Mapping[str, list[str]]) -> None:
        self._parent: dict[str, str] = {}
        for node in graph.nodes:
            targets = writers.get(node.name, [])
            if _traits(node.op).aliases:
                targets = [*targets, *list(iter_refs(node.args[:1]))]
            for name in targets:
                self._parent[self.of(name)] = self.of(node.name)

    def of(self, name: str) -> str:
        root = name
        while (up := self._parent.get(root, root)) != root:
            root = up
        while (up := self._parent.get(name, name)) != root:
            self._parent[name], name = root, up
        return root


class RankValues:
    """The values of one rank.

    Attributes:
        through: identity node -> its operand, where it may be looked through.
        order: (earlier, later) pairs of nodes whose order memory fixes.
        after: (writer, later) pairs of those in which ``later`` reads what ``writer`` wrote.
        last: name -> the last node that writes to its memory. ``writers``: nodes that write in place.
    """

    def __init__(self, graph: Graph, types: Mapping[str, TensorType]) -> None:
        self.through: dict[str, str] = {}
        self.order: list[tuple[str, str]] = []
        self.after: list[tuple[str, str]] = []
        self.last: dict[str, str] = {}
        self.writers: frozenset[str] = frozenset()
        self._roots: dict[str, str] = {}
        self._versions: dict[str, dict[str, int]] = {}  # node -> operand -> writes before, where there are any
        touched: set[str] = set()
        classes: _Classes | None = None
        writers = {node.name: names for node in graph.nodes if (names := _may_write(node))}
        if writers:
            classes = _Classes(graph, writers)
            touched = {classes.of(name) for names in writers.values() for name in names}
            certain = {node.name: names for node in graph.nodes if node.name in writers and (names := _writes(node))}
            if certain:
                self.writers = frozenset(certain)
                self._trace(graph, classes, certain)
        for node in graph.nodes:
            operand = identity_operand(node, types)
            if operand is None:
                continue
            if classes is not None and (classes.of(operand) in touched or classes.of(node.name) in touched):
                continue
            self.through[node.name] = operand
            self._roots[node.name] = self._roots.get(operand, operand)

    def root(self, name: str) -> str:
        """The first value that ``name`` is the same as."""
        return self._roots.get(name, name)

    def version(self, node: str, operand: str) -> int:
        """Writes to the memory of ``operand`` before ``node`` reads it."""
        return self._versions.get(node, {}).get(operand, 0)

    def path(self, name: str) -> Iterator[str]:
        """``name`` and what it is the same as, up to its root."""
        yield name
        while name in self.through:
            name = self.through[name]
            yield name

    def _trace(self, graph: Graph, classes: _Classes, writers: Mapping[str, list[str]]) -> None:
        """Counts the writes before each read, and notes which reads and writes must keep their order."""
        written_ever = {classes.of(name) for names in writers.values() for name in names}
        count: dict[str, int] = {}
        last: dict[str, str] = {}  # memory -> its last writer
        since: dict[str, list[str]] = {}  # memory -> readers since then
        for node in graph.nodes:
            memory = {name: classes.of(name) for name in node.refs()}
            seen = {name: count[m] for name, m in memory.items() if count.get(m)}
            if seen:
                self._versions[node.name] = seen
            targets = {classes.of(name) for name in writers.get(node.name, ())}
            for m in dict.fromkeys(memory.values()):
                if m not in written_ever:
                    continue
                if m in last:
                    self.order.append((last[m], node.name))
                    self.after.append((last[m], node.name))
                if m in targets:
                    self.order += [(reader, node.name) for reader in since.pop(m, ())]
                    last[m] = node.name
                    count[m] = count.get(m, 0) + 1
                else:
                    since.setdefault(m, []).append(node.name)
        names = [i.name for i in graph.inputs] + [n.name for n in graph.nodes]
        self.last = {name: last[classes.of(name)] for name in names if classes.of(name) in last}


__all__ = ["COMMUTATIVE", "IDENTITIES", "RankValues", "base_name", "identity_operand", "is_commutative"]
