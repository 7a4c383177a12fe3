"""Executable meaning of lowered operators: a body applied along iteration axes.

Only bodies that the lowering writes for tensors without a node, and for alternative forms of a tensor, are needed; all
others have an executed node.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from emerge.rules.lowered import Form


class NotEvaluable(Exception):
    """Nothing says how to compute the value."""


def number(text: str, rank: int) -> Any:
    """A constant of a body: a fraction, ``inf``, or a tuple with one number per rank."""
    if text.startswith("("):
        return ast.literal_eval(text)[rank]
    return float(text) if text in ("inf", "-inf", "nan") else float(Fraction(text))


_COMPARE: dict[str, str] = {"lt": "lt", "le": "le", "gt": "gt", "ge": "ge", "eq": "eq", "ne": "ne"}
_TORCH_UNARY = {
    *("exp", "exp2", "expm1", "log", "log2", "log1p", "sqrt", "rsqrt", "tanh", "sigmoid", "relu", "sin", "cos", "tan"),
    *("erf", "abs", "reciprocal", "floor", "ceil", "round", "trunc", "sign", "square", "atan", "sinh", "cosh", "isnan"),
    *("isinf",),
}


_KEEPS_INTEGERS = {"relu", "abs", "square", "sign", "floor", "ceil", "round", "trunc", "isnan", "isinf"}


def scalar_function(kind: str, attrs: list[str], rank: int, scale: Fraction | None) -> Callable[..., Any] | None:
    """The pointwise function of a kind with its attributes, None when the kind is not pointwise or not known."""
    import torch

    def c(k: int = 0) -> Any:
        return number(attrs[k], rank)

    if kind in _TORCH_UNARY and not attrs:
        return lambda x: getattr(torch, kind)(
            x if kind in _KEEPS_INTEGERS or x.is_floating_point() else x.to(torch.float64)
        )
    if kind.endswith("c") and kind[:-1] in _COMPARE:
        return lambda x: getattr(torch, kind[:-1])(x, c())
    if kind in _COMPARE or kind in ("maximum", "minimum", "pow", "remainder", "fmod", "floor_divide", "atan2"):
        return getattr(torch, kind)

    def wide(x: Any) -> Any:
        return x if x.is_floating_point() else x.to(torch.float64)

    def integral(x: Any, value: float) -> Any:
        return int(value) if not x.is_floating_point() and value == int(value) else value

    table: dict[str, Callable[..., Any]] = {
        "silu": torch.nn.functional.silu,
        "gelu": lambda x: torch.nn.functional.gelu(x, approximate=attrs[0] if attrs else "none"),
        "addc": lambda x: x + integral(x, c()),
        "mulc": lambda x: x * integral(x, c()),
        "csub": lambda x: integral(x, c()) + integral(x, c(1)) * x,
        "divc": lambda x: wide(x) / c(),
        "cdiv": lambda x: c() / wide(x),
        "powc": lambda x: torch.pow(x, c()),
        "cpow": lambda x: torch.pow(c(), x),
        "add": lambda x, y: torch.add(x, y, alpha=integral(y, c()) if attrs else 1),
        "sub": torch.sub,
        "mul": torch.mul,
        "div": lambda x, y: wide(x) / wide(y),
        "neg": lambda x: -x,
        "not": torch.logical_not,
        "and": torch.logical_and,
        "or": torch.logical_or,
        "xor": torch.logical_xor,
        "cast": lambda x: x,
        "keep": lambda x, m: x * m,
        "fill": lambda x, m: x.masked_fill(m.bool(), integral(x, c())),
        "fill0": lambda x, m: x.masked_fill(m.bool(), 0),
        "where": torch.where,
        "scale": lambda x: x * float(scale or 0),
        "rank_weight": lambda x: x * float(Fraction(attrs[0].split(",")[rank])),
    }
    return table.get(kind)


def _attributes(body: str) -> list[str]:
    name = body.rpartition("/")[0] if "/" in body and body.rpartition("/")[2].isdigit() else body
    return name.split("#")[1:]


def evaluate_body(form: Form, args: Sequence[Any], shape: tuple[int, ...], rank: int, one_hot: bool = False) -> Any:
    """Result of a form, of the given shape.

    Args:
        args: operand values of their own shapes.
        one_hot: the first operand of a contraction is a one-hot form, in which 0 * x is 0 whatever x is.
    Raises:
        NotEvaluable: the kind is not known here.
    """
    import torch

    attrs = _attributes(form.body)
    moved = _movement(form, attrs, args, shape)
    if moved is not None:
        return moved
    if form.kind == "const":
        return torch.tensor(number(attrs[0], rank), dtype=torch.float64).reshape(shape)
    spread = [_spread(form, k, a) for k, a in enumerate(args)]
    with torch.no_grad():
        value = _apply(form, attrs, spread, rank, one_hot)
    return _collect(form, value.expand(form.sizes) if form.sizes else value, shape)


def _spread(form: Form, k: int, arg: Any) -> Any:
    """Operand ``k`` over the iteration space; dimensions along which it is constant have one position."""
    import torch

    n = len(form.sizes)
    index: list[Any] = [torch.zeros([1] * n, dtype=torch.int64) for _ in arg.shape]
    for i, oi, d, od, size in form.arg_ties.get(k, ()):
        grid = torch.arange(form.sizes[i]).reshape([-1 if j == i else 1 for j in range(n)])
        index[d] = index[d] + grid // oi % size * od
    return arg.reshape([1] * n) if not index else arg[tuple(index)]


def _collect(form: Form, value: Any, shape: tuple[int, ...]) -> Any:
    """Brings the iteration space (consumed dimensions reduced to one position) to the shape of the result."""
    import torch

    index: list[Any] = [torch.zeros([1] * len(shape), dtype=torch.int64) for _ in form.sizes]
    for i, oi, d, od, size in form.out_ties:
        grid = torch.arange(shape[d]).reshape([-1 if e == d else 1 for e in range(len(shape))])
        index[i] = index[i] + grid // od % size * oi
    if not index:
        return value.reshape(shape)
    return value[tuple(i.expand(shape) for i in index)]


def _reduced(form: Form, value: Any) -> Any:
    out = {i for i, *_ in form.out_ties}
    for i, role in enumerate(form.roles):
        if i in out or form.sizes[i] == 1:
            continue
        if role in ("sum", "max", "min", "prod"):
            value = value.expand([form.sizes[j] if j == i else n for j, n in enumerate(value.shape)])
            if value.dtype == torch_bool():
                value = value.any(i, keepdim=True) if role == "max" else value.all(i, keepdim=True)
            else:
                name = {"sum": "sum", "max": "amax", "min": "amin", "prod": "prod"}[role]
                value = getattr(value, name)(i, keepdim=True)
        elif role == "o" and form.kind == "lookup":
            value = value.sum(i, keepdim=True)
        else:
            raise NotEvaluable(f"{form.kind} consumes an axis of role {role}")
    return value


def torch_bool() -> Any:
    """torch.bool, without importing torch at load."""
    import torch

    return torch.bool


def _apply(form: Form, attrs: list[str], args: list[Any], rank: int, one_hot: bool) -> Any:
    import torch

    kind = form.kind
    if kind == "one_hot":
        last = len(form.sizes) - 1
        positions = torch.arange(form.sizes[last]).reshape([1] * last + [-1])
        return (args[0] == positions).to(torch.float64)
    if kind in ("dot", "lookup"):
        x, y = (a.to(torch.float64) for a in args)
        product = torch.where((x == 0) & one_hot, torch.zeros_like(x * y), x * y)
        return _reduced(form, product)
    if kind in ("sum", "max", "min", "prod", "any", "all"):
        return _reduced(form, args[0])
    along = _along(form, attrs, args)
    if along is not None:
        return along
    function = scalar_function(kind, attrs, rank, form.scale)
    if function is None or any(r != "p" for r in form.roles):
        raise NotEvaluable(f"no executable meaning for {form.body}")
    return function(*args)


def _along(form: Form, attrs: list[str], args: list[Any]) -> Any:
    """Operators that read whole axes and keep them: softmax, cumulative sums, norms."""
    import torch

    dims = [i for i, r in enumerate(form.roles) if r in ("w", "o")]
    if not dims or form.kind not in ("softmax", "log_softmax", "cumsum", "cumprod", "layer_norm", "rms_norm"):
        return None
    x = args[0].expand([form.sizes[i] if i in dims else n for i, n in enumerate(args[0].shape)])
    if form.kind in ("softmax", "log_softmax"):
        value = x
        shifted = value - torch.amax(value, dims, keepdim=True)
        total = torch.exp(shifted).sum(dims, keepdim=True)
        return torch.exp(shifted) / total if form.kind == "softmax" else shifted - torch.log(total)
    if form.kind in ("cumsum", "cumprod"):
        return getattr(torch, form.kind)(x, dims[0])
    if attrs[0] == "default":
        raise NotEvaluable("norm without a recorded eps")
    eps, weight, bias = float(Fraction(attrs[0])), attrs[1] == "True", attrs[2] == "True"
    centred = x - x.mean(dims, keepdim=True) if form.kind == "layer_norm" else x
    out = centred * torch.rsqrt(centred.square().mean(dims, keepdim=True) + eps)
    rest = list(args[1:])
    if weight:
        out = out * rest.pop(0)
    return out + rest.pop(0) if bias else out


def _movement(form: Form, attrs: list[str], args: Sequence[Any], shape: tuple[int, ...]) -> Any:
    """Slices, concatenations and reshapes, done on the operands themselves."""
    import torch

    name = form.body.split("#")[0].split("/")[0]
    if name == "reshape":
        return args[0].reshape(shape)
    if form.kind == "cat":
        different = [d for d in range(len(shape)) if any(a.shape[d] != shape[d] for a in args)]
        return torch.cat(list(args), different[0]) if different else None
    if form.kind != "slice":
        return None
    ordered = [i for i, r in enumerate(form.roles) if r == "o"]
    (_, _, d, _, _), *_ = [t for t in form.arg_ties[0] if t[0] == ordered[-1]]
    numbers = [int(a) for a in attrs]
    if name == "select":
        size = args[0].shape[d] // numbers[1]
        return args[0].narrow(d, numbers[0] * size, size)
    if name == "stride":
        return args[0][(slice(None),) * d + (slice(numbers[0], None, numbers[1]),)]
    return args[0][(slice(None),) * d + (slice(numbers[0], numbers[1], numbers[2]),)]
