"""The report's fixed keys, its numbers that JSON cannot hold, and the exit status of every mixture of verdicts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from emerge.report.document import CampaignResult, document, exit_status, file_stem, read_report, to_json, write_report
from emerge.report.terminal import render
from emerge.util.errors import InputError
from emerge.verdict.types import Counterexample, Finding, Output, PairError, PairResult

PAIR_KEYS = {
    "id", "verdict", "evidence", "expect", "reason", "error", "assumptions", "mesh", "sizes", "substitutions",
    "input_relations", "outputs", "outputs_not_claimed", "unmatched", "findings", "counterexample", "rules", "coverage",
    "stats", "seconds",
}  # fmt: skip


def refuted() -> PairResult:
    return PairResult(
        "bad", "NOT_EQUIVALENT", reason="output 'y' differs",
        outputs=[Output("y", ["0:y", "1:y"], None, "a ~ a")],
        findings=[Finding("DIVERGES", "error", "they part", ["mm"], "m.py:3", ["0:mm"], None, found="x ~ x: a ~ a")],
        counterexample=Counterexample(3, "y", float("inf"), "captured", "counterexamples/bad.json"),
        seconds={"total": 1.0},
    )  # fmt: skip


def result(*pairs: PairResult, **more) -> CampaignResult:  # type: ignore[no-untyped-def]
    return CampaignResult("c", 0, "0123456789abcdef", "embedded", list(pairs), **more)


def test_keys_of_the_contract() -> None:
    doc = json.loads(to_json(document(result(refuted(), PairResult("broken", error=PairError("no", "f:1"))))))
    assert doc["schema"] == "emerge.report/1"
    assert {"schema", "emerge", "campaign", "seed", "config_hash", "engine", "pairs"} <= set(doc)
    assert set(doc["engine"]) == {"datalog", "version"}
    for pair in doc["pairs"]:
        assert set(pair) >= PAIR_KEYS
        assert set(pair["seconds"]) >= {"capture", "lower", "datalog", "egglog", "synthesis", "execution", "total"}
        assert set(pair["stats"]) >= {"reference_nodes", "implementation_nodes", "ranks", "segments", "segments_reused"}
        assert set(pair["coverage"]) == {"proved", "tested", "assumed"}
        assert set(pair["coverage_rest"]) == {"kernel_contracts", "index_operators", "other_laws", "by"}
        assert set(pair["rules"]) == {"used", "synthesised"}
        assert set(pair["unmatched"]) == {"reference", "implementation"}
    bad, broken = doc["pairs"]
    assert set(bad["findings"][0]) == {
        "kind", "severity", "reference_nodes", "reference_source", "implementation_nodes", "implementation_source",
        "message", "found", "expected", "hint",
    }  # fmt: skip
    assert set(bad["counterexample"]) == {"seed", "output", "max_abs_diff", "sizes", "file"}
    assert bad["counterexample"]["max_abs_diff"] == "inf"
    assert broken["verdict"] is None
    assert broken["error"] == {"message": "no", "place": "f:1"}


def test_statuses() -> None:
    good, unknown = PairResult("g", "EQUIVALENT", "tested"), PairResult("u", "UNKNOWN")
    error, crash = PairResult("e", error=PairError("no")), PairResult("i", error=PairError("bug", internal=True))
    assert exit_status(result(good)) == 0
    assert exit_status(result(good, unknown)) == 3
    assert exit_status(result(good, unknown, refuted())) == 1
    assert exit_status(result(good, unknown, refuted(), error)) == 2
    assert exit_status(result(error, crash)) == 4
    expected_bad = refuted()
    expected_bad.expect = "not_equivalent"
    assert exit_status(result(expected_bad)) == 0
    surprise = PairResult("s", "EQUIVALENT", "tested", expect="not_equivalent")
    assert exit_status(result(surprise)) == 1
    assert exit_status(result(PairResult("u", "UNKNOWN", expect="not_equivalent"))) == 3


def test_fail_on_turns_a_finding_into_a_failure() -> None:
    good = PairResult("g", "EQUIVALENT", "tested", findings=[Finding("PRECISION", "warning", "a cast was dropped")])
    assert exit_status(result(good)) == 0
    assert exit_status(result(good, fail_on=["PRECISION"])) == 1


def test_text_has_both_source_lines_counts_and_colours_only_on_demand() -> None:
    doc = document(result(refuted(), PairResult("broken", error=PairError("no", "f:1"))))
    text = render(doc)
    assert "m.py:3" in text
    assert "no source line" in text
    assert "2 pairs: 1 NOT_EQUIVALENT, 1 ERROR" in text
    assert "1 claimed, 0 proved, 1 not proved" in text
    assert "\x1b" not in text
    assert "\x1b[31mNOT_EQUIVALENT" in render(doc, colour=True)


def test_text_names_synthesised_rules() -> None:
    text = render(document(result(PairResult("good", "EQUIVALENT", rules_synthesised=["learnt-1", "learnt-2"]))))
    assert "synthesised rules: learnt-1, learnt-2" in text
    assert "synthesised" not in render(document(result(PairResult("good", "EQUIVALENT"))))


def test_round_trip_and_nothing_but_a_report_is_read(tmp_path: Path) -> None:
    doc = document(result(refuted()))
    write_report(doc, tmp_path / "a" / "b")
    assert read_report(tmp_path / "a" / "b") == json.loads(to_json(doc))
    assert [p.name for p in (tmp_path / "a" / "b").iterdir()] == ["report.json"]
    with pytest.raises(InputError, match="cannot read the report"):
        read_report(tmp_path)
    (tmp_path / "report.json").write_text("{}")
    with pytest.raises(InputError, match="expected schema"):
        read_report(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match="cannot make"):
        write_report(doc, tmp_path / "file" / "x")


def test_file_names_of_pairs_do_not_collide() -> None:
    assert file_stem("plain-1") == "plain-1"
    assert "/" not in file_stem("a/b")
    assert file_stem("a/b") != file_stem("a_b")
    assert file_stem("..") not in ("..", "")
