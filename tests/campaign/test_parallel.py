"""Live campaigns over parallel programs in one process: pipelines (by hand and PyTorch's schedules), data parallelism."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from emerge.cli.main import run_main

pytest.importorskip("torch", reason="capturing live models needs torch")

PROGRAMS = Path(__file__).resolve().parents[1] / "capture" / "programs"


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EMERGE_CACHE", str(tmp_path / "cache"))
    monkeypatch.syspath_prepend(str(PROGRAMS))


def verify(tmp_path: Path, reference: str, function: str, mesh: str, args: str = "{}") -> dict[str, Any]:
    campaign = tmp_path / "live.yaml"
    campaign.write_text(
        "campaign: live\nengine: embedded\npairs:\n  - id: pair\n"
        f'    reference: {{python: "parallel_programs:{reference}"}}\n'
        f'    implementation: {{python: "parallel_programs:{function}", mesh: {mesh}, args: {args}}}\n'
        "    relations: auto\n"
    )
    run_main(["verify", str(campaign), "--out", str(tmp_path / "out")])
    found: dict[str, Any] = json.loads((tmp_path / "out" / "report.json").read_text())["pairs"][0]
    return found


def blamed(pair: dict[str, Any]) -> str:
    """The finding to read first, as text."""
    return json.dumps(pair["findings"][0])


@pytest.mark.parametrize("mesh", ["{pp: 2}", "{pp: 4}", "{pp: 2, dp: 2}"])
def test_a_pipeline_with_microbatches(tmp_path: Path, mesh: str) -> None:
    pair = verify(tmp_path, "sequential", "pipeline", mesh)
    assert pair["verdict"] == "EQUIVALENT", pair
    assert {"transfer", "form-joined"} <= set(pair["rules"]["used"])


@pytest.mark.parametrize("kind", ["ScheduleGPipe", "Schedule1F1B"])
def test_schedules_of_pytorch(tmp_path: Path, kind: str) -> None:
    pytest.importorskip("torch.distributed.pipelining")
    pair = verify(tmp_path, "sequential", "schedule", "{pp: 2}", f"{{kind: {kind}, micro: 4}}")
    assert pair["verdict"] == "EQUIVALENT", pair


def test_microbatches_in_another_order(tmp_path: Path) -> None:
    assert verify(tmp_path, "sequential", "pipeline", "{pp: 2}", "{wrong: order}")["verdict"] == "NOT_EQUIVALENT"


def test_stages_that_hold_each_others_layers(tmp_path: Path) -> None:
    pair = verify(tmp_path, "sequential", "pipeline", "{pp: 2}", "{wrong: swapped}")
    assert pair["verdict"] == "NOT_EQUIVALENT"
    assert "addmm" in blamed(pair)


def test_a_message_to_another_stage(tmp_path: Path) -> None:
    pair = verify(tmp_path, "sequential", "pipeline", "{pp: 4}", "{wrong: peer}")
    assert pair["verdict"] == "NOT_EQUIVALENT"
    assert "irecv" in blamed(pair)
    assert "rank 1 waits" in pair["reason"]


@pytest.mark.parametrize("how", ["avg", "divide"])
def test_data_parallel_loss(tmp_path: Path, how: str) -> None:
    pair = verify(tmp_path, "loss_sequential", "data_parallel", "{dp: 2}", f"{{how: {how}}}")
    assert pair["verdict"] == "EQUIVALENT", pair


@pytest.mark.parametrize("how", ["sum", "none"])
def test_data_parallel_loss_that_is_not_the_mean(tmp_path: Path, how: str) -> None:
    pair = verify(tmp_path, "loss_sequential", "data_parallel", "{dp: 2}", f"{{how: {how}}}")
    assert pair["verdict"] == "NOT_EQUIVALENT"
    assert "mse_loss" in blamed(pair)
