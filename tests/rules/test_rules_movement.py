"""Rules of the algebra that only move elements are proved on symbolic elements; wrong twins and others are not."""

from __future__ import annotations

from pathlib import Path

import pytest

from emerge.algebra.rulefile import read_rules
from emerge.rules.certify import Refusal
from emerge.rules.equalities import EqualityCertificate, certify_rule
from emerge.rules.movement_proof import moves_only

pytest.importorskip("egglog")


def certified(tmp_path: Path, text: str) -> EqualityCertificate | Refusal:
    path = tmp_path / "rules.egg"
    path.write_text(f"; @meaning a test\n{text}\n")
    (rule,) = [r for r in read_rules([path]).values() if r.name == "mine"]
    return certify_rule(rule)


@pytest.mark.parametrize(
    "text",
    [
        '(rewrite (Slice (Slice x d i j) d k l) (Slice x d (+ i k) (+ i l)) :ruleset algebra :name "mine")',
        '(rewrite (Map1 f (Cat a b d)) (Cat (Map1 f a) (Map1 f b) d) :ruleset algebra :name "mine")',
        '(rewrite (View (View x s) t) (View x t) :ruleset algebra :name "mine")',
        '(rewrite (Lookup (Map2 f x y) i d) (Map2 f (Lookup x i d) (Lookup y i d)) :ruleset algebra :name "mine")',
        '(rewrite (Einsum e x (Slice w d i j) s) (Slice (Einsum e x w (vec-set s o m)) o i j)\n'
        '  :when ((free e 1 d o) (= m (vec-get (shape w) d))) :ruleset algebra :name "mine")',
        '(rewrite (Map1 "cast#float32" (Range "int" a s n)) (Range "float" a s n)\n'
        '  :when ((>= a 0) (>= s 0) (<= (+ a (* s n)) 1000)) :ruleset algebra :name "mine")',
    ],
)
def test_movement_is_proved(tmp_path: Path, text: str) -> None:
    found = certified(tmp_path, text)
    assert isinstance(found, EqualityCertificate), found
    assert found.evidence == "proved"
    assert found.method.startswith("symbolic elements")


@pytest.mark.parametrize(
    "text",
    [
        # commutes for some bodies only, and the draws know such bodies
        '(rewrite (Map2 f x y) (Map2 f y x) :ruleset algebra :name "mine")',
        '(rewrite (Slice (Slice x d i j) d k l) (Slice x d i (+ i l)) :ruleset algebra :name "mine")',
        '(rewrite (Cat a b d) (Cat b a d) :ruleset algebra :name "mine")',
        '(rewrite (Einsum e x (Slice w d i j) s) (Slice (Einsum e x w (vec-set s o m)) o i j)\n'
        '  :when ((free e 0 d o) (= m (vec-get (shape w) d))) :ruleset algebra :name "mine")',
    ],
)
def test_wrong_twins_are_refused(tmp_path: Path, text: str) -> None:
    found = certified(tmp_path, text)
    assert isinstance(found, Refusal)


def test_an_index_that_is_forgotten_is_no_proof(tmp_path: Path) -> None:
    # where the index lies outside the table only the left side is undefined; drawn indices lie inside
    found = certified(
        tmp_path,
        "(rewrite (Lookup (Place x ds s) i d) (Place x ds (vec-set s d n))\n"
        '  :when ((= (vec-get ds d) -1) (= n (vec-get (shape i) 0))) :ruleset algebra :name "mine")',
    )
    assert isinstance(found, EqualityCertificate), found
    assert found.evidence == "tested"


def test_a_condition_on_large_sizes_is_no_proof(tmp_path: Path) -> None:
    path = tmp_path / "rules.egg"
    path.write_text(
        "; @meaning wrong where a dimension has more than 40 positions, and never met by small ones\n"
        "(rewrite (Slice x d 0 n) x :when ((= n (vec-get (shape x) d)) (<= n 40)) :ruleset algebra :name \"mine\")\n"
    )
    rule = read_rules([path])["mine"]
    assert not moves_only(rule)


@pytest.mark.parametrize("condition", ["", ":when ((<= n 1000))", ":when ((<= (+ a (* s n)) 33554432))"])
def test_whole_numbers_that_a_type_may_not_hold_are_no_proof(tmp_path: Path, condition: str) -> None:
    found = certified(
        tmp_path,
        f'(rewrite (Map1 "cast#float32" (Range "int" a s n)) (Range "float" a s n) {condition} '
        ':ruleset algebra :name "mine")',
    )
    assert not isinstance(found, EqualityCertificate) or found.evidence == "tested"
