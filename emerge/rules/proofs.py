"""Decides derived facts on symbolic elements, and says which laws hold for all elements where they fired.

The statements are those of :mod:`emerge.rules.statements`; the values are symbolic (:mod:`emerge.rules.symbolic`). A
fact is *shown* when its two sides are the same symbolic elements. Elements that differ refute nothing, for a function
about which nothing is known may still satisfy the fact: the fact is *open*. A law is open when a fact that it gives out
of shown facts is open.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

from emerge.engine.derivation import Fact, Instance
from emerge.facts.mesh import Mesh
from emerge.relate.derive import Derivation
from emerge.rules.elements import Elements
from emerge.rules.examine import CHECKED, fact_text
from emerge.rules.pair import Pair, distribute
from emerge.rules.statements import TRUE, Outcome, Statements, _extents
from emerge.rules.symbolic import OperatorFacts, SymbolicValues

#: Classes of operators for which ``docs/proofs.md`` argues that small sizes stand for all.
CLASSES = ("parallel", "reduction", "linear", "collective", "layout", "statement", "scale", "order", "written")
#: The class of claims about kinds of bodies: what a kind computes is written out, and the claim proved for all extended reals.
WRITTEN = "written"
#: Raised when symbolic elements change their meaning; certificates of laws with an argument are void then.
PROOF_VERSION = 1
#: Relations whose statements symbolic elements can decide.
DECIDED = ("aligned", "axis_at", "admitted", "same")
#: Relation names of facts that are input and may be false without a law being at fault.
_GIVEN = "same"


class SymbolicStatements(Statements):
    """Decides facts of one derivation on symbolic inputs."""

    def __init__(self, derivation: Derivation, pair: Pair) -> None:
        import torch

        self._setup(derivation)
        self.elements = Elements()
        problem, mesh = derivation.problem, Mesh(pair.mesh)
        given = {
            i.name: self._inputs(i.name, [int(n) for n in i.shape]) for i in pair.reference.inputs
        }
        inputs = distribute(pair, given)
        for rank, held in enumerate(inputs):
            for name, value in held.items():
                # what no statement covers is anything
                for k in (value.reshape(-1) == 0).nonzero().reshape(-1).tolist():
                    value.view(-1)[k] = self.elements.free("padding", rank, name, k)
        facts = OperatorFacts(derivation.base, _linear_operators(derivation))
        self.symbolic = {
            1: SymbolicValues(self.lowered, derivation.reference, problem.reference, self.elements, Mesh({}), facts,
                              [given], pair),
            2: SymbolicValues(self.lowered, derivation.implementation, problem.implementation, self.elements, mesh, facts,
                              inputs, pair),
        }  # fmt: skip
        self.values = {**self.symbolic}
        self._torch = torch

    def _inputs(self, name: str, shape: list[int]) -> Any:
        import torch

        count = 1
        for n in shape:
            count *= n
        ids = [self.elements.free(name, k) for k in range(count)]
        return torch.tensor(ids, dtype=torch.int64).reshape(shape)

    def check(self, relation: str, args: tuple[Any, ...]) -> Outcome:
        """Decides one fact: True, or None with the reason."""
        if relation not in DECIDED:
            return Outcome(None, f"{OUTSIDE}{relation} speaks about the numbers of an index")
        outcome = super().check(relation, args)
        if outcome.holds is None and not outcome.detail.startswith(OUTSIDE):
            return Outcome(None, OUTSIDE + outcome.detail)
        return outcome

    def equal(self, reference: Any, found: Any, amount: Any) -> Outcome:
        """Element by element; large elements that differ are outside."""
        left, right = self._torch.broadcast_tensors(reference, found)
        for at in (left != right).reshape(-1).nonzero().reshape(-1).tolist():
            one, other = int(left.reshape(-1)[at]), int(right.reshape(-1)[at])
            if not self.elements.agree(one, other):
                if self.elements.cut(one) or self.elements.cut(other):
                    return Outcome(None, f"{OUTSIDE}its elements are large")
                return Outcome(False, f"{self.elements.text(one)} against {self.elements.text(other)}")
        return TRUE

    def agrees(
        self, target: Any, whole: Any, reduced: list[int], reduction: str, permutation: list[int], scale: Fraction
    ) -> Outcome:
        """As on numbers."""
        if reduced:
            kept = [k for k in range(whole.dim()) if k not in reduced]
            rows = whole.permute([*kept, *reduced]).reshape([*(whole.shape[k] for k in kept), -1])
            whole = self.symbolic[2].reduced(reduction, rows)
        whole = whole.permute(permutation)
        wrong = _extents(target, whole)
        if wrong is not None:
            return wrong
        if scale != 1:
            flat = [self.elements.scaled(e, scale) for e in whole.reshape(-1).tolist()]
            whole = self._torch.tensor(flat, dtype=self._torch.int64).reshape(whole.shape)
        return self.equal(target.reshape([*target.shape, *[1] * (whole.dim() - target.dim())]), whole, whole)


def _linear_operators(derivation: Derivation) -> dict[str, int]:
    """Kind -> operands that rule files state a described operator to be linear in (``operator_linear``)."""
    log = derivation.result.log
    found: dict[str, int] = {}
    for clause in () if log is None else log.program.clauses:
        if clause.head.name == "operator_linear" and not clause.body:
            op, output, mask = (getattr(a, "value", None) for a in clause.head.args)
            found[f"{op}#{output}"] = int(str(mask))
    return found


#: How the reason of a fact that symbolic elements cannot speak about starts.
OUTSIDE = "outside: "


@dataclass
class Proof:
    """What symbolic elements say about one pair.

    Attributes:
        shown: law -> instances behind shown facts, all of whose premises are shown.
        open: law -> reason of a fact that it gives out of shown facts and that is not shown.
        outside: law -> reasons of such facts about operators that are no subject of symbolic elements -> how often.
    """

    shown: Counter[str] = field(default_factory=Counter)
    open: dict[str, str] = field(default_factory=dict)
    outside: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))


def prove_pair(pair: Pair, derivation: Derivation, relations: Iterable[str] = CHECKED) -> Proof:
    """Decides the facts of a pair's derivation on symbolic elements.

    Args:
        derivation: of ``pair``, with its log.
    """
    log = derivation.result.log
    assert log is not None
    statements = SymbolicStatements(derivation, pair)
    outcomes = {
        Fact(relation, args): statements.check(relation, args)
        for relation in relations
        for args in sorted(derivation.result.relations[relation], key=repr)
    }
    supported = _supported(list(log.instances()), outcomes, log.logged_relations)
    by_head: dict[Fact, list[Instance]] = defaultdict(list)
    for instance in supported:
        by_head[instance.head].append(instance)
    out = Proof()
    every = set(outcomes)
    out.shown = _laws([f for f, o in outcomes.items() if o.holds], by_head, every)
    for fact, outcome in outcomes.items():
        if outcome.holds or fact.relation == _GIVEN:
            continue
        for law in _laws([fact], by_head, every):
            if outcome.detail.startswith(OUTSIDE):
                out.outside[law][outcome.detail[len(OUTSIDE) :]] += 1
            else:
                out.open.setdefault(law, f"{fact_text(derivation, fact)} on pair [{pair.name}]: {outcome.detail}")
    return out


def _supported(
    instances: list[Instance], outcomes: dict[Fact, Outcome], logged: frozenset[str]
) -> list[Instance]:
    """Instances whose premises all hold for all elements, or follow from such without a statement of their own."""
    users: dict[Fact, list[int]] = defaultdict(list)
    waiting = []
    for k, instance in enumerate(instances):
        needed = {p for p in instance.premises if p in outcomes or p.relation in logged}
        waiting.append(len(needed))
        for p in needed:
            users[p].append(k)
    done: set[Fact] = set()
    work = [f for f, o in outcomes.items() if o.holds]
    ready = [k for k, n in enumerate(waiting) if n == 0]
    supported: list[Instance] = []

    def settle(fact: Fact) -> None:
        if fact in done:
            return
        done.add(fact)
        for k in users[fact]:
            waiting[k] -= 1
            if waiting[k] == 0:
                ready.append(k)

    for fact in work:
        settle(fact)
    while ready:
        instance = instances[ready.pop()]
        supported.append(instance)
        if instance.head not in outcomes:
            settle(instance.head)
    return supported


def _laws(facts: list[Fact], by_head: dict[Fact, list[Instance]], checked: set[Fact]) -> Counter[str]:
    """Law -> its instances between facts and the statements they come from."""
    found: Counter[str] = Counter()
    work, seen = list(facts), set(facts)
    while work:
        for instance in by_head.get(work.pop(), ()):
            if instance.clause.law:
                found[instance.clause.law] += 1
            for p in instance.premises:
                if p not in seen and p not in checked:
                    seen.add(p)
                    work.append(p)
    return found
