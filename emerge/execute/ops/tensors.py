"""ATen operators whose own version depends on recorded types, random numbers or uninitialised memory."""

from __future__ import annotations

from typing import Any

from emerge.execute._torch import torch
from emerge.execute.ops.base import Call, op, run_torch
from emerge.execute.precision import dtype_name


def dropout_parts(call: Call, value: Any, p: float) -> tuple[Any, Any]:
    """Dropout with the caller's keep-mask: ``(value * mask / (1 - p), mask)``; all zeros for ``p = 1``."""
    if p == 0.0:
        return value, torch.ones_like(value, dtype=torch.bool)  # no mask is drawn, so none can differ
    shape = tuple(value.shape)
    mask = call.options.dropout_mask(call.node, shape).to(device=value.device, dtype=torch.bool)
    if tuple(mask.shape) != shape:
        raise call.error(f"the dropout mask callback returned shape {tuple(mask.shape)}, expected {shape}")
    if p >= 1.0:
        return torch.zeros_like(value), torch.zeros_like(mask)
    return value * mask * (1.0 / (1.0 - p)), mask


@op("aten.native_dropout")
def native_dropout(call: Call) -> Any:
    """``(output, keep mask)``; the mask comes from the caller, the scale ``1/(1-p)`` is applied as defined."""
    bound = call.bind("input", "p", "train", train=True)
    value = bound["input"]
    if bound["train"] is False:
        return value, torch.ones_like(value, dtype=torch.bool)
    return dropout_parts(call, value, float(bound["p"]))


@op("aten.dropout", "aten.dropout_")
def dropout(call: Call) -> Any:
    """Dropout without the mask output."""
    bound = call.bind("input", "p", "train")
    return dropout_parts(call, bound["input"], float(bound["p"]))[0] if bound["train"] else bound["input"]


@op(
    "aten.empty",
    "aten.empty_like",
    "aten.new_empty",
    "aten.new_empty_strided",
    "aten.empty_strided",
    "aten.empty_permuted",
)
def empty(call: Call) -> Any:
    """Uninitialised memory, filled by the caller's ``fill``."""
    first = call.args[0]
    sizes = first.shape if call.node.op.startswith("aten.empty_like") else first
    if call.node.op.startswith("aten.new_empty"):
        sizes = call.args[1]
    shape = tuple(int(s) for s in sizes)
    recorded = call.node.dtype or (dtype_name(first.dtype) if isinstance(first, torch.Tensor) else "float32")
    dtype = call.options.precision.torch_dtype(recorded, call.captured)
    return call.options.fill(call.node, shape, dtype).to(device=call.device, dtype=dtype)


def _half_to_float(call: Call, function: Any) -> Any:
    value, dim, to_float = call.args
    # torch has the half-to-float variant on CUDA only.
    if to_float and value.dtype in (torch.float16, torch.bfloat16):
        value = value.to(torch.float32)
    return function(value, dim, False)


@op("aten._softmax")
def softmax(call: Call) -> Any:
    """Softmax along a dimension."""
    return _half_to_float(call, torch.ops.aten._softmax.default)


@op("aten._log_softmax")
def log_softmax(call: Call) -> Any:
    """Logarithm of softmax along a dimension."""
    return _half_to_float(call, torch.ops.aten._log_softmax.default)


@op("aten.mm.dtype", "aten.bmm.dtype", "aten.addmm.dtype", "aten.baddbmm.dtype")
def matmul_with_dtype(call: Call) -> Any:
    """Matrix products with an output dtype: operands are cast first (torch has these on CUDA only)."""
    bound = call.bind_schema()
    dtype = bound.pop("out_dtype")
    operands = {k: v.to(dtype) if isinstance(v, torch.Tensor) else v for k, v in bound.items()}
    name = call.node.op.split(".")[1]
    return getattr(torch.ops.aten, name).default(**operands)


@op("aten.rms_norm", "aten._fused_rms_norm")
def rms_norm(call: Call) -> Any:
    """RMS norm; an ``eps`` that was not recorded is the machine epsilon of the recorded float32 or float64 input."""
    bound = call.bind_schema()
    eps, recorded = bound["eps"], call.declared(0)
    if eps is None:
        if recorded not in ("float32", "float64"):
            raise call.error(f"eps was not recorded, and its default for {recorded} differs between torch versions")
        eps = torch.finfo(getattr(torch, recorded)).eps
    value, weight = bound["input"], bound["weight"]
    dims = tuple(range(-len(bound["normalized_shape"]), 0))
    inverse = torch.rsqrt(value.square().mean(dims, keepdim=True) + eps)
    out = value * inverse
    out = out if weight is None else out * weight
    return (out, inverse) if "_fused" in call.node.op else out


@op("aten.nan_to_num", "aten.nan_to_num_")
def nan_to_num(call: Call) -> Any:
    """Replacement of NaN and infinities; the default bounds are those of the *recorded* type."""
    bound = call.bind("self", "nan", "posinf", "neginf")
    value, recorded = bound["self"], call.declared(0)
    if value.is_floating_point() and recorded is not None:
        limits = torch.finfo(getattr(torch, recorded))
        bound["posinf"] = limits.max if bound["posinf"] is None else bound["posinf"]
        bound["neginf"] = limits.min if bound["neginf"] is None else bound["neginf"]
    return torch.nan_to_num(value, bound["nan"] or 0.0, bound["posinf"], bound["neginf"])


@op("aten.copy")
def copy(call: Call) -> Any:
    """``src`` broadcast to the shape and cast to the dtype of ``dst``; the values of ``dst`` are not read."""
    target, source = call.args[0], call.args[1]
    dtype = target.dtype
    if call.node.dtype is not None:
        dtype = call.options.precision.torch_dtype(call.node.dtype, call.captured)
    cast = source.to(device=target.device, dtype=dtype)
    return cast.expand(target.shape).clone(memory_format=torch.contiguous_format)


@op("aten._grouped_mm")
def grouped_mm(call: Call) -> Any:
    """Matrix product per group; ``offs`` holds the end of each group along the ragged axis.

    ``[M, K] x [G, K, N]`` ragged rows, ``[G, M, K] x [K, N]`` ragged columns, ``[M, K] x [K, N] -> [G, M, N]`` ragged
    reduction, ``[G, M, K] x [G, K, N]`` batched. Rows or columns behind the last offset are not defined (NaN here).
    """
    bound = call.bind_schema()
    a, b, offs = bound["self"], bound["mat2"], bound["offs"]
    if bound["bias"] is not None:
        raise call.error("a bias of grouped_mm has no documented meaning yet")
    if offs is None:
        return torch.bmm(a, b)
    ends = [int(e) for e in offs]
    starts = [0, *ends[:-1]]
    spans = list(zip(starts, ends))
    if a.dim() == 2 and b.dim() == 2:
        return torch.stack([a[:, s:e] @ b[s:e] for s, e in spans])
    if a.dim() == 2:
        out = a.new_full((a.shape[0], b.shape[-1]), float("nan"))
        for g, (s, e) in enumerate(spans):
            out[s:e] = a[s:e] @ b[g]
        return out
    out = a.new_full((a.shape[1], b.shape[-1]), float("nan"))
    for g, (s, e) in enumerate(spans):
        out[:, s:e] = a[g] @ b[:, s:e]
    return out


@op("aten.log_sigmoid_forward")
def log_sigmoid_forward(call: Call) -> Any:
    """``(log sigmoid, buffer)``; the buffer is private to torch's backward and never read here."""
    return run_torch(call)
