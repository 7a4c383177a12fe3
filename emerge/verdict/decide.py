"""From a derivation and, where it falls short, an execution to the verdict of a pair."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from emerge.algebra.evidence import equality_levels
from emerge.engine.derivation import Fact, Levels
from emerge.facts.base import IMPLEMENTATION, REFERENCE
from emerge.facts.lower import Lowering
from emerge.relate.derive import Derivation, Problem
from emerge.relate.expected import Ambiguity
from emerge.relate.statement import CONSTANT, Statement
from emerge.util.errors import BudgetExceeded, ExecutionError
from emerge.verdict.coverage import cover, node_evidence
from emerge.verdict.localize import Structure, diagnosis_kinds, diverging_finding, execution_finding, frontier_findings
from emerge.verdict.precision import precision_findings
from emerge.verdict.types import (
    EQUIVALENT,
    EVIDENCE,
    NOT_EQUIVALENT,
    UNKNOWN,
    Assumption,
    Counterexample,
    DivergenceLike,
    Finding,
    NotRun,
    Output,
    PairResult,
    RefutationResult,
    Refuter,
)


def decide(
    problem: Problem,
    derivation: Derivation,
    refuter: Refuter | None = None,
    *,
    levels: Mapping[str, str] | None = None,
    default_level: str = "tested",
    ambiguities: Sequence[Ambiguity] = (),
    seed: int = 0,
) -> PairResult:
    """The verdict of a pair.

    EQUIVALENT needs a proof of every claim and no open reading; NOT_EQUIVALENT an executed difference; all else is
    UNKNOWN with a reason.

    Args:
        refuter: runs both sides; called only when something is unproved. None: nothing is executed.
        levels: law -> evidence of its certificate; laws not named have ``default_level``.
        ambiguities: relations that the shapes do not settle.
        seed: of the execution, for the report.
    """
    structure = Structure(derivation)
    proved = derivation.proved()
    unproved = sorted(set(derivation.claims) - proved)
    unusable = [s for s, _ in derivation.unusable if any(s is c for c in problem.outputs)]
    result = PairResult(engine=(derivation.result.engine, derivation.result.version))
    numbers = _numbers(derivation, levels or {}, default_level, exact=bool(proved) and not unproved and not unusable)
    evidence, equal = _evidence(structure, proved, numbers, levels, default_level, result)
    result.outputs = _outputs(structure, proved, evidence, unusable)
    if evidence:
        result.node_evidence = node_evidence(structure, evidence, numbers, levels or {})
        cover(result, result.node_evidence.values())
    result.assumptions = _assumptions(structure, levels or {}, equal)
    if derivation.claims and not unproved and not unusable and not ambiguities:
        result.verdict = EQUIVALENT
        result.evidence = max((evidence[g] for g in proved), key=EVIDENCE.index)
        result.findings = precision_findings(structure)
        return result
    refutation: RefutationResult | None = None
    if unproved or unusable:
        refutation = _refute(refuter, problem, derivation, ambiguities)
    untested = _untested_kernel(structure, refutation, levels or {})
    if untested:
        refutation = NotRun(f"execution parts first at {untested}, whose definition no real kernel here has tested")
    if refutation is not None and refutation.outcome == "refuted":
        _refuted(result, structure, unproved, refutation, seed)
    else:
        _unknown(result, structure, unproved, unusable, refutation, ambiguities)
    _diagnose(result.findings, derivation)
    result.findings += precision_findings(structure)
    return result


# ---- proofs ---------------------------------------------------------------------------------------------------------


def _evidence(
    structure: Structure, proved: set[int], numbers: Levels, levels: Mapping[str, str] | None, default: str,
    result: PairResult,
) -> tuple[dict[int, str], dict[int, int]]:  # fmt: skip
    """Evidence per proved claim: the weakest among the laws of its best derivation, the equal tensors it reads, and the
    signatures and definitions of operators it reads; counts the laws into ``result``. Also, per side, the highest level of
    the equal tensors that are read, -1 without any."""
    derivation = structure.derivation
    log = derivation.result.log
    equal = dict.fromkeys((REFERENCE, IMPLEMENTATION), -1)
    rows: dict[int, list[tuple[Any, ...]]] = {}
    for row in sorted(derivation.result.relations["output_proved"], key=repr):
        rows.setdefault(row[0], []).append(row)
    if log is None:
        # Without the log any law may have been used, so the weakest counts.
        weakest = max([default, *(levels or {}).values()], key=EVIDENCE.index)
        return dict.fromkeys(proved, weakest), dict.fromkeys(equal, len(EVIDENCE) - 1)
    given = levels or {}
    levels_of = log.best_level("output_proved", numbers)
    chosen = [
        min((Fact("output_proved", row) for row in rows[g]), key=lambda f: (levels_of[f], repr(f)))
        for g in sorted(proved)
    ]
    # Every derivation uses the alignment laws, so level 0 means that all of them are proved.
    evidence = {fact.args[0]: EVIDENCE[levels_of[fact]] for fact in chosen}
    result.rules_used = log.laws_used(chosen, numbers) if chosen else {}
    sides = dict(derivation.base.facts["value"])
    for fact in log.given_used(chosen, "same", numbers) if chosen else ():
        side = sides[fact.args[0]]
        equal[side] = max(equal[side], numbers.facts.get(fact, 0))
    for side, low in ((REFERENCE, derivation.reference), (IMPLEMENTATION, derivation.implementation)):
        for rule, matches in low.extension.fired.items() if low.extension is not None else ():
            if EVIDENCE.index(given.get(rule, default)) <= equal[side]:
                result.rules_used[rule] = result.rules_used.get(rule, 0) + matches
    counted: set[tuple[int, int]] = set()
    for claim in sorted(evidence):
        for side, low in ((REFERENCE, derivation.reference), (IMPLEMENTATION, derivation.implementation)):
            ops, _ = structure.cone([structure.claim_tensors(claim)[side == IMPLEMENTATION]])
            for op in sorted(set(ops) & set(low.signature_law)):
                law = low.signature_law[op]
                evidence[claim] = max(evidence[claim], given.get(law, default), key=EVIDENCE.index)
                if (side, op) not in counted:
                    counted.add((side, op))
                    result.rules_used[law] = result.rules_used.get(law, 0) + 1
            for tensor, name in _defined(structure, side, low, [claim], given, equal):
                evidence[claim] = max(evidence[claim], given.get(name, default), key=EVIDENCE.index)
                if (side, tensor) not in counted:
                    counted.add((side, tensor))
                    result.rules_used[name] = result.rules_used.get(name, 0) + 1
    return evidence, equal


def _numbers(derivation: Derivation, given: Mapping[str, str], default: str, exact: bool) -> Levels:
    """Numbers of the evidence of laws and of equal tensors; empty without a log.

    Args:
        exact: what every pair of equal tensors rests on is found out; else all of a side count as the weakest of its rules.
    """
    log = derivation.result.log
    if log is None:
        return Levels({})

    def number(name: str) -> int:
        return EVIDENCE.index(given.get(name, default))

    laws = {c.law: number(c.law) for c in log.program.clauses if c.law is not None}
    facts: dict[Fact, int] = {}
    for low in (derivation.reference, derivation.implementation):
        facts |= {Fact("same", pair): n for pair, n in equality_levels(low, number, exact).items()}
    return Levels(laws, facts)


def _defined(
    structure: Structure, side: int, low: Lowering, claims: Iterable[int], levels: Mapping[str, str], equal: Mapping[int, int]
) -> list[tuple[int, str]]:
    """Tensors behind claims that a kernel's definition was used for, with its name.

    Definitions that gave equal forms count where their kernel is read and equal tensors as weak as they are were used: the
    log does not tell them apart.
    """
    nodes = structure.node_cone(side, claims)
    found = {(tensor, name) for node, tensor, name in low.defined if node in nodes}
    for form in low.forms:
        if form.node in nodes and EVIDENCE.index(levels.get(form.definition, "tested")) <= equal[side]:
            found.add((form.kernel.id, form.definition))
    return sorted(found)


def _outputs(
    structure: Structure, proved: set[int], evidence: Mapping[int, str], unusable: list[Statement]
) -> list[Output]:
    """One entry per claimed reference output; a claim in pieces gives one text per piece."""
    out: dict[tuple[str, str], Output] = {}
    for number, statement in structure.derivation.claims.items():
        key = (statement.reference.name, statement.implementation.name)
        ok = number in proved
        texts = structure.alignments.claim_texts(number, proved=ok)
        derived = texts[0] if texts else None
        entry = out.get(key)
        if entry is None:
            out[key] = Output(
                str(statement.reference), structure.members(key[1]), derived, statement.text, evidence.get(number), ok
            )
            continue
        entry.alignment = None if derived is None or entry.alignment is None else f"{entry.alignment}; {derived}"
        entry.expected = f"{entry.expected}; {statement.text}"
        entry.reference = statement.reference.name
        entry.proved = entry.proved and ok
        levels = [e for e in (entry.evidence, evidence.get(number)) if e]
        entry.evidence = max(levels, key=EVIDENCE.index) if entry.proved and levels else None
    for statement in unusable:
        out[statement.reference.name, statement.implementation.name] = Output(
            str(statement.reference), structure.members(statement.implementation.name), None, statement.text
        )
    return list(out.values())


def _assumptions(structure: Structure, levels: Mapping[str, str], equal: Mapping[int, int]) -> list[Assumption]:
    """Assumptions made at operators that the claimed outputs read, and at relations taken from names.

    The derivation log is not narrow enough to leave any out: a constant that the lowering folded into an operator is
    not a premise of its own.
    """
    derivation = structure.derivation
    found: dict[tuple[str, str], Assumption] = {}
    for index, (side, low) in enumerate(
        ((REFERENCE, derivation.reference), (IMPLEMENTATION, derivation.implementation))
    ):
        ops, roots = structure.cone([structure.claim_tensors(g)[index] for g in derivation.claims])
        nodes = structure.node_cone(side, derivation.claims)
        touched = set(ops) | roots
        for a in low.assumptions:
            tensor = structure.result_of.get(a.op, a.op)
            names = {low.op_node.get(a.op, ""), *low.nodes_of.get(tensor, ())}
            if a.op in touched or tensor in touched or names & nodes:
                where = _where(structure, side, low, a.op)
                found.setdefault((a.name, where), Assumption(a.name, where, a.why))
        for tensor, name in _defined(structure, side, low, derivation.claims, levels, equal):
            if levels.get(name) == "assumed":
                where = _where(structure, side, low, low.op_of.get(tensor, tensor))
                why = f"{name.rpartition(':')[0]} computes what its definition says; no real kernel ran here to test it"
                found.setdefault(("kernel_contract", where), Assumption("kernel_contract", where, why))
    for statement in derivation.given.values():
        if statement.origin == "name":
            where = f"{statement.reference} ~ {statement.implementation}"
            why = f"names and shapes fit one contiguous block reading only: {statement.text}"
            found.setdefault(("name", where), Assumption("name", where, why))
        elif statement.origin == CONSTANT:
            where = f"{statement.reference} ~ {statement.implementation}"
            why = "both are constants, executed here in their captured types with equal bits"
            found.setdefault(("equal_constants", where), Assumption("equal_constants", where, why))
    return list(found.values())


def _where(structure: Structure, side: int, low: Lowering, op: int) -> str:
    name = low.op_node.get(op, "") or (structure.node_name(side, op) if op in structure.result_of else "")
    source = structure.source(side, name)
    return f"{'ref' if side == REFERENCE else 'impl'}:{name}" + (f" ({source})" if source else "")


# ---- everything else ------------------------------------------------------------------------------------------------


def _refute(
    refuter: Refuter | None, problem: Problem, derivation: Derivation, ambiguities: Sequence[Ambiguity]
) -> RefutationResult | None:
    if any(a.section == "relations" for a in ambiguities):
        return NotRun("not executed, since an input relation is open")
    if refuter is None:
        return None
    try:
        return refuter(problem, derivation)
    except (ExecutionError, BudgetExceeded) as exc:
        return NotRun(str(exc))


def _untested_kernel(
    structure: Structure, refutation: RefutationResult | None, levels: Mapping[str, str]
) -> str:
    """The kernel at which both programs part first where it was executed by a definition that nothing has tested."""
    if refutation is None or refutation.outcome != "refuted":
        return ""
    untested = {n.rpartition(":")[0] for n, level in levels.items() if level == "assumed"}
    first = [d for d in refutation.diverging if d.first]
    found = ""
    for divergence in first:
        names = [(REFERENCE, divergence.reference)]
        names += [(IMPLEMENTATION, structure.family_name(rank, name)) for rank, name in divergence.implementation.items()]
        kernels = [(name, op) for side, name in names if (op := _operator(structure, side, name)) in untested]
        if not kernels:
            return ""
        found = found or f"{kernels[0][0]!r} ({kernels[0][1]})"
    return found


def _operator(structure: Structure, side: int, name: str) -> str:
    """Operator of a node that torch itself does not execute, "" for all others."""
    try:
        value = structure.family(side).value(name)
    except KeyError:
        return ""
    op = getattr(value, "op", "")
    if op == "auto_functionalized" and value.args:  # type: ignore[union-attr]
        op = str(value.args[0])  # type: ignore[union-attr]
    return "" if op.startswith("aten.") else op


def _refuted(
    result: PairResult, structure: Structure, unproved: list[int], refutation: RefutationResult, seed: int
) -> None:
    result.verdict = NOT_EQUIVALENT
    result.reason = refutation.reason
    difference = refutation.difference
    largest = float(difference.max_abs_diff) if difference is not None else float("inf")
    drawn = refutation.witnesses[0].draw.seed if refutation.witnesses else seed
    result.counterexample = Counterexample(drawn, refutation.output, largest, refutation.sizes)
    result.sizes = dict(refutation.vectors[0]) if refutation.vectors else {}
    result.payload = refutation
    for name, where, why in refutation.assumptions:
        if not any(a.name == name and a.where == where for a in result.assumptions):
            result.assumptions.append(Assumption(name, where, why))
    if refutation.kind:
        nodes = refutation.witnesses[0].nodes if refutation.witnesses else []
        result.findings.append(execution_finding(structure, refutation.kind, refutation.reason, nodes))
    for divergence, first in parting(structure, refutation.diverging):
        result.findings.append(diverging_finding(structure, divergence, refutation.output, first))
    if not result.findings:
        result.findings = frontier_findings(structure, unproved, "UNPROVED", "error")
    result.findings += mismatches(structure, unproved, "error")


def parting(structure: Structure, diverging: Sequence[DivergenceLike]) -> list[tuple[DivergenceLike, bool]]:
    """The nodes at which the sides part, without those whose value arrived in another form, and whether each comes first."""
    kept = [d for d in diverging if not structure.supports(d.reference)] or list(diverging)
    none_first = not any(d.first for d in kept)
    return [(d, d.first or (none_first and k == 0)) for k, d in enumerate(kept)]


def mismatches(structure: Structure, unproved: list[int], severity: str) -> list[Finding]:
    """Claims whose output is aligned, but not as expected."""
    out = []
    for number in unproved:
        texts = structure.alignments.claim_texts(number)
        if not texts:
            continue
        statement = structure.derivation.claims[number]
        name, family = statement.reference.name, statement.implementation.name
        hint = None
        partial = next((t for t in texts if "partial(" in t), None)
        if partial is not None and all("partial(" in t for t in texts):
            axes = partial.split("partial(")[1].split(")")[0]
            hint = f"the values on the ranks are partial results; reduce them over {axes.split(';')[0]}"
        out.append(
            Finding(
                "UNPROVED",
                severity,
                f"output {name!r} corresponds to {family!r}, but not as expected",
                [name],
                structure.source(REFERENCE, name),
                structure.members(family),
                structure.source(IMPLEMENTATION, family),
                " | ".join(texts),
                statement.text,
                hint,
            )
        )
    return out


def _unknown(
    result: PairResult,
    structure: Structure,
    unproved: list[int],
    unusable: list[Statement],
    refutation: RefutationResult | None,
    ambiguities: Sequence[Ambiguity],
) -> None:
    result.verdict = UNKNOWN
    derivation = structure.derivation
    found = frontier_findings(structure, unproved, "UNPROVED", "warning") + mismatches(structure, unproved, "warning")
    result.findings = found
    reasons: list[str] = []
    if ambiguities:
        reasons.append(f"{len(ambiguities)} relation(s) have to be written: " + "; ".join(str(a) for a in ambiguities))
    if not derivation.claims and not unusable and not ambiguities:
        reasons.append("nothing is claimed about the outputs; add expected outputs to the relations")
    for statement, why in derivation.unusable:
        reasons.append(f"{str(statement.reference)!r} ~ {str(statement.implementation)!r} cannot be used: {why}")
    if unproved:
        reasons.append(_why_unproved(structure, unproved, found))
        for side, low in (("reference", derivation.reference), ("implementation", derivation.implementation)):
            if low.extension is not None and low.extension.stopped:
                reasons.append(f"the algebra of the {side} stopped after {low.extension.stopped}")
    if refutation is not None and refutation.outcome == "agree":
        reasons.append(f"execution found no difference{': ' + refutation.reason if refutation.reason else ''}")
    elif refutation is not None and refutation.reason:
        reasons.append(refutation.reason)
    elif refutation is None and unproved:
        reasons.append("not executed")
    result.reason = "; ".join(reasons)


def _why_unproved(structure: Structure, unproved: list[int], findings: list[Finding]) -> str:
    outputs = sorted({structure.derivation.claims[g].reference.name for g in unproved})
    total = len({c.reference.name for c in structure.derivation.claims.values()})
    text = f"{len(outputs)} of {total} claimed outputs are not proved ({_short(outputs)})"
    unknown = _unknown_operators(structure, unproved)
    if unknown:
        text += f"; without semantics: {_short(unknown)}"
    nodes = [n for f in findings for n in f.reference_nodes]
    if nodes:
        text += f"; no alignment was derived at {_short([repr(n) for n in dict.fromkeys(nodes)])}"
    return text


def _unknown_operators(structure: Structure, unproved: list[int]) -> list[str]:
    """Nodes without semantics that the unproved outputs read, with the reason."""
    out = []
    derivation = structure.derivation
    for side, low in ((REFERENCE, derivation.reference), (IMPLEMENTATION, derivation.implementation)):
        reached = structure.node_cone(side, unproved)
        for name, why in low.unknown.items():
            # What reads an unknown value is unknown too and needs no mention of its own.
            if name in reached and not why.startswith("reads "):
                out.append(f"{'ref' if side == REFERENCE else 'impl'}:{name} ({why})")
    return out


def _short(items: Iterable[str], most: int = 4) -> str:
    listed = list(items)
    return ", ".join(listed[:most]) + (f" and {len(listed) - most} more" if len(listed) > most else "")


def _diagnose(findings: list[Finding], derivation: Derivation) -> None:
    """Kinds from the relation ``diagnosis`` replace the general ones."""
    kinds = diagnosis_kinds(derivation)
    for finding in findings:
        for name in finding.reference_nodes:
            if name in kinds:
                finding.kind, reason = kinds[name]
                finding.hint = finding.hint or (str(reason) if reason else None)
