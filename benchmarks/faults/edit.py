"""Edits of captured graphs that keep them well-formed: insert, replace, remove, exchange, reorder.

Types of new nodes come from the shape rules, so an edit that does not fit fails at once.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterable
from typing import Any

from emerge.facts.shape_rules.core import TupleValue
from emerge.facts.shapes import Spec, check_graph, infer
from emerge.graph.model import Arg, Graph, Input, Node, Ref, TensorType

FUNCOL = "_c10d_functional"
ALL_REDUCE = f"{FUNCOL}.all_reduce.default"
ALL_GATHER = f"{FUNCOL}.all_gather_into_tensor.default"
REDUCE_SCATTER = f"{FUNCOL}.reduce_scatter_tensor.default"
WAIT = f"{FUNCOL}.wait_tensor.default"

#: Operators that hand values on, perhaps rearranged: position of the argument whose elements the result has.
HANDS_ON: dict[str, int] = {
    WAIT: 0,
    "aten.copy.default": 1,
    "operator.getitem": 0,
    **dict.fromkeys(
        (
            f"aten.{op}"
            for op in (
                "view.default",
                "_unsafe_view.default",
                "reshape.default",
                "t.default",
                "transpose.int",
                "permute.default",
                "clone.default",
                "alias.default",
                "detach.default",
                "contiguous.default",
                "unsqueeze.default",
                "squeeze.dim",
                "expand.default",
                "split.Tensor",
                "split_with_sizes.default",
                "slice.Tensor",
                "select.int",
                "_to_copy.default",
                "lift_fresh_copy.default",
            )
        ),
        0,
    ),
}
#: Operators whose place in the order of a rank is part of their meaning.
_RANDOM = ("dropout", "rand", "bernoulli", "normal", "uniform", "multinomial")


def copy_arg(arg: Any) -> Any:
    """Lists are copied, everything else is immutable."""
    return [copy_arg(a) for a in arg] if isinstance(arg, list) else arg


def substitute(arg: Any, old: str, new: str) -> Any:
    """``arg`` with references to ``old`` turned into references to ``new``."""
    if isinstance(arg, Ref):
        return Ref(new) if arg.name == old else arg
    return [substitute(a, old, new) for a in arg] if isinstance(arg, list) else arg


def copy_graph(graph: Graph) -> Graph:
    """A graph whose nodes, arguments and tables are its own."""

    def node(n: Node) -> Node:
        return dataclasses.replace(
            n, args=copy_arg(n.args), kwargs={k: copy_arg(v) for k, v in n.kwargs.items()}, elements=dict(n.elements)
        )

    return dataclasses.replace(
        graph,
        inputs=[dataclasses.replace(i) for i in graph.inputs],
        nodes=[node(n) for n in graph.nodes],
        outputs=list(graph.outputs),
        groups={k: [list(g) for g in v] for k, v in graph.groups.items()},
    )


class Editor:
    """A copy of one rank graph, being edited.

    Attributes:
        graph: the copy. rank: which rank it is.
    """

    def __init__(self, graph: Graph) -> None:
        self.graph = copy_graph(graph)
        self.rank = graph.rank
        self._values: dict[str, Input | Node] = {}
        self._values.update((i.name, i) for i in self.graph.inputs)
        self._values.update((n.name, n) for n in self.graph.nodes)

    # ---- looking ----------------------------------------------------------------------------------------------------

    def node(self, name: str) -> Node:
        """Raises KeyError if there is no such node."""
        value = self._values[name]
        if not isinstance(value, Node):
            raise KeyError(name)
        return value

    def get(self, name: str) -> Input | Node | None:
        """The input or node of a name."""
        return self._values.get(name)

    def is_input(self, name: str) -> bool:
        """Is it an input of the graph (a weight or an argument)?"""
        return isinstance(self._values.get(name), Input)

    def type(self, name: str) -> TensorType | None:
        """Declared type of a single tensor."""
        value = self._values[name]
        return TensorType(value.dtype, value.shape) if value.dtype is not None and value.shape is not None else None

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor; unbacked symbols are not supported by the edits."""
        kind = self.type(name)
        assert kind is not None, f"{name} has no single shape"
        return tuple(int(n) for n in kind.shape)

    def users(self, name: str) -> list[Node]:
        """Nodes that read a value, in execution order."""
        return [n for n in self.graph.nodes if name in n.refs()]

    def ref(self, node: Node, position: int) -> str | None:
        """Name referenced by a positional argument, None where it is something else."""
        if position >= len(node.args):
            return None
        arg = node.args[position]
        return arg.name if isinstance(arg, Ref) else None

    def origin(self, name: str) -> str:
        """The value a chain of layout operators, copies and waits starts from."""
        while True:
            value = self._values.get(name)
            if not isinstance(value, Node) or value.op not in HANDS_ON:
                return name
            source = self.ref(value, HANDS_ON[value.op])
            if source is None:
                return name
            name = source

    def ends(self, name: str) -> list[tuple[Node, str]]:
        """(node, operand) that use a value directly or through operators that hand it on; collectives count as uses."""
        found: list[tuple[Node, str]] = []
        for user in self.users(name):
            if user.op in HANDS_ON and self.ref(user, HANDS_ON[user.op]) == name:
                found += self.ends(user.name)
            elif user.op not in HANDS_ON:
                found.append((user, name))
        return found

    def handed(self, name: str) -> list[str]:
        """Direct consumers of a value; where one only hands it on, its consumers too."""
        found: list[str] = []
        for user in self.users(name):
            found.append(user.name)
            if user.op in HANDS_ON:
                found += self.handed(user.name)
        return list(dict.fromkeys(found))

    def looked_up(self, name: str) -> list[str]:
        """Consumers of an index or a mask, through further index arithmetic, up to the first that yields values."""
        found: list[str] = []
        for user in self.users(name):
            found.append(user.name)
            if user.dtype is not None and not user.dtype.startswith(("float", "bfloat")):
                found += self.looked_up(user.name)
        return list(dict.fromkeys(found))

    def live(self, names: Iterable[str]) -> set[str]:
        """Everything that these values are computed from, themselves included."""
        seen: set[str] = set()
        work = list(names)
        while work:
            name = work.pop()
            if name in seen:
                continue
            seen.add(name)
            value = self._values.get(name)
            if isinstance(value, Node):
                work.extend(value.refs())
        return seen

    # ---- changing ---------------------------------------------------------------------------------------------------

    def position(self, name: str) -> int:
        """Index of a node; -1 for an input."""
        return next((i for i, n in enumerate(self.graph.nodes) if n.name == name), -1)

    def fresh(self, base: str) -> str:
        """A name that is not taken."""
        name, count = base, 0
        while name in self._values:
            count += 1
            name = f"{base}_{count}"
        return name

    def add(self, after: str, op: str, *args: Any, name: str | None = None, **kwargs: Any) -> str:
        """Inserts a node right behind ``after`` (an input: at the front) and returns its name.

        Raises:
            GraphError: the operands do not fit the operator.
        """
        return self.insert(self.position(after) + 1, op, *args, name=name, **kwargs)

    def insert(self, index: int, op: str, *args: Any, name: str | None = None, **kwargs: Any) -> str:
        """Inserts a node before the node at ``index`` and returns its name."""
        base = name or op.split(".")[1 if "." in op else 0]
        node = Node(self.fresh(f"planted_{base}"), op, [copy_arg(a) for a in args], dict(kwargs))
        result = infer(op, self._typed(node.args), self._typed(node.kwargs), self.graph.groups, self.rank)
        near = self.graph.nodes[min(index, len(self.graph.nodes) - 1)]
        node.source, node.code, node.module = near.source, near.code, near.module
        if isinstance(result, list):
            node.is_tuple = True
            node.elements = {i: TensorType(str(s.dtype), s.shape) for i, s in enumerate(result) if s is not None}
        else:
            assert isinstance(result, Spec), f"no shape rule for {op}"
            first = next((self.type(r) for r in node.refs()), None)
            node.dtype = first.dtype if result.dtype in (None, "floating") and first is not None else str(result.dtype)
            node.shape = result.shape
        self.graph.nodes.insert(index, node)
        self._values[node.name] = node
        return node.name

    def _typed(self, arg: Any) -> Any:
        if isinstance(arg, Ref):
            value = self._values[arg.name]
            if isinstance(value, Node) and value.is_tuple:
                return TupleValue(value.elements, len(value.elements))
            return self.type(arg.name)
        if isinstance(arg, dict):
            return {k: self._typed(v) for k, v in arg.items()}
        return [self._typed(a) for a in arg] if isinstance(arg, list) else arg

    def parts(self, after: str, op: str, *args: Any) -> list[str]:
        """A multi-output operator and all its ``getitem`` nodes, in order."""
        made = self.add(after, op, *args)
        names = []
        last = made
        for i in sorted(self.node(made).elements):
            last = self.add(last, "operator.getitem", Ref(made), i)
            names.append(last)
        return names

    def replace_uses(self, old: str, new: str, *, only: Iterable[str] | None = None, but: Iterable[str] = ()) -> None:
        """Everything that reads ``old`` reads ``new``; ``only`` restricts it to these nodes, else outputs too."""
        chosen, skipped = None if only is None else set(only), set(but)
        for node in self.graph.nodes:
            if node.name in skipped or node.name == new or (chosen is not None and node.name not in chosen):
                continue
            node.args = [substitute(a, old, new) for a in node.args]
            node.kwargs = {k: substitute(v, old, new) for k, v in node.kwargs.items()}
        if chosen is None:
            self.graph.outputs = [new if o == old else o for o in self.graph.outputs]

    def exchange(self, one: str, two: str) -> None:
        """Every node that reads one of two inputs reads the other; outputs stay."""

        def swapped(arg: Any) -> Any:
            if isinstance(arg, Ref):
                return Ref({one: two, two: one}.get(arg.name, arg.name))
            return [swapped(a) for a in arg] if isinstance(arg, list) else arg

        for node in self.graph.nodes:
            node.args = [swapped(a) for a in node.args]
            node.kwargs = {k: swapped(v) for k, v in node.kwargs.items()}

    def remove(self, *names: str) -> None:
        """Removes nodes that nothing reads any more.

        Raises:
            ValueError: a node is still read.
        """
        for name in names:
            if self.users(name) or name in self.graph.outputs:
                raise ValueError(f"{name} is still read")
            self.graph.nodes.remove(self.node(name))
            del self._values[name]

    def rename(self, old: str, new: str) -> None:
        """Gives a node another name, everywhere."""
        node = self.node(old)
        self.replace_uses(old, new)
        del self._values[old]
        node.name = new
        self._values[new] = node

    def reorder(self, draw: random.Random) -> int:
        """A random order that respects data flow, and the order of collectives and of random operators.

        Returns:
            How many nodes stand elsewhere.
        """
        before = [n.name for n in self.graph.nodes]
        waiting: dict[str, set[str]] = {}
        last: dict[str, str] = {}
        for node in self.graph.nodes:
            waiting[node.name] = {r for r in node.refs() if not self.is_input(r)}
            for kind in _ordered(node):
                if kind in last:
                    waiting[node.name].add(last[kind])
                last[kind] = node.name
        order: list[str] = []
        ready = [n for n in before if not waiting[n]]
        readers: dict[str, list[str]] = {n: [] for n in before}
        for name, needs in waiting.items():
            for need in needs:
                readers[need].append(name)
        while ready:
            name = ready.pop(draw.randrange(len(ready)))
            order.append(name)
            for reader in readers[name]:
                waiting[reader].discard(name)
                if not waiting[reader]:
                    ready.append(reader)
        self.graph.nodes = [self.node(n) for n in order]
        return sum(a != b for a, b in zip(before, order))

    def check(self) -> Graph:
        """The edited graph.

        Raises:
            GraphError: it is not well-formed.
        """
        check_graph(self.graph)
        return self.graph


def _ordered(node: Node) -> list[str]:
    """Streams in whose order a node stands."""
    if is_collective(node):
        return ["collectives"]
    if any(word in node.op for word in _RANDOM):
        return ["random"]
    return []


def is_collective(node: Node) -> bool:
    """Does it exchange values between ranks (a wait does not)?"""
    return ("c10d" in node.op or "all_reduce" in node.op) and node.op != WAIT


def mutates(graph: Graph) -> bool:
    """Are there in-place operators? Reordering is then not this module's business."""
    return any(n.op.split(".")[1].endswith("_") for n in graph.nodes if n.op.startswith("aten.") and "__" not in n.op)


def scalar_at(node: Node, position: int) -> float | int | None:
    """A numeric positional argument."""
    value: Arg = node.args[position] if position < len(node.args) else None
    return value if isinstance(value, (int, float)) and not isinstance(value, bool) else None


__all__ = [
    "ALL_GATHER",
    "ALL_REDUCE",
    "HANDS_ON",
    "REDUCE_SCATTER",
    "WAIT",
    "Editor",
    "copy_graph",
    "is_collective",
    "mutates",
    "scalar_at",
]
