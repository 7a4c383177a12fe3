"""The copy operators of FSDP2 (``fully_shard``), spelled in ATen: its hooks run as they are, and what they copy is recorded.

Before a module runs, its parameters' shards are copied into one buffer, gathered, and copied out again into whole
parameters; after its backward the gradients take the same way back. The three operators that do the copying write
into views, so each is replaced by views and ``copy_``, which :mod:`emerge.capture.memory` turns into values.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import prod
from typing import TYPE_CHECKING, Any

import torch

from emerge.capture.base import CaptureError

if TYPE_CHECKING:
    from emerge.capture.recorder import Recorder

# Inside a dispatch composite operators arrive undivided, so the forms below are made of basic ones.
_ATEN = torch.ops.aten


def record_fsdp(rec: Recorder, func: Any, args: Any, kwargs: Any) -> Any:
    """Runs the ATen form of an ``fsdp::`` operator under the recorder.

    Raises:
        CaptureError: an operator this version of capture does not know.
    """
    base = func._schema.name.split("::")[1]
    form = _FORMS.get(base)
    if form is None:
        raise CaptureError(f"{func} has no form in a graph file; capture with another torch version")
    names = [a.name for a in func._schema.arguments]
    with rec:  # inside a dispatch the mode is off
        return form(**dict(zip(names, args)) | dict(kwargs))


def _copy_in(
    all_gather_inputs: list[Any], all_gather_output: Any, inp_split_sizes: list[int], all_gather_input_numel: int,
    rank: int,
) -> Any:  # fmt: skip
    start = all_gather_input_numel * rank
    own = _ATEN.slice.Tensor(all_gather_output, 0, start, start + all_gather_input_numel)
    own.copy_(torch.cat([_ATEN.view.default(t, [t.numel()]) for t in all_gather_inputs]))
    return own, all_gather_output


def _copy_out(all_gather_output: Any, all_gather_input_split_sizes: list[int], dim: int = 0, *, out: list[Any]) -> None:
    start = 0
    for target, size in zip(out, all_gather_input_split_sizes):
        target.copy_(_ATEN.slice.Tensor(all_gather_output, dim, start, start + size))
        start += size


def _chunk_cat(tensors: list[Any], dim: int, num_chunks: int, *, out: Any) -> None:
    rows = []
    for t in tensors:
        missing = -t.shape[dim] % num_chunks
        if missing:
            shape = list(t.shape)
            shape[dim] = missing
            t = torch.cat([t, torch.zeros(shape, dtype=t.dtype, device=t.device)], dim)
        whole = [*t.shape[:dim], num_chunks, prod(t.shape[dim:]) // num_chunks]
        rows.append(_ATEN.view.default(t if t.is_contiguous() else t.contiguous(), whole))
    out.copy_(_ATEN.view.default(torch.cat(rows, dim + 1), list(out.shape)))


_FORMS: dict[str, Callable[..., Any]] = {
    "all_gather_copy_in": _copy_in,
    "split_with_sizes_copy": _copy_out,
    "chunk_cat": _chunk_cat,
}


@contextmanager
def shards_without_data() -> Iterator[None]:
    """FSDP2 asks shards for their address, which tensors without data do not have; inside the block it does not."""
    try:
        module: Any = importlib.import_module("torch.distributed.fsdp._fully_shard._fsdp_param")
        cls = module.FSDPParam
        before = cls.reset_sharded_param
    except (ImportError, AttributeError):
        yield
        return
    cls.reset_sharded_param = lambda self: None
    try:
        yield
    finally:
        cls.reset_sharded_param = before
