"""Inputs that feed a norm: what has to be small so that the eps inside it shows.

A norm divides by ``sqrt(mean(x^2) + eps)``. With weights of unit size ``x`` is of unit size and eps moves nothing;
with everything small the rest of the model hides what the norm does. So only that is made small which is added up into
``x``: tables and biases, and the weights of the products whose results are added up.
"""

from __future__ import annotations

from emerge.execute.aliasing import split_op
from emerge.graph.model import Graph, Node, Ref, is_floating, iter_refs

_NORMS = {
    *("native_layer_norm", "layer_norm", "rms_norm", "_fused_rms_norm", "native_group_norm", "group_norm"),
    *("fused_layer_norm_affine_fwd", "fused_rms_norm_affine_fwd", "fused_add_rms_norm"),
}
_PRODUCTS = {"mm", "bmm", "addmm", "baddbmm", "linear", "matmul", "einsum", "dot", "mv", "addmv"}
#: A literal up to this size that is added before a root or a reciprocal counts as an eps.
LARGEST_EPS = 1e-2
_ROOTS = {"rsqrt", "sqrt", "reciprocal", "pow"}
#: Operators that only rearrange, cast or move a weight.
_HANDED_ON = {
    *("view", "reshape", "_unsafe_view", "transpose", "t", "permute", "clone", "detach", "alias", "_to_copy", "to"),
    *("contiguous", "unsqueeze", "squeeze", "expand", "slice", "split", "split_with_sizes", "chunk", "getitem", "cat"),
    *("wait_tensor", "all_gather_into_tensor", "broadcast", "select", "convert_element_type", "copy"),
}


def norm_feeders(graph: Graph) -> frozenset[str]:
    """Floating inputs without stored value whose size sets the size of what some norm of the graph normalises."""
    nodes = {n.name: n for n in graph.nodes}
    inputs = {i.name for i in graph.inputs if i.const is None and is_floating(i.dtype)}
    pending = [ref for node in graph.nodes for ref in _normalised(node, graph)]
    seen: set[str] = set()
    found: set[str] = set()
    while pending:
        name = pending.pop()
        if name in seen:
            continue
        seen.add(name)
        if name in inputs:
            found.add(name)
        node = nodes.get(name)
        if node is None:
            continue
        operands = list(dict.fromkeys(node.refs()))
        kind = split_op(node.op)[1]
        if kind in _NORMS:
            operands = operands[1:]  # whatever goes in, what comes out has the size of its weight
        elif kind in _PRODUCTS:
            weights = {w for ref in operands for w in [_weight(ref, nodes, inputs)] if w is not None}
            found |= weights
            operands = [] if weights else operands
        pending += operands
    return frozenset(found)


def _normalised(node: Node, graph: Graph) -> list[str]:
    """Operands of a node whose size decides whether its eps shows."""
    kind = split_op(node.op)[1]
    if kind in _NORMS:
        # In-place kernels write their first operand and read the others.
        return list(iter_refs(node.args[:2] if kind == "fused_add_rms_norm" else node.args[:1]))
    if kind not in ("add", "add_") or len(node.args) < 2:
        return []
    numbers = [a for a in node.args if isinstance(a, float) and 0 < abs(a) <= LARGEST_EPS]
    if not numbers or not any(split_op(n.op)[1] in _ROOTS and node.name in n.refs() for n in graph.nodes):
        return []
    return list(iter_refs(node.args))


def _weight(name: str, nodes: dict[str, Node], inputs: set[str]) -> str | None:
    """The input that a tensor is a rearrangement of; None where it is computed."""
    for _ in range(len(nodes) + 1):
        if name in inputs:
            return name
        node = nodes.get(name)
        if node is None or split_op(node.op)[1] not in _HANDED_ON or not node.args:
            return None
        first = node.args[0][0] if isinstance(node.args[0], list) and node.args[0] else node.args[0]
        if not isinstance(first, Ref):
            return None
        name = first.name
    return None
