"""What ``torch.compile`` makes of a program: its graph before and after AOTAutograd, decompositions and Inductor's passes.

>>> import torch, emerge
>>> from emerge.capture.compiled import compiled_graphs
>>> before, after = compiled_graphs(torch.nn.LayerNorm(8), (torch.randn(3, 8),))
>>> emerge.compare(before, after).verdict
'EQUIVALENT'
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch

from emerge.capture.base import CaptureError
from emerge.capture.session import relate_by_position
from emerge.capture.trace import capture
from emerge.graph.model import Graph


def compiled_graphs(
    target: Callable[..., Any],
    inputs: Sequence[Any],
    *,
    post_grad_passes: bool = True,
    change: Callable[[Any], Any] | None = None,
) -> tuple[Graph, Graph]:
    """The pre-grad and the post-grad graph of an inference call, with inputs of the same labels.

    Args:
        target: module or function. inputs: example inputs; parameters become inputs of both graphs.
        post_grad_passes: also run Inductor's passes; False: what AOTAutograd hands to Inductor.
        change: rewrites the post-grad ``GraphModule``, e.g. a pass of your own; it returns the module, or None where
            it worked in place.

    Raises:
        CaptureError: the program does not compile into one graph, or a pass fails.
    """
    from torch._functorch.aot_autograd import aot_module_simplified
    from torch._inductor.decomposition import select_decomp_table

    before: list[tuple[Any, Any]] = []
    after: list[Any] = []

    def backend(module: Any, example: Any) -> Any:
        before.append((module, tuple(example)))

        def keep(graph: Any, _: Any) -> Any:
            after.append(copy.deepcopy(graph))
            return graph

        return aot_module_simplified(
            module, example, fw_compiler=keep, inference_compiler=keep, decompositions=select_decomp_table()
        )

    torch._dynamo.reset()
    try:
        with torch.no_grad():
            torch.compile(target, backend=backend, dynamic=False, fullgraph=True)(*inputs)
    except Exception as error:
        raise CaptureError(f"torch.compile failed: {' '.join(str(error).split())[:300]}") from error
    finally:
        torch._dynamo.reset()
    if len(before) != 1 or len(after) != 1:
        raise CaptureError(f"expected one compiled graph, found {len(after)}; compare the parts one by one")
    (first, example), last = before[0], after[0]
    if post_grad_passes:
        _run_passes(last)
    if change is not None:
        last = change(last) or last
        last.recompile()
    graphs = capture(first, example, name="pre_grad"), capture(last, example, name="post_grad")
    relate_by_position((first, graphs[0]), (last, graphs[1]), example)
    return graphs


def _run_passes(graph: Any) -> None:
    """Inductor's passes after AOTAutograd, in place."""
    from torch._guards import detect_fake_mode
    from torch._inductor.fx_passes.post_grad import post_grad_passes
    from torch._inductor.virtualized import V

    values = [n.meta["val"] for n in graph.graph.nodes if n.meta.get("val") is not None]
    try:
        with V.set_fake_mode(detect_fake_mode(values)):
            post_grad_passes(graph, True)
    except Exception as error:
        raise CaptureError(f"a pass of Inductor failed: {' '.join(str(error).split())[:300]}") from error
