"""Derivation logs: the same on both engines, well-founded, of the smallest level; checked apart from what made them."""

from __future__ import annotations

import random
from collections.abc import Mapping

import pytest
from engine_support import ENGINES, needs_souffle

from emerge.engine.derivation import DerivationLog, Fact, LastStep, Levels, Proof
from emerge.engine.run import Program, run
from emerge.util.errors import InputError, RuleError

TEXT = """
.type L = [h:number, t:L]
.decl edge(x:number, y:number)
.decl short(x:number, y:number)
.decl blocked(x:number)
// Pairs that are connected.
// @semantic connected
.decl path(x:number, y:number, way:L)
// One edge.
// @law edge
path(x, y, [y, nil]) :- edge(x, y), !blocked(y).
// @law shortcut
// @meaning a shortcut is as good as an edge
path(x, y, [y, nil]) :- short(x, y).
path(y, x, [x, nil]) :- short(x, y).
// @law join
path(x, z, nil) :- path(x, y, _), path(y, z, [_, nil]), x != z.

.decl degree(x:number, n:number)
degree(x, n) :- path(x, _, _), n = count : { edge(x, _) }, n > 0.
.decl twin(x:number)
twin(x) :- degree(x, n), degree(y, n), y = x + 1.
"""

PROGRAM = Program.from_text(TEXT, "paths.dl")


def case(seed: int) -> dict[str, list[tuple[int, ...]]]:
    rng = random.Random(seed)
    return {
        "edge": [(rng.randrange(8), rng.randrange(8)) for _ in range(9)],
        "short": [(rng.randrange(8), rng.randrange(8)) for _ in range(3)],
        "blocked": [(rng.randrange(8),)],
    }


def logged(engine: str, seed: int = 0) -> tuple[Program, DerivationLog, dict[str, set[tuple[object, ...]]]]:
    result = run(PROGRAM, case(seed), ["path", "degree", "twin"], engine, log=True)
    assert result.log is not None
    return PROGRAM, result.log, result.relations


def check(proof: Proof, known: set[Fact], instances: set[tuple[int, Fact, tuple[Fact, ...]]]) -> None:
    """Each step is a recorded instance or a known fact, and uses earlier steps only."""
    earlier: set[Fact] = set()
    for step in proof.steps:
        if step.clause is None:
            assert step.fact in known
        else:
            assert (step.clause.index, step.fact, step.premises) in instances
            assert set(step.premises) <= earlier, f"{step.fact} uses a later fact"
        assert step.fact not in earlier
        earlier.add(step.fact)
    assert proof.steps[-1].fact == proof.fact


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("seed", range(4))
def test_every_fact_has_a_well_founded_proof(engine: str, seed: int) -> None:
    _, log, relations = logged(engine, seed)
    known = {Fact(name, row) for name, rows in case(seed).items() for row in rows}
    instances = {(i.clause.index, i.head, i.premises) for i in log.instances()}
    assert log.logged_relations == {"path", "degree", "twin"}
    for levels in (None, {"edge": 0, "shortcut": 2, "join": 1}):
        for name, rows in relations.items():
            for row in rows:
                check(log.explain((name, row), levels), known, instances)


@pytest.mark.parametrize("engine", ENGINES)
def test_instances_are_true_instances(engine: str) -> None:
    """Heads and premises must hold, and evaluate to what the clause says under the substitution."""
    program, log, relations = logged(engine)
    facts = {Fact(n, r) for n, rows in {**relations, **case(0)}.items() for r in rows}
    seen = 0
    for instance in log.instances():
        assert instance.head in facts
        assert set(instance.premises) <= facts
        if instance.clause.law == "join":
            x, z = instance.substitution["x"], instance.substitution["z"]
            assert instance.head == Fact("path", (x, z, None))
            assert x != z
            assert instance.premises[0].args[2] == instance.substitution["_#1"]
            seen += 1
    assert seen > 0
    assert len(log) == len(list(log.instances()))
    assert program.clauses[2].law == "shortcut"


@pytest.mark.souffle
@needs_souffle
@pytest.mark.parametrize("seed", range(6))
def test_logs_are_equal_on_both_engines(seed: int) -> None:
    logs = [logged(engine, seed)[1] for engine in ("embedded", "souffle")]
    assert list(logs[0].instances()) == list(logs[1].instances())
    for name in ("path", "twin"):
        for fact in logs[0].best_level(name):
            assert logs[0].explain(fact) == logs[1].explain(fact)


def naive_levels(log: DerivationLog, levels: Mapping[str, int], given: set[Fact]) -> dict[Fact, int]:
    """Smallest highest level by trying all instances until nothing improves."""
    best = dict.fromkeys(given, 0)
    changed = True
    while changed:
        changed = False
        for instance in log.instances():
            derivable = [p for p in instance.premises if p.relation in log.logged_relations]
            if any(p not in best for p in derivable):
                continue
            level = max([levels.get(instance.clause.law or "", 0), *(best[p] for p in derivable)])
            if level < best.get(instance.head, 10**9):
                best[instance.head] = level
                changed = True
    return best


@pytest.mark.parametrize("seed", range(6))
def test_levels_are_smallest(seed: int) -> None:
    _, log, _ = logged("embedded", seed)
    levels = {"edge": seed % 3, "shortcut": (seed + 1) % 3, "join": (seed + 2) % 3}
    best = naive_levels(log, levels, set())
    for name in ("path", "degree", "twin"):
        assert log.best_level(name, levels) == {f: v for f, v in best.items() if f.relation == name}
    for fact, level in log.best_level("path", levels).items():
        proof = log.explain(fact, levels)
        assert proof.level == level == max(levels.get(s.law or "", 0) for s in proof.steps)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("among", [None, frozenset({0, 2, 3})])
def test_steps_together_are_as_weak_as_the_best_derivation(seed: int, among: frozenset[int] | None) -> None:
    _, log, _ = logged("embedded", seed)
    levels = {"edge": seed % 3, "shortcut": (seed + 1) % 3, "join": (seed + 2) % 3}
    for name in ("path", "twin"):
        for fact, level in log.best_level(name, levels).items():
            steps = log.last_steps([fact], "path", levels, among)
            assert max(s.level for s in steps.values()) == level
            assert all(f == fact or among is None or f.args[0] in among for f in steps)
            assert all(s.causes or not s.level for s in steps.values())


def test_laws_used_counts_shared_parts_once() -> None:
    program = Program.from_text(
        """
.decl start(x:number)
// @law first
.decl a(x:number)
// @law first
a(x) :- start(x).
// @law second
a(x + 1) :- a(x), x < 5.
.decl both(x:number, y:number)
// @law pair
both(x, y) :- a(x), a(y).
""".replace("// @law first\n.decl a", ".decl a")
    )
    log = run(program, {"start": [(1,)]}, [], "embedded", log=True).log
    assert log is not None
    assert log.laws_used([("both", (3, 3))]) == {"first": 1, "pair": 1, "second": 2}
    assert log.laws_used([("both", (3, 2)), ("both", (2, 4))]) == {"first": 1, "pair": 2, "second": 3}
    assert log.laws_used([]) == {}
    second = [i for i in log.instances() if i.clause.law == "second"]
    assert [i.substitution for i in second] == [{"x": n, "(x + 1)": n + 1} for n in range(1, 5)]
    assert str(log.explain(("a", (2,)))) == "0: start(1)  [given]\n1: a(1)  [first from 0]\n2: a(2)  [second from 1]"


def test_given_facts_of_logged_relations_need_no_derivation() -> None:
    program = Program.from_text(".decl a(x:number)\n// @law up\na(x + 1) :- a(x), x < 9.\n// @law zero\na(0).")
    log = run(program, {"a": [(5,)]}, ["a"], "embedded", log=True).log
    assert log is not None
    assert log.explain(("a", (5,)), {"up": 1, "zero": 2}).steps[0].clause is None
    assert log.explain(("a", (7,)), {"up": 1, "zero": 2}).level == 1
    assert log.explain(("a", (4,)), {"up": 1, "zero": 2}).level == 2
    assert log.explain(("a", (0,))).steps[0].law == "zero"


STEPS = """
// @semantic alike
.decl alike(x:number, y:number)
.decl link(x:number, y:number)
link(x, y) :- alike(x, y), x < y.
// @semantic good
.decl good(x:number, y:number)
// @law start
good(0, 0).
// @law next
good(x + 1, y) :- good(x, y), x < 4.
// @law carry
good(x, z) :- good(x, y), link(y, z).
.decl claim(x:number)
// @law claim
claim(x) :- good(x, 7).
"""


@pytest.mark.parametrize("engine", ENGINES)
def test_given_facts_have_levels_of_their_own(engine: str) -> None:
    log = run(Program.from_text(STEPS), {"alike": [(0, 7), (0, 8), (8, 9)]}, ["good"], engine, log=True).log
    assert log is not None
    laws = dict.fromkeys(("start", "next", "carry", "claim"), 0)
    levels = Levels(laws, {Fact("alike", (0, 8)): 1})
    best = log.best_level("good", levels)
    assert [best[Fact("good", (2, y))] for y in (0, 7, 8, 9)] == [0, 0, 1, 1]
    assert log.explain(("good", (2, 9)), levels).level == 1
    assert log.given_used([("claim", (3,))], "alike", levels) == {Fact("alike", (0, 7))}
    assert set(log.best_level("good", laws).values()) == {0}


@pytest.mark.parametrize("engine", ENGINES)
def test_a_derivation_in_steps_names_what_every_step_needs(engine: str) -> None:
    log = run(Program.from_text(STEPS), {"alike": [(0, 7)]}, ["good"], engine, log=True).log
    assert log is not None
    weak = Fact("alike", (0, 7))
    levels = Levels({"start": 2, "next": 0, "carry": 0, "claim": 1}, {weak: 1})
    steps = log.last_steps([("claim", (2,))], "good", levels)
    assert steps.pop(Fact("claim", (2,))) == LastStep(1, frozenset({"claim"}))
    assert steps.pop(Fact("good", (0, 0))) == LastStep(2, frozenset({"start"}))
    assert [s for s in steps.values() if s.level] == [LastStep(1, frozenset({weak}))], "one step needs the weak fact"
    assert all(f.args[0] <= 2 for f in steps), "facts that the goal does not need are no part of it"
    # facts that end no step pass on what they rest on
    steps = {f: s._replace(passed=frozenset()) for f, s in steps.items()}
    ends = log.last_steps([("claim", (2,))], "good", levels, among={2})
    assert any(Fact("good", (0, 0)) in s.passed for s in ends.values())
    assert max(s.level for f, s in ends.items() if f.relation == "good") == 2


def test_what_cannot_be_explained() -> None:
    _, log, _ = logged("embedded")
    with pytest.raises(InputError, match="not derived"):
        log.explain(("path", (99, 99, None)))
    with pytest.raises(InputError, match="not logged; logged relations: degree, path, twin"):
        log.explain(("edge", (1, 2)))
    with pytest.raises(RuleError, match="no level is known for the law 'join'"):
        log.best_level("path", {"edge": 1, "shortcut": 1})


@pytest.mark.parametrize("engine", ENGINES)
def test_a_deep_proof_needs_no_recursion(engine: str) -> None:
    program = Program.from_text(
        ".decl e(x:number,y:number)\n.decl r(x:number)\n// @law root\nr(0).\n// @law step\nr(y) :- r(x), e(x,y)."
    )
    log = run(program, {"e": [(i, i + 1) for i in range(3000)]}, [], engine, log=True).log
    assert log is not None
    proof = log.explain(("r", (3000,)))
    assert [s.fact.args for s in proof.steps if s.fact.relation == "r"] == [(i,) for i in range(3001)]
    assert log.laws_used([("r", (3000,))]) == {"root": 1, "step": 3000}


@pytest.mark.parametrize("engine", ENGINES)
def test_a_clause_with_many_variables(engine: str) -> None:
    """More variables than Soufflé has columns for."""
    names = [f"v{i}" for i in range(30)]
    row = (*range(20), "x, y]", (1, (2, None)))
    columns = ", ".join(f"c{i}:number" for i in range(20)) + ", s:symbol, l:L"
    first, second = [*names[:20], "s", "l"], [*names[10:30], "s", "l"]
    program = Program.from_text(
        f".type L = [h:number, t:L]\n.decl w({columns})\n.decl o(a:number, b:number, l:L)\n// @law wide\n"
        f"o(v0, v29, l) :- w({', '.join(first)}), w({', '.join(second)}), {' + '.join(names)} > 0."
    )
    other = (*row[10:20], *range(100, 110), *row[20:])
    log = run(program, {"w": [row, other]}, [], engine, log=True).log
    assert log is not None
    (instance,) = log.instances()
    assert instance.head == Fact("o", (0, 109, (1, (2, None))))
    assert instance.premises == (Fact("w", row), Fact("w", other))
    assert instance.substitution["s"] == "x, y]"
