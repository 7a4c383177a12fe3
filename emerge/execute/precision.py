"""Number types of an execution, and one-ulp perturbations of constants.

In the default mode every floating tensor is float64 and casts between floating types are identities; integers
and booleans keep their recorded types and wrap as captured. In *captured* mode everything runs in the recorded
types. Sub-graphs that depend on constants and integer inputs only always run captured (see
:mod:`emerge.execute.constants`).
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field
from typing import Any

from emerge.execute._torch import torch
from emerge.graph.model import DTYPES, is_floating
from emerge.util.errors import ExecutionError

#: Significant binary digits and exponent of the smallest subnormal, per floating type.
_SIGNIFICAND: dict[str, tuple[int, int]] = {
    "float8_e4m3fn": (4, -9),
    "float8_e5m2": (3, -16),
    "float16": (11, -24),
    "bfloat16": (8, -133),
    "float32": (24, -149),
    "float64": (53, -1074),
}

MODES = ("up", "down", "random")


@dataclass(frozen=True, slots=True)
class Precision:
    """Which type a floating tensor has during execution.

    Attributes:
        captured: False = float64 everywhere (default), True = recorded types everywhere.
    """

    captured: bool = False

    def torch_dtype(self, name: str, captured: bool = False) -> Any:
        """torch dtype for the recorded dtype ``name``.

        fp8 types stay themselves in either mode: a cast to fp8 is a quantisation, not an identity.

        Args:
            captured: the node belongs to a constant sub-graph, which runs in its recorded types.

        Raises:
            ExecutionError: unknown dtype name.
        """
        if name not in DTYPES:
            raise ExecutionError(f"unknown dtype '{name}'; known are {', '.join(sorted(DTYPES))}")
        if not (self.captured or captured):
            kind = DTYPES[name][0]
            if kind == "float":
                return torch.float64
            if kind == "complex":
                return torch.complex128
        return getattr(torch, name)


def dtype_name(dtype: Any) -> str:
    """Name of a torch dtype as the graph format writes it, e.g. ``float32``."""
    return str(dtype).removeprefix("torch.")


def widen(value: Any) -> Any:
    """The value as float64 (complex128) where it is floating; everything else unchanged."""
    if not isinstance(value, torch.Tensor):
        return value
    if value.is_complex():
        return value.to(torch.complex128)
    return value.to(torch.float64) if value.is_floating_point() else value


def narrowest(dtypes: list[str]) -> str:
    """The floating type with the fewest significant digits among ``dtypes``; float32 when there is none."""
    floats = [d for d in dtypes if is_floating(d)]
    return min(floats, key=lambda d: _SIGNIFICAND[d][0]) if floats else "float32"


def ulp(value: Any, dtype: str) -> Any:
    """Distance from each element to the next number of type ``dtype`` away from zero, as a float64 tensor.

    Zeros and non-finite elements get 0: an exact zero is structure (a mask, padding), not a rounded number.
    """
    digits, smallest = _SIGNIFICAND[dtype]
    wide = value.to(torch.float64)
    regular = torch.isfinite(wide) & (wide != 0)
    exponent = torch.frexp(torch.where(regular, wide, torch.ones_like(wide))).exponent
    step = torch.ldexp(torch.ones_like(wide), torch.clamp(exponent - digits, min=smallest))
    return torch.where(regular, step, torch.zeros_like(step))


def representable(value: float, dtype: str) -> bool:
    """True when the literal is exactly a number of type ``dtype``."""
    narrow = torch.tensor(value, dtype=torch.float64).to(getattr(torch, dtype)).to(torch.float64)
    return bool(narrow == value)


@dataclass(slots=True)
class Perturbation:
    """Moves float constants and the results of constant sub-graphs by one ulp of their recorded type.

    What moves: stored tensor constants, results of constant sub-graphs where they meet other values, and literal
    arguments that are not exactly representable in the narrowest floating type at their operator (a literal that
    is, like 2.0 or -10000.0, cannot be the rounding of another one). Zeros and infinities stay.

    Attributes:
        mode: ``up`` or ``down`` move all elements alike in magnitude, ``random`` draws a sign per element.
        seed: of the random signs; the same name gets the same signs on every rank.
        touched: number of tensors and literals moved so far; 0 after a run means there is nothing to respond to.
    """

    mode: str = "up"
    seed: int = 0
    touched: int = field(default=0, compare=False)

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise ValueError(f"mode must be one of {MODES}, got {self.mode!r}")

    def tensor(self, value: Any, dtype: str, key: str) -> Any:
        """``value`` moved by one ulp of ``dtype``; returned in the type of ``value``."""
        if dtype not in _SIGNIFICAND or value.numel() == 0:
            return value
        step = ulp(value, dtype)
        if not bool(torch.any(step != 0)):
            return value
        self.touched += 1
        wide = value.to(torch.float64)
        if self.mode == "random":
            generator = torch.Generator().manual_seed(self._seed(key))
            bits = torch.randint(0, 2, tuple(value.shape), generator=generator, dtype=torch.int64)
            sign = (2 * bits - 1).to(device=value.device, dtype=torch.float64)
        else:
            sign = torch.sign(wide) * (1.0 if self.mode == "up" else -1.0)
        return (wide + sign * step).to(value.dtype)

    def literal(self, value: float, dtype: str, key: str) -> float:
        """A literal argument moved by one ulp of ``dtype`` unless it is exactly representable there."""
        if value != value or value in (float("inf"), float("-inf")):
            return value
        if representable(value, dtype):
            return value
        self.touched += 1
        tensor = torch.tensor(value, dtype=torch.float64)
        up = self.mode == "up" or (self.mode == "random" and self._seed(key) % 2 == 0)
        sign = 1.0 if value > 0 else -1.0
        return value + (1.0 if up else -1.0) * sign * float(ulp(tensor, dtype))

    def _seed(self, key: str) -> int:
        return zlib.crc32(f"{self.seed}:{key}".encode())
