"""Evaluates a definition over any kind of tensor: torch tensors, lowered tensors, or whatever a backend brings.

The language has numbers, truth values, None, strings, lists and tensors. Loops run over lists and ranges only, so every
evaluation ends. Nothing of a file reaches Python's own evaluation.
"""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from emerge.kernels.operators import FUNCTIONS, binary
from emerge.kernels.syntax import Definition, Function

#: Bounds of one evaluation.
MAX_STEPS, MAX_CALLS, MAX_RANGE = 20_000, 16, 4096


class Backend(Protocol):
    """What an evaluation needs to know of tensors."""

    def is_tensor(self, value: Any) -> bool: ...

    def shape(self, value: Any) -> list[int]: ...

    def dtype(self, value: Any) -> str: ...

    def call(self, op: str, args: list[Any], kwargs: dict[str, Any]) -> Any:
        """The result of one operator; several results are a list."""
        ...


class NotApplicable(Exception):
    """The definition does not say what the operator computes for these arguments."""


class _Return(Exception):
    def __init__(self, value: Any) -> None:
        self.value = value


_SYMBOLS: dict[type[ast.AST], str] = {
    ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/", ast.Pow: "**", ast.MatMult: "@", ast.BitAnd: "&",
    ast.BitOr: "|", ast.FloorDiv: "//", ast.Mod: "%", ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">=",
    ast.Eq: "==", ast.NotEq: "!=", ast.Is: "is", ast.IsNot: "is not", ast.In: "in", ast.NotIn: "not in",
}  # fmt: skip
_PLAIN: dict[str, Callable[[Any, Any], Any]] = {
    "+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv, "//": operator.floordiv,
    "%": operator.mod, "<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge, "==": operator.eq,
    "!=": operator.ne, "&": operator.and_, "|": operator.or_,
}  # fmt: skip


def bind(function: Function, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments by parameter; absent ones are not in the result.

    Raises:
        NotApplicable: surplus or unknown arguments.
    """
    names = [p.name for p in function.parameters]
    if len(args) > len(names):
        raise NotApplicable(f"{function.name} takes {len(names)} arguments, {len(args)} are given")
    bound = dict(zip(names, args))
    for key, value in kwargs.items():
        if key not in names:
            raise NotApplicable(f"{function.name} has no parameter {key!r}")
        bound[key] = value
    return bound


def evaluate(definition: Definition, backend: Backend, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The composite's result: a tensor, or a list of them.

    Raises:
        NotApplicable: a condition of the contract does not hold, or an operation does not fit its operands.
    """
    run = _Evaluation(definition, backend)
    given = bind(definition.function, args, kwargs)
    try:
        return run.call(definition.function, given)
    except (TypeError, ValueError, IndexError, KeyError, ZeroDivisionError, OverflowError, AttributeError) as exc:
        raise NotApplicable(f"{definition.operator} at {run.place}: {exc}") from None


class Expressions:
    """Evaluates expressions in an environment."""

    def __init__(self, backend: Backend, file: str = "") -> None:
        self.backend = backend
        self.steps, self.depth = 0, 0
        self.file, self.place = file, file
        self.env: dict[str, Any] = {}
        self.helpers: Mapping[str, Function] = {}

    def expr(self, node: ast.expr) -> Any:
        self.steps += 1
        if self.steps > MAX_STEPS:
            raise NotApplicable(f"needs more than {MAX_STEPS} steps")
        method = getattr(self, f"_{type(node).__name__.lower()}", None)
        if method is None:
            raise NotApplicable(f"{type(node).__name__} is not in the language")
        return method(node)

    def _constant(self, node: ast.Constant) -> Any:
        return node.value

    def _name(self, node: ast.Name) -> Any:
        if node.id in self.env:
            return self.env[node.id]
        if node.id in ("inf", "pi"):
            return getattr(math, node.id)
        raise KeyError(f"{node.id} has no value")

    def _list(self, node: ast.List) -> Any:
        return [self.expr(e) for e in node.elts]

    def _tuple(self, node: ast.Tuple) -> Any:
        return [self.expr(e) for e in node.elts]

    def _ifexp(self, node: ast.IfExp) -> Any:
        return self.expr(node.body if self.truth(node.test) else node.orelse)

    def _boolop(self, node: ast.BoolOp) -> Any:
        value: Any = None
        for part in node.values:
            value = self._plain_truth(self.expr(part))
            if value != isinstance(node.op, ast.And):
                break
        return value

    def _unaryop(self, node: ast.UnaryOp) -> Any:
        value = self.expr(node.operand)
        if isinstance(node.op, ast.Not):
            return not self._plain_truth(value)
        if self.backend.is_tensor(value):
            if isinstance(node.op, ast.Invert):
                return self.backend.call("aten.bitwise_not.default", [value], {})
            if isinstance(node.op, ast.USub):
                return self.backend.call("aten.neg.default", [value], {})
            raise TypeError("tensors have no unary +")
        return -value if isinstance(node.op, ast.USub) else +value if isinstance(node.op, ast.UAdd) else ~value

    def _binop(self, node: ast.BinOp) -> Any:
        return self.operate(_SYMBOLS[type(node.op)], self.expr(node.left), self.expr(node.right))

    def _compare(self, node: ast.Compare) -> Any:
        if len(node.ops) != 1:
            raise TypeError("compare two values at a time")
        return self.operate(_SYMBOLS[type(node.ops[0])], self.expr(node.left), self.expr(node.comparators[0]))

    def operate(self, symbol: str, x: Any, y: Any) -> Any:
        """``x symbol y`` on tensors, numbers or lists."""
        is_tensor = self.backend.is_tensor
        if symbol in ("is", "is not"):
            if y is not None and not isinstance(y, bool):
                raise TypeError("'is' compares with None, True or False")
            return (x is y) == (symbol == "is")
        if symbol in ("in", "not in"):
            if not isinstance(y, list):
                raise TypeError("'in' looks into a list")
            return any(x == e for e in y) == (symbol == "in")
        if is_tensor(x) or is_tensor(y):
            if x is None or y is None:
                raise TypeError(f"None {symbol} tensor")
            result: Any = None
            for op, args, kwargs in binary(symbol, x, y, is_tensor):
                result = self.backend.call(op, [result if a is None else a for a in args], kwargs)
            return result
        if symbol == "**":
            if not isinstance(x, (int, float)) or not isinstance(y, (int, float)) or abs(y) > 64:
                raise TypeError("powers of numbers up to 64 only")
            return x**y
        if symbol == "*" and (isinstance(x, list) or isinstance(y, list)):
            n = y if isinstance(x, list) else x
            if not isinstance(n, int) or n > MAX_RANGE:
                raise TypeError("a list is repeated a small number of times")
        if symbol not in _PLAIN:
            raise TypeError(f"numbers have no operator {symbol}")
        return _PLAIN[symbol](x, y)

    def truth(self, node: ast.expr) -> bool:
        """A condition: it may depend on attributes and shapes, not on values of tensors."""
        return self._plain_truth(self.expr(node))

    def _plain_truth(self, value: Any) -> bool:
        if self.backend.is_tensor(value):
            raise TypeError("a condition depends on the values of a tensor")
        return bool(value)

    def _attribute(self, node: ast.Attribute) -> Any:
        value = self.expr(node.value)
        if self.backend.is_tensor(value) and node.attr == "shape":
            return list(self.backend.shape(value))
        if self.backend.is_tensor(value) and node.attr == "dtype":
            return self.backend.dtype(value)
        raise AttributeError(f"there is no attribute {node.attr!r}; tensors have shape and dtype")

    def _listcomp(self, node: ast.ListComp) -> Any:
        if len(node.generators) != 1:
            raise TypeError("a list comprehension has one 'for'")
        loop, before, out = node.generators[0], dict(self.env), []
        for item in self.items(loop.iter):
            self.assign(loop.target, item)
            if all(self.truth(t) for t in loop.ifs):
                out.append(self.expr(node.elt))
        self.env = before
        return out

    def items(self, node: ast.expr) -> list[Any]:
        """What a loop runs over."""
        value = self.expr(node)
        if not isinstance(value, list):
            raise TypeError("loops run over lists and ranges")
        return value

    def assign(self, target: ast.expr, value: Any) -> None:
        """Gives names their values."""
        if isinstance(target, ast.Name):
            self.env[target.id] = value
        elif isinstance(target, (ast.Tuple, ast.List)):
            if not isinstance(value, list) or len(value) != len(target.elts):
                raise ValueError(f"expected {len(target.elts)} values")
            for part, item in zip(target.elts, value):
                self.assign(part, item)
        else:
            raise TypeError("only names are assigned; write new values with where or cat")

    def _subscript(self, node: ast.Subscript) -> Any:
        value = self.expr(node.value)
        if not self.backend.is_tensor(value):
            if isinstance(node.slice, ast.Slice):
                return value[slice(*(None if p is None else self.expr(p) for p in (node.slice.lower, node.slice.upper)))]
            return value[self.expr(node.slice)]
        return self._index(value, node.slice)

    def _index(self, x: Any, index: ast.expr) -> Any:
        parts: list[ast.expr] = list(index.elts) if isinstance(index, ast.Tuple) else [index]
        rank = len(self.backend.shape(x))

        def is_ellipsis(p: ast.expr) -> bool:
            return isinstance(p, ast.Constant) and p.value is Ellipsis

        def is_new(p: ast.expr) -> bool:
            return isinstance(p, ast.Constant) and p.value is None

        taken = sum(not is_ellipsis(p) and not is_new(p) for p in parts)
        d = 0
        for part in parts:
            if is_ellipsis(part):
                d += rank - taken
            elif is_new(part):
                x = self.backend.call("aten.unsqueeze.default", [x, d], {})
                d += 1
            elif isinstance(part, ast.Slice):
                if part.step is not None:
                    raise TypeError("slices have no step")
                n = self.backend.shape(x)[d]
                low, high, _ = slice(*(None if p is None else self.expr(p) for p in (part.lower, part.upper))).indices(n)
                if (low, high) != (0, n):
                    x = self.backend.call("aten.slice.Tensor", [x, d, low, high], {})
                d += 1
            else:
                k = self.expr(part)
                if self.backend.is_tensor(k):
                    if taken != 1 or d != 0:
                        raise TypeError("one index tensor, in front, is what the language has; see index_select")
                    return self.backend.call("aten.index.Tensor", [x, [k]], {})
                n = self.backend.shape(x)[d]
                if not -n <= k < n:
                    raise IndexError(f"index {k} of {n}")
                x = self.backend.call("aten.select.int", [x, d, k % n], {})
        return x

    def _call(self, node: ast.Call) -> Any:
        args = [self.expr(a) for a in node.args]
        kwargs = {k.arg: self.expr(k.value) for k in node.keywords if k.arg is not None}
        if isinstance(node.func, ast.Attribute):
            return self.function(node.func.attr, [self.expr(node.func.value), *args], kwargs)
        if not isinstance(node.func, ast.Name):
            raise TypeError("functions are called by name")
        return self.function(node.func.id, args, kwargs)

    def function(self, name: str, args: list[Any], kwargs: dict[str, Any]) -> Any:
        """A helper of the file, a function on numbers, or an operator."""
        tensors = any(self.backend.is_tensor(a) for a in args)
        if name in self.helpers:
            return self.call(self.helpers[name], bind(self.helpers[name], args, kwargs))
        if name in _NUMBERS and not tensors and not kwargs:
            return _NUMBERS[name](*args)
        if name == "len" and len(args) == 1:
            return len(self.backend.shape(args[0])) if tensors else len(args[0])
        if name not in FUNCTIONS:
            raise TypeError(f"there is no function {name}; known are {', '.join(sorted(FUNCTIONS))}")
        op, values, named = FUNCTIONS[name](*args, **kwargs)
        return self.backend.call(op, values, named)

    def call(self, function: Function, given: Mapping[str, Any]) -> Any:
        raise TypeError("functions of a file are not called here")


class _Evaluation(Expressions):
    """Evaluates the functions of one file."""

    def __init__(self, definition: Definition, backend: Backend) -> None:
        super().__init__(backend, definition.place.rpartition(":")[0])
        self.helpers = {**definition.helpers, definition.function.name: definition.function}

    def call(self, function: Function, given: Mapping[str, Any]) -> Any:
        self.depth += 1
        if self.depth > MAX_CALLS:
            raise NotApplicable(f"calls deeper than {MAX_CALLS}")
        outer, self.env = self.env, dict(given)
        try:
            for p in function.parameters:
                if p.name not in self.env:
                    if p.default is None:
                        raise NotApplicable(f"argument {p.name!r} of {function.name} is not given")
                    self.env[p.name] = self.expr(p.default)
            for name, value in self.env.items():
                if not self._known(value):
                    raise NotApplicable(f"argument {name!r} of {function.name} is {type(value).__name__}")
            self.block(function.body)
        except _Return as done:
            return done.value
        finally:
            self.env = outer
            self.depth -= 1
        raise NotApplicable(f"{function.name} ends without 'return' for these arguments")

    def _known(self, value: Any) -> bool:
        if isinstance(value, list):
            return all(map(self._known, value))
        return value is None or isinstance(value, (bool, int, float, str)) or self.backend.is_tensor(value)

    def block(self, body: Sequence[ast.stmt]) -> None:
        """Runs statements."""
        for s in body:
            self.place = f"{self.file}:{s.lineno}"
            if isinstance(s, ast.Return):
                raise _Return(None if s.value is None else self.expr(s.value))
            if isinstance(s, ast.Assign):
                value = self.expr(s.value)
                for target in s.targets:
                    self.assign(target, value)
            elif isinstance(s, ast.AugAssign) and isinstance(s.target, ast.Name):
                self.env[s.target.id] = self.operate(
                    _SYMBOLS[type(s.op)], self.env[s.target.id], self.expr(s.value)
                )
            elif isinstance(s, ast.If):
                self.block(s.body if self.truth(s.test) else s.orelse)
            elif isinstance(s, ast.For):
                for item in self.items(s.iter):
                    self.assign(s.target, item)
                    self.block(s.body)
            elif isinstance(s, ast.Assert):
                if not self.truth(s.test):
                    why = self.expr(s.msg) if s.msg is not None else ast.unparse(s.test)
                    raise NotApplicable(f"its definition asks for: {why}")
            elif not isinstance(s, (ast.Pass, ast.Expr)):
                raise TypeError(f"{type(s).__name__} is not in the language")


def _range(*bounds: int) -> list[int]:
    found = range(*bounds)
    if len(found) > MAX_RANGE:
        raise ValueError(f"a range of more than {MAX_RANGE}")
    return list(found)


def _prod(values: list[Any]) -> Any:
    return math.prod(values)


#: Functions on numbers and lists; those that tensors have too are operators there.
_NUMBERS: dict[str, Callable[..., Any]] = {
    "range": _range, "min": min, "max": max, "sqrt": math.sqrt, "abs": abs, "int": int, "float": float, "prod": _prod,
    "log": math.log, "exp": math.exp, "sum": sum,
}  # fmt: skip
