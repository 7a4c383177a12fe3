"""In-memory form of ``emerge.relations/1``: how inputs and outputs of two graphs correspond.

Reading and writing the JSON is in :mod:`emerge.graph.relations_io`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, TypeAlias


@dataclass(frozen=True, slots=True)
class Leaf:
    """A tensor of one rank."""

    rank: int
    name: str


@dataclass(frozen=True, slots=True)
class ConcatExpr:
    """Concatenation of ``args`` along ``dim``."""

    dim: int
    args: tuple[Expr, ...]


@dataclass(frozen=True, slots=True)
class SliceExpr:
    """``arg[start:end]`` along ``dim``."""

    dim: int
    start: int
    end: int
    arg: Expr


Expr: TypeAlias = "Leaf | ConcatExpr | SliceExpr"
#: A box of a tensor: (start, stop) per dimension; none for the whole tensor.
Cuts: TypeAlias = "tuple[tuple[int, int], ...]"


@dataclass(frozen=True, slots=True)
class RelationEntry:
    """One statement ``seq ~ dist``.

    Attributes:
        seq: name of the reference tensor.
        kind: ``replicated`` (every dist tensor equals seq), ``shard`` (seq = concat of dist along dim, in order),
            ``custom`` (seq = expr), ``aligned`` (the box ``seq_cuts`` of seq and the box ``dist_cuts`` of every dist
            tensor are related by ``alignment``, in the notation of docs/alignments.md).
        dist: implementation tensors as leaves, in the order given.
        also_equal: groups of expressions that are equal to one another.
        cut, hint, added, violated: marks of the file (see docs/graph-format.md).
        place: ``file: inputs[3]``, for messages.
    """

    seq: str
    kind: str
    dist: tuple[Leaf, ...]
    dim: int | None = None
    expr: Expr | None = None
    also_equal: tuple[tuple[Expr, ...], ...] = ()
    alignment: str | None = None
    seq_cuts: Cuts = ()
    dist_cuts: Cuts = ()
    cut: bool = False
    hint: bool = False
    added: bool = False
    violated: bool = False
    note: str = ""
    place: str = ""


@dataclass(slots=True)
class Relations:
    """A relation file: what is given about inputs and what is claimed about outputs.

    Attributes:
        inputs: input relations (``cut`` and ``hint`` entries are kept but marked).
        full_inputs: relations of all true graph inputs where the file has them; replaces ``inputs``.
        expected: ``refines``, ``bug`` or ``unspecified``.
        groups: ``seq``/``dist`` -> process-group id -> rank lists.
    """

    case: str
    world_size: int
    inputs: list[RelationEntry]
    expected: str = "unspecified"
    full_inputs: list[RelationEntry] | None = None
    expected_outputs: list[RelationEntry] = field(default_factory=list)
    extra_outputs: list[RelationEntry] = field(default_factory=list)
    claimed_outputs: list[str] = field(default_factory=list)
    groups: dict[str, dict[str, list[list[int]]]] = field(default_factory=dict)
    description: str = ""
    path: str = ""
    extra: dict[str, Any] = field(default_factory=dict)

    def usable_inputs(self) -> list[RelationEntry]:
        """The input relations a derivation may start from: no ``hint`` and no ``cut`` entries."""
        source = self.full_inputs if self.full_inputs is not None else self.inputs
        return [e for e in source if not (e.hint or e.cut)]
