# ruff: noqa: E501
"""Rule files of a user: a described operator becomes shardable, and wrong rules are refused by name and line."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from emerge.graph.json_io import write_graph
from emerge.relate.derive import derive, load_program
from emerge.relate.statement import Piece
from emerge.rules import api
from emerge.rules.build import Build, Val
from emerge.rules.pair import placed
from emerge.rules.writer import Writer
from emerge.util.errors import RuleError

GATE = """// A gated activation of our own library.

// @law mylib-gate
// @meaning tanh(gate) * x, element by element
operator_signature("mylib.gate.default", 0, "t f, t f -> t f", "").
operator_definition("mylib.gate.default", "gate.json").
// @law mylib-gate-linear
// @meaning the gate scales x
operator_linear("mylib.gate.default", 0, 1).
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A user's folder with a rule file and the graph that defines the operator."""
    w = Writer("gate")
    x, gate = w.input("x", [2, 3]), w.input("gate", [2, 3])
    graph = w.finish(w.op("mul.Tensor", x, w.op("tanh", gate)))[0]
    write_graph(graph, tmp_path / "gate.json")
    w = Writer("norm")
    x = w.input("x", [2, 3])
    graph = w.finish(w.op("div.Tensor", x, w.op("sum.dim_IntList", w.op("exp", x), [-1], True)))[0]
    write_graph(graph, tmp_path / "norm.json")
    (tmp_path / "gate.dl").write_text(GATE)
    return tmp_path


@pytest.fixture(autouse=True)
def shipped_laws_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    """Certificates for the shipped laws as they are, so that these tests speak about the user's laws only."""
    from emerge.rules.certify import Certificate
    from emerge.rules.laws import laws_of

    laws = laws_of(load_program())
    made = {n: Certificate(n, law.hash, "tested", 9, 9, 9, 0, "", "cpu") for n, law in laws.items()}
    monkeypatch.setattr("emerge.rules.certificates.read_shipped", lambda path=None: made)
    api._loaded.cache_clear()
    load_program.cache_clear()


def test_operator_becomes_shardable(folder: Path) -> None:
    b = Build(1, {"tp": 2})
    b.dim("t"), b.dim("f", ["tp"])
    x, gate = b.input(["t", "f"], [None, "tp"]), b.input(["t", "f"], [None, "tp"])
    shape = b.shape(["t", "f"])
    ref = b.reference.op("mylib.gate.default", x.ref, gate.ref, gives=("float64", shape))
    imp = b.imp.op("mylib.gate.default", x.imp, gate.imp, gives=("float64", b.local(["t", "f"], [None, "tp"])))
    b.keep(Val(ref, b.imp.all_gather(imp, "tp", 1), ("t", "f"), (None, None)))
    pair = b.finish()
    claim = placed("", shape, (None, None), pair.mesh)
    claim = replace(claim, reference=Piece(ref.name), implementation=Piece(b.vals[-1].imp.name))
    assert not derive(pair.problem([claim]), engine="embedded").proved()
    files = api.rule_files([folder])
    assert derive(pair.problem([claim]), engine="embedded", rules=files).proved()
    levels = api.admit([folder])
    assert levels["mylib-gate"] == levels["mylib-gate-linear"] == "tested"


def test_certificate_is_kept(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    api.admit([folder])
    monkeypatch.setattr("emerge.rules.api.certify", lambda *a, **k: pytest.fail("certified twice"))
    assert api.admit([folder])["mylib-gate"] == "tested"


REFUSED = {
    "wrong signature": (
        '// @law mylib-norm\noperator_signature("mylib.norm.default", 0, "t f -> t f", "").\n'
        'operator_definition("mylib.norm.default", "norm.json").\n', "axis 'f' is not parallel"),
    "not linear": (
        '// @law mylib-gate\noperator_signature("mylib.gate.default", 0, "t f, t f -> t f", "").\n'
        '// @law gate-linear\noperator_linear("mylib.gate.default", 0, 3).\noperator_definition("mylib.gate.default", "gate.json").\n',
        "gate-linear"),
    "always true": (
        '// @law everything\naligned(S, D, nil, 0, 0, "none", "1") :- value(S, 1), value(D, 2).\n', "everything"),
    "wrong clause": (
        "// @law gather-anything\naligned(S, V, M, U, P, R, C) :-\n    relocated(O, V, A, \"all_gather\", _, _), "
        "aligned(S, A, M, U, P, R, C), relocation(O, _, _).\n", "gather-anything"),
    "no name": ('aligned(S, D, nil, 0, 0, "none", "1") :- value(S, 1), value(D, 2), S > D.\n', "has no name"),
    "bookkeeping": ('linear_set(B, 1) :- op(_, _, B, _).\n', "linear_set"),
    "unknown check": (".decl fine(S: Id)\n// @semantic magic\n.decl good(S: Id)\nfine(S) :- value(S, 1).\n", "magic"),
    "negates what is derived": (
        "// @law lonely\naligned(S, D, nil, 0, 0, \"none\", \"1\") :- value(S, 1), value(D, 2), !has_partner(S).\n", "has_partner"),
    "cannot be run": ('// @law unknown-op\noperator_signature("mylib.none.default", 0, "t -> t", "").\n', "unknown-op"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refused(folder: Path, name: str) -> None:
    text, word = REFUSED[name]
    (folder / "gate.dl").write_text(text)
    with pytest.raises(RuleError) as caught:
        api.admit([folder])
    assert word in str(caught.value)
    assert "gate.dl:" in str(caught.value)


def test_trust(folder: Path) -> None:
    """Trust admits what cannot be validated, and never what is false."""
    (folder / "gate.dl").write_text(REFUSED["cannot be run"][0])
    assert api.admit([folder], ["unknown-op"])["unknown-op"] == "assumed"
    (folder / "gate.dl").write_text(REFUSED["always true"][0])
    api._loaded.cache_clear()
    load_program.cache_clear()
    with pytest.raises(RuleError, match="everything"):
        api.admit([folder], ["everything"])
    with pytest.raises(RuleError, match="no law"):
        api.admit([], ["nothing-like-this"])
