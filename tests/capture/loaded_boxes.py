"""Parameters of a rank from those of the reference, by the boxes that the capture traced."""

from __future__ import annotations

from typing import Any

import torch

from emerge.graph.model import Graph


def box_values(box: dict[str, Any], source: Any) -> Any:
    """The values a box holds."""
    shape = [high - low for low, high in box["local"]]
    index = [torch.full(shape, low) for low, _ in box["at"]]
    for d, axis in enumerate(box["axes"]):
        if axis is None:
            continue
        rest = torch.arange(shape[d])
        for k, count, step in reversed([[axis, shape[d], 1]] if isinstance(axis, int) else axis):
            index[k] = index[k] + ((rest % count) * step).view([-1 if e == d else 1 for e in range(len(shape))])
            rest = rest // count
    return source[tuple(index)] if index else source


def load_by_boxes(reference: Graph, values: dict[str, Any], graph: Graph) -> dict[str, Any]:
    """Inputs of a rank; every element must be known."""
    by_label = {}
    for item in reference.inputs:
        for label in (item.label or item.name, *item.extra.get("aliases", ())):
            by_label[label] = values[item.name]
    out = {}
    for item in graph.inputs:
        if "loaded" not in item.extra:
            out[item.name] = by_label[item.label or item.name].reshape(item.shape)
            continue
        tensor = torch.full(item.shape, float("nan"), dtype=torch.float64)
        for box in item.extra["loaded"]:
            here = tuple(slice(a, b) for a, b in box["local"])
            if box.get("value") == "zero":
                tensor[here] = 0.0
            elif "of" in box and ("tokens" not in box or box["of"] in by_label):  # else of other tensors for the sequences
                tensor[here] = box_values(box, by_label[box["of"]])
        assert not tensor.isnan().any(), item.label
        out[item.name] = tensor.long() if item.dtype == "int64" else tensor
    return out
