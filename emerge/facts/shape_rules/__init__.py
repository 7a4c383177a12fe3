"""Shape rules by operator family, and the look-up of an operator's rule.

Names are resolved uniformly: the exact name (``aten.max.dim``), then the name without overload (``aten.max``), then for
an in-place operator (``aten.add_``) the rule of its functional form, whose result has to fit the written operand, and
for a list operator (``aten._foreach_add``) the rule of one element.
"""

from __future__ import annotations

from functools import cache

from emerge.facts.shape_rules import (
    collective,
    contraction,
    creation,
    indexing,
    kernels,
    layout,
    nn,
    pieces,
    pointwise,
    reduction,
    scalars,
)
from emerge.facts.shape_rules.algebra import same_shape, show
from emerge.facts.shape_rules.core import Call, Result, Rule, Rules, Spec
from emerge.facts.shape_rules.scalars import foreach
from emerge.graph.model import TensorType
from emerge.util.errors import GraphError

_FAMILIES = (
    pointwise,
    reduction,
    layout,
    pieces,
    indexing,
    contraction,
    nn,
    creation,
    collective,
    kernels,
    scalars,
)


def _merge() -> Rules:
    merged: Rules = {}
    for family in _FAMILIES:
        twice = merged.keys() & family.RULES.keys()
        assert not twice, f"two shape rules for {sorted(twice)}"
        merged.update(family.RULES)
    return merged


#: operator name without overload -> rule.
RULES: Rules = _merge()


def split_name(op: str) -> tuple[str, str]:
    """``aten.sum.dim_IntList`` -> ``aten.sum``, ``dim_IntList``; names of two parts have no overload.

    ``_operator.x`` and ``operator.x`` are one module.
    """
    op = op.removeprefix("_") if op.startswith("_operator.") else op
    base, _, overload = op.rpartition(".")
    return (base, overload) if "." in base else (op, "default")


def _written(rule: Rule, reshapes: bool) -> Rule:
    """The in-place form: the result is the first operand, whose shape and dtype stay."""

    def in_place(call: Call) -> Result:
        result, target = rule(call), call.get(0, "self")
        if reshapes or not isinstance(result, Spec) or not isinstance(target, TensorType):
            return result
        if not same_shape(result.shape, target.shape):
            raise GraphError(f"a result of shape {show(result.shape)} cannot be written into {show(target.shape)}")
        return Spec(target.dtype, target.shape)

    return in_place


def _into_out(rule: Rule) -> Rule:
    """``out=``: the result has the dtype of the given buffer."""

    def into(call: Call) -> Result:
        result, out = rule(call), call.kwargs.get("out")
        if isinstance(result, Spec) and isinstance(out, TensorType):
            return Spec(out.dtype, result.shape)
        return result

    return into


@cache
def rule_for(op: str) -> tuple[Rule | None, str]:
    """Rule of an operator (None: there is none) and its overload."""
    base, overload = split_name(op)
    rule = RULES.get(f"{base}.{overload}") or _base_rule(base)
    if rule is not None and (overload == "out" or overload.endswith("_out")):
        rule = _into_out(rule)
    return rule, overload


def _base_rule(base: str) -> Rule | None:
    if base in RULES:
        return RULES[base]
    namespace, _, name = base.partition(".")
    in_place = name.endswith("_") and not name.endswith("__")
    functional = name.rstrip("_") if in_place else name
    if functional.startswith("_foreach_"):
        one = RULES.get(f"{namespace}.{functional.removeprefix('_foreach_')}")
        return foreach(one, in_place) if one is not None else None
    found = RULES.get(f"{namespace}.{functional}") if in_place else None
    return _written(found, f"{namespace}.{functional}" in layout.RESHAPES_IN_PLACE) if found is not None else None
