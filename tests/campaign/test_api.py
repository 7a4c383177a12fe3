"""The Python API on live functions and a hand-written tensor-parallel program."""

from __future__ import annotations

from typing import Any

import pytest

import emerge
from emerge.util.errors import InputError

torch = pytest.importorskip("torch", reason="capturing live programs needs torch")
dist = pytest.importorskip("torch.distributed")


def mlp(x: Any, up: Any, down: Any) -> Any:
    return torch.relu(x @ up) @ down


INPUTS = (torch.zeros(3, 4), torch.zeros(4, 6), torch.zeros(6, 5))


def parallel(reduce: bool) -> Any:
    def build(mesh: Any, rank: int) -> Any:
        def program(x: Any, up: Any, down: Any) -> Any:
            y = torch.relu(x @ up) @ down
            if reduce:
                dist.all_reduce(y)
            return y

        return program, (torch.zeros(3, 4), torch.zeros(4, 3), torch.zeros(3, 5))

    return build


RELATIONS = {"x": "a b ~ a b", "up": "a (tp f) ~ a f", "down": "(tp f) b ~ f b"}


def test_a_program_equals_itself() -> None:
    assert emerge.compare(mlp, mlp, inputs=INPUTS).verdict == "EQUIVALENT"


def test_tensor_parallel_program_is_proved() -> None:
    result = emerge.assert_equivalent(mlp, parallel(True), inputs=INPUTS, relations=RELATIONS, mesh={"tp": 2})
    assert (result.verdict, result.evidence) == ("EQUIVALENT", "tested")


def test_missing_reduction_names_the_line() -> None:
    with pytest.raises(emerge.NotEquivalent) as caught:
        emerge.assert_equivalent(mlp, parallel(False), inputs=INPUTS, relations=RELATIONS, mesh={"tp": 2})
    assert "NOT_EQUIVALENT" in str(caught.value)
    assert isinstance(caught.value, AssertionError)


def test_relations_that_do_not_fit_are_input_errors() -> None:
    with pytest.raises(InputError, match="dimension 0 on the right has size 3"):
        emerge.compare(mlp, parallel(True), inputs=INPUTS, relations=RELATIONS | {"down": "a b ~ a b"}, mesh={"tp": 2})


def test_an_unknown_verdict_is_an_exception_of_its_own() -> None:
    with pytest.raises(emerge.UnknownVerdict):
        emerge.assert_equivalent(
            mlp, lambda x, up, down: torch.relu(x @ up) @ down + 0 * torch.logsumexp(x, 1, True), inputs=INPUTS
        )
