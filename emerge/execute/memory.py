"""Estimate of the memory an execution needs, from declared shapes and last uses."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod

from emerge.execute.aliasing import roots
from emerge.execute.constants import const_subgraph
from emerge.execute.precision import Precision
from emerge.graph.model import DTYPES, Graph, TensorType, is_floating


@dataclass(frozen=True, slots=True)
class MemoryEstimate:
    """Estimated memory of one rank's run.

    Attributes:
        peak: bytes held at the worst node, operator-internal temporaries not included.
        node: the worst node, "" when it is before the first one.
        inputs: bytes of the inputs.
        unknown: nodes whose size is not known (data-dependent shape or no declared type); they count as 0.
    """

    peak: int
    node: str
    inputs: int
    unknown: tuple[str, ...]


def element_bytes(dtype: str, precision: Precision, captured: bool = False) -> int:
    """Bytes per element of a tensor of recorded type ``dtype`` during execution."""
    kind, width = DTYPES[dtype]
    if precision.captured or captured:
        return width
    return 8 if is_floating(dtype) or kind == "float8" else 16 if kind == "complex" else width


def estimate_peak(graph: Graph, precision: Precision | None = None, keep: Iterable[str] | str = ()) -> MemoryEstimate:
    """Peak bytes of running ``graph`` with values dropped after their last use.

    Names that may share memory (views) count once and live as long as the last of them.

    Args:
        keep: names kept besides the outputs, or ``"all"``.
    """
    precision = precision or Precision()
    const = const_subgraph(graph)
    types = graph.types()
    root = roots(graph)
    everything = [i.name for i in graph.inputs] + [n.name for n in graph.nodes]
    kept = set(everything) if keep == "all" else {o for o in graph.outputs if o is not None} | set(keep)
    unknown = []

    def size(kind: TensorType, captured: bool) -> int | None:
        if not all(isinstance(s, int) for s in kind.shape):
            return None
        return prod(int(s) for s in kind.shape) * element_bytes(kind.dtype, precision, captured)

    own: dict[str, int] = {}
    for name in everything:
        own[name] = (size(types[name], name in const) or 0) if name in types else 0
    for node in graph.nodes:
        if node.elements:
            own[node.name] = sum(size(e, node.name in const) or 0 for e in node.elements.values())
        elif not node.is_scalar and (node.name not in types or size(types[node.name], False) is None):
            unknown.append(node.name)
    storage: dict[str, int] = {}
    death: dict[str, int] = {}
    for name in everything:
        storage[root[name]] = max(storage.get(root[name], 0), own[name])
    for position, node in enumerate(graph.nodes):
        for name in (node.name, *node.refs()):
            death[root[name]] = position
    for name in kept:
        death[root[name]] = len(graph.nodes)
    ends: dict[int, int] = {}
    for representative, position in death.items():
        ends[position] = ends.get(position, 0) + storage[representative]
    alive_roots = {root[i.name] for i in graph.inputs}
    live = inputs = sum(storage[r] for r in alive_roots)
    live -= sum(storage[r] for r in alive_roots if r not in death)
    peak, worst = inputs, ""
    for position, node in enumerate(graph.nodes):
        if root[node.name] not in alive_roots:
            alive_roots.add(root[node.name])
            live += storage[root[node.name]]
        if live > peak:
            peak, worst = live, node.name
        live -= ends.get(position, 0)
    return MemoryEstimate(peak, worst, inputs, tuple(unknown))
