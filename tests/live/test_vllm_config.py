"""configs/vllm-llama.yaml through the command line, with the environment that the tests have for vLLM."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers", reason="the reference of a vLLM model is a Transformers model")

from typer.testing import CliRunner

from emerge.cli.main import app

PYTHON = os.environ.get("EMERGE_VLLM_PYTHON", "")
CONFIG = Path(__file__).parents[2] / "configs" / "vllm-llama.yaml"


@pytest.mark.vllm
@pytest.mark.skipif(
    not os.access(PYTHON, os.X_OK), reason="set EMERGE_VLLM_PYTHON to the python of an environment with vLLM"
)
def test_every_pair_is_proved(tmp_path: Path) -> None:
    text = CONFIG.read_text(encoding="utf-8")
    assert "python_env: ../vllm-env" in text
    campaign = tmp_path / "campaign.yaml"
    campaign.write_text(text.replace("../vllm-env", str(Path(PYTHON).parents[1])), encoding="utf-8")
    found = CliRunner().invoke(app, ["verify", str(campaign), "--out", str(tmp_path / "out")])
    assert found.exit_code == 0, found.output
    report = json.loads(next((tmp_path / "out").rglob("report.json")).read_text(encoding="utf-8"))
    assert {p["id"]: p["verdict"] for p in report["pairs"]} == {
        "prefill-tp2": "EQUIVALENT", "sequences-of-3-and-5": "EQUIVALENT", "decode-after-7": "EQUIVALENT",
    }  # fmt: skip
