"""Programs for tests/capture/test_pipeline.py: pipelines by hand and by PyTorch's schedules, data parallelism, wrong twins."""

from __future__ import annotations

from collections.abc import Callable
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

    def __init__(self, rank: int, size: int, micro: int, peer: Callable[[int], int], order: list[int]) -> None:
        super().__init__()
        self.rank, self.size, self.micro, self.peer, self.order = rank, size, micro, peer, order
        each = LAYERS // size
        self.net = Net(range(rank * each, (rank + 1) * each))

    def forward(self, x: torch.Tensor) -> Any:
        outputs: list[Any] = [None] * self.micro
        for i in range(self.micro):
            if self.rank > 0:
                part = torch.empty(BATCH // self.micro, HIDDEN)
                dist.recv(part, self.rank - 1)
            else:
                part = x.chunk(self.micro)[i]
            part = self.net(part)
            if self.rank < self.size - 1:
                dist.send(part, self.peer(self.rank))
            outputs[self.order[i]] = part
        return torch.cat(outputs) if self.rank == self.size - 1 else None

    def named_parameters(self, *args: Any, **kwargs: Any) -> Any:
        """The names of the reference."""
        return self.net.named_parameters(*args, **kwargs)


def pipeline(mesh: Any, rank: int, micro: int = 2, wrong: str = "") -> Any:
    """A forward pass by blocking send and receive; ``wrong``: ``order`` or ``peer``."""
    order = list(range(micro))
    stage = Stage(rank, mesh.size(), micro, lambda r: r + (2 if wrong == "peer" and r == 0 else 1),
                  order[::-1] if wrong == "order" else order)  # fmt: skip
    return stage, {"x": torch.zeros(BATCH, HIDDEN)}
