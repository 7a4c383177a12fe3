"""Runs one rank's graph node by node, as a generator that yields whenever it has to wait for another rank."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

from emerge.execute._torch import torch
from emerge.execute.aliasing import check_mutations, identities, split_op
from emerge.execute.collectives import Board, Pending, Waiting, is_collective, issue
from emerge.execute.constants import const_subgraph
from emerge.execute.ops.base import Call, lookup
from emerge.execute.options import Options
from emerge.execute.precision import narrowest, widen
from emerge.graph.model import Arg, DType, Graph, Node, Ref, TypedConst, is_floating
from emerge.util.errors import BudgetExceeded, EmergeError, ExecutionError


@contextmanager
def default_dtype(dtype: Any) -> Iterator[None]:
    """torch's default floating type inside the block (what int / int and new tensors become)."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


class RankRun:
    """One execution of one graph.

    Values are kept until their last use; outputs and ``keep`` stay. Values of constant sub-graphs are kept in
    their recorded types and widened to float64 where other nodes read them.

    Args:
        inputs: input name -> tensor of the declared shape; floating ones are cast to the execution type.
        board: where the ranks meet; ``rank`` is this graph's position on it.
        keep: names whose values are wanted besides the outputs, or ``"all"``.

    Raises:
        ExecutionError: inputs missing or of another shape; in-place operators that need functionalisation.
    """

    def __init__(
        self,
        graph: Graph,
        inputs: dict[str, Any],
        board: Board,
        rank: int = 0,
        options: Options | None = None,
        keep: Iterable[str] | str = (),
    ) -> None:
        self.graph = graph
        self.board = board
        self.rank = rank
        self.options = options or Options()
        self.device = self.options.torch_device()
        self.types = graph.types()
        self.nodes = {n.name: n for n in graph.nodes}
        self.const = const_subgraph(graph)
        self.mutating = check_mutations(graph)
        self.same = identities(graph, self.mutating)
        outputs = {o for o in graph.outputs if o is not None}
        known = {i.name for i in graph.inputs} | set(self.nodes)
        self.keep = known if keep == "all" else outputs | set(keep)
        unknown = sorted(self.keep - known)
        if unknown:
            raise ExecutionError(f"asked to keep unknown values {unknown[:5]}", place=graph.path or graph.name)
        self.env: dict[str, Any] = {}
        self.wide: dict[str, Any] = {}
        self.recorded: set[str] = set()
        self.last_use = self._last_uses()
        self.used_elements = self._used_elements()
        self._load_inputs(inputs)

    def _place(self, name: str) -> str:
        return f"{self.graph.path or self.graph.name}: node '{name}'"

    def _last_uses(self) -> dict[int, list[str]]:
        last = {i.name: -1 for i in self.graph.inputs}
        for position, node in enumerate(self.graph.nodes):
            last[node.name] = position
            for name in node.refs():
                last[name] = position
        uses: dict[int, list[str]] = {}
        for name, position in last.items():
            if name not in self.keep:
                uses.setdefault(position, []).append(name)
        return uses

    def _used_elements(self) -> dict[str, set[int]]:
        used: dict[str, set[int]] = {}
        for node in self.graph.nodes:
            if split_op(node.op)[:2] != ("operator", "getitem") or len(node.args) != 2:
                continue
            source, index = node.args
            if isinstance(source, Ref) and isinstance(index, int):
                used.setdefault(source.name, set()).add(index)
        return used

    def _load_inputs(self, inputs: dict[str, Any]) -> None:
        from emerge.execute.ops.python import constant_tensor

        place = self.graph.path or self.graph.name
        for item in self.graph.inputs:
            if item.const is not None:
                value = constant_tensor(item.const, item.dtype, item.shape, self.device)
                if self.options.perturbation is not None:
                    value = self.options.perturbation.tensor(value, item.dtype, item.name)
                self._store(item.name, value, recorded=True)
                continue
            if item.name not in inputs:
                raise ExecutionError(f"no value for input '{item.name}'", place=place)
            value = inputs[item.name]
            declared = [s for s in item.shape if isinstance(s, int)]
            if len(declared) == len(item.shape) and list(value.shape) != declared:
                raise ExecutionError(
                    f"input '{item.name}' has shape {list(value.shape)}, expected {declared}", place=place
                )
            dtype = self.options.precision.torch_dtype(item.dtype, captured=item.name in self.const)
            cast = value.dtype != dtype and not dtype.is_floating_point and not dtype.is_complex
            if cast and (value.is_floating_point() or not bool((value.to(dtype).to(value.dtype) == value).all())):
                raise ExecutionError(
                    f"input '{item.name}' holds {value.dtype} values that are not {item.dtype}", place=place
                )
            value = value.to(device=self.device, dtype=dtype)
            if not self.options.precision.captured:
                value = widen(value)
            self._store(item.name, value, recorded=item.name in self.const)

    def _store(self, name: str, value: Any, recorded: bool) -> None:
        self.env[name] = value
        self.wide.pop(name, None)
        if recorded:
            self.recorded.add(name)
        else:
            self.recorded.discard(name)

    def _read(self, name: str, captured: bool) -> Any:
        """A value for a node; results of constant sub-graphs are widened (and perturbed) for other nodes."""
        if name not in self.env:
            raise ExecutionError(f"reads '{name}', which has no value here", place=self.graph.path or self.graph.name)
        value = _unwrap(self.env[name])
        if captured or name not in self.recorded or self.options.precision.captured:
            return value
        if name not in self.wide:
            self.wide[name] = self._leave_constants(name, value)
        return self.wide[name]

    def _leave_constants(self, name: str, value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return type(value)(self._leave_constants(f"{name}.{i}", v) for i, v in enumerate(value))
        if not isinstance(value, torch.Tensor) or not value.is_floating_point():
            return widen(value)
        perturbation, node = self.options.perturbation, self.nodes.get(name)
        # Stored constants have been moved where they were loaded.
        stored = name not in self.nodes or (node is not None and node.op in ("get_attr", "hlo.constant"))
        if perturbation is not None and not stored:
            declared = self.types[name].dtype if name in self.types else str(value.dtype).removeprefix("torch.")
            value = perturbation.tensor(value, declared, name)
        return widen(value)

    def steps(self) -> Generator[Waiting, None, dict[str, Any]]:
        """Run to the end; yields while waiting for another rank and returns outputs and kept values by name.

        Sets no torch state across a yield: the generators of all ranks interleave.
        """
        for position, node in enumerate(self.graph.nodes):
            for name in node.refs():
                yield from self._arrival(name)
            self._run(node)
            for name in self.last_use.get(position, ()):
                self.env.pop(name, None)
                self.wide.pop(name, None)
        results = {}
        for name in sorted(self.keep):
            yield from self._arrival(name)
            results[name] = self._read(name, captured=False)
        self.env.clear()
        self.wide.clear()
        return results

    def _arrival(self, name: str) -> Generator[Waiting, None, None]:
        value = self.env.get(name)
        while (pending := _first_pending(value)) is not None:
            yield Waiting(self.rank, pending.node, pending.what)
        if name in self.env and _holds_pending(value):
            recorded = name in self.recorded
            self._store(name, self._conform(self.nodes.get(name), name, _unwrap(value), recorded), recorded)

    def _run(self, node: Node) -> None:
        captured = node.name in self.const and not self.options.precision.captured
        call = Call(
            node,
            [self._decode(a, captured) for a in node.args],
            {k: self._decode(v, captured) for k, v in node.kwargs.items()},
            self.options,
            self.device,
            captured,
            self.types,
            self.rank,
            self._place(node.name),
        )
        if self.options.perturbation is not None:
            self._perturb_literals(call)
        try:
            with default_dtype(self._default_dtype(node, captured)), self._watched(node, captured):
                if split_op(node.op)[1] == "wait_tensor":
                    value = call.args[0]
                elif is_collective(node.op):
                    value = issue(self.board, call)
                else:
                    value = self._compute(call)
        except EmergeError:
            raise
        except Exception as error:
            raise self._failure(call, error) from error
        if not _holds_pending(value):
            value = self._conform(node, node.name, value, captured)
        self._store(node.name, value, recorded=captured)
        if node.name in self.mutating:
            self._rebind(call, value, captured)

    def _watched(self, node: Node, captured: bool) -> AbstractContextManager[None]:
        """What watches the arithmetic of a node. Constants run in their own types and round and overflow as they do."""
        if self.options.arithmetic is None or captured:
            return nullcontext()
        return self.options.arithmetic.at(self.graph, node.name)

    def _compute(self, call: Call) -> Any:
        function = lookup(call.node.op)
        if function is None:
            raise call.error("operator without semantics: there is nothing to execute it with")
        if self.options.decisions is not None and not call.captured:
            used = self.used_elements.get(call.node.name) if call.node.is_tuple or call.node.dtype is None else None
            self.options.decisions.check(self.rank, call.node, call.args, call.kwargs, used)
        return function(call)

    def _failure(self, call: Call, error: Exception) -> EmergeError:
        message = (str(error) or type(error).__name__).splitlines()[0]
        if isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "not enough memory" in message:
            return BudgetExceeded(f"not enough memory for operator {call.node.op}: {message}", place=call.place)
        return call.error(f"fails on this input: {message}")

    def _decode(self, arg: Arg, captured: bool) -> Any:
        if isinstance(arg, Ref):
            return self._read(arg.name, captured)
        if isinstance(arg, DType):
            return self.options.precision.torch_dtype(arg.name, captured)
        if isinstance(arg, TypedConst):
            if arg.kind == "device":
                return self.device
            # Strides are not part of a value, so every layout and memory format is the plain one.
            return torch.strided if arg.kind == "layout" else torch.contiguous_format
        if isinstance(arg, list):
            return [self._decode(a, captured) for a in arg]
        return arg

    def _default_dtype(self, node: Node, captured: bool) -> Any:
        """float64, or for recorded types the node's own: it shows what the default was at capture."""
        if not (captured or self.options.precision.captured):
            return torch.float64
        return getattr(torch, node.dtype) if node.dtype is not None and is_floating(node.dtype) else torch.float32

    def _perturb_literals(self, call: Call) -> None:
        perturbation, node = self.options.perturbation, call.node
        if perturbation is None or node.op.startswith(("get_attr", "hlo.constant")):
            return
        known = [self.types[r].dtype for r in node.refs() if r in self.types]
        own = [node.dtype] if node.dtype is not None else [e.dtype for e in node.elements.values()]
        dtype = narrowest([*known, *own])

        def moved(value: Any, key: str) -> Any:
            if isinstance(value, float):
                return perturbation.literal(value, dtype, f"{node.name}:{key}")
            if isinstance(value, list):
                return [moved(v, f"{key}.{i}") for i, v in enumerate(value)]
            return value

        call.args = [moved(a, str(i)) for i, a in enumerate(call.args)]
        call.kwargs = {k: moved(v, k) for k, v in call.kwargs.items()}

    def _conform(self, node: Node | None, name: str, value: Any, captured: bool) -> Any:
        """Bring a result to its execution type and check its shape against the declaration."""
        if isinstance(value, (list, tuple)):
            elements = node.elements if node is not None else {}
            return tuple(
                self._conform_tensor(name, v, t.dtype if t else None, t.shape if t else None, captured)
                for i, v in enumerate(value)
                for t in [elements.get(i)]
            )
        declared = self.types.get(name)
        return self._conform_tensor(
            name, value, declared.dtype if declared else None, declared.shape if declared else None, captured
        )

    def _conform_tensor(self, name: str, value: Any, dtype: str | None, shape: Any, captured: bool) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        if shape is not None:
            known = len(shape) == value.dim() and all(
                not isinstance(s, int) or s == actual for s, actual in zip(shape, value.shape)
            )
            if not known:
                raise ExecutionError(
                    f"the result has shape {list(value.shape)}, but the graph says {list(shape)}",
                    place=self._place(name),
                    node=name,
                )
        in_recorded_types = captured or self.options.precision.captured
        if dtype is None:
            return value if in_recorded_types else widen(value)
        target = self.options.precision.torch_dtype(dtype, captured)
        if not in_recorded_types and (target.is_floating_point or target.is_complex):
            # fp8: the value is quantised here; from then on it is carried in float64.
            eight_bit = target not in (torch.float64, torch.complex128)
            return widen(value.to(target) if eight_bit else value)
        if value.dtype != target:
            if value.is_floating_point() and not (target.is_floating_point or target.is_complex):
                raise ExecutionError(
                    f"the result is {value.dtype}, but the graph says {dtype}", place=self._place(name), node=name
                )
            return value.to(target)
        return value

    def _rebind(self, call: Call, value: Any, captured: bool) -> None:
        """Give the names of written operands their new values."""
        effect = self.mutating[call.node.name]
        if effect.in_place:
            new = value[0] if isinstance(value, tuple) else value
            for name in self.same.get(effect.mutates[0], {effect.mutates[0]}):
                if name in self.env:
                    self._store(name, new, captured)
            return
        for slot in effect.slots:
            written = call.args[slot] if isinstance(slot, int) else call.kwargs[slot]
            named = call.node.args[slot] if isinstance(slot, int) else call.node.kwargs[slot]
            for ref, new in zip(*(x if isinstance(x, list) else [x] for x in (named, written))):
                if isinstance(ref, Ref):
                    for name in self.same.get(ref.name, {ref.name}):
                        if name in self.env:
                            self._store(name, self._conform(None, name, new, captured), captured)


def _first_pending(value: Any) -> Pending | None:
    """The first result inside ``value`` that has not arrived, or None."""
    if isinstance(value, Pending):
        return None if value.ready else value
    if isinstance(value, (list, tuple)):
        return next((p for v in value if (p := _first_pending(v)) is not None), None)
    return None


def _holds_pending(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return any(_holds_pending(v) for v in value)
    return isinstance(value, Pending)


def _unwrap(value: Any) -> Any:
    if isinstance(value, Pending):
        return value.value
    if isinstance(value, (list, tuple)) and _holds_pending(value):
        return type(value)(_unwrap(v) for v in value)
    return value


def with_rank_options(options: Options | Iterable[Options] | None, count: int) -> list[Options]:
    """One :class:`Options` per rank; a single one is shared (its recorders collect from all ranks).

    Raises:
        ExecutionError: another number of options than ranks.
    """
    if options is None or isinstance(options, Options):
        shared = options or Options()
        return [replace(shared) for _ in range(count)]
    listed = list(options)
    if len(listed) != count:
        raise ExecutionError(f"{len(listed)} option sets were given for {count} ranks, expected one per rank")
    return listed
