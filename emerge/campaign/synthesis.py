"""Synthesis of rules for one pair: look for rules and derive again with them, until all is proved or nothing new is found."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from emerge.algebra.rulefile import LANGUAGE, rules_of
from emerge.algebra.saturate import available, rule_files
from emerge.campaign.admission import law_levels
from emerge.campaign.config import SynthesisSpec
from emerge.relate.derive import Derivation, Problem, derive
from emerge.util.errors import BudgetExceeded
from emerge.util.resources import resource_dir
from emerge.verdict.types import EQUIVALENT, Finding, PairResult

#: Rounds at most; each new rule makes tensors comparable that lie behind it.
MOST_ROUNDS = 12
#: So many refused proposals are shown.
MOST_SHOWN = 3

Judge = Callable[[Derivation, dict[str, str]], PairResult]


@dataclass(frozen=True)
class Attempt:
    """How rules are looked for.

    Attributes:
        rules, trust: of the pair. out: output directory, None = nowhere.
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
    left = attempt.left()
    seconds = attempt.wanted.seconds if left is None else min(attempt.wanted.seconds, left)
    rules: list[str] = []
    refused: list[tuple[str, str]] = []
    stopped = ""
    result, current = before, derivation
    with tempfile.TemporaryDirectory() as private:
        # this pair's own rules are used; the folder may be shared with other pairs that run at the same time
        own = Store(Path(private))
        folder = attempt.wanted.folder or (attempt.out / "rules" if attempt.out is not None else None)
        stores = [own] if folder is None else [own, Store(folder)]
        language = resource_dir("rules") / LANGUAGE
        loaded = [r for f in rule_files(tuple(attempt.rules), attempt.base) if f != language for r in rules_of(f)]
        found = Synthesiser(stores, equality_rules(attempt.rules), seconds, attempt.seed, loaded)
        for _ in range(MOST_ROUNDS):
            started = time.perf_counter()
            one = found.round(problem, current)
            spent += time.perf_counter() - started
            rules += one.rules
            refused += one.refused
            stopped = one.stopped
            if not one.rules:
                break
            files = [*attempt.rules, own.path]
            levels = law_levels(files, attempt.trust)
            try:
                again = derive(
                    problem, engine=attempt.engine, rules=tuple(files), log=True, timeout=attempt.left(),
                    start_with_algebra=True, base_rules=attempt.base,
                )  # fmt: skip
            except BudgetExceeded as exc:
                stopped = exc.message
                break
            again.seconds = {k: v + current.seconds.get(k, 0.0) for k, v in again.seconds.items()}
            current = again
            result = judge(current, levels)
            if result.verdict == EQUIVALENT or found.out_of_time():
                break
    result.rules_synthesised = rules
    result.seconds["synthesis"] = spent
    if result.verdict == EQUIVALENT:
        result.findings += _used_once(current, rules)
    else:
        result.findings.append(_note(_account(rules, refused, stopped)))
    return result, current


def _note(message: str) -> Finding:
    return Finding("SYNTHESIS", "note", message)


def _used_once(derivation: Derivation, rules: Sequence[str]) -> list[Finding]:
    """Rules that matched at one place only: nothing says that they are of use elsewhere."""
    fired: dict[str, int] = {}
    for low in (derivation.reference, derivation.implementation):
        for rule, matches in (low.extension.fired if low.extension is not None else {}).items():
            fired[rule] = fired.get(rule, 0) + matches
    return [
        Finding("SYNTHESIS", "note", f"the synthesised rule '{rule}' matches at one place of this pair only")
        for rule in rules
        if fired.get(rule, 0) < 2
    ]


def _account(rules: Sequence[str], refused: Sequence[tuple[str, str]], stopped: str) -> str:
    """Why synthesis did not reach the claims."""
    parts = [f"{len(rules)} rules were synthesised and do not suffice" if rules else "no rule was found"]
    shown = [f"'{meaning}' is refused: it {reason}" for meaning, reason in refused[:MOST_SHOWN]]
    if len(refused) > MOST_SHOWN:
        shown.append(f"{len(refused) - MOST_SHOWN} more proposals are refused")
    return "; ".join([*parts, *shown, *([stopped] if stopped else [])])
