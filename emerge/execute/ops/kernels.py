"""Kernels outside torch whose meaning is certain, as composites of torch operators.

Kernels without a documented contract (``vllm.unified_attention*``) are not here: executing them is an error.
Sources: NVIDIA apex ``fused_layer_norm`` (normalized_shape = trailing axes; mean and inverse root flattened to
[rows]); vLLM ``csrc/layernorm_kernels.cu``, ``activation_kernels.cu``, ``pos_encoding_kernels.cu``; Megatron-LM
``megatron/core/transformer/moe/moe_utils.py`` (sinkhorn).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from emerge.execute._torch import torch
from emerge.execute.aliasing import KERNEL_SCHEMAS, split_op
from emerge.execute.ops.base import OPS, Call, op


def _rows(value: Any, normalized_shape: list[int]) -> Any:
    """``value`` as [rows, normalized elements]."""
    size = 1
    for s in normalized_shape:
        size *= s
    return value.reshape(-1, size)


@op("apex.fused_layer_norm_affine_fwd", "apex.fused_layer_norm_fwd")
def layer_norm(call: Call) -> Any:
    """``(output, mean [rows], inverse standard deviation [rows])``."""
    affine = "affine" in call.node.op
    names = ("input", "weight", "bias", "shape", "eps") if affine else ("input", "shape", "eps")
    b = call.bind(*names)
    rows = _rows(b["input"], b["shape"])
    mean = rows.mean(1)
    inverse = torch.rsqrt((rows - mean[:, None]).square().mean(1) + b["eps"])
    out = ((rows - mean[:, None]) * inverse[:, None]).reshape(b["input"].shape)
    return (out * b["weight"] + b["bias"] if affine else out), mean, inverse


@op("apex.fused_rms_norm_affine_fwd", "apex.fused_rms_norm_fwd")
def rms_norm(call: Call) -> Any:
    """``(output, inverse root mean square [rows])``."""
    affine = "affine" in call.node.op
    b = call.bind(*(("input", "weight", "shape", "eps") if affine else ("input", "shape", "eps")))
    rows = _rows(b["input"], b["shape"])
    inverse = torch.rsqrt(rows.square().mean(1) + b["eps"])
    out = (rows * inverse[:, None]).reshape(b["input"].shape)
    return (out * b["weight"] if affine else out), inverse


def _normalised_gradient(grad: Any, unit: Any, inverse: Any, centred: bool) -> Any:
    """Gradient of the normalised rows: remove its component along ``unit`` (and along 1 when centred)."""
    projected = grad - unit * (grad * unit).mean(1, keepdim=True)
    if centred:
        projected = projected - grad.mean(1, keepdim=True)
    return projected * inverse[:, None]


@op("apex.fused_layer_norm_affine_bwd")
def layer_norm_backward(call: Call) -> Any:
    """``(grad input, grad weight, grad bias)``."""
    b = call.bind("grad", "mean", "inverse", "input", "shape", "weight", "bias", "eps", "memory_efficient")
    if b["memory_efficient"]:
        raise call.error("the memory-efficient variant keeps the output instead of the input, which is not modelled")
    grad, rows = _rows(b["grad"], b["shape"]), _rows(b["input"], b["shape"])
    unit = (rows - b["mean"].reshape(-1, 1)) * b["inverse"].reshape(-1, 1)
    weighted = grad * b["weight"].reshape(1, -1)
    d_input = _normalised_gradient(weighted, unit, b["inverse"].reshape(-1), centred=True)
    d_weight, d_bias = (grad * unit).sum(0), grad.sum(0)
    return d_input.reshape(b["input"].shape), d_weight.reshape(b["weight"].shape), d_bias.reshape(b["bias"].shape)


@op("apex.fused_rms_norm_affine_bwd")
def rms_norm_backward(call: Call) -> Any:
    """``(grad input, grad weight)``."""
    b = call.bind("grad", "inverse", "input", "shape", "weight", "eps", "memory_efficient")
    if b["memory_efficient"]:
        raise call.error("the memory-efficient variant keeps the output instead of the input, which is not modelled")
    grad, rows = _rows(b["grad"], b["shape"]), _rows(b["input"], b["shape"])
    unit = rows * b["inverse"].reshape(-1, 1)
    d_input = _normalised_gradient(grad * b["weight"].reshape(1, -1), unit, b["inverse"].reshape(-1), centred=False)
    return d_input.reshape(b["input"].shape), (grad * unit).sum(0).reshape(b["weight"].shape)


@op("megatron.sinkhorn")
def sinkhorn(call: Call) -> Any:
    """Sinkhorn normalisation of a cost matrix [tokens, experts] until the update is below the tolerance 1e-4."""
    b = call.bind("cost", "tol", tol=1e-4)
    cost, tolerance = torch.exp(b["cost"]), b["tol"]
    rows, columns = cost.shape
    d1, eps = cost.new_ones(columns), 1e-8
    for _ in range(10_000):
        d0 = (1.0 / rows) / ((d1 * cost).sum(1) + eps)
        new = (1.0 / columns) / ((d0[:, None] * cost).sum(0) + eps)
        error = float((d1 - new).abs().mean())
        d1 = new
        decisions = call.options.decisions
        if decisions is not None and abs(error - tolerance) <= decisions.margin * tolerance:
            decisions.report(call.rank, call.node, abs(error - tolerance) / tolerance)
        if not error > tolerance:
            return d1 * cost * d0[:, None]
    raise call.error("the Sinkhorn iteration does not converge on this sample")


def _norm(value: Any, weight: Any, eps: float) -> Any:
    return value * torch.rsqrt(value.square().mean(-1, keepdim=True) + eps) * weight


def _k_rms_norm(call: Call, b: dict[str, Any]) -> dict[str, Any]:
    return {"result": _norm(b["input"], b["weight"], b["epsilon"])}


def _k_fused_add_rms_norm(call: Call, b: dict[str, Any]) -> dict[str, Any]:
    total = b["input"] + b["residual"]
    return {"input": _norm(total, b["weight"], b["epsilon"]), "residual": total}


def _gated(activation: Callable[[Any], Any]) -> Callable[[Call, dict[str, Any]], dict[str, Any]]:
    def run(call: Call, b: dict[str, Any]) -> dict[str, Any]:
        gate, up = b["input"].chunk(2, dim=-1)
        return {"out": activation(gate) * up}

    return run


def _rotate(value: Any, cos: Any, sin: Any, head_size: int, neox: bool) -> Any:
    """Rotary embedding of ``[tokens, heads * head_size]`` (or ``[tokens, heads, head_size]``) values."""
    heads = value.reshape(value.shape[0], -1, head_size)
    rotary = 2 * cos.shape[-1]
    turned, rest = heads[..., :rotary], heads[..., rotary:]
    cos, sin = cos[:, None, :], sin[:, None, :]
    if neox:
        x, y = turned.chunk(2, dim=-1)
        turned = torch.cat((x * cos - y * sin, y * cos + x * sin), dim=-1)
    else:
        x, y = turned[..., 0::2], turned[..., 1::2]
        turned = torch.stack((x * cos - y * sin, y * cos + x * sin), dim=-1).flatten(-2)
    return torch.cat((turned, rest), dim=-1).reshape(value.shape)


def _k_rotary_embedding(call: Call, b: dict[str, Any]) -> dict[str, Any]:
    if b["positions"].dim() != 1:
        raise call.error(f"positions of rank {b['positions'].dim()} are not modelled, expected one position per token")
    cos, sin = b["cos_sin_cache"][b["positions"]].chunk(2, dim=-1)
    size, neox = b["head_size"], bool(b["is_neox"])
    out = {"query": _rotate(b["query"], cos, sin, size, neox)}
    out["key"] = None if b.get("key") is None else _rotate(b["key"], cos, sin, size, neox)
    return out


def _gelu(kind: str) -> Callable[[Any], Any]:
    return lambda x: torch.nn.functional.gelu(x, approximate=kind)


#: Kernels that write into their arguments: the new values of the written ones.
_IN_PLACE: dict[str, Callable[[Call, dict[str, Any]], dict[str, Any]]] = {
    "_C.rms_norm": _k_rms_norm,
    "_C.fused_add_rms_norm": _k_fused_add_rms_norm,
    "_C.silu_and_mul": _gated(lambda x: torch.nn.functional.silu(x)),
    "_C.gelu_and_mul": _gated(_gelu("none")),
    "_C.gelu_tanh_and_mul": _gated(_gelu("tanh")),
    "_C.rotary_embedding": _k_rotary_embedding,
}


def run_in_place(call: Call, kernel: str, bound: dict[str, Any]) -> list[Any]:
    """New values of the arguments a kernel writes to, in schema order, each of the shape of the old one.

    Raises:
        ExecutionError: the kernel has no documented composite.
    """
    namespace, name, _ = split_op(kernel)
    base = f"{namespace}.{name}"
    if base not in _IN_PLACE:
        raise call.error(f"kernel {kernel} has no known meaning; known are {', '.join(sorted(_IN_PLACE))}")
    new = _IN_PLACE[base](call, bound)
    values: list[Any] = []
    for parameter in KERNEL_SCHEMAS[base][1]:
        value, old = new[parameter], bound[parameter]
        if value is not None and value.shape != old.shape:
            shapes = f"{list(value.shape)} into '{parameter}' of {list(old.shape)}"
            raise call.error(f"{kernel} would write shape {shapes}")
        values.append(value)
    return values


def _direct(base: str) -> None:
    @op(base)
    def run(call: Call) -> Any:
        values = run_in_place(call, base, call.bind(*KERNEL_SCHEMAS[base][0]))
        # The interpreter rebinds written operands from the call's arguments.
        for parameter, value in zip(KERNEL_SCHEMAS[base][1], values):
            position = KERNEL_SCHEMAS[base][0].index(parameter)
            if position < len(call.args):
                call.args[position] = value
            else:
                call.kwargs[parameter] = value
        return None


for _base in _IN_PLACE:
    _direct(_base)


@op("auto_functionalized", "higher_order.auto_functionalized")
def auto_functionalized(call: Call) -> Any:
    """``(result of the kernel = None, written arguments in schema order...)``."""
    kernel = str(call.args[0])
    defined = OPS.get(kernel) if split_op(kernel)[0] != "_C" else None
    if defined is not None:  # by its definition: the new values of what it writes
        inner = Call(
            call.node, call.args[1:], call.kwargs, call.options, call.device, call.captured, call.types, call.rank, call.place
        )
        return (None, *defined(inner))
    return (None, *run_in_place(call, kernel, call.kwargs))


@op("auto_functionalized_v2", "higher_order.auto_functionalized_v2")
def auto_functionalized_v2(call: Call) -> Any:
    """``(None, all bases...)`` where every written argument is a whole base tensor, not a view of one."""
    kernel = str(call.args[0])
    bases = list(call.kwargs.get("_all_bases") or [])
    bound = {k: v for k, v in call.kwargs.items() if not k.startswith("_")}
    where: dict[str, int] = {}
    for key, value in call.kwargs.items():
        if key == "_all_bases" or not key.startswith("_"):
            continue
        if not key.endswith("_base_index") or not isinstance(value, int):
            raise call.error(f"an argument that is a view of its base ('{key}') is not modelled")
        where[key[1 : -len("_base_index")]] = value
    bound.update({name: bases[index] for name, index in where.items()})
    values = run_in_place(call, kernel, bound)
    namespace, name, _ = split_op(kernel)
    for parameter, value in zip(KERNEL_SCHEMAS[f"{namespace}.{name}"][1], values):
        if parameter in where:
            bases[where[parameter]] = value
    return (None, *bases)
