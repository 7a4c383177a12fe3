"""Fused kernels against programs that write them out, right and wrong, through the whole of Emerge."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("egglog")

import emerge  # noqa: E402
from emerge.util.errors import InputError  # noqa: E402

F = torch.nn.functional
Program = Callable[..., Any]
LOWEST = float(torch.finfo(torch.float32).min)


def attention(q: Any, k: Any, v: Any, mask: Any = None, scale: float | None = None, dim: int = -1) -> Any:
    scores = q @ k.transpose(-1, -2) * (q.shape[-1] ** -0.5 if scale is None else scale)
    return F.softmax(scores if mask is None else scores + mask, dim) @ v


def fused(q: Any, k: Any, v: Any, mask: Any = None, **more: Any) -> Any:
    return F.scaled_dot_product_attention(q, k, v, mask, **more)


def causal(q: Any, k: Any, v: Any) -> Any:
    return fused(q, k, v, is_causal=True)


def triangle(shift: int) -> Program:
    return lambda q, k, v: attention(q, k, v, torch.triu(torch.full((q.shape[-2],) * 2, float("-inf")), shift))


def compared(shift: int) -> Program:
    """A mask from compared positions, as Transformers makes it."""

    def program(q: Any, k: Any, v: Any) -> Any:
        i = torch.arange(q.shape[-2])
        return attention(q, k, v, torch.where(i[None, :] <= i[:, None] + shift, 0.0, LOWEST))

    return program


def filled(q: Any, k: Any, v: Any) -> Any:
    n = q.shape[-2]
    scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    return F.softmax(scores.masked_fill(torch.tril(torch.ones(n, n)) == 0, float("-inf")), -1) @ v


def window(width: int, written: bool) -> Program:
    def program(q: Any, k: Any, v: Any) -> Any:
        i = torch.arange(q.shape[-2])
        seen = (i[None, :] <= i[:, None]) & (i[None, :] > i[:, None] - width)
        return attention(q, k, v, torch.where(seen, 0.0, LOWEST)) if written else fused(q, k, v, seen)

    return program


def repeated(x: Any, n: int) -> Any:
    b, g, s, d = x.shape
    return x[:, :, None].expand(b, g, n, s, d).reshape(b, g * n, s, d)


def softmax_by_hand(dim: int) -> Program:
    def program(x: Any) -> Any:
        e = torch.exp(x - x.amax(dim, keepdim=True))
        return e / e.sum(dim, keepdim=True)

    return program


def layer_norm(x: Any, w: Any, b: Any) -> Any:
    centred = x - x.mean(-1, keepdim=True)
    return centred / torch.sqrt((centred**2).mean(-1, keepdim=True) + 1e-5) * w + b


def layer_norm_eps_outside(x: Any, w: Any, b: Any) -> Any:
    centred = x - x.mean(-1, keepdim=True)
    return centred / (torch.sqrt((centred**2).mean(-1, keepdim=True)) + 1e-5) * w + b


def rms(x: Any, w: Any) -> Any:
    return w * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


def gelu_tanh(x: Any) -> Any:
    return 0.5 * x * (1 + torch.tanh(0.7978845608028654 * (x + 0.044715 * x.pow(3))))


X, W, B = torch.randn(3, 5), torch.randn(5), torch.randn(5)
Q, K, V = torch.randn(2, 4, 6, 8), torch.randn(2, 4, 6, 8), torch.randn(2, 4, 6, 8)
KG, VG = torch.randn(2, 2, 6, 8), torch.randn(2, 2, 6, 8)
SEEN = torch.ones(6, 6, dtype=torch.bool).tril(1)

RIGHT: dict[str, tuple[Program, Program, tuple[Any, ...]]] = {
    "softmax": (lambda x: F.softmax(x, -1), softmax_by_hand(-1), (X,)),
    "log-softmax": (lambda x: F.log_softmax(x, -1), lambda x: x - torch.logsumexp(x, -1, keepdim=True), (X,)),
    "layer-norm": (lambda x, w, b: F.layer_norm(x, (5,), w, b), layer_norm, (X, W, B)),
    "rms-norm": (lambda x, w: F.rms_norm(x, (5,), w, 1e-6), rms, (X, W)),
    "gelu": (lambda x: F.gelu(x, approximate="tanh"), gelu_tanh, (X,)),
    "attention": (fused, attention, (Q, K, V)),
    "bool-mask": (fused, lambda q, k, v, mask: attention(q, k, v, torch.where(mask, 0.0, LOWEST)), (Q, K, V, SEEN)),
    "float-mask": (fused, attention, (Q, K, V, torch.randn(6, 6))),
    "causal-triu": (causal, triangle(1), (Q, K, V)),
    "causal-tril": (causal, filled, (Q, K, V)),
    "causal-compared": (causal, compared(0), (Q, K, V)),
    "window": (window(3, False), window(3, True), (Q, K, V)),
    "grouped": (
        lambda q, k, v: fused(q, k, v, enable_gqa=True),
        lambda q, k, v: attention(q, repeated(k, 2), repeated(v, 2)),
        (Q, KG, VG),
    ),
}  # fmt: skip
WRONG: dict[str, tuple[Program, Program, tuple[Any, ...]]] = {
    "softmax-dim": (lambda x: F.softmax(x, -1), softmax_by_hand(0), (X,)),
    "eps-outside": (lambda x, w, b: F.layer_norm(x, (5,), w, b), layer_norm_eps_outside, (X, W, B)),
    "scale-missing": (fused, lambda q, k, v: attention(q, k, v, scale=1.0), (Q, K, V)),
    "attention-dim": (fused, lambda q, k, v: attention(q, k, v, dim=-2), (Q, K, V)),
    "mask-dropped": (fused, lambda q, k, v, mask: attention(q, k, v) + 0 * mask.sum(), (Q, K, V, SEEN)),
    "causal-off-by-one": (causal, triangle(2), (Q, K, V)),
    "causal-compared-off": (causal, compared(1), (Q, K, V)),
    "window-off-by-one": (window(3, False), window(4, True), (Q, K, V)),
    "heads-interleaved": (
        lambda q, k, v: fused(q, k, v, enable_gqa=True),
        lambda q, k, v: attention(q, k.repeat(1, 2, 1, 1), v.repeat(1, 2, 1, 1)),
        (Q, KG, VG),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", RIGHT)
def test_a_fused_kernel_is_its_written_form(name: str) -> None:
    reference, implementation, inputs = RIGHT[name]
    result = emerge.compare(reference, implementation, inputs=inputs)
    assert result.verdict == "EQUIVALENT", result.reason


def test_a_finite_mask_is_listed() -> None:
    result = emerge.compare(causal, compared(0), inputs=(Q, K, V))
    assert result.verdict == "EQUIVALENT"
    assert "finite_mask" in {a.name for a in result.assumptions}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_written_form_is_refuted(name: str) -> None:
    reference, implementation, inputs = WRONG[name]
    result = emerge.compare(reference, implementation, inputs=inputs)
    assert result.verdict == "NOT_EQUIVALENT", result.reason


GATE = """@operator("{op}")
@example(x=tensor(3, 5), y=tensor(3, 5), alpha=1.5)
def gate(x, y, alpha=1.0):
    'silu(alpha x) y'
    return silu(x {sign} alpha) * y
"""


@pytest.fixture
def library() -> Iterator[Any]:
    """A custom operator whose meaning nothing but a definition tells."""
    made = torch.library.Library("mytestlib", "DEF")
    made.define("gate(Tensor x, Tensor y, float alpha=1.0) -> Tensor")
    made.impl("gate", lambda x, y, alpha=1.0: F.silu(x * alpha) * y, "CompositeExplicitAutograd")
    yield made
    made._destroy()


def gate(x: Any, y: Any) -> Any:
    return torch.ops.mytestlib.gate(x, y, 1.5)


def written_gate(x: Any, y: Any) -> Any:
    return F.silu(x * 1.5) * y


def rule(tmp_path: Path, op: str = "mytestlib.gate.default", sign: str = "*") -> list[Path]:
    (tmp_path / "gate.kernel").write_text(GATE.format(op=op, sign=sign))
    return [tmp_path]


@pytest.mark.usefixtures("library")
class TestAKernelOfTheUser:
    inputs = (torch.randn(3, 5), torch.randn(3, 5))

    def test_without_a_definition_nothing_is_decided(self) -> None:
        result = emerge.compare(written_gate, gate, inputs=self.inputs)
        assert result.verdict == "UNKNOWN"
        assert "mytestlib.gate.default" in (result.reason or "")

    def test_one_file_makes_it_equivalent_and_is_tested_against_the_kernel(self, tmp_path: Path) -> None:
        result = emerge.compare(written_gate, gate, inputs=self.inputs, rules=rule(tmp_path))
        assert (result.verdict, result.evidence) == ("EQUIVALENT", "tested"), result.reason
        assert "mytestlib.gate.default:gate" in result.rules_used
        assert "kernel_contract" not in {a.name for a in result.assumptions}

    def test_a_wrong_program_is_refuted(self, tmp_path: Path) -> None:
        result = emerge.compare(lambda x, y: F.silu(x) * y, gate, inputs=self.inputs, rules=rule(tmp_path))
        assert result.verdict == "NOT_EQUIVALENT"

    def test_a_wrong_definition_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(InputError, match=r"'mytestlib.gate.default:gate' is refused: result 0 differs"):
            emerge.compare(written_gate, gate, inputs=self.inputs, rules=rule(tmp_path, sign="+"))

    def graph(self) -> Any:
        """The kernel under a name that no library has."""
        from dataclasses import replace

        from emerge.capture.trace import capture

        found = capture(gate, self.inputs, name="implementation")
        found.nodes = [replace(n, op=n.op.replace("mytestlib", "nolib")) for n in found.nodes]
        return found

    def test_a_definition_that_nothing_tests_is_an_assumption(self, tmp_path: Path) -> None:
        files = rule(tmp_path, "nolib.gate.default")
        result = emerge.compare(written_gate, self.graph(), inputs=self.inputs, rules=files)
        assert (result.verdict, result.evidence) == ("EQUIVALENT", "assumed"), result.reason
        assert [a.why for a in result.assumptions if a.name == "kernel_contract"]

    def test_a_difference_at_an_untested_kernel_decides_nothing(self, tmp_path: Path) -> None:
        files = rule(tmp_path, "nolib.gate.default")
        result = emerge.compare(lambda x, y: F.silu(x) * y, self.graph(), inputs=self.inputs, rules=files)
        assert result.verdict == "UNKNOWN"
        assert "parts first at 'gate' (nolib.gate.default)" in (result.reason or "")
