"""Pointwise operators, contractions, reductions, softmax and norms, on sharded operands."""

from __future__ import annotations

from typing import Any

from law_case import LawCase, Program, Twin
from support.build import GraphBuilder, Ref

TP2, TP3 = {"tp": 2}, {"tp": 3}
COLS = "s (tp k) ~ s k"
ROWS = "(tp s) k ~ s k"


def unary(op: str, *attrs: Any, shape: tuple[int, int] = (5, 4), **more: Any) -> Program:
    """``op(x)`` with x [5, 4 * tp]."""
    return lambda g: g.aten(op, g.input("x", [shape[0], shape[1] * g_parts(g)]), *attrs, **more)


def g_parts(g: GraphBuilder) -> int:
    """Local graphs hold one part, the sequential one all (3 ranks in this file unless said otherwise)."""
    return 1 if g.mesh else 3


def xy(g: GraphBuilder) -> tuple[Ref, Ref]:
    """Two tensors [5, 12], columns sharded over 3 ranks."""
    return g.input("x", [5, 4 * g_parts(g)]), g.input("y", [5, 4 * g_parts(g)])


def binary(op: str, swap: bool = False, **more: Any) -> Program:
    def program(g: GraphBuilder) -> Ref:
        x, y = xy(g)
        return g.aten(op, *((y, x) if swap else (x, y)), **more)

    return program


def bias(first_rows_everywhere: bool = False) -> Program:
    def program(g: GraphBuilder) -> Ref:
        x = g.input("x", [5, 4 * g_parts(g)])
        if g.mesh:
            b = g.input("b", [12])
            b = g.aten(
                "slice.Tensor",
                b,
                0,
                0 if first_rows_everywhere else 4 * g.rank,
                4 if first_rows_everywhere else 4 * g.rank + 4,
            )
        else:
            b = g.input("b", [12])
        return g.aten("add.Tensor", x, b)

    return program


def where(invert: bool) -> Program:
    def program(g: GraphBuilder) -> Ref:
        (x, y), m = xy(g), g.input("m", [5, 4 * g_parts(g)], "bool")
        return g.aten("where.self", m, *((y, x) if invert else (x, y)))

    return program


def fill(invert: bool, value: float = -7.5) -> Program:
    def program(g: GraphBuilder) -> Ref:
        x, m = g.input("x", [5, 4 * g_parts(g)]), g.input("m", [5, 4 * g_parts(g)], "bool")
        return g.aten("masked_fill.Scalar", x, g.aten("logical_not", m) if invert else m, value)

    return program


POINTWISE = [
    LawCase(
        "pointwise-unary",
        TP3,
        unary("gelu"),
        {"same": unary("gelu")},
        {"other variant": unary("gelu", approximate="tanh"), "other operator": unary("silu")},
        {"x": COLS},
        [COLS],
    ),
    LawCase(
        "pointwise-attributes",
        TP3,
        unary("clamp", -0.5, 0.5),
        {"same": unary("clamp", -0.5, 0.5)},
        {"other bound": unary("clamp", -0.5, 0.25)},
        {"x": COLS},
        [COLS],
    ),
    LawCase(
        "pointwise-scalar",
        TP3,
        unary("mul.Tensor", 0.5),
        {"same": unary("mul.Tensor", 0.5), "divided": unary("div.Tensor", 2.0)},
        {"other constant": unary("mul.Tensor", 0.25), "added": unary("add.Tensor", 0.5)},
        {"x": COLS},
        [COLS],
    ),
    LawCase(
        "pointwise-add",
        TP3,
        binary("add.Tensor"),
        {"same": binary("add.Tensor"), "commuted": binary("add.Tensor", True)},
        {"subtracted": binary("sub.Tensor"), "weighted": binary("add.Tensor", alpha=2)},
        {"x": COLS, "y": COLS},
        [COLS],
    ),
    LawCase(
        "pointwise-sub",
        TP3,
        binary("sub.Tensor"),
        {"same": binary("sub.Tensor")},
        {"swapped": binary("sub.Tensor", True)},
        {"x": COLS, "y": COLS},
        [COLS],
    ),
    LawCase(
        "pointwise-div",
        TP3,
        binary("div.Tensor"),
        {"same": binary("div.Tensor")},
        {"swapped": binary("div.Tensor", True)},
        {"x": COLS, "y": COLS},
        [COLS],
    ),
    LawCase(
        "pointwise-bias",
        TP3,
        bias(),
        {"slice of the rank": bias()},
        {"first slice on every rank": bias(True)},
        {"x": COLS, "b": "k ~ k"},
        [COLS],
    ),
    LawCase(
        "pointwise-where",
        TP3,
        where(False),
        {"same": where(False)},
        {"branches swapped": where(True)},
        {"x": COLS, "y": COLS, "m": COLS},
        [COLS],
    ),
    LawCase(
        "pointwise-masked-fill",
        TP3,
        fill(False),
        {"same": fill(False)},
        {"mask inverted": fill(True), "other value": fill(False, 0.0)},
        {"x": COLS, "m": COLS},
        [COLS],
    ),
    LawCase(
        "same-operand-twice",
        TP3,
        binary("mul.Tensor"),
        {"same": binary("mul.Tensor")},
        {"first one twice": lambda g: g.aten("mul.Tensor", *[xy(g)[0]] * 2)},
        {"x": COLS, "y": COLS},
        [COLS],
    ),
]


# ---- contractions -----------------------------------------------------------------------------------------------


def linear(g: GraphBuilder, x: Ref, w: Ref, b: Ref | None = None) -> Ref:
    wt = g.aten("t", w)
    return g.aten("mm", x, wt) if b is None else g.aten("addmm", b, x, wt)


def column(g: GraphBuilder) -> Ref:
    """x [5, 7], w [4 * tp, 7], b [4 * tp]."""
    n = 4 * g_parts(g)
    return linear(g, g.input("x", [5, 7]), g.input("w", [n, 7]), g.input("b", [n]))


def column_of_first(g: GraphBuilder) -> Ref:
    """Gathers the weight and takes the first block of its rows on every rank."""
    w = g.aten("slice.Tensor", g.all_gather(g.input("w", [4, 7]), "tp"), 0, 0, 4)
    return linear(g, g.input("x", [5, 7]), w, g.input("b", [4]))


def column_gathered(dim: int) -> Program:
    return lambda g: g.all_gather(column(g), "tp", dim)


def row(how: str = "sum", twice: bool = False, reverse: bool = False) -> Program:
    """x [5, 4 * tp], w [7, 4 * tp], then an all-reduce."""

    def program(g: GraphBuilder) -> Ref:
        k = 4 * g_parts(g)
        x, w = g.input("x", [5, k]), g.input("w", [7, k])
        if reverse:
            w = g.aten("flip", w, [1])
        y = linear(g, x, w)
        for _ in range(2 if twice else 1):
            y = y if how == "none" else g.all_reduce(y, "tp", how)
        return y

    return program


def mlp(g: GraphBuilder) -> Ref:
    """Column-parallel, gelu, row-parallel: x [5, 7], hidden 4 * tp, out 8."""
    n = 4 * g_parts(g)
    h = g.aten("gelu", linear(g, g.input("x", [5, 7]), g.input("w", [n, 7])))
    return g.all_reduce(linear(g, h, g.input("v", [8, n])), "tp")


def mlp_reduced_early(g: GraphBuilder) -> Ref:
    n = 4 * g_parts(g)
    h = g.all_reduce(linear(g, g.input("x", [5, 7]), g.input("w", [n, 7])), "tp")
    return g.all_reduce(linear(g, g.aten("gelu", h), g.input("v", [8, n])), "tp")


def square(transposed: bool, sharded: bool = True) -> Program:
    """x [5, 6] times a square weight [6, 6]."""

    def program(g: GraphBuilder) -> Ref:
        x, w = g.input("x", [5, 6]), g.input("w", [6, 6])
        return g.aten("mm", x, g.aten("t", w) if transposed else w)

    return program


def with_own_transpose(op: str, transposed: bool) -> Program:
    def program(g: GraphBuilder) -> Ref:
        x = g.input("x", [6, 6])
        return g.aten(op, x, g.aten("t", x) if transposed else x)

    return program


def batched(g: GraphBuilder) -> Ref:
    """x [2 * tp, 5, 7] times y [2 * tp, 7, 4]: heads sharded."""
    h = 2 * g_parts(g)
    return g.aten("bmm", g.input("x", [h, 5, 7]), g.input("y", [h, 7, 4]))


def both_sharded(right: bool) -> Program:
    """Rows of x and columns of w on the same mesh axis: the ranks hold diagonal blocks only."""

    def program(g: GraphBuilder) -> Ref:
        p = g_parts(g)
        x, w = g.input("x", [2 * p, 7]), g.input("w", [7, 4 * p])
        if right:
            w = g.all_gather(w, "tp", 1)
            return g.all_gather(g.aten("mm", x, w), "tp")
        return g.all_gather(g.all_gather(g.aten("mm", x, w), "tp"), "tp", 1)

    return program


CONTRACTION = [
    LawCase(
        "column-parallel",
        TP3,
        column,
        {"sharded": column},
        {"first shard of the weight on every rank": column_of_first},
        {"x": "s k ~ s k", "w": "(tp n) k ~ n k", "b": "(tp n) ~ n"},
        ["s (tp n) ~ s n"],
    ),
    LawCase(
        "column-parallel-gathered",
        TP3,
        column,
        {"gathered on columns": column_gathered(1)},
        {"gathered on rows": lambda g: g.aten("view", column_gathered(0)(g), [5, 12])},
        {"x": "s k ~ s k", "w": "(tp n) k ~ n k", "b": "(tp n) ~ n"},
        ["s n ~ s n"],
    ),
    LawCase(
        "row-parallel",
        TP3,
        row(),
        {"all-reduced": row()},
        {
            "not reduced": row("none"),
            "maximum": row("max"),
            "average": row("avg"),
            "twice": row(twice=True),
            "weight reversed": row(reverse=True),
        },
        {"x": COLS, "w": "n (tp k) ~ n k"},
        ["s n ~ s n"],
    ),
    LawCase(
        "column-then-row",
        TP3,
        mlp,
        {"megatron": mlp},
        {"reduced before the activation": mlp_reduced_early},
        {"x": "s k ~ s k", "w": "(tp n) k ~ n k", "v": "m (tp n) ~ m n"},
        ["s m ~ s m"],
    ),
    LawCase(
        "square-weight",
        TP2,
        square(True),
        {"same": square(True)},
        {"not transposed": square(False)},
        {"x": "s k ~ s k", "w": "n k ~ n k"},
        ["s n ~ s n"],
    ),
    LawCase(
        "own-transpose-added",
        TP2,
        with_own_transpose("add.Tensor", True),
        {"same": with_own_transpose("add.Tensor", True)},
        {"not transposed": with_own_transpose("add.Tensor", False)},
        {"x": "a b ~ a b"},
        ["a b ~ a b"],
    ),
    LawCase(
        "own-transpose-multiplied",
        TP2,
        with_own_transpose("mm", True),
        {"same": with_own_transpose("mm", True)},
        {"not transposed": with_own_transpose("mm", False)},
        {"x": "a b ~ a b"},
        ["a b ~ a b"],
    ),
    LawCase(
        "batched",
        TP3,
        batched,
        {"heads sharded": batched},
        {"reduced": lambda g: g.all_reduce(batched(g), "tp")},
        {"x": "(tp h) s k ~ h s k", "y": "(tp h) k d ~ h k d"},
        ["(tp h) s d ~ h s d"],
    ),
    LawCase(
        "one-mesh-axis-for-two",
        TP3,
        both_sharded(True),
        {"weight gathered": both_sharded(True)},
        {"diagonal blocks": both_sharded(False)},
        {"x": "(tp s) k ~ s k", "w": "k (tp n) ~ k n"},
        ["s n ~ s n"],
    ),
]


# ---- reductions -------------------------------------------------------------------------------------------------


def reduced(op: str, collective: str | None, *, scale: float | None = None, dims: Any = 1) -> Program:
    """Reduction of x [5, 4 * tp] along the sharded axis, a collective, a factor (in implementations only)."""

    def program(g: GraphBuilder) -> Ref:
        x = g.input("x", [5, 4 * g_parts(g)])
        y = g.aten(op, x, [dims] if op != "prod.dim_int" else dims)
        if collective is not None:
            y = g.all_reduce(y, "tp", collective)
        return y if scale is None or not g.mesh else g.aten("mul.Tensor", y, scale)

    return program


def divided(op: str, collective: str, by: float, first: bool) -> Program:
    def program(g: GraphBuilder) -> Ref:
        y = g.aten(op, g.input("x", [5, 4 * g_parts(g)]), [1])
        if not g.mesh:
            return y
        if first:
            return g.all_reduce(g.aten("div.Tensor", y, by), "tp", collective)
        return g.aten("div.Tensor", g.all_reduce(y, "tp", collective), by)

    return program


SUM, MEAN, MAX, MIN = "sum.dim_IntList", "mean.dim", "amax", "amin"
REDUCTION = [
    LawCase(
        "sum-over-sharded",
        TP3,
        reduced(SUM, None),
        {"reduced": reduced(SUM, "sum")},
        {
            "not reduced": reduced(SUM, None),
            "averaged": reduced(SUM, "avg"),
            "scaled": reduced(SUM, "sum", scale=1 / 3),
        },
        {"x": COLS},
        ["s ~ s"],
    ),
    LawCase(
        "mean-over-sharded",
        TP3,
        reduced(MEAN, None),
        {
            "averaged": reduced(MEAN, "avg"),
            "divided after": divided(MEAN, "sum", 3.0, False),
            "divided before": divided(MEAN, "sum", 3.0, True),
        },
        {
            "local mean": reduced(MEAN, None),
            "summed": reduced(MEAN, "sum"),
            "divided by 2": divided(MEAN, "sum", 2.0, False),
            "average divided": divided(MEAN, "avg", 3.0, False),
        },
        {"x": COLS},
        ["s ~ s"],
    ),
    LawCase(
        "max-over-sharded",
        TP3,
        reduced(MAX, None),
        {"reduced": reduced(MAX, "max")},
        {
            "summed": reduced(MAX, "sum"),
            "minimum": reduced(MAX, "min"),
            "local": reduced(MAX, None),
            "minimum of minima": reduced(MIN, "min"),
        },
        {"x": COLS},
        ["s ~ s"],
    ),
    LawCase(
        "min-over-sharded",
        TP3,
        reduced(MIN, None),
        {"reduced": reduced(MIN, "min")},
        {"maximum": reduced(MIN, "max")},
        {"x": COLS},
        ["s ~ s"],
    ),
    LawCase(
        "prod-over-sharded",
        TP3,
        reduced("prod.dim_int", None),
        {"reduced": reduced("prod.dim_int", "product")},
        {"summed": reduced("prod.dim_int", "sum")},
        {"x": COLS},
        ["s ~ s"],
    ),
    LawCase(
        "sum-over-local",
        TP3,
        reduced(SUM, None, dims=0),
        {"sharded": reduced(SUM, None, dims=0)},
        {"reduced": reduced(SUM, "sum", dims=0)},
        {"x": COLS},
        ["(tp k) ~ k"],
    ),
    LawCase(
        "mean-over-local",
        TP3,
        reduced(MEAN, None, dims=0),
        {"sharded": reduced(MEAN, None, dims=0)},
        {"averaged": reduced(MEAN, "avg", dims=0)},
        {"x": COLS},
        ["(tp k) ~ k"],
    ),
    LawCase(
        "sum-axis",
        TP2,
        lambda g: g.aten(SUM, g.input("x", [6, 6]), [0]),
        {"same": lambda g: g.aten(SUM, g.input("x", [6, 6]), [0])},
        {"other axis": lambda g: g.aten(SUM, g.input("x", [6, 6]), [1])},
        {"x": "a b ~ a b"},
        ["a ~ a"],
    ),
]


# ---- softmax and norms ------------------------------------------------------------------------------------------


def softmax_parts(reduce_max: bool = True, reduce_sum: bool = True) -> Program:
    """Softmax written out over the sharded last axis of x [5, 4 * tp]."""

    def program(g: GraphBuilder) -> Ref:
        x = g.input("x", [5, 4 * g_parts(g)])
        top = g.aten("amax", x, [1], True)
        top = g.all_reduce(top, "tp", "max") if reduce_max else top
        e = g.aten("exp", g.aten("sub.Tensor", x, top))
        total = g.aten(SUM, e, [1], True)
        return g.aten("div.Tensor", e, g.all_reduce(total, "tp") if reduce_sum else total)

    return program


def fused_softmax(g: GraphBuilder) -> Ref:
    return g.aten("_softmax", g.input("x", [5, 4 * g_parts(g)]), 1, False)


def normed(
    op: str, local: list[int], whole: list[int], *, eps: float = 1e-5, gather: int | None = None, swap: bool = False
) -> Program:
    """Norm over the last axis of x, with weight and bias."""

    def program(g: GraphBuilder) -> Ref:
        x = g.input("x", local if g.mesh else whole)
        if gather is not None:
            x = g.all_gather(x, "tp", gather)
        hidden = g.shape(x)[-1]
        w, b = g.input("w", [hidden]), g.input("b", [hidden])
        if op == "rms":
            y = g.aten("rms_norm", x, [hidden], b if swap else w, eps)
            return g.aten("add.Tensor", y, w if swap else b)
        return g.aten("native_layer_norm", x, [hidden], *((b, w) if swap else (w, b)), eps)[0]

    return program


TOKENS: dict[str, Any] = {"x": "(tp s) h ~ s h", "w": "h ~ h", "b": "h ~ h"}
HIDDEN: dict[str, Any] = {"x": "s (tp h) ~ s h", "w": "(tp h) ~ h", "b": "(tp h) ~ h"}
GATHERED: dict[str, Any] = {"x": "s (tp h) ~ s h", "w": "h ~ h", "b": "h ~ h"}
NORM = [
    LawCase(
        "softmax-local-axis",
        TP3,
        lambda g: g.aten("_softmax", g.input("x", [5, 4 * g_parts(g)]), 0, False),
        {"other axis sharded": lambda g: g.aten("_softmax", g.input("x", [5, 4]), 0, False)},
        {"other axis": fused_softmax},
        {"x": COLS},
        [COLS],
    ),
    LawCase(
        "softmax-sharded-axis",
        TP3,
        fused_softmax,
        {
            "gathered": lambda g: g.aten(
                "slice.Tensor",
                g.aten("_softmax", g.all_gather(g.input("x", [5, 4]), "tp", 1), 1, False),
                1,
                4 * g.rank,
                4 * g.rank + 4,
            ),
            "written out": softmax_parts(),
        },
        {"local": fused_softmax},
        {"x": COLS},
        [COLS],
    ),
    LawCase(
        "softmax-written-out",
        TP3,
        softmax_parts(),
        {"reduced": softmax_parts()},
        {"sum not reduced": softmax_parts(reduce_sum=False), "maximum not reduced": softmax_parts(reduce_max=False)},
        {"x": COLS},
        [COLS],
    ),
    LawCase(
        "layer-norm-tokens",
        TP3,
        normed("layer", [5, 8], [15, 8]),
        {"sharded tokens": normed("layer", [5, 8], [15, 8])},
        {
            "other eps": normed("layer", [5, 8], [15, 8], eps=1e-2),
            "weight and bias swapped": normed("layer", [5, 8], [15, 8], swap=True),
        },
        TOKENS,
        ["(tp s) h ~ s h"],
    ),
    LawCase(
        "rms-norm-tokens",
        TP3,
        normed("rms", [5, 8], [15, 8]),
        {"sharded tokens": normed("rms", [5, 8], [15, 8])},
        {
            "other eps": normed("rms", [5, 8], [15, 8], eps=1e-2),
            "weight and bias swapped": normed("rms", [5, 8], [15, 8], swap=True),
        },
        TOKENS,
        ["(tp s) h ~ s h"],
    ),
    LawCase(
        "layer-norm-hidden",
        TP3,
        normed("layer", [5, 3], [5, 9]),
        {"gathered": Twin(normed("layer", [5, 3], [5, 9], gather=1), given=GATHERED, outputs=["s h ~ s h"])},
        {"sharded hidden": normed("layer", [5, 3], [5, 9])},
        HIDDEN,
        ["s (tp h) ~ s h"],
    ),
    LawCase(
        "rms-norm-hidden",
        TP3,
        normed("rms", [5, 3], [5, 9]),
        {"gathered": Twin(normed("rms", [5, 3], [5, 9], gather=1), given=GATHERED, outputs=["s h ~ s h"])},
        {"sharded hidden": normed("rms", [5, 3], [5, 9])},
        HIDDEN,
        ["s (tp h) ~ s h"],
    ),
]

CASES = [*POINTWISE, *CONTRACTION, *REDUCTION, *NORM]
