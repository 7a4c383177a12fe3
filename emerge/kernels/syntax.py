"""Reads ``.kernel`` files: Python syntax, parsed and checked, never executed.

A file holds functions. One with ``@operator("namespace.name.overload")`` decorators defines these operators; one without
is a helper of the file. The first line of the docstring is the meaning, the rest the contract in words. Further decorators:
``@example(name=value, ...)`` gives valid arguments for the check of the definition, ``@writes("a", "b")`` names operands
that the kernel overwrites: the function returns their new values.
"""

from __future__ import annotations

import ast
import hashlib
import io
import tokenize
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from emerge.util.errors import RuleError

SUFFIX = ".kernel"

_STATEMENTS = (ast.Assign, ast.AugAssign, ast.If, ast.For, ast.Return, ast.Assert, ast.Expr, ast.Pass)
_EXPRESSIONS = (
    ast.BoolOp, ast.BinOp, ast.UnaryOp, ast.IfExp, ast.Compare, ast.Call, ast.Constant, ast.Attribute, ast.Subscript,
    ast.Name, ast.List, ast.Tuple, ast.Slice, ast.ListComp, ast.comprehension, ast.keyword,
)  # fmt: skip
_TOKENS = (ast.expr_context, ast.boolop, ast.operator, ast.unaryop, ast.cmpop, ast.arguments, ast.arg)


@dataclass(frozen=True)
class Parameter:
    """A parameter; ``default`` is None where it must be given."""

    name: str
    default: ast.expr | None


@dataclass(frozen=True)
class Function:
    """A function of a file.

    Attributes:
        name, parameters, body: as written, without the docstring.
        place: ``file:line``.
    """

    name: str
    parameters: tuple[Parameter, ...]
    body: tuple[ast.stmt, ...]
    place: str


@dataclass(frozen=True)
class Definition:
    """What an operator computes.

    Attributes:
        operator: qualified name, e.g. ``aten.rms_norm.default``.
        function: its composite. helpers: the other functions of the file, by name.
        meaning: one line. contract: the rest of the docstring.
        writes: parameters that the kernel overwrites, in the order of the results.
        examples: parameter -> expression of a valid argument.
        text: function and helpers, for people. code: their tokens, without comments and docstrings; ``hash`` is bound to
            these and to the operator's name.
    """

    operator: str
    function: Function
    meaning: str
    contract: str
    writes: tuple[str, ...]
    examples: tuple[Mapping[str, ast.expr], ...]
    helpers: Mapping[str, Function] = field(repr=False, default_factory=dict)
    text: str = field(repr=False, default="")
    code: str = field(repr=False, default="")
    shipped: bool = False

    @property
    def name(self) -> str:
        """Name in reports and commands."""
        return f"{self.operator}:{self.function.name}"

    @property
    def place(self) -> str:
        """Where it is written."""
        return self.function.place

    @property
    def hash(self) -> str:
        """Digest of everything the meaning depends on."""
        return hashlib.sha256(f"{self.operator}\n{self.code}".encode()).hexdigest()


def read_definitions(path: Path, shipped: bool = False) -> list[Definition]:
    """The definitions of a file, one per operator name.

    Raises:
        RuleError: the file cannot be read, is not in the language, or an operator stands in it without a docstring.
    """
    try:
        source = path.read_text(encoding="utf-8")
        tree = ast.parse(source, filename=str(path))
    except (OSError, SyntaxError, ValueError) as exc:
        line = f":{exc.lineno}" if isinstance(exc, SyntaxError) else ""
        raise RuleError(f"expected kernel definitions, found: {exc}; correct the file", f"{path}{line}") from None
    nodes: list[ast.FunctionDef] = []
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            nodes.append(node)
        elif not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)):
            raise RuleError("expected function definitions only; move this into a function", f"{path}:{node.lineno}")
    functions = {node.name: _function(node, path) for node in nodes}
    out: list[Definition] = []
    seen: set[tuple[str, str]] = set()
    for node in nodes:
        for made in _definitions(node, functions, {n.name: n for n in nodes}, path, source, shipped):
            if (made.operator, made.function.name) in seen:
                raise RuleError(f"{made.operator} is named twice at {made.function.name}", made.place)
            seen.add((made.operator, made.function.name))
            out.append(made)
    return out


def _function(node: ast.FunctionDef, path: Path) -> Function:
    place = f"{path}:{node.lineno}"
    a = node.args
    if a.vararg or a.kwarg or a.posonlyargs or a.kwonlyargs:
        raise RuleError(f"{node.name}: parameters are names with or without default, without * or /", place)
    missing: list[ast.expr | None] = [None] * (len(a.args) - len(a.defaults))
    parameters = tuple(Parameter(p.arg, d) for p, d in zip(a.args, [*missing, *a.defaults]))
    body = node.body[1:] if ast.get_docstring(node) is not None else node.body
    for part in [*body, *a.defaults]:
        for inner in ast.walk(part):
            _check(inner, path)
    if not any(isinstance(s, ast.Return) for s in ast.walk(node)):
        raise RuleError(f"{node.name} returns nothing; end it with 'return value'", place)
    return Function(node.name, parameters, tuple(body), place)


def _check(node: ast.AST, path: Path) -> None:
    if not isinstance(node, (*_STATEMENTS, *_EXPRESSIONS, *_TOKENS)):
        line = getattr(node, "lineno", None)
        raise RuleError(
            f"{type(node).__name__} is not in the language of kernel definitions; it has assignments, if, for, assert and "
            "return (docs/kernels.md)", f"{path}:{line}" if line else str(path),
        )  # fmt: skip
    name = node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
    if name.startswith("_"):
        place = f"{path}:{getattr(node, 'lineno', 0)}"
        raise RuleError("names of the language do not start with '_'", place)


def _definitions(
    node: ast.FunctionDef, functions: Mapping[str, Function], nodes: Mapping[str, ast.FunctionDef], path: Path, source: str,
    shipped: bool,
) -> Iterator[Definition]:  # fmt: skip
    operators: list[str] = []
    writes: tuple[str, ...] = ()
    examples: list[Mapping[str, ast.expr]] = []
    names = [p.name for p in functions[node.name].parameters]
    for decorator in node.decorator_list:
        place = f"{path}:{decorator.lineno}"
        call = decorator if isinstance(decorator, ast.Call) and isinstance(decorator.func, ast.Name) else None
        kind = call.func.id if call is not None and isinstance(call.func, ast.Name) else ""
        if call is None or kind not in ("operator", "example", "writes"):
            raise RuleError("expected @operator(name), @example(parameter=value, ...) or @writes(parameter, ...)", place)
        texts = [a.value for a in call.args if isinstance(a, ast.Constant) and isinstance(a.value, str)]
        if kind == "example":
            given = {k.arg: k.value for k in call.keywords if k.arg is not None}
            wrong = sorted(set(given) - set(names))
            if call.args or wrong:
                raise RuleError(f"@example takes parameters of {node.name} by name, found {wrong or 'positions'}", place)
            for value in given.values():
                for inner in ast.walk(value):
                    _check(inner, path)
            examples.append(given)
        elif len(texts) != len(call.args) or not texts or call.keywords:
            raise RuleError(f"@{kind} takes names in quotes", place)
        elif kind == "operator":
            operators += texts
        else:
            writes = tuple(texts)
            if set(writes) - set(names):
                raise RuleError(f"@writes names {sorted(set(writes) - set(names))[0]!r}, which is no parameter", place)
    if not operators:
        if node.decorator_list:
            raise RuleError(f"{node.name} has decorators but no @operator(name)", f"{path}:{node.lineno}")
        return
    doc = ast.get_docstring(node)
    if not doc:
        what = f"{node.name} has no docstring; its first line says what the operator computes"
        raise RuleError(what, f"{path}:{node.lineno}")
    meaning, _, contract = doc.partition("\n")
    used = _used(node, nodes)
    text = "\n".join(ast.unparse(_plain(nodes[n])) for n in used)
    code = " ".join(_tokens(source, nodes[n]) for n in used)
    helpers = {n: functions[n] for n in used if n != node.name}
    for name in operators:
        if name.count(".") < 1:
            what = f"expected a qualified operator name such as aten.gelu.default, found {name!r}"
            raise RuleError(what, f"{path}:{node.lineno}")
        yield Definition(
            name, functions[node.name], meaning.strip(), contract.strip(), writes, tuple(examples), helpers,
            text, f"{code} writes {' '.join(writes)}", shipped,
        )  # fmt: skip


def _used(node: ast.FunctionDef, nodes: Mapping[str, ast.FunctionDef]) -> list[str]:
    """The function and the helpers it calls, directly or not, in order of first use."""
    found, stack = [node.name], [node]
    while stack:
        for inner in ast.walk(stack.pop()):
            name = inner.func.id if isinstance(inner, ast.Call) and isinstance(inner.func, ast.Name) else ""
            if name in nodes and name not in found:
                found.append(name)
                stack.append(nodes[name])
    return found


def _plain(node: ast.FunctionDef) -> ast.FunctionDef:
    """The function without docstring and decorators: what its meaning depends on."""
    body = node.body[1:] if ast.get_docstring(node) is not None else node.body
    return ast.FunctionDef(
        name=node.name, args=node.args, body=body, decorator_list=[], returns=None, type_comment=None,
        lineno=node.lineno, col_offset=0,
    )  # fmt: skip


def _tokens(source: str, node: ast.FunctionDef) -> str:
    """The tokens of a function without decorators, docstring and comments: the same for every version of Python."""
    lines = "".join(f"{line}\n" for line in source.splitlines()[node.lineno - 1 : node.end_lineno])
    doc = node.body[0] if ast.get_docstring(node) is not None else None
    rows = range(doc.lineno - node.lineno + 1, (doc.end_lineno or 0) - node.lineno + 2) if doc is not None else range(0)
    out = []
    for token in tokenize.generate_tokens(io.StringIO(lines).readline):
        if token.start[0] in rows or token.type in (tokenize.COMMENT, tokenize.NL, tokenize.ENDMARKER):
            continue
        layout = {tokenize.NEWLINE: ";", tokenize.INDENT: "{", tokenize.DEDENT: "}"}
        out.append(layout.get(token.type, token.string))
    return " ".join(out)
