"""Ranks captured one after another in one process: the same graphs as in a process each.

DTensor caches what it derives by mesh, and meshes of different ranks compare equal: without care rank 1 would get
what rank 0 computed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.live import TESTS

from emerge.capture.source import SourceSpec, load_spec
from emerge.graph.json_io import write_graph

PROGRAM = """
import transformers  # as other tests of this process may have done: a capture then says what it replaced there
import sys
from support.live import python
from emerge.capture.source import load_spec
from emerge.graph.json_io import write_graph
spec = python("support.dtensor_plans:plan", {"tp": 4})
spec.ranks = [int(sys.argv[1])]
write_graph(load_spec(spec, cache=False)[0], sys.argv[2])
"""


def test_captures_are_those_of_separate_processes(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    path = {"PYTHONPATH": f"{TESTS.parent}{os.pathsep}{TESTS}"}
    running = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(r), str(tmp_path / f"alone{r}.json")], env={**os.environ, **path}
        )
        for r in range(4)
    ]
    spec = SourceSpec("python", "support.dtensor_plans:plan", mesh={"tp": 4}, base=str(TESTS))
    together = load_spec(spec, cache=False)
    assert [p.wait(timeout=240) for p in running] == [0] * 4
    for rank, graph in enumerate(together):
        write_graph(graph, tmp_path / f"together{rank}.json")
        files = [json.loads((tmp_path / f"{how}{rank}.json").read_text()) for how in ("alone", "together")]
        assert files[0] == files[1], f"rank {rank}"
