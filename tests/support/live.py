"""Runs a pair of live models from a test."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from emerge.campaign.config import PairSpec, load_relation_lines
from emerge.campaign.run import RunOptions, run_pair
from emerge.capture.source import SourceSpec
from emerge.verdict.types import PairResult

TESTS = Path(__file__).resolve().parents[1]


def python(target: str, mesh: Mapping[str, int] | None = None, **args: Any) -> SourceSpec:
    """A factory of a module in ``tests``, with arguments."""
    return SourceSpec("python", target, args=args, mesh=dict(mesh or {}), base=str(TESTS))


def verify(
    reference: SourceSpec, implementation: SourceSpec, folder: Path, relations: Mapping[str, str] | None = None,
    outputs: Mapping[Any, str] | None = None,
) -> PairResult:  # fmt: skip
    """Result of one pair; relations are ``auto`` unless written. An input error fails the test."""
    import yaml

    def lines(given: Mapping[Any, str], name: str) -> Any:
        path = folder / name
        path.write_text(yaml.safe_dump(dict(given), sort_keys=False), encoding="utf-8")
        return load_relation_lines(path)

    spec = PairSpec(
        "live",
        reference=reference,
        implementation=implementation,
        relations="auto" if relations is None else lines(relations, "relations.yaml"),
        outputs=None if outputs is None else lines(outputs, "outputs.yaml"),
        engine="embedded",
    )
    result = run_pair(spec, RunOptions(debug=True))
    assert result.error is None, result.error
    return result
