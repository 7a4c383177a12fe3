"""Nodes that are not tensors: getitem, Python arithmetic on sizes, assertions, profiler marks; and list operators."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

from emerge.facts.shape_rules.algebra import numel, show
from emerge.facts.shape_rules.core import (
    NOTHING,
    UNKNOWN,
    Call,
    Result,
    Rule,
    Rules,
    ScalarResult,
    Spec,
    Symbol,
    TupleValue,
    Undecided,
    like,
    like_operand,
)
from emerge.graph.model import TensorType
from emerge.util.errors import GraphError


def _getitem(call: Call) -> Result:
    source, index = call.get(0, "a"), call.get(1, "b")
    if isinstance(source, list) and isinstance(index, int):
        source = TupleValue({i: v for i, v in enumerate(source) if isinstance(v, TensorType)}, len(source))
    if not isinstance(source, TupleValue) or not isinstance(index, int):
        raise Undecided
    if source.length is not None:
        if not -source.length <= index < source.length:
            raise GraphError(f"index {index} is out of range for {source.length} outputs")
        index %= source.length
    elif index < 0:
        raise Undecided
    element = source.elements.get(index)
    if element is None:
        raise Undecided
    return like(element)


#: Python operators on scalars of the graph -> dtype of an unknown result (None: that of the operands).
ARITHMETIC: dict[str, tuple[Callable[..., Any], str | None]] = {
    "add": (operator.add, None),
    "sub": (operator.sub, None),
    "mul": (operator.mul, None),
    "floordiv": (operator.floordiv, None),
    "mod": (operator.mod, None),
    "neg": (operator.neg, None),
    "truediv": (operator.truediv, "floating"),
    "eq": (operator.eq, "bool"),
    "ne": (operator.ne, "bool"),
    "lt": (operator.lt, "bool"),
    "le": (operator.le, "bool"),
    "gt": (operator.gt, "bool"),
    "ge": (operator.ge, "bool"),
    "and_": (operator.and_, None),
    "or_": (operator.or_, None),
}


def _arithmetic(function: Callable[..., Any], dtype: str | None) -> Rule:
    def rule(call: Call) -> Result:
        values = [call.get(i, "") for i in range(len(call.args))]
        if any(not isinstance(v, (int, float, Symbol)) for v in values):
            raise Undecided
        if not any(isinstance(v, Symbol) for v in values):
            try:
                return ScalarResult(function(*values))
            except (ArithmeticError, TypeError):
                return ScalarResult(Symbol())
        kinds = {v.dtype if isinstance(v, Symbol) else None for v in values if not isinstance(v, bool)}
        if dtype is None and kinds <= {"int64", None} and all(isinstance(v, (int, Symbol)) for v in values):
            unknown = [v for v in values if isinstance(v, Symbol)]
            return ScalarResult(Symbol("int64" if all(v.dtype == "int64" for v in unknown) else None))
        return ScalarResult(Symbol(dtype))

    return rule


def _unknown_scalar(call: Call) -> Result:
    return ScalarResult(Symbol())


def _sym_size(call: Call) -> Result:
    operand = call.tensor(0, "self")
    if call.overload == "default":
        raise Undecided  # all sizes as a list
    size = operand.shape[call.dim(1, "dim", len(operand.shape))] if operand.shape else None
    if size is None:
        raise GraphError("a 0-dimensional tensor has no sizes")
    return ScalarResult(size if isinstance(size, int) else Symbol("int64"))


def _sym_numel(call: Call) -> Result:
    count = numel(call.tensor(0, "self").shape)
    return ScalarResult(Symbol("int64") if count is None else count)


def _item(call: Call) -> Result:
    operand = call.tensor(0, "self")
    count = numel(operand.shape)
    if count not in (None, 1):
        raise GraphError(f"the value of a tensor with {count} elements as one scalar, expected 1 element")
    return ScalarResult(Symbol({"float32": "floating", "float64": "floating"}.get(operand.dtype, operand.dtype)))


def _nothing(call: Call) -> Result:
    return NOTHING


def _assert_metadata(call: Call) -> Result:
    operand, size, dtype = call.tensor(0, "a"), call.get(1, "size"), call.dtype(None, 3)
    if isinstance(size, list):
        wanted = call.size(1, "size")
        if len(wanted) != len(operand.shape) or any(
            isinstance(a, int) and isinstance(b, int) and a != b for a, b in zip(wanted, operand.shape)
        ):
            raise GraphError(f"the graph asserts shape {show(wanted)}, but declares {show(operand.shape)}")
    if dtype is not None and dtype != operand.dtype:
        raise GraphError(f"the graph asserts dtype {dtype}, but declares {operand.dtype}")
    return NOTHING


def _split_copy_out(call: Call) -> Result:
    """split_with_sizes_copy with out=: the pieces are written into given buffers."""
    return NOTHING


# --- operators on lists of tensors ---------------------------------------------------------------------------------


def foreach(base: Rule, in_place: bool, operand_names: tuple[str, ...] = ()) -> Rule:
    """Rule of ``_foreach_X`` from the rule of ``X``: element i of every list argument; other arguments are shared."""

    def rule(call: Call) -> Result:
        count = len(call.tensors(0, "self"))
        for value in (*call.args, *call.kwargs.values()):
            if isinstance(value, list) and len(value) != count:
                raise GraphError(f"lists of {count} and {len(value)} operands")
        results: list[Spec | None] = []
        for i in range(count):
            args = [_element(a, i) for a in call.args]
            kwargs = {k: _element(v, i) for k, v in call.kwargs.items()}
            one = base(Call(call.op, call.overload, args, kwargs, call.groups, call.rank))
            if not isinstance(one, Spec):
                raise Undecided
            results.append(one)
        return NOTHING if in_place else results

    return rule


def _element(value: Any, index: int) -> Any:
    if isinstance(value, TupleValue):
        return value.elements.get(index, UNKNOWN)
    return value[index] if isinstance(value, list) else value


RULES: Rules = {
    "operator.getitem": _getitem,
    **{f"operator.{n}": _arithmetic(f, dtype) for n, (f, dtype) in ARITHMETIC.items()},
    "operator.pow": _unknown_scalar,
    "aten.sym_size": _sym_size,
    "aten.sym_numel": _sym_numel,
    "aten._local_scalar_dense": _item,
    "aten.item": _item,
    "aten._assert_tensor_metadata": _assert_metadata,
    "aten._assert_async": _nothing,
    "aten._assert_scalar": _nothing,
    "aten._functional_assert_async": like_operand((2, "dep_token")),
    "aten.sym_constrain_range": _nothing,
    "aten.sym_constrain_range_for_size": _nothing,
    "profiler._record_function_enter_new": _nothing,
    "profiler._record_function_exit": _nothing,
    "fsdp.split_with_sizes_copy": _split_copy_out,
}
