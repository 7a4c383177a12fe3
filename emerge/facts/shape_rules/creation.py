"""Creation operators and dtype casts: the shape is an argument, or that of an operand."""

from __future__ import annotations

from math import ceil, isfinite

from emerge.facts.shape_rules.algebra import Size, checked_size
from emerge.facts.shape_rules.core import Call, Result, Rule, Rules, Spec, Symbol, Undecided, table
from emerge.facts.shape_rules.promotion import FLOATING, scalar_type
from emerge.graph.model import DType, TensorType, is_integer
from emerge.util.errors import GraphError


def _sized(default_dtype: str | None, position: int = 0) -> Rule:
    """size at this position; ``dtype=`` or the default."""

    def rule(call: Call) -> Result:
        return Spec(call.dtype(default_dtype), checked_size(call.size(position, "size")))

    return rule


def _empty_permuted(call: Call) -> Result:
    """(size, physical layout): the layout is a permutation, the result has the size."""
    size, layout = checked_size(call.size(0, "size")), call.integers(1, "physical_layout") or []
    if len(layout) != len(size) or sorted(layout) != list(range(len(size))):
        raise GraphError(f"physical layout {layout} is not a permutation of {len(size)} dimensions")
    return Spec(call.dtype(FLOATING), size)


def _full(call: Call) -> Result:
    value = call.get(1, "fill_value")
    default = value.dtype if isinstance(value, (Symbol, TensorType)) else scalar_type(value)
    return Spec(call.dtype(default), checked_size(call.size(0, "size")))


def _like(call: Call) -> Result:
    operand = call.tensor(0, "self")
    return Spec(call.dtype(operand.dtype), operand.shape)


def _new_sized(call: Call) -> Result:
    operand = call.tensor(0, "self")
    return Spec(call.dtype(operand.dtype), checked_size(call.size(1, "size")))


def _randint(call: Call) -> Result:
    """(high, size) or (low, high, size); int64 unless ``dtype=`` says otherwise."""
    second = call.get(1, "size")
    return Spec(call.dtype("int64"), checked_size(call.size(1 if isinstance(second, list) else 2, "size")))


def _scalar_tensor(call: Call) -> Result:
    return Spec(call.dtype(FLOATING), ())


def _arange_length(start: object, end: object, step: object) -> Size:
    if not (isinstance(start, (int, float)) and isinstance(end, (int, float)) and isinstance(step, (int, float))):
        return "?"
    if step == 0 or not all(isfinite(v) for v in (start, end, step)):
        raise GraphError(f"arange({start}, {end}, {step}): step 0 or a bound that is not finite")
    if (end - start) * step < 0:
        raise GraphError(f"arange({start}, {end}, {step}): the step leads away from the end")
    if isinstance(start, int) and isinstance(end, int) and isinstance(step, int):
        return -((start - end) // step)
    return ceil((end - start) / step)


def _arange(call: Call) -> Result:
    """(end), (start, end) or (start, end, step)."""
    named = "end" in call.kwargs
    if len(call.args) <= 1 and not (named and call.args) and "start" not in call.kwargs:
        start, end, step = 0, call.get(0, "end"), 1
    else:
        start, end, step = call.get(0, "start", 0), call.get(1, "end"), call.get(2, "step", 1)
    kinds = {v.dtype if isinstance(v, Symbol) else scalar_type(v) for v in (start, end, step)}
    dtype = "int64" if kinds <= {"int64", "bool"} else (FLOATING if FLOATING in kinds else None)
    asked = call.dtype(None)
    if is_integer(asked):
        # The bounds are converted first: arange(5.5, dtype=int64) has 5 elements.
        start, end, step = (int(v) if isinstance(v, float) and isfinite(v) else v for v in (start, end, step))
    return Spec(asked or dtype, (_arange_length(start, end, step),))


def _linspace(call: Call) -> Result:
    return Spec(call.dtype(FLOATING), checked_size((call.integer(2, "steps"),)))


def _eye(call: Call) -> Result:
    rows = call.integer(0, "n")
    columns = call.get(1, "m", rows)
    return Spec(call.dtype(FLOATING), checked_size((rows, columns if isinstance(columns, int) else "?")))


def _randperm(call: Call) -> Result:
    return Spec(call.dtype("int64"), checked_size((call.integer(0, "n"),)))


def _cast(call: Call) -> Result:
    """to.*, _to_copy, type_as: the dtype is the first dtype argument, or that of ``other``."""
    operand = call.tensor(0, "self")
    dtype = operand.dtype
    for value in (*call.args[1:], *call.kwargs.values()):
        if isinstance(value, (DType, TensorType)):
            dtype = value.name if isinstance(value, DType) else value.dtype
            break
    if call.overload.startswith("prim_"):
        raise Undecided
    return Spec(dtype, operand.shape)


RULES: Rules = {
    **table("empty zeros ones rand randn empty_strided", _sized(FLOATING)),
    **table("empty_permuted", _empty_permuted),
    **table("full", _full),
    **table("empty_like zeros_like ones_like full_like rand_like randn_like randint_like", _like),
    **table("new_empty new_zeros new_ones new_full new_empty_strided", _new_sized),
    **table("randint", _randint),
    **table("scalar_tensor", _scalar_tensor),
    **table("arange", _arange),
    **table("linspace logspace", _linspace),
    **table("eye", _eye),
    **table("randperm", _randperm),
    **table("to _to_copy type_as", _cast),
}
