"""The readable FX text PyTorch prints. The samples in fx/ were printed by torch 2.13."""

from __future__ import annotations

import math
import random
from pathlib import Path

import pytest

from emerge.graph.fx_text import parse_fx_text, read_fx_text
from emerge.graph.json_io import decode_graph, encode_graph
from emerge.graph.model import DType, Graph, Node, Ref, TensorType, TypedConst
from emerge.util.errors import GraphError, InputError

FX = Path(__file__).parent / "fx"


def node(graph: Graph, name: str) -> Node:
    return next(n for n in graph.nodes if n.name == name)


def body(*lines: str, inputs: str = 'x: "f32[2, 3]"') -> str:
    return "\n".join(
        ["class f(torch.nn.Module):", f"    def forward(self, {inputs}):", *("        " + s for s in lines)]
    )


def test_types_come_with_and_without_strides() -> None:
    g = read_fx_text(FX / "make_fx_strides.txt")
    assert [(i.name, i.dtype, i.shape) for i in g.inputs] == [("x_1", "float32", (4, 8))]
    assert (node(g, "_to_copy").dtype, node(g, "_to_copy").shape) == ("bfloat16", (4, 8))
    assert node(g, "scalar_tensor").shape == ()
    assert g.outputs == ["add", "getitem_6", "sum_1"]


def test_arguments_sources_and_elements() -> None:
    g = read_fx_text(FX / "make_fx_strides.txt")
    scalar = node(g, "scalar_tensor")
    assert scalar.op == "aten.scalar_tensor.default"
    assert scalar.args == [-math.inf]
    assert scalar.kwargs == {
        "dtype": DType("float32"),
        "layout": TypedConst("layout", "strided"),
        "device": TypedConst("device", "cpu"),
    }
    topk = node(g, "topk")
    assert topk.is_tuple
    assert topk.elements == {0: TensorType("bfloat16", (4, 2)), 1: TensorType("int64", (4, 2))}
    assert topk.source == "/src/model.py:13"
    assert topk.code == "y2,i=torch.topk(y,2)"
    assert node(g, "getitem_6").args == [Ref("topk"), 1]
    constant = node(g, "_tensor_constant0")
    assert (constant.op, constant.args, constant.dtype, constant.has_const) == (
        "get_attr",
        ["_tensor_constant0"],
        "bool",
        False,
    )


def test_exported_program_gives_labels_and_scalars() -> None:
    g = read_fx_text(FX / "exported_program.txt")
    assert [i.label for i in g.inputs] == ["fc.weight", "fc.bias", "ln.weight", "ln.bias", "mask", None]
    check = node(g, "_assert_tensor_metadata_default")
    assert check.is_scalar
    assert not check.is_tuple


def test_log_prefixes_and_choice_by_title() -> None:
    with pytest.raises(GraphError, match=r"'Joint graph 0' \(line 4\), 'Forward graph 0'.*keep one"):
        read_fx_text(FX / "aot_graphs.log")
    joint = read_fx_text(FX / "aot_graphs.log", "Joint")
    assert joint.direction == "both"
    assert [i.name for i in joint.inputs] == ["primals_1", "primals_2", "primals_3", "tangents_1"]
    assert joint.outputs == ["gelu", "t_3", "view", None]
    backward = read_fx_text(FX / "aot_graphs.log", "Backward")
    assert backward.direction == "bw"
    assert [i.name for i in backward.inputs] == ["primals_3", "addmm", "tangents_1"]
    with pytest.raises(GraphError, match="expected a graph titled 'Tangent'"):
        read_fx_text(FX / "aot_graphs.log", "Tangent")


def test_collectives_keep_group_ids() -> None:
    g = read_fx_text(FX / "collectives.txt")
    assert node(g, "all_reduce").op == "_c10d_functional.all_reduce.default"
    assert node(g, "reduce_scatter_tensor").args == [Ref("wait_tensor_1"), "sum", 2, "0"]
    assert math.isnan(node(g, "full").args[1])  # type: ignore[arg-type]
    assert g.outputs == ["add", "full"]  # a dict in the source


def test_symbols_operators_and_subgraphs() -> None:
    g = read_fx_text(FX / "cond.txt")
    assert g.inputs[0].shape == (4, "s27")
    assert node(g, "ge_1").op == "operator.ge"
    assert node(g, "ge_1").is_scalar
    assert node(g, "ge_1").extra["val"] == "Sym(u0 >= 0)"
    assert node(g, "slice_1").args == [Ref("x"), 0, None, Ref("item")]
    # a nested sub-graph is no constant that could be compared by its name
    assert node(g, "true_graph_0").op == "fx.submodule"
    assert [n.name for n in g.nodes].count("sin") == 0
    assert read_fx_text(FX / "symbolic.txt").nodes[0].shape == ("s75*s96",)


def test_kernels_named_as_arguments() -> None:
    g = read_fx_text(FX / "auto_functionalized.txt")
    call = node(g, "auto_functionalized_v2")
    assert call.op == "auto_functionalized_v2"
    assert call.args == ["my.op.default"]
    assert call.kwargs == {"x": Ref("arg0_1"), "_out_base_index": 0, "_all_bases": [Ref("empty_like")]}
    assert call.elements == {1: TensorType("float32", (2, 2))}


@pytest.mark.parametrize("path", sorted(FX.glob("*.txt")), ids=lambda p: p.name)
def test_samples_survive_the_json_form(path: Path) -> None:
    document = encode_graph(read_fx_text(path))
    assert encode_graph(decode_graph(document, str(path))) == document


def test_small_forms() -> None:
    g = parse_fx_text(
        body(
            "input_1 = x",
            'y: "f32[2, 3]" = torch.ops.aten.add.Tensor(input_1, [-1, -2.5, -inf], alpha = None);  input_1 = x = None',
            '_c: "f32[]" = self.block._c',
            "to: \"f16[2, 3]\" = torch.ops.aten.to.device(y, device(type='cuda', index=1), torch.float16)",
            'n: "Sym(2*u0)" = s0 * 2',
            'neg: "Sym(-u0)" = -s0',
            "return [to, None, 3]",
            inputs='x: "f32[2, 3]", s0: "Sym(u0)"',
        ),
        "g.txt",
    )
    assert node(g, "y").args == [Ref("x"), [-1, -2.5, -math.inf]]
    assert node(g, "_c").args == ["block._c"]
    assert node(g, "to").args == [Ref("y"), TypedConst("device", "cuda:1"), DType("float16")]
    assert (node(g, "n").op, node(g, "neg").op) == ("operator.mul", "operator.neg")
    assert g.inputs[1].extra == {"scalar": True, "val": "Sym(u0)"}
    assert g.outputs == ["to", None, "output_2_constant"]
    assert node(g, "output_2_constant").args == [3]


def test_unannotated_constant_takes_the_type_of_its_copy() -> None:
    g = parse_fx_text(
        body(
            "_c = self._c", 'lift: "i64[]" = torch.ops.aten.lift_fresh_copy.default(_c);  _c = None', "return (lift,)"
        ),
        "g.txt",
    )
    assert (node(g, "_c").dtype, node(g, "_c").shape) == ("int64", ())


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        (body("y = torch.ops.aten.neg.default(x)", "return (y,)"), 3, "output 'y' has no type annotation"),
        (body("y = torch.f(x)", 'z: "f32[2]" = torch.g(y)', "return (z,)"), 3, "'y' has no type annotation"),
        (body('y: "f32[2]" = torch.ops.aten.neg.default(z)', "return (y,)"), 3, "'z' is used before it is defined"),
        (body('x: "f32[2]" = torch.ops.aten.neg.default(x)', "return (x,)"), 3, "'x' is assigned twice"),
        (body('y: "q8[2]" = torch.ops.aten.neg.default(x)', "return (y,)"), 3, "unknown dtype 'q8'"),
        (body('y: "f32[-2]" = torch.ops.aten.neg.default(x)', "return (y,)"), 3, "found '-2'"),
        (body('y: "f32" = torch.ops.aten.neg.default(x)', "return (y,)"), 3, "expected a type such as"),
        (body('y: "f32[2]" = torch.ops.aten.neg.default(x'), 3, "expected a printed FX statement"),
        (body('y: "f32[2]" = x[slice(1, 2, None)]', "return (y,)"), 3, "slice objects"),
        (body('y: "f32[2]" = torch.ops.aten.neg.default(open("f"))', "return (y,)"), 3, "nested call"),
        (body('y: "f32[2]" = torch.ops.aten.neg.default(x, torch.float3)', "return (y,)"), 3, "expected a dtype"),
        (body('y: "f32[2]" = torch.ops.aten.neg.default(x, 1j)', "return (y,)"), 3, "complex constants"),
        (body("x += 1", "return (x,)"), 3, "in-place"),
        (body("import os", "return (x,)"), 3, "expected an assignment"),
        (body("return (x,)", inputs="x"), 3, "input 'x' has no type annotation"),
        (body('y: "f32[2]" = torch.ops.aten.neg.default(x)'), 3, "no 'return'"),
        (body("return (x,)", inputs="*args"), 2, "are not supported"),
        ("print('hello')", 0, "expected 'def forward"),
    ],
)  # fmt: skip
def test_errors_name_the_line(text: str, line: int, message: str) -> None:
    with pytest.raises(GraphError) as caught:
        parse_fx_text(text, "g.txt")
    assert message in str(caught.value)
    assert caught.value.place == (f"g.txt:{line}" if line else "g.txt")


def test_text_is_never_evaluated(tmp_path: Path) -> None:
    trap = tmp_path / "trap"
    code = f"__import__('pathlib').Path({str(trap)!r}).touch()"
    with pytest.raises(GraphError):
        parse_fx_text(body(f'y: "f32[2]" = torch.ops.aten.neg.default({code})', "return (y,)"), "g.txt")
    assert not trap.exists()


def test_mutated_text_loads_or_raises_input_error() -> None:
    rng = random.Random(11)
    raw = (FX / "cond.txt").read_text()
    for _ in range(300):
        lines = raw.splitlines()
        for _ in range(rng.randint(1, 3)):
            at = rng.randrange(len(lines))
            line = lines[at]
            cut = rng.randrange(len(line) + 1)
            match rng.randrange(4):
                case 0:
                    lines[at] = line[:cut] + rng.choice("()[]:;=,.'\"\\\0\u00e9-#") + line[cut:]
                case 1:
                    lines[at] = line[:cut]
                case 2:
                    lines.insert(rng.randrange(len(lines)), line)
                case _:
                    del lines[at]
        try:
            parse_fx_text("\n".join(lines), "g.txt")
        except InputError:
            continue


def test_live_prints_match_the_graph_module() -> None:
    """What torch prints today still parses: every node and target of the module is found again."""
    torch = pytest.importorskip("torch")
    from torch.fx.experimental.proxy_tensor import make_fx

    def f(x, w):  # type: ignore[no-untyped-def]
        q, k = (x @ w).split(4, -1)
        s = (q @ k.transpose(-1, -2)).masked_fill(torch.ones(3, 3).triu(1).bool(), float("-inf"))
        return s.softmax(-1).to(torch.bfloat16), torch.topk(s, 2)[1]

    gm = make_fx(f)(torch.randn(3, 8), torch.randn(8, 8))
    for options in ({}, {"include_stride": True, "include_device": True}):
        g = parse_fx_text(gm.print_readable(print_output=False, **options), "live")
        calls = [n for n in gm.graph.nodes if n.op == "call_function"]
        by_name = {n.name: n for n in g.nodes}
        for n in calls:
            assert by_name[n.name].op == str(n.target).replace("<built-in function getitem>", "operator.getitem")
            value = n.meta["val"]
            if isinstance(value, torch.Tensor):
                assert by_name[n.name].shape == tuple(value.shape)
                assert by_name[n.name].dtype == str(value.dtype).removeprefix("torch.")
