"""``emerge capture``: a live model into graph files."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from emerge.campaign.config import plain
from emerge.campaign.yaml_lines import Mapping, load_yaml
from emerge.capture.source import load_spec
from emerge.graph.json_io import write_graph
from emerge.util.errors import InputError


def capture_to(spec: str, output: Path, mesh: dict[str, int] | None, trust: bool) -> int:
    """Writes ``seq.json``, or ``rank0.json`` ... for a parallel program; all files or none.

    Raises:
        InputError: the source cannot be captured, or the directory cannot be written.
    """
    source: Any = spec
    base = Path(".")
    if spec.endswith((".yaml", ".yml")):
        path = Path(spec)
        source, base = load_yaml(path), path.parent
        if not isinstance(source, Mapping):
            raise InputError("expected a mapping with one source, e.g. hf: {architecture: ...}", spec)
        source = plain(source)
    graphs = load_spec(
        source, base=base, mesh=mesh, trust=trust, progress=lambda line: print(line, file=sys.stderr, flush=True)
    )
    try:
        output.mkdir(parents=True, exist_ok=True)
        for graph in graphs:
            name = "seq.json" if len(graphs) == 1 and graph.world_size == 1 else f"rank{graph.rank}.json"
            write_graph(graph, output / name)
    except OSError as e:
        raise InputError(f"cannot write the graphs ({e.strerror or e}); check -o", str(output)) from None
    print(f"{len(graphs)} graph(s) with {len(graphs[0].nodes)} nodes written to {output}")
    return 0
