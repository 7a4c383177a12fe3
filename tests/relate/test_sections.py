"""Claims about sections of a dimension: sequences of different lengths that lie one after another.

What is claimed of one sequence is derived from its section of every tensor before it, through matrix products, norms,
rotations of halves, masks, look-ups and collectives.
"""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("egglog")

import emerge  # noqa: E402
from emerge.capture.trace import capture  # noqa: E402

F = torch.nn.functional
LENGTHS = (3, 5)
VOCAB, M, H, D = 20, 12, 2, 6
TABLE, QKV, OUT = torch.randn(VOCAB, M), torch.randn(3 * M, M), torch.randn(M, M)


def rotated(x: Any, positions: Any) -> Any:
    """Halves of the last dimension turned by the position; [tokens, heads, size]."""
    angle = positions[:, None].float() * torch.arange(D // 2).float()[None] * 0.1
    cos, sin = angle.cos()[:, None], angle.sin()[:, None]
    a, b = x[..., : D // 2], x[..., D // 2 :]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


def attended(q: Any, k: Any, v: Any) -> Any:
    """Causal attention of one sequence; [tokens, heads, size]."""
    n = q.shape[0]
    scores = torch.einsum("ihd,jhd->hij", q, k) * D**-0.5
    seen = torch.arange(n)[None] <= torch.arange(n)[:, None]
    return torch.einsum("hij,jhd->ihd", F.softmax(scores.masked_fill(~seen, float("-inf")), -1), v)


def layer(x: Any, qkv: Any, out: Any, positions: Any, attention: Any) -> Any:
    """A block on [tokens, model]; ``attention`` acts on [tokens, heads, size]."""
    y = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)
    q, k, v = (t.reshape(-1, H, D) for t in (y @ qkv.t()).chunk(3, -1))
    y = attention(rotated(q, positions), rotated(k, positions), v).reshape(-1, M) @ out.t()
    return F.silu(x + y)


def alone(ids_0: Any, ids_1: Any, table: Any, qkv: Any, out: Any) -> Any:
    results = []
    for ids in (ids_0, ids_1):
        x = table[ids]
        for _ in range(2):
            x = layer(x, qkv, out, torch.arange(ids.shape[0]), attended)
        results.append(x @ table.t())
    return tuple(results)


def packed(lengths: tuple[int, ...] = LENGTHS) -> Any:
    """Both sequences in one tensor; wrong twins cut elsewhere."""

    def attention(q: Any, k: Any, v: Any) -> Any:
        parts = zip(*(t.split(list(lengths)) for t in (q, k, v)))
        return torch.cat([attended(*part) for part in parts])

    def program(ids: Any, table: Any, qkv: Any, out: Any) -> Any:
        positions = torch.cat([torch.arange(n) for n in LENGTHS])
        x = table[ids]
        for _ in range(2):
            x = layer(x, qkv, out, positions, attention)
        return x @ table.t()

    return program


def verdict(program: Any) -> Any:
    ids = [torch.arange(n) for n in LENGTHS]
    reference = capture(alone, (*ids, TABLE, QKV, OUT), name="reference")
    implementation = capture(program, (torch.cat(ids), TABLE, QKV, OUT), name="implementation")
    first, second = LENGTHS
    result = str(implementation.outputs[0])
    return emerge.compare(
        reference, implementation,
        relations={
            "ids_0": {"of": f"ids[0:{first}]", "is": "a ~ a"}, "ids_1": {"of": f"ids[{first}:{first + second}]", "is": "a ~ a"},
            "table": "a b ~ a b", "qkv": "a b ~ a b", "out": "a b ~ a b",
        },
        outputs={
            str(reference.outputs[0]): {"of": f"{result}[0:{first}]", "is": "a b ~ a b"},
            str(reference.outputs[1]): {"of": f"{result}[{first}:{first + second}]", "is": "a b ~ a b"},
        },
    )  # fmt: skip


def test_every_sequence_is_proved_on_its_section() -> None:
    found = verdict(packed())
    assert found.verdict == "EQUIVALENT", found.reason


def test_what_kernels_compute_of_a_sequence_counts_as_their_definition() -> None:
    """Both sequences behind one kernel: its nodes rest on the definition of the kernel, not on proved laws alone."""
    from emerge.capture.vllm.kernels import operators

    def program(ids: Any, table: Any, qkv: Any, out: Any) -> Any:
        def attention(q: Any, k: Any, v: Any) -> Any:
            starts = [0, LENGTHS[0], sum(LENGTHS)]
            return operators().attention(q, k, v, starts, D**-0.5, True, 0, 0.0, None, None, 0)

        positions = torch.cat([torch.arange(n) for n in LENGTHS])
        x = layer(layer(table[ids], qkv, out, positions, attention), qkv, out, positions, attention)
        return x @ table.t()

    found = verdict(program)
    assert found.verdict == "EQUIVALENT", found.reason
    assert found.coverage_rest["kernel_contracts"] >= 8
    assert found.coverage_by["emerge_vllm.attention.default:packed_attention"] >= 8


@pytest.mark.parametrize("lengths", [(4, 4), (8,), (5, 3)])
def test_wrong_sequences_are_refuted(lengths: tuple[int, ...]) -> None:
    assert verdict(packed(lengths)).verdict == "NOT_EQUIVALENT"
