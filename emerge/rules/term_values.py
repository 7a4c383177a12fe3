"""Values of the algebra's terms (``rules/language.egg``), element by element, in float64.

A value is an extended real or undefined (:func:`pole`, a root outside its domain, ``inf - inf``, ...). Where rounding,
overflow or underflow decides what float64 gives, the element is *unsure* and says nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import prod
from typing import Any

from emerge.rules.bodies import scalar_function

#: Results that are not smaller than all operands but tiny: an underflow.
TINY = 1e-280
#: Beyond this the argument of a periodic function is not known to a fraction of its period.
PERIODIC_LIMIT = 1e5
RELATIVE = 1e-9
#: Bodies that pass errors on in proportion, however large.
_LINEAR = {"add", "sub", "addc", "mulc", "scale", "divc", "neg", "mul", "square", "where", "keep", "fill", "fill0", "cast",
           "maximum", "minimum", "abs", "relu"}  # fmt: skip
#: Bodies that give 0 for operands other than 0 only because float64 has no smaller numbers.
_UNDERFLOWING = {"mul", "div", "mulc", "divc", "cdiv", "square", "powc", "pow", "cpow", "exp", "exp2", "reciprocal", "rsqrt",
                 "sigmoid", "silu", "mish", "gelu", "softplus", "log_sigmoid"}  # fmt: skip
#: Relative step by which operands are moved to see how errors grow.
STEP = 1e-7
#: Bodies whose argument must be well known.
_PERIODIC = {"sin", "cos", "tan"}
#: A stand-in for any function: no law holds of it. Bodies that rule files never name.
OPAQUE = ("opaque#1", "opaque#2", "opaque#3")


class NoValue(Exception):
    """The term has no value: its operands do not fit together."""


class NoMeaning(NoValue):
    """Nothing says what a body computes."""


@dataclass(frozen=True)
class Value:
    """A tensor of extended reals.

    Attributes:
        number: float64. undefined, unsure: where it has no value; where float64 does not tell.
        size: magnitude of the numbers it was made of, on whose scale rounding errors are measured.
    """

    number: Any
    undefined: Any
    unsure: Any
    size: Any

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape."""
        return tuple(self.number.shape)

    def moved(self, function: Callable[[Any], Any]) -> Value:
        """A rearrangement."""
        return Value(*(function(t) for t in (self.number, self.undefined, self.unsure, self.size)))


def leaf(number: Any) -> Value:
    """A tensor as given."""
    import torch

    never = torch.zeros_like(number, dtype=torch.bool)
    return Value(number, never, never, number.abs())


def evaluate(op: str, args: Sequence[Any]) -> Value:
    """A constructor applied to values, integers, fractions, strings and tuples.

    Raises:
        NoValue: the operands do not fit.
    """
    try:
        return _evaluate(op, args)
    except (IndexError, ValueError, RuntimeError, TypeError, ZeroDivisionError, OverflowError) as exc:
        raise NoValue(
            f"({op} ...) has no value: {str(exc).splitlines()[0] if str(exc) else type(exc).__name__}"
        ) from None


def _evaluate(op: str, args: Sequence[Any]) -> Value:
    import torch

    if op in ("Map1", "Map2", "Map3"):
        return pointwise(args[0], args[1:])
    if op == "Scale":
        return pointwise(f"mulc#{args[0]}", [args[1]])
    if op == "Shift":
        return pointwise(f"addc#{args[0]}", [args[1]])
    if op == "Place":
        x, dims, shape = args
        return x.moved(lambda t: place(t, dims, shape))
    if op == "View":
        x, shape = args
        if prod(x.shape) != prod(shape) or any(n < 1 for n in shape):
            raise NoValue(f"a view of shape {list(x.shape)} as {list(shape)}")
        return x.moved(lambda t: t.reshape(tuple(shape)))
    if op == "Slice":
        x, d, start, stop = args
        if not (0 <= d < len(x.shape) and 0 <= start < stop <= x.shape[d]):
            raise NoValue(f"a slice {start}:{stop} of dimension {d} of shape {list(x.shape)}")
        return x.moved(lambda t: t.narrow(d, start, stop - start))
    if op == "Cat":
        x, y, d = args
        if not 0 <= d < len(x.shape) or len(x.shape) != len(y.shape):
            raise NoValue(f"shapes {list(x.shape)} and {list(y.shape)} joined along dimension {d}")
        joined = [torch.cat([s, t], d) for s, t in zip(_parts(x), _parts(y))]
        return Value(*joined)
    if op == "Fold":
        return _fold(*args)
    if op == "Einsum":
        return _einsum(*args)
    if op == "Along":
        return _along(*args)
    if op == "Range":
        kind, start, step, n = args
        if kind not in ("int", "float") or n < 1:
            raise NoValue(f"a range of {n} numbers of kind {kind!r}")
        return leaf(torch.arange(n, dtype=torch.float64) * step + start)
    if op == "Lookup":
        return _lookup(*args)
    raise NoMeaning(f"({op} ...) is unknown here")


def _lookup(x: Value, i: Value, d: int) -> Value:
    """Rows of dimension ``d`` by a vector of whole numbers; undefined where one lies outside."""
    import torch

    if len(i.shape) != 1 or not 0 <= d < len(x.shape):
        raise NoValue(f"a look-up of an index of shape {list(i.shape)} in dimension {d} of shape {list(x.shape)}")
    at = i.number.nan_to_num(0, 0, 0).to(torch.int64)
    outside = i.undefined | (at < 0) | (at >= x.shape[d]) | (at != i.number)
    rows = x.moved(lambda t: t.index_select(d, at.clamp(0, x.shape[d] - 1)))
    spread = outside.reshape([-1 if k == d else 1 for k in range(len(x.shape))]).expand(rows.shape)
    return Value(rows.number, rows.undefined | spread, rows.unsure, rows.size)


def _parts(x: Value) -> tuple[Any, ...]:
    return x.number, x.undefined, x.unsure, x.size


def place(t: Any, dims: Sequence[int], shape: Sequence[int]) -> Any:
    """Dimension ``d`` of the result is dimension ``dims[d]`` of ``t``, broadcast where that is -1; all others are of size 1."""
    used = [k for k in dims if k >= 0]
    if len(dims) != len(shape) or len(set(used)) != len(used) or any(not 0 <= k < t.dim() for k in used):
        raise NoValue(f"dimensions {list(dims)} of a tensor with {t.dim()} placed as shape {list(shape)}")
    if any(k < -1 for k in dims) or any(t.shape[k] != 1 for k in range(t.dim()) if k not in used):
        raise NoValue(f"dimensions {list(dims)} leave out some of shape {list(t.shape)}")
    if any(k >= 0 and t.shape[k] != n for k, n in zip(dims, shape)) or any(n < 1 for n in shape):
        raise NoValue(f"shape {list(t.shape)} placed by {list(dims)} as shape {list(shape)}")
    rest = [k for k in range(t.dim()) if k not in used]
    t = t.permute([*used, *rest]).reshape([t.shape[k] for k in used])
    for d, k in enumerate(dims):
        if k < 0:
            t = t.unsqueeze(d)
    return t.expand(tuple(shape))


def split_body(body: str) -> tuple[str, list[str]]:
    """Kind and attributes of a body."""
    kind, *attrs = body.split("#")
    return kind, attrs


#: Bodies without attributes that torch has as functions of one operand.
_MORE = {"mish": "mish", "softplus": "softplus", "hardswish": "hardswish", "relu6": "relu6", "hardtanh": "hardtanh",
         "log_sigmoid": "logsigmoid"}  # fmt: skip


def _function(body: str) -> Callable[..., Any]:
    import torch

    kind, attrs = split_body(body)
    if kind == "opaque":
        opaque: dict[int, Callable[..., Any]] = {
            1: lambda x: torch.sin(1.3 * x.clamp(-50, 50) + 0.7) + 0.1 * x.clamp(-1e6, 1e6),
            2: lambda x, y: torch.cos(x.clamp(-50, 50) - 2.1) * 1.7 + 0.3 * y.clamp(-1e6, 1e6),
            3: lambda x, y, z: (
                torch.cos(x.clamp(-50, 50) - 2.1) + 0.3 * y.clamp(-1e6, 1e6) - torch.sin(z.clamp(-50, 50))
            ),
        }
        return opaque[int(attrs[0])]
    if kind in ("not", "and", "or", "xor"):
        truth: dict[str, Callable[..., Any]] = {
            "not": lambda x: x == 0,
            "and": lambda x, y: (x != 0) & (y != 0),
            "or": lambda x, y: (x != 0) | (y != 0),
            "xor": lambda x, y: (x != 0) ^ (y != 0),
        }
        return truth[kind]
    if kind == "where":
        return lambda c, x, y: torch.where(c != 0, x, y)
    if kind == "keep":
        return lambda x, m: torch.where(m != 0, x, torch.zeros_like(x))
    if kind in ("fill", "fill0"):
        value = float(Fraction(attrs[0])) if kind == "fill" and attrs[0] not in ("inf", "-inf") else 0.0
        value = float(attrs[0]) if kind == "fill" and attrs[0] in ("inf", "-inf") else value
        return lambda x, m: torch.where(m != 0, torch.full_like(x, value), x)
    more = _MORE.get(body)
    if more is not None:
        found: Callable[..., Any] = getattr(torch.nn.functional, more)
        return found
    function = scalar_function(kind, attrs, 0, None)
    if function is None:
        raise NoMeaning(f"nothing says what the body {body!r} means")
    return function


def pole(body: str, args: Sequence[Any]) -> Any:
    """Where a body has no value although float64 gives one: a divisor of 0, a power outside its domain."""
    import torch

    kind, attrs = split_body(body)
    x = args[0]
    if kind in ("reciprocal", "cdiv"):
        return x == 0
    if kind in ("div", "remainder", "fmod", "floor_divide"):
        return args[1] == 0
    if kind == "rsqrt":
        return x <= 0
    if kind in ("powc", "pow"):
        e = args[1] if kind == "pow" else torch.full_like(x, float(Fraction(attrs[0])))
        whole = e == torch.floor(e)
        return ((x == 0) & (e < 0)) | ((x < 0) & (~whole | torch.isinf(e)))
    if kind == "cpow":
        base = float(Fraction(attrs[0]))
        return (x < 0) if base == 0 else torch.full_like(x, base < 0, dtype=torch.bool) & (x != torch.floor(x))
    if kind == "divc":
        return torch.full_like(x, float(Fraction(attrs[0])) == 0, dtype=torch.bool)
    return torch.zeros_like(x, dtype=torch.bool)


def pointwise(body: str, args: Sequence[Value]) -> Value:
    """A body applied element by element; operands have one shape."""
    import torch

    if len({a.shape for a in args}) != 1:
        raise NoValue(f"shapes {[list(a.shape) for a in args]} of operands of {body!r}")
    kind, _ = split_body(body)
    numbers = [a.number for a in args]
    value = _function(body)(*numbers).to(torch.float64)
    if value.shape != numbers[0].shape:
        raise NoValue(f"{body!r} changes the shape")
    undefined = torch.isnan(value) | pole(body, numbers)
    unsure = torch.zeros_like(undefined)
    finite = torch.ones_like(undefined)
    zero = torch.zeros_like(undefined)
    cancelled = torch.zeros_like(undefined)
    for a in args:
        finite &= torch.isfinite(a.number)
        zero |= a.number == 0
        cancelled |= torch.isfinite(a.number) & (a.size > 1e3 * a.number.abs())
    if kind == "where":  # what is not selected does not matter
        c, x, y = args
        undefined = c.undefined | torch.where(c.number != 0, x.undefined, y.undefined)
        unsure = c.unsure | torch.where(c.number != 0, x.unsure, y.unsure)
    elif kind in ("keep", "fill", "fill0"):
        x, m = args
        hidden = (m.number != 0) if kind != "keep" else (m.number == 0)
        undefined = m.undefined | (x.undefined & ~hidden)
        unsure = m.unsure | (x.unsure & ~hidden)
    else:
        for a in args:
            undefined = undefined | a.undefined
            unsure = unsure | a.unsure
    legitimate = (numbers[0] == (-1 if kind == "log1p" else 0)) & (kind in ("log", "log2", "log1p"))
    unsure = unsure | (torch.isinf(value) & finite & ~undefined & ~legitimate)
    if kind in _UNDERFLOWING and not (kind == "mulc" and not Fraction(body.split("#")[1])):
        unsure = unsure | ((value.abs() < TINY) & finite & ~zero & ~undefined)
    if kind in _PERIODIC or kind in ("remainder", "fmod", "floor_divide", "floor", "round", "trunc", "ceil"):
        unsure = unsure | ((numbers[0].abs() > PERIODIC_LIMIT) & finite)
    size, known = _error_size(body, args, value)
    if kind not in _LINEAR:
        unsure = unsure | (cancelled & ~zero)
    unsure = unsure | (~known & ~undefined & finite)
    return Value(torch.where(undefined, torch.full_like(value, float("nan")), value), undefined, unsure,
                 size.nan_to_num(0, 0, 0))  # fmt: skip


def _error_size(body: str, args: Sequence[Value], value: Any) -> tuple[Any, Any]:
    """Magnitude on which rounding errors of the result are measured, and where it is known: its own, and for every operand
    how much the result moves when that moves by a small part of its own magnitude."""
    import torch

    function = _function(body)
    size, known = value.abs(), torch.ones_like(value, dtype=torch.bool)
    for k, a in enumerate(args):
        step = torch.where(torch.isfinite(a.number), STEP * a.size, torch.zeros_like(a.size))
        moved = function(*[b.number + step if j == k else b.number for j, b in enumerate(args)]).to(torch.float64)
        change = torch.where(step == 0, torch.zeros_like(value), (moved - value).abs() / STEP)
        known &= torch.isfinite(change) | ~torch.isfinite(value)
        size = size + change.nan_to_num(0, 0, 0)
    return size, known


_TRUTH = {"eq", "ne", "lt", "le", "gt", "ge", "not", "and", "or", "xor", "isnan", "isinf"}


def _fold(body: str, role: str, x: Value, dims: Sequence[int], shape: Sequence[int]) -> Value:
    import torch

    rank = len(x.shape)
    if not dims or len(set(dims)) != len(dims) or any(not 0 <= d < rank for d in dims):
        raise NoValue(f"a reduction of dimensions {list(dims)} of shape {list(x.shape)}")
    kept = [n for d, n in enumerate(x.shape) if d not in dims]
    if list(shape) != kept:
        raise NoValue(
            f"a reduction of dimensions {list(dims)} of shape {list(x.shape)} said to have shape {list(shape)}"
        )
    d = tuple(dims)
    kind, attrs = split_body(body)
    folds: dict[tuple[str, str], Callable[[Any], Any]] = {
        ("sum", "sum"): lambda t: t.sum(d),
        ("max", "max"): lambda t: t.amax(d),
        ("min", "min"): lambda t: t.amin(d),
        ("any", "max"): lambda t: (t != 0).to(torch.float64).amax(d),
        ("all", "min"): lambda t: (t != 0).to(torch.float64).amin(d),
        ("prod", "prod"): lambda t: _product(t, d),
        ("logsumexp", "w"): lambda t: torch.logsumexp(t, d),
        ("mean", "w"): lambda t: t.mean(d),
    }
    if kind == "var" and role == "w":
        value = x.number.var(d, correction=float(Fraction(attrs[0])))
    elif (kind, role) in folds and not attrs:
        value = folds[kind, role](x.number)
    else:
        raise NoMeaning(f"nothing says what the reduction {body!r} with role {role!r} means")
    undefined = x.undefined.to(torch.float64).amax(d) > 0
    undefined = undefined | torch.isnan(value)
    finite = torch.isfinite(x.number).to(torch.float64).amin(d) > 0
    unsure = x.unsure.to(torch.float64).amax(d) > 0
    if kind not in ("max", "min", "any", "all"):
        unsure = unsure | (torch.isinf(value) & finite)
    if kind == "prod":
        tiny = (value.abs() < TINY) & finite & ((x.number == 0).to(torch.float64).amax(d) == 0)
        cancelled = (x.size > 1e3 * x.number.abs()).to(torch.float64).amax(d) > 0
        unsure = unsure | tiny | cancelled
        size = value.abs()
    elif kind == "var":
        size = x.size.square().sum(d)
    else:
        size = x.size.sum(d)
    return Value(torch.where(undefined, torch.full_like(value, float("nan")), value), undefined, unsure,
                 size.nan_to_num(0, 0, 0))  # fmt: skip


def _product(t: Any, dims: Sequence[int]) -> Any:
    for d in sorted(dims, reverse=True):
        t = t.prod(d)
    return t


def _einsum(spec: str, x: Value, y: Value, shape: Sequence[int]) -> Value:
    import torch

    value = torch.einsum(spec, x.number, y.number)
    if tuple(value.shape) != tuple(shape):
        raise NoValue(f"the contraction {spec!r} said to have shape {list(shape)}, and it has {list(value.shape)}")

    def anywhere(a: Any, b: Any) -> Any:
        one, two = (t.to(torch.float64) for t in (a, b))
        return (torch.einsum(spec, one, torch.ones_like(two)) + torch.einsum(spec, torch.ones_like(one), two)) > 0

    undefined = anywhere(x.undefined, y.undefined) | torch.isnan(value)
    infinite = anywhere(torch.isinf(x.number), torch.isinf(y.number))
    unsure = anywhere(x.unsure, y.unsure) | (torch.isinf(value) & ~infinite)
    size = torch.einsum(spec, x.size.nan_to_num(0, 0, 0), y.size.nan_to_num(0, 0, 0))
    return Value(torch.where(undefined, torch.full_like(value, float("nan")), value), undefined, unsure,
                 size.nan_to_num(0, 0, 0))  # fmt: skip


def _along(body: str, role: str, x: Value, d: int) -> Value:
    import torch

    if not 0 <= d < len(x.shape):
        raise NoValue(f"dimension {d} of shape {list(x.shape)}")
    known = {
        ("softmax", "w"): torch.softmax,
        ("log_softmax", "w"): torch.log_softmax,
        ("cumsum", "o"): torch.cumsum,
        ("cumprod", "o"): torch.cumprod,
    }
    if (body, role) not in known:
        raise NoMeaning(f"nothing says what {body!r} with role {role!r} along a dimension means")
    value = known[body, role](x.number, d)

    def spread(mask: Any) -> Any:
        return mask.to(torch.float64).amax(d, keepdim=True).expand(value.shape) > 0

    undefined = torch.isnan(value) | spread(x.undefined)
    unsure = spread(x.unsure) | (torch.isinf(value) & ~spread(torch.isinf(x.number)))
    top = x.size.nan_to_num(0, 0, 0).amax(d, keepdim=True).expand(value.shape)
    if body == "cumprod":
        unsure = unsure | ((value.abs() < TINY) & ~spread(x.number == 0)) | spread(x.size > 1e3 * x.number.abs())
        size = value.abs()
    elif body == "cumsum":
        size = x.size.nan_to_num(0, 0, 0).sum(d, keepdim=True).expand(value.shape)
    else:
        # a softmax of numbers far apart underflows, and its rounding errors grow with them
        unsure = unsure | ((value == 0) & (body == "softmax") & ~spread(torch.isinf(x.number))) | (top > PERIODIC_LIMIT)
        size = torch.maximum(value.abs(), top)
    return Value(torch.where(undefined, torch.full_like(value, float("nan")), value), undefined, unsure,
                 size.nan_to_num(0, 0, 0))  # fmt: skip


def difference(x: Value, y: Value) -> tuple[tuple[int, ...], str] | None:
    """Where two values that should be one differ, and how; None where they agree."""
    import torch

    known = ~x.unsure & ~y.unsure
    split = known & (x.undefined != y.undefined)
    both = known & ~x.undefined & ~y.undefined
    scale = torch.maximum(x.size, y.size)
    same = (x.number == y.number) | (
        torch.isfinite(x.number) & torch.isfinite(y.number)
        & ((x.number - y.number).abs() <= RELATIVE * torch.maximum(scale, torch.full_like(scale, 1e-290)))
    )  # fmt: skip
    wrong = (split | (both & ~same)).nonzero()
    if not len(wrong):
        return None
    at = tuple(wrong[0].tolist())
    return at, f"{_number(x, at)} against {_number(y, at)}"


def _number(x: Value, at: tuple[int, ...]) -> str:
    return "undefined" if bool(x.undefined[at]) else f"{float(x.number[at]):.6g}"
