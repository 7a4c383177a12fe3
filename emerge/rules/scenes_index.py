"""Scenes of integers: vocabulary-parallel look-ups in their spellings, cross entropy, positions, index arithmetic."""

from __future__ import annotations

from typing import Any

from emerge.graph.model import Ref
from emerge.rules.build import Build, Val
from emerge.rules.scenes import scene
from emerge.rules.writer import PerRank, Writer


def bounds(b: Build, axis: str, n: int) -> tuple[PerRank, PerRank]:
    """First index of every rank's block and of the next block, possibly wrong."""
    at = b.imp.at
    step = n - 1 if b.fault("blocks that are too short") and n > 2 else n
    low = [at(r, axis) * step for r in range(b.imp.ranks)]
    high = [v + n for v in low]
    if b.fault("wrong offset on one rank"):
        low[b.rng.randrange(len(low))] += 1
    if b.fault("upper bound off by one"):
        high = [v - 1 for v in high]
    return PerRank(tuple(low)), PerRank(tuple(high))


def masked_index(b: Build, w: Writer, ids: Ref, low: Any, high: Any, style: str, total: int) -> tuple[Ref, Ref]:
    """(index inside the block, mask of what lies outside) in one of the spellings."""
    if style == "megatron":
        outside = w.op("bitwise_or.Tensor", w.op("lt.Scalar", ids, low), w.op("ge.Scalar", ids, high))
        if b.rng.random() < 0.2:
            outside = w.op("logical_or", w.op("ge.Scalar", ids, high), w.op("lt.Scalar", ids, low))
        shifted = w.op("sub.Tensor", ids, low)
        zero = 1 if b.fault("masked tokens look up another row") else 0
        return w.op("masked_fill.Scalar", shifted, outside, zero), outside
    if style == "where":
        inside = w.op("bitwise_and.Tensor", w.op("ge.Scalar", ids, low), w.op("lt.Scalar", ids, high))
        zeros = w.op("zeros_like", ids)
        return w.op("where.self", inside, w.op("sub.Tensor", ids, low), zeros), w.op("bitwise_not", inside)
    if style == "strict":
        inside = w.op("logical_and", w.op("gt.Scalar", ids, _minus(low)), w.op("le.Scalar", ids, _minus(high)))
        shifted = w.op("mul.Tensor", w.op("sub.Tensor", ids, low), inside)
        return shifted, w.op("logical_not", inside)
    # vllm: base and added vocabulary, the added one empty
    inside = w.op("bitwise_and.Tensor", w.op("ge.Scalar", ids, low), w.op("lt.Scalar", ids, high))
    added = w.op("bitwise_and.Tensor", w.op("ge.Scalar", ids, total), w.op("lt.Scalar", ids, total))
    factor: Any = 0
    if isinstance(low, PerRank) and b.rng.random() < 0.5:  # any numbers: nothing is ever added
        factor = PerRank(tuple(b.rng.choice([0, 3, 4, 7, 11]) for _ in low.values))
    offset = w.op("add.Tensor", w.op("mul.Tensor", inside, low), w.op("mul.Tensor", added, factor))
    valid = w.op("bitwise_or.Tensor", inside, added)
    index = w.op("mul.Tensor", valid, w.op("sub.Tensor", ids, offset))
    return index, w.op("bitwise_not", valid)


def _minus(value: Any) -> Any:
    return PerRank(tuple(v - 1 for v in value.values)) if isinstance(value, PerRank) else value - 1


STYLES = ("megatron", "where", "strict", "vllm")


@scene("vocabulary look-up")
def vocabulary(b: Build) -> None:
    """An embedding whose table is sharded over its rows."""
    axis = b.axis()
    k = b.mesh[axis]
    b.dim("b"), b.dim("s"), b.dim("v", [axis]), b.dim("h")
    total = b.sizes["v"]
    ids = b.input(["b", "s"], dtype="int64", high=total, keep=False)
    table = b.input(["v", "h"], [axis, None], keep=False)
    low, high = bounds(b, axis, total // k)
    style = b.pick(STYLES)
    index, outside = masked_index(b, b.imp, ids.imp, low, high, style, total)
    ref = b.reference.op("embedding", table.ref, ids.ref)
    out = b.imp.op("embedding", table.imp, index)
    if b.rng.random() < 0.2:
        ref = b.reference.op("index_select", table.ref, 0, b.reference.op("view", ids.ref, [-1]))
        out = b.imp.op("index_select", table.imp, 0, b.imp.op("view", index, [-1]))
        outside = b.imp.op("view", outside, [-1])
        b.sizes["bs"] = b.sizes["b"] * b.sizes["s"]
    if b.fault("zeros written inside the block"):
        outside = b.imp.op("logical_not", outside)
    if not b.fault("rows outside the block are not zeroed"):
        if b.rng.random() < 0.5:
            out = b.imp.op("masked_fill.Scalar", out, b.imp.op("unsqueeze", outside, -1), 0.0)
        else:
            out = b.imp.op("index_put", out, [outside], b.imp.op("zeros", [], gives=("float64", [])))
    names = ("bs", "h") if len(b.reference.shape(ref)) == 2 else ("b", "s", "h")
    b.keep(Val(ref, out, names, (None,) * len(names), (axis,), "sum"))
    if not b.fault("all-reduce missing"):
        b.keep(Val(ref, b.imp.all_reduce(out, axis), names, (None,) * len(names)))


@scene("vocabulary with padding")
def padded(b: Build) -> None:
    """An embedding in the leading rows of a table against one in the whole table, or in its shards."""
    axis = b.axis()
    k = b.mesh[axis]
    b.dim("b"), b.dim("v", [axis]), b.dim("h")
    total = b.sizes["v"]
    real = b.rng.randint(max(1, total - total // k), total - 1)
    ids = b.input(["b"], dtype="int64", high=real, keep=False)
    sharded = b.rng.random() < 0.6
    table = b.input(["v", "h"], [axis if sharded else None, None], keep=False)
    known = b.reference.op("slice.Tensor", table.ref, 0, 0, real)
    ref = b.reference.op("embedding", known, ids.ref)
    if not sharded:
        index = ids.imp
        if b.fault("rows counted from behind the padding"):
            index = b.imp.op("add.Tensor", ids.imp, total - real)
        b.keep(Val(ref, b.imp.op("embedding", table.imp, index), ("b", "h"), (None, None)))
        return
    low, high = bounds(b, axis, total // k)
    if b.rng.random() < 0.5:  # bounds that stop where the rows do: no index lies behind them
        high = PerRank(tuple(min(v, real) if v > 0 else v for v in high.values))
    index, outside = masked_index(b, b.imp, ids.imp, low, high, b.pick(("megatron", "where", "vllm")), real)
    out = b.imp.op("embedding", table.imp, index)
    if not b.fault("rows outside the block are not zeroed"):
        out = b.imp.op("masked_fill.Scalar", out, b.imp.op("unsqueeze", outside, -1), 0.0)
    b.keep(Val(ref, out, ("b", "h"), (None, None), (axis,), "sum"))
    b.keep(Val(ref, b.imp.all_reduce(out, axis), ("b", "h"), (None, None)))


@scene("vocabulary cross entropy")
def cross_entropy(b: Build) -> None:
    """Cross entropy with logits sharded over the vocabulary, as Megatron writes it."""
    axis = b.axis()
    k = b.mesh[axis]
    b.dim("t"), b.dim("v", [axis])
    total, tokens = b.sizes["v"], b.sizes["t"]
    logits = b.input(["t", "v"], [None, axis])
    target = b.input(["t"], dtype="int64", high=total, keep=False)
    low, high = bounds(b, axis, total // k)

    def loss(w: Writer, x: Ref, ids: Ref, reduce: Any, first: Any, last: Any) -> list[Ref]:
        top = reduce(w.op("amax", x, [1]), "max")
        x = w.op("sub.Tensor", x, w.op("unsqueeze", top, 1))
        index, outside = masked_index(b, w, ids, first, last, "megatron", total)
        rows = w.op("arange", tokens)
        picked = w.op("index.Tensor", x, [rows, index])
        picked = reduce(w.op("masked_fill.Scalar", picked, outside, 0.0), "sum")
        total_exp = reduce(w.op("sum.dim_IntList", w.op("exp", x), [1]), "sum")
        out = w.op("sub.Tensor", w.op("log", total_exp), picked)
        return [top, picked, total_exp, out]

    def reduce_over(x: Ref, how: str) -> Ref:
        if b.fault("all-reduce missing"):
            return x
        return b.imp.all_reduce(x, axis, "sum" if b.fault("all-reduce with another reduction") else how)

    left = loss(b.reference, logits.ref, target.ref, lambda x, how: x, 0, total)
    right = loss(b.imp, logits.imp, target.imp, reduce_over, low, high)
    for r, i in zip(left, right):
        b.keep(Val(r, i, ("t",), (None,)))


@scene("gather along a sharded dimension")
def gather(b: Build) -> None:
    """``gather`` with a masked index, and the plain one."""
    axis = b.axis()
    b.dim("t"), b.dim("v", [axis]), b.dim("j")
    total = b.sizes["v"]
    x = b.input(["t", "v"], [None, axis])
    ids = b.input(["t", "j"], dtype="int64", high=total, keep=False)
    low, high = bounds(b, axis, total // b.mesh[axis])
    index, outside = masked_index(b, b.imp, ids.imp, low, high, b.pick(STYLES), total)
    ref = b.reference.op("gather", x.ref, 1, ids.ref)
    out = b.imp.op("masked_fill.Scalar", b.imp.op("gather", x.imp, 1, index), outside, 0.0)
    b.keep(Val(ref, out, ("t", "j"), (None, None), (axis,), "sum"))
    b.keep(Val(ref, b.imp.all_reduce(out, axis), ("t", "j"), (None, None)))
    y = b.input(["t", "h2"] if "h2" in b.sizes else ["t", b.dim("h2")], keep=False)
    near = b.input(["t", "j"], dtype="int64", high=b.sizes["h2"], keep=False)
    b.keep(
        Val(
            *b.both("gather", lambda r: [y.ref if r else y.imp, 1, near.ref if r else near.imp]),
            ("t", "j"),
            (None, None),
        )
    )


@scene("sharded tokens look-up")
def sharded_tokens(b: Build) -> None:
    """A replicated table and sharded ids; and both sharded over different axes where the mesh has two."""
    axes = list(b.mesh)
    b.dim("s", [axes[0]]), b.dim("h")
    b.dim("v", [axes[-1]] if len(axes) > 1 else [])
    total = b.sizes["v"]
    ids = b.input(["s"], [axes[0]], dtype="int64", high=total, keep=False)
    if len(axes) == 1:
        table = b.input(["v", "h"], keep=False)
        b.keep(
            Val(
                *b.both("embedding", lambda r: [table.ref if r else table.imp, ids.ref if r else ids.imp]),
                ("s", "h"),
                (axes[0], None),
            )
        )
        return
    table = b.input(["v", "h"], [axes[1], None], keep=False)
    low, high = bounds(b, axes[1], total // b.mesh[axes[1]])
    index, outside = masked_index(b, b.imp, ids.imp, low, high, b.pick(STYLES), total)
    ref = b.reference.op("embedding", table.ref, ids.ref)
    out = b.imp.op(
        "masked_fill.Scalar", b.imp.op("embedding", table.imp, index), b.imp.op("unsqueeze", outside, -1), 0.0
    )
    group = axes[0] if b.fault("all-reduce over another group") else axes[1]
    b.keep(Val(ref, out, ("s", "h"), (axes[0], None), (axes[1],), "sum"))
    b.keep(Val(ref, b.imp.all_reduce(out, group), ("s", "h"), (axes[0], None)))


@scene("positions")
def positions(b: Build) -> None:
    """``arange``, whole against sharded, into floats and comparisons."""
    axis = b.axis()
    b.dim("s", [axis]), b.dim("h")
    n = b.sizes["s"]
    local = n // b.mesh[axis]
    start = b.pick([0, 0, 3])
    step = b.pick([1, 1, 2])
    ref = b.reference.op("arange.start_step", start, start + n * step, step)
    at = b.imp.at
    offset = 0 if b.fault("positions not shifted by the rank") else local * step
    if b.fault("positions overlap"):
        offset = max(1, offset - step)
    first = b.per_rank(lambda r: start + at(r, axis) * offset)
    last = b.per_rank(lambda r: first.values[r] + local * step)
    imp = b.imp.op("arange.start_step", first, last, step)
    pos = b.keep(Val(ref, imp, ("s",), (axis,), kind="i"))
    cast = b.both("_to_copy", lambda r: [pos.ref if r else pos.imp], dtype=_float())
    v = b.keep(Val(*cast, ("s",), (axis,)))
    x = b.input(["h", "s"], [None, axis])
    b.keep(
        Val(*b.both("mul.Tensor", lambda r: [x.ref if r else x.imp, v.ref if r else v.imp]), ("h", "s"), (None, axis))
    )
    b.map("cos", v)
    seen = b.both("lt.Scalar", lambda r: [pos.ref if r else pos.imp, start + n // 2])
    b.keep(
        Val(
            *b.both("masked_fill.Scalar", lambda r: [x.ref if r else x.imp, seen[0 if r else 1], -2.0]),
            ("h", "s"),
            (None, axis),
        )
    )
    whole_axis = b.both("arange", lambda r: [b.sizes["h"]])
    b.keep(Val(*whole_axis, ("h",), (None,), kind="i"))


def _float() -> Any:
    from emerge.graph.model import DType

    return DType("float64")


@scene("index arithmetic")
def arithmetic(b: Build) -> None:
    """Chains of integer operators, the same and rank-dependent ones, over several integer types."""
    axis = b.axis()
    b.dim("s")
    dtype = b.pick(["int64", "int64", "int64", "int32", "uint8", "int8"])
    high = b.pick([12, 40, 100])
    ids = b.input(["s"], dtype=dtype, high=high, keep=False)
    for w, start in ((b.reference, ids.ref), (b.imp, ids.imp)):
        values: list[tuple[Ref, str]] = [(start, "i")]
        for _ in range(b.rng.randint(6, 14)):
            _arithmetic_step(b, w, values, axis, high)


def _arithmetic_step(b: Build, w: Writer, values: list[tuple[Ref, str]], axis: str, high: int) -> None:
    from emerge.rules.writer import Unwritable

    def constant(limit: int = 9) -> Any:
        value = b.rng.randint(-limit, limit)
        if w is b.imp and b.rng.random() < 0.4:
            step = b.rng.randint(-3, 3)
            return b.per_rank(lambda r: value + step * b.imp.at(r, axis))
        return value

    x, kx = b.pick(values)
    y, ky = b.pick(values)
    kind = b.pick(
        [
            "add",
            "sub",
            "mul",
            "compare",
            "logic",
            "not",
            "keep",
            "fill",
            "add2",
            "sub2",
            "alpha",
            "big",
            "booladd",
            "cast",
        ]
    )
    try:
        if kind in ("add", "sub") and kx == "i":
            out = (w.op(f"{kind}.Tensor", x, constant()), "i")
        elif kind == "mul":
            out = (w.op("mul.Tensor", x, constant(4)), "i")
        elif kind == "compare" and kx == "i":
            limit = max(4, high)
            out = (w.op(b.pick(["lt", "le", "gt", "ge"]) + ".Scalar", x, constant(limit)), "b")
        elif kind == "logic" and kx == ky == "b":
            out = (w.op(b.pick(["bitwise_and.Tensor", "bitwise_or.Tensor", "logical_and", "logical_or"]), x, y), "b")
        elif kind == "not" and kx == "b":
            out = (w.op(b.pick(["bitwise_not", "logical_not"]), x), "b")
        elif kind == "keep" and kx == "i" and ky == "b":
            out = (w.op("mul.Tensor", *b.pick([(x, y), (y, x)])), "i")
        elif kind == "fill" and kx == "i" and ky == "b":
            out = (w.op("masked_fill.Scalar", x, y, b.rng.randint(-2, 5)), "i")
        elif kind in ("add2", "sub2") and kx == ky == "i":
            out = (w.op(f"{kind[:3]}.Tensor", x, y), "i")
        elif kind == "alpha" and kx == ky == "i":
            out = (w.op(b.pick(["add.Tensor", "sub.Tensor"]), x, y, alpha=b.pick([2, -1, 3])), "i")
        elif kind == "big" and kx == "i":
            out = (w.op("mul.Tensor", x, b.pick([65536, 2**20])), "i")
        elif kind == "booladd" and kx == ky == "b":
            out = (w.op(b.pick(["add.Tensor", "mul.Tensor"]), x, y), "b")
        elif kind == "cast":
            from emerge.graph.model import DType

            target = b.pick(["int32", "int64", "int64", "int8"])
            out = (w.op("_to_copy", x, dtype=DType(target)), "i")
        else:
            return
    except Unwritable:
        return
    values.append(out)


@scene("one-hot")
def one_hot(b: Build) -> None:
    """One-hot encodings, whole, and of sharded tokens, into a product."""
    axis = b.axis()
    b.dim("s", [axis]), b.dim("v"), b.dim("h")
    ids = b.input(["s"], [axis], dtype="int64", high=b.sizes["v"], keep=False)
    hot = b.both("one_hot", lambda r: [ids.ref if r else ids.imp, b.sizes["v"]])
    v = b.keep(Val(*hot, ("s", "v"), (axis, None), kind="i"))
    cast = b.both("_to_copy", lambda r: [v.ref if r else v.imp], dtype=_float())
    f = b.keep(Val(*cast, ("s", "v"), (axis, None)))
    table = b.input(["v", "h"], keep=False)
    b.keep(
        Val(*b.both("mm", lambda r: [f.ref if r else f.imp, table.ref if r else table.imp]), ("s", "h"), (axis, None))
    )
