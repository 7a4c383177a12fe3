"""Masks: tensors of two constants, and additive masks under a softmax.

A causal mask is written in many ways: ``tril``, ``triu`` of ``-inf``, comparisons of ranges in either order, negated or not,
as truth values or as numbers that are added. Comparisons get one form in :mod:`emerge.facts.ops.positions`; here numbers
become truth values again.
"""

from __future__ import annotations

from fractions import Fraction
from typing import Any

from emerge.facts.lower import Lowering, Tensor, Unsupported
from emerge.facts.ops.positions import negated
from emerge.graph.model import is_floating

#: A mask constant at or below this counts as -inf under a softmax (assumption ``finite_mask``).
FINITE_MASK = Fraction(-65504)


def _relaid(low: Lowering, t: Tensor, source: Tensor) -> Tensor:
    """The last rearrangement of ``t``, of ``source`` in place of its operand."""
    made = low.made_by[t.id]
    return low.layout(source, t.shape, made.ties, made.broadcast)


def two_valued(low: Lowering, t: Tensor) -> tuple[Tensor, Fraction | float, Fraction | float] | None:
    """``(mask, a, b)`` where ``t`` is ``a`` where the mask holds and ``b`` elsewhere; the mask has the shape of ``t``."""
    made = low.made_by.get(t.id)
    if made is None:
        return None
    if made.kind == "layout":
        below = two_valued(low, made.args[0])
        return None if below is None else (_relaid(low, t, below[0]), below[1], below[2])
    if made.kind in ("fill", "fill0") and made.args[0].constant is not None and made.args[1].shape == t.shape:
        return made.args[1], constant_of(made.body), made.args[0].constant
    if made.kind == "convert" and made.args[0].dtype == "bool" and is_floating(t.dtype):
        return made.args[0], Fraction(1), Fraction(0)
    if made.kind in ("scale", "addc") and is_floating(t.dtype) and made.args[0].shape == t.shape:
        below = two_valued(low, made.args[0])
        if below is None or not isinstance(below[1], Fraction) or not isinstance(below[2], Fraction):
            return None
        if made.kind == "scale":
            assert made.scale is not None
            return below[0], below[1] * made.scale, below[2] * made.scale
        c = constant_of(made.body)
        return (below[0], below[1] + c, below[2] + c) if isinstance(c, Fraction) else None
    return None


def constant_of(body: str) -> Fraction | float:
    """The constant in a body, e.g. of ``fill#-inf``."""
    text = body.split("#")[1]
    return float(text) if text in ("inf", "-inf", "nan") else Fraction(text)


def select(low: Lowering, mask: Tensor, a: Any, b: Any, shape: Any, dtype: str) -> Tensor:
    """``a`` where the mask holds, ``b`` elsewhere, for two constants."""
    from emerge.facts.ops.pointwise import fill

    if shape is None or any(not isinstance(n, int) for n in shape):
        raise Unsupported("its shape depends on data")
    mask = low.broadcast_to(mask, shape)
    full = low.constant(b, tuple(int(n) for n in shape), dtype)
    return full if a == b else fill(low, full, mask, a, dtype)


def compare_two_valued(low: Lowering, name: str, x: Tensor, c: Fraction | float) -> Tensor | None:
    """A comparison of a tensor of two constants with a constant: its mask, the negation, or None where it is neither."""
    import operator

    found = two_valued(low, x)
    if found is None:
        return None
    mask, a, b = found
    test = getattr(operator, name)
    inside, outside = bool(test(a, c)), bool(test(b, c))
    if inside == outside:
        return low.constant(inside, x.shape, "bool")
    return mask if inside else negated(low, mask)


def without_maximum(low: Lowering, x: Tensor, d: int) -> Tensor:
    """``y`` where ``x`` is ``y`` minus its maximum along ``d``: their softmax is the same, and undefined at the same rows."""
    made = low.made_by.get(x.id)
    if made is None or made.kind != "sub" or made.args[0].shape != x.shape:
        return x
    y, most = made.args
    below = low.view_of.get(most.id, most)
    how = low.made_by.get(below.id)
    kept = tuple(1 if k == d else n for k, n in enumerate(x.shape))
    if how is None or how.body != "max" or how.args[0].id != y.id or most.shape != kept:
        return x
    gone = [it for it in how.iters if it.role != "p"]
    return y if len(gone) == 1 and [t.d for _, ties in gone[0].args for t in ties] == [d] else x


def softmax_operand(low: Lowering, x: Tensor, d: int) -> Tensor:
    """The operand of a softmax along ``d`` with its masks in one form: -inf written where a mask holds.

    Adding 0 or a constant <= -65504 is writing -inf, in rows that keep an unmasked key (``finite_mask``).
    """
    from emerge.facts.ops.pointwise import fill

    made = low.made_by.get(x.id)
    if made is None or not is_floating(x.dtype):
        return x
    joined = low.recipes.get(x.id)
    if joined is not None and joined.name == "cat" and joined.params[0] == d:
        from emerge.facts.ops.layout import cat

        parts = [softmax_operand(low, p, d) for p in joined.args]
        return x if [p.id for p in parts] == [p.id for p in joined.args] else cat(low, parts, d)
    minus = float("-inf")
    if made.kind == "add":
        for scores, added in (made.args, made.args[::-1]):
            found = two_valued(low, added)
            if found is None:
                continue
            mask, a, b = found
            if a == 0 and b <= FINITE_MASK:
                mask, a, b = negated(low, mask), b, a
            if b != 0 or a > FINITE_MASK:
                continue
            inner = softmax_operand(low, scores, d - len(x.shape) + len(scores.shape))
            result = fill(low, low.broadcast_to(inner, x.shape), mask, minus, x.dtype)
            _finite(low, result, a)
            return result
    if made.kind == "fill" and (value := constant_of(made.body)) <= FINITE_MASK and value != minus:
        inner = softmax_operand(low, made.args[0], d - len(x.shape) + len(made.args[0].shape))
        result = fill(low, low.broadcast_to(inner, x.shape), made.args[1], minus, x.dtype)
        _finite(low, result, value)
        return result
    return x


def _finite(low: Lowering, result: Tensor, value: Fraction | float) -> None:
    if isinstance(value, Fraction):
        low.assume("finite_mask", result, f"the mask constant {float(value):g} counts as -inf: every row keeps an unmasked key")
