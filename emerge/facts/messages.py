"""Point-to-point messages of rank graphs: which send meets which receive, and which ranks are stages of a pipeline.

Messages from one rank to another with one tag arrive in the order in which they were sent, as in
:mod:`emerge.execute.collectives`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from emerge.facts.family_parts import Call
from emerge.facts.mesh import Mesh
from emerge.graph.model import TensorType

SENDS = ("_c10d_functional.isend", "c10d_functional.isend")
RECEIVES = ("_c10d_functional.irecv", "c10d_functional.irecv")


def is_send(op: str) -> bool:
    """True for operators that send a message."""
    return op.rpartition(".")[0] in SENDS


def is_receive(op: str) -> bool:
    """True for operators that receive a message."""
    return op.rpartition(".")[0] in RECEIVES


def peer_and_tag(call: Call) -> tuple[int, int] | None:
    """Global rank of the other end, and the tag; None where they are not numbers."""
    names = ("dst" if is_send(call.node.op) else "src", "tag")
    given = [call.node.args[k] if len(call.node.args) > k else call.node.kwargs.get(n) for k, n in enumerate(names, 1)]
    peer, tag = given[0], 0 if given[1] is None else given[1]
    return (peer, tag) if type(peer) is int and type(tag) is int else None


def meet(calls: Sequence[Sequence[Call]], types: Sequence[dict[str, TensorType]]) -> tuple[dict[int, Call], list[str]]:
    """The send that each receive takes its value from, by ``id`` of the receiving call, and what does not meet.

    Args:
        calls: of every rank, in order. types: of every rank.
    """
    sent: dict[tuple[int, int, int], list[Call]] = {}
    awaited: dict[tuple[int, int, int], list[Call]] = {}
    for rank, own in enumerate(calls):
        for call in own:
            end = peer_and_tag(call) if is_send(call.node.op) or is_receive(call.node.op) else None
            if end is not None and is_send(call.node.op):
                sent.setdefault((rank, *end), []).append(call)
            elif end is not None:
                awaited.setdefault((end[0], rank, end[1]), []).append(call)
    met: dict[int, Call] = {}
    problems: list[str] = []
    for key in sorted({*sent, *awaited}):
        ours, theirs = sent.get(key, []), awaited.get(key, [])
        where = f"messages from rank {key[0]} to rank {key[1]} with tag {key[2]}"
        if len(ours) != len(theirs):
            problems.append(
                f"{where}: {len(ours)} sent and {len(theirs)} received; what is left over waits for ever or is lost"
            )
        for send, receive in zip(ours, theirs):
            kind, wanted = types[send.rank].get(send.refs[0]), types[receive.rank].get(receive.node.name)
            if kind != wanted:
                problems.append(
                    f"{where}: {send.node.name!r} sends {_text(kind)} where {receive.node.name!r} expects {_text(wanted)}"
                )
                break
            met[id(receive)] = send
    return met, problems


def _text(kind: TensorType | None) -> str:
    return "something of unknown type" if kind is None else f"{kind.dtype}{list(kind.shape)}"


def stages(calls: Sequence[Sequence[Call]], mesh: Mesh) -> list[int]:
    """A number per rank: ranks of different numbers run different programs, and are zipped apart.

    Where all ranks exchange messages in the same way (a ring), one program serves them all. Otherwise the program
    depends on the coordinate along the mesh axes that messages pass along: it is the stage of a pipeline.
    """
    traffic: list[list[Any]] = []
    axes: set[int] = set()
    for rank, own in enumerate(calls):
        traffic.append([])
        for call in own:
            end = peer_and_tag(call) if is_send(call.node.op) or is_receive(call.node.op) else None
            if end is not None:
                traffic[-1].append((call.node.op, call.node.dtype, call.node.shape))
                if 0 <= end[0] < mesh.ranks:
                    axes.update(mesh.differ(rank, end[0]))
    if all(t == traffic[0] for t in traffic):
        return [0] * len(calls)
    keys = [tuple(mesh.coordinate(r, d) for d in sorted(axes)) for r in range(len(calls))]
    number = {key: n for n, key in enumerate(sorted(set(keys)))}
    return [number[k] for k in keys]
