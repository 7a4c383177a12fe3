"""What refutation runs: reduced sizes beside awkward operators, and samples in which an eps shows."""

from __future__ import annotations

import pytest
from execute_graphs import Builder
from refute_pairs import problem_of, verdict

from emerge.execute.feeders import norm_feeders
from emerge.graph.model import Graph


def one_rank(build) -> Graph:
    g = Builder("g")
    return g.done(build(g))


# ---- sizes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("taken", [False, True])
def test_a_mask_that_nobody_reads_shrinks_with_its_operand(taken):
    def build(g):
        x, w = g.input("x", (96, 160)), g.input("w", (160, 448))
        kept = g.multi(
            "aten.native_dropout.default", x, 0.0, True, elements={0: ("float32", (96, 160)), 1: ("bool", (96, 160))}
        )
        x = g.item(kept, 0, (96, 160))
        if taken:
            g.item(kept, 1, (96, 160), "bool")
        return g.add("aten.mm.default", x, w, shape=(96, 448))

    pair = problem_of(one_rank(build), [one_rank(build)], {"x": ("x", None), "w": ("w", None)})
    found, _ = verdict(pair, memory_bytes=1 << 18)
    assert (found.outcome, found.sizes) == ("agree", "reduced"), found.reason
    elements = found_graph(pair).nodes[0].elements
    assert elements[1].shape == elements[0].shape != (96, 160)


def found_graph(pair) -> Graph:
    """The reference at the first size vector."""
    from emerge.execute.shrink import Shrinker
    from emerge.relate.derive import derive

    return Shrinker(pair, derive(pair, engine="embedded")).reduced(1 << 18).reference


def test_a_reshape_that_does_not_nest_shrinks_where_both_sides_of_it_have_the_axes():
    def build(g):
        x = g.input("x", (96, 160))
        y = g.add("aten.reshape.default", x, [160, 96], shape=(160, 96))
        return g.add("aten.add.Tensor", y, g.add("aten.t.default", x, shape=(160, 96)), shape=(160, 96))

    pair = problem_of(one_rank(build), [one_rank(build)], {"x": ("x", None)})
    found, _ = verdict(pair, memory_bytes=1 << 16)
    assert (found.outcome, found.sizes) == ("agree", "reduced"), found.reason
    assert {name.partition("#")[0] for name in found.vectors[0]} == {"96", "160"}


def test_a_reshape_that_does_not_nest_keeps_only_its_own_axes():
    def build(g):
        x, w = g.input("x", (96, 160)), g.input("w", (160, 4480))
        y = g.add("aten.mm.default", x, w, shape=(96, 4480))
        z = g.add("aten.reshape.default", x, [64, 240], shape=(64, 240))
        z = g.add("aten.sum.default", g.add("aten.cumsum.default", z, 0, shape=(64, 240)), shape=())
        return g.add("aten.add.Tensor", y, z, shape=(96, 4480))

    pair = problem_of(one_rank(build), [one_rank(build)], {"x": ("x", None), "w": ("w", None)})
    found, _ = verdict(pair, memory_bytes=1 << 21)
    assert (found.outcome, found.sizes) == ("agree", "reduced"), found.reason
    assert {name.partition("#")[0] for name in found.vectors[0]} == {"4480"}


# ---- samples --------------------------------------------------------------------------------------------------------

INPUTS = {n: (n, None) for n in ("table", "ids", "g1", "b1", "w1", "w2", "b2", "g2", "b2n")}


def block(eps: float, decomposed: bool = False) -> Graph:
    """Embedding, then ``h + w2 gelu(w1 norm(h)) + b2``, normalised and multiplied with the table."""
    rows, dim, hidden = (7, 11, 13)
    g = Builder("g")
    table, ids = g.input("table", (rows, dim)), g.input("ids", (5,), "int64")
    g1, b1 = g.input("g1", (dim,)), g.input("b1", (dim,))
    w1, w2, b2 = g.input("w1", (dim, hidden)), g.input("w2", (hidden, dim)), g.input("b2", (dim,))
    g2, b2n = g.input("g2", (dim,)), g.input("b2n", (dim,))
    h = g.add("aten.embedding.default", table, ids, shape=(5, dim))
    if decomposed:
        squares = g.add(
            "aten.mean.dim", g.add("aten.pow.Tensor_Scalar", h, 2, shape=(5, dim)), [-1], True, shape=(5, 1)
        )
        root = g.add("aten.rsqrt.default", g.add("aten.add.Tensor", squares, eps, shape=(5, 1)), shape=(5, 1))
        n = g.add("aten.mul.Tensor", g.add("aten.mul.Tensor", h, root, shape=(5, dim)), g1, shape=(5, dim))
        n = g.add("aten.add.Tensor", n, b1, shape=(5, dim))
    else:
        n = g.add("aten.layer_norm.default", h, [dim], g1, b1, eps, shape=(5, dim), name="norm")
    a = g.add("aten.gelu.default", g.add("aten.mm.default", n, w1, shape=(5, hidden)), shape=(5, hidden))
    y = g.add("aten.add.Tensor", g.add("aten.mm.default", a, w2, shape=(5, dim)), b2, shape=(5, dim))
    h = g.add("aten.add.Tensor", h, y, shape=(5, dim))
    h = g.add("aten.layer_norm.default", h, [dim], g2, b2n, 1e-5, shape=(5, dim))
    logits = g.add("aten.mm.default", h, g.add("aten.t.default", table, shape=(dim, rows)), shape=(5, rows))
    return g.done(g.add("aten.logsumexp.default", logits, [-1], shape=(5,)))


@pytest.mark.parametrize("decomposed", [False, True])
def test_what_feeds_a_norm(decomposed):
    assert norm_feeders(block(1e-5, decomposed)) == {"table", "w2", "b2"}


def test_without_a_norm_nothing_feeds_one():
    graph = one_rank(lambda g: g.add("aten.add.Tensor", g.input("x", (4, 6)), 1e-5, shape=(4, 6)))
    assert norm_feeders(graph) == frozenset()


@pytest.mark.parametrize("decomposed", [False, True])
@pytest.mark.parametrize("eps", [1e-5, 1e-6])
def test_the_eps_of_an_inner_norm_shows(decomposed, eps):
    pair = problem_of(block(1e-5, decomposed), [block(eps, decomposed)], INPUTS)
    assert verdict(pair)[0].outcome == ("agree" if eps == 1e-5 else "refuted")


def test_the_quiet_sample_is_what_shows_it(monkeypatch):
    """Residual and loss of unit size hide it: only in the sample with small feeders it stands out far."""
    from emerge.execute import refute

    pair = problem_of(block(1e-5), [block(1.01e-5)], INPUTS)
    differences = []
    for sample in refute.SAMPLES:
        monkeypatch.setattr(refute, "SAMPLES", (sample,))
        found, _ = verdict(pair)
        differences.append(found.difference.max_abs_diff if found.difference is not None else 0.0)
    assert differences[-1] > 1e-6
    assert differences[-1] > 10 * max(differences[:-1][i] for i in (0, 2, 3))
