"""What every equality of a side rests on: the weakest rule or definition that it cannot do without.

An e-graph does not record which rule joined a class. So the terms of a side, with all forms that were read back, are saturated
again with the rules and definitions up to one level only: tensors that are in one class there are equal by these alone.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from emerge.algebra.encode import encode, global_name
from emerge.algebra.extend import Equality, Extension
from emerge.algebra.saturate import saturate
from emerge.facts.lower import Lowering


def equality_levels(low: Lowering, level: Callable[[str], int], exact: bool = True) -> dict[tuple[int, int], int]:
    """Level of every pair of tensors of a side that ``same`` holds for.

    A pair that a smaller saturation does not join has the highest level of all that matched, so a level is never too
    strong; it is too weak where the budget ends that saturation early.

    Args:
        level: of a rule or a definition, by its name; higher is weaker.
        exact: False = the highest level for all, without a saturation.
    """
    found = low.extension
    equalities: list[Equality] = list(found.equalities) if found is not None else []
    equalities += [e for f in low.forms for e in (Equality(f.kernel, f.composite), Equality(f.composite, f.kernel))]
    names = {*(found.fired if found is not None else ()), *(f.definition for f in low.forms)}
    known = sorted({level(name) for name in names})
    levels = {(e.tensor.id, e.other.id): known[-1] if known else 0 for e in equalities}
    if found is None or not exact:
        return levels
    for most in known[:-1]:
        rules = {name for name in found.fired if level(name) <= most}
        definitions = {f.definition for f in low.forms if level(f.definition) <= most}
        for e, joined in zip(equalities, _joined(low, equalities, rules, definitions)):
            if joined:
                levels[e.tensor.id, e.other.id] = min(most, levels[e.tensor.id, e.other.id])
    return levels


def _joined(low: Lowering, equalities: Sequence[Equality], rules: Collection[str], definitions: Collection[str]) -> list[bool]:
    """Which equalities follow from some rules and definitions alone."""
    found: Extension = low.extension
    tensors = dict.fromkeys(
        t for e in equalities for t in (e.tensor, e.other, *(e.term.operands if e.term is not None else ()))
    )
    lines = list(encode(low, tensors, found.added, definitions))
    lines += [f"(let $e{k} {e.term})" for k, e in enumerate(equalities) if e.term is not None]
    named = saturate(lines, found.files, found.budget, rules).named
    out = []
    for k, e in enumerate(equalities):
        tensor, other = named.get(global_name(e.tensor.id)), named.get(f"$e{k}" if e.term else global_name(e.other.id))
        out.append(tensor is not None and tensor == other)
    return out
