"""A campaign over live models: Transformers alone against its own tensor parallelism, and ``emerge capture``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from emerge.capture.source import load_spec
from emerge.cli.main import run_main

pytest.importorskip("torch", reason="capturing live models needs torch")
pytest.importorskip("transformers", reason="needs the extra 'hf'")

CONFIGS = Path(__file__).parents[2] / "configs"
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


SMALL = (
    "{hidden_size: 16, intermediate_size: 12, vocab_size: 20, num_hidden_layers: 1, "
    "num_attention_heads: 4, num_key_value_heads: 2}"
)


@pytest.mark.parametrize(("build", "status"), [("build", 0), ("build_without_all_reduce", 1)])
def test_the_program_of_the_quickstart(
    build: str, status: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    campaign = tmp_path / "by-hand.yaml"
    for name in ("quickstart_tp.py", "llama-3.1-8b.json"):
        (tmp_path / name).write_text((CONFIGS / name).read_text())
    campaign.write_text(
        "campaign: by-hand\nengine: embedded\nmesh: {tp: 2}\npairs:\n"
        f"  - id: tp2\n    reference: {{hf: {{config_file: llama-3.1-8b.json, config: {SMALL}}},"
        " inputs: {batch: 2, seq: 12}}\n"
        f"    implementation: {{python: 'quickstart_tp:{build}', args: {{config: {SMALL}}}}}\n    relations: auto\n"
    )
    assert run_main(["verify", str(campaign), "--out", str(tmp_path / "out")]) == status
    shown = capsys.readouterr()
    assert "rank 1 of 2" in shown.err, "progress is shown while capturing"
    assert max(map(len, shown.out.splitlines())) <= 120
    pair = json.loads((tmp_path / "out" / "report.json").read_text())["pairs"][0]
    assert [o["label"] for o in pair["outputs"]] == ["logits"]
    if status == 1:
        finding = pair["findings"][0]
        file, line = finding["implementation_source"].rsplit(":", 1)
        assert finding["kind"] == "MISSING_ALL_REDUCE"
        assert "hidden_states + attention" in (tmp_path / Path(file).name).read_text().splitlines()[int(line) - 1]


def test_a_changed_file_that_the_program_reads_is_captured_again(tmp_path: Path) -> None:
    (tmp_path / "reads_a_file.py").write_text(
        "import pathlib, torch\n"
        "def build():\n"
        "    n = int(pathlib.Path(__file__).with_name('size.txt').read_text())\n"
        "    return torch.relu, (torch.zeros(n),)\n"
    )
    sizes = []
    for n in ("3", "5"):
        (tmp_path / "size.txt").write_text(n)
        graph = load_spec("python:reads_a_file:build", base=tmp_path)[0]
        sizes.append(graph.inputs[0].shape)
    assert sizes == [(3,), (5,)]
