"""Certificates of operators described by data: does the result depend on the operands axis by axis as stated?

A signature is tested on the executable meaning of the operator: the implementation the executor has, or the graph named
by ``operator_definition(Op, "file.json")`` next to the rule file.

- parallel axis: the operator on operands restricted to some positions gives the result at these positions;
- whole axis: permuting the positions of all operands alike permutes the result, or keeps it where it is consumed;
- sum, max axis: splitting the axis and combining the results gives the result;
- ordered axis: nothing beyond being a function of the operands;
- an operand written ``_`` is not read.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

from emerge.execute.aliasing import KERNEL_SCHEMAS, split_op
from emerge.facts.kernels import Signature, _expand
from emerge.graph.model import Graph, Input, Node, Ref, TensorType
from emerge.util.errors import EmergeError, RuleError

#: Values of attributes that a signature does not speak about.
ATTRIBUTES: dict[str, Any] = {"epsilon": 1e-5, "eps": 1e-5, "is_neox": True}
SIZES = (2, 3, 5, 7, 4, 6)


class NotExecutable(Exception):
    """Nothing executes the operator, so there is no certificate."""


def load_definition(op: str, path: Path, place: str) -> Graph:
    """The graph that defines an operator, with the sizes of its inputs and results left open.

    Raises:
        RuleError: the file cannot be read as a graph with one output.
    """
    from emerge.graph.json_io import read_graph

    try:
        graph = read_graph(path)
    except (EmergeError, OSError) as exc:
        raise RuleError(f"the definition of {op} cannot be read: {exc}", place) from None
    if not graph.outputs or None in graph.outputs:
        raise RuleError(f"the definition of {op} in {path.name} has no output", place)
    inputs = [replace(i, shape=tuple(f"s{k}_{d}" for d in range(len(i.shape)))) for k, i in enumerate(graph.inputs)]
    nodes = [replace(n, shape=None, elements={}) if n.op != "get_attr" else n for n in graph.nodes]
    return replace(graph, inputs=inputs, nodes=nodes)


def register_definitions(clauses: Iterable[Any]) -> set[str]:
    """Makes operators with an ``operator_definition`` executable; returns their names.

    Raises:
        RuleError: a definition cannot be read.
    """
    from emerge.execute.lockstep import run_sequential
    from emerge.execute.ops.base import OPS, Call

    names = set()
    for clause in clauses:
        if clause.head.name != "operator_definition" or clause.body:
            continue
        op, file = (getattr(a, "value", "") for a in clause.head.args)
        graph = load_definition(op, Path(clause.pos.file).parent / file, str(clause.pos))

        def run(call: Call, graph: Graph = graph) -> Any:
            named = [i.name for i in graph.inputs]
            values = dict(zip(named, call.args))
            values.update({k: v for k, v in call.kwargs.items() if k in named})
            missing = [n for n in named if n not in values]
            if missing:
                raise call.error(f"its definition also reads {', '.join(missing)}")
            out = run_sequential(graph, values, options=call.options)
            results = tuple(out[o] for o in graph.outputs if o is not None)
            return results if len(results) > 1 or call.node.is_tuple else results[0]

        OPS[op] = run
        names.add(op)
    return names


@dataclass(frozen=True)
class Setup:
    """Sizes of the axes of one call, and its operands' axes written out."""

    signature: Signature
    sizes: Mapping[str, int]
    operands: tuple[tuple[str, tuple[tuple[str, ...], ...] | None], ...]
    result: tuple[tuple[str, ...], ...]


def setup(signature: Signature, base: int, lead: int) -> Setup:
    """Pairwise different sizes; ``lead`` leading dimensions where the signature writes ``...``."""
    operands = tuple((n, None if d is None else _expand(d, lead)) for n, d in signature.operands)
    result = _expand(signature.result, lead)
    axes = list(dict.fromkeys(a for _, d in operands if d is not None for dim in d for a in dim))
    axes += [a for dim in result for a in dim if a not in axes]
    sizes: dict[str, int] = {}
    for k, axis in enumerate(axes):
        given = signature.sizes.get(axis, "")
        sizes[axis] = int(given) if given.isdigit() else SIZES[(base + k) % len(SIZES)] + (4 if k >= len(SIZES) else 0)
        if axis in signature.sizes and not given.isdigit():
            sizes[axis] += sizes[axis] % 2
    return Setup(signature, sizes, operands, result)


def _shape(dims: Iterable[tuple[str, ...]], sizes: Mapping[str, int]) -> tuple[int, ...]:
    return tuple(prod(sizes[a] for a in dim) for dim in dims)


class Runner:
    """Executes one described operator.

    Args:
        signatures: all outputs of the operator; an operand that one output does not read is shaped by another.
    """

    def __init__(self, signatures: list[Signature]) -> None:
        self.signatures = signatures
        self.op = signatures[0].op
        namespace, name, _ = split_op(self.op)
        self.kernel = KERNEL_SCHEMAS.get(f"{namespace}.{name}")

    def unread_shape(self, s: Setup, k: int) -> tuple[int, ...]:
        """Shape of an operand that this output does not read."""
        name = s.operands[k][0]
        lead = sum(1 for dim in s.result if dim[0].startswith("."))
        for other in self.signatures:
            for j, (n, dims) in enumerate(other.operands):
                if dims is not None and (n == name if name else j == k):
                    expanded = _expand(dims, lead)
                    if all(a in s.sizes for dim in expanded for a in dim):
                        return _shape(expanded, s.sizes)
        return _shape(s.result, s.sizes)

    def __call__(self, s: Setup, operands: list[Any], attributes: Mapping[str, Any]) -> Any:
        """One output.

        Raises:
            NotExecutable: the executor does not know the operator.
            EmergeError: it fails on these operands.
        """
        from emerge.execute.lockstep import run_sequential
        from emerge.execute.ops.base import lookup

        if self.kernel is None and lookup(self.op) is None:
            raise NotExecutable(f"nothing executes {self.op}; give operator_definition({self.op!r}, FILE)")
        names = [n or f"x{k}" for k, (n, _) in enumerate(s.operands)]
        inputs = []
        values = {}
        for name, value in zip(names, operands):
            dtype = str(value.dtype).removeprefix("torch.")
            inputs.append(Input(name, dtype, tuple(value.shape)))
            values[name] = value
        rest = {k: v for k, v in attributes.items() if k not in names}
        output = s.signature.output
        kind = TensorType("float64", _shape(s.result, s.sizes))
        if self.kernel is not None:
            kwargs: dict[str, Any] = {n: Ref(n) for n in self.kernel[0] if n in names}
            kwargs.update({n: rest[n] for n in self.kernel[0] if n in rest})
            node = Node("call", "auto_functionalized", [self.op], kwargs, is_tuple=True, elements={output: kind})
        else:
            position: list[Any] = [Ref(n) for n, (given, _) in zip(names, s.operands) if not given]
            named = {n: Ref(n) for n, (given, _) in zip(names, s.operands) if given}
            several = any(x.output != 0 for x in self.signatures)
            node = Node("call", self.op, position, {**named, **rest})
            if several:
                node.is_tuple, node.elements = True, {output: kind}
            else:
                node.dtype, node.shape = kind.dtype, kind.shape
        nodes = [node]
        if node.is_tuple:
            nodes.append(Node("out", "operator.getitem", [Ref("call"), output], {}, kind.dtype, kind.shape))
        graph = Graph("signature", inputs, nodes, [nodes[-1].name])
        return run_sequential(graph, values)[nodes[-1].name]


def _attributes(s: Setup, kernel: Any) -> dict[str, Any]:
    found = {n: ATTRIBUTES[n] for n in (kernel[0] if kernel else ()) if n in ATTRIBUTES}
    found.update({v: s.sizes[a] for a, v in s.signature.sizes.items() if not v.isdigit()})
    return found


def _index_operand(name: str) -> bool:
    return name in ("positions", "index", "indices", "ids", "slot_mapping")


def check_signature(signature: Signature, others: list[Signature], seed: int) -> str:
    """A counterexample to a signature in words, "" when every test agrees.

    Raises:
        NotExecutable: nothing executes the operator at these sizes.
    """
    import torch

    runner = Runner([signature, *[o for o in others if o.output != signature.output]])
    for sample in range(4):
        s = setup(signature, sample, 1 + sample % 2)
        generator = torch.Generator().manual_seed(seed * 7919 + sample)
        operands = _operands(s, runner, generator)
        attributes = _attributes(s, runner.kernel)
        try:
            whole = runner(s, operands, attributes)
        except EmergeError as exc:
            raise NotExecutable(f"{signature.op} cannot be executed: {exc}") from exc
        if tuple(whole.shape) != _shape(s.result, s.sizes):
            return (
                f"the result has shape {list(whole.shape)} where the signature says {list(_shape(s.result, s.sizes))}"
            )
        wrong = _compare(
            whole, runner(s, _scrambled(s, operands, generator), attributes), "an operand said not to be read is read"
        )
        if wrong:
            return wrong
        for axis in s.sizes:
            wrong = _check_axis(runner, s, operands, attributes, whole, axis, generator)
            if wrong:
                return wrong
    return ""


def _operands(s: Setup, runner: Runner, generator: Any) -> list[Any]:
    import torch

    out = []
    tables = [dims for _, dims in s.operands if dims is not None]
    for k, (name, dims) in enumerate(s.operands):
        shape = runner.unread_shape(s, k) if dims is None else _shape(dims, s.sizes)
        if dims is not None and _index_operand(name):
            rows = min(
                (s.sizes[d[0][0]] for d in tables if len(d) == 2 and s.signature.roles.get(d[0][0]) == "o"), default=2
            )
            out.append(torch.randint(0, rows, shape, generator=generator))
        else:
            out.append(torch.randn(shape, generator=generator, dtype=torch.float64))
    return out


def _scrambled(s: Setup, operands: list[Any], generator: Any) -> list[Any]:
    """Operands with those that are not read replaced."""
    import torch

    return [
        torch.randn(v.shape, generator=generator, dtype=v.dtype) if dims is None and v.is_floating_point() else v
        for v, (_, dims) in zip(operands, s.operands)
    ]


def _pick(value: Any, dims: tuple[tuple[str, ...], ...] | None, sizes: Mapping[str, int], axis: str, index: Any) -> Any:
    """``value`` at positions ``index`` of an axis, for every dimension that contains it."""
    if dims is None:
        return value
    flat = [a for dim in dims for a in dim]
    if axis not in flat:
        return value
    spread = value.reshape([sizes[a] for a in flat]).index_select(flat.index(axis), index)
    changed = {**sizes, axis: len(index)}
    return spread.reshape(_shape(dims, changed))


def _check_axis(
    runner: Runner, s: Setup, operands: list[Any], attributes: Mapping[str, Any], whole: Any, axis: str, generator: Any
) -> str:
    import torch

    role = s.signature.roles.get(axis, "p")
    n = s.sizes[axis]
    if role == "o" or (role != "w" and n < 2):
        return ""

    def at(index: Any) -> Any:
        sizes = {**s.sizes, axis: len(index)}
        part = replace(s, sizes=sizes)
        given = [_pick(v, d, s.sizes, axis, index) for v, (_, d) in zip(operands, s.operands)]
        for k, (_, dims) in enumerate(s.operands):
            if dims is None:
                given[k] = torch.randn(runner.unread_shape(part, k), generator=generator, dtype=torch.float64)
        changed = {**attributes, **{v: sizes[a] for a, v in s.signature.sizes.items() if not v.isdigit()}}
        return runner(part, given, changed)

    carried = any(axis in dim for dim in s.result)
    if role == "w":
        order = torch.randperm(n, generator=generator)
        expected = _pick(whole, s.result, s.sizes, axis, order) if carried else whole
        return _compare(expected, at(order), f"axis {axis!r} is not a whole axis without order")
    if role == "p" and axis in s.signature.sizes and s.signature.sizes[axis].isdigit():
        order = torch.randperm(n, generator=generator)
        expected = _pick(whole, s.result, s.sizes, axis, order)
        return _compare(expected, at(order), f"axis {axis!r} is not parallel")
    order = torch.randperm(n, generator=generator)
    first, second = order[: n // 2].sort().values, order[n // 2 :].sort().values
    try:
        parts = at(first), at(second)
    except EmergeError as exc:
        return f"axis {axis!r} cannot be divided: {exc}"
    if role == "p":
        for index, found in zip((first, second), parts):
            wrong = _compare(_pick(whole, s.result, s.sizes, axis, index), found, f"axis {axis!r} is not parallel")
            if wrong:
                return wrong
        return ""
    combine = {"sum": torch.add, "max": torch.maximum}[role]
    return _compare(whole, combine(*parts), f"axis {axis!r} is not reduced by {role}")


def _compare(expected: Any, found: Any, what: str) -> str:
    from emerge.rules.statements import equal

    if tuple(expected.shape) != tuple(found.shape):
        return f"{what}: shapes {list(expected.shape)} and {list(found.shape)}"
    outcome = equal(expected, found, found)
    return f"{what}: {outcome.detail}" if outcome.holds is False else ""


def check_linearity(signature: Signature, others: list[Signature], mask: int, seed: int) -> str:
    """A counterexample to ``operator_linear``, "" when every test agrees.

    Raises:
        NotExecutable: nothing executes the operator.
    """
    import torch

    runner = Runner([signature, *[o for o in others if o.output != signature.output]])
    for sample in range(4):
        s = setup(signature, sample, 1)
        generator = torch.Generator().manual_seed(seed * 104729 + sample)
        x, y = _operands(s, runner, generator), _operands(s, runner, generator)
        read = [k for k, (_, dims) in enumerate(s.operands) if dims is not None]
        held = {k for bit, k in enumerate(read) if mask >> bit & 1}
        if mask >> len(read) or any(not x[k].is_floating_point() for k in held):
            return f"the set {mask} names operands that the signature does not have"
        attributes = _attributes(s, runner.kernel)
        total = [a + b if k in held else a for k, (a, b) in enumerate(zip(x, y))]
        other = [b if k in held else a for k, (a, b) in enumerate(zip(x, y))]
        try:
            values = [runner(s, v, attributes) for v in (total, x, other)]
        except EmergeError as exc:
            raise NotExecutable(f"{signature.op} cannot be executed: {exc}") from exc
        wrong = _compare(values[0], values[1] + values[2], f"not linear in the operands {sorted(held)}")
        if wrong:
            return wrong
    return ""
