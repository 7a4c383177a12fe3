"""Zips the graphs of N ranks into one family graph, so that reasoning costs the same for 2 ranks as for 64.

A *family* is one input or node per rank, all of one dtype and shape. It need not exist on every rank (``ranks``).
Zipping concludes nothing: any grouping of equally typed values is a valid family, so a poor pairing loses proofs and
never makes one. The pairing that keeps most families whole:

- inputs by label, then name, then position, always of one type;
- nodes by structure: same operator, type and argument layout, and operands of the same families. Scalars may differ
  (they become a :class:`RankVector`); candidates with equal scalars, then with the same kind of consumers, then in
  order of occurrence, are preferred. Position in the list plays no other part, so reordered ranks still zip. Operands
  are compared after identities (:mod:`emerge.facts.sameness`), those of commutative operators in any order, and which
  outputs of a multi-output operator are used may differ. What exists on some ranks only, such as an identity,
  leaves no trace in the families behind it: their operand is a value that all members really read, as
  it is or through identities;
- collectives by issue order within their process group. Their operands may then be different families on different
  ranks: an ``emerge.mixed`` node joins them. The same happens at outputs, which are zipped by position;
- stages of a pipeline apart from one another (:mod:`emerge.facts.messages`): their families exist on the ranks of one
  stage. A receive names the family of the send it takes its value from.

Device constants differ by rank and say nothing about values; they are dropped.

The order of ``FamilyGraph.nodes`` respects data flow and follows rank 0. Reads and writes of memory that is written in
place keep the order of every rank; where ranks disagree these calls are left apart.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from emerge.graph.model import DType, Graph, Ref, Shape, TensorType, TypedConst
from emerge.util.errors import ConfigError

#: Operator of the node that joins different families into one: ``args[i]`` on the ranks ``kwargs["ranks"][i]``.
MIXED = "emerge.mixed"
#: ``FamilyNode.note`` of send and receive nodes whose peers are not known: nothing is known of what they receive.
UNPAIRED = "point-to-point, not paired"
#: Name of the only mesh axis when several ranks come without a mesh.
DEFAULT_AXIS = "ranks"


@dataclass(frozen=True, slots=True)
class RankVector:
    """A scalar that differs between ranks: one value per rank of the family's ``ranks``, in that order."""

    values: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Group:
    """The process group of a collective.

    Attributes:
        ranks: for each rank of the family, in that order, the ranks it communicates with, in group order.
    """

    ranks: tuple[tuple[int, ...], ...]

    @property
    def is_trivial(self) -> bool:
        """True when every rank communicates with itself only."""
        return all(len(r) == 1 for r in self.ranks)

    @property
    def size(self) -> int | None:
        """Number of ranks in each group, None when groups differ in size."""
        sizes = {len(r) for r in self.ranks}
        return sizes.pop() if len(sizes) == 1 else None


FamilyArg: TypeAlias = (
    "bool | int | float | str | Ref | DType | TypedConst | RankVector | Group | list[FamilyArg] | None"
)


@dataclass(slots=True)
class FamilyInput:
    """A family of graph inputs.

    Attributes:
        id: unique among all families of the graph.
        name: unique; the input's name on its lowest rank, with ``@rank`` appended where that is taken.
        ranks: ranks on which it exists, ascending; ``members``: its name on each of them.
        label, placement: of the lowest rank that has one. ``const``: scalar, or a RankVector where ranks differ.
        cut: a value inside a larger graph, taken as given here: it may be undefined or infinite where inputs are not.
    """

    id: int
    name: str
    dtype: str
    shape: Shape
    ranks: tuple[int, ...]
    members: dict[int, str]
    label: str | None = None
    const: Any = None
    placement: Any = None
    cut: bool = False


@dataclass(slots=True)
class FamilyNode:
    """A family of operator calls; the fields of :class:`emerge.graph.model.Node` with family names in ``Ref``.

    Attributes:
        args, kwargs: as in a Node, with RankVector where scalars differ and Group in place of a process-group id. The
            operands of a commutative operator stand in the order of the lowest rank.
        elements: types of the outputs used on any rank.
        ranks, members: as for inputs. A member of an ``emerge.mixed`` node is the value it takes on that rank.
        source, code, module, phase, extra: of the lowest rank.
        group: of a collective, else None. ``note``: :data:`UNPAIRED` or "".
    """

    id: int
    name: str
    op: str
    args: list[FamilyArg]
    kwargs: dict[str, FamilyArg]
    dtype: str | None
    shape: Shape | None
    ranks: tuple[int, ...]
    members: dict[int, str]
    is_tuple: bool = False
    is_scalar: bool = False
    elements: dict[int, TensorType] = field(default_factory=dict)
    const: Any = None
    has_const: bool = False
    source: str | None = None
    code: str | None = None
    module: str | None = None
    phase: str | None = None
    group: Group | None = None
    note: str = ""
    extra: dict[str, Any] = field(default_factory=dict)

    def refs(self) -> Iterator[str]:
        """Names of all families this node reads, in argument order, with repetitions."""
        yield from _family_refs(self.args)
        yield from _family_refs(list(self.kwargs.values()))


FamilyValue: TypeAlias = FamilyInput | FamilyNode


@dataclass(slots=True)
class FamilyOutput:
    """One output position. Ranks whose outputs there have different types give several entries of one position.

    Attributes:
        name: the family, or None where these ranks have no value there (an unused gradient slot).
        ranks: ranks this entry speaks of; ``members``: the output's name on each. Where that is an identity of a member
            of the family it is not itself one.
    """

    position: int
    name: str | None
    ranks: tuple[int, ...]
    members: dict[int, str | None]


@dataclass(slots=True)
class FamilyGraph:
    """All rank graphs as one graph of families, in an order that respects data flow.

    Attributes:
        ranks: number of ranks (1 for a sequential graph).
        problems: what did not fit (collectives that do not meet, unknown process groups, outputs of different
            count), one sentence each; the nodes concerned are left as partial families.
        graphs: the rank graphs themselves.
        stages: number of the pipeline stage of every rank; all 0 where there is no pipeline.
    """

    ranks: int
    inputs: list[FamilyInput]
    nodes: list[FamilyNode]
    outputs: list[FamilyOutput]
    problems: list[str]
    graphs: list[Graph]
    format: str = "fx-aten"
    direction: str = "fw"
    stages: list[int] = field(default_factory=list)
    _values: dict[str, FamilyValue] = field(default_factory=dict, repr=False)
    _of: list[dict[str, str]] = field(default_factory=list, repr=False)

    def __post_init__(self) -> None:
        values: list[FamilyValue] = [*self.inputs, *self.nodes]
        self._values = {v.name: v for v in values}
        self._of = [{} for _ in range(self.ranks)]
        for v in self._values.values():
            if not isinstance(v, FamilyNode) or v.op != MIXED:
                for rank, member in v.members.items():
                    self._of[rank][member] = v.name

    def value(self, name: str) -> FamilyValue:
        """The family of this name. Raises KeyError if there is none."""
        return self._values[name]

    def family_of(self, rank: int, member: str) -> str:
        """Name of the family that holds ``member`` of ``rank``. Raises KeyError if there is none."""
        return self._of[rank][member]

    def of_stage(self, ranks: Sequence[int]) -> bool:
        """True for all ranks, and for all ranks of one stage of a pipeline."""
        found = {self.stages[r] for r in ranks} if self.stages else set()
        return len(ranks) == self.ranks or (len(found) == 1 and len(ranks) == self.stages.count(found.pop()))

    def types(self) -> dict[str, TensorType]:
        """Type of every input and single-tensor node, by family name."""
        values: list[FamilyValue] = [*self.inputs, *self.nodes]
        return {v.name: TensorType(v.dtype, v.shape) for v in values if v.dtype is not None and v.shape is not None}


def _family_refs(arg: Any) -> Iterator[str]:
    if isinstance(arg, Ref):
        yield arg.name
    elif isinstance(arg, list):
        for item in arg:
            yield from _family_refs(item)


def mesh_from(ranks: int, mesh: dict[str, int] | None) -> dict[str, int]:
    """The mesh to use for ``ranks`` ranks: the given one, or one axis ``ranks`` when none is given.

    One rank without a mesh has no axes. Ranks are row-major over the axes in the order written.

    Raises:
        ConfigError: a size is not a positive integer, or the product of sizes is not the number of ranks.
    """
    if not mesh:
        return {DEFAULT_AXIS: ranks} if ranks > 1 else {}
    for axis, size in mesh.items():
        if type(size) is not int or size < 1:
            raise ConfigError(f"expected a size >= 1 for mesh axis {axis!r}, found {size!r}; correct it", "mesh")
    devices = math.prod(mesh.values())
    if devices != ranks:
        text = ", ".join(f"{a}: {n}" for a, n in mesh.items())
        raise ConfigError(
            f"expected as many devices as ranks, found mesh {{{text}}} of {devices} devices "
            f"and {ranks} ranks; correct the mesh",
            "mesh",
        )
    return dict(mesh)


def zip_families(graphs: Sequence[Graph], mesh: dict[str, int] | None = None) -> FamilyGraph:
    """Zips the graphs of all ranks, in rank order, into one family graph; a sequential graph is the case of one rank.

    Args:
        mesh: device axes; tells the stages of a pipeline. Default: the mesh of the first graph, else one axis.

    Linear in ranks x nodes. What does not fit is recorded in :attr:`FamilyGraph.problems` and left as partial families.

    Raises:
        GraphError: no graph, graphs out of rank order, or of different formats.
    """
    from emerge.facts.zipping import Zipper

    return Zipper(graphs, mesh).run()
