"""Emerge proves that two computation graphs compute the same thing, or shows where they part."""

from __future__ import annotations

from typing import Any

__version__ = "0.1.0"

#: The Python API, imported when first used: ``import emerge`` alone loads nothing heavy.
_API = ("NotEquivalent", "UnknownVerdict", "assert_equivalent", "compare")


def __getattr__(name: str) -> Any:
    if name in _API:
        from emerge.campaign import api

        return getattr(api, name)
    raise AttributeError(f"module 'emerge' has no attribute {name!r}")
