"""Does the lowering say what the graph computes? Laws speak about lowered operators; a false fact may be its fault."""

from __future__ import annotations

from typing import Any

from emerge.rules.bodies import NotEvaluable
from emerge.rules.lowered import Values
from emerge.rules.statements import Statements, equal

#: Kinds that the index domain reads as exact arithmetic on integers.
EXACT_KINDS = ("addc", "mulc", "add", "sub", "keep", "fill", "fill0", "cast")


def lowering_faults(statements: Statements) -> dict[int, str]:
    """Tensor -> what is wrong with its lowering.

    - nodes that share a tensor must have equal values;
    - the lowered operator must give the executed value, and on the implementation side be undefined where that is;
    - integer arithmetic must be exact (no wrap-around, no truth values added).
    """
    found: dict[int, str] = {}
    for side, values in statements.values.items():
        integers = {t for t in values.lowering.nodes_of if _index_arithmetic(values, t)}
        for tensor, names in values.lowering.nodes_of.items():
            for rank in range(values.ranks):
                known = [(n, values.of_node(n, rank)) for n in names]
                known = [(n, v) for n, v in known if hasattr(v, "shape")]
                if not known:
                    continue
                wrong = _contradiction(values, tensor, rank, known, side, tensor in integers)
                if wrong:
                    found[tensor] = f"side {side} rank {rank}: {wrong}"
                    break
    return found


def _index_arithmetic(values: Values, tensor: int) -> bool:
    form = values.lowered.forms.get(values.lowered.native.get(tensor, -1))
    return form is not None and form.kind in EXACT_KINDS


def _contradiction(values: Values, tensor: int, rank: int, known: list[tuple[str, Any]], side: int, exact: bool) -> str:
    name, value = known[0]
    for other, found in known[1:]:
        if tuple(found.shape) != tuple(value.shape):
            return f"{name} and {other} share a tensor and have shapes {list(value.shape)}, {list(found.shape)}"
        outcome = equal(value, found, found)
        if outcome.holds is False:
            return f"{name} and {other} share a tensor: {outcome.detail}"
    lowered = values.lowered
    form = lowered.forms.get(lowered.native.get(tensor, -1))
    try:
        if tensor in lowered.layout:
            computed = values.rearranged(tensor, rank)
        elif form is not None and form.kind != "lookup":
            # (a look-up takes its index in range, an assumption that is listed)
            computed = values.form(form.id, rank)
            if exact and not value.is_floating_point():
                computed = values.form(form.id, rank, exact=True)
        else:
            return ""
    except (NotEvaluable, RuntimeError, IndexError, TypeError, ValueError):
        return ""
    body = form.body if form is not None else "layout"
    if tuple(computed.shape) != tuple(value.shape):
        return f"{name} has shape {list(value.shape)}, its lowering ({body}) {list(computed.shape)}"
    # on the implementation side a lowering may not be more defined than what is executed
    left, right = (computed, value) if side == 2 else (value, computed)
    outcome = equal(left, right, right)
    return f"{name} is not what its lowering ({body}) computes: {outcome.detail}" if outcome.holds is False else ""
