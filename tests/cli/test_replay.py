"""A refuted pair from the command line: the counterexample is saved, and ``emerge replay`` runs it again."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from mlp_graphs import perceptron, write_case, write_sides

from emerge.cli.main import run_main
from emerge.graph.json_io import write_graph

pytest.importorskip("torch")


@pytest.fixture(autouse=True)
def _in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_refuted_saved_and_replayed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_case(tmp_path / "mlp", reduce=False)
    assert run_main(["compare", "mlp", "--engine", "embedded", "--out", "o", "--seed", "5"]) == 1
    text = capsys.readouterr().out
    assert "mlp: NOT_EQUIVALENT" in text
    assert "mlp.py:14" in text
    pair = json.loads((tmp_path / "o" / "report.json").read_text())["pairs"][0]
    assert pair["counterexample"]["output"] == "add"
    assert pair["counterexample"]["max_abs_diff"] > 1e-6
    assert pair["counterexample"]["file"] == "counterexamples/mlp/counterexample.json"
    assert pair["findings"][0]["reference_nodes"] == ["add"]
    assert pair["seconds"]["execution"] > 0
    assert pair["counterexample"]["seed"] == 5
    assert [p.name for p in (tmp_path / "o" / "counterexamples").iterdir()] == ["mlp"]

    assert run_main(["replay", "o", "mlp"]) == 1
    assert "differs again" in capsys.readouterr().out
    assert run_main(["replay", "o", "mlp", "--full", "--format", "json"]) == 1
    again = json.loads(capsys.readouterr().out)
    assert (again["outcome"], again["output"]) == ("refuted", "add")
    assert again["max_abs_diff"] == pytest.approx(pair["counterexample"]["max_abs_diff"])

    # A second run replaces it; a mended implementation inside the folder agrees.
    assert run_main(["compare", "mlp", "--engine", "embedded", "--out", "o", "--seed", "6"]) == 1
    for rank in range(2):
        write_graph(perceptron(2, rank), tmp_path / "o" / "counterexamples" / "mlp" / f"rank{rank}.json")
    capsys.readouterr()
    assert run_main(["replay", "o", "mlp"]) == 0
    assert "agrees now" in capsys.readouterr().out


def test_a_pair_of_a_campaign_is_found_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_sides(tmp_path, kind="max")
    lines = ["engine: embedded", "pairs:", "  - {id: p/1, reference: ref.json, implementation: impl, relations: auto,"]
    (tmp_path / "c.yaml").write_text("\n".join([*lines, "     expect: not_equivalent}"]) + "\n")
    assert run_main(["verify", "c.yaml", "--out", "o"]) == 0
    assert run_main(["replay", "o", "p/1"]) == 1
    capsys.readouterr()
    assert run_main(["replay", "o", "p1"]) == 2
    assert "did you mean 'p/1'" in capsys.readouterr().err


def test_a_proved_pair_has_nothing_to_replay(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_case(tmp_path / "mlp")
    assert run_main(["compare", "mlp", "--engine", "embedded", "--out", "o"]) == 0
    capsys.readouterr()
    assert run_main(["replay", "o", "mlp"]) == 2
    assert "nothing to replay" in capsys.readouterr().err
