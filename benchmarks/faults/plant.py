"""Plants one fault in the rank graphs of a case, or makes one change that keeps their meaning; seeded.

A kind lists its options, the concrete changes it could make to this case, and the seed picks one: consecutive seeds
walk through a shuffled list, so ten seeds give ten different changes where there are ten. What an option may be is
restricted by the generator's own rules, documented with each kind, so that no planted fault is equivalent by accident:

- only nodes that a claimed output reads, on every rank (dead code is never changed);
- only collectives whose groups hold more than one rank;
- a maximum that is only the shift of a log-sum-exp may be any value that all ranks share;
- a sum of one value of known sign and zeros is also their minimum or maximum;
- repeated maxima and minima do not change anything; one head has no interleaving; operands of one sum or product have
  no order; a norm takes out the scale of its input; tokens outside the vocabulary do not occur.

Nothing here asks the verifier. `tests/benchmarks` executes the changes of all kinds on a small graph.
"""

from __future__ import annotations

import random

from benchmarks.faults import collectives, keep, operators
from benchmarks.faults.common import Kind, Mutant, Plan
from emerge.graph.source import Case

#: Kinds of faults.
FAULTS: dict[str, Kind] = {
    "all-reduce-missing": collectives.all_reduce_missing,
    "all-reduce-doubled": collectives.all_reduce_doubled,
    "all-reduce-wrong-group": collectives.all_reduce_wrong_group,
    "all-reduce-wrong-op": collectives.all_reduce_wrong_op,
    "all-gather-dropped": collectives.all_gather_dropped,
    "all-gather-wrong-dim": collectives.all_gather_wrong_dim,
    "reduce-scatter-dropped": collectives.reduce_scatter_dropped,
    "reduce-scatter-wrong-dim": collectives.reduce_scatter_wrong_dim,
    "reduce-scatter-wrong-op": collectives.reduce_scatter_wrong_op,
    "bias-on-every-rank": collectives.bias_on_every_rank,
    "rank-order-swapped": collectives.rank_order_swapped,
    "vocab-offset": operators.vocab_offset,
    "fused-split": operators.fused_split,
    "constant": operators.constant,
    "softmax-axis": operators.softmax_axis,
    "norm-axis": operators.norm_axis,
    "weights-exchanged": operators.weights_exchanged,
    "residual-dropped": operators.residual_dropped,
}
#: Changes that keep the meaning.
KEEPS: dict[str, Kind] = {
    "reordered": keep.reordered,
    "renamed": keep.renamed,
    "reshape-factored": keep.reshape_factored,
    "transposes-cancelled": keep.transposes_cancelled,
    "commuted": keep.commuted,
    "identity-inserted": keep.identity_inserted,
    "wait-split": keep.wait_split,
    "commuted-on-one-rank": keep.commuted_on_one_rank,
    "identity-on-one-rank": keep.identity_on_one_rank,
}
KINDS: dict[str, Kind] = {**FAULTS, **KEEPS}


def plant(case: Case, kind: str, seed: int) -> Mutant | None:
    """One change of a kind.

    Returns:
        The changed rank graphs (copies) with a description, or None when the kind does not apply to this case.

    Raises:
        KeyError: unknown kind.
        GraphError: the changed graphs are not well-formed (a mistake of the generator).
    """
    plan = Plan(case, random.Random(f"{kind}/{seed}/parameters"))
    options = KINDS[kind](plan)
    if not options:
        return None
    labels = dict(options)
    order = sorted(labels)
    random.Random(f"{kind}/{seed // len(order)}/order").shuffle(order)
    change = labels[order[seed % len(order)]]()
    return Mutant(kind, seed, change, [e.check() for e in plan.editors])


def option_labels(case: Case, kind: str) -> list[str]:
    """Labels of everything a kind could do to a case."""
    return sorted(label for label, _ in KINDS[kind](Plan(case, random.Random(0))))
