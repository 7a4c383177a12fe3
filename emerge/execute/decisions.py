"""Records where an execution decides on nearly equal floating values.

Two mathematically equal programs round differently; where a comparison, top-k, sort, floor or round then decides
on values closer than the margin, their integer results may differ although neither program is wrong. Such a
sample says nothing and has to be drawn again: the recorder lists these places.

An *exact* equality in a comparison or rounding is no tight decision (it is structural: a ReLU zero against 0, a
value against its own maximum); where the other side computes the same value with rounding, that side records it.
In top-k, sort and arg-max exact ties do count, because the position they return is not defined.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from emerge.execute._torch import torch
from emerge.graph.model import Node, is_integer

#: Near zero "relative" has no meaning: below this part of the mean magnitude lies the round-off of a cancellation.
_ZERO_FLOOR = 1e-9


@dataclass(frozen=True, slots=True)
class TightDecision:
    """One place where a decision hangs on nearly equal values; ``margin`` is their relative distance."""

    rank: int
    node: str
    op: str
    margin: float


@dataclass(slots=True)
class Decisions:
    """Collects tight decisions of a run.

    Attributes:
        margin: relative distance below which a decision is tight.
        tight: what was found, in execution order.
    """

    margin: float = 1e-6
    tight: list[TightDecision] = field(default_factory=list)

    def check(self, rank: int, node: Node, args: list[Any], kwargs: dict[str, Any], used: set[int] | None) -> None:
        """Examine one operator call before it runs.

        Args:
            args, kwargs: decoded arguments.
            used: indices of the outputs that are read, None when the result is read as a whole.
        """
        checker = _CHECKERS.get(base_name(node.op))
        if checker is None:
            return
        found = checker(self.margin, node, args, kwargs, used)
        if found is not None:
            self.report(rank, node, found)

    def report(self, rank: int, node: Node, margin: float) -> None:
        """Note a tight decision that an operator found inside itself (an iteration that stops at a tolerance)."""
        self.tight.append(TightDecision(rank, node.name, node.op, margin))


def base_name(op: str) -> str:
    """``aten.lt_.Scalar`` -> ``aten.lt``; names outside aten keep their first two parts."""
    parts = op.split(".")
    base = parts[1] if len(parts) > 1 else ""
    if parts[0] == "aten" and base.endswith("_") and not base.endswith("__"):
        base = base[:-1]
    return f"{parts[0]}.{base}" if base else parts[0]


_Checker = Callable[[float, Node, list[Any], dict[str, Any], "set[int] | None"], "float | None"]


def _is_float(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def _close(margin: float, a: Any, b: Any) -> float | None:
    """Smallest relative distance of ``a`` and ``b`` if it is below the margin; exact equality does not count."""
    if not (_is_float(a) or _is_float(b)):
        return None
    tensor = a if _is_float(a) else b
    a, b = (x if isinstance(x, torch.Tensor) else torch.tensor(x, dtype=torch.float64) for x in (a, b))
    wide = [x.to(device=tensor.device, dtype=torch.float64) for x in (a, b)]
    a, b = torch.broadcast_tensors(*wide)
    finite = torch.isfinite(a) & torch.isfinite(b)
    distance = torch.where(finite, (a - b).abs(), torch.full_like(a, float("inf")))
    if distance.numel() == 0:
        return None
    scale = torch.maximum(a.abs(), b.abs())
    magnitudes = tensor[torch.isfinite(tensor)].abs()
    floor = _ZERO_FLOOR * float(magnitudes.mean()) if magnitudes.numel() else 0.0
    tight = (distance > 0) & (distance <= torch.clamp(margin * scale, min=floor))
    if not bool(tight.any()):
        return None
    return float((distance[tight] / scale[tight].clamp(min=1e-300)).min())


def _compare(margin: float, node: Node, args: list[Any], kwargs: dict[str, Any], used: set[int] | None) -> float | None:
    other = args[1] if len(args) > 1 else kwargs.get("other")
    return _close(margin, args[0], other)


def _against_zero(
    margin: float, node: Node, args: list[Any], kwargs: dict[str, Any], used: set[int] | None
) -> float | None:
    return next((m for a in args if _is_float(a) and (m := _close(margin, a, 0.0)) is not None), None)


def _threshold(
    margin: float, node: Node, args: list[Any], kwargs: dict[str, Any], used: set[int] | None
) -> float | None:
    return _close(margin, args[1], args[2] if len(args) > 2 else 0.0)


def _near_integer(margin: float, value: Any, offset: float = 0.0) -> float | None:
    if not _is_float(value):
        return None
    return _close(margin, value, torch.round(value - offset) + offset)


def _floor(margin: float, node: Node, args: list[Any], kwargs: dict[str, Any], used: set[int] | None) -> float | None:
    return _near_integer(margin, args[0])


def _round(margin: float, node: Node, args: list[Any], kwargs: dict[str, Any], used: set[int] | None) -> float | None:
    scale = 10.0 ** int(kwargs.get("decimals", 0))
    return _near_integer(margin, args[0] * scale, 0.5) if _is_float(args[0]) else None


def _quotient(
    margin: float, node: Node, args: list[Any], kwargs: dict[str, Any], used: set[int] | None
) -> float | None:
    if base_name(node.op) == "aten.div" and kwargs.get("rounding_mode") is None:
        return None
    if not (_is_float(args[0]) or _is_float(args[1]) or isinstance(args[1], float)):
        return None
    quotient = args[0] / args[1]
    return _near_integer(margin, quotient)


def _cast(margin: float, node: Node, args: list[Any], kwargs: dict[str, Any], used: set[int] | None) -> float | None:
    source = args[1] if base_name(node.op) == "aten.copy" else args[0]
    if node.dtype == "bool":
        return _close(margin, source, 0.0)
    return _near_integer(margin, source) if is_integer(node.dtype) else None


def _gaps(margin: float, ordered: Any, dim: int) -> float | None:
    """Smallest relative gap of neighbours along ``dim`` of sorted values, ties included."""
    size = ordered.shape[dim] if ordered.dim() else 1
    if size < 2 or ordered.numel() == 0:
        return None
    a, b = ordered.narrow(dim, 0, size - 1), ordered.narrow(dim, 1, size - 1)
    distance = torch.where(a == b, torch.zeros_like(a), (a - b).abs())
    scale = torch.maximum(a.abs(), b.abs())
    relative = torch.where(torch.isfinite(scale) & (scale > 0), distance / scale, distance)
    smallest = float(torch.nan_to_num(relative, nan=0.0, posinf=float("inf")).min())
    return smallest if smallest <= margin else None


def _argument(args: list[Any], kwargs: dict[str, Any], position: int, name: str, default: Any) -> Any:
    return args[position] if len(args) > position else kwargs.get(name, default)


def _ranking(margin: float, value: Any, k: int | None, dim: int, largest: bool) -> float | None:
    if not _is_float(value) or value.dim() == 0:
        return None
    ordered = torch.sort(value, dim=dim, descending=largest).values
    if k is not None:
        ordered = ordered.narrow(dim, 0, min(k + 1, ordered.shape[dim]))
    return _gaps(margin, ordered, dim)


def _topk(margin: float, node: Node, args: list[Any], kwargs: dict[str, Any], used: set[int] | None) -> float | None:
    if used is not None and 1 not in used:
        return None
    dim = int(_argument(args, kwargs, 2, "dim", -1))
    return _ranking(margin, args[0], int(args[1]), dim, bool(_argument(args, kwargs, 3, "largest", True)))


def _sort(margin: float, node: Node, args: list[Any], kwargs: dict[str, Any], used: set[int] | None) -> float | None:
    if base_name(node.op) == "aten.sort" and used is not None and 1 not in used:
        return None
    dim = kwargs.get("dim")
    if dim is None:
        dim = next((a for a in args[1:] if isinstance(a, int) and not isinstance(a, bool)), -1)
    return _ranking(margin, args[0], None, int(dim), True)


def _extremum(
    margin: float, node: Node, args: list[Any], kwargs: dict[str, Any], used: set[int] | None
) -> float | None:
    name = base_name(node.op)
    largest = name in ("aten.max", "aten.argmax")
    dim = _argument(args, kwargs, 1, "dim", None)
    if name in ("aten.max", "aten.min") and (not isinstance(dim, int) or (used is not None and 1 not in used)):
        return None
    value = args[0]
    if dim is None:
        value, dim = value.reshape(-1), 0
    return _ranking(margin, value, 1, int(dim), largest)


def _buckets(margin: float, node: Node, args: list[Any], kwargs: dict[str, Any], used: set[int] | None) -> float | None:
    value, edges = (args[1], args[0]) if base_name(node.op) == "aten.searchsorted" else (args[0], args[1])
    if not _is_float(value) or not isinstance(value, torch.Tensor) or edges.shape[-1] == 0:
        return None
    if edges.dim() != 1:
        return _close(margin, value.unsqueeze(-1), edges.unsqueeze(-2))
    above = torch.searchsorted(edges, value.contiguous())
    last = edges.shape[0] - 1
    found = [_close(margin, value, edges[i.clamp(0, last)]) for i in (above - 1, above)]
    return min((f for f in found if f is not None), default=None)


_CHECKERS: dict[str, _Checker] = {
    **{f"aten.{n}": _compare for n in ("eq", "ne", "lt", "le", "gt", "ge", "heaviside")},
    "hlo.compare": _compare,
    **{f"aten.{n}": _against_zero for n in ("sign", "sgn", "nonzero", "logical_not", "any", "all", "argwhere")},
    **{f"aten.{n}": _against_zero for n in ("logical_and", "logical_or", "logical_xor", "count_nonzero")},
    "aten.leaky_relu_backward": lambda m, n, a, k, u: _close(m, a[1], 0.0),
    "aten.threshold_backward": _threshold,
    "aten.threshold": lambda m, n, a, k, u: _close(m, a[0], a[1]),
    **{f"aten.{n}": _floor for n in ("floor", "ceil", "trunc", "fix", "frac")},
    "aten.round": _round,
    **{f"aten.{n}": _quotient for n in ("floor_divide", "remainder", "fmod", "div")},
    **dict.fromkeys(("aten._to_copy", "aten.to", "prims.convert_element_type", "hlo.convert", "aten.copy"), _cast),
    "aten.topk": _topk,
    "aten.sort": _sort,
    "aten.argsort": _sort,
    **{f"aten.{n}": _extremum for n in ("max", "min", "argmax", "argmin")},
    "aten.bucketize": _buckets,
    "aten.searchsorted": _buckets,
}


def describe(decisions: Decisions) -> str:
    """One line per tight decision, for messages."""
    return "; ".join(f"rank {t.rank} {t.node} ({t.op}) margin {t.margin:.1e}" for t in decisions.tight)
