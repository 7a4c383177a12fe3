"""Refutation of captured graphs of real frameworks, right and with faults planted by hand."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from emerge.execute.refute import Refutation, refute
from emerge.facts.families import mesh_from, zip_families
from emerge.facts.mesh import Mesh
from emerge.graph.model import Graph, Node, Ref
from emerge.graph.source import load_case
from emerge.relate.derive import Problem, derive
from emerge.relate.statement import entry_statements

ROOT = Path(__file__).resolve().parents[2]
SUITE = Path(os.environ.get("EMERGE_PEER_SUITE", ROOT.parent / "shared" / "peer_suite"))
pytestmark = [
    pytest.mark.peer_suite,
    pytest.mark.skipif(not SUITE.is_dir(), reason=f"peer suite not found at {SUITE} (set EMERGE_PEER_SUITE)"),
]


def run(name: str, edit: Callable[[list[Graph]], None] | None = None) -> Refutation:
    case = load_case(SUITE / name)
    if edit is not None:
        edit(case.ranks)
    left, right = zip_families([case.reference]), zip_families(case.ranks)
    mesh, types = Mesh(mesh_from(len(case.ranks), None)), left.types()
    claimed = [*case.relations.expected_outputs, *case.relations.extra_outputs]
    given, claims = (
        [s for e in entries for s in entry_statements(e, types[e.seq].shape, right, mesh)]
        for entries in (case.relations.usable_inputs(), claimed)
    )
    problem = Problem(left, right, mesh, given, claims)
    return refute(problem, derive(problem, engine="embedded"), device="cpu")


@pytest.mark.parametrize("case", ["gpt_tp2_layer1", "gpt_tp2_layer2", "gpt_tp4_layer1", "gpt_tp8_layer1"])
def test_right_pairs_agree_at_two_size_vectors(case):
    found = run(case)
    assert found.outcome == "agree", found.reason
    assert found.sizes == "reduced"
    assert len(found.vectors) == 2
    assert found.vectors[0] != found.vectors[1]


def node(graph: Graph, name: str) -> Node:
    return next(n for n in graph.nodes if n.name == name)


def identity(name: str) -> Callable[[Graph], None]:
    def edit(graph: Graph) -> None:
        n = node(graph, name)
        n.op, n.args, n.kwargs = "aten.clone.default", n.args[:1], {}

    return edit


def argument(name: str, position: int | str, value: object) -> Callable[[Graph], None]:
    def edit(graph: Graph) -> None:
        n = node(graph, name)
        if isinstance(position, int):
            n.args[position] = value  # type: ignore[call-overload]
        else:
            n.kwargs[position] = value  # type: ignore[assignment]

    return edit


def exchange(a: str, b: str, position: int) -> Callable[[Graph], None]:
    def edit(graph: Graph) -> None:
        x, y = node(graph, a), node(graph, b)
        x.args[position], y.args[position] = y.args[position], x.args[position]

    return edit


def scatter_without_sum(graph: Graph) -> None:
    n = node(graph, "reduce_scatter_tensor")
    n.op, n.args = "aten.slice.Tensor", [n.args[0], 0, 768 * graph.rank, 768 * (graph.rank + 1)]


def only_rank(rank: int, edit: Callable[[Graph], None]) -> Callable[[Graph], None]:
    return lambda graph: edit(graph) if graph.rank == rank else None


def shards_swapped(graph: Graph) -> None:
    other = 1 - graph.rank
    node(graph, "slice_4").args[2:4] = [768 * other, 768 * (other + 1)]


def no_residual(graph: Graph) -> None:
    n = node(graph, "add_6")
    n.op, n.args = "aten.clone.default", [Ref("getitem_15")]


FAULTS: dict[str, tuple[Callable[[Graph], None], str]] = {
    "embedding all-reduce dropped": (identity("all_reduce"), "add"),
    "sum of exponentials not reduced": (identity("all_reduce_3"), "log"),
    "maximum not reduced": (identity("all_reduce_1"), "sub"),
    "all-reduce of the wrong operation": (argument("all_reduce", 1, "max"), "add"),
    "softmax over queries": (argument("_softmax", 1, 2), "_softmax"),
    "attention scale": (argument("baddbmm", "alpha", 0.2), "baddbmm"),
    "layer norm eps": (argument("fused_layer_norm_affine_fwd", 4, 1e-6), "fused_layer_norm_affine_fwd"),
    "mask constant": (argument("masked_fill", 2, -5.0), "masked_fill"),
    "gelu variant": (argument("gelu", "approximate", "tanh"), "gelu"),
    # k q^T holds the scores transposed, so the programs part where the mask meets them
    "query and key exchanged": (exchange("getitem_5", "getitem_6", 1), "masked_fill"),
    "two weights exchanged": (
        exchange("fused_layer_norm_affine_fwd", "fused_layer_norm_affine_fwd_1", 1),
        "fused_layer_norm_affine_fwd",
    ),
    "slice instead of reduce-scatter": (scatter_without_sum, "add_2"),
    "sequence shards swapped": (shards_swapped, "native_dropout"),
    "residual dropped": (no_residual, "add_6"),
    "vocabulary offset and bound of rank 1": (
        only_rank(1, lambda g: (argument("sub", 1, 49153)(g), argument("lt", 1, 49153)(g))[0]),
        "index",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_are_refuted_and_located(fault):
    edit, place = FAULTS[fault]

    def every(graphs: list[Graph]) -> None:
        for graph in graphs:
            edit(graph)

    found = run("gpt_tp2_layer1", every)
    assert found.outcome == "refuted", found.reason
    assert found.sizes == "reduced"
    assert found.output == "div_2"
    assert found.diverging[0].reference == place


def test_the_eps_of_an_inner_norm_shows_in_the_loss():
    def edit(graphs: list[Graph]) -> None:
        for graph in graphs:
            argument("fused_layer_norm_affine_fwd_1", 4, 1e-6)(graph)

    found = run("gpt_tp4_layer1", edit)
    assert found.outcome == "refuted", found.reason
    assert [d.reference for d in found.diverging] == ["fused_layer_norm_affine_fwd_1"]


def test_a_wrong_offset_of_one_rank_leaves_its_table():
    found = run("gpt_tp2_layer1", lambda graphs: argument("sub", 1, 0)(graphs[1]))
    assert (found.outcome, found.kind) == ("refuted", "OUT_OF_RANGE")
    assert found.diverging[0].implementation == {1: "index"}


def test_uninitialised_memory_is_a_finding_of_its_own():
    def edit(graphs: list[Graph]) -> None:
        for graph in graphs:
            node(graph, "copy_1").op, node(graph, "copy_1").args = "aten.clone.default", [Ref("empty_1")]

    assert run("gpt_tp2_layer1", edit).kind == "UNINITIALISED"


def test_a_constant_within_its_type_is_no_fault():
    def edit(graphs: list[Graph]) -> None:
        for graph in graphs:
            node(graph, "baddbmm").kwargs["alpha"] = 0.1767767

    assert run("gpt_tp2_layer1", edit).outcome == "agree"


def test_bug_cases():
    accumulation = run("bug_grad_accumulation")
    assert (accumulation.outcome, accumulation.sizes) == ("refuted", "captured")
    missing = run("bug_missing_allreduce_under_wrong_config")
    assert (missing.outcome, missing.sizes, missing.output) == ("refuted", "reduced", "mm_7")
