"""The zip of :func:`emerge.facts.families.zip_families`: rank after rank is laid over the families found so far.

Why this is linear: on one rank, calls of one operator with the very same operands form a *batch*, and a batch can only
meet families with the same (already known) operand families. So every call is looked up once, never compared with all.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from emerge.facts.collectives import Collective, collective_of
from emerge.facts.families import FamilyGraph, FamilyInput, FamilyNode, FamilyOutput
from emerge.facts.family_parts import (
    Call,
    Family,
    GroupSlot,
    family_node,
    is_device,
    merged,
    mixed_node,
    no_device,
    paired,
    walk,
)
from emerge.graph.model import Graph, Node, TensorType
from emerge.util.errors import GraphError


class Zipper:
    """Holds the state of one zip; use :func:`emerge.facts.families.zip_families`."""

    def __init__(self, graphs: Sequence[Graph]) -> None:
        if not graphs:
            raise GraphError("expected at least one rank graph, found none; give the graphs of all ranks")
        for r, g in enumerate(graphs):
            if g.rank != r:
                raise GraphError(f"expected rank {r} here, found rank {g.rank}; give the graphs in rank order", g.path)
            if g.format != graphs[0].format:
                raise GraphError(
                    f"expected format {graphs[0].format!r} of rank 0, found {g.format!r}; capture all ranks alike",
                    g.path,
                )
        self.graphs = list(graphs)
        self.world = len(graphs)
        self.problems: list[str] = []
        self.types = [g.types() for g in graphs]
        self._numbers: dict[Any, int] = {}
        self.calls = [[self._call(r, p, n) for p, n in enumerate(g.nodes)] for r, g in enumerate(graphs)]
        for r in range(self.world):
            self._number_uses(r)
        self.slot_of = self._slots()
        self.apart: set[Any] = set()  # slots whose calls are not zipped, because that would close a cycle

    def run(self) -> FamilyGraph:
        """Zips; where ranks issue collectives in crossed orders, joining them closes a cycle: then without these."""
        while True:
            self.families: list[Family] = []
            self.of: list[dict[str, Family]] = [{} for _ in self.graphs]
            self.joins: dict[Any, Family] = {}
            self._zip_inputs()
            self._zip_nodes()
            for family in list(self.families):
                self._join_operands(family)
            outputs = self._zip_outputs()
            order, stuck = self._sorted()
            if not stuck:
                return self._built(order, outputs)
            crossed = {s for f in stuck for s in f.slots}
            assert crossed - self.apart, "a cycle must go through a collective"
            self.apart |= crossed
            calls = [c for f in stuck for c in list(f.calls.values())[:2] if f.slots]
            self.problems.append(
                "collectives are issued in crossed orders on different ranks (a deadlock when executed): "
                + "; ".join(self._where(c) for c in calls[:4])
                + "; they are left apart, rank by rank"
            )

    # -- reading --------------------------------------------------------------------------------------------------

    def _number(self, key: Any) -> int:
        """A small number for a (deep) key, equal for equal keys."""
        return self._numbers.setdefault(key, len(self._numbers))

    def _call(self, rank: int, position: int, node: Node) -> Call:
        args = [no_device(a) for a in node.args]
        kwargs = {k: no_device(v) for k, v in node.kwargs.items() if not is_device(v)}
        collective = collective_of(node)
        group: tuple[int, ...] = ()
        group_id = ""
        if collective is not None:
            group, group_id = self._resolve(collective, rank, node)
            if not group:
                collective = None  # who takes part is unknown: an ordinary node that keeps its id
            elif 0 <= collective.position < len(args):
                args[collective.position] = GroupSlot(group)
            elif collective.kind != "world":
                kwargs[collective.keyword] = GroupSlot(group)
        scalars: list[Any] = []
        refs: list[str] = []
        skeleton = (
            node.op, node.dtype, node.shape, node.is_tuple, node.is_scalar, node.has_const,
            tuple(sorted((k, t.dtype, t.shape) for k, t in node.elements.items())),
            tuple([walk(a, scalars, refs) for a in args]),
            tuple([(k, walk(kwargs[k], scalars, refs)) for k in sorted(kwargs)]),
            walk(node.const, scalars, refs) if node.has_const else None,
        )  # fmt: skip
        fixed = tuple(scalars)
        if collective is not None and collective.varying:
            kept: list[Any] = []
            for p, a in enumerate(args):
                if p not in collective.varying:
                    walk(a, kept, [])
            fixed = tuple(kept)
        return Call(
            rank, position, node, args, kwargs, self._number(skeleton), tuple(scalars), tuple(refs), fixed,
            collective, group, group_id,
        )  # fmt: skip

    def _resolve(self, collective: Collective, rank: int, node: Node) -> tuple[tuple[int, ...], str]:
        """The ranks this rank communicates with, in group order (() and a problem if unknown), and the group's id."""
        if collective.kind == "world":
            return tuple(range(self.world)), ""
        graph = self.graphs[rank]
        positional = 0 <= collective.position < len(node.args)
        value: Any = node.args[collective.position] if positional else node.kwargs.get(collective.keyword)
        where = f"{graph.path or f'rank {rank}'}: node {node.name!r}"
        gid = ""
        ranks: list[int] | None = None
        if collective.kind == "id":
            gid = str(value) if type(value) in (str, int) else ""
            ranks = next((m for m in graph.groups.get(gid, ()) if rank in m), None)
            if ranks is None:
                self.problems.append(
                    f"{where}: process group {value!r} has no rank list that holds rank {rank}; "
                    f'add the key "{gid or "ID"}" with its rank lists to "groups" of the graph file '
                    "(or of the relation file)"
                )
                return (), gid
        else:
            lists = [value] if collective.kind == "ranks" else [list(range(self.world))] if value == [] else value
            if isinstance(lists, list) and all(isinstance(m, list) and all(type(r) is int for r in m) for m in lists):
                ranks = next((m for m in lists if rank in m), None)
            if ranks is None:
                self.problems.append(
                    f"{where}: {collective.keyword} {value!r} has no rank list that holds rank {rank}; correct it"
                )
                return (), gid
        if len(set(ranks)) != len(ranks) or not all(0 <= r < self.world for r in ranks):
            self.problems.append(
                f"{where}: process group {ranks} must hold distinct ranks below {self.world}; correct it"
            )
            return (), gid
        return tuple(ranks), gid

    def _number_uses(self, rank: int) -> None:
        """Numbers the way each call is used: all that follows it, and its direct consumers only (scalars ignored)."""
        consumers: dict[str, list[tuple[int, int, int]]] = {}
        for i, out in enumerate(self.graphs[rank].outputs):
            if out is not None:
                consumers.setdefault(out, []).append((-1, i, 0))
        for call in reversed(self.calls[rank]):
            used = sorted(consumers.get(call.node.name, ()))
            call.uses = (
                self._number(("uses", tuple(used))),
                self._number(("consumers", tuple([(skeleton, k) for skeleton, k, _ in used]))),
            )
            for k, name in enumerate(call.refs):
                consumers.setdefault(name, []).append((call.skeleton, k, call.uses[0]))

    # -- inputs ---------------------------------------------------------------------------------------------------

    def _zip_inputs(self) -> None:
        """By label, then name, then position, then what is left in order; always among inputs of one type."""
        found: list[dict[int, int]] = []  # rank -> position, one per family
        for r, graph in enumerate(self.graphs):
            left = list(range(len(graph.inputs)))
            keys: list[Callable[[int, int], Any]] = [
                lambda r, p: self.graphs[r].inputs[p].label,
                lambda r, p: self.graphs[r].inputs[p].name,
                lambda r, p: p,
                lambda r, p: 0,
            ]
            for key in keys:
                waiting: dict[Any, list[dict[int, int]]] = {}
                for members in found:
                    first = min(members)
                    k = key(first, members[first])
                    if r not in members and k is not None:
                        item = self.graphs[first].inputs[members[first]]
                        waiting.setdefault((k, item.dtype, item.shape), []).append(members)
                unmatched = []
                for p in left:
                    k = key(r, p)
                    candidates = waiting.get((k, graph.inputs[p].dtype, graph.inputs[p].shape))
                    if k is not None and candidates:
                        candidates.pop(0)[r] = p
                    else:
                        unmatched.append(p)
                left = unmatched
            found += [{r: p} for p in left]
        found.sort(key=lambda m: (m[min(m)], min(m)))
        for members in found:
            items = {r: self.graphs[r].inputs[p] for r, p in sorted(members.items())}
            first_item = next(iter(items.values()))
            family = self._new_family()
            family.members = {r: i.name for r, i in items.items()}
            family.type = TensorType(first_item.dtype, first_item.shape)
            family.item = FamilyInput(
                0, "", first_item.dtype, first_item.shape, tuple(items), family.members,
                label=next((i.label for i in items.values() if i.label is not None), None),
                const=merged([i.const for i in items.values()]),
                placement=next((i.placement for i in items.values() if i.placement is not None), None),
            )  # fmt: skip
            for r, i in items.items():
                self.of[r][i.name] = family

    def _new_family(self) -> Family:
        family = Family(len(self.families))
        self.families.append(family)
        return family

    # -- nodes ----------------------------------------------------------------------------------------------------

    def _zip_nodes(self) -> None:
        by_key: dict[Any, list[Family]] = {}
        slots: dict[Any, list[tuple[Any, Family]]] = {}
        for r, calls in enumerate(self.calls):
            of = self.of[r]
            batches: dict[Any, list[Call]] = {}
            for call in calls:
                if id(call) not in self.slot_of:
                    batches.setdefault((call.skeleton, call.refs), []).append(call)
            for call in calls:
                slot = self.slot_of.get(id(call))
                if slot is not None:
                    self._place_collective(call, slot, by_key, slots)
                elif call.node.name not in of:  # else placed with its batch
                    key = (call.skeleton, tuple([of[name].uid for name in call.refs]))
                    free = [f for f in by_key.get(key, ()) if r not in f.taken]
                    for c, family in paired(batches[call.skeleton, call.refs], free):
                        self._place(c, family or self._keyed(key, by_key))

    def _keyed(self, key: Any, by_key: dict[Any, list[Family]]) -> Family:
        family = self._new_family()
        by_key.setdefault(key, []).append(family)
        return family

    def _place(self, call: Call, family: Family) -> None:
        family.calls[call.rank] = call
        family.members[call.rank] = call.node.name
        family.taken.add(call.rank)
        if call.node.dtype is not None and call.node.shape is not None:
            family.type = TensorType(call.node.dtype, call.node.shape)
        self.of[call.rank][call.node.name] = family

    def _place_collective(
        self, call: Call, slot: Any, by_key: dict[Any, list[Family]], slots: dict[Any, list[tuple[Any, Family]]]
    ) -> None:
        """Joins the call of a lower rank in the same slot, else a like call of another group, else starts anew."""
        if slot in self.apart:
            family = self._new_family()
        else:
            signature = self._signature(call)
            met = slots.setdefault(slot, [])
            known = next((f for s, f in met if s == signature), None)
            if known is None:
                key = ("collective", call.skeleton, tuple([self.of[call.rank][name].uid for name in call.refs]))
                free = [] if met else [f for f in by_key.get(key, ()) if f.taken.isdisjoint(call.group)]
                known = paired([call], free)[0][1] or self._keyed(key, by_key)
                known.taken.update(call.group)
                met.append((signature, known))
            family = known
        family.slots.add(slot)
        self._place(call, family)

    def _signature(self, call: Call) -> Any:
        """What must agree between the ranks of one process group at one slot; operands need only agree in type."""
        types = self.types[call.rank]
        operands = tuple([types.get(name) or self.of[call.rank][name].uid for name in call.refs])
        return (call.skeleton, call.fixed, call.group, operands)

    # -- collectives ----------------------------------------------------------------------------------------------

    def _slots(self) -> dict[int, Any]:
        """Issue slot (ranks, group id, k) of every collective call, by ``id(call)``; notes what does not meet.

        Ids tell apart several groups of the same ranks, but only where all their ranks use the same ids equally often.
        """
        queues: dict[tuple[int, ...], dict[int, list[Call]]] = {}
        for r, calls in enumerate(self.calls):
            for call in calls:
                if call.collective is not None and not call.collective.point_to_point:
                    queues.setdefault(tuple(sorted(call.group)), {}).setdefault(r, []).append(call)
        out: dict[int, Any] = {}
        for ranks, queue in queues.items():
            counts = [Counter(c.group_id for c in queue.get(r, ())) for r in ranks]
            by_id = all(c == counts[0] for c in counts)
            slots: dict[tuple[int, str], list[Call]] = {}
            for r in ranks:
                issued: Counter[str] = Counter()
                for call in queue.get(r, ()):
                    gid = call.group_id if by_id else ""
                    slots.setdefault((issued[gid], gid), []).append(call)
                    out[id(call)] = (ranks, gid, issued[gid])
                    issued[gid] += 1
            self._check_slots(ranks, slots)
        return out

    def _check_slots(self, ranks: tuple[int, ...], slots: dict[tuple[int, str], list[Call]]) -> None:
        """Notes the first slot at which the ranks of a group do not meet; one note per group."""
        for k, gid in sorted(slots):
            calls = slots[k, gid]
            missing = sorted(set(ranks) - {c.rank for c in calls})
            kinds = {
                (c.skeleton, c.fixed, c.group, tuple([self.types[c.rank].get(name) for name in c.refs])) for c in calls
            }
            if missing:
                what = f"rank {missing[0]} issues {k} collectives only"
            elif len(kinds) > 1:
                what = "the calls differ in operator, shape, attributes or rank order"
            else:
                continue
            nodes = "; ".join(self._where(c) for c in calls[:4])
            self.problems.append(
                f"collective {k + 1} of process group {list(ranks)} does not meet: {what} ({nodes}); "
                "where ranks differ its nodes are left as partial families"
            )
            return

    def _where(self, call: Call) -> str:
        node = call.node
        shape = f" {node.dtype}{list(node.shape)}" if node.shape is not None else ""
        return f"rank {call.rank}: {node.name!r} = {node.op}{shape}{f' at {node.source}' if node.source else ''}"

    # -- joins ----------------------------------------------------------------------------------------------------

    def _join_operands(self, family: Family) -> None:
        if not family.calls:
            return
        first = next(iter(family.calls.values()))
        for k, name in enumerate(first.refs):
            if first.collective is None or len(family.calls) == 1:
                family.operands.append(self.of[first.rank][name])
            else:
                members = {r: c.refs[k] for r, c in family.calls.items()}
                family.operands.append(self._joined(members, f"{first.node.name}.operand{k}"))

    def _joined(self, members: dict[int, str], name: str) -> Family:
        """The family of these members (all of one type); a mixed one when they belong to different families."""
        pieces = {r: self.of[r][member] for r, member in sorted(members.items())}
        families = {f.uid: f for f in pieces.values()}
        if len(families) == 1:
            return next(iter(families.values()))
        key = tuple((r, f.uid) for r, f in pieces.items())
        if key not in self.joins:
            family = self._new_family()
            family.members = dict(sorted(members.items()))
            family.pieces = pieces
            family.operands = list(families.values())
            family.type = next(iter(pieces.values())).type
            family.name = name
            self.joins[key] = family
        return self.joins[key]

    def _zip_outputs(self) -> list[tuple[int, Family | None, dict[int, str | None]]]:
        counts = [len(g.outputs) for g in self.graphs]
        if len(set(counts)) > 1:
            r = next(r for r in range(self.world) if counts[r] != counts[0])
            self._note(
                f"rank 0 has {counts[0]} outputs and rank {r} has {counts[r]}; outputs are paired by position, "
                "the surplus exists on some ranks only"
            )
        out: list[tuple[int, Family | None, dict[int, str | None]]] = []
        for position in range(max(counts)):
            parts: dict[Any, dict[int, str | None]] = {}
            for r, graph in enumerate(self.graphs):
                if position < len(graph.outputs):
                    name = graph.outputs[position]
                    kind: Any = None
                    if name is not None:
                        kind = self.types[r].get(name) or self.of[r][name].uid
                    parts.setdefault(kind, {})[r] = name
            for members in parts.values():
                named = {r: n for r, n in members.items() if n is not None}
                out.append((position, self._joined(named, f"output{position}") if named else None, members))
        return out

    def _note(self, problem: str) -> None:
        if problem not in self.problems:
            self.problems.append(problem)

    # -- order and result -----------------------------------------------------------------------------------------

    def _sorted(self) -> tuple[list[Family], list[Family]]:
        """Families in data-flow order, as close to rank 0's order as possible, and those on (or between) cycles."""
        for r, calls in enumerate(self.calls):
            last = -1
            for call in calls:
                family = self.of[r][call.node.name]
                if min(family.calls) == r:
                    family.order = (call.position, 0, 0) if r == 0 else (last, r, call.position)
                last = family.order[0]
        for family in self.families:
            if family.pieces:
                last = max(p.order[0] if p.calls else -1 for p in family.operands)
                family.order = (last, self.world, family.uid)
        waiting = {f.uid: len(f.operands) for f in self.families}
        users: dict[int, list[Family]] = {}
        for family in self.families:
            for operand in family.operands:
                users.setdefault(operand.uid, []).append(family)
        heap = [(f.item is None, f.order, f.uid) for f in self.families if not f.operands]
        heapq.heapify(heap)
        order: list[Family] = []
        while heap:
            family = self.families[heapq.heappop(heap)[2]]
            order.append(family)
            for user in users.get(family.uid, ()):
                waiting[user.uid] -= 1
                if waiting[user.uid] == 0:
                    heapq.heappush(heap, (True, user.order, user.uid))
        done = {f.uid for f in order}
        stuck = [f for f in self.families if f.uid not in done]
        while stuck:  # what lies behind a cycle is not to blame
            read = {o.uid for f in stuck for o in f.operands}
            kept = [f for f in stuck if f.uid in read]
            if len(kept) == len(stuck):
                break
            stuck = kept
        return order, stuck

    def _built(
        self, order: list[Family], outputs: list[tuple[int, Family | None, dict[int, str | None]]]
    ) -> FamilyGraph:
        taken: set[str] = set()
        # rank 0 first, so that its names stay as they are; joins last
        for family in sorted(order, key=lambda f: (bool(f.pieces), min(f.members))):
            rank = min(family.members)
            name = base = family.name or family.members[rank]
            if name in taken:
                name = base = f"{base}@{rank}"
            tries = 1
            while name in taken:
                tries += 1
                name = f"{base}#{tries}"
            family.name = name
            taken.add(name)
        inputs: list[FamilyInput] = []
        nodes: list[FamilyNode] = []
        for i, family in enumerate(order):
            if family.item is not None:
                family.item.id, family.item.name = i, family.name
                inputs.append(family.item)
            else:
                nodes.append(mixed_node(i, family) if family.pieces else family_node(i, family))
        return FamilyGraph(
            ranks=self.world,
            inputs=inputs,
            nodes=nodes,
            outputs=[FamilyOutput(p, f.name if f else None, tuple(m), m) for p, f, m in outputs],
            problems=self.problems,
            graphs=self.graphs,
            format=self.graphs[0].format,
            direction=self.graphs[0].direction,
        )
