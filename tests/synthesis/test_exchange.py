"""Laws of exchange: found from ground terms of other shapes, with the side condition they need, and none that is false."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("egglog")

from emerge.algebra.rulefile import rules_of, shipped_files
from emerge.algebra.saturate import rule_files
from emerge.rules.equalities import EqualityCertificate
from emerge.synthesis.exchange import Law, laws
from emerge.synthesis.generalise import of_law
from emerge.synthesis.implied import implied
from emerge.synthesis.places import applies
from emerge.synthesis.sketches import Place
from emerge.synthesis.store import Store, as_rule, validate
from emerge.synthesis.terms import parse, write

SHAPES = {"x": (64, 24), "y": (64, 24), "i": (24,), "r": (64,)}


def place(text: str, at: int = 0) -> Place:
    term = parse(text)
    return Place(term, at, SHAPES)  # type: ignore[arg-type]


def first(text: str, at: int = 0, heads: tuple[str, ...] = ()) -> Law | None:
    return next(laws(place(text, at), [parse(h) for h in heads], lambda: True), None)  # type: ignore[misc]


FOUND = [
    ("(Lookup (Map1 \"cos\" x) i 0)", 0, (), "lookup-in-map1"),
    ("(Lookup (Cat x y 1) i 0)", 0, (), "lookup-in-cat"),
    ("(Lookup (Place r (vec-of 0 -1) (vec-of 64 24)) i 0)", 0, (), "lookup-in-place"),
    ("(Lookup (Place r (vec-of -1 0) (vec-of 7 64)) i 0)", 0, (), "lookup-in-broadcast"),
    ("(Lookup x (Range \"int\" 0 1 24) 0)", 1, ("(Slice x 0 0 24)",), "lookup-of-range"),
    ("(Slice (Range \"int\" 0 1 64) 0 0 24)", 0, (), "slice-of-range"),
    ("(Slice (Lookup x i 0) 1 8 16)", 0, (), "slice-of-lookup"),
    ("(Map1 \"cast#float32\" (Range \"int\" 0 1 24))", 1, (), "range-as-float32"),
    ("(Lookup (Range \"float\" 0 1 64) i 0)", 0, ("(Map1 \"cast#float32\" i)",), "lookup-in-range"),
    ("(Scale (bigrat (bigint 3) (bigint 7)) (Shift (bigrat (bigint 1) (bigint 5)) x))", 1, (), None),
    ("(Fold \"sum\" \"sum\" (Scale (bigrat (bigint 3) (bigint 7)) x) (vec-of 1) (vec-of 64))", 2, (), "scale-out-of-sum"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "at", "heads", "shipped"), FOUND, ids=[str(f[3]) for f in FOUND])
def test_laws_that_people_wrote_are_found_again(
    text: str, at: int, heads: tuple[str, ...], shipped: str | None, tmp_path: Path
) -> None:
    law = first(text, at, heads)
    if shipped is None:
        assert law is None, "scales move outwards: the other direction is no law"
        return
    assert law is not None
    proposal = of_law(law)
    certificate = validate(proposal)
    assert isinstance(certificate, EqualityCertificate)
    assert certificate.device == "cpu" or certificate.device.startswith("cuda")
    assert certificate.dtype == "float64"
    numbers = set(re.findall(r"(?<![\w#/.-])\d+(?![\w.])", write(proposal.left) + write(proposal.right)))
    assert not numbers & {"64", "24", "8", "16", "7"}, "no size of the place stands in the law"
    store = Store(tmp_path)
    store.add(proposal.text(), certificate)
    (hand,) = [r for f in shipped_files() for r in rules_of(f) if r.name == shipped]
    assert implied(hand, (*rule_files((), "minimal"), store.path)), "it says at least what the shipped rule says"


def test_what_holds_along_other_dimensions_only_gets_a_condition() -> None:
    law = first('(Slice (Along "softmax" "w" x 1) 0 3 9)')
    assert law is not None
    assert [write(w) for w in law.when] == ["(!= d1 d2)"]
    assert isinstance(validate(of_law(law)), EqualityCertificate)
    assert not isinstance(validate(of_law(Law(law.left, law.right))), EqualityCertificate), "it is needed"


@pytest.mark.parametrize(
    "text",
    [
        '(Slice (Along "softmax" "w" x 1) 1 3 9)',  # along the same dimension: a part is normalised by itself
        '(Slice (Along "cumsum" "o" x 0) 0 3 9)',
        '(Map1 "exp" (Scale (bigrat (bigint 1) (bigint 24)) x))',
        '(Along "softmax" "w" (Scale (bigrat (bigint 1) (bigint 8)) x) 1)',
    ],
)
def test_neighbours_that_do_not_change_places(text: str) -> None:
    at = 2 if text.startswith("(Along") else 1 if text.startswith("(Map1") else 0
    for law in laws(place(text, at), [], lambda: True):
        assert not isinstance(validate(of_law(law)), EqualityCertificate), of_law(law).meaning


def test_a_conversion_is_not_dropped() -> None:
    """Values of ground terms are exact, so nothing but this rule speaks against it."""
    for text in ('(Place (Map1 "cast#float16" x) (vec-of 1 0) (vec-of 24 64))', '(Slice (Map1 "cast#float16" x) 0 1 5)'):
        for law in laws(place(text), [], lambda: True):
            assert "cast#float16" in write(law.right)


def test_known_rules_are_recognised_with_their_conditions() -> None:
    known = {r.name: r for f in shipped_files() for r in rules_of(f)}
    assert applies(known["lookup-in-cat"], place("(Lookup (Cat x y 1) i 0)"))
    assert not applies(known["lookup-in-cat"], place("(Lookup (Cat x y 0) i 0)")), "rows of both tables"
    assert not applies(known["place-of-padding"], place("(Place (Slice x 0 0 5) (vec-of 1 0) (vec-of 24 5))"))
    assert applies(known["lookup-of-range"], place('(Lookup x (Range "int" 0 1 24) 0)', 1))
    assert not applies(known["lookup-of-range"], place('(Lookup x (Range "int" 60 1 24) 0)', 1)), "out of range"


def test_what_follows_from_other_rules() -> None:
    known = {r.name: r for f in shipped_files() for r in rules_of(f)}
    language = rule_files((), "minimal")
    assert implied(known["slice-of-slice"], language)
    assert not implied(known["silu"], language)
    double = as_rule(of_law(Law(parse('(Slice (Map1 "exp" x) d i j)'), parse('(Map1 "exp" (Slice x d i j))'))))  # type: ignore[arg-type]
    assert implied(double, language), "an instance of a shipped rule"
