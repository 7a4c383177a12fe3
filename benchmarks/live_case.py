"""Writes a live pair as a case directory, e.g. for faults: ``python benchmarks/live_case.py llama-3.1-8b DIR [--tp 2]``.

The model is one of ``live_matrix.py``, tiny; relations come from its DTensor placements and names, as ``auto`` has them.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.live_matrix import MODELS, source
from emerge.capture.relations import placement_relations
from emerge.capture.source import load_spec
from emerge.graph.json_io import write_graph
from emerge.graph.relations import Relations
from emerge.graph.relations_io import write_relations


def main() -> None:
    """Captures both sides and writes them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tp", type=int, default=2)
    parser.add_argument("--layers", type=int, default=1)
    options = parser.parse_args()
    reference = load_spec(source(options.model, layers=options.layers))[0]
    ranks = load_spec(source(options.model, tp=options.tp, layers=options.layers))
    found = placement_relations(reference, ranks)
    if found.open:
        sys.exit(f"no relation for {next(iter(found.open))}: {next(iter(found.open.values()))}")
    options.folder.mkdir(parents=True, exist_ok=True)
    write_graph(reference, options.folder / "seq.json")
    for graph in ranks:
        write_graph(graph, options.folder / f"rank{graph.rank}.json")
    name = f"{options.model}-tp{options.tp}"
    relations = Relations(name, len(ranks), found.inputs, "refines", None, found.outputs)
    write_relations(relations, options.folder / "relations.json")


if __name__ == "__main__":
    main()
