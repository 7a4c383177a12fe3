"""Where two executed programs part: the reference nodes whose operands have counterparts and whose value has none.

Derived alignments are counterparts. For other nodes all implementation tensors with the same axes are compared by
value. A node without counterpart that is followed by nodes with one is a difference in spelling, not a fault: only
nodes from which a differing output is reached through nodes without counterpart count.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from emerge.execute._torch import torch
from emerge.execute.aliasing import split_op
from emerge.execute.collectives import is_collective
from emerge.execute.compare import compare_values, tolerance
from emerge.execute.dropout import Aligned
from emerge.execute.placement import OnMesh, Placement
from emerge.execute.setup import Setup, Sizes, by_class
from emerge.execute.shrink import Shrinker, Side
from emerge.execute.trial import Mismatch, Run
from emerge.facts.families import FamilyNode, FamilyValue
from emerge.facts.lower import Tensor
from emerge.facts.ops.masks import FINITE_MASK
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

#: Those that, with collectives, may stand where the sides move values in another way.
_MOVING = _TRANSPARENT | {
    *("cat", "stack", "narrow", "split", "split_with_sizes", "chunk", "select", "index_select", "mul", "div"),
    *("repeat", "repeat_interleave"),
}

#: Those that put pieces together.
_JOINING = {"cat", "stack"}

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


def between(side: Side, start: Iterable[str], agreed: set[str], mixing: bool = False) -> str | None:
    """The node that makes the first of ``start`` out of values in ``agreed``, by moving them only.

    Args:
        mixing: the first node on the way that puts pieces together instead (a collective, cat, stack).
    """
    pending: list[tuple[str, tuple[str, ...]]] = [(name, (name,)) for name in start if name not in agreed]
    seen: set[str] = set()
    while pending:
        name, path = pending.pop(0)
        node = side.family.value(name)
        if name in seen or not isinstance(node, FamilyNode):
            continue
        seen.add(name)
        if split_op(node.op)[1] not in _MOVING and not is_collective(node.op):
            continue
        refs = list(dict.fromkeys(node.refs()))
        if not agreed.isdisjoint(refs):
            if not mixing:
                return name
            values = [side.family.value(made) for made in path]
            made = [v for v in values if isinstance(v, FamilyNode)]
            # a list of gathered pieces is put in order where they are joined, not where they arrive
            for v in [v for v in made if split_op(v.op)[1] in _JOINING] + [v for v in made if is_collective(v.op)]:
                return v.name
        pending += [(r, (*path, r)) for r in refs if r not in agreed]
    return None


def contiguous(placement: Placement) -> bool:
    """True where no axis changes its place and ranks hold contiguous blocks."""
    local = [t for t in placement.to if not isinstance(t, OnMesh)]
    position = 0
    for dim in placement.reference:
        kinds = [isinstance(t, OnMesh) for t in placement.to[position : position + len(dim)]]
        position += len(dim)
        if kinds != sorted(kinds, reverse=True):
            return False
    return local == sorted(local)


@dataclass(frozen=True)
class Divergence:
    """A place where the two programs part.

    Attributes:
        reference: node of the reference whose operands agree and whose value does not.
        implementation: per rank, the node that takes its place; empty where none was found.
        cause: per rank, the node that makes an operand of it out of values that agree (a collective that was changed,
            what stands in the place of one); empty where its operands are those values themselves.
        also: further reference nodes at that place: outputs of ``reference`` where it has several, and the node from
            which on values agree in another order only.
        first: nothing parts at a smaller depth, counted in operators from the inputs.
    """

    reference: str
    implementation: dict[int, str] = field(default_factory=dict)
    cause: dict[int, str] = field(default_factory=dict)
    also: tuple[str, ...] = ()
    first: bool = True


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
            if name in live or name not in self.nodes:
                continue
            if name not in outputs and (name in self._indices or self.counterparts(name) is not None):
                continue
            live.add(name)
            pending += self.nodes[name].refs()
        # An output that has a counterpart was computed as it should be and handed over wrongly.
        sources = [n for n in live if not any(r in live for r in self.nodes[n].refs())]
        sources = [n for n in sources if not self._arrived(n)] or sources
        ordered = sorted(sources, key=lambda n: (self._depths[n], self.order[n]))
        return [self._divergence(n, live, self._depths[n] == self._depths[ordered[0]]) for n in ordered]

    def _arrived(self, name: str) -> bool:
        """Whether a value without a counterpart went into one that has one: then it arrived, in another form."""
        pending, seen = [name], {name}
        while pending:
            for user in self._users.get(pending.pop(), ()):
                if user in seen:
                    continue
                seen.add(user)
                if user in self._indices or self.counterparts(user) is None:
                    pending.append(user)
                elif not self._decided(user):
                    return True
                # a decision (which experts, which token) may be the same although what it was taken from differs
        return False

    def _decided(self, name: str) -> bool:
        """Whether a value consists of whole numbers: indices, masks, counts, also where they are kept as floats."""
        value = self.run.reference.get(name)
        if not isinstance(value, torch.Tensor) or value.is_complex():
            return False
        return not value.is_floating_point() or bool((value == value.round()).all())

    @cached_property
    def _users(self) -> dict[str, list[str]]:
        users: dict[str, list[str]] = {}
        for node in self.setup.reference.nodes:
            for name in dict.fromkeys(node.refs()):
                users.setdefault(name, []).append(node.name)
        return users

    def _divergence(self, name: str, live: set[str], first: bool) -> Divergence:
        node = self.nodes[name]
        implementation = self.taking_place_of(node)
        also = [n for n in sorted(live, key=self.order.__getitem__) if self._element_of(n) == name]
        cause: dict[int, str] = {}
        agreed = {f for ref in node.refs() for f in self.counterparts(ref) or ()}
        origin = self._reordered_at(node)
        if origin is not None:
            also.append(origin[0])
            cause = self._members(origin[1])
        elif implementation:
            value = self.imp.family.value(self.imp.family.family_of(*min(implementation.items())))
            operands = list(value.refs()) if isinstance(value, FamilyNode) else []
            made = between(self.imp, operands, agreed, mixing=True) or between(self.imp, operands, agreed)
            cause = self._members(made)
        return Divergence(name, implementation, cause, tuple(also), first)

    def _members(self, family: str | None) -> dict[int, str]:
        return {} if family is None else dict(self.imp.family.value(family).members)

    def _element_of(self, name: str) -> str | None:
        node = self.nodes[name]
        taken = split_op(node.op)[:2] == ("operator", "getitem") and node.args and isinstance(node.args[0], Ref)
        return node.args[0].name if taken and isinstance(node.args[0], Ref) else None

    @cached_property
    def _depths(self) -> dict[str, int]:
        """Longest chain of operators from the inputs."""
        depths: dict[str, int] = {}
        for node in self.setup.reference.nodes:
            depths[node.name] = 1 + max((depths.get(r, 0) for r in node.refs()), default=0)
        return depths

    @cached_property
    def _indices(self) -> set[str]:
        """Masks and indices made of integers alone, also masks written as numbers (0 beside -inf or nearly that).

        They are often spelled differently on both sides (one range here, a range per rank there, inside a kernel); what
        they do shows where a floating value is looked up or masked with them.
        """
        types = self.setup.reference.types()
        found: set[str] = set()
        literals = {n.name for n in self.setup.reference.nodes if not any(True for _ in n.refs())}
        for node in self.setup.reference.nodes:
            refs = list(node.refs())
            made_of = [r in found or (r not in self.nodes and is_integer(types[r].dtype)) for r in refs]
            whole = all(made_of) and node.dtype is not None and is_integer(node.dtype)
            chosen = any(made_of) and all(m or r in literals for m, r in zip(made_of, refs))
            if whole or (chosen and self._is_mask(node.name)):
                found.add(node.name)
        return found

    def _is_mask(self, name: str) -> bool:
        value = self.run.reference.get(name)
        if not isinstance(value, torch.Tensor) or not value.is_floating_point():
            return False
        return bool(((value == 0) | (value <= float(FINITE_MASK))).all()) and bool((value != 0).any())

    # ---- values in another order ------------------------------------------------------------------------------------

    def _reordered_at(self, node: Node) -> tuple[str, str] | None:
        """Where pieces ``node`` depends on were put together in another order: the reference node after that, and it.

        A layout that differs between the sides is no fault by itself: transposes are not looked for.
        """
        pending, seen = list(node.refs()), set()
        while pending:
            name = pending.pop()
            if name in seen or name not in self.nodes or self._in_order(name):
                continue
            seen.add(name)
            here = self.counterparts(name) or ()
            before = {f for r in self.nodes[name].refs() for f in self.counterparts(r) or () if self._in_order(r, f)}
            for family in here:
                value = self.imp.family.value(family)
                for operand in value.refs() if isinstance(value, FamilyNode) else ():
                    found = operand not in before and between(self.imp, [operand], before, mixing=True)
                    if found:
                        return name, found
            pending += self.nodes[name].refs()
        return None

    def _in_order(self, name: str, family: str | None = None) -> bool:
        """False where every alignment of a value (with ``family``) permutes its axes or deals them out in pieces."""
        tensor = self.ref.tensor_of(0, name)
        if not isinstance(tensor, Tensor):
            return True
        low = self.shrinker.imp.tensors
        families = [family] if family is not None else self.counterparts(name) or ()
        locals_ = [low.get(f) for f in families] if self.derived.partners(tensor) else []
        found = [p for t in locals_ if isinstance(t, Tensor) for p in self.derived.placements(tensor, t, self.sizes)]
        if not found or any(map(contiguous, found)):
            return True
        node = self.nodes.get(name)
        source = node.args[0] if node is not None and split_op(node.op)[1] in _LAYOUT else None
        return family is None and isinstance(source, Ref) and self._in_order(source.name)

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
            return [f for r in self.setup.inputs if r.reference == name for f in [self._family(*r.members()[0])] if f]
        tensor = self.ref.tensor_of(0, name)
        if isinstance(tensor, Tensor):
            roots = self.derived.partners(tensor)
            if roots:
                return self._named(roots)
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

    def _family(self, rank: int, member: str) -> str | None:
        try:
            return self.imp.family.family_of(rank, member)
        except KeyError:
            return None

    def _fingerprints(self) -> dict[str, float]:
        """Sum over all ranks of every implementation tensor that exists on all of them, or on those of one stage."""
        out = {}
        values: list[FamilyValue] = [*self.imp.family.inputs, *self.imp.family.nodes]
        for value in values:
            if value.name not in self.imp.needed:
                continue
            fixed = self.mesh.fixed(tuple(value.members))
            if fixed is None:
                continue
            homes = [self.mesh.home(r, fixed) for r in range(self.mesh.ranks)]
            found = [self.run.ranks[r].get(value.members[r]) for r in homes]
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
        """True where the family holds the same elements in any order: all that can be said without common axes.

        Of masks and one-hot forms that says nothing: which elements are set is what they are about.
        """
        wanted = value.to(torch.float64).flatten().sort().values
        if not value.is_floating_point() and len(wanted.unique()) <= 2:
            return False
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
        """The value on a rank; of a tensor of one stage, its copy there."""
        members = self.imp.family.value(family).members
        home = self.mesh.home(rank, self.mesh.fixed(tuple(members)) or {})
        return self.run.ranks[home][members[home]]

    # ---- the implementation's node ----------------------------------------------------------------------------------

    def taking_place_of(self, node: Node) -> dict[int, str]:
        """The implementation node that reads counterparts of most operands, preferably with the same operator."""
        readers = self._readers
        votes: dict[str, float] = {}
        starts = [self.counterparts(ref) or () for ref in dict.fromkeys(node.refs())]
        # What an operator is made of has counterparts of its own: the product inside of addmm, for one.
        parts = [self._named(self.derived.partners_of(t)) for t in self._parts.get(node.name, ())]
        for found in [*starts, *parts]:
            reached: set[str] = set()
            for start in found:
                self._consumers(start, readers, reached)
            for name in reached:
                votes[name] = votes.get(name, 0.0) + 1.0
        if not votes:
            return {}
        name_of = split_op(node.op)[1]
        family = self.imp.family

        own = self._axes(self.ref.tensor_of(0, node.name))

        def rank(name: str) -> tuple[bool, bool, float, bool, int]:
            value = family.value(name)
            same = isinstance(value, FamilyNode) and split_op(value.op)[1] == name_of
            alike = self._axes(self.shrinker.imp.tensors.get(name)) == own
            return name not in self._accounted, same, votes[name], alike, -value.id

        return dict(family.value(max(votes, key=rank)).members)

    @cached_property
    def _parts(self) -> dict[str, list[int]]:
        """Tensors inside a reference node's operator that are no node of their own."""
        low = self.ref.low
        found: dict[str, list[int]] = {}
        for tensor, op in low.op_of.items():
            name = low.op_node.get(op, "")
            if name and tensor not in low.nodes_of:
                found.setdefault(name, []).append(tensor)
        return found

    @cached_property
    def _accounted(self) -> set[str]:
        """Implementation nodes whose value a reference tensor is aligned with."""
        return set(self._named({d for pairs in self.derived.pairs.values() for d, *_ in pairs}))

    def _named(self, roots: Collection[int]) -> list[str]:
        """Implementation families whose value is a rearrangement of one of these lowered tensors."""
        wanted = set(roots)
        low = self.imp.low
        named = [n for t, names in low.nodes_of.items() if self.derived.root.get(t) in wanted for n in names]
        return [n for n in named if n in self.imp.needed]

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
