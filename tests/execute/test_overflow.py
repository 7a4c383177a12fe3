"""Samples in which float64 overflows or underflows refute nothing; real faults are found in the others."""

from __future__ import annotations

import pytest

import emerge
from emerge.execute.overflow import out_of_range
from emerge.verdict.types import PairResult

torch = pytest.importorskip("torch")
F = torch.nn.functional

X, V = torch.randn(3, 5), torch.randn(5, 4)


def compare(reference: object, implementation: object, *inputs: object) -> PairResult:
    return emerge.compare(reference, implementation, inputs=inputs or (X, V))  # type: ignore[arg-type]


def test_a_softmax_normalised_at_the_end_is_not_called_wrong() -> None:
    found = compare(
        lambda x, v: F.softmax(20 * x, -1) @ v,
        lambda x, v: ((20 * x).exp() @ v) / (20 * x).exp().sum(-1, keepdim=True),
    )
    assert found.verdict != "NOT_EQUIVALENT"


def test_an_exponential_too_small_for_float64_is_not_zero() -> None:
    assert compare(lambda x: x * 100, lambda x: (x * 100).exp().log(), X).verdict != "NOT_EQUIVALENT"


@pytest.mark.parametrize(
    "wrong",
    [
        lambda x, v: (x.exp() @ v) / x.exp().sum(-1, keepdim=True) * 1.001,
        lambda x, v: (x.exp() @ v) / x.exp().sum(0, keepdim=True).mean(),
        lambda x, v: F.softmax(x, -1) @ v / (x > 0).any(-1, keepdim=True),
    ],
)
def test_faults_beside_exponentials_are_found(wrong: object) -> None:
    assert compare(lambda x, v: F.softmax(x, -1) @ v, wrong).verdict == "NOT_EQUIVALENT"


@pytest.mark.parametrize(
    ("program", "x", "overflow", "small"),
    [
        (lambda x: x.exp(), 800.0, True, True),
        (lambda x: x.exp(), -800.0, False, True),
        (lambda x: x.exp(), -65504.0, False, False),  # a mask
        (lambda x: x.exp(), float("-inf"), False, False),
        (lambda x: 1 / x, 0.0, False, False),
        (lambda x: x.log(), 0.0, False, False),
        (lambda x: x * 1e200, 1e200, True, True),
        (lambda x: x * 2, float("inf"), False, False),
        (lambda x: x * 1e-200, 1e-200, False, True),
        (lambda x: x * 0.0, 3.0, False, False),
    ],
)
def test_what_leaves_the_range(program: object, x: float, overflow: bool, small: bool) -> None:
    from emerge.capture.trace import capture
    from emerge.execute.lockstep import run_sequential

    graph = capture(program, (torch.ones(2),), name="program")  # type: ignore[arg-type]
    value = torch.full((2,), x, dtype=torch.float64)
    values = {graph.inputs[0].name: value} | run_sequential(graph, {graph.inputs[0].name: value}, keep="all")
    assert (out_of_range(graph, values, False) is not None, out_of_range(graph, values, True) is not None) == (
        overflow, small,
    )  # fmt: skip
