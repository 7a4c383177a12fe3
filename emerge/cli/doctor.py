"""``emerge doctor``: what this installation has, and what each missing part costs."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
from pathlib import Path

from emerge import __version__
from emerge.util.resources import resource_dir


def report_lines() -> tuple[list[str], bool]:
    """Lines for people, and whether proofs can be made at all. Imports nothing heavy."""
    from emerge.engine.run import available_engines

    engines = available_engines()
    lines = [
        f"emerge {__version__}  python {platform.python_version()}  {platform.system().lower()} {platform.machine()}"
    ]
    for engine in ("embedded", "souffle"):
        missing = "missing (pip install 'clingo>=5.7,<6')" if engine == "embedded" else "not installed (optional)"
        lines.append(f"engine {engine}: {engines.get(engine, missing)}")
    lines.append(
        f"package torch: {_package('torch') or 'missing: what is not proved cannot be executed and stays UNKNOWN'}"
    )
    for package in ("numpy", "pyyaml", "typer"):
        lines.append(f"package {package}: {_package(package) or 'missing'}")
    lines.append(f"package egglog: {_package('egglog') or 'missing: no equal forms of tensors are looked for'}")
    lines.append(
        f"package z3-solver: {_package('z3-solver') or 'missing: rules of the algebra are tested, not proved'}"
    )
    rules_found = True
    try:
        lines.append(f"rules: {resource_dir('datalog')}")
    except FileNotFoundError as e:
        lines.append(f"rules: {e}")
        rules_found = False
    lines.append(f"peer suite: {_peer_suite()}")
    return lines, bool(engines) and rules_found


def _package(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "found" if importlib.util.find_spec(name) is not None else None


def _peer_suite() -> str:
    where = os.environ.get("EMERGE_PEER_SUITE")
    if not where:
        return "EMERGE_PEER_SUITE is not set (only optional tests need it)"
    cases = sorted(p for p in Path(where).glob("*") if (p / "relations.json").is_file())
    return f"{len(cases)} cases in {where}" if cases else f"no cases in {where}"
