"""Findings about weights, from captures that trace their loading."""

from __future__ import annotations

from typing import Any

import pytest

from emerge.campaign.weights import weight_findings
from emerge.graph.model import Graph, Input, Node, Ref


def graph(labels: list[str], used: list[str], **weights: Any) -> Graph:
    inputs = [Input(n.replace(".", "_"), "float32", (4,), n) for n in labels]
    nodes = [Node("out", "aten.add.Tensor", [Ref(n.replace(".", "_")) for n in used], {}, "float32", (4,))]
    return Graph("g", inputs, nodes, ["out"], extra={"weights": weights} if weights else {})


def test_weights_that_one_side_does_not_use_are_findings() -> None:
    reference = graph(["a", "o.bias", "spare", "head.bias"], ["a", "o.bias", "head.bias"])
    dropped = [{"of": "o.bias", "at": [[0, 2]]}, {"of": "o.bias", "at": [[3, 4]]}, {"of": "spare", "at": [[0, 4]]}]
    ranks = [
        graph(["a"], ["a"], dropped=dropped, not_used=["head.bias"], never_loaded=["extra"]) for _ in range(2)
    ]  # both ranks say the same
    found = weight_findings([reference], ranks)
    assert [(f.kind, f.severity) for f in found] == [
        ("WEIGHT_DROPPED", "warning"), ("WEIGHT_DROPPED", "note"), ("WEIGHT_NOT_USED", "warning"),
        ("WEIGHT_NOT_LOADED", "warning"),
    ]  # fmt: skip
    assert "'o.bias' is not loaded by the implementation: [0:2]; [3:4]" in found[0].message


def test_other_captures_say_nothing() -> None:
    assert weight_findings([graph(["a"], ["a"])], [graph(["a"], ["a"])]) == []


@pytest.mark.parametrize(("dtype", "count"), [("bfloat16", 1), ("float32", 0), ("float64", 0)])
def test_weight_rounded_when_it_is_loaded(dtype: str, count: int) -> None:
    reference, implementation = graph(["a"], ["a"]), graph(["a"], ["a"])
    reference.inputs[0].dtype, implementation.inputs[0].dtype = "float32", dtype
    implementation.inputs[0].extra["loaded"] = [{"of": reference.inputs[0].label or reference.inputs[0].name}]
    found = [f for f in weight_findings([reference], [implementation]) if f.kind == "PRECISION"]
    assert len(found) == count
    assert all("float32" in f.message and "bfloat16" in f.message for f in found)
