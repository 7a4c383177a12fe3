"""A small transformer, alone and as hand-written parallel programs with one fault switched on by name.

Every line that a fault lives in carries ``# fault: NAME``; where a fault is a missing or misplaced line, the mark stands
where the wrong value is made or first used. Tests look the marks up, so findings are checked to the line.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.nn.functional as F
from torch import nn

BATCH, SEQ, HIDDEN, HEADS, KV_HEADS, HEAD, INNER, VOCAB = 2, 12, 16, 8, 4, 6, 40, 28


def lines_of(fault: str) -> set[int]:
    """Lines of this file that carry the mark of a fault."""
    text = Path(__file__).read_text(encoding="utf-8").splitlines()
    marks = {i: line.partition("# fault: ")[2].replace(",", " ").split() for i, line in enumerate(text, 1)}
    return {i for i, names in marks.items() if fault in names}


class Norm(nn.Module):
    """RMS norm over the last axis."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(size))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight


def rotated(x: torch.Tensor, first: int) -> torch.Tensor:
    """Rotary positions on [batch, heads, seq, head]; the sequence starts at position ``first``."""
    frequency = 100.0 ** (-torch.arange(0, HEAD, 2) / HEAD)
    angle = (first + torch.arange(x.shape[2]))[:, None] * torch.cat((frequency, frequency))  # fault: rotary-offset
    left, right = x.chunk(2, -1)
    return x * angle.cos() + torch.cat((-right, left), -1) * angle.sin()


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Causal attention; every key head serves as many query heads as there are more of them."""
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)  # fault: kv-heads


def heads(x: torch.Tensor, count: int) -> torch.Tensor:
    return x.view(x.shape[0], x.shape[1], count, HEAD).transpose(1, 2)


class Sequential(nn.Module):
    """Embedding, one block of attention and gated MLP, and logits."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, HIDDEN)
        self.norm1, self.norm2, self.last = Norm(HIDDEN), Norm(HIDDEN), Norm(HIDDEN)
        self.q = nn.Linear(HIDDEN, HEADS * HEAD, bias=False)
        self.k, self.v = (nn.Linear(HIDDEN, KV_HEADS * HEAD, bias=False) for _ in range(2))
        self.o = nn.Linear(HEADS * HEAD, HIDDEN)
        self.gate, self.up = (nn.Linear(HIDDEN, INNER, bias=False) for _ in range(2))
        self.down = nn.Linear(INNER, HIDDEN)
        self.head = nn.Linear(HIDDEN, VOCAB, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        y = self.norm1(x)
        q, k, v = heads(self.q(y), HEADS), heads(self.k(y), KV_HEADS), heads(self.v(y), KV_HEADS)
        y = attend(rotated(q, 0), rotated(k, 0), v).transpose(1, 2).flatten(2)
        x = x + self.o(y)
        y = self.norm2(x)
        x = x + self.down(F.silu(self.gate(y)) * self.up(y))
        return self.head(self.last(x))


class Tensor(nn.Module):
    """The same under tensor parallelism: heads, inner features and the vocabulary divided over the ranks."""

    def __init__(self, group: Any, fault: str, other: Any = None) -> None:
        super().__init__()
        self.group, self.fault, self.other = group, fault, other
        self.n, self.rank = group.size(), group.rank()
        n = self.n
        self.embed = nn.Embedding(VOCAB // n, HIDDEN)
        self.norm1, self.norm2, self.last = Norm(HIDDEN), Norm(HIDDEN), Norm(HIDDEN)
        self.q = nn.Linear(HIDDEN, HEADS * HEAD // n, bias=False)
        self.k, self.v = (nn.Linear(HIDDEN, KV_HEADS * HEAD // n, bias=False) for _ in range(2))
        self.o = nn.Linear(HEADS * HEAD // n, HIDDEN)
        self.gate, self.up = (nn.Linear(HIDDEN, INNER // n, bias=False) for _ in range(2))
        self.down = nn.Linear(INNER // n, HIDDEN)
        self.head = nn.Linear(HIDDEN, VOCAB // n, bias=False)

    def reduce(self, x: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(x, group=self.group)
        return x

    def embedded(self, ids: torch.Tensor) -> torch.Tensor:
        size = VOCAB // self.n
        first = 0 if self.fault == "vocab-offset" else self.rank * size
        outside = (ids < first) | (ids >= first + size)  # fault: vocab-offset
        rows = self.embed((ids - first).masked_fill(outside, 0))  # fault: vocab-offset
        return self.reduce(rows.masked_fill(outside[..., None], 0.0))  # fault: vocab-offset

    def attention(self, y: torch.Tensor) -> torch.Tensor:
        """Partial sums of the output projection, without its bias."""
        q = heads(self.q(y), HEADS // self.n)
        k, v = (heads(p(y), KV_HEADS // self.n) for p in (self.k, self.v))
        if self.fault == "kv-heads":
            k, v = (t.repeat(1, q.shape[1] // t.shape[1], 1, 1) for t in (k, v))  # fault: kv-heads
        y = attend(rotated(q, 0), rotated(k, 0), v)  # fault: kv-heads
        return F.linear(y.transpose(1, 2).flatten(2), self.o.weight)

    def inner(self, y: torch.Tensor) -> torch.Tensor:
        """Partial sums of the down projection, without its bias."""
        gate, up = self.gate(y), self.up(y)
        if self.fault == "gate-up":
            gate, up = up, gate
        return F.linear(F.silu(gate) * up, self.down.weight)  # fault: gate-up

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedded(ids)
        partial = self.attention(self.norm1(x))
        if self.fault == "no-reduce":
            x = x + partial + self.o.bias  # fault: no-reduce
        elif self.fault == "double-reduce":
            x = x + self.reduce(self.reduce(partial)) + self.o.bias  # fault: double-reduce
        elif self.fault == "bias-before":
            x = x + self.reduce(partial + self.o.bias)  # fault: bias-before
        elif self.fault == "residual-before":
            x = self.reduce(x + partial) + self.o.bias  # fault: residual-before
        elif self.fault == "wrong-group":
            dist.all_reduce(partial, group=self.other)  # fault: wrong-group
            x = x + partial + self.o.bias  # fault: wrong-group
        else:
            x = x + self.reduce(partial) + self.o.bias
        x = x + self.reduce(self.inner(self.norm2(x))) + self.down.bias
        return funcol.all_gather_tensor(self.head(self.last(x)), 2, self.group)


class Sequence(Tensor):
    """Tensor parallel, and between the sharded layers the sequence is divided over the ranks (sequence parallel)."""

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """[batch, block, hidden] -> [batch, seq, hidden]."""
        blocks = [torch.empty_like(x) for _ in range(self.n)]
        dist.all_gather(blocks, x.contiguous(), group=self.group)
        if self.fault == "gather-order":
            return torch.cat(blocks[::-1], 1)  # fault: gather-order
        return torch.cat(blocks, 1)

    def scatter(self, x: torch.Tensor) -> torch.Tensor:
        """Partial sums [batch, seq, hidden] -> [batch, block, hidden]."""
        return funcol.reduce_scatter_tensor(x, "sum", 1, self.group)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedded(ids).chunk(self.n, 1)[self.rank]
        y = self.gather(self.norm1(x))
        x = x + self.scatter(self.attention(y)) + self.o.bias
        x = x + self.scatter(self.inner(self.gather(self.norm2(x)))) + self.down.bias
        return funcol.all_gather_tensor(self.head(self.gather(self.last(x))), 2, self.group)


class Positions(nn.Module):
    """Rotary attention over [batch, seq, hidden]; under context parallelism every rank holds a block of the sequence."""

    def __init__(self, group: Any = None, fault: str = "") -> None:
        super().__init__()
        self.group, self.fault = group, fault
        self.q, self.k, self.v = (nn.Linear(HIDDEN, KV_HEADS * HEAD, bias=False) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        block = x.shape[1]
        first = self.group.rank() * block if self.group is not None else 0
        q, k, v = (heads(p(x), KV_HEADS) for p in (self.q, self.k, self.v))
        at = 0 if self.fault == "rotary-offset" else first
        q, k = rotated(q, at), rotated(k, at)  # fault: rotary-offset
        if self.group is not None:
            dim = 0 if self.fault == "gather-dim" else 2
            k, v = (funcol.all_gather_tensor(t, dim, self.group) for t in (k, v))  # fault: gather-dim
            if self.fault == "gather-dim":
                n = self.group.size()
                k, v = (t.chunk(n)[0].repeat(1, 1, n, 1) for t in (k, v))  # fault: gather-dim
        seen = torch.arange(k.shape[2]) <= first + torch.arange(block)[:, None]
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=seen)  # fault: gather-dim
        return y.transpose(1, 2).flatten(2)


class FusedQKV(nn.Module):
    """Attention with one weight [q; k; v]; the parallel program cuts its heads out of the whole weight."""

    def __init__(self, group: Any = None, fault: str = "") -> None:
        super().__init__()
        self.group, self.fault = group, fault
        self.weight = nn.Parameter(torch.randn(3 * KV_HEADS * HEAD, HIDDEN))

    def own(self) -> torch.Tensor:
        if self.group is None:
            return self.weight
        n, rank = self.group.size(), self.group.rank()
        if self.fault == "fused-qkv":
            return self.weight.chunk(n)[rank]  # fault: fused-qkv
        return torch.cat([part.chunk(n)[rank] for part in self.weight.chunk(3)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = F.linear(x, self.own()).chunk(3, -1)  # fault: fused-qkv
        count = q.shape[-1] // HEAD
        y = attend(*(heads(t, count) for t in (q, k, v))).transpose(1, 2).flatten(2)
        return y if self.group is None else funcol.all_gather_tensor(y, 2, self.group)


class ShardedNorm(nn.Module):
    """A norm of hidden states; in the parallel program they are divided over the axis that is normalised."""

    def __init__(self, group: Any = None, fault: str = "") -> None:
        super().__init__()
        self.group, self.fault = group, fault
        self.weight = nn.Parameter(torch.rand(HIDDEN // (group.size() if group is not None else 1)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mean = x.pow(2).sum(-1, keepdim=True)
        if self.group is not None and self.fault != "norm":
            dist.all_reduce(mean, group=self.group)
        size = x.shape[-1] if self.fault == "norm" or self.group is None else x.shape[-1] * self.group.size()
        return x * torch.rsqrt(mean / size + 1e-6) * self.weight  # fault: norm


class Experts(nn.Module):
    """Every token goes to its best two experts; in the parallel program every rank holds some of them."""

    def __init__(self, group: Any = None, fault: str = "") -> None:
        super().__init__()
        self.group, self.fault = group, fault
        self.router = nn.Linear(HIDDEN, KV_HEADS, bias=False)
        count = KV_HEADS // (group.size() if group is not None else 1)
        self.up = nn.Parameter(torch.randn(count, HIDDEN, INNER))
        self.down = nn.Parameter(torch.randn(count, INNER, HIDDEN))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, chosen = self.router(x).softmax(-1).topk(2, -1)
        share = ((chosen[..., None] == torch.arange(KV_HEADS)) * weights[..., None]).sum(-2)
        count = self.up.shape[0]
        if self.group is not None:
            n, rank = self.group.size(), self.group.rank()
            if self.fault == "expert-ids":
                share = share[..., rank::n]  # fault: expert-ids
            else:
                share = share[..., rank * count : (rank + 1) * count]
        inner = F.silu(torch.einsum("bsh,ehf->bsef", x, self.up))
        y = torch.einsum("bsef,efh,bse->bsh", inner, self.down, share)  # fault: expert-ids
        if self.group is not None:
            dist.all_reduce(y, group=self.group)
        return y


class Loss(nn.Module):
    """Mean of squares over a batch; in the parallel program the batch is divided over the ranks."""

    def __init__(self, group: Any = None, fault: str = "") -> None:
        super().__init__()
        self.group, self.fault = group, fault

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        loss = x.pow(2).mean()  # fault: mean-scale
        if self.group is not None:
            dist.all_reduce(loss, group=self.group)  # fault: mean-scale
            if self.fault != "mean-scale":
                loss = loss / self.group.size()
        return loss


def ids() -> torch.Tensor:
    return torch.zeros(BATCH, SEQ, dtype=torch.int64)


def sequential() -> Any:
    return Sequential(), (ids(),)


def tensor(mesh: Any, rank: int, fault: str = "") -> Any:
    return Tensor(mesh.get_group("tp"), fault), (ids(),)


def tensor_and_data(mesh: Any, rank: int, fault: str = "") -> Any:
    """Tensor parallel on a mesh with a second axis, over which the batch is divided."""
    n = mesh.size(0)
    return Tensor(mesh.get_group("tp"), fault, mesh.get_group("dp")), (ids()[: BATCH // n],)


def sequence(mesh: Any, rank: int, fault: str = "") -> Any:
    return Sequence(mesh.get_group("tp"), fault), (ids(),)


SMALL = {"positions": Positions, "fused": FusedQKV, "norm": ShardedNorm, "experts": Experts, "loss": Loss}
#: Which dimension of the input [batch, seq, hidden] the parallel program has a block of.
DIVIDED = {"positions": 1, "norm": 2, "loss": 0}


def small(model: str = "loss") -> Any:
    return SMALL[model](), (torch.randn(BATCH, SEQ, HIDDEN),)


def small_parallel(mesh: Any, rank: int, model: str = "loss", fault: str = "") -> Any:
    group = mesh.get_group("tp")
    shape = [BATCH, SEQ, HIDDEN]
    if model in DIVIDED:
        shape[DIVIDED[model]] //= group.size()
    return SMALL[model](group, fault), (torch.randn(*shape),)


#: Input relations of :func:`tensor_and_data`: two axes of one size could divide a dimension, so they have to be said.
TENSOR_AND_DATA = {
    "ids": "(dp b) s ~ b s",
    **{f"{n}.weight": "(tp o) i ~ o i" for n in ("embed", "q", "k", "v", "gate", "up", "head")},
    **{f"{n}.weight": "o (tp i) ~ o i" for n in ("o", "down")},
    **{f"{n}.weight": "i ~ i" for n in ("norm1", "norm2", "last")},
    **{f"{n}.bias": "o ~ o" for n in ("o", "down")},
}
