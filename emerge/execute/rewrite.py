"""Rewrites the attributes of a graph for new axis lengths: shapes, slice bounds, split sizes, table offsets.

Every attribute is one of: explained (rewritten by a rule here), irrelevant to lengths (dimension numbers, flags), or
unexplained. An unexplained one *pins* the axes of its operator: they keep the length they have.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from math import prod
from typing import Any

from emerge.execute.aliasing import resolve, split_op
from emerge.execute.axes import AxisClasses
from emerge.execute.collectives import is_collective
from emerge.execute.literals import IndexTables, LengthTable, rescaled_bound
from emerge.execute.rewrite_rules import RULES, Edit, Unexplained
from emerge.facts.lower import Multi, Tensor
from emerge.facts.shapes import Spec, infer
from emerge.graph.model import Arg, Graph, Input, Node, Ref, TensorType, is_integer
from emerge.util.errors import GraphError

#: Parameters whose numbers are dimension numbers, flags or the like, whatever the lengths.
PLAIN = {
    "dim",
    "dims",
    "dim0",
    "dim1",
    "dim_self",
    "start_dim",
    "end_dim",
    "axis0",
    "axis1",
    "source",
    "destination",
    "keepdim",
    "half_to_float",
    "train",
    "dropout_p",
    "is_causal",
    "compute_log_sumexp",
    "return_debug_mask",
    "accumulate",
    "unsafe",
    "padding_idx",
    "scale_grad_by_freq",
    "sparse",
    "descending",
    "stable",
    "largest",
    "sorted",
    "correction",
    "unbiased",
    "pin_memory",
    "non_blocking",
    "copy",
    "output_mask",
    "grad_input_mask",
    "ord",
    "p",
    "chunks",
    "reduction",
    "input_dtype",
    "training",
    "implicit",
}
#: Numbers that scale or compare values: harmless unless they equal a function of a length.
SCALARS = {
    "other",
    "value",
    "alpha",
    "beta",
    "self",
    "exponent",
    "min",
    "max",
    "eps",
    "scale",
    "negative_slope",
    "fill_value",
    "weight",
    "threshold",
    "scalar",
    "lambd",
    "nan",
    "posinf",
    "neginf",
    "input",
    "condition",
    "tensor1",
    "tensor2",
    "grad_output",
    "ignore_index",
}
#: Operators that carry a sum on to the number that it is divided by, and how far that is followed.
_CARRIERS = {
    "view",
    "reshape",
    "_unsafe_view",
    "clone",
    "copy",
    "alias",
    "detach",
    "_to_copy",
    "to",
    "contiguous",
    "unsqueeze",
    "squeeze",
    "expand",
    "wait_tensor",
    "transpose",
    "t",
    "permute",
}
_STEPS = 12
_KERNELS: dict[str, tuple[str, ...]] = {
    "apex.fused_layer_norm_affine_fwd": ("input", "weight", "bias", "normalized_shape", "eps"),
    "apex.fused_rms_norm_affine_fwd": ("input", "weight", "normalized_shape", "eps"),
    "apex.fused_layer_norm_affine_bwd": (
        "grad",
        "mean",
        "inverse",
        "input",
        "normalized_shape",
        "weight",
        "bias",
        "eps",
    ),
    "operator.getitem": ("input", "dim"),
    **{
        f"operator.{n}": ("self", "other")
        for n in ["add", "sub", "mul", "truediv", "ge", "le", "gt", "lt", "eq", "ne", "pow"]
    },
    "prims.convert_element_type": ("input", "dtype"),
}


@cache
def parameter_names(op: str) -> tuple[str, ...] | None:
    """Parameter names of an operator in order, None when they are not known."""
    namespace, name, _ = split_op(op)
    if f"{namespace}.{name}" in _KERNELS:
        return _KERNELS[f"{namespace}.{name}"]
    operator = resolve(op)
    return tuple(p.name for p in operator._schema.arguments) if operator is not None else None


def numbers(arg: Arg) -> list[int | float]:
    """Integers and floats inside an argument, booleans not included."""
    if isinstance(arg, list):
        return [n for a in arg for n in numbers(a)]
    return [arg] if isinstance(arg, (int, float)) and not isinstance(arg, bool) else []


@dataclass
class Pins:
    """Axes that may not change but would, as found while rewriting.

    Attributes:
        changing: classes whose new length is not the captured one; nothing is noted about others.
        classes: class -> why it may not change.
        contradiction: what the shape check said, "" when it said nothing.
    """

    changing: frozenset[int]
    classes: dict[int, str] = field(default_factory=dict)
    contradiction: str = ""

    def add(self, classes: Iterable[int], why: str) -> None:
        """Notes classes that may not change."""
        for cls in classes:
            if cls in self.changing:
                self.classes.setdefault(cls, why)


class Rewriter:
    """Rewrites one graph.

    Args:
        tensor_of: name -> lowered tensor, :class:`Multi`, or None.
        new: length of every class.
        lengths: which numbers may stand for a length.
        pins: receives what could not be explained.
    """

    def __init__(
        self,
        graph: Graph,
        tensor_of: Callable[[str], Any],
        classes: AxisClasses,
        new: Mapping[int, int],
        lengths: LengthTable,
        pins: Pins,
    ) -> None:
        self.graph, self.tensor_of, self.classes, self.new = graph, tensor_of, classes, new
        self.lengths, self.pins = lengths, pins
        self.types = graph.types()
        self.tables = IndexTables(graph)
        self.nodes = {n.name: n for n in graph.nodes}
        self.new_types: dict[str, TensorType] = {}

    # ---- shapes -----------------------------------------------------------------------------------------------------

    def tensor_shape(self, tensor: Tensor) -> tuple[int, ...]:
        """New shape of a lowered tensor."""
        return tuple(prod(self.new[a.cls] for a in self.classes.atoms(tensor.id, d)) for d in range(len(tensor.shape)))

    def shape_of(self, name: str, old: tuple[int | str, ...]) -> tuple[int | str, ...]:
        """New shape of a graph value; what has no lowered form keeps its shape."""
        tensor = self.tensor_of(name)
        return self.tensor_shape(tensor) if isinstance(tensor, Tensor) and len(tensor.shape) == len(old) else old

    def length(self, name: str, dim: int) -> tuple[int, int] | None:
        """Captured and new length of a dimension."""
        old, new = self.types.get(name), self.new_types.get(name)
        if old is None or new is None or not -len(old.shape) <= dim < len(old.shape):
            return None
        a, b = old.shape[dim], new.shape[dim]
        return (a, b) if isinstance(a, int) and isinstance(b, int) else None

    # ---- the graph --------------------------------------------------------------------------------------------------

    def run(self) -> Graph:
        """The rewritten graph; what could not be explained is in ``pins``."""
        inputs = [replace(i, shape=self.shape_of(i.name, i.shape)) for i in self.graph.inputs]
        stored: list[Input | Node] = [*self.graph.inputs, *(n for n in self.graph.nodes if n.has_const)]
        for item in stored:
            self._stored(item)
        self.new_types = {i.name: TensorType(i.dtype, i.shape) for i in inputs}
        for n in self.graph.nodes:
            if n.dtype is not None and n.shape is not None:
                self.new_types[n.name] = TensorType(n.dtype, self.shape_of(n.name, n.shape))
        nodes: list[Node] = []
        elements: dict[str, dict[int, TensorType]] = {}
        for node in self.graph.nodes:
            elements[node.name] = self._elements(node)
            made = replace(node, shape=self._shape(node, elements), elements=elements[node.name])
            try:
                made = self._attributes(made, node)
            except Unexplained as why:
                self.pin_node(node, str(why))
            elements[node.name] = made.elements = self._inferred_elements(node, made)
            nodes.append(made)
        return replace(self.graph, inputs=inputs, nodes=nodes)

    def _stored(self, item: Input | Node) -> None:
        """A stored constant keeps its shape; a stored number may stand for a length."""
        if isinstance(item.const, list):
            tensor = self.tensor_of(item.name)
            if isinstance(tensor, Tensor):
                self._pin_tensor(tensor, f"{item.name}: a stored tensor")
            return
        tables = self.tables.tables_of(item.name) if is_integer(item.dtype) else []
        for value in numbers(item.const):
            if value not in (0, 1, -1, -100):
                for table, dim in tables:
                    self._pin_dim(table, dim, f"{item.name}: the stored number {value}")
            self.pins.add(self.lengths.classes_of(value), f"{item.name}: the stored number {value}")

    def _elements(self, node: Node) -> dict[int, TensorType]:
        multi = self.tensor_of(node.name)
        out = {}
        for i, kind in node.elements.items():
            tensor = multi.made.get(i) if isinstance(multi, Multi) else None
            if isinstance(tensor, Tensor) and len(tensor.shape) == len(kind.shape):
                kind = TensorType(kind.dtype, self.tensor_shape(tensor))
            out[i] = kind
        return out

    def _shape(self, node: Node, elements: Mapping[str, dict[int, TensorType]]) -> tuple[int | str, ...] | None:
        """New shape of a result; one element of several, where it was not lowered, has the shape it was made with."""
        if node.dtype is None or node.shape is None:
            return node.shape
        if split_op(node.op)[:2] == ("operator", "getitem") and not isinstance(self.tensor_of(node.name), Tensor):
            source, index = node.args[0], node.args[1] if len(node.args) > 1 else None
            known = elements.get(source.name, {}) if isinstance(source, Ref) else {}
            made = known.get(index) if isinstance(index, int) else None
            if made is not None:
                self.new_types[node.name] = TensorType(node.dtype, made.shape)
        return self.new_types[node.name].shape

    def _inferred_elements(self, old: Node, made: Node) -> dict[int, TensorType]:
        """Elements without lowered form (masks and statistics that nobody reads) get the shapes the operator yields."""
        multi = self.tensor_of(old.name)
        lowered = multi.made if isinstance(multi, Multi) else {}
        if all(isinstance(lowered.get(i), Tensor) for i in made.elements):
            return made.elements
        try:
            result = infer(
                made.op,
                [self._typed(a) for a in made.args],
                {k: self._typed(v) for k, v in made.kwargs.items()},
                self.graph.groups,
                self.graph.rank,
            )
        except GraphError:
            return made.elements  # the shape check says so with its place
        out = dict(made.elements)
        for i, kind in made.elements.items():
            spec = result[i] if isinstance(result, list) and i < len(result) else None
            if isinstance(lowered.get(i), Tensor) or not isinstance(spec, Spec) or spec.shape is None:
                continue
            if len(spec.shape) == len(kind.shape):
                shape = tuple(n if isinstance(n, int) else old for n, old in zip(spec.shape, kind.shape))
                out[i] = TensorType(kind.dtype, shape)
        return out

    def _typed(self, arg: Arg) -> Any:
        if isinstance(arg, Ref):
            return self.new_types.get(arg.name, arg)
        return [self._typed(a) for a in arg] if isinstance(arg, list) else arg

    def pin_node(self, node: Node, why: str) -> None:
        """All axes of a node's operands and results keep their lengths."""
        for name in (*dict.fromkeys(node.refs()), node.name):
            tensor = self.tensor_of(name)
            found = (
                [tensor]
                if isinstance(tensor, Tensor)
                else list(tensor.made.values())
                if isinstance(tensor, Multi)
                else []
            )
            for t in found:
                self._pin_tensor(t, f"{node.name} ({node.op}): {why}")

    def _pin_tensor(self, tensor: Tensor, why: str) -> None:
        self.pins.add([a.cls for dim in self.classes.tensor_atoms(tensor.id) for a in dim], why)

    # ---- attributes -------------------------------------------------------------------------------------------------

    def _attributes(self, made: Node, old: Node) -> Node:
        if not any(numbers(a) for a in (*old.args, *old.kwargs.values())):
            return made
        namespace, name, _ = split_op(old.op)
        if old.op == "get_attr":
            return made
        if is_collective(old.op):
            return self._split_sizes(made, old) if "all_to_all_single" in old.op else made
        names = parameter_names(old.op)
        if names is None or len(old.args) > len(names):
            raise Unexplained("an operator whose numbers have no known meaning")
        slots: dict[str, int | str] = {p: i for i, p in enumerate(names[: len(old.args)])}
        slots.update({k: k for k in old.kwargs})
        call = Edit(made, old, slots)
        rule = RULES.get(name)
        done = rule(self, call) if rule is not None and namespace in ("aten", "apex") else set()
        for parameter in slots:
            if parameter not in done and parameter not in PLAIN and numbers(call.old(parameter)):
                self._scalar(call, parameter)
        return call.node()

    def _scalar(self, call: Edit, parameter: str) -> None:
        value = call.old(parameter)
        if parameter not in SCALARS or not isinstance(value, (int, float)):
            raise Unexplained(f"{parameter} = {value}")
        operands = [r for r in call.source.refs() if r in self.types and is_integer(self.types[r].dtype)]
        integers = [r for r in operands if self.types[r].dtype != "bool"]
        if isinstance(value, int) and integers:
            tables = [t for r in integers for t in self.tables.tables_of(r)]
            if tables:
                new = rescaled_bound(value, tables, self.length)
                if new is None:
                    for table, dim in tables:
                        self._pin_dim(table, dim, f"{call.source.name} ({call.source.op}): {parameter} = {value}")
                else:
                    call.set(parameter, new)
                return
        counted = self._count(call, value)
        if counted is not None:
            call.set(parameter, counted)
            return
        self.pins.add(self.lengths.classes_of(value), f"{call.source.name} ({call.source.op}): {parameter} = {value}")

    def _count(self, call: Edit, value: int | float) -> int | float | None:
        """``n`` or ``1/n`` applied to a sum over ``n`` elements (of all ranks together, or of some), at new lengths."""
        if split_op(call.source.op)[1] not in ("mul", "div", "mul_", "div_") or not call.source.args:
            return None
        found = self._summed(call.source.args[0])
        if found is None:
            return None
        old, new = found
        for ranks in range(1, self.graph.world_size + 1):
            if self.graph.world_size % ranks == 0 and old != new:
                if value == old * ranks:
                    return type(value)(new * ranks)
                if isinstance(value, float) and value == 1.0 / (old * ranks):
                    return 1.0 / (new * ranks)
        return None

    def _summed(self, arg: Arg) -> tuple[int, int] | None:
        """Captured and new number of elements that the sum behind a value adds up."""
        for _ in range(_STEPS):
            node = self.nodes.get(arg.name) if isinstance(arg, Ref) else None
            if node is None or not node.args:
                return None
            name = split_op(node.op)[1]
            if name == "sum" and isinstance(node.args[0], Ref):
                return self._sum_length(node)
            if name not in _CARRIERS and not is_collective(node.op):
                return None
            arg = node.args[1] if name == "copy" else node.args[0]
        return None

    def _sum_length(self, node: Node) -> tuple[int, int] | None:
        source = node.args[0]
        kind = self.types.get(source.name) if isinstance(source, Ref) else None
        if kind is None or not isinstance(source, Ref):
            return None
        dims = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim")
        listed = list(range(len(kind.shape))) if dims in (None, []) else dims if isinstance(dims, list) else [dims]
        known = [self.length(source.name, d) for d in listed if isinstance(d, int)]
        if any(k is None for k in known) or len(known) != len(listed):
            return None
        return prod(k[0] for k in known if k), prod(k[1] for k in known if k)

    def _pin_dim(self, name: str, dim: int, why: str) -> None:
        tensor = self.tensor_of(name)
        if isinstance(tensor, Tensor):
            self.pins.add([a.cls for a in self.classes.atoms(tensor.id, dim % len(tensor.shape))], why)

    def _split_sizes(self, made: Node, old: Node) -> Node:
        """Equal split sizes of an all-to-all follow the operand's first dimension."""
        source = old.args[0].name if isinstance(old.args[0], Ref) else ""
        known = self.length(source, 0)
        args = list(made.args)
        for k in (1, 2):
            sizes = old.args[k]
            if not isinstance(sizes, list) or not sizes:
                continue
            total = sum(n for n in sizes if isinstance(n, int))
            equal = all(n == sizes[0] for n in sizes) and known is not None and total == known[0]
            if known is None or not equal or known[1] % len(sizes):
                raise Unexplained(f"split sizes {sizes}")
            args[k] = [known[1] // len(sizes)] * len(sizes)
        return replace(made, args=args)
