"""Random steps that communicate: complete a partial value, gather, scatter, exchange, slice by rank."""

from __future__ import annotations

from fractions import Fraction

from emerge.rules.build import Build, Val, floats


def communicate(b: Build) -> bool:
    """A collective that completes, gathers, scatters or moves a value."""
    v = floats(b, lambda v: bool(v.names))
    if v is None:
        return False
    sharded = [d for d, a in enumerate(v.dims) if a]
    if v.partial and b.rng.random() < 0.75:
        return _complete(b, v, b.pick(v.partial))
    if sharded and b.rng.random() < 0.7:
        return _gather(b, v, b.pick(sharded))
    free = [a for a in b.mesh if a not in v.axes()]
    if free:
        return _spread(b, v, b.pick(free))
    return False


def _complete(b: Build, v: Val, axis: str) -> bool:
    rest = tuple(a for a in v.partial if a != axis)
    how = v.how if rest else "none"
    k = b.mesh[axis]
    local = b.local(v.names, v.dims)
    if v.how in ("sum", "max", "min") and b.rng.random() < 0.35:
        options = [d for d, n in enumerate(local) if v.dims[d] is None and n % k == 0 and n > k]
        if options:
            d = b.pick(options)
            target = d
            if b.fault("reduce-scattered along another dimension"):
                same = [e for e in range(len(local)) if local[e] == local[d]]
                target = b.pick(same)
            imp = b.imp.reduce_scatter(v.imp, axis, target, v.how)
            b.keep(Val(v.ref, imp, v.names, (*v.dims[:d], axis, *v.dims[d + 1 :]), rest, how))
            return True
    if b.fault("all-reduce missing"):
        b.keep(b.like(v, v.ref, v.imp, partial=rest, how=how))
        return True
    group, reduction = axis, v.how
    if b.fault("all-reduce over another group"):
        group = b.pick([*b.mesh, "world"])
    if b.fault("all-reduce with another reduction"):
        reduction = b.pick(["sum", "max", "min", "avg"])
    imp = b.imp.all_reduce(v.imp, group, reduction)
    if v.how == "sum" and reduction == "sum" and b.rng.random() < 0.2:
        imp = b.imp.op("mul.Tensor", b.imp.all_reduce(v.imp, group, "avg"), float(k))
    if b.fault("all-reduced twice"):
        imp = b.imp.all_reduce(imp, group, reduction)
    b.keep(b.like(v, v.ref, imp, partial=rest, how=how))
    return True


def _gather(b: Build, v: Val, d: int) -> bool:
    axis = v.dims[d]
    assert axis is not None
    k = b.mesh[axis]
    local = b.local(v.names, v.dims)
    options = [e for e, n in enumerate(local) if e != d and v.dims[e] is None and n % k == 0 and n > k]
    if options and b.rng.random() < 0.5:
        # all-to-all: dimension e is scattered, d joined
        e = b.pick(options)
        if b.rng.random() < 0.5:
            shape_after = [n * k if x == d else n // k if x == e else n for x, n in enumerate(local)]
            imp = b.imp.op("_dtensor.shard_dim_alltoall.default", v.imp, d, e, axis, gives=("float64", shape_after))
        else:
            front = [e, *[x for x in range(len(local)) if x != e]]
            moved = b.imp.op("permute", v.imp, front)
            out = b.imp.all_to_all(moved, axis)
            shape = b.imp.shape(out)
            apart = b.imp.op("view", out, [k, shape[0] // k, *shape[1:]])
            rest = [x for x in range(len(local)) if x != e]
            # dims now: rank, e, then the others in order; the rank goes in front of d
            order: list[int] = []
            for x in range(len(local)):
                if x == d and not b.fault("what arrives is stacked behind, not in front"):
                    order.append(0)
                order.append(1 if x == e else 2 + rest.index(x))
            if 0 not in order:
                order.insert(order.index(2 + rest.index(d)) + 1, 0)
            final = [n * k if x == d else n // k if x == e else n for x, n in enumerate(local)]
            imp = b.imp.op("reshape", b.imp.op("permute", apart, order), final)
        dims = list(v.dims)
        dims[d], dims[e] = None, axis
        b.keep(b.like(v, v.ref, imp, dims=tuple(dims)))
        return True
    target = d
    if b.fault("gathered along another dimension"):
        same = [e for e in range(len(local)) if local[e] == local[d]]
        target = b.pick(same)
    imp = b.imp.all_gather(v.imp, axis, target)
    b.keep(b.like(v, v.ref, imp, dims=(*v.dims[:d], None, *v.dims[d + 1 :])))
    return True


def _spread(b: Build, v: Val, axis: str) -> bool:
    k = b.mesh[axis]
    local = b.local(v.names, v.dims)
    options = [d for d, n in enumerate(local) if v.dims[d] is None and n % k == 0 and n > k]
    choice = b.rng.randrange(4)
    if choice < 2 and options:
        d = b.pick(options)
        size = local[d] // k
        at = b.imp.at
        if b.fault("every rank takes the first block"):
            bounds = b.per_rank(lambda r: 0)
        elif b.fault("blocks in reverse rank order"):
            bounds = b.per_rank(lambda r: (k - 1 - at(r, axis)) * size)
        else:
            bounds = b.per_rank(lambda r: at(r, axis) * size)
        if choice == 0:
            ends = b.per_rank(lambda r: bounds.values[r] + size)
            imp = b.imp.op("slice.Tensor", v.imp, d, bounds, ends)
        else:
            parts = b.imp.op("split.Tensor", v.imp, size, d)
            imp = b.imp.item(parts, b.per_rank(lambda r: bounds.values[r] // size))
        b.keep(b.like(v, v.ref, imp, dims=(*v.dims[:d], axis, *v.dims[d + 1 :])))
        return True
    if v.partial:
        return False
    if choice == 2:
        imp = b.imp.op("div.Tensor", v.imp, float(k))
        b.keep(b.like(v, v.ref, imp, partial=(axis,), how="sum"))
        if b.rng.random() < 0.5:
            b.keep(b.like(v, v.ref, b.imp.all_reduce(imp, axis)))
        return True
    how = b.pick(["max", "min", "avg", "broadcast", "sum"])
    if how == "broadcast":
        imp = b.imp.broadcast(v.imp, axis, 0)
    else:
        imp = b.imp.all_reduce(v.imp, axis, how)
        if how == "sum" and not b.fault("replicated value summed over the ranks"):
            imp = b.imp.op("mul.Tensor", imp, float(Fraction(1, k)))
    b.keep(b.like(v, v.ref, imp))
    return True
