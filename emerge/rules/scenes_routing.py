"""Scenes of experts: rows sorted and multiplied group by group, or one matrix per row; experts sharded over ranks."""

from __future__ import annotations

from dataclasses import dataclass

from emerge.graph.model import DType, Ref
from emerge.rules.build import Build, Val
from emerge.rules.scenes import scene
from emerge.rules.writer import PerRank, Writer

FLOAT32, INT32 = DType("float32"), DType("int32")


@dataclass
class Experts:
    """What a program needs to run its experts.

    Attributes:
        ids, weights: [rows], expert and routing weight of each row. first, second: [experts, in, out] matrices. bias:
            [experts, out] of the first, or None.
        count: experts of this rank. sharded: rows of other ranks' experts have an id outside [0, count).
        slots: rows per token.
    """

    x: Ref
    ids: Ref
    weights: Ref
    first: Ref
    second: Ref
    bias: Ref | None
    count: int
    slots: int
    sharded: bool = False


def local_experts(
    b: Build, w: Writer, ids: Ref, weights: Ref, axis: str, count: int, mask: bool, quotients: bool
) -> tuple[Ref, Ref]:
    """Global experts to local ones with ``count`` (or -1) for those of other ranks, and their weights to 0."""
    rank = [w.at(r, axis) for r in range(w.ranks)]
    if b.fault("experts of the next rank"):
        rank = [(r + 1) % b.mesh[axis] for r in rank]
    other = b.pick([count, count, count + 2])
    if quotients:
        divide = b.pick(["floor_divide", "div.Tensor_mode"])
        if divide == "floor_divide":
            quotient = w.op(divide, ids, count)
        else:
            quotient = w.op(divide, ids, count, rounding_mode="floor")
        if b.rng.random() < 0.7:
            off = w.op("ne.Scalar", quotient, PerRank(tuple(rank)))
        else:
            off = w.op("logical_not", w.op("eq.Scalar", quotient, PerRank(tuple(rank))))
        inner = w.op("remainder.Scalar", ids, count)
    else:
        low = PerRank(tuple(r * count for r in rank))
        high = PerRank(tuple(r * count + count for r in rank))
        off = w.op("bitwise_or.Tensor", w.op("lt.Scalar", ids, low), w.op("ge.Scalar", ids, high))
        inner = w.op("sub.Tensor", ids, low)
    if b.fault("other experts keep a number of this rank"):
        other = 0
    local = w.op("masked_fill.Scalar", inner, off, other)
    return local, w.op("masked_fill.Scalar", weights, off, 0.0) if mask else weights


def activation(b: Build, w: Writer, y: Ref, kind: str) -> Ref:
    """A gated or plain activation of rows."""
    if kind == "plain":
        return w.op("silu", y)
    half = w.shape(y)[1] // 2
    gate, up = w.op("slice.Tensor", y, 1, 0, half), w.op("slice.Tensor", y, 1, half, 2 * half)
    return w.op("mul.Tensor", w.op("silu", gate), up)


def grouped(b: Build, w: Writer, e: Experts, kind: str, mask: bool) -> Ref:
    """Rows sorted by expert, multiplied group by group, and put back."""
    faulty = w is b.imp
    down = faulty and b.fault("sorted downwards")
    both = w.op("sort", e.ids, -1, True) if down else w.op("sort", e.ids)
    keys, order = w.item(both, 0), w.item(both, 1)
    rows = w.shape(order)[0]
    token = w.op("floor_divide", order, e.slots)
    picked = w.op("index.Tensor", e.x, [token])
    weights = w.op("index.Tensor", e.weights, [order])
    counted = keys if b.rng.random() < 0.7 else e.ids
    if faulty and b.fault("counts of other experts"):
        counted = w.op("bitwise_not", keys)
    if faulty and b.fault("group ends in the order of tokens"):
        counted = w.op("remainder.Scalar", w.op("add.Tensor", keys, 1), e.count)
    counts = w.op("histc", w.op("_to_copy", counted, dtype=FLOAT32), e.count, 0, e.count - 1)
    ends = w.op("cumsum", counts, 0, dtype=INT32)
    if b.rng.random() < 0.2:
        ends = w.op("_to_copy", w.op("cumsum", counts, 0), dtype=INT32)
    off = w.op("ge.Scalar", keys, e.count) if b.rng.random() < 0.8 else w.op("gt.Scalar", keys, e.count - 1)
    off = w.op("unsqueeze", off, -1)
    if mask and b.rng.random() < 0.6:
        picked = w.op("masked_fill.Scalar", picked, off, b.pick([0.0, 0.0, 1.0]))
    y = w.op("_grouped_mm", picked, e.first, ends)
    if e.bias is not None:
        y = w.op("add.Tensor", y, w.op("index.Tensor", e.bias, [w.op("clamp", keys, 0, e.count - 1)]))
    y = w.op("_grouped_mm", activation(b, w, y, kind), e.second, ends)
    if mask and not b.fault("rows of other experts are not zeroed"):
        y = w.op("masked_fill.Scalar", y, off, 0.0)
    y = w.op("mul.Tensor", y, w.op("unsqueeze", weights, -1))
    if faulty and b.fault("rows not put back"):
        return y
    if faulty and b.fault("rows put back by the order itself"):
        return w.op("index.Tensor", y, [order])
    how = b.pick(["inverse", "inverse", "written", "sorted"])
    if how == "written":
        return w.op("index_put", w.op("empty_like", y), [order], y)
    if how == "sorted":
        return w.op("index.Tensor", y, [w.item(w.op("sort", order), 1)])
    inverse = w.op("index_put", w.op("empty_like", order), [order], w.op("arange", rows))
    return w.op("index.Tensor", y, [inverse])


def batched(b: Build, w: Writer, e: Experts, kind: str, mask: bool) -> Ref:
    """One matrix looked up per row."""
    rows = w.shape(e.ids)[0]
    tokens, width = w.shape(e.x)
    x = w.op("view", w.op("expand", w.op("unsqueeze", e.x, 1), [tokens, e.slots, width]), [rows, width])
    ids, weights = e.ids, e.weights
    if e.sharded:
        if mask and not b.fault("weights of other experts are not zeroed"):
            weights = w.op("masked_fill.Scalar", weights, w.op("ge.Scalar", ids, e.count), 0.0)
        ids = w.op("clamp", ids, 0, e.count - 1)

    def product(y: Ref, table: Ref) -> Ref:
        chosen = w.op("index.Tensor", table, [ids])
        return w.op("squeeze.dim", w.op("bmm", w.op("unsqueeze", y, 1), chosen), 1)

    y = product(x, e.first)
    if e.bias is not None:
        y = w.op("add.Tensor", y, w.op("index.Tensor", e.bias, [ids]))
    y = product(activation(b, w, y, kind), e.second)
    return w.op("mul.Tensor", y, w.op("unsqueeze", weights, -1))


def run(b: Build, w: Writer, e: Experts, style: str, kind: str, mask: bool) -> Ref:
    """[tokens, slots, out]"""
    y = grouped(b, w, e, kind, mask) if style == "grouped" else batched(b, w, e, kind, mask)
    return w.op("view", y, [w.shape(e.x)[0], e.slots, w.shape(y)[1]])


def experts(b: Build, axis: str, left: str, right: str, single: bool) -> None:
    """Experts sharded over an axis of the mesh, both programs in a style of their own.

    Args:
        single: one expert per rank, found by bounds; else several, found by quotients.
    """
    slots, kind = 2, b.pick(["plain", "gated"])
    b.dim("t"), b.dim("e", [axis]), b.dim("h"), b.dim("o"), b.dim("f")
    b.sizes |= {"k": slots, "r": b.mesh[axis], "g": b.sizes["f"] * (2 if kind == "gated" else 1)}
    name = "r" if single else "e"
    total = b.sizes[name]
    count = total // b.mesh[axis]
    x = b.input(["t", "h"])
    shares = b.input(["t", name])
    first = b.input([name, "h", "g"], [axis, None, None], keep=False)
    second = b.input([name, "f", "o"], [axis, None, None], keep=False)
    bias = b.input([name, "g"], [axis, None], keep=False) if single else None
    chosen = b.input(["t", "k"], dtype="int64", high=total, keep=False) if single and b.rng.random() < 0.5 else None
    masked = b.rng.random() < 0.7
    results: list[Ref] = []
    for w, style in ((b.reference, left), (b.imp, right)):
        reference = w is b.reference
        best = w.op("topk", w.op("_softmax", shares.at(reference), 1, False), slots)
        weights, ids = w.item(best, 0), w.item(best, 1)
        if chosen is not None:
            ids = chosen.at(reference)
        if not reference:
            ids, weights = local_experts(b, w, ids, weights, axis, count, masked, not single)
        rows = b.sizes["t"] * slots
        e = Experts(
            x.at(reference), w.op("view", ids, [rows]), w.op("view", weights, [rows]), first.at(reference),
            second.at(reference), bias.at(reference) if bias is not None else None, total if reference else count, slots,
            not reference,
        )  # fmt: skip
        results.append(run(b, w, e, style, kind, not reference))
    names = ("t", "k", "o")
    b.keep(Val(results[0], results[1], names, (None,) * 3, (axis,), "sum"))
    ref, imp = (w.op("sum.dim_IntList", r, [1]) for w, r in zip((b.reference, b.imp), results))
    if not b.fault("all-reduce missing"):
        imp = b.imp.all_reduce(imp, axis)
    b.keep(Val(ref, imp, ("t", "o"), (None, None)))


@scene("experts, sorted")
def sorted_experts(b: Build) -> None:
    """Grouped products on both sides, with several experts per rank and with one."""
    axis = b.axis()
    experts(b, axis, "grouped", "grouped", False)
    experts(b, axis, "grouped", "grouped", True)


@scene("experts, one matrix per row")
def batched_experts(b: Build) -> None:
    """Looked-up matrices against either spelling."""
    axis = b.axis()
    experts(b, axis, "grouped", "batched", False)
    experts(b, axis, "batched", "batched", True)


@scene("experts, sorted against one matrix per row")
def mixed_experts(b: Build) -> None:
    """Looked-up matrices in the reference, grouped products in the implementation."""
    axis = b.axis()
    experts(b, axis, "batched", "grouped", False)
    experts(b, axis, "batched", "grouped", True)
