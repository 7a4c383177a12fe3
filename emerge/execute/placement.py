"""Where the axes of a reference tensor lie in the implementation, as something that values can be moved along.

A :class:`Placement` cuts every dimension of both tensors into axes and says for each axis of the reference which axis
of the local implementation tensor it is, or which coordinate of the rank. It holds sizes, no names, so the same
statement has one placement at captured sizes and another at reduced ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, NamedTuple

from emerge.execute._torch import torch


class OnMesh(NamedTuple):
    """An axis that is sharded: position ``rank // step % size`` lies on that rank."""

    step: int
    size: int


@dataclass(frozen=True)
class Placement:
    """Axes of both tensors and their correspondence.

    Attributes:
        reference: per dimension of the reference the sizes of its axes, outermost first.
        implementation: likewise for the local tensor.
        to: per axis of the reference (all dimensions in order): number of the axis of the local tensor, or
            :class:`OnMesh`. An axis of the local tensor that nothing is sent to repeats the value.
    """

    reference: tuple[tuple[int, ...], ...]
    implementation: tuple[tuple[int, ...], ...]
    to: tuple[int | OnMesh, ...]

    def reference_shape(self) -> tuple[int, ...]:
        """Shape of the reference tensor."""
        return tuple(prod(d) for d in self.reference)

    def local_shape(self) -> tuple[int, ...]:
        """Shape of the implementation tensor on each rank."""
        return tuple(prod(d) for d in self.implementation)

    def shard(self, value: Any, rank: int) -> Any:
        """What the implementation tensor of ``rank`` holds for this value of the reference tensor."""
        flat = value.reshape([n for d in self.reference for n in d])
        index = tuple(rank // t.step % t.size if isinstance(t, OnMesh) else slice(None) for t in self.to)
        picked = flat[index]
        kept = [t for t in self.to if not isinstance(t, OnMesh)]
        sizes = [n for d in self.implementation for n in d]
        order = sorted(range(len(kept)), key=lambda i: kept[i])
        picked = picked.permute(order)
        view = [1] * len(sizes)
        for t, n in zip(sorted(kept), picked.shape):
            view[t] = n
        return picked.reshape(view).expand(sizes).reshape(self.local_shape())

    def unshard(self, values: Sequence[Any]) -> Any:
        """The reference value that the local values of all ranks (None where it does not exist) hold; of copies the
        highest rank's."""
        sizes = [n for d in self.reference for n in d]
        first = next(v for v in values if v is not None)
        out = torch.empty(sizes, dtype=first.dtype, device=first.device)
        local = [n for d in self.implementation for n in d]
        kept = [t for t in self.to if not isinstance(t, OnMesh)]
        for rank, value in enumerate(values):
            if value is None:
                continue
            index = tuple(rank // t.step % t.size if isinstance(t, OnMesh) else slice(None) for t in self.to)
            flat = value.reshape(local)
            spare = [k for k in range(len(local)) if k not in kept]
            flat = flat[tuple(0 if k in spare else slice(None) for k in range(len(local)))]
            present = sorted(kept)
            out[index] = flat.permute([present.index(t) for t in kept])
        return out.reshape(self.reference_shape())

    def is_replicated(self) -> bool:
        """True where every rank holds the whole."""
        return not any(isinstance(t, OnMesh) for t in self.to)


Cut = tuple[int, int, int]


def region(value: Any, cuts: Sequence[Cut]) -> Any:
    """The box ``cuts`` (dimension, start, stop) of a tensor; behind its end lies padding of arbitrary values."""
    for dim, start, stop in cuts:
        if stop > value.shape[dim]:
            value = torch.cat([value, _padding(value, dim, stop - value.shape[dim])], dim)
        value = value.narrow(dim, start, stop - start)
    return value


def _padding(value: Any, dim: int, size: int) -> Any:
    """Values for padding: the same at every call, unlike one another, and nothing that a model could rely on."""
    shape = [size if d == dim else n for d, n in enumerate(value.shape)]
    count = prod(shape)
    ramp = torch.arange(1, count + 1, dtype=torch.float64, device=value.device).reshape(shape)
    return (torch.sin(ramp) * 2 + 3).to(value.dtype)


@dataclass(frozen=True)
class Relation:
    """A statement made executable: ``reference[cuts] ~ implementation[cuts]`` along a placement.

    Attributes:
        number: of the claim or the given statement in the derivation (or its position).
        implementation: name on every rank; None where it does not exist (another stage of a pipeline).
        text: in notation, for people.
    """

    number: int
    reference: str
    implementation: tuple[str | None, ...]
    placement: Placement
    reference_cuts: tuple[Cut, ...] = ()
    implementation_cuts: tuple[Cut, ...] = ()
    text: str = ""

    def members(self) -> list[tuple[int, str]]:
        """(rank, name) where the implementation tensor exists."""
        return [(r, n) for r, n in enumerate(self.implementation) if n is not None]

    def expected(self, value: Any, rank: int) -> Any:
        """What ``rank`` should hold in its piece, for the whole reference value."""
        return self.placement.shard(region(value, self.reference_cuts), rank)

    def actual(self, values: dict[str, Any], rank: int) -> Any:
        """What ``rank`` holds in its piece."""
        return region(values[str(self.implementation[rank])], self.implementation_cuts)


@dataclass
class DropoutPair:
    """A dropout call of the reference and the implementation's call that takes its mask.

    Attributes:
        placement: of the mask; None = the correspondence is not known.
        sure: the correspondence follows from the derivation, or is the only one the shapes allow.
    """

    reference: str | None
    implementation: tuple[str, ...] | None
    placement: Placement | None = None
    sure: bool = False


@dataclass
class DropoutPlan:
    """How dropout masks of both sides correspond."""

    pairs: list[DropoutPair] = field(default_factory=list)

    def known(self) -> bool:
        """True where every call has a partner and a placement."""
        return all(p.placement is not None for p in self.pairs)

    def sure(self) -> bool:
        """True where the whole correspondence is beyond doubt."""
        return all(p.sure for p in self.pairs)
