"""Operators described by a signature in a rule file: custom kernels, and whatever a user adds.

``operator_signature(op, output, spec, roles)`` (datalog/schema/signature.dl), for example::

    operator_signature("mylib.gate.default", 0, "x: ... f, gate: ... f -> ... f", "").
    operator_signature("_C.rms_norm.default", 1, "input: ... h, weight: h -> ... h", "h: whole").

Operands stand in order; a name before the colon is the keyword by which one may be passed instead; axes are letters or
words, ``(h d)`` is a product, ``...``
any number of leading dimensions, ``_`` an operand that is not read, ``n=attr`` takes a size from an attribute. Axes are
parallel unless ``roles`` says ``whole`` (order does not matter), ``ordered`` or ``sum``. All other attributes are part
of the body: both sides must have the same.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

from emerge.facts.base import constant_text
from emerge.facts.families import FamilyNode, RankVector
from emerge.util.errors import RuleError

if TYPE_CHECKING:
    from emerge.facts.lower import Lowering, Tensor

ROLES = {"whole": "w", "ordered": "o", "sum": "sum", "max": "max", "parallel": "p"}
_TOKEN = re.compile(r"\(|\)|\.\.\.|[A-Za-z][A-Za-z0-9_]*(?:=[A-Za-z_][A-Za-z0-9_]*|=\d+)?|\d+")


@dataclass(frozen=True)
class Signature:
    """One output of an operator.

    Attributes:
        operands: (name or "", dims) in operand order; dims are tuples of axis names, None for an operand not read.
        result: dims of the result. roles: axis -> role letter. sizes: axis -> attribute name or number.
        law: name of the fact's law; place: file:line of the fact.
    """

    op: str
    output: int
    operands: tuple[tuple[str, tuple[tuple[str, ...], ...] | None], ...]
    result: tuple[tuple[str, ...], ...]
    roles: dict[str, str]
    sizes: dict[str, str]
    law: str = ""
    place: str = ""


def parse_signature(op: str, output: int, spec: str, roles: str, law: str = "", place: str = "") -> Signature:
    """Reads a signature.

    Raises:
        RuleError: the text is malformed, a result axis is in no operand, or a consumed axis has no role.
    """
    sizes: dict[str, str] = {}
    left, arrow, right = spec.partition("->")
    if not arrow:
        raise RuleError(f"expected 'operands -> result' in the signature of {op}, found {spec!r}", place)

    def dims(text: str) -> tuple[tuple[str, ...], ...]:
        if _TOKEN.sub("", text).strip():
            raise RuleError(
                f"expected axis names, (products) and ... in {text!r}, found {_TOKEN.sub('', text).strip()!r}", place
            )
        out: list[tuple[str, ...]] = []
        group: list[str] | None = None
        for token in _TOKEN.findall(text):
            if token == "(":
                group = []
            elif token == ")":
                out.append(tuple(group or ()))
                group = None
            else:
                name, _, size = token.partition("=")
                if size:
                    sizes[name] = size
                if group is not None:
                    group.append(name)
                else:
                    out.append((name,))
        return tuple(out)

    operands: list[tuple[str, tuple[tuple[str, ...], ...] | None]] = []
    for part in left.split(","):
        name, colon, text = part.rpartition(":")
        operands.append((name.strip() if colon else "", None if text.strip() == "_" else dims(text)))
    given = {}
    for item in filter(None, (r.strip() for r in roles.split(","))):
        axis, _, role = item.partition(":")
        if role.strip() not in ROLES:
            raise RuleError(
                f"expected one of {', '.join(ROLES)} as role of axis {axis.strip()!r}, found {role.strip()!r}", place
            )
        given[axis.strip()] = ROLES[role.strip()]
    signature = Signature(op, output, tuple(operands), dims(right), given, sizes, law, place)
    carried = {a for _, d in operands if d is not None for dim in d for a in dim}
    kept = {a for dim in signature.result for a in dim}
    for axis in sorted(kept - carried - set(sizes)):
        raise RuleError(f"axis {axis!r} of the result of {op} is in no operand", place)
    for axis in sorted(carried - kept):
        if given.get(axis, "p") == "p":
            raise RuleError(f"axis {axis!r} of {op} is not in the result; give it a role: whole, ordered or sum", place)
    for axis in sorted(set(given) - carried - kept):
        raise RuleError(f"role for axis {axis!r}, which {op} does not have", place)
    return signature


def signatures(facts: Iterable[tuple[tuple[Any, ...], str, str]]) -> dict[tuple[str, int], Signature]:
    """Signatures by (operator, output) from the facts ``operator_signature``, each with its law's name and place.

    Raises:
        RuleError: malformed, or the same output described twice differently.
    """
    out: dict[tuple[str, int], Signature] = {}
    for (op, output, spec, roles), law, place in facts:
        made = parse_signature(op, output, spec, roles, law, place)
        before = out.get((op, output))
        if before is not None and (before.operands, before.result, before.roles) != (
            made.operands,
            made.result,
            made.roles,
        ):
            raise RuleError(f"output {output} of {op} already has another signature at {before.place}", place)
        out[op, output] = made
    return out


def lower_kernel(low: Lowering, node: FamilyNode, sig: Signature, args: list[Any], kwargs: dict[str, Any]) -> Tensor:
    """One output of a described operator.

    Raises:
        Unsupported: the operands do not fit the signature.
    """
    from emerge.facts.lower import Iter, Tensor, Tie, Unsupported

    used: set[str] = set()
    position = 0
    tensors: list[Tensor] = []
    layouts: list[tuple[tuple[str, ...], ...]] = []
    for name, dims in sig.operands:
        if name and name in kwargs:
            value = kwargs[name]
            used.add(name)
        else:
            value = args[position] if position < len(args) else None
            position += 1
        if dims is None:
            continue
        if not isinstance(value, Tensor):
            raise Unsupported(f"operand {name or position!r} of {sig.op} is not a tensor")
        tensors.append(value)
        layouts.append(dims)
    rest = [
        *args[position:],
        *(f"{k}={attribute_text(v)}" for k, v in sorted(kwargs.items()) if k not in used and not isinstance(v, Tensor)),
    ]
    if any(isinstance(v, (Tensor, RankVector)) for v in rest):
        raise Unsupported(f"{sig.op} has operands that its signature does not name")
    sizes: dict[str, int] = {}
    for axis, source in sig.sizes.items():
        size = int(source) if source.isdigit() else kwargs.get(source)
        if not isinstance(size, int):
            raise Unsupported(f"size of axis {axis!r}: attribute {source!r} is not an integer")
        sizes[axis] = size
    expanded = [_match(sig, t, d, sizes) for t, d in zip(tensors, layouts)]
    _solve(sig, tensors, expanded, sizes)
    lead = max((len([a for dim in d for a in dim if a.startswith(".")]) for d in expanded), default=0)
    result = _expand(sig.result, lead)
    order = [a for dim in result for a in dim]
    order += [a for d in expanded for dim in d for a in dim if a not in order]
    iters = []
    for axis in dict.fromkeys(order):
        n = sizes[axis]
        present = tuple(
            (k, _ties(axis, d, sizes, Tie)) for k, d in enumerate(expanded) if any(axis in dim for dim in d)
        )
        out = _ties(axis, result, sizes, Tie) if any(axis in dim for dim in result) else ()
        iters.append(Iter(n, sig.roles.get(axis, "p"), out, present))
    shape = [prod(sizes[a] for a in dim) for dim in result]
    body = f"{sig.op}#{sig.output}#{';'.join(map(str, rest))}"
    declared = node.elements.get(sig.output) if node.is_tuple else None
    dtype = declared.dtype if declared is not None else node.dtype or tensors[0].dtype
    tensor = low.op(body, f"{sig.op}#{sig.output}", tensors, iters, shape, dtype)
    low.signature_law[low.op_of[tensor.id]] = sig.law
    return tensor


def attribute_text(value: Any) -> str:
    """An attribute as part of a body."""
    if isinstance(value, float):
        return constant_text(value)
    return str(value)


def _expand(dims: tuple[tuple[str, ...], ...], lead: int) -> tuple[tuple[str, ...], ...]:
    """``...`` written out as ``lead`` numbered axes."""
    out: list[tuple[str, ...]] = []
    for dim in dims:
        out += [(f".{i}",) for i in range(lead)] if dim == ("...",) else [dim]
    return tuple(out)


def _match(
    sig: Signature, t: Tensor, dims: tuple[tuple[str, ...], ...], sizes: dict[str, int]
) -> tuple[tuple[str, ...], ...]:
    from emerge.facts.lower import Unsupported

    lead = len(t.shape) - (len(dims) - 1) if ("...",) in dims else 0
    out = _expand(dims, lead)
    if len(out) != len(t.shape):
        raise Unsupported(f"{sig.op} takes an operand of {len(dims)} dimensions where {list(t.shape)} is given")
    for dim, n in zip(out, t.shape):
        if len(dim) == 1 and sizes.setdefault(dim[0], n) != n:
            raise Unsupported(f"axis {dim[0]!r} of {sig.op} has sizes {sizes[dim[0]]} and {n}")
    return out


def _solve(
    sig: Signature, tensors: list[Tensor], layouts: list[tuple[tuple[str, ...], ...]], sizes: dict[str, int]
) -> None:
    """Sizes of axes inside products, from the sizes known elsewhere."""
    from emerge.facts.lower import Unsupported

    for _ in range(4):
        for t, dims in zip(tensors, layouts):
            for dim, n in zip(dims, t.shape):
                open_axes = [a for a in dim if a not in sizes]
                known = prod(sizes[a] for a in dim if a in sizes)
                if len(open_axes) == 1:
                    if n % known:
                        raise Unsupported(f"dimension {n} of {sig.op} is not a multiple of {known}")
                    sizes[open_axes[0]] = n // known
                elif not open_axes and known != n:
                    raise Unsupported(f"product {' '.join(dim)} of {sig.op} is {known} where the operand has {n}")
    missing = {a for d in layouts for dim in d for a in dim} - set(sizes)
    if missing:
        raise Unsupported(f"sizes of axes {sorted(missing)} of {sig.op} are not determined")


def _ties(axis: str, dims: tuple[tuple[str, ...], ...], sizes: dict[str, int], tie: Any) -> tuple[Any, ...]:
    for d, dim in enumerate(dims):
        if axis in dim:
            stride = prod(sizes[a] for a in dim[dim.index(axis) + 1 :])
            return (tie(1, d, stride, sizes[axis]),)
    return ()
