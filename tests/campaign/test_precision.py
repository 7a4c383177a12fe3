"""``PRECISION`` findings: one per place where the sides round differently, none elsewhere, never a change of verdict."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import emerge
from emerge.campaign import run
from emerge.verdict.types import Finding
from tests.support.build import DType, GraphBuilder, Ref, build_ranks, build_reference

Cast = Callable[[GraphBuilder, Ref, str], Ref]


def cast(g: GraphBuilder, x: Ref, dtype: str, name: str | None = None) -> Ref:
    """A cast to ``dtype``."""
    return g.aten("_to_copy", x, dtype=DType(dtype), name=name)


def norm(g: GraphBuilder, x: Ref) -> Ref:
    """An RMS norm in the type of its operand."""
    mean = g.aten("mean.dim", g.aten("pow.Tensor_Scalar", x, 2, name="square"), [-1], True, name="mean")
    return g.aten("mul.Tensor", x, g.aten("rsqrt", g.aten("add.Tensor", mean, 1e-5)), name="norm")


def router(g: GraphBuilder, kind: str) -> Ref:
    """Probabilities of the top experts: [t=5, m=8] against 6 experts; ``kind`` says what is in bfloat16."""
    x, w = g.input("x", [5, 8], "bfloat16"), g.input("w", [8, 6], "bfloat16")
    logits = g.aten("mm", x, w, name="logits")
    if kind == "wide":
        return g.aten("_softmax", cast(g, logits, "float32"), -1, False, name="probabilities")
    return cast(g, g.aten("_softmax", logits, -1, False, name="probabilities"), "float32")


def normed(g: GraphBuilder, kind: str) -> Ref:
    """A norm before a projection; statistics in float32 or in the type of the input."""
    x, w = g.input("x", [5, 8], "bfloat16"), g.input("w", [8, 6], "bfloat16")
    y = norm(g, cast(g, x, "float32") if kind == "wide" else x)
    return g.aten("mm", cast(g, y, "bfloat16") if kind == "wide" else y, w)


def stored(g: GraphBuilder, kind: str) -> Ref:
    """The norm of a float32 stream, which the narrow kind casts first; the stream itself stays in float32."""
    x = g.aten("tanh", g.input("x", [5, 8]), name="stream")
    y = norm(g, x if kind == "wide" else cast(g, x, "bfloat16", "early"))
    return g.aten("add.Tensor", x, cast(g, y, "float32"), name="sum")


def residuals(g: GraphBuilder, kind: str) -> Ref:
    """Two sums in float32, each rounded for the stream; the wide kind squares what was not rounded."""
    h = g.input("x", [5, 8], "bfloat16")
    out = []
    for k in range(2):
        total = g.aten("add.Tensor", cast(g, h, "float32"), cast(g, g.aten("tanh", h), "float32"), name=f"sum{k}")
        h = cast(g, total, "bfloat16")
        read = total if kind == "wide" else cast(g, h, "float32")
        out.append(g.aten("mul.Tensor", read, read, name=f"square{k}"))
    return g.aten("add.Tensor", *out)


def product(g: GraphBuilder, kind: str) -> Ref:
    """A product in bfloat16, or in float32 and rounded at once: the same number."""
    x, y = g.input("x", [5, 8], "bfloat16"), g.input("y", [5, 8], "bfloat16")
    if kind == "wide":
        return cast(g, g.aten("mul.Tensor", cast(g, x, "float32"), cast(g, y, "float32")), "bfloat16")
    return g.aten("mul.Tensor", x, y)


def whole(g: GraphBuilder, kind: str) -> Ref:
    """One program whose inputs are declared in another type."""
    dtype = "float32" if kind == "wide" else "bfloat16"
    return g.aten("mm", norm(g, g.input("x", [5, 8], dtype)), g.input("w", [8, 6], dtype))


def compared(program: Callable[[GraphBuilder, str], Ref], ours: str, theirs: str) -> Any:
    """The result of a program against itself on two ranks, each with its kind."""
    reference = build_reference(lambda g: program(g, ours))
    ranks = build_ranks({"tp": 2}, lambda g, rank: program(g, theirs))
    relations = {i.name: "a b ~ a b" for i in reference.inputs}
    return emerge.compare(reference, ranks, relations=relations, outputs={0: "a b ~ a b"}, mesh={"tp": 2})


@pytest.fixture(autouse=True)
def _levels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Certificates are not what is tested here."""
    monkeypatch.setattr(run, "law_levels", lambda *_: {})


def found(program: Callable[[GraphBuilder, str], Ref], ours: str, theirs: str) -> list[Finding]:
    """Its findings; the verdict must not depend on types."""
    result = compared(program, ours, theirs)
    assert result.verdict == "EQUIVALENT", result.reason
    assert all(f.kind == "PRECISION" for f in result.findings)
    return list(result.findings)


@pytest.mark.parametrize(("program", "node"), [(router, "probabilities"), (normed, "square"), (stored, "square")])
def test_a_narrower_place_is_one_warning(program: Callable[[GraphBuilder, str], Ref], node: str) -> None:
    (finding,) = found(program, "wide", "narrow")
    assert finding.severity == "warning"
    assert (finding.expected, finding.found) == ("float32", "bfloat16")
    assert finding.reference_nodes[0] == node
    assert finding.implementation_nodes[0] == f"0:{node}"
    assert None not in (finding.reference_source, finding.implementation_source, finding.hint)


@pytest.mark.parametrize("program", [router, normed, stored])
def test_a_wider_place_is_a_note(program: Callable[[GraphBuilder, str], Ref]) -> None:
    (finding,) = found(program, "narrow", "wide")
    assert finding.severity == "note"


@pytest.mark.parametrize("program", [router, normed, stored, product, whole])
@pytest.mark.parametrize("kind", ["wide", "narrow"])
def test_equal_types_give_nothing(program: Callable[[GraphBuilder, str], Ref], kind: str) -> None:
    assert not found(program, kind, kind)


@pytest.mark.parametrize("kinds", [("wide", "narrow"), ("narrow", "wide")])
def test_what_rounds_the_same_gives_nothing(kinds: tuple[str, str]) -> None:
    assert not found(product, *kinds)


def test_inputs_declared_in_another_type_are_no_finding() -> None:
    assert not found(whole, "wide", "narrow")


def test_two_places_are_two_findings() -> None:
    assert [f.reference_nodes[0] for f in found(residuals, "wide", "narrow")] == ["sum0", "sum1"]
    assert not found(residuals, "narrow", "narrow")


def test_a_cast_is_named() -> None:
    (finding,) = found(stored, "wide", "narrow")
    assert "0:early" in finding.implementation_nodes
