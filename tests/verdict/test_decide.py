"""From a derivation to a verdict: evidence, reasons, findings, and what an execution may and may not change."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "cli"))

from mlp_graphs import write_case, write_sides

from emerge.campaign.admission import law_levels
from emerge.campaign.build import prepare
from emerge.campaign.config import PairSpec
from emerge.campaign.run import RunOptions, run_pair
from emerge.graph.json_io import read_graph, write_graph
from emerge.graph.model import Node, Ref
from emerge.relate.derive import derive
from emerge.relate.expected import Ambiguity
from emerge.util.errors import ExecutionError, RuleError
from emerge.verdict.decide import decide
from emerge.verdict.types import PairResult


@dataclass
class Outcome:
    """A scripted execution."""

    outcome: str
    reason: str = ""
    kind: str = ""
    output: str = "add"
    difference: Any = None
    sizes: str = "captured"
    vectors: list[dict[str, int]] = field(default_factory=list)
    diverging: list[Any] = field(default_factory=list)
    assumptions: list[tuple[str, str, str]] = field(default_factory=list)
    witnesses: list[Any] = field(default_factory=list)


def verdict(
    folder: Path, refuter: Any = None, *, log: bool = True, ambiguities: tuple = (), **changes: Any
) -> PairResult:
    levels = changes.pop("levels", None)
    prepared = prepare(PairSpec("mlp", case=write_case(folder / "mlp", **changes)))
    derivation = derive(prepared.problem, engine="embedded", log=log)
    return decide(prepared.problem, derivation, refuter, levels=levels, ambiguities=ambiguities)


def never(problem: Any, derivation: Any) -> None:
    raise AssertionError("a proved pair must not be executed")


def test_a_proved_pair_is_not_executed(tmp_path: Path) -> None:
    found = verdict(tmp_path, never)
    assert (found.verdict, found.evidence) == ("EQUIVALENT", "tested")
    nodes = found.coverage["tested"]
    assert nodes > 1, "nodes are counted, not claims"
    assert found.coverage == {"proved": 0, "tested": nodes, "assumed": 0}


def test_coverage_counts_nodes_by_their_own_step(tmp_path: Path) -> None:
    whole = verdict(tmp_path / "a", never, levels={})
    used = whole.rules_used
    steps = ("transport", "layout", "form", "given", "scale", "partial", "all")
    levels = {law: "proved" for law in used if law.startswith(steps)}
    found = verdict(tmp_path / "b", never, levels=levels)
    assert sum(found.coverage.values()) == sum(whole.coverage.values())
    assert found.coverage["proved"] > 0
    weakened = verdict(tmp_path / "c", never, levels=levels | {"given": "assumed"})
    assert weakened.evidence == "assumed"
    assert weakened.coverage == found.coverage, "what the inputs rest on is no part of the steps above them"


def test_evidence_is_the_weakest_law_of_the_best_derivation(tmp_path: Path) -> None:
    used = verdict(tmp_path).rules_used
    proved = dict.fromkeys(used, "proved")
    assert verdict(tmp_path, levels=proved).evidence == "proved"
    assert verdict(tmp_path, levels=proved | {"all-reduce-partial": "assumed"}).evidence == "assumed"
    assert verdict(tmp_path, levels=proved | {"all-gather": "assumed"}).evidence == "proved"


def test_without_a_log_the_weakest_law_counts(tmp_path: Path) -> None:
    assert verdict(tmp_path, log=False).evidence == "tested"
    assert verdict(tmp_path, log=False, levels={"all-gather": "assumed"}).evidence == "assumed"


def test_unknown_without_an_execution_names_the_frontier(tmp_path: Path) -> None:
    found = verdict(tmp_path, reduce=False)
    assert found.verdict == "UNKNOWN"
    assert "no alignment was derived at 'add'" in found.reason
    assert "not executed" in found.reason
    assert [(f.kind, f.severity) for f in found.findings] == [("MISSING_ALL_REDUCE", "warning")]
    assert found.counterexample is None


@pytest.mark.parametrize("outcome", ["agree", "impossible"])
def test_an_execution_that_does_not_refute_leaves_unknown(tmp_path: Path, outcome: str) -> None:
    found = verdict(tmp_path, lambda p, d: Outcome(outcome, "4 samples"), reduce=False)
    assert found.verdict == "UNKNOWN"
    assert "4 samples" in found.reason


def test_an_execution_that_fails_leaves_unknown(tmp_path: Path) -> None:
    def refuter(problem: Any, derivation: Any) -> Any:
        raise ExecutionError("no semantics for foo")

    found = verdict(tmp_path, refuter, reduce=False)
    assert found.verdict == "UNKNOWN"
    assert "no semantics for foo" in found.reason


def test_a_refutation_gives_place_and_counterexample(tmp_path: Path) -> None:
    divergence = SimpleNamespace(
        reference="add", implementation={0: "add", 1: "add"}, cause={}, also=(), first=True
    )
    outcome = Outcome(
        "refuted", "output 'add' differs", difference=SimpleNamespace(max_abs_diff=2.5), sizes="reduced",
        vectors=[{"4": 3}], diverging=[divergence], assumptions=[("index_range", "ids", "why")],
    )  # fmt: skip
    found = verdict(tmp_path, lambda p, d: outcome, reduce=False)
    assert found.verdict == "NOT_EQUIVALENT"
    assert (found.counterexample.output, found.counterexample.max_abs_diff, found.counterexample.sizes) == (
        "add",
        2.5,
        "reduced",
    )
    assert found.sizes == {"4": 3}
    first = found.findings[0]
    assert (first.kind, first.severity, first.reference_nodes) == ("MISSING_ALL_REDUCE", "error", ["add"])
    assert first.implementation_nodes == ["0:add", "1:add"]
    assert (first.reference_source, first.implementation_source) == ("mlp.py:14", "mlp.py:14")
    assert "mm_1 ~ mm_1: a b ~ a b + partial(ranks)" in first.found
    assert [a.name for a in found.assumptions] == ["index_range"]


def test_what_the_execution_itself_diagnoses(tmp_path: Path) -> None:
    witness = SimpleNamespace(draw=SimpleNamespace(seed=9), nodes=[(1, "all_reduce")])
    outcome = Outcome("refuted", "ranks wait for each other", "COLLECTIVE_MISMATCH", "", witnesses=[witness])
    found = verdict(tmp_path, lambda p, d: outcome, kind="max")
    assert found.findings[0].kind == "COLLECTIVE_MISMATCH"
    assert found.findings[0].implementation_nodes == ["1:all_reduce"]
    assert found.findings[0].implementation_source == "mlp.py:13"
    assert found.counterexample.seed == 9


def test_an_open_reading_is_unknown_even_when_all_else_is_proved(tmp_path: Path) -> None:
    open_input = Ambiguity("relations", "w", "w", ("(dp a) ~ a", "(tp a) ~ a"), "two fit")
    found = verdict(tmp_path, never, ambiguities=(open_input,))
    assert found.verdict == "UNKNOWN"
    assert 'relations: {w: "(tp a) ~ a"}' in found.reason


def test_nothing_claimed_is_never_equivalent(tmp_path: Path) -> None:
    prepared = prepare(PairSpec("mlp", case=write_case(tmp_path / "mlp")))
    prepared.problem.outputs.clear()
    found = decide(prepared.problem, derive(prepared.problem, engine="embedded", log=True), never)
    assert found.verdict == "UNKNOWN"
    assert "nothing is claimed" in found.reason


# ---- laws of the user -----------------------------------------------------------------------------------------------

WRONG = '// @law sums-pass-relu\n// @meaning wrong on purpose: relu is not linear\nlinear_in("relu", 1).\n'


def rule_file(folder: Path, text: str) -> Path:
    file = folder / "mine.dl"
    file.write_text(text)
    return file


UNTESTABLE = (
    "// @law nowhere-act\n// @meaning works element by element, says its author\n"
    'operator_signature("nowhere.act.default", 0, "... f -> ... f", "").\n'
)


def with_custom_operator(case: Path) -> Path:
    """The MLP with an operator that no library executes between the two linear layers, on both sides."""
    for file in ("seq.json", "rank0.json", "rank1.json"):
        graph = read_graph(case / file)
        at = next(i for i, n in enumerate(graph.nodes) if n.name == "mm_1")
        source = graph.nodes[at].args[0]
        assert isinstance(source, Ref)
        made = graph.types()[source.name]
        graph.nodes.insert(at, Node("act", "nowhere.act.default", [source], {}, made.dtype, made.shape))
        graph.nodes[at + 1].args[0] = Ref("act")
        write_graph(graph, case / file)
    return case


def test_a_false_law_is_refused_by_name_and_line_even_when_trusted(tmp_path: Path) -> None:
    file = rule_file(tmp_path, WRONG)
    for trust in ([], ["sums-pass-relu"]):
        with pytest.raises(RuleError, match="sums-pass-relu") as error:
            law_levels([file], trust)
        assert f"{file}:" in str(error.value)


def test_a_law_that_nothing_can_execute_needs_trust(tmp_path: Path) -> None:
    file = rule_file(tmp_path, UNTESTABLE)
    with pytest.raises(RuleError, match="nowhere-act") as error:
        law_levels([file], [])
    assert f"{file}:" in str(error.value)
    assert law_levels([file], ["nowhere-act"])["nowhere-act"] == "assumed"


def test_a_nameless_clause_about_a_shipped_relation_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RuleError, match="has no name"):
        law_levels([rule_file(tmp_path, 'linear_in("relu", 1).\n')], [])


def test_trust_must_name_a_law(tmp_path: Path) -> None:
    with pytest.raises(RuleError, match="is no law"):
        law_levels([], ["some-law"])
    with pytest.raises(RuleError, match="is no law"):
        law_levels([rule_file(tmp_path, UNTESTABLE)], ["nowhere-act", "some-law"])


def test_a_trusted_law_weakens_the_evidence(tmp_path: Path) -> None:
    """A custom operator is unknown; only its trusted signature proves the pair, and the verdict says so."""
    spec = PairSpec("p", case=with_custom_operator(write_case(tmp_path / "mlp")), engine="embedded")
    assert run_pair(spec, RunOptions()).verdict == "UNKNOWN"
    spec.rules, spec.trust = [rule_file(tmp_path, UNTESTABLE)], ["nowhere-act"]
    found = run_pair(spec, RunOptions())
    assert (found.verdict, found.evidence) == ("EQUIVALENT", "assumed")
    assert "nowhere-act" in found.rules_used


def test_a_refused_law_is_an_input_error_of_the_pair(tmp_path: Path) -> None:
    reference, implementation = write_sides(tmp_path)
    spec = PairSpec("p", reference=reference, implementation=implementation, relations="auto", engine="embedded")
    spec.rules = [rule_file(tmp_path, WRONG)]
    found = run_pair(spec, RunOptions())
    assert found.verdict is None
    assert "sums-pass-relu" in found.error.message
