"""The import order written in the README: a package imports only what stands before it."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent / "emerge"
ORDER = (
    "util graph facts kernels algebra engine relate execute rules synthesis verdict report campaign cli".split()
)
#: Capture turns programs into graphs; it knows graphs only.
BEFORE = {name: set(ORDER[: i + 1]) for i, name in enumerate(ORDER)} | {"capture": {"util", "graph", "capture"}}
BEFORE["facts"] = {"util", "graph", "facts"}
for _name in ("campaign", "cli"):
    BEFORE[_name].add("capture")


def imported(path: Path) -> set[str]:
    """Packages of Emerge that a file imports."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names = [node.module] if isinstance(node, ast.ImportFrom) and node.module else []
        names += [a.name for a in node.names] if isinstance(node, ast.Import) else []
        found |= {n.split(".")[1] for n in names if n.startswith("emerge.") and n.count(".") >= 1}
    return found


@pytest.mark.parametrize("package", sorted(BEFORE))
def test_a_package_imports_only_what_stands_before_it(package: str) -> None:
    files = sorted((ROOT / package).rglob("*.py"))
    assert files
    wrong = {str(f.relative_to(ROOT)): sorted(imported(f) - BEFORE[package]) for f in files}
    assert {f: w for f, w in wrong.items() if w} == {}


def test_every_package_is_in_the_order() -> None:
    packages = {p.parent.name for p in ROOT.glob("*/__init__.py")}
    assert packages - {"_data"} == set(BEFORE)
