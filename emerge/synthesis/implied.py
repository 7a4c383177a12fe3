"""Whether a rule follows from others: on ground terms that match its left side, they make both sides equal too."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Sequence
from pathlib import Path

from emerge.algebra.encode import dims, free_facts, rational, text
from emerge.algebra.rulefile import CONSTRUCTORS, App, EqualityRule, Lit, Term, Var
from emerge.algebra.saturate import Budget, saturate
from emerge.rules.term_instances import SPECS, Filler, Ground, Retry
from emerge.util.resources import resource_dir

#: Ground terms per rule, and how long the others are applied.
GROUND, BUDGET = 8, Budget(rounds=6, growth=200, seconds=5.0)


def implied(rule: EqualityRule, files: Sequence[Path], seed: int = 0) -> bool:
    """Whether the rules of ``files`` (the language first) say what a rule says.

    Not where its left side cannot be filled, or it has several: then nothing is known.
    """
    if len(rule.patterns) != 1 or len(rule.unions) != 1:
        return False
    pairs, leaves = _ground(rule, seed)
    if not pairs:
        return False
    commands = [f"(set (shape (Leaf {n})) {dims(shape)})" for n, shape in leaves.items()]
    commands += [fact for spec in SPECS for fact in free_facts(spec)]
    for k, (left, right) in enumerate(pairs):
        commands += [f"(let $l{k} {left})", f"(let $r{k} {right})"]
    with tempfile.TemporaryDirectory() as folder:
        alone = Path(folder) / "alone.egg"
        alone.write_text(f"; @meaning {rule.meaning}\n{rule.text}\n", encoding="utf-8")
        says = _equal(commands, [resource_dir("rules") / "language.egg", alone], len(pairs))
    follows = _equal(commands, files, len(pairs)) if any(says) else []
    return any(says) and all(f for s, f in zip(says, follows) if s)


def _equal(commands: Sequence[str], files: Sequence[Path], count: int) -> list[bool]:
    found = saturate(commands, files, BUDGET).named
    return [f"$l{k}" in found and found[f"$l{k}"] == found.get(f"$r{k}") for k in range(count)]


def _ground(rule: EqualityRule, seed: int) -> tuple[list[tuple[str, str]], dict[int, tuple[int, ...]]]:
    """Both sides of a rule on ground terms, and the shapes of their leaves."""
    rng = random.Random(f"{rule.name} implied {seed}")
    pairs: list[tuple[str, str]] = []
    leaves: dict[int, tuple[int, ...]] = {}
    for _ in range(GROUND * 40):
        if len(pairs) >= GROUND:
            break
        filler = Filler(rule, rng, len(leaves), len(pairs))
        try:
            instance = filler.fill()
            _bind(rule, filler)
            right = _text(rule.unions[0][1], filler)
        except (Retry, ValueError):
            continue
        if right is not None:
            pairs.append((instance.terms[0].text, right))
            leaves.update({n: shape for n, (_, shape) in instance.leaves.items()})
    return pairs, leaves


def _bind(rule: EqualityRule, filler: Filler) -> None:
    """Gives values to variables that side conditions define."""
    for c in rule.conditions:
        if isinstance(c, App) and c.op == "=" and len(c.args) == 2:
            for a, b in (c.args, c.args[::-1]):
                if isinstance(a, Var) and a.name not in filler.env:
                    value = filler.compute(b)
                    if value is not None:
                        filler.env[a.name] = value
    for c in rule.conditions:
        if isinstance(c, App) and c.op == "placed" and isinstance(c.args[2], Var) and c.args[2].name not in filler.env:
            ds, k = filler.compute(c.args[0]), filler.compute(c.args[1])
            if ds is not None and k in ds:
                filler.env[c.args[2].name] = ds.index(k)


def _text(term: Term, filler: Filler) -> str | None:
    """A right side as a ground term, None where a part of it has no value."""
    if isinstance(term, App) and term.op in CONSTRUCTORS:
        parts = [_text(a, filler) for a in term.args]
        return None if any(p is None for p in parts) else f"({term.op} {' '.join(p for p in parts if p is not None)})"
    value = filler.compute(term)
    if isinstance(value, Ground):
        return value.text
    if isinstance(value, str):
        return text(value)
    if isinstance(value, tuple):
        return dims(value)
    if isinstance(value, int):
        return str(value)
    return None if value is None or isinstance(term, Lit) else rational(value)
