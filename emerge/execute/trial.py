"""One trial: generic inputs for a :class:`~emerge.execute.setup.Setup`, a run of both sides, and the comparison."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from emerge.execute._torch import torch
from emerge.execute.arithmetic import Arithmetic
from emerge.execute.compare import PERTURBATIONS, Difference, compare_values, defined_fraction, tolerance
from emerge.execute.decisions import Decisions
from emerge.execute.feeders import norm_feeders
from emerge.execute.lockstep import run_ranks, run_sequential
from emerge.execute.options import DropoutMask, Options, keep_all, seeded_fill
from emerge.execute.placement import Relation, region
from emerge.execute.precision import Perturbation, widen
from emerge.execute.sampling import sample_inputs
from emerge.execute.setup import Setup
from emerge.graph.model import Graph, Node
from emerge.util.errors import ExecutionError

#: Range of integer inputs of which nothing is known.
DEFAULT_RANGE = (0, 8)


class NoInputs(ExecutionError):
    """Inputs that satisfy the statements cannot be built: some are not covered, or statements contradict."""


@dataclass(frozen=True)
class Draw:
    """What is drawn for one trial.

    Attributes:
        scale: of floating inputs; None = every input draws its own.
        masks: dropout masks are drawn; False = every element is kept (and scaled).
        fill: seed of the content of uninitialised memory.
        quiet: what feeds a norm is small, so that its eps shows (:mod:`emerge.execute.feeders`).
        stored: inputs whose values the capture brings along (a checkpoint's weights) have these.
    """

    seed: int
    scale: float | None = None
    masks: bool = True
    fill: int = 1
    quiet: bool = False
    stored: bool = False


@dataclass
class Inputs:
    """Inputs of both sides that satisfy the statements, by name."""

    reference: dict[str, Any]
    ranks: list[dict[str, Any]]


# ---- inputs ---------------------------------------------------------------------------------------------------------


def draw_inputs(setup: Setup, draw: Draw) -> Inputs:
    """Generic reference inputs and the implementation inputs that go with them.

    Raises:
        NoInputs: an implementation input that no statement covers, statements about interior tensors, or
            statements that contradict each other.
    """
    ranges = {name: (0, bound) for name, bound in setup.bounds.items()}
    values = sample_inputs(
        setup.reference,
        draw.seed,
        scale=draw.scale,
        ranges=ranges,
        default_range=DEFAULT_RANGE,
        small=norm_feeders(setup.reference) if draw.quiet else (),
    )
    if draw.stored:
        values |= stored_values(setup.reference)
    names = {i.name for i in setup.reference.inputs}
    inner = sorted({r.reference for r in setup.inputs} - names - {n.name for n in setup.reference.nodes})
    relations = [r for r in setup.inputs if r.reference not in inner]
    computed = [{n.name for n in g.nodes} for g in setup.ranks]
    for relation in relations:
        for rank, name in relation.members():
            if name in computed[rank]:
                raise NoInputs(f"a relation speaks of '{name}' of rank {rank}, which is computed and cannot be set")
    constants = {i.name: _constant(i) for i in setup.reference.inputs if i.const is not None}
    for _ in range(len(relations) + 1):
        interior = sorted({r.reference for r in relations} - names)
        known = {**constants, **values}
        if interior:
            known.update(run_sequential(setup.reference, values, keep=interior))
        buffers = _Buffers(setup)
        conflict = next((r for r in relations if not buffers.write(r, known[r.reference])), None)
        if conflict is None:
            return Inputs(values, buffers.finished())
        if conflict.reference not in values:
            raise NoInputs(f"the input relations of '{conflict.reference}' contradict others")
        values[conflict.reference] = buffers.read(conflict, values[conflict.reference])
    raise NoInputs("the input relations contradict each other")


def stored_values(graph: Graph) -> dict[str, Any]:
    """The values a checkpoint gives to inputs, where the sizes run are those captured."""
    if "weights" not in graph.extra:
        return {}
    return {
        i.name: widen(torch.from_numpy(i.values.copy()))
        for i in graph.inputs
        if i.values is not None and tuple(i.values.shape) == tuple(i.shape)
    }


def _constant(item: Any) -> Any:
    from emerge.execute.ops.python import constant_tensor

    return constant_tensor(item.const, item.dtype, item.shape, torch.device("cpu"))


class _Buffers:
    """Implementation inputs under construction, with which of their elements are known."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.types = [{i.name: i for i in g.inputs} for g in setup.ranks]
        self.values: list[dict[str, Any]] = [{} for _ in setup.ranks]
        self.known: list[dict[str, Any]] = [{} for _ in setup.ranks]

    def write(self, relation: Relation, value: Any) -> bool:
        """Writes what a relation says; False where something else is there already."""
        for rank, name in relation.members():
            if name not in self.types[rank]:
                continue  # nothing on this rank reads it
            wanted = relation.expected(widen(value), rank)
            if name not in self.values[rank]:
                shape = tuple(int(n) for n in self.types[rank][name].shape)
                self.values[rank][name] = torch.zeros(shape, dtype=wanted.dtype)
                self.known[rank][name] = torch.zeros(shape, dtype=torch.bool)
            target = region(self.values[rank][name], relation.implementation_cuts)
            known = region(self.known[rank][name], relation.implementation_cuts)
            if target.shape != wanted.shape:
                raise NoInputs(
                    f"'{relation.text}' gives '{name}' the shape {list(wanted.shape)}, it has {list(target.shape)}"
                )
            if bool((known & (target != wanted)).any()):
                return False
            target.copy_(wanted)
            known.fill_(True)
        return True

    def read(self, relation: Relation, value: Any) -> Any:
        """The reference value that goes with what the buffers hold already, in the piece of this relation."""
        if any(name not in self.values[r] for r, name in relation.members()):
            raise NoInputs(f"the input relations of '{relation.reference}' contradict others")
        wanted = value.clone()
        held = {r for r, _ in relation.members()}
        parts = [relation.actual(v, r) if r in held else None for r, v in enumerate(self.values)]
        region(wanted, relation.reference_cuts).copy_(relation.placement.unshard(parts))
        return wanted

    def finished(self) -> list[dict[str, Any]]:
        """The inputs of all ranks.

        Raises:
            NoInputs: elements of an input without stored value are not known.
        """
        for rank, graph in enumerate(self.setup.ranks):
            for item in graph.inputs:
                if item.const is not None:
                    continue
                known = self.known[rank].get(item.name)
                if known is None:
                    raise NoInputs(f"no input relation says what '{item.name}' of rank {rank} holds")
                if not bool(known.all()):
                    raise NoInputs(
                        f"the input relations leave {int((~known).sum())} of {known.numel()} elements of "
                        f"'{item.name}' of rank {rank} open"
                    )
        return self.values


# ---- runs -----------------------------------------------------------------------------------------------------------


def masks_of(setup: Setup, draw: Draw) -> tuple[DropoutMask, list[DropoutMask]]:
    """Dropout masks of the reference and of every rank. Calls without a known partner draw masks of their own."""
    if not draw.masks or not setup.dropout.known():
        return keep_all, [keep_all for _ in setup.ranks]
    drawn: dict[str, Any] = {}
    pairs = setup.dropout.pairs
    partner = {(rank, p.implementation[rank]): p for p in pairs if p.implementation for rank in range(len(setup.ranks))}

    def fresh(key: str, shape: tuple[int, ...]) -> Any:
        generator = torch.Generator().manual_seed(zlib.crc32(f"dropout:{draw.seed}:{key}".encode()))
        return torch.rand(shape, generator=generator) < 0.7

    def reference(node: Node, shape: tuple[int, ...]) -> Any:
        drawn[node.name] = fresh(node.name, shape)
        return drawn[node.name]

    def of_rank(rank: int) -> DropoutMask:
        def mask(node: Node, shape: tuple[int, ...]) -> Any:
            pair = partner.get((rank, node.name))
            if pair is None or pair.reference is None or pair.placement is None:
                return fresh(f"{rank}:{node.name}", shape)
            whole = drawn.get(pair.reference)
            if whole is None:
                whole = fresh(pair.reference, pair.placement.reference_shape())
            return pair.placement.shard(whole, rank)

        return mask

    return reference, [of_rank(r) for r in range(len(setup.ranks))]


@dataclass
class Run:
    """Values of one run of both sides, by name."""

    reference: dict[str, Any]
    ranks: list[dict[str, Any]]
    decisions: Decisions


def run_both(
    setup: Setup,
    inputs: Inputs,
    draw: Draw,
    options: Options,
    *,
    perturbation: Perturbation | None = None,
    arithmetic: Arithmetic | None = None,
    keep: Any = (),
) -> Run:
    """Runs the reference, then all ranks in lockstep.

    Args:
        perturbation: moves constants by one ulp, on both sides alike.
        arithmetic: watches the float64 of all graphs.
        keep: ``"all"`` to keep every value.

    Raises:
        ReferenceFails: the reference does not run.
        CollectiveMismatch, ExecutionError, BudgetExceeded: as :func:`run_ranks`, for the implementation.
    """
    decisions = Decisions()
    mask, masks = masks_of(setup, draw)
    base = options.with_(
        fill=seeded_fill(draw.fill), decisions=decisions, perturbation=perturbation, arithmetic=arithmetic
    )
    try:
        reference = run_sequential(setup.reference, inputs.reference, options=base.with_(dropout_mask=mask), keep=keep)
    except ExecutionError as error:
        raise ReferenceFails(error.message, error.place, error.node) from error
    per_rank = [replace(base, dropout_mask=m) for m in masks]
    ranks = run_ranks(setup.ranks, inputs.ranks, options=per_rank, keep=keep)
    return Run(reference, ranks, decisions)


class ReferenceFails(ExecutionError):
    """The reference itself cannot be executed; says nothing about the implementation."""


# ---- comparison -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Mismatch:
    """A claimed output that differs on one rank.

    Attributes:
        number: of the claim.
        reference, implementation: names of the tensors (the latter on ``rank``).
    """

    number: int
    reference: str
    implementation: str
    rank: int
    difference: Difference
    text: str = ""


def claim_values(setup: Setup, run: Run) -> dict[str, tuple[Any, Any, Relation, int]]:
    """For every claim and rank: expected value, value found."""
    out = {}
    for relation in setup.outputs:
        value = run.reference[relation.reference]
        for rank, _ in relation.members():
            found = relation.actual(run.ranks[rank], rank)
            out[f"{relation.number}:{rank}"] = (relation.expected(value, rank), found, relation, rank)
    return out


def compare(setup: Setup, run: Run, responses: Mapping[str, float] | None = None) -> list[Mismatch]:
    """Claims that differ above the threshold, the worst first.

    Args:
        responses: per claim and rank, the response to one-ulp perturbations (0 where it was not measured).
    """
    found = []
    for key, (expected, actual, relation, rank) in claim_values(setup, run).items():
        limit = tolerance(expected, actual, (responses or {}).get(key, 0.0))
        difference = compare_values(expected, actual, limit)
        if difference is not None:
            found.append(
                Mismatch(
                    relation.number,
                    relation.reference,
                    str(relation.implementation[rank]),
                    rank,
                    difference,
                    relation.text,
                )
            )
    return sorted(found, key=lambda m: -m.difference.max_abs_diff)


def change(before: Any, after: Any) -> float:
    """Largest absolute change of a value; inf where it is not finite, becomes (un)defined, or an integer changes."""
    integers = isinstance(before, torch.Tensor) and not (before.is_floating_point() or before.is_complex())
    largest = 0.0
    for found in (compare_values(before, after, 0.0), compare_values(after, before, 0.0)):
        if found is not None:
            largest = max(largest, float("inf") if integers or found.reason != "value" else found.max_abs_diff)
    return largest


def responses(setup: Setup, inputs: Inputs, draw: Draw, options: Options, run: Run) -> dict[str, float]:
    """Per claim and rank, how far the expected or the found value moves when constants move by one ulp."""
    base = claim_values(setup, run)
    out = dict.fromkeys(base, 0.0)
    for mode, seed in PERTURBATIONS:
        perturbation = Perturbation(mode, seed)
        moved = claim_values(setup, run_both(setup, inputs, draw, options, perturbation=perturbation))
        if perturbation.touched == 0:
            break
        for key, (expected, actual, *_) in base.items():
            out[key] = max(out[key], change(expected, moved[key][0]), change(actual, moved[key][1]))
    return out


def describe(mismatch: Mismatch) -> str:
    """One sentence about a difference."""
    found, where = mismatch.difference, f"'{mismatch.implementation}' of rank {mismatch.rank}"
    if found.reason != "value":
        return f"output '{mismatch.reference}' against {where}: {found.reason}"
    values = f"{found.reference:.6g} against {found.implementation:.6g}"
    place = f" at {list(found.index)}" if found.index else ""
    return f"output '{mismatch.reference}' differs by {found.max_abs_diff:.3g} from {where}{place}: {values}"


def defined(setup: Setup, run: Run) -> float:
    """Smallest part of a claimed output that is defined in the reference."""
    return min((defined_fraction(run.reference[r.reference]) for r in setup.outputs), default=1.0)


def has_uninitialised(graphs: list[Graph]) -> bool:
    """True where a graph makes memory that it does not initialise."""
    from emerge.execute.aliasing import split_op
    from emerge.execute.constants import UNINITIALISED

    return any(".".join(split_op(n.op)[:2]) in UNINITIALISED for g in graphs for n in g.nodes)
