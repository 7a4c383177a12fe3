"""Traced loading: boxes of element numbers, padding, and the relations of all ranks together."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from loaded_boxes import box_values  # noqa: E402

from emerge.campaign.build import prepare  # noqa: E402
from emerge.campaign.config import PairSpec  # noqa: E402
from emerge.capture.loading import loading_relations, mesh_factors, packed_alignment  # noqa: E402
from emerge.capture.vllm.boxes import OTHER, UNSET, ZERO, Numbering  # noqa: E402
from emerge.capture.vllm.sequences import _boxes, cached_boxes  # noqa: E402
from emerge.graph.model import Graph, Input  # noqa: E402
from emerge.graph.relations import Relations  # noqa: E402
from emerge.graph.relations_io import decode_relations, encode_relations  # noqa: E402
from emerge.util.errors import RelationError  # noqa: E402

SHAPES = {"a": (6, 4), "q": (24, 5), "e": (3, 8, 2)}
NUMBERS = Numbering(list(SHAPES.items()))
SOURCES = {
    s.label: torch.arange(s.start, s.start + s.size).reshape(s.shape) for s in NUMBERS.sources
}  # fmt: skip
A, Q, E = SOURCES["a"], SOURCES["q"], SOURCES["e"]


@pytest.mark.parametrize(
    ("array", "count"),
    [
        (A, 1),
        (A.t(), 1),
        (A[0, 0], 1),
        (torch.cat([A[2:4], torch.full((2, 4), ZERO)]), 2),
        (torch.cat([A, Q.flatten()[:8].reshape(2, 4)]), None),
        (Q.view(2, 3, 4, 5).transpose(0, 1).reshape(24, 5), 1),  # heads and parts exchanged
        (Q.view(2, 6, 2, 5).transpose(1, 2).reshape(24, 5), 1),  # rotary halves interleaved
        (Q.view(2, 4, 3, 5)[:, :2].reshape(12, 5), 2),  # parts with gaps between them
        (Q.flatten(), 1),
        (A.view(6, 2, 2), 1),
        (E[:, :4], 1),
        (torch.stack([E[1].t(), E[2].t()]), 1),
        (torch.full((3, 2), UNSET), 1),
        (torch.tensor([[0, 1, OTHER], [4, 5, OTHER]]), 2),
        (torch.arange(24).reshape(6, 4)[torch.tensor([3, 1, 0, 5, 4, 2])], None),
        (torch.randint(-3, 192, (7, 3, 4), generator=torch.Generator().manual_seed(0)), None),
    ],
)
def test_boxes_hold_what_the_array_holds(array: Any, count: int | None) -> None:
    boxes = NUMBERS.boxes(array)
    assert count is None or len(boxes) == count
    found = torch.full_like(array, -9)
    seen = torch.zeros_like(array)
    for box in boxes:
        where = tuple(slice(a, b) for a, b in box.local)
        found[where] = box_values(box.as_json(), SOURCES[box.label]) if box.label is not None else box.code
        seen[where] += 1
    assert torch.equal(found, array)
    assert bool((seen == 1).all())


def graph(rank: int, world: int, loaded: list[dict[str, Any]], shape: tuple[int, ...], **extra: Any) -> Graph:
    item = Input("w", "float32", shape, "w", extra={"loaded": loaded})
    return Graph("g", [item], [], ["w"], rank, world, mesh={"tp": world} if world > 1 else {}, extra=extra)


def reference(*shape: int) -> Graph:
    return Graph("ref", [Input("a", "float32", shape, "a")], [], ["a"])


def relate(ref: Graph, *numbers: Any) -> Any:
    source = Numbering([(i.label or i.name, [int(n) for n in i.shape]) for i in ref.inputs])
    ranks = [
        graph(r, len(numbers), [b.as_json() for b in source.boxes(n)], tuple(n.shape)) for r, n in enumerate(numbers)
    ]
    return loading_relations(ref, ranks, ranks[0].mesh), ranks


def texts(found: Any) -> list[tuple[Any, ...]]:
    return [(e.alignment, e.seq_cuts, e.dist_cuts) for e in found.inputs]


def test_blocks_of_all_ranks_are_one_relation() -> None:
    whole = torch.arange(24).reshape(6, 4)
    rows, _ = relate(reference(6, 4), whole[:3], whole[3:])
    assert texts(rows) == [("(tp a) b ~ a b", (), ((0, 3), (0, 4)))]
    turned, _ = relate(reference(6, 4), whole[:, :2].t(), whole[:, 2:].t())
    assert texts(turned) == [("a (tp b) ~ b a", (), ((0, 2), (0, 6)))]
    same, _ = relate(reference(6, 4), whole, whole)
    assert texts(same) == [("a b ~ a b", (), ((0, 6), (0, 4)))]
    shared, _ = relate(reference(6, 4), whole[:3], whole[:3], whole[3:], whole[3:])
    assert texts(shared) == [("(tp_2x2 a) b ~ a b", (), ((0, 3), (0, 4)))]
    levels, _ = relate(reference(8, 3), *torch.arange(24).reshape(2, 2, 2, 3).transpose(1, 2).reshape(2, 4, 3))
    assert texts(levels) == [("(tp a=2 b=2) c ~ (b a) c", (), ((0, 4), (0, 3)))]


def test_neighbours_on_one_rank_are_cut_where_another_rank_cuts() -> None:
    """Multi-query attention: each rank has its queries and all keys; on the last rank they lie side by side."""
    whole = torch.arange(18).reshape(6, 3)
    found, _ = relate(reference(6, 3), torch.cat([whole[0:2], whole[4:6]]), whole[2:6])
    assert texts(found) == [
        ("(tp a) b ~ a b", ((0, 4), (0, 3)), ((0, 2), (0, 3))),
        ("a b ~ a b", ((4, 6), (0, 3)), ((2, 4), (0, 3))),
    ]


def test_what_has_no_form_is_left_open() -> None:
    whole = torch.arange(24).reshape(6, 4)
    swapped, _ = relate(reference(6, 4), whole[3:], whole[:3])
    assert texts(swapped) == []
    assert "is no order of the mesh" in swapped.open["a"]
    uneven, _ = relate(reference(6, 4), whole[0:3], whole[2:5])
    assert "no equal blocks" in uneven.open["a"]


@pytest.mark.parametrize(
    ("world", "alignment"), [(1, "a b ~ a b"), (2, "(tp a) b ~ a b"), (4, "(tp a) b ~ a b")]
)
def test_padding_behind_a_parameter_is_padding_of_the_reference(world: int, alignment: str) -> None:
    """Six rows padded to eight; with four ranks the last holds padding only."""
    padded = torch.cat([torch.arange(18).reshape(6, 3), torch.full((2, 3), ZERO)])
    found, _ = relate(reference(6, 3), *padded.chunk(world))
    assert not found.open
    (entry,) = found.inputs
    assert (entry.alignment, entry.seq_cuts) == (alignment, ((0, 8), (0, 3)))


def test_padding_that_is_no_block_of_a_padded_parameter_stays_open() -> None:
    whole = torch.arange(18).reshape(6, 3)
    parts = [torch.cat([whole[:3], torch.full((1, 3), ZERO)]), torch.cat([whole[2:5], torch.full((1, 3), OTHER)])]
    found, _ = relate(reference(6, 3), *parts)
    assert not any(e.seq_cuts and e.seq_cuts[0][1] > 6 for e in found.inputs)


@pytest.mark.parametrize(
    ("holders", "mesh", "expected"),
    [
        ([0, 0], {"tp": 2}, []),
        ([0, 1], {"tp": 2}, ["tp"]),
        ([1, 0], {"tp": 2}, None),
        ([0, 0, 1, 1], {"tp": 4}, ["tp_2x2"]),
        ([0, 1, 0, 1], {"tp": 4}, None),
        ([0, 1, 0, 1], {"dp": 2, "tp": 2}, ["tp"]),
        ([0, 0, 1, 1], {"dp": 2, "tp": 2}, ["dp"]),
        ([0, 1, 2, 3], {"dp": 2, "tp": 2}, ["dp", "tp"]),
        ([0, 2, 1, 3], {"dp": 2, "tp": 2}, ["tp", "dp"]),
        ([0, 2, 0, 2], {"dp": 2, "tp": 2}, None),
        ([0, 1, 1, 2], {"dp": 2, "tp": 2}, None),
        ([0, 1, 2], {"tp": 2}, None),
    ],
)
def test_blocks_over_the_mesh(holders: list[int], mesh: dict[str, int], expected: list[str] | None) -> None:
    assert mesh_factors(holders, mesh) == expected


def packed_ids(*lengths: int) -> Graph:
    boxes = _boxes("ids", [f"ids.{i}" for i in range(len(lengths))], lengths)
    return Graph("g", [Input("ids", "int64", (sum(lengths),), "ids", extra={"loaded": boxes})], [], ["ids"])


def ids(**shapes: tuple[int, ...]) -> Graph:
    names = {k: k.replace("_", ".") for k in shapes}
    return Graph("ref", [Input(k, "int64", n, names[k]) for k, n in shapes.items()], [], list(shapes))


class TestSequences:
    def test_one_tensor_each(self) -> None:
        found = loading_relations(ids(ids_0=(1, 3), ids_1=(1, 5)), [packed_ids(3, 5)], {})
        assert texts(found) == [("1 a ~ a", (), ((0, 3),)), ("1 a ~ a", (), ((3, 8),))]

    def test_rows_of_one_tensor(self) -> None:
        found = loading_relations(ids(ids=(2, 4)), [packed_ids(4, 4)], {})
        assert texts(found) == [("a b ~ (a b)", (), ((0, 8),))]

    def test_rows_that_end_in_padding_are_related_as_far_as_they_go(self) -> None:
        found = loading_relations(ids(ids=(2, 5)), [packed_ids(3, 5)], {})
        assert texts(found) == [("1 a ~ a", ((0, 1), (0, 3)), ((0, 3),)), ("1 a ~ a", ((1, 2), (0, 5)), ((3, 8),))]

    @pytest.mark.parametrize("shape", [(3, 5), (2, 6), (2, 4), (1, 8)])
    def test_other_sequences_are_refused(self, shape: tuple[int, ...]) -> None:
        with pytest.raises(RelationError, match="capture both sides with the same sequences"):
            loading_relations(ids(ids=shape), [packed_ids(3, 5)], {})

    def test_cached_heads_of_all_ranks_are_one_relation(self) -> None:
        def rank(r: int) -> Graph:
            boxes = cached_boxes("past.{}0.key", (7,), (2 * r, 2 * r + 2), 16)
            item = Input("k", "float32", (7, 2, 16), "past.0.key", extra={"loaded": boxes})
            return Graph("g", [item], [], ["k"], r, 2, mesh={"tp": 2})

        ref = Graph("ref", [Input("k", "float32", (1, 4, 7, 16), "past.0.key")], [], ["k"])
        found = loading_relations(ref, [rank(0), rank(1)], {"tp": 2})
        assert texts(found) == [("1 (tp a) b c ~ b a c", (), ((0, 7), (0, 2), (0, 16)))]


def test_packed_sequences() -> None:
    def packed(*seqs: int) -> Graph:
        return Graph("g", [], [], [], extra={"packed": list(seqs)})

    assert packed_alignment(packed(4, 4), (2, 4), (8,)) == "a b ~ (a b)"
    assert packed_alignment(packed(4, 4), (2, 4, 7), (8, 7)) == "a b c ~ (a b) c"
    assert packed_alignment(packed(8), (2, 4), (8,)) is None  # one sequence of eight is not two of four
    assert packed_alignment(packed(4, 3), (2, 4), (7,)) is None
    assert packed_alignment(Graph("g", [], [], []), (2, 4), (8,)) is None


def test_aligned_entries_are_part_of_relation_files() -> None:
    whole = torch.arange(24).reshape(6, 4)
    found, ranks = relate(reference(6, 4), whole[:, :2].t(), whole[:, 2:].t())
    data = encode_relations(Relations("case", 2, found.inputs))
    again = decode_relations(data, "r.json")
    assert [(e.alignment, e.seq_cuts, e.dist_cuts, e.dist) for e in again.inputs] == [
        (e.alignment, e.seq_cuts, e.dist_cuts, e.dist) for e in found.inputs
    ]
    for change, words in (
        ({"alignment": None}, "belong together"),
        ({"kind": "replicated"}, "belong together"),
        ({"seq_cuts": [[2, 1]]}, "start < stop"),
    ):
        broken = {**data, "inputs": [{**data["inputs"][0], **change}]}
        with pytest.raises(RelationError, match=words):
            decode_relations(broken, "r.json")
    pair = prepare(PairSpec("p", reference=[reference(6, 4)], implementation=ranks, relations="auto", outputs=[]))
    assert [s.text for s in pair.problem.inputs] == ["a (tp b) ~ b a"]
