"""What every captured graph must satisfy, and how tests run captures."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from emerge.capture.relations import placement_relations
from emerge.execute.dist_inputs import build_dist_inputs
from emerge.execute.lockstep import run_ranks, run_sequential
from emerge.facts.families import zip_families
from emerge.facts.mesh import Mesh
from emerge.facts.shapes import check_graph
from emerge.graph.json_io import encode_graph, read_graph, write_graph
from emerge.graph.model import Graph
from emerge.relate.derive import Derivation, Problem, derive
from emerge.relate.statement import entry_statements


def check(graph: Graph, folder: Path) -> Graph:
    """The graph survives its file format, has right shapes, and every node says where it comes from."""
    path = folder / f"{graph.name.replace('/', '_')}.json"
    write_graph(graph, path)
    back = read_graph(path)
    assert encode_graph(back) == encode_graph(graph)
    report = check_graph(back)
    report.unchecked.pop("_c10d_functional.isend.default", None)  # its result is an empty handle
    assert report.unchecked == {}, f"operators without a shape rule: {report.unchecked}"
    lacking = [n.name for n in graph.nodes if n.source is None or n.stack is None]
    assert lacking == [], f"nodes without source line: {lacking}"
    return back


def outputs(graph: Graph, values: dict[str, Any]) -> dict[str, Any]:
    """Output label -> value of one run of a rank."""
    return {label: values[name] for label, name in zip(graph.extra["output_labels"], graph.outputs)}


def values_by_label(graph: Graph, by_label: dict[str, Any]) -> dict[str, Any]:
    """Input name -> value."""
    return {i.name: by_label[i.label or i.name].detach() for i in graph.inputs}


def run_one(graph: Graph, by_label: dict[str, Any]) -> dict[str, Any]:
    return outputs(graph, run_sequential(graph, values_by_label(graph, by_label)))


def run_parallel(reference: Graph, ranks: Sequence[Graph], by_label: dict[str, Any]) -> list[dict[str, Any]]:
    """The ranks on the shards of the reference's inputs that their placements name."""
    relations = placement_relations(reference, ranks)
    assert relations.open == {}
    built = build_dist_inputs(relations.inputs, values_by_label(reference, by_label), ranks)
    assert built.undetermined == []
    return [outputs(g, v) for g, v in zip(ranks, run_ranks(ranks, built.values))]


def derive_pair(reference: Graph, ranks: Sequence[Graph]) -> Derivation:
    """The derivation from the relations that the captures know."""
    relations = placement_relations(reference, ranks)
    assert relations.open == {}
    ref, imp, mesh = zip_families([reference]), zip_families(ranks), Mesh(ranks[0].mesh)
    types = ref.types()
    given, claims = (
        [s for e in entries for s in entry_statements(e, types[e.seq].shape, imp, mesh)]
        for entries in (relations.inputs, relations.outputs)
    )
    return derive(Problem(ref, imp, mesh, given, claims), engine="embedded")


def close(a: Any, b: Any, tolerance: float) -> bool:
    """Equal up to a relative tolerance of the largest element."""
    a, b = a.double(), b.double()
    return a.shape == b.shape and float((a - b).abs().max()) <= tolerance * max(1.0, float(b.abs().max()))


def random_state(model: torch.nn.Module, seed: int = 1) -> dict[str, Any]:
    """Distinct float64 values for all parameters and persistent buffers, put into the model (made float64)."""
    generator = torch.Generator().manual_seed(seed)
    model.double()
    with torch.no_grad():
        for tensor in model.state_dict(keep_vars=True).values():
            if tensor.is_floating_point():
                tensor.copy_(torch.randn(tensor.shape, generator=generator, dtype=torch.float64) * 0.3)
    return dict(model.state_dict(keep_vars=True))
