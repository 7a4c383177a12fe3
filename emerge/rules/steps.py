"""Random steps: one operator on both sides, with the placement a correct program has, and faults where those happen."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from emerge.rules.build import Build, Val, floats
from emerge.rules.steps_mesh import communicate
from emerge.rules.writer import Unwritable

#: Unary functions that are safe on any finite input, with their attributes: none that jumps, or turns the rounding
#: error of a large argument into another value.
UNARY: list[tuple[str, tuple[Any, ...]]] = [
    *[(n, ()) for n in ("tanh", "sigmoid", "relu", "silu", "erf", "abs", "neg", "square", "atan")],
    ("softplus", ()),
    ("gelu", ()), ("leaky_relu", (0.1,)), ("elu", ()), ("clamp", (-0.7, 0.9)), ("pow.Tensor_Scalar", (2,)),
    ("pow.Tensor_Scalar", (3,)), ("mul.Tensor", (1.7,)), ("add.Tensor", (0.3,)), ("div.Tensor", (1.9,)),
    ("sub.Tensor", (0.4,)), ("rsub.Scalar", (0.6,)), ("hardtanh", ()), ("mish", ()),
]  # fmt: skip
LINEAR: list[tuple[str, tuple[Any, ...]]] = [
    ("neg", ()),
    ("mul.Tensor", (0.7,)),
    ("div.Tensor", (1.3,)),
    ("mul.Scalar", (-2,)),
]
MONOTONE: list[tuple[str, tuple[Any, ...]]] = [("tanh", ()), ("sigmoid", ()), ("relu", ())]
REDUCTIONS = {"sum.dim_IntList": "sum", "amax": "max", "amin": "min", "prod.dim_int": "prod", "mean.dim": "sum"}

Step = Callable[[Build], bool]


def unary(b: Build) -> bool:
    """A pointwise function; of a partial value only where it passes."""
    v = floats(b)
    if v is None:
        return False
    table = UNARY if not v.partial else LINEAR if v.how == "sum" else MONOTONE if v.how in ("max", "min") else []
    if v.partial and b.fault("a non-linear function of a partial value"):
        table = UNARY
    if not table:
        return False
    op, args = b.pick(table)
    other, more = op, args
    if b.fault("another function or constant"):
        other, more = b.pick(UNARY)
    ref = b.reference.op(op, v.ref, *args)
    imp = b.imp.op(other, v.imp, *more)
    b.keep(b.like(v, ref, imp))
    return True


def positive(b: Build) -> bool:
    """Functions that need a positive operand of moderate size."""
    v = floats(b, lambda v: not v.partial)
    if v is None:
        return False
    bounded = b.map("exp", b.map("tanh", v))
    b.map(b.pick(["log", "sqrt", "rsqrt", "reciprocal", "sin", "cos", "ceil"]), bounded)
    return True


def binary(b: Build) -> bool:
    """Two operands of which one broadcasts over leading dimensions of the other."""
    v = floats(b)
    if v is None or not v.names:
        return False
    op = b.pick(["add.Tensor", "sub.Tensor", "mul.Tensor", "div.Tensor", "maximum", "minimum", "where"])

    def fits(w: Val) -> bool:
        return w.kind == "f" and len(w.names) <= len(v.names) and v.names[len(v.names) - len(w.names) :] == w.names

    fitting = [w for w in b.vals if fits(w) and w.dims == v.dims[len(v.dims) - len(w.dims) :]]
    w = b.pick(fitting) if fitting and b.rng.random() < 0.6 else _weight(b, v)
    if w is None:
        return False
    bad = b.fault("partial values combined as if they were whole")
    if v.partial or w.partial:
        same = v.partial == w.partial and v.how == w.how
        if op in ("add.Tensor", "sub.Tensor") and not bad and v.how in ("sum", "none") and w.how in ("sum", "none"):
            if not same:
                return _add_to_partial(b, v, w)
        elif op == "mul.Tensor" and not bad and not (v.partial and w.partial):
            held = v if v.partial else w
            if held.how != "sum" or set(held.partial) & {a for a in (w if held is v else v).dims if a}:
                return False
        elif not bad:
            return False
    partial, how = (v.partial, v.how) if v.partial else (w.partial, w.how)
    left, right = (v, w) if b.rng.random() < 0.7 else (w, v)
    swapped = b.fault("operands exchanged")
    if op == "where":
        if v.partial or w.partial:
            return False
        cond = b.both("gt.Scalar", lambda r: [v.ref if r else v.imp, 0.0])
        ref, imp = b.both(
            "where.self", lambda r: [cond[0 if r else 1], left.ref if r else left.imp, right.ref if r else right.imp]
        )
    else:
        ref = b.reference.op(op, left.ref, right.ref)
        imp = b.imp.op(op, right.imp, left.imp) if swapped else b.imp.op(op, left.imp, right.imp)
    b.keep(b.like(v, ref, imp, partial=partial, how=how))
    return True


def _weight(b: Build, v: Val) -> Val | None:
    """A new input for the last one or two dimensions of ``v``."""
    n = b.rng.randint(1, min(2, len(v.names)))
    return b.input(v.names[-n:], v.dims[-n:])


def _add_to_partial(b: Build, v: Val, w: Val) -> bool:
    """A replicated term added to a partial sum: divided by the number of ranks, or on one rank only."""
    part, term = (v, w) if v.partial else (w, v)
    if term.partial or set(part.partial) & {a for a in term.dims if a} or len(part.names) < len(term.names):
        return False
    ref = b.reference.op("add.Tensor", part.ref, term.ref)
    group = part.partial
    count = 1
    for a in group:
        count *= b.mesh[a]
    if b.fault("a replicated term added on every rank"):
        share = term.imp
    elif b.rng.random() < 0.5 or set(group) != set(b.mesh):
        share = b.imp.op("div.Tensor", term.imp, float(count))
    else:
        values = b.per_rank(lambda r: 1.0 if r == 0 else 0.0)
        if b.fault("rank weights that do not add up to one"):
            values = b.per_rank(lambda r: 1.0 if r == 0 else 0.5)
        share = b.imp.op("mul.Tensor", term.imp, values)
    b.keep(b.like(part, ref, b.imp.op("add.Tensor", part.imp, share)))
    return True


def matmul(b: Build) -> bool:
    """``x @ w`` with w replicated, column-parallel or row-parallel."""
    v = floats(b, lambda v: len(v.names) >= 2)
    if v is None:
        return False
    k, axis = v.names[-1], v.dims[-1]
    free = [a for a in b.mesh if a not in v.axes()]
    column = b.pick(free) if free and b.rng.random() < 0.5 else None
    n = b.dim(f"n{len(b.sizes)}", [column] if column else [])
    held = axis
    if v.partial and v.how != "sum":
        return False
    w = b.input([k, n], [held, column], keep=False)
    rows = b.rng.random() < 0.4 and len(v.names) == 2
    if rows:
        ref, imp = b.both("mm", lambda r: [v.ref if r else v.imp, w.ref if r else w.imp])
    else:
        ref, imp = b.both("matmul", lambda r: [v.ref if r else v.imp, w.ref if r else w.imp])
    partial = tuple(sorted({*v.partial, *([axis] if axis else [])}))
    b.keep(Val(ref, imp, (*v.names[:-1], n), (*v.dims[:-1], column), partial, "sum" if partial else "none"))
    return True


def bilinear(b: Build) -> bool:
    """Products of two values of the program: scores, addmm, einsum."""
    v = floats(b, lambda v: len(v.names) == 2 and not v.partial)
    if v is None:
        return False
    w = floats(
        b, lambda w: len(w.names) == 2 and w.names[-1] == v.names[-1] and w.dims[-1] == v.dims[-1] and not w.partial
    )
    if w is None or (w.dims[0] and w.dims[0] in v.axes()):
        return False
    t = b.both("t", lambda r: [w.ref if r else w.imp])
    partial = (v.dims[-1],) if v.dims[-1] else ()
    names, dims = (v.names[0], w.names[0]), (v.dims[0], w.dims[0])
    style = b.rng.randrange(3)
    if style == 0 and not partial:
        bias = b.input([names[1]], [dims[1]])
        beta, alpha = b.pick([(1, 1), (0.5, 2), (0, 1)])
        other = 1 if beta == 0 and b.fault("beta ignored") else beta
        kw = {"beta": beta, "alpha": alpha}
        ref = b.reference.op("addmm", bias.ref, v.ref, t[0], **kw)
        imp = b.imp.op("addmm", bias.imp, v.imp, t[1], **{**kw, "beta": other})
    elif style == 1:
        ref, imp = b.both("mm", lambda r: [v.ref if r else v.imp, t[0 if r else 1]])
    else:
        ref = b.reference.op("mm", v.ref, t[0])
        imp = b.imp.op("matmul", v.imp, t[1])
    b.keep(Val(ref, imp, names, dims, partial, "sum" if partial else "none"))
    return True


def reduce(b: Build) -> bool:
    """A reduction over one dimension, sharded or not."""
    v = floats(b, lambda v: len(v.names) >= 2)
    if v is None:
        return False
    d = b.rng.randrange(len(v.names))
    op = b.pick(list(REDUCTIONS))
    how = REDUCTIONS[op]
    axis = v.dims[d]
    if v.partial and v.how != how and not b.fault("reduced with another reduction than the partial's"):
        return False
    if axis and axis in v.partial:
        return False
    keepdim = b.rng.random() < 0.3
    arg: Any = d if op.startswith("prod") else [d]
    e = d
    if b.fault("reduced over another dimension"):
        same = [k for k in range(len(v.names)) if k != d and b.local(v.names, v.dims)[k] == b.local(v.names, v.dims)[d]]
        e = b.pick(same) if same else d
    ref = b.reference.op(op, v.ref, arg, keepdim)
    imp = b.imp.op(op, v.imp, e if op.startswith("prod") else [e], keepdim)
    if op == "mean.dim" and axis and not b.fault("mean over a shard taken for a part of the mean"):
        imp = b.imp.op("div.Tensor", imp, float(b.mesh[axis]))
    partial = tuple(sorted({*v.partial, *([axis] if axis else [])}))
    if keepdim:
        one = f"one{len(b.sizes)}"
        b.sizes[one] = 1
        names, dims = (*v.names[:d], one, *v.names[d + 1 :]), (*v.dims[:d], None, *v.dims[d + 1 :])
    else:
        names, dims = v.names[:d] + v.names[d + 1 :], v.dims[:d] + v.dims[d + 1 :]
    b.keep(Val(ref, imp, names, dims, partial, how if partial else "none"))
    return True


def whole_axis(b: Build) -> bool:
    """Softmax, norms, cumulative sums and the like along a local dimension."""
    v = floats(b, lambda v: bool(v.names) and (not v.partial or b.fault_rate > 0))
    if v is None:
        return False
    local = [d for d, a in enumerate(v.dims) if a is None]
    if b.fault("a whole-axis operator over a sharded dimension"):
        local = list(range(len(v.dims)))
    if not local:
        return False
    d = b.pick(local)
    op = b.pick(["_softmax", "_log_softmax", "cumsum", "cumprod", "topk", "sort", "layer_norm", "rms_norm", "var",
                 "argmax",
                 "logsumexp", "flip", "norm"])  # fmt: skip
    if v.partial and op != "cumsum" and not b.faults:
        return False
    if op in ("_softmax", "_log_softmax"):
        b.map(op, v, d, False)
    elif op in ("cumsum", "cumprod"):
        b.map(op, v, d)
    elif op == "flip":
        b.map(op, v, [d])
    elif op in ("topk", "sort"):
        args = [min(2, b.shape(v.names)[d]), d] if op == "topk" else [d]
        pair = b.both(op, lambda r: [v.ref if r else v.imp, *args])
        for k in range(2):
            ref, imp = b.reference.item(pair[0], k), b.imp.item(pair[1], k)
            name = v.names[d]
            if op == "topk":
                name = f"top{b.sizes[v.names[d]]}"
                b.sizes[name] = min(2, b.shape(v.names)[d])
            names = (*v.names[:d], name, *v.names[d + 1 :])
            b.keep(b.like(v, ref, imp, names=names, kind="i" if k else "f"))
    elif op in ("layer_norm", "rms_norm"):
        if v.dims[-1] is not None:
            return False
        size = [b.shape(v.names)[-1]]
        weight = b.input([v.names[-1]], keep=False)
        if op == "rms_norm":
            ref, imp = b.both(
                "rms_norm", lambda r: [v.ref if r else v.imp, size, weight.ref if r else weight.imp, 1e-5]
            )
        else:
            bias = b.input([v.names[-1]], keep=False)
            ref, imp = b.both("layer_norm", lambda r: [v.ref if r else v.imp, size, weight.ref if r else weight.imp,
                                                       bias.ref if r else bias.imp, 1e-5])  # fmt: skip
        b.keep(b.like(v, ref, imp))
    else:
        rest = {
            "var": (([d],), {"correction": 1}),
            "argmax": ((d,), {}),
            "logsumexp": (([d],), {}),
            "norm": ((2, [d]), {}),
        }[op]
        name = {"var": "var.correction", "norm": "linalg_vector_norm"}.get(op, op)
        ref, imp = b.both(name, lambda r: [v.ref if r else v.imp, *rest[0]], **rest[1])
        b.keep(b.like(v, ref, imp, names=v.names[:d] + v.names[d + 1 :], dims=v.dims[:d] + v.dims[d + 1 :],
                      kind="i" if op == "argmax" else "f"))  # fmt: skip
    return True


def rearrange(b: Build) -> bool:
    """Permutations, views that merge or split, unsqueeze, expand."""
    v = floats(b, lambda v: len(v.names) >= 2)
    if v is None:
        return False
    kind = b.pick(["transpose", "permute", "merge", "unsqueeze", "expand", "split", "ragged"])
    n = len(v.names)
    if kind in ("transpose", "permute"):
        order = list(range(n))
        if kind == "transpose":
            i, j = b.rng.sample(range(n), 2)
            order[i], order[j] = order[j], order[i]
        else:
            b.rng.shuffle(order)
        names, dims = tuple(v.names[k] for k in order), tuple(v.dims[k] for k in order)
        ref = b.reference.op("permute", v.ref, order)
        if b.fault("a view where a permutation belongs"):
            imp = b.imp.op("reshape", v.imp, list(b.local(names, dims)))
        else:
            imp = b.imp.op("permute", v.imp, order)
        b.keep(b.like(v, ref, imp, names=names, dims=dims))
    elif kind == "merge":
        d = b.rng.randrange(n - 1)
        if (
            v.dims[d + 1] is not None
            and b.shape(v.names)[d] > 1
            and not b.fault("dimensions merged across a sharded one")
        ):
            return False
        name = f"m{len(b.sizes)}"
        b.sizes[name] = b.sizes[v.names[d]] * b.sizes[v.names[d + 1]]
        names, dims = (
            (*v.names[:d], name, *v.names[d + 2 :]),
            (*v.dims[:d], v.dims[d] or v.dims[d + 1], *v.dims[d + 2 :]),
        )
        ref = b.reference.op("view", v.ref, list(b.shape(names)))
        imp = b.imp.op("view", v.imp, list(b.local(names, dims)))
        merged = b.keep(b.like(v, ref, imp, names=names, dims=dims))
        if b.rng.random() < 0.6:
            ref, imp = b.both(
                "view",
                lambda r: [merged.ref if r else merged.imp, list(b.shape(v.names) if r else b.local(v.names, v.dims))],
            )
            b.keep(b.like(v, ref, imp))
    elif kind == "split":
        d = b.rng.randrange(n)
        size, local = b.shape(v.names)[d], b.local(v.names, v.dims)[d]
        inner = next((k for k in (2, 3, 5) if local % k == 0 and local > k), 0)
        if not inner:
            return False
        x, y = f"s{len(b.sizes)}", f"t{len(b.sizes)}"
        b.sizes[x], b.sizes[y] = size // inner, inner
        names, dims = (*v.names[:d], x, y, *v.names[d + 1 :]), (*v.dims[:d], v.dims[d], None, *v.dims[d + 1 :])
        ref = b.reference.op("view", v.ref, list(b.shape(names)))
        imp = b.imp.op("view", v.imp, list(b.local(names, dims)))
        b.keep(b.like(v, ref, imp, names=names, dims=dims))
    elif kind == "ragged":
        if any(v.dims[:2]):
            return False
        p, q = b.shape(v.names)[:2]
        ref, imp = b.both(
            "reshape", lambda r: [v.ref if r else v.imp, [q, p, *(b.shape if r else _localise(b, v))(v.names)[2:]]]
        )
        b.keep(b.like(v, ref, imp, names=(v.names[1], v.names[0], *v.names[2:])))
    else:
        d = b.rng.randrange(n + 1)
        one = f"u{len(b.sizes)}"
        b.sizes[one] = 1
        names, dims = (*v.names[:d], one, *v.names[d:]), (*v.dims[:d], None, *v.dims[d:])
        ref, imp = b.both("unsqueeze", lambda r: [v.ref if r else v.imp, d])
        out = b.keep(b.like(v, ref, imp, names=names, dims=dims))
        if kind == "expand":
            wide = f"e{len(b.sizes)}"
            b.sizes[wide] = b.pick([2, 3])
            names = (*names[:d], wide, *names[d + 1 :])
            ref, imp = b.both(
                "expand", lambda r: [out.ref if r else out.imp, list(b.shape(names) if r else b.local(names, dims))]
            )
            b.keep(b.like(v, ref, imp, names=names, dims=dims))
    return True


def _localise(b: Build, v: Val) -> Callable[[Any], tuple[int, ...]]:
    return lambda names: b.local(names, v.dims)


def pieces(b: Build) -> bool:
    """Slices, splits and concatenations along local dimensions."""
    v = floats(b, lambda v: any(a is None and n > 2 for a, n in zip(v.dims, b.shape(v.names))))
    if v is None:
        return False
    d = b.pick([k for k, (a, n) in enumerate(zip(v.dims, b.shape(v.names))) if a is None and n > 2])
    n = b.shape(v.names)[d]
    kind = b.pick(["slice", "halves", "cat", "cat_other", "stride", "select"])
    name = f"p{len(b.sizes)}"
    if kind in ("slice", "stride"):
        start, stop = b.rng.randrange(0, n - 1), b.rng.randrange(2, n + 1)
        if stop <= start + 1:
            start, stop = 0, n - 1
        step = 1 if kind == "slice" else 2
        shift = 1 if b.fault("a slice at another offset") and stop < n else 0
        b.sizes[name] = -(-(stop - start) // step)
        ref = b.reference.op("slice.Tensor", v.ref, d, start, stop, step)
        imp = b.imp.op("slice.Tensor", v.imp, d, start + shift, stop + shift, step)
        b.keep(b.like(v, ref, imp, names=(*v.names[:d], name, *v.names[d + 1 :])))
    elif kind == "select":
        index = b.rng.randrange(n)
        other = b.rng.randrange(n) if b.fault("another index") else index
        ref, imp = b.reference.op("select.int", v.ref, d, index), b.imp.op("select.int", v.imp, d, other)
        b.keep(b.like(v, ref, imp, names=v.names[:d] + v.names[d + 1 :], dims=v.dims[:d] + v.dims[d + 1 :]))
    elif kind == "halves":
        half = next((n // k for k in (2, 3, 5, 7) if n % k == 0), 0)
        if half < 2:
            return False
        b.sizes[name] = half
        parts = b.both("split.Tensor", lambda r: [v.ref if r else v.imp, half, d])
        count = n // half
        order = list(range(count))
        if b.fault("pieces in another order"):
            b.rng.shuffle(order)
        names = (*v.names[:d], name, *v.names[d + 1 :])
        out = [(b.reference.item(parts[0], k), b.imp.item(parts[1], order[k])) for k in range(count)]
        for ref, imp in out[:2]:
            b.keep(b.like(v, ref, imp, names=names))
        if b.rng.random() < 0.5:
            ref = b.reference.op("cat", [r for r, _ in out], d)
            b.keep(b.like(v, ref, b.imp.op("cat", [i for _, i in out], d)))
    else:
        w = (
            v
            if kind == "cat"
            else floats(
                b,
                lambda w: (
                    len(w.names) == len(v.names)
                    and w.partial == v.partial
                    and w.how == v.how
                    and all(
                        k == d or (p, q) == (s, t)
                        for k, (p, q, s, t) in enumerate(zip(w.names, w.dims, v.names, v.dims))
                    )
                    and w.dims[d] is None
                ),
            )
        )
        if w is None:
            return False
        total = f"c{len(b.sizes)}"
        b.sizes[total] = n + b.sizes[w.names[d]]
        first, second = (w, v) if b.fault("concatenated in another order") else (v, w)
        ref = b.reference.op("cat", [v.ref, w.ref], d)
        imp = b.imp.op("cat", [first.imp, second.imp], d)
        b.keep(b.like(v, ref, imp, names=(*v.names[:d], total, *v.names[d + 1 :])))
    return True


def mask(b: Build) -> bool:
    """Masks by comparison, -inf in masked rows, zeros by multiplication."""
    v = floats(b, lambda v: bool(v.names) and not v.partial)
    if v is None:
        return False
    cond = b.both("gt.Scalar", lambda r: [v.ref if r else v.imp, 0.0])
    kind = b.pick(["fill", "zero", "times", "inf", "not"])
    x = floats(b, lambda w: w.names == v.names and w.dims == v.dims and (not w.partial or kind in ("zero", "times")))
    x = x or v

    def args(r: bool, *more: Any) -> list[Any]:
        return [x.ref if r else x.imp, cond[0 if r else 1], *more]

    if kind == "not":
        other = b.both("logical_not", lambda r: [cond[0 if r else 1]])
        ref, imp = b.both("masked_fill.Scalar", lambda r: [x.ref if r else x.imp, other[0 if r else 1], 0.0])
    elif kind == "times":
        ref, imp = b.both("mul.Tensor", args)
    else:
        value = {"fill": 1.5, "zero": 0.0, "inf": float("-inf")}[kind]
        if x.partial and kind != "zero":
            return False
        ref, imp = b.both("masked_fill.Scalar", lambda r: args(r, value))
    out = b.keep(b.like(x, ref, imp))
    local = [d for d, a in enumerate(out.dims) if a is None]
    if kind == "inf" and local:
        b.map("_softmax", out, b.pick(local), False)
    return True


STEPS: list[tuple[Step, int]] = [
    (unary, 3), (positive, 1), (binary, 4), (matmul, 3), (bilinear, 2), (reduce, 3), (whole_axis, 2), (rearrange, 4),
    (pieces, 3), (communicate, 5), (mask, 1),
]  # fmt: skip


def random_steps(b: Build, count: int) -> None:
    """Takes ``count`` steps; one that does not fit is skipped."""
    table = [s for s, weight in STEPS for _ in range(weight)]
    done = tries = 0
    while done < count and tries < 8 * count:
        tries += 1
        try:
            done += bool(b.pick(table)(b))
        except Unwritable:
            continue
