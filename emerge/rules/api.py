"""What the rest of Emerge asks of the rule base: which laws exist, what admits them, and whether they still hold.

Loading compares hashes only; torch is needed to certify a user's law that is not in the cache, and by
:func:`check_rules`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from emerge.algebra.rulefile import EqualityRule, egg_files, read_rules
from emerge.algebra.saturate import available
from emerge.engine.program import Program
from emerge.kernels.registry import definitions
from emerge.kernels.syntax import Definition
from emerge.relate.derive import load_program
from emerge.rules import certificates, kernels
from emerge.rules.certify import Certificate, Outcome, Refusal, certify
from emerge.rules.equalities import EqualityCertificate, certify_rule
from emerge.rules.laws import Law, check_program, laws_of
from emerge.rules.proofs import WRITTEN
from emerge.util.errors import RuleError

#: Generated pairs for the shipped base, and for one user's laws.
BASE_PAIRS, USER_PAIRS = 400, 60


@dataclass(frozen=True)
class RuleInfo:
    """A law for people.

    Attributes:
        kind: ``clause``, ``kind``, ``operator``, or ``equality`` (a rule of the algebra).
        evidence: ``proved``, ``tested``, ``none``, or ``stale`` (its text has changed).
        facts: its instances behind true facts when it was certified; for an equality, the terms it matched.
    """

    name: str
    meaning: str
    kind: str
    place: str
    evidence: str
    facts: int = 0
    pairs: int = 0
    meshes: int = 0

    def __str__(self) -> str:
        what = "terms" if self.kind == "equality" else "facts"
        return f"{self.name:36} {self.evidence:7} {self.facts:7} {what}  {self.meaning}"


class CheckReport(NamedTuple):
    """Lines for people, and whether every law passed."""

    lines: list[str]
    passed: bool


def rule_files(paths: Iterable[Path | str]) -> tuple[Path, ...]:
    """The ``.dl`` files among files and folders."""
    out: list[Path] = []
    for path in map(Path, paths):
        out += sorted(path.rglob("*.dl")) if path.is_dir() else [path] if path.suffix == ".dl" else []
    return tuple(out)


@lru_cache(maxsize=8)
def _loaded(files: tuple[Path, ...]) -> tuple[Program, dict[str, Law]]:
    program = load_program(files)
    check_program(program)
    return program, laws_of(program)


def equality_rules(extra: Sequence[Path | str] = (), laws: Iterable[str] = ()) -> dict[str, EqualityRule]:
    """The rules of the algebra, shipped and of further files.

    Raises:
        RuleError: a file holds something else, or a rule has the name of a law.
    """
    files = egg_files(extra)
    if not available():  # the algebra does not run, so nothing rests on its rules
        if files:
            raise RuleError("rules of the algebra need the package egglog; install it", str(files[0]))
        return {}
    found = read_rules(files)
    known = set(laws)
    for rule in found.values():
        if rule.name in known:
            raise RuleError(f"the rule '{rule.name}' has the name of a law; give it another one", rule.place)
    return found


def _equality(rule: EqualityRule, shipped: dict[str, EqualityCertificate]) -> EqualityCertificate | None:
    found = shipped.get(rule.name) if rule.shipped else certificates.read_cached_equality(rule.hash)
    return found if found is not None and found.hash == rule.hash else None


def _certificate(law: Law, shipped: dict[str, Certificate]) -> Certificate | None:
    found = shipped.get(law.name) if law.shipped else certificates.read_cached(law.hash)
    return found if found is not None and found.hash == law.hash else None


def list_rules(extra: Sequence[Path | str] = ()) -> list[RuleInfo]:
    """All laws with their evidence, in the order of the files.

    Raises:
        RuleError: a rule file is malformed or breaks a static condition.
    """
    _, laws = _loaded(rule_files(extra))
    shipped = certificates.read_shipped()
    out = []
    for law in laws.values():
        found = _certificate(law, shipped)
        stale = found is None and law.shipped and law.name in shipped
        evidence = found.evidence if found else "stale" if stale else "none"
        counts = (found.facts, found.pairs, found.meshes) if found else (0, 0, 0)
        out.append(RuleInfo(law.name, law.meaning, law.kind, law.place, evidence, *counts))
    checked = kernels.read_shipped()
    for definition in kernels.all_definitions(definitions(extra)):
        standing = kernels.standing(definition, checked)
        stale = standing is None and definition.name in checked
        evidence = standing.evidence if standing else "stale" if stale else "none"
        samples = standing.samples if standing else 0
        out.append(RuleInfo(definition.name, definition.meaning, "kernel", definition.place, evidence, samples))
    equalities = certificates.read_shipped_equalities()
    for rule in equality_rules(extra, laws).values():
        made = _equality(rule, equalities)
        evidence = made.evidence if made else "stale" if rule.shipped and rule.name in equalities else "none"
        out.append(RuleInfo(rule.name, rule.meaning, "equality", rule.place, evidence, made.instances if made else 0))
    return out


def show_rule(name: str, extra: Sequence[Path | str] = ()) -> str:
    """A law: meaning, place, clauses and certificate; or a definition of a kernel, by its name or its operator's.

    Raises:
        RuleError: there is no such law.
    """
    _, laws = _loaded(rule_files(extra))
    rules = equality_rules(extra, laws)
    if name in rules:
        return _show_equality(rules[name])
    defined = [d for d in kernels.all_definitions(definitions(extra)) if name in (d.name, d.operator)]
    if name not in laws and defined:
        return "\n".join(map(_show_definition, defined))
    law = _named(laws, [name], rules)[0]
    found = _certificate(law, certificates.read_shipped())
    lines = [law.name, f"  {law.meaning}", f"  at {law.place}"]
    if found is None:
        lines.append("  no certificate for this text; emerge rules check validates it")
    else:
        lines.append(
            f"  {found.evidence}: {found.facts} instances behind true facts on {found.pairs} pairs and "
            f"{found.meshes} meshes, "
            f"seed {found.seed}, torch {found.torch}, {found.device}, {found.dtype}"
        )
        lines += _proof_lines(found)
    return "\n".join([*lines, *(f"    {c}" for c in law.clauses)])


def _proof_lines(found: Certificate) -> list[str]:
    """What symbolic elements say about a law that names an argument."""
    beside = f", {found.outside} facts about operators outside their domain" if found.outside else ""
    if found.evidence == "proved":
        shown = "claims proved with z3" if found.method == WRITTEN else "instances shown on symbolic elements"
        return [f"  argument '{found.method}' (docs/proofs.md); {found.symbolic} {shown}{beside}"]
    return [f"  not proved: {found.open}"] if found.open else []


def _show_definition(definition: Definition) -> str:
    found = kernels.standing(definition, kernels.read_shipped())
    lines = [definition.name, f"  {definition.meaning}"]
    lines += [f"  {line}" for line in definition.contract.splitlines()]
    lines.append(f"  at {definition.place}")
    if found is None:
        lines.append("  not checked in this text; emerge rules check compares it with the kernel")
    elif found.evidence == "tested":
        lines.append(f"  tested: agrees with the kernel on {found.samples} samples, torch {found.torch}")
    else:
        lines.append(f"  untested here: {found.reason}; a verdict that rests on it lists kernel_contract")
    return "\n".join([*lines, *(f"    {line}" for line in definition.text.splitlines())])


def _show_equality(rule: EqualityRule) -> str:
    found = _equality(rule, certificates.read_shipped_equalities())
    lines = [rule.name, f"  {rule.meaning}", f"  at {rule.place}"]
    if found is None:
        lines.append("  no certificate for this text; emerge rules check validates it")
    else:
        how = f" ({found.method})" if found.method else ""
        lines.append(
            f"  {found.evidence}{how}: {found.instances} terms that match, {found.elements} elements compared, "
            f"seed {found.seed}, torch {found.torch}, egglog {found.egglog}, {found.device}, {found.dtype}"
        )
    return "\n".join([*lines, f"    {rule.text}"])


def _named(laws: dict[str, Law], names: Sequence[str], rules: Iterable[str] = ()) -> list[Law]:
    known = {*laws, *rules}
    unknown = [n for n in names if n not in known]
    if unknown:
        raise RuleError(f"there is no law '{unknown[0]}'; known are {', '.join(sorted(known))}")
    return [laws[n] for n in names if n in laws]


def check_rules(
    names: Sequence[str] | None = None,
    extra: Sequence[Path | str] = (),
    *,
    seed: int = 0,
    update: bool = False,
    count: int | None = None,
    device: str = "cpu",
    progress: Callable[[str], None] | None = None,
) -> CheckReport:
    """Validates laws on newly generated pairs.

    Args:
        names: laws to check; None or empty = those of ``extra`` where it has some, else all.
        update: write the certificates of shipped laws that pass, and drop those of laws that fail or are gone.
        count: generated pairs.
    Raises:
        RuleError: an unknown name, or rule files that break a static condition.
    """
    program, laws = _loaded(rule_files(extra))
    rules = equality_rules(extra, laws)
    defined = kernels.all_definitions(definitions(extra))
    chosen = [d for d in defined if d.name in (names or ()) or d.operator in (names or ())]
    rest = [n for n in names or () if not any(n in (d.name, d.operator) for d in chosen)]
    if not names:
        own = {n for n, law in laws.items() if not law.shipped} | {n for n, rule in rules.items() if not rule.shipped}
        own_definitions = [d for d in defined if not d.shipped]
        everything = not extra or not (own or own_definitions)
        some = {*laws, *rules} if everything else own
        chosen = defined if everything else own_definitions
    else:
        some = set(rest)
        _named(laws, rest, rules)
    wanted = [law for n, law in laws.items() if n in some]
    wanted_rules = [r for n, r in rules.items() if n in some]
    lines, passed = _check_definitions(chosen, seed, update)
    more, good = _check_equalities(wanted_rules, rules, seed, update, progress)
    lines, passed = [*more, *lines], passed and good
    if wanted:
        outcome = certify(program, wanted, seed=seed, count=count or BASE_PAIRS, device=device, progress=progress)
        for found in outcome.certificates.values():
            if not laws[found.law].shipped:
                certificates.write_cached(found)
        if update:
            kept = {n: c for n, c in certificates.read_shipped().items() if n in laws and n not in outcome.refusals}
            kept.update({n: c for n, c in outcome.certificates.items() if laws[n].shipped})
            checked = {law.name for law in wanted}
            known = {*laws, *rules}
            false = {n: v for n, v in certificates.read_refuted().items() if n in known and n not in checked}
            false.update(
                {n: (laws[n].hash, r.reason) for n, r in outcome.refusals.items() if r.refuted and laws[n].shipped}
            )
            certificates.write_shipped(kept, false)
        lines = [*_report(wanted, outcome), *lines]
        passed = passed and not outcome.refusals and not outcome.lowering
    return CheckReport(lines, passed)


def _check_definitions(wanted: Sequence[Definition], seed: int, update: bool) -> tuple[list[str], bool]:
    """Checks definitions of kernels; ``update`` keeps the results of the shipped ones."""
    results = [kernels.check_definition(d, seed) for d in wanted]
    lines = []
    for definition, found in zip(wanted, results):
        if found.evidence == "tested":
            lines.append(f"pass  {found.name}: agrees with the kernel on {found.samples} samples")
        elif found.evidence == "assumed":
            lines.append(f"open  {found.name}: untested here, {found.reason}")
        else:
            lines.append(f"FALSE {found.name} ({definition.place}): {found.reason}")
    if wanted:
        tested = sum(r.evidence == "tested" for r in results)
        lines.append(f"{tested} of {len(wanted)} definitions of kernels tested")
    if update and any(d.shipped for d in wanted):
        known = {d.name for d in kernels.all_definitions(definitions())}
        kept = {n: r for n, r in kernels.read_shipped().items() if n in known}
        kept.update({r.name: r for d, r in zip(wanted, results) if d.shipped})
        kernels.write_shipped(kept.values())
    return lines, all(r.evidence != "refuted" for r in results)


def _check_equalities(
    wanted: Sequence[EqualityRule],
    rules: dict[str, EqualityRule],
    seed: int,
    update: bool,
    progress: Callable[[str], None] | None,
) -> tuple[list[str], bool]:
    """Validates rules of the algebra; lines for people, and whether all passed."""
    lines = []
    passed: dict[str, EqualityCertificate] = {}
    false: dict[str, tuple[str, str]] = {}
    for rule in wanted:
        found = certify_rule(rule, seed)
        if isinstance(found, EqualityCertificate):
            passed[rule.name] = found
            lines.append(f"pass  {rule.name}: {found.evidence}, {found.instances} terms, {found.elements} elements")
            if not rule.shipped:
                certificates.write_cached(found)
        else:
            lines.append(f"{'FALSE' if found.refuted else 'open '} {rule.name} ({rule.place}): {found.reason}")
            if found.refuted and rule.shipped:
                false[rule.name] = (rule.hash, found.reason)
        if progress is not None:
            progress(f"{len(lines)} of {len(wanted)} rules of the algebra")
    if update and wanted:
        checked = {r.name for r in wanted}
        kept = {n: c for n, c in certificates.read_shipped_equalities().items() if n in rules and n not in checked}
        kept.update({n: c for n, c in passed.items() if rules[n].shipped})
        refuted = {n: v for n, v in certificates.read_refuted().items() if n not in checked} | false
        certificates.write_shipped(certificates.read_shipped(), refuted, equalities=kept)
    if wanted:
        lines.append(f"{len(passed)} of {len(wanted)} rules of the algebra pass")
    return lines, len(passed) == len(wanted)


def _report(laws: list[Law], outcome: Outcome) -> list[str]:
    lines = []
    for law in laws:
        if law.name in outcome.certificates:
            found = outcome.certificates[law.name]
            counts = f"{found.facts} instances behind true facts, {found.pairs} pairs, {found.meshes} meshes"
            lines.append(f"pass  {law.name}: {found.evidence}, {counts}")
            lines += [f"    {line}" for line in _proof_lines(found)]
        else:
            refusal = outcome.refusals[law.name]
            word = "FALSE" if refusal.refuted else "open "
            lines.append(f"{word} {law.name} ({law.place}): {refusal.reason}")
    lines += [f"FALSE lowering: {text}" for text in outcome.lowering[:10]]
    if len(outcome.lowering) > 10:
        lines.append(f"      and {len(outcome.lowering) - 10} more values that their lowering does not compute")
    lines.append(
        f"{len(outcome.certificates)} of {len(laws)} laws pass; {outcome.facts} facts on {outcome.examined} pairs, "
        f"{outcome.skipped} pairs could not be executed"
    )
    return lines


def admit(extra: Sequence[Path | str] = (), trust: Sequence[str] = ()) -> dict[str, str]:
    """Law -> evidence (``proved``, ``tested``, ``assumed``) of every law that may be used.

    Args:
        extra: rule files and folders of a user; their laws are certified now unless the cache has them.
        trust: laws admitted with evidence ``assumed`` although they cannot be validated.
    Raises:
        RuleError: a law without a certificate, a refuted law (trusted or not), or a trusted name that no law has.
    """
    program, laws = _loaded(rule_files(extra))
    rules = equality_rules(extra, laws)
    unknown = [t for t in trust if t not in laws and t not in rules]
    if unknown:
        raise RuleError(
            f"'trust' names {unknown[0]!r}, which is no law; known are {', '.join(sorted({*laws, *rules}))}"
        )
    shipped, refuted = certificates.read_shipped(), certificates.read_refuted()
    levels = _admit_equalities(rules, trust, refuted)
    open_laws: list[Law] = []
    for law in laws.values():
        found = _certificate(law, shipped)
        if found is not None:
            levels[law.name] = found.evidence
        elif law.shipped:
            levels[law.name] = _uncertified(law, law.name in shipped, refuted, trust)
        else:
            open_laws.append(law)
    levels.update(kernels.admit_definitions(definitions(extra)))
    if open_laws:
        outcome = certify(program, open_laws, count=USER_PAIRS)
        for law in open_laws:
            levels[law.name] = _decide(law, outcome, trust)
    return levels


def _uncertified(
    law: Law | EqualityRule, stale: bool, refuted: dict[str, tuple[str, str]], trust: Sequence[str]
) -> str:
    """Evidence of a shipped law or rule without a certificate: ``assumed`` where it is trusted."""
    if refuted.get(law.name, ("", ""))[0] == law.hash:
        raise RuleError(
            f"the shipped law '{law.name}' was found false: it {_sentence(refuted[law.name][1])}", law.place
        )
    if law.name in trust:
        return "assumed"
    changed = "has changed since it was certified" if stale else "has no certificate"
    raise RuleError(f"the shipped law '{law.name}' {changed}; run emerge rules check --update after review", law.place)


def _admit_equalities(
    rules: dict[str, EqualityRule], trust: Sequence[str], refuted: dict[str, tuple[str, str]]
) -> dict[str, str]:
    """Rule of the algebra -> evidence; a user's rule without a certificate is certified now."""
    shipped = certificates.read_shipped_equalities()
    levels: dict[str, str] = {}
    for rule in rules.values():
        found = _equality(rule, shipped)
        if found is None and rule.shipped:
            levels[rule.name] = _uncertified(rule, rule.name in shipped, refuted, trust)
            continue
        made: EqualityCertificate | Refusal = certify_rule(rule) if found is None else found
        if isinstance(made, EqualityCertificate):
            if found is None:
                certificates.write_cached(made)
            levels[rule.name] = made.evidence
        elif made.refuted:
            raise RuleError(f"the rule '{rule.name}' is refused: it {made.reason}", rule.place)
        elif rule.name in trust:
            levels[rule.name] = "assumed"
        else:
            raise RuleError(
                f"the rule '{rule.name}' cannot be validated: {made.reason}; name it under 'trust' to use it as an "
                "assumption",
                rule.place,
            )
    return levels


def _decide(law: Law, outcome: Outcome, trust: Sequence[str]) -> str:
    found = outcome.certificates.get(law.name)
    if found is not None:
        certificates.write_cached(found)
        return found.evidence
    refusal: Refusal = outcome.refusals[law.name]
    if refusal.refuted:
        raise RuleError(f"the law '{law.name}' is refused: it {_sentence(refusal.reason)}", law.place)
    if law.name in trust:
        return "assumed"
    raise RuleError(
        f"the law '{law.name}' cannot be validated: {refusal.reason}; name it under 'trust' to use it as an assumption",
        law.place,
    )


def _sentence(reason: str) -> str:
    verbs = ("derives", "makes", "gives", "stops", "is false")
    return reason if reason.startswith(verbs) else f"fails: {reason}"
