"""Rules of the algebra: what a file may hold, wrong rules are refused with a counterexample, right ones are certified."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from emerge.algebra.rulefile import read_rules, rules_of
from emerge.algebra.saturate import rule_files, saturate
from emerge.rules import api, certificates
from emerge.rules.certify import Refusal
from emerge.rules.equalities import EqualityCertificate, certify_rule
from emerge.rules.equality_proof import adds_up, commutes, prove
from emerge.util.errors import EmergeError, RuleError

pytest.importorskip("egglog")


def written(folder: Path, body: str, name: str = "mine") -> Path:
    """A file with one rule; ``body`` is a rewrite without options, or a whole command."""
    path = folder / "mine.egg"
    if body.startswith("(rule ") or ":name" in body:
        text = body
    else:
        text = f'{body.rstrip()[:-1]} :ruleset algebra :name "{name}")'
    path.write_text(f"; @meaning a rule of the test\n{text}\n")
    return path


#: Name -> (rule, words of the counterexample).
WRONG = {
    "square is double": ('(rewrite (Map2 "mul" x x) (Scale (bigrat (bigint 2) (bigint 1)) x))', "against"),
    "slice of a slice, end off": ("(rewrite (Slice (Slice x d i j) d k l) (Slice x d (+ i k) (+ j l)))", "no value"),
    "slice of a slice, one too far": (
        "(rewrite (Slice (Slice x d i j) d k l) (Slice x d (+ i (+ k 1)) (+ i (+ l 1))))", "Slice"),
    "slice of a part, shifted": (
        "(rewrite (Slice (Cat a b d) d i j) (Slice b d (- i n) (- j i)) "
        ":when ((= n (vec-get (shape a) d)) (>= i n)))", "Slice"),
    "slice of a part, not inside": (
        "(rewrite (Slice (Cat a b d) d i j) (Slice a d i j) :when ((<= i (vec-get (shape a) d))))", "no value"),
    "parts of a concatenation exchanged": ("(rewrite (Cat a b d) (Cat b a d))", "against"),
    "dimensions exchanged": ("(rewrite (Place x a s) (Place x b s) :when ((= b (vec-of 1 0)) (= a (vec-of 0 1))))", ""),
    "a comparison with itself is true, also where it is undefined": (
        '(rewrite (Map3 "where" (Map2 "ge" (Place x d s) (Place x d s)) y z) y)', "undefined"),
    "square of a root": ('(rewrite (Map1 "square" (Map1 "sqrt" x)) x)', "undefined"),
    "root of a square": ('(rewrite (Map1 "sqrt" (Map1 "square" x)) x)', "against"),
    "twice the inverse": ('(rewrite (Map1 "reciprocal" (Map1 "reciprocal" x)) x)', "undefined"),
    "distributes over a sum, and infinity": (
        '(rewrite (Map2 "mul" (Map2 "add" x y) z) (Map2 "add" (Map2 "mul" x z) (Map2 "mul" y z)))', "inf"),
    "a common factor of 0": ('(rewrite (Map2 "div" (Scale c x) (Scale c y)) (Map2 "div" x y))', "undefined"),
    "divides by a constant that may be 0": (
        '(rewrite (Map2 "div" x (Scale c y)) (Scale (/ (bigrat (bigint 1) (bigint 1)) c) (Map2 "div" x y)))', "saturation"),
    "odd powers forget the sign": (
        '(rewrite (Map1 "powc#3" (Scale (bigrat (bigint -1) (bigint 1)) x)) (Map1 "powc#3" x))', "against"),
    "a factor of both sides of a comparison": ('(rewrite (Map2 "lt" (Scale c x) (Scale c y)) (Map2 "lt" x y))', "against"),
    "rows shifted along themselves": (
        '(rewrite (Along "softmax" "w" (Map2 "add" x (Place (Map2 "mul" (Place m es t) (Shift c y)) ds s)) d) '
        '(Along "softmax" "w" (Map2 "add" x (Place (Map2 "mul" (Place m es t) y) ds s)) d) '
        ":when ((>= (vec-get ds d) 0) (>= (vec-get es (vec-get ds d)) 0)))", "against"),
    "rows shifted by a number that may be infinite": (
        '(rewrite (Along "softmax" "w" (Map2 "add" x (Place m ds s)) d) (Along "softmax" "w" x d) '
        ":when ((= (vec-get ds d) -1)))", "undefined"),
    "every function is linear": ("(rewrite (Map1 f (Scale c x)) (Scale c (Map1 f x)))", "against"),
    "every function commutes": ("(rewrite (Map2 f x y) (Map2 f y x))", "against"),
    "a function of a sum": ('(rewrite (Map1 f (Fold "sum" r x d s)) (Fold "sum" r (Map1 f x) d s))', "against"),
    "exponent of a logarithm": ('(rewrite (Map1 "exp" (Map1 "log" x)) x)', "undefined"),
    "logarithm of a product": (
        '(rewrite (Map1 "log" (Map2 "mul" x y)) (Map2 "add" (Map1 "log" x) (Map1 "log" y)))', "undefined"),
    "placed twice": ("(rewrite (Place (Place x a s) b t) (Place x b t))", "Place"),
    "softmax of a multiple": ('(rewrite (Along "softmax" "w" (Scale c x) d) (Along "softmax" "w" x d))', "against"),
    "a view is nothing": ("(rewrite (View x s) x)", "of shape"),
    "relu by a mask": ('(rewrite (Map1 "relu" x) (Map2 "mul" x (Map1 "gtc#0" x)))', "undefined"),
    "a sum over any dimension of parts": (
        "(rewrite (Fold \"sum\" \"sum\" (Cat a b d) e s) "
        "(Map2 \"add\" (Fold \"sum\" \"sum\" a e s) (Fold \"sum\" \"sum\" b e s)))", "sum"),
    "an action of a rule": (
        '(rule ((= y (Map1 "exp" x)) (= z (Map1 "tanh" x))) ((union y z)) :ruleset algebra :name "mine")', "against"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_wrong_rule_is_refused(name: str, tmp_path: Path) -> None:
    text, word = WRONG[name]
    (rule,) = rules_of(written(tmp_path, text))
    found = certify_rule(rule)
    assert isinstance(found, Refusal), found
    assert found.refuted, found.reason
    assert word in found.reason


#: Name -> (rule, evidence).
RIGHT = {
    "difference of equals": ('(rewrite (Map2 "sub" x x) (Scale (bigrat (bigint 0) (bigint 1)) x))', "proved"),
    "product of exponentials": (
        '(rewrite (Map2 "mul" (Map1 "exp" x) (Map1 "exp" y)) (Map1 "exp" (Map2 "add" x y)))', "proved"),
    "logarithm of an exponential": ('(rewrite (Map1 "log" (Map1 "exp" x)) x)', "proved"),
    "magnitude": (
        '(rewrite (Map1 "abs" x) (Map2 "maximum" x (Scale (bigrat (bigint -1) (bigint 1)) x)))', "proved"),
    "a function of a selection": (
        '(birewrite (Map1 f (Map3 "where" c x y)) (Map3 "where" c (Map1 f x) (Map1 f y)))', "proved"),
    "softmax of a sum": ('(rewrite (Along "softmax" "w" (Shift c x) d) (Along "softmax" "w" x d))', "tested"),
    "views of views": ("(rewrite (View (View x s) t) (View x t))", "proved"),
    "a factor of a contraction": ('(rewrite (Einsum e (Scale c x) y s) (Scale c (Einsum e x y s)))', "proved"),
    "a factor of a sum": (
        '(rewrite (Fold "sum" "sum" (Scale c x) d s) (Scale c (Fold "sum" "sum" x d s)))', "proved"),
    "a sum over joined parts": (
        "(rewrite (Fold \"sum\" \"sum\" (Cat a b d) e s) "
        "(Map2 \"add\" (Fold \"sum\" \"sum\" a e s) (Fold \"sum\" \"sum\" b e s)) :when ((= e (vec-of d))))", "tested"),
    "a rule": (
        '(rule ((= y (Map1 "sigmoid" x)) (= z (Map1 "silu" x))) ((union z (Map2 "mul" y x))) '
        ':ruleset algebra :name "mine")', "proved"),
}  # fmt: skip


@pytest.mark.parametrize("name", RIGHT)
def test_right_rule_is_certified(name: str, tmp_path: Path) -> None:
    text, evidence = RIGHT[name]
    if evidence == "proved":
        pytest.importorskip("z3")
    (rule,) = rules_of(written(tmp_path, text))
    found = certify_rule(rule)
    assert isinstance(found, EqualityCertificate), found
    assert found.evidence == evidence


@pytest.mark.parametrize(
    "text",
    [
        # holds for one summand
        '(rewrite (Fold "sum" "sum" (Shift c x) d s) (Shift c (Fold "sum" "sum" x d s)))',
        '(rewrite (Fold "sum" "sum" (Map1 "square" x) d s) (Map1 "square" (Fold "sum" "sum" x d s)))',
        # the two operands of a contraction are read at different positions
        '(rewrite (Einsum e (Map2 "maximum" x y) y s) (Einsum e x y s))',
        # another sum
        '(rewrite (Fold "sum" "sum" (Scale c x) d s) (Scale c (Fold "sum" "sum" x e s)) :when ((= e (vec-of 0))))',
        '(rewrite (Fold "max" "max" (Scale c x) d s) (Scale c (Fold "max" "max" x d s)))',
    ],
)
def test_induction_over_summands_shows_nothing_else(tmp_path: Path, text: str) -> None:
    pytest.importorskip("z3")
    (rule,) = rules_of(written(tmp_path, text))
    assert not prove(rule).holds


def test_kinds_that_commute() -> None:
    pytest.importorskip("z3")
    assert all(commutes(kind).holds for kind in ("add", "mul", "maximum", "eq"))
    assert not any(commutes(kind).holds for kind in ("sub", "div", "lt", "pow"))


def test_kinds_that_add_up() -> None:
    pytest.importorskip("z3")
    assert all(adds_up(kind).holds for kind in ("add", "sub", "neg", "scale", "sum", "cumsum", "cat"))
    assert not any(adds_up(kind).holds for kind in ("mul", "exp", "max", "addc", "where"))


def test_proof_refutes_by_itself(tmp_path: Path) -> None:
    """Without uninterpreted functions a model is a counterexample."""
    pytest.importorskip("z3")
    (rule,) = rules_of(written(tmp_path, '(rewrite (Map1 "square" (Map1 "sqrt" x)) x)'))
    found = prove(rule)
    assert found.refuted
    assert "x = " in found.reason


#: Content of a file -> (line, words of the message).
MALFORMED = {
    "(sort Mine)": (1, "a sort"),
    "; é\n\n(function f (Value) i64 :merge old)": (3, "a function"),
    "(relation r (i64))": (1, "a relation"),
    "(ruleset mine)": (1, "a ruleset"),
    "(run 3)": (1, "a run"),
    "(run-schedule (saturate algebra))": (1, "run-schedule"),
    "(union (Leaf 1) (Leaf 2))": (1, "union"),
    "(let x (Leaf 3))": (1, "let"),
    "(delete (Leaf 3))": (1, "an action"),
    '(panic "x")': (1, "panic"),
    '(include "other.egg")': (1, "an include"),
    '(input shape "x.csv")': (1, "an input"),
    '(output "x" (Leaf 3))': (1, "an output"),
    "(extract (Leaf 3))": (1, "extract"),
    "(check (= 1 1))": (1, "a check"),
    "(push)": (1, "Push"),
    "(rewrite (Map1": (2, "expected egglog commands"),
    '(rewrite (Map1 "exp" x) x :ruleset algebra)': (1, "no name"),
    '(rewrite (Map1 "exp" x) x :name "q")': (1, "ruleset"),
    '(rewrite (Map1 "exp" x) x :name "q" :ruleset shapes)': (1, "shapes"),
    '\n(rewrite (Map1 "exp" x) x :name "q" :ruleset algebra)': (2, "no meaning"),
    '; @meaning m\n(rewrite (Map1 "exp" x) z :name "q" :ruleset algebra)': (2, "z"),
    '; @meaning m\n(rewrite (Map1 "exp" x) x :subsume :name "q" :ruleset algebra)': (2, "subsume"),
    '; @meaning m\n(rewrite (Map1 "exp" (Leaf 3)) (Leaf 3) :name "q" :ruleset algebra)': (2, "Leaf"),
    '; @meaning m\n(rule ((= y (Map1 "exp" x))) ((set (shape y) (shape x))) :name "q" :ruleset algebra)': (2, "set"),
    '; @meaning m\n(rule ((= y (Map1 "exp" x))) ((delete (Map1 "exp" x))) :name "q" :ruleset algebra)': (2, "delete"),
    '; @meaning m\n(rule ((= y (Map1 "exp" x))) ((panic "x")) :name "q" :ruleset algebra)': (2, "panic"),
    '; @meaning m\n(rule ((= 1 1)) ((union (Leaf 1) (Leaf 2))) :name "q" :ruleset algebra)': (2, "no tensor"),
    '; @meaning m\n(rewrite (Map1 "exp" x) x :name "silu" :ruleset algebra)': (2, "exists already"),
}


@pytest.mark.parametrize("text", MALFORMED)
def test_file_that_holds_more_than_rules(text: str, tmp_path: Path) -> None:
    line, word = MALFORMED[text]
    path = tmp_path / "mine.egg"
    path.write_text(text + "\n")
    with pytest.raises(RuleError) as caught:
        read_rules([path])
    assert f"mine.egg:{line}" in str(caught.value)
    assert word in str(caught.value)


def test_nothing_of_such_a_file_runs(tmp_path: Path) -> None:
    path = tmp_path / "language.egg"  # the name of the language gives no rights
    path.write_text("(union (Leaf 1) (Leaf 2))\n")
    with pytest.raises(RuleError):
        saturate(["(let $t1 (Leaf 1))"], rule_files((path,)))


def test_shipped_rules_have_certificates() -> None:
    found = {r.name: r for r in api.list_rules() if r.kind == "equality"}
    assert found
    assert {n: r.evidence for n, r in found.items() if r.evidence not in ("proved", "tested")} == {}
    assert "egglog" in api.show_rule("silu")


def test_certificate_is_bound_to_text_and_language(tmp_path: Path) -> None:
    (one,) = rules_of(written(tmp_path, '(rewrite (Map1 "exp" x) x)'))
    (two,) = rules_of(written(tmp_path, '(rewrite (Map1   "exp" x) ; a comment\n x)'))
    (other,) = rules_of(written(tmp_path, '(rewrite (Map1 "exp " x) x)'))
    assert one.hash == two.hash != other.hash


def test_changed_shipped_rule_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from dataclasses import replace

    known = certificates.read_shipped_equalities()
    stale = {n: replace(c, hash="0") if n == "silu" else c for n, c in known.items()}
    monkeypatch.setattr("emerge.rules.certificates.read_shipped_equalities", lambda path=None: stale)
    with pytest.raises(RuleError, match=r"pointwise.egg:.*silu.*has changed") as caught:
        api._admit_equalities(api.equality_rules(), (), {})
    assert "rules check --update" in str(caught.value)
    gone = {n: c for n, c in known.items() if n != "silu"}
    monkeypatch.setattr("emerge.rules.certificates.read_shipped_equalities", lambda path=None: gone)
    with pytest.raises(RuleError, match=r"silu.*has no certificate"):
        api._admit_equalities(api.equality_rules(), (), {})


def test_rule_of_a_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Certified when it is loaded, kept; a false one is refused even when trusted; an open one needs trust."""
    path = written(tmp_path, '(rewrite (Map1 "log" (Map1 "exp" x)) x)')
    assert api._admit_equalities(api.equality_rules([path]), (), {})["mine"] in ("proved", "tested")
    with monkeypatch.context() as m:
        m.setattr("emerge.rules.api.certify_rule", lambda *a: pytest.fail("certified twice"))
        assert api._admit_equalities(api.equality_rules([path]), (), {})["mine"] in ("proved", "tested")
    wrong = written(tmp_path, '(rewrite (Map1 "exp" (Map1 "log" x)) x)')
    for trust in ((), ("mine",)):
        with pytest.raises(RuleError, match=r"mine.egg:2: the rule 'mine' is refused: it makes .* undefined"):
            api._admit_equalities(api.equality_rules([wrong]), trust, {})
    open_ = written(tmp_path, '(rewrite (Map1 "nobody knows" x) (Map1 "this either" x))')
    with pytest.raises(RuleError, match=r"cannot be validated.*trust"):
        api._admit_equalities(api.equality_rules([open_]), (), {})
    assert api._admit_equalities(api.equality_rules([open_]), ("mine",), {})["mine"] == "assumed"


def test_name_of_a_law(tmp_path: Path) -> None:
    path = written(tmp_path, '(rewrite (Map1 "log" (Map1 "exp" x)) x)', "equal-reference")
    with pytest.raises(RuleError, match="name of a law"):
        api.equality_rules([path], ["equal-reference"])


STORY = """; Our own functions.

; @meaning log(exp(x)) = x
(rewrite (Map1 "log" (Map1 "exp" x)) x :ruleset algebra :name "log-of-exp")
"""


def test_story_of_a_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unknown without the rule, equivalent with it, which the report names; a wrong rule is refused with a counterexample."""
    import torch

    import emerge

    monkeypatch.setattr(
        "emerge.rules.api._loaded", lambda files: (None, {})
    )  # the laws of datalog/ are not at issue here

    def reference(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.log(torch.exp(x)) * y

    def implementation(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x * y

    x, y = torch.randn(3, 4), torch.randn(3, 4)

    def compare(rules: list[Path]) -> Any:
        return emerge.compare(reference, implementation, inputs=(x, y), relations="auto", rules=rules)

    assert compare([]).verdict == "UNKNOWN"
    path = tmp_path / "mine.egg"
    path.write_text(STORY)
    found = compare([path])
    assert found.verdict == "EQUIVALENT"
    assert found.rules_used["log-of-exp"] > 0
    assert found.rules_used["equal-reference"] > 0
    assert not any(rule.startswith("shape-") for rule in found.rules_used)
    assert found.evidence in ("proved", "tested")
    assert found.seconds["egglog"] > 0
    path.write_text(STORY.replace('"log" (Map1 "exp" x)', '"exp" (Map1 "log" x)'))
    with pytest.raises(EmergeError) as caught:
        compare([path])
    assert "'log-of-exp' is refused" in str(caught.value)
    assert "undefined" in str(caught.value)
    assert "mine.egg:4" in str(caught.value)


def test_same_facts_are_in_the_log() -> None:
    from emerge.rules.examine import run_derivation
    from emerge.rules.generate import scene

    derivation = run_derivation(scene("forms found by the algebra", 3), (), "embedded", True, None)
    assert derivation.result.log is not None
    instances = list(derivation.result.log.instances())
    assert any(p.relation == "same" for i in instances for p in i.premises)
    assert {"equal-reference", "equal-implementation"} & {i.clause.law for i in instances}


def test_same_is_derived_by_no_clause(tmp_path: Path) -> None:
    path = tmp_path / "mine.dl"
    path.write_text("// @law mine\n// @meaning all tensors are equal\nsame(V, W) :- value(V, 1), value(W, 1).\n")
    with pytest.raises(RuleError, match=r"mine.dl:3.*derived by no clause"):
        api._loaded((path,))


def test_budget_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """An UNKNOWN says that the saturation stopped early."""
    import torch

    import emerge
    import emerge.algebra.extend as stage
    from emerge.algebra.saturate import Budget

    monkeypatch.setattr("emerge.campaign.run.law_levels", lambda rules, trust: {})
    whole = stage.extend
    monkeypatch.setattr(stage, "extend", lambda low, files: whole(low, files, Budget(rounds=1)))
    x, y = torch.randn(3, 4), torch.randn(3, 4)
    found = emerge.compare(
        lambda x, y: torch.log(torch.exp(x)) * (y + 1), lambda x, y: x * (1 + y), inputs=(x, y), relations="auto"
    )
    assert found.verdict == "UNKNOWN"
    assert "the algebra of the reference stopped after 1 rounds" in found.reason


#: Name -> (rule from an equality, whether it holds, words of the refusal).
PREMISES = {
    "the exponential is one-to-one": ('(= v (Map1 "exp" x)) (= v (Map1 "exp" y))', True, ""),
    "a multiple, also by 0": ("(= v (Scale c x)) (= v (Scale c y))", False, "c = 0"),
    "squares": ('(= v (Map1 "square" x)) (= v (Map1 "square" y))', False, "false for"),
    "inverses, undefined or not": ('(= v (Map1 "reciprocal" x)) (= v (Map1 "reciprocal" y))', False, "undefined"),
    "sums with infinity": ('(= v (Map2 "add" z x)) (= v (Map2 "add" z y))', False, "is false for"),
    "sums over a dimension": ('(= v (Fold "sum" "sum" x d s)) (= v (Fold "sum" "sum" y d s))', False, "must be proved"),
}  # fmt: skip


@pytest.mark.parametrize("name", PREMISES)
def test_rule_from_an_equality_is_proved_or_refused(name: str, tmp_path: Path) -> None:
    body, holds, words = PREMISES[name]
    (rule,) = rules_of(written(tmp_path, f'(rule ({body}) ((union x y)) :ruleset algebra :name "mine")'))
    found = certify_rule(rule)
    if holds:
        assert isinstance(found, EqualityCertificate)
        assert found.evidence == "proved"
    else:
        assert isinstance(found, Refusal)
        assert words in found.reason
