"""Records every ATen and communication operator a program runs, as the nodes of a graph.

The recorder is a torch dispatch mode: it sees the program below autograd and below tensor subclasses, that is, what
really runs on this rank, backward pass included. Writes become values (:mod:`emerge.capture.memory`), communication
becomes ``_c10d_functional`` operators (:mod:`emerge.capture.communication`). Python control flow that would look at
values computed from inputs is refused: the graph would hold for one input only.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from emerge.capture import functional
from emerge.capture.base import MAX_CONSTANT, CaptureError, Names, Place, Places, Substitution
from emerge.capture.communication import Groups, record_c10d
from emerge.capture.fsdp import record_fsdp
from emerge.capture.memory import Memory, Step, meta_like
from emerge.graph.model import Arg, DType, Input, Node, Ref, TensorType, TypedConst

_PLAIN = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer, FakeTensor)
_READS = {
    "aten._local_scalar_dense",
    "aten.item",
    "aten.is_nonzero",
    "aten.equal",
    "aten.allclose",
    "aten.is_same_size",
}
_IGNORED_NAMESPACES = ("prim", "profiler", "debugprims")
_IGNORED = ("aten.sym_", "aten._assert", "aten.is_pinned", "aten.dense_dim", "aten.size", "aten.stride", "aten.set_")
#: Multi-output view operators that become slices.
SPLITS = ("split", "split_with_sizes", "chunk", "unbind", "tensor_split", "unsafe_split", "unsafe_chunk")
_SEEDED = torch.Tag.nondeterministic_seeded


def dtype_name(dtype: torch.dtype) -> str:
    """``torch.float32`` -> ``float32``."""
    return str(dtype).removeprefix("torch.")


def is_plain(tensor: Any) -> bool:
    """True for tensors without subclass behaviour of their own (fake tensors count as plain).

    A subclass that leaves dispatch alone (a parameter with attributes, as vLLM has them) is plain.
    """
    kind = type(tensor)
    return kind in _PLAIN or kind.__torch_dispatch__ is torch._C._disabled_torch_dispatch_impl


@dataclass
class Constant:
    """A tensor that came into the program from outside: its value, where it is known."""

    name: str
    label: str | None


@dataclass
class State:
    """What has been recorded.

    Attributes:
        tainted: names of nodes and inputs whose value depends on inputs, communication or random numbers.
        alias: placeholders of buffers -> the node they stand for.
        build: names of the nodes recorded while the model was built.
        notes: things a reader of the graph must know (constants without value).
    """

    inputs: list[Input] = field(default_factory=list)
    nodes: list[Node] = field(default_factory=list)
    tainted: set[str] = field(default_factory=set)
    alias: dict[str, str] = field(default_factory=dict)
    build: set[str] = field(default_factory=set)
    notes: list[str] = field(default_factory=list)
    labels: dict[int, str] = field(default_factory=dict)
    random_calls: int = 0


class Recorder(TorchDispatchMode):
    """The dispatch mode; ``with recorder: program()``.

    Attributes:
        building: the model is being built, not run (only what later nodes need of this part is kept).
        fake: the mode whose tensors carry no data, None when the program runs on real ones.
    """

    def __init__(self, places: Places, groups: Groups, fake: FakeTensorMode | None, gradients: bool) -> None:
        super().__init__()
        self.places, self.groups, self.fake, self.gradients = places, groups, fake, gradients
        self.state = State()
        self.names = Names()
        self.memory = Memory(self.emit_at)
        self.types: dict[str, TensorType] = {}
        self.by_sequence: dict[int, Place] = {}
        self.building = True
        self.paused = 0
        self.error: CaptureError | None = None
        self.substitutions: list[Substitution] = []

    # ---- the mode -----------------------------------------------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.paused:
            return func(*args, **kwargs)
        tensors = list(iter_tensors((args, kwargs)))
        if not all(is_plain(t) for t in tensors):
            return NotImplemented
        if any(isinstance(t, FakeTensor) and t.fake_mode is not self.fake for t in tensors):
            return func(*args, **kwargs)  # torch's own shape propagation on the side
        if any(t.device.type == "meta" and not isinstance(t, FakeTensor) for t in tensors):
            return func(*args, **kwargs)
        try:
            return self.record(func, args, kwargs)
        except CaptureError as error:
            if not error.place:
                error = CaptureError(error.message, self._where(func))
            self.error = self.error or error
            raise error from None

    def _where(self, func: Any) -> str:
        place = self.places.here(None)
        return f"{place.source or 'capture'} ({func})"

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """Nothing is recorded inside the block."""
        self.paused += 1
        try:
            yield
        finally:
            self.paused -= 1

    def record(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Runs one operator and writes its node."""
        namespace, base = func.namespace, func._schema.name.split("::")[1]
        qualified = f"{namespace}.{base}"
        if namespace in _IGNORED_NAMESPACES or qualified.startswith(_IGNORED):
            return func(*args, **kwargs)
        if qualified in _READS:
            return self._read(func, args, kwargs)
        place = self._place()
        if namespace == "c10d":
            return record_c10d(self, func, args, kwargs, place)
        if qualified == "aten.as_strided" and is_view(*args, **kwargs):
            func, args, kwargs = torch.ops.aten.view.default, (args[0], list(args[1])), {}
        if namespace == "fsdp":
            return record_fsdp(self, func, args, kwargs)
        if torch.Tag.inplace_view in func.tags:
            return self._in_place_view(func, args, kwargs, place)
        if func._schema.is_mutable:
            return functional.record_mutation(self, func, args, kwargs, place)
        if torch.Tag.dynamic_output_shape in func.tags or torch.Tag.data_dependent_output in func.tags:
            known = self._data_dependent(func, args, kwargs)
            if known:
                return func(*args, **kwargs)
        encoded, encoded_kwargs = [self.encode(a) for a in args], {k: self.encode(v) for k, v in kwargs.items()}
        out = func(*args, **kwargs)
        if func._schema.name == "aten::cat" and out.numel():
            # Operands without elements add nothing; programs have them where a part may be empty (partial rotary).
            encoded[0] = [a for a, t in zip(encoded[0], args[0]) if t.numel()]  # type: ignore[arg-type]
        self._results(func, args, out, encoded, encoded_kwargs, place)
        return out

    # ---- places -------------------------------------------------------------------------------------------------

    def _place(self) -> Place:
        """Where the running operator comes from; a backward operator takes the place of its forward partner."""
        if not self.gradients or self.building:
            return self.places.here("forward" if self.gradients else None)
        node = torch._C._current_autograd_node()
        if node is not None:
            partner = self._forward_partner(node._sequence_nr())
            if partner is not None:
                return Place(partner.source, partner.code, partner.module, partner.stack, "backward")
            return self.places.here("backward")
        place = self.places.here("forward")
        # The first operator below a new autograd node is its forward; later ones of the same number have no gradient.
        self.by_sequence.setdefault(torch.autograd._get_sequence_nr() - 1, place)
        return place

    def _forward_partner(self, sequence: int) -> Place | None:
        """Place of the forward operator behind an autograd node, or of the nearest one before it."""
        for number in range(sequence, max(sequence - 4, 0), -1):
            if number in self.by_sequence:
                return self.by_sequence[number]
        return None

    # ---- values -------------------------------------------------------------------------------------------------

    def name_of(self, tensor: Any) -> str:
        """The node or input that holds a tensor's value; a tensor from outside becomes a constant.

        Raises:
            CaptureError: its memory is shared in an unknown way.
        """
        if not is_plain(tensor):
            raise CaptureError(f"a tensor of type {type(tensor).__name__} where a plain one was expected")
        found = self.memory.name_of(tensor)
        if found is None:
            found = self.constant(tensor)
        return found

    def encode(self, value: Any) -> Arg:
        """An argument as the graph model has it."""
        if isinstance(value, torch.Tensor):
            return Ref(self.name_of(value))
        if value is None or isinstance(value, (bool, int, float, str)):
            return value
        if isinstance(value, (list, tuple)):
            return [self.encode(v) for v in value]
        if isinstance(value, torch.dtype):
            return DType(dtype_name(value))
        if isinstance(value, torch.device):
            return TypedConst("device", str(value))
        if isinstance(value, torch.layout):
            return TypedConst("layout", str(value).removeprefix("torch."))
        if isinstance(value, torch.memory_format):
            return TypedConst("memory_format", str(value).removeprefix("torch."))
        if isinstance(value, torch.Generator):
            return None
        if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            raise CaptureError("a size that depends on data; give inputs whose sizes are fixed")
        raise CaptureError(f"an argument of type {type(value).__name__} has no form in a graph file")

    def constant(self, tensor: Any, label: str | None = None) -> str:
        """A tensor made outside of the program (a cached table, ``torch.tensor(...)``) as a node or input."""
        label = label or self.state.labels.get(tensor.untyped_storage()._cdata)
        with self.pause():
            name = self._constant(tensor, label)
        self.memory.define(tensor, name)
        return name

    def _constant(self, tensor: Any, label: str | None) -> str:
        real = tensor.constant if isinstance(tensor, FakeTensor) else tensor
        shape, dtype = tuple(int(s) for s in tensor.shape), dtype_name(tensor.dtype)
        wish = label or "constant"
        if real is None:
            self.state.notes.append(f"constant {wish} of shape {list(shape)} has no value: it was made without data")
            return self.add_input(wish, tensor, label=f"const:{wish}")
        values = read_values(real, self.fake)
        if values is None or dtype.startswith("complex"):
            return self.add_input(wish, tensor, label=f"const:{wish}", digest=digest_of(real, self.fake))
        flat = values if isinstance(values, list) else [values]
        while flat and isinstance(flat[0], list):
            flat = [v for row in flat for v in row]
        place = self.places.here(None)
        if all(v == flat[0] for v in flat):
            value = flat[0] if flat else 0
            kwargs: dict[str, Arg] = {"dtype": DType(dtype)}
            return self.add_node("aten.full.default", [list(shape), value], kwargs, place, tensor, wish=wish)
        name = self.add_node("get_attr", [wish], {}, place, tensor, wish=wish)
        self.state.nodes[-1].const, self.state.nodes[-1].has_const = values, True
        return name

    def add_input(
        self, wish: str, tensor: Any, *, label: str | None = None, placement: Any = None, **extra: Any
    ) -> str:
        """A graph input that holds this tensor."""
        name = self.names.new(wish)
        shape, dtype = tuple(int(s) for s in tensor.shape), dtype_name(tensor.dtype)
        self.state.inputs.append(
            Input(name, dtype, shape, label, None, placement, {k: v for k, v in extra.items() if v is not None})
        )
        self.types[name] = TensorType(dtype, shape)
        self.state.tainted.add(name)
        return name

    # ---- nodes --------------------------------------------------------------------------------------------------

    def add_node(
        self, op: str, args: list[Arg], kwargs: dict[str, Arg], place: Place | None, like: Any, *, wish: str = "",
        taint: bool = False,
    ) -> str:  # fmt: skip
        """Writes a node whose result has the type of ``like`` (a tensor, or None for a multi-output node)."""
        place = place or self.places.here(None)
        name = self.names.new(wish or short_name(op))
        node = Node(
            name,
            op,
            args,
            kwargs,
            source=place.source,
            code=place.code,
            module=place.module,
            stack=place.stack,
            phase=place.phase,
        )
        if like is None:
            node.is_tuple = True
        else:
            node.dtype, node.shape = dtype_name(like.dtype), tuple(int(s) for s in like.shape)
            self.types[name] = TensorType(node.dtype, node.shape)
        self.state.nodes.append(node)
        if taint or any(r in self.state.tainted for r in node.refs()):
            self.state.tainted.add(name)
        if self.building:
            self.state.build.add(name)
        return name

    def emit_at(self, op: str, args: list[Arg], kwargs: dict[str, Arg], like: Any, place: Place | None) -> str:
        """Writes a single-result node for :class:`Memory`."""
        return self.add_node(op, args, kwargs, place, like)

    def _results(
        self, func: Any, args: Any, out: Any, encoded: list[Arg], kwargs: dict[str, Arg], place: Place
    ) -> None:
        op = str(func)
        views = view_source(func, args)
        seeded = _SEEDED in func.tags
        collective = communicates(func)
        if collective:
            self.groups.note(encoded)
        if op == "_c10d_functional.wait_tensor.default":
            self._wait(args[0], out, encoded, place)
            return
        if isinstance(out, torch.Tensor):
            if type(out).__name__ == "AsyncCollectiveTensor":
                return  # wraps its operand and waits for it when it is used
            if not is_plain(out):
                raise CaptureError(f"{op} returned a {type(out).__name__}")

            def make() -> str:
                return self.add_node(op, encoded, kwargs, place, out, taint=seeded or collective)

            if views is not None and shares_memory(out, views):
                step = Step(op, encoded[1:], kwargs, meta_like(out), meta_like(views), place)
                self.memory.define_view(out, views, step, make)
            elif op.startswith(("aten.lift_fresh.", "aten.lift.")):
                self.memory.define(out, self.name_of(args[0]), fresh=True)
            elif any(shares_memory(out, t) for t in iter_tensors(args)):
                self._same_memory(out, make)
            else:
                self.memory.define(out, make(), fresh=True)
        elif isinstance(out, (list, tuple)) and any(isinstance(o, torch.Tensor) for o in out):
            self._several(op, out, views, encoded, kwargs, place, seeded or collective)
        elif out is not None and not isinstance(out, (int, float, bool)):
            raise CaptureError(f"{op} returned a {type(out).__name__}, which has no form in a graph file")
        if seeded and self.state.nodes and not self.building:
            self.state.nodes[-1].extra["rng"] = {"call": self.state.random_calls}
            self.state.random_calls += 1

    def _same_memory(self, out: Any, make: Any) -> None:
        """An operator that hands its operand on without saying so in its schema."""
        if self.memory.name_of(out) is None:
            self.memory.define(out, make())

    def _wait(self, operand: Any, out: Any, encoded: list[Arg], place: Place) -> None:
        name = self.add_node("_c10d_functional.wait_tensor.default", encoded, {}, place, out)
        if shares_memory(out, operand):
            self.memory.rename(out, name)
        else:
            self.memory.define(out, name, fresh=True)

    def _several(
        self, op: str, out: Sequence[Any], source: Any, encoded: list[Arg], kwargs: dict[str, Arg], place: Place,
        taint: bool,
    ) -> None:  # fmt: skip
        known = source is not None and all(isinstance(o, torch.Tensor) and shares_memory(o, source) for o in out)
        if known and op.split(".")[1] in SPLITS:
            self._split(op, out, source, encoded, kwargs, place)
            return
        tuple_name = self.add_tuple(op, encoded, kwargs, place, out, taint)
        for index, item in enumerate(out):
            if not isinstance(item, torch.Tensor):
                continue
            if source is not None and shares_memory(item, source):
                raise CaptureError(f"{op} returns several views at once, which is not understood; use slices")
            self.memory.define(item, self.item(tuple_name, index, item, place), fresh=True)

    def _split(
        self, op: str, out: Sequence[Any], source: Any, encoded: list[Arg], kwargs: dict[str, Arg], place: Place
    ) -> None:
        """Parts of a tensor as slices of it: which part a rank takes then is an offset, not the index of an output."""
        base = op.split(".")[1]
        position = 1 if base == "unbind" else 2
        given = encoded[position] if len(encoded) > position else kwargs.get("dim", 0)
        assert isinstance(given, int)
        dim, start = given % source.dim(), 0
        for index, item in enumerate(out):
            if base == "unbind":
                part, args = "aten.select.int", [dim, index]
            else:
                part, args = "aten.slice.Tensor", [dim, start, start + int(item.shape[dim])]
                start += int(item.shape[dim])
            whole: list[Arg] = [encoded[0], *args]

            def make(part: str = part, whole: list[Arg] = whole, item: Any = item) -> str:
                return self.add_node(part, whole, {}, place, item)

            self.memory.define_view(
                item, source, Step(part, whole[1:], {}, meta_like(item), meta_like(source), place), make
            )

    def add_tuple(
        self, op: str, args: list[Arg], kwargs: dict[str, Arg], place: Place, out: Sequence[Any], taint: bool = False
    ) -> str:
        """A multi-output node with the types of its tensor outputs."""
        name = self.add_node(op, args, kwargs, place, None, taint=taint)
        for index, item in enumerate(out):
            if item is not None and hasattr(item, "shape"):
                self.state.nodes[-1].elements[index] = TensorType(
                    dtype_name(item.dtype), tuple(int(s) for s in item.shape)
                )
        return name

    def item(self, tuple_name: str, index: int, like: Any, place: Place) -> str:
        """A ``getitem`` node."""
        return self.add_node("operator.getitem", [Ref(tuple_name), index], {}, place, like)

    def _in_place_view(self, func: Any, args: Any, kwargs: Any, place: Place) -> Any:
        """``unsqueeze_`` and the like change how a tensor sees its memory, not what is there."""
        base = func._schema.name.split("::")[1]
        if base in ("resize_", "set_", "resize_as_"):
            if args[0].numel() != 0 and base != "set_":
                raise CaptureError(f"{base} of a tensor that holds values; allocate a new tensor instead")
            return func(*args, **kwargs)
        form = functional.functional_form(func, ["self"])
        if form is None:
            raise CaptureError(f"{func} has no functional form; use the operator without the underscore")
        op = str(form)
        with self.pause():
            parent = (
                args[0].view(args[0].shape)
                if args[0].is_contiguous()
                else args[0].as_strided(args[0].shape, args[0].stride(), args[0].storage_offset())
            )
        self.name_of(args[0])
        encoded, encoded_kwargs = [self.encode(a) for a in args], {k: self.encode(v) for k, v in kwargs.items()}
        out = func(*args, **kwargs)
        step = Step(op, encoded[1:], encoded_kwargs, meta_like(args[0]), meta_like(parent), place)
        self.memory.define_view(
            args[0], parent, step, lambda: self.add_node(op, encoded, encoded_kwargs, place, args[0])
        )
        return out

    # ---- reading values -----------------------------------------------------------------------------------------

    def depends_on_inputs(self, tensor: Any) -> bool:
        """True when a tensor's value is not the same for every input."""
        if not is_plain(tensor):
            return True
        name = self.memory.name_of(tensor)
        return name is not None and name in self.state.tainted

    def refuse_reading(self, tensor: Any, what: str) -> None:
        """Raises:
        CaptureError: Python looks at values that depend on inputs.
        """
        if self.building or not self.depends_on_inputs(tensor):
            return
        place = self.places.here(None)
        raise CaptureError(
            f"{what} reads a value that depends on the inputs (line: {place.code or '?'}), so the program may take "
            "another path for other inputs; compute it with tensor operators, or fix it in the config",
            place.source or "capture",
        )

    def _read(self, func: Any, args: Any, kwargs: Any) -> Any:
        for tensor in iter_tensors((args, kwargs)):
            self.refuse_reading(tensor, str(func))
        return func(*args, **kwargs)

    def _data_dependent(self, func: Any, args: Any, kwargs: Any) -> bool:
        """True for an operator whose result's shape depends on values, all of which are constants.

        Raises:
            CaptureError: they depend on inputs.
        """
        base = func._schema.name
        if base in ("aten::index", "aten::_unsafe_index"):
            indices = [t for t in iter_tensors(args[1:]) if t.dtype in (torch.bool, torch.uint8)]
            if not indices:
                return False
        elif base == "aten::repeat_interleave" and kwargs.get("output_size") is not None:
            return False
        else:
            indices = list(iter_tensors((args, kwargs)))
        for tensor in indices:
            self.refuse_reading(tensor, str(func))
        return base not in ("aten::index", "aten::_unsafe_index")


# --------------------------------------------------------------------------------------------------------------


def iter_tensors(value: Any) -> Iterator[Any]:
    """All tensors in nested lists, tuples and dicts."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from iter_tensors(item)
    elif isinstance(value, dict):
        yield from iter_tensors(list(value.values()))


def is_view(tensor: Any, size: Any, stride: Any, offset: Any = None) -> bool:
    """True for an ``as_strided`` that sees the elements of a contiguous tensor in row-major order."""
    dense = [1]
    for n in reversed(size[1:]):
        dense.append(dense[-1] * n)
    count = dense[-1] * (size[0] if size else 1)
    same = tensor.is_contiguous() and count == tensor.numel() and offset in (None, tensor.storage_offset())
    return same and all(n == 1 or s == w for n, s, w in zip(size, stride, reversed(dense)))


def short_name(op: str) -> str:
    """``aten.mm.default`` -> ``mm``."""
    parts = op.split(".")
    return (parts[1] if len(parts) > 1 else parts[0]).strip("_") or "node"


def communicates(func: Any) -> bool:
    """True for functional collectives."""
    return func.namespace in ("_c10d_functional", "_c10d_functional_autograd", "c10d_functional", "_dtensor")


def shares_memory(a: Any, b: Any) -> bool:
    """True when two plain tensors lie in one storage."""
    return is_plain(a) and is_plain(b) and a.untyped_storage()._cdata == b.untyped_storage()._cdata


def view_source(func: Any, args: Any) -> Any | None:
    """The operand a view operator's result is a view of, None for other operators."""
    returns = func._schema.returns
    hidden = func._schema.name == "aten::_unsafe_view"  # a view whose schema does not say so
    if not hidden and not any(r.alias_info is not None and not r.alias_info.is_write for r in returns):
        return None
    first = args[0] if args else None
    return first if isinstance(first, torch.Tensor) else None


def read_values(tensor: Any, fake: Any) -> Any | None:
    """A real tensor's values as nested lists or a number; None above :data:`MAX_CONSTANT` elements."""
    if tensor.numel() > MAX_CONSTANT and not _uniform(tensor, fake):
        return None
    with _no_fake(fake), torch.no_grad():
        if tensor.numel() > MAX_CONSTANT:
            return tensor.detach().reshape(-1)[:1].tolist()
        return tensor.detach().cpu().tolist()


def _uniform(tensor: Any, fake: Any) -> bool:
    with _no_fake(fake), torch.no_grad():
        flat = tensor.detach().reshape(-1)
        return bool((flat == flat[0]).all())


def digest_of(tensor: Any, fake: Any) -> str:
    """Content hash of a real tensor, ``sha256:...``: equal digests are equal values."""
    import hashlib

    with _no_fake(fake), torch.no_grad():
        data = tensor.detach().cpu().contiguous().view(torch.uint8 if tensor.dim() else tensor.dtype)
        return "sha256:" + hashlib.sha256(data.numpy().tobytes()).hexdigest()


@contextlib.contextmanager
def _no_fake(fake: Any) -> Iterator[None]:
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    with unset_fake_temporarily() if fake is not None else contextlib.nullcontext():
        yield
