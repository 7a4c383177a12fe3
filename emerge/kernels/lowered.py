"""Definitions over lowered tensors: every operator call goes through the lowering that graphs go through."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from emerge.facts.families import FamilyNode
from emerge.facts.lower import EqualForm, Lowering, Multi, Tensor, Unsupported, find_handler
from emerge.facts.shapes import FLOATING, Spec, infer
from emerge.graph.model import TensorType, is_floating
from emerge.kernels.interpret import NotApplicable, evaluate
from emerge.kernels.syntax import Definition
from emerge.util.errors import GraphError

#: Definitions inside definitions: an attention uses a softmax, which has a definition of its own.
MAX_DEPTH = 3


class LoweredTensors:
    """Backend of one side; operators are attributed to the node that is expanded."""

    def __init__(self, low: Lowering, node: FamilyNode) -> None:
        self.low, self.node = low, node

    def is_tensor(self, value: Any) -> bool:
        return isinstance(value, Tensor)

    def shape(self, value: Tensor) -> list[int]:
        return list(value.shape)

    def dtype(self, value: Tensor) -> str:
        return value.dtype

    def call(self, op: str, args: list[Any], kwargs: dict[str, Any]) -> Any:
        """The lowered result of one operator.

        Raises:
            NotApplicable: it has no lowering for these operands.
        """
        handler = find_handler(op)
        if handler is None:
            raise NotApplicable(f"{op} has no lowering")
        try:
            found = infer(op, _types(args), {k: _types([v])[0] for k, v in kwargs.items()})
        except GraphError as exc:
            raise NotApplicable(f"{op} does not fit its operands: {exc.message}") from None
        default = next((t.dtype for t in _tensors(args) if is_floating(t.dtype)), "float32")
        if isinstance(found, list) and all(s is not None for s in found):
            types = [_type(s, default) for s in found if s is not None]
            node = self._node(op, None, types)
        elif isinstance(found, Spec):
            types = []
            node = self._node(op, _type(found, default), None)
        else:
            raise NotApplicable(f"the shape of {op} is not known here")
        try:
            result = handler(self.low, node, args, kwargs)
        except Unsupported as exc:
            raise NotApplicable(f"{op}: {exc}") from None
        if isinstance(result, Multi):
            return [result[i] for i in range(len(types))]
        if not isinstance(result, Tensor):
            raise NotApplicable(f"{op} gives no tensor")
        self.low.note_call(self.node, op, args, kwargs, result)
        return result

    def _node(self, op: str, single: TensorType | None, several: list[TensorType] | None) -> FamilyNode:
        return FamilyNode(
            -1, self.node.name, op, [], {}, single.dtype if single else None, single.shape if single else None,
            self.node.ranks, {}, is_tuple=several is not None, elements=dict(enumerate(several or [])),
        )  # fmt: skip


def _tensors(values: Sequence[Any]) -> list[Tensor]:
    out: list[Tensor] = []
    for v in values:
        out += _tensors(v) if isinstance(v, list) else [v] if isinstance(v, Tensor) else []
    return out


def _types(values: Sequence[Any]) -> list[Any]:
    return [
        TensorType(v.dtype, v.shape) if isinstance(v, Tensor) else _types(v) if isinstance(v, list) else v for v in values
    ]


def _type(spec: Spec, default: str) -> TensorType:
    if any(not isinstance(n, int) for n in spec.shape):
        raise NotApplicable("a size depends on data")
    return TensorType(default if spec.dtype in (None, FLOATING) else spec.dtype, spec.shape)


def expansions(
    low: Lowering, known: Mapping[str, Sequence[Definition]], node: FamilyNode, op: str, args: list[Any], kwargs: dict[str, Any]
) -> tuple[list[tuple[Definition, list[Tensor]]], str]:
    """What the definitions of an operator make of these arguments: (definition, results), and why others do not apply."""
    out, why = [], ""
    outer = low.node
    low.node = node
    try:
        for definition in known.get(op, ()):
            try:
                result = evaluate(definition, LoweredTensors(low, node), args, _plain(kwargs))
            except NotApplicable as exc:
                why = str(exc)
                continue
            results = result if isinstance(result, list) else [result]
            if all(isinstance(t, Tensor) or t is None for t in results):
                out.append((definition, results))
    finally:
        low.node = outer
    return out, why


def _plain(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in kwargs.items() if k not in ("dtype", "device", "layout", "pin_memory", "memory_format")}


class Meanings:
    """Definitions as the lowering of operators that have no other, and as equal forms of those that have one."""

    def __init__(self, known: Mapping[str, Sequence[Definition]]) -> None:
        self.known = known

    def has(self, op: str) -> bool:
        """Whether the operator is defined."""
        return op in self.known

    def lower(self, low: Lowering, node: FamilyNode, op: str, args: list[Any], kwargs: dict[str, Any]) -> Any:
        """The node by its definition.

        Raises:
            Unsupported: the definition does not apply.
        """
        found, why = expansions(low, self.known, node, op, args, kwargs)
        if not found:
            raise Unsupported(f"the definition of {op} does not apply: {why}")
        definition, results = found[0]
        wrapped = node.op == "auto_functionalized"
        for t in results:
            if t is not None:
                low.defined.add((node.name, t.id, definition.name))
        if not node.is_tuple:
            if results[0] is None:
                raise Unsupported(f"the definition of {op} gives no value")
            low.note_call(node, op, args, kwargs, results[0])
            return results[0]

        def output(i: int) -> Tensor:
            k = i - 1 if wrapped else i
            if not 0 <= k < len(results) or results[k] is None:
                raise Unsupported(f"output {i} of {op} has no definition")
            return results[k]

        several = Multi(output)
        low.note_call(node, op, args, kwargs, several)
        return several

    def expand(self, low: Lowering) -> int:
        """Writes ``same`` for every call of a defined operator and its composites; returns how many."""
        done: set[tuple[str, int, str]] = set()
        count, depth, calls = 0, 0, low.calls
        while calls and depth < MAX_DEPTH:
            low.calls = []
            for node, op, args, kwargs, result in calls:
                count += self._expand(low, done, node, op, args, kwargs, result)
            calls, depth = low.calls, depth + 1
        low.calls = []
        return count

    def _expand(
        self, low: Lowering, done: set[tuple[str, int, str]], node: FamilyNode, op: str, args: list[Any],
        kwargs: dict[str, Any], result: Any,
    ) -> int:  # fmt: skip
        key = (node.name, result.id if isinstance(result, Tensor) else id(result), op)
        if key in done:
            return 0
        done.add(key)
        count = 0
        for definition, results in expansions(low, self.known, node, op, args, kwargs)[0]:
            wrapped = node.op == "auto_functionalized" and isinstance(result, Multi)
            for k, form in enumerate(results):
                try:
                    target = result[k + wrapped] if isinstance(result, Multi) else result if k == 0 else None
                except Unsupported:
                    continue
                if form is None or target is None or target.id == form.id or target.shape != form.shape:
                    continue
                if (target, form) not in [f[:2] for f in low.forms]:
                    low.base.add("same", target.id, form.id)
                    low.base.add("same", form.id, target.id)
                    count += 1
                low.forms.append(EqualForm(target, form, definition.name, node.name))
        return count
