"""Small pairs for the tests of refutation: a tensor-parallel MLP and others, from hand-written graphs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from execute_graphs import Builder

from emerge.execute.refute import Refutation, refute
from emerge.facts.families import zip_families
from emerge.facts.mesh import Mesh
from emerge.graph.model import Graph
from emerge.graph.relations import Leaf, RelationEntry
from emerge.relate.derive import Derivation, Problem, derive
from emerge.relate.statement import Piece, Statement, entry_statements

GROUPS = {"0": [[0, 1]], "1": [[0], [1]]}


def problem_of(
    reference: Graph, ranks: list[Graph], inputs: Mapping[str, Any], outputs: Mapping[str, str] | None = None
) -> Problem:
    """A pair on one mesh axis.

    Args:
        inputs: reference input -> ``(implementation input, shard dimension or None)``.
        outputs: reference output -> implementation output (same shape, on every rank); all, by position, when None.
    """
    left, right = zip_families([reference]), zip_families(ranks)
    mesh = Mesh({"tp": len(ranks)} if len(ranks) > 1 else {})
    types = left.types()
    given: list[Statement] = []
    for name, (other, dim) in inputs.items():
        leaves = tuple(Leaf(r, other) for r in range(len(ranks)))
        kind = "replicated" if dim is None else "shard"
        given += entry_statements(RelationEntry(name, kind, leaves, dim), types[name].shape, right, mesh)
    claims = []
    for a, b in zip(left.outputs, right.outputs):
        assert a.name is not None
        assert b.name is not None
        shape = types[a.name].shape
        whole = entry_statements(RelationEntry(a.name, "replicated", (Leaf(0, a.name),)), shape, left, Mesh({}))[0]
        claims.append(Statement(Piece(a.name), Piece(b.name), whole.axes, "given", whole.text))
    return Problem(left, right, mesh, given, claims)


def verdict(problem: Problem, **options: Any) -> tuple[Refutation, Derivation]:
    derivation = derive(problem, engine="embedded")
    return refute(problem, derivation, device="cpu", **options), derivation


def mlp(rows: int, model: int, hidden: int) -> Graph:
    """``relu(x w1) w2 + b``."""
    g = Builder("seq")
    x, w1, w2 = g.input("x", (rows, model)), g.input("w1", (model, hidden)), g.input("w2", (hidden, model))
    b = g.input("b", (model,))
    h = g.add("aten.mm.default", x, w1, shape=(rows, hidden), name="up")
    a = g.add("aten.relu.default", h, shape=(rows, hidden), name="act")
    y = g.add("aten.mm.default", a, w2, shape=(rows, model), name="down")
    return g.done(g.add("aten.add.Tensor", y, b, shape=(rows, model), name="out"))


def mlp_rank(rank: int, rows: int, model: int, hidden: int, *, reduce: str = "0", bias_first: bool = False) -> Graph:
    """Hidden axis sharded over two ranks; ``reduce`` = process group of the all-reduce, "" = none."""
    g = Builder(f"rank{rank}", rank, 2, GROUPS)
    n = hidden // 2
    x, w1, w2 = g.input("x", (rows, model)), g.input("w1", (model, n)), g.input("w2", (n, model))
    b = g.input("b", (model,))
    h = g.add("aten.mm.default", x, w1, shape=(rows, n), name="up")
    a = g.add("aten.relu.default", h, shape=(rows, n), name="act")
    y = g.add("aten.mm.default", a, w2, shape=(rows, model), name="down")
    if bias_first:
        y = g.add("aten.add.Tensor", y, b, shape=(rows, model), name="out")
    if reduce:
        y = all_reduce(g, y, (rows, model), reduce)
    if not bias_first:
        y = g.add("aten.add.Tensor", y, b, shape=(rows, model), name="out")
    return g.done(y)


def all_reduce(g: Builder, source: str, shape: tuple[int, ...], group: str = "0") -> str:
    from execute_graphs import Text

    r = g.add("_c10d_functional.all_reduce.default", source, Text("sum"), Text(group), shape=shape)
    return g.add("_c10d_functional.wait_tensor.default", r, shape=shape)


MLP_INPUTS = {"x": ("x", None), "w1": ("w1", 1), "w2": ("w2", 0), "b": ("b", None)}


def mlp_problem(rows: int = 3, model: int = 5, hidden: int = 8, **rank: Any) -> Problem:
    return problem_of(
        mlp(rows, model, hidden), [mlp_rank(r, rows, model, hidden, **rank) for r in range(2)], MLP_INPUTS
    )
