"""Existing modules and inputs without their data, for captures of programs that were built elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree

from emerge.capture.session import Program


@contextmanager
def without_data(program: Program) -> Iterator[tuple[Program, Any]]:
    """The program with all tensors of its module and inputs replaced by fake ones; the module is restored after."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    known: dict[int, Any] = {}

    def convert(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        if id(value) not in known:
            known[id(value)] = mode.from_tensor(value)
        return known[id(value)]

    saved: list[tuple[dict[str, Any], str, Any]] = []
    target = program.target
    try:
        if isinstance(target, torch.nn.Module):
            for module in target.modules():
                for table in (module._parameters, module._buffers):
                    for key, value in table.items():
                        saved.append((table, key, value))
                        table[key] = convert(value)
        args, kwargs = _pytree.tree_map(convert, (program.args, program.kwargs))
        yield Program(target, args, kwargs), mode
    finally:
        for table, key, value in saved:
            table[key] = value
