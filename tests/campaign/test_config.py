"""Campaign files: what they mean, and one sentence with file and line for everything they may not hold."""

from __future__ import annotations

from pathlib import Path

import pytest

from emerge.campaign.config import load_campaign
from emerge.util.errors import ConfigError


def campaign(folder: Path, text: str):
    (folder / "ref.json").touch()
    (folder / "impl").mkdir(exist_ok=True)
    file = folder / "c.yaml"
    file.write_text(text)
    return load_campaign(file)


PAIR = "  - {reference: ref.json, implementation: impl, relations: auto}\n"


def test_defaults_and_overrides(tmp_path: Path) -> None:
    found = campaign(
        tmp_path,
        "campaign: demo\nmesh: {tp: 2}\nseed: 7\nbudget: {seconds: 60}\nfail_on: [PRECISION]\npairs:\n"
        + PAIR
        + "  - id: other\n    reference: ref.json\n    implementation: impl\n    mesh: {dp: 4}\n    seed: 1\n"
        "    expect: not_equivalent\n    engine: embedded\n    budget: {memory_gb: 2}\n"
        "    relations:\n      'l.*.w': {of: 'm.*.w[0:4]', is: 'a b ~ a b'}\n      b: {placements: {dp: Replicate}}\n"
        "    outputs: {0: 'a ~ a'}\n    ignore: [{finding: PRECISION, reason: known, issue: '#3'}]\n",
    )
    first, second = found.pairs
    assert (first.id, first.mesh, first.seed, first.seconds, first.relations) == ("ref-impl", {"tp": 2}, 7, 60, "auto")
    assert (second.id, second.mesh, second.seed, second.expect, second.engine) == (
        "other", {"dp": 4}, 1, "not_equivalent", "embedded",
    )  # fmt: skip
    assert (second.seconds, second.memory_gb) == (60, 2)
    assert [(r.key, r.of, r.alignment, r.placements) for r in second.relations] == [
        ("l.*.w", "m.*.w[0:4]", "a b ~ a b", ()),
        ("b", None, None, (("dp", "Replicate"),)),
    ]
    assert second.relations[1].place.endswith("c.yaml:18")
    assert second.outputs[0].key == 0
    assert second.ignore[0].issue == "#3"


def test_how_rules_are_validated(tmp_path: Path) -> None:
    found = campaign(
        tmp_path,
        "campaign: demo\nvalidate: {device: cpu, samples: 96}\npairs:\n"
        + PAIR
        + "  - {id: other, reference: ref.json, implementation: impl, relations: auto, validate: {smt_seconds: 1}}\n",
    )
    first, second = (p.validation for p in found.pairs)
    assert (first.device, first.samples, first.smt_seconds) == ("cpu", 96, 5.0)
    assert (second.device, second.samples, second.smt_seconds) == ("cpu", 96, 1.0)


def test_the_hash_depends_on_content_not_on_layout(tmp_path: Path) -> None:
    plain = campaign(tmp_path, "campaign: a\npairs:\n" + PAIR).config_hash
    assert campaign(tmp_path, "# words\npairs:\n" + PAIR + "campaign: a\n").config_hash == plain
    assert campaign(tmp_path, "campaign: b\npairs:\n" + PAIR).config_hash != plain


def test_cases_expand_environment_variables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("one", "two", "not_a_case"):
        (tmp_path / "suite" / name).mkdir(parents=True)
        if name != "not_a_case":
            (tmp_path / "suite" / name / "relations.json").touch()
    monkeypatch.setenv("SUITE_FOR_TEST", str(tmp_path / "suite"))
    found = campaign(tmp_path, "pairs:\n  - cases: '$SUITE_FOR_TEST/*'\n  - {case: suite/one, id: again}\n")
    assert [p.id for p in found.pairs] == ["one", "two", "again"]
    monkeypatch.delenv("SUITE_FOR_TEST")
    with pytest.raises(ConfigError, match="SUITE_FOR_TEST is not set"):
        campaign(tmp_path, "pairs:\n  - cases: '$SUITE_FOR_TEST/*'\n")


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        ("pairs:\n" + PAIR + "enigne: auto\n", 3, "did you mean 'engine'"),
        ("pairs:\n  - {referense: ref.json}\n", 2, "unknown key 'referense'"),
        ("pairs:\n  - reference: ref.json\n    implementation: impl\n    relation: auto\n", 4, "did you mean 'relations'"),
        ("pairs:\n  - reference: {weights: x}\n    implementation: impl\n    relations: auto\n", 2, "exactly one of hf"),
        ("pairs:\n  - reference: {hff: {}}\n    implementation: impl\n    relations: auto\n", 2, "did you mean 'hf'"),
        ("pairs:\n  - reference: ref.json\n    implementation: {weights: x}\n    relations: auto\n", 3, "exactly one of hf"),
        ("pairs:\n  - reference: ref.json\n    implementation: impl\n    given: {}\n", 4, "not in this version"),
        ("pairs:\n  - reference: gone.json\n    implementation: impl\n    relations: auto\n", 2, "does not exist"),
        ("pairs:\n  - reference: ref.json\n    relations: auto\n", 2, "no 'implementation'"),
        ("pairs:\n  - reference: ref.json\n    implementation: impl\n", 2, "no 'relations'"),
        ("pairs:\n  - id: x\n", 2, "none of them"),
        ("pairs: []\n", 1, "at least one"),
        ("engine: fast\npairs:\n" + PAIR, 1, "expected one of auto, embedded, souffle"),
        ("seed: -1\npairs:\n" + PAIR, 1, "integer >= 0"),
        ("mesh: {tp: two}\npairs:\n" + PAIR, 1, "size >= 1 for mesh axis 'tp'"),
        ("mesh: {1: 2}\npairs:\n" + PAIR, 1, "a name for a mesh axis"),
        ("budget: {second: 3}\npairs:\n" + PAIR, 1, "did you mean 'seconds'"),
        ("rules: [nowhere/]\npairs:\n" + PAIR, 1, "does not exist"),
        ("pairs:\n" + PAIR + "  - {reference: ref.json, implementation: impl, relations: auto}\n", 3, "used at"),
        ("pairs:\n  - reference: ref.json\n    implementation: impl\n    relations:\n      w: 3\n", 5, "expected an alignment"),
        ("pairs:\n  - reference: ref.json\n    implementation: impl\n    relations:\n      w: {si: 'a ~ a'}\n", 5, "did you mean 'is'"),  # noqa: E501
        ("pairs:\n  - reference: ref.json\n    implementation: impl\n    relations:\n      w: {of: v}\n", 5, "either 'is' or"),
        ("pairs:\n  - reference: ref.json\n    implementation: impl\n    relations: auto\n    ignore: [{finding: A}]\n", 5, "say why"),  # noqa: E501
        ("seed: 1\nseed: 2\npairs:\n" + PAIR, 2, "stands twice (first in line 1)"),
        ("validate: {samples: 3}\npairs:\n" + PAIR, 1, "at least 24 for 'samples'"),
        ("validate: {smt_seconds: 0}\npairs:\n" + PAIR, 1, "a number > 0 for 'smt_seconds'"),
        ("validate: {device: tpu}\npairs:\n" + PAIR, 1, "expected one of auto, cpu, cuda"),
        ("validate: cuda\npairs:\n" + PAIR, 1, "expected {device: auto"),
        ("pairs: [\n", 2, "not valid YAML"),
        ("pairs: !!python/object/apply:os.system ['true']\n", 1, "is not supported"),
        ("a: &x {b: 1}\npairs: *x\n", 1, "aliases|unknown key"),
    ],
)  # fmt: skip
def test_refused(tmp_path: Path, text: str, line: int, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        campaign(tmp_path, text)
    assert any(m in str(error.value) for m in message.split("|")), str(error.value)
    assert error.value.place == f"{tmp_path / 'c.yaml'}:{line}"


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read"):
        load_campaign(tmp_path / "none.yaml")
