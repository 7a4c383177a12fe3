"""Synthesis of rules for one pair: look for rules and derive again with them, until all is proved or nothing new is found."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from emerge.algebra.rulefile import LANGUAGE, rules_of
from emerge.algebra.saturate import available, rule_files
from emerge.campaign.admission import law_levels
from emerge.campaign.config import SynthesisSpec
from emerge.relate.derive import Derivation, Problem, derive
from emerge.rules.equalities import VALIDATION, Validation
from emerge.util.errors import BudgetExceeded
from emerge.util.resources import resource_dir
from emerge.verdict.types import EQUIVALENT, Finding, PairResult

#: Rounds at most; each new rule makes tensors comparable that lie behind it.
MOST_ROUNDS = 12
#: So many refused proposals are shown.
MOST_SHOWN = 3
CONFIRMED = "it was confirmed on values of other tensors of the pair"

if TYPE_CHECKING:
    from emerge.synthesis.api import Synthesiser
    from emerge.synthesis.store import Store

Judge = Callable[[Derivation, dict[str, str]], PairResult]


@dataclass(frozen=True)
class Attempt:
    """How rules are looked for.

    Attributes:
        rules, trust, validation: of the pair. out: output directory, None = nowhere.
        left: seconds that are left of the pair's budget, None = no limit.
    """

    rules: Sequence[Path]
    trust: Sequence[str]
    wanted: SynthesisSpec
    out: Path | None
    engine: str
    base: str
    seed: int
    left: Callable[[], float | None]
    validation: Validation = VALIDATION


def synthesise(
    problem: Problem, derivation: Derivation, before: PairResult, attempt: Attempt, judge: Judge
) -> tuple[PairResult, Derivation]:
    """The result with synthesised rules, and the derivation behind it.

    Args:
        before: the result without them.
    """
    if not available():
        before.findings.append(_note("rules are synthesised for the algebra, which needs the package egglog; install it"))
        return before, derivation
    from emerge.rules.api import equality_rules
    from emerge.synthesis.api import Synthesiser
    from emerge.synthesis.store import Store

    spent = 0.0
    rules: list[str] = []
    refused: list[tuple[str, str]] = []
    stopped = ""
    result, current = before, derivation
    with tempfile.TemporaryDirectory() as private:
        # this pair's own rules are used; the folder may be shared with other pairs that run at the same time
        own = Store(Path(private))
        folder = attempt.wanted.folder or (attempt.out / "rules" if attempt.out is not None else None)
        language = resource_dir("rules") / LANGUAGE
        files = rule_files(tuple(attempt.rules), attempt.base)
        loaded = [r for f in files if f != language for r in rules_of(f)]
        found = Synthesiser(
            own, equality_rules(attempt.rules), attempt.wanted.seconds, attempt.seed, loaded, attempt.validation,
            attempt.left, files,
        )
        trial = _Trial(problem, attempt, own, judge)
        for _ in range(MOST_ROUNDS):
            started = time.perf_counter()
            one = found.round(trial.problem, current)
            spent += time.perf_counter() - started
            rules += one.rules
            refused += one.refused
            stopped = one.stopped
            if not one.rules:
                break
            try:
                result, current = trial.again(current)
            except BudgetExceeded as exc:
                stopped = exc.message
                break
            if result.verdict == EQUIVALENT or found.out_of_time():
                break
        notes: list[Finding] = []
        if result.verdict == EQUIVALENT:
            started = time.perf_counter()
            try:
                rules, result, current, notes = _settled(found, trial, rules, result, current)
            except BudgetExceeded as exc:
                # rules that were not seen at a second place carry no verdict
                result, current, stopped = before, derivation, exc.message
                rules = [r for r in rules if r in own.names()]
            spent += time.perf_counter() - started
        if folder is not None:
            own.copy(Store(folder), rules)
    result.rules_synthesised = rules
    result.seconds["synthesis"] = spent
    result.findings += notes
    if result.verdict != EQUIVALENT:
        result.findings.append(_note(_account(rules, refused, stopped)))
    return result, current


class _Trial:
    """Derives a pair with some of the synthesised rules."""

    def __init__(self, problem: Problem, attempt: Attempt, own: Store, judge: Judge) -> None:
        self.problem, self.attempt, self.own, self.judge = problem, attempt, own, judge

    def again(self, before: Derivation) -> tuple[PairResult, Derivation]:
        """The result with the rules of the store.

        Raises:
            BudgetExceeded: the pair's time is spent.
        """
        levels = law_levels([*self.attempt.rules, self.own.path], self.attempt.trust)
        from emerge.execute.equal_constants import with_constants

        found = self.derive(self.own.path, True)
        if len(found.proved()) < len(found.claims):
            # new alignments show constants of both sides that meet
            more = with_constants(self.problem, found)
            if more is not None:
                known = tuple({**old, **new} for old, new in zip(self.problem.executed, more.executed))
                more = replace(more, executed=(known[0], known[1]))
            if more is not None and _given(more) != _given(self.problem):
                self.problem = more
                found = self.derive(self.own.path, True)
        found.seconds = {k: v + before.seconds.get(k, 0.0) for k, v in found.seconds.items()}
        return self.judge(found, levels), found

    def proves(self, rules: Sequence[str]) -> bool:
        """Whether some of the rules are enough."""
        from emerge.synthesis.store import Store

        with tempfile.TemporaryDirectory() as folder:
            part = Store(Path(folder))
            self.own.copy(part, rules)
            found = self.derive(part.path, False)
        return len(found.proved()) == len(found.claims)

    def derive(self, rules: Path, log: bool) -> Derivation:
        """The derivation with one file of synthesised rules."""
        files = (*self.attempt.rules, *([rules] if rules.exists() else []))
        return derive(
            self.problem, engine=self.attempt.engine, rules=files, log=log, timeout=self.attempt.left(),
            start_with_algebra=True, base_rules=self.attempt.base,
        )  # fmt: skip


def _given(problem: Problem) -> tuple[object, ...]:
    return problem.inputs, problem.causal_masks, problem.executed


def _settled(
    found: Synthesiser, trial: _Trial, rules: list[str], result: PairResult, current: Derivation
) -> tuple[list[str], PairResult, Derivation, list[Finding]]:
    """The rules that the proof needs, each seen at a second place, with the result that rests on them.

    A rule that matches at one place of the pair is confirmed on other tensors of the pair, or the proof must do without it.
    """
    fired = _matches(current)
    kept = [r for r in rules if fired.get(r, 0)]
    for rule in sorted(kept, key=lambda r: (fired[r] > 1, -found.size(r))):
        if len(kept) == 1 or found.out_of_time():
            break
        fewer = [r for r in kept if r != rule]
        if trial.proves(fewer):
            kept = fewer
    notes: list[Finding] = []
    if kept != rules:
        trial.own.keep(kept)
        result, current = trial.again(current)
    fired = _matches(current)
    for rule in [r for r in kept if fired.get(r, 0) < 2]:
        reason = found.confirm(rule)
        notes.append(_note(f"the synthesised rule '{rule}' matches at one place of this pair only; {reason or CONFIRMED}"))
        if reason:
            kept = [r for r in kept if r != rule]
    if len(kept) < len(trial.own.names()):
        trial.own.keep(kept)
        result, current = trial.again(current)
    return kept, result, current, notes


def _matches(derivation: Derivation) -> dict[str, int]:
    """At how many places every rule of the algebra matched."""
    fired: dict[str, int] = {}
    for low in (derivation.reference, derivation.implementation):
        for rule, matches in (low.extension.fired if low.extension is not None else {}).items():
            fired[rule] = fired.get(rule, 0) + matches
    return fired


def _note(message: str) -> Finding:
    return Finding("SYNTHESIS", "note", message)


def _account(rules: Sequence[str], refused: Sequence[tuple[str, str]], stopped: str) -> str:
    """Why synthesis did not reach the claims."""
    parts = [f"{len(rules)} rules were synthesised and do not suffice" if rules else "no rule was found"]
    shown = [f"'{meaning}' is refused: it {reason}" for meaning, reason in refused[:MOST_SHOWN]]
    if len(refused) > MOST_SHOWN:
        shown.append(f"{len(refused) - MOST_SHOWN} more proposals are refused")
    return "; ".join([*parts, *shown, *([stopped] if stopped else [])])
