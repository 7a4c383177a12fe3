"""Which dropout calls of the two sides draw the same mask.

A graph file holds no random streams, so the correspondence is an assumption (``dropout_masks``): where the derivation
aligns two calls they share a mask; else calls of one probability and one set of axes are paired in order, and that is
*sure* only where there is one of the kind.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from emerge.execute.aliasing import split_op
from emerge.execute.placement import DropoutPair, DropoutPlan, OnMesh, Placement
from emerge.execute.setup import Sizes, by_class
from emerge.facts.lower import Lowering, Tensor
from emerge.facts.mesh import Block, Mesh
from emerge.graph.model import Graph, Node, Ref
from emerge.relate.derive import Derivation


def is_active(node: Node) -> bool:
    """True for a dropout call that draws a mask."""
    if split_op(node.op)[1] not in ("native_dropout", "dropout", "dropout_"):
        return False
    p = node.args[1] if len(node.args) > 1 else node.kwargs.get("p", 0.5)
    train = node.args[2] if len(node.args) > 2 else node.kwargs.get("train", True)
    return train is not False and p != 0


def dropout_plan(derivation: Derivation, reference: Graph, ranks: Sequence[Graph], sizes: Sizes) -> DropoutPlan:
    """Pairs the dropout calls of both sides.

    Args:
        sizes: lengths of the execution, which the placements are for.
    """
    family = derivation.problem.implementation
    left = [(n, _operand(derivation.reference, n)) for n in reference.nodes if is_active(n)]
    right = []
    for node in ranks[0].nodes:
        if is_active(node):
            value = family.value(family.family_of(0, node.name))
            if sorted(value.members) == list(range(len(ranks))):
                right.append(
                    (
                        node,
                        tuple(value.members[r] for r in range(len(ranks))),
                        _operand_of_family(derivation, value.name),
                    )
                )
    others = [n.name for g in ranks[1:] for n in g.nodes if is_active(n)]
    plan = DropoutPlan()
    if len(others) != len(right) * (len(ranks) - 1) or sum(map(is_active, ranks[0].nodes)) != len(right):
        plan.pairs.append(DropoutPair(None, None))  # calls that exist on some ranks only
    if not left and not right:
        return plan
    partners = _aligned(derivation)
    waiting = list(right)
    open_left = []
    for node, tensor in left:
        found = next(
            (
                r
                for r in waiting
                if tensor is not None
                and r[2] is not None
                and _p(r[0]) == _p(node)
                and partners.placed(tensor, r[2], sizes)
            ),
            None,
        )
        if found is None or tensor is None or found[2] is None:
            open_left.append((node, tensor))
            continue
        waiting.remove(found)
        plan.pairs.append(DropoutPair(node.name, found[1], partners.placed(tensor, found[2], sizes), True))
    counts: dict[Any, int] = {}
    for node, tensor in open_left:
        counts[_kind(node, tensor, sizes)] = counts.get(_kind(node, tensor, sizes), 0) + 1
    mesh = derivation.problem.mesh
    for node, tensor in open_left:
        pair = DropoutPair(node.name, None)
        for r in waiting:
            placed = _by_class(tensor, r[2], sizes, mesh) if _p(r[0]) == _p(node) else None
            if placed is not None:
                waiting.remove(r)
                alone = counts[_kind(node, tensor, sizes)] == 1
                pair = DropoutPair(node.name, r[1], placed[0], placed[1] and alone)
                break
        plan.pairs.append(pair)
    plan.pairs += [DropoutPair(None, r[1]) for r in waiting]
    return plan


def _p(node: Node) -> Any:
    return node.args[1] if len(node.args) > 1 else node.kwargs.get("p", 0.5)


def _kind(node: Node, tensor: Tensor | None, sizes: Sizes) -> Any:
    if tensor is None:
        return (_p(node), None)
    return (_p(node), tuple(sorted(a.cls for d in sizes.classes.tensor_atoms(tensor.id) for a in d)))


def _operand(low: Lowering, node: Node) -> Tensor | None:
    """The tensor whose axes the mask has: the operand."""
    source = node.args[0]
    found = low.tensors.get(source.name) if isinstance(source, Ref) else None
    return found if isinstance(found, Tensor) else None


def _operand_of_family(derivation: Derivation, name: str) -> Tensor | None:
    value: Any = derivation.problem.implementation.value(name)
    source = value.args[0]
    found = derivation.implementation.tensors.get(source.name) if isinstance(source, Ref) else None
    return found if isinstance(found, Tensor) else None


def _by_class(a: Tensor | None, b: Tensor | None, sizes: Sizes, mesh: Mesh) -> tuple[Placement, bool] | None:
    if a is None or b is None:
        return None
    return by_class(sizes.classes.tensor_atoms(a.id), sizes.classes.tensor_atoms(b.id), sizes, mesh)


class Aligned:
    """Derived alignments between lowered tensors, as placements."""

    def __init__(self, derivation: Derivation) -> None:
        relations = derivation.result.relations
        self.mesh = derivation.problem.mesh
        self.root = dict(relations.get("root", ()))
        self.places: dict[int, dict[tuple[int, int], Any]] = {}
        for v, d, s, x in relations.get("axis_at", ()):
            self.places.setdefault(v, {})[d, s] = x
        self.pairs: dict[int, list[tuple[int, Any, int, str, str]]] = {}
        for s, d, m, _, p, r, c in relations.get("aligned", ()):
            self.pairs.setdefault(s, []).append((d, m, p, r, c))

    def partners(self, reference: Tensor) -> list[int]:
        """Roots of the implementation tensors that a reference tensor is aligned with, partial ones included."""
        return self.partners_of(reference.id)

    def partners_of(self, reference: int) -> list[int]:
        """The same for the number of a reference tensor."""
        return [d for d, *_ in self.pairs.get(self.root.get(reference, -1), ())]

    def placed(self, reference: Tensor, local: Tensor, sizes: Sizes) -> Placement | None:
        """The derived placement of a tensor in another one (no partial, scale 1); None where there is none."""
        wanted = self.root.get(local.id)
        for d, m, p, _, c in self.pairs.get(self.root.get(reference.id, -1), ()):
            if d == wanted and p == 0 and c == "1":
                found = self._placement(reference, local, m, sizes)
                if found is not None:
                    return found
        return None

    def placements(self, reference: Tensor, local: Tensor, sizes: Sizes) -> list[Placement]:
        """All derived placements of a tensor in another one, also of partial or scaled values."""
        pairs = self.pairs.get(self.root.get(reference.id, -1), ())
        wanted = self.root.get(local.id)
        found = [self._placement(reference, local, m, sizes) for d, m, *_ in pairs if d == wanted]
        return [p for p in found if p is not None]

    def _placement(self, reference: Tensor, local: Tensor, chain: Any, sizes: Sizes) -> Placement | None:
        target: dict[Any, Any] = {}
        while chain is not None:
            target[chain[0]] = chain[1]
            chain = chain[2]
        atoms = [sizes.classes.tensor_atoms(t.id) for t in (reference, local)]
        flat = [(d, a) for d, dim in enumerate(atoms[1]) for a in dim]
        own = self.places.get(local.id, {})
        numbers = {own.get((d, a.stride), False): k for k, (d, a) in enumerate(flat)}
        to: list[int | OnMesh] = []
        for d, dim in enumerate(atoms[0]):
            for a in dim:
                x = self.places.get(reference.id, {}).get((d, a.stride), False)
                y = target.get(x) if x else None
                if y is None:
                    return None
                if y[0] < 0:
                    to.append(OnMesh(self.mesh.rank_step(Block(y[0], y[1], a.size)), a.size))
                elif y in numbers:
                    to.append(numbers[y])
                else:
                    return None
        if sorted(t for t in to if isinstance(t, int)) != list(range(len(flat))):
            return None
        shapes = [tuple(tuple(sizes.of(a) for a in dim) for dim in side) for side in atoms]
        return Placement(shapes[0], shapes[1], tuple(to))


def _aligned(derivation: Derivation) -> Aligned:
    return Aligned(derivation)
