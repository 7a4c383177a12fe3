"""Seeded random pairs: scenes that make every law fire, random compositions, and faulty implementations."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

from emerge.rules import scenes_corner, scenes_equal, scenes_index, scenes_model, scenes_routing  # noqa: F401  (they register)
from emerge.rules.build import Build
from emerge.rules.pair import Pair
from emerge.rules.scenes import SCENES
from emerge.rules.steps import random_steps
from emerge.rules.writer import Unwritable

#: Part of the hash of every certificate; a change of what is generated makes certificates void.
GENERATOR_VERSION = 2

MESHES: tuple[dict[str, int], ...] = (
    {"tp": 2},
    {"tp": 3},
    {"tp": 5},
    {"dp": 2, "tp": 3},
    {"dp": 3, "tp": 2},
    {"tp": 4},
)


def random_inputs(b: Build) -> None:
    """Three to five inputs over shared dimensions, sharded at random."""
    axes = list(b.mesh)
    b.dim("b", axes[:1] if b.rng.random() < 0.4 else [])
    b.dim("s", [b.pick(axes)])
    b.dim("h", [b.pick(axes)] if b.rng.random() < 0.8 else [])
    b.dim("f", [b.pick(axes)])
    for _ in range(b.rng.randint(3, 5)):
        names = b.rng.sample(["b", "s", "h", "f"], b.rng.randint(2, 3))
        dims: list[str | None] = []
        for n in names:
            free = [a for a in axes if a not in dims and b.sizes[n] % b.mesh[a] == 0 and b.sizes[n] > b.mesh[a]]
            dims.append(b.pick(free) if free and b.rng.random() < 0.45 else None)
        if b.rng.random() < 0.25:
            b.odd_input(names, dims)
        else:
            b.input(names, dims)


def composition(seed: int, *, faulty: bool = False) -> Pair:
    """Random operators on random inputs; 5 to 25 steps."""
    rng = random.Random(f"composition {seed}")
    mesh = MESHES[rng.randrange(len(MESHES))]
    b = Build(seed, mesh, 0.12 if faulty else 0.0, ones=rng.random() < 0.2, tag="composition ")
    b.scenes.append("composition")
    random_inputs(b)
    random_steps(b, rng.randint(5, 25))
    return b.finish()


def scene(name: str, seed: int, *, faulty: bool = False, steps: int | None = None) -> Pair:
    """One named scene on a random mesh, followed by a few random steps."""
    rng = random.Random(f"{name} {seed}")
    wanted = [m for m in MESHES if SCENES[name].fits(m)]
    mesh = wanted[rng.randrange(len(wanted))]
    b = Build(seed, mesh, 0.3 if faulty else 0.0, tag="")
    b.scenes.append(name)
    SCENES[name].build(b)
    random_steps(b, rng.randint(0, 4) if steps is None else steps)
    return b.finish()


def pairs(seed: int, count: int, names: Sequence[str] | None = None) -> Iterator[Pair]:
    """``count`` pairs: scenes in turn (right and faulty), and compositions.

    Args:
        names: scenes to use; None = all of them and compositions.
    """
    chosen = [*SCENES, "composition"] if names is None else list(names)
    made = 0
    k = 0
    while made < count:
        k += 1
        number = seed * 100_003 + k
        turn, faulty = (k // 2, k // 4 % 2 == 1) if names is None else (k, k // len(chosen) % 2 == 0)
        name = "composition" if names is None and k % 2 else chosen[turn % len(chosen)]
        try:
            pair = composition(number, faulty=faulty) if name == "composition" else scene(name, number, faulty=faulty)
        except Unwritable:
            continue
        made += 1
        yield pair
