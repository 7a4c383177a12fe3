"""Generic inputs: distinct values at several scales, integers inside their range."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping
from typing import Any

from emerge.execute._torch import torch
from emerge.execute.aliasing import split_op
from emerge.graph.model import DTYPES, Graph, Input, Node, Ref, is_integer
from emerge.util.errors import ExecutionError

#: Scales at which eps, soft-caps and activation variants show.
SCALES = (1e-3, 1.0, 30.0)


def sample_inputs(
    graph: Graph,
    seed: int,
    *,
    scale: float | None = None,
    ranges: Mapping[str, tuple[int, int]] | None = None,
    default_range: tuple[int, int] | None = None,
    small: Iterable[str] = (),
    device: Any = "cpu",
) -> dict[str, Any]:
    """One value per input that is no stored constant: floats in float64, integers and booleans in their types.

    Floats are normal times ``scale``. Integers are distinct where the range is large enough. Booleans are True with
    probability 0.3, and no row along the last axis is constant (where it has two elements or more). The same
    arguments give the same values; an input's values depend on its name, type, shape and the seed only.

    Args:
        scale: of all floating inputs; None = every input draws one of :data:`SCALES`.
        ranges: ``name -> (lo, hi)``, ``hi`` excluded, for integer inputs.
        default_range: for integer inputs without a range.
        small: floating inputs whose values are another ``SCALES[0]`` times smaller.

    Raises:
        ExecutionError: an integer input without a range, an empty range, or a shape that is not known.
    """
    values, reduced = {}, frozenset(small)
    for item in graph.inputs:
        if item.const is not None:
            continue
        if not all(isinstance(s, int) for s in item.shape):
            raise ExecutionError(
                f"input '{item.name}' has a data-dependent shape {list(item.shape)}", place=graph.path or graph.name
            )
        bounds = (ranges or {}).get(item.name, default_range)
        value = _sample(graph, item, seed, scale, bounds)
        if item.name in reduced and value.is_floating_point():
            value = value * SCALES[0]
        values[item.name] = value.to(device)
    return values


def _sample(graph: Graph, item: Input, seed: int, scale: float | None, bounds: tuple[int, int] | None) -> Any:
    shape = tuple(int(s) for s in item.shape)
    generator = torch.Generator().manual_seed(zlib.crc32(f"{seed}:{item.name}".encode()))
    if item.dtype == "bool":
        return _sample_bool(shape, generator)
    if is_integer(item.dtype):
        if bounds is None or bounds[0] >= bounds[1]:
            found = "none" if bounds is None else f"the empty [{bounds[0]}, {bounds[1]})"
            raise ExecutionError(
                f"integer input '{item.name}' needs a range fact, found {found}; give ranges['{item.name}']",
                place=graph.path or graph.name,
            )
        return _sample_int(shape, bounds, generator).to(getattr(torch, item.dtype))
    if DTYPES[item.dtype][0] == "complex":
        value = torch.randn(shape, generator=generator, dtype=torch.complex128)
    else:
        value = torch.randn(shape, generator=generator, dtype=torch.float64)
    if scale is None:
        scale = SCALES[int(torch.randint(0, len(SCALES), (), generator=generator))]
    value = value * scale
    return value.to(getattr(torch, item.dtype)).to(torch.float64) if item.dtype.startswith("float8") else value


def _sample_int(shape: tuple[int, ...], bounds: tuple[int, int], generator: Any) -> Any:
    low, high = bounds
    count = 1
    for s in shape:
        count *= s
    span = high - low
    if count <= span <= 2**22:
        return (torch.randperm(span, generator=generator)[:count] + low).reshape(shape)
    return torch.randint(low, high, shape, generator=generator, dtype=torch.int64)


def _sample_bool(shape: tuple[int, ...], generator: Any) -> Any:
    value = torch.rand(shape, generator=generator) < 0.3
    if not shape or shape[-1] < 2 or value.numel() == 0:
        return value
    rows = value.reshape(-1, shape[-1]).clone()
    constant = (rows == rows[:, :1]).all(1)
    position = torch.randint(0, shape[-1], (rows.shape[0],), generator=generator)
    picked = torch.zeros_like(rows).scatter_(1, position[:, None], True)
    return torch.where(constant[:, None], picked, rows).reshape(shape)


#: Operators through which an index keeps its meaning, possibly shifted or masked.
_FOLLOWED = {
    *("view", "reshape", "_unsafe_view", "clone", "_to_copy", "to", "detach", "alias", "transpose", "permute", "t"),
    *("unsqueeze", "squeeze", "expand", "contiguous", "slice", "index_put", "sub", "where", "masked_fill", "copy"),
    *("flatten", "view_copy", "wait_tensor", "broadcast", "select", "lift_fresh_copy", "mul"),
}


def infer_ranges(graph: Graph) -> dict[str, tuple[int, int]]:
    """Ranges ``[0, hi)`` of integer inputs that index a table, from the sizes of the tables they reach.

    It follows an index through layout operators, casts and the masking of vocabulary-parallel embeddings; an
    index that is compared with a constant bound (``ids >= 49152``) stays below it. The result is an *assumption*
    to list, not a fact: it keeps samples inside the tables, nothing says that other values are impossible.
    Inputs that reach no table are not in the result.
    """
    types = graph.types()
    reach: dict[str, set[str]] = {i.name: {i.name} for i in graph.inputs if is_integer(i.dtype) and i.dtype != "bool"}
    found: dict[str, int] = {}

    def bound(names: set[str], size: Any) -> None:
        for name in names:
            if isinstance(size, int) and size > 0:
                found[name] = min(found.get(name, size), size)

    for node in graph.nodes:
        name = split_op(node.op)[1]
        cache, positions = node.kwargs.get("cos_sin_cache"), node.kwargs.get("positions")
        if isinstance(cache, Ref) and cache.name in types:
            bound(_reached(reach, [positions]), types[cache.name].shape[0])
        sources = _reached(reach, node.args)
        if not sources:
            continue
        if name in ("ge", "gt", "lt", "le") and isinstance(node.args[1], int):
            bound(sources, node.args[1])
        table = _table(node, name)
        if table is not None and table[0] in types:
            shape = types[table[0]].shape
            bound(_reached(reach, [table[2]]), shape[table[1]] if table[1] < len(shape) else None)
        if name in _FOLLOWED and is_integer(node.dtype):
            reach[node.name] = sources
        if name == "index" and isinstance(node.args[1], list):
            _bound_index(node, types, reach, bound)
    return {name: (0, hi) for name, hi in found.items()}


def _reached(reach: dict[str, set[str]], args: list[Any]) -> set[str]:
    out: set[str] = set()
    for arg in args:
        if isinstance(arg, Ref):
            out |= reach.get(arg.name, set())
        elif isinstance(arg, list):
            out |= _reached(reach, arg)
    return out


def _table(node: Node, name: str) -> tuple[str, int, Any] | None:
    """(table, dimension, index argument) of an operator that looks rows up."""
    args = node.args
    if name == "embedding" and isinstance(args[0], Ref):
        return args[0].name, 0, args[1]
    if name in ("index_select", "gather") and isinstance(args[0], Ref) and len(args) > 2:
        dim = args[1]
        return (args[0].name, dim, args[2]) if isinstance(dim, int) and dim >= 0 else None
    if name in ("nll_loss_forward", "nll_loss") and isinstance(args[0], Ref):
        return args[0].name, 1, args[1]
    return None


def _bound_index(node: Node, types: dict[str, Any], reach: dict[str, set[str]], bound: Any) -> None:
    table = node.args[0]
    if not isinstance(table, Ref) or table.name not in types or not isinstance(node.args[1], list):
        return
    for dim, index in enumerate(node.args[1]):
        if isinstance(index, Ref):
            bound(reach.get(index.name, set()), types[table.name].shape[dim])
