"""Running: facts in, relations out, limits and failures."""

from __future__ import annotations

from pathlib import Path

import pytest
from engine_support import ENGINES
from hypothesis import given
from hypothesis import strategies as st

from emerge.engine import embedded, souffle
from emerge.engine import run as run_module
from emerge.engine.run import Program, available_engines, run
from emerge.util.errors import BudgetExceeded, EngineError, InputError

COPY = Program.from_text(
    """
.type L = [h:number, s:symbol, t:L]
.decl f(n:number, s:symbol, l:L)
.decl g(n:number, s:symbol, l:L)
g(n, s, l) :- f(n, s, l).
.decl heads(n:number, s:symbol)
heads(n, s) :- f(_, _, [n, s, _]).
.decl flag()
.decl unset()
.decl same(s:symbol)
same(s) :- f(_, s, [_, s, _]).
"""
)
NASTY = [
    "",
    " ",
    "a b",
    "\t",
    "\n",
    "\r\n",
    '"',
    "\\",
    "\\n",
    "%",
    "%41",
    "%%",
    ",",
    "[",
    "]",
    "[1, nil]",
    "nil",
    "é",
    "日本",
    "𝒳",
    "'",
    "`",
    "$x",
    "(a)",
    "{",
    "#",
    "//",
    "/*",
    "_",
    "-1",
    "0",
    "a,b",
    ", ",
    "\x01",
    "\x7f",
    "%E3",
]


def test_both_engines_are_reported() -> None:
    found = available_engines()
    assert found["embedded"].startswith("clingo 5.")
    assert all(version for version in found.values())


@pytest.mark.parametrize("engine", ENGINES)
def test_symbols_of_every_kind_come_back(engine: str) -> None:
    rows = {(i, s, (i, s, (-i, s + "x", None))) for i, s in enumerate(NASTY)}
    result = run(COPY, {"f": rows}, ["f", "g", "heads", "same"], engine)
    assert result.relations["g"] == rows == result.relations["f"]
    assert result.relations["heads"] == set(enumerate(NASTY))
    assert result.relations["same"] == {(s,) for s in NASTY}
    assert result.engine == engine
    assert result.version == available_engines()[engine]


@pytest.mark.parametrize("engine", ENGINES)
def test_string_constants_of_every_kind(engine: str) -> None:
    from emerge.engine.syntax import symbol_text

    text = ".decl s(x:symbol)\n.decl o(n:number, x:symbol)\n" + "".join(
        f"o({i}, {symbol_text(s)}) :- s({symbol_text(s)}).\n" for i, s in enumerate(NASTY)
    )
    result = run(Program.from_text(text), {"s": [(s,) for s in NASTY]}, ["o"], engine)
    assert result.relations["o"] == set(enumerate(NASTY))


@pytest.mark.parametrize("engine", ENGINES)
def test_extreme_values(engine: str) -> None:
    deep: tuple[object, ...] | None = None
    for i in range(400):
        deep = (i, "k", deep)
    rows = {(-2147483648, "a", deep), (2147483647, "a", None)}
    assert run(COPY, {"f": rows}, ["g"], engine).relations["g"] == rows


@pytest.mark.parametrize("engine", ENGINES)
def test_nullary_relations_and_empty_results(engine: str) -> None:
    result = run(COPY, {"flag": [()], "f": []}, ["flag", "unset", "g"], engine)
    assert result.relations == {"flag": {()}, "unset": set(), "g": set()}


@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=12))
def test_escape_is_one_to_one(symbol: str) -> None:
    text = souffle.escape(symbol)
    assert souffle.unescape(text) == symbol
    assert text
    assert not set(text) & set(' \t\n\r,[]"\\')


BAD_FACTS = {
    "unknown relation": (
        {"ff": []},
        "facts are given for the relation 'ff', which is not declared; known are: f, flag",
    ),
    "arity": ({"f": [(1, "a")]}, "expected tuples of 3 (n, s, l), found (1, 'a')"),
    "list": ({"f": [[1, "a", None]]}, "expected tuples of 3"),
    "float": ({"f": [(1.0, "a", None)]}, "column 'n' of (1.0, 'a', None): expected a number (int), found 1.0 (float)"),
    "bool": ({"f": [(True, "a", None)]}, "expected a number (int), found True (bool)"),
    "33 bits": ({"f": [(2**31, "a", None)]}, "the number 2147483648 does not fit 32 bits"),
    "symbol": ({"f": [(1, 2, None)]}, "column 's' of (1, 2, None): expected a symbol (str), found 2 (int)"),
    "nul": ({"f": [(1, "a\0", None)]}, "holds a NUL character"),
    "surrogate": ({"f": [(1, "\ud800", None)]}, "lone surrogate"),
    "record": ({"f": [(1, "a", (1, "b"))]}, "expected a record L (tuple of 3, or None), found (1, 'b')"),
    "inner": ({"f": [(1, "a", (1, "b", ("x", "c", None)))]}, "expected a number (int), found 'x' (str)"),
}


@pytest.mark.parametrize("name", BAD_FACTS)
def test_bad_facts_are_refused(name: str) -> None:
    facts, expected = BAD_FACTS[name]
    with pytest.raises(InputError) as caught:
        run(COPY, facts, ["g"], "embedded")  # type: ignore[arg-type]
    assert expected in str(caught.value)


def test_unknown_output_and_engine() -> None:
    with pytest.raises(InputError, match="the output relation 'h' is not declared; known are: f, flag, g"):
        run(COPY, {}, ["h"], "embedded")
    with pytest.raises(InputError, match="unknown Datalog engine 'prolog'"):
        run(COPY, {}, [], "prolog")


def test_auto_falls_back_to_embedded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_module.souffle, "version", lambda: "")
    assert run(COPY, {}, ["g"]).engine == "embedded"
    with pytest.raises(EngineError, match="no working souffle is on PATH"):
        run(COPY, {}, ["g"], "souffle")
    monkeypatch.setattr(run_module.souffle, "version", lambda: "souffle 2.4")
    assert run_module._choose("auto") == ("souffle", "souffle 2.4")
    assert run(COPY, {}, ["g"], "auto").engine == "embedded"  # a small problem


@pytest.mark.parametrize("engine", ENGINES)
def test_a_positive_guard_keeps_other_divisors_out(engine: str) -> None:
    """Rounded toward zero; no divisor that the guard excludes ends the run."""
    program = Program.from_text(
        ".decl n(x:number, y:number)\n.decl o(x:number, y:number, q:number, r:number)\n"
        "o(x, y, x / y, x % y) :- n(x, y), y > 0."
    )
    lowest = -(2**31)
    pairs = [(-7, 2), (7, 2), (7, 0), (7, -2), (lowest, -1), (lowest, lowest), (lowest, 3), (2**31 - 1, 2**31 - 1)]
    expected = {(-7, 2, -3, -1), (7, 2, 3, 1), (lowest, 3, -715827882, -2), (2**31 - 1, 2**31 - 1, 1, 0)}
    assert run(program, {"n": pairs}, ["o"], engine).relations["o"] == expected


ENDLESS = Program.from_text(".decl n(x:number)\nn(0).\nn(x + 1) :- n(x).\n")


@pytest.mark.parametrize("engine", ENGINES)
def test_a_limit_ends_a_run_that_would_not_end(engine: str) -> None:
    """32-bit wrap-around bounds the program, but only after four billion facts."""
    with pytest.raises(BudgetExceeded, match=r"limit of 0\.5 seconds"):
        run(ENDLESS, {}, ["n"], engine, timeout=0.5)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_limit_that_is_not_reached_changes_nothing(engine: str) -> None:
    facts = {"f": [(1, "a\tb", (2, "c", None))]}
    limited = run(COPY, facts, ["g", "heads"], engine, timeout=120, log=True)
    assert limited.relations == run(COPY, facts, ["g", "heads"], engine).relations


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("timeout", [None, 120.0])
def test_the_one_division_that_overflows_is_an_error(engine: str, timeout: float | None) -> None:
    program = Program.from_text(".decl n(x:number, y:number)\n.decl o(x:number)\no(x / y) :- n(x, y), y != 0.")
    with pytest.raises(EngineError):
        run(program, {"n": [(-2147483648, -1)]}, ["o"], engine, timeout=timeout)
    assert run(program, {"n": [(7, -1), (7, 0)]}, ["o"], engine, timeout=timeout).relations["o"] == {(-7,)}


@pytest.mark.parametrize("engine", ENGINES)
def test_guards_hold_wherever_the_engine_tests_them(engine: str) -> None:
    """As written, Soufflé divides before it tests these guards, and dies."""
    program = Program.from_text(
        ".decl e(x:number, y:number)\n.decl q(x:number, y:number)\n.decl o(x:number)\n"
        "o(a) :- e(a, b), !q(_, a), a > 0, a / a < 4, _m = max z : { q(z, b), z > -3 }.\n"
        "o(a + 10) :- e(a, b), !q(_, a), a != 0, 6 % a < 4, _m = max z : { q(z, b), z > -3 }.\n"
        "o(m + 20) :- e(_, b), m = sum z : { q(z, b), z > 0, 7 / z > 1 }.\n"
        "o(m + 30) :- e(_, b), m = sum 7 / z : { q(z, b), z != 0 }."
    )
    facts = {"e": [(0, 1), (2, 3), (-1, 3)], "q": [(1, 1), (5, 3), (0, 3), (-2, 3)]}
    assert run(program, facts, ["o"], engine).relations["o"] == {(2,), (12,), (9,), (21,), (20,), (37,), (28,)}


def test_a_crash_carries_the_end_of_the_messages(tmp_path: Path) -> None:
    (tmp_path / "program.dl").write_text(".decl a(x:number)\na(y).\n")
    binary = tmp_path / "fake"
    binary.write_text("#!/bin/sh\necho first >&2\necho last words >&2\nexit 3\n")
    binary.chmod(0o755)
    with pytest.raises(EngineError, match=r"souffle ended with status 3: first \| last words"):
        souffle.run_binary(str(binary), tmp_path, None)


def test_an_atom_that_is_no_fact_is_an_error() -> None:
    """Cannot come from a checked program; the guard is tested on a program with a choice."""
    job = embedded.Job("{p0(1)}. p1(X) :- p0(X).", [], {"p1": 1}, {"p1": "reached"})
    with pytest.raises(EngineError, match=r"left reached\(1,\) undecided"):
        embedded.evaluate(job)


def test_public_and_fast_reading_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    from emerge.engine import terms

    rows = {(i, f"s{i % 3}", (i, "x", None) if i % 2 else None) for i in range(50)}
    fast = run(COPY, {"f": rows}, ["g"], "embedded").relations

    class Slow(terms.TermReader):
        def rows(self, predicate: str, arity: int):  # type: ignore[no-untyped-def]
            return self._rows_slowly(predicate, arity)

    monkeypatch.setattr(terms, "TermReader", Slow)
    assert run(COPY, {"f": rows}, ["g"], "embedded").relations == fast == {"g": rows}
