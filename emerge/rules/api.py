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

from emerge.engine.program import Program
from emerge.kernels.registry import definitions
from emerge.kernels.syntax import Definition
from emerge.relate.derive import load_program
from emerge.rules import certificates, kernels
from emerge.rules.certify import Certificate, Outcome, Refusal, certify
from emerge.rules.laws import Law, check_program, laws_of
from emerge.util.errors import RuleError

#: Generated pairs for the shipped base, and for one user's laws.
BASE_PAIRS, USER_PAIRS = 400, 60


@dataclass(frozen=True)
class RuleInfo:
    """A law for people.

    Attributes:
        kind: ``clause``, ``kind`` or ``operator``. evidence: ``tested``, ``none``, or ``stale`` (its text has changed).
        facts: its instances behind true facts when it was certified.
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
        return f"{self.name:36} {self.evidence:7} {self.facts:7} facts  {self.meaning}"


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
    return out


def show_rule(name: str, extra: Sequence[Path | str] = ()) -> str:
    """A law: meaning, place, clauses and certificate; or a definition of a kernel, by its name or its operator's.

    Raises:
        RuleError: there is no such law.
    """
    _, laws = _loaded(rule_files(extra))
    defined = [d for d in kernels.all_definitions(definitions(extra)) if name in (d.name, d.operator)]
    if name not in laws and defined:
        return "\n".join(map(_show_definition, defined))
    law = _named(laws, [name])[0]
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
    return "\n".join([*lines, *(f"    {c}" for c in law.clauses)])


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


def _named(laws: dict[str, Law], names: Sequence[str]) -> list[Law]:
    unknown = [n for n in names if n not in laws]
    if unknown:
        raise RuleError(f"there is no law '{unknown[0]}'; known are {', '.join(sorted(laws))}")
    return [laws[n] for n in names]


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
    own = [law for law in laws.values() if not law.shipped]
    defined = kernels.all_definitions(definitions(extra))
    chosen = [d for d in defined if d.name in (names or ()) or d.operator in (names or ())]
    rest = [n for n in names or () if not any(n in (d.name, d.operator) for d in chosen)]
    own_definitions = [d for d in defined if not d.shipped]
    if not names:
        chosen = own_definitions if extra and (own or own_definitions) else defined
    lines, ok = _check_definitions(chosen, seed, update)
    if names and not rest or not names and extra and not own and own_definitions:
        return CheckReport(lines, ok)
    wanted = _named(laws, rest) if rest else own if extra and own else list(laws.values())
    outcome = certify(program, wanted, seed=seed, count=count or BASE_PAIRS, device=device, progress=progress)
    for found in outcome.certificates.values():
        if not laws[found.law].shipped:
            certificates.write_cached(found)
    if update:
        kept = {n: c for n, c in certificates.read_shipped().items() if n in laws and n not in outcome.refusals}
        kept.update({n: c for n, c in outcome.certificates.items() if laws[n].shipped})
        checked = {law.name for law in wanted}
        false = {n: v for n, v in certificates.read_refuted().items() if n in laws and n not in checked}
        false.update(
            {n: (laws[n].hash, r.reason) for n, r in outcome.refusals.items() if r.refuted and laws[n].shipped}
        )
        certificates.write_shipped(kept, false)
    return CheckReport([*_report(wanted, outcome), *lines], ok and not outcome.refusals and not outcome.lowering)


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


def _report(laws: list[Law], outcome: Outcome) -> list[str]:
    lines = []
    for law in laws:
        if law.name in outcome.certificates:
            found = outcome.certificates[law.name]
            counts = f"{found.facts} instances behind true facts, {found.pairs} pairs, {found.meshes} meshes"
            lines.append(f"pass  {law.name}: {counts}")
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
    unknown = [t for t in trust if t not in laws]
    if unknown:
        raise RuleError(f"'trust' names {unknown[0]!r}, which is no law; known are {', '.join(sorted(laws))}")
    shipped, refuted = certificates.read_shipped(), certificates.read_refuted()
    levels: dict[str, str] = {}
    open_laws: list[Law] = []
    for law in laws.values():
        found = _certificate(law, shipped)
        if found is not None:
            levels[law.name] = found.evidence
        elif law.shipped and refuted.get(law.name, ("", ""))[0] == law.hash:
            raise RuleError(
                f"the shipped law '{law.name}' was found false: it {_sentence(refuted[law.name][1])}", law.place
            )
        elif law.shipped and law.name in trust:
            levels[law.name] = "assumed"
        elif law.shipped:
            changed = "has changed since it was certified" if law.name in shipped else "has no certificate"
            raise RuleError(
                f"the shipped law '{law.name}' {changed}; run emerge rules check --update after review", law.place
            )
        else:
            open_laws.append(law)
    levels.update(kernels.admit_definitions(definitions(extra)))
    if open_laws:
        outcome = certify(program, open_laws, count=USER_PAIRS)
        for law in open_laws:
            levels[law.name] = _decide(law, outcome, trust)
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
    return reason if reason.startswith("derives") else f"fails: {reason}"
