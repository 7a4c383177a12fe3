"""What a refutation runs: graphs of both sides, executable statements, and how dropout masks correspond."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

from emerge.execute.axes import Atom, AxisClasses
from emerge.execute.placement import Cut, DropoutPlan, OnMesh, Placement, Relation
from emerge.execute.rewrite_rules import Unexplained, moved_bounds
from emerge.facts.families import FamilyGraph
from emerge.facts.lower import Lowering, Tensor, Unsupported
from emerge.facts.mesh import Block, Mesh
from emerge.graph.model import Graph
from emerge.relate.derive import piece_tensor
from emerge.relate.statement import Piece, Statement


@dataclass
class Setup:
    """A pair that can be executed.

    Attributes:
        reference: the sequential graph. ranks: one graph per rank.
        inputs: what is given. outputs: what is claimed.
        reduced: lengths differ from the captured ones.
        lengths: new length of every class that changed, by ``captured length#class``, for people.
        new: length of every class; empty at captured sizes.
        bounds: integer input of the reference -> exclusive upper bound, from the tables it indexes.
        unbounded: integer inputs that index no table.
    """

    reference: Graph
    ranks: list[Graph]
    inputs: list[Relation]
    outputs: list[Relation]
    dropout: DropoutPlan = field(default_factory=DropoutPlan)
    reduced: bool = False
    lengths: dict[str, int] = field(default_factory=dict)
    new: dict[int, int] = field(default_factory=dict)
    bounds: dict[str, int] = field(default_factory=dict)
    unbounded: list[str] = field(default_factory=list)


class Sizes:
    """Lengths of axes: captured ones and new ones.

    Args:
        new: length of every class; empty = captured.
    """

    def __init__(self, classes: AxisClasses, new: Mapping[int, int]) -> None:
        self.classes, self.new = classes, new

    def of(self, atom: Atom) -> int:
        """New length of an atomic axis."""
        return self.new.get(atom.cls, atom.size)

    def dim(self, tensor: Tensor, d: int) -> int:
        """New length of a dimension."""
        return prod(self.of(a) for a in self.classes.atoms(tensor.id, d))


@dataclass(frozen=True)
class _Axis:
    """Part of an axis of a statement: strides in captured sizes, new length."""

    size: int
    reference: tuple[int, int]
    implementation: tuple[int, int] | None
    mesh: OnMesh | None


def relation_of(
    number: int, statement: Statement, sizes: Sizes, ref: Lowering, imp: Lowering, family: FamilyGraph, mesh: Mesh
) -> Relation:
    """A statement as something executable at the given sizes.

    Raises:
        Unexplained: its pieces or axes cannot be carried over to these sizes, or it does not place every axis.
    """
    s, s_shape = _piece(ref, statement.reference)
    d, d_shape = _piece(imp, statement.implementation)
    members = family.value(statement.implementation.name).members
    if mesh.fixed(tuple(members)) is None:
        raise Unexplained(f"{statement.implementation} exists on ranks {sorted(members)} only")
    axes: list[_Axis] = []
    for p in statement.axes:
        for atom in _parts(sizes, s, p.reference, p.size):
            step = atom.stride // p.reference[1]
            axes.append(
                _Axis(
                    sizes.of(atom),
                    (p.reference[0], atom.stride),
                    None if p.implementation is None else (p.implementation[0], p.implementation[1] * step),
                    None
                    if p.mesh is None
                    else OnMesh(mesh.rank_step(Block(p.mesh.dim, p.mesh.stride * step, atom.size)), atom.size),
                )
            )
    ref_rank = len(s_shape) if s_shape is not None else 1 + max((a.reference[0] for a in axes), default=-1)
    imp_rank = (
        len(d_shape)
        if d_shape is not None
        else 1 + max((a.implementation[0] for a in axes if a.implementation), default=-1)
    )
    placement = _placement(axes, ref_rank, imp_rank)
    _covered(statement, sizes, s, placement.reference_shape(), "reference")
    _covered(statement, sizes, d, placement.local_shape(), "implementation")
    return Relation(
        number,
        statement.reference.name,
        tuple(members.get(r) for r in range(mesh.ranks)),
        placement,
        _cuts(sizes, ref, statement.reference, s, placement.reference_shape()),
        _cuts(sizes, imp, statement.implementation, d, placement.local_shape()),
        statement.text,
    )


def _piece(low: Lowering, piece: Piece) -> tuple[Tensor | None, tuple[int, ...] | None]:
    try:
        tensor = piece_tensor(low, piece)
    except Unsupported:
        return None, None
    return tensor, tensor.shape


def _parts(sizes: Sizes, tensor: Tensor | None, where: tuple[int, int], n: int) -> list[Atom]:
    """Atomic axes of a stretch of a dimension; the stretch itself where it has none."""
    d, stride = where
    if tensor is not None and (tensor.id, d) not in sizes.classes.conflicts:
        found = [a for a in sizes.classes.atoms(tensor.id, d) if stride <= a.stride < stride * n]
        if prod(a.size for a in found) == n and all(a.stride % stride == 0 for a in found):
            return found
    return [Atom(stride, n, -1)]


def _placement(axes: Sequence[_Axis], ref_rank: int, imp_rank: int) -> Placement:
    reference: list[list[_Axis]] = [[] for _ in range(ref_rank)]
    local: list[list[_Axis]] = [[] for _ in range(imp_rank)]
    for a in axes:
        reference[a.reference[0]].append(a)
        if a.implementation is not None:
            local[a.implementation[0]].append(a)
    for dim in reference:
        dim.sort(key=lambda a: -a.reference[1])
    for dim in local:
        dim.sort(key=lambda a: -a.implementation[1] if a.implementation else 0)
    numbers = {id(a): i for i, a in enumerate(a for dim in local for a in dim)}
    to = tuple(a.mesh if a.mesh is not None else numbers[id(a)] for dim in reference for a in dim)
    return Placement(
        tuple(tuple(a.size for a in d) for d in reference), tuple(tuple(a.size for a in d) for d in local), to
    )


def _covered(statement: Statement, sizes: Sizes, tensor: Tensor | None, shape: tuple[int, ...], side: str) -> None:
    if tensor is None:
        return
    wanted = tuple(sizes.dim(tensor, d) for d in range(len(tensor.shape)))
    if wanted != shape:
        raise Unexplained(
            f"'{statement.text}' does not place every axis of the {side}: {list(shape)} of {list(wanted)}"
        )


def _cuts(sizes: Sizes, low: Lowering, piece: Piece, part: Tensor | None, shape: tuple[int, ...]) -> tuple[Cut, ...]:
    whole = low.tensors.get(piece.name)
    if not piece.cuts:
        return ()
    if not isinstance(whole, Tensor) or part is None:
        return piece.cuts
    out = []
    for dim, start, stop in piece.cuts:
        if stop > whole.shape[dim]:
            if sizes.dim(whole, dim) != whole.shape[dim]:
                raise Unexplained(f"dimension {dim} of {piece.name!r} is related to a padded one")
            out.append((dim, start, stop))
            continue
        a, b = moved_bounds(whole.shape[dim], start, stop, sizes.dim(whole, dim), shape[dim])
        out.append((dim, a, b))
    return tuple(out)


def by_class(
    reference: Sequence[Sequence[Atom]], local: Sequence[Sequence[Atom]], sizes: Sizes, mesh: Mesh
) -> tuple[Placement, bool] | None:
    """The placement that sends every axis to the one of its own class, and whether it is the only one.

    Axes of the mesh take what the local tensor lacks. None when axes are left over on either side.
    """
    flat, target = [a for d in reference for a in d], [a for d in local for a in d]
    free = dict(enumerate(target))
    blocks: dict[int, list[OnMesh]] = {}
    for axis in range(len(mesh.sizes)):
        for atom in sizes.classes.atoms(0, mesh.dim(axis)):
            blocks.setdefault(atom.cls, []).append(
                OnMesh(mesh.rank_step(Block(mesh.dim(axis), atom.stride, atom.size)), atom.size)
            )
    to: list[int | OnMesh] = []
    sure = True
    for i, atom in enumerate(flat):
        fitting = [k for k, a in free.items() if a.cls == atom.cls and a.size == atom.size]
        left = sum(1 for a in flat[i:] if a.cls == atom.cls)
        on_mesh = blocks.get(atom.cls, [])
        sure = sure and (left == 1 or not fitting) and len(fitting) <= 1 and not (fitting and on_mesh)
        if fitting and (not on_mesh or left <= len(fitting)):
            to.append(fitting[0])
            del free[fitting[0]]
        elif on_mesh:
            to.append(on_mesh.pop(0))
        else:
            return None
    if free:
        return None
    return Placement(
        tuple(tuple(sizes.of(a) for a in d) for d in reference),
        tuple(tuple(sizes.of(a) for a in d) for d in local),
        tuple(to),
    ), sure
