"""Cost of a derivation, phase by phase: ``python benchmarks/cost.py CASE_DIR... [--engine embedded|souffle] [--repeat N]``.

Prints the median of each phase in seconds: reading, zipping, lowering, Datalog.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path

from emerge.campaign.build import prepare
from emerge.campaign.config import PairSpec
from emerge.relate.derive import derive


def main() -> None:
    """Measures every case given."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cases", nargs="+", type=Path)
    parser.add_argument("--engine", default="embedded")
    parser.add_argument("--repeat", type=int, default=3)
    options = parser.parse_args()
    print(f"{'case':28} {'nodes':>7} {'facts':>8} {'read':>7} {'zip':>7} {'lower':>7} {'datalog':>8}  proved")
    for case in options.cases:
        runs = []
        for _ in range(options.repeat):
            prepared = prepare(PairSpec(case.name, case=case))
            derivation = derive(prepared.problem, engine=options.engine)
            runs.append(prepared.seconds | derivation.seconds)
        median = {k: statistics.median(r[k] for r in runs) for k in runs[0]}
        nodes = prepared.stats["reference_nodes"] + prepared.stats["implementation_nodes"]
        facts = sum(map(len, derivation.base.facts.values()))
        proved = f"{len(derivation.proved())} of {len(derivation.claims)}"
        print(
            f"{case.name:28} {nodes:7} {facts:8} {median['capture']:7.2f} {median['zip']:7.2f} {median['lower']:7.2f} "
            f"{median['datalog']:8.2f}  {proved}"
        )


if __name__ == "__main__":
    main()
