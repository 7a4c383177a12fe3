"""What operators mean: one function per operator family, from a node to a signature."""

from emerge.facts.ops import (
    attention,
    collective,
    complex_numbers,
    contraction,
    create,
    index,
    layout,
    loss,
    mixed,
    pointwise,
    positions,
    ranking,
    reduction,
)

__all__ = [
    "attention",
    "collective",
    "complex_numbers",
    "contraction",
    "create",
    "index",
    "layout",
    "loss",
    "mixed",
    "pointwise",
    "positions",
    "ranking",
    "reduction",
]
