"""Writes the graph files of ``configs/graph-files.yaml``: a one-layer Llama, alone and under Transformers' own TP=2.

The third side is the second one with a fault: the all-reduce after the attention's output projection is gone.
Run from the root of a source tree: ``python docs/examples/make_graph_files.py``.
"""

from __future__ import annotations

import copy
from pathlib import Path

from emerge.capture.hf import HFSpec, capture_hf
from emerge.capture.relations import placement_relations
from emerge.graph.json_io import write_graph
from emerge.graph.model import Arg, Graph, Ref
from emerge.graph.relations import Relations
from emerge.graph.relations_io import write_relations

CONFIG = {
    "vocab_size": 96, "hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 1,
    "num_attention_heads": 8, "num_key_value_heads": 4,
}  # fmt: skip


def without(graph: Graph, name: str) -> Graph:
    """A copy in which everything that read ``name`` reads its operand instead."""
    out = copy.deepcopy(graph)
    node = next(n for n in out.nodes if n.name == name)
    source = node.args[0]

    def replaced(arg: Arg) -> Arg:
        if isinstance(arg, list):
            return [replaced(a) for a in arg]
        return source if isinstance(arg, Ref) and arg.name == name else arg

    out.nodes = [n for n in out.nodes if n.name != name]
    for n in out.nodes:
        n.args = [replaced(a) for a in n.args]
        n.kwargs = {k: replaced(v) for k, v in n.kwargs.items()}
    return out


def main() -> None:
    """Writes ``right/`` and ``wrong/`` case directories."""
    spec = {"architecture": "LlamaForCausalLM", "config": CONFIG, "batch": 2, "seq": 6}
    reference = capture_hf(HFSpec(**spec))[0]
    ranks = capture_hf(HFSpec(**spec, tp_size=2))
    found = placement_relations(reference, ranks)
    reduces = [n.name for n in ranks[0].nodes if n.op.startswith("_c10d_functional.all_reduce")]
    attention = next(n for n in reduces if "self_attn" in (next(m for m in ranks[0].nodes if m.name == n).module or ""))
    for name, graphs in (("right", ranks), ("wrong", [without(g, attention) for g in ranks])):
        folder = Path("configs/graph-files") / name
        folder.mkdir(parents=True, exist_ok=True)
        write_graph(reference, folder / "seq.json")
        for g in graphs:
            write_graph(g, folder / f"rank{g.rank}.json")
        relations = Relations(
            f"graph-files-{name}", len(graphs), found.inputs, "refines" if name == "right" else "bug",
            expected_outputs=found.outputs, claimed_outputs=[e.seq for e in found.outputs],
        )  # fmt: skip
        write_relations(relations, folder / "relations.json")


if __name__ == "__main__":
    main()
