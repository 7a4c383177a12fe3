"""Sections: parts of dimensions that claims are about, such as the tokens of one sequence in a packed batch.

What a claim says of a section rests on the same section of every tensor before it. Slices along sections are therefore
pushed down to the inputs, however deep the program is. Most of them stay slices with another form (law ``form-sliced``);
look-ups, masks, index arithmetic and collectives are written as such operators on slices, since what the laws know
about them is read off the operators themselves.
"""

from __future__ import annotations

from emerge.facts.lower import Iter, Lowering, Made, Tensor, whole
from emerge.facts.ops.index import lookup
from emerge.facts.ops.layout import on_slices, slice_plain, sliced_form
from emerge.facts.ops.masks import constant_of
from emerge.facts.ops.pointwise import fill


def note_sections(low: Lowering) -> None:
    """Writes the forms of slices that statements speak about, all the way down: what a claim says of one sequence of a
    packed batch rests on that sequence's part of every tensor before it."""
    while low.sections_left:
        sliced_form(low, *low.sections_left.pop())


def note_composites(low: Lowering) -> None:
    """Slices of what kernels compute are slices of their composites."""
    done: set[tuple[int, int]] = set()
    while True:
        wanted = [
            (result, form, d, start, stop)
            for form in low.forms
            for d, start, stop, result in low.section_slices.get(form.kernel.id, ())
            if (result.id, form.composite.id) not in done
        ]
        if not wanted:
            return
        for result, form, d, start, stop in wanted:
            done.add((result.id, form.composite.id))
            part = slice_plain(low, form.composite, d, start, stop, 1)
            low.forms.append(form._replace(kernel=result, composite=part))
        note_sections(low)


def section(low: Lowering, x: Tensor, made: Made, d: int, start: int, stop: int) -> Tensor | None:
    """The section of a tensor as the operator that made it on sections; None where it is to be a slice."""
    how = _REMADE.get(made.kind, _slice_index if x.dtype in ("int64", "bool") else None)
    if how is None:
        return None
    key = (x.id, d, start, stop)
    if key not in low.sections_made:
        low.sections_made[key] = how(low, x, made, d, start, stop)
    return low.sections_made[key]


def _slice_communicated(low: Lowering, x: Tensor, made: Made, d: int, start: int, stop: int) -> Tensor | None:
    """A slice along a dimension that a collective leaves alone: the collective on what every rank has of the slice."""
    (arg,) = made.args
    n = x.shape[d]
    own = made.iters[d] if d < len(made.iters) else None
    if own is None or own.out != whole(n, d) or own.args != ((0, whole(n, d)),) or own.from_mesh or own.to_mesh:
        return None
    if any(t.d == d for k, it in enumerate(made.iters) if k != d for t in (*it.out, *(t for _, ts in it.args for t in ts))):
        return None
    size = stop - start
    part = Iter(size, own.role, whole(size, d), ((0, whole(size, d)),))
    return low.op(
        made.body, made.kind, [slice_plain(low, arg, d, start, stop, 1)],
        [part if k == d else it for k, it in enumerate(made.iters)], [size if k == d else m for k, m in enumerate(x.shape)],
        x.dtype, relocation=made.relocation, group=made.group,
    )  # fmt: skip


def _slice_looked_up(low: Lowering, x: Tensor, made: Made, d: int, start: int, stop: int) -> Tensor | None:
    """A slice of a look-up looks up a part of the index, or in a part of the table; written as look-ups are, with their
    forms."""
    how = low.recipes.get(x.id)
    if how is None or how.name != "lookup":
        return None
    (table, index), at = how.args, how.params[0]
    own = d - at
    if 0 <= own < len(index.shape):
        return lookup(low, table, slice_plain(low, index, own, start, stop, 1), at)
    behind = d if d < at else d - len(index.shape) + 1
    return lookup(low, slice_plain(low, table, behind, start, stop, 1), index, at)


def _slice_filled(low: Lowering, x: Tensor, made: Made, d: int, start: int, stop: int) -> Tensor | None:
    """A slice of a tensor with a constant written where a mask holds: the same of both slices, with its forms."""
    found = on_slices(low, x, made, d, start, stop)
    if found is None:
        return None
    inner, mask = found.args
    return fill(low, inner, mask, constant_of(made.body), x.dtype)


def _slice_index(low: Lowering, x: Tensor, made: Made, d: int, start: int, stop: int) -> Tensor | None:
    """A slice of integer arithmetic is the arithmetic on slices, which datalog/analysis/index.dl reads off operators."""
    found = on_slices(low, x, made, d, start, stop)
    if found is None:
        return None
    shape = [stop - start if k == d else n for k, n in enumerate(x.shape)]
    before = low.base.next_id
    result = low.op(found.body, found.kind, found.args, found.iters, shape, x.dtype, scale=found.scale)
    if low.base.next_id == before:
        return result
    source, own = low.op_of[x.id], low.op_of[result.id]
    for relation in ("index_scalar", "index_factor"):
        low.base.add_all(relation, [(own, *row[1:]) for row in low.base.facts[relation] if row[0] == source])
    low.inherit(own, [source])
    return result


#: Operators whose slice along a section is written as the operator on slices, with all that is said about such operators.
_REMADE = {
    "collective": _slice_communicated, "lookup": _slice_looked_up, "fill": _slice_filled, "fill0": _slice_filled,
}  # fmt: skip
