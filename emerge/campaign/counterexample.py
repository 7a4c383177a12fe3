"""Counterexamples of a run: where they lie, and running one again. Their content is :mod:`emerge.execute`'s.

A counterexample is a folder of its own with graphs, inputs and statements, so it runs again after the graphs changed.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from emerge.report.document import file_stem, make_directory, read_report
from emerge.util.errors import InputError
from emerge.verdict.types import PairResult

FOLDER = "counterexamples"


def save_counterexample(result: PairResult, pair: str, out: Path) -> None:
    """Saves the counterexample of a refuted pair, whole or not at all, and notes its file in the result.

    Raises:
        InputError: the directory cannot be written.
    """
    if result.counterexample is None or not getattr(result.payload, "witnesses", None):
        return
    from emerge.execute.counterexample import save

    parent = out / FOLDER
    make_directory(parent)
    target = parent / file_stem(pair)
    fresh = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=parent))
    try:
        payload: Any = result.payload
        manifest = save(payload, fresh / "new")
        if target.exists():
            os.replace(target, fresh / "old")
        os.replace(fresh / "new", target)
    except OSError as e:
        raise InputError(f"cannot write the counterexample ({e.strerror or e}); check --out", str(target)) from None
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
    result.counterexample.file = str((target / manifest.name).relative_to(out))


def counterexample_folder(directory: Path, pair: str) -> Path:
    """The folder of a pair's counterexample in the output directory of a run.

    Raises:
        InputError: no report, no such pair, or the pair was not refuted.
    """
    from emerge.relate.notation import closest

    pairs = {p.get("id"): p for p in read_report(directory).get("pairs", [])}
    if pair not in pairs:
        raise InputError(f"the report has no pair {pair!r}; {closest(pair, [str(p) for p in pairs])}", str(directory))
    found = pairs[pair].get("counterexample")
    if not found or not found.get("file"):
        verdict = pairs[pair].get("verdict") or "an error"
        raise InputError(
            f"pair {pair!r} has no counterexample (its verdict is {verdict}); nothing to replay", str(directory)
        )
    path = directory / str(found["file"])
    if not path.resolve().is_relative_to(directory.resolve()):
        raise InputError(f"the counterexample {found['file']!r} lies outside the report's directory", str(directory))
    return path.parent
