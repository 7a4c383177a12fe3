"""Placements as factors of dimensions: what each rank holds, compared with what DTensor itself would give it."""

from __future__ import annotations

from math import prod

import pytest

torch = pytest.importorskip("torch")

from emerge.capture.relations import Unplaced, placed_factors, placement_relations  # noqa: E402
from emerge.execute.dist_inputs import build_dist_inputs  # noqa: E402
from emerge.graph.model import Graph, Input  # noqa: E402

CASES = [
    ({"tp": 2}, ["Shard(0)"]),
    ({"tp": 2}, ["Shard(-1)"]),
    ({"tp": 3}, ["Replicate"]),
    ({"tp": 2}, ["StridedShard(0, 3)"]),
    ({"dp": 2, "tp": 3}, ["Replicate", "Shard(1)"]),
    ({"dp": 2, "tp": 3}, ["Shard(0)", "Shard(0)"]),
    ({"dp": 2, "tp": 3}, ["StridedShard(0, 3)", "Shard(0)"]),
    ({"dp": 2, "tp": 3}, ["Shard(1)", "Shard(0)"]),
    ({"dp": 2, "tp": 2}, {"tp": "Shard(0)"}),
    ({"dp": 2, "tp": 2}, [None, "StridedShard(1, 2)"]),
]


def local(whole, mesh, placement, rank):  # type: ignore[no-untyped-def]
    """DTensor's own meaning: axis by axis, blocks of what is left; a strided shard takes every n-th of n*f chunks."""
    terms = [placement.get(a) for a in mesh] if isinstance(placement, dict) else placement
    sizes = list(mesh.values())
    for i, (n, term) in enumerate(zip(sizes, terms)):
        mine = rank // prod(sizes[i + 1 :]) % n
        if term in (None, "Replicate"):
            continue
        numbers = [int(x) for x in term[term.index("(") + 1 : -1].split(",")]
        stretches = numbers[1] if len(numbers) > 1 else 1
        chunks = whole.chunk(n * stretches, numbers[0])
        whole = torch.cat([chunks[mine + k * n] for k in range(stretches)], numbers[0])
    return whole


@pytest.mark.parametrize(("mesh", "placement"), CASES)
def test_relations_hold_what_dtensor_would_place(mesh, placement) -> None:  # type: ignore[no-untyped-def]
    whole = torch.randn(12, 24)
    parts = [local(whole, mesh, placement, r) for r in range(prod(mesh.values()))]
    reference = Graph("ref", [Input("w", "float32", (12, 24), "w")], [], ["w"])
    ranks = [
        Graph("imp", [Input("p", "float32", tuple(t.shape), "w", None, placement)], [], ["p"], rank=r,
              world_size=len(parts), mesh=dict(mesh))
        for r, t in enumerate(parts)
    ]  # fmt: skip
    found = placement_relations(reference, ranks)
    assert found.open == {}
    assert found.origins == {"w": "placement"}
    built = build_dist_inputs(found.inputs, {"w": whole}, ranks)
    assert built.undetermined == []
    for values, expected in zip(built.values, parts):
        assert torch.equal(values["p"], expected)


@pytest.mark.parametrize(
    "placement", [["Partial(sum)"], ["Shard(2)"], ["Shard(0)", "Shard(0)"], {"pp": "Shard(0)"}, ["StridedShard(0, 5)"]]
)
def test_what_is_no_block_is_refused(placement) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(Unplaced):
        placed_factors(placement, (12, 24), {"tp": 2})


def test_ranks_that_disagree_are_left_open() -> None:
    reference = Graph("ref", [Input("w", "float32", (4, 4), "w")], [], ["w"])
    ranks = [
        Graph("imp", [Input("p", "float32", (2, 4), "w", None, [f"Shard({r})"])], [], ["p"], rank=r, world_size=2,
              mesh={"tp": 2})
        for r in range(2)
    ]  # fmt: skip
    assert "different placements" in placement_relations(reference, ranks).open["w"]
