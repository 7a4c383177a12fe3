"""Parameters that vLLM pads with zeros, written as what was loaded and the padding.

A padded parameter (a vocabulary rounded up) is no copy of a Transformers parameter. The graph then has the loaded part
as its input and makes the parameter from it: ``cat([loaded, zeros])``. Where the ranks hold different numbers of
loaded rows, the input is the whole Transformers parameter, the same on every rank, and a slice of the padded one is the
rank's part.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from emerge.capture.base import Substitution
from emerge.capture.vllm.boxes import ZERO, Box, Numbering
from emerge.graph.model import Arg, DType, Graph, Input, Node, Ref

PADDING = Substitution(
    "parameters that vLLM pads with zeros when it loads them",
    "their loaded part as input, and the padding as nodes of the graph",
    "what the padding holds is then known",
)


def write_padding(
    graphs: Sequence[Graph], numbering: Numbering, numbers: Sequence[dict[str, Any]], places: dict[str, str]
) -> None:
    """Rewrites padded inputs of all ranks' graphs, in place.

    Args:
        numbers: per rank, label -> element numbers. places: label -> ``file:line`` of its loader.
    """
    written = False
    for label in numbers[0]:
        mine = [per_rank[label] for per_rank in numbers]
        if not any(bool((n == ZERO).any()) for n in mine) or len({tuple(n.shape) for n in mine}) != 1:
            continue
        forms = _loaded_part(numbering, mine) or _whole(numbering, mine)
        if forms is None:
            continue
        dim, size, box = forms
        for graph in graphs:
            item = next((i for i in graph.inputs if i.label == label), None)
            if item is not None:
                _rewrite(graph, item, dim, size, box[graph.rank if len(graphs) > 1 else 0], places.get(label))
                written = True
    if written:
        for graph in graphs:
            graph.extra.setdefault("substitutions", []).append(PADDING.as_json())


_Form = tuple[int, int, list[Box]]


def _loaded_part(numbering: Numbering, mine: list[Any]) -> _Form | None:
    """Every rank holds the same number of loaded rows, then zeros: dimension, padded size, and the box of each rank."""
    boxes = [numbering.boxes(n) for n in mine]
    if any(len(b) != 2 or b[0].label is None or b[1].label is not None or b[1].code != ZERO for b in boxes):
        return None
    first = boxes[0][0]
    dims = [d for d, r in enumerate(first.local) if r != (0, mine[0].shape[d])]
    if len(dims) != 1 or any(b[0].local != first.local for b in boxes):
        return None
    return dims[0], int(mine[0].shape[dims[0]]), [b[0] for b in boxes]


def _whole(numbering: Numbering, mine: list[Any]) -> _Form | None:
    """The ranks' parts are equal blocks of one padded parameter: dimension, padded size, and the whole source."""
    labels = {b.label for n in mine for b in numbering.boxes(n) if b.label is not None}
    if len(labels) != 1:
        return None
    source = next(s for s in numbering.sources if s.label in labels)
    local = tuple(mine[0].shape)
    if len(local) != len(source.shape):
        return None
    dims = [d for d, (a, b) in enumerate(zip(local, source.shape)) if a != b]
    if len(dims) != 1:
        return None
    dim = dims[0]
    total = local[dim] * len(mine)
    if total < source.shape[dim]:
        return None
    whole = torch.arange(source.start, source.start + source.size).reshape(source.shape)
    rest = list(source.shape)
    rest[dim] = total - source.shape[dim]
    padded = torch.cat([whole, torch.full(rest, ZERO)], dim)
    if any(not torch.equal(part, n) for part, n in zip(padded.chunk(len(mine), dim), mine)):
        return None
    return dim, total, numbering.boxes(whole) * len(mine)


def _rewrite(graph: Graph, item: Input, dim: int, size: int, box: Box, place: str | None) -> None:
    names = {i.name for i in graph.inputs} | {n.name for n in graph.nodes}

    def name(suffix: str) -> str:
        found = f"{item.name}_{suffix}"
        while found in names:
            found += "_"
        names.add(found)
        return found

    if place is not None:
        graph.stacks.append([place])
    stack = len(graph.stacks) - 1 if place is not None else None
    local = list(item.shape)
    content = [b - a for a, b in box.local]
    module = (item.label or "").rpartition(".")[0] or None

    def node(suffix: str, op: str, args: list[Arg], kwargs: dict[str, Arg], shape: list[Any]) -> Node:
        return Node(
            name(suffix), op, args, kwargs, item.dtype, tuple(shape), source=place, code="load_weights", module=module,
            stack=stack,
        )  # fmt: skip

    gap: list[Arg] = [*content]
    gap[dim] = size - content[dim]
    zeros = node("zeros", "aten.full.default", [gap, 0], {"dtype": DType(item.dtype)}, gap)
    padded = [*content]
    padded[dim] = size
    added = [zeros, node("padded", "aten.cat.default", [[Ref(item.name), Ref(zeros.name)], dim], {}, padded)]
    if padded[dim] != local[dim]:
        low = graph.rank * int(local[dim])
        args: list[Arg] = [Ref(added[-1].name), dim, low, low + int(local[dim])]
        added.append(node("part", "aten.slice.Tensor", args, {}, local))
    new = added[-1].name
    for other in graph.nodes:
        other.args = [_renamed(a, item.name, new) for a in other.args]
        other.kwargs = {k: _renamed(v, item.name, new) for k, v in other.kwargs.items()}
    graph.outputs = [new if o == item.name else o for o in graph.outputs]
    graph.nodes[:0] = added
    item.shape = tuple(content)
    item.extra["loaded"] = [Box(tuple((0, n) for n in content), box.label, box.source, box.levels).as_json()]


def _renamed(arg: Arg, old: str, new: str) -> Arg:
    if isinstance(arg, Ref):
        return Ref(new) if arg.name == old else arg
    if isinstance(arg, list):
        return [_renamed(a, old, new) for a in arg]
    return arg
