"""Statements that relate one reference tensor to one implementation tensor, axis by axis (DESIGN: alignments).

They come from relation files, from the notation ``"b s (tp h) e ~ b s h e"``, or from a capture, and all become the
same facts. Nothing here is derived.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from emerge.facts.families import FamilyGraph
from emerge.facts.mesh import Block, Mesh
from emerge.graph.model import Shape
from emerge.graph.relations import ConcatExpr, Expr, Leaf, RelationEntry, SliceExpr
from emerge.util.errors import RelationError


@dataclass(frozen=True)
class Piece:
    """A tensor, or a box of it: ``cuts`` are (dimension, start, stop), none for the whole tensor."""

    name: str
    cuts: tuple[tuple[int, int, int], ...] = ()

    def __str__(self) -> str:
        if not self.cuts:
            return self.name
        ranges = {d: f"{a}:{b}" for d, a, b in self.cuts}
        return f"{self.name}[{','.join(ranges.get(d, ':') for d in range(max(ranges) + 1))}]"


@dataclass(frozen=True)
class AxisPlacement:
    """Where one axis of ``size`` positions lies: (dimension, stride) in the reference tensor, and either (dimension,
    stride) in the local implementation tensor or a block of the mesh. ``name`` is for people."""

    size: int
    reference: tuple[int, int]
    implementation: tuple[int, int] | None = None
    mesh: Block | None = None
    name: str = ""


#: Origin of statements about constants that were executed on both sides and have equal bits.
CONSTANT = "constant"


@dataclass(frozen=True)
class Statement:
    """``reference ~ implementation``, with every axis placed; mesh axes that no axis uses are replicated.

    Attributes:
        implementation: name of the family (its name on the lowest rank).
        origin: ``given``, ``placement``, ``values`` or ``name``; or :data:`CONSTANT`, which is no input relation.
        text: the alignment in the notation of the documentation.
        place: where it was written, for messages.
    """

    reference: Piece
    implementation: Piece
    axes: tuple[AxisPlacement, ...]
    origin: str = "given"
    text: str = ""
    place: str = ""


LETTERS = "abcdefghijklmnopqrstuvwxyz"


def describe(axes: tuple[AxisPlacement, ...], mesh: Mesh, reference_rank: int, implementation_rank: int) -> str:
    """A statement in notation, e.g. ``"a (ranks b) ~ a b"``: left reference, right implementation."""
    names: dict[int, str] = {}
    left: dict[int, list[tuple[int, str]]] = {}
    right: dict[int, list[tuple[int, str]]] = {}
    for i, p in enumerate(axes):
        if p.mesh is not None:
            axis = mesh.names[-1 - p.mesh.dim]
            whole = p.mesh.size == mesh.sizes[-1 - p.mesh.dim]
            names[i] = axis if whole else f"{axis}_{p.mesh.stride}x{p.mesh.size}"
        else:
            names[i] = p.name or LETTERS[i % 26]
            assert p.implementation is not None
            right.setdefault(p.implementation[0], []).append((-p.implementation[1], names[i]))
        left.setdefault(p.reference[0], []).append((-p.reference[1], names[i]))

    def side(dims: dict[int, list[tuple[int, str]]], rank: int) -> str:
        parts = []
        for d in range(rank):
            found = [n for _, n in sorted(dims.get(d, []))]
            parts.append("1" if not found else found[0] if len(found) == 1 else f"({' '.join(found)})")
        return " ".join(parts)

    return f"{side(left, reference_rank)} ~ {side(right, implementation_rank)}"


@dataclass(frozen=True)
class _Segment:
    """A stretch of the reference along one dimension, held by ``rank`` in ``family[start:stop]``."""

    rank: int
    family: str
    start: int
    stop: int

    @property
    def source(self) -> tuple[str, int, int]:
        return self.family, self.start, self.stop


def entry_statements(entry: RelationEntry, shape: Shape, imp: FamilyGraph, mesh: Mesh) -> list[Statement]:
    """The statements behind one entry of a relation file.

    Args:
        shape: shape of the reference tensor.
    Raises:
        RelationError: the shapes do not allow the relation, or its shards are not blocks of the mesh in rank order.
    """
    types = imp.types()
    try:
        families = _families(imp, entry.dist)
    except KeyError as exc:
        raise RelationError(
            f"names {exc.args[0]!r}, which is not in the implementation; correct the name", entry.place
        ) from None
    if entry.kind == "replicated":
        stages = [imp.value(f).ranks for f in dict.fromkeys(families)]
        if len(stages) != 1 and not all(imp.of_stage(ranks) for ranks in stages):
            raise RelationError(f"the copies of {entry.seq!r} differ in type between ranks", entry.place)
        wrong = next((f for f in families if types[f].shape != tuple(shape)), None)
        if wrong is not None:
            raise RelationError(
                f"{entry.seq!r} has shape {list(shape)} and its copies have {list(types[wrong].shape)}; correct the relation",
                entry.place,
            )
        missing = {r for ranks in stages for r in ranks} - {leaf.rank for leaf in entry.dist}
        if len(stages) == 1 and not imp.of_stage(stages[0]):
            missing |= set(range(mesh.ranks)) - {leaf.rank for leaf in entry.dist}
        if missing:
            raise RelationError(f"{entry.seq!r} is not said to be on ranks {sorted(missing)}", entry.place)
        return [_whole(entry, shape, family, mesh) for family in dict.fromkeys(families)]
    if entry.kind == "shard":
        assert entry.dim is not None
        dim = entry.dim if entry.dim >= 0 else entry.dim + len(shape)
        segments = [_Segment(leaf.rank, f, 0, _size(types[f].shape, dim)) for leaf, f in zip(entry.dist, families)]
        return _segment_statements(entry, shape, imp, mesh, dim, segments)
    assert entry.expr is not None
    dim, segments = _flatten(entry, entry.expr, imp, len(shape))
    return _segment_statements(entry, shape, imp, mesh, dim, segments)


def _families(imp: FamilyGraph, leaves: Sequence[Leaf]) -> list[str]:
    """Family of every leaf. Where ranks compute an output differently, it is the family that joins them there."""
    families = [imp.family_of(leaf.rank, leaf.name) for leaf in leaves]
    if len(set(families)) > 1:
        for output in imp.outputs:
            if output.name is not None and all(output.members.get(leaf.rank) == leaf.name for leaf in leaves):
                return [output.name] * len(leaves)
    return families


def _size(shape: Shape, dim: int) -> int:
    size = shape[dim]
    if not isinstance(size, int):
        raise RelationError(f"dimension {dim} has the data-dependent size {size!r}; relations need fixed sizes")
    return size


def _whole(entry: RelationEntry, shape: Shape, family: str, mesh: Mesh) -> Statement:
    axes = tuple(AxisPlacement(int(n), (d, 1), (d, 1)) for d, n in enumerate(shape) if n != 1)
    text = describe(axes, mesh, len(shape), len(shape))
    return Statement(Piece(entry.seq), Piece(family), axes, "given", text, entry.place)


def _flatten(entry: RelationEntry, expr: Expr, imp: FamilyGraph, rank: int) -> tuple[int, list[_Segment]]:
    """A tree of concats and slices along one dimension, as a list of segments."""
    dims: set[int] = set()

    def go(e: Expr) -> list[_Segment]:
        if isinstance(e, Leaf):
            family = imp.family_of(e.rank, e.name)
            shape = imp.types()[family].shape
            d = next(iter(dims)) if dims else 0
            return [_Segment(e.rank, family, 0, _size(shape, d) if shape else 1)]
        dims.add(e.dim if e.dim >= 0 else e.dim + rank)
        if len(dims) > 1:
            raise RelationError(
                f"relation of {entry.seq!r} slices several dimensions ({sorted(dims)}); one is supported", entry.place
            )
        if isinstance(e, ConcatExpr):
            return [s for a in e.args for s in go(a)]
        assert isinstance(e, SliceExpr)
        inner = go(e.arg)
        out, offset = [], 0
        for s in inner:
            low, high = max(e.start, offset), min(e.end, offset + s.stop - s.start)
            if low < high:
                out.append(_Segment(s.rank, s.family, s.start + low - offset, s.start + high - offset))
            offset += s.stop - s.start
        return out

    _first_dim(expr, dims, rank)
    return (next(iter(dims)) if dims else 0), go(expr)


def _first_dim(expr: Expr, dims: set[int], rank: int) -> None:
    """The dimension of the outermost concat or slice, needed before leaves are measured."""
    if not isinstance(expr, Leaf):
        dims.add(expr.dim if expr.dim >= 0 else expr.dim + rank)


def _equal_holders(
    entry: RelationEntry, imp: FamilyGraph, rank: int
) -> dict[tuple[int, str, int, int], set[tuple[int, str, int, int]]]:
    """Segments that the entry declares equal to one another."""
    classes: dict[tuple[int, str, int, int], set[tuple[int, str, int, int]]] = {}
    for group in entry.also_equal:
        members = set()
        for expr in group:
            _, segments = _flatten(entry, expr, imp, rank)
            if len(segments) == 1:
                s = segments[0]
                members.add((s.rank, s.family, s.start, s.stop))
        for m in members:
            classes.setdefault(m, set()).update(members)
    return classes


def _segment_statements(
    entry: RelationEntry, shape: Shape, imp: FamilyGraph, mesh: Mesh, dim: int, segments: list[_Segment]
) -> list[Statement]:
    """Runs of segments from the same place of the same family are shards of one piece of the reference."""
    total = sum(s.stop - s.start for s in segments)
    if total != shape[dim]:
        raise RelationError(
            f"the parts of {entry.seq!r} have {total} elements along dimension {dim} and the tensor {shape[dim]}; "
            "correct the relation",
            entry.place,
        )
    equal = _equal_holders(entry, imp, len(shape))
    out: list[Statement] = []
    offset, i = 0, 0
    while i < len(segments):
        run = [segments[i]]
        while i + len(run) < len(segments):
            following = segments[i + len(run)]
            if following.source != run[0].source or following.rank in {s.rank for s in run}:
                break
            run.append(following)
        size = run[0].stop - run[0].start
        holder: dict[int, int] = {}
        for index, s in enumerate(run):
            for other in {(s.rank, *s.source), *equal.get((s.rank, *s.source), set())}:
                if other[1:] == s.source:
                    holder[other[0]] = index
        out.append(_shard(entry, shape, imp, mesh, dim, offset, run[0], size, len(run), holder))
        offset += size * len(run)
        i += len(run)
    return out


def _shard(
    entry: RelationEntry,
    shape: Shape,
    imp: FamilyGraph,
    mesh: Mesh,
    dim: int,
    offset: int,
    first: _Segment,
    size: int,
    count: int,
    holder: dict[int, int],
) -> Statement:
    present = imp.value(first.family).ranks
    fixed = mesh.fixed(present)
    if fixed is None or not set(present) <= set(holder):
        missing = sorted(set(range(mesh.ranks) if fixed is None else present) - set(holder))
        raise RelationError(f"part of {entry.seq!r} is not said to be on ranks {missing}", entry.place)
    form = mesh.affine([holder[mesh.home(r, fixed)] for r in range(mesh.ranks)])
    unit = 1
    for slope, block in reversed(form.terms if form is not None else ()):
        if slope != unit:
            form = None
            break
        unit *= block.size
    if form is None or form.base != 0 or unit != count:
        order = [r for r, _ in sorted(holder.items(), key=lambda item: item[1])]
        raise RelationError(
            f"shards of {entry.seq!r} lie on ranks {order}, which is not the rank order of blocks of the mesh {mesh.axes}; "
            "give the mesh axes (--mesh) or correct the order",
            entry.place,
        )
    local = imp.types()[first.family].shape
    for d, (n, m) in enumerate(zip(shape, local)):
        if d != dim and n != m:
            raise RelationError(
                f"{entry.seq!r} has shape {list(shape)} and its parts {list(local)}, which differ along dimension {d} too; "
                "correct the relation",
                entry.place,
            )
    axes = [AxisPlacement(int(n), (d, 1), (d, 1)) for d, n in enumerate(shape) if d != dim and n != 1]
    if size > 1:
        axes.append(AxisPlacement(size, (dim, 1), (dim, 1)))
    for slope, block in form.terms:
        axes.append(AxisPlacement(block.size, (dim, slope * size), None, block))
    whole_ref = size * count == shape[dim]
    whole_imp = size == local[dim]
    placed = tuple(axes)
    return Statement(
        Piece(entry.seq, () if whole_ref else ((dim, offset, offset + size * count),)),
        Piece(first.family, () if whole_imp else ((dim, first.start, first.stop),)),
        placed,
        "given",
        describe(placed, mesh, len(shape), len(local)),
        entry.place,
    )
