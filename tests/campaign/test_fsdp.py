"""FSDP2 (``fully_shard``) with its own hooks, captured rank by rank, against the sequential model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import emerge

torch = pytest.importorskip("torch", reason="capturing live programs needs torch")
fsdp = pytest.importorskip("torch.distributed.fsdp")
dist = pytest.importorskip("torch.distributed")
if not hasattr(fsdp, "fully_shard"):
    pytest.skip("this torch has no fully_shard", allow_module_level=True)

nn = torch.nn


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(12, 24), nn.Linear(24, 12, bias=False)

    def forward(self, x: Any) -> Any:
        return x + self.down(torch.relu(self.up(x)))


class Net(nn.Module):
    """Two blocks of three parameters each, which travel in one buffer, and an embedding of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(5, 12)
        self.blocks = nn.ModuleList([Block(), Block()])

    def forward(self, x: Any) -> Any:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return x


INPUTS = (torch.zeros(3, 5),)


def sharded(gather: Any = None, **options: Any) -> Callable[[Any, int], Any]:
    def build(mesh: Any, rank: int) -> Any:
        net = Net()
        for block in net.blocks:
            fsdp.fully_shard(block, mesh=mesh, **options)
        fsdp.fully_shard(net, mesh=mesh, **options)
        if gather is not None:
            net.blocks[1].set_custom_all_gather(gather())
        return net, INPUTS

    return build


class Gather:
    """A gather by hand."""

    def allocate(self, size: Any, *, dtype: Any, device: Any) -> Any:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Any, input_tensor: Any, group: Any, async_op: bool = False) -> Any:
        parts = [torch.empty_like(input_tensor) for _ in range(group.size())]
        dist.all_gather(parts, input_tensor, group=group)
        self.write(output_tensor, parts)

    def write(self, output: Any, parts: list[Any]) -> None:
        output.copy_(torch.cat(parts))


class Reversed(Gather):
    def write(self, output: Any, parts: list[Any]) -> None:
        output.copy_(torch.cat(parts[::-1]))


class OwnShardOnly(Gather):
    def __call__(self, output_tensor: Any, input_tensor: Any, group: Any, async_op: bool = False) -> Any:
        output_tensor.copy_(torch.cat([input_tensor] * group.size()))


@pytest.mark.parametrize("mesh", [{"dp": 2}, {"dp": 3}, {"dp": 4}, {"replicate": 2, "shard": 2}])
def test_fully_shard_is_proved(mesh: dict[str, int]) -> None:
    result = emerge.compare(Net(), sharded(), inputs=INPUTS, mesh=mesh)
    assert result.verdict == "EQUIVALENT", result.reason
    origins = {r.reference: r.origin for r in result.input_relations}
    assert origins.pop("x") == "name"
    assert set(origins.values()) == {"placement"}


def test_a_gather_by_hand_in_rank_order_is_proved() -> None:
    result = emerge.compare(Net(), sharded(Gather), inputs=INPUTS, mesh={"dp": 2})
    assert result.verdict == "EQUIVALENT", result.reason


@pytest.mark.parametrize("gather", [Reversed, OwnShardOnly])
def test_a_wrong_gather_is_refuted_where_the_parameter_is_used(gather: Any) -> None:
    result = emerge.compare(Net(), sharded(gather), inputs=INPUTS, mesh={"dp": 2})
    assert result.verdict == "NOT_EQUIVALENT", result.reason
    first = result.findings[0]
    assert "test_fsdp.py" in (first.reference_source or "")
    assert first.reference_nodes[0] in ("addmm_2", "mm_1"), first  # of the block whose buffer is wrong


def test_parameters_taken_apart_in_another_order_are_refuted(monkeypatch: pytest.MonkeyPatch) -> None:
    from emerge.capture import fsdp as forms

    def swapped(
        all_gather_output: Any, all_gather_input_split_sizes: list[int], dim: int = 0, *, out: list[Any]
    ) -> None:
        sizes = all_gather_input_split_sizes
        start = sizes[0] if len(sizes) == 3 and sizes[0] == sizes[2] else 0  # the second block of the buffer first
        starts = [start, 0, start] if start else [sum(sizes[:i]) for i in range(len(sizes))]
        for target, size, at in zip(out, sizes, starts):
            target.copy_(torch.ops.aten.slice.Tensor(all_gather_output, dim, at, at + size))

    monkeypatch.setitem(forms._FORMS, "split_with_sizes_copy", swapped)
    result = emerge.compare(Net(), sharded(), inputs=INPUTS, mesh={"dp": 2})
    assert result.verdict == "NOT_EQUIVALENT", result.reason


def test_full_size_without_data() -> None:
    from emerge.capture.distributed import capture_ranks
    from emerge.capture.trace import capture

    ranks = capture_ranks(sharded(), {"dp": 2}, fake=True)
    result = emerge.compare(capture(Net(), INPUTS, fake=True), ranks)
    assert result.verdict == "EQUIVALENT", result.reason
