"""Rows routed to experts: candidates for what every expert would give, for datalog/analysis/routing.dl.

Where a program puts sorted rows back (or sums rows that met a matrix of their own), the operators are followed back to
where the rows were taken, and written once more with the experts as a last dimension. Nothing is concluded here: which
of these tensors say what is derived by the laws.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from emerge.graph.model import is_floating

if TYPE_CHECKING:
    from emerge.facts.lower import Iter, Lowering, Made, Tensor

#: Operators followed back from one place at most.
MOST_STEPS = 400
#: Kinds whose masks are functions of integers.
_MASKS = {"nec", "eqc", "ltc", "lec", "gtc", "gec", "or", "and", "not"}
_COMMUTATIVE = {"add", "mul", "maximum", "minimum", "dot"}


def restore(low: Lowering, result: Tensor, sorted_rows: Tensor, order: Tensor) -> None:
    """``result`` holds the sorted rows in their own order again."""
    found = low.routing.sorts.get(order.id)
    if found is None or not is_floating(result.dtype):
        return
    experts, values = found
    count = _groups(low, sorted_rows, experts.shape[0])
    if count is None:
        return
    z = Router(low, experts, count, order, values).rows(sorted_rows)
    if z is not None:
        _close(low, result, z, experts, count)


def reduced(low: Lowering, x: Tensor) -> None:
    """A sum is about to be taken over ``x``: rows that met a matrix of their own end here."""
    root = low.innermost(x)
    experts = _batched(low, root)
    if experts is None or root.id in low.routing.closed or root.shape[:1] != experts.shape:
        return
    low.routing.closed.add(root.id)
    count = _tables(low, root, experts)
    if count is None:
        return
    z = Router(low, experts, count, None, None).rows(root)
    if z is not None:
        _close(low, root, z, experts, count)


def _close(low: Lowering, result: Tensor, z: Tensor, experts: Tensor, count: int) -> None:
    from emerge.facts.lower import Iter, axis, whole
    from emerge.facts.ops.index import one_hot

    hot = one_hot(low, experts, count, result.dtype)
    rank = len(result.shape)
    iters = [axis(n, "p", d, a0=0 if d == 0 else None, a1=d) for d, n in enumerate(result.shape)]
    iters.append(Iter(count, "sum", (), ((0, whole(count, 1)), (1, whole(count, rank)))))
    form = low.form("dot", "dot", [hot, z], iters, result)
    if form is not None:
        low.base.add("routed_form", form, result.id, z.id, experts.id, count)
    root = low.innermost(experts)
    made = low.made_by.get(root.id)
    if low.side == 1 and made is not None and made.kind == "input":
        low.base.add("index_bound", root.id, count)
        low.assume("index_range", result, f"experts lie in [0, {count})")


def _groups(low: Lowering, x: Tensor, rows: int) -> int | None:
    """Number of groups of the grouped products behind ``x``."""
    seen, work = {x.id}, [x]
    while work and len(seen) < MOST_STEPS:
        made = low.made_by.get(work.pop().id)
        if made is None or made.kind == "lookup":
            continue
        if made.kind == "grouped_dot":
            return made.args[1].shape[0]
        for a in made.args:
            if a.id not in seen and a.shape[:1] == (rows,):
                seen.add(a.id)
                work.append(a)
    return None


def _expert_table(low: Lowering, x: Tensor) -> tuple[Tensor, Tensor] | None:
    """(table of matrices, experts) where ``x`` holds one matrix per row."""
    found = low.routing.lookups.get(low.innermost(x).id)
    if found is None or len(found[0].shape) < 3:
        return None
    table, index = found
    return table, low.routing.clamped.get(index.id, index)


def _batched(low: Lowering, x: Tensor) -> Tensor | None:
    """The experts of rows behind which a product with one matrix per row stands; None where there is no such product."""
    known = low.routing.batched
    work = [x]
    while work:
        at = work[-1]
        made = low.made_by.get(at.id)
        if at.id in known:
            work.pop()
            continue
        if made is None or made.kind in ("lookup", "sum", "grouped_dot", "input") or made.relocation is not None:
            known[at.id] = None
            continue
        if made.kind == "dot":
            tables = [t for a in made.args if (t := _expert_table(low, a)) is not None]
            known[at.id] = tables[0][1] if tables else None
            continue
        waiting = [a for a in made.args if a.id not in known]
        if waiting:
            work += waiting
            continue
        known[at.id] = next((known[a.id] for a in made.args if known[a.id] is not None), None)
    return known[x.id]


def _tables(low: Lowering, x: Tensor, experts: Tensor) -> int | None:
    """Number of matrices to choose from behind ``x``."""
    seen, work = {x.id}, [x]
    while work and len(seen) < MOST_STEPS:
        made = low.made_by.get(work.pop().id)
        if made is None:
            continue
        if made.kind == "dot":
            for a in made.args:
                found = _expert_table(low, a)
                if found is not None and found[1].id == experts.id:
                    return found[0].shape[0]
        for a in made.args:
            if a.id not in seen and _batched(low, a) is not None:
                seen.add(a.id)
                work.append(a)
    return None


@dataclass
class Router:
    """Writes candidates for rows with ``experts``, ``count`` of them; rows stand in ``order`` (None: in their own)."""

    low: Lowering
    experts: Tensor
    count: int
    order: Tensor | None
    sorted: Tensor | None
    known: dict[int, Tensor | None] = field(default_factory=dict)

    def rows(self, x: Tensor) -> Tensor | None:
        """The candidate for all experts, None where there is none."""
        if x.id not in self.known:
            if len(self.known) > MOST_STEPS:
                return None
            self.known[x.id] = None
            self.known[x.id] = self._rows(x)
        return self.known[x.id]

    def _rows(self, x: Tensor) -> Tensor | None:
        low = self.low
        made = low.made_by.get(x.id)
        if made is None or x.shape[:1] != self.experts.shape or x.shape[0] == 1:
            return None
        if self.sorted is not None and x.id == self.sorted.id:
            return self.spread(self.experts)
        found = low.routing.lookups.get(x.id)
        if found is not None:
            made_rows = self._looked_up(*found)
            if made_rows is not None or self.order is not None:
                return made_rows
        if made.kind == "layout" and (self.order is not None or keeps_rows(made, x.shape[0])):
            return self._layout(x, made)
        if self.order is None and (found is not None or _batched(low, x) is None):
            filled = self._filled(x)
            return filled if filled is not None else self.spread(x)
        if made.kind == "layout":
            return None
        if made.kind == "grouped_dot":
            return self._product(x, made)
        if made.kind in ("fill", "fill0") and self._limit(made.args[1]):
            low.base.add("routed_fill", low.op_of[x.id])
            return self.rows(made.args[0])
        return self._operator(x, made)

    def spread(self, x: Tensor) -> Tensor:
        """``x`` for every expert alike."""
        rank = len(x.shape)
        ties = [(d, 1, d, 1, n) for d, n in enumerate(x.shape)]
        z = self.low.layout(x, [*x.shape, self.count], ties, [rank] if self.count > 1 else [])
        self.low.base.add("spread", x.id, z.id, self.experts.id, self.count)
        return z

    def plain(self) -> Router:
        """The router of the same rows in their own order."""
        return Router(self.low, self.experts, self.count, None, None)

    def _looked_up(self, table: Tensor, index: Tensor) -> Tensor | None:
        """Rows taken by the order, tokens of which there are several rows, or what a table holds for each expert."""
        from emerge.facts.ops.layout import view

        low = self.low
        if self.order is not None and index.id == self.order.id:
            return self.plain().rows(table)
        divided = low.routing.quotients.get(index.id)
        if self.order is not None and divided is not None and divided[0].id == self.order.id:
            k, rest = divided[1], table.shape[1:]
            if table.shape[0] * k != self.experts.shape[0]:
                return None
            wide = low.broadcast_to(view(low, table, [table.shape[0], 1, *rest]), [table.shape[0], k, *rest])
            repeated = view(low, wide, [table.shape[0] * k, *rest])
            low.base.add("repeated_rows", repeated.id, table.id, k)
            return self.plain().spread(repeated)
        source = low.routing.clamped.get(index.id, index)
        if source.id not in (self.experts.id, self.sorted.id if self.sorted is not None else -1):
            return None
        if table.shape[0] != self.count:
            return None
        rank = len(table.shape)
        shape = [self.experts.shape[0], *table.shape[1:], self.count]
        ties = [(d, 1, d, 1, n) for d, n in enumerate(table.shape) if d > 0] + [(rank, 1, 0, 1, self.count)]
        z = low.layout(table, shape, ties, [0])
        low.base.add("spread_table", table.id, z.id, self.experts.id, self.count)
        return z

    def _layout(self, x: Tensor, made: Made) -> Tensor | None:
        if not keeps_rows(made, x.shape[0]):
            return None
        source = made.args[0]
        z = self.rows(source)
        if z is None:
            return None
        ties = [*made.ties, (len(x.shape), 1, len(source.shape), 1, self.count)]
        result = self.low.layout(z, [*x.shape, self.count], ties, made.broadcast)
        self.low.base.add("routed_layout", x.id, result.id)
        return result

    def _product(self, x: Tensor, made: Made) -> Tensor | None:
        from emerge.facts.lower import Iter, whole

        rows, matrices = made.args[0], made.args[1]
        z = self.rows(rows)
        if z is None or matrices.shape[0] != self.count:
            return None
        (t, n), k, e = x.shape, rows.shape[1], self.count
        iters = [
            Iter(t, "p", whole(t, 0), ((0, whole(t, 0)),)),
            Iter(n, "p", whole(n, 1), ((1, whole(n, 2)),)),
            Iter(e, "p", whole(e, 2), ((0, whole(e, 2)), (1, whole(e, 0)))),
            Iter(k, "sum", (), ((0, whole(k, 1)), (1, whole(k, 1)))),
        ]
        result = self._op("dot", "dot", [z, matrices], iters, [t, n, e], x.dtype)
        self.low.base.add("routed_product", self.low.op_of[x.id], self.low.op_of[result.id])
        return result

    def _limit(self, mask: Tensor) -> bool:
        """Does a mask compare the experts of rows with a constant?"""
        low = self.low
        mask = low.innermost(mask)
        made = low.made_by.get(mask.id)
        found = low.routing.lookups.get(mask.id)
        if found is not None and self.order is not None and found[1].id == self.order.id:
            return self.plain()._limit(found[0])
        own = {self.experts.id} | ({self.sorted.id} if self.sorted is not None else set())
        return made is not None and made.kind in ("gec", "gtc") and made.args[0].id in own

    def _filled(self, x: Tensor) -> Tensor | None:
        """Rows (in their own order) with a constant written where the expert is none of these."""
        low = self.low
        made = low.made_by[x.id]
        if made.kind in ("fill", "fill0") and self._limit(made.args[1]):
            low.base.add("routed_fill", low.op_of[x.id])
            return self.rows(made.args[0])
        below, layouts = _layouts(low, x)
        base, own = _layouts(low, self.experts)
        made = low.made_by[below.id]
        if made.kind != "fill0" or layouts != own or below.shape != base.shape or made.args[1].shape != below.shape:
            return None
        vector = low.view_of.get(made.args[1].id)
        mask = low.made_by.get(made.args[1].id)
        if vector is not None and vector.shape == x.shape and self._limit(vector) and _only_views(low, x):
            low.base.add("row_mask", low.op_of[below.id], vector.id)
        elif mask is None or mask.kind not in _MASKS:
            return None
        source = made.args[0]
        for shape, ties, broadcast in reversed(layouts):
            source = low.layout(source, shape, ties, broadcast)
        low.base.add("rearranged_fill", x.id, low.op_of[below.id], source.id, self.experts.id)
        return self.rows(source)

    def _operator(self, x: Tensor, made: Made) -> Tensor | None:
        """The operator with the experts as one more parallel axis."""
        from emerge.facts.lower import Iter, whole

        low, n = self.low, x.shape[0]
        if (
            made.relocation is not None
            or made.kind in ("dropout", "input", "unknown", "uninitialised")
            or not made.iters
        ):
            return None
        first = made.iters[0]
        if first.role != "p" or first.size != n or first.out != whole(n, 0):
            return None
        if any(it.from_mesh or it.to_mesh for it in made.iters):
            return None
        args: list[Tensor] = []
        widened: list[int] = []
        for k, a in enumerate(made.args):
            if k not in dict(first.args):
                args.append(a)
                continue
            z = self.rows(a) if dict(first.args)[k] == whole(n, 0) else None
            if z is None:
                return None
            args.append(z)
            widened.append(k)
        rank = len(x.shape)
        places = tuple((k, whole(self.count, len(made.args[k].shape))) for k in widened)
        iters = list(made.iters)
        iters.insert(min(rank, len(iters)), Iter(self.count, "p", whole(self.count, rank), places))
        if made.scale is not None:
            result = low.scaled(args[0], made.scale)
        else:
            result = self._slice(x, args) or self._op(
                made.body, made.kind, args, iters, [*x.shape, self.count], x.dtype
            )
        order = 0 if self.order is None else self.order.id
        low.base.add("routed_op", low.op_of[x.id], low.op_of[result.id], self.experts.id, order, self.count)
        return result

    def _slice(self, x: Tensor, args: list[Tensor]) -> Tensor | None:
        """A slice within rows, with its other forms; None where it is no slice, or would be taken further inside."""
        from emerge.facts.ops.layout import slice_plain

        found = self.low.slice_of.get(x.id)
        made = self.low.made_by[args[0].id]
        if found is None or found[1] == 0 or made.kind in ("layout", "cat") or args[0].id in self.low.slice_of:
            return None
        return slice_plain(self.low, args[0], found[1], found[2], found[2] + x.shape[found[1]], 1)

    def _op(
        self, body: str, kind: str, args: Sequence[Tensor], iters: Sequence[Iter], shape: Sequence[int], dtype: str
    ) -> Tensor:
        from emerge.facts.lower import Iter

        result = self.low.op(body, kind, args, iters, shape, dtype)
        if self.low.side == 1 and kind in _COMMUTATIVE and len(args) == 2 and args[0].id != args[1].id:
            swapped = [Iter(i.size, i.role, i.out, tuple((1 - k, t) for k, t in i.args)) for i in iters]
            self.low.commuted(result, body, kind, [args[1], args[0]], swapped)
        return result


def keeps_rows(made: Made, rows: int) -> bool:
    """Is dimension 0 of a rearrangement dimension 0 of its operand?"""
    first = [t for t in made.ties if t[4] > 1 and (t[0] == 0 or t[2] == 0)]
    return first == [(0, 1, 0, 1, rows)] and made.args[0].shape[:1] == (rows,)


def _layouts(low: Lowering, x: Tensor) -> tuple[Tensor, list[tuple[Any, ...]]]:
    """The root below rearrangements, and those, outermost first."""
    found: list[tuple[Any, ...]] = []
    while (made := low.made_by.get(x.id)) is not None and made.kind == "layout":
        found.append((x.shape, made.ties, made.broadcast))
        x = made.args[0]
    return x, found


def _only_views(low: Lowering, x: Tensor) -> bool:
    """Do the rearrangements on top of a tensor keep its elements in row-major order?"""
    while (made := low.made_by.get(x.id)) is not None and made.kind == "layout":
        if x.id not in low.view_of:
            return False
        x = made.args[0]
    return True
