"""Operators that only rename or move elements, where torch's own version depends on strides or recorded types."""

from __future__ import annotations

from typing import Any

from emerge.execute._torch import torch
from emerge.execute.ops.base import Call, op, run_torch
from emerge.graph.model import is_integer


@op("aten.view", "aten._unsafe_view", "aten.view_copy", "aten.reshape", "aten._reshape_alias")
def view(call: Call) -> Any:
    """``view`` as ``reshape``: strides are not part of a value, and the captured program has proved them fit."""
    return call.args[0].reshape(call.args[1])


@op("aten.view_as", "aten.reshape_as")
def view_as(call: Call) -> Any:
    """``view_as`` as ``reshape``."""
    return call.args[0].reshape(call.args[1].shape)


@op("aten.view.dtype", "aten.view_copy.dtype")
def view_dtype(call: Call) -> Any:
    """Reinterpretation of bits: defined here between integers, or where recorded types are executed."""
    source, target = call.declared(0), call.node.dtype
    if source == target:
        return call.args[0]
    exact = is_integer(source) and is_integer(target)
    if not (exact or call.captured or call.options.precision.captured):
        raise call.error(f"reinterprets the bits of {source} as {target}, which has no meaning in float64")
    return call.args[0].contiguous().view(call.args[1])


@op("aten.view_as_complex", "aten.view_as_complex_copy")
def view_as_complex(call: Call) -> Any:
    """Pairs of the last axis as complex numbers."""
    return torch.view_as_complex(call.args[0].contiguous())


@op("aten.as_strided", "aten.as_strided_copy")
def as_strided(call: Call) -> Any:
    """``as_strided`` of a tensor that fills its memory densely; anything else depends on captured strides."""
    value = call.args[0]
    dense = value.is_contiguous() and value.storage_offset() == 0
    if not dense or value.untyped_storage().nbytes() != value.numel() * value.element_size():
        raise call.error("reads the memory of a strided view, whose layout is not part of the graph")
    return run_torch(call)


@op("aten.sym_size")
def sym_size(call: Call) -> Any:
    """Size along a dimension as a Python integer (all sizes without one)."""
    return int(call.args[0].shape[call.args[1]]) if len(call.args) > 1 else list(call.args[0].shape)


@op("aten.sym_numel", "aten.numel")
def sym_numel(call: Call) -> Any:
    """Number of elements as a Python integer."""
    return int(call.args[0].numel())


@op("aten.contiguous", "aten.clone")
def clone(call: Call) -> Any:
    """The same value in fresh contiguous memory; the memory format is not part of a value."""
    return call.args[0].clone(memory_format=torch.contiguous_format)
