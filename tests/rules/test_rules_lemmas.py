"""Lemmas of the literature that are wrong as stated: nothing of the kind is derived."""

from __future__ import annotations

from dataclasses import replace

import pytest

from emerge.graph.model import TensorType
from emerge.relate.derive import derive
from emerge.relate.statement import Piece
from emerge.rules.build import Build
from emerge.rules.examine import examine
from emerge.rules.pair import placed


def proved(b: Build, ref: object, imp: object, dims: tuple[str | None, ...]) -> bool:
    """Is the implementation value proved to be the reference's, sharded as told? All derived facts must be true."""
    pair = b.finish()
    found = examine(pair)
    assert not found.failed
    shape = b.reference.shape(ref)
    claim = replace(placed("", shape, dims, pair.mesh), reference=Piece(ref.name), implementation=Piece(imp.name))
    return bool(derive(pair.problem([claim]), engine="embedded").proved())


@pytest.mark.parametrize(("beta", "expected"), [(1.0, False), (0.0, True)])
def test_baddbmm_with_beta_is_not_bmm(beta: float, expected: bool) -> None:
    b = Build(1, {"tp": 2})
    for n in ("a", "i", "k", "j"):
        b.dim(n)
    c, x, y = b.input(["a", "i", "j"]), b.input(["a", "i", "k"]), b.input(["a", "k", "j"])
    ref = b.reference.op("baddbmm", c.ref, x.ref, y.ref, beta=beta, alpha=1.0)
    assert proved(b, ref, b.imp.op("bmm", x.imp, y.imp), (None,) * 3) is expected


@pytest.mark.parametrize("order", [[0, 1, 2], [1, 0, 2], [0, 0, 0]])
def test_writing_every_row_is_not_the_value(order: list[int]) -> None:
    b = Build(1, {"tp": 2})
    b.dim("t"), b.dim("h")
    b.sizes["t"] = 3
    x, v = b.input(["t", "h"]), b.input(["t", "h"])
    index = b.input(["t"], dtype="int64", high=3, keep=False)
    ref = b.reference.op("index_put", x.ref, [index.ref], v.ref)
    assert not proved(b, ref, b.imp.op("mul.Tensor", v.imp, 1.0), (None, None))
    del order


@pytest.mark.parametrize("shift", [0, 1])
def test_look_up_in_a_shard_needs_its_own_offset(shift: int) -> None:
    b = Build(1, {"tp": 2})
    b.dim("t"), b.dim("v", ["tp"]), b.dim("h")
    ids = b.input(["t"], dtype="int64", high=b.sizes["v"], keep=False)
    table = b.input(["v", "h"], ["tp", None], keep=False)
    n = b.sizes["v"] // 2
    low = b.per_rank(lambda r: r * (n - shift))
    high = b.per_rank(lambda r: r * (n - shift) + n)
    outside = b.imp.op("bitwise_or.Tensor", b.imp.op("lt.Scalar", ids.imp, low), b.imp.op("ge.Scalar", ids.imp, high))
    index = b.imp.op("masked_fill.Scalar", b.imp.op("sub.Tensor", ids.imp, low), outside, 0)
    part = b.imp.op(
        "masked_fill.Scalar", b.imp.op("embedding", table.imp, index), b.imp.op("unsqueeze", outside, -1), 0.0
    )
    ref = b.reference.op("embedding", table.ref, ids.ref)
    assert proved(b, ref, b.imp.all_reduce(part, "tp"), (None, None)) is (shift == 0)


def test_reshape_of_a_sharded_inner_dimension() -> None:
    """[2, 4] sharded on dimension 1, reshaped to [4, 2] on each rank, is not [4, 2] sharded on dimension 0."""
    b = Build(1, {"tp": 2})
    b.sizes.update({"a": 2, "b": 4})
    x = b.input(["a", "b"], [None, "tp"])
    ref = b.reference.op("reshape", x.ref, [4, 2])
    assert not proved(b, ref, b.imp.op("reshape", x.imp, [2, 2]), ("tp", None))


@pytest.mark.parametrize("apart", [True, False])
def test_gate_and_up_must_be_sharded_apart(apart: bool) -> None:
    b = Build(1, {"tp": 2})
    b.dim("t"), b.dim("f", ["tp"])
    b.sizes["two"], b.sizes["twof"] = 2, 2 * b.sizes["f"]
    t, f = b.shape(["t", "f"])
    if apart:
        g = b.input(["t", "two", "f"], [None, None, "tp"])
    else:
        g = b.input(["t", "twof"], [None, "tp"])
    out = []
    for w, v, n in ((b.reference, g.ref, f), (b.imp, g.imp, f // 2)):
        flat = w.op("reshape", v, [t, 2 * n])
        node = w.op("auto_functionalized", "_C.silu_and_mul.default", elements={1: TensorType("float64", (t, n))},
                    out=w.op("empty_like", w.op("slice.Tensor", flat, 1, 0, n)), input=flat)  # fmt: skip
        out.append(w.item(node, 1))
    assert proved(b, out[0], out[1], (None, "tp")) is apart


def test_index_coefficients_do_not_wrap() -> None:
    b = Build(1, {"tp": 2})
    b.dim("s")
    ids = b.input(["s"], dtype="int64", high=40)
    for w, x in ((b.reference, ids.ref), (b.imp, ids.imp)):
        w.op("lt.Scalar", w.op("mul.Tensor", w.op("mul.Tensor", x, 65536), 65536), 7)
    assert not examine(b.finish()).failed
