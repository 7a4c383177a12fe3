"""Where two executed programs part: the reference nodes whose operands have counterparts and whose value has none.

Derived alignments are counterparts. For other nodes all implementation tensors with the same axes are compared by
value. A node without counterpart that is followed by nodes with one is a difference in spelling, not a fault: only
nodes from which a differing output is reached through nodes without counterpart count.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from emerge.execute._torch import torch
from emerge.execute.aliasing import split_op
from emerge.execute.collectives import is_collective
from emerge.execute.compare import compare_values, tolerance
from emerge.execute.dropout import Aligned
from emerge.execute.setup import Setup, Sizes, by_class
from emerge.execute.shrink import Shrinker
from emerge.execute.trial import Mismatch, Run
from emerge.facts.families import FamilyNode, FamilyValue
from emerge.facts.lower import Tensor
from emerge.graph.model import Node, Ref, is_integer

#: Operators that hand their operand on, rearranged, moved between ranks or cast.
_TRANSPARENT = {
    *(
        "view",
        "reshape",
        "_unsafe_view",
        "transpose",
        "t",
        "permute",
        "clone",
        "copy",
        "alias",
        "detach",
        "_to_copy",
        "to",
    ),
    *("contiguous", "unsqueeze", "squeeze", "expand", "wait_tensor", "getitem", "slice", "flatten", "lift_fresh_copy"),
}


#: Those of them that only rearrange.
_LAYOUT = {
    "view",
    "reshape",
    "_unsafe_view",
    "transpose",
    "t",
    "permute",
    "clone",
    "detach",
    "_to_copy",
    "unsqueeze",
    "squeeze",
}


@dataclass(frozen=True)
class Divergence:
    """A place where the two programs part.

    Attributes:
        reference: node of the reference whose operands agree and whose value does not.
        implementation: per rank, the node that takes its place; empty where none was found.
    """

    reference: str
    implementation: dict[int, str] = field(default_factory=dict)


class Localiser:
    """Finds counterparts of reference values in one run.

    Args:
        setup, run: what was executed, with every value kept.
        shrinker: axis classes and lowered tensors of the pair.
    """

    def __init__(self, shrinker: Shrinker, setup: Setup, run: Run) -> None:
        self.shrinker, self.setup, self.run = shrinker, setup, run
        self.ref, self.imp = shrinker.sides
        self.sizes = Sizes(shrinker.classes, setup.new)
        self.mesh = shrinker.problem.mesh
        self.derived = Aligned(shrinker.derivation)
        self.nodes = {n.name: n for n in setup.reference.nodes}
        self.order = {n.name: i for i, n in enumerate(setup.reference.nodes)}
        self._counterparts: dict[str, list[str] | None] = {}
        self._prints = self._fingerprints()

    def diverging(self, mismatches: Iterable[Mismatch]) -> list[Divergence]:
        """Places where the programs part on the way to the outputs that differ, in execution order."""
        pending = [m.reference for m in mismatches]
        outputs = {m.reference: m for m in mismatches}
        live: set[str] = set()
        while pending:
            name = pending.pop()
            if name in live or name not in self.nodes or (name not in outputs and self.counterparts(name) is not None):
                continue
            live.add(name)
            pending += self.nodes[name].refs()
        # An output that has a counterpart was computed as it should be and handed over wrongly.
        sources = [n for n in live if not any(r in live for r in self.nodes[n].refs())]
        # Masks and indices are often spelled differently (one range here, a range per rank there): they come last.
        ordered = sorted(sources, key=lambda n: (is_integer(self.nodes[n].dtype), self.order[n]))
        return [Divergence(n, self.taking_place_of(self.nodes[n])) for n in ordered]

    # ---- counterparts -----------------------------------------------------------------------------------------------

    def counterparts(self, name: str) -> list[str] | None:
        """Implementation families that hold the value of a reference tensor; None where there is none.

        Inputs and tensors made from nothing count as having one.
        """
        if name not in self._counterparts:
            self._counterparts[name] = self._find(name)
        return self._counterparts[name]

    def _find(self, name: str) -> list[str] | None:
        node = self.nodes.get(name)
        if node is None:
            return [
                f for r in self.setup.inputs if r.reference == name for f in [self._family(r.implementation[0])] if f
            ]
        tensor = self.ref.tensor_of(0, name)
        if isinstance(tensor, Tensor):
            roots = self.derived.partners(tensor)
            if roots:
                wanted = set(roots)
                low = self.shrinker.imp
                named = [n for t, names in low.nodes_of.items() if self.derived.root.get(t) in wanted for n in names]
                return [n for n in named if n in self.imp.needed]
        if not any(True for _ in node.refs()):
            return []
        found = self._by_value(name, tensor)
        if (
            not found
            and split_op(node.op)[1] in _LAYOUT
            and isinstance(node.args[0], Ref)
            and node.args[0].name not in self.nodes
        ):
            return self.counterparts(node.args[0].name)  # a rearranged input, which may come in pieces
        return found or None

    def _family(self, member: str) -> str | None:
        try:
            return self.imp.family.family_of(0, member)
        except KeyError:
            return None

    def _fingerprints(self) -> dict[str, float]:
        """Sum over all ranks of every implementation tensor that exists on all of them."""
        out = {}
        values: list[FamilyValue] = [*self.imp.family.inputs, *self.imp.family.nodes]
        for value in values:
            if value.name not in self.imp.needed:
                continue
            if sorted(value.members) != list(range(self.mesh.ranks)):
                continue
            found = [self.run.ranks[r].get(m) for r, m in value.members.items()]
            if all(isinstance(x, torch.Tensor) and not x.is_complex() for x in found):
                out[value.name] = sum(float(x.to(torch.float64).sum()) for x in found if x is not None)
        return out

    def _by_value(self, name: str, tensor: Any) -> list[str]:
        value = self.run.reference.get(name)
        if not isinstance(value, torch.Tensor) or value.is_complex() or not isinstance(tensor, Tensor):
            return []
        total = float(value.to(torch.float64).sum())
        size = max(float(value.to(torch.float64).abs().sum()), 1e-300)
        copies = [k for k in range(1, self.mesh.ranks + 1) if self.mesh.ranks % k == 0]
        out = []
        for family, found in self._prints.items():
            if any(abs(found - k * total) <= 1e-6 * k * size for k in copies) and self._same(value, tensor, family):
                out.append(family)
        return out

    def _same(self, value: Any, tensor: Tensor, family: str) -> bool:
        """True where the family holds the value, sharded or replicated by its axes, or as a partial sum."""
        other = self.shrinker.imp.tensors.get(family)
        if not isinstance(other, Tensor):
            return False
        atoms = [self.shrinker.classes.tensor_atoms(t.id) for t in (tensor, other)]
        placed = by_class(atoms[0], atoms[1], self.sizes, self.mesh)
        if placed is None:
            return self._same_elements(value, family)
        if placed[0].local_shape() != tuple(self._local(family, 0).shape):
            return False
        placement = placed[0]
        if placement.reference_shape() != tuple(value.shape):
            return False
        locals_ = [self._local(family, r) for r in range(self.mesh.ranks)]
        if placement.is_replicated():
            expected = placement.shard(value, 0)
            total = sum(x.to(torch.float64) for x in locals_) if expected.is_floating_point() else None
            if total is not None and compare_values(expected, total, tolerance(expected, total)) is None:
                return True
        return all(
            compare_values(expected, x, tolerance(expected, x)) is None
            for r, x in enumerate(locals_)
            for expected in [placement.shard(value, r)]
        )

    def _same_elements(self, value: Any, family: str) -> bool:
        """True where the family holds the same elements in any order: all that can be said without common axes."""
        wanted = value.to(torch.float64).flatten().sort().values
        parts = [self._local(family, r).to(torch.float64).flatten() for r in range(self.mesh.ranks)]
        found = [torch.cat(parts)]
        if parts[0].numel() == wanted.numel():
            found += [parts[0], sum(parts)]
        for elements in found:
            copies = elements.numel() // wanted.numel() if wanted.numel() else 0
            if copies and copies * wanted.numel() == elements.numel():
                ordered = elements.sort().values
                repeated = wanted.repeat_interleave(copies)
                if compare_values(repeated, ordered, tolerance(repeated, ordered)) is None:
                    return True
        return False

    def _local(self, family: str, rank: int) -> Any:
        return self.run.ranks[rank][self.imp.family.value(family).members[rank]]

    # ---- the implementation's node ----------------------------------------------------------------------------------

    def taking_place_of(self, node: Node) -> dict[int, str]:
        """The implementation node that reads counterparts of most operands, preferably with the same operator."""
        readers = self._readers
        votes: dict[str, float] = {}
        for ref in dict.fromkeys(node.refs()):
            reached: set[str] = set()
            for start in self.counterparts(ref) or ():
                self._consumers(start, readers, reached)
            for name in reached:
                votes[name] = votes.get(name, 0.0) + 1.0
        if not votes:
            return {}
        name_of = split_op(node.op)[1]
        family = self.imp.family

        own = self._axes(self.ref.tensor_of(0, node.name))

        def rank(name: str) -> tuple[bool, float, bool, int]:
            value = family.value(name)
            same = isinstance(value, FamilyNode) and split_op(value.op)[1] == name_of
            return same, votes[name], self._axes(self.shrinker.imp.tensors.get(name)) == own, -value.id

        return dict(family.value(max(votes, key=rank)).members)

    def _axes(self, tensor: Any) -> list[int] | None:
        """Classes of the axes of a tensor that are not sharded."""
        if not isinstance(tensor, Tensor):
            return None
        mesh = {a.cls for d in range(len(self.mesh.sizes)) for a in self.shrinker.classes.atoms(0, self.mesh.dim(d))}
        return sorted(a.cls for dim in self.shrinker.classes.tensor_atoms(tensor.id) for a in dim if a.cls not in mesh)

    @property
    def _readers(self) -> dict[str, list[FamilyNode]]:
        readers: dict[str, list[FamilyNode]] = {}
        for node in self.imp.nodes():
            for ref in dict.fromkeys(node.refs()):
                readers.setdefault(ref, []).append(node)
        return readers

    def _consumers(self, start: str, readers: dict[str, list[FamilyNode]], reached: set[str]) -> None:
        """Nodes that read ``start``, also through operators that only hand it on."""
        pending, seen = [start], set()
        while pending:
            name = pending.pop()
            if name in seen:
                continue
            seen.add(name)
            for node in readers.get(name, ()):
                reached.add(node.name)
                if split_op(node.op)[1] in _TRANSPARENT or is_collective(node.op):
                    pending.append(node.name)
