"""Pointwise operators: element by element, operands broadcast from the right; scalar constants go into the body."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import Any

from emerge.facts.base import constant_text
from emerge.facts.families import FamilyNode, RankVector
from emerge.facts.lower import Iter, Lowering, Made, Tensor, Unsupported, axis, lowers, result_dtype, scalar_constant
from emerge.facts.ops.masks import compare_two_valued, select, two_valued
from emerge.facts.ops.positions import compared, negated, range_along, shifted
from emerge.facts.routing import note_cast, note_clamp, note_quotient
from emerge.graph.model import is_floating, is_integer

#: ATen name -> kind of body, for functions of one operand without attributes.
UNARY = {
    "exp": "exp",
    "exp2": "exp2",
    "expm1": "expm1",
    "log": "log",
    "log2": "log2",
    "log1p": "log1p",
    "sqrt": "sqrt",
    "rsqrt": "rsqrt",
    "tanh": "tanh",
    "sigmoid": "sigmoid",
    "relu": "relu",
    "silu": "silu",
    "mish": "mish",
    "sin": "sin",
    "cos": "cos",
    "tan": "tan",
    "erf": "erf",
    "abs": "abs",
    "reciprocal": "reciprocal",
    "floor": "floor",
    "ceil": "ceil",
    "round": "round",
    "trunc": "trunc",
    "sign": "sign",
    "isnan": "isnan",
    "isinf": "isinf",
    "softplus": "softplus",
    "hardswish": "hardswish",
    "square": "square",
    "log_sigmoid": "log_sigmoid",
    "atan": "atan",
    "sinh": "sinh",
    "cosh": "cosh",
}
COMPARE = {"eq", "ne", "lt", "le", "gt", "ge"}
SWAPPED = {"eq": "eq", "ne": "ne", "lt": "gt", "gt": "lt", "le": "ge", "ge": "le"}


def attributes(node: FamilyNode, args: list[Any], kwargs: dict[str, Any], skip: int = 1) -> str:
    """Text of the remaining plain attributes, part of the body.

    Raises:
        Unsupported: an attribute is a tensor or differs between ranks.
    """
    parts = []
    for value in [
        *args[skip:],
        *(
            v
            for k, v in sorted(kwargs.items())
            if k not in ("dtype", "device", "layout", "pin_memory", "memory_format")
        ),
    ]:
        if isinstance(value, (Tensor, RankVector)):
            raise Unsupported("an attribute is a tensor or differs between ranks")
        if isinstance(value, float) or (isinstance(value, int) and not isinstance(value, bool)):
            parts.append(constant_text(value))
        else:
            parts.append(str(value))
    return "#".join(parts)


def unary(low: Lowering, node: FamilyNode, args: list[Any], kwargs: dict[str, Any]) -> Tensor:
    kind = UNARY[node.op.split(".")[1].rstrip("_")]
    attrs = attributes(node, args, kwargs)
    if kind == "not" and args[0].dtype == "bool":
        return negated(low, args[0])
    return low.pointwise(f"{kind}#{attrs}" if attrs else kind, kind, [args[0]], result_dtype(node, args[0].dtype))


for _name in UNARY:
    lowers(f"aten.{_name}", f"aten.{_name}_")(unary)


@lowers("aten.neg", "aten.neg_")
def negate(low: Lowering, node: FamilyNode, args: list[Any], kwargs: dict[str, Any]) -> Tensor:
    x = args[0]
    return low.scaled(x, Fraction(-1)) if is_floating(x.dtype) else low.pointwise("neg", "neg", [x], x.dtype)


@lowers("aten.gelu", "aten.gelu_")
def gelu(low: Lowering, node: FamilyNode, args: list[Any], kwargs: dict[str, Any]) -> Tensor:
    how = kwargs.get("approximate", args[1] if len(args) > 1 else "none")
    return low.pointwise(f"gelu#{how}", "gelu", [args[0]], args[0].dtype)


@lowers("aten.leaky_relu", "aten.elu", "aten.nan_to_num")
def unary_with_attributes(low: Lowering, node: FamilyNode, args: list[Any], kwargs: dict[str, Any]) -> Tensor:
    name = node.op.split(".")[1].rstrip("_")
    dtype = result_dtype(node, args[0].dtype)
    return low.pointwise(f"{name}#{attributes(node, args, kwargs)}", name, [args[0]], dtype)


@lowers(
    "aten.clamp", "aten.clamp_", "aten.clamp_min", "aten.clamp_min_", "aten.clamp_max", "aten.clamp_max_", "aten.relu6",
    "aten.relu6_", "aten.hardtanh", "aten.hardtanh_",
)  # fmt: skip
def clamp(low: Lowering, node: FamilyNode, args: list[Any], kwargs: dict[str, Any]) -> Tensor:
    """All spellings of keeping a value between two constants, either of which may be missing."""
    name = node.op.split(".")[1].rstrip("_")

    def given(k: int, key: str, default: Any = None) -> Any:
        return kwargs.get(key, args[k] if len(args) > k else default)

    low_bound: Any = None
    high_bound: Any = None
    if name == "relu6":
        low_bound, high_bound = 0, 6
    elif name == "hardtanh":
        low_bound, high_bound = given(1, "min_val", -1), given(2, "max_val", 1)
    elif name == "clamp":
        low_bound, high_bound = given(1, "min"), given(2, "max")
    elif name == "clamp_min":
        low_bound = given(1, "min")
    else:
        high_bound = given(1, "max")
    from emerge.facts.ops.blocks import holds_positions

    if holds_positions(low, args[0], low_bound, high_bound):
        return args[0]
    texts = []
    for bound in (low_bound, high_bound):
        c = scalar_constant(bound)
        if bound is not None and c is None:
            raise Unsupported("a bound is a tensor or differs between ranks")
        texts.append("none" if c is None else constant_text(c))
    result = low.pointwise(f"clamp#{'#'.join(texts)}", "clamp", [args[0]], result_dtype(node, args[0].dtype))
    note_clamp(low, result, args[0], [low_bound, high_bound])
    return result


def rank_vector_fraction(value: Any) -> list[Fraction] | None:
    """Exact constants, one per rank, of a rank-dependent number."""
    if isinstance(value, RankVector) and all(isinstance(v, (int, float)) for v in value.values):
        return [Fraction(v) for v in value.values]
    return None


def add_constant(low: Lowering, x: Tensor, c: Fraction | float, dtype: str) -> Tensor:
    if dtype == "bool":
        raise Unsupported("adds a truth value")
    if c == 0:
        return x
    written = c
    if isinstance(c, Fraction) and is_floating(dtype):
        c = low.literal(c, dtype)
    result = low.pointwise(f"addc#{constant_text(c)}", "addc", [x], dtype)
    if isinstance(written, Fraction) and isinstance(c, Fraction):
        low.note_literal(result, written, c)
    note_index(low, result, "shift", x, c)
    return result


def note_index(low: Lowering, result: Tensor, how: str, x: Tensor, value: Any) -> None:
    """Writes integer arithmetic with a constant for the index domain (datalog/analysis/index.dl)."""
    if x.dtype not in ("int64", "bool") or (how in ("shift", "times") and result.dtype != "int64"):
        return  # narrower integers wrap around
    per_rank = (
        low.integers(int(value)) if isinstance(value, Fraction) and value.denominator == 1 else low.integers(value)
    )
    if per_rank is not None and how in ("lt", "ge") and len(set(per_rank)) > 1:
        limit = low.limit_of(x)
        if limit is not None:
            # what lies behind the range of the index is never reached: such bounds may as well continue the others
            per_rank = low.mesh.affine_below(per_rank, limit) or per_rank
    if per_rank is not None and how == "times" and low.rank_int(per_rank) is None:
        low.base.add("index_factor", low.op_of[result.id])
    record = low.rank_int(per_rank) if per_rank is not None else None
    if record is not None:
        low.base.add("index_scalar", low.op_of[result.id], how, record)


@lowers("aten.add", "aten.add_", "operator.add")
def add(low: Lowering, node: FamilyNode, args: list[Any], kwargs: dict[str, Any]) -> Tensor:
    return _sum(low, node, args[0], args[1], kwargs.get("alpha", args[2] if len(args) > 2 else 1), 1)


@lowers("aten.sub", "aten.sub_", "operator.sub")
def sub(low: Lowering, node: FamilyNode, args: list[Any], kwargs: dict[str, Any]) -> Tensor:
    return _sum(low, node, args[0], args[1], kwargs.get("alpha", args[2] if len(args) > 2 else 1), -1)


@lowers("aten.rsub")
def rsub(low: Lowering, node: FamilyNode, args: list[Any], kwargs: dict[str, Any]) -> Tensor:
    return _sum(low, node, args[1], args[0], kwargs.get("alpha", args[2] if len(args) > 2 else 1), -1)


def _sum(low: Lowering, node: FamilyNode, x: Any, y: Any, alpha: Any, sign: int) -> Tensor:
    """``x + sign * alpha * y``."""
    dtype = result_dtype(node, x.dtype if isinstance(x, Tensor) else y.dtype)
    factor = scalar_constant(alpha)
    if not isinstance(factor, Fraction):
        raise Unsupported(f"alpha {alpha!r} is not a number")
    cx, cy = scalar_constant(x), scalar_constant(y)
    added = y if sign > 0 else -y if isinstance(y, int) and not isinstance(y, bool) else None
    shifted = _shifted_range(low, x, added, factor, dtype) or _shifted_range(
        low, y, x if sign > 0 else None, Fraction(1), dtype
    )
    if shifted is not None:
        return shifted
    if isinstance(x, Tensor) and isinstance(y, RankVector):
        values = rank_vector_fraction(y)
        if values is None or not is_integer(dtype):
            raise Unsupported("adds a constant that differs between ranks")
        vector = RankVector(tuple(int(sign * factor * v) for v in values))
        result = low.pointwise(f"addc#{vector.values}", "addc", [x], dtype)
        note_index(low, result, "shift", x, vector)
        return result
    if isinstance(x, Tensor) and cy is not None and not (isinstance(y, Tensor) and cx is not None):
        return add_constant(low, x, sign * factor * cy, dtype)
    if isinstance(y, Tensor) and cx is not None:
        other = low.scaled(y, sign * factor) if is_floating(dtype) else y
        if not is_floating(dtype) and sign * factor != 1:
            return low.pointwise(f"csub#{constant_text(cx)}#{sign * factor}", "csub", [y], dtype)
        return add_constant(low, other, cx, dtype)
    if not isinstance(x, Tensor) or not isinstance(y, Tensor):
        raise Unsupported("operands are not tensors")
    if dtype == "bool":
        if sign < 0 or factor != 1:
            raise Unsupported("arithmetic on truth values")
        # the sum of truth values is their disjunction
        return low.pointwise("or", "or", [x, y], dtype, commutative=True)
    if is_floating(dtype) and is_floating(x.dtype) and is_floating(y.dtype):
        # a tensor of one number, however large
        if isinstance(y.constant, Fraction):
            return low.broadcast_to(add_constant(low, x, sign * factor * y.constant, dtype), node.shape)
        if isinstance(x.constant, Fraction):
            other = low.scaled(y, sign * factor, dtype)
            return low.broadcast_to(add_constant(low, other, x.constant, dtype), node.shape)
    if factor != 1 and is_floating(dtype):
        y = low.scaled(y, factor)
    elif factor != 1:
        product = low.pointwise(f"mulc#{constant_text(factor)}", "mulc", [y], dtype)
        note_index(low, product, "times", y, factor)
        y = product
    if sign < 0:
        return low.pointwise("sub", "sub", [x, y], dtype)
    result = low.pointwise("add", "add", [x, y], dtype, commutative=True)
    if low.side == 1 and is_floating(dtype):
        regroup(low, result, x, y)
        regroup(low, result, y, x)
    return result


def regroup(low: Lowering, result: Tensor, x: Tensor, inner: Tensor) -> None:
    """Notes the other groupings of ``x + inner`` where ``inner`` is a rearranged sum that nothing else reads.

    The other side may add in another order, e.g. a residual before the bias. Whether a form may be used is a law
    (``form-regrouped``); here only the candidates are written.
    """
    chain: list[tuple[Tensor, Made]] = []
    seen, made = inner, low.made_by.get(inner.id)
    while made is not None and made.kind == "layout":
        chain.append((seen, made))
        seen, made = made.args[0], low.made_by.get(made.args[0].id)
    if made is None or made.body != "add" or inner.shape != result.shape:
        return
    names = [n for t in (seen, *(t for t, _ in chain)) for n in low.nodes_of.get(t.id, ())]
    if any(low.readers[n] > 1 for n in names):
        return

    def rearranged(term: Tensor) -> Tensor:
        term = low.broadcast_to(term, seen.shape)
        for tensor, how in reversed(chain):
            term = low.layout(term, tensor.shape, how.ties, how.broadcast)
        return term

    terms = [rearranged(a) for a in made.args]
    iters = [axis(n, "p", d, a0=d, a1=d) for d, n in enumerate(result.shape)]
    for first, last in (terms, terms[::-1]):
        part = low.pointwise("add", "add", [x, first], result.dtype, commutative=True)
        if part.shape != result.shape:
            continue
        for args in ([part, last], [last, part]):
            form = low.form("add", "add", args, iters, result)
            if form is not None:
                low.base.add("regrouped", form, low.op_of[result.id])


def _shifted_range(low: Lowering, x: Any, y: Any, factor: Fraction, dtype: str) -> Tensor | None:
    """``arange(n) + c`` is a range that starts at ``c``; ``c`` may depend on the rank."""
    if isinstance(y, Tensor) and isinstance(y.constant, Fraction) and isinstance(x, Tensor) and is_integer(y.dtype):
        # a tensor of one number; it may have the dimensions of the range, not more
        fits = len(y.shape) <= len(x.shape) and all(n in (1, m) for n, m in zip(y.shape[::-1], x.shape[::-1]))
        y = int(y.constant) if fits else y
    if not isinstance(x, Tensor) or isinstance(y, Tensor) or factor != 1 or not is_integer(dtype) or x.dtype != dtype:
        return None
    shift = low.integers(y)
    if shift is None or range_along(low, x) is None:
        return None
    return shifted(low, x, shift)


@lowers("aten.mul", "aten.mul_", "operator.mul")
def mul(low: Lowering, node: FamilyNode, args: list[Any], kwargs: dict[str, Any]) -> Tensor:
    x, y = args[0], args[1]
    if not isinstance(x, Tensor) or (scalar_constant(x) is not None and isinstance(y, Tensor)):
        x, y = y, x
    dtype = result_dtype(node, x.dtype)
    if dtype == "bool":
        if not isinstance(y, Tensor):
            raise Unsupported("multiplies a truth value by a constant")
        return low.pointwise("and", "and", [x, y], dtype, commutative=True)
    values = rank_vector_fraction(y)
    if values is not None and is_integer(dtype) and isinstance(y, RankVector):
        result = low.pointwise(f"mulc#{y.values}", "mulc", [x], dtype)
        note_index(low, result, "times", x, y)
        return result
    if values is not None:
        return rank_weighted(low, x, values, dtype)
    c = scalar_constant(y)
    if c is not None:
        if is_floating(dtype) and is_floating(x.dtype) and isinstance(c, Fraction) and c != 0:
            return low.scaled(x, c, dtype)
        result = low.pointwise(f"mulc#{constant_text(c)}", "mulc", [x], dtype)
        note_index(low, result, "times", x, c)
        return result
    for held, other in ((y, x), (x, y)):
        if isinstance(held.constant, Fraction) and held.constant != 0 and is_floating(x.dtype) and is_floating(y.dtype):
            return low.broadcast_to(low.scaled(other, held.constant, dtype), node.shape)
    if x.dtype == "bool" and y.dtype != "bool":
        x, y = y, x
    if y.dtype == "bool" and is_integer(x.dtype) and x.dtype != "bool":
        # x * mask keeps x where the mask holds and is 0 elsewhere; not so for floats, where inf * 0 is undefined
        return low.pointwise("keep", "keep", [x, y], dtype)
    return low.pointwise("mul", "mul", [x, y], dtype, commutative=True)


@lowers("aten.div", "aten.div_", "aten.true_divide", "operator.truediv")
def div(low: Lowering, node: FamilyNode, args: list[Any], kwargs: dict[str, Any]) -> Tensor:
    x, y = args[0], args[1]
    mode = kwargs.get("rounding_mode", args[2] if len(args) > 2 else None)
    dtype = result_dtype(node, x.dtype if isinstance(x, Tensor) else y.dtype)
    c = scalar_constant(y)
    if mode is not None:
        if c is not None:
            result = low.pointwise(f"div_{mode}#{constant_text(c)}", "div_mode", [x], dtype)
            if mode == "floor":
                _note_division(low, result, "div", x, c)
            return result
        return low.pointwise(f"div_{mode}", "div_mode", [x, y], dtype)
    values = rank_vector_fraction(y)
    if values is not None and all(values):
        return rank_weighted(low, x, [1 / v for v in values], dtype)
    if isinstance(x, Tensor) and isinstance(c, Fraction) and c != 0 and is_floating(x.dtype):
        return low.scaled(x, 1 / c, dtype)
    if isinstance(x, Tensor) and c is not None:
        return low.pointwise(f"divc#{constant_text(c)}", "divc", [x], dtype)
    cx = scalar_constant(x)
    if cx is not None and isinstance(y, Tensor):
        if isinstance(cx, Fraction) and is_floating(dtype):
            return (
                low.scaled(low.pointwise("reciprocal", "reciprocal", [y], dtype), cx)
                if cx
                else low.pointwise("cdiv#0", "cdiv", [y], dtype)
            )
        return low.pointwise(f"cdiv#{constant_text(cx)}", "cdiv", [y], dtype)
    both = isinstance(x, Tensor) and isinstance(y, Tensor) and is_floating(x.dtype) and is_floating(y.dtype)
    if both and isinstance(y.constant, Fraction) and y.constant != 0:
        return low.broadcast_to(low.scaled(x, 1 / y.constant, dtype), node.shape)
    from emerge.facts.ops.ranking import renormalised

    known = renormalised(low, x, y)
    return known if known is not None else low.pointwise("div", "div", [x, y], dtype)


def rank_weighted(low: Lowering, x: Tensor, values: list[Fraction], dtype: str) -> Tensor:
    """``x`` times a constant per rank; where the constants add up to 1 over a block of the mesh it can be a partial sum."""
    body = "rank_weight#" + ",".join(map(str, values))
    iters = [axis(n, "p", d, a0=d) for d, n in enumerate(x.shape)]
    result = low.op(body, "rank_weight", [x], iters, x.shape, dtype)
    blocks = low.mesh.varying(values)
    if sum(values[r] for r in low.mesh.group_of(0, blocks)) == 1:
        low.op(
            body,
            "rank_weight",
            [x],
            iters,
            x.shape,
            dtype,
            form_of=result,
            relocation=("rank_weight", "sum"),
            group=blocks,
        )
    return result


@lowers("aten.pow", "operator.pow")
def power(low: Lowering, node: FamilyNode, args: list[Any], kwargs: dict[str, Any]) -> Tensor:
    x, y = args[0], args[1]
    cx, cy = scalar_constant(x), scalar_constant(y)
    if isinstance(x, Tensor) and cy is not None:
        dtype = result_dtype(node, x.dtype)
        if cy == 1:
            return x
        if cy == 2:
            return low.pointwise("square", "square", [x], dtype)
        return low.pointwise(f"powc#{constant_text(cy)}", "powc", [x], dtype)
    if cx is not None and isinstance(y, Tensor):
        return low.pointwise(f"cpow#{constant_text(cx)}", "cpow", [y], result_dtype(node, y.dtype))
    return low.pointwise("pow", "pow", [x, y], result_dtype(node, x.dtype))


def compare(low: Lowering, node: FamilyNode, args: list[Any], kwargs: dict[str, Any]) -> Tensor:
    name = node.op.split(".")[1].rstrip("_")
    x, y = args[0], args[1]
    if not isinstance(x, Tensor) or (scalar_constant(x) is not None and isinstance(y, Tensor)):
        x, y, name = y, x, SWAPPED[name]
    c = _constant_of(y)
    if c is not None and isinstance(x, Tensor):
        known = compare_two_valued(low, name, x, c)
        if known is not None:
            return low.broadcast_to(known, node.shape)
    c = scalar_constant(y)
    if isinstance(c, Fraction) and isinstance(x, Tensor) and is_integer(x.dtype):
        from emerge.facts.ops.blocks import compare_positions

        decided = compare_positions(low, name, x, c)
        if decided is not None:
            return low.broadcast_to(decided, node.shape)
    if c is not None or isinstance(y, RankVector):
        text = constant_text(c) if c is not None else str(y.values)
        # against a constant that a narrow type cannot hold the comparison wraps: those stay functions of their own
        suffix = "" if x.dtype == "int64" or not is_integer(x.dtype) else f".{x.dtype}"
        result = low.pointwise(f"{name}c#{text}{suffix}", f"{name}c{suffix}", [x], "bool")
        note_index(low, result, name, x, c if c is not None else y)
        return result
    if name not in ("eq", "ne") and isinstance(y, Tensor):
        return compared(low, name, x, y)
    return low.pointwise(name, name, [x, y], "bool", commutative=name in ("eq", "ne"))


for _name in COMPARE:
    lowers(f"aten.{_name}", f"operator.{_name}")(compare)


@lowers("aten.logical_not", "aten.logical_not_")
def logical_not(low: Lowering, node: FamilyNode, args: list[Any], kwargs: dict[str, Any]) -> Tensor:
    x = args[0]
    return negated(low, x) if x.dtype == "bool" else low.pointwise("not", "not", [x], "bool")


@lowers("aten.bitwise_not")
def bitwise_not(low: Lowering, node: FamilyNode, args: list[Any], kwargs: dict[str, Any]) -> Tensor:
    x = args[0]
    return negated(low, x) if x.dtype == "bool" else low.pointwise("bitnot", "bitnot", [x], x.dtype)


def logic(low: Lowering, node: FamilyNode, args: list[Any], kwargs: dict[str, Any]) -> Tensor:
    name = node.op.split(".")[1].strip("_")
    x, y = args[0], args[1]
    if not (isinstance(x, Tensor) and isinstance(y, Tensor)):
        raise Unsupported("logic with a Python scalar")
    short = "and" if "and" in name else "xor" if "xor" in name else "or"
    if name.startswith("logical") or (x.dtype == "bool" and y.dtype == "bool"):
        if x.dtype != "bool" or y.dtype != "bool":
            return low.pointwise(f"logical_{short}", "logical", [x, y], "bool")
        for held, other in ((x, y), (y, x)):
            if held.constant is not None and short != "xor":
                # True and y is y, False and y is False; likewise for or
                spread = low.broadcast_to(other, node.shape)
                decided = bool(held.constant) == (short == "or")
                return low.constant(bool(held.constant), spread.shape, "bool") if decided else spread
        return low.pointwise(short, short, [x, y], "bool", commutative=short != "xor")
    return low.pointwise(f"bit{short}", "bit", [x, y], result_dtype(node, x.dtype))


for _name in (
    "bitwise_and",
    "bitwise_or",
    "bitwise_xor",
    "logical_and",
    "logical_or",
    "logical_xor",
    "__or__",
    "__and__",
):
    lowers(f"aten.{_name}")(logic)


@lowers("aten.maximum", "aten.minimum", "aten.remainder", "aten.fmod", "aten.floor_divide", "aten.atan2")
def other_binary(low: Lowering, node: FamilyNode, args: list[Any], kwargs: dict[str, Any]) -> Tensor:
    name = node.op.split(".")[1]
    x, y = args[0], args[1]
    c = scalar_constant(y)
    if isinstance(x, Tensor) and c is not None:
        result = low.pointwise(f"{name}c#{constant_text(c)}", f"{name}c", [x], result_dtype(node, x.dtype))
        if name in ("remainder", "floor_divide"):
            _note_division(low, result, "mod" if name == "remainder" else "div", x, c)
        return result
    if not (isinstance(x, Tensor) and isinstance(y, Tensor)):
        raise Unsupported("an operand is a constant")
    return low.pointwise(name, name, [x, y], result_dtype(node, x.dtype), commutative=name in ("maximum", "minimum"))


def _note_division(low: Lowering, result: Tensor, how: str, x: Tensor, divisor: Fraction | float) -> None:
    """Quotients (rounded down) and remainders of integers by a constant."""
    if x.dtype != "int64" or result.dtype != "int64" or not isinstance(divisor, Fraction) or divisor.denominator != 1:
        return
    note_index(low, result, how, x, divisor)
    if how == "div":
        note_quotient(low, result, x, int(divisor))


def choice(low: Lowering, mask: Tensor, held: bool, free: bool, shape: Sequence[int]) -> Tensor:
    """The truth value ``held`` where the mask holds and ``free`` elsewhere: the mask, its negation, or a constant."""
    if held == free:
        return low.constant(held, shape, "bool")
    return low.broadcast_to(mask if held else negated(low, mask), shape)


def _joint(x: Sequence[int], mask: Sequence[int]) -> list[int]:
    """The shape of two tensors of which the second has no more dimensions."""
    lead = len(x) - len(mask)
    return [n if d < lead or mask[d - lead] == 1 else mask[d - lead] for d, n in enumerate(x)]


def fill(low: Lowering, x: Tensor, mask: Tensor, value: Fraction | float, dtype: str) -> Tensor:
    """``value`` where the mask holds, ``x`` elsewhere.

    Zeros written into a look-up may as well be written into its one-hot operand: that form is noted too.
    """
    if isinstance(mask.constant, Fraction) and mask.constant == 0 and len(mask.shape) <= len(x.shape):
        return low.broadcast_to(low.retyped(x, dtype), _joint(x.shape, mask.shape))
    if value == 0 and mask.shape == x.shape:
        # rearrangements commute with pointwise operators; taken off, the look-up below them comes to light
        from emerge.facts.ops.layout import permute, view

        source = low.view_of.get(x.id)
        if source is not None:
            return view(low, fill(low, source, view(low, mask, source.shape), value, dtype), x.shape)
        permuted = low.permute_of.get(x.id)
        if permuted is not None:
            source, order = permuted
            back = [order.index(d) for d in range(len(order))]
            return permute(low, fill(low, source, permute(low, mask, back), value, dtype), order)
    if dtype == "bool" and x.constant is not None:
        return choice(low, mask, bool(value), bool(x.constant), x.shape)
    result = low.pointwise(f"fill#{constant_text(value)}", "fill0" if value == 0 else "fill", [x, mask], dtype)
    note_index(low, result, "fill", x, value)
    found = low.lookup_of.get(x.id)
    if value == 0 and found is not None:
        hot, table, iters = found
        spread = _mask_of_hot(low, x, mask, hot, iters)
        if spread is not None:
            masked = low.pointwise(f"fill#{constant_text(value)}", "fill0", [hot, spread], hot.dtype)
            form = low.form("dot", "dot", [masked, table], iters, result)
            if form is not None:
                low.base.add("masked_lookup_form", form, low.op_of[result.id])
    return result


def _mask_of_hot(low: Lowering, x: Tensor, mask: Tensor, hot: Tensor, iters: list[Iter]) -> Tensor | None:
    """``mask``, which broadcasts to the look-up's result, laid out for its one-hot operand [*index, positions].

    None where the mask varies along a dimension that the one-hot operand does not have.
    """
    from emerge.facts.ops.layout import permute, view

    lead = len(x.shape) - len(mask.shape)
    if lead < 0:
        return None
    place: dict[int, int] = {}
    for d, n in enumerate(mask.shape):
        if n == 1:
            continue
        in_hot = [t.d for k, ties in iters[d + lead].args if k == 0 for t in ties]
        if not in_hot:
            return None
        place[in_hot[0]] = d
    dense = view(low, mask, [n for n in mask.shape if n != 1])
    order = sorted(place)
    kept = sorted(place.values())
    moved = permute(low, dense, [kept.index(place[h]) for h in order])
    return view(low, moved, [hot.shape[h] if h in place else 1 for h in range(len(hot.shape))])


@lowers("aten.masked_fill", "aten.masked_fill_")
def masked_fill(low: Lowering, node: FamilyNode, args: list[Any], kwargs: dict[str, Any]) -> Tensor:
    x, mask, value = args[0], args[1], args[2]
    c = scalar_constant(value)
    if c is None:
        if not isinstance(value, Tensor):
            raise Unsupported("fills with a value that differs between ranks")
        return low.pointwise("where", "where", [mask, value, x], x.dtype)
    return fill(low, x, mask, c, x.dtype)


@lowers("aten.where")
def where(low: Lowering, node: FamilyNode, args: list[Any], kwargs: dict[str, Any]) -> Tensor:
    if len(args) < 3:
        raise Unsupported("where with one argument has a data-dependent shape")
    cond, a, b = args[0], args[1], args[2]
    dtype = result_dtype(node, "float32")
    ca = _constant_of(a)
    cb = _constant_of(b)
    if ca is not None and cb is not None:
        return select(low, cond, ca, cb, node.shape, dtype)
    if ca is not None and isinstance(b, Tensor):
        return low.broadcast_to(fill(low, b, cond, ca, dtype), node.shape)
    if cb is not None and isinstance(a, Tensor):
        return low.broadcast_to(fill(low, a, negated(low, cond), cb, dtype), node.shape)
    return low.pointwise("where", "where", [cond, a, b], dtype)


def _constant_of(value: Any) -> Fraction | float | None:
    """The constant of a scalar or of a tensor all of whose elements are equal."""
    if isinstance(value, Tensor):
        return value.constant
    return scalar_constant(value)


@lowers("aten.lerp", "aten.lerp_")
def lerp(low: Lowering, node: FamilyNode, args: list[Any], kwargs: dict[str, Any]) -> Tensor:
    w = scalar_constant(args[2])
    if not isinstance(w, Fraction):
        raise Unsupported("lerp with a tensor weight")
    return low.pointwise("add", "add", [low.scaled(args[0], 1 - w), low.scaled(args[1], w)], args[0].dtype)


@lowers("aten.addcmul", "aten.addcmul_", "aten.addcdiv", "aten.addcdiv_")
def addcmul(low: Lowering, node: FamilyNode, args: list[Any], kwargs: dict[str, Any]) -> Tensor:
    value = scalar_constant(kwargs.get("value", args[3] if len(args) > 3 else 1))
    if not isinstance(value, Fraction):
        raise Unsupported("its value is not a number")
    name = "mul" if "mul" in node.op else "div"
    product = low.pointwise(name, name, [args[1], args[2]], args[0].dtype)
    return low.pointwise("add", "add", [args[0], low.scaled(product, value)], args[0].dtype)


def converted(low: Lowering, x: Tensor, dtype: str) -> Tensor:
    """Integers or truth values as floating numbers.

    Truth values are exact in every floating type and have one body; a narrow type may round integers (positions in
    bfloat16), so these keep the type.
    """
    body = "cast#float" if x.dtype == "bool" else f"cast#{dtype}"
    return low.retyped(low.pointwise(body, "convert", [x], dtype), dtype)


@lowers(
    "aten._to_copy", "aten.to", "aten.type_as", "aten.float", "aten.half", "aten.bfloat16", "prims.convert_element_type"
)
def cast(low: Lowering, node: FamilyNode, args: list[Any], kwargs: dict[str, Any]) -> Tensor:
    """Casts between floating types are identities for the verdict; all others are operators."""
    x = args[0]
    target = result_dtype(node, x.dtype)
    if target == x.dtype or (is_floating(target) and is_floating(x.dtype)):
        return low.retyped(x, target)
    if x.constant is not None and is_floating(target):
        return low.constant(x.constant, x.shape, target)
    if x.constant is not None and target == "bool":
        return low.constant(bool(x.constant), x.shape, target)
    if is_floating(target):
        return converted(low, x, target)
    known = two_valued(low, x) if target == "bool" else None
    if known is not None:
        return choice(low, known[0], bool(known[1]), bool(known[2]), x.shape)
    if is_integer(target) and target != "bool" and low.positions_below(x, target):
        return low.retyped(x, target)
    exact = x.dtype in ("int64", "bool") and target == "int64"
    result = low.pointwise(f"cast#{target}", "cast" if exact else "convert", [x], target)
    if exact:
        low.base.add("index_scalar", low.op_of[result.id], "times", (1, 0, 0))
    note_cast(low, result, x)
    return result


@lowers(
    "aten.clone",
    "aten.detach",
    "aten.alias",
    "aten.contiguous",
    "aten.lift_fresh_copy",
    "aten.lift_fresh",
    "aten.detach_copy",
    "_c10d_functional.wait_tensor",
    "aten.positive",
    "aten._conj",
    "aten.alias_copy",
    "c10d_functional.wait_tensor",
)
def same(low: Lowering, node: FamilyNode, args: list[Any], kwargs: dict[str, Any]) -> Any:
    return args[0]


@lowers("aten.copy", "aten.copy_")
def copy(low: Lowering, node: FamilyNode, args: list[Any], kwargs: dict[str, Any]) -> Tensor:
    """The value of the source, broadcast to the destination."""
    dst, src = args[0], args[1]
    if not isinstance(src, Tensor):
        raise Unsupported("copies a Python scalar")
    if not (src.dtype == dst.dtype or (is_floating(src.dtype) and is_floating(dst.dtype))):
        src = low.pointwise(f"cast#{dst.dtype}", "cast", [src], dst.dtype)
    return low.retyped(low.broadcast_to(src, dst.shape), dst.dtype)
