"""Why a fact holds: recorded clause instances, and one well-founded derivation of every fact out of them.

Instances come from relations ``log__n`` that the program fills itself, so both engines give the same. A derivation is
found by counting open premises (linear in the instances); with levels, premises are settled in order of their level,
so every fact gets the derivation whose highest level is lowest.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
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
        self._given = {name: set(given.get(name, ())) for name in self._logged}
        self._index: _Index | None = None
        self._solved: dict[tuple[tuple[str, int], ...] | None, _Solution] = {}

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

    def explain(self, fact: Fact | tuple[str, Args], levels: Mapping[str, int] | None = None) -> Proof:
        """One well-founded derivation of ``fact``.

        Args:
            fact: of a logged relation.
            levels: law -> level (e.g. of its evidence); the derivation returned has the smallest highest level.
                Clauses without a law, and given facts, have level 0.

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
                steps.append(Step(found, None, None, 0, (), {}))
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

    def best_level(self, relation: str, levels: Mapping[str, int] | None = None) -> dict[Fact, int]:
        """Smallest highest level of any derivation, for every fact of a logged relation.

        Raises:
            InputError: the relation is not logged.
            RuleError: ``levels`` misses a law.
        """
        self._require_logged(relation)
        solution = self._solve(levels)
        return {
            fact: solution.level[number]
            for fact, number in solution.index.numbers.items()
            if fact.relation == relation and solution.rank[number] >= 0
        }

    def step_levels(self, relation: str, levels: Mapping[str, int] | None = None) -> dict[Fact, int]:
        """Level of the last step of the best derivation of every fact of ``relation``: of the laws between it and other
        facts of ``relation``, all of which come before it in one well-founded order.

        Raises:
            InputError: the relation is not logged.
            RuleError: ``levels`` misses a law.
        """
        self._require_logged(relation)
        solution = self._solve(levels)
        facts = [n for n, f in enumerate(solution.index.facts) if f.relation == relation and solution.rank[n] >= 0]
        known = sorted({0, *solution.rule_levels})
        found = dict.fromkeys(facts, known[-1])
        for level in reversed(known[:-1]):
            found.update(dict.fromkeys(self._steps_within(level, facts, solution), level))
        return {solution.index.facts[n]: level for n, level in found.items()}

    @staticmethod
    def _steps_within(level: int, facts: Sequence[int], solution: _Solution) -> list[int]:
        """Those of ``facts`` that laws up to ``level`` give out of earlier ones of them.

        Every other fact gets the derivation whose latest premise among ``facts`` is earliest, so what several of them
        share (the walk of a table) is not attributed to the one that happened to need it first.
        """
        index = solution.index
        cut = set(facts)
        open_premises = [len(p) for p in index.premises]
        reached: list[int] = []
        done: set[int] = set()
        heap = [(solution.rank[n], n) for n in facts]
        heap += [(-1, n) for n, chosen in enumerate(solution.chosen) if chosen < 0 and solution.rank[n] >= 0 and n not in cut]
        heapq.heapify(heap)

        def settle(instance: int, latest: int) -> None:
            if solution.rule_levels[index.instance_rule[instance]] > level:
                return
            head = index.head[instance]
            if head not in cut:
                heapq.heappush(heap, (latest, head))
            elif latest < solution.rank[head]:
                reached.append(head)

        for instance, count in enumerate(open_premises):
            if count == 0:
                settle(instance, -1)
        while heap:
            latest, number = heapq.heappop(heap)
            if number in done:
                continue
            done.add(number)
            for user in index.users[number]:
                open_premises[user] -= 1
                if open_premises[user] == 0:
                    settle(user, latest)
        return reached

    def laws_used(
        self, facts: Iterable[Fact | tuple[str, Args]], levels: Mapping[str, int] | None = None
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
        number = solution.index.numbers.get(fact)
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

    def _solve(self, levels: Mapping[str, int] | None) -> _Solution:
        key = None if levels is None else tuple(sorted(levels.items()))
        if key not in self._solved:
            rule_levels = []
            for reader in self._rules:
                law = reader.log.rule.clause.law
                if levels is not None and law is not None and law not in levels:
                    raise RuleError(f"no level is known for the law '{law}'", str(reader.log.rule.clause.pos))
                rule_levels.append(levels[law] if levels is not None and law is not None else 0)
            self._solved[key] = _Solution(self._indexed(), rule_levels, self._given)
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
        self.numbers: dict[Fact, int] = {}
        self.instance_rule: list[int] = []
        self.first_instance: list[int] = []
        self.head: list[int] = []
        self.premises: list[tuple[int, ...]] = []
        number = self.numbers.setdefault
        for rule, (reader, rule_rows) in enumerate(zip(rules, rows)):
            self.first_instance.append(len(self.head))
            name, arguments = reader.head
            premises = [(p, a) for p, a in reader.premises if p in given]
            for row in rule_rows:
                self.instance_rule.append(rule)
                self.head.append(number(Fact(name, arguments(row)), len(self.numbers)))
                numbers = [number(Fact(p, a(row)), len(self.numbers)) for p, a in premises]
                self.premises.append(tuple(dict.fromkeys(numbers)))
        for name, given_rows in given.items():
            for row in given_rows:
                number(Fact(name, row), len(self.numbers))
        self.facts: list[Fact] = list(self.numbers)
        self.users: list[list[int]] = [[] for _ in self.facts]
        for instance, numbers_of in enumerate(self.premises):
            for premise in numbers_of:
                self.users[premise].append(instance)


class _Solution:
    """The chosen derivation of every fact.

    Attributes:
        rank: position in the well-founded order, -1 for a fact without derivation.
        level: highest level in the chosen derivation.
        chosen: instance that derives the fact, -1 for a given fact.
    """

    def __init__(self, index: _Index, rule_levels: Sequence[int], given: Mapping[str, set[Args]]) -> None:
        self.index = index
        self.rule_levels = rule_levels
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
                push(0, number, -1)
        for instance, count in enumerate(open_premises):
            if count == 0:
                push(rule_levels[index.instance_rule[instance]], index.head[instance], instance)
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
                    push(max(level, rule_levels[index.instance_rule[user]]), index.head[user], user)


def sort_rows(rows: Iterable[Args]) -> list[Args]:
    """Rows in an order that depends on their values alone; records and nil make plain comparison impossible."""
    listed = list(rows)
    try:
        return sorted(listed)
    except TypeError:
        return sorted(listed, key=repr)
