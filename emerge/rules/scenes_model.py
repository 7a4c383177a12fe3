"""Scenes from models: dropout, attention, kernels, fused projections, norms written out, sequence parallelism."""

from __future__ import annotations

from typing import Any

from emerge.graph.model import DType, Ref, TensorType
from emerge.relate.statement import Piece, Statement
from emerge.rules.build import Build, Val
from emerge.rules.pair import placed
from emerge.rules.scenes import scene
from emerge.rules.steps import random_steps
from emerge.rules.writer import Writer


@scene("dropout")
def dropout(b: Build) -> None:
    """Dropout of replicated and of sharded values, with masks that correspond."""
    axis = b.axis()
    b.dim("b"), b.dim("h", [axis])
    x = b.input(["b", "h"], [None, axis])
    y = b.input(["b", "h"])
    for v in (x, y):
        b.masks.append(v.dims)
        out = b.both("native_dropout", v.arguments(0.4, True))
        b.keep(b.like(v, b.reference.item(out[0], 0), b.imp.item(out[1], 0)))
        if b.rng.random() < 0.5:
            b.reference.item(out[0], 1), b.imp.item(out[1], 1)


@scene("dropout of an expanded value")
def dropout_expanded(b: Build) -> None:
    """Every copy of an expanded value is dropped on its own."""
    b.dim("b"), b.dim("h"), b.dim("e")
    x = b.input(["b", "h"])
    wide = b.both("expand", lambda r: [x.ref if r else x.imp, [b.sizes["e"], *b.shape(["b", "h"])]])
    b.masks.append((None, None, None))
    out = b.both("dropout", lambda r: [wide[0 if r else 1], 0.4, True])
    b.keep(Val(*out, ("e", "b", "h"), (None, None, None)))


@scene("attention")
def attention(b: Build) -> None:
    """Scaled dot product attention with heads sharded, grouped or not, causal or with a mask."""
    axis = b.axis()
    k = b.mesh[axis]
    b.dim("b"), b.dim("s"), b.dim("d")
    group = b.pick([1, 2])
    b.sizes["g"] = 2 * k
    b.sizes["h"] = 2 * k * group
    q = b.input(["b", "h", "s", "d"], [None, axis, None, None], keep=False)
    kv = [b.input(["b", "g", "s", "d"], [None, axis, None, None], keep=False) for _ in range(2)]
    args: dict[str, Any] = {"dropout_p": 0.0, "is_causal": b.rng.random() < 0.4}
    operands = [q, *kv]
    if not args["is_causal"] and b.rng.random() < 0.5:
        operands.append(b.input(["s", "s"], keep=False))
    if group > 1:
        args["enable_gqa"] = True
    if b.fault("keys and values exchanged"):
        wrong = [operands[0], operands[2], operands[1], *operands[3:]]
    else:
        wrong = operands
    other = {**args, "is_causal": not args["is_causal"]} if len(operands) == 3 and b.fault("causal or not") else args
    ref = b.reference.op("scaled_dot_product_attention", *[o.ref for o in operands], **args)
    imp = b.imp.op("scaled_dot_product_attention", *[o.imp for o in wrong], **other)
    out = b.keep(Val(ref, imp, ("b", "h", "s", "d"), (None, axis, None, None)))
    moved = b.both("transpose.int", lambda r: [out.ref if r else out.imp, 1, 2])
    b.keep(Val(*moved, ("b", "s", "h", "d"), (None, None, axis, None)))


@scene("attention written out")
def attention_written(b: Build) -> None:
    """Scores, mask of -inf, softmax, values; heads sharded."""
    axis = b.axis()
    b.dim("h", [axis]), b.dim("s"), b.dim("d")
    q, k, v = (b.input(["h", "s", "d"], [axis, None, None], keep=False) for _ in range(3))
    kt = b.both("transpose.int", lambda r: [k.ref if r else k.imp, 1, 2])
    n = b.sizes["s"]
    base = b.both("ones", lambda r: [[n, n]], dtype=DType("bool"))
    mask = b.both("triu", lambda r: [base[0 if r else 1], 1 if r or not b.fault("mask shifted") else 2])
    if b.rng.random() < 0.5:
        score = b.both("bmm", lambda r: [q.ref if r else q.imp, kt[0 if r else 1]])
    else:
        scores, placed_as = ["h", "s", "s"], [axis, None, None]
        empty = b.both("empty.memory_format", lambda r: [list(b.shape(scores) if r else b.local(scores, placed_as))],
                       result=None)  # fmt: skip
        score = b.both(
            "baddbmm", lambda r: [empty[0 if r else 1], q.ref if r else q.imp, kt[0 if r else 1]], beta=0.0, alpha=0.5
        )
    s = b.keep(Val(*score, ("h", "s", "s"), (axis, None, None)))
    masked = b.both("masked_fill.Scalar", lambda r: [s.ref if r else s.imp, mask[0 if r else 1], float("-inf")])
    soft = b.both(
        "_softmax",
        lambda r: [masked[0 if r else 1], -1 if r or not b.fault("softmax over another dimension") else -2, False],
    )
    p = b.keep(Val(*soft, ("h", "s", "s"), (axis, None, None)))
    out = b.both("bmm", lambda r: [p.ref if r else p.imp, v.ref if r else v.imp])
    b.keep(Val(*out, ("h", "s", "d"), (axis, None, None)))


@scene("kernels")
def kernels(b: Build) -> None:
    """Custom kernels with tokens sharded, and (faulty) with the normalised dimension sharded."""
    axis = b.axis()
    b.dim("t", [axis]), b.dim("h", [axis]), b.dim("f", [axis])
    dims = (None, axis) if b.fault("norm over a sharded dimension") else (axis, None)
    x = b.input(["t", "h"], dims)
    y = b.input(["t", "h"], dims)
    w = b.input(["h"], [dims[1]], keep=False)

    def norm(writer: Writer, source: Ref, weight: Ref) -> Ref:
        kind = TensorType("float64", writer.shape(source))
        result = writer.op("empty_like", source)
        node = writer.op("auto_functionalized", "_C.rms_norm.default", elements={1: kind},
                         result=result, input=source, weight=weight, epsilon=1e-5)  # fmt: skip
        return writer.item(node, 1)

    def fused(writer: Writer, source: Ref, residual: Ref, weight: Ref) -> tuple[Ref, Ref]:
        kind = TensorType("float64", writer.shape(source))
        node = writer.op("auto_functionalized", "_C.fused_add_rms_norm.default", elements={1: kind, 2: kind},
                         input=source, residual=residual, weight=weight, epsilon=1e-5)  # fmt: skip
        return writer.item(node, 1), writer.item(node, 2)

    def gate(writer: Writer, source: Ref) -> Ref:
        t, f = writer.shape(source)
        half = TensorType("float64", (t, f // 2))
        out = writer.op("empty_like", writer.op("slice.Tensor", source, 1, 0, f // 2))
        node = writer.op("auto_functionalized", "_C.silu_and_mul.default", elements={1: half},
                         out=out, input=source)  # fmt: skip
        return writer.item(node, 1)

    b.keep(Val(norm(b.reference, x.ref, w.ref), norm(b.imp, x.imp, w.imp), ("t", "h"), dims))
    left, right = fused(b.reference, x.ref, y.ref, w.ref), fused(b.imp, x.imp, y.imp, w.imp)
    for r, i in zip(left, right):
        b.keep(Val(r, i, ("t", "h"), dims))
    b.sizes["two"] = 2
    if b.rng.random() < 0.5:
        g = b.input(["t", "two", "f"], [None, None, axis], keep=False)
        fdims: tuple[str | None, ...] = (None, axis)
    else:
        g = b.input(["t", "two", "f"], [axis, None, None], keep=False)
        fdims = (axis, None)
    b.sizes["twof"] = 2 * b.sizes["f"]
    if fdims[1] and b.fault("gate and up sharded as one dimension"):
        flat = b.input(["t", "twof"], [None, axis], keep=False)
        b.keep(Val(gate(b.reference, flat.ref), gate(b.imp, flat.imp), ("t", "f"), fdims))
        return
    ref = b.reference.op("reshape", g.ref, [b.sizes["t"], 2 * b.sizes["f"]])
    local = b.local(["t", "f"], fdims)
    imp = b.imp.op("reshape", g.imp, [local[0], 2 * local[1]])
    b.keep(Val(gate(b.reference, ref), gate(b.imp, imp), ("t", "f"), fdims))


@scene("partial sum of two terms")
def kernel_partial(b: Build) -> None:
    """The sum inside a fused kernel of two partial sums."""
    axis = b.axis()
    b.dim("t"), b.dim("k", [axis]), b.dim("h")
    parts = []
    for _ in range(2):
        x, w = b.input(["t", "k"], [None, axis], keep=False), b.input(["k", "h"], [axis, None], keep=False)
        parts.append(b.both("mm", x.arguments(w)))
    weight = b.input(["h"], keep=False)
    out = []
    for k, writer in enumerate((b.reference, b.imp)):
        kind = TensorType("float64", writer.shape(parts[0][k]))
        node = writer.op("auto_functionalized", "_C.fused_add_rms_norm.default", elements={1: kind, 2: kind},
                         input=parts[0][k], residual=parts[1][k], weight=(weight.ref, weight.imp)[k],
                         epsilon=1e-5)  # fmt: skip
        out.append((writer.item(node, 1), writer.item(node, 2)))
    b.keep(Val(out[0][1], out[1][1], ("t", "h"), (None, None), (axis,), "sum"))
    b.keep(Val(out[0][1], b.imp.all_reduce(out[1][1], axis), ("t", "h"), (None, None)))


@scene("fused projection")
def fused_projection(b: Build) -> None:
    """Rows [q | k | v] of one weight, every part sharded by itself; split after the product."""
    axis = b.axis()
    k = b.mesh[axis]
    b.dim("t"), b.dim("m")
    parts = [k * n for n in b.rng.sample([2, 3, 5], 3)]
    total = sum(parts)
    local = [p // k for p in parts]
    x = b.input(["t", "m"])
    name = f"in{b._inputs}"
    b._inputs += 1
    m = b.sizes["m"]
    ref = b.reference.input(name, [total, m])
    imp = b.imp.input(name, [sum(local), m])
    start = own = 0
    for p, q in zip(parts, local):
        plain = placed(name, [p, m], [axis, None], b.mesh)
        b.statements.append(
            Statement(Piece(name, ((0, start, start + p),)), Piece(name, ((0, own, own + q),)), plain.axes)
        )
        start, own = start + p, own + q
    whole = b.both("mm", lambda r: [x.ref if r else x.imp, b.reference.op("t", ref) if r else b.imp.op("t", imp)])
    sizes = list(local)
    if b.fault("split at other places"):
        b.rng.shuffle(sizes)
    cut = (b.reference.op("split_with_sizes", whole[0], parts, 1), b.imp.op("split_with_sizes", whole[1], sizes, 1))
    for i, p in enumerate(parts):
        b.sizes[f"q{i}"] = p
        b.keep(Val(b.reference.item(cut[0], i), b.imp.item(cut[1], i), ("t", f"q{i}"), (None, axis)))
    if b.rng.random() < 0.4:
        for w, parts_of in ((b.reference, cut[0]), (b.imp, cut[1])):
            w.op("cat", [w.item(parts_of, i) for i in range(3)], 1)


@scene("norm written out")
def norm_written(b: Build) -> None:
    """A norm over a sharded dimension through its decomposition into sums."""
    axis = b.axis()
    b.dim("t"), b.dim("h", [axis])
    x = b.input(["t", "h"], [None, axis])
    w = b.input(["h"], [axis], keep=False)

    def norm(writer: Writer, v: Ref, weight: Ref, parallel: bool) -> list[Ref]:
        mean = writer.op("mean.dim", writer.op("square", v), [-1], True)
        if parallel and not b.fault("all-reduce missing"):
            how = b.pick(["avg", "sum"])
            mean = writer.all_reduce(mean, axis, how)
            if how == "sum" and not b.fault("mean not divided by the number of ranks"):
                mean = writer.op("div.Tensor", mean, float(b.mesh[axis]))
        root = writer.op("rsqrt", writer.op("add.Tensor", mean, 1e-5))
        return [mean, root, writer.op("mul.Tensor", writer.op("mul.Tensor", v, root), weight)]

    left, right = norm(b.reference, x.ref, w.ref, False), norm(b.imp, x.imp, w.imp, True)
    b.sizes["one"] = 1
    b.keep(Val(left[0], right[0], ("t", "one"), (None, None)))
    b.keep(Val(left[2], right[2], ("t", "h"), (None, axis)))


@scene("block of a transformer")
def block(b: Build) -> None:
    """Column-parallel, activation, row-parallel, reduce or reduce-scatter, residual, and random steps."""
    axis = b.axis()
    b.dim("s", [axis]), b.dim("m"), b.dim("f", [axis])
    sequence = b.rng.random() < 0.5
    x = b.input(["s", "m"], [axis if sequence else None, None])
    up, down = b.input(["m", "f"], [None, axis], keep=False), b.input(["f", "m"], [axis, None], keep=False)
    bias = b.input(["m"], keep=False)
    whole = b.imp.all_gather(x.imp, axis) if sequence else x.imp
    h = (b.reference.op("mm", x.ref, up.ref), b.imp.op("mm", whole, up.imp))
    h = (b.reference.op("gelu", h[0]), b.imp.op("gelu", h[1]))
    out = (b.reference.op("mm", h[0], down.ref), b.imp.op("mm", h[1], down.imp))
    ref = b.reference.op("add.Tensor", out[0], bias.ref)
    early = b.fault("bias added on every rank")
    part = b.imp.op("add.Tensor", out[1], bias.imp) if early else out[1]
    done = b.imp.reduce_scatter(part, axis) if sequence else b.imp.all_reduce(part, axis)
    if not early:
        done = b.imp.op("add.Tensor", done, bias.imp)
    dims = (axis if sequence else None, None)
    y = b.keep(Val(ref, done, ("s", "m"), dims))
    if not b.fault("residual dropped"):
        b.keep(Val(*b.both("add.Tensor", lambda r: [x.ref if r else x.imp, y.ref if r else y.imp]), ("s", "m"), dims))
    random_steps(b, b.rng.randint(0, 6))


@scene("sum of three terms")
def three_terms(b: Build) -> None:
    """x + (y + bias) on one side, another order on the other; the inner sum sometimes seen through a transpose."""
    axis = b.axis()
    b.dim("s", [axis]), b.dim("m")
    shard = b.pick([axis, None])
    x, y = (b.input(["s", "m"], [shard, None], keep=False) for _ in range(2))
    bias = b.input(["m"], keep=False)
    if b.rng.random() < 0.5:
        turned = b.reference.op("transpose.int", y.ref, 0, 1)
        column = b.reference.op("unsqueeze", bias.ref, 1)
        inner = b.reference.op("transpose.int", b.reference.op("add.Tensor", turned, column), 0, 1)
    else:
        inner = b.reference.op("add.Tensor", *b.pick([[y.ref, bias.ref], [bias.ref, y.ref]]))
    ref = b.reference.op("add.Tensor", *b.pick([[x.ref, inner], [inner, x.ref]]))
    first, last = b.pick([[y.imp, bias.imp], [bias.imp, y.imp]])
    if b.fault("a term added twice"):
        last = first
    part = b.imp.op("add.Tensor", *b.pick([[x.imp, first], [first, x.imp]]))
    out = b.imp.op("add.Tensor", *b.pick([[part, last], [last, part]]))
    b.keep(Val(ref, out, ("s", "m"), (shard, None)))
