"""Ground terms of a left side with their values, and expressions over what stands for its variables."""

from __future__ import annotations

import operator
import random
from collections.abc import Callable, Mapping
from typing import Any

from emerge.algebra.rulefile import CONSTRUCTORS, App, EqualityRule, Lit, Term, Var, rational
from emerge.rules.term_instances import Filler, Ground, Retry
from emerge.rules.term_values import NoValue, Value, difference, evaluate, leaf
from emerge.synthesis.terms import vector

#: Ground terms per left side; a right side must hold on so many of them, and on one of the first ``QUICK``.
GROUND, ENOUGH, QUICK = 44, 8, 10


class Terrain:
    """Ground terms of a left side, with their values."""

    def __init__(self, pattern: App, seed: int = 0) -> None:
        import torch

        rule = EqualityRule("exchange", "", "", "", False, (("", pattern),), (), (), (), False, "")
        rng = random.Random(f"{pattern} {seed}")
        generator = torch.Generator().manual_seed(seed + 77)
        self.fillers: list[Filler] = []
        self.leaves: list[dict[str, Value]] = []
        self.values: list[Value] = []
        for _ in range(GROUND * 30):
            if len(self.fillers) >= GROUND:
                break
            filler = Filler(rule, rng, 0, len(self.fillers))
            try:
                instance = filler.fill()
            except (Retry, ValueError):
                continue
            drawn = {}
            for n, (name, shape) in instance.leaves.items():
                if n in instance.indices:
                    x = torch.randint(0, instance.indices[n], shape, generator=generator).to(torch.float64)
                else:
                    x = torch.randn(shape, generator=generator, dtype=torch.float64)
                drawn[name] = leaf(x)
            try:
                value = self.value(pattern, filler, drawn)
            except NoValue:
                continue
            if bool((value.undefined | value.unsure).all()):
                continue
            self.fillers.append(filler)
            self.leaves.append(drawn)
            self.values.append(value)

    def value(self, term: Term, filler: Filler, leaves: Mapping[str, Value]) -> Any:
        """The value of a term on one ground term.

        Raises:
            NoValue: it has none.
        """
        if isinstance(term, Var) and term.name in leaves:
            return leaves[term.name]
        if isinstance(term, App) and term.op in CONSTRUCTORS:
            return evaluate(term.op, [self.value(a, filler, leaves) for a in term.args])
        found = filler.compute(term)
        if found is None:
            raise NoValue(str(term))
        return found

    def some_value(self, term: Term) -> bool:
        """Whether a term has a value on one of the first ground terms."""
        for k in range(min(QUICK, len(self.fillers))):
            try:
                self.value(term, self.fillers[k], self.leaves[k])
            except NoValue:
                continue
            return True
        return False

    def holds(self, term: Term, k: int) -> bool:
        """Whether a right side has the value of the left one on ground term ``k``."""
        try:
            found = self.value(term, self.fillers[k], self.leaves[k])
        except NoValue:
            return False
        return isinstance(found, Value) and found.shape == self.values[k].shape and difference(found, self.values[k]) is None

    def condition(self, guard: App, k: int) -> bool:
        """Whether a side condition holds on ground term ``k``."""
        return decided(guard, self.fillers[k].compute)


_COMPARED: dict[str, Callable[[Any, Any], bool]] = {
    "=": operator.eq, "!=": operator.ne, "<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge,
}  # fmt: skip


def decided(guard: App, compute: Callable[[Term], Any]) -> bool:
    """Whether a comparison holds; not where a side of it cannot be computed."""
    a, b = (compute(t) for t in guard.args)
    if a is None or b is None:
        return False
    return bool(_COMPARED[guard.op](a, b))


def computing(
    bound: Mapping[str, Term], shapes: Mapping[str, tuple[int, ...]]
) -> tuple[Callable[[Term], Any], dict[str, Any]]:
    """Computes expressions over variables for which terms stand, and the values of those variables.

    Args:
        shapes: of the tensors that are named in ``bound``.
    """
    filler = Filler(EqualityRule("", "", "", "", False, (), (), (), (), False, ""), random.Random(0), 0)
    for name, term in bound.items():
        if isinstance(term, Var) and term.name in shapes:
            filler.env[name] = Ground("", tuple(shapes[term.name]))
        elif isinstance(term, Lit):
            filler.env[name] = term.value
        elif isinstance(term, App):
            constant = rational(term)
            filler.env[name] = constant if constant is not None else vector(term)
    return filler.compute, filler.env
