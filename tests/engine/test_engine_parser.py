"""Parsing: positions in errors, docs and annotations, includes, components, text form."""

from __future__ import annotations

from pathlib import Path

import pytest

from emerge.engine.run import Program, run
from emerge.engine.syntax import clause_text
from emerge.util.errors import RuleError

D = ".decl a(x:number)\n.decl b(x:number, s:symbol)\n"

# text after the two declarations (so on line 3 or later) -> where and what the message says
ERRORS = {
    "missing dot": ("a(1)\na(2).", "t.dl:4:1: expected '.' at the end of the clause, found 'a'"),
    "end of file": ("a(x) :- b(x,", "t.dl:3:13: expected a term, found end of file"),
    "bad character": ("a(x) :- b(x, _), x ^ 2 = 4.", "t.dl:3:20: the character '^' is outside the Datalog subset"),
    "float": ("a(1.5).", "t.dl:3:3: the floating-point constant 1.5 is outside"),
    "suffix": ("a(1u).", "t.dl:3:3: '1u' is not an integer constant"),
    "33 bits": ("a(2147483648).", "t.dl:3:3: the constant 2147483648 does not fit 32 bits"),
    "open string": ('b(1, "x).', "t.dl:3:6: the string does not end on its line"),
    "escape": (r'b(1, "\q").', r"t.dl:3:6: unknown escape \q"),
    "open comment": ("/* a(1).", "t.dl:3:1: the comment is not closed"),
    "functor": ("a(f(1)).", "t.dl:3:3: expected a term (user functors are outside"),
    "cat": ('b(1, cat("a","b")).', "t.dl:3:6: 'cat' is a word of Soufflé outside"),
    "union": (".type T = number | symbol", "t.dl:3:18: expected the end of the type (union"),
    "empty record type": (".type T = []", "t.dl:3:12: expected at least one field"),
    "empty record": ("a(x) :- b(x,_), [] = x.", "t.dl:3:17: expected a field in the record"),
    "qualifier": (".decl c(x:number) brie", "t.dl:3:19: 'brie' is a word of Soufflé outside"),
    "qualifier ident": (".decl c(x:number) fast", "t.dl:3:19: expected the end of the declaration"),
    "pragma": ('.pragma "legacy"', "t.dl:3:1: the directive .pragma is outside"),
    "negated conjunction": ("a(1) :- !(b(1,_), a(2)).", "t.dl:3:10: expected an atom after '!'"),
    "true": ("a(1) :- true.", "t.dl:3:9: 'true' is a word of Soufflé outside"),
    "heads without body": ("a(1), a(2).", "t.dl:3:11: expected ':-' (several heads need a body)"),
    "subsumption": ("a(x) <= a(y) :- x < y.", "t.dl:3:6: expected ':-' or '.' (subsumption is outside"),
    "aggregate disjunction": ("a(n) :- n = count : { a(1) ; a(2) }.", "t.dl:3:28: expected '}' (disjunctions inside"),
    "mean": ("a(n) :- n = mean x : { a(x) }.", "t.dl:3:13: 'mean' is a word of Soufflé outside"),
    "plan of nothing": (".plan 0:(1)", "t.dl:3:1: expected a clause in front of .plan"),
    "plan of disjunction": ("a(x) :- (a(x) ; b(x,_)).\n.plan 0:(1)", "t.dl:4:11: a .plan cannot order a disjunction"),
    "parenthesis": ("a(x) :- (a(x) ; b(x _)).", "t.dl:3:21: expected ')', found '_'"),
    "component inside": (".comp C {\n.comp D {}\n}", "t.dl:4:1: expected a declaration or a clause"),
    "unknown component": (".init i = C", "t.dl:3:7: the component 'C' is not declared; declared are: none"),
    "component parameters": (
        ".comp C<T> {}\n.init i = C",
        "t.dl:4:7: the component 'C' takes 1 type parameters, 0 are",
    ),
    "component cycle": (".comp C { .init i = C }\n.init j = C", "components are nested deeper than 32"),
    "declared twice": (".decl a(y:symbol)", "t.dl:3:7: the relation 'a' is declared twice; first at t.dl:1:7"),
    "type twice": (
        ".type T <: number\n.type T <: symbol",
        "t.dl:4:7: the type 'T' is declared twice; first at t.dl:3:7",
    ),
    "unknown output": (".output c", "t.dl:3:9: the relation 'c' is not declared"),
    "include in text": ('.include "x.dl"', "cannot include files"),
}


@pytest.mark.parametrize("name", ERRORS)
def test_error_has_place_and_reason(name: str) -> None:
    text, expected = ERRORS[name]
    with pytest.raises(RuleError) as caught:
        Program.from_text(D + text, "t.dl")
    assert expected in str(caught.value)


def test_docs_and_annotations() -> None:
    program = Program.from_text(
        """
// Not the doc of anything.

// One row per thing.
// @semantic things_equal
// @key x
.decl a(x:number) // trailing remarks are no docs
.decl b(x:number)

// First law.
// @law copy-b
// @meaning b is a
// @when always
a(x) :- b(x).
a(x) :- b(y), x = y + 1,
        y < 3.
/* a block comment is no doc and no blank line */
a(7) :- b(8).

a(9) :- b(10).
// @law other
// @source page 1
// @source page 2
a(11) :- b(12).
""",
        "t.dl",
    )
    decl = program.relations["a"]
    assert decl.semantic == "things_equal"
    assert decl.doc == "One row per thing.\n@semantic things_equal\n@key x"
    assert program.relations["b"].annotations == {}
    assert [c.law for c in program.clauses] == ["copy-b", "copy-b", "copy-b", None, "other"]
    assert program.clauses[0].annotations == {"law": "copy-b", "meaning": "b is a", "when": "always"}
    assert program.clauses[0].doc.startswith("First law.")
    assert program.clauses[1].doc == ""
    assert program.clauses[4].annotations["source"] == "page 1\npage 2"
    assert [c.pos.line for c in program.clauses] == [14, 15, 18, 20, 24]


def test_include_once_relative_to_the_including_file(tmp_path: Path) -> None:
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "types.dl").write_text(".type Id <: number\n")
    (tmp_path / "lib" / "base.dl").write_text('.include "types.dl"\n.decl a(x:Id)\na(1).\n')
    (tmp_path / "main.dl").write_text('.include "lib/base.dl"\n.include "lib/types.dl"\n.decl o(x:Id)\no(x) :- a(x).\n')
    (tmp_path / "user.dl").write_text('.include "lib/base.dl"\no(x) :- a(x), x > 5.\na(8).\n')
    program = Program.load([tmp_path / "main.dl"], extra=[tmp_path / "user.dl"])
    assert len(program.files) == 4
    assert len(program.clauses) == 4
    assert run(program, {}, ["o"], "embedded").relations["o"] == {(1,), (8,)}
    (tmp_path / "lib" / "types.dl").write_text("\n\n.type Id < number\n")
    with pytest.raises(RuleError, match=r"types\.dl:3:10: expected '=' or '<:', found '<'"):
        Program.load([tmp_path / "main.dl"])


def test_missing_include_names_the_place(tmp_path: Path) -> None:
    (tmp_path / "main.dl").write_text('\n.include "gone.dl"\n')
    with pytest.raises(RuleError, match=r"main\.dl:2:1: the rule file .*gone\.dl cannot be read"):
        Program.load([tmp_path / "main.dl"])


def test_type_arguments_are_looked_up_where_the_component_is_instantiated() -> None:
    """Inside the component, ``T`` is another type than outside."""
    program = Program.from_text(
        ".type T <: symbol\n.comp C<K> {\n.type T <: number\n.decl r(k:K, t:T)\n}\n.init c = C<T>\n"
        'c.r("a", 1).\n.decl o(x:c.T)\no(x) :- c.r("a", x).'
    )
    assert program.relations["c.r"].types == ("T", "c.T")
    assert run(program, {}, ["o"], "embedded").relations["o"] == {(1,)}


def test_splitting_keeps_position_and_annotations() -> None:
    program = Program.from_text(D + "// @law split\na(x), a(x + 1) :- (b(x, _) ; b(_, _), x = 3).\n", "t.dl")
    assert [str(c) for c in program.clauses] == [
        "a(x) :- b(x, _).",
        "a(x) :- b(_, _), x = 3.",
        "a((x + 1)) :- b(x, _).",
        "a((x + 1)) :- b(_, _), x = 3.",
    ]
    assert {c.law for c in program.clauses} == {"split"}
    assert {str(c.pos) for c in program.clauses} == {"t.dl:4:1"}


def test_text_form_parses_to_the_same_clause() -> None:
    text = (
        ".type L = [h:number, t:L]\n.decl l(x:L)\n"
        + D
        + r'b(n, "q\"\\\n\t") :- l([y, [_, nil]]), !l([y + 1, nil]), n = sum z * 2 : { a(z), z > -3 }, y >= min(n, 4).'
        "\na(bnot x bshl 2) :- a(x), x != 0, 7 % x < 3.\na(-2147483648).\na(x) :- a(x), count : { l(_) } > 1."
    )
    program = Program.from_text(text)
    again = Program.from_text(text.split("b(n,")[0] + "\n".join(map(str, program.clauses)))
    assert [clause_text(c.head, c.body) for c in again.clauses] == [str(c) for c in program.clauses]
    assert [(c.head, c.body) for c in again.clauses] == [(c.head, c.body) for c in program.clauses]
