"""Deep pairs are proved layer by layer: equal layers once, and one that differs is never taken for its neighbours."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest

import emerge
from emerge.campaign import segments
from emerge.facts.families import zip_families
from emerge.graph.model import Graph
from emerge.relate.segments import can_be_cut
from emerge.verdict.types import PairResult
from tests.support.build import GraphBuilder

LAYERS, WIDTH, HIDDEN, TP = 6, 4, 6, 2


def program(
    name: str, rank: int = 0, tp: int = 1, change: Callable[[GraphBuilder, int, str, Any], Any] | None = None,
    swap: tuple[int, ...] = tuple(range(LAYERS)),
) -> Graph:  # fmt: skip
    """Layers of RMSNorm and a gated product with residuals; ``change(g, layer, what, value)`` plants a fault.

    ``swap``: which layer's weights each layer reads.
    """
    g = GraphBuilder(name, rank, tp, {"tp": tp} if tp > 1 else None)

    def kept(layer: int, what: str, value: Any) -> Any:
        return change(g, layer, what, value) if change is not None else value

    x = g.input("x", [3, WIDTH])
    ups = [g.input(f"up{k}", [WIDTH, HIDDEN // tp]) for k in range(LAYERS)]
    downs = [g.input(f"down{k}", [HIDDEN // tp, WIDTH]) for k in range(LAYERS)]
    h = x
    for k in range(LAYERS):
        mean = g.aten("mean.dim", g.aten("pow.Tensor_Scalar", h, 2), [-1], True)
        root = g.aten("rsqrt", g.aten("add.Tensor", mean, kept(k, "eps", 1e-5)))
        normed = g.aten("mul.Tensor", h, root)
        up = kept(k, "activation", g.aten("silu", g.aten("mm", normed, ups[swap[k]])))
        down = g.aten("mm", up, downs[swap[k]])
        if tp > 1:
            down = kept(k, "reduce", down) if change is not None else g.all_reduce(down, "tp")
        h = g.aten("add.Tensor", h, kept(k, "branch", down))
    return g.build(g.aten("tanh", h))


def implementation(**more: Any) -> list[Graph]:
    """The same with tensor parallelism."""
    return [program("tp", rank, TP, **more) for rank in range(TP)]


RELATIONS: Mapping[str, Any] = (
    {"x": "b m ~ b m"}
    | {f"up{k}": "m (tp h) ~ m h" for k in range(LAYERS)}
    | {f"down{k}": "(tp h) m ~ h m" for k in range(LAYERS)}
)


def compare(ranks: list[Graph], relations: Mapping[str, Any] = RELATIONS) -> PairResult:
    """The pair of the sequential program and these ranks."""
    return emerge.compare(program("seq"), ranks, relations=relations, mesh={"tp": TP}, engine="embedded")


def test_equal_layers_are_derived_once(monkeypatch: pytest.MonkeyPatch) -> None:
    found = compare(implementation())
    assert (found.verdict, found.stats["segments"]) == ("EQUIVALENT", LAYERS)
    assert found.stats["segments_reused"] >= LAYERS - 3
    monkeypatch.setattr(segments, "LEAST_CUTS", 100)
    whole = compare(implementation())
    assert "segments" not in whole.stats
    assert (whole.verdict, whole.evidence) == (found.verdict, found.evidence)
    assert [(o.reference, o.implementation, o.expected, o.proved) for o in whole.outputs] == [
        (o.reference, o.implementation, o.expected, o.proved) for o in found.outputs
    ]
    assert set(whole.rules_used) == set(found.rules_used)
    assert sum(whole.coverage.values()) == sum(found.coverage.values())
    assert {(i.reference, i.origin) for i in whole.input_relations} == {
        (i.reference, i.origin) for i in found.input_relations
    }


def at(layer: int, what: str, make: Callable[[GraphBuilder, Any], Any]) -> Callable[[GraphBuilder, int, str, Any], Any]:
    """A fault at one place; the all-reduce is added everywhere else."""

    def change(g: GraphBuilder, k: int, name: str, value: Any) -> Any:
        if (k, name) == (layer, what):
            return make(g, value)
        return g.all_reduce(value, "tp") if name == "reduce" else value

    return change


FAULTS = {
    "no all-reduce": at(3, "reduce", lambda g, v: v),
    "two all-reduces": at(3, "reduce", lambda g, v: g.all_reduce(g.all_reduce(v, "tp"), "tp")),
    "another epsilon": at(4, "eps", lambda g, v: 1e-3),
    "another activation": at(2, "activation", lambda g, v: g.aten("relu", v)),
    "a dropped factor": at(4, "branch", lambda g, v: g.aten("mul.Tensor", v, 2.0)),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_in_one_layer_is_found(name: str) -> None:
    pytest.importorskip("torch")
    found = compare(implementation(change=FAULTS[name]))
    assert found.verdict == "NOT_EQUIVALENT"
    assert "segments" not in found.stats


def test_a_layer_that_reads_weights_of_another_is_found() -> None:
    pytest.importorskip("torch")
    assert compare(implementation(swap=(0, 1, 3, 2, 4, 5))).verdict == "NOT_EQUIVALENT"


def test_the_same_exchange_in_the_relations_makes_it_right() -> None:
    swap = (0, 1, 3, 2, 4, 5)
    crossed: dict[str, Any] = {"x": "b m ~ b m"}
    for k in range(LAYERS):
        crossed[f"up{swap[k]}"] = {"of": f"up{k}", "is": "m (tp h) ~ m h"}
        crossed[f"down{swap[k]}"] = {"of": f"down{k}", "is": "(tp h) m ~ h m"}
    found = compare(implementation(swap=swap), crossed)
    assert found.verdict == "EQUIVALENT"


def test_one_layer_sharded_another_way_in_the_relations_is_no_repetition() -> None:
    """Where a relation of one layer is missing, that layer has no proof to borrow."""
    fewer = {k: v for k, v in RELATIONS.items() if k != "up3"}
    assert compare(implementation(), fewer).verdict != "EQUIVALENT"


@pytest.mark.parametrize("op", ["relu_", "native_dropout", "relu.out"])
def test_programs_with_writes_or_random_numbers_are_not_cut(op: str) -> None:
    g = GraphBuilder("seq")
    x = g.input("x", [3, 4])
    if op == "native_dropout":
        y = g.aten("native_dropout", x, 0.5, True)[0]
    elif op == "relu.out":
        y = g.aten("relu.out", x, out=g.aten("sin", x), result=("float32", [3, 4]))
    else:
        y = g.aten(op, g.aten("sin", x))
    assert not can_be_cut(zip_families([g.build(y)]))
