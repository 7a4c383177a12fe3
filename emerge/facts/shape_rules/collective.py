"""Collectives: all_gather multiplies dimension 0 by the group size, reduce_scatter divides it, the rest keep shapes.

The group size is an argument, checked against the groups of the graph file where it has them.
"""

from __future__ import annotations

from emerge.facts.shape_rules.algebra import Size, add, multiply, numel, product, replace, same_shape, show
from emerge.facts.shape_rules.core import (
    NOTHING,
    Call,
    Result,
    Rules,
    Spec,
    Undecided,
    like,
    like_operand,
    table,
)
from emerge.facts.shape_rules.pieces import chunk_cat_shape
from emerge.graph.model import TensorType
from emerge.util.errors import GraphError


def _require_group(size: int) -> int:
    if size <= 0:
        raise GraphError(f"group size {size} is not positive")
    return size


def _scaled(operand: TensorType, dim: int, ranks: int) -> Spec:
    return Spec(operand.dtype, replace(operand.shape, dim, multiply(operand.shape[dim], ranks)))


def _divided(operand: TensorType, dim: int, ranks: int) -> Spec:
    size: Size = operand.shape[dim]
    if isinstance(size, str):
        return Spec(operand.dtype, replace(operand.shape, dim, "?"))
    if size % ranks:
        raise GraphError(f"dimension {dim} of size {size} does not divide among {ranks} ranks")
    return Spec(operand.dtype, replace(operand.shape, dim, size // ranks))


def _dim0(operand: TensorType) -> TensorType:
    if not operand.shape:
        raise GraphError("a 0-dimensional tensor has no dimension 0 to gather or scatter along")
    return operand


def _all_gather(call: Call) -> Result:
    operand = _dim0(call.tensor(0, "input"))
    ranks = _require_group(call.group_size(call.integer(1, "group_size"), call.get(2, "group_name")))
    return _scaled(operand, 0, ranks)


def _all_gather_coalesced(call: Call) -> Result:
    ranks = _require_group(call.group_size(call.integer(1, "group_size"), call.get(2, "group_name")))
    return [_scaled(_dim0(t), 0, ranks) for t in call.tensors(0, "inputs")]


def _reduce_scatter(call: Call) -> Result:
    operand = _dim0(call.tensor(0, "input"))
    ranks = _require_group(call.group_size(call.integer(2, "group_size"), call.get(3, "group_name")))
    return _divided(operand, 0, ranks)


def _reduce_scatter_coalesced(call: Call) -> Result:
    ranks = _require_group(call.group_size(call.integer(2, "group_size"), call.get(3, "group_name")))
    return [_divided(_dim0(t), 0, ranks) for t in call.tensors(0, "inputs")]


def _coalesced(call: Call) -> Result:
    return [like(t) for t in call.tensors(0, "inputs")]


def _all_to_all(call: Call) -> Result:
    operand = _dim0(call.tensor(0, "input"))
    made, sent = call.size(1, "output_split_sizes"), call.size(2, "input_split_sizes")
    if made and sent and len(made) != len(sent):
        raise GraphError(f"{len(made)} output but {len(sent)} input split sizes; there is one per rank")
    ranks = len(made or sent)
    if ranks:
        call.group_size(ranks, call.get(3, "group_name"))
    elif isinstance(call.get(3, "group_name"), str) and call.groups.get(call.get(3, "group_name")):
        ranks = call.group_size(None, call.get(3, "group_name"))
        _divided(operand, 0, ranks)
    for splits in (made, sent):
        if any(isinstance(s, int) and s < 0 for s in splits):
            raise GraphError(f"negative split size in {show(splits)}")
    total: Size = 0
    for s in sent:
        total = add(total, s)
    if sent and isinstance(total, int) and isinstance(operand.shape[0], int) and total != operand.shape[0]:
        raise GraphError(f"input split sizes {show(sent)} add up to {total}, but dimension 0 has {operand.shape[0]}")
    if not made:
        return like(operand)
    received: Size = 0
    for s in made:
        received = add(received, s)
    return Spec(operand.dtype, replace(operand.shape, 0, received))


def _shard_dim_all_to_all(call: Call) -> Result:
    operand = call.tensor(0, "input")
    rank = len(operand.shape)
    gather, shard = call.dim(1, "gather_dim", rank), call.dim(2, "shard_dim", rank)
    ranks = call.group_size(None, call.get(3, "group_name"))
    gathered = _scaled(_dim0(operand), gather, ranks)
    return _divided(TensorType(operand.dtype, gathered.shape), shard, ranks)


def _isend(call: Call) -> Result:
    # What a send yields is a convention of the capture; only its operand is known.
    call.tensor(0, "tensor")
    return NOTHING


def _require_multiple(large: TensorType, small: TensorType) -> None:
    whole, part = numel(large.shape), numel(small.shape)
    if whole is not None and part is not None and (part == 0 or whole % part):
        raise GraphError(f"{show(large.shape)} does not hold a whole number of shards {show(small.shape)}")


def _all_gather_base(call: Call) -> Result:
    output, operand = call.tensor(0, "output_tensor"), call.tensor(1, "input_tensor")
    _require_multiple(output, operand)
    return [like(output), None]


def _reduce_scatter_base(call: Call) -> Result:
    output, operand = call.tensor(0, "output_tensor"), call.tensor(1, "input_tensor")
    _require_multiple(operand, output)
    return [like(output), None]


def _fsdp_copy_in(call: Call) -> Result:
    """(inputs, flat output, split sizes, elements per rank, rank) -> this rank's part, the flat output."""
    output, count = call.tensor(1, "all_gather_output"), call.integer(3, "all_gather_input_numel")
    if len(output.shape) != 1:
        raise Undecided
    return [Spec(output.dtype, (count,)), like(output)]


def _fsdp_chunk_cat(call: Call) -> Result:
    tensors, out = call.tensors(0, "tensors"), call.tensor(-1, "out")
    shape = chunk_cat_shape(tensors, call.integer(1, "dim"), call.integer(2, "num_chunks"))
    if not same_shape((product(shape),), (product(out.shape),)):
        raise GraphError(f"the result {show(shape)} does not fit the output {show(out.shape)}")
    return NOTHING


def _vllm_all_gather(call: Call) -> Result:
    operand = _dim0(call.tensor(0, "tensor"))
    at = call.dim(1, "dim", len(operand.shape))
    ranks = _require_group(call.group_size(call.integer(2, "world_size"), call.get(3, "group_name")))
    return _scaled(operand, at, ranks)


def _vllm_reduce_scatter(call: Call) -> Result:
    operand = _dim0(call.tensor(0, "tensor"))
    at = call.dim(1, "dim", len(operand.shape))
    ranks = _require_group(call.group_size(call.integer(2, "world_size"), call.get(3, "group_name")))
    return _divided(operand, at, ranks)


#: like their operand: every rank keeps the shape.
SHAPE_KEEPING = "all_reduce all_reduce_ broadcast broadcast_ permute_tensor wait_tensor irecv"

_FUNCTIONAL: Rules = {
    **table(SHAPE_KEEPING, like_operand((0, "input")), prefix=""),
    "wait_tensor": like_operand((0, "tensor")),
    "irecv": like_operand((0, "tensor")),
    "isend": _isend,
    "all_gather_into_tensor": _all_gather,
    "all_gather_into_tensor_coalesced": _all_gather_coalesced,
    "reduce_scatter_tensor": _reduce_scatter,
    "reduce_scatter_tensor_coalesced": _reduce_scatter_coalesced,
    "all_reduce_coalesced": _coalesced,
    "all_to_all_single": _all_to_all,
}

RULES: Rules = {
    **{f"_c10d_functional.{n}": rule for n, rule in _FUNCTIONAL.items()},
    "_dtensor.shard_dim_alltoall": _shard_dim_all_to_all,
    "c10d._allgather_base_": _all_gather_base,
    "c10d._reduce_scatter_base_": _reduce_scatter_base,
    "fsdp.all_gather_copy_in": _fsdp_copy_in,
    "fsdp.chunk_cat": _fsdp_chunk_cat,
    "vllm.all_reduce": like_operand((0, "tensor")),
    "vllm.all_gather": _vllm_all_gather,
    "vllm.reduce_scatter": _vllm_reduce_scatter,
}
