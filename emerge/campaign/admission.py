"""Which laws a pair may use: every clause a user's file adds to the shipped relations, and every rule it adds to the algebra,
needs a certificate or trust."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from emerge.algebra.rulefile import egg_files, rules_of
from emerge.relate.derive import load_program
from emerge.util.errors import RuleError

#: Relations of the shipped programs that a user may add to freely: they describe findings and prove nothing.
FREE_RELATIONS = frozenset({"diagnosis"})


def law_levels(rules: Sequence[Path], trust: Sequence[str]) -> dict[str, str]:
    """Law -> evidence of its certificate; trusted laws are ``assumed``.

    Args:
        rules: rule files of the user.
        trust: laws admitted without a certificate, by name.
    Raises:
        RuleError: a user's law without a name, without a certificate and not trusted, or one that was refused;
            a trusted name that no rule file has.
    """
    levels = _certified(rules, trust)
    if not rules:
        if trust:
            raise RuleError(f"'trust' names {trust[0]!r}, but no rule files are given; drop it, or add 'rules'")
        return levels
    files = {p.resolve() for p in rules}
    shipped = load_program().relations
    program = load_program(tuple(rules))
    names = {rule.name for path in egg_files(rules) for rule in rules_of(path)}
    for clause in program.clauses:
        if Path(clause.pos.file).resolve() not in files:
            continue
        if clause.law is not None:
            names.add(clause.law)
        if clause.head.name not in shipped or clause.head.name in FREE_RELATIONS:
            continue
        if clause.law is None:
            raise RuleError(
                f"a clause adds to the shipped relation '{clause.head.name}' without a name; "
                "write '// @law name' above it",
                str(clause.pos),
            )
        if clause.law in trust:
            levels[clause.law] = "assumed"
        elif clause.law not in levels:
            raise RuleError(
                f"the law '{clause.law}' has no certificate; check it with 'emerge rules check', "
                "or name it under 'trust'",
                str(clause.pos),
            )
    unknown = [t for t in trust if t not in names]
    if unknown:
        raise RuleError(
            f"'trust' names {unknown[0]!r}, which is no law of the rule files; known are {', '.join(sorted(names))}"
        )
    return levels


def _certified(rules: Sequence[Path], trust: Sequence[str]) -> dict[str, str]:
    """Evidence from the certificates, as far as this installation can check them (``emerge.rules.api.admit``)."""
    try:
        api = import_module("emerge.rules.api")
    except ImportError:
        return {}
    admit: Any = getattr(api, "admit", None)
    return {} if admit is None else dict(admit(list(rules), list(trust)))
