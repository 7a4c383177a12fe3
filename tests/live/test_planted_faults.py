"""Faults written into the Python code of hand-written parallel models: refuted, and blamed at the line they live in."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.live import python, verify
from support.parallel_models import TENSOR_AND_DATA, lines_of

MODELS = "support.parallel_models"
TP, BOTH = {"tp": 2}, {"dp": 2, "tp": 2}
#: Parallel program -> (reference and its arguments, mesh, own arguments, faults).
PROGRAMS: dict[str, tuple[tuple[str, dict[str, Any]], dict[str, int], dict[str, Any], list[str]]] = {
    "tensor": (("sequential", {}), TP, {}, [
        "vocab-offset", "kv-heads", "gate-up", "no-reduce", "double-reduce", "bias-before", "residual-before",
    ]),
    "tensor_and_data": (("sequential", {}), BOTH, {}, ["wrong-group"]),
    "sequence": (("sequential", {}), TP, {}, ["gather-order"]),
    **{
        f"small:{name}": (("small", {"model": name}), TP, {"model": name}, faults)
        for name, faults in {
            "positions": ["rotary-offset", "gather-dim"], "fused": ["fused-qkv"], "norm": ["norm"],
            "experts": ["expert-ids"], "loss": ["mean-scale"],
        }.items()
    },
}  # fmt: skip


def run(program: str, fault: str, folder: Path) -> Any:
    (reference, given), mesh, args, _ = PROGRAMS[program]
    function = "small_parallel" if program.startswith("small:") else program
    written = program == "tensor_and_data"
    return verify(
        python(f"{MODELS}:{reference}", **given),
        python(f"{MODELS}:{function}", mesh, fault=fault, **args),
        folder,
        TENSOR_AND_DATA if written else None,
        {0: "(dp b) s v ~ b s v"} if written else None,
    )


@pytest.mark.parametrize("program", PROGRAMS)
def test_the_program_without_fault_is_proved(program: str, tmp_path: Path) -> None:
    assert run(program, "", tmp_path).verdict == "EQUIVALENT"


@pytest.mark.parametrize(("program", "fault"), [(p, f) for p, spec in PROGRAMS.items() for f in spec[3]])
def test_a_fault_is_refuted_and_blamed_at_its_line(program: str, fault: str, tmp_path: Path) -> None:
    result = run(program, fault, tmp_path)
    assert result.verdict == "NOT_EQUIVALENT"
    file, _, line = str(result.findings[0].implementation_source).rpartition(":")
    assert file.endswith("support/parallel_models.py")
    assert int(line) in lines_of(fault), result.findings[0].message
