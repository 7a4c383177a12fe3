"""vLLM models: captured per rank by the environment that has vLLM, against Transformers' models captured here."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers", reason="the reference of a vLLM model is a Transformers model")

from capture_checks import check  # noqa: E402
from loaded_boxes import load_by_boxes  # noqa: E402

from emerge.campaign.build import prepare  # noqa: E402
from emerge.campaign.config import PairSpec  # noqa: E402
from emerge.campaign.run import RunOptions, run_pair  # noqa: E402
from emerge.capture.base import CaptureError  # noqa: E402
from emerge.capture.source import load_spec, parse_spec  # noqa: E402
from emerge.execute.lockstep import run_ranks, run_sequential  # noqa: E402
from emerge.graph.model import Graph  # noqa: E402
from emerge.util.errors import RelationError  # noqa: E402

PYTHON = os.environ.get("EMERGE_VLLM_PYTHON", "")
needs_vllm = [
    pytest.mark.vllm,
    pytest.mark.skipif(
        not os.access(PYTHON, os.X_OK), reason="set EMERGE_VLLM_PYTHON to the python of an environment with vLLM"
    ),
]
TOKENS = 12
BASE = {
    "vocab_size": 96, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip
GPT2 = {
    "vocab_size": 96, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", BASE),
    "qwen2": ("Qwen2ForCausalLM", BASE),
    "qwen3": ("Qwen3ForCausalLM", {**BASE, "head_dim": 16}),
    "mixtral": ("MixtralForCausalLM", {**BASE, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "gpt2": ("GPT2LMHeadModel", GPT2),
    "gemma2": (
        "Gemma2ForCausalLM",
        {**BASE, "head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 8, "pad_token_id": 0},
    ),
}


def reference(model: str, rows: int = 1, **config: Any) -> Graph:
    name, base = MODELS[model]
    source = {"hf": {"architecture": name, "config": {**base, **config}, "attention": "eager"}}
    return load_spec({**source, "inputs": {"batch": rows, "seq": TOKENS}}, cache=False)[0]


def captured(
    model: str, *, inputs: dict[str, Any] | None = None, config: dict[str, Any] | None = None, **vllm: Any
) -> list[Graph]:
    name, base = MODELS[model]
    spec = {"vllm": {"architecture": name, "config": {**base, **(config or {})}, **vllm}, "python_env": PYTHON}
    return load_spec({**spec, "inputs": inputs or {"tokens": TOKENS}}, cache=False)


def values(graph: Graph) -> dict[str, Any]:
    """Distinct parameters and token ids of the reference, by input name."""
    generator = torch.Generator().manual_seed(5)
    out = {}
    for item in graph.inputs:
        if item.dtype == "int64":
            out[item.name] = torch.randint(0, 90, item.shape, generator=generator)
        else:
            out[item.name] = 0.2 * torch.randn(item.shape, generator=generator, dtype=torch.float64)
    return out


def difference(ref: Graph, ranks: list[Graph]) -> float:
    """The largest difference between the reference's logits and those of any rank, in float64."""
    given = values(ref)
    want = run_sequential(ref, given)[ref.outputs[0] or ""]
    found = run_ranks(ranks, [load_by_boxes(ref, given, g) for g in ranks])
    return max(float((r[g.outputs[0] or ""].reshape(want.shape) - want).abs().max()) for g, r in zip(ranks, found))


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("model", list(MODELS))
class TestModels:
    pytestmark = needs_vllm

    def test_loaded_ranks_give_the_logits_of_transformers(self, model: str, tp: int, tmp_path: Path) -> None:
        ref, ranks = reference(model), captured(model, tp_size=tp)
        assert [g.rank for g in ranks] == list(range(tp))
        for graph in ranks:
            check(graph, tmp_path)
            assert graph.extra["weights"] == {"never_loaded": [], "not_used": [], "dropped": []}
            assert all(n.module is not None for n in graph.nodes if n.op == "aten.mm.default")
        # float64; rotary tables and the like are computed in float32 on both sides
        assert difference(ref, ranks) < 1e-5
        pair = prepare(PairSpec("pair", reference=[ref], implementation=ranks, relations="auto"))
        assert pair.ambiguities == []
        assert pair.unmatched == {"reference": [], "implementation": []}
        assert {r.origin for r in pair.input_relations} == {"placement"}
        assert [c.text for c in pair.problem.outputs] == ["1 a b ~ a b"]


class TestDetails:
    pytestmark = needs_vllm

    def test_experts_on_their_ranks(self) -> None:
        ranks = captured("mixtral", tp_size=2, enable_expert_parallel=True)
        w13 = next(i for i in ranks[1].inputs if "layers.0" in (i.label or "") and "w13_weight" in (i.label or ""))
        assert w13.extra["loaded"] == [
            {"of": "model.layers.0.mlp.experts.gate_up_proj", "at": [[2, 4], [0, 192], [0, 64]],
             "local": [[0, 2], [0, 192], [0, 64]], "axes": [0, 1, 2]}
        ]  # fmt: skip
        assert difference(reference("mixtral"), ranks) < 1e-5

    def test_packed_sequences_are_rows_of_the_reference(self) -> None:
        ref, ranks = reference("llama", rows=2), captured("llama", inputs={"seqs": [TOKENS, TOKENS]})
        assert difference(ref, ranks) < 1e-5
        starts = {str(n.args[3]) for n in ranks[0].nodes if n.op == "emerge_vllm.attention.default"}
        assert starts == {f"[0, {TOKENS}, {2 * TOKENS}]"}

    @pytest.mark.parametrize(
        ("model", "hf", "vllm", "tp"),
        [
            ("llama", {"batch": 1, "seq": 1, "past": 7}, {"tokens": 1, "past": 7}, 1),
            ("llama", {"batch": 1, "seq": 1, "past": 7}, {"tokens": 1, "past": 7}, 2),
            ("llama", {"batch": 2, "seq": 1, "past": 7}, {"seqs": [1, 1], "past": 7}, 1),
            ("gemma2", {"batch": 1, "seq": 4, "past": 12}, {"tokens": 4, "past": 12}, 1),
            ("gpt2", {"seqs": [3, 5]}, {"seqs": [3, 5]}, 1),
            ("llama", {"seqs": [1, 2], "past": [4, 3]}, {"seqs": [1, 2], "past": [4, 3]}, 2),
        ],
        ids=["decode", "decode-tp2", "decode-rows", "chunk-window", "sequences", "sequences-past-tp2"],
    )
    def test_sequences_and_pasts(self, model: str, hf: dict[str, Any], vllm: dict[str, Any], tp: int) -> None:
        name, base = MODELS[model]
        source = {"hf": {"architecture": name, "config": base, "attention": "eager"}, "inputs": hf}
        ref, ranks = load_spec(source, cache=False)[0], captured(model, inputs=vllm, tp_size=tp)
        pair = PairSpec("pair", reference=[ref], implementation=ranks, relations="auto")
        result = run_pair(pair, RunOptions())
        assert result.verdict == "EQUIVALENT", result.reason
        assert len(result.outputs) == len(ref.outputs)
        for graph in ranks:  # positions that are off by one: cached keys were turned by the right ones
            for node in graph.nodes:
                if node.op == "aten.arange.start" and node.dtype == "int64":
                    node.args[:2] = [node.args[0] + 1, node.args[1] + 1]
        assert run_pair(pair, RunOptions()).verdict == "NOT_EQUIVALENT"

    def test_other_sequences_are_refused(self) -> None:
        ref = reference("llama", rows=2)
        pair = PairSpec("pair", reference=[ref], implementation=captured("llama"), relations="auto")
        with pytest.raises(RelationError, match="capture both sides with the same sequences"):
            prepare(pair)

    @pytest.mark.parametrize("model", ["deepseek"])
    def test_latent_caches_are_refused(self, model: str) -> None:
        config = {
            **BASE, "q_lora_rank": None, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16,
            "num_key_value_heads": 4, "n_routed_experts": 4, "first_k_dense_replace": 2,
        }  # fmt: skip
        spec = {"vllm": {"architecture": "DeepseekV2ForCausalLM", "config": config}, "python_env": PYTHON}
        with pytest.raises(CaptureError, match="a past is captured where every layer caches keys and values"):
            load_spec({**spec, "inputs": {"tokens": 1, "past": 4}}, cache=False)

    def test_a_bias_that_vllm_does_not_load_is_recorded(self) -> None:
        config = {"attention_bias": True}
        ref, ranks = reference("qwen3", **config), captured("qwen3", config=config)
        lost = {d["of"] for d in ranks[0].extra["weights"]["dropped"]}
        assert lost == {f"model.layers.{i}.self_attn.o_proj.bias" for i in (0, 1)}
        assert difference(ref, ranks) > 1e-2

    def test_attributes_of_the_attention_are_arguments(self) -> None:
        nodes = [n for n in captured("gemma2")[0].nodes if n.op == "emerge_vllm.attention.default"]
        assert [n.args[4:8] for n in nodes] == [[0.25, True, 8, 50.0], [0.25, True, 0, 50.0]]

    def test_digits_are_used_where_the_dtype_is_narrow(self) -> None:
        exact, narrow = captured("llama")[0], captured("llama", dtype="bfloat16")[0]
        assert [i.extra.get("loaded") for i in exact.inputs] == [i.extra.get("loaded") for i in narrow.inputs]

    def test_custom_operators_are_kernels(self) -> None:
        ranks = captured("llama", custom_ops="all")
        kernels = [n.args[0] for n in ranks[0].nodes if n.op == "auto_functionalized"]
        assert kernels == ["_C.rotary_embedding.default"] * 2
        assert difference(reference("llama"), ranks) < 1e-5

    def test_positions_can_be_an_input(self) -> None:
        graph = captured("llama", inputs={"tokens": TOKENS, "positions": "input"})[0]
        assert [i.label for i in graph.inputs if i.dtype == "int64"] == ["input_ids", "positions"]

    def test_refusals_are_one_message(self) -> None:
        with pytest.raises(CaptureError, match="vLLM refuses the config"):
            captured("llama", tp_size=3)
        spec = {"vllm": {"architecture": "LlamaForCausalLMX", "config": BASE}, "python_env": PYTHON}
        with pytest.raises(CaptureError, match="has no model 'LlamaForCausalLMX'"):
            load_spec(spec, cache=False)


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ({"vllm": {"config": {}}}, "as 'architecture'"),
        ({"vllm": "LlamaForCausalLM"}, "expected a mapping with 'architecture'"),
        ({"vllm": {"architecture": "X", "tp_sizes": 2}}, "found 'tp_sizes'; did you mean 'tp_size'"),
        ({"vllm": {"architecture": "X", "tp_size": 0}}, "positive integer for 'tp_size'"),
        ({"vllm": {"architecture": "X", "dtype": "fp8"}}, "found 'fp8'"),
        ({"vllm": {"architecture": "X"}, "inputs": {"batch": 2}}, "found 'batch'"),
        ({"vllm": {"architecture": "X"}, "inputs": {"tokens": 2, "seqs": [2]}}, "found both"),
        ({"vllm": {"architecture": "X"}, "inputs": {"seqs": []}}, "expected a list of positive lengths"),
        ({"vllm": {"architecture": "X"}, "mode": "train"}, "mode eval only"),
        ({"vllm": {"architecture": "X"}, "fake": True}, "captured with data"),
    ],
)
def test_wrong_specs_are_refused(spec: dict[str, Any], words: str) -> None:
    with pytest.raises(CaptureError, match=words):
        load_spec(parse_spec(spec), cache=False)


def test_without_vllm_the_message_says_what_to_do() -> None:
    try:
        import vllm  # noqa: F401
    except ImportError:
        with pytest.raises(CaptureError, match="needs the package vllm; install it, or name its environment"):
            load_spec({"vllm": {"architecture": "LlamaForCausalLM"}}, cache=False)
    else:
        pytest.skip("vLLM is installed here")
