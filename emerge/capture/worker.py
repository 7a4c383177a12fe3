"""Capture in another Python environment: its own torch runs there, and graph files come back.

The environment needs torch (and what the spec names) only. The few files of Emerge that capture needs are copied into
a temporary folder and put on its path, so that nothing has to be installed there and no package of this environment
is visible in it.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from emerge.capture.base import CaptureError
from emerge.capture.source import SourceSpec, capture_here, describe
from emerge.graph.json_io import read_graph, read_values, write_graph, write_values
from emerge.graph.model import Graph
from emerge.util.errors import EmergeError

_SHIPPED = ("util", "graph", "capture")
_LAST_LINES = 200


def environment_python(env: str, base: str = ".") -> Path:
    """The interpreter of an environment: a folder with ``bin/python`` (or ``Scripts``), or the interpreter itself.

    Raises:
        CaptureError: there is none.
    """
    root = Path(base) / env
    for candidate in (root, root / "bin" / "python", root / "bin" / "python3", root / "Scripts" / "python.exe"):
        if candidate.is_file() and os.access(candidate, os.X_OK):
            # Not resolved: the interpreter of an environment is a link, and finds its packages by where the link lies.
            return Path(os.path.abspath(candidate))
    raise CaptureError(
        "expected a Python environment (a folder with bin/python), found none; correct the path", f"python_env: {root}"
    )


def capture_in_environment(
    spec: SourceSpec, progress: Callable[[str], None], *, timeout: float | None = None, log_folder: Path | None = None
) -> tuple[list[Graph], set[str]]:  # fmt: skip
    """The graphs of a spec, captured by the environment's interpreter, and the source files that took part.

    Args:
        timeout: seconds. log_folder: where the worker's last lines are kept when it fails (default: the cache folder).

    Raises:
        CaptureError: the capture fails there; the message names the file with the worker's last lines.
    """
    assert spec.python_env is not None
    python = environment_python(spec.python_env, spec.base)
    progress(f"{describe(spec)}: capturing in {spec.python_env}")
    with tempfile.TemporaryDirectory(prefix="emerge-capture-") as scratch:
        folder = Path(scratch)
        ship(folder / "path")
        (folder / "out").mkdir()
        data = spec.as_json() | {"python_env": None, "base": str(Path(spec.base).resolve())}
        (folder / "request.json").write_text(json.dumps({"spec": data, "out": str(folder / "out")}), encoding="utf-8")
        path = os.pathsep.join(p for p in (str(folder / "path"), os.environ.get("PYTHONPATH", "")) if p)
        env = {k: v for k, v in os.environ.items() if k not in ("PYTHONHOME", "VIRTUAL_ENV", "__PYVENV_LAUNCHER__")} | {
            "PYTHONPATH": path
        }
        command = [str(python), "-m", "emerge.capture.worker", str(folder / "request.json")]
        with (folder / "log").open("wb") as log:
            try:
                code = subprocess.run(
                    command, env=env, stdout=log, stderr=subprocess.STDOUT, timeout=timeout, check=False
                ).returncode
            except subprocess.TimeoutExpired:
                code = None
            except OSError as error:
                raise CaptureError(
                    f"the interpreter cannot be started ({error}); correct the path", f"python_env: {spec.python_env}"
                ) from None
        result = _result(folder / "out" / "result.json")
        if code == 0 and result is not None and "graphs" in result:
            out = folder / "out"
            graphs = [read_values(read_graph(out / n), out / f"{n}.npz") for n in result["graphs"]]
            return graphs, set(result["files"])
        kept = keep_log(folder / "log", log_folder)
        if result is not None and "error" in result:
            raise CaptureError(
                f"{result['error']['message']} (in {spec.python_env}; the worker's output is in {kept})",
                result["error"]["place"],
            )
        last = _last_line(kept)
        how = f"did not end within {timeout} s" if code is None else f"ended with status {code}"
        raise CaptureError(
            f"the capture worker {how}: {last} (its output is in {kept})", f"python_env: {spec.python_env}"
        )


def ship(target: Path) -> None:
    """Copies the modules capture needs into ``target``."""
    package = Path(__file__).resolve().parent.parent
    (target / "emerge").mkdir(parents=True)
    shutil.copy(package / "__init__.py", target / "emerge" / "__init__.py")
    for name in _SHIPPED:
        shutil.copytree(package / name, target / "emerge" / name, ignore=shutil.ignore_patterns("__pycache__"))


def keep_log(log: Path, folder: Path | None) -> Path:
    """The last lines of a worker's output in a file that stays."""
    from emerge.capture.cache import cache_folder

    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()[-_LAST_LINES:]
    target = folder if folder is not None else cache_folder() / "logs"
    try:
        target.mkdir(parents=True, exist_ok=True)
    except OSError:
        target = Path(tempfile.gettempdir())
    handle, name = tempfile.mkstemp(prefix="capture-worker-", suffix=".log", dir=target)
    with os.fdopen(handle, "w", encoding="utf-8") as f:
        f.write("\n".join(lines) + "\n")
    return Path(name)


def _last_line(log: Path) -> str:
    lines = [line for line in log.read_text(encoding="utf-8").splitlines() if line.strip()]
    return lines[-1].strip()[:300] if lines else "no output"


def _result(path: Path) -> dict[str, Any] | None:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def main(request: str) -> int:
    """Runs in the other environment: captures what the request says, writes graph files and ``result.json``."""
    data = json.loads(Path(request).read_text(encoding="utf-8"))
    out = Path(data["out"])
    try:
        files: set[str] = set()
        graphs = capture_here(SourceSpec.from_json(data["spec"]), lambda line: print(line, flush=True), files)
        names = []
        for graph in graphs:
            names.append("seq.json" if graph.world_size == 1 else f"rank{graph.rank}.json")
            write_graph(graph, out / names[-1])
            write_values(graph, out / f"{names[-1]}.npz")
        result: dict[str, Any] = {"graphs": names, "files": sorted(files)}
    except EmergeError as error:
        import traceback

        traceback.print_exc()
        result = {"error": {"message": error.message, "place": error.place}}
    (out / "result.json").write_text(json.dumps(result), encoding="utf-8")
    return 0 if "graphs" in result else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
