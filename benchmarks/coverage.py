"""What proved laws cover of captured pairs: ``EMERGE_ZOO=DIR python benchmarks/coverage.py [CASE...] [--kind tp1]``.

``EMERGE_ZOO`` is laid out as for ``benchmarks/zoo.py``. Prints a table in Markdown of the EQUIVALENT pairs: reference nodes,
how many of them proved laws cover, what the others rest on (definitions of kernels, laws about indices, other laws); then
by which laws, rules and definitions, over all pairs.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from benchmarks.captured import chosen  # noqa: E402
from emerge.campaign.config import PairSpec  # noqa: E402
from emerge.campaign.run import RunOptions, run_pair  # noqa: E402
from emerge.verdict.types import EQUIVALENT, KINDS_OF_REST, PairResult  # noqa: E402


def row(name: str, result: PairResult) -> str:
    """The row of one EQUIVALENT pair."""
    total = sum(result.coverage.values())
    proved = result.coverage["proved"]
    rest = " | ".join(str(result.coverage_rest[kind]) for kind in KINDS_OF_REST)
    return f"| {name} | {total} | {proved} | {100 * proved // total}% | {rest} |"


def main() -> None:
    """Decides every case given, or all of them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engine", default="embedded")
    options, folders = chosen(parser, "tp1")
    by: Counter[str] = Counter()
    pairs: Counter[str] = Counter()
    shares: list[float] = []
    print("| case | nodes | proved | share | kernels | indices | other |\n|---|---:|---:|---:|---:|---:|---:|")
    for folder in folders:
        name = folder.parent.name
        result = run_pair(PairSpec(name, case=folder), RunOptions(engine=options.engine))
        if result.verdict != EQUIVALENT:
            continue
        print(row(name, result), flush=True)
        by.update(result.coverage_by)
        pairs.update(list(result.coverage_by))
        shares.append(result.coverage["proved"] / sum(result.coverage.values()))
    enough = sum(s >= 0.8 for s in shares)
    print(f"\n{len(shares)} pairs EQUIVALENT, {enough} of them with 80% or more of the nodes proved\n")
    print("| not proved, rest on | nodes | pairs |\n|---|---:|---:|")
    for name, count in by.most_common():
        print(f"| {name} | {count} | {pairs[name]} |")


if __name__ == "__main__":
    main()
