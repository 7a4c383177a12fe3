"""Losses as what they are made of: element by element, then a sum or a mean."""

from __future__ import annotations

from fractions import Fraction
from math import prod
from typing import Any

from emerge.facts.families import FamilyNode
from emerge.facts.lower import Lowering, Tensor, Unsupported, lowers, result_dtype
from emerge.facts.ops.reduction import reduce

_REDUCTIONS = {0: "none", 1: "mean", 2: "sum"}


@lowers("aten.mse_loss")
def mse_loss(low: Lowering, node: FamilyNode, args: list[Any], kwargs: dict[str, Any]) -> Tensor:
    """The square of the difference."""
    if not isinstance(args[0], Tensor) or not isinstance(args[1], Tensor):
        raise Unsupported("its operands are not tensors")
    dtype = result_dtype(node, args[0].dtype)
    difference = low.pointwise("sub", "sub", [args[0], args[1]], dtype)
    return _reduced(low, low.pointwise("square", "square", [difference], dtype), kwargs.get("reduction", _third(args)))


def _third(args: list[Any]) -> Any:
    return args[2] if len(args) > 2 else 1


def _reduced(low: Lowering, x: Tensor, how: Any) -> Tensor:
    """``x``, its sum or its mean over all elements."""
    name = _REDUCTIONS.get(how) if type(how) is int else None
    if name is None:
        raise Unsupported(f"reduction {how!r}")
    if name == "none":
        return x
    total = reduce(low, x, list(range(len(x.shape))), False, "sum", "sum", "sum", x.dtype)
    return total if name == "sum" else low.scaled(total, Fraction(1, prod(x.shape)))
