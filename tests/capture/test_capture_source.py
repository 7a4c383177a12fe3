"""Specs, the cache of captures, the worker in another environment, and exported programs."""

from __future__ import annotations

import json
import os
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import capture_models as models  # noqa: E402
from capture_checks import check, close, derive_pair, random_state, run_one  # noqa: E402

from emerge.capture.base import CaptureError  # noqa: E402
from emerge.capture.pt2 import capture_pt2  # noqa: E402
from emerge.capture.source import load_spec, parse_spec  # noqa: E402
from emerge.capture.trace import capture  # noqa: E402
from emerge.graph.json_io import write_graph  # noqa: E402

HERE = Path(__file__).resolve().parent


def test_specs() -> None:
    assert parse_spec("python:a.b:f").kind == "python"
    assert parse_spec("model.pt2").kind == "pt2"
    assert parse_spec("dir/seq.json").kind == "graph"
    assert parse_spec({"python": "a:f", "ranks": "all"}, mesh={"tp": 2}).mesh == {"tp": 2}
    with pytest.raises(CaptureError, match="did you mean 'python'"):
        parse_spec({"pyton": "a:f"})
    with pytest.raises(CaptureError, match="exactly one of"):
        parse_spec({"python": "a:f", "pt2": "b"})
    with pytest.raises(CaptureError, match="eval or train"):
        parse_spec({"python": "a:f", "mode": "test"})
    with pytest.raises(CaptureError, match="true or false"):
        parse_spec({"python": "a:f", "fake": "yes"})


def test_python_factories_for_one_and_for_several_ranks() -> None:
    lines: list[str] = []
    alone = load_spec("python:capture_models:mlp", base=HERE, cache=False, progress=lines.append)
    assert [g.world_size for g in alone] == [1]
    several = load_spec(
        {"python": "capture_models:parallel_mlp", "args": {"how": "async"}}, base=HERE, mesh={"tp": 2}, cache=False
    )
    assert [g.rank for g in several] == [0, 1]
    assert lines[0] == "python capture_models:mlp: capturing"
    assert "1 graph" in lines[1]
    with pytest.raises(CaptureError, match="no mesh is given"):
        load_spec("python:capture_models:parallel_mlp", base=HERE, cache=False)
    with pytest.raises(CaptureError, match="did you mean 'mlp'"):
        load_spec("python:capture_models:mpl", base=HERE, cache=False)
    with pytest.raises(CaptureError, match="importing 'no_such_module' fails"):
        load_spec("python:no_such_module:f", base=HERE, cache=False)


def test_graph_files_are_a_source(tmp_path: Path) -> None:
    graph = capture(*models.mlp(), name="mlp")
    write_graph(graph, tmp_path / "seq.json")
    assert load_spec("seq.json", base=tmp_path)[0].nodes == graph.nodes


MODULE = """
import torch
def build():
    return (lambda x: x * {factor}), (torch.randn(3),)
"""


def test_the_cache_follows_the_code(tmp_path: Path) -> None:
    store = tmp_path / "cache"
    source = tmp_path / "emerge_test_cached.py"
    lines: list[str] = []

    def load() -> Any:
        sys.modules.pop("emerge_test_cached", None)
        return (
            load_spec("python:emerge_test_cached:build", base=tmp_path, cache=store, progress=lines.append)[0]
            .nodes[0]
            .args[1]
        )

    source.write_text(MODULE.format(factor=2.0))
    assert load() == 2.0
    assert load() == 2.0
    assert lines[-1].endswith("from the cache")
    source.write_text(MODULE.format(factor=30.0))
    os.utime(source, (1, 1))  # neither time nor size decides
    assert load() == 30.0
    assert lines[-2].endswith("capturing")
    entry = next(p for p in store.iterdir())
    (entry / "seq.json").write_text("{")
    assert load() == 30.0, "a damaged entry is captured again"
    assert lines[-2].endswith("capturing")


def environment(tmp_path: Path) -> str:
    """This very environment, reached the way another one is."""
    root = tmp_path / "env" / "bin"
    root.mkdir(parents=True)
    script = root / "python"
    script.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    script.chmod(0o755)
    return str(tmp_path / "env")


def test_worker_gives_the_graphs_of_a_capture_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EMERGE_CACHE", str(tmp_path / "cache"))
    spec = {"python": "capture_models:parallel_mlp", "mesh": {"tp": 2}}
    here = load_spec(spec, base=HERE, cache=False)
    there = load_spec({**spec, "python_env": environment(tmp_path)}, base=HERE, cache=False)
    assert [[(n.op, n.shape, n.module, n.code) for n in g.nodes] for g in there] == [
        [(n.op, n.shape, n.module, n.code) for n in g.nodes] for g in here
    ]
    assert [g.groups for g in there] == [g.groups for g in here]


def test_worker_errors_are_one_message_with_the_output_in_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EMERGE_CACHE", str(tmp_path / "cache"))
    env = environment(tmp_path)
    (tmp_path / "breaks.py").write_text("def build():\n    raise ValueError('my own trouble')\n")
    (tmp_path / "dies.py").write_text("import os\nprint('last words', flush=True)\nos._exit(7)\n")
    with pytest.raises(CaptureError, match="my own trouble") as found:
        load_spec({"python": "breaks:build", "python_env": env}, base=tmp_path, cache=False)
    log = Path(str(found.value).split("output is in ")[1].rstrip(")"))
    assert "Traceback" in log.read_text()
    with pytest.raises(CaptureError, match=r"ended with status 7: .*last words"):
        load_spec({"python": "dies:build", "python_env": env}, base=tmp_path, cache=False)
    with pytest.raises(CaptureError, match="bin/python"):
        load_spec({"python": "breaks:build", "python_env": "nowhere"}, base=tmp_path, cache=False)


def test_worker_ships_only_what_capture_needs(tmp_path: Path) -> None:
    from emerge.capture.worker import ship

    ship(tmp_path)
    assert sorted(p.name for p in (tmp_path / "emerge").iterdir()) == ["__init__.py", "capture", "graph", "util"]


def exported(tmp_path: Path) -> Path:
    module, args = models.block()
    module.register_buffer("table", torch.arange(12.0), persistent=False)
    path = tmp_path / "block.pt2"
    torch.export.save(torch.export.export(module.eval(), args), path)
    return path


def test_exported_program_equals_the_live_one(tmp_path: Path) -> None:
    graph = check(capture_pt2(exported(tmp_path)), tmp_path)
    live = capture(*models.block(), name="block")
    assert [i.label for i in graph.inputs] == [i.label for i in live.inputs]
    first = graph.nodes[0]
    assert first.module == "norm"
    assert first.source is not None
    assert "capture_models.py" in first.source
    values = {**random_state(models.Block()), "x": torch.randn(models.BATCH, models.SEQ, models.HIDDEN).double()}
    assert close(run_one(graph, values)["output"], run_one(live, values)["output"], 1e-12)
    derivation = derive_pair(live, [graph])
    assert derivation.proved() == set(derivation.claims)


def test_pickled_content_is_refused(tmp_path: Path) -> None:
    path = exported(tmp_path)
    changed = tmp_path / "pickled.pt2"
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(changed, "w") as new:
        for name in old.namelist():
            data = old.read(name)
            if name.endswith("model_constants_config.json"):
                config = json.loads(data)
                config["config"]["table"]["use_pickle"] = True
                data = json.dumps(config).encode()
            new.writestr(name, data)
    with pytest.raises(CaptureError, match="pickled"):
        capture_pt2(changed)


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("torch.ops.aten.from_file.default", "refused"),
        ("os.system", "does not run"),
        ("torch.ops.aten.no_such.default", "has no operator"),
    ],
)
def test_operators_of_an_archive_are_looked_up_in_torch_only(target: str, words: str, tmp_path: Path) -> None:
    path = exported(tmp_path)
    changed = tmp_path / "changed.pt2"
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(changed, "w") as new:
        for name in old.namelist():
            data = old.read(name)
            if name.endswith("models/model.json"):
                program = json.loads(data)
                program["graph_module"]["graph"]["nodes"][0]["target"] = target
                data = json.dumps(program).encode()
            new.writestr(name, data)
    with pytest.raises(CaptureError, match=words):
        capture_pt2(changed)


def test_other_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "text.pt2"
    path.write_text("no archive")
    with pytest.raises(CaptureError, match=r"expected a \.pt2 archive"):
        capture_pt2(path)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("x", "y")
    with pytest.raises(CaptureError, match=r"expected models/model\.json"):
        capture_pt2(path)
