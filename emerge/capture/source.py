"""Where graphs of one side come from: a spec of a campaign file or the command line, live or from files.

    hf: {architecture: LlamaForCausalLM, config: {...}, tp_size: 2}     inputs: {batch: 2, seq: 16}
    vllm: {architecture: LlamaForCausalLM, config: {...}, tp_size: 2}   inputs: {tokens: 32}
    python: "package.module:function"                                   ranks: all
    pt2: model.pt2
    any of them with   mode: eval|train   fake: true|false   python_env: DIR;   hf also with   weights: DIR

As strings: ``python:package.module:function``, ``hf:config.json`` (a local config file), ``model.pt2``, or the path of
graph files. A ``python:`` function is called as ``function()`` for a sequential program and ``function(mesh, rank)``
for a parallel one, and returns ``(module or callable, example inputs)``. A spec runs the code it names.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from emerge.capture.base import CaptureError, Substitution
from emerge.graph.model import Graph

Progress = Callable[[str], None]
_KINDS = ("hf", "vllm", "python", "pt2", "graph")
_KEYS = (*_KINDS, "inputs", "ranks", "mode", "fake", "python_env", "mesh", "name", "args", "weights")
#: Full-size models are captured without data unless the spec says otherwise.
FAKE_ABOVE = 200_000_000
#: Elements of weights, over all ranks, that are kept with a capture unless the spec names the weights.
MOST_KEPT = 1 << 23
_TYPES: dict[str, tuple[type, str]] = {
    "inputs": (Mapping, "a mapping"),
    "args": (Mapping, "a mapping"),
    "mesh": (Mapping, "axes with sizes"),
    "fake": (bool, "true or false"),
    "python_env": (str, "a folder"),
    "weights": (str, "a folder of safetensors files"),
    "mode": (str, "eval or train"),
}


@dataclass
class SourceSpec:
    """What to capture.

    Attributes:
        kind: ``hf``, ``vllm``, ``python``, ``pt2`` or ``graph``. target: what follows the kind.
        inputs: sizes of example inputs (hf, vllm). args: keyword arguments of a ``python:`` function.
        mesh: device axes of a parallel program. ranks: ``all`` or a list.
        weights: folder of local safetensors files of an ``hf`` model.
        fake: run without data; None decides by the size of the model (hf) and is False otherwise.
        base: folder that relative paths and ``python:`` modules are looked up in.
    """

    kind: str
    target: Any
    inputs: dict[str, Any] = field(default_factory=dict)
    args: dict[str, Any] = field(default_factory=dict)
    mesh: dict[str, int] = field(default_factory=dict)
    ranks: str | list[int] = "all"
    mode: str = "eval"
    fake: bool | None = None
    python_env: str | None = None
    name: str | None = None
    weights: str | None = None
    base: str = "."
    trust: bool = False

    def as_json(self) -> dict[str, Any]:
        """A form for the cache key and for the worker process."""
        return {k: getattr(self, k) for k in self.__dataclass_fields__}

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> SourceSpec:
        """The inverse of :meth:`as_json`."""
        return SourceSpec(**data)


def parse_spec(
    spec: str | Path | Mapping[str, Any],
    *,
    base: str | Path = ".",
    mesh: Mapping[str, int] | None = None,
    trust: bool = False,
) -> SourceSpec:  # fmt: skip
    """A spec from a string or mapping.

    Raises:
        CaptureError: unknown keys, none or several kinds of source, or values of the wrong kind.
    """
    base = str(base)
    if isinstance(spec, Path):
        spec = str(spec)
    if isinstance(spec, str):
        kind, colon, rest = spec.partition(":")
        if colon and kind in ("python", "hf"):
            return SourceSpec(kind, rest, mesh=dict(mesh or {}), base=base, trust=trust)
        kind = "pt2" if spec.endswith(".pt2") else "graph"
        return SourceSpec(kind, spec, mesh=dict(mesh or {}), base=base, trust=trust)
    unknown = [k for k in spec if k not in _KEYS]
    if unknown:
        near = difflib.get_close_matches(str(unknown[0]), _KEYS, 1)
        hint = f"did you mean {near[0]!r}?" if near else "known: " + ", ".join(_KEYS)
        raise CaptureError(f"expected known keys in a source, found {unknown[0]!r}; {hint}", "source")
    kinds = [k for k in _KINDS if k in spec]
    if len(kinds) != 1:
        raise CaptureError(
            f"expected exactly one of {', '.join(_KINDS)} in a source, found {kinds or 'none'}; correct it", "source"
        )
    given = {
        k: spec[k]
        for k in ("inputs", "args", "mesh", "ranks", "mode", "fake", "python_env", "name", "weights")
        if spec.get(k) is not None
    }
    for key, (kind_of, word) in _TYPES.items():
        if key in given and not isinstance(given[key], kind_of):
            raise CaptureError(f"expected {word} for {key!r}, found {given[key]!r}; correct it", "source")
    plain: dict[str, Any] = {k: dict(v) if isinstance(v, Mapping) else v for k, v in given.items()}
    out = SourceSpec(
        kinds[0],
        spec[kinds[0]],
        base=base,
        trust=trust,
        **plain,
    )
    if out.weights is not None and out.kind != "hf":
        raise CaptureError(
            f"'weights' goes with hf:, found it beside {out.kind}:; load them in the program itself", "source"
        )
    if mesh and not out.mesh:
        out.mesh = dict(mesh)
    if isinstance(out.target, Mapping):
        out.target = dict(out.target)
    if out.mode not in ("eval", "train"):
        raise CaptureError(f"expected mode eval or train, found {out.mode!r}; correct it", "source")
    return out


def load_spec(
    spec: str | Path | Mapping[str, Any] | SourceSpec,
    *,
    base: str | Path = ".",
    mesh: Mapping[str, int] | None = None,
    trust: bool = False,
    cache: bool | Path = True,
    progress: Progress | None = None,
) -> list[Graph]:
    """The graphs of one side, in rank order.

    Args:
        base: folder that relative paths and ``python:`` modules are looked up in (of the campaign file).
        mesh: device axes of a parallel program, where the spec has none.
        trust: allow pickled content in ``.pt2`` archives.
        cache: keep captures on disk, by content of code, config and versions: True = the user's cache folder.
        progress: called with one line per step.

    Raises:
        CaptureError: the source cannot be captured.
        GraphError: graph files are malformed.
    """
    from emerge.capture.cache import CaptureCache

    spec = spec if isinstance(spec, SourceSpec) else parse_spec(spec, base=base, mesh=mesh, trust=trust)
    if spec.kind == "graph":
        from emerge.graph.source import load_side

        return load_side(Path(spec.base) / str(spec.target))
    say = progress or (lambda line: None)
    store = CaptureCache(None if cache is True else cache) if cache else None
    started = time.perf_counter()
    if store is not None and (found := store.load(spec)) is not None:
        say(f"{describe(spec)}: from the cache")
        return found
    if spec.python_env is not None:
        from emerge.capture.worker import capture_in_environment

        graphs, files = capture_in_environment(spec, say)
    else:
        files = set()
        graphs = capture_here(spec, say, files)
    _drop_values(spec, graphs)
    nodes = sum(len(g.nodes) for g in graphs)
    many = "1 graph" if len(graphs) == 1 else f"{len(graphs)} graphs"
    say(f"{describe(spec)}: {many}, {nodes} nodes, {time.perf_counter() - started:.1f} s")
    if store is not None:
        store.save(spec, graphs, files)
    return graphs


def _drop_values(spec: SourceSpec, graphs: list[Graph]) -> None:
    """Random weights of a large model are not worth a file per rank; without them a cached capture is the same."""
    kept = [i for g in graphs for i in g.inputs if i.values is not None]
    if spec.weights is None and sum(i.values.size for i in kept) > MOST_KEPT:
        for item in kept:
            item.values = None


def describe(spec: SourceSpec) -> str:
    """A spec for messages, e.g. ``hf LlamaForCausalLM``."""
    target = spec.target
    if isinstance(target, dict):
        target = target.get("architecture") or Path(str(target.get("config_file", "?"))).name
    tp = f" tp={spec.target['tp_size']}" if isinstance(spec.target, dict) and "tp_size" in spec.target else ""
    return f"{spec.kind} {target}{tp}"


def capture_here(spec: SourceSpec, progress: Progress, files: set[str]) -> list[Graph]:
    """Captures in this process. ``files`` is filled with the source files that take part."""
    progress(f"{describe(spec)}: capturing{' without data' if spec.fake else ''}")
    if spec.kind == "pt2":
        from emerge.capture.pt2 import capture_pt2

        path = Path(spec.base) / str(spec.target)
        files.add(str(path.resolve()))
        return [capture_pt2(path, name=spec.name, trust=spec.trust)]
    if spec.kind == "hf":
        return _capture_hf(spec, progress, files)
    if spec.kind == "vllm":
        return _capture_vllm(spec, progress, files)
    return _capture_python(spec, progress, files)


def _capture_hf(spec: SourceSpec, progress: Progress, files: set[str]) -> list[Graph]:
    from emerge.capture.hf import HFSpec, capture_hf

    target = spec.target
    if isinstance(target, str):
        target = {"config_file": target}
    if not isinstance(target, dict):
        raise CaptureError(f"expected a mapping with 'architecture' under hf, found {target!r}; correct it", "hf")
    if "config_file" in target:
        target = _with_config_file(target, spec.base, files)
    model = HFSpec.from_mapping(target, spec.inputs)
    if spec.weights is not None:
        model.weights = Path(spec.base) / spec.weights
    fake = spec.fake if spec.fake is not None else _parameters(model) > FAKE_ABOVE
    return capture_hf(
        model, name=spec.name, mode=spec.mode, fake=fake, ranks=spec.ranks, progress=progress, files=files
    )


def _capture_vllm(spec: SourceSpec, progress: Progress, files: set[str]) -> list[Graph]:
    from emerge.capture.vllm.spec import VllmSpec

    model = VllmSpec.from_mapping(spec.target, spec.inputs)
    if spec.mode != "eval":
        raise CaptureError("vLLM models run in mode eval only; drop 'mode'", "vllm")
    if spec.fake:
        raise CaptureError("vLLM models are captured with data, to trace their loading; drop 'fake'", "vllm")
    from emerge.capture.vllm.model import capture_vllm

    return capture_vllm(model, name=spec.name, ranks=spec.ranks, progress=progress, files=files)


def _with_config_file(hf: dict[str, Any], base: str, files: set[str]) -> dict[str, Any]:
    """A model whose config is a local ``config.json``; fields under ``config`` replace those of the file."""
    path = Path(base) / str(hf["config_file"])
    path = path / "config.json" if path.is_dir() else path
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        names = config.pop("architectures")
    except (OSError, ValueError, KeyError, AttributeError) as error:
        raise CaptureError(
            f"expected a Transformers config.json with 'architectures', found {error!r}", str(path)
        ) from None
    files.add(str(path.resolve()))
    kept = {k: v for k, v in config.items() if k not in ("transformers_version", "model_type")}
    rest = {k: v for k, v in hf.items() if k not in ("config_file", "config")}
    return {"architecture": names[0], **rest, "config": kept | dict(hf.get("config") or {})}


def _parameters(model: Any) -> int:
    """Number of parameters of a Transformers model, without making its data."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    from emerge.capture.hf import make_model

    with FakeTensorMode(allow_non_fake_inputs=True):
        return sum(p.numel() for p in make_model(model, "bfloat16").parameters())


def _capture_python(spec: SourceSpec, progress: Progress, files: set[str]) -> list[Graph]:
    from emerge.capture.distributed import capture_ranks
    from emerge.capture.session import Settings, run_capture

    with importable(spec.base), files_read(spec.base, files):
        function = find_function(str(spec.target))
        name = spec.name or str(spec.target).replace(":", ".")
        wanted = _positional(function)
        with _replacements() as substitutions:
            if wanted == 0:
                settings = Settings(name, spec.mode, bool(spec.fake))
                graphs = [run_capture(lambda: function(**spec.args), settings, substitutions)]
                files |= settings.files
            elif wanted == 2:
                if not spec.mesh:
                    raise CaptureError(
                        "it takes (mesh, rank), but no mesh is given; write one, e.g. mesh: {tp: 2}",
                        f"python:{spec.target}",
                    )
                graphs = capture_ranks(
                    lambda mesh, rank: function(mesh, rank, **spec.args), spec.mesh, spec.ranks, name=name,
                    mode=spec.mode, fake=bool(spec.fake), substitutions=substitutions, progress=progress, files=files,
                )  # fmt: skip
            else:
                raise CaptureError(
                    f"expected a function of no argument or of (mesh, rank), found one of {wanted}; change it",
                    f"python:{spec.target}",
                )
        files |= user_modules()
    return graphs


def _replacements() -> AbstractContextManager[list[Substitution]]:
    """What has to be replaced in the libraries that a program has imported."""
    if "transformers" not in sys.modules:
        return nullcontext([])
    from emerge.capture.hf import patched

    return patched()


def _positional(function: Any) -> int:
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return sum(
        p.kind in kinds and p.default is inspect.Parameter.empty
        for p in inspect.signature(function).parameters.values()
    )


def find_function(target: str) -> Any:
    """The function of ``package.module:function``.

    Raises:
        CaptureError: the text has another form, or the module or function does not exist.
    """
    module_name, colon, attribute = target.partition(":")
    if not colon or not module_name or not attribute:
        raise CaptureError(f"expected python:package.module:function, found {target!r}; correct it", "python")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        raise CaptureError(
            f"importing {module_name!r} fails: {type(error).__name__}: {error}", f"python:{target}"
        ) from error
    found: Any = module
    for part in attribute.split("."):
        if not hasattr(found, part):
            near = difflib.get_close_matches(part, dir(found), 1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise CaptureError(f"module {module_name!r} has no {attribute!r}{hint}", f"python:{target}")
        found = getattr(found, part)
    if not callable(found):
        raise CaptureError(
            f"{attribute!r} is no function but a {type(found).__name__}; name the factory", f"python:{target}"
        )
    return found


@contextmanager
def importable(base: str) -> Iterator[None]:
    """Modules of a folder can be imported inside the block."""
    folder = str(Path(base).resolve())
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        if folder in sys.path:
            sys.path.remove(folder)


_reading: list[tuple[str, set[str]]] = []
_hooked: list[bool] = []


@contextmanager
def files_read(base: str, files: set[str]) -> Iterator[None]:
    """Adds the files below ``base`` that the program opens inside the block: a cached capture depends on them."""
    if not _hooked:
        _hooked.append(True)
        sys.addaudithook(_note_open)  # a hook cannot be removed; it does nothing while the list is empty
    entry = (str(Path(base).resolve()), files)
    _reading.append(entry)
    try:
        yield
    finally:
        _reading.remove(entry)


def _note_open(event: str, args: Any) -> None:
    if event != "open" or not _reading or not isinstance(args[0], str) or args[0].endswith(".pyc"):
        return
    path = os.path.abspath(args[0])
    for base, files in _reading:
        if path.startswith(base + os.sep) and "w" not in str(args[1] or "r") and os.path.isfile(path):
            files.add(path)


def user_modules() -> set[str]:
    """Files of all imported modules that are neither installed packages nor the standard library."""
    from emerge.capture.base import is_user_file

    out = set()
    for module in list(sys.modules.values()):
        file = getattr(module, "__file__", None)
        if (
            isinstance(file, str)
            and file.endswith(".py")
            and "site-packages" not in file
            and "dist-packages" not in file
            and is_user_file(file)
        ):
            out.add(file)
    return out


def chosen_ranks(ranks: str | Sequence[int], world: int) -> list[int]:
    """``all`` or a list, as a list."""
    return list(range(world)) if ranks == "all" else [int(r) for r in ranks]
