"""One capture from start to end: build the program, bind its inputs, run it, write the graph."""

from __future__ import annotations

import contextlib
import logging
import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from emerge import __version__
from emerge.capture.base import CaptureError, Places, Substitution
from emerge.capture.communication import UNSUPPORTED, Groups
from emerge.capture.functions import Functions
from emerge.capture.placements import local_part, placement_of
from emerge.capture.recorder import Recorder, is_plain
from emerge.graph.model import Arg, Graph, Input, Node, Ref

#: Elements of weights of one graph whose values are kept in memory.
MOST_VALUES = 1 << 26
#: Communication is kept even where nothing reads its result: a call that others wait for is part of the program.
_EFFECTS = ("_c10d_functional.", "_dtensor.", "c10d.")


@dataclass
class Settings:
    """How to capture.

    Attributes:
        mode: ``eval`` (no gradients) or ``train``.
        fake: run without data, for models of full size.
        mesh: device axes of the program, with ``rank`` in it.
        seed: of torch's generator while the model is built, so that every rank draws the same weights.
        loss: result of the module -> scalar to differentiate, for ``train``.
        files: filled with the source files that take part.
    """

    name: str
    mode: str = "eval"
    fake: bool = False
    mesh: dict[str, int] = field(default_factory=dict)
    rank: int = 0
    world: int = 1
    seed: int = 0
    loss: Callable[[Any], Any] | None = None
    files: set[str] = field(default_factory=set)


@dataclass
class Program:
    """What is captured: a module or function, with example inputs.

    Attributes:
        substitutions: what was replaced in it. close: called once the capture has ended, however it ended.
    """

    target: Any
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    substitutions: tuple[Substitution, ...] = ()
    close: Callable[[], None] | None = None


def program_of(built: Any) -> Program:
    """The result of a user's factory: ``(module or callable, inputs)``; inputs are a tuple, or a dict by name.

    Raises:
        CaptureError: it is something else.
    """
    if isinstance(built, Program):
        return built
    if isinstance(built, (tuple, list)) and len(built) in (2, 3) and callable(built[0]):
        target, args = built[0], built[1]
        kwargs = dict(built[2]) if len(built) == 3 else {}
        if isinstance(args, Mapping) and not isinstance(args, torch.Tensor):
            return Program(target, (), {**args, **kwargs})
        return Program(target, tuple(args) if isinstance(args, (tuple, list)) else (args,), kwargs)
    raise CaptureError(
        f"expected (module or callable, example inputs), found a {type(built).__name__}; return such a pair from build"
    )


def run_capture(
    build: Callable[[], Any], settings: Settings, substitutions: Sequence[Substitution] = (), fake_mode: Any = None,
    prepare: Callable[[Recorder], None] | None = None,
) -> Graph:  # fmt: skip
    """Builds a program, runs it once and returns its graph.

    Args:
        build: gives the module or callable and its example inputs; what it computes (tables, masks) is recorded too.
        substitutions: what the caller has replaced already.
        fake_mode: the mode that existing tensors without data belong to.
        prepare: called with the recorder before anything runs.

    Raises:
        CaptureError: the program fails, branches on values of its inputs, or uses what a graph cannot hold.
    """
    session = _Session(build, settings, list(substitutions), fake_mode)
    if prepare is not None:
        prepare(session.recorder)
    return session.run()


class _Session:
    def __init__(
        self, build: Callable[[], Any], settings: Settings, substitutions: list[Substitution], fake_mode: Any
    ) -> None:
        if settings.mode not in ("eval", "train"):
            raise CaptureError(f"expected mode eval or train, found {settings.mode!r}; correct it")
        self.build, self.settings, self.substitutions = build, settings, substitutions
        self.fake = (fake_mode or FakeTensorMode(allow_non_fake_inputs=True)) if settings.fake else None
        self.places = Places(stop={_Session.run.__code__})
        self.groups = Groups(settings.mesh, settings.rank, settings.world)
        self.train = settings.mode == "train"
        self.recorder = Recorder(self.places, self.groups, self.fake, self.train)
        self.bound: dict[str, tuple[str, Any]] = {}  # label -> (input name, tensor)
        self.buffers: dict[str, tuple[str, Any]] = {}  # label -> (placeholder, tensor)
        self.outputs: list[tuple[str, str, list[str | None] | None]] = []
        self.kept = 0  # elements of weights whose values are kept

    @contextlib.contextmanager
    def _modes(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.random.fork_rng(devices=[]))
            if not self.train:
                stack.enter_context(torch.no_grad())
            if self.fake is not None:
                stack.enter_context(self.fake)
            stack.enter_context(self.recorder)
            stack.enter_context(Functions(self.recorder))
            yield

    def run(self) -> Graph:
        rec = self.recorder
        log = logging.getLogger("torch._subclasses.fake_tensor")  # it prints a traceback before every error we report
        level = log.level
        log.setLevel(logging.CRITICAL)
        try:
            with contextlib.ExitStack() as ended, self._modes():
                torch.manual_seed(self.settings.seed)
                program = self._build(ended)
                self._bind(program)
                rec.building = False
                result = self._call(program)
                self._collect(program, result)
        except CaptureError:
            raise
        except Exception as error:
            raise self._failure(error) from error
        finally:
            log.setLevel(level)
        return self._graph()

    def _failure(self, error: Exception) -> CaptureError:
        if self.recorder.error is not None:
            return self.recorder.error
        import traceback

        from emerge.capture.base import is_user_file, shown_path

        frames = [f for f in traceback.extract_tb(error.__traceback__) if is_user_file(f.filename)]
        place = f"{shown_path(frames[-1].filename)}:{frames[-1].lineno}" if frames else self.settings.name
        text = (str(error) or "no message").strip().splitlines()[0]
        stage = "building the model" if self.recorder.building else "running the model"
        if type(error).__name__ in ("DataDependentOutputException", "DynamicOutputShapeException"):
            text = f"a value or shape depends on data ({text}), which a capture without data cannot know"
        return CaptureError(f"{stage} failed: {type(error).__name__}: {text}", place)

    # ---- building -----------------------------------------------------------------------------------------------

    def _build(self, ended: contextlib.ExitStack) -> Program:
        program = program_of(self.build())
        self.substitutions.extend(program.substitutions)
        if program.close is not None:
            ended.callback(program.close)
        if isinstance(program.target, torch.nn.Module):
            program.target.train(self.train)
        return program

    def _bind(self, program: Program) -> None:
        """Parameters, persistent buffers and example inputs become graph inputs; other buffers keep their value."""
        rec = self.recorder
        with rec.pause():
            target = program.target
            rec.places.default = definition(target)
            module = target if isinstance(target, torch.nn.Module) else getattr(target, "__self__", None)
            if isinstance(module, torch.nn.Module):
                self._bind_module(module)
            for label, tensor in tensors_of(argument_names(target, program)):
                self._bind_input(label, tensor)

    def _bind_module(self, module: Any) -> None:
        rec = self.recorder
        rec.places.modules = {id(m): name or type(module).__name__ for name, m in module.named_modules()}
        transient = {
            f"{prefix}.{name}" if prefix else name
            for prefix, m in module.named_modules(remove_duplicate=False)  # a shared module under all its names
            for name in m._non_persistent_buffers_set
        }
        for label, tensor in module.named_parameters(remove_duplicate=False):
            self._bind_input(label, tensor, stored=True)
        plain: list[tuple[str, Any]] = []
        for label, tensor in module.named_buffers(remove_duplicate=False):
            if label in transient:
                if not any(known is tensor for _, known in plain):
                    plain.append((label, tensor))
            else:
                self._bind_input(label, tensor, stored=True)
        for prefix, m in module.named_modules():
            for key, value in vars(m).items():
                if isinstance(value, torch.Tensor) and is_plain(value):
                    rec.state.labels.setdefault(value.untyped_storage()._cdata, f"{prefix}.{key}" if prefix else key)
        for label, tensor in plain:
            self._bind_buffer(label, tensor)

    def _bind_input(self, label: str, tensor: Any, stored: bool = False) -> None:
        """``stored``: a parameter or buffer, whose values are worth keeping."""
        rec = self.recorder
        local = local_part(tensor)
        placement, whole = placement_of(tensor, self.settings.mesh)
        for other, (_, known) in self.bound.items():
            if same_tensor(known, local):  # tied weights: one input under several labels
                entry = next(i for i in rec.state.inputs if i.label == other)
                entry.extra.setdefault("aliases", []).append(label)
                return
        name = rec.add_input(label, local, label=label, placement=placement, global_shape=whole)
        shared = any(k.untyped_storage()._cdata == local.untyped_storage()._cdata for _, k in self.bound.values())
        rec.memory.define(local, name, fresh=not shared)
        self.bound[label] = (name, local)
        if stored and self.kept + local.numel() <= MOST_VALUES:
            values = values_of(local)
            if values is not None:
                self.kept += local.numel()
                rec.state.inputs[-1].values = values

    def _bind_buffer(self, label: str, tensor: Any) -> None:
        """A buffer that no checkpoint holds keeps its computed value, and becomes an input if the program writes it."""
        rec = self.recorder
        local = local_part(tensor)
        rec.state.labels.setdefault(local.untyped_storage()._cdata, label)
        source = rec.name_of(local)
        cell = rec.memory.cell(local)
        if any(same_tensor(k, local) for _, k in self.bound.values()) or (cell is not None and len(cell.views) > 1):
            return
        name = rec.names.new(label)
        rec.state.alias[name] = source
        if source in rec.state.tainted:
            rec.state.tainted.add(name)
        rec.types[name] = rec.types[source]
        rec.memory.define(local, name, fresh=True)
        self.buffers[label] = (name, local)

    # ---- running ------------------------------------------------------------------------------------------------

    def _call(self, program: Program) -> Any:
        target = program.target
        result = target(*program.args, **program.kwargs)
        if not self.train or not isinstance(target, torch.nn.Module):
            return result
        loss = self.settings.loss(result) if self.settings.loss is not None else default_loss(result)
        named = {k: p for k, p in target.named_parameters() if p.requires_grad}
        grads = torch.autograd.grad(loss, list(named.values()), allow_unused=True) if named else ()
        return {"loss": loss, **{f"grad:{k}": g for k, g in zip(named, grads) if g is not None}}

    def _collect(self, program: Program, result: Any) -> None:
        rec = self.recorder
        for label, tensor in tensors_of(result, "output"):
            self._add_output(label, tensor)
        if not self.outputs and not any(n.op.startswith(_EFFECTS) for n in rec.state.nodes):
            raise CaptureError(
                f"the program returns no tensor but {type(result).__name__}; return its outputs", self.settings.name
            )
        with rec.pause():
            for label, (name, tensor) in [*self.bound.items(), *self.buffers.items()]:
                if rec.name_of(tensor) != name:
                    self._add_output(f"mutated:{label}", tensor)
            module = program.target
            if isinstance(module, torch.nn.Module):
                self._rebound(module)

    def _rebound(self, module: Any) -> None:
        """Buffers that were replaced by new tensors instead of written."""
        for label, tensor in module.named_buffers():
            before = self.bound.get(label) or self.buffers.get(label)
            if before is not None and not same_tensor(before[1], local_part(tensor)):
                self._add_output(f"mutated:{label}", tensor)

    def _add_output(self, label: str, tensor: Any) -> None:
        placement, _ = placement_of(tensor, self.settings.mesh)
        local = local_part(tensor)
        if any(o[0] == label for o in self.outputs):
            return
        self.outputs.append((label, self.recorder.name_of(local), placement))

    # ---- the graph ----------------------------------------------------------------------------------------------

    def _graph(self) -> Graph:
        rec, settings = self.recorder, self.settings
        state = rec.state
        mutated = {label.removeprefix("mutated:") for label, _, _ in self.outputs if label.startswith("mutated:")}
        for label in mutated & set(self.buffers):
            name, _ = self.buffers[label]
            del state.alias[name]
            state.inputs.append(Input(name, rec.types[name].dtype, rec.types[name].shape, label))
        alias = state.alias

        def resolve(name: str) -> str:
            while name in alias:
                name = alias[name]
            return name

        outputs = [(label, resolve(name), placement) for label, name, placement in self.outputs]
        nodes = live_nodes(state.nodes, {n for _, n, _ in outputs}, resolve, state.build)
        for node in nodes:
            if node.op.startswith("c10d."):
                raise CaptureError(UNSUPPORTED.format(node.op.split(".")[1]), node.source or node.name)
        names = {i.name for i in state.inputs} | {n.name for n in nodes}
        used = {r for n in nodes for r in n.refs()} | {n for _, n, _ in outputs}
        keep = [i for i in state.inputs if i.name in used or not (i.label or "").startswith("const:")]
        assert used <= names, f"dangling names {sorted(used - names)[:5]}"
        extra: dict[str, Any] = {"output_labels": [label for label, _, _ in outputs]}
        if any(p is not None for _, _, p in outputs):
            extra["output_placements"] = [p for _, _, p in outputs]
        replaced = [*self.substitutions, *rec.substitutions]
        if replaced:
            extra["substitutions"] = [s.as_json() for s in replaced]
        if state.notes:
            extra["capture_notes"] = state.notes
        settings.files |= self.places.files
        extra["captured_with"] = {
            "emerge": __version__, "torch": torch.__version__, "python": platform.python_version(),
            "mode": settings.mode, "fake": settings.fake,
        }  # fmt: skip
        stacks, nodes = compact_stacks(self.places.stacks, nodes)
        return Graph(
            name=settings.name, inputs=keep, nodes=nodes, outputs=[n for _, n, _ in outputs], rank=settings.rank,
            world_size=settings.world, direction="both" if self.train else "fw", stacks=stacks,
            groups=self.groups.used, mesh=dict(settings.mesh), extra=extra,
        )  # fmt: skip


def values_of(tensor: Any) -> Any | None:
    """The content of a real tensor as a numpy array of its own, 16-bit floats widened; None where it has none."""
    if isinstance(tensor, FakeTensor) or tensor.device.type == "meta" or tensor.dtype.is_complex:
        return None
    if tensor.dtype.is_floating_point and tensor.dtype.itemsize < 4:
        return tensor.detach().float().cpu().numpy() if tensor.dtype.itemsize == 2 else None
    return tensor.detach().cpu().clone().numpy()


def default_loss(result: Any) -> Any:
    """The scalar a module's result holds: ``.loss``, or the result itself.

    Raises:
        CaptureError: there is none.
    """
    loss = getattr(result, "loss", None)
    if loss is None and isinstance(result, torch.Tensor) and result.numel() == 1:
        loss = result
    if loss is None:
        raise CaptureError("the module returns no scalar loss in train mode; give loss= or return one")
    return loss


def definition(target: Any) -> tuple[str, int] | None:
    """File and line where a module's forward, or a function, is written."""
    import inspect

    function = inspect.unwrap(
        getattr(type(target), "forward", target) if isinstance(target, torch.nn.Module) else target
    )
    code = getattr(function, "__code__", None)
    return (code.co_filename, code.co_firstlineno) if code is not None else None


def same_tensor(a: Any, b: Any) -> bool:
    """The same elements of the same memory."""
    from emerge.capture.memory import geometry

    return a.untyped_storage()._cdata == b.untyped_storage()._cdata and geometry(a) == geometry(b)


def argument_names(target: Any, program: Program) -> dict[str, Any]:
    """Example inputs by the parameter names of the callable."""
    import inspect

    function = target.forward if isinstance(target, torch.nn.Module) else target
    try:
        bound = inspect.signature(function).bind(*program.args, **program.kwargs)
    except (TypeError, ValueError):
        return {**{f"arg{i}": a for i, a in enumerate(program.args)}, **program.kwargs}
    out: dict[str, Any] = {}
    for name, value in bound.arguments.items():
        kind = inspect.signature(function).parameters[name].kind
        if kind is inspect.Parameter.VAR_KEYWORD:
            out.update(value)
        else:
            out[name] = value
    return out


def argument_labels(target: Any, inputs: Sequence[Any]) -> list[str]:
    """Labels that a capture gives to its example inputs, in their order."""
    return [label for label, _ in tensors_of(argument_names(target, Program(target, tuple(inputs), {})))]


def relate_by_position(
    reference: tuple[Any, Graph], implementation: tuple[Any, Graph], inputs: Sequence[Any]
) -> list[tuple[str, int, int]]:
    """Gives arguments whose names do not meet the labels of those in their place: both programs are called with ``inputs``.

    Args:
        reference, implementation: a program and its capture; labels of the latter change.

    Returns:
        Arguments of both programs that stand at another place, which are related by name: (name, place, other place).
    """
    (target, ours), (other, theirs) = reference, implementation
    names, others = argument_labels(target, inputs), argument_labels(other, inputs)
    if len(names) != len(others):
        return []
    taken = {i.label for i in (*ours.inputs, *theirs.inputs)}
    moved = {b: a for a, b in zip(names, others) if a not in others and b not in names and {a, b} <= taken}
    for item in theirs.inputs:
        if item.label is not None:
            item.label = moved.get(item.label, item.label)
    return [(a, i, others.index(a)) for i, a in enumerate(names) if a in others and others.index(a) != i]


def tensors_of(value: Any, prefix: str = "", depth: int = 6) -> Iterator[tuple[str, Any]]:
    """All tensors of nested containers and plain objects (kv caches), with dotted paths."""
    if isinstance(value, torch.Tensor):
        yield prefix or "value", value
        return
    if isinstance(value, torch.nn.Module) or depth == 0:
        return
    items: list[tuple[str, Any]] = []
    if isinstance(value, Mapping):
        items = [(str(k), v) for k, v in value.items()]
        prefix = "" if prefix == "output" else prefix
    elif isinstance(value, (list, tuple)):
        items = list(zip(getattr(value, "_fields", None) or map(str, range(len(value))), value))
    elif hasattr(value, "__dict__") and not isinstance(value, type) and not callable(value):
        items = list(vars(value).items())
    for key, item in items:
        yield from tensors_of(item, f"{prefix}.{key}" if prefix else key, depth - 1)


def live_nodes(nodes: list[Node], outputs: set[str], resolve: Callable[[str], str], build: set[str]) -> list[Node]:
    """The nodes that outputs need, and all communication of the run, with buffer placeholders resolved."""
    needed = set(outputs)
    kept: list[Node] = []
    elements: dict[str, set[int]] = {}
    for node in reversed(nodes):
        effect = node.op.startswith(_EFFECTS) and node.op != "_c10d_functional.wait_tensor.default"
        if node.name not in needed and not (effect and node.name not in build):
            continue
        node.args = _resolved(node.args, resolve)
        node.kwargs = {k: _one(v, resolve) for k, v in node.kwargs.items()}
        needed.update(node.refs())
        if node.op == "operator.getitem" and isinstance(node.args[0], Ref) and isinstance(node.args[1], int):
            elements.setdefault(node.args[0].name, set()).add(node.args[1])
        if node.is_tuple:
            node.elements = {i: t for i, t in node.elements.items() if i in elements.get(node.name, ())}
        kept.append(node)
    return kept[::-1]


def _resolved(args: list[Arg], resolve: Callable[[str], str]) -> list[Arg]:
    return [_one(a, resolve) for a in args]


def _one(arg: Arg, resolve: Callable[[str], str]) -> Arg:
    if isinstance(arg, Ref):
        return Ref(resolve(arg.name))
    if isinstance(arg, list):
        return _resolved(arg, resolve)
    return arg


def compact_stacks(stacks: list[list[str]], nodes: list[Node]) -> tuple[list[list[str]], list[Node]]:
    """The stacks that nodes use, renumbered."""
    index: dict[int, int] = {}
    for node in nodes:
        if node.stack is not None:
            node.stack = index.setdefault(node.stack, len(index))
    return [stacks[old] for old in index], nodes
