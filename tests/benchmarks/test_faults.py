"""The generator of ``benchmarks/faults`` on a small GPT: its rules, checked by execution, and the derivation."""

from __future__ import annotations

import dataclasses
from functools import cache

import pytest
from mini_gpt import RANGES, mini_gpt
from support.pairs import case_problem, largest_difference

from benchmarks.faults.blame import Correspondence, reference_places
from benchmarks.faults.common import Mutant
from benchmarks.faults.plant import FAULTS, KEEPS, KINDS, option_labels, plant
from emerge.graph.source import Case
from emerge.relate.derive import Derivation, Problem, derive

RANKS = 2
#: Changes of structure on one rank only: the derivation loses what is computed differently on the ranks.
ONE_RANK = {"commuted-on-one-rank", "identity-on-one-rank"}


@cache
def case() -> Case:
    return mini_gpt(RANKS)


def mutant(kind: str, seed: int) -> Mutant:
    found = plant(case(), kind, seed)
    assert found is not None, f"{kind} does not apply"
    return found


def problem(found: Mutant | None) -> Problem:
    return case_problem(case() if found is None else dataclasses.replace(case(), ranks=found.ranks), {"tp": RANKS})


@cache
def healthy() -> Derivation:
    return derive(problem(None), engine="embedded")


def proved(found: Mutant) -> bool:
    result = derive(problem(found), engine="embedded")
    return result.proved() == set(result.claims)


def test_the_unchanged_pair_is_proved() -> None:
    assert healthy().claims
    assert healthy().proved() == set(healthy().claims)


@pytest.mark.parametrize("kind", FAULTS)
def test_fault_changes_what_is_computed(kind: str) -> None:
    pytest.importorskip("torch", reason="executing graphs needs torch")
    for seed in range(2):
        found = mutant(kind, seed)
        assert largest_difference(problem(found), RANGES) > 1e-9, found.change.what


@pytest.mark.parametrize("kind", sorted(set(KEEPS) - ONE_RANK))
def test_harmless_change_changes_nothing(kind: str) -> None:
    pytest.importorskip("torch", reason="executing graphs needs torch")
    found = mutant(kind, 0)
    assert largest_difference(problem(found), RANGES) < 1e-12, found.change.what


@pytest.mark.parametrize("kind", FAULTS)
def test_fault_is_not_proved(kind: str) -> None:
    found = mutant(kind, 0)
    assert not proved(found), found.change.what


@pytest.mark.parametrize("kind", sorted(set(KEEPS) - ONE_RANK))
def test_harmless_change_stays_proved(kind: str) -> None:
    found = mutant(kind, 0)
    assert proved(found), found.change.what


@pytest.mark.parametrize("kind", KINDS)
def test_same_seed_same_mutant_and_consecutive_seeds_differ(kind: str) -> None:
    before = [[n.name for n in g.nodes] for g in case().ranks]
    assert mutant(kind, 1).ranks == mutant(kind, 1).ranks
    count = min(4, len(option_labels(case(), kind)))
    assert len({mutant(kind, seed).change.what for seed in range(count)}) == count
    assert [[n.name for n in g.nodes] for g in case().ranks] == before, "the case itself was changed"


@pytest.mark.parametrize("kind", FAULTS)
def test_blame_names_nodes_of_both_sides(kind: str) -> None:
    found = mutant(kind, 0)
    names = {n.name for n in case().reference.nodes} | {i.name for i in case().reference.inputs}
    places = reference_places(found.change, Correspondence(healthy()))
    assert places, found.change.what
    assert places <= names
    mutated = {v.name for g in found.ranks for v in (*g.nodes, *g.inputs)}
    assert set(found.change.changed) <= mutated


def test_a_shift_of_a_log_sum_exp_may_be_any_common_value() -> None:
    """Replacing the maximum by a sum over ranks, or taking it twice, is no fault and must not be offered."""
    maximum = next(n.name for n in case().ranks[0].nodes if "all_reduce" in n.op and n.args[1] == "max")
    for kind, offered in (("all-reduce-wrong-op", False), ("all-reduce-doubled", False), ("all-reduce-missing", True)):
        assert any(label.split("/")[0] == maximum for label in option_labels(case(), kind)) is offered, kind


def test_a_kind_that_does_not_apply_gives_none() -> None:
    alone = mini_gpt(1)
    for kind in ("rank-order-swapped", "all-reduce-missing", "vocab-offset"):
        assert (plant(alone, kind, 0) is None) == (kind != "vocab-offset"), kind
