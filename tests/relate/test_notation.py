"""The alignment notation: what it parses to, how sizes are solved, and what it refuses."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from emerge.facts.mesh import Block, Mesh
from emerge.relate.notation import (
    TensorSpec,
    alignment_statement,
    canonical_text,
    make_piece,
    parse_alignment,
    parse_piece,
    placements_text,
    solve,
)
from emerge.relate.statement import Statement, describe
from emerge.util.errors import RelationError

TP2 = Mesh({"tp": 2})


def placed(
    text: str, reference: tuple[int, ...], implementation: tuple[int, ...], mesh: Mesh = TP2
) -> dict[str, tuple]:
    return {
        p.name: (p.size, p.reference, p.implementation, p.mesh)
        for p in solve(parse_alignment(text), reference, implementation, mesh)
    }


def local(whole: np.ndarray, statement: Statement, mesh: Mesh, rank: int, shape: tuple[int, ...]) -> np.ndarray:
    """What a statement says rank ``rank`` holds, element by element: an independent reading of the placements."""
    out = np.full(shape, -1)
    for at in itertools.product(*map(range, shape)):
        index = [0] * whole.ndim
        for p in statement.axes:
            if p.mesh is not None:
                digit = mesh.block_coordinate(rank, p.mesh)
            else:
                assert p.implementation is not None
                digit = at[p.implementation[0]] // p.implementation[1] % p.size
            index[p.reference[0]] += digit * p.reference[1]
        out[at] = whole[tuple(index)]
    return out


def statement(text: str, reference: tuple[int, ...], implementation: tuple[int, ...], mesh: Mesh = TP2) -> Statement:
    s, d = TensorSpec("s", reference, "float32"), TensorSpec("d", implementation, "float32")
    return alignment_statement(text, s, d, mesh, place="c.yaml:3")


def test_sharded_head_axis() -> None:
    found = placed("b s (tp h) e ~ b s h e", (2, 3, 8, 5), (2, 3, 4, 5))
    assert found == {
        "b": (2, (0, 1), (0, 1), None),
        "s": (3, (1, 1), (1, 1), None),
        "tp": (2, (2, 4), None, Block(-1, 1, 2)),
        "h": (4, (2, 1), (2, 1), None),
        "e": (5, (3, 1), (3, 1), None),
    }


def test_packed_tokens() -> None:
    whole = np.arange(2 * 3 * 5).reshape(2, 3, 5)
    found = local(whole, statement("b s m ~ (b s) m", (2, 3, 5), (6, 5)), TP2, 1, (6, 5))
    assert (found == whole.reshape(6, 5)).all()


def test_permuted_layout() -> None:
    whole = np.arange(6 * 5).reshape(6, 5)
    mesh = Mesh({})
    found = local(whole, statement("(k=2 g) d ~ g k d", (6, 5), (3, 2, 5), mesh), mesh, 0, (3, 2, 5))
    assert (found == whole.reshape(2, 3, 5).transpose(1, 0, 2)).all()


def test_sizes_of_two_joined_names_come_from_where_they_stand_alone() -> None:
    assert placed("(k g) d ~ g k d", (6, 5), (3, 2, 5))["k"] == (2, (0, 3), (1, 1), None)


@pytest.mark.parametrize("rank", [0, 1, 2, 3])
def test_two_mesh_axes_on_one_dimension(rank: int) -> None:
    mesh = Mesh({"dp": 2, "tp": 2})
    whole = np.arange(8 * 3).reshape(8, 3)
    found = local(whole, statement("(dp tp a) b ~ a b", (8, 3), (2, 3), mesh), mesh, rank, (2, 3))
    assert (found == whole[2 * rank : 2 * rank + 2]).all()
    swapped = local(whole, statement("(tp dp a) b ~ a b", (8, 3), (2, 3), mesh), mesh, rank, (2, 3))
    block = (rank % 2) * 2 + rank // 2
    assert (swapped == whole[2 * block : 2 * block + 2]).all()


def test_part_of_a_mesh_axis_as_reports_print_it() -> None:
    mesh = Mesh({"tp": 8})
    assert placed("(tp_2x4 a) ~ a", (8,), (2,), mesh)["tp_2x4"] == (4, (0, 2), None, Block(-1, 2, 4))


def test_ones_and_scalars() -> None:
    assert placed("1 a ~ a 1 1", (1, 4), (4, 1, 1)) == {"a": (4, (1, 1), (0, 1), None)}
    assert placed("~", (), ()) == {}
    assert placed("() a=1 ~ a", (1, 1), (1,)) == {}


def test_unused_mesh_axis_is_replicated() -> None:
    assert "tp" not in placed("a b ~ a b", (4, 3), (4, 3))


@pytest.mark.parametrize(
    ("text", "reference", "implementation", "message"),
    [
        ("a b", (2, 3), (2, 3), "expected '~'"),
        ("a ~ a ~ a", (2,), (2,), "expected its end"),
        ("a (b ~ a b", (2, 3), (2, 3), "inside parentheses"),
        ("a 3 ~ a 3", (2, 3), (2, 3), "3 has no name"),
        ("a * b ~ a b", (2, 3), (2, 3), "has no meaning"),
        ("a a ~ a a", (2, 2), (2, 2), "stands twice"),
        ("(tp a) (tp b) ~ a b", (2, 2), (1, 1), "stands twice"),
        ("a ~ (tp a)", (2,), (4,), "mesh axis 'tp' stands on the right"),
        ("(tp a) ~ (tp a)", (4,), (4,), "drop it there"),
        ("(pp a) ~ a", (4,), (2,), "neither on the right nor a mesh axis (mesh axes are: tp)"),
        ("a ~ a b", (4,), (4, 2), "'b' on the right is not on the left"),
        ("a b ~ a", (4, 2), (4,), "'b' is neither on the right"),
        ("(tp a) ~ a", (5,), (2,), "size 5"),
        ("(tp a) ~ a", (4,), (4,), "size 4"),
        ("a ~ a", (4,), (3,), "but a=4 gives 4"),
        ("a b ~ a b", (4,), (4,), "the left has 2 dimensions"),
        ("(a b) ~ (a b)", (6,), (6,), "do not determine the sizes of 'a' and 'b'"),
        ("(tp=4 a) ~ a", (8,), (2,), "written with size 4, but has size 2"),
        ("a=3 ~ a", (4,), (4,), "but a=3 gives 3"),
        ("a ~ a", ("u0",), (4,), "data-dependent size 'u0'"),
        ("a ~ a + sum(tp)", (4,), (4,), "expected 'partial(..)'"),
        ("a ~ a + partial()", (4,), (4,), "names no mesh axis"),
        ("a ~ a + partial(tp)", (4,), (4,), "partial sum over tp"),
        ("a ~ a + partial(pp)", (4,), (4,), "did you mean|known are 'tp'"),
    ],
)
def test_refused(text: str, reference: tuple, implementation: tuple, message: str) -> None:
    with pytest.raises(RelationError) as error:
        statement(text, reference, implementation)
    assert any(m in str(error.value) for m in message.split("|"))
    assert str(error.value).startswith("c.yaml:3: ")


def test_an_annotation_settles_an_open_size() -> None:
    assert placed("(a=2 b) ~ (a b)", (6,), (6,)) == {"a": (2, (0, 3), (0, 3), None), "b": (3, (0, 1), (0, 1), None)}


def test_kinds_must_agree() -> None:
    s, d = TensorSpec("ids", (4,), "int64"), TensorSpec("w", (4,), "float32")
    with pytest.raises(RelationError, match=r"int64.*float32"):
        alignment_statement("a ~ a", s, d, TP2)


def test_pieces() -> None:
    assert parse_piece("w").cuts == ()
    piece = parse_piece("model.layers.0.qkv.weight[0:1024, :]")
    assert (piece.name, piece.cuts) == ("model.layers.0.qkv.weight", ((0, 1024), (None, None)))
    assert make_piece("w", piece.cuts, (3072, 8)).cuts == ((0, 0, 1024),)
    assert make_piece("w", parse_piece("w[:, 2:]").cuts, (4, 8)).cuts == ((1, 2, 8),)
    assert make_piece("w", ((0, 4),), (4, 8)).cuts == ()


@pytest.mark.parametrize("text", ["w[0]", "w[0:4:2]", "w[-1:]", "w[0:4", "", "w[a:b]"])
def test_piece_texts_refused(text: str) -> None:
    with pytest.raises(RelationError):
        parse_piece(text)


@pytest.mark.parametrize("cuts", [((0, 9),), ((3, 3),), ((0, 1), (0, 1), (0, 1))])
def test_pieces_outside_the_tensor(cuts: tuple) -> None:
    with pytest.raises(RelationError):
        make_piece("w", cuts, (8, 2))


def test_a_piece_has_its_own_shape() -> None:
    found = alignment_statement(
        "(tp o) i ~ o i", TensorSpec("q", (4, 3)), TensorSpec("qkv", (6, 3)), TP2, implementation_cuts=((0, 2),)
    )
    assert str(found.implementation) == "qkv[0:2]"
    assert [p.size for p in found.axes if p.name == "o"] == [2]


def test_dtensor_terms() -> None:
    mesh = Mesh({"dp": 2, "tp": 4})
    assert placements_text({"tp": "Replicate"}, (8, 4), mesh) == "a b ~ a b"
    assert placements_text({"tp": "Shard(0)"}, (8, 4), mesh) == "(tp a) b ~ a b"
    assert placements_text({"tp": "Shard(dim=-1)", "dp": "S(0)"}, (8, 4), mesh) == "(dp a) (tp b) ~ a b"
    assert placements_text({"tp": "Shard(0)", "dp": "Shard(0)"}, (8, 4), mesh) == "(dp tp a) b ~ a b"


@pytest.mark.parametrize(
    ("terms", "message"),
    [
        ({"tp": "Partial"}, "partial sum over tp"),
        ({"tp": "Partial(sum)"}, "partial sum over tp"),
        ({"pp": "Replicate"}, "no mesh axis"),
        ({"tp": "Shard(2)"}, "no such dimension"),
        ({"tp": "Shrad(0)"}, "expected Replicate, Shard"),
        ({"tp": "_StridedShard(0, sf=2)"}, "expected Replicate, Shard"),
    ],
)
def test_dtensor_terms_refused(terms: dict[str, str], message: str) -> None:
    with pytest.raises(RelationError, match=message):
        placements_text(terms, (8, 4), TP2)


def test_canonical_names() -> None:
    assert canonical_text("b s (tp h) ~ s b h", TP2) == "a b (tp c) ~ b a c"


@st.composite
def alignments(draw: st.DrawFn) -> tuple[str, tuple[int, ...], tuple[int, ...], Mesh]:
    """A random alignment whose names all have sizes, with the shapes that it gives."""
    names = draw(st.lists(st.sampled_from("abcdef"), unique=True, min_size=1, max_size=4))
    sizes = {n: draw(st.integers(2, 4)) for n in names}
    mesh = Mesh({"tp": draw(st.integers(2, 3))})
    left = draw(st.permutations([*names, "tp"]))
    right = draw(st.permutations(names))

    def side(order: list[str]) -> tuple[str, tuple[int, ...]]:
        parts, shape, i = [], [], 0
        while i < len(order):
            take = draw(st.integers(1, len(order) - i))
            group = order[i : i + take]
            parts.append(f"({' '.join(f'{n}={sizes[n]}' if n in sizes else n for n in group)})")
            shape.append(int(np.prod([sizes.get(n, mesh.sizes[0]) for n in group])))
            i += take
        return " ".join(parts), tuple(shape)

    (a, reference), (b, implementation) = side(left), side(right)
    return f"{a} ~ {b}", reference, implementation, mesh


@settings(max_examples=60, deadline=None)
@given(alignments())
def test_every_element_has_one_place_and_the_printed_form_says_the_same(case: tuple) -> None:
    text, reference, implementation, mesh = case
    whole = np.arange(int(np.prod(reference))).reshape(reference)
    found = statement(text, reference, implementation, mesh)
    held = [local(whole, found, mesh, r, implementation) for r in range(mesh.ranks)]
    assert sorted(np.concatenate([h.ravel() for h in held])) == list(range(whole.size))
    printed = describe(found.axes, mesh, len(reference), len(implementation))
    sizes = {p.name: p.size for p in found.axes}
    for name, size in sizes.items():  # the shapes alone need not determine the sizes
        if name != "tp":
            printed = printed.replace(name, f"{name}={size}", 1)
    again = statement(printed, reference, implementation, mesh)
    for r in range(mesh.ranks):
        assert (local(whole, again, mesh, r, implementation) == held[r]).all()
