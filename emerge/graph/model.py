"""The one in-memory graph model: what a captured graph is before anything is concluded from it.

A :class:`Graph` is a list of nodes in execution order. Arguments are plain Python scalars and lists,
:class:`Ref` (a reference to an input or an earlier node) or a typed constant (:class:`DType`, ...).
The JSON form of all this is ``emerge.graph/1`` (docs/graph-format.md).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, TypeAlias


@dataclass(frozen=True, slots=True)
class Ref:
    """A reference to an input or an earlier node of the same graph."""

    name: str


@dataclass(frozen=True, slots=True)
class DType:
    """A dtype constant among the arguments of a node, e.g. ``float32``."""

    name: str


@dataclass(frozen=True, slots=True)
class TypedConst:
    """A constant of the host framework that has no numeric meaning here.

    Attributes:
        kind: ``device``, ``layout`` or ``memory_format``.
        value: as written, e.g. ``cuda:0``.
    """

    kind: str
    value: str


Arg: TypeAlias = "None | bool | int | float | str | Ref | DType | TypedConst | list[Arg]"

#: dtypes a graph may use, with their kind and width in bytes.
DTYPES: dict[str, tuple[str, int]] = {
    "bool": ("bool", 1),
    "uint8": ("int", 1),
    "int8": ("int", 1),
    "int16": ("int", 2),
    "int32": ("int", 4),
    "int64": ("int", 8),
    "uint16": ("int", 2),
    "uint32": ("int", 4),
    "uint64": ("int", 8),
    "float8_e4m3fn": ("float8", 1),
    "float8_e5m2": ("float8", 1),
    "float16": ("float", 2),
    "bfloat16": ("float", 2),
    "float32": ("float", 4),
    "float64": ("float", 8),
    "complex64": ("complex", 8),
    "complex128": ("complex", 16),
}


def is_floating(dtype: str | None) -> bool:
    """True for the floating types between which a cast is an identity for the verdict (fp8 is not one of them)."""
    return dtype is not None and DTYPES.get(dtype, ("", 0))[0] == "float"


def is_integer(dtype: str | None) -> bool:
    """True for integer and boolean types, whose values are exact."""
    return dtype is not None and DTYPES.get(dtype, ("", 0))[0] in ("int", "bool")


Shape: TypeAlias = tuple[int | str, ...]


@dataclass(frozen=True, slots=True)
class TensorType:
    """dtype and shape of one tensor. A ``str`` in the shape is an unbacked (data-dependent) symbol."""

    dtype: str
    shape: Shape


@dataclass(slots=True)
class Input:
    """A graph input.

    Attributes:
        label: parameter or argument name where the capture knew one, e.g. ``model.layers.0.mlp.up_proj.weight``.
        const: value of a lifted scalar constant, else None.
        placement: DTensor-style placement recorded by the capture, one entry per mesh axis, else None.
        extra: further keys of the file, kept for round trips.
        values: content as a numpy array where a live capture knew it (16-bit floats widened); not part of the file.
    """

    name: str
    dtype: str
    shape: Shape
    label: str | None = None
    const: Any = None
    placement: Any = None
    extra: dict[str, Any] = field(default_factory=dict)
    values: Any = field(default=None, compare=False, repr=False)


@dataclass(slots=True)
class Node:
    """One operator call.

    Attributes:
        op: qualified operator name, e.g. ``aten.mm.default``, ``operator.getitem``, ``get_attr``.
        dtype, shape: of the result; None for multi-output (``is_tuple``) and scalar (``is_scalar``) nodes.
        elements: types of the used outputs of a multi-output operator.
        const: value of a ``get_attr`` node.
        source: ``file:line`` in user code; ``code``: that line's text; ``module``: nn.Module path;
            ``stack``: index into ``Graph.stacks``; ``phase``: ``forward``/``backward`` in joint graphs.
        extra: further keys of the file, kept for round trips.
    """

    name: str
    op: str
    args: list[Arg] = field(default_factory=list)
    kwargs: dict[str, Arg] = field(default_factory=dict)
    dtype: str | None = None
    shape: Shape | None = None
    is_tuple: bool = False
    is_scalar: bool = False
    elements: dict[int, TensorType] = field(default_factory=dict)
    const: Any = None
    has_const: bool = False
    source: str | None = None
    code: str | None = None
    module: str | None = None
    stack: int | None = None
    phase: str | None = None
    extra: dict[str, Any] = field(default_factory=dict)

    def refs(self) -> Iterator[str]:
        """Names of all inputs and nodes this node reads, in argument order, with repetitions."""
        yield from iter_refs(self.args)
        yield from iter_refs(list(self.kwargs.values()))


def iter_refs(arg: Arg | list[Any]) -> Iterator[str]:
    """Names referenced inside an argument, depth first."""
    if isinstance(arg, Ref):
        yield arg.name
    elif isinstance(arg, list):
        for item in arg:
            yield from iter_refs(item)


@dataclass(slots=True)
class Graph:
    """One captured graph: the whole program of one rank, or the sequential one.

    Attributes:
        rank, world_size: which rank of how many this is the program of (0 of 1 for a sequential graph).
        format: ``fx-aten`` or ``hlo``.
        direction: ``fw``, ``bw`` or ``both``.
        outputs: names of inputs or nodes, or None (an unused gradient slot).
        groups: process-group id -> rank lists that carry this id, where the file has them.
        mesh: named mesh axes with sizes in row-major order, where the file has them.
        path: file it was read from, for messages.
        extra: further keys of the file, kept for round trips.
    """

    name: str
    inputs: list[Input]
    nodes: list[Node]
    outputs: list[str | None]
    rank: int = 0
    world_size: int = 1
    format: str = "fx-aten"
    direction: str = "fw"
    stacks: list[Any] = field(default_factory=list)
    spmd: bool = False
    output_input_alias: list[Any] = field(default_factory=list)
    groups: dict[str, list[list[int]]] = field(default_factory=dict)
    mesh: dict[str, int] = field(default_factory=dict)
    path: str = ""
    extra: dict[str, Any] = field(default_factory=dict)

    def types(self) -> dict[str, TensorType]:
        """Declared type of every input and single-tensor node, by name."""
        out = {i.name: TensorType(i.dtype, i.shape) for i in self.inputs}
        for n in self.nodes:
            if n.dtype is not None and n.shape is not None:
                out[n.name] = TensorType(n.dtype, n.shape)
        return out
