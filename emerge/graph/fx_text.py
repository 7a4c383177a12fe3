"""Reads the readable text PyTorch prints for FX graphs into a :class:`emerge.graph.model.Graph`.

Accepted: ``gm.print_readable()`` (with or without strides and devices), ``print(exported_program)``,
``TORCH_LOGS=aot_graphs`` output with its line prefixes, and the same text in tlparse dumps. Statements are parsed with
Python's ``ast`` and never evaluated. The text must carry type annotations, so plain ``gm.code`` is refused.

What the text does not hold: values of ``get_attr`` constants (``Node.has_const`` stays False), process groups,
the rank.
"""

from __future__ import annotations

import ast
import math
import re
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from emerge.graph.json_io import _SYMBOL
from emerge.graph.model import DTYPES, Arg, DType, Graph, Input, Node, Ref, Shape, TensorType, TypedConst
from emerge.util.errors import GraphError

#: Abbreviations of the printed annotations.
DTYPE_ABBREVIATIONS = {
    "b8": "bool",
    "u8": "uint8",
    "u16": "uint16",
    "u32": "uint32",
    "u64": "uint64",
    "i8": "int8",
    "i16": "int16",
    "i32": "int32",
    "i64": "int64",
    "f8e4m3fn": "float8_e4m3fn",
    "f8e5m2": "float8_e5m2",
    "f16": "float16",
    "bf16": "bfloat16",
    "f32": "float32",
    "f64": "float64",
    "c64": "complex64",
    "c128": "complex128",
}
_LAYOUTS = frozenset(
    ("strided", "sparse_coo", "sparse_csr", "sparse_csc", "sparse_bsr", "sparse_bsc", "jagged", "_mkldnn")
)
_MEMORY_FORMATS = frozenset(("contiguous_format", "preserve_format", "channels_last", "channels_last_3d"))
#: Operators whose result has the type of their operand: they give an unannotated constant its type.
_SAME_TYPE = frozenset(f"aten.{n}.default" for n in ("lift_fresh_copy", "lift_fresh", "detach", "clone", "alias"))
_BINARY: dict[type[ast.AST], str] = {
    ast.Add: "add", ast.Sub: "sub", ast.Mult: "mul", ast.Div: "truediv", ast.FloorDiv: "floordiv", ast.Mod: "mod",
    ast.Pow: "pow", ast.MatMult: "matmul", ast.BitAnd: "and_", ast.BitOr: "or_", ast.BitXor: "xor",
    ast.LShift: "lshift", ast.RShift: "rshift", ast.Lt: "lt", ast.LtE: "le", ast.Gt: "gt", ast.GtE: "ge",
    ast.Eq: "eq", ast.NotEq: "ne", ast.USub: "neg", ast.UAdd: "pos", ast.Invert: "invert", ast.Not: "not_",
}  # fmt: skip

_PREFIX = re.compile(r"^(?:\[rank\d+\]:)?\s?[VIWEDC]\d{4} [\d:.]+ \d+ \S+?:\d+\](?: \[[^\]]*\])* ?")
_TITLE = re.compile(r"=====\s*(.+?)\s*=====")
_CLASS = re.compile(r"\bclass (\S+?)\(")
_SOURCE = re.compile(r"File: (?P<file>.+?):(?P<line>\d+)(?: in [^,]*)?(?:, code: (?P<code>.*))?$")
_TENSOR = re.compile(r"(?P<dtype>\w+)\[(?P<shape>[^\[\]]*)\](?:\[[^\[\]]*\])?(?P<device>[\w:.]*)")
_SIGNATURE = re.compile(r"(?P<name>\w+): (?:PARAMETER|BUFFER|CONSTANT_TENSOR) target='(?P<label>[^']*)'.*")


class _Bad(Exception):
    """A violation in one statement; the caller adds file and line."""


@dataclass
class _Block:
    """The text of one printed graph."""

    line: int
    title: str
    header: str
    body: list[tuple[int, str]]


@dataclass
class _State:
    inputs: list[Input] = field(default_factory=list)
    nodes: list[Node] = field(default_factory=list)
    lines: dict[str, int] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    declared: dict[str, str] = field(default_factory=dict)
    unannotated_inputs: set[str] = field(default_factory=set)
    outputs: list[str | None] = field(default_factory=list)
    source: str | None = None
    code: str | None = None


def read_fx_text(path: str | Path, title: str | None = None) -> Graph:
    """Reads one printed FX graph.

    Args:
        path: the text file.
        title: which graph to take from a log that holds several, e.g. ``"Forward graph 0"``; a file with one graph
            needs none.

    Raises:
        GraphError: no graph or several graphs, a statement outside the printed form, a missing annotation, an unknown
            dtype; the place is ``file:line``.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as e:
        raise GraphError(f"cannot read the file as UTF-8 text ({e}); check the path", str(path)) from None
    return parse_fx_text(text, str(path), title)


def parse_fx_text(text: str, path: str, title: str | None = None) -> Graph:
    """:func:`read_fx_text` for text in memory; ``path`` is for messages."""
    lines = [(i, _PREFIX.sub("", raw)) for i, raw in enumerate(text.splitlines(), 1)]
    blocks = _blocks(lines)
    if title is not None:
        chosen = [b for b in blocks if title in b.title]
        if not chosen:
            raise GraphError(f"expected a graph titled {title!r}, found {_titles(blocks)}; choose one of them", path)
        blocks = chosen
    if not blocks:
        raise GraphError("expected 'def forward(self, ...)', found none; print the graph with print_readable()", path)
    if len(blocks) > 1:
        raise GraphError(f"expected one graph, found {_titles(blocks)}; keep one of them in the file", path)
    block = blocks[0]
    state = _State()
    line = block.line
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # odd escapes in printed strings are not the user's concern
            _header(block.header, state, line)
            done = False
            for line, statement in block.body:
                done = _line(statement, line, state)
                if done:
                    break
        if not done:
            raise _Bad("the graph has no 'return'; is the text truncated?")
        if state.unannotated_inputs:
            raise _Bad(_unannotated(f"input {min(state.unannotated_inputs)!r}"))
        users: dict[str, list[Node]] = {}
        for node in state.nodes:
            for name in node.refs():
                users.setdefault(name, []).append(node)
        for node in state.nodes:
            line = state.lines[node.name]
            _settle(node, users.get(node.name, []), state)
    except _Bad as e:
        raise GraphError(str(e), f"{path}:{line}") from None
    except RecursionError:
        message = "expected a printed FX statement, found one nested too deeply; shorten it"
        raise GraphError(message, f"{path}:{line}") from None
    labels: dict[str, str] = {}
    for _, text in lines:
        if found := _SIGNATURE.fullmatch(text.strip()):
            labels[found["name"]] = found["label"]
    for item in state.inputs:
        item.label = labels.get(item.name)
    lowered = block.title.lower()
    direction = "both" if "joint" in lowered or lowered == "inner_f" else "bw" if "backward" in lowered else "fw"
    return Graph(
        name=Path(path).stem,
        inputs=state.inputs,
        nodes=state.nodes,
        outputs=state.outputs,
        direction=direction,
        path=path,
    )


def _unannotated(what: str) -> str:
    return f"{what} has no type annotation; print it with print_readable()"


def _titles(blocks: list[_Block]) -> str:
    return ", ".join(f"{b.title!r} (line {b.line})" for b in blocks) or "none"


def _blocks(lines: list[tuple[int, str]]) -> list[_Block]:
    """Top-level graphs; the classes of nested sub-graphs (branches of ``cond``, ...) are left out."""
    out: list[_Block] = []
    title = name = ""
    top = -1
    i = 0
    while i < len(lines):
        number, text = lines[i]
        i += 1
        stripped = text.strip()
        if stripped.startswith("#"):
            if out and top >= 0:
                out[-1].body.append((number, text))
        elif found := _TITLE.search(text):
            title, name, top = found.group(1), "", -1
        elif found := _CLASS.search(text):
            name = found.group(1)
        elif stripped.startswith("def forward("):
            indent = len(text) - len(text.lstrip())
            header = stripped
            while not _closed(header) and i < len(lines):
                header += " " + lines[i][1].strip()
                i += 1
            if 0 <= top < indent:
                continue
            top = indent
            block = _Block(number, title or name or "graph", header, [])
            out.append(block)
        elif out and top >= 0:
            out[-1].body.append((number, text))
    return out


def _closed(header: str) -> bool:
    if not header.endswith(":"):
        return False
    try:
        ast.parse(header + " pass")
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return True


def _parse(text: str) -> list[ast.stmt]:
    try:
        return ast.parse(text).body
    except SyntaxError as e:
        raise _Bad(f"expected a printed FX statement, found {text[:80]!r} ({e.msg}); is the text truncated?") from None
    except (ValueError, MemoryError) as e:
        raise _Bad(f"expected a printed FX statement, found text that does not parse ({e}); print it again") from None


def _header(header: str, state: _State, line: int) -> None:
    function = _parse(header + " pass")[0]
    if not isinstance(function, ast.FunctionDef):
        raise _Bad(f"expected 'def forward(self, ...)', found {header[:60]!r}; print the graph again")
    for arg in function.args.args[1:]:
        state.lines[arg.arg] = line
        if arg.annotation is None:
            state.unannotated_inputs.add(arg.arg)
        else:
            state.inputs.append(_input(arg.arg, arg.annotation))
    if function.args.vararg or function.args.kwonlyargs or function.args.kwarg:
        raise _Bad("'*args', '**kwargs' and keyword-only inputs are not supported; capture with AOT or export")


def _line(text: str, line: int, state: _State) -> bool:
    """Handles one line of the body; True at the ``return``."""
    stripped = text.strip()
    if not stripped:
        return False
    if stripped.startswith("#"):
        if found := _SOURCE.search(stripped):
            state.source, state.code = f"{found['file']}:{found['line']}", found["code"]
        elif "No stacktrace" in stripped:
            state.source = state.code = None
        return False
    for statement in _parse(stripped):
        if isinstance(statement, ast.Return):
            _return(statement.value, line, state)
            return True
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            name = statement.target.id
            if statement.value is None:
                state.declared[name] = _annotation_text(statement.annotation)
            else:
                _assign(name, statement.value, _annotation_text(statement.annotation), line, state)
        elif isinstance(statement, ast.Assign):
            target = statement.targets[0]
            if isinstance(statement.value, ast.Constant) and statement.value.value is None:
                continue  # "x = None": the printed end of life of a name
            if isinstance(target, ast.Tuple) and "tree_flatten" in ast.unparse(statement.value):
                _flattened(target, line, state)
            elif isinstance(target, ast.Name) and len(statement.targets) == 1:
                _assign(target.id, statement.value, None, line, state)
            else:
                raise _Bad(f"expected one name on the left, found {ast.unparse(target)!r}; print the graph again")
        elif isinstance(statement, ast.AugAssign):
            raise _Bad(f"in-place {ast.unparse(statement)!r} is not supported; functionalise the graph (AOT or export)")
        elif not isinstance(statement, ast.Pass):
            raise _Bad(f"expected an assignment or 'return', found {ast.unparse(statement)[:80]!r}; print it again")
    return False


def _flattened(target: ast.Tuple, line: int, state: _State) -> None:
    """``a, b, = fx_pytree.tree_flatten_spec([...], self._in_spec)``: the true inputs of a joint graph."""
    state.unannotated_inputs.clear()
    for element in target.elts:
        name = element.id if isinstance(element, ast.Name) else ast.unparse(element)
        if name not in state.declared:
            raise _Bad(_unannotated(f"input {name!r}"))
        _new_name(name, line, state)
        state.inputs.append(_input(name, ast.Constant(state.declared[name])))


def _new_name(name: str, line: int, state: _State) -> None:
    if name in state.aliases or (name in state.lines and name not in state.unannotated_inputs):
        raise _Bad(f"{name!r} is assigned twice; an FX graph gives every value its own name, print the graph again")
    state.lines[name] = line


def _return(value: ast.expr | None, line: int, state: _State) -> None:
    if isinstance(value, ast.Call) and "tree_unflatten" in ast.unparse(value.func) and value.args:
        value = value.args[0]
    if isinstance(value, (ast.Tuple, ast.List)):
        for element in value.elts:
            _return(element, line, state)
    elif isinstance(value, ast.Dict):
        for element in value.values:
            _return(element, line, state)
    elif value is None or (isinstance(value, ast.Constant) and value.value is None):
        state.outputs.append(None)
    else:
        arg = _arg(value, state)
        if not isinstance(arg, Ref):
            # a literal output stays visible as a scalar node, so that outputs keep their positions
            name = f"output_{len(state.outputs)}_constant"
            _new_name(name, line, state)
            state.nodes.append(Node(name, "prim.Constant", [arg], is_scalar=True))
            arg = Ref(name)
        state.outputs.append(arg.name)


# --------------------------------------------------------------------------------------------------------------
# Types


def _annotation_text(annotation: ast.expr) -> str:
    if isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):
        return annotation.value
    return ast.unparse(annotation)


def _tensor_type(text: str) -> TensorType | None:
    """The type of ``"f32[8, 16][16, 1]cpu"``; None for ``"Sym(u0)"`` and Python scalars.

    Raises:
        _Bad: anything else, or an unknown dtype or size.
    """
    text = text.strip()
    if text.startswith("Sym(") or text in ("int", "float", "bool"):
        return None
    found = _TENSOR.fullmatch(text)
    if found is None:
        raise _Bad(f"expected a type such as 'f32[8, 16]' or 'Sym(u0)', found {text!r}; print it with print_readable()")
    dtype = DTYPE_ABBREVIATIONS.get(found["dtype"])
    if dtype is None:
        raise _Bad(f"unknown dtype {found['dtype']!r}; known: {', '.join(DTYPE_ABBREVIATIONS)}")
    return TensorType(dtype, tuple(_size(s) for s in _split(found["shape"])))


def _split(text: str) -> list[str]:
    """Splits at commas outside parentheses."""
    out, depth = [""], 0
    for c in text:
        depth += (c == "(") - (c == ")")
        if c == "," and depth == 0:
            out.append("")
        else:
            out[-1] += c
    return [s.strip() for s in out] if text.strip() else []


def _size(text: str) -> int | str:
    if text.isascii() and text.isdigit() and len(text) < 19:
        return int(text)
    if not _SYMBOL.fullmatch(text):
        raise _Bad(f"expected a size >= 0 or a symbol such as 'u0', found {text!r}; print the graph again")
    return text


def _input(name: str, annotation: ast.expr) -> Input:
    text = _annotation_text(annotation)
    tensor = _tensor_type(text)
    if tensor is None:
        shape: Shape = ()
        return Input(name, "int64", shape, extra={"scalar": True, "val": text})
    return Input(name, tensor.dtype, tensor.shape)


def _takes_output(user: Node, name: str) -> bool:
    args = user.args
    return user.op == "operator.getitem" and len(args) == 2 and args[0] == Ref(name) and type(args[1]) is int


def _settle(node: Node, users: list[Node], state: _State) -> None:
    """Gives a node without annotation its type: a tuple if it is only indexed, else what its users tell."""
    if node.dtype is not None or node.is_scalar:
        return
    if node.name in state.outputs:
        raise _Bad(_unannotated(f"output {node.name!r}"))
    if node.op == "get_attr":
        types = {(n.dtype, n.shape) for n in users if n.op in _SAME_TYPE}
        if len(types) == 1:
            ((node.dtype, node.shape),) = types
            return
        if all(n.op.startswith("higher_order.") for n in users):
            # its own operator name: two sub-graphs of one name must never pass for the same constant
            node.op, node.is_scalar = "fx.submodule", True
            return
    elif all(_takes_output(n, node.name) for n in users):
        if not users and node.op.startswith("aten._assert"):
            node.is_scalar = True
            return
        node.is_tuple = True
        for n in users:
            if n.dtype is not None and n.shape is not None:
                node.elements[n.args[1]] = TensorType(n.dtype, n.shape)  # type: ignore[index]
        return
    raise _Bad(_unannotated(repr(node.name)))


# --------------------------------------------------------------------------------------------------------------
# Expressions


def _dotted(e: ast.expr) -> str | None:
    parts = []
    while isinstance(e, ast.Attribute):
        parts.append(e.attr)
        e = e.value
    if not isinstance(e, ast.Name):
        return None
    return ".".join([e.id, *reversed(parts)])


def _op_name(dotted: str) -> str:
    for prefix in ("torch.ops.higher_order.auto_", "torch.ops.", "_"):
        if dotted.startswith(prefix) and (prefix != "_" or dotted.startswith("_operator.")):
            rest = dotted[len(prefix) :]
            return f"auto_{rest}" if prefix.endswith("auto_") else rest
    return dotted


def _assign(name: str, value: ast.expr, annotation: str | None, line: int, state: _State) -> None:
    if isinstance(value, ast.Name):
        _new_name(name, line, state)
        target = _arg(value, state)
        if not isinstance(target, Ref):
            raise _Bad(f"expected an operator call or a name, found {value.id!r}; print the graph again")
        state.aliases[name] = target.name
        return
    node = Node(name, "", source=state.source, code=state.code)
    node.op, node.args, node.kwargs = _call(value, state)
    if annotation is not None:
        tensor = _tensor_type(annotation)
        if tensor is None:
            node.is_scalar = True
            node.extra["val"] = annotation
        else:
            node.dtype, node.shape = tensor.dtype, tensor.shape
    _new_name(name, line, state)
    state.nodes.append(node)


def _call(value: ast.expr, state: _State) -> tuple[str, list[Arg], dict[str, Arg]]:
    """Operator name, args and kwargs of the right-hand side of an assignment."""
    if isinstance(value, ast.Call):
        kwargs: dict[str, Arg] = {}
        for k in value.keywords:
            if k.arg is None:
                raise _Bad("'**' in a call is not supported; print the graph again")
            kwargs[k.arg] = _arg(k.value, state)
        args = [_arg(a, state) for a in value.args]
        if isinstance(value.func, ast.Call):  # getattr(self, "0")(x)
            return "call_module", [ast.unparse(value.func), *args], kwargs
        dotted = _dotted(value.func)
        if dotted is None:
            raise _Bad(f"expected an operator name, found {ast.unparse(value.func)[:60]!r}; print the graph again")
        head, _, rest = dotted.partition(".")
        if head == "self":
            return "call_module", [rest, *args], kwargs
        if isinstance(value.func, ast.Attribute) and head in state.lines:
            return f"torch.Tensor.{value.func.attr}", [_arg(value.func.value, state), *args], kwargs
        return _op_name(dotted), args, kwargs
    if isinstance(value, ast.Subscript):
        return "operator.getitem", [_arg(value.value, state), _arg(value.slice, state)], {}
    if isinstance(value, ast.Attribute):
        dotted = _dotted(value)
        if dotted is not None and dotted.startswith("self."):
            return "get_attr", [dotted[5:]], {}
        return "builtins.getattr", [_arg(value.value, state), value.attr], {}
    if isinstance(value, ast.BinOp):
        return f"operator.{_BINARY[type(value.op)]}", [_arg(value.left, state), _arg(value.right, state)], {}
    if isinstance(value, ast.Compare) and len(value.ops) == 1 and type(value.ops[0]) in _BINARY:
        operands = [_arg(value.left, state), _arg(value.comparators[0], state)]
        return f"operator.{_BINARY[type(value.ops[0])]}", operands, {}
    if isinstance(value, ast.UnaryOp):
        return f"operator.{_BINARY[type(value.op)]}", [_arg(value.operand, state)], {}
    raise _Bad(f"expected an operator call, found {ast.unparse(value)[:80]!r}; print the graph again")


def _arg(e: ast.expr, state: _State) -> Arg:
    """An argument; nested calls other than ``device(...)`` and ``float(...)`` are refused."""
    if isinstance(e, ast.Constant):
        v: Any = e.value
        if v is None or isinstance(v, (bool, int, str)):
            return v
        if isinstance(v, float):
            if math.isinf(v):
                raise _Bad("a number overflows to infinity; print it as inf")
            return v
        raise _Bad(f"{type(v).__name__} constants are not supported, found {v!r}; capture the graph as JSON")
    if isinstance(e, (ast.List, ast.Tuple)):
        return [_arg(x, state) for x in e.elts]
    if isinstance(e, ast.UnaryOp) and isinstance(e.op, ast.USub):
        inner = _arg(e.operand, state)
        if isinstance(inner, (int, float)) and not isinstance(inner, bool):
            return -inner
    if isinstance(e, ast.Name):
        name = state.aliases.get(e.id, e.id)
        if name in state.lines and name not in state.unannotated_inputs:
            return Ref(name)
        if name in state.unannotated_inputs:
            raise _Bad(_unannotated(f"input {name!r}"))
        if name in ("inf", "nan"):
            return float(name)
        raise _Bad(f"{name!r} is used before it is defined; is the text truncated or out of order?")
    if isinstance(e, ast.Attribute):
        return _constant(e)
    if isinstance(e, ast.Call):
        return _constant_call(e)
    raise _Bad(f"the argument {ast.unparse(e)[:80]!r} is not supported; capture at ATen level or as JSON")


def _constant(e: ast.Attribute) -> Arg:
    dotted = _dotted(e) or ""
    if dotted.startswith("torch.ops."):
        return _op_name(dotted)
    head, _, name = dotted.partition(".")
    if head == "torch":
        if name in DTYPES:
            return DType(name)
        if name in _LAYOUTS:
            return TypedConst("layout", name)
        if name in _MEMORY_FORMATS:
            return TypedConst("memory_format", name)
    raise _Bad(f"expected a dtype, layout or memory format, found {ast.unparse(e)[:80]!r}; capture the graph as JSON")


def _constant_call(e: ast.Call) -> Arg:
    name = _dotted(e.func)
    values: dict[str, Any] = {}
    for key, item in [*zip(("type", "index"), e.args), *((k.arg, k.value) for k in e.keywords)]:
        if not isinstance(item, ast.Constant) or key is None:
            break
        values[key] = item.value
    else:
        if (
            name in ("device", "torch.device")
            and isinstance(values.get("type"), str)
            and set(values) <= {"type", "index"}
        ):
            index = values.get("index")
            return TypedConst("device", str(values["type"]) if index is None else f"{values['type']}:{index}")
        if name == "float" and len(e.args) == 1 and values.get("type") in ("inf", "-inf", "nan"):
            return float(values["type"])
    if name == "slice":
        raise _Bad("slice objects as arguments are not supported; capture at ATen level (AOT or export)")
    raise _Bad(f"the nested call {ast.unparse(e)[:80]!r} is not supported; capture at ATen level or as JSON")
