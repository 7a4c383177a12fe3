"""Proves a pair of deep graphs segment by segment; what is equal up to names is derived once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from emerge.facts.base import IMPLEMENTATION, REFERENCE
from emerge.facts.families import FamilyGraph
from emerge.relate.alignment_text import Alignments
from emerge.relate.derive import Derivation, Problem
from emerge.relate.notation import TensorSpec, alignment_statement
from emerge.relate.segments import CUT, LEAST_CUTS, Segment, behind, can_be_cut, cut_points, segment
from emerge.relate.statement import Piece, Statement
from emerge.util.errors import RelationError
from emerge.verdict.coverage import cover
from emerge.verdict.types import EQUIVALENT, EVIDENCE, Assumption, NodeEvidence, Output, PairResult

#: So many different segments may fail before the graphs are taken whole.
MOST_FAILURES = 1

Derive = Callable[[Problem], Derivation]
Judge = Callable[[Problem, Derivation], PairResult]


@dataclass
class Chain:
    """The segments of one pair.

    Attributes:
        derive: a derivation of a segment, with all that is tried for a whole pair. explore: one without claims.
        judge: the verdict of a derived segment.
        seconds: of all derivations, by stage.
        results: by key of the segment, None where it is not proved; ``uses``: how often those that are, in order.
        levels: by key, evidence of the reference nodes; ``covered``: by node of the whole graph.
        forms: how the sides lie to one another at the cuts, as notation.
    """

    problem: Problem
    derive: Derive
    explore: Callable[[Problem, bool], Derivation]
    judge: Judge
    seconds: dict[str, float] = field(default_factory=dict)
    results: dict[str, PairResult | None] = field(default_factory=dict)
    uses: Counter[str] = field(default_factory=Counter)
    levels: dict[str, list[NodeEvidence | None]] = field(default_factory=dict)
    covered: dict[str, NodeEvidence] = field(default_factory=dict)
    forms: list[str] = field(default_factory=list)
    explored: int = 0

    def prove(self) -> PairResult | None:
        """EQUIVALENT, or None where the graphs must be taken whole."""
        problem = self.problem
        if not problem.outputs or not (can_be_cut(problem.reference) and can_be_cut(problem.implementation)):
            return None
        ours, theirs = cut_points(problem.reference), cut_points(problem.implementation)
        count = min(len(ours), len(theirs))
        if count < LEAST_CUTS:
            return None
        ours, theirs = ours[-count:], theirs[-count:]  # what comes before the layers may look like them
        cuts: dict[str, Statement] = {}
        for name, other in zip(ours, theirs):
            statement = self._cut(name, other, cuts)
            if statement is not None:
                cuts[name] = statement
            elif self.explored > MOST_FAILURES or sum(r is None for r in self.results.values()) > MOST_FAILURES:
                return None
        if len(cuts) < LEAST_CUTS:
            return None
        groups: dict[object, list[Statement]] = {}
        stops = {s.implementation.name for s in cuts.values()}
        for claim in problem.outputs:
            reads = (behind(problem.reference, claim.reference.name, cuts),
                     behind(problem.implementation, claim.implementation.name, stops))  # fmt: skip
            groups.setdefault(reads, []).append(claim)
        last = []
        for claims in groups.values():
            found = segment(problem, claims, cuts)
            if not self._proved(found):
                return None
            last.append((found.key, claims))
        return self._together(last)

    def _cut(self, name: str, other: str, cuts: dict[str, Statement]) -> Statement | None:
        """The statement at one cut, proved; None where there is none."""
        # values inside a model mostly lie as those before and as its outputs do
        texts = self.forms or list(dict.fromkeys(c.text for c in self.problem.outputs))
        statement = next(filter(None, (self._stated(text, name, other, cuts) for text in texts)), None)
        if statement is None and not self.forms:
            self.explored += 1
            texts = [t for t in self._alignments(name, other, cuts) if t not in texts]
            statement = next(filter(None, (self._stated(text, name, other, cuts) for text in texts)), None)
        if statement is not None and not self.forms:
            self.forms.append(statement.text)
        return statement

    def _stated(self, text: str, name: str, other: str, cuts: dict[str, Statement]) -> Statement | None:
        """The statement of two values that ``text`` makes, if it is proved."""
        specs = _spec(self.problem.reference, name), _spec(self.problem.implementation, other)
        try:
            statement = alignment_statement(text, *specs, self.problem.mesh, origin=CUT)
        except RelationError:
            return None
        return statement if self._proved(segment(self.problem, [statement], cuts)) else None

    def _alignments(self, name: str, other: str, cuts: dict[str, Statement]) -> list[str]:
        """How two values are aligned, found by a derivation without a claim."""
        identity = Statement(Piece(name), Piece(other), ())
        part = segment(self.problem, [identity], cuts).problem
        part.outputs = []
        for algebra in (False, True):
            derivation = self.explore(part, algebra)
            self._spent(derivation)
            found = Alignments(derivation)
            s, d = found.tensor_id(REFERENCE, name), found.tensor_id(IMPLEMENTATION, other)
            if s is None or d is None:
                return []
            root = found.root.get(d, d)
            texts = [
                found.text(s, d, p.relation) for p in found.partners_of(s)
                if p.implementation == root and p.relation[2] == 0 and p.relation[4] == "1"
            ]  # fmt: skip
            texts = [t for t in dict.fromkeys(texts) if "?" not in t]
            if texts:
                return texts
        return []

    def _proved(self, found: Segment) -> bool:
        if found.key not in self.results:
            derivation = self.derive(found.problem)
            self._spent(derivation)
            result = self.judge(derivation.problem, derivation)
            self.results[found.key] = result if result.verdict == EQUIVALENT else None
            self.levels[found.key] = [result.node_evidence.get(n) for n in found.nodes]
        if self.results[found.key] is None:
            return False
        self.uses[found.key] += 1
        for name, level in zip(found.nodes, self.levels[found.key], strict=True):
            if level is not None:  # masks and tables belong to many segments and count once
                self.covered.setdefault(name, level)
        return True

    def _spent(self, derivation: Derivation) -> None:
        for stage, seconds in derivation.seconds.items():
            self.seconds[stage] = self.seconds.get(stage, 0.0) + seconds

    def _together(self, last: list[tuple[str, list[Statement]]]) -> PairResult:
        """One verdict out of those of the segments."""
        out = PairResult(verdict=EQUIVALENT)
        levels = []
        for key, times in self.uses.items():
            result = self.results[key]
            assert result is not None
            out.engine = result.engine
            levels.append(result.evidence or EVIDENCE[-1])
            for law, count in result.rules_used.items():
                out.rules_used[law] = out.rules_used.get(law, 0) + count * times
            for a in result.assumptions:
                where = a.where if times == 1 else f"{a.where} and {times - 1} places like it"
                if not any(b.name == a.name and b.where == where for b in out.assumptions):
                    out.assumptions.append(Assumption(a.name, where, a.why))
            out.findings += [f for f in result.findings if f not in out.findings]
        place: dict[str, int] = {}
        for k, claim in enumerate(self.problem.outputs):
            place.setdefault(str(claim.reference), k)
            place.setdefault(claim.reference.name, k)
        outputs = [o for key, claims in last for o in self._outputs(key, claims)]
        out.outputs = sorted(outputs, key=lambda o: place.get(o.reference, 0))
        out.evidence = max(levels, key=EVIDENCE.index)
        cover(out, self.covered.values())
        out.stats = {"segments": sum(self.uses.values()), "segments_reused": sum(self.uses.values()) - len(self.uses)}
        return out

    def _outputs(self, key: str, claims: list[Statement]) -> list[Output]:
        """The outputs of a segment under the names they have here."""
        result = self.results[key]
        assert result is not None
        pairs = list(dict.fromkeys((c.reference.name, c.implementation.name) for c in claims))
        found = []
        for (name, other), output in zip(pairs, result.outputs, strict=True):
            boxes = [str(c.reference) for c in claims if (c.reference.name, c.implementation.name) == (name, other)]
            value = self.problem.implementation.value(other)
            members = [f"{rank}:{member}" for rank, member in sorted(value.members.items())]
            found.append(replace(output, reference=boxes[0] if len(boxes) == 1 else name, implementation=members))
        return found


def _spec(graph: FamilyGraph, name: str) -> TensorSpec:
    """A cut as statements speak of it; cuts are single tensors."""
    value = graph.value(name)
    assert value.dtype is not None
    assert value.shape is not None
    return TensorSpec(name, value.shape, value.dtype)
