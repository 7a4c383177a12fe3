"""HLO instructions. Source: the XLA operation semantics reference (openxla.org/xla/operation_semantics)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from emerge.execute._torch import torch
from emerge.execute.ops.base import Call, op
from emerge.execute.ops.python import constant_tensor


def _shape(call: Call) -> tuple[int, ...]:
    shape = call.node.shape
    if shape is None or not all(isinstance(s, int) for s in shape):
        raise call.error("an HLO instruction needs its result shape")
    return tuple(int(s) for s in shape)


def _dtype(call: Call) -> Any:
    if call.node.dtype is None:
        raise call.error("an HLO instruction needs its result dtype")
    return call.options.precision.torch_dtype(call.node.dtype, call.captured)


def _divide(a: Any, b: Any) -> Any:
    return a / b if a.is_floating_point() or a.is_complex() else torch.div(a, b, rounding_mode="trunc")


def _remainder(a: Any, b: Any) -> Any:
    return torch.fmod(a, b)


_ELEMENTWISE: dict[str, Callable[..., Any]] = {
    "add": lambda a, b: a + b if a.dtype != torch.bool else a | b,
    "subtract": lambda a, b: a - b,
    "multiply": lambda a, b: a * b if a.dtype != torch.bool else a & b,
    "divide": _divide,
    "remainder": _remainder,
    "maximum": lambda a, b: torch.maximum(a, b),
    "minimum": lambda a, b: torch.minimum(a, b),
    "power": lambda a, b: torch.pow(a, b),
    "and": lambda a, b: a & b,
    "or": lambda a, b: a | b,
    "xor": lambda a, b: a ^ b,
    "not": lambda a: ~a,
    "negate": lambda a: -a,
    "abs": lambda a: torch.abs(a),
    "exponential": lambda a: torch.exp(a),
    "log": lambda a: torch.log(a),
    "sqrt": lambda a: torch.sqrt(a),
    "rsqrt": lambda a: torch.rsqrt(a),
    "tanh": lambda a: torch.tanh(a),
    "logistic": lambda a: torch.sigmoid(a),
    "sine": lambda a: torch.sin(a),
    "cosine": lambda a: torch.cos(a),
    "select": lambda p, a, b: torch.where(p, a, b),
    "copy": lambda a: a,
}


def _elementwise(name: str) -> None:
    function = _ELEMENTWISE[name]

    @op(f"hlo.{name}")
    def run(call: Call) -> Any:
        return function(*call.args)


for _name in _ELEMENTWISE:
    _elementwise(_name)


@op("hlo.compare")
def compare(call: Call) -> Any:
    """Elementwise comparison in ``direction``."""
    name = str(call.kwargs["direction"]).lower()
    return getattr(torch, name)(*call.args)


@op("hlo.convert")
def convert(call: Call) -> Any:
    """Cast; to integers towards zero."""
    return call.args[0].to(_dtype(call))


@op("hlo.constant")
def constant(call: Call) -> Any:
    """A literal in its recorded type."""
    if call.node.dtype is None:
        raise call.error("a constant without a dtype")
    value = constant_tensor(call.kwargs["value"], call.node.dtype, call.node.shape, call.device)
    perturbation = call.options.perturbation
    return perturbation.tensor(value, call.node.dtype, call.node.name) if perturbation is not None else value


@op("hlo.iota")
def iota(call: Call) -> Any:
    """Indices along one dimension."""
    shape, (dim,) = _shape(call), call.kwargs["dimensions"]
    view = [1] * len(shape)
    view[dim] = shape[dim]
    return torch.arange(shape[dim], device=call.device).reshape(view).expand(shape).to(_dtype(call))


@op("hlo.reshape")
def reshape(call: Call) -> Any:
    """Row-major reshape."""
    return call.args[0].reshape(_shape(call))


@op("hlo.broadcast")
def broadcast(call: Call) -> Any:
    """Operand axis ``i`` becomes result axis ``dimensions[i]``; all others repeat it."""
    shape, dims = _shape(call), call.kwargs.get("dimensions") or []
    view = [1] * len(shape)
    for axis, dim in enumerate(dims):
        view[dim] = call.args[0].shape[axis]
    order = sorted(range(len(dims)), key=lambda i: dims[i])
    return call.args[0].permute(order).reshape(view).expand(shape)


@op("hlo.transpose")
def transpose(call: Call) -> Any:
    """Axis permutation: result axis ``i`` is operand axis ``dimensions[i]``."""
    return call.args[0].permute(call.kwargs["dimensions"])


@op("hlo.slice")
def slice_(call: Call) -> Any:
    """Strided box."""
    bounds = zip(call.kwargs["start"], call.kwargs["limit"], call.kwargs["stride"])
    return call.args[0][tuple(slice(a, b, s) for a, b, s in bounds)]


@op("hlo.concatenate")
def concatenate(call: Call) -> Any:
    """Concatenation along one dimension."""
    (dim,) = call.kwargs["dimensions"]
    return torch.cat(call.args, dim)


@op("hlo.dot")
def dot(call: Call) -> Any:
    """General dot: result axes are batch, left free, right free."""
    left, right = call.args
    lb, rb = call.kwargs.get("lhs_batch_dimensions") or [], call.kwargs.get("rhs_batch_dimensions") or []
    lc, rc = call.kwargs["lhs_contracting_dimensions"], call.kwargs["rhs_contracting_dimensions"]
    names = iter("abcdefghijklmnopqrstuvwxyz")
    l_axes, r_axes = [""] * left.dim(), [""] * right.dim()
    for i, j in [*zip(lb, rb), *zip(lc, rc)]:
        l_axes[i] = r_axes[j] = next(names)
    l_axes = [a or next(names) for a in l_axes]
    r_axes = [a or next(names) for a in r_axes]
    l_free = [a for i, a in enumerate(l_axes) if i not in (*lb, *lc)]
    r_free = [a for i, a in enumerate(r_axes) if i not in (*rb, *rc)]
    out = "".join([l_axes[i] for i in lb] + l_free + r_free)
    if not left.is_floating_point():
        left, right = left.to(_dtype(call)), right.to(_dtype(call))
    return torch.einsum(f"{''.join(l_axes)},{''.join(r_axes)}->{out}", left, right)


@op("hlo.reduce")
def reduce(call: Call) -> Any:
    """Reduction over ``dimensions``, combined with the initial value."""
    value, initial = call.args
    dims, name = call.kwargs["dimensions"], str(call.kwargs["reducer"])
    if name == "add":
        return value.sum(dims, dtype=value.dtype) + initial
    if name in ("maximum", "minimum"):
        extreme = value.amax(dims) if name == "maximum" else value.amin(dims)
        return _ELEMENTWISE[name](extreme, initial.expand(extreme.shape))
    if name in ("and", "or") and value.dtype == torch.bool:
        joined = value
        for dim in sorted(dims, reverse=True):
            joined = joined.all(dim) if name == "and" else joined.any(dim)
        return joined & initial if name == "and" else joined | initial
    if name == "multiply":
        product = value
        for dim in sorted(dims, reverse=True):
            product = product.prod(dim, dtype=value.dtype)
        return product * initial
    raise call.error(f"unknown reducer '{name}'; known are add, multiply, maximum, minimum, and, or")


@op("hlo.gather")
def gather(call: Call) -> Any:
    """General gather: one clamped box of ``slice_sizes`` per index vector."""
    k = call.kwargs
    operand, indices = call.args
    axis = k["index_vector_dim"]
    if axis == indices.dim():
        indices = indices.unsqueeze(-1)
    indices = indices.movedim(axis, -1)
    batch, sizes = tuple(indices.shape[:-1]), list(k["slice_sizes"])
    collapsed, offset_dims = set(k["collapsed_slice_dims"]), list(k["offset_dims"])
    boxes = []
    for vector in indices.reshape(-1, indices.shape[-1]).tolist():
        start = [0] * operand.dim()
        for position, dim in enumerate(k["start_index_map"]):
            start[dim] = min(max(int(vector[position]), 0), operand.shape[dim] - sizes[dim])
        box = operand[tuple(slice(s, s + n) for s, n in zip(start, sizes))]
        boxes.append(box.reshape([n for d, n in enumerate(sizes) if d not in collapsed]))
    stacked = torch.stack(boxes).reshape(*batch, *boxes[0].shape)
    rank = stacked.dim()
    batch_positions = [d for d in range(rank) if d not in offset_dims]
    order = [0] * rank
    for source, target in enumerate([*batch_positions, *offset_dims]):
        order[target] = source
    return stacked.permute(order)


@op("hlo.custom_call")
def custom_call(call: Call) -> Any:
    """Custom calls with a known meaning.

    ``AwsNeuronTransferWithStaticRing`` hands its operand through; ``AwsNeuronRmsNorm(x, weight, eps)`` is an RMS norm
    over dimension ``backend_config``.
    """
    target = call.kwargs.get("target")
    if target == "AwsNeuronTransferWithStaticRing":
        return call.args[0]
    if target == "AwsNeuronRmsNorm":
        value, weight, eps = call.args
        dim = int(call.kwargs.get("backend_config") or 0)
        view = [1] * value.dim()
        view[dim] = value.shape[dim]
        return value * torch.rsqrt(value.square().mean(dim, keepdim=True) + eps) * weight.reshape(view)
    raise call.error(f"custom call '{target}' has no known meaning")
