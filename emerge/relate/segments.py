"""Cuts a pair of deep graphs into segments, so that equal layers are derived once (DESIGN: scale).

A *cut* is a value of each side that everything behind it reads the layers before through, and a statement that relates the
two. A segment is what a claim reads back to the cuts, the inputs and what has no cut before it (masks, rotary tables); its
own problem has the cuts as inputs. The claims at the cuts are derived like outputs, one after the other, so the chain of
segments is a derivation of the whole.

Two segments with one key are the same problem under other names: same operators, attributes, constants by content,
rank vectors, groups, statements about inputs and cuts, and claims. What is derived for one holds for the other.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from emerge.facts.families import FamilyGraph, FamilyInput, FamilyNode, FamilyOutput, FamilyValue
from emerge.facts.mutation import base_name, written
from emerge.graph.model import Ref
from emerge.relate.derive import Problem
from emerge.relate.statement import Statement

#: Fewer cuts than these do not pay.
LEAST_CUTS = 5
#: A value made of at most so many operators is made again where it is read, rather than cut.
CHEAP = 10
#: Origin of statements about cuts.
CUT = "cut"
#: Parts of names of operators that draw random numbers: their streams run through the whole program.
_RANDOM = ("rand", "dropout", "bernoulli", "multinomial", "normal", "uniform", "poisson")
_RANDOM_OPERATORS = ("aten.exponential", "aten.geometric", "aten.cauchy", "aten.log_normal", "hlo.rng")


@dataclass(frozen=True)
class Segment:
    """A problem of its own.

    Attributes:
        key: equal for segments that are equal up to names.
        nodes: of the reference; those of equal segments correspond in this order.
    """

    problem: Problem
    key: str
    nodes: tuple[str, ...]


def can_be_cut(graph: FamilyGraph) -> bool:
    """Whether the nodes are functions of their operands alone: nothing is written in place and nothing is random."""
    for node in graph.nodes:
        base = base_name(node.op).rpartition(".")[2]
        # a custom operator whose name ends so may write as well
        if written(node) or (base.endswith("_") and not base.endswith("__")):
            return False
        if any(word in base for word in _RANDOM) or node.op.startswith(_RANDOM_OPERATORS) or node.note:
            return False
    return len(set(graph.stages)) <= 1


def cut_points(graph: FamilyGraph) -> list[str]:
    """Values through which alone all later nodes see the nodes before, in order; of those that look alike the most.

    Values that live through half of the graph (masks, rotary tables) and cheap ones are no part of a cut.
    """
    position = {n.name: k for k, n in enumerate(graph.nodes)}
    last: dict[str, int] = {}
    cheap: dict[str, frozenset[str] | None] = {}
    for k, node in enumerate(graph.nodes):
        made: frozenset[str] | None = frozenset([node.name])
        for name in node.refs():
            if name in position:
                last[name] = k
                known = cheap[name]
                made = None if made is None or known is None or len(made | known) > CHEAP else made | known
        cheap[node.name] = made
    ends: dict[int, list[str]] = {}
    for name, k in last.items():
        ends.setdefault(k, []).append(name)
    live: set[str] = set()
    found: list[FamilyNode] = []
    for k, node in enumerate(graph.nodes):
        live.difference_update(ends.get(k, ()))
        if node.name not in last or last[node.name] - k > len(graph.nodes) // 2:
            continue
        if cheap[node.name] is not None:
            continue
        live.add(node.name)
        if live == {node.name} and node.dtype is not None and node.shape is not None:
            found.append(node)
    alike = Counter((n.op, n.dtype, tuple(n.shape or ())) for n in found)
    if not alike:
        return []
    kind, _ = max(alike.items(), key=lambda item: item[1])
    return [n.name for n in found if (n.op, n.dtype, tuple(n.shape or ())) == kind]


def segment(problem: Problem, claims: Sequence[Statement], cuts: Mapping[str, Statement]) -> Segment:
    """The problem of ``claims`` alone, behind ``cuts`` (reference name -> statement)."""
    stops = {s.implementation.name for s in cuts.values()}
    ref = _part(problem.reference, [c.reference.name for c in claims], set(cuts))
    imp = _part(problem.implementation, [c.implementation.name for c in claims], stops)
    known = ({i.name for i in ref.inputs}, {i.name for i in imp.inputs})
    given = [
        s
        for s in (*problem.inputs, *cuts.values())
        if s.reference.name in known[0] and s.implementation.name in known[1]
    ]
    part = replace(problem, reference=ref, implementation=imp, inputs=given, outputs=list(claims))
    orders = (
        _closure(ref, [c.reference.name for c in claims], set()),
        _closure(imp, [c.implementation.name for c in claims], set()),
    )
    return Segment(part, _key(part, orders), tuple(v.name for v in orders[0] if isinstance(v, FamilyNode)))


def behind(graph: FamilyGraph, name: str, stops: Iterable[str]) -> frozenset[str]:
    """Those of ``stops`` that a value reads directly, with no other one between."""
    wanted = set(stops)
    return frozenset(v.name for v in _closure(graph, [name], wanted) if v.name in wanted and v.name != name)


def _closure(graph: FamilyGraph, roots: Sequence[str], stops: set[str]) -> list[FamilyValue]:
    """What the roots read, back to the stops and with them, each before what reads it."""
    first = set(roots)
    seen: set[str] = set()
    out: list[FamilyValue] = []
    work = [(name, False) for name in reversed(roots)]
    while work:
        name, done = work.pop()
        value = graph.value(name)
        if done:
            out.append(value)
            continue
        if name in seen:
            continue
        seen.add(name)
        work.append((name, True))
        if isinstance(value, FamilyNode) and (name not in stops or name in first):
            work.extend((r, False) for r in reversed(list(value.refs())) if r not in seen)
    return out


def _part(graph: FamilyGraph, roots: Sequence[str], stops: set[str]) -> FamilyGraph:
    """The part of a graph that the roots read; stops are inputs of it."""
    inputs: list[FamilyInput] = []
    kept: set[str] = set()
    stops = stops - set(roots)
    for value in _closure(graph, roots, stops):
        if isinstance(value, FamilyInput):
            inputs.append(value)
        elif value.name in stops:
            assert value.dtype is not None
            assert value.shape is not None
            inputs.append(
                FamilyInput(value.id, value.name, value.dtype, value.shape, value.ranks, dict(value.members), cut=True)
            )
        else:
            kept.add(value.name)
    outputs = [
        FamilyOutput(k, name, graph.value(name).ranks, dict(graph.value(name).members))
        for k, name in enumerate(dict.fromkeys(roots))
    ]
    return replace(
        graph, inputs=inputs, nodes=[n for n in graph.nodes if n.name in kept], outputs=outputs, problems=[],
        _values={}, _of=[],
    )  # fmt: skip


def _key(problem: Problem, orders: tuple[list[FamilyValue], list[FamilyValue]]) -> str:
    """What a problem is, whatever its tensors are called; ``orders``: the values of both sides, numbered so."""
    digest = hashlib.sha256()
    numbers: list[dict[str, int]] = []
    for side, order in enumerate(orders):
        number: dict[str, int] = {}
        for value in order:
            number[value.name] = len(number)
            causal = value.name in problem.causal_masks[side]
            digest.update(repr((_content(value, number), causal, problem.executed[side].get(value.name))).encode())
        numbers.append(number)
    for statements in (problem.inputs, problem.outputs):
        rows = [
            (
                s.origin, numbers[0][s.reference.name], s.reference.cuts,
                numbers[1][s.implementation.name], s.implementation.cuts,
                [(p.size, p.reference, p.implementation, p.mesh) for p in s.axes],
            )
            for s in statements
        ]  # fmt: skip
        # what is given has no order; outputs are told apart by theirs
        digest.update(repr(sorted(rows, key=repr) if statements is problem.inputs else rows).encode())
    digest.update(repr(problem.mesh.axes).encode())
    return digest.hexdigest()


def _content(value: FamilyValue, number: Mapping[str, int]) -> tuple[Any, ...]:
    if isinstance(value, FamilyInput):
        return ("input", value.cut, value.dtype, tuple(value.shape), value.ranks, _constant(value.const))
    elements = sorted(value.elements.items())
    return (
        value.op, _plain(value.args, number), [(k, _plain(v, number)) for k, v in sorted(value.kwargs.items())],
        value.dtype, None if value.shape is None else tuple(value.shape), value.ranks, value.is_tuple, value.is_scalar,
        elements, value.has_const, _constant(value.const), value.group, value.note, value.phase,
        sorted(value.extra.items()),
    )  # fmt: skip


def _plain(arg: Any, number: Mapping[str, int]) -> Any:
    if isinstance(arg, Ref):
        return ("of", number[arg.name])
    if isinstance(arg, (list, tuple)):
        return [_plain(a, number) for a in arg]
    return arg


def _constant(value: Any) -> Any:
    """A constant whose text tells all of it apart."""
    if hasattr(value, "tobytes"):
        return (str(value.dtype), tuple(value.shape), hashlib.sha256(value.tobytes()).hexdigest())
    return value
