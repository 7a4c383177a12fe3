"""The Python API on live functions and a hand-written tensor-parallel program."""

from __future__ import annotations

import doctest
import os
import subprocess
import sys
from pathlib import Path
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
    assert (result.verdict, result.evidence) == ("EQUIVALENT", "proved")


def test_missing_reduction_names_the_line() -> None:
    with pytest.raises(emerge.NotEquivalent) as caught:
        emerge.assert_equivalent(mlp, parallel(False), inputs=INPUTS, relations=RELATIONS, mesh={"tp": 2})
    text = str(caught.value)
    assert "NOT_EQUIVALENT" in text
    assert "test_api.py:" in text, "the findings name the line"
    assert "hint:" in text
    assert isinstance(caught.value, AssertionError)


def test_relations_that_do_not_fit_are_input_errors() -> None:
    with pytest.raises(InputError, match="dimension 0 on the right has size 3"):
        emerge.compare(mlp, parallel(True), inputs=INPUTS, relations=RELATIONS | {"down": "a b ~ a b"}, mesh={"tp": 2})


def test_arguments_related_by_name_across_places_are_listed() -> None:
    def reference(a: Any, b: Any) -> Any:
        return a - b

    def implementation(b: Any, a: Any) -> Any:
        return a - b

    inputs = (torch.zeros(3, 4), torch.zeros(3, 4))
    result = emerge.compare(reference, implementation, inputs=inputs)
    crossed = [(a.where, a.why) for a in result.assumptions if a.name == "argument_name"]
    assert [where for where, _ in crossed] == ["a", "b"]
    assert "argument 1 of the reference and 2 of the implementation" in crossed[0][1]
    assert not [a for a in emerge.compare(reference, reference, inputs=inputs).assumptions if a.name == "argument_name"]


def test_an_unknown_verdict_is_an_exception_of_its_own() -> None:
    with pytest.raises(emerge.UnknownVerdict):
        emerge.assert_equivalent(
            mlp, lambda x, up, down: torch.relu(x @ up) @ down + 0 * torch.logsumexp(x, 1, True), inputs=INPUTS
        )


def test_the_examples_of_the_documentation() -> None:
    from emerge.campaign import api

    found = doctest.testmod(api)
    assert found.attempted >= 10
    assert found.failed == 0


PLUGIN_TEST = """
import pytest, torch

def f(x): return torch.relu(x)

def test_same(emerge_compare):
    assert emerge_compare(f, f, inputs=(torch.zeros(3, 4),)).verdict == "EQUIVALENT"

def test_other(emerge_compare):
    emerge_compare(f, lambda x: torch.abs(x), inputs=(torch.zeros(3, 4),))

@pytest.mark.emerge_slow
def test_long():
    pass
"""


def run_user_tests(folder: Path, *options: str) -> str:
    (folder / "test_user.py").write_text(PLUGIN_TEST)
    plugin = ["-p", "emerge.campaign.pytest_plugin", "-p", "no:cacheprovider", "-c", os.devnull]
    command = [sys.executable, "-m", "pytest", "--strict-markers", *plugin, *options, f"--rootdir={folder}", "."]
    env = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONPATH": str(Path(emerge.__file__).parents[1])}
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False).stdout


def test_the_fixture_of_the_pytest_plugin(tmp_path: Path) -> None:
    shown = run_user_tests(tmp_path)
    assert "1 failed, 1 passed, 1 skipped" in shown
    assert "NOT_EQUIVALENT: output" in shown
    assert "api.py" not in shown, "the traceback ends in the user's test"


def test_marked_verifications_run_when_asked_for(tmp_path: Path) -> None:
    assert "1 passed, 2 deselected" in run_user_tests(tmp_path, "--emerge-slow", "-k", "long")
