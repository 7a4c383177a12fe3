"""Ranks in lockstep: what collectives mean, and that misfits are found instead of hanging."""

from __future__ import annotations

import pytest
import torch
from execute_graphs import Builder, Text

from emerge.execute.collectives import CollectiveMismatch
from emerge.execute.lockstep import run_ranks, run_sequential
from emerge.execute.options import Options
from emerge.util.errors import BudgetExceeded, ExecutionError


def rand(*shape):
    return torch.randn(shape, dtype=torch.float64)


def world(n, name="w"):
    return {name: [list(range(n))]}


def collective(n, op, *args, in_shape=(4, 6), out_shape=(4, 6), dtype="float32", values=None, wait=True, groups=None):
    """Run one collective on n ranks; args may be a function of the rank. Returns inputs and outputs per rank."""
    graphs, inputs = [], []
    for r in range(n):
        b = Builder(rank=r, world=n)
        shape = in_shape(r) if callable(in_shape) else in_shape
        result = out_shape(r) if callable(out_shape) else out_shape
        b.input("x", shape, dtype)
        own = args[0](r) if len(args) == 1 and callable(args[0]) else args
        node = b.add(op, "x", *own, shape=result, dtype=dtype)
        if wait:
            node = b.add("_c10d_functional.wait_tensor.default", node, shape=result, dtype=dtype)
        graphs.append(b.done(node))
        inputs.append({"x": values[r] if values else rand(*shape)})
    results = run_ranks(graphs, inputs, groups or world(n))
    return [i["x"] for i in inputs], [r[g.outputs[0]] for r, g in zip(results, graphs)]


@pytest.mark.parametrize("n", [2, 3, 4])
@pytest.mark.parametrize(
    ("name", "function"),
    [
        ("sum", lambda s: s.sum(0)),
        ("avg", lambda s: s.mean(0)),
        ("max", lambda s: s.amax(0)),
        ("min", lambda s: s.amin(0)),
        ("product", lambda s: s.prod(0)),
        ("prod", lambda s: s.prod(0)),
    ],
)
def test_all_reduce(n, name, function):
    xs, ys = collective(n, "_c10d_functional.all_reduce.default", Text(name), Text("w"))
    for y in ys:
        torch.testing.assert_close(y, function(torch.stack(xs)), rtol=1e-12, atol=1e-12)


def test_all_reduce_of_integers_wraps_and_of_bits():
    values = [torch.tensor([2**31 - 1, 5], dtype=torch.int32), torch.tensor([1, 3], dtype=torch.int32)]
    shape = {"in_shape": (2,), "out_shape": (2,), "dtype": "int32", "values": values}
    _, ys = collective(2, "_c10d_functional.all_reduce.default", Text("sum"), Text("w"), **shape)
    assert ys[0].tolist() == [-(2**31), 8]
    _, ys = collective(2, "_c10d_functional.all_reduce.default", Text("band"), Text("w"), **shape)
    assert ys[1].tolist() == [1, 1]
    with pytest.raises(ExecutionError, match="premul_sum"):
        collective(2, "_c10d_functional.all_reduce.default", Text("premul_sum"), Text("w"), **shape)


@pytest.mark.parametrize("n", [2, 3])
def test_all_gather_and_reduce_scatter(n):
    xs, ys = collective(n, "_c10d_functional.all_gather_into_tensor.default", n, Text("w"), out_shape=(4 * n, 6))
    assert all(torch.equal(y, torch.cat(xs)) for y in ys)
    xs, ys = collective(
        n,
        "_c10d_functional.reduce_scatter_tensor.default",
        Text("sum"),
        n,
        Text("w"),
        in_shape=(2 * n, 3),
        out_shape=(2, 3),
    )
    whole = torch.stack(xs).sum(0)
    for r, y in enumerate(ys):
        torch.testing.assert_close(y, whole[2 * r : 2 * r + 2], rtol=1e-12, atol=1e-12)


def test_gather_of_scalars():
    xs, ys = collective(3, "_c10d_functional.all_gather_into_tensor.default", 3, Text("w"), in_shape=(), out_shape=(3,))
    assert torch.equal(ys[1], torch.stack(xs))


def test_all_to_all_with_uneven_pieces():
    # rows sent from rank i to rank j
    sent = [[1, 2], [3, 1]]
    xs, ys = collective(
        2,
        "_c10d_functional.all_to_all_single.default",
        lambda r: ([sent[0][r], sent[1][r]], sent[r], Text("w")),
        in_shape=lambda r: (sum(sent[r]), 2),
        out_shape=lambda r: (sent[0][r] + sent[1][r], 2),
    )
    assert torch.equal(ys[0], torch.cat([xs[0][:1], xs[1][:3]]))
    assert torch.equal(ys[1], torch.cat([xs[0][1:], xs[1][3:]]))
    with pytest.raises(CollectiveMismatch, match="expects"):
        collective(
            2,
            "_c10d_functional.all_to_all_single.default",
            lambda r: ([2, 2], sent[r], Text("w")),
            in_shape=lambda r: (sum(sent[r]), 2),
            out_shape=(4, 2),
        )


def test_broadcast_and_shard_dim_alltoall():
    xs, ys = collective(3, "_c10d_functional.broadcast.default", 2, Text("w"))
    assert all(torch.equal(y, xs[2]) for y in ys)
    xs, ys = collective(2, "_dtensor.shard_dim_alltoall.default", 0, 1, Text("w"), out_shape=(8, 3))
    whole = torch.cat(xs, 0)
    assert torch.equal(ys[0], whole[:, :3])
    assert torch.equal(ys[1], whole[:, 3:])


def test_vllm_collectives_need_no_wait():
    xs, ys = collective(2, "vllm.all_reduce.default", Text("w"), wait=False)
    torch.testing.assert_close(ys[0], xs[0] + xs[1], rtol=1e-12, atol=1e-12)
    xs, ys = collective(2, "vllm.all_gather.default", -1, 2, Text("w"), out_shape=(4, 12), wait=False)
    assert torch.equal(ys[1], torch.cat(xs, 1))


def test_hlo_all_reduce_uses_its_replica_groups():
    graphs, inputs = [], []
    for r in range(4):
        b = Builder(rank=r, world=4)
        b.input("x", (2,), "float16")
        kwargs = {"reducer": Text("add"), "replica_groups": [[0, 2], [1, 3]]}
        graphs.append(b.done(b.add("hlo.all_reduce", "x", shape=(2,), dtype="float16", kwargs=kwargs)))
        inputs.append({"x": torch.full((2,), float(10**r))})
    out = [r["n0"][0].item() for r in run_ranks(graphs, inputs)]
    assert out == [101.0, 1010.0, 101.0, 1010.0]


def test_coalesced_and_in_place_and_out_variants():
    graphs, inputs = [], []
    for r in range(2):
        b = Builder(rank=r, world=2)
        b.input("x", (3,))
        b.input("y", (2,))
        many = b.multi("_c10d_functional.all_reduce_coalesced.default", ["x", "y"], Text("sum"), Text("w"))
        first = b.item(many, 1, (2,))
        done = b.add("_c10d_functional.wait_tensor.default", first, shape=(2,))
        b.add("_c10d_functional.all_reduce_.default", "x", Text("max"), Text("w"), shape=(3,))
        after = b.add("aten.mul.Scalar", "x", 2.0, shape=(3,))
        buffer = b.add("aten.empty.memory_format", [4], shape=(4,))
        b.add(
            "_c10d_functional.all_gather_into_tensor_out.default", "y", 2, Text("w"), kwargs={"out": buffer}, shape=(4,)
        )
        gathered = b.add("aten.neg.default", buffer, shape=(4,))
        base = b.add("aten.empty.memory_format", [6], shape=(6,))
        b.multi("c10d._allgather_base_.default", base, "x", Text("w"), False)
        read = b.add("aten.neg.default", base, shape=(6,))
        graphs.append(b.done(done, after, gathered, read, "x"))
        inputs.append({"x": rand(3), "y": rand(2)})
    results = run_ranks(graphs, inputs, world(2))
    x, y = ([i[k] for i in inputs] for k in ("x", "y"))
    for graph, result in zip(graphs, results):
        done, after, gathered, read, name = (result[o] for o in graph.outputs)
        largest = torch.maximum(*x)
        assert torch.equal(done, y[0] + y[1])
        assert torch.equal(after, 2 * largest)
        assert torch.equal(gathered, -torch.cat(y))
        assert torch.equal(read, -torch.cat([largest, largest]))
        assert torch.equal(name, largest)


def megatron(n, rank, row_reduce=True):
    """Column-parallel then row-parallel linear layers with a GELU between them; bias once, after the reduction."""
    b = Builder(f"mlp{rank}", rank, n)
    b.input("x", (5, 6))
    b.input("w1", (12 // n, 6))
    b.input("w2", (7, 12 // n))
    b.input("bias", (7,))
    up = b.add("aten.linear.default", "x", "w1", shape=(5, 12 // n))
    act = b.add("aten.gelu.default", up, shape=(5, 12 // n))
    down = b.add("aten.linear.default", act, "w2", shape=(5, 7))
    if row_reduce and n > 1:
        down = b.add("_c10d_functional.all_reduce.default", down, Text("sum"), Text("tp"), shape=(5, 7))
        down = b.add("_c10d_functional.wait_tensor.default", down, shape=(5, 7))
    return b.done(b.add("aten.add.Tensor", down, "bias", shape=(5, 7), name="out"))


@pytest.mark.parametrize("n", [2, 3, 4])
def test_megatron_mlp_equals_sequential(n):
    x, w1, w2, bias = rand(5, 6), rand(12, 6), rand(7, 12), rand(7)
    want = run_sequential(megatron(1, 0), {"x": x, "w1": w1, "w2": w2, "bias": bias})["out"]
    shards = [{"x": x, "w1": w1.chunk(n)[r], "w2": w2.chunk(n, 1)[r], "bias": bias} for r in range(n)]
    for result in run_ranks([megatron(n, r) for r in range(n)], shards, world(n, "tp")):
        torch.testing.assert_close(result["out"], want, rtol=1e-12, atol=1e-12)
    wrong = run_ranks([megatron(n, r, row_reduce=False) for r in range(n)], shards, world(n, "tp"))
    assert float((wrong[0]["out"] - want).abs().max()) > 1e-3


def test_groups_of_a_two_dimensional_mesh():
    groups = {"tp": [[0, 1], [2, 3]], "dp": [[0, 2], [1, 3]]}
    graphs, inputs = [], []
    for r in range(4):
        b = Builder(rank=r, world=4, groups=groups)
        b.input("x", ())
        first = b.add("_c10d_functional.all_reduce.default", "x", Text("sum"), Text("tp"), shape=())
        second = b.add("_c10d_functional.all_reduce.default", first, Text("max"), Text("dp"), shape=())
        graphs.append(b.done(second))
        inputs.append({"x": torch.tensor(float(10**r))})
    assert [r["n1"].item() for r in run_ranks(graphs, inputs)] == [1100.0] * 4


def test_group_ids_that_differ_by_rank_meet_by_their_ranks():
    graphs = []
    for r, name in enumerate(("5", "8")):
        b = Builder(rank=r, world=2, groups={name: [[0, 1]]})
        b.input("x", (2,))
        graphs.append(b.done(b.add("_c10d_functional.all_reduce.default", "x", Text("sum"), Text(name), shape=(2,))))
    out = run_ranks(graphs, [{"x": torch.ones(2)}] * 2)
    assert out[0]["n0"].tolist() == [2.0, 2.0]


def test_collectives_are_asynchronous_and_match_by_order_within_their_group():
    # The ranks issue the two groups' collectives in different order and wait later: this does not deadlock.
    graphs = []
    for r in range(2):
        b = Builder(rank=r, world=2)
        b.input("x", ())
        order = [("a", "sum"), ("b", "max")][:: 1 if r == 0 else -1]
        issued = {g: b.add("_c10d_functional.all_reduce.default", "x", Text(f), Text(g), shape=()) for g, f in order}
        outs = [b.add("_c10d_functional.wait_tensor.default", issued[g], shape=(), name=f"out_{g}") for g in "ab"]
        graphs.append(b.done(*outs))
    results = run_ranks(graphs, [{"x": torch.tensor(1.0)}, {"x": torch.tensor(5.0)}], {"a": [[0, 1]], "b": [[0, 1]]})
    assert [(r["out_a"].item(), r["out_b"].item()) for r in results] == [(6.0, 5.0)] * 2


def reduce_graph(rank, calls, world_size=2):
    """A chain of collectives; calls: (op tail, args...)."""
    b = Builder(f"r{rank}", rank, world_size)
    b.input("x", (4,))
    current = "x"
    for i, (name, *args) in enumerate(calls):
        node = b.add(f"_c10d_functional.{name}.default", current, *args, shape=(4,), name=f"c{i}")
        current = b.add("_c10d_functional.wait_tensor.default", node, shape=(4,), name=f"w{i}")
    return b.done(current)


X4 = [{"x": torch.ones(4)}, {"x": torch.ones(4)}]


def test_a_collective_that_one_rank_skips_is_a_deadlock():
    graphs = [
        reduce_graph(0, [("all_reduce", Text("sum"), Text("w")), ("all_reduce", Text("max"), Text("w"))]),
        reduce_graph(1, [("all_reduce", Text("sum"), Text("w"))]),
    ]
    with pytest.raises(CollectiveMismatch, match="have finished") as caught:
        run_ranks(graphs, X4, world(2))
    assert caught.value.kind == "deadlock"
    assert [(w.rank, w.node) for w in caught.value.waiting] == [(0, "c1")]


def test_different_collectives_in_one_slot_are_a_mismatch():
    graphs = [
        reduce_graph(0, [("all_reduce", Text("sum"), Text("w"))]),
        reduce_graph(1, [("all_reduce", Text("max"), Text("w"))]),
    ]
    with pytest.raises(CollectiveMismatch, match="differ") as caught:
        run_ranks(graphs, X4, world(2))
    assert caught.value.kind == "mismatch"
    assert {(w.rank, w.node) for w in caught.value.waiting} == {(0, "c0"), (1, "c0")}
    assert "reduce=sum" in str(caught.value)
    assert "reduce=max" in str(caught.value)


@pytest.mark.parametrize(("shape", "dtype"), [((5,), "float32"), ((4,), "bfloat16")])
def test_shapes_and_recorded_dtypes_have_to_agree(shape, dtype):
    graphs = []
    for r in range(2):
        b = Builder(rank=r, world=2)
        own, kind = (shape, dtype) if r else ((4,), "float32")
        b.input("x", own, kind)
        node = b.add("_c10d_functional.all_reduce.default", "x", Text("sum"), Text("w"), shape=own, dtype=kind)
        graphs.append(b.done(node))
    with pytest.raises(CollectiveMismatch) as caught:
        run_ranks(graphs, [{"x": torch.ones(4)}, {"x": torch.ones(shape)}], world(2))
    assert caught.value.kind == "mismatch"


def test_an_unread_collective_without_counterpart_is_found():
    graphs = []
    for r in range(2):
        b = Builder(rank=r, world=2)
        b.input("x", (4,))
        if r == 1:
            b.add("_c10d_functional.all_reduce.default", "x", Text("sum"), Text("w"), shape=(4,), name="lost")
        graphs.append(b.done(b.add("aten.neg.default", "x", shape=(4,))))
    with pytest.raises(CollectiveMismatch, match="lost") as caught:
        run_ranks(graphs, X4, world(2))
    assert caught.value.kind == "unmatched"


def pipeline(rank, *, receive=True, shape=(4,)):
    b = Builder(f"stage{rank}", rank, 2)
    b.input("x", (4,))
    if rank == 0:
        doubled = b.add("aten.mul.Scalar", "x", 2.0, shape=(4,))
        b.add("_c10d_functional.isend.default", doubled, 1, 0, Text("w"), shape=(0,), name="send")
        buffer = b.add("aten.empty.memory_format", [4], shape=(4,))
        back = b.add("_c10d_functional.irecv.default", buffer, 1, 7, Text("w"), shape=(4,))
        return b.done(b.add("_c10d_functional.wait_tensor.default", back, shape=(4,), name="out"))
    if not receive:
        return b.done(b.add("aten.neg.default", "x", shape=(4,), name="out"))
    buffer = b.add("aten.empty.memory_format", list(shape), shape=shape)
    got = b.add("_c10d_functional.irecv.default", buffer, 0, 0, Text("w"), shape=shape)
    got = b.add("_c10d_functional.wait_tensor.default", got, shape=shape)
    plus = b.add("aten.add.Scalar", got, 1.0, shape=shape, name="out")
    b.add("_c10d_functional.isend.default", plus, 0, 7, Text("w"), shape=(0,))
    return b.done(plus)


def test_send_and_receive():
    results = run_ranks([pipeline(0), pipeline(1)], X4, world(2))
    assert results[0]["out"].tolist() == [3.0] * 4
    with pytest.raises(CollectiveMismatch) as caught:
        run_ranks([pipeline(0), pipeline(1, receive=False)], X4, world(2))
    assert caught.value.kind == "deadlock"
    assert "rank 0 waits" in str(caught.value)
    with pytest.raises(CollectiveMismatch, match="receives"):
        run_ranks([pipeline(0), pipeline(1, shape=(3,))], X4, world(2))


def test_two_receives_first_deadlock():
    graphs = []
    for r in range(2):
        b = Builder(rank=r, world=2)
        b.input("x", (4,))
        got = b.add("_c10d_functional.irecv.default", "x", 1 - r, 0, Text("w"), shape=(4,))
        got = b.add("_c10d_functional.wait_tensor.default", got, shape=(4,))
        b.add("_c10d_functional.isend.default", got, 1 - r, 0, Text("w"), shape=(0,))
        graphs.append(b.done(got))
    with pytest.raises(CollectiveMismatch) as caught:
        run_ranks(graphs, X4, world(2))
    assert {w.rank for w in caught.value.waiting} == {0, 1}
    assert torch.is_grad_enabled(), "an aborted run leaves torch's state as it was"
    assert torch.get_default_dtype() == torch.float32


def test_unknown_process_group_is_named():
    graphs = [reduce_graph(r, [("all_reduce", Text("sum"), Text("nope"))]) for r in range(2)]
    with pytest.raises(ExecutionError, match="'nope' is not in the group table"):
        run_ranks(graphs, X4, world(2))


def test_wrong_group_size_is_named():
    b = Builder()
    b.input("x", (4,))
    b.add("_c10d_functional.all_gather_into_tensor.default", "x", 2, Text("w"), shape=(8,))
    with pytest.raises(ExecutionError, match="group of 2 ranks"):
        run_sequential(b.done("n0"), {"x": torch.ones(4)})


def test_sequential_collectives_are_identities():
    x = rand(4)
    got = run_sequential(reduce_graph(0, [("all_reduce", Text("sum"), Text("w"))], 1), {"x": x})
    assert torch.equal(got["w0"], x)


def test_keep_and_memory_limit():
    graph = megatron(1, 0)
    values = {"x": rand(5, 6), "w1": rand(12, 6), "w2": rand(7, 12), "bias": rand(7)}
    assert set(run_sequential(graph, values)) == {"out"}
    assert set(run_sequential(graph, values, keep=["n1"])) == {"out", "n1"}
    assert len(run_sequential(graph, values, keep="all")) == 8
    with pytest.raises(BudgetExceeded, match="GiB"):
        run_sequential(graph, values, options=Options(memory_limit=100))
    with pytest.raises(ExecutionError, match="keep"):
        run_sequential(graph, values, keep=["nothing"])


def test_missing_and_misshapen_inputs():
    with pytest.raises(ExecutionError, match="no value for input 'x'"):
        run_sequential(megatron(1, 0), {})
    values = {"x": rand(5, 7), "w1": rand(12, 6), "w2": rand(7, 12), "bias": rand(7)}
    with pytest.raises(ExecutionError, match=r"shape \[5, 7\], expected \[5, 6\]"):
        run_sequential(megatron(1, 0), values)


def test_dropout_masks_may_differ_by_rank():
    graphs = []
    for r in range(2):
        b = Builder(rank=r, world=2)
        b.input("x", (4,))
        both = b.multi("aten.native_dropout.default", "x", 0.5, True)
        graphs.append(b.done(b.item(both, 0, (4,))))
    masks = [torch.tensor([True, True, False, False]), torch.tensor([False, False, True, True])]
    options = [Options(dropout_mask=lambda node, shape, m=m: m) for m in masks]
    results = run_ranks(graphs, X4, options=options)
    assert [r["n1"].tolist() for r in results] == [[2.0, 2.0, 0.0, 0.0], [0.0, 0.0, 2.0, 2.0]]


def test_cuda_is_refused_or_used():
    values = {"x": rand(5, 6), "w1": rand(12, 6), "w2": rand(7, 12), "bias": rand(7)}
    want = run_sequential(megatron(1, 0), values)["out"]
    got = run_sequential(megatron(1, 0), values, options=Options(device="auto"))["out"]
    torch.testing.assert_close(got.cpu(), want, rtol=1e-12, atol=1e-12)
    if not torch.cuda.is_available():
        with pytest.raises(ExecutionError, match="no CUDA device"):
            run_sequential(megatron(1, 0), values, options=Options(device="cuda"))
