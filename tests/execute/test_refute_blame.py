"""Where a refuted pair parts: the first node, what makes its operands differ, and nothing else."""

from __future__ import annotations

from execute_graphs import Builder, Text
from refute_pairs import GROUPS, MLP_INPUTS, mlp, problem_of, verdict

from emerge.execute.refute import refute
from emerge.graph.model import Graph
from emerge.verdict.decide import decide


def one_rank(build) -> Graph:
    g = Builder("g")
    return g.done(build(g))


def masked(act: str, other_spelling: bool) -> Graph:
    """Rows of a table through an activation, zero where the index is 3."""

    def build(g):
        table, ids = g.input("table", (12, 6)), g.input("ids", (4,), "int64")
        x = g.add("aten.embedding.default", table, ids, shape=(4, 6))
        x = g.add(f"aten.{act}.default", x, shape=(4, 6), name="act")
        if other_spelling:
            keep = g.add("aten.ne.Scalar", ids, 3, shape=(4,), dtype="bool")
            keep = g.add("aten._to_copy.default", keep, kwargs={"dtype": "dtype:float32"}, shape=(4,))
            return g.add("aten.mul.Tensor", x, g.add("aten.unsqueeze.default", keep, 1, shape=(4, 1)), shape=(4, 6))
        below = g.add("aten.eq.Scalar", ids, 3, shape=(4,), dtype="bool")
        mask = g.add("aten.unsqueeze.default", below, 1, shape=(4, 1), dtype="bool")
        return g.add("aten.masked_fill.Scalar", x, mask, 0.0, shape=(4, 6))

    return one_rank(build)


def test_masks_that_are_spelled_differently_are_no_findings():
    inputs = {"table": ("table", None), "ids": ("ids", None)}
    found, _ = verdict(problem_of(masked("relu", False), [masked("tanh", True)], inputs))
    assert found.outcome == "refuted"
    assert [d.reference for d in found.diverging] == ["act"]


def two_faults(first: str, second: str) -> Graph:
    def build(g):
        x, y, w = g.input("x", (4, 6)), g.input("y", (4, 5)), g.input("w", (5, 6))
        a = g.add(f"aten.{first}.default", x, shape=(4, 6), name="shallow")
        b = g.add("aten.mm.default", y, w, shape=(4, 6))
        b = g.add(f"aten.{second}.default", b, shape=(4, 6), name="deep")
        return g.add("aten.add.Tensor", a, b, shape=(4, 6))

    return one_rank(build)


def test_what_parts_later_is_a_note():
    inputs = {n: (n, None) for n in ("x", "y", "w")}
    problem = problem_of(two_faults("sin", "exp"), [two_faults("cos", "tanh")], inputs)
    found, derivation = verdict(problem)
    assert [(d.reference, d.first) for d in found.diverging] == [("shallow", True), ("deep", False)]
    findings = decide(problem, derivation, lambda p, d: refute(p, d, device="cpu")).findings
    assert [(f.severity, f.reference_nodes) for f in findings] == [("error", ["shallow"]), ("note", ["deep"])]


def outputs_of_a_split(sizes: list[int]) -> Graph:
    def build(g):
        x = g.input("x", (4, 8))
        types = {i: ("float32", (4, n)) for i, n in enumerate(sizes)}
        parts = g.multi("aten.split_with_sizes.default", x, sizes, 1, elements=types, name="parts")
        first, second = (g.item(parts, i, (4, n)) for i, n in enumerate(sizes))
        a = g.add("aten.sum.dim_IntList", first, [1], shape=(4,))
        return g.add("aten.sub.Tensor", a, g.add("aten.sum.dim_IntList", second, [1], shape=(4,)), shape=(4,))

    return one_rank(build)


def test_several_outputs_of_a_node_are_named_with_it():
    pair = problem_of(outputs_of_a_split([3, 5]), [outputs_of_a_split([5, 3])], {"x": ("x", None)})
    found, _ = verdict(pair)
    assert found.outcome == "refuted"
    assert (found.diverging[0].reference, found.diverging[0].also) == ("parts", ("n1", "n2"))


def scattered(rank: int, cut: bool) -> Graph:
    """The MLP with its rows scattered before the bias and gathered after it; ``cut``: nothing is summed."""
    rows, model, n = 4, 5, 4
    g = Builder(f"rank{rank}", rank, 2, GROUPS)
    x, w1, w2 = g.input("x", (rows, model)), g.input("w1", (model, n)), g.input("w2", (n, model))
    b = g.input("b", (model,))
    h = g.add("aten.relu.default", g.add("aten.mm.default", x, w1, shape=(rows, n)), shape=(rows, n))
    y = g.add("aten.mm.default", h, w2, shape=(rows, model), name="down")
    half = (rows // 2, model)
    if cut:
        y = g.add("aten.slice.Tensor", y, 0, rank * 2, rank * 2 + 2, shape=half, name="cut")
    else:
        scatter = "_c10d_functional.reduce_scatter_tensor.default"
        y = g.add(scatter, y, Text("sum"), 2, Text("0"), shape=half)
        y = g.add("_c10d_functional.wait_tensor.default", y, shape=half)
    y = g.add("aten.add.Tensor", y, b, shape=half, name="out")
    y = g.add("_c10d_functional.all_gather_into_tensor.default", y, 2, Text("0"), shape=(rows, model))
    return g.done(g.add("_c10d_functional.wait_tensor.default", y, shape=(rows, model)))


def test_what_stands_in_place_of_a_collective_is_named_with_its_consumer():
    for cut in (False, True):
        pair = problem_of(mlp(4, 5, 8), [scattered(r, cut) for r in range(2)], MLP_INPUTS)
        found, derivation = verdict(pair)
        assert found.outcome == ("refuted" if cut else "agree")
    place = found.diverging[0]
    assert (place.reference, place.implementation) == ("out", {0: "out", 1: "out"})
    assert place.cause == {0: "cut", 1: "cut"}
    finding = decide(pair, derivation, lambda p, d: refute(p, d, device="cpu")).findings[0]
    assert finding.implementation_nodes == ["0:cut", "1:cut", "0:out", "1:out"]
    assert "'cut' (aten.slice.Tensor)" in finding.message


def joined(rank: int | None, interleaved: bool = False) -> Graph:
    """``tanh(x w) + y``, x sharded by rows and gathered; ``interleaved``: row by row from the ranks in turn."""
    world = 1 if rank is None else 2
    g = Builder("seq" if rank is None else f"rank{rank}", rank or 0, world, GROUPS if world == 2 else {})
    rows, batch, model, out = 4, 2, 5, 7
    whole, n = (rows, batch, model), rows * batch
    x, w, y = g.input("x", (rows // world, batch, model)), g.input("w", (model, out)), g.input("y", (n, out))
    if rank is not None:
        x = g.add("_c10d_functional.all_gather_into_tensor.default", x, 2, Text("0"), shape=whole)
        x = g.add("_c10d_functional.wait_tensor.default", x, shape=whole)
    if interleaved:
        parts = [g.add("aten.slice.Tensor", x, 0, 2 * k, 2 * k + 2, shape=(2, batch, model)) for k in range(2)]
        x = g.add("aten.cat.default", parts, 2, shape=(2, batch, 2 * model), name="joined")
        x = g.add("aten.view.default", x, [*whole], shape=whole)
    x = g.add("aten.view.default", x, [n, model], shape=(n, model))
    z = g.add("aten.mm.default", x, w, shape=(n, out), name="product")
    z = g.add("aten.tanh.default", z, shape=(n, out), name="act")
    return g.done(g.add("aten.add.Tensor", z, y, shape=(n, out), name="out"))


def test_pieces_joined_in_another_order_are_named_where_that_happens():
    inputs = {"x": ("x", 0), "w": ("w", None), "y": ("y", None)}
    for interleaved in (False, True):
        found, _ = verdict(problem_of(joined(None), [joined(r, interleaved) for r in range(2)], inputs))
        assert found.outcome == ("refuted" if interleaved else "agree")
    place = found.diverging[0]
    assert (place.reference, place.also) == ("out", ("product",))
    assert place.cause == {0: "joined", 1: "joined"}
