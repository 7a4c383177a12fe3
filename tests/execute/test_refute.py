"""Refutation by execution on hand-written pairs."""

from __future__ import annotations

import json

import pytest
from execute_graphs import Builder
from refute_pairs import GROUPS, MLP_INPUTS, all_reduce, mlp, mlp_problem, mlp_rank, problem_of, verdict

from emerge.execute.counterexample import MANIFEST, replay, save
from emerge.graph.model import Graph
from emerge.util.errors import InputError

BIG = {"rows": 96, "model": 160, "hidden": 448}
SMALL_BUDGET = 1 << 18


@pytest.mark.parametrize("sizes", [{}, BIG])
def test_a_right_pair_agrees(sizes):
    found, derivation = verdict(mlp_problem(**sizes), memory_bytes=SMALL_BUDGET)
    assert found.outcome == "agree", found.reason
    assert found.sizes == ("reduced" if sizes else "captured")
    assert len(found.vectors) == (2 if sizes else 0)
    assert derivation.proved()


@pytest.mark.parametrize("sizes", [{}, BIG])
def test_a_missing_all_reduce_is_refuted_where_its_result_is_used(sizes):
    found, _ = verdict(mlp_problem(**sizes, reduce=""), memory_bytes=SMALL_BUDGET)
    assert found.outcome == "refuted"
    assert found.output == "out"
    assert found.difference is not None
    assert found.difference.max_abs_diff > 0.1
    assert [(d.reference, d.implementation) for d in found.diverging] == [("out", {0: "out", 1: "out"})]
    assert found.sizes == ("reduced" if sizes else "captured")


def test_two_size_vectors_have_different_lengths():
    found, _ = verdict(mlp_problem(**BIG, reduce=""), memory_bytes=SMALL_BUDGET)
    first, second = found.vectors
    assert first.keys() == second.keys()
    assert all(first[k] != second[k] and min(first[k], second[k]) >= 3 for k in first)
    assert len(set(first.values())) == len(first)


def test_a_bias_added_on_every_rank_is_refuted():
    found, _ = verdict(mlp_problem(bias_first=True))
    assert found.outcome == "refuted"


def test_a_collective_that_one_rank_skips():
    sizes = (3, 5, 8)
    problem = problem_of(mlp(*sizes), [mlp_rank(0, *sizes), mlp_rank(1, *sizes, reduce="")], MLP_INPUTS)
    found, _ = verdict(problem)
    assert (found.outcome, found.kind) == ("refuted", "COLLECTIVE_MISMATCH")
    assert found.witnesses[0].nodes[0][0] == 0


def test_collectives_in_different_groups():
    sizes = (3, 5, 8)
    ranks = [mlp_rank(0, *sizes), mlp_rank(1, *sizes)]
    for graph in ranks:
        graph.groups = {"0": [[0, 1]], "1": [[0, 1]]}
    next(n for n in ranks[1].nodes if "all_reduce" in n.op).args[2] = "1"
    found, _ = verdict(problem_of(mlp(*sizes), ranks, MLP_INPUTS))
    assert (found.outcome, found.kind) == ("refuted", "WRONG_GROUP")


def one_rank(build) -> Graph:
    g = Builder("g")
    return g.done(build(g))


def test_memory_that_is_never_written():
    def reference(g):
        return g.add("aten.relu.default", g.input("x", (4, 6)), shape=(4, 6))

    def implementation(g):
        x = g.input("x", (4, 6))
        empty = g.add("aten.empty.memory_format", [4, 6], shape=(4, 6))
        y = g.add("aten.relu.default", x, shape=(4, 6))
        return g.add("aten.add.Tensor", y, empty, shape=(4, 6))

    found, _ = verdict(problem_of(one_rank(reference), [one_rank(implementation)], {"x": ("x", None)}))
    assert (found.outcome, found.kind) == ("refuted", "UNINITIALISED")


def test_memory_that_is_overwritten_does_not_matter():
    def reference(g):
        return g.add("aten.relu.default", g.input("x", (4, 6)), shape=(4, 6))

    def implementation(g):
        x = g.input("x", (4, 6))
        y = g.add("aten.relu.default", x, shape=(4, 6))
        return g.add("aten.copy.default", g.add("aten.empty.memory_format", [4, 6], shape=(4, 6)), y, shape=(4, 6))

    problem = problem_of(one_rank(reference), [one_rank(implementation)], {"x": ("x", None)})
    for budget in (1 << 30, 100):
        found, _ = verdict(problem, memory_bytes=budget)
        assert found.outcome in ("agree", "impossible"), found.reason


def test_an_operator_without_semantics_on_the_path_is_named():
    def graph(g):
        x = g.input("x", (4, 6))
        return g.add("mylib.mystery.default", g.add("aten.relu.default", x, shape=(4, 6)), shape=(4, 6))

    found, _ = verdict(problem_of(one_rank(graph), [one_rank(graph)], {"x": ("x", None)}))
    assert found.outcome == "impossible"
    assert "mylib.mystery" in found.reason


def test_an_operator_without_semantics_beside_the_path_is_no_obstacle():
    def graph(g):
        x = g.input("x", (4, 6))
        g.add("mylib.mystery.default", x, shape=(4, 6))
        return g.add("aten.relu.default", x, shape=(4, 6))

    found, _ = verdict(problem_of(one_rank(graph), [one_rank(graph)], {"x": ("x", None)}))
    assert found.outcome == "agree"


def test_an_implementation_input_without_statement_is_named():
    inputs = {k: v for k, v in MLP_INPUTS.items() if k != "w2"}
    problem = problem_of(mlp(3, 5, 8), [mlp_rank(r, 3, 5, 8) for r in range(2)], inputs)
    found, _ = verdict(problem)
    assert found.outcome == "impossible"
    assert "'w2'" in found.reason


def test_two_reference_inputs_that_share_one_implementation_input_are_drawn_equal():
    def reference(g):
        return g.add("aten.sub.Tensor", g.input("a", (4, 6)), g.input("b", (4, 6)), shape=(4, 6))

    def implementation(g):
        x = g.input("x", (4, 6))
        return g.add("aten.sub.Tensor", x, x, shape=(4, 6))

    problem = problem_of(one_rank(reference), [one_rank(implementation)], {"a": ("x", None), "b": ("x", None)})
    found, _ = verdict(problem)
    assert found.outcome == "agree", found.reason


def dropout(g: Builder, x: str, shape: tuple[int, ...], p: float = 0.25) -> str:
    d = g.multi("aten.native_dropout.default", x, p, True, elements={0: ("float32", shape), 1: ("bool", shape)})
    return g.item(d, 0, shape)


def with_dropout(g: Builder, drop: bool, p: float = 0.25) -> str:
    x = g.input("x", (4, 6))
    y = g.add("aten.relu.default", x, shape=(4, 6))
    return g.add("aten.exp.default", dropout(g, y, (4, 6), p) if drop else y, shape=(4, 6))


def test_dropout_masks_correspond():
    graph = one_rank(lambda g: with_dropout(g, True))
    found, _ = verdict(problem_of(graph, [graph], {"x": ("x", None)}))
    assert found.outcome == "agree"
    assert [name for name, *_ in found.assumptions] == ["dropout_masks"]


@pytest.mark.parametrize(("drop", "p"), [(False, 0.25), (True, 0.5)])
def test_a_missing_or_different_dropout_is_refuted(drop, p):
    reference, other = one_rank(lambda g: with_dropout(g, True)), one_rank(lambda g: with_dropout(g, drop, p))
    for pair in ((reference, other), (other, reference)):
        found, _ = verdict(problem_of(pair[0], [pair[1]], {"x": ("x", None)}))
        assert found.outcome == "refuted"


def test_dropout_without_a_known_partner_keeps_every_element_and_says_so():
    def build(g, first):
        x, w = g.input("x", (4, 6)), g.input("w", (6, 6))
        x = dropout(g, x, (4, 6)) if first else x
        y = g.add("aten.mm.default", x, w, shape=(4, 6))
        return y if first else dropout(g, y, (4, 6))

    pair = problem_of(
        one_rank(lambda g: build(g, True)), [one_rank(lambda g: build(g, False))], {"x": ("x", None), "w": ("w", None)}
    )
    found, _ = verdict(pair)
    assert found.outcome == "agree"
    assert "every element was kept by dropout" in found.reason


def lookup(rank: int | None, rows: int, offset_error: int = 0) -> Graph:
    """Rows of a table; the table sharded over two ranks with mask, offset and all-reduce."""
    ranks = 1 if rank is None else 2
    g = Builder("seq" if rank is None else f"rank{rank}", rank or 0, ranks, GROUPS if ranks == 2 else {})
    n, dim = rows // ranks, 24
    table, ids = g.input("table", (n, dim)), g.input("ids", (7, 5), "int64")
    if rank is None:
        return g.done(g.add("aten.embedding.default", table, ids, shape=(7, 5, dim)))
    low = rank * n + (offset_error if rank else 0)
    below = g.add("aten.lt.Scalar", ids, low, shape=(7, 5), dtype="bool")
    above = g.add("aten.ge.Scalar", ids, (rank + 1) * n, shape=(7, 5), dtype="bool")
    outside = g.add("aten.bitwise_or.Tensor", below, above, shape=(7, 5), dtype="bool")
    local = g.add("aten.sub.Tensor", ids, low, shape=(7, 5), dtype="int64")
    local = g.add("aten.masked_fill.Scalar", local, outside, 0, shape=(7, 5), dtype="int64")
    found = g.add("aten.embedding.default", table, local, shape=(7, 5, dim))
    mask = g.add("aten.unsqueeze.default", outside, -1, shape=(7, 5, 1), dtype="bool")
    zeroed = g.add("aten.masked_fill.Scalar", found, mask, 0.0, shape=(7, 5, dim))
    return g.done(all_reduce(g, zeroed, (7, 5, dim)))


@pytest.mark.parametrize("offset_error", [0, 1])
def test_the_offsets_of_a_sharded_look_up_shrink_with_the_table(offset_error):
    inputs = {"table": ("table", 0), "ids": ("ids", None)}
    ranks = [lookup(r, 6000, offset_error) for r in range(2)]
    found, _ = verdict(problem_of(lookup(None, 6000), ranks, inputs), memory_bytes=1 << 20)
    if offset_error:
        # The offset is no multiple of the table's length, so only other axes shrink.
        assert (found.outcome, found.sizes) == ("refuted", "reduced")
        assert all(not name.startswith("3000") for vector in found.vectors for name in vector)
        assert verdict(problem_of(lookup(None, 6000), ranks, inputs), memory_bytes=1 << 15)[0].outcome == "impossible"
    else:
        assert (found.outcome, found.sizes) == ("agree", "reduced"), found.reason
        assert ("index_range", "ids") in [a[:2] for a in found.assumptions]


def mean(how: str, n: int, literal: float | None = None) -> Graph:
    g = Builder("g")
    x = g.input("x", (n, 6))
    if how == "mean":
        return g.done(g.add("aten.mean.dim", x, [0], shape=(6,)))
    y = g.add("aten.sum.dim_IntList", x, [0], shape=(6,))
    return g.done(g.add("aten.mul.Tensor", y, literal, shape=(6,)))


def test_one_over_n_shrinks_with_the_sum_it_divides():
    problem = problem_of(mean("mean", 3000), [mean("sum", 3000, 1 / 3000)], {"x": ("x", None)})
    found, _ = verdict(problem, memory_bytes=1 << 13)
    assert (found.outcome, found.sizes) == ("agree", "reduced"), found.reason


def test_a_number_that_is_no_function_of_the_length_does_not_hide():
    problem = problem_of(mean("mean", 3000), [mean("sum", 3000, 1 / 2999)], {"x": ("x", None)})
    found, _ = verdict(problem)
    assert found.outcome == "refuted"


def test_a_number_that_may_stand_for_a_length_forbids_shrinking_it():
    def build(g, numbers):
        x, w = g.input("x", (64, 900)), g.input("w", (900, 64))
        y = g.add("aten.mm.default", x, w, shape=(64, 64))
        for number in numbers:
            y = g.add("aten.mul.Tensor", y, number, shape=(64, 64))
        return y

    inputs = {"x": ("x", None), "w": ("w", None)}
    pair = problem_of(one_rank(lambda g: build(g, [1 / 30])), [one_rank(lambda g: build(g, [1 / 30]))], inputs)
    found, _ = verdict(pair, memory_bytes=1 << 17)
    assert (found.outcome, found.sizes) == ("agree", "reduced")
    assert all("900" not in name for vector in found.vectors for name in vector)


def test_a_refutation_is_saved_and_replayed(tmp_path):
    found, _ = verdict(mlp_problem(**BIG, reduce=""), memory_bytes=SMALL_BUDGET)
    save(found, tmp_path)
    again = replay(tmp_path, device="cpu")
    assert again.differs
    assert again.sizes == "reduced"
    assert again.mismatches[0].difference.max_abs_diff == pytest.approx(
        found.witnesses[0].mismatches[0].difference.max_abs_diff
    )
    full = replay(tmp_path, full=True, device="cpu")
    assert full.differs
    assert full.sizes == "captured"


def test_a_replay_of_a_mended_pair_agrees(tmp_path):
    found, _ = verdict(mlp_problem(reduce=""))
    save(found, tmp_path)
    for rank in range(2):
        path = tmp_path / f"rank{rank}.json"
        text = path.read_text().replace('{"ref":"down"},{"ref":"b"}', '{"ref":"n9"},{"ref":"b"}')
        lines = text.splitlines()
        where = next(i for i, line in enumerate(lines) if '"name":"out"' in line)
        shape = '"dtype":"float32","shape":[3,5]}'
        lines[where:where] = [
            '{"name":"n8","op":"_c10d_functional.all_reduce.default","args":[{"ref":"down"},"sum","0"],"kwargs":{},'
            + shape
            + ",",
            '{"name":"n9","op":"_c10d_functional.wait_tensor.default","args":[{"ref":"n8"}],"kwargs":{},' + shape + ",",
        ]
        path.write_text("\n".join(lines))
    assert not replay(tmp_path, device="cpu").differs


def test_a_malformed_counterexample_is_an_input_error(tmp_path):
    found, _ = verdict(mlp_problem(reduce=""))
    manifest = save(found, tmp_path)
    document = json.loads(manifest.read_text())
    del document["setup"]
    manifest.write_text(json.dumps(document))
    with pytest.raises(InputError, match=MANIFEST):
        replay(tmp_path)


def test_nothing_to_save_where_nothing_was_refuted(tmp_path):
    found, _ = verdict(mlp_problem())
    with pytest.raises(InputError, match="nothing was refuted"):
        save(found, tmp_path / "none")
    assert not (tmp_path / "none").exists()


def test_a_constant_that_differs_by_less_than_its_type_resolves_is_no_difference():
    def build(g, number):
        x = g.input("x", (4, 6))
        return g.add("aten.mul.Tensor", x, number, shape=(4, 6))

    def pair(a, b):
        return problem_of(one_rank(lambda g: build(g, a)), [one_rank(lambda g: build(g, b))], {"x": ("x", None)})

    assert verdict(pair(0.1767766952966, 0.1767767))[0].outcome == "agree"
    assert verdict(pair(0.1767766952966, 0.17678))[0].outcome == "refuted"


def test_the_time_budget_gives_no_verdict():
    found, _ = verdict(mlp_problem(), seconds=0.0)
    assert found.outcome == "impossible" or found.samples >= 1
