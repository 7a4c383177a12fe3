"""Shapes and dtypes of captured graphs, recomputed from operands and attributes without PyTorch.

:func:`check_graph` compares what a graph file declares with what its operators yield. A contradiction is a
:class:`GraphError`; an operator without a rule is counted, never an error. The rules are in
:mod:`emerge.facts.shape_rules`, one module per operator family.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from emerge.facts.shape_rules import rule_for
from emerge.facts.shape_rules.algebra import (
    broadcast,
    normalize_dim,
    reduce_shape,
    resolve_view,
    same_shape,
    show,
    slice_bounds,
)
from emerge.facts.shape_rules.core import (
    UNKNOWN,
    Call,
    Nothing,
    Result,
    ScalarResult,
    Spec,
    Symbol,
    TupleValue,
    Undecided,
    type_text,
)
from emerge.facts.shape_rules.promotion import FLOATING, fits, promote, result_type
from emerge.graph.model import Graph, Node, Ref, TensorType
from emerge.util.errors import GraphError

__all__ = [
    "FLOATING",
    "ScalarResult",
    "ShapeReport",
    "Spec",
    "Symbol",
    "TupleValue",
    "broadcast",
    "check_graph",
    "has_rule",
    "infer",
    "normalize_dim",
    "promote",
    "reduce_shape",
    "resolve_view",
    "result_type",
    "slice_bounds",
]

_MEND = "correct the graph file or capture the graph again"


@dataclass(slots=True)
class ShapeReport:
    """What :func:`check_graph` looked at.

    Attributes:
        checked: operator -> number of nodes whose declared types were compared with computed ones.
            Single outputs of a multi-output node may be without rule (scratch values of fused kernels).
        unchecked: operator -> number of nodes where nothing was compared: no rule, or the rule needs values that
            the graph does not declare (data-dependent sizes, kernels it does not know). The operands of these nodes
            may have been checked all the same.
    """

    checked: dict[str, int] = field(default_factory=dict)
    unchecked: dict[str, int] = field(default_factory=dict)


def has_rule(op: str) -> bool:
    """True when this operator has a shape rule."""
    return rule_for(op)[0] is not None


def infer(
    op: str,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    groups: Mapping[str, list[list[int]]] | None = None,
    rank: int = 0,
) -> Result | None:
    """Types an operator yields; None where it has no rule or the rule cannot tell.

    Args:
        op: qualified name, e.g. ``aten.mm.default``.
        args, kwargs: arguments of a node, with :class:`TensorType` in place of references to tensors (and
            :class:`TupleValue`, numbers or :class:`Symbol` in place of references to other values).
        groups, rank: process groups and rank, for collectives.

    Returns:
        A :class:`Spec`, a list of them for a multi-output operator (None: that output has no rule), a
        :class:`ScalarResult`, or a marker for operators that yield nothing. Sizes that depend on data are ``?``;
        the dtype is None where it is not certain and ``floating`` where it is the default floating dtype.

    Raises:
        GraphError: the operands do not fit the operator.
    """
    rule, overload = rule_for(op)
    if rule is None:
        return None
    try:
        return rule(Call(op, overload, args, kwargs or {}, groups or {}, rank))
    except Undecided:
        return None


def check_graph(graph: Graph) -> ShapeReport:
    """Compares every declared type of a graph with the one its operator yields.

    Statements that involve an unbacked symbol (a str in a shape) are not checked.

    Raises:
        GraphError: operands that do not fit their operator, or a declared type that contradicts the computed one;
            the place is ``file: node 'mm_3' (aten.mm.default)``.
    """
    values: dict[str, Any] = {i.name: TensorType(i.dtype, i.shape) for i in graph.inputs}
    report = ShapeReport()
    for node in graph.nodes:
        result: Result | None
        args: list[Any] = []
        kwargs: dict[str, Any] = {}
        try:
            if node.op == "get_attr":
                result = _constant_type(node)
            else:
                args = [_resolve(a, values) for a in node.args]
                kwargs = {k: _resolve(v, values) for k, v in node.kwargs.items()}
                result = infer(node.op, args, kwargs, graph.groups, graph.rank)
            if result is not None:
                _compare(node, result)
        except GraphError as error:
            place = f"{graph.path or graph.name}: node '{node.name}' ({node.op})"
            message = f"{error.message}{_operand_text(args, kwargs)}; {_MEND}"
            raise GraphError(message, place) from None
        silent = isinstance(result, Nothing) and (node.shape is not None or bool(node.elements))
        counter = report.unchecked if result is None or silent else report.checked
        counter[node.op] = counter.get(node.op, 0) + 1
        values[node.name] = _value(node, result)
    return report


def _resolve(arg: Any, values: Mapping[str, Any]) -> Any:
    if isinstance(arg, Ref):
        try:
            return values[arg.name]
        except KeyError:
            raise GraphError(f"reads '{arg.name}', which is neither an input nor an earlier node") from None
    if isinstance(arg, list):
        return [_resolve(item, values) for item in arg]
    return arg


def _constant_type(node: Node) -> Result | None:
    """Type of a constant whose value the file holds as nested lists; a lone number says nothing about the shape."""
    shape: list[int] = []
    value = node.const
    if not isinstance(value, list):
        return None
    while isinstance(value, list):
        shape.append(len(value))
        if not value:
            break
        value = value[0]
    return Spec(None, tuple(shape))


def _compare(node: Node, result: Result) -> None:
    """Raises:
    GraphError: the node declares something else than ``result``.
    """
    if isinstance(result, Nothing):
        return
    if isinstance(result, ScalarResult):
        if node.shape is not None or node.is_tuple:
            raise GraphError("computed a scalar, but the graph declares a tensor")
        return
    if isinstance(result, list):
        if not node.is_tuple:
            raise GraphError(f"computed {len(result)} outputs, but the graph does not declare a multi-output node")
        for index, declared in node.elements.items():
            if not 0 <= index < len(result):
                raise GraphError(f"computed {len(result)} outputs, but the graph declares output {index}")
            spec = result[index]
            if spec is not None:
                _compare_type(f"output {index}: ", declared.dtype, declared.shape, spec)
        return
    if node.is_tuple or node.is_scalar or node.shape is None:
        declared_kind = "several outputs" if node.is_tuple else "a scalar" if node.is_scalar else "no type"
        raise GraphError(f"computed {type_text(result)}, but the graph declares {declared_kind}")
    _compare_type("", node.dtype, node.shape, result)


def _compare_type(which: str, dtype: str | None, shape: tuple[int | str, ...], spec: Spec) -> None:
    if shape != spec.shape and not same_shape(shape, spec.shape):
        raise GraphError(f"{which}computed shape {show(spec.shape)}, but the graph declares {show(shape)}")
    if dtype != spec.dtype and dtype is not None and not fits(dtype, spec.dtype):
        expected = "a floating dtype" if spec.dtype == FLOATING else f"dtype {spec.dtype}"
        raise GraphError(f"{which}computed {expected}, but the graph declares {dtype}")


def _value(node: Node, result: Result | None) -> Any:
    """What later nodes see: the declared type, completed by the computed one where the file has none."""
    if node.shape is not None:
        return TensorType(node.dtype or "", node.shape)
    if isinstance(result, list):
        elements = {i: TensorType(s.dtype or "", s.shape) for i, s in enumerate(result) if s is not None}
        return TupleValue({**elements, **node.elements}, len(result))
    if node.is_tuple:
        return TupleValue(node.elements)
    if isinstance(result, ScalarResult):
        return result.value
    return Symbol() if node.is_scalar else UNKNOWN


def _operand_text(args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """`` (operands float16[2, 3], float16[4, 5])``; the first eight."""
    found: list[str] = []
    pending: list[Any] = [*args, *kwargs.values()][::-1]
    while pending:
        value = pending.pop()
        if isinstance(value, TensorType):
            found.append(type_text(value))
        elif isinstance(value, list):
            pending.extend(reversed(value))
    if not found:
        return ""
    more = ", ..." if len(found) > 8 else ""
    return f" (operands {', '.join(found[:8])}{more})"
