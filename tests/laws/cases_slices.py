"""Slices taken before or after an operator, inside a concatenation, and through rearrangements."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from law_case import LawCase, Program
from support.build import GraphBuilder, Ref

TP2 = {"tp": 2}
SAME = "a b ~ a b"
Step = Callable[[GraphBuilder, Ref, Ref], Ref]


def cut(g: GraphBuilder, x: Ref, dim: int, start: int, stop: int) -> Ref:
    return g.aten("slice.Tensor", x, dim, start, stop)


def through(step: Step, when: str, *, x_dim: int | None, y_dim: int | None, dim: int, start: int = 2) -> Program:
    """``step`` on x [6, 8] and y [6, 8] and a slice of 3 rows or columns of its result.

    ``x_dim``, ``y_dim``: the dimension of the operands that the slice of dimension ``dim`` belongs to.
    """

    def program(g: GraphBuilder) -> Ref:
        x, y = g.aten("sin", g.input("x", [6, 8])), g.aten("sin", g.input("y", [6, 8]))
        if when == "before":
            x = x if x_dim is None else cut(g, x, x_dim, start, start + 3)
            y = y if y_dim is None else cut(g, y, y_dim, start, start + 3)
            return step(g, x, y)
        return cut(g, step(g, x, y), dim, start, start + 3)

    return program


def law(
    name: str, step: Step, dim: int, x_dim: int | None, y_dim: int | None, *, commutes: bool = True, out: str = SAME
) -> LawCase:
    """The slice may be taken before ``step`` (or may not, where it reads the sliced axis as a whole)."""
    places: dict[str, Any] = {"x_dim": x_dim, "y_dim": y_dim, "dim": dim}
    after = through(step, "after", **places)
    before = {"before": through(step, "before", **places)}
    wrong: dict[str, Program] = {"other start": through(step, "before" if commutes else "after", start=3, **places)}
    right: dict[str, Program] = {"after": after}
    if commutes:
        right |= before
    else:
        wrong |= before
    return LawCase(f"slice-{name}", TP2, after, right, wrong, {"x": SAME, "y": SAME}, [out])


def product(g: GraphBuilder, x: Ref, y: Ref) -> Ref:
    return g.aten("mm", x, g.aten("t", y))


def softmax(dim: int) -> Step:
    return lambda g, x, y: g.aten("_softmax", x, dim, False)


THROUGH = [
    law("add", lambda g, x, y: g.aten("add.Tensor", x, y), 1, 1, 1),
    law("sub", lambda g, x, y: g.aten("sub.Tensor", x, y), 0, 0, 0),
    law("gelu", lambda g, x, y: g.aten("gelu", x), 1, 1, None),
    law("product-rows", product, 0, 0, None),
    law("product-columns", product, 1, None, 0),
    law("sum", lambda g, x, y: g.aten("sum.dim_IntList", x, [0]), 0, 1, None, out="a ~ a"),
    law("transpose", lambda g, x, y: g.aten("t", x), 0, 1, None),
    law("view", lambda g, x, y: g.aten("unsqueeze", x, 2), 1, 1, None, out="a b 1 ~ a b 1"),
    law("softmax", softmax(0), 1, 1, None),
    law("softmax-whole", softmax(1), 1, 1, None, commutes=False),
    law("cumsum", lambda g, x, y: g.aten("cumsum", x, 0), 1, 1, None),
    law("cumsum-whole", lambda g, x, y: g.aten("cumsum", x, 1), 1, 1, None, commutes=False),
    law("layer-norm", lambda g, x, y: g.aten("native_layer_norm", x, [8], None, None, 1e-5)[0], 0, 0, None),
    law("flip", lambda g, x, y: g.aten("flip", x, [0]), 1, 1, None),
    law("flip-whole", lambda g, x, y: g.aten("flip", x, [1]), 1, 1, None, commutes=False),
]


def pieces(kind: str) -> Program:
    """[x | y] of x [5, 4] and y [5, 6], columns 5 .. 8 (in y) or 2 .. 6 (in both)."""

    def program(g: GraphBuilder) -> Ref:
        x, y = g.aten("sin", g.input("x", [5, 4])), g.aten("sin", g.input("y", [5, 6]))
        if kind == "inside":
            return cut(g, g.aten("cat", [x, y], 1), 1, 5, 8)
        if kind == "piece":
            return cut(g, y, 1, 1, 4)
        if kind == "piece without offset":
            return cut(g, y, 1, 2, 5)
        if kind == "across":
            return cut(g, g.aten("cat", [x, y], 1), 1, 2, 6)
        if kind == "across, joined":
            return g.aten("cat", [cut(g, x, 1, 2, 4), cut(g, y, 1, 0, 2)], 1)
        return g.aten("cat", [cut(g, x, 1, 2, 4), cut(g, y, 1, 2, 4)], 1)

    return program


def heads(kind: str) -> Program:
    """Heads 4 .. 8 of x [5, (12 3)], sliced as heads or as features; wrongly as every third feature."""

    def program(g: GraphBuilder) -> Ref:
        x = g.aten("sin", g.input("x", [5, 36]))
        if kind == "features":
            return g.aten("view", cut(g, x, 1, 12, 24), [5, 4, 3])
        if kind == "heads":
            return cut(g, g.aten("view", x, [5, 12, 3]), 1, 4, 8)
        return g.aten("transpose.int", cut(g, g.aten("view", x, [5, 3, 12]), 2, 4, 8), 1, 2)

    return program


def repeated(kind: str) -> Program:
    """Query heads 4 .. 8 of 3 key heads [5, 3, 7] repeated 4 times: key head 1, four times."""

    def program(g: GraphBuilder) -> Ref:
        x = g.aten("sin", g.input("x", [5, 3, 7]))
        if kind == "after":
            wide = g.aten("expand", g.aten("unsqueeze", x, 2), [5, 3, 4, 7])
            return cut(g, g.aten("view", g.aten("clone", wide), [5, 12, 7]), 1, 4, 8)
        head = 1 if kind == "head 1" else 2
        return g.aten("expand", cut(g, x, 1, head, head + 1), [5, 4, 7])

    return program


def sliced_twice(starts: tuple[int, int]) -> Program:
    def program(g: GraphBuilder) -> Ref:
        x = g.aten("sin", g.input("x", [5, 12]))
        first, second = starts
        return (
            cut(g, cut(g, x, 1, first, first + 7), 1, second, second + 3) if first else cut(g, x, 1, second, second + 3)
        )

    return program


NESTED = [
    LawCase(
        "slice-inside-cat",
        TP2,
        pieces("inside"),
        {"of the piece": pieces("piece")},
        {"offset of the first piece ignored": pieces("piece without offset")},
        {"x": SAME, "y": SAME},
        [SAME],
    ),
    LawCase(
        "slice-across-cat",
        TP2,
        pieces("across"),
        {"same": pieces("across"), "joined": pieces("across, joined")},
        {"same offsets in both": pieces("wrong")},
        {"x": SAME, "y": SAME},
        [SAME],
    ),
    LawCase(
        "slice-of-heads",
        TP2,
        heads("heads"),
        {"features": heads("features")},
        {"other grouping": heads("wrong")},
        {"x": SAME},
        ["a b c ~ a b c"],
    ),
    LawCase(
        "slice-of-repeated-heads",
        TP2,
        repeated("after"),
        {"same": repeated("after"), "one key head": repeated("head 1")},
        {"other key head": repeated("head 2")},
        {"x": "a b c ~ a b c"},
        ["a b c ~ a b c"],
    ),
    LawCase(
        "slice-of-slice",
        TP2,
        sliced_twice((0, 5)),
        {"twice": sliced_twice((3, 2))},
        {"inner start forgotten": sliced_twice((5, 4)), "one off": sliced_twice((3, 3))},
        {"x": SAME},
        [SAME],
    ),
]

CASES = [*THROUGH, *NESTED]
