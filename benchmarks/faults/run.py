"""Fault injection over captured graphs: what does the verifier say about planted faults and harmless changes?

    python benchmarks/faults/run.py --seeds 10                     all GPT cases of the peer suite, all kinds
    python benchmarks/faults/run.py --mode derive CASE_DIR...      derivation only, nothing is executed
    python benchmarks/faults/run.py --kinds constant --seeds 3-4 CASE_DIR     one mutant again
    python benchmarks/faults/run.py --write DIR --kinds constant --seeds 3-4 CASE_DIR     the mutant as a case directory

The peer suite is looked for in EMERGE_PEER_SUITE, else in ../shared/peer_suite beside the repository. Exit status 1: a
fault was called EQUIVALENT, or a harmless change was not.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import lru_cache
from multiprocessing import get_context
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from benchmarks.faults.blame import Correspondence, hits, reference_places  # noqa: E402
from benchmarks.faults.common import Mutant  # noqa: E402
from benchmarks.faults.plant import FAULTS, KEEPS, KINDS, plant  # noqa: E402
from emerge.facts.families import mesh_from, zip_families  # noqa: E402
from emerge.facts.mesh import Mesh  # noqa: E402
from emerge.graph.json_io import write_graph  # noqa: E402
from emerge.graph.relations_io import write_relations  # noqa: E402
from emerge.graph.source import Case, load_case  # noqa: E402
from emerge.relate.derive import Derivation, Problem, derive  # noqa: E402
from emerge.relate.statement import entry_statements  # noqa: E402
from emerge.verdict.decide import decide  # noqa: E402
from emerge.verdict.types import EQUIVALENT, NOT_EQUIVALENT, UNKNOWN, PairResult  # noqa: E402

#: Outcomes in the order of the table. ``at`` and ``off``: with a finding at the blame, or only elsewhere.
EQ, NE_AT, NE_OFF, UN_AT, UN_OFF, ERROR = "EQ", "NE", "NE-off", "UN", "UN-off", "ERR"
OUTCOMES = (EQ, NE_AT, NE_OFF, UN_AT, UN_OFF, ERROR)
MODES = (
    "verdict (default): derivation and execution; files: as the command line does it, law certificates included; "
    "derive: nothing is executed"
)
LEGEND = (
    "EQ equivalent, NE not equivalent at blame, NE-off not equivalent elsewhere, "
    "UN/UN-off unknown with/without a finding at blame, ERR error"
)


@dataclasses.dataclass(frozen=True)
class Task:
    """One mutant to be judged."""

    case: str
    kind: str
    seed: int
    mode: str
    engine: str
    seconds: float | None


@dataclasses.dataclass
class Row:
    """What came out. ``first``: the first finding is at the blame; ``aside``: findings that are not.

    ``outcome`` is None where the kind does not apply.
    """

    case: str
    kind: str
    seed: int
    outcome: str | None = None
    what: str = ""
    first: bool = False
    aside: int = 0
    findings: list[str] = dataclasses.field(default_factory=list)
    expected: list[str] = dataclasses.field(default_factory=list)
    reason: str = ""
    seconds: float = 0.0


# ---- one mutant -----------------------------------------------------------------------------------------------------


@lru_cache(maxsize=4)
def loaded(path: str) -> Case:
    return load_case(path)


def problem_of(case: Case, ranks: list[Any]) -> Problem:
    """The derivation problem of a case with these rank graphs."""
    reference, implementation = zip_families([case.reference]), zip_families(ranks)
    mesh = Mesh(mesh_from(len(ranks), ranks[0].mesh or None))
    types = reference.types()

    def statements(entries: Iterable[Any]) -> list[Any]:
        return [s for e in entries for s in entry_statements(e, types[e.seq].shape, implementation, mesh)]

    claims = [*case.relations.expected_outputs, *case.relations.extra_outputs]
    return Problem(reference, implementation, mesh, statements(case.relations.usable_inputs()), statements(claims))


@lru_cache(maxsize=4)
def healthy(path: str, engine: str) -> Correspondence:
    """How the nodes of the unchanged pair correspond."""
    case = loaded(path)
    derivation = derive(problem_of(case, case.ranks), engine=engine)
    if derivation.proved() != set(derivation.claims):
        raise RuntimeError(f"{path}: the unchanged pair is not proved; nothing can be measured on it")
    return Correspondence(derivation)


def judge(case: Case, mutant: Mutant, task: Task) -> PairResult:
    """The verdict: of the derivation alone, with execution, or on the whole path of the command line from files."""
    from emerge.campaign.config import PairSpec
    from emerge.campaign.run import RunOptions, execution_refuter, run_pair

    if task.mode != "files":
        problem = problem_of(case, mutant.ranks)
        started = time.perf_counter()
        derivation: Derivation = derive(problem, engine=task.engine, timeout=task.seconds)

        def left() -> float | None:
            return None if task.seconds is None else max(task.seconds - (time.perf_counter() - started), 0.0)

        return decide(problem, derivation, execution_refuter(0, None, left) if task.mode == "verdict" else None)

    with tempfile.TemporaryDirectory(prefix="emerge-faults-") as directory:
        write_mutant(case, mutant, Path(directory))
        spec = PairSpec("mutant", case=Path(directory), engine=task.engine, seconds=task.seconds)
        return run_pair(spec, RunOptions())


def write_mutant(case: Case, mutant: Mutant, directory: Path) -> None:
    """A mutant as a case directory."""
    directory.mkdir(parents=True, exist_ok=True)
    write_graph(case.reference, directory / "seq.json")
    for rank, graph in enumerate(mutant.ranks):
        write_graph(graph, directory / f"rank{rank}.json")
    write_relations(case.relations, directory / "relations.json")


def run_task(task: Task) -> Row:
    """Plants, judges, compares with the blame."""
    started = time.perf_counter()
    row = Row(task.case, task.kind, task.seed)
    try:
        case = loaded(task.case)
        mutant = plant(case, task.kind, task.seed)
        if mutant is None:
            return row
        row.what = mutant.change.what
        result = judge(case, mutant, task)
        expected = reference_places(mutant.change, healthy(task.case, task.engine)) if task.kind in FAULTS else set()
        row.expected = sorted(expected)
        found = [f for f in result.findings if f.severity != "note"]
        row.findings = [
            f"{f.kind} {','.join(f.reference_nodes)} | {','.join(f.implementation_nodes[:1])}" for f in found
        ]
        at = [hits(f, mutant.change, expected) for f in found]
        row.first, row.aside = bool(at) and at[0], at.count(False)
        row.reason = result.error.message if result.error is not None else result.reason
        row.outcome = {
            EQUIVALENT: EQ,
            NOT_EQUIVALENT: NE_AT if any(at) else NE_OFF,
            UNKNOWN: UN_AT if any(at) else UN_OFF,
            None: ERROR,
        }[result.verdict]
    except Exception as error:  # a crash of one mutant is a row of the table
        row.outcome, row.reason = ERROR, f"{type(error).__name__}: {error}"
    row.seconds = time.perf_counter() - started
    return row


# ---- all of them ----------------------------------------------------------------------------------------------------


def run_all(tasks: list[Task], jobs: int) -> Iterator[Row]:
    """Rows in the order of the tasks; progress on stderr."""
    if jobs <= 1:
        results: Iterable[Row] = map(run_task, tasks)
        yield from _progress(results, len(tasks))
        return
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        yield from _progress(pool.map(run_task, tasks, chunksize=1), len(tasks))


def _progress(rows: Iterable[Row], total: int) -> Iterator[Row]:
    for done, row in enumerate(rows, 1):
        if done % 25 == 0 or done == total:
            print(f"{done}/{total}", file=sys.stderr)
        if is_alarm(row):
            print(f"alarm {describe(row, 160)}", file=sys.stderr)
        yield row


def is_alarm(row: Row) -> bool:
    """A fault called equivalent, a harmless change that is not, or an error."""
    if row.outcome is None:
        return False
    return row.outcome in (EQ, ERROR) if row.kind in FAULTS else row.outcome != EQ


def describe(row: Row, most: int = 400) -> str:
    """One line: what, and how to get it again."""
    reason = f" [{row.reason[:most]}]" if row.reason else ""
    return f"{row.outcome}: {Path(row.case).name} --kinds {row.kind} --seeds {row.seed}-{row.seed}: {row.what}{reason}"


def table(rows: list[Row]) -> str:
    """Kind x case; each cell counts the outcomes that occurred."""
    cases = list(dict.fromkeys(Path(r.case).name for r in rows))
    cells: dict[tuple[str, str], Counter[str]] = defaultdict(Counter)
    for r in rows:
        if r.outcome is not None:
            cells[r.kind, Path(r.case).name][r.outcome] += 1

    def text(counter: Counter[str]) -> str:
        return " ".join(f"{o}:{counter[o]}" for o in OUTCOMES if counter[o]) or "-"

    lines = [["kind", *cases, "all"]]
    for kind in dict.fromkeys(r.kind for r in rows):
        whole = sum((cells[kind, c] for c in cases), Counter())
        lines.append([kind, *(text(cells[kind, c]) for c in cases), text(whole)])
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    return "\n".join("  ".join(cell.ljust(w) for cell, w in zip(line, widths)).rstrip() for line in lines)


def summary(rows: list[Row]) -> dict[str, Any]:
    """Shares over the planted faults, and what went wrong."""
    faults = [r for r in rows if r.kind in FAULTS and r.outcome is not None]
    keeps = [r for r in rows if r.kind in KEEPS and r.outcome is not None]
    refuted = [r for r in faults if r.outcome in (NE_AT, NE_OFF)]
    return {
        "faults": len(faults),
        "faults_equivalent": sum(r.outcome == EQ for r in faults),
        "faults_not_equivalent": len(refuted),
        "faults_not_equivalent_at_blame": sum(r.outcome == NE_AT for r in faults),
        "faults_first_finding_at_blame": sum(r.first for r in refuted),
        "findings_aside_per_refutation": round(sum(r.aside for r in refuted) / max(1, len(refuted)), 2),
        "faults_unknown": sum(r.outcome in (UN_AT, UN_OFF) for r in faults),
        "errors": sum(r.outcome == ERROR for r in rows),
        "keeps": len(keeps),
        "keeps_equivalent": sum(r.outcome == EQ for r in keeps),
        "not_applicable": sum(r.outcome is None for r in rows),
        "slowest_seconds": round(max((r.seconds for r in rows), default=0.0), 1),
    }


def default_cases() -> list[Path]:
    """The GPT cases of the peer suite."""
    suite = Path(os.environ.get("EMERGE_PEER_SUITE") or ROOT.parent / "shared" / "peer_suite")
    return sorted(suite.glob("gpt_*"))


def seed_list(text: str) -> list[int]:
    """``10`` = 0..9; ``3-4`` = 3 and 4; ``0,7`` = these."""
    if "-" in text:
        low, high = text.split("-")
        return list(range(int(low), int(high) + 1))
    return [int(s) for s in text.split(",")] if "," in text else list(range(int(text)))


def main(argv: list[str] | None = None) -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", type=Path, help="case directories; default: gpt_* of the peer suite")
    parser.add_argument("--kinds", default="all", help="all, faults, keeps, or names separated by commas")
    parser.add_argument("--seeds", type=seed_list, default=list(range(10)), help="10 = 0..9, 3-4, or 0,7 (default 10)")
    parser.add_argument("--mode", choices=("verdict", "files", "derive"), default="verdict", help=MODES)
    parser.add_argument("--engine", default="auto")
    parser.add_argument("--seconds", type=float, default=120.0, help="budget per mutant (default 120)")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--json", type=Path, help="also write all rows to this file")
    parser.add_argument("--write", type=Path, metavar="DIR", help="write the mutants as case directories and stop")
    args = parser.parse_args(argv)
    groups = {"all": list(KINDS), "faults": list(FAULTS), "keeps": list(KEEPS)}
    kinds = groups.get(args.kinds) or args.kinds.split(",")
    unknown = [k for k in kinds if k not in KINDS]
    cases = args.cases or default_cases()
    if unknown or not cases:
        parser.error(
            f"unknown kinds {unknown}; known: {', '.join(KINDS)}" if unknown else "no cases; set EMERGE_PEER_SUITE"
        )
    if args.write:
        for c in cases:
            for kind in kinds:
                for seed in args.seeds:
                    mutant = plant(loaded(str(c)), kind, seed)
                    if mutant is not None:
                        write_mutant(loaded(str(c)), mutant, args.write / f"{c.name}-{kind}-{seed}")
                        print(f"{args.write / f'{c.name}-{kind}-{seed}'}: {mutant.change.what}")
        return 0
    tasks = [Task(str(c), k, s, args.mode, args.engine, args.seconds) for c in cases for k in kinds for s in args.seeds]
    rows = list(run_all(tasks, args.jobs))
    print(table(rows))
    print(LEGEND)
    print("\n".join(f"{k}: {v}" for k, v in summary(rows).items()))
    alarms = [r for r in rows if is_alarm(r)]
    for row in alarms:
        print(describe(row))
    if args.json:
        document = {"mode": args.mode, "summary": summary(rows), "rows": [dataclasses.asdict(r) for r in rows]}
        args.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return 1 if alarms else 0


if __name__ == "__main__":
    sys.exit(main())
