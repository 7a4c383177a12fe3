"""Writes in place, seen from a graph in single-assignment form.

An in-place operator gives its operand's name the new value. Every other name that may share memory with the operand (a
view of it, or the tensor it is a view of) has changed as well, which single assignment cannot say: reading such a name
afterwards is refused. Sharing is over-approximated by operator names, so this needs no framework.
"""

from __future__ import annotations

from collections.abc import Iterable

from emerge.facts.families import FamilyNode
from emerge.graph.model import iter_refs

#: Operators whose result may share memory with their first operand.
MAY_ALIAS = {
    "aten.view", "aten.reshape", "aten._unsafe_view", "aten.flatten", "aten.unflatten", "aten.view_as", "aten.squeeze",
    "aten.unsqueeze", "aten._reshape_alias", "aten.ravel", "aten.reshape_as", "aten.transpose", "aten.t", "aten.permute",
    "aten.numpy_T", "aten.mT", "aten.movedim", "aten.swapaxes", "aten.swapdims", "aten.expand", "aten.expand_as",
    "aten.broadcast_to", "aten.slice", "aten.narrow", "aten.select", "aten.split", "aten.split_with_sizes", "aten.chunk",
    "aten.tensor_split", "aten.unbind", "aten.detach", "aten.alias", "aten.contiguous", "aten.to", "aten.as_strided",
    "aten.view_as_real", "aten.view_as_complex", "aten.diagonal", "aten.unfold", "aten.lift_fresh", "aten.real",
    "aten.type_as", "aten.float", "aten.half", "aten.bfloat16", "operator.getitem", "_c10d_functional.wait_tensor",
    "aten.positive", "aten.dropout", "aten.feature_dropout", "aten.alpha_dropout", "aten.conj", "aten.resolve_conj",
    "aten.resolve_neg", "aten.broadcast_tensors", "aten.meshgrid", "aten.atleast_1d", "aten.atleast_2d", "aten.atleast_3d",
    "aten.hsplit", "aten.vsplit", "aten.dsplit", "aten.swapaxes_", "aten.squeeze_", "aten.unsqueeze_", "aten.transpose_",
    "aten.pad", "aten.repeat_interleave", "aten.cat", "aten.concat", "aten.block_diag", "aten.cartesian_prod",
    "aten.einsum", "aten.matmul", "aten.type", "aten.cpu", "aten.cuda", "prims.view_of",
}  # fmt: skip

#: Operators whose result certainly has memory of its own although their value is that of an operand.
COPIES = {
    "aten.clone",
    "aten._to_copy",
    "aten.lift_fresh_copy",
    "aten.copy",
    "aten.detach_copy",
    "aten.alias_copy",
    "aten.view_copy",
}

_WRITES_FIRST = {
    "_c10d_functional.all_reduce_",
    "_c10d_functional.broadcast_",
    "c10d._allgather_base_",
    "c10d._reduce_scatter_base_",
}


def base_name(op: str) -> str:
    """``aten.add.Tensor`` -> ``aten.add``; a name without overload stays as it is."""
    return op.rpartition(".")[0] if op.count(".") > 1 else op


def written(node: FamilyNode) -> list[str]:
    """Names that a node writes to in place: operators whose name ends in ``_`` write their first operand (all of a list)."""
    base = base_name(node.op)
    name = base.rpartition(".")[2]
    in_place = base.startswith(("aten.", "prims.", "c10d.")) and name.endswith("_") and not name.endswith("__")
    if in_place or base in _WRITES_FIRST:
        return list(iter_refs(node.args[:1]))
    out = node.kwargs.get("out")
    return list(iter_refs([out])) if out is not None else []


class Storage:
    """Which names may share memory, and which are out of date."""

    def __init__(self) -> None:
        self._parent: dict[str, str] = {}
        self._members: dict[str, set[str]] = {}
        self.stale: dict[str, str] = {}

    def _root(self, name: str) -> str:
        self._members.setdefault(self._parent.setdefault(name, name), {name})
        while self._parent[name] != name:
            name = self._parent[name]
        return name

    def _join(self, a: str, b: str) -> None:
        a, b = self._root(a), self._root(b)
        if a != b:
            self._parent[b] = a
            self._members[a] |= self._members.pop(b)

    def visit(self, node: FamilyNode, same_value: Iterable[str] = ()) -> list[str]:
        """Notes sharing and writes of a node; returns the names whose value the node replaces.

        Args:
            same_value: operands of which the result is a rearrangement, by the node's lowering.
        """
        base = base_name(node.op)
        if base in MAY_ALIAS:
            for source in list(iter_refs(node.args[:1])):
                self._join(source, node.name)
        if base not in COPIES and not base.endswith("_copy"):
            for source in same_value:
                self._join(source, node.name)
        targets = written(node)
        for target in targets:
            self._join(target, node.name)
            for name in self._members[self._root(target)]:
                if name not in (target, node.name):
                    self.stale[name] = node.name
        return targets if len(targets) == 1 else self._all_stale(targets, node)

    def _all_stale(self, targets: list[str], node: FamilyNode) -> list[str]:
        """A node that writes several tensors has no one result that could stand for each of them."""
        for target in targets:
            self.stale[target] = node.name
        return []
