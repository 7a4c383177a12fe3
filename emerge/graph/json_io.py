"""Reads and writes ``emerge.graph/1``, the JSON form of :class:`emerge.graph.model.Graph`.

A file that loads is well formed: every reference resolves to an input or an earlier node, every tensor has a known
dtype and a shape, every used output of a multi-output operator has a type. Anything else is a :class:`GraphError`
that names the file, the node and the mend. The format is described in docs/graph-format.md.
"""

from __future__ import annotations

import difflib
import json
import math
import os
import re
import tempfile
from pathlib import Path
from typing import Any

from emerge.graph.model import DTYPES, Arg, DType, Graph, Input, Node, Ref, Shape, TensorType, TypedConst
from emerge.util.errors import EmergeError, GraphError

SCHEMA = "emerge.graph/1"

_FORMATS: tuple[str, ...] = ("fx-aten", "hlo")
_DIRECTIONS: tuple[str, ...] = ("fw", "bw", "both")
_TYPED = ("device", "layout", "memory_format")
_FLOATS = {"inf": math.inf, "-inf": -math.inf, "nan": math.nan}
_MAX_DIM = 2**63 - 1
_GRAPH_KEYS = frozenset(
    (
        "schema", "name", "rank", "world_size", "format", "direction", "inputs", "nodes", "outputs", "stacks",
        "spmd", "output_input_alias", "groups", "mesh",
    )
)  # fmt: skip
_INPUT_KEYS = frozenset(("name", "dtype", "shape", "label", "const", "placement"))
_NODE_KEYS = frozenset(
    (
        "name", "op", "args", "kwargs", "dtype", "shape", "tuple", "scalar", "elements", "const", "source", "code",
        "module", "stack", "phase",
    )
)  # fmt: skip
#: A data-dependent size: an expression over symbols such as ``u0`` or ``2*s0 + 1``.
_SYMBOL = re.compile(r"(?=.*[A-Za-z_])[\w+\-*/%(), .]+")


class Violation(Exception):
    """A violation found while decoding one part of a file; the reader of the file adds the place."""


# --------------------------------------------------------------------------------------------------------------
# JSON text


def load_json(path: Path, error: type[EmergeError]) -> Any:
    """The content of a JSON file; NaN, Infinity and repeated keys are refused.

    Raises:
        error: the file cannot be read or is not JSON; the place holds file and line where there is one.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as e:
        raise error(
            f"expected UTF-8 text, found an invalid byte at offset {e.start}; write the file again", str(path)
        ) from None
    except FileNotFoundError:
        raise error("expected a file, found nothing; check the path", str(path)) from None
    except OSError as e:
        raise error(
            f"cannot read the file ({e.strerror or e}); check the path and its permissions", str(path)
        ) from None
    try:
        return json.loads(text, object_pairs_hook=_no_repeats, parse_constant=_no_constant)
    except json.JSONDecodeError as e:
        cut = " (the file ends early: is it truncated?)" if e.pos >= len(text.rstrip()) else ""
        raise error(
            f"expected JSON, found {e.msg.lower()} at column {e.colno}{cut}; write the file again", f"{path}:{e.lineno}"
        ) from None
    except RecursionError:
        raise error(
            "expected JSON of moderate depth, found lists or objects nested too deeply; flatten them", str(path)
        ) from None
    except (Violation, ValueError) as e:  # ValueError: an integer with thousands of digits
        raise error(f"expected plain JSON, found {e}; write the file again", str(path)) from None


def _no_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out = dict(pairs)
    if len(out) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise Violation(f"the key {key!r} twice in one object")
            seen.add(key)
    return out


def _no_constant(text: str) -> Any:
    raise Violation(f'the literal {text} (write it as {{"float": "inf"}}, "-inf" or "nan")')


def write_atomically(path: Path, text: str, error: type[EmergeError]) -> None:
    """Writes UTF-8 text so that a reader sees the old file or the whole new one, never a part.

    Raises:
        error: the directory does not exist or cannot be written.
    """
    temp = ""
    try:
        with tempfile.NamedTemporaryFile(
            "w", encoding="utf-8", dir=path.parent, prefix=f".{path.name}.", suffix=".tmp", delete=False
        ) as f:
            temp = f.name
            f.write(text)
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(temp, 0o666 & ~umask)
        os.replace(temp, path)
    except OSError as e:
        if temp and os.path.exists(temp):
            os.unlink(temp)
        raise error(
            f"cannot write the file ({e.strerror or e}); check the directory and its permissions", str(path)
        ) from None


def describe(value: Any) -> str:
    """A value as messages show it: ``list [1, 2, ...``, cut to a readable length."""
    text = repr(value)
    kind = {"dict": "object", "NoneType": "null", "str": "string"}.get(type(value).__name__, type(value).__name__)
    return f"{kind} {text[:60]}{'...' if len(text) > 60 else ''}"


# --------------------------------------------------------------------------------------------------------------
# Decoding


def required(obj: dict[str, Any], key: str, kind: type, word: str) -> Any:
    """A required key of the given type (bool is never taken for int)."""
    if key not in obj:
        raise Violation(f"the key {key!r} is missing; add it ({word})")
    return typed(obj[key], key, kind, word)


def optional(obj: dict[str, Any], key: str, kind: type, word: str, default: Any = None) -> Any:
    value = obj.get(key)
    return default if value is None else typed(value, key, kind, word)


def typed(value: Any, key: str, kind: type, word: str) -> Any:
    if type(value) is not kind:
        raise Violation(f"expected {word} for {key!r}, found {describe(value)}; correct the value")
    if isinstance(value, str) and any("\ud800" <= c <= "\udfff" for c in value):
        raise Violation(f"the text of {key!r} holds a lone surrogate, which UTF-8 cannot write; correct it")
    return value


def _dtype(value: Any) -> str:
    if type(value) is str and value in DTYPES:
        return value
    near = difflib.get_close_matches(value, DTYPES, 1) if isinstance(value, str) else []
    hint = f"did you mean {near[0]!r}?" if near else "known: " + ", ".join(DTYPES)
    raise Violation(f"expected a known dtype, found {describe(value)}; {hint}")


def decode_shape(value: Any) -> Shape:
    """A JSON shape as a tuple; entries are non-negative integers or symbols such as ``"u0"``."""
    if type(value) is not list:
        raise Violation(f"expected a list for 'shape', found {describe(value)}; correct the value")
    for d in value:
        if type(d) is int:
            if 0 <= d <= _MAX_DIM:
                continue
        elif type(d) is str and _SYMBOL.fullmatch(d):
            continue
        raise Violation(
            f"expected sizes >= 0 or symbols such as 'u0' in 'shape', found {describe(d)}; correct the entry"
        )
    return tuple(value)


def decode_arg(value: Any, refs: list[str] | None) -> Arg:
    """A JSON argument as an ``Arg``; names it refers to are appended to ``refs`` (None: no references allowed)."""
    kind = type(value)
    if kind is dict:
        if len(value) == 1:
            ((key, v),) = value.items()
            if type(v) is str:
                if key == "ref" and refs is not None:
                    refs.append(v)
                    return Ref(v)
                if key == "dtype":
                    return DType(_dtype(v))
                if key in _TYPED:
                    return TypedConst(key, v)
                if key == "float" and v in _FLOATS:
                    return _FLOATS[v]
        raise Violation(
            f"expected one of {{'ref'}}, {{'dtype'}}, {{'device'}}, {{'layout'}}, {{'memory_format'}}, "
            f"{{'float': 'inf'|'-inf'|'nan'}} with a string, found {describe(value)}; correct the argument"
        )
    if kind is list:
        return [decode_arg(v, refs) for v in value]
    if kind is float and not math.isfinite(value):
        raise Violation('expected a finite number, found one that overflows to infinity; write it as {"float": "inf"}')
    return value


def _input(obj: Any) -> Input:
    if type(obj) is not dict:
        raise Violation(f"expected an object per input, found {describe(obj)}; correct the entry")
    constant = obj.get("const")
    if constant is not None and not isinstance(constant, (bool, int, float)) and not _is_float_text(constant):
        raise Violation(f"expected a number as 'const', found {describe(constant)}; correct it")
    digest = obj.get("digest")
    if digest is not None and (type(digest) is not str or ":" not in digest):
        raise Violation(f"expected a digest such as \"sha256:...\" as 'digest', found {describe(digest)}; correct it")
    return Input(
        name=required(obj, "name", str, "a string"),
        dtype=_dtype(required(obj, "dtype", str, "a dtype name")),
        shape=decode_shape(required(obj, "shape", list, "a list of sizes")),
        label=optional(obj, "label", str, "a string"),
        const=decode_arg(obj["const"], None) if obj.get("const") is not None else None,
        placement=obj.get("placement"),
        extra={k: v for k, v in obj.items() if k not in _INPUT_KEYS},
    )


def _is_float_text(value: Any) -> bool:
    return type(value) is dict and set(value) == {"float"}


def _node(obj: dict[str, Any], refs: list[str], n_stacks: int) -> Node:
    kwargs = optional(obj, "kwargs", dict, "an object", {})
    is_tuple = optional(obj, "tuple", bool, "true or false", False)
    is_scalar = optional(obj, "scalar", bool, "true or false", False)
    dtype, shape = obj.get("dtype"), obj.get("shape")
    if is_tuple and (is_scalar or dtype is not None or shape is not None):
        raise Violation("it is marked 'tuple' and also 'scalar' or with a dtype or shape of its own; keep one of them")
    if not is_tuple and not is_scalar and (dtype is None or shape is None):
        lacks = "dtype" if dtype is None else "shape"
        raise Violation(
            f'it has no {lacks}; add it, or mark a multi-output operator "tuple": true and a SymInt "scalar": true'
        )
    elements = {}
    if obj.get("elements"):
        if not is_tuple:
            raise Violation("it has 'elements' but is not marked \"tuple\": true; add the mark or drop them")
        for key, e in required(obj, "elements", dict, "an object").items():
            if not (key.isascii() and key.isdigit() and len(key) < 9) or type(e) is not dict:
                raise Violation(
                    f"expected indices with dtype and shape in 'elements', found {key!r}: {describe(e)}; correct it"
                )
            elements[int(key)] = TensorType(
                _dtype(required(e, "dtype", str, "a dtype name")),
                decode_shape(required(e, "shape", list, "a list of sizes")),
            )
    stack = optional(obj, "stack", int, "an index")
    if stack is not None and not 0 <= stack < n_stacks:
        raise Violation(f"'stack' is {stack} but the file has {n_stacks} stacks; correct the index or drop the key")
    op = required(obj, "op", str, "an operator name such as 'aten.mm.default'")
    if not op:
        raise Violation("'op' is empty; give the operator name")
    return Node(
        name=obj["name"],
        op=op,
        args=[decode_arg(a, refs) for a in required(obj, "args", list, "a list")],
        kwargs={k: decode_arg(v, refs) for k, v in kwargs.items()},
        dtype=None if dtype is None else _dtype(dtype),
        shape=None if shape is None else decode_shape(shape),
        is_tuple=is_tuple,
        is_scalar=is_scalar,
        elements=elements,
        const=decode_arg(obj["const"], None) if "const" in obj else None,
        has_const="const" in obj,
        source=optional(obj, "source", str, "a string"),
        code=optional(obj, "code", str, "a string"),
        module=optional(obj, "module", str, "a string"),
        stack=stack,
        phase=optional(obj, "phase", str, "a string"),
        extra={k: v for k, v in obj.items() if k not in _NODE_KEYS},
    )


def _check_getitem(node: Node, tuples: dict[str, Node]) -> None:
    """A ``getitem`` of a multi-output operator must take an output whose type is known and equal to its own."""
    args = node.args
    if len(args) != 2 or not isinstance(args[0], Ref) or args[0].name not in tuples:
        return
    source, index = tuples[args[0].name], args[1]
    if type(index) is not int:
        raise Violation(
            f"expected an integer output index of {source.name!r}, found {describe(index)}; correct the index"
        )
    if index not in source.elements:
        if node.dtype is None and index >= 0:  # a scalar or nested output: 'elements' holds tensor types only
            return
        known = ", ".join(map(str, source.elements)) or "none"
        raise Violation(
            f"it takes output {index} of {source.name!r}, whose 'elements' lists {known}; correct the index or add it"
        )
    if node.dtype is None or node.shape is None:
        return
    if source.elements[index] != TensorType(node.dtype, node.shape):
        e = source.elements[index]
        raise Violation(
            f"its type {node.dtype}{list(node.shape)} contradicts element {index} of {source.name!r}, "
            f"{e.dtype}{list(e.shape)}; correct one of them"
        )


def decode_groups(value: Any, world_size: int) -> dict[str, list[list[int]]]:
    """Process-group id -> rank lists; the lists of one id are disjoint and inside ``range(world_size)``."""
    if type(value) is not dict:
        raise Violation(f"expected an object for 'groups', found {describe(value)}; correct the value")
    for gid, lists in value.items():
        seen: set[int] = set()
        if type(lists) is not list or not all(type(m) is list and m for m in lists):
            raise Violation(
                f"expected a list of rank lists for group {gid!r}, found {describe(lists)}; write e.g. [[0, 1]]"
            )
        for r in (r for m in lists for r in m):
            if type(r) is not int or not 0 <= r < world_size or r in seen:
                raise Violation(
                    f"group {gid!r} holds {describe(r)}; expected ranks from 0 to {world_size - 1}, each at most once"
                )
            seen.add(r)
    return {gid: [list(m) for m in lists] for gid, lists in value.items()}


def _mesh(value: Any, world_size: int) -> dict[str, int]:
    if type(value) is not dict or not all(type(n) is int and 0 < n <= world_size for n in value.values()):
        raise Violation(
            f"expected axes with sizes from 1 to {world_size} for 'mesh', found {describe(value)}; correct it"
        )
    if value and math.prod(value.values()) != world_size:
        raise Violation(
            f"'mesh' {value} has {math.prod(value.values())} devices but 'world_size' is {world_size}; correct one"
        )
    return dict(value)


def decode_graph(data: Any, path: str) -> Graph:
    """The graph of a decoded JSON document.

    Args:
        data: what ``json.loads`` gave.
        path: the file, for messages and :attr:`Graph.path`.

    Raises:
        GraphError: any violation of ``emerge.graph/1``.
    """
    place = path
    try:
        if type(data) is not dict:
            raise Violation(f"expected an object at the top, found {describe(data)}; give an emerge.graph/1 file")
        schema = data.get("schema", SCHEMA)
        if schema != SCHEMA:
            raise Violation(f"expected schema {SCHEMA!r}, found {describe(schema)}; give a graph file of this version")
        world_size = optional(data, "world_size", int, "an integer", 1)
        rank = optional(data, "rank", int, "an integer", 0)
        if world_size < 1 or not 0 <= rank < world_size:
            raise Violation(
                f"expected 0 <= rank < world_size, found rank {rank} and world_size {world_size}; correct one of them"
            )
        fmt, direction = (
            optional(data, "format", str, "a string", "fx-aten"),
            optional(data, "direction", str, "a string", "fw"),
        )
        for key, value, choices in (("format", fmt, _FORMATS), ("direction", direction, _DIRECTIONS)):
            if value not in choices:
                raise Violation(f"expected one of {', '.join(choices)} for {key!r}, found {value!r}; correct the value")
        graph = Graph(
            name=optional(data, "name", str, "a string", Path(path).stem),
            inputs=[],
            nodes=[],
            outputs=[],
            rank=rank,
            world_size=world_size,
            format=fmt,
            direction=direction,
            stacks=optional(data, "stacks", list, "a list", []),
            spmd=optional(data, "spmd", bool, "true or false", False),
            output_input_alias=optional(data, "output_input_alias", list, "a list", []),
            groups=decode_groups(data["groups"], world_size) if data.get("groups") is not None else {},
            mesh=_mesh(data["mesh"], world_size) if data.get("mesh") is not None else {},
            path=path,
            extra={k: v for k, v in data.items() if k not in _GRAPH_KEYS},
        )
        raw_inputs = required(data, "inputs", list, "a list")
        raw_nodes = required(data, "nodes", list, "a list")
        raw_outputs = required(data, "outputs", list, "a list of names or null")

        known: set[str] = set()
        for i, obj in enumerate(raw_inputs):
            name = obj.get("name") if type(obj) is dict else None
            place = f"{path}: input {name!r}" if type(name) is str else f"{path}: inputs[{i}]"
            item = _input(obj)
            _add_name(item.name, known)
            graph.inputs.append(item)
        tuples: dict[str, Node] = {}
        for i, obj in enumerate(raw_nodes):
            place = f"{path}: nodes[{i}]"
            if type(obj) is not dict:
                raise Violation(f"expected an object per node, found {describe(obj)}; correct the entry")
            name = required(obj, "name", str, "a string")
            place = f"{path}: node {name!r}"
            refs: list[str] = []
            node = _node(obj, refs, len(graph.stacks))
            for ref in refs:
                if ref not in known:
                    raise Violation(_dangling(ref, name, raw_nodes, known))
            if node.op == "operator.getitem" and tuples:
                _check_getitem(node, tuples)
            _add_name(name, known)
            if node.is_tuple:
                tuples[name] = node
            graph.nodes.append(node)
        for i, out in enumerate(raw_outputs):
            place = f"{path}: outputs[{i}]"
            if out is not None and (type(out) is not str or out not in known):
                found = repr(out) if type(out) is str else describe(out)
                raise Violation(
                    f"expected null or the name of an input or node, found {found}{_near(out, known)}; correct the name"
                )
            graph.outputs.append(out)
        return graph
    except Violation as e:
        raise GraphError(str(e), place) from None
    except RecursionError:
        raise GraphError(
            "expected arguments of moderate depth, found lists nested too deeply; flatten them", place
        ) from None


def _add_name(name: str, known: set[str]) -> None:
    if not name:
        raise Violation("its name is empty; give every input and node a name")
    if name in known:
        raise Violation(f"the name {name!r} is used twice; give every input and node its own name")
    known.add(name)


def _near(name: Any, known: set[str]) -> str:
    near = difflib.get_close_matches(name, known, 1) if isinstance(name, str) else []
    return f" (did you mean {near[0]!r}?)" if near else ""


def _dangling(ref: str, name: str, raw_nodes: list[Any], known: set[str]) -> str:
    if ref == name:
        return "it refers to itself; a graph must be acyclic, correct the reference"
    if any(type(n) is dict and n.get("name") == ref for n in raw_nodes):
        return f"it refers to {ref!r}, which comes later (a cycle or a wrong order); list nodes in execution order"
    return f"it refers to {ref!r}, which does not exist{_near(ref, known)}; correct the reference or add the node"


def read_graph(path: str | Path) -> Graph:
    """Reads one ``emerge.graph/1`` file.

    Raises:
        GraphError: the file cannot be read, is not JSON, or violates the format; it says nothing about equivalence.
    """
    path = Path(path)
    return decode_graph(load_json(path, GraphError), str(path))


# --------------------------------------------------------------------------------------------------------------
# Encoding


def encode_arg(arg: Any) -> Any:
    """An ``Arg`` as JSON values; the inverse of :func:`decode_arg`."""
    if isinstance(arg, Ref):
        return {"ref": arg.name}
    if isinstance(arg, DType):
        return {"dtype": arg.name}
    if isinstance(arg, TypedConst):
        return {arg.kind: arg.value}
    if isinstance(arg, (list, tuple)):
        return [encode_arg(a) for a in arg]
    if isinstance(arg, float) and not math.isfinite(arg):
        return {"float": "nan" if math.isnan(arg) else "inf" if arg > 0 else "-inf"}
    if arg is None or isinstance(arg, (bool, int, float, str)):
        return arg
    raise TypeError(f"a value of type {type(arg).__name__}")


def _encode_input(i: Input) -> dict[str, Any]:
    out: dict[str, Any] = {"name": i.name, "dtype": i.dtype, "shape": list(i.shape)}
    if i.label is not None:
        out["label"] = i.label
    if i.const is not None:
        out["const"] = encode_arg(i.const)
    if i.placement is not None:
        out["placement"] = i.placement
    return out | i.extra


def _encode_node(n: Node) -> dict[str, Any]:
    out: dict[str, Any] = {
        "name": n.name,
        "op": n.op,
        "args": encode_arg(n.args),
        "kwargs": {k: encode_arg(v) for k, v in n.kwargs.items()},
        "dtype": n.dtype,
        "shape": None if n.shape is None else list(n.shape),
    }
    if n.is_tuple:
        out["tuple"] = True
        out["elements"] = {str(k): {"dtype": t.dtype, "shape": list(t.shape)} for k, t in n.elements.items()}
    if n.is_scalar:
        out["scalar"] = True
    if n.has_const:
        out["const"] = encode_arg(n.const)
    for key in ("source", "code", "module", "stack", "phase"):
        value = getattr(n, key)
        if value is not None:
            out[key] = value
    return out | n.extra


def encode_graph(graph: Graph) -> dict[str, Any]:
    """The JSON document of a graph; ``decode_graph(encode_graph(g), g.path) == g``."""
    out: dict[str, Any] = {
        "schema": SCHEMA,
        "name": graph.name,
        "rank": graph.rank,
        "world_size": graph.world_size,
        "format": graph.format,
        "direction": graph.direction,
    }
    if graph.spmd or graph.format == "hlo":
        out["spmd"] = graph.spmd
        out["output_input_alias"] = graph.output_input_alias
    elif graph.output_input_alias:
        out["output_input_alias"] = graph.output_input_alias
    if graph.mesh:
        out["mesh"] = graph.mesh
    if graph.groups:
        out["groups"] = graph.groups
    out["inputs"] = [_encode_input(i) for i in graph.inputs]
    out["nodes"] = []
    for n in graph.nodes:
        try:
            out["nodes"].append(_encode_node(n))
        except TypeError as e:
            raise GraphError(
                f"expected scalars, references and typed constants as arguments, found {e}; convert it before writing",
                f"{graph.path or graph.name}: node {n.name!r}",
            ) from None
    out["outputs"] = list(graph.outputs)
    out["stacks"] = graph.stacks
    return out | graph.extra


def dump_lines(document: dict[str, Any], split: frozenset[str]) -> str:
    """JSON text with one line per key, and one line per item of the lists named in ``split``."""

    def text(value: Any) -> str:
        return json.dumps(value, separators=(",", ":"), allow_nan=False)

    lines = []
    for key, value in document.items():
        if key in split and isinstance(value, list) and value:
            lines.append(f"{text(key)}:[\n" + ",\n".join(text(v) for v in value) + "\n]")
        else:
            lines.append(f"{text(key)}:{text(value)}")
    return "{" + ",\n".join(lines) + "\n}\n"


def write_graph(graph: Graph, path: str | Path) -> None:
    """Writes one ``emerge.graph/1`` file, one node per line, atomically. Reading it back gives an equal graph.

    Raises:
        GraphError: an argument or extra key has no JSON form, or the file cannot be written.
    """
    path = Path(path)
    try:
        body = dump_lines(encode_graph(graph), frozenset(("inputs", "nodes", "stacks")))
    except (TypeError, ValueError, RecursionError) as e:
        raise GraphError(
            f"expected JSON values in extra keys, found one that has no JSON form ({e}); convert it", str(path)
        ) from None
    write_atomically(path, body, GraphError)


# --------------------------------------------------------------------------------------------------------------
# Values beside a graph file


def write_values(graph: Graph, path: Path) -> bool:
    """Writes the values of a graph's inputs (``.npz``); False where it has none, and nothing is written."""
    arrays = {i.name: i.values for i in graph.inputs if i.values is not None}
    if not arrays:
        return False
    import numpy

    numpy.savez(path, **arrays)
    return True


def read_values(graph: Graph, path: Path) -> Graph:
    """Fills in the values of a file of :func:`write_values` where it exists."""
    if path.exists():
        import numpy

        with numpy.load(path, allow_pickle=False) as arrays:
            for item in graph.inputs:
                if item.name in arrays and tuple(arrays[item.name].shape) == tuple(item.shape):
                    item.values = arrays[item.name]
    return graph
