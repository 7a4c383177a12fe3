"""Proofs of rules of the algebra that move elements about: both sides hold the same symbolic elements.

Leaves hold free symbols, functions are functions about which nothing is known (so operands, order and definedness must be
the same), a contraction is such a function of the list of factors that it adds up, and views, slices, concatenations and
look-ups move elements. A cast to a floating type that holds a whole number exactly is that number. Why the shapes of the
instances stand for all is written in ``docs/algebra.md``.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction
from math import prod
from typing import Any

from emerge.algebra.rulefile import CONSTRUCTORS, App, EqualityRule, Lit, Term, Var, subterms
from emerge.algebra.saturate import Class, Classes
from emerge.rules.elements import Elements
from emerge.rules.term_values import NoValue, place

MOVING = {"Map1", "Map2", "Map3", "Scale", "Shift", "Place", "View", "Slice", "Cat", "Range", "Lookup", "Einsum"}
#: Casts to types that hold all whole numbers up to :data:`EXACT`.
CASTS = ("cast#float32", "cast#float64")
_CASTS = tuple(map(Lit, CASTS))
EXACT = 1 << 24
#: Whole numbers in one term or condition of a rule may add up to so much (also as factors they make no more): the
#: instances have sizes on both sides of it.
LARGEST = 4
METHOD = "symbolic elements, moved"


def moves_only(rule: EqualityRule) -> bool:
    """Do all terms of a rule move elements or work on each alone, and its conditions name small numbers only?"""
    terms: list[Term] = [t for _, t in rule.patterns] + [t for pair in rule.unions for t in pair]
    terms += [t for _, t in rule.lets]
    casts = [t for term in terms for t in subterms(term) if isinstance(t, App) and t.op == "Map1" and t.args[0] in _CASTS]
    if not all(_exact(t, rule) for t in casts):
        return False
    conditions = [_without_bound(c) if casts else c for c in rule.conditions]
    for term in [*terms, *conditions]:
        inner = list(subterms(term))
        if any(isinstance(t, App) and t.op in CONSTRUCTORS and t.op not in MOVING for t in inner):
            return False
        if sum(abs(t.value) for t in inner if isinstance(t, Lit) and isinstance(t.value, int)) > LARGEST:
            return False
    return True


def _exact(cast: App, rule: EqualityRule) -> bool:
    """Does a condition bound the numbers in what is cast to those that its type holds?"""
    numbers = _numbers(cast.args[1])
    bounded = [
        set(subterms(c.args[0])) for c in rule.conditions
        if isinstance(c, App) and c.op == "<=" and isinstance(c.args[1], Lit) and isinstance(c.args[1].value, int)
        and c.args[1].value <= EXACT
    ]  # fmt: skip
    return not numbers or any(numbers <= b for b in bounded)


def _numbers(term: Term) -> set[Term]:
    """Variables for whole numbers in a term for a tensor."""
    if not isinstance(term, App) or term.op not in CONSTRUCTORS:
        return set()
    found: set[Term] = set()
    for sort, a in zip(CONSTRUCTORS[term.op], term.args):
        if sort == "i64":
            found |= {t for t in subterms(a) if isinstance(t, Var)}
        elif sort == "Value":
            found |= _numbers(a)
    return found


def _without_bound(condition: Term) -> Term:
    """A condition ``t <= n`` without ``n``, which says what a type holds: up to there the terms are alike."""
    if isinstance(condition, App) and condition.op == "<=" and isinstance(condition.args[1], Lit):
        return condition.args[0]
    return condition


def same_elements(
    classes: Classes, leaves: Mapping[int, tuple[str, tuple[int, ...]]], indices: Mapping[int, int], seed: int
) -> int:
    """Number of equalities between terms whose elements are the same symbols; -1 where two terms of one class are not."""
    import torch

    elements = Elements()
    rng = random.Random(seed)
    known: dict[int, Any] = {}
    shown = 0
    pending = [(number, node) for number, nodes in classes.nodes.items() for node in nodes]
    pending.sort(key=lambda p: p[1].op != "Leaf")
    while pending:
        later = []
        for number, node in pending:
            if node.op == "Leaf":
                n = node.args[0]
                shape = leaves[n][1]
                count = prod(shape)
                made = (
                    [elements.guarded(elements.number(Fraction(rng.randrange(indices[n]))), [(n, k)]) for k in range(count)]
                    if n in indices else [elements.free(n, k) for k in range(count)]
                )  # fmt: skip
                value = torch.tensor(made, dtype=torch.int64).reshape(shape)
            else:
                args = [known.get(a.id) if isinstance(a, Class) else a for a in node.args]
                if any(a is None for a in args):
                    later.append((number, node))
                    continue
                try:
                    value = _moved(elements, node.op, args)
                except (NoValue, IndexError, ValueError, RuntimeError, TypeError):
                    return -1
            if number not in known:
                known[number] = value
            elif known[number].shape != value.shape or not torch.equal(known[number], value):
                return -1
            else:
                shown += 1
        if len(later) == len(pending):
            return -1
        pending = later
    return shown


def _moved(elements: Elements, op: str, args: Sequence[Any]) -> Any:
    import torch

    if op in ("Map1", "Map2", "Map3"):
        return _applied(elements, args[0], args[1:])
    if op == "Einsum":
        return _contracted(elements, args[0], args[1], args[2])
    if op in ("Scale", "Shift"):
        return _applied(elements, (op, args[0]), args[1:])
    if op == "Place":
        return place(*args)
    if op == "View":
        return args[0].reshape(tuple(args[1]))
    if op == "Slice":
        x, d, start, stop = args
        if not (0 <= d < x.dim() and 0 <= start < stop <= x.shape[d]):
            raise NoValue("a slice outside")
        return x.narrow(d, start, stop - start)
    if op == "Cat":
        return torch.cat([args[0], args[1]], args[2])
    if op == "Range":
        _, start, step, n = args
        return torch.tensor([elements.number(Fraction(start + step * k)) for k in range(n)], dtype=torch.int64)
    if op == "Lookup":
        x, index, d = args
        rows, guards = [], []
        for e in index.tolist():
            bare, read = elements.bare(e)
            row = elements.whole(bare)
            if row is None:
                raise NoValue("an index that is no number")
            rows.append(row)
            # an index that is given may also lie outside the table: then the whole row is undefined
            guards.append([(g, x.shape[d]) for g in sorted(read)])
        inside = [0 <= row < x.shape[d] for row in rows]
        found = x.index_select(d, torch.tensor([r if i else 0 for r, i in zip(rows, inside)], dtype=torch.int64)).movedim(d, 0)
        found = found.clone()
        found[~torch.tensor(inside, dtype=torch.bool)] = elements.free("undefined")
        made = [
            [elements.guarded(e, g) for e in part.reshape(-1).tolist()] for part, g in zip(found, guards)
        ]
        return torch.tensor(made, dtype=torch.int64).reshape(found.shape).movedim(0, d)
    raise NoValue(op)


def _contracted(elements: Elements, spec: str, x: Any, y: Any) -> Any:
    """Every element is a function of the list of pairs of factors, about which nothing is known."""
    import torch

    operands, out = spec.split("->")
    letters = operands.split(",")
    sizes: dict[str, int] = {}
    for names, operand in zip(letters, (x, y)):
        for letter, size in zip(names, operand.shape, strict=True):
            if sizes.setdefault(letter, size) != size:
                raise NoValue("a contraction over different sizes")
    summed = sorted(set(sizes) - set(out))
    order = [*out, *summed]
    grids = []
    for names, operand in zip(letters, (x, y)):
        index = [torch.arange(sizes[n]).reshape([-1 if m == n else 1 for m in order]) for n in names]
        grids.append(operand[tuple(index)].expand([sizes[n] for n in order]).reshape(-1, prod(sizes[n] for n in summed)))
    made = [
        elements.apply(("contraction",), [e for pair in zip(a, b) for e in pair])
        for a, b in zip(grids[0].tolist(), grids[1].tolist())
    ]
    return torch.tensor(made, dtype=torch.int64).reshape([sizes[n] for n in out])


def _applied(elements: Elements, function: Any, operands: Iterable[Any]) -> Any:
    import torch

    tensors = list(operands)
    if any(t.shape != tensors[0].shape for t in tensors):
        raise NoValue("operands of different shapes")
    rows = zip(*(t.reshape(-1).tolist() for t in tensors))
    made = []
    for row in rows:
        parts = [elements.bare(e) for e in row]
        whole = elements.whole(parts[0][0]) if function in CASTS else None
        if whole is not None and abs(whole) <= EXACT:
            made.append(row[0])
            continue
        if all(read == parts[0][1] for _, read in parts):
            # undefined operands only: so is the value, of whatever function
            made.append(elements.read_besides(elements.apply(("map", function), [e for e, _ in parts]), parts[0][1]))
        else:
            made.append(elements.apply(("map", function), row))
    return torch.tensor(made, dtype=torch.int64).reshape(tensors[0].shape)
