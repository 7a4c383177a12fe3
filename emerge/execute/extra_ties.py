"""Ties of axes that running a graph needs and the lowered facts do not hold.

Ignored operands (the memory that ``copy`` overwrites), sources of ``*_like``, positions that index a dimension, and
operators without a signature whose shapes are nevertheless plain: they have no meaning in the derivation, yet their
axes may shrink.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from emerge.execute.aliasing import split_op
from emerge.execute.axes import Tie, broadcast_ties
from emerge.facts.families import FamilyNode, RankVector
from emerge.facts.lower import Lowering, Multi, Tensor
from emerge.graph.model import Ref

#: Operators without a signature that work element by element on operands broadcast from the right, or along whole axes.
_SAME_SHAPE = {
    *(
        "gelu_backward",
        "silu_backward",
        "sigmoid_backward",
        "tanh_backward",
        "threshold_backward",
        "_softmax_backward_data",
    ),
    *(
        "_log_softmax_backward_data",
        "native_dropout_backward",
        "where",
        "masked_fill",
        "clamp",
        "add",
        "sub",
        "mul",
        "div",
    ),
    *("all_reduce", "broadcast", "all_reduce_", "pow", "detach", "clone", "rsub", "maximum", "minimum", "lerp"),
}


def node_ties(node: FamilyNode, low: Lowering) -> list[Tie]:
    """Ties that the values of an operator do not need but running it does: ignored operands, ``*_like`` sources."""
    name = split_op(node.op)[1].rstrip("_")
    args = [low.tensors.get(a.name) if isinstance(a, Ref) else a for a in node.args]
    out = low.tensors.get(node.name)
    pairs: list[tuple[object, object]] = []
    if name in (
        "copy",
        "baddbmm",
        "addmm",
        "addmv",
        "fill",
        "zero",
        "slice_scatter",
        "select_scatter",
    ) or name.endswith("_like"):
        pairs.append((args[0] if args else None, out))
    elif name == "native_dropout" and isinstance(out, Multi):
        # Without a mask to draw, both outputs are lowered as other tensors.
        pairs += [(args[0], t) for t in out.made.values()]
    elif name in ("expand_as", "view_as", "type_as", "masked_fill", "where", "index_put", "masked_scatter"):
        pairs += [(a, out) for a in args]
    if name in ("index", "index_put", "_unsafe_index") and len(node.args) > 1 and isinstance(node.args[1], list):
        indices = [low.tensors.get(i.name) if isinstance(i, Ref) else None for i in node.args[1]]
        used = [i for i in indices if isinstance(i, Tensor)]
        pairs += list(pairwise(used))
    ties: list[Tie] = []
    for a, b in pairs:
        if isinstance(a, Tensor) and isinstance(b, Tensor):
            if name in ("slice_scatter", "select_scatter") and a.shape != b.shape:
                continue
            ties += broadcast_ties(a.id, a.shape, b.id, b.shape)
    if (
        name in ("index", "index_put", "_unsafe_index")
        and args
        and isinstance(args[0], Tensor)
        and isinstance(node.args[1], list)
    ):
        for d, i in enumerate(indices):
            if isinstance(i, Tensor) and low.is_range(i, args[0].shape[d]) and i.shape[0] > 1:
                ties.append((i.id, 0, 1, args[0].id, d, 1, i.shape[0]))
    return ties


@dataclass
class PlainTies:
    """Ties of an operator without signature, and (tensor, dim, stride) from which its axes keep their length."""

    ties: list[Tie] = field(default_factory=list)
    outer: list[tuple[int, int, int]] = field(default_factory=list)


def plain_ties(node: FamilyNode, low: Lowering) -> PlainTies | None:
    """How the axes of an operator without signature correspond, where its shapes say so; None where they do not."""
    name = split_op(node.op)[1]
    out = low.tensors.get(node.name)
    operands = [low.tensors.get(a.name) if isinstance(a, Ref) else None for a in node.args]
    tensors = [t for t in operands if isinstance(t, Tensor)]
    if name == "fused_layer_norm_affine_bwd":
        return _norm_backward(operands, out)
    if name == "index_put" and isinstance(out, Tensor):
        return _written(node, low, out)
    if not isinstance(out, Tensor) or len(tensors) != len(list(node.refs())):
        return None
    if name in _SAME_SHAPE:
        found = PlainTies()
        for t in tensors:
            if any(a not in (b, 1) for a, b in zip(t.shape[::-1], out.shape[::-1])):
                return None
            found.ties += broadcast_ties(t.id, t.shape, out.id, out.shape)
        return found
    if name in ("slice", "narrow") and len(tensors) == 1:
        return _pieces(tensors[0], out, _slice_starts(node, name, tensors[0]))
    if name.startswith("all_gather_into_tensor") and len(tensors) == 1:
        return _pieces(out, tensors[0], 0)
    if name.startswith("reduce_scatter_tensor") and len(tensors) == 1:
        return _pieces(tensors[0], out, 0)
    return None


def _slice_starts(node: FamilyNode, name: str, whole: Tensor) -> int | None:
    """The dimension of a slice whose start is, on every rank, a multiple of its length; None where it is none."""
    dim = node.args[1] if len(node.args) > 1 else 0
    start: Any = node.args[2] if len(node.args) > 2 else 0
    if not isinstance(dim, int) or node.shape is None or not -len(whole.shape) <= dim < len(whole.shape):
        return None
    d = dim % len(whole.shape)
    size = node.shape[d]
    starts = start.values if isinstance(start, RankVector) else (start or 0,)
    step = node.args[4] if name == "slice" and len(node.args) > 4 else 1
    if (
        step != 1
        or not isinstance(size, int)
        or not size
        or any(not isinstance(s, int) or s < 0 or s % size for s in starts)
    ):
        return None
    return d


def _pieces(whole: Tensor, part: Tensor, d: int | None) -> PlainTies | None:
    """``part`` is one of the equal pieces of dimension ``d`` of ``whole``."""
    if d is None or len(whole.shape) != len(part.shape) or not part.shape or whole.shape[d] % part.shape[d]:
        return None
    if any(a != b for k, (a, b) in enumerate(zip(whole.shape, part.shape)) if k != d):
        return None
    ties = [(whole.id, k, 1, part.id, k, 1, n) for k, n in enumerate(part.shape) if n > 1]
    return PlainTies(ties, [(whole.id, d, part.shape[d])])


def _written(node: FamilyNode, low: Lowering, out: Tensor) -> PlainTies | None:
    """``x[i, j, ...] = v`` with integer index tensors of one dimension over the first dimensions of ``x``."""
    x, value = (low.tensors.get(a.name) if isinstance(a, Ref) else None for a in (node.args[0], node.args[2]))
    listed = node.args[1] if isinstance(node.args[1], list) else []
    indices = [low.tensors.get(i.name) if isinstance(i, Ref) else None for i in listed]
    if not isinstance(x, Tensor) or not isinstance(value, Tensor) or x.shape != out.shape or not indices:
        return None
    if any(not isinstance(i, Tensor) or i.dtype == "bool" or len(i.shape) != 1 for i in indices):
        return None
    found = PlainTies(broadcast_ties(x.id, x.shape, out.id, out.shape))
    first = indices[0]
    assert isinstance(first, Tensor)
    picked = (*first.shape, *x.shape[len(indices) :])
    if value.shape == picked:
        found.ties += [(value.id, 0, 1, first.id, 0, 1, first.shape[0])]
        rest = x.shape[len(indices) :]
        found.ties += [(value.id, 1 + k, 1, x.id, len(indices) + k, 1, n) for k, n in enumerate(rest)]
    elif value.shape != ():
        return None
    return found


def _norm_backward(operands: list[Any], out: Any) -> PlainTies | None:
    """Apex layer norm backward: (grad, mean, 1/std, x, shape, weight, bias, eps) -> grads of x, weight and bias."""
    if not isinstance(out, Multi) or len(operands) < 7:
        return None
    grad, mean, inverse, x, _, weight, bias = operands[:7]
    if not all(isinstance(t, Tensor) for t in (grad, mean, inverse, x, weight, bias)):
        return None
    found = PlainTies(broadcast_ties(grad.id, grad.shape, x.id, x.shape))
    for t in (weight, bias):
        found.ties += broadcast_ties(t.id, t.shape, x.id, x.shape)
    for rows in (mean, inverse):
        stride = 1
        for d in reversed(range(len(x.shape) - len(weight.shape))):
            if x.shape[d] > 1:
                found.ties.append((rows.id, 0, stride, x.id, d, 1, x.shape[d]))
            stride *= x.shape[d]
        if rows.shape != (stride,):
            return None
    for i, source in enumerate((x, weight, bias)):
        made = out.made.get(i)
        if made is not None:
            found.ties += broadcast_ties(made.id, made.shape, source.id, source.shape)
    return found
