"""Samples, implementation inputs from relations, tight decisions, aliasing and the memory estimate."""

from __future__ import annotations

import pytest
import torch
from execute_graphs import Builder, Text

from emerge.execute.decisions import Decisions
from emerge.execute.dist_inputs import build_dist_inputs
from emerge.execute.lockstep import run_sequential
from emerge.execute.memory import estimate_peak
from emerge.execute.options import Options
from emerge.execute.precision import Precision
from emerge.execute.sampling import SCALES, infer_ranges, sample_inputs
from emerge.graph.relations import ConcatExpr, Leaf, RelationEntry, SliceExpr
from emerge.util.errors import ExecutionError, RelationError


def inputs_graph(*items):
    b = Builder()
    for name, shape, dtype in items:
        b.input(name, shape, dtype)
    return b.done()


# --- samples --------------------------------------------------------------------------------------


def test_samples_are_distinct_seeded_and_in_range():
    graph = inputs_graph(("x", (50, 3), "bfloat16"), ("ids", (4, 5), "int32"), ("m", (20, 6), "bool"))
    one, again, other = (sample_inputs(graph, s, ranges={"ids": (10, 40)}) for s in (1, 1, 2))
    assert all(torch.equal(one[k], again[k]) for k in one)
    assert not torch.equal(one["x"], other["x"])
    assert one["x"].dtype == torch.float64
    assert one["x"].unique().numel() == 150
    assert one["ids"].dtype == torch.int32
    assert one["ids"].unique().numel() == 20
    assert 10 <= int(one["ids"].min()) <= int(one["ids"].max()) < 40
    assert one["m"].dtype == torch.bool
    assert bool((one["m"].any(1) & ~one["m"].all(1)).all())


def test_scales_of_samples():
    graph = inputs_graph(*((f"x{i}", (40,), "float32") for i in range(12)))
    small = sample_inputs(graph, 0, scale=1e-3)
    assert all(float(v.abs().max()) < 6e-3 for v in small.values())
    mixed = [float(v.std()) for v in sample_inputs(graph, 0).values()]
    assert all(any(0.5 < m / s < 2 for s in SCALES) for m in mixed)
    assert len({min(SCALES, key=lambda s, m=m: abs(m / s - 1)) for m in mixed}) == 3


def test_integer_without_range_is_an_error():
    graph = inputs_graph(("ids", (4,), "int64"))
    with pytest.raises(ExecutionError, match=r"ranges\['ids'\]"):
        sample_inputs(graph, 0)
    with pytest.raises(ExecutionError, match="empty"):
        sample_inputs(graph, 0, ranges={"ids": (3, 3)})
    assert sample_inputs(graph, 0, default_range=(0, 2))["ids"].max() < 2


def test_ranges_from_tables():
    b = Builder()
    b.input("w", (30, 4))
    b.input("ids", (5,), "int64")
    b.input("free", (5,), "int64")
    b.input("labels", (5,), "int64")
    cast = b.add("aten._to_copy.default", "ids", shape=(5,), dtype="int64")
    b.add("aten.embedding.default", "w", cast, shape=(5, 4))
    b.add("aten.ge.Scalar", "labels", 17, shape=(5,), dtype="bool")
    b.input("cache", (9, 4))
    b.input("p", (5,), "int64")
    b.multi(
        "auto_functionalized", Text("_C.rotary_embedding.default"), kwargs={"positions": "p", "cos_sin_cache": "cache"}
    )
    assert infer_ranges(b.done()) == {"ids": (0, 30), "labels": (0, 17), "p": (0, 9)}


# --- implementation inputs ------------------------------------------------------------------------


def entry(seq, kind, dist, **more):
    return RelationEntry(seq, kind, tuple(Leaf(*d) for d in dist), **more)


def ranks(*shapes):
    return [inputs_graph(*((name, shape, dtype) for name, shape, dtype in s)) for s in shapes]


def test_replicated_and_sharded_inputs():
    graphs = ranks(*[[("w", (3, 4), "float32"), ("x", (5,), "bfloat16"), ("i", (2,), "int32")]] * 2)
    seq = {"W": torch.randn(3, 8), "X": torch.randn(5), "I": torch.tensor([7, 9])}
    entries = [
        entry("W", "shard", [(0, "w"), (1, "w")], dim=1),
        entry("X", "replicated", [(0, "x"), (1, "x")]),
        entry("I", "replicated", [(0, "i"), (1, "i")]),
    ]
    got = build_dist_inputs(entries, seq, graphs)
    assert got.undetermined == []
    assert torch.equal(torch.cat([v["w"] for v in got.values], 1), seq["W"].double())
    assert torch.equal(got.values[1]["x"], seq["X"].double())
    assert got.values[0]["i"].dtype == torch.int32
    assert got.values[0]["i"].tolist() == [7, 9]


def test_custom_expression_is_inverted_and_repeats_are_carried():
    # Fused q|k: two q heads of 2 rows, one per rank, and one k head of 3 rows held by both ranks.
    q = [SliceExpr(0, 0, 2, Leaf(r, "w")) for r in range(2)]
    k = [SliceExpr(0, 2, 5, Leaf(r, "w")) for r in range(2)]
    expr = ConcatExpr(0, (ConcatExpr(0, tuple(q)), k[0]))
    seq = {"W": torch.arange(7.0)}
    graphs = ranks(*[[("w", (5,), "float32")]] * 2)
    open_ = build_dist_inputs([entry("W", "custom", [(0, "w"), (1, "w")], expr=expr)], seq, graphs)
    assert [(u.rank, u.name, u.missing, u.total) for u in open_.undetermined] == [(1, "w", 3, 5)]
    relation = entry("W", "custom", [(0, "w"), (1, "w")], expr=expr, also_equal=((k[0], k[1]),))
    got = build_dist_inputs([relation], seq, graphs)
    assert got.undetermined == []
    assert got.values[0]["w"].tolist() == [0, 1, 4, 5, 6]
    assert got.values[1]["w"].tolist() == [2, 3, 4, 5, 6]


def test_relations_that_do_not_fit_or_contradict():
    graphs = ranks([("w", (4,), "float32")], [("w", (4,), "float32")])
    seq = {"A": torch.arange(8.0), "B": torch.arange(4.0) + 1, "C": torch.arange(5.0)}
    shard = entry("A", "shard", [(0, "w"), (1, "w")], dim=0)
    with pytest.raises(RelationError, match=r"'B' contradicts the relation of 'A'"):
        build_dist_inputs([shard, entry("B", "replicated", [(0, "w")])], seq, graphs)
    with pytest.raises(RelationError, match=r"\[5\]"):
        build_dist_inputs([entry("C", "replicated", [(0, "w")])], seq, graphs)
    with pytest.raises(RelationError, match=r"\[5\].*\[8\]"):
        build_dist_inputs([entry("C", "shard", [(0, "w"), (1, "w")], dim=0)], seq, graphs)
    with pytest.raises(RelationError, match="no input 'v'"):
        build_dist_inputs([entry("B", "replicated", [(0, "v")])], seq, graphs)
    with pytest.raises(RelationError, match="not an input of the reference"):
        build_dist_inputs([entry("Z", "replicated", [(0, "w")])], seq, graphs)
    got = build_dist_inputs([shard, entry("C", "replicated", [(0, "w")], hint=True)], seq, graphs)
    assert got.unused == ["B", "C"]


def test_values_that_do_not_fit_the_integer_type():
    graphs = ranks([("i", (1,), "int8")])
    with pytest.raises(RelationError, match="do not fit"):
        build_dist_inputs([entry("I", "replicated", [(0, "i")])], {"I": torch.tensor([300])}, graphs)


# --- tight decisions ------------------------------------------------------------------------------


def tight(op, *args, x, dtype="float32", shape=None, elements=None, use=None, kwargs=None):
    b = Builder()
    b.input("x", tuple(x.shape))
    if elements:
        node = b.multi(op, "x", *args, elements=elements, kwargs=kwargs or {})
        out = b.item(node, use, elements[use][1], elements[use][0])
    else:
        out = b.add(op, "x", *args, shape=tuple(x.shape) if shape is None else shape, dtype=dtype, kwargs=kwargs or {})
    decisions = Decisions()
    run_sequential(b.done(out), {"x": x}, options=Options(decisions=decisions))
    return [t.node for t in decisions.tight]


def t(*values):
    return torch.tensor(values, dtype=torch.float64)


EPS = 1e-8


@pytest.mark.parametrize(
    ("op", "args", "near", "far", "dtype"),
    [
        ("aten.gt.Scalar", (0.5,), t(0.5 + EPS, 3), t(0.6, 3), "bool"),
        ("aten.gt.Scalar", (0.0,), t(1e-12, 3), t(1e-3, 0.0), "bool"),
        ("aten.floor.default", (), t(2 - EPS, 0.5), t(2.0, 0.5), "float32"),
        ("aten.round.default", (), t(2.5 - EPS, 0.1), t(2.4, 0.1), "float32"),
        ("aten._to_copy.default", (), t(3 - EPS, 0.5), t(3.2, 0.5), "int32"),
        ("aten.sign.default", (), t(1e-13, 4), t(0.1, 4), "float32"),
    ],
)
def test_tight_elementwise_decisions(op, args, near, far, dtype):
    kwargs = {"dtype": "dtype:int32"} if op.startswith("aten._to") else None
    assert tight(op, *args, x=near, dtype=dtype, kwargs=kwargs) == ["n0"]
    assert tight(op, *args, x=far, dtype=dtype, kwargs=kwargs) == []


def test_tight_rankings_only_where_the_position_is_used():
    types = {0: ("float32", (2,)), 1: ("int64", (2,))}
    cut = t(3.0, 2.0, 1.0 + EPS, 1.0)
    assert tight("aten.topk.default", 2, x=cut, elements=types, use=1) == []
    assert tight("aten.topk.default", 3, x=cut, elements={1: ("int64", (3,))}, use=1) == ["n0"]
    assert tight("aten.topk.default", 3, x=cut, elements={0: ("float32", (3,))}, use=0) == []
    tie = t(2.0, 2.0, 1.0)
    assert tight("aten.argmax.default", 0, x=tie, shape=(), dtype="int64") == ["n0"]
    assert tight("aten.argmax.default", 0, x=t(1.0, 1.0, 2.0), shape=(), dtype="int64") == []
    types = {0: ("float32", ()), 1: ("int64", ())}
    assert tight("aten.max.dim", 0, x=tie, elements=types, use=1) == ["n0"]
    assert tight("aten.max.dim", 0, x=tie, elements=types, use=0) == []
    types = {0: ("float32", (3,)), 1: ("int64", (3,))}
    assert tight("aten.sort.default", x=tie, elements=types, use=1) == ["n0"]
    assert tight("aten.max.dim", 0, x=t(5.0), elements={1: ("int64", ())}, use=1) == []


# --- in-place operators ----------------------------------------------------------------------------------------------


def test_in_place_operators_rebind_and_leave_the_callers_tensors_alone():
    b = Builder()
    b.input("x", (3,))
    added = b.add("aten.add_.Scalar", "x", 1.0, shape=(3,))
    doubled = b.add("aten.mul_.Scalar", added, 2.0, shape=(3,))
    read = b.add("aten.neg.default", "x", shape=(3,))
    x = torch.ones(3, dtype=torch.float64)
    got = run_sequential(b.done(doubled, read, "x"), {"x": x})
    assert got[doubled].tolist() == got["x"].tolist() == [4.0] * 3
    assert got[read].tolist() == [-4.0] * 3
    assert x.tolist() == [1.0] * 3


def test_lists_written_in_place_and_out_arguments():
    b = Builder()
    b.input("x", (3,))
    b.input("y", (2,))
    b.add("aten._foreach_mul_.Scalar", ["x", "y"], 3.0)
    buffer = b.add("aten.empty.memory_format", [2], shape=(2,))
    b.add("aten.exp.out", "y", shape=(2,), kwargs={"out": buffer})
    read = b.add("aten.neg.default", buffer, shape=(2,))
    got = run_sequential(b.done("x", read), {"x": torch.ones(3), "y": torch.ones(2)})
    assert got["x"].tolist() == [3.0] * 3
    torch.testing.assert_close(got[read], -torch.full((2,), 3.0, dtype=torch.float64).exp())


@pytest.mark.parametrize("read", ["base", "view"])
def test_reading_memory_that_was_written_through_another_name_is_an_error(read):
    b = Builder()
    b.input("x", (4, 2))
    view = b.add("aten.view.default", "x", [8], shape=(8,))
    written = view if read == "base" else "x"
    b.add("aten.add_.Scalar", written, 1.0, shape=(8,) if read == "base" else (4, 2), name="writer")
    out = b.add("aten.neg.default", "x" if read == "base" else view, shape=(4, 2) if read == "base" else (8,))
    with pytest.raises(ExecutionError, match="functionalise") as caught:
        run_sequential(b.done(out), {"x": torch.ones(4, 2)})
    assert caught.value.node == "writer"


def test_a_copy_is_no_alias():
    b = Builder()
    b.input("x", (3,), "bfloat16")
    wide = b.add("aten.to.dtype", "x", "dtype:float32", shape=(3,))
    b.add("aten.add_.Scalar", wide, 1.0, shape=(3,))
    out = b.add("aten.add.Tensor", wide, "x", shape=(3,))
    assert run_sequential(b.done(out), {"x": torch.ones(3)})[out].tolist() == [3.0] * 3


def test_as_strided_of_dense_memory_only():
    b = Builder()
    b.input("x", (2, 3))
    good = b.add("aten.as_strided.default", "x", [3, 2], [2, 1], shape=(3, 2))
    assert run_sequential(b.done(good), {"x": torch.arange(6.0).reshape(2, 3)})[good].tolist() == [
        [0, 1],
        [2, 3],
        [4, 5],
    ]
    view = b.add("aten.t.default", "x", shape=(3, 2))
    bad = b.add("aten.as_strided.default", view, [2], [1], shape=(2,))
    with pytest.raises(ExecutionError, match="strided view"):
        run_sequential(b.done(bad), {"x": torch.ones(2, 3)})


# --- memory ---------------------------------------------------------------------------------------


def test_memory_estimate():
    b = Builder()
    b.input("x", (100,), "bfloat16")
    b.input("i", (100,), "int8")
    a = b.add("aten.neg.default", "x", shape=(100,), dtype="bfloat16")
    v = b.add("aten.view.default", a, [10, 10], shape=(10, 10), dtype="bfloat16")
    c = b.add("aten.neg.default", v, shape=(10, 10), dtype="bfloat16")
    d = b.add("aten.neg.default", c, shape=(10, 10), dtype="bfloat16")
    graph = b.done(d)
    estimate = estimate_peak(graph)
    # x dies after a; a (with its view) and c, then c and d; i is never read
    assert estimate.inputs == 900
    assert (estimate.peak, estimate.node) == (1600, a)
    assert estimate_peak(graph, Precision(captured=True)).peak == 400
    assert estimate_peak(graph, keep="all").peak == 800 * 4 + 100
    assert estimate.unknown == ()
    rows = b.add("aten.nonzero.default", d, shape=("u0", 2), dtype="int64")
    assert estimate_peak(b.done(rows)).unknown == (rows,)
