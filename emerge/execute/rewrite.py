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
from emerge.facts.lower import Multi, Tensor
from emerge.graph.model import Arg, Graph, Input, Node, Ref, TensorType, is_integer

#: Parameters whose numbers are dimension numbers, flags or the like, whatever the lengths.
PLAIN = {
    *("dim", "dims", "dim0", "dim1", "dim_self", "start_dim", "end_dim", "axis0", "axis1", "source", "destination"),
    *("keepdim", "half_to_float", "train", "dropout_p", "is_causal", "compute_log_sumexp", "return_debug_mask", "accumulate"),
    *("unsafe", "padding_idx", "scale_grad_by_freq", "sparse", "descending", "stable", "largest", "sorted", "correction"),
    *("unbiased", "pin_memory", "non_blocking", "copy", "output_mask", "grad_input_mask", "ord", "p", "chunks"),
    *("ignore_index", "reduction", "input_dtype", "training", "implicit"),
}
#: Numbers that scale or compare values: harmless unless they equal a function of a length.
SCALARS = {
    *("other", "value", "alpha", "beta", "self", "exponent", "min", "max", "eps", "scale", "negative_slope", "fill_value", "weight"),
    *("threshold", "scalar", "lambd", "nan", "posinf", "neginf", "input", "condition", "tensor1", "tensor2", "grad_output"),
}
_VIEWS = {"view", "reshape", "_unsafe_view", "view_copy", "expand", "expand_copy", "broadcast_to", "_reshape_alias"}
_MAKERS = {
    *("zeros", "ones", "full", "empty", "rand", "randn", "new_zeros", "new_ones", "new_full", "new_empty"),
    *("empty_strided", "new_empty_strided"),
}
_NORMS = {"native_layer_norm", "layer_norm", "rms_norm", "_fused_rms_norm"}
_KERNELS: dict[str, tuple[str, ...]] = {
    "apex.fused_layer_norm_affine_fwd": ("input", "weight", "bias", "normalized_shape", "eps"),
    "apex.fused_rms_norm_affine_fwd": ("input", "weight", "normalized_shape", "eps"),
    "operator.getitem": ("input", "dim"),
    **{f"operator.{n}": ("self", "other") for n in ("add", "sub", "mul", "truediv", "ge", "le", "gt", "lt", "eq", "ne", "pow")},
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


class Unexplained(Exception):
    """An attribute that no rule explains: its operator's axes keep their lengths."""


class Rewriter:
    """Rewrites one graph.

    Args:
        tensor_of: name -> lowered tensor, :class:`Multi`, or None.
        new: length of every class.
        lengths: which numbers may stand for a length.
        pins: receives what could not be explained.
    """

    def __init__(
        self, graph: Graph, tensor_of: Callable[[str], Any], classes: AxisClasses, new: Mapping[int, int],
        lengths: LengthTable, pins: Pins,
    ) -> None:
        self.graph, self.tensor_of, self.classes, self.new = graph, tensor_of, classes, new
        self.lengths, self.pins = lengths, pins
        self.types = graph.types()
        self.tables = IndexTables(graph)
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
        for stored in (*self.graph.inputs, *(n for n in self.graph.nodes if n.has_const)):
            self._stored(stored)
        self.new_types = {i.name: TensorType(i.dtype, i.shape) for i in inputs}
        shapes = {n.name: self.shape_of(n.name, n.shape) for n in self.graph.nodes if n.shape is not None}
        for n in self.graph.nodes:
            if n.dtype is not None and n.shape is not None:
                self.new_types[n.name] = TensorType(n.dtype, shapes[n.name])
        nodes = []
        for node in self.graph.nodes:
            elements = self._elements(node)
            made = replace(node, shape=shapes.get(node.name), elements=elements)
            try:
                made = self._attributes(made, node)
            except Unexplained as why:
                self.pin_node(node, str(why))
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

    def pin_node(self, node: Node, why: str) -> None:
        """All axes of a node's operands and results keep their lengths."""
        for name in (*dict.fromkeys(node.refs()), node.name):
            tensor = self.tensor_of(name)
            found = [tensor] if isinstance(tensor, Tensor) else list(tensor.made.values()) if isinstance(tensor, Multi) else []
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
        call = _Edit(made, old, slots)
        rule = _RULES.get(name)
        done = rule(self, call) if rule is not None and namespace in ("aten", "apex") else set()
        for parameter in slots:
            if parameter not in done and parameter not in PLAIN and numbers(call.old(parameter)):
                self._scalar(call, parameter)
        return call.node()

    def _scalar(self, call: _Edit, parameter: str) -> None:
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
        self.pins.add(self.lengths.classes_of(value), f"{call.source.name} ({call.source.op}): {parameter} = {value}")

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
            if known is None or len(set(map(str, sizes))) != 1 or sizes[0] * len(sizes) != known[0] or known[1] % len(sizes):  # type: ignore[operator]
                raise Unexplained(f"split sizes {sizes}")
            args[k] = [known[1] // len(sizes)] * len(sizes)
        return replace(made, args=args)


@dataclass
class _Edit:
    """A call whose arguments are read and replaced by parameter name."""

    made: Node
    source: Node
    slots: dict[str, int | str]
    changed: dict[str, Any] = field(default_factory=dict)

    def old(self, parameter: str, default: Any = None) -> Any:
        slot = self.slots.get(parameter)
        if slot is None:
            return default
        return self.source.args[slot] if isinstance(slot, int) else self.source.kwargs[slot]

    def set(self, parameter: str, value: Any) -> None:
        self.changed[parameter] = value

    def node(self) -> Node:
        args, kwargs = list(self.made.args), dict(self.made.kwargs)
        for parameter, value in self.changed.items():
            slot = self.slots[parameter]
            if isinstance(slot, int):
                args[slot] = value
            else:
                kwargs[slot] = value
        return replace(self.made, args=args, kwargs=kwargs)


Rule = Callable[[Rewriter, _Edit], set[str]]


def moved_bounds(n: int, start: int, stop: int, new_n: int, new_size: int) -> tuple[int, int]:
    """Bounds of a contiguous slice at new lengths.

    Raises:
        Unexplained: they are neither the whole, nor an equal piece, nor unchanged.
    """
    size = stop - start
    if size == n and new_size == new_n:
        return 0, new_n
    if n == new_n and size == new_size:
        return start, stop
    if size > 0 and n % size == 0 and start % size == 0 and new_n == n // size * new_size:
        return start // size * new_size, start // size * new_size + new_size
    raise Unexplained(f"bounds {start}:{stop} of {n}")


def _operand(call: _Edit, parameter: str = "self") -> str:
    value = call.old(parameter, call.old("input"))
    if not isinstance(value, Ref):
        raise Unexplained(f"{parameter} is no tensor")
    return value.name


def _dim_length(r: Rewriter, name: str, dim: Any) -> tuple[int, int]:
    known = r.length(name, dim if isinstance(dim, int) else 0)
    if known is None:
        raise Unexplained("a length that is not known")
    return known


def _result(call: _Edit) -> list[int]:
    shape = call.made.shape
    if shape is None or not all(isinstance(n, int) for n in shape):
        raise Unexplained("a shape that is not known")
    return [int(n) for n in shape]


def _shape_rule(r: Rewriter, call: _Edit) -> set[str]:
    """Explicit sizes are those of the result."""
    shape = _result(call)
    for parameter in ("size", "shape"):
        sizes = call.old(parameter)
        if isinstance(sizes, list):
            if len(sizes) != len(shape):
                raise Unexplained(f"{parameter} = {sizes}")
            call.set(parameter, [s if isinstance(s, Ref) or s == -1 else n for s, n in zip(sizes, shape)])
    strides = call.old("stride")
    if isinstance(strides, list):
        call.set("stride", _strides(strides, [int(n) for n in call.source.shape or ()], shape))
    return {"size", "shape", "stride"}


def _strides(strides: list[Any], old: list[int], new: list[int]) -> list[int]:
    """Strides of a dense tensor whose dimensions lie in the same order."""
    order = sorted(range(len(old)), key=lambda d: (strides[d], -d))
    step, made = 1, [1] * len(old)
    expected = 1
    for d in order:
        if old[d] > 1 and strides[d] != expected:
            raise Unexplained(f"strides {strides} of {old}")
        made[d] = step
        step *= new[d]
        expected *= old[d]
    return made


def _slice_rule(r: Rewriter, call: _Edit) -> set[str]:
    """slice, slice_scatter: the whole dimension, an equal piece, or unchanged."""
    source = _operand(call)
    dim = call.old("dim", 0) or 0
    n, new_n = _dim_length(r, source, dim)
    start, end, step = call.old("start"), call.old("end"), call.old("step", 1)
    if any(isinstance(v, Ref) for v in (start, end, step)):
        raise Unexplained("bounds that are computed")
    low = min(max(start + n if (start or 0) < 0 else (start or 0), 0), n)
    high = n if end is None else min(max(end + n if end < 0 else end, 0), n)
    part = call.old("src")
    other = r.length(part.name, dim) if isinstance(part, Ref) else None
    new_size = other[1] if other is not None else _result(call)[dim]
    if step not in (None, 1):
        if (n, high - low) != (new_n, high - low) or n != new_n:
            raise Unexplained(f"every {step}-th element of {n}")
        return {"start", "end", "step"}
    a, b = moved_bounds(n, low, high, new_n, new_size)
    if (a, b) != (low, high):
        if "start" in call.slots:
            call.set("start", a)
        if "end" in call.slots and not (b == new_n and (end is None or end >= n)):
            call.set("end", b)
    return {"start", "end", "step"}


def _select_rule(r: Rewriter, call: _Edit) -> set[str]:
    """The first or last index, or an axis that keeps its length."""
    n, new_n = _dim_length(r, _operand(call), call.old("dim"))
    index = call.old("index")
    if n == new_n or index in (0, -1):
        return {"index"}
    if index == n - 1:
        call.set("index", new_n - 1)
        return {"index"}
    raise Unexplained(f"index {index} of {n}")


def _narrow_rule(r: Rewriter, call: _Edit) -> set[str]:
    dim = call.old("dim")
    n, new_n = _dim_length(r, _operand(call), dim)
    start, size = call.old("start"), call.old("length")
    if not isinstance(start, int) or not isinstance(size, int):
        raise Unexplained("bounds that are computed")
    start = start + n if start < 0 else start
    a, b = moved_bounds(n, start, start + size, new_n, _result(call)[dim])
    call.set("start", a)
    call.set("length", b - a)
    return {"start", "length"}


def _split_rule(r: Rewriter, call: _Edit) -> set[str]:
    """Equal pieces, or the sizes of the results."""
    dim = call.old("dim", 0) or 0
    n, new_n = _dim_length(r, _operand(call), dim)
    done = {"split_size", "split_sizes", "sections", "indices"}
    if n == new_n:
        return done
    how = call.old("split_sizes", call.old("split_size"))
    parameter = "split_sizes" if "split_sizes" in call.slots else "split_size"
    sizes = how if isinstance(how, list) else [how] * -(-n // how) if isinstance(how, int) and how else None
    if not sizes or any(not isinstance(s, int) for s in sizes) or sum(sizes) != n:
        raise Unexplained(f"pieces {how} of {n}")
    known = {i: int(t.shape[dim]) for i, t in call.made.elements.items() if isinstance(t.shape[dim], int)}
    if len(set(sizes)) == 1 and new_n % len(sizes) == 0:
        new = [new_n // len(sizes)] * len(sizes)
        if any(new[i] != size for i, size in known.items()):
            raise Unexplained(f"pieces {how} of {n}")
    else:
        missing = [i for i in range(len(sizes)) if i not in known]
        if len(missing) > 1:
            raise Unexplained(f"pieces {how} of {n}")
        new = [known.get(i, new_n - sum(known.values())) for i in range(len(sizes))]
        if sum(new) != new_n or min(new) < 1:
            raise Unexplained(f"pieces {how} of {n}")
    call.set(parameter, new if isinstance(how, list) else new[0])
    return done


def _arange_rule(r: Rewriter, call: _Edit) -> set[str]:
    """Positions from 0, or from a multiple of the length."""
    (new,) = _result(call)
    old = int((call.source.shape or (0,))[0])
    start, end, step = call.old("start", 0), call.old("end"), call.old("step", 1)
    if old != new:
        if not isinstance(start, int) or not isinstance(end, int) or step != 1 or end - start != old or start % old:
            raise Unexplained(f"positions {start}:{end}:{step}")
        if start:
            call.set("start", start // old * new)
        call.set("end", start // old * new + new)
    return {"start", "end", "step"}


def _norm_rule(r: Rewriter, call: _Edit) -> set[str]:
    shape = call.old("normalized_shape")
    name = _operand(call, "input")
    new = r.new_types[name].shape
    if isinstance(shape, list) and shape:
        call.set("normalized_shape", list(new[-len(shape) :]))
    return {"normalized_shape"}


def _repeat_rule(r: Rewriter, call: _Edit) -> set[str]:
    source, shape = r.new_types[_operand(call)].shape, _result(call)
    repeats, dim = call.old("repeats"), call.old("dim")
    if isinstance(repeats, list):
        inner = [1] * (len(shape) - len(source)) + [int(n) for n in source]
        if any(a % b for a, b in zip(shape, inner)):
            raise Unexplained(f"repeats {repeats}")
        call.set("repeats", [a // b for a, b in zip(shape, inner)])
        return {"repeats"}
    if isinstance(repeats, int) and isinstance(dim, int) and shape[dim] % int(source[dim]) == 0:
        call.set("repeats", shape[dim] // int(source[dim]))
        return {"repeats"}
    raise Unexplained(f"repeats {repeats}")


def _one_hot_rule(r: Rewriter, call: _Edit) -> set[str]:
    call.set("num_classes", _result(call)[-1])
    return {"num_classes"}


def _unflatten_rule(r: Rewriter, call: _Edit) -> set[str]:
    sizes, dim, shape = call.old("sizes"), call.old("dim"), _result(call)
    source = r.types[_operand(call)].shape
    first = dim % len(source)
    call.set("sizes", [s if s == -1 else n for s, n in zip(sizes, shape[first : first + len(sizes)])])
    return {"sizes"}


def _triangle_rule(r: Rewriter, call: _Edit) -> set[str]:
    if call.old("diagonal", 0) not in (0, 1, -1):
        raise Unexplained(f"diagonal {call.old('diagonal')}")
    return {"diagonal"}


def _topk_rule(r: Rewriter, call: _Edit) -> set[str]:
    n, new_n = _dim_length(r, _operand(call), call.old("dim", -1))
    if n != new_n:
        raise Unexplained(f"the best {call.old('k')} of {n}")
    return {"k"}


def _pow_rule(r: Rewriter, call: _Edit) -> set[str]:
    return {"exponent"} if call.old("exponent") in (2, 3, 0.5, -0.5, 2.0, 3.0, -1) else set()


_RULES: dict[str, Rule] = {
    **dict.fromkeys((*_VIEWS, *_MAKERS), _shape_rule),
    **dict.fromkeys((*_NORMS, "fused_layer_norm_affine_fwd", "fused_rms_norm_affine_fwd"), _norm_rule),
    **dict.fromkeys(("slice", "slice_copy", "slice_scatter"), _slice_rule),
    **dict.fromkeys(("select", "select_copy", "select_scatter"), _select_rule),
    **dict.fromkeys(("split", "split_with_sizes", "split_copy", "split_with_sizes_copy"), _split_rule),
    **dict.fromkeys(("repeat", "repeat_interleave", "tile"), _repeat_rule),
    **dict.fromkeys(("tril", "triu", "tril_", "triu_"), _triangle_rule),
    "narrow": _narrow_rule,
    "arange": _arange_rule,
    "one_hot": _one_hot_rule,
    "unflatten": _unflatten_rule,
    "topk": _topk_rule,
    "pow": _pow_rule,
}
