"""Which operators communicate, and where they name their process group.

Sources: schemas of torch 2.13 (``_c10d_functional``, ``c10d``, ``_dtensor``, ``symm_mem``), vLLM's
``vllm/distributed/parallel_state.py``, the HLO operator set.
"""

from __future__ import annotations

from dataclasses import dataclass

from emerge.graph.model import Node


@dataclass(frozen=True, slots=True)
class Collective:
    """How one operator communicates.

    Attributes:
        kind: ``id`` (the group is an id string), ``ranks`` (an explicit rank list), ``replica_groups`` (HLO: all rank
            lists; an empty list means all ranks) or ``world`` (no group argument: all ranks).
        position: of the group among the positional arguments (and, for the same argument by keyword, ``keyword``).
        varying: positions of arguments that may differ between the ranks of one group (split sizes).
        point_to_point: it pairs two ranks by peer and tag, not by issue order in the group.
    """

    kind: str
    position: int = -1
    keyword: str = "group_name"
    varying: tuple[int, ...] = ()
    point_to_point: bool = False


_REPLICA = Collective("replica_groups", -1, "replica_groups")


def _table() -> dict[str, Collective]:
    out: dict[str, Collective] = {}

    def add(namespace: str, kind: str, keyword: str, **positions: int) -> None:
        for name, position in positions.items():
            varying = (1, 2) if name == "all_to_all_single" else ()
            paired = name in ("isend", "irecv", "send", "recv_", "recv_any_source_")
            out[f"{namespace}.{name}"] = Collective(kind, position, keyword, varying, paired)

    add(
        "_c10d_functional", "id", "group_name",
        all_reduce=2, all_reduce_=2, all_reduce_coalesced=2, all_reduce_coalesced_=2,
        all_gather_into_tensor=2, all_gather_into_tensor_out=2, all_gather_into_tensor_coalesced=2,
        reduce_scatter_tensor=3, reduce_scatter_tensor_out=3, reduce_scatter_tensor_coalesced=3,
        all_to_all_single=3, broadcast=2, broadcast_=2, isend=3, irecv=3,
    )  # fmt: skip
    add(
        "_c10d_functional_autograd", "id", "group_name",
        all_gather_into_tensor=2, reduce_scatter_tensor=3, all_to_all_single=3,
    )  # fmt: skip
    add(
        "c10d_functional", "ranks", "ranks",
        all_reduce=3, all_reduce_coalesced=3, all_gather_into_tensor=2, all_gather_into_tensor_coalesced=2,
        reduce_scatter_tensor=3, reduce_scatter_tensor_coalesced=3, all_to_all_single=4, broadcast=3,
    )  # fmt: skip
    add("c10d_functional", "id", "group_name", isend=3, irecv=3)
    add(
        "c10d", "id", "process_group",
        allreduce_=1, allreduce_coalesced_=1, broadcast_=1, reduce_=1, send=1, recv_=1, recv_any_source_=1, barrier=1,
        allgather_=2, _allgather_base_=2, allgather_coalesced_=2, allgather_into_tensor_coalesced_=2,
        reduce_scatter_=2, _reduce_scatter_base_=2, reduce_scatter_tensor_coalesced_=2,
        alltoall_=2, alltoall_base_=2, gather_=2, scatter_=2,
    )  # fmt: skip
    add("_dtensor", "id", "group_name", shard_dim_alltoall=3)
    add("vllm", "id", "group_name", all_reduce=1, all_gather=3, reduce_scatter=3)
    add(
        "symm_mem", "id", "group_name",
        one_shot_all_reduce=2, two_shot_all_reduce_=2, multimem_all_reduce_=2, multimem_one_shot_all_reduce=2,
        fused_all_gather_matmul=3, fused_matmul_reduce_scatter=4, _low_contention_all_gather=1,
        _low_contention_reduce_scatter=2,
    )  # fmt: skip
    for name in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "collective_broadcast"):
        out[f"hlo.{name}"] = _REPLICA
    out["hlo.collective_permute"] = Collective("world")
    return out


COLLECTIVES = _table()


def collective_of(node: Node) -> Collective | None:
    """How ``node`` communicates, or None for an operator that does not (``wait_tensor`` does not).

    Overloads (``.default``, ``.out``) share one entry.
    """
    found = COLLECTIVES.get(node.op)
    if found is None and node.op.count(".") >= 2:
        found = COLLECTIVES.get(node.op.rsplit(".", 1)[0])
    return found
