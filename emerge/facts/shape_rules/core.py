"""What a shape rule is: a function from a :class:`Call` to the types of its results.

A rule reads its operands through the typed accessors of :class:`Call`, so that an operand that is absent or of the
wrong kind is one well-worded :class:`GraphError`, and an operand whose type the graph does not declare ends the rule
with :class:`Undecided`: nothing is checked then, and the report says so.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

from emerge.facts.shape_rules.algebra import UNKNOWN_SIZE, Size, normalize_dim, same_shape, show
from emerge.graph.model import DType, Shape, TensorType
from emerge.util.errors import GraphError


class Undecided(Exception):
    """The rule cannot tell the result from what the graph declares. Never an error of the graph."""


class Spec(NamedTuple):
    """Computed type of one tensor.

    Attributes:
        dtype: its dtype, ``floating`` where it is some floating type, None where it is not certain.
        shape: its shape; a str is a symbol or ``?``.
    """

    dtype: str | None
    shape: Shape


@dataclass(frozen=True, slots=True)
class Symbol:
    """A scalar that is only known when the graph runs. ``dtype``: its dtype in type promotion, where known."""

    dtype: str | None = None


@dataclass(frozen=True, slots=True)
class ScalarResult:
    """A node that yields a Python scalar: an int, float or bool, or a :class:`Symbol`."""

    value: Any


class Nothing:
    """A node that yields no value a rule speaks about (assertions, profiler marks)."""


NOTHING = Nothing()


@dataclass(frozen=True, slots=True)
class TupleValue:
    """A multi-output operand. ``length`` is None where the number of outputs is not known."""

    elements: Mapping[int, TensorType]
    length: int | None = None


class Unknown:
    """An operand without declared type."""


UNKNOWN = Unknown()

#: None as an element of a list: that output has no rule.
Result: TypeAlias = "Spec | list[Spec | None] | ScalarResult | Nothing"
Rule: TypeAlias = "Callable[[Call], Result]"
Rules: TypeAlias = "dict[str, Rule]"

_MISSING = object()


def type_text(value: TensorType | Spec) -> str:
    """``float16[32, u0]``."""
    return f"{value.dtype or ''}{show(value.shape)}"


@dataclass(slots=True)
class Call:
    """One operator call with resolved operands.

    Attributes:
        op, overload: ``aten.sum.dim_IntList`` and its last part.
        args, kwargs: operands; references are replaced by TensorType, TupleValue, scalars, :class:`Symbol`.
        groups: process-group id -> rank lists, as far as the graph file has them; ``rank``: rank of this graph.
    """

    op: str
    overload: str
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    groups: Mapping[str, list[list[int]]]
    rank: int = 0

    def get(self, index: int, name: str, default: Any = None) -> Any:
        """Argument by position or name, else ``default``. Unknown values end the rule."""
        if 0 <= index < len(self.args):
            value = self.args[index]
        elif index == 0 and name not in self.kwargs and name in ("self", "input"):
            # Schemas of otherwise equal operators differ in the name of the first operand.
            value = self.kwargs.get("input" if name == "self" else "self", default)
        else:
            value = self.kwargs.get(name, default)
        if value is UNKNOWN:
            raise Undecided
        return value

    def tensor(self, index: int, name: str) -> TensorType:
        """A tensor operand."""
        value = self.get(index, name, _MISSING)
        if isinstance(value, TensorType):
            return value
        raise self._wrong(name, "a tensor", value)

    def optional_tensor(self, index: int, name: str) -> TensorType | None:
        """A tensor operand that may be absent or None."""
        value = self.get(index, name)
        if value is None or isinstance(value, TensorType):
            return value
        raise self._wrong(name, "a tensor or None", value)

    def operand(self, index: int, name: str) -> Any:
        """A tensor or scalar operand of an elementwise operator; None when absent."""
        value = self.get(index, name)
        if value is None or isinstance(value, (TensorType, int, float, Symbol)):
            return value
        raise self._wrong(name, "a tensor or a number", value)

    def tensors(self, index: int, name: str) -> list[TensorType]:
        """A list of tensors."""
        value = self.get(index, name, _MISSING)
        if isinstance(value, TupleValue):
            if value.length is None or len(value.elements) != value.length:
                raise Undecided
            value = [value.elements[i] for i in range(value.length)]
        if not isinstance(value, list):
            raise self._wrong(name, "a list of tensors", value)
        for item in value:
            if item is UNKNOWN:
                raise Undecided
            if not isinstance(item, TensorType):
                raise self._wrong(name, "a list of tensors", item)
        return value

    def integer(self, index: int, name: str, default: Any = _MISSING) -> int:
        """An integer that has to be known."""
        value = self.get(index, name, default)
        if isinstance(value, (Symbol, str)):
            raise Undecided
        if isinstance(value, int):
            return value
        raise self._wrong(name, "an integer", value)

    def optional_integer(self, index: int, name: str) -> int | None:
        """An integer that has to be known, or None."""
        return None if self.get(index, name) is None else self.integer(index, name)

    def dim(self, index: int, name: str, rank: int, default: Any = _MISSING) -> int:
        """A dimension of a tensor of this rank, counted from the front."""
        return normalize_dim(self.integer(index, name, default), rank)

    def integers(self, index: int, name: str, default: Any = _MISSING) -> list[int] | None:
        """A list of integers that have to be known; one integer is a list of one; None stays None."""
        value = self.get(index, name, default)
        if value is None:
            return None
        items = value if isinstance(value, list) else [value]
        for item in items:
            if isinstance(item, (Symbol, str)) or item is UNKNOWN:
                raise Undecided
            if not isinstance(item, int):
                raise self._wrong(name, "a list of integers", item)
        return list(items)

    def size(self, index: int, name: str) -> Shape:
        """A shape argument; sizes that are scalars of the graph become unknown."""
        value = self.get(index, name, _MISSING)
        items = value if isinstance(value, list) else [value]
        return tuple(self._one_size(name, item) for item in items)

    def flag(self, index: int, name: str, default: bool = False) -> bool:
        """A boolean."""
        value = self.get(index, name, default)
        if isinstance(value, Symbol):
            raise Undecided
        return bool(value)

    def dtype(self, default: str | None, index: int = -1, name: str = "dtype") -> str | None:
        """The dtype argument, else ``default``."""
        value = self.get(index, name)
        return value.name if isinstance(value, DType) else default

    def group_size(self, declared: int | None, group: Any) -> int:
        """Number of ranks of a process group, checked against the groups of the graph file where it has them."""
        lists = self.groups.get(group, []) if isinstance(group, str) else []
        sizes = {len(ranks) for ranks in lists if self.rank in ranks}
        if declared is None:
            if len(sizes) != 1:
                raise Undecided
            return sizes.pop()
        if sizes and declared not in sizes:
            raise GraphError(f"group size {declared}, but group '{group}' has {sizes.pop()} ranks in this graph")
        return declared

    def _one_size(self, name: str, item: Any) -> Size:
        if isinstance(item, (Symbol, str)) or item is UNKNOWN:
            return UNKNOWN_SIZE
        if isinstance(item, int):
            return item
        raise self._wrong(name, "a list of sizes", item)

    def _wrong(self, name: str, expected: str, value: Any) -> GraphError:
        found = "it is absent" if value is _MISSING else f"found {_kind_text(value)}"
        return GraphError(f"expected operand '{name}' to be {expected}, {found}")


def _kind_text(value: Any) -> str:
    if isinstance(value, TensorType):
        return f"the tensor {type_text(value)}"
    if isinstance(value, TupleValue):
        return "the outputs of a multi-output operator"
    return repr(value)


def table(names: str, rule: Rule, prefix: str = "aten.") -> Rules:
    """The same rule for every operator of a family; names are separated by blanks."""
    return {prefix + name: rule for name in names.split()}


def like(value: TensorType) -> Spec:
    """The type of an operand."""
    return Spec(value.dtype, value.shape)


def like_operand(*positions: tuple[int, str]) -> Rule:
    """Rule: the results have the types of these operands, one per position."""

    def rule(call: Call) -> Result:
        specs: list[Spec | None] = [like(call.tensor(i, name)) for i, name in positions]
        return specs[0] if len(specs) == 1 and specs[0] is not None else specs

    return rule


def require_same_shape(what: str, found: Shape, expected: Shape) -> None:
    """Raises:
    GraphError: the shapes contradict each other.
    """
    if not same_shape(found, expected):
        raise GraphError(f"{what} has shape {show(found)}, expected {show(expected)}")


def require_same_size(what: str, found: Size, expected: Size) -> None:
    """Raises:
    GraphError: the sizes contradict each other.
    """
    if not (found == expected or isinstance(found, str) or isinstance(expected, str)):
        raise GraphError(f"{what} is {found}, expected {expected}")


def require_rank(what: str, value: TensorType, *ranks: int) -> None:
    """Raises:
    GraphError: the tensor has another rank.
    """
    if len(value.shape) not in ranks:
        raise GraphError(f"{what} has rank {len(value.shape)}, expected {' or '.join(str(r) for r in ranks)}")


def common_dtype(*values: TensorType | None) -> str | None:
    """The dtype all these tensors share, None when they differ (then it is not certain)."""
    dtypes = {v.dtype for v in values if v is not None}
    return dtypes.pop() if len(dtypes) == 1 else None
