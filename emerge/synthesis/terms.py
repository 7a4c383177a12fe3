"""Terms of the algebra cut out of a lowered side: from a tensor down to tensors that are taken as variables."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
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


def cut(low: Lowering, tensor: Tensor, leaf: Callable[[Tensor], bool], most: int) -> tuple[Term, dict[str, Tensor]]:
    """The term of a tensor; operands for which ``leaf`` holds, or that have no term, are variables ``$tN``.

    Raises:
        NoTerm: the tensor itself has none.
        TooLarge: more than ``most`` operators.
    """
    leaves: dict[str, Tensor] = {}
    known: dict[str, Tensor] = {}
    count = 0

    def build(t: Tensor, top: bool) -> Term:
        nonlocal count
        recipe = low.recipes.get(t.id)
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
        return f"{a[0].value}({', '.join(formula(x).removeprefix('(').removesuffix(')') if _outer(x) else formula(x) for x in a[1:])})"
    if term.op in ("Scale", "Shift"):
        sign = "*" if term.op == "Scale" else "+"
        return f"({_constant(a[0])} {sign} {formula(a[1])})"
    if term.op in LAYOUT:
        return f"placed({formula(a[0])})" if term.op == "Place" else f"view({formula(a[0])})"
    inner = [formula(x) for x in a if vector(x) is None]
    return f"{term.op.lower()}({', '.join(inner)})"


def _outer(term: Term) -> bool:
    return isinstance(term, App) and formula(term).startswith("(")


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
