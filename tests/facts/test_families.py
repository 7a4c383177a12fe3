"""Zipping rank graphs into families: what zips, what stays apart, and that nothing is lost on the way."""

from __future__ import annotations

import copy
import os
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from emerge.facts.families import (
    MIXED,
    UNPAIRED,
    FamilyGraph,
    FamilyNode,
    Group,
    RankVector,
    mesh_from,
    zip_families,
)
from emerge.graph.model import DType, Graph, Input, Node, Ref, TensorType, TypedConst
from emerge.graph.source import load_case
from emerge.util.errors import ConfigError, GraphError

SUITE = Path(os.environ.get("EMERGE_PEER_SUITE", Path(__file__).parents[2] / "../shared/peer_suite"))
TP2 = {"g": [[0, 1]]}
AR = "_c10d_functional.all_reduce.default"


def arg(text: Any) -> Any:
    """``"@x"`` is a reference to x; everything else stands for itself."""
    if isinstance(text, list):
        return [arg(t) for t in text]
    return Ref(text[1:]) if isinstance(text, str) and text.startswith("@") else text


def graph(
    rank: int,
    world: int,
    nodes: list[tuple[Any, ...]],
    outputs: list[str | None],
    inputs: tuple[str, ...] = ("x", "w"),
    groups: dict[str, list[list[int]]] | None = None,
) -> Graph:
    """A rank graph of float32[4] tensors; a node is ``(name, op, *args)``."""
    return Graph(
        "g",
        [Input(i, "float32", (4,)) for i in inputs],
        [Node(n[0], n[1], [arg(a) for a in n[2:]], dtype="float32", shape=(4,)) for n in nodes],
        outputs,
        rank=rank,
        world_size=world,
        groups=copy.deepcopy(TP2 if groups is None else groups),
        path=f"rank{rank}.json",
    )


def two(first: list[tuple[Any, ...]], second: list[tuple[Any, ...]], outputs: list[str | None]) -> FamilyGraph:
    return zip_families([graph(0, 2, first, outputs), graph(1, 2, second, outputs)])


def node(f: FamilyGraph, name: str) -> FamilyNode:
    value = f.value(name)
    assert isinstance(value, FamilyNode)
    return value


# ---- projection: a family graph must hold every rank graph, exactly ----------------------------------------------


def plain(value: Any, rank: int, at: int, f: FamilyGraph) -> Any:
    if isinstance(value, Ref):
        return Ref(f.value(value.name).members[rank])  # type: ignore[arg-type]
    if isinstance(value, RankVector):
        return value.values[at]
    if isinstance(value, Group):
        return ("group", value.ranks[at])
    if isinstance(value, list):
        return [plain(v, rank, at, f) for v in value]
    return value


def group_of(g: Graph, gid: Any) -> Any:
    ranks = next((m for m in g.groups.get(gid, ()) if g.rank in m), None) if isinstance(gid, str) else None
    return gid if ranks is None else ("group", tuple(ranks))


def check_projection(f: FamilyGraph, group_at: dict[str, int] | None = None) -> None:
    """Every node of every rank is a member of exactly one family, from which it can be read back."""
    seen: list[set[str]] = [set() for _ in f.graphs]
    defined: set[str] = set()
    for i in f.inputs:
        assert i.ranks == tuple(sorted(i.members))
        defined.add(i.name)
        for r, m in i.members.items():
            item = next(x for x in f.graphs[r].inputs if x.name == m)
            assert (item.dtype, item.shape) == (i.dtype, i.shape)
            seen[r].add(m)
    for n in f.nodes:
        assert n.ranks == tuple(sorted(n.members))
        assert n.name not in defined
        assert set(n.refs()) <= defined  # data-flow order
        defined.add(n.name)
        if n.op == MIXED:
            parts = n.kwargs["ranks"]
            assert sorted(r for part in parts for r in part) == list(n.ranks)  # type: ignore[union-attr]
            for ref, part in zip(n.args, parts):  # type: ignore[arg-type]
                for r in part:  # type: ignore[union-attr]
                    assert f.value(ref.name).members[r] == n.members[r]  # type: ignore[union-attr, index]
            continue
        for at, r in enumerate(n.ranks):
            g = f.graphs[r]
            original = next(x for x in g.nodes if x.name == n.members[r])
            assert n.members[r] not in seen[r]
            seen[r].add(n.members[r])
            assert (original.op, original.dtype, original.shape) == (n.op, n.dtype, n.shape)
            args = list(original.args)
            if n.group is not None and group_at is not None:
                args[group_at[n.op]] = group_of(g, args[group_at[n.op]])
            assert repr([plain(a, r, at, f) for a in n.args]) == repr(args)
            assert plain(n.const, r, at, f) == original.const
            assert f.family_of(r, n.members[r]) == n.name
    for g, names in zip(f.graphs, seen):
        assert names == {i.name for i in g.inputs} | {n.name for n in g.nodes}
    for g in f.graphs:
        out: list[Any] = [...] * len(g.outputs)
        for o in f.outputs:
            if g.rank in o.ranks:
                out[o.position] = o.members[g.rank]
                assert o.name is None or f.value(o.name).members[g.rank] == o.members[g.rank]
        assert out == g.outputs


# ---- nodes ----------------------------------------------------------------------------------------------------------


def test_equal_ranks_give_the_graph_itself() -> None:
    nodes = [("a", "aten.mul.Tensor", "@x", "@w"), ("b", "aten.add.Tensor", "@a", 1)]
    f = two(nodes, nodes, ["b", None])
    assert [(n.name, n.op, n.args, n.ranks) for n in f.nodes] == [
        ("a", "aten.mul.Tensor", [Ref("x"), Ref("w")], (0, 1)),
        ("b", "aten.add.Tensor", [Ref("a"), 1], (0, 1)),
    ]
    assert [(o.position, o.name) for o in f.outputs] == [(0, "b"), (1, None)]
    assert f.types()["a"] == TensorType("float32", (4,))
    assert f.problems == []
    check_projection(f)


def test_differing_scalars_become_rank_vectors() -> None:
    f = two([("a", "op", "@x", [0, True, 2.0])], [("a", "op", "@x", [7, True, 2.0])], ["a"])
    assert node(f, "a").args == [Ref("x"), [RankVector((0, 7)), True, 2.0]]
    check_projection(f)


def test_minus_zero_is_not_zero_and_nan_is_itself() -> None:
    nan = float("nan")
    f = two([("a", "op", 0.0, nan)], [("a", "op", -0.0, nan)], ["a"])
    vector, same = node(f, "a").args
    assert isinstance(vector, RankVector)
    assert repr(vector.values) == "(0.0, -0.0)"
    assert not isinstance(same, RankVector)


def test_int_and_float_do_not_zip() -> None:
    f = two([("a", "op", "@x", 1)], [("a", "op", "@x", 1.0)], ["a"])
    assert sorted(n.ranks for n in f.nodes if n.op == "op") == [(0,), (1,)]


def test_equal_scalars_are_preferred_over_order() -> None:
    f = two(
        [("a", "op", "@x", 1), ("b", "op", "@x", 2)],
        [("a", "op", "@x", 3), ("b", "op", "@x", 1)],
        ["a"],
    )
    assert node(f, "a").members == {0: "a", 1: "b"}
    assert node(f, "b").args[1] == RankVector((2, 3))
    check_projection(f)


def test_reordered_independent_nodes_zip() -> None:
    first = [
        ("m", "mul", "@x", 2),
        ("s", "sin", "@w"),
        ("t", "cos", "@x"),
        ("y", "add", "@m", "@s"),
        ("z", "sub", "@y", "@t"),
    ]
    second = [first[2], first[1], first[0], first[3], first[4]]
    f = two(first, second, ["z"])
    assert [n.name for n in f.nodes] == ["m", "s", "t", "y", "z"]  # rank 0's order
    assert all(n.ranks == (0, 1) for n in f.nodes)


def test_identical_calls_are_told_apart_by_their_consumers() -> None:
    first = [("e", "empty", 4), ("e_1", "empty", 4), ("a", "fill", "@e", 1), ("b", "copy", "@e_1", "@x")]
    second = [("e", "empty", 4), ("e_1", "empty", 4), ("a", "fill", "@e_1", 1), ("b", "copy", "@e", "@x")]
    f = two(first, second, ["a", "b"])
    assert node(f, "e").members == {0: "e", 1: "e_1"}
    assert all(n.ranks == (0, 1) for n in f.nodes)
    check_projection(f)


def test_extra_nodes_stay_partial_and_names_stay_unique() -> None:
    f = two([("a", "sin", "@x")], [("a", "cos", "@x"), ("b", "sin", "@x")], ["a"])
    assert {(n.name, n.ranks, n.op) for n in f.nodes if n.op != MIXED} == {("a", (0, 1), "sin"), ("a@1", (1,), "cos")}
    check_projection(f)


def test_devices_are_dropped() -> None:
    graphs = []
    for r in range(2):
        g = graph(r, 2, [("a", "op", "@x")], ["a"])
        device = TypedConst("device", f"cuda:{r}")
        g.nodes[0].args += [device, DType("float32")]
        g.nodes[0].kwargs = {"device": device, "layout": TypedConst("layout", "strided")}
        graphs.append(g)
    a = node(zip_families(graphs), "a")
    assert a.ranks == (0, 1)
    assert a.args == [Ref("x"), TypedConst("device", ""), DType("float32")]
    assert a.kwargs == {"layout": TypedConst("layout", "strided")}


def test_constants_that_differ_become_rank_vectors() -> None:
    graphs = [graph(r, 2, [("k", "get_attr", "k")], ["k"]) for r in range(2)]
    for r, g in enumerate(graphs):
        g.nodes[0].const, g.nodes[0].has_const = r * 8, True
    assert node(zip_families(graphs), "k").const == RankVector((0, 8))


def test_sequential_graph_is_the_case_of_one_rank() -> None:
    f = zip_families([graph(0, 1, [("a", AR, "@x", "sum", "g")], ["a"], groups={"g": [[0]]})])
    assert node(f, "a").args == [Ref("x"), "sum", Group(((0,),))]
    assert node(f, "a").group.is_trivial  # type: ignore[union-attr]
    assert f.ranks == 1


# ---- inputs ---------------------------------------------------------------------------------------------------------


def test_inputs_zip_by_label_then_name_then_position() -> None:
    def side(rank: int, names: list[tuple[str, str | None]]) -> Graph:
        g = graph(rank, 2, [], [])
        g.inputs = [Input(n, "float32", (4,), label=label) for n, label in names]
        return g

    f = zip_families(
        [
            side(0, [("p", "q.w"), ("a", None), ("b", None), ("c", None)]),
            side(1, [("z", None), ("b", None), ("a", None), ("r", "q.w")]),
        ]
    )
    assert [(i.name, i.members[1]) for i in f.inputs] == [("p", "r"), ("a", "a"), ("b", "b"), ("c", "z")]


def test_inputs_of_different_types_become_partial_families() -> None:
    g0, g1, g2 = (graph(r, 3, [], [], groups={}) for r in range(3))
    g1.inputs[1].shape = (3,)
    f = zip_families([g0, g1, g2])
    assert [(i.name, i.shape, i.ranks) for i in f.inputs] == [
        ("x", (4,), (0, 1, 2)),
        ("w", (4,), (0, 2)),
        ("w@1", (3,), (1,)),
    ]


# ---- collectives ----------------------------------------------------------------------------------------------------


def test_group_ids_are_resolved_per_rank() -> None:
    nodes = lambda gid: [("a", AR, "@x", "sum", gid), ("b", AR, "@a", "sum", "g")]  # noqa: E731
    f = zip_families(
        [
            graph(0, 2, nodes("1"), ["b"], groups={"1": [[0]], "g": [[0, 1]]}),
            graph(1, 2, nodes("3"), ["b"], groups={"3": [[1]], "g": [[0, 1]]}),
        ]
    )
    assert node(f, "a").args[2] == Group(((0,), (1,)))
    assert node(f, "b").group == Group(((0, 1), (0, 1)))
    assert node(f, "b").group.size == 2  # type: ignore[union-attr]
    assert f.problems == []
    check_projection(f, {AR: 2})


def test_groups_of_a_larger_mesh_share_one_family() -> None:
    groups = {"tp": [[0, 1], [2, 3]], "dp": [[0, 2], [1, 3]]}
    nodes = [("a", AR, "@x", "sum", "tp"), ("b", AR, "@a", "sum", "dp")]
    f = zip_families([graph(r, 4, nodes, ["b"], groups=groups) for r in range(4)])
    assert [(n.name, n.ranks) for n in f.nodes] == [("a", (0, 1, 2, 3)), ("b", (0, 1, 2, 3))]
    assert node(f, "a").group == Group(((0, 1), (0, 1), (2, 3), (2, 3)))
    assert node(f, "b").group == Group(((0, 2), (1, 3), (0, 2), (1, 3)))
    check_projection(f, {AR: 2})


def test_different_operands_meet_in_a_mixed_node() -> None:
    f = two(
        [("a", "mul", "@x", "@w"), ("r", AR, "@a", "sum", "g")],
        [("a", "mul", "@x", "@w"), ("b", "add", "@a", "@w"), ("r", AR, "@b", "sum", "g")],
        ["r"],
    )
    mixed = node(f, "r.operand0")
    assert (mixed.op, mixed.ranks, mixed.shape) == (MIXED, (0, 1), (4,))
    assert mixed.args == [Ref("a"), Ref("b")]
    assert mixed.kwargs == {"ranks": [[0], [1]]}
    assert node(f, "r").args == [Ref("r.operand0"), "sum", Group(((0, 1), (0, 1)))]
    assert [n.name for n in f.nodes] == ["a", "b", "r.operand0", "r"]
    assert f.problems == []
    check_projection(f, {AR: 2})


def test_issue_order_counts_not_structure() -> None:
    """The k-th call of a group meets the k-th call, even where another pairing would look nicer."""
    f = two(
        [("a", AR, "@x", "sum", "g"), ("b", AR, "@w", "sum", "g")],
        [("b", AR, "@w", "sum", "g"), ("a", AR, "@x", "sum", "g")],
        ["a", "b"],
    )
    assert node(f, "a").members == {0: "a", 1: "b"}
    assert f.value(f.outputs[0].name or "").name == "output0"  # the outputs are crossed, so they are mixed
    check_projection(f, {AR: 2})


def test_two_groups_of_the_same_ranks_are_told_apart_by_id() -> None:
    groups = {"g": [[0, 1]], "h": [[0, 1]]}
    a, b = ("a", AR, "@x", "sum", "g"), ("b", AR, "@w", "sum", "h")
    f = zip_families([graph(0, 2, [a, b], ["a"], groups=groups), graph(1, 2, [b, a], ["a"], groups=groups)])
    assert node(f, "a").members == {0: "a", 1: "a"}


def test_missing_collective_is_a_problem() -> None:
    f = two([("a", AR, "@x", "sum", "g"), ("b", AR, "@a", "sum", "g")], [("a", AR, "@x", "sum", "g")], ["a"])
    assert len(f.problems) == 1
    assert "collective 2 of process group [0, 1] does not meet: rank 1 issues 1 collectives only" in f.problems[0]
    assert "'b'" in f.problems[0]
    assert node(f, "a").ranks == (0, 1)
    assert node(f, "b").ranks == (0,)
    check_projection(f, {AR: 2})


@pytest.mark.parametrize(
    "other",
    [
        ("a", AR, "@x", "max", "g"),
        ("a", "_c10d_functional.broadcast.default", "@x", 0, "g"),
    ],
)
def test_collectives_of_different_kind_stay_apart(other: tuple[Any, ...]) -> None:
    f = two([("a", AR, "@x", "sum", "g")], [other], ["a"])
    assert "the calls differ in operator, shape, attributes" in f.problems[0]
    assert sorted(n.ranks for n in f.nodes if n.op != MIXED) == [(0,), (1,)]
    check_projection(f, {AR: 2, "_c10d_functional.broadcast.default": 2})


def test_collectives_of_different_shape_stay_apart() -> None:
    graphs = [graph(r, 2, [("a", AR, "@x", "sum", "g")], ["a"]) for r in range(2)]
    graphs[1].inputs[0].shape = graphs[1].nodes[0].shape = (3,)
    f = zip_families(graphs)
    assert len(f.problems) == 1
    assert [(o.position, o.ranks) for o in f.outputs] == [(0, (0,)), (0, (1,))]
    check_projection(f, {AR: 2})


def test_split_sizes_may_differ_within_a_group() -> None:
    op = "_c10d_functional.all_to_all_single.default"
    f = two([("a", op, "@x", [1, 3], [3, 1], "g")], [("a", op, "@x", [3, 1], [1, 3], "g")], ["a"])
    assert f.problems == []
    assert node(f, "a").args[1] == [RankVector((1, 3)), RankVector((3, 1))]
    check_projection(f, {op: 3})


def test_crossed_groups_are_reported_and_left_apart() -> None:
    groups = {"g": [[0, 1]], "h": [[0, 1]]}
    f = zip_families(
        [
            graph(0, 2, [("a", AR, "@x", "sum", "g"), ("b", AR, "@a", "sum", "h")], ["b"], groups=groups),
            graph(1, 2, [("b", AR, "@x", "sum", "h"), ("a", AR, "@b", "sum", "g")], ["a"], groups=groups),
        ]
    )
    assert any("crossed orders" in p for p in f.problems)
    check_projection(f, {AR: 2})


def test_unknown_group_names_the_key_to_add() -> None:
    f = two([("a", AR, "@x", "sum", "99")], [("a", AR, "@x", "sum", "99")], ["a"])
    assert len(f.problems) == 2
    assert "rank0.json: node 'a': process group '99'" in f.problems[0]
    assert 'add the key "99"' in f.problems[0]
    assert node(f, "a").group is None
    assert node(f, "a").args[2] == "99"


def test_rank_order_of_a_group_must_agree() -> None:
    nodes = [("a", AR, "@x", "sum", "g")]
    f = zip_families(
        [graph(0, 2, nodes, ["a"], groups={"g": [[0, 1]]}), graph(1, 2, nodes, ["a"], groups={"g": [[1, 0]]})]
    )
    assert "rank order" in f.problems[0]


def test_send_and_receive_are_marked() -> None:
    op = "_c10d_functional.isend.default"
    f = two([("s", op, "@x", 1, 0, "g")], [("s", op, "@x", 0, 0, "g")], ["s"])
    assert node(f, "s").note == UNPAIRED
    assert node(f, "s").args[1] == RankVector((1, 0))


@pytest.mark.parametrize(
    ("lists", "expected"), [([[0, 1]], ((0, 1), (0, 1))), ([], ((0, 1), (0, 1))), ([[0], [1]], ((0,), (1,)))]
)
def test_hlo_replica_groups(lists: list[list[int]], expected: tuple[tuple[int, ...], ...]) -> None:
    graphs = [graph(r, 2, [("a", "hlo.all_reduce", "@x")], ["a"], groups={}) for r in range(2)]
    for g in graphs:
        g.nodes[0].kwargs = {"reducer": "add", "replica_groups": copy.deepcopy(lists)}
    assert node(zip_families(graphs), "a").kwargs == {"reducer": "add", "replica_groups": Group(expected)}


def test_other_ways_to_name_the_group() -> None:
    graphs = [
        graph(
            r,
            2,
            [
                ("a", "vllm.all_reduce.default", "@x"),
                ("b", "c10d_functional.all_reduce.default", "@a", "sum", "", [0, 1], 2),
            ],
            ["b"],
        )
        for r in range(2)
    ]
    for g in graphs:
        g.nodes[0].kwargs = {"group_name": "g"}
    f = zip_families(graphs)
    assert f.problems == []
    assert node(f, "a").kwargs == {"group_name": Group(((0, 1), (0, 1)))}
    assert node(f, "b").args[3] == Group(((0, 1), (0, 1)))


# ---- outputs, order, errors -----------------------------------------------------------------------------------------


def test_outputs_zip_by_position() -> None:
    f = zip_families(
        [
            graph(0, 2, [("a", "sin", "@x"), ("b", "cos", "@x")], ["a", "b", None]),
            graph(1, 2, [("a", "sin", "@x"), ("b", "cos", "@x")], ["b", "b"]),
        ]
    )
    assert [(o.position, o.name, o.ranks) for o in f.outputs] == [
        (0, "output0", (0, 1)),
        (1, "b", (0, 1)),
        (2, None, (0,)),
    ]
    assert node(f, "output0").kwargs == {"ranks": [[0], [1]]}
    assert "rank 0 has 3 outputs and rank 1 has 2" in f.problems[0]
    check_projection(f)


def test_wrong_calls_are_refused() -> None:
    with pytest.raises(GraphError, match="at least one rank graph"):
        zip_families([])
    with pytest.raises(GraphError, match="expected rank 0 here, found rank 1"):
        zip_families([graph(1, 2, [], [])])
    other = graph(1, 2, [], [])
    other.format = "hlo"
    with pytest.raises(GraphError, match="capture all ranks alike"):
        zip_families([graph(0, 2, [], []), other])


def test_mesh_from() -> None:
    assert mesh_from(1, None) == {}
    assert mesh_from(4, None) == {"ranks": 4}
    assert mesh_from(8, {"dp": 2, "tp": 4}) == {"dp": 2, "tp": 4}
    with pytest.raises(ConfigError, match=r"mesh \{tp: 4\} of 4 devices and 8 ranks"):
        mesh_from(8, {"tp": 4})
    with pytest.raises(ConfigError, match="size >= 1 for mesh axis 'tp', found 0"):
        mesh_from(1, {"tp": 0})


# ---- properties -----------------------------------------------------------------------------------------------------


def random_program(rng: random.Random, size: int) -> list[tuple[Any, ...]]:
    values, nodes = ["x", "w"], []
    for i in range(size):
        kind = rng.random()
        if kind < 0.2:
            nodes.append((f"n{i}", AR, f"@{rng.choice(values)}", "sum", rng.choice(["g", "h"])))
        elif kind < 0.3:
            nodes.append((f"n{i}", "empty", rng.choice([4, 5])))
        elif kind < 0.6:
            nodes.append((f"n{i}", rng.choice(["sin", "cos"]), f"@{rng.choice(values)}", rng.choice([0, 1])))
        else:
            nodes.append((f"n{i}", "add", f"@{rng.choice(values)}", [f"@{rng.choice(values)}"]))
        values.append(f"n{i}")
    return nodes


def shuffled(rng: random.Random, nodes: list[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    """The same program in another order that keeps data flow and the order of collectives."""
    left, done, out = list(nodes), {"x", "w"}, []
    while left:
        collectives = [n for n in left if n[1] == AR]
        able = [n for n in left if done.issuperset(Node("", "", [arg(a) for a in n[2:]]).refs())]
        ready = [n for n in able if n[1] != AR or n is collectives[0]]
        n = rng.choice(ready)
        left.remove(n)
        out.append(n)
        done.add(n[0])
    return out


GROUPS = {"g": [[0, 1], [2]], "h": [[0], [1, 2]]}


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 2**32))
def test_any_ranks_can_be_read_back_from_the_families(seed: int) -> None:
    rng = random.Random(seed)
    base = random_program(rng, 12)
    graphs = []
    for r in range(3):
        nodes = shuffled(rng, base)
        if rng.random() < 0.5:  # a rank that really differs
            at = rng.randrange(len(nodes))
            nodes[at] = (nodes[at][0], "other", *nodes[at][2:])
        outputs = [rng.choice(nodes)[0] for _ in range(2)]
        graphs.append(graph(r, 3, nodes, outputs, groups=GROUPS))  # type: ignore[arg-type]
    check_projection(zip_families(graphs), {AR: 2})


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 2**32))
def test_reordered_ranks_zip_completely(seed: int) -> None:
    """With unique operands and consumers, an order-preserving shuffle loses no family."""
    rng = random.Random(seed)
    base = [n if n[1] != "empty" else (n[0], "empty", int(n[0][1:])) for n in random_program(rng, 14)]
    # scalars that name the node make every call distinct, so that only the order can mislead
    base = [(*n, int(n[0][1:])) if n[1] in ("sin", "cos", "add") else n for n in base]
    outputs: list[str | None] = [base[-1][0], base[-2][0]]
    everyone = {"g": [[0, 1, 2]], "h": [[0, 1, 2]]}
    graphs = [graph(r, 3, base if r == 0 else shuffled(rng, base), outputs, groups=everyone) for r in range(3)]
    f = zip_families(graphs)
    assert f.problems == []
    assert [n.name for n in f.nodes] == [n[0] for n in base]
    assert all(set(n.members.values()) == {n.name} and n.ranks == (0, 1, 2) for n in f.nodes)
    check_projection(f, {AR: 2})


@pytest.mark.peer_suite
def test_peer_suite_zips_without_rest() -> None:
    directories = sorted(p.parent for p in SUITE.glob("*/relations.json"))
    if not directories:
        pytest.skip(f"no captured graphs at {SUITE} (set EMERGE_PEER_SUITE)")
    for d in directories:
        case = load_case(d)
        f = zip_families(case.ranks)
        assert f.problems == [], d
        assert [n.name for n in f.nodes] == [n.name for n in case.ranks[0].nodes], d
        assert all(len(n.ranks) == f.ranks for n in f.nodes), d
        assert all(set(n.members.values()) == {n.name} for n in f.nodes), d


@pytest.mark.peer_suite
def test_peer_suite_rank_vectors_and_trivial_groups() -> None:
    if not (SUITE / "bug_missing_switchmlp_allreduce").is_dir():
        pytest.skip(f"no captured graphs at {SUITE} (set EMERGE_PEER_SUITE)")
    f = zip_families(load_case(SUITE / "bug_missing_switchmlp_allreduce").ranks)
    assert node(f, "all_reduce_4").group == Group(((0,), (1,)))  # id "1" on rank 0, "3" on rank 1
    assert node(f, "all_reduce").group == Group(((0, 1), (0, 1)))
    assert node(f, "lt").args[1] == RankVector((0, 49152))


def test_cost_is_linear_in_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counts candidate comparisons instead of seconds: equal calls must not be compared with one another all over."""
    from emerge.facts import zipping

    counted = {"free": 0}
    original = zipping.paired

    def counting(batch: Any, free: Any) -> Any:
        counted["free"] += len(batch) + len(free)
        return original(batch, free)

    monkeypatch.setattr(zipping, "paired", counting)
    nodes: list[tuple[Any, ...]] = [("a0", "op", "@x")]
    nodes += [(f"a{i}", "op", f"@a{i - 1}") for i in range(1, 200)]
    nodes += [(f"e{i}", "empty", 4) for i in range(200)]
    zip_families([graph(r, 4, nodes, ["a199"], groups={}) for r in range(4)])
    assert counted["free"] <= 2 * 4 * len(nodes)
