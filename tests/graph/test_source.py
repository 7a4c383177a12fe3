"""What load_side and load_case find on disk, and what they say when it does not fit."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from emerge.graph.source import load_case, load_side
from emerge.util.errors import GraphError, RelationError

SUITE = Path(os.environ.get("EMERGE_PEER_SUITE", Path(__file__).parents[2] / "../shared/peer_suite"))


def put(path: Path, **keys: Any) -> Path:
    data = {
        "name": path.stem,
        "inputs": [{"name": "x", "dtype": "float32", "shape": [2]}],
        "nodes": [],
        "outputs": ["x"],
        **keys,
    }
    path.write_text(json.dumps(data))
    return path


def put_ranks(directory: Path, count: int, **keys: Any) -> None:
    for r in range(count):
        put(directory / f"rank{r}.json", rank=r, world_size=count, **keys)


def put_case(directory: Path, **keys: Any) -> None:
    put(directory / "seq.json")
    put_ranks(directory, 2)
    relations = {
        "world_size": 2,
        "inputs": [{"seq": "x", "kind": "replicated", "dist": [[0, "x"], [1, "x"]]}],
        "groups": {"seq": {"7": [[0]]}, "dist": {"3": [[0, 1]]}},
        **keys,
    }
    (directory / "relations.json").write_text(json.dumps(relations))


def test_single_files_and_directories(tmp_path: Path) -> None:
    assert [g.name for g in load_side(put(tmp_path / "any.json"))] == ["any"]
    assert [g.name for g in load_side(str(tmp_path))] == ["any"]
    put(tmp_path / "seq.json")
    assert [g.name for g in load_side(tmp_path)] == ["seq"]


def test_ranks_come_in_numeric_order(tmp_path: Path) -> None:
    put_ranks(tmp_path, 11)
    assert [g.rank for g in load_side(tmp_path)] == list(range(11))


def test_text_ranks_get_their_rank_from_the_name(tmp_path: Path) -> None:
    text = 'class f(torch.nn.Module):\n    def forward(self, x: "f32[2]"):\n        return (x,)\n'
    for r in range(2):
        (tmp_path / f"rank{r}.txt").write_text(text)
    assert [(g.rank, g.world_size) for g in load_side(tmp_path)] == [(0, 2), (1, 2)]


def test_one_spmd_file_stands_for_all_ranks(tmp_path: Path) -> None:
    path = put(tmp_path / "graph.json", world_size=3, spmd=True, format="hlo")
    assert [g.rank for g in load_side(path)] == [0, 1, 2]


def test_a_lone_rank_of_many_is_refused(tmp_path: Path) -> None:
    path = put(tmp_path / "some.json", world_size=2)
    with pytest.raises(GraphError, match=r"expected all 2 ranks .* found this one of rank 0"):
        load_side(path)


def test_missing_rank_is_named(tmp_path: Path) -> None:
    put_ranks(tmp_path, 4)
    (tmp_path / "rank2.json").unlink()
    with pytest.raises(GraphError, match=r"rank2\.json is missing"):
        load_side(tmp_path)
    (tmp_path / "rank3.json").unlink()
    with pytest.raises(GraphError, match=r"world_size is 4\), found 2 of them; rank2\.json is missing"):
        load_side(tmp_path)


def test_contradictions_name_the_files(tmp_path: Path) -> None:
    put_ranks(tmp_path, 2)
    put(tmp_path / "rank1.json", rank=0, world_size=2)
    with pytest.raises(GraphError, match=r"rank1\.json: its rank is 0, but the file is named rank1\.json"):
        load_side(tmp_path)
    put(tmp_path / "rank1.json", rank=1, world_size=4)
    with pytest.raises(GraphError, match=r"rank1\.json: its world_size is 4, but that of .*rank0\.json is 2"):
        load_side(tmp_path)
    put(tmp_path / "rank0.json", rank=0, world_size=1)
    with pytest.raises(GraphError, match=r"rank0\.json: its world_size is 1, but rank1\.json lies beside it"):
        load_side(tmp_path)


def test_ambiguous_directories(tmp_path: Path) -> None:
    with pytest.raises(GraphError, match="found no graph file"):
        load_side(tmp_path)
    put(tmp_path / "a.json")
    put(tmp_path / "b.json")
    with pytest.raises(GraphError, match=r"found a\.json, b\.json; name the file itself"):
        load_side(tmp_path)
    put(tmp_path / "seq.json")
    put(tmp_path / "rank0.json")
    with pytest.raises(GraphError, match=r"both seq\.json and rank files"):
        load_side(tmp_path)
    (tmp_path / "seq.json").unlink()
    (tmp_path / "rank0.txt").write_text("")
    with pytest.raises(GraphError, match=r"found rank0\.json and rank0\.txt"):
        load_side(tmp_path)
    (tmp_path / "rank0.txt").unlink()
    put(tmp_path / "rank01.json")
    with pytest.raises(GraphError, match=r"found rank01\.json; rename it"):
        load_side(tmp_path)


def test_case_fills_groups_where_graphs_have_none(tmp_path: Path) -> None:
    put_case(tmp_path)
    put(tmp_path / "rank1.json", rank=1, world_size=2, groups={"9": [[1]]})
    case = load_case(tmp_path)
    assert case.reference.groups == {"7": [[0]]}
    assert [g.groups for g in case.ranks] == [{"3": [[0, 1]]}, {"9": [[1]]}]


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"world_size": 3}, "world_size is 3, but .* has 2 rank files"),
        ({"inputs": [{"seq": "y", "kind": "replicated", "dist": [[0, "x"]]}]}, r"inputs\[0\]: it names 'y'.*seq\.json"),
        ({"inputs": [{"seq": "x", "kind": "replicated", "dist": [[1, "z"]]}]}, r"it names 'z'.*rank1\.json"),
        ({"claimed_outputs": ["q"]}, "'claimed_outputs' names 'q'"),
        ({"groups": {"seq": {"7": [[1]]}}}, r"groups\['seq'\]: group '7' holds int 1"),
    ],
)
def test_case_contradictions(tmp_path: Path, keys: dict[str, Any], message: str) -> None:
    put_case(tmp_path, **keys)
    with pytest.raises(RelationError, match=message):
        load_case(tmp_path)


def test_incomplete_cases(tmp_path: Path) -> None:
    with pytest.raises(GraphError, match="expected a case directory"):
        load_case(tmp_path / "none")
    with pytest.raises(RelationError, match=r"expected relations\.json"):
        load_case(tmp_path)
    put_case(tmp_path)
    (tmp_path / "seq.json").unlink()
    with pytest.raises(GraphError, match=r"expected one seq\.json, found none"):
        load_case(tmp_path)


@pytest.mark.peer_suite
def test_peer_suite_cases_load() -> None:
    directories = sorted(p.parent for p in SUITE.glob("*/relations.json"))
    if not directories:
        pytest.skip(f"no captured graphs at {SUITE} (set EMERGE_PEER_SUITE)")
    for d in directories:
        case = load_case(d)
        assert len(case.ranks) == case.relations.world_size
        assert case.reference.world_size == 1
