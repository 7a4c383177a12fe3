"""What every equality of a side rests on: the weakest rule or definition that it cannot do without.

An e-graph does not record which rule joined a class. So the terms of a side, with all forms that were read back, are saturated
again with the rules and definitions up to one level only: tensors that are in one class there are equal by these alone.
"""

from __future__ import annotations

from collections.abc import Callable

from emerge.algebra.encode import encode, global_name
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
    pairs = [(v, w) for v, w in found.pairs] if found is not None else []
    pairs += [pair for f in low.forms for pair in ((f.kernel, f.composite), (f.composite, f.kernel))]
    names = {*(found.fired if found is not None else ()), *(f.definition for f in low.forms)}
    known = sorted({level(name) for name in names})
    levels = dict.fromkeys(((v.id, w.id) for v, w in pairs), known[-1] if known else 0)
    if found is None or not exact:
        return levels
    for most in known[:-1]:
        rules = {name for name in found.fired if level(name) <= most}
        tensors = dict.fromkeys(t for pair in pairs for t in pair)
        admitted = {f.definition for f in low.forms if level(f.definition) <= most}
        named = saturate(encode(low, tensors, admitted), found.files, found.budget, rules).named
        for v, w in pairs:
            one, other = named.get(global_name(v.id)), named.get(global_name(w.id))
            if one is not None and one == other:
                levels[v.id, w.id] = min(most, levels[v.id, w.id])
    return levels
