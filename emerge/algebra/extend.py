"""Reads classes of equal terms back as tensors: every new term becomes another way to compute its tensor.

Operands are always the representative of their class, so that what Datalog derives about one form is derived once. A pair
``same(V, W)`` carries the alignments of ``W`` over to ``V`` (datalog/analysis/equality.dl): from every form to the
representative, and between the tensors of the graph that turned out equal.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from emerge.algebra.encode import Term, encode, global_name, tensors
from emerge.algebra.saturate import Budget, Class, Classes, Node, saturate
from emerge.facts.base import constant_text
from emerge.facts.lower import Lowering, Tensor, Unsupported
from emerge.facts.ops.contraction import einsum
from emerge.facts.ops.index import lookup
from emerge.facts.ops.layout import cat, slice_plain, view
from emerge.facts.ops.pointwise import converted
from emerge.facts.ops.positions import positions
from emerge.facts.ops.reduction import along, reduce
from emerge.graph.model import DTYPES, is_floating

COMMUTATIVE = {"add", "mul", "maximum", "minimum", "eq", "ne", "and", "or"}
#: Kind of a body, where it is not the body's name.
KINDS = {"cast": "convert"}
TRUTH = {"eq", "ne", "lt", "le", "gt", "ge", "not", "and", "or", "xor", "isnan", "isinf"}


#: Limits of a saturation unless told otherwise.
BUDGET = Budget()


@dataclass(frozen=True)
class Equality:
    """Two tensors in one class; ``term`` is the second's, where it was added for this class."""

    tensor: Tensor
    other: Tensor
    term: Term | None = None


@dataclass
class Extension:
    """What the algebra added to one side.

    Attributes:
        forms: tensors added as other ways to compute a tensor. merged: pairs of tensors of the graph found equal.
        fired: rule -> matches. stopped: why the saturation ended early, or "".
        equalities: what was written as ``same``. added: tensor that was added -> its term. files: the rules.
    """

    forms: int = 0
    merged: int = 0
    terms: int = 0
    rounds: int = 0
    fired: dict[str, int] = field(default_factory=dict)
    stopped: str = ""
    seconds: float = 0.0
    equalities: list[Equality] = field(default_factory=list)
    added: dict[int, Term] = field(default_factory=dict)
    files: Sequence[Path] = ()
    budget: Budget = BUDGET


def extend(low: Lowering, files: Sequence[Path], budget: Budget = BUDGET) -> Extension:
    """Saturates the terms of a side and writes what is equal into its facts."""
    found = saturate(encode(low), files, budget)
    builder = _Builder(low, found)
    result = Extension(
        fired={k: n for k, n in found.fired.items() if n}, terms=found.terms, rounds=found.rounds, stopped=found.stopped,
        files=files, budget=budget,
    )  # fmt: skip
    builder.run(result)
    result.equalities, result.added = builder.equalities, builder.added
    result.seconds = found.seconds
    return result


class _Builder:
    """Turns classes into tensors through the lowering."""

    def __init__(self, low: Lowering, found: Classes) -> None:
        self.low, self.found = low, found
        self.kinds = {r.params[0]: r.params[1] for r in low.recipes.values() if r.name == "map"}
        self.kinds |= {r.params[2]: r.params[3] for r in low.recipes.values() if r.name in ("fold", "along")}
        self.originals: dict[int, list[Tensor]] = {}
        known = _all_tensors(low)
        for name, number in found.named.items():
            tensor = known.get(int(name[2:]))
            if tensor is not None:
                self.originals.setdefault(number, []).append(tensor)
        self.chosen = _cheapest(found, set(self.originals))
        self.representative: dict[int, Tensor | None] = {}
        self.written: set[tuple[int, int]] = set()
        self.equalities: list[Equality] = []
        self.added: dict[int, Term] = {}
        self.graph = set(known)

    def run(self, result: Extension) -> None:
        low = self.low
        low.node = None
        for number, members in self.originals.items():
            first = self.tensor(number)
            for other in members:
                if first is not None and other.id != first.id:
                    result.merged += self.same(first, other) + self.same(other, first)
        for number in list(self.found.nodes):
            target = self.tensor(number)
            if target is None:
                continue
            for node in self.found.nodes[number]:
                form = self.build(node)
                if form is not None and form.id != target.id:
                    result.forms += self.same(target, form, self.term(node))

    def same(self, target: Tensor, form: Tensor, term: Term | None = None) -> int:
        if target.shape != form.shape or (target.id, form.id) in self.written:
            return 0
        self.written.add((target.id, form.id))
        self.equalities.append(Equality(target, form, term))
        self.low.base.add("same", target.id, form.id)
        return 1

    def tensor(self, number: int) -> Tensor | None:
        """The representative of a class: a tensor of the graph where there is one, else the cheapest term."""
        if number not in self.representative:
            members = self.originals.get(number)
            if members:
                self.representative[number] = min(members, key=lambda t: (t.depth, t.id))
            else:
                node = self.chosen.get(number)
                made = self.representative[number] = self.build(node) if node is not None else None
                if made is not None and node is not None and made.id not in self.graph:
                    self.added.setdefault(made.id, self.term(node))
        return self.representative[number]

    def term(self, node: Node) -> Term:
        """The term of a node whose operands are tensors."""
        return Term(node.op, tuple(self.tensor(a.id) if isinstance(a, Class) else a for a in node.args))

    def build(self, node: Node) -> Tensor | None:
        """The tensor of one term; None where the lowering has no form for it."""
        if node.op == "Leaf":
            return None
        args = [self.tensor(a.id) if isinstance(a, Class) else a for a in node.args]
        if any(a is None for a in args):
            return None
        try:
            return self.make(node.op, args, node)
        except Unsupported:
            return None

    def make(self, op: str, a: list[Any], node: Node) -> Tensor | None:
        low = self.low
        if op in ("Map1", "Map2", "Map3"):
            body, operands = a[0], a[1:]
            commutes = body in COMMUTATIVE
            if commutes and operands[0].id > operands[1].id:
                operands = operands[::-1]  # one of the two orders is enough: the lowering writes the other as a form
            kind = self.kinds.get(body, KINDS.get(body.split("#")[0], body.split("#")[0]))
            if kind == "convert":
                dtype = body.split("#")[1]  # truth values have one body for all floating types
                return low.pointwise(body, kind, operands, dtype if dtype in DTYPES else "float32")
            floating = [t.dtype for t in operands if is_floating(t.dtype)]
            dtype = "bool" if kind in TRUTH or not floating else floating[0]
            return low.pointwise(body, kind, operands, dtype, commutative=commutes)
        if op == "Scale":
            return low.scaled(a[1], a[0]) if a[0] else None
        if op == "Shift":
            return low.pointwise(f"addc#{constant_text(a[0])}", "addc", [a[1]], a[1].dtype) if a[0] else a[1]
        if op == "Place":
            x, place, shape = a
            if any(k >= 0 and x.shape[k] != shape[d] for d, k in enumerate(place)):
                return None
            ties = [(d, 1, k, 1, shape[d]) for d, k in enumerate(place) if k >= 0]
            return low.layout(x, shape, ties, [d for d, k in enumerate(place) if k < 0 and shape[d] > 1])
        if op == "View":
            return view(low, a[0], a[1]) if math.prod(a[0].shape) == math.prod(a[1]) else None
        if op == "Slice":
            x, d, start, stop = a
            return slice_plain(low, x, d, start, stop, 1) if 0 <= start < stop <= x.shape[d] else None
        if op == "Cat":
            return cat(low, self.parts(node), a[2], join=False)
        if op == "Fold":
            body, role, x, reduced, _ = a
            return reduce(low, x, reduced, False, role, body, self.kinds.get(body, body.split("#")[0]), x.dtype)
        if op == "Einsum":
            return einsum(low, a[0], a[1], a[2], a[1].dtype)
        if op == "Range":
            kind, start, step, n = a
            found = positions(low, n, [start] * low.mesh.ranks, step, "int64")
            return converted(low, found, "float32") if kind == "float" else found
        if op == "Lookup":
            return lookup(low, a[0], a[1], a[2])
        if op == "Along":
            body, role, x, d = a
            return along(low, x, d, role, body, self.kinds.get(body, body.split("#")[0]), x.dtype)
        return None

    def parts(self, node: Node) -> list[Tensor]:
        """All parts of a concatenation that nests to the right."""
        first, rest, d = node.args
        left, right = self.tensor(first.id), self.tensor(rest.id)
        assert left is not None
        assert right is not None
        inner = self.chosen.get(rest.id) if rest.id not in self.originals else None
        if inner is not None and inner.op == "Cat" and inner.args[2] == d:
            return [left, *self.parts(inner)]
        return [left, right]


def _all_tensors(low: Lowering) -> dict[int, Tensor]:
    known: dict[int, Tensor] = {}
    stack = list(tensors(low))
    while stack:
        t = stack.pop()
        if t.id in known:
            continue
        known[t.id] = t
        made = low.made_by.get(t.id)
        recipe = low.recipes.get(t.id)
        stack += [*(made.args if made is not None else ()), *(recipe.args if recipe is not None else ())]
    return known


def _cheapest(found: Classes, anchored: set[int]) -> dict[int, Node]:
    """For every class without a tensor of the graph, a term of least size all of whose operands can be built."""
    cost = dict.fromkeys(anchored, 0)
    chosen: dict[int, Node] = {}
    changed = True
    while changed:
        changed = False
        for number, nodes in found.nodes.items():
            if number in anchored:
                continue
            for node in nodes:
                below = [cost.get(a.id) for a in node.args if isinstance(a, Class)]
                if node.op == "Leaf" or any(c is None for c in below):
                    continue
                total = 1 + sum(c for c in below if c is not None)
                if total < cost.get(number, 1 << 60):
                    cost[number], chosen[number] = total, node
                    changed = True
    return chosen


__all__ = ["Extension", "extend", "global_name"]
