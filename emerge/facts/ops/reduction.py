"""Reductions, norms and other operators that read whole axes."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from math import prod
from typing import Any

from emerge.facts.base import constant_text
from emerge.facts.families import FamilyNode
from emerge.facts.lower import Iter, Lowering, Multi, Tensor, axis, lowers, result_dtype, whole
from emerge.facts.ops.contraction import squeeze_keep
from emerge.facts.ops.layout import view
from emerge.facts.ops.masks import softmax_operand, without_maximum
from emerge.facts.routing import note_histogram, note_reduced, note_sum
from emerge.facts.shapes import normalize_dim
from emerge.graph.model import is_floating


def reduce(
    low: Lowering, x: Tensor, dims: Sequence[int], keepdim: bool, role: str, body: str, kind: str, dtype: str
) -> Tensor:
    """Reduces ``dims`` of ``x`` with the given role."""
    kept = [d for d in range(len(x.shape)) if d not in dims]
    iters = [axis(x.shape[d], "p", k, a0=d) for k, d in enumerate(kept)]
    iters += [Iter(x.shape[d], role, (), ((0, whole(x.shape[d], d)),)) for d in dims]
    result = low.op(body, kind, [x], iters, [x.shape[d] for d in kept], dtype)
    if kind == "arg":
        size = prod(x.shape[d] for d in dims)
        low.base.add("index_bound", result.id, size)
        low.position_limits[result.id] = size
    low.remember(result, "fold", [x], tuple(dims), role, body, kind)
    return view(low, result, squeeze_keep(x.shape, dims)) if keepdim else result


def reduced_dims(x: Tensor, given: Any) -> list[int]:
    """Dimensions an operator reduces; None or [] is all of them."""
    if given is None or given == []:
        return list(range(len(x.shape)))
    return sorted(normalize_dim(d, len(x.shape)) for d in ([given] if isinstance(given, int) else given))


def _dims_keepdim(node: FamilyNode, args: list[Any], kwargs: dict[str, Any]) -> tuple[Any, bool]:
    dims = kwargs.get("dim", args[1] if len(args) > 1 else None)
    return dims, bool(kwargs.get("keepdim", args[2] if len(args) > 2 else False))


@lowers("aten.sum")
def sum_op(low: Lowering, node: FamilyNode, args: list[Any], kwargs: dict[str, Any]) -> Tensor:
    dims, keepdim = _dims_keepdim(node, args, kwargs)
    note_reduced(low, args[0])
    return reduce(
        low, args[0], reduced_dims(args[0], dims), keepdim, "sum", "sum", "sum", result_dtype(node, args[0].dtype)
    )


@lowers("aten.mean")
def mean(low: Lowering, node: FamilyNode, args: list[Any], kwargs: dict[str, Any]) -> Tensor:
    """The mean is the sum times 1/n, an exact constant."""
    given, keepdim = _dims_keepdim(node, args, kwargs)
    dims = reduced_dims(args[0], given)
    total = reduce(low, args[0], dims, keepdim, "sum", "sum", "sum", result_dtype(node, args[0].dtype))
    return low.scaled(total, Fraction(1, prod(args[0].shape[d] for d in dims)))


@lowers("aten.amax", "aten.amin", "aten.prod", "aten.any", "aten.all")
def extremum(low: Lowering, node: FamilyNode, args: list[Any], kwargs: dict[str, Any]) -> Tensor:
    name = node.op.split(".")[1]
    dims, keepdim = _dims_keepdim(node, args, kwargs)
    role = {"amax": "max", "amin": "min", "prod": "prod", "any": "max", "all": "min"}[name]
    kind = role if name in ("amax", "amin") else name
    return reduce(
        low, args[0], reduced_dims(args[0], dims), keepdim, role, kind, kind, result_dtype(node, args[0].dtype)
    )


@lowers("aten.max", "aten.min")
def max_dim(low: Lowering, node: FamilyNode, args: list[Any], kwargs: dict[str, Any]) -> Any:
    name = node.op.split(".")[1]
    if not node.is_tuple:
        if len(args) > 1 and isinstance(args[1], Tensor):
            full = {"max": "maximum", "min": "minimum"}[name]
            return low.pointwise(full, full, [args[0], args[1]], args[0].dtype, commutative=True)
        return reduce(low, args[0], reduced_dims(args[0], None), False, name, name, name, args[0].dtype)
    dims, keepdim = _dims_keepdim(node, args, kwargs)
    d = reduced_dims(args[0], dims)

    def output(i: int) -> Tensor:
        if i == 0:
            return reduce(low, args[0], d, keepdim, name, name, name, args[0].dtype)
        return reduce(low, args[0], d, keepdim, "o", f"arg{name}", "arg", "int64")

    return Multi(output)


@lowers("aten.argmax", "aten.argmin")
def arg_extremum(low: Lowering, node: FamilyNode, args: list[Any], kwargs: dict[str, Any]) -> Tensor:
    dims, keepdim = _dims_keepdim(node, args, kwargs)
    x = args[0]
    if dims is None:
        x, dims = view(low, x, [prod(x.shape)]), [0]
    return reduce(low, x, reduced_dims(x, dims), keepdim, "o", node.op.split(".")[1], "arg", "int64")


@lowers("aten.logsumexp")
def logsumexp(low: Lowering, node: FamilyNode, args: list[Any], kwargs: dict[str, Any]) -> Tensor:
    dims, keepdim = _dims_keepdim(node, args, kwargs)
    return reduce(low, args[0], reduced_dims(args[0], dims), keepdim, "w", "logsumexp", "stat", args[0].dtype)


@lowers("aten.linalg_vector_norm")
def vector_norm(low: Lowering, node: FamilyNode, args: list[Any], kwargs: dict[str, Any]) -> Tensor:
    """``(x, ord=2, dim=None, keepdim=False)``; the 2-norm is written out, so that it can be summed over ranks."""
    x = args[0]
    order, dims, keepdim = (_optional(args, kwargs, k, n) for k, n in ((1, "ord"), (2, "dim"), (3, "keepdim")))
    order = 2 if order is None else order
    if order == 2:
        squares = low.pointwise("square", "square", [x], x.dtype)
        total = reduce(low, squares, reduced_dims(x, dims), bool(keepdim), "sum", "sum", "sum", x.dtype)
        return low.pointwise("sqrt", "sqrt", [total], x.dtype)
    return reduce(low, x, reduced_dims(x, dims), bool(keepdim), "w", f"norm#{constant_text(order)}", "stat", x.dtype)


@lowers("aten.var", "aten.std", "aten.var_mean")
def variance(low: Lowering, node: FamilyNode, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """``.dim(x, dim, unbiased=True, keepdim=False)``, ``.correction(x, dim, *, correction=1, keepdim=False)`` or ``(x)``."""
    name, overload, x = node.op.split(".")[1], node.op.split(".")[-1], args[0]
    dims, keepdim, correction = None, False, 1
    if overload == "correction":
        dims, given = _optional(args, kwargs, 1, "dim"), kwargs.get("correction")
        keepdim, correction = bool(kwargs.get("keepdim", False)), 1 if given is None else given
    elif overload == "dim":
        dims, unbiased = args[1], _optional(args, kwargs, 2, "unbiased")
        keepdim, correction = bool(_optional(args, kwargs, 3, "keepdim")), int(unbiased is None or bool(unbiased))
    else:
        unbiased = _optional(args, kwargs, 1, "unbiased")
        correction = int(unbiased is None or bool(unbiased))
    body = f"#{constant_text(correction)}"
    d = reduced_dims(x, dims)
    if name == "var_mean":
        return Multi(lambda i: reduce(low, x, d, keepdim, "w", ("var" + body, "mean")[i], "stat", x.dtype))
    return reduce(low, x, d, keepdim, "w", name + body, "stat", x.dtype)


def along(low: Lowering, x: Tensor, d: int, role: str, body: str, kind: str, dtype: str) -> Tensor:
    """An operator that reads dimension ``d`` as a whole and keeps the shape."""
    iters = [axis(n, role if k == d else "p", k, a0=k) for k, n in enumerate(x.shape)]
    return low.remember(low.op(body, kind, [x], iters, x.shape, dtype), "along", [x], d, role, body, kind)


@lowers("aten._softmax", "aten.softmax", "aten._log_softmax", "aten.log_softmax", "aten._safe_softmax")
def softmax(low: Lowering, node: FamilyNode, args: list[Any], kwargs: dict[str, Any]) -> Tensor:
    x = args[0]
    d = normalize_dim(kwargs.get("dim", args[1]), len(x.shape))
    name = node.op.split(".")[1].removeprefix("_")
    x = softmax_operand(low, without_maximum(low, x, d) if is_floating(x.dtype) else x, d)
    return along(low, x, d, "w", name, name, result_dtype(node, x.dtype))


@lowers("aten.cumsum", "aten.cumprod")
def cumulative(low: Lowering, node: FamilyNode, args: list[Any], kwargs: dict[str, Any]) -> Tensor:
    x, name = args[0], node.op.split(".")[1]
    d = normalize_dim(kwargs.get("dim", args[1]), len(x.shape))
    result = along(low, x, d, "o", name, name, result_dtype(node, x.dtype))
    if name == "cumsum":
        note_sum(low, result, x)
    return result


@lowers("aten.histc")
def histc(low: Lowering, node: FamilyNode, args: list[Any], kwargs: dict[str, Any]) -> Tensor:
    """``(x, bins=100, min=0, max=0)``: a function of its own; what it counts is noted where every bin is one integer."""
    from emerge.facts.ops.uninterpreted import uninterpreted

    result = uninterpreted(low, node, args, kwargs)
    bins, least, most = (_optional(args, kwargs, k, n) for k, n in ((1, "bins"), (2, "min"), (3, "max")))
    note_histogram(low, result, args[0], 100 if bins is None else bins, least or 0, most or 0)
    return result


def norm(
    low: Lowering, x: Tensor, dims: int, weight: Tensor | None, bias: Tensor | None, body: str, dtype: str
) -> Tensor:
    """A normalisation over the last ``dims`` dimensions, with affine parameters of those dimensions."""
    args = [x, *(t for t in (weight, bias) if t is not None)]
    outer = len(x.shape) - dims
    iters = [axis(n, "p", d, a0=d) for d, n in enumerate(x.shape[:outer])]
    for k in range(dims):
        d = outer + k
        iters.append(axis(x.shape[d], "w", d, a0=d, **{f"a{j}": k for j in range(1, len(args))}))
    return low.op(f"{body}#{weight is not None}#{bias is not None}", body.split("#")[0], args, iters, x.shape, dtype)


def statistics(low: Lowering, x: Tensor, dims: int, body: str, keepdim: bool) -> Tensor:
    """A statistic over the last ``dims`` dimensions."""
    return reduce(low, x, list(range(len(x.shape) - dims, len(x.shape))), keepdim, "w", body, "stat", x.dtype)


def _optional(args: list[Any], kwargs: dict[str, Any], k: int, name: str) -> Any:
    return kwargs.get(name, args[k] if len(args) > k else None)


@lowers("aten.native_layer_norm", "aten.layer_norm")
def layer_norm(low: Lowering, node: FamilyNode, args: list[Any], kwargs: dict[str, Any]) -> Any:
    x, shape = args[0], args[1]
    weight, bias, eps = (_optional(args, kwargs, k, n) for k, n in ((2, "weight"), (3, "bias"), (4, "eps")))
    eps = constant_text(1e-5 if eps is None else eps)
    out = norm(low, x, len(shape), weight, bias, f"layer_norm#{eps}", x.dtype)
    if not node.is_tuple:
        return out
    return Multi(
        lambda i: (
            out,
            statistics(low, x, len(shape), "mean", True),
            statistics(low, x, len(shape), f"rstd#{eps}", True),
        )[i]
    )


@lowers("apex.fused_layer_norm_affine_fwd")
def apex_layer_norm(low: Lowering, node: FamilyNode, args: list[Any], kwargs: dict[str, Any]) -> Multi:
    """Apex: (x, weight, bias, normalized_shape, eps) -> (out, mean, 1/std), the statistics one per row, flat."""
    x, weight, bias, shape, eps = args[:5]
    text = constant_text(eps)
    rows = [prod(x.shape[: len(x.shape) - len(shape)])]

    def output(i: int) -> Tensor:
        if i == 0:
            return norm(low, x, len(shape), weight, bias, f"layer_norm#{text}", x.dtype)
        return view(low, statistics(low, x, len(shape), ("", "mean", f"rstd#{text}")[i], False), rows)

    return Multi(output)


@lowers("aten.rms_norm", "aten._fused_rms_norm", "apex.fused_rms_norm_affine_fwd")
def rms_norm(low: Lowering, node: FamilyNode, args: list[Any], kwargs: dict[str, Any]) -> Any:
    if node.op.startswith("apex"):
        x, weight, shape, eps = args[:4]
    else:
        x, shape = args[0], args[1]
        weight, eps = _optional(args, kwargs, 2, "weight"), _optional(args, kwargs, 3, "eps")
    text = "default" if eps is None else constant_text(eps)
    out = norm(low, x, len(shape), weight, None, f"rms_norm#{text}", x.dtype)
    if not node.is_tuple:
        return out
    return Multi(
        lambda i: out if i == 0 else statistics(low, x, len(shape), f"rrms#{text}", not node.op.startswith("apex"))
    )


@lowers("aten.native_dropout", "aten.dropout", "aten.dropout_")
def dropout(low: Lowering, node: FamilyNode, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """Dropout: the k-th call of one side takes the masks of the k-th call of the other (assumption ``dropout_masks``)."""
    x = args[0]
    p, train = args[1], args[2] if len(args) > 2 else kwargs.get("train", True)
    if train is False or p == 0:
        ones = low.constant(1, x.shape, "bool")
        return Multi(lambda i: (x, ones)[i]) if node.is_tuple else x
    call = low.random_calls
    low.random_calls += 1

    def output(i: int) -> Tensor:
        iters = [axis(n, "p", d, a0=d) for d, n in enumerate(x.shape)]
        body = f"dropout{'_mask' if i else ''}#{constant_text(p)}#{call}"
        result = low.op(body, "dropout", [x], iters, x.shape, "bool" if i else x.dtype)
        low.assume(
            "dropout_masks", result, "both sides draw the same dropout mask for each element of the whole tensor"
        )
        return result

    return Multi(output) if node.is_tuple else output(0)


def is_float_tensor(value: Any) -> bool:
    """True for a floating tensor operand."""
    return isinstance(value, Tensor) and is_floating(value.dtype)
