"""Rules of :mod:`emerge.execute.rewrite`: how an operator's explicit lengths, bounds and counts follow its axes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from emerge.graph.model import Node, Ref, TensorType

_VIEWS = {"view", "reshape", "_unsafe_view", "view_copy", "expand", "expand_copy", "broadcast_to", "_reshape_alias"}
_MAKERS = {
    *("zeros", "ones", "full", "empty", "rand", "randn", "new_zeros", "new_ones", "new_full", "new_empty"),
    *("empty_strided", "new_empty_strided"),
}
_NORMS = {"native_layer_norm", "layer_norm", "rms_norm", "_fused_rms_norm"}


class Unexplained(Exception):
    """An attribute that no rule explains: its operator's axes keep their lengths."""


class Lengths(Protocol):
    """What a rule may ask about the graph it rewrites."""

    @property
    def types(self) -> Mapping[str, TensorType]:
        """Captured types."""

    @property
    def new_types(self) -> Mapping[str, TensorType]:
        """Types at the new lengths."""

    def length(self, name: str, dim: int) -> tuple[int, int] | None:
        """Captured and new length of a dimension."""


@dataclass
class Edit:
    """A call whose arguments are read and replaced by parameter name."""

    made: Node
    source: Node
    slots: dict[str, int | str]
    changed: dict[str, Any] = field(default_factory=dict)

    def old(self, parameter: str, default: Any = None) -> Any:
        """The captured argument."""
        slot = self.slots.get(parameter)
        if slot is None:
            return default
        return self.source.args[slot] if isinstance(slot, int) else self.source.kwargs[slot]

    def set(self, parameter: str, value: Any) -> None:
        """Replaces an argument."""
        self.changed[parameter] = value

    def node(self) -> Node:
        """The call with its replaced arguments."""
        args, kwargs = list(self.made.args), dict(self.made.kwargs)
        for parameter, value in self.changed.items():
            slot = self.slots[parameter]
            if isinstance(slot, int):
                args[slot] = value
            else:
                kwargs[slot] = value
        return replace(self.made, args=args, kwargs=kwargs)


Rule = Callable[[Lengths, Edit], set[str]]


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


def _operand(call: Edit, parameter: str = "self") -> str:
    value = call.old(parameter, call.old("input"))
    if not isinstance(value, Ref):
        raise Unexplained(f"{parameter} is no tensor")
    return value.name


def _dim_length(r: Lengths, name: str, dim: Any) -> tuple[int, int]:
    known = r.length(name, dim if isinstance(dim, int) else 0)
    if known is None:
        raise Unexplained("a length that is not known")
    return known


def _result(call: Edit) -> list[int]:
    shape = call.made.shape
    if shape is None or not all(isinstance(n, int) for n in shape):
        raise Unexplained("a shape that is not known")
    return [int(n) for n in shape]


def _shape_rule(r: Lengths, call: Edit) -> set[str]:
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


def _slice_rule(r: Lengths, call: Edit) -> set[str]:
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


def _select_rule(r: Lengths, call: Edit) -> set[str]:
    """The first or last index, or an axis that keeps its length."""
    n, new_n = _dim_length(r, _operand(call), call.old("dim"))
    index = call.old("index")
    if n == new_n or index in (0, -1):
        return {"index"}
    if index == n - 1:
        call.set("index", new_n - 1)
        return {"index"}
    raise Unexplained(f"index {index} of {n}")


def _narrow_rule(r: Lengths, call: Edit) -> set[str]:
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


def _split_rule(r: Lengths, call: Edit) -> set[str]:
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


def _arange_rule(r: Lengths, call: Edit) -> set[str]:
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


def _norm_rule(r: Lengths, call: Edit) -> set[str]:
    shape = call.old("normalized_shape")
    name = _operand(call, "input")
    new = r.new_types[name].shape
    if isinstance(shape, list) and shape:
        call.set("normalized_shape", list(new[-len(shape) :]))
    return {"normalized_shape"}


def _repeat_rule(r: Lengths, call: Edit) -> set[str]:
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


def _one_hot_rule(r: Lengths, call: Edit) -> set[str]:
    call.set("num_classes", _result(call)[-1])
    return {"num_classes"}


def _unflatten_rule(r: Lengths, call: Edit) -> set[str]:
    sizes, dim, shape = call.old("sizes"), call.old("dim"), _result(call)
    source = r.types[_operand(call)].shape
    first = dim % len(source)
    call.set("sizes", [s if s == -1 else n for s, n in zip(sizes, shape[first : first + len(sizes)])])
    return {"sizes"}


def _triangle_rule(r: Lengths, call: Edit) -> set[str]:
    if call.old("diagonal", 0) not in (0, 1, -1):
        raise Unexplained(f"diagonal {call.old('diagonal')}")
    return {"diagonal"}


def _topk_rule(r: Lengths, call: Edit) -> set[str]:
    n, new_n = _dim_length(r, _operand(call), call.old("dim", -1))
    if n != new_n:
        raise Unexplained(f"the best {call.old('k')} of {n}")
    return {"k"}


def _pow_rule(r: Lengths, call: Edit) -> set[str]:
    return {"exponent"} if call.old("exponent") in (2, 3, 0.5, -0.5, 2.0, 3.0, -1) else set()


#: Operator name -> rule; it returns the parameters that it has explained.
RULES: dict[str, Rule] = {
    **dict.fromkeys((*_VIEWS, *_MAKERS), _shape_rule),
    **dict.fromkeys(
        (*_NORMS, "fused_layer_norm_affine_fwd", "fused_rms_norm_affine_fwd", "fused_layer_norm_affine_bwd"), _norm_rule
    ),
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
