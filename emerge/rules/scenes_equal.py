"""Scenes in which one value is computed in two ways on one side: equal tensors, told or found by the algebra."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from emerge.graph.model import Ref
from emerge.rules.build import Build, Val
from emerge.rules.scenes import scene
from emerge.rules.writer import Writer

Spelling = Callable[[Writer, Ref, Ref], Ref]
#: Two ways to compute one function of two tensors of one shape.
SPELLINGS: list[tuple[Spelling, Spelling]] = [
    (lambda w, x, y: w.op("sub.Tensor", x, y), lambda w, x, y: w.op("add.Tensor", w.op("neg", y), x)),
    (lambda w, x, y: w.op("mul.Tensor", x, x), lambda w, x, y: w.op("square", x)),
    (lambda w, x, y: w.op("silu", x), lambda w, x, y: w.op("mul.Tensor", w.op("sigmoid", x), x)),
    (
        lambda w, x, y: w.op("maximum", x, y),
        lambda w, x, y: w.op("neg", w.op("minimum", w.op("neg", x), w.op("neg", y))),
    ),
    (
        lambda w, x, y: w.op("mul.Tensor", w.op("add.Tensor", x, y), 3.0),
        lambda w, x, y: w.op("add.Tensor", w.op("mul.Tensor", x, 3.0), w.op("mul.Tensor", y, 3.0)),
    ),
]
#: The same for functions that a partial sum passes.
LINEAR_SPELLINGS: list[tuple[Spelling, Spelling]] = [
    (lambda w, x, y: w.op("mul.Tensor", x, 2.0), lambda w, x, y: w.op("add.Tensor", x, x)),
    (
        lambda w, x, y: w.op("mul.Tensor", w.op("mul.Tensor", x, 6.0), 0.5),
        lambda w, x, y: w.op("sub.Tensor", w.op("mul.Tensor", x, 4.0), x),
    ),
]


def _plain(w: Writer, f: Spelling, x: Ref, y: Ref) -> Ref:
    return f(w, x, y)


def _transposed(w: Writer, f: Spelling, x: Ref, y: Ref) -> Ref:
    """Computed on transposed operands, and transposed back."""
    back = [1, 0, *range(2, len(w.shape(x)))]
    return w.op("permute", f(w, w.op("permute", x, back), w.op("permute", y, back)), back)


def _flat(w: Writer, f: Spelling, x: Ref, y: Ref) -> Ref:
    """Computed on operands whose first two dimensions are merged."""
    shape = list(w.shape(x))
    merged = [shape[0] * shape[1], *shape[2:]]
    return w.op("view", f(w, w.op("view", x, merged), w.op("view", y, merged)), shape)


def _twice(
    b: Build,
    side: int,
    ways: tuple[Spelling, Spelling],
    how: Callable[..., Ref],
    x: tuple[Ref, Ref],
    y: tuple[Ref, Ref],
) -> tuple[Ref, Ref]:
    """Both spellings on the side where they are told to be equal, the second on the other; the first of that side's."""
    results = []
    for s, w in ((1, b.reference), (2, b.imp)):
        second = how(w, ways[1], x[s - 1], y[s - 1])
        if s == side:
            first = ways[0](w, x[s - 1], y[s - 1])
            b.equal.append((s, first.name, second.name))
            results.append(first)
        else:
            results.append(second)
    return results[0], results[1]


@scene("values spelled twice")
def spelled_twice(b: Build) -> None:
    """Sharded operands; the second spelling may work in another layout."""
    axis = b.axis()
    b.dim("t"), b.dim("h", [axis]), b.dim("e")
    names = ("t", "h", "e") if b.rng.random() < 0.5 else ("t", "h")
    dims = tuple(axis if n == "h" and b.rng.random() < 0.7 else None for n in names)
    x, y = b.input(names, dims, keep=False), b.input(names, dims, keep=False)
    for _ in range(2):
        how = b.pick([_plain, _transposed, _flat])
        made = _twice(b, b.pick([1, 2]), b.pick(SPELLINGS), how, (x.ref, x.imp), (y.ref, y.imp))
        last = b.keep(Val(*made, names, dims))
        if b.fault("the operands exchanged"):
            x, y = y, x
    b.map("tanh", last)


@scene("equal values, square")
def spelled_square(b: Build) -> None:
    """Dimensions of one size, so that only their order tells them apart."""
    axis = b.axis()
    n = 2 * b.mesh[axis]
    b.sizes["r"], b.sizes["c"] = n, n
    dims = b.pick([(None, axis), (axis, None), (None, None)])
    x, y = b.input(("r", "c"), dims, keep=False), b.input(("r", "c"), dims, keep=False)
    for side in (1, 2):
        how = b.pick([_plain, _transposed, _transposed])
        made = _twice(b, side, b.pick(SPELLINGS), how, (x.ref, x.imp), (y.ref, y.imp))
        b.keep(Val(*made, ("r", "c"), dims))


@scene("partial sums spelled twice")
def spelled_partial(b: Build) -> None:
    """A partial sum whose multiple is spelled twice, then reduced."""
    axis = b.axis()
    b.dim("t"), b.dim("k", [axis]), b.dim("h")
    x, w = b.input(("t", "k"), (None, axis), keep=False), b.input(("k", "h"), (axis, None), keep=False)
    part = b.both("mm", lambda r: [x.ref if r else x.imp, w.ref if r else w.imp])
    for side in (1, 2):
        how = b.pick([_plain, _transposed])
        made = _twice(b, side, b.pick(LINEAR_SPELLINGS), how, part, part)
        whole = b.imp.all_reduce(made[1], axis, "max" if b.fault("another reduction") else "sum")
        b.keep(Val(made[0], whole, ("t", "h"), (None, None)))


@scene("equal values, broadcast")
def spelled_broadcast(b: Build) -> None:
    """One of the two spellings is expanded, so that its operator lacks an axis."""
    axis = b.axis()
    b.dim("t"), b.dim("h", [axis])
    dims = (None, axis if b.rng.random() < 0.5 else None)
    row = b.input(("h",), dims[1:], keep=False)
    for side in (1, 2):
        first, second = b.pick(SPELLINGS)
        results = []
        for s, w, x, at in ((1, b.reference, row.ref, True), (2, b.imp, row.imp, False)):
            shape = list(b.shape(("t", "h")) if at else b.local(("t", "h"), dims))
            wide = w.op("expand", x, shape)
            after = w.op("expand", second(w, x, x), shape)
            before = first(w, wide, wide)
            if s == side:
                b.equal.append((s, before.name, after.name))
            results.append(b.pick([before, after]))
        b.keep(Val(results[0], results[1], ("t", "h"), dims))


@scene("forms found by the algebra")
def found_by_algebra(b: Build) -> None:
    """A gated rotation written out on one side by halves, on the other over joined tensors."""
    b.algebra = True
    axis = b.axis()
    b.dim("t", [axis] if b.rng.random() < 0.5 else []), b.dim("h")
    b.sizes["d"] = 2 * b.sizes["h"]
    rows = axis if b.sizes["t"] % b.mesh[axis] == 0 and b.rng.random() < 0.5 else None
    x = b.input(("t", "d"), (rows, None), keep=False)
    c, s = (b.input(("t", "h"), (rows, None), keep=False) for _ in range(2))
    wrong = b.fault("the sign of one half")

    def joined(w: Writer, r: bool) -> Ref:
        n = b.sizes["h"]
        at = [v.ref if r else v.imp for v in (x, c, s)]
        cc, ss = (w.op("cat", [t, t], 1) for t in at[1:])
        low, high = w.op("slice.Tensor", at[0], 1, 0, n), w.op("slice.Tensor", at[0], 1, n, 2 * n)
        turned = w.op("cat", [w.op("neg", high), low], 1)
        return w.op("add.Tensor", w.op("mul.Tensor", at[0], cc), w.op("mul.Tensor", turned, ss))

    def halves(w: Writer, r: bool) -> Ref:
        n = b.sizes["h"]
        at = [v.ref if r else v.imp for v in (x, c, s)]
        low, high = w.op("slice.Tensor", at[0], 1, 0, n), w.op("slice.Tensor", at[0], 1, n, 2 * n)
        one = w.op(
            "add.Tensor" if wrong else "sub.Tensor", w.op("mul.Tensor", low, at[1]), w.op("mul.Tensor", high, at[2])
        )
        two = w.op("add.Tensor", w.op("mul.Tensor", high, at[1]), w.op("mul.Tensor", low, at[2]))
        return w.op("cat", [one, two], 1)

    first, second = (joined, halves) if b.rng.random() < 0.5 else (halves, joined)
    b.keep(Val(first(b.reference, True), second(b.imp, False), ("t", "d"), (rows, None)))
    gate: dict[bool, Any] = {True: x.ref, False: x.imp}
    ref = b.reference.op("silu", gate[True])
    imp = b.imp.op(
        "div.Tensor", gate[False], b.imp.op("add.Tensor", b.imp.op("exp", b.imp.op("neg", gate[False])), 1.0)
    )
    b.keep(Val(ref, imp, ("t", "d"), (rows, None)))
