"""Captures one module or function as a graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from emerge.graph.model import Graph


def capture(
    target: Any,
    args: Any = (),
    kwargs: dict[str, Any] | None = None,
    *,
    name: str = "captured",
    mode: str = "eval",
    fake: bool = False,
    loss: Callable[[Any], Any] | None = None,
) -> Graph:
    """The graph of a module or function on example inputs.

    Parameters and persistent buffers are inputs labelled by their qualified names, example inputs by argument names.
    In-place writes become values; buffers and inputs that the program writes are further outputs. Outputs are named
    in ``graph.extra["output_labels"]``.

    Args:
        target: ``nn.Module`` or callable. args: example inputs: a tuple, one tensor, or a dict by argument name.
        mode: ``eval``, or ``train``: dropout active, and for a module the gradients of its loss as further outputs.
        fake: run without data (all tensors of the module and the inputs are replaced by ones without values).
        loss: result -> scalar, in train mode; default: ``result.loss``, or the result itself.

    Raises:
        CaptureError: the program fails, branches on values of its inputs, or does what a graph cannot hold.
    """
    from emerge.capture.session import Program, Settings, program_of, run_capture

    program: Program = program_of((target, args, kwargs or {}))
    if not fake:
        return run_capture(lambda: program, Settings(name, mode, False, loss=loss))
    from emerge.capture.fakes import without_data

    with without_data(program) as (light, mode_object):
        return run_capture(lambda: light, Settings(name, mode, True, loss=loss), fake_mode=mode_object)
