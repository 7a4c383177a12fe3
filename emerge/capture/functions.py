"""Calls that capture sees above autograd: attention and dropout stay whole, Python's looks at values are refused."""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from emerge.capture.base import Substitution
from emerge.capture.recorder import Recorder, is_plain, iter_tensors
from emerge.graph.model import Arg

DROPOUT = Substitution(
    "torch.nn.functional.dropout",
    "torch.native_dropout",
    "one operator with its mask, as on a GPU, instead of the CPU's parts of it",
)


class Functions(TorchFunctionMode):
    """Sees calls above autograd: keeps attention whole, and refuses Python's looks at tensor values."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        recorder = self.recorder
        if recorder.paused:
            return func(*args, **kwargs)
        if func in _ATTENTION:
            return self._attention(func, args, kwargs)
        if func is torch.nn.functional.dropout and bool(bind_dropout(args, kwargs)[2]):
            # The CPU writes dropout as a random mask and a division; GPUs have one operator with a backward of its own.
            if DROPOUT not in recorder.substitutions:
                recorder.substitutions.append(DROPOUT)
            value, p, _ = bind_dropout(args, kwargs)
            return torch.native_dropout(value, p, True)[0]
        if func in _PYTHON_READS and args and isinstance(args[0], torch.Tensor):
            recorder.refuse_reading(args[0], f"Tensor.{func.__name__}")
        return func(*args, **kwargs)

    def _attention(self, func: Any, args: Any, kwargs: Any) -> Any:
        recorder = self.recorder
        tensors = list(iter_tensors((args, kwargs)))
        gradients = torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
        if gradients or not all(is_plain(t) for t in tensors):
            return func(*args, **kwargs)
        bound = dict(zip(("query", "key", "value", "attn_mask", "dropout_p", "is_causal"), args)) | kwargs
        place = recorder._place()
        given: dict[str, Arg] = {}
        for key, default in (
            ("attn_mask", None),
            ("dropout_p", 0.0),
            ("is_causal", False),
            ("scale", None),
            ("enable_gqa", False),
        ):
            value = bound.get(key, default)
            if value is not default and value != default if not isinstance(value, torch.Tensor) else True:
                given[key] = recorder.encode(value)
        operands = [recorder.encode(bound[k]) for k in ("query", "key", "value")]
        with recorder.pause():
            out = func(*args, **kwargs)
        random = bool(given.get("dropout_p"))
        op = "aten.scaled_dot_product_attention.default"
        positional: list[Arg] = [
            given.pop("attn_mask", None),
            given.pop("dropout_p", 0.0),
            given.pop("is_causal", False),
        ]
        name = recorder.add_node(op, [*operands, *positional], given, place, out, taint=random)
        recorder.memory.define(out, name, fresh=True)
        return out


def bind_dropout(args: Any, kwargs: Any) -> tuple[Any, float, bool]:
    """Input, probability and whether it is active, of a call of ``torch.nn.functional.dropout``."""
    bound = {"p": 0.5, "training": True, "inplace": False}
    bound |= dict(zip(("input", "p", "training", "inplace"), args)) | kwargs
    return bound["input"], float(bound["p"]), bool(bound["training"]) and not bound["inplace"]


_ATTENTION = {
    torch.nn.functional.scaled_dot_product_attention,
    torch.ops.aten.scaled_dot_product_attention.default,  # in exported programs
}
_PYTHON_READS = {
    torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.__array__, torch.Tensor.item, torch.Tensor.__bool__,
    torch.Tensor.__int__, torch.Tensor.__float__, torch.Tensor.__index__,
}  # fmt: skip
