"""Programs of several ranks captured in one process, run in lockstep and compared with the sequential program."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import capture_models as models  # noqa: E402
from capture_checks import check, close, outputs, random_state, run_one, run_parallel  # noqa: E402

from emerge.capture.base import CaptureError  # noqa: E402
from emerge.capture.communication import axis_groups  # noqa: E402
from emerge.capture.distributed import capture_ranks  # noqa: E402
from emerge.capture.trace import capture  # noqa: E402
from emerge.execute.lockstep import run_ranks  # noqa: E402
from emerge.graph.json_io import encode_graph  # noqa: E402


@pytest.mark.parametrize("how", ["sum", "imported", "async"])
@pytest.mark.parametrize("world", [2, 3])
def test_hand_written_tensor_parallelism(how: str, world: int, tmp_path: Path) -> None:
    reference = capture(*models.mlp(), name="mlp")
    ranks = capture_ranks(lambda mesh, rank: models.parallel_mlp(mesh, rank, how), {"tp": world}, name=f"mlp{how}")
    for g in ranks:
        check(g, tmp_path)
        assert g.groups == {"tp": [list(range(world))]}
        assert g.mesh == {"tp": world}
    reduce = next(n for n in ranks[1].nodes if n.op == "_c10d_functional.all_reduce.default")
    assert reduce.args[1:] == ["sum", "tp"]
    assert "all_reduce" in (reduce.code or "") or "reduce_imported_earlier" in (reduce.code or "")
    values = {**random_state(models.MLP()), "x": torch.randn(models.BATCH, models.SEQ, models.HIDDEN).double()}
    want = run_one(reference, values)["output"]
    for got in run_parallel(reference, ranks, values):
        assert close(got["output"], want, 1e-12)


def test_a_missing_all_reduce_shows_in_execution() -> None:
    reference = capture(*models.mlp(), name="mlp")
    ranks = capture_ranks(models.mlp_without_reduce, {"tp": 2}, name="mlp")
    values = {**random_state(models.MLP()), "x": torch.randn(models.BATCH, models.SEQ, models.HIDDEN).double()}
    want = run_one(reference, values)["output"]
    assert not any(close(got["output"], want, 1e-3) for got in run_parallel(reference, ranks, values))


@pytest.mark.parametrize("fake", [False, True])
def test_dtensor_plan_with_sequence_parallelism(fake: bool, tmp_path: Path) -> None:
    reference = capture(*models.block(), name="block")
    ranks = capture_ranks(models.sequence_parallel_block, {"tp": 2}, name="block", fake=fake)
    for g in ranks:
        check(g, tmp_path)
    placements = {i.label: i.placement for i in ranks[0].inputs}
    assert placements["mlp.up.weight"] == ["Shard(0)"]
    assert placements["mlp.down.weight"] == ["Shard(1)"]
    assert placements["norm.weight"] == ["Replicate"]
    assert next(i for i in ranks[0].inputs if i.label == "mlp.up.weight").extra["global_shape"] == [24, 12]
    starts = [next(n.args[2] for n in g.nodes if n.op == "aten.slice.Tensor") for g in ranks]
    assert starts == [0, 2], "the part a rank takes is an offset that depends on the rank"
    values = {**random_state(models.Block()), "x": torch.randn(models.BATCH, models.SEQ, models.HIDDEN).double()}
    want = run_one(reference, values)["output"]
    for got in run_parallel(reference, ranks, values):
        assert close(got["output"], want, 1e-12)


def test_every_eager_collective(tmp_path: Path) -> None:
    ranks = capture_ranks(models.collective_zoo, {"tp": 3}, name="zoo")
    for g in ranks:
        check(g, tmp_path)
    xs = [torch.randn(6, 5).double() for _ in ranks]
    got = [outputs(g, v) for g, v in zip(ranks, run_ranks(ranks, [{"x": x} for x in xs]))]
    x = torch.stack(xs)
    for r, o in enumerate(got):
        assert close(o["whole"], x.reshape(18, 5), 0)
        assert close(o["parts"], 2 * x, 0)
        assert close(o["mine"], x.sum(0)[2 * r : 2 * r + 2], 1e-12)
        assert close(o["listed"], x.amax(0)[2 * r : 2 * r + 2], 0)
        assert close(o["swapped"], torch.cat([xs[j][2 * r : 2 * r + 2] for j in range(3)]), 0)
        assert close(o["sent"], xs[2], 0)
        assert close(o["received"], xs[(r - 1) % 3], 0)


def test_groups_are_named_after_mesh_axes() -> None:
    ranks = capture_ranks(models.sequence_parallel_block, {"dp": 2, "tp": 2}, name="block")
    assert [g.groups for g in ranks] == [{"tp": [[0, 1], [2, 3]]}] * 4
    assert ranks[0].inputs[2].placement == [None, "Shard(0)"], "the tensor's own mesh has no axis dp"
    assert axis_groups({"dp": 2, "tp": 2}, ("dp",)) == [[0, 2], [1, 3]]


def test_equal_groups_stay_apart() -> None:
    def build(mesh: Any, rank: int) -> Any:
        import torch.distributed as dist

        first, second = dist.new_group([0, 2]), dist.new_group([0, 2])

        def program(x: Any) -> Any:
            y, z = x.clone(), x.clone()
            if rank != 1:
                dist.all_reduce(y, group=second)
                dist.all_reduce(z, group=first)
            return y + z

        return program, (torch.randn(2),)

    ranks = capture_ranks(build, {"tp": 3}, name="groups")
    used = [[n.args[2] for n in g.nodes if n.op.endswith("all_reduce.default")] for g in ranks]
    assert used == [["ranks_0_2#2", "ranks_0_2"], [], ["ranks_0_2#2", "ranks_0_2"]]


def test_values_received_from_other_ranks_may_not_be_looked_at() -> None:
    """On the fake group they are made up: a program that branches on them would be captured wrongly."""

    def build(mesh: Any, rank: int) -> Any:
        import torch.distributed as dist

        def program(x: Any) -> Any:
            counts = torch.tensor([rank + 1])
            dist.all_reduce(counts)
            return x[: counts.item()]

        return program, (torch.randn(4),)

    with pytest.raises(CaptureError, match="depends on the inputs"):
        capture_ranks(build, {"tp": 2}, name="counts")


def test_captures_of_all_ranks_in_one_process_equal_separate_ones() -> None:
    """DTensor caches what it computes by meshes that compare equal on all ranks; rank 0's coordinate must not leak."""
    code = (
        "import json, sys\n"
        f"sys.path[:0] = {[str(Path(__file__).parent)]!r}\n"
        "import capture_models as m\n"
        "from emerge.capture.distributed import capture_ranks\n"
        "from emerge.graph.json_io import encode_graph\n"
        "g = capture_ranks(m.sequence_parallel_block, {'tp': 4}, ranks=[int(sys.argv[1])], name='block')[0]\n"
        "json.dump(encode_graph(g), sys.stdout)"
    )
    root = Path(__file__).resolve().parents[2]
    together = capture_ranks(models.sequence_parallel_block, {"tp": 4}, name="block")
    for rank, graph in enumerate(together):
        run = subprocess.run(
            [sys.executable, "-c", code, str(rank)], cwd=root, check=True, capture_output=True, text=True
        )
        alone = json.loads(run.stdout)
        here = json.loads(json.dumps(encode_graph(graph)))
        for document in (alone, here):  # the test's own line differs, and so does the working directory
            document.pop("stacks")
            for node in document["nodes"]:
                node.pop("source", None)
                node.pop("stack", None)
        assert here == alone, f"rank {rank}"
    offsets = [next(n.args[2] for n in g.nodes if n.op == "aten.slice.Tensor") for g in together]
    assert offsets == [0, 1, 2, 3]


def test_wrong_meshes_and_ranks_are_refused() -> None:
    with pytest.raises(CaptureError, match="positive sizes"):
        capture_ranks(models.parallel_mlp, {"tp": 0})
    with pytest.raises(CaptureError, match="ranks from 0 to 1"):
        capture_ranks(models.parallel_mlp, {"tp": 2}, ranks=[2])
    with pytest.raises(CaptureError, match="module or callable"):
        capture_ranks(lambda mesh, rank: 3, {"tp": 2})
