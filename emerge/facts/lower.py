"""Lowering: a family graph becomes facts. Every operator turns into a signature (iteration axes, roles, body).

Nothing is searched or concluded here: what an operator means is looked up in ``emerge/facts/ops`` (one function per
operator family) and written down; which tensors correspond is derived by the programs in ``datalog/``.
"""

from __future__ import annotations

import os
import struct
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any, NamedTuple, Protocol

from emerge.facts.base import MESH, FactBase, constant_text
from emerge.facts.families import FamilyGraph, FamilyNode, Group, RankVector
from emerge.facts.kernels import Signature, lower_kernel
from emerge.facts.mesh import Block, Mesh
from emerge.facts.messages import is_receive, is_send
from emerge.facts.mutation import Storage, written
from emerge.facts.number_types import NumberTypes
from emerge.facts.routing import Routing, note_layout
from emerge.graph.model import DType, Ref, Shape, TypedConst, is_floating, is_integer
from emerge.util.errors import GraphError


class Tie(NamedTuple):
    """Strides ``oi * k`` of an iteration dimension are strides ``od * k`` of dimension ``d``, for ``1 <= k < n``."""

    oi: int
    d: int
    od: int
    n: int


@dataclass(frozen=True)
class Iter:
    """One iteration dimension of an operator.

    Attributes:
        size: number of positions.
        role: ``p`` parallel, ``sum|max|min|prod`` reduced, ``w`` whole axis (order does not matter),
            ``o`` whole axis (order matters), ``pos`` created (no operand carries it), ``in`` graph input.
        out: where it lies in the result; empty when it is consumed.
        args: operand position -> where it lies there; a missing operand is constant along it.
        from_mesh, to_mesh: blocks of the mesh it comes from / goes to (relocations, rank-dependent positions).
    """

    size: int
    role: str = "p"
    out: tuple[Tie, ...] = ()
    args: tuple[tuple[int, tuple[Tie, ...]], ...] = ()
    from_mesh: tuple[Tie, ...] = ()
    to_mesh: tuple[Tie, ...] = ()


def whole(size: int, d: int) -> tuple[Tie, ...]:
    """The iteration dimension is exactly dimension ``d``."""
    return (Tie(1, d, 1, size),)


def axis(size: int, role: str = "p", out: int | None = None, **args: int | None) -> Iter:
    """Iteration dimension that is a whole dimension of the result and of operands ``a0=dim, a1=dim, ...``."""
    return Iter(
        size,
        role,
        () if out is None else whole(size, out),
        tuple((int(k[1:]), whole(size, d)) for k, d in args.items() if d is not None),
    )


@dataclass(frozen=True)
class Tensor:
    """A lowered tensor.

    Attributes:
        id: identifier in the facts.
        depth: longest chain of operators from the inputs.
        constant: value where every element is this one constant, else None.
    """

    id: int
    shape: tuple[int, ...]
    dtype: str
    depth: int = 0
    constant: Fraction | float | None = None


@dataclass(frozen=True)
class Void(Tensor):
    """A tensor without elements: nothing is computed in it, so no fact is written about it."""


@dataclass(frozen=True)
class Made:
    """How a tensor was written: by an operator (``iters``), or as a rearrangement of ``args[0]`` (``ties``)."""

    body: str
    kind: str
    args: tuple[Tensor, ...]
    iters: tuple[Iter, ...] = ()
    ties: tuple[tuple[int, int, int, int, int], ...] = ()
    broadcast: tuple[int, ...] = ()
    scale: Fraction | None = None
    relocation: tuple[str, str] | None = None
    group: tuple[Block, ...] = ()


class Elements(NamedTuple):
    """The elements of a constant: all ``first``, or ``first + step * i`` at position ``i`` of dimension ``dim``."""

    first: float
    dim: int | None = None
    step: int = 0


class Recipe(NamedTuple):
    """How a tensor can be made again, for the algebra: what it is in terms of its operands.

    Attributes:
        name: ``map`` (body, kind), ``scale`` (factor), ``place`` (dims, shape), ``view`` (shape), ``slice`` (dim, start,
            stop), ``cat`` (dim), ``fold`` (dims, role, body, kind), ``einsum`` (spec) or ``along`` (dim, role, body, kind).
        args: operands. params: as named above.
    """

    name: str
    args: tuple[Tensor, ...]
    params: tuple[Any, ...]


@dataclass
class Multi:
    """Result of a multi-output operator: tensors by output index, lowered when asked for."""

    make: Callable[[int], Tensor]
    made: dict[int, Tensor] = field(default_factory=dict)

    def __getitem__(self, index: int) -> Tensor:
        if index not in self.made:
            self.made[index] = self.make(index)
        return self.made[index]


class Unsupported(Exception):
    """The operator, or these attributes of it, have no signature; the result is an unknown (with this reason)."""


#: Kinds of body that the index domain follows from operand to result; every other integer tensor is a source of its own.
INDEX_KINDS = {
    "addc",
    "mulc",
    "add",
    "sub",
    "keep",
    "fill",
    "fill0",
    "and",
    "or",
    "not",
    "cast",
    "ltc",
    "lec",
    "gtc",
    "gec",
    "const",
}

#: Kinds whose results wrap around in narrow integer types.
WRAPPING = {"addc", "mulc", "add", "sub", "mul", "neg", "csub", "square", "powc", "sum", "prod", "cumsum", "cast"}

#: Sizes of dimensions all of whose positions an integer type holds.
POSITIONS_HELD = {"uint8": 1 << 8, "int8": 1 << 7, "int16": 1 << 15, "int32": 1 << 31, "int64": 1 << 62}


class EqualForm(NamedTuple):
    """A call of a kernel and its composite by a definition, which have one value; ``node`` holds the call."""

    kernel: Tensor
    composite: Tensor
    definition: str
    node: str


class Meanings(Protocol):
    """Definitions of operators in data files (``emerge/kernels``)."""

    def has(self, op: str) -> bool:
        """Whether the operator has one."""
        ...

    def lower(self, low: Lowering, node: FamilyNode, op: str, args: list[Any], kwargs: dict[str, Any]) -> Any:
        """The result of a node by its definition; raises Unsupported where it does not apply."""
        ...


Handler = Callable[["Lowering", FamilyNode, list[Any], dict[str, Any]], Any]
HANDLERS: dict[str, Handler] = {}


def lowers(*names: str) -> Callable[[Handler], Handler]:
    """Registers the lowering of operators, by name with or without overload."""

    def register(handler: Handler) -> Handler:
        for name in names:
            if name in HANDLERS:
                raise ValueError(f"operator {name} is lowered twice")
            HANDLERS[name] = handler
        return handler

    return register


def find_handler(op: str) -> Handler | None:
    """The lowering of an operator: exact name first, then the name without its overload."""
    return HANDLERS.get(op) or HANDLERS.get(op.rpartition(".")[0])


@dataclass(frozen=True)
class Assumption:
    """Something taken for granted at an operator; listed in the report when a verdict depends on that operator."""

    name: str
    op: int
    why: str


class Lowering:
    """Lowers one side into a fact base.

    Attributes:
        tensors: node or input name -> lowered tensor (or Multi, or a Python scalar for scalar nodes).
        nodes_of: tensor id -> names of the nodes that compute it.
        op_node: operator form id -> node it came from ("" for auxiliary ones).
        padded_inputs: input -> dimension -> size with padding; ``padded`` holds the padded tensors.
        index_limits: input -> size of the smallest table that is looked up at its elements: outside ``[0, size)`` the graph
            fails. ``limits``: what that says about the inputs of this side.
        flat_views: nodes whose views are operators on whole, ordered dimensions (their boundaries do not nest with others).
        unknown: node name -> why it is a fresh unknown.
        uninterpreted: node name -> why it is only an uninterpreted function.
        assumptions: what operators take for granted.
        signature_law: operator form id -> law of the rule file that describes the operator.
        calls: calls of operators that have a definition (node, operator, arguments, result).
        defined: (node, tensor id, definition) where a composite stands for a tensor that has no other lowering.
        forms: what definitions make equal.
    """

    def __init__(
        self,
        base: FactBase,
        side: int,
        mesh: Mesh,
        signatures: Mapping[tuple[str, int], Signature] | None = None,
        meanings: Meanings | None = None,
    ) -> None:
        self.base, self.side, self.mesh = base, side, mesh
        self.meanings = meanings
        self.calls: list[tuple[FamilyNode, str, list[Any], dict[str, Any], Any]] = []
        self.defined: set[tuple[str, int, str]] = set()
        self.forms: list[EqualForm] = []
        self.signatures = signatures or {}
        self.described = {op for op, _ in self.signatures}
        self.tensors: dict[str, Any] = {}
        self.nodes_of: dict[int, list[str]] = {}
        self.op_node: dict[int, str] = {}
        self.op_of: dict[int, int] = {}
        self.unknown: dict[str, str] = {}
        self.uninterpreted: dict[str, str] = {}
        self.assumptions: list[Assumption] = []
        self.signature_law: dict[int, str] = {}
        self.pieces_of: dict[int, list[tuple[Tensor, int, int]]] = {}
        self.lookup_of: dict[int, tuple[Tensor, Tensor, list[Iter]]] = {}
        self.readers: Counter[str] = Counter()
        self.view_of: dict[int, Tensor] = {}
        self.permute_of: dict[int, tuple[Tensor, tuple[int, ...]]] = {}
        self.slice_of: dict[int, tuple[Tensor, int, int]] = {}
        self.gather_of: dict[int, tuple[Tensor, int, tuple[Block, ...]]] = {}
        self.range_of: dict[int, tuple[tuple[int, ...], int]] = {}
        self.permutations: set[int] = set()
        #: Tensors of positions of a dimension -> its size; largest or smallest values -> (operand, dimension).
        self.position_limits: dict[int, int] = {}
        self.top_of: dict[int, tuple[Tensor, int]] = {}
        #: Tables of one block of numbers, and what was looked up in them (emerge/facts/ops/blocks.py).
        self.block_tables: dict[int, Any] = {}
        self.block_of: dict[int, tuple[Tensor, int, int]] = {}
        self.recipes: dict[int, Recipe] = {}
        self.padded_inputs: dict[str, dict[int, int]] = {}
        self.padded: dict[str, Tensor] = {}
        self.padding: set[int] = set()
        self.index_limits: dict[str, int] = {}
        self.limits: dict[str, int] = {}
        self.extension: Any = None
        self.routing = Routing()
        self.number_types = NumberTypes()
        self.input_ids: dict[str, int] = {}
        self.random_calls = 0
        self.slice_depth = 0
        #: Parts of dimensions that statements speak about (emerge/facts/ops/sections.py): (size, start, stop); slices whose
        #: forms are not written yet; what was made of (tensor, dimension, start, stop); tensor -> its slices.
        self.sections: set[tuple[int, int, int]] = set()
        self.sections_left: list[tuple[Tensor, int, int, int, Tensor]] = []
        self.sections_made: dict[tuple[int, int, int, int], Tensor | None] = {}
        self.section_slices: dict[int, list[tuple[int, int, int, Tensor]]] = {}
        #: Slice -> what it was made by on sliced operands, and that form.
        self.form_of_slice: dict[int, tuple[Made, int]] = {}
        self.storage = Storage()
        self.sent: dict[str, Any] = {}  # send node -> what it sends
        self.ranks_of: dict[str, tuple[int, ...]] = {}
        self.joined: dict[Any, Tensor | None] = {}
        self.strict = bool(os.environ.get("EMERGE_STRICT_LOWERING"))
        self.node: FamilyNode | None = None
        self.made_by: dict[int, Made] = {}
        self.layout_node: dict[int, str] = {}
        self.flat_views: frozenset[str] = frozenset()
        #: Constants that were executed and are lower triangles of True (or of 0 above -inf): causal masks.
        self.causal_masks: frozenset[str] = frozenset()
        #: Constants that were executed and hold one number or a range, which their operators do not show.
        self.executed: Mapping[str, Elements] = {}
        self._memo: dict[Any, Tensor] = {}
        self._bodies: set[str] = set()

    # ---- whole graphs -------------------------------------------------------------------------------------------

    def lower(self, graph: FamilyGraph) -> None:
        """Lowers inputs and nodes in order."""
        import emerge.facts.ops  # noqa: F401  (registers the handlers)

        self.ranks_of = {i.name: i.ranks for i in graph.inputs} | {n.name: n.ranks for n in graph.nodes}
        for inp in graph.inputs:
            if self.mesh.fixed(inp.ranks) is not None:  # of one stage: the others may be taken to hold copies
                self.lower_input(inp.name, inp.shape, inp.dtype)
            else:
                self.unknown[inp.name] = f"an input on ranks {list(inp.ranks)} only"
        self.readers = Counter(r for node in graph.nodes for r in dict.fromkeys(node.refs()))
        self.readers.update(o.name for o in graph.outputs if o.name is not None)
        for node in graph.nodes:
            self.lower_node(node)
        self.number_types.outputs(graph)

    def lower_input(self, name: str, shape: Shape, dtype: str) -> None:
        """A graph input: an operator without operands whose axes are its dimensions."""
        dims = tuple(int(s) if isinstance(s, int) else 0 for s in shape)
        if any(not isinstance(s, int) for s in shape):
            self.unknown[name] = f"input of data-dependent shape {list(shape)}"
            return
        if 0 in dims:
            self.tensors[name] = Void(-1, dims, dtype)
            return
        own = dims
        padded = self.padded_inputs.get(name, {})
        dims = tuple(max(n, padded.get(d, n)) for d, n in enumerate(dims))
        iters = [Iter(n, "in", whole(n, d)) for d, n in enumerate(dims)]
        tensor = self.op(f"input:{self.side}:{name}", "input", [], iters, dims, dtype)
        self.base.add("input_op", self.op_of[tensor.id])
        if dims != own:
            from emerge.facts.ops.layout import slice_plain

            # the implementation holds the tensor with padding behind it; the tensor itself is the part before that
            self.padded[name] = tensor
            self.padding.add(tensor.id)
            for d, n in enumerate(own):
                tensor = slice_plain(self, tensor, d, 0, n, 1)
            self.base.add("padded_input", tensor.id)
        self.tensors[name] = tensor
        self.input_ids[name] = tensor.id
        self.nodes_of.setdefault(tensor.id, []).append(name)
        self.number_types.note_input(name, tensor)

    def lower_node(self, node: FamilyNode) -> None:
        """Lowers one node; what cannot be lowered becomes an unknown tensor with a reason."""
        from emerge.facts.ops.complex_numbers import complex_handler, holds_complex

        if len(node.ranks) != self.mesh.ranks:
            node = self.of_stage(node) or node
        self.node = node
        handler = find_handler(node.op)
        try:
            if len(node.ranks) != self.mesh.ranks and not self.extends(node):
                raise Unsupported(f"exists on ranks {list(node.ranks)} only")
            if is_send(node.op):
                self.sent[node.name] = self.resolve(node.args[0])
            if node.shape is not None and node.dtype is not None and 0 in node.shape and not node.is_tuple:
                self.tensors[node.name] = Void(-1, tuple(int(n) for n in node.shape if isinstance(n, int)), node.dtype)
                return
            args = [self.resolve(a) for a in node.args]
            kwargs = {k: self.resolve(v) for k, v in node.kwargs.items()}
            wrapped = node.op == "auto_functionalized" and bool(args) and isinstance(args[0], str)
            name = str(args[0]) if wrapped else node.op
            operands = args[1:] if wrapped else args
            if name in self.described:
                handler = _described(name, operands)
            elif holds_complex(args) or holds_complex(kwargs):
                handler = complex_handler(node.op)
            if handler is None and self.meanings is not None and self.meanings.has(name):
                result = self.meanings.lower(self, node, name, operands, kwargs)
            else:
                result = self.apply(handler, node, args, kwargs)
                self.note_call(node, name, operands, kwargs, result)
        except Unsupported as exc:
            result = self.unknown_result(node, str(exc))
        except (TypeError, ValueError, IndexError, KeyError, AttributeError) as exc:
            # arguments of a kind that the handler does not know, e.g. a number per rank where it expects one number
            if self.strict:
                raise
            result = self.unknown_result(node, f"its arguments are not understood ({type(exc).__name__}: {exc})")
        if isinstance(result, Tensor) and node.shape is not None and tuple(node.shape) != result.shape:
            # shapes were checked before; if a lowering disagrees with them it has misread the operator
            why = f"declares shape {list(node.shape)} where its lowering gives {list(result.shape)}"
            if self.strict:
                raise GraphError(why, f"node {node.name!r} ({node.op})")
            result = self.unknown_result(node, why)
        if node.name in self.executed and isinstance(result, Tensor):
            result = self.executed_constant(self.executed[node.name], result)
        self.tensors[node.name] = result
        self.number_types.note(self, node, result)
        for target in self.storage.visit(node, self._rearranged(node, result)):
            self.tensors[target] = result
            self.number_types.alias(target, node.name)
        if isinstance(result, Tensor):
            self.nodes_of.setdefault(result.id, []).append(node.name)
        self.node = None

    def executed_constant(self, elements: Elements, x: Tensor) -> Tensor:
        """A constant whose elements are known from its execution."""
        from emerge.facts.ops.layout import view
        from emerge.facts.ops.positions import positions

        if elements.dim is None:
            result = self.constant(elements.first, x.shape, x.dtype)
        else:
            n, after = x.shape[elements.dim], len(x.shape) - elements.dim - 1
            result = positions(self, n, [int(elements.first)] * self.mesh.ranks, elements.step, x.dtype)
            result = self.broadcast_to(view(self, result, [n, *[1] * after]), x.shape)
        self.assume("equal_constants", result, "a constant, executed here: its elements are one number or a range")
        return result

    def note_call(self, node: FamilyNode, op: str, args: list[Any], kwargs: dict[str, Any], result: Any) -> None:
        """Keeps a call of an operator that has a definition, for the algebra."""
        if self.meanings is not None and self.meanings.has(op) and isinstance(result, (Tensor, Multi)):
            self.calls.append((node, op, args, kwargs, result))

    def _rearranged(self, node: FamilyNode, result: Any) -> list[str]:
        """Operands whose values the result only rearranges: it may be a view of them."""
        if not isinstance(result, Tensor):
            return []
        source: Tensor | None = result
        seen = set()
        while source is not None:
            seen.add(source.id)
            made = self.made_by.get(source.id)
            source = made.args[0] if made is not None and made.kind == "layout" else None
        return [r for r in dict.fromkeys(node.refs()) if isinstance(t := self.tensors.get(r), Tensor) and t.id in seen]

    def apply(self, handler: Handler | None, node: FamilyNode, args: list[Any], kwargs: dict[str, Any]) -> Any:
        """The node's result by its lowering; where that has none, as an uninterpreted function if it is one.

        Raises:
            Unsupported: it is not.
        """
        from emerge.facts.ops.uninterpreted import is_functional, uninterpreted

        why = f"operator {node.op} has no signature"
        if handler is not None:
            try:
                _check_call(node, args, kwargs)
                return handler(self, node, args, kwargs)
            except Unsupported as exc:
                why = str(exc)
        if not is_functional(node):
            raise Unsupported(why)
        self.uninterpreted[node.name] = why
        return uninterpreted(self, node, args, kwargs)

    def of_stage(self, node: FamilyNode) -> FamilyNode | None:
        """A node of one stage of a pipeline as a node of all ranks; None where its ranks are no such part of the mesh.

        The other stages are taken to compute copies of it, from copies of its operands: what a stage holds is then the
        same along the mesh axes that tell stages apart. These copies are not in the program; a value gets from one
        stage to another only by messages and collectives, which are looked at on the ranks that issue them.
        """
        fixed = self.mesh.fixed(node.ranks)
        if fixed is None or (written(node) and any(self.ranks_of[r] != node.ranks for r in node.refs())):
            return None
        position = {r: k for k, r in enumerate(node.ranks)}
        home = [position[self.mesh.home(r, fixed)] for r in range(self.mesh.ranks)]

        def groups(group: Group) -> Group | None:
            if any(r not in position for g in group.ranks for r in g):
                return None
            moved = []
            for rank, k in enumerate(home):
                own = {d: self.mesh.coordinate(rank, d) for d in fixed}
                moved.append(tuple(self.mesh.home(r, own) for r in group.ranks[k]))
            return Group(tuple(moved))

        def all_ranks(arg: Any) -> Any:
            if isinstance(arg, RankVector):
                return RankVector(tuple(arg.values[k] for k in home))
            if isinstance(arg, Group):
                return groups(arg) or arg
            return [all_ranks(a) for a in arg] if isinstance(arg, list) else arg

        if node.group is not None and not (is_send(node.op) or is_receive(node.op)) and groups(node.group) is None:
            return None
        return replace(
            node,
            args=[all_ranks(a) for a in node.args],
            kwargs={k: all_ranks(v) for k, v in node.kwargs.items()},
            const=all_ranks(node.const),
            ranks=tuple(range(self.mesh.ranks)),
            extra={**node.extra, "stage": node.ranks},
        )

    def extends(self, node: FamilyNode) -> bool:
        """Whether a node that only some ranks have means something on every rank: its operands do, and it is the same
        operator everywhere it stands. What it computes on the other ranks is not in the program; only a join of several
        such nodes (``emerge.mixed``) can bring it into play."""

        def plain(arg: Any) -> bool:
            if isinstance(arg, (RankVector, Group)):
                return False
            return all(map(plain, arg)) if isinstance(arg, list) else True

        return not written(node) and node.group is None and all(map(plain, [*node.args, *node.kwargs.values()]))

    def resolve(self, arg: Any) -> Any:
        """Arguments with references replaced by lowered tensors."""
        if isinstance(arg, Ref):
            if arg.name in self.storage.stale:
                raise Unsupported(
                    f"reads {arg.name!r}, which shares memory with what {self.storage.stale[arg.name]!r} wrote in place"
                )
            value = self.tensors.get(arg.name)
            if value is None:
                raise Unsupported(f"reads {arg.name!r}, which is unknown")
            if isinstance(value, Void) and (self.node is None or not takes_void(self.node.op)):
                raise Unsupported(f"reads {arg.name!r}, which has no elements")
            return value
        if isinstance(arg, list):
            return [self.resolve(a) for a in arg]
        return arg

    def unknown_result(self, node: FamilyNode, why: str) -> Any:
        """A fresh unknown for a node; its operands are kept so that findings can name it."""
        self.unknown[node.name] = why
        operands = [self.tensors[r] for r in dict.fromkeys(node.refs()) if isinstance(self.tensors.get(r), Tensor)]

        def fresh(shape: Shape | None, dtype: str | None, index: int) -> Tensor | None:
            if shape is None or dtype is None or any(not isinstance(s, int) for s in shape):
                return None
            dims = tuple(int(s) for s in shape)
            iters = [Iter(n, "pos", whole(n, d)) for d, n in enumerate(dims)]
            return self.op(f"unknown:{self.side}:{node.name}:{index}", "unknown", operands, iters, dims, dtype)

        if node.is_tuple:
            elements = {i: fresh(t.shape, t.dtype, i) for i, t in node.elements.items()}
            return Multi(lambda i: _known(elements.get(i), node.name))
        return fresh(node.shape, node.dtype, 0)

    # ---- emitting -----------------------------------------------------------------------------------------------

    def op(
        self,
        body: str,
        kind: str,
        args: Sequence[Tensor],
        iters: Sequence[Iter],
        shape: Sequence[int],
        dtype: str,
        *,
        form_of: Tensor | None = None,
        relocation: tuple[str, str] | None = None,
        group: Sequence[Block] = (),
        scale: Fraction | None = None,
    ) -> Tensor:
        """Writes one operator form and returns its tensor (the same one for a repeated call: equal operators on equal
        operands are one tensor).

        Args:
            form_of: the tensor this is another way to compute; None makes a new tensor.
            relocation: kind and reduction of an operator that moves data between mesh and tensor axes.
            group: mesh blocks of its process group, outermost first.
            scale: the constant of a ``scale`` operator.
        """
        name = body
        if kind in WRAPPING and is_integer(dtype) and dtype not in ("int64", "bool"):
            # narrow integers wrap around: what holds of sums and products of numbers does not hold of them
            body, kind = f"{body}.{dtype}", f"{kind}.{dtype}"
        body = body if body == "scale" else f"{body}/{len(args)}"
        key = (body, tuple(a.id for a in args), tuple(iters), tuple(shape), relocation, tuple(group), scale, form_of)
        if key in self._memo:
            return self._memo[key]
        base, oid = self.base, self.base.new_id()
        if form_of is None:
            depth = 1 + max((a.depth for a in args), default=-1)
            tensor = Tensor(base.new_id(), tuple(shape), dtype, depth)
            base.add("value", tensor.id, self.side)
            for d, n in enumerate(shape):
                base.add("extent", tensor.id, d, n)
            base.add("op_native", oid)
            self.made_by[tensor.id] = Made(
                name, kind, tuple(args), tuple(iters), scale=scale, relocation=relocation, group=tuple(group)
            )
            self.op_of[tensor.id] = oid
            if is_integer(dtype) and kind not in INDEX_KINDS:
                base.add("index_source", tensor.id)
        else:
            tensor = form_of
        base.add("op", oid, tensor.id, body, len(args))
        if body not in self._bodies:
            self._bodies.add(body)
            base.add("body_kind", body, kind)
            op, _, output = kind.rpartition("#")
            if op in self.described:
                base.add("described_body", body, op, int(output))
            if len(args) <= 30:
                base.add("all_operands", body, (1 << len(args)) - 1)
        for k, a in enumerate(args):
            base.add("op_arg", oid, k, a.id)
        if args:
            base.add("lead", oid, max(range(len(args)), key=lambda k: (args[k].depth, -k)))
        base.add("iter_count", oid, len(iters))
        if kind == "dropout":
            base.add("random_op", oid)
        tag = 0
        for i, it in enumerate(iters):
            base.add("iter_tag", oid, i, i if kind == "dropout" else -1 if it.role == "p" else tag)
            tag += it.role != "p"
            self._emit_iter(oid, i, it, len(args))
        if relocation is not None:
            base.add("relocation", oid, *relocation)
            size = 1
            for b in group:
                base.add("group_tie", oid, b.dim, b.stride, b.size)
                size *= b.size
            base.add("group_size", oid, size)
        if scale is not None:
            base.add("scale_op", oid, constant_text(scale))
        self.op_node[oid] = self.node.name if self.node is not None else ""
        self._memo[key] = tensor
        return tensor

    def _emit_iter(self, oid: int, i: int, it: Iter, operands: int) -> None:
        base = self.base
        base.add("iter", oid, i, it.role)
        base.add("extent", oid, i, it.size)
        if it.size == 1:
            return
        for t in it.out:
            if t.n > 1:
                base.add("out_tie", oid, i, *t)
        if not it.out and not it.to_mesh:
            base.add("consumed", oid, i)
        present = dict(it.args)
        for k in range(operands):
            if k in present:
                base.add_all("arg_tie", [(oid, k, i, *t) for t in present[k] if t.n > 1])
            elif not it.from_mesh:
                base.add("arg_absent", oid, k, i)
        base.add_all("from_mesh_tie", [(oid, i, *t) for t in it.from_mesh if t.n > 1])
        base.add_all("to_mesh_tie", [(oid, i, *t) for t in it.to_mesh if t.n > 1])

    def layout(
        self,
        arg: Tensor,
        shape: Sequence[int],
        ties: Sequence[tuple[int, int, int, int, int]],
        broadcast: Sequence[int] = (),
    ) -> Tensor:
        """Writes a rearrangement: ``ties`` are (dim, stride) of the result, (dim, stride) of the operand, size."""
        key = ("layout", arg.id, tuple(shape), tuple(ties), tuple(broadcast))
        if key in self._memo:
            return self._memo[key]
        base = self.base
        tensor = Tensor(base.new_id(), tuple(shape), arg.dtype, arg.depth, arg.constant)
        base.add("value", tensor.id, self.side)
        for d, n in enumerate(shape):
            base.add("extent", tensor.id, d, n)
        base.add("layout", tensor.id, arg.id)
        for dv, ov, da, oa, n in ties:
            if n > 1:
                base.add("layout_tie", tensor.id, dv, ov, arg.id, da, oa, n)
        for d in broadcast:
            base.add("layout_broadcast", tensor.id, d)
        self.layout_node[tensor.id] = self.node.name if self.node is not None else ""
        self.made_by[tensor.id] = Made("layout", "layout", (arg,), (), tuple(ties), tuple(broadcast))
        dims = _whole_dims(arg.shape, shape, ties)
        if dims is not None:
            self.remember(tensor, "place", [arg], dims, tuple(shape))
        note_layout(self, tensor, arg)
        self._memo[key] = tensor
        return tensor

    def remember(self, tensor: Tensor, name: str, args: Sequence[Tensor], *params: Any) -> Tensor:
        """Notes how ``tensor`` is made, for the algebra; the first recipe of a tensor stays."""
        self.recipes.setdefault(tensor.id, Recipe(name, tuple(args), params))
        return tensor

    def assume(self, name: str, tensor: Tensor, why: str) -> None:
        """Notes an assumption made at the operator of ``tensor``."""
        self.assumptions.append(Assumption(name, self.op_of.get(tensor.id, tensor.id), why))

    def inherit(self, op: int, sources: Sequence[int]) -> None:
        """What was taken for granted at operators holds for one that is written in their place."""
        for a in [a for a in self.assumptions if a.op in sources]:
            self.assumptions.append(replace(a, op=op))
        if sources[0] in self.signature_law:
            self.signature_law[op] = self.signature_law[sources[0]]

    # ---- common shapes of operators -----------------------------------------------------------------------------

    def pointwise(
        self, body: str, kind: str, args: Sequence[Tensor], dtype: str, *, commutative: bool = False
    ) -> Tensor:
        """An operator that works element by element, operands broadcast from the right."""
        rank = max((len(a.shape) for a in args), default=0)
        shape = [1] * rank
        for a in args:
            for d, n in enumerate(a.shape, rank - len(a.shape)):
                if n != 1:
                    shape[d] = n
        iters = []
        for d, n in enumerate(shape):
            present = {}
            for k, a in enumerate(args):
                own = d - (rank - len(a.shape))
                if own >= 0 and a.shape[own] == n:
                    present[f"a{k}"] = own
            iters.append(axis(n, "p", d, **present))
        result = self.op(body, kind, args, iters, shape, dtype)
        self.remember(result, "map", args, body, kind)
        if commutative and len(args) == 2 and args[0].id != args[1].id and self.side == 1:
            swapped = [Iter(it.size, it.role, it.out, tuple((1 - k, t) for k, t in it.args)) for it in iters]
            self.commuted(result, body, kind, [args[1], args[0]], swapped)
        return result

    def form(
        self,
        body: str,
        kind: str,
        args: Sequence[Tensor],
        iters: Sequence[Iter],
        result: Tensor,
        scale: Fraction | None = None,
    ) -> int | None:
        """Writes another way to compute ``result``; returns the new form's id, None when it was written before."""
        before = self.base.next_id
        self.op(body, kind, args, iters, result.shape, result.dtype, form_of=result, scale=scale)
        return before if self.base.next_id > before else None

    def commuted(self, result: Tensor, body: str, kind: str, args: Sequence[Tensor], iters: Sequence[Iter]) -> None:
        """Writes the form of ``result`` with its two operands exchanged."""
        form = self.form(body, kind, args, iters, result)
        if form is not None:
            self.base.add("commuted", form, self.op_of[result.id])

    def constant(self, value: bool | int | float | Fraction, shape: Sequence[int], dtype: str) -> Tensor:
        """A tensor all of whose elements are ``value``."""
        scalar = self.op(f"const#{constant_text(value)}", "const", [], [], (), dtype)
        frac = Fraction(value) if constant_text(value) not in ("inf", "-inf", "nan") else float(value)
        scalar = Tensor(scalar.id, (), dtype, 0, frac)
        if not shape:
            return scalar
        return self.layout(scalar, shape, [], [d for d, n in enumerate(shape) if n > 1])

    def scaled(self, arg: Tensor, factor: Fraction, dtype: str | None = None) -> Tensor:
        """``factor * arg``, for floating tensors."""
        if factor == 1:
            return arg
        if arg.constant is not None and isinstance(arg.constant, Fraction):
            return self.constant(arg.constant * factor, arg.shape, dtype or arg.dtype)
        written, factor = factor, self.literal(factor, dtype or arg.dtype)
        iters = [axis(n, "p", d, a0=d) for d, n in enumerate(arg.shape)]
        tensor = self.op("scale", "scale", [arg], iters, arg.shape, dtype or arg.dtype, scale=factor)
        self.note_literal(tensor, written, factor)
        self.remember(tensor, "scale", [arg], factor)
        if self.side == 2:
            self.op(
                "scale",
                "scale",
                [arg],
                iters,
                arg.shape,
                dtype or arg.dtype,
                form_of=tensor,
                relocation=("scale", "none"),
                scale=factor,
            )
        return tensor

    def literal(self, value: Fraction, dtype: str) -> Fraction:
        """The constant that stands for ``value`` in both graphs: literals that round to one float32 are one constant.

        Exact short constants (1/n and the like) stand for themselves. The caller notes identifications (``note_literal``).
        """
        if dtype == "float64" or not is_floating(dtype):
            return value
        try:
            key = struct.pack("f", float(value))
        except OverflowError:
            return value
        if not any(key):
            return value  # 0 and what float32 does not tell from 0
        known = self.base.literals
        if value.denominator <= 1 << 20 or key not in known:
            known[key] = value
        return known[key]

    def note_literal(self, result: Tensor, value: Fraction, taken: Fraction) -> None:
        """Lists that ``taken`` stands for ``value`` at the operator of ``result``."""
        if value != taken:
            self.assume("literals", result, f"{float(value)!r} and {float(taken)!r} are one constant: the same in float32")

    def retyped(self, x: Tensor, dtype: str) -> Tensor:
        """The same tensor under another dtype that holds its values."""
        return x if x.dtype == dtype else replace(x, dtype=dtype)

    def innermost(self, x: Tensor) -> Tensor:
        """The tensor below all rearrangements of ``x``."""
        while (made := self.made_by.get(x.id)) is not None and made.kind == "layout":
            x = made.args[0]
        return x

    def positions_below(self, x: Tensor, dtype: str) -> bool:
        """Whether ``x`` holds positions of a dimension (of a top-k, sort or arg-max), all of which ``dtype`` holds too."""
        limit = self.position_limits.get(self.innermost(x).id)
        return limit is not None and limit <= POSITIONS_HELD.get(dtype, 0)

    def broadcast_to(self, x: Tensor, shape: Sequence[Any] | None) -> Tensor:
        """``x`` expanded to ``shape`` (broadcast from the left)."""
        if shape is None or tuple(shape) == x.shape:
            return x
        target = [int(n) for n in shape]
        lead = len(target) - len(x.shape)
        ties, new = [], []
        for d, n in enumerate(target):
            own = d - lead
            if own >= 0 and x.shape[own] == n:
                ties.append((d, 1, own, 1, n))
            elif n > 1:
                new.append(d)
        return self.layout(x, target, ties, new)

    def rank_int(self, per_rank: Sequence[int] | None) -> tuple[int, int, int] | None:
        """``(base, step, block)`` of an integer per rank: base + step * coordinate in the block; None if it is not so.

        Block 0 stands for "no rank dependence". Blocks are written to ``block_tie`` when first used.
        """
        if per_rank is None or any(abs(v) >= 2**31 for v in per_rank):
            return None
        form = self.mesh.affine(per_rank)
        if form is None:
            return None
        if not form.terms:
            return form.base, 0, 0
        step = form.terms[-1][0]
        unit = step
        for slope, block in reversed(form.terms):
            if slope != unit:
                return None
            unit = slope * block.size
        blocks = tuple(b for _, b in form.terms)
        return form.base, step, self.block_id(blocks)

    def block_id(self, blocks: tuple[Block, ...]) -> int:
        """Identifier of a composite mesh block (outermost first), written to ``block_tie`` when new."""
        known = self.base.blocks
        if blocks not in known:
            known[blocks] = len(known) + 1
            step, size = 1, 1
            for b in reversed(blocks):
                self.base.add("block_tie", known[blocks], step, b.dim, b.stride, b.size)
                step *= b.size
                size *= b.size
            self.base.add("block_size", known[blocks], size)
        return known[blocks]

    def source_input(self, x: Tensor) -> str | None:
        """Name of the input whose elements ``x`` holds, rearranged; None if it is no such tensor."""
        inner = self.innermost(x).id
        return next((name for name, i in self.input_ids.items() if i == inner), None)

    def limit_of(self, x: Tensor) -> int | None:
        """Where ``x`` holds elements of an input that lie in ``[0, n)``: ``n``."""
        name = self.source_input(x) if self.limits else None
        return self.limits.get(name) if name is not None else None

    def is_range(self, x: Tensor, n: int) -> bool:
        """Whether ``x`` is ``arange(n)`` on every rank."""
        return x.shape == (n,) and self.range_of.get(x.id) == ((0,) * self.mesh.ranks, 1)

    def integers(self, value: Any) -> list[int] | None:
        """One integer per rank for a plain or rank-dependent integer, else None."""
        if isinstance(value, bool):
            return None
        if isinstance(value, int):
            return [value] * self.mesh.ranks
        if isinstance(value, RankVector) and all(isinstance(v, int) and not isinstance(v, bool) for v in value.values):
            return [int(v) for v in value.values]
        return None

    def group_blocks(self, group: Any) -> list[Block]:
        """Mesh blocks of a process group argument.

        Raises:
            Unsupported: the groups are not regular blocks of the mesh in rank order.
        """
        if not isinstance(group, Group):
            raise Unsupported(f"process group {group!r} is not resolved to ranks")
        blocks = self.mesh.blocks_of_groups(group.ranks)
        if blocks is None:
            raise Unsupported("its process groups are not blocks of the mesh in rank order")
        return blocks


#: Operators that say what they do with a tensor without elements; for others its result is an unknown.
TAKE_VOID = ("aten.cat", "aten.concat", "aten.concatenate")


def takes_void(op: str) -> bool:
    """Whether an operator may read a tensor without elements; a receive reads the (empty) result of a send."""
    return op.rpartition(".")[0] in TAKE_VOID or is_receive(op)


#: Positional arguments that operators take at most, where a surplus one would otherwise go unnoticed.
POSITIONAL = {
    "aten.mm": 2, "aten.bmm": 2, "aten.dot": 2, "aten.mv": 2, "aten.matmul": 2, "aten.outer": 2, "aten.mul": 2, "aten.t": 1,
    "aten.linear": 3, "aten.addmm": 3, "aten.baddbmm": 3, "aten.embedding": 5, "aten.cat": 2, "aten.stack": 2, "aten.neg": 1,
    "aten.transpose": 3, "aten.permute": 2, "aten.view": 2, "aten.reshape": 2, "aten.expand": 2, "aten.where": 3,
    "aten.masked_fill": 3, "aten.gather": 3, "aten.select": 3, "aten.slice": 5, "aten.eq": 2, "aten.lt": 2, "aten.ge": 2,
    "aten.add": 2, "aten.sub": 2, "aten.add.Scalar": 3, "aten.sub.Scalar": 3, "aten.maximum": 2, "aten.minimum": 2,
    "aten.pow": 2,
}  # fmt: skip
#: Keyword arguments that the lowerings know or may ignore.
KEYWORDS = frozenset(
    "dtype device layout pin_memory memory_format non_blocking copy dim dims keepdim alpha beta value scale is_causal "
    "attn_mask attn_bias dropout_p enable_gqa approximate rounding_mode correction unbiased start end step eps epsilon weight "
    "bias offs largest sorted stable descending num_classes min max ord p train diagonal shifts mode padding_idx "
    "reduction scale_grad_by_freq sparse implicit output_size requires_grad names generator self other input group_name "
    "group tag "
    "accumulate unsafe normalized_shape split_size split_sizes dim0 dim1 size half_to_float compute_log_sumexp "
    "return_debug_mask ranks".split()
)


#: Overloads of the ATen operators that have a lowering; another name is no operator of PyTorch.
OVERLOADS = frozenset(
    (
        "Dict_Tensor Dict_bool Dict_complex Dict_float Dict_int Dict_str Scalar ScalarOther ScalarSelf "
        "Scalar_Scalar Scalar_Tensor Scalar_mode Tensor Tensor_Scalar Tensor_Tensor Tensor_hacked_twin "
        "Tensor_list Tensor_mode a any bool bool_list complex complex_complex complex_float complex_int "
        "correction decimals default device dim dim_IntList dim_int dim_max dim_min dims dtype enum float "
        "float_complex float_float float_int float_list hacked_twin indices int int_complex int_float int_int "
        "int_list int_to_int intlist left_t list_Tensor list_bool list_float list_int list_str memory_format "
        "msg other out prim_Device prim_dtype prim_other quantized right_ sections self self_Tensor self_int "
        "sizes stable start start_step str str_list sublist t tensor_indices_or_sections using_ints values "
        "values_stable value src "
    ).split()
)


def _check_call(node: FamilyNode, args: list[Any], kwargs: dict[str, Any]) -> None:
    """A call that its operator does not take has no meaning that a lowering could know.

    Raises:
        Unsupported: a surplus argument or an unknown keyword.
    """
    base, _, overload = node.op.rpartition(".")
    if base.startswith("aten.") and overload not in OVERLOADS:
        raise Unsupported(f"{node.op} is no overload of {base}")
    most = POSITIONAL.get(node.op, POSITIONAL.get(base))
    if most is not None and len(args) > most:
        raise Unsupported(f"{node.op} is called with {len(args)} arguments and takes {most}")
    unknown = sorted(set(kwargs) - KEYWORDS)
    if base.startswith("aten.") and unknown:
        raise Unsupported(f"{node.op} is called with the unknown keyword {unknown[0]!r}")


def _described(name: str, operands: list[Any]) -> Handler:
    """Lowering of an operator that has a signature in a rule file."""

    def handler(low: Lowering, node: FamilyNode, args: list[Any], kwargs: dict[str, Any]) -> Any:
        def output(i: int) -> Tensor:
            signature = low.signatures.get((name, i))
            if signature is None:
                raise Unsupported(f"output {i} of {name} has no signature")
            return lower_kernel(low, node, signature, operands, kwargs)

        return Multi(output) if node.is_tuple else output(0)

    return handler


def _whole_dims(
    source: Sequence[int], shape: Sequence[int], ties: Sequence[tuple[int, int, int, int, int]]
) -> tuple[int, ...] | None:
    """For every dimension of a rearrangement the dimension of its operand, -1 where it has none or is of size 1; None where
    dimensions are split or merged."""
    dims = [-1] * len(shape)
    for dv, ov, da, oa, n in ties:
        if n == 1:
            continue
        if ov != 1 or oa != 1 or shape[dv] != n or source[da] != n or dims[dv] != -1:
            return None
        dims[dv] = da
    used = [d for d in dims if d >= 0]
    if len(set(used)) != len(used) or any(n > 1 and d not in used for d, n in enumerate(source)):
        return None
    return tuple(dims)


def _known(tensor: Tensor | None, name: str) -> Tensor:
    if tensor is None:
        raise Unsupported(f"an output of {name!r} has no known shape")
    return tensor


def scalar_constant(value: Any) -> Fraction | float | None:
    """The constant behind an argument: a Python number or a constant 0-d tensor; None otherwise."""
    if isinstance(value, bool):
        return Fraction(int(value))
    if isinstance(value, int):
        return Fraction(value)
    if isinstance(value, float):
        return Fraction(value) if constant_text(value) not in ("inf", "-inf", "nan") else value
    if isinstance(value, Tensor) and value.shape == () and value.constant is not None:
        return value.constant
    return None


def result_dtype(node: FamilyNode, default: str) -> str:
    """Declared dtype of a node."""
    return node.dtype or default


__all__ = [
    "HANDLERS",
    "MESH",
    "Assumption",
    "Block",
    "DType",
    "Fraction",
    "Iter",
    "Lowering",
    "Multi",
    "RankVector",
    "Tensor",
    "Tie",
    "TypedConst",
    "Unsupported",
    "Void",
    "axis",
    "find_handler",
    "is_floating",
    "lowers",
    "result_dtype",
    "scalar_constant",
    "whole",
]
