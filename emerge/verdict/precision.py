"""``PRECISION`` findings: where one value is computed in different floating types (``datalog/analysis/precision.dl``).

They stand beside the verdict: over the reals a cast between floating types changes nothing (DESIGN: verdicts).
"""

from __future__ import annotations

from emerge.facts.base import IMPLEMENTATION, REFERENCE
from emerge.facts.families import FamilyInput
from emerge.verdict.localize import Structure
from emerge.verdict.types import Finding

#: Bits of the significand, for which type is the narrower.
_BITS = {"float64": 52, "float32": 23, "float16": 10, "bfloat16": 7, "float8_e4m3fn": 3, "float8_e5m2": 2}


def precision_findings(structure: Structure) -> list[Finding]:
    """One finding per first place of a stretch, and one for all inputs whose types differ."""
    rows = sorted(structure.derivation.result.relations.get("precision", ()), key=repr)
    found: dict[tuple[str, str, str], Finding] = {}
    inputs: list[tuple[str, str, str, str]] = []
    for ours, theirs, wide, narrow in rows:
        name, other = structure.node_name(REFERENCE, ours), structure.node_name(IMPLEMENTATION, theirs)
        if structure.lowering(REFERENCE).op_node.get(ours) == "":
            inputs.append((_named(structure, REFERENCE, ours), _named(structure, IMPLEMENTATION, theirs), wide, narrow))
        elif name and other and not _moves(structure, name):
            found.setdefault((name, wide, narrow), _finding(structure, name, other, wide, narrow))
    findings = list(found.values())
    pairs = [p for p in inputs if not _cut(structure, p[0])]
    if pairs:
        findings.append(_inputs(pairs))
    return findings


def _moves(structure: Structure, name: str) -> bool:
    """Whether a node moves values: an operator of its own is then a part of one before it, which is told there."""
    node = structure.node(REFERENCE, name)
    return node is not None and node.op.split(".")[1:2] in (["slice"], ["cat"], ["split"], ["chunk"], ["select"], ["stack"])


def _finding(structure: Structure, name: str, other: str, ours: str, theirs: str) -> Finding:
    node, partner = structure.node(REFERENCE, name), structure.node(IMPLEMENTATION, other)
    left = f"{name!r} ({node.op})" if node is not None else repr(name)
    right = f"{other!r} ({partner.op})" if partner is not None else repr(other)
    narrower = _BITS.get(theirs, 0) < _BITS.get(ours, 0)
    return Finding(
        "PRECISION",
        "warning" if narrower else "note",
        f"the reference computes {left} in {ours}, the implementation {right} in {theirs}, of operands of one type",
        [name],
        structure.source(REFERENCE, name),
        structure.members(other),
        structure.source(IMPLEMENTATION, other),
        found=theirs,
        expected=ours,
        hint=f"cast to {ours} before {other!r}, as the reference does, and back behind it" if narrower
        else f"the reference rounds to {ours} here; cast before {other!r} if its rounding is to be kept",
    )  # fmt: skip


def _inputs(pairs: list[tuple[str, str, str, str]]) -> Finding:
    name, other, ours, theirs = pairs[0]
    more = f" and {len(pairs) - 1} more" if len(pairs) > 1 else ""
    return Finding(
        "PRECISION",
        "note",
        f"the programs were captured in different types: input {name!r} is {ours}, {other!r} is {theirs}{more}; what is "
        "computed from these in different types is not listed",
        [p[0] for p in pairs[:1]],
        found=theirs,
        expected=ours,
        hint="capture both in one type to see where their precision parts",
    )


def _named(structure: Structure, side: int, op: int) -> str:
    """Name of the input that an operator without operands stands for."""
    result = structure.result_of.get(op, -1)
    names = structure.lowering(side).nodes_of.get(result, [])
    return names[0] if names else "?"


def _cut(structure: Structure, name: str) -> bool:
    """Whether an input is a value inside the whole graph, where its type was looked at already."""
    try:
        value = structure.family(REFERENCE).value(name)
    except KeyError:
        return False
    return isinstance(value, FamilyInput) and value.cut
