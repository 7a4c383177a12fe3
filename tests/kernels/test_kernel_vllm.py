"""The operators that stand for vLLM's kernels, against programs in the layout of Transformers."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("egglog")

import emerge  # noqa: E402
from emerge.capture.trace import capture  # noqa: E402

F = torch.nn.functional
B, T, H, G, D = 2, 6, 4, 2, 8
EXPERTS, CHOSEN, MODEL, INNER = 4, 2, 5, 3
HEADS = torch.randn(B, T, H, D), torch.randn(B, T, G, D), torch.randn(B, T, G, D)


def operators() -> Any:
    from emerge.capture.vllm.kernels import operators

    return operators()


def windowed(q: Any, k: Any, v: Any, window: int = 3) -> Any:
    """Grouped attention over [batch, time, heads, size], query i sees keys i - window + 1 .. i."""
    i = torch.arange(T)
    seen = (i[None] <= i[:, None]) & (i[None] > i[:, None] - window)
    q, k, v = q.transpose(1, 2), *(x.transpose(1, 2).repeat_interleave(H // G, 1) for x in (k, v))
    scores = q @ k.transpose(-1, -2) * D**-0.5 + torch.where(seen, 0.0, float(torch.finfo(torch.float32).min))
    return (F.softmax(scores, -1) @ v).transpose(1, 2).reshape(B, T, H * D)


def packed(window: int = 3, scale: float = D**-0.5, starts: tuple[int, ...] = (0, T, 2 * T)) -> Any:
    def program(q: Any, k: Any, v: Any) -> Any:
        out = operators().attention(q, k, v, list(starts), scale, True, window, 0.0, None, None, 0)
        return out.reshape(-1, H * D)

    return program


@pytest.mark.parametrize(
    ("program", "verdict"),
    [
        (packed(), "EQUIVALENT"),
        (packed(window=4), "NOT_EQUIVALENT"),
        (packed(scale=1.0), "NOT_EQUIVALENT"),
        (packed(starts=(0, 2 * T)), "NOT_EQUIVALENT"),
    ],
    ids=["right", "window-off-by-one", "scale-missing", "sequences-see-each-other"],
)
def test_packed_attention(program: Any, verdict: str) -> None:
    reference = capture(windowed, HEADS, name="reference")
    implementation = capture(program, tuple(x.flatten(0, 1) for x in HEADS), name="implementation")
    result = emerge.compare(
        reference, implementation, relations=dict.fromkeys("qkv", "b s h d ~ (b s) h d"),
        outputs={str(reference.outputs[0]): "b s m ~ (b s) m"},
    )  # fmt: skip
    assert result.verdict == verdict, result.reason


def cached(q: Any, k: Any, v: Any, past_k: Any, past_v: Any) -> Any:
    """The last T of T + P positions, [batch, time, heads, size], after P cached ones; query i sees keys i - 4 .. i."""
    k, v = torch.cat([past_k, k], 1), torch.cat([past_v, v], 1)
    i, j = torch.arange(T)[:, None] + P, torch.arange(T + P)[None]
    q, k, v = q.transpose(1, 2), *(x.transpose(1, 2).repeat_interleave(H // G, 1) for x in (k, v))
    scores = (q @ k.transpose(-1, -2) * D**-0.5).masked_fill(~((j <= i) & (j > i - 5)), float("-inf"))
    return (F.softmax(scores, -1) @ v).transpose(1, 2).reshape(B, T, H * D)


P = 3


def cached_kernel(window: int = 5, past: int = P, new_first: bool = False) -> Any:
    def program(q: Any, k: Any, v: Any, past_k: Any, past_v: Any) -> Any:
        def joined(old: Any, new: Any) -> Any:
            rows = [old.view(B, P, G, D), new.view(B, T, G, D)]
            return torch.cat(rows[::-1] if new_first else rows, 1).view(-1, G, D)

        starts, ends = [0, T, 2 * T], [0, T + past, 2 * (T + P)]
        args = (q, joined(past_k, k), joined(past_v, v), starts, D**-0.5, True, window, 0.0, None, None, 0, ends)
        return operators().attention(*args).reshape(-1, H * D)

    return program


@pytest.mark.parametrize(
    ("program", "verdict"),
    [
        (cached_kernel(), "EQUIVALENT"),
        (cached_kernel(window=4), "NOT_EQUIVALENT"),
        (cached_kernel(past=P - 1), "NOT_EQUIVALENT"),
        (cached_kernel(new_first=True), "NOT_EQUIVALENT"),
    ],
    ids=["right", "window-off-by-one", "keys-of-another-sequence", "past-behind-the-new"],
)
def test_attention_after_a_past(program: Any, verdict: str) -> None:
    args = (*HEADS, torch.randn(B, P, G, D), torch.randn(B, P, G, D))
    reference = capture(cached, args, name="reference")
    implementation = capture(program, tuple(x.flatten(0, 1) for x in args), name="implementation")
    result = emerge.compare(
        reference, implementation, relations=dict.fromkeys(("q", "k", "v", "past_k", "past_v"), "b s h d ~ (b s) h d"),
        outputs={str(reference.outputs[0]): "b s m ~ (b s) m"},
    )  # fmt: skip
    assert result.verdict == verdict, result.reason


@pytest.mark.parametrize(("window", "verdict"), [(64, "EQUIVALENT"), (T, "EQUIVALENT"), (T - 1, "NOT_EQUIVALENT")])
def test_window_of_the_whole_sequence(window: int, verdict: str) -> None:
    """Executed constants show the mask as the causal one, and a window as long as the sequence hides nothing."""

    def wide(q: Any, k: Any, v: Any) -> Any:
        return windowed(q * torch.arange(1, D + 1).float().reciprocal(), k, v, 64)

    def program(q: Any, k: Any, v: Any) -> Any:
        return packed(window)(q * (1.0 / torch.arange(1, D + 1)).float(), k, v)

    reference = capture(wide, HEADS, name="reference")
    implementation = capture(program, tuple(x.flatten(0, 1) for x in HEADS), name="implementation")
    result = emerge.compare(
        reference, implementation, relations=dict.fromkeys("qkv", "b s h d ~ (b s) h d"),
        outputs={str(reference.outputs[0]): "b s m ~ (b s) m"},
    )  # fmt: skip
    assert result.verdict == verdict, result.reason


def route(x: Any, gate: Any) -> tuple[Any, Any]:
    weights, ids = torch.topk(F.softmax(x @ gate.t(), -1), CHOSEN, -1)
    return weights / weights.sum(-1, keepdim=True), ids


def batched(x: Any, gate: Any, w13: Any, w2: Any) -> Any:
    """Experts as Transformers' ``batched_mm``: one product per token and choice."""
    weights, ids = route(x, gate)
    ids, rows = ids.reshape(-1), x.repeat_interleave(CHOSEN, 0)
    a, up = torch.bmm(w13[ids], rows.unsqueeze(-1)).squeeze(-1).chunk(2, -1)
    out = torch.bmm(w2[ids], (F.silu(a) * up).unsqueeze(-1)).squeeze(-1)
    return (out * weights.reshape(-1).unsqueeze(-1)).view(6, CHOSEN, MODEL).sum(1)


@pytest.mark.parametrize(("activation", "verdict"), [("silu", "EQUIVALENT"), ("gelu", "NOT_EQUIVALENT")])
def test_experts(activation: str, verdict: str) -> None:
    def fused(x: Any, gate: Any, w13: Any, w2: Any) -> Any:
        weights, ids = route(x, gate)
        return operators().experts(x, w13, w2, None, None, weights, ids, activation, False)

    inputs = (
        torch.randn(6, MODEL), torch.randn(EXPERTS, MODEL), torch.randn(EXPERTS, 2 * INNER, MODEL),
        torch.randn(EXPERTS, MODEL, INNER),
    )  # fmt: skip
    result = emerge.compare(batched, fused, inputs=inputs)
    assert result.verdict == verdict, result.reason
