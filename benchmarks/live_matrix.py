"""Live models against their own tensor parallelism: ``python benchmarks/live_matrix.py [MODEL...] [--tp 2 4 8] [--full]``.

Captures each model of Transformers alone and under Transformers' own plan, relates them with ``relations: auto`` and
prints verdict, sizes and seconds. Without ``--full`` the models are tiny (two layers, random weights); with it they
have their published sizes and fake tensors, with ``--layers N`` fewer layers.
"""

from __future__ import annotations

import argparse
from typing import Any

from emerge.campaign.config import PairSpec
from emerge.campaign.run import RunOptions, run_pair
from emerge.capture.source import SourceSpec

_ROPE = {
    "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip
_SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
          "num_key_value_heads")  # fmt: skip

#: Class, sizes as published, sizes when tiny, what both have in common.
MODELS: dict[str, tuple[str, tuple[int, ...], tuple[int, ...], dict[str, Any], dict[str, Any]]] = {
    "llama-3.1-8b": (
        "LlamaForCausalLM", (128256, 4096, 14336, 32, 32, 8), (96, 64, 192, 2, 16, 8),
        {"rope_parameters": _ROPE, "max_position_embeddings": 131072}, {},
    ),
    "qwen3-8b": (
        "Qwen3ForCausalLM", (151936, 4096, 12288, 36, 32, 8), (96, 64, 192, 2, 16, 8),
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0}}, {"head_dim": 128},
    ),
    "mixtral-8x7b": (
        "MixtralForCausalLM", (32000, 4096, 14336, 32, 32, 8), (96, 64, 192, 2, 16, 8),
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0}, "num_local_experts": 8,
         "num_experts_per_tok": 2}, {},
    ),
}  # fmt: skip


def source(model: str, *, tp: int = 1, full: bool = False, layers: int | None = None, batch: int = 2,
           seq: int = 6) -> SourceSpec:  # fmt: skip
    """A model of the table, alone (tp = 1) or under Transformers' tensor parallelism."""
    architecture, published, tiny, common, only_full = MODELS[model]
    config = {**common, **dict(zip(_SIZES, published if full else tiny)), **(only_full if full else {})}
    if not full and model == "qwen3-8b":
        config["head_dim"] = 8
    if layers is not None:
        config["num_hidden_layers"] = layers
    hf: dict[str, Any] = {"architecture": architecture, "config": config}
    if tp > 1:
        hf["tp_size"] = tp
    return SourceSpec("hf", hf, inputs={"batch": batch, "seq": seq}, fake=full)


def main() -> None:
    """Measures every model given, at every size given."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", default=list(MODELS), help=", ".join(MODELS))
    parser.add_argument("--tp", nargs="+", type=int, default=[2, 4, 8])
    parser.add_argument("--full", action="store_true")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--seq", type=int)
    parser.add_argument("--engine", default="embedded")
    options = parser.parse_args()
    sizes = {"batch": 1, "seq": 2048} if options.full else {"batch": 2, "seq": 6}
    if options.seq:
        sizes["seq"] = options.seq
    print("model           tp verdict                  nodes  capture    zip  lower  datalog   total")
    for model in options.models or MODELS:
        for tp in options.tp:
            pair = PairSpec(
                f"{model}-tp{tp}",
                reference=source(model, full=options.full, layers=options.layers, **sizes),
                implementation=source(model, tp=tp, full=options.full, layers=options.layers, **sizes),
                relations="auto",
            )
            result = run_pair(pair, RunOptions(engine=options.engine))
            s = result.seconds
            nodes = f"{result.stats.get('reference_nodes')}/{result.stats.get('implementation_nodes')}"
            print(
                f"{model:14} {tp:3} {result.verdict or 'ERROR':16} {nodes:>13} {s.get('capture', 0):8.1f} "
                f"{s.get('zip', 0):6.2f} {s.get('lower', 0):6.2f} {s.get('datalog', 0):8.2f} {s['total']:7.1f}",
                flush=True,
            )
            why = result.error.message if result.error else result.reason
            if result.verdict != "EQUIVALENT":
                print(f"    {why}")
                for finding in result.findings[:6]:
                    print(f"    {finding.kind} {finding.message} [{finding.reference_source}] {finding.found or ''}")


if __name__ == "__main__":
    main()
