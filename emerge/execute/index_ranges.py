"""Ranges of integer inputs at the lengths that are run."""

from __future__ import annotations

from collections.abc import Sequence

from emerge.execute.placement import Relation
from emerge.execute.sampling import infer_ranges
from emerge.graph.model import Graph, is_integer


def input_ranges(
    reference: Graph,
    ranks: Sequence[Graph],
    captured: Graph,
    captured_ranks: Sequence[Graph],
    relations: Sequence[Relation],
) -> tuple[dict[str, int], list[str]]:
    """Exclusive upper bounds of integer inputs of the reference, from the tables they index.

    A table of the implementation bounds an input too where, as captured, it is at least as long as what the
    reference indexes (a shard of a table is not: its ranks mask what they do not hold). Reduced lengths keep no order
    between tables, so the shorter one counts.

    Returns:
        Bounds by name, and the inputs that index no table anywhere.
    """
    now, before = infer_ranges(reference), infer_ranges(captured)
    by_rank, by_rank_before = [infer_ranges(g) for g in ranks], [infer_ranges(g) for g in captured_ranks]
    bounds: dict[str, int] = {}
    unknown = []
    for item in reference.inputs:
        if not is_integer(item.dtype) or item.dtype == "bool" or item.const is not None:
            continue
        found = [
            (by_rank_before[rank][member][1], by_rank[rank][member][1])
            for r in relations
            if r.reference == item.name
            for rank, member in r.members()
            if member in by_rank[rank] and member in by_rank_before[rank]
        ]
        if item.name in now:
            at_capture = before.get(item.name, now[item.name])[1]
            bounds[item.name] = min([now[item.name][1], *(new for old, new in found if old >= at_capture)])
        elif found:
            bounds[item.name] = min(new for _, new in found)
        else:
            unknown.append(item.name)
    return bounds, unknown
