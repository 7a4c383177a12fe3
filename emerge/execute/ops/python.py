"""Python-level nodes: scalars, tuple elements, constants, assertions and profiler marks."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

from emerge.execute._torch import torch
from emerge.execute.ops.base import Call, op

_SCALAR_OPERATORS: dict[str, Callable[..., Any]] = {
    **{n: getattr(operator, n) for n in ("add", "sub", "mul", "truediv", "floordiv", "mod", "neg", "pow")},
    **{n: getattr(operator, n) for n in ("eq", "ne", "lt", "le", "gt", "ge", "and_", "or_", "xor", "not_", "abs")},
    "getitem": operator.getitem,
}


def _scalar(name: str) -> None:
    function = _SCALAR_OPERATORS[name]

    @op(f"operator.{name}")
    def run(call: Call) -> Any:
        return function(*call.args)


for _name in _SCALAR_OPERATORS:
    _scalar(_name)


def decode_constant(value: Any) -> Any:
    """A stored constant as Python numbers; ``{"float": "-inf"}`` becomes a float."""
    if isinstance(value, dict) and set(value) == {"float"}:
        return float(value["float"])
    if isinstance(value, (list, tuple)):
        return [decode_constant(v) for v in value]
    return value


def constant_tensor(value: Any, dtype: str, shape: tuple[Any, ...] | None, device: Any) -> Any:
    """A stored constant as a tensor of its recorded type.

    Args:
        value: number or nested lists; a flat list or one number is brought to ``shape``.
    """
    wide = torch.float64 if dtype.startswith(("float", "bfloat")) else None
    tensor = torch.tensor(decode_constant(value), dtype=wide).to(getattr(torch, dtype))
    if shape is not None and all(isinstance(s, int) for s in shape):
        tensor = tensor.expand(shape) if tensor.numel() == 1 and tensor.dim() <= len(shape) else tensor.reshape(shape)
    return tensor.contiguous().to(device)


@op("get_attr")
def get_attr(call: Call) -> Any:
    """A constant stored in the graph file, in its recorded type."""
    node = call.node
    if not node.has_const and node.const is None:
        raise call.error(f"the value of constant '{node.args[0] if node.args else node.name}' is not in the graph file")
    if node.dtype is None:
        raise call.error("a constant without a dtype")
    value = constant_tensor(node.const, node.dtype, node.shape, call.device)
    perturbation = call.options.perturbation
    return perturbation.tensor(value, node.dtype, node.name) if perturbation is not None else value


@op("aten._assert_scalar", "aten._assert_async", "aten._assert_tensor_metadata", "aten._functional_assert_scalar")
def assertion(call: Call) -> Any:
    """A runtime assertion of the captured program; one that fails stops the run."""
    if "_assert_tensor_metadata" in call.node.op:
        return None
    if not bool(call.args[0]):
        message = next((a for a in call.args[1:] if isinstance(a, str)), "")
        raise call.error(f"the program's own assertion fails: {message}")
    return None


@op(
    "profiler._record_function_enter_new",
    "profiler._record_function_enter",
    "profiler._record_function_exit",
    "aten.sym_constrain_range_for_size",
    "aten.sym_constrain_range",
)
def no_effect(call: Call) -> Any:
    """Profiler marks and range hints: nothing happens."""
    return None


@op("aten._local_scalar_dense", "aten.item")
def item(call: Call) -> Any:
    """The value of a one-element tensor as a Python number."""
    return call.args[0].item()
