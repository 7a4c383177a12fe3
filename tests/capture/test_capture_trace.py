"""Captures of single modules and functions: names, places, writes, constants, refusals, values."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from capture_checks import check, close, random_state, run_one  # noqa: E402
from torch import nn  # noqa: E402

from emerge.capture.base import CaptureError  # noqa: E402
from emerge.capture.trace import capture  # noqa: E402


def ops(graph: Any) -> list[str]:
    return [n.op for n in graph.nodes]


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4)
        self.lin = nn.Linear(4, 6)
        self.register_buffer("count", torch.zeros(2, 6))
        self.register_buffer("table", torch.arange(6.0) / 3, persistent=False)

    def forward(self, x: Any, scale: Any) -> Any:
        y = self.lin(self.norm(x)) + self.table * scale
        self.count += y
        return {"y": y, "pair": (y.sum(), x)}


def small_args() -> tuple[Any, Any]:
    return torch.randn(2, 4), torch.tensor(0.5)


def test_inputs_outputs_and_places_have_names(tmp_path: Path) -> None:
    g = check(capture(Small(), small_args(), name="small"), tmp_path)
    labels = {i.name: i.label for i in g.inputs}
    assert labels["norm_weight"] == "norm.weight"
    assert labels["lin_bias"] == "lin.bias"
    assert labels["count"] == "count"
    assert {"x", "scale"} <= set(labels)
    assert "table" not in labels.values(), "a table that no checkpoint holds is a constant, not an input"
    assert g.extra["output_labels"] == ["y", "pair.0", "pair.1", "mutated:count"]
    assert g.outputs[2] == "x"
    addmm = next(n for n in g.nodes if n.op == "aten.addmm.default")
    assert addmm.module == "lin"
    assert addmm.source is not None
    assert addmm.source.split(":")[0].endswith("test_capture_trace.py")
    assert addmm.code == "y = self.lin(self.norm(x)) + self.table * scale"
    assert g.stacks[addmm.stack][-1] == addmm.source


@pytest.mark.parametrize("fake", [False, True])
def test_values_and_mutated_buffer(fake: bool) -> None:
    model = Small()
    graph = capture(Small(), small_args(), name="small", fake=False) if not fake else None
    if graph is None:
        from emerge.capture.session import Settings, run_capture

        graph = run_capture(lambda: (Small(), small_args()), Settings("small", fake=True))
    state = random_state(model)
    x, scale = torch.randn(2, 4).double(), torch.tensor(0.7).double()
    got = run_one(graph, {**state, "x": x, "scale": scale})
    before = state["count"].clone()
    model.table = (torch.arange(6.0) / 3).double()
    want = model(x, scale)
    assert close(got["y"], want["y"], 1e-6)  # the table is float32 in the graph
    assert close(got["mutated:count"], before + want["y"], 1e-6)


def test_existing_module_without_data_is_restored() -> None:
    model = Small()
    weight = model.lin.weight
    g = capture(model, small_args(), name="small", fake=True)
    assert model.lin.weight is weight
    assert any("table" in note for note in g.extra["capture_notes"]), "a constant without value is noted"


def test_writes_through_views_become_values(tmp_path: Path) -> None:
    def program(x: Any, y: Any) -> Any:
        a = x.clone()
        rows = a.view(6, 2)
        rows[1:3].mul_(2)
        a.t()[0] = 7
        part = a.split(1)[1]
        part.copy_(y)
        rows[5, 1].fill_(3.0)
        out = torch.empty_like(a)
        torch.add(a, rows.view(3, 4), out=out)
        return a, out, rows.sum(), x

    x, y = torch.randn(3, 4), torch.randn(1, 4)
    g = check(capture(program, (x, y), name="views"), tmp_path)
    assert not [o for o in ops(g) if o.split(".")[1].endswith("_")], "no in-place operator is left"
    got = run_one(g, {"x": x.double(), "y": y.double()})
    for label, want in zip(g.extra["output_labels"], program(x.double(), y.double())):
        assert close(got[label], want, 1e-12), label


def test_write_to_an_input_is_an_output() -> None:
    def program(x: Any, cache: dict[str, Any]) -> Any:
        cache["k"][:, 1] = x
        return cache["k"].sum()

    x, k = torch.randn(3), torch.randn(3, 2)
    g = capture(program, (x, {"k": k.clone()}), name="cache")
    assert g.extra["output_labels"] == ["output", "mutated:cache.k"]
    got = run_one(g, {"x": x, "cache.k": k})
    want = k.clone()
    want[:, 1] = x
    assert close(got["mutated:cache.k"], want, 1e-6)


def test_rewritten_transient_buffer_becomes_an_input() -> None:
    class Counter(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("seen", torch.zeros(3), persistent=False)

        def forward(self, x: Any) -> Any:
            self.seen.add_(x)
            return self.seen * 2

    g = capture(Counter(), (torch.randn(3),), name="counter")
    assert [i.label for i in g.inputs] == ["x", "seen"]
    assert g.extra["output_labels"] == ["output", "mutated:seen"]


def test_tied_weights_are_one_input() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.emb, self.head = nn.Embedding(5, 3), nn.Linear(3, 5, bias=False)
            self.head.weight = self.emb.weight

        def forward(self, ids: Any) -> Any:
            return self.head(self.emb(ids))

    g = capture(Tied(), (torch.zeros(2, dtype=torch.int64),), name="tied")
    assert [i.label for i in g.inputs] == ["emb.weight", "ids"]
    assert g.inputs[0].extra["aliases"] == ["head.weight"]


def test_constants_keep_their_values(tmp_path: Path) -> None:
    odd = torch.tensor([[1.0, -float("inf")], [2.5, 0.0]])
    same = torch.full((3, 2), 4.0)

    def program(x: Any) -> Any:
        return x.unsqueeze(0) + odd.exp(), x * same[0], x + torch.tensor(0.25)

    g = check(capture(program, (torch.zeros(2),), name="constants"), tmp_path)
    stored = [n for n in g.nodes if n.op == "get_attr"]
    assert [n.const for n in stored] == [[[1.0, -float("inf")], [2.5, 0.0]]]
    assert len([n for n in g.nodes if n.op == "aten.full.default"]) == 2, "constant tensors of one value are `full`"
    x = torch.randn(2)
    got = run_one(g, {"x": x})
    for label, want in zip(g.extra["output_labels"], program(x)):
        assert close(got[label], want, 1e-6)


def test_large_constant_becomes_an_input_with_its_digest() -> None:
    table = torch.randn(100, 50)
    g = capture(lambda x: x @ table, (torch.randn(2, 100),), name="large")
    extra = next(i for i in g.inputs if (i.label or "").startswith("const:"))
    assert extra.shape == (100, 50)
    assert extra.extra["digest"].startswith("sha256:")
    other = capture(lambda x: x @ (table + 0), (torch.randn(2, 100),), name="large")
    assert [i.extra.get("digest") for i in other.inputs if i.label != "x"] == [extra.extra["digest"]]


@pytest.mark.parametrize(
    "program",
    [
        lambda x: x * 2 if x.sum() > 0 else x,
        lambda x: x * x.max().item(),
        lambda x: x * len(x.tolist()),
        lambda x: torch.as_tensor(x.numpy() * 2) + x,
        lambda x: x[x > 0],
        lambda x: torch.nonzero(x),
    ],
)
def test_looking_at_input_values_is_refused(program: Any) -> None:
    with pytest.raises(CaptureError, match="depends on the inputs") as found:
        capture(program, (torch.randn(4),), name="looks")
    assert "test_capture_trace.py" in found.value.place


def test_looking_at_constants_is_fine() -> None:
    limit = torch.tensor([3, 5])
    g = capture(lambda x: x * int(limit.max()) if limit[0] > 1 else x, (torch.randn(4),), name="constants")
    assert ops(g) == ["aten.mul.Tensor"]
    assert g.nodes[0].args[1] == 5


def test_attention_stays_one_operator() -> None:
    def program(q: Any, k: Any, v: Any) -> Any:
        return nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.3, enable_gqa=True)

    q, k = torch.randn(2, 4, 5, 3), torch.randn(2, 2, 5, 3)
    g = capture(program, (q, k, k), name="sdpa")
    assert ops(g) == ["aten.scaled_dot_product_attention.default"]
    same = capture(program, {"q": q, "k": k, "v": k.clone()}, name="sdpa")
    assert [i.label for i in same.inputs] == ["q", "k", "v"]
    got = run_one(same, {"q": q, "k": k, "v": k})
    assert close(got["output"], program(q, k, k), 1e-5)


def test_train_mode_gives_gradients_with_forward_lines(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 3))
    g = check(
        capture(model, (torch.randn(5, 4),), name="train", mode="train", loss=lambda y: y.pow(2).mean()), tmp_path
    )
    assert g.direction == "both"
    assert {n.phase for n in g.nodes} == {"forward", "backward"}
    assert next(n for n in g.nodes if n.op.startswith("aten.gelu_backward")).module == "1"
    state = random_state(model)
    x = torch.randn(5, 4).double()
    got = run_one(g, {**state, "input": x})
    loss = model(x).pow(2).mean()
    loss.backward()
    assert close(got["loss"], loss.detach(), 1e-12)
    for name, parameter in model.named_parameters():
        # 1/15 of the mean is a constant of the graph, which runs in its recorded type (float32)
        assert close(got[f"grad:{name}"], parameter.grad, 1e-6), name


def test_optimizer_step_is_captured(tmp_path: Path) -> None:
    """A whole training step as a function: forward, backward and SGD with momentum, written in place."""

    def step(w: Any, m: Any, x: Any) -> Any:
        p = w.clone().requires_grad_()
        with torch.enable_grad():
            loss = (x @ p).relu().sum()
            (grad,) = torch.autograd.grad(loss, [p])
        m.mul_(0.9).add_(grad)
        w.add_(m, alpha=-0.1)
        return loss.detach()

    w, m, x = torch.randn(3, 2), torch.randn(3, 2), torch.randn(4, 3)
    g = check(capture(step, (w.clone(), m.clone(), x), name="sgd", mode="train"), tmp_path)
    assert g.extra["output_labels"] == ["output", "mutated:w", "mutated:m"]
    got = run_one(g, {"w": w, "m": m, "x": x})
    step(w, m, x)
    assert close(got["mutated:w"], w, 1e-5)
    assert close(got["mutated:m"], m, 1e-5)


def test_random_operators_carry_their_call(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Dropout(0.25))
    g = capture(model, (torch.randn(8),), name="dropout", mode="train", loss=lambda y: y.sum())
    calls = [n.extra["rng"]["call"] for n in g.nodes if "rng" in n.extra]
    assert calls == [0, 1]
    assert len([n for n in g.nodes if n.op == "aten.native_dropout.default"]) == 2
    assert len([n for n in g.nodes if n.op == "aten.native_dropout_backward.default"]) == 2
    assert [s["what"] for s in g.extra["substitutions"]] == ["torch.nn.functional.dropout"]
    quiet = capture(model, (torch.randn(8),), name="dropout")
    assert not [n for n in quiet.nodes if "dropout" in n.op]


def test_custom_kernel_that_writes_its_operand() -> None:
    @torch.library.custom_op("emergetest::scale_", mutates_args=("out",))
    def scale(x: torch.Tensor, out: torch.Tensor, by: float) -> None:
        out.copy_(x * by)

    def program(x: Any) -> Any:
        out = torch.empty_like(x)
        torch.ops.emergetest.scale_(x, out, 2.0)
        return out + 1

    g = capture(program, (torch.randn(3),), name="kernel")
    call = next(n for n in g.nodes if n.op == "auto_functionalized")
    assert call.args == ["emergetest.scale_.default"]
    assert set(call.kwargs) == {"x", "out", "by"}
    assert list(call.elements) == [1]


def test_a_failing_program_names_its_line() -> None:
    def program(x: Any) -> Any:
        return x @ torch.randn(3, 3)

    with pytest.raises(CaptureError, match="running the model failed") as found:
        capture(program, (torch.randn(2, 4),), name="wrong")
    assert "test_capture_trace.py" in found.value.place


def test_importing_capture_does_not_import_torch() -> None:
    code = (
        "import sys, emerge.capture, emerge.capture.trace, emerge.capture.distributed, emerge.capture.hf, "
        "emerge.capture.source, emerge.capture.worker, emerge.capture.pt2, emerge.capture.relations\n"
        "sys.exit('torch' in sys.modules)"
    )
    root = Path(__file__).resolve().parents[2]
    assert subprocess.run([sys.executable, "-c", code], cwd=root, check=False).returncode == 0


@pytest.mark.parametrize("fake", [False, True])
def test_views_in_place_and_constants_made_while_running(fake: bool) -> None:
    from emerge.capture.session import Settings, run_capture

    def program(x: Any) -> Any:
        y = x.clone()
        y.unsqueeze_(0)
        y[0, 1] += torch.tensor(0.25)
        y.t_() if y.dim() == 2 else y.transpose_(1, 2)
        return y * torch.tensor([1.0, 2.0])

    g = run_capture(lambda: (program, (torch.randn(2, 3),)), Settings("places", fake=fake))
    assert "capture_notes" not in g.extra
    x = torch.randn(2, 3)
    assert close(run_one(g, {"x": x})["output"], program(x), 1e-6)
