"""Rows that differ in rounding only (DTYPE): both twins are EQUIVALENT, the wrong one with a ``PRECISION`` finding.

With them the epsilon of a router that is large enough to be seen: that of CTL-03 (1e-20 beside a sum of at least 1/9) is lost
in float64 whatever the inputs are.
"""

from __future__ import annotations

from dataclasses import replace

from bug_rows import Row, linear
from layer_rows import CTL_03, softmax_router
from support.build import DType, GraphBuilder, Ref, replicated, sharded

BFLOAT16, WIDE = DType("bfloat16"), DType("float32")


def narrow(g: GraphBuilder, x: Ref, name: str | None = None) -> Ref:
    """A cast to bfloat16."""
    return g.aten("_to_copy", x, dtype=BFLOAT16, name=name)


def widened(g: GraphBuilder, x: Ref, name: str | None = None) -> Ref:
    """A cast to float32."""
    return g.aten("_to_copy", x, dtype=WIDE, name=name)


def normed(g: GraphBuilder, x: Ref, name: str = "normed") -> Ref:
    """``x / sqrt(mean(x^2) + 1e-6)`` over the last dimension."""
    mean = g.aten("mean.dim", g.aten("pow.Tensor_Scalar", x, 2), [-1], True, name=f"{name}_mean")
    return g.aten("mul.Tensor", x, g.aten("rsqrt", g.aten("add.Tensor", mean, 1e-6), name=f"{name}_root"), name=name)


# ---- DTYPE-01: the norm is rounded before (1 + w) is applied --------------------------------------------------------


def gemma_norm(g: GraphBuilder, tp: int, how: str) -> Ref:
    """A norm in bfloat16 before a column-parallel projection: [t=5, m=8] to 14."""
    x, weight = g.input("x", [5, 8], "bfloat16"), g.input("norm.weight", [8], "bfloat16")
    w = g.input("proj.weight", [14 // tp, 8], "bfloat16")
    y = normed(g, widened(g, x))
    if how == "wrong":
        y = g.aten(
            "mul.Tensor", narrow(g, y, "normed_cast"), g.aten("add.Tensor", weight, 1.0, name="gain"), name="norm"
        )
    else:
        gain = g.aten("add.Tensor", widened(g, weight), 1.0, name="gain")
        y = narrow(g, g.aten("mul.Tensor", y, gain, name="norm"))
    return linear(g, y, w, name="proj")


DTYPE_01 = Row(
    "DTYPE-01",
    "huggingface/transformers#29402",
    "the product with (1 + w) must be taken in float32; rounding to bfloat16 first loses bits of 1 + w",
    2,
    lambda g: gemma_norm(g, 1, "right"),
    lambda g: gemma_norm(g, 2, "right"),
    lambda g: gemma_norm(g, 2, "wrong"),
    [replicated("x", 2), replicated("norm.weight", 2), sharded("proj.weight", 0, 2)],
    [sharded("proj", 1, 2, "OUT")],
    {"reference": ["normed", "gain"], "implementation": ["normed", "normed_cast", "gain"]},
    "PRECISION",
    wrong_verdict="EQUIVALENT",
)


# ---- DTYPE-05: no rounding between norm and rotation ----------------------------------------------------------------


def norm_rope(g: GraphBuilder, tp: int, how: str) -> Ref:
    """Queries [h=6, t=5, d=8] normalised, rotated with float32 tables, and compared with keys [h=6, s=9, d=8]."""
    x, k = g.input("x", [6 // tp, 5, 8], "bfloat16"), g.input("k", [6 // tp, 9, 8], "bfloat16")
    cos, sin = g.input("cos", [5, 8]), g.input("sin", [5, 8])
    q = normed(g, widened(g, x))
    if how == "right":
        q = narrow(g, q, "normed_cast")
    half = [g.aten("slice.Tensor", q, 2, 4 * i, 4 * i + 4) for i in (0, 1)]
    turned = g.aten("cat", [g.aten("neg", half[1]), half[0]], 2)
    q = g.aten("add.Tensor", g.aten("mul.Tensor", q, cos), g.aten("mul.Tensor", turned, sin), name="rotated")
    return g.aten("bmm", narrow(g, q), g.aten("transpose.int", k, 1, 2), name="scores")


DTYPE_05 = Row(
    "DTYPE-05",
    "pytorch/torchtitan 3da072e7b (#2575)",
    "fusion removes the rounding to bfloat16 between the norm of queries and their rotation",
    2,
    lambda g: norm_rope(g, 1, "right"),
    lambda g: norm_rope(g, 2, "right"),
    lambda g: norm_rope(g, 2, "wrong"),
    [sharded("x", 0, 2), sharded("k", 0, 2), replicated("cos", 2), replicated("sin", 2)],
    [sharded("scores", 0, 2, "OUT")],
    {"reference": ["normed", "normed_cast"], "implementation": ["normed"]},
    "PRECISION",
    wrong_verdict="EQUIVALENT",
)

# ---- CTL-03 with an epsilon that float64 sees -----------------------------------------------------------------------

CTL_03_EPSILON = replace(
    CTL_03,
    id="CTL-03-epsilon",
    mechanism="softmax over all, top-k, renormalised, is softmax over the chosen; the wrong twin has 1e-5 in the denominator",
    wrong=lambda g: softmax_router(g, 2, "renormalised", eps=1e-5),
    smallest=1e-7,
    wrong_verdict="NOT_EQUIVALENT",
)

ROWS = [CTL_03_EPSILON, DTYPE_01, DTYPE_05]
