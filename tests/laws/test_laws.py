"""Every law on hand-written pairs, on both engines: right pairs are proved, wrong ones are not, execution agrees."""

from __future__ import annotations

from functools import cache

import cases_attention
import cases_collective
import cases_layout
import cases_local
import cases_partial
import cases_ranks
import cases_vocabulary
import pytest
from law_case import LawCase
from support.pairs import largest_difference, stops, unproved

from emerge.engine.run import available_engines
from emerge.relate.derive import Problem, derive

MODULES = (cases_local, cases_layout, cases_attention, cases_collective, cases_partial, cases_vocabulary, cases_ranks)
CASES: dict[str, LawCase] = {c.name: c for module in MODULES for c in module.CASES}
RIGHT = [(name, variant) for name, c in CASES.items() for variant in c.right]
WRONG = [(name, variant) for name, c in CASES.items() for variant in c.wrong]


@cache
def problem(name: str, variant: str) -> Problem:
    return CASES[name].pair(variant).problem()


@pytest.fixture(params=["embedded", "souffle"])
def engine(request: pytest.FixtureRequest) -> str:
    if request.param not in available_engines():
        pytest.skip(f"the {request.param} engine is not installed here")
    return str(request.param)


def test_names_are_unique_and_every_law_has_both_twins() -> None:
    assert len(CASES) == sum(len(module.CASES) for module in MODULES)
    for name, case in CASES.items():
        assert case.right, name
        assert case.wrong, name
        assert not set(case.right) & set(case.wrong), name
        assert set(case.unproved) <= set(case.right), name


@pytest.mark.parametrize(("name", "variant"), RIGHT)
def test_right_pair_is_proved(name: str, variant: str, engine: str, request: pytest.FixtureRequest) -> None:
    if variant in CASES[name].unproved:
        request.applymarker(pytest.mark.xfail(reason=CASES[name].unproved[variant], strict=True))
    result = derive(problem(name, variant), engine=engine)
    assert not unproved(result), stops(result)


@pytest.mark.parametrize(("name", "variant"), WRONG)
def test_wrong_pair_is_not_proved(name: str, variant: str, engine: str) -> None:
    assert unproved(derive(problem(name, variant), engine=engine)), "SOUNDNESS: a wrong pair is proved"


@pytest.mark.parametrize(("name", "variant"), RIGHT)
def test_right_pair_is_right(name: str, variant: str) -> None:
    pytest.importorskip("torch", reason="executing graphs needs torch")
    for seed in (0, 1):
        assert largest_difference(problem(name, variant), CASES[name].ranges, seed) < 1e-6


@pytest.mark.parametrize(("name", "variant"), WRONG)
def test_wrong_pair_is_wrong(name: str, variant: str) -> None:
    pytest.importorskip("torch", reason="executing graphs needs torch")
    # A masking error may not show in every sample; it has to show in one.
    assert max(largest_difference(problem(name, variant), CASES[name].ranges, seed) for seed in range(3)) > 1e-4
