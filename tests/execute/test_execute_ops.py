"""Operators against torch itself."""

from __future__ import annotations

import math

import pytest
import torch
from execute_graphs import Builder, Text

from emerge.execute.lockstep import run_sequential
from emerge.execute.options import Options, seeded_fill
from emerge.graph.model import TypedConst
from emerge.util.errors import ExecutionError

torch.manual_seed(0)


def one(op, inputs, *args, kwargs=None, shape=None, dtype="float32", options=None, elements=None, pick=None):
    """Run a graph of one operator; inputs: name -> (tensor, recorded dtype)."""
    b = Builder()
    for name, (value, recorded) in inputs.items():
        b.input(name, tuple(value.shape), recorded)
    values = {k: v for k, (v, _) in inputs.items()}
    if elements is not None:
        node = b.multi(op, *args, kwargs=kwargs or {}, elements=elements)
        outs = [b.item(node, i, s, d) for i, (d, s) in elements.items()]
        result = run_sequential(b.done(*outs), values, options=options)
        return [result[o] for o in outs]
    node = b.add(op, *args, kwargs=kwargs or {}, shape=shape, dtype=dtype)
    return run_sequential(b.done(node), values, options=options)[node]


def rand(*shape):
    return torch.randn(shape, dtype=torch.float64)


def close(a, b):
    assert a.dtype == torch.float64
    torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


X = rand(3, 5, 4)
W = rand(7, 4)
IDS = torch.tensor([[1, 0, 6], [2, 2, 5]])

GENERIC = [
    ("aten.add.Tensor", ("x", "x"), {"alpha": 2}, lambda: X + 2 * X),
    ("aten.mul.Scalar", ("x", 0.3), {}, lambda: X * 0.3),
    ("aten.rsub.Scalar", ("x", 1.0), {}, lambda: 1.0 - X),
    ("aten.pow.Tensor_Scalar", ("x", 2), {}, lambda: X**2),
    ("aten.mean.dim", ("x", [-1], True), {"dtype": "dtype:float32"}, lambda: X.mean(-1, keepdim=True)),
    ("aten.sum.dim_IntList", ("x", [0, 2]), {}, lambda: X.sum((0, 2))),
    ("aten._softmax.default", ("x", -1, True), {}, lambda: X.softmax(-1)),
    ("aten._log_softmax.default", ("x", 1, False), {}, lambda: X.log_softmax(1)),
    ("aten.transpose.int", ("x", 0, 2), {}, lambda: X.transpose(0, 2)),
    ("aten.permute.default", ("x", [2, 0, 1]), {}, lambda: X.permute(2, 0, 1)),
    ("aten.view.default", ("x", [15, -1]), {}, lambda: X.reshape(15, 4)),
    ("aten.slice.Tensor", ("x", 1, 1, 9223372036854775807), {}, lambda: X[:, 1:]),
    ("aten.linear.default", ("x", "w"), {}, lambda: X @ W.T),
    ("aten.embedding.default", ("w", "ids"), {}, lambda: W[IDS]),
    ("aten.index.Tensor", ("w", ["ids"]), {}, lambda: W[IDS]),
    (
        "aten.gelu.default",
        ("x",),
        {"approximate": Text("tanh")},
        lambda: torch.nn.functional.gelu(X, approximate="tanh"),
    ),
    ("aten.silu.default", ("x",), {}, lambda: torch.nn.functional.silu(X)),
    ("aten.rsqrt.default", ("x",), {}, lambda: X.rsqrt()),
    ("aten.cumsum.default", ("x", 1), {}, lambda: X.cumsum(1)),
    ("aten.cat.default", (["x", "x"], 1), {}, lambda: torch.cat([X, X], 1)),
    ("aten.stack.default", (["x", "x"],), {}, lambda: torch.stack([X, X])),
    ("aten.masked_fill.Scalar", ("x", "m", -10000.0), {}, lambda: X.masked_fill(X > 0, -10000.0)),
    ("aten.where.self", ("m", "x", "x"), {}, lambda: X),
    ("aten.clamp.default", ("x", -0.5, 0.5), {}, lambda: X.clamp(-0.5, 0.5)),
    ("aten.repeat.default", ("x", [2, 1, 1]), {}, lambda: X.repeat(2, 1, 1)),
    ("aten.linalg_vector_norm.default", ("x", 2, [-1]), {}, lambda: X.norm(dim=-1)),
    ("aten.tril.default", ("x",), {}, lambda: X.tril()),
    ("aten.slice_scatter.default", ("x", "x", 1, 0, 9223372036854775807), {}, lambda: X),
    ("aten.clone.default", ("x",), {"memory_format": TypedConst("memory_format", "contiguous_format")}, lambda: X),
    (
        "aten._to_copy.default",
        ("x",),
        {
            "dtype": "dtype:bfloat16",
            "device": TypedConst("device", "cuda:0"),
            "layout": TypedConst("layout", "strided"),
        },
        lambda: X,
    ),
    ("aten.to.device", ("x", TypedConst("device", "cuda:3"), "dtype:float16"), {}, lambda: X),
]


@pytest.mark.parametrize(("op", "args", "kwargs", "expected"), GENERIC, ids=[g[0] for g in GENERIC])
def test_aten_in_float64(op, args, kwargs, expected):
    want = expected()
    inputs = {"x": (X, "float16"), "w": (W, "float32"), "ids": (IDS, "int64"), "m": (X > 0, "bool")}
    got = one(op, inputs, *args, kwargs=kwargs, shape=tuple(want.shape), dtype="float16")
    torch.testing.assert_close(got, want, rtol=1e-13, atol=1e-13, equal_nan=True)


def test_casts_between_floats_are_identities_but_integers_wrap():
    value = rand(6) * 100
    assert torch.equal(one("aten._to_copy.default", {"x": (value, "float32")}, "x", kwargs={"dtype": "dtype:float16"},
                           shape=(6,), dtype="float16"), value)  # fmt: skip
    as_int = one("aten._to_copy.default", {"x": (value, "float32")}, "x", kwargs={"dtype": "dtype:int32"}, shape=(6,),
                 dtype="int32")  # fmt: skip
    assert torch.equal(as_int, value.to(torch.int32))
    big = torch.tensor([2**31 - 1], dtype=torch.int32)
    wrapped = one("aten.add.Tensor", {"i": (big, "int32")}, "i", "i", shape=(1,), dtype="int32")
    assert wrapped.dtype == torch.int32
    assert int(wrapped[0]) == -2


def test_fp8_cast_is_a_quantisation():
    value = torch.tensor([0.1, 1.03, 300.0], dtype=torch.float64)
    got = one("aten._to_copy.default", {"x": (value, "float32")}, "x", kwargs={"dtype": "dtype:float8_e4m3fn"},
              shape=(3,), dtype="float8_e4m3fn")  # fmt: skip
    assert got.dtype == torch.float64
    assert torch.equal(got, value.to(torch.float8_e4m3fn).to(torch.float64))
    assert not torch.equal(got, value)


def test_integer_division_becomes_float64():
    i = torch.tensor([1, 2, 7])
    got = one("aten.div.Tensor", {"x": (rand(3), "float32"), "i": (i, "int64")}, "x", 3, shape=(3,))
    assert got.dtype == torch.float64
    b = Builder()
    b.input("x", (3,))
    b.input("i", (3,), "int64")
    third = b.add("aten.div.Tensor", "i", 3, shape=(3,))
    out = b.add("aten.mul.Tensor", "x", third, shape=(3,))
    got = run_sequential(b.done(out), {"x": torch.ones(3), "i": i})[out]
    # i / 3 depends on an integer input only: it is computed in the recorded float32.
    assert torch.equal(got, (i / 3).to(torch.float32).to(torch.float64))


def test_baddbmm_with_beta_zero_does_not_read_its_operand():
    a, c = rand(2, 3, 4), rand(2, 4, 5)
    b = Builder()
    b.input("a", (2, 3, 4))
    b.input("c", (2, 4, 5))
    empty = b.add("aten.empty.memory_format", [2, 3, 5], shape=(2, 3, 5), kwargs={"dtype": "dtype:float16"})
    out = b.add("aten.baddbmm.default", empty, "a", "c", shape=(2, 3, 5), kwargs={"beta": 0.0, "alpha": 0.5})
    got = run_sequential(b.done(out), {"a": a, "c": c})[out]
    close(got, 0.5 * (a @ c))


def test_uninitialised_memory_shows_in_the_result():
    b = Builder()
    b.input("x", (3,))
    empty = b.add("aten.empty.memory_format", [3], shape=(3,))
    out = b.add("aten.add.Tensor", empty, "x", shape=(3,))
    graph, values = b.done(out), {"x": torch.zeros(3)}
    assert bool(torch.isnan(run_sequential(graph, values)[out]).all())
    fills = [run_sequential(graph, values, options=Options(fill=seeded_fill(s)))[out] for s in (1, 2)]
    assert not torch.equal(*fills)


def test_dropout_takes_the_callers_mask_and_scales():
    x = rand(4, 4)
    types = {0: ("float32", (4, 4)), 1: ("bool", (4, 4))}
    out, mask = one("aten.native_dropout.default", {"x": (x, "float32")}, "x", 0.1, True, elements=types)
    close(out, x / 0.9)
    assert bool(mask.all())
    kept = torch.eye(4, dtype=torch.bool)
    options = Options(dropout_mask=lambda node, shape: kept)
    out, mask = one(
        "aten.native_dropout.default", {"x": (x, "float32")}, "x", 0.25, True, elements=types, options=options
    )
    close(out, x * kept / 0.75)
    assert torch.equal(mask, kept)
    out, _ = one(
        "aten.native_dropout.default", {"x": (x, "float32")}, "x", 0.25, False, elements=types, options=options
    )
    close(out, x)


@pytest.mark.parametrize("causal", [False, True])
def test_attention_forward_and_backward(causal):
    q, k, v = (rand(2, 4, n, 8).requires_grad_() for n in (5, 6, 6))
    want = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=0.3)
    shapes = {"q": (q.detach(), "float32"), "k": (k.detach(), "float32"), "v": (v.detach(), "float32")}
    got = one("aten.scaled_dot_product_attention.default", shapes, "q", "k", "v", None, 0.0, causal,
              kwargs={"scale": 0.3}, shape=(2, 4, 5, 8))  # fmt: skip
    close(got, want.detach())
    grad = rand(2, 4, 5, 8)
    wanted = torch.autograd.grad(want, (q, k, v), grad)
    inputs = {**shapes, "g": (grad, "float32"), "o": (want.detach(), "float32"), "l": (rand(2, 4, 5), "float32")}
    types = {0: ("float32", (2, 4, 5, 8)), 1: ("float32", (2, 4, 6, 8)), 2: ("float32", (2, 4, 6, 8))}
    grads = one("aten._scaled_dot_product_flash_attention_for_cpu_backward.default", inputs, "g", "q", "k", "v", "o",
                "l", 0.0, causal, kwargs={"scale": 0.3}, elements=types)  # fmt: skip
    for a, b in zip(grads, wanted):
        close(a, b)


def test_grouped_query_attention_and_empty_rows():
    q, k, v = rand(2, 6, 5, 8), rand(2, 2, 5, 8), rand(2, 2, 5, 8)
    mask = torch.rand(5, 5) > 0.4
    mask[2] = False
    want = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
    inputs = {"q": (q, "float32"), "k": (k, "float32"), "v": (v, "float32"), "m": (mask, "bool")}
    got = one("aten.scaled_dot_product_attention.default", inputs, "q", "k", "v", "m", shape=(2, 6, 5, 8),
              kwargs={"enable_gqa": True})  # fmt: skip
    torch.testing.assert_close(got, torch.nan_to_num(want), rtol=1e-12, atol=1e-12)
    assert float(got[:, :, 2].abs().max()) == 0.0


def test_apex_layer_norm_forward_and_backward():
    x, w, bias = rand(3, 2, 6).requires_grad_(), rand(6).requires_grad_(), rand(6).requires_grad_()
    want = torch.nn.functional.layer_norm(x, (6,), w, bias, 1e-5)
    inputs = {"x": (x.detach(), "float16"), "w": (w.detach(), "float16"), "b": (bias.detach(), "float16")}
    types = {0: ("float16", (3, 2, 6)), 1: ("float32", (6,)), 2: ("float32", (6,))}
    out, mean, inverse = one(
        "apex.fused_layer_norm_affine_fwd.default", inputs, "x", "w", "b", [6], 1e-5, elements=types
    )
    close(out, want.detach())
    close(mean, x.detach().reshape(6, 6).mean(1))
    close(inverse, (x.detach().reshape(6, 6).var(1, correction=0) + 1e-5).rsqrt())
    grad = rand(3, 2, 6)
    wanted = torch.autograd.grad(want, (x, w, bias), grad)
    inputs |= {"g": (grad, "float16"), "mu": (mean, "float32"), "iv": (inverse, "float32")}
    types = {0: ("float16", (3, 2, 6)), 1: ("float16", (6,)), 2: ("float16", (6,))}
    grads = one(
        "apex.fused_layer_norm_affine_bwd.default", inputs, "g", "mu", "iv", "x", [6], "w", "b", 1e-5, elements=types
    )
    for a, b in zip(grads, wanted):
        close(a, b)


def test_apex_rms_norm_forward_and_backward():
    x, w = rand(3, 6).requires_grad_(), rand(6).requires_grad_()
    want = torch.nn.functional.rms_norm(x, (6,), w, 1e-5)
    inputs = {"x": (x.detach(), "float32"), "w": (w.detach(), "float32")}
    types = {0: ("float32", (3, 6)), 1: ("float32", (3,))}
    out, inverse = one("apex.fused_rms_norm_affine_fwd.default", inputs, "x", "w", [6], 1e-5, elements=types)
    close(out, want.detach())
    grad = rand(3, 6)
    wanted = torch.autograd.grad(want, (x, w), grad)
    inputs |= {"g": (grad, "float32"), "iv": (inverse, "float32")}
    types = {0: ("float32", (3, 6)), 1: ("float32", (6,))}
    grads = one("apex.fused_rms_norm_affine_bwd.default", inputs, "g", "iv", "x", [6], "w", 1e-5, elements=types)
    for a, b in zip(grads, wanted):
        close(a, b)


def test_sinkhorn_rows_and_columns_sum_up():
    got = one("megatron.sinkhorn.default", {"x": (rand(8, 3), "float32")}, "x", shape=(8, 3))
    torch.testing.assert_close(got.sum(0), torch.full((3,), 1 / 3, dtype=torch.float64), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(got.sum(1), torch.full((8,), 1 / 8, dtype=torch.float64), rtol=1e-2, atol=1e-2)


def test_vllm_kernels_in_auto_functionalized():
    x, r, w = rand(4, 6), rand(4, 6), rand(6)
    inputs = {"x": (x, "bfloat16"), "r": (r, "bfloat16"), "w": (w, "bfloat16")}
    keyed = {"input": "x", "residual": "r", "weight": "w", "epsilon": 1e-6}
    types = {1: ("bfloat16", (4, 6)), 2: ("bfloat16", (4, 6))}
    normed, total = one(
        "auto_functionalized", inputs, Text("_C.fused_add_rms_norm.default"), kwargs=keyed, elements=types
    )
    close(total, x + r)
    close(normed, torch.nn.functional.rms_norm(x + r, (6,), w, 1e-6))
    keyed = {"result": "r", "input": "x", "weight": "w", "epsilon": 1e-6}
    (normed,) = one("auto_functionalized", inputs, Text("_C.rms_norm.default"), kwargs=keyed,
                    elements={1: ("bfloat16", (4, 6))})  # fmt: skip
    close(normed, torch.nn.functional.rms_norm(x, (6,), w, 1e-6))
    out = torch.zeros(4, 3, dtype=torch.float64)
    (gated,) = one("auto_functionalized", {"x": (x, "bfloat16"), "o": (out, "bfloat16")},
                   Text("_C.silu_and_mul.default"), kwargs={"out": "o", "input": "x"},
                   elements={1: ("bfloat16", (4, 3))})  # fmt: skip
    close(gated, torch.nn.functional.silu(x[:, :3]) * x[:, 3:])


@pytest.mark.parametrize("neox", [True, False])
def test_vllm_rotary_embedding(neox):
    tokens, heads, size, rotary = 5, 3, 8, 4
    q, k = rand(tokens, heads * size), rand(tokens, size)
    cache = rand(11, rotary)
    positions = torch.tensor([3, 0, 10, 2, 2])
    inputs = {"p": (positions, "int64"), "q": (q, "float32"), "k": (k, "float32"), "c": (cache, "float32")}
    keyed = {"positions": "p", "query": "q", "key": "k", "head_size": size, "cos_sin_cache": "c", "is_neox": neox}
    types = {1: ("float32", tuple(q.shape)), 2: ("float32", tuple(k.shape))}
    got = one("auto_functionalized", inputs, Text("_C.rotary_embedding.default"), kwargs=keyed, elements=types)
    for value, result in zip((q, k), got):
        want = value.reshape(tokens, -1, size).clone()
        for t in range(tokens):
            for j in range(rotary // 2):
                a, b = (j, j + rotary // 2) if neox else (2 * j, 2 * j + 1)
                cos, sin = cache[positions[t], j], cache[positions[t], j + rotary // 2]
                x, y = want[t, :, a].clone(), want[t, :, b].clone()
                want[t, :, a], want[t, :, b] = x * cos - y * sin, y * cos + x * sin
        close(result, want.reshape(value.shape))


def test_direct_kernel_call_rebinds_the_written_operand():
    b = Builder()
    b.input("x", (2, 4))
    out = b.add("aten.empty.memory_format", [2, 2], shape=(2, 2))
    b.add("_C.silu_and_mul.default", out, "x")
    read = b.add("aten.mul.Scalar", out, 1.0, shape=(2, 2))
    x = rand(2, 4)
    got = run_sequential(b.done(read), {"x": x})[read]
    close(got, torch.nn.functional.silu(x[:, :2]) * x[:, 2:])


def test_hlo_instructions():
    x, y = rand(3, 4, 5), rand(3, 5, 2)
    dot = one("hlo.dot", {"x": (x, "float16"), "y": (y, "float16")}, "x", "y", shape=(3, 4, 2), kwargs={
        "lhs_contracting_dimensions": [2], "rhs_contracting_dimensions": [1],
        "lhs_batch_dimensions": [0], "rhs_batch_dimensions": [0]})  # fmt: skip
    close(dot, x @ y)
    row = rand(4)
    wide = one("hlo.broadcast", {"x": (row, "float32")}, "x", shape=(2, 4, 3), kwargs={"dimensions": [1]})
    close(wide, row[None, :, None].expand(2, 4, 3))
    table, index = rand(6, 4, 5), torch.tensor([5, 1], dtype=torch.int32)
    got = one("hlo.gather", {"x": (table, "float32"), "i": (index, "int32")}, "x", "i", shape=(2, 4, 5), kwargs={
        "offset_dims": [1, 2], "collapsed_slice_dims": [0], "start_index_map": [0], "index_vector_dim": 1,
        "slice_sizes": [1, 4, 5]})  # fmt: skip
    close(got, table[[5, 1]])
    norm = one("hlo.custom_call", {"x": (x, "float32"), "w": (rand(3), "float32")}, "x", "w", 1e-5, shape=(3, 4, 5),
               kwargs={"target": Text("AwsNeuronRmsNorm"), "backend_config": Text("0")})  # fmt: skip
    assert norm.shape == (3, 4, 5)
    reduced = one("hlo.reduce", {"x": (x, "float32"), "i": (torch.tensor(-1e30), "float32")}, "x", "i", shape=(3, 5),
                  kwargs={"dimensions": [1], "reducer": Text("maximum")})  # fmt: skip
    close(reduced, x.amax(1))
    with pytest.raises(ExecutionError, match="custom call 'Mystery'"):
        one("hlo.custom_call", {"x": (x, "float32")}, "x", shape=(3, 4, 5), kwargs={"target": Text("Mystery")})


def test_grouped_mm():
    a, w = rand(7, 4), rand(3, 4, 5)
    offs = torch.tensor([2, 3, 7], dtype=torch.int32)
    got = one("aten._grouped_mm.default", {"a": (a, "bfloat16"), "w": (w, "bfloat16"), "o": (offs, "int32")}, "a", "w",
              "o", shape=(7, 5), dtype="bfloat16")  # fmt: skip
    close(got, torch.cat([a[:2] @ w[0], a[2:3] @ w[1], a[3:] @ w[2]]))


@pytest.mark.parametrize(
    "op", ["vllm.unified_attention.default", "my.kernel.default", "aten.no_such_op.default", "aten.bernoulli.p"]
)
def test_operators_without_semantics_are_named(op):
    b = Builder()
    b.input("x", (2,))
    node = b.add(op, "x", *([0.5] if "bernoulli" in op else []), shape=(2,), name="mystery")
    with pytest.raises(ExecutionError, match=op.replace(".", r"\.")) as caught:
        run_sequential(b.done(node), {"x": torch.ones(2)})
    assert caught.value.node == "mystery"
    assert "mystery" in str(caught.value)


def test_kernel_without_contract_inside_auto_functionalized():
    b = Builder()
    b.input("x", (2,))
    node = b.multi("auto_functionalized", Text("vllm.unified_attention_with_output.default"), kwargs={"query": "x"})
    with pytest.raises(ExecutionError, match="unified_attention_with_output"):
        run_sequential(b.done(node), {"x": torch.ones(2)})


def test_shape_that_contradicts_the_graph_is_an_error():
    with pytest.raises(ExecutionError, match=r"shape \[3, 5, 4\].*says \[3, 5, 5\]"):
        one("aten.neg.default", {"x": (X, "float32")}, "x", shape=(3, 5, 5))


def test_index_outside_the_table_is_an_error_of_that_node():
    ids = torch.tensor([7])
    with pytest.raises(ExecutionError, match="fails on this input"):
        one("aten.embedding.default", {"w": (W, "float32"), "ids": (ids, "int64")}, "w", "ids", shape=(1, 4))


def test_scalars_and_data_dependent_shapes():
    b = Builder()
    b.input("x", (5,))
    hits = b.add("aten.gt.Scalar", "x", 0.0, shape=(5,), dtype="bool")
    rows = b.add("aten.nonzero.default", hits, shape=("u0", 1), dtype="int64")
    size = b.add("aten.sym_size.int", rows, 0, is_scalar=True)
    fits = b.add("operator.le", size, 5, is_scalar=True)
    b.add("aten._assert_scalar.default", fits, Text("too many"), is_scalar=True)
    half = b.add("_operator.truediv", size, 2, is_scalar=True)
    out = b.add("aten.mul.Tensor", "x", half, shape=(5,))
    x = torch.tensor([1.0, -2.0, 3.0, -4.0, 5.0])
    close(run_sequential(b.done(out), {"x": x})[out], x.double() * 1.5)
    never = b.add("operator.le", size, 2, is_scalar=True)
    b.add("aten._assert_scalar.default", never, Text("too many"), is_scalar=True)
    with pytest.raises(ExecutionError, match="too many"):
        run_sequential(b.done(out), {"x": x})


def test_rms_norm_without_recorded_eps():
    x = rand(2, 4) * 1e-4
    got = one("aten.rms_norm.default", {"x": (x, "float32")}, "x", [4], shape=(2, 4))
    close(got, torch.nn.functional.rms_norm(x, (4,), eps=torch.finfo(torch.float32).eps))
    with pytest.raises(ExecutionError, match="eps was not recorded"):
        one("aten.rms_norm.default", {"x": (x, "bfloat16")}, "x", [4], shape=(2, 4), dtype="bfloat16")


def test_bits_of_floats_are_not_reinterpreted():
    with pytest.raises(ExecutionError, match="reinterprets the bits"):
        one("aten.view.dtype", {"x": (rand(4), "bfloat16")}, "x", "dtype:float16", shape=(4,), dtype="float16")


def test_literal_infinity_masks_and_softmax():
    m = torch.tensor([[True, False, False], [False, True, False]])
    b = Builder()
    b.input("x", (2, 3))
    b.input("m", (2, 3), "bool")
    masked = b.add("aten.masked_fill.Scalar", "x", "m", -math.inf, shape=(2, 3))
    out = b.add("aten._softmax.default", masked, -1, False, shape=(2, 3))
    x = rand(2, 3)
    got = run_sequential(b.done(out), {"x": x, "m": m})[out]
    close(got, x.masked_fill(m, -math.inf).softmax(-1))
