"""Executed values of the lowered tensors of both sides, on several draws of inputs that satisfy the given relations."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from emerge.execute.options import Options
from emerge.execute.shrink import Shrinker
from emerge.execute.trial import Draw, Run, draw_inputs, run_both
from emerge.relate.derive import Derivation, Problem
from emerge.rules.bodies import NotEvaluable
from emerge.rules.lowered import Lowered, Values

Array = npt.NDArray[np.float64]
#: Values are compared at so many draws.
SEEDS = (11, 23, 47)
#: Both sides agree where they differ by less than this part of the largest magnitude; values that are to tell elements
#: apart lie further from each other than ``GAP``.
AGREE, GAP = 1e-11, 1e-10
#: A tensor with fewer values proposes nothing, for they fit too easily; larger ones are not looked at.
LEAST, MOST = 4, 1 << 17


class Executed:
    """Values of lowered tensors: side 1 has one rank, side 2 those of the mesh.

    Args:
        before: values of an earlier derivation of the same pair; both sides are not executed again. device: where they are.

    Raises:
        EmergeError: the pair cannot be executed (:mod:`emerge.execute`).
    """

    def __init__(
        self, problem: Problem, derivation: Derivation, seed: int = 0, before: Executed | None = None,
        device: str = "auto",
    ) -> None:  # fmt: skip
        setup = Shrinker(problem, derivation).captured()
        lowered = Lowered(derivation.base)
        self.runs: list[dict[int, Values]] = []
        self.problem = problem
        self.made: list[Run] = []
        if before is not None and before.problem is problem:
            self.made = before.made
        else:
            for k in SEEDS:
                draw = Draw(seed * 1000 + k, scale=1.0)
                self.made.append(run_both(setup, draw_inputs(setup, draw), draw, Options(device=device), keep="all"))
        for run in self.made:
            self.runs.append(
                {
                    1: Values(lowered, derivation.reference, problem.reference, [run.reference]),
                    2: Values(lowered, derivation.implementation, problem.implementation, run.ranks),
                }
            )
        self.ranks = {1: 1, 2: len(setup.ranks)}
        self._memo: dict[tuple[int, int], list[list[Array]] | None] = {}

    def of(self, side: int, tensor: int) -> list[list[Array]] | None:
        """Values of a tensor per draw and rank; None where it has none that can be compared: it is not executed, is not
        floating, holds what is no number, or is too large."""
        key = (side, tensor)
        if key not in self._memo:
            self._memo[key] = self._read(side, tensor)
        return self._memo[key]

    def pool(self) -> list[Array]:
        """Floating values of the nodes on the first draw, each in a row; of those with the same values one."""
        found: dict[bytes, Array] = {}
        for value in (*self.made[0].reference.values(), *self.made[0].ranks[0].values()):
            if hasattr(value, "is_floating_point") and value.is_floating_point() and LEAST <= value.numel() <= MOST:
                row = value.detach().cpu().double().numpy().ravel()
                if np.isfinite(row).all() and np.unique(row).size >= LEAST:
                    found.setdefault(np.sort(row.astype(np.float32)).tobytes(), row)
        return list(found.values())

    def _read(self, side: int, tensor: int) -> list[list[Array]] | None:
        out = []
        try:
            for run in self.runs:
                found = [run[side].tensor(tensor, rank) for rank in range(self.ranks[side])]
                if any(not hasattr(v, "shape") or math.prod(v.shape) > MOST for v in found):
                    return None
                out.append([np.asarray(v.detach().cpu().double().numpy()) for v in found])
        except (NotEvaluable, RuntimeError, IndexError, KeyError):
            return None
        return out if all(bool(np.isfinite(v).all()) for values in out for v in values) else None


@dataclass(frozen=True)
class Matching:
    """How the elements of an implementation tensor lie in a reference tensor.

    Attributes:
        at: per rank, for every element (row-major) the position in the reference tensor.
        identity: one rank, same shape, and every element lies at its own place.
    """

    at: tuple[npt.NDArray[np.int64], ...]
    identity: bool

    def carries(self, reference: list[list[Array]], implementation: list[list[Array]]) -> bool:
        """Whether another pair of tensors agrees, element by element at the same places."""
        for whole, parts in zip(reference, implementation):
            flat = whole[0].ravel()
            limit = AGREE * max(float(np.abs(flat).max(initial=0.0)), 1e-300)
            for at, part in zip(self.at, parts):
                if part.size != at.size or int(at.max(initial=0)) >= flat.size:
                    return False
                if not bool((np.abs(part.ravel() - flat[at]) <= limit).all()):
                    return False
        return True


def distinct(values: list[list[Array]]) -> bool:
    """Whether the values of a reference tensor tell all its elements apart; constants, zeros and symmetric tensors do not."""
    flat = np.sort(values[0][0].ravel())
    if flat.size < LEAST:
        return False
    return bool((np.diff(flat) > GAP * float(np.abs(flat).max())).all())


def match(reference: list[list[Array]], implementation: list[list[Array]]) -> Matching | None:
    """The one way in which an implementation tensor holds the values of a reference tensor, over all ranks: permuted,
    reshaped, sharded or replicated. None where it does not, on any draw.

    Args:
        reference: values that tell all elements apart.
    """
    flat = reference[0][0].ravel()
    order = np.argsort(flat)
    ordered = flat[order]
    limit = AGREE * float(np.abs(flat).max())
    places = []
    for part in implementation[0]:
        wanted = part.ravel()
        right = np.clip(np.searchsorted(ordered, wanted), 0, flat.size - 1)
        left = np.clip(right - 1, 0, flat.size - 1)
        nearer = np.abs(ordered[left] - wanted) < np.abs(ordered[right] - wanted)
        found = np.where(nearer, left, right)
        if not bool((np.abs(ordered[found] - wanted) <= limit).all()):
            return None
        at = order[found]
        if np.unique(at).size != at.size:
            return None
        places.append(at.astype(np.int64))
    if np.unique(np.concatenate(places)).size != flat.size:
        return None
    same = len(places) == 1 and reference[0][0].shape == implementation[0][0].shape
    made = Matching(tuple(places), same and bool((places[0] == np.arange(flat.size)).all()))
    return made if made.carries(reference, implementation) else None


def alike(reference: list[list[Array]], implementation: list[list[Array]]) -> bool:
    """Whether both hold the same numbers on every draw, wherever they lie and however often; too few say nothing."""
    for (whole,), parts in zip(reference, implementation):
        one, other = np.unique(whole), np.unique(np.concatenate([p.ravel() for p in parts]))
        if one.size < LEAST * 2 or other.size < LEAST * 2:
            return False
        limit = AGREE * float(np.abs(one).max())
        if not (_near(one, other, limit) and _near(other, one, limit)):
            return False
    return True


def _near(ordered: Array, wanted: Array, limit: float) -> bool:
    """Whether every wanted number is close to one of the ordered ones."""
    right = np.clip(np.searchsorted(ordered, wanted), 0, ordered.size - 1)
    left = np.clip(right - 1, 0, ordered.size - 1)
    nearest = np.minimum(np.abs(ordered[left] - wanted), np.abs(ordered[right] - wanted))
    return bool((nearest <= limit).all())
