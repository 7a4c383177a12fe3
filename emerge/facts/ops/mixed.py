"""Families whose members are computed differently on different ranks.

``x + t`` on some ranks and ``x`` on the others is ``x + w * t`` with a constant ``w`` per rank (1 there, 0 elsewhere):
adding 0 changes nothing. Other mixtures have no signature.
"""

from __future__ import annotations

from fractions import Fraction
from typing import Any

from emerge.facts.families import MIXED, FamilyNode
from emerge.facts.lower import Lowering, Tensor, Unsupported, lowers, scalar_constant
from emerge.facts.ops.pointwise import rank_weighted
from emerge.graph.model import Ref


@lowers(MIXED)
def mixed(low: Lowering, node: FamilyNode, args: list[Any], kwargs: dict[str, Any]) -> Tensor:
    names = [a.name for a in node.args if isinstance(a, Ref)]
    ranks: list[tuple[int, ...]] = [tuple(r) for r in kwargs["ranks"]]
    whole = [n for n in names if len(_ranks_of(low, n)) == low.mesh.ranks]
    for base in whole:
        extra: dict[int, tuple[Tensor, list[Fraction]]] = {}
        if all(n == base or _added(low, n, base, r, extra) for n, r in zip(names, ranks)):
            result = low.tensors[base]
            for term, weights in extra.values():
                result = low.pointwise("add", "add", [result, rank_weighted(low, term, weights, term.dtype)], result.dtype)
            return result
    raise Unsupported(f"is {' / '.join(names)} on ranks {' / '.join(str(list(r)) for r in ranks)}")


def _ranks_of(low: Lowering, name: str) -> tuple[int, ...]:
    node = low.family_nodes.get(name)
    return tuple(range(low.mesh.ranks)) if node is None else node.ranks


def _added(low: Lowering, name: str, base: str, ranks: tuple[int, ...], extra: dict[int, tuple[Tensor, list[Fraction]]]) -> bool:
    """Whether ``name`` is ``base + t`` for a tensor ``t`` that all ranks have; notes the weight of ``t`` on ``ranks``."""
    node = low.family_nodes.get(name)
    if node is None or node.op.rpartition(".")[0] not in ("aten.add", "aten.add_", "aten.sub"):
        return False
    operands = [a.name for a in node.args[:2] if isinstance(a, Ref)]
    if len(operands) != 2 or base not in operands:
        return False
    sub = node.op.startswith("aten.sub")
    if sub and operands[0] != base:
        return False
    term = low.tensors.get(operands[1] if operands[0] == base else operands[0])
    alpha = scalar_constant(node.kwargs.get("alpha", 1))
    other = operands[1] if operands[0] == base else operands[0]
    if not isinstance(term, Tensor) or len(_ranks_of(low, other)) != low.mesh.ranks or not isinstance(alpha, Fraction):
        return False
    if operands[0] != base:
        alpha = Fraction(1) if alpha == 1 else None
        if alpha is None:
            return False
    _, weights = extra.setdefault(term.id, (term, [Fraction(0)] * low.mesh.ranks))
    for r in ranks:
        weights[r] += -alpha if sub else alpha
    return True
