"""Which value a tensor holds: tensors are told apart by memory, so that views and in-place writes become values.

Every storage has roots (tensors whose value some node defines) and views of them. A tensor is found by its storage
and its geometry (dtype, offset, sizes, strides), so aliases made behind capture's back (``.data``, saved tensors of
autograd, ``Parameter`` wrappers, DTensor's local tensors) are found as well. A write makes a new version of the
storage: the written view is scattered back into the root, and other views are derived again when they are read.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from emerge.capture.base import CaptureError, Place
from emerge.graph.model import Arg, Ref

Geometry: TypeAlias = tuple[Any, ...]
#: ``emit(op, args, kwargs, example tensor, place) -> name`` writes one single-result node.
Emit: TypeAlias = "Callable[[str, list[Arg], dict[str, Arg], Any, Place | None], str]"

_RESHAPES = {"view", "_unsafe_view", "reshape", "_reshape_alias", "unsqueeze", "squeeze", "flatten", "unflatten"}


def geometry(tensor: Any) -> Geometry:
    """What tells two tensors on one storage apart."""
    flags = (tensor.is_conj(), tensor.is_neg())
    return (tensor.dtype, tensor.storage_offset(), tuple(tensor.shape), tuple(tensor.stride()), flags)


def is_contiguous(g: Geometry) -> bool:
    """True where the elements lie densely in row-major order."""
    expected = 1
    for size, stride in zip(reversed(g[2]), reversed(g[3])):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


@dataclass
class Step:
    """How a view is made from its parent (the first argument).

    Attributes:
        op: with overload. args: the arguments after the parent.
        like: the view's type; ``parent_like``: the parent's.
    """

    op: str
    args: list[Arg]
    kwargs: dict[str, Arg]
    like: Any
    parent_like: Any
    place: Place | None


@dataclass
class View:
    """A tensor of a storage: the node that holds its value as of ``version``; roots have no parent."""

    name: str
    version: int
    parent: Geometry | None = None
    step: Step | None = None


@dataclass
class Cell:
    """One storage: ``ref`` keeps its identity from being reused, not its memory."""

    ref: Any
    version: int = 0
    views: dict[Geometry, View] = field(default_factory=dict)
    roots: list[Geometry] = field(default_factory=list)


class Memory:
    """The storages of a program and the values they hold."""

    def __init__(self, emit: Emit) -> None:
        self.emit = emit
        self.cells: dict[int, Cell] = {}

    def cell(self, tensor: Any) -> Cell | None:
        """The storage of a tensor, where it is known."""
        return self.cells.get(tensor.untyped_storage()._cdata)

    def define(self, tensor: Any, name: str, fresh: bool = False) -> None:
        """A tensor whose value is ``name``. ``fresh`` forgets everything known about its storage."""
        storage = tensor.untyped_storage()
        cell = self.cells.get(storage._cdata)
        if cell is None or fresh:
            cell = self.cells[storage._cdata] = Cell(StorageWeakRef(storage))
        g = geometry(tensor)
        if g in cell.views:
            cell.views[g].name, cell.views[g].version = name, cell.version
            return
        cell.views[g] = View(name, cell.version)
        cell.roots.append(g)

    def define_view(self, tensor: Any, parent: Any, step: Step, make: Callable[[], str]) -> None:
        """A view of ``parent``; ``make`` writes the node, and is not called where the value is known already."""
        cell = self.cell(tensor)
        g, pg = geometry(tensor), geometry(parent)
        if cell is None or pg not in cell.views:
            self.define(tensor, make())
            return
        known = cell.views.get(g)
        if known is None:
            cell.views[g] = View(make(), cell.version, pg, step)
        elif known.version != cell.version:
            self._refresh(cell, g)

    def name_of(self, tensor: Any) -> str | None:
        """The node that holds a tensor's present value; None for a storage that nothing is known about."""
        cell = self.cell(tensor)
        if cell is None:
            return None
        g = geometry(tensor)
        if g not in cell.views:
            self._find(cell, tensor, g)
        return self._refresh(cell, g)

    def _find(self, cell: Cell, tensor: Any, g: Geometry) -> None:
        """An alias that no recorded operator made: the same elements of a root in another arrangement."""
        for root in cell.roots:
            same = root[0] == g[0] and root[1] == g[1] and root[4] == g[4] and is_contiguous(root)
            if not same:
                continue
            like, parent_like = meta_like(tensor), meta_of(root)
            if is_contiguous(g) and parent_like.numel() == tensor.numel():
                step = Step("aten.view.default", [list(g[2])], {}, like, parent_like, None)
            else:
                step = Step("aten.as_strided.default", [list(g[2]), list(g[3]), g[1]], {}, like, parent_like, None)
            cell.views[g] = View("", -1, root, step)
            return
        raise CaptureError(
            f"a tensor of shape {list(g[2])} shares memory with another value in a way that no recorded operator "
            "explains (.data or set_ on a part of a storage); use ordinary views or copies"
        )

    def _refresh(self, cell: Cell, g: Geometry) -> str:
        view = cell.views[g]
        if view.version != cell.version:
            if view.parent is None or view.step is None:
                raise CaptureError("a tensor overlaps memory that was written through another one; copy it first")
            view.name = self._take(self._refresh(cell, view.parent), view.step)
            view.version = cell.version
        return view.name

    def _take(self, parent: str, step: Step) -> str:
        return self.emit(step.op, [Ref(parent), *step.args], step.kwargs, step.like, step.place)

    def rename(self, tensor: Any, name: str) -> None:
        """The same value under another name (a completed wait for communication)."""
        cell = self.cell(tensor)
        assert cell is not None
        cell.views[geometry(tensor)].name = name

    def write(self, tensor: Any, name: str, place: Place) -> None:
        """The tensor now holds ``name``; everything that shares its memory changes with it.

        Raises:
            CaptureError: it overlaps with memory whose relation to it is unknown.
        """
        cell = self.cell(tensor)
        assert cell is not None
        g = geometry(tensor)
        if len(cell.roots) > 1:
            raise CaptureError(
                "writes into memory that several inputs share in an unknown way; pass them as copies or as one tensor"
            )
        chain = [g]
        while (parent := cell.views[chain[-1]].parent) is not None:
            chain.append(parent)
        olds = [self._refresh(cell, c) for c in chain]
        cell.version += 1
        for i, c in enumerate(chain):
            view = cell.views[c]
            view.name, view.version = name, cell.version
            if view.step is not None:
                name = self._scatter(olds[i + 1], name, view.step, place)

    def _scatter(self, parent: str, new: str, step: Step, place: Place) -> str:
        """The parent's new value after one of its views became ``new``."""
        base = step.op.split(".")[1]
        like = step.parent_like
        sizes = list(like.shape)
        if base in _RESHAPES and step.op != "aten.view.dtype":
            return self.emit("aten.view.default", [Ref(new), sizes], {}, like, place)
        if base in ("detach", "alias", "lift_fresh"):
            return new
        if base == "t":
            return self.emit("aten.t.default", [Ref(new)], {}, like, place)
        if base in ("transpose", "swapaxes"):
            return self.emit("aten.transpose.int", [Ref(new), *step.args], {}, like, place)
        if base == "permute":
            dims = [d % like.dim() for d in _ints(step.args[0])]
            inverse = [dims.index(d) for d in range(len(dims))]
            return self.emit("aten.permute.default", [Ref(new), list(inverse)], {}, like, place)
        if base == "slice":
            return self.emit("aten.slice_scatter.default", [Ref(parent), Ref(new), *step.args], {}, like, place)
        if base in ("select", "diagonal"):
            op = "aten.select_scatter.default" if base == "select" else "aten.diagonal_scatter.default"
            return self.emit(op, [Ref(parent), Ref(new), *step.args], {}, like, place)
        if base == "as_strided":
            return self.emit("aten.as_strided_scatter.default", [Ref(parent), Ref(new), *step.args], {}, like, place)
        raise CaptureError(f"writes through a view made by {step.op}, which cannot be undone; write to a copy instead")


def _ints(arg: Arg) -> list[int]:
    assert isinstance(arg, list)
    return [int(a) for a in arg]  # type: ignore[arg-type]


def meta_like(tensor: Any) -> Any:
    """A tensor without memory of the same dtype and shape."""
    return TypeOnly(tensor.dtype, tuple(tensor.shape))


def meta_of(g: Geometry) -> Any:
    """The type behind a geometry."""
    return TypeOnly(g[0], g[2])


@dataclass(frozen=True)
class TypeOnly:
    """dtype and shape of a tensor, without the tensor."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    def dim(self) -> int:
        """Number of dimensions."""
        return len(self.shape)

    def numel(self) -> int:
        """Number of elements."""
        count = 1
        for s in self.shape:
            count *= s
        return count
