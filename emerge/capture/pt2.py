"""``torch.export`` archives (``.pt2``): the JSON program and raw tensors of the archive, never what is pickled.

The program is run operator by operator on tensors without data, under the same recorder as live programs, so that
its graph has the same operators. Source lines, module paths and names come from the archive.
"""

from __future__ import annotations

import json
import re
import zipfile
from pathlib import Path
from typing import Any

from emerge.capture.base import CaptureError, Place
from emerge.graph.model import Graph

_DTYPES = {
    1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 6: "float16", 7: "float32", 8: "float64",
    10: "complex64", 11: "complex128", 12: "bool", 13: "bfloat16", 28: "uint16", 29: "float8_e4m3fn", 30: "float8_e5m2",
    35: "uint64",
}  # fmt: skip
_FRAME = re.compile(r'File "([^"]+)", line (\d+)')
_NAMESPACES = ("aten", "prims", "_c10d_functional", "_dtensor", "higher_order")
_REFUSED_OPS = ("aten.from_file",)
_SCALARS = (
    "as_int",
    "as_float",
    "as_bool",
    "as_string",
    "as_ints",
    "as_floats",
    "as_bools",
    "as_strings",
    "as_int_lists",
)
_MEMORY_FORMATS = {1: "contiguous_format", 2: "channels_last", 3: "channels_last_3d", 4: "preserve_format"}
#: Raw constants up to this many bytes are read; it bounds what a hostile archive can make us load.
_MAX_BYTES = 1 << 28


def capture_pt2(path: str | Path, *, name: str | None = None, trust: bool = False) -> Graph:
    """The graph of an exported program.

    Args:
        trust: load constants that the archive pickles, which runs code the archive brings along.

    Raises:
        CaptureError: not such an archive, pickled content without ``trust``, dynamic shapes, unknown operators.
    """
    from emerge.capture.session import Program, Settings, run_capture

    path = Path(path)
    archive = _Archive(path, trust)
    reader = _Reader(archive)
    settings = Settings(name or path.stem, "eval", True)
    graph = run_capture(lambda: Program(reader.run, (), reader.inputs()), settings, prepare=reader.attach)
    graph.extra["captured_with"]["source"] = path.name
    graph.extra["captured_with"]["exported_by"] = archive.program.get("torch_version")
    return graph


class _Archive:
    """The members of the zip file that are read."""

    def __init__(self, path: Path, trust: bool) -> None:
        self.path, self.trust = path, trust
        try:
            self.zip = zipfile.ZipFile(path)
        except (OSError, zipfile.BadZipFile) as error:
            raise CaptureError(
                f"expected a .pt2 archive, found a file that cannot be read as one ({error})", str(path)
            ) from None
        self.names = self.zip.namelist()
        program = self.member("models/model.json") or ""
        if not program:
            if self.member("serialized_exported_program.json") is not None:
                self.fail(
                    "an archive of the old layout, whose tensors are pickled; export it again with torch 2.8 or newer"
                )
            self.fail("expected models/model.json in the archive, found none; write it with torch.export.save")
        self.program = self.json(program)
        if "graph_module" not in self.program:
            self.fail("models/model.json holds no graph module; write it with torch.export.save")
        self.constants: dict[str, Any] = {}
        config = self.member("data/constants/model_constants_config.json")
        if config is not None:
            self.constants = self.json(config).get("config", {})

    def fail(self, what: str) -> Any:
        raise CaptureError(what, str(self.path))

    def member(self, suffix: str) -> str | None:
        return next((n for n in self.names if n.endswith(f"/{suffix}") or n == suffix), None)

    def json(self, member: str) -> Any:
        try:
            return json.loads(self.zip.read(member))
        except (ValueError, zipfile.BadZipFile, RecursionError) as error:
            return self.fail(f"{member} is not JSON ({error}); write the archive again")

    def constant(self, name: str) -> Any | None:
        """A constant of the archive as a tensor; None where the archive does not hold it."""
        import torch

        entry = self.constants.get(name)
        if entry is None:
            return None
        member = self.member(f"data/constants/{entry['path_name']}")
        if member is None:
            return None
        if self.zip.getinfo(member).file_size > _MAX_BYTES:
            return None
        if entry.get("use_pickle"):
            if not self.trust:
                self.fail(
                    f"constant {name!r} is pickled, and loading it would run code from the archive; "
                    "pass trust (--trust) if you made it"
                )
            import io

            return torch.load(io.BytesIO(self.zip.read(member)), weights_only=False)
        meta = entry["tensor_meta"]
        dtype = getattr(torch, _dtype(meta["dtype"], self.path))
        data = bytearray(self.zip.read(member))
        flat = torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype)
        return flat.as_strided(_sizes(meta["sizes"], self.path), _sizes(meta["strides"], self.path), 0).clone()


def _dtype(number: int, path: Path) -> str:
    if number not in _DTYPES:
        raise CaptureError(f"a tensor of scalar type {number}, which graphs do not have", str(path))
    return _DTYPES[number]


def _sizes(entries: list[dict[str, Any]], path: Path) -> list[int]:
    out = []
    for e in entries:
        if "as_int" not in e:
            raise CaptureError("a size that is symbolic; export the program with fixed shapes", str(path))
        out.append(int(e["as_int"]))
    return out


class _Reader:
    """Runs the program of an archive."""

    def __init__(self, archive: _Archive) -> None:
        self.archive = archive
        self.path = archive.path
        module = archive.program["graph_module"]
        self.graph, self.signature = module["graph"], module["signature"]
        self.labels: dict[str, str] = {}  # value name -> label of the graph input
        self.given: dict[str, Any] = {}  # value name -> constant or Python value
        self.recorder: Any = None

    def attach(self, recorder: Any) -> None:
        """Called with the recorder before the program runs."""
        self.recorder = recorder

    def inputs(self) -> dict[str, Any]:
        """Graph inputs by label; constants of the archive are kept apart."""
        import torch

        out: dict[str, Any] = {}
        for spec in self.signature["input_specs"]:
            ((kind, body),) = spec.items()
            if kind == "constant_input":
                ((_, value),) = body["value"].items()
                self.given[body["name"]] = value
                continue
            argument = body["arg"]
            name = str(argument.get("name") or (argument.get("as_tensor") or {}).get("name") or "")
            if kind == "user_input" and not name:
                continue  # a Python number; the program does not take it as a value
            if kind not in ("parameter", "buffer", "tensor_constant", "user_input"):
                raise CaptureError(f"an input of kind {kind}, which graphs do not have", str(self.path))
            label = str(
                body.get("parameter_name") or body.get("buffer_name") or body.get("tensor_constant_name") or name
            )
            meta = self.graph["tensor_values"][name]
            if kind == "tensor_constant" or (kind == "buffer" and not body.get("persistent", True)):
                value = self.archive.constant(label)
                if value is not None:
                    self.given[name] = value
                    continue
            dtype = getattr(torch, _dtype(meta["dtype"], self.path))
            sizes, strides = _sizes(meta["sizes"], self.path), _sizes(meta["strides"], self.path)
            out[label] = torch.empty_strided(sizes, strides, dtype=dtype)
            self.labels[name] = label
        return out

    def run(self, **inputs: Any) -> dict[str, Any]:
        """The program on these inputs; outputs by name."""
        env: dict[str, Any] = {name: inputs[label] for name, label in self.labels.items()} | dict(self.given)
        places = self.recorder.places
        try:
            for node in self.graph["nodes"]:
                places.override = self._place(node.get("metadata") or {})
                self._node(node, env)
        finally:
            places.override = None
        out: dict[str, Any] = {}
        for spec, result in zip(self.signature["output_specs"], self.graph["outputs"]):
            ((kind, body),) = spec.items()
            tensor = (result.get("as_tensor") or {}).get("name")
            if tensor is None:
                continue
            if kind == "user_output":
                out[f"output.{len(out)}"] = env[tensor]
            elif kind.endswith("_mutation"):
                label = body.get("buffer_name") or body.get("parameter_name") or body.get("user_input_name")
                out[f"mutated:{label}"] = env[tensor]
            elif kind == "loss_output":
                out["loss"] = env[tensor]
            elif kind.startswith("gradient_to"):
                out[f"grad:{body.get('parameter_name') or body.get('user_input_name')}"] = env[tensor]
        return {"output" if k == "output.0" and len(out) == 1 else k: v for k, v in out.items()}

    def _place(self, metadata: dict[str, str]) -> Place:
        frames = [(f, int(n)) for f, n in _FRAME.findall(metadata.get("stack_trace", ""))]
        stack = metadata.get("nn_module_stack", "").split(";")[-1].split(",")
        module = (stack[1] or stack[-1].rsplit(".", 1)[-1]) if len(stack) == 3 else None
        result: Place = self.recorder.places.of_frames(frames, module)
        return result

    def _node(self, node: dict[str, Any], env: dict[str, Any]) -> None:
        target = self._operator(node["target"])
        args: list[Any] = []
        kwargs: dict[str, Any] = {}
        for item in node["inputs"]:
            value = self._value(item["arg"], env)
            if item.get("kind") == 2 or (item.get("kind") is None and kwargs):
                kwargs[item["name"]] = value
            else:
                args.append(value)
        try:
            result = target(*args, **kwargs)
        except CaptureError:
            raise
        except Exception as error:
            raise CaptureError(
                f"{node['target']} fails: {str(error).splitlines()[0] if str(error) else error!r}", str(self.path)
            ) from error
        results = list(result) if isinstance(result, (list, tuple)) else [result]
        flat: list[dict[str, Any]] = []
        for out in node["outputs"]:
            flat += [{"as_tensor": t} for t in out["as_tensors"]] if "as_tensors" in out else [out]
        for out, value in zip(flat, results):
            ((_, body),) = out.items()
            if isinstance(body, dict) and "name" in body:
                env[body["name"]] = value

    def _operator(self, target: str) -> Any:
        import torch

        parts = target.removeprefix("torch.ops.").split(".")
        if (
            not target.startswith("torch.ops.")
            or len(parts) not in (2, 3)
            or parts[0] not in _NAMESPACES
            or len(parts) == 2
        ):
            raise CaptureError(f"operator {target}, which capture does not run; export without it", str(self.path))
        if f"{parts[0]}.{parts[1]}" in _REFUSED_OPS:
            raise CaptureError(f"operator {target} reads files and is refused", str(self.path))
        found = getattr(getattr(getattr(torch.ops, parts[0]), parts[1], None), parts[2], None)
        if found is None:
            raise CaptureError(
                f"this torch ({torch.__version__}) has no operator {target}; use the torch that exported the program",
                str(self.path),
            )
        return found

    def _value(self, argument: dict[str, Any], env: dict[str, Any]) -> Any:
        import torch

        ((kind, body),) = argument.items()
        if kind == "as_none":
            return None
        if kind in _SCALARS:
            return body
        if kind in ("as_tensor", "as_optional_tensor"):
            return self._tensor(body, env)
        if kind in ("as_tensors", "as_optional_tensors"):
            return [self._tensor(b, env) for b in body]
        if kind == "as_scalar_type":
            return getattr(torch, _dtype(body, self.path))
        if kind == "as_memory_format":
            return getattr(torch, _MEMORY_FORMATS.get(body, "contiguous_format"))
        if kind == "as_layout":
            return torch.strided
        if kind == "as_device":
            return torch.device("cpu")
        raise CaptureError(
            f"an argument of kind {kind} (symbolic sizes or sub-graphs); export with fixed shapes", str(self.path)
        )

    def _tensor(self, body: dict[str, Any], env: dict[str, Any]) -> Any:
        if "as_none" in body:
            return None
        name = body["name"] if "name" in body else body["as_tensor"]["name"]
        if name not in env:
            raise CaptureError(
                f"the program reads {name!r} before it is computed; write the archive again", str(self.path)
            )
        return env[name]
