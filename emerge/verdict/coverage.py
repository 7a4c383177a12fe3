"""How many reference nodes behind the proved claims rest on laws of which evidence, and what the others rest on.

One derivation of the claims is cut into steps at the alignments of the nodes. A node counts with the weakest step that gives
one of its alignments in that derivation: the laws, equal tensors and definitions between them and the alignments of other
nodes. What those rest on is counted at their nodes, so one tested look-up at the bottom of a model does not hide what the
layers above it are. (The evidence of a verdict is another figure: the weakest of everything.)
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence

from emerge.algebra.rulefile import rules_of
from emerge.engine.derivation import DerivationLog, Fact, LastStep, Levels
from emerge.facts.base import REFERENCE
from emerge.facts.lower import Lowering, Tensor
from emerge.util.resources import resource_dir
from emerge.verdict.localize import Structure
from emerge.verdict.types import EVIDENCE, KINDS_OF_REST, NodeEvidence, PairResult

#: Shipped files whose laws speak about the numbers of an index: look-ups, ranges, routing.
INDEX_LAWS = ("datalog/analysis/index.dl", "datalog/analysis/routing.dl")
INDEX_RULES = "index.egg"
#: Laws of other files that do.
INDEX_FORMS = frozenset({"form-lookup", "form-padded-lookup", "form-masked-lookup"})


def node_evidence(
    structure: Structure, claims: Mapping[int, str], numbers: Levels, levels: Mapping[str, str]
) -> dict[str, NodeEvidence]:
    """Evidence of every reference node in the cone of the claims.

    Args:
        claims: proved claims with their evidence.
        numbers: numbers of the evidence of laws and equal tensors; not read without a derivation log.
        levels: evidence of definitions of kernels and signatures, by name.
    """
    worst = max(EVIDENCE.index(e) for e in claims.values())
    names = [n for n in structure.node_cone(REFERENCE, claims) if structure.node(REFERENCE, n) is not None]
    log = structure.derivation.result.log
    if log is None:
        return dict.fromkeys(names, NodeEvidence(EVIDENCE[worst]))
    steps = _by_step(structure, log, names, claims, numbers, levels)
    sides = _Names(structure, log, levels)
    return {name: sides.evidence(steps.get(name, LastStep(worst, frozenset()))) for name in names}


def cover(result: PairResult, nodes: Iterable[NodeEvidence]) -> None:
    """Counts nodes into the coverage of a result."""
    listed = list(nodes)
    by = Counter(name for n in listed for name in n.causes)
    result.coverage = {level: sum(n.level == level for n in listed) for level in EVIDENCE}
    result.coverage_rest = {kind: sum(n.kind == kind for n in listed) for kind in KINDS_OF_REST}
    result.coverage_by = dict(sorted(by.items(), key=lambda item: (-item[1], item[0])))


def _by_step(
    structure: Structure, log: DerivationLog, names: Sequence[str], claims: Mapping[int, str], numbers: Levels,
    levels: Mapping[str, str],
) -> dict[str, LastStep]:  # fmt: skip
    low, other = structure.derivation.reference, structure.derivation.implementation
    tensors = {n: t for n in names if isinstance(t := low.tensors.get(n), Tensor)}
    steps: dict[int, LastStep] = {}

    def add(tensor: int, step: LastStep) -> None:
        steps[tensor] = _weaker(step, steps.get(tensor))

    ranked = log.best_level("output_proved", numbers)
    goals = [min((f for f in ranked if f.args[0] == g), key=lambda f: (ranked[f], repr(f))) for g in sorted(claims)]
    contracts: dict[int, set[str]] = defaultdict(set)
    for _, tensor, name in other.defined:
        contracts[structure.root(tensor)].add(name)
    # inputs end a step too: what their alignments rest on is no part of the steps above them
    inside = structure.node_cone(REFERENCE, claims)
    roots = {structure.root(t.id) for n in inside if isinstance(t := low.tensors.get(n), Tensor)}
    for fact, step in log.last_steps(goals, "aligned", numbers, roots).items():
        if fact.relation != "aligned":
            add(structure.root(structure.claim_tensors(fact.args[0])[0]), step)
            continue
        reference = fact.args[0]
        add(reference, step)
        # the tensor of a kernel without a lowering of its own is what the kernel's definition says
        for implementation in {f.args[1] for f in (fact, *step.passed)}:
            for name in contracts.get(implementation, ()):
                add(reference, _named(name, levels))
            law = other.signature_law.get(other.op_of.get(implementation, -1))
            if law is not None:
                add(reference, _named(law, levels))
    own: dict[str, list[LastStep]] = defaultdict(list)
    for user, _, name in low.defined:
        own[user].append(_named(name, levels))
    for op, law in low.signature_law.items():
        own[low.op_node.get(op, "")].append(_named(law, levels))
    layout = _layout(log, {t.id for t in tensors.values()}, numbers)
    readers: dict[str, list[str]] = defaultdict(list)
    for name in names:
        node = structure.node(REFERENCE, name)
        for read in set(node.refs()) if node is not None else ():
            if structure.node(REFERENCE, read) is not None:
                readers[read].append(name)
    found: dict[str, LastStep] = {}
    for name in _readers_first(names, readers):
        value = tensors.get(name)
        if value is None or structure.root(value.id) not in steps:
            # no alignment of its own is used: what reads it was aligned over its head
            above = [found[r] for r in readers[name] if r in found]
        else:
            above = [steps[structure.root(value.id)], *own[name], *([layout[value.id]] if value.id in layout else [])]
        if above:
            found[name] = above[0]
            for more in above[1:]:
                found[name] = _weaker(found[name], more)
    return found


def _layout(log: DerivationLog, tensors: set[int], numbers: Levels) -> dict[int, LastStep]:
    """The weakest steps by which axes of tensors were named, where those are not all proved."""
    weak = [f for f, level in log.best_level("axis_at", numbers).items() if level and f.args[0] in tensors]
    found: dict[int, LastStep] = {}
    for fact, step in log.last_steps(weak, "axis_at", numbers).items() if weak else ():
        found[fact.args[0]] = _weaker(step, found.get(fact.args[0]))
    return found


class _Names:
    """What the causes of a step are called, and of which kind they are."""

    def __init__(self, structure: Structure, log: DerivationLog, levels: Mapping[str, str]) -> None:
        self.levels = levels
        self.sides = dict(structure.derivation.base.facts["value"])
        self.lowerings = {k: structure.lowering(k) for k in set(self.sides.values())}
        index_files = [resource_dir(f.partition("/")[0]) / f.partition("/")[2] for f in INDEX_LAWS]
        files = {str(f.resolve()) for f in index_files}
        laws = {c.law for c in log.program.clauses if c.law is not None and c.pos.file in files}
        self.index = laws | INDEX_FORMS | {r.name for r in rules_of(resource_dir("rules") / INDEX_RULES)}
        self.definitions = {
            name for low in self.lowerings.values()
            for name in (*(n for _, _, n in low.defined), *(f.definition for f in low.forms), *low.signature_law.values())
        }  # fmt: skip

    def evidence(self, step: LastStep) -> NodeEvidence:
        """A step in words."""
        level = EVIDENCE[step.level]
        if not step.level:
            return NodeEvidence(level)
        named = {c for c in step.causes if isinstance(c, str)}
        matched: set[str] = set()
        for c in step.causes:
            if isinstance(c, Fact):
                matched |= self._matched(self.lowerings[self.sides[c.args[0]]], level)
        causes = named | matched
        if causes - self.definitions - self.index or not causes:
            kind = "other_laws"
        elif named & self.definitions or not causes & self.index:
            kind = "kernel_contracts"
        else:
            kind = "index_operators"
        return NodeEvidence(level, kind, tuple(sorted(causes)))

    def _matched(self, low: Lowering, level: str) -> set[str]:
        """Rules and definitions of a level, one of which made tensors of a side equal."""
        rules = low.extension.fired if low.extension is not None else ()
        return {n for n in (*rules, *(f.definition for f in low.forms)) if self.levels.get(n, "tested") == level}


def _named(name: str, levels: Mapping[str, str]) -> LastStep:
    level = EVIDENCE.index(levels.get(name, "tested"))
    return LastStep(level, frozenset([name] if level else []))


def _weaker(a: LastStep, b: LastStep | None) -> LastStep:
    """The weaker one of two steps that are both needed, with what makes it so."""
    if b is None or a.level > b.level:
        return a
    return LastStep(a.level, a.causes | b.causes, a.passed | b.passed) if a.level == b.level else b


def _readers_first(names: Sequence[str], readers: Mapping[str, list[str]]) -> list[str]:
    """Names in an order in which a node comes after all that read it."""
    waiting = {n: len(readers[n]) for n in names}
    reads: dict[str, list[str]] = defaultdict(list)
    for name in names:
        for reader in readers[name]:
            reads[reader].append(name)
    ready = [n for n in names if not waiting[n]]
    for name in ready:
        for read in reads[name]:
            waiting[read] -= 1
            if not waiting[read]:
                ready.append(read)
    return ready
