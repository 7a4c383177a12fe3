"""The bug corpus: right twins are EQUIVALENT, wrong twins NOT_EQUIVALENT, and findings point at the blame."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import make_cases
import pytest
from support.pairs import case_problem, largest_difference, stops, unproved

from emerge.engine.run import available_engines
from emerge.graph.source import load_case
from emerge.relate.derive import Derivation, Problem, derive
from emerge.verdict.decide import decide
from emerge.verdict.types import PairResult

HERE = Path(__file__).resolve().parent
ROWS = {row.id: row for row in make_cases.ROWS}
IDS = list(ROWS)
REFUTED = [i for i in IDS if ROWS[i].wrong_verdict == "NOT_EQUIVALENT"]
#: Rows whose twins differ in rounding only.
ROUNDING = [i for i in IDS if ROWS[i].diagnosis == "PRECISION"]
#: Rows that Souffle derives too: the engines are compared with one another elsewhere.
SOUFFLE = ["COLL-01", "BIAS-01", "POS-15", "NORM-01"]

#: Right twins that have no derivation yet: where it stops, and what is missing.
UNPROVED = {
    "BIAS-06": "stops at argmax: no law writes an arg-max over a sharded axis as the winner among the ranks' arg-maxes",
}
#: Wrong twins whose first finding is not at the planted node.
MISPLACED = {
    "CTL-03-epsilon": "names the top-k that the sum with the epsilon reads: softmax over the chosen has no counterpart node",
    "BIAS-06": "points at the maximum of each rank, for the right spelling of the arg-max has no derivation either",
}
#: Wrong twins whose derivation stops nowhere.
NO_FRONTIER = {
    "QKV-03": "axis conflict: axes that do not nest take the axes of every tied tensor with them",
    "SHARD-07": "axis conflict",
    "ROUTE-04": "everything is aligned, the output up to a factor",
}


@cache
def problem(row: str, twin: str) -> Problem:
    return case_problem(load_case(HERE / row / twin), expectations(row)["mesh"])


@cache
def derived(row: str, twin: str, engine: str) -> Derivation:
    if engine not in available_engines():
        pytest.skip(f"the {engine} engine is not installed here")
    return derive(problem(row, twin), engine=engine)


@cache
def expectations(row: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((HERE / row / "case.json").read_text(encoding="utf-8"))
    return found


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Rows by engines: the embedded one for all."""
    if "engine" in metafunc.fixturenames:
        pairs = [(i, "embedded") for i in IDS] + [(i, "souffle") for i in SOUFFLE]
        metafunc.parametrize(("row", "engine"), pairs)


def test_files_are_what_the_script_makes(tmp_path: Path) -> None:
    make_cases.write_all(tmp_path)
    made = {p.relative_to(tmp_path): p.read_text(encoding="utf-8") for p in tmp_path.rglob("*.json")}
    kept = {p.relative_to(HERE): p.read_text(encoding="utf-8") for p in HERE.rglob("*.json")}
    assert sorted(made) == sorted(kept)
    stale = [str(p) for p in made if made[p] != kept[p]]
    assert not stale, f"run tests/bugs/make_cases.py; these differ: {stale}"


def test_right_twin_is_proved(row: str, engine: str, request: pytest.FixtureRequest) -> None:
    if row in UNPROVED:
        request.applymarker(pytest.mark.xfail(reason=UNPROVED[row], strict=True))
    result = derived(row, "right", engine)
    assert not unproved(result), stops(result)


def test_wrong_twin_is_not_proved(row: str, engine: str) -> None:
    if row in ROUNDING:
        pytest.skip("the twins compute the same over the reals")
    assert unproved(derived(row, "wrong", engine))


def test_derivation_stops_at_the_blame(row: str, engine: str, request: pytest.FixtureRequest) -> None:
    if row in ROUNDING:
        pytest.skip("the twins compute the same over the reals")
    if row in NO_FRONTIER:
        request.applymarker(pytest.mark.xfail(reason=NO_FRONTIER[row], strict=True))
    result = derived(row, "wrong", engine)
    found = {result.reference.op_node[o] for o, _ in result.result.relations["frontier"]}
    blamed = expectations(row)["wrong"]["blame"]["reference"]
    assert found & set(blamed), f"stops at {sorted(found)}, expected {blamed}"


@cache
def verdict(row: str, twin: str) -> PairResult:
    pytest.importorskip("torch", reason="executing graphs needs torch")
    from emerge.execute.ops.defined import register
    from emerge.execute.refute import refute
    from emerge.kernels.registry import definitions

    register(definitions(()))
    return decide(problem(row, twin), derived(row, twin, "embedded"), lambda p, d: refute(p, d, device="cpu"))


@pytest.mark.parametrize("row", IDS)
def test_verdict_of_the_right_twin(row: str, request: pytest.FixtureRequest) -> None:
    if row in UNPROVED:
        request.applymarker(pytest.mark.xfail(reason=UNPROVED[row], strict=True))
    assert verdict(row, "right").verdict == expectations(row)["right"]["verdict"]


@pytest.mark.parametrize("row", IDS)
def test_right_twin_is_not_refuted(row: str) -> None:
    assert verdict(row, "right").verdict != "NOT_EQUIVALENT"


@pytest.mark.parametrize("row", IDS)
def test_verdict_of_the_wrong_twin(row: str) -> None:
    found = verdict(row, "wrong")
    assert found.verdict == expectations(row)["wrong"]["verdict"], found.reason


@pytest.mark.parametrize("row", REFUTED)
def test_findings_point_at_the_blame(row: str, request: pytest.FixtureRequest) -> None:
    if row in MISPLACED:
        request.applymarker(pytest.mark.xfail(reason=MISPLACED[row], strict=True))
    blame = expectations(row)["wrong"]["blame"]
    found = verdict(row, "wrong").findings
    shown = [(f.kind, f.reference_nodes, f.implementation_nodes) for f in found]
    first = {n.partition(":")[2] for n in found[0].implementation_nodes}
    assert set(found[0].reference_nodes) & set(blame["reference"]), shown
    assert not first or first & set(blame["implementation"]), shown
    ranks = {int(n.partition(":")[0]) for f in found for n in f.implementation_nodes}
    assert ranks >= set(blame.get("ranks", ())), found
    lines = {f.reference_source for f in found} | {f.implementation_source for f in found}
    assert any(line and line.startswith("tests/bugs/") for line in lines), lines


@pytest.mark.parametrize("row", ROUNDING)
def test_rounding_is_found_at_the_blame(row: str) -> None:
    blame = expectations(row)["wrong"]["blame"]
    found = verdict(row, "wrong").findings
    assert found
    assert {f.kind for f in found} == {"PRECISION"}
    for finding in found:
        assert set(finding.reference_nodes) <= set(blame["reference"]), finding
        assert {n.partition(":")[2] for n in finding.implementation_nodes} <= set(blame["implementation"]), finding
        assert {finding.found, finding.expected} == {"bfloat16", "float32"}
        assert None not in (finding.reference_source, finding.implementation_source, finding.hint)


@pytest.mark.parametrize("row", IDS)
def test_right_twins_round_alike(row: str) -> None:
    assert not [f for f in verdict(row, "right").findings if f.kind == "PRECISION"]


@pytest.mark.parametrize("row", IDS)
def test_blamed_nodes_exist(row: str) -> None:
    blame = expectations(row)["wrong"]["blame"]
    p = problem(row, "wrong")
    assert set(blame["reference"]) <= {n.name for n in p.reference.graphs[0].nodes}
    for name in blame["implementation"]:
        assert any(name in {n.name for n in g.nodes} for g in p.implementation.graphs), name


@pytest.mark.parametrize("row", IDS)
def test_execution_agrees_with_the_expected_verdicts(row: str) -> None:
    pytest.importorskip("torch", reason="executing graphs needs torch")
    from emerge.execute.ops.defined import register
    from emerge.kernels.registry import definitions

    register(definitions(()))
    for seed in (0, 1):
        assert largest_difference(problem(row, "right"), {}, seed) < 1e-9
        if row in REFUTED:
            assert largest_difference(problem(row, "wrong"), {}, seed) > ROWS[row].smallest


def test_sizes_are_generic() -> None:
    """No axis of an input has one position: layouts, sums and broadcasts along such an axis cannot be told apart."""
    for row in IDS:
        for twin in ("right", "wrong"):
            p = problem(row, twin)
            for graph in [*p.reference.graphs, *p.implementation.graphs]:
                assert all(n != 1 for i in graph.inputs for n in i.shape), f"{row}/{twin}: {graph.name}"
