"""Small hand-written graphs for the tests of execution."""

from __future__ import annotations

from typing import Any

from emerge.graph.model import DType, Graph, Input, Node, Ref, TensorType


class Builder:
    """Writes a graph node by node; every method returns the name of what it added."""

    def __init__(self, name: str = "g", rank: int = 0, world: int = 1, groups: dict[str, Any] | None = None) -> None:
        self.graph = Graph(name, [], [], [], rank=rank, world_size=world, groups=groups or {})

    def input(self, name: str, shape: tuple[int, ...], dtype: str = "float32", **extra: Any) -> str:
        self.graph.inputs.append(Input(name, dtype, shape, **extra))
        return name

    def add(self, op: str, *args: Any, shape: Any = None, dtype: str | None = "float32", **extra: Any) -> str:
        name = extra.pop("name", f"n{len(self.graph.nodes)}")
        kwargs = extra.pop("kwargs", {})
        if shape is None:
            dtype = None
        node = Node(name, op, [wrap(a) for a in args], {k: wrap(v) for k, v in kwargs.items()}, dtype, shape, **extra)
        self.graph.nodes.append(node)
        return name

    def multi(self, op: str, *args: Any, elements: Any = None, **extra: Any) -> str:
        types = {i: TensorType(d, s) for i, (d, s) in (elements or {}).items()}
        return self.add(op, *args, is_tuple=True, elements=types, **extra)

    def item(self, source: str, index: int, shape: Any, dtype: str = "float32") -> str:
        return self.add("operator.getitem", source, index, shape=shape, dtype=dtype)

    def constant(self, value: Any, shape: tuple[int, ...], dtype: str = "float32") -> str:
        return self.add("get_attr", Text("_c"), shape=shape, dtype=dtype, const=value, has_const=True)

    def done(self, *outputs: str) -> Graph:
        self.graph.outputs = list(outputs)
        return self.graph


class Text(str):
    """A string argument that is no reference."""


def wrap(value: Any) -> Any:
    """Plain strings are references, ``Text`` stays text, ``dtype:x`` is a dtype."""
    if isinstance(value, Text):
        return str(value)
    if isinstance(value, str):
        return DType(value[6:]) if value.startswith("dtype:") else Ref(value)
    if isinstance(value, (list, tuple)):
        return [wrap(v) for v in value]
    return value
