"""dtype of the result of an operator: PyTorch's type promotion.

Source: https://pytorch.org/docs/stable/tensor_attributes.html#type-promotion-doc. Tensors with dimensions come before
0-dimensional tensors, and those before Python scalars: a later group decides only when its kind (boolean, integer,
floating, complex) is higher.
"""

from __future__ import annotations

from collections.abc import Iterable

from emerge.graph.model import DTYPES, TensorType

#: "some floating type": what depends on the default dtype of the captured program, which a graph does not record.
FLOATING = "floating"

_KIND = {"bool": 0, "int": 1, "float": 2, "complex": 3}
_SIGNED = ("int8", "int16", "int32", "int64")
_FLOATS = ("float16", "float32", "float64")


def kind(dtype: str | None) -> int | None:
    """0 boolean, 1 integer, 2 floating, 3 complex; None for fp8 and unknown types."""
    if dtype == FLOATING:
        return 2
    return _KIND.get(DTYPES[dtype][0]) if dtype in DTYPES else None


def promote(left: str | None, right: str | None) -> str | None:
    """dtype both can be converted to, None where it is not certain.

    >>> promote("float16", "bfloat16")
    'float32'
    """
    if left == right:
        return left
    low, high = kind(left), kind(right)
    if left is None or right is None or low is None or high is None:
        return None
    if low != high:
        higher, lower = (left, right) if low > high else (right, left)
        return "complex128" if kind(higher) == 3 and lower == "float64" else higher
    if low == 1:
        return _promote_integers(left, right)
    if FLOATING in (left, right):
        return None
    if low == 2:
        # float16 and bfloat16 have no common 16-bit type.
        order = [_FLOATS.index(d) if d in _FLOATS else 0 for d in (left, right)]
        return _FLOATS[max(order)] if max(order) else "float32"
    return "complex128"


def _promote_integers(left: str, right: str) -> str | None:
    if left in _SIGNED and right in _SIGNED:
        return _SIGNED[max(_SIGNED.index(left), _SIGNED.index(right))]
    if "uint8" in (left, right):
        other = right if left == "uint8" else left
        return {"int8": "int16"}.get(other, other if other in _SIGNED else None)
    return None


def scalar_type(value: object) -> str | None:
    """dtype a Python scalar takes part with."""
    if isinstance(value, bool):
        return "bool"
    if isinstance(value, int):
        return "int64"
    return FLOATING if isinstance(value, float) else None


def result_type(operands: Iterable[object]) -> str | None:
    """dtype of an elementwise operator over tensors and Python scalars; None where it is not certain.

    Operands that are neither (``None``) take no part; :data:`FLOATING` stands for the default floating dtype.
    """
    groups: list[str | None] = ["", "", ""]
    for operand in operands:
        if operand is None:
            continue
        if isinstance(operand, TensorType):
            index, dtype = (0 if operand.shape else 1), operand.dtype or None
        else:
            index, dtype = 2, getattr(operand, "dtype", None) or scalar_type(operand)
        groups[index] = dtype if groups[index] == "" else promote(groups[index], dtype)
    dimensioned, zero_dim, scalar = groups
    return _combine(dimensioned, _combine(zero_dim, scalar))


def _combine(first: str | None, second: str | None) -> str | None:
    if first == "":
        return second
    if second == "":
        return first
    high, low = kind(first), kind(second)
    if high is None or low is None:
        # fp8 and unknown types: certain only when there is nothing to choose.
        return first if first == second else None
    if high >= low:
        return first
    if low == 3 and high == 2:
        return {"float32": "complex64", "float64": "complex128"}.get(first or "")
    return promote(first, second)


def to_floating(dtype: str | None) -> str | None:
    """dtype of a function with real values (``exp``, true division) of integer or floating operands."""
    return FLOATING if kind(dtype) in (0, 1) else dtype


def to_integer_sum(dtype: str | None) -> str | None:
    """dtype of a sum or product: integers and booleans accumulate in int64."""
    return "int64" if kind(dtype) in (0, 1) else dtype


def to_real(dtype: str | None) -> str | None:
    """dtype of the absolute value, or of a real and an imaginary part."""
    return {"complex64": "float32", "complex128": "float64"}.get(dtype or "", dtype)


def to_complex(dtype: str | None) -> str | None:
    """dtype of a complex number with parts of this dtype."""
    return {"float32": "complex64", "float64": "complex128"}.get(dtype or "")


def fits(declared: str, computed: str | None) -> bool:
    """True when a declared dtype does not contradict a computed one."""
    if computed is None or declared == computed:
        return True
    return computed == FLOATING and DTYPES.get(declared, ("",))[0] == "float"
