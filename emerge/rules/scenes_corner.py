"""Scenes at the edges of the laws: definedness, integer types, ambiguity, sizes of one, copies."""

from __future__ import annotations

from emerge.graph.model import DType
from emerge.rules.build import Build, Val
from emerge.rules.scenes import scene
from emerge.rules.writer import Writer


@scene("partial maximum through functions")
def partial_maximum(b: Build) -> None:
    """A maximum (minimum) over a sharded dimension that meets a function before it is reduced."""
    axis = b.axis()
    b.dim("t"), b.dim("v", [axis])
    x = b.input(["t", "v"], [None, axis])
    shift = b.pick([0.0, 3.0, 30.0])
    x = b.map("add.Tensor", x, shift) if shift else x
    op, how = b.pick([("amax", "max"), ("amin", "min"), ("prod.dim_int", "prod")])
    top = b.both(op, lambda r: [x.ref if r else x.imp, 1 if op.startswith("prod") else [1]])
    v = b.keep(Val(*top, ("t",), (None,), (axis,), how))
    bias = b.input(["t"], keep=False)
    b.dim("u")
    x3 = b.input(["t", "u", "v"], [None, None, axis], keep=False)
    if not op.startswith("prod"):
        part = b.both(op, lambda r: [x3.ref if r else x3.imp, [2]])
        for name in ("amax", "amin", "sum.dim_IntList", "mean.dim", "logsumexp"):
            f = b.both(name, lambda r: [part[0 if r else 1], [1]])
            b.keep(Val(f[0], b.imp.all_reduce(f[1], axis, how), ("t",), (None,)))
    for name in ("exp", "log", "sqrt", "tanh", "sigmoid", "relu", "neg", "abs", "square", "reciprocal", "rsqrt", "sin"):
        f = b.both(name, lambda r: [v.ref if r else v.imp])
        b.keep(Val(*f, ("t",), (None,)))
        if how != "prod":
            b.keep(Val(f[0], b.imp.all_reduce(f[1], axis, how), ("t",), (None,)))
    for name in ("add.Tensor", "sub.Tensor", "mul.Tensor", "maximum", "minimum"):
        for flip in (False, True):
            first, second = (bias, v) if flip else (v, bias)
            f = b.both(name, first.arguments(second))
            b.keep(Val(f[0], b.imp.all_reduce(f[1], axis, how if how != "prod" else "sum"), ("t",), (None,)))


@scene("partial sums through operators")
def partial_sums(b: Build) -> None:
    """A partial sum that meets every operator before it is reduced."""
    axis = b.axis()
    b.dim("t"), b.dim("k", [axis]), b.dim("h")
    x, w = b.input(["t", "k"], [None, axis], keep=False), b.input(["k", "h"], [axis, None], keep=False)
    part = b.both("mm", lambda r: [x.ref if r else x.imp, w.ref if r else w.imp])
    y = b.input(["t", "h"], keep=False)
    cond = b.both("gt.Scalar", lambda r: [y.ref if r else y.imp, 0.0])

    def p(r: bool) -> object:
        return part[0 if r else 1]

    def q(r: bool) -> object:
        return y.ref if r else y.imp

    tried = [
        ("add.Tensor", lambda r: [p(r), q(r)]), ("sub.Tensor", lambda r: [q(r), p(r)]),
        ("mul.Tensor", lambda r: [p(r), q(r)]),
        ("mul.Tensor", lambda r: [p(r), p(r)]), ("div.Tensor", lambda r: [p(r), q(r)]),
        ("div.Tensor", lambda r: [q(r), p(r)]),
        ("add.Tensor", lambda r: [p(r), p(r)]), ("sub.Tensor", lambda r: [p(r), p(r)]),
        ("add.Tensor", lambda r: [p(r), 0.5]),
        ("mul.Tensor", lambda r: [p(r), 0.5]), ("neg", lambda r: [p(r)]), ("relu", lambda r: [p(r)]),
        ("cumsum", lambda r: [p(r), 1]), ("cumprod", lambda r: [p(r), 1]), ("_softmax", lambda r: [p(r), 1, False]),
        ("masked_fill.Scalar", lambda r: [p(r), cond[0 if r else 1], 0.0]),
        ("masked_fill.Scalar", lambda r: [p(r), cond[0 if r else 1], 1.0]),
        ("mul.Tensor", lambda r: [p(r), cond[0 if r else 1]]),
        ("where.self", lambda r: [cond[0 if r else 1], p(r), q(r)]),
        ("sum.dim_IntList", lambda r: [p(r), [1], True]), ("mean.dim", lambda r: [p(r), [1], True]),
        ("amax", lambda r: [p(r), [1], True]), ("slice.Tensor", lambda r: [p(r), 1, 1, b.sizes["h"]]),
        ("flip", lambda r: [p(r), [1]]), ("tril", lambda r: [p(r)]), ("constant_pad_nd", lambda r: [p(r), [1, 2], 0.0]),
        ("constant_pad_nd", lambda r: [p(r), [1, 2], 1.0]), ("cat", lambda r: [[p(r), p(r)], 1]),
        ("cat", lambda r: [[p(r), q(r)], 1]),
        ("roll", lambda r: [p(r), [1], [1]]), ("addcmul", lambda r: [p(r), q(r), q(r)]),
        ("clamp", lambda r: [p(r), -0.5, 0.5]),
        ("reshape", lambda r: [p(r), [b.sizes["h"], b.sizes["t"]]]), ("pow.Tensor_Scalar", lambda r: [p(r), 2]),
        ("topk", None), ("lerp.Scalar", lambda r: [p(r), q(r), 0.3]), ("maximum", lambda r: [p(r), q(r)]),
        ("rsub.Scalar", lambda r: [p(r), 1.0]), ("repeat", lambda r: [p(r), [2, 1]]), ("sort", None),
    ]  # fmt: skip
    for name, args in b.rng.sample(tried, 14):
        if args is None:
            out = b.both(name, Val(*part, (), ()).arguments(*([2] if name == "topk" else []), 1))
            out = (b.reference.item(out[0], 0), b.imp.item(out[1], 0))
        else:
            out = b.both(name, args)
        b.keep(Val(out[0], b.imp.all_reduce(out[1], axis), ("?",) * 0, ()))
    b.vals.clear()


@scene("integer partials")
def integer_partials(b: Build) -> None:
    """Sums and maxima of integers over a sharded dimension, then integer arithmetic."""
    axis = b.axis()
    b.dim("t"), b.dim("v", [axis])
    x = b.input(["t", "v"], [None, axis], dtype="int64", high=50, keep=False)
    y = b.input(["t"], dtype="int64", high=50, keep=False)
    for op, how in (("sum.dim_IntList", "sum"), ("amax", "max"), ("amin", "min")):
        part = Val(*b.both(op, x.arguments([1])), ("t",), (None,), (axis,), how)
        made = []
        for name, alpha in (
            ("add.Tensor", 1), ("sub.Tensor", 1), ("add.Tensor", 2), ("sub.Tensor", 2), ("add.Tensor", -3),
        ):  # fmt: skip
            for first, second in ((part, y), (y, part)):
                made.append(b.both(name, first.arguments(second), alpha=alpha))
        made.append(b.both("mul.Tensor", part.arguments(-2)))
        made.append(b.both("div.Tensor", part.arguments(3)))
        made.append(b.both("div.Tensor_mode", part.arguments(3), rounding_mode="floor"))
        made.append(b.both("_to_copy", part.arguments(), dtype=DType("float64")))
        for _, imp in made:
            b.imp.all_reduce(imp, axis, how)


@scene("masked infinities")
def infinities(b: Build) -> None:
    """-inf where a mask holds, then the mask applied by multiplication or by writing zeros."""
    axis = b.axis()
    b.dim("t"), b.dim("v", [axis]), b.dim("h")
    x = b.input(["t", "v"], [None, axis])
    m = b.input(["t", "v"], [None, axis], dtype="bool", keep=False)
    low = b.both("masked_fill.Scalar", lambda r: [x.ref if r else x.imp, m.ref if r else m.imp, float("-inf")])
    keep = b.both("logical_not", lambda r: [m.ref if r else m.imp])
    zero = b.reference.op("masked_fill.Scalar", low[0], m.ref, 0.0)
    if b.rng.random() < 0.5:
        times = b.imp.op("mul.Tensor", low[1], keep[1])
    else:
        times = b.imp.op("where.self", keep[1], low[1], b.imp.op("zeros_like", low[1]))
    b.keep(Val(zero, times, ("t", "v"), (None, axis)))
    # -inf * 0 is undefined where writing a zero is not
    gone = b.both("logical_not", m.arguments())
    other = b.both("masked_fill.Scalar", x.arguments(Val(*gone, (), ()), float("-inf")))
    zero = b.reference.op("masked_fill.Scalar", other[0], gone[0], 0.0)
    b.keep(Val(zero, b.imp.op("mul.Tensor", other[1], m.imp), ("t", "v"), (None, axis)))
    e = b.both("exp", lambda r: [low[0 if r else 1]])
    v = b.keep(Val(*e, ("t", "v"), (None, axis)))
    total = b.both("sum.dim_IntList", lambda r: [v.ref if r else v.imp, [1]])
    b.keep(Val(total[0], b.imp.all_reduce(total[1], axis), ("t",), (None,)))
    top = b.both("amax", lambda r: [low[0 if r else 1], [1]])
    b.keep(Val(top[0], b.imp.all_reduce(top[1], axis, "max"), ("t",), (None,)))
    w = b.input(["v", "h"], [axis, None], keep=False)
    masked = b.both(
        "masked_fill.Scalar",
        lambda r: [
            w.ref if r else w.imp,
            b.both("gt.Scalar", lambda q: [w.ref if q else w.imp, 1.0])[0 if r else 1],
            float("inf"),
        ],
    )
    b.keep(
        Val(
            *b.both("mm", lambda r: [v.ref if r else v.imp, masked[0 if r else 1]]),
            ("t", "h"),
            (None, None),
            (axis,),
            "sum",
        )
    )


@scene("copies and sizes of one")
def copies(b: Build) -> None:
    """Whole axes over expanded dimensions, sums of copies, sizes of one."""
    b.dim("t"), b.dim("e")
    b.sizes["one"] = 1
    x = b.input(["t", "one"])
    wide = b.both(
        "expand",
        lambda r: [x.ref if r else x.imp, [b.sizes["t"], b.sizes["e"] if r or not b.fault("not expanded") else 1]],
    )
    for op, more in (("_softmax", [1, False]), ("cumsum", [1]), ("sum.dim_IntList", [[1]]), ("mean.dim", [[1]]),
                     ("amax", [[1]]), ("prod.dim_int", [1]), ("_log_softmax", [1, False])):  # fmt: skip
        b.both(op, Val(*wide, (), ()).arguments(*more))
    soft = b.both("_softmax", lambda r: [x.ref if r else x.imp, 1, False])
    b.keep(Val(*soft, ("t", "one"), (None, None)))


@scene("square and its transpose")
def square(b: Build) -> None:
    """``x + x^T``, ``x @ x``: the same tensor twice, in two layouts; equal sizes everywhere."""
    axis = b.axis()
    k = b.mesh[axis]
    b.sizes.update({"n": 2 * k, "m": 2 * k})
    dims = b.pick([(axis, None), (None, axis), (None, None)])
    x, y = b.input(["n", "m"], dims), b.input(["n", "m"], dims)
    swap = b.fault("two equally shaped operands exchanged")
    for name in ("add.Tensor", "sub.Tensor", "mul.Tensor", "maximum"):
        turned = Val(*b.both("t", x.arguments()), ("m", "n"), dims[::-1])
        if dims == (None, None):
            b.both(name, x.arguments(turned))
            b.both("mm", x.arguments(turned))
        ref = b.reference.op(name, x.ref, y.ref)
        imp = b.imp.op(name, *((y.imp, x.imp) if swap else (x.imp, y.imp)))
        b.keep(Val(ref, imp, ("n", "m"), dims))
    if dims[0] == axis:
        full = b.imp.all_gather(x.imp, axis)
        t = (b.reference.op("t", x.ref), b.imp.op("t", full))
        b.keep(Val(b.reference.op("mm", x.ref, x.ref), b.imp.op("mm", x.imp, full), ("n", "m"), dims))
        b.both("mm", lambda r: [x.ref if r else full, t[0 if r else 1]])
        b.reference.op("add.Tensor", x.ref, t[0]), b.imp.op("add.Tensor", full, t[1])
    w = b.input(["n", "m"], [axis, None])
    v = b.input(["n", "m"], [None, axis])
    (
        b.reference.op("add.Tensor", w.ref, v.ref),
        b.imp.op("view", b.imp.op("mm", b.imp.op("t", w.imp), b.imp.op("t", v.imp)), [-1]),
    )
    b.reference.op("mm", w.ref, v.ref), b.imp.op("mm", w.imp, v.imp)
    b.reference.op("mm", v.ref, w.ref), b.imp.op("mm", v.imp, w.imp)


@scene("negative index")
def negative(b: Build) -> None:
    """Indices that count from the end: ``index_range`` excludes them, and a masked index must not have them."""
    axis = b.axis()
    b.dim("t"), b.dim("v", [axis]), b.dim("h")
    ids = b.input(["t"], dtype="int64", high=b.sizes["v"], keep=False)
    table = b.input(["v", "h"], [axis, None], keep=False)
    n = b.sizes["v"] // b.mesh[axis]
    low = b.per_rank(lambda r: b.imp.at(r, axis) * n)
    high = b.per_rank(lambda r: b.imp.at(r, axis) * n + n)
    outside = b.imp.op("bitwise_or.Tensor", b.imp.op("lt.Scalar", ids.imp, low), b.imp.op("ge.Scalar", ids.imp, high))
    index = b.imp.op("masked_fill.Scalar", b.imp.op("sub.Tensor", ids.imp, low), outside, -1)
    ref = b.reference.op("index.Tensor", table.ref, [ids.ref])
    out = b.imp.op("index.Tensor", table.imp, [index])
    if b.rng.random() < 0.5:
        out = b.imp.op("masked_fill.Scalar", out, b.imp.op("unsqueeze", outside, -1), 0.0)
    b.keep(Val(ref, b.imp.all_reduce(out, axis), ("t", "h"), (None, None)))


@scene("broadcast from one rank")
def broadcast(b: Build) -> None:
    """Broadcasts of replicated values (right), of shards and partial sums (wrong)."""
    axis = b.axis()
    b.dim("t", [axis]), b.dim("h")
    x, y = b.input(["t", "h"], [axis, None]), b.input(["t", "h"])
    ranks = b.imp.groups["world"][0]
    z = b.imp.broadcast(y.imp, "world", ranks[-1])
    b.keep(b.like(y, y.ref, z))
    b.imp.broadcast(x.imp, "world", 0)
    part = b.both("sum.dim_IntList", lambda r: [x.ref if r else x.imp, [0]])
    b.keep(Val(part[0], b.imp.broadcast(part[1], "world", 0), ("h",), (None,)))
    b.vals.pop()
    b.keep(Val(part[0], b.imp.all_reduce(part[1], axis), ("h",), (None,)))


@scene("messages around a ring")
def messages(b: Build) -> None:
    """Every rank passes a value on: replicated along the ring (right), sharded over it or a partial sum (wrong)."""
    axes = list(b.mesh)
    axis, other = axes[0], axes[-1]
    b.dim("t", [other]), b.dim("h")
    x, y = b.input(["t", "h"], [other, None]), b.input(["t", "h"])
    shift = b.pick([1, -1])
    b.keep(b.like(y, y.ref, b.imp.exchange(y.imp, axis, shift)))
    b.keep(b.like(y, y.ref, b.imp.exchange(y.imp, "world", shift)))
    passed = b.imp.exchange(x.imp, axis, shift)
    if axis != other:
        b.keep(b.like(x, x.ref, passed))
    part = b.both("sum.dim_IntList", lambda r: [x.ref if r else x.imp, [0]])
    b.keep(Val(part[0], b.imp.all_reduce(b.imp.exchange(part[1], axis, shift), other), ("h",), (None,)))


@scene("microbatches joined again")
def microbatches(b: Build) -> None:
    """Pieces of a batch go through operators one by one and are joined: in order (right), or not (wrong)."""
    axis = b.axis()
    count = b.pick([2, 3])
    b.sizes["n"] = count * b.pick([2, 3])
    b.dim("s"), b.dim("h"), b.dim("k", [axis])
    x, w = b.input(["n", "s", "h"], keep=False), b.input(["h", "k"], [None, axis], keep=False)
    bias, y = b.input(["h"], keep=False), b.input(["k"], [axis], keep=False)
    hop, flat, how = b.rng.random() < 0.5, b.rng.random() < 0.5, b.pick(["relu", "exp", "tanh"])

    def run(w_: Writer, t: object, e: object, ww: object, yy: object, last: str) -> object:
        sizes = w_.shape(t)  # type: ignore[arg-type]
        t = w_.op("add.Tensor", t, e)
        t = w_.op("_softmax", t, 2, False)
        t = w_.op("view", t, [sizes[0] * sizes[1], sizes[2]])
        t = w_.op(last, w_.op("mul.Tensor", w_.op("mm", t, ww), yy))
        if w_ is b.imp and hop and len(b.mesh) > 1:
            other = next(a for a in b.mesh if a != axis)
            t = w_.exchange(t, other)
        t = w_.op("sum.dim_IntList", t, [1])
        if w_ is b.imp:
            t = w_.all_reduce(t, axis)
        return t if flat else w_.op("view", t, [sizes[0], sizes[1]])

    ref = run(b.reference, x.ref, bias.ref, w.ref, y.ref, how)
    pieces = b.imp.op("split.Tensor", x.imp, b.sizes["n"] // count)
    items = [b.imp.item(pieces, i) for i in range(count)]
    odd = b.fault("another function on the last piece")
    parts = [
        run(b.imp, t, bias.imp, w.imp, y.imp, "sin" if odd and i == count - 1 else how) for i, t in enumerate(items)
    ]
    if b.fault("order") or b.rng.random() < 0.2:
        parts.reverse()
    names = ("m",) if flat else ("n", "s")
    b.sizes["m"] = b.sizes["n"] * b.sizes["s"]
    b.keep(Val(ref, b.imp.op("cat", parts, 0), names, (None,) * len(names)))  # type: ignore[arg-type]


@scene("collectives everywhere")
def collectives(b: Build) -> None:
    """Every collective over a group, on one of several placements, whether it fits or not."""
    axes = list(b.mesh)
    world = b.imp.ranks
    b.sizes.update({"n": 2 * world * world, "m": 3 * world})
    a, z = axes[0], axes[-1]
    values = [
        b.input(["n", "m"], d, keep=False) for d in ((None, None), (a, None), (None, z), (a, z if z != a else None))
    ]
    for how, op in (("sum", "sum.dim_IntList"), ("max", "amax"), ("min", "amin")):
        x = b.input(["n", "m", "k"] if "k" in b.sizes else ["n", "m", b.dim("k", [z])], [None, None, z], keep=False)
        part = b.both(op, x.arguments([2]))
        values.append(Val(*part, ("n", "m"), (None, None), (z,), how))
    w = b.imp
    # one group: shards of different sizes along one dimension have no common atomic axes
    group = b.pick([*axes, "world"])
    for v in b.rng.sample(values, 4):
        _all_collectives(b, w, v, group)


def _all_collectives(b: Build, w: Writer, v: Val, group: str) -> None:
    world = w.ranks
    for how in ("sum", "max", "min", "avg"):
        w.all_reduce(v.imp, group, how)
    k = w.size(group)
    n, m = w.shape(v.imp)
    for d, size in ((0, n), (1, m)):
        w.all_gather(v.imp, group, d)
        if size % k == 0:
            for how in ("sum", "max"):
                w.reduce_scatter(v.imp, group, d, how)
    if n % k == 0:
        w.all_to_all(v.imp, group)
    ranks = [w.at(r, group) if group != "world" else r for r in range(world)]
    if m % k == 0:
        first = b.per_rank(lambda r: ranks[r] * (m // k))
        w.op("slice.Tensor", v.imp, 1, first, b.per_rank(lambda r: first.values[r] + m // k))
    w.broadcast(v.imp, "world", 0)
    w.op("mul.Tensor", v.imp, b.per_rank(lambda r: 1.0 if r == 0 else 0.0))
    w.op("div.Tensor", v.imp, float(world))


@scene("whole axes over a shard")
def whole_over_shard(b: Build) -> None:
    """Softmax, norms, cumulative sums and slices along a sharded dimension, as if the shard were the whole."""
    axis = b.axis()
    b.dim("t"), b.dim("h", [axis])
    x = b.input(["t", "h"], [None, axis])
    for op, more in (
        ("_softmax", [1, False]),
        ("_log_softmax", [1, False]),
        ("cumsum", [1]),
        ("flip", [[1]]),
        ("cumprod", [1]),
    ):
        b.map(op, x, *more)
    weight = b.input(["h"], [axis], keep=False)
    for k in range(2):
        w, v = (b.reference, x.ref) if k == 0 else (b.imp, x.imp)
        u = weight.ref if k == 0 else weight.imp
        w.op("rms_norm", v, [w.shape(v)[1]], u, 1e-5)
        w.op("var.correction", v, [1], correction=1)
        w.op("argmax", v, 1)
        w.item(w.op("topk", v, 2, 1), 0)
        w.op("slice.Tensor", v, 1, 0, 2)
    b.keep(Val(*b.both("_softmax", lambda r: [x.ref if r else x.imp, 0, False]), ("t", "h"), (None, axis)))


@scene("ordered axes in two layouts")
def ordered_layouts(b: Build) -> None:
    """Cumulative sums, slices and reversals of a flattened tensor and of its flattened transpose."""
    b.dim("p"), b.dim("q")
    p, q = b.shape(["p", "q"])
    x = b.input(["p", "q"], keep=False)
    moved = b.imp.op("t", x.imp)
    for w, v in ((b.reference, x.ref), (b.imp, moved), (b.imp, x.imp)):
        flat = w.op("reshape", v, [p * q])
        w.op("cumsum", flat, 0)
        w.op("flip", flat, [0])
        w.op("slice.Tensor", flat, 0, 1, p * q)
        w.op("_softmax", flat, 0, False)
        w.item(w.op("sort", flat, 0), 0)
    halves = b.input(["p", "q"], keep=False)
    for w, v in ((b.reference, halves.ref), (b.imp, b.imp.op("t", halves.imp))):
        for d, n in enumerate(w.shape(v)):
            for k in range(n):
                w.op("slice.Tensor", v, d, k, k + 1)
    b.keep(x)
