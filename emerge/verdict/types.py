"""Verdicts, findings and everything else a report says about one pair."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from emerge.relate.derive import Derivation, Problem

EQUIVALENT, NOT_EQUIVALENT, UNKNOWN = "EQUIVALENT", "NOT_EQUIVALENT", "UNKNOWN"
#: Evidence from strongest to weakest; the position is the level in a derivation.
EVIDENCE = ("proved", "tested", "assumed")
#: What reference nodes that are not covered by proved laws rest on: definitions of kernels, laws about the numbers of an index
#: (look-ups, ranges, routing), other laws.
KINDS_OF_REST = ("kernel_contracts", "index_operators", "other_laws")


class DivergenceLike(Protocol):
    """A reference node whose value differs while its operands agree, and the node in its place on every rank.

    Attributes:
        cause: per rank, the node that makes an operand of that one out of values that agree; may be empty.
        also: further reference nodes at that place.
        first: nothing parts at a smaller depth.
    """

    @property
    def reference(self) -> str: ...
    @property
    def implementation(self) -> Mapping[int, str]: ...
    @property
    def cause(self) -> Mapping[int, str]: ...
    @property
    def also(self) -> Sequence[str]: ...
    @property
    def first(self) -> bool: ...


class RefutationResult(Protocol):
    """What an execution of both sides gave; :class:`emerge.execute.refute.Refutation` has this form.

    Attributes:
        outcome: ``refuted``, ``agree`` (no difference in any sample) or ``impossible`` (nothing can be said).
        reason: one sentence.
        kind: a diagnosis that execution itself gives (``UNINITIALISED``, ``WRONG_GROUP``, ..), ``""`` for values.
        output: the reference output that differs, ``""`` where the implementation did not finish.
        difference: the worst one, with ``max_abs_diff``; None where there is none.
        sizes: ``captured`` or ``reduced``; ``vectors``: the lengths that were reduced, per run.
        diverging: where the programs part.
        assumptions: (name, where, why) that the samples rest on.
        witnesses: executed samples; ``nodes`` of the first are (rank, node) where ``kind`` names some.
    """

    @property
    def outcome(self) -> str: ...
    @property
    def reason(self) -> str: ...
    @property
    def kind(self) -> str: ...
    @property
    def output(self) -> str: ...
    @property
    def difference(self) -> Any: ...
    @property
    def sizes(self) -> str: ...
    @property
    def vectors(self) -> Sequence[Mapping[str, int]]: ...
    @property
    def diverging(self) -> Sequence[DivergenceLike]: ...
    @property
    def assumptions(self) -> Sequence[tuple[str, str, str]]: ...
    @property
    def witnesses(self) -> Sequence[Any]: ...


Refuter = Callable[[Problem, Derivation], "RefutationResult | None"]


@dataclass(frozen=True)
class NotRun:
    """A refutation that did not take place; ``reason`` says why."""

    reason: str
    outcome: str = "impossible"
    kind: str = ""
    output: str = ""
    difference: Any = None
    sizes: str = "captured"
    vectors: tuple[Mapping[str, int], ...] = ()
    diverging: tuple[DivergenceLike, ...] = ()
    assumptions: tuple[tuple[str, str, str], ...] = ()
    witnesses: tuple[Any, ...] = ()


@dataclass(frozen=True)
class NodeEvidence:
    """What a reference node rests on.

    Attributes:
        level: of :data:`EVIDENCE`. kind: of :data:`KINDS_OF_REST`, "" where it is proved.
        causes: laws, rules and definitions of that level that its step needs; of rules that make tensors equal, all that
            matched on the side and may be needed.
    """

    level: str
    kind: str = ""
    causes: tuple[str, ...] = ()


@dataclass
class Finding:
    """Where two graphs part, or what else deserves attention.

    Attributes:
        kind: a diagnosis, ``DIVERGES`` (executed values differ here) or ``UNPROVED`` (nothing was derived here).
        severity: ``error``, ``warning`` or ``note``.
        implementation_nodes: ``RANK:NAME``.
        reference_source, implementation_source: ``file:line``, None where the capture had none.
        found, expected: alignments or values, for people.
    """

    kind: str
    severity: str
    message: str
    reference_nodes: list[str] = field(default_factory=list)
    reference_source: str | None = None
    implementation_nodes: list[str] = field(default_factory=list)
    implementation_source: str | None = None
    found: str | None = None
    expected: str | None = None
    hint: str | None = None


@dataclass
class Assumption:
    """Something a verdict takes for granted."""

    name: str
    where: str
    why: str


@dataclass
class InputRelation:
    """A given relation. ``origin``: ``given``, ``placement``, ``values`` or ``name``."""

    reference: str
    implementation: str
    alignment: str
    origin: str
    place: str = ""


@dataclass
class Output:
    """A claimed output: the derived alignment (None when there is none) against the expected one.

    Attributes:
        proved: the derived alignment is the expected one.
        label: the program's own name for the output, where the capture knows it.
    """

    reference: str
    implementation: list[str]
    alignment: str | None
    expected: str
    evidence: str | None = None
    proved: bool = False
    label: str | None = None


@dataclass
class Counterexample:
    """An executed difference. ``file``: relative to the report, empty until it is saved."""

    seed: int
    output: str
    max_abs_diff: float
    sizes: str
    file: str = ""


@dataclass
class PairError:
    """An input error of a pair. ``internal``: the fault is Emerge's own."""

    message: str
    place: str = ""
    internal: bool = False


@dataclass
class PairResult:
    """Everything about one pair; the fields of ``report.json`` (docs/report.md).

    Attributes:
        verdict: None when there is an ``error``.
        coverage: evidence -> number of reference nodes; ``coverage_rest``: what those that are not proved rest on, by kind;
            ``coverage_by``: the same by law. ``node_evidence`` by node, not part of the report.
        failed_on: kinds of findings that the campaign file counts as failures of this pair.
        sources: paths the pair was read from, for ``emerge replay``.
        payload: the refutation behind the counterexample, to be saved; not part of the report.
        seconds: by stage.
    """

    id: str = ""
    verdict: str | None = None
    evidence: str | None = None
    expect: str = "equivalent"
    reason: str = ""
    error: PairError | None = None
    assumptions: list[Assumption] = field(default_factory=list)
    mesh: dict[str, int] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)
    substitutions: list[Any] = field(default_factory=list)
    input_relations: list[InputRelation] = field(default_factory=list)
    outputs: list[Output] = field(default_factory=list)
    outputs_not_claimed: int = 0
    unmatched: dict[str, list[str]] = field(default_factory=lambda: {"reference": [], "implementation": []})
    findings: list[Finding] = field(default_factory=list)
    counterexample: Counterexample | None = None
    rules_used: dict[str, int] = field(default_factory=dict)
    rules_synthesised: list[str] = field(default_factory=list)
    coverage: dict[str, int] = field(default_factory=dict)
    coverage_rest: dict[str, int] = field(default_factory=dict)
    coverage_by: dict[str, int] = field(default_factory=dict)
    node_evidence: dict[str, NodeEvidence] = field(default_factory=dict)
    stats: dict[str, int] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    engine: tuple[str, str] = ("", "")
    failed_on: list[str] = field(default_factory=list)
    sources: dict[str, str] = field(default_factory=dict)
    payload: Any = None

    @property
    def is_error(self) -> bool:
        """True when the pair has no verdict."""
        return self.error is not None

    def as_expected(self) -> bool:
        """Does the verdict meet ``expect``?"""
        return (self.verdict == EQUIVALENT) == (self.expect == "equivalent") and self.verdict not in (None, UNKNOWN)
