"""Routers of expert layers in the spellings of different programs: right pairs, and wrong twins that must not be proved."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import emerge

TOKENS, HIDDEN, INNER, EXPERTS, CHOICES = 5, 4, 3, 6, 2
Router = Callable[[Any], tuple[Any, Any]]


def after(logits: Any) -> tuple[Any, Any]:
    weights, ids = torch.topk(torch.softmax(logits, -1), CHOICES)
    return weights / weights.sum(-1, keepdim=True), ids


def before(logits: Any) -> tuple[Any, Any]:
    best, ids = torch.topk(logits, CHOICES, sorted=False)
    return torch.softmax(best, -1), ids.to(torch.int32)


def after_plain(logits: Any) -> tuple[Any, Any]:
    return torch.topk(torch.softmax(logits, -1), CHOICES)  # type: ignore[return-value]


def before_plain(logits: Any) -> tuple[Any, Any]:
    best, ids = torch.topk(logits, CHOICES)
    return torch.exp(best - torch.logsumexp(logits, -1, keepdim=True)), ids.to(torch.int32)


def smallest(logits: Any) -> tuple[Any, Any]:
    best, ids = torch.topk(logits, CHOICES, largest=False)
    return torch.softmax(best, -1), ids


def biased(logits: Any) -> tuple[Any, Any]:
    """The sum of other weights than those divided."""
    scores = torch.softmax(logits, -1)
    weights, ids = torch.topk(scores, CHOICES)
    return weights / scores.sum(-1, keepdim=True), ids


def summed_over_tokens(logits: Any) -> tuple[Any, Any]:
    weights, ids = torch.topk(torch.softmax(logits, -1), CHOICES)
    return weights / weights.sum(0, keepdim=True), ids


def largest_one(logits: Any) -> tuple[Any, Any]:
    best, ids = torch.topk(logits, 1)
    return torch.sigmoid(best), ids


def maximum(logits: Any) -> tuple[Any, Any]:
    best, ids = torch.max(logits, -1, keepdim=True)
    return torch.sigmoid(best), ids.to(torch.int32)


def layer(router: Router) -> Callable[[Any, Any, Any], Any]:
    """Looks a vector of the chosen experts up: as much of an expert layer as a router needs."""

    def program(x: Any, gate: Any, table: Any) -> Any:
        weights, ids = router(x @ gate)
        rows = table[ids.reshape(-1)].reshape(*ids.shape, INNER)
        return (rows * weights.unsqueeze(-1)).sum(1)

    return program


INPUTS = (torch.randn(TOKENS, HIDDEN), torch.randn(HIDDEN, EXPERTS), torch.randn(EXPERTS, INNER))


@pytest.mark.parametrize(
    ("reference", "implementation"),
    [(after, before), (before, after), (after_plain, before_plain), (before_plain, after_plain), (largest_one, maximum)],
)
def test_spellings_of_a_router(reference: Router, implementation: Router) -> None:
    assert emerge.compare(layer(reference), layer(implementation), inputs=INPUTS).verdict == "EQUIVALENT"


@pytest.mark.parametrize(
    ("reference", "implementation"),
    [(after, before_plain), (after_plain, before), (after, smallest), (before, biased), (before, summed_over_tokens)],
)
def test_routers_that_differ(reference: Router, implementation: Router) -> None:
    assert emerge.compare(layer(reference), layer(implementation), inputs=INPUTS).verdict == "NOT_EQUIVALENT"


def rotated(x: Any, angle: Any) -> Any:
    """Pairs of neighbours, as complex numbers."""
    turned = torch.view_as_complex(x.reshape(TOKENS, HIDDEN, 2)) * torch.polar(torch.ones_like(angle), angle)
    return torch.view_as_real(turned).reshape(TOKENS, 2 * HIDDEN)


def rotated_real(x: Any, angle: Any, sign: float = 1.0) -> Any:
    a, b = x[:, 0::2], x[:, 1::2]
    c, s = torch.cos(angle), sign * torch.sin(angle)
    return torch.stack([a * c - b * s, b * c + a * s], -1).reshape(TOKENS, 2 * HIDDEN)


def test_complex_rotation() -> None:
    inputs = (torch.randn(TOKENS, 2 * HIDDEN), torch.randn(TOKENS, HIDDEN))
    assert emerge.compare(rotated, rotated_real, inputs=inputs).verdict == "EQUIVALENT"
    wrong = emerge.compare(rotated, lambda x, angle: rotated_real(x, angle, -1.0), inputs=inputs)
    assert wrong.verdict == "NOT_EQUIVALENT"


def test_softmax_without_its_maximum() -> None:
    def shifted(x: Any) -> Any:
        return torch.softmax(x - x.max(-1, keepdim=True).values, -1)

    def columns(x: Any) -> Any:
        return torch.softmax(x - x.max(0, keepdim=True).values, -1)

    def plain(x: Any) -> Any:
        return torch.softmax(x, -1)

    inputs = (torch.randn(5, 3),)
    assert emerge.compare(plain, shifted, inputs=inputs).verdict == "EQUIVALENT"
    assert emerge.compare(plain, columns, inputs=inputs).verdict == "NOT_EQUIVALENT"


@pytest.mark.parametrize(("first", "verdict"), [(3, "EQUIVALENT"), (2, "NOT_EQUIVALENT")])
def test_table_of_expert_numbers(first: int, verdict: str) -> None:
    """Experts of a rank found by a table ``[-1, -1, -1, 0, 1, 2]``, against one-hot weights summed over ranks."""

    def reference(x: Any, gate: Any, table: Any) -> Any:
        return table[torch.topk(x @ gate, 1)[1].reshape(-1)]

    def build(mesh: Any, rank: int) -> Any:
        import torch.distributed._functional_collectives as fc

        def program(x: Any, gate: Any, table: Any) -> Any:
            numbers = torch.full((EXPERTS,), -1, dtype=torch.int64)
            start = first * rank
            numbers = torch.slice_scatter(numbers, torch.arange(3), 0, start, start + 3)
            own = numbers[torch.topk(x @ gate, 1)[1].reshape(-1)]
            other = own < 0
            rows = table[own.masked_fill(other, 0)].masked_fill(other.unsqueeze(-1), 0.0)
            return fc.all_reduce(rows, "sum", mesh["tp"])

        return program, (INPUTS[0], INPUTS[1], INPUTS[2][:3])

    result = emerge.compare(
        reference, build, inputs=INPUTS, mesh={"tp": 2},
        relations={"x": "a b ~ a b", "gate": "a b ~ a b", "table": "(tp a) b ~ a b"},
    )  # fmt: skip
    assert result.verdict == verdict
