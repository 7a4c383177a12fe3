"""Which sequences, tokens and heads of the reference the packed tensors of a vLLM capture hold.

Written into the graph as ``loaded`` of inputs and ``output_boxes``, in the form of the traced weights
(emerge/capture/loading.py). The reference may hold its sequences as rows of one tensor, or one tensor each
(``input_ids.0``): both are written, and the names that the reference has decide.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from emerge.capture.sequences import starts
from emerge.capture.vllm.spec import VllmSpec
from emerge.graph.model import Graph

Boxes = list[dict[str, Any]]


def cached_boxes(label: str, lengths: Sequence[int], heads: tuple[int, int], size: int) -> Boxes:
    """Cached keys or values [tokens, heads, size] against the reference's [batch, all heads, tokens, size].

    Args:
        label: with ``{}`` where the number of the sequence stands. lengths: tokens of every sequence.
        heads: the heads held here.
    """
    return _boxes(
        label.format(""), [label.format(f"{i}.") for i in range(len(lengths))], lengths,
        before=[list(heads)], after=[[0, size]],
    )  # fmt: skip


def describe_sequences(graph: Graph, spec: VllmSpec, layout: dict[str, Boxes]) -> None:
    """Writes what the inputs and outputs of the forward pass hold."""
    lengths = spec.seqs
    names = [str(i) for i in range(len(lengths))]
    for item in graph.inputs:
        if item.label in ("input_ids", "positions"):
            item.extra["loaded"] = _boxes(item.label, [f"{item.label}.{i}" for i in names], lengths)
        elif item.label in layout:
            item.extra["loaded"] = layout[item.label]
    boxes: dict[str, Boxes] = {}
    types = graph.types()
    for label, name in zip(graph.extra["output_labels"], graph.outputs):
        if name is None:
            continue
        if label in layout:
            boxes[label] = layout[label]
        else:
            rest = [[0, int(n)] for n in types[name].shape[1:]]
            boxes[label] = _boxes(label, [f"{label}.{i}" for i in names], lengths, after=rest)
    graph.extra["output_boxes"] = boxes


def _boxes(
    label: str, names: Sequence[str], lengths: Sequence[int], before: Sequence[list[int]] = (),
    after: Sequence[list[int]] = (),
) -> Boxes:  # fmt: skip
    """Boxes of one packed tensor [tokens, *before, *after] in tensors [rows, *before, tokens, *after].

    Args:
        label: the tensor with a row per sequence. names: the tensors of one row per sequence.
        before, after: ranges of the other dimensions in the reference.

    Beside what traced weights have, a box says which dimension of the reference runs along its ``tokens``: all of them
    must be held, but for what fills up the rows of shorter sequences.
    """
    at = 1 + len(before)  # where the reference has its tokens
    other = [*range(1, at), *range(at + 1, at + 1 + len(after))]
    rest = [[0, high - low] for low, high in (*before, *after)]
    rows, total = len(lengths), sum(lengths)
    out: Boxes = []
    if len(set(lengths)) == 1:
        tokens = [[0, rows, 1], [at, lengths[0], 1]]
        whole = [[0, rows], *before, [0, lengths[0]], *after]
        out.append({"of": label, "at": whole, "local": [[0, total], *rest], "axes": [tokens, *other], "tokens": at})
    for i, (first, n) in enumerate(zip(starts(tuple(lengths)), lengths)):
        local = [[first, first + n], *rest]
        here = [*before, [0, n], *after]
        if len(set(lengths)) > 1:  # rows of one length, filled up behind
            out.append({"of": label, "at": [[i, i + 1], *here], "local": local, "axes": [at, *other], "tokens": at})
        out.append({"of": names[i], "at": [[0, 1], *here], "local": local, "axes": [at, *other], "tokens": at})
    return out
