"""The engine that uses an installed ``souffle`` binary: interpreter, facts and results through files.

The lowered program is written out, so both engines run the same clauses. Symbols are escaped one-to-one before they
reach Soufflé (``%2C`` for a comma): a tab or newline would break its fact files, a comma or bracket its record text.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from emerge.engine.checks import MAX_COLUMNS, guard_of
from emerge.engine.lower import Assign, Rule, Step
from emerge.engine.program import LogRule, Program
from emerge.engine.syntax import Agg, Atom, Cmp, Neg, Nil, Num, Op, Rec, Str, Term, Var, Wild
from emerge.engine.typetable import TypeTable
from emerge.util.errors import BudgetExceeded, EngineError

Rows = list[tuple[Any, ...]]
_UNSAFE = re.compile(r"[^A-Za-z0-9_.:/+*=<>!?@#&|~^;-]")
_ESCAPED = re.compile(r"(?:%[0-9A-F]{2})+")
_EMPTY = "%"
# A log relation with more variables than this packs them into records of that many fields.
_LOG_COLUMNS = MAX_COLUMNS - 6


def escape(symbol: str) -> str:
    """``symbol`` with everything unsafe as ``%XX`` per UTF-8 byte; the empty symbol is a bare ``%``."""
    if not symbol:
        return _EMPTY
    return _UNSAFE.sub(lambda m: "".join(f"%{byte:02X}" for byte in m[0].encode()), symbol)


def unescape(text: str) -> str:
    """Inverse of :func:`escape`."""
    if text == _EMPTY:
        return ""
    if "%" not in text:
        return text
    return _ESCAPED.sub(lambda m: bytes.fromhex(m[0].replace("%", "")).decode(), text)


class _Escapes(dict[str, str]):
    def __missing__(self, symbol: str) -> str:
        text = self[symbol] = escape(symbol)
        return text


# --- program text ---------------------------------------------------------------------------------------------------


class _Emitter:
    def __init__(self, relations: Mapping[str, str], numbers: dict[str, str] | None = None) -> None:
        self.relations = relations
        self.numbers: dict[str, str] = {} if numbers is None else numbers
        self.around: Sequence[Step] = ()  # the body being written, where guards of divisors stand

    def rule(self, rule: Rule, head: str | None = None) -> str:
        head = head or self.atom(rule.head)
        plan = f"\n.plan {rule.clause.plan}" if rule.clause.plan else ""
        body = self.body(rule.body)
        return f"{head} :- {body}.{plan}" if body else f"{head}."

    def body(self, steps: Sequence[Step]) -> str:
        outer, self.around = self.around, steps
        text = ", ".join(map(self.step, steps))
        self.around = outer
        return text

    def step(self, step: Step) -> str:
        match step:
            case Atom():
                return self.atom(step)
            case Neg():
                return "!" + self.atom(step.atom)
            case Cmp():
                return f"{self.term(step.left)} {step.op} {self.term(step.right)}"
            case Assign():
                return f"{self.term(step.var)} = {self.term(step.agg)}"

    def atom(self, atom: Atom) -> str:
        return f"{self.relations[atom.name]}({', '.join(self.term(a) for a in atom.args)})"

    def term(self, term: Term) -> str:
        match term:
            case Var():
                return self.numbers.setdefault(term.name, f"v{len(self.numbers)}")
            case Wild():
                return "_"
            case Num():
                return f"({term.value})" if term.value < 0 else str(term.value)
            case Str():
                return f'"{escape(term.value)}"'
            case Nil():
                return "nil"
            case Rec():
                return f"[{', '.join(self.term(i) for i in term.items)}]"
            case Op():
                args = [self.term(a) for a in term.args]
                if term.op in ("min", "max"):
                    return f"{term.op}({args[0]}, {args[1]})"
                if len(args) == 1:
                    return f"({'-' if term.op == 'neg' else 'bnot '}{args[0]})"
                if term.op in ("/", "%") and isinstance(term.args[1], Var):
                    args[1] = self.safe_divisor(args[1], term.args[1].name)
                return f"({args[0]} {term.op} {args[1]})"
            case Agg():
                outer, self.around = self.around, term.body
                target = "" if term.target is None else " " + self.term(term.target)
                self.around = outer
                return f"{term.op}{target} : {{ {self.body(term.body)} }}"

    def safe_divisor(self, text: str, name: str) -> str:
        """The divisor where its guard holds, and never 0.

        Soufflé turns guards into index bounds and may test what is left of them after the division, so a guarded
        division can still end the run.
        """
        if guard_of(name, self.around) == "positive":
            return f"max({text}, 1)"
        return f"({text} + 1 + (({text} bor (-{text})) bshr 31))"


def _flat_names(names: Iterable[str]) -> dict[str, str]:
    """Names without dots, unique: Soufflé has dots only for its own component instances."""
    taken: dict[str, str] = {}
    used: set[str] = set()
    for name in sorted(names, key=lambda n: "." in n):
        flat = name.replace(".", "__")
        while flat in used:
            flat += "_"
        used.add(flat)
        taken[name] = flat
    return taken


class _Text:
    """The Soufflé program of a run, and how its columns read and write."""

    def __init__(self, program: Program, given: Iterable[str], outputs: Iterable[str], logs: Sequence[LogRule]) -> None:
        self.relations = _flat_names(program.relations)
        self.types = _flat_names(program.types)
        self.lines: list[str] = []
        for name, decl in program.types.items():
            if decl.fields is not None:
                fields = ", ".join(f"f{i}:{self.type(t)}" for i, (_, t) in enumerate(decl.fields))
                self.lines.append(f".type {self.types[name]} = [{fields}]")
            else:
                self.lines.append(f".type {self.types[name]} {'<:' if decl.strict else '='} {self.type(decl.base)}")
        for name, relation in program.relations.items():
            columns = ", ".join(f"c{i}:{self.type(t)}" for i, t in enumerate(relation.types))
            self.lines.append(f".decl {self.relations[name]}({columns})")
        self.lines += [f".input {self.relations[name]}" for name in given]
        self.lines += [f".output {self.relations[name]}" for name in outputs]
        logged = {log.rule.clause.index for log in logs}
        self.lines += [_Emitter(self.relations).rule(r) for i, r in enumerate(program.rules) if i not in logged]
        for log in logs:
            self._log(log)

    def type(self, name: str) -> str:
        return self.types.get(name, name)

    def _log(self, log: LogRule) -> None:
        """The body derives the log, the log the head: no join runs twice, and a ``.plan`` stays valid."""
        numbers = {v: f"v{i}" for i, v in enumerate(log.rule.variables)}
        columns = [(f"v{i}", self.type(t)) for i, t in enumerate(log.types)]
        emitter = _Emitter(self.relations, numbers)
        if len(columns) <= _LOG_COLUMNS:
            decl, head = columns, ", ".join(n for n, _ in columns)
        else:
            decl, parts = [], []
            for index, start in enumerate(range(0, len(columns), _LOG_COLUMNS)):
                part = columns[start : start + _LOG_COLUMNS]
                self.lines.append(f".type {log.name}_{index} = [{', '.join(f'{n}:{t}' for n, t in part)}]")
                decl.append((f"r{index}", f"{log.name}_{index}"))
                parts.append(f"[{', '.join(n for n, _ in part)}]")
            head = ", ".join(parts)
        self.lines.append(f".decl {log.name}({', '.join(f'{n}:{t}' for n, t in decl)})")
        self.lines.append(f".output {log.name}")
        instance = f"{log.name}({head})"
        self.lines.append(emitter.rule(log.rule, instance))
        self.lines.append(f"{emitter.atom(log.rule.head)} :- {instance}.")


# --- values ---------------------------------------------------------------------------------------------------------


def value_text(value: Any, escapes: _Escapes) -> str:
    """A number, symbol, record or nil as Soufflé reads it from a fact file; nesting of any depth."""
    if type(value) is int:
        return str(value)
    if type(value) is str:
        return escapes[value]
    parts: list[str] = []
    work: list[Any] = [value]
    while work:
        item = work.pop()
        if item is None:
            parts.append("nil")
        elif type(item) is int:
            parts.append(str(item))
        elif type(item) is str:
            parts.append(escapes[item])
        elif type(item) is _Punctuation:
            parts.append(item.text)
        else:
            work.append(_CLOSE)
            for index in range(len(item) - 1, -1, -1):
                work.append(item[index])
                if index:
                    work.append(_COMMA)
            parts.append("[")
    return "".join(parts)


class _Punctuation:
    def __init__(self, text: str) -> None:
        self.text = text


_CLOSE, _COMMA = _Punctuation("]"), _Punctuation(", ")
_RECORD_TOKEN = re.compile(r"[\[\],]|[^\[\], ]+")


class _RecordReader(dict[str, Any]):
    """Text of a record of one type -> tuple; equal texts are read once."""

    def __init__(self, type_name: str, types: TypeTable) -> None:
        super().__init__()
        self.type_name, self.types = type_name, types

    def __missing__(self, text: str) -> Any:
        value = self[text] = self._read(text)
        return value

    def _read(self, text: str) -> Any:
        tokens = _RECORD_TOKEN.findall(text)
        # Stack of open records: the kinds of their fields, and the fields read so far.
        stack: list[tuple[tuple[str, ...], list[Any]]] = []
        root: list[Any] = []
        expected: tuple[tuple[str, ...], list[Any]] = ((self.type_name,), root)
        for token in tokens:
            kinds, values = expected
            if token == ",":
                continue
            if token == "]":
                expected = stack.pop()
                expected[1].append(tuple(values))
                continue
            kind = self.types.kind(kinds[len(values)])
            if token == "[":
                stack.append(expected)
                expected = (self.types.fields[kind], [])
            elif kind == "number":
                values.append(int(token))
            elif kind == "symbol":
                values.append(unescape(token))
            elif token == "nil":
                values.append(None)
            else:
                raise EngineError(f"souffle wrote '{text[:80]}', which is no record of type {self.type_name}")
        if len(root) != 1 or stack:
            raise EngineError(f"souffle wrote '{text[:80]}', which is no record of type {self.type_name}")
        return root[0]


class _Unescapes(dict[str, str]):
    def __missing__(self, text: str) -> str:
        symbol = self[text] = unescape(text)
        return symbol


class _Numbers(dict[str, int]):
    def __missing__(self, text: str) -> int:
        number = self[text] = int(text)
        return number


class _Columns:
    """Readers by kind, shared by all relations of a run."""

    def __init__(self, types: TypeTable) -> None:
        self.types = types
        self.readers: dict[str, Callable[[str], Any]] = {
            "number": _Numbers().__getitem__,
            "symbol": _Unescapes().__getitem__,
        }

    def reader(self, type_name: str) -> Callable[[str], Any]:
        kind = self.types.kind(type_name)
        if kind not in self.readers:
            self.readers[kind] = _RecordReader(kind, self.types).__getitem__
        return self.readers[kind]


def _read_rows(path: Path, readers: Sequence[Callable[[str], Any]]) -> Rows:
    try:
        text = path.read_bytes().decode()
    except OSError as error:
        raise EngineError(f"souffle wrote no file for the relation {path.stem} ({error.strerror})") from error
    if not readers:
        return [()] if text else []
    lines = text.split("\n")
    lines.pop()  # what follows the last newline
    if not lines:
        return []
    # By column: one C-level map per column instead of a Python loop per row.
    columns = list(zip(*(line.split("\t") for line in lines)))
    if len(columns) != len(readers):
        raise EngineError(f"souffle wrote {len(columns)} columns for the relation {path.stem}, not {len(readers)}")
    return list(zip(*(map(read, column) for read, column in zip(readers, columns))))


# --- runs -----------------------------------------------------------------------------------------------------------


def evaluate(
    program: Program,
    facts: Mapping[str, Rows],
    outputs: Sequence[str],
    logs: Sequence[LogRule],
    timeout: float | None,
) -> dict[str, Rows]:
    """Run ``program`` and read ``outputs`` and the log relations back.

    Args:
        timeout: seconds, None for no limit.

    Raises:
        EngineError: souffle is missing, refused the program, or crashed; the end of its messages is in the text.
        BudgetExceeded: the time limit was reached.
    """
    binary = shutil.which("souffle")
    if binary is None:
        raise EngineError("souffle is not on PATH; install it or use --engine embedded")
    given = [name for name, rows in facts.items() if rows]
    logs = [log for log in logs if log.rule.body]
    text = _Text(program, given, outputs, logs)
    columns = _Columns(program.type_table)
    with tempfile.TemporaryDirectory(prefix="emerge-souffle-") as folder:
        root = Path(folder)
        (root / "program.dl").write_text("\n".join(text.lines) + "\n", encoding="utf-8")
        escapes = _Escapes()
        for name in given:
            _write_facts(root / f"{text.relations[name]}.facts", facts[name], escapes)
        run_binary(binary, root, timeout)
        result: dict[str, Rows] = {}
        for name in outputs:
            readers = [columns.reader(t) for t in program.relations[name].types]
            result[name] = _read_rows(root / f"{text.relations[name]}.csv", readers)
        for log in logs:
            result[log.name] = _read_log(root / f"{log.name}.csv", log, columns)
    return result


def _read_log(path: Path, log: LogRule, columns: _Columns) -> Rows:
    readers = [columns.reader(t) for t in log.types]
    if len(readers) <= _LOG_COLUMNS:
        return _read_rows(path, readers)
    packs = [
        _PackReader(log.types[start : start + _LOG_COLUMNS], columns.types)
        for start in range(0, len(readers), _LOG_COLUMNS)
    ]
    return [tuple(v for part in row for v in part) for row in _read_rows(path, [p.__getitem__ for p in packs])]


class _PackReader(_RecordReader):
    """Reads the records that a log relation packs its variables into."""

    def __init__(self, field_types: tuple[str, ...], types: TypeTable) -> None:
        super().__init__("log", _PackTypes(field_types, types))


class _PackTypes(TypeTable):
    def __init__(self, field_types: tuple[str, ...], types: TypeTable) -> None:
        self._inner = types
        self.fields = {**types.fields, "log": field_types}

    def kind(self, name: str) -> str:
        return name if name == "log" else self._inner.kind(name)


def _write_facts(path: Path, rows: Rows, escapes: _Escapes) -> None:
    if not rows[0]:
        path.write_text("()\n")
        return
    with path.open("w", encoding="utf-8", newline="\n") as file:
        file.writelines("\t".join([value_text(v, escapes) for v in row]) + "\n" for row in rows)


def run_binary(binary: str, root: Path, timeout: float | None) -> None:
    """Run ``root/program.dl``, facts from and results to ``root``.

    Raises:
        EngineError: a status other than 0.
        BudgetExceeded: the time limit was reached.
    """
    command = [binary, "-w", "--no-preprocessor", "-F", str(root), "-D", str(root), str(root / "program.dl")]
    try:
        done = subprocess.run(
            command, capture_output=True, timeout=timeout, text=True, errors="replace", stdin=subprocess.DEVNULL
        )
    except subprocess.TimeoutExpired:
        raise BudgetExceeded(f"the Datalog run reached its limit of {timeout:g} seconds (engine souffle)") from None
    except OSError as error:
        raise EngineError(f"souffle could not be started ({error.strerror})") from error
    if done.returncode != 0:
        tail = " | ".join((done.stderr or done.stdout).strip().splitlines()[-12:])
        raise EngineError(f"souffle ended with status {done.returncode}: {tail or 'no message'}")


_PROBE = """.type L = [h:symbol, t:L]
.decl a(x:L)
.input a
.decl b(x:L, n:number)
.output b
b([h, x], n) :- a(x), x = [h, _], n = sum y : { a(z), z != nil, y = 2 }, !c(n).
.decl c(x:number)
"""


@cache
def version() -> str:
    """Version of the ``souffle`` on PATH, e.g. ``souffle 2.4``; "" when there is none that runs a probe program.

    Builds from a source tree report no number; what they can do is probed instead of guessed.
    """
    binary = shutil.which("souffle")
    if binary is None:
        return ""
    try:
        with tempfile.TemporaryDirectory(prefix="emerge-souffle-") as folder:
            root = Path(folder)
            (root / "program.dl").write_text(_PROBE)
            (root / "a.facts").write_text("nil\n[%2C, [x, nil]]\n")
            run_binary(binary, root, 30)
            if (root / "b.csv").read_text() != "[%2C, [%2C, [x, nil]]]\t2\n":
                return ""
        text = subprocess.run([binary, "--version"], capture_output=True, text=True, timeout=30).stdout
    except (OSError, EngineError, BudgetExceeded, subprocess.SubprocessError):
        return ""
    number = re.search(r"Version:[ \t]*v?(\d[\w.\-]*)", text)
    return f"souffle {number[1]}" if number else "souffle (build without version number)"
