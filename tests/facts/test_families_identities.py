"""Ranks that differ only in identities, in operand order or in the outputs they use; and ranks that write memory."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_families import AR, arg, check_projection, graph, node, two

from emerge.facts.families import MIXED, FamilyGraph, FamilyNode, RankVector, zip_families
from emerge.facts.mesh import Mesh
from emerge.facts.sameness import RankValues, identity_operand, is_commutative
from emerge.graph.model import DType, Graph, Node, Ref, TensorType
from emerge.graph.relations import Leaf, RelationEntry
from emerge.relate.statement import entry_statements

SIN, COS = "aten.sin.default", "aten.cos.default"
ADD, ADD_ = "aten.add.Tensor", "aten.add_.Tensor"


def partial(f: FamilyGraph) -> set[str]:
    return {n.name for n in f.nodes if len(n.ranks) < f.ranks}


# ---- identities -----------------------------------------------------------------------------------------------------

IDENTITY_CALLS: list[tuple[Any, ...]] = [
    ("aten.clone.default",), ("aten.detach.default",), ("aten.alias.default",), ("aten.contiguous.default",),
    ("aten.lift_fresh_copy.default",), ("_c10d_functional.wait_tensor.default",), ("aten.view.default", [4]),
    ("aten.reshape.default", [-1]), ("aten._to_copy.default",),
]  # fmt: skip


@pytest.mark.parametrize("call", IDENTITY_CALLS, ids=lambda c: c[0])
@pytest.mark.parametrize("rank", [0, 1])
def test_an_identity_on_one_rank_is_looked_through(call: tuple[Any, ...], rank: int) -> None:
    op, *rest = call
    plain = [("a", SIN, "@x"), ("b", ADD, "@a", "@w"), ("c", COS, "@b")]
    more = [("a", SIN, "@x"), ("i", op, "@a", *rest), ("b", ADD, "@i", "@w"), ("c", COS, "@b")]
    f = two(more, plain, ["c"]) if rank == 0 else two(plain, more, ["c"])
    assert partial(f) == {"i"}
    assert node(f, "b").args == [Ref("a"), Ref("w")]
    assert node(f, "b").members == {0: "b", 1: "b"}


def test_identities_on_all_ranks_stay_where_they_are() -> None:
    nodes = [("a", SIN, "@x"), ("i", "aten.clone.default", "@a"), ("b", COS, "@i")]
    f = two(nodes, nodes, ["b"])
    assert node(f, "b").args == [Ref("i")]
    check_projection(f)


def test_the_last_common_value_is_the_operand() -> None:
    plain = [("a", SIN, "@x"), ("i", "aten.clone.default", "@a"), ("b", COS, "@i")]
    more = [("a", SIN, "@x"), ("i", "aten.clone.default", "@a"), ("j", "aten.alias.default", "@i"), ("b", COS, "@j")]
    f = two(more, plain, ["b"])
    assert partial(f) == {"j"}
    assert node(f, "b").args == [Ref("i")]


def test_different_identities_on_different_ranks() -> None:
    f = two(
        [("i", "aten.clone.default", "@x"), ("a", SIN, "@i")],
        [("i", "aten.detach.default", "@x"), ("j", "aten.alias.default", "@i"), ("a", SIN, "@j")],
        ["a"],
    )
    assert node(f, "a").ranks == (0, 1)
    assert node(f, "a").args == [Ref("x")]


def test_an_identity_before_a_collective_needs_no_join() -> None:
    f = two(
        [("a", SIN, "@x"), ("i", "aten.clone.default", "@a"), ("r", AR, "@i", "sum", "g")],
        [("a", SIN, "@x"), ("r", AR, "@a", "sum", "g")],
        ["r"],
    )
    assert all(n.op != MIXED for n in f.nodes)
    assert node(f, "r").args[0] == Ref("a")


def test_what_is_joined_is_joined_before_identities_of_one_rank() -> None:
    f = two(
        [("a", SIN, "@x"), ("i", "aten.clone.default", "@a"), ("r", AR, "@i", "sum", "g")],
        [("a", SIN, "@x"), ("b", ADD, "@a", "@w"), ("r", AR, "@b", "sum", "g")],
        ["r"],
    )
    assert node(f, "r.operand0").args == [Ref("a"), Ref("b")]


def test_equal_calls_are_told_apart_through_identities() -> None:
    first = [("e", "aten.empty", 4), ("e_1", "aten.empty", 4), ("a", SIN, "@e"), ("b", COS, "@e_1")]
    second = [
        ("e", "aten.empty", 4),
        ("e_1", "aten.empty", 4),
        ("i", "aten.clone.default", "@e_1"),
        ("a", SIN, "@i"),
        ("b", COS, "@e"),
    ]
    f = two(first, second, ["a", "b"])
    assert node(f, "e").members == {0: "e", 1: "e_1"}
    assert partial(f) == {"i"}


def test_casts_and_views_that_change_something_are_no_identities() -> None:
    types = {"x": TensorType("float32", (4,)), "s": TensorType("float32", ("u0",))}

    def made(op: str, *args: Any, dtype: str = "float32", shape: tuple[int | str, ...] = (4,), **kwargs: Any) -> Node:
        return Node("n", op, [arg(a) for a in args], kwargs, dtype=dtype, shape=shape)

    assert identity_operand(made("aten._to_copy.default", "@x", dtype="float32"), types) == "x"
    assert (
        identity_operand(made("aten._to_copy.default", "@x", dtype="bfloat16", kind=DType("bfloat16")), types) is None
    )
    assert identity_operand(made("aten.view.default", "@x", [2, 2], shape=(2, 2)), types) is None
    assert identity_operand(made("aten.view.default", "@s", [-1], shape=("u0",)), types) is None
    assert identity_operand(made("aten.neg.default", "@x"), types) is None
    assert identity_operand(made("aten.to.other", "@x", "@x"), types) is None


# ---- memory ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "write",
    [
        [("m", ADD_, "@i", "@w")],  # the result
        [("m", ADD_, "@a", "@w")],  # the operand
        [("v", "aten.slice.Tensor", "@a", 0, 0, 4), ("m", ADD_, "@v", "@w")],  # a view of the operand
        [("v", "aten.split.Tensor", "@a", 4), ("g", "operator.getitem", "@v", 0), ("m", ADD_, "@g", "@w")],
        [("m", "aten._foreach_add_.List", ["@w", "@a"], ["@x", "@x"])],
        [("m", "custom.kernel.default", "@a")],  # nobody knows what it does
    ],
)
def test_an_identity_is_not_looked_through_where_memory_may_be_written(write: list[tuple[Any, ...]]) -> None:
    nodes = [("a", SIN, "@x"), ("i", "aten.clone.default", "@a"), *write, ("b", COS, "@i")]
    g = graph(0, 1, nodes, ["b"])
    assert RankValues(g, g.types()).through == {}
    g = graph(0, 1, [n for n in nodes if n not in write], ["b"])
    assert RankValues(g, g.types()).through == {"i": "a"}


def test_reads_before_and_after_a_write_do_not_zip() -> None:
    before = [("b", SIN, "@x"), ("m", ADD_, "@x", "@w")]
    f = two(before, before[::-1], ["b", "m"])
    assert [(n.name, n.ranks) for n in f.nodes if n.op == SIN] == [("b", (0,)), ("b@1", (1,))]
    assert node(f, "m").ranks == (0, 1)
    names = [n.name for n in f.nodes]
    assert names.index("b") < names.index("m") < names.index("b@1")


def test_a_collective_before_the_write_on_one_rank_and_behind_it_on_the_other() -> None:
    write, reduce = ("m", ADD_, "@x", "@w"), ("r", AR, "@x", "sum", "g")
    f = two([write, reduce], [reduce, write], ["r"])
    assert any("in different orders" in p for p in f.problems)
    assert all(len(n.ranks) == 1 for n in f.nodes if n.op != MIXED)


def test_one_join_is_not_used_for_two_values_of_a_name() -> None:
    def side(operand: str) -> list[tuple[Any, ...]]:
        return [
            ("b", ADD, "@x", "@w"),
            ("r", AR, operand, "sum", "g"),
            ("m", ADD_, "@x", "@w"),
            ("s", AR, operand, "sum", "g"),
        ]

    f = two(side("@x"), side("@b"), ["r", "s"])
    names = [n.name for n in f.nodes]
    assert names.index("r.operand0") < names.index("m") < names.index("s.operand0")


def test_a_join_is_not_written_to() -> None:
    op = "_c10d_functional.all_reduce_.default"
    f = two([("r", op, "@x", "sum", "g")], [("b", SIN, "@x"), ("r", op, "@b", "sum", "g")], ["r"])
    assert any("writes in place to what ranks compute differently" in p for p in f.problems)
    assert {n.ranks: n.args[0] for n in f.nodes if n.op == op} == {(0,): Ref("x"), (1,): Ref("b")}


# ---- operand order --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["add", "mul", "maximum", "minimum", "eq", "ne", "logical_and", "bitwise_or"])
def test_exchanged_operands_zip_in_the_order_of_the_lowest_rank(name: str) -> None:
    op = f"aten.{name}.Tensor"
    f = two(
        [("a", SIN, "@x"), ("b", op, "@a", "@w"), ("c", COS, "@b")],
        [("a", SIN, "@x"), ("b", op, "@w", "@a"), ("c", COS, "@b")],
        ["c"],
    )
    assert partial(f) == set()
    assert node(f, "b").args == [Ref("a"), Ref("w")]


def test_exchanged_operands_behind_identities() -> None:
    f = two(
        [("i", "aten.clone.default", "@x"), ("j", "aten.clone.default", "@w"), ("b", ADD, "@i", "@j")],
        [("j", "aten.clone.default", "@w"), ("i", "aten.alias.default", "@x"), ("b", ADD, "@j", "@i")],
        ["b"],
    )
    assert node(f, "b").args == [Ref("x"), Ref("j")]


@pytest.mark.parametrize("op", ["aten.sub.Tensor", "aten.add_.Tensor", "aten.div.Tensor", "aten.mm.default"])
def test_other_operators_keep_their_order(op: str) -> None:
    f = two([("b", op, "@x", "@w")], [("b", op, "@w", "@x")], ["b"])
    assert partial(f) == {"b", "b@1"}


def test_a_weighted_sum_is_not_commutative() -> None:
    def made(*args: Any, **kwargs: Any) -> bool:
        return is_commutative(Node("n", ADD, [arg(a) for a in args], kwargs))

    assert made("@x", "@w")
    assert made("@x", "@w", alpha=1)
    assert not made("@x", "@w", alpha=2)
    assert not made("@x", 3)


# ---- multi-output operators -----------------------------------------------------------------------------------------


def split(rank: int, world: int, index: int, sizes: Any = 1, shape: tuple[int, ...] = (1,)) -> Graph:
    g = graph(rank, world, [("s", "aten.split.Tensor", "@x", sizes), ("c", "operator.getitem", "@s", index)], ["c"])
    g.nodes[0].is_tuple, g.nodes[0].dtype, g.nodes[0].shape = True, None, None
    g.nodes[0].elements = {index: TensorType("float32", shape)}
    g.nodes[1].shape = shape
    return g


def test_ranks_may_use_different_outputs() -> None:
    f = zip_families([split(r, 4, r) for r in range(4)])
    assert node(f, "s").ranks == (0, 1, 2, 3)
    assert node(f, "s").elements == {i: TensorType("float32", (1,)) for i in range(4)}
    assert node(f, "c").args == [Ref("s"), RankVector((0, 1, 2, 3))]
    check_projection(f)


def test_contradicting_outputs_stay_apart() -> None:
    f = zip_families([split(0, 3, 0, [1, 3]), split(1, 3, 0, [3, 1], (3,)), split(2, 3, 1, [1, 3], (3,))])
    assert sorted(n.ranks for n in f.nodes if n.op == "aten.split.Tensor") == [(0, 2), (1,)]
    check_projection(f)


def test_many_contradicting_outputs_do_not_mix() -> None:
    graphs = [split(r, 12, 0, [r + 1], (r + 1,)) for r in range(12)]
    f = zip_families([*graphs])
    assert sorted(n.ranks for n in f.nodes if n.op == "aten.split.Tensor") == [(r,) for r in range(12)]


# ---- outputs --------------------------------------------------------------------------------------------------------


def test_an_output_behind_an_identity_is_replicated() -> None:
    f = two(
        [("a", ADD, "@x", "@w"), ("i", "aten.clone.default", "@a")],
        [("a", ADD, "@w", "@x"), ("j", "aten.detach.default", "@a")],
        [],
    )
    for g, name in zip(f.graphs, "ij"):
        g.outputs = [name]
    f = zip_families(f.graphs)
    assert [(o.name, o.members) for o in f.outputs] == [("a", {0: "i", 1: "j"})]
    entry = RelationEntry("y", "replicated", [Leaf(0, "i"), Leaf(1, "j")])
    (statement,) = entry_statements(entry, (4,), f, Mesh({"tp": 2}))
    assert statement.implementation.name == "a"


def test_outputs_that_differ_in_more_are_joined() -> None:
    f = two(
        [("a", SIN, "@x"), ("i", "aten.clone.default", "@a")],
        [("a", SIN, "@x"), ("i", COS, "@a")],
        ["i"],
    )
    assert f.outputs[0].name == "output0"
    assert node(f, "output0").args == [Ref("a"), Ref("i@1")]


# ---- executing the families gives what the ranks give ---------------------------------------------------------------


class Memory:
    """Symbolic execution with real memory: a name is a cell, in-place operators write to it, aliases share it."""

    def __init__(self) -> None:
        self.cell: dict[str, list[Any]] = {}

    def value(self, name: str) -> Any:
        return self.cell[name][0]

    def run(self, name: str, op: str, args: list[Any]) -> None:
        refs = [a.name for a in args if isinstance(a, Ref)]
        values = [self.value(r) for r in refs]
        if op == ADD_:
            self.cell[name] = self.cell[refs[0]]
            self.cell[name][0] = ("add", *sorted(values, key=repr))
        elif op == "aten.alias.default":
            self.cell[name] = self.cell[refs[0]]
        elif op == "aten.clone.default":
            self.cell[name] = [values[0]]
        elif op == ADD:
            self.cell[name] = [("add", *sorted(values, key=repr))]
        else:
            self.cell[name] = [(op, *values)]


def executed(g: Graph) -> tuple[dict[str, Any], list[Any]]:
    memory, made = Memory(), {}
    for i in g.inputs:
        memory.cell[i.name] = [(i.name,)]
    for n in g.nodes:
        memory.run(n.name, n.op, n.args)
        made[n.name] = memory.value(n.name)
    return made, [memory.value(o) for o in g.outputs if o is not None]


def check_execution(f: FamilyGraph) -> None:
    """Every family holds on every rank the value its member has there, in the order of the families."""
    for r, g in enumerate(f.graphs):
        made, outputs = executed(g)
        memory = Memory()
        for i in f.inputs:
            memory.cell[i.name] = [(i.members[r],)]
        for n in f.nodes:
            if r not in n.ranks:
                continue
            if n.op == MIXED:
                ((source,),) = [[a for a, rs in zip(n.args, n.kwargs["ranks"]) if r in rs]]  # type: ignore[arg-type,operator]
                memory.cell[n.name] = [memory.value(source.name)]  # type: ignore[union-attr]
                continue
            memory.run(n.name, n.op, list(n.args))
            assert memory.value(n.name) == made[n.members[r]], (n, r)
        for o in f.outputs:
            assert o.name is not None
            assert memory.value(o.name) == outputs[o.position], (o, r)


def program(rng: random.Random, size: int, writes: bool) -> list[tuple[Any, ...]]:
    names, nodes = ["x", "w"], []
    for i in range(size):
        op = rng.choice([SIN, ADD, ADD, "aten.clone.default", "aten.alias.default", AR, *([ADD_] if writes else [SIN])])
        operands = [f"@{rng.choice(names)}" for _ in range(2 if op in (ADD, ADD_) else 1)]
        nodes.append((f"n{i}", op, *operands, *(("sum", "g") if op == AR else ())))
        names.append(f"n{i}")
    return nodes


def varied(rng: random.Random, nodes: list[tuple[Any, ...]], mode: str) -> list[tuple[Any, ...]]:
    """Another rank's program: with identities and exchanged operands (the same values), or with anything else."""
    out: list[tuple[Any, ...]] = []
    now: dict[str, str] = {}
    for n in nodes:
        n = (n[0], n[1], *(now.get(a, a) for a in n[2:]))
        if n[1] == ADD and rng.random() < 0.4:
            n = (n[0], n[1], n[3], n[2])
        if mode == "anything" and rng.random() < 0.2:
            n = (n[0], rng.choice([SIN, COS]), n[2])
        out.append(n)
        if rng.random() < 0.3:
            out.append((f"{n[0]}i", rng.choice(["aten.clone.default", "aten.alias.default"]), f"@{n[0]}"))
            now[f"@{n[0]}"] = f"@{n[0]}i"
    if mode == "anything":
        for _ in range(4):  # neighbours that do not read one another change places
            k = rng.randrange(len(out) - 1)
            a, b = out[k], out[k + 1]
            if f"@{a[0]}" not in b[2:]:
                out[k], out[k + 1] = b, a
    return out


@settings(max_examples=300, deadline=None)
@given(st.integers(0, 2**32), st.booleans())
def test_families_execute_as_their_ranks(seed: int, writes: bool) -> None:
    rng = random.Random(seed)
    base = program(rng, 10, writes)
    everyone = {"g": [[0, 1, 2]]}
    graphs = []
    for r in range(3):
        nodes = varied(rng, base, "anything") if r or rng.random() < 0.5 else base
        outputs: list[str | None] = [rng.choice([n[0] for n in nodes]) for _ in range(2)]
        graphs.append(graph(r, 3, nodes, outputs, groups=everyone))
    check_execution(zip_families(graphs))


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 2**32))
def test_only_identities_are_partial(seed: int) -> None:
    """Ranks that compute the same up to identities and operand order; every call is told apart by a scalar."""
    rng = random.Random(seed)
    base = [(*n, int(n[0][1:])) if n[1] == SIN else n for n in program(rng, 12, writes=False)]
    distinct: dict[Any, str] = {}
    base = [n for n in base if distinct.setdefault((n[1], *sorted(map(str, n[2:]))), n[0]) == n[0] or n[1] == AR]
    kept = {n[0] for n in base} | {"x", "w"}
    base = [n for n in base if all(a[1:] in kept for a in n[2:] if isinstance(a, str) and a.startswith("@"))]
    while True:  # what reads something dropped goes as well
        kept = {n[0] for n in base} | {"x", "w"}
        left = [n for n in base if all(a[1:] in kept for a in n[2:] if isinstance(a, str) and a.startswith("@"))]
        if len(left) == len(base):
            break
        base = left
    outputs: list[str | None] = [base[-1][0]] if base else ["x"]
    everyone = {"g": [[0, 1, 2]]}
    graphs = [
        graph(r, 3, base if r == 0 else varied(rng, base, "same"), outputs, groups=everyone)  # type: ignore[arg-type]
        for r in range(3)
    ]
    f = zip_families(graphs)
    assert f.problems == []
    for n in f.nodes:
        assert isinstance(n, FamilyNode)
        assert n.op != MIXED
        assert n.ranks == (0, 1, 2) or n.op in ("aten.clone.default", "aten.alias.default"), n
    check_execution(f)


def test_cost_stays_linear_with_identities(monkeypatch: pytest.MonkeyPatch) -> None:
    """A chain of identities is not walked again and again."""
    from emerge.facts import zipping

    counted = {"steps": 0}
    original = RankValues.path

    def counting(self: RankValues, name: str) -> Any:
        for step in original(self, name):
            counted["steps"] += 1
            yield step

    monkeypatch.setattr(zipping.RankValues, "path", counting)
    nodes: list[tuple[Any, ...]] = [("a0", SIN, "@x")]
    nodes += [(f"a{i}", "aten.alias.default" if i % 2 else SIN, f"@a{i - 1}") for i in range(1, 200)]
    zip_families([graph(r, 4, nodes, ["a199"], groups={}) for r in range(4)])
    assert counted["steps"] <= 4 * len(nodes)
