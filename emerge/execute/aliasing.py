"""What an operator mutates and what its result may alias, and which mutations a graph execution can honour.

Values are executed in single-assignment form. A mutation rebinds the names that *are* the mutated tensor (the
operand and the node that returns it); a view of it, or the tensor it is a view of, would change as well, which
single assignment cannot express: reading one of those afterwards is an error, never a silent old value.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

from emerge.execute._torch import torch
from emerge.graph.model import Arg, Graph, Node, Ref, iter_refs
from emerge.util.errors import ExecutionError

#: Mutated parameters of kernels outside torch, in schema order: name -> (parameters in order, mutated ones).
KERNEL_SCHEMAS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "_C.rms_norm": (("result", "input", "weight", "epsilon"), ("result",)),
    "_C.fused_add_rms_norm": (("input", "residual", "weight", "epsilon"), ("input", "residual")),
    "_C.silu_and_mul": (("out", "input"), ("out",)),
    "_C.gelu_and_mul": (("out", "input"), ("out",)),
    "_C.gelu_tanh_and_mul": (("out", "input"), ("out",)),
    "_C.rotary_embedding": (
        ("positions", "query", "key", "head_size", "cos_sin_cache", "is_neox"),
        ("query", "key"),
    ),
}

#: Collectives outside torch's own schemas (or whose schema does not say so) that write their first parameter.
_FIRST_MUTATED = {
    "_c10d_functional.all_reduce_",
    "_c10d_functional.broadcast_",
    "c10d._allgather_base_",
    "c10d._reduce_scatter_base_",
}

#: Operators outside aten whose result is (an element of) their first operand.
_PASS_THROUGH = {"operator.getitem", "_c10d_functional.wait_tensor", "hlo.reshape"}


#: Operators that return their first operand itself where they have nothing to do, which their schemas do not say.
_DROPOUTS = {"aten.dropout", "aten.feature_dropout", "aten.alpha_dropout", "aten.feature_alpha_dropout"}
_MAY_RETURN_OPERAND = {
    *("aten.type_as", "aten.broadcast_tensors", "aten.meshgrid"),
    *("aten.atleast_1d", "aten.atleast_2d", "aten.atleast_3d"),
}


@dataclass(frozen=True, slots=True)
class Effects:
    """What an operator writes and what its result may be.

    Attributes:
        mutates: names it writes to.
        aliases: names its result may share memory with.
        returns: the written names that it returns.
        slots: argument positions and keywords that are written to.
    """

    mutates: tuple[str, ...] = ()
    aliases: tuple[str, ...] = ()
    returns: tuple[str, ...] = ()
    slots: tuple[int | str, ...] = ()

    @property
    def in_place(self) -> bool:
        """True where the result is the one tensor that was written, as in ``add_``."""
        return len(self.mutates) == 1 and self.mutates == self.returns


@cache
def split_op(op: str) -> tuple[str, str, str]:
    """``aten.add.Tensor`` -> (``aten``, ``add``, ``Tensor``); missing parts are ``""`` / ``default``."""
    namespace, _, rest = op.removeprefix("_").partition(".") if op.startswith("_operator.") else op.partition(".")
    name, _, overload = rest.partition(".")
    return namespace, name, overload or "default"


@cache
def resolve(op: str) -> Any | None:
    """The torch operator of that name, or None when this torch has none (or it is not an ATen/prims operator)."""
    namespace, name, overload = split_op(op)
    if namespace not in ("aten", "prims"):
        return None
    packet = getattr(getattr(torch.ops, namespace), name, None)
    return getattr(packet, overload, None) if packet is not None else None


def effects(node: Node) -> Effects:
    """Mutation and aliasing of one node, from torch's schema or the kernel table."""
    namespace, name, _ = split_op(node.op)
    base = f"{namespace}.{name}"
    if base in _PASS_THROUGH:
        return Effects(aliases=tuple(iter_refs(node.args[:1])))
    if base in _FIRST_MUTATED:
        target = tuple(iter_refs(node.args[:1]))
        return Effects(mutates=target, aliases=target, returns=target, slots=(0,))
    if base in KERNEL_SCHEMAS:
        parameters, mutated = KERNEL_SCHEMAS[base]
        bound: dict[str, Arg] = {**dict(zip(parameters, node.args)), **node.kwargs}
        slots = [m if m in node.kwargs else parameters.index(m) for m in mutated if m in bound]
        return Effects(mutates=tuple(iter_refs([bound[m] for m in mutated if m in bound])), slots=tuple(slots))
    if base in _MAY_RETURN_OPERAND or (base in _DROPOUTS and _idle(node)):
        return Effects(aliases=tuple(iter_refs(node.args)))
    if base == "aten.einsum" and len(list(node.refs())) == 1:
        return Effects(aliases=tuple(node.refs()))
    out = node.kwargs.get("out")
    if namespace == "_c10d_functional" and isinstance(out, Ref):
        return Effects(mutates=(out.name,), aliases=(out.name,), returns=(out.name,), slots=("out",))
    operator = resolve(node.op)
    return _schema_effects(node, operator._schema) if operator is not None else Effects()


def _idle(node: Node) -> bool:
    """True for a dropout call that keeps every element."""
    p = node.args[1] if len(node.args) > 1 else node.kwargs.get("p", 0.5)
    train = node.args[2] if len(node.args) > 2 else node.kwargs.get("train", True)
    return p == 0 or train is False


def _schema_effects(node: Node, schema: Any) -> Effects:
    mutates: list[str] = []
    aliases: list[str] = []
    returned: list[str] = []
    slots: list[int | str] = []
    out_sets = {s for r in schema.returns if r.alias_info is not None for s in r.alias_info.before_set}
    for position, parameter in enumerate(schema.arguments):
        if parameter.alias_info is None:
            continue
        given = node.kwargs.get(parameter.name)
        if given is None and not parameter.kwarg_only and position < len(node.args):
            given = node.args[position]
        names = list(iter_refs([given]))
        if parameter.alias_info.is_write:
            mutates += names
            slots.append(parameter.name if parameter.name in node.kwargs else position)
            if out_sets & set(parameter.alias_info.before_set):
                returned += names
        if out_sets:
            aliases += names
    return Effects(tuple(mutates), tuple(aliases), tuple(returned), tuple(slots))


def _copies(node: Node, declared: dict[str, Any], source: str) -> bool:
    """True where a may-alias operator certainly made a copy: a cast that changes the dtype."""
    return (
        split_op(node.op)[1] in ("to", "type_as")
        and node.dtype is not None
        and source in declared
        and declared[source].dtype != node.dtype
    )


def roots(graph: Graph) -> dict[str, str]:
    """Representative of the storage each name may live in (names that may share memory have the same one)."""
    parent: dict[str, str] = {i.name: i.name for i in graph.inputs}

    def find(name: str) -> str:
        while parent.setdefault(name, name) != name:
            parent[name] = parent[parent[name]]
            name = parent[name]
        return name

    declared = graph.types()
    for node in graph.nodes:
        parent.setdefault(node.name, node.name)
        for source in effects(node).aliases:
            if not _copies(node, declared, source):
                parent[find(node.name)] = find(source)
    return {name: find(name) for name in list(parent)}


def check_mutations(graph: Graph) -> dict[str, Effects]:
    """Effects of the mutating nodes, after checking that single assignment can express all of them.

    Raises:
        ExecutionError: a name is read (or is an output) after a view of it, or the tensor it is a view of, was
            written in place; the capture has to functionalise first.
    """
    mutating = {n.name: e for n in graph.nodes if (e := effects(n)).mutates}
    if not mutating:
        return {}
    root = roots(graph)
    members: dict[str, list[str]] = {}
    same: dict[str, set[str]] = {}
    stale: dict[str, tuple[str, str]] = {}
    for name in (i.name for i in graph.inputs):
        members.setdefault(root[name], []).append(name)
        same[name] = {name}

    def refuse(reader: str, name: str) -> ExecutionError:
        writer, written = stale[name]
        return ExecutionError(
            f"reads '{name}' after node '{writer}' wrote '{written}' in place, which may share its memory; "
            "functionalise the graph when capturing it",
            place=f"{graph.path or graph.name}: {reader}",
            node=writer,
        )

    for node in graph.nodes:
        for name in node.refs():
            if name in stale:
                raise refuse(f"node '{node.name}'", name)
        effect = mutating.get(node.name)
        same[node.name] = {node.name}
        for written in effect.mutates if effect is not None else ():
            if effect is not None and effect.in_place:
                same[written].add(node.name)
                same[node.name] = same[written]
            for other in members.get(root[written], ()):
                if other not in same[written]:
                    stale[other] = (node.name, written)
        members.setdefault(root[node.name], []).append(node.name)
    for output in graph.outputs:
        if output is not None and output in stale:
            raise refuse(f"output '{output}'", output)
    return mutating


def identities(graph: Graph, mutating: dict[str, Effects]) -> dict[str, set[str]]:
    """For every name the set of names that are the very same tensor (an operand and the in-place node on it)."""
    same: dict[str, set[str]] = {}
    for node in graph.nodes:
        effect = mutating.get(node.name)
        if effect is None or not effect.in_place:
            continue
        group = same.setdefault(effect.mutates[0], {effect.mutates[0]})
        group.add(node.name)
        same[node.name] = group
    return same
