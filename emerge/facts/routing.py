"""What a side says about rows and vectors: sorts, look-ups, counts, offsets; read off for datalog/analysis/routing.dl.

Where sorted rows come back into their own order, candidates for the values of all experts are written
(:mod:`emerge.facts.experts`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from emerge.facts.experts import keeps_rows, reduced, restore
from emerge.graph.model import is_floating, is_integer

if TYPE_CHECKING:
    from emerge.facts.lower import Lowering, Tensor


@dataclass
class Routing:
    """What is known of one side: sorts, inverse orders, and the candidates written so far."""

    sorts: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)  # order -> (vector, sorted vector)
    inverse: dict[int, Tensor] = field(default_factory=dict)  # inverse order -> order
    orders: dict[int, Tensor] = field(default_factory=dict)
    lookups: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)  # result -> (table, vector)
    clamped: dict[int, Tensor] = field(default_factory=dict)
    quotients: dict[int, tuple[Tensor, int]] = field(default_factory=dict)
    sums: dict[int, Tensor] = field(default_factory=dict)
    batched: dict[int, Tensor | None] = field(default_factory=dict)
    closed: set[int] = field(default_factory=set)


def note_lookup(low: Lowering, result: Tensor, table: Tensor, d: int, index: Tensor) -> None:
    """A look-up of rows; where its index puts sorted rows back, their candidates are written."""
    if d != 0 or len(index.shape) != 1:
        return
    low.base.add("row_lookup", result.id, table.id, index.id)
    low.routing.lookups[result.id] = (table, index)
    order = low.routing.inverse.get(index.id)
    if order is not None:
        restore(low, result, table, order)


def note_put(low: Lowering, result: Tensor, order: Tensor, value: Tensor) -> None:
    """Rows written by an order: the inverse order where they are counted, rows put back where they were sorted."""
    low.base.add("row_put", result.id, order.id, value.id)
    if low.is_range(value, value.shape[0]):
        low.routing.inverse[result.id] = order
    else:
        restore(low, result, value, order)


def note_sort(low: Lowering, values: Tensor, order: Tensor, x: Tensor, descending: bool) -> None:
    """A sorted vector, and the order that sorts it."""
    low.base.add("sort_order", values.id, order.id, x.id, "down" if descending else "up")
    low.routing.orders[order.id] = order
    if x.id in low.routing.orders and not descending:
        low.routing.inverse[order.id] = low.routing.orders[x.id]
    if is_integer(x.dtype):
        low.routing.sorts[order.id] = (x, values)


def note_clamp(low: Lowering, result: Tensor, x: Tensor, bounds: Sequence[Any]) -> None:
    """A vector of integers clamped to constants."""
    if len(x.shape) != 1 or x.dtype != "int64":
        return
    least, most = [*bounds, None, None][:2]
    numbers = [-(2**30) if least is None else least, 2**30 if most is None else most]
    if all(isinstance(v, int) and abs(v) <= 2**30 for v in numbers):
        low.base.add("row_clamp", result.id, x.id, *numbers)
        low.routing.clamped[result.id] = x


def note_quotient(low: Lowering, result: Tensor, x: Tensor, divisor: int) -> None:
    """A vector of integers divided by a constant, rounded down."""
    if len(x.shape) == 1 and x.dtype == "int64" and 0 < divisor < 2**30:
        low.base.add("row_quotient", result.id, x.id, divisor)
        low.routing.quotients[result.id] = (x, divisor)


def note_histogram(low: Lowering, result: Tensor, x: Tensor, bins: Any, least: Any, most: Any) -> None:
    """``histc`` whose bins hold one integer each. Casts of integers to floats keep them on their side of every bin."""
    source = x
    made = low.made_by.get(x.id)
    if made is not None and made.body.startswith("cast#float") and is_integer(made.args[0].dtype):
        source = made.args[0]
    elif is_floating(x.dtype):
        return
    # counts and bounds are exact in single precision
    if len(x.shape) != 1 or x.dtype not in ("float32", "float64", "int32", "int64") or x.shape[0] >= 2**24:
        return
    if not all(isinstance(v, (int, float)) and v == int(v) for v in (bins, least, most)) or least != 0 or bins >= 2**20:
        return
    if bins == 1 and most == 0:
        low.base.add("histogram_all", result.id, source.id)  # an empty range stands for all that occurs
    elif bins > 1 and most == bins - 1:
        low.base.add("histogram", result.id, source.id, int(bins))


def note_sum(low: Lowering, result: Tensor, x: Tensor) -> None:
    """A cumulative sum of counts."""
    if len(x.shape) == 1 and result.dtype in ("int32", "int64", "float32", "float64"):
        low.base.add("running_sum", result.id, x.id)
        low.routing.sums[result.id] = x


def note_cast(low: Lowering, result: Tensor, x: Tensor) -> None:
    """Offsets in another integer type."""
    if x.id in low.routing.sums and result.dtype in ("int32", "int64"):
        note_sum(low, result, low.routing.sums[x.id])


def note_reduced(low: Lowering, x: Tensor) -> None:
    """A sum is about to be taken over ``x``: rows that met a matrix of their own end here."""
    reduced(low, x)


def note_layout(low: Lowering, result: Tensor, x: Tensor) -> None:
    """A truth value per row, with dimensions of size 1."""
    made = low.made_by[result.id]
    if result.dtype == "bool" and result.shape and keeps_rows(made, result.shape[0]) and result.shape[0] > 1:
        low.base.add("rowwise_layout", result.id)
