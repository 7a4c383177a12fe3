"""Rules synthesised for live pairs over the minimal base: proofs that lacked an equality, and twins that must not get one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="capturing live programs needs torch")
pytest.importorskip("egglog")

import block_pairs as p  # noqa: E402

import emerge  # noqa: E402
from emerge.algebra.rulefile import rules_of  # noqa: E402
from emerge.cli.main import run_main  # noqa: E402
from emerge.rules.certify import Refusal  # noqa: E402
from emerge.rules.equalities import confirm  # noqa: E402
from emerge.util.errors import InputError  # noqa: E402

RIGHT = [
    (p.swiglu, p.swiglu_written_out, (p.X, p.Y), 1),
    (p.rms_norm, p.rms_norm_by_division, (p.X, p.W), 2),
    (p.gelu, p.gelu_factored, (p.X,), 1),
    (p.rotary, p.rotary_by_halves, (p.Q, p.ANGLES), 1),
    (p.two_layers, p.two_layers_of_tokens, (p.X, p.Y), 1),
    (p.positional, p.looked_up(), (*p.QS, p.INVERSE), 3),
]
WRONG = [
    (p.swiglu, p.swiglu_wrong, (p.X, p.Y)),
    (p.rms_norm, p.rms_norm_wrong, (p.X, p.W)),
    (p.gelu, p.gelu_wrong, (p.X,)),
    (p.rotary, p.rotary_wrong, (p.Q, p.ANGLES)),
    (p.positional, p.looked_up(base=1), (*p.QS, p.INVERSE)),
    (p.positional, p.looked_up(swapped=True), (*p.QS, p.INVERSE)),
]


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EMERGE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("EMERGE_CACHE", str(tmp_path / "cache"))


def name(value: Any) -> str:
    return getattr(value, "__name__", "")


@pytest.mark.parametrize(("reference", "implementation", "inputs", "count"), RIGHT, ids=name)
def test_blocks_written_in_two_ways(
    reference: Any, implementation: Any, inputs: Any, count: int, tmp_path: Path
) -> None:
    result = emerge.compare(reference, implementation, inputs=inputs, base="minimal", synthesis=tmp_path / "rules")
    assert result.verdict == "EQUIVALENT"
    assert len(result.rules_synthesised) == count
    assert set(result.rules_synthesised) <= set(result.rules_used)
    written = rules_of(tmp_path / "rules" / "synthesised.egg")
    assert [r.name for r in written] == result.rules_synthesised
    sizes = {str(n) for x in inputs for n in x.shape if n > 2}
    for rule in written:
        assert not sizes & set(rule.text.replace("(", " ").replace(")", " ").split()), "no size of the graph"
    assert result.seconds["synthesis"] > 0
    again = emerge.compare(
        reference, implementation, inputs=inputs, base="minimal", synthesis=True, rules=[tmp_path / "rules"]
    )
    assert (again.verdict, again.rules_synthesised) == ("EQUIVALENT", [])
    assert "synthesis" not in again.seconds, "nothing is looked for where nothing is missing"


@pytest.mark.parametrize(("reference", "implementation", "inputs"), WRONG, ids=name)
def test_a_wrong_twin_gets_no_rule(reference: Any, implementation: Any, inputs: Any, tmp_path: Path) -> None:
    result = emerge.compare(reference, implementation, inputs=inputs, base="minimal", synthesis=tmp_path / "rules")
    assert (result.verdict, result.rules_synthesised) == ("NOT_EQUIVALENT", [])
    assert not (tmp_path / "rules").exists()


def test_a_rule_that_holds_for_the_drawn_values_only_is_refused(tmp_path: Path) -> None:
    result = emerge.compare(
        p.clipped_far_away, p.not_clipped, inputs=(p.X,), base="minimal", synthesis=tmp_path / "rules"
    )
    assert (result.verdict, result.rules_synthesised) == ("UNKNOWN", [])
    (note,) = [f for f in result.findings if f.kind == "SYNTHESIS"]
    assert "relu" in note.message
    assert "is refused: it makes" in note.message
    assert not (tmp_path / "rules").exists()


def test_a_rule_that_holds_at_these_sizes_only_is_refused(tmp_path: Path) -> None:
    def by_size(x: Any) -> Any:
        return x.exp() * 8

    def by_sum(x: Any) -> Any:
        return x.exp()[..., None].expand(-1, 8).sum(-1)

    result = emerge.compare(by_size, by_sum, inputs=(torch.zeros(6),), base="minimal", synthesis=tmp_path / "rules")
    assert (result.verdict, result.rules_synthesised) == ("UNKNOWN", [])
    (note,) = [f for f in result.findings if f.kind == "SYNTHESIS"]
    assert "= 8 * exp(x)' is refused: it makes" in note.message


def test_a_rule_that_holds_for_the_weights_of_the_model_only_is_not_found(tmp_path: Path) -> None:
    result = emerge.compare(p.Signed(), p.Unsigned(), inputs=(p.X,), base="minimal", synthesis=tmp_path / "rules")
    assert result.verdict != "EQUIVALENT"
    assert result.rules_synthesised == []
    assert not (tmp_path / "rules").exists()


def test_a_rule_of_one_place_is_confirmed_elsewhere(tmp_path: Path) -> None:
    result = emerge.compare(p.swiglu, p.swiglu_written_out, inputs=(p.X, p.Y), base="minimal", synthesis=tmp_path)
    (note,) = [f for f in result.findings if f.kind == "SYNTHESIS"]
    assert "matches at one place of this pair only; it was confirmed on values of other tensors" in note.message
    twice = emerge.compare(
        p.two_layers, p.two_layers_of_tokens, inputs=(p.X, p.Y), base="minimal", synthesis=tmp_path / "more"
    )
    assert not [f for f in twice.findings if f.kind == "SYNTHESIS"]


def test_a_rule_that_fails_on_values_of_the_pair_is_not_confirmed(tmp_path: Path) -> None:
    import numpy as np

    file = tmp_path / "rules.egg"
    file.write_text('; @meaning relu(x) = x\n(rewrite (Map1 "relu" (Map1 "neg" x)) (Map1 "neg" x)\n'
                    '  :ruleset algebra :name "clips")\n')  # fmt: skip
    (rule,) = rules_of(file)
    assert isinstance(confirm(rule, [np.linspace(-9, -1, 40)]), int), "these values do not show it"
    assert isinstance(confirm(rule, [np.linspace(-1, 9, 40)]), Refusal)


def test_sharded_implementations(tmp_path: Path) -> None:
    options = {"inputs": p.MLP_INPUTS, "relations": p.MLP_RELATIONS, "mesh": {"tp": 2}, "base": "minimal"}
    right = emerge.compare(p.mlp, p.mlp_of_rank(True), synthesis=True, **options)
    assert right.verdict == "EQUIVALENT"
    assert len(right.rules_synthesised) == 1
    wrong = emerge.compare(p.mlp, p.mlp_of_rank(False), synthesis=True, **options)
    assert (wrong.verdict, wrong.rules_synthesised) == ("NOT_EQUIVALENT", [])


def test_without_synthesis_the_minimal_base_lacks_the_rule() -> None:
    assert emerge.compare(p.swiglu, p.swiglu_written_out, inputs=(p.X, p.Y), base="minimal").verdict == "UNKNOWN"


def test_a_campaign_keeps_its_rules_and_one_is_promoted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "gates.py").write_text(
        "import torch\nX = torch.zeros(3, 5)\n"
        "def ref():\n    return lambda x: torch.nn.functional.silu(x), (X,)\n"
        "def mine():\n    return lambda x: x * torch.sigmoid(x), (X,)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    campaign = tmp_path / "gates.yaml"
    campaign.write_text(
        "campaign: gates\nsynthesis: {budget_seconds: 30}\npairs:\n"
        "  - {id: gate, reference: 'python:gates:ref', implementation: 'python:gates:mine', relations: auto}\n"
    )
    out = tmp_path / "out"
    assert run_main(["verify", str(campaign), "--base", "minimal", "--no-synthesis", "--out", str(out)]) == 3
    assert run_main(["verify", str(campaign), "--base", "minimal", "--out", str(out)]) == 0
    pair = json.loads((out / "report.json").read_text())["pairs"][0]
    (rule,) = pair["rules"]["synthesised"]
    file = out / "rules" / "synthesised.egg"
    kept = json.loads((out / "rules" / "synthesised.json").read_text())
    assert kept[rule]["evidence"] in ("proved", "tested")

    capsys.readouterr()
    mine = tmp_path / "mine"
    assert run_main(["rules", "promote", rule, "--from", str(file), "--to", str(mine), "--as", "gate"]) == 0
    assert "gate: " in capsys.readouterr().out
    assert [r.name for r in rules_of(mine / "rules.egg")] == ["gate"]
    assert run_main(["rules", "promote", rule, "--from", str(file), "--to", str(mine), "--as", "gate"]) == 2
    assert "already" in capsys.readouterr().err
    assert run_main(["rules", "add", str(file), "--to", str(mine)]) == 0
    assert [r.name for r in rules_of(mine / "rules.egg")] == ["gate", rule]


def test_a_false_rule_is_not_promoted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "mine.egg"
    file.write_text('; @meaning |x| = x\n(rewrite (Map1 "abs" x) (Scale (bigrat (bigint 1) (bigint 1)) x)\n'
                    '  :ruleset algebra :name "wrong")\n')  # fmt: skip
    assert run_main(["rules", "promote", "wrong", "--from", str(file), "--to", str(tmp_path / "rules")]) == 2
    assert "refused" in capsys.readouterr().err
    assert not (tmp_path / "rules").exists()


def test_the_device_of_executions_and_tests(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = emerge.compare(
        p.swiglu, p.swiglu_written_out, inputs=(p.X, p.Y), base="minimal", synthesis=tmp_path, device="cpu"
    )
    kept = json.loads((tmp_path / "synthesised.json").read_text())
    assert [kept[r]["device"] for r in result.rules_synthesised] == ["cpu"]
    assert [kept[r]["dtype"] for r in result.rules_synthesised] == ["float64"]
    with pytest.raises(InputError, match="unknown device 'tpu'"):
        emerge.compare(p.swiglu, p.swiglu_written_out, inputs=(p.X, p.Y), device="tpu")
    assert run_main(["compare", "a.json", "b.json", "--device", "tpu"]) == 2
    if not torch.cuda.is_available():
        assert run_main(["compare", "a.json", "b.json", "--device", "cuda"]) == 2
        assert "torch finds no CUDA device" in capsys.readouterr().err
