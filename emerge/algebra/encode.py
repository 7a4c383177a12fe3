"""Terms of the algebra (``rules/language.egg``) for the tensors of a lowered side."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import prod
from typing import Any

from emerge.facts.lower import Lowering, Recipe, Tensor
from emerge.graph.model import is_floating

#: Kinds of pointwise bodies with random or rank-dependent meaning; the algebra does not look into them.
OPAQUE_KINDS = {"dropout", "rank_weight"}


def rational(value: Fraction) -> str:
    """An exact constant as a term."""
    return f'(bigrat (from-string "{value.numerator}") (from-string "{value.denominator}"))'


def dims(values: Sequence[int]) -> str:
    """A vector of dimensions or extents as a term."""
    return f"(vec-of {' '.join(map(str, values))})" if values else "(vec-empty)"


def text(value: str) -> str:
    """A string literal."""
    return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'


def global_name(tensor: int) -> str:
    """Name of the global variable that stands for a tensor."""
    return f"$t{tensor}"


@dataclass(frozen=True)
class Term:
    """A constructor on tensors and other arguments."""

    op: str
    args: tuple[Any, ...]

    @property
    def operands(self) -> list[Tensor]:
        """The tensors among the arguments."""
        return [a for a in self.args if isinstance(a, Tensor)]

    def __str__(self) -> str:
        return f"({self.op} {' '.join(map(_argument, self.args))})"


def _argument(value: Any) -> str:
    if isinstance(value, Tensor):
        return global_name(value.id)
    if isinstance(value, Fraction):
        return rational(value)
    if isinstance(value, str):
        return text(value)
    return dims(value) if isinstance(value, tuple) else str(value)


def encode(
    low: Lowering,
    more: Iterable[Tensor] = (),
    terms: Mapping[int, Term] | None = None,
    definitions: Collection[str] | None = None,
) -> Iterator[str]:
    """Commands that define every tensor of a side, operands first.

    Args:
        more: further tensors. terms: those of tensors that are none of the graph.
        definitions: those that make their kernel and composite equal, None = all.
    """
    done: set[int] = set()
    specs: set[str] = set()
    for tensor in [*tensors(low), *more]:
        yield from _define(low, tensor, done, specs, terms or {})
    for form in low.forms:
        if definitions is None or form.definition in definitions:
            yield f"(union {global_name(form.kernel.id)} {global_name(form.composite.id)})"


def tensors(low: Lowering) -> Iterator[Tensor]:
    """All lowered tensors of the graph: values of nodes and inputs, and the composites of kernels."""
    for value in low.tensors.values():
        if isinstance(value, Tensor):
            yield value
        else:
            yield from getattr(value, "made", {}).values()
    for form in low.forms:
        yield from (form.kernel, form.composite)


def free_dims(spec: str) -> Iterator[tuple[str, int, int, int]]:
    """Where the dimensions of a contraction's operands go that only one of them has: spec, operand, dimension, dimension of
    the result."""
    operands, out = spec.split("->")
    for k, letters in enumerate(operands.split(",")):
        other = operands.split(",")[1 - k]
        for d, letter in enumerate(letters):
            if letter in out and letter not in other:
                yield spec, k, d, out.index(letter)


def free_facts(spec: str) -> Iterator[str]:
    """The same as facts of the language."""
    for _, k, d, o in free_dims(spec):
        yield f"(free {text(spec)} {k} {d} {o})"


def _define(
    low: Lowering, tensor: Tensor, done: set[int], specs: set[str], terms: Mapping[int, Term]
) -> Iterator[str]:
    stack = [tensor]
    while stack:
        x = stack[-1]
        if x.id in done:
            stack.pop()
            continue
        recipe = low.recipes.get(x.id)
        known = terms.get(x.id)
        term = str(known) if known is not None else term_of(recipe, x) if recipe is not None else None
        # what a leaf is made of still has terms of its own
        below: Sequence[Tensor] = _operands(low, x)
        if term is not None:
            below = known.operands if known is not None else recipe.args if recipe is not None else ()
        open_ = [a for a in below if a.id not in done]
        if open_:
            stack.extend(open_)
            continue
        stack.pop()
        done.add(x.id)
        yield f"(let {global_name(x.id)} {term if term is not None else f'(Leaf {x.id})'})"
        yield f"(set (shape {global_name(x.id)}) {dims(x.shape)})"
        if x.id in low.padding:
            yield f"(padding {global_name(x.id)})"
        if recipe is not None and recipe.name == "einsum" and recipe.params[0] not in specs:
            specs.add(recipe.params[0])
            yield from free_facts(recipe.params[0])


def _operands(low: Lowering, x: Tensor) -> Sequence[Tensor]:
    made = low.made_by.get(x.id)
    return made.args if made is not None else ()


def term_of(recipe: Recipe, x: Tensor) -> str | None:
    """The term of a tensor in terms of the globals of its operands; None for a leaf."""
    a = [global_name(t.id) for t in recipe.args]
    p = recipe.params
    if recipe.name == "map":
        return _pointwise(recipe, x)
    if recipe.name == "scale":
        return f"(Scale {rational(p[0])} {a[0]})"
    if recipe.name == "place":
        return f"(Place {a[0]} {dims(p[0])} {dims(p[1])})"
    if recipe.name == "view":
        return f"(View {a[0]} {dims(p[0])})"
    if recipe.name == "slice":
        return f"(Slice {a[0]} {p[0]} {p[1]} {p[2]})"
    if recipe.name == "cat":
        term = a[-1]
        for part in reversed(a[:-1]):
            term = f"(Cat {part} {term} {p[0]})"
        return term if len(a) > 1 else None
    if recipe.name == "fold":
        reduced, role, body, _ = p
        return f"(Fold {text(body)} {text(role)} {a[0]} {dims(reduced)} {dims(x.shape)})"
    if recipe.name == "einsum":
        return f"(Einsum {text(p[0])} {a[0]} {a[1]} {dims(x.shape)})"
    if recipe.name == "range":
        return f'(Range "{"float" if is_floating(x.dtype) else "int"}" {p[0]} {p[1]} {p[2]})'
    if recipe.name == "lookup":
        index = recipe.args[1]
        if len(index.shape) == 1:
            return f"(Lookup {a[0]} {a[1]} {p[0]})"
        flat = f"(View {a[1]} {dims([prod(index.shape)])})"
        return f"(View (Lookup {a[0]} {flat} {p[0]}) {dims(x.shape)})"
    if recipe.name == "along":
        d, role, body, _ = p
        return f"(Along {text(body)} {text(role)} {a[0]} {d})"
    return None


def _pointwise(recipe: Recipe, x: Tensor) -> str | None:
    body, kind = recipe.params
    if kind in OPAQUE_KINDS or not (is_floating(x.dtype) or x.dtype == "bool") or not 1 <= len(recipe.args) <= 3:
        return None  # integers wrap around; they have an index domain of their own
    placed = [_broadcast(t, x) for t in recipe.args]
    if kind == "addc" and (c := _finite(body)) is not None:
        return f"(Shift {rational(c)} {placed[0]})"
    return f"(Map{len(placed)} {text(body)} {' '.join(placed)})"


def _broadcast(operand: Tensor, x: Tensor) -> str:
    name = global_name(operand.id)
    if operand.shape == x.shape:
        return name
    lead = len(x.shape) - len(operand.shape)
    place = [
        d - lead if d >= lead and n != 1 and operand.shape[d - lead] == n else -1 for d, n in enumerate(x.shape)
    ]
    return f"(Place {name} {dims(place)} {dims(x.shape)})"


def _finite(body: str) -> Fraction | None:
    try:
        return Fraction(body.split("#")[1])
    except (ValueError, IndexError):
        return None
