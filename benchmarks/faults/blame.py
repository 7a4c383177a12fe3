"""Where a finding about a planted fault should point, and whether one does.

The place of a fault is the changed node or a direct consumer. Findings name reference nodes, so every implementation
node of the place is translated by the alignments of the unchanged pair; a node without a counterpart (a rank's mask,
say) stands for the first values behind it that have one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from benchmarks.faults.common import Change
from benchmarks.faults.edit import Editor
from emerge.facts.base import IMPLEMENTATION, REFERENCE
from emerge.relate.alignment_text import Alignments
from emerge.relate.derive import Derivation
from emerge.verdict.types import Finding


class Correspondence:
    """Reference nodes that correspond to an implementation node, from the derivation of the unchanged pair."""

    def __init__(self, derivation: Derivation) -> None:
        self._implementation = derivation.problem.implementation
        self._graphs = [Editor(g) for g in self._implementation.graphs]
        self._alignments = found = Alignments(derivation)
        names: dict[int, set[str]] = defaultdict(set)
        for tensor, nodes in found.side(REFERENCE).nodes_of.items():
            names[found.root.get(tensor, tensor)].update(nodes)
        self._of: dict[int, set[str]] = defaultdict(set)
        for partners in found.partners.values():
            for p in partners:
                self._of[p.implementation] |= names[p.reference]

    def of(self, rank: int, name: str) -> set[str]:
        """Reference nodes aligned with a node of a rank; empty when there are none."""
        try:
            family = self._implementation.family_of(rank, name)
        except KeyError:
            return set()
        tensor = self._alignments.tensor_id(IMPLEMENTATION, family)
        return set() if tensor is None else set(self._of[self._alignments.root.get(tensor, tensor)])

    def at_or_behind(self, rank: int, name: str) -> set[str]:
        """Like :meth:`of`; where there is no counterpart, those of the first values behind it that have one."""
        graph = self._graphs[rank]
        if graph.get(name) is None:
            return set()
        found: set[str] = set()
        seen: set[str] = set()
        work = [name]
        while work:
            current = work.pop()
            if current in seen:
                continue
            seen.add(current)
            here = self.of(rank, current)
            found |= here
            if not here:
                work.extend(n.name for n in graph.users(current))
        return found


def reference_places(change: Change, healthy: Correspondence) -> set[str]:
    """Reference nodes at which a finding is at the blame."""
    rank = change.ranks[0] if change.ranks else 0
    found: set[str] = set()
    for name in (*change.changed, *change.removed, *change.consumers):
        found |= healthy.at_or_behind(rank, name)
    return found


def hits(finding: Finding, change: Change, reference: Iterable[str]) -> bool:
    """Is a finding at the planted node or its direct consumer, on either side?"""
    if set(finding.reference_nodes) & set(reference):
        return True
    return bool({n.partition(":")[2] for n in finding.implementation_nodes} & change.places())
