"""Transformers models after cached tokens and on sequences of different lengths: what is captured gives the logits of
the plain forward pass."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers", reason="the models are built by Transformers")

from emerge.campaign.config import PairSpec  # noqa: E402
from emerge.campaign.run import RunOptions, run_pair  # noqa: E402
from emerge.capture.base import CaptureError  # noqa: E402
from emerge.capture.hf import HFSpec, make_model  # noqa: E402
from emerge.capture.source import load_spec  # noqa: E402
from emerge.execute.lockstep import run_sequential  # noqa: E402
from emerge.graph.model import Graph  # noqa: E402

BASE = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", BASE),
    "gpt2": ("GPT2LMHeadModel", {"vocab_size": 96, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64,
                                 "bos_token_id": 1, "eos_token_id": 2}),
    "gemma2": ("Gemma2ForCausalLM", {**BASE, "head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 5,
                                     "pad_token_id": 0}),
}  # fmt: skip


ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}


def captured(model: str, inputs: dict[str, Any], attention: str = "eager", **config: Any) -> Graph:
    name, base = MODELS[model]
    hf = {"architecture": name, "config": {**base, **config}, "attention": attention}
    return load_spec({"hf": hf, "inputs": inputs}, cache=False)[0]


def run(graph: Graph, given: dict[str, Any]) -> dict[str, Any]:
    """Output label -> value; inputs by label, weights as captured."""
    weights = {i.name: torch.from_numpy(i.values) for i in graph.inputs if i.values is not None}
    values = run_sequential(graph, weights | {i.name: given[i.label or ""] for i in graph.inputs if i.values is None})
    return {label: values[name or ""] for label, name in zip(graph.extra["output_labels"], graph.outputs)}


def ids(*shape: int) -> Any:
    return torch.randint(3, 96, shape, generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("model", list(MODELS))
def test_steps_after_a_past_give_the_logits_of_the_whole_sequence(model: str) -> None:
    tokens = ids(2, 9)
    whole = run(captured(model, {"batch": 2, "seq": 9}), {"input_ids": tokens})["logits"]
    past = _first_cache(model, tokens[:, :1])
    for n in range(1, 9):
        step = captured(model, {"batch": 2, "seq": 1, "past": n})
        found = run(step, {"input_ids": tokens[:, n : n + 1], **past})
        assert torch.allclose(found.pop("logits")[:, 0], whole[:, n], atol=1e-4), n
        past = {label.replace("present", "past"): value for label, value in found.items()}
    assert set(past) == {f"past.{n}.{k}" for n in (0, 1) for k in ("key", "value")}


def _first_cache(model: str, tokens: Any) -> dict[str, Any]:
    """What Transformers itself caches of the first tokens, with the weights of the captures."""
    name, base = MODELS[model]
    torch.manual_seed(0)
    built = make_model(HFSpec(name, dict(base), attention="eager"), "float32").eval()
    with torch.no_grad():
        cache = built(input_ids=tokens, use_cache=True).past_key_values
    return {
        f"past.{n}.{k}": t for n, layer in enumerate(cache.layers) for k, t in (("key", layer.keys), ("value", layer.values))
    }


def test_sequences_are_run_one_by_one() -> None:
    graph = captured("llama", {"seqs": [3, 5]})
    tokens = {"input_ids.0": ids(1, 3), "input_ids.1": ids(1, 5)}
    found = run(graph, tokens)
    for i, n in enumerate((3, 5)):
        alone = run(captured("llama", {"batch": 1, "seq": n}), {"input_ids": tokens[f"input_ids.{i}"]})
        assert torch.allclose(found[f"logits.{i}"], alone["logits"], atol=1e-5)
    both = captured("llama", {"seqs": [1, 2], "past": [4, 3]})
    shapes = {i.label: i.shape for i in both.inputs if (i.label or "").startswith("past.")}
    assert shapes["past.0.1.key"] == (1, 2, 4, 8)
    assert shapes["past.1.0.value"] == (1, 2, 3, 8)


def test_a_window_keeps_what_the_next_query_sees() -> None:
    shapes = {i.label: i.shape for i in captured("gemma2", {"batch": 1, "seq": 1, "past": 9}).inputs}
    assert shapes["past.0.key"] == (1, 2, 4, 8)
    assert shapes["past.1.key"] == (1, 2, 9, 8)


@pytest.mark.parametrize(("changed", "verdict"), [({}, "EQUIVALENT"), (ROPE, "NOT_EQUIVALENT")])
def test_a_decode_step_eager_against_sdpa(changed: dict[str, Any], verdict: str) -> None:
    one_layer = {"num_hidden_layers": 1}
    ref = captured("llama", {"batch": 1, "seq": 1, "past": 6}, **one_layer)
    other = captured("llama", {"batch": 1, "seq": 1, "past": 6}, "sdpa", **one_layer, **changed)
    pair = PairSpec("step", reference=[ref], implementation=[other], relations="auto")
    assert run_pair(pair, RunOptions()).verdict == verdict


@pytest.mark.parametrize(
    ("inputs", "words"),
    [
        ({"batch": 2, "seq": 1, "past": [3, 4]}, "use 'seqs' instead of 'batch'"),
        ({"batch": 1, "seqs": [3]}, "drop one"),
        ({"seqs": [3, 0]}, "expected a list of positive lengths"),
        ({"seqs": [3, 4], "past": [5]}, "a list of 2, one per sequence"),
        ({"seqs": [3, 4], "past": [5, 0]}, "capture sequences without a past apart"),
        ({"batch": 1, "seq": 1, "past": -1}, "expected a number of cached tokens"),
    ],
)
def test_inputs_that_fit_nothing_are_refused(inputs: dict[str, Any], words: str) -> None:
    with pytest.raises(CaptureError, match=words):
        captured("llama", inputs)


def test_a_state_that_is_no_cache_of_keys_is_refused() -> None:
    hf = {"architecture": "MambaForCausalLM", "config": {"vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 1}}
    with pytest.raises(CaptureError):
        load_spec({"hf": hf, "inputs": {"batch": 1, "seq": 1, "past": 3}}, cache=False)
