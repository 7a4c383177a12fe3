"""Do statements contradict each other, and do claimed pieces cover their tensor? Exact, from the placements alone."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence, Set
from itertools import pairwise, product

from emerge.facts.mesh import Mesh
from emerge.graph.model import Shape
from emerge.relate.statement import Piece, Statement
from emerge.util.errors import RelationError

Box = tuple[tuple[int, int], ...]


def box_of(piece: Piece, shape: Shape) -> Box:
    """(start, stop) of a piece in every dimension."""
    cuts = {d: (a, b) for d, a, b in piece.cuts}
    return tuple(cuts.get(d, (0, int(n) if isinstance(n, int) else 1)) for d, n in enumerate(shape))


def overlap(a: Box, b: Box) -> Box | None:
    """The common part of two boxes, None when there is none."""
    out = tuple((max(x, u), min(y, v)) for (x, y), (u, v) in zip(a, b))
    return out if all(x < y for x, y in out) else None


def check_consistent(
    statements: Sequence[Statement], implementation: dict[str, Shape], mesh: Mesh, *, claims: bool = False
) -> list[Statement]:
    """The statements without repetitions.

    Two statements contradict when they send one element of an implementation tensor to different elements of the
    reference: of one tensor always, of two tensors where inputs are given (no generic input satisfies both).

    Args:
        implementation: shapes of the implementation tensors by family.
        claims: the statements are expected outputs.
    Raises:
        RelationError: two statements contradict; both places are named.
    """
    kept: list[Statement] = []
    by_tensor: dict[str, list[Statement]] = defaultdict(list)
    for statement in statements:
        d = statement.implementation.name
        shape = implementation[d]
        box = box_of(statement.implementation, shape)
        repeated = False
        for other in by_tensor[d]:
            common = overlap(box, box_of(other.implementation, shape))
            if common is None or (claims and other.reference.name != statement.reference.name):
                continue
            if not _agree(statement, other, common, shape, mesh):
                raise RelationError(_contradiction(statement, other), statement.place)
            repeated = repeated or (
                other.implementation == statement.implementation and other.reference == statement.reference
            )
        if not repeated:
            by_tensor[d].append(statement)
            kept.append(statement)
    return kept


def _contradiction(a: Statement, b: Statement) -> str:
    where = f" ({b.place})" if b.place else ""
    return (
        f"{str(a.reference)!r} ~ {str(a.implementation)!r} as {a.text!r} contradicts {str(b.reference)!r} ~ "
        f"{str(b.implementation)!r} as {b.text!r}{where}; drop or correct one of them"
    )


def _agree(a: Statement, b: Statement, common: Box, shape: Shape, mesh: Mesh) -> bool:
    """Do both send the common box to the same reference elements? The maps are sums of one function per dimension and
    one of the rank, so it is enough to follow each of them from one corner."""
    if a.reference.name != b.reference.name:
        return False
    corner = tuple(low for low, _ in common)
    if _reference_index(a, corner, shape, 0, mesh) != _reference_index(b, corner, shape, 0, mesh):
        return False
    for rank in range(1, mesh.ranks):
        if _reference_index(a, corner, shape, rank, mesh) != _reference_index(b, corner, shape, rank, mesh):
            return False
    for d, (low, high) in enumerate(common):
        if _same_line(a, b, d, shape):
            continue
        for x in range(low + 1, high):
            at = (*corner[:d], x, *corner[d + 1 :])
            if _reference_index(a, at, shape, 0, mesh) != _reference_index(b, at, shape, 0, mesh):
                return False
    return True


def _same_line(a: Statement, b: Statement, d: int, shape: Shape) -> bool:
    """True when both place dimension ``d`` by the same axes from the same start; saves walking along it."""

    def line(s: Statement) -> tuple[int, set[tuple[int, tuple[int, int], tuple[int, int]]]]:
        axes = {
            (p.size, p.implementation, p.reference) for p in s.axes if p.implementation and p.implementation[0] == d
        }
        return box_of(s.implementation, shape)[d][0], axes

    return line(a) == line(b)


def _reference_index(s: Statement, at: tuple[int, ...], shape: Shape, rank: int, mesh: Mesh) -> dict[int, int]:
    """Reference coordinates (without zeros) of element ``at`` of the implementation tensor on ``rank``."""
    box = box_of(s.implementation, shape)
    out: dict[int, int] = defaultdict(int)
    for d, start, _ in s.reference.cuts:
        out[d] += start
    for p in s.axes:
        if p.mesh is not None:
            digit = mesh.block_coordinate(rank, p.mesh)
        else:
            assert p.implementation is not None
            d, stride = p.implementation
            digit = (at[d] - box[d][0]) // stride % p.size
        out[p.reference[0]] += digit * p.reference[1]
    return {d: n for d, n in out.items() if n}


def uncovered(pieces: Iterable[Piece], shape: Shape) -> Box | None:
    """A box of a tensor that no piece covers, None when they cover it all."""
    boxes = [box_of(p, shape) for p in pieces]
    whole = box_of(Piece(""), shape)
    if whole in boxes:
        return None
    edges = [sorted({e for b in (*boxes, whole) for e in b[d]}) for d in range(len(shape))]
    for cell in product(*(list(pairwise(e)) for e in edges)):
        if not any(all(u <= x and y <= v for (x, y), (u, v) in zip(cell, b)) for b in boxes):
            return tuple(cell)
    return None


def check_covered(claims: Sequence[Statement], reference: dict[str, Shape], padded: Set[str] = frozenset()) -> None:
    """Every claimed reference output must be covered by its pieces.

    Args:
        padded: outputs whose rows end in padding, which nothing is claimed about.
    Raises:
        RelationError: part of one is not claimed.
    """
    by_name: dict[str, list[Statement]] = defaultdict(list)
    for claim in claims:
        by_name[claim.reference.name].append(claim)
    for name, found in by_name.items():
        if name in padded:
            continue
        missing = uncovered([c.reference for c in found], reference[name])
        if missing is not None:
            box = ", ".join(f"{a}:{b}" for a, b in missing)
            raise RelationError(
                f"the claims about output {name!r} leave {name}[{box}] open; claim the whole output", found[0].place
            )
