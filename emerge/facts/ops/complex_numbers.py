"""Complex tensors: pairs of real ones. What is written with complex numbers (rotary embeddings) becomes real arithmetic."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from emerge.facts.families import FamilyNode
from emerge.facts.lower import Handler, Lowering, Tensor, Unsupported, find_handler, lowers, scalar_constant
from emerge.facts.ops.layout import select, stack_parts, view

#: Dtype of the parts.
PARTS = {"complex64": "float32", "complex128": "float64", "complex32": "float16"}
#: Operators that move elements, and work on both parts alike; dimensions count as in the complex tensor.
_MOVING = frozenset(
    "view reshape _unsafe_view unsqueeze squeeze transpose t permute expand clone detach alias contiguous slice select "
    "index_select index lift_fresh_copy view_copy flatten unflatten wait_tensor repeat neg".split()
)


@dataclass(frozen=True)
class Complex:
    """A lowered complex tensor."""

    real: Tensor
    imaginary: Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of both parts."""
        return self.real.shape


def holds_complex(values: Sequence[Any] | Mapping[str, Any]) -> bool:
    """Whether one of these arguments is a complex tensor."""
    found = values.values() if isinstance(values, Mapping) else values
    return any(isinstance(v, Complex) or (isinstance(v, list) and holds_complex(v)) for v in found)


def complex_handler(op: str) -> Handler:
    """The lowering of an operator with complex operands."""

    def handler(low: Lowering, node: FamilyNode, args: list[Any], kwargs: dict[str, Any]) -> Any:
        name = op.split(".")[1].rstrip("_") if op.count(".") else op
        plain = find_handler(op)
        if name in ("view_as_real", "view_as_real_copy"):
            z = args[0]
            return stack_parts(low, [z.real, z.imaginary], len(z.shape))
        if name in ("real", "imag"):
            return args[0].real if name == "real" else args[0].imaginary
        if name == "conj" and name != "clone":
            return Complex(args[0].real, _times(low, args[0].imaginary, -1))
        if name == "mul":
            return _product(low, args[0], args[1])
        if name in ("add", "sub") and plain is not None and all(isinstance(a, Complex) for a in args[:2]):
            return _parts(low, plain, node, args, kwargs)
        if name in _MOVING and plain is not None and isinstance(args[0], Complex) and not holds_complex(args[1:]):
            return _parts(low, plain, node, args, kwargs)
        raise Unsupported(f"{op} of complex numbers")

    return handler


def _parts(low: Lowering, plain: Handler, node: FamilyNode, args: list[Any], kwargs: dict[str, Any]) -> Complex:
    found = []
    for part in ("real", "imaginary"):
        own = [getattr(a, part) if isinstance(a, Complex) else a for a in args]
        found.append(plain(low, replace(node, dtype=own[0].dtype), own, kwargs))
    return Complex(*found)


def _times(low: Lowering, x: Tensor, y: Any) -> Tensor:
    from fractions import Fraction

    factor = scalar_constant(y)
    if isinstance(y, Tensor) and y.constant is None and x.constant == 1:
        return low.broadcast_to(y, _joint(x, y))
    if isinstance(factor, Fraction) and factor != 0:
        return low.scaled(x, factor)
    if not isinstance(y, Tensor):
        raise Unsupported("complex numbers times something else than a number or a tensor")
    return low.pointwise("mul", "mul", [x, y], x.dtype, commutative=True)


def _joint(x: Tensor, y: Tensor) -> list[int]:
    rank = max(len(x.shape), len(y.shape))
    left, right = ((1,) * (rank - len(t.shape)) + t.shape for t in (x, y))
    return [max(n, m) for n, m in zip(left, right)]


def _product(low: Lowering, x: Any, y: Any) -> Complex:
    """``(a + bi)(c + di) = (ac - bd) + (ad + bc)i``; a real factor multiplies both parts."""
    if not isinstance(x, Complex):
        x, y = y, x
    if not isinstance(y, Complex):
        if isinstance(y, complex):
            raise Unsupported("a complex constant")
        return Complex(_times(low, x.real, y), _times(low, x.imaginary, y))
    dtype = x.real.dtype
    real = low.pointwise("sub", "sub", [_times(low, x.real, y.real), _times(low, x.imaginary, y.imaginary)], dtype)
    crossed = [_times(low, x.real, y.imaginary), _times(low, x.imaginary, y.real)]
    return Complex(real, low.pointwise("add", "add", crossed, dtype, commutative=True))


@lowers("aten.polar")
def polar(low: Lowering, node: FamilyNode, args: list[Any], kwargs: dict[str, Any]) -> Complex:
    """``(abs, angle) -> abs cos(angle) + abs sin(angle) i``."""
    size, angle = args[0], args[1]
    parts = [low.pointwise(f, f, [angle], angle.dtype) for f in ("cos", "sin")]
    return Complex(*(_times(low, size, p) for p in parts))


@lowers("aten.complex")
def complex_op(low: Lowering, node: FamilyNode, args: list[Any], kwargs: dict[str, Any]) -> Complex:
    if args[0].shape != args[1].shape:
        raise Unsupported("parts of different shapes")
    return Complex(args[0], args[1])


@lowers("aten.view_as_complex", "aten.view_as_complex_copy")
def view_as_complex(low: Lowering, node: FamilyNode, args: list[Any], kwargs: dict[str, Any]) -> Complex:
    """The last dimension, of size 2, holds the parts."""
    x = args[0]
    d = len(x.shape) - 1
    parts = [view(low, select(low, x, d, i, 1), x.shape[:-1]) for i in (0, 1)]
    return Complex(*parts)
