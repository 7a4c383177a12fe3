"""Cost of a derivation by ranks on a live model: ``python benchmarks/ranks.py [--tp 2 64] [--layers 2] [--repeat 5]``.

A Llama with 64 heads against Transformers' own tensor parallelism, captured here. Prints the best of several runs of
lowering and derivation, and the ratio to the first number of ranks.
"""

from __future__ import annotations

import argparse

from emerge.campaign.build import prepare
from emerge.campaign.config import PairSpec
from emerge.capture.source import SourceSpec
from emerge.relate.derive import derive


def source(tp: int, layers: int) -> SourceSpec:
    """The model, alone (tp = 1) or under tensor parallelism."""
    config = {
        "vocab_size": 256, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": layers,
        "num_attention_heads": 64, "num_key_value_heads": 64,
    }  # fmt: skip
    hf = {"architecture": "LlamaForCausalLM", "config": config, **({"tp_size": tp} if tp > 1 else {})}
    return SourceSpec("hf", hf, inputs={"batch": 2, "seq": 6}, fake=False)


def main() -> None:
    """Measures every number of ranks given."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tp", nargs="+", type=int, default=[2, 64])
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--engine", default="embedded")
    options = parser.parse_args()
    first = 0.0
    print(" tp   lower  datalog     sum   ratio  proved")
    for tp in options.tp:
        pair = PairSpec(
            f"tp{tp}", reference=source(1, options.layers), implementation=source(tp, options.layers), relations="auto"
        )
        prepared = prepare(pair)
        best, proved = {"lower": float("inf"), "datalog": float("inf")}, ""
        for _ in range(options.repeat):
            derivation = derive(prepared.problem, engine=options.engine)
            best = {k: min(v, derivation.seconds[k]) for k, v in best.items()}
            proved = f"{len(derivation.proved())} of {len(derivation.claims)}"
        total = sum(best.values())
        first = first or total
        print(
            f"{tp:3} {best['lower']:7.2f} {best['datalog']:8.2f} {total:7.2f} {total / first:7.2f}  {proved}",
            flush=True,
        )


if __name__ == "__main__":
    main()
