"""Local safetensors weights of Transformers models: values where the model has data, names and shapes where not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", reason="needs the extra 'hf'")

from emerge.campaign.config import load_campaign  # noqa: E402
from emerge.campaign.run import RunOptions, run_pair  # noqa: E402
from emerge.capture.base import CaptureError  # noqa: E402
from emerge.capture.source import load_spec  # noqa: E402

CONFIG = {
    "vocab_size": 20, "hidden_size": 16, "intermediate_size": 12, "num_hidden_layers": 1, "num_attention_heads": 4,
    "num_key_value_heads": 2,
}  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("EMERGE_CACHE", str(tmp_path / "cache"))
    torch.manual_seed(5)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**CONFIG))
    model.save_pretrained(tmp_path / "weights")
    return tmp_path


def source(fake: bool = False, **changes: Any) -> dict[str, Any]:
    return {
        "hf": {"architecture": "LlamaForCausalLM", "config": CONFIG | changes},
        "inputs": {"batch": 2, "seq": 3}, "weights": "weights", "fake": fake,
    }  # fmt: skip


def test_the_graph_is_the_same_and_knows_the_values(folder: Path) -> None:
    graph = load_spec(source(), base=folder)[0]
    plain = load_spec({k: v for k, v in source().items() if k != "weights"}, base=folder)[0]
    assert [(n.op, n.args) for n in graph.nodes] == [(n.op, n.args) for n in plain.nodes]
    stored = transformers.LlamaForCausalLM.from_pretrained(folder / "weights", dtype=torch.float32).state_dict()
    for found in (graph, load_spec(source(), base=folder)[0]):  # captured, and from the cache
        values = {i.label: i.values for i in found.inputs if i.values is not None}
        assert set(values) == set(stored)
        assert all(numpy.array_equal(values[k], v.numpy()) for k, v in stored.items())


@pytest.mark.parametrize("fake", [False, True])
def test_what_does_not_fit_is_one_message(folder: Path, fake: bool) -> None:
    with pytest.raises(CaptureError) as caught:
        load_spec(source(fake, intermediate_size=10, num_hidden_layers=2), base=folder)
    text = str(caught.value)
    assert "9 missing (model.layers.1.input_layernorm.weight" in text
    assert "3 of another shape (model.layers.0.mlp.down_proj.weight ([16, 12] instead of [16, 10])" in text
    assert "weights" in caught.value.place
    with pytest.raises(CaptureError, match="left over"):
        load_spec(source(fake, num_hidden_layers=0), base=folder)
    assert load_spec(source(True), base=folder)[0].inputs[0].values is None


def test_no_such_folder(folder: Path) -> None:
    with pytest.raises(CaptureError, match="local folder with"):
        load_spec(source() | {"weights": "elsewhere"}, base=folder)


def test_execution_uses_them(folder: Path) -> None:
    """A fault that shows for every input is found in the first sample, whose inputs are the checkpoint's."""
    pair = (
        "{hf: {architecture: LlamaForCausalLM, config: {vocab_size: 20, hidden_size: 16, intermediate_size: 12, "
        "num_hidden_layers: 1, num_attention_heads: 4, num_key_value_heads: 2%s}}, inputs: {batch: 2, seq: 3}, "
        "weights: weights}"
    )
    (folder / "c.yaml").write_text(
        f"pairs:\n  - id: eps\n    reference: {pair % ''}\n    implementation: {pair % ', rms_norm_eps: 0.1'}\n"
        "    relations: auto\n"
    )
    spec = load_campaign(folder / "c.yaml").pairs[0]
    result = run_pair(spec, RunOptions("embedded", out=folder / "out"))
    assert result.verdict == "NOT_EQUIVALENT", result.reason
    saved = numpy.load(next((folder / "out").rglob("inputs.npz")))
    stored = transformers.LlamaForCausalLM.from_pretrained(folder / "weights", dtype=torch.float32).state_dict()
    name = next(k for k in saved.files if k.startswith("reference/") and "q_proj" in k)
    assert numpy.array_equal(saved[name], stored["model.layers.0.self_attn.q_proj.weight"].double().numpy())


def test_tensor_parallel_with_weights(folder: Path) -> None:
    spec = source()
    ranks = load_spec(spec | {"hf": spec["hf"] | {"tp_size": 2}}, base=folder, cache=False)
    whole = {i.label: i.values for i in load_spec(spec, base=folder)[0].inputs}
    for rank, graph in enumerate(ranks):
        local = next(i for i in graph.inputs if i.label == "model.layers.0.self_attn.q_proj.weight")
        assert numpy.array_equal(local.values, whole[local.label][8 * rank : 8 * rank + 8])
