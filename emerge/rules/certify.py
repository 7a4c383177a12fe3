"""Certificates: a law is admitted when everything it took part in deriving, over generated pairs, is true.

Evidence is ``tested``: counts, seed, versions and device are part of the certificate, which is bound to the text of
the law and of all bookkeeping it rests on. It is ``proved`` when the law also names an argument why small sizes stand
for all (``@proof``), and everything it derived from what holds for symbolic elements holds for symbolic elements.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from emerge.engine.program import Program
from emerge.facts.kernels import Signature
from emerge.relate.derive import Derivation, program_signatures
from emerge.rules.equality_proof import adds_up, commutes
from emerge.rules.examine import FalseFact, examine
from emerge.rules.generate import pairs
from emerge.rules.kinds import check_kind
from emerge.rules.laws import KIND_RELATIONS, OPERATOR_RELATIONS, Law
from emerge.rules.operators import NotExecutable, check_linearity, check_signature, register_definitions
from emerge.rules.pair import Pair, Unusable
from emerge.rules.proofs import WRITTEN, prove_pair

#: A clause law must have this many instances behind true facts, on this many different pairs and meshes.
MIN_FACTS, MIN_PAIRS, MIN_MESHES = 5, 3, 2


@dataclass(frozen=True)
class Certificate:
    """Why a law is admitted.

    Attributes:
        facts: instances of the law behind true facts (samples, for claims about operators), on ``pairs`` pairs with
            ``meshes`` different meshes.
        method: of a proof: the class of its argument. symbolic: instances behind facts shown on symbolic elements.
        outside: facts it gives about operators that are no subject of symbolic elements, which the argument alone covers.
        open: why a law that names an argument is not proved.
    """

    law: str
    hash: str
    evidence: str
    facts: int
    pairs: int
    meshes: int
    seed: int
    torch: str
    device: str
    dtype: str = "float64"
    method: str = ""
    symbolic: int = 0
    outside: int = 0
    open: str = ""

    def as_json(self) -> dict[str, Any]:
        """All fields but the name and what a tested law has not."""
        empty = {k for k in ("method", "symbolic", "outside", "open") if not getattr(self, k)}
        return {k: v for k, v in asdict(self).items() if k != "law" and k not in empty}


@dataclass(frozen=True)
class Refusal:
    """Why a law is not admitted. ``refuted``: a counterexample was found; otherwise it could not be validated."""

    law: str
    refuted: bool
    reason: str


@dataclass
class Outcome:
    """Result for a set of laws. ``lowering``: where execution contradicts the lowering that the laws speak about."""

    certificates: dict[str, Certificate] = field(default_factory=dict)
    refusals: dict[str, Refusal] = field(default_factory=dict)
    lowering: list[str] = field(default_factory=list)
    examined: int = 0
    skipped: int = 0
    facts: int = 0


def certify(
    program: Program,
    laws: Iterable[Law],
    *,
    seed: int = 0,
    count: int = 60,
    device: str = "cpu",
    scenes: Sequence[str] | None = None,
    progress: Callable[[str], None] | None = None,
) -> Outcome:
    """Tests laws of a program.

    Args:
        laws: those to decide; the other laws of the program are taken as given, so a false fact is blamed on these.
        count: generated pairs; fewer when a pair refutes, more (up to three times) while a law has not fired enough.
        scenes: kinds of pairs to generate; None = all.
    """
    out = Outcome()
    targets = list(laws)
    tell = progress or (lambda text: None)
    version = _torch_version()
    register_definitions(program.clauses)
    for law in targets:
        if law.kind != "clause":
            _certify_operators(out, program, law, seed, version, device)
        elif any(c.head.name in (*KIND_RELATIONS, *OPERATOR_RELATIONS) for c in law.clauses):
            out.refusals[law.name] = Refusal(
                law.name, False, "it mixes claims about operators with other clauses; name them apart"
            )
    clause_laws = {law.name: law for law in targets if law.kind == "clause" and law.name not in out.refusals}
    if clause_laws:
        _certify_clauses(out, program, clause_laws, seed, count, version, device, tell, scenes)
    return out


def _torch_version() -> str:
    import torch

    return str(torch.__version__)


def _certify_operators(out: Outcome, program: Program, law: Law, seed: int, version: str, device: str) -> None:
    samples = 0
    known = program_signatures(program)
    by_operator: dict[str, list[Signature]] = defaultdict(list)
    for (op, _), signature in known.items():
        by_operator[op].append(signature)
    for clause in law.clauses:
        if clause.head.name == "operator_definition":
            continue
        if clause.body:
            out.refusals[law.name] = Refusal(law.name, False, "a claim about operators must be a fact, without a body")
            return
        values = [getattr(a, "value", None) for a in clause.head.args]
        wrong = ""
        try:
            if law.kind == "kind":
                second = values[1] if len(values) > 1 else None
                found = check_kind(clause.head.name, str(values[0]), second, seed)
                if not found.samples:
                    raise NotExecutable(f"no operator of kind {values[0]!r} is known that could be executed")
                wrong, samples = found.counterexample, samples + found.samples
            else:
                op, output = str(values[0]), int(str(values[1]))
                if (op, output) not in known:
                    raise NotExecutable(f"output {output} of {op} has no signature")
                if clause.head.name == "operator_signature":
                    wrong = check_signature(known[op, output], by_operator[op], seed)
                else:
                    wrong = check_linearity(known[op, output], by_operator[op], int(str(values[2])), seed)
                samples += 4
        except NotExecutable as exc:
            out.refusals[law.name] = Refusal(law.name, False, str(exc))
            return
        if wrong:
            out.refusals[law.name] = Refusal(law.name, True, f"{clause} is false: {wrong}")
            return
    tested = Certificate(law.name, law.hash, "tested", samples, samples, 1, seed, version, device)
    out.certificates[law.name] = _written_out(law, tested)


def _written_out(law: Law, tested: Certificate) -> Certificate:
    """The certificate of claims about kinds, raised to ``proved`` where each of them is proved for the kind's own function.

    That torch's operators of these kinds compute that function is what the tests show.
    """
    if not law.shipped or law.proof != WRITTEN:
        return tested
    provers = {"commutative": commutes, "linear_all": adds_up}
    for clause in law.clauses:
        prove = provers.get(clause.head.name)
        if prove is None or not prove(str(getattr(clause.head.args[0], "value", ""))).holds:
            return replace(tested, open=f"{clause} could not be shown")
    return replace(tested, evidence="proved", method=WRITTEN, symbolic=len(law.clauses))


def _certify_clauses(
    out: Outcome, program: Program, laws: dict[str, Law], seed: int, count: int, version: str, device: str,
    tell: Callable[[str], None], scenes: Sequence[str] | None,
) -> None:  # fmt: skip
    facts: Counter[str] = Counter()
    in_pairs: Counter[str] = Counter()
    meshes: dict[str, set[str]] = defaultdict(set)
    blamed: dict[str, list[FalseFact]] = defaultdict(list)
    unattributed: list[FalseFact] = []
    # the argument of a user's law has been read by nobody here, so such a law stays tested
    proofs = Proofs({n: law.proof for n, law in laws.items() if law.proof and law.proof != WRITTEN and law.shipped})

    def enough() -> bool:
        # a law that never fired so far will not be waited for
        return all(
            n in blamed
            or not facts[n]
            or (facts[n] >= MIN_FACTS and in_pairs[n] >= MIN_PAIRS and len(meshes[n]) >= MIN_MESHES)
            for n in laws
        )

    for number, pair in enumerate(pairs(seed, 3 * count, scenes)):
        if number >= count and enough():
            break
        if blamed and set(blamed) >= set(laws):
            break
        try:
            found = examine(pair, seed=seed, program=program, device=device)
        except Unusable:
            out.skipped += 1
            continue
        out.examined += 1
        out.facts += len(found.outcomes)
        out.lowering += [f"{text} [{pair.name}]" for text in found.lowering.values()]
        for name, times in found.fired.items():
            facts[name] += times
            in_pairs[name] += 1
            meshes[name].add(str(sorted(pair.mesh.items())))
        proofs.add(pair, found.derivation, set(found.fired))
        for failure in found.failed:
            suspects = [n for n in failure.laws if n in laws]
            for name in suspects:
                blamed[name].append(failure)
            if not suspects:
                unattributed.append(failure)
        tell(f"{number + 1} pairs, {out.facts} facts, {sum(map(len, blamed.values()))} false")
    # A law takes part in few true facts and many false ones when it is the one at fault.
    worst = max((len(v) / (len(v) + facts[n]) for n, v in blamed.items()), default=0.0)
    for name, law in laws.items():
        if name in blamed:
            share = len(blamed[name]) / (len(blamed[name]) + facts[name])
            hint = "" if share == worst else " (it took part; another law is likelier to be at fault)"
            out.refusals[name] = Refusal(name, True, counterexample_text(blamed[name][0]) + hint)
        elif facts[name] >= MIN_FACTS and in_pairs[name] >= MIN_PAIRS and len(meshes[name]) >= MIN_MESHES:
            out.certificates[name] = proofs.certificate(
                Certificate(name, law.hash, "tested", facts[name], in_pairs[name], len(meshes[name]), seed, version, device)
            )
        else:
            out.refusals[name] = Refusal(
                name, False,
                f"it has {facts[name]} instances behind true facts on {in_pairs[name]} pairs and "
                f"{len(meshes[name])} meshes of {out.examined} examined; "
                f"at least {MIN_FACTS}, {MIN_PAIRS} and {MIN_MESHES} are needed",
            )  # fmt: skip


class Proofs:
    """Collects what symbolic elements say about laws that name an argument.

    Args:
        classes: law -> class of its argument.
    """

    def __init__(self, classes: dict[str, str]) -> None:
        self.classes = classes
        self.shown: Counter[str] = Counter()
        self.pairs: Counter[str] = Counter()
        self.meshes: dict[str, set[str]] = defaultdict(set)
        self.outside: Counter[str] = Counter()
        self.open: dict[str, str] = {}

    def add(self, pair: Pair, derivation: Derivation, fired: set[str]) -> None:
        """Takes one pair in which ``fired`` laws fired."""
        if not fired & self.classes.keys() - self.open.keys():
            return
        found = prove_pair(pair, derivation)
        for law in self.classes:
            if found.shown[law]:
                self.shown[law] += found.shown[law]
                self.pairs[law] += 1
                self.meshes[law].add(str(sorted(pair.mesh.items())))
            self.outside[law] += sum(found.outside[law].values()) if law in found.outside else 0
            if law in found.open:
                self.open.setdefault(law, found.open[law])

    def certificate(self, tested: Certificate) -> Certificate:
        """The certificate of a tested law, raised to ``proved`` where its proof is complete."""
        law = tested.law
        if law not in self.classes:
            return tested
        reason = self.open.get(law, "")
        if not reason and (self.shown[law] < MIN_FACTS or self.pairs[law] < MIN_PAIRS or len(self.meshes[law]) < MIN_MESHES):
            reason = f"{self.shown[law]} instances on {self.pairs[law]} pairs could be shown on symbolic elements"
        if reason:
            return replace(tested, symbolic=self.shown[law], outside=self.outside[law], open=reason)
        return replace(
            tested, evidence="proved", method=self.classes[law], symbolic=self.shown[law], outside=self.outside[law]
        )


def counterexample_text(failure: FalseFact) -> str:
    """A refuting fact in words."""
    return f"derives {failure.text}, which is false on pair [{failure.pair}]: {failure.detail}"


def suspects(failures: Sequence[FalseFact]) -> Counter[str]:
    """How often each law stands directly behind a false fact."""
    return Counter(law for f in failures for law in f.laws)
