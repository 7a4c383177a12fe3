"""Implementation inputs from reference inputs, by inverting the input relations."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from emerge.execute._torch import torch
from emerge.execute.precision import widen
from emerge.graph.model import Graph, Input
from emerge.graph.relations import ConcatExpr, Expr, Leaf, RelationEntry, SliceExpr
from emerge.util.errors import RelationError


@dataclass(frozen=True, slots=True)
class Undetermined:
    """An implementation input of which the relations leave ``missing`` of ``total`` elements open."""

    rank: int
    name: str
    missing: int
    total: int


@dataclass(slots=True)
class DistInputs:
    """Inputs of all ranks.

    Attributes:
        values: per rank, name -> tensor; inputs that are not fully determined are absent.
        undetermined: what is absent; empty = ready to run.
        unused: reference inputs that no relation mentions.
    """

    values: list[dict[str, Any]]
    undetermined: list[Undetermined] = field(default_factory=list)
    unused: list[str] = field(default_factory=list)


@dataclass(slots=True)
class _Buffer:
    """Elements of one implementation input, with which of them are known and what said so last."""

    value: Any
    known: Any
    origin: str = ""


def build_dist_inputs(
    entries: Iterable[RelationEntry],
    seq_inputs: Mapping[str, Any],
    graphs: Sequence[Graph],
) -> DistInputs:
    """Implementation inputs that satisfy the relations for the given reference inputs.

    ``custom`` expressions are inverted element by element; ``also_equal`` groups carry values from known elements
    to open ones. ``cut`` and ``hint`` entries are not used.

    Args:
        entries: input relations.
        seq_inputs: reference input name -> tensor.
        graphs: the rank graphs, position = rank.

    Raises:
        RelationError: an entry names what is not an input, its shapes do not fit, or two entries contradict.
    """
    solver = _Solver(graphs)
    used = [e for e in entries if not (e.hint or e.cut)]
    for entry in used:
        if entry.seq not in seq_inputs:
            raise RelationError(f"'{entry.seq}' is not an input of the reference", place=entry.place)
        solver.apply(entry, seq_inputs[entry.seq])
    solver.propagate(used)
    mentioned = {e.seq for e in used}
    return solver.result([name for name in seq_inputs if name not in mentioned])


class _Solver:
    def __init__(self, graphs: Sequence[Graph]) -> None:
        self.graphs = graphs
        self.inputs: dict[Leaf, Input] = {
            Leaf(rank, i.name): i for rank, graph in enumerate(graphs) for i in graph.inputs
        }
        self.buffers: dict[Leaf, _Buffer] = {}

    def buffer(self, leaf: Leaf, entry: RelationEntry) -> _Buffer:
        if leaf in self.buffers:
            return self.buffers[leaf]
        item = self.inputs.get(leaf)
        if item is None:
            raise RelationError(f"rank {leaf.rank} has no input '{leaf.name}' (related to '{entry.seq}')", entry.place)
        shape = tuple(int(s) for s in item.shape)
        dtype = getattr(torch, item.dtype)
        kind = torch.zeros((), dtype=dtype)
        wide = widen(kind).dtype
        self.buffers[leaf] = _Buffer(torch.zeros(shape, dtype=wide), torch.zeros(shape, dtype=torch.bool))
        return self.buffers[leaf]

    def apply(self, entry: RelationEntry, seq: Any) -> None:
        """Write the elements one entry determines."""
        seq = widen(seq.detach().cpu())
        if entry.kind == "replicated":
            for leaf in entry.dist:
                self._write(leaf, entry, seq)
            return
        if entry.kind == "shard":
            expr: Expr = ConcatExpr(entry.dim or 0, tuple(entry.dist))
        elif entry.kind == "custom" and entry.expr is not None:
            expr = entry.expr
        else:
            raise RelationError(f"unknown kind '{entry.kind}', expected replicated, shard or custom", entry.place)
        shape = self._shape(expr, entry)
        if shape != tuple(seq.shape):
            raise self._shapes(entry, shape, tuple(seq.shape))
        self._assign(expr, entry, seq, torch.ones(shape, dtype=torch.bool))

    def _assign(self, expr: Expr, entry: RelationEntry, value: Any, mask: Any) -> bool:
        """State ``expr = value`` where ``mask``; True when something new became known."""
        if isinstance(expr, Leaf):
            return self._write(expr, entry, value, mask)
        if isinstance(expr, SliceExpr):
            shape = self._shape(expr.arg, entry)
            full, inside = torch.zeros(shape, dtype=value.dtype), torch.zeros(shape, dtype=torch.bool)
            full.narrow(expr.dim, expr.start, expr.end - expr.start).copy_(value)
            inside.narrow(expr.dim, expr.start, expr.end - expr.start).copy_(mask)
            return self._assign(expr.arg, entry, full, inside)
        offset, changed = 0, False
        for arg in expr.args:
            size = self._shape(arg, entry)[expr.dim]
            part, inside = (t.narrow(expr.dim, offset, size) for t in (value, mask))
            changed |= self._assign(arg, entry, part, inside)
            offset += size
        return changed

    def _write(self, leaf: Leaf, entry: RelationEntry, value: Any, mask: Any | None = None) -> bool:
        buffer = self.buffer(leaf, entry)
        target, known = buffer.value, buffer.known
        if tuple(target.shape) != tuple(value.shape):
            raise self._shapes(entry, tuple(target.shape), tuple(value.shape), leaf)
        cast = value.to(target.dtype)
        item = self.inputs[leaf]
        exact = not (target.dtype.is_floating_point or target.dtype.is_complex)
        if exact and not bool((cast.to(value.dtype) == value).all()):
            raise RelationError(
                f"values of '{entry.seq}' do not fit rank {leaf.rank} input '{leaf.name}' of {item.dtype}", entry.place
            )
        if not buffer.origin and (mask is None or bool(mask.all())):
            # Nothing is known yet and everything is stated: the usual case of a large weight.
            target.copy_(cast)
            known.fill_(True)
            buffer.origin = _origin(entry)
            return True
        where = torch.ones_like(known) if mask is None else mask
        clash = where & known & (target != cast)
        if bool(clash.any()):
            raise RelationError(
                f"the relation of '{entry.seq}' contradicts {buffer.origin or 'an earlier one'} on rank {leaf.rank} "
                f"input '{leaf.name}' ({int(clash.sum())} elements)",
                entry.place,
            )
        fresh = where & ~known
        if not bool(fresh.any()):
            return False
        target.copy_(torch.where(fresh, cast, target))
        known.copy_(known | fresh)
        buffer.origin = _origin(entry)
        return True

    def propagate(self, entries: list[RelationEntry]) -> None:
        """Carry known elements across ``also_equal`` groups until nothing new becomes known."""
        changed = True
        while changed:
            changed = False
            for entry in entries:
                for group in entry.also_equal:
                    changed |= self._spread(group, entry)

    def _spread(self, group: tuple[Expr, ...], entry: RelationEntry) -> bool:
        pairs = [self._evaluate(expr, entry) for expr in group]
        shapes = {tuple(v.shape) for v, _ in pairs}
        if len(shapes) != 1:
            raise RelationError(f"also_equal of '{entry.seq}' relates shapes {sorted(shapes)}", entry.place)
        value, known = pairs[0][0].clone(), pairs[0][1].clone()
        for other, mask in pairs[1:]:
            clash = known & mask & (value != other)
            if bool(clash.any()):
                raise RelationError(
                    f"also_equal of '{entry.seq}' contradicts the relations ({int(clash.sum())} elements)", entry.place
                )
            value = torch.where(mask & ~known, other.to(value.dtype), value)
            known |= mask
        changed = False
        for expr in group:
            changed |= self._assign(expr, entry, value, known)
        return changed

    def _evaluate(self, expr: Expr, entry: RelationEntry) -> tuple[Any, Any]:
        if isinstance(expr, Leaf):
            buffer = self.buffer(expr, entry)
            return buffer.value, buffer.known
        if isinstance(expr, SliceExpr):
            inner = self._evaluate(expr.arg, entry)
            value, known = (t.narrow(expr.dim, expr.start, expr.end - expr.start) for t in inner)
            return value, known
        parts = [self._evaluate(a, entry) for a in expr.args]
        return torch.cat([v for v, _ in parts], expr.dim), torch.cat([k for _, k in parts], expr.dim)

    def _shape(self, expr: Expr, entry: RelationEntry) -> tuple[int, ...]:
        if isinstance(expr, Leaf):
            return tuple(self.buffer(expr, entry).value.shape)
        if isinstance(expr, SliceExpr):
            shape = list(self._shape(expr.arg, entry))
            if not (expr.dim < len(shape) and 0 <= expr.start <= expr.end <= shape[expr.dim]):
                box = f"[{expr.start}:{expr.end}] along dimension {expr.dim}"
                raise RelationError(f"the slice {box} does not fit shape {shape}", entry.place)
            shape[expr.dim] = expr.end - expr.start
            return tuple(shape)
        shapes = [self._shape(a, entry) for a in expr.args]
        others = {s[: expr.dim] + s[expr.dim + 1 :] for s in shapes if expr.dim < len(s)}
        if len(others) != 1 or any(expr.dim >= len(s) for s in shapes):
            raise RelationError(f"cannot concatenate shapes {shapes} along dimension {expr.dim}", entry.place)
        joined = list(shapes[0])
        joined[expr.dim] = sum(s[expr.dim] for s in shapes)
        return tuple(joined)

    def _shapes(
        self, entry: RelationEntry, found: tuple[int, ...], wanted: tuple[int, ...], leaf: Leaf | None = None
    ) -> RelationError:
        where = f"rank {leaf.rank} input '{leaf.name}'" if leaf is not None else "the expression"
        return RelationError(f"'{entry.seq}' gives shape {list(wanted)} where {where} has {list(found)}", entry.place)

    def result(self, unused: list[str]) -> DistInputs:
        """Values of the fully determined inputs, in the inputs' types (floats in float64)."""
        out = DistInputs([{} for _ in self.graphs], unused=unused)
        for leaf, item in self.inputs.items():
            if item.const is not None:
                continue
            buffer = self.buffers.get(leaf)
            total = 1
            for s in item.shape:
                total *= s if isinstance(s, int) else 1
            missing = total if buffer is None else int((~buffer.known).sum())
            if buffer is None or missing:
                out.undetermined.append(Undetermined(leaf.rank, item.name, missing, total))
            else:
                out.values[leaf.rank][item.name] = buffer.value
        return out


def _origin(entry: RelationEntry) -> str:
    return f"the relation of '{entry.seq}'" + (f" ({entry.place})" if entry.place else "")
