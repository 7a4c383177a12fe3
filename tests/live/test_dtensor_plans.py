"""DTensor plans with sequence parallelism, against the sequential models."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.live import python, verify

MODELS = "support.dtensor_plans"


def test_a_sequence_parallel_plan(tmp_path: Path) -> None:
    assert verify(python(f"{MODELS}:alone"), python(f"{MODELS}:plan", {"tp": 2}), tmp_path).verdict == "EQUIVALENT"


@pytest.mark.parametrize("model", ["llama", "qwen3", "mixtral", "gpt2"])
def test_transformers_models_under_a_sequence_parallel_plan(model: str, tmp_path: Path) -> None:
    reference = python(f"{MODELS}:hf_alone", model=model)
    implementation = python(f"{MODELS}:hf_plan", {"tp": 2}, model=model)
    assert verify(reference, implementation, tmp_path).verdict == "EQUIVALENT"
