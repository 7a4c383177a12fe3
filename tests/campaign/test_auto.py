"""``relations: auto``: from recorded placements, also of fused parameters, and from values."""

from __future__ import annotations

from typing import Any

import pytest

import emerge

torch = pytest.importorskip("torch", reason="capturing live programs needs torch")
dist = pytest.importorskip("torch.distributed")

from emerge.capture.distributed import capture_ranks  # noqa: E402
from emerge.capture.trace import capture  # noqa: E402


def fused(x: Any, gate_up: Any, down: Any) -> Any:
    gate, up = (x @ gate_up.t()).chunk(2, -1)
    return (torch.relu(gate) * up) @ down


def fused_on_a_rank(mesh: Any, rank: int) -> Any:
    def program(x: Any, gate_up: Any, down: Any) -> Any:
        y = fused(x, gate_up, down)
        dist.all_reduce(y)
        return y

    return program, (torch.zeros(3, 4), torch.zeros(6, 4), torch.zeros(3, 5))


@pytest.mark.parametrize(
    ("placement", "verdict"), [("StridedShard(0, 2)", "EQUIVALENT"), ("Shard(0)", "NOT_EQUIVALENT")]
)
def test_a_fused_parameter_is_a_strided_shard(placement: str, verdict: str) -> None:
    reference = capture(fused, (torch.zeros(3, 4), torch.zeros(12, 4), torch.zeros(6, 5)))
    ranks = capture_ranks(fused_on_a_rank, {"tp": 2})
    for g in ranks:
        for i in g.inputs:
            i.placement = {"gate_up": [placement], "down": ["Shard(0)"]}.get(i.label or "")
    result = emerge.compare(reference, ranks)
    assert result.verdict == verdict, result.reason
    assert {r.reference: r.origin for r in result.input_relations} == {
        "x": "name",
        "gate_up": "placement",
        "down": "placement",
    }


def test_a_placement_that_is_no_block_is_unknown() -> None:
    ranks = capture_ranks(fused_on_a_rank, {"tp": 2})
    for g in ranks:
        for i in g.inputs:
            i.placement = {"gate_up": ["Partial(sum)"], "down": ["Shard(0)"]}.get(i.label or "")
    reference = capture(fused, (torch.zeros(3, 4), torch.zeros(12, 4), torch.zeros(6, 5)))
    result = emerge.compare(reference, ranks)
    assert result.verdict == "UNKNOWN"
    assert "Partial(sum)" in result.reason
