"""What a row of the bug corpus is, and helpers that its programs share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from support.build import DType, GraphBuilder, Ref

from emerge.graph.relations import RelationEntry

Program = Callable[[GraphBuilder], Any]
INT64, FLOAT32 = DType("int64"), DType("float32")


@dataclass
class Row:
    """One row of the corpus.

    Attributes:
        source, mechanism: of the corpus.
        ranks: number of ranks of the only mesh axis ``tp``.
        inputs, outputs: relations of both twins; ``wrong_inputs``: where the bug is in how weights are loaded.
        blame: nodes at which a finding about the wrong twin may point; of the implementation first the planted one,
            then its direct consumers.
        ranges: exclusive upper bounds of integer inputs.
        wrong_verdict: of the wrong twin.
        smallest: the wrong twin differs by more than this, relative to the largest value.
    """

    id: str
    source: str
    mechanism: str
    ranks: int
    reference: Program
    right: Program
    wrong: Program
    inputs: list[RelationEntry]
    outputs: list[RelationEntry]
    blame: dict[str, list[str]]
    diagnosis: str | None = None
    wrong_inputs: list[RelationEntry] | None = None
    blamed_ranks: list[int] | None = None
    smallest: float = 1e-3
    wrong_verdict: str = "NOT_EQUIVALENT"


def linear(g: GraphBuilder, x: Ref, w: Ref, **more: Any) -> Ref:
    """``x w^T`` of two matrices, as ATen writes it."""
    return g.aten("mm", x, g.aten("t", w), **more)
