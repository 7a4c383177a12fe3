"""Numbers in a block: positions of a dimension, and tables that give the numbers of one block their place in it.

Expert-parallel programs hold a table ``[-1, .., 0, 1, .., -1]``: the place of an expert on its rank, -1 for all others.
Looked up at ``T`` it is ``T - l`` in the block ``[l, l + n)`` and -1 elsewhere, arithmetic that the index domain
(datalog/analysis/index.dl) follows.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from emerge.facts.families import RankVector
from emerge.facts.lower import Iter, Lowering, Tensor, whole
from emerge.graph.model import is_integer


@dataclass(frozen=True)
class BlockTable:
    """``first + T - start`` in the block ``[start, start + size)``, ``other`` elsewhere; per rank."""

    start: tuple[int, ...]
    first: tuple[int, ...]
    size: int
    other: int


def placed_range(low: Lowering, x: Any, src: Any, rest: Sequence[Any]) -> Tensor | None:
    """``slice_scatter`` of a range into a vector of one constant, as a table; None where it is something else."""
    if not isinstance(x, Tensor) or not isinstance(src, Tensor) or len(x.shape) != 1 or not is_integer(x.dtype):
        return None
    known, start = low.range_of.get(src.id), low.integers(rest[1])
    if known is None or known[1] != 1 or start is None or rest[3] not in (None, 1) or not isinstance(x.constant, Fraction):
        return None
    n, size = x.shape[0], src.shape[0]
    stop = low.integers(rest[2])
    if stop is None or any(b - a != size or a < 0 or b > n for a, b in zip(start, stop)) or x.constant.denominator != 1:
        return None
    table = BlockTable(tuple(start), tuple(known[0]), size, int(x.constant))
    name = f"placed:{low.side}:{table}:{n}"
    result = low.op(name, "unknown", [], [Iter(n, "pos", whole(n, 0))], [n], x.dtype)
    low.block_tables[result.id] = table
    return result


def looked_up(low: Lowering, table: Tensor, index: Tensor) -> Tensor | None:
    """A look-up in such a table at numbers that lie inside it, as arithmetic."""
    from emerge.facts.ops.pointwise import fill

    block = low.block_tables.get(table.id)
    if block is None or index.dtype != "int64":
        return None
    below = _compared(low, "lt", index, block.start)
    above = _compared(low, "ge", index, [s + block.size for s in block.start])
    off = low.pointwise("or", "or", [below, above], "bool", commutative=True)
    inner = _shifted(low, index, [f - s for f, s in zip(block.first, block.start)])
    result = fill(low, inner, off, Fraction(block.other), "int64")
    if not any(block.first) and block.other < 0:
        low.block_of[result.id] = (off, block.size, block.other)
    low.assume("index_range", result, "indices lie in [0, size): negative ones would count from the end")
    return result


def _value(per_rank: Sequence[int]) -> tuple[str, Any]:
    from emerge.facts.base import constant_text

    if len(set(per_rank)) == 1:
        return constant_text(per_rank[0]), Fraction(per_rank[0])
    return str(tuple(per_rank)), RankVector(tuple(per_rank))


def _compared(low: Lowering, name: str, x: Tensor, per_rank: Sequence[int]) -> Tensor:
    from emerge.facts.ops.pointwise import note_index

    text, value = _value(per_rank)
    result = low.pointwise(f"{name}c#{text}", f"{name}c", [x], "bool")
    note_index(low, result, name, x, value)
    return result


def _shifted(low: Lowering, x: Tensor, per_rank: Sequence[int]) -> Tensor:
    from emerge.facts.ops.pointwise import note_index

    text, value = _value(per_rank)
    if value == 0:
        return x
    result = low.pointwise(f"addc#{text}", "addc", [x], "int64")
    note_index(low, result, "shift", x, value)
    return result


def _relaid(low: Lowering, x: Tensor, root: Tensor, source: Tensor) -> Tensor:
    """``source`` rearranged as ``x`` rearranges ``root``."""
    if x.id == root.id:
        return source
    made = low.made_by[x.id]
    return low.layout(_relaid(low, made.args[0], root, source), x.shape, made.ties, made.broadcast)


def holds_positions(low: Lowering, x: Any, least: Any, most: Any) -> bool:
    """Does clamping to these bounds change nothing, for ``x`` holds positions between them?"""
    if not isinstance(x, Tensor) or (least is not None and not isinstance(least, int)) or isinstance(most, (float, Tensor)):
        return False
    size = low.position_limits.get(low.innermost(x).id)
    inside = most is None or (isinstance(most, int) and size is not None and most >= size - 1)
    return size is not None and (least is None or least <= 0) and inside


def compare_positions(low: Lowering, name: str, x: Tensor, c: Fraction) -> Tensor | None:
    """A comparison with a constant that is the same for all positions, or for all of a block; None where it is not."""
    root = low.innermost(x)
    size, block = low.position_limits.get(root.id), low.block_of.get(root.id)
    if block is not None:
        size = block[1]
    if size is None:
        return None
    test = getattr(operator, name)
    first, last = bool(test(0, c)), bool(test(size - 1, c))
    if first != last or (name in ("eq", "ne") and 0 <= c < size):
        return None
    if block is None:
        return low.constant(first, x.shape, "bool")
    from emerge.facts.ops.pointwise import choice

    off, _, other = block
    return choice(low, _relaid(low, x, root, off), bool(test(other, c)), first, x.shape)
