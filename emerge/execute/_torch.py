"""torch, imported at first use: importing this package must stay cheap."""

from __future__ import annotations

import importlib
from typing import Any


class _LazyModule:
    """A module that is imported when one of its attributes is first read."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        value = getattr(importlib.import_module(self._name), attribute)
        if not attribute.startswith("_"):
            self.__dict__[attribute] = value
        return value


torch: Any = _LazyModule("torch")
"""The torch module."""
