"""What differs between ranks: an attribute of one rank, structure, mutation, and traps found by reading the laws."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from law_case import LawCase, Program, Twin
from support.build import FUNCOL, DType, GraphBuilder, Ref

TP2, TP3, GRID = {"tp": 2}, {"tp": 3}, {"dp": 2, "tp": 3}
Step = Callable[[GraphBuilder, Ref, Any], Ref]
SAME = "a b ~ a b"


def odd(g: GraphBuilder, normal: Any, other: Any) -> Any:
    """``other`` on rank 1, ``normal`` on every other rank and in the reference."""
    return other if g.mesh and g.rank == 1 else normal


def attribute(
    name: str, step: Step, normal: Any, other: Any, out: str = SAME, shape: tuple[int, int] = (6, 6)
) -> LawCase:
    """Rank 1 uses another attribute."""

    def program(value: Callable[[GraphBuilder], Any]) -> Program:
        return lambda g: step(g, g.aten("sin", g.input("x", list(shape))), value(g))

    return LawCase(
        f"rank-attribute-{name}",
        TP2,
        program(lambda g: normal),
        {"same everywhere": program(lambda g: normal)},
        {"rank 1 differs": program(lambda g: odd(g, normal, other))},
        {"x": SAME},
        [out],
    )


ATTRIBUTES = [
    attribute("constant", lambda g, x, v: g.aten("add.Tensor", x, v), 0.5, 0.75),
    attribute("factor", lambda g, x, v: g.aten("mul.Tensor", x, v), 0.5, 0.75),
    attribute("divisor", lambda g, x, v: g.aten("div.Tensor", x, v), 2.0, 4.0),
    attribute("alpha", lambda g, x, v: g.aten("add.Tensor", x, x, alpha=v), 2, 3),
    attribute("exponent", lambda g, x, v: g.aten("pow.Tensor_Scalar", x, v), 2, 3),
    attribute("bound", lambda g, x, v: g.aten("clamp", x, v, 0.9), -0.5, 0.25),
    attribute(
        "comparison", lambda g, x, v: g.aten("where.self", g.aten("gt.Scalar", x, v), x, g.aten("neg", x)), 0.0, 0.5
    ),
    attribute("fill", lambda g, x, v: g.aten("masked_fill.Scalar", x, g.aten("gt.Scalar", x, 0.0), v), 1.5, 2.5),
    attribute("approximation", lambda g, x, v: g.aten("gelu", x, approximate=v), "none", "tanh"),
    attribute("softmax-dim", lambda g, x, v: g.aten("_softmax", x, v, False), 0, 1),
    attribute("cumsum-dim", lambda g, x, v: g.aten("cumsum", x, v), 0, 1),
    attribute("sum-dim", lambda g, x, v: g.aten("sum.dim_IntList", x, [v]), 0, 1, "a ~ a"),
    attribute("max-dim", lambda g, x, v: g.aten("amax", x, [v]), 0, 1, "a ~ a"),
    attribute("argmax-dim", lambda g, x, v: g.aten("argmax", x, v), 0, 1, "a ~ a"),
    attribute("permute", lambda g, x, v: g.aten("permute", x, v), [1, 0], [0, 1]),
    attribute("transpose", lambda g, x, v: g.aten("transpose.int", x, 0, v), 1, 0),
    attribute(
        "view",
        lambda g, x, v: g.aten("view", g.aten("transpose.int", g.aten("view", x, v), 0, 1), [36]),
        [4, 9],
        [9, 4],
        "a ~ a",
    ),
    attribute("flip", lambda g, x, v: g.aten("flip", x, v), [0], [1]),
    attribute("roll", lambda g, x, v: g.aten("roll", x, v, [0]), [1], [2]),
    attribute("diagonal", lambda g, x, v: g.aten("tril", x, v), 0, 1),
    attribute("slice-start", lambda g, x, v: g.aten("slice.Tensor", x, 0, v, v + 2), 2, 3),
    attribute("slice-dim", lambda g, x, v: g.aten("view", g.aten("slice.Tensor", x, v, 0, 3), [18]), 0, 1, "a ~ a"),
    attribute("select", lambda g, x, v: g.aten("select.int", x, 0, v), 2, 3, "a ~ a"),
    attribute("narrow", lambda g, x, v: g.aten("narrow", x, 0, v, 2), 2, 3),
    attribute("cat-dim", lambda g, x, v: g.aten("view", g.aten("cat", [x, g.aten("neg", x)], v), [72]), 0, 1, "a ~ a"),
    attribute(
        "stack-dim", lambda g, x, v: g.aten("view", g.aten("stack", [x, g.aten("neg", x)], v), [72]), 0, 1, "a ~ a"
    ),
    attribute("split-sizes", lambda g, x, v: g.aten("cat", [*g.aten("split_with_sizes", x, v)][::-1]), [2, 4], [4, 2]),
    attribute("pad", lambda g, x, v: g.aten("constant_pad_nd", x, v), [1, 2], [2, 1]),
    attribute("repeat", lambda g, x, v: g.aten("view", g.aten("repeat", x, v), [72]), [2, 1], [1, 2], "a ~ a"),
    attribute("norm-eps", lambda g, x, v: g.aten("native_layer_norm", x, [6], None, None, v)[0], 1e-2, 1e-1),
    attribute("rms-eps", lambda g, x, v: g.aten("rms_norm", x, [6], None, v), 1e-2, 1e-1),
    attribute("dropout", lambda g, x, v: g.aten("native_dropout", x, v, True)[0], 0.1, 0.2),
    attribute("topk-order", lambda g, x, v: g.aten("topk", x, 3, 1, v)[0], True, False),
    attribute("sort-order", lambda g, x, v: g.aten("sort", x, 1, v)[0], True, False),
    attribute("attention-scale", lambda g, x, v: _attention(g, x, scale=v), 0.5, 0.25),
    attribute("attention-causal", lambda g, x, v: _attention(g, x, is_causal=v), False, True),
    attribute(
        "full", lambda g, x, v: g.aten("mul.Tensor", x, g.aten("full", [6], v, dtype=DType("float32"))), 1.5, 2.5
    ),
    attribute("arange", lambda g, x, v: g.aten("mul.Tensor", x, g.aten("arange.start_step", v, v + 6, 1)), 0, 2),
    attribute("one-step", lambda g, x, v: g.aten("mul.Tensor", x, g.aten("arange.start_step", 0, 6 * v, v)), 1, 2),
    attribute("cast", lambda g, x, v: g.aten("mul.Tensor", x, g.aten("floor" if v else "ceil", x)), True, False),
    attribute("variance-correction", lambda g, x, v: g.aten("var.correction", x, [1], correction=v), 1, 0, "a ~ a"),
    attribute(
        "einsum", lambda g, x, v: g.aten("einsum", v, [x, x], result=("float32", [6, 6])), "ij,jk->ik", "ij,kj->ik"
    ),
]


def _attention(g: GraphBuilder, x: Ref, **more: Any) -> Ref:
    heads = g.aten("view", x, [1, 1, 6, 6])
    return g.aten("view", g.aten("scaled_dot_product_attention", heads, heads, g.aten("neg", heads), **more), [6, 6])


# ---- structure that differs between ranks -----------------------------------------------------------------------


def one_rank_bias(ranks: set[int]) -> Program:
    """Row-parallel product with a bias on some ranks, all-reduced."""

    def program(g: GraphBuilder) -> Ref:
        n = 1 if g.mesh else 3
        x, w, b = g.input("x", [5, 4 * n]), g.input("w", [7, 4 * n]), g.input("b", [7])
        y = g.aten("mm", x, g.aten("t", w))
        return g.all_reduce(g.aten("add.Tensor", y, b) if not g.mesh or g.rank in ranks else y, "tp")

    return program


def skips_activation(rank: int | None) -> Program:
    def program(g: GraphBuilder) -> Ref:
        y = g.aten("sin", g.input("x", [4, 5 if g.mesh else 15]))
        return y if g.mesh and g.rank == rank else g.aten("gelu", y)

    return program


def own_chunk(pick: str) -> Program:
    """Rank r keeps output r of a split."""

    def program(g: GraphBuilder) -> Ref:
        y = g.aten("sin", g.input("x", [4, 15]))
        return (
            g.aten("gelu", g.aten("split.Tensor", y, 5, 1)[{"own": g.rank, "first": 0}[pick]])
            if g.mesh
            else g.aten("gelu", y)
        )

    return program


STRUCTURE = [
    LawCase(
        "bias-on-one-rank",
        TP3,
        one_rank_bias({0}),
        {"rank 0": one_rank_bias({0}), "rank 2": one_rank_bias({2})},
        {"two ranks": one_rank_bias({0, 2}), "no rank": one_rank_bias(set()), "all ranks": one_rank_bias({0, 1, 2})},
        {"x": "s (tp k) ~ s k", "w": "n (tp k) ~ n k", "b": "n ~ n"},
        ["s n ~ s n"],
    ),
    LawCase(
        "operator-missing-on-one-rank",
        TP3,
        skips_activation(None),
        {"on all": skips_activation(None)},
        {"not on rank 0": skips_activation(0), "not on rank 2": skips_activation(2)},
        {"x": "s (tp k) ~ s k"},
        ["s (tp k) ~ s k"],
    ),
    LawCase(
        "own-chunk",
        TP3,
        own_chunk("own"),
        {"own": own_chunk("own")},
        {"first": own_chunk("first")},
        {"x": "s k ~ s k"},
        ["s (tp k) ~ s k"],
    ),
]


# ---- mutation ---------------------------------------------------------------------------------------------------


def in_place(op: str, use: str) -> Program:
    """``t.op_(r)`` on an intermediate; ``use``: what is returned."""

    def program(g: GraphBuilder) -> Ref:
        x, r = g.input("x", [4, 5]), g.input("r", [4, 5])
        t = g.aten("sin", x)
        if not g.mesh:
            return g.aten("cos", g.aten(op.replace("_.", "."), t, r))
        written = g.aten(op, t, r)
        return g.aten("cos", {"result": written, "buffer": t}[use])

    return program


def never_written(g: GraphBuilder) -> Ref:
    g.input("r", [4, 5])
    return g.aten("cos", g.aten("sin", g.input("x", [4, 5])))


def through_view(mutate: bool) -> Program:
    """A view of t is overwritten, t is returned."""

    def program(g: GraphBuilder) -> Ref:
        x, r = g.input("x", [4, 5]), g.input("r", [4, 5])
        t = g.aten("sin", x)
        if mutate:
            g.aten("mul_.Tensor", g.aten("view", t, [20]), g.aten("view", r, [20]))
        return g.aten("cos", t)

    return program


def reduced_in_place(use: str) -> Program:
    def program(g: GraphBuilder) -> Ref:
        n = 1 if g.mesh else 2
        y = g.aten("mm", g.input("x", [5, 4 * n]), g.aten("t", g.input("w", [7, 4 * n])))
        if g.mesh:
            done = g.wait(g.op(f"{FUNCOL}.all_reduce_.default", y, "sum", "tp"))
            y = done if use == "result" else y
        return g.aten("cos", y)

    return program


def bias_in_place(ranks: set[int], use: str) -> Program:
    """``y.add_(b)`` on some ranks; the all-reduce reads the buffer or the result."""

    def program(g: GraphBuilder) -> Ref:
        n = 1 if g.mesh else 3
        x, w, b = g.input("x", [5, 4 * n]), g.input("w", [7, 4 * n]), g.input("b", [7])
        y = g.aten("mm", x, g.aten("t", w))
        if not g.mesh:
            return g.aten("add.Tensor", y, b)
        written = g.aten("add_.Tensor", y, b) if g.rank in ranks else y
        return g.all_reduce(y if use == "buffer" else written, "tp")

    return program


def scaled_in_place(ranks: set[int]) -> Program:
    """``t.mul_(r)`` on some ranks, then t is read."""

    def program(g: GraphBuilder) -> Ref:
        x, r = g.input("x", [4, 5]), g.input("r", [4, 5])
        t = g.aten("sin", x)
        if not g.mesh or g.rank in ranks:
            g.aten("mul_.Tensor", t, r)
        return g.aten("cos", t)

    return program


def through_alias(op: str, *args: Any) -> Program:
    """``op(t)`` is t itself (or a copy of it) and is overwritten; t is returned."""

    def program(g: GraphBuilder) -> Ref:
        x, r = g.input("x", [4, 5]), g.input("r", [4, 5])
        t = g.aten("sin", x)
        g.aten("mul_.Tensor", g.aten(op, t, *args), r)
        return g.aten("cos", t)

    return program


MUTATED = {"x": SAME, "r": SAME}
MUTATION = [
    LawCase(
        "in-place-add",
        TP2,
        in_place("add_.Tensor", "result"),
        {"result used": in_place("add_.Tensor", "result")},
        {
            "buffer used, never written in the reference": Twin(
                in_place("add_.Tensor", "buffer"), reference=never_written
            )
        },
        MUTATED,
        [SAME],
    ),
    LawCase(
        "in-place-copy",
        TP2,
        lambda g: _copied(g, "result"),
        {"result used": lambda g: _copied(g, "result")},
        {"buffer used, never written in the reference": Twin(lambda g: _copied(g, "buffer"), reference=never_written)},
        MUTATED,
        [SAME],
    ),
    LawCase(
        "in-place-through-view",
        TP2,
        through_view(False),
        {"not written": through_view(False)},
        {"written": through_view(True)},
        MUTATED,
        [SAME],
    ),
    LawCase(
        "in-place-bias",
        TP3,
        bias_in_place(set(), "result"),
        {"rank 0, result": bias_in_place({0}, "result"), "rank 0, buffer": bias_in_place({0}, "buffer")},
        {
            "all ranks": bias_in_place({0, 1, 2}, "buffer"),
            "two ranks": bias_in_place({0, 1}, "buffer"),
            "no rank": bias_in_place(set(), "buffer"),
        },
        {"x": "s (tp k) ~ s k", "w": "n (tp k) ~ n k", "b": "n ~ n"},
        ["s n ~ s n"],
        unproved=dict.fromkeys(("rank 0, result", "rank 0, buffer"), "an in-place write on some ranks only is refused"),
    ),
    LawCase(
        "in-place-on-one-rank",
        TP2,
        scaled_in_place(set()),
        {"all ranks": scaled_in_place({0, 1})},
        {"rank 0": scaled_in_place({0}), "rank 1": scaled_in_place({1}), "none": scaled_in_place({2})},
        MUTATED,
        [SAME],
    ),
    LawCase(
        "in-place-through-alias",
        TP2,
        never_written,
        {"copied": through_alias("clone")},
        {"positive": through_alias("positive"), "dropout in evaluation": through_alias("dropout", 0.1, False)},
        MUTATED,
        [SAME],
    ),
    LawCase(
        "all-reduce-in-place",
        TP2,
        reduced_in_place("result"),
        {"result used": reduced_in_place("result")},
        {
            "never reduced": lambda g: g.aten(
                "cos", g.aten("mm", g.input("x", [5, 4]), g.aten("t", g.input("w", [7, 4])))
            )
        },
        {"x": "s (tp k) ~ s k", "w": "n (tp k) ~ n k"},
        ["s n ~ s n"],
    ),
]


def _copied(g: GraphBuilder, use: str) -> Ref:
    x, r = g.input("x", [4, 5]), g.input("r", [4, 5])
    if not g.mesh:
        return g.aten("cos", r)
    t = g.aten("sin", x)
    written = g.aten("copy_", t, r)
    return g.aten("cos", {"result": written, "buffer": t}[use])


# ---- traps ------------------------------------------------------------------------------------------------------


def product_of_scaled(divide: float) -> Program:
    """A partial product over dp, summed over the replicating tp: every factor is tp times too large."""

    def program(g: GraphBuilder) -> Ref:
        x = g.aten("sin", g.input("x", [4, 5 if g.mesh else 10]))
        y = g.aten("prod.dim_int", x, 1)
        if not g.mesh:
            return y
        y = g.all_reduce(g.all_reduce(y, "tp"), "dp", "product")
        return g.aten("div.Tensor", y, divide)

    return program


def extremum_of_extremum(inner: str, outer: str, how: str, late: bool) -> Program:
    """``outer`` over rows of ``inner`` over the sharded columns; the reduction over ranks last, or in between."""

    def program(g: GraphBuilder) -> Ref:
        y = g.aten(inner, g.aten("sin", g.input("x", [7, 5 if g.mesh else 15])), [1])
        y = y if late else g.all_reduce(y, "tp", how)
        y = g.aten(outer, y, [0])
        return g.all_reduce(y, "tp", how) if late else y

    return program


def conflicting(how: str) -> Program:
    """v = view(s, [20]) of s [5, 4], claimed, while another output cuts v in the middle: axes of v do not nest."""

    def program(g: GraphBuilder) -> tuple[Ref, Ref]:
        s = g.aten("sin", g.input("x", [5, 4]))
        v = g.aten("view", s if how == "same" or not g.mesh else g.aten("clone", g.aten("t", s)), [20])
        return v, g.aten("cos", g.aten("slice.Tensor", g.aten("view", s, [20]) if how != "same" else v, 0, 0, 10))

    return program


def bits(view: bool) -> Program:
    """The bits of a float read as an integer."""

    def program(g: GraphBuilder) -> Ref:
        x = g.input("x", [4, 5])
        if view:
            x = g.aten("view.dtype", x, DType("int32"))
        return g.aten("mul.Tensor", g.aten("_to_copy", x, dtype=DType("float32")), 0.5)

    return program


def variance(correction: int) -> Program:
    return lambda g: g.aten("var.correction", g.aten("sin", g.input("x", [4, 5])), [1], correction=correction)


def variance_by_flag(g: GraphBuilder) -> Ref:
    """The overload with three arguments: unbiased, no keepdim."""
    return g.aten("var.dim", g.aten("sin", g.input("x", [4, 5])), [1], True)


def shares(left: int, right: int) -> Program:
    """x [6, 6] plus y [6, 6]: dimension ``left`` of x and ``right`` of y are sharded on the same mesh axis."""

    def program(g: GraphBuilder) -> Ref:
        def local(name: str, dim: int) -> Ref:
            return g.input(name, [3 if g.mesh and d == dim else 6 for d in range(2)])

        x, y = local("x", left), local("y", right)
        if not g.mesh:
            return g.aten("add.Tensor", x, y)
        if left != right:
            y = g.aten("t", y)
        return g.all_gather(g.aten("add.Tensor", x, y), "tp", left)

    return program


def mean_of_means(sizes: str) -> Program:
    """Mean over rows (sharded) and columns of x [9, 4]."""

    def program(g: GraphBuilder) -> Ref:
        x = g.aten("sin", g.input("x", [3 if g.mesh else 9, 4]))
        if sizes == "rows":
            return g.all_reduce(g.aten("mean.dim", x, [0]), "tp", "avg")
        return g.all_reduce(g.aten("mean", x), "tp", "avg" if sizes == "all" else "sum")

    return program


TRAPS = [
    LawCase(
        "scale-of-partial-product",
        GRID,
        product_of_scaled(9.0),
        {"divided by n squared": product_of_scaled(9.0)},
        {"divided by n": product_of_scaled(3.0)},
        {"x": "s (dp k) ~ s k"},
        ["s ~ s"],
        unproved={"divided by n squared": "a factor inside a partial product is raised to a power; no law"},
    ),
    LawCase(
        "maximum-of-partial-minimum",
        TP3,
        extremum_of_extremum("amin", "amax", "min", False),
        {"reduced in between": extremum_of_extremum("amin", "amax", "min", False)},
        {"reduced last": extremum_of_extremum("amin", "amax", "min", True)},
        {"x": "s (tp k) ~ s k"},
        ["~"],
    ),
    LawCase(
        "minimum-of-partial-maximum",
        TP3,
        extremum_of_extremum("amax", "amin", "max", False),
        {"reduced in between": extremum_of_extremum("amax", "amin", "max", False)},
        {"reduced last": extremum_of_extremum("amax", "amin", "max", True)},
        {"x": "s (tp k) ~ s k"},
        ["~"],
    ),
    LawCase(
        "maximum-of-partial-maximum",
        TP3,
        extremum_of_extremum("amax", "amax", "max", False),
        {"reduced last": extremum_of_extremum("amax", "amax", "max", True)},
        {"wrong collective": extremum_of_extremum("amax", "amax", "min", True)},
        {"x": "s (tp k) ~ s k"},
        ["~"],
    ),
    LawCase(
        "claim-on-axes-that-do-not-nest",
        TP2,
        conflicting("same"),
        {"same": conflicting("same")},
        {"transposed": conflicting("other")},
        {"x": SAME},
        ["n ~ n", ""],
    ),
    LawCase(
        "bits-are-not-values", TP2, bits(False), {"values": bits(False)}, {"bits": bits(True)}, {"x": SAME}, [SAME]
    ),
    LawCase(
        "variance",
        TP2,
        variance(1),
        {"same": variance(1), "by flag": variance_by_flag},
        {"biased": variance(0)},
        {"x": SAME},
        ["a ~ a"],
    ),
    LawCase(
        "one-mesh-axis-two-dimensions",
        TP2,
        shares(0, 0),
        {"same dimension": shares(0, 0)},
        {"different dimensions": Twin(shares(0, 1), given={"x": "(tp a) b ~ a b", "y": "a (tp b) ~ a b"})},
        {"x": "(tp a) b ~ a b", "y": "(tp a) b ~ a b"},
        [SAME],
    ),
    LawCase(
        "mean-over-all",
        TP3,
        mean_of_means("all"),
        {"averaged": mean_of_means("all")},
        {"summed": mean_of_means("sum")},
        {"x": "(tp s) k ~ s k"},
        ["~"],
    ),
]

CASES = [*ATTRIBUTES, *STRUCTURE, *MUTATION, *TRAPS]
