"""Random ground terms that match the left side of a rule of the algebra.

A pattern is filled from the outside in: an expected shape (``None`` where any size fits) is handed down, variables take what
is left open, and what does not fit is drawn again. Whether side conditions hold is left to egglog: an instance that they
exclude does not fire.
"""

from __future__ import annotations

import operator
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from math import prod
from typing import Any

from emerge.algebra.encode import dims as dims_text
from emerge.algebra.encode import free_dims
from emerge.algebra.encode import rational as rational_text
from emerge.algebra.encode import text as string_text
from emerge.algebra.rulefile import CONSTRUCTORS, App, EqualityRule, Lit, Term, Var, rational, subterms

#: Bodies by number of operands; the opaque ones obey no law at all.
BODIES: dict[int, tuple[str, ...]] = {
    1: ("opaque#1", "exp", "sqrt", "relu", "abs", "sign", "floor", "reciprocal", "powc#3", "powc#-1/2", "not", "sin",
        "log", "isinf", "ltc#0", "cos", "silu", "opaque#1"),
    2: ("opaque#2", "sub", "div", "mul", "add", "maximum", "lt", "eq", "pow", "and", "keep", "minimum", "opaque#2"),
    3: ("opaque#3", "where"),
}  # fmt: skip
FOLDS = (("sum", "sum"), ("max", "max"), ("min", "min"), ("prod", "prod"), ("logsumexp", "w"), ("var#1", "w"))
ALONG = (("softmax", "w"), ("cumsum", "o"), ("log_softmax", "w"), ("cumprod", "o"))
SPECS = ("ik,kj->ij", "bik,bkj->bij", "bhik,bhjk->bhij", "ij,j->i", "ij,kj->ik", "i,j->ij", "ij,ij->i", "ij,jk->ki")
CONSTANTS = tuple(
    Fraction(*c)
    for c in ((1, 1), (-1, 1), (0, 1), (2, 1), (-3, 1), (1, 2), (-5, 7), (3, 4), (1, 1000), (7, 1), (-1, 2))
)
MOST_DIMS = 4
_COMPARISONS: dict[str, Callable[[Any, Any], bool]] = {
    "=": operator.eq, "!=": operator.ne, "<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge,
}  # fmt: skip

Shape = tuple[int, ...]
Want = tuple[int | None, ...] | None


class Retry(Exception):
    """What was drawn does not fit the pattern."""


@dataclass(frozen=True)
class Ground:
    """A ground term: its text and shape."""

    text: str
    shape: Shape


@dataclass
class Instance:
    """One filled left side.

    Attributes:
        terms: of its patterns. leaves: number -> (variable, shape). bound: scalar variables.
        indices: leaves that hold whole numbers of ``[0, n)``.
    """

    terms: list[Ground]
    leaves: dict[int, tuple[str, Shape]] = field(default_factory=dict)
    bound: dict[str, Any] = field(default_factory=dict)
    indices: dict[int, int] = field(default_factory=dict)


class Filler:
    """Fills the patterns of one rule.

    Args:
        first_leaf: number of its first leaf. turn: number of the instance; constants and bodies are taken in turn, so
            that none of them is left out by chance.
    """

    def __init__(self, rule: EqualityRule, rng: random.Random, first_leaf: int, turn: int = 0) -> None:
        self.rule, self.rng, self.next_leaf = rule, rng, first_leaf
        self.turn = turn if rng.random() < 0.7 else rng.randrange(1000)
        self.env: dict[str, Any] = {}
        self.leaves: dict[int, tuple[str, Shape]] = {}
        self.indices: dict[int, int] = {}
        style = rng.random()
        # all sizes different, or few sizes so that dimensions can be confused, or some of size 1
        self.sizes = [2, 3, 4, 5, 6, 7, 8] if style < 0.6 else [3] if style < 0.8 else [1, 2, 3, 5]
        self.used: set[int] = set()

    def fill(self) -> Instance:
        """An instance.

        Raises:
            Retry: the drawing did not fit.
        """
        terms = []
        for name, pattern in self.rule.patterns:
            ground = self.value(pattern, None)
            if name:
                if name in self.env:
                    raise Retry
                self.env[name] = ground
            terms.append(ground)
        if self.excluded() and self.rng.random() < 0.95:
            raise Retry
        scalars = {n: v for n, v in self.env.items() if not isinstance(v, Ground)}
        return Instance(terms, self.leaves, scalars, self.indices)

    def excluded(self) -> bool:
        """Whether a side condition is seen to fail; only a guide, for the decision is egglog's."""
        for c in self.rule.conditions:
            if not isinstance(c, App):
                continue
            args = [self.compute(a) for a in c.args]
            if any(a is None for a in args):
                # a vector that is indexed outside its range has no entry there
                if all(isinstance(t, Lit) or self._all_bound(t) for t in c.args):
                    return True
                continue
            if c.op in _COMPARISONS and len(args) == 2 and not _COMPARISONS[c.op](*args):
                return True
            if c.op == "free" and len(args) == 4 and args not in [list(f) for f in free_dims(args[0])]:
                return True
            if c.op == "placed" and len(args) == 3 and not (args[2] < len(args[0]) and args[0][args[2]] == args[1]):
                return True
        return False

    def _all_bound(self, term: Term) -> bool:
        return all(not isinstance(t, Var) or t.name in self.env for t in subterms(term))

    # ---- shapes ---------------------------------------------------------------------------------------------------

    def size(self) -> int:
        """A size, a new one where there are some left."""
        free = [n for n in self.sizes if n not in self.used] or self.sizes
        n = self.rng.choice(free)
        self.used.add(n)
        return n

    def shape(self, want: Want) -> Shape:
        """A shape that fits."""
        if want is None:
            return tuple(self.size() for _ in range(self.rng.choice((1, 2, 2, 3, 3))))
        return tuple(self.size() if n is None else n for n in want)

    @staticmethod
    def fits(shape: Shape, want: Want) -> bool:
        return want is None or (len(shape) == len(want) and all(w is None or w == n for n, w in zip(shape, want)))

    def peek(self, pattern: Term) -> Shape | None:
        """The shape of a pattern that is a bound variable."""
        if isinstance(pattern, Var):
            found = self.env.get(pattern.name)
            return found.shape if isinstance(found, Ground) else None
        return None

    # ---- scalars --------------------------------------------------------------------------------------------------

    def scalar(self, pattern: Term, default: Any) -> Any:
        """The value of an integer, rational, vector or string pattern; ``default()`` draws a free variable."""
        if isinstance(pattern, Lit):
            return pattern.value
        if isinstance(pattern, Var):
            if pattern.name not in self.env:
                hint = self.hint(pattern.name)
                self.env[pattern.name] = hint if hint is not None and self.rng.random() < 0.7 else default()
            return self.env[pattern.name]
        constant = rational(pattern)
        if constant is not None:
            return constant
        found = self.compute(pattern)
        if found is None:
            raise Retry
        return found

    def known(self, pattern: Term) -> Any:
        """The value of a scalar pattern if nothing has to be drawn for it."""
        if isinstance(pattern, Var):
            return self.env.get(pattern.name)
        return self.scalar(pattern, _retry)

    def hint(self, name: str) -> Any:
        """What a side condition ``(= name expression)`` says."""
        for c in self.rule.conditions:
            if isinstance(c, App) and c.op == "=" and len(c.args) == 2:
                for a, b in (c.args, c.args[::-1]):
                    if a == Var(name) and b != a:
                        found = self.compute(b)
                        if found is not None:
                            return found
        return None

    def compute(self, term: Term) -> Any:
        """Value of a primitive expression over bound variables, None where it cannot be computed."""
        if isinstance(term, Lit):
            return term.value
        if isinstance(term, Var):
            return self.env.get(term.name)
        constant = rational(term)
        if constant is not None:
            return constant
        args = [self.compute(a) for a in term.args]
        if any(a is None for a in args):
            return None
        try:
            if term.op == "shape":
                return args[0].shape
            if term.op == "vec-get":
                return args[0][args[1]]
            if term.op == "vec-set":
                return (*args[0][: args[1]], args[2], *args[0][args[1] + 1 :])
            if term.op == "vec-of":
                return tuple(args)
            if term.op == "vec-length":
                return len(args[0])
            if term.op == "vec-push":
                return (*args[0], args[1])
            if term.op == "vec-pop":
                return args[0][:-1] if args[0] else None
            if term.op == "vec-empty":
                return ()
            if term.op in ("+", "-", "*") and len(args) == 2:
                a, b = args
                return a + b if term.op == "+" else a - b if term.op == "-" else a * b
            if term.op == "/" and isinstance(args[0], Fraction):
                return args[0] / args[1]
        except (IndexError, TypeError, AttributeError, ZeroDivisionError):
            return None
        return None

    def body(self, pattern: Term, operands: int) -> str:
        return str(self.scalar(pattern, lambda: self.in_turn(BODIES[operands])))

    def in_turn(self, pool: Sequence[Any]) -> Any:
        """The next one of a pool for the first variable that is drawn, any for those after it."""
        turn, self.turn = self.turn, self.rng.randrange(1000)
        return pool[turn % len(pool)]

    def constant(self, pattern: Term) -> Fraction:
        found = self.scalar(pattern, lambda: self.in_turn(CONSTANTS))
        if not isinstance(found, Fraction):
            raise Retry
        return found

    def integer(self, pattern: Term, low: int, high: int) -> int:
        """An integer of ``[low, high)``."""
        if low >= high:
            raise Retry
        found = self.scalar(pattern, lambda: self.rng.randrange(low, high))
        if not isinstance(found, int) or not low <= found < high:
            raise Retry
        return found

    # ---- tensors --------------------------------------------------------------------------------------------------

    def value(self, pattern: Term, want: Want) -> Ground:
        """A ground term for a pattern of sort Value."""
        if isinstance(pattern, Var):
            found = self.env.get(pattern.name)
            if found is None:
                shape = self.shape(want)
                found = Ground(f"(Leaf {self.next_leaf})", shape)
                self.leaves[self.next_leaf] = (pattern.name, shape)
                self.next_leaf += 1
                self.env[pattern.name] = found
            if not isinstance(found, Ground) or not self.fits(found.shape, want):
                raise Retry
            return found
        if not isinstance(pattern, App) or pattern.op not in CONSTRUCTORS:
            raise Retry
        made: Ground = getattr(self, f"_{pattern.op.lower().rstrip('123')}")(pattern.args, want)
        if not self.fits(made.shape, want):
            raise Retry
        return made

    def _map(self, a: Sequence[Term], want: Want) -> Ground:
        body = self.body(a[0], len(a) - 1)
        order = sorted(range(1, len(a)), key=lambda k: self.peek(a[k]) is None)
        made: dict[int, Ground] = {}
        shape = want
        for k in order:
            made[k] = self.value(a[k], shape)
            shape = made[k].shape
        assert shape is not None
        inner = " ".join(made[k].text for k in range(1, len(a)))
        return Ground(f"(Map{len(a) - 1} {string_text(body)} {inner})", made[1].shape)

    def _scale(self, a: Sequence[Term], want: Want) -> Ground:
        c, x = self.constant(a[0]), self.value(a[1], want)
        return Ground(f"(Scale {rational_text(c)} {x.text})", x.shape)

    def _shift(self, a: Sequence[Term], want: Want) -> Ground:
        c, x = self.constant(a[0]), self.value(a[1], want)
        return Ground(f"(Shift {rational_text(c)} {x.text})", x.shape)

    def _place(self, a: Sequence[Term], want: Want) -> Ground:
        given, known = self.known(a[1]), self.peek(a[0])
        goal: Want = self.known(a[2]) if want is None else want
        if goal is None and given is None:
            x = self.value(a[0], None)
            places: list[int] = [k for k, n in enumerate(x.shape) if n > 1 or self.rng.random() < 0.5]
            self.rng.shuffle(places)
            while len(places) < MOST_DIMS and self.rng.random() < 0.4:
                places.insert(self.rng.randint(0, len(places)), -1)
            given = tuple(places)
        elif goal is not None and given is None:
            rank = len(known) if known is not None else self.rng.randint(min(1, len(goal)), len(goal))
            spots: list[int] = self.rng.sample(range(len(goal)), min(rank, len(goal)))
            draft = [-1] * len(goal)
            for k, d in enumerate(spots):
                draft[d] = k
            given = tuple(draft)
        assert given is not None
        rank = max([*given, -1]) + 1
        inner: list[int | None] = [None] * rank
        for d, k in enumerate(given):
            if k >= 0 and goal is not None and d < len(goal):
                inner[k] = goal[d]
        x = self.value(a[0], known if known is not None else tuple(inner) if rank else None)
        if any(k >= len(x.shape) for k in given):
            raise Retry
        if goal is not None and len(goal) != len(given):
            raise Retry
        shape = tuple(
            x.shape[k] if k >= 0 else self.size() if goal is None or goal[d] is None else goal[d]
            for d, k in enumerate(given)
        )
        if self.scalar(a[1], lambda: given) != given or self.scalar(a[2], lambda: shape) != shape:
            raise Retry
        if any(n != 1 for k, n in enumerate(x.shape) if k not in given):
            raise Retry
        return Ground(f"(Place {x.text} {dims_text(given)} {dims_text(shape)})", shape)  # type: ignore[arg-type]

    def _view(self, a: Sequence[Term], want: Want) -> Ground:
        if want is None or self.peek(a[0]) is not None:
            x = self.value(a[0], None)
            shape = self.scalar(a[1], lambda: self._regroup(x.shape) if want is None else self.shape(want))
        else:
            shape = self.scalar(a[1], lambda: self.shape(want))
            x = self.value(a[0], self._regroup(shape))
        if prod(shape) != prod(x.shape):
            raise Retry
        return Ground(f"(View {x.text} {dims_text(shape)})", tuple(shape))

    def _regroup(self, shape: Shape) -> Shape:
        """Another shape with as many elements: neighbours merged, a size divided."""
        out = list(shape)
        if len(out) > 1 and self.rng.random() < 0.6:
            k = self.rng.randrange(len(out) - 1)
            out[k : k + 2] = [out[k] * out[k + 1]]
        if len(out) < MOST_DIMS:
            k = self.rng.randrange(len(out))
            divisors = [n for n in range(2, out[k]) if out[k] % n == 0]
            if divisors:
                n = self.rng.choice(divisors)
                out[k : k + 1] = [n, out[k] // n]
        return tuple(out)

    def _slice(self, a: Sequence[Term], want: Want) -> Ground:
        known = self.peek(a[0])
        if want is None or known is not None:
            x = self.value(a[0], known)
            d = self.integer(a[1], 0, len(x.shape))
            n = want[d] if want is not None and d < len(want) else None
            i = self.integer(a[2], 0, x.shape[d] - (n or 1) + 1)
            last = x.shape[d]
            j = self.integer(a[3], i + 1, last + 1) if n is None else self.scalar(a[3], lambda: i + n)
            if not i < j <= last:
                raise Retry
        else:
            d = self.integer(a[1], 0, len(want))
            n = want[d]
            i = self.scalar(a[2], lambda: self.rng.choice((0, 0, 1, 2)))
            j = self.scalar(a[3], lambda: i + (n if n is not None else self.size()))
            inner = list(want)
            inner[d] = j + self.rng.choice((0, 0, 1, 2))
            x = self.value(a[0], tuple(inner))
            if not 0 <= i < j <= x.shape[d]:
                raise Retry
        shape = tuple(j - i if k == d else m for k, m in enumerate(x.shape))
        return Ground(f"(Slice {x.text} {d} {i} {j})", shape)

    def _cat(self, a: Sequence[Term], want: Want) -> Ground:
        if want is None:
            x = self.value(a[0], None)
            d = self.integer(a[2], 0, len(x.shape))
        else:
            d = self.integer(a[2], 0, len(want))
            n = want[d]
            known = self.peek(a[0])
            if n is not None and n < 2:
                raise Retry
            first = (
                None if n is None else known[d] if known is not None and d < len(known) else self.rng.randrange(1, n)
            )
            x = self.value(a[0], tuple(first if k == d else m for k, m in enumerate(want)))
        rest = None if want is None or want[d] is None else want[d] - x.shape[d]  # type: ignore[operator]
        y = self.value(a[1], tuple(rest if k == d else m for k, m in enumerate(x.shape)))
        shape = tuple(m + y.shape[k] if k == d else m for k, m in enumerate(x.shape))
        return Ground(f"(Cat {x.text} {y.text} {d})", shape)

    def _fold(self, a: Sequence[Term], want: Want) -> Ground:
        body, role = self._pair(a[0], a[1], FOLDS)
        known = self.peek(a[2])
        if want is None or known is not None:
            x = self.value(a[2], known)
            rank = len(x.shape)
            drawn = tuple(sorted(self.rng.sample(range(rank), self.rng.randint(1, rank))))
            reduced = self.scalar(a[3], lambda: drawn)
        else:
            reduced = self.known(a[3])
            if reduced is None:
                reduced = tuple(sorted(self.rng.sample(range(len(want) + 1), 1)))
                self.scalar(a[3], lambda: reduced)
            inner: list[int | None] = list(want)
            for d in sorted(reduced):
                inner.insert(d, None)
            x = self.value(a[2], tuple(inner))
        if not reduced or any(not 0 <= d < len(x.shape) for d in reduced):
            raise Retry
        shape = tuple(n for d, n in enumerate(x.shape) if d not in reduced)
        if self.scalar(a[4], lambda: shape) != shape:
            raise Retry
        return Ground(
            f"(Fold {string_text(body)} {string_text(role)} {x.text} {dims_text(reduced)} {dims_text(shape)})", shape
        )

    def _einsum(self, a: Sequence[Term], want: Want) -> Ground:
        spec = str(self.scalar(a[0], lambda: self.rng.choice(SPECS)))
        inputs, out = spec.split("->")
        left, right = inputs.split(",")
        sizes: dict[str, int | None] = {}
        if want is not None:
            if len(want) != len(out):
                raise Retry
            sizes.update(zip(out, want))
        x = self.value(a[1], tuple(sizes.get(c) for c in left))
        sizes.update(zip(left, x.shape))
        y = self.value(a[2], tuple(sizes.get(c) for c in right))
        sizes.update(zip(right, y.shape))
        shape = tuple(int(sizes[c] or 0) for c in out)
        if self.scalar(a[3], lambda: shape) != shape:
            raise Retry
        return Ground(f"(Einsum {string_text(spec)} {x.text} {y.text} {dims_text(shape)})", shape)

    def _along(self, a: Sequence[Term], want: Want) -> Ground:
        body, role = self._pair(a[0], a[1], ALONG)
        x = self.value(a[2], want)
        d = self.integer(a[3], 0, len(x.shape))
        return Ground(f"(Along {string_text(body)} {string_text(role)} {x.text} {d})", x.shape)

    def _range(self, a: Sequence[Term], want: Want) -> Ground:
        if want is not None and len(want) != 1:
            raise Retry
        kind = str(self.scalar(a[0], lambda: self.rng.choice(("int", "float"))))
        start = self.scalar(a[1], lambda: self.rng.choice((0, 0, 1, 3, -2)))
        step = self.scalar(a[2], lambda: self.rng.choice((1, 1, 2)))
        n = self.scalar(a[3], lambda: self.size() if want is None or want[0] is None else want[0])
        return Ground(f"(Range {string_text(kind)} {start} {step} {n})", (n,))

    def _lookup(self, a: Sequence[Term], want: Want) -> Ground:
        x = self.value(a[0], None if want is None else tuple(None for _ in want))
        d = self.integer(a[2], 0, len(x.shape))
        if isinstance(a[1], Var) and a[1].name not in self.env:
            self.indices[self.next_leaf] = x.shape[d]
        i = self.value(a[1], (None if want is None else want[d],))
        return Ground(f"(Lookup {x.text} {i.text} {d})", (*x.shape[:d], i.shape[0], *x.shape[d + 1 :]))

    def _pair(self, body: Term, role: Term, pool: Sequence[tuple[str, str]]) -> tuple[str, str]:
        """A body with a role that it can have."""
        b, r = self.known(body), self.known(role)
        options = [p for p in pool if b in (None, p[0]) and r in (None, p[1])]
        if not options and b is not None and r is not None:
            return str(b), str(r)
        if not options:
            raise Retry
        b, r = self.rng.choice(options)
        return str(self.scalar(body, lambda: b)), str(self.scalar(role, lambda: r))


def _retry() -> Any:
    raise Retry


def instances(rule: EqualityRule, seed: int, count: int, tries: int = 40) -> list[Instance]:
    """Up to ``count`` instances with leaves of their own."""
    rng = random.Random(f"{rule.name} {seed}")
    found: list[Instance] = []
    leaf = 0
    for _ in range(count * tries):
        if len(found) >= count:
            break
        filler = Filler(rule, rng, leaf, len(found))
        try:
            found.append(filler.fill())
        except (Retry, ValueError):  # random raises ValueError where there is nothing to choose from, e.g. no dimension
            continue
        leaf = filler.next_leaf
    return found
