"""A campaign over live models: Transformers alone against its own tensor parallelism, and ``emerge capture``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from emerge.cli.main import run_main

pytest.importorskip("torch", reason="capturing live models needs torch")
pytest.importorskip("transformers", reason="needs the extra 'hf'")

CONFIG = (
    "{vocab_size: 48, hidden_size: 32, intermediate_size: 44, num_hidden_layers: 1, "
    "num_attention_heads: 4, num_key_value_heads: 2}"
)
MODEL = f"{{architecture: LlamaForCausalLM, config: {CONFIG}"


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EMERGE_CACHE", str(tmp_path / "cache"))


def test_a_transformers_model_against_its_tensor_parallelism(tmp_path: Path) -> None:
    campaign = tmp_path / "live.yaml"
    campaign.write_text(
        "campaign: live\nengine: embedded\npairs:\n"
        f"  - id: tp2\n    reference: {{hf: {MODEL}}}, inputs: {{batch: 2, seq: 3}}}}\n"
        f"    implementation: {{hf: {MODEL}, tp_size: 2}}, inputs: {{batch: 2, seq: 3}}}}\n    relations: auto\n"
    )
    assert run_main(["verify", str(campaign), "--out", str(tmp_path / "out")]) == 0
    pair = json.loads((tmp_path / "out" / "report.json").read_text())["pairs"][0]
    assert pair["verdict"] == "EQUIVALENT"
    assert {r["origin"] for r in pair["input_relations"]} == {"placement", "name"}


def test_capture_writes_graph_files(tmp_path: Path) -> None:
    source = tmp_path / "model.yaml"
    source.write_text(f"hf: {MODEL}, tp_size: 2}}\ninputs: {{batch: 2, seq: 3}}\n")
    assert run_main(["capture", str(source), "-o", str(tmp_path / "graphs")]) == 0
    assert sorted(p.name for p in (tmp_path / "graphs").iterdir()) == ["rank0.json", "rank1.json"]
