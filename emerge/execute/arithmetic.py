"""Watches the arithmetic of float64 inside an execution, operator by operator, and tries its errors out.

Programs are compared over the extended reals, float64 only approximates them: results are rounded, and numbers have
an end at either side. A difference found by execution counts where neither is its cause. Both are tried out, in a
dispatch mode that sees the operators composed ones are made of:

- *rounding*: every rounded result moves by 1 to 16 ulps, up or down at random (by different amounts, so that two
  operators in a row do not undo each other); the run with the other sign moves every element the other way.
  Saturation (``tanh(20) = 1``), absorption and cancellation show as large changes behind it.
- *range*: a result that overflows is noted. One that is too small for float64 although no exact zero nor infinity
  explains it is noted too, and may be anything between 0 and the smallest number: ``tiny = 1`` and ``-1`` give it two
  values there, with the order of any two such elements reversed. What a logarithm, a division or a comparison makes
  of them differs between the runs; what an addition makes of them does not.

Operators made of several steps inside (norms, variances) are trusted for operands whose fourth power has a float64.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from emerge.execute._torch import torch
from emerge.execute.constants import EXACT
from emerge.graph.model import Graph

#: The smallest number that float64 has with all its digits.
SMALLEST = 2.0**-1022
#: Functions of one operand have zeros and poles inside, and underflow and overflow outside of these magnitudes.
_INSIDE = (1e-3, 4.0)
#: Operands of this magnitude are safe where an operator multiplies up to four of them inside.
_WINDOW = (1e-70, 1e70)
#: Sums: their results are 0 by cancellation, never because they are too small.
_SUMS = {"add", "sub", "rsub", "sum", "nansum", "mean", "cumsum", "index_add", "scatter_add", "trace", "lerp"}
#: Contractions: 0 where every product is, else too small.
_PRODUCTS = {"mm", "bmm", "mv", "dot", "vdot", "convolution", "_convolution", "linear"}
#: Operators besides EXACT that hand values on, or count.
_HANDED_ON = {
    *("convert_element_type", "histc", "bincount", "_unsafe_view", "lift_fresh", "lift", "masked_scatter"),
    *("hardtanh", "relu6", "index_copy", "index_fill", "zeros_like", "new_empty", "clamp_min", "clamp_max", "diag"),
    *("diag_embed", "nan_to_num"),
}


@dataclass
class Arithmetic:
    """How float64 is watched and tried out in one run; no state goes from one run to the next.

    Attributes:
        rounding: 0 = results stay as they are; 1 and -1 = they move by a few ulps, in opposite directions.
        tiny: 0 = results that are too small stay as they are; 1 and -1 = they become numbers, in opposite orders.
        seed: of what is drawn.
        overflowed, underflowed: (id of the graph, node) where results left the range.
    """

    rounding: int = 0
    tiny: int = 0
    seed: int = 0
    overflowed: set[tuple[int, str]] = field(default_factory=set)
    underflowed: set[tuple[int, str]] = field(default_factory=set)
    _place: tuple[int, str] | None = None
    _step: int = 0

    @contextmanager
    def at(self, graph: Graph, node: str) -> Iterator[None]:
        """Watches the operators run inside the block, which belong to a node."""
        if self._place is not None:
            yield  # the graph that defines the operator of a node that is being watched
            return
        self._place, self._step = (id(graph), node), 0
        try:
            with _mode()(self):
                yield
        finally:
            self._place = None

    def call(self, mode: Any, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """One operator, by its decomposition where it has one."""
        name = _name(func)
        if _hands_on(func, name):
            return func(*args, **kwargs)
        parts = None if func._schema.is_mutable else _parts(func, name, pointwise=bool(self.rounding))
        if parts is not None:
            try:
                with mode:
                    result = parts(*args, **kwargs)
                if result is not NotImplemented:
                    return result
            except (RuntimeError, TypeError, ValueError, NotImplementedError, AssertionError):
                pass  # torch's decomposition does not cover these arguments: the operator as a whole
        operands = [x.clone() if func._schema.is_mutable else x for x in _tensors([*args, *kwargs.values()])]
        result = func(*args, **kwargs)
        scalars = [a for a in args if isinstance(a, (int, float)) and not isinstance(a, bool)]
        call = _Primitive(func, name, args, kwargs, operands, scalars)
        if not isinstance(result, (tuple, list)):
            return self._result(call, result)
        return type(result)(self._result(call, r) for r in result)

    def _result(self, call: _Primitive, value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or not value.numel():
            return value
        if value.dtype == torch.complex128:
            if self.rounding:
                return torch.view_as_complex(self._result(call, torch.view_as_real(value)))
            numbers = call.regular() if _pointwise(call.name) else torch.tensor(True)
            if bool((numbers & (torch.isinf(value) | (value.abs() < SMALLEST))).any()):
                self._note(self.overflowed)
            return value
        if value.dtype != torch.float64:
            return value
        self._step += 1
        new = self._rounded(value) if self.rounding else self._ranged(call, value)
        if new is not value and call.func._schema.is_mutable:
            return value.copy_(new)
        return new

    def _note(self, places: set[tuple[int, str]]) -> None:
        if self._place is not None:
            places.add(self._place)

    def _rounded(self, value: Any) -> Any:
        drawn = self._draw(value) - 0.5
        return value * (1.0 + self.rounding * torch.sign(drawn) * torch.exp2(8.0 * drawn.abs()) * 2.0**-52)

    def _ranged(self, call: _Primitive, value: Any) -> Any:
        if call.overflows(value):
            self._note(self.overflowed)
        small = value.abs() < SMALLEST
        if not bool(small.any()):
            return value
        small = small & call.inexact()
        if not bool(small.any()):
            return value
        self._note(self.underflowed)
        if not self.tiny:
            return value
        size = 0.5 + self.tiny * (self._draw(value) - 0.5)
        sign = 1.0 if call.sign_is_sure() else float(self.tiny)
        return torch.where(small, torch.copysign(SMALLEST * (1.0 + size), value) * sign, value)

    def _draw(self, value: Any) -> Any:
        """Numbers between 0 and 1, none near the middle; the same for a node of this name in every run and on every rank."""
        seed = zlib.crc32(f"{self.seed}:{self._place and self._place[1]}:{self._step}".encode())
        drawn = torch.rand(value.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        return torch.where(drawn < 0.5, drawn * 0.8, 1.0 - (1.0 - drawn) * 0.8).to(value.device)


@dataclass
class _Primitive:
    """One operator as a whole. ``operands`` are the tensors as they were before it, ``scalars`` the other numbers."""

    func: Any
    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    operands: list[Any]
    scalars: list[float]

    def overflows(self, value: Any) -> bool:
        """Whether an infinity comes from neither an infinity nor a pole, or the inside of the operator may overflow."""
        if not _pointwise(self.name) and self.name not in _SUMS | _PRODUCTS:
            return not self._safe_inside()
        infinite = torch.isinf(value)
        if not bool(infinite.any()):
            return False
        if _pointwise(self.name):
            return bool((infinite & self.regular()).any())
        return bool(torch.isinf(self._again(lambda x: torch.where(torch.isinf(x), torch.ones_like(x), x))).any())

    def inexact(self) -> Any:
        """Where a result that is 0, or has lost digits, is not 0 in truth; a mask or one bool for all elements."""
        if self.name in _SUMS:
            return torch.tensor(False)
        if _pointwise(self.name):
            return self.regular()
        if self.name in _PRODUCTS:
            return self._again(lambda x: (x != 0).to(torch.float64)) != 0
        return torch.tensor(False)

    def sign_is_sure(self) -> bool:
        """Whether a result that is too small has the right sign nevertheless."""
        return self.name in {"mul", "div", "square", "exp", "exp2", "sigmoid", "reciprocal", "softplus", "silu", "pow"}

    def regular(self) -> Any:
        """Where no operand of a pointwise operator explains a 0 or an infinity."""
        numbers = [*self.operands, *(torch.tensor(float(s), dtype=torch.float64) for s in self.scalars)]
        regular = torch.tensor(True)
        for x in numbers:
            if self.name.startswith("_foreach"):
                break  # lists of tensors: whatever is small counts
            regular = regular.to(x.device) & torch.isfinite(x) & (x != 0)
        if len(numbers) == 1 and not self.name.startswith("_foreach"):
            size = numbers[0].abs()
            regular = regular & ((size < _INSIDE[0]) | (size > _INSIDE[1]))
        return regular

    def _safe_inside(self) -> bool:
        low, high = _WINDOW
        if self.name in ("prod", "cumprod"):
            # a product may leave the range and come back: all its factors together must not be able to
            x = self.operands[0]
            size = torch.where(torch.isfinite(x) & (x != 0), x, torch.ones_like(x)).abs().log2().abs()
            dims = self.args[1:2] if len(self.args) > 1 and self.args[1] is not None else ()
            return float(size.sum(*dims).max()) < 1000.0
        for x in self.operands:
            size = x.abs().to(torch.float64)
            size = size[torch.isfinite(size) & (size > 0)]
            if not size.numel():
                continue
            power = 1.0
            if self.name in ("linalg_vector_norm", "norm", "_cdist_forward", "renorm"):
                power = max([1.0, *(abs(s) / 4.0 for s in self.scalars if abs(s) != float("inf"))])
            if float(size.min()) ** power < low or float(size.max()) > high ** (1.0 / power):
                return False
        return True

    def _again(self, change: Any) -> Any:
        """The result for changed operands."""

        def changed(x: Any) -> Any:
            if isinstance(x, (list, tuple)):
                return type(x)(changed(v) for v in x)
            return change(x) if isinstance(x, torch.Tensor) and x.dtype == torch.float64 else x

        return self.func(*changed(list(self.args)), **{k: changed(v) for k, v in self.kwargs.items()})


@cache
def _mode() -> Any:
    from torch.utils._python_dispatch import TorchDispatchMode

    class Mode(TorchDispatchMode):
        def __init__(self, arithmetic: Arithmetic) -> None:
            super().__init__()
            self.arithmetic = arithmetic

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return self.arithmetic.call(self, func, args, kwargs or {})

    return Mode


def _name(func: Any) -> str:
    """``aten.add_.Tensor`` and ``prims.add.default`` -> ``add``."""
    name = func._schema.name.partition("::")[2]
    return name[:-1] if name.endswith("_") and not name.endswith("__") else str(name)


@cache
def _hands_on(func: Any, name: str) -> bool:
    """Whether the results are elements of the operands, or are made of nothing."""
    views = any(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns)
    return views or f"aten.{name}" in EXACT or name in _HANDED_ON


@cache
def _pointwise(name: str) -> bool:
    packet = getattr(torch.ops.aten, name, None)
    return packet is not None and any(torch.Tag.pointwise in getattr(packet, o).tags for o in packet.overloads())


@cache
def _parts(func: Any, name: str, pointwise: bool) -> Any:
    """torch's decomposition of an operator that is no primitive; of pointwise ones only where asked for."""
    from torch._decomp import decomposition_table

    if hasattr(torch.ops.prims, name) or (_pointwise(name) and not pointwise):
        return None
    return decomposition_table.get(func)


def _tensors(values: Any) -> list[Any]:
    found = []
    for value in values:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found += _tensors(value)
    return found
