"""Operators that may return their operand itself: writing to the result writes to it."""

from __future__ import annotations

import pytest
from execute_graphs import Builder

from emerge.execute.aliasing import roots
from emerge.execute.lockstep import run_sequential
from emerge.util.errors import ExecutionError


def alias_then_write(op: str, *args):
    g = Builder("g")
    x, r = g.input("x", (3, 4)), g.input("r", (3, 4))
    t = g.add("aten.sin.default", x, shape=(3, 4), name="t")
    g.add("aten.mul_.Tensor", g.add(op, t, *args, shape=(3, 4), name="same"), r, shape=(3, 4))
    return g.done(g.add("aten.cos.default", t, shape=(3, 4)))


@pytest.mark.parametrize(
    ("op", "args"),
    [
        ("aten.dropout.default", (0.1, False)),
        ("aten.dropout.default", (0.0, True)),
        ("aten.feature_dropout.default", (0.1, False)),
        ("aten.positive.default", ()),
        ("aten.atleast_2d.default", ()),
        ("aten.type_as.default", ("x",)),
    ],
)
def test_the_result_may_be_the_operand(op, args):
    graph = alias_then_write(op, *args)
    assert roots(graph)["same"] == roots(graph)["t"]
    import torch

    with pytest.raises(ExecutionError, match="reads 't' after"):
        run_sequential(graph, {"x": torch.ones(3, 4), "r": torch.ones(3, 4)})


@pytest.mark.parametrize(("op", "args"), [("aten.dropout.default", (0.1, True)), ("aten.clone.default", ())])
def test_the_result_is_a_copy(op, args):
    graph = alias_then_write(op, *args)
    assert roots(graph)["same"] != roots(graph)["t"]
