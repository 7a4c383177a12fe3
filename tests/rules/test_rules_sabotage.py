# ruff: noqa: E501
"""A rule with a side condition dropped is refuted by its certificate, by name."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import pytest

from emerge.engine.program import Program
from emerge.rules.certify import certify
from emerge.rules.laws import laws_of
from emerge.util.resources import resource_dir


@dataclass(frozen=True)
class Sabotage:
    """``old`` becomes ``new`` in a file; one of ``laws`` must be refuted on these scenes."""

    name: str
    file: str
    old: str
    new: str
    laws: tuple[str, ...]
    scenes: tuple[str, ...]


SABOTAGES = [
    Sabotage("two axes on one mesh atom", "analysis/transport.dl",
             'L = [_, X, Size, "p", _, K], X != nil, mesh_axis(Y, Size),\n    mesh_bit(Y, B), U band B = 0.',
             'L = [_, X, Size, "p", _, K], X != nil, mesh_axis(Y, Size),\n    mesh_bit(Y, B).',
             ("transport-sharded",), ("square and its transpose",)),
    Sabotage("whole axes over the mesh", "analysis/transport.dl",
             'only_mesh(A, Y), L = [_, X, Size, "p", _, K], X != nil', "only_mesh(A, Y), L = [_, X, Size, _, _, K], X != nil",
             ("transport-sharded",), ("whole axes over a shard",)),
    Sabotage("ordered axes by size alone", "analysis/transport.dl",
             "L = [It, X, Size, Role, _, K], X != nil, ordered(Role),\n    W = [_, LD, _, _, _], row_member(LD, It, Y,",
             "L = [_, X, Size, Role, _, K], X != nil, ordered(Role),\n    W = [_, LD, _, _, _], row_member(LD, _, Y,",
             ("transport-local-ordered",), ("ordered axes in two layouts",)),
    Sabotage("a sum is linear in one term", "signatures/algebra.dl", 'linear_in("mul", 1).', 'linear_in("mul", 1). linear_in("add", 1).',
             ("linear-factors",), ()),
    Sabotage("squares never decrease", "signatures/algebra.dl", 'monotone_in("exp", 1).', 'monotone_in("exp", 1). monotone_in("square", 1).',
             ("monotone-unary",), ()),
    Sabotage("differences commute", "signatures/algebra.dl", 'commutative("add").', 'commutative("add"). commutative("sub").',
             ("commutative",), ()),
    Sabotage("partial sums pass anything", "analysis/transport.dl", 'passes(B, K, "sum") :- linear_set(B, K).',
             'passes(B, K, "sum") :- op(_, _, B, _), operand_bit(_, K).', ("partial-sum-through-linear",), ("partial sums through operators",)),
    Sabotage("all-reduce over any group", "analysis/relocation.dl", "op(O, V, _, _), P band G = G, Q = P - G, Q = 0.",
             "op(O, V, _, _), P > 0, G > 0, Q = 0.", ("all-reduce-partial",), ("collectives everywhere",)),
    Sabotage("all-reduce with any reduction", "analysis/relocation.dl",
             'relocation(O, "all_reduce", R), op(O, V, _, _), P band G = G, Q = P - G, Q = 0.',
             'relocation(O, "all_reduce", _), R != "none", op(O, V, _, _), P band G = G, Q = P - G, Q = 0.',
             ("all-reduce-partial",), ("collectives everywhere",)),
    Sabotage("reduce-scatter with any reduction", "analysis/relocation.dl",
             'relocation(O, "reduce_scatter", R), op(O, V, _, _), P = G.', 'relocation(O, "reduce_scatter", _), R != "none", op(O, V, _, _), P = G.',
             ("reduce-scatter",), ("collectives everywhere",)),
    Sabotage("rank slice of a shard", "analysis/relocation.dl", "group_mask(O, G), U band G = 0,\n    moved(N, L, M, W, K), row_count(L, K), W band P = 0.",
             "group_mask(O, G), U >= 0, G >= 0,\n    moved(N, L, M, W, K), row_count(L, K).", ("rank-slice",), ("collectives everywhere",)),
    Sabotage("sum of equal values", "analysis/relocation.dl", "group_scale(O, E), scale_ratio(C, \"1\", E, D).\n// @law all-reduce-mean",
             "group_scale(O, _), D = C.\n// @law all-reduce-mean", ("all-reduce-replicated-sum",), ("collectives everywhere",)),
    Sabotage("broadcast of anything", "analysis/relocation.dl", 'relocation(O, "broadcast", _), op(O, V, _, _), (W + P) band G = 0.',
             'relocation(O, "broadcast", _), op(O, V, _, _), G >= 0.', ("broadcast-replicated",), ("collectives everywhere", "broadcast from one rank")),
    Sabotage("length of the interval unchecked", "analysis/index.dl", "L = [LB, LS, LG], E = [LB + N, LS, LG],", "L != E,",
             ("one-hot-masked",), ("vocabulary look-up",)),
    Sabotage("zeros written anywhere", "analysis/index.dl", "index_fn(Z, T, MZ, [L, E], 0, [0, 0, 0], 0, [1, 0, 0]),",
             "index_fn(Z, T, MZ, _, 0, _, 0, _),", ("one-hot-masked",), ("vocabulary look-up",)),
    Sabotage("offset of the block unchecked", "analysis/index.dl", "hot_extent(N * K, N, N, B)", "hot_extent(N * K, N, N - 1, B)",
             ("one-hot-position-axis", "one-hot-shard"), ("vocabulary look-up",)),
    Sabotage("bounds off by one", "analysis/index.dl", 'compared_at("le", 1).', 'compared_at("le", 0).', ("index-below",),
             ("index arithmetic", "vocabulary look-up")),
    Sabotage("equal tensors, axes of any dimension", "analysis/equality.dl",
             "half_same(V, W, D, S, X), axis_at(V, D, S, Y), Y != nil.",
             "half_same(V, W, D, S, X), axis_at(V, E, S, Y), Y != nil, E + D >= 0.",
             ("equal-reference", "equal-implementation"), ("equal values, square",)),
    Sabotage("equal tensors, any axis renamed", "analysis/equality.dl",
             "renamed(V, W, B, M, N), same_axis(V, W, Y, Z).", "renamed(V, W, B, M, N), same_axis(V, W, _, Z), Y != nil.",
             ("equal-implementation",), ("equal values, square",)),
    Sabotage("equal tensors, any axis placed", "analysis/equality.dl",
             "same_axis(V, W, X, Y), entry(A, X, Z).", "same_axis(V, W, _, Y), entry(A, _, Z).",
             ("equal-reference",), ("equal values, square", "values spelled twice")),
    Sabotage("equal tensors, partials forgotten", "analysis/equality.dl",
             "same_roots(V, W, RV, RW, N), aligned(S, RW, A, U, P, R, C).",
             'same_roots(V, W, RV, RW, N), aligned(S, RW, A, U, P, _, C), R = "none".',
             ("equal-implementation",), ("partial sums spelled twice",)),
    Sabotage("equal tensors, scale forgotten", "analysis/equality.dl",
             "same_walk(V, W, A, nil, M, N), same_roots(V, W, RV, RW, N), aligned(RW, D, A, U, P, R, C).",
             'same_walk(V, W, A, nil, M, N), same_roots(V, W, RV, RW, N), aligned(RW, D, A, U, P, R, _), C = "2".',
             ("equal-reference",), ("values spelled twice",)),
    Sabotage("outside is between", "analysis/index.dl", "index_fn(V, T, M, [L, H], 0, [0, 0, 0], 0, [1, 0, 0]) :-\n    binary_index(_, \"or\"",
             "index_fn(V, T, M, [L, H], 0, [1, 0, 0], 0, [0, 0, 0]) :-\n    binary_index(_, \"or\"", ("index-outside",), ("vocabulary look-up",)),
]  # fmt: skip


@lru_cache(maxsize=1)
def _base_hashes() -> dict[str, str]:
    program = Program.load([resource_dir("datalog") / "alignment.dl"])
    return {name: law.hash for name, law in laws_of(program).items()}


@pytest.mark.parametrize("sabotage", SABOTAGES, ids=lambda s: s.name)
def test_sabotage_is_refuted(sabotage: Sabotage, tmp_path: Path) -> None:
    folder = tmp_path / "datalog"
    shutil.copytree(resource_dir("datalog"), folder)
    file = folder / sabotage.file
    text = file.read_text()
    assert sabotage.old in text, f"{sabotage.file} no longer holds the clause that is to be broken"
    file.write_text(text.replace(sabotage.old, sabotage.new))
    program = Program.load([folder / "alignment.dl"])
    laws = laws_of(program, program.files)
    changed = [law for name, law in laws.items() if _base_hashes().get(name) != law.hash]
    assert set(sabotage.laws) & {law.name for law in changed}, "the hash of the law did not change"
    wanted = [law for law in changed if law.name in sabotage.laws]
    outcome = certify(program, wanted, seed=3, count=48, scenes=sabotage.scenes or None)
    refuted = {r.law: r.reason for r in outcome.refusals.values() if r.refuted}
    assert set(refuted) & set(sabotage.laws), (
        f"not refuted on {outcome.examined} pairs ({outcome.skipped} not executable): {outcome.refusals or outcome.certificates}"
    )
