"""Families whose members are computed differently on different ranks.

``x + t`` on some ranks and ``x`` on the others is ``x + w * t`` with a constant ``w`` per rank (1 there, 0 elsewhere):
adding 0 changes nothing. Other mixtures have no signature.
"""

from __future__ import annotations

from fractions import Fraction
from typing import Any

from emerge.facts.families import MIXED, FamilyNode
from emerge.facts.lower import Lowering, Made, Tensor, Unsupported, lowers
from emerge.facts.ops.pointwise import rank_weighted
from emerge.graph.model import Ref


@lowers(MIXED)
def mixed(low: Lowering, node: FamilyNode, args: list[Any], kwargs: dict[str, Any]) -> Tensor:
    members = [a for a in args if isinstance(a, Tensor)]
    ranks: list[tuple[int, ...]] = [tuple(r) for r in kwargs["ranks"]]
    if len(members) == len(args) and len({m.shape for m in members}) == 1:
        layout = _common_layout(low, members)
        if layout is not None:
            made = [low.made_by[m.id] for m in members]
            inner = mixed(low, node, [m.args[0] for m in made], kwargs)
            return low.layout(inner, members[0].shape, layout.ties, layout.broadcast)
        for base in members:
            extra: dict[int, tuple[Tensor, list[Fraction]]] = {}
            if all(m.id == base.id or _added(low, m, base, r, extra) for m, r in zip(members, ranks)):
                result = base
                for term, weights in extra.values():
                    weighted = rank_weighted(low, term, weights, term.dtype)
                    result = low.pointwise("add", "add", [result, weighted], result.dtype, commutative=True)
                return result
    names = [a.name for a in node.args if isinstance(a, Ref)]
    raise Unsupported(f"is {' / '.join(names)} on ranks {' / '.join(str(list(r)) for r in ranks)}")


def _common_layout(low: Lowering, members: list[Tensor]) -> Made | None:
    """The last rearrangement of all members, where it is the same one of operands of one shape."""
    made = [low.made_by.get(m.id) for m in members]
    first = made[0]
    if first is None or first.kind != "layout":
        return None
    for m in made:
        if m is None or (m.kind, m.ties, m.broadcast) != ("layout", first.ties, first.broadcast):
            return None
        if m.args[0].shape != first.args[0].shape:
            return None
    return first


def _added(
    low: Lowering, member: Tensor, base: Tensor, ranks: tuple[int, ...], extra: dict[int, tuple[Tensor, list[Fraction]]]
) -> bool:
    """Whether ``member`` is ``base + t`` or ``base - t``; notes the weight of ``t`` on ``ranks``."""
    made = low.made_by.get(member.id)
    if made is None or made.body not in ("add", "sub") or len(made.args) != 2:
        return False
    if made.args[0].id == base.id:
        term, weight = made.args[1], Fraction(1 if made.body == "add" else -1)
    elif made.args[1].id == base.id and made.body == "add":
        term, weight = made.args[0], Fraction(1)
    else:
        return False
    _, weights = extra.setdefault(term.id, (term, [Fraction(0)] * low.mesh.ranks))
    for r in ranks:
        weights[r] += weight
    return True
