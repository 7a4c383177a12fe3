"""Rows about attention: positions (POS), scales (SCALE, COMP-02), masks (ATTN), fused projections (QKV-01) and controls."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from bug_rows import FLOAT32, Row, linear
from support.build import GraphBuilder, Ref, replicated, sharded

# ---- helpers ------------------------------------------------------------------------------------------------------


def eager(g: GraphBuilder, q: Ref, k: Ref, v: Ref, scale: float = 1.0, mask: Ref | None = None, **more: Any) -> Ref:
    """``softmax(scale q k^T + mask) v`` written out, for operands [.., h, s, d]."""
    scores = g.aten("matmul", q, g.aten("transpose.int", k, -2, -1), name="scores")
    if scale != 1.0:
        scores = g.aten("mul.Tensor", scores, scale, name="scaled")
    if mask is not None:
        scores = g.aten("add.Tensor", scores, mask, name="masked")
    return g.aten("matmul", g.aten("_softmax", scores, -1, False, name="weights"), v, **more)


def joined(g: GraphBuilder, *parts: Ref, **more: Any) -> Ref:
    """Parts side by side in the last dimension."""
    return g.aten("cat", list(parts), -1, **more)


def neighbours(g: GraphBuilder, x: Ref, names: tuple[str, str] | None = None) -> tuple[Ref, Ref]:
    """Elements at even and at odd positions of the last dimension."""
    d, last = len(g.shape(x)) - 1, 2**63 - 1
    even, odd = names or (None, None)
    return g.aten("slice.Tensor", x, d, 0, last, 2, name=even), g.aten("slice.Tensor", x, d, 1, last, 2, name=odd)


def rotate_half(g: GraphBuilder, x: Ref, name: str) -> Ref:
    """``cat(-x2, x1)`` of the two halves of the last dimension."""
    half = g.shape(x)[-1] // 2
    d = len(g.shape(x)) - 1
    first = g.aten("slice.Tensor", x, d, 0, half, name=f"{name}_first")
    second = g.aten("slice.Tensor", x, d, half, 2 * half, name=f"{name}_second")
    return joined(g, g.aten("neg", second), first)


def turned(g: GraphBuilder, a: Ref, b: Ref, cos: Ref, sin: Ref) -> tuple[Ref, Ref]:
    """``(a cos - b sin, b cos + a sin)``."""

    def mul(x: Ref, y: Ref) -> Ref:
        return g.aten("mul.Tensor", x, y)

    return g.aten("sub.Tensor", mul(a, cos), mul(b, sin)), g.aten("add.Tensor", mul(b, cos), mul(a, sin))


# ---- POS-01: neighbours against halves ----------------------------------------------------------------------------


def gptj_rope(g: GraphBuilder, x: Ref, cos: Ref, sin: Ref, how: str, name: str) -> Ref:
    """Rotary embedding of [.., s, d]; cos and sin [s, d/2].

    ``sequential`` turns with every second element repeated, ``pairs`` does the same by stacking, ``wrong`` by halves.
    """
    half, d = g.shape(x)[-1] // 2, len(g.shape(x)) - 1
    if how == "wrong":
        a = g.aten("slice.Tensor", x, d, 0, half, name=f"{name}_a")
        b = g.aten("slice.Tensor", x, d, half, 2 * half, name=f"{name}_b")
        return joined(g, *turned(g, a, b, cos, sin), name=name)
    even, odd = neighbours(g, x, (f"{name}_a", f"{name}_b"))
    if how == "pairs":
        return g.aten("view", g.aten("stack", list(turned(g, even, odd, cos, sin)), -1), g.shape(x), name=name)
    every_two = g.aten("view", g.aten("stack", [g.aten("neg", odd), even], -1), g.shape(x))
    wide = [g.aten("repeat_interleave.self_int", t, 2, 1) for t in (cos, sin)]
    return g.aten("add.Tensor", *(g.aten("mul.Tensor", t, w) for t, w in zip((x, every_two), wide)), name=name)


def gptj(g: GraphBuilder, tp: int, how: str) -> Ref:
    """Attention [b=3, h=6, s=5, d=8] with rotated queries and keys."""
    q, k, v = (g.input(n, [3, 6 // tp, 5, 8]) for n in ("q", "k", "v"))
    cos, sin = g.input("cos", [5, 4]), g.input("sin", [5, 4])
    q, k = (gptj_rope(g, x, cos, sin, how, f"{n}_rotated") for x, n in ((q, "q"), (k, "k")))
    return eager(g, q, k, v, 8**-0.5, name="out")


QKV_BY_HEAD = [sharded("q", 1, 2), sharded("k", 1, 2), sharded("v", 1, 2)]

ROTATION = [f"{x}_rotated{part}" for x in "qk" for part in ("", "_a", "_b")]

POS_01 = Row(
    "POS-01",
    "vllm-project/vllm#941",
    "GPT-J rotates neighbours (2i, 2i+1); the port rotated (i, i+d/2)",
    2,
    lambda g: gptj(g, 1, "sequential"),
    lambda g: gptj(g, 2, "sequential"),
    lambda g: gptj(g, 2, "wrong"),
    [*QKV_BY_HEAD, replicated("cos", 2), replicated("sin", 2)],
    [sharded("out", 1, 2, "OUT")],
    {"reference": ROTATION, "implementation": ROTATION},
)
POS_01_PAIRS = replace(POS_01, id="POS-01-pairs", right=lambda g: gptj(g, 2, "pairs"))


# ---- POS-08: the factor of a partial rotation applied twice -------------------------------------------------------


def partial_rope(g: GraphBuilder, x: Ref, rotated: int, how: str, name: str) -> Ref:
    """The first ``rotated`` elements of each head of [b, h, s, d] are turned, the others pass."""
    s, d = g.shape(x)[-2:]
    steps = g.aten("_to_copy", g.aten("arange.start_step", 0, rotated, 2), dtype=FLOAT32)
    inverse = g.aten("reciprocal", g.aten("pow.Scalar", 10000.0, g.aten("div.Tensor", steps, float(rotated))))
    times = g.aten("_to_copy", g.aten("arange", s), dtype=FLOAT32)
    angles = g.aten("mul.Tensor", g.aten("unsqueeze", times, 1), g.aten("unsqueeze", inverse, 0))
    part = g.aten("slice.Tensor", x, 3, 0, rotated, name=f"{name}_part")
    rest = g.aten("slice.Tensor", x, 3, rotated, d, name=f"{name}_rest")
    if how == "sequential":
        wide = joined(g, angles, angles)
        cos, sin = g.aten("cos", wide), g.aten("sin", wide)
        new = g.aten(
            "add.Tensor", g.aten("mul.Tensor", part, cos), g.aten("mul.Tensor", rotate_half(g, part, name), sin),
            name=f"{name}_turned",
        )  # fmt: skip
        return joined(g, new, rest, name=name)
    half = rotated // 2
    first, second = g.aten("slice.Tensor", part, 3, 0, half), g.aten("slice.Tensor", part, 3, half, rotated)
    new = joined(g, *turned(g, first, second, g.aten("cos", angles), g.aten("sin", angles)), name=f"{name}_turned")
    return joined(g, new, rest, name=name)


def minimax(g: GraphBuilder, tp: int, rotated: int, how: str) -> Ref:
    """Attention [b=3, h=6, s=5, d=16], of which half is rotated."""
    q, k, v = (g.input(n, [3, 6 // tp, 5, 16]) for n in ("q", "k", "v"))
    q, k = (partial_rope(g, x, rotated, how, f"{n}_rotated") for x, n in ((q, "q"), (k, "k")))
    return eager(g, q, k, v, 16**-0.5, name="out")


PARTIAL = [f"{x}_rotated_{part}" for x in "qk" for part in ("part", "rest", "turned")]

POS_08 = Row(
    "POS-08",
    "vllm-project/vllm#30384",
    "partial_rotary_factor applied twice: half of the lanes that should be rotated are",
    2,
    lambda g: minimax(g, 1, 8, "sequential"),
    lambda g: minimax(g, 2, 8, "right"),
    lambda g: minimax(g, 2, 4, "wrong"),
    QKV_BY_HEAD,
    [sharded("out", 1, 2, "OUT")],
    {"reference": PARTIAL, "implementation": PARTIAL},
)


# ---- POS-18: the inference path without the interleaved rotation --------------------------------------------------


def mla_rope(g: GraphBuilder, x: Ref, cos: Ref, sin: Ref, interleaved: bool, path: str, name: str) -> Ref:
    """Even elements first, then odd ones, then by halves; or by halves at once."""
    half, d = g.shape(x)[-1] // 2, len(g.shape(x)) - 1
    if interleaved:
        a, b = neighbours(g, x, (f"{name}_a", f"{name}_b"))
    else:
        a = g.aten("slice.Tensor", x, d, 0, half, name=f"{name}_a")
        b = g.aten("slice.Tensor", x, d, half, 2 * half, name=f"{name}_b")
    if path == "train":
        t = joined(g, a, b)
        parts = [g.aten("mul.Tensor", y, joined(g, w, w)) for y, w in ((t, cos), (rotate_half(g, t, name), sin))]
        return g.aten("add.Tensor", *parts, name=name)
    return joined(g, *turned(g, a, b, cos, sin), name=name)


def mla(g: GraphBuilder, tp: int, interleaved: bool, path: str) -> Ref:
    """Latent attention [b=3, h=6, s=5], 7 elements per head without and 8 with positions; one rotated key for all heads."""
    h = 6 // tp
    q, k, v = g.input("q_nope", [3, h, 5, 7]), g.input("k_nope", [3, h, 5, 7]), g.input("v", [3, h, 5, 9])
    qr, kr = g.input("q_pe", [3, h, 5, 8]), g.input("k_pe", [3, 5, 8])
    cos, sin = g.input("cos", [5, 4]), g.input("sin", [5, 4])
    qr = mla_rope(g, qr, cos, sin, interleaved, path, "q_rotated")
    kr = mla_rope(g, g.aten("unsqueeze", kr, 1), cos, sin, interleaved, path, "k_rotated")
    kr = g.aten("expand", kr, [3, h, 5, 8])
    return eager(g, joined(g, q, qr), joined(g, k, kr), v, 15**-0.5, name="out")


POS_18 = Row(
    "POS-18",
    "NVIDIA/Megatron-LM b0eb9143c3 (#3026)",
    "training rotates MLA interleaved, the dynamic-inference path omits the flag and rotates by halves",
    2,
    lambda g: mla(g, 1, True, "train"),
    lambda g: mla(g, 2, True, "inference"),
    lambda g: mla(g, 2, False, "inference"),
    [
        *(sharded(n, 1, 2) for n in ("q_nope", "k_nope", "v", "q_pe")),
        *(replicated(n, 2) for n in ("k_pe", "cos", "sin")),
    ],
    [sharded("out", 1, 2, "OUT")],
    {
        "reference": [*ROTATION, *(f"{x}_rotated_{part}" for x in "qk" for part in ("first", "second"))],
        "implementation": ROTATION,
    },
)


# ---- SCALE-01, SCALE-03, COMP-02: the scale of the scores ---------------------------------------------------------


def scaled(g: GraphBuilder, tp: int, how: str, before: float, scale: float | None, mask: bool = False) -> Ref:
    """Attention [b=3, h=6, s=5, t=7, d=10]: queries times ``before``, then eager or fused with ``scale``."""
    h = 6 // tp
    q, k, v = g.input("q", [3, h, 5, 10]), g.input("k", [3, h, 7, 10]), g.input("v", [3, h, 7, 9])
    bias = g.input("mask", [3, h, 5, 7]) if mask else None
    if before != 1.0:
        q = g.aten("mul.Tensor", q, before, name="q_scaled")
    if how == "eager":
        return eager(g, q, k, v, 1.0 if scale is None else scale, bias, name="out")
    more = {} if scale is None else {"scale": scale}
    return g.aten("scaled_dot_product_attention", q, k, v, bias, name="out", **more)


SCALE_01 = Row(
    "SCALE-01",
    "huggingface/transformers#38277",
    "the query is multiplied by d^-0.5 and SDPA applies its default d^-0.5 again",
    2,
    lambda g: scaled(g, 1, "eager", 10**-0.5, None),
    lambda g: scaled(g, 2, "sdpa", 10**-0.5, 1.0),
    lambda g: scaled(g, 2, "sdpa", 10**-0.5, None),
    QKV_BY_HEAD,
    [sharded("out", 1, 2, "OUT")],
    {"reference": ["scores", "weights", "out"], "implementation": ["out"]},
)
SCALE_03 = Row(
    "SCALE-03",
    "vllm-project/vllm#36565",
    "scale_attn_weights=False means scale 1; 1/sqrt(d) is hard-coded",
    2,
    lambda g: scaled(g, 1, "eager", 1.0, None),
    lambda g: scaled(g, 2, "sdpa", 1.0, 1.0),
    lambda g: scaled(g, 2, "sdpa", 1.0, 10**-0.5),
    QKV_BY_HEAD,
    [sharded("out", 1, 2, "OUT")],
    {"reference": ["scores", "weights", "out"], "implementation": ["out"]},
)
COMP_02 = Row(
    "COMP-02",
    "pytorch/pytorch#174049",
    "the pattern takes any scale, the fused replacement uses its default",
    2,
    lambda g: scaled(g, 1, "eager", 1.0, 0.354, True),
    lambda g: scaled(g, 2, "sdpa", 1.0, 0.354, True),
    lambda g: scaled(g, 2, "sdpa", 1.0, None, True),
    [*QKV_BY_HEAD, sharded("mask", 1, 2)],
    [sharded("out", 1, 2, "OUT")],
    {"reference": ["scores", "scaled", "masked", "weights", "out"], "implementation": ["out"]},
)


# ---- SCALE-04, ATTN-01: arguments of a packed kernel --------------------------------------------------------------


def packed(g: GraphBuilder, tp: int, how: str, softcap: float, window: int) -> Ref:
    """Causal attention of t=6 packed tokens, 10 query heads on 2 * 5 key heads of d=7."""
    q, k, v = g.input("q", [6, 20 // tp, 7]), g.input("k", [6, 10 // tp, 7]), g.input("v", [6, 10 // tp, 7])
    if how != "eager":
        return g.op(
            "emerge_vllm.attention.default", q, k, v, [0, 6], 0.5, True, window, softcap, None, None, 0, name="attention"
        )  # fmt: skip
    q, k, v = (g.aten("transpose.int", x, 0, 1) for x in (q, k, v))
    k, v = (g.aten("repeat_interleave.self_int", x, 2, 0) for x in (k, v))
    scores = g.aten("mul.Tensor", g.aten("matmul", q, g.aten("transpose.int", k, 1, 2)), 0.5, name="scores")
    if softcap:
        tanh = g.aten("tanh", g.aten("div.Tensor", scores, softcap, name="cap"))
        scores = g.aten("mul.Tensor", tanh, softcap, name="capped")
    i, j = g.aten("unsqueeze", g.aten("arange", 6), 1), g.aten("unsqueeze", g.aten("arange", 6), 0)
    hidden = g.aten("gt.Tensor", j, i)
    if window:
        far = g.aten("le.Tensor", j, g.aten("sub.Tensor", i, window), name="far")
        hidden = g.aten("bitwise_or.Tensor", hidden, far)
    scores = g.aten("masked_fill.Scalar", scores, hidden, float("-inf"), name="masked")
    y = g.aten("matmul", g.aten("_softmax", scores, -1, False, name="weights"), v, name="context")
    return g.aten("transpose.int", y, 0, 1, name="attention")


PACKED = [sharded("q", 1, 2), sharded("k", 1, 2), sharded("v", 1, 2)]
SCALE_04 = Row(
    "SCALE-04",
    "vllm-project/vllm-metal#665",
    "the soft-cap argument of the attention kernel is hard-coded to 0 (off); the model caps at 50 tanh(s / 50)",
    2,
    lambda g: packed(g, 1, "eager", 50.0, 0),
    lambda g: packed(g, 2, "kernel", 50.0, 0),
    lambda g: packed(g, 2, "kernel", 0.0, 0),
    PACKED,
    [sharded("attention", 1, 2, "OUT")],
    {"reference": ["cap", "capped", "masked", "weights", "context", "attention"], "implementation": ["attention"]},
    smallest=1e-6,
)
ATTN_01 = Row(
    "ATTN-01",
    "huggingface/transformers#39408",
    "the kernel's window bounds are inclusive: passing W attends W + 1 keys",
    2,
    lambda g: packed(g, 1, "eager", 0.0, 3),
    lambda g: packed(g, 2, "kernel", 0.0, 3),
    lambda g: packed(g, 2, "kernel", 0.0, 4),
    PACKED,
    [sharded("attention", 1, 2, "OUT")],
    {"reference": ["far", "masked", "weights", "context", "attention"], "implementation": ["attention"]},
)


# ---- ATTN-04: which layers slide ----------------------------------------------------------------------------------


def alternating(g: GraphBuilder, tp: int, how: str, first: int) -> Ref:
    """Two layers of causal attention [b=3, h=4, s=6, d=5]; layer l slides (W=3) where ``(l + first)`` is even."""
    x = g.input("x", [3, 4 // tp, 6, 5])
    i, j = g.aten("unsqueeze", g.aten("arange", 6), 1), g.aten("unsqueeze", g.aten("arange", 6), 0)
    causal = g.aten("le.Tensor", j, i)
    near = g.aten("gt.Tensor", j, g.aten("sub.Tensor", i, 3))
    for layer in range(2):
        k, v = g.input(f"k{layer}", [3, 4 // tp, 6, 5]), g.input(f"v{layer}", [3, 4 // tp, 6, 5])
        sliding = (layer + first) % 2 == 0
        mask = g.aten("bitwise_and.Tensor", causal, near) if sliding else causal
        name = f"attention{layer}"
        if how == "eager":
            scores = g.aten("mul.Tensor", g.aten("matmul", x, g.aten("transpose.int", k, 2, 3)), 5**-0.5)
            scores = g.aten(
                "masked_fill.Scalar", scores, g.aten("logical_not", mask), float("-inf"), name=f"masked{layer}"
            )
            weights = g.aten("_softmax", scores, -1, False, name=f"weights{layer}")
            y = g.aten("matmul", weights, v, name=name)
        else:
            y = g.aten("scaled_dot_product_attention", x, k, v, mask, name=name)
        x = g.aten("add.Tensor", x, y, name=f"layer{layer}")
    return x


ATTN_04 = Row(
    "ATTN-04",
    "huggingface/transformers#31775",
    "alternation inverted: layers 0, 2, .. must slide and 1, 3, .. be global",
    2,
    lambda g: alternating(g, 1, "eager", 0),
    lambda g: alternating(g, 2, "sdpa", 0),
    lambda g: alternating(g, 2, "sdpa", 1),
    [sharded(n, 1, 2) for n in ("x", "k0", "v0", "k1", "v1")],
    [sharded("layer1", 1, 2, "OUT")],
    {
        "reference": ["masked0", "weights0", "attention0", "layer0"],
        "implementation": ["attention0", "layer0"],
    },
)


# ---- ATTN-09: a causal flag on a bidirectional model --------------------------------------------------------------


def bidirectional(g: GraphBuilder, tp: int, how: str, causal: bool) -> Ref:
    """Attention [b=3, h=6, s=5, d=7] that sees everything."""
    q, k, v = (g.input(n, [3, 6 // tp, 5, 7]) for n in ("q", "k", "v"))
    if how == "eager":
        return eager(g, q, k, v, 7**-0.5, name="out")
    return g.aten("scaled_dot_product_attention", q, k, v, is_causal=causal, name="out")


ATTN_09 = Row(
    "ATTN-09",
    "pytorch/torchtitan fdd3a37a0 (#2297)",
    "the shared SDPA wrapper hard-codes is_causal=True for a bidirectional diffusion transformer",
    2,
    lambda g: bidirectional(g, 1, "eager", False),
    lambda g: bidirectional(g, 2, "sdpa", False),
    lambda g: bidirectional(g, 2, "sdpa", True),
    QKV_BY_HEAD,
    [sharded("out", 1, 2, "OUT")],
    {"reference": ["scaled", "weights", "out"], "implementation": ["out"]},
)


# ---- QKV-01: a projection fused per group, split as blocks --------------------------------------------------------


def grouped_projection(g: GraphBuilder, tp: int, how: str) -> Ref:
    """[q q q k v] per group: 4 groups of 3 query heads, d=5, m=11; tokens [b=2, s=7]."""
    groups, heads, d = 4 // tp, 3, 5
    x = g.input("hidden_states", [14, 11])
    w = g.input("qkv.weight", [groups * (heads + 2) * d, 11])
    qkv = linear(g, x, w, name="qkv")
    if how == "right":
        mixed = g.aten("view", qkv, [2, 7, groups, heads + 2, d])
        q, k, v = g.aten("split_with_sizes", mixed, [heads, 1, 1], 3, name="split")
        q = g.aten("view", g.aten("clone", q), [2, 7, groups * heads, d])
        k, v = (g.aten("squeeze.dim", t, 3) for t in (k, v))
    else:
        sizes = [groups * heads * d, groups * d, groups * d]
        q, k, v = g.aten("split_with_sizes", g.aten("view", qkv, [2, 7, sum(sizes)]), sizes, 2, name="split")
        q = g.aten("view", q, [2, 7, groups * heads, d])
        k, v = (g.aten("view", t, [2, 7, groups, d]) for t in (k, v))
    q, k, v = (g.aten("transpose.int", t, 1, 2) for t in (q, k, v))
    y = g.aten("scaled_dot_product_attention", q, k, v, enable_gqa=True, name="attention")
    return g.aten("transpose.int", y, 1, 2, name="out")


QKV_01 = Row(
    "QKV-01",
    "NVIDIA/Megatron-LM 000d291092",
    "a fused projection [q..q, k, v] per group is split as [all q | all k | all v]",
    2,
    lambda g: grouped_projection(g, 1, "right"),
    lambda g: grouped_projection(g, 2, "right"),
    lambda g: grouped_projection(g, 2, "wrong"),
    [replicated("hidden_states", 2), sharded("qkv.weight", 0, 2)],
    [sharded("out", 2, 2, "OUT")],
    {"reference": ["split", "getitem"], "implementation": ["split"]},
)


# ---- CTL-01: a bias shifted by a constant per row -----------------------------------------------------------------


def shifted_alibi(g: GraphBuilder, tp: int, offset: int) -> Ref:
    """Attention [b=3, h=6, s=5, t=7, d=8] with the bias slope * (j - 6 + offset), or slope * |j - 3| (offset -1)."""
    h = 6 // tp
    q, k, v = g.input("q", [3, h, 5, 8]), g.input("k", [3, h, 7, 8]), g.input("v", [3, h, 7, 9])
    slopes = g.input("slopes", [h])
    positions = g.aten("_to_copy", g.aten("arange", 7), dtype=FLOAT32)
    if offset >= 0:
        distance = g.aten("sub.Tensor", positions, float(6 - offset), name="distance")
    else:
        distance = g.aten("abs", g.aten("sub.Tensor", positions, 3.0, name="distance"))
    distance = g.aten("view", distance, [1, 1, 7])
    bias = g.aten("mul.Tensor", g.aten("view", slopes, [h, 1, 1]), distance, name="bias")
    return eager(g, q, k, v, 8**-0.5, bias, name="out")


CTL_01 = Row(
    "CTL-01",
    "vllm-project/vllm#945",
    "slope * (j - L) and slope * (j - L + 1) differ by a constant per row, which softmax does not see; "
    "the wrong twin takes the distance to the middle",
    2,
    lambda g: shifted_alibi(g, 1, 0),
    lambda g: shifted_alibi(g, 2, 1),
    lambda g: shifted_alibi(g, 2, -1),
    [*QKV_BY_HEAD, sharded("slopes", 0, 2)],
    [sharded("out", 1, 2, "OUT")],
    {"reference": ["distance", "bias", "masked"], "implementation": ["distance", "bias", "masked"]},
)


# ---- CTL-14: lanes of queries and keys permuted together ----------------------------------------------------------


def permuted_lanes(g: GraphBuilder, tp: int, how: str) -> Ref:
    """Scores of [s=5] queries and [t=7] keys, h=6 heads of d=8, with projections whose rows (i 2) become (2 i) per head."""
    h = 6 // tp
    x, y = g.input("x", [5, 11]), g.input("y", [7, 11])
    heads = []
    for n, tokens in (("q", x), ("k", y)):
        w = g.input(f"{n}_proj.weight", [h * 8, 11])
        if how == "right" or (how, n) == ("wrong", "q"):
            w = g.aten("transpose.int", g.aten("view", w, [h, 4, 2, 11]), 1, 2)
            w = g.aten("view", g.aten("clone", w), [h * 8, 11], name=f"{n}_permuted")
        heads.append(g.aten("view", linear(g, tokens, w, name=f"{n}_proj"), [g.shape(tokens)[0], h, 8]))
    q, k = heads
    return g.aten("bmm", g.aten("transpose.int", q, 0, 1), g.aten("permute", k, [1, 2, 0]), name="scores")


CTL_14_LANES = Row(
    "CTL-14-lanes",
    "general",
    "lanes of queries and keys permuted together change nothing; the wrong twin permutes those of the queries only",
    2,
    lambda g: permuted_lanes(g, 1, "sequential"),
    lambda g: permuted_lanes(g, 2, "right"),
    lambda g: permuted_lanes(g, 2, "wrong"),
    [replicated("x", 2), replicated("y", 2), sharded("q_proj.weight", 0, 2), sharded("k_proj.weight", 0, 2)],
    [sharded("scores", 0, 2, "OUT")],
    {"reference": ["scores"], "implementation": ["q_permuted", "scores"]},
)

ROWS = [
    POS_01, POS_01_PAIRS, POS_08, POS_18, SCALE_01, SCALE_03, SCALE_04, COMP_02, ATTN_01, ATTN_04, ATTN_09, QKV_01,
    CTL_01, CTL_14_LANES,
]  # fmt: skip
