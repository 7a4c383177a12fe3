"""Cost by depth: a Transformers model against its own tensor parallelism (or captured pairs) with 2 to 32 layers.

    python benchmarks/depth.py [--layers 2,8,32]
    python benchmarks/depth.py CASE_DIR...          captured pairs

Prints seconds without capture, and how many segments were derived.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from emerge.campaign.config import PairSpec  # noqa: E402
from emerge.campaign.run import RunOptions, run_pair  # noqa: E402
from emerge.capture.source import parse_spec  # noqa: E402

CONFIG = {
    "vocab_size": 96, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2,
}  # fmt: skip
INPUTS = {"batch": 1, "seq": 24}


def live(layers: int) -> PairSpec:
    """A small Llama of so many layers against TP=2."""
    model = {"architecture": "LlamaForCausalLM", "config": CONFIG | {"num_hidden_layers": layers}}
    reference = parse_spec({"hf": model, "inputs": INPUTS})
    implementation = parse_spec({"hf": model | {"tp_size": 2}, "inputs": INPUTS})
    return PairSpec(f"llama-{layers}", reference=reference, implementation=implementation, relations="auto")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", type=Path)
    parser.add_argument("--layers", default="2,8,32")
    parser.add_argument("--engine", default="embedded")
    options = parser.parse_args()
    pairs = [PairSpec(f"{p.parent.name}/{p.name}", case=p) for p in options.cases]
    pairs = pairs or [live(int(n)) for n in options.layers.split(",")]
    with tempfile.TemporaryDirectory() as folder:
        os.environ.setdefault("EMERGE_CACHE", folder)
        print("| pair | verdict | nodes | segments (reused) | s without capture |\n|---|---|---:|---:|---:|")
        for pair in pairs:
            started = time.perf_counter()
            found = run_pair(pair, RunOptions(engine=options.engine, debug=True))
            seconds = time.perf_counter() - started - found.seconds.get("capture", 0.0)
            stats = found.stats
            print(
                f"| {pair.id} | {found.verdict} | {stats['reference_nodes']} + {stats['implementation_nodes']} | "
                f"{stats.get('segments', 0)} ({stats.get('segments_reused', 0)}) | {seconds:.1f} |", flush=True
            )  # fmt: skip


if __name__ == "__main__":
    main()
