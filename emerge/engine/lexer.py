"""Tokens of the Datalog subset, and the comment blocks that document clauses and declarations."""

from __future__ import annotations

import re
from dataclasses import dataclass

from emerge.engine.syntax import Pos
from emerge.util.errors import RuleError

DIRECTIVES = ("decl", "type", "comp", "init", "input", "output", "printsize", "include", "plan")
_REFUSED_DIRECTIVES = ("functor", "pragma", "limitsize", "override", "number_type", "symbol_type", "once", "export")

AGGREGATES = ("count", "sum", "min", "max")
WORD_OPERATORS = ("band", "bor", "bxor", "bshl", "bshr", "bnot")
# Words that Soufflé reserves and the subset has no use for; as a name they would only fail on one engine.
REFUSED_WORDS = frozenset(
    (
        "as",
        "autoinc",
        "brie",
        "btree",
        "btree_delete",
        "bshru",
        "cat",
        "contains",
        "eqrel",
        "false",
        "inline",
        "input",
        "land",
        "lnot",
        "lor",
        "lxor",
        "magic",
        "match",
        "mean",
        "no_inline",
        "no_magic",
        "ord",
        "output",
        "overridable",
        "printsize",
        "range",
        "stateful",
        "strlen",
        "substr",
        "to_float",
        "to_number",
        "to_string",
        "to_unsigned",
        "true",
    )
)
KEYWORDS = frozenset((*AGGREGATES, *WORD_OPERATORS, "nil"))

_TOKEN = re.compile(
    rf"""(?P<space>[ \t\r\f]+)
      | (?P<newline>\n)
      | (?P<comment>//[^\n]*)
      | (?P<block>/\*.*?\*/)
      | (?P<directive>\.(?:{"|".join((*DIRECTIVES, *_REFUSED_DIRECTIVES))})\b)
      | (?P<ident>[A-Za-z_][A-Za-z0-9_]*)
      | (?P<float>\d+\.\d+(?:[eE][+-]?\d+)?)
      | (?P<number>0x[0-9a-fA-F]+|0b[01]+|\d+)(?![A-Za-z0-9_])
      | (?P<string>"(?:[^"\\\n]|\\.)*")
      | (?P<punct>:-|<:|!=|<=|>=|/(?!\*)|[-+*%()\[\]{{}},.;:=<>!|])
    """,
    re.VERBOSE | re.DOTALL,
)
_ESCAPES = dict(zip("\"\\'ntrabfv", "\"\\'\n\t\r\a\b\f\v"))


@dataclass(frozen=True, slots=True)
class Token:
    """One token; ``kind`` is ``ident keyword number string punct directive end``, ``end_line`` its last line."""

    kind: str
    text: str
    pos: Pos
    offset: int


@dataclass(slots=True)
class TokenStream:
    """All tokens of a file, closed by an ``end`` token.

    Attributes:
        comments: line number -> text of a line that holds nothing but a ``//`` comment.
        blank: line numbers that hold nothing at all.
    """

    tokens: list[Token]
    comments: dict[int, str]
    blank: frozenset[int]

    def doc_above(self, line: int) -> str:
        """The comment block whose last line is directly above ``line``, without the slashes ("" when none)."""
        lines: list[str] = []
        while (line := line - 1) in self.comments:
            lines.append(self.comments[line])
        return "\n".join(reversed(lines))

    def adjacent(self, first_line: int, second_line: int) -> bool:
        """Whether no blank line lies between the two lines."""
        return not any(n in self.blank for n in range(first_line + 1, second_line))


def annotations_of(doc: str) -> dict[str, str]:
    """The ``@key rest of line`` lines of a comment block; a key given twice keeps both values, one per line."""
    found: dict[str, str] = {}
    for line in doc.splitlines():
        match = re.match(r"\s*@(\w+)[ \t]*(.*)$", line)
        if match:
            key, value = match[1], match[2].strip()
            found[key] = f"{found[key]}\n{value}" if key in found else value
    return found


def tokenise(text: str, file: str) -> TokenStream:
    """Split ``text`` into tokens.

    Raises:
        RuleError: a character, constant or directive outside the subset, with its place.
    """
    tokens: list[Token] = []
    comments: dict[int, str] = {}
    code_lines: set[int] = set()
    line, line_start, offset = 1, 0, 0
    while offset < len(text):
        pos = Pos(file, line, offset - line_start + 1)
        match = _TOKEN.match(text, offset)
        if match is None:
            raise RuleError(_lexical_problem(text, offset), str(pos))
        kind, value = match.lastgroup or "", match.group()
        if kind == "comment":
            if not text[line_start:offset].strip():
                comments[line] = value[2:].removeprefix(" ").rstrip()
            code_lines.add(line)
        elif kind not in ("space", "newline"):
            code_lines.update(range(line, line + value.count("\n") + 1))
        if kind not in ("space", "newline", "comment", "block"):
            tokens.append(_token(kind, value, pos, offset))
        newlines = value.count("\n")
        if newlines:
            line += newlines
            line_start = offset + value.rindex("\n") + 1
        offset = match.end()
    tokens.append(Token("end", "end of file", Pos(file, line, offset - line_start + 1), offset))
    blank = frozenset(range(1, line + 1)) - code_lines
    return TokenStream(tokens, comments, blank)


def _token(kind: str, value: str, pos: Pos, offset: int) -> Token:
    if kind == "float":
        raise RuleError(
            f"the floating-point constant {value} is outside the Datalog subset; intern it as a symbol", str(pos)
        )
    if kind == "directive" and value[1:] in _REFUSED_DIRECTIVES:
        raise RuleError(f"the directive {value} is outside the Datalog subset; remove it", str(pos))
    if kind == "ident":
        if value in REFUSED_WORDS:
            raise RuleError(f"'{value}' is a word of Soufflé outside the Datalog subset; use another name", str(pos))
        if value in KEYWORDS:
            kind = "keyword"
    if kind == "string":
        value = _unescape(value[1:-1], pos)
    return Token(kind, value, pos, offset)


def _unescape(raw: str, pos: Pos) -> str:
    def one(match: re.Match[str]) -> str:
        if match[1] not in _ESCAPES:
            known = " ".join(_ESCAPES)
            raise RuleError(f"unknown escape \\{match[1]} in a string; known after the backslash: {known}", str(pos))
        return _ESCAPES[match[1]]

    if "\0" in raw:
        raise RuleError("a string constant holds a NUL character, which no engine can store", str(pos))
    return re.sub(r"\\(.)", one, raw)


def _lexical_problem(text: str, offset: int) -> str:
    if text[offset] == '"':
        return "the string does not end on its line; close it with a quote"
    if text.startswith("/*", offset):
        return "the comment is not closed; end it with */"
    number = re.match(r"\d\w*", text[offset:])
    if number:
        return f"'{number[0]}' is not an integer constant of the subset (decimal, 0x or 0b, no suffix)"
    return f"the character {text[offset]!r} is outside the Datalog subset"
