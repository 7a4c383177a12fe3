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
from emerge.graph.model import Graph, Node, iter_refs

#: Operators that give no infinity for finite operands, if numbers have no end.
_FINITE = {
    *("exp", "exp2", "expm1", "sinh", "cosh", "mul", "square", "add", "sub", "rsub", "mm", "bmm", "addmm", "baddbmm"),
    *("matmul", "einsum", "sum", "prod", "cumsum", "cumprod", "dot", "mv", "linear", "mean", "addcmul"),
}
#: Those that are 0 for no finite operand but 0 itself.
_NONZERO = {"exp", "exp2", "mul", "square", "div", "reciprocal"}
#: Below this an exponent is a mask, not a number (DESIGN: values).
_MASK = -60000.0


def out_of_range(graph: Graph, values: Mapping[str, Any], small: bool) -> str | None:
    """The first node whose value overflowed; with ``small`` also one that became 0. None where there is none.

    Args:
        values: of every node and input of the run, by name.
    """
    for node in graph.nodes:
        result = values.get(node.name)
        if not isinstance(result, torch.Tensor) or result.dtype != torch.float64 or not result.numel():
            continue
        operator = base_name(node.op).removeprefix("aten.")
        operands = [v for v in _operands(node, values) if isinstance(v, torch.Tensor) and v.is_floating_point()]
        if operator == "pow" and operands and bool((operands[0] == 0).any()):
            continue
        endless = operator in _FINITE or operator == "pow"
        if endless and bool(torch.isinf(result).any()) and not _were_infinite(operands, result):
            return node.name
        by_zero = any(isinstance(a, (int, float)) and a == 0 for a in node.args)
        if small and operator in _NONZERO and not by_zero and _from_nonzero(operator, operands, result):
            return node.name
    return None


def _operands(node: Node, values: Mapping[str, Any]) -> Iterable[Any]:
    for arg in (node.args, list(node.kwargs.values())):
        yield from (values.get(name) for name in iter_refs(arg))


def _were_infinite(operands: list[Any], result: Any) -> bool:
    """Whether every infinity of the result may come from one of an operand."""
    if all(x.shape == result.shape or x.numel() == 1 for x in operands):
        before = torch.zeros(result.shape, dtype=torch.bool)
        for x in operands:
            before = before | ~torch.isfinite(x.cpu())
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
