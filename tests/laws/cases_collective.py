"""Collectives on meshes of one and two axes, sequence parallelism, all-to-all, groups in other orders."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from law_case import LawCase, Program, Twin
from support.build import FUNCOL, GraphBuilder, Ref

TP2, TP3, TP4 = {"tp": 2}, {"tp": 3}, {"tp": 4}
GRID = {"dp": 2, "tp": 3}
NODES = {"node": 2, "gpu": 2}


def parts(g: GraphBuilder, n: int) -> int:
    return 1 if g.mesh else n


def linear(g: GraphBuilder, x: Ref, w: Ref) -> Ref:
    return g.aten("mm", x, g.aten("t", w))


def local(shape: Sequence[int], sharded: dict[int, int], g: GraphBuilder, name: str = "x") -> Ref:
    """An input with these local sizes; ``sharded``: dimension -> number of parts of the whole."""
    return g.input(name, [n * parts(g, sharded.get(d, 1)) for d, n in enumerate(shape)])


# ---- two mesh axes ----------------------------------------------------------------------------------------------


def grid_row(group: str, how: str = "sum") -> Program:
    """Row-parallel over tp, batch over dp: x [2 * 5, 3 * 4], w [7, 3 * 4]."""

    def program(g: GraphBuilder) -> Ref:
        x, w = local([5, 4], {0: 2, 1: 3}, g), local([7, 4], {1: 3}, g, "w")
        return g.all_reduce(linear(g, x, w), group, how)

    return program


def grid_gather(group: str, dim: int = 1) -> Program:
    """x [2 * 5, 3 * 4] gathered along one dimension."""
    return lambda g: g.all_gather(g.aten("gelu", local([5, 4], {0: 2, 1: 3}, g)), group, dim)


def grid_gather_both(order: str) -> Program:
    def program(g: GraphBuilder) -> Ref:
        x = g.aten("gelu", local([5, 4], {0: 2, 1: 3}, g))
        for group in order.split():
            x = g.all_gather(x, group, 0 if group == "dp" else 1)
        return x

    return program


def world_gather(how: str) -> Program:
    """x [6 * 5, 4], blocks over (dp tp), gathered over all ranks at once, or axis by axis."""

    def program(g: GraphBuilder) -> Ref:
        x = g.aten("gelu", local([5, 4], {0: 6}, g))
        if how == "world":
            return g.all_gather(x, "world")
        for group in how.split():
            x = g.all_gather(x, group)
        return x

    return program


def grid_reduced(*groups: str) -> Program:
    """Contraction over both axes: x [4, 6 * 5] times w [7, 6 * 5]."""

    def program(g: GraphBuilder) -> Ref:
        y = linear(g, local([4, 5], {1: 6}, g), local([7, 5], {1: 6}, g, "w"))
        for group in groups:
            y = g.all_reduce(y, group)
        return y

    return program


def mean_over_both(*groups: str) -> Program:
    def program(g: GraphBuilder) -> Ref:
        y = g.aten("mean.dim", local([4, 5], {1: 6}, g), [1])
        for group in groups:
            y = g.all_reduce(y, group, "avg")
        return y

    return program


BOTH = {"x": "(dp s) (tp k) ~ s k"}
GRIDS = [
    LawCase(
        "grid-row-parallel",
        GRID,
        grid_row("tp"),
        {"reduced over tp": grid_row("tp")},
        {"reduced over dp": grid_row("dp"), "reduced over all": grid_row("world"), "maximum": grid_row("tp", "max")},
        BOTH | {"w": "n (tp k) ~ n k"},
        ["(dp s) n ~ s n"],
    ),
    LawCase(
        "grid-all-gather",
        GRID,
        grid_gather("tp"),
        {"over tp": grid_gather("tp")},
        {"over tp on rows": Twin(lambda g: g.aten("view", grid_gather("tp", 0)(g), [5, 12]))},
        BOTH,
        ["(dp s) k ~ s k"],
    ),
    LawCase(
        "grid-all-gather-rows",
        GRID,
        grid_gather("dp", 0),
        {"over dp": grid_gather("dp", 0)},
        {"over dp on columns": Twin(lambda g: g.aten("view", grid_gather("dp", 1)(g), [10, 4]))},
        BOTH,
        ["s (tp k) ~ s k"],
    ),
    LawCase(
        "grid-all-gather-both",
        GRID,
        grid_gather_both(""),
        {"tp first": grid_gather_both("tp dp"), "dp first": grid_gather_both("dp tp")},
        {
            "groups exchanged": lambda g: g.aten(
                "view",
                g.all_gather(g.all_gather(g.aten("gelu", local([5, 4], {0: 2, 1: 3}, g)), "tp", 0), "dp", 1),
                [10, 12],
            )
        },
        BOTH,
        ["s k ~ s k"],
    ),
    LawCase(
        "grid-world-gather",
        GRID,
        world_gather(""),
        {"at once": world_gather("world"), "inner axis first": world_gather("tp dp")},
        {"outer axis first": world_gather("dp tp")},
        {"x": "(dp tp s) k ~ s k"},
        ["s k ~ s k"],
    ),
    LawCase(
        "grid-world-gather-other-order",
        GRID,
        world_gather(""),
        {"inner axis first": world_gather("dp tp")},
        {"at once": world_gather("world"), "outer axis first": world_gather("tp dp")},
        {"x": "(tp dp s) k ~ s k"},
        ["s k ~ s k"],
    ),
    LawCase(
        "grid-reduce-both",
        GRID,
        grid_reduced(),
        {"at once": grid_reduced("world"), "tp first": grid_reduced("tp", "dp"), "dp first": grid_reduced("dp", "tp")},
        {
            "over tp only": grid_reduced("tp"),
            "over tp twice": grid_reduced("tp", "tp"),
            "once too often": grid_reduced("world", "dp"),
        },
        {"x": "s (dp tp k) ~ s k", "w": "n (dp tp k) ~ n k"},
        ["s n ~ s n"],
    ),
    LawCase(
        "grid-mean-both",
        GRID,
        mean_over_both(),
        {"at once": mean_over_both("world"), "one by one": mean_over_both("tp", "dp")},
        {"over tp only": mean_over_both("tp")},
        {"x": "s (dp tp k) ~ s k"},
        ["s ~ s"],
    ),
    LawCase(
        "sub-groups",
        NODES,
        lambda g: linear(g, local([4, 5], {1: 2}, g), local([7, 5], {1: 2}, g, "w")),
        {"within a node": lambda g: g.all_reduce(linear(g, g.input("x", [4, 5]), g.input("w", [7, 5])), "gpu")},
        {
            "between nodes": lambda g: g.all_reduce(linear(g, g.input("x", [4, 5]), g.input("w", [7, 5])), "node"),
            "over all": lambda g: g.all_reduce(linear(g, g.input("x", [4, 5]), g.input("w", [7, 5])), "world"),
        },
        {"x": "s (gpu k) ~ s k", "w": "n (gpu k) ~ n k"},
        ["s n ~ s n"],
    ),
]


# ---- one axis: gather, scatter, all-to-all, broadcast -----------------------------------------------------------


def gathered(dim: int, group: str = "tp", shape: Sequence[int] = (4, 5)) -> Program:
    """x [4, 3 * 5] gathered on a dimension."""

    def program(g: GraphBuilder) -> Ref:
        return g.all_gather(g.aten("gelu", local(shape, {1: 3}, g)), group, dim)

    return program


def in_order(ranks: list[list[int]], program: Program) -> Program:
    """``program`` with a further process group ``other`` of these ranks in this order."""

    def ordered(g: GraphBuilder) -> Any:
        g.groups["other"] = ranks
        return program(g)

    return ordered


def sequence_parallel(scatter: int | None = 0, gather: bool = True, norm: bool = True, op: str = "sum") -> Program:
    """Row-parallel, reduce-scatter over tokens, layer norm on a shard of them, all-gather: x [6, 3 * 4]."""

    def program(g: GraphBuilder) -> Ref:
        y = linear(g, local([6, 4], {1: 3}, g), local([8, 4], {1: 3}, g, "w"))
        y = g.all_reduce(y, "tp") if scatter is None else g.reduce_scatter(y, "tp", scatter, op)
        if norm:
            y = g.aten("native_layer_norm", y, [8], g.input("gamma", [8]), g.input("beta", [8]), 1e-5)[0]
        else:
            g.input("gamma", [8]), g.input("beta", [8])
        return g.all_gather(y, "tp") if gather else y

    return program


def scattered(dim: int, twin_dim: int | None = None) -> Program:
    """A partial product [6, 9] scattered along one dimension and gathered along another."""

    def program(g: GraphBuilder) -> Ref:
        y = linear(g, local([6, 4], {1: 3}, g), local([9, 4], {1: 3}, g, "w"))
        return g.all_gather(g.reduce_scatter(y, "tp", dim), "tp", dim if twin_dim is None else twin_dim)

    return program


def exchanged(back: str = "right", there: str = "right") -> Program:
    """[s/2, h=6, d=5] -> [s, h/2, d] and back, with s = 8."""

    def program(g: GraphBuilder) -> Ref:
        x = local([4, 6, 5], {0: 2}, g)
        if not g.mesh:
            return g.aten("gelu", g.aten("cumsum", g.aten("gelu", x), 0))
        x = g.aten("gelu", x)
        chunks = (
            g.aten("permute", g.aten("view", x, [4, 2, 3, 5]), [1, 0, 2, 3])
            if there == "right"
            else g.aten("view", x, [2, 4, 3, 5])
        )
        y = g.aten("view", g.all_to_all(g.aten("clone", chunks), "tp"), [8, 3, 5])
        y = g.aten("cumsum", y, 0)
        z = g.all_to_all(g.aten("view", y, [2, 4, 3, 5]), "tp")
        z = g.aten("view", g.aten("clone", g.aten("permute", z, [1, 0, 2, 3]) if back == "right" else z), [4, 6, 5])
        return g.aten("gelu", z)

    return program


def shard_dims(gather: int, split: int) -> Program:
    """DTensor's change of the sharded dimension: x [2 * 3, 4, 5]."""

    def program(g: GraphBuilder) -> Ref:
        x = g.aten("gelu", local([3, 4, 6], {0: 2}, g))
        return g.op("_dtensor.shard_dim_alltoall.default", x, gather, split, "tp") if g.mesh else x

    return program


def broadcast(source: int, program: Program) -> Program:
    def program_(g: GraphBuilder) -> Ref:
        x = program(g)
        return g.wait(g.op(f"{FUNCOL}.broadcast.default", x, source, "tp")) if g.mesh else x

    return program_


def scatter_of_copies(scale: float | None) -> Program:
    """Reduce-scatter of a replicated tensor: n times its block."""

    def program(g: GraphBuilder) -> Ref:
        x = g.aten("gelu", g.input("x", [6, 5]))
        if not g.mesh:
            return x
        x = x if scale is None else g.aten("mul.Tensor", x, scale)
        return g.reduce_scatter(x, "tp")

    return program


def gather_of_copies(start: int | None) -> Program:
    """All-gather of a replicated tensor [6, 5], then block ``start``, or the first 6 of every second row."""

    def program(g: GraphBuilder) -> Ref:
        x = g.aten("gelu", g.input("x", [6, 5]))
        if not g.mesh:
            return x
        y = g.all_gather(x, "tp")
        return (
            g.aten("slice.Tensor", y, 0, 0, 12, 2) if start is None else g.aten("slice.Tensor", y, 0, start, start + 6)
        )

    return program


def inner_sharded(dim_first: bool) -> Program:
    """Columns sharded inside two outer blocks: x [4, (i=2 tp=3 k=5)]; gathered inside."""

    def program(g: GraphBuilder) -> Ref:
        x = g.aten("gelu", g.input("x", [4, 2 * 5 * parts(g, 3)]))
        if not g.mesh:
            return x
        if dim_first:
            y = g.all_gather(g.aten("view", x, [4, 2, 5]), "tp", 2)
            return g.aten("view", y, [4, 30])
        return g.all_gather(x, "tp", 1)

    return program


COLS = {"x": "s (tp k) ~ s k"}
ROW_GIVEN = COLS | {"w": "n (tp k) ~ n k"}
SEQUENCE_GIVEN = ROW_GIVEN | {"gamma": "n ~ n", "beta": "n ~ n"}
SINGLES = [
    LawCase(
        "all-gather",
        TP3,
        gathered(1),
        {"on columns": gathered(1)},
        {"on rows": lambda g: g.aten("view", gathered(0)(g), [4, 15])},
        COLS,
        ["s k ~ s k"],
    ),
    LawCase(
        "all-gather-rows",
        TP3,
        lambda g: g.all_gather(g.aten("gelu", local([5, 4], {0: 3}, g)), "tp"),
        {"on rows": lambda g: g.all_gather(g.aten("gelu", local([5, 4], {0: 3}, g)), "tp")},
        {
            "on columns": lambda g: g.aten(
                "view", g.all_gather(g.aten("gelu", local([5, 4], {0: 3}, g)), "tp", 1), [15, 4]
            )
        },
        {"x": "(tp s) k ~ s k"},
        ["s k ~ s k"],
    ),
    LawCase(
        "all-gather-square",
        TP3,
        lambda g: g.aten("gelu", local([12, 4], {1: 3}, g)),
        {"on columns": lambda g: g.all_gather(g.aten("gelu", local([12, 4], {1: 3}, g)), "tp", 1)},
        {"transposed": lambda g: g.all_gather(g.aten("t", g.aten("gelu", local([12, 4], {1: 3}, g))), "tp", 0)},
        COLS,
        ["s k ~ s k"],
    ),
    LawCase(
        "all-gather-order",
        TP2,
        lambda g: g.aten("gelu", local([4, 5], {1: 2}, g)),
        {"rank order": lambda g: g.all_gather(g.aten("gelu", local([4, 5], {1: 2}, g)), "tp", 1)},
        {"reversed": in_order([[1, 0]], lambda g: g.all_gather(g.aten("gelu", local([4, 5], {1: 2}, g)), "other", 1))},
        COLS,
        ["s k ~ s k"],
    ),
    LawCase(
        "all-gather-inside",
        TP3,
        inner_sharded(True),
        {"inside the blocks": inner_sharded(True)},
        {"outside": inner_sharded(False)},
        {"x": "s (i tp k) ~ s (i k) [i=2]"},
        ["s k ~ s k"],
    ),
    LawCase(
        "sequence-parallel",
        TP3,
        sequence_parallel(None, False),
        {"scattered, normed, gathered": sequence_parallel(), "reduced, then normed": sequence_parallel(None, False)},
        {
            "gathered on another dimension": Twin(lambda g: g.aten("view", _gather_columns(g), [6, 8])),
            "norm dropped": sequence_parallel(norm=False),
        },
        SEQUENCE_GIVEN,
        ["s n ~ s n"],
    ),
    LawCase(
        "sequence-parallel-sharded-output",
        TP3,
        sequence_parallel(None, False),
        {"not gathered": sequence_parallel(gather=False)},
        {
            "averaged before the bias": Twin(
                sequence_parallel(gather=False, norm=False, op="avg"),
                reference=sequence_parallel(None, False, norm=False),
            )
        },
        SEQUENCE_GIVEN,
        ["(tp s) n ~ s n"],
    ),
    LawCase(
        "reduce-scatter",
        TP3,
        scattered(0),
        {"rows": scattered(0), "columns": scattered(1)},
        {"other dimension": lambda g: g.aten("view", scattered(0, 1)(g), [6, 9])},
        ROW_GIVEN,
        ["s n ~ s n"],
    ),
    LawCase(
        "reduce-scatter-of-copies",
        TP3,
        scatter_of_copies(None),
        {"scaled by 1/n": scatter_of_copies(1 / 3)},
        {"not scaled": scatter_of_copies(None)},
        {"x": "s k ~ s k"},
        ["(tp s) k ~ s k"],
        unproved={"scaled by 1/n": "the constant is the float 1/3, not the exact third"},
    ),
    LawCase(
        "reduce-scatter-of-copies-4",
        TP4,
        lambda g: g.aten("gelu", g.input("x", [8, 5])),
        {
            "scaled by 1/n": lambda g: g.reduce_scatter(
                g.aten("mul.Tensor", g.aten("gelu", g.input("x", [8, 5])), 0.25), "tp"
            )
        },
        {
            "scaled by 1/2": lambda g: g.reduce_scatter(
                g.aten("mul.Tensor", g.aten("gelu", g.input("x", [8, 5])), 0.5), "tp"
            )
        },
        {"x": "s k ~ s k"},
        ["(tp s) k ~ s k"],
    ),
    LawCase(
        "all-gather-of-copies",
        TP3,
        gather_of_copies(0),
        {"first copy": gather_of_copies(0), "last copy": gather_of_copies(12)},
        {"across copies": gather_of_copies(3), "every second row": gather_of_copies(None)},
        {"x": "s k ~ s k"},
        ["s k ~ s k"],
        unproved=dict.fromkeys(("first copy", "last copy"), "no law for the gather of a replicated tensor"),
    ),
    LawCase(
        "all-to-all-inverse",
        TP2,
        exchanged(),
        {"heads for sequence and back": exchanged()},
        {"rank axis not moved back": exchanged("wrong"), "heads not grouped": exchanged(there="wrong")},
        {"x": "(tp s) h d ~ s h d"},
        ["(tp s) h d ~ s h d"],
    ),
    LawCase(
        "shard-dim-all-to-all",
        TP2,
        shard_dims(0, 1),
        {"rows to columns": shard_dims(0, 1)},
        {"to another dimension": lambda g: g.aten("view", shard_dims(0, 2)(g), [6, 2, 6])},
        {"x": "(tp a) b c ~ a b c"},
        ["a (tp b) c ~ a b c"],
    ),
    LawCase(
        "broadcast",
        TP3,
        lambda g: g.aten("gelu", g.input("x", [4, 5])),
        {"of copies": broadcast(0, lambda g: g.aten("gelu", g.input("x", [4, 5])))},
        {
            "of shards": Twin(
                broadcast(0, lambda g: g.aten("gelu", local([4, 5], {1: 3}, g))),
                reference=lambda g: g.aten("gelu", local([4, 5], {1: 3}, g)),
                given=COLS,
                outputs=["s (tp k) ~ s k"],
            )
        },
        {"x": "s k ~ s k"},
        ["s k ~ s k"],
    ),
    LawCase(
        "output-claims",
        TP3,
        lambda g: g.aten("gelu", g.input("x", [6, 15])),
        {
            "own block": lambda g: g.aten(
                "slice.Tensor", g.aten("gelu", g.input("x", [6, 15])), 1, 5 * g.rank, 5 * g.rank + 5
            )
        },
        {"first block": lambda g: g.aten("slice.Tensor", g.aten("gelu", g.input("x", [6, 15])), 1, 0, 5)},
        {"x": "s k ~ s k"},
        ["s (tp k) ~ s k"],
    ),
]


def _gather_columns(g: GraphBuilder) -> Ref:
    return g.all_gather(sequence_parallel(gather=False)(g), "tp", 1)


CASES = [*GRIDS, *SINGLES]
