"""Captured graphs of real frameworks: executed, not only parsed."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from emerge.execute.compare import compare_values, defined_fraction, respond, tolerance
from emerge.execute.decisions import Decisions
from emerge.execute.dist_inputs import build_dist_inputs
from emerge.execute.lockstep import run_ranks, run_sequential
from emerge.execute.memory import estimate_peak
from emerge.execute.options import Options, seeded_fill
from emerge.execute.sampling import infer_ranges, sample_inputs
from emerge.graph.json_io import read_graph
from emerge.graph.model import Graph, TensorType
from emerge.graph.relations import Leaf
from emerge.graph.relations_io import read_relations

ROOT = Path(__file__).resolve().parents[2]
SUITE = Path(os.environ.get("EMERGE_PEER_SUITE", ROOT.parent / "shared" / "peer_suite"))
pytestmark = [
    pytest.mark.peer_suite,
    pytest.mark.skipif(not SUITE.is_dir(), reason=f"peer suite not found at {SUITE} (set EMERGE_PEER_SUITE)"),
]

#: Megatron GPT, one layer: every size and multiple of sizes, mapped to a small one that keeps all the ratios it needs.
SMALL_GPT = {
    1536: 32, 768: 16, 384: 8, 2304: 48, 1152: 24, 3072: 64, 24: 4, 12: 2, 96: 12, 32: 4, 8: 6, 192: 24,
    98304: 40, 49152: 20, 12288: 192, 6144: 96,
}  # fmt: skip


def shrink(graph: Graph, sizes: dict[int, int]) -> Graph:
    def size(value: Any) -> Any:
        if isinstance(value, list):
            return [size(v) for v in value]
        return sizes.get(value, value) if isinstance(value, int) and not isinstance(value, bool) else value

    def shape(value: Any) -> Any:
        return None if value is None else tuple(size(list(value)))

    inputs = [replace(i, shape=shape(i.shape)) for i in graph.inputs]
    nodes = [
        replace(
            n,
            args=size(n.args),
            kwargs={k: size(v) for k, v in n.kwargs.items()},
            shape=shape(n.shape),
            elements={k: TensorType(e.dtype, shape(e.shape)) for k, e in n.elements.items()},
        )
        for n in graph.nodes
    ]
    return replace(graph, inputs=inputs, nodes=nodes)


def load(case: str, sizes: dict[int, int] | None = None) -> tuple[Graph, list[Graph], Any]:
    folder = SUITE / case
    relations = read_relations(folder / "relations.json")
    graphs = [read_graph(folder / f"rank{r}.json") for r in range(relations.world_size)]
    seq = read_graph(folder / "seq.json")
    if sizes:
        return shrink(seq, sizes), [shrink(g, sizes) for g in graphs], relations
    return seq, graphs, relations


def execute(seq: Graph, graphs: list[Graph], relations: Any, scale: float, **options: Any) -> tuple[Any, Any]:
    values = sample_inputs(seq, 1, scale=scale, ranges=infer_ranges(seq))
    built = build_dist_inputs(relations.usable_inputs(), values, graphs)
    assert built.undetermined == []
    left = run_sequential(seq, values, options=Options(**options))
    right = run_ranks(graphs, built.values, relations.groups.get("dist"), options=Options(**options))
    return left, right


def test_gradient_accumulation_bug_is_a_factor_of_two():
    seq, graphs, relations = load("bug_grad_accumulation")
    values = sample_inputs(seq, 7, scale=1.0)
    built = build_dist_inputs(relations.usable_inputs(), values, graphs)
    assert built.undetermined == []
    assert built.values[0]["arg5_1"].tolist() == values["arg2_1"][4:].tolist()

    def reference(p):
        return run_sequential(seq, values, options=Options(perturbation=p))

    def implementation(p):
        return run_ranks(graphs, built.values, relations.groups.get("dist"), options=Options(perturbation=p))[0]

    left, right = respond(reference), respond(implementation)
    (expected,) = relations.expected_outputs
    a, b = left.base[expected.seq], right.base[expected.dist[0].name]
    limit = tolerance(a, b, max(left.by_name[expected.seq], right.by_name[expected.dist[0].name]))
    difference = compare_values(a, b, limit)
    assert difference is not None
    start = values["arg4_1"].double()
    torch.testing.assert_close(b - start, 2 * (a - start))


@pytest.mark.parametrize("scale", [1e-3, 1.0])
def test_scaled_down_gpt_tensor_parallel_equals_sequential(scale):
    seq, graphs, relations = load("gpt_tp2_layer1", SMALL_GPT)
    decisions = Decisions()
    left, right = execute(seq, graphs, relations, scale, decisions=decisions)
    assert decisions.tight == []
    assert relations.expected_outputs
    for entry in relations.expected_outputs:
        for leaf in entry.dist:
            a, b = left[entry.seq], right[leaf.rank][leaf.name]
            assert bool(torch.isfinite(a).all())
            assert compare_values(a, b, tolerance(a, b)) is None
    # The same run with other uninitialised memory: nothing depends on it.
    _, again = execute(seq, graphs, relations, scale, fill=seeded_fill(3))
    for entry in relations.expected_outputs:
        assert isinstance(entry.dist[0], Leaf)
        assert torch.equal(again[0][entry.dist[0].name], right[0][entry.dist[0].name])


def test_gpt_with_a_collective_removed_differs():
    seq, graphs, relations = load("gpt_tp2_layer1", SMALL_GPT)
    for graph in graphs:
        # all-reduce of the exponential sums of the vocabulary-parallel cross entropy
        node = next(n for n in graph.nodes if n.name == "all_reduce_3")
        node.op, node.args = "aten.clone.default", node.args[:1]
    left, right = execute(seq, graphs, relations, 1.0)
    (entry,) = [e for e in relations.expected_outputs if e.seq == "div_2"]
    a, b = left["div_2"], right[0][entry.dist[0].name]
    assert compare_values(a, b, tolerance(a, b)) is not None


#: The same for the graphs with backward; heads = batch, since 512 is both batch * heads / 2 and half a sequence.
SMALL_TRAIN = {
    1024: 16, 32: 4, 16: 2, 512: 8, 768: 6, 1536: 12, 3072: 24, 6144: 48, 2304: 18, 4608: 36, 48: 3, 144: 9,
    16384: 32, 32768: 64, 2048: 20, 98304: 22, 49152: 11, 1048576: 256, 524288: 128,
}  # fmt: skip


@pytest.mark.parametrize("case", ["bug_missing_switchmlp_allreduce", "bug_missing_allreduce_under_wrong_config"])
def test_gradient_bugs_are_seen_by_execution(case):
    seq, graphs, relations = load(case, SMALL_TRAIN)
    values = sample_inputs(seq, 2, scale=1.0, ranges=infer_ranges(seq))
    built = build_dist_inputs(relations.usable_inputs(), values, graphs)
    assert built.undetermined == []
    (entry,) = [e for e in relations.expected_outputs if e.violated]
    left = run_sequential(seq, values, keep=[entry.seq])
    right = run_ranks(graphs, built.values, relations.groups.get("dist"), keep=[[x.name] for x in entry.dist])
    pieces = [right[x.rank][x.name] for x in entry.dist]
    a = left[entry.seq]
    b = torch.cat(pieces, entry.dim) if entry.kind == "shard" else pieces[0]
    assert defined_fraction(a) == 1.0
    assert compare_values(a, b, tolerance(a, b)) is not None
    if entry.kind == "replicated":
        # The missing all-reduce: the sum over the ranks is what a correct program has.
        total = sum(pieces)
        assert compare_values(a, total, tolerance(a, total)) is None


def test_memory_estimate_of_the_captured_gpt_is_in_the_expected_range():
    seq, _, _ = load("gpt_tp2_layer1")
    estimate = estimate_peak(seq)
    scores = 8 * 24 * 1536 * 1536 * 8
    logits = 12288 * 98304 * 8
    assert max(scores, 2 * logits) < estimate.peak < 3 * (scores + 2 * logits)
    assert estimate.unknown == ()


@pytest.mark.parametrize("case", ["gpt_tp2_layer1", "qwen2_tp2_layer1", "aws_llama_tp2_layer1"])
def test_every_operator_has_semantics_except_named_kernels(case):
    from emerge.execute.collectives import is_collective
    from emerge.execute.ops import lookup

    seq, graphs, _ = load(case)
    ops = {n.op for g in (seq, *graphs) for n in g.nodes}
    missing = {o for o in ops if not is_collective(o) and not o.endswith("wait_tensor.default") and lookup(o) is None}
    assert missing == set()


def test_llama_in_hlo_with_a_small_vocabulary():
    # Everything but the vocabulary is at its captured size.
    seq, graphs, relations = load("aws_llama_tp2_layer1", {128256: 48, 64128: 24})
    ranges = {i.name: (0, 4) for i in seq.inputs}
    values = sample_inputs(seq, 1, scale=1e-2, ranges=ranges)
    values["p1.2"] = torch.arange(64, dtype=torch.int32)
    built = build_dist_inputs(relations.usable_inputs(), values, graphs)
    assert built.undetermined == []
    left = run_sequential(seq, values)
    right = run_ranks(graphs, built.values, relations.groups.get("dist"))
    for entry in [*relations.expected_outputs, *relations.extra_outputs]:
        pieces = [right[x.rank][x.name] for x in entry.dist]
        b = torch.cat(pieces, entry.dim) if entry.kind == "shard" else pieces[0]
        a = left[entry.seq]
        assert float(a.abs().max()) > 0
        assert compare_values(a, b, tolerance(a, b)) is None
