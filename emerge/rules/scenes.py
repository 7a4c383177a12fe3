"""Named scenes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from emerge.rules.build import Build


@dataclass(frozen=True)
class Scene:
    """A building block.

    Attributes:
        build: writes it. fits: meshes it works on.
    """

    build: Callable[[Build], None]
    fits: Callable[[dict[str, int]], bool] = lambda mesh: True


SCENES: dict[str, Scene] = {}
