"""``report.json`` (schema ``emerge.report/1``): the product of a run; every other form is derived from it."""

from __future__ import annotations

import hashlib
import json
import math
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from emerge import __version__
from emerge.graph.json_io import write_atomically
from emerge.util.errors import InputError
from emerge.verdict.types import EVIDENCE, KINDS_OF_REST, PairResult

SCHEMA = "emerge.report/1"
FILE_NAME = "report.json"
STAGES = ("capture", "lower", "datalog", "egglog", "synthesis", "execution", "total")


@dataclass
class CampaignResult:
    """All pairs of a run.

    Attributes:
        engine: requested; the one used is in the pairs.
        pairs: in the order of the campaign.
        fail_on: kinds of findings that count as a failure.
        config: path of the campaign file, None for ``emerge compare``.
    """

    campaign: str
    seed: int
    config_hash: str
    engine: str
    pairs: list[PairResult] = field(default_factory=list)
    fail_on: list[str] = field(default_factory=list)
    config: str | None = None


def exit_status(result: CampaignResult) -> int:
    """4 internal error, 2 input error, 1 verdict against expectation or ``fail_on`` finding, 3 UNKNOWN, else 0."""
    statuses = {_pair_status(p, set(result.fail_on)) for p in result.pairs}
    return next((s for s in (4, 2, 1, 3) if s in statuses), 0)


def _pair_status(pair: PairResult, fail_on: set[str]) -> int:
    if pair.error is not None:
        return 4 if pair.error.internal else 2
    if pair.failed_on or any(f.kind in fail_on for f in pair.findings):
        return 1
    if pair.verdict == "UNKNOWN":
        return 3
    if pair.as_expected():
        return 0
    return 1


def document(result: CampaignResult) -> dict[str, Any]:
    """The report as JSON values."""
    used = next((p.engine for p in result.pairs if p.engine[0]), (result.engine, ""))
    return {
        "schema": SCHEMA,
        "emerge": __version__,
        "campaign": result.campaign,
        "seed": result.seed,
        "config_hash": result.config_hash,
        "config": result.config,
        "engine": {"datalog": used[0], "version": used[1]},
        "pairs": [_pair(p) for p in result.pairs],
    }


def _pair(p: PairResult) -> dict[str, Any]:
    return {
        "id": p.id,
        "verdict": p.verdict,
        "evidence": p.evidence,
        "expect": p.expect,
        "reason": p.reason,
        "error": None if p.error is None else {"message": p.error.message, "place": p.error.place},
        "assumptions": [{"name": a.name, "where": a.where, "why": a.why} for a in p.assumptions],
        "sources": dict(p.sources),
        "mesh": dict(p.mesh),
        "sizes": dict(p.sizes),
        "substitutions": list(p.substitutions),
        "input_relations": [
            {
                "reference": r.reference, "implementation": r.implementation, "alignment": r.alignment,
                "origin": r.origin, "place": r.place,
            }
            for r in p.input_relations
        ],
        "outputs": [
            {
                "reference": o.reference, "implementation": list(o.implementation), "alignment": o.alignment,
                "expected": o.expected, "evidence": o.evidence, "proved": o.proved, "label": o.label,
            }
            for o in p.outputs
        ],
        "outputs_not_claimed": p.outputs_not_claimed,
        "unmatched": {side: list(names) for side, names in p.unmatched.items()},
        "findings": [
            {
                "kind": f.kind, "severity": f.severity, "reference_nodes": f.reference_nodes,
                "reference_source": f.reference_source, "implementation_nodes": f.implementation_nodes,
                "implementation_source": f.implementation_source, "message": f.message, "found": f.found,
                "expected": f.expected, "hint": f.hint,
            }
            for f in p.findings
        ],
        "counterexample": None if p.counterexample is None else {
            "seed": p.counterexample.seed, "output": p.counterexample.output,
            "max_abs_diff": _number(p.counterexample.max_abs_diff), "sizes": p.counterexample.sizes,
            "file": p.counterexample.file,
        },
        "rules": {"used": dict(p.rules_used), "synthesised": list(p.rules_synthesised)},
        "coverage": {level: p.coverage.get(level, 0) for level in EVIDENCE},
        "coverage_rest": {kind: p.coverage_rest.get(kind, 0) for kind in KINDS_OF_REST} | {"by": dict(p.coverage_by)},
        "stats": {
            key: p.stats.get(key, 0)
            for key in ("reference_nodes", "implementation_nodes", "ranks", "segments", "segments_reused")
        } | p.stats,
        "seconds": {key: round(p.seconds.get(key, 0.0), 6) for key in STAGES}
        | {key: round(s, 6) for key, s in p.seconds.items() if key not in STAGES},
    }  # fmt: skip


def _number(value: float) -> float | str:
    """JSON has no infinities; they are written as strings."""
    return value if math.isfinite(value) else str(value)


def to_json(doc: dict[str, Any]) -> str:
    """The text of a report."""
    return json.dumps(doc, indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def write_report(doc: dict[str, Any], directory: Path) -> Path:
    """Writes ``report.json`` so that a reader sees the old report or the whole new one.

    Raises:
        InputError: the directory cannot be made or written.
    """
    make_directory(directory)
    path = directory / FILE_NAME
    write_atomically(path, to_json(doc), InputError)
    return path


def make_directory(directory: Path) -> None:
    """Makes the output directory.

    Raises:
        InputError: it cannot be made.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise InputError(
            f"cannot make the output directory ({e.strerror or e}); choose another --out", str(directory)
        ) from None


def read_report(directory: Path) -> dict[str, Any]:
    """A report written by :func:`write_report`.

    Raises:
        InputError: there is none, or it is of another schema.
    """
    path = directory / FILE_NAME
    try:
        doc = json.loads(path.read_text(encoding="utf-8"))
    except OSError as e:
        raise InputError(
            f"cannot read the report ({e.strerror or e}); give the --out directory of a run", str(path)
        ) from None
    except ValueError as e:
        raise InputError(
            f"expected a JSON report, found something else ({e}); run the campaign again", str(path)
        ) from None
    if not isinstance(doc, dict) or doc.get("schema") != SCHEMA:
        raise InputError(f"expected schema {SCHEMA!r}; give the --out directory of a run of this version", str(path))
    return doc


def file_stem(pair: str) -> str:
    """A pair's name as part of a file name; distinct pairs keep distinct names."""
    safe = re.sub(r"[^\w.-]+", "_", pair).strip(".") or "pair"
    return safe if safe == pair else f"{safe}-{hashlib.sha256(pair.encode()).hexdigest()[:8]}"
