"""A user drops one `.dl` and one `.egg` file: an UNKNOWN pair becomes EQUIVALENT; wrong files are refused by name."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import emerge
from emerge.graph.model import Graph
from emerge.util.errors import EmergeError
from emerge.verdict.types import PairResult
from tests.support.build import GraphBuilder

RULES = Path(__file__).parents[2] / "docs" / "examples" / "my_rules"
ROWS, WIDTH, TP = 3, 4, 2


def program(rank: int = 0, tp: int = 1) -> Graph:
    """A projection, our own gate, and magnitudes; the parallel program writes them as a maximum."""
    g = GraphBuilder("tp" if tp > 1 else "seq", rank, tp, {"tp": tp} if tp > 1 else None)
    x = g.input("x", [ROWS, WIDTH])
    w, v = (g.input(n, [WIDTH, WIDTH // tp]) for n in ("w", "v"))
    down = g.input("down", [WIDTH // tp, WIDTH])
    a, b = g.aten("mm", x, w), g.aten("mm", x, v)
    gated = g.op("mylib.gate.default", a, b, result=("float32", g.shape(a)))
    if tp == 1:
        act = g.aten("abs", gated)
    else:
        act = g.aten("maximum", gated, g.aten("neg", gated))
    return g.build(g.all_reduce(g.aten("mm", act, down), "tp"))


RELATIONS = {"x": "b m ~ b m", "w": "m (tp h) ~ m h", "v": "m (tp h) ~ m h", "down": "(tp h) m ~ h m"}


def compare(rules: Path | None = None) -> PairResult:
    ranks = [program(rank, TP) for rank in range(TP)]
    return emerge.compare(
        program(), ranks, relations=RELATIONS, mesh={"tp": TP}, engine="embedded", rules=[rules] if rules else []
    )


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    pytest.importorskip("egglog")
    pytest.importorskip("torch")
    monkeypatch.setenv("EMERGE_CACHE", str(tmp_path / "cache"))
    return Path(shutil.copytree(RULES, tmp_path / "my_rules"))


def test_both_files_together_prove_the_pair(folder: Path) -> None:
    found = compare()
    assert found.verdict == "UNKNOWN"
    assert "mylib.gate" in found.reason or "gate" in " ".join(f.message for f in found.findings)
    for alone in ("gate.dl", "identities.egg"):
        other = folder.parent / alone.partition(".")[0]
        other.mkdir()
        for file in folder.iterdir():
            if file.name in (alone, "gate.json"):
                shutil.copy(file, other)
        assert compare(other).verdict == "UNKNOWN"
    found = compare(folder)
    assert (found.verdict, found.reason) == ("EQUIVALENT", "")
    assert found.rules_used["mylib-gate"] > 0
    assert found.rules_used["abs-is-maximum"] > 0


@pytest.mark.parametrize(
    ("file", "right", "wrong", "name", "line"),
    [
        ("identities.egg", "(bigint -1)", "(bigint 1)", "abs-is-maximum", "identities.egg:2"),
        ("gate.dl", '"t f, t f -> t f"', '"t f, f t -> t f"', "mylib-gate", "gate.dl:5"),
    ],
)
def test_wrong_files_are_refused(folder: Path, file: str, right: str, wrong: str, name: str, line: str) -> None:
    path = folder / file
    text = path.read_text(encoding="utf-8")
    assert right in text
    path.write_text(text.replace(right, wrong), encoding="utf-8")
    with pytest.raises(EmergeError) as caught:
        compare(folder)
    assert name in str(caught.value)
    assert line in str(caught.value)
