"""Synthesises rules for a pair whose derivation falls short and whose execution shows no difference."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

from emerge.algebra.rulefile import App, EqualityRule, rules_of
from emerge.facts.base import IMPLEMENTATION, REFERENCE
from emerge.facts.lower import Lowering, Tensor
from emerge.graph.model import is_floating
from emerge.relate.derive import Derivation, Problem
from emerge.rules.certify import Refusal
from emerge.rules.equalities import VALIDATION, EqualityCertificate, Validation, confirm
from emerge.synthesis.exchange import laws
from emerge.synthesis.generalise import Proposal, Side, inner, is_instance, of_law, proposals, reverse, stands_for
from emerge.synthesis.implied import implied
from emerge.synthesis.places import Operators, places
from emerge.synthesis.sketches import casts
from emerge.synthesis.store import Store, as_rule, validate
from emerge.synthesis.terms import constructors
from emerge.synthesis.values import Executed, Matching, alike, distinct, match
from emerge.util.errors import EmergeError

#: So many implementation tensors are tried for a reference tensor, and so many reference tensors in a round.
MOST_PARTNERS, MOST_GOALS = 4, 200
#: So many reference tensors whose values an implementation tensor holds are taken apart in a round, and so many places of
#: neighbouring operators.
MOST_APART, MOST_PLACES = 8, 40
#: A rule that matches at one place is confirmed on at least so many other tensors.
LEAST_OTHERS = 3


@dataclass
class Synthesis:
    """What one round gave.

    Attributes:
        rules: new rules, validated and kept. refused: (meaning, reason) of proposals that are no rules.
        goals: reference tensors without alignment whose operands lead to aligned ones; ``matched``: those of them with a
            partner by value.
        stopped: why it ended early, or "".
    """

    rules: list[str] = field(default_factory=list)
    refused: list[tuple[str, str]] = field(default_factory=list)
    goals: int = 0
    matched: int = 0
    stopped: str = ""


class Synthesiser:
    """Looks for rules over several rounds of one pair; keeps what was tried.

    Args:
        store: where rules go. known: names of rules that are loaded already; ``loaded``: those that are used, from ``files``.
        seconds: budget over all rounds, of this process's time on a processor, so that what is found does not depend on
            what else the machine does. left: seconds left of the pair's own limit.
    """

    def __init__(
        self, store: Store, known: Iterable[str], seconds: float, seed: int = 0, loaded: Sequence[EqualityRule] = (),
        validation: Validation = VALIDATION, left: Callable[[], float | None] = lambda: None,
        files: Sequence[Path] = (),
    ) -> None:  # fmt: skip
        self.left, self.files = left, tuple(files)
        self.store, self.known, self.seed, self.loaded = store, set(known), seed, list(loaded)
        self.validation = validation
        self.executed: Executed | None = None
        self.apart: set[str] = set()
        self.deadline = time.process_time() + seconds
        self.seconds = seconds
        self.tried: set[str] = set()
        self.fresh: list[Proposal] = []
        self.kept: list[Proposal] = []

    def out_of_time(self) -> bool:
        """Whether the budget is spent."""
        return time.process_time() > self.deadline or self.left() == 0.0

    def round(self, problem: Problem, derivation: Derivation) -> Synthesis:
        """New rules for the tensors at which the derivation stopped."""
        result = Synthesis()
        self.fresh = []
        try:
            executed = Executed(problem, derivation, self.seed, self.executed, self.validation.device)
        except EmergeError as exc:
            result.stopped = f"the pair cannot be executed for synthesis ({exc.message})"
            return result
        self.executed = executed
        ref, imp = _sides(derivation, executed)
        partners = _Partners(imp)
        above: set[int] = set()
        for goal in _goals(ref, derivation):
            if self.out_of_time():
                result.stopped = f"the budget of {self.seconds:g} s is spent"
                break
            if result.goals >= MOST_GOALS:
                result.stopped = f"{MOST_GOALS} tensors were looked at"
                break
            if _rests_on(ref.low, goal, above):
                continue  # what lies below may be all that is missing
            result.goals += 1
            found = partners.of(ref, goal)
            result.matched += bool(found)
            if any(self.settle(ref, imp, goal, partner, matching, result) for partner, matching in found):
                above.add(goal.id)
        if not result.rules and not self.out_of_time():
            self.take_apart(ref, imp, partners, derivation, result)
        return result

    def take_apart(
        self, ref: Side, imp: Side, partners: _Partners, derivation: Derivation, result: Synthesis
    ) -> None:
        """Laws of exchange for the operators behind tensors that hold the same values on both sides."""
        sides = {1: Operators(ref.low), 2: Operators(imp.low)}
        count = 0
        for goal in _goals(ref, derivation):
            partner = partners.like(ref, goal)
            if partner is None:
                continue
            count += 1
            if count > MOST_APART:
                return
            for side, start in ((ref, goal), (imp, partner)):
                self.exchange(side, sides[side.number], start, result)
                if self.out_of_time():
                    return

    def exchange(self, side: Side, ops: Operators, start: Tensor, result: Synthesis) -> None:
        """Laws of exchange for the operators behind one tensor."""
        found = [p for p in islice(places(ops, start, side.is_aligned, self.loaded), MOST_PLACES) if p.key not in self.apart]
        heads: dict[str, App] = {}
        for place in found:
            for term in (place.term, place.inner):
                heads.setdefault(term.op if not term.op.startswith("Map") else str(term.args[0]), term)
        for place in found:
            if place.key in self.apart or self.out_of_time():
                continue
            self.apart.add(place.key)
            others = [h for h in heads.values() if h.op not in (place.term.op, place.inner.op)]
            for law in laws(place, others, lambda: not self.out_of_time()):
                proposal = of_law(law)
                if self.undoes(proposal) or self.follows(proposal):
                    break  # it would undo what a rule does, or say it again
                if self.accept(proposal, result):
                    break

    def follows(self, proposal: Proposal) -> bool:
        """Whether the rules so far make both sides of a proposal equal anyway."""
        files = [*self.files, *([self.store.path] if self.store.path.exists() else [])]
        return bool(self.files) and implied(as_rule(proposal), files, self.seed)

    def undoes(self, proposal: Proposal) -> bool:
        """Whether a rule rewrites the right side of a proposal to its left side."""
        known = [(p.left, p.right) for p in self.kept]
        known += [(r.patterns[0][1], r.unions[0][1]) for r in self.loaded if len(r.patterns) == len(r.unions) == 1]
        return any(stands_for((left, right), (proposal.right, proposal.left)) for left, right in known)

    def settle(
        self, ref: Side, imp: Side, goal: Tensor, partner: Tensor, matching: Matching, result: Synthesis
    ) -> bool:
        """Whether a rule for this pair of tensors was found."""
        for proposal in proposals(ref, imp, goal, partner, matching):
            if self.out_of_time():
                return False
            small = inner(proposal)
            if any(self.covered(p) for p in (small, proposal) if p is not None):
                return True  # to be seen in the next derivation
            if any(self.accept(p, result) for p in (small, proposal) if p is not None):
                return True
        return False

    def covered(self, proposal: Proposal) -> bool:
        """Whether a rule of this round says it already; rules apply to both sides, so one direction is enough."""
        both = [p for p in (proposal, reverse(proposal)) if p is not None]
        return any(is_instance(p, rule) for p in both for rule in self.fresh)

    def accept(self, proposal: Proposal, result: Synthesis) -> bool:
        """Validates a proposal that was not tried before, and keeps it."""
        if proposal.canonical in self.tried or proposal.name in self.known:
            return False  # what is loaded already did not help
        self.tried.add(proposal.canonical)
        if casts(proposal.left) != casts(proposal.right):
            result.refused.append((proposal.meaning, "drops a conversion to another type, which rounds"))
            return False
        found = validate(proposal, self.seed, self.validation)
        if not isinstance(found, EqualityCertificate):
            result.refused.append((proposal.meaning, found.reason))
            return False
        self.known.add(proposal.name)
        self.fresh.append(proposal)
        self.kept.append(proposal)
        self.store.add(proposal.text(), found)
        result.rules.append(proposal.name)
        return True

    def size(self, name: str) -> int:
        """Operators of a rule."""
        return next((len(list(constructors(p.left))) for p in self.kept if p.name == name), 0)

    def confirm(self, name: str) -> str:
        """Tries a rule on values of the pair's tensors that stand elsewhere; why it does not hold there, or ""."""
        (rule,) = [r for r in rules_of(self.store.path) if r.name == name]
        pool = self.executed.pool() if self.executed is not None else []
        if len(pool) < LEAST_OTHERS:
            return f"the pair has {len(pool)} tensors to confirm it on, and at least {LEAST_OTHERS} are needed"
        found = confirm(rule, pool, self.seed)
        return f"it {found.reason}" if isinstance(found, Refusal) else ""


def _sides(derivation: Derivation, executed: Executed) -> tuple[Side, Side]:
    relations = derivation.result.relations
    root = dict(relations["root"])
    pairs = [(row[0], row[1]) for row in relations["aligned"]]
    ref = Side(derivation.reference, REFERENCE, frozenset(s for s, _ in pairs), root, executed)
    imp = Side(derivation.implementation, IMPLEMENTATION, frozenset(d for _, d in pairs), root, executed)
    return ref, imp


def _computed(low: Lowering) -> Iterator[Tensor]:
    """All floating tensors that an operator computes and the algebra has a term for."""
    seen: set[int] = set()
    made = [a for r in low.recipes.values() for a in r.args]
    made += [t for t in low.tensors.values() if isinstance(t, Tensor)]
    for tensor in made:
        recipe = low.recipes.get(tensor.id)
        if recipe is None or tensor.id in seen or recipe.name in ("place", "view") or not is_floating(tensor.dtype):
            continue
        seen.add(tensor.id)
        yield tensor


def _rests_on(low: Lowering, tensor: Tensor, found: set[int]) -> bool:
    """Whether a tensor is computed from one of ``found``."""
    stack, seen = [tensor], set()
    while stack:
        recipe = low.recipes.get(stack.pop().id)
        for a in recipe.args if recipe is not None else ():
            if a.id in found:
                return True
            if a.id not in seen:
                seen.add(a.id)
                stack.append(a)
    return False


def _goals(ref: Side, derivation: Derivation) -> list[Tensor]:
    """Tensors without alignment that unproved claims rest on, those nearest to the inputs first."""
    low = ref.low
    proved = derivation.proved()
    tensors = {t.id: t for t in _computed(low)}
    needed: set[int] = set()
    stack = [s for g, s, _ in derivation.base.facts["expected"] if g not in proved]
    forms: dict[int, list[int]] = {}
    for v, w in derivation.base.facts["same"]:
        forms.setdefault(v, []).append(w)
    while stack:
        at = stack.pop()
        if at in needed:
            continue
        needed.add(at)
        made = low.made_by.get(at)
        stack += [a.id for a in made.args] if made is not None else []
        stack += forms.get(at, [])
    open_ = [t for t in tensors.values() if t.id in needed and not ref.is_aligned(t)]
    return sorted(open_, key=lambda t: (t.depth, t.id))


class _Partners:
    """Implementation tensors by their values."""

    def __init__(self, imp: Side) -> None:
        self.imp = imp
        self.known = []
        for tensor in _computed(imp.low):
            values = imp.executed.of(imp.number, tensor.id)
            if values is not None and values[0][0].size:
                low, high = min(float(v.min()) for v in values[0]), max(float(v.max()) for v in values[0])
                self.known.append((low, high, tensor, values))

    def like(self, ref: Side, goal: Tensor) -> Tensor | None:
        """One without alignment that holds the same numbers, in any places and any number of times."""
        values = ref.executed.of(ref.number, goal.id)
        if values is None:
            return None
        for _, _, tensor, other in self.known:
            if not self.imp.is_aligned(tensor) and alike(values, other):
                return tensor
        return None

    def of(self, ref: Side, goal: Tensor) -> list[tuple[Tensor, Matching]]:
        """Those that hold the values of a reference tensor, the most alike in depth first."""
        values = ref.executed.of(ref.number, goal.id)
        if values is None or not distinct(values):
            return []
        flat = values[0][0]
        least, most = float(flat.min()), float(flat.max())
        near = 1e-9 * max(abs(least), abs(most))
        found = []
        for low, high, tensor, other in self.known:
            if abs(low - least) <= near and abs(high - most) <= near:
                matching = match(values, other)
                if matching is not None:
                    found.append((tensor, matching))
        found.sort(key=lambda f: (abs(f[0].depth - goal.depth), f[0].id))
        return found[:MOST_PARTNERS]
