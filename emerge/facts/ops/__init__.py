"""What operators mean: one function per operator family, from a node to a signature."""

from emerge.facts.ops import (
    attention,
    collective,
    contraction,
    create,
    index,
    layout,
    loss,
    mixed,
    pointwise,
    positions,
    reduction,
)

__all__ = [
    "attention",
    "collective",
    "contraction",
    "create",
    "index",
    "layout",
    "loss",
    "mixed",
    "pointwise",
    "positions",
    "reduction",
]
