"""Runs a campaign for the command line: pairs, progress, report, exit status."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from emerge.campaign.config import (
    Campaign,
    PairSpec,
    RelationSpec,
    hash_of,
    is_live,
    load_relation_lines,
    rule_files,
    source_name,
)
from emerge.capture.source import parse_spec
from emerge.cli import options as opt
from emerge.graph.source import RELATIONS_FILE
from emerge.report.document import CampaignResult, document, exit_status, to_json, write_report
from emerge.report.terminal import render
from emerge.util.errors import InputError


@dataclass(frozen=True)
class Request:
    """Options of a run, checked."""

    out: Path | None
    engine: str | None
    jobs: int
    seconds: float | None
    memory_gb: float | None
    seed: int | None
    form: str
    debug: bool
    base: str = "full"
    synthesis: bool | None = None
    device: str | None = None


def compare_specs(
    paths: Sequence[Path],
    relations: Path | None,
    mesh: dict[str, int] | None,
    rules: Sequence[Path],
    trust: Sequence[str],
    request: Request,
) -> Campaign:
    """The pairs of ``emerge compare``: case directories, or one reference with one implementation.

    Raises:
        InputError: the arguments are neither.
    """
    files = rule_files(rules, "--rules")
    cases = [(p / RELATIONS_FILE).is_file() for p in paths]
    name = paths[0].resolve().name if len(paths) == 1 else "compare"
    if len(paths) == 2 and not any(cases):
        for path in paths:
            if not is_live(str(path)) and not path.exists():
                raise InputError("there is no such graph file or directory; correct the path", str(path))
        if relations is not None and not relations.exists():
            raise InputError("there is no such relation file; correct the path", str(relations))
        reference, implementation = (
            parse_spec(str(p), mesh=m) if is_live(str(p)) else p for p, m in zip(paths, (None, mesh))
        )
        spec = PairSpec(
            f"{source_name(reference)}-{source_name(implementation)}", reference=reference,
            implementation=implementation, mesh=mesh, rules=files, trust=list(trust),
            relations=_relations(relations),
        )  # fmt: skip
        specs = [spec]
    else:
        if relations is not None:
            raise InputError("--relations goes with REFERENCE IMPLEMENTATION; a case directory brings its own")
        for path, is_case in zip(paths, cases):
            if not is_case:
                what = f"has no {RELATIONS_FILE}" if path.is_dir() else "is no directory"
                raise InputError(
                    f"{what}, so it is no case directory; give case directories, or REFERENCE and IMPLEMENTATION",
                    str(path),
                )
        specs = [PairSpec(_id(p, paths), case=p, mesh=mesh, rules=files, trust=list(trust)) for p in paths]
    content = {
        "paths": [str(p) for p in paths], "relations": str(relations), "mesh": mesh, "rules": [str(f) for f in files],
        "trust": list(trust),
    }  # fmt: skip
    return Campaign(name, specs, request.engine or "auto", request.seed or 0, [], hash_of(content))


def _relations(path: Path | None) -> str | list[RelationSpec] | Path:
    """``--relations``: a relation file, YAML lines, or by default names and shapes."""
    if path is None:
        return "auto"
    return load_relation_lines(path) if path.suffix in (".yaml", ".yml") else path


def _id(path: Path, paths: Sequence[Path]) -> str:
    """The directory's name; its path where another one has the same name."""
    name = path.resolve().name
    return name if sum(p.resolve().name == name for p in paths) == 1 else os.path.normpath(path)


def run_campaign(campaign: Campaign, request: Request) -> int:
    """Runs all pairs, writes the report, prints it. Nothing is written when no pair got a verdict.

    Returns:
        The exit status.
    """
    from emerge.campaign.run import RunOptions, run_pairs

    out = opt.output_directory(request.out, campaign.name)
    if out.exists() and not out.is_dir():
        raise InputError("expected a directory for --out, found a file; choose another", str(out))
    for spec in campaign.pairs if request.engine is None else ():
        opt.check_engine(spec.engine, spec.place)
    seed = request.seed if request.seed is not None else campaign.seed
    engine = request.engine or campaign.engine
    result = CampaignResult(
        campaign.name, seed, campaign.config_hash, engine, [], list(campaign.fail_on), campaign.path or None
    )
    options = RunOptions(request.engine, request.seed, request.seconds, request.memory_gb, out, request.debug,
                         request.base, request.synthesis, request.device)  # fmt: skip
    shown = sys.stderr.isatty()
    for number, pair in enumerate(run_pairs(campaign.pairs, options, jobs=request.jobs), 1):
        result.pairs.append(pair)
        if pair.error is not None:
            place = f"{pair.error.place}: " if pair.error.place else ""
            opt.fail(
                f"{place}{pair.error.message}"
                if len(campaign.pairs) == 1
                else f"{pair.id}: {place}{pair.error.message}"
            )
        elif shown:
            print(
                f"[{number}/{len(campaign.pairs)}] {pair.id}: {pair.verdict} {pair.seconds['total']:.2f} s",
                file=sys.stderr,
            )
    doc = document(result)
    if not all(p.is_error for p in result.pairs):
        write_report(doc, out)
        if request.form == "text":
            opt.emit(render(doc, colour=sys.stdout.isatty()) + f"report: {out / 'report.json'}\n")
    if request.form == "json":
        opt.emit(to_json(doc))
    return exit_status(result)
