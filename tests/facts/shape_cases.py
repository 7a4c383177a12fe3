"""Random calls of every operator family with a shape rule, as (arguments, keyword arguments) with TensorType operands.

A case may be invalid now and then: PyTorch decides, and the rule has to agree.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

from emerge.facts.shape_rules import nn, pointwise
from emerge.graph.model import DType, TensorType, TypedConst

Call = tuple[list[Any], dict[str, Any]]
Case = Callable[[Random], Call]

FLOATS = ("float32", "float64", "float16", "bfloat16")
INTS = ("int64", "int32", "uint8", "int8")
ANY = (*FLOATS, *INTS, "bool")


def tensor(r: Random, *shape: int, dtypes: tuple[str, ...] = ("float32",)) -> TensorType:
    return TensorType(r.choice(dtypes), tuple(shape))


def size(r: Random) -> int:
    return r.choice((1, 2, 3, 4, 5, 6, 0) if r.random() < 0.15 else (1, 2, 3, 4, 5, 6))


def shape(r: Random, low: int = 0, high: int = 4) -> tuple[int, ...]:
    return tuple(size(r) for _ in range(r.randint(low, high)))


def dim(r: Random, rank: int) -> int:
    bound = max(rank, 1)
    return r.randrange(-bound, bound)


def broadcastable(r: Random, base: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(1 if r.random() < 0.25 else s for s in base[r.randint(0, len(base)) :])


def some_dims(r: Random, rank: int) -> list[int]:
    return [d - rank if r.random() < 0.5 else d for d in r.sample(range(rank), r.randint(1, rank))] if rank else []


# --- pointwise -----------------------------------------------------------------------------------------------------


def unary(dtypes: tuple[str, ...]) -> Case:
    return lambda r: ([tensor(r, *shape(r), dtypes=dtypes)], {})


def binary(dtypes: tuple[str, ...], scalar: bool = False) -> Case:
    def case(r: Random) -> Call:
        base = shape(r)
        left = tensor(r, *base, dtypes=dtypes)
        if scalar:
            return [left, r.choice((2, 2.5, True))], {}
        pair = [left, tensor(r, *broadcastable(r, base), dtypes=dtypes)]
        if r.random() < 0.5:
            pair.reverse()
        return list(pair), {}

    return case


def ternary(r: Random) -> Call:
    base = shape(r)
    return [tensor(r, *broadcastable(r, base), dtypes=FLOATS[:2]) for _ in range(3)], {}


def with_args(case: Case, *extra: Any) -> Case:
    def joined(r: Random) -> Call:
        args, kwargs = case(r)
        return [*args, *extra], kwargs

    return joined


def where(r: Random) -> Call:
    base = shape(r)
    condition = tensor(r, *broadcastable(r, base), dtypes=("bool",))
    return [condition, *(tensor(r, *broadcastable(r, base), dtypes=ANY) for _ in range(2))], {}


def masked_fill(r: Random) -> Call:
    base = shape(r)
    mask = tensor(r, *broadcastable(r, base), dtypes=("bool",))
    return [tensor(r, *base, dtypes=FLOATS), mask, r.choice((0, -1.5))], {}


def clamp(r: Random) -> Call:
    low, high = r.choice(((0, None), (None, 2.5), (-1, 1)))
    return [tensor(r, *shape(r), dtypes=(*FLOATS, *INTS)), low, high], {}


def copy(r: Random) -> Call:
    base = shape(r)
    return [tensor(r, *base, dtypes=ANY), tensor(r, *broadcastable(r, base), dtypes=ANY)], {}


POINTWISE: dict[str, Case] = {
    "div.Tensor": binary((*FLOATS, *INTS)),
    "div.Scalar": binary((*FLOATS, *INTS), scalar=True),
    "div.Tensor_mode": lambda r: (
        binary(("float32", "int64", "int32"))(r)[0],
        {"rounding_mode": r.choice((None, "floor", "trunc"))},
    ),
    "add.Scalar": binary((*FLOATS, *INTS), scalar=True),
    "mul.Scalar": binary((*FLOATS, *INTS), scalar=True),
    "sub.Scalar": binary((*FLOATS, *INTS), scalar=True),
    "rsub.Scalar": binary((*FLOATS, *INTS), scalar=True),
    "remainder.Scalar": binary((*FLOATS, *INTS), scalar=True),
    "fmod.Scalar": binary((*FLOATS, *INTS), scalar=True),
    "bitwise_and.Scalar": binary(INTS, scalar=True),
    "eq.Scalar": binary(ANY, scalar=True),
    "ge.Scalar": binary(ANY, scalar=True),
    "add_.Tensor": binary(FLOATS),
    "mul_.Tensor": binary(ANY),
    "sub_.Scalar": binary(FLOATS, scalar=True),
    "clamp_.default": clamp,
    "masked_fill_.Scalar": masked_fill,
    "pow.Tensor_Scalar": binary((*FLOATS, *INTS), scalar=True),
    "pow.Tensor_Tensor": binary((*FLOATS, *INTS)),
    "pow.Scalar": lambda r: ([r.choice((2, 2.5)), tensor(r, *shape(r), dtypes=(*FLOATS, *INTS))], {}),
    "clamp.default": clamp,
    "clamp.Tensor": lambda r: (binary(FLOATS)(r)[0], {}),
    "lerp.Scalar": with_args(lambda r: ([tensor(r, *(s := shape(r))), tensor(r, *broadcastable(r, s))], {}), 0.5),
    "lerp.Tensor": lambda r: ([tensor(r, *broadcastable(r, s)) for s in [shape(r)] for _ in range(3)], {}),
    "addcmul.default": ternary,
    "addcdiv.default": ternary,
    "addcmul_.default": ternary,
    "masked_fill.Scalar": masked_fill,
    "masked_fill.Tensor": lambda r: ([*masked_fill(r)[0][:2], tensor(r)], {}),
    "where.self": where,
    "where.ScalarOther": lambda r: ([*where(r)[0][:1], tensor(r, dtypes=ANY), r.choice((1, 2.5))], {}),
    "where.ScalarSelf": lambda r: ([where(r)[0][0], r.choice((1, 2.5)), tensor(r, dtypes=ANY)], {}),
    "copy.default": copy,
    "copy_.default": copy,
    "tril.default": lambda r: ([tensor(r, *shape(r, 2)), r.randint(-2, 2)], {}),
    "triu.default": lambda r: ([tensor(r, *shape(r, 2)), r.randint(-2, 2)], {}),
    "clamp_min.default": lambda r: ([tensor(r, *shape(r), dtypes=(*FLOATS, *INTS)), r.choice((1, 2.5))], {}),
    "clamp_max.Tensor": binary(FLOATS),
    "zero.default": unary(ANY),
    "isclose.default": binary(("float32",)),
    "add.Tensor": lambda r: (binary(ANY)(r)[0], {"alpha": 1}),
    "remainder.Scalar_Tensor": lambda r: ([r.choice((7, 2.5)), tensor(r, *shape(r), dtypes=FLOATS)], {}),
    "divide.Tensor": binary((*FLOATS, *INTS)),
    "clip.default": clamp,
    "_conj.default": unary(("complex64",)),
    "imag.default": unary(("complex64", "complex128")),
    "native_dropout.default": lambda r: ([tensor(r, *shape(r), dtypes=FLOATS), 0.5, True], {}),
    "frexp.Tensor": unary(("float32", "float64")),
    "log_sigmoid_forward.default": unary(("float32", "float64")),
    "exp.out": lambda r: ([tensor(r, *(s := shape(r)))], {"out": tensor(r, *s, dtypes=("float32", "float64"))}),
    "fill.Scalar": with_args(unary(ANY), 1),
    "dropout.default": with_args(unary(FLOATS), 0.5, False),
    "alpha_dropout.default": with_args(unary(FLOATS), 0.5, False),
    "feature_dropout.default": with_args(unary(FLOATS), 0.5, False),
    "threshold.default": with_args(unary(FLOATS), 0.5, 0),
    "gelu_backward.default": lambda r: ([tensor(r, *s) for s in [shape(r)] for _ in range(2)], {}),
    "threshold_backward.default": lambda r: ([*(tensor(r, *s) for s in [shape(r)] for _ in range(2)), 0], {}),
    "hardtanh_backward.default": lambda r: ([*(tensor(r, *s) for s in [shape(r)] for _ in range(2)), 0, 1], {}),
    "elu_backward.default": lambda r: (
        [tensor(r, *(s := shape(r))), 1, 1, 1, False, tensor(r, *s)],
        {},
    ),
    "leaky_relu_backward.default": lambda r: (
        [*(tensor(r, *s) for s in [shape(r)] for _ in range(2)), 0.1, False],
        {},
    ),
    "softplus_backward.default": lambda r: ([*(tensor(r, *s) for s in [shape(r)] for _ in range(2)), 1, 20], {}),
    "log_sigmoid_backward.default": lambda r: ([tensor(r, *s) for s in [shape(r)] for _ in range(3)], {}),
    "native_dropout_backward.default": lambda r: (
        [tensor(r, *(s := shape(r))), tensor(r, *s, dtypes=("bool",)), 2.0],
        {},
    ),
}

# --- reductions ----------------------------------------------------------------------------------------------------


def reduce_dims(dtypes: tuple[str, ...]) -> Case:
    def case(r: Random) -> Call:
        s = shape(r)
        return [tensor(r, *s, dtypes=dtypes), some_dims(r, len(s)), r.random() < 0.5], {}

    return case


def reduce_dim(dtypes: tuple[str, ...]) -> Case:
    def case(r: Random) -> Call:
        s = shape(r)
        return [tensor(r, *s, dtypes=dtypes), dim(r, len(s)), r.random() < 0.5], {}

    return case


def along(dtypes: tuple[str, ...], *extra: Any) -> Case:
    return lambda r: ([tensor(r, *(s := shape(r)), dtypes=dtypes), dim(r, len(s)), *extra], {})


def topk(r: Random) -> Call:
    s = shape(r)
    d = dim(r, len(s))
    return [tensor(r, *s), r.randint(0, s[d] if s else 1), d], {}


def sort(r: Random) -> Call:
    s = shape(r)
    return [tensor(r, *s, dtypes=ANY), dim(r, len(s)), True], {}


def softmax_backward(r: Random) -> Call:
    s = shape(r, 1)
    return [tensor(r, *s), tensor(r, *s), dim(r, len(s)), DType("float32")], {}


def cast(case: Case) -> Case:
    def with_dtype(r: Random) -> Call:
        args, kwargs = case(r)
        return args, {**kwargs, "dtype": DType(r.choice(("float32", "float64")))}

    return with_dtype


REDUCTIONS: dict[str, Case] = {
    "sum.default": unary(ANY),
    "sum.dim_IntList": reduce_dims(ANY),
    "nansum.default": reduce_dims(FLOATS),
    "mean.default": unary(FLOATS),
    "mean.dim": reduce_dims(FLOATS),
    "nanmean.default": reduce_dims(FLOATS[:2]),
    "prod.default": unary(ANY),
    "prod.dim_int": reduce_dim(ANY),
    "amax.default": reduce_dims(ANY),
    "amin.default": reduce_dims(ANY),
    "logsumexp.default": reduce_dims(("float32", "float64", "int64")),
    "all.default": unary(ANY),
    "any.dim": reduce_dim(ANY),
    "any.dims": lambda r: ([tensor(r, *(s := shape(r)), dtypes=ANY), some_dims(r, len(s))], {"keepdim": True}),
    "all.dims": lambda r: ([tensor(r, *shape(r), dtypes=ANY), r.choice((None, []))], {}),
    "argmax.default": reduce_dim((*FLOATS, *INTS)),
    "argmin.default": unary((*FLOATS, *INTS)),
    "count_nonzero.default": unary(ANY),
    "count_nonzero.dim_IntList": lambda r: (reduce_dims(ANY)(r)[0][:2], {}),
    "linalg_vector_norm.default": lambda r: (
        [tensor(r, *(s := shape(r)), dtypes=FLOATS), r.choice((1, 2, 3.0)), some_dims(r, len(s)), True],
        {},
    ),
    "norm.Scalar": with_args(unary(FLOATS[:2]), 2),
    "norm.ScalarOpt_dim": lambda r: ([tensor(r, *(s := shape(r))), 2, some_dims(r, len(s)), True], {}),
    "max.default": unary((*FLOATS, *INTS)),
    "max.dim": reduce_dim((*FLOATS, *INTS)),
    "min.other": binary((*FLOATS, *INTS)),
    "median.default": unary(("float32", "int64")),
    "nanmedian.dim": reduce_dim(("float32", "int64")),
    "mode.default": reduce_dim(("float32", "int64")),
    "kthvalue.default": lambda r: ([tensor(r, *(s := shape(r))), 1, dim(r, len(s)), True], {}),
    "aminmax.default": lambda r: ([tensor(r, *(s := shape(r)))], {"dim": dim(r, len(s)), "keepdim": True}),
    "var.default": with_args(unary(FLOATS[:2]), True),
    "var.dim": lambda r: ([tensor(r, *(s := shape(r))), some_dims(r, len(s)), True, r.random() < 0.5], {}),
    "var.correction": lambda r: (
        [tensor(r, *(s := shape(r))), some_dims(r, len(s))],
        {"correction": 0, "keepdim": True},
    ),
    "std.correction": lambda r: ([tensor(r, *(s := shape(r))), some_dims(r, len(s))], {"correction": 1}),
    "var_mean.correction": lambda r: ([tensor(r, *(s := shape(r))), some_dims(r, len(s))], {"correction": 0}),
    "std_mean.dim": lambda r: ([tensor(r, *(s := shape(r))), some_dims(r, len(s)), True, True], {}),
    "cumsum.default": along(ANY),
    "cumprod.default": along((*FLOATS, *INTS)),
    "logcumsumexp.default": along(FLOATS[:2]),
    "cummax.default": along((*FLOATS, *INTS)),
    "cummin.default": along((*FLOATS, *INTS)),
    "softmax.int": along(FLOATS),
    "log_softmax.int": cast(along(FLOATS)),
    "_safe_softmax.default": along(FLOATS),
    "special_softmax.int": along(FLOATS),
    "special_log_softmax.int": along(FLOATS),
    "_softmax.default": along(FLOATS, False),
    "_log_softmax.default": along(FLOATS, False),
    "_softmax_backward_data.default": softmax_backward,
    "_log_softmax_backward_data.default": softmax_backward,
    "topk.default": topk,
    "sort.default": sort,
    "sort.stable": lambda r: ([tensor(r, *(s := shape(r)))], {"stable": True, "dim": dim(r, len(s))}),
    "argsort.default": sort,
    "histc.default": lambda r: ([tensor(r, *shape(r)), r.randint(1, 9)], {}),
}

# --- layout --------------------------------------------------------------------------------------------------------


def view(r: Random) -> Call:
    s = tuple(r.choice((1, 2, 3, 4)) for _ in range(r.randint(1, 4)))
    wanted = list(s)
    r.shuffle(wanted)
    while len(wanted) > 1 and r.random() < 0.6:
        wanted[0:2] = [wanted[0] * wanted[1]]
    if r.random() < 0.5:
        wanted[r.randrange(len(wanted))] = -1
    return [tensor(r, *s, dtypes=ANY), wanted], {}


def expand(r: Random) -> Call:
    target = shape(r, 1)
    source = broadcastable(r, target)
    offset = len(target) - len(source)
    wanted = [-1 if i >= offset and r.random() < 0.2 and source[i - offset] != 1 else s for i, s in enumerate(target)]
    return [tensor(r, *source), wanted], {}


def permutation(r: Random) -> Call:
    s = shape(r)
    order = r.sample(range(len(s)), len(s))
    return [tensor(r, *s), [d - len(s) if r.random() < 0.4 else d for d in order]], {}


def two_dims(r: Random) -> Call:
    s = shape(r)
    return [tensor(r, *s), dim(r, len(s)), dim(r, len(s))], {}


def movedim(r: Random) -> Call:
    s = shape(r, 1)
    count = r.randint(1, len(s))
    return [tensor(r, *s), r.sample(range(len(s)), count), r.sample(range(len(s)), count)], {}


def flatten(r: Random) -> Call:
    s = shape(r)
    first, last = sorted((r.randrange(len(s) or 1), r.randrange(len(s) or 1)))
    return [tensor(r, *s), first, last], {}


def repeat(r: Random) -> Call:
    s = shape(r, 0, 3)
    return [tensor(r, *s), [r.randint(0, 3) for _ in range(len(s) + r.randint(0, 2))]], {}


LAYOUT: dict[str, Case] = {
    "view.default": view,
    "_unsafe_view.default": view,
    "view_copy.default": view,
    "reshape.default": view,
    "view.dtype": lambda r: (
        [tensor(r, *shape(r, 1), dtypes=ANY), DType(r.choice(("float32", "int32", "int8", "float64", "int16")))],
        {},
    ),
    "view_as.default": lambda r: ([tensor(r, 2, 6), tensor(r, *r.choice(((3, 4), (12,), (2, 2, 3))))], {}),
    "reshape_as.default": lambda r: ([tensor(r, 2, 6), tensor(r, *r.choice(((3, 4), (12,), (5,))))], {}),
    "expand.default": expand,
    "expand_copy.default": expand,
    "expand_as.default": lambda r: ([tensor(r, *broadcastable(r, s := shape(r))), tensor(r, *s)], {}),
    "permute.default": permutation,
    "permute_copy.default": permutation,
    "transpose.int": two_dims,
    "transpose_.default": two_dims,
    "transpose_copy.int": two_dims,
    "swapaxes.default": two_dims,
    "swapdims.default": two_dims,
    "t.default": lambda r: ([tensor(r, *shape(r))], {}),
    "t_copy.default": lambda r: ([tensor(r, *shape(r, 0, 2))], {}),
    "numpy_T.default": lambda r: ([tensor(r, *shape(r, 2, 2))], {}),
    "mT.default": lambda r: ([tensor(r, *shape(r, 2))], {}),
    "mH.default": lambda r: ([tensor(r, *shape(r, 2))], {}),
    "adjoint.default": lambda r: ([tensor(r, *shape(r, 2))], {}),
    "matrix_H.default": lambda r: ([tensor(r, *shape(r, 2, 2))], {}),
    "movedim.intlist": movedim,
    "moveaxis.int": two_dims,
    "squeeze.default": lambda r: ([tensor(r, *shape(r))], {}),
    "squeeze.dim": along(FLOATS),
    "squeeze.dims": lambda r: ([tensor(r, *(s := shape(r))), some_dims(r, len(s))], {}),
    "squeeze_.dim": along(FLOATS),
    "squeeze_copy.dim": along(FLOATS),
    "unsqueeze.default": lambda r: ([tensor(r, *(s := shape(r))), r.randint(-len(s) - 1, len(s))], {}),
    "unsqueeze_copy.default": lambda r: ([tensor(r, *(s := shape(r))), r.randint(-len(s) - 1, len(s))], {}),
    "flatten.using_ints": flatten,
    "unflatten.int": lambda r: ([tensor(r, 2, 12, 3), r.choice((1, -2)), r.choice(([3, 4], [-1, 2], [5, 2]))], {}),
    "repeat.default": repeat,
    "tile.default": lambda r: ([tensor(r, *shape(r, 0, 3)), [r.randint(0, 3) for _ in range(r.randint(0, 4))]], {}),
    "repeat_interleave.self_int": lambda r: (
        [tensor(r, *(s := shape(r, 1))), r.randint(0, 3), r.choice((None, dim(r, len(s))))],
        {},
    ),
    "repeat_interleave.Tensor": lambda r: ([tensor(r, 4, dtypes=("int64",))], {"output_size": 7}),
    "view_as_complex.default": lambda r: ([tensor(r, *shape(r), 2, dtypes=("float32", "float64"))], {}),
    "view_as_real.default": lambda r: ([tensor(r, *shape(r), dtypes=("complex64", "complex128"))], {}),
    "view_as_complex_copy.default": lambda r: ([tensor(r, *shape(r), 2)], {}),
    "view_as_real_copy.default": lambda r: ([tensor(r, *shape(r), dtypes=("complex64",))], {}),
    "flip.default": lambda r: ([tensor(r, *(s := shape(r, 1))), some_dims(r, len(s))], {}),
    "roll.default": lambda r: ([tensor(r, *(s := shape(r, 1))), [1], [dim(r, len(s))]], {}),
    "as_strided.default": lambda r: ([tensor(r, 6, 6), [2, 3], [6, 1]], {}),
    "as_strided_copy.default": lambda r: ([tensor(r, 6, 6), [2, 3], [6, 1]], {}),
    "diagonal.default": lambda r: ([tensor(r, *shape(r, 2)), r.randint(-7, 7), 0, -1], {}),
    "diagonal_copy.default": lambda r: ([tensor(r, *shape(r, 2)), r.randint(-3, 3), 0, 1], {}),
    "_reshape_copy.default": view,
    "_reshape_alias.default": lambda r: ([tensor(r, 2, 6), [3, 4], [4, 1]], {}),
}

# --- pieces --------------------------------------------------------------------------------------------------------

_BOUNDS = (None, 0, 1, 2, -1, -2, 7, -9, 2**63 - 1)


def slicing(r: Random) -> list[Any]:
    return [r.choice(_BOUNDS), r.choice(_BOUNDS), r.randint(1, 3)]


def sliced(r: Random) -> Call:
    s = shape(r, 1)
    return [tensor(r, *s, dtypes=ANY), dim(r, len(s)), *slicing(r)], {}


def slice_scatter(r: Random) -> Call:
    s = list(shape(r, 1))
    d, (start, end, step) = r.randrange(len(s)), slicing(r)
    part = [*s]
    part[d] = len(range(s[d])[slice(start, end, step)])
    return [tensor(r, *s), tensor(r, *part), d, start, end, step], {}


def slice_backward(r: Random) -> Call:
    args, _ = slice_scatter(r)
    start, end = (0 if args[3] is None else args[3]), (2**63 - 1 if args[4] is None else args[4])
    return [args[1], list(args[0].shape), args[2], start, end, args[5]], {}


def selected(r: Random) -> tuple[tuple[int, ...], int, int, tuple[int, ...]]:
    s = tuple(r.randint(1, 5) for _ in range(r.randint(1, 4)))
    d = dim(r, len(s))
    index, at = r.randrange(-s[d], s[d]), d % len(s)
    return s, d, index, s[:at] + s[at + 1 :]


def select(r: Random) -> Call:
    s, d, index, _ = selected(r)
    return [tensor(r, *s), d, index], {}


def select_scatter(r: Random) -> Call:
    s, d, index, rest = selected(r)
    return [tensor(r, *s), tensor(r, *rest), d, index], {}


def select_backward(r: Random) -> Call:
    s, d, index, rest = selected(r)
    return [tensor(r, *rest), list(s), d, index], {}


def narrow(r: Random) -> Call:
    s = shape(r, 1)
    d = dim(r, len(s))
    start = r.randint(0, s[d])
    return [tensor(r, *s), d, start, r.randint(0, s[d] - start)], {}


def split_with_sizes(r: Random) -> Call:
    s = shape(r, 1)
    d, rest, parts = r.randrange(len(s)), 0, []
    rest = s[d]
    while rest:
        parts.append(r.randint(1, rest))
        rest -= parts[-1]
    return [tensor(r, *s), parts or [0], d], {}


def split(r: Random) -> Call:
    s = shape(r, 1)
    return [tensor(r, *s), r.randint(1, 4), dim(r, len(s))], {}


def cat(r: Random) -> Call:
    s = list(shape(r, 1))
    d = dim(r, len(s))
    parts = []
    for _ in range(r.randint(1, 4)):
        s[d] = size(r)
        parts.append(tensor(r, *s, dtypes=ANY))
    if r.random() < 0.1:
        parts.insert(r.randint(0, len(parts)), tensor(r, 0))
    return [parts, d], {}


def stack(r: Random) -> Call:
    s = shape(r)
    return [[tensor(r, *s) for _ in range(r.randint(1, 4))], r.randint(-len(s) - 1, len(s))], {}


def pad(r: Random) -> Call:
    s = shape(r, 1)
    return [tensor(r, *s), [r.randint(-1, 3) for _ in range(2 * r.randint(0, len(s)))]], {}


def chunk_cat(r: Random) -> Call:
    tail = shape(r, 0, 2)
    return [[tensor(r, r.randint(1, 7), *tail) for _ in range(r.randint(1, 3))], 0, r.randint(1, 4)], {}


PIECES: dict[str, Case] = {
    "slice.Tensor": sliced,
    "slice_copy.Tensor": sliced,
    "slice_scatter.default": slice_scatter,
    "slice_backward.default": slice_backward,
    "select.int": select,
    "select_copy.int": select,
    "select_scatter.default": select_scatter,
    "select_backward.default": select_backward,
    "narrow.default": narrow,
    "narrow_copy.default": narrow,
    "split.Tensor": split,
    "split.sizes": split_with_sizes,
    "split_copy.Tensor": split,
    "unsafe_split.Tensor": split,
    "split_with_sizes.default": split_with_sizes,
    "split_with_sizes_copy.default": split_with_sizes,
    "unsafe_split_with_sizes.default": split_with_sizes,
    "chunk.default": split,
    "unsafe_chunk.default": split,
    "tensor_split.sections": split,
    "tensor_split.indices": lambda r: ([tensor(r, 7, 3), sorted(r.sample(range(9), 3)), 0], {}),
    "unbind.int": along(FLOATS),
    "unbind_copy.int": along(FLOATS),
    "cat.default": cat,
    "concat.default": cat,
    "concatenate.default": cat,
    "stack.default": stack,
    "_chunk_cat.default": chunk_cat,
    "constant_pad_nd.default": pad,
    "pad.default": pad,
}

# --- indexing ------------------------------------------------------------------------------------------------------

INDEX = ("int64",)


def indices(r: Random, s: tuple[int, ...]) -> tuple[list[TensorType | None], tuple[int, ...]]:
    block = shape(r, 1, 2)
    out: list[TensorType | None] = []
    for _ in range(r.randint(1, len(s))):
        out.append(None if r.random() < 0.3 else tensor(r, *broadcastable(r, block), dtypes=INDEX))
    if all(i is None for i in out):
        out[-1] = tensor(r, *block, dtypes=INDEX)
    return out, block


def index(r: Random) -> Call:
    s = shape(r, 1)
    return [tensor(r, *s), indices(r, s)[0]], {}


def index_mask(r: Random) -> Call:
    s = shape(r, 1)
    first = r.randint(0, len(s) - 1)
    mask = tensor(r, *s[first : first + r.randint(1, 2)], dtypes=("bool",))
    return [tensor(r, *s), [*[None] * first, mask]], {}


def index_put(r: Random) -> Call:
    args, _ = r.choice((index, index_mask))(r)
    return [*args, tensor(r, *r.choice(((), (1,), (4,)))), r.random() < 0.5], {}


def gather(r: Random) -> Call:
    s = shape(r, 0, 3)
    d = dim(r, len(s))
    wanted = [r.randint(0, x) for x in s]
    if s:
        wanted[d] = r.randint(1, 8)
    return [tensor(r, *s), d, tensor(r, *wanted, dtypes=INDEX)], {}


def scatter(r: Random, value: bool = False) -> Call:
    args, _ = gather(r)
    if value:
        return [*args, 1.0], {}
    return [*args, tensor(r, *(x + r.randint(0, 2) for x in args[2].shape))], {}


def index_vector(r: Random) -> Call:
    s = shape(r)
    return [tensor(r, *s), dim(r, len(s)), tensor(r, *r.choice(((4,), (1,), ())), dtypes=("int64", "int32"))], {}


def index_add(r: Random) -> Call:
    s = list(shape(r, 1))
    d = r.randrange(len(s))
    source = [*s]
    source[d] = 3
    return [tensor(r, *s), d, tensor(r, 3, dtypes=INDEX), tensor(r, *source)], {}


INDEXING: dict[str, Case] = {
    "index.Tensor": lambda r: r.choice((index, index_mask))(r),
    "_unsafe_index.Tensor": index,
    "index_put.default": index_put,
    "index_put_.default": index_put,
    "_unsafe_index_put.default": index_put,
    "_index_put_impl_.default": index_put,
    "gather.default": gather,
    "scatter.src": scatter,
    "scatter.value": lambda r: scatter(r, value=True),
    "scatter_.value": lambda r: scatter(r, value=True),
    "scatter.reduce": lambda r: (scatter(r)[0], {"reduce": "add"}),
    "scatter_add.default": scatter,
    "scatter_reduce.two": with_args(scatter, "sum"),
    "index_select.default": index_vector,
    "index_add.default": index_add,
    "index_copy.default": index_add,
    "index_fill.int_Scalar": with_args(index_vector, 1.0),
    "take.default": lambda r: ([tensor(r, *shape(r)), tensor(r, *shape(r), dtypes=INDEX)], {}),
    "take_along_dim.default": lambda r: ([tensor(r, 3, 4), tensor(r, r.choice((1, 3)), 2, dtypes=INDEX), 1], {}),
    "embedding.default": lambda r: ([tensor(r, 7, 3), tensor(r, *shape(r), dtypes=("int64", "int32"))], {}),
    "embedding_dense_backward.default": lambda r: (
        [tensor(r, *(s := shape(r)), 5), tensor(r, *s, dtypes=INDEX), 7, -1, False],
        {},
    ),
    "one_hot.default": lambda r: ([tensor(r, *shape(r), dtypes=INDEX), 9], {}),
    "nonzero.default": lambda r: ([tensor(r, *shape(r))], {}),
    "argwhere.default": lambda r: ([tensor(r, *shape(r))], {}),
    "masked_select.default": lambda r: ([tensor(r, *(s := shape(r))), tensor(r, *s, dtypes=("bool",))], {}),
    "masked_scatter.default": lambda r: (
        [tensor(r, *(s := shape(r))), tensor(r, *broadcastable(r, s), dtypes=("bool",)), tensor(r, *s)],
        {},
    ),
    "bucketize.Tensor": lambda r: ([tensor(r, *shape(r)), tensor(r, 5)], {"out_int32": r.random() < 0.5}),
    "searchsorted.Tensor": lambda r: ([tensor(r, 5), tensor(r, *shape(r, 1))], {"out_int32": r.random() < 0.5}),
}

# --- contractions --------------------------------------------------------------------------------------------------


def mm(r: Random, batch: int | None = None, addend: bool = False) -> Call:
    n, k, m, dtype = size(r), size(r), size(r), (r.choice(FLOATS),)
    lead = () if batch is None else (batch,)
    operands = [tensor(r, *lead, n, k, dtypes=dtype), tensor(r, *lead, k, m, dtypes=dtype)]
    if addend:
        operands.insert(0, tensor(r, *broadcastable(r, (*lead, n, m)), dtypes=dtype))
    return operands, {}


def matmul(r: Random) -> Call:
    k, lead = size(r), shape(r, 0, 2)
    left = (k,) if r.random() < 0.2 else (*broadcastable(r, lead), size(r), k)
    right = (k,) if r.random() < 0.2 else (*broadcastable(r, lead), k, size(r))
    return [tensor(r, *left), tensor(r, *right)], {}


def linear(r: Random) -> Call:
    k, n = size(r), size(r)
    bias = tensor(r, n) if r.random() < 0.5 else None
    return [tensor(r, *shape(r, 0, 2), k), tensor(r, n, k), bias], {}


def einsum(r: Random) -> Call:
    sizes = {c: r.randint(1, 5) for c in "abcdij"}
    equation = r.choice(("ab,bc->ac", "abc,dc->abd", "...ij,...ja->...ia", "ab,ab", "bij,bja->bia", "ii->i", "a,b"))
    extra = shape(r, 0, 2)
    operands = []
    for term in equation.split("->")[0].split(","):
        lead = extra if "..." in term else ()
        operands.append(tensor(r, *lead, *(sizes[c] for c in term.replace(".", ""))))
    return [equation, operands], {}


def convolution(spatial: int) -> Case:
    def case(r: Random) -> Call:
        groups, lead = r.choice((1, 2)), () if r.random() < 0.2 else (2,)
        operand = tensor(r, *lead, 2 * groups, *(r.randint(5, 9) for _ in range(spatial)))
        weight = tensor(r, 3 * groups, 2, *(r.randint(1, 3) for _ in range(spatial)))
        return [operand, weight, None, [r.randint(1, 2)], [r.randint(0, 2)], [r.randint(1, 2)], groups], {}

    return case


def general_convolution(r: Random) -> Call:
    transposed = r.random() < 0.5
    operand = tensor(r, 2, 4, r.randint(5, 9))
    weight = tensor(r, 4, 3, 2) if transposed else tensor(r, 6, 4, 2)
    extra = [1] if transposed else [0]
    return [operand, weight, None, [2], [1], [1], transposed, extra, 1], {}


def grouped_mm(r: Random) -> Call:
    k, n, groups, rows = 16, 8, r.randint(1, 3), r.choice((8, 16))
    offsets = tensor(r, groups, dtypes=("int32",))
    left, right = r.choice((((rows, k), (groups, k, n)), ((groups, rows, k), (k, 24)), ((rows, k), (k, n))))
    return [tensor(r, *left, dtypes=("bfloat16",)), tensor(r, *right, dtypes=("bfloat16",)), offsets], {}


CONTRACTIONS: dict[str, Case] = {
    "mm.default": mm,
    "bmm.default": lambda r: mm(r, batch=r.randint(1, 3)),
    "addmm.default": lambda r: mm(r, addend=True),
    "baddbmm.default": lambda r: mm(r, batch=r.randint(1, 3), addend=True),
    "matmul.default": matmul,
    "linear.default": linear,
    "dot.default": lambda r: ([tensor(r, 5), tensor(r, 5)], {}),
    "vdot.default": lambda r: ([tensor(r, 5), tensor(r, 5)], {}),
    "mv.default": lambda r: ([tensor(r, size(r), 5), tensor(r, 5)], {}),
    "outer.default": lambda r: ([tensor(r, size(r)), tensor(r, size(r))], {}),
    "ger.default": lambda r: ([tensor(r, size(r)), tensor(r, size(r))], {}),
    "tensordot.default": lambda r: ([tensor(r, 2, 3, 4), tensor(r, 4, 5, 3), [1, -1], [2, 0]], {}),
    "einsum.default": einsum,
    "_grouped_mm.default": grouped_mm,
    "_int_mm.default": lambda r: ([tensor(r, 32, 16, dtypes=("int8",)), tensor(r, 16, 8, dtypes=("int8",))], {}),
    "conv1d.default": convolution(1),
    "conv2d.default": convolution(2),
    "conv3d.default": convolution(3),
    "convolution.default": general_convolution,
    "_convolution.default": with_args(general_convolution, False, False, False, False),
}

# --- composites ----------------------------------------------------------------------------------------------------


def norm_operands(r: Random) -> tuple[TensorType, list[int], TensorType | None, TensorType | None]:
    s = shape(r, 1)
    tail = s[r.randrange(len(s)) :]
    affine = r.random() < 0.6
    return (
        tensor(r, *s),
        list(tail),
        tensor(r, *tail) if affine else None,
        tensor(r, *tail) if affine else None,
    )


def layer_norm(r: Random) -> Call:
    return [*norm_operands(r), 1e-5], {}


def rms_norm(r: Random) -> Call:
    return [*norm_operands(r)[:3], 1e-5], {}


def layer_norm_backward(r: Random) -> Call:
    operand, tail, weight, bias = norm_operands(r)
    lead = operand.shape[: len(operand.shape) - len(tail)]
    statistic = tensor(r, *lead, *[1] * len(tail))
    used = [True, weight is not None, bias is not None]
    return [operand, operand, tail, statistic, statistic, weight, bias, used], {}


def attention(r: Random, rank: int | None = None, grouped: bool = False) -> Call:
    lead = (2, 4) if rank else shape(r, 0, 2)
    few = (2, 2) if grouped else lead
    q, k, e = r.randint(1, 5), r.randint(1, 5), 8
    v = e if rank else r.choice((e, 6))
    return [tensor(r, *lead, q, e), tensor(r, *few, k, e), tensor(r, *few, k, v)], {}


def masked_attention(r: Random) -> Call:
    args, _ = attention(r)
    mask = r.choice((None, tensor(r, args[0].shape[-2], args[1].shape[-2])))
    return [*args, mask], {}


def grouped_attention(r: Random) -> Call:
    return attention(r, grouped=True, rank=4)[0], {"enable_gqa": True}


def flash_backward(r: Random) -> Call:
    (query, key, value), _ = attention(r, rank=4)
    return [query, query, key, value, query, tensor(r, *query.shape[:3]), 0.0, False], {}


def class_scores(r: Random) -> tuple[TensorType, TensorType]:
    batch = () if r.random() < 0.2 else (r.randint(1, 5),)
    return tensor(r, *batch, 7), tensor(r, *batch, dtypes=INDEX)


def nll(r: Random) -> Call:
    return [*class_scores(r), r.choice((None, tensor(r, 7))), r.randint(0, 2), -100], {}


def nll_backward(r: Random) -> Call:
    scores, target = class_scores(r)
    reduction = r.randint(0, 2)
    grad = tensor(r) if reduction else tensor(r, *scores.shape[:-1])
    return [grad, scores, target, None, reduction, -100, tensor(r)], {}


def cross_entropy(r: Random) -> Call:
    rest = shape(r, 0, 2)
    lead = () if r.random() < 0.2 else (r.randint(1, 4),)
    rest = rest if lead else ()
    scores = tensor(r, *lead, 7, *rest)
    target = scores if r.random() < 0.3 else tensor(r, *lead, *rest, dtypes=INDEX)
    return [scores, target, r.choice((None, tensor(r, 7))), r.randint(0, 2)], {}


def loss(position: int) -> Case:
    def case(r: Random) -> Call:
        s = shape(r)
        return [tensor(r, *s), tensor(r, *s), *[None] * (position - 2), r.randint(0, 2)], {}

    return case


COMPOSITES: dict[str, Case] = {
    "layer_norm.default": layer_norm,
    "native_layer_norm.default": layer_norm,
    "native_layer_norm_backward.default": layer_norm_backward,
    "rms_norm.default": rms_norm,
    "_fused_rms_norm.default": rms_norm,
    "group_norm.default": lambda r: (
        [tensor(r, 2, 6, *shape(r, 1, 2)), r.choice((2, 3)), tensor(r, 6), tensor(r, 6)],
        {},
    ),
    "native_group_norm.default": lambda r: ([tensor(r, 2, 6, 5), tensor(r, 6), tensor(r, 6), 2, 6, 5, 3, 1e-5], {}),
    "scaled_dot_product_attention.default": lambda r: r.choice((masked_attention, grouped_attention))(r),
    "_scaled_dot_product_attention_math.default": masked_attention,
    "_scaled_dot_product_flash_attention.default": lambda r: attention(r, rank=4),
    "_scaled_dot_product_flash_attention_for_cpu.default": lambda r: attention(r, rank=4),
    "_scaled_dot_product_efficient_attention.default": lambda r: ([*attention(r, rank=4)[0], None, True], {}),
    "_scaled_dot_product_cudnn_attention.default": lambda r: ([*attention(r, rank=4)[0], None, True], {}),
    "_scaled_dot_product_fused_attention_overrideable.default": lambda r: attention(r, rank=4),
    "_scaled_dot_product_flash_attention_for_cpu_backward.default": flash_backward,
    "nll_loss_forward.default": nll,
    "nll_loss.default": nll,
    "nll_loss_nd.default": nll,
    "nll_loss_backward.default": nll_backward,
    "cross_entropy_loss.default": cross_entropy,
    "mse_loss_backward.default": lambda r: ([tensor(r), *loss(2)(r)[0][:2], 1], {}),
    "smooth_l1_loss_backward.default": lambda r: ([tensor(r), *loss(2)(r)[0][:2], 1, 1.0], {}),
    "huber_loss_backward.default": lambda r: ([tensor(r), *loss(2)(r)[0][:2], 1, 1.0], {}),
    "cosine_similarity.default": lambda r: ([tensor(r, *(s := shape(r, 2))), tensor(r, *s), dim(r, len(s))], {}),
    "glu.default": lambda r: ([tensor(r, 4, 6, 3), r.choice((0, 1, -2))], {}),
}

# --- creation ------------------------------------------------------------------------------------------------------


def sized(r: Random) -> Call:
    return [list(shape(r))], {} if r.random() < 0.5 else {"dtype": DType(r.choice(ANY))}


def like(r: Random) -> Call:
    return [tensor(r, *shape(r), dtypes=FLOATS)], {} if r.random() < 0.5 else {"dtype": DType(r.choice(FLOATS))}


def new(r: Random) -> Call:
    return [tensor(r, *shape(r), dtypes=FLOATS), list(shape(r))], {}


def arange(arguments: int) -> Case:
    def case(r: Random) -> Call:
        end = r.choice((5, 7, 5.5))
        start, step = r.choice((0, 2, 1.5)), r.choice((1, 2, 0.5))
        args = [[end], [start, end], [start, end, step]][arguments - 1]
        if arguments == 3 and r.random() < 0.3:
            args = [end, start, -step]
        return args, {} if r.random() < 0.6 else {"dtype": DType(r.choice(("float32", "int64")))}

    return case


CREATION: dict[str, Case] = {
    "empty.memory_format": sized,
    "zeros.default": sized,
    "ones.default": sized,
    "rand.default": lambda r: ([list(shape(r))], {}),
    "randn.default": lambda r: ([list(shape(r))], {}),
    "empty_strided.default": lambda r: ([[2, 3], [3, 1]], {}),
    "empty_permuted.default": lambda r: ([[2, 3], [1, 0]], {}),
    "full.default": lambda r: ([list(shape(r)), r.choice((1, 1.5, True))], {}),
    "empty_like.default": like,
    "zeros_like.default": like,
    "ones_like.default": like,
    "full_like.default": lambda r: ([*like(r)[0], 1], {}),
    "rand_like.default": like,
    "randn_like.default": like,
    "randint_like.default": lambda r: ([*like(r)[0], 5], {}),
    "new_empty.default": new,
    "new_zeros.default": new,
    "new_ones.default": new,
    "new_full.default": with_args(new, 1),
    "new_empty_strided.default": lambda r: ([tensor(r), [2, 3], [3, 1]], {}),
    "randint.default": lambda r: ([5, list(shape(r))], {}),
    "randint.low": lambda r: ([2, 5, list(shape(r))], {}),
    "scalar_tensor.default": lambda r: ([r.choice((1, 1.5))], {}),
    "arange.default": arange(1),
    "arange.start": arange(2),
    "arange.start_step": arange(3),
    "linspace.default": lambda r: ([0, 1, r.randint(0, 5)], {}),
    "logspace.default": lambda r: ([0, 1, r.randint(0, 5)], {}),
    "eye.default": lambda r: ([r.randint(0, 5)], {}),
    "eye.m": lambda r: ([r.randint(0, 5), 3], {}),
    "to.device": lambda r: ([tensor(r, *shape(r)), TypedConst("device", "cpu"), DType(r.choice(FLOATS))], {}),
    "randperm.default": lambda r: ([r.randint(0, 5)], {}),
    "to.dtype": lambda r: ([tensor(r, *shape(r), dtypes=ANY), DType(r.choice(ANY))], {}),
    "to.other": lambda r: ([tensor(r, *shape(r), dtypes=ANY), tensor(r, dtypes=ANY)], {}),
    "_to_copy.default": lambda r: ([tensor(r, *shape(r), dtypes=ANY)], {"dtype": DType(r.choice(ANY))}),
    "type_as.default": lambda r: ([tensor(r, *shape(r), dtypes=ANY), tensor(r, dtypes=ANY)], {}),
}

# --- lists ---------------------------------------------------------------------------------------------------------


def lists(count: int, *extra: Any) -> Case:
    def case(r: Random) -> Call:
        shapes = [shape(r) for _ in range(r.randint(1, 3))]
        return [*([tensor(r, *s) for s in shapes] for _ in range(count)), *extra], {}

    return case


FOREACH: dict[str, Case] = {
    "_foreach_add.List": lists(2),
    "_foreach_add.Scalar": lists(1, 2.0),
    "_foreach_mul.Scalar": lists(1, 2.0),
    "_foreach_sqrt.default": lists(1),
    "_foreach_addcmul.Scalar": lists(3, 0.5),
    "_foreach_lerp.Scalar": lists(2, 0.5),
}

_NAMED = {name.split(".")[0] for t in (POINTWISE,) for name in t}


def _overload(name: str, second: bool) -> str:
    return f"{name}.{'Tensor' if second else 'default'}"


def _pointwise_tables() -> dict[str, Case]:
    """A case for every operator of the pointwise tables that has none above."""
    out: dict[str, Case] = {}
    for names, dtypes in (
        (pointwise.UNARY_SAME, FLOATS),
        (pointwise.UNARY_FLOATING, ("float32", "float64", "float16", "int64", "bool")),
        (pointwise.UNARY_BOOLEAN, (*FLOATS, *INTS)),
        (pointwise.UNARY_UNCERTAIN, FLOATS),
        ("abs absolute real imag angle", FLOATS[:2]),
    ):
        for name in names.split():
            out.setdefault(f"{name}.default", unary(("int64",) if name == "bitwise_not" else dtypes))
    for names in (pointwise.BINARY_PROMOTED, pointwise.BINARY_FLOATING, pointwise.BINARY_BOOLEAN):
        for name in names.split():
            integers = name.startswith(("bitwise", "__"))
            out.setdefault(f"{name}.Tensor", binary(INTS if integers else (*FLOATS, *INTS)))
    for name in pointwise.BACKWARD_PAIRS.split():
        out.setdefault(f"{name}.default", lambda r: ([tensor(r, *s) for s in [shape(r)] for _ in range(2)], {}))
    return out


def _losses() -> dict[str, Case]:
    return {f"{name}.default": loss(at) for name, at in nn.ELEMENTWISE_LOSSES.items()}


CASES: dict[str, Case] = {
    **{k: v for k, v in _pointwise_tables().items() if k.split(".")[0] not in _NAMED},
    **POINTWISE,
    **REDUCTIONS,
    **LAYOUT,
    **PIECES,
    **INDEXING,
    **CONTRACTIONS,
    **_losses(),
    **COMPOSITES,
    **CREATION,
    **FOREACH,
}
