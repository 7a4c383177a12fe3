"""A two-layer perceptron, whole and tensor-parallel, written by the tests themselves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from emerge.graph.json_io import write_graph
from emerge.graph.model import Graph, Input, Node, Ref

BATCH, MODEL, HIDDEN = 3, 4, 6
SUM = "_c10d_functional.all_reduce.default"


def node(name: str, op: str, args: list[Any], shape: tuple[int, ...], line: int) -> Node:
    refs = [Ref(a[1:]) if isinstance(a, str) and a.startswith("@") else a for a in args]
    return Node(name, op, refs, {}, "float32", shape, source=f"mlp.py:{line}")


def perceptron(ranks: int, rank: int, *, reduce: bool = True, kind: str = "sum") -> Graph:
    """``relu(x @ up) @ down + bias``; with ranks > 1 column- and row-parallel, then an all-reduce."""
    wide = HIDDEN // ranks
    inputs = [
        Input("x", "float32", (BATCH, MODEL), label="x"),
        Input("up", "float32", (MODEL, wide), label="mlp.up"),
        Input("down", "float32", (wide, MODEL), label="mlp.down"),
        Input("bias", "float32", (MODEL,), label="mlp.bias"),
    ]
    nodes = [
        node("mm", "aten.mm.default", ["@x", "@up"], (BATCH, wide), 10),
        node("relu", "aten.relu.default", ["@mm"], (BATCH, wide), 11),
        node("mm_1", "aten.mm.default", ["@relu", "@down"], (BATCH, MODEL), 12),
    ]
    last = "mm_1"
    if ranks > 1 and reduce:
        nodes.append(node("all_reduce", SUM, ["@mm_1", kind, "g"], (BATCH, MODEL), 13))
        nodes.append(node("wait", "_c10d_functional.wait_tensor.default", ["@all_reduce"], (BATCH, MODEL), 13))
        last = "wait"
    nodes.append(node("add", "aten.add.Tensor", [f"@{last}", "@bias"], (BATCH, MODEL), 14))
    groups = {"g": [list(range(ranks))]} if ranks > 1 else {}
    return Graph("mlp", inputs, nodes, ["add"], rank, ranks, groups=groups)


def relations(ranks: int) -> dict[str, Any]:
    """The relation file of the pair."""

    def entry(name: str, dim: int | None = None) -> dict[str, Any]:
        dist = [[r, name] for r in range(ranks)]
        out: dict[str, Any] = {"seq": name, "kind": "replicated" if dim is None else "shard", "dist": dist}
        return out if dim is None else out | {"dim": dim}

    return {
        "schema": "emerge.relations/1",
        "case": "mlp",
        "world_size": ranks,
        "inputs": [entry("x"), entry("up", 1), entry("down", 0), entry("bias")],
        "expected": "refines",
        "expected_outputs": [entry("add")],
        "claimed_outputs": ["add"],
    }


def write_case(folder: Path, ranks: int = 2, **changes: Any) -> Path:
    """A case directory; ``changes`` go to :func:`perceptron`."""
    folder.mkdir(parents=True, exist_ok=True)
    write_graph(perceptron(1, 0), folder / "seq.json")
    for rank in range(ranks):
        write_graph(perceptron(ranks, rank, **changes), folder / f"rank{rank}.json")
    (folder / "relations.json").write_text(json.dumps(relations(ranks)))
    return folder


def write_sides(folder: Path, ranks: int = 2, **changes: Any) -> tuple[Path, Path]:
    """Reference file and implementation directory, without relations."""
    (folder / "impl").mkdir(parents=True, exist_ok=True)
    write_graph(perceptron(1, 0), folder / "ref.json")
    for rank in range(ranks):
        write_graph(perceptron(ranks, rank, **changes), folder / "impl" / f"rank{rank}.json")
    return folder / "ref.json", folder / "impl"
