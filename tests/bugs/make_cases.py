"""Writes the bug corpus: per row a right and a wrong twin as case directories, and what should come out of each.

Run it after a change; a test compares. Sizes are pairwise different and never 1 where the bug allows it: axes differ.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[:0] = [str(p) for p in Path(__file__).resolve().parents[:3]]

import attention_rows
import layer_rows
import precision_rows
from bug_rows import INT64, Row, linear
from support.build import (
    DType,
    GraphBuilder,
    Ref,
    build_ranks,
    build_reference,
    custom,
    replicated,
    sharded,
    write_case,
)

from emerge.graph.relations import ConcatExpr, Leaf, RelationEntry, SliceExpr

HERE = Path(__file__).resolve().parent

# ---- COLL-01: a part that is reduced already is reduced again ---------------------------------------------------


def shared_and_routed(g: GraphBuilder, tp: int, how: str) -> Ref:
    """A shared expert and a gated routed one: 5 tokens, hidden 14, intermediate 6 (shared) and 9 (routed) per rank."""
    x = g.input("hidden_states", [5, 14])
    gate = g.input("gate.weight", [14])
    parts = {}
    for name, width in (("shared", 6), ("routed", 9)):
        up = g.input(f"{name}.up_proj.weight", [3 * width // tp, 14])
        down = g.input(f"{name}.down_proj.weight", [14, 3 * width // tp])
        parts[name] = linear(g, g.aten("silu", linear(g, x, up)), down, name=f"{name}_down")
    score = g.aten("sigmoid", g.aten("mv", x, gate))
    routed = g.aten("mul.Tensor", parts["routed"], g.aten("unsqueeze", score, 1), name="routed_weighted")
    shared = parts["shared"]
    if how == "sequential":
        return g.aten("add.Tensor", routed, shared, name="moe_out")
    shared = g.all_reduce(shared, "tp", name="shared_all_reduce")
    if how == "right":
        return g.aten("add.Tensor", g.all_reduce(routed, "tp", name="routed_all_reduce"), shared, name="moe_sum")
    return g.all_reduce(g.aten("add.Tensor", routed, shared, name="moe_sum"), "tp", name="moe_all_reduce")


COLL_01 = Row(
    "COLL-01",
    "vllm-project/vllm#49122",
    "the shared expert is all-reduced inside its down projection, and shared + routed once more: shared part times tp",
    3,
    lambda g: shared_and_routed(g, 1, "sequential"),
    lambda g: shared_and_routed(g, 3, "right"),
    lambda g: shared_and_routed(g, 3, "wrong"),
    [
        replicated("hidden_states", 3),
        replicated("gate.weight", 3),
        sharded("shared.up_proj.weight", 0, 3),
        sharded("shared.down_proj.weight", 1, 3),
        sharded("routed.up_proj.weight", 0, 3),
        sharded("routed.down_proj.weight", 1, 3),
    ],
    [replicated("moe_out", 3, "OUT")],
    {"reference": ["moe_out"], "implementation": ["shared_all_reduce", "moe_sum", "moe_all_reduce"]},
    "DUPLICATE_ALL_REDUCE",
)


# ---- COLL-06: the copy is reduced, the original returned --------------------------------------------------------


def strided_reduce(g: GraphBuilder, tp: int, how: str) -> Ref:
    """A row-parallel product whose result is strided; the all-reduce runs on its contiguous copy."""
    x, w = g.input("x", [5, 14 // tp]), g.input("weight", [6, 14 // tp])
    residual = g.input("residual", [6, 5])
    y = g.aten("t", linear(g, x, w, name="proj"), name="proj_strided")
    if how != "sequential":
        copy = g.aten("clone", y, name="copy")
        reduced = g.all_reduce(copy, "tp", name="reduce_copy")
        y = reduced if how == "right" else y
    return g.aten("add.Tensor", y, residual, name="out")


COLL_06 = Row(
    "COLL-06",
    "NVIDIA/Megatron-LM 60f338a9cd (#5338)",
    "all_reduce runs on input.contiguous(), a copy where the input is strided; the unreduced original is returned",
    2,
    lambda g: strided_reduce(g, 1, "sequential"),
    lambda g: strided_reduce(g, 2, "right"),
    lambda g: strided_reduce(g, 2, "wrong"),
    [sharded("x", 1, 2), sharded("weight", 1, 2), replicated("residual", 2)],
    [replicated("out", 2, "OUT")],
    {"reference": ["out"], "implementation": ["proj", "proj_strided", "out"]},
    "MISSING_ALL_REDUCE",
)


# ---- SHARD-01: a (s b, h) buffer read as (b, s, h) --------------------------------------------------------------


def attention_output(g: GraphBuilder, tp: int, how: str) -> Ref:
    """Attention context [b=2, s=3, k] through the output projection to h=5; the program works on (s b, .) buffers."""
    context, w = g.input("context", [2, 3, 14 // tp]), g.input("o_proj.weight", [5, 14 // tp])
    residual = g.input("residual", [2, 3, 5])
    if how == "sequential":
        rows = g.aten("view", context, [6, 14])
        y = g.aten("view", linear(g, rows, w, name="o_proj"), [2, 3, 5])
    else:
        rows = g.aten("view", g.aten("clone", g.aten("transpose.int", context, 0, 1)), [6, 14 // tp])
        y = g.all_reduce(linear(g, rows, w, name="o_proj"), "tp")
        if how == "right":
            y = g.aten("transpose.int", g.aten("view", y, [3, 2, 5], name="reshape"), 0, 1)
        else:
            y = g.aten("view", y, [2, 3, 5], name="reshape")
    return g.aten("add.Tensor", residual, y, name="out")


SHARD_01 = Row(
    "SHARD-01",
    "aws-neuron/transformers-neuronx 69d039d",
    "an (s*b, h) buffer is reshaped to (b, s, h) directly instead of (s, b, h) and transposed",
    2,
    lambda g: attention_output(g, 1, "sequential"),
    lambda g: attention_output(g, 2, "right"),
    lambda g: attention_output(g, 2, "wrong"),
    [sharded("context", 2, 2), sharded("o_proj.weight", 1, 2), replicated("residual", 2)],
    [replicated("out", 2, "OUT")],
    {"reference": ["out"], "implementation": ["reshape", "out"]},
    "WRONG_LAYOUT",
)


# ---- SHARD-05: the second all-to-all of Ulysses -----------------------------------------------------------------


def scatter_heads(g: GraphBuilder, x: Ref, sp: int, **more: Any) -> Ref:
    """[s/sp, b, h, d] -> [s, b, h/sp, d]: heads go to the ranks, the sequence comes together."""
    s, b, h, d = g.shape(x)
    chunks = g.aten("clone", g.aten("permute", g.aten("view", x, [s, b, sp, h // sp, d]), [2, 0, 1, 3, 4]))
    return g.aten("view", g.all_to_all(chunks, "tp", **more), [s * sp, b, h // sp, d])


def gather_heads(g: GraphBuilder, x: Ref, sp: int, how: str) -> Ref:
    """[s, b, h/sp, d] -> [s/sp, b, h, d], the way back; the received chunks are stacked by rank of the heads."""
    s, b, h, d = g.shape(x)
    received = g.all_to_all(g.aten("view", x, [sp, s // sp, b, h, d]), "tp", name="heads_to_sequence")
    if how == "right":
        received = g.aten("clone", g.aten("permute", received, [1, 2, 0, 3, 4]))
    return g.aten("view", received, [s // sp, b, sp * h, d], name="regrouped")


def ulysses(g: GraphBuilder, sp: int, how: str) -> Ref:
    """Attention over s=12, b=3, h=10, d=4, sequence-parallel by exchanging sequence against heads."""
    q, k, v = (g.input(n, [12 // sp, 3, 10, 4]) for n in ("q", "k", "v"))
    if how != "sequential":
        q, k, v = (scatter_heads(g, x, sp) for x in (q, k, v))
    q, k, v = (g.aten("permute", x, [1, 2, 0, 3]) for x in (q, k, v))
    y = g.aten("scaled_dot_product_attention", q, k, v, name="attention")
    y = g.aten("permute", y, [2, 0, 1, 3], name="context")
    if how != "sequential":
        y = gather_heads(g, y, sp, how)
    return g.aten("gelu", y, name="out")


SHARD_05 = Row(
    "SHARD-05",
    "deepspeedai/DeepSpeed 3bdd187e7 (#5664)",
    "the second all-to-all (heads to sequence) reshapes the received chunks without moving the rank axis to the heads",
    2,
    lambda g: ulysses(g, 1, "sequential"),
    lambda g: ulysses(g, 2, "right"),
    lambda g: ulysses(g, 2, "wrong"),
    [sharded("q", 0, 2), sharded("k", 0, 2), sharded("v", 0, 2)],
    [sharded("out", 0, 2, "OUT")],
    {"reference": ["context", "out"], "implementation": ["regrouped", "out"]},
    "WRONG_LAYOUT",
)


# ---- SHARD-07: keys and values gathered along heads -------------------------------------------------------------


def context_parallel(g: GraphBuilder, cp: int, how: str) -> Ref:
    """Grouped attention, [b=3, l=14, h, d=6] with 20 query and 5 key heads; queries stay local, keys are gathered."""
    q = g.input("q", [3, 14 // cp, 20, 6])
    k, v = (g.input(n, [3, 14 // cp, 5, 6]) for n in ("k", "v"))
    if how != "sequential":
        dim = 1 if how == "right" else 2
        k, v = (g.all_gather(x, "tp", dim, name=f"gather_{n}") for n, x in (("k", k), ("v", v)))
    q, k, v = (g.aten("transpose.int", x, 1, 2) for x in (q, k, v))
    y = g.aten("scaled_dot_product_attention", q, k, v, name="attention", enable_gqa=True)
    return g.aten("transpose.int", y, 1, 2, name="out")


SHARD_07 = Row(
    "SHARD-07",
    "pytorch/torchtitan 179d9e100 (#3206)",
    "keys and values [b, l/cp, h, d] are all-gathered on dim 2 (heads) instead of dim 1 (sequence)",
    2,
    lambda g: context_parallel(g, 1, "sequential"),
    lambda g: context_parallel(g, 2, "right"),
    lambda g: context_parallel(g, 2, "wrong"),
    [sharded("q", 1, 2), sharded("k", 1, 2), sharded("v", 1, 2)],
    [sharded("out", 1, 2, "OUT")],
    {"reference": ["attention"], "implementation": ["gather_k", "gather_v", "cat", "cat_1", "attention"]},
    "WRONG_SHARD_DIM",
)


# ---- COMP-06 and CTL-07: a constant added to, or multiplied with, a partial sum ---------------------------------


def with_constant(g: GraphBuilder, tp: int, op: str, order: str) -> Ref:
    """``x w^T`` [4, 5] over k=18, then a constant; ``order`` says where the all-reduce is."""
    x, w = g.input("x", [4, 18 // tp]), g.input("weight", [5, 18 // tp])
    y = linear(g, x, w, name="product")
    if order == "reduce first":
        y = g.all_reduce(y, "tp")
    y = g.aten(f"{op}.Tensor", y, 10.0, name="with_constant")
    return g.all_reduce(y, "tp", name="reduce") if order == "constant first" else y


COMP_06 = Row(
    "COMP-06",
    "pytorch/pytorch#163193",
    "adding a constant to a partial sum keeps it partial: the constant is counted once per rank",
    3,
    lambda g: with_constant(g, 1, "add", "sequential"),
    lambda g: with_constant(g, 3, "add", "reduce first"),
    lambda g: with_constant(g, 3, "add", "constant first"),
    [sharded("x", 1, 3), sharded("weight", 1, 3)],
    [replicated("with_constant", 3, "OUT")],
    {"reference": ["with_constant"], "implementation": ["with_constant", "reduce"]},
    "SCALE_BY_MESH_SIZE",
)


def constant_on_rank_0(g: GraphBuilder) -> Ref:
    """Only rank 0 multiplies its part by the constant."""
    x, w = g.input("x", [4, 6]), g.input("weight", [5, 6])
    y = linear(g, x, w, name="product")
    y = g.aten("mul.Tensor", y, 10.0 if g.rank == 0 else 1.0, name="with_constant")
    return g.all_reduce(y, "tp", name="reduce")


CTL_07 = Row(
    "CTL-07",
    "pytorch/pytorch#170025",
    "a partial sum times a constant stays partial (linear); the wrong twin multiplies on rank 0 only",
    3,
    lambda g: with_constant(g, 1, "mul", "sequential"),
    lambda g: with_constant(g, 3, "mul", "constant first"),
    constant_on_rank_0,
    [sharded("x", 1, 3), sharded("weight", 1, 3)],
    [replicated("with_constant", 3, "OUT")],
    {"reference": ["with_constant"], "implementation": ["with_constant", "reduce"]},
    "WRONG_CONSTANT",
)


# ---- BIAS-01, CTL-04 and CTL-05: the bias of a row-parallel linear ----------------------------------------------


def row_linear(g: GraphBuilder, tp: int, how: str) -> Ref:
    """``x w^T + bias`` [4, 5] over k=18."""
    x, w, bias = g.input("x", [4, 18 // tp]), g.input("weight", [5, 18 // tp]), g.input("bias", [5])
    wt = g.aten("t", w)
    if how == "sequential":
        return g.aten("addmm", bias, x, wt, name="linear")
    if how == "after":
        return g.aten("add.Tensor", g.all_reduce(g.aten("mm", x, wt), "tp"), bias, name="linear")
    if how == "every rank" or (how == "rank 0" and g.rank == 0) or (how == "ranks 0 and 1" and g.rank < 2):
        y = g.aten("addmm", bias, x, wt, name="linear")
    elif how.startswith("divided by"):
        part = g.aten("div.Tensor", bias, float(how.split()[-1]), name="bias_part")
        y = g.aten("addmm", part, x, wt, name="linear")
    else:
        y = g.aten("mm", x, wt, name="linear")
    return g.all_reduce(y, "tp", name="reduce")


ROW_LINEAR_INPUTS = [sharded("x", 1, 3), sharded("weight", 1, 3), replicated("bias", 3)]
ROW_LINEAR_BLAME = {"reference": ["linear"], "implementation": ["linear", "reduce"]}

BIAS_01 = Row(
    "BIAS-01",
    "huggingface/text-generation-inference#1036",
    "a replicated bias is added on each rank before the all-reduce: tp times the bias",
    3,
    lambda g: row_linear(g, 1, "sequential"),
    lambda g: row_linear(g, 3, "after"),
    lambda g: row_linear(g, 3, "every rank"),
    ROW_LINEAR_INPUTS,
    [replicated("linear", 3, "OUT")],
    ROW_LINEAR_BLAME,
    "SCALE_BY_MESH_SIZE",
)
CTL_04 = Row(
    "CTL-04",
    "GeeeekExplorer/nano-vllm#99",
    "a bias added before the all-reduce on rank 0 only is right; the wrong twin adds it on ranks 0 and 1",
    3,
    lambda g: row_linear(g, 1, "sequential"),
    lambda g: row_linear(g, 3, "rank 0"),
    lambda g: row_linear(g, 3, "ranks 0 and 1"),
    ROW_LINEAR_INPUTS,
    [replicated("linear", 3, "OUT")],
    ROW_LINEAR_BLAME,
)
CTL_05 = Row(
    "CTL-05",
    "mlc-ai/mlc-llm#3494",
    "bias/tp on every rank before the all-reduce is right; the wrong twin divides by 2 on 3 ranks",
    3,
    lambda g: row_linear(g, 1, "sequential"),
    lambda g: row_linear(g, 3, "divided by 3"),
    lambda g: row_linear(g, 3, "divided by 2"),
    ROW_LINEAR_INPUTS,
    [replicated("linear", 3, "OUT")],
    {"reference": ["linear"], "implementation": ["bias_part", "linear", "reduce"]},
    "WRONG_CONSTANT",
)


# ---- BIAS-06: the winner among the ranks' arg-max ---------------------------------------------------------------


def sharded_argmax(g: GraphBuilder, tp: int, how: str) -> Ref:
    """Arg-max over a vocabulary of 21, b=5 rows; ranks hold 7 positions each and combine (value, index) pairs."""
    logits = g.input("logits", [5, 21 // tp])
    if how == "sequential":
        return g.aten("argmax", logits, -1, name="token")
    best = g.aten("max.dim", logits, 1)
    index = g.aten("add.Tensor", best[1], g.rank * (21 // tp), name="global_index")
    values = g.all_gather(g.aten("unsqueeze", best[0], 0), "tp", name="gather_values")
    indices = g.all_gather(g.aten("unsqueeze", index, 0), "tp", name="gather_indices")
    winner = g.aten("argmax", values, 0, name="winner")
    ranks = g.aten("unsqueeze", g.aten("arange", tp, dtype=INT64), 1)
    mask = g.aten("_to_copy", g.aten("eq.Tensor", ranks, g.aten("unsqueeze", winner, 0)), dtype=INT64, name="mask")
    chosen = g.aten("mul.Tensor", indices if how == "right" else mask, mask, name="masked")
    return g.aten("sum.dim_IntList", chosen, [0], name="token")


BIAS_06 = Row(
    "BIAS-06",
    "aws-neuron/transformers-neuronx fed7f39",
    "the cross-rank arg-max multiplies the winner's mask by itself, not by the index: returns 1, not the token",
    3,
    lambda g: sharded_argmax(g, 1, "sequential"),
    lambda g: sharded_argmax(g, 3, "right"),
    lambda g: sharded_argmax(g, 3, "wrong"),
    [sharded("logits", 1, 3)],
    [replicated("token", 3, "OUT")],
    {"reference": ["token"], "implementation": ["masked", "token"]},
    "WRONG_OPERATOR",
)


# ---- POS-15: the ALiBi slopes of the first heads on every rank --------------------------------------------------


def alibi_attention(g: GraphBuilder, tp: int, how: str) -> Ref:
    """Attention [b=3, h=8, q=5, k=7, d=6] with ALiBi bias built for all heads and sliced by rank."""
    heads = 8 // tp
    q, k, v = g.input("q", [3, heads, 5, 6]), g.input("k", [3, heads, 7, 6]), g.input("v", [3, heads, 7, 6])
    powers = g.aten("_to_copy", g.aten("arange.start", 1, 9), dtype=DType("float32"))
    slopes = g.aten("pow.Scalar", 0.5, powers, name="slopes")
    positions = g.aten("_to_copy", g.aten("arange", 7), dtype=DType("float32"))
    alibi = g.aten("mul.Tensor", g.aten("view", slopes, [8, 1, 1]), g.aten("view", positions, [1, 1, 7]), name="alibi")
    if how != "sequential":
        first = heads * g.rank if how == "right" else 0
        alibi = g.aten("slice.Tensor", alibi, 0, first, first + heads, name="alibi_slice")
    scores = g.aten("mul.Tensor", g.aten("matmul", q, g.aten("transpose.int", k, 2, 3)), 6**-0.5)
    scores = g.aten("add.Tensor", scores, alibi, name="biased")
    return g.aten("matmul", g.aten("_softmax", scores, -1, False), v, name="out")


POS_15 = Row(
    "POS-15",
    "bigscience-workshop/Megatron-DeepSpeed#227",
    "the ALiBi bias is built for all heads and must be sliced by TP rank; every rank uses the first heads' slopes",
    2,
    lambda g: alibi_attention(g, 1, "sequential"),
    lambda g: alibi_attention(g, 2, "right"),
    lambda g: alibi_attention(g, 2, "wrong"),
    [sharded("q", 1, 2), sharded("k", 1, 2), sharded("v", 1, 2)],
    [sharded("out", 1, 2, "OUT")],
    {"reference": ["biased"], "implementation": ["alibi_slice", "biased"]},
    "WRONG_RANK_OFFSET",
    blamed_ranks=[1],
)


# ---- QKV-03: a concatenated projection sharded evenly -----------------------------------------------------------

HEADS, KV_HEADS, HEAD_DIM = 12, 4, 5
FUSED = (HEADS + 2 * KV_HEADS) * HEAD_DIM


def fused_attention(g: GraphBuilder, tp: int) -> Ref:
    """A fused [q12 | k4 | v4] projection of [b=3, s=7, m=11], grouped attention, row-parallel output projection."""
    h, kv, d = HEADS // tp, KV_HEADS // tp, HEAD_DIM
    x = g.input("hidden_states", [3, 7, 11])
    w = g.input("qkv_proj.weight", [FUSED // tp, 11], label="qkv_proj.weight")
    o = g.input("o_proj.weight", [13, h * d], label="o_proj.weight")
    qkv = g.aten("view", linear(g, g.aten("view", x, [21, 11]), w, name="qkv_proj"), [3, 7, FUSED // tp])
    q, k, v = g.aten("split_with_sizes", qkv, [h * d, kv * d, kv * d], 2, name="split_qkv")
    q, k, v = (g.aten("transpose.int", g.aten("view", t, [3, 7, n, d]), 1, 2) for t, n in ((q, h), (k, kv), (v, kv)))
    y = g.aten("scaled_dot_product_attention", q, k, v, name="attention", enable_gqa=True)
    y = g.aten("view", g.aten("clone", g.aten("transpose.int", y, 1, 2)), [21, h * d])
    y = linear(g, y, o, name="o_proj")
    return y if tp == 1 else g.all_reduce(y, "tp", name="reduce")


def grouped_weight() -> RelationEntry:
    """[q | k | v] rows of the reference, each block sharded by itself: rank 0 holds [q0-5, k0-1, v0-1]."""
    parts, start = [], 0
    for heads in (HEADS, KV_HEADS, KV_HEADS):
        size = heads // 2 * HEAD_DIM
        parts += [SliceExpr(0, start, start + size, Leaf(r, "qkv_proj.weight")) for r in range(2)]
        start += size
    return custom("qkv_proj.weight", ConcatExpr(0, tuple(parts)))


QKV_03 = Row(
    "QKV-03",
    "NVIDIA-NeMo/Automodel#1324",
    "a naively concatenated [Q|K|V] weight is sharded evenly on dim 0: rank 0 gets q0-9 instead of [q0-5, k0-1, v0-1]",
    2,
    lambda g: fused_attention(g, 1),
    lambda g: fused_attention(g, 2),
    lambda g: fused_attention(g, 2),
    [replicated("hidden_states", 2), grouped_weight(), sharded("o_proj.weight", 1, 2)],
    [replicated("o_proj", 2, "OUT")],
    {"reference": ["split_qkv"], "implementation": ["qkv_proj", "split_qkv"]},
    "WRONG_LAYOUT",
    wrong_inputs=[replicated("hidden_states", 2), sharded("qkv_proj.weight", 0, 2), sharded("o_proj.weight", 1, 2)],
)

ROWS = [
    COLL_01,
    COLL_06,
    SHARD_01,
    SHARD_05,
    SHARD_07,
    COMP_06,
    BIAS_01,
    BIAS_06,
    POS_15,
    QKV_03,
    CTL_04,
    CTL_05,
    CTL_07,
    *attention_rows.ROWS,
    *layer_rows.ROWS,
    *precision_rows.ROWS,
]


def _named_output(entry: RelationEntry, name: str) -> RelationEntry:
    leaves = tuple(Leaf(leaf.rank, name) for leaf in entry.dist)
    return RelationEntry(entry.seq, entry.kind, leaves, dim=entry.dim)


def write_row(row: Row, directory: Path) -> None:
    """``right/``, ``wrong/`` and ``case.json`` of a row."""
    reference = build_reference(row.reference, f"{row.id}/seq")
    for twin, program, inputs in (
        ("right", row.right, row.inputs),
        ("wrong", row.wrong, row.wrong_inputs or row.inputs),
    ):
        ranks = build_ranks(row.ranks, lambda g, rank, p=program: p(g), f"{row.id}/{twin}")
        out = ranks[0].outputs[0]
        assert out is not None
        outputs = [_named_output(e, out) for e in row.outputs]
        write_case(
            directory / twin,
            reference,
            ranks,
            inputs,
            outputs,
            expected="refines" if twin == "right" else "bug",
            description=row.mechanism,
            case=f"{row.id}/{twin}",
        )
    blame: dict[str, Any] = {"reference": row.blame["reference"], "implementation": row.blame["implementation"]}
    if row.blamed_ranks is not None:
        blame["ranks"] = row.blamed_ranks
    if row.diagnosis is not None:
        blame["diagnosis"] = row.diagnosis
    document = {
        "id": row.id,
        "source": row.source,
        "mechanism": row.mechanism,
        "mesh": {"tp": row.ranks},
        "right": {"verdict": "EQUIVALENT"},
        "wrong": {"verdict": row.wrong_verdict, "blame": blame},
    }
    (directory / "case.json").write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


def write_all(directory: Path) -> None:
    """Every row below ``directory``."""
    for row in ROWS:
        (directory / row.id).mkdir(parents=True, exist_ok=True)
        write_row(row, directory / row.id)


if __name__ == "__main__":
    write_all(HERE)
