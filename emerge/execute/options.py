"""Settings and callbacks of an execution."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

from emerge.execute._torch import torch
from emerge.execute.arithmetic import Arithmetic
from emerge.execute.decisions import Decisions
from emerge.execute.precision import Perturbation, Precision
from emerge.graph.model import Node
from emerge.util.errors import ExecutionError

DropoutMask: TypeAlias = "Callable[[Node, tuple[int, ...]], Any]"
"""``(node, shape) -> bool tensor``: True where an element is kept."""

Fill: TypeAlias = "Callable[[Node, tuple[int, ...], Any], Any]"
"""``(node, shape, torch dtype) -> tensor``: what uninitialised memory holds."""


def keep_all(node: Node, shape: tuple[int, ...]) -> Any:
    """The default dropout mask: every element is kept.

    The operator still multiplies by ``1/(1-p)`` as it is defined to, so this is *not* the identity.
    """
    return torch.ones(shape, dtype=torch.bool)


def poison_fill(node: Node, shape: tuple[int, ...], dtype: Any) -> Any:
    """The default content of uninitialised memory: NaN, so that reading it shows in the result.

    Integers get their largest value, which is out of range as an index; booleans get True.
    """
    if dtype.is_floating_point or dtype.is_complex:
        return torch.full(shape, float("nan"), dtype=dtype)
    if dtype == torch.bool:
        return torch.ones(shape, dtype=dtype)
    return torch.full(shape, torch.iinfo(dtype).max, dtype=dtype)


def seeded_fill(seed: int) -> Fill:
    """Pseudo-random content of uninitialised memory, another one per seed and per node.

    An output that differs between two seeds reads memory that was never written (``UNINITIALISED``).
    """

    def fill(node: Node, shape: tuple[int, ...], dtype: Any) -> Any:
        generator = torch.Generator().manual_seed(zlib.crc32(f"{seed}:{node.name}".encode()))
        if dtype.is_floating_point:
            return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
        if dtype.is_complex:
            return torch.randn(shape, generator=generator, dtype=torch.complex128).to(dtype)
        return torch.randint(0, 2, shape, generator=generator, dtype=torch.int64).to(dtype)

    return fill


@dataclass(slots=True)
class Options:
    """How to execute; the defaults are the ones of a verdict.

    Attributes:
        precision: float64 (default) or recorded types.
        dropout_mask: keep-mask of dropout operators; the caller makes masks correspond between the sides.
        fill: content of uninitialised memory.
        decisions: records comparisons and the like that hang on nearly equal floats; None = not checked.
        perturbation: moves constants by one ulp; None = not.
        arithmetic: watches rounding and range of float64 and tries them out; None = not.
        device: ``cpu``, ``cuda``, ``cuda:1`` or ``auto`` (cuda where there is one).
        threads: torch CPU threads during the run; None leaves torch's setting alone.
        memory_limit: largest estimated peak in bytes over all ranks together; None = no limit.
    """

    precision: Precision = field(default_factory=Precision)
    dropout_mask: DropoutMask = keep_all
    fill: Fill = poison_fill
    decisions: Decisions | None = None
    perturbation: Perturbation | None = None
    arithmetic: Arithmetic | None = None
    device: str = "cpu"
    threads: int | None = 2
    memory_limit: int | None = None

    def with_(self, **changes: Any) -> Options:
        """A copy with some fields replaced."""
        return replace(self, **changes)

    def torch_device(self) -> Any:
        """The torch device.

        Raises:
            ExecutionError: a cuda device is asked for and torch finds none.
        """
        if self.device == "auto":
            return torch.device("cuda" if torch.cuda.is_available() else "cpu")
        if self.device.startswith("cuda") and not torch.cuda.is_available():
            raise ExecutionError(f"device '{self.device}' was asked for, but torch finds no CUDA device; use 'auto'")
        return torch.device(self.device)
