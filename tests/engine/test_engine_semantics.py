"""Every construct of the subset on both engines: expected rows, and Soufflé on the text as written."""

from __future__ import annotations

from pathlib import Path

import pytest
from engine_support import ENGINES, Reference, as_souffle_prints, needs_souffle, souffle_as_written

from emerge.engine.run import Program, run

TYPES = ".type L = [h:number, t:L]\n.decl p(a:number, b:number)\np(7,2). p(-7,2). p(7,-2). p(-7,-2).\n"
E = ".decl e(x:number, y:number)\ne(1,2). e(2,3). e(3,1). e(4,4). e(5,6).\n"
O1 = ".decl o(x:number)\n.output o\n"
O2 = ".decl o(x:number, y:number)\n.output o\n"

CASES: dict[str, tuple[str, set[tuple[object, ...]]]] = {
    "recursion": (
        E + O2 + "o(x,y) :- e(x,y). o(x,z) :- o(x,y), e(y,z), x < 4.",
        {(a, b) for a in (1, 2, 3) for b in (1, 2, 3)} | {(4, 4), (5, 6)},
    ),
    "negation": (E + O1 + "o(x) :- e(x,_), !e(_,x). o(x+10) :- e(x,y), !e(y,x).", {(5,), (11,), (12,), (13,), (15,)}),
    "division truncates": (TYPES + O2 + "o(a/b, a%b) :- p(a,b), b != 0.", {(3, 1), (-3, -1), (-3, 1), (3, -1)}),
    "division by literals": (TYPES + O2 + "o(a/3, a%-3) :- p(a,_).", {(2, 1), (-2, -1)}),
    "division guarded positive": (
        O2 + ".decl n(x:number,y:number) n(5,0). n(9,2). n(-2147483648,-1).\no(x/y, x%y) :- n(x,y), y > 0.",
        {(4, 1)},
    ),
    "overflow wraps": (
        O1 + ".decl k(x:number) k(2147483647). k(-2147483648). k(65536).\n"
        "o(x+1) :- k(x). o(x*x+3) :- k(x). o(-x) :- k(x).",
        {(-2147483648,), (-2147483647,), (65537,), (4,), (3,), (-65536,)},
    ),
    "wrapped equations lose nothing": (
        O2 + ".decl k(x:number) k(1073741825). k(5). .decl m(x:number) m(-2147483646). m(10). m(6).\n"
        "o(x,y) :- k(x), m(y), y = 2*x. o(x,0) :- k(x), m(x*2). o(x,1) :- k(x), m(x+1), x+1 = 7-1.",
        {(1073741825, -2147483646), (5, 10), (1073741825, 0), (5, 0), (5, 1)},
    ),
    "bit operators": (
        O2 + "o(1, 5 band 3). o(2, 5 bor 3). o(3, 5 bxor 3). o(4, bnot 5). o(5, -8 band 13).",
        {(1, 1), (2, 7), (3, 6), (4, -6), (5, 8)},
    ),
    "shifts": (
        O2 + ".decl n(x:number, s:number) n(-8,1). n(-1,31). n(7,33). n(-2147483648,31). n(9,0). n(1,-1).\n"
        "o(x bshl s, x bshr s) :- n(x,s).",
        {(-16, -4), (-2147483648, -1), (14, 3), (0, -1), (9, 9), (-2147483648, 0)},
    ),
    "precedence": (
        O2 + "o(1, 2+3*4-5). o(2, 2*3+4 band 1). o(3, 2+3 bshl 1). o(4, 100/7/2). o(5, 6 bxor 3 bor 8 band 12)."
        "o(6, - 3 + 5). o(7, 5-3-1). o(8, (1+2)*3). o(9, 2--3). o(10, -(3) * -2).",
        {(1, 9), (2, 0), (3, 10), (4, 7), (5, 13), (6, 2), (7, 1), (8, 9), (9, 5), (10, 6)},
    ),
    "min and max functions": (E + O2 + "o(min(x,y), max(x,y,3)) :- e(x,y).", {(1, 3), (2, 3), (4, 4), (5, 6)}),
    "constants": (
        O1 + "o(0x1f). o(0b11). o(-2147483648). o(2147483647). o(-0x10).",
        {(31,), (3,), (-2147483648,), (2147483647,), (-16,)},
    ),
    "records": (
        TYPES + O2 + ".decl l(x:L) l(nil). l([1,nil]). l([2,[1,nil]]).\n"
        "o(h,0) :- l([h,_]). o(h,1) :- l(x), x = [h,t], t != nil. o(0,9) :- l(x), x = nil. o(9,9) :- l([2,[1,nil]])."
        "o(x,7) :- l([x+1,_]), p(7,_), x = 1. o(8,x) :- l([x,nil]), !l([x+1,nil]).",
        {(1, 0), (2, 0), (2, 1), (0, 9), (9, 9), (1, 7), (8, 1)},
    ),
    "lists by recursion": (
        TYPES + O2 + ".decl l(x:L) l([5,[6,[7,nil]]]). .decl sub(x:L) sub(x) :- l(x). sub(t) :- sub([_,t]).\n"
        ".decl rev(x:L, a:L) rev(x,nil) :- l(x). rev(t,[h,a]) :- rev([h,t],a).\n"
        "o(h,0) :- sub([h,_]). o(h,1) :- rev(nil,[h,_]).",
        {(5, 0), (6, 0), (7, 0), (7, 1)},
    ),
    "symbols": (
        O1 + '.decl s(x:symbol, y:symbol) s("a","b"). s("","nil"). s("nil","").\n'
        'o(1) :- s("a",x), x != "c". o(2) :- s(x,x). o(3) :- s("",y), s(y,""). o(4) :- s(x,_), x = "A".',
        {(1,), (3,)},
    ),
    "aggregates": (
        E + O2 + "o(1,n) :- n = count : {e(_,_)}. o(2,n) :- n = sum x : {e(x,_)}."
        "o(3,n) :- n = min x+y : {e(x,y)}. o(4,n) :- n = max x : {e(x,y), y < 4}.",
        {(1, 5), (2, 15), (3, 3), (4, 3)},
    ),
    "aggregates of nothing": (
        E + O2 + "o(1,n) :- n = count : {e(9,_)}. o(2,n) :- n = sum x : {e(x,9)}."
        "o(3,n) :- n = min x : {e(x,9)}. o(4,n) :- n = max x : {e(x,9)}.",
        {(1, 0), (2, 0)},
    ),
    "aggregates per group": (
        E + O2 + "e(1,7). e(1,9). o(x,n) :- e(x,_), n = count : {e(x,_)}. o(x+100,n) :- e(x,_), n = sum y : {e(x,y)}."
        "o(x+200,n) :- e(x,_), n = max y : {e(x,y), y > x+1}.",
        {(1, 3), (2, 1), (3, 1), (4, 1), (5, 1), (101, 18), (102, 3), (103, 1), (104, 4), (105, 6), (201, 9)},
    ),
    "sum counts every match": (
        E + O1 + "e(1,8). o(n) :- n = sum x : {e(x,_)}. o(n) :- n = sum 2 : {e(_,_)}.",
        {(16,), (12,)},
    ),
    "sum wraps": (O1 + ".decl k(x:number) k(2000000000). k(2000000001). o(n) :- n = sum x : {k(x)}.", {(-294967295,)}),
    "compared sums wrap": (
        E + O1 + ".decl k(x:number) k(2147483647). k(9). k(-1). k(3).\n"
        "o(x) :- e(x,_), n = sum y : {k(y)}, n > 0. o(x+10) :- e(x,_), n = sum y : {k(y)}, n = 2147483647."
        "o(x+20) :- e(x,_), n = -2147483638, n = sum y : {k(y)}. o(x+30) :- e(x,6), (n > 0 ; n = 3 ; n < -5),"
        "n = sum y : {k(y)}.",
        {(21,), (22,), (23,), (24,), (25,), (35,)},
    ),
    "aggregates in expressions": (
        E + O1 + "o(1 + count : {e(_,_)}). o(x) :- e(x,_), x > count : {e(_,_)} - 1. o(50) :- count : {e(1,_)} = 1."
        "o(60) :- 0 = count : {e(_x,_y), !e(_y,_x), e(9,_z)}.",
        {(6,), (5,), (50,), (60,)},
    ),
    "aggregate inside recursion": (
        E + O1 + "o(1). o(x+n) :- o(x), n = count : {e(x,_)}, x < 5, n > 0.",
        {(1,), (2,), (3,), (4,), (5,)},
    ),
    "aggregate with negation": (E + O1 + "o(n) :- n = count : {e(x,_y), !e(_,x)}.", {(1,)}),
    "disjunction": (E + O1 + "o(x) :- e(x,_), (x = 1 ; (x > 3, x < 5) ; e(x,6)), x != 9.", {(1,), (4,), (5,)}),
    "several heads": (E + O1 + ".decl b(x:number)\nb(x), o(x+1) :- e(x,4). o(x) :- b(x).", {(4,), (5,)}),
    "nullary": (
        E + O1 + ".decl t() .decl f()\nt() :- e(_,_). f() :- e(99,_).\no(1) :- t(), !f(). o(2) :- f().",
        {(1,)},
    ),
    "bodies without atoms": (
        O1 + "o(1) :- 1 < 2. o(2) :- 2 < 1. o(x) :- x = 3, x < 4. o(x+1) :- x = y, y = 4.",
        {(1,), (3,), (5,)},
    ),
    "subtypes": (
        '.type I <: number\n.type J = I\n.type S <: symbol\n.decl a(i:J, s:S)\na(1,"x"). a(2,"y").\n'
        + O1
        + '.decl b(i:I)\nb(i+1) :- a(i,"x"). o(i) :- b(i), a(i,_).',
        {(2,)},
    ),
    "clingo words": (
        O1 + ".decl not_(x:number) .decl show(x:number)\nnot_(1). show(X) :- not_(X). o(X) :- show(X).",
        {(1,)},
    ),
    "upper and lower case": (O1 + ".decl A(x:number) .decl a(x:number)\nA(1). a(2). o(X+x) :- A(X), a(x).", {(3,)}),
    "repeated variables": (
        E + O1 + "o(x) :- e(x,x). o(x+10) :- e(x,y), e(y,z), e(z,x), x != y.",
        {(4,), (11,), (12,), (13,)},
    ),
    "components": (
        ".type N = number\n.comp Base<T> {\n .type P = [a:T, n:number]\n .decl edge(a:T,b:T)\n .decl path(a:T,b:T)\n"
        " path(a,b) :- edge(a,b).\n path(a,c) :- path(a,b), edge(b,c).\n"
        " .decl pair(x:P)\n pair([a,1]) :- edge(a,_).\n}\n"
        ".comp Sub<T,K> : Base<T> {\n .decl extra(a:T,k:K)\n extra(a,7) :- path(a,_).\n .init inner = Base<K>\n"
        " inner.edge(k,k+1) :- extra(_,k).\n sink(k,b) :- inner.path(k,b).\n}\n"
        ".decl sink(k:number,b:number)\n.init one = Sub<symbol,N>\n.init two = Base<number>\n"
        'one.edge("a","b"). one.edge("b","c"). two.edge(1,2). two.edge(2,3).\n'
        + O2
        + "o(x,y) :- two.path(x,y). o(x,9) :- two.pair([x,_]). o(k,b) :- sink(k,b)."
        "o(n,n) :- n = count : {one.path(_,_)}.",
        {(1, 2), (2, 3), (1, 3), (1, 9), (2, 9), (7, 8), (3, 3)},
    ),
}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", CASES)
def test_construct(name: str, engine: str) -> None:
    text, expected = CASES[name]
    assert run(Program.from_text(text), {}, ["o"], engine).relations["o"] == expected


@pytest.mark.parametrize("name", CASES)
def test_reference_evaluator_agrees(name: str) -> None:
    text, expected = CASES[name]
    assert Reference(Program.from_text(text)).run()["o"] == expected


@pytest.mark.souffle
@needs_souffle
@pytest.mark.parametrize("name", CASES)
def test_souffle_on_the_text_as_written(name: str, tmp_path: Path) -> None:
    """The files must be Soufflé programs: our parser and lowering may not change what they mean."""
    text, expected = CASES[name]
    assert souffle_as_written(text, ("o",), tmp_path)["o"] == as_souffle_prints(expected)


@pytest.mark.parametrize("engine", ENGINES)
def test_log_does_not_change_results(engine: str) -> None:
    for name, (text, expected) in CASES.items():
        program = Program.from_text(text.replace(".decl o(", "// @semantic check\n.decl o("))
        result = run(program, {}, ["o"], engine, log=True)
        assert result.relations["o"] == expected, name
        assert result.log is not None
        assert {f.args for f in result.log.best_level("o")} == expected, name


def test_plan_is_for_souffle_only() -> None:
    text = E + O2 + "o(x,y) :- e(x,y).\no(x,z) :- o(x,y), e(y,z).\n.plan 0:(1,2)\n"
    program = Program.from_text(text)
    assert program.clauses[-1].plan == "0:(1,2)"
    rows = run(program, {}, ["o"], "embedded").relations["o"]
    assert (1, 1) in rows


@pytest.mark.souffle
@needs_souffle
def test_plan_reaches_souffle_with_and_without_log() -> None:
    text = E + O2 + "// @law base\no(x,y) :- e(x,y).\n// @law step\no(x,z) :- o(x,y), e(y,z).\n.plan 0:(2,1)\n"
    plain = run(Program.from_text(text), {}, ["o"], "souffle").relations
    assert run(Program.from_text(text), {}, ["o"], "souffle", log=True).relations == plain
    assert plain == run(Program.from_text(text), {}, ["o"], "embedded").relations
