"""Pairs of small graphs for tests: relations in notation, the derivation, and the truth by execution.

A relation is written ``"b s (tp h) ~ b s h"``: left the reference, right the local tensor of one rank, names of mesh
axes on the left only. Sizes follow from the shapes; what they leave open is given in brackets: ``"... [h=4]"``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any

from emerge.facts.families import FamilyGraph, zip_families
from emerge.facts.mesh import Block, Mesh
from emerge.graph.model import Graph, is_integer
from emerge.graph.source import Case
from emerge.relate.derive import Derivation, Problem
from emerge.relate.statement import AxisPlacement, Piece, Statement, entry_statements


@dataclass
class Pair:
    """A reference, an implementation, what is given about inputs and claimed about outputs.

    Attributes:
        given: reference input (or a piece ``w[0:4]``) -> notation, or (implementation input or piece, notation).
        outputs: notation of every output, by position; "" = not claimed.
        ranges: integer input -> exclusive upper bound of its values, for execution.
    """

    mesh: dict[str, int]
    reference: Graph
    ranks: list[Graph]
    given: Mapping[str, str | tuple[str, str]]
    outputs: list[str]
    ranges: Mapping[str, int] = field(default_factory=dict)

    def problem(self) -> Problem:
        """The pair as the derivation takes it."""
        mesh, seq, dist = Mesh(self.mesh), zip_families([self.reference]), zip_families(self.ranks)
        inputs = [self._given(mesh, seq, dist, k, v) for k, v in self.given.items()]
        outputs = []
        for position, text in enumerate(self.outputs):
            if not text:
                continue
            s = next(o.name for o in seq.outputs if o.position == position)
            found = [o.name for o in dist.outputs if o.position == position]
            assert s is not None, f"reference output {position} has no value"
            assert len(found) == 1, f"the ranks disagree on the type of output {position}"
            assert found[0] is not None, f"implementation output {position} has no value"
            outputs.append(statement(text, Piece(s), Piece(found[0]), mesh, seq, dist))
        return Problem(seq, dist, mesh, inputs, outputs)

    def _given(
        self, mesh: Mesh, seq: FamilyGraph, dist: FamilyGraph, key: str, value: str | tuple[str, str]
    ) -> Statement:
        name, text = value if isinstance(value, tuple) else (key, value)
        return statement(text, piece(key), piece(name), mesh, seq, dist)


def piece(text: str) -> Piece:
    """``w`` or ``w[2:5]`` (dimension 0) or ``w[:,2:5]``."""
    name, _, box = text.partition("[")
    cuts = []
    for d, part in enumerate(box.rstrip("]").split(",") if box else []):
        if part.strip() != ":":
            start, stop = part.split(":")
            cuts.append((d, int(start), int(stop)))
    return Piece(name, tuple(cuts))


def _dims(text: str) -> list[list[str]]:
    return [(m[1:-1].split() if m.startswith("(") else [m]) for m in re.findall(r"\([^)]*\)|[^\s()]+", text)]


def _shape(p: Piece, graph: FamilyGraph) -> list[int]:
    kind = graph.types()[p.name]
    shape = [int(n) for n in kind.shape]
    for d, start, stop in p.cuts:
        shape[d] = stop - start
    return shape


def statement(
    text: str, reference: Piece, implementation: Piece, mesh: Mesh, seq: FamilyGraph, dist: FamilyGraph
) -> Statement:
    """A relation in notation as a statement with every axis placed."""
    body, _, given = text.partition("[")
    sizes: dict[str, int] = dict(mesh.axes)
    for part in given.rstrip("]").replace(",", " ").split():
        name, _, number = part.partition("=")
        sizes[name] = int(number)
    left, right = (_dims(side) for side in body.split("~"))
    shapes = ((left, _shape(reference, seq)), (right, _shape(implementation, dist)))
    for dims, shape in shapes:
        assert len(dims) == len(shape), f"{text!r} does not have the rank of {reference} / {implementation}: {shape}"
    for _ in range(4):
        for dims, shape in shapes:
            for names, n in zip(dims, shape):
                known = prod(sizes[x] for x in names if x in sizes and x != "1")
                open_names = [x for x in names if x not in sizes and x != "1"]
                if len(open_names) == 1:
                    sizes[open_names[0]] = n // known
    for dims, shape in shapes:
        for names, n in zip(dims, shape):
            assert prod(sizes[x] for x in names if x != "1") == n, f"{text!r}: {names} does not have size {n}"

    def places(dims: list[list[str]]) -> dict[str, tuple[int, int]]:
        found = {}
        for d, names in enumerate(dims):
            stride = 1
            for x in reversed(names):
                if x != "1":
                    found[x] = (d, stride)
                    stride *= sizes[x]
        return found

    ours, theirs = places(left), places(right)
    axes = []
    for name, place in ours.items():
        if sizes[name] == 1:
            continue
        if name in mesh.axes:
            block = Block(mesh.dim(mesh.names.index(name)), 1, sizes[name])
            axes.append(AxisPlacement(sizes[name], place, None, block, name))
        else:
            axes.append(AxisPlacement(sizes[name], place, theirs[name], None, name))
    return Statement(reference, implementation, tuple(axes), "given", body.strip())


def case_problem(case: Case, mesh: dict[str, int]) -> Problem:
    """A case directory as the derivation takes it."""
    seq, dist, m = zip_families([case.reference]), zip_families(case.ranks), Mesh(mesh)
    types = seq.types()
    inputs = [s for e in case.relations.usable_inputs() for s in entry_statements(e, types[e.seq].shape, dist, m)]
    outputs = [s for e in case.relations.expected_outputs for s in entry_statements(e, types[e.seq].shape, dist, m)]
    return Problem(seq, dist, m, inputs, outputs)


# ---- what the derivation found ----------------------------------------------------------------------------------


def unproved(derivation: Derivation) -> list[str]:
    """Claims that are not proved, in words; empty when all are."""
    done = derivation.proved()
    open_claims = [
        f"{s.reference} ~ {s.implementation}: {s.text}" for g, s in derivation.claims.items() if g not in done
    ]
    return open_claims + [f"{s.reference} ~ {s.implementation}: {why}" for s, why in derivation.unusable]


def stops(derivation: Derivation) -> list[str]:
    """Reference nodes at the frontier, and nodes of either side without a signature."""
    ref, imp = derivation.reference, derivation.implementation
    nodes = {n.name: n for n in derivation.problem.reference.nodes}
    names = dict.fromkeys(ref.op_node[o] for o, _ in sorted(derivation.result.relations["frontier"]))
    out = [f"{n} ({nodes[n].op if n in nodes else 'auxiliary'})" for n in names]
    out += [f"reference {n}: {why}" for n, why in ref.unknown.items()]
    out += [f"implementation {n}: {why}" for n, why in imp.unknown.items()]
    return out


# ---- the truth, by execution ------------------------------------------------------------------------------------


def sampled(graph: Graph, ranges: Mapping[str, int], seed: int = 0) -> dict[str, Any]:
    """Distinct generic values for every input."""
    import torch

    torch.manual_seed(seed)
    values: dict[str, Any] = {}
    for item in graph.inputs:
        shape = [int(n) for n in item.shape]
        if item.dtype == "bool":
            values[item.name] = torch.rand(shape) < 0.5
        elif is_integer(item.dtype):
            count, bound = prod(shape), ranges[item.name]
            drawn = torch.randperm(bound)[:count] if count <= bound else torch.randint(0, bound, (count,))
            values[item.name] = drawn.reshape(shape)
        else:
            values[item.name] = torch.randn(shape, dtype=torch.float64)
    return values


def local_value(whole: Any, s: Statement, mesh: Mesh, rank: int, shape: list[int]) -> Any:
    """What a rank holds of ``whole`` under a statement: a tensor of the local ``shape``."""
    import torch

    index = [torch.zeros(shape, dtype=torch.int64) for _ in whole.shape]
    for d, start, _ in s.reference.cuts:
        index[d] += start
    for p in s.axes:
        if p.mesh is not None:
            where: Any = mesh.block_coordinate(rank, p.mesh)
        else:
            assert p.implementation is not None
            d, stride = p.implementation
            spread = [1] * len(shape)
            spread[d] = shape[d]
            where = (torch.arange(shape[d]) // stride % p.size).reshape(spread)
        index[p.reference[0]] += where * p.reference[1]
    return whole[tuple(index)] if index else whole


def rank_inputs(problem: Problem, values: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Inputs of all ranks that satisfy the given relations."""
    import torch

    out: list[dict[str, Any]] = [{} for _ in range(problem.mesh.ranks)]
    types = problem.implementation.types()
    for s in problem.inputs:
        family = problem.implementation.value(s.implementation.name)
        whole = values[s.reference.name]
        for rank in range(problem.mesh.ranks):
            local = local_value(whole, s, problem.mesh, rank, _shape(s.implementation, problem.implementation))
            name = family.members[rank]
            if not s.implementation.cuts:
                out[rank][name] = local
                continue
            full = [int(n) for n in types[s.implementation.name].shape]
            buffer = out[rank].setdefault(name, torch.full(full, float("nan"), dtype=torch.float64))
            box = tuple(slice(a, b) for _, a, b in _boxes(s.implementation, full))
            buffer[box] = local
    return out


def _boxes(p: Piece, shape: list[int]) -> list[tuple[int, int, int]]:
    cuts = {d: (d, a, b) for d, a, b in p.cuts}
    return [cuts.get(d, (d, 0, n)) for d, n in enumerate(shape)]


def largest_difference(problem: Problem, ranges: Mapping[str, int], seed: int = 0) -> float:
    """Largest relative difference between what the outputs should be and what they are, over all claims and ranks.

    Infinite where the implementation fails on inputs that the reference accepts.
    """
    import torch

    from emerge.execute.lockstep import run_ranks, run_sequential
    from emerge.util.errors import ExecutionError

    reference, ranks = problem.reference.graphs[0], problem.implementation.graphs
    values = sampled(reference, ranges, seed)
    expected = run_sequential(reference, values)
    try:
        found = run_ranks(ranks, rank_inputs(problem, values))
    except ExecutionError:
        return float("inf")
    worst = 0.0
    for s in problem.outputs:
        position = next(o for o in problem.implementation.outputs if o.name == s.implementation.name)
        for rank, results in enumerate(found):
            name = position.members[rank]
            assert name is not None
            actual = results[name].to(torch.float64)
            should = local_value(expected[s.reference.name], s, problem.mesh, rank, list(actual.shape)).to(
                torch.float64
            )
            scale = max(1e-30, float(should.abs().max()), float(actual.abs().max()))
            worst = max(worst, float((should - actual).abs().nan_to_num(nan=scale).max()) / scale)
    return worst
