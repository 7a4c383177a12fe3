"""Partial sums and partial extrema: what they pass through, and what refuses them; factors of the number of ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from law_case import LawCase, Program
from support.build import FUNCOL, GraphBuilder, Ref

TP3, TP4 = {"tp": 3}, {"tp": 4}
Step = Callable[[GraphBuilder, Ref, Ref], Ref]
Unary = Callable[[GraphBuilder, Ref], Ref]
X, W = "s (tp k) ~ s k", "n (tp k) ~ n k"
PRODUCT = {"x": X, "w": W, "r": "s n ~ s n"}


def product(g: GraphBuilder, suffix: str = "") -> Ref:
    """A row-parallel product [5, 7]: a partial sum on every rank."""
    n = 1 if g.mesh else 3
    x, w = g.input(f"x{suffix}", [5, 4 * n]), g.input(f"w{suffix}", [7, 4 * n])
    return g.aten("mm", x, g.aten("t", w))


def through(step: Step, when: str) -> Program:
    """``step`` on the product, which is all-reduced before it, after it, or never."""

    def program(g: GraphBuilder) -> Ref:
        r, y = g.input("r", [5, 7]), product(g)
        y = step(g, g.all_reduce(y, "tp") if when == "before" else y, r)
        return g.all_reduce(y, "tp") if when == "after" else y

    return program


def passes(name: str, step: Step, outputs: str) -> LawCase:
    """Linear: the all-reduce may come after it, and may not be left out."""
    return LawCase(
        f"partial-through-{name}",
        TP3,
        through(step, "before"),
        {"reduced before": through(step, "before"), "reduced after": through(step, "after")},
        {"not reduced": through(step, "never")},
        PRODUCT,
        [outputs],
    )


def refuses(name: str, step: Step, outputs: str) -> LawCase:
    """Not linear: the all-reduce must come first."""
    return LawCase(
        f"partial-not-through-{name}",
        TP3,
        through(step, "before"),
        {"reduced before": through(step, "before")},
        {"reduced after": through(step, "after")},
        PRODUCT,
        [outputs],
    )


LINEAR: list[tuple[str, Step, str]] = [
    ("scalar", lambda g, x, r: g.aten("mul.Tensor", x, 2.5), "s n ~ s n"),
    ("division", lambda g, x, r: g.aten("div.Tensor", x, 4.0), "s n ~ s n"),
    ("negation", lambda g, x, r: g.aten("neg", x), "s n ~ s n"),
    ("product", lambda g, x, r: g.aten("mul.Tensor", x, r), "s n ~ s n"),
    ("product-left", lambda g, x, r: g.aten("mul.Tensor", r, x), "s n ~ s n"),
    ("numerator", lambda g, x, r: g.aten("div.Tensor", x, r), "s n ~ s n"),
    ("matmul", lambda g, x, r: g.aten("mm", g.aten("t", x), r), "s n ~ s n"),
    ("transpose", lambda g, x, r: g.aten("t", x), "s n ~ s n"),
    ("view", lambda g, x, r: g.aten("view", x, [35]), "s ~ s"),
    ("sum", lambda g, x, r: g.aten("sum.dim_IntList", x, [1]), "s ~ s"),
    ("mean", lambda g, x, r: g.aten("mean.dim", x, [1]), "s ~ s"),
    ("cumsum", lambda g, x, r: g.aten("cumsum", x, 1), "s n ~ s n"),
    ("slice", lambda g, x, r: g.aten("slice.Tensor", x, 1, 2, 5), "s n ~ s n"),
    ("zero-fill", lambda g, x, r: g.aten("masked_fill.Scalar", x, g.aten("gt.Scalar", r, 0.0), 0.0), "s n ~ s n"),
    ("expand", lambda g, x, r: g.aten("expand", g.aten("unsqueeze", x, 1), [5, 2, 7]), "s i n ~ s i n"),
]
REFUSED: list[tuple[str, Step, str]] = [
    ("relu", lambda g, x, r: g.aten("relu", x), "s n ~ s n"),
    ("gelu", lambda g, x, r: g.aten("gelu", x), "s n ~ s n"),
    ("exp", lambda g, x, r: g.aten("exp", x), "s n ~ s n"),
    ("abs", lambda g, x, r: g.aten("abs", x), "s n ~ s n"),
    ("square", lambda g, x, r: g.aten("pow.Tensor_Scalar", x, 2), "s n ~ s n"),
    ("own-product", lambda g, x, r: g.aten("mul.Tensor", x, x), "s n ~ s n"),
    ("own-matmul", lambda g, x, r: g.aten("mm", g.aten("t", x), x), "s n ~ s n"),
    ("bias", lambda g, x, r: g.aten("add.Tensor", x, r), "s n ~ s n"),
    ("bias-left", lambda g, x, r: g.aten("add.Tensor", r, x), "s n ~ s n"),
    ("subtraction", lambda g, x, r: g.aten("sub.Tensor", x, r), "s n ~ s n"),
    ("constant", lambda g, x, r: g.aten("add.Tensor", x, 0.5), "s n ~ s n"),
    ("denominator", lambda g, x, r: g.aten("div.Tensor", r, x), "s n ~ s n"),
    ("reciprocal", lambda g, x, r: g.aten("reciprocal", x), "s n ~ s n"),
    ("softmax", lambda g, x, r: g.aten("_softmax", x, 1, False), "s n ~ s n"),
    ("layer-norm", lambda g, x, r: g.aten("native_layer_norm", x, [7], None, None, 1e-5)[0], "s n ~ s n"),
    ("maximum", lambda g, x, r: g.aten("amax", x, [1]), "s ~ s"),
    ("clamp", lambda g, x, r: g.aten("clamp", x, 0.0), "s n ~ s n"),
    ("fill", lambda g, x, r: g.aten("masked_fill.Scalar", x, g.aten("gt.Scalar", r, 0.0), 1.5), "s n ~ s n"),
    ("prod", lambda g, x, r: g.aten("prod.dim_int", x, 1), "s ~ s"),
    ("where", lambda g, x, r: g.aten("where.self", g.aten("gt.Scalar", r, 0.0), x, r), "s n ~ s n"),
    ("cat", lambda g, x, r: g.aten("cat", [x, r], 1), "s n ~ s n"),
    ("comparison", lambda g, x, r: g.aten("mul.Tensor", r, g.aten("gt.Scalar", x, 0.0)), "s n ~ s n"),
]


# ---- two partial sums -------------------------------------------------------------------------------------------


def two(op: str, when: str) -> Program:
    """Two row-parallel products combined; ``when``: both reduced first, one of them only, or the result."""

    def program(g: GraphBuilder) -> Ref:
        a, b = product(g, "1"), product(g, "2")
        if when in ("first", "left"):
            a = g.all_reduce(a, "tp")
        if when == "first":
            b = g.all_reduce(b, "tp")
        args: Any = [[a, b], 1] if op == "cat" else [a, b]
        y = g.aten(op, *args)
        return y if when == "first" else g.all_reduce(y, "tp")

    return program


def two_pairs(op: str, linear: bool) -> LawCase:
    right = {"both reduced first": two(op, "first")} | ({"reduced once": two(op, "last")} if linear else {})
    wrong = {"one reduced twice": two(op, "left")} if linear else {"reduced once": two(op, "last")}
    given = {"x1": X, "w1": W, "x2": X, "w2": W}
    return LawCase(f"two-partials-{op.partition('.')[0]}", TP3, two(op, "first"), right, wrong, given, ["s n ~ s n"])


# ---- partial extrema --------------------------------------------------------------------------------------------


def top(step: Unary, when: str, op: str = "amax", how: str = "max") -> Program:
    """Row maxima [5], of either sign, over the sharded axis of x [5, 3 * 4]; ``step`` before or after the reduction."""

    def program(g: GraphBuilder) -> Ref:
        x = g.aten(op, g.aten("sub.Tensor", g.input("x", [5, 4 if g.mesh else 12]), 1.5), [1])
        return step(g, g.all_reduce(x, "tp", how)) if when == "after" else g.all_reduce(step(g, x), "tp", how)

    return program


def extremum(
    name: str, step: Unary, passes_through: bool, op: str = "amax", how: str = "max", unproved: str | None = None
) -> LawCase:
    before = {"reduced last": top(step, "before", op, how)}
    right: dict[str, Program] = {"reduced first": top(step, "after", op, how)}
    wrong: dict[str, Program] = {"not reduced": lambda g: step(g, g.aten(op, g.input("x", [5, 4]), [1]))}
    if passes_through:
        right |= before
    else:
        wrong |= before
    return LawCase(
        f"extremum-{how}-{name}",
        TP3,
        top(step, "after", op, how),
        right,
        wrong,
        {"x": X},
        ["s ~ s"],
        unproved={} if unproved is None else {"reduced last": unproved},
    )


EXTREMA = [
    extremum("exp", lambda g, x: g.aten("exp", x), True),
    extremum("tanh", lambda g, x: g.aten("tanh", x), True),
    extremum("relu", lambda g, x: g.aten("relu", x), True),
    extremum("relu-of-minimum", lambda g, x: g.aten("relu", x), True, "amin", "min"),
    extremum(
        "shift",
        lambda g, x: g.aten("add.Tensor", x, 0.5),
        True,
    ),
    extremum(
        "positive-factor",
        lambda g, x: g.aten("mul.Tensor", x, 2.0),
        True,
        unproved="a positive factor is not among the monotone bodies",
    ),
    extremum("negative-factor", lambda g, x: g.aten("mul.Tensor", x, -2.0), False),
    extremum("negation", lambda g, x: g.aten("neg", x), False),
    extremum("absolute", lambda g, x: g.aten("abs", x), False),
    extremum("square", lambda g, x: g.aten("pow.Tensor_Scalar", x, 2), False),
    extremum("gelu", lambda g, x: g.aten("gelu", x), False),
    extremum("own-product", lambda g, x: g.aten("mul.Tensor", x, x), False),
    extremum("own-difference", lambda g, x: g.aten("sub.Tensor", g.aten("exp", x), x), False),
    extremum("cosine", lambda g, x: g.aten("cos", x), False),
]


# ---- factors ----------------------------------------------------------------------------------------------------


def copies(*steps: tuple[str, Any]) -> Program:
    """A replicated tensor through all-reduces and factors (in implementations only)."""

    def program(g: GraphBuilder) -> Ref:
        y = g.aten("gelu", g.input("x", [5, 7]))
        for what, value in steps if g.mesh else ():
            if what == "reduce":
                y = g.all_reduce(y, "tp", value)
            else:
                y = g.aten(what, y, value)
        return y

    return program


def weighted(weights: list[float]) -> Program:
    """Every rank multiplies by its own weight, then all are added."""

    def program(g: GraphBuilder) -> Ref:
        y = g.aten("gelu", g.input("x", [5, 7]))
        return g.all_reduce(g.aten("mul.Tensor", y, weights[g.rank]), "tp") if g.mesh else y

    return program


def residual(how: str) -> Program:
    """Product + residual: the residual is added after, or before with a quarter, or on rank 0 with weight 1."""

    def program(g: GraphBuilder) -> Ref:
        n = 1 if g.mesh else 4
        x, w, r = g.input("x", [5, 3 * n]), g.input("w", [7, 3 * n]), g.input("r", [5, 7])
        y = g.aten("mm", x, g.aten("t", w))
        if how == "after" or not g.mesh:
            return g.aten("add.Tensor", g.all_reduce(y, "tp"), r)
        factor = {"quarter": 0.25, "half": 0.5, "rank 0": float(g.rank == 0), "ranks 0 and 1": float(g.rank < 2)}[how]
        return g.all_reduce(g.aten("add.Tensor", y, g.aten("mul.Tensor", r, factor)), "tp")

    return program


FACTORS = [
    LawCase(
        "all-reduce-of-copies",
        TP4,
        copies(),
        {
            "averaged": copies(("reduce", "avg")),
            "divided after": copies(("reduce", "sum"), ("div.Tensor", 4.0)),
            "divided before": copies(("div.Tensor", 4.0), ("reduce", "sum")),
            "maximum": copies(("reduce", "max")),
            "minimum": copies(("reduce", "min")),
            "twice": copies(("reduce", "sum"), ("reduce", "sum"), ("mul.Tensor", 0.0625)),
        },
        {
            "summed": copies(("reduce", "sum")),
            "divided by 2": copies(("reduce", "sum"), ("div.Tensor", 2.0)),
            "averaged and divided": copies(("reduce", "avg"), ("div.Tensor", 4.0)),
            "product": copies(("reduce", "product")),
            "twice, divided once": copies(("reduce", "sum"), ("reduce", "sum"), ("mul.Tensor", 0.25)),
        },
        {"x": "s n ~ s n"},
        ["s n ~ s n"],
        unproved={"twice": "16 is not among the scales that 4 ranks make interesting"},
    ),
    LawCase(
        "factor-not-through-gelu",
        TP4,
        copies(),
        {"same": copies(("reduce", "avg"))},
        {"inside": lambda g: g.aten("mul.Tensor", g.aten("gelu", g.all_reduce(g.input("x", [5, 7]), "tp")), 0.25)},
        {"x": "s n ~ s n"},
        ["s n ~ s n"],
    ),
    LawCase(
        "rank-weights",
        TP4,
        weighted([1.0]),
        {"one rank": weighted([0.0, 0.0, 1.0, 0.0]), "convex": weighted([0.5, 0.125, 0.125, 0.25])},
        {"all": weighted([1.0] * 4), "sum is 2": weighted([0.5] * 4)},
        {"x": "s n ~ s n"},
        ["s n ~ s n"],
    ),
    LawCase(
        "residual-into-partial",
        TP4,
        residual("after"),
        {"after": residual("after"), "a quarter on every rank": residual("quarter"), "rank 0 only": residual("rank 0")},
        {"half on every rank": residual("half"), "two ranks": residual("ranks 0 and 1")},
        {"x": X, "w": W, "r": "s n ~ s n"},
        ["s n ~ s n"],
    ),
]


def unused_reduce(g: GraphBuilder) -> Ref:
    """The all-reduce runs, its result is dropped."""
    y = product(g)
    if g.mesh:
        g.wait(g.op(f"{FUNCOL}.all_reduce.default", y, "sum", "tp"))
    return g.aten("gelu", y)


DROPPED = [
    LawCase(
        "dropped-all-reduce",
        TP3,
        unused_reduce,
        {"used": lambda g: g.aten("gelu", g.all_reduce(product(g), "tp"))},
        {"dropped": unused_reduce},
        {"x": X, "w": W},
        ["s n ~ s n"],
    ),
]

CASES = [
    *(passes(*entry) for entry in LINEAR),
    *(refuses(*entry) for entry in REFUSED),
    *(two_pairs(op, True) for op in ("add.Tensor", "sub.Tensor", "cat")),
    *(two_pairs(op, False) for op in ("mul.Tensor", "div.Tensor", "maximum")),
    *EXTREMA,
    *FACTORS,
    *DROPPED,
]
