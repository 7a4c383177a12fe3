"""The zip of :func:`emerge.facts.families.zip_families`: rank after rank is laid over the families found so far.

Why this is linear: on one rank, calls of one operator with the very same operands form a *batch*, and a batch can only
meet families with the same (already known) operand families. So every call is looked up once, never compared with all.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from math import prod
from typing import Any

from emerge.facts.collectives import Collective, collective_of
from emerge.facts.families import DEFAULT_AXIS, FamilyGraph, FamilyInput, FamilyNode, FamilyOutput
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
    sorted_families,
    walk,
)
from emerge.facts.mesh import Mesh
from emerge.facts.messages import is_send, meet, stages
from emerge.facts.sameness import RankValues, is_commutative
from emerge.graph.model import Graph, Node, TensorType
from emerge.util.errors import GraphError

#: Calls of a multi-output operator whose element types contradict are kept apart by trying this many groups of calls.
_VARIANTS = 8
#: Positional arguments that a capture leaves out on the ranks where they have their default, and writes on the others.
DEFAULTS: dict[str, list[Any]] = {"aten.tril.default": [None, 0], "aten.triu.default": [None, 0]}


class Zipper:
    """Holds the state of one zip; use :func:`emerge.facts.families.zip_families`."""

    def __init__(self, graphs: Sequence[Graph], mesh: dict[str, int] | None = None) -> None:
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
        self.values = [RankValues(g, t) for g, t in zip(graphs, self.types)]
        self._numbers: dict[Any, int] = {}
        self.calls = [[self._call(r, p, n) for p, n in enumerate(g.nodes)] for r, g in enumerate(graphs)]
        self.stage = self._stages(mesh or self.graphs[0].mesh)
        for r in range(self.world):
            self._number_uses(r)
        self.slot_of = self._slots()
        met, unmet = meet(self.calls, self.types)
        self.met = {} if unmet else met  # where messages do not meet, ranks wait for ever: nothing is said of any
        self.problems += unmet
        self.apart: set[Any] = set()  # slots whose calls are not zipped, because that would close a cycle
        self.alone: set[int] = set()  # ids of other calls that are not zipped, for the same reason

    def run(self) -> FamilyGraph:
        """Zips; where ranks do things in crossed orders, joining them closes a cycle: then without these."""
        while True:
            self.families: list[Family] = []
            self.of: list[dict[str, Family]] = [{} for _ in self.graphs]
            self.joins: dict[Any, Family] = {}
            self.variants: dict[Any, list[dict[int, TensorType]]] = {}
            self._zip_inputs()
            self._zip_nodes()
            for family in list(self.families):
                self._join_operands(family)
            self._join_messages()
            if self._writes_to_join():
                continue
            outputs = self._zip_outputs()
            order, stuck = self._sorted()
            if not stuck:
                return self._built(order, outputs)
            self._take_apart(stuck)

    def _writes_to_join(self) -> bool:
        """Keeps apart collectives that write in place to different families: a join of these cannot be written to."""
        found = [
            f
            for f in self.families
            if f.slots and any(o.pieces for o in f.operands)
            and any(c.node.name in self.values[r].writers for r, c in f.calls.items())
        ]  # fmt: skip
        for family in found:
            self.apart |= family.slots
            self.problems.append(
                "a collective writes in place to what ranks compute differently: "
                + "; ".join(self._where(c) for c in list(family.calls.values())[:2])
                + "; it is left apart, rank by rank"
            )
        return bool(found)

    def _take_apart(self, stuck: list[Family]) -> None:
        """Keeps apart what closes a cycle: first messages, then what reads and writes memory, then collectives.

        Each time there are fewer messages, or more is kept apart: edges between other families hold on all ranks of the
        later one, and so do edges between families of one rank; a cycle of these would be a cycle in the graph of a rank.
        """
        waiting = [f for f in stuck if f.sent is not None]
        if waiting:
            for c in (c for f in waiting for c in f.calls.values()):
                del self.met[id(c)]
            self.problems.append(
                "messages wait for one another (a deadlock when executed): "
                + "; ".join(self._where(c) for f in waiting[:2] for c in list(f.calls.values())[:2])
                + "; nothing is known of what they receive"
            )
            return
        uids = {f.uid for f in stuck}
        fixed = {f.uid: f for pair in self._memory_order() if uids.issuperset(g.uid for g in pair) for f in pair}
        writers = [f for f in fixed.values() if len(f.calls) > 1]
        if writers:
            self.apart |= {s for f in writers for s in f.slots}
            self.alone |= {id(c) for f in writers for c in f.calls.values()}
            self.problems.append(
                "memory is read and written in place in different orders on different ranks: "
                + "; ".join(self._where(c) for c in list(writers[0].calls.values())[:2])
                + "; such reads and writes are left apart, rank by rank"
            )
            return
        crossed = {s for f in stuck for s in f.slots}
        assert crossed - self.apart, "a cycle must go through a collective"
        self.apart |= crossed
        calls = [c for f in stuck for c in list(f.calls.values())[:2] if f.slots]
        self.problems.append(
            "collectives are issued in crossed orders on different ranks (a deadlock when executed): "
            + "; ".join(self._where(c) for c in calls[:4])
            + "; they are left apart, rank by rank"
        )

    def _stages(self, axes: dict[str, int]) -> list[int]:
        """Stage of every rank; what belongs to different stages must not be zipped, so it is in the structure."""
        fits = prod(axes.values()) == self.world
        stage = stages(self.calls, Mesh(axes if axes and fits else {DEFAULT_AXIS: self.world}))
        for number, calls in zip(stage, self.calls):
            issued: Counter[str] = Counter()
            for call in calls:
                if call.collective is None:
                    call.skeleton = self._number(("stage", call.skeleton, number)) if number else call.skeleton
                elif call.collective.point_to_point:
                    # messages are zipped in the order in which they are issued
                    call.skeleton = self._number(("message", call.skeleton, number, issued[call.node.op]))
                    issued[call.node.op] += 1
        return stage

    # -- reading --------------------------------------------------------------------------------------------------

    def _number(self, key: Any) -> int:
        """A small number for a (deep) key, equal for equal keys."""
        return self._numbers.setdefault(key, len(self._numbers))

    def _call(self, rank: int, position: int, node: Node) -> Call:
        args = [no_device(a) for a in node.args]
        if not node.kwargs:
            args += DEFAULTS.get(node.op, [])[len(args) :]
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
            # which outputs of an ordinary call are used may differ between ranks
            tuple(sorted((k, t.dtype, t.shape) for k, t in node.elements.items())) if collective is not None else None,
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
        values = self.values[rank]
        return Call(
            rank, position, node, args, kwargs, self._number(skeleton), tuple(scalars), tuple(refs), fixed,
            collective, group, group_id,
            reads=tuple([(values.root(name), values.version(node.name, name)) for name in refs]),
            commutative=is_commutative(node), identity=node.name in values.through,
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
        """Numbers the way each call is used: all that follows it, the same but for the order of operands that may be
        exchanged, and its direct consumers only. Scalars are ignored and identities looked through.
        """
        values = self.values[rank]
        consumers: dict[str, list[tuple[int, int, int, int, int]]] = {}
        for i, out in enumerate(self.graphs[rank].outputs):
            if out is not None:
                for name in {out, values.root(out)}:
                    consumers.setdefault(name, []).append((-1, i, i, 0, 0))
        for call in reversed(self.calls[rank]):
            used = consumers.get(call.node.name, [])
            ordered, loose, direct = [], [], []
            for skeleton, k, place, after, loosely in used:
                ordered.append((skeleton, k, after))
                loose.append((skeleton, place, loosely))
                direct.append((skeleton, place))
            call.uses = (
                self._number(("uses", tuple(sorted(ordered)))),
                self._number(("loose", tuple(sorted(loose)))),
                self._number(("consumers", tuple(sorted(direct)))),
            )
            for k, (name, (root, _)) in enumerate(zip(call.refs, call.reads)):
                entry = (call.skeleton, k, 0 if call.commutative else k, call.uses[0], call.uses[1])
                if name != root:
                    consumers.setdefault(name, []).append(entry)
                if not call.identity:
                    consumers.setdefault(root, []).append(entry)

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
                        waiting.setdefault((k, item.dtype, item.shape, self.stage[first]), []).append(members)
                unmatched = []
                for p in left:
                    k = key(r, p)
                    candidates = waiting.get((k, graph.inputs[p].dtype, graph.inputs[p].shape, self.stage[r]))
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
                    batches.setdefault((call.skeleton, call.operands), []).append(call)
            for call in calls:
                slot = self.slot_of.get(id(call))
                if slot is not None:
                    self._place_collective(call, slot, by_key, slots)
                elif call.node.name not in of:  # else placed with its batch
                    self._place_batch(batches[call.skeleton, call.operands], by_key)

    def _place_batch(self, batch: list[Call], by_key: dict[Any, list[Family]]) -> None:
        """Places calls of one operator with the same operands."""
        rank = batch[0].rank
        if self.alone:
            for call in batch:
                if id(call) in self.alone:
                    self._place(call, self._new_family())
            batch = [c for c in batch if id(c) not in self.alone]
            if not batch:
                return
        key = (batch[0].skeleton, self._operand_key(batch[0]))
        groups = {key: batch}
        if batch[0].node.is_tuple:
            groups = {}
            for call in batch:
                groups.setdefault(self._variant(key, call), []).append(call)
        for variant, calls in groups.items():
            free = [f for f in by_key.get(variant, ()) if rank not in f.taken]
            for c, family in paired(calls, free):
                self._place(c, family or self._keyed(variant, by_key))

    def _operand_key(self, call: Call) -> tuple[tuple[int, int], ...]:
        of = self.of[call.rank]
        key = [(of[root].uid, version) for root, version in call.reads]
        return tuple(sorted(key)) if call.commutative else tuple(key)

    def _variant(self, key: Any, call: Call) -> Any:
        """The key with a number, such that calls with contradicting types of a used output have different ones."""
        elements = call.node.elements
        variants = self.variants.setdefault(key, [])
        for number, known in enumerate(variants):
            if all(known.get(i, t) == t for i, t in elements.items()):
                known.update(elements)
                return (*key, number)
        if len(variants) == _VARIANTS:  # more would not be linear
            return (*key, tuple(sorted((i, t.dtype, t.shape) for i, t in elements.items())))
        variants.append(dict(elements))
        return (*key, len(variants) - 1)

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
                key = ("collective", call.skeleton, self._operand_key(call))
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
        calls = list(family.calls.values())
        first = calls[0]
        for k, (name, (root, _)) in enumerate(zip(first.refs, first.reads)):
            if (first.collective is None or len(calls) == 1) and name == root:
                family.operands.append(self.of[first.rank][root])
                continue
            places = {c.rank: self._place_of(first, c, k) for c in calls}
            members = {c.rank: c.refs[places[c.rank]] for c in calls}
            versions = tuple([c.reads[places[c.rank]][1] for c in calls])
            family.operands.append(self._joined(members, f"{first.node.name}.operand{k}", versions))

    def _join_messages(self) -> None:
        """A receive reads the send it takes its value from, where that is one family for all its members."""
        sends = {id(send): receive for receive, send in self.met.items()}
        for family in list(self.families):
            calls = list(family.calls.values())
            if not calls or calls[0].collective is None or not calls[0].collective.point_to_point:
                continue
            if is_send(calls[0].node.op):
                family.met = all(id(c) in sends for c in calls)
                continue
            found = [self.met.get(id(c)) for c in calls]
            sources = {self.of[s.rank][s.node.name].uid for s in found if s is not None}
            if None not in found and len(sources) == 1:
                family.sent, family.met = self.families[sources.pop()], True
                family.operands.append(family.sent)

    def _place_of(self, first: Call, call: Call, k: int) -> int:
        """Where ``call`` has what is operand ``k`` of ``first``, a call of the same family."""
        if not call.commutative or call is first:
            return k
        mine, other = call.reads[0], first.reads[0]
        same = self.of[call.rank][mine[0]] is self.of[first.rank][other[0]] and mine[1] == other[1]
        return k if same else 1 - k

    def _joined(self, members: dict[int, str], name: str, versions: Any) -> Family:
        """The family that has these values (all of one type); a mixed one when they belong to different families.

        Args:
            versions: tell apart what the same names stand for at different times.
        """
        members = {r: self._shared(r, member) for r, member in sorted(members.items())}
        pieces = {r: self.of[r][member] for r, member in members.items()}
        families = {f.uid: f for f in pieces.values()}
        if len(families) == 1:
            return next(iter(families.values()))
        roots = {self.of[r][self.values[r].root(member)].uid for r, member in members.items()}
        if len(roots) == 1:
            return self.families[roots.pop()]
        key = (versions, tuple((r, f.uid) for r, f in pieces.items()))
        if key not in self.joins:
            family = self._new_family()
            family.members = members
            family.pieces = pieces
            family.operands = list(families.values())
            family.type = next(iter(pieces.values())).type
            family.name = name
            self.joins[key] = family
        return self.joins[key]

    def _shared(self, rank: int, member: str) -> str:
        """The member, or the first value it is the same as whose family is on all ranks, if there is one."""
        for name in self.values[rank].path(member):
            if len(self.of[rank][name].members) == self.world:
                return name
        return member

    def _zip_outputs(self) -> list[tuple[int, Family | None, dict[int, str | None]]]:
        counts = [len(g.outputs) for g in self.graphs]
        for r in range(self.world):
            first = self.stage.index(self.stage[r])
            if counts[r] != counts[first]:
                self._note(
                    f"rank {first} has {counts[first]} outputs and rank {r} has {counts[r]}; outputs are paired by "
                    "position, the surplus exists on some ranks only"
                )
                break
        out: list[tuple[int, Family | None, dict[int, str | None]]] = []
        for position in range(max(counts)):
            parts: dict[Any, dict[int, str | None]] = {}
            for r, graph in enumerate(self.graphs):
                if position < len(graph.outputs):
                    name = graph.outputs[position]
                    kind: Any = None
                    if name is not None:
                        kind = (self.stage[r], self.types[r].get(name) or self.of[r][name].uid)
                    parts.setdefault(kind, {})[r] = name
            for members in parts.values():
                named = {r: n for r, n in members.items() if n is not None}
                joined = self._joined(named, f"output{position}", self._final(named)) if named else None
                out.append((position, joined, members))
        return out

    def _final(self, named: dict[int, str]) -> Any:
        """What tells the values at the end of the ranks from earlier ones; that of an operand where nobody writes."""
        last = tuple([self.values[r].last.get(name) for r, name in named.items()])
        return last if any(last) else (0,) * len(named)

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
        before = {f.uid: [o.uid for o in f.operands] for f in self.families}
        for earlier, later in self._memory_order():
            before[later.uid].append(earlier.uid)
        return sorted_families(self.families, before)

    def _memory_order(self) -> Iterator[tuple[Family, Family]]:
        """(earlier, later) families by the order in which ranks read and write memory."""
        for of, values in zip(self.of, self.values):
            for earlier, later in values.order:
                yield of[earlier], of[later]
            for writer, reader in values.after:
                for joined in of[reader].operands:
                    if joined.pieces:
                        yield of[writer], joined
        for (versions, pieces), joined in self.joins.items():
            for last, (r, _) in zip(versions, pieces):
                if type(last) is str:  # what is joined at an output
                    yield self.of[r][last], joined

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
            stages=self.stage,
        )
