"""Context parallelism by hand: gathered keys and values, and Ulysses' exchange of sequence and heads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.live import python, verify

MODELS = "support.context_parallel"


def run(folder: Path, how: str, program: str, own: str | None = None, n: int = 2, **args: Any) -> Any:
    """``how``: spelling of the causal mask in the reference; ``own``: that of the parallel program."""
    return verify(
        python(f"{MODELS}:alone", how=how),
        python(f"{MODELS}:{program}", {"cp": n}, how=own or how, **args),
        folder,
    )


@pytest.mark.parametrize("how", ["arange", "tril", "fused", "triu_inf"])
def test_gathered_keys_with_the_mask_shifted_by_the_rank(how: str, tmp_path: Path) -> None:
    assert run(tmp_path, how, "gathered").verdict == "EQUIVALENT"


@pytest.mark.parametrize(("how", "own"), [("tril", "arange"), ("arange", "tril")])
def test_the_mask_may_be_spelled_differently(how: str, own: str, tmp_path: Path) -> None:
    assert run(tmp_path, how, "gathered", own, 4).verdict == "EQUIVALENT"


@pytest.mark.parametrize("style", ["single", "list"])
def test_sequence_and_heads_exchanged(style: str, tmp_path: Path) -> None:
    assert run(tmp_path, "fused", "ulysses", style=style).verdict == "EQUIVALENT"


@pytest.mark.parametrize(
    ("program", "args"),
    [("gathered", {"shift": False}), ("gathered", {"reversed_blocks": True}), ("ulysses", {"swapped": True})],
)
def test_a_wrong_exchange_is_refuted(program: str, args: dict[str, Any], tmp_path: Path) -> None:
    result = run(tmp_path, "arange", program, **args)
    assert result.verdict == "NOT_EQUIVALENT"
    assert "support/context_parallel.py:" in str(result.findings[0].implementation_source)


def test_a_shift_by_one_is_not_proved(tmp_path: Path) -> None:
    """A mask of strictly earlier keys in one program only."""
    assert run(tmp_path, "arange", "gathered", "strict").verdict == "NOT_EQUIVALENT"
