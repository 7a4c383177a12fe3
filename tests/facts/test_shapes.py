"""Shape and dtype checks of whole graphs: hand-written calls, messages, symbols, and the captured peer graphs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from emerge.facts.shapes import (
    FLOATING,
    ScalarResult,
    Spec,
    Symbol,
    TupleValue,
    broadcast,
    check_graph,
    has_rule,
    infer,
    normalize_dim,
    promote,
    reduce_shape,
    resolve_view,
    result_type,
    slice_bounds,
)
from emerge.graph.json_io import read_graph
from emerge.graph.model import DType, Graph, Input, Node, Ref, TensorType
from emerge.util.errors import GraphError

_END = 2**63 - 1
_ROOT = Path(__file__).resolve().parents[2]
_SUITE = Path(os.environ.get("EMERGE_PEER_SUITE", _ROOT / ".." / "shared" / "peer_suite"))


def t(*shape: int | str, dtype: str = "float32") -> TensorType:
    return TensorType(dtype, shape)


def index(*shape: int) -> TensorType:
    return t(*shape, dtype="int64")


# --- helpers -------------------------------------------------------------------------------------------------------


def test_broadcast() -> None:
    assert broadcast([(4, 1, 3), (5, 1), ()]) == (4, 5, 3)
    assert broadcast([]) == ()
    assert broadcast([("u0", 1), (1, 3)]) == ("u0", 3)
    assert broadcast([("u0",), (5,)]) == (5,)
    assert broadcast([("u0",), ("u1",)]) == ("?",)
    with pytest.raises(GraphError, match="sizes 4 and 3 differ"):
        broadcast([(4, 2), (3, 1)])


def test_normalize_dim() -> None:
    assert normalize_dim(-1, 3) == 2
    assert normalize_dim(-1, 0) == 0
    for dim, rank in ((3, 3), (-4, 3), (1, 0)):
        with pytest.raises(GraphError, match="out of range"):
            normalize_dim(dim, rank)


@pytest.mark.parametrize(
    ("start", "end", "step"),
    [(None, None, 1), (0, _END, 1), (-3, _END, 1), (2, -1, 2), (-99, 5, 3), (6, 2, 1), (20, 30, 1), (-1, None, 1)],
)
def test_slice_bounds_as_python(start: int | None, end: int | None, step: int) -> None:
    first, stop = slice_bounds(8, start, end, step)
    assert list(range(first, stop, step)) == list(range(8))[start:end:step]
    assert 0 <= first <= stop <= 8


def test_slice_step_is_positive() -> None:
    with pytest.raises(GraphError, match="step 0"):
        slice_bounds(8, 0, 4, 0)


def test_resolve_view() -> None:
    assert resolve_view((6, 4), (2, -1)) == (2, 12)
    assert resolve_view((), (1, 1)) == (1, 1)
    assert resolve_view((0, 3), (3, 0)) == (3, 0)
    assert resolve_view(("u0", 4), (-1,)) == ("?",)
    assert resolve_view(("u0", 4), (7, 4)) == (7, 4)
    for shape, requested in (((6,), (4,)), ((6,), (-1, 4)), ((6,), (-1, -1)), ((0,), (0, -1)), ((6,), (-2, 3))):
        with pytest.raises(GraphError, match="view"):
            resolve_view(shape, requested)


def test_reduce_shape() -> None:
    assert reduce_shape((2, 3, 4), [1, -1]) == (2,)
    assert reduce_shape((2, 3, 4), [0], keepdim=True) == (1, 3, 4)
    assert reduce_shape((2, 3), None) == ()
    assert reduce_shape((2, 3), [], keepdim=True) == (1, 1)
    with pytest.raises(GraphError, match="twice"):
        reduce_shape((2, 3), [1, -1])


def test_type_promotion() -> None:
    assert promote("float16", "bfloat16") == "float32"
    assert promote("uint8", "int8") == "int16"
    assert promote("float8_e4m3fn", "float16") is None
    assert result_type([t(3, dtype="float16"), t(dtype="float32")]) == "float16"
    assert result_type([t(3, dtype="int64"), t(dtype="float16")]) == "float16"
    assert result_type([t(3, dtype="bfloat16"), 2.5]) == "bfloat16"
    assert result_type([t(3, dtype="int32"), 2]) == "int32"
    assert result_type([t(3, dtype="int32"), 2.5]) == FLOATING
    assert result_type([t(3, dtype="bool"), 2]) == "int64"


# --- operators -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("op", "args", "kwargs", "expected"),
    [
        ("aten.mm.default", [t(3, 4), t(4, 5)], {}, Spec("float32", (3, 5))),
        ("aten.slice.Tensor", [t(8, 5), 0, -3, _END], {}, Spec("float32", (3, 5))),
        ("aten.slice.Tensor", [t("u0", 5), 0, 0, _END], {}, Spec("float32", ("u0", 5))),
        ("aten.slice.Tensor", [t(8, 5), 0, 0, Symbol("int64")], {}, Spec("float32", ("?", 5))),
        ("aten.add_.Tensor", [t(3, 4, dtype="float16"), t(4)], {}, Spec("float16", (3, 4))),
        ("aten.add.Tensor", [t(3), 1], {"alpha": 2}, Spec("float32", (3,))),
        ("aten.nonzero.default", [t(3, 4)], {}, Spec("int64", ("?", 2))),
        ("aten.new_zeros.default", [t("u0", 1), [4, 5]], {"dtype": DType("float16")}, Spec("float16", (4, 5))),
        ("aten.view.default", [t(6, 4), [Symbol("int64"), 4]], {}, Spec("float32", ("?", 4))),
        ("aten.native_dropout.default", [t(3), 0.1, True], {}, [Spec("float32", (3,)), Spec("bool", (3,))]),
        ("aten.sym_size.int", [t(3, 7), -1], {}, ScalarResult(7)),
        ("aten.sym_size.int", [t("u0", 7), 0], {}, ScalarResult(Symbol("int64"))),
        ("aten.item.default", [t(1, 1, dtype="int64")], {}, ScalarResult(Symbol("int64"))),
        ("operator.floordiv", [7, 2], {}, ScalarResult(3)),
        ("_operator.neg", [Symbol("int64")], {}, ScalarResult(Symbol("int64"))),
        ("operator.getitem", [TupleValue({0: t(3), 1: t(4)}, 2), -1], {}, Spec("float32", (4,))),
        ("aten._foreach_mul.Scalar", [[t(3), t(4, 5)], 2], {}, [Spec("float32", (3,)), Spec("float32", (4, 5))]),
        ("_c10d_functional.all_gather_into_tensor.default", [t(3, 5), 4, "0"], {}, Spec("float32", (12, 5))),
        ("_c10d_functional.reduce_scatter_tensor.default", [t(8, 5), "sum", 4, "0"], {}, Spec("float32", (2, 5))),
        ("_c10d_functional.irecv.default", [t(8, 5), 1, 0, "0"], {}, Spec("float32", (8, 5))),
        ("c10d._allgather_base_.default", [t(8, 5), t(2, 5), None], {}, [Spec("float32", (8, 5)), None]),
        (
            "fsdp.all_gather_copy_in.default",
            [[t(3), t(2)], t(10), [3, 2], 5, 0],
            {},
            [Spec("float32", (5,)), Spec("float32", (10,))],
        ),
        ("vllm.all_reduce.default", [t(8, 5), "tp:0"], {}, Spec("float32", (8, 5))),
        ("vllm.all_gather.default", [t(8, 5), -1, 2, "tp:0"], {}, Spec("float32", (8, 10))),
        (
            "apex.fused_layer_norm_affine_fwd.default",
            [t(3, 4, 5, dtype="float16"), t(5), t(5), [5], 1e-5],
            {},
            [Spec("float16", (3, 4, 5)), Spec("float32", (12,)), Spec("float32", (12,))],
        ),
        (
            "auto_functionalized",
            ["_C.silu_and_mul.default"],
            {"out": t(3, 4), "input": t(3, 8)},
            [None, Spec("float32", (3, 4))],
        ),
        (
            "aten._scaled_dot_product_efficient_attention_backward.default",
            [t(2, 4, 3, 8)] * 4,
            {},
            [*[Spec("float32", (2, 4, 3, 8))] * 3, None],
        ),
        ("aten._scaled_mm.default", [t(3, 4), t(4, 5), t(), t(), None, None, DType("bfloat16")], {},
         Spec("bfloat16", (3, 5))),
        ("aten._functional_assert_async.msg", [t(), "", t(0)], {}, Spec("float32", (0,))),
    ],
)  # fmt: skip
def test_results(op: str, args: list[Any], kwargs: dict[str, Any], expected: Any) -> None:
    assert infer(op, args, kwargs) == expected


@pytest.mark.parametrize(
    ("op", "args", "kwargs", "message"),
    [
        ("aten.mm.default", [t(3, 4), t(5, 6)], {}, "inner sizes 4 and 5 differ"),
        ("aten.mm.default", [t(3, 4)], {}, "expected operand 'mat2' to be a tensor, it is absent"),
        ("aten.bmm.default", [t(2, 3, 4), t(3, 4, 5)], {}, "batch size"),
        ("aten.addmm.default", [t(4), t(2, 3), t(3, 5)], {}, "addend"),
        ("aten.add.Tensor", [t(3, 4), t(5)], {}, "do not broadcast"),
        ("aten.add_.Tensor", [t(4), t(3, 4)], {}, "cannot be written"),
        ("aten.view.default", [t(3, 4), [5, 2]], {}, "12 elements"),
        ("aten.cat.default", [[t(3, 4), t(3, 5)], 0], {}, "sizes differ at dimension 1"),
        ("aten.cat.default", [[], 0], {}, "no tensors"),
        ("aten.split_with_sizes.default", [t(6), [2, 3]], {}, "add up to 5"),
        ("aten.permute.default", [t(3, 4), [0, 0]], {}, "twice"),
        ("aten.transpose.int", [t(3, 4), 0, 2], {}, "dimension 2 is out of range"),
        ("aten.sum.dim_IntList", [t(3, 4), [-3]], {}, "dimension -3 is out of range"),
        ("aten.select.int", [t(3, 4), 0, 3], {}, "index 3 is out of range"),
        ("aten.gather.default", [t(3, 4), 1, index(3)], {}, "rank 1"),
        ("aten.gather.default", [t(3, 4), 1, t(3, 2)], {}, "expected an integer dtype"),
        ("aten.gather.default", [t(3, 4), 1, index(5, 2)], {}, "exceeds size 3"),
        ("aten.scatter.src", [t(3, 4), 1, index(3, 2), t(3, 1)], {}, "of the source"),
        ("aten.embedding.default", [t(9, 4), t(3)], {}, "expected an integer dtype"),
        ("aten.index.Tensor", [t(3, 4), [t(4, dtype="bool")]], {}, "mask 0"),
        ("aten.index.Tensor", [t(3), [index(2), index(2)]], {}, "2 indices"),
        ("aten.index_put.default", [t(3, 4), [index(2)], t(3, 4)], {}, "do not broadcast to the indexed part"),
        ("aten.slice_scatter.default", [t(3, 8), t(3, 4), 1, 0, 3], {}, "the slice it replaces"),
        ("aten.slice_backward.default", [t(3, 4), [3, 8], 1, 0, 3, 1], {}, "the slice"),
        ("aten.topk.default", [t(3), 4], {}, "k = 4"),
        ("aten.masked_fill.Scalar", [t(3), t(3), 0], {}, "expected bool"),
        ("aten._softmax_backward_data.default", [t(3), t(4), 0, DType("float32")], {}, "the gradient"),
        ("aten.native_layer_norm.default", [t(3, 4), [5], None, None, 1e-5], {}, "not the end"),
        ("aten.native_layer_norm_backward.default", [t(3, 4), t(3, 5), [5], t(3, 1), t(3, 1), None, None], {}, "gra"),
        ("aten.nll_loss_backward.default", [t(3), t(3, 4), index(3), None, 1, -100, t()], {}, "the gradient"),
        ("aten.scaled_dot_product_attention.default", [t(2, 3, 8), t(2, 5, 8), t(2, 4, 8)], {}, "value tokens"),
        ("aten.scaled_dot_product_attention.default", [t(3, 3, 8), t(2, 3, 8), t(2, 3, 8)], {}, "broadcast"),
        (
            "aten.scaled_dot_product_attention.default",
            [t(2, 4, 3, 8), t(2, 3, 3, 8), t(2, 3, 3, 8)],
            {"enable_gqa": True},
            "not a multiple",
        ),
        ("aten._grouped_mm.default", [t(8, 4), t(2, 4, 5), index(3)], {}, "number of groups"),
        ("aten.einsum.default", ["ab,bc->ac", [t(3, 4), t(5, 6)]], {}, "label 'b' has sizes 4 and 5"),
        ("aten.arange.start", [5, 2], {}, "leads away"),
        ("aten._chunk_cat.default", [[t()], 0, 2], {}, "chunk_cat"),
        ("aten._foreach_add.List", [[t(3)], [t(3), t(3)]], {}, "lists of 1 and 2"),
        ("aten._assert_tensor_metadata.default", [t(3, 4), [3, 5]], {}, "asserts shape"),
        ("aten.item.default", [t(3)], {}, "3 elements"),
        ("operator.getitem", [TupleValue({}, 3), 3], {}, "index 3 is out of range for 3 outputs"),
        ("_c10d_functional.reduce_scatter_tensor.default", [t(7, 5), "sum", 4, "0"], {}, "does not divide"),
        ("_c10d_functional.all_gather_into_tensor.default", [t(), 4, "0"], {}, "0-dimensional"),
        ("_c10d_functional.all_to_all_single.default", [t(6), [1, 4], [2, 3], "0"], {}, "add up to 5"),
        ("_c10d_functional.all_to_all_single.default", [t(6), [1, 4, 1], [2, 4], "0"], {}, "one per rank"),
        ("c10d._reduce_scatter_base_.default", [t(3), t(8), None], {}, "whole number of shards"),
        ("fsdp.chunk_cat.default", [[t(3, 4)], 0, 2], {"out": t(2, 7)}, "does not fit the output"),
        ("apex.fused_layer_norm_affine_bwd.default", [t(3, 4), t(2), t(3), t(3, 4), [4], t(4), t(4)], {}, "the mean"),
        ("auto_functionalized", ["_C.silu_and_mul.default"], {"out": t(3, 4), "input": t(3, 6)}, "expected 8"),
        (
            "auto_functionalized",
            ["_C.rotary_embedding.default"],
            {"positions": index(3), "query": t(3, 10), "key": t(3, 4), "head_size": 4},
            "whole heads",
        ),
    ],
)  # fmt: skip
def test_operands_that_do_not_fit(op: str, args: list[Any], kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(GraphError, match=message):
        infer(op, args, kwargs)


def test_group_size_is_compared_with_the_groups_of_the_file() -> None:
    groups = {"tp": [[0, 1], [2, 3]]}
    op, args = "_c10d_functional.all_gather_into_tensor.default", [t(3), 2, "tp"]
    assert infer(op, args, groups=groups, rank=3) == Spec("float32", (6,))
    with pytest.raises(GraphError, match="group 'tp' has 2 ranks"):
        infer(op, [t(3), 4, "tp"], groups=groups, rank=3)
    shard = "_dtensor.shard_dim_alltoall.default"
    assert infer(shard, [t(4, 6), 0, 1, "tp"], groups=groups) == Spec("float32", (8, 3))
    assert infer(shard, [t(4, 6), 0, 1, "tp"]) is None


# --- graphs --------------------------------------------------------------------------------------------------------


def _graph(*nodes: Node) -> Graph:
    inputs = [
        Input("x", "float16", (4, 6)),
        Input("w", "float16", (6, 5)),
        Input("mask", "bool", (4,)),
        Input("ids", "int64", (4,)),
    ]
    return Graph("g", inputs, list(nodes), [nodes[-1].name], path="rank1.json")


def _node(name: str, op: str, args: list[Any], shape: tuple[int | str, ...] | None, dtype: str = "float16") -> Node:
    return Node(name, op, args, dtype=dtype if shape is not None else None, shape=shape)


def _parts(name: str, source: str, *shapes: tuple[int, ...]) -> Node:
    elements = {i: TensorType("float16", s) for i, s in enumerate(shapes)}
    return Node(name, "aten.split.Tensor", [Ref(source), 3, 1], is_tuple=True, elements=elements)


def test_report_counts_checked_and_unchecked() -> None:
    report = check_graph(
        _graph(
            _node("mm", "aten.mm.default", [Ref("x"), Ref("w")], (4, 5)),
            _node("k", "my.kernel.default", [Ref("mm")], (9, 9)),
            _node("k2", "my.kernel.default", [Ref("k")], (9, 9)),
            _node("s", "aten.add.Tensor", [Ref("k"), Ref("k2")], (9, 9)),
        )
    )
    assert report.checked == {"aten.mm.default": 1, "aten.add.Tensor": 1}
    assert report.unchecked == {"my.kernel.default": 2}


def test_contradiction_names_place_operands_computed_and_declared() -> None:
    with pytest.raises(GraphError) as caught:
        check_graph(_graph(_node("mm_3", "aten.mm.default", [Ref("x"), Ref("w")], (4, 7))))
    assert caught.value.place == "rank1.json: node 'mm_3' (aten.mm.default)"
    for part in ("computed shape [4, 5]", "declares [4, 7]", "float16[4, 6], float16[6, 5]", "capture the graph again"):
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("node", "message"),
    [
        (_node("a", "aten.mm.default", [Ref("x"), Ref("w")], (4, 5), "float32"), "computed dtype float16"),
        (_node("a", "aten.rsqrt.default", [Ref("ids")], (4,), "int64"), "computed a floating dtype"),
        (_node("a", "aten.mm.default", [Ref("x"), Ref("w")], None), "declares no type"),
        (_node("a", "aten.mm.default", [Ref("x"), Ref("nowhere")], (4, 5)), "reads 'nowhere'"),
        (_node("a", "aten.sym_size.int", [Ref("x"), 0], (4,)), "computed a scalar"),
        (_node("a", "aten.split.Tensor", [Ref("x"), 3, 1], (4, 3)), "computed 2 outputs"),
        (_parts("a", "x", (4, 3), (4, 2)), r"output 1: computed shape \[4, 3\]"),
        (_parts("a", "x", (4, 3), (4, 3), (4, 3)), "declares output 2"),
        (Node("a", "aten.relu.default", [Ref("x")], is_tuple=True), "declares several outputs"),
        (Node("a", "aten.relu.default", [Ref("x")], is_scalar=True), "declares a scalar"),
        (Node("a", "get_attr", ["c"], dtype="int64", shape=(3,), const=[1, 2]), r"computed shape \[2\]"),
    ],
)
def test_contradictions(node: Node, message: str) -> None:
    with pytest.raises(GraphError, match=message):
        check_graph(_graph(node))


def test_tuples_and_scalars_flow_through_a_graph() -> None:
    size = Node("n", "aten.sym_size.int", [Ref("x"), 0], is_scalar=True)
    half = Node("h", "operator.floordiv", [Ref("n"), 2], is_scalar=True)
    graph = _graph(
        _parts("p", "x", (4, 3)),  # only output 0 is declared; output 1 is computed
        _node("q", "operator.getitem", [Ref("p"), 1], (4, 3)),
        size,
        half,
        _node("v", "aten.view.default", [Ref("q"), [Ref("h"), 6]], (2, 6)),
        _node("nz", "aten.nonzero.default", [Ref("mask")], ("u0", 1), "int64"),
        _node("e", "aten.index.Tensor", [Ref("x"), [Ref("nz")]], ("u0", 1, 6)),
    )
    assert check_graph(graph).unchecked == {}
    for name, shape in (("q", (4, 2)), ("v", (3, 4)), ("e", ("u0", 1, 5))):
        node = next(n for n in graph.nodes if n.name == name)
        kept, node.shape = node.shape, shape
        with pytest.raises(GraphError, match=f"node '{name}'"):
            check_graph(graph)
        node.shape = kept


def test_a_declared_type_that_no_rule_computes_counts_as_unchecked() -> None:
    report = check_graph(_graph(_node("s", "_c10d_functional.isend.default", [Ref("x"), 1, 0, "0"], (0,))))
    assert (report.checked, report.unchecked) == ({}, {"_c10d_functional.isend.default": 1})


def test_getitem_index_beyond_the_outputs() -> None:
    with pytest.raises(GraphError, match="index 2 is out of range for 2 outputs"):
        check_graph(_graph(_parts("p", "x", (4, 3)), _node("q", "operator.getitem", [Ref("p"), 2], (4, 3))))


def test_symbols_are_not_checked() -> None:
    graph = _graph(
        _node("k", "my.kernel.default", [Ref("x")], ("u0", 6)),
        _node("mm", "aten.mm.default", [Ref("k"), Ref("w")], (17, 5)),
        _node("c", "aten.cat.default", [[Ref("k"), Ref("x")], 0], (99, 6)),
    )
    assert check_graph(graph).checked == {"aten.mm.default": 1, "aten.cat.default": 1}
    graph.nodes[1].shape = (17, 6)
    with pytest.raises(GraphError, match="node 'mm'"):
        check_graph(graph)


def test_importing_shapes_does_not_import_torch() -> None:
    code = "import sys, emerge.facts.shapes; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=_ROOT, check=False).returncode == 0


# --- operators of real captures ------------------------------------------------------------------------------------

#: operators seen in captures that have no shape rule, with the reason.
_WITHOUT_RULE = {
    "torch.ops.higher_order.wrap_with_set_grad_enabled": "holds a sub-graph",
}

#: every operator of captured models, by name space (overloads are handled uniformly).
_CAPTURED = {
    "_c10d_functional": "all_gather_into_tensor all_reduce all_to_all_single broadcast irecv isend "
    "reduce_scatter_tensor wait_tensor",
    "operator": "getitem neg pow sub truediv ge le",
    "aten": "__or__ _assert_async _assert_scalar _assert_tensor_metadata _chunk_cat _conj _foreach_add _foreach_add_ "
    "_foreach_addcdiv _foreach_addcdiv_ _foreach_addcmul _foreach_addcmul_ _foreach_div _foreach_div_ _foreach_lerp "
    "_foreach_lerp_ _foreach_mul _foreach_mul_ _foreach_sqrt _grouped_mm _local_scalar_dense _log_softmax "
    "_log_softmax_backward_data _safe_softmax _scaled_dot_product_flash_attention "
    "_scaled_dot_product_flash_attention_backward _scaled_dot_product_flash_attention_for_cpu "
    "_scaled_dot_product_flash_attention_for_cpu_backward _softmax _softmax_backward_data _to_copy _unsafe_view add "
    "add_ addcdiv addcdiv_ addcmul addcmul_ addmm alias all any arange as_strided as_strided_copy baddbmm bitwise_and "
    "bitwise_not bitwise_or bmm cat chunk clamp clamp_ clone contiguous copy copy_ cos cumsum detach detach_copy div "
    "div_ embedding embedding_dense_backward empty empty_like empty_permuted empty_strided eq exp expand fill "
    "floor_divide full_like gather ge gelu gelu_backward histc index index_put index_put_ index_select le lerp lerp_ "
    "lift_fresh_copy linalg_vector_norm linear log log_sigmoid_forward logical_not lt masked_fill masked_fill_ max "
    "mean mm mse_loss mse_loss_backward mul mul_ native_dropout native_layer_norm native_layer_norm_backward ne neg "
    "new_empty new_empty_strided new_zeros nll_loss_backward nll_loss_forward nonzero ones ones_like permute pow "
    "reciprocal remainder repeat repeat_interleave reshape rsqrt rsub scalar_tensor scaled_dot_product_attention "
    "scatter scatter_ scatter_add scatter_add_ sigmoid sigmoid_backward silu silu_backward sin slice slice_backward "
    "slice_copy slice_scatter softmax sort split split_with_sizes split_with_sizes_copy sqrt squeeze stack sub sub_ "
    "sum sym_size t t_copy to topk transpose tril unsqueeze view view_as view_as_complex view_as_real view_copy where "
    "zeros zeros_like",
    "apex": "fused_layer_norm_affine_fwd fused_layer_norm_affine_bwd",
    "megatron": "sinkhorn",
    "vllm": "all_reduce all_gather",
    "vllm_ir": "rms_norm fused_add_rms_norm",
    "c10d": "_allgather_base_ _reduce_scatter_base_",
    "fsdp": "all_gather_copy_in chunk_cat split_with_sizes_copy",
    "profiler": "_record_function_enter_new _record_function_exit",
}


def test_operators_of_captures_have_rules() -> None:
    missing = [
        f"{ns}.{n}" for ns, names in _CAPTURED.items() for n in names.split() if not has_rule(f"{ns}.{n}.default")
    ]
    assert missing == []
    assert has_rule("aten.max.dim")
    assert has_rule("aten.exp.out")
    assert has_rule("auto_functionalized")
    for op in _WITHOUT_RULE:
        assert not has_rule(op)


# --- peer suite ----------------------------------------------------------------------------------------------------


def _suite_files() -> list[Path]:
    return sorted(p for p in _SUITE.glob("*/*.json") if p.name == "seq.json" or p.name.startswith("rank"))


@pytest.mark.peer_suite
def test_peer_graphs_agree() -> None:
    files = _suite_files()
    if not files:
        pytest.skip(f"no peer graphs at {_SUITE}; set EMERGE_PEER_SUITE")
    checked = 0
    for path in files:
        graph = read_graph(path)
        if graph.format != "fx-aten":
            continue
        report = check_graph(graph)
        assert set(report.unchecked) <= {"get_attr"}, path
        checked += sum(report.checked.values())
    assert checked > 10_000


@pytest.mark.peer_suite
@pytest.mark.parametrize(
    "name",
    [
        "gpt_tp2_layer1/rank0.json",
        "gpt_tp2_layer1/seq.json",
        "qwen2_tp2_layer1/rank0.json",
        "bug_grad_accumulation/rank0.json",
        "bug_missing_switchmlp_allreduce/rank0.json",
    ],
)
def test_every_changed_shape_of_a_peer_graph_is_detected(name: str) -> None:
    path = _SUITE / name
    if not path.is_file():
        pytest.skip(f"no peer graphs at {_SUITE}; set EMERGE_PEER_SUITE")
    graph = read_graph(path)
    seen: set[Any] = set()
    for node in graph.nodes:
        if node.op == "get_attr":
            continue
        kind = (node.op, node.shape, str(node.args), tuple(sorted(node.elements.items())))
        if kind in seen:
            continue
        seen.add(kind)
        _require_changes_detected(graph, node)
    assert len(seen) >= min(10, len(graph.nodes))


def _changed(declared: TensorType) -> list[TensorType]:
    shape = declared.shape
    out = [TensorType(declared.dtype, (*shape, 2))]
    out += [
        TensorType(declared.dtype, (*shape[:i], s + 1, *shape[i + 1 :]))
        for i, s in enumerate(shape)
        if isinstance(s, int)
    ]
    return out


def _require_changes_detected(graph: Graph, node: Node) -> None:
    place = rf"node '{node.name}'"
    if node.shape is not None and node.dtype is not None:
        kept = TensorType(node.dtype, node.shape)
        for other in _changed(kept):
            node.shape = other.shape
            with pytest.raises(GraphError, match=place):
                check_graph(graph)
        node.shape, node.dtype = kept.shape, "int16"
        with pytest.raises(GraphError, match=place):
            check_graph(graph)
        node.dtype = kept.dtype
    for i, element in list(node.elements.items()):
        for other in _changed(element):
            node.elements[i] = other
            with pytest.raises(GraphError, match=place):
                check_graph(graph)
        node.elements[i] = element
