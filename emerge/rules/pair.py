"""A small pair of programs with everything needed to derive and to execute it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

from emerge.facts.families import zip_families
from emerge.facts.mesh import Block, Mesh
from emerge.graph.model import Graph, Node, is_integer
from emerge.relate.derive import Problem
from emerge.relate.statement import AxisPlacement, Piece, Statement
from emerge.util.errors import EmergeError


class Unusable(EmergeError):
    """A pair that cannot be executed (an index out of range after a mutation, say): it says nothing about a law."""


@dataclass
class Pair:
    """A pair, its input statements and what its integer inputs may hold.

    Attributes:
        name: recipe and seed, enough to make it again.
        statements: one per implementation input, by the reference input's name.
        ranges: integer reference input -> (low, high), high excluded.
        masks: k-th dropout of a side -> placement of its mask: per dimension the mesh axis that shards it.
        scenes: names of the building blocks in it.
        mutation: what was broken in the implementation, "" for nothing.
        equal: pairs of nodes of one side (1, 2) that compute the same value in two ways, told to the derivation.
        algebra: the rules of the algebra look for equal tensors too.
    """

    name: str
    reference: Graph
    ranks: list[Graph]
    mesh: dict[str, int]
    statements: list[Statement] = field(default_factory=list)
    ranges: dict[str, tuple[int, int]] = field(default_factory=dict)
    masks: list[tuple[str | None, ...]] = field(default_factory=list)
    scenes: list[str] = field(default_factory=list)
    mutation: str = ""
    equal: list[tuple[int, str, str]] = field(default_factory=list)
    algebra: bool = False

    def problem(self, outputs: Sequence[Statement] = ()) -> Problem:
        """The pair as a derivation problem."""
        return Problem(
            zip_families([self.reference]),
            zip_families(self.ranks, self.mesh),
            Mesh(self.mesh),
            list(self.statements),
            list(outputs),
        )


@dataclass
class Executed:
    """Values of every node on both sides, float64: by side (1, 2), rank and name."""

    values: dict[int, list[dict[str, Any]]]


def placed(name: str, shape: Sequence[int], dims: Sequence[str | None], mesh: dict[str, int]) -> Statement:
    """``name`` sharded in contiguous blocks: ``dims[d]`` is the mesh axis over which dimension ``d`` lies, or None."""
    fact_mesh = Mesh(mesh)
    axes = []
    for d, (n, axis) in enumerate(zip(shape, dims)):
        if axis is None:
            axes.append(AxisPlacement(n, (d, 1), (d, 1)))
            continue
        k = mesh[axis]
        block = Block(fact_mesh.dim(list(mesh).index(axis)), 1, k)
        axes += [AxisPlacement(n // k, (d, 1), (d, 1)), AxisPlacement(k, (d, n // k), None, block)]
    return Statement(Piece(name), Piece(name), tuple(a for a in axes if a.size > 1))


def local_value(statement: Statement, whole: Any, shape: Sequence[int], rank: int, mesh: Mesh) -> Any:
    """What ``rank`` holds of a reference tensor under a statement about whole tensors; ``shape`` is local."""
    import torch

    index = [torch.zeros((), dtype=torch.int64)] * whole.dim()
    grid = [torch.arange(n).reshape([-1 if d == k else 1 for k in range(len(shape))]) for d, n in enumerate(shape)]
    for p in statement.axes:
        d, stride = p.reference
        if p.mesh is not None:
            position: Any = mesh.block_coordinate(rank, p.mesh)
        elif p.implementation is not None:
            e, step = p.implementation
            position = grid[e] // step % p.size
        else:
            continue
        index[d] = index[d] + stride * position
    if not index:
        return whole
    return whole[tuple(i.expand(tuple(shape)) for i in index)].clone()


def sample(pair: Pair, seed: int, scale: float = 1.0) -> dict[str, Any]:
    """Reference inputs: distinct floats, integers in their range (with repetitions where it is small)."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    out: dict[str, Any] = {}
    for item in pair.reference.inputs:
        shape = [int(n) for n in item.shape]
        if item.dtype == "bool":
            out[item.name] = torch.rand(shape, generator=generator) < 0.4
        elif is_integer(item.dtype):
            low, high = pair.ranges[item.name]
            values = torch.randint(low, high, shape, generator=generator, dtype=torch.int64)
            out[item.name] = values.to(getattr(torch, item.dtype))
        else:
            out[item.name] = torch.randn(shape, generator=generator, dtype=torch.float64) * scale
    return out


def distribute(pair: Pair, given: dict[str, Any]) -> list[dict[str, Any]]:
    """Implementation inputs of every rank out of the reference's tensors; what no statement covers is 0."""
    import torch

    mesh = Mesh(pair.mesh)
    shapes = {i.name: [int(n) for n in i.shape] for i in pair.ranks[0].inputs}
    inputs: list[dict[str, Any]] = [{} for _ in pair.ranks]
    for statement in pair.statements:
        name = statement.implementation.name
        whole = _cut(given[statement.reference.name], statement.reference.cuts)
        for rank, held in enumerate(inputs):
            if name not in held:
                held[name] = torch.zeros(shapes[name], dtype=whole.dtype)
            target = _cut(held[name], statement.implementation.cuts)
            target.copy_(local_value(statement, whole, target.shape, rank, mesh))
    return inputs


def execute(pair: Pair, seed: int = 0, device: str = "cpu") -> Executed:
    """Runs both sides on one sample and keeps every value.

    Raises:
        Unusable: one side cannot be executed.
    """
    from emerge.execute.decisions import Decisions
    from emerge.execute.lockstep import run_ranks, run_sequential

    given = sample(pair, seed)
    inputs = distribute(pair, given)
    decisions = Decisions()
    options = _options(pair, None, device)
    options.decisions = decisions
    try:
        left = run_sequential(pair.reference, given, options=options, keep="all")
        right = run_ranks(
            pair.ranks, inputs, options=[_options(pair, r, device) for r in range(len(pair.ranks))], keep="all"
        )
    except EmergeError as exc:
        raise Unusable(f"{pair.name} cannot be executed: {exc}") from exc
    if decisions.tight:
        # where a sort or an arg-max meets equal values, the position it gives is rounding, not meaning
        raise Unusable(f"{pair.name} decides on nearly equal values at {decisions.tight[0].node!r}")
    return Executed({1: [left], 2: right})


def _cut(value: Any, cuts: Sequence[tuple[int, int, int]]) -> Any:
    for d, start, stop in cuts:
        value = value.narrow(d, start, stop - start)
    return value


def _options(pair: Pair, rank: int | None, device: str) -> Any:
    """Options with dropout masks that correspond: one mask per element of the whole tensor (``dropout_masks``)."""
    import torch

    from emerge.execute.options import Options

    graph = pair.reference if rank is None else pair.ranks[rank]
    calls = [n.name for n in graph.nodes if "dropout" in n.op]
    mesh = Mesh(pair.mesh)

    def mask(node: Node, shape: tuple[int, ...]) -> Any:
        call = calls.index(node.name)
        dims = pair.masks[call] if call < len(pair.masks) else (None,) * len(shape)
        full = list(shape)
        if rank is not None:
            full = [n * (pair.mesh[a] if a else 1) for n, a in zip(shape, dims)]
        generator = torch.Generator().manual_seed(1000 + call)
        whole = (torch.rand(prod(full) or 1, generator=generator) < 0.6)[: prod(full)].reshape(full)
        if rank is None:
            return whole
        return local_value(placed("mask", full, dims, pair.mesh), whole, shape, rank, mesh)

    return Options(dropout_mask=mask, device=device)
