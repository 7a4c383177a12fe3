"""Transformers against vLLM, one config flag at a time.

    export EMERGE_FLAGS=DIR EMERGE_VLLM_PYTHON=PYTHON
    vllm_flags.py execute [NAME...]   executes pairs without Emerge (in the vLLM environment); results into DIR
    vllm_flags.py capture [NAME...]   captures pairs that both libraries accept (in the vLLM environment)
    vllm_flags.py decide [NAME...]    decides every captured pair that has no verdict yet (--again: all given)
    vllm_flags.py table               the figures and what is not decided right, in Markdown

``vllm_flags.yaml`` holds the configs. NAME is an architecture or a variant (``LlamaForCausalLM/eps``). What is right
was found by executing both models: a pair differs where the logits differ by more than 5e-5 of their size.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
TOKENS = 24
#: Relative to the largest logit.
SAME, OTHER = 5e-5, 2e-4


def variants(file: Path = HERE / "vllm_flags.yaml") -> dict[str, dict[str, Any]]:
    """``ARCHITECTURE/FLAG`` -> what the worker needs."""
    import yaml

    data = yaml.safe_load(file.read_text(encoding="utf-8"))
    found: dict[str, dict[str, Any]] = {}
    for architecture, entry in data["architectures"].items():
        base = data["defaults"] | entry.get("base", {})
        changes: dict[str, dict[str, Any]] = {"base": {}}
        for group in entry.get("use", []):
            changes |= data["groups"][group]
        changes |= entry.get("variants", {})
        for flag, change in changes.items():
            # A null of the base takes one of the defaults away; any other null is a value.
            config = {k: v for k, v in base.items() if v is not None or k not in data["defaults"]} | change
            name = f"{architecture}/{flag}"
            found[name] = {
                "id": name, "architecture": architecture, "config": config, "tokens": TOKENS, "max_model_len": 64,
                "change": change,
            } | {k: entry[k] for k in ("vllm_architecture", "vllm_config") if k in entry}  # fmt: skip
    return found


def chosen(names: list[str]) -> dict[str, dict[str, Any]]:
    """The variants that a name on the command line stands for."""
    known = variants()
    return {
        k: v for k, v in known.items() if not names or any(k == n or k.startswith(n.rstrip("/") + "/") for n in names)
    }


def work(what: str, pairs: dict[str, dict[str, Any]], root: Path, again: bool) -> None:
    """Runs the worker, one process for all pairs: ``execute`` or ``capture``."""
    python = os.environ.get("EMERGE_VLLM_PYTHON") or sys.exit("EMERGE_VLLM_PYTHON is not set: name its interpreter")
    done = {"execute": "truth.json", "capture": "capture.json"}[what]
    todo = [p | {"out": str(root / n)} for n, p in pairs.items() if again or not (root / n / done).exists()]
    if what == "capture":
        todo = [p for p in todo if row(p["id"], root)["truth"] not in ("refused", "?")]
    with tempfile.TemporaryDirectory() as folder:
        request = Path(folder) / "request.json"
        request.write_text(json.dumps(todo), encoding="utf-8")
        env = os.environ | {"PYTHONPATH": str(HERE.parent)}
        subprocess.run([python, str(HERE / "vllm_flags_worker.py"), what, str(request)], env=env, check=True)


def decide(pairs: dict[str, dict[str, Any]], root: Path, again: bool, seconds: float) -> None:
    """The verdict of every captured pair in ``verdict.json``; each in a fork, so that nothing is kept between them."""
    from emerge.campaign import run  # noqa: F401  (imported once, before the forks)

    for name in pairs:
        folder = root / name
        if not (folder / "rank0.json").exists() or ((folder / "verdict.json").exists() and not again):
            continue
        process = os.fork()
        if process == 0:
            import signal

            signal.alarm(int(4 * seconds))
            try:
                found = verdict_of(name, folder, seconds)
            except BaseException as error:
                found = {"verdict": "ERROR", "reason": f"{type(error).__name__}: {error}"}
            (folder / "verdict.json").write_text(json.dumps(found, indent=1), encoding="utf-8")
            os._exit(0)
        _, status = os.waitpid(process, 0)
        if status:
            (folder / "verdict.json").write_text(json.dumps({"verdict": "ERROR", "reason": f"status {status}"}))
        line = row(name, root)
        print(f"{line['grade']:8} {name}: {line['verdict']} ({line['truth']}) {line['where']}", flush=True)


def verdict_of(name: str, folder: Path, seconds: float) -> dict[str, Any]:
    """Emerge's verdict on one captured pair."""
    from emerge.campaign.config import PairSpec, RelationSpec
    from emerge.campaign.run import RunOptions, run_pair
    from emerge.graph.json_io import read_graph, read_values

    graphs = [
        [read_values(read_graph(f), f.with_name(f.name + ".npz")) for f in sorted(folder.glob(pattern))]
        for pattern in ("seq.json", "rank*.json")
    ]
    started = time.process_time()
    outputs = None
    if len(graphs[0][0].outputs) > len(
        graphs[1][0].outputs
    ):  # Transformers keeps a rotary table: only the logits are claimed
        outputs = [RelationSpec(0, graphs[1][0].outputs[0], "b s v ~ (b s) v")]
    pair = PairSpec(
        name, reference=graphs[0], implementation=graphs[1], relations="auto", outputs=outputs, seconds=seconds
    )
    result = run_pair(pair, RunOptions(engine="embedded"))
    return {
        "verdict": "ERROR" if result.error else result.verdict,
        "reason": result.error.message if result.error else result.reason,
        "seconds": time.process_time() - started,
        "findings": [
            {
                "kind": f.kind, "severity": f.severity, "message": f.message, "reference": list(f.reference_nodes),
                "reference_source": f.reference_source, "implementation": str(f.implementation_nodes),
                "implementation_source": str(f.implementation_source),
            }
            for f in result.findings
        ],
    }  # fmt: skip


def row(name: str, root: Path) -> dict[str, Any]:
    """What is known of one variant, and how it was decided: right, wrong, UNKNOWN, or why it does not count."""
    truth, capture, verdict = (_read(root / name / f) for f in ("truth.json", "capture.json", "verdict.json"))
    out: dict[str, Any] = {
        "name": name,
        "truth": "?",
        "verdict": verdict.get("verdict", ""),
        "where": "",
        "difference": None,
    }
    findings = [f for f in verdict.get("findings", []) if f["severity"] == "error"]
    if findings:
        first = findings[0]
        out["where"] = f"{first['kind']} {' '.join(first['reference'][:1])} {first['reference_source'] or ''}".strip()
    if truth.get("error"):
        out["truth"], out["reason"] = "refused", truth["error"]
    elif truth:
        out["difference"], size = truth["difference"], truth["difference"] / max(truth["scale"], 1e-30)
        out["truth"] = "same" if size <= SAME else "differs" if size >= OTHER or not truth["finite"] else "unclear"
    expected = {"same": "EQUIVALENT", "differs": "NOT_EQUIVALENT"}.get(out["truth"])
    rounded = any(f["kind"] == "PRECISION" for f in verdict.get("findings", []))
    if capture.get("error") and out["truth"] != "refused":
        out["grade"], out["reason"] = "NO GRAPH", capture["error"]
    elif out["truth"] == "refused":
        out["grade"] = "refused"
    elif not verdict:
        out["grade"] = "open"
    elif out["verdict"] in ("UNKNOWN", "ERROR"):
        out["grade"], out["reason"] = out["verdict"], verdict.get("reason", "")
    elif expected == "NOT_EQUIVALENT" and out["verdict"] == "EQUIVALENT" and rounded:
        out["grade"] = "rounding"  # outside the contract, and said in a finding
    elif expected is None:
        out["grade"] = "no truth"
    else:
        out["grade"] = "right" if out["verdict"] == expected else "WRONG"
    return out


def _read(file: Path) -> dict[str, Any]:
    return json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}


def table(pairs: dict[str, dict[str, Any]], root: Path) -> None:
    """Figures per architecture, then every pair that is not decided right, then every discrepancy."""
    rows = [row(n, root) for n in pairs]
    grades = ("right", "WRONG", "rounding", "UNKNOWN", "ERROR", "NO GRAPH", "no truth", "refused", "open")
    print(f"| architecture | pairs | {' | '.join(grades)} |\n|---|{'---:|' * (len(grades) + 1)}")
    for architecture in dict.fromkeys(r["name"].split("/")[0] for r in rows):
        of = Counter(r["grade"] for r in rows if r["name"].split("/")[0] == architecture)
        print(f"| {architecture} | {of.total()} | {' | '.join(str(of[g] or '') for g in grades)} |")
    total = Counter(r["grade"] for r in rows)
    print(f"| all | {total.total()} | {' | '.join(str(total[g]) for g in grades)} |\n")
    for r in rows:
        if r["grade"] not in ("right", "open"):
            size = "" if r["difference"] is None else f", difference {r['difference']:.2g}"
            print(
                f"* {r['grade']}: {r['name']} ({r['truth']}{size}): {' '.join(str(r.get('reason', '')).split())[:300]}"
            )
    print()
    for r in rows:
        if r["truth"] == "differs":
            print(
                f"| {r['name']} | {pairs[r['name']]['change']} | {r['difference']:.2g} | {r['verdict']} {r['where']} |"
            )


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("execute", "capture", "decide", "table"))
    parser.add_argument("names", nargs="*")
    parser.add_argument("--again", action="store_true")
    parser.add_argument("--seconds", type=float, default=150.0)
    options = parser.parse_intermixed_args()
    root = Path(os.environ.get("EMERGE_FLAGS") or sys.exit("EMERGE_FLAGS is not set: name a folder for the pairs"))
    pairs = chosen(options.names)
    if options.what in ("execute", "capture"):
        work(options.what, pairs, root, options.again)
    elif options.what == "decide":
        decide(pairs, root, options.again, options.seconds)
    else:
        table(pairs, root)


if __name__ == "__main__":
    main()
