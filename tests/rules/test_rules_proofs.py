"""Laws on symbolic elements: what can be shown, what stays open, and what a certificate of a proof is bound to."""

from __future__ import annotations

import shutil
from fractions import Fraction
from pathlib import Path

import pytest

from emerge.engine.program import Program
from emerge.relate.derive import load_program
from emerge.rules.certify import certify
from emerge.rules.elements import Elements
from emerge.rules.examine import run_derivation
from emerge.rules.generate import pairs
from emerge.rules.laws import laws_of
from emerge.rules.proofs import prove_pair
from emerge.util.errors import RuleError
from emerge.util.resources import resource_dir


def changed(tmp_path: Path, file: str, old: str, new: str) -> Program:
    folder = tmp_path / "datalog"
    shutil.copytree(resource_dir("datalog"), folder)
    path = folder / "analysis" / file
    text = path.read_text()
    assert text.count(old) == 1
    path.write_text(text.replace(old, new))
    return Program.load([folder / "alignment.dl"])


def test_forms_of_elements_are_unique() -> None:
    e = Elements()
    x, y, z = (e.free(n) for n in "xyz")
    assert e.product(e.total([x, y]), z) == e.total([e.product(z, x), e.product(y, z)])
    assert e.extremum("max", [x, e.extremum("max", [y, z])]) == e.extremum("max", [z, x, y])
    assert e.apply("exp", [e.extremum("max", [x, y])]) == e.extremum("max", [e.apply("exp", [x]), e.apply("exp", [y])])
    assert e.apply("square", [e.extremum("max", [x, y])]) != e.extremum("max", [e.apply("square", [v]) for v in (x, y)])
    assert e.total([e.extremum("max", [x, y]), z]) == e.extremum("max", [e.total([x, z]), e.total([y, z])])
    assert e.apply("f", [x, y]) != e.apply("f", [y, x])


def test_what_cancels_is_still_read() -> None:
    e = Elements()
    x, y = e.free("x"), e.free("y")
    cancelled = e.total([x, y, e.scaled(y, Fraction(-1))])
    assert cancelled != x
    assert e.agree(cancelled, x), "x is defined wherever x + y - y is"
    assert not e.agree(x, cancelled), "x + y - y is undefined where y is"
    assert not e.agree(e.number(Fraction(0)), e.product(e.number(Fraction(0)), x))


def test_large_elements_are_told_apart_from_open_ones() -> None:
    e = Elements()
    many = e.total([e.free("x", k) for k in range(60)])
    w = e.free("w")
    assert e.cut(e.product(many, w))
    assert not e.cut(many)
    assert e.product(many, w) == e.product(w, many)


def test_true_laws_have_nothing_open() -> None:
    program = load_program()
    for pair in pairs(1, 4, ["collectives everywhere", "fused projection"]):
        proof = prove_pair(pair, run_derivation(pair, (), "embedded", True, program))
        assert not proof.open, proof.open
        assert proof.shown["transport"] and proof.shown["given"] and proof.shown["layout-operator-axes"]


SABOTAGES = [
    ("transport.dl", 'only_mesh(A, Y), L = [_, X, Size, "p", _, K], X != nil', "only_mesh(A, Y), L = [_, X, Size, _, _, K], X != nil",
     "transport-sharded", "whole axes over a shard"),
    ("relocation.dl", 'relocation(O, "all_reduce", R), op(O, V, _, _), P band G = G, Q = P - G, Q = 0.',
     'relocation(O, "all_reduce", _), R != "none", op(O, V, _, _), P band G = G, Q = P - G, Q = 0.',
     "all-reduce-partial", "collectives everywhere"),
]  # fmt: skip


@pytest.mark.parametrize(("file", "old", "new", "law", "scene"), SABOTAGES)
def test_a_dropped_side_condition_leaves_the_law_open(
    tmp_path: Path, file: str, old: str, new: str, law: str, scene: str
) -> None:
    program = changed(tmp_path, file, old, new)
    found: dict[str, str] = {}
    for pair in pairs(0, 12, [scene]):
        found |= prove_pair(pair, run_derivation(pair, (), "embedded", True, program)).open
        if law in found:
            break
    assert law in found, f"everything that the changed {law} gives was shown"
    assert " against " in found[law] or "relates extents" in found[law]


def test_a_proof_is_part_of_the_certificate() -> None:
    program = load_program()
    laws = laws_of(program)
    wanted = [laws["given"], laws["given-local"], laws["form-lookup"]]
    outcome = certify(program, wanted, count=9, scenes=["vocabulary look-up", "fused projection", "norm written out"])
    given = outcome.certificates["given"]
    assert (given.evidence, given.method) == ("proved", "statement")
    assert given.symbolic >= 5
    lookup = outcome.certificates.get("form-lookup")
    assert lookup is None or lookup.evidence == "tested", "it names no argument"


def test_a_changed_law_or_argument_makes_the_certificate_stale(tmp_path: Path) -> None:
    before = laws_of(load_program())
    text = "// @proof statement\ngiven_walk(G, K, M, U, N) :- given_walk(G, L, M, U, N), L = [_, nil"
    for k, new in enumerate((text.replace("@proof statement\n", "@proof layout\n"), text.replace("L, M, U, N), L", "L, M, U, N), N >= 0, L"))):
        after = laws_of(changed(tmp_path / str(k), "given.dl", text, new))
        assert after["given-consumed"].hash != before["given-consumed"].hash
        assert after["form-lookup"].hash == before["form-lookup"].hash


def test_an_argument_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    text = "// @proof statement\ngiven_walk(G, K, M, U, N) :- given_walk(G, L, M, U, N), L = [_, nil"
    program = changed(tmp_path, "given.dl", text, text.replace("@proof statement\n", "@proof obvious\n"))
    with pytest.raises(RuleError, match="given-consumed.*obvious"):
        laws_of(program)
