"""A parameter whose loading was traced holds what the trace says, whatever its name is."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from emerge.campaign.config import PairSpec  # noqa: E402
from emerge.campaign.run import RunOptions, run_pair  # noqa: E402
from emerge.capture.trace import capture  # noqa: E402


def scaled(x: Any, weight: Any) -> Any:
    return x * weight


@pytest.mark.parametrize(
    ("loaded", "verdict"),
    [
        (None, "EQUIVALENT"),
        ([{"of": "weight", "at": [[0, 4]], "local": [[0, 4]], "axes": [0]}], "EQUIVALENT"),
        ([{"value": "computed", "local": [[0, 4]]}], "UNKNOWN"),
        ([{"value": "unset", "local": [[0, 4]]}], "UNKNOWN"),
    ],
    ids=["not-traced", "loaded", "computed-by-the-loader", "never-loaded"],
)
def test_a_name_does_not_replace_the_trace(loaded: Any, verdict: str) -> None:
    sides = [capture(scaled, (torch.ones(3, 4), torch.ones(4)), name=n) for n in ("reference", "implementation")]
    for graph in sides:
        for item, label in zip(graph.inputs, ("x", "weight")):
            item.label = label
    if loaded is not None:
        sides[1].inputs[1].extra["loaded"] = loaded
    pair = PairSpec("pair", reference=sides[:1], implementation=sides[1:], relations="auto")
    result = run_pair(pair, RunOptions(engine="embedded"))
    assert result.error is None, result.error
    assert result.verdict == verdict, result.reason
