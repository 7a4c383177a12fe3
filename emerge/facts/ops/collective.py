"""Collectives: reduce over, gather from and scatter to the mesh. A group of one rank is the identity."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

from emerge.facts.families import FamilyNode
from emerge.facts.lower import Iter, Lowering, Tensor, Tie, Unsupported, axis, lowers
from emerge.facts.mesh import Block
from emerge.graph.model import Ref

REDUCTIONS = {"sum": "sum", "max": "max", "min": "min", "prod": "prod", "product": "prod", "avg": "avg"}


def reduction_name(value: Any) -> str:
    """Canonical name of a reduction argument."""
    name = str(value).lower().rpartition(".")[2]
    if name not in REDUCTIONS:
        raise Unsupported(f"reduction {value!r}")
    return REDUCTIONS[name]


def outer_ties(blocks: Sequence[Block], inner: int) -> list[tuple[int, Block]]:
    """Strides of the mesh blocks on a dimension whose outer part is the group and whose inner part has ``inner`` elements."""
    stride, out = inner, []
    for block in reversed(blocks):
        out.append((stride, block))
        stride *= block.size
    return list(reversed(out))


def shard_size(x: Tensor, d: int, blocks: Sequence[Block]) -> int:
    """Elements of dimension ``d`` that each rank of the group gets.

    Raises:
        Unsupported: it does not divide evenly.
    """
    ranks = prod(b.size for b in blocks)
    if x.shape[d] % ranks:
        raise Unsupported(f"dimension {d} of {x.shape[d]} elements is not divisible by {ranks} ranks")
    return x.shape[d] // ranks


def scattered(d: int, inner: int, blocks: Sequence[Block]) -> list[Iter]:
    """The outer part of dimension ``d`` goes to the mesh."""
    return [
        Iter(b.size, "p", (), ((0, (Tie(1, d, stride, b.size),)),), to_mesh=(Tie(1, b.dim, b.stride, b.size),))
        for stride, b in outer_ties(blocks, inner)
    ]


def gathered(d: int, inner: int, blocks: Sequence[Block]) -> list[Iter]:
    """The mesh becomes the outer part of dimension ``d``."""
    return [
        Iter(b.size, "p", (Tie(1, d, stride, b.size),), from_mesh=(Tie(1, b.dim, b.stride, b.size),))
        for stride, b in outer_ties(blocks, inner)
    ]


def same_shape(x: Tensor) -> list[Iter]:
    return [axis(n, "p", d, a0=d) for d, n in enumerate(x.shape)]


def all_reduce(low: Lowering, x: Tensor, how: str, blocks: Sequence[Block]) -> Tensor:
    if not blocks:
        return x
    return low.op(
        f"all_reduce#{how}#{list(blocks)}",
        "collective",
        [x],
        same_shape(x),
        x.shape,
        x.dtype,
        relocation=("all_reduce", how),
        group=blocks,
    )


def moved(
    low: Lowering,
    x: Tensor,
    kind: str,
    how: str,
    body: str,
    iters: list[Iter],
    shape: list[int],
    blocks: Sequence[Block],
) -> Tensor:
    """A collective that moves axes between the tensor and the mesh."""
    return low.op(
        f"{body}#{list(blocks)}", "collective", [x], iters, shape, x.dtype, relocation=(kind, how), group=blocks
    )


def all_gather(low: Lowering, x: Tensor, d: int, blocks: Sequence[Block]) -> Tensor:
    """Shards of dimension ``d`` joined in rank order."""
    if not blocks:
        return x
    shape = list(x.shape)
    shape[d] *= prod(b.size for b in blocks)
    iters = [*same_shape(x), *gathered(d, x.shape[d], blocks)]
    result = moved(low, x, "all_gather", "none", f"all_gather#{d}", iters, shape, blocks)
    low.gather_of[result.id] = (x, d, tuple(blocks))
    return result


def scatter(low: Lowering, x: Tensor, d: int, kind: str, how: str, blocks: Sequence[Block]) -> Tensor:
    """Block r of dimension ``d`` goes to rank r."""
    if not blocks:
        return x
    n = shard_size(x, d, blocks)
    shape = [n if k == d else m for k, m in enumerate(x.shape)]
    iters = [*(axis(m, "p", k, a0=k) for k, m in enumerate(shape)), *scattered(d, n, blocks)]
    return moved(low, x, kind, how, f"{kind}#{how}#{d}", iters, shape, blocks)


def all_to_all(low: Lowering, x: Tensor, split: int, join: int, blocks: Sequence[Block]) -> Tensor:
    """Block j of dimension ``split`` goes to rank j; what arrives is joined along ``join`` in rank order."""
    if not blocks:
        return x
    shape = list(x.shape)
    shape[split] = shard_size(x, split, blocks)
    own = [axis(m, "p", k, a0=k) for k, m in enumerate(shape)]
    iters = [*own, *gathered(join, shape[join], blocks)[::-1], *scattered(split, shape[split], blocks)]
    shape[join] *= prod(b.size for b in blocks)
    return moved(low, x, "all_to_all", "none", f"all_to_all#{split}#{join}", iters, shape, blocks)


@lowers("_c10d_functional.all_reduce", "_c10d_functional.all_reduce_", "c10d_functional.all_reduce")
def all_reduce_op(low: Lowering, node: FamilyNode, args: list[Any], kwargs: dict[str, Any]) -> Tensor:
    return all_reduce(low, args[0], reduction_name(args[1]), low.group_blocks(args[2]))


@lowers("vllm.all_reduce")
def vllm_all_reduce(low: Lowering, node: FamilyNode, args: list[Any], kwargs: dict[str, Any]) -> Tensor:
    return all_reduce(
        low, args[0], "sum", low.group_blocks(kwargs.get("group_name", args[1] if len(args) > 1 else None))
    )


@lowers("_c10d_functional.all_gather_into_tensor", "c10d_functional.all_gather_into_tensor")
def all_gather_op(low: Lowering, node: FamilyNode, args: list[Any], kwargs: dict[str, Any]) -> Tensor:
    return all_gather(low, args[0], 0, low.group_blocks(args[2]))


@lowers("vllm.all_gather")
def vllm_all_gather(low: Lowering, node: FamilyNode, args: list[Any], kwargs: dict[str, Any]) -> Tensor:
    x, d = args[0], args[1]
    return all_gather(low, x, d + len(x.shape) if d < 0 else d, low.group_blocks(args[3]))


@lowers("_c10d_functional.reduce_scatter_tensor", "c10d_functional.reduce_scatter_tensor")
def reduce_scatter_op(low: Lowering, node: FamilyNode, args: list[Any], kwargs: dict[str, Any]) -> Tensor:
    return scatter(low, args[0], 0, "reduce_scatter", reduction_name(args[1]), low.group_blocks(args[3]))


@lowers("_c10d_functional.all_to_all_single")
def all_to_all_op(low: Lowering, node: FamilyNode, args: list[Any], kwargs: dict[str, Any]) -> Tensor:
    x, outs, ins = args[0], args[1], args[2]
    if not all(isinstance(s, int) for s in [*outs, *ins]):
        raise Unsupported("its split sizes differ between ranks or depend on data")
    if len(set(outs)) > 1 or len(set(ins)) > 1 or list(outs) != list(ins):
        raise Unsupported("its split sizes are not all equal")
    return all_to_all(low, x, 0, 0, low.group_blocks(args[3]))


@lowers("_dtensor.shard_dim_alltoall")
def shard_dim_alltoall(low: Lowering, node: FamilyNode, args: list[Any], kwargs: dict[str, Any]) -> Tensor:
    """DTensor: from sharded on ``gather_dim`` to sharded on ``shard_dim``."""
    return all_to_all(low, args[0], args[2], args[1], low.group_blocks(args[3]))


@lowers("_c10d_functional.broadcast", "_c10d_functional.broadcast_")
def broadcast_op(low: Lowering, node: FamilyNode, args: list[Any], kwargs: dict[str, Any]) -> Tensor:
    x, blocks = args[0], low.group_blocks(args[2])
    if not blocks:
        return x
    return low.op(
        f"broadcast#{args[1]}#{list(blocks)}",
        "collective",
        [x],
        same_shape(x),
        x.shape,
        x.dtype,
        relocation=("broadcast", "none"),
        group=blocks,
    )


@lowers("_c10d_functional.irecv", "c10d_functional.irecv")
def receive(low: Lowering, node: FamilyNode, args: list[Any], kwargs: dict[str, Any]) -> Tensor:
    """What the peer sent. Peers and receivers differ along some axes of the mesh; so may the copies of a stage."""
    source = node.kwargs.get("sent")
    if not isinstance(source, Ref):
        raise Unsupported("which message it receives is not known")
    name = source.name
    x, peers = low.sent.get(name), low.integers(kwargs.get("src", args[1] if len(args) > 1 else None))
    if not isinstance(x, Tensor) or peers is None:
        raise Unsupported("what its peers send is unknown")
    if tuple(node.shape or ()) != x.shape or node.dtype != x.dtype:
        raise Unsupported("its peers send a tensor of another type")
    stage = node.extra.get("stage", node.ranks)
    apart = set(low.mesh.fixed(stage) or ()) | set(low.mesh.fixed(low.ranks_of[name]) or ())
    for rank in stage:
        if not 0 <= peers[rank] < low.mesh.ranks:
            raise Unsupported(f"its peer {peers[rank]} is no rank")
        apart |= low.mesh.differ(rank, peers[rank])
    blocks = [b for b in low.mesh.whole() if b.dim in apart]
    return moved(low, x, "transfer", "none", "transfer", same_shape(x), list(x.shape), blocks) if blocks else x
