"""Captures kept on disk, by content of code, config and versions.

An entry is found by the spec and the versions of Python, torch, transformers and Emerge. It is valid while every
source file that took part (user modules, and files of packages that appear in stacks) has the content it had then.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from importlib import metadata
from pathlib import Path
from typing import Any

from emerge import __version__
from emerge.capture.source import SourceSpec
from emerge.graph.json_io import read_graph, read_values, write_graph, write_values
from emerge.graph.model import Graph
from emerge.util.errors import EmergeError

_PACKAGES = ("torch", "transformers", "megatron-core", "accelerate", "safetensors", "vllm")


def cache_folder() -> Path:
    """``$EMERGE_CACHE``, else ``$XDG_CACHE_HOME/emerge``, else ``~/.cache/emerge``."""
    given = os.environ.get("EMERGE_CACHE")
    if given:
        return Path(given)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "emerge"


class CaptureCache:
    """The folder ``captures`` of the cache: one sub-folder per entry with ``manifest.json`` and graph files."""

    def __init__(self, folder: str | Path | None = None) -> None:
        self.folder = Path(folder) if folder is not None else cache_folder() / "captures"

    def load(self, spec: SourceSpec) -> list[Graph] | None:
        """The graphs of a spec, None where there is no valid entry."""
        entry = self.folder / entry_key(spec)
        try:
            manifest = json.loads((entry / "manifest.json").read_text(encoding="utf-8"))
            if any(file_digest(f) != digest for f, digest in manifest["files"].items()):
                return None
            return [read_values(read_graph(entry / f), entry / f"{f}.npz") for f in manifest["graphs"]]
        except (OSError, ValueError, KeyError, TypeError, AttributeError, EmergeError):
            return None  # absent, or written by something else: capture again

    def save(self, spec: SourceSpec, graphs: list[Graph], files: set[str]) -> None:
        """Keeps the graphs of a spec; a cache that cannot be written is no error."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=self.folder, prefix=".new-") as scratch:
                place = Path(scratch) / "entry"
                place.mkdir()
                names = []
                for graph in graphs:
                    names.append("seq.json" if graph.world_size == 1 else f"rank{graph.rank}.json")
                    write_graph(graph, place / names[-1])
                    write_values(graph, place / f"{names[-1]}.npz")
                manifest = {
                    "spec": spec.as_json(),
                    "graphs": names,
                    "files": {f: file_digest(f) for f in sorted(files)},
                }
                (place / "manifest.json").write_text(json.dumps(manifest, indent=1, default=str), encoding="utf-8")
                target = self.folder / entry_key(spec)
                if target.exists():
                    shutil.rmtree(target)
                os.replace(place, target)
        except (OSError, EmergeError):
            return


def entry_key(spec: SourceSpec) -> str:
    """Hash of the spec, the environment's versions and the capture code itself."""
    content: dict[str, Any] = {
        "spec": spec.as_json(),
        # one module name means different code in different folders
        "base": str(Path(spec.base or ".").resolve()),
        "emerge": __version__,
        "capture": _own_code(),
        "versions": _versions(spec),
    }
    return hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()[:40]


def _versions(spec: SourceSpec) -> Any:
    import sys

    if spec.python_env is not None:  # the listing of its packages changes whenever one is installed or replaced
        root = Path(spec.base) / spec.python_env
        root = root.parent.parent if root.is_file() else root  # the interpreter itself may be named
        return sorted(str(p.relative_to(root)) for p in root.glob("lib*/python*/site-packages/*.dist-info"))
    out = {"python": sys.version}
    for name in _PACKAGES:
        try:
            out[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return out


def _own_code() -> str:
    digest = hashlib.sha256()
    for file in sorted(Path(__file__).parent.rglob("*.py")):
        digest.update(file.read_bytes())
    return digest.hexdigest()


def file_digest(path: str) -> str:
    """Content hash of a file, ``absent`` where there is none."""
    try:
        return hashlib.sha256(Path(path).read_bytes()).hexdigest()
    except OSError:
        return "absent"
