"""Makes a pair small enough to run: whole atomic axes shrink, alike on both sides.

Axes that are tied over both graphs (:mod:`emerge.execute.axes`) change together, and so does every attribute that is a
function of their length (:mod:`emerge.execute.rewrite`). What cannot be explained keeps its length. The rewritten
graphs must pass the shape check; where they do not, the axes involved are pinned too. A pair that does not fit after
that is not run: there is no guess in between.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property, partial
from math import prod

from emerge.execute.aliasing import split_op
from emerge.execute.axes import FREE_KINDS, AxisClasses, Op, operators
from emerge.execute.dropout import dropout_plan
from emerge.execute.extra_ties import node_ties, plain_ties
from emerge.execute.index_ranges import input_ranges
from emerge.execute.literals import SMALL, LengthTable
from emerge.execute.memory import estimate_peak
from emerge.execute.placement import Relation
from emerge.execute.prune import needed_names, pruned, without_semantics
from emerge.execute.rewrite import Pins, Rewriter
from emerge.execute.rewrite_rules import Unexplained
from emerge.execute.setup import Setup, Sizes, relation_of
from emerge.facts.families import FamilyGraph, FamilyNode
from emerge.facts.lower import Lowering, Multi, Tensor
from emerge.facts.shapes import check_graph
from emerge.graph.model import Graph
from emerge.relate.derive import Derivation, Problem
from emerge.relate.statement import CONSTANT, Statement
from emerge.util.errors import ExecutionError, GraphError

#: Floating point operations of one run of both sides up to which captured sizes count as modest.
MODEST_FLOPS = 4e9
#: Rounds of pinning after which a pair is given up.
MAX_ROUNDS = 40


class CannotExecute(ExecutionError):
    """The pair cannot be executed, at no sizes that may be used; says nothing about its equivalence."""


@dataclass
class Side:
    """One side of a pair, reduced to what its claimed outputs depend on.

    Attributes:
        graphs: pruned graphs, in rank order.
        needed: names of the families kept.
    """

    low: Lowering
    family: FamilyGraph
    graphs: list[Graph]
    needed: set[str] = field(default_factory=set)

    def tensor_of(self, rank: int, name: str) -> Tensor | Multi | None:
        """Lowered tensor of a value of one rank."""
        try:
            family = self.family.family_of(rank, name)
        except KeyError:
            return None
        found = self.low.tensors.get(family)
        return found if isinstance(found, (Tensor, Multi)) else None

    def nodes(self) -> list[FamilyNode]:
        """The families of operators kept."""
        return [n for n in self.family.nodes if n.name in self.needed]


class Shrinker:
    """Prepares a pair for execution at captured or reduced sizes.

    Args:
        problem, derivation: the pair and its lowered form.

    Raises:
        CannotExecute: an operator without semantics lies on the way to a claimed output.
    """

    def __init__(self, problem: Problem, derivation: Derivation) -> None:
        self.problem, self.derivation = problem, derivation
        ref, imp = derivation.reference, derivation.implementation
        self.collectives_kept = True
        self.sides = self._sides(True)
        missing = self._missing()
        if missing:
            self.collectives_kept = False
            self.sides = self._sides(False)
            missing = self._missing()
        if missing:
            raise CannotExecute(missing)
        self.claims = dict(derivation.claims)
        # Constants that are equal are computed, not set.
        self.given = {k: s for k, s in derivation.given.items() if s.origin != CONSTANT}
        for k, (statement, _) in enumerate(derivation.unusable):
            target = self.claims if statement in problem.outputs else self.given
            target[-1 - k] = statement
        self.ref, self.imp = ref, imp

    def _sides(self, collectives: bool) -> tuple[Side, Side]:
        p, d = self.problem, self.derivation
        imp = Side(d.implementation, p.implementation, [])
        ref = Side(d.reference, p.reference, [])
        _keep(imp, [s.implementation.name for s in p.outputs], [], collectives)
        # Reference tensors that say what an implementation input holds are wanted, though nothing else may read them.
        given = [
            s.reference.name for s in p.inputs if s.implementation.name in imp.needed and s.origin != CONSTANT
        ]
        _keep(ref, [s.reference.name for s in p.outputs], given, collectives)
        return ref, imp

    def _missing(self) -> str:
        for side, word in zip(self.sides, ("reference", "implementation")):
            for graph in side.graphs:
                found = without_semantics(graph)
                if found:
                    node, op = found[0]
                    return f"node '{node}' of the {word} is the operator {op}, which has no executable meaning"
        return ""

    # ---- classes and pins -------------------------------------------------------------------------------------------

    @cached_property
    def classes(self) -> AxisClasses:
        """Axis classes of both sides, with pins that do not depend on the new lengths."""
        extra = [t for side in self.sides for n in side.nodes() for t in node_ties(n, side.low)]
        plain = {
            (k, n.name): found
            for k, side in enumerate(self.sides)
            for n in side.nodes()
            if (n.name in side.low.unknown or n.name in side.low.uninterpreted)
            and (found := plain_ties(n, side.low)) is not None
        }
        extra += [t for found in plain.values() for t in found.ties]
        classes = AxisClasses(self.derivation.base, extra)
        for (_, name), found in plain.items():
            for x, d, stride in found.outer:
                classes.pin_outer(x, d, stride, f"{name}: number of pieces")
        low_of = {1: self.sides[0], 2: self.sides[1]}
        side_of = dict(self.derivation.base.facts["value"])
        names = {1: self.ref.nodes_of, 2: self.imp.nodes_of}
        for op in operators(self.derivation.base):
            side = low_of[side_of[op.value]]
            made_by = names[side_of[op.value]].get(op.value)
            if made_by is not None and not any(n in side.needed for n in made_by):
                continue
            made_from = (side_of[op.value] - 1, side.low.op_node.get(op.id, ""))
            if op.kind == "unknown" or (op.kind == "uninterpreted" and made_from in plain):
                continue  # pinned by name below, or plain
            if op.body.startswith("reshape#") and len(op.args) == 1:
                _pin_reshape(classes, op)
                continue
            if op.kind not in FREE_KINDS:
                for i, role in op.iters:
                    if role in ("pos", "o"):
                        classes.pin(op.id, i, f"{op.kind}: an axis in which positions are fixed numbers")
        for k, side in enumerate(self.sides):
            for name in sorted(side.needed & set(side.low.unknown)):
                if (k, name) in plain:
                    continue
                value = side.family.value(name)
                refs = list(value.refs()) if isinstance(value, FamilyNode) else []
                for other in (name, *refs):
                    for tensor in _tensors(side.low.tensors.get(other)):
                        classes.pin_tensor(tensor.id, f"{name}: {side.low.unknown[name]}")
        self._pin_loose_statements(classes)
        for side in self.sides:
            for tensor in self._lowered(side):
                classes.tensor_atoms(tensor.id)
        self._pin_unanchored(classes)
        return classes

    def _lowered(self, side: Side) -> list[Tensor]:
        return [t for name in sorted(side.needed) for t in _tensors(side.low.tensors.get(name))]

    def _pin_loose_statements(self, classes: AxisClasses) -> None:
        """Tensors in statements that have no facts keep their lengths."""
        for number, statement in (*self.claims.items(), *self.given.items()):
            if number < 0:
                for low, name in ((self.ref, statement.reference.name), (self.imp, statement.implementation.name)):
                    for tensor in _tensors(low.tensors.get(name)):
                        classes.pin_tensor(tensor.id, "a relation that has no facts")

    def _pin_unanchored(self, classes: AxisClasses) -> None:
        """Axes that no graph input has keep their length: nothing says that both sides mean the same by them."""
        anchored = {0}
        for side in self.sides:
            for item in side.family.inputs:
                if item.name in side.needed:
                    for tensor in _tensors(side.low.tensors.get(item.name)):
                        anchored |= {a.cls for dim in classes.tensor_atoms(tensor.id) for a in dim}
        loose = set(classes.sizes()) - anchored
        classes.pin_classes(loose, "an axis that no graph input has")

    @cached_property
    def lengths(self) -> LengthTable:
        """Which numbers may stand for a length."""
        return LengthTable(self.classes, sorted({t.id for side in self.sides for t in self._lowered(side)}))

    # ---- sizes ------------------------------------------------------------------------------------------------------

    def captured(self) -> Setup:
        """The pair at its captured sizes.

        Raises:
            CannotExecute: a statement cannot be executed.
        """
        return self._setup({}, [side.graphs for side in self.sides], reduced=False)

    def fits(self, graphs: Iterable[Graph], memory_bytes: int) -> bool:
        """True where all graphs together fit the memory budget and are modest work."""
        listed = list(graphs)
        return memory_of(listed) <= memory_bytes and sum(map(flops, listed)) <= MODEST_FLOPS

    def reduced(self, memory_bytes: int, avoid: Setup | None = None) -> Setup:
        """The pair at small sizes.

        Args:
            avoid: a pair at other small sizes; this one gets different ones.

        Raises:
            CannotExecute: pinned axes keep it above the budget, or it cannot be rewritten.
        """
        for _ in range(MAX_ROUNDS):
            new = choose_lengths(self.classes, self._tensor_dims, avoid.new if avoid is not None else {})
            sizes = self.classes.sizes()
            pins = Pins(frozenset(c for c, n in new.items() if n != sizes[c]))
            graphs = self._rewritten(new, pins)
            if not self._apply(pins):
                if pins.contradiction:
                    raise CannotExecute(f"the reduced graph is malformed: {pins.contradiction}")
                if memory_of([g for side in graphs for g in side]) > memory_bytes:
                    raise CannotExecute(self._too_large(new))
                try:
                    return self._setup(new, graphs, reduced=True)
                except _Pinned:
                    continue
        raise CannotExecute(f"no sizes found that all attributes allow after {MAX_ROUNDS} rounds")

    @cached_property
    def _tensor_dims(self) -> list[list[list[int]]]:
        """Classes of every dimension of every tensor."""
        lowered = {t.id for side in self.sides for t in self._lowered(side)}
        return [[[a.cls for a in dim] for dim in self.classes.tensor_atoms(x)] for x in sorted(lowered)]

    def _rewritten(self, new: Mapping[int, int], pins: Pins) -> list[list[Graph]]:
        out: list[list[Graph]] = []
        for side in self.sides:
            made = []
            for rank, graph in enumerate(side.graphs):
                rewriter = Rewriter(graph, partial(side.tensor_of, rank), self.classes, new, self.lengths, pins)
                made.append(rewriter.run())
            out.append(made)
        if not pins.classes:
            for side, graphs in zip(self.sides, out):
                for rank, graph in enumerate(graphs):
                    self._check(side, rank, graph, pins)
        return out

    def _check(self, side: Side, rank: int, graph: Graph, pins: Pins) -> None:
        """The shape check; a contradiction pins the axes of the node."""
        try:
            check_graph(graph)
        except GraphError as error:
            found = re.search(r"node '([^']+)'", error.place)
            node = next((n for n in graph.nodes if found and n.name == found.group(1)), None)
            pins.contradiction = str(error)
            for name in (*node.refs(), node.name) if node is not None else ():
                for tensor in _tensors(side.tensor_of(rank, name)):
                    pins.add([a.cls for dim in self.classes.tensor_atoms(tensor.id) for a in dim], str(error))

    def _apply(self, pins: Pins) -> bool:
        """Pins what was found; True where something new is pinned."""
        by_reason: dict[str, set[int]] = {}
        for cls, why in pins.classes.items():
            by_reason.setdefault(why, set()).add(cls)
        changed = [self.classes.pin_classes(found, why) for why, found in by_reason.items()]
        return any(changed)

    def _setup(self, new: Mapping[int, int], graphs: list[list[Graph]], reduced: bool) -> Setup:
        sizes = Sizes(self.classes, new)
        mesh = self.problem.mesh
        relations: list[list[Relation]] = [[], []]
        for out, statements in zip(relations, (self.given, self.claims)):
            for number, statement in statements.items():
                if out is relations[0] and not self._concerned(statement):
                    continue
                try:
                    out.append(
                        relation_of(number, statement, sizes, self.ref, self.imp, self.problem.implementation, mesh)
                    )
                except Unexplained as why:
                    if reduced and self._pin_statement(statement):
                        raise _Pinned() from None
                    raise CannotExecute(f"the relation of '{statement.reference}' cannot be executed: {why}") from None
        known = self.classes.sizes()
        lengths = {f"{known[c]}#{c}": n for c, n in sorted(new.items()) if known.get(c, n) != n}
        plan = dropout_plan(self.derivation, self.sides[0].graphs[0], self.sides[1].graphs, sizes)
        bounds, unbounded = input_ranges(
            graphs[0][0], graphs[1], self.sides[0].graphs[0], self.sides[1].graphs, relations[0]
        )
        return Setup(
            graphs[0][0], graphs[1], relations[0], relations[1], plan, reduced, lengths, dict(new), bounds, unbounded
        )

    def _concerned(self, statement: Statement) -> bool:
        """A given statement matters where the implementation tensor is read (or the reference input is)."""
        return statement.implementation.name in self.sides[1].needed

    def _pin_statement(self, statement: Statement) -> bool:
        changed = [False]
        for low, name in ((self.ref, statement.reference.name), (self.imp, statement.implementation.name)):
            changed += [
                self.classes.pin_tensor(t.id, f"relation '{statement.text}'") for t in _tensors(low.tensors.get(name))
            ]
        return any(changed)

    def _too_large(self, new: Mapping[int, int]) -> str:
        sizes = self.classes.sizes()
        worst = sorted(((sizes[c], why) for c, why in self.classes.pinned().items() if c in sizes), reverse=True)[:3]
        words = "; ".join(f"length {n}: {why}" for n, why in worst)
        return f"the pair does not fit the memory budget; axes that may not shrink: {words}"


def _keep(side: Side, outputs: Iterable[str], also: Iterable[str], collectives: bool) -> None:
    """Prunes the graphs of a side to what ``outputs`` and ``also`` (families) depend on."""
    listed, extra = list(outputs), list(also)
    for rank, graph in enumerate(side.family.graphs):
        members = [
            [m for f in names if (m := side.family.value(f).members.get(rank)) is not None] for names in (listed, extra)
        ]
        needed = needed_names(graph, [*members[0], *members[1]], collectives=collectives)
        side.graphs.append(pruned(graph, needed, members[0]))
        for name in needed:
            with suppress(KeyError):
                side.needed.add(side.family.family_of(rank, name))


def _pin_reshape(classes: AxisClasses, op: Op) -> None:
    """Pins of a view whose boundaries do not nest, taken as an operator on whole dimensions in row-major order.

    Axes that both sides have may change, whatever their order: the number of elements stays equal. The rest keeps its
    length.
    """
    sides = [Counter(a.cls for dim in classes.tensor_atoms(x) for a in dim) for x in (op.args[0], op.value)]
    for side, other in (sides, sides[::-1]):
        classes.pin_classes(side - other, "a view whose boundaries do not nest")


class _Pinned(Exception):
    """Something was pinned; choose lengths again."""


def _tensors(value: object) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    return list(value.made.values()) if isinstance(value, Multi) else []


def memory_of(graphs: Iterable[Graph]) -> int:
    """Estimated bytes of running all graphs at once."""
    return sum(estimate_peak(g).peak for g in graphs)


def flops(graph: Graph) -> float:
    """Rough number of floating point operations of one run."""
    types = graph.types()
    total = 0.0
    for node in graph.nodes:
        shape = node.shape or next((e.shape for e in node.elements.values()), ())
        work = float(prod(n for n in shape if isinstance(n, int)))
        operands = [types[r].shape for r in node.refs() if r in types]
        name = split_op(node.op)[1]
        if name in ("mm", "bmm", "addmm", "baddbmm", "linear", "matmul", "dot", "mv") and operands:
            inner = operands[-1][-2] if len(operands[-1]) > 1 else operands[-1][-1]
            inner = operands[0][-1] if name in ("linear", "mm", "bmm", "matmul", "dot", "mv") else inner
            work *= 2 * inner if isinstance(inner, int) else 1
        elif name.startswith(("scaled_dot", "_scaled_dot")) and len(operands) > 1 and len(operands[1]) > 1:
            keys = operands[1][-2]
            work *= 4 * keys if isinstance(keys, int) else 1
        total += work
    return total


def choose_lengths(
    classes: AxisClasses, tensors: Iterable[Sequence[Sequence[int]]], avoid: Mapping[int, int]
) -> dict[int, int]:
    """A small length for every class that is not pinned: at least 3, different from one another and, where possible,
    such that different dimensions get different lengths. Axes that most tensors have get the smallest ones.

    Args:
        tensors: classes of every dimension of every tensor.
        avoid: lengths of another size vector, not to be repeated where there is a choice.
    """
    sizes, pinned = classes.sizes(), classes.pinned()
    new = {c: n for c, n in sizes.items() if c in pinned or n <= SMALL}
    uses: dict[int, int] = {}
    dims: dict[tuple[int, ...], None] = {}
    for tensor in tensors:
        for dim in tensor:
            if dim:
                dims[tuple(sorted(dim))] = None
            for c in dim:
                uses[c] = uses.get(c, 0) + 1
    free = sorted((c for c in sizes if c not in new), key=lambda c: (sizes[c] > 16, -uses.get(c, 0), c))
    taken = set(new.values())
    lengths: dict[int, set[tuple[int, ...]]] = {}
    using: dict[int, list[tuple[int, ...]]] = {}
    for d in dims:
        for c in set(d):
            using.setdefault(c, []).append(d)
        if all(c in new for c in d):
            lengths.setdefault(prod(new[c] for c in d), set()).add(d)

    def finished(c: int, n: int) -> list[tuple[tuple[int, ...], int]]:
        """Lengths of the dimensions that are complete once ``c`` has length ``n``."""
        known = {**new, c: n}
        return [(d, prod(known[k] for k in d)) for d in using.get(c, ()) if all(k in known for k in d)]

    for c in free:
        allowed = [n for n in range(3, min(sizes[c], 4 * len(sizes) + 8)) if n not in taken and n != avoid.get(c)] or [
            sizes[c]
        ]
        chosen = next((n for n in allowed if all(lengths.get(m, {d}) <= {d} for d, m in finished(c, n))), allowed[0])
        for d, m in finished(c, chosen):
            lengths.setdefault(m, set()).add(d)
        new[c] = chosen
        taken.add(chosen)
    return new
