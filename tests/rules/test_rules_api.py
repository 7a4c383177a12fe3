"""Certificates of the shipped rules are current, and a changed law loses its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from emerge.relate.derive import load_program
from emerge.rules import api, certificates
from emerge.rules.kinds import check_kind
from emerge.rules.laws import laws_of
from emerge.util.errors import RuleError


def test_every_shipped_law_has_a_current_certificate() -> None:
    levels = api.admit()
    definitions = {rule.name for rule in api.list_rules() if rule.kind == "kernel"}
    assert set(levels) == set(laws_of(load_program())) | set(api.equality_rules()) | definitions
    assert {levels[n] for n in set(levels) - definitions} <= {"proved", "tested"}
    # a rule that starts from an equality is proved, not tried on facts
    assert all(rule.meaning for rule in api.list_rules())
    untried = {r.name for r in api.list_rules() if not r.facts and r.kind != "kernel"}
    assert untried == {r.name for r in api.equality_rules().values() if r.has_premise}


def test_missing_and_stale_certificates_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    held = certificates.read_shipped()
    monkeypatch.setattr(
        certificates, "read_shipped", lambda path=None: {n: c for n, c in held.items() if n != "transport"}
    )
    with pytest.raises(RuleError, match=r"transport\.dl:\d+:\d+: the shipped law 'transport' has no certificate"):
        api.admit()
    assert api.admit([], ["transport"])["transport"] == "assumed"
    monkeypatch.setattr(certificates, "read_shipped", lambda path=None: held)
    law = laws_of(load_program())["transport"]
    monkeypatch.setattr(certificates, "read_refuted", lambda path=None: {"transport": (law.hash, "derives nonsense")})
    assert api.admit()["transport"] == "proved"
    monkeypatch.setattr(
        certificates, "read_shipped", lambda path=None: {n: c for n, c in held.items() if n != "transport"}
    )
    with pytest.raises(RuleError, match="found false: it derives nonsense"):
        api.admit([], ["transport"])


def test_files_are_read_back(tmp_path: Path) -> None:
    held = certificates.read_shipped()
    path = tmp_path / "certificates.json"
    certificates.write_shipped(held, {"gone": ("abc", "false")}, path)
    assert certificates.read_shipped(path) == held
    assert certificates.read_refuted(path) == {"gone": ("abc", "false")}
    path.write_text("{")
    assert certificates.read_shipped(path) == {}


def test_show_and_check_by_name() -> None:
    text = api.show_rule("linear-factors")
    assert "linear_in" in text
    assert "tested" in text
    with pytest.raises(RuleError, match="no law 'linear-factor'"):
        api.show_rule("linear-factor")
    lines, passed = api.check_rules(["linear-factors", "kernel-silu-and-mul"], seed=5)
    assert passed
    assert sum(line.startswith("pass") for line in lines) == 2


@pytest.mark.parametrize(
    ("relation", "kind", "second"),
    [("linear_in", "exp", 1), ("linear_in", "add", 1), ("linear_all", "mul", None), ("monotone_in", "square", 1),
     ("monotone_in", "log", 1), ("monotone_in", "sub", 2), ("commutative", "sub", None), ("extremum_of", "sum", "max"),
     ("extremum_of", "max", "min"), ("linear_in", "lookup", 1)],
)  # fmt: skip
def test_wrong_claims_about_kinds(relation: str, kind: str, second: int | str | None) -> None:
    found = check_kind(relation, kind, second, 0)
    assert found.counterexample or not found.samples
