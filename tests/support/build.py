"""Writes graphs and cases in tests: ``g = GraphBuilder("seq"); x = g.input("x", [2, 3]); y = g.aten("relu", x)``.

Types of results come from the shape rules of :mod:`emerge.facts.shapes` or are given (``result=("int64", [4])``), and
:meth:`GraphBuilder.build` checks the whole graph against those rules. Every node carries the line of the test that
made it as its ``source``, so findings point into the test.
"""

from __future__ import annotations

import linecache
import sys
from collections.abc import Callable, Iterator, Sequence
from math import prod
from pathlib import Path
from typing import Any

from emerge.facts.shape_rules.core import TupleValue
from emerge.facts.shapes import ScalarResult, Spec, check_graph, infer
from emerge.graph.json_io import write_graph
from emerge.graph.model import DTYPES, Arg, DType, Graph, Input, Node, Ref, TensorType
from emerge.graph.relations import Expr, Leaf, RelationEntry, Relations
from emerge.graph.relations_io import write_relations

ROOT = Path(__file__).resolve().parents[2]
FUNCOL = "_c10d_functional"

Mesh = dict[str, int]
Groups = dict[str, list[list[int]]]


def mesh_groups(mesh: Mesh) -> Groups:
    """One process group per mesh axis, named after it, and ``world``; ranks are row-major over the axes."""
    sizes = list(mesh.values())
    world = prod(sizes)
    groups: Groups = {"world": [list(range(world))]}
    for k, (axis, size) in enumerate(mesh.items()):
        step = prod(sizes[k + 1 :])
        starts = [r for r in range(world) if r // step % size == 0]
        groups[axis] = [[start + i * step for i in range(size)] for start in starts]
    return groups


class Outputs:
    """Result of a multi-output operator: ``out[0]`` is a ``getitem`` node, made when first asked for."""

    def __init__(self, builder: GraphBuilder, node: Node, types: list[TensorType]) -> None:
        self._builder, self._node, self._types = builder, node, types
        self._items: dict[int, Ref] = {}

    def __len__(self) -> int:
        return len(self._types)

    def __getitem__(self, index: int) -> Ref:
        if not 0 <= index < len(self._types):
            raise IndexError(f"{self._node.name} has {len(self._types)} outputs")
        if index not in self._items:
            self._node.elements[index] = self._types[index]
            self._items[index] = self._builder.op("operator.getitem", Ref(self._node.name), index)
        return self._items[index]

    def __iter__(self) -> Iterator[Ref]:
        return (self[i] for i in range(len(self)))


class GraphBuilder:
    """Writes one graph node by node; every method returns a reference to what it added.

    Collectives are identities in a graph without a mesh, so that one function can write both sides.

    Attributes:
        rank, world_size: which rank of how many the graph belongs to; ``groups``: its process groups.
    """

    def __init__(self, name: str, rank: int = 0, world_size: int = 1, mesh: Mesh | None = None) -> None:
        self.mesh = dict(mesh or {})
        self.groups = mesh_groups(self.mesh) if self.mesh else {}
        self.rank, self.world_size = rank, world_size
        self._graph = Graph(name, [], [], [], rank=rank, world_size=world_size, groups=self.groups, mesh=self.mesh)
        self._values: dict[str, Any] = {}
        self._count: dict[str, int] = {}

    # ---- values -------------------------------------------------------------------------------------------------

    def input(self, name: str, shape: Sequence[int], dtype: str = "float32", *, label: str | None = None) -> Ref:
        """A graph input."""
        if name in self._values:
            raise ValueError(f"{name!r} exists already")
        self._graph.inputs.append(Input(name, dtype, tuple(shape), label=label))
        self._values[name] = TensorType(dtype, tuple(shape))
        return Ref(name)

    def op(
        self,
        op: str,
        *args: Any,
        name: str | None = None,
        result: tuple[str, Sequence[int]] | None = None,
        **kwargs: Any,
    ) -> Any:
        """One operator call; the reference to its result, or :class:`Outputs` of a multi-output operator.

        Args:
            op: qualified name, e.g. ``aten.mm.default``.
            name: of the node; default: the operator's name, numbered.
            result: dtype and shape, where the shape rules cannot tell or as a further check; of every output alike.
        Raises:
            GraphError: the operands do not fit the operator.
            ValueError: no rule gives the type and ``result`` is missing.
        """
        node_args, node_kwargs = _decode(list(args)), {k: _decode(v) for k, v in kwargs.items()}
        source, code = _caller()
        node = Node(self._name(name, op), op, node_args, node_kwargs, source=source, code=code)
        found = infer(op, _typed(node_args, self._values), _typed(node_kwargs, self._values), self.groups, self.rank)
        self._graph.nodes.append(node)
        if isinstance(found, list):
            node.is_tuple = True
            types = [_known(op, s, result) for s in found if s is not None]
            self._values[node.name] = TupleValue(dict(enumerate(types)), len(types))
            return Outputs(self, node, types)
        if isinstance(found, ScalarResult):
            node.is_scalar = True
            self._values[node.name] = found.value
            return Ref(node.name)
        kind = _known(op, found, result)
        node.dtype, node.shape = kind.dtype, kind.shape
        self._values[node.name] = kind
        return Ref(node.name)

    def aten(self, op: str, *args: Any, **kwargs: Any) -> Any:
        """``op`` of the ``aten`` namespace; ``mm`` is short for ``aten.mm.default``."""
        return self.op(f"aten.{op}" if "." in op else f"aten.{op}.default", *args, **kwargs)

    def constant(self, value: Any, shape: Sequence[int], dtype: str = "float32", name: str | None = None) -> Ref:
        """A stored constant (``get_attr``)."""
        source, code = _caller()
        shape = tuple(shape)
        node = Node(self._name(name, "const"), "get_attr", [], {}, dtype, shape, const=value, has_const=True)
        node.args, node.source, node.code = [f"_{node.name}"], source, code
        self._graph.nodes.append(node)
        self._values[node.name] = TensorType(dtype, shape)
        return Ref(node.name)

    def shape(self, value: Ref) -> tuple[int, ...]:
        """Shape of a value made before."""
        return tuple(int(n) for n in self._values[value.name].shape)

    # ---- mesh and collectives -----------------------------------------------------------------------------------

    def at(self, axis: str) -> int:
        """Coordinate of this rank on a mesh axis; 0 in a sequential graph."""
        return self._ranks_of(axis).index(self.rank) if self.groups else 0

    def _ranks_of(self, group: str) -> list[int]:
        return next(g for g in self.groups[group] if self.rank in g)

    def size(self, group: str) -> int:
        """Number of ranks in a process group; 1 in a sequential graph."""
        return len(self._ranks_of(group)) if self.groups else 1

    def wait(self, value: Ref) -> Ref:
        """What captured graphs put behind every collective."""
        return self.op(f"{FUNCOL}.wait_tensor.default", value)

    def all_reduce(self, x: Ref, group: str, how: str = "sum", **more: Any) -> Ref:
        """Reduces over a process group."""
        if not self.groups:
            return x
        return self.wait(self.op(f"{FUNCOL}.all_reduce.default", x, how, group, **more))

    def all_gather(self, x: Ref, group: str, dim: int = 0, **more: Any) -> Ref:
        """Joins shards along ``dim``: gathered on dimension 0, then moved, as functional collectives do."""
        if not self.groups:
            return x
        n, first = self.size(group), self.shape(x)[0]
        out = self.wait(self.op(f"{FUNCOL}.all_gather_into_tensor.default", x, n, group, **more))
        return out if dim == 0 else self.aten("cat", list(self.aten("split.Tensor", out, first)), dim)

    def reduce_scatter(self, x: Ref, group: str, dim: int = 0, how: str = "sum", **more: Any) -> Ref:
        """Reduces and keeps block ``r`` of ``dim`` on rank ``r``."""
        if not self.groups:
            return x
        n = self.size(group)
        if dim:
            x = self.aten("cat", list(self.aten("split.Tensor", x, self.shape(x)[dim] // n, dim)), 0)
        return self.wait(self.op(f"{FUNCOL}.reduce_scatter_tensor.default", x, how, n, group, **more))

    def all_to_all(self, x: Ref, group: str, **more: Any) -> Ref:
        """Block ``j`` of dimension 0 goes to rank ``j``."""
        if not self.groups:
            return x
        n = self.size(group)
        splits = [self.shape(x)[0] // n] * n
        return self.wait(self.op(f"{FUNCOL}.all_to_all_single.default", x, splits, splits, group, **more))

    # ---- the end ------------------------------------------------------------------------------------------------

    def build(self, *outputs: Ref | None) -> Graph:
        """The finished graph, checked against the shape rules.

        Raises:
            GraphError: a declared type contradicts its operator.
        """
        self._graph.outputs = [None if o is None else o.name for o in outputs]
        check_graph(self._graph)
        return self._graph

    def _name(self, given: str | None, op: str) -> str:
        if given is not None:
            if given in self._values:
                raise ValueError(f"{given!r} exists already")
            return given
        parts = op.split(".")
        base = parts[1] if len(parts) > 1 else op
        while True:
            count = self._count[base] = self._count.get(base, -1) + 1
            name = f"{base}_{count}" if count else base
            if name not in self._values:
                return name


def _decode(arg: Any) -> Any:
    """Tuples become lists; everything else is an argument already."""
    return [_decode(a) for a in arg] if isinstance(arg, (list, tuple)) else arg


def _typed(arg: Any, values: dict[str, Any]) -> Any:
    if isinstance(arg, Ref):
        return values[arg.name]
    if isinstance(arg, dict):
        return {k: _typed(v, values) for k, v in arg.items()}
    return [_typed(a, values) for a in arg] if isinstance(arg, list) else arg


def _known(op: str, found: Any, given: tuple[str, Sequence[int]] | None) -> TensorType:
    """The type a rule gives, completed by the given one."""
    if given is not None:
        return TensorType(given[0], tuple(given[1]))
    if not isinstance(found, Spec) or any(not isinstance(n, int) for n in found.shape):
        raise ValueError(f"no rule gives the type of {op}; pass result=(dtype, shape)")
    if found.dtype not in DTYPES and found.dtype != "floating":
        raise ValueError(f"no rule gives the dtype of {op}; pass result=(dtype, {list(found.shape)})")
    return TensorType("float32" if found.dtype == "floating" else found.dtype, found.shape)


def _caller() -> tuple[str, str]:
    """``file:line`` of the test that called the builder (below the repository root) and the text of that line."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename == __file__:
        frame = frame.f_back
    path = Path(frame.f_code.co_filename)
    shown = path.relative_to(ROOT).as_posix() if path.is_relative_to(ROOT) else path.name
    return f"{shown}:{frame.f_lineno}", linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()


def build_ranks(mesh: Mesh | int, fn: Callable[[GraphBuilder, int], Any], name: str = "dist") -> list[Graph]:
    """The graphs of all ranks: ``fn(g, rank)`` writes one and returns its output or a tuple of them.

    Args:
        mesh: named axes, or a number of ranks (one axis ``tp``).
    """
    axes = {"tp": mesh} if isinstance(mesh, int) else mesh
    world = prod(axes.values())
    graphs = []
    for rank in range(world):
        g = GraphBuilder(f"{name}/rank{rank}", rank, world, axes)
        graphs.append(g.build(*_listed(fn(g, rank))))
    return graphs


def build_reference(fn: Callable[[GraphBuilder], Any], name: str = "seq") -> Graph:
    """The sequential graph: ``fn(g)`` writes it and returns its output or a tuple of them."""
    g = GraphBuilder(name)
    return g.build(*_listed(fn(g)))


def _listed(outputs: Any) -> list[Ref]:
    return list(outputs) if isinstance(outputs, (tuple, list)) else [outputs]


# ---- relations --------------------------------------------------------------------------------------------------


def replicated(seq: str, ranks: int, name: str | None = None) -> RelationEntry:
    """Every rank holds all of ``seq`` (under ``name``)."""
    return RelationEntry(seq, "replicated", tuple(Leaf(r, name or seq) for r in range(ranks)))


def sharded(seq: str, dim: int, ranks: int, name: str | None = None) -> RelationEntry:
    """Rank ``r`` holds block ``r`` of dimension ``dim``."""
    return RelationEntry(seq, "shard", tuple(Leaf(r, name or seq) for r in range(ranks)), dim=dim)


def custom(seq: str, expr: Expr, also_equal: Sequence[Sequence[Expr]] = ()) -> RelationEntry:
    """``seq`` is a tree of concatenations and slices of implementation tensors."""
    from emerge.graph.relations_io import leaves

    groups = tuple(tuple(g) for g in also_equal)
    named = [*leaves(expr), *(leaf for g in groups for e in g for leaf in leaves(e))]
    return RelationEntry(seq, "custom", tuple(dict.fromkeys(named)), expr=expr, also_equal=groups)


def write_case(
    directory: Path,
    reference: Graph,
    ranks: Sequence[Graph],
    inputs: Sequence[RelationEntry],
    outputs: Sequence[RelationEntry],
    *,
    expected: str = "unspecified",
    description: str = "",
    case: str | None = None,
) -> None:
    """A case directory: ``seq.json``, ``rank*.json``, ``relations.json``."""
    directory.mkdir(parents=True, exist_ok=True)
    for path in directory.glob("*.json"):
        path.unlink()
    write_graph(reference, directory / "seq.json")
    for graph in ranks:
        write_graph(graph, directory / f"rank{graph.rank}.json")
    relations = Relations(
        case or directory.name,
        len(ranks),
        list(inputs),
        expected,
        expected_outputs=list(outputs),
        claimed_outputs=[e.seq for e in outputs],
        description=description,
    )
    write_relations(relations, directory / "relations.json")


__all__ = [
    "Arg",
    "DType",
    "GraphBuilder",
    "Outputs",
    "Ref",
    "build_ranks",
    "build_reference",
    "custom",
    "mesh_groups",
    "replicated",
    "sharded",
    "write_case",
]
