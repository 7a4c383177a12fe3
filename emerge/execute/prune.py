"""The part of a graph that its claimed outputs depend on."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from emerge.execute.aliasing import effects, roots
from emerge.execute.collectives import is_collective
from emerge.graph.model import Graph


def needed_names(graph: Graph, outputs: Iterable[str], *, collectives: bool) -> set[str]:
    """Names of inputs and nodes that ``outputs`` depend on, through operands and through in-place writes.

    Args:
        collectives: also everything that communication depends on, so that ranks keep meeting as captured.
    """
    nodes = {n.name: n for n in graph.nodes}
    wanted = list(outputs)
    if collectives:
        wanted += [n.name for n in graph.nodes if is_collective(n.op)]
    writers: dict[str, list[str]] = {}
    root = None
    for node in graph.nodes:
        written = effects(node).mutates
        if written:
            root = root or roots(graph)
            for name in written:
                writers.setdefault(root[name], []).append(node.name)
    needed: set[str] = set()
    while wanted:
        name = wanted.pop()
        if name in needed:
            continue
        needed.add(name)
        if root is not None:
            wanted += writers.get(root[name], ())
        if name in nodes:
            wanted += nodes[name].refs()
    return needed


def pruned(graph: Graph, needed: set[str], outputs: Iterable[str]) -> Graph:
    """The graph with only its needed inputs and nodes, and these outputs."""
    return replace(
        graph,
        inputs=[i for i in graph.inputs if i.name in needed],
        nodes=[n for n in graph.nodes if n.name in needed],
        outputs=list(dict.fromkeys(outputs)),
        output_input_alias=[],
    )


def without_semantics(graph: Graph) -> list[tuple[str, str]]:
    """(node, operator) of nodes that nothing can execute."""
    from emerge.execute.ops import lookup

    return [
        (n.name, n.op)
        for n in graph.nodes
        if not is_collective(n.op)
        and not n.op.endswith(("wait_tensor.default", "wait_tensor"))
        and lookup(n.op) is None
    ]
