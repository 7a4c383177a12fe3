"""Attention: grouped heads, fused and written out, masks, positions under context parallelism, dropout."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from law_case import LawCase, Program
from support.build import DType, GraphBuilder, Ref

TP2 = {"tp": 2}
FLOAT, INF = DType("float32"), float("-inf")
HEADS = "b (tp h) s d ~ b h s d"
SEQUENCE = "b h (tp s) d ~ b h s d"


def parts(g: GraphBuilder) -> int:
    return 1 if g.mesh else 2


def qkv(g: GraphBuilder, heads: int, kv_heads: int, *, length: int = 5, keys: int = 7) -> tuple[Ref, Ref, Ref]:
    """q [3, heads, length, 4], k and v [3, kv_heads, keys, 4]."""
    q = g.input("q", [3, heads, length, 4])
    return q, g.input("k", [3, kv_heads, keys, 4]), g.input("v", [3, kv_heads, keys, 4])


def fused(
    kv: int = 6,
    *,
    causal: bool = False,
    scale: float | None = None,
    swap: bool = False,
    square: bool = False,
    group: int = 1,
) -> Program:
    """Fused attention, heads sharded over 2 ranks: ``kv`` key heads per rank, ``group`` query heads for each."""

    def program(g: GraphBuilder) -> Ref:
        n = parts(g)
        q, k, v = qkv(g, kv * group * n, kv * n, **({"length": 7} if square else {}))
        more: dict[str, Any] = {} if scale is None else {"scale": scale}
        if group > 1:
            more["enable_gqa"] = True
        return g.aten("scaled_dot_product_attention", q, *((v, k) if swap else (k, v)), None, 0.0, causal, **more)

    return program


def written_out(*, scale: float = 0.5, axis: int = -1) -> Program:
    """softmax(scale q k^T) v with 6 heads per rank."""

    def program(g: GraphBuilder) -> Ref:
        q, k, v = qkv(g, 6 * parts(g), 6 * parts(g))
        scores = g.aten("mul.Tensor", g.aten("matmul", q, g.aten("transpose.int", k, 2, 3)), scale)
        return g.aten("matmul", g.aten("_softmax", scores, axis, False), v)

    return program


def repeated_heads(how: str) -> Program:
    """5 key heads per rank, 4 query heads each, repeated by expand and reshape."""

    def program(g: GraphBuilder) -> Ref:
        kv = 5 * parts(g)
        q, k, v = qkv(g, 4 * kv, kv)

        def repeat(x: Ref) -> Ref:
            if how == "blocks":
                return g.aten("repeat", x, [1, 4, 1, 1])
            wide = g.aten("expand", g.aten("unsqueeze", x, 2), [3, kv, 4, 7, 4])
            return g.aten("view", g.aten("clone", wide), [3, 4 * kv, 7, 4])

        if how == "fused":
            return g.aten("scaled_dot_product_attention", q, k, v, enable_gqa=True)
        return g.aten("scaled_dot_product_attention", q, repeat(k), repeat(v))

    return program


ATTENTION = [
    LawCase(
        "sdpa-heads",
        TP2,
        fused(),
        {"heads sharded": fused()},
        {"causal": fused(causal=True), "other scale": fused(scale=0.25), "keys and values exchanged": fused(swap=True)},
        {"q": HEADS, "k": HEADS, "v": HEADS},
        [HEADS],
    ),
    LawCase(
        "sdpa-default-scale",
        TP2,
        fused(),
        {"written": fused(scale=0.5)},
        {"applied twice": fused(scale=0.25)},
        {"q": HEADS, "k": HEADS, "v": HEADS},
        [HEADS],
    ),
    LawCase(
        "sdpa-causal",
        TP2,
        fused(causal=True, square=True),
        {"heads sharded": fused(causal=True, square=True)},
        {"not causal": fused(square=True)},
        {"q": HEADS, "k": HEADS, "v": HEADS},
        [HEADS],
    ),
    LawCase(
        "sdpa-grouped",
        TP2,
        fused(5, group=4),
        {"heads sharded": fused(5, group=4)},
        {"other grouping": repeated_heads("blocks")},
        {"q": HEADS, "k": HEADS, "v": HEADS},
        [HEADS],
    ),
    LawCase(
        "attention-written-out",
        TP2,
        written_out(),
        {"heads sharded": written_out()},
        {"other scale": written_out(scale=0.25), "softmax over queries": written_out(axis=-2)},
        {"q": HEADS, "k": HEADS, "v": HEADS},
        [HEADS],
    ),
    LawCase(
        "repeat-kv",
        TP2,
        repeated_heads("expand"),
        {"heads sharded": repeated_heads("expand")},
        {"block-wise": repeated_heads("blocks")},
        {"q": HEADS, "k": HEADS, "v": HEADS},
        [HEADS],
    ),
    LawCase(
        "repeat-kv-fused",
        TP2,
        repeated_heads("expand"),
        {"grouped kernel": repeated_heads("fused")},
        {"block-wise": repeated_heads("blocks")},
        {"q": HEADS, "k": HEADS, "v": HEADS},
        [HEADS],
    ),
    LawCase(
        "sdpa-fused-or-written",
        TP2,
        fused(),
        {"written out": written_out()},
        {"other scale": written_out(scale=0.25)},
        {"q": HEADS, "k": HEADS, "v": HEADS},
        [HEADS],
    ),
    LawCase(
        "sdpa-queries-sharded",
        TP2,
        lambda g: context(g, "sequence", False),
        {"keys gathered": lambda g: context(g, "sequence", False)},
        {
            "keys local": lambda g: context(g, "none", False),
            "keys gathered on heads": lambda g: context(g, "heads", False),
            "causal without offset": lambda g: context(g, "sequence", True),
        },
        {"q": SEQUENCE, "k": SEQUENCE, "v": SEQUENCE},
        [SEQUENCE],
    ),
]


def context(g: GraphBuilder, gather: str, causal: bool) -> Ref:
    """Queries [3, 6, 7 * cp, 4] stay sharded along the sequence; 6 / 3 key heads, grouped."""
    n = parts(g)
    q, k, v = g.input("q", [3, 12, 7 * n, 4]), g.input("k", [3, 3, 7 * n, 4]), g.input("v", [3, 3, 7 * n, 4])
    if gather != "none":
        k, v = (g.all_gather(x, "tp", {"sequence": 2, "heads": 1}[gather]) for x in (k, v))
    return g.aten("scaled_dot_product_attention", q, k, v, None, 0.0, causal and bool(g.mesh), enable_gqa=True)


# ---- positions and masks ----------------------------------------------------------------------------------------


def own_positions(how: str = "own") -> Callable[[GraphBuilder], Ref]:
    """Positions 0..11, 6 of them on each rank."""

    def program(g: GraphBuilder) -> Ref:
        if not g.mesh:
            return g.aten("arange", 12)
        start = {"own": 6 * g.rank, "first": 0, "one more": 6 * g.rank + 1, "reversed": 6 - 6 * g.rank}[how]
        return g.aten("arange.start", start, start + 6)

    return program


def rotary(how: str = "own") -> Program:
    """x [12, 8] times the cosine of positions times frequencies [8]."""

    def program(g: GraphBuilder) -> Ref:
        x, f = g.input("x", [6 * parts(g), 8]), g.input("f", [8])
        p = g.aten("_to_copy", own_positions(how)(g), dtype=FLOAT)
        angle = g.aten("mul.Tensor", g.aten("unsqueeze", p, 1), f)
        return g.aten("mul.Tensor", x, g.aten("cos", angle))

    return program


def shifted_rotary(g: GraphBuilder) -> Ref:
    """The offset is added to local positions 0..5."""
    x, f = g.input("x", [6 * parts(g), 8]), g.input("f", [8])
    p = g.aten("arange", 6 * parts(g))
    if g.mesh:
        p = g.aten("add.Tensor", p, 6 * g.rank)
    angle = g.aten("mul.Tensor", g.aten("unsqueeze", g.aten("_to_copy", p, dtype=FLOAT), 1), f)
    return g.aten("mul.Tensor", x, g.aten("cos", angle))


def sliced_rotary(how: str = "own") -> Program:
    """The table is computed for all positions and sliced by rank."""

    def program(g: GraphBuilder) -> Ref:
        x, f = g.input("x", [6 * parts(g), 8]), g.input("f", [8])
        p = g.aten("_to_copy", g.aten("arange", 12), dtype=FLOAT)
        table = g.aten("cos", g.aten("mul.Tensor", g.aten("unsqueeze", p, 1), f))
        if g.mesh:
            start = {"own": 6 * g.rank, "first": 0}[how]
            table = g.aten("slice.Tensor", table, 0, start, start + 6)
        return g.aten("mul.Tensor", x, table)

    return program


def rotate_half(split: str = "half") -> Program:
    """[x1, x2] -> [x1 c - x2 s, x2 c + x1 s], heads sharded; x [5, 3 * tp, 8], c and s [5, 1, 4]."""

    def program(g: GraphBuilder) -> Ref:
        x = g.input("x", [5, 3 * parts(g), 8])
        c, s = (g.aten("unsqueeze", g.input(n, [5, 4]), 1) for n in ("c", "s"))
        if split == "half":
            x1, x2 = g.aten("split.Tensor", x, 4, 2)
        else:
            x1, x2 = g.aten("slice.Tensor", x, 2, 0, 8, 2), g.aten("slice.Tensor", x, 2, 1, 8, 2)
        y1 = g.aten("sub.Tensor", g.aten("mul.Tensor", x1, c), g.aten("mul.Tensor", x2, s))
        y2 = g.aten("add.Tensor", g.aten("mul.Tensor", x2, c), g.aten("mul.Tensor", x1, s))
        if split == "half":
            return g.aten("cat", [y1, y2], 2)
        return g.aten("view", g.aten("stack", [y1, y2], 3), list(g.shape(x)))

    return program


def causal_rows(how: str = "own", op: str = "ge.Tensor") -> Program:
    """Scores [12, 12] masked where the key is later than the query, query rows sharded."""

    def program(g: GraphBuilder) -> Ref:
        x = g.input("x", [6 * parts(g), 12])
        rows, columns = g.aten("unsqueeze", own_positions(how)(g), 1), g.aten("unsqueeze", g.aten("arange", 12), 0)
        keep = g.aten(op, rows, columns)
        return g.aten("_softmax", g.aten("masked_fill.Scalar", x, g.aten("logical_not", keep), INF), -1, False)

    return program


def tril_rows(how: str = "own") -> Program:
    """The causal mask from tril of ones, sliced by rank."""

    def program(g: GraphBuilder) -> Ref:
        x = g.input("x", [6 * parts(g), 12])
        keep = g.aten("tril", g.aten("ones", [12, 12], dtype=DType("bool")))
        if g.mesh:
            start = {"own": 6 * g.rank, "first": 0}[how]
            keep = g.aten("slice.Tensor", keep, 0, start, start + 6)
        return g.aten("_softmax", g.aten("masked_fill.Scalar", x, g.aten("logical_not", keep), INF), -1, False)

    return program


def window(width: int) -> Program:
    """Sliding window: keys at distance less than ``width``; heads sharded."""

    def program(g: GraphBuilder) -> Ref:
        x = g.input("x", [2 * parts(g), 7, 7])
        p = g.aten("arange", 7)
        distance = g.aten("sub.Tensor", g.aten("unsqueeze", p, 1), g.aten("unsqueeze", p, 0))
        near = g.aten("lt.Scalar", distance, width)
        seen = g.aten("bitwise_and.Tensor", near, g.aten("ge.Scalar", distance, 0))
        return g.aten("_softmax", g.aten("masked_fill.Scalar", x, g.aten("logical_not", seen), INF), -1, False)

    return program


ROWS, F = "(tp s) k ~ s k", "k ~ k"
POSITIONS = [
    LawCase(
        "positions-sharded",
        TP2,
        rotary(),
        {"own range": rotary()},
        {
            "first range everywhere": rotary("first"),
            "one off": rotary("one more"),
            "reversed ranks": rotary("reversed"),
        },
        {"x": ROWS, "f": F},
        [ROWS],
    ),
    LawCase(
        "positions-shifted",
        TP2,
        rotary(),
        {"offset added": shifted_rotary},
        {"first range everywhere": rotary("first")},
        {"x": ROWS, "f": F},
        [ROWS],
    ),
    LawCase(
        "positions-table-sliced",
        TP2,
        sliced_rotary(),
        {"own slice": sliced_rotary()},
        {"first slice": sliced_rotary("first")},
        {"x": ROWS, "f": F},
        [ROWS],
    ),
    LawCase(
        "positions-alone",
        TP2,
        lambda g: g.aten("mul.Tensor", g.aten("_to_copy", own_positions()(g), dtype=FLOAT), 0.5),
        {"own range": lambda g: g.aten("mul.Tensor", g.aten("_to_copy", own_positions()(g), dtype=FLOAT), 0.5)},
        {
            "first range": lambda g: g.aten(
                "mul.Tensor", g.aten("_to_copy", own_positions("first")(g), dtype=FLOAT), 0.5
            )
        },
        {},
        ["(tp s) ~ s"],
        unproved={"own range": "the axis that arange creates is divided on one side only"},
    ),
    LawCase(
        "rotate-half",
        TP2,
        rotate_half(),
        {"heads sharded": rotate_half()},
        {"adjacent pairs": rotate_half("pairs")},
        {"x": "s (tp h) d ~ s h d", "c": "s d ~ s d", "s": "s d ~ s d"},
        ["s (tp h) d ~ s h d"],
    ),
    LawCase(
        "rotate-pairs",
        TP2,
        rotate_half("pairs"),
        {"heads sharded": rotate_half("pairs")},
        {"halves": rotate_half()},
        {"x": "s (tp h) d ~ s h d", "c": "s d ~ s d", "s": "s d ~ s d"},
        ["s (tp h) d ~ s h d"],
    ),
    LawCase(
        "causal-mask-rows",
        TP2,
        causal_rows(),
        {"own rows": causal_rows()},
        {"first rows everywhere": causal_rows("first"), "one off": causal_rows("one more")},
        {"x": ROWS},
        [ROWS],
    ),
    LawCase(
        "causal-mask-strict",
        TP2,
        causal_rows(op="ge.Tensor"),
        {"less or equal": causal_rows(op="ge.Tensor")},
        {"less": lambda g: causal_rows("own", "gt.Tensor" if g.mesh else "ge.Tensor")(g)},
        {"x": ROWS},
        [ROWS],
    ),
    LawCase(
        "causal-mask-tril",
        TP2,
        tril_rows(),
        {"own rows": tril_rows()},
        {"first rows everywhere": tril_rows("first")},
        {"x": ROWS},
        [ROWS],
    ),
    LawCase(
        "sliding-window",
        TP2,
        window(3),
        {"heads sharded": window(3)},
        {"one more": window(4)},
        {"x": "(tp h) q k ~ h q k"},
        ["(tp h) q k ~ h q k"],
    ),
]


# ---- dropout ----------------------------------------------------------------------------------------------------


def dropped(p: float = 0.1, twice: bool = False, train: bool = True) -> Program:
    def program(g: GraphBuilder) -> Ref:
        x = g.aten("gelu", g.input("x", [5 * parts(g), 8]))
        x = g.aten("native_dropout", x, p, train)[0]
        return g.aten("native_dropout", x, p, train)[0] if twice else x

    return program


DROPOUT = [
    LawCase(
        "dropout-sharded",
        TP2,
        dropped(),
        {"rows sharded": dropped()},
        {"other probability": dropped(0.2), "twice": dropped(twice=True), "off": dropped(train=False)},
        {"x": "(tp s) k ~ s k"},
        ["(tp s) k ~ s k"],
    ),
    LawCase(
        "dropout-off",
        TP2,
        lambda g: g.aten("gelu", g.input("x", [5 * parts(g), 8])),
        {"in evaluation": dropped(train=False)},
        {"on": dropped()},
        {"x": "(tp s) k ~ s k"},
        ["(tp s) k ~ s k"],
    ),
]

CASES = [*ATTENTION, *POSITIONS, *DROPOUT]
