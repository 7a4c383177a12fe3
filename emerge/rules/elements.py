"""Symbolic elements of tensors: numbers with a unique form for every value that can be told apart.

An element is a polynomial with rational coefficients over *atoms*: elements of inputs, applications of functions about
which nothing is known, and largest or smallest elements of a set. Equal elements have equal numbers, so tensors of
elements are tensors of int64 and are moved about like any other. Forms are made by identities of the real numbers only;
two elements with different numbers may still be equal, two with equal numbers are.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from fractions import Fraction
from typing import Any

Monomial = tuple[int, ...]
Poly = dict[Monomial, Fraction]

#: An element with more terms is not multiplied out: it enters a product as one atom.
MOST_TERMS = 48
#: Functions of one element that never decrease (the kinds of ``monotone_in`` with one operand).
MONOTONE = frozenset({"exp", "tanh", "sigmoid", "relu", "copy"})


def _add(poly: Poly, vanished: set[int], monomial: Monomial, value: Fraction) -> None:
    """Adds a term; what cancels goes into ``vanished``."""
    value += poly.get(monomial, Fraction(0))
    if value:
        poly[monomial] = value
    else:
        poly.pop(monomial, None)
        vanished.update(monomial)


class Elements:
    """The table of all elements of one pair; element 0 is the number 0."""

    def __init__(self) -> None:
        self._atoms: dict[Hashable, int] = {}
        self._keys: list[Any] = []
        self._cut_atoms: set[int] = set()
        self._ids: dict[tuple[frozenset[tuple[Monomial, Fraction]], frozenset[int]], int] = {}
        self._forms: list[tuple[Poly, frozenset[int]]] = []
        self._products: dict[tuple[int, int], int] = {}
        self._sums: dict[tuple[int, ...], int] = {}
        self.number(Fraction(0))

    def __len__(self) -> int:
        """Number of different elements."""
        return len(self._forms)

    # ---- making elements -----------------------------------------------------------------------------------------

    def _atom(self, key: Hashable, inner: Iterable[int] = (), cut: bool = False) -> int:
        """Number of an atom. ``inner``: elements that it is made of. ``cut``: it stands for a large element."""
        found = self._atoms.get(key)
        if found is None:
            found = self._atoms[key] = len(self._keys)
            self._keys.append(key)
            if cut or any(self.cut(e) for e in inner):
                self._cut_atoms.add(found)
        return found

    def _element(self, poly: Poly, vanished: frozenset[int] = frozenset()) -> int:
        """Number of an element. ``vanished``: atoms that were read and cancelled; it is defined where they are."""
        if len(poly) > 1:
            found = self._shifted_extremum(poly, vanished)
            if found is not None:
                return found
        key = (frozenset(poly.items()), vanished)
        number = self._ids.get(key)
        if number is None:
            number = self._ids[key] = len(self._forms)
            self._forms.append((poly, vanished))
        return number

    def _shifted_extremum(self, poly: Poly, vanished: frozenset[int]) -> int | None:
        """``max(S) + t = max over s of (s + t)``, so that a shift of an extremum has one form."""
        sets = [m for m in poly if any(self._keys[a][0] in ("max", "min") for a in m)]
        if len(sets) != 1 or len(sets[0]) != 1 or poly[sets[0]] != 1:
            return None
        kind, members = self._keys[sets[0][0]]
        rest = self._element({m: c for m, c in poly.items() if m != sets[0]}, vanished)
        return self.extremum(kind, [self.total([e, rest]) for e in members])

    def number(self, value: Fraction) -> int:
        """A constant."""
        return self._element({(): value} if value else {})

    def whole(self, element: int) -> int | None:
        """The whole number that an element is wherever it is defined, None for any other."""
        poly, _ = self._forms[element]
        value = poly.get((), Fraction(0))
        return int(value) if set(poly) <= {()} and value.denominator == 1 else None

    def guarded(self, element: int, guards: Iterable[Hashable]) -> int:
        """The same value, defined only where some free elements, named by their keys, are."""
        poly, vanished = self._forms[element]
        more = {self._atom(("free", "guard", g)) for g in guards}
        return self._element(poly, vanished | more) if more else element

    def bare(self, element: int) -> tuple[int, frozenset[int]]:
        """An element without what it reads and does not hold, and that."""
        poly, vanished = self._forms[element]
        return self._element(poly), vanished

    def read_besides(self, element: int, vanished: frozenset[int]) -> int:
        """An element that also reads some atoms, as :meth:`bare` gives them."""
        poly, own = self._forms[element]
        return self._element(poly, own | vanished)

    def free(self, *key: Hashable) -> int:
        """An element about which nothing is known, by its name."""
        return self._element({(self._atom(("free", *key)),): Fraction(1)})

    def apply(self, function: Hashable, args: Sequence[int], commutative: bool = False) -> int:
        """A function about which nothing is known but that it is one (and perhaps commutative)."""
        operands = tuple(sorted(args)) if commutative else tuple(args)
        if function in MONOTONE and len(operands) == 1:
            inner = self._pure_extremum(operands[0])
            if inner is not None:
                return self.extremum(inner[0], [self.apply(function, [e]) for e in inner[1]])
        return self._element({(self._atom(("apply", function, operands), operands),): Fraction(1)})

    def _pure_extremum(self, element: int) -> tuple[str, frozenset[int]] | None:
        poly, vanished = self._forms[element]
        if vanished or len(poly) != 1:
            return None
        ((monomial, factor),) = poly.items()
        if factor != 1 or len(monomial) != 1 or self._keys[monomial[0]][0] not in ("max", "min"):
            return None
        kind, members = self._keys[monomial[0]]
        return kind, members

    def extremum(self, kind: str, elements: Iterable[int]) -> int:
        """The largest (``max``) or smallest (``min``) of some elements."""
        members: set[int] = set()
        for e in elements:
            inner = self._pure_extremum(e)
            members |= inner[1] if inner is not None and inner[0] == kind else {e}
        if len(members) == 1:
            return members.pop()
        found = frozenset(members)
        return self._element({(self._atom((kind, found), found),): Fraction(1)})

    def total(self, elements: Iterable[int]) -> int:
        """Their sum."""
        key = tuple(sorted(e for e in elements if e))
        if len(key) == 1:
            return key[0]
        if key not in self._sums:
            self._sums[key] = self._combined([(e, Fraction(1)) for e in key])
        return self._sums[key]

    def scaled(self, element: int, factor: Fraction) -> int:
        """``factor`` times an element."""
        return element if factor == 1 else self._combined([(element, factor)])

    def _combined(self, terms: Sequence[tuple[int, Fraction]]) -> int:
        poly: Poly = {}
        vanished: set[int] = set()
        for element, factor in terms:
            inner, gone = self._forms[element]
            vanished |= gone
            for monomial, c in inner.items():
                _add(poly, vanished, monomial, c * factor)
        return self._element(poly, self._left_over(poly, vanished))

    @staticmethod
    def _left_over(poly: Poly, vanished: set[int]) -> frozenset[int]:
        return frozenset(vanished.difference(*poly)) if vanished else frozenset()

    def product(self, x: int, y: int) -> int:
        """Their product, multiplied out unless it is large."""
        key = (x, y) if x < y else (y, x)
        if key not in self._products:
            poly: Poly = {}
            (left, gone_left), (right, gone_right) = self._forms[self._bounded(x)], self._forms[self._bounded(y)]
            vanished = set(gone_left | gone_right)
            for a, c in left.items():
                for b, d in right.items():
                    _add(poly, vanished, tuple(sorted(a + b)), c * d)
            if not left or not right:
                vanished.update(*left, *right)
            self._products[key] = self._element(poly, self._left_over(poly, vanished))
        return self._products[key]

    def _bounded(self, element: int) -> int:
        if len(self._forms[element][0]) <= MOST_TERMS:
            return element
        return self._element({(self._atom(("cut", element), (element,), cut=True),): Fraction(1)})

    def product_of(self, elements: Iterable[int]) -> int:
        """Their product, in which every factor with several terms is one atom."""
        out = self.number(Fraction(1))
        for e in elements:
            if len(self._forms[e][0]) > 1:
                e = self._element({(self._atom(("factor", e), (e,)),): Fraction(1)})
            out = self.product(out, e)
        return out

    # ---- comparing -----------------------------------------------------------------------------------------------

    def cut(self, element: int) -> bool:
        """Does a large element stand in it as one atom? Such elements may be equal and have different numbers."""
        poly, vanished = self._forms[element]
        return any(a in self._cut_atoms for m in poly for a in m) or not self._cut_atoms.isdisjoint(vanished)

    def agree(self, reference: int, found: int) -> bool:
        """``found`` has the value of ``reference`` and is defined wherever that is."""
        if reference == found:
            return True
        (left, gone_left), (right, gone_right) = self._forms[reference], self._forms[found]
        return left == right and gone_right <= gone_left.union(*left)

    def text(self, element: int, depth: int = 2) -> str:
        """An element for people, shortened."""
        poly, _ = self._forms[element]
        terms = []
        for monomial, c in list(poly.items())[:4]:
            factors = [*([str(c)] if c != 1 or not monomial else []), *(self._atom_text(a, depth) for a in monomial)]
            terms.append("*".join(factors))
        return (" + ".join(terms) or "0") + (f" + {len(poly) - 4} more" if len(poly) > 4 else "")

    def _atom_text(self, atom: int, depth: int) -> str:
        kind, *rest = self._keys[atom]
        if kind == "free":
            return ".".join(map(str, rest))
        if depth == 0:
            return "..."
        if kind == "apply":
            return f"{rest[0]}({', '.join(self.text(e, depth - 1) for e in rest[1][:3])})"
        if kind in ("max", "min"):
            return f"{kind}({', '.join(self.text(e, depth - 1) for e in sorted(rest[0])[:3])})"
        return f"({self.text(rest[0], depth - 1)})"
