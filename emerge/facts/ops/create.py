"""Tensors made from nothing: constants, uninitialised memory, lifted attributes."""

from __future__ import annotations

from typing import Any

from emerge.facts.families import FamilyNode, RankVector
from emerge.facts.lower import Lowering, Tensor, Unsupported, lowers, result_dtype, scalar_constant


def _shape(node: FamilyNode) -> list[int]:
    if node.shape is None or any(not isinstance(n, int) for n in node.shape):
        raise Unsupported("its shape depends on data")
    return [int(n) for n in node.shape]


@lowers("aten.zeros", "aten.zeros_like", "aten.new_zeros", "aten.zero_", "aten.zero")
def zeros(low: Lowering, node: FamilyNode, args: list[Any], kwargs: dict[str, Any]) -> Tensor:
    return low.constant(0, _shape(node), result_dtype(node, "float32"))


@lowers("aten.ones", "aten.ones_like", "aten.new_ones")
def ones(low: Lowering, node: FamilyNode, args: list[Any], kwargs: dict[str, Any]) -> Tensor:
    return low.constant(1, _shape(node), result_dtype(node, "float32"))


@lowers("aten.full", "aten.full_like", "aten.new_full", "aten.scalar_tensor", "aten.fill", "aten.fill_")
def full(low: Lowering, node: FamilyNode, args: list[Any], kwargs: dict[str, Any]) -> Tensor:
    value = args[0] if node.op.startswith("aten.scalar_tensor") else args[2] if "new_full" in node.op else args[1]
    c = scalar_constant(value)
    if c is None:
        raise Unsupported("its value differs between ranks or depends on data")
    return low.constant(c, _shape(node), result_dtype(node, "float32"))


@lowers(
    "aten.empty",
    "aten.empty_like",
    "aten.new_empty",
    "aten.empty_strided",
    "aten.new_empty_strided",
    "aten.empty_permuted",
)
def empty(low: Lowering, node: FamilyNode, args: list[Any], kwargs: dict[str, Any]) -> Tensor:
    """Uninitialised memory: a fresh unknown on every side and rank; fine as long as nothing reads it."""
    from emerge.facts.lower import Iter, whole

    shape = _shape(node)
    iters = [Iter(n, "pos", whole(n, d)) for d, n in enumerate(shape)]
    return low.op(
        f"uninitialised:{low.side}:{node.name}", "uninitialised", [], iters, shape, result_dtype(node, "float32")
    )


@lowers("get_attr")
def get_attr(low: Lowering, node: FamilyNode, args: list[Any], kwargs: dict[str, Any]) -> Tensor:
    if not node.has_const or isinstance(node.const, RankVector):
        raise Unsupported("a constant tensor whose value the graph file does not hold")
    if isinstance(node.const, list):
        raise Unsupported("a stored table, which is related to constants of equal content only")
    if not isinstance(node.const, (int, float)):
        raise Unsupported("a constant that is not a number")
    result = low.constant(node.const, _shape(node), result_dtype(node, "float32"))
    low.assume("constant_not_in_dump", result, f"{node.name} = {node.const}: the dump does not hold the value")
    return result


@lowers(
    "aten._assert_async",
    "aten._assert_scalar",
    "aten._assert_tensor_metadata",
    "aten.sym_constrain_range_for_size",
    "aten.sym_size",
    "aten._local_scalar_dense",
    "profiler._record_function_enter_new",
    "profiler._record_function_exit",
)
def nothing(low: Lowering, node: FamilyNode, args: list[Any], kwargs: dict[str, Any]) -> None:
    return None
