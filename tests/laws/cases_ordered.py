"""Operators for which position matters: over a sharded axis they need the whole axis."""

from __future__ import annotations

from typing import Any

from law_case import LawCase, Program
from support.build import GraphBuilder, Ref

TP2 = {"tp": 2}


def parts(g: GraphBuilder) -> int:
    return 1 if g.mesh else 2


def ordered(op: str, *args: Any, index: int | None = None) -> Program:
    """An operator along the axis of x [4 * tp, 5] that is sharded in the implementation."""

    def program(g: GraphBuilder) -> Ref:
        y = g.aten(op, g.input("x", [4 * parts(g), 5]), *args)
        return y if index is None else y[index]

    return program


def ordered_gathered(op: str, *args: Any, index: int | None = None) -> Program:
    def program(g: GraphBuilder) -> Ref:
        y = g.aten(op, g.all_gather(g.input("x", [4 * parts(g), 5]), "tp"), *args)
        y = y if index is None else y[index]
        return g.aten("slice.Tensor", y, 0, 4 * g.rank, 4 * g.rank + 4) if g.mesh else y

    return program


ROWS = "(tp a) b ~ a b"
ORDERED = [
    LawCase(
        f"ordered-{name}",
        TP2,
        ordered(op, *args),
        {"gathered": ordered_gathered(op, *args)},
        {"sharded": ordered(op, *args)},
        {"x": ROWS},
        [ROWS],
    )
    for name, op, args in (
        ("cumsum", "cumsum", (0,)),
        ("flip", "flip", ([0],)),
        ("roll", "roll", ([1], [0])),
        ("tril", "tril", ()),
    )
] + [
    LawCase(
        "ordered-sort",
        TP2,
        ordered("sort", 0, index=0),
        {"gathered": ordered_gathered("sort", 0, index=0)},
        {"sharded": ordered("sort", 0, index=0)},
        {"x": ROWS},
        [ROWS],
        unproved={"gathered": "the axis that sort creates is divided on one side only"},
    ),
    LawCase(
        "ordered-topk",
        TP2,
        lambda g: g.aten("topk", g.input("x", [5 * parts(g), 8]), 3)[1],
        {"rows sharded": lambda g: g.aten("topk", g.input("x", [5, 8]), 3)[1]},
        {"smallest": lambda g: g.aten("topk", g.input("x", [5, 8]), 3, -1, False)[1]},
        {"x": ROWS},
        [ROWS],
    ),
    LawCase(
        "ordered-cumsum-local",
        TP2,
        lambda g: g.aten("cumsum", g.input("x", [5 * parts(g), 8]), 1),
        {"rows sharded": lambda g: g.aten("cumsum", g.input("x", [5, 8]), 1)},
        {"other axis": lambda g: g.aten("cumsum", g.input("x", [5, 8]), 0)},
        {"x": ROWS},
        [ROWS],
    ),
]

CASES = ORDERED
