"""Definitions of kernels over torch tensors: what an operator that torch does not have computes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from emerge.execute._torch import torch
from emerge.execute.aliasing import resolve
from emerge.execute.ops.base import OPS, Call, lookup
from emerge.graph.model import DType
from emerge.kernels.interpret import NotApplicable, evaluate
from emerge.kernels.syntax import Definition


class TorchTensors:
    """Backend over torch tensors. Floating types are float64 unless ``types`` gives others."""

    def __init__(self, device: Any = None, types: Any = None) -> None:
        self.device, self.types = device, types

    def is_tensor(self, value: Any) -> bool:
        return isinstance(value, torch.Tensor)

    def shape(self, value: Any) -> list[int]:
        return [int(n) for n in value.shape]

    def dtype(self, value: Any) -> str:
        return str(value.dtype).removeprefix("torch.")

    def call(self, op: str, args: list[Any], kwargs: dict[str, Any]) -> Any:
        """The result of torch's own operator.

        Raises:
            NotApplicable: it fails on these operands.
        """
        operator = resolve(op)
        if operator is None:
            raise NotApplicable(f"this torch has no {op}")
        named = {k: self._type(v) if isinstance(v, DType) else v for k, v in kwargs.items()}
        if op.startswith("aten.arange") and self.device is not None:
            named["device"] = self.device
        try:
            result = operator(*args, **named)
        except (RuntimeError, IndexError) as exc:
            raise NotApplicable(f"{op}: {str(exc).splitlines()[0]}") from None
        return list(result) if isinstance(result, (list, tuple)) else result

    def _type(self, dtype: DType) -> Any:
        if self.types is not None:
            return self.types(dtype.name)
        found = getattr(torch, dtype.name)
        return torch.float64 if found.is_floating_point else found


def composite(definitions: Sequence[Definition], call: Call) -> list[Any]:
    """Results of the first definition that applies.

    Raises:
        ExecutionError: none does.
    """
    def types(name: str) -> Any:
        return call.options.precision.torch_dtype(name, call.captured)

    why = ""
    kwargs = {k: v for k, v in call.kwargs.items() if k not in ("device", "layout", "pin_memory", "memory_format")}
    for definition in definitions:
        try:
            result = evaluate(definition, TorchTensors(call.device, types), call.args, kwargs)
        except NotApplicable as exc:
            why = str(exc)
            continue
        return list(result) if isinstance(result, list) else [result]
    raise call.error(f"its definition does not apply: {why}")


def register(known: Mapping[str, Sequence[Definition]]) -> set[str]:
    """Makes defined operators executable that nothing else executes; returns their names.

    A kernel that writes its operands is executed in its functional form (``auto_functionalized``).
    """
    names = set()
    for op, definitions in known.items():
        if not definitions or (lookup(op) is not None and op not in _REGISTERED):
            continue

        def run(call: Call, definitions: Sequence[Definition] = definitions) -> Any:
            results = composite(definitions, call)
            return tuple(results) if len(results) > 1 or call.node.is_tuple else results[0]

        OPS[op] = run
        _REGISTERED.add(op)
        names.add(op)
    return names


_REGISTERED: set[str] = set()
