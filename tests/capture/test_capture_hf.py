"""Hugging Face Transformers models: sequential and with Transformers' own parallelism."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers", reason="captures of Transformers models need the package transformers")

from capture_checks import check, close, derive_pair, random_state, run_one, run_parallel  # noqa: E402

from emerge.capture.base import CaptureError  # noqa: E402
from emerge.capture.hf import HFSpec, capture_hf, make_model, patched  # noqa: E402

TINY = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 8,
    "num_key_value_heads": 4, "max_position_embeddings": 64, "pad_token_id": None, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
SPECS: dict[str, HFSpec] = {
    "llama": HFSpec("LlamaForCausalLM", TINY, 2, 6),
    "qwen3": HFSpec("Qwen3ForCausalLM", {**TINY, "head_dim": 8}, 2, 6),
    "mixtral": HFSpec("MixtralForCausalLM", {**TINY, **EXPERTS}, 2, 6),
    "gpt2": HFSpec(
        "GPT2LMHeadModel",
        {
            "vocab_size": 64,
            "n_embd": 32,
            "n_layer": 2,
            "n_head": 4,
            "n_positions": 64,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
        2,
        6,
    ),
}


def spec(model: str, **changes: Any) -> HFSpec:
    base = SPECS[model]
    return HFSpec(**{**{f: getattr(base, f) for f in base.__dataclass_fields__}, **changes})


def random_values(model: str) -> dict[str, Any]:
    """Distinct float64 parameters and token ids, by label."""
    with patched():
        state = random_state(make_model(SPECS[model], "float32"))
    return {**state, "input_ids": torch.randint(0, 64, (2, 6), generator=torch.Generator().manual_seed(3))}


@pytest.mark.parametrize("model", list(SPECS))
def test_sequential_models_compute_what_the_model_computes(model: str, tmp_path: Path) -> None:
    graph = check(capture_hf(SPECS[model], name=model)[0], tmp_path)
    assert graph.extra["output_labels"] == ["logits"]
    assert [s["what"] for s in graph.extra["substitutions"]] == [
        "transformers.masking_utils.find_packed_sequence_indices"
    ]
    assert {i.label for i in graph.inputs} == set(random_values(model)) - (
        {"lm_head.weight"} if model == "gpt2" else set()
    )
    with patched():
        module = make_model(SPECS[model], "float32").eval()
    values = random_values(model)
    with torch.no_grad():
        for name, tensor in module.state_dict(keep_vars=True).items():
            tensor.copy_(values[name])
        want = module(values["input_ids"], use_cache=False).logits
    # float64 against the model in float32: rounding of a few layers
    assert close(run_one(graph, values)["logits"], want, 2e-5)


@pytest.mark.parametrize("model", ["llama", "gpt2"])
def test_without_data_the_graph_is_the_same(model: str) -> None:
    real = capture_hf(SPECS[model], name=model)[0]
    light = capture_hf(spec(model, dtype="float32"), name=model, fake=True)[0]
    assert [(n.op, n.shape) for n in light.nodes] == [(n.op, n.shape) for n in real.nodes]
    assert light.extra["output_labels"] == real.extra["output_labels"]


PARALLEL = [
    ("llama", {"tp_size": 2}),
    ("qwen3", {"tp_size": 2}),
    ("mixtral", {"tp_size": 2}),
    ("mixtral", {"tp_size": 2, "ep_size": 2}),
]


@pytest.mark.parametrize(("model", "parallel"), PARALLEL)
def test_transformers_own_parallelism(model: str, parallel: dict[str, int], tmp_path: Path) -> None:
    reference = capture_hf(SPECS[model], name=model)[0]
    ranks = capture_hf(spec(model, **parallel), name=f"{model}-tp")
    assert len(ranks) == 2
    for graph in ranks:
        check(graph, tmp_path)
        assert graph.groups == {"tp": [[0, 1]]}
    placements = {i.label: i.placement for i in ranks[0].inputs}
    assert placements["model.layers.0.self_attn.q_proj.weight"] == ["Shard(0)"]
    assert placements["model.layers.0.self_attn.o_proj.weight"] == ["Shard(1)"]
    values = random_values(model)
    want = run_one(reference, values)["logits"]
    for got in run_parallel(reference, ranks, values):
        assert close(got["logits"], want, 1e-12)


@pytest.mark.parametrize("model", ["llama", "qwen3"])
def test_transformers_tensor_parallelism_is_derived(model: str) -> None:
    reference = capture_hf(SPECS[model], name=model)[0]
    derivation = derive_pair(reference, capture_hf(spec(model, tp_size=2), name=f"{model}-tp"))
    assert derivation.reference.unknown == {}
    assert derivation.implementation.unknown == {}
    assert derivation.proved() == set(derivation.claims)


def test_train_mode_gives_loss_and_gradients(tmp_path: Path) -> None:
    reference = check(capture_hf(spec("llama"), name="llama", mode="train")[0], tmp_path)
    assert reference.direction == "both"
    assert reference.extra["output_labels"][0] == "loss"
    assert "grad:model.layers.1.mlp.up_proj.weight" in reference.extra["output_labels"]
    ranks = capture_hf(spec("llama", tp_size=2), name="llama-tp", mode="train")
    values = {**random_values("llama"), "labels": None}
    values["labels"] = values["input_ids"]
    want = run_one(reference, values)
    got = run_parallel(reference, ranks, values)
    assert close(got[0]["loss"], want["loss"], 1e-6)
    whole = want["grad:model.layers.0.mlp.up_proj.weight"]
    parts = torch.cat([g["grad:model.layers.0.mlp.up_proj.weight"] for g in got])
    assert close(parts, whole, 1e-6)


def test_wrong_specs_say_what_to_do() -> None:
    with pytest.raises(CaptureError, match="did you mean LlamaForCausalLM"):
        capture_hf(HFSpec("LlamaForCausalML", TINY))
    with pytest.raises(CaptureError, match="did you mean 'tp_size'"):
        HFSpec.from_mapping({"architecture": "LlamaForCausalLM", "tpsize": 2})
    with pytest.raises(CaptureError, match="class name of a model"):
        HFSpec.from_mapping({"config": {}})
    with pytest.raises(CaptureError, match="positive integer for 'seq'"):
        HFSpec.from_mapping({"architecture": "LlamaForCausalLM"}, {"seq": 0})
