"""Megatron-core GPTs under tensor and sequence parallelism, against their own sequential model and a plain one.

Needs an environment with megatron-core: its folder or interpreter in EMERGE_MEGATRON_PYTHON.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from emerge.cli.main import run_main

ENVIRONMENT = os.environ.get("EMERGE_MEGATRON_PYTHON")
pytestmark = pytest.mark.skipif(
    not ENVIRONMENT, reason="set EMERGE_MEGATRON_PYTHON to an environment with megatron-core"
)
pytest.importorskip("torch", reason="capturing live models needs torch")

PROGRAMS = Path(__file__).resolve().parents[1] / "capture" / "programs"
GPT = "emerge.capture.megatron:gpt"
SWIGLU = (
    "normalization: RMSNorm, gated_linear_unit: true, activation_func: silu, add_bias_linear: false, "
    "num_query_groups: 2, ffn_hidden_size: 48"
)


def source(function: str, tp: int, args: str) -> str:
    return f'{{python: "{function}", python_env: "{ENVIRONMENT}", mesh: {{tp: {tp}}}, args: {{{args}}}}}'


def verify(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reference: str, implementation: str) -> dict[str, Any]:
    monkeypatch.setenv("EMERGE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PYTHONPATH", str(PROGRAMS))
    monkeypatch.syspath_prepend(str(PROGRAMS))
    campaign = tmp_path / "live.yaml"
    campaign.write_text(
        "campaign: live\nengine: embedded\npairs:\n  - id: pair\n"
        f"    reference: {reference}\n    implementation: {implementation}\n    relations: auto\n"
    )
    run_main(["verify", str(campaign), "--out", str(tmp_path / "out")])
    found: dict[str, Any] = json.loads((tmp_path / "out" / "report.json").read_text())["pairs"][0]
    return found


@pytest.mark.parametrize("config", ["num_layers: 1", f"num_layers: 1, {SWIGLU}"])
@pytest.mark.parametrize("output", ["logits", "parallel_logits", "loss"])
@pytest.mark.parametrize("sequence", ["false", "true"])
@pytest.mark.parametrize("tp", [2, 4])
def test_tensor_parallelism(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tp: int, sequence: str, output: str, config: str
) -> None:
    if tp == 4 and ("RMSNorm" in config or output != "loss"):
        pytest.skip("covered on two ranks")
    wanted = output.removeprefix("parallel_")
    reference = source(GPT, 1, f"batch: 2, seq: 8, output: {wanted}, config: {{{config}}}")
    parallel = f"batch: 2, seq: 8, output: {output}, config: {{{config}, sequence_parallel: {sequence}}}"
    pair = verify(tmp_path, monkeypatch, reference, source(GPT, tp, parallel))
    assert pair["verdict"] == "EQUIVALENT", pair["reason"]
    assert {r["origin"] for r in pair["input_relations"]} == {"placement", "name"}
    assert any("torch_norm" in json.dumps(s) for s in pair["substitutions"])


@pytest.mark.parametrize("sequence", ["false", "true"])
def test_against_a_gpt_in_plain_pytorch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sequence: str) -> None:
    config = f"num_layers: 2, num_query_groups: 2, hidden_size: 64, sequence_parallel: {sequence}"
    pair = verify(
        tmp_path, monkeypatch, '{python: "megatron_programs:plain"}',
        source(GPT, 2, f"batch: 2, seq: 8, output: logits, config: {{{config}}}"),
    )  # fmt: skip
    assert pair["verdict"] == "EQUIVALENT", pair["reason"]


def test_sequence_parallelism_without_the_reduction(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    args = "batch: 2, seq: 8, output: loss, config: {num_layers: 1, sequence_parallel: true}"
    pair = verify(
        tmp_path, monkeypatch, source(GPT, 1, "batch: 2, seq: 8, output: loss, config: {num_layers: 1}"),
        source("megatron_programs:without_reduction", 2, args),
    )  # fmt: skip
    assert pair["verdict"] == "NOT_EQUIVALENT"
    assert "tensor_parallel/mappings.py" in json.dumps(pair["findings"])
