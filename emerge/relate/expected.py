"""Readings of two shapes: which contiguous blocks in rank order fit, and what an output is expected to be."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from math import prod

from emerge.facts.families import FamilyGraph
from emerge.facts.mesh import Mesh
from emerge.graph.model import Shape
from emerge.relate.notation import TensorSpec, alignment_statement, blocks_text
from emerge.relate.statement import Statement
from emerge.util.errors import RelationError


@dataclass(frozen=True)
class Ambiguity:
    """A relation that the shapes do not settle; the verdict is UNKNOWN until the user writes it.

    Attributes:
        section: key of the campaign file the line belongs to, ``relations`` or ``outputs``.
        name: reference tensor as the file would name it. ``implementation``: its counterpart.
        readings: alignments that fit, or whole entries ``"a": {of: .., is: ..}``; maybe none. ``why``: for people.
    """

    section: str
    name: str
    implementation: str
    readings: tuple[str, ...]
    why: str

    def lines(self) -> list[str]:
        """The lines to choose from."""
        entries = [r if r.startswith('"') else f'{self.name}: "{r}"' for r in self.readings]
        return [f"{self.section}: {{{entry}}}" for entry in entries]

    def __str__(self) -> str:
        end = (
            f"; write one of: {'  |  '.join(self.lines())}"
            if self.readings
            else f'; write {self.section}: {{{self.name}: ".. ~ .."}}'
        )
        return f"{self.name!r} ~ {self.implementation!r}: {self.why}{end}"


def block_readings(
    reference: Shape, implementation: Shape, mesh: Mesh, most: int | None = None, ranks: Sequence[int] | None = None
) -> list[str]:
    """Alignments in which every dimension is whole or split into contiguous blocks in rank order.

    Args:
        most: largest number of mesh axes in use, None for all.
        ranks: where the implementation tensor exists, None for everywhere. It is not split along the axes that tell
            these ranks from the others.
    """
    fixed = (mesh.fixed(ranks) if ranks is not None else None) or {}
    if len(reference) != len(implementation) or any(isinstance(n, str) for n in (*reference, *implementation)):
        return [] if tuple(reference) != tuple(implementation) else [blocks_text(len(reference), {}, mesh)]
    smaller = [d for d, (a, b) in enumerate(zip(reference, implementation)) if a != b]
    axes = [a for k, (a, n) in enumerate(mesh.axes.items()) if n > 1 and mesh.dim(k) not in fixed]
    found = []
    for choice in product((None, *smaller), repeat=len(axes)):
        used = [a for a, d in zip(axes, choice) if d is not None]
        if most is not None and len(used) > most:
            continue
        split = {d: [a for a, c in zip(axes, choice) if c == d] for d in smaller}
        if all(int(reference[d]) == int(implementation[d]) * prod(mesh.axes[a] for a in split[d]) for d in smaller):
            found.append(blocks_text(len(reference), split, mesh))
    return found


def default_reading(
    section: str,
    label: str,
    reference: TensorSpec,
    implementation: TensorSpec,
    mesh: Mesh,
    *,
    most: int | None,
    origin: str,
    place: str = "",
    ranks: Sequence[int] | None = None,
) -> Statement | Ambiguity:
    """The one contiguous block reading of two tensors, else what has to be written.

    Raises:
        RelationError: the dtypes cannot be equal.
    """
    readings = block_readings(reference.shape, implementation.shape, mesh, most, ranks)
    shapes = f"shapes {list(reference.shape)} and {list(implementation.shape)} over mesh {mesh.axes}"
    if len(readings) != 1:
        why = (
            f"{shapes} allow {len(readings)} readings" if readings else f"{shapes} have no reading as contiguous blocks"
        )
        return Ambiguity(section, label, implementation.name, tuple(readings), why)
    return alignment_statement(readings[0], reference, implementation, mesh, origin=origin, place=place)


@dataclass(frozen=True)
class OutputPair:
    """A reference output and its counterpart."""

    position: int
    reference: str
    implementation: str


def pair_outputs(reference: FamilyGraph, implementation: FamilyGraph, place: str = "") -> list[OutputPair]:
    """Pairs outputs by name where the implementation has every name, else by position; repeated ones once.

    Raises:
        RelationError: the numbers of outputs differ and the names do not settle it.
    """
    refs = [(o.position, o.name) for o in reference.outputs if o.name is not None]
    imps: list[tuple[int, str]] = []
    names: dict[str, str] = {}
    for o in implementation.outputs:
        if o.name is not None and o.position not in {p for p, _ in imps}:
            imps.append((o.position, o.name))
            names.setdefault(o.members[min(o.members)] or o.name, o.name)
    if refs and all(n in names for _, n in refs):
        pairs = [OutputPair(p, n, names[n]) for p, n in refs]
    else:
        total_ref = 1 + max((o.position for o in reference.outputs), default=-1)
        total_imp = 1 + max((o.position for o in implementation.outputs), default=-1)
        at = dict(imps)
        if total_ref != total_imp or any(p not in at for p, _ in refs):
            raise RelationError(
                f"the reference has {len(refs)} outputs and the implementation {len(imps)}, and their names differ; "
                "say which correspond under 'outputs'",
                place,
            )
        pairs = [OutputPair(p, n, at[p]) for p, n in refs]
    return list({(p.reference, p.implementation): p for p in reversed(pairs)}.values())[::-1]


def pair_of(pairs: Sequence[OutputPair], reference: str) -> OutputPair | None:
    """The pair of a reference output."""
    return next((p for p in pairs if p.reference == reference), None)
