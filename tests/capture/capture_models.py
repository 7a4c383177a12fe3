"""Small models and the parallel versions of them that capture tests use; also named by ``python:`` specs."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import all_reduce as reduce_imported_earlier

HIDDEN, INNER, BATCH, SEQ = 12, 24, 2, 4


class MLP(nn.Module):
    """Two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(HIDDEN, INNER)
        self.down = nn.Linear(INNER, HIDDEN, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x)))


class ParallelMLP(nn.Module):
    """Megatron style: column-parallel, then row-parallel with an eager all-reduce."""

    def __init__(self, group: Any, how: str = "sum") -> None:
        super().__init__()
        self.group, self.how = group, how
        size = group.size()
        self.up = nn.Linear(HIDDEN, INNER // size)
        self.down = nn.Linear(INNER // size, HIDDEN, bias=False)
        for parameter, dim in ((self.up.weight, 0), (self.up.bias, 0), (self.down.weight, 1)):
            parameter.tensor_model_parallel, parameter.partition_dim = True, dim  # the marks Megatron leaves

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.down(torch.relu(self.up(x)))
        if self.how == "sum":
            dist.all_reduce(y, group=self.group)
        elif self.how == "imported":
            reduce_imported_earlier(y, group=self.group)
        elif self.how == "async":
            dist.all_reduce(y, group=self.group, async_op=True).wait()
        return y


def inputs() -> tuple[torch.Tensor]:
    return (torch.randn(BATCH, SEQ, HIDDEN),)


def mlp() -> Any:
    return MLP(), inputs()


def parallel_mlp(mesh: Any, rank: int, how: str = "sum") -> Any:
    return ParallelMLP(mesh.get_group("tp"), how), inputs()


def mlp_without_reduce(mesh: Any, rank: int) -> Any:
    return ParallelMLP(mesh.get_group("tp"), "none"), inputs()


class Block(nn.Module):
    """Norm, attention-free mixing and MLP with residuals: enough for a sequence-parallel plan."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.mlp = MLP()
        self.last = nn.LayerNorm(HIDDEN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(x + self.mlp(self.norm(x)))


def block() -> Any:
    return Block(), inputs()


def sequence_parallel_block(mesh: Any, rank: int) -> Any:
    """A DTensor plan: norms sequence parallel, MLP column- and row-parallel, result gathered."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        PrepareModuleOutput,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )  # fmt: skip

    model = Block()
    tp = mesh["tp"]
    parallelize_module(model, tp, PrepareModuleInput(input_layouts=(Replicate(),), desired_input_layouts=(Shard(1),)))
    plan = {
        "norm": SequenceParallel(),
        "mlp": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
        "mlp.up": ColwiseParallel(),
        "mlp.down": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
        "last": SequenceParallel(),
    }
    parallelize_module(model, tp, plan)
    gather = PrepareModuleOutput(output_layouts=(Shard(1),), desired_output_layouts=(Replicate(),))
    parallelize_module(model, tp, gather)
    return model, inputs()


def collective_zoo(mesh: Any, rank: int) -> Any:
    """Every eager collective once; each rank's result depends on all of them."""
    group = mesh.get_group("tp")
    n = group.size()

    def program(x: torch.Tensor) -> dict[str, torch.Tensor]:
        whole = torch.empty(n * x.shape[0], x.shape[1])
        dist.all_gather_into_tensor(whole, x, group=group)
        parts = [torch.empty_like(x) for _ in range(n)]
        dist.all_gather(parts, x * 2, group=group)
        mine = torch.empty(x.shape[0] // n, x.shape[1])
        dist.reduce_scatter_tensor(mine, x, group=group)
        listed = torch.empty_like(mine)
        dist.reduce_scatter(listed, list(x.chunk(n)), op=dist.ReduceOp.MAX, group=group)
        swapped = torch.empty_like(x)
        dist.all_to_all_single(swapped, x, group=group)
        sent = x.clone()
        dist.broadcast(sent, src=dist.get_global_rank(group, n - 1), group=group)
        peer, source = (rank + 1) % n, (rank - 1) % n
        received = torch.empty_like(x)
        work = dist.batch_isend_irecv([dist.P2POp(dist.isend, x, peer), dist.P2POp(dist.irecv, received, source)])
        for w in work:
            w.wait()
        dist.barrier()
        return {"whole": whole, "parts": torch.stack(parts), "mine": mine, "listed": listed, "swapped": swapped,
                "sent": sent, "received": received}  # fmt: skip

    return program, (torch.randn(6, 5),)
