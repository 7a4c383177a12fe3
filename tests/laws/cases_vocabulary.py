"""Vocabulary parallelism: the sharded look-up in several spellings, and cross entropy over sharded logits.

The vocabulary of 12 is sharded over 3 ranks, 4 rows each; ids are [2, 5].
"""

from __future__ import annotations

from typing import Any

from law_case import LawCase, Program
from support.build import DType, GraphBuilder, Ref

TP3 = {"tp": 3}
LOCAL, WHOLE = 4, 12
INT64, FLOAT = DType("int64"), DType("float32")


def ids_and_table(g: GraphBuilder) -> tuple[Ref, Ref]:
    return g.input("ids", [2, 5], "int64"), g.input("table", [LOCAL if g.mesh else WHOLE, 7])


def plain(g: GraphBuilder) -> Ref:
    ids, table = ids_and_table(g)
    return g.aten("embedding", table, ids)


def bounds(g: GraphBuilder, how: str) -> tuple[int, int]:
    """First and last + 1 id of this rank; ``how`` is a fault."""
    low = LOCAL * g.rank
    if how == "offset of rank 1 wrong" and g.rank == 1:
        low += 1
    if how == "ranks reversed":
        low = LOCAL * (2 - g.rank)
    if how == "no offset":
        low = 0
    return low, low + LOCAL + (1 if how == "end included" else 0)


def finished(g: GraphBuilder, y: Ref, how: str) -> Ref:
    return y if how == "not reduced" else g.all_reduce(y, "tp", "max" if how == "maximum" else "sum")


def megatron(how: str = "") -> Program:
    """Mask by lt | ge, shifted ids set to 0 and rows set to 0 by index_put."""

    def program(g: GraphBuilder) -> Ref:
        ids, table = ids_and_table(g)
        low, high = bounds(g, how)
        below, above = g.aten("lt.Scalar", ids, low), g.aten("ge.Scalar", ids, high)
        outside = g.aten("bitwise_or.Tensor", below, above)
        shifted = g.aten("clone", g.aten("sub.Tensor", ids, low))
        zero = g.aten("full", [], 0, dtype=INT64)
        local = shifted if how == "ids not masked" else g.aten("index_put", shifted, [outside], zero)
        y = g.aten("embedding", table, local)
        if how != "rows not masked":
            y = g.aten("index_put", y, [outside], g.aten("full", [], 0.0, dtype=FLOAT))
        return finished(g, y, how)

    return program


def vllm(how: str = "") -> Program:
    """One range mask; offset and ids multiplied by it; rows filled with 0 (as vLLM without added vocabulary)."""

    def program(g: GraphBuilder) -> Ref:
        ids, table = ids_and_table(g)
        low, high = bounds(g, how)
        inside = g.aten("bitwise_and.Tensor", g.aten("ge.Scalar", ids, low), g.aten("lt.Scalar", ids, high))
        offset = g.aten("mul.Tensor", inside, low)
        local = g.aten("sub.Tensor", ids, offset)
        local = local if how == "ids not masked" else g.aten("mul.Tensor", inside, local)
        outside = g.aten("bitwise_not", inside)
        y = g.aten("embedding", table, local)
        if how != "rows not masked":
            y = g.aten("masked_fill.Scalar", y, g.aten("unsqueeze", outside, -1), 0.0)
        return finished(g, y, how)

    return program


def vllm_with_added(how: str = "") -> Program:
    """vLLM's full form: original and added vocabulary, the added part empty."""

    def program(g: GraphBuilder) -> Ref:
        ids, table = ids_and_table(g)
        low, high = bounds(g, how)
        original = g.aten("bitwise_and.Tensor", g.aten("ge.Scalar", ids, low), g.aten("lt.Scalar", ids, high))
        added = g.aten("bitwise_and.Tensor", g.aten("ge.Scalar", ids, WHOLE), g.aten("lt.Scalar", ids, WHOLE))
        offset = g.aten("add.Tensor", g.aten("mul.Tensor", original, low), g.aten("mul.Tensor", added, WHOLE - LOCAL))
        inside = g.aten("bitwise_or.Tensor", original, added)
        local = g.aten("mul.Tensor", inside, g.aten("sub.Tensor", ids, offset))
        y = g.aten("embedding", table, local)
        y = g.aten("masked_fill.Scalar", y, g.aten("unsqueeze", g.aten("bitwise_not", inside), -1), 0.0)
        return finished(g, y, how)

    return program


def clamped(how: str = "") -> Program:
    """Shifted ids clamped into the shard, rows selected by where."""

    def program(g: GraphBuilder) -> Ref:
        ids, table = ids_and_table(g)
        low, high = bounds(g, how)
        inside = g.aten("bitwise_and.Tensor", g.aten("ge.Scalar", ids, low), g.aten("lt.Scalar", ids, high))
        local = g.aten("clamp", g.aten("sub.Tensor", ids, low), 0, LOCAL - 1)
        y = g.aten("embedding", table, local)
        zero = g.aten("full", [], 0.0, dtype=FLOAT)
        y = g.aten("where.self", g.aten("unsqueeze", inside, -1), y, zero)
        return finished(g, y, how)

    return program


def where_then_fill(how: str = "") -> Program:
    """Ids outside the shard replaced by 0 with where; rows multiplied by the mask."""

    def program(g: GraphBuilder) -> Ref:
        ids, table = ids_and_table(g)
        low, high = bounds(g, how)
        inside = g.aten("bitwise_and.Tensor", g.aten("ge.Scalar", ids, low), g.aten("lt.Scalar", ids, high))
        local = g.aten("sub.Tensor", ids, low)
        if how != "ids not masked":
            local = g.aten("where.self", inside, local, g.aten("full", [], 0, dtype=INT64))
        y = g.aten("embedding", table, local)
        if how != "rows not masked":
            y = g.aten("mul.Tensor", y, g.aten("unsqueeze", inside, -1))
        return finished(g, y, how)

    return program


FAULTS = (
    "offset of rank 1 wrong",
    "ranks reversed",
    "no offset",
    "not reduced",
    "maximum",
    "rows not masked",
    "ids not masked",
)
LOOKUP = {"ids": "b s ~ b s", "table": "(tp v) h ~ v h"}


def lookup(name: str, spelling: Any, faults: tuple[str, ...] = FAULTS, **more: Any) -> LawCase:
    return LawCase(
        f"embedding-{name}",
        TP3,
        plain,
        {"masked": spelling()},
        {f: spelling(f) for f in faults},
        LOOKUP,
        ["b s h ~ b s h"],
        ranges={"ids": WHOLE},
        **more,
    )


def tied_head(how: str = "") -> Program:
    """Logits [2, 5, 12] from the embedding table, vocabulary sharded."""

    def program(g: GraphBuilder) -> Ref:
        x, table = g.input("x", [2, 5, 7]), g.input("table", [LOCAL if g.mesh else WHOLE, 7])
        y = g.aten("view", g.aten("mm", g.aten("view", x, [10, 7]), g.aten("t", table)), [2, 5, -1])
        return y if how == "sharded" or not g.mesh else g.all_gather(y, "tp", 2 if how == "" else 0)

    return program


EMBEDDING = [
    LawCase(
        "embedding-replicated",
        TP3,
        plain,
        {"same": lambda g: g.aten("embedding", g.input("table", [WHOLE, 7]), g.input("ids", [2, 5], "int64"))},
        {
            "shifted": lambda g: g.aten(
                "embedding", g.aten("roll", g.input("table", [WHOLE, 7]), [1], [0]), g.input("ids", [2, 5], "int64")
            )
        },
        {"ids": "b s ~ b s", "table": "v h ~ v h"},
        ["b s h ~ b s h"],
        ranges={"ids": WHOLE},
    ),
    LawCase(
        "embedding-hidden-sharded",
        TP3,
        lambda g: g.aten("embedding", g.input("table", [WHOLE, 21]), g.input("ids", [2, 5], "int64")),
        {"columns": lambda g: g.aten("embedding", g.input("table", [WHOLE, 7]), g.input("ids", [2, 5], "int64"))},
        {
            "ids shifted": lambda g: g.aten(
                "embedding",
                g.input("table", [WHOLE, 7]),
                g.aten("remainder.Scalar", g.aten("add.Tensor", g.input("ids", [2, 5], "int64"), 1), WHOLE),
            )
        },
        {"ids": "b s ~ b s", "table": "v (tp h) ~ v h"},
        ["b s (tp h) ~ b s h"],
        ranges={"ids": WHOLE},
    ),
    lookup("megatron", megatron),
    lookup("vllm", vllm),
    lookup(
        "vllm-with-added", vllm_with_added, ("offset of rank 1 wrong", "ranks reversed", "no offset", "not reduced")
    ),
    lookup(
        "clamped",
        clamped,
        ("offset of rank 1 wrong", "ranks reversed", "no offset", "not reduced"),
        unproved={"masked": "clamp is not in the index domain"},
    ),
    lookup(
        "where",
        where_then_fill,
        unproved={"masked": "rows times a mask are not rows filled with 0: inf * 0 is undefined"},
    ),
    LawCase(
        "logits",
        TP3,
        tied_head(),
        {"gathered": tied_head()},
        {"on batch": lambda g: g.aten("view", tied_head("batch")(g), [2, 5, 12])},
        {"x": "b s h ~ b s h", "table": "(tp v) h ~ v h"},
        ["b s v ~ b s v"],
    ),
]


# ---- cross entropy ----------------------------------------------------------------------------------------------


def cross_entropy(how: str = "", spelling: str = "index") -> Program:
    """Megatron's vocabulary-parallel cross entropy: logits [5, 12], target [5] -> loss [5]."""

    def program(g: GraphBuilder) -> Ref:
        logits, target = g.input("logits", [5, LOCAL if g.mesh else WHOLE]), g.input("target", [5], "int64")
        size = LOCAL if g.mesh else WHOLE
        low, _ = bounds(g, how)
        top = g.aten("amax", logits, [-1])
        top = top if how == "maximum not reduced" else g.all_reduce(top, "tp", "max")
        shifted = g.aten("sub.Tensor", logits, g.aten("unsqueeze", top, -1))
        outside = g.aten("bitwise_or.Tensor", g.aten("lt.Scalar", target, low), g.aten("ge.Scalar", target, low + size))
        local = g.aten("index_put", g.aten("sub.Tensor", target, low), [outside], g.aten("full", [], 0, dtype=INT64))
        if spelling == "index":
            picked = g.aten("index.Tensor", shifted, [g.aten("arange", 5), local])
        else:
            picked = g.aten("squeeze.dim", g.aten("gather", shifted, 1, g.aten("unsqueeze", local, 1)), 1)
        if how != "target not masked":
            picked = g.aten("index_put", picked, [outside], g.aten("full", [], 0.0, dtype=FLOAT))
        picked = picked if how == "target not reduced" else g.all_reduce(picked, "tp")
        total = g.aten("sum.dim_IntList", g.aten("exp", shifted), [-1])
        total = total if how == "sum not reduced" else g.all_reduce(total, "tp")
        return g.aten("sub.Tensor", g.aten("log", total), picked)

    return program


def plain_cross_entropy(g: GraphBuilder) -> Ref:
    """The same without masks: what a sequential model writes."""
    logits, target = g.input("logits", [5, WHOLE]), g.input("target", [5], "int64")
    shifted = g.aten("sub.Tensor", logits, g.aten("amax", logits, [-1], True))
    picked = g.aten("squeeze.dim", g.aten("gather", shifted, 1, g.aten("unsqueeze", target, 1)), 1)
    return g.aten("sub.Tensor", g.aten("log", g.aten("sum.dim_IntList", g.aten("exp", shifted), [-1])), picked)


def fused_cross_entropy(g: GraphBuilder) -> Ref:
    logits, target = g.input("logits", [5, WHOLE]), g.input("target", [5], "int64")
    logs = g.aten("_log_softmax", logits, 1, False)
    return g.aten("neg", g.aten("squeeze.dim", g.aten("gather", logs, 1, g.aten("unsqueeze", target, 1)), 1))


LOSS = {"logits": "s (tp v) ~ s v", "target": "s ~ s"}
CE_FAULTS = (
    "offset of rank 1 wrong",
    "no offset",
    "maximum not reduced",
    "target not masked",
    "target not reduced",
    "sum not reduced",
)
CROSS_ENTROPY = [
    LawCase(
        "cross-entropy-megatron",
        TP3,
        cross_entropy(),
        {"sharded": cross_entropy()},
        {f: cross_entropy(f) for f in CE_FAULTS},
        LOSS,
        ["s ~ s"],
        ranges={"target": WHOLE},
    ),
    LawCase(
        "cross-entropy-gather",
        TP3,
        plain_cross_entropy,
        {"sharded, gather": cross_entropy(spelling="gather"), "sharded, index": cross_entropy()},
        {f: cross_entropy(f, "gather") for f in CE_FAULTS},
        LOSS,
        ["s ~ s"],
        ranges={"target": WHOLE},
    ),
    LawCase(
        "cross-entropy-fused",
        TP3,
        fused_cross_entropy,
        {"sharded": cross_entropy(spelling="gather")},
        {f: cross_entropy(f, "gather") for f in CE_FAULTS[:2]},
        LOSS,
        ["s ~ s"],
        ranges={"target": WHOLE},
        unproved={"sharded": "needs the decomposition of log-softmax"},
    ),
    LawCase(
        "cross-entropy-mean",
        TP3,
        lambda g: g.aten("mean", cross_entropy()(g)),
        {"sharded": lambda g: g.aten("mean", cross_entropy()(g))},
        {"summed": lambda g: g.aten("sum", cross_entropy()(g))},
        LOSS,
        ["~"],
        ranges={"target": WHOLE},
    ),
]


def argmax(how: str) -> Program:
    """Greedy token of sharded logits [5, 12]."""

    def program(g: GraphBuilder) -> Ref:
        logits = g.input("logits", [5, LOCAL if g.mesh else WHOLE])
        if how == "gathered":
            logits = g.all_gather(logits, "tp", 1)
        return g.aten("argmax", logits, 1)

    return program


SAMPLING = [
    LawCase(
        "argmax-over-sharded",
        TP3,
        argmax("local"),
        {"gathered": argmax("gathered")},
        {
            "local index": argmax("local"),
            "largest local index": lambda g: g.all_reduce(argmax("local")(g), "tp", "max"),
        },
        {"logits": "s (tp v) ~ s v"},
        ["s ~ s"],
    ),
]

CASES = [*EMBEDDING, *CROSS_ENTROPY, *SAMPLING]
