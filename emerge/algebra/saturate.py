"""Runs the rules of the algebra on the terms of one side and reads the classes of equal terms."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import lru_cache
from pathlib import Path
from typing import Any

from emerge.algebra.rulefile import LANGUAGE, egg_files, rules_of, shipped_files
from emerge.util.resources import resource_dir

#: Commands are parsed in pieces: one call needs memory quadratic in its text.
COMMANDS_PER_CALL = 200


@dataclass(frozen=True)
class Budget:
    """Limits of one saturation.

    Attributes:
        rounds: rounds of rules. growth: terms at most, as a multiple of those of the graph.
        seconds: wall-clock limit, looked at between rounds.
    """

    rounds: int = 20
    growth: int = 40
    seconds: float = 20.0


@dataclass(frozen=True)
class Node:
    """One term: its constructor and its arguments (a class for a tensor, else a Python value)."""

    op: str
    args: tuple[Any, ...]


@dataclass(frozen=True)
class Class:
    """A class of equal tensors, by number."""

    id: int


@dataclass
class Classes:
    """What a saturation found.

    Attributes:
        nodes: class -> its terms. named: global variable -> class. fired: rule -> number of matches.
        shapes: class -> its shape, where asked for.
        rounds, terms: how far it got; ``stopped`` says why it ended early, "" when nothing was left to do.
    """

    nodes: dict[int, list[Node]] = field(default_factory=dict)
    named: dict[str, int] = field(default_factory=dict)
    shapes: dict[int, tuple[int, ...]] = field(default_factory=dict)
    fired: dict[str, int] = field(default_factory=dict)
    rounds: int = 0
    terms: int = 0
    stopped: str = ""
    seconds: float = 0.0


#: Shipped rule files of the minimal base: how slices, concatenations and rearrangements move, and no algebra of functions.
MINIMAL = ("layout.egg", "views.egg")
BASES = ("full", "minimal")


@lru_cache(maxsize=8)
def rule_files(extra: tuple[Path, ...] = (), base: str = "full") -> tuple[Path, ...]:
    """The language, the shipped rules (``minimal``: those of :data:`MINIMAL`) and those of the user, in reading order."""
    shipped = [p for p in shipped_files() if base == "full" or p.name in MINIMAL]
    return (resource_dir("rules") / LANGUAGE, *shipped, *egg_files(extra))


def available() -> bool:
    """Whether egglog can be imported."""
    from importlib.util import find_spec

    return find_spec("egglog") is not None


def load(files: Sequence[Path], only: Collection[str] | None = None) -> Any:
    """An e-graph with the rules of ``files``; all but the language hold rules only.

    Args:
        only: names of the rules wanted, None = all.

    Raises:
        RuleError: a file does not parse, or holds something that is no rule, with its place.
    """
    from egglog.bindings import EGraph

    graph = EGraph()
    for path in files:
        if path == resource_dir("rules") / LANGUAGE:
            graph.run_program(*graph.parse_program(path.read_text(encoding="utf-8"), path.name))
            continue
        for rule in rules_of(path):
            if only is not None and rule.name not in only:
                continue
            graph.run_program(*graph.parse_program(rule.text, path.name))
    return graph


def saturate(
    commands: Iterable[str], files: Sequence[Path], budget: Budget = Budget(), only: Collection[str] | None = None
) -> Classes:
    """Defines the terms of ``commands`` and applies the rules (``only`` those named) until nothing changes or the budget is
    spent."""
    from egglog.bindings import EggSmolError

    started = time.perf_counter()
    graph = load(files, only)
    rules = {rule.name for path in files if path != resource_dir("rules") / LANGUAGE for rule in rules_of(path)}
    lines = list(commands)
    for k in range(0, len(lines), COMMANDS_PER_CALL):
        graph.run_program(*graph.parse_program("\n".join(lines[k : k + COMMANDS_PER_CALL])))
    found = Classes()
    step = graph.parse_program("(run-schedule (seq (saturate shapes) (run algebra) (saturate shapes)))")
    most = max(2000, budget.growth * len(lines) // 2)
    while True:
        if found.rounds >= budget.rounds:
            found.stopped = f"{budget.rounds} rounds"
            break
        if time.perf_counter() - started > budget.seconds:
            found.stopped = f"{budget.seconds:g} s"
            break
        try:
            (out,) = graph.run_program(*step)
        except EggSmolError as exc:
            # a right side without a value: nothing of this round is used
            return Classes(stopped=f"a rule that failed: {' '.join(str(exc).split())}", rounds=found.rounds,
                           seconds=time.perf_counter() - started)  # fmt: skip
        report = out.report
        for side, count in report.num_matches_per_rule.items():
            rule = side.removesuffix("=>").removesuffix("<=")  # a birewrite is two rules
            if rule in rules:  # not those of the language, which only say shapes
                found.fired[rule] = found.fired.get(rule, 0) + count
        found.rounds += 1
        changed = any(r.rule_set_report.changed for r in report.iterations)
        found.terms = _size(graph)
        if not changed:
            break
        if found.terms > most:
            found.stopped = f"{most} terms"
            break
    read(graph, found)
    found.seconds = time.perf_counter() - started
    return found


def _size(graph: Any) -> int:
    return sum(
        len(f.rows) for f in graph.freeze().functions.values() if f.output_sort == "Value" and not f.is_let_binding
    )


def read(graph: Any, found: Classes, shapes: bool = False) -> None:
    """Writes the classes of an e-graph into ``found``."""
    numbers: dict[Any, int] = {}

    def number(value: Any) -> int:
        return numbers.setdefault(value, len(numbers))

    def decode(value: Any, sort: str) -> Any:
        if sort == "Value":
            return Class(number(value))
        if sort == "i64":
            return graph.value_to_i64(value)
        if sort == "String":
            return graph.value_to_string(value)
        if sort == "BigRat":
            return Fraction(graph.value_to_bigrat(value))
        return tuple(graph.value_to_i64(v) for v in graph.value_to_vec(value))

    for name, function in graph.freeze().functions.items():
        if function.output_sort != "Value":
            if shapes and name == "shape":
                for row in function.rows:
                    found.shapes[number(row.inputs[0])] = decode(row.output, "Dims")
            continue
        for row in function.rows:
            target = number(row.output)
            if function.is_let_binding:
                found.named[name] = target
            else:
                args = tuple(decode(v, s) for v, s in zip(row.inputs, function.input_sorts))
                found.nodes.setdefault(target, []).append(Node(name, args))
