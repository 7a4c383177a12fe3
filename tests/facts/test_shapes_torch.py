"""Shape rules against PyTorch: random calls of every operator with a rule, valid ones and slightly broken ones."""

from __future__ import annotations

import copy
import importlib
import warnings
from random import Random
from typing import Any

import pytest
from shape_cases import CASES

from emerge.facts.shape_rules import RULES
from emerge.facts.shape_rules.algebra import same_shape
from emerge.facts.shape_rules.promotion import fits
from emerge.facts.shapes import Spec, check_graph, infer
from emerge.graph.model import DType, Graph, Input, Node, Ref, TensorType, TypedConst
from emerge.util.errors import GraphError

torch = pytest.importorskip("torch")

_CALLS = 25
_BROKEN_CALLS = 40

#: rules of operators that do not run here (CUDA kernels) or yield no tensor; test_shapes.py has calls of these.
_NOT_RUN = {
    "_scaled_mm",
    "_scaled_dot_product_flash_attention_backward",
    "_scaled_dot_product_efficient_attention_backward",
    "sym_size",
    "sym_numel",
    "_local_scalar_dense",
    "item",
    "_assert_tensor_metadata",
    "_assert_async",
    "_assert_scalar",
    "_functional_assert_async",
    "sym_constrain_range",
    "sym_constrain_range_for_size",
}

#: kernels that read out of bounds instead of checking their operands, so broken calls must not be executed.
_UNSAFE = ("attention", "_grouped_mm")
_UNSAFE_BROKEN = (*_UNSAFE, "_backward", "_chunk_cat")

#: broken calls that PyTorch's eager kernels accept and the rule refuses: normalised shapes that do not fit, reductions
#: that do not exist, dimensions of tensors without elements, negative sizes and strides.
_STRICTER = {
    "cummax",
    "cummin",
    "expand",
    "expand_copy",
    "nll_loss_forward",
    "nll_loss",
    "nll_loss_nd",
    "_reshape_alias",
    "native_group_norm",
    "_fused_rms_norm",
    "l1_loss",
    "huber_loss",
    "kl_div",
    "soft_margin_loss",
    "binary_cross_entropy",
    "binary_cross_entropy_with_logits",
    "cross_entropy_loss",
}

#: broken calls that PyTorch refuses and the rule accepts, with the reason.
_LENIENT = {
    **dict.fromkeys(
        ("floor_divide", "div", "pow", "sub", "rsub", "sub_", "mul_", "clamp_", "isclose", "index_fill"),
        "refused for a dtype or a value (division by zero, negative power, boolean subtraction)",
    ),
    **dict.fromkeys(
        ("randint", "randint_like", "repeat_interleave", "take", "index_select"), "refused for a value or no elements"
    ),
    **dict.fromkeys(("as_strided", "as_strided_copy", "empty_strided", "new_empty_strided"), "strides and storage"),
    **dict.fromkeys(
        ("index", "_unsafe_index", "index_put", "index_put_", "_unsafe_index_put", "_index_put_impl_"),
        "masks, and positions in dimensions of size 0",
    ),
    **dict.fromkeys(("index_add", "index_copy", "roll"), "0-dimensional operands"),
    **dict.fromkeys(("soft_margin_loss", "binary_cross_entropy_with_logits"), "broadcasting kernels"),
    "linear": "biases of rank 2",
    "logsumexp": "an empty list of dimensions",
    "convolution": "output padding",
    "_convolution": "output padding",
}


def _operator(name: str) -> Any:
    base, overload = name.rsplit(".", 1)
    packet = getattr(torch.ops.aten, base)
    return getattr(packet, overload if overload in packet.overloads() else "default")


def _to_torch(value: Any, device: str) -> Any:
    if isinstance(value, TensorType):
        return torch.zeros(value.shape, dtype=getattr(torch, value.dtype), device=device)
    if isinstance(value, DType):
        return getattr(torch, value.name)
    if isinstance(value, TypedConst):
        return torch.device(device)
    return [_to_torch(v, device) for v in value] if isinstance(value, list) else value


def _types(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return TensorType(str(value.dtype).removeprefix("torch."), tuple(value.shape))
    return [_types(v) for v in value] if isinstance(value, (list, tuple)) else value


def _run(name: str, args: list[Any], kwargs: dict[str, Any], device: str) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        result = _operator(name)(*_to_torch(args, device), **{k: _to_torch(v, device) for k, v in kwargs.items()})
    return _types(result)


def _try(name: str, args: list[Any], kwargs: dict[str, Any], device: str) -> tuple[Any, Exception | None]:
    try:
        return _run(name, args, kwargs, device), None
    except Exception as error:
        return None, error


def _try_rule(name: str, args: list[Any], kwargs: dict[str, Any]) -> tuple[Any, GraphError | None]:
    try:
        return infer(f"aten.{name}", args, kwargs), None
    except GraphError as error:
        return None, error


def _agrees(computed: Any, actual: Any) -> bool:
    if isinstance(computed, Spec):
        return (
            isinstance(actual, TensorType)
            and same_shape(computed.shape, actual.shape)
            and fits(actual.dtype, computed.dtype)
        )
    if isinstance(computed, list):
        return (
            isinstance(actual, list)
            and len(actual) == len(computed)
            and all(c is None or _agrees(c, a) for c, a in zip(computed, actual))
        )
    return False


def _node_graph(name: str, args: list[Any], kwargs: dict[str, Any], result: Any) -> Graph:
    """One node with this call, its operands as graph inputs."""
    inputs: list[Input] = []

    def lift(value: Any) -> Any:
        if isinstance(value, TensorType):
            inputs.append(Input(f"x{len(inputs)}", value.dtype, value.shape))
            return Ref(inputs[-1].name)
        return [lift(v) for v in value] if isinstance(value, list) else value

    node = Node("y", f"aten.{name}", [lift(a) for a in args], {k: lift(v) for k, v in kwargs.items()})
    if isinstance(result, TensorType):
        node.dtype, node.shape = result.dtype, result.shape
    else:
        node.is_tuple = True
        node.elements = {i: r for i, r in enumerate(result) if isinstance(r, TensorType)}
    return Graph("g", inputs, [node], ["y"])


def _mutations(result: TensorType) -> list[TensorType]:
    out = [TensorType(result.dtype, (*result.shape, 2))]
    for i, size in enumerate(result.shape):
        assert isinstance(size, int)
        out.append(TensorType(result.dtype, (*result.shape[:i], size + 1, *result.shape[i + 1 :])))
    return out


@pytest.mark.parametrize("name", CASES)
def test_valid_calls_agree_with_meta_tensors(name: str) -> None:
    random, agreed = Random(f"valid {name}"), 0
    for _ in range(_CALLS):
        args, kwargs = CASES[name](random)
        actual, error = _try(name, args, kwargs, "meta")
        if error is not None and not any(part in name for part in _UNSAFE):
            actual, error = _try(name, args, kwargs, "cpu")
        if error is not None:
            continue
        computed, refused = _try_rule(name, args, kwargs)
        if refused is not None:
            # Meta kernels check less than real ones.
            assert _try(name, args, kwargs, "cpu")[1] is not None, f"{name}{args}{kwargs}: {refused}"
            continue
        if computed is None:
            continue
        assert _agrees(computed, actual), f"{name}{args}{kwargs}: computed {computed}, PyTorch {actual}"
        agreed += 1
        _require_mutations_detected(name, args, kwargs, computed, actual)
    assert agreed >= 3, f"only {agreed} of {_CALLS} calls of {name} compared"


def _require_mutations_detected(name: str, args: list[Any], kwargs: dict[str, Any], computed: Any, actual: Any) -> None:
    check_graph(_node_graph(name, args, kwargs, actual))
    results = list(zip(computed, actual)) if isinstance(computed, list) else [(computed, actual)]
    for index, (spec, result) in enumerate(results):
        if spec is None:
            continue
        for changed in _mutations(result):
            if same_shape(spec.shape, changed.shape):
                continue  # the size depends on data
            other = changed if isinstance(computed, Spec) else [*actual[:index], changed, *actual[index + 1 :]]
            with pytest.raises(GraphError, match=f"node 'y' .aten.{name}.*declares"):
                check_graph(_node_graph(name, args, kwargs, other))


def _is_empty(args: list[Any]) -> bool:
    return any(_is_empty(a) if isinstance(a, list) else isinstance(a, TensorType) and 0 in a.shape for a in args)


def _break(random: Random, args: list[Any]) -> list[Any]:
    """The same call with one operand's shape or one integer changed."""
    args = copy.deepcopy(args)
    places: list[tuple[list[Any], int]] = []

    def walk(container: list[Any]) -> None:
        for i, value in enumerate(container):
            if isinstance(value, list):
                walk(value)
            elif isinstance(value, TensorType) or (type(value) is int and abs(value) < 2**31):
                places.append((container, i))

    walk(args)
    if not places:
        return args
    container, i = random.choice(places)
    value = container[i]
    if isinstance(value, TensorType):
        shape, choice = list(value.shape), random.random()
        if choice < 0.5 and shape:
            shape[random.randrange(len(shape))] = random.choice((1, 2, 3, 7))
        elif choice < 0.75 or not shape:
            shape.insert(random.randint(0, len(shape)), random.choice((1, 3)))
        else:
            shape.pop(random.randrange(len(shape)))
        container[i] = TensorType(value.dtype, tuple(shape))
    else:
        container[i] = value + random.choice((-5, -1, 1, 5))
    return args


@pytest.mark.parametrize("name", [n for n in CASES if not any(part in n for part in _UNSAFE_BROKEN)])
def test_broken_calls_are_refused_as_by_pytorch(name: str) -> None:
    random, base = Random(f"broken {name}"), name.split(".")[0]
    for _ in range(_BROKEN_CALLS):
        args, kwargs = CASES[name](random)
        args = _break(random, args)
        actual, error = _try(name, args, kwargs, "cpu")
        computed, refused = _try_rule(name, args, kwargs)
        text = f"{name}{args}{kwargs}"
        if isinstance(error, NotImplementedError) or (error is not None and refused is None and _is_empty(args)):
            continue  # with no elements PyTorch refuses the zeros given as indices, and values without identity
        if error is not None:
            assert refused is not None or base in _LENIENT, f"{text}: computed {computed}, but PyTorch: {error}"
        elif refused is not None:
            assert base in _STRICTER or _is_empty(args), f"{text}: {refused}, but PyTorch yields {actual}"
        elif computed is not None and base not in _LENIENT:
            assert _agrees(computed, actual), f"{text}: computed {computed}, PyTorch {actual}"


def test_every_aten_rule_is_compared() -> None:
    named = {name.split(".")[0] for name in CASES}
    rules = {name.removeprefix("aten.") for name in RULES if name.startswith("aten.")}
    assert rules - named == _NOT_RUN


@pytest.mark.parametrize(
    ("name", "args"),
    [
        ("all_gather_into_tensor", [TensorType("float32", (3, 5)), 4, "0"]),
        ("reduce_scatter_tensor", [TensorType("float32", (8, 5)), "sum", 4, "0"]),
        ("all_reduce", [TensorType("float32", (8, 5)), "sum", "0"]),
        ("broadcast", [TensorType("float32", (8, 5)), 0, "0"]),
        ("all_to_all_single", [TensorType("float32", (6, 5)), [1, 4, 2], [2, 2, 2], "0"]),
        ("wait_tensor", [TensorType("float32", (8, 5))]),
        ("all_gather_into_tensor_coalesced", [[TensorType("float32", (3, 5)), TensorType("int64", (2,))], 4, "0"]),
        ("reduce_scatter_tensor_coalesced", [[TensorType("float32", (8, 5))], "sum", 4, "0"]),
    ],
)
def test_collectives_agree_with_meta_tensors(name: str, args: list[Any]) -> None:
    if not torch.distributed.is_available():
        pytest.skip("this PyTorch has no distributed package")
    importlib.import_module("torch.distributed._functional_collectives")
    operator = getattr(torch.ops._c10d_functional, name).default
    actual = _types(operator(*_to_torch(args, "meta")))
    assert _agrees(infer(f"_c10d_functional.{name}.default", args), actual)
