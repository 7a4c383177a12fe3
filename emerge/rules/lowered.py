"""The facts of a lowered graph by identifier, and the values of its tensors.

A tensor's value is the executed value of a node that has it; of an auxiliary tensor (one-hot forms, squares, scaled
terms, rearrangements in between) it is computed from the facts about the operator that made it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from fractions import Fraction
from typing import Any, NamedTuple

from emerge.facts.base import FactBase
from emerge.facts.families import FamilyGraph
from emerge.facts.lower import Lowering
from emerge.rules.bodies import NotEvaluable, evaluate_body


class Form(NamedTuple):
    """One operator form, read back from the facts.

    Attributes:
        sizes, roles: of the iteration dimensions. args: operand identifiers.
        arg_ties: operand -> (i, oi, d, od, n). out_ties: (i, oi, d, od, n).
    """

    id: int
    tensor: int
    body: str
    kind: str
    args: tuple[int, ...]
    sizes: tuple[int, ...]
    roles: tuple[str, ...]
    arg_ties: Mapping[int, list[tuple[int, int, int, int, int]]]
    out_ties: list[tuple[int, int, int, int, int]]
    scale: Fraction | None
    relocation: bool


class Lowered:
    """Indexes the facts of both sides."""

    def __init__(self, base: FactBase) -> None:
        facts = base.facts
        self.side: dict[int, int] = dict(facts["value"])
        dims: dict[int, dict[int, int]] = defaultdict(dict)
        for x, d, n in facts["extent"]:
            dims[x][d] = n
        self._dims = dims
        kinds = dict(facts["body_kind"])
        args: dict[int, dict[int, int]] = defaultdict(dict)
        for o, k, a in facts["op_arg"]:
            args[o][k] = a
        roles: dict[int, dict[int, str]] = defaultdict(dict)
        for o, i, r in facts["iter"]:
            roles[o][i] = r
        arg_ties: dict[int, dict[int, list[tuple[int, ...]]]] = defaultdict(lambda: defaultdict(list))
        for o, k, i, oi, d, od, n in facts["arg_tie"]:
            arg_ties[o][k].append((i, oi, d, od, n))
        out_ties: dict[int, list[tuple[int, ...]]] = defaultdict(list)
        for o, i, oi, d, od, n in facts["out_tie"]:
            out_ties[o].append((i, oi, d, od, n))
        scales = {o: Fraction(c) for o, c in facts["scale_op"]}
        relocations = {row[0] for row in facts["relocation"]}
        native = {o for (o,) in facts["op_native"]}
        self.forms: dict[int, Form] = {}
        self.native: dict[int, int] = {}
        for o, v, body, count in facts["op"]:
            order = range(len(roles[o]))
            self.forms[o] = Form(
                o, v, body, kinds[body], tuple(args[o][k] for k in range(count)), tuple(dims[o][i] for i in order),
                tuple(roles[o][i] for i in order), arg_ties[o], out_ties[o], scales.get(o), o in relocations,  # type: ignore[arg-type]
            )  # fmt: skip
            if o in native:
                self.native[v] = o
        self.layout: dict[int, int] = dict(facts["layout"])
        self.layout_ties: dict[int, list[tuple[int, ...]]] = defaultdict(list)
        for v, dv, ov, _, da, oa, n in facts["layout_tie"]:
            self.layout_ties[v].append((dv, ov, da, oa, n))
        self.views: dict[int, list[int]] = defaultdict(list)
        for v, a in self.layout.items():
            self.views[a].append(v)

    def shape(self, tensor: int) -> tuple[int, ...]:
        """Shape of a tensor."""
        dims = self._dims.get(tensor, {})
        return tuple(dims[d] for d in range(len(dims)))

    def view_index(self, view: int) -> tuple[Any, ...]:
        """Index arrays of the operand under a rearrangement: ``view_value = operand_value[index]``."""
        import torch

        shape, source = self.shape(view), self.shape(self.layout[view])
        index: list[Any] = [torch.zeros((), dtype=torch.int64) for _ in source]
        for dv, ov, da, oa, n in self.layout_ties[view]:
            grid = torch.arange(shape[dv]).reshape([-1 if d == dv else 1 for d in range(len(shape))])
            index[da] = index[da] + grid // ov % n * oa
        return tuple(i.expand(shape) for i in index)


class Values:
    """Values of the lowered tensors of one side, per rank."""

    def __init__(
        self, lowered: Lowered, lowering: Lowering, family: FamilyGraph, executed: list[dict[str, Any]]
    ) -> None:
        self.lowered, self.lowering, self.family, self.executed = lowered, lowering, family, executed
        self.ranks = len(executed)
        self._memo: dict[tuple[int, int], Any] = {}
        self._busy: set[tuple[int, int]] = set()

    def of_node(self, name: str, rank: int) -> Any:
        """Executed value of a family's member, None where the rank has none."""
        member = self.family.value(name).members.get(rank)
        return self.executed[rank].get(member) if member is not None else None

    def tensor(self, tensor: int, rank: int) -> Any:
        """Value of a tensor on a rank.

        Raises:
            NotEvaluable: it is not executed and nothing says how to compute it.
        """
        key = (tensor, rank)
        if key not in self._memo:
            if key in self._busy:
                raise NotEvaluable(f"tensor {tensor} depends on itself")
            self._busy.add(key)
            try:
                self._memo[key] = self._compute(tensor, rank)
            except NotEvaluable as exc:
                self._memo[key] = exc
            finally:
                self._busy.discard(key)
        found = self._memo[key]
        if isinstance(found, NotEvaluable):
            raise found
        return found

    def _compute(self, tensor: int, rank: int) -> Any:
        shape = self.lowered.shape(tensor)
        for name in self.lowering.nodes_of.get(tensor, ()):
            value = self.of_node(name, rank)
            if value is not None and hasattr(value, "shape") and tuple(value.shape) == shape:
                return value
        from_view = self._from_views(tensor, rank)
        if from_view is not None:
            return from_view
        return self.from_operator(tensor, rank)

    def from_operator(self, tensor: int, rank: int) -> Any:
        """What the facts about its operator, or its rearrangement, say that a tensor is.

        Raises:
            NotEvaluable: there are none.
        """
        if tensor in self.lowered.layout:
            return self.rearranged(tensor, rank)
        form = self.lowered.native.get(tensor)
        if form is None:
            raise NotEvaluable(f"tensor {tensor} has no operator")
        return self.form(form, rank)

    def rearranged(self, tensor: int, rank: int) -> Any:
        """A rearrangement computed from its operand."""
        source = self.tensor(self.lowered.layout[tensor], rank)
        return source[self.lowered.view_index(tensor)].expand(self.lowered.shape(tensor))

    def _from_views(self, tensor: int, rank: int) -> Any:
        """The value read back from an executed rearrangement that shows every element."""
        import torch

        shape = self.lowered.shape(tensor)
        for view in self.lowered.views.get(tensor, ()):
            for name in self.lowering.nodes_of.get(view, ()):
                value = self.of_node(name, rank)
                if value is None or tuple(value.shape) != self.lowered.shape(view):
                    continue
                index = self.lowered.view_index(view)
                if not shape:
                    return value.cpu().flatten()[0]
                seen = torch.zeros(shape, dtype=torch.bool)
                seen[index] = True
                if bool(seen.all()):
                    out = torch.empty(shape, dtype=value.dtype)
                    out[index] = value.cpu()
                    return out
        return None

    def form(self, form: int, rank: int, *, exact: bool = False) -> Any:
        """What an operator form computes from the values of its operands.

        Args:
            exact: integers and truth values are taken as int64, so that nothing wraps around.

        Raises:
            NotEvaluable: its kind has no executable meaning here.
        """
        f = self.lowered.forms[form]
        if f.kind in ("input", "unknown", "uninitialised", "collective", "rank_slice"):
            raise NotEvaluable(f"{f.body} needs an executed node")
        args = [self.tensor(a, rank) for a in f.args]
        if exact:
            masks = 1 if f.kind in ("keep", "fill", "fill0") else 0
            args = [a if k and masks else a.long() if not a.is_floating_point() else a for k, a in enumerate(args)]
        return evaluate_body(f, args, self.lowered.shape(f.tensor), rank, self._one_hot(f))

    def _one_hot(self, form: Form) -> bool:
        """Is the first operand the one-hot form of an index, perhaps with zeros written into it?"""
        at = form.args[0] if form.args else -1
        while at in self.lowered.native or at in self.lowered.layout:
            if at in self.lowered.layout:
                at = self.lowered.layout[at]
                continue
            made = self.lowered.forms[self.lowered.native[at]]
            if made.kind != "fill0":
                return made.kind == "one_hot"
            at = made.args[0]
        return False
