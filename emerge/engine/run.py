"""Runs a Datalog program on either engine.

``souffle`` is an installed binary, ``embedded`` the grounder of the clingo package; both give identical relations.
"""

from __future__ import annotations

import pickle
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import emerge
from emerge.engine import embedded, souffle
from emerge.engine.derivation import DerivationLog
from emerge.engine.program import Program
from emerge.engine.syntax import Clause, RelationDecl
from emerge.util.errors import BudgetExceeded, EngineError, InputError

__all__ = ["Clause", "Program", "RelationDecl", "Result", "available_engines", "run"]

ENGINES = ("auto", "embedded", "souffle")
#: With fewer facts the embedded engine is done before souffle has read the program (benchmarks/README.md).
FEW_FACTS = 100_000


@dataclass(slots=True)
class Result:
    """What a run derived.

    Attributes:
        relations: the wanted relations, given facts among them. Numbers are ``int``, symbols ``str``, records tuples,
            ``nil`` None.
        engine: ``embedded`` or ``souffle``.
        version: e.g. ``clingo 5.8.0``.
        seconds: wall clock of the whole run, translation and reading included.
        log: derivation log, when asked for.
    """

    relations: dict[str, set[tuple[Any, ...]]] = field(default_factory=dict)
    engine: str = ""
    version: str = ""
    seconds: float = 0.0
    log: DerivationLog | None = None


def available_engines() -> dict[str, str]:
    """Engines that work here -> their version."""
    found = {"embedded": embedded.version(), "souffle": souffle.version()}
    return {name: version for name, version in found.items() if version}


def run(
    program: Program,
    facts: Mapping[str, Iterable[tuple[Any, ...]]],
    outputs: Iterable[str],
    engine: str = "auto",
    log: bool = False,
    timeout: float | None = None,
) -> Result:
    """Evaluate ``program`` on ``facts`` and read ``outputs`` back.

    Args:
        program: rules; ``.input`` and ``.output`` lines in it have no effect here.
        facts: relation -> rows; numbers ``int`` (32 bit), symbols ``str``, records tuples, ``nil`` None. A relation
            may have both facts and clauses.
        outputs: relations to read back; reading costs about as much as deriving, so name only what is needed.
        engine: ``auto`` is souffle where it works and there are many facts, else embedded.
        log: also record the instances of ``program.derivation_rules``.
        timeout: seconds. With the embedded engine it costs a process of its own (about 0.1 s), since the grounder
            cannot be interrupted.

    Raises:
        InputError: unknown engine or relation, or a fact of the wrong arity or type.
        EngineError: the engine is missing or failed.
        BudgetExceeded: the time limit was reached.
    """
    started = time.perf_counter()
    wanted = list(dict.fromkeys(outputs))
    for relation in wanted:
        if relation not in program.relations:
            raise InputError(f"the output relation '{relation}' is not declared; known are: {_known(program)}")
    given = _checked_facts(program, facts)
    name, version = _choose(engine, sum(map(len, given.values())))
    logs = program.derivation_rules if log else ()
    if name == "souffle":
        raw = souffle.evaluate(program, given, wanted, logs, timeout)
    else:
        job, predicates = embedded.translate(program, given, wanted, logs)
        by_predicate = embedded.evaluate(job) if timeout is None else _evaluate_apart(job, timeout)
        raw = {relation: by_predicate[predicate] for relation, predicate in predicates.items()}
    result = Result({relation: set(raw[relation]) for relation in wanted}, name, version)
    if log:
        result.log = DerivationLog(program, logs, {r.name: raw.get(r.name, [()]) for r in logs}, given)
    result.seconds = time.perf_counter() - started
    return result


def _choose(engine: str, facts: int = FEW_FACTS) -> tuple[str, str]:
    if engine not in ENGINES:
        raise InputError(f"unknown Datalog engine '{engine}'; expected one of {', '.join(ENGINES)}")
    small = engine == "auto" and facts < FEW_FACTS and bool(embedded.version())
    if engine != "embedded" and not small:
        version = souffle.version()
        if version:
            return "souffle", version
        if engine == "souffle":
            raise EngineError("no working souffle is on PATH; install version 2.3 or later, or use the embedded engine")
    version = embedded.version()
    if not version:
        raise EngineError("the package clingo is not installed; install it with: pip install 'clingo>=5.7,<6'")
    return "embedded", version


def _known(program: Program) -> str:
    return ", ".join(sorted(program.relations))


def _checked_facts(
    program: Program, facts: Mapping[str, Iterable[tuple[Any, ...]]]
) -> dict[str, list[tuple[Any, ...]]]:
    given: dict[str, list[tuple[Any, ...]]] = {}
    for relation, rows in facts.items():
        if relation not in program.relations:
            raise InputError(
                f"facts are given for the relation '{relation}', which is not declared; known are: {_known(program)}"
            )
        given[relation] = list(rows)
        problem = program.check_facts(relation, given[relation])
        if problem:
            raise InputError(problem, f"fact of '{relation}' (declared at {program.relations[relation].pos})")
    return given


def _evaluate_apart(job: embedded.Job, timeout: float) -> dict[str, list[tuple[Any, ...]]]:
    """Evaluate in a process that can be stopped."""
    root = str(Path(emerge.__file__).resolve().parent.parent)
    code = f"import sys; sys.path.insert(0, {root!r}); from emerge.engine.worker import main; main()"
    try:
        payload = pickle.dumps(job)
    except RecursionError:
        raise EngineError("a record in the facts is nested too deeply for a run with a time limit") from None
    try:
        done = subprocess.run([sys.executable, "-c", code], input=payload, capture_output=True, timeout=timeout)
    except subprocess.TimeoutExpired:
        raise BudgetExceeded(f"the Datalog run reached its limit of {timeout:g} seconds (engine embedded)") from None
    if done.returncode != 0:
        tail = done.stderr.decode(errors="replace").strip().splitlines()[-3:]
        raise EngineError(
            f"the embedded Datalog engine ended with status {done.returncode}: {' | '.join(tail) or 'no message'}"
        )
    reply: tuple[dict[str, list[tuple[Any, ...]]], str] = pickle.loads(done.stdout)
    rows, error = reply
    if error:
        raise EngineError(error)
    return rows
