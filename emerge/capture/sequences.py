"""The tokens of one forward pass of a language model: sequences, and how much of each is cached already.

    inputs: {seqs: [8, 16]}              # sequences of different lengths
    inputs: {tokens: 1, past: 7}         # vLLM: one decode step of one sequence after 7 tokens
    inputs: {batch: 2, seq: 1, past: 7}  # Transformers: the same for two rows
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import accumulate
from typing import Any

from emerge.capture.base import CaptureError


def sequence_lengths(sizes: Mapping[str, Any], key: str = "seqs") -> tuple[int, ...]:
    """The lengths under ``seqs``.

    Raises:
        CaptureError: they are no list of positive integers.
    """
    found = sizes[key]
    if not isinstance(found, (list, tuple)) or not found or any(type(n) is not int or n < 1 for n in found):
        raise CaptureError(f"expected a list of positive lengths for {key!r}, e.g. [8, 16], found {found!r}", "inputs")
    return tuple(found)


def past_lengths(sizes: Mapping[str, Any], sequences: int) -> tuple[int, ...]:
    """How many tokens of every sequence are cached; empty where ``past`` is not given or 0.

    Raises:
        CaptureError: ``past`` is neither a number of tokens nor one per sequence.
    """
    given = sizes.get("past", 0)
    found = [given] * sequences if type(given) is int else given
    if not isinstance(found, (list, tuple)) or len(found) != sequences or any(type(n) is not int or n < 0 for n in found):
        raise CaptureError(
            f"expected a number of cached tokens for 'past', or a list of {sequences}, one per sequence; found {given!r}",
            "inputs",
        )
    if not any(found):
        return ()
    if not all(found):
        raise CaptureError(
            f"expected cached tokens of every sequence, found past: {given!r}; capture sequences without a past apart",
            "inputs",
        )
    return tuple(found)


def starts(lengths: tuple[int, ...]) -> list[int]:
    """Where sequences that lie one after another begin, and the end of the last."""
    return [0, *accumulate(lengths)]


def kept_of_past(past: int, window: int) -> int:
    """How many cached tokens a layer reads: with a window (0 = none) the next query sees ``window - 1`` of them."""
    return min(past, window - 1) if window > 0 else past
