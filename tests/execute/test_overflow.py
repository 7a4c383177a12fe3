"""Samples in which float64 overflows or underflows refute nothing; real faults are found in the others."""

from __future__ import annotations

from typing import Any

import pytest

import emerge
from emerge.capture.trace import capture
from emerge.execute.arithmetic import Arithmetic
from emerge.execute.lockstep import run_sequential
from emerge.execute.options import Options
from emerge.verdict.types import PairResult

torch = pytest.importorskip("torch")
F = torch.nn.functional

X, V = torch.randn(3, 5).double(), torch.randn(5, 4).double()


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


#: A number far outside the range of float64, by exponent.
BIG = 1e200
EQUAL = {
    "log of softmax": (lambda x: F.softmax(2000 * x, -1).log(), lambda x: F.log_softmax(2000 * x, -1)),
    "log of sigmoid": (lambda x: (800 * x).sigmoid().log(), lambda x: F.logsigmoid(800 * x)),
    "log of product": (lambda x: ((-800 * x.abs()).exp() * (-900 * x.abs()).exp()).log(), lambda x: -1700 * x.abs()),
    "by an exponential": (lambda x: x / (-3000 * x.abs()).exp(), lambda x: x * (3000 * x.abs()).exp()),
    "log1p": (
        lambda x: (-900 * x.abs()).exp().log1p() / (-900 * x.abs()).exp(),
        lambda x: (1 + (-900 * x.abs()).exp()).log() / (-900 * x.abs()).exp(),
    ),
    "expm1": (lambda x: F.softplus(-900 * x.abs()).expm1().log(), lambda x: -900 * x.abs()),
    "inverse of softmax": (
        lambda x: 1 / F.softmax(1500 * x, -1),
        lambda x: ((1500 * x).logsumexp(-1, keepdim=True) - 1500 * x).exp(),
    ),
    "product": (lambda x: torch.cat([x / BIG, x * BIG], -1).prod(-1), lambda x: torch.cat([x, x], -1).prod(-1)),
    "running product": (
        lambda x: torch.cat([x / BIG, x * BIG], -1).cumprod(-1)[:, -1],
        lambda x: torch.cat([x, x], -1).prod(-1),
    ),
    "norm": (
        lambda x: torch.linalg.vector_norm(x / BIG, dim=-1),
        lambda x: torch.linalg.vector_norm(x, dim=-1) / BIG,
    ),
    "norm with few digits": (
        lambda x: torch.linalg.vector_norm(x * 1e-161, dim=-1) * 1e161,
        lambda x: torch.linalg.vector_norm(x, dim=-1),
    ),
    "norm of high order": (
        lambda x: torch.linalg.vector_norm(x * 1e-3, ord=100, dim=-1),
        lambda x: torch.linalg.vector_norm(x, ord=100, dim=-1) * 1e-3,
    ),
    "layer norm": (lambda x: F.layer_norm(x * BIG, (5,), eps=0.0), lambda x: F.layer_norm(x, (5,), eps=0.0)),
    "variance": (lambda x: (x / BIG).var(-1) * BIG * BIG, lambda x: x.var(-1)),
    "log of sum of exponentials": (lambda x: (900 * x).exp().sum(-1).log(), lambda x: (900 * x).logsumexp(-1)),
    "gelu in its tail": (lambda x: 1 / F.gelu(9 * x), lambda x: 2 / (9 * x * torch.erfc(-9 * x / 2**0.5))),
    "saturated": (lambda x: (30 * x).tanh().atanh(), lambda x: 30 * x),
    "saturated twice": (lambda x: (1 - (50 * x).sigmoid()).log(), lambda x: F.logsigmoid(-50 * x)),
    "absorbed": (lambda x: 1 / ((x + 1e20) - 1e20), lambda x: 1 / x),
    "undefined after rounding": (
        lambda x: torch.xlogy(F.gelu(800 * x), 40.0 + F.gelu(800 * x)),
        lambda x: (g := 400 * x * (1 + torch.erf(800 * x / 2**0.5))) * (40.0 + g).log(),
    ),
    "all too small": (
        lambda x: torch.xlogy(F.mish(-1e5 - x.abs()).abs(), F.mish(-1e5 - x.abs()).abs()),
        lambda x: (g := ((1e5 + x.abs()) * (1 + (-1e5 - x.abs()).exp()).log().tanh()).abs()) * g.log(),
    ),
    "zero after rounding": (
        lambda x: F.gelu(-40 - x.abs()) * F.gelu(-40 - x.abs()).abs().log(),
        lambda x: (g := (-20 - x.abs() / 2) * (1 + torch.erf((-40 - x.abs()) / 2**0.5))) * g.abs().log(),
    ),
    "matrix product": (lambda x: (x * 1e-170) @ (x.T * 1e-170) * 1e170 * 1e170, lambda x: x @ x.T),
    "decided on": (lambda x: (F.softmax(2000 * x, -1) > 0).float(), lambda x: 1 + 0 * x),
    "two decided on": (
        lambda x: ((-1000 * x.abs()).exp()[:, :1] > (-1000 * x.abs()).exp()[:, 1:]).float(),
        lambda x: (x.abs()[:, :1] < x.abs()[:, 1:]).float(),
    ),
    "hidden behind a bump": (
        lambda x: (-((F.softmax(2000 * x, -1).log() + 1000) ** 2) / 1e5).exp(),
        lambda x: (-((F.log_softmax(2000 * x, -1) + 1000) ** 2) / 1e5).exp(),
    ),
    "beyond any mask": (lambda x: (-1e35 * x.abs()).exp().log(), lambda x: -1e35 * x.abs()),
    "spelled with exponentials": (
        lambda x: (500 * x).tanh(),
        lambda x: ((500 * x).exp() - (-500 * x).exp()) / ((500 * x).exp() + (-500 * x).exp()),
    ),
}


@pytest.mark.parametrize("name", EQUAL)
def test_what_float64_has_no_number_for_refutes_nothing(name: str) -> None:
    reference, implementation = EQUAL[name]
    assert compare(reference, implementation, X).verdict != "NOT_EQUIVALENT"


def masked(x: Any, scale: float, masks: int) -> Any:
    mask = torch.full((5, 5), torch.finfo(torch.float32).min).triu(1)
    scores = x @ x.transpose(-1, -2) * scale
    for _ in range(masks):
        scores = scores + mask
    return F.softmax(scores, -1) @ x


SQUARE = torch.randn(2, 5, 5).double()
WRONG = {
    "log of softmax": (lambda x: F.softmax(2000 * x, -1).log(), lambda x: F.log_softmax(2000 * x, -1) * 1.001, X),
    "log of sigmoid": (lambda x: (800 * x).sigmoid().log(), lambda x: F.logsigmoid(801 * x), X),
    "inverse of softmax": (
        lambda x: 1 / F.softmax(1500 * x, -1),
        lambda x: ((1500 * x).logsumexp(-1, keepdim=True) - 1501 * x).exp(),
        X,
    ),
    "log of sum of exponentials": (lambda x: (9 * x).exp().sum(-1).log(), lambda x: (9.1 * x).logsumexp(-1), X),
    "product": (lambda x: x.prod(-1), lambda x: x.prod(-1) * 1.0001, X),
    "saturated": (lambda x: (3 * x).tanh().atanh(), lambda x: 3.001 * x, X),
    "gelu": (lambda x: F.gelu(x), lambda x: F.gelu(x, approximate="tanh"), X),
    "small eps": (lambda x: F.layer_norm(x, (5,), eps=1e-5), lambda x: F.layer_norm(x, (5,), eps=1e-6), X),
    "denominator": (lambda x: (900 * x).sigmoid(), lambda x: 1 / (1.001 + (-900 * x).exp()), X),
    "scale under a mask": (lambda x: masked(x, 0.3, 1), lambda x: masked(x, 0.31, 1), SQUARE),
    "scale under two masks": (lambda x: masked(x, 0.3, 2), lambda x: masked(x, 0.31, 2), SQUARE),
    "no mask for two": (lambda x: masked(x, 0.3, 2), lambda x: masked(x, 0.3, 0), SQUARE),
    "row without a key": (lambda x: F.softmax(x, -1), lambda x: F.softmax(x + torch.full((3, 1), -1e999), -1), X),
}


@pytest.mark.parametrize("name", WRONG)
def test_their_wrong_twins_are_refuted(name: str) -> None:
    reference, implementation, x = WRONG[name]
    assert compare(reference, implementation, x).verdict == "NOT_EQUIVALENT"


@pytest.mark.parametrize(
    ("program", "x", "overflows", "underflows"),
    [
        (lambda x: x.exp(), 800.0, True, False),
        (lambda x: x.exp(), -800.0, False, True),
        (lambda x: x.exp(), float("-inf"), False, False),
        (lambda x: F.softmax(x, -1), float("-inf"), False, False),
        (lambda x: F.gelu(x), -40.0, False, True),
        (lambda x: 1 / x, 0.0, False, False),
        (lambda x: x.log(), 0.0, False, False),
        (lambda x: x.log(), 1.0, False, False),
        (lambda x: x.atanh(), 1.0, False, False),
        (lambda x: x * 1e200, 1e200, True, False),
        (lambda x: x * 2, float("inf"), False, False),
        (lambda x: x * 1e-200, 1e-200, False, True),
        (lambda x: x * 1e-160, 1e-160, False, True),  # some digits are left
        (lambda x: x * 0.0, 3.0, False, False),
        (lambda x: x - x, 3.0, False, False),
        (lambda x: x @ x, 1e-200, False, True),
        (lambda x: x @ x, 0.0, False, False),
        (lambda x: x.var(), 1e-100, True, False),  # what happens inside is not seen
        (lambda x: x.prod(), 1e-200, True, False),
        (lambda x: x.relu(), -3.0, False, False),
    ],
)
def test_what_leaves_the_range(program: Any, x: float, overflows: bool, underflows: bool) -> None:
    graph = capture(program, (torch.ones(2),), name="program")
    value = torch.full((2,), x, dtype=torch.float64)
    watched = Arithmetic()
    run_sequential(graph, {graph.inputs[0].name: value}, options=Options(arithmetic=watched))
    assert (bool(watched.overflowed), bool(watched.underflowed)) == (overflows, underflows)


def test_two_numbers_too_small_for_float64_come_in_both_orders() -> None:
    graph = capture(lambda x: x.exp(), (torch.ones(20),), name="program")
    value = {graph.inputs[0].name: torch.full((20,), -900.0, dtype=torch.float64)}
    up, down = (
        run_sequential(graph, value, options=Options(arithmetic=Arithmetic(tiny=tiny)))[graph.outputs[0]]
        for tiny in (1, -1)
    )
    assert bool((up > 0).all())
    assert bool((down > 0).all())
    assert torch.equal(up.argsort(), down.argsort(descending=True))


def test_what_a_definition_runs_belongs_to_the_node_it_defines() -> None:
    inner = capture(lambda x: x.exp() + 1, (torch.ones(2),), name="inner")
    watched, value = Arithmetic(tiny=1), torch.full((2,), -800.0, dtype=torch.float64)
    with watched.at(inner, "outer"):
        run_sequential(inner, {inner.inputs[0].name: value}, options=Options(arithmetic=watched))
    assert watched.underflowed == {(id(inner), "outer")}
