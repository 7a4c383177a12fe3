"""What captures that trace their weight loading say about weights, as findings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from emerge.graph.model import Graph
from emerge.verdict.types import Finding


def weight_findings(reference: Sequence[Graph], implementation: Sequence[Graph]) -> list[Finding]:
    """Weights that the implementation drops, never loads, or loads and does not use; each weight once.

    They are warnings where the reference's result depends on the weight, notes otherwise, and change no verdict.
    """
    out: list[Finding] = []
    used = {label for g in reference for label in used_labels(g)}
    dropped: dict[str, list[Any]] = {}
    listed: dict[str, list[dict[str, None]]] = {"not_used": [], "never_loaded": []}
    for graph in implementation:
        weights = graph.extra.get("weights")
        if not isinstance(weights, dict):
            continue
        if not dropped:
            for box in weights.get("dropped") or ():
                dropped.setdefault(str(box["of"]), []).append(box["at"])
        for key, per_rank in listed.items():
            per_rank.append(dict.fromkeys(map(str, weights.get(key) or ())))
    for label, boxes in dropped.items():
        parts = "; ".join("[" + ", ".join(f"{a}:{b}" for a, b in box) + "]" for box in boxes[:3])
        severity = "warning" if label in used else "note"
        out.append(
            Finding(
                "WEIGHT_DROPPED",
                severity,
                f"the reference's weight {label!r} is not loaded by the implementation: {parts}",
                hint="a flag of the config that only one side knows, or a name that the loader skips",
            )
        )
    # one rank may well hold what another one uses: a bias that the first rank adds, a vocabulary's last rows
    everywhere = {key: [w for w in ranks[0] if all(w in r for r in ranks)] if ranks else [] for key, ranks in listed.items()}
    for label in everywhere["not_used"]:
        severity = "warning" if label in used else "note"
        message = f"the implementation loads {label!r}, and no result depends on it"
        out.append(Finding("WEIGHT_NOT_USED", severity, message))
    for label in everywhere["never_loaded"]:
        message = f"no weight of the reference reaches the implementation's parameter {label!r}"
        out.append(Finding("WEIGHT_NOT_LOADED", "warning", message))
    return out + _rounded(reference, implementation, used)


#: Significant bits of floating types.
_BITS = {"float64": 53, "float32": 24, "float16": 11, "bfloat16": 8}


def _rounded(reference: Sequence[Graph], implementation: Sequence[Graph], used: set[str]) -> list[Finding]:
    """Weights that the implementation holds in a type of fewer digits than the reference: the same number but for rounding."""
    types = {label: i.dtype for g in reference for i in g.inputs for label in (i.label or i.name, *i.extra.get("aliases", ()))}
    found: dict[str, Finding] = {}
    for graph in implementation:
        for item in graph.inputs:
            for box in item.extra.get("loaded") or ():
                label = box.get("of")
                before, after = types.get(label), item.dtype
                if label in used and _BITS.get(after, 99) < _BITS.get(before or "", 0):
                    message = f"the weight {label!r} is {before} in the reference and is rounded to {after} when it is loaded"
                    found.setdefault(label, Finding("PRECISION", "warning", message))
    return list(found.values())


def used_labels(graph: Graph) -> set[str]:
    """Labels of the inputs that an output depends on."""
    needed = {o for o in graph.outputs if o is not None}
    for node in reversed(graph.nodes):
        if node.name in needed:
            needed.update(node.refs())
    return {
        label for i in graph.inputs if i.name in needed for label in (i.label or i.name, *i.extra.get("aliases", ()))
    }
