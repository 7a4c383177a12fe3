"""Input and output relations from what captures know: labels and DTensor placements.

Two captured programs name the same parameter alike. Where the implementation recorded a placement, it says which block
of the parameter each rank holds; a tensor of the reference's own shape without placement is the same on every rank.
Nothing is guessed: an input without placement and of another shape is left open.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from math import prod
from typing import Any

from emerge.graph.model import Graph, Input, Shape
from emerge.graph.relations import ConcatExpr, Expr, Leaf, RelationEntry, SliceExpr

_SHARD = re.compile(r"(?:S|Shard)\((?:dim=)?(-?\d+)\)")
_STRIDED = re.compile(r"_?StridedShard\((?:dim=)?(-?\d+), (?:sf=|split_factor=)?(\d+)\)")
_REPLICATE = re.compile(r"R|Replicate(\(\))?")


@dataclass
class CaptureRelations:
    """Relations between two captures.

    Attributes:
        inputs, outputs: relations of graph inputs and outputs. origins: label -> ``placement`` or ``name``.
        texts: label of an input -> its alignment, where a placement was recorded.
        open: labels of implementation inputs and outputs that no rule decides, with the reason.
    """

    inputs: list[RelationEntry] = field(default_factory=list)
    outputs: list[RelationEntry] = field(default_factory=list)
    origins: dict[str, str] = field(default_factory=dict)
    open: dict[str, str] = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)


def placement_relations(
    reference: Graph, ranks: Sequence[Graph], mesh: Mapping[str, int] | None = None
) -> CaptureRelations:
    """Relations by label and placement between a sequential capture and the captures of all ranks.

    Args:
        mesh: device axes, where they are not those of the captures.
    """
    out = CaptureRelations()
    known = by_label(reference)
    axes = dict(mesh or ranks[0].mesh) or ({"ranks": len(ranks)} if len(ranks) > 1 else {})
    per_rank = [by_label(g) for g in ranks]
    for label in dict.fromkeys(name for table in per_rank for name in table):
        ref = known.get(label)
        items = {r: table[label] for r, table in enumerate(per_rank) if label in table}
        first = items[min(items)]
        if ref is None:
            out.open[label] = "the reference has no input of this name"
        elif any(i.placement != first.placement for i in items.values()):
            out.open[label] = "the ranks recorded different placements"
        else:
            leaves = {r: (i.name, i.shape) for r, i in items.items()}
            _relate(out, out.inputs, label, ref.name, ref.shape, first.placement, leaves, axes)
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
        _relate(out, out.outputs, label, name, types[name].shape, placements[index], placed, axes)
    return out


def _shared(ranks: list[int], mesh: dict[str, int]) -> dict[str, int] | None:
    """Coordinates that all these ranks share, by mesh axis, where they are all the ranks that have them.

    The same as ``Mesh.fixed`` of :mod:`emerge.facts.mesh`, which captures do not import. None: they are no such ranks.
    """
    sizes = list(mesh.values())
    steps = [prod(sizes[i + 1 :]) for i in range(len(sizes))]
    found = {axis: {r // step % mesh[axis] for r in ranks} for axis, step in zip(mesh, steps)}
    fixed = {axis: c.pop() for axis, c in found.items() if len(c) == 1 and mesh[axis] > 1}
    return fixed if len(ranks) == prod(n for axis, n in mesh.items() if axis not in fixed) else None


def by_label(graph: Graph) -> dict[str, Input]:
    """Inputs by label and by the further labels of shared parameters."""
    out: dict[str, Input] = {}
    for item in graph.inputs:
        for label in (item.label or item.name, *item.extra.get("aliases", ())):
            out.setdefault(label, item)
    return out


def _relate(
    out: CaptureRelations, entries: list[RelationEntry], label: str, name: str, shape: Shape,
    placement: Any, leaves: dict[int, tuple[str, Shape]], mesh: dict[str, int],
) -> None:  # fmt: skip
    fixed = _shared(sorted(leaves), mesh)
    if fixed is None:
        out.open[label] = f"found on ranks {sorted(leaves)} only"
        return
    dist = tuple(Leaf(r, n) for r, (n, _) in sorted(leaves.items()))
    found = leaves[min(leaves)][1]
    if placement is None:
        if any(s != shape for _, s in leaves.values()):
            out.open[label] = f"shape {list(found)} instead of {list(shape)}, and no placement"
            return
        entries.append(RelationEntry(name, "replicated", dist, place=f"capture: {label}"))
        out.origins[label] = "name"
        return
    try:
        factors = placed_factors(placement, shape, mesh)
        split = next((f.axis for dim in factors for f in dim if f.axis in fixed), None)
        if split is not None:
            raise Unplaced(f"it splits over {split!r} what exists on ranks {sorted(leaves)} only")
        local = tuple(prod(f.size for f in dim if f.axis is None) for dim in factors)
        if any(tuple(s) != local for _, s in leaves.values()):
            raise Unplaced(f"it leaves shape {list(local)} on every rank, found {list(found)}")
    except Unplaced as why:
        out.open[label] = f"the recorded placement {placement} of shape {list(shape)}: {why}"
        return
    out.origins[label] = "placement"
    if entries is out.inputs:
        out.texts[label] = _text(factors, mesh)
    if all(f.axis is None for dim in factors for f in dim):
        entries.append(RelationEntry(name, "replicated", dist, place=f"capture: {label}"))
        return
    expr, equal = _expression(factors, leaves, mesh, fixed)
    entries.append(RelationEntry(name, "custom", dist, expr=expr, also_equal=equal, place=f"capture: {label}"))


class Unplaced(Exception):
    """A placement that says nothing about blocks, or does not fit."""


@dataclass(frozen=True)
class Factor:
    """A factor of a dimension: ``axis`` is the mesh axis it lies on, None for a part that every rank holds whole."""

    size: int
    axis: str | None = None


def placed_factors(placement: Any, shape: Shape, mesh: Mapping[str, int]) -> list[list[Factor]]:
    """Every dimension of a tensor as factors, outermost first, that lie on the mesh or in the local tensor.

    DTensor splits axis by axis, in the order of the mesh. ``Shard(d)`` cuts what is left of dimension ``d`` into
    blocks; ``StridedShard(d, f)`` cuts each of ``f`` stretches of it, so the mesh factor stands inside of them.

    Args:
        placement: one term per mesh axis, or a mapping by axis; an axis without a term is replicated.

    Raises:
        Unplaced: a term that is no block of a dimension, or sizes that do not divide.
    """
    if isinstance(placement, Mapping):
        unknown = [a for a in placement if a not in mesh]
        if unknown:
            raise Unplaced(f"{unknown[0]!r} is no axis of the mesh {dict(mesh)}")
        terms = [placement.get(axis) for axis in mesh]
    elif isinstance(placement, (list, tuple)) and len(placement) == len(mesh):
        terms = list(placement)
    else:
        raise Unplaced(f"expected one term per axis of the mesh {dict(mesh)}; capture the graph again")
    if any(not isinstance(n, int) for n in shape):
        raise Unplaced("sizes that depend on data")
    out = [[Factor(int(n))] for n in shape]
    for (axis, size), term in zip(mesh.items(), terms):
        text = "Replicate" if term is None else str(term).strip()
        shard, strided = _SHARD.fullmatch(text), _STRIDED.fullmatch(text)
        if _REPLICATE.fullmatch(text) or (size == 1 and (shard or strided)):
            continue
        if not shard and not strided:
            raise Unplaced(f"{text} over {axis!r} is no block of the tensor")
        dim = int((shard or strided)[1])  # type: ignore[index]
        if not -len(shape) <= dim < len(shape):
            raise Unplaced(f"{text} names a dimension that the tensor does not have")
        dim %= len(shape)
        out[dim] = _cut(out[dim], int(strided[2]) if strided else 1, axis, size)
    return out


def _cut(factors: list[Factor], stretches: int, axis: str, size: int) -> list[Factor]:
    """The factors with mesh axis ``axis`` put inside of the outermost ``stretches`` local positions."""
    done: list[Factor] = []
    for i, f in enumerate(factors):
        if f.axis is not None or f.size == 1:
            done.append(f)
        elif stretches > 1 and stretches % f.size == 0:
            done.append(f)
            stretches //= f.size
        elif f.size % (stretches * size) == 0:
            rest = f.size // (stretches * size)
            parts = [Factor(stretches), Factor(size, axis), Factor(rest)]
            return [*done, *(p for p in parts if p.size > 1 or p.axis), *factors[i + 1 :]]
        else:
            break
    raise Unplaced(f"mesh axis {axis!r} of size {size} does not divide it evenly")


def _text(factors: list[list[Factor]], mesh: Mapping[str, int]) -> str:
    """The alignment in notation, e.g. ``(k=2 tp a) b ~ (k a) b``."""
    names = (
        name for letter in product("abcdefghijklmnopqrstuvwxyz", repeat=2) if (name := "".join(letter)) not in mesh
    )
    left: list[str] = []
    right: list[str] = []
    for dim in factors:
        whole, local = [], []
        count = sum(f.axis is None for f in dim)
        for f in dim:
            if f.axis is not None:
                whole.append(f.axis)
                continue
            name = next(names)
            whole.append(f"{name}={f.size}" if count > 1 else name)
            local.append(name)
        for parts, side in ((whole, left), (local, right)):
            side.append("1" if not parts else parts[0] if len(parts) == 1 else f"({' '.join(parts)})")
    return f"{' '.join(left)} ~ {' '.join(right)}".strip()


def _expression(
    factors: list[list[Factor]], leaves: dict[int, tuple[str, Shape]], mesh: dict[str, int], fixed: dict[str, int]
) -> tuple[Expr, tuple[tuple[Expr, ...], ...]]:
    """The reference tensor as concatenations of the ranks' tensors, and the copies among them.

    Args:
        fixed: mesh axis -> the one coordinate along it at which there is a tensor (a stage of a pipeline).
    """
    sizes = list(mesh.values())
    steps = {axis: prod(sizes[i + 1 :]) for i, axis in enumerate(mesh)}
    cut = [d for d, dim in enumerate(factors) if any(f.axis for f in dim)]
    used = {f.axis for dim in factors for f in dim}

    def go(position: int, rank: int) -> Expr:
        """What the ranks that share the coordinates fixed so far hold together."""
        if position == len(cut):
            return Leaf(rank, leaves[rank][0])
        dim = cut[position]
        outer = factors[dim]
        tail = outer[-1].size if outer[-1].axis is None else 1
        outer = outer[:-1] if outer[-1].axis is None else outer
        whole = prod(f.size for f in factors[dim] if f.axis is None)
        parts: list[Expr] = []
        for choice in product(*(range(f.size) for f in outer)):
            there, block = rank, 0
            for f, i in zip(outer, choice):
                if f.axis is not None:
                    there += i * steps[f.axis]
                else:
                    block = block * f.size + i
            inner = go(position + 1, there)
            parts.append(inner if tail == whole else SliceExpr(dim, block * tail, (block + 1) * tail, inner))
        return ConcatExpr(dim, tuple(parts))

    replicated = [axis for axis in mesh if axis not in used and axis not in fixed and mesh[axis] > 1]
    equal: list[tuple[Expr, ...]] = []
    if replicated:
        for rank in sorted(leaves):
            if all(rank // steps[a] % mesh[a] == 0 for a in replicated):
                copies = [rank]
                for a in replicated:
                    copies = [r + k * steps[a] for r in copies for k in range(mesh[a])]
                equal.append(tuple(Leaf(r, leaves[r][0]) for r in copies))
    return go(0, sum(c * steps[a] for a, c in fixed.items())), tuple(equal)
