"""Top-k and sort. Functions that keep the order of a row move out of a top-k, so that routers that take the softmax before
or after it become one: ``topk(softmax(x)) = exp(topk(x) - logsumexp(x))``, and its values divided by their sum are
``softmax(topk(x))``."""

from __future__ import annotations

from typing import Any

from emerge.facts.families import FamilyNode
from emerge.facts.lower import Iter, Lowering, Multi, Tensor, Unsupported, axis, lowers, whole
from emerge.facts.ops.reduction import along, reduce
from emerge.facts.routing import note_sort
from emerge.facts.shapes import normalize_dim
from emerge.graph.model import is_floating

#: Strictly increasing functions that are defined everywhere.
INCREASING = ("exp", "sigmoid", "tanh")


@lowers("aten.topk")
def topk(low: Lowering, node: FamilyNode, args: list[Any], kwargs: dict[str, Any]) -> Multi:
    """``(x, k, dim=-1, largest=True, sorted=True)``: values and positions along one whole, ordered dimension."""
    x, k = args[0], args[1]
    dim, largest, ordered = (
        kwargs.get(n, args[i] if len(args) > i else default)
        for i, n, default in ((2, "dim", -1), (3, "largest", True), (4, "sorted", True))
    )
    if isinstance(k, Tensor) or not isinstance(dim, int) or not isinstance(largest, bool):
        raise Unsupported("its attributes depend on data or rank")
    d, k = normalize_dim(dim, len(x.shape)), int(k)

    def output(i: int) -> Tensor:
        result = _positions(low, x, d, k, largest) if i else _values(low, x, d, k, largest)
        if not ordered and k > 1:
            low.assume("topk_order", result, "a top-k whose order is left open gives its values in descending order")
        return result

    return Multi(output)


def _inner(low: Lowering, x: Tensor, d: int) -> tuple[str, Tensor] | None:
    """(function, operand) where ``x`` is a strictly increasing function of its operand in every row along ``d``."""
    found = low.recipes.get(x.id)
    if found is None or not is_floating(x.dtype):
        return None
    if found.name == "along" and found.params[2] in ("softmax", "log_softmax") and found.params[0] == d:
        return found.params[2], found.args[0]
    if found.name == "map" and found.params[0] in INCREASING and found.args[0].shape == x.shape:
        return found.params[0], found.args[0]
    return None


def _positions(low: Lowering, x: Tensor, d: int, k: int, largest: bool) -> Tensor:
    outer = x
    while (inner := _inner(low, x, d)) is not None:
        x = inner[1]
    result = _top(low, x, d, k, largest, 1)
    if x.id != outer.id:
        low.assume("no_ties", result, "no two values of a row are equal after a softmax that were different before")
    return result


def _values(low: Lowering, x: Tensor, d: int, k: int, largest: bool) -> Tensor:
    inner = _inner(low, x, d)
    if inner is None:
        return _top(low, x, d, k, largest, 0)
    function, y = inner
    best = _values(low, y, d, k, largest)
    if function in INCREASING:
        return low.pointwise(function, function, [best], x.dtype)
    total = reduce(low, y, [d], True, "w", "logsumexp", "stat", x.dtype)
    best = low.pointwise("sub", "sub", [best, total], x.dtype)
    return low.pointwise("exp", "exp", [best], x.dtype) if function == "softmax" else best


def _top(low: Lowering, x: Tensor, d: int, k: int, largest: bool, i: int) -> Tensor:
    if k == 1 and x.shape[d] == 1:
        return low.constant(0, x.shape, "int64") if i else x
    if k == 1:
        # the first of a row is its maximum
        name = "max" if largest else "min"
        if i == 0:
            result = reduce(low, x, [d], True, name, name, name, x.dtype)
        else:
            result = reduce(low, x, [d], True, "o", f"arg{name}", "arg", "int64")
            low.assume("no_ties", result, "the largest value of a row stands at one position")
    else:
        result = _positions_or_values(low, x, d, k, largest, i)
    if i == 0:
        low.top_of[result.id] = (x, d)
    return result


def _positions_or_values(low: Lowering, x: Tensor, d: int, k: int, largest: bool, i: int) -> Tensor:
    return _ranked(low, f"topk#{i}#{k}#{largest}", "topk", x, d, k, "int64" if i else x.dtype)


def _ranked(low: Lowering, body: str, kind: str, x: Tensor, d: int, size: int, dtype: str) -> Tensor:
    iters = [axis(n, "p", j, a0=j) if j != d else Iter(size, "pos", whole(size, d)) for j, n in enumerate(x.shape)]
    iters.append(Iter(x.shape[d], "o", (), ((0, whole(x.shape[d], d)),)))
    result = low.op(body, kind, [x], iters, [size if j == d else n for j, n in enumerate(x.shape)], dtype)
    if body.split("#")[1] == "1":
        low.base.add("index_bound", result.id, x.shape[d])
        low.position_limits[result.id] = x.shape[d]
        if x.shape == (size,):
            low.permutations.add(result.id)  # the order of a whole sorted vector: every position once
    return result


@lowers("aten.sort")
def sort(low: Lowering, node: FamilyNode, args: list[Any], kwargs: dict[str, Any]) -> Multi:
    """Values and positions along one whole, ordered dimension; equal operands give equal results."""
    x, rest = args[0], args[1:]
    dim = kwargs.get("dim", rest[0] if rest else -1)
    if not isinstance(dim, int):
        raise Unsupported("its attributes depend on data or rank")
    d = normalize_dim(dim, len(x.shape))
    attrs = f"{rest[1:]}#{sorted((a, v) for a, v in kwargs.items() if a != 'dim')}"

    def output(i: int) -> Tensor:
        return _ranked(low, f"sort#{i}#{attrs}", "sort", x, d, x.shape[d], "int64" if i else x.dtype)

    if len(x.shape) == 1:
        descending = kwargs.get("descending", rest[-1] if len(rest) > 1 else False)
        note_sort(low, output(0), output(1), x, bool(descending))
    return Multi(output)


def renormalised(low: Lowering, x: Any, y: Any) -> Tensor | None:
    """``x / y`` where ``x`` are the largest values of a softmax and ``y`` is their sum: the softmax of the largest operands.

    Both are undefined at rows whose largest operand is infinite or that hold nothing but ``-inf``.
    """
    if not isinstance(x, Tensor) or not isinstance(y, Tensor):
        return None
    difference = _made(low, x, "exp")
    terms = low.made_by.get(difference.id) if difference is not None else None
    if terms is None or terms.kind != "sub":
        return None
    best, total = terms.args
    found = low.top_of.get(best.id)
    statistic = _root(low, total)
    if found is None or statistic is None or statistic.body != "logsumexp" or statistic.args[0].id != found[0].id:
        return None
    d = found[1]
    summed = low.view_of.get(y.id, y)
    made = low.made_by.get(summed.id)
    kept = tuple(1 if j == d else n for j, n in enumerate(x.shape))
    if made is None or made.kind != "sum" or made.args[0].id != x.id or y.shape != kept:
        return None
    if not _reduces(made, d) or not _reduces(statistic, d):
        return None
    return along(low, best, d, "w", "softmax", "softmax", x.dtype)


def _made(low: Lowering, x: Tensor, kind: str) -> Tensor | None:
    made = low.made_by.get(x.id)
    return made.args[0] if made is not None and made.kind == kind else None


def _root(low: Lowering, x: Tensor) -> Any:
    """How the tensor below rearrangements was made."""
    return low.made_by.get(low.innermost(x).id)


def _reduces(made: Any, d: int) -> bool:
    """Does a statistic reduce dimension ``d`` and no other?"""
    gone = [it for it in made.iters if it.role != "p"]
    return len(gone) == 1 and dict(gone[0].args).get(0) == whole(gone[0].size, d)
