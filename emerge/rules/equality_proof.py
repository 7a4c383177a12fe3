"""Proofs of pointwise rules of the algebra with Z3, over the extended reals.

A value is four terms: undefined, +inf, -inf, and the real number it is otherwise. Arithmetic, roots, comparisons and
selections are written out; ``sigmoid`` and ``silu`` are their definitions by ``exp``; ``exp`` and ``log`` are uninterpreted
with their laws written for the terms at hand; any other body, and a body that is a variable, is an uninterpreted function of
its operands. Both sides must be undefined together and equal otherwise. There are no quantifiers.

The proof is general: a pointwise term has one value per element, which depends on the operands' values at that element only,
so one symbolic element stands for tensors of all shapes.

**Sums and contractions.** A rule whose two terms hold one and the same sum (or contraction) each, of pointwise terms, is proved
for one and for two summands; ``h`` is what stands around the sum on a side. It follows for all numbers of summands by
induction when one of the sides is the bare sum, ``sum of g(x_i) = h(sum of f(x_i))``: one summand says ``g(x) = h(f(x))``,
two then say ``h(a) + h(b) = h(a + b)`` for all values ``a``, ``b`` of ``f``, which therefore must be all values: ``f`` is a
variable, or a product of two. Addition of extended reals, undefined among them, is associative and commutative.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, NamedTuple, TypeGuard

from emerge.algebra.rulefile import CONSTRUCTORS, App, EqualityRule, Lit, Term, Var, rational, subterms

POINTWISE = {"Map1", "Map2", "Map3", "Scale", "Shift"}
TIMEOUT_MS = 5000


class NotPointwise(Exception):
    """The rule speaks about shapes, or about something else that is not written out here."""


@dataclass(frozen=True)
class Proof:
    """``holds``: for all extended reals. ``refuted``: a counterexample, in ``reason``."""

    holds: bool = False
    refuted: bool = False
    reason: str = ""


class Ext(NamedTuple):
    """An extended real or undefined; at most one of the first three holds."""

    undefined: Any
    plus: Any
    minus: Any
    real: Any


def prove(rule: EqualityRule, seconds: float = TIMEOUT_MS / 1000) -> Proof:
    """Proves a rule whose terms are pointwise, or hold one sum each; other rules are neither proved nor refuted."""
    if _sums_alike(rule):
        proofs = [_prove(rule, seconds, n) for n in (1, 2)]
        if all(p.holds for p in proofs):
            return Proof(True, False, f"{proofs[0].reason}, by induction over the summands")
        return Proof()
    return _prove(rule, seconds, 0)


def commutes(kind: str, seconds: float = TIMEOUT_MS / 1000) -> Proof:
    """Proves ``f(x, y) = f(y, x)`` for a kind of bodies that is written out here."""

    def claim(symbols: _Symbols) -> Any:
        x, y = symbols.value(Var("x")), symbols.value(Var("y"))
        return symbols.equal(symbols.body(kind, [x, y]), symbols.body(kind, [y, x]))

    return _claimed(claim, seconds)


#: Kinds each element of whose result is one element of an operand, or 0: a sum of two such is such a sum.
MOVED = frozenset({"cat", "slice", "copy"})


def adds_up(kind: str, seconds: float = TIMEOUT_MS / 1000) -> Proof:
    """Proves ``f(a + b) = f(a) + f(b)``, all operands of a kind of bodies taken together.

    Sums are proved for two summands: ``(a + b) + (x + y) = (a + x) + (b + y)`` is also the step from n summands to n + 1.
    """
    if kind in MOVED:
        return Proof(True, False, "each element is one of an operand's, or 0")

    def claim(symbols: _Symbols) -> Any:
        a, b, x, y = (symbols.value(Var(name)) for name in "abxy")
        factor = symbols.constant(symbols.rational(Var("factor")))
        made = {
            "add": lambda p, q: symbols.plus(p, symbols.times(factor, q)),
            "sub": lambda p, q: symbols.plus(p, symbols.negative(symbols.times(factor, q))),
            "neg": lambda p, q: symbols.negative(p),
            "scale": lambda p, q: symbols.times(factor, p),
            "sum": symbols.plus,
            "cumsum": symbols.plus,
        }.get(kind)
        if made is None:
            return None
        return symbols.equal(made(symbols.plus(a, b), symbols.plus(x, y)), symbols.plus(made(a, x), made(b, y)))

    return _claimed(claim, seconds)


def _claimed(claim: Callable[[_Symbols], Any], seconds: float) -> Proof:
    """Proves what ``claim`` says about fresh symbols; None and functions that are not written out prove nothing."""
    try:
        import z3
    except ImportError:
        return Proof()
    symbols = _Symbols(z3)
    said = claim(symbols)
    if said is None or symbols.uninterpreted:
        return Proof()
    solver = z3.Solver()
    solver.set("timeout", max(1, int(seconds * 1000)))
    solver.add(*symbols.assumptions, *symbols.axioms(), z3.Not(said))
    answer = solver.check()
    return Proof(answer == z3.unsat, answer == z3.sat, f"over the extended reals, z3 {z3.get_version_string()}")


def _sums_alike(rule: EqualityRule) -> bool:
    """Is the rule ``sum of g(x_i) = h(sum of f(x_i))``, or the same for a contraction, with ``f`` a variable or a product?"""
    if len(rule.patterns) != 1 or len(rule.unions) != 1 or rule.lets or rule.reverse:
        return False
    left, right = rule.unions[0]
    left = rule.patterns[0][1] if isinstance(left, Var) and left.name == rule.patterns[0][0] else left
    sums: list[list[App]] = [[t for t in subterms(term) if _is_sum(t)] for term in (left, right)]
    if any(len(found) != 1 for found in sums) or left != sums[0][0]:
        return False
    one, other = sums[0][0], sums[1][0]
    operands = {"Fold": (2,), "Einsum": (1, 2)}[one.op]
    if one.op != other.op or any(a != b for k, (a, b) in enumerate(zip(one.args, other.args)) if k not in operands):
        return False  # summed over other dimensions
    inner = [other.args[k] for k in operands]
    if not all(isinstance(t, Var) for t in inner) or len(set(inner)) != len(inner):
        return False
    # an operand is read at positions of its own, so a tensor may not stand in another operand as well
    return all(_tensors(one.args[k]) == {t} for k, t in zip(operands, inner))


def _tensors(term: Term) -> set[Term]:
    """Variables for tensors in a term."""
    if isinstance(term, Var):
        return {term}
    if not isinstance(term, App) or term.op not in CONSTRUCTORS:
        return set()
    return {v for sort, a in zip(CONSTRUCTORS[term.op], term.args) if sort == "Value" for v in _tensors(a)}


def _is_sum(term: Term) -> TypeGuard[App]:
    return isinstance(term, App) and (term.op == "Einsum" or (term.op == "Fold" and term.args[:2] == (Lit("sum"), Lit("sum"))))


def _prove(rule: EqualityRule, seconds: float, summands: int) -> Proof:
    terms = [t for _, t in rule.patterns] + [t for pair in rule.unions for t in pair] + [t for _, t in rule.lets]
    for term in terms:
        if any(isinstance(t, App) and t.op in CONSTRUCTORS and t.op not in POINTWISE and not (summands and _is_sum(t))
               for t in subterms(term)):
            return Proof()
    try:
        import z3
    except ImportError:
        return Proof()
    try:
        symbols = _Symbols(z3, summands)
        for name, pattern in rule.patterns:
            found = symbols.value(pattern)
            if name:
                if name in symbols.env:  # a premise: two terms are equal
                    symbols.assumptions.append(symbols.equal(symbols.env[name], found))
                symbols.env.setdefault(name, found)
        for name, term in rule.lets:
            symbols.env[name] = symbols.value(term)
        claims = [symbols.equal(symbols.value(a), symbols.value(b)) for a, b in rule.unions]
        for condition in rule.conditions:
            symbols.condition(condition)
    except (NotPointwise, RecursionError):
        return Proof()
    solver = z3.Solver()
    solver.set("timeout", max(1, int(seconds * 1000)))
    solver.add(*symbols.assumptions, *symbols.axioms())
    solver.add(z3.Not(z3.And(*claims)))
    answer = solver.check()
    version = z3.get_version_string()
    if answer == z3.unsat:
        return Proof(True, False, f"over the extended reals, z3 {version}")
    if answer == z3.sat and not symbols.uninterpreted:
        return Proof(False, True, f"is false for {symbols.shown(solver.model())}")
    return Proof()


class _Symbols:
    """Symbolic values of one rule's terms."""

    def __init__(self, z3: Any, summands: int = 0) -> None:
        self.z3, self.summands = z3, summands
        #: Within a sum: which of its summands is looked at; elsewhere "".
        self.position = ""
        self.env: dict[str, Ext] = {}
        self.rationals: dict[str, Any] = {}
        self.assumptions: list[Any] = []
        self.uninterpreted = False
        self.roots: list[Any] = []
        self.inverses: list[Any] = []
        self.exponents: list[Any] = []
        self.logarithms: list[Any] = []
        real = z3.RealSort()
        self.root = z3.Function("sqrt", real, real)
        self.inverse = z3.Function("reciprocal", real, real)
        self.exp = z3.Function("exp", real, real)
        self.log = z3.Function("log", real, real)

    # ---- terms ----------------------------------------------------------------------------------------------------

    def value(self, term: Term) -> Ext:
        """Value of a tensor term."""
        z3 = self.z3
        if isinstance(term, Var):
            name = term.name + self.position
            if name not in self.env:
                # a variable stands for any tensor, also for one that is undefined at this element
                undefined, plus, minus = (z3.Bool(f"{name} {k}") for k in ("undefined", "+inf", "-inf"))
                found = Ext(undefined, plus, minus, z3.Real(name))
                self.assumptions.append(z3.AtMost(undefined, plus, minus, 1))
                self.env[name] = found
            return self.env[name]
        if self.summands and not self.position and _is_sum(term):
            return self.sum(term)
        if not isinstance(term, App) or term.op not in POINTWISE:
            raise NotPointwise(str(term))
        if term.op == "Scale":
            return self.times(self.constant(self.rational(term.args[0])), self.value(term.args[1]))
        if term.op == "Shift":
            return self.plus(self.value(term.args[1]), self.constant(self.rational(term.args[0])))
        operands = [self.value(a) for a in term.args[1:]]
        body = term.args[0]
        if isinstance(body, Var):
            return self.unknown(f"body:{body.name}/{len(operands)}", operands)
        if not isinstance(body, Lit) or not isinstance(body.value, str):
            raise NotPointwise(str(body))
        return self.body(body.value, operands)

    def sum(self, term: App) -> Ext:
        """A sum or contraction of so many summands."""
        found = None
        for k in range(self.summands):
            self.position = f"[{k}]"
            inner = self.value(term.args[2]) if term.op == "Fold" else self.times(*map(self.value, term.args[1:3]))
            found = inner if found is None else self.plus(found, inner)
        self.position = ""
        assert found is not None
        return found

    def rational(self, term: Term) -> Any:
        """A constant of a rule."""
        z3 = self.z3
        known = rational(term)
        if known is not None:
            return z3.RealVal(str(known))
        if isinstance(term, Var):
            return self.rationals.setdefault(term.name, z3.Real(f"constant {term.name}"))
        if isinstance(term, App) and term.op in ("+", "-", "*", "/") and len(term.args) == 2:
            a, b = (self.rational(t) for t in term.args)
            if term.op == "/":
                self.assumptions.append(b != 0)  # the primitive has no value otherwise
                self.inverses.append(b)
                return a * self.inverse(b)
            return a + b if term.op == "+" else a - b if term.op == "-" else a * b
        if isinstance(term, App) and term.op in ("neg", "abs") and len(term.args) == 1:
            a = self.rational(term.args[0])
            return -a if term.op == "neg" else z3.If(a < 0, -a, a)
        raise NotPointwise(str(term))

    def condition(self, term: Term) -> None:
        """Assumes a side condition on constants; one about anything else is left out, which proves more."""
        if not isinstance(term, App) or term.op not in ("=", "!=", "<", "<=", ">", ">=") or len(term.args) != 2:
            return
        before = list(self.assumptions)
        try:
            a, b = (self.rational(t) for t in term.args)
        except NotPointwise:
            self.assumptions = before
            return
        self.assumptions.append(
            {"=": a == b, "!=": a != b, "<": a < b, "<=": a <= b, ">": a > b, ">=": a >= b}[term.op]
        )

    def body(self, body: str, x: Sequence[Ext]) -> Ext:
        """A pointwise body by name."""
        z3 = self.z3
        kind, *attrs = body.split("#")
        simple = {
            ("add", 2): self.plus,
            ("sub", 2): lambda a, b: self.plus(a, self.negative(b)),
            ("mul", 2): self.times,
            ("div", 2): lambda a, b: self.times(a, self.reciprocal(b)),
            ("reciprocal", 1): self.reciprocal,
            ("square", 1): lambda a: self.times(a, a),
            ("neg", 1): self.negative,
            ("sqrt", 1): self.sqrt,
            ("rsqrt", 1): lambda a: self.reciprocal(self.sqrt(a)),
            ("exp", 1): self.exponential,
            ("log", 1): self.logarithm,
            ("sigmoid", 1): self.sigmoid,
            ("silu", 1): lambda a: self.times(a, self.sigmoid(a)),
            ("abs", 1): lambda a: self.select(self.less(a, self.zero()), self.negative(a), a),
            ("relu", 1): lambda a: self.select(self.less(a, self.zero()), self.zero(a.undefined), a),
            ("maximum", 2): lambda a, b: self.strict(self.select(self.less(a, b), b, a), a, b),
            ("minimum", 2): lambda a, b: self.strict(self.select(self.less(a, b), a, b), a, b),
            ("lt", 2): lambda a, b: self.truth(self.less(a, b), a, b),
            ("gt", 2): lambda a, b: self.truth(self.less(b, a), a, b),
            ("le", 2): lambda a, b: self.truth(z3.Not(self.less(b, a)), a, b),
            ("ge", 2): lambda a, b: self.truth(z3.Not(self.less(a, b)), a, b),
            ("eq", 2): lambda a, b: self.truth(self.same(a, b), a, b),
            ("ne", 2): lambda a, b: self.truth(z3.Not(self.same(a, b)), a, b),
            ("not", 1): lambda a: self.truth(z3.Not(self.holds(a)), a),
            ("and", 2): lambda a, b: self.truth(z3.And(self.holds(a), self.holds(b)), a, b),
            ("or", 2): lambda a, b: self.truth(z3.Or(self.holds(a), self.holds(b)), a, b),
            ("where", 3): lambda c, a, b: self.chosen(c, a, b),
        }
        if not attrs and (kind, len(x)) in simple:
            return simple[kind, len(x)](*x)  # type: ignore[operator]
        if kind in ("powc", "mulc", "addc", "divc") and len(x) == 1 and len(attrs) == 1:
            found = self.with_constant(kind, attrs[0], x[0])
            if found is not None:
                return found
        return self.unknown(f"{body}/{len(x)}", x)

    def with_constant(self, kind: str, text: str, x: Ext) -> Ext | None:
        """Bodies with a constant in their name."""
        try:
            c = Fraction(text)
        except ValueError:
            return None
        if kind == "addc":
            return self.plus(x, self.constant(self.z3.RealVal(str(c))))
        if kind == "mulc" or (kind == "divc" and c):
            return self.times(x, self.constant(self.z3.RealVal(str(c if kind == "mulc" else 1 / c))))
        if kind != "powc":
            return None
        if abs(c) == Fraction(1, 2):
            return self.sqrt(x) if c > 0 else self.reciprocal(self.sqrt(x))
        if c.denominator != 1 or not 1 <= abs(c) <= 6:
            return None
        found = x
        for _ in range(int(abs(c)) - 1):
            found = self.times(found, x)
        return found if c > 0 else self.reciprocal(found)

    # ---- arithmetic -----------------------------------------------------------------------------------------------

    def constant(self, real: Any) -> Ext:
        no = self.z3.BoolVal(False)
        return Ext(no, no, no, real)

    def zero(self, undefined: Any = None) -> Ext:
        found = self.constant(self.z3.RealVal(0))
        return found if undefined is None else found._replace(undefined=undefined)

    def finite(self, x: Ext) -> Any:
        return self.z3.Not(self.z3.Or(x.undefined, x.plus, x.minus))

    def infinite(self, x: Ext) -> Any:
        return self.z3.Or(x.plus, x.minus)

    def is_zero(self, x: Ext) -> Any:
        return self.z3.And(self.finite(x), x.real == 0)

    def positive(self, x: Ext) -> Any:
        return self.z3.Or(x.plus, self.z3.And(self.finite(x), x.real > 0))

    def made(self, undefined: Any, plus: Any, minus: Any, real: Any) -> Ext:
        z3 = self.z3
        u = z3.simplify(undefined)
        return Ext(u, z3.simplify(z3.And(z3.Not(u), plus)), z3.simplify(z3.And(z3.Not(u), minus)), real)

    def plus(self, x: Ext, y: Ext) -> Ext:
        z3 = self.z3
        undefined = z3.Or(x.undefined, y.undefined, z3.And(x.plus, y.minus), z3.And(x.minus, y.plus))
        return self.made(undefined, z3.Or(x.plus, y.plus), z3.Or(x.minus, y.minus), x.real + y.real)

    def negative(self, x: Ext) -> Ext:
        return Ext(x.undefined, x.minus, x.plus, -x.real)

    def times(self, x: Ext, y: Ext) -> Ext:
        z3 = self.z3
        undefined = z3.Or(
            x.undefined,
            y.undefined,
            z3.And(self.infinite(x), self.is_zero(y)),
            z3.And(self.is_zero(x), self.infinite(y)),
        )
        large = z3.Or(self.infinite(x), self.infinite(y))
        alike = self.positive(x) == self.positive(y)
        return self.made(undefined, z3.And(large, alike), z3.And(large, z3.Not(alike)), x.real * y.real)

    def reciprocal(self, x: Ext) -> Ext:
        z3 = self.z3
        self.inverses.append(x.real)
        no = z3.BoolVal(False)
        real = z3.If(self.infinite(x), z3.RealVal(0), self.inverse(x.real))
        return self.made(z3.Or(x.undefined, self.is_zero(x)), no, no, real)

    def sqrt(self, x: Ext) -> Ext:
        z3 = self.z3
        self.roots.append(x.real)
        undefined = z3.Or(x.undefined, x.minus, z3.And(self.finite(x), x.real < 0))
        return self.made(undefined, x.plus, z3.BoolVal(False), self.root(x.real))

    def exponential(self, x: Ext) -> Ext:
        z3 = self.z3
        self.uninterpreted = True
        self.exponents.append(x.real)
        return self.made(x.undefined, x.plus, z3.BoolVal(False), z3.If(x.minus, z3.RealVal(0), self.exp(x.real)))

    def logarithm(self, x: Ext) -> Ext:
        """``log 0`` is -inf."""
        z3 = self.z3
        self.uninterpreted = True
        self.logarithms.append(x.real)
        undefined = z3.Or(x.undefined, x.minus, z3.And(self.finite(x), x.real < 0))
        return self.made(undefined, x.plus, self.is_zero(x), self.log(x.real))

    def sigmoid(self, x: Ext) -> Ext:
        return self.reciprocal(self.plus(self.constant(self.z3.RealVal(1)), self.exponential(self.negative(x))))

    # ---- comparing and choosing -----------------------------------------------------------------------------------

    def less(self, x: Ext, y: Ext) -> Any:
        z3 = self.z3
        return z3.Or(
            z3.And(x.minus, z3.Not(y.minus)),
            z3.And(y.plus, z3.Not(x.plus)),
            z3.And(self.finite(x), self.finite(y), x.real < y.real),
        )

    def same(self, x: Ext, y: Ext) -> Any:
        z3 = self.z3
        return z3.And(x.plus == y.plus, x.minus == y.minus, z3.Or(self.infinite(x), x.real == y.real))

    def equal(self, x: Ext, y: Ext) -> Any:
        """Undefined together, and equal otherwise."""
        z3 = self.z3
        return z3.And(x.undefined == y.undefined, z3.Or(x.undefined, self.same(x, y)))

    def holds(self, x: Ext) -> Any:
        return self.z3.Not(self.is_zero(x))

    def truth(self, condition: Any, *operands: Ext) -> Ext:
        z3 = self.z3
        no = z3.BoolVal(False)
        real = z3.If(condition, z3.RealVal(1), z3.RealVal(0))
        return self.made(z3.Or(*(x.undefined for x in operands)), no, no, real)

    def select(self, condition: Any, x: Ext, y: Ext) -> Ext:
        return Ext(*(self.z3.If(condition, a, b) for a, b in zip(x, y)))

    def strict(self, found: Ext, *operands: Ext) -> Ext:
        undefined = self.z3.Or(*(x.undefined for x in operands))
        return self.made(undefined, found.plus, found.minus, found.real)

    def chosen(self, c: Ext, x: Ext, y: Ext) -> Ext:
        """``where``: what is not selected does not matter."""
        found = self.select(self.holds(c), x, y)
        return self.made(self.z3.Or(c.undefined, found.undefined), found.plus, found.minus, found.real)

    def unknown(self, name: str, operands: Sequence[Ext]) -> Ext:
        """An uninterpreted function of its operands' values."""
        z3 = self.z3
        self.uninterpreted = True
        args: list[Any] = []
        for x in operands:
            args += [x.undefined, x.plus, x.minus, z3.If(self.finite(x), x.real, z3.RealVal(0))]
        sorts = [z3.BoolSort(), z3.BoolSort(), z3.BoolSort(), z3.RealSort()] * len(operands)
        undefined, plus, minus = (z3.Function(f"{name}.{k}", *sorts, z3.BoolSort())(*args) for k in range(3))
        real = z3.Function(f"{name}.3", *sorts, z3.RealSort())(*args)
        if len(operands) == 1:  # no function of one operand has a value where its operand has none; a selection may
            undefined = z3.Or(operands[0].undefined, undefined)
        return Ext(undefined, z3.And(z3.Not(undefined), plus),
                   z3.And(z3.Not(undefined), z3.Not(plus), minus), real)  # fmt: skip

    # ---- laws of the functions ------------------------------------------------------------------------------------

    def axioms(self) -> list[Any]:
        """What is known about the functions, for the terms at hand."""
        z3 = self.z3
        out = [z3.Implies(a != 0, self.inverse(a) * a == 1) for a in self.inverses]
        for a in self.roots:
            out.append(z3.Implies(a >= 0, z3.And(self.root(a) >= 0, self.root(a) * self.root(a) == a)))
        exponents = list(self.exponents)
        for a in self.logarithms:
            out.append(z3.Implies(a > 0, self.exp(self.log(a)) == a))
            exponents.append(self.log(a))
        for a in self.exponents:
            out.append(self.log(self.exp(a)) == a)
        for a in exponents:
            out += [self.exp(a) > 0, z3.Implies(a == 0, self.exp(a) == 1)]
        for k, a in enumerate(exponents):
            for b in exponents[k:]:
                out.append(z3.Implies(a < b, self.exp(a) < self.exp(b)))
                out.append(z3.Implies(b < a, self.exp(b) < self.exp(a)))
                out.append(z3.Implies(a == -b, self.exp(a) * self.exp(b) == 1))
                out += [z3.Implies(c == a + b, self.exp(c) == self.exp(a) * self.exp(b)) for c in exponents]
        return out

    def shown(self, model: Any) -> str:
        """The values of a counterexample."""
        parts = []
        for name, x in self.env.items():
            if not self.z3.is_const(x.real) or x.real.decl().name() != name:
                continue
            kinds = (("undefined", x.undefined), ("inf", x.plus), ("-inf", x.minus))
            other = [s for s, flag in kinds if self.z3.is_true(model.eval(flag))]
            parts.append(f"{name} = {other[0] if other else model.eval(x.real, model_completion=True)}")
        parts += [f"{n} = {model.eval(c, model_completion=True)}" for n, c in self.rationals.items()]
        return ", ".join(parts)
