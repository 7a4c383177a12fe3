"""Runs pairs: reading, derivation, execution where a proof falls short, verdict. One pair's fault leaves the others."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from emerge.campaign.admission import law_levels
from emerge.campaign.build import Prepared, prepare, tell
from emerge.campaign.config import PairSpec, SynthesisSpec
from emerge.campaign.counterexample import save_counterexample
from emerge.campaign.segments import Chain
from emerge.campaign.synthesis import Attempt, synthesise
from emerge.campaign.weights import weight_findings
from emerge.capture.source import SourceSpec, describe
from emerge.graph.model import Graph
from emerge.relate.derive import Derivation, Problem, derive
from emerge.util.errors import BudgetExceeded, EmergeError, EngineError
from emerge.verdict.decide import decide
from emerge.verdict.types import UNKNOWN, Finding, NotRun, PairError, PairResult, RefutationResult, Refuter


@dataclass(frozen=True)
class RunOptions:
    """Options of the command line; None leaves a pair's own setting.

    Attributes:
        seconds: per pair. memory_gb: for execution.
        out: where counterexamples and synthesised rules go, None = nowhere.
        base: shipped rules of the algebra, ``full`` or ``minimal``. synthesis: synthesise rules where a proof falls short.
        device: None = what the pair says.
        debug: keep tracebacks in internal errors.
    """

    engine: str | None = None
    seed: int | None = None
    seconds: float | None = None
    memory_gb: float | None = None
    out: Path | None = None
    debug: bool = False
    base: str | None = None
    synthesis: bool | None = None
    device: str | None = None


def run_pairs(specs: Sequence[PairSpec], options: RunOptions, *, jobs: int = 1) -> Iterator[PairResult]:
    """Results in the order of ``specs``; with ``jobs`` > 1 pairs run in processes of their own."""
    if jobs <= 1 or len(specs) <= 1:
        for spec in specs:
            yield run_pair(spec, options)
        return
    from concurrent.futures import ProcessPoolExecutor
    from concurrent.futures.process import BrokenProcessPool
    from multiprocessing import get_context

    with ProcessPoolExecutor(min(jobs, len(specs)), mp_context=get_context("spawn")) as pool:
        futures = [pool.submit(run_pair, spec, options) for spec in specs]
        try:
            for spec, future in zip(specs, futures):
                try:
                    yield future.result()
                except BrokenProcessPool:
                    message = (
                        "the process of this pair, or of one beside it, died (out of memory?); run it alone with --pair"
                    )
                    yield PairResult(
                        id=spec.id, expect=spec.expect, error=PairError(message, spec.place, internal=True)
                    )
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def run_pair(spec: PairSpec, options: RunOptions) -> PairResult:
    """One pair; every exception becomes the pair's ``error``."""
    started = time.perf_counter()
    try:
        result = _run(spec, options, started)
    except EngineError as e:
        result = PairResult(error=PairError(e.message, e.place, internal=True))
    except EmergeError as e:
        result = PairResult(error=PairError(e.message, e.place))
    except Exception as e:
        if options.debug:
            traceback.print_exc()
        text = " ".join(f"{type(e).__name__}: {e}".split())
        result = PairResult(
            error=PairError(f"internal error ({text}); run again with --debug and report it", spec.place, True)
        )
    result.id, result.expect, result.sources = spec.id, spec.expect, sources(spec)
    result.seconds["total"] = time.perf_counter() - started
    return result


def _run(spec: PairSpec, options: RunOptions, started: float) -> PairResult:
    engine = options.engine if options.engine is not None else spec.engine
    seconds = options.seconds if options.seconds is not None else spec.seconds
    levels = law_levels(spec.rules, spec.trust)
    prepared = prepare(spec)
    base = options.base if options.base is not None else spec.base
    wanted = spec.synthesis if options.synthesis is None else (spec.synthesis or SynthesisSpec())
    wanted = None if options.synthesis is False else wanted

    def left() -> float | None:
        return None if seconds is None else max(seconds - (time.perf_counter() - started), 0.0)

    executed: dict[str, float] = {}
    spent: dict[str, float] = {}
    derivation: Derivation | None = None
    try:
        if left() == 0.0:
            raise BudgetExceeded(f"the budget of {seconds:g} s was spent on reading the graphs")
        if any(isinstance(s, SourceSpec) for s in (spec.reference, spec.implementation)):
            tell(f"{spec.id}: deriving alignments")
        deriver = Deriver(engine, tuple(spec.rules), base, left)
        found = None if prepared.ambiguities else _by_segments(prepared.problem, deriver, levels, spent)
        if found is not None:
            result = found
        else:
            result, derivation = _whole(prepared, deriver, levels, spec, options, wanted, executed)
    except BudgetExceeded as e:
        result = PairResult(verdict=UNKNOWN, reason=str(e))
    _describe(result, prepared)
    for stage, number in (derivation.seconds if derivation is not None else {}).items():
        spent[stage] = spent.get(stage, 0.0) + number
    result.seconds |= spent | prepared.seconds | executed
    result.findings = [f for f in result.findings if f.kind not in {i.finding for i in spec.ignore}]
    _fail_on(result, spec)
    if options.out is not None:
        save_counterexample(result, spec.id, options.out)
    result.payload = None
    return result


@dataclass(frozen=True)
class Deriver:
    """Derives problems of one pair; ``left`` gives the seconds that remain."""

    engine: str
    rules: tuple[Path, ...]
    base: str
    left: Callable[[], float | None]

    def __call__(self, problem: Problem) -> Derivation:
        """A derivation; where claims stay open, again with constants executed on both sides."""
        derivation = self.run(problem)
        if len(derivation.proved()) == len(derivation.claims):
            return derivation
        try:
            from emerge.execute.equal_constants import with_constants
        except ImportError:
            return derivation
        more = with_constants(problem, derivation)
        if more is None:
            return derivation
        again = self.run(more, derivation.reference.extension is not None)
        again.seconds = {k: v + derivation.seconds.get(k, 0.0) for k, v in again.seconds.items()}
        return again

    def run(self, problem: Problem, algebra: bool = False) -> Derivation:
        """A derivation of the problem as it is; ``algebra``: with equal forms from the start."""
        return derive(problem, engine=self.engine, rules=self.rules, log=True, timeout=self.left(),
                      start_with_algebra=algebra, base_rules=self.base)  # fmt: skip


def _by_segments(
    problem: Problem, deriver: Deriver, levels: dict[str, str], spent: dict[str, float]
) -> PairResult | None:
    """EQUIVALENT where the pair can be proved layer by layer, else None."""

    def judge(problem: Problem, derivation: Derivation) -> PairResult:
        return decide(problem, derivation, levels=levels)

    chain = Chain(problem, deriver, deriver.run, judge, spent)
    return chain.prove()


def _whole(
    prepared: Prepared, deriver: Deriver, levels: dict[str, str], spec: PairSpec, options: RunOptions,
    wanted: SynthesisSpec | None, executed: dict[str, float],
) -> tuple[PairResult, Derivation]:  # fmt: skip
    """The pair in one piece: derivation, execution where claims stay open, synthesis where both sides agree."""
    seed = options.seed if options.seed is not None else spec.seed
    memory_gb = options.memory_gb if options.memory_gb is not None else spec.memory_gb
    validation = spec.validation if options.device is None else replace(spec.validation, device=options.device)
    derivation = deriver(prepared.problem)
    problem = derivation.problem
    refuter = _timed(execution_refuter(seed, memory_gb, deriver.left, spec.rules, validation.device), executed)
    kept: list[RefutationResult | None] = []

    def remembered(problem: Problem, derivation: Derivation) -> RefutationResult | None:
        """An execution decides once; more rules do not change what the programs compute."""
        if not kept:
            kept.append(refuter(problem, derivation))
        return kept[0]

    def judge(derivation: Derivation, levels: dict[str, str]) -> PairResult:
        return decide(problem, derivation, remembered, levels=levels, ambiguities=prepared.ambiguities, seed=seed)

    result = judge(derivation, levels)
    agree = bool(kept) and kept[0] is not None and kept[0].outcome == "agree"
    if wanted is not None and result.verdict == UNKNOWN and agree:
        attempt = Attempt(
            spec.rules, spec.trust, wanted, options.out, deriver.engine, deriver.base, seed, deriver.left, validation
        )  # fmt: skip
        result, derivation = synthesise(problem, derivation, result, attempt, judge)
    return result, derivation


def sources(spec: PairSpec) -> dict[str, str]:
    """Where the pair came from, for ``emerge replay``."""
    named = {"case": spec.case, "reference": spec.reference, "implementation": spec.implementation}
    return {key: _source_text(source) for key, source in named.items() if source is not None}


def _source_text(source: Path | SourceSpec | list[Graph]) -> str:
    if isinstance(source, Path):
        return str(source.resolve())
    return describe(source) if isinstance(source, SourceSpec) else ", ".join(g.name for g in source)


def _fail_on(result: PairResult, spec: PairSpec) -> None:
    """A pair's own ``fail_on`` turns these findings into failures of this pair."""
    for finding in result.findings:
        if finding.kind in spec.fail_on:
            result.failed_on.append(finding.kind)


def _describe(result: PairResult, prepared: Prepared) -> None:
    """What the report says about the pair whatever its verdict."""
    result.mesh = dict(prepared.problem.mesh.axes)
    result.input_relations = prepared.input_relations
    result.outputs_not_claimed = prepared.outputs_not_claimed
    result.unmatched = prepared.unmatched
    result.stats = prepared.stats | result.stats
    reference, implementation = prepared.problem.reference.graphs, prepared.problem.implementation.graphs
    for entry in (e for g in (*reference, *implementation) for e in g.extra.get("substitutions") or ()):
        if entry not in result.substitutions:
            result.substitutions.append(entry)
    result.findings += weight_findings(reference, implementation)
    named = prepared.problem.reference.graphs[0]
    labels = dict(zip(named.outputs, named.extra.get("output_labels") or []))
    for output in result.outputs:
        output.label = labels.get(output.reference)
    for problem in prepared.graph_problems:
        result.findings.append(
            Finding("RANKS_DISAGREE", "note" if result.verdict == "EQUIVALENT" else "warning", problem)
        )


def execution_refuter(
    seed: int, memory_gb: float | None, left: Callable[[], float | None], rules: Sequence[Path] = (),
    device: str = "auto",
) -> Refuter:  # fmt: skip
    """Refutation by execution; torch is imported when it is first needed.

    Args:
        rules: rule files whose ``operator_definition`` facts say what their operators compute.
        device: ``auto``, ``cpu`` or ``cuda``.
    """

    def refute(problem: Problem, derivation: Derivation) -> RefutationResult:
        try:
            from emerge.execute.refute import refute as run
        except ImportError as e:
            return NotRun(f"execution is not available ({e})")
        empty = next(
            (
                g.name
                for side in (problem.reference, problem.implementation)
                for g in side.graphs
                for t in map(g.types().get, [*(i.name for i in g.inputs), *(o for o in g.outputs if o)])
                if t is not None and 0 in t.shape
            ),
            None,
        )
        if empty is not None:
            return NotRun(f"{empty} has an input or output without elements, which is not executed")
        from emerge.execute.ops.defined import register
        from emerge.kernels.registry import definitions

        register(definitions(rules))
        if rules:
            from emerge.relate.derive import load_program
            from emerge.rules.operators import register_definitions

            register_definitions(load_program(tuple(rules)).clauses)
        limits: dict[str, Any] = {} if memory_gb is None else {"memory_bytes": int(memory_gb * 2**30)}
        seconds = left()
        if seconds is not None:
            limits["seconds"] = seconds
        return run(problem, derivation, seed=seed, device=device, **limits)

    return refute


def _timed(refuter: Refuter, into: dict[str, float]) -> Refuter:
    def run(problem: Problem, derivation: Derivation) -> RefutationResult | None:
        started = time.perf_counter()
        try:
            return refuter(problem, derivation)
        finally:
            into["execution"] = time.perf_counter() - started

    return run
