"""``PRECISION`` findings: where the sides round one value differently. They stand beside the verdict and never change it."""

from __future__ import annotations

from typing import Any

from emerge.facts.base import IMPLEMENTATION, REFERENCE
from emerge.facts.number_types import SIGNIFICAND
from emerge.verdict.localize import MOST_FINDINGS, Structure
from emerge.verdict.types import Finding

KIND = "PRECISION"


def precision_findings(structure: Structure) -> list[Finding]:
    """One finding per place where the relation ``precision`` has the sides round differently.

    The first column of a row is a computation of the reference, the second its counterpart, as numbered by
    ``emerge.facts.number_types``. Types are those of the reference and of the implementation, in this order.
    """
    derivation = structure.derivation
    ref, imp = derivation.reference.number_types, derivation.implementation.number_types
    rows = derivation.result.relations.get("precision", set())
    order = {n.name: i for i, n in enumerate(derivation.problem.reference.nodes)}
    known = [r for r in rows if r[0] in ref.ids and r[1] in imp.ids]
    found: dict[Any, Finding] = {}
    for s, d, expected, got, how in sorted(known, key=lambda r: (order.get(ref.ids[r[0]], -1), r)):
        names = (ref.ids[s], imp.ids[d])
        casts = (
            _rounding(structure, REFERENCE, names[0], expected),
            _rounding(structure, IMPLEMENTATION, names[1], got),
        )
        narrow = SIGNIFICAND[got] < SIGNIFICAND[expected]
        # one cast is one finding, whatever it is seen from
        cast = casts[1] if narrow else casts[0]
        key = (narrow, cast) if cast is not None else (narrow, names[0])
        if key not in found and not any(f.reference_nodes[0] == names[0] for f in found.values()):
            found[key] = _finding(structure, names, casts, (expected, got), how)
    listed = list(found.values())
    if len(listed) > MOST_FINDINGS:
        rest = len(listed) - MOST_FINDINGS
        listed = listed[:MOST_FINDINGS]
        listed[-1].hint = f"{listed[-1].hint}; {rest} more places are not listed"
    return listed


def _rounding(structure: Structure, side: int, name: str, dtype: str) -> str | None:
    """The cast that rounds the result of a node to ``dtype``, or one of its operands before it is read."""
    types = structure.lowering(side).number_types
    own = types.computations[name]
    read = [w for c in types.computations.values() for w in c.ways if w.source == name] + list(types.read)
    after = [w.rounded for w in read if w.source == name and w.dtype == dtype and w.rounded != name]
    before = [w.rounded for w in own.ways if w.dtype == dtype and w.rounded != w.source]
    return next(iter(after + before), None)


def _finding(
    structure: Structure, names: tuple[str, str], casts: tuple[str | None, str | None], types: tuple[str, str], how: str
) -> Finding:
    nodes = [_shown(structure, side, name) for side, name in zip((REFERENCE, IMPLEMENTATION), names)]
    verb = {"read": "is used in", "accumulates": "is added up in"}.get(how, "reads its operand in")
    narrow = SIGNIFICAND[types[1]] < SIGNIFICAND[types[0]]
    wide = types[0] if narrow else types[1]
    if narrow:
        side, other = "implementation", casts[1]
        hint = f"compute it in {wide} and round afterwards" if other is None else f"move the cast {other!r} behind it"
        hint += ", or ignore this finding where the difference is meant (ignore: [{finding: PRECISION, ...}])"
    else:
        hint = f"round to {types[0]} where the reference does, if results are to agree bit for bit"
        side = "reference"
    message = (
        f"reference value {nodes[0]} {verb} {types[0]}, its counterpart {nodes[1]} {verb} {types[1]}: "
        f"the {side} is less precise here"
    )
    listed = [[n for n in (name, cast) if n] for name, cast in zip(names, casts)]
    return Finding(
        KIND,
        "warning" if narrow else "note",
        message,
        list(dict.fromkeys(listed[0])),
        next((x for n in listed[0] if (x := structure.source(REFERENCE, n))), None),
        [m for n in dict.fromkeys(listed[1]) for m in structure.members(n)],
        next((x for n in reversed(listed[1]) if (x := structure.source(IMPLEMENTATION, n))), None),
        found=types[1],
        expected=types[0],
        hint=hint,
    )


def _shown(structure: Structure, side: int, name: str) -> str:
    node = structure.node(side, name)
    return f"{name!r} ({node.op})" if node is not None else f"{name!r} (an input)"
