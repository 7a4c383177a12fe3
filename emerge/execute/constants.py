"""Which nodes depend on constants and integer inputs only.

Rotary tables, attention masks and ALiBi slopes are computed from constants and positions. Their recorded types
are part of what the program means (an fp32 rotary table is 3e-4 away from its float64 formula at position 8192),
so these sub-graphs run in the recorded types on both sides and are widened where other values meet them.
"""

from __future__ import annotations

from functools import cache

from emerge.execute.aliasing import effects, resolve, split_op
from emerge.graph.model import Graph, Node, Ref, is_integer

#: The result depends on the shape and type of the operand, not on its values.
SHAPE_ONLY = {
    *(f"aten.{n}" for n in ("zeros_like", "ones_like", "full_like", "new_zeros", "new_ones", "new_full", "sym_size")),
    *(f"aten.{n}" for n in ("zero", "zero_", "sym_numel", "sym_stride", "size")),
}

#: The first operand is overwritten completely; only the second one is read.
_OVERWRITES = {"aten.fill", "aten.fill_", "aten.copy", "aten.copy_"}

UNINITIALISED = {
    f"aten.{n}" for n in ("empty", "empty_like", "new_empty", "new_empty_strided", "empty_strided", "empty_permuted")
}

#: Operators that hand elements of their operands on (or their sign) and round nothing.
EXACT = {
    *SHAPE_ONLY,
    *UNINITIALISED,
    *(
        f"aten.{n}"
        for n in ("clone", "copy", "_to_copy", "to", "cat", "stack", "index", "index_select", "gather", "flip")
    ),
    *(f"aten.{n}" for n in ("embedding", "where", "masked_fill", "max", "min", "amax", "amin", "maximum", "minimum")),
    *(f"aten.{n}" for n in ("topk", "sort", "relu", "clamp", "neg", "abs", "sign", "slice_scatter", "select_scatter")),
    *(f"aten.{n}" for n in ("index_put", "scatter", "repeat", "roll", "tril", "triu", "fill", "zeros", "ones", "full")),
    *(f"aten.{n}" for n in ("scalar_tensor", "lift_fresh_copy", "constant_pad_nd", "slice_backward", "floor", "round")),
    *(f"aten.{n}" for n in ("ceil", "trunc", "arange", "_foreach_neg", "repeat_interleave", "masked_select")),
    *(f"hlo.{n}" for n in ("reshape", "broadcast", "transpose", "slice", "concatenate", "select", "gather", "copy")),
    *(f"hlo.{n}" for n in ("maximum", "minimum", "negate", "convert", "constant", "iota", "abs", "all_reduce")),
    "get_attr",
    "operator.getitem",
}

_RANDOM = {"aten.native_dropout", "aten.dropout", "aten.dropout_"}


@cache
def is_random(op: str) -> bool:
    """True for operators that draw from a random generator."""
    namespace, name, _ = split_op(op)
    if f"{namespace}.{name}" in _RANDOM:
        return True
    operator = resolve(op)
    return operator is not None and any(str(t).endswith("nondeterministic_seeded") for t in operator.tags)


def const_subgraph(graph: Graph) -> set[str]:
    """Names of inputs and nodes that depend on constants, literals and integer or boolean inputs only.

    Uninitialised memory, random operators and floating results of communication are not constant. An integer or
    boolean collective is constant when its operand is (token ids that are broadcast).
    """
    const = {i.name for i in graph.inputs if i.const is not None or is_integer(i.dtype)}
    for node in graph.nodes:
        namespace, name, _ = split_op(node.op)
        base = f"{namespace}.{name}"
        if base in UNINITIALISED or is_random(node.op) or not _may_be_constant(node, namespace, name):
            continue
        if base in SHAPE_ONLY:
            read: list[str] = []
        elif base in _OVERWRITES:
            read = [a.name for a in node.args[1:2] if isinstance(a, Ref)]
        else:
            read = list(node.refs())
        if all(r in const for r in read):
            const.add(node.name)
        elif namespace in ("aten", "_C", "_c10d_functional", "c10d"):
            # A constant that is overwritten with something else is no constant any more.
            const.difference_update(effects(node).mutates)
    return const


def _may_be_constant(node: Node, namespace: str, name: str) -> bool:
    communicates = namespace in ("_c10d_functional", "c10d", "vllm", "_dtensor")
    communicates |= namespace == "hlo" and name == "all_reduce"
    if not communicates or name == "wait_tensor":
        return True
    return is_integer(node.dtype) and name not in ("irecv", "isend")
