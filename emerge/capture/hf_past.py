"""Transformers models on sequences of different lengths, and after cached tokens.

Inputs are ``input_ids`` [batch, seq] and, with a past, ``past.L.key`` and ``past.L.value`` [batch, heads, past, size] of every
layer ``L``; outputs ``logits`` and ``present.L.key``, ``present.L.value``: the cache with the new tokens. With ``seqs`` the
model is run on one sequence after another, and every label gets the number of its sequence: ``input_ids.0``, ``past.0.L.key``,
``logits.0``, ``present.0.L.key``.
"""

from __future__ import annotations

import inspect
from types import MethodType
from typing import TYPE_CHECKING, Any

from emerge.capture.base import CaptureError
from emerge.capture.session import Program

if TYPE_CHECKING:
    from emerge.capture.hf import HFSpec

#: Of one layer or of all layers: ``{"0": {"key": [batch, heads, past, size], "value": ...}, ...}``.
Past = dict[str, dict[str, Any]]


def sequence_program(model: Any, spec: HFSpec) -> Program:
    """The model with its example inputs, for a spec with ``seqs`` or ``past``.

    Raises:
        CaptureError: the model caches something else than keys and values.
    """
    import torch

    def one(self: Any, ids: Any, past: Past | None, tokens: int) -> dict[str, Any]:
        cache = _cache(self, past, tokens) if past else None
        out = self(input_ids=ids, use_cache=cache is not None, return_dict=True, **_cached(self, cache), **spec.inputs)
        name = "logits" if hasattr(out, "logits") else "last_hidden_state"
        found = {name: getattr(out, name)}
        return found if past is None else {**found, "present": _content(cache, self)}

    def rows(self: Any, input_ids: Any, past: Past | None = None) -> Any:
        return one(self, input_ids, past, spec.past[0] if past else 0)

    def sequences(self: Any, input_ids: list[Any], past: list[Past] | None = None) -> Any:
        found = [
            one(self, ids, past[i], spec.past[i]) if past else one(self, ids, None, 0) for i, ids in enumerate(input_ids)
        ]
        return {key: [f[key] for f in found] for key in found[0]}

    def ids(batch: int, length: int) -> Any:
        return torch.zeros(batch, length, dtype=torch.int64)

    model.eval()  # a session only knows modules as such
    program: Any = sequences if spec.seqs else rows
    program.__wrapped__ = type(model).forward  # what is computed here has its place at the model's own forward
    program.__signature__ = inspect.signature(program, follow_wrapped=False)
    kwargs: dict[str, Any] = {"input_ids": [ids(1, n) for n in spec.seqs] or ids(spec.batch, spec.seq)}
    if spec.seqs and spec.past:
        kwargs["past"] = [_zeros(model, ids(1, n)) for n in spec.past]
    elif spec.past:
        kwargs["past"] = _zeros(model, ids(spec.batch, spec.past[0]))
    return Program(MethodType(program, model), (), kwargs)


def _zeros(model: Any, ids: Any) -> Past:
    """An empty past in the form in which the model caches such tokens."""
    from transformers import DynamicCache

    cache = DynamicCache(config=model.config)
    model(input_ids=ids, use_cache=True, return_dict=True, **_cached(model, cache))
    content = _content(cache, model)
    return {layer: {k: t.new_zeros(t.shape) for k, t in kept.items()} for layer, kept in content.items()}


def _cached(model: Any, cache: Any) -> dict[str, Any]:
    """The cache as an argument; newer versions of Transformers have another name for it."""
    name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    return {name: cache}


def _content(cache: Any, model: Any) -> Past:
    from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

    for number, layer in enumerate(cache.layers):
        if type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer):
            raise CaptureError(
                f"layer {number} of {type(model).__name__} caches a {type(layer).__name__}; a past is captured where "
                "every layer caches keys and values only; drop 'past'",
                "inputs",
            )
    return {
        str(i): {"key": layer.keys, "value": layer.values}
        for i, layer in enumerate(cache.layers)
        if layer.is_initialized
    }


def _cache(model: Any, past: Past, tokens: int) -> Any:
    """A cache after ``tokens`` tokens that holds ``past``.

    Layers are filled directly: ``update`` would join the past with an empty tensor first.
    """
    from transformers import DynamicCache

    cache = DynamicCache(config=model.config)
    for number, kept in past.items():
        layer: Any = cache.layers[int(number)]
        layer.lazy_initialization(kept["key"], kept["value"])
        layer.keys, layer.values = kept["key"], kept["value"]
        if layer.is_sliding:
            layer.cumulative_length = tokens
    return cache
