"""Functions of the language and the operators they stand for.

Every function maps its arguments to one operator call in the spelling that captured graphs use, so that lowering and
execution of a definition go through what graphs go through.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from emerge.graph.model import DType

#: An operator call: qualified name, positional arguments, keywords.
OperatorCall = tuple[str, list[Any], dict[str, Any]]

_UNARY = (
    "exp log log1p expm1 sqrt rsqrt tanh sigmoid silu relu erf abs neg reciprocal sin cos square sign floor logical_not "
    "zeros_like ones_like"
).split()
_BINARY = "maximum minimum matmul".split()


def _one(op: str, *names: str) -> Callable[..., OperatorCall]:
    """``f(x, a, b)`` -> ``op(x, a, b)``; ``names`` are the attributes in order, which may be given by keyword."""

    def make(*args: Any, **kwargs: Any) -> OperatorCall:
        values = list(args)
        for name in names[len(args) - 1 :]:
            if name not in kwargs:
                break
            values.append(kwargs.pop(name))
        if kwargs or len(values) > len(names) + 1 or not values:
            raise TypeError(f"takes a tensor and {', '.join(names) or 'nothing else'}")
        return op, values, {}

    return make


def _keyword(op: str, name: str, default: Any) -> Callable[..., OperatorCall]:
    def make(x: Any, value: Any = default, **kwargs: Any) -> OperatorCall:
        value = kwargs.pop(name, value)
        if kwargs:
            raise TypeError(f"takes a tensor and {name}")
        return op, [x], {name: value}

    return make


def _reduction(op: str) -> Callable[..., OperatorCall]:
    def make(x: Any, dims: Any = None, keepdim: bool = False) -> OperatorCall:
        return op, [x, [dims] if isinstance(dims, int) else list(dims or []), keepdim], {}

    return make


def _number(value: Any) -> bool:
    return isinstance(value, (int, float))


def _where(condition: Any, a: Any, b: Any) -> OperatorCall:
    name = {(False, False): "self", (False, True): "ScalarOther", (True, False): "ScalarSelf", (True, True): "Scalar"}
    return f"aten.where.{name[_number(a), _number(b)]}", [condition, a, b], {}


def _cat(tensors: Any, dim: int = 0) -> OperatorCall:
    return "aten.cat.default", [list(tensors), dim], {}


def _einsum(spec: str, *tensors: Any) -> OperatorCall:
    return "aten.einsum.default", [spec, list(tensors)], {}


def _to(x: Any, dtype: str) -> OperatorCall:
    return "aten._to_copy.default", [x], {"dtype": DType(dtype)}


def _arange(start: int, end: int | None = None) -> OperatorCall:
    return ("aten.arange.default", [start], {}) if end is None else ("aten.arange.start", [start, end], {})


def _softmax(x: Any, dim: int) -> OperatorCall:
    return "aten._softmax.default", [x, dim, False], {}


def _log_softmax(x: Any, dim: int) -> OperatorCall:
    return "aten._log_softmax.default", [x, dim, False], {}


def _clamp(x: Any, min: Any = None, max: Any = None) -> OperatorCall:
    return "aten.clamp.default", [x, min, max], {}


FUNCTIONS: dict[str, Callable[..., OperatorCall]] = {
    **{name: _one(f"aten.{name}.default") for name in _UNARY},
    **{name: _one(f"aten.{name}.default", "other") for name in _BINARY},
    "gelu": _keyword("aten.gelu.default", "approximate", "none"),
    "clamp": _clamp,
    "sum": _reduction("aten.sum.dim_IntList"),
    "mean": _reduction("aten.mean.dim"),
    "amax": _reduction("aten.amax.default"),
    "amin": _reduction("aten.amin.default"),
    "softmax": _softmax,
    "log_softmax": _log_softmax,
    "cumsum": _one("aten.cumsum.default", "dim"),
    "where": _where,
    "masked_fill": _one("aten.masked_fill.Scalar", "mask", "value"),
    "view": _one("aten.reshape.default", "shape"),
    "reshape": _one("aten.reshape.default", "shape"),
    "permute": _one("aten.permute.default", "dims"),
    "transpose": _one("aten.transpose.int", "a", "b"),
    "unsqueeze": _one("aten.unsqueeze.default", "dim"),
    "squeeze": _one("aten.squeeze.dim", "dim"),
    "expand": _one("aten.expand.default", "shape"),
    "cat": _cat,
    "stack": lambda tensors, dim=0: ("aten.stack.default", [list(tensors), dim], {}),
    "split": _one("aten.split_with_sizes.default", "sizes", "dim"),
    "chunk": _one("aten.chunk.default", "chunks", "dim"),
    "einsum": _einsum,
    "linear": _one("aten.linear.default", "weight", "bias"),
    "embedding": _one("aten.embedding.default", "index"),
    "index_select": _one("aten.index_select.default", "dim", "index"),
    "gather": _one("aten.gather.default", "dim", "index"),
    "one_hot": _one("aten.one_hot.default", "classes"),
    "full_like": _one("aten.full_like.default", "value"),
    "repeat_interleave": _one("aten.repeat_interleave.self_int", "repeats", "dim"),
    "tril": _one("aten.tril.default", "diagonal"),
    "triu": _one("aten.triu.default", "diagonal"),
    "arange": _arange,
    "to": _to,
    "slice": _one("aten.slice.Tensor", "dim", "start", "end"),
    "select": _one("aten.select.int", "dim", "index"),
}

#: Arithmetic, comparison and logic on tensors: Python's operator -> ATen name.
BINARY = {"+": "add", "-": "sub", "*": "mul", "/": "div", "**": "pow", "@": "matmul", "&": "bitwise_and", "|": "bitwise_or"}
COMPARE = {"<": "lt", "<=": "le", ">": "gt", ">=": "ge", "==": "eq", "!=": "ne"}
_MIRROR = {"<": ">", "<=": ">=", ">": "<", ">=": "<=", "==": "==", "!=": "!="}


def binary(symbol: str, x: Any, y: Any, is_tensor: Callable[[Any], bool]) -> list[OperatorCall]:
    """Calls for ``x symbol y`` where one of them is a tensor; the first operand of a later call is the result before.

    Raises:
        TypeError: the operator is not one of tensors.
    """
    if symbol in COMPARE:
        if not is_tensor(x):
            x, y, symbol = y, x, _MIRROR[symbol]
        return [(f"aten.{COMPARE[symbol]}.{'Tensor' if is_tensor(y) else 'Scalar'}", [x, y], {})]
    name = BINARY.get(symbol)
    if name is None:
        raise TypeError(f"tensors have no operator {symbol}")
    if name == "matmul":
        return [("aten.matmul.default", [x, y], {})]
    if name == "pow":
        kind = "Tensor_Tensor" if is_tensor(x) and is_tensor(y) else "Tensor_Scalar" if is_tensor(x) else "Scalar"
        return [(f"aten.pow.{kind}", [x, y], {})]
    if is_tensor(x):
        return [(f"aten.{name}.Tensor", [x, y], {})]
    if name == "sub":
        return [("aten.rsub.Scalar", [y, x], {})]
    if name == "div":
        return [("aten.reciprocal.default", [y], {}), ("aten.mul.Tensor", [None, x], {})]
    return [(f"aten.{name}.Tensor", [y, x], {})]
