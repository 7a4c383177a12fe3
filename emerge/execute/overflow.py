"""Where float64 left its range: such a sample says nothing about the extended reals that programs are compared over.

``exp(800)`` is a number and float64 has none for it. A program that divides it away again (a softmax without its maximum
taken off) is right, and its execution gives NaN. Infinities that were there before (masks), poles (``1 / 0``, ``log 0``) and
casts are no overflow. Subgraphs of constants run in their own types and do what they do there.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from emerge.execute._torch import torch
from emerge.execute.decisions import base_name
from emerge.execute.prune import needed_names
from emerge.graph.model import Graph, Node

#: Operators that give no infinity for finite operands, if numbers have no end; quotients by 0 aside.
_FINITE = {
    *("exp", "exp2", "expm1", "sinh", "cosh", "mul", "square", "add", "sub", "rsub", "mm", "bmm", "addmm", "baddbmm"),
    *("matmul", "einsum", "sum", "prod", "cumsum", "cumprod", "dot", "mv", "linear", "mean", "addcmul", "pow"),
    *("linalg_vector_norm", "norm", "var", "std", "var_mean", "mse_loss", "div", "reciprocal", "native_layer_norm"),
}
#: Those that are 0 for no finite operand but 0 itself.
_NONZERO = {"exp", "exp2", "mul", "square", "div", "reciprocal", "pow", "sigmoid", "_softmax", "softmax"}
#: Those that reach 0, 1 or -1 for no finite operand but 0.
_SATURATING = {"tanh": (1.0, -1.0), "sigmoid": (1.0,), "erf": (1.0, -1.0)}
#: Sums, with the signs of their terms: a term that leaves no trace was rounded away.
_SUMS = {"add": (1, 1), "sub": (1, -1), "rsub": (-1, 1)}
#: Below this an exponent is a mask, not a number (DESIGN: values).
_MASK = -60000.0


def out_of_range(graph: Graph, values: Mapping[str, Any], small: bool, roots: Iterable[str] = ()) -> str | None:
    """The first node whose value overflowed; with ``small`` also one that became 0, 1 or an operand of a sum by rounding.

    Args:
        values: of every node and input of the run, by name.
        roots: only what these read is looked at; none = everything.
    """
    read = needed_names(graph, roots, collectives=False)
    for node in graph.nodes:
        result = values.get(node.name)
        if read and node.name not in read:
            continue
        if not isinstance(result, torch.Tensor) or result.dtype != torch.float64 or not result.numel():
            continue
        operator = base_name(node.op).removeprefix("aten.")
        operands = [v for v in map(values.get, node.refs()) if isinstance(v, torch.Tensor) and not v.is_complex()]
        if operator in _FINITE and bool(torch.isinf(result).any()) and not _were_infinite(operator, operands, result):
            return node.name
        if small and _rounded_away(node, operator, operands, result):
            return node.name
    return None


def _rounded_away(node: Node, operator: str, operands: list[Any], result: Any) -> bool:
    """Whether an element is a number that no finite operand gives, or a term of a sum left no trace."""
    by_zero = any(isinstance(a, (int, float)) and a == 0 for a in node.args)
    if operator in _NONZERO and not by_zero and _from_nonzero(operator, operands, result):
        return True
    if operator in _SATURATING and operands:
        reached = torch.isin(result, torch.tensor(_SATURATING[operator], dtype=result.dtype, device=result.device))
        return bool((reached & torch.isfinite(operands[0])).any())
    if operator not in _SUMS or not operands:
        return False
    terms = [*operands, *(torch.tensor(float(a)) for a in node.args if isinstance(a, (int, float)))]
    if len(terms) != 2:
        return False
    x, y = (t.to(result.device, torch.float64) for t in terms)
    numbers = torch.isfinite(x) & torch.isfinite(y) & (x != 0) & (y != 0) & (x > _MASK) & (y > _MASK)
    left, right = (sign * t for sign, t in zip(_SUMS[operator], (x, y)))
    return bool((numbers & ((result == left) | (result == right))).any())


def _were_infinite(operator: str, operands: list[Any], result: Any) -> bool:
    """Whether every infinity of the result may come from one of an operand, or from a division by 0."""
    poles = operator in ("div", "reciprocal", "pow")
    if poles and any(x.shape != result.shape and x.numel() != 1 for x in operands):
        try:
            operands = list(torch.broadcast_tensors(result, *operands)[1:])
        except RuntimeError:
            return True
    if all(x.shape == result.shape or x.numel() == 1 for x in operands):
        before = torch.zeros(result.shape, dtype=torch.bool)
        for x in operands:
            before = before | ~torch.isfinite(x.cpu()) | ((x.cpu() == 0) if poles else False)
        return bool((before | ~torch.isinf(result.cpu())).all())
    return not all(bool(torch.isfinite(x).all()) for x in operands)


def _from_nonzero(operator: str, operands: list[Any], result: Any) -> bool:
    """Whether an element is 0 although no operand is, nor infinite, nor a mask."""
    try:
        shapes = torch.broadcast_tensors(result, *operands)[1:]
    except RuntimeError:
        return False
    plain = torch.ones(result.shape, dtype=torch.bool, device=result.device)
    for x in shapes:
        plain = plain & torch.isfinite(x)
        plain = plain & ((x > _MASK) if operator in ("exp", "exp2") else (x != 0))
    return bool((plain & (result == 0)).any())
