"""Neighbouring operators of a lowered side for which no rule says how they change places."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from math import prod

from emerge.algebra.encode import free_dims, term_of
from emerge.algebra.rulefile import CONSTRUCTORS, App, EqualityRule, Lit, Term, Var, rational
from emerge.facts.lower import Lowering, Tensor
from emerge.synthesis.ground import computing, decided
from emerge.synthesis.sketches import Place, tensors_of
from emerge.synthesis.terms import parse, vector, write

#: Terms of a tensor that are looked at, and how far down from where the values agree.
MOST_FORMS, MOST_STEPS = 6, 12

Shape = tuple[int, ...]


class Operators:
    """The operators of one side: every term of a tensor one operator deep, over names of tensors."""

    def __init__(self, low: Lowering) -> None:
        self.low = low
        self.shapes: dict[str, Shape] = {}
        self.inside: dict[str, App] = {}
        self.tensors: dict[str, Tensor] = {}
        self._forms: dict[int, list[int]] = {}
        for v, w in low.base.facts["same"]:
            if v in low.made_by or v in low.recipes:
                self._forms.setdefault(v, []).append(w)
        self._known: dict[int, Tensor] = {}
        for recipe in low.recipes.values():
            self._known.update({a.id: a for a in recipe.args})
        for tensor in low.tensors.values():
            if isinstance(tensor, Tensor):
                self._known[tensor.id] = tensor
        for form in low.made_by.values():
            self._known.update({a.id: a for a in form.args})

    def of(self, name: str) -> Iterator[App]:
        """Terms of a name."""
        if name in self.inside:
            yield self.inside[name]
            return
        tensor = self.tensors.get(name)
        if tensor is not None:
            yield from self.terms(tensor)

    def terms(self, tensor: Tensor) -> Iterator[App]:
        """Terms of a tensor and of those equal to it."""
        self._note(tensor)
        equal = [tensor.id, *self._forms.get(tensor.id, [])]
        found = 0
        for number in dict.fromkeys(equal):
            recipe = self.low.recipes.get(number)
            shape_of = self._known.get(number, tensor)
            text = term_of(recipe, shape_of) if recipe is not None else None
            if text is None or recipe is None:
                continue
            for a in recipe.args:
                self._note(a)
            yield self._flat(parse(text))
            found += 1
            if found >= MOST_FORMS:
                return

    def _note(self, tensor: Tensor) -> None:
        self.shapes[f"$t{tensor.id}"] = tuple(tensor.shape)
        self.tensors[f"$t{tensor.id}"] = tensor

    def _flat(self, term: Term) -> App:
        """The term with its inner operators as names."""
        assert isinstance(term, App)
        args: list[Term] = []
        for k, a in enumerate(term.args):
            if CONSTRUCTORS[term.op][k] != "Value" or isinstance(a, Var):
                args.append(a)
                continue
            inner = self._flat(a)
            name = f"$p{write(inner)}"
            self.inside[name] = inner
            self.shapes[name] = self._shape(inner)
            args.append(Var(name))
        return App(term.op, tuple(args))

    def _shape(self, term: App) -> Shape:
        if term.op in ("Place", "View"):
            return vector(term.args[-1]) or ()
        operands = [self.shapes[a.name] for k, a in enumerate(term.args) if k in tensors_of(term) and isinstance(a, Var)]
        if term.op == "Lookup" and isinstance(term.args[2], Lit):
            d = int(term.args[2].value)
            return (*operands[0][:d], prod(operands[1]), *operands[0][d + 1 :])
        if term.op == "Cat" and isinstance(term.args[2], Lit):
            d = int(term.args[2].value)
            return (*operands[0][:d], operands[0][d] + operands[1][d], *operands[0][d + 1 :])
        return operands[0] if operands else ()


def places(ops: Operators, start: Tensor, stop: Callable[[Tensor], bool], known: Sequence[EqualityRule]) -> Iterator[Place]:
    """Neighbours from a tensor down to those at which ``stop`` holds, that no known rule applies to."""
    ops._note(start)
    queue = [(f"$t{start.id}", 0)]
    seen: set[str] = set()
    while queue:
        name, depth = queue.pop(0)
        if name in seen or depth > MOST_STEPS:
            continue
        seen.add(name)
        tensor = ops.tensors.get(name)
        if tensor is not None and depth and stop(tensor):
            continue
        for outer in ops.of(name):
            for k in tensors_of(outer):
                operand = outer.args[k]
                assert isinstance(operand, Var)
                queue.append((operand.name, depth + 1))
                for inner in ops.of(operand.name):
                    term = App(outer.op, tuple(inner if j == k else a for j, a in enumerate(outer.args)))
                    place = Place(term, k, ops.shapes)
                    if not any(applies(rule, place) for rule in known):
                        yield place


def applies(rule: EqualityRule, place: Place) -> bool:
    """Whether a rule rewrites the operators of a place."""
    sides = [p for _, p in rule.patterns] if len(rule.patterns) == 1 else []
    if rule.reverse and isinstance(rule.unions[0][1], App):
        sides.append(rule.unions[0][1])
    for pattern in sides:
        put: dict[str, Term] = {}
        if pattern.op == place.term.op and _matches(pattern, place.term, put) and _conditions_hold(rule, put, place.shapes):
            inner = pattern.args[place.at]
            if isinstance(inner, App) and inner.op in CONSTRUCTORS:
                return True
    return False


def _matches(pattern: Term, term: Term, put: dict[str, Term]) -> bool:
    if isinstance(pattern, Var):
        return put.setdefault(pattern.name, term) == term
    if isinstance(pattern, App) and isinstance(term, App):
        if pattern.op == "bigrat":
            return rational(pattern) == rational(term)
        alike = pattern.op == term.op and len(pattern.args) == len(term.args)
        return alike and all(_matches(a, b, put) for a, b in zip(pattern.args, term.args))
    return pattern == term


def _conditions_hold(rule: EqualityRule, put: Mapping[str, Term], shapes: Mapping[str, Shape]) -> bool:
    env = {n: t for n, t in put.items() if not (isinstance(t, App) and t.op in CONSTRUCTORS)}
    compute, bound = computing(env, shapes)
    for c in rule.conditions:
        if not isinstance(c, App):
            continue
        if c.op == "padding":
            return False  # holds for tensors given with padding only
        if c.op == "placed":
            dims, k = compute(c.args[0]), compute(c.args[1])
            if dims is None or k not in dims:
                return False
            if isinstance(c.args[2], Var):
                bound.setdefault(c.args[2].name, dims.index(k))
            continue
        if c.op == "free":
            spec = compute(c.args[0])
            if spec is not None and not list(free_dims(spec)):
                return False
            continue
        if c.op == "=" and isinstance(c.args[0], Var) and c.args[0].name not in bound:
            value = compute(c.args[1])
            if value is not None:
                bound[c.args[0].name] = value
            continue
        if c.op in ("=", "!=", "<=", ">=", "<", ">") and not decided(c, compute):
            return False
    return True

