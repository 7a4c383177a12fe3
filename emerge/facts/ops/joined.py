"""Concatenations of results of one operator: microbatches whose results are joined again.

``cat(f(x0), f(x1))`` along an axis in which ``f`` works in parallel is ``f(cat(x0, x1))``. It is written so where that
leads all the way down to the tensor that was split; whether it may be used is a law (``form-joined``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from emerge.facts.lower import Iter, Lowering, Made, Tensor, whole
from emerge.graph.model import is_integer

Parts = tuple[tuple[Tensor, ...], int]


@dataclass
class _Plan:
    """How tensors are joined: what has to be joined first, and what is made of it."""

    needs: list[Parts]
    make: Callable[[list[Tensor]], Tensor]


def joined(low: Lowering, parts: Sequence[Tensor], d: int) -> Tensor | None:
    """The concatenation of ``parts`` along ``d`` without one; None where it does not come from pieces of one tensor."""
    start: Parts = (tuple(parts), d)
    known, plans, stack = low.joined, {}, [start]
    while stack:  # no recursion: a stage of a pipeline is thousands of operators deep
        key = stack[-1]
        if key in known:
            stack.pop()
            continue
        if key not in plans:
            found = cat_of_pieces(low, *key)
            plan = _plan(low, *key) if found is None else None
            if plan is None:
                known[key] = found
                continue
            plans[key] = plan
        plan = plans[key]
        missing = next((k for k in plan.needs if k not in known), None)
        if missing is not None:
            stack.append(missing)
            continue
        made = [known[k] for k in plan.needs]
        fit = [m for m in made if m is not None]
        known[key] = plan.make(fit) if len(fit) == len(made) else None
    return known[start]


def _plan(low: Lowering, parts: tuple[Tensor, ...], d: int) -> _Plan | None:
    mades = [m for p in parts if (m := low.made_by.get(p.id)) is not None and m.args]
    if len(mades) < len(parts) or len({p.id for p in parts}) < len(parts) or len({m.kind for m in mades}) > 1:
        return None
    if mades[0].kind == "layout":
        return _layout_plan(low, parts, mades, d)
    if mades[0].kind in ("dropout", "unknown", "uninitialised"):
        return None  # each draws its own numbers, or is no function of its operands
    return _operator_plan(low, parts, mades, d)


def _layout_plan(low: Lowering, parts: tuple[Tensor, ...], mades: list[Made], d: int) -> _Plan | None:
    """Equal rearrangements joined along their outermost axis of ``d``: the rearrangement of the joined operands."""
    first = mades[0]
    own = [t for t in first.ties if t[0] == d]
    if d in first.broadcast or not own:
        return None
    _, ov, e, oe, _ = max(own, key=lambda t: t[1])
    rest = [t for t in first.ties if t[:4] != (d, ov, e, oe)]
    total = 0
    for p, m in zip(parts, mades):
        outer = [t for t in m.ties if t[:4] == (d, ov, e, oe)]
        if len(outer) != 1 or [t for t in m.ties if t not in outer] != rest or m.broadcast != first.broadcast:
            return None
        n = outer[0][4]
        if ov * n != p.shape[d] or oe * n != m.args[0].shape[e] or not _alike(m.args[0], first.args[0], e):
            return None
        total += n
    shape = [ov * total if k == d else n for k, n in enumerate(parts[0].shape)]
    ties = [*rest, (d, ov, e, oe, total)]
    return _Plan(
        [(tuple(m.args[0] for m in mades), e)], lambda args: low.layout(args[0], shape, ties, first.broadcast)
    )  # fmt: skip


def _alike(a: Tensor, b: Tensor, but: int) -> bool:
    return len(a.shape) == len(b.shape) and all(k == but or n == m for k, (n, m) in enumerate(zip(a.shape, b.shape)))


def _operator_plan(low: Lowering, parts: tuple[Tensor, ...], mades: list[Made], d: int) -> _Plan | None:
    """The operator on joined operands, where it works in parallel along ``d`` and is the same but for the length."""
    first = mades[0]
    if is_integer(parts[0].dtype) and parts[0].dtype not in ("int64", "bool"):
        return None  # what wraps around has bodies of its own
    at = next((i for i, it in enumerate(first.iters) if it.out == whole(parts[0].shape[d], d)), -1)
    same = [(m.body, m.scale, m.relocation, m.group, len(m.args), _without(m.iters, at)) for m in mades]
    if at < 0 or any(s != same[0] for s in same) or any(t.d == d for it in _without(first.iters, at) for t in it.out):
        return None
    dims: dict[int, int] = {}
    for m, p in zip(mades, parts):
        it = m.iters[at]
        if it.role != "p" or it.to_mesh or it.from_mesh or it.out != whole(p.shape[d], d):
            return None
        if any(len(t) != 1 or t != whole(it.size, t[0].d) or m.args[k].shape[t[0].d] != it.size for k, t in it.args):
            return None
        found = {k: t[0].d for k, t in it.args}
        if m is not first and found != dims:
            return None
        dims = found
    needs: list[Parts] = []
    fixed: dict[int, Tensor] = {}
    for k, a in enumerate(first.args):
        pieces = tuple(m.args[k] for m in mades)
        one = all(p.id == a.id for p in pieces)
        if k in dims and not one:
            needs.append((pieces, dims[k]))
        elif one and (k not in dims or a.shape[dims[k]] == 1):
            dims.pop(k, None)  # constant along the axis
            fixed[k] = a
        else:
            return None
    size = sum(p.shape[d] for p in parts)
    part = Iter(size, "p", whole(size, d), tuple((k, whole(size, e)) for k, e in dims.items()))
    iters = [part if i == at else it for i, it in enumerate(first.iters)]
    shape = [size if k == d else n for k, n in enumerate(parts[0].shape)]

    def make(args: list[Tensor]) -> Tensor:
        left = iter(args)
        operands = [fixed[k] if k in fixed else next(left) for k in range(len(first.args))]
        if first.kind == "one_hot":
            from emerge.facts.ops.index import one_hot

            return one_hot(low, operands[0], parts[0].shape[-1], parts[0].dtype)
        before = low.base.next_id
        result = low.op(
            first.body, first.kind, operands, iters, shape, parts[0].dtype, relocation=first.relocation,
            group=first.group, scale=first.scale,
        )  # fmt: skip
        if low.base.next_id > before:
            own, source = low.op_of[result.id], low.op_of[parts[0].id]
            low.base.add("joined_form", own, source, at)
            low.inherit(own, [low.op_of[p.id] for p in parts])
            recipe = low.recipes.get(parts[0].id)
            known = recipe is not None and [a.id for a in recipe.args] == [a.id for a in first.args]
            if recipe is not None and known and recipe.name in ("map", "scale", "einsum", "fold", "along"):
                low.remember(result, recipe.name, operands, *recipe.params)
        return result

    return _Plan(needs, make)


def _without(iters: tuple[Iter, ...], at: int) -> tuple[Iter, ...]:
    return iters[:at] + iters[at + 1 :]


def cat_of_pieces(low: Lowering, parts: Sequence[Tensor], d: int) -> Tensor | None:
    """Consecutive pieces of one tensor joined in order: a slice of it, or a rearrangement (gather on another dimension)."""
    from emerge.facts.ops.layout import slice_plain

    for source, e, first in low.pieces_of.get(parts[0].id, ()):
        sizes = [p.shape[e] for p in parts]
        if e != d and len(set(sizes)) > 1:
            continue
        starts = [first + sum(sizes[:i]) for i in range(len(parts))]
        if any(
            not any(s.id == source.id and (f, at) == (e, start) for s, f, at in low.pieces_of.get(p.id, ()))
            for p, start in zip(parts, starts)
        ):
            continue
        base = slice_plain(low, source, e, first, first + sum(sizes), 1)
        if e == d:
            return base
        n, pieces = sizes[0], len(parts)
        shape = list(parts[0].shape)
        shape[d] *= pieces
        ties = [(k, 1, k, 1, m) for k, m in enumerate(base.shape) if k not in (d, e)]
        ties += [(e, 1, e, 1, n), (d, 1, d, 1, base.shape[d]), (d, base.shape[d], e, n, pieces)]
        return low.layout(base, shape, ties)
    return None
