"""Reductions, scans, sorting and softmax: operators that read whole dimensions.

A reduction family is a dtype policy and the position of its ``dim`` argument; ``keepdim`` follows ``dim``.
"""

from __future__ import annotations

from collections.abc import Callable

from emerge.facts.shape_rules.algebra import Size, broadcast, normalize_dim, reduce_shape, replace
from emerge.facts.shape_rules.core import (
    Call,
    Result,
    Rule,
    Rules,
    Spec,
    Undecided,
    like,
    require_same_shape,
    table,
)
from emerge.facts.shape_rules.promotion import result_type, to_floating, to_integer_sum, to_real
from emerge.graph.model import Shape, TensorType
from emerge.util.errors import GraphError

DtypePolicy = Callable[["str | None"], "str | None"]


def _same(dtype: str | None) -> str | None:
    return dtype


def _boolean(dtype: str | None) -> str | None:
    return "uint8" if dtype == "uint8" else "bool"


def _index(_: str | None) -> str | None:
    return "int64"


def _deviation(dtype: str | None) -> str | None:
    return to_real(dtype)


#: operator -> (dtype policy, position of ``dim``); ``dtype=`` overrides the policy.
REDUCTIONS: dict[str, tuple[DtypePolicy, int]] = {
    "sum": (to_integer_sum, 1),
    "nansum": (to_integer_sum, 1),
    "prod": (to_integer_sum, 1),
    "mean": (_same, 1),
    "nanmean": (_same, 1),
    "amax": (_same, 1),
    "amin": (_same, 1),
    "logsumexp": (to_floating, 1),
    "argmax": (_index, 1),
    "argmin": (_index, 1),
    "count_nonzero": (_index, 1),
    "linalg_vector_norm": (_deviation, 2),
}

#: value and index along one dimension, or one value over all of them: max(x), max(x, dim), max(x, y).
EXTREMA = "max min"
#: value and index along one dimension (default: the last).
SELECTIONS = "median nanmedian mode"
#: like the operand, along one dimension.
SCANS: dict[str, DtypePolicy] = {
    "cumsum": to_integer_sum,
    "cumprod": to_integer_sum,
    "logcumsumexp": _same,
}
#: softmax(x, dim, dtype) family, and the decomposed forms whose third argument is half_to_float.
SOFTMAX = "softmax log_softmax _safe_softmax special_softmax special_log_softmax"
SOFTMAX_DECOMPOSED = "_softmax _log_softmax"
SOFTMAX_BACKWARD = "_softmax_backward_data _log_softmax_backward_data"


def _require_elements(operand: TensorType, dims: list[int] | None, what: str) -> None:
    """An extremum over nothing does not exist."""
    gone = [normalize_dim(d, len(operand.shape)) for d in dims] if dims else range(len(operand.shape))
    if any(operand.shape[d] == 0 for d in gone if operand.shape):
        raise GraphError(f"{what} over a dimension of size 0")


def _reduction(name: str, policy: DtypePolicy, position: int) -> Rule:
    must_have_elements = name in ("amax", "amin", "argmax", "argmin")
    # An empty list means "all dimensions" for some operators and "none" for others.
    empty_is_all = name not in ("nansum", "nanmean", "logsumexp", "count_nonzero")

    def rule(call: Call) -> Result:
        operand = call.tensor(0, "self")
        dims = call.integers(position, "dim", None)
        if dims == [] and not empty_is_all:
            raise Undecided
        if must_have_elements:
            _require_elements(operand, dims, name)
        shape = reduce_shape(operand.shape, dims, call.flag(position + 1, "keepdim"))
        return Spec(call.dtype(policy(operand.dtype)), shape)

    return rule


def _all_any(call: Call) -> Result:
    operand = call.tensor(0, "self")
    dims = call.integers(1, "dim", None)
    if dims == []:
        # any.dims / all.dims with an empty list reduce nothing.
        return Spec(_boolean(operand.dtype), operand.shape)
    return Spec(_boolean(operand.dtype), reduce_shape(operand.shape, dims, call.flag(2, "keepdim")))


def _extremum(call: Call) -> Result:
    operand = call.tensor(0, "self")
    second = call.get(1, "dim", call.kwargs.get("other"))
    if isinstance(second, TensorType):
        return Spec(result_type([operand, second]), broadcast([operand.shape, second.shape]))
    if second is None:
        _require_elements(operand, None, call.op)
        return Spec(operand.dtype, ())
    return _value_and_index(operand, call.dim(1, "dim", len(operand.shape)), call.flag(2, "keepdim"))


def _value_and_index(operand: TensorType, dim: int, keepdim: bool) -> Result:
    _require_elements(operand, [dim], "an extremum or median")
    shape = reduce_shape(operand.shape, [dim], keepdim)
    return [Spec(operand.dtype, shape), Spec("int64", shape)]


def _selection(call: Call) -> Result:
    operand = call.tensor(0, "self")
    dim = call.optional_integer(1, "dim")
    if dim is None and not call.op.endswith((".dim", "mode.default")):
        return Spec(operand.dtype, ())
    at = normalize_dim(-1 if dim is None else dim, len(operand.shape))
    return _value_and_index(operand, at, call.flag(2, "keepdim"))


def _kthvalue(call: Call) -> Result:
    operand = call.tensor(0, "self")
    at, k = call.dim(2, "dim", len(operand.shape), -1), call.integer(1, "k")
    size = _along(operand.shape, at)
    if k < 1 or (isinstance(size, int) and k > size):
        raise GraphError(f"k = {k} is out of range for dimension {at} of size {size}")
    return _value_and_index(operand, at, call.flag(3, "keepdim"))


def _aminmax(call: Call) -> Result:
    operand = call.tensor(0, "self")
    dims = call.integers(1, "dim", None)
    _require_elements(operand, dims, call.op)
    spec = Spec(operand.dtype, reduce_shape(operand.shape, dims, call.flag(2, "keepdim")))
    return [spec, spec]


def _deviation_shape(call: Call) -> tuple[TensorType, Shape]:
    operand = call.tensor(0, "self")
    overload = call.overload
    if overload == "default":  # (self, unbiased)
        return operand, ()
    # .dim is (self, dim, unbiased, keepdim); .correction is (self, dim, *, correction, keepdim).
    keepdim = call.flag(3 if overload == "dim" else -1, "keepdim")
    return operand, reduce_shape(operand.shape, call.integers(1, "dim", None), keepdim)


def _var(call: Call) -> Result:
    operand, shape = _deviation_shape(call)
    return Spec(to_real(operand.dtype), shape)


def _var_mean(call: Call) -> Result:
    operand, shape = _deviation_shape(call)
    return [Spec(to_real(operand.dtype), shape), Spec(operand.dtype, shape)]


def _norm(call: Call) -> Result:
    operand = call.tensor(0, "self")
    shape = reduce_shape(operand.shape, call.integers(2, "dim", None), call.flag(3, "keepdim"))
    return Spec(call.dtype(to_real(operand.dtype)), shape)


def _scan(policy: DtypePolicy) -> Rule:
    def rule(call: Call) -> Result:
        operand = call.tensor(0, "self")
        call.dim(1, "dim", len(operand.shape))
        return Spec(call.dtype(policy(operand.dtype)), operand.shape)

    return rule


def _scan_with_index(call: Call) -> Result:
    operand = call.tensor(0, "self")
    call.dim(1, "dim", len(operand.shape))
    return [like(operand), Spec("int64", operand.shape)]


def _softmax(call: Call) -> Result:
    operand = call.tensor(0, "self")
    call.dim(1, "dim", len(operand.shape))
    return Spec(call.dtype(to_floating(operand.dtype), 2), operand.shape)


def _softmax_decomposed(call: Call) -> Result:
    operand = call.tensor(0, "self")
    call.dim(1, "dim", len(operand.shape))
    return Spec("float32" if call.flag(2, "half_to_float") else operand.dtype, operand.shape)


def _softmax_backward(call: Call) -> Result:
    grad, output = call.tensor(0, "grad_output"), call.tensor(1, "output")
    require_same_shape("the gradient", grad.shape, output.shape)
    call.dim(2, "dim", len(output.shape))
    return Spec(call.dtype(None, 3, "input_dtype"), output.shape)


def _along(shape: Shape, dim: int) -> Size:
    return shape[dim] if shape else 1


def _topk(call: Call) -> Result:
    operand, k = call.tensor(0, "self"), call.integer(1, "k")
    dim = call.dim(2, "dim", len(operand.shape), -1)
    size = _along(operand.shape, dim)
    if k < 0 or (isinstance(size, int) and k > size):
        raise GraphError(f"k = {k} is out of range for dimension {dim} of size {size}")
    shape = replace(operand.shape, dim, k) if operand.shape else ()
    return [Spec(operand.dtype, shape), Spec("int64", shape)]


def _sort(call: Call) -> Result:
    operand = call.tensor(0, "self")
    # sort.stable is (self, *, stable, dim, descending).
    dim = call.kwargs.get("dim", -1) if call.overload == "stable" else call.get(1, "dim", -1)
    if isinstance(dim, int):
        normalize_dim(dim, len(operand.shape))
    return [like(operand), Spec("int64", operand.shape)]


def _argsort(call: Call) -> Result:
    result = _sort(call)
    return result[1] or result[0] if isinstance(result, list) and result[1] else result


def _histc(call: Call) -> Result:
    operand, bins = call.tensor(0, "self"), call.integer(1, "bins", 100)
    if bins <= 0:
        raise GraphError(f"histogram with {bins} bins")
    return Spec(operand.dtype, (bins,))


RULES: Rules = {
    **{f"aten.{n}": _reduction(n, policy, at) for n, (policy, at) in REDUCTIONS.items()},
    **{f"aten.{n}": _scan(policy) for n, policy in SCANS.items()},
    **table("all any", _all_any),
    **table(EXTREMA, _extremum),
    **table(SELECTIONS, _selection),
    **table("kthvalue", _kthvalue),
    **table("aminmax", _aminmax),
    **table("var std", _var),
    **table("var_mean std_mean", _var_mean),
    **table("norm", _norm),
    **table("cummax cummin", _scan_with_index),
    **table(SOFTMAX, _softmax),
    **table(SOFTMAX_DECOMPOSED, _softmax_decomposed),
    **table(SOFTMAX_BACKWARD, _softmax_backward),
    **table("topk", _topk),
    **table("sort", _sort),
    **table("argsort", _argsort),
    **table("histc", _histc),
}
