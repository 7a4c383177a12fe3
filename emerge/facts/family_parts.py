"""Parts of the zip of rank graphs: prepared calls, families under construction, and arguments of one from many.

The algorithm itself is in :mod:`emerge.facts.zipping`.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from emerge.facts.collectives import Collective
from emerge.facts.families import MIXED, UNPAIRED, FamilyArg, FamilyInput, FamilyNode, Group, RankVector
from emerge.graph.model import Node, Ref, TensorType, TypedConst


@dataclass(frozen=True, slots=True)
class GroupSlot:
    """Stands for the process-group argument of one rank."""

    ranks: tuple[int, ...]


@dataclass(slots=True)
class Call:
    """One node of one rank, prepared for matching.

    Attributes:
        skeleton: number of everything that must agree except operands (operator, type, layout of the arguments).
        scalars: what may differ between ranks; ``refs``: operands, in a fixed order.
        fixed: the scalars that must agree within one process group (all but split sizes).
        reads: of each operand, the value it is the same as and how many writes to its memory came before.
        commutative: its two operands may be exchanged. ``identity``: it hands on its operand.
    """

    rank: int
    position: int
    node: Node
    args: list[Any]
    kwargs: dict[str, Any]
    skeleton: int
    scalars: tuple[Any, ...]
    refs: tuple[str, ...]
    fixed: tuple[Any, ...] = ()
    collective: Collective | None = None
    group: tuple[int, ...] = ()
    group_id: str = ""
    uses: tuple[int, int, int] = (0, 0, 0)
    reads: tuple[tuple[str, int], ...] = ()
    commutative: bool = False
    identity: bool = False

    @property
    def operands(self) -> tuple[tuple[str, int], ...]:
        """``reads`` as far as they tell calls of one operator apart."""
        return tuple(sorted(self.reads)) if self.commutative else self.reads


@dataclass(slots=True, eq=False)
class Family:
    """A family under construction: of inputs (``item``), of calls, or a join of other families (``pieces``)."""

    uid: int
    members: dict[int, str] = field(default_factory=dict)
    item: FamilyInput | None = None
    calls: dict[int, Call] = field(default_factory=dict)
    pieces: dict[int, Family] = field(default_factory=dict)
    type: TensorType | None = None
    operands: list[Family] = field(default_factory=list)
    sent: Family | None = None  # of a receive: the send that its value comes from
    met: bool = False  # of a send or receive: every member has its counterpart
    taken: set[int] = field(default_factory=set)  # ranks it cannot take any more: members and their process groups
    slots: set[Any] = field(default_factory=set)
    name: str = ""
    order: tuple[int, int, int] = (0, 0, 0)


def walk(arg: Any, scalars: list[Any], refs: list[str]) -> Any:
    """The structure of an argument; its scalars and operands are collected in order."""
    kind = type(arg)
    if kind is Ref:
        refs.append(arg.name)
        return "@"
    if kind is list or kind is tuple:
        return tuple([walk(a, scalars, refs) for a in arg])
    if kind is int or kind is str or kind is bool:
        scalars.append(arg)
        return kind
    if kind is float:
        scalars.append(repr(arg))  # tells 0.0 from -0.0, and nan equals itself
        return kind
    if kind is GroupSlot:
        return ("group", len(arg.ranks))
    return arg  # None, dtypes and the like are part of the structure


def is_device(arg: Any) -> bool:
    return isinstance(arg, TypedConst) and arg.kind == "device"


def no_device(arg: Any) -> Any:
    """An argument as a list without tuples, in which a positional device keeps its place without saying which."""
    if isinstance(arg, (list, tuple)):
        return [no_device(a) for a in arg]
    return TypedConst("device", "") if is_device(arg) else arg


def paired(batch: list[Call], free: list[Family]) -> list[tuple[Call, Family | None]]:
    """Pairs calls with families of the same structure; the best fit first, each family at most once."""
    if len(batch) == 1 and len(free) <= 1:
        return [(batch[0], free[0] if free else None)]
    chosen: dict[int, Family] = {}
    used: set[int] = set()
    first = [f.calls[min(f.calls)] for f in free]
    # equal calls have no better partner than the one at their own place among the others
    place = {id(c): k for calls in (batch, first) for k, c in enumerate(sorted(calls, key=lambda c: c.position))}
    fits: tuple[Callable[[Call], Any], ...] = (
        lambda c: (c.scalars, c.uses[0], place[id(c)]),
        lambda c: (c.scalars, c.uses[2], place[id(c)]),
        lambda c: (c.scalars, c.uses[0]),
        lambda c: (c.scalars, c.uses[1]),
        lambda c: (c.scalars, c.uses[2]),
        lambda c: c.scalars,
        lambda c: c.uses[0],
        lambda c: c.uses[1],
        lambda c: c.uses[2],
        lambda c: None,
    )
    for fit in fits:
        waiting: dict[Any, list[Family]] = {}
        for family in reversed(free):
            if family.uid not in used:
                waiting.setdefault(fit(family.calls[min(family.calls)]), []).append(family)
        for call in batch:
            if call.position not in chosen:
                candidates = waiting.get(fit(call))
                if candidates:
                    family = candidates.pop()
                    chosen[call.position] = family
                    used.add(family.uid)
    return [(c, chosen.get(c.position)) for c in batch]


def sorted_families(families: list[Family], before: dict[int, list[int]]) -> tuple[list[Family], list[Family]]:
    """Families such that each comes after those ``before`` it, else by ``order``; and those on (or between) cycles.

    Args:
        families: at the positions of their ``uid``.
        before: by ``uid``, with repetitions.
    """
    waiting = {uid: len(found) for uid, found in before.items()}
    users: dict[int, list[Family]] = {}
    for family in families:
        for uid in before[family.uid]:
            users.setdefault(uid, []).append(family)
    heap = [(f.item is None, f.order, f.uid) for f in families if not before[f.uid]]
    heapq.heapify(heap)
    order: list[Family] = []
    while heap:
        family = families[heapq.heappop(heap)[2]]
        order.append(family)
        for user in users.get(family.uid, ()):
            waiting[user.uid] -= 1
            if waiting[user.uid] == 0:
                heapq.heappush(heap, (True, user.order, user.uid))
    done = {f.uid for f in order}
    stuck = [f for f in families if f.uid not in done]
    while stuck:  # what lies behind a cycle is not to blame
        read = {uid for f in stuck for uid in before[f.uid]}
        kept = [f for f in stuck if f.uid in read]
        if len(kept) == len(stuck):
            break
        stuck = kept
    return order, stuck


def merged(values: list[Any]) -> Any:
    """One scalar if all are the same, else a RankVector; lists element by element where their lengths agree."""
    first = values[0]
    if all(type(v) is list and len(v) == len(first) for v in values) and type(first) is list:
        return [merged(list(items)) for items in zip(*values)]
    same = all(type(v) is type(first) and (repr(v) == repr(first) if type(v) is float else v == first) for v in values)
    return first if same else RankVector(tuple(values))


def combined(args: list[Any], operands: Iterator[str], whole: bool) -> FamilyArg:
    """One argument of a family from that of its members, lowest rank first.

    Args:
        operands: an iterator over the operand families' names, in the order of ``walk``.
        whole: all scalars are known to agree, so the first member speaks for all.
    """
    first = args[0]
    kind = type(first)
    if kind is Ref:
        return Ref(next(operands))
    if kind is list:
        if whole:
            return [combined([a], operands, True) for a in first]
        return [combined(list(items), operands, False) for items in zip(*args)]
    if kind is GroupSlot:
        return Group(tuple(a.ranks for a in args))
    return first if whole else merged(args)


def family_node(index: int, family: Family) -> FamilyNode:
    calls = [family.calls[r] for r in sorted(family.calls)]
    first = calls[0]
    whole = first.collective is None and all(c.scalars == first.scalars for c in calls)
    operands = iter([f.name for f in family.operands])
    n = first.node
    elements: dict[int, TensorType] = {}
    for c in calls:
        elements.update(c.node.elements)
    args = [combined(list(items), operands, whole) for items in zip(*(c.args for c in calls))]
    found = {k: combined([c.kwargs[k] for c in calls], operands, whole) for k in sorted(first.kwargs)}
    kwargs = {k: found[k] for k in first.kwargs}
    if family.sent is not None:
        kwargs["sent"] = Ref(family.sent.name)
    unpaired = first.collective is not None and first.collective.point_to_point and not family.met
    return FamilyNode(
        id=index, name=family.name, op=n.op, args=args, kwargs=kwargs, dtype=n.dtype,
        shape=n.shape, ranks=tuple(c.rank for c in calls), members={c.rank: c.node.name for c in calls},
        is_tuple=n.is_tuple, is_scalar=n.is_scalar, elements=dict(sorted(elements.items())),
        const=merged([c.node.const for c in calls]), has_const=n.has_const,
        source=n.source, code=n.code, module=n.module, phase=n.phase,
        group=Group(tuple(c.group for c in calls)) if first.collective is not None else None,
        note=UNPAIRED if unpaired else "",
        extra=n.extra,
    )  # fmt: skip


def mixed_node(index: int, family: Family) -> FamilyNode:
    kind = family.type
    ranks = tuple(family.pieces)
    return FamilyNode(
        id=index, name=family.name, op=MIXED,
        args=[Ref(f.name) for f in family.operands],
        kwargs={"ranks": [[r for r in ranks if family.pieces[r] is f] for f in family.operands]},
        dtype=kind.dtype if kind else None, shape=kind.shape if kind else None,
        ranks=ranks, members=family.members,
    )  # fmt: skip
