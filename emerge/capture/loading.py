"""Relations from a traced loading: which boxes of the reference's parameters every rank's parameters hold.

A capture that traces its loader writes them into the graph file (``loaded`` of an input): ``of`` the label of the
reference parameter, ``at`` and ``local`` one range per dimension, ``axes`` the reference dimension that every local
one runs along: its number, null for a dimension of size 1, or a list of ``[dimension, count, step]``, outermost first,
where a local dimension counts through the reference in several levels. Here the boxes of all ranks are put together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

from emerge.graph.model import Graph, Input, Shape
from emerge.graph.relations import Leaf, RelationEntry
from emerge.util.errors import RelationError

_LETTERS = "abcdefghijklmnopqrstuvwxyz"


@dataclass
class LoadingRelations:
    """Relations behind ``loaded``.

    Attributes:
        inputs: entries of kind ``aligned``.
        open: reference name -> why a box of it has no form as a relation. partners: its implementation input.
        padded: reference outputs with a part of every row, as far as its sequence goes.
    """

    inputs: list[RelationEntry] = field(default_factory=list)
    open: dict[str, str] = field(default_factory=dict)
    partners: dict[str, str] = field(default_factory=dict)
    padded: set[str] = field(default_factory=set)


def loading_relations(reference: Graph, ranks: Sequence[Graph], mesh: Mapping[str, int]) -> LoadingRelations:
    """Relations of parameters and packed tokens between a reference capture and ranks with traced loading."""
    out = LoadingRelations()
    known: dict[str, Input] = {}
    for item in reference.inputs:
        for label in (item.label or item.name, *item.extra.get("aliases", ())):
            known.setdefault(label, item)
    tables = [{i.name: i for i in g.inputs} for g in ranks]
    for name, first in tables[0].items():
        items = [t.get(name) for t in tables]
        if first.extra.get("loaded") is None or any(i is None for i in items):
            if first.extra.get("loaded") is None and first.label in known:
                _tokens(out, known[first.label], name, first, ranks)
            continue
        boxes = [[b for b in i.extra.get("loaded") or () if "of" in b] for i in items if i is not None]
        _parameter(out, known, name, boxes, mesh, [i for i in items if i is not None])
    return out


def output_relations(reference: Graph, ranks: Sequence[Graph], mesh: Mapping[str, int]) -> LoadingRelations:
    """Claims between the outputs of a reference capture and ranks that say which boxes their outputs hold."""
    out = LoadingRelations()
    labels = reference.extra.get("output_labels") or ()
    types = reference.types()
    known = {
        label: Input(name, types[name].dtype, types[name].shape, label)
        for label, name in zip(labels, reference.outputs)
        if name in types
    }
    said = [g.extra.get("output_boxes") for g in ranks]
    if not all(isinstance(s, dict) for s in said):
        return out
    tables = [dict(zip(g.extra.get("output_labels") or (), g.outputs)) for g in ranks]
    for label in said[0] or ():
        names = [t.get(label) for t in tables]
        types_of = [g.types() for g in ranks]
        if any(n is None or n not in t or label not in (s or {}) for n, t, s in zip(names, types_of, said)):
            continue
        items = [Input(str(n), t[str(n)].dtype, t[str(n)].shape, label) for n, t in zip(names, types_of)]
        if len({i.name for i in items}) > 1:
            continue
        boxes = [(s or {})[label] for s in said]
        _parameter(out, known, items[0].name, boxes, mesh, items)
        for ref in known.values():
            of = [b for b in boxes[0] if b["of"] == ref.label]
            if of and ref.name not in out.open and _rows_end_in_padding(of, ref.shape):
                out.padded.add(ref.name)
    return out


def packed_alignment(graph: Graph, reference: Shape, implementation: Shape) -> str | None:
    """``"b s .. ~ (b s) .."`` where the implementation packs sequences of equal length, one per reference row."""
    seqs = graph.extra.get("packed")
    if not isinstance(seqs, list) or len(reference) != len(implementation) + 1 or not implementation:
        return None
    if any(n != seqs[0] for n in seqs) or tuple(reference[:2]) != (len(seqs), seqs[0]):
        return None
    if implementation[0] != sum(seqs) or tuple(reference[2:]) != tuple(implementation[1:]):
        return None
    rest = " ".join(_LETTERS[2 : len(reference)])
    return f"a b {rest} ~ (a b) {rest}".replace("  ", " ").strip()


def _tokens(out: LoadingRelations, ref: Input, name: str, first: Input, ranks: Sequence[Graph]) -> None:
    text = packed_alignment(ranks[0], ref.shape, first.shape)
    if text is not None:
        dist = tuple(Leaf(r, name) for r in range(len(ranks)))
        out.inputs.append(RelationEntry(ref.name, "aligned", dist, alignment=text, place=f"capture: {first.label}"))


def _parameter(
    out: LoadingRelations, known: Mapping[str, Input], name: str, boxes: list[list[dict[str, Any]]],
    mesh: Mapping[str, int], items: list[Input],
) -> None:  # fmt: skip
    """The boxes of one parameter: the i-th of every rank together are one block-wise distributed box."""
    labels = list(dict.fromkeys(b["of"] for rank in boxes for b in rank))
    for label in labels:
        if label not in known:
            continue  # the other side is no capture of that model
        ref = known[label]
        mine = [[b for b in rank if b["of"] == label] for rank in boxes]
        misfit = next((b for rank in mine for b in rank if not _inside(b, ref.shape)), None)
        if misfit is None and mine and mine[0] and not _holds_sequences(mine[0], ref.shape):
            misfit = mine[0][-1]
        if misfit is not None:
            raise RelationError(
                f"{label!r} of the reference has shape {list(ref.shape)}, but {name!r} holds {misfit['at']} of it; capture "
                "both sides with the same sequences (inputs: batch and seq, or seqs, and past)",
                f"capture: {name}",
            )
        if len(labels) == 1:
            mine = _with_padding(mine, items, ref)
        if any([b["local"] for b in m] != [b["local"] for b in mine[0]] for m in mine):
            mine = _refined(mine)
        if len({len(m) for m in mine}) != 1:
            out.open[ref.name] = f"its parts in {name!r} differ in number between ranks ({[len(m) for m in mine]})"
            out.partners[ref.name] = name
            continue
        for group in zip(*mine):
            entry = _box(ref, name, list(group), mesh)
            if isinstance(entry, str):
                out.open[ref.name], out.partners[ref.name] = entry, name
            else:
                out.inputs.append(entry)


def _inside(box: dict[str, Any], shape: Shape) -> bool:
    return len(box["at"]) == len(shape) and all(int(high) <= int(n) for (_, high), n in zip(box["at"], shape))


def _holds_sequences(boxes: Sequence[dict[str, Any]], shape: Shape) -> bool:
    """Every row, and of the longest sequence every token; True for boxes that are not of sequences."""
    at = boxes[0].get("tokens")
    if at is None:
        return True
    return _rows(boxes) == list(range(int(shape[0]))) and max(b["at"][at][1] for b in boxes) == shape[at]


def _rows(boxes: Sequence[dict[str, Any]]) -> list[int]:
    return sorted(row for b in boxes for row in range(*b["at"][0]))


def _rows_end_in_padding(boxes: Sequence[dict[str, Any]], shape: Shape) -> bool:
    at = boxes[0].get("tokens")
    return at is not None and any(b["at"][at][1] < int(shape[at]) for b in boxes)


def _with_padding(mine: list[list[dict[str, Any]]], items: list[Input], ref: Input) -> list[list[dict[str, Any]]]:
    """Boxes that fill their parameters up to padding at the end of the last ones, as boxes of the padded tensor.

    A vocabulary is padded to a round number before it is split, so the last ranks hold less of it, or none. Nothing is
    said about what the padding holds.
    """
    shape = items[0].shape
    given = [rank[0] if len(rank) == 1 else None for rank in mine]
    first = next((b for b in given if b is not None), None)
    straight = list(range(len(ref.shape)))
    if first is None or any(len(rank) > 1 for rank in mine) or any(i.shape != shape for i in items):
        return mine
    if list(first["axes"]) != straight or len(shape) != len(ref.shape):
        return mine
    held = [b for b in given if b is not None]
    short = [d for d, n in enumerate(shape) if any(list(b["local"][d]) != [0, n] for b in held)]
    if not short and len(held) < len(given):
        short = [d for d in range(len(shape)) if any(b["at"][d] != first["at"][d] for b in held)]
    if len(short) != 1 or not isinstance(shape[short[0]], int):
        return mine
    d, step, total = short[0], int(shape[short[0]]), int(ref.shape[short[0]])
    starts = [b["at"][d][0] for b in given if b is not None]
    split = len(set(starts)) > 1 or any(b is None for b in given)
    whole: list[list[dict[str, Any]]] = []
    for rank, b in enumerate(given):
        start = step * rank if split else 0
        size = max(0, min(step, total - start))
        if (b is None) != (size == 0):
            return mine
        if b is not None:
            here = [list(r) for r in b["at"]]
            rest = all(list(b["local"][k]) == [0, n] for k, n in enumerate(shape) if k != d)
            if not rest or list(b["axes"]) != straight or here[d] != [start, start + size] or list(b["local"][d]) != [0, size]:
                return mine
        at = [list(r) for r in first["at"]]
        at[d] = [start, start + step]
        whole.append([{**first, "at": at, "local": [[0, n] for n in shape]}])
    return whole


def _refined(boxes: list[list[dict[str, Any]]]) -> list[list[dict[str, Any]]]:
    """Boxes of all ranks cut where those of any rank begin or end: neighbours on one rank may be far apart on another."""
    ends: dict[int, set[int]] = {}
    for box in (b for rank in boxes for b in rank):
        for d, (low, high) in enumerate(box["local"]):
            ends.setdefault(d, set()).update((low, high))

    def cut(box: dict[str, Any], d: int) -> list[dict[str, Any]]:
        low, high = box["local"][d]
        axis = box["axes"][d]
        inside = sorted(e for e in ends[d] if low < e < high)
        if not inside or not isinstance(axis, int):
            return [box]
        out = []
        for a, b in zip([low, *inside], [*inside, high]):
            start = box["at"][axis][0]
            at, local = list(box["at"]), list(box["local"])
            at[axis], local[d] = [start + a - low, start + b - low], [a, b]
            out.append({**box, "at": at, "local": local})
        return out

    found = boxes
    for d in ends:
        found = [[piece for box in rank for piece in cut(box, d)] for rank in found]
    return [sorted(rank, key=lambda b: b["local"]) for rank in found]


def _box(ref: Input, name: str, group: list[dict[str, Any]], mesh: Mapping[str, int]) -> RelationEntry | str:
    first = group[0]
    if any(b["local"] != first["local"] or b["axes"] != first["axes"] for b in group):
        return f"its part of {name!r} stands at {[b['local'] for b in group]} on the ranks, which differ"
    sizes = [b - a for a, b in first["at"]]
    moving = [d for d in range(len(sizes)) if any(b["at"][d] != first["at"][d] for b in group)]
    if len(moving) > 1:
        return f"its part of {name!r} moves along dimensions {moving} from rank to rank"
    cuts = [list(r) for r in first["at"]]
    split: list[str] = []
    if moving:
        d = moving[0]
        low = min(b["at"][d][0] for b in group)
        offsets = [b["at"][d][0] - low for b in group]
        if any(o % sizes[d] for o in offsets):
            return f"its blocks of {name!r} start at {offsets} along dimension {d}, which are no equal blocks"
        holders = [o // sizes[d] for o in offsets]
        found = mesh_factors(holders, mesh)
        if found is None:
            return f"its blocks of {name!r} lie on the ranks as {holders}, which is no order of the mesh"
        split = found
        cuts[d] = [low, low + sizes[d] * (max(holders) + 1)]
    text = _notation(first["axes"], sizes, moving[0] if moving else None, split)
    seq_cuts = () if cuts == [[0, n] for n in ref.shape] else tuple((a, b) for a, b in cuts)
    local = tuple((a, b) for a, b in first["local"])
    dist = tuple(Leaf(r, name) for r in range(len(group)))
    return RelationEntry(
        ref.name, "aligned", dist, alignment=text, seq_cuts=seq_cuts, dist_cuts=local,
        place=f"capture: {first['of']} in {name}",
    )  # fmt: skip


def _notation(axes: Sequence[Any], sizes: Sequence[int], moving: int | None, split: Sequence[str]) -> str:
    """The alignment of a box: ``sizes`` of the reference's part on one rank, split by mesh axes along ``moving``."""
    levels: list[list[tuple[int, int, int]]] = []  # per local dimension: (reference dimension, count, step)
    for axis in axes:
        if axis is None:
            levels.append([])
        else:
            levels.append([(axis, sizes[axis], 1)] if isinstance(axis, int) else [(k, n, s) for k, n, s in axis])
    names: dict[tuple[int, int], str] = {}  # (reference dimension, step) -> name
    written: list[list[str]] = [[] for _ in sizes]
    letters = iter(_LETTERS)
    for d in range(len(sizes)):
        own = sorted({(s, n) for found in levels for k, n, s in found if k == d and n > 1}, reverse=True)
        for step, count in own:
            names[d, step] = next(letters)
            written[d].append(names[d, step] + (f"={count}" if len(own) > 1 else ""))
        if d == moving:
            written[d][:0] = split
    right = [[names[k, s] for k, n, s in found if n > 1] for found in levels]

    def side(dims: list[list[str]]) -> str:
        return " ".join("1" if not d else d[0] if len(d) == 1 else f"({' '.join(d)})" for d in dims)

    return f"{side(written)} ~ {side(right)}"


def mesh_factors(holders: Sequence[int], mesh: Mapping[str, int]) -> list[str] | None:
    """Names of the parts of the mesh, outermost first, over which rank ``r`` holds block ``holders[r]``; None if none.

    Ranks are row-major over the mesh. ``tp_2x4`` is the part of ``tp`` with stride 2 and 4 positions.
    """
    axes, sizes = list(mesh), list(mesh.values())
    if prod(sizes) != len(holders) or holders[0] != 0:
        return None
    terms: list[tuple[int, int, int, int, str]] = []  # (unit, positions, rank step, stride, name)
    for i, (axis, size) in enumerate(zip(axes, sizes)):
        step = prod(sizes[i + 1 :])
        along = [holders[k * step] for k in range(size)]
        stride = next((k for k, h in enumerate(along) if h), 0)  # neighbours closer than this hold the same block
        if stride and size % stride == 0:
            count = size // stride
            name = axis if stride == 1 else f"{axis}_{stride}x{count}"
            terms.append((along[stride], count, step, stride, name))
    terms.sort()
    expected = 1
    for unit, count, *_ in terms:
        if unit != expected:
            return None
        expected *= count
    for rank, holder in enumerate(holders):
        if holder != sum(unit * (rank // (step * stride) % count) for unit, count, step, stride, _ in terms):
            return None
    return [name for *_, name in reversed(terms)]
