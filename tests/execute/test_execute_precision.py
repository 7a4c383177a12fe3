"""float64 policy, constant sub-graphs in recorded types, perturbations and the threshold rule."""

from __future__ import annotations

import math
import subprocess
import sys

import pytest
import torch
from execute_graphs import Builder, Text

from emerge.capture.trace import capture
from emerge.execute.arithmetic import Arithmetic
from emerge.execute.compare import compare_values, defined_fraction, respond, tolerance
from emerge.execute.constants import const_subgraph
from emerge.execute.lockstep import run_sequential
from emerge.execute.options import Options
from emerge.execute.precision import Perturbation, Precision, ulp
from emerge.util.errors import ExecutionError


def rand(*shape):
    return torch.randn(shape, dtype=torch.float64)


def norm_graph(dtype, eps):
    """RMS norm written out, with casts to float32 and back."""
    b = Builder()
    b.input("x", (3, 8), dtype)
    b.input("w", (8,), dtype)
    wide = b.add("aten._to_copy.default", "x", shape=(3, 8), kwargs={"dtype": "dtype:float32"})
    square = b.add("aten.pow.Tensor_Scalar", wide, 2, shape=(3, 8))
    mean = b.add("aten.mean.dim", square, [-1], True, shape=(3, 1))
    shifted = b.add("aten.add.Tensor", mean, eps, shape=(3, 1))
    inverse = b.add("aten.rsqrt.default", shifted, shape=(3, 1))
    out = b.add("aten.mul.Tensor", wide, inverse, shape=(3, 8))
    out = b.add("aten._to_copy.default", out, shape=(3, 8), dtype=dtype, kwargs={"dtype": f"dtype:{dtype}"})
    return b.done(b.add("aten.mul.Tensor", out, "w", shape=(3, 8), dtype=dtype, name="out"))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_low_precision_graphs_run_in_float64(dtype):
    x, w = rand(3, 8), rand(8)
    got = run_sequential(norm_graph(dtype, 1e-6), {"x": x, "w": w})["out"]
    want = torch.nn.functional.rms_norm(x, (8,), w, 1e-6)
    assert got.dtype == torch.float64
    torch.testing.assert_close(got, want, rtol=1e-13, atol=1e-13)
    captured = run_sequential(norm_graph(dtype, 1e-6), {"x": x, "w": w}, options=Options(Precision(captured=True)))[
        "out"
    ]
    assert captured.dtype == getattr(torch, dtype)
    error = float((captured.double() - want).abs().max())
    assert 1e-5 < error < 0.1


def rope_graph():
    """cos of (positions x inverse frequencies): an fp32 table, then a product with data."""
    b = Builder()
    b.input("x", (16, 4), "bfloat16")
    b.input("positions", (16,), "int64")
    inv = b.constant([10000.0 ** (-i / 4) for i in range(4)], (4,))
    as_float = b.add("aten._to_copy.default", "positions", shape=(16,), kwargs={"dtype": "dtype:float32"})
    column = b.add("aten.unsqueeze.default", as_float, 1, shape=(16, 1))
    angle = b.add("aten.mul.Tensor", column, inv, shape=(16, 4), name="angle")
    table = b.add("aten.cos.default", angle, shape=(16, 4), name="table")
    return b.done(b.add("aten.mul.Tensor", "x", table, shape=(16, 4), dtype="bfloat16", name="out"), table)


def test_constant_subgraph_runs_in_recorded_types():
    graph = rope_graph()
    const = const_subgraph(graph)
    assert "table" in const
    assert "positions" in const
    assert "out" not in const
    positions = torch.arange(8000, 8016)
    got = run_sequential(graph, {"x": torch.ones(16, 4), "positions": positions})
    inv = torch.tensor([10000.0 ** (-i / 4) for i in range(4)], dtype=torch.float32)
    fp32 = (positions[:, None].float() * inv).cos()
    assert got["table"].dtype == torch.float64
    assert torch.equal(got["table"], fp32.double())
    assert torch.equal(got["out"], fp32.double())
    exact = (positions[:, None].double() * inv.double()).cos()
    assert float((got["table"] - exact).abs().max()) > 1e-5


def test_what_is_constant_and_what_is_not():
    b = Builder()
    b.input("x", (4,))
    b.input("ids", (4,), "int64")
    b.input("scale", (), const=0.1)
    zeros = b.add("aten.zeros_like.default", "x", shape=(4,))
    empty = b.add("aten.empty_like.default", zeros, shape=(4,))
    filled = b.add("aten.fill.Scalar", empty, 0.1, shape=(4,))
    table = b.add("aten.arange.start", 0, 4, shape=(4,), dtype="int64")
    mask = b.add("aten.le.Tensor", table, "ids", shape=(4,), dtype="bool")
    data = b.add("aten.gt.Scalar", "x", 0.0, shape=(4,), dtype="bool")
    scaled = b.add("aten.mul.Tensor", filled, "scale", shape=(4,))
    noise = b.add("aten.rand_like.default", zeros, shape=(4,))
    overwritten = b.add("aten.zeros.default", [4], shape=(4,))
    b.add("aten.copy_.default", overwritten, "x", shape=(4,))
    const = const_subgraph(b.done(scaled))
    assert {zeros, filled, table, mask, scaled, "scale", "ids"} <= const
    assert not const & {"x", empty, data, noise, overwritten}


def test_fp16_mask_constant_becomes_what_fp16_makes_of_it():
    b = Builder()
    b.input("x", (4,), "float16")
    full = b.add("aten.full.default", [4], 0.1, shape=(4,), dtype="float16", kwargs={"dtype": "dtype:float16"})
    out = b.add("aten.add.Tensor", "x", full, shape=(4,), dtype="float16")
    got = run_sequential(b.done(out), {"x": torch.zeros(4)})[out]
    assert torch.equal(got, torch.full((4,), 0.1, dtype=torch.float16).double())


def test_stored_constant_of_unknown_value_is_an_error():
    b = Builder()
    node = b.add("get_attr", Text("missing"), shape=(2,), name="lost")
    with pytest.raises(ExecutionError, match="not in the graph file"):
        run_sequential(b.done(node), {})


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64"])
def test_ulp_is_the_next_number(dtype):
    kind = getattr(torch, dtype)
    values = torch.tensor([1.0, 1.5, 3.0, -0.1, 1e-3, 1000.0], dtype=kind)
    wide = values.double()
    moved = (wide + wide.sign() * ulp(values, dtype)).to(kind)
    assert bool((moved != values).all())
    halfway = (wide + 0.49 * wide.sign() * ulp(values, dtype)).to(kind)
    assert torch.equal(halfway, values) or dtype == "float64"
    special = torch.tensor([0.0, math.inf, -math.inf, math.nan], dtype=kind)
    assert ulp(special, dtype).tolist() == [0.0, 0.0, 0.0, 0.0]


def test_perturbation_moves_constants_by_one_ulp_and_nothing_else():
    graph = rope_graph()
    values = {"x": torch.ones(16, 4), "positions": torch.arange(16)}
    base = run_sequential(graph, values)
    for mode in ("up", "down", "random"):
        perturbation = Perturbation(mode, seed=3)
        moved = run_sequential(graph, values, options=Options(perturbation=perturbation))
        change = (moved["out"] - base["out"]).abs()
        # one ulp of the inverse frequencies times the position, then one ulp of the table
        assert 2.0**-26 < float(change.max()) < 16 * 2.0**-22
        assert perturbation.touched == 2
    data_only = norm_graph("float32", 0.5)
    perturbation = Perturbation("up")
    run_sequential(data_only, {"x": rand(3, 8), "w": rand(8)}, options=Options(perturbation=perturbation))
    assert perturbation.touched == 0, "0.5 is exactly representable, so it is not the rounding of another literal"


def respond_to(graph, values):
    return respond(lambda p: run_sequential(graph, values, options=Options(perturbation=p)), ["out"])


def test_threshold_separates_eps_from_rounding():
    x, w = rand(3, 8), rand(8)
    values = {"x": x, "w": w}
    a, same, other = norm_graph("float32", 1e-6), norm_graph("float32", 1e-6 * (1 + 1e-9)), norm_graph("float32", 1e-5)
    left = respond_to(a, values)
    assert left.touched == 1
    assert left.by_name["out"] > 0
    for graph, differs in ((a, False), (same, False), (other, True)):
        right = respond_to(graph, values)
        response = max(left.by_name["out"], right.by_name["out"])
        limit = tolerance(left.base["out"], right.base["out"], response)
        assert (compare_values(left.base["out"], right.base["out"], limit) is not None) is differs
    # and no fixed tolerance near the size of a float32 rounding would have seen it
    assert float((left.base["out"] - respond_to(other, values).base["out"]).abs().max()) < 1e-3


def shift_graph(order):
    """Row sums of a softmax gradient: zero in exact arithmetic, whatever the order of the two sums."""
    b = Builder()
    b.input("x", (6, 9))
    b.input("g", (6, 9))
    weights = b.add("aten._softmax.default", "x", -1, False, shape=(6, 9))
    grad = b.add("aten._softmax_backward_data.default", "g", weights, -1, "dtype:float32", shape=(6, 9))
    if order:
        grad = b.add("aten.flip.default", grad, [1], shape=(6, 9))
        grad = b.add("aten.cumsum.default", grad, 1, shape=(6, 9))
        return b.done(b.add("aten.select.int", grad, 1, 8, shape=(6,), name="out"))
    return b.done(b.add("aten.sum.dim_IntList", grad, [1], shape=(6,), name="out"))


def test_round_off_of_a_cancellation_is_no_difference():
    values = {"x": rand(6, 9), "g": rand(6, 9)}
    bases, noise = [], 0.0
    for graph in (shift_graph(0), shift_graph(1)):
        bases.append(run_sequential(graph, values)["out"])
        for sign in (1, -1):
            moved = run_sequential(graph, values, options=Options(arithmetic=Arithmetic(rounding=sign)))["out"]
            noise = max(noise, float((moved - bases[-1]).abs().max()))
    a, b = bases
    assert 0 < float((a - b).abs().max()) < 1e-14
    assert compare_values(a, b, tolerance(a, b)) is not None
    assert compare_values(a, b, tolerance(a, b, noise)) is None
    # A real change is far above it.
    assert compare_values(a, b + 1e-12, tolerance(a, b, noise)) is not None


def test_rounding_moves_rounding_operators_only():
    b = Builder()
    b.input("x", (50,))
    same = b.add("aten.clone.default", "x", shape=(50,))
    view = b.add("aten.view.default", same, [50], shape=(50,))
    b.add("aten.exp.default", view, shape=(50,), name="out")
    graph, x = b.done("out", view), rand(50)
    up, down = (run_sequential(graph, {"x": x}, options=Options(arithmetic=Arithmetic(sign))) for sign in (1, -1))
    assert torch.equal(up[view], x)
    assert torch.equal(down[view], x)
    above = up["out"] > x.exp()
    assert 0 < int(above.sum()) < 50
    assert torch.equal(above, down["out"] < x.exp())
    assert float(((up["out"] - x.exp()) / x.exp()).abs().max()) < 17 * 2.0**-52


def test_counts_are_not_rounded():
    graph = capture(lambda n: torch.histc(n, 4, 0, 12).int(), (torch.ones(12),), name="counts")
    counts = {graph.inputs[0].name: torch.arange(12, dtype=torch.float64)}
    runs = [run_sequential(graph, counts, options=Options(arithmetic=Arithmetic(sign))) for sign in (0, 1, -1)]
    assert all(torch.equal(r[graph.outputs[0]], runs[0][graph.outputs[0]]) for r in runs)


def test_response_that_changes_an_integer_is_infinite():
    b = Builder()
    c = b.constant(0.1, ())
    hit = b.add("aten.gt.Scalar", c, 0.10000000149011612, shape=(), dtype="bool", name="out")
    measured = respond_to(b.done(hit), {})
    assert measured.by_name["out"] == math.inf


def test_compare_values():
    a = torch.arange(6.0, dtype=torch.float64).reshape(2, 3)
    b = a.clone()
    assert compare_values(a, b, 0.0) is None
    b[1, 2] += 0.5
    b[0, 1] -= 0.25
    found = compare_values(a, b, 0.1)
    assert (found.max_abs_diff, found.index, found.count) == (0.5, (1, 2), 2)
    assert (found.reference, found.implementation) == (5.0, 5.5)
    assert compare_values(a, b, 0.5) is None
    assert compare_values(a, b.T, 1.0).reason == "shape"
    assert compare_values(torch.tensor(1), torch.tensor(2), 5.0).max_abs_diff == 1.0
    assert compare_values(None, a, 1.0).reason == "missing"
    assert compare_values((a, a), (a, b), 0.1).index == (1, 2)


def test_compare_values_of_undefined_and_infinite_elements():
    nan, inf = math.nan, math.inf
    reference = torch.tensor([nan, 1.0, inf, -inf], dtype=torch.float64)
    assert compare_values(reference, torch.tensor([5.0, 1.0, inf, -inf], dtype=torch.float64), 0.0) is None
    found = compare_values(reference, torch.tensor([5.0, nan, inf, -inf], dtype=torch.float64), inf)
    assert (found.reason, found.index) == ("undefined", (1,))
    found = compare_values(reference, torch.tensor([5.0, 1.0, -inf, -inf], dtype=torch.float64), 1.0)
    assert (found.index, found.max_abs_diff) == ((2,), inf)


def test_defined_fraction():
    assert defined_fraction(torch.tensor([math.nan, 1.0, math.inf, 2.0])) == 0.75
    assert defined_fraction((torch.tensor([1.0]), torch.tensor([math.nan]))) == 0.0
    assert defined_fraction(torch.tensor([1, 2])) == 1.0


def test_importing_execution_does_not_import_torch():
    code = (
        "import sys, pkgutil, importlib, emerge.execute as e\n"
        "for m in pkgutil.walk_packages(e.__path__, 'emerge.execute.'): importlib.import_module(m.name)\n"
        "assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
