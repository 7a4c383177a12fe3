"""Terms of the algebra cut out of a lowered side: from a tensor down to tensors that are taken as variables."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from fractions import Fraction

from emerge.algebra.encode import term_of
from emerge.algebra.encode import text as string_text
from emerge.algebra.rulefile import CONSTRUCTORS, App, Lit, Term, Var, rational
from emerge.facts.lower import Lowering, Tensor

POINTWISE = ("Map1", "Map2", "Map3", "Scale", "Shift")
LAYOUT = ("Place", "View")
_TOKEN = re.compile(r'\(|\)|"(?:[^"\\]|\\.)*"|[^\s()]+')


class TooLarge(Exception):
    """The term has more operators than a rule may have."""


class NoTerm(Exception):
    """The algebra has no term for the tensor."""


def parse(text: str) -> Term:
    """A term from its text; names of tensors become variables."""
    tokens = iter(_TOKEN.findall(text))

    def read(token: str) -> Term:
        if token == "(":
            head = next(tokens)
            args: list[Term] = []
            for inner in tokens:
                if inner == ")":
                    return App(head, tuple(args))
                args.append(read(inner))
            raise ValueError(text)
        if token.startswith('"'):
            return Lit(re.sub(r"\\(.)", r"\1", token[1:-1]))
        if re.fullmatch(r"-?\d+", token):
            return Lit(int(token))
        return Var(token)

    return read(next(tokens))


def write(term: Term) -> str:
    """The text of a term."""
    if isinstance(term, Var):
        return term.name
    if isinstance(term, Lit):
        return string_text(term.value) if isinstance(term.value, str) else str(term.value)
    inner = " ".join(map(write, term.args))
    return f"({term.op} {inner})" if inner else f"({term.op})"


#: What an operator costs in a term: what depends on dimensions is hard to say without sizes.
_COST = {"map": 1.0, "scale": 1.0, "place": 0.1, "view": 0.1}


def cheapest(low: Lowering, leaf: Callable[[Tensor], bool]) -> dict[int, int]:
    """For every tensor that the algebra has a term for, the tensor equal to it whose term is the simplest."""
    classes: dict[int, int] = {}

    def top(x: int) -> int:
        while x in classes:
            x = classes[x]
        return x

    members: dict[int, list[int]] = {}
    for v, w in low.base.facts["same"]:
        if v in low.made_by and w in low.made_by and top(v) != top(w):
            classes[top(v)] = top(w)
    for x in low.recipes:
        members.setdefault(top(x), []).append(x)
    cost: dict[int, float] = {}
    best: dict[int, int] = {}
    changed = True
    while changed:
        changed = False
        for group, forms in members.items():
            for x in forms:
                recipe = low.recipes[x]
                below = [0.0 if leaf(a) else cost.get(top(a.id), 0.0 if a.id not in low.recipes else None)
                         for a in recipe.args]  # fmt: skip
                if any(b is None for b in below):
                    continue
                total = _COST.get(recipe.name, 10.0) + sum(b for b in below if b is not None)
                if total < cost.get(group, float("inf")):
                    cost[group], best[group] = total, x
                    changed = True
    return {x: best[g] for g, forms in members.items() if g in best for x in forms}


def cut(
    low: Lowering, tensor: Tensor, leaf: Callable[[Tensor], bool], chosen: Mapping[int, int], most: int
) -> tuple[Term, dict[str, Tensor]]:
    """The term of a tensor; operands for which ``leaf`` holds, or that have no term, are variables ``$tN``.

    Args:
        chosen: tensor -> the equal one whose term is taken (:func:`cheapest`).

    Raises:
        NoTerm: the tensor itself has none.
        TooLarge: more than ``most`` operators.
    """
    leaves: dict[str, Tensor] = {}
    known: dict[str, Tensor] = {}
    count = 0

    def build(t: Tensor, top: bool) -> Term:
        nonlocal count
        recipe = low.recipes.get(chosen.get(t.id, t.id))
        text = None if recipe is None or (not top and leaf(t)) else term_of(recipe, t)
        if text is None or recipe is None:
            if top:
                raise NoTerm
            leaves[f"$t{t.id}"] = t
            return Var(f"$t{t.id}")
        known.update({f"$t{a.id}": a for a in recipe.args})
        return fill(parse(text))

    def fill(term: Term) -> Term:
        nonlocal count
        if isinstance(term, Var):
            return build(known[term.name], False)
        if isinstance(term, Lit):
            return term
        count += term.op in CONSTRUCTORS
        if count > most:
            raise TooLarge
        # only arguments that are tensors hold names of tensors
        return App(term.op, tuple(fill(a) if _holds_names(a) else a for a in term.args))

    return build(tensor, True), leaves


def _holds_names(term: Term) -> bool:
    if isinstance(term, App):
        return any(map(_holds_names, term.args))
    return isinstance(term, Var)


def operators(term: Term) -> int:
    """Operators of a term that compute; rearrangements do not count."""
    if not isinstance(term, App):
        return 0
    return (term.op in CONSTRUCTORS and term.op not in LAYOUT) + sum(map(operators, term.args))


def constructors(term: Term) -> Iterator[str]:
    """Constructors of a term."""
    if isinstance(term, App):
        if term.op in CONSTRUCTORS:
            yield term.op
        for a in term.args:
            yield from constructors(a)


def vector(term: Term) -> tuple[int, ...] | None:
    """The integers of ``(vec-of ...)``."""
    if isinstance(term, App) and term.op in ("vec-of", "vec-empty"):
        return tuple(int(a.value) for a in term.args if isinstance(a, Lit))
    return None


_INFIX = {"add": "+", "sub": "-", "mul": "*", "div": "/"}


def formula(term: Term) -> str:
    """A term for people."""
    if not isinstance(term, App):
        return write(term)
    a = term.args
    if term.op == "Map2" and isinstance(a[0], Lit) and a[0].value in _INFIX:
        return f"({formula(a[1])} {_INFIX[a[0].value]} {formula(a[2])})"
    if term.op.startswith("Map") and isinstance(a[0], Lit):
        return f"{a[0].value}({', '.join(bare(formula(x)) for x in a[1:])})"
    if term.op in ("Scale", "Shift"):
        sign = "*" if term.op == "Scale" else "+"
        return f"({_constant(a[0])} {sign} {formula(a[1])})"
    if term.op in LAYOUT:
        return f"{term.op.lower()}({bare(formula(a[0]))})"
    if term.op not in CONSTRUCTORS:
        return number(term)
    inner = [bare(formula(x)) for x in a if vector(x) is None]
    return f"{term.op.lower()}({', '.join(inner)})"


_ARITHMETIC = {"+": "+", "-": "-", "*": "*", "=": "=", "!=": "!=", "<=": "<=", ">=": ">=", "<": "<", ">": ">"}


def number(term: Term) -> str:
    """An expression over sizes and dimensions for people."""
    if isinstance(term, Lit):
        return str(term.value)
    if not isinstance(term, App):
        return write(term)
    a = [number(x) for x in term.args]
    if term.op == "vec-get":
        return f"{a[0]}[{a[1]}]"
    if term.op in _ARITHMETIC and len(a) == 2:
        return f"{a[0]} {_ARITHMETIC[term.op]} {a[1]}" if term.op not in "+-*" else f"({a[0]} {term.op} {a[1]})"
    return f"{term.op}({', '.join(a)})"


def condition(term: Term) -> str:
    """A side condition for people."""
    return number(term)


def bare(text: str) -> str:
    """A formula without the brackets around all of it."""
    return text[1:-1] if text.startswith("(") and _closes(text) == len(text) - 1 else text


def _closes(text: str) -> int:
    depth = 0
    for k, c in enumerate(text):
        depth += (c == "(") - (c == ")")
        if not depth:
            return k
    return -1


def _constant(term: Term) -> str:
    found = rational(term)
    if found is None:
        return write(term)
    return str(found) if found.denominator < 10000 else f"{float(found):.6g}"


def constants(term: Term) -> Iterator[tuple[str, Fraction]]:
    """The constants of scales and shifts, with the constructor."""
    if isinstance(term, App):
        if term.op in ("Scale", "Shift"):
            found = rational(term.args[0])
            if found is not None:
                yield term.op, found
        for a in term.args:
            yield from constants(a)
