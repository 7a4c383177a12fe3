"""Mixture-of-experts models of Transformers against their own expert parallelism, and the graphs with one fault each."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from emerge.cli.main import run_main

pytest.importorskip("torch", reason="capturing live models needs torch")
pytest.importorskip("transformers", reason="needs the extra 'hf'")

SIZES = "vocab_size: 48, hidden_size: 32, num_hidden_layers: 1, num_attention_heads: 4, num_key_value_heads: 4"
MIXTRAL = (
    f"MixtralForCausalLM, config: {{{SIZES}, intermediate_size: 24, num_local_experts: 4, num_experts_per_tok: 2}}"
)
QWEN = (
    f"Qwen3MoeForCausalLM, config: {{{SIZES}, intermediate_size: 40, moe_intermediate_size: 24, head_dim: 8, "
    "num_experts: 8, num_experts_per_tok: 3}"
)
INPUTS = "inputs: {batch: 2, seq: 3}"

pytestmark = pytest.mark.usefixtures("shared_cache")


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def shared_cache(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EMERGE_CACHE", str(cache))


def verdict(tmp_path: Path, reference: str, implementation: str) -> tuple[int, dict[str, Any]]:
    """Status and the report of one pair."""
    campaign = tmp_path / "experts.yaml"
    campaign.write_text(
        "campaign: experts\nengine: embedded\npairs:\n"
        f"  - id: pair\n    reference: {reference}\n    implementation: {implementation}\n    relations: auto\n"
    )
    status = run_main(["verify", str(campaign), "--out", str(tmp_path / "out")])
    return status, json.loads((tmp_path / "out" / "report.json").read_text())["pairs"][0]


def model(text: str, options: str = "") -> str:
    return f"{{hf: {{architecture: {text}{options}}}, {INPUTS}}}"


@pytest.mark.parametrize(
    ("reference", "implementation"),
    [
        pytest.param(model(MIXTRAL), model(MIXTRAL, ", tp_size: 2, ep_size: 2"), id="sorted"),
        pytest.param(model(MIXTRAL), model(MIXTRAL, ", tp_size: 4, ep_size: 4"), id="one expert per rank"),
        pytest.param(
            model(MIXTRAL), model(MIXTRAL, ", tp_size: 2, ep_size: 2, experts: batched_mm"), id="one matrix per row"
        ),
        pytest.param(model(MIXTRAL, ", experts: batched_mm"), model(MIXTRAL, ", tp_size: 2"), id="sharded matrices"),
        pytest.param(model(QWEN), model(QWEN, ", tp_size: 2, ep_size: 2"), id="qwen3"),
    ],
)
def test_expert_parallelism_of_transformers(tmp_path: Path, reference: str, implementation: str) -> None:
    status, pair = verdict(tmp_path, reference, implementation)
    assert (status, pair["verdict"]) == (0, "EQUIVALENT"), pair["reason"]


# ---- faults ------------------------------------------------------------------------------------------------------

Graph = dict[str, Any]


def node(graph: Graph, op: str, count: int = 0) -> dict[str, Any]:
    """The ``count``-th node of an operator."""
    return [n for n in graph["nodes"] if n["op"].startswith(op)][count]


def no_all_reduce(graph: Graph) -> None:
    done = node(graph, "_c10d_functional.all_reduce", -1)
    graph["nodes"].remove(done)
    next(n for n in graph["nodes"] if n["args"][:1] == [{"ref": done["name"]}])["args"][0] = done["args"][0]


def other_rank(graph: Graph) -> None:
    compared = node(graph, "aten.ne.")
    compared["args"][1] = 1 - compared["args"][1]


def not_inverted(graph: Graph) -> None:
    put = node(graph, "aten.index_put", -1)
    node(graph, "aten.index.Tensor", -1)["args"][1] = [put["args"][1][0]]


def other_counts(graph: Graph) -> None:
    """Offsets of the rows in their own order: the running sum of the experts themselves."""
    counts = node(graph, "aten.histc")
    counts["args"][2:4] = [1, counts["args"][3] + 1]


FAULTS: dict[str, Callable[[Graph], None]] = {
    "all-reduce missing": no_all_reduce,
    "experts of the other rank": other_rank,
    "put back by the order itself": not_inverted,
    "counts of other experts": other_counts,
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_refuted(tmp_path: Path, fault: str) -> None:
    for name, options in (("seq", ""), ("ranks", ", tp_size: 2, ep_size: 2")):
        spec = tmp_path / f"{name}.yaml"
        spec.write_text(f"hf: {{architecture: {MIXTRAL}{options}}}\n{INPUTS}\n")
        assert run_main(["capture", str(spec), "-o", str(tmp_path / name)]) == 0
    for file in (tmp_path / "ranks").iterdir():
        graph = json.loads(file.read_text())
        FAULTS[fault](graph)
        file.write_text(json.dumps(graph))
    status, pair = verdict(tmp_path, str(tmp_path / "seq"), str(tmp_path / "ranks"))
    assert (status, pair["verdict"]) == (1, "NOT_EQUIVALENT"), pair["reason"]
