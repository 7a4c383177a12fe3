"""Where findings point in models that a library wraps for tensor parallelism."""

from __future__ import annotations

from emerge.capture.hf import HFSpec, capture_hf

CONFIG = {
    "vocab_size": 48, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4,
    "num_key_value_heads": 2,
}  # fmt: skip


def test_sources_lie_in_the_model_and_stacks_keep_the_wrappers() -> None:
    graph = capture_hf(HFSpec("LlamaForCausalLM", CONFIG, batch=2, seq=4, tp_size=2), ranks=[0])[0]
    sources = {n.source.rpartition(":")[0] for n in graph.nodes if n.source}
    assert "transformers/models/llama/modeling_llama.py" in sources
    assert not any(s.startswith("transformers/distributed/") for s in sources)
    assert "transformers/distributed/" in str(graph.stacks)
    reduced = next(n for n in graph.nodes if n.op.startswith("_c10d_functional.all_reduce") and n.module)
    assert reduced.source is not None
    assert "modeling_llama.py" in reduced.source
