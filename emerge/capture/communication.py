"""Communication as graph nodes: process groups by mesh axis, and eager ``torch.distributed`` calls as functional ops.

Eager collectives are caught where they dispatch (``c10d::allreduce_`` and so on), below every Python name they may
have been imported under. They count as complete when they are issued: ``async_op=True`` returns finished work.
"""

from __future__ import annotations

from itertools import combinations
from math import prod
from typing import TYPE_CHECKING, Any

import torch

from emerge.capture.base import CaptureError, Place
from emerge.capture.memory import TypeOnly
from emerge.graph.model import Arg, Ref

if TYPE_CHECKING:
    from emerge.capture.recorder import Recorder

#: ``c10d::ReduceOp`` as integers, in the order of torch's ``ReduceOp::RedOpType``.
_REDUCTIONS = ("sum", "avg", "product", "min", "max", "band", "bor", "bxor")
_FUNCOL = "_c10d_functional"


class Groups:
    """Names of the process groups of one rank, for graph files.

    torch's own names are local to a process. A group that lies along mesh axes is named after them (``tp``,
    ``dp_tp``, ``world``); any other after its ranks. Groups of equal ranks stay apart in order of creation.
    """

    def __init__(self, mesh: dict[str, int], rank: int, world: int) -> None:
        self.mesh, self.rank, self.world = mesh, rank, world
        self.used: dict[str, list[list[int]]] = {}
        self._names: dict[str, str] = {}

    def note(self, args: list[Arg]) -> None:
        """Replaces torch's group names among the arguments of a collective by ours, in place."""
        for i, arg in enumerate(args):
            if isinstance(arg, str) and arg not in _REDUCTIONS:
                args[i] = self.name(arg)

    def name(self, group: Any) -> str:
        """The graph's name of a process group (given as such, or by torch's name)."""
        import torch.distributed as dist
        import torch.distributed.distributed_c10d as c10d

        if isinstance(group, torch.ScriptObject):
            group = dist.ProcessGroup.unbox(group)
        torch_name = group if isinstance(group, str) else group.group_name
        if torch_name not in self._names:
            resolved = c10d._resolve_process_group(torch_name) if isinstance(group, str) else group
            ranks = tuple(dist.get_process_group_ranks(resolved))
            twins = [n for n in _groups_in_order() if tuple(n[1]) == ranks]
            position = next((i for i, n in enumerate(twins) if n[0] == torch_name), 0)
            name, lists = self._describe(ranks)
            if position:
                name = f"{name}#{position + 1}"
            self._names[torch_name] = name
            self.used[name] = lists
        return self._names[torch_name]

    def _describe(self, ranks: tuple[int, ...]) -> tuple[str, list[list[int]]]:
        axes = list(self.mesh)
        for count in range(1, len(axes) + 1):
            for chosen in combinations(axes, count):
                lists = axis_groups(self.mesh, chosen)
                if list(ranks) in lists:
                    return "_".join(chosen), lists
        if ranks == tuple(range(self.world)):
            return "world", [list(ranks)]
        return "ranks_" + "_".join(map(str, ranks)), [list(ranks)]


def _groups_in_order() -> list[tuple[str, list[int]]]:
    """(torch's name, ranks) of all groups of this process, in order of creation."""
    import torch.distributed as dist
    import torch.distributed.distributed_c10d as c10d

    return [(pg.group_name, dist.get_process_group_ranks(pg)) for pg in c10d._world.pg_map]


def axis_groups(mesh: dict[str, int], axes: tuple[str, ...]) -> list[list[int]]:
    """The rank lists that vary along ``axes`` only; ranks are row-major over the mesh."""
    names, sizes = list(mesh), list(mesh.values())
    steps = {a: prod(sizes[i + 1 :]) for i, a in enumerate(names)}
    groups: dict[tuple[int, ...], list[int]] = {}
    for rank in range(prod(sizes)):
        key = tuple(rank // steps[a] % mesh[a] for a in names if a not in axes)
        groups.setdefault(key, []).append(rank)
    return list(groups.values())


def record_c10d(rec: Recorder, func: Any, args: Any, kwargs: Any, place: Place) -> Any:
    """Runs an eager collective on the fake group and records its functional form.

    Raises:
        CaptureError: an operator without functional form.
    """
    import torch.distributed as dist

    base = func._schema.name.split("::")[1]
    names = [a.name for a in func._schema.arguments]
    a = dict(zip(names, args)) | dict(kwargs)
    group = dist.ProcessGroup.unbox(a["process_group"])
    handler = _HANDLERS.get(base)
    if handler is not None:
        handler(_Call(rec, a, group, place))
    elif rec.building:  # weights are often scattered while a model is built, and become inputs afterwards
        _unknown(rec, func, a, place)
    else:
        raise CaptureError(UNSUPPORTED.format(base))
    with rec.pause():
        return func(*args, **kwargs)


UNSUPPORTED = (
    "c10d::{} has no form in a graph file; "
    "use all_reduce, all_gather, reduce_scatter, all_to_all, broadcast, send or recv"
)


def _unknown(rec: Recorder, func: Any, args: dict[str, Any], place: Place) -> None:
    """Everything the collective writes is unknown afterwards; a graph that needs it is refused."""
    for parameter in func._schema.arguments:
        if parameter.alias_info is None or not parameter.alias_info.is_write:
            continue
        pending = [args.get(parameter.name)]
        while pending:
            value = pending.pop()
            if isinstance(value, (list, tuple)):
                pending.extend(value)
            elif isinstance(value, torch.Tensor):
                rec.name_of(value)
                rec.memory.write(value, rec.add_node(str(func), [], {}, place, value, taint=True), place)


class _Call:
    """One eager collective."""

    def __init__(self, rec: Recorder, args: dict[str, Any], group: Any, place: Place) -> None:
        self.rec, self.args, self.group, self.place = rec, args, group, place
        self.size: int = group.size()
        self.name = rec.groups.name(group)

    def reduction(self) -> str:
        return _REDUCTIONS[int(self.args["reduce_op"].op())]

    def issue(self, op: str, args: list[Arg], dtype: Any, shape: Any) -> str:
        """The collective and the wait for it."""
        like = TypeOnly(dtype, tuple(int(s) for s in shape))
        name = self.rec.add_node(f"{_FUNCOL}.{op}.default", args, {}, self.place, like, taint=True)
        return self.rec.add_node(f"{_FUNCOL}.wait_tensor.default", [Ref(name)], {}, self.place, like)

    def ref(self, tensor: Any) -> Ref:
        return Ref(self.rec.name_of(tensor))

    def view(self, name: str, dtype: Any, have: Any, want: Any) -> str:
        if tuple(have) == tuple(want):
            return name
        return self.rec.add_node(
            "aten.view.default", [Ref(name), [int(s) for s in want]], {}, self.place, TypeOnly(dtype, tuple(want))
        )

    def write(self, tensor: Any, name: str, have: Any) -> None:
        self.rec.name_of(tensor)
        self.rec.memory.write(tensor, self.view(name, tensor.dtype, have, tensor.shape), self.place)

    def cat(self, tensors: list[Any]) -> tuple[str, tuple[int, ...]]:
        """Tensors of one shape concatenated along dimension 0 (scalars as one element each)."""
        first = tensors[0]
        shape = tuple(first.shape) or (1,)
        refs: list[Arg] = [
            Ref(self.view(self.rec.name_of(t), t.dtype, t.shape, tuple(t.shape) or (1,))) for t in tensors
        ]
        total = (sum((tuple(t.shape) or (1,))[0] for t in tensors), *shape[1:])
        name = self.rec.add_node("aten.cat.default", [refs], {}, self.place, TypeOnly(first.dtype, total))
        return name, total

    def scatter_rows(self, name: str, tensors: list[Any], dtype: Any) -> None:
        """Consecutive rows of a value become the new values of tensors."""
        start = 0
        for t in tensors:
            rows = (tuple(t.shape) or (1,))[0]
            shape = (rows, *tuple(t.shape)[1:])
            piece = self.rec.add_node(
                "aten.slice.Tensor", [Ref(name), 0, start, start + rows], {}, self.place, TypeOnly(dtype, shape)
            )
            self.write(t, piece, shape)
            start += rows


def _all_reduce(c: _Call) -> None:
    for t in c.args["tensors"]:
        c.write(t, c.issue("all_reduce", [c.ref(t), c.reduction(), c.name], t.dtype, t.shape), t.shape)


def _gather_base(c: _Call) -> None:
    out, x = c.args["output_tensor"], c.args["input_tensor"]
    shape = (c.size * x.shape[0], *x.shape[1:]) if x.dim() else (c.size,)
    c.write(out, c.issue("all_gather_into_tensor", [c.ref(x), c.size, c.name], x.dtype, shape), shape)


def _gather_list(c: _Call) -> None:
    for outs, x in zip(c.args["output_tensors"], c.args["input_tensors"]):
        _check_equal(outs, x)
        shape = (c.size * x.shape[0], *x.shape[1:]) if x.dim() else (c.size,)
        c.scatter_rows(c.issue("all_gather_into_tensor", [c.ref(x), c.size, c.name], x.dtype, shape), outs, x.dtype)


def _scatter_base(c: _Call) -> None:
    out, x = c.args["output_tensor"], c.args["input_tensor"]
    name, rows = c.rec.name_of(x), (c.size * out.shape[0] if out.dim() else c.size)
    flat = (rows, *out.shape[1:])
    name = c.view(name, x.dtype, x.shape, flat)
    result = (rows // c.size, *out.shape[1:])
    c.write(out, c.issue("reduce_scatter_tensor", [Ref(name), c.reduction(), c.size, c.name], x.dtype, result), result)


def _scatter_list(c: _Call) -> None:
    for out, xs in zip(c.args["output_tensors"], c.args["input_tensors"]):
        for x in xs:
            _check_equal([x], out)
        name, _ = c.cat(list(xs))
        result = tuple(out.shape) or (1,)
        c.write(
            out, c.issue("reduce_scatter_tensor", [Ref(name), c.reduction(), c.size, c.name], out.dtype, result), result
        )


def _exchange_base(c: _Call) -> None:
    out, x = c.args["output"], c.args["input"]
    sizes: list[list[Arg]] = []
    for tensor, given in ((out, c.args["output_split_sizes"]), (x, c.args["input_split_sizes"])):
        sizes.append([int(s) for s in given] if given else [tensor.shape[0] // c.size] * c.size)
    c.write(out, c.issue("all_to_all_single", [c.ref(x), sizes[0], sizes[1], c.name], x.dtype, out.shape), out.shape)


def _exchange_list(c: _Call) -> None:
    outs, xs = list(c.args["output_tensors"]), list(c.args["input_tensors"])
    name, shape = c.cat(xs)
    sizes: list[list[Arg]] = [[(tuple(t.shape) or (1,))[0] for t in ts] for ts in (outs, xs)]
    result = (sum((tuple(t.shape) or (1,))[0] for t in outs), *shape[1:])
    c.scatter_rows(
        c.issue("all_to_all_single", [Ref(name), sizes[0], sizes[1], c.name], xs[0].dtype, result), outs, xs[0].dtype
    )


def _broadcast(c: _Call) -> None:
    for t in c.args["tensors"]:
        source = int(c.args["root_rank"])
        c.write(t, c.issue("broadcast", [c.ref(t), source, c.name], t.dtype, t.shape), t.shape)


def _send(c: _Call) -> None:
    import torch.distributed as dist

    for t in c.args["tensors"]:
        peer = dist.get_global_rank(c.group, int(c.args["dst"]))
        args: list[Arg] = [c.ref(t), peer, int(c.args["tag"]), c.name]
        c.rec.add_node(f"{_FUNCOL}.isend.default", args, {}, c.place, TypeOnly(t.dtype, (0,)), taint=True)


def _receive(c: _Call) -> None:
    import torch.distributed as dist

    for t in c.args["tensors"]:
        peer = dist.get_global_rank(c.group, int(c.args["src"]))
        c.write(t, c.issue("irecv", [c.ref(t), peer, int(c.args["tag"]), c.name], t.dtype, t.shape), t.shape)


def _coalesced_reduce(c: _Call) -> None:
    _all_reduce(c)


def _coalesced_gather(c: _Call) -> None:
    for out, x in zip(c.args["outputs"], c.args["inputs"]):
        c.args["output_tensor"], c.args["input_tensor"] = out, x
        _gather_base(c)


def _coalesced_scatter(c: _Call) -> None:
    for out, x in zip(c.args["outputs"], c.args["inputs"]):
        c.args["output_tensor"], c.args["input_tensor"] = out, x
        _scatter_base(c)


def _nothing(c: _Call) -> None:
    """A barrier moves no data."""


def _check_equal(tensors: Any, like: Any) -> None:
    for t in tensors:
        if tuple(t.shape) != tuple(like.shape):
            raise CaptureError(
                f"a collective over tensors of different shapes {list(t.shape)} and {list(like.shape)}; pad them"
            )


_HANDLERS = {
    "allreduce_": _all_reduce,
    "allreduce_coalesced_": _coalesced_reduce,
    "_allgather_base_": _gather_base,
    "allgather_": _gather_list,
    "allgather_into_tensor_coalesced_": _coalesced_gather,
    "_reduce_scatter_base_": _scatter_base,
    "reduce_scatter_": _scatter_list,
    "reduce_scatter_tensor_coalesced_": _coalesced_scatter,
    "alltoall_base_": _exchange_base,
    "alltoall_": _exchange_list,
    "broadcast_": _broadcast,
    "send": _send,
    "recv_": _receive,
    "barrier": _nothing,
}
