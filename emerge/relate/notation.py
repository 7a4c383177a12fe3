"""The alignment notation: ``"b s (tp h) e ~ b s h e"``, left the reference, right the local implementation tensor.

A side is one entry per dimension: a name, ``1``, or a row-major product of names in parentheses, outermost first. Names
of mesh axes stand on the left only and say which part lies on which rank; over a mesh axis that is not written the
tensor is replicated.
Every other name stands once on each side. Sizes are solved from the shapes; what they leave open is written ``h=8``.
``tensor[0:1024]`` and ``tensor[:, 0:3]`` name a box of a tensor. ``+ partial(tp)`` says that values add up over ``tp``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from math import prod
from typing import NoReturn

from emerge.facts.mesh import Block, Mesh
from emerge.graph.model import DTYPES, Shape
from emerge.relate.statement import AxisPlacement, Piece, Statement
from emerge.util.errors import RelationError

REDUCTIONS = ("sum", "max", "min", "prod")

_TOKEN = re.compile(r"\s*(?:(?P<name>[^\W\d]\w*)|(?P<number>\d+)|(?P<mark>[()=~+,;]))")
_PIECE = re.compile(r"\s*(?P<name>[^\[\]\s](?:[^\[\]]*[^\[\]\s])?)\s*(?:\[(?P<cuts>[^\[\]]*)\])?\s*")
_CUT = re.compile(r"\s*(\d*)\s*:\s*(\d*)\s*")


@dataclass(frozen=True)
class Term:
    """A named axis, with its size where it was written (``h=8``)."""

    name: str
    size: int | None = None


Dimension = tuple[Term, ...]


@dataclass(frozen=True)
class Alignment:
    """A parsed alignment.

    Attributes:
        left, right: dimensions as products of names, outermost first; ``()`` is a dimension of size 1.
        partial: mesh axes over which values combine with ``reduction``.
        text: the alignment with single spaces.
    """

    left: tuple[Dimension, ...]
    right: tuple[Dimension, ...]
    partial: tuple[str, ...] = ()
    reduction: str = "sum"
    text: str = ""


@dataclass(frozen=True)
class TensorSpec:
    """A tensor that a statement may name: its name in the family graph, shape and dtype."""

    name: str
    shape: Shape
    dtype: str = ""


def closest(name: str, known: Iterable[str]) -> str:
    """A tail for messages: the known names nearest to ``name``."""
    names = sorted(set(known))
    near = get_close_matches(name, names, n=3, cutoff=0.6)
    if near:
        return f"did you mean {' or '.join(repr(n) for n in near)}?"
    return (
        f"known are {', '.join(repr(n) for n in names[:8])}{', ..' if len(names) > 8 else ''}"
        if names
        else "there are none"
    )


# ---- parsing --------------------------------------------------------------------------------------------------------


def parse_alignment(text: str, place: str = "") -> Alignment:
    """Parses an alignment; names are not checked against a mesh or shapes yet.

    Raises:
        RelationError: the text is not an alignment.
    """
    return _Parser(text, place).alignment()


class _Parser:
    def __init__(self, text: str, place: str) -> None:
        self.text, self.place = " ".join(text.split()), place
        self.tokens: list[tuple[str, str]] = []
        at = 0
        while at < len(self.text):
            found = _TOKEN.match(self.text, at)
            if found is None:
                self.fail(f"character {self.text[at:].strip()[0]!r} has no meaning; use names, 1, parentheses, = and ~")
            at = found.end()
            kind = found.lastgroup or ""
            self.tokens.append((kind, found.group(kind)))
        self.at = 0

    def fail(self, what: str) -> NoReturn:
        raise RelationError(f"in the alignment {self.text!r}: {what}", self.place)

    def peek(self) -> tuple[str, str]:
        return self.tokens[self.at] if self.at < len(self.tokens) else ("end", "")

    def take(self, mark: str) -> bool:
        if self.peek() == ("mark", mark):
            self.at += 1
            return True
        return False

    def alignment(self) -> Alignment:
        left = self.side()
        if not self.take("~"):
            found = self.peek()[1] or "the end"
            self.fail(f"expected '~' between the reference and the implementation, found {found!r}")
        right = self.side()
        partial, reduction = self.partial() if self.take("+") else ((), "sum")
        if self.peek()[0] != "end":
            self.fail(f"expected its end, found {self.peek()[1]!r}")
        return Alignment(left, right, partial, reduction, self.text)

    def side(self) -> tuple[Dimension, ...]:
        dims: list[Dimension] = []
        while True:
            kind, value = self.peek()
            if kind in ("name", "number"):
                dims.append(self.term())
            elif self.take("("):
                terms: list[Term] = []
                while not self.take(")"):
                    if self.peek()[0] not in ("name", "number"):
                        self.fail(f"expected a name or ')' inside parentheses, found {self.peek()[1] or 'the end'!r}")
                    terms.extend(self.term())
                dims.append(tuple(terms))
            elif (kind, value) in (("mark", "~"), ("mark", "+"), ("end", "")):
                return tuple(dims)
            else:
                self.fail(f"{value!r} is out of place")

    def term(self) -> Dimension:
        kind, value = self.peek()
        self.at += 1
        if kind == "number":
            if value != "1":
                self.fail(f"{value} has no name; only 1 may stand alone, write e.g. h={value}")
            return ()
        if not self.take("="):
            return (Term(value),)
        kind, size = self.peek()
        if kind != "number" or int(size) < 1:
            self.fail(f"expected a size >= 1 after '{value}=', found {size or 'the end'!r}")
        self.at += 1
        return (Term(value, int(size)),)

    def partial(self) -> tuple[tuple[str, ...], str]:
        if self.peek() != ("name", "partial"):
            self.fail(f"expected 'partial(..)' after '+', found {self.peek()[1] or 'the end'!r}")
        self.at += 1
        names: list[str] = []
        reduction = "sum"
        if not self.take("("):
            self.fail("expected mesh axes after 'partial', e.g. partial(tp)")
        while not self.take(")"):
            kind, value = self.peek()
            self.at += 1
            if kind == "name":
                names.append(value)
                self.take(",")
            elif value == ";" and self.peek()[1] in REDUCTIONS:
                reduction = self.peek()[1]
                self.at += 1
            else:
                self.fail(f"expected mesh axes in partial(..), found {value or 'the end'!r}")
        if not names:
            self.fail("partial() names no mesh axis")
        return tuple(names), reduction


@dataclass(frozen=True)
class PieceText:
    """A tensor name as written, with the box behind it: (start, stop) per dimension, None where left open."""

    name: str
    cuts: tuple[tuple[int | None, int | None], ...] = ()


def parse_piece(text: str, place: str = "") -> PieceText:
    """Parses ``name``, ``name[0:1024]`` or ``name[:, 0:3]``.

    Raises:
        RelationError: it is none of these.
    """
    found = _PIECE.fullmatch(text)
    if found is None:
        raise RelationError(f"expected a tensor name such as 'w' or 'w[0:1024]', found {text!r}; correct it", place)
    if found["cuts"] is None:
        return PieceText(found["name"])
    cuts = []
    for part in found["cuts"].split(","):
        cut = _CUT.fullmatch(part)
        if cut is None:
            raise RelationError(
                f"expected start:stop per dimension in {text!r}, found {part.strip()!r}; indices count from 0, "
                "without steps",
                place,
            )
        cuts.append((int(cut[1]) if cut[1] else None, int(cut[2]) if cut[2] else None))
    return PieceText(found["name"], tuple(cuts))


def make_piece(
    name: str, cuts: Sequence[tuple[int | None, int | None]], shape: Shape, place: str = "", padded: bool = False
) -> Piece:
    """The piece of a tensor of ``shape``; ranges that cover a whole dimension are dropped.

    Args:
        padded: a range that starts at 0 may end behind the tensor: the tensor with padding of any value behind it.
    Raises:
        RelationError: too many ranges, or one outside the tensor.
    """
    if len(cuts) > len(shape):
        raise RelationError(f"{name!r} has shape {list(shape)}, but {len(cuts)} ranges are given; drop some", place)
    kept = []
    for dim, (start, stop) in enumerate(cuts):
        size = shape[dim]
        if (start, stop) == (None, None):
            continue
        if not isinstance(size, int):
            raise RelationError(
                f"dimension {dim} of {name!r} has the data-dependent size {size!r} and cannot be cut", place
            )
        low, high = 0 if start is None else start, size if stop is None else stop
        if not (0 <= low < high <= size or (padded and low == 0 and high > size)):
            raise RelationError(
                f"the range {low}:{high} does not lie in dimension {dim} of {name!r}, which has size {size}; "
                "correct it",
                place,
            )
        if (low, high) != (0, size):
            kept.append((dim, low, high))
    return Piece(name, tuple(kept))


def piece_shape(piece: Piece, shape: Shape) -> Shape:
    """Shape of a piece of a tensor of ``shape``."""
    out = list(shape)
    for dim, start, stop in piece.cuts:
        out[dim] = stop - start
    return tuple(out)


# ---- solving --------------------------------------------------------------------------------------------------------


def mesh_block(name: str, mesh: Mesh) -> Block | None:
    """The mesh block behind a name: an axis, or part of one (``tp_2x4``: stride 2, 4 positions); else None."""
    if name in mesh.axes:
        return Block(mesh.dim(mesh.names.index(name)), 1, mesh.axes[name])
    found = re.fullmatch(r"(\w+)_(\d+)x(\d+)", name)
    if found and found[1] in mesh.axes:
        stride, size = int(found[2]), int(found[3])
        if stride > 0 and size > 0 and mesh.axes[found[1]] % (stride * size) == 0:
            return Block(mesh.dim(mesh.names.index(found[1])), stride, size)
    return None


def solve(
    alignment: Alignment, reference: Shape, implementation: Shape, mesh: Mesh, place: str = ""
) -> tuple[AxisPlacement, ...]:
    """Places every axis of an alignment, given the shapes of both sides.

    Raises:
        RelationError: an unknown or doubled axis, a size that is impossible or not determined.
    """
    return _Solver(alignment, mesh, place).run(reference, implementation)


class _Solver:
    def __init__(self, alignment: Alignment, mesh: Mesh, place: str) -> None:
        self.alignment, self.mesh, self.place = alignment, mesh, place
        self.sizes: dict[str, int] = {}
        self.blocks: dict[str, Block] = {}

    def fail(self, what: str) -> NoReturn:
        raise RelationError(f"in the alignment {self.alignment.text!r}: {what}", self.place)

    def mesh_text(self) -> str:
        axes = ", ".join(self.mesh.names)
        return f"mesh axes are: {axes}" if axes else "the mesh has no axes"

    def names(self, side: Sequence[Dimension], which: str) -> list[str]:
        found: list[str] = []
        for dim in side:
            for term in dim:
                if term.name in found:
                    self.fail(f"axis {term.name!r} stands twice on the {which}; use another name")
                found.append(term.name)
        return found

    def check_names(self) -> None:
        left, right = self.names(self.alignment.left, "left"), self.names(self.alignment.right, "right")
        for name in left:
            block = mesh_block(name, self.mesh)
            if block is None:
                continue
            if name in right:
                self.fail(
                    f"{name!r} is a mesh axis and stands on the right; the right side is the local tensor, "
                    "drop it there"
                )
            for other, b in self.blocks.items():
                if b.dim == block.dim and max(b.stride, block.stride) < min(
                    b.stride * b.size, block.stride * block.size
                ):
                    self.fail(f"{other!r} and {name!r} are the same part of the mesh; drop one")
            self.blocks[name] = block
            self.sizes[name] = block.size
        for name in left:
            if name not in right and name not in self.blocks:
                self.fail(
                    f"axis {name!r} is neither on the right nor a mesh axis ({self.mesh_text()}); "
                    f"add it to the right, or write 1 where it has size 1"
                )
        for name in right:
            if name in left:
                continue
            if mesh_block(name, self.mesh) is not None:
                self.fail(f"mesh axis {name!r} stands on the right; write it on the left, where the reference is split")
            self.fail(f"axis {name!r} on the right is not on the left; add it there, or write 1 where it has size 1")

    def run(self, reference: Shape, implementation: Shape) -> tuple[AxisPlacement, ...]:
        self.check_names()
        dims = [
            *self.dimensions(self.alignment.left, reference, "left", "the reference tensor"),
            *self.dimensions(self.alignment.right, implementation, "right", "the implementation tensor"),
        ]
        self.annotate()
        pending = dims
        while True:
            rest = [d for d in pending if not self.settle(*d)]
            if len(rest) == len(pending):
                break
            pending = rest
        if pending:
            terms, size, where = pending[0]
            unknown = [t.name for t in terms if t.name not in self.sizes]
            listed = " and ".join(repr(n) for n in unknown)
            self.fail(
                f"the shapes do not determine the sizes of {listed} ({where} has size {size}); "
                f"write one of them, e.g. '{unknown[0]}=8'"
            )
        placed_left, placed_right = self.placed(self.alignment.left), self.placed(self.alignment.right)
        axes = []
        for name, at in placed_left.items():
            if self.sizes[name] > 1:
                block = self.blocks.get(name)
                axes.append(AxisPlacement(self.sizes[name], at, None if block else placed_right[name], block, name))
        return tuple(axes)

    def annotate(self) -> None:
        for dim in (*self.alignment.left, *self.alignment.right):
            for term in dim:
                if term.size is None:
                    continue
                if self.sizes.setdefault(term.name, term.size) != term.size:
                    self.fail(
                        f"axis {term.name!r} is written with size {term.size}, but has size {self.sizes[term.name]}"
                    )

    def dimensions(
        self, side: Sequence[Dimension], shape: Shape, which: str, whose: str
    ) -> list[tuple[Dimension, int, str]]:
        if len(side) != len(shape):
            self.fail(
                f"the {which} has {len(side)} dimensions and {whose} has shape {list(shape)}; "
                "write one entry per dimension, 1 for a dimension of size 1"
            )
        out = []
        for d, (terms, size) in enumerate(zip(side, shape)):
            where = f"dimension {d} on the {which}"
            if not isinstance(size, int):
                self.fail(f"{where} has the data-dependent size {size!r}; relations need fixed sizes")
            out.append((terms, size, where))
        return out

    def settle(self, terms: Dimension, size: int, where: str) -> bool:
        """Checks a dimension, or solves its one open name; False when it has to wait."""
        unknown = [t.name for t in terms if t.name not in self.sizes]
        known = prod(self.sizes[t.name] for t in terms if t.name in self.sizes)
        if len(unknown) > 1:
            return False
        shown = " * ".join(f"{t.name}={self.sizes.get(t.name, '?')}" for t in terms) or "1"
        if unknown:
            if size % known:
                self.fail(
                    f"{where} has size {size}, which {shown} does not divide into whole parts; correct the relation"
                )
            self.sizes[unknown[0]] = size // known
        elif known != size:
            self.fail(f"{where} has size {size}, but {shown} gives {known}; correct the relation")
        return True

    def placed(self, side: Sequence[Dimension]) -> dict[str, tuple[int, int]]:
        out: dict[str, tuple[int, int]] = {}
        for d, terms in enumerate(side):
            stride = 1
            for term in reversed(terms):
                out[term.name] = (d, stride)
                stride *= self.sizes[term.name]
        return {t.name: out[t.name] for dim in side for t in dim}


# ---- statements -----------------------------------------------------------------------------------------------------


def alignment_statement(
    text: str,
    reference: TensorSpec,
    implementation: TensorSpec,
    mesh: Mesh,
    *,
    reference_cuts: Sequence[tuple[int | None, int | None]] = (),
    implementation_cuts: Sequence[tuple[int | None, int | None]] = (),
    origin: str = "given",
    place: str = "",
) -> Statement:
    """The statement behind a written alignment of two tensors, or boxes of them.

    Raises:
        RelationError: the text is malformed, or impossible for these tensors; partial sums, which are not given
            inputs and not yet a claim this version decides.
    """
    alignment = parse_alignment(text, place)
    s = make_piece(reference.name, reference_cuts, reference.shape, place, padded=True)
    d = make_piece(implementation.name, implementation_cuts, implementation.shape, place)
    check_kinds(reference, implementation, place)
    axes = solve(alignment, piece_shape(s, reference.shape), piece_shape(d, implementation.shape), mesh, place)
    if alignment.partial:
        refuse_partial(alignment.partial, mesh, place)
    return Statement(s, d, axes, origin, alignment.text, place)


def check_kinds(reference: TensorSpec, implementation: TensorSpec, place: str) -> None:
    """Floating types relate to floating types, integers and booleans to their like.

    Raises:
        RelationError: they do not.
    """
    kinds = [DTYPES.get(t.dtype, ("", 0))[0] for t in (reference, implementation)]
    if all(kinds) and kinds[0] != kinds[1]:
        raise RelationError(
            f"{reference.name!r} is {reference.dtype} and {implementation.name!r} is {implementation.dtype}; "
            "tensors of these kinds cannot be equal, correct the relation",
            place,
        )


def refuse_partial(axes: Iterable[str], mesh: Mesh, place: str) -> NoReturn:
    """A partial sum leaves the single values open, so it cannot be given, and no claim of this version asks for one."""
    for axis in axes:
        if axis not in mesh.axes:
            raise RelationError(f"partial({axis}) names no mesh axis; {closest(axis, mesh.axes)}", place)
    raise RelationError(
        f"a partial sum over {', '.join(axes)} leaves the value on each rank open; relate the complete tensor "
        "(this version neither takes nor claims partial tensors)",
        place,
    )


# ---- DTensor terms --------------------------------------------------------------------------------------------------

_SHARD = re.compile(r"(?:S|Shard)\(\s*(?:dim\s*=\s*)?(-?\d+)\s*\)")
_REPLICATE = re.compile(r"R|Replicate(?:\(\))?")
_PARTIAL = re.compile(r"P|P\(.*\)|Partial(?:\(.*\))?")


def placements_text(placements: Mapping[str, str], reference: Shape, mesh: Mesh, place: str = "") -> str:
    """DTensor placements as an alignment: ``{"tp": "Shard(0)"}`` of a matrix is ``"(tp a) b ~ a b"``.

    Mesh axes that shard one dimension split it in the order of the mesh, the first one outermost; axes not named
    are replicated.

    Raises:
        RelationError: an unknown mesh axis or placement, a dimension that does not exist, or ``Partial``.
    """
    sharded: dict[int, list[str]] = {}
    for axis in placements:
        if axis not in mesh.axes:
            raise RelationError(f"placements name {axis!r}, which is no mesh axis; {closest(axis, mesh.axes)}", place)
    for axis in mesh.names:
        placement = str(placements.get(axis, "Replicate")).strip()
        shard = _SHARD.fullmatch(placement)
        if shard:
            dim = int(shard[1])
            if not -len(reference) <= dim < len(reference):
                raise RelationError(
                    f"{placement} of {axis!r} has no such dimension in shape {list(reference)}; correct it", place
                )
            sharded.setdefault(dim % len(reference), []).append(axis)
        elif _PARTIAL.fullmatch(placement):
            refuse_partial([axis], mesh, place)
        elif not _REPLICATE.fullmatch(placement):
            raise RelationError(
                f"expected Replicate, Shard(dim) or Partial for mesh axis {axis!r}, found {placement!r}; correct it",
                place,
            )
    return blocks_text(len(reference), sharded, mesh)


def axis_letters(mesh: Mesh) -> Iterable[str]:
    """Names for tensor axes that do not collide with the mesh: a, b, .., z, a1, b1, .."""
    number = 0
    while True:
        for letter in "abcdefghijklmnopqrstuvwxyz":
            name = f"{letter}{number or ''}"
            if name not in mesh.axes:
                yield name
        number += 1


def blocks_text(rank: int, sharded: Mapping[int, Sequence[str]], mesh: Mesh) -> str:
    """Contiguous blocks: dimension -> mesh axes that split it, outermost first; everything else in place."""
    letters = iter(axis_letters(mesh))
    names = [next(letters) for _ in range(rank)]
    left = [f"({' '.join(sharded[d])} {n})" if sharded.get(d) else n for d, n in enumerate(names)]
    return f"{' '.join(left)} ~ {' '.join(names)}".strip()


def canonical_text(text: str, mesh: Mesh, place: str = "") -> str:
    """An alignment with its tensor axes renamed a, b, .. in the order of the left side, as derived ones are printed.

    Raises:
        RelationError: the text is no alignment.
    """
    alignment = parse_alignment(text, place)
    letters = iter(axis_letters(mesh))
    names: dict[str, str] = {}

    def written(side: Sequence[Dimension]) -> str:
        parts = []
        for dim in side:
            for term in dim:
                if term.name not in names:
                    names[term.name] = term.name if mesh_block(term.name, mesh) is not None else next(letters)
            shown = [names[t.name] + (f"={t.size}" if t.size is not None else "") for t in dim]
            parts.append("1" if not shown else shown[0] if len(shown) == 1 else f"({' '.join(shown)})")
        return " ".join(parts)

    return f"{written(alignment.left)} ~ {written(alignment.right)}"
