"""How many reference nodes behind the proved claims rest on laws of which evidence.

A node counts with the weakest law of the last step of its best derivation: the laws between its alignment and alignments
of other tensors. What those rest on is counted at their nodes, so one tested look-up at the bottom of a model does not
hide what the layers above it are. (The evidence of a verdict is another figure: the weakest of everything.)
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from emerge.facts.base import REFERENCE
from emerge.facts.lower import Tensor
from emerge.verdict.localize import Structure
from emerge.verdict.types import EVIDENCE


def node_evidence(
    structure: Structure, claims: Mapping[int, str], numbers: Mapping[str, int], levels: Mapping[str, str]
) -> dict[str, str]:
    """Evidence of every reference node in the cone of the claims.

    Args:
        claims: proved claims with their evidence.
        numbers: law -> number of its evidence; empty without a derivation log.
        levels: evidence of definitions of kernels and signatures, by name.
    """
    worst = max(EVIDENCE.index(e) for e in claims.values())
    names = [n for n in structure.node_cone(REFERENCE, claims) if structure.node(REFERENCE, n) is not None]
    found = dict.fromkeys(names, worst)
    log = structure.derivation.result.log
    if log is not None:
        found = _by_step(structure, names, numbers, levels, worst)
    return {name: EVIDENCE[k] for name, k in found.items()}


def counted(nodes: Mapping[str, str]) -> dict[str, int]:
    """Evidence -> number of nodes."""
    return {level: sum(n == level for n in nodes.values()) for level in EVIDENCE}


def _by_step(
    structure: Structure, names: list[str], numbers: Mapping[str, int], levels: Mapping[str, str], worst: int
) -> dict[str, int]:
    log = structure.derivation.result.log
    assert log is not None
    best: dict[int, int] = {}
    for fact, step in log.step_levels("aligned", numbers).items():
        best[fact.args[0]] = min(step, best.get(fact.args[0], step))
    layout: dict[int, int] = defaultdict(int)
    for fact, step in log.step_levels("axis_at", numbers).items():
        layout[fact.args[0]] = max(step, layout[fact.args[0]])
    low = structure.derivation.reference
    defined: dict[str, int] = {}
    for user, _, name in low.defined:
        defined[user] = max(EVIDENCE.index(levels.get(name, "tested")), defined.get(user, 0))
    described = {low.op_node.get(op, ""): law for op, law in low.signature_law.items()}
    readers: dict[str, list[str]] = defaultdict(list)
    inside = set(names)
    for name in names:
        node = structure.node(REFERENCE, name)
        for read in set(node.refs()) if node is not None else ():
            if read in inside:
                readers[read].append(name)
    found: dict[str, int] = {}

    def level(name: str) -> int:
        tensor = low.tensors.get(name)
        own = best.get(structure.root(tensor.id)) if isinstance(tensor, Tensor) else None
        if own is None or not isinstance(tensor, Tensor):
            # no alignment of its own: what reads it was aligned over its head
            above = [found[r] for r in readers[name]]
            return max(above, default=worst)
        law = described.get(name)
        return max(own, layout[tensor.id], defined.get(name, 0), EVIDENCE.index(levels.get(law, "tested")) if law else 0)

    for name in _readers_first(names, readers):
        found[name] = level(name)
    return found


def _readers_first(names: list[str], readers: Mapping[str, list[str]]) -> list[str]:
    """Names in an order in which a node comes after all that read it."""
    waiting = {n: len(readers[n]) for n in names}
    reads: dict[str, list[str]] = defaultdict(list)
    for name in names:
        for reader in readers[name]:
            reads[reader].append(name)
    ready = [n for n in names if not waiting[n]]
    for name in ready:
        for read in reads[name]:
            waiting[read] -= 1
            if not waiting[read]:
                ready.append(read)
    return ready
