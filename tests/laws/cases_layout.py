"""Views, permutes, expand, slices, splits and concatenations; traps of axes with one position and equal sizes."""

from __future__ import annotations

from typing import Any

from law_case import LawCase, Program, Twin
from support.build import GraphBuilder, Ref

TP2, TP3 = {"tp": 2}, {"tp": 3}


def parts(g: GraphBuilder, n: int = 2) -> int:
    return 1 if g.mesh else n


def chain(shape: list[int], *steps: tuple[Any, ...], name: str = "x") -> Program:
    """Applies operators to one input: ``chain([2, 3], ("view", [6]), ("relu",))``."""

    def program(g: GraphBuilder) -> Ref:
        y = g.input(name, shape)
        for op, *args in steps:
            y = g.aten(op, y, *args)
        return y

    return program


# ---- views and permutes -----------------------------------------------------------------------------------------

VIEWS = [
    LawCase(
        "view-split-heads",
        TP2,
        chain([3, 10, 7], ("view", [3, 2, 5, 7]), ("permute", [0, 2, 1, 3]), ("gelu",)),
        {"same": chain([3, 10, 7], ("view", [3, 2, 5, 7]), ("permute", [0, 2, 1, 3]), ("gelu",))},
        {"other factors": chain([3, 10, 7], ("view", [3, 5, 2, 7]), ("gelu",))},
        {"x": "a b c ~ a b c"},
        ["a i j c ~ a i j c"],
    ),
    LawCase(
        "view-heads-sharded",
        TP2,
        chain([3, 20], ("view", [3, 4, 5]), ("transpose.int", 0, 1), ("gelu",)),
        {"heads sharded": chain([3, 10], ("view", [3, 2, 5]), ("transpose.int", 0, 1), ("gelu",))},
        {"head axis inside": chain([3, 10], ("view", [3, 5, 2]), ("permute", [2, 0, 1]), ("gelu",))},
        {"x": "s (tp f) ~ s f"},
        ["(tp h) s d ~ h s d"],
    ),
    LawCase(
        "view-inner-sharded",
        TP2,
        chain([3, 20], ("view", [3, 4, 5]), ("gelu",)),
        {"tokens sharded": Twin(chain([3, 10], ("view", [3, 2, 5]), ("gelu",)))},
        {
            "inner part said to be sharded": Twin(
                chain([3, 10], ("view", [3, 2, 5]), ("gelu",)), given={"x": "s (f tp) ~ s f"}
            )
        },
        {"x": "s (tp f) ~ s f"},
        ["s (tp h) d ~ s h d"],
    ),
    LawCase(
        "view-factored-in-two",
        TP2,
        chain([3, 20], ("view", [3, 4, 5]), ("gelu",)),
        {"by way of one axis": chain([3, 20], ("view", [60]), ("view", [12, 5]), ("view", [3, 4, 5]), ("gelu",))},
        {"by way of another order": chain([3, 20], ("view", [3, 5, 4]), ("transpose.int", 1, 2), ("gelu",))},
        {"x": "a b ~ a b"},
        ["a b c ~ a b c"],
    ),
    LawCase(
        "permute-cancelled",
        TP2,
        chain([3, 4, 5], ("gelu",)),
        {"there and back": chain([3, 4, 5], ("permute", [2, 0, 1]), ("gelu",), ("permute", [1, 2, 0]))},
        {
            "twice the same way": Twin(
                chain([4, 4, 4], ("permute", [2, 0, 1]), ("gelu",), ("permute", [2, 0, 1])),
                reference=chain([4, 4, 4], ("gelu",)),
            )
        },
        {"x": "a b c ~ a b c"},
        ["a b c ~ a b c"],
    ),
    LawCase(
        "layout-tokens",
        TP2,
        chain([2, 3, 5], ("gelu",)),
        {"flat tokens": chain([6, 5], ("gelu",), ("view", [2, 3, 5]))},
        {"other order of tokens": chain([6, 5], ("gelu",), ("view", [3, 2, 5]), ("transpose.int", 0, 1))},
        {"x": "b s h ~ (b s) h"},
        ["b s h ~ b s h"],
    ),
    LawCase(
        "layout-sequence-first",
        TP2,
        chain([2, 3, 5], ("gelu",)),
        {"transposed back": chain([6, 5], ("gelu",), ("view", [3, 2, 5]), ("transpose.int", 0, 1))},
        {"read as batch first": chain([6, 5], ("gelu",), ("view", [2, 3, 5]))},
        {"x": "b s h ~ (s b) h"},
        ["b s h ~ b s h"],
    ),
    LawCase(
        "layout-claim",
        TP2,
        chain([2, 3, 5], ("gelu",)),
        {"flat output": Twin(chain([6, 5], ("gelu",)), outputs=["b s h ~ (b s) h"])},
        {
            "flat output in other order": Twin(chain([6, 5], ("gelu",)), outputs=["b s h ~ (s b) h"]),
            "said to be transposed": Twin(
                chain([2, 5, 5], ("gelu",)),
                reference=chain([2, 5, 5], ("gelu",)),
                given={"x": "a b c ~ a b c"},
                outputs=["a b c ~ a c b"],
            ),
        },
        {"x": "b s h ~ (b s) h"},
        ["b s h ~ b s h"],
    ),
    LawCase(
        "reshape-not-nesting",
        TP2,
        chain([6, 10], ("view", [4, 15]), ("gelu",)),
        {"replicated": chain([6, 10], ("view", [4, 15]), ("gelu",))},
        {
            "transposed before": Twin(
                chain([10, 6], ("t",), ("clone",), ("view", [4, 15]), ("gelu",)),
                given={"x": "a b ~ a b"},
                reference=chain([10, 6], ("view", [4, 15]), ("gelu",)),
            )
        },
        {"x": "a b ~ a b"},
        ["a b ~ a b"],
    ),
    LawCase(
        "reshape-not-nesting-apart",
        TP2,
        chain([6, 10], ("gelu",)),
        {"there and back": chain([6, 10], ("view", [4, 15]), ("gelu",), ("view", [6, 10]))},
        {"back in another order": chain([6, 10], ("view", [4, 15]), ("gelu",), ("view", [10, 6]), ("t",))},
        {"x": "a b ~ a b"},
        ["a b ~ a b"],
        unproved={"there and back": "boundaries that do not nest: no common axes, though gelu is pointwise"},
    ),
]


# ---- expand, one position, equal operands -----------------------------------------------------------------------


def normed_one(g: GraphBuilder) -> Ref:
    """Layer norm over one position (always 0), expanded."""
    x = g.input("x", [5, 1])
    return g.aten("expand", g.aten("native_layer_norm", x, [1], None, None, 1e-5)[0], [5, 4])


def pairwise(op: str, *, swap: bool = False) -> Program:
    """x [5, 1] and y [1, 7] broadcast against each other."""

    def program(g: GraphBuilder) -> Ref:
        x, y = g.input("x", [5, 1]), g.input("y", [1, 7])
        return g.aten(op, *((y, x) if swap else (x, y)))

    return program


EXPANDS = [
    LawCase(
        "expand",
        TP2,
        chain([5, 1], ("expand", [5, 4]), ("gelu",)),
        {"expanded after": chain([5, 1], ("gelu",), ("expand", [5, 4]))},
        {
            "repeated rows": Twin(
                chain([4, 1], ("expand", [4, 4]), ("t",), ("gelu",)),
                reference=chain([4, 1], ("expand", [4, 4]), ("gelu",)),
            )
        },
        {"x": "a 1 ~ a 1"},
        ["a b ~ a b"],
    ),
    LawCase(
        "softmax-one-position",
        TP2,
        chain([5, 1], ("_softmax", 1, False), ("expand", [5, 2])),
        {"same": chain([5, 1], ("_softmax", 1, False), ("expand", [5, 2]))},
        {"over the expanded axis": chain([5, 1], ("expand", [5, 2]), ("_softmax", 1, False))},
        {"x": "a 1 ~ a 1"},
        ["a b ~ a b"],
    ),
    LawCase(
        "sum-over-expanded",
        TP2,
        chain([5, 1], ("expand", [5, 4]), ("sum.dim_IntList", [1])),
        {"same": chain([5, 1], ("expand", [5, 4]), ("sum.dim_IntList", [1]))},
        {
            "over one position": chain([5, 1], ("sum.dim_IntList", [1])),
            "over another number of positions": chain([5, 1], ("expand", [5, 3]), ("sum.dim_IntList", [1])),
        },
        {"x": "a 1 ~ a 1"},
        ["a ~ a"],
    ),
    LawCase(
        "mean-over-one-position",
        TP2,
        chain([5, 1], ("mean.dim", [1])),
        {"same": chain([5, 1], ("mean.dim", [1])), "squeezed": chain([5, 1], ("squeeze.dim", 1))},
        {"sum over two": chain([5, 1], ("expand", [5, 2]), ("sum.dim_IntList", [1]))},
        {"x": "a 1 ~ a 1"},
        ["a ~ a"],
        unproved={"squeezed": "reducing an axis of one position is not lowered to a rearrangement"},
    ),
    LawCase(
        "layer-norm-one-position",
        TP2,
        normed_one,
        {"same": normed_one},
        {"identity": chain([5, 1], ("expand", [5, 4]))},
        {"x": "a 1 ~ a 1"},
        ["a b ~ a b"],
    ),
    LawCase(
        "outer-product",
        TP2,
        pairwise("mul.Tensor"),
        {"same": pairwise("mul.Tensor"), "commuted": pairwise("mul.Tensor", swap=True)},
        {"added": pairwise("add.Tensor")},
        {"x": "a 1 ~ a 1", "y": "1 b ~ 1 b"},
        ["a b ~ a b"],
    ),
    LawCase(
        "broadcast-row-or-column",
        TP2,
        lambda g: g.aten("add.Tensor", g.input("x", [4, 4]), g.aten("unsqueeze", g.input("v", [4]), 0)),
        {"same": lambda g: g.aten("add.Tensor", g.input("x", [4, 4]), g.input("v", [4]))},
        {"column": lambda g: g.aten("add.Tensor", g.input("x", [4, 4]), g.aten("unsqueeze", g.input("v", [4]), 1))},
        {"x": "a b ~ a b", "v": "b ~ b"},
        ["a b ~ a b"],
    ),
    LawCase(
        "repeat-heads",
        TP2,
        lambda g: repeated(g, "interleave"),
        {"expand and view": lambda g: repeated(g, "expand"), "same": lambda g: repeated(g, "interleave")},
        {"block-wise": lambda g: repeated(g, "repeat")},
        {"x": "s (tp h) d ~ s h d"},
        ["s (tp h) d ~ s h d"],
    ),
]


def repeated(g: GraphBuilder, how: str) -> Ref:
    """Key heads [3, 5 * tp, 7] repeated 4 times each."""
    h = 5 * parts(g)
    x = g.input("x", [3, h, 7])
    if how == "interleave":
        y = g.aten("repeat_interleave.self_int", x, 4, 1, result=("float32", [3, 4 * h, 7]))
    elif how == "expand":
        y = g.aten("view", g.aten("clone", g.aten("expand", g.aten("unsqueeze", x, 2), [3, h, 4, 7])), [3, 4 * h, 7])
    else:
        y = g.aten("repeat", x, [1, 4, 1])
    return g.aten("gelu", y)


# ---- slices, splits, concatenations -----------------------------------------------------------------------------


def sliced(start: int, stop: int, step: int = 1, *, dim: int = 1) -> Program:
    return chain([5, 12], ("slice.Tensor", dim, start, stop, step), ("gelu",))


def joined(swap: bool = False, dim: int = 1) -> Program:
    """x and y [5, 4] side by side."""

    def program(g: GraphBuilder) -> Ref:
        x, y = g.input("x", [5, 4]), g.input("y", [5, 4])
        return g.aten("gelu", g.aten("cat", [y, x] if swap else [x, y], dim))

    return program


def joined_unequal(swap: bool = False) -> Program:
    def program(g: GraphBuilder) -> Ref:
        x, y = g.input("x", [5, 4]), g.input("y", [5, 3])
        return g.aten("gelu", g.aten("cat", [y, x] if swap else [x, y], 1))

    return program


def joined_pieces(x_size: int, y_size: int, swap: bool = False, split: bool = True) -> Program:
    """Sharded x and y side by side on every rank, then taken apart again (a fused projection)."""

    def program(g: GraphBuilder) -> Any:
        n = parts(g)
        x, y = g.input("x", [5, x_size * n]), g.input("y", [5, y_size * n])
        both = g.aten("gelu", g.aten("cat", [x, y], 1))
        if not split:
            return both
        first, second = g.aten("split_with_sizes", both, [x_size * n, y_size * n], 1)
        return (
            (g.aten("relu", second), g.aten("relu", first)) if swap else (g.aten("relu", first), g.aten("relu", second))
        )

    return program


def gated(swap: bool = False) -> Program:
    """silu(gate) * up of a fused weight [gate; up], rows sharded piece by piece: [5, 7] -> [5, 3 * tp]."""

    def program(g: GraphBuilder) -> Ref:
        n = 3 * parts(g)
        x, w = g.input("x", [5, 7]), g.input("w", [2 * n, 7])
        gate, up = g.aten("split.Tensor", g.aten("mm", x, g.aten("t", w)), n, 1)
        return g.aten("mul.Tensor", g.aten("silu", up if swap else gate), gate if swap else up)

    return program


def gated_apart(g: GraphBuilder) -> Ref:
    """The same with two weights of their own."""
    n = 3 * parts(g)
    x, gate, up = g.input("x", [5, 7]), g.input("gate", [n, 7]), g.input("up", [n, 7])
    return g.aten("mul.Tensor", g.aten("silu", g.aten("mm", x, g.aten("t", gate))), g.aten("mm", x, g.aten("t", up)))


def fused_qkv(g: GraphBuilder) -> tuple[Ref, Ref]:
    """Query [8 * tp] and key [3 * tp] rows of one weight, unequal."""
    n = parts(g)
    x, w = g.input("x", [5, 7]), g.input("w", [11 * n, 7])
    q, k = g.aten("split_with_sizes", g.aten("mm", x, g.aten("t", w)), [8 * n, 3 * n], 1)
    return g.aten("gelu", q), g.aten("gelu", k)


def separate_qk(g: GraphBuilder) -> tuple[Ref, Ref]:
    n = parts(g)
    x, q, k = g.input("x", [5, 7]), g.input("q", [8 * n, 7]), g.input("k", [3 * n, 7])
    return g.aten("gelu", g.aten("mm", x, g.aten("t", q))), g.aten("gelu", g.aten("mm", x, g.aten("t", k)))


def rank_sliced(how: str) -> Program:
    """Rank r takes its block of a replicated tensor [5, 12]."""

    def program(g: GraphBuilder) -> Ref:
        x = g.aten("gelu", g.input("x", [5, 12]))
        if not g.mesh:
            return x
        start = {"own": 4 * g.rank, "first": 0, "reversed": 8 - 4 * g.rank, "last wrong": 4 * min(g.rank, 1)}[how]
        return g.aten("slice.Tensor", x, 1, start, start + 4)

    return program


def chunked(pick: str) -> Program:
    def program(g: GraphBuilder) -> Ref:
        x = g.aten("gelu", g.input("x", [5, 12]))
        if not g.mesh:
            return x
        pieces = g.aten("split.Tensor", x, 4, 1)
        return pieces[{"own": g.rank, "next": (g.rank + 1) % 3}[pick]]

    return program


FUSED = {"w[0:6]": ("w[0:3]", "(tp n) k ~ n k"), "w[6:12]": ("w[3:6]", "(tp n) k ~ n k"), "x": "s k ~ s k"}
PIECES = [
    LawCase(
        "slice",
        TP2,
        sliced(3, 6),
        {"same": sliced(3, 6)},
        {"other start": sliced(6, 9), "overlapping": sliced(4, 7)},
        {"x": "a b ~ a b"},
        ["a b ~ a b"],
    ),
    LawCase(
        "slice-unequal",
        TP2,
        sliced(2, 7),
        {"same": sliced(2, 7)},
        {"other start": sliced(3, 8)},
        {"x": "a b ~ a b"},
        ["a b ~ a b"],
    ),
    LawCase(
        "slice-step",
        TP2,
        sliced(1, 12, 2),
        {"same": sliced(1, 12, 2)},
        {"other start": sliced(0, 12, 2), "one block": sliced(6, 12)},
        {"x": "a b ~ a b"},
        ["a b ~ a b"],
    ),
    LawCase(
        "slice-other-axis-sharded",
        TP2,
        lambda g: chain([5 * parts(g), 12], ("slice.Tensor", 1, 3, 6), ("gelu",))(g),
        {"rows sharded": chain([5, 12], ("slice.Tensor", 1, 3, 6), ("gelu",))},
        {"other piece": chain([5, 12], ("slice.Tensor", 1, 0, 3), ("gelu",))},
        {"x": "(tp a) b ~ a b"},
        ["(tp a) b ~ a b"],
    ),
    LawCase(
        "rank-slice",
        TP3,
        rank_sliced("own"),
        {"own block": rank_sliced("own"), "own chunk": chunked("own")},
        {
            "first block": rank_sliced("first"),
            "reversed": rank_sliced("reversed"),
            "one rank wrong": rank_sliced("last wrong"),
            "next chunk": chunked("next"),
        },
        {"x": "a b ~ a b"},
        ["a (tp b) ~ a b"],
    ),
    LawCase(
        "cat",
        TP2,
        joined(),
        {"same": joined()},
        {"swapped": joined(True)},
        {"x": "a b ~ a b", "y": "a b ~ a b"},
        ["a b ~ a b"],
    ),
    LawCase(
        "cat-rows-or-columns",
        TP2,
        lambda g: g.aten("amax", joined(dim=0)(g), [0]),
        {"same": lambda g: g.aten("amax", joined(dim=0)(g), [0])},
        {
            "columns": lambda g: g.aten("slice.Tensor", g.aten("amax", joined(dim=1)(g), [0]), 0, 0, 4),
            "columns, rows of them": lambda g: g.aten("amax", g.aten("view", joined(dim=1)(g), [5, 4, 2]), [0, 2]),
        },
        {"x": "a b ~ a b", "y": "a b ~ a b"},
        ["b ~ b"],
    ),
    LawCase(
        "cat-unequal",
        TP2,
        joined_unequal(),
        {"same": joined_unequal()},
        {"swapped": Twin(joined_unequal(True))},
        {"x": "a b ~ a b", "y": "a b ~ a b"},
        ["a b ~ a b"],
    ),
    LawCase(
        "cat-of-shards-equal",
        TP2,
        joined_pieces(3, 3),
        {"piece by piece": joined_pieces(3, 3)},
        {"pieces swapped": joined_pieces(3, 3, swap=True)},
        {"x": "a (tp b) ~ a b", "y": "a (tp b) ~ a b"},
        ["a (tp b) ~ a b"] * 2,
    ),
    LawCase(
        "cat-of-shards-unequal",
        TP2,
        joined_pieces(4, 3),
        {"piece by piece": joined_pieces(4, 3)},
        {
            "one after the other": Twin(
                joined_pieces(4, 3, split=False), reference=joined_pieces(4, 3, split=False), outputs=["a (tp b) ~ a b"]
            )
        },
        {"x": "a (tp b) ~ a b", "y": "a (tp b) ~ a b"},
        ["a (tp b) ~ a b"] * 2,
    ),
    LawCase(
        "cat-of-shards-is-no-shard",
        TP2,
        joined_pieces(3, 3, split=False),
        {"piece by piece": Twin(joined_pieces(3, 3, split=False), outputs=["a (i tp b) ~ a (i b) [i=2]"])},
        {"as one block": joined_pieces(3, 3, split=False)},
        {"x": "a (tp b) ~ a b", "y": "a (tp b) ~ a b"},
        ["a (tp b) ~ a b"],
    ),
    LawCase(
        "fused-gate-up",
        TP2,
        gated(),
        {"piece by piece": gated()},
        {
            "sharded evenly": Twin(gated(), given={"x": "s k ~ s k", "w": "(tp n) k ~ n k"}),
            "gate and up swapped": gated(True),
        },
        FUSED,
        ["s (tp n) ~ s n"],
    ),
    LawCase(
        "fused-from-separate",
        TP2,
        gated_apart,
        {
            "fused": Twin(
                gated(),
                given={"x": "s k ~ s k", "gate": ("w[0:3]", "(tp n) k ~ n k"), "up": ("w[3:6]", "(tp n) k ~ n k")},
            )
        },
        {
            "exchanged": Twin(
                gated(),
                given={"x": "s k ~ s k", "up": ("w[0:3]", "(tp n) k ~ n k"), "gate": ("w[3:6]", "(tp n) k ~ n k")},
            )
        },
        {},
        ["s (tp n) ~ s n"],
    ),
    LawCase(
        "fused-unequal",
        TP2,
        fused_qkv,
        {
            "piece by piece": Twin(
                fused_qkv,
                given={
                    "x": "s k ~ s k",
                    "w[0:16]": ("w[0:8]", "(tp n) k ~ n k"),
                    "w[16:22]": ("w[8:11]", "(tp n) k ~ n k"),
                },
            )
        },
        {"sharded evenly": fused_qkv},
        {"x": "s k ~ s k", "w": "(tp n) k ~ n k"},
        ["s (tp n) ~ s n"] * 2,
    ),
    LawCase(
        "fused-unequal-from-separate",
        TP2,
        separate_qk,
        {
            "fused": Twin(
                fused_qkv,
                given={"x": "s k ~ s k", "q": ("w[0:8]", "(tp n) k ~ n k"), "k": ("w[8:11]", "(tp n) k ~ n k")},
            )
        },
        {
            "key rows first": Twin(
                lambda g: fused_swapped(g),
                given={"x": "s k ~ s k", "q": ("w[0:8]", "(tp n) k ~ n k"), "k": ("w[8:11]", "(tp n) k ~ n k")},
            )
        },
        {},
        ["s (tp n) ~ s n"] * 2,
    ),
    LawCase(
        "stack-unbind",
        TP2,
        lambda g: stacked(g, False),
        {"same": lambda g: stacked(g, False)},
        {"other order": lambda g: stacked(g, True)},
        {"x": "a b ~ a b", "y": "a b ~ a b"},
        ["a b ~ a b"],
    ),
]


def fused_swapped(g: GraphBuilder) -> tuple[Ref, Ref]:
    """Reads the key rows where the query rows are: the first 3 rows for the key, the other 8 for the query."""
    x, w = g.input("x", [5, 7]), g.input("w", [11, 7])
    k, q = g.aten("split_with_sizes", g.aten("mm", x, g.aten("t", w)), [3, 8], 1)
    return g.aten("gelu", q), g.aten("gelu", k)


def stacked(g: GraphBuilder, swap: bool) -> Ref:
    """Stacks x and y [5, 4], then subtracts one from the other."""
    both = g.aten("gelu", g.aten("stack", [g.input("x", [5, 4]), g.input("y", [5, 4])], 1))
    a, b = g.aten("select.int", both, 1, 0), g.aten("select.int", both, 1, 1)
    return g.aten("sub.Tensor", *((b, a) if swap else (a, b)))


CASES = [*VIEWS, *EXPANDS, *PIECES]
