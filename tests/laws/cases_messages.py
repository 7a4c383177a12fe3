"""Messages between ranks, and microbatches whose results are joined again."""

from __future__ import annotations

from collections.abc import Callable

from law_case import LawCase, Program, Twin
from support.build import FUNCOL, GraphBuilder, Ref

TP3, GRID = {"tp": 3}, {"dp": 2, "tp": 3}


def passed_on(g: GraphBuilder, x: Ref, group: str, shift: int = 1) -> Ref:
    """Every rank sends to the next one of its group, and receives from the one before."""
    if not g.mesh:
        return x
    members = next(m for m in g.groups[group] if g.rank in m)
    at = members.index(g.rank)
    to, source = members[(at + shift) % len(members)], members[(at - shift) % len(members)]
    g.op(f"{FUNCOL}.isend.default", x, to, 0, group, result=("float32", [0]))
    return g.wait(g.op(f"{FUNCOL}.irecv.default", x, source, 0, group))


def ring(group: str, shift: int = 1, sharded: int = 1) -> Program:
    """x [6, 4], of which every rank of ``dp`` holds ``1 / sharded``, goes on to the next rank of the group."""
    return lambda g: g.aten("gelu", passed_on(g, g.input("x", [6 // (sharded if g.mesh else 1), 4]), group, shift))


def part(group: str) -> Program:
    """The part of a sum that a rank of ``tp`` holds goes on, and is taken for the sum."""

    def program(g: GraphBuilder) -> Ref:
        x, w = g.input("x", [6, 4]), g.input("w", [4, 2 if g.mesh else 6])
        return passed_on(g, g.aten("sum.dim_IntList", g.aten("mm", x, w), [1]), group)

    return program


def microbatches(
    count: int, order: Callable[[list[Ref]], list[Ref]] = list, last: str = "gelu", dim: int = 0
) -> Program:
    """``gelu(x w)``, in the implementation for ``count`` pieces of ``x`` one by one."""

    def program(g: GraphBuilder) -> Ref:
        x, w = g.input("x", [6, 4]), g.input("w", [4, 4])
        if not g.mesh:
            return g.aten("gelu", g.aten("mm", x, w))
        pieces = [x] if count == 1 else list(g.aten("split.Tensor", x, [6, 4][dim] // count, dim))
        parts = []
        for i, p in enumerate(pieces):
            weight = w if dim == 0 else g.aten("slice.Tensor", w, 0, i * 4 // count, (i + 1) * 4 // count)
            parts.append(g.aten("gelu" if i < count - 1 else last, passed_on(g, g.aten("mm", p, weight), "tp")))
        return g.aten("cat", order(parts), 0) if dim == 0 else g.aten("add.Tensor", *parts)

    return program


def normalised(dim: int, split: int) -> Program:
    """A softmax over one dimension, for pieces along another one (right) or the same one (wrong)."""

    def program(g: GraphBuilder) -> Ref:
        x = g.input("x", [6, 4])
        if not g.mesh:
            return g.aten("_softmax", x, dim, False)
        parts = [g.aten("_softmax", p, dim, False) for p in g.aten("split.Tensor", x, [6, 4][split] // 2, split)]
        return g.aten("cat", parts, split)

    return program


CASES = [
    LawCase(
        "transfer",
        GRID,
        ring("tp"),
        {
            "over tp": ring("tp"),
            "backwards": ring("tp", -1),
            "shards along another axis": Twin(
                ring("tp", sharded=2), given={"x": "(dp s) k ~ s k"}, outputs=["(dp s) k ~ s k"]
            ),
        },
        {
            "shards along the ring": Twin(
                ring("dp", sharded=2), given={"x": "(dp s) k ~ s k"}, outputs=["(dp s) k ~ s k"]
            ),
            "parts of a sum": Twin(part("tp"), part("tp"), {"x": "s k ~ s k", "w": "k (tp h) ~ k h"}, ["s ~ s"]),
        },
        {"x": "s k ~ s k"},
        ["s k ~ s k"],
    ),
    LawCase(
        "form-joined",
        TP3,
        microbatches(1),
        {"two": microbatches(2), "three": microbatches(3)},
        {
            "reversed": microbatches(2, lambda parts: parts[::-1]),
            "one piece twice": microbatches(2, lambda parts: [parts[0], parts[0]]),
            "another function at last": microbatches(3, last="relu"),
            "split where it is reduced": microbatches(2, dim=1),
        },
        {"x": "s k ~ s k", "w": "k h ~ k h"},
        ["s h ~ s h"],
    ),
    LawCase(
        "form-joined-softmax",
        TP3,
        normalised(1, 0),
        {"along another dimension": normalised(1, 0)},
        {"along its own": normalised(1, 1)},
        {"x": "s k ~ s k"},
        ["s k ~ s k"],
    ),
]
