"""Tables without inputs: computed on one side, stored or computed otherwise on the other. Equal bits, or nothing."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

import emerge

torch = pytest.importorskip("torch", reason="capturing live programs needs torch")

from emerge.campaign.config import load_campaign  # noqa: E402
from emerge.campaign.run import RunOptions, run_pair  # noqa: E402

INPUTS = (torch.zeros(3, 8),)


def frequencies() -> Any:
    return 1.0 / (10000.0 ** (torch.arange(0, 16, 2, dtype=torch.float32) / 16))


def computed(x: Any) -> Any:
    return torch.relu(x * frequencies())


def stored(table: Any) -> Any:
    return lambda x: torch.relu(x * table)


def test_a_stored_table_with_equal_bits_is_the_computed_one() -> None:
    result = emerge.compare(computed, stored(frequencies()), inputs=INPUTS)
    assert result.verdict == "EQUIVALENT", result.reason
    assert "equal_constants" in {a.name for a in result.assumptions}
    assert {r.reference for r in result.input_relations} == {"x"}, "a constant is no input relation"


def test_large_tables_are_known_by_their_digest() -> None:
    rows = torch.arange(1000, dtype=torch.float32)[:, None]

    def reference(x: Any) -> Any:
        return (
            x + torch.cos(rows.new_tensor(0.5) * torch.arange(1000, dtype=torch.float32)[:, None] * frequencies())
        ).exp()

    table = torch.cos(0.5 * rows * frequencies())
    result = emerge.compare(reference, lambda x: (x + table).exp(), inputs=(torch.zeros(1000, 8),))
    assert result.verdict == "EQUIVALENT", result.reason


@pytest.mark.parametrize("factor", [1.0 + 2**-23, 1.01])
def test_another_table_is_not(factor: float) -> None:
    result = emerge.compare(computed, stored(frequencies() * factor), inputs=INPUTS)
    assert result.verdict == ("UNKNOWN" if factor < 1.001 else "NOT_EQUIVALENT"), result.reason


def test_another_order_of_the_same_values_is_not() -> None:
    assert emerge.compare(computed, stored(frequencies().flip(0)), inputs=INPUTS).verdict == "NOT_EQUIVALENT"


QKV = tuple(torch.zeros(1, 2, 5, 4) for _ in range(3))


def causal(q: Any, k: Any, v: Any) -> Any:
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)


def masked(diagonal: int, additive: bool = False) -> Any:
    def program(q: Any, k: Any, v: Any) -> Any:
        at = torch.arange(5)
        mask = at[None, :] <= at[:, None] + diagonal
        if additive:
            mask = torch.zeros(5, 5).masked_fill(~mask, float("-inf"))
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    return program


@pytest.mark.parametrize("additive", [False, True])
def test_a_mask_that_is_the_causal_one(additive: bool) -> None:
    result = emerge.compare(causal, masked(0, additive), inputs=QKV)
    assert result.verdict == "EQUIVALENT", result.reason


@pytest.mark.parametrize("additive", [False, True])
def test_a_mask_that_sees_one_key_more(additive: bool) -> None:
    assert emerge.compare(causal, masked(1, additive), inputs=QKV).verdict == "NOT_EQUIVALENT"


CONFIG = (
    "{vocab_size: 20, hidden_size: 16, intermediate_size: 12, num_hidden_layers: 1, num_attention_heads: 4, "
    "num_key_value_heads: 2%s}"
)
MODEL = f"{{hf: {{architecture: LlamaForCausalLM, config: {CONFIG}}}, inputs: {{batch: 2, seq: 3}}"


def verdict(folder: Path, implementation: str) -> str | None:
    (folder / "c.yaml").write_text(
        f"engine: embedded\npairs:\n  - id: p\n    reference: {MODEL % ''}}}\n    implementation: {implementation}\n"
        "    relations: auto\n"
    )
    result = run_pair(load_campaign(folder / "c.yaml").pairs[0], RunOptions())
    assert result.error is None, result.error
    return result.verdict


def test_an_exported_llama_against_the_live_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    transformers = pytest.importorskip("transformers", reason="needs the extra 'hf'")
    monkeypatch.setenv("EMERGE_CACHE", str(tmp_path / "cache"))
    from emerge.capture.hf import patched

    config = transformers.LlamaConfig(
        vocab_size=20, hidden_size=16, intermediate_size=12, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, use_cache=False,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).eval()
    with patched(), torch.no_grad():
        program = torch.export.export(model, (), {"input_ids": torch.zeros(2, 3, dtype=torch.int64)}, strict=False)
    torch.export.save(program, tmp_path / "llama.pt2")
    assert verdict(tmp_path, "{pt2: llama.pt2}") == "EQUIVALENT"


@pytest.mark.other_environment
@pytest.mark.parametrize(("change", "expected"), [("", "EQUIVALENT"), (", rms_norm_eps: 0.01", "NOT_EQUIVALENT")])
def test_another_version_of_transformers(
    change: str, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    env = os.environ.get("EMERGE_OTHER_ENV")
    if not env:
        pytest.skip("needs a Python environment with another transformers (set EMERGE_OTHER_ENV)")
    pytest.importorskip("transformers", reason="needs the extra 'hf'")
    monkeypatch.setenv("EMERGE_CACHE", str(tmp_path / "cache"))
    assert verdict(tmp_path, f"{MODEL % change}, python_env: '{env}'}}") == expected


def test_a_constant_with_the_shape_of_an_input_is_left_open() -> None:
    def reference(x: Any) -> Any:
        return torch.ones_like(x).exp() + x

    result = emerge.compare(reference, lambda x: torch.ones_like(x).exp() * 2 + x, inputs=INPUTS)
    assert result.verdict == "NOT_EQUIVALENT"
