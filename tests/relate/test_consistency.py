"""Contradictions between statements, and claims that leave part of an output open."""

from __future__ import annotations

import pytest

from emerge.facts.mesh import Mesh
from emerge.relate.consistency import check_consistent, check_covered, uncovered
from emerge.relate.expected import Ambiguity, block_readings, default_reading
from emerge.relate.notation import TensorSpec, alignment_statement
from emerge.relate.statement import Piece, Statement
from emerge.util.errors import RelationError

TP2 = Mesh({"tp": 2})


def say(
    text: str, s: str, s_shape: tuple, d: str, d_shape: tuple, place: str, cuts: tuple = (), mesh: Mesh = TP2
) -> Statement:
    return alignment_statement(
        text,
        TensorSpec(s, s_shape),
        TensorSpec(d, d_shape),
        mesh,
        reference_cuts=cuts,
        implementation_cuts=cuts,
        place=place,
    )


def test_a_transposed_second_reading_is_a_contradiction() -> None:
    both = [say("a b ~ a b", "w", (4, 4), "v", (4, 4), "f:1"), say("a b ~ b a", "w", (4, 4), "v", (4, 4), "f:2")]
    with pytest.raises(RelationError) as error:
        check_consistent(both, {"v": (4, 4)}, TP2)
    assert "f:1" in str(error.value)
    assert "f:2" in str(error.value)


def test_a_contradiction_between_ranks_only() -> None:
    mesh = Mesh({"dp": 2, "tp": 2})
    both = [
        say("(dp a) ~ a", "w", (4,), "v", (2,), "f:1", mesh=mesh),
        say("(tp a) ~ a", "w", (4,), "v", (2,), "f:2", mesh=mesh),
    ]
    with pytest.raises(RelationError, match="contradicts"):
        check_consistent(both, {"v": (2,)}, mesh)


def test_one_tensor_given_as_two_is_a_contradiction_for_inputs_only() -> None:
    both = [say("a ~ a", "w", (4,), "v", (4,), "f:1"), say("a ~ a", "u", (4,), "v", (4,), "f:2")]
    with pytest.raises(RelationError, match="contradicts"):
        check_consistent(both, {"v": (4,)}, TP2)
    assert check_consistent(both, {"v": (4,)}, TP2, claims=True) == both


def test_repetition_and_disjoint_pieces_are_fine() -> None:
    shapes = {"v": (4,)}
    one = say("a ~ a", "w", (4,), "v", (4,), "f:1")
    assert check_consistent([one, say("a ~ a", "w", (4,), "v", (4,), "f:2")], shapes, TP2) == [one]
    pieces = [
        say("a ~ a", "w", (4,), "v", (4,), "f:1", ((0, 2),)),
        say("a ~ a", "w", (4,), "v", (4,), "f:2", ((2, 4),)),
    ]
    assert check_consistent(pieces, shapes, TP2) == pieces


def test_overlapping_pieces() -> None:
    shapes = {"v": (6,)}
    left = say("a ~ a", "w", (6,), "v", (6,), "f:1", ((0, 4),))
    assert len(check_consistent([left, say("a ~ a", "w", (6,), "v", (6,), "f:2", ((2, 6),))], shapes, TP2)) == 2
    shifted = alignment_statement(
        "a ~ a", TensorSpec("w", (6,)), TensorSpec("v", (6,)), TP2, reference_cuts=((0, 4),), implementation_cuts=((2, 6),),
        place="f:2",
    )  # fmt: skip
    with pytest.raises(RelationError, match="contradicts"):
        check_consistent([left, shifted], shapes, TP2)


def test_claims_cover_the_output() -> None:
    assert uncovered([Piece("w", ((0, 0, 2),)), Piece("w", ((0, 2, 4),))], (4, 3)) is None
    assert uncovered([Piece("w", ((0, 0, 2),)), Piece("w", ((0, 3, 4),))], (4, 3)) == ((2, 3), (0, 3))
    with pytest.raises(RelationError, match=r"w\[2:4\]"):
        check_covered([say("a ~ a", "w", (4,), "v", (4,), "f:1", ((0, 2),))], {"w": (4,)})


def test_readings() -> None:
    mesh = Mesh({"dp": 2, "tp": 2})
    assert block_readings((4, 3), (4, 3), mesh) == ["a b ~ a b"]
    assert block_readings((4, 3), (2, 3), TP2) == ["(tp a) b ~ a b"]
    assert block_readings((4, 3), (2, 3), mesh) == ["(tp a) b ~ a b", "(dp a) b ~ a b"]
    assert block_readings((4, 3), (1, 3), mesh) == ["(dp tp a) b ~ a b"]
    assert block_readings((4, 3), (1, 3), mesh, most=1) == []
    assert block_readings((4, 3), (3, 4), TP2) == []
    assert block_readings((4, 3), (4,), TP2) == []


def test_two_readings_are_listed_with_the_line_to_add() -> None:
    mesh = Mesh({"dp": 2, "tp": 2})
    s, d = TensorSpec("y", (4, 3)), TensorSpec("z", (2, 3))
    found = default_reading("outputs", "y", s, d, mesh, most=1, origin="given")
    assert isinstance(found, Ambiguity)
    assert found.lines() == ['outputs: {y: "(tp a) b ~ a b"}', 'outputs: {y: "(dp a) b ~ a b"}']
