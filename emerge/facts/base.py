"""The fact base: what the Datalog programs read, written by the lowering.

Relations are those of ``datalog/schema/graph.dl``; a row is a tuple of numbers, symbols (str) and records (tuples,
nil = None).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

REFERENCE, IMPLEMENTATION = 1, 2
MESH = 0


@dataclass
class FactBase:
    """Facts by relation, and the identifiers given out so far (0 is the mesh).

    Attributes:
        literals: float32 bits -> the constant of both graphs that rounds to them (``Lowering.literal``).
    """

    facts: dict[str, list[tuple[Any, ...]]] = field(default_factory=lambda: defaultdict(list))
    next_id: int = 1
    blocks: dict[Any, int] = field(default_factory=dict)
    literals: dict[bytes, Fraction] = field(default_factory=dict)

    def new_id(self) -> int:
        """A fresh identifier for a tensor or an operator form."""
        self.next_id += 1
        return self.next_id - 1

    def add(self, relation: str, *row: Any) -> None:
        """Adds one fact."""
        self.facts[relation].append(row)

    def add_all(self, relation: str, rows: Iterable[tuple[Any, ...]]) -> None:
        """Adds several facts of one relation."""
        self.facts[relation].extend(rows)


def exact(value: bool | int | float | Fraction) -> Fraction | None:
    """The exact value of a finite constant, or None for infinities and NaN."""
    try:
        return Fraction(value)
    except (ValueError, OverflowError):
        return None


def constant_text(value: bool | int | float | Fraction) -> str:
    """The symbol of a constant: an exact fraction, or ``inf``, ``-inf``, ``nan``."""
    frac = exact(value)
    return str(value) if frac is None else str(frac)
