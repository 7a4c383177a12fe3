"""Layout operators: view, permute, expand, slice, split, cat and the like.

Rearrangements become layouts (free in the derivation). Slices that cut a dimension into equal pieces select an index of
the outer axis; other slices and concatenations are operators on whole, ordered axes.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

from emerge.facts.families import FamilyNode, RankVector
from emerge.facts.lower import Iter, Lowering, Made, Multi, Tensor, Tie, Unsupported, Void, axis, lowers, whole
from emerge.facts.ops.blocks import placed_range
from emerge.facts.ops.collective import all_gather
from emerge.facts.ops.joined import cat_of_pieces, joined
from emerge.facts.shapes import normalize_dim, resolve_view, slice_bounds
from emerge.graph.model import DType, is_floating


def view(low: Lowering, x: Tensor, shape: Sequence[int]) -> Tensor:
    """``x`` in row-major order under another shape.

    Dimensions are grouped where the products meet; inside a group strides are compared exactly. Where a boundary of one
    side falls inside an axis of the other without dividing it, there are no common axes: the view becomes an operator
    that reads its dimensions whole and in order.
    """
    if tuple(shape) == x.shape:
        return x
    if prod(shape) == 0:
        raise Unsupported("has no elements")
    if low.node is not None and low.node.name in low.flat_views:
        return _reshape(low, x, shape)
    ties: list[tuple[int, int, int, int, int]] = []
    i = j = 0
    while i < len(x.shape) or j < len(shape):
        gi: list[int] = []
        gj: list[int] = []
        pi = pj = 1
        while True:
            if pi <= pj and i < len(x.shape) and (pi < pj or not gi):
                gi.append(i)
                pi *= x.shape[i]
                i += 1
            elif j < len(shape) and (pj < pi or not gj):
                gj.append(j)
                pj *= shape[j]
                j += 1
            elif i < len(x.shape) and pi < pj:
                gi.append(i)
                pi *= x.shape[i]
                i += 1
            else:
                break
        if pi != pj:
            raise Unsupported(f"view of {list(x.shape)} as {list(shape)}")
        made = _group_ties(gi, [x.shape[k] for k in gi], gj, [shape[k] for k in gj])
        if made is None:
            return _reshape(low, x, shape)
        ties += made
    result = low.layout(x, shape, ties)
    low.view_of[result.id] = x
    return low.remember(result, "view", [x], tuple(shape))


def _group_ties(
    gi: list[int], ni: list[int], gj: list[int], nj: list[int]
) -> list[tuple[int, int, int, int, int]] | None:
    """Ties between the dimensions of one group, None when boundaries do not nest."""
    ties = []
    for a, (da, na) in enumerate(zip(gi, ni)):
        base_a = prod(ni[a + 1 :])
        for b, (db, nb) in enumerate(zip(gj, nj)):
            base_b = prod(nj[b + 1 :])
            low, high = max(base_a, base_b), min(base_a * na, base_b * nb)
            if low >= high:
                continue
            if low % base_a or low % base_b or high % low:
                return None
            ties.append((db, low // base_b, da, low // base_a, high // low))
    return ties


def _reshape(low: Lowering, x: Tensor, shape: Sequence[int]) -> Tensor:
    iters = [Iter(n, "pos", whole(n, d)) for d, n in enumerate(shape)]
    iters += [Iter(n, "o", (), ((0, whole(n, d)),)) for d, n in enumerate(x.shape)]
    return low.op(f"reshape#{list(x.shape)}#{list(shape)}", "copy", [x], iters, shape, x.dtype)


def _same_kind(a: str, b: str | None) -> bool:
    return a == b or (is_floating(a) and is_floating(b))


@lowers(
    "aten.view",
    "aten.reshape",
    "aten._unsafe_view",
    "aten.view_copy",
    "aten.flatten",
    "aten.unflatten",
    "aten.view_as",
    "aten.squeeze",
    "aten.squeeze_",
    "aten.unsqueeze",
    "aten.unsqueeze_",
    "aten._reshape_alias",
    "aten.ravel",
    "aten.squeeze_copy",
    "aten.unsqueeze_copy",
    "aten.reshape_as",
)
def any_view(low: Lowering, node: FamilyNode, args: list[Any], kwargs: dict[str, Any]) -> Tensor:
    if node.shape is None or any(not isinstance(n, int) for n in node.shape):
        raise Unsupported("its shape depends on data")
    if any(isinstance(a, DType) for a in [*args, *kwargs.values()]) or not _same_kind(args[0].dtype, node.dtype):
        raise Unsupported("reinterprets the bits of its operand")
    shape = [int(n) for n in node.shape]
    if (
        node.op.split(".")[1] in ("view", "reshape", "_unsafe_view", "view_copy")
        and len(args) > 1
        and isinstance(args[1], list)
    ):
        if all(isinstance(n, int) for n in args[1]):
            shape = [int(n) for n in resolve_view(args[0].shape, tuple(args[1]))]
        elif any(isinstance(n, RankVector) for n in args[1]):
            raise Unsupported("its shape differs between ranks")
    return view(low, args[0], shape)


def permute(low: Lowering, x: Tensor, order: Sequence[int]) -> Tensor:
    """Dimension ``k`` of the result is dimension ``order[k]`` of ``x``; a permutation of a permutation is one permutation."""
    before = low.permute_of.get(x.id)
    if before is not None:
        source, first = before
        return permute(low, source, [first[d] for d in order])
    if list(order) == sorted(order):
        return x
    shape = [x.shape[d] for d in order]
    result = low.layout(x, shape, [(k, 1, d, 1, n) for k, (d, n) in enumerate(zip(order, shape))])
    low.permute_of[result.id] = (x, tuple(order))
    return result


@lowers(
    "aten.transpose",
    "aten.t",
    "aten.permute",
    "aten.numpy_T",
    "aten.mT",
    "aten.movedim",
    "aten.t_copy",
    "aten.permute_copy",
    "aten.transpose_copy",
    "aten.swapaxes",
    "aten.swapdims",
)
def transposes(low: Lowering, node: FamilyNode, args: list[Any], kwargs: dict[str, Any]) -> Tensor:
    x, name = args[0], node.op.split(".")[1].removesuffix("_copy")
    rank = len(x.shape)
    order = list(range(rank))
    if name == "permute":
        order = [normalize_dim(d, rank) for d in args[1]]
    elif name in ("transpose", "swapaxes", "swapdims"):
        a, b = normalize_dim(args[1], rank), normalize_dim(args[2], rank)
        order[a], order[b] = order[b], order[a]
    elif name == "movedim":
        src = [args[1]] if isinstance(args[1], int) else args[1]
        dst = [args[2]] if isinstance(args[2], int) else args[2]
        src, dst = [normalize_dim(d, rank) for d in src], [normalize_dim(d, rank) for d in dst]
        rest = [d for d in order if d not in src]
        order = [-1] * rank
        for s, d in zip(src, dst):
            order[d] = s
        order = [d if d >= 0 else rest.pop(0) for d in order]
    elif name == "mT":
        order[-1], order[-2] = order[-2], order[-1]
    else:
        order.reverse()
    return permute(low, x, order)


@lowers("aten.expand", "aten.broadcast_to", "aten.expand_as", "aten.expand_copy")
def expand(low: Lowering, node: FamilyNode, args: list[Any], kwargs: dict[str, Any]) -> Tensor:
    return low.broadcast_to(args[0], node.shape)


@lowers("aten.repeat", "aten.tile")
def repeat(low: Lowering, node: FamilyNode, args: list[Any], kwargs: dict[str, Any]) -> Tensor:
    x, reps = args[0], list(args[1])
    if any(not isinstance(r, int) for r in reps):
        raise Unsupported("its repeats differ between ranks")
    lead = len(reps) - len(x.shape)
    shape = [1] * lead + list(x.shape)
    spread = [n for r, s in zip(reps, shape) for n in (r, s)]
    inner = [n for s in shape for n in (1, s)]
    return view(low, low.broadcast_to(view(low, x, inner), spread), [r * s for r, s in zip(reps, shape)])


@lowers("aten.repeat_interleave")
def repeat_interleave(low: Lowering, node: FamilyNode, args: list[Any], kwargs: dict[str, Any]) -> Tensor:
    x, times = args[0], args[1] if len(args) > 1 else None
    dim = kwargs.get("dim", args[2] if len(args) > 2 else None)
    if not isinstance(times, int) or dim is None:
        raise Unsupported("repeats a data-dependent number of times")
    d = normalize_dim(dim, len(x.shape))
    inner = [*x.shape[: d + 1], 1, *x.shape[d + 1 :]]
    spread = [*x.shape[: d + 1], times, *x.shape[d + 1 :]]
    return view(
        low, low.broadcast_to(view(low, x, inner), spread), [*x.shape[:d], x.shape[d] * times, *x.shape[d + 1 :]]
    )


def spread(low: Lowering, x: Tensor, letters: str, out: str, sizes: dict[str, int]) -> Tensor:
    """``x`` with axes ``letters`` laid out as the axes ``out``: permuted, and constant along those that it does not have."""
    shape = [sizes[c] for c in out]
    ties, new = [], []
    for d, c in enumerate(out):
        if c in letters and x.shape[letters.index(c)] == sizes[c]:
            ties.append((d, 1, letters.index(c), 1, sizes[c]))
        elif sizes[c] > 1:
            new.append(d)
    return x if letters == out and tuple(shape) == x.shape else low.layout(x, shape, ties, new)


def select(low: Lowering, x: Tensor, d: int, index: int, size: int) -> Tensor:
    """Piece ``index`` of the ``shape[d] / size`` equal pieces of dimension ``d``."""
    pieces = x.shape[d] // size
    if pieces == 1:
        return x
    shape = [size if k == d else n for k, n in enumerate(x.shape)]
    iters = [axis(n, "p", k, a0=k) for k, n in enumerate(shape)]
    iters.append(Iter(pieces, "o", (), ((0, (Tie(1, d, size, pieces),)),)))
    result = low.op(f"select#{index}#{pieces}", "slice", [x], iters, shape, x.dtype)
    return low.remember(result, "slice", [x], d, index * size, (index + 1) * size)


def slice_plain(low: Lowering, x: Tensor, d: int, start: int, stop: int, step: int) -> Tensor:
    """``x[start:stop:step]`` along ``d``, the same on every rank.

    A slice is taken where the tensor was made: before rearrangements and inside the piece of a concatenation. Where the
    operator works in parallel along ``d``, the operator on sliced operands is noted as another form of the slice.
    """
    n = x.shape[d]
    size = max(0, -(-(stop - start) // step))
    if size == n:
        return x
    if size == 0:
        raise Unsupported("slice without elements")
    result = _slice(low, x, d, start, stop, step, size)
    # a part of what a kernel computes is what its definition says, too
    low.defined |= {(user, result.id, name) for user, tensor, name in low.defined if tensor == x.id}
    if step == 1:
        known = low.pieces_of.setdefault(result.id, [])
        if not any((k.id, e, at) == (x.id, d, start) for k, e, at in known):
            known.append((x, d, start))
    return result


def _slice(low: Lowering, x: Tensor, d: int, start: int, stop: int, step: int, size: int) -> Tensor:
    if step == 1:
        inner = _slice_inside(low, x, d, start, stop)
        if inner is not None:
            return inner
    result = _slice_op(low, x, d, start, stop, step, size)
    if step == 1:
        low.remember(result, "slice", [x], d, start, stop)
        low.slice_of[result.id] = (x, d, start)
        _note_sliced_form(low, x, d, start, stop, result)
    return result


def _slice_op(low: Lowering, x: Tensor, d: int, start: int, stop: int, step: int, size: int) -> Tensor:
    """The slice as an operator: an index of the outer (or inner) axis where it divides the dimension, else in order."""
    n = x.shape[d]
    if step == 1 and n % size == 0 and start % size == 0:
        return select(low, x, d, start // size, size)
    shape = [size if k == d else m for k, m in enumerate(x.shape)]
    if step > 1 and size * step == n:
        # every step-th element: one position of the inner dimension
        divided = view(low, x, [*x.shape[:d], size, step, *x.shape[d + 1 :]])
        return view(low, slice_plain(low, divided, d + 1, start, start + 1, 1), shape)
    iters = [axis(m, "p", k, a0=k) for k, m in enumerate(shape)]
    iters[d] = Iter(size, "pos", whole(size, d))
    iters.append(Iter(n, "o", (), ((0, whole(n, d)),)))
    return low.op(f"slice#{start}#{stop}#{step}#{n}", "slice", [x], iters, shape, x.dtype)


def _slice_inside(low: Lowering, x: Tensor, d: int, start: int, stop: int) -> Tensor | None:
    """The slice taken on the operand of a rearrangement or collective, or on the parts of a concatenation; None if it is
    neither."""
    made = low.made_by.get(x.id)
    if made is None:
        return None
    size = stop - start
    shape = [size if k == d else m for k, m in enumerate(x.shape)]
    if (x.shape[d], start, stop) in low.sections and made.kind not in ("layout", "cat"):
        from emerge.facts.ops.sections import section

        return section(low, x, made, d, start, stop)
    if made.kind == "layout":
        if d in made.broadcast:
            return low.layout(made.args[0], shape, made.ties, made.broadcast)
        own = [t for t in made.ties if t[0] == d]
        arg = made.args[0]
        if not own:
            return None
        _, ov, da, oa, n = max(own, key=lambda t: t[1])
        outermost = oa * n == arg.shape[da] and ov * n == x.shape[d]
        if not outermost:
            return _slice_gathered(low, made, shape, d, start, stop)
        if start % ov or stop % ov or (oa > 1 and ov > 1):
            return None
        first, last = start // ov * oa, stop // ov * oa
        if (x.shape[d], start, stop) in low.sections:
            low.sections.add((arg.shape[da], first, last))  # the same tokens, counted in another way
        inner = slice_plain(low, arg, da, first, last, 1)
        ties = [(*t[:4], size // ov) if t[0] == d and t[1] == ov else t for t in made.ties]
        return low.layout(inner, shape, ties, made.broadcast)
    if made.kind == "cat":
        offset = 0
        for part in made.args:
            if offset <= start and stop <= offset + part.shape[d] and part.shape[d] != x.shape[d]:
                return slice_plain(low, part, d, start - offset, stop - offset, 1)
            if part.shape[d] == x.shape[d]:  # concatenated along another dimension
                how = low.recipes.get(x.id)
                if (x.shape[d], start, stop) not in low.sections or how is None or how.name != "cat":
                    return None
                return cat(low, [slice_plain(low, p, d, start, stop, 1) for p in made.args], how.params[0])
            offset += part.shape[d]
    return None


def _slice_gathered(low: Lowering, made: Made, shape: list[int], d: int, start: int, stop: int) -> Tensor | None:
    """A slice of every rank's contribution to a gather: the slice gathered. None where ``d`` is not one contribution.

    FSDP gathers the shards of all parameters of a module in one flat buffer, and takes them apart again like this.
    """
    gathered = low.gather_of.get(made.args[0].id)
    own = [t for t in made.ties if t[0] == d]
    if gathered is None or len(own) != 1:
        return None
    x, e, blocks = gathered
    n, size = x.shape[e], stop - start
    if own[0][1:] != (1, e, 1, n) or any(t[2] == e and t[3] % n for t in made.ties if t is not own[0]):
        return None
    inner = all_gather(low, slice_plain(low, x, e, start, stop, 1), e, blocks)
    ties = [
        (*own[0][:4], size) if t is own[0] else (*t[:3], t[3] // n * size, t[4]) if t[2] == e else t for t in made.ties
    ]
    return low.layout(inner, shape, ties, made.broadcast)


#: A slice is pushed through so many operators; further where statements speak about it (``Lowering.sections``).
MOST_SLICES = 6


def _note_sliced_form(low: Lowering, x: Tensor, d: int, start: int, stop: int, result: Tensor) -> None:
    """Another form of a slice: the operator that made ``x``, with the operands sliced that carry dimension ``d``.

    Whether it may be used is a law (``form-sliced``); here only the candidate is written.
    """
    if (x.shape[d], start, stop) in low.sections:
        noted = low.section_slices.setdefault(x.id, [])
        if (d, start, stop, result) not in noted:  # what is below it is written once, however many paths lead there
            noted.append((d, start, stop, result))
            low.sections_left.append((x, d, start, stop, result))
    elif low.slice_depth <= MOST_SLICES:
        sliced_form(low, x, d, start, stop, result)


def sliced_form(low: Lowering, x: Tensor, d: int, start: int, stop: int, result: Tensor) -> None:
    made = low.made_by.get(x.id)
    if made is not None:
        _form_of_slice(low, x, made, low.op_of.get(x.id), d, start, stop, result)
    if x.id in low.form_of_slice:  # a slice along another dimension, which has such a form of its own
        _form_of_slice(low, x, *low.form_of_slice[x.id], d, start, stop, result)


def _form_of_slice(
    low: Lowering, x: Tensor, made: Made, source: int | None, d: int, start: int, stop: int, result: Tensor
) -> None:
    """``source``: the operator or form that makes ``x`` as ``made`` says."""
    low.slice_depth += 1
    found = on_slices(low, x, made, d, start, stop) if source is not None else None
    low.slice_depth -= 1
    if found is None:
        return
    args, iters = found.args, found.iters
    form = low.form(made.body, made.kind, args, iters, result, made.scale)
    if form is not None:
        low.base.add("sliced_form", form, low.op_of[result.id], source, d)
        low.form_of_slice.setdefault(result.id, (found, form))
        if made.kind == "dot" and low.side == 1:
            swapped = [Iter(i.size, i.role, i.out, tuple((1 - k, t) for k, t in i.args)) for i in iters]
            other = low.form(made.body, made.kind, args[::-1], swapped, result)
            if other is not None:
                low.base.add("commuted", other, form)


def on_slices(low: Lowering, x: Tensor, made: Made, d: int, start: int, stop: int) -> Made | None:
    """``made`` on the slices of its operands that carry dimension ``d``; None where it does not work in parallel along it."""
    if not made.args or made.relocation is not None or made.kind == "dropout":
        return None
    rank = len(x.shape)
    if d >= len(made.iters) or any(it.out != whole(n, k) for k, (it, n) in enumerate(zip(made.iters, x.shape))):
        return None
    if any(it.out or it.to_mesh or it.from_mesh for it in made.iters[rank:]):
        return None  # the result has axes of its own, which the slice does not name alike
    it = made.iters[d]
    if (
        it.role != "p"
        or it.to_mesh
        or it.from_mesh
        or any(len(t) != 1 or t != whole(it.size, t[0].d) for _, t in it.args)
    ):
        return None
    dims = {k: ties[0].d for k, ties in it.args}
    if any(made.args[k].shape[e] != it.size for k, e in dims.items()):
        return None  # the operand's dimension is divided between several iteration dimensions
    args = tuple(slice_plain(low, a, dims[k], start, stop, 1) if k in dims else a for k, a in enumerate(made.args))
    size = stop - start
    part = Iter(size, it.role, whole(size, d), tuple((k, whole(size, e)) for k, e in dims.items()))
    return Made(made.body, made.kind, args, tuple(part if k == d else o for k, o in enumerate(made.iters)), scale=made.scale)


def rank_slice(low: Lowering, x: Tensor, d: int, starts: Sequence[int], size: int) -> Tensor:
    """Rank r takes ``x[starts[r] : starts[r] + size]`` along ``d``."""
    from emerge.facts.ops.positions import positions_sliced

    own = positions_sliced(low, x, d, starts, size)
    if own is not None:
        return own
    form = low.mesh.affine(list(starts))
    if form is None:
        raise Unsupported("its bounds are not an affine function of the rank")
    unit = size
    for slope, block in reversed(form.terms):
        if slope != unit:
            raise Unsupported(f"rank slices of {size} elements lie {slope} apart")
        unit = slope * block.size
    base = slice_plain(low, x, d, form.base, form.base + unit, 1)
    shape = [size if k == d else n for k, n in enumerate(base.shape)]
    iters = [axis(n, "p", k, a0=k) for k, n in enumerate(shape)]
    for slope, block in form.terms:
        iters.append(
            Iter(
                block.size,
                "p",
                (),
                ((0, (Tie(1, d, slope, block.size),)),),
                to_mesh=(Tie(1, block.dim, block.stride, block.size),),
            )
        )
    return low.op(
        "rank_slice",
        "rank_slice",
        [base],
        iters,
        shape,
        x.dtype,
        relocation=("rank_slice", "none"),
        group=[b for _, b in form.terms],
    )


def any_slice(low: Lowering, x: Tensor, d: int, start: Any, end: Any, step: int) -> Tensor:
    """A slice whose bounds may differ between ranks."""
    n = x.shape[d]
    starts, ends = low.integers(0 if start is None else start), low.integers(n if end is None else end)
    if starts is None or ends is None or not isinstance(step, int):
        raise Unsupported("its bounds are not integers")
    bounds = [slice_bounds(n, s, e, step) for s, e in zip(starts, ends)]
    if len(set(bounds)) == 1:
        return slice_plain(low, x, d, bounds[0][0], bounds[0][1], step)
    sizes = {b - a for a, b in bounds}
    if len(sizes) != 1 or step != 1:
        raise Unsupported("its length differs between ranks")
    return rank_slice(low, x, d, [a for a, _ in bounds], sizes.pop())


@lowers("aten.slice", "aten.slice_copy", "aten.narrow")
def slices(low: Lowering, node: FamilyNode, args: list[Any], kwargs: dict[str, Any]) -> Tensor:
    x = args[0]
    if node.op.startswith("aten.narrow"):
        d = normalize_dim(args[1], len(x.shape))
        starts = low.integers(args[2])
        if starts is None or not isinstance(args[3], int):
            raise Unsupported("its bounds are not integers")
        return any_slice(low, x, d, args[2], RankVector(tuple(s + args[3] for s in starts)), 1)
    full = [*args[1:], *[None] * (4 - len(args[1:]))]
    d = normalize_dim(kwargs.get("dim", full[0]) or 0, len(x.shape))
    start, end = kwargs.get("start", full[1]), kwargs.get("end", full[2])
    step = kwargs.get("step", full[3])
    return any_slice(low, x, d, start, end, 1 if step is None else step)


@lowers("aten.select", "aten.select_copy")
def select_int(low: Lowering, node: FamilyNode, args: list[Any], kwargs: dict[str, Any]) -> Tensor:
    x = args[0]
    d = normalize_dim(args[1], len(x.shape))
    starts = low.integers(args[2])
    if starts is None:
        raise Unsupported("its index is not an integer")
    starts = [s + x.shape[d] if s < 0 else s for s in starts]
    return view(
        low,
        any_slice(low, x, d, RankVector(tuple(starts)), RankVector(tuple(s + 1 for s in starts)), 1),
        [n for k, n in enumerate(x.shape) if k != d],
    )


@lowers(
    "aten.split",
    "aten.split_with_sizes",
    "aten.chunk",
    "aten.tensor_split",
    "aten.split_with_sizes_copy",
    "aten.split_copy",
    "aten.unbind",
)
def splits(low: Lowering, node: FamilyNode, args: list[Any], kwargs: dict[str, Any]) -> Multi:
    x, name = args[0], node.op.split(".")[1].removesuffix("_copy")
    how = args[1] if len(args) > 1 else None
    dim = kwargs.get("dim", args[2] if len(args) > 2 else 0)
    if name == "unbind":
        dim, how = kwargs.get("dim", args[1] if len(args) > 1 else 0), 1
    d = normalize_dim(dim, len(x.shape))
    n = x.shape[d]
    if isinstance(how, RankVector):
        raise Unsupported("its sizes differ between ranks")
    if isinstance(how, list):
        if any(not isinstance(s, int) for s in how):
            raise Unsupported("its sizes differ between ranks")
        sizes = how if name != "tensor_split" else [b - a for a, b in zip([0, *how], [*how, n])]
    elif not isinstance(how, int):
        raise Unsupported("its size is not an integer")
    else:
        size = int(how) if name in ("split", "unbind") else -(-n // int(how))
        if name == "tensor_split":
            raise Unsupported("tensor_split by number")
        sizes = [min(size, n - s) for s in range(0, n, size)]

    def piece(i: int) -> Tensor:
        start = sum(sizes[:i])
        part = slice_plain(low, x, d, start, start + sizes[i], 1)
        return view(low, part, [m for k, m in enumerate(x.shape) if k != d]) if name == "unbind" else part

    multi = Multi(piece)
    multi.pieces = (x, d, sizes)  # type: ignore[attr-defined]
    return multi


def cat(low: Lowering, parts: Sequence[Tensor], d: int, join: bool = True) -> Tensor:
    """Concatenation along ``d``.

    Args:
        join: whether results of one operator become that operator on joined operands; not for the algebra, which asks
            for this very concatenation because the other form was no use.
    """
    if any(
        p.dtype != q.dtype and not (is_floating(p.dtype) and is_floating(q.dtype)) for p in parts for q in parts[:1]
    ):
        raise Unsupported("joins tensors of different types")
    parts = [p for p in parts if not isinstance(p, Void)]  # a piece without elements adds nothing
    if len(parts) == 1:
        return parts[0]
    regathered = cat_of_pieces(low, parts, d)
    if regathered is not None:
        return regathered
    whole_op = joined(low, parts, d) if join else None
    if whole_op is not None:
        return whole_op
    sizes = [p.shape[d] for p in parts]
    total = sum(sizes)
    shape = [total if k == d else n for k, n in enumerate(parts[0].shape)]
    iters = [axis(n, "p", k, **{f"a{j}": k for j in range(len(parts))}) for k, n in enumerate(shape)]
    if len(set(sizes)) == 1:
        n = sizes[0]
        iters[d] = Iter(n, "p", (Tie(1, d, 1, n),), tuple((j, whole(n, d)) for j in range(len(parts))))
        iters.append(Iter(len(parts), "pos", (Tie(1, d, n, len(parts)),)))
        return low.remember(low.op("cat", "cat", parts, iters, shape, parts[0].dtype), "cat", parts, d)
    iters[d] = Iter(total, "pos", whole(total, d))
    iters += [Iter(n, "o", (), ((j, whole(n, d)),)) for j, n in enumerate(sizes)]
    return low.remember(low.op(f"cat#{sizes}", "cat", parts, iters, shape, parts[0].dtype), "cat", parts, d)


@lowers("aten.cat", "aten.concat", "aten.concatenate")
def cat_op(low: Lowering, node: FamilyNode, args: list[Any], kwargs: dict[str, Any]) -> Tensor:
    dim = kwargs.get("dim", args[1] if len(args) > 1 else 0)
    parts = args[0]
    if any(not isinstance(p, Tensor) for p in parts):
        raise Unsupported("joins something that is not a tensor")
    return cat(low, parts, normalize_dim(dim, max(len(p.shape) for p in parts)))


@lowers("aten.stack")
def stack(low: Lowering, node: FamilyNode, args: list[Any], kwargs: dict[str, Any]) -> Tensor:
    dim = kwargs.get("dim", args[1] if len(args) > 1 else 0)
    return stack_parts(low, args[0], normalize_dim(dim, len(args[0][0].shape) + 1))


def stack_parts(low: Lowering, parts: Sequence[Tensor], d: int) -> Tensor:
    """Tensors of one shape along a new dimension ``d``."""
    return cat(low, [view(low, p, [*p.shape[:d], 1, *p.shape[d:]]) for p in parts], d)


@lowers("aten.slice_scatter")
def slice_scatter(low: Lowering, node: FamilyNode, args: list[Any], kwargs: dict[str, Any]) -> Tensor:
    x, src = args[0], args[1]
    rest = [*args[2:], *[None] * (4 - len(args[2:]))]
    table = placed_range(low, x, src, rest)
    if table is not None:
        return table
    d = normalize_dim(rest[0] or 0, len(x.shape))
    start, stop = slice_bounds(
        x.shape[d], 0 if rest[1] is None else rest[1], x.shape[d] if rest[2] is None else rest[2], rest[3] or 1
    )
    if rest[3] not in (None, 1):
        raise Unsupported("slice_scatter with a step")
    if stop - start == x.shape[d]:
        return low.retyped(src, x.dtype)
    parts = [slice_plain(low, x, d, 0, start, 1)] if start else []
    parts.append(src)
    if stop < x.shape[d]:
        parts.append(slice_plain(low, x, d, stop, x.shape[d], 1))
    return cat(low, parts, d)


@lowers("operator.getitem")
def getitem(low: Lowering, node: FamilyNode, args: list[Any], kwargs: dict[str, Any]) -> Any:
    if isinstance(args[1], RankVector) and hasattr(args[0], "pieces"):
        x, d, sizes = args[0].pieces
        if len(set(sizes)) != 1:
            raise Unsupported("ranks pick pieces of different sizes")
        return rank_slice(low, x, d, [int(i) * sizes[0] for i in args[1].values], sizes[0])
    if not isinstance(args[1], int):
        raise Unsupported("its index is not an integer")
    return args[0][args[1]]


@lowers("aten.flip", "aten.roll")
def reorder(low: Lowering, node: FamilyNode, args: list[Any], kwargs: dict[str, Any]) -> Tensor:
    x, name = args[0], node.op.split(".")[1]
    dims = args[1] if name == "flip" else kwargs.get("dims", args[2] if len(args) > 2 else [])
    dims = {normalize_dim(d, len(x.shape)) for d in ([dims] if isinstance(dims, int) else dims)}
    if not dims:
        dims = set(range(len(x.shape)))
    iters = [axis(n, "o" if d in dims else "p", d, a0=d) for d, n in enumerate(x.shape)]
    return low.op(f"{name}#{args[1:]}", "copy", [x], iters, x.shape, x.dtype)


@lowers("aten.constant_pad_nd", "aten.pad")
def pad(low: Lowering, node: FamilyNode, args: list[Any], kwargs: dict[str, Any]) -> Tensor:
    x, widths = args[0], args[1]
    value = kwargs.get("value", args[2] if len(args) > 2 else 0)
    if any(not isinstance(w, int) for w in widths) or not isinstance(value, (int, float)) or node.shape is None:
        raise Unsupported("its widths differ between ranks")
    shape = [int(n) for n in node.shape]
    changed = {len(x.shape) - 1 - i // 2 for i, w in enumerate(widths) if w}
    iters = [Iter(n, "pos", whole(n, d)) if d in changed else axis(n, "p", d, a0=d) for d, n in enumerate(shape)]
    iters += [Iter(x.shape[d], "o", (), ((0, whole(x.shape[d], d)),)) for d in sorted(changed)]
    return low.op(f"pad#{widths}#{value}", "copy" if value == 0 else "pad", [x], iters, shape, x.dtype)
