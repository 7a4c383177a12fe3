"""Refutation by execution: both sides run on the same generic inputs, and claimed outputs are compared.

A difference counts when it exceeds the threshold of :mod:`emerge.execute.compare`, in a sample in which nothing was
decided on nearly equal values. At reduced sizes it must appear at two different size vectors. Everything that stands
in the way of such a statement gives the outcome ``impossible`` with a reason, never a verdict.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from emerge.execute._torch import torch
from emerge.execute.arithmetic import Arithmetic
from emerge.execute.collectives import CollectiveMismatch
from emerge.execute.compare import RELATIVE, Difference, compare_values, magnitude
from emerge.execute.feeders import norm_feeders
from emerge.execute.localise import Divergence, Localiser
from emerge.execute.options import Options
from emerge.execute.prune import needed_names
from emerge.execute.setup import Setup
from emerge.execute.shrink import CannotExecute, Shrinker, flops, memory_of
from emerge.execute.trial import (
    Draw,
    Inputs,
    Mismatch,
    NoInputs,
    ReferenceFails,
    Run,
    change,
    claim_values,
    compare,
    defined,
    describe,
    draw_inputs,
    has_uninitialised,
    responses,
    run_both,
    stored_values,
)
from emerge.graph.model import Graph
from emerge.relate.derive import Derivation, Problem
from emerge.util.errors import BudgetExceeded, EmergeError, ExecutionError

#: Samples at one size vector: scale of floating inputs, dropout masks drawn, and what feeds a norm made small. A
#: quiet sample is left out where no norm is fed by an input.
SAMPLES: tuple[Draw, ...] = (
    Draw(0, 1.0, True),
    Draw(0, None, False),
    Draw(0, 1e-3, True),
    Draw(0, 30.0, False),
    Draw(0, 1.0, False, quiet=True),
)
#: Draws of one sample before it is given up (nearly equal decisions, ill-conditioned values).
ATTEMPTS = 4
#: Work of one run (floating point operations) below which it uses one thread.
SERIAL_FLOPS = 2e9
#: A difference must exceed this many times what moving every input by a few float64 ulps does, or it says nothing.
CONDITION = 100.0
#: Pairs of runs in which every result is rounded otherwise.
ROUNDINGS = 3
#: What became too small for float64 stays harmless inside a program while it is not larger than this.
NEGLIGIBLE = 1e-100


@dataclass
class Witness:
    """An executed difference.

    Attributes:
        kind: ``""`` for differing values, else ``UNINITIALISED``, ``WRONG_GROUP``, ``COLLECTIVE_MISMATCH`` or
            ``OUT_OF_RANGE`` (an index outside its table).
        mismatches: claims that differ, the worst first; empty where the implementation did not finish.
        message: one sentence.
        nodes: implementation nodes involved, by rank, where ``kind`` names some.
    """

    setup: Setup
    draw: Draw
    inputs: Inputs
    kind: str
    message: str
    mismatches: list[Mismatch] = field(default_factory=list)
    nodes: list[tuple[int, str]] = field(default_factory=list)


@dataclass
class Refutation:
    """What execution says about a pair.

    Attributes:
        outcome: ``refuted``, ``agree`` (no difference in any sample) or ``impossible`` (nothing can be said).
        reason: for ``impossible`` why; for the others a sentence.
        kind: diagnosis that execution itself gives, see :class:`Witness`; ``""`` for differing values.
        output: name of the reference output that differs most; ``claim`` its number in the derivation.
        rank, implementation: where it differs; ``difference``: how much.
        sizes: ``captured`` or ``reduced``; ``vectors``: new lengths per size vector that was run.
        diverging: where the programs part, in execution order of the reference.
        assumptions: (name, where, why) that the samples rest on.
        witnesses: one per size vector, the first is the one to save.
        samples: number of samples compared. ``seconds``: wall time.
    """

    outcome: str
    reason: str
    kind: str = ""
    output: str = ""
    claim: int | None = None
    rank: int | None = None
    implementation: str = ""
    difference: Difference | None = None
    sizes: str = "captured"
    vectors: list[dict[str, int]] = field(default_factory=list)
    diverging: list[Divergence] = field(default_factory=list)
    assumptions: list[tuple[str, str, str]] = field(default_factory=list)
    witnesses: list[Witness] = field(default_factory=list)
    samples: int = 0
    seconds: float = 0.0
    captured: Setup | None = None


class _Refuter:
    def __init__(
        self, problem: Problem, derivation: Derivation, seed: int, memory_bytes: int, seconds: float, device: str
    ) -> None:
        self.derivation, self.seed, self.memory = derivation, seed, memory_bytes
        self.started, self.limit = time.monotonic(), seconds
        self.options = Options(device=device)
        self.shrinker = Shrinker(problem, derivation)
        self.samples = 0
        self.notes: list[str] = []

    def out_of_time(self) -> bool:
        return time.monotonic() - self.started > self.limit

    # ---- the whole --------------------------------------------------------------------------------------------------

    def run(self) -> Refutation:
        """Samples at captured sizes, or at size vectors until two agree on the outcome."""
        hits: list[Witness] = []
        setups: list[Setup] = []
        clean = 0
        for setup in self._setups():
            setups.append(setup)
            before = self.samples
            witness = self.sample(setup)
            if witness is not None:
                hits.append(witness)
            elif self.samples > before:
                clean += 1
            if len(hits) >= (2 if setup.reduced else 1) or clean >= (2 if setup.reduced else 1):
                break
            if self.out_of_time():
                break
        result = self._outcome(setups, hits, clean)
        result.sizes = "reduced" if setups and setups[0].reduced else "captured"
        result.vectors = [s.lengths for s in setups if s.reduced]
        result.assumptions = self._assumptions(setups[0]) if setups else []
        result.samples = self.samples
        return result

    def _setups(self) -> Iterator[Setup]:
        shrinker = self.shrinker
        graphs = [g for side in shrinker.sides for g in side.graphs]
        if shrinker.fits(graphs, self.memory):
            yield shrinker.captured()
            return
        try:
            first = shrinker.reduced(self.memory)
        except CannotExecute:
            if memory_of(graphs) > self.memory:
                raise
            yield shrinker.captured()  # much work, but it fits
            return
        yield first
        before = first
        for _ in range(2):
            following = shrinker.reduced(self.memory, avoid=before)
            if following.lengths == before.lengths:
                return
            yield following
            before = following

    def _outcome(self, setups: list[Setup], hits: list[Witness], clean: int) -> Refutation:
        needed = 2 if setups and setups[0].reduced else 1
        if len(hits) >= needed:
            return self._refuted(hits)
        if hits:
            return Refutation(
                "impossible", f"a difference appeared at one size vector only: {hits[0].message}", witnesses=hits
            )
        if clean >= needed:
            return Refutation("agree", f"{self.samples} samples agree" + self._noted())
        if self.out_of_time():
            return Refutation("impossible", f"the time budget of {self.limit:g} s ran out after {self.samples} samples")
        if clean:
            return Refutation(
                "impossible",
                f"{self.samples} samples agree, at one size vector only: no second one exists" + self._noted(),
            )
        return Refutation("impossible", "no sample could be judged" + self._noted())

    def _noted(self) -> str:
        return f" ({'; '.join(dict.fromkeys(self.notes))})" if self.notes else ""

    def _refuted(self, hits: list[Witness]) -> Refutation:
        first = hits[0]
        common = [m for m in first.mismatches if all(any(m.number == n.number for n in h.mismatches) for h in hits)]
        if first.mismatches and not common:
            return Refutation("impossible", "different outputs differ at the two size vectors", witnesses=hits)
        worst = common[0] if common else None
        proved = self.derivation.proved()
        contradicted = next((m for m in common if m.number in proved), None)
        if contradicted is not None:
            reason = (
                f"execution differs at '{contradicted.reference}', which the derivation proves: a law, a signature or "
                f"the execution is wrong ({first.message})"
            )
            return Refutation("impossible", reason, witnesses=hits)
        result = Refutation("refuted", first.message, first.kind, witnesses=hits)
        if worst is not None:
            result.output, result.claim, result.rank = worst.reference, worst.number, worst.rank
            result.implementation, result.difference = worst.implementation, worst.difference
        if first.mismatches:
            result.diverging = self._localise(first, common)
        elif first.nodes:
            result.diverging = [Divergence("", dict(first.nodes))]
        try:
            result.captured = first.setup if not first.setup.reduced else self.shrinker.captured()
        except CannotExecute:
            result.captured = None
        return result

    def _localise(self, witness: Witness, mismatches: list[Mismatch]) -> list[Divergence]:
        try:
            run = run_both(witness.setup, witness.inputs, witness.draw, self.options, keep="all")
            return Localiser(self.shrinker, witness.setup, run).diverging(mismatches)
        except EmergeError as error:
            self.notes.append(f"not localised: {error}")
            return []

    def _assumptions(self, setup: Setup) -> list[tuple[str, str, str]]:
        out = [("index_range", name, "its values lie inside the table it indexes") for name in sorted(setup.bounds)]
        out += [("integer_range", name, "values in [0, 8): nothing says what it may hold") for name in setup.unbounded]
        pairs = [p for p in setup.dropout.pairs if p.reference is not None]
        if pairs and setup.dropout.known():
            why = "both sides draw the same mask for each element of the whole tensor"
            out += [("dropout_masks", p.reference or "", why) for p in pairs]
        return out

    # ---- one size vector --------------------------------------------------------------------------------------------

    def sample(self, setup: Setup) -> Witness | None:
        """The first sample in which the sides differ; None where none of them does."""
        # Threads only cost where tensors are small.
        if not setup.dropout.known():
            self.notes.append("every element was kept by dropout, since which calls draw one mask is not known")
        small = sum(map(flops, (setup.reference, *setup.ranks))) < SERIAL_FLOPS
        self.options = self.options.with_(threads=1 if small else None)
        quiet = bool(norm_feeders(setup.reference))
        samples = [s for s in SAMPLES if quiet or not s.quiet]
        if not setup.reduced and stored_values(setup.reference):
            samples.insert(0, Draw(0, 1.0, True, stored=True))
        for index, sample in enumerate(samples):
            for attempt in range(ATTEMPTS):
                draw = replace(sample, seed=self.seed + 101 * index + attempt)
                again, witness = self._trial(setup, draw, first=index == 0)
                if witness is not None:
                    return witness
                if not again or self.out_of_time():
                    break
            if self.out_of_time():
                return None
        return None

    def _trial(self, setup: Setup, draw: Draw, first: bool) -> tuple[bool, Witness | None]:
        """One sample: whether to draw it again, and the difference found."""
        try:
            inputs = draw_inputs(setup, draw)
        except ExecutionError as error:
            raise NoInputs(f"inputs cannot be drawn: {error}") from None
        try:
            run = run_both(setup, inputs, draw, self.options)
        except CollectiveMismatch as error:
            if not self.shrinker.collectives_kept:
                raise CannotExecute(f"collectives without semantics around them were left out: {error}") from None
            return False, self._stuck(setup, draw, inputs, error)
        except ReferenceFails:
            raise
        except BudgetExceeded:
            raise
        except ExecutionError as error:
            if re.search(r"out of (range|bounds)", error.message):
                ranks = [r for r, g in enumerate(setup.ranks) if error.place.startswith(f"{g.path or g.name}:")]
                nodes = [(r, error.node) for r in ranks[:1]]
                return False, Witness(
                    setup, draw, inputs, "OUT_OF_RANGE", f"the implementation fails: {error}", nodes=nodes
                )
            raise
        if defined(setup, run) == 0.0:
            self.notes.append("a sample in which the reference is undefined was drawn again")
            return True, None
        if first and has_uninitialised([setup.reference, *setup.ranks]):
            witness = self._uninitialised(setup, draw, inputs, run)
            if witness is not None:
                return False, witness
        mismatches = compare(setup, run)
        if not mismatches:
            self.samples += 1
            return False, None
        if run.decisions.tight:
            self.notes.append(
                f"a sample that decides on nearly equal values at '{run.decisions.tight[0].node}' was drawn again"
            )
            return True, None
        return self._confirmed(setup, draw, inputs, run)

    def _confirmed(self, setup: Setup, draw: Draw, inputs: Inputs, run: Run) -> tuple[bool, Witness | None]:
        """Measures responses; the difference must exceed them."""
        mismatches = compare(setup, run, responses(setup, inputs, draw, self.options, run))
        if not mismatches:
            self.samples += 1
            return False, None
        left = self._leaves_range(setup, draw, inputs, mismatches)
        if left is not None:
            self.notes.append(f"a sample in which '{left}' leaves the range of float64 was drawn again")
            return True, None
        noise = self._noise(setup, draw, inputs, run)
        mismatches = [m for m in mismatches if m.difference.max_abs_diff > CONDITION * noise[f"{m.number}:{m.rank}"]]
        if not mismatches:
            self.notes.append("an ill-conditioned sample was drawn again")
            return True, None
        if draw.masks and setup.dropout.pairs and setup.dropout.known() and not setup.dropout.sure():
            plain = replace(draw, masks=False)
            if not compare(setup, run_both(setup, inputs, plain, self.options)):
                self.notes.append("differs only under dropout masks whose correspondence is not known")
                return False, None
        self.samples += 1
        return False, Witness(setup, draw, inputs, "", describe(mismatches[0]), mismatches)

    def _leaves_range(self, setup: Setup, draw: Draw, inputs: Inputs, mismatches: list[Mismatch]) -> str | None:
        """The node at which float64 has no number for what the program computes, so that it makes the difference."""
        graphs = [setup.reference, *setup.ranks]
        # what one rank computes may reach the others
        roots = [_names(mismatches), *(_outputs_of(g, mismatches) for g in setup.ranks)]
        cones = [needed_names(g, r, collectives=False) for g, r in zip(graphs, roots)]
        read = {(id(graph), name): name for graph, cone in zip(graphs, cones) for name in cone}
        seen = Arithmetic()
        run_both(setup, inputs, draw, self.options, arithmetic=seen)
        overflowed = next((name for key, name in read.items() if key in seen.overflowed), None)
        if overflowed is not None or seen.underflowed.isdisjoint(read):
            return overflowed
        # what is too small for float64 matters where something makes it large or decides on it
        runs = [
            run_both(setup, inputs, draw, self.options, arithmetic=Arithmetic(tiny=t), keep="all") for t in (0, 1, -1)
        ]
        for position, (graph, cone, outputs) in enumerate(zip(graphs, cones, roots)):
            values = [[run.reference, *run.ranks][position] for run in runs]
            for node in graph.nodes:
                floor = 0.0 if node.name in outputs else NEGLIGIBLE
                if node.name in cone and any(_apart(values[0][node.name], v[node.name], floor) for v in values[1:]):
                    return node.name
        return None

    def _noise(self, setup: Setup, draw: Draw, inputs: Inputs, run: Run) -> dict[str, float]:
        """Change of every claim when all floating inputs move by a few ulps of float64, or all results."""
        moved = Inputs(_jittered(inputs.reference, 1), [_jittered(v, 2) for v in inputs.ranks])
        base = claim_values(setup, run)
        # operators round as well: 1 - sigmoid(40) is nothing but the rounding of the sigmoid
        others = [
            claim_values(setup, run_both(setup, moved, draw, self.options)),
            *(
                claim_values(setup, run_both(setup, inputs, draw, self.options, arithmetic=Arithmetic(r, seed=seed)))
                for seed in range(ROUNDINGS)
                for r in (1, -1)
            ),
        ]
        return {k: max(change(base[k][i], o[k][i]) for o in others for i in (0, 1)) for k in base}

    def _uninitialised(self, setup: Setup, draw: Draw, inputs: Inputs, run: Run) -> Witness | None:
        other = replace(draw, fill=draw.fill + 1)
        base, again = claim_values(setup, run), claim_values(setup, run_both(setup, inputs, other, self.options))
        found = []
        for key, (expected, actual, relation, rank) in base.items():
            if change(expected, again[key][0]) > 0:
                raise CannotExecute(f"output '{relation.reference}' of the reference depends on uninitialised memory")
            difference = compare_values(actual, again[key][1], 0.0)
            if difference is not None:
                name = str(relation.implementation[rank])
                found.append(Mismatch(relation.number, relation.reference, name, rank, difference, relation.text))
        if not found:
            return None
        message = f"'{found[0].implementation}' of rank {found[0].rank} depends on memory that was never written"
        return Witness(setup, draw, inputs, "UNINITIALISED", message, found)

    def _stuck(self, setup: Setup, draw: Draw, inputs: Inputs, error: CollectiveMismatch) -> Witness:
        groups = {g for w in error.waiting for g in re.findall(r"in group '([^']*)'", w.what)}
        kind = "WRONG_GROUP" if len(groups) > 1 else "COLLECTIVE_MISMATCH"
        return Witness(setup, draw, inputs, kind, error.message, nodes=[(w.rank, w.node) for w in error.waiting])


def _apart(before: Any, after: Any, floor: float) -> bool:
    """Whether a value changes by more than rounding does: ``floor`` and 1e-9 of its size, or in what is no number."""
    limit = max(floor, RELATIVE * magnitude(before, after))
    return any(compare_values(*pair, limit) is not None for pair in ((before, after), (after, before)))


def _names(mismatches: list[Mismatch]) -> set[str]:
    """The reference outputs that differ."""
    return {m.reference.partition("[")[0] for m in mismatches}


def _outputs_of(graph: Graph, mismatches: list[Mismatch]) -> set[str]:
    """The outputs of a rank that differ on some rank."""
    named = {m.implementation.partition("[")[0] for m in mismatches}
    return named & {n.name for n in graph.nodes}


def _jittered(values: dict[str, Any], seed: int) -> dict[str, Any]:
    """Floating tensors moved by up to four ulps of float64, at random."""
    out = {}
    generator = torch.Generator().manual_seed(seed)
    for name, value in values.items():
        if value.is_floating_point():
            steps = torch.randint(-4, 5, tuple(value.shape), generator=generator, dtype=torch.int64)
            value = value * (1.0 + steps.to(value.dtype) * 2.0**-52)
        out[name] = value
    return out


def refute(
    problem: Problem,
    derivation: Derivation,
    *,
    seed: int = 0,
    memory_bytes: int = 2 << 30,
    seconds: float = 120.0,
    device: str = "auto",
) -> Refutation:
    """Runs both sides of a pair and compares their claimed outputs.

    Args:
        seed: of all samples.
        memory_bytes: budget for all graphs together; captured sizes are used where they fit it and are modest work.
        seconds: wall-clock budget, checked between samples.
        device: ``cpu``, ``cuda`` or ``auto``.

    Returns:
        The outcome; it never raises for a pair that cannot be executed.
    """
    started = time.monotonic()
    try:
        result = _Refuter(problem, derivation, seed, memory_bytes, seconds, device).run()
    except (CannotExecute, NoInputs, BudgetExceeded) as error:
        result = Refutation("impossible", str(error))
    except ReferenceFails as error:
        result = Refutation("impossible", f"the reference cannot be executed: {error}")
    except ExecutionError as error:
        result = Refutation("impossible", f"the implementation cannot be executed: {error}")
    result.seconds = time.monotonic() - started
    return result
