"""Collective and point-to-point communication between ranks that run in one process.

Calls are asynchronous, as in the captured programs: issuing one hands in the operands and returns a
:class:`Pending` value; reading that value waits. Collectives are matched by issue order within their process
group, point-to-point messages by order per (source, destination, tag).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from emerge.execute._torch import torch
from emerge.execute.aliasing import split_op
from emerge.execute.ops.base import Call
from emerge.graph.model import Graph
from emerge.util.errors import ExecutionError


@dataclass(frozen=True, slots=True)
class Waiting:
    """One rank that cannot go on: at which node it waits, and for what."""

    rank: int
    node: str
    what: str


class CollectiveMismatch(ExecutionError):
    """The ranks' communication does not fit together: it would hang or mix up data on real devices.

    It is a finding about the implementation (a collective that one rank skips, another order, another shape), or
    the process-group table is wrong.

    Attributes:
        kind: ``mismatch`` (calls that meet differ), ``deadlock`` (nobody can go on), ``unmatched`` (a call that
            nobody waits for has no counterpart).
        waiting: the ranks involved.
    """

    def __init__(self, kind: str, message: str, waiting: Sequence[Waiting]) -> None:
        super().__init__(message, place="lockstep", node=waiting[0].node if waiting else "")
        self.kind = kind
        self.waiting = tuple(waiting)


@dataclass(eq=False, slots=True)
class Pending:
    """Result of a communication call that may not have arrived yet."""

    node: str
    what: str
    ready: bool = False
    value: Any = None

    def resolve(self, value: Any) -> None:
        """Deliver the result."""
        self.value = value
        self.ready = True


@dataclass(slots=True)
class CollectiveCall:
    """One issued collective.

    Attributes:
        kind: ``all_reduce``, ``all_gather``, ``reduce_scatter``, ``all_to_all``, ``shard_all_to_all``, ``broadcast``.
        tensors: operands (several for a coalesced call).
        dtypes: recorded dtypes of the operands.
        ranks: members of the group in group order.
        attributes: reduce operator, dimensions, sizes; equal on all ranks, except the splits of ``all_to_all``.
        many: the result is a list.
    """

    kind: str
    rank: int
    node: str
    op: str
    tensors: list[Any]
    dtypes: list[str | None]
    group: str
    ranks: tuple[int, ...]
    attributes: dict[str, Any] = field(default_factory=dict)
    many: bool = False
    splits: tuple[list[int], list[int]] | None = None
    pending: Pending = field(default_factory=lambda: Pending("", ""))

    def signature(self) -> tuple[Any, ...]:
        """What has to be equal on all ranks of the group."""
        # all_to_all pieces may differ in length along dimension 0.
        shapes = [tuple(t.shape[1:] if self.kind == "all_to_all" else t.shape) for t in self.tensors]
        return (self.kind, tuple(sorted(self.attributes.items())), tuple(shapes), tuple(self.dtypes))

    def describe(self) -> str:
        """Words for messages, e.g. ``all_reduce(sum) of [4, 8] float32 in group '12'``."""
        shapes = ", ".join(f"{list(t.shape)} {d}" for t, d in zip(self.tensors, self.dtypes))
        attributes = ", ".join(f"{k}={v}" for k, v in self.attributes.items())
        return f"{self.kind}({attributes}) of {shapes} in group '{self.group}' {list(self.ranks)}"


@dataclass(slots=True)
class Message:
    """An operand of a point-to-point call on its way."""

    rank: int
    node: str
    tensor: Any
    pending: Pending


class Board:
    """Where ranks meet: slots of collectives per process group and mailboxes.

    Args:
        graphs: one per rank; position = global rank.
        groups: process-group id -> rank lists; added to (and preferred over) what the graphs carry.
    """

    def __init__(self, graphs: Sequence[Graph], groups: dict[str, list[list[int]]] | None = None) -> None:
        self.size = len(graphs)
        self._tables = [{**g.groups, **(groups or {})} for g in graphs]
        self._slots: dict[Any, list[dict[int, CollectiveCall]]] = {}
        self._issued: dict[Any, dict[int, int]] = {}
        self._sent: dict[Any, deque[Message]] = {}
        self._awaited: dict[Any, deque[Message]] = {}
        self.events = 0

    def members(self, call: Call, group: Any) -> tuple[int, ...]:
        """Ranks of process group ``group`` as the calling rank sees it, in group order.

        Raises:
            ExecutionError: several ranks run and the table has no entry for this id and rank.
        """
        if self.size == 1:
            return (0,)
        table = self._tables[call.rank]
        lists = table.get(str(group))
        if lists is None:
            known = ", ".join(sorted(table)) or "none"
            raise call.error(f"process group '{group}' is not in the group table (known: {known}); add it to 'groups'")
        found = [tuple(ranks) for ranks in lists if call.rank in ranks]
        if len(found) != 1:
            raise call.error(f"rank {call.rank} is in {len(found)} rank lists of process group '{group}', expected one")
        if not all(0 <= r < self.size for r in found[0]):
            ranks = list(found[0])
            raise call.error(f"process group '{group}' = {ranks} names ranks that do not run (0..{self.size - 1})")
        return found[0]

    def _key(self, group: str, ranks: tuple[int, ...]) -> Any:
        """Identity of a communicator: its id where all members use it for these ranks, else just its ranks."""
        shared = all(any(tuple(g) == ranks for g in self._tables[r].get(group, ())) for r in ranks)
        return (group if shared or group == "hlo" else "", ranks)

    def issue(self, call: CollectiveCall) -> Pending:
        """Hand in a collective; it completes when every rank of the group has handed in its own.

        Raises:
            CollectiveMismatch: the calls in one slot differ.
        """
        self.events += 1
        call.pending = Pending(call.node, call.describe())
        key = self._key(call.group, call.ranks)
        position = self._issued.setdefault(key, {}).get(call.rank, 0)
        self._issued[key][call.rank] = position + 1
        slots = self._slots.setdefault(key, [])
        while len(slots) <= position:
            slots.append({})
        slot = slots[position]
        for other in slot.values():
            if other.signature() != call.signature():
                raise _mismatch([other, call])
        slot[call.rank] = call
        if len(slot) == len(call.ranks):
            calls = [slot[r] for r in call.ranks]
            for member, values in zip(calls, complete(calls)):
                member.pending.resolve(values if member.many else values[0])
                member.tensors = []
            slot.clear()
        return call.pending

    def send(self, call: Call, tensor: Any, target: int, tag: int, group: Any) -> Pending:
        """Post a message to global rank ``target``; sending never waits."""
        pending = Pending(call.node.name, f"send to rank {target}", ready=True, value=tensor.new_empty(0))
        self._post(call, self._sent, (call.rank, target, tag), tensor, pending)
        return pending

    def receive(self, call: Call, like: Any, source: int, tag: int, group: Any) -> Pending:
        """Wait for a message from global rank ``source`` of the shape and recorded dtype of ``like``."""
        pending = Pending(call.node.name, f"receive from rank {source} with tag {tag}")
        self._post(call, self._awaited, (source, call.rank, tag), like, pending)
        return pending

    def _post(self, call: Call, box: dict[Any, deque[Message]], key: Any, tensor: Any, pending: Pending) -> None:
        if not (0 <= key[0] < self.size and 0 <= key[1] < self.size):
            raise call.error(f"names a peer that does not run: {key[0]} -> {key[1]} of {self.size} ranks")
        self.events += 1
        box.setdefault(key, deque()).append(Message(call.rank, call.node.name, tensor, pending))
        sent, awaited = self._sent.get(key), self._awaited.get(key)
        while sent and awaited:
            message, buffer = sent.popleft(), awaited.popleft()
            if message.tensor.shape != buffer.tensor.shape or message.tensor.dtype != buffer.tensor.dtype:
                words = [f"{list(m.tensor.shape)} {m.tensor.dtype}" for m in (message, buffer)]
                raise CollectiveMismatch(
                    "mismatch",
                    f"rank {message.rank} node '{message.node}' sends {words[0]}, "
                    f"but rank {buffer.rank} node '{buffer.node}' receives {words[1]}",
                    [
                        Waiting(message.rank, message.node, f"send of {words[0]}"),
                        Waiting(buffer.rank, buffer.node, f"receive of {words[1]}"),
                    ],
                )
            buffer.pending.resolve(message.tensor)

    def leftovers(self) -> list[Waiting]:
        """Calls without counterpart after all ranks have finished."""
        left = [
            Waiting(call.rank, call.node, f"{call.describe()}; absent: rank {sorted(set(call.ranks) - set(slot))}")
            for slots in self._slots.values()
            for slot in slots
            for call in slot.values()
        ]
        for box, word in ((self._sent, "send"), (self._awaited, "receive")):
            for (source, target, tag), messages in box.items():
                left += [Waiting(m.rank, m.node, f"{word} {source} -> {target} tag {tag}") for m in messages]
        return left


def _mismatch(calls: list[CollectiveCall]) -> CollectiveMismatch:
    words = "; ".join(f"rank {c.rank} node '{c.node}' issues {c.describe()}" for c in calls)
    return CollectiveMismatch(
        "mismatch",
        f"collectives that meet by issue order differ: {words}",
        [Waiting(c.rank, c.node, c.describe()) for c in calls],
    )


def complete(calls: list[CollectiveCall]) -> list[list[Any]]:
    """Results of a full slot, one list per member in group order.

    Raises:
        CollectiveMismatch: split sizes that do not fit.
        ExecutionError: unknown reduce operator, or a dimension that does not divide.
    """
    first = calls[0]
    per_operand = []
    for index in range(len(first.tensors)):
        tensors = [c.tensors[index] for c in calls]
        per_operand.append(_KINDS[first.kind](calls, tensors))
    return [[results[i] for results in per_operand] for i in range(len(calls))]


def reduce_tensors(call: CollectiveCall, tensors: list[Any], operator: str) -> Any:
    """Elementwise reduction over the ranks in group order; integers wrap in their type."""
    name = operator.lower().removeprefix("reduceop.").removeprefix("redoptype.")
    function = _REDUCTIONS.get(name)
    if function is None or (name == "avg" and not tensors[0].is_floating_point()):
        known = ", ".join(sorted(_REDUCTIONS))
        raise ExecutionError(
            f"reduce operator '{operator}' of {tensors[0].dtype} has no known meaning; known are {known}",
            place=f"rank {call.rank} node '{call.node}'",
            node=call.node,
        )
    result = tensors[0]
    for tensor in tensors[1:]:
        result = function(result, tensor)
    return result / len(tensors) if name == "avg" else result


_REDUCTIONS: dict[str, Callable[[Any, Any], Any]] = {
    **{n: lambda a, b: a | b if a.dtype == torch.bool else a + b for n in ("sum", "avg", "add")},
    **{n: lambda a, b: a * b for n in ("product", "prod", "multiply")},
    **{n: lambda a, b: torch.maximum(a, b) for n in ("max", "maximum")},
    **{n: lambda a, b: torch.minimum(a, b) for n in ("min", "minimum")},
    **{n: lambda a, b: a & b for n in ("band", "and")},
    **{n: lambda a, b: a | b for n in ("bor", "or")},
    **{n: lambda a, b: a ^ b for n in ("bxor", "xor")},
}


def _all_reduce(calls: list[CollectiveCall], tensors: list[Any]) -> list[Any]:
    result = reduce_tensors(calls[0], tensors, calls[0].attributes["reduce"])
    return [result for _ in calls]


def _all_gather(calls: list[CollectiveCall], tensors: list[Any]) -> list[Any]:
    dim = calls[0].attributes.get("dim", 0)
    result = torch.cat([t if t.dim() else t.reshape(1) for t in tensors], dim)
    return [result for _ in calls]


def _pieces(call: CollectiveCall, tensor: Any, dim: int, parts: int) -> list[Any]:
    if tensor.dim() == 0 or tensor.shape[dim] % parts:
        raise ExecutionError(
            f"{call.describe()} cannot be cut into {parts} equal pieces along dimension {dim}",
            place=f"rank {call.rank} node '{call.node}'",
            node=call.node,
        )
    return list(tensor.chunk(parts, dim))


def _reduce_scatter(calls: list[CollectiveCall], tensors: list[Any]) -> list[Any]:
    result = reduce_tensors(calls[0], tensors, calls[0].attributes["reduce"])
    return [p.clone() for p in _pieces(calls[0], result, calls[0].attributes.get("dim", 0), len(calls))]


def _all_to_all(calls: list[CollectiveCall], tensors: list[Any]) -> list[Any]:
    n = len(calls)
    cut = []
    for call, tensor in zip(calls, tensors):
        sizes = call.splits[1] if call.splits and call.splits[1] else None
        if sizes is None:
            cut.append(_pieces(call, tensor, 0, n))
        elif len(sizes) != n or sum(sizes) != tensor.shape[0]:
            raise CollectiveMismatch(
                "mismatch",
                f"rank {call.rank} node '{call.node}' splits {tensor.shape[0]} rows into {sizes} for {n} ranks",
                [Waiting(call.rank, call.node, call.describe())],
            )
        else:
            cut.append(list(tensor.split(sizes)))
    results = []
    for i, call in enumerate(calls):
        received = [cut[j][i] for j in range(n)]
        expected = call.splits[0] if call.splits and call.splits[0] else None
        if expected is not None and [p.shape[0] for p in received] != list(expected):
            raise CollectiveMismatch(
                "mismatch",
                f"rank {call.rank} node '{call.node}' expects {list(expected)} rows from ranks {list(call.ranks)}, "
                f"but they send {[p.shape[0] for p in received]}",
                [Waiting(c.rank, c.node, c.describe()) for c in calls],
            )
        results.append(torch.cat(received))
    return results


def _shard_all_to_all(calls: list[CollectiveCall], tensors: list[Any]) -> list[Any]:
    gather, shard = calls[0].attributes["gather_dim"], calls[0].attributes["shard_dim"]
    whole = torch.cat(tensors, gather)
    return [p.clone() for p in _pieces(calls[0], whole, shard, len(calls))]


def _broadcast(calls: list[CollectiveCall], tensors: list[Any]) -> list[Any]:
    source = calls[0].attributes["src"]
    if not 0 <= source < len(tensors):
        raise ExecutionError(
            f"broadcast source {source} is not a position in the group {list(calls[0].ranks)}",
            place=f"rank {calls[0].rank} node '{calls[0].node}'",
            node=calls[0].node,
        )
    return [tensors[source] for _ in calls]


_KINDS: dict[str, Callable[[list[CollectiveCall], list[Any]], list[Any]]] = {
    "all_reduce": _all_reduce,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
    "shard_all_to_all": _shard_all_to_all,
    "broadcast": _broadcast,
}


def is_collective(op: str) -> bool:
    """True for operators that communicate (``wait_tensor`` does not)."""
    namespace, name, _ = split_op(op)
    return f"{namespace}.{name}" in _ISSUERS


def issue(board: Board, call: Call) -> Any:
    """Issue the communication of a node; its value, with :class:`Pending` inside."""
    namespace, name, _ = split_op(call.node.op)
    return _ISSUERS[f"{namespace}.{name}"](board, call)


def _collective(
    board: Board,
    call: Call,
    kind: str,
    operand: Any,
    group: Any,
    attributes: dict[str, Any] | None = None,
    *,
    position: int = 0,
    size: Any = None,
    splits: tuple[list[int], list[int]] | None = None,
    ranks: tuple[int, ...] | None = None,
) -> Pending:
    many = isinstance(operand, (list, tuple))
    tensors = list(operand) if many else [operand]
    ranks = board.members(call, group) if ranks is None else ranks
    if size is not None and int(size) != len(ranks):
        raise call.error(f"is written for a group of {size} ranks, but group '{group}' has {len(ranks)}")
    named = call.node.args[position] if position < len(call.node.args) else None
    sources = named if isinstance(named, list) else [named]
    known = [call.types.get(getattr(s, "name", "")) for s in sources]
    dtypes: list[str | None] = [k.dtype if k is not None else str(t.dtype) for k, t in zip(known, tensors)]
    issued = CollectiveCall(
        kind=kind,
        rank=call.rank,
        node=call.node.name,
        op=call.node.op,
        tensors=tensors,
        dtypes=dtypes,
        group=str(group),
        ranks=ranks,
        attributes=attributes or {},
        many=many,
        splits=splits,
    )
    return board.issue(issued)


def _issue_all_reduce(board: Board, call: Call) -> Any:
    b = call.bind("input", "reduce_op", "group_name")
    return _collective(board, call, "all_reduce", b["input"], b["group_name"], {"reduce": b["reduce_op"]})


def _issue_all_gather(board: Board, call: Call) -> Any:
    b = call.bind("input", "group_size", "group_name", "out")
    return _collective(board, call, "all_gather", b["input"], b["group_name"], size=b["group_size"])


def _issue_reduce_scatter(board: Board, call: Call) -> Any:
    b = call.bind("input", "reduce_op", "group_size", "group_name", "out")
    reduce = {"reduce": b["reduce_op"]}
    return _collective(board, call, "reduce_scatter", b["input"], b["group_name"], reduce, size=b["group_size"])


def _issue_all_to_all(board: Board, call: Call) -> Any:
    b = call.bind("input", "output_split_sizes", "input_split_sizes", "group_name")
    splits = (list(b["output_split_sizes"] or []), list(b["input_split_sizes"] or []))
    return _collective(board, call, "all_to_all", b["input"], b["group_name"], splits=splits)


def _issue_broadcast(board: Board, call: Call) -> Any:
    b = call.bind("input", "src", "group_name")
    return _collective(board, call, "broadcast", b["input"], b["group_name"], {"src": int(b["src"])})


def _issue_send(board: Board, call: Call) -> Any:
    b = call.bind("tensor", "dst", "tag", "group_name", tag=0)
    return board.send(call, b["tensor"], int(b["dst"]), int(b["tag"]), b["group_name"])


def _issue_receive(board: Board, call: Call) -> Any:
    b = call.bind("tensor", "src", "tag", "group_name", tag=0)
    return board.receive(call, b["tensor"], int(b["src"]), int(b["tag"]), b["group_name"])


def _issue_vllm_all_reduce(board: Board, call: Call) -> Any:
    b = call.bind("tensor", "group_name")
    return _collective(board, call, "all_reduce", b["tensor"], b["group_name"], {"reduce": "sum"})


def _issue_vllm_all_gather(board: Board, call: Call) -> Any:
    b = call.bind("tensor", "dim", "world_size", "group_name")
    dim = {"dim": int(b["dim"]) % b["tensor"].dim()}
    return _collective(board, call, "all_gather", b["tensor"], b["group_name"], dim, size=b["world_size"])


def _issue_vllm_reduce_scatter(board: Board, call: Call) -> Any:
    b = call.bind("tensor", "dim", "world_size", "group_name")
    attributes = {"reduce": "sum", "dim": int(b["dim"]) % b["tensor"].dim()}
    return _collective(board, call, "reduce_scatter", b["tensor"], b["group_name"], attributes, size=b["world_size"])


def _issue_shard_dim_alltoall(board: Board, call: Call) -> Any:
    b = call.bind("input", "gather_dim", "shard_dim", "group_name")
    dims = {k: int(b[k]) % b["input"].dim() for k in ("gather_dim", "shard_dim")}
    return _collective(board, call, "shard_all_to_all", b["input"], b["group_name"], dims)


def _issue_allgather_base(board: Board, call: Call) -> Any:
    b = call.bind("output_tensor", "input_tensor", "process_group", "async_op", "timeout")
    return (_collective(board, call, "all_gather", b["input_tensor"], b["process_group"], position=1), None)


def _issue_reduce_scatter_base(board: Board, call: Call) -> Any:
    b = call.bind("output_tensor", "input_tensor", "process_group", "reduce_op", "async_op", "timeout")
    reduce = {"reduce": str(b["reduce_op"])}
    pending = _collective(board, call, "reduce_scatter", b["input_tensor"], b["process_group"], reduce, position=1)
    return (pending, None)


def _issue_hlo_all_reduce(board: Board, call: Call) -> Any:
    k = call.kwargs
    groups = [tuple(g) for g in k.get("replica_groups") or [list(range(board.size))]]
    found = [g for g in groups if call.rank in g]
    if board.size == 1:
        found = [(0,)]
    if len(found) != 1 or not all(0 <= r < board.size for r in found[0]):
        raise call.error(f"replica groups {groups} do not hold rank {call.rank} of {board.size} exactly once")
    reduce = {"reduce": str(k["reducer"])}
    many = call.args if len(call.args) > 1 else call.args[0]
    return _collective(board, call, "all_reduce", many, "hlo", reduce, ranks=found[0])


_ISSUERS: dict[str, Callable[[Board, Call], Any]] = {
    **{f"_c10d_functional.{n}": _issue_all_reduce for n in ("all_reduce", "all_reduce_", "all_reduce_coalesced")},
    **{f"_c10d_functional.all_gather_into_tensor{n}": _issue_all_gather for n in ("", "_coalesced", "_out")},
    **{f"_c10d_functional.reduce_scatter_tensor{n}": _issue_reduce_scatter for n in ("", "_coalesced", "_out")},
    "_c10d_functional.all_to_all_single": _issue_all_to_all,
    "_c10d_functional.broadcast": _issue_broadcast,
    "_c10d_functional.broadcast_": _issue_broadcast,
    "_c10d_functional.isend": _issue_send,
    "_c10d_functional.irecv": _issue_receive,
    "vllm.all_reduce": _issue_vllm_all_reduce,
    "vllm.all_gather": _issue_vllm_all_gather,
    "vllm.reduce_scatter": _issue_vllm_reduce_scatter,
    "_dtensor.shard_dim_alltoall": _issue_shard_dim_alltoall,
    "c10d._allgather_base_": _issue_allgather_base,
    "c10d._reduce_scatter_base_": _issue_reduce_scatter_base,
    "hlo.all_reduce": _issue_hlo_all_reduce,
}
