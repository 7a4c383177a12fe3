"""A one-layer GPT with tensor, sequence and vocabulary parallelism, small enough to execute.

The idioms are those of captured Megatron graphs: vocab-parallel lookup and cross entropy, fused QKV per head, row- and
column-parallel projections between all-gather and reduce-scatter. No dropout.
"""

from __future__ import annotations

from typing import Any

from support.build import FUNCOL, GraphBuilder, Ref, build_ranks, build_reference, replicated, sharded

from emerge.graph.relations import Relations
from emerge.graph.source import Case

SEQ, BATCH, HIDDEN, HEADS, HEAD, INNER, VOCAB = 20, 4, 10, 6, 3, 14, 22
#: Exclusive upper bounds of integer inputs.
RANGES = {"tokens": VOCAB, "positions": SEQ, "labels": VOCAB}


def _norm(g: GraphBuilder, x: Ref, name: str) -> Ref:
    w, b = g.input(f"{name}.weight", [HIDDEN]), g.input(f"{name}.bias", [HIDDEN])
    out: Ref = g.aten("native_layer_norm", x, [HIDDEN], w, b, 1e-5)[0]
    return out


def _linear(g: GraphBuilder, x: Ref, w: Ref) -> Ref:
    s, b, m = g.shape(x)
    y = g.aten("mm", g.aten("view", x, [s * b, m]), g.aten("t", w))
    out: Ref = g.aten("view", y, [s, b, g.shape(y)[1]])
    return out


def _gather(g: GraphBuilder, x: Ref, tp: int) -> Ref:
    return g.all_gather(x, "tp") if tp > 1 else x


def _scatter(g: GraphBuilder, x: Ref, tp: int) -> Ref:
    return g.reduce_scatter(x, "tp") if tp > 1 else x


def _reduce(g: GraphBuilder, x: Ref, tp: int, how: str = "sum") -> Ref:
    """All-reduce as captured graphs have it in both, over a group of one in the reference."""
    if tp == 1:
        return x
    done = g.wait(g.op(f"{FUNCOL}.all_reduce.default", x, how, "tp"))
    out: Ref = g.aten("copy", x, done)
    return out


def _mine(g: GraphBuilder, index: Ref, tp: int) -> tuple[Ref, Ref]:
    """(mask of foreign tokens, index into the local rows)."""
    n = VOCAB // tp
    start = n * (g.at("tp") if tp > 1 else 0)
    foreign = g.aten("bitwise_or.Tensor", g.aten("lt.Scalar", index, start), g.aten("ge.Scalar", index, start + n))
    local = g.aten("sub.Tensor", g.aten("clone", index), start)
    return foreign, g.aten("index_put", local, [foreign], g.constant(0, [], "int64"))


def _attention(g: GraphBuilder, x: Ref, mask: Ref, tp: int) -> Ref:
    n = HEADS // tp
    qkv = _linear(g, x, g.input("qkv.weight", [3 * HEAD * n, HIDDEN]))
    qkv = g.aten("add.Tensor", qkv, g.input("qkv.bias", [3 * HEAD * n]))
    parts = g.aten("split_with_sizes", g.aten("view", qkv, [SEQ, BATCH, n, 3 * HEAD]), [HEAD] * 3, 3)
    q, k, v = (g.aten("transpose.int", g.aten("view", p, [SEQ, BATCH * n, HEAD]), 0, 1) for p in parts)
    scores = g.aten(
        "baddbmm",
        g.aten("empty.memory_format", [BATCH * n, SEQ, SEQ]),
        q,
        g.aten("transpose.int", k, 1, 2),
        beta=0.0,
        alpha=0.25,
    )
    scores = g.aten("masked_fill.Scalar", g.aten("view", scores, [BATCH, n, SEQ, SEQ]), mask, -10000.0)
    weights = g.aten("view", g.aten("_softmax", scores, -1, False), [BATCH * n, SEQ, SEQ])
    out = g.aten("permute", g.aten("view", g.aten("bmm", weights, v), [BATCH, n, SEQ, HEAD]), [2, 0, 1, 3])
    return _linear(
        g, g.aten("view", g.aten("clone", out), [SEQ, BATCH, n * HEAD]), g.input("proj.weight", [HIDDEN, n * HEAD])
    )


def _loss(g: GraphBuilder, logits: Ref, labels: Ref, tp: int) -> Ref:
    n = VOCAB // tp
    top = _reduce(g, g.aten("max.dim", logits, -1)[0], tp, "max")
    shifted = g.aten("sub.Tensor", g.aten("clone", logits), g.aten("unsqueeze", top, -1))
    foreign, local = _mine(g, labels, tp)
    rows = g.aten("view", shifted, [SEQ * BATCH, n])
    found = g.aten("index.Tensor", rows, [g.aten("arange.start", 0, SEQ * BATCH), g.aten("view", local, [SEQ * BATCH])])
    found = g.aten("view", found, [SEQ, BATCH])
    found = g.aten("index_put", found, [foreign], g.constant(0.0, []))
    total = _reduce(g, g.aten("sum.dim_IntList", g.aten("exp", shifted), [-1]), tp)
    return g.aten("sub.Tensor", g.aten("log", total), _reduce(g, found, tp), name="loss")


def program(g: GraphBuilder, tp: int) -> Ref:
    """The program of one rank of ``tp``."""
    tokens, positions = g.input("tokens", [BATCH, SEQ], "int64"), g.input("positions", [BATCH, SEQ], "int64")
    labels, mask = g.input("labels", [SEQ, BATCH], "int64"), g.input("mask", [BATCH, 1, SEQ, SEQ], "bool")
    table = g.input("embedding.weight", [VOCAB // tp, HIDDEN])
    if tp == 1:
        x = g.aten("index.Tensor", table, [tokens])
    else:
        foreign, local = _mine(g, tokens, tp)
        rows = g.aten("index.Tensor", table, [local])
        x = _reduce(g, g.aten("index_put", rows, [foreign], g.constant(0.0, [])), tp)
    x = g.aten("add.Tensor", x, g.aten("embedding", g.input("position.weight", [SEQ, HIDDEN]), positions))
    x = g.aten("clone", g.aten("transpose.int", x, 0, 1))
    if tp > 1:
        at, size = g.at("tp"), SEQ // tp
        x = g.aten("slice.Tensor", x, 0, at * size, (at + 1) * size)
    y = _scatter(g, _attention(g, _gather(g, _norm(g, x, "norm1"), tp), mask, tp), tp)
    x = g.aten("add.Tensor", x, g.aten("add.Tensor", y, g.input("proj.bias", [HIDDEN])))
    y = _linear(g, _gather(g, _norm(g, x, "norm2"), tp), g.input("up.weight", [INNER // tp, HIDDEN]))
    y = g.aten("gelu", g.aten("add.Tensor", y, g.input("up.bias", [INNER // tp])))
    y = _scatter(g, _linear(g, y, g.input("down.weight", [HIDDEN, INNER // tp])), tp)
    x = g.aten("add.Tensor", x, g.aten("add.Tensor", y, g.input("down.bias", [HIDDEN])))
    logits = _linear(g, _gather(g, _norm(g, x, "norm3"), tp), g.input("head.weight", [VOCAB // tp, HIDDEN]))
    return g.aten("div.Tensor", _loss(g, logits, labels, tp), 2, name="out")


def mini_gpt(ranks: int = 2) -> Case:
    """The sequential program, the program of each rank, and how their inputs and outputs correspond."""
    shards = {
        "embedding.weight": 0,
        "qkv.weight": 0,
        "qkv.bias": 0,
        "proj.weight": 1,
        "up.weight": 0,
        "up.bias": 0,
        "down.weight": 1,
        "head.weight": 0,
    }
    reference = build_reference(lambda g: program(g, 1))
    graphs = build_ranks(ranks, lambda g, _: program(g, ranks))
    inputs: list[Any] = [
        sharded(i.name, shards[i.name], ranks) if i.name in shards else replicated(i.name, ranks)
        for i in reference.inputs
    ]
    relations = Relations(
        "mini_gpt", ranks, inputs, "refines", expected_outputs=[replicated("out", ranks)], claimed_outputs=["out"]
    )
    return Case(reference, graphs, relations, "mini_gpt")
