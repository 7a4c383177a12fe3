"""How the lowering spells the kinds of bodies that the tables of ``datalog/signatures`` speak about, and their laws.

``linear_in``, ``linear_all``, ``monotone_in``, ``extremum_of`` and ``commutative`` are claims about a kind whatever
its attributes: each spelling of the kind is written as a graph of one operator, lowered (to see
that it is of the kind) and executed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from emerge.facts.base import REFERENCE, FactBase
from emerge.facts.families import zip_families
from emerge.facts.lower import Lowering, Tensor
from emerge.facts.mesh import Mesh
from emerge.graph.model import Graph, Ref
from emerge.rules.writer import Unwritable, Writer
from emerge.util.errors import EmergeError

Shapes = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Spelling:
    """One operator call: types and shapes of its operands and how it is written.

    Types are ``float64``, ``int64``, ``bool``, ``index`` (positions in dimension 0 of the first operand) and
    ``offsets`` (ends of groups of its rows).
    """

    name: str
    dtypes: tuple[str, ...]
    shapes: Callable[[int, int, int], Shapes]
    write: Callable[[Writer, list[Ref]], Ref]


def _same(count: int) -> Callable[[int, int, int], Shapes]:
    return lambda a, b, c: ((a, b),) * count


def _call(op: str, *rest: Any, **kwargs: Any) -> Callable[[Writer, list[Ref]], Ref]:
    return lambda w, x: w.op(op, *x, *rest, **kwargs)


def _plain(op: str, count: int, *rest: Any, dtype: str = "float64", **kwargs: Any) -> Spelling:
    text = ",".join([*map(str, rest), *(f"{k}={v}" for k, v in kwargs.items())])
    return Spelling(f"{op}({text}) of {dtype}", (dtype,) * count, _same(count), _call(op, *rest, **kwargs))


def _spellings() -> Iterator[Spelling]:
    for dtype in ("float64", "int64"):
        for alpha in (1, 2, -3):
            yield _plain("add.Tensor", 2, dtype=dtype, alpha=alpha)
            yield _plain("sub.Tensor", 2, dtype=dtype, alpha=alpha)
        yield _plain("mul.Tensor", 2, dtype=dtype)
        yield _plain("neg", 1, dtype=dtype)
        yield _plain("sum.dim_IntList", 1, [1], dtype=dtype)
        yield _plain("sum.dim_IntList", 1, [0, 1], True, dtype=dtype)
        yield _plain("cumsum", 1, 1, dtype=dtype)
        yield _plain("amax", 1, [1], dtype=dtype)
        yield _plain("amin", 1, [1], dtype=dtype)
        for op in ("maximum", "minimum", "eq.Tensor", "ne.Tensor"):
            yield _plain(op, 2, dtype=dtype)
        yield _plain("slice.Tensor", 1, 1, 1, 3, dtype=dtype)
        yield _plain("slice.Tensor", 1, 1, 0, 4, 2, dtype=dtype)
        yield _plain("tril", 1, dtype=dtype)
        yield _plain("flip", 1, [1], dtype=dtype)
        yield _plain("roll", 1, [1], [1], dtype=dtype)
        yield _plain("constant_pad_nd", 1, [1, 2], 0.0, dtype=dtype)
        yield Spelling(f"cat of {dtype}", (dtype,) * 2, _same(2), lambda w, x: w.op("cat", x, 1))
        yield Spelling(
            f"uneven cat of {dtype}", (dtype,) * 2, lambda a, b, c: ((a, b), (a, c)), lambda w, x: w.op("cat", x, 1)
        )
        yield Spelling(
            f"reshape of {dtype}", (dtype,), lambda a, b, c: ((6, 10),), lambda w, x: w.op("reshape", x[0], [4, 15])
        )
        yield Spelling(f"zeros under a mask of {dtype}", (dtype, "bool"), _same(2), _call("masked_fill.Scalar", 0))
    for op in ("bitwise_and.Tensor", "bitwise_or.Tensor", "logical_and", "logical_or", "add.Tensor", "mul.Tensor",
               "eq.Tensor", "ne.Tensor", "maximum"):  # fmt: skip
        yield _plain(op, 2, dtype="bool")
    for op in ("exp", "log", "tanh", "sigmoid", "relu", "sqrt", "silu", "abs", "square", "rsqrt", "reciprocal", "sin",
               "cos", "erf", "floor", "softplus", "log1p", "expm1", "exp2", "log2", "gelu", "elu", "atan", "sinh",
               "cosh", "sign", "ceil", "round", "trunc", "mish", "hardtanh", "hardswish", "relu6", "tan"):  # fmt: skip
        yield _plain(op, 1)
    yield _plain("leaky_relu", 1, 0.1)
    yield _plain("leaky_relu", 1, -0.5)
    yield _plain("clamp", 1, -0.5, 0.5)
    yield _plain("pow.Tensor_Scalar", 1, 3)
    yield _plain("mul.Tensor", 1, 1.7)
    yield _plain("mul.Tensor", 1, -2.5)
    yield _plain("add.Tensor", 1, 0.7)
    yield _plain("div.Tensor", 2)
    yield _plain("pow.Tensor_Tensor", 2)
    yield _plain("prod.dim_int", 1, 1)
    yield _plain("cumprod", 1, 1)
    yield _plain("_softmax", 1, 1, False)
    yield Spelling("where(mask, 0, x)", ("float64", "bool"), _same(2),
                   lambda w, x: w.op("where.self", x[1], w.op("zeros_like", x[0]), x[0]))  # fmt: skip
    yield Spelling("where", ("bool", "float64", "float64"), _same(3), _call("where.self"))
    yield Spelling("embedding", ("float64", "index"), lambda a, b, c: ((a, b), (c,)), _call("embedding"))
    yield Spelling("grouped_mm", ("float64", "float64", "offsets"), lambda a, b, c: ((a, b), (3, b, c), (3,)),
                   lambda w, x: w.op("_grouped_mm", x[0], x[1], x[2]))  # fmt: skip
    yield Spelling("mm", ("float64",) * 2, lambda a, b, c: ((a, b), (b, c)), _call("mm"))
    yield Spelling("matmul with a vector", ("float64",) * 2, lambda a, b, c: ((a, b), (b,)), _call("matmul"))
    yield Spelling("bmm", ("float64",) * 2, lambda a, b, c: ((2, a, b), (2, b, c)), _call("bmm"))


_STORED = {"index": "int64", "offsets": "int32"}


@dataclass
class OneOp:
    """A spelling as a graph.

    Attributes:
        kind: of the operator that makes the result. order: operand of the spelling at each operand position of that
            operator; None where it is made from the operands (the one-hot form of an index).
    """

    spelling: Spelling
    kind: str
    order: tuple[int | None, ...]
    graph: Graph

    def run(self, operands: list[Any]) -> Any:
        """The result on operands in the order of the spelling."""
        from emerge.execute.lockstep import run_sequential

        name = self.graph.outputs[0]
        assert name is not None
        return run_sequential(self.graph, {f"x{k}": v for k, v in enumerate(operands)})[name]


def one_op(spelling: Spelling, sizes: tuple[int, int, int]) -> OneOp | None:
    """The graph of a spelling, None when it cannot be written or its result has no operator."""
    w = Writer("one")
    shapes = spelling.shapes(*sizes)
    try:
        refs = [w.input(f"x{k}", s, _STORED.get(t, t)) for k, (s, t) in enumerate(zip(shapes, spelling.dtypes))]
        out = spelling.write(w, refs)
    except Unwritable:
        return None
    graph = w.finish(out)[0]
    low = Lowering(FactBase(), REFERENCE, Mesh({}))
    try:
        low.lower(zip_families([graph]))
    except EmergeError:
        return None
    result = low.tensors.get(out.name)
    while isinstance(result, Tensor) and low.made_by[result.id].kind == "layout":
        result = low.made_by[result.id].args[0]
    if not isinstance(result, Tensor):
        return None
    made = low.made_by[result.id]
    inputs = {low.input_ids[r.name]: k for k, r in enumerate(refs)}
    return OneOp(spelling, made.kind, tuple(inputs.get(a.id) for a in made.args), graph)


def spellings_of(kind: str) -> list[Spelling]:
    """The spellings whose lowered operator is of a kind."""
    found = []
    for s in _spellings():
        made = one_op(s, (3, 4, 5))
        if made is not None and made.kind == kind:
            found.append(s)
    return found


@dataclass(frozen=True)
class Finding:
    """Result of testing one claim: how many spellings and samples, and the counterexample if there is one."""

    claim: str
    spellings: int
    samples: int
    counterexample: str = ""


def _draw(dtype: str, shapes: Shapes, k: int, generator: Any) -> Any:
    import torch

    shape = shapes[k]
    if dtype == "bool":
        return torch.rand(shape, generator=generator) < 0.5
    if dtype == "int64":
        return torch.randint(-9, 10, shape, generator=generator)
    if dtype == "index":
        return torch.randint(0, shapes[0][0], shape, generator=generator)
    if dtype == "offsets":
        ends = torch.randint(0, shapes[0][0] + 1, shape, generator=generator).sort().values
        ends[-1] = shapes[0][0]
        return ends.to(torch.int32)
    return torch.randn(shape, generator=generator, dtype=torch.float64) * 2


def check_kind(relation: str, kind: str, second: int | str | None, seed: int, samples: int = 6) -> Finding:
    """Tests ``relation(kind, second)`` on every spelling; ``second`` is a set of operands or a reduction."""
    import torch

    claim = f"{relation}({kind}{'' if second is None else f', {second}'})"
    extrema = (second,) if isinstance(second, str) else ("max", "min")
    count = 0
    found = spellings_of(kind)
    for spelling in found:
        for k in range(samples):
            generator = torch.Generator().manual_seed(seed * 1009 + k)
            sizes = ((3, 4, 5), (2, 5, 3), (5, 4, 7))[k % 3]
            made = one_op(spelling, sizes)
            if made is None:
                continue
            shapes = spelling.shapes(*sizes)
            first, other = ([_draw(t, shapes, i, generator) for i, t in enumerate(spelling.dtypes)] for _ in range(2))
            mask = 1 if relation == "extremum_of" else second if isinstance(second, int) else (1 << len(made.order)) - 1
            held = {j for position, j in enumerate(made.order) if mask >> position & 1}
            if mask >> len(made.order) or None in held:
                continue
            wrong = _violation(relation, made, held, first, other, extrema)
            count += 1
            if wrong:
                return Finding(claim, len(found), count, f"{spelling.name}: {wrong}")
    return Finding(claim, len(found), count)


def _violation(
    relation: str, made: OneOp, held: set[int | None], x: list[Any], y: list[Any], extrema: tuple[str, ...]
) -> str:
    """A counterexample in words, "" when the sample agrees; operands that are not ``held`` keep the values of ``x``."""
    import torch

    other = [b if k in held else a for k, (a, b) in enumerate(zip(x, y))]
    if relation == "commutative":
        if len(x) != 2 or x[0].shape != x[1].shape or x[0].dtype != x[1].dtype:
            return ""
        return _difference("f(x, y) against f(y, x)", made.run(x), made.run(x[::-1]))
    if relation in ("linear_in", "linear_all"):
        if any(x[k].dtype == torch.bool for k in held if k is not None):
            return ""
        total = [a + b if k in held else a for k, (a, b) in enumerate(zip(x, y))]
        return _difference("f(x + y) against f(x) + f(y)", made.run(total), made.run(x) + made.run(other))
    for name in extrema:
        combine = torch.maximum if name == "max" else torch.minimum
        both = [combine(a, b) if k in held else a for k, (a, b) in enumerate(zip(x, y))]
        left, right = made.run(both), combine(made.run(x), made.run(other))
        wrong = _difference(f"f({name}(x, y)) against {name}(f(x), f(y))", left, right)
        if wrong:
            return wrong
    return ""


def _difference(what: str, left: Any, right: Any) -> str:
    from emerge.rules.statements import equal

    outcome = equal(left, right, right)
    return f"{what}: {outcome.detail}" if outcome.holds is False else ""
