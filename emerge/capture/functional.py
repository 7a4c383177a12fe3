"""In-place and ``out=`` operators as values: the operator without the write, then a new version of the memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from emerge.capture.base import CaptureError, Place
from emerge.capture.memory import TypeOnly
from emerge.graph.model import Arg, DType, Ref

if TYPE_CHECKING:
    from emerge.capture.recorder import Recorder


def record_mutation(rec: Recorder, func: Any, args: Any, kwargs: Any, place: Place) -> Any:
    """Runs a writing operator and records what it writes.

    Raises:
        CaptureError: its effect has no functional form.
    """
    schema = func._schema
    base = schema.name.split("::")[1]
    if func.namespace == "aten" and base in ("copy_", "fill_", "zero_"):
        return _overwrite(rec, base, func, args, kwargs, place)
    bound = bind(schema, args, kwargs)
    written = [a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    target = functional_form(func, written)
    if target is None:
        return _wrapped_kernel(rec, func, bound, written, args, kwargs, place)
    for parameter in schema.arguments:  # a default of the writing form may be required of the other one
        if parameter.name not in bound and not parameter.kwarg_only and parameter.has_default_value():
            bound[parameter.name] = parameter.default_value
    out_variant = [n for n in written if n not in {a.name for a in target._schema.arguments}]
    kept = {k: v for k, v in bound.items() if k not in out_variant}
    encoded = {k: rec.encode(v) for k, v in kept.items()}
    for name in written:  # their old value may be needed, and their memory must be known
        _ensure(rec, bound[name])
    spec = result_types(rec, target, kept)
    result = func(*args, **kwargs)
    positional, keywords = arrange(target._schema, encoded)
    seeded = torch.Tag.nondeterministic_seeded in func.tags
    collective = func.namespace == "_c10d_functional"
    if collective:
        rec.groups.note(positional)
    if isinstance(spec, TypeOnly):
        spec = [spec]
        names = [rec.add_node(str(target), positional, keywords, place, spec[0], taint=seeded or collective)]
    else:
        tuple_name = rec.add_tuple(str(target), positional, keywords, place, spec, seeded or collective)
        names = [rec.item(tuple_name, i, s, place) for i, s in enumerate(spec)]
    tensors = [t for n in written for t in (bound[n] if isinstance(bound[n], (list, tuple)) else [bound[n]])]
    if len(tensors) != len(names):
        raise CaptureError(
            f"{func} writes {len(tensors)} tensors and returns {len(names)}; it has no functional form here"
        )
    for tensor, name, s in zip(tensors, names, spec):
        if s.dtype != tensor.dtype:
            name = cast(rec, name, tensor, place)
        if tuple(s.shape) != tuple(tensor.shape):
            raise CaptureError(
                f"{func} resizes its output from {list(tensor.shape)} to {list(s.shape)}; allocate it in that shape"
            )
        rec.memory.write(tensor, name, place)
    if seeded and not rec.building:
        rec.state.nodes[-1].extra["rng"] = {"call": rec.state.random_calls}
        rec.state.random_calls += 1
    return result


def _ensure(rec: Recorder, value: Any) -> None:
    for tensor in value if isinstance(value, (list, tuple)) else [value]:
        rec.name_of(tensor)


def _overwrite(rec: Recorder, base: str, func: Any, args: Any, kwargs: Any, place: Place) -> Any:
    """``copy_``, ``fill_``, ``zero_``: the old value does not matter."""
    target = args[0]
    _ensure(rec, target)
    if base == "copy_":
        source = bind(func._schema, args, kwargs)["src"]
        name = rec.name_of(source)
        if source.dtype != target.dtype:
            name = cast(rec, name, source if source.dtype == target.dtype else _typed(source, target), place)
        if tuple(source.shape) != tuple(target.shape):
            name = rec.add_node("aten.expand.default", [Ref(name), list(target.shape)], {}, place, target)
    else:
        value = args[1] if base == "fill_" else 0
        if isinstance(value, torch.Tensor):
            name = rec.name_of(value)
            if value.dtype != target.dtype:
                name = cast(rec, name, _typed(value, target), place)
            if tuple(value.shape) != tuple(target.shape):
                name = rec.add_node("aten.expand.default", [Ref(name), list(target.shape)], {}, place, target)
        else:
            kw: dict[str, Arg] = {"dtype": DType(str(target.dtype).removeprefix("torch."))}
            name = rec.add_node("aten.full.default", [list(target.shape), rec.encode(value)], kw, place, target)
    result = func(*args, **kwargs)
    rec.memory.write(target, name, place)
    return result


def _typed(source: Any, target: Any) -> TypeOnly:
    return TypeOnly(target.dtype, tuple(source.shape))


def cast(rec: Recorder, name: str, like: Any, place: Place) -> str:
    """A ``_to_copy`` node to the dtype of ``like``."""
    kwargs: dict[str, Arg] = {"dtype": DType(str(like.dtype).removeprefix("torch."))}
    return rec.add_node("aten._to_copy.default", [Ref(name)], kwargs, place, like)


def bind(schema: Any, args: Any, kwargs: Any) -> dict[str, Any]:
    """Given arguments by parameter name."""
    names = [a.name for a in schema.arguments if not a.kwarg_only]
    return dict(zip(names, args)) | dict(kwargs)


def arrange(schema: Any, bound: dict[str, Arg]) -> tuple[list[Arg], dict[str, Arg]]:
    """Arguments by name as positional ones (as long as none is missing) and keywords."""
    positional: list[Arg] = []
    rest = dict(bound)
    for a in schema.arguments:
        if a.kwarg_only or a.name not in rest:
            break
        positional.append(rest.pop(a.name))
    return positional, rest


def functional_form(func: Any, written: list[str]) -> Any | None:
    """The operator that returns what ``func`` writes, None when torch has none."""
    namespace, base = func._schema.name.split("::")
    is_inplace = base.endswith("_") and not base.endswith("__")
    stems = [base[:-1]] if is_inplace else [base]
    stems += [f"{stems[0]}_functional"]
    library = getattr(torch.ops, namespace)
    wanted = [a.name for a in func._schema.arguments]
    without = [n for n in wanted if n not in written]
    for stem in stems:
        packet = getattr(library, stem, None)
        if packet is None:
            continue
        overloads = [getattr(packet, o) for o in packet.overloads()]
        overloads.sort(key=lambda o: o._overloadname != func._overloadname)
        for candidate in overloads:
            names = [a.name for a in candidate._schema.arguments]
            if candidate._schema.is_mutable or candidate is func:
                continue
            if names == (wanted if is_inplace else without):
                return candidate
    return None


def result_types(rec: Recorder, target: Any, bound: dict[str, Any]) -> TypeOnly | list[TypeOnly]:
    """Types of the results of a functional operator, found by running it on tensors without data."""

    def meta(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
        if isinstance(value, (list, tuple)):
            return [meta(v) for v in value]
        if isinstance(value, torch.device):
            return torch.device("meta")
        return value

    from torch._subclasses.fake_tensor import unset_fake_temporarily

    with rec.pause(), unset_fake_temporarily(), torch.no_grad():
        kept = {k: meta(v) for k, v in bound.items() if not isinstance(v, torch.Generator)}
        positional, keywords = arrange(target._schema, kept)
        out = target(*positional, **keywords)
    if isinstance(out, torch.Tensor):
        return TypeOnly(out.dtype, tuple(out.shape))
    return [TypeOnly(o.dtype, tuple(o.shape)) for o in out]


def _wrapped_kernel(
    rec: Recorder, func: Any, bound: dict[str, Any], written: list[str], args: Any, kwargs: Any, place: Place
) -> Any:
    """A custom kernel that writes its operands: ``auto_functionalized(kernel, ...) -> (returns..., written...)``."""
    if func.namespace == "aten":
        raise CaptureError(f"{func} writes into its operands and has no functional form; use another operator")
    encoded = {k: rec.encode(v) for k, v in bound.items()}
    for name in written:
        _ensure(rec, bound[name])
    result = func(*args, **kwargs)
    returns = list(result) if isinstance(result, (list, tuple)) else [result]
    flat = [bound[n] for n in written]
    if any(isinstance(t, (list, tuple)) for t in flat):
        raise CaptureError(f"{func} writes into a list of tensors, which has no functional form here")
    outputs = [*(r if isinstance(r, torch.Tensor) and not _is_written(r, flat) else None for r in returns), *flat]
    tuple_name = rec.add_tuple("auto_functionalized", [str(func)], encoded, place, outputs)
    for index, tensor in enumerate(outputs):
        if not isinstance(tensor, torch.Tensor):
            continue
        name = rec.item(tuple_name, index, tensor, place)
        if index >= len(returns):
            rec.memory.write(tensor, name, place)
        else:
            rec.memory.define(tensor, name, fresh=True)
    return result


def _is_written(tensor: Any, written: list[Any]) -> bool:
    return any(tensor is w for w in written)
