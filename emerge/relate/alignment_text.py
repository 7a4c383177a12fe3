"""Derived alignments as text: root relations and atomic axes expressed on the dimensions of the tensors themselves."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from emerge.facts.base import IMPLEMENTATION, REFERENCE
from emerge.facts.lower import Lowering, Tensor
from emerge.relate.derive import Derivation
from emerge.relate.notation import axis_letters

Axis = tuple[int, int]
#: An ``aligned`` row without its tensors: map, used, partial, reduction, scale.
Relation = tuple[Any, int, int, str, str]


@dataclass(frozen=True)
class Partner:
    """An implementation tensor that a reference tensor is aligned to (both are roots)."""

    reference: int
    implementation: int
    relation: Relation


class Alignments:
    """Answers questions about a finished derivation; indexes its relations once."""

    def __init__(self, derivation: Derivation) -> None:
        self.derivation = derivation
        self.mesh = derivation.problem.mesh
        relations = derivation.result.relations
        self.root: dict[int, int] = dict(relations["root"])
        self.partners: dict[int, list[Partner]] = defaultdict(list)
        for s, d, *rest in sorted(relations["aligned"], key=repr):
            self.partners[s].append(Partner(s, d, tuple(rest)))
        self._axis_at: dict[int, list[tuple[int, int, Axis | None]]] = defaultdict(list)
        for v, dim, stride, axis in relations["axis_at"]:
            self._axis_at[v].append((dim, stride, axis))
        self._atoms: dict[int, dict[Axis, int]] = defaultdict(dict)
        for x, dim, stride, size in relations["atom"]:
            self._atoms[x][dim, stride] = size
        self._bits: list[tuple[Axis, int]] = sorted(relations["mesh_bit"], key=lambda row: row[1])
        self._extent: dict[int, dict[int, int]] = defaultdict(dict)
        for x, dim, size in derivation.base.facts["extent"]:
            self._extent[x][dim] = size

    # ---- names ------------------------------------------------------------------------------------------------------

    def side(self, side: int) -> Lowering:
        """The lowered graph of a side."""
        return self.derivation.reference if side == REFERENCE else self.derivation.implementation

    def tensor_id(self, side: int, name: str) -> int | None:
        """Identifier of a node or input, None when it has no single tensor."""
        value = self.side(side).tensors.get(name)
        return value.id if isinstance(value, Tensor) else None

    def partners_of(self, tensor: int) -> list[Partner]:
        """Alignments of the root of a reference tensor."""
        return self.partners.get(self.root.get(tensor, tensor), [])

    def mesh_name(self, axis: Axis) -> str:
        """Name of a mesh atom: ``tp``, or ``tp_2x4`` for a part of an axis (stride 2, 4 positions)."""
        dim, stride = axis
        name, size = self.mesh.names[-1 - dim], self._atoms[0].get(axis, 1)
        return name if size == self.mesh.sizes[-1 - dim] else f"{name}_{stride}x{size}"

    # ---- text -------------------------------------------------------------------------------------------------------

    def text(self, reference: int, implementation: int, relation: Relation) -> str:
        """``"a (tp b) ~ a b + partial(dp)"``: a relation of the roots, read on these two tensors.

        A dimension without common atomic axes is written ``?``; a scale other than 1 is appended as ``* c``.
        """
        mapping, _, partial, reduction, scale = relation
        images: dict[Axis, Axis] = {}
        while mapping is not None:
            axis, image, mapping = mapping
            images[axis] = image
        left = self._sides(reference, lambda axis: images.get(axis))
        right = self._sides(implementation, lambda axis: axis)
        named = self._named(left, right)
        out = f"{self._written(reference, left, named)} ~ {self._written(implementation, right, named)}"
        axes = [self.mesh_name(axis) for axis, bit in self._bits if partial & bit]
        if axes:
            out += f" + partial({', '.join(axes)}{'' if reduction == 'sum' else f'; {reduction}'})"
        return out if scale == "1" else f"{out} * {scale}"

    def _sides(self, tensor: int, image: Any) -> dict[int, list[Any]]:
        """Per dimension the keys of its atoms, outermost first: an implementation axis, or a mark of a constant one."""
        dims: dict[int, list[tuple[int, Any]]] = defaultdict(list)
        constants = 0
        for dim, stride, axis in sorted(self._axis_at.get(tensor, ()), key=lambda row: (row[0], -row[1])):
            if axis is None:
                key: Any = ("constant", constants, self._atoms[tensor].get((dim, stride), 1))
                constants += 1
            else:
                key = image(axis)
            dims[dim].append((-stride, key))
        return {d: [k for _, k in sorted(keys, key=lambda k: k[0])] for d, keys in dims.items()}

    def _named(self, left: dict[int, list[Any]], right: dict[int, list[Any]]) -> dict[Any, str]:
        """Letters for the axes; axes that are neighbours on both sides share one."""
        follows = {(a, b) for keys in right.values() for a, b in pairwise(keys)}
        letters = iter(axis_letters(self.mesh))
        named: dict[Any, str] = {}
        for dim in sorted(left):
            before: Any = None
            for key in left[dim]:
                if key is None:
                    before = None
                elif self._is_mesh(key):
                    named[key] = self.mesh_name(key)
                    before = None
                else:
                    named[key] = named[before] if before is not None and (before, key) in follows else next(letters)
                    before = key
        for dim in sorted(right):
            for key in right[dim]:
                if key is not None and key not in named:
                    named[key] = self.mesh_name(key) if self._is_mesh(key) else next(letters)
        return named

    @staticmethod
    def _is_mesh(key: Any) -> bool:
        return key[0] != "constant" and key[0] < 0

    def _written(self, tensor: int, dims: dict[int, list[Any]], named: dict[Any, str]) -> str:
        parts = []
        for dim, size in sorted(self._extent.get(tensor, {}).items()):
            keys = dims.get(dim, [])
            names = list(dict.fromkeys(named.get(k, "?") if k is not None else "?" for k in keys))
            if size == 1:
                parts.append("1")
            elif not names:
                parts.append("?")
            else:
                parts.append(names[0] if len(names) == 1 else f"({' '.join(names)})")
        return " ".join(parts)

    def claim_texts(self, number: int, proved: bool = False) -> list[str]:
        """The alignments derived for a claim; with ``proved`` only those that meet the claim."""
        statement = self.derivation.claims[number]
        ids = next(((s, d) for g, s, d in self.derivation.base.facts["expected"] if g == number), None)
        if ids is None:
            return []
        relations = self.derivation.result.relations
        rows = sorted((tuple(r[1:]) for r in relations["output_alignment"] if r[0] == number), key=repr)
        if proved:
            met = {m for g, m in relations["output_proved"] if g == number}
            rows = [r for r in rows if r[0] in met and r[2] == 0 and r[4] == "1"]
        texts = dict.fromkeys(self.text(ids[0], ids[1], row) for row in rows)
        if statement.reference.cuts or statement.implementation.cuts:
            return [f"{t}  [{statement.reference} ~ {statement.implementation}]" for t in texts]
        return list(texts)

    def pair_text(self, reference: str, partner: Partner) -> str:
        """``"mm_3 ~ mm_7: a b ~ a b"`` for an aligned node."""
        s = self.tensor_id(REFERENCE, reference)
        names = self.derivation.implementation.nodes_of.get(partner.implementation, [])
        name = names[0] if names else "an auxiliary tensor"
        d = self.tensor_id(IMPLEMENTATION, names[0]) if names else None
        if s is None or d is None:
            return f"{reference} ~ {name}"
        text = self.text(s, d, partner.relation)
        return f"{reference} ~ {name}: {'scalar ~ scalar' if text == ' ~ ' else text}"


def alignment_text(derivation: Derivation, claim: int) -> list[str]:
    """The derived alignments of a claim in the alignment notation; see :meth:`Alignments.claim_texts`."""
    return Alignments(derivation).claim_texts(claim)
