"""Why a fact holds: recorded clause instances, and one well-founded derivation of every fact out of them.

Instances come from relations ``log__n`` that the program fills itself, so both engines give the same. A derivation is
found by counting open premises (linear in the instances); with levels, premises are settled in order of their level,
so every fact gets the derivation whose highest level is lowest. Given facts have levels of their own: what was found
outside of the program (equal tensors) is as good as what found it.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any, NamedTuple

from emerge.engine.program import LogRule, Program
from emerge.engine.syntax import Atom, Clause, Nil, Num, Rec, Str, Term, Var
from emerge.util.errors import InputError, RuleError

Args = tuple[Any, ...]


class Fact(NamedTuple):
    """A ground atom."""

    relation: str
    args: Args

    def __str__(self) -> str:
        return f"{self.relation}({', '.join(map(value_text, self.args))})"


class Instance(NamedTuple):
    """A clause under a substitution.

    Attributes:
        substitution: variable -> value; hoisted expressions (``(x + 1)``) and named wildcards (``_#1``) among them.
        premises: the positive body atoms. What an aggregate or a negation read is not listed: it lies in a lower
            stratum, which was complete.
    """

    clause: Clause
    substitution: dict[str, Any]
    head: Fact
    premises: tuple[Fact, ...]


class Step(NamedTuple):
    """One fact of a proof. ``clause`` is None for facts that were given, or whose relation is not logged."""

    fact: Fact
    clause: Clause | None
    law: str | None
    level: int
    premises: tuple[Fact, ...]
    substitution: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Proof:
    """A derivation of ``fact``: every premise of a step is an earlier step; the last step is the fact itself."""

    fact: Fact
    level: int
    steps: tuple[Step, ...]

    def __str__(self) -> str:
        numbers = {step.fact: index for index, step in enumerate(self.steps)}
        lines = []
        for index, step in enumerate(self.steps):
            by = "given" if step.clause is None else step.law or f"clause at {step.clause.pos}"
            uses = ", ".join(str(numbers[p]) for p in step.premises)
            lines.append(f"{index}: {step.fact}  [{by}{' from ' + uses if uses else ''}]")
        return "\n".join(lines)


@dataclass(frozen=True)
class Levels:
    """Levels of everything that a derivation rests on.

    Attributes:
        laws: law -> level (e.g. of its evidence). Clauses without a law have level 0.
        facts: given fact -> level, 0 for all others.
    """

    laws: Mapping[str, int]
    facts: Mapping[Fact, int] = field(default_factory=dict)

    def key(self) -> tuple[Any, ...]:
        """What tells levels apart."""
        return tuple(sorted(self.laws.items())), frozenset((f, n) for f, n in self.facts.items() if n)


class LastStep(NamedTuple):
    """How a fact follows from others of its kind.

    Attributes:
        causes: laws and given facts of that level, none at level 0.
        passed: facts of the kind in between, which end no step.
    """

    level: int
    causes: frozenset[str | Fact]
    passed: frozenset[Fact] = frozenset()


def value_text(value: Any) -> str:
    """A value as the rule language writes it, symbols without quotes."""
    if value is None:
        return "nil"
    if isinstance(value, tuple):
        return f"[{', '.join(map(value_text, value))}]"
    return str(value)


class DerivationLog:
    """The recorded instances of one run.

    Logged are all clauses of relations that have a clause with ``@law``, are declared ``@semantic`` or depend
    positively on such a declaration. A fact that was given, and every fact of another relation, needs no derivation.
    Levels are given as :class:`Levels`, or by law alone.
    """

    def __init__(
        self,
        program: Program,
        logs: Sequence[LogRule],
        rows: Mapping[str, Iterable[Args]],
        given: Mapping[str, Iterable[Args]],
    ) -> None:
        self.program = program
        self._rules = [_Reader(log) for log in logs]
        # Sorted, so that the derivation chosen does not depend on the engine.
        self._rows = [sort_rows(rows[log.name]) for log in logs]
        self._logged = {log.rule.head.name for log in logs}
        semantic = {name for name, decl in program.relations.items() if decl.semantic is not None}
        self._given = {name: set(given.get(name, ())) for name in sorted(self._logged | semantic)}
        self._index: _Index | None = None
        self._solved: dict[tuple[Any, ...] | None, _Solution] = {}

    def __len__(self) -> int:
        """Number of instances."""
        return sum(map(len, self._rows))

    @property
    def logged_relations(self) -> frozenset[str]:
        """Relations whose facts have derivations."""
        return frozenset(self._logged)

    def instances(self) -> Iterator[Instance]:
        """Every recorded instance, in order of clauses, then of substitutions."""
        for reader, rows in zip(self._rules, self._rows):
            for row in rows:
                yield reader.instance(row)

    def explain(self, fact: Fact | tuple[str, Args], levels: Levels | Mapping[str, int] | None = None) -> Proof:
        """One well-founded derivation of ``fact``.

        Args:
            fact: of a logged relation.
            levels: the derivation returned has the smallest highest level.

        Raises:
            InputError: the fact was not derived, or its relation is not logged.
            RuleError: ``levels`` misses a law.
        """
        solution = self._solve(levels)
        goal = self._require(Fact(*fact), solution)
        order = sorted(self._reachable([goal], solution), key=solution.rank.__getitem__)
        steps: list[Step] = []
        placed: set[Fact] = set()
        for number in order:
            found = solution.index.facts[number]
            chosen = solution.chosen[number]
            if chosen < 0:
                steps.append(Step(found, None, None, solution.level[number], (), {}))
                placed.add(found)
                continue
            instance = self._instance(chosen)
            for premise in dict.fromkeys(instance.premises):
                if premise not in placed:  # of a relation that is not logged
                    steps.append(Step(premise, None, None, 0, (), {}))
                    placed.add(premise)
            law = instance.clause.law
            steps.append(
                Step(found, instance.clause, law, solution.level[number], instance.premises, instance.substitution)
            )
            placed.add(found)
        return Proof(solution.index.facts[goal], solution.level[goal], tuple(steps))

    def best_level(self, relation: str, levels: Levels | Mapping[str, int] | None = None) -> dict[Fact, int]:
        """Smallest highest level of any derivation, for every fact of a logged relation.

        Raises:
            InputError: the relation is not logged.
            RuleError: ``levels`` misses a law.
        """
        self._require_logged(relation)
        solution = self._solve(levels)
        return {
            fact: solution.level[number]
            for number, fact in enumerate(solution.index.facts)
            if fact.relation == relation and solution.rank[number] >= 0
        }

    def last_steps(
        self,
        goals: Iterable[Fact | tuple[str, Args]],
        relation: str,
        levels: Levels | Mapping[str, int] | None = None,
        among: Collection[int] | None = None,
    ) -> dict[Fact, LastStep]:
        """One derivation of ``goals``, cut into steps: how every fact of ``relation`` in it, and every goal, follows from
        others of these facts, all of which come before it in one well-founded order. Every step has the lowest level it can.

        Args:
            among: first arguments of the facts that end a step; None = all.

        Raises:
            InputError, RuleError: as for :meth:`explain`.
        """
        self._require_logged(relation)
        solution = self._solve(levels)
        index = solution.index
        wanted = [self._require(Fact(*fact), solution) for fact in goals]
        cut = set(wanted) | {
            n for n, f in enumerate(index.facts)
            if f.relation == relation and solution.rank[n] >= 0 and (among is None or f.args[0] in among)
        }  # fmt: skip
        by: dict[int, _Steps] = {}
        step_level: dict[int, int] = {}
        for level in sorted({0, *solution.instance_levels, *solution.given_levels.values()}):
            by[level] = self._steps_within(level, cut, solution)
            for n in cut.intersection(by[level].instance):
                step_level.setdefault(n, level)
            if len(step_level) == len(cut):
                break
        found: dict[Fact, LastStep] = {}
        seen, work = set(wanted), list(wanted)
        while work:
            number = work.pop()
            level = step_level[number]
            step, below = self._between(number, by[level], cut, level, solution)
            found[index.facts[number]] = step._replace(passed=frozenset(f for f in step.passed if f.relation == relation))
            work += below - seen
            seen |= below
        return found

    @staticmethod
    def _steps_within(level: int, cut: Collection[int], solution: _Solution) -> _Steps:
        """Those facts of ``cut`` that instances up to ``level`` give out of earlier ones of them, and all between.

        Every other fact gets the derivation whose latest premise in ``cut`` is earliest, so what several of them
        share (the walk of a table) is not attributed to the one that happened to need it first.
        """
        index, levels, rank = solution.index, solution.instance_levels, solution.rank
        open_premises = [len(p) for p in index.premises]
        steps = _Steps({}, set())
        first: list[tuple[int, int]] = []  # (fact, instance) that need nothing of ``cut``
        for n, chosen in enumerate(solution.chosen):
            if chosen < 0 and rank[n] >= 0 and solution.given_levels.get(n, 0) <= level:
                if n in cut:
                    steps.instance[n] = -1
                else:
                    first.append((n, -1))
        heap: list[tuple[int, int, int]] = []

        def settle(instance: int, latest: int) -> None:
            if levels[instance] > level:
                return
            head = index.head[instance]
            if head in cut:
                if latest < rank[head]:
                    steps.instance.setdefault(head, instance)
            elif head not in steps.instance:
                if latest < 0:
                    first.append((head, instance))
                else:
                    heapq.heappush(heap, (latest, head, instance))

        def use(number: int, latest: int) -> None:
            for user in index.users[number]:
                open_premises[user] -= 1
                if open_premises[user] == 0:
                    settle(user, latest)

        for instance, count in enumerate(open_premises):
            if count == 0:
                settle(instance, -1)
        for number, instance in first:  # grows
            if number not in steps.instance:
                steps.instance[number] = instance
                steps.free.add(number)
                use(number, -1)
        heap = [(rank[n], n, -1) for n in cut]
        heapq.heapify(heap)
        while heap:
            latest, number, instance = heapq.heappop(heap)
            if number in cut:
                use(number, latest)
            elif number not in steps.instance:
                steps.instance[number] = instance
                use(number, latest)
        return steps

    def _between(
        self, goal: int, steps: _Steps, cut: Collection[int], level: int, solution: _Solution
    ) -> tuple[LastStep, set[int]]:
        """What is between a fact and those of ``cut`` that it follows from, and these. Facts that need none are left out at
        level 0."""
        index = solution.index
        causes: set[str | Fact] = set()
        below: set[int] = set()
        seen = {goal}
        work = [goal]
        while work:
            number = work.pop()
            instance = steps.instance[number]
            if instance < 0:
                if level and solution.given_levels.get(number, 0) == level:
                    causes.add(index.facts[number])
                continue
            if level and solution.instance_levels[instance] == level:
                law = self._rules[index.instance_rule[instance]].log.rule.clause.law
                if law is not None:
                    causes.add(law)
            for premise in index.premises[instance]:
                if premise in cut:
                    below.add(premise)
                elif premise not in seen and (level or premise not in steps.free):
                    seen.add(premise)
                    work.append(premise)
        seen.remove(goal)
        return LastStep(level, frozenset(causes), frozenset(index.facts[n] for n in seen)), below

    def given_used(
        self, facts: Iterable[Fact | tuple[str, Args]], relation: str, levels: Levels | Mapping[str, int] | None = None
    ) -> set[Fact]:
        """Given facts of ``relation`` in the chosen derivations of ``facts``.

        Raises:
            InputError, RuleError: as for :meth:`explain`.
        """
        solution = self._solve(levels)
        goals = [self._require(Fact(*fact), solution) for fact in facts]
        reached = self._reachable(goals, solution)
        return {f for n in reached if solution.chosen[n] < 0 and (f := solution.index.facts[n]).relation == relation}

    def laws_used(
        self, facts: Iterable[Fact | tuple[str, Args]], levels: Levels | Mapping[str, int] | None = None
    ) -> dict[str, int]:
        """Law -> number of its instances in the chosen derivations of ``facts``; shared parts count once.

        Raises:
            InputError, RuleError: as for :meth:`explain`.
        """
        solution = self._solve(levels)
        goals = [self._require(Fact(*fact), solution) for fact in facts]
        counts: dict[str, int] = {}
        for number in self._reachable(goals, solution):
            chosen = solution.chosen[number]
            law = None if chosen < 0 else self._rules[solution.index.instance_rule[chosen]].log.rule.clause.law
            if law is not None:
                counts[law] = counts.get(law, 0) + 1
        return dict(sorted(counts.items()))

    # --- internals ----------------------------------------------------------------------------------------------
    def _require_logged(self, relation: str) -> None:
        if relation not in self._logged:
            known = ", ".join(sorted(self._logged)) or "none"
            raise InputError(f"derivations of '{relation}' are not logged; logged relations: {known}")

    def _require(self, fact: Fact, solution: _Solution) -> int:
        self._require_logged(fact.relation)
        number = solution.index.number(fact)
        if number is None or solution.rank[number] < 0:
            raise InputError(f"{fact} was not derived, so there is nothing to explain")
        return number

    def _instance(self, number: int) -> Instance:
        index = self._indexed()
        rule = index.instance_rule[number]
        return self._rules[rule].instance(self._rows[rule][number - index.first_instance[rule]])

    def _reachable(self, goals: Iterable[int], solution: _Solution) -> set[int]:
        seen = set(goals)
        work = list(seen)
        while work:
            chosen = solution.chosen[work.pop()]
            if chosen < 0:
                continue
            for premise in solution.index.premises[chosen]:
                if premise not in seen:
                    seen.add(premise)
                    work.append(premise)
        return seen

    def _indexed(self) -> _Index:
        if self._index is None:
            self._index = _Index(self._rules, self._rows, self._given)
        return self._index

    def _solve(self, levels: Levels | Mapping[str, int] | None) -> _Solution:
        known = levels if levels is None or isinstance(levels, Levels) else Levels(levels)
        key = None if known is None else known.key()
        if key not in self._solved:
            rule_levels = []
            for reader in self._rules:
                law = reader.log.rule.clause.law
                if known is not None and law is not None and law not in known.laws:
                    raise RuleError(f"no level is known for the law '{law}'", str(reader.log.rule.clause.pos))
                rule_levels.append(known.laws[law] if known is not None and law is not None else 0)
            facts = {} if known is None else known.facts
            self._solved[key] = _Solution(self._indexed(), rule_levels, self._given, facts)
        return self._solved[key]


class _Reader:
    """Turns rows of a log relation into facts."""

    def __init__(self, log: LogRule) -> None:
        self.log = log
        column = {name: index for index, name in enumerate(log.rule.variables)}
        self.head = (log.rule.head.name, _arguments(log.rule.head, column))
        self.premises = [(p.name, _arguments(p, column)) for p in log.rule.premises]

    def instance(self, row: Args) -> Instance:
        head = Fact(self.head[0], self.head[1](row))
        premises = tuple(Fact(name, arguments(row)) for name, arguments in self.premises)
        return Instance(self.log.rule.clause, dict(zip(self.log.rule.variables, row)), head, premises)


def _arguments(atom: Atom, column: Mapping[str, int]) -> Callable[[Args], Args]:
    if len(atom.args) >= 2 and all(isinstance(a, Var) for a in atom.args):
        return itemgetter(*(column[a.name] for a in atom.args if isinstance(a, Var)))
    parts = [_argument(a, column) for a in atom.args]
    return lambda row: tuple([part(row) for part in parts])


def _argument(term: Term, column: Mapping[str, int]) -> Callable[[Args], Any]:
    match term:
        case Var():
            return itemgetter(column[term.name])
        case Num() | Str():
            value = term.value
            return lambda row: value
        case Nil():
            return lambda row: None
        case Rec():
            parts = [_argument(i, column) for i in term.items]
            return lambda row: tuple([part(row) for part in parts])
    raise AssertionError(f"not a lowered term: {term}")


class _Index:
    """Facts of logged relations as numbers, and the instances between them."""

    def __init__(
        self, rules: Sequence[_Reader], rows: Sequence[Sequence[Args]], given: Mapping[str, set[Args]]
    ) -> None:
        self.facts: list[Fact] = []
        self._numbers: dict[str, dict[Args, int]] = {}
        self.instance_rule: list[int] = []
        self.first_instance: list[int] = []
        self.head: list[int] = []
        self.premises: list[tuple[int, ...]] = []
        for rule, (reader, rule_rows) in enumerate(zip(rules, rows)):
            self.first_instance.append(len(self.head))
            self.instance_rule += [rule] * len(rule_rows)
            self.head += self._numbered(reader.head[0], map(reader.head[1], rule_rows))
            read = [self._numbered(p, map(a, rule_rows)) for p, a in reader.premises if p in given]
            self.premises += map(_once, zip(*read)) if read else [()] * len(rule_rows)
        for name, given_rows in given.items():
            self._numbered(name, given_rows)
        self.users: list[list[int]] = [[] for _ in self.facts]
        for instance, numbers_of in enumerate(self.premises):
            for premise in numbers_of:
                self.users[premise].append(instance)

    def number(self, fact: Fact) -> int | None:
        """The number of a fact, None where no instance speaks about it."""
        return self._numbers.get(fact.relation, {}).get(fact.args)

    def _numbered(self, name: str, rows: Iterable[Args]) -> list[int]:
        known = self._numbers.setdefault(name, {})
        facts = self.facts
        out = []
        for args in rows:
            number = known.get(args)
            if number is None:
                number = known[args] = len(facts)
                facts.append(Fact(name, args))
            out.append(number)
        return out


def _once(numbers: tuple[int, ...]) -> tuple[int, ...]:
    return numbers if len(set(numbers)) == len(numbers) else tuple(dict.fromkeys(numbers))


class _Steps(NamedTuple):
    """Derivations between the facts of a cut. ``instance``: by fact, -1 for given ones; ``free``: facts that need nothing of
    the cut."""

    instance: dict[int, int]
    free: set[int]


class _Solution:
    """The chosen derivation of every fact.

    Attributes:
        rank: position in the well-founded order, -1 for a fact without derivation.
        level: highest level in the chosen derivation.
        instance_levels: by instance; given_levels: of given facts, where above 0.
        chosen: instance that derives the fact, -1 for a given fact.
    """

    def __init__(
        self, index: _Index, rule_levels: Sequence[int], given: Mapping[str, set[Args]], facts: Mapping[Fact, int]
    ) -> None:
        self.index = index
        self.instance_levels = [rule_levels[rule] for rule in index.instance_rule]
        self.given_levels = {k: n for f, n in facts.items() if n and (k := index.number(f)) is not None}
        self.rank = [-1] * len(index.facts)
        self.level = [0] * len(index.facts)
        self.chosen = [-1] * len(index.facts)
        self._settled = 0
        waiting: dict[int, deque[tuple[int, int]]] = {}
        heap: list[int] = []
        open_premises = [len(p) for p in index.premises]

        def push(level: int, fact: int, instance: int) -> None:
            if level not in waiting:
                waiting[level] = deque()
                heapq.heappush(heap, level)
            waiting[level].append((fact, instance))

        for number, fact in enumerate(index.facts):
            if fact.args in given.get(fact.relation, ()):
                push(self.given_levels.get(number, 0), number, -1)
        for instance, count in enumerate(open_premises):
            if count == 0:
                push(self.instance_levels[instance], index.head[instance], instance)
        while heap:
            level = heap[0]
            queue = waiting[level]
            if not queue:
                del waiting[level]
                heapq.heappop(heap)
                continue
            fact_number, instance = queue.popleft()
            if self.rank[fact_number] >= 0:
                continue
            self.rank[fact_number] = self._settled
            self.level[fact_number], self.chosen[fact_number] = level, instance
            self._settled += 1
            for user in index.users[fact_number]:
                open_premises[user] -= 1
                if open_premises[user] == 0:
                    # Facts settle in order of level, so the last premise has the highest.
                    push(max(level, self.instance_levels[user]), index.head[user], user)


def sort_rows(rows: Iterable[Args]) -> list[Args]:
    """Rows in an order that depends on their values alone; records and nil make plain comparison impossible."""
    listed = list(rows)
    try:
        return sorted(listed)
    except TypeError:
        return sorted(listed, key=repr)
