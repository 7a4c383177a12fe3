"""Functional operators without a signature of their own: uninterpreted functions.

Equal operands in identical layout and identical attributes give equal results; nothing else is known. Only for ATen
operators that are deterministic and write nothing; any other unknown operator is a fresh unknown on each side.
"""

from __future__ import annotations

import re
from typing import Any

from emerge.facts.families import FamilyNode
from emerge.facts.lower import Iter, Lowering, Multi, Tensor, Unsupported, whole
from emerge.facts.mutation import written
from emerge.graph.model import TensorType, TypedConst

_RANDOM = re.compile(
    r"^aten\.(_?dropout|.*dropout.*|bernoulli|rand.*|normal.*|multinomial|poisson|exponential|cauchy|geometric|log_normal|"
    r"uniform.*|rrelu.*|.*_fused_attention.*|_local_scalar_dense|empty.*|new_empty.*|resize.*|set.*|nonzero.*|unique.*|masked_select.*|"
    r"_scaled_dot_product.*|scaled_dot_product.*|.*rnn.*|.*backward.*|.*batch_norm.*|.*instance_norm.*)"
)


def is_functional(node: FamilyNode) -> bool:
    """True for deterministic ATen operators that write to none of their operands."""
    base = node.op.rpartition(".")[0]
    return base.startswith("aten.") and not written(node) and not _RANDOM.match(base) and "out" not in node.kwargs


def uninterpreted(low: Lowering, node: FamilyNode, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """The node as an uninterpreted function of its operands.

    Raises:
        Unsupported: an operand is not a tensor of known shape.
    """
    operands: list[Tensor] = []

    def text(value: Any) -> str:
        if isinstance(value, Tensor):
            operands.append(value)
            return f"%{len(operands) - 1}"
        if isinstance(value, Multi):
            raise Unsupported("reads several results at once")
        if isinstance(value, list):
            return "[" + ",".join(text(v) for v in value) + "]"
        if isinstance(value, TypedConst):
            return ""
        return repr(value)

    attributes = ",".join(text(a) for a in args) + ";" + ",".join(f"{k}={text(v)}" for k, v in sorted(kwargs.items()))

    def output(i: int, kind: TensorType) -> Tensor:
        if any(not isinstance(n, int) for n in kind.shape):
            raise Unsupported("its shape depends on data")
        shape = [int(n) for n in kind.shape]
        iters = [Iter(n, "pos", whole(n, d)) for d, n in enumerate(shape)]
        for k, t in enumerate(operands):
            iters += [Iter(n, "o", (), ((k, whole(n, d)),)) for d, n in enumerate(t.shape)]
        return low.op(f"{node.op}#{i}#{attributes}#{shape}", "uninterpreted", operands, iters, shape, kind.dtype)

    if node.is_tuple:
        return Multi(lambda i: output(i, node.elements[i]))
    if node.dtype is None or node.shape is None:
        raise Unsupported("has no tensor result")
    return output(0, TensorType(node.dtype, node.shape))
