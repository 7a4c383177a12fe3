"""Named building blocks of pairs, by what they exercise; importing the package of scenes registers them."""

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


def scene(
    name: str, fits: Callable[[dict[str, int]], bool] | None = None
) -> Callable[[Callable[[Build], None]], Callable[[Build], None]]:
    """Registers a scene."""

    def register(function: Callable[[Build], None]) -> Callable[[Build], None]:
        SCENES[name] = Scene(function, fits or (lambda mesh: True))
        return function

    return register
