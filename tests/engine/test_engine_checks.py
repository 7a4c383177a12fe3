"""Static checks: each program is refused at its place; its mended twin is accepted."""

from __future__ import annotations

import pytest

from emerge.engine.run import Program
from emerge.util.errors import RuleError

D = (
    ".type L = [h:number, t:L]\n.type M = [h:number, t:M]\n.type A <: number\n.type B <: A\n.type C <: number\n"
    ".decl n(x:number)\n.decl n2(x:number, y:number)\n.decl s(x:symbol)\n.decl l(x:L)\n.decl m(x:M)\n"
    ".decl a(x:A)\n.decl b(x:B)\n.decl c(x:C) .decl o(x:number)\n"
)

# refused, part of the message, mended
CASES = {
    "undeclared": (
        "n(x) :- nn2(x).",
        "t.dl:14:9: the relation 'nn2' is not declared; did you mean 'n2'?",
        "n(x) :- n(x).",
    ),
    "undeclared in aggregate": (
        "n(x) :- x = count : { zz(_) }.",
        "'zz' is not declared",
        "n(x) :- x = count : { s(_) }.",
    ),
    "arity": ("n(x) :- n2(x).", "t.dl:14:9: 'n2' has 2 columns (declared at t.dl:7:7), found 1", "n(x) :- n2(x, _)."),
    "symbol for number": ('n("a").', "expected a value of type number (number), found a symbol", "n(1)."),
    "number for symbol": ("s(1).", "expected a value of type symbol (symbol), found a number", 's("1").'),
    "kinds join": ("n(x) :- n(x), s(x).", "'x' is used both as number and as symbol", "n(x) :- n(x), s(_)."),
    "kinds compared": ("n(x) :- n(x), s(y), x = y.", "used both as", 'n(x) :- n(x), s(y), y = "x".'),
    "record for number": (
        "n(x) :- n([x, _]).",
        "expected a value of type number, found a record",
        "n(x) :- l([x, _]).",
    ),
    "record types": ("m(x) :- l(x).", "'x' is of type L, the column takes M", "m([h, nil]) :- l([h, _])."),
    "record fields": ("n(x) :- l([x, _, _]).", "the record type L has 2 fields, found 3", "n(x) :- l([x, _])."),
    "record field type": ('l(["a", nil]).', "found a symbol", "l([1, nil])."),
    "nil for number": ("n(nil).", "found a nil", "l(nil)."),
    "arithmetic on symbols": ("n(x + 1) :- s(x).", "'x' is a symbol but '+' takes a number", "n(x + 1) :- n(x)."),
    "order of symbols": ('n(1) :- s(x), x < "b".', "'x' is a symbol but '<' takes a number", 'n(1) :- s(x), x != "b".'),
    "sum of symbols": (
        "n(x) :- x = sum y : { s(y) }.",
        "used both as number and as symbol",
        "o(x) :- x = sum y : { n(y) }.",
    ),
    "subtype in head": ("b(x) :- a(x).", "'x' is of type A, the column takes B", "a(x) :- b(x)."),
    "plain number in head": ("a(x) :- n(x).", "'x' is of type number, the column takes A", "a(x + 0) :- n(x)."),
    "sibling subtypes": ("n(x) :- a(x), c(x).", "used both as A and as C", "n(x) :- a(x), b(x)."),
    "sibling subtypes compared": ("n(x) :- a(x), c(y), x < y.", "used both as", "n(x) :- a(x), c(y), x < y + 0."),
    "aggregate of subtype": ("a(x) :- x = max y : { c(y) }.", "is of type C", "a(x) :- x = max y : { b(y) }."),
    "unbound head": ("n(_x) :- n(1).", "t.dl:14:3: the variable '_x' is not bound", "n(_x) :- n(_x)."),
    "unbound negation": ("n(1) :- n(_), !n(_x).", "the variable '_x' is not bound", "o(1) :- n(_), !n(_)."),
    "unbound comparison": ("n(1) :- n(_), _x < 3.", "the variable '_x' is not bound", "n(1) :- n(_x), _x < 3."),
    "bound by arithmetic": ("n(y) :- n(x), x = y + 1.", "the variable 'y' is not bound", "n(y) :- n(x), y = x - 1."),
    "bound in a disjunct": ("n(x) :- (n(x) ; s(_)).", "the variable 'x' is not bound", "n(x) :- (n(x) ; s(_), x = 3)."),
    "atom argument": ("n(x) :- n2(x + 1, _).", "the variable 'x' is not bound", "n(x) :- n2(x, _)."),
    "witness": ("n(x) :- 3 = max y : { n2(x, y) }.", "bound only inside", "n(x) :- n(x), 3 = max y : { n2(x, y) }."),
    "aggregated outside": (
        "n(y) :- n(y), 3 = max y : { n(y) }.",
        "is also used outside",
        "o(y) :- n(y), 3 = max z : { n(z) }.",
    ),
    "nested aggregate": (
        "n(x) :- x = sum y : { n(y), y > count : { n(_) } }.",
        "an aggregate inside an aggregate",
        "o(x) :- k = count : { n(_) }, x = sum y : { n(y), y > k }.",
    ),
    "wildcards counted": (
        "n(x) :- x = count : { n2(_, y), n(y) }.",
        "t.dl:14:26: '_' in this 'count' is read differently",
        "o(x) :- x = count : { n2(_z, y), n(y) }.",
    ),
    "record in aggregate": (
        "n(x) :- x = sum h : { l([h, nil]) }.",
        "a record is taken apart inside an aggregate",
        "n(x) :- x = count : { l([2, nil]) }.",
    ),
    "wildcard in head": ("n(_) :- n(_).", "'_' has no meaning in a head", "n(1) :- n(_)."),
    "wildcard compared": ("n(x) :- n(x), x != _.", "'_' has no meaning in a comparison", "n(x) :- l(y), y = [x, _]."),
    "wildcard in negated record": (
        "n(x) :- n(x), !l([x, _]).",
        "a record of a negated atom",
        "n(x) :- n(x), !l([x, nil]).",
    ),
    "singleton": (
        "n(x) :- n2(x, other).",
        "t.dl:14:15: the variable 'other' occurs only once",
        "n(x) :- n2(x, _other).",
    ),
    "negation cycle": (
        "n(x) :- s(_), x = 1, !a(x). a(1) :- !n(1).",
        "depends on its own negation",
        "n(1) :- !a(1). a(1) :- !b(1).",
    ),
    "negation of itself": (
        "n(1) :- !n(1).",
        "t.dl:14:9: 'n' depends on its own negation or on an aggregate over itself (n -> n)",
        "n(1) :- !n2(1, 1).",
    ),
    "long negation cycle": (
        "n(x) :- n2(x, _). n2(x, 1) :- a(y), x = y + 0. a(1) :- !n(1).",
        "(a -> n -> n2 -> a)",
        "n(x) :- n2(x, _). n2(x, 1) :- a(y), x = y + 0. a(1) :- !b(1).",
    ),
    "aggregate cycle": ("n(x) :- x = count : { n(_) }.", "aggregate over itself", "n(x) :- x = count : { s(_) }."),
    "division by zero": ("n(1 / 0).", "the divisor may be 0", "n(1 / 2)."),
    "division unguarded": ("n(x / y) :- n2(x, y).", "t.dl:14:5: the divisor may be 0", "n(x / y) :- n2(x, y), y != 0."),
    "division by expression": (
        "n(x / (y + 1)) :- n2(x, y).",
        "the divisor may be 0",
        "n(x / z) :- n2(x, y), z = y + 1, 0 < z.",
    ),
    "wrong guard": ("n(x % y) :- n2(x, y), y >= 0.", "the divisor may be 0", "n(x % y) :- n2(x, y), y >= 1."),
    "guard outside aggregate": (
        "o(z) :- n(y), y > 0, z = sum x : { n(x), x / y > 1 }.",
        "the divisor may be 0",
        "o(z) :- n(y), z = sum x : { n(x), y > 0, x / y > 1 }.",
    ),
    "unknown type": (".decl z(x:Q)", "the type 'Q' is not declared", ".decl z(x:A)"),
    "float type": (".decl z(x:float)", "the type 'float' is outside the Datalog subset; intern", ".decl z(x:symbol)"),
    "cyclic type": (".type P = Q\n.type Q = P", "is defined by itself", ".type P = Q\n.type Q = A"),
    "record subtype": (".type P <: L", "cannot be a subtype of the record type", ".type P = L"),
    "unknown record type": (
        "n(1) :- x = [1, nil], x != nil.",
        "the record type of 'x' is not known",
        "n(1) :- l(x), x = [1, nil].",
    ),
    "two records": ("n(x) :- n(x), [x, nil] = [1, nil].", "two records are compared", "n(x) :- n(x), x = 1."),
    "columns": (
        ".decl z(" + ", ".join(f"c{i}:number" for i in range(23)) + ")",
        "has 23 columns",
        ".decl z(" + ", ".join(f"c{i}:number" for i in range(22)) + ")",
    ),
    "reserved name": (".decl log__1(x:number)", "is kept for derivation logs", ".decl log_1(x:number)"),
    "repeated column": (".decl z(x:number, x:number)", "two columns named 'x'", ".decl z(x:number, y:number)"),
}


@pytest.mark.parametrize("name", CASES)
def test_refused_and_mended(name: str) -> None:
    refused, expected, mended = CASES[name]
    with pytest.raises(RuleError) as caught:
        Program.from_text(D + refused, "t.dl")
    assert expected in str(caught.value)
    Program.from_text(D + mended, "t.dl")


def test_many_disjunctions_are_refused() -> None:
    body = ", ".join("(n(1) ; n(2))" for _ in range(9))
    with pytest.raises(RuleError, match="more than 256 disjunctive choices"):
        Program.from_text(D + f"n(3) :- {body}.", "t.dl")
