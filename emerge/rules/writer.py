"""Writes small graphs: the reference, and the graphs of all ranks at once.

Types of results come from the shape rules of :mod:`emerge.facts.shapes`.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple

from emerge.facts.shape_rules.core import TupleValue
from emerge.facts.shapes import ScalarResult, Spec, infer
from emerge.graph.model import DType, Graph, Input, Node, Ref, TensorType


class PerRank(NamedTuple):
    """An argument with one value per rank."""

    values: tuple[Any, ...]


class Unwritable(Exception):
    """The operator does not fit its operands; the caller chooses another one."""


def mesh_groups(mesh: dict[str, int]) -> dict[str, list[list[int]]]:
    """One process group per mesh axis, named after it, and ``world``; ranks are row-major over the axes."""
    sizes = list(mesh.values())
    world = prod(sizes)
    groups: dict[str, list[list[int]]] = {"world": [list(range(world))]}
    for k, (axis, size) in enumerate(mesh.items()):
        step = prod(sizes[k + 1 :])
        starts = [r for r in range(world) if r // step % size == 0]
        groups[axis] = [[start + i * step for i in range(size)] for start in starts]
    return groups


class Writer:
    """One program for ``ranks`` ranks: every call adds one node to each of their graphs.

    Names are the same on all ranks. Arguments may be :class:`PerRank`.
    """

    def __init__(self, name: str, mesh: dict[str, int] | None = None) -> None:
        self.mesh = dict(mesh or {})
        self.groups = mesh_groups(self.mesh) if self.mesh else {}
        self.ranks = prod(self.mesh.values()) if self.mesh else 1
        self.graphs = [
            Graph(f"{name}/rank{r}" if self.mesh else name, [], [], [], rank=r, world_size=self.ranks,
                  groups=self.groups, mesh=self.mesh)
            for r in range(self.ranks)
        ]  # fmt: skip
        self._types: list[dict[str, Any]] = [{} for _ in self.graphs]
        self._count = 0

    def input(self, name: str, shape: Sequence[int], dtype: str = "float32") -> Ref:
        """A graph input of every rank."""
        for graph, types in zip(self.graphs, self._types):
            graph.inputs.append(Input(name, dtype, tuple(shape)))
            types[name] = TensorType(dtype, tuple(shape))
        return Ref(name)

    def op(
        self,
        op: str,
        *args: Any,
        gives: tuple[str, Sequence[int]] | None = None,
        elements: dict[int, TensorType] | None = None,
        **kwargs: Any,
    ) -> Ref:
        """One operator call; of a multi-output operator take elements with :meth:`item`.

        Args:
            op: qualified name, ``aten.`` may be left out.
            gives: dtype and shape where no rule gives them. elements: the same for a multi-output operator.
        Raises:
            Unwritable: the operands do not fit, or no rule gives the type.
        """
        known = op.count(".") >= 2 or op in ("get_attr", "auto_functionalized") or op.startswith("operator.")
        qualified = op if known else f"aten.{op}" if "." in op else f"aten.{op}.default"
        made = []
        for rank, types in enumerate(self._types):
            node = Node(f"{op.split('.')[-1 if op.startswith('operator') else 0]}_{self._count}", qualified)
            node.args = [_at(a, rank) for a in args]
            node.kwargs = {k: _at(v, rank) for k, v in kwargs.items()}
            made.append((node, self._infer(node, types, rank, gives, elements)))
        self._count += 1
        for (node, value), graph, types in zip(made, self.graphs, self._types):
            if isinstance(value, TupleValue):
                node.is_tuple = True
                node.elements = dict(value.elements) if elements else {}
            else:
                node.dtype, node.shape = value.dtype, value.shape
            graph.nodes.append(node)
            types[node.name] = value
        return Ref(made[0][0].name)

    def _infer(self, node: Node, types: dict[str, Any], rank: int, gives: Any, outputs: Any) -> Any:
        if outputs is not None:
            return TupleValue(dict(outputs), max(outputs) + 1)
        if gives is not None:
            return TensorType(gives[0], tuple(gives[1]))
        try:
            found = infer(node.op, _typed(node.args, types), {k: _typed(v, types) for k, v in node.kwargs.items()},
                          self.groups, rank)  # fmt: skip
        except Exception as exc:
            raise Unwritable(f"{node.op}: {exc}") from exc
        if isinstance(found, list):
            elements = {i: TensorType(str(s.dtype), s.shape) for i, s in enumerate(found) if isinstance(s, Spec)}
            return TupleValue(elements, len(found))
        if (
            not isinstance(found, Spec)
            or isinstance(found, ScalarResult)
            or any(isinstance(n, str) for n in found.shape)
        ):
            raise Unwritable(f"{node.op}: no rule gives its type")
        return TensorType("float64" if found.dtype in ("floating", None) else str(found.dtype), found.shape)

    def item(self, source: Ref, index: int | PerRank) -> Ref:
        """Element of a multi-output node."""
        for rank, (graph, types) in enumerate(zip(self.graphs, self._types)):
            position = _at(index, rank)
            node = next(n for n in reversed(graph.nodes) if n.name == source.name)
            known = types[source.name].elements
            if position not in known:
                raise Unwritable(f"{source.name} has no output {position}")
            node.elements[position] = known[position]
        return self.op("operator.getitem", source, index)

    def shape(self, value: Ref) -> tuple[int, ...]:
        """Local shape of a value on rank 0."""
        return tuple(self._types[0][value.name].shape)

    def dtype(self, value: Ref) -> str:
        """dtype of a value."""
        return str(self._types[0][value.name].dtype)

    def per_rank(self, function: Any) -> PerRank:
        """``function(rank)`` on every rank."""
        return PerRank(tuple(function(r) for r in range(self.ranks)))

    def at(self, rank: int, axis: str) -> int:
        """Coordinate of a rank on a mesh axis."""
        group = next(g for g in self.groups[axis] if rank in g)
        return group.index(rank)

    def size(self, group: str) -> int:
        """Number of ranks in a process group."""
        return len(self.groups[group][0])

    def all_reduce(self, x: Ref, group: str, how: str = "sum") -> Ref:
        """Reduces over a process group."""
        return self._wait(self.op("_c10d_functional.all_reduce.default", x, how, group))

    def all_gather(self, x: Ref, group: str, dim: int = 0) -> Ref:
        """Joins shards along ``dim``: gathered on dimension 0, then moved, as functional collectives do."""
        n, first = self.size(group), self.shape(x)[0]
        out = self._wait(self.op("_c10d_functional.all_gather_into_tensor.default", x, n, group))
        if dim == 0:
            return out
        parts = self.op("split.Tensor", out, first)
        return self.op("cat", [self.item(parts, i) for i in range(n)], dim)

    def reduce_scatter(self, x: Ref, group: str, dim: int = 0, how: str = "sum") -> Ref:
        """Reduces and keeps block ``r`` of ``dim`` on rank ``r``."""
        n = self.size(group)
        if dim:
            parts = self.op("split.Tensor", x, self.shape(x)[dim] // n, dim)
            x = self.op("cat", [self.item(parts, i) for i in range(n)], 0)
        return self._wait(self.op("_c10d_functional.reduce_scatter_tensor.default", x, how, n, group))

    def all_to_all(self, x: Ref, group: str) -> Ref:
        """Block ``j`` of dimension 0 goes to rank ``j``."""
        n = self.size(group)
        splits = [self.shape(x)[0] // n] * n
        return self._wait(self.op("_c10d_functional.all_to_all_single.default", x, splits, splits, group))

    def broadcast(self, x: Ref, group: str, source: int = 0) -> Ref:
        """The value of one rank of the group on all of them."""
        return self._wait(self.op("_c10d_functional.broadcast.default", x, source, group))

    def exchange(self, x: Ref, group: str, shift: int = 1) -> Ref:
        """Every rank of a group sends to the rank ``shift`` places on, and receives from the one as far back."""
        members = [next(g for g in self.groups[group] if r in g) for r in range(self.ranks)]
        target = self.per_rank(lambda r: members[r][(members[r].index(r) + shift) % len(members[r])])
        source = self.per_rank(lambda r: members[r][(members[r].index(r) - shift) % len(members[r])])
        self.op("_c10d_functional.isend.default", x, target, 0, group, gives=(self.dtype(x), (0,)))
        return self._wait(self.op("_c10d_functional.irecv.default", x, source, 0, group))

    def _wait(self, x: Ref) -> Ref:
        return self.op("_c10d_functional.wait_tensor.default", x)

    def finish(self, *outputs: Ref) -> list[Graph]:
        """The graphs, one per rank."""
        for graph in self.graphs:
            graph.outputs = [o.name for o in outputs]
        return self.graphs


def _at(arg: Any, rank: int) -> Any:
    if isinstance(arg, PerRank):
        return arg.values[rank]
    if isinstance(arg, (list, tuple)) and not isinstance(arg, (Ref, DType)):
        return [_at(a, rank) for a in arg]
    return arg


def _typed(arg: Any, types: dict[str, Any]) -> Any:
    if isinstance(arg, Ref):
        return types[arg.name]
    return [_typed(a, types) for a in arg] if isinstance(arg, list) else arg
