"""Derives a pair, executes it, and decides every semantic fact; says which laws stand behind each."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from emerge.engine.derivation import Fact, value_text
from emerge.relate.derive import RESULTS, Derivation, derive
from emerge.rules.lowering_check import lowering_faults
from emerge.rules.pair import Pair, execute
from emerge.rules.statements import Outcome, Statements

#: Relations whose facts are decided on executed values.
CHECKED = (
    "aligned", "axis_at", "index_fn", "one_hot_of", "admitted", "routed", "in_range", "group_ends", "routes", "outside",
    "same",
)  # fmt: skip

#: Number of leading arguments that are tensors.
TENSORS = {
    "aligned": 2, "axis_at": 1, "index_fn": 2, "one_hot_of": 2, "routed": 3, "in_range": 1, "group_ends": 2, "routes": 2,
    "outside": 2, "same": 2,
}  # fmt: skip


@dataclass(frozen=True)
class FalseFact:
    """A derived fact that does not hold, all of whose semantic premises hold.

    Attributes:
        laws: laws between the premises and the fact; the fault lies with one of them (or with the lowering).
        text: the fact in words of the graphs.
    """

    pair: str
    fact: Fact
    laws: tuple[str, ...]
    detail: str
    text: str
    premises: tuple[str, ...] = ()


@dataclass
class Examination:
    """Outcome for one pair.

    Attributes:
        outcomes: every semantic fact. fired: law -> number of its instances behind true facts.
        undecided: reason -> count. lowering: tensor -> how its executed value contradicts its lowering; false facts
            that rest on such a tensor are not blamed on laws.
    """

    pair: Pair
    derivation: Derivation
    outcomes: dict[Fact, Outcome] = field(default_factory=dict)
    fired: Counter[str] = field(default_factory=Counter)
    failed: list[FalseFact] = field(default_factory=list)
    undecided: Counter[str] = field(default_factory=Counter)
    lowering: dict[int, str] = field(default_factory=dict)


def examine(
    pair: Pair,
    *,
    seed: int = 0,
    rules: Sequence[Path] = (),
    engine: str = "embedded",
    device: str = "cpu",
    log: bool = True,
    program: Any = None,
) -> Examination:
    """Decides every derived fact of a pair.

    Raises:
        Unusable: the pair cannot be executed.
    """
    executed = execute(pair, seed, device)
    derivation = run_derivation(pair, rules, engine, log, program)
    statements = Statements(derivation, executed)
    out = Examination(pair, derivation)
    out.lowering = lowering_faults(statements)
    for relation in CHECKED:
        for args in sorted(derivation.result.relations[relation], key=repr):
            outcome = statements.check(relation, args)
            out.outcomes[Fact(relation, args)] = outcome
            if outcome.holds is None:
                out.undecided[outcome.detail] += 1
            if relation == "same" and outcome.holds is False:
                # an input fact: no law is to blame, and none for what rests on it
                out.lowering[args[0]] = f"{fact_text(derivation, Fact(relation, args))} is false: {outcome.detail}"
    if log:
        _attribute(out)
    return out


def run_derivation(pair: Pair, rules: Sequence[Path], engine: str, log: bool, program: Any) -> Derivation:
    """Derives with the shipped program and ``rules``, or with another ``program`` altogether."""
    wanted = tuple(dict.fromkeys([*RESULTS, *CHECKED]))
    if program is None and not pair.algebra and not pair.equal:
        return derive(pair.problem(), engine=engine, rules=rules, log=log, results=wanted)
    from emerge.algebra.saturate import available, rule_files
    from emerge.engine.run import run
    from emerge.relate.derive import load_program, lower_problem, program_signatures

    program = load_program(tuple(rules)) if program is None else program
    problem = pair.problem()
    algebra = rule_files(tuple(rules)) if pair.algebra and available() else None
    lowered = lower_problem(problem, program_signatures(program), algebra=algebra)
    base, ref, imp, given, claims, unusable = lowered
    for side, first, second in pair.equal:
        v, w = ((ref, imp)[side - 1].tensors[name] for name in (first, second))
        if v.id != w.id:
            base.add_all("same", [(v.id, w.id), (w.id, v.id)])
    facts = {k: v for k, v in base.facts.items() if k in program.relations}
    result = run(program, facts, [r for r in wanted if r in program.relations], engine=engine, log=log)
    return Derivation(problem, base, ref, imp, given, claims, unusable, result)


def _attribute(out: Examination) -> None:
    """Counts the laws behind true facts; finds the false facts that follow from true ones, with their laws."""
    log = out.derivation.result.log
    assert log is not None
    by_head: dict[Fact, list[Any]] = defaultdict(list)
    for instance in log.instances():
        by_head[instance.head].append(instance)
    wrong = [f for f, outcome in out.outcomes.items() if outcome.holds is False and f.relation != "same"]
    out.fired = fired_instances([f for f, o in out.outcomes.items() if o.holds], by_head)
    if not wrong:
        # Laws of bookkeeping relations whose users are not logged: all they gave went into true facts.
        every = Counter(i.clause.law for instances in by_head.values() for i in instances if i.clause.law)
        out.fired.update({law: n for law, n in every.items() if law not in out.fired})
    roots: set[Fact] = set()
    for fact in wrong:
        steps = {step.fact: step for step in log.explain(fact).steps}
        first = next(f for f in steps if f in out.outcomes and out.outcomes[f].holds is False)
        if first in roots:
            continue
        roots.add(first)
        if out.lowering and _rests_on(out, first, steps):
            continue
        laws, premises = _cut(first, steps)
        out.failed.append(
            FalseFact(out.pair.name, first, tuple(sorted(laws)), out.outcomes[first].detail,
                      fact_text(out.derivation, first),
                      tuple(fact_text(out.derivation, p) for p in sorted(premises, key=repr)))
        )  # fmt: skip


def _rests_on(out: Examination, fact: Fact, steps: dict[Fact, Any]) -> bool:
    """Does a derivation read an operator or tensor whose lowering is contradicted by execution?"""
    facts = out.derivation.base.facts
    faulty = set(out.lowering)
    faulty |= {o for o, v, _, _ in facts["op"] if v in faulty}
    work, seen = [fact], {fact}
    while work:
        at = work.pop()
        if any(a in faulty for a in at.args if isinstance(a, int)):
            return True
        for p in steps[at].premises:
            if p not in seen:
                seen.add(p)
                work.append(p)
    return False


def _cut(fact: Fact, steps: dict[Fact, Any]) -> tuple[set[str], set[Fact]]:
    """Laws of one derivation of ``fact`` down to other semantic facts, and those facts."""
    laws: set[str] = set()
    premises: set[Fact] = set()
    work, seen = [fact], {fact}
    while work:
        step = steps[work.pop()]
        if step.law:
            laws.add(step.law)
        for p in step.premises:
            if p not in seen:
                seen.add(p)
                if p.relation in CHECKED:
                    premises.add(p)
                else:
                    work.append(p)
    return laws, premises


def fired_instances(facts: list[Fact], by_head: dict[Fact, list[Any]]) -> Counter[str]:
    """Law -> number of its instances behind these facts; each instance counts once."""
    fired: Counter[str] = Counter()
    work, seen = list(facts), set(facts)
    while work:
        for instance in by_head.get(work.pop(), ()):
            if instance.clause.law:
                fired[instance.clause.law] += 1
            for p in instance.premises:
                if p not in seen and p.relation not in CHECKED:
                    seen.add(p)
                    work.append(p)
    return fired


def tensor_text(derivation: Derivation, tensor: int) -> str:
    """A tensor by the node that has it, or by its operator."""
    for low in (derivation.reference, derivation.implementation):
        names = low.nodes_of.get(tensor)
        if names:
            return f"{'ref' if low is derivation.reference else 'impl'}:{names[0]}"
        if tensor in low.made_by:
            made = low.made_by[tensor]
            inner = ", ".join(tensor_text(derivation, a.id) for a in made.args)
            return f"{made.body}({inner})"
    return f"tensor {tensor}"


def fact_text(derivation: Derivation, fact: Fact) -> str:
    """A fact with tensors named."""
    count = TENSORS.get(fact.relation, 0)
    shown = [tensor_text(derivation, a) if k < count else value_text(a) for k, a in enumerate(fact.args)]
    if fact.relation == "admitted":
        row = next(r for r in derivation.base.facts["op"] if r[0] == fact.args[0])
        shown = [f"{row[2]} for {tensor_text(derivation, row[1])}"]
    return f"{fact.relation}({', '.join(shown)})"
