"""Where a derivation stopped: the part of the frontier that unproved outputs need, with both source lines."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from functools import cached_property
from typing import Any

from emerge.facts.base import IMPLEMENTATION, REFERENCE
from emerge.facts.families import FamilyGraph, FamilyNode
from emerge.facts.lower import Lowering, Tensor
from emerge.relate.alignment_text import Alignments, Partner
from emerge.relate.derive import Derivation
from emerge.verdict.types import DivergenceLike, Finding

#: Findings listed per pair; the rest is counted in the last one's hint.
MOST_FINDINGS = 20


class Structure:
    """The lowered graphs as operators and operands, with what was derived about them."""

    def __init__(self, derivation: Derivation) -> None:
        self.derivation = derivation
        self.alignments = Alignments(derivation)
        facts = derivation.base.facts
        native = {o for (o,) in facts["op_native"]}
        self.result_of: dict[int, int] = {}
        self.op_of: dict[int, int] = {}
        self.body: dict[int, str] = {}
        for o, v, body, _ in facts["op"]:
            if o in native:
                self.result_of[o], self.op_of[v], self.body[o] = v, o, body
        self.operands: dict[int, list[int]] = defaultdict(list)
        self.uses: dict[int, list[int]] = defaultdict(list)
        for o, _, a in sorted(facts["op_arg"]):
            if o in native:
                self.operands[o].append(self.root(a))
                self.uses[self.root(a)].append(o)
        self.side_of = dict(facts["value"])
        self.matched = {p.implementation for partners in self.alignments.partners.values() for p in partners}
        #: Longest chain of operators from the inputs; operators are numbered after their operands.
        self.depths: dict[int, int] = {}
        for o in sorted(self.result_of):
            self.depths[self.result_of[o]] = 1 + max((self.depths.get(a, 0) for a in self.operands[o]), default=-1)

    def root(self, tensor: int) -> int:
        """The tensor that ``tensor`` is a rearrangement of, also where no axes were derived."""
        return self.alignments.root.get(tensor, tensor)

    def aligned(self, root: int) -> bool:
        """Has a reference root any alignment?"""
        return root in self.alignments.partners

    def cone(self, tensors: Iterable[int], stop_at_aligned: bool = False) -> tuple[list[int], set[int]]:
        """(operators, roots) reached backwards from ``tensors``."""
        ops: list[int] = []
        seen: set[int] = set()
        work = [self.root(t) for t in tensors]
        while work:
            root = work.pop()
            if root in seen:
                continue
            seen.add(root)
            op = self.op_of.get(root)
            if op is None or (stop_at_aligned and self.aligned(root)):
                continue
            ops.append(op)
            work.extend(self.operands[op])
        return ops, seen

    def node_cone(self, side: int, numbers: Iterable[int]) -> set[str]:
        """Names of all nodes and inputs that the claims ``numbers`` read, by the graph itself."""
        graph = self.family(side)
        seen: set[str] = set()
        claims = [self.derivation.claims[g] for g in numbers]
        work = [c.reference.name if side == REFERENCE else c.implementation.name for c in claims]
        while work:
            name = work.pop()
            if name in seen:
                continue
            seen.add(name)
            value = graph.value(name)
            if isinstance(value, FamilyNode):
                work.extend(value.refs())
        return seen

    def claim_tensors(self, number: int) -> tuple[int, int]:
        """Reference and implementation tensor of a claim."""
        return next((s, d) for g, s, d in self.derivation.base.facts["expected"] if g == number)

    # ---- nodes ------------------------------------------------------------------------------------------------------

    def lowering(self, side: int) -> Lowering:
        return self.alignments.side(side)

    def family(self, side: int) -> FamilyGraph:
        problem = self.derivation.problem
        return problem.reference if side == REFERENCE else problem.implementation

    def node_name(self, side: int, op: int) -> str:
        """Node an operator came from; for auxiliary operators the first node that uses them, "" when there is none."""
        low = self.lowering(side)
        seen: set[int] = set()
        work = [op]
        while work:
            o = work.pop(0)
            if o in seen:
                continue
            seen.add(o)
            name = low.op_node.get(o, "") or next(iter(low.nodes_of.get(self.result_of[o], [])), "")
            if name:
                return name
            work.extend(self.uses.get(self.result_of[o], []))
        return ""

    def node(self, side: int, name: str) -> FamilyNode | None:
        """The node of a name, None for inputs and auxiliary tensors."""
        try:
            value = self.family(side).value(name)
        except KeyError:
            return None
        return value if isinstance(value, FamilyNode) else None

    def source(self, side: int, name: str) -> str | None:
        node = self.node(side, name)
        return node.source if node is not None and node.source else None

    def members(self, name: str) -> list[str]:
        """``RANK:NAME`` of every member of an implementation family."""
        try:
            value = self.family(IMPLEMENTATION).value(name)
        except KeyError:
            return [name]
        return [f"{rank}:{member}" for rank, member in sorted(value.members.items())]

    def family_name(self, rank: int, member: str) -> str:
        """The family that holds a node of one rank; the node's own name where there is none."""
        try:
            return self.family(IMPLEMENTATION).family_of(rank, member)
        except (KeyError, IndexError):
            return member

    # ---- the frontier -----------------------------------------------------------------------------------------------

    def frontier(self, numbers: Iterable[int]) -> list[int]:
        """Reference operators without alignment, operands aligned, that the unproved claims ``numbers`` need."""
        known = {o for o, _ in self.derivation.result.relations["frontier"]}
        order = {n.name: i for i, n in enumerate(self.derivation.problem.reference.nodes)}
        ops, _ = self.cone([self.claim_tensors(g)[0] for g in numbers], stop_at_aligned=True)
        found = [o for o in dict.fromkeys(ops) if o in known]
        # What an aligned value was computed from is not where things part.
        found = [o for o in found if self.result_of[o] not in self.supporting] or found
        # A constant without a counterpart says little when an operator with operands stopped too.
        found = [o for o in found if self.operands[o]] or found
        # Index arithmetic that is understood as a function of an index has no partner by design: an operator that
        # reads nothing else is open because its other operands are.
        found = [o for o in found if not self.operands[o] or any(map(self.aligned, self.operands[o]))] or found
        # Operators with an operand that is read as an index function, not aligned itself, come last.
        open_ops = {o for o in found if not all(self.aligned(a) for a in self.operands[o])}
        return sorted(found, key=lambda o: (o in open_ops, order.get(self.node_name(REFERENCE, o), 0), o))

    @cached_property
    def supporting(self) -> set[int]:
        """Reference tensors without an alignment that an aligned one was computed from."""
        return {v for (v,) in self.derivation.result.relations.get("supports", ())}

    def supports(self, name: str) -> bool:
        """Whether a reference node is such a tensor."""
        tensor = self.lowering(REFERENCE).tensors.get(name)
        low = self.lowering(REFERENCE)
        return isinstance(tensor, Tensor) and low.innermost(tensor).id in self.supporting

    def counterparts(self, op: int) -> list[int]:
        """Implementation operators where the counterpart of reference operator ``op`` was to be found, best first.

        They consume what the operands of ``op`` are aligned to and have no alignment themselves. First the direct
        consumers of the operand farthest from the inputs, then the operators of the same body.
        """
        partners = [{p.implementation for p in self.alignments.partners.get(a, ())} for a in self.operands[op]]
        if not partners:
            return []
        lead = max(range(len(partners)), key=lambda k: (self.depth(self.operands[op][k]), -k))
        score: dict[int, tuple[int, int, int]] = {}
        for group in partners:
            for d in group:
                for o in self.uses.get(d, ()):
                    if self.side_of.get(self.result_of[o]) == IMPLEMENTATION and self.result_of[o] not in self.matched:
                        hits = sum(any(x in g for x in self.operands[o]) for g in partners)
                        on_lead = any(x in partners[lead] for x in self.operands[o])
                        score[o] = (int(on_lead), int(self.body[o] == self.body[op]), hits)
        if not score:
            return []
        best = max(score.values())
        found = sorted(o for o, s in score.items() if s == best)[:2]
        same = sorted(o for o, s in score.items() if s[1] and o not in found)[:1]
        return found + same

    def depth(self, root: int) -> int:
        """Longest chain of operators from the inputs."""
        return self.depths.get(root, 0)

    def operand_texts(self, op: int) -> list[str]:
        """Alignments of the operands of a reference operator."""
        texts = []
        low = self.lowering(REFERENCE)
        for root in dict.fromkeys(self.operands[op]):
            names = low.nodes_of.get(root, [])
            partners = self.alignments.partners.get(root, [])
            if not partners and names:
                texts.append(f"{names[0]} is understood as a function of an index")
            for partner in partners[:3]:
                texts.append(self.alignments.pair_text(names[0], partner) if names else self._aux_text(partner))
        return texts

    def _aux_text(self, partner: Partner) -> str:
        return (
            f"an auxiliary tensor: {self.alignments.text(partner.reference, partner.implementation, partner.relation)}"
        )


def frontier_findings(structure: Structure, numbers: list[int], kind: str, severity: str) -> list[Finding]:
    """One finding per frontier node that the unproved claims need."""
    findings = []
    merged: dict[str, list[int]] = {}
    for op in structure.frontier(numbers):
        merged.setdefault(structure.node_name(REFERENCE, op), []).append(op)
    depths = {name: min(structure.depth(structure.result_of[o]) for o in ops) for name, ops in merged.items()}
    for name, ops in merged.items():
        # Only what parts first is to blame for a refuted pair; the rest may follow from it.
        later = severity == "error" and depths[name] > min(depths.values())
        findings.append(_frontier_finding(structure, name, ops, kind, "note" if later else severity))
    if len(findings) > MOST_FINDINGS:
        rest = len(findings) - MOST_FINDINGS
        findings = findings[:MOST_FINDINGS]
        findings[-1].hint = f"{rest} more nodes of the frontier are not listed"
    return findings


def _frontier_finding(structure: Structure, name: str, ops: list[int], kind: str, severity: str) -> Finding:
    node = structure.node(REFERENCE, name)
    label = f"{name!r} ({node.op})" if node is not None else f"{name!r}"
    imp_ops = [o for op in ops for o in structure.counterparts(op)]
    imp_names = [n for n in dict.fromkeys(structure.node_name(IMPLEMENTATION, o) for o in imp_ops) if n]
    unknown = structure.lowering(REFERENCE).unknown.get(name)
    texts = [t for op in ops for t in structure.operand_texts(op)]
    hint: str | None = None
    if unknown:
        message = f"reference node {label} has no semantics here: {unknown}"
        hint = "add an operator signature for it" if "has no signature" in unknown else None
    elif imp_names:
        imp = structure.node(IMPLEMENTATION, imp_names[0])
        shown = f"{imp_names[0]!r} ({imp.op})" if imp is not None else repr(imp_names[0])
        message = (
            f"the operands of reference node {label} are aligned and its result is not; "
            f"nearest on the implementation side is {shown}"
        )
        missing = structure.lowering(IMPLEMENTATION).unknown
        hint = next((f"{n!r} has no semantics here: {missing[n]}" for n in imp_names if n in missing), None)
    else:
        message = (
            f"the operands of reference node {label} are aligned and its result is not; "
            "no implementation operator uses their counterparts"
        )
    return Finding(
        kind,
        severity,
        message,
        [name] if name else [],
        structure.source(REFERENCE, name),
        [m for n in imp_names for m in structure.members(n)],
        next((s for n in imp_names if (s := structure.source(IMPLEMENTATION, n))), None),
        found="; ".join(dict.fromkeys(texts)) or "no operands",
        expected=f"an implementation value aligned with {name!r}",
        hint=hint,
    )


def diverging_finding(structure: Structure, divergence: DivergenceLike, output: str, first: bool) -> Finding:
    """A node whose executed values differ while those of its operands agree; a note where others come before it."""
    reference, implementation = divergence.reference, divergence.implementation
    families = list(dict.fromkeys(structure.family_name(rank, name) for rank, name in sorted(implementation.items())))
    node = structure.node(REFERENCE, reference)
    left = f"{reference!r} ({node.op})" if node is not None else repr(reference)
    imp = structure.node(IMPLEMENTATION, families[0]) if families else None
    right = "no implementation value"
    if families:
        right = f"{families[0]!r} ({imp.op})" if imp is not None else repr(families[0])
    ops = [o for o, n in structure.lowering(REFERENCE).op_node.items() if n == reference and o in structure.result_of]
    texts = [t for op in ops for t in structure.operand_texts(op)]
    made_by = list(dict.fromkeys(structure.family_name(rank, name) for rank, name in sorted(divergence.cause.items())))
    message = (
        f"executed values of reference node {left} and {right} differ while their operands agree "
        f"(seen at output {output!r})"
    )
    near = [] if families or made_by else _nearest(structure, ops)
    if near:
        nearest = structure.node(IMPLEMENTATION, near[0])
        message += f"; nearest is {near[0]!r}" + (f" ({nearest.op})" if nearest is not None else "")
    if made_by:
        cause = structure.node(IMPLEMENTATION, made_by[0])
        message += f"; what differs comes from {made_by[0]!r}" + (f" ({cause.op})" if cause is not None else "")
    return Finding(
        "DIVERGES",
        "error" if first else "note",
        message,
        [reference, *divergence.also],
        structure.source(REFERENCE, reference),
        [f"{r}:{n}" for nodes in (divergence.cause, implementation) for r, n in sorted(nodes.items())]
        + [m for n in near for m in structure.members(n)],
        next((s for f in (*made_by, *families, *near) if (s := structure.source(IMPLEMENTATION, f))), None),
        found="; ".join(dict.fromkeys(texts)) or None,
        expected=f"an implementation value aligned with {reference!r}",
    )


def _nearest(structure: Structure, ops: Iterable[int]) -> list[str]:
    """The one implementation node that uses what the operands of reference operators are aligned to."""
    found = {structure.node_name(IMPLEMENTATION, o) for op in ops for o in structure.counterparts(op)} - {""}
    return sorted(found) if len(found) == 1 else []


def execution_finding(structure: Structure, kind: str, message: str, nodes: Iterable[tuple[int, str]]) -> Finding:
    """What an execution found by itself: ranks that wait for each other, memory read before it was written."""
    listed = sorted(nodes)
    families = [structure.family_name(rank, name) for rank, name in listed]
    return Finding(
        kind,
        "error",
        message,
        implementation_nodes=[f"{rank}:{name}" for rank, name in listed],
        implementation_source=next((s for f in families if (s := structure.source(IMPLEMENTATION, f))), None),
    )


def diagnosis_kinds(derivation: Derivation) -> dict[str, tuple[str, Any]]:
    """Reference node -> (kind, reason) from the relation ``diagnosis`` of the rule base, where it has one."""
    rows = derivation.result.relations.get("diagnosis", set())
    out: dict[str, tuple[str, Any]] = {}
    for row in sorted(rows, key=repr):
        op, kind = row[0], row[1]
        name = derivation.reference.op_node.get(op, "")
        if name:
            out.setdefault(name, (str(kind), row[2] if len(row) > 2 else ""))
    return out
