"""Finds the rule files (``datalog/``, ``rules/``, ``configs/``): inside the wheel, or at the root of a source tree."""

from __future__ import annotations

from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent.parent


def resource_dir(name: str) -> Path:
    """Folder ``name`` (``datalog``, ``rules`` or ``configs``) of the installed package or of the source tree.

    Raises:
        FileNotFoundError: neither place has it (a broken installation).
    """
    for candidate in (_PACKAGE / "_data" / name, _PACKAGE.parent / name):
        if candidate.is_dir():
            return candidate
    raise FileNotFoundError(f"the folder {name}/ of Emerge was not found; reinstall the package")
