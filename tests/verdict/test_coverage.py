"""Equal tensors are as good as the rules that made them equal, each by itself, and coverage says what is left."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))

from support.build import GraphBuilder, Ref, build_ranks, build_reference, replicated, write_case

from emerge.algebra.evidence import equality_levels
from emerge.algebra.extend import extend
from emerge.algebra.saturate import rule_files
from emerge.campaign.admission import law_levels
from emerge.campaign.build import prepare
from emerge.campaign.config import PairSpec
from emerge.facts.base import REFERENCE, FactBase
from emerge.facts.families import zip_families
from emerge.facts.kernels import Signature
from emerge.facts.lower import Lowering, Tensor
from emerge.facts.mesh import Mesh
from emerge.kernels.lowered import Meanings
from emerge.kernels.registry import definitions
from emerge.relate.derive import derive
from emerge.verdict.decide import decide
from emerge.verdict.types import PairResult

pytest.importorskip("egglog")

SHAPE = [4, 6]


def lowered(write: object, meanings: bool = False) -> Lowering:
    """A graph, lowered and saturated with the shipped rules."""
    described: dict[tuple[str, int], Signature] = {}
    known = Meanings(definitions(())) if meanings else None
    low = Lowering(FactBase(), REFERENCE, Mesh({}), described, known)
    low.lower(zip_families([build_reference(write)]))  # type: ignore[arg-type]
    if known is not None:
        known.expand(low)
    low.extension = extend(low, rule_files())
    return low


def level_between(low: Lowering, levels: dict[tuple[int, int], int], one: str, other: str) -> int | None:
    """Level at which the tensors of two nodes are equal; None where nothing says so."""
    a, b = low.tensors[one], low.tensors[other]
    assert isinstance(a, Tensor)
    assert isinstance(b, Tensor)
    return levels.get((a.id, b.id))


def gates(g: GraphBuilder) -> tuple[Ref, ...]:
    """Two spellings each of silu, of a product with an inverse root, and of a function of both."""
    x, y = g.input("x", SHAPE), g.input("y", SHAPE)
    silu = g.op("aten.silu.default", x, name="silu")
    written = g.op("aten.mul.Tensor", x, g.aten("sigmoid", x), name="written")
    root = g.aten("sqrt", y)
    divided = g.op("aten.div.Tensor", x, root, name="divided")
    times = g.op("aten.mul.Tensor", x, g.aten("rsqrt", y), name="times")
    both = g.op("aten.add.Tensor", silu, divided, name="both")
    mixed = g.op("aten.add.Tensor", written, times, name="mixed")
    return silu, written, divided, times, both, mixed


def test_every_equality_has_the_level_of_the_rules_it_needs() -> None:
    low = lowered(gates)
    weak = {"div-is-mul": 1}
    levels = equality_levels(low, lambda name: weak.get(name, 0))
    assert low.extension.fired.keys() > {"silu", "rsqrt", "div-is-mul"}
    assert level_between(low, levels, "silu", "written") == 0
    assert level_between(low, levels, "divided", "times") == 1
    assert level_between(low, levels, "both", "mixed") == 1, "a class that holds a tested one is tested"
    assert set(equality_levels(low, lambda name: weak.get(name, 0), exact=False).values()) == {1}
    stricter = equality_levels(low, lambda name: {"div-is-mul": 1, "silu": 2}.get(name, 0))
    assert level_between(low, stricter, "silu", "written") == 2
    assert level_between(low, stricter, "divided", "times") == 1
    assert level_between(low, stricter, "both", "mixed") == 2


def test_definitions_count_where_they_are_needed_only() -> None:
    def written(g: GraphBuilder) -> tuple[Ref, ...]:
        x = g.input("x", SHAPE)
        soft = g.op("aten._softmax.default", x, 1, False, name="soft")
        e = g.aten("exp", x)
        plain = g.op("aten.div.Tensor", e, g.aten("sum.dim_IntList", e, [1], True), name="plain")
        return soft, plain, g.op("aten.silu.default", x, name="silu"), g.op(
            "aten.mul.Tensor", x, g.aten("sigmoid", x), name="gate")  # fmt: skip

    low = lowered(written, meanings=True)
    levels = equality_levels(low, lambda name: 1 if ":" in name else 0)
    assert level_between(low, levels, "soft", "plain") == 1
    assert level_between(low, levels, "silu", "gate") == 0


def verdict(folder: Path, weak: dict[str, str]) -> PairResult:
    """Silu and a quotient against their other spellings, under shipped evidence but for some rules."""

    def reference(g: GraphBuilder) -> tuple[Ref, ...]:
        x, y = g.input("x", SHAPE), g.input("y", SHAPE)
        return g.aten("exp", g.aten("silu", x)), g.aten("exp", g.aten("div.Tensor", x, g.aten("sqrt", y)))

    def implementation(g: GraphBuilder, rank: int) -> tuple[Ref, ...]:
        x, y = g.input("x", SHAPE), g.input("y", SHAPE)
        return (
            g.aten("exp", g.aten("mul.Tensor", x, g.aten("sigmoid", x))),
            g.aten("exp", g.aten("mul.Tensor", x, g.aten("rsqrt", y))),
        )

    graph, ranks = build_reference(reference), build_ranks(1, implementation)
    claims = [replicated(a, 1, b) for a, b in zip(graph.outputs, ranks[0].outputs) if a and b]
    write_case(folder, graph, ranks, [replicated("x", 1), replicated("y", 1)], claims)
    prepared = prepare(PairSpec("gates", case=folder))
    levels = law_levels((), ()) | weak
    return decide(prepared.problem, derive(prepared.problem, engine="embedded", log=True), levels=levels)


def test_outputs_and_nodes_have_their_own_evidence(tmp_path: Path) -> None:
    all_proved = verdict(tmp_path / "a", {})
    assert (all_proved.verdict, all_proved.evidence) == ("EQUIVALENT", "proved")
    found = verdict(tmp_path / "b", {"div-is-mul": "tested"})
    assert (found.verdict, found.evidence) == ("EQUIVALENT", "tested")
    assert [o.evidence for o in found.outputs] == ["proved", "tested"]
    nodes = {n: e.level for n, e in found.node_evidence.items()}
    assert nodes["silu"] == nodes["exp"] == nodes["exp_1"] == "proved"
    assert nodes["div"] == "tested"
    (weak,) = [e for n, e in found.node_evidence.items() if n == "div"]
    assert (weak.kind, weak.causes) == ("other_laws", ("div-is-mul",))
    assert found.coverage["tested"] == found.coverage_rest["other_laws"] == found.coverage_by["div-is-mul"]
    assert "div-is-mul" in found.rules_used


def test_a_rule_that_is_not_needed_weakens_nothing(tmp_path: Path) -> None:
    """It matched, in a class that the proof does not read."""
    found = verdict(tmp_path, {"mul-commutes": "tested"})
    assert (found.verdict, found.evidence) == ("EQUIVALENT", "proved")
    assert "mul-commutes" not in found.rules_used
    assert "silu" in found.rules_used
