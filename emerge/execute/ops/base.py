"""One operator call and the registry of operator implementations."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

from emerge.execute._torch import torch
from emerge.execute.aliasing import resolve, split_op
from emerge.execute.options import Options
from emerge.graph.model import Node, Ref, TensorType
from emerge.util.errors import ExecutionError


@dataclass(slots=True)
class Call:
    """One operator call with decoded arguments.

    Attributes:
        args, kwargs: references replaced by values, dtypes by torch dtypes.
        captured: the node runs in its recorded types.
        types: declared types of inputs and nodes of the graph.
        rank: position of the graph in the run.
        place: ``graph: node 'name'``, for messages.
    """

    node: Node
    args: list[Any]
    kwargs: dict[str, Any]
    options: Options
    device: Any
    captured: bool
    types: dict[str, TensorType]
    rank: int
    place: str

    def error(self, message: str) -> ExecutionError:
        """An error that names this node and its operator."""
        return ExecutionError(f"{message} (operator {self.node.op})", place=self.place, node=self.node.name)

    def declared(self, position: int) -> str | None:
        """Recorded dtype of the operand at ``position``, None when it is not one tensor of known type."""
        arg = self.node.args[position] if position < len(self.node.args) else None
        known = self.types.get(arg.name) if isinstance(arg, Ref) else None
        return known.dtype if known is not None else None

    def bind(self, *names: str, **defaults: Any) -> dict[str, Any]:
        """Arguments by parameter name; parameters not given take ``defaults`` (None).

        Raises:
            ExecutionError: more arguments than names, or an unknown keyword.
        """
        known = (*names, *(d for d in defaults if d not in names))
        unknown = [k for k in self.kwargs if k not in known]
        if len(self.args) > len(names) or unknown:
            raise self.error(f"expected arguments {known}, got {len(self.args)} positional ones and keywords {unknown}")
        return {**dict.fromkeys(names), **defaults, **dict(zip(names, self.args)), **self.kwargs}

    def bind_schema(self) -> dict[str, Any]:
        """Arguments of an ATen operator by parameter name, defaults from torch's schema."""
        operator = resolve(self.node.op)
        if operator is None:
            raise self.error("this torch has no such operator")
        bound: dict[str, Any] = {}
        for position, parameter in enumerate(operator._schema.arguments):
            if parameter.name in self.kwargs:
                bound[parameter.name] = self.kwargs[parameter.name]
            elif position < len(self.args) and not parameter.kwarg_only:
                bound[parameter.name] = self.args[position]
            else:
                bound[parameter.name] = parameter.default_value if parameter.has_default_value() else None
        return bound


OpFunction: TypeAlias = "Callable[[Call], Any]"

#: Operator name (with or without overload) -> implementation. ATen operators that are not listed run as torch has them.
OPS: dict[str, OpFunction] = {}


def op(*names: str) -> Callable[[OpFunction], OpFunction]:
    """Register an implementation under operator names, ``aten.view`` (all overloads) or ``aten.view.dtype`` (one)."""

    def register(function: OpFunction) -> OpFunction:
        for name in names:
            OPS[name] = function
        return function

    return register


def lookup(name: str) -> OpFunction | None:
    """Implementation of an operator: the overload's own, else the operator's, else the generic ATen one."""
    namespace, operator, overload = split_op(name)
    for key in (f"{namespace}.{operator}.{overload}", f"{namespace}.{operator}" if operator else namespace):
        if key in OPS:
            return OPS[key]
    return run_torch if resolve(name) is not None else None


def run_torch(call: Call) -> Any:
    """Call the torch operator itself; operands it writes to are copied first.

    Raises:
        ExecutionError: the operator draws random numbers (its stream is not part of the graph model).
    """
    operator = resolve(call.node.op)
    if operator is None:
        raise call.error("this torch has no such operator")
    if any(str(tag).endswith("nondeterministic_seeded") for tag in operator.tags):
        raise call.error("draws random numbers, and no stream is given for it")
    args, kwargs = list(call.args), {k: v for k, v in call.kwargs.items() if k not in ("pin_memory", "memory_format")}
    for position, parameter in enumerate(operator._schema.arguments):
        if parameter.alias_info is not None and parameter.alias_info.is_write:
            if parameter.name in kwargs:
                kwargs[parameter.name] = _clone(kwargs[parameter.name])
            elif position < len(args):
                args[position] = _clone(args[position])
    names = [p.name for p in operator._schema.arguments]
    open_device = "device" in names and "device" not in kwargs and names.index("device") >= len(args)
    if open_device and not any(isinstance(a, torch.Tensor) for a in args):
        kwargs["device"] = call.device
    call.args, call.kwargs = args, kwargs
    return operator(*args, **kwargs)


def _clone(value: Any) -> Any:
    if isinstance(value, list):
        return [_clone(v) for v in value]
    return value.clone() if isinstance(value, torch.Tensor) else value
