"""Programs for tests/capture/test_pipeline.py: pipelines by hand and by PyTorch's schedules, data parallelism, wrong twins."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

BATCH, HIDDEN, LAYERS = 4, 8, 4


class Block(nn.Module):
    """A residual block."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + functional.silu(self.w(x))


class Net(nn.Module):
    """Some layers of the whole; those of a stage keep their number."""

    def __init__(self, layers: range = range(LAYERS)) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({str(i): Block() for i in layers})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers.values():
            x = layer(x)
        return x


def sequential() -> Any:
    """The reference: all layers."""
    return Net(), {"x": torch.zeros(BATCH, HIDDEN)}


class Stage(nn.Module):
    """The layers of one stage, with the messages around them, one microbatch after another."""

    def __init__(self, stage: int, size: int, micro: int, previous: int, following: int, wrong: str) -> None:
        super().__init__()
        self.stage, self.size, self.micro, self.previous, self.following = stage, size, micro, previous, following
        self.order = list(range(micro))[::-1] if wrong == "order" else list(range(micro))
        each, place = LAYERS // size, size - 1 - stage if wrong == "swapped" else stage
        self.net = Net(range(place * each, (place + 1) * each))

    def forward(self, x: torch.Tensor) -> Any:
        outputs: list[Any] = [None] * self.micro
        for i in range(self.micro):
            part = x.chunk(self.micro)[i]
            if self.stage > 0:
                part = torch.empty_like(part)
                dist.recv(part, self.previous)
            part = self.net(part)
            if self.stage < self.size - 1:
                dist.send(part, self.following)
            outputs[self.order[i]] = part
        return torch.cat(outputs) if self.stage == self.size - 1 else None

    def named_parameters(self, *args: Any, **kwargs: Any) -> Any:
        """The names of the reference."""
        return self.net.named_parameters(*args, **kwargs)


def pipeline(mesh: Any, rank: int, micro: int = 2, wrong: str = "") -> Any:
    """A forward pass by blocking send and receive, over the axis ``pp``; the batch is split over other axes.

    ``wrong``: ``order`` (of the microbatches in the result), ``peer`` (stage 0 sends to stage 2) or ``swapped`` (the
    stages hold each other's layers).
    """
    size, others = mesh.size(0), mesh.size() // mesh.size(0)
    following = rank + others * (2 if wrong == "peer" and rank < others else 1)
    stage = Stage(rank // others, size, micro, rank - others, following, wrong)
    return stage, {"x": torch.zeros(BATCH // others, HIDDEN)}


class _Vote:
    """The shape vote of a stage, answered here: the schedule reads it with ``.item()``, which has no value yet."""

    def item(self) -> int:
        return 1


def schedule(mesh: Any, rank: int, micro: int = 2, kind: str = "ScheduleGPipe") -> Any:
    """A forward pass of ``torch.distributed.pipelining``: its stages and schedule, with their messages."""
    from torch.distributed import pipelining

    size, each = mesh.size(), LAYERS // mesh.size()
    part = Net(range(rank * each, (rank + 1) * each))
    example = torch.zeros(BATCH // micro, HIDDEN)
    stage = pipelining.PipelineStage(
        part, rank, size, torch.device("cpu"), input_args=(example,), output_args=(example.clone(),)
    )
    for name in ("_warmup_forward_vote", "_warmup_backward_result"):
        if hasattr(stage, name):
            setattr(stage, name, lambda *args, **kwargs: _Vote())
    made = getattr(pipelining, kind)(stage, n_microbatches=micro)

    class Step(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.part = part

        def forward(self, x: torch.Tensor) -> Any:
            return made.eval(x) if rank == 0 else made.eval()

        def named_parameters(self, *args: Any, **kwargs: Any) -> Any:
            return part.named_parameters(*args, **kwargs)

    return Step(), {"x": torch.zeros(BATCH, HIDDEN)}


def loss_sequential() -> Any:
    """The reference of :func:`data_parallel`: the mean loss of the whole batch."""
    net = Net()

    class Step(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = net

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return functional.mse_loss(self.net(x), y)

    return Step(), {"x": torch.zeros(BATCH, HIDDEN), "y": torch.zeros(BATCH, HIDDEN)}


def data_parallel(mesh: Any, rank: int, how: str = "avg") -> Any:
    """Every rank its part of the batch; the losses are averaged: ``avg``, ``sum`` (wrong), ``divide`` or ``none``."""
    step, inputs = loss_sequential()
    size = mesh.size()

    class Step(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = step.net

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            loss = functional.mse_loss(self.net(x), y)
            if how == "divide":
                loss = loss / size
            if how != "none":
                dist.all_reduce(loss, dist.ReduceOp.AVG if how == "avg" else dist.ReduceOp.SUM)
            return loss

    return Step(), {k: v[: BATCH // size].clone() for k, v in inputs.items()}
