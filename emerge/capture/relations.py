"""Input and output relations from what captures know: labels and DTensor placements.

Two captured programs name the same parameter alike. Where the implementation recorded a placement, it says which block
of the parameter each rank holds; a tensor of the reference's own shape without placement is the same on every rank.
Nothing is guessed: an input without placement and of another shape is left open.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod

from emerge.graph.model import Graph, Input, Shape
from emerge.graph.relations import ConcatExpr, Expr, Leaf, RelationEntry, SliceExpr

_SHARD = re.compile(r"Shard\((\d+)\)")
_STRIDED = re.compile(r"StridedShard\((\d+), (\d+)\)")


@dataclass
class CaptureRelations:
    """Relations between two captures.

    Attributes:
        inputs, outputs: relations of graph inputs and outputs. origins: label -> ``placement`` or ``name``.
        open: labels of implementation inputs and outputs that no rule decides, with the reason.
    """

    inputs: list[RelationEntry] = field(default_factory=list)
    outputs: list[RelationEntry] = field(default_factory=list)
    origins: dict[str, str] = field(default_factory=dict)
    open: dict[str, str] = field(default_factory=dict)


def placement_relations(reference: Graph, ranks: Sequence[Graph]) -> CaptureRelations:
    """Relations by label and placement between a sequential capture and the captures of all ranks."""
    out = CaptureRelations()
    known = by_label(reference)
    mesh = dict(ranks[0].mesh) or ({"ranks": len(ranks)} if len(ranks) > 1 else {})
    per_rank = [by_label(g) for g in ranks]
    for label in dict.fromkeys(name for table in per_rank for name in table):
        ref = known.get(label)
        items = {r: table[label] for r, table in enumerate(per_rank) if label in table}
        if ref is None:
            out.open[label] = "the reference has no input of this name"
            continue
        first = items[min(items)]
        leaves = {r: (i.name, i.shape) for r, i in items.items()}
        _relate(out, out.inputs, label, ref.name, ref.shape, first.placement, leaves, mesh)
    labels = reference.extra.get("output_labels") or []
    other = ranks[0].extra.get("output_labels") or []
    placements = ranks[0].extra.get("output_placements") or [None] * len(other)
    types, rank_types = reference.types(), [g.types() for g in ranks]
    for position, label in enumerate(labels):
        name = reference.outputs[position]
        if label not in other or name is None:
            continue
        index = other.index(label)
        names = [g.outputs[index] for g in ranks]
        placed = {r: (n, rank_types[r][n].shape) for r, n in enumerate(names) if n is not None}
        _relate(out, out.outputs, label, name, types[name].shape, placements[index], placed, mesh)
    return out


def _shared(ranks: list[int], mesh: dict[str, int]) -> dict[int, int] | None:
    """Coordinates that all these ranks share, by number of the mesh axis, where they are all the ranks that have them.

    The same as ``Mesh.fixed`` of :mod:`emerge.facts.mesh`, which captures do not import. None: they are no such ranks.
    """
    sizes = list(mesh.values())
    steps = [prod(sizes[i + 1 :]) for i in range(len(sizes))]
    found = [{r // step % size for r in ranks} for size, step in zip(sizes, steps)]
    fixed = {i: c.pop() for i, c in enumerate(found) if len(c) == 1 and sizes[i] > 1}
    return fixed if len(ranks) == prod(n for i, n in enumerate(sizes) if i not in fixed) else None


def by_label(graph: Graph) -> dict[str, Input]:
    """Inputs by label and by the further labels of shared parameters."""
    out: dict[str, Input] = {}
    for item in graph.inputs:
        for label in (item.label or item.name, *item.extra.get("aliases", ())):
            out.setdefault(label, item)
    return out


def _relate(
    out: CaptureRelations, entries: list[RelationEntry], label: str, name: str, shape: Shape,
    placement: list[str | None] | None, leaves: dict[int, tuple[str, Shape]], mesh: dict[str, int],
) -> None:  # fmt: skip
    fixed = _shared(sorted(leaves), mesh)
    if fixed is None:
        out.open[label] = f"found on ranks {sorted(leaves)} only"
        return
    dist = tuple(Leaf(r, n) for r, (n, _) in sorted(leaves.items()))
    if placement is None or all(p in ("Replicate", None) for p in placement):
        if any(s != shape for _, s in leaves.values()):
            out.open[label] = f"shape {list(leaves[min(leaves)][1])} instead of {list(shape)}, and no placement"
            return
        entries.append(RelationEntry(name, "replicated", dist, place=f"capture: {label}"))
        out.origins[label] = "placement" if placement is not None else "name"
        return
    expr, equal = _expression(placement, shape, leaves, mesh, fixed)
    if expr is None:
        out.open[label] = f"placement {placement} has no form as blocks"
        return
    entries.append(RelationEntry(name, "custom", dist, expr=expr, also_equal=equal, place=f"capture: {label}"))
    out.origins[label] = "placement"


def _expression(
    placement: list[str | None],
    shape: Shape,
    leaves: dict[int, tuple[str, Shape]],
    mesh: dict[str, int],
    fixed: dict[int, int],
) -> tuple[Expr | None, tuple[tuple[Expr, ...], ...]]:
    """The reference tensor as concatenations of the ranks' tensors, and the copies among them.

    Args:
        fixed: axis -> the one coordinate along it at which there is a tensor (a stage of a pipeline).
    """
    axes = list(mesh)
    sizes = list(mesh.values())
    steps = [prod(sizes[i + 1 :]) for i in range(len(sizes))]
    equal: list[tuple[Expr, ...]] = []

    def go(axis: int, rank: int) -> Expr | None:
        """What the ranks that share the coordinates fixed so far hold together."""
        if axis == len(axes):
            return Leaf(rank, leaves[rank][0])
        along = [fixed[axis]] if axis in fixed else range(sizes[axis])
        kind, ranks = placement[axis] or "Replicate", [rank + i * steps[axis] for i in along]
        parts = [go(axis + 1, r) for r in ranks]
        if any(p is None for p in parts):
            return None
        whole = [p for p in parts if p is not None]
        if kind == "Replicate":
            return whole[0]
        shard, strided = _SHARD.fullmatch(kind), _STRIDED.fullmatch(kind)
        if shard:
            return ConcatExpr(int(shard.group(1)), tuple(whole))
        if strided and all(isinstance(p, Leaf) for p in whole):
            dim, factor = int(strided.group(1)), int(strided.group(2))
            pieces: list[Expr] = []
            for j in range(factor):
                for p in whole:
                    assert isinstance(p, Leaf)
                    local = leaves[p.rank][1][dim]
                    if not isinstance(local, int) or local % factor:
                        return None
                    pieces.append(SliceExpr(dim, j * local // factor, (j + 1) * local // factor, p))
            return ConcatExpr(dim, tuple(pieces))
        return None

    expr = go(0, 0)
    replicated = [
        i for i in range(len(axes)) if (placement[i] or "Replicate") == "Replicate" and sizes[i] > 1 and i not in fixed
    ]
    if expr is not None and replicated:
        for rank in sorted(leaves):
            if all(rank // steps[i] % sizes[i] == 0 for i in replicated):
                copies = [rank]
                for i in replicated:
                    copies = [r + k * steps[i] for r in copies for k in range(sizes[i])]
                equal.append(tuple(Leaf(r, leaves[r][0]) for r in copies))
    return expr, tuple(equal)
