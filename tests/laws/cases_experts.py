"""Experts sharded over ranks: rows sorted and multiplied group by group, or one matrix looked up per row.

Six experts on three ranks, two each (or three on three, one each); five tokens with two experts; hidden 4, inner 3.
"""

from __future__ import annotations

from typing import Any

from law_case import LawCase, Program
from support.build import DType, GraphBuilder, Ref

TP3 = {"tp": 3}
TOKENS, SLOTS, HIDDEN, INNER = 5, 2, 4, 3
ROWS = TOKENS * SLOTS
FLOAT32, INT32 = DType("float32"), DType("int32")


class Layer:
    """Inputs of the layer on one side, and where this rank's experts lie."""

    def __init__(self, g: GraphBuilder, total: int, how: str) -> None:
        self.g, self.how, self.local = g, how, bool(g.mesh)
        self.count = total // 3 if g.mesh else total
        self.x = g.input("x", [TOKENS, HIDDEN])
        shares = g.input("shares", [TOKENS, total])
        self.first = g.input("first", [self.count, HIDDEN, 2 * INNER])
        self.second = g.input("second", [self.count, INNER, HIDDEN])
        if how == "experts of a rank in another order":
            self.first = g.aten("flip", self.first, [0])
        best = g.aten("topk", g.aten("_softmax", shares, -1, False), SLOTS)
        weights, ids = best[0], best[1]
        if self.local:
            ids, weights = self.localise(ids, weights)
        self.ids, self.weights = g.aten("view", ids, [ROWS]), g.aten("view", weights, [ROWS])

    def localise(self, ids: Ref, weights: Ref) -> tuple[Ref, Ref]:
        """Global numbers of experts to those of this rank, ``count`` elsewhere."""
        g, n, how = self.g, self.count, self.how
        rank = g.rank
        if how == "ranks reversed":
            rank = 2 - rank
        if how == "offset of rank 1 wrong" and rank == 1:
            rank = 0
        if how in ("bounds", "bounds, end included"):
            low, high = rank * n, rank * n + n + (how == "bounds, end included")
            off = g.aten("bitwise_or.Tensor", g.aten("lt.Scalar", ids, low), g.aten("ge.Scalar", ids, high))
            inner = g.aten("sub.Tensor", ids, low)
        else:
            block = n + 1 if how == "blocks of another size" else n
            off = g.aten("ne.Scalar", g.aten("floor_divide", ids, block), rank)
            inner = g.aten("remainder.Scalar", ids, n)
        other = 0 if how.startswith("others keep a number") else n
        masked = how not in ("weights not masked", "neither rows nor weights masked", "others keep a number")
        local = g.aten("masked_fill.Scalar", inner, off, other)
        return local, g.aten("masked_fill.Scalar", weights, off, 0.0) if masked else weights

    def activated(self, y: Ref) -> Ref:
        gate, up = (self.g.aten("slice.Tensor", y, 1, k * INNER, (k + 1) * INNER) for k in (0, 1))
        return self.g.aten("mul.Tensor", self.g.aten("silu", gate), up)

    def summed(self, y: Ref) -> Ref:
        """Weighted rows [rows, hidden] to tokens, over all ranks."""
        g = self.g
        out = g.aten("sum.dim_IntList", g.aten("view", y, [TOKENS, SLOTS, HIDDEN]), [1])
        return out if self.how == "not reduced" or not self.local else g.all_reduce(out, "tp")


def grouped(how: str = "", total: int = 6) -> Program:
    """As Transformers' ``grouped_mm`` experts."""

    def program(g: GraphBuilder) -> Ref:
        e = Layer(g, total, how)
        ranked = g.aten("sort", e.ids, -1, how == "sorted downwards")
        keys, order = ranked[0], ranked[1]
        token = g.aten("floor_divide", order, 3 if how == "tokens with three rows" else SLOTS)
        if how == "rows not sorted":
            token = g.aten("floor_divide", g.aten("arange", ROWS), SLOTS)
        rows = g.aten("index.Tensor", e.x, [token])
        weights = g.aten("index.Tensor", e.weights, [order])
        counted = e.ids if how == "counted before sorting" else keys
        if how == "counts of other experts":
            counted = g.aten("remainder.Scalar", g.aten("add.Tensor", keys, 1), e.count)
        counts = g.aten("histc", g.aten("_to_copy", counted, dtype=FLOAT32), e.count, 0, e.count - 1)
        ends = g.aten("cumsum", counts, 0, dtype=INT32)
        off = g.aten("unsqueeze", g.aten("ge.Scalar", keys, e.count), -1)
        y = g.aten("_grouped_mm", rows, e.first, ends)
        y = g.aten("_grouped_mm", e.activated(y), e.second, ends)
        if e.local and how not in ("rows not masked", "neither rows nor weights masked"):
            y = g.aten("masked_fill.Scalar", y, off, 0.0)
        y = g.aten("mul.Tensor", y, g.aten("unsqueeze", weights, -1))
        if how == "written back":
            return e.summed(g.aten("index_put", g.aten("empty_like", y), [order], y))
        inverse = g.aten("index_put", g.aten("empty_like", order), [order], g.aten("arange", ROWS))
        if how == "inverse by sorting":
            inverse = g.aten("sort", order)[1]
        if how == "put back by the order itself":
            inverse = order
        return e.summed(y if how == "not put back" else g.aten("index.Tensor", y, [inverse]))

    return program


def batched(how: str = "", total: int = 6) -> Program:
    """As Transformers' ``batched_mm`` experts: one matrix per row."""

    def program(g: GraphBuilder) -> Ref:
        e = Layer(g, total, how)
        wide = g.aten("expand", g.aten("unsqueeze", e.x, 1), [TOKENS, SLOTS, HIDDEN])
        y = g.aten("view", wide, [ROWS, HIDDEN])
        ids, weights = e.ids, e.weights
        if e.local:
            if how == "weights masked by number":
                weights = g.aten("masked_fill.Scalar", weights, g.aten("ge.Scalar", ids, e.count), 0.0)
            ids = g.aten("clamp", ids, 0, e.count - (2 if how == "clamped too low" else 1))

        def product(rows: Ref, table: Ref) -> Ref:
            chosen = g.aten("index.Tensor", table, [ids])
            return g.aten("squeeze.dim", g.aten("bmm", g.aten("unsqueeze", rows, 1), chosen), 1)

        y = product(e.activated(product(y, e.first)), e.second)
        return e.summed(g.aten("mul.Tensor", y, g.aten("unsqueeze", weights, -1)))

    return program


GIVEN = {"x": "t h ~ t h", "shares": "t e ~ t e", "first": "(tp e) h f ~ e h f", "second": "(tp e) f h ~ e f h"}
LOCAL = (
    "ranks reversed", "offset of rank 1 wrong", "blocks of another size", "others keep a number",
    "experts of a rank in another order", "not reduced",
)  # fmt: skip
ROUTES: dict[str, Any] = {"mesh": TP3, "given": GIVEN, "outputs": ["t h ~ t h"]}

CASES = [
    LawCase(
        "experts-sorted",
        reference=grouped(),
        right={
            "quotients": grouped(),
            "bounds": grouped("bounds"),
            "weights not masked": grouped("weights not masked"),
            "counted before sorting": grouped("counted before sorting"),
            "written back": grouped("written back"),
            "inverse by sorting": grouped("inverse by sorting"),
            "one matrix per row": batched(),
            "bounds, end included": grouped("bounds, end included"),
            "others keep a number, weights masked": grouped("others keep a number, weights masked"),
        },
        unproved={
            "bounds, end included": "the end has the number of no expert, which only its rows' mask tells",
            "others keep a number, weights masked": "what is not this rank's expert shows in the weights only",
        },
        wrong={
            **{how: grouped(how) for how in LOCAL},
            "rows not masked": grouped("rows not masked"),
            "neither rows nor weights masked": grouped("neither rows nor weights masked"),
            "sorted downwards": grouped("sorted downwards"),
            "rows not sorted": grouped("rows not sorted"),
            "tokens with three rows": grouped("tokens with three rows"),
            "counts of other experts": grouped("counts of other experts"),
            "not put back": grouped("not put back"),
            "put back by the order itself": grouped("put back by the order itself"),
        },
        **ROUTES,
    ),
    LawCase(
        "experts-one-per-rank",
        reference=grouped(total=3),
        right={
            "quotients": grouped(total=3),
            "bounds": grouped("bounds", 3),
            "rows not masked": grouped("rows not masked", 3),
        },
        unproved={"rows not masked": "that a single group covers, and so defines, all rows is not derived"},
        wrong={
            "others keep a number": grouped("others keep a number", 3),
            "neither rows nor weights masked": grouped("neither rows nor weights masked", 3),
            "ranks reversed": grouped("ranks reversed", 3),
            "not reduced": grouped("not reduced", 3),
        },
        **ROUTES,
    ),
    LawCase(
        "experts-one-matrix-per-row",
        reference=batched(),
        right={
            "quotients": batched(),
            "bounds": batched("bounds"),
            "weights masked by number": batched("weights masked by number"),
            "sorted": grouped(),
        },
        wrong={
            **{how: batched(how) for how in LOCAL},
            "weights not masked": batched("weights not masked"),
            "bounds, end included": batched("bounds, end included"),
            "clamped too low": batched("clamped too low"),
        },
        **ROUTES,
    ),
]
