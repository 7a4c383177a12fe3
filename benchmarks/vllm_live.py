"""Transformers against vLLM, live: ``EMERGE_VLLM_PYTHON=.. python benchmarks/vllm_live.py [CASE...] [--tp 2] [--keep FILE]``.

Writes a campaign file with a pair per case (both sides captured: Transformers here, vLLM in its own environment;
``relations: auto``) and runs ``emerge verify`` on it. Prints a table in Markdown: case, expected, got, nodes, seconds.
Which pairs are right was found by executing both models.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from emerge.cli.main import run_main

_BASE = {
    "vocab_size": 96, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip
_ROPE_LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}  # fmt: skip
_GPT2 = {"vocab_size": 96, "n_embd": 64, "n_layer": 2, "n_head": 2, "n_positions": 64}
_OPT = {
    "vocab_size": 96, "hidden_size": 64, "ffn_dim": 96, "num_hidden_layers": 2, "num_attention_heads": 2,
    "max_position_embeddings": 64, "word_embed_proj_dim": 64,
}  # fmt: skip
_GRANITE = {
    "embedding_multiplier": 3.0, "logits_scaling": 2.5, "residual_multiplier": 0.3, "attention_multiplier": 0.11,
}  # fmt: skip
_GEMMA2 = {
    "head_dim": 16, "query_pre_attn_scalar": 24, "sliding_window": 8, "attn_logit_softcapping": 5.0,
    "final_logit_softcapping": 3.0,
}  # fmt: skip
_MIXTRAL = {**_BASE, "num_local_experts": 4, "num_experts_per_tok": 2}

#: Case -> (class, config, whether the pair is right, further keys of ``vllm``).
CASES: dict[str, tuple[str, dict[str, Any], bool, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", _BASE, True, {}),
    "llama-attn_bias": ("LlamaForCausalLM", {**_BASE, "attention_bias": True}, True, {}),
    "llama-tie": ("LlamaForCausalLM", {**_BASE, "tie_word_embeddings": True}, True, {}),
    "llama-head_dim": ("LlamaForCausalLM", {**_BASE, "head_dim": 32}, True, {}),
    "llama-rope_llama3": ("LlamaForCausalLM", {**_BASE, "rope_parameters": _ROPE_LLAMA3}, True, {}),
    "mistral-sliding": ("MistralForCausalLM", {**_BASE, "sliding_window": 8}, True, {}),
    "qwen2": ("Qwen2ForCausalLM", _BASE, True, {}),
    "qwen3": ("Qwen3ForCausalLM", {**_BASE, "head_dim": 16}, True, {}),
    "gemma": ("GemmaForCausalLM", {**_BASE, "head_dim": 16}, True, {}),
    "gemma2": ("Gemma2ForCausalLM", {**_BASE, **_GEMMA2}, True, {}),
    "phi3": ("Phi3ForCausalLM", {**_BASE, "pad_token_id": 0}, True, {}),
    "glm4": ("Glm4ForCausalLM", {**_BASE, "head_dim": 16, "pad_token_id": 0}, True, {}),
    "gpt2": ("GPT2LMHeadModel", _GPT2, True, {}),
    "opt": ("OPTForCausalLM", _OPT, True, {}),
    "granite": ("GraniteForCausalLM", {**_BASE, **_GRANITE}, True, {}),
    "cohere": ("CohereForCausalLM", {**_BASE, "logit_scale": 0.3}, True, {}),
    "olmo2": ("Olmo2ForCausalLM", _BASE, True, {}),
    "mixtral": ("MixtralForCausalLM", {**_MIXTRAL, "sliding_window": None}, True, {}),
    "mixtral-ep": ("MixtralForCausalLM", {**_MIXTRAL, "sliding_window": None}, True, {"enable_expert_parallel": True}),
    "qwen3-attn_bias": ("Qwen3ForCausalLM", {**_BASE, "head_dim": 32, "attention_bias": True}, False, {}),
    "gpt2-noscale": ("GPT2LMHeadModel", {**_GPT2, "scale_attn_weights": False}, False, {}),
    "llama-partial_rotary": (
        "LlamaForCausalLM",
        {**_BASE, "rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5}},
        False,
        {},
    ),
}


def pair(case: str, tp: int, tokens: int, python: str) -> dict[str, Any]:
    """The pair of a case as an entry of a campaign file."""
    architecture, config, right, further = CASES[case]
    return {
        "id": case,
        "reference": {
            "hf": {"architecture": architecture, "attention": "eager", "config": config},
            "inputs": {"batch": 1, "seq": tokens},
        },
        "implementation": {
            "vllm": {"architecture": architecture, "tp_size": tp, **further, "config": config},
            "inputs": {"tokens": tokens},
            "python_env": python,
        },
        "relations": "auto",
        "expect": "equivalent" if right else "not_equivalent",
    }


def main() -> None:
    """Decides every case given, or all of them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cases", nargs="*", default=list(CASES), help=", ".join(CASES))
    parser.add_argument("--tp", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--keep", type=Path, help="folder for the campaign file and the report")
    options = parser.parse_args()
    python = os.environ.get("EMERGE_VLLM_PYTHON")
    if not python:
        sys.exit("EMERGE_VLLM_PYTHON is not set: name the python of an environment with vLLM")
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.keep or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        campaign = folder / "vllm-live.yaml"
        pairs = [pair(case, options.tp, options.tokens, os.path.abspath(python)) for case in options.cases]
        mesh = {"mesh": {"tp": options.tp}} if options.tp > 1 else {}
        document = {"campaign": "vllm-live", "engine": "embedded", **mesh, "pairs": pairs}
        campaign.write_text(json.dumps(document, indent=1), encoding="utf-8")  # JSON is YAML
        run_main(["verify", str(campaign), "--out", str(folder)])
        report = json.loads((folder / "report.json").read_text(encoding="utf-8"))
    print("| case | expected | got | nodes, reference + ranks | capture s | all s | first place |")
    print("|---|---|---|---:|---:|---:|---|")
    good = 0
    for found in report["pairs"]:
        expected = "EQUIVALENT" if CASES[found["id"]][2] else "NOT_EQUIVALENT"
        good += found["verdict"] == expected
        got = found["verdict"] if found["verdict"] == expected else f"**{found['verdict'] or 'ERROR'}**"
        stats, seconds = found["stats"], found["seconds"]
        nodes = f"{stats.get('reference_nodes', '?')} + {stats.get('implementation_nodes', '?')}"
        first = next((f for f in found["findings"] if f["severity"] == "error"), None)
        where = f"{first['kind']} {first.get('reference_source') or ''}" if first else ""
        print(
            f"| {found['id']} | {expected} | {got} | {nodes} | {seconds.get('capture', 0):.1f} | "
            f"{seconds.get('total', 0):.1f} | {where} |"
        )
    print(f"\n{good} of {len(report['pairs'])} as expected")


if __name__ == "__main__":
    main()
