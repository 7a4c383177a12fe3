"""Calls that no operator takes, and constants that a relation contradicts, never end in EQUIVALENT."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from emerge.campaign.config import PairSpec
from emerge.campaign.run import RunOptions, run_pair
from emerge.engine.program import Program
from emerge.graph.json_io import read_graph, write_graph
from emerge.graph.model import Graph, Input, Node, Ref
from emerge.util.errors import GraphError, RuleError


def graph(name: str, op: str = "aten.mul.Tensor", args: Any = None, kwargs: Any = None, **extra: Any) -> Graph:
    args = [Ref("x"), Ref("k")] if args is None else args
    k = Input("k", "float32", (3, 3), label="const:k", extra=dict(extra))
    y = Node("y", op, list(args), dict(kwargs or {}), "float32", (3, 3))
    return Graph(name, [Input("x", "float32", (3, 3), label="x"), k], [y], ["y"])


def verdict(folder: Path, reference: Graph, implementation: Graph, relations: Any = "auto") -> Any:
    for side in (reference, implementation):
        write_graph(side, folder / f"{side.name}.json")
    spec = PairSpec(
        "p", reference=folder / "ref.json", implementation=folder / "impl.json", relations=relations, engine="embedded"
    )
    return run_pair(spec, RunOptions())


def test_equal_digests_are_related_and_different_ones_contradict(tmp_path: Path) -> None:
    same = verdict(tmp_path, graph("ref", digest="sha256:aa"), graph("impl", digest="sha256:aa"))
    assert same.verdict == "EQUIVALENT"
    other = verdict(tmp_path, graph("ref", digest="sha256:aa"), graph("impl", digest="sha256:bb"))
    assert other.verdict is None
    assert "sha256:bb" in other.error.message


@pytest.mark.parametrize(
    ("op", "args", "kwargs"),
    [
        ("aten.mul.Tensor", [Ref("x"), Ref("k"), 3.0], {}),
        ("aten.mul.Tensor", [Ref("x"), Ref("k")], {"nonsense": 5}),
        ("aten.mul.nosuch", [Ref("x"), Ref("k")], {}),
    ],
    ids=["surplus argument", "unknown keyword", "unknown overload"],
)
def test_a_call_that_the_operator_does_not_take_is_not_that_operator(
    tmp_path: Path, op: str, args: Any, kwargs: Any
) -> None:
    assert verdict(tmp_path, graph("ref"), graph("impl", op, args, kwargs)).verdict == "UNKNOWN"


@pytest.mark.parametrize("bad", [{"digest": 5}, {"const": "zz"}])
def test_malformed_constants_are_refused(tmp_path: Path, bad: dict[str, Any]) -> None:
    path = tmp_path / "g.json"
    write_graph(graph("ref"), path)
    document = json.loads(path.read_text())
    document["inputs"][1] |= bad
    path.write_text(json.dumps(document))
    with pytest.raises(GraphError, match="correct it"):
        read_graph(path)


def test_rule_files_include_nothing_outside_their_folder(tmp_path: Path) -> None:
    (tmp_path / "secret.dl").write_text("root(1).\n")
    inner = tmp_path / "rules"
    inner.mkdir()
    (inner / "mine.dl").write_text('.include "../secret.dl"\n')
    with pytest.raises(RuleError, match="outside"):
        Program.load([inner / "mine.dl"])
