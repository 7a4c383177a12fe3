"""Reads ``.egg`` files: which rules are in them, what they say, and that they hold nothing but rules.

The language (``language.egg``) declares what terms are; every other file may only add rewrites to the ruleset ``algebra``.
A file is parsed with egglog's own parser and looked at command by command before anything of it runs.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from emerge.util.errors import RuleError
from emerge.util.resources import resource_dir

LANGUAGE = "language.egg"
RULESET = "algebra"
#: Part of the hash of every certificate; raised when the tests or proofs of rules change their meaning.
EQUALITY_VERSION = 2
#: Constructor -> sorts of its arguments.
CONSTRUCTORS: dict[str, tuple[str, ...]] = {
    "Map1": ("String", "Value"),
    "Map2": ("String", "Value", "Value"),
    "Map3": ("String", "Value", "Value", "Value"),
    "Scale": ("BigRat", "Value"),
    "Shift": ("BigRat", "Value"),
    "Place": ("Value", "Dims", "Dims"),
    "View": ("Value", "Dims"),
    "Slice": ("Value", "i64", "i64", "i64"),
    "Cat": ("Value", "Value", "i64"),
    "Fold": ("String", "String", "Value", "Dims", "Dims"),
    "Einsum": ("String", "Value", "Value", "Dims"),
    "Along": ("String", "String", "Value", "i64"),
    "Range": ("String", "i64", "i64", "i64"),
    "Lookup": ("Value", "Value", "i64"),
}
#: Functions over tensors that conditions may read.
READ_ONLY = ("shape", "placed", "padding", "free")


class Var(NamedTuple):
    """A pattern variable."""

    name: str


class Lit(NamedTuple):
    """A literal."""

    value: Any


class App(NamedTuple):
    """A constructor or primitive applied to terms."""

    op: str
    args: tuple[Any, ...]


Term = Var | Lit | App


@dataclass(frozen=True)
class EqualityRule:
    """A rule of the ruleset ``algebra``.

    Attributes:
        text: the rule without comments and line breaks. place: ``file:line``.
        patterns: (variable or "", term) of every constructor term on the left side. conditions: the other facts.
        unions: pairs of terms made equal; ``lets``: names for terms in them.
        reverse: the rule works in both directions.
        hash: of its text, the language, and the version of the tests.
    """

    name: str
    meaning: str
    text: str
    place: str
    shipped: bool
    patterns: tuple[tuple[str, App], ...]
    conditions: tuple[Term, ...]
    unions: tuple[tuple[Term, Term], ...]
    lets: tuple[tuple[str, Term], ...]
    reverse: bool
    hash: str

    @property
    def has_premise(self) -> bool:
        """Whether two patterns have one name: the rule starts from their equality."""
        names = [name for name, _ in self.patterns if name]
        return len(set(names)) < len(names)


def egg_files(paths: Sequence[Path | str]) -> tuple[Path, ...]:
    """The ``.egg`` files among files and folders."""
    own: list[Path] = []
    for path in map(Path, paths):
        own += sorted(path.rglob("*.egg")) if path.is_dir() else [path] if path.suffix == ".egg" else []
    return tuple(own)


def shipped_files() -> tuple[Path, ...]:
    """The shipped rule files, without the language."""
    return tuple(sorted(p for p in resource_dir("rules").glob("*.egg") if p.name != LANGUAGE))


def read_rules(files: Sequence[Path]) -> dict[str, EqualityRule]:
    """The shipped rules and those of further files, by name.

    Raises:
        RuleError: a file does not parse or holds something that is no rule, with its place; a name is used twice.
    """
    found: dict[str, EqualityRule] = {}
    for path in (*shipped_files(), *files):
        for rule in rules_of(path):
            if rule.name in found:
                raise RuleError(
                    f"the rule '{rule.name}' exists already at {found[rule.name].place}; give this one another name",
                    rule.place,
                )
            found[rule.name] = rule
    return found


def rules_of(path: Path) -> tuple[EqualityRule, ...]:
    """The rules of one file (see :func:`read_rules`)."""
    try:
        data = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as exc:
        raise RuleError(f"the rule file cannot be read: {exc}", str(path)) from None
    return _rules_of(path, data, _plain((resource_dir("rules") / LANGUAGE).read_text(encoding="utf-8")))


@lru_cache(maxsize=64)
def _rules_of(path: Path, data: str, language: str) -> tuple[EqualityRule, ...]:
    from egglog.bindings import EggSmolError, EGraph

    try:
        commands = EGraph().parse_program(data, str(path))
    except EggSmolError as exc:
        first, _, why = str(exc).partition("\n")
        place = _error_line(first)
        raise RuleError(
            f"expected egglog commands, found: {(why or first).strip()}; correct the file", f"{path}:{place}"
        ) from None
    shipped = path.resolve().is_relative_to(resource_dir("rules").resolve())
    reader = _Reader(path, data, shipped, language)
    rules = tuple(reader.rule(c) for c in commands)
    _type_check(path, data, language)
    return rules


def _error_line(text: str) -> str:
    """Line of ``In 2:6-6 of file``."""
    head = text.removeprefix("In ").split(":")[0]
    return head if head.isdigit() else "1"


def _type_check(path: Path, data: str, language: str) -> None:
    """Lets egglog check sorts and variables; nothing runs, since the file holds rules only."""
    from egglog.bindings import EggSmolError, EGraph

    graph = EGraph()
    graph.run_program(*graph.parse_program(language, LANGUAGE))
    try:
        graph.run_program(*graph.parse_program(data, str(path)))
    except EggSmolError as exc:
        first, _, why = str(exc).partition("\n")
        raise RuleError(
            f"expected a rule of the language in rules/{LANGUAGE}, found: {' '.join((why or first).split())}; correct it",
            f"{path}:{_error_line(first)}",
        ) from None


#: What a command is called in a message.
_WHAT = {
    "Sort": "a sort", "Datatype": "a datatype", "Datatypes": "datatypes", "Constructor": "a constructor",
    "FunctionCommand": "a function", "Relation": "a relation", "AddRuleset": "a ruleset", "RunSchedule": "a run",
    "UnstableCombinedRuleset": "a ruleset", "ActionCommand": "an action", "Include": "an include", "Input": "an input",
    "Output": "an output", "Check": "a check", "Extract": "an extraction", "UserDefined": "a command",
}  # fmt: skip


class _Reader:
    """Turns commands into rules, or says why they are none."""

    def __init__(self, path: Path, data: str, shipped: bool, language: str) -> None:
        self.path, self.data, self.shipped = path, data.encode(), shipped
        self.language = language
        self.at = 0

    def rule(self, command: Any) -> EqualityRule:
        kind = type(command).__name__
        if kind not in ("RewriteCommand", "BiRewriteCommand", "RuleCommand"):
            self.fail_kind(command, kind)
        inner = command.rule if kind == "RuleCommand" else command.rewrite
        start, end = inner.span.i, inner.span.j
        self.at = start
        if kind == "RuleCommand":
            ruleset, patterns, conditions, lets, unions = self._rule(inner)
        else:
            ruleset, patterns, conditions, lets, unions = self._rewrite(command, inner)
        name = inner.name
        if not name:
            self.fail('the rule has no name; add :name "..."')
        if ruleset != RULESET:
            self.fail(
                f"the rule '{name}' belongs to the ruleset '{ruleset or 'default'}'; rules of a file belong to "
                f":ruleset {RULESET}"
            )
        meaning = self.meaning(start)
        if not meaning:
            self.fail(f"the rule '{name}' has no meaning; write a line '; @meaning ...' above it")
        text = _plain(self.data[start:end].decode())
        for _, pattern in patterns:
            self.check_term(name, pattern)
        for pair in unions:
            for term in pair:
                self.check_term(name, term)
        for term in [*conditions, *(t for _, t in lets)]:
            self.check_term(name, term)
        digest = hashlib.sha256("\n".join([f"equality {EQUALITY_VERSION}", self.language, text]).encode()).hexdigest()
        return EqualityRule(
            name, meaning, text, f"{self.path}:{self.line()}", self.shipped, tuple(patterns), tuple(conditions),
            tuple(unions), tuple(lets), kind == "BiRewriteCommand", digest,
        )  # fmt: skip

    def _rewrite(self, command: Any, inner: Any) -> Any:
        left, right = _term(inner.lhs), _term(inner.rhs)
        if getattr(command, "subsume", False):
            self.fail("the rewrite says :subsume, which hides terms from other rules; drop it")
        if not isinstance(left, App) or left.op not in CONSTRUCTORS:
            self.fail("the left side of a rewrite must be a constructor of the language; rewrite a term")
        patterns = [("", left)]
        if type(command).__name__ == "BiRewriteCommand" and (
            not isinstance(right, App) or right.op not in CONSTRUCTORS
        ):
            self.fail("both sides of a birewrite must be constructors of the language; use rewrite")
        return command.name, patterns, [_fact(f) for f in inner.conditions], [], [(left, right)]

    def _rule(self, inner: Any) -> Any:
        patterns: list[tuple[str, App]] = []
        conditions: list[Term] = []
        for fact in inner.body:
            term = _fact(fact)
            found = _bound_pattern(term)
            if found is None:
                conditions.append(term)
            else:
                patterns.append(found)
        if not patterns:
            self.fail("the rule matches no tensor; put a constructor of the language into its body")
        lets: list[tuple[str, Term]] = []
        unions: list[tuple[Term, Term]] = []
        for action in inner.head:
            kind = type(action).__name__
            if kind == "Union":
                unions.append((_term(action.lhs), _term(action.rhs)))
            elif kind == "Let":
                lets.append((action.lhs, _term(action.rhs)))
            else:
                word = {"Set": "set", "Change": "delete", "Panic": "panic", "Expr_": "a bare term"}.get(kind, kind)
                self.fail(f"the rule acts by {word}; a rule may only union terms (and let names for them)")
        if not unions:
            self.fail("the rule makes nothing equal; give it a (union ...)")
        return inner.ruleset, patterns, conditions, lets, unions

    def check_term(self, name: str, term: Term) -> None:
        """Only terms of the language; leaves have no meaning that a rule could speak about."""
        for inner in subterms(term):
            if isinstance(inner, App) and inner.op == "Leaf":
                self.fail(
                    f"the rule '{name}' speaks about Leaf, the tensors the algebra does not look into; use a variable"
                )
            if isinstance(inner, App) and inner.op.startswith("unstable"):
                self.fail(f"the rule '{name}' calls {inner.op}, which is no function of the language; drop it")

    def meaning(self, start: int) -> str:
        """The ``; @meaning`` lines directly above an offset."""
        above = self.data[:start].decode().split("\n")[:-1]
        comment: list[str] = []
        while above and above[-1].lstrip().startswith(";"):
            comment.insert(0, above.pop().lstrip().lstrip(";").strip())
        for k, text in enumerate(comment):
            if text.startswith("@meaning"):
                more = []
                for other in comment[k + 1 :]:
                    if other.startswith("@"):
                        break
                    more.append(other)
                return " ".join([text.removeprefix("@meaning").strip(), *more]).strip()
        return ""

    def line(self) -> int:
        return self.data[: self.at].count(b"\n") + 1

    def fail_kind(self, command: Any, kind: str) -> None:
        span = _span(command)
        self.at = span.i if span is not None else 0
        what = _WHAT.get(kind, f"a command {kind}")
        if kind == "UserDefined":
            what = f"({command.name} ...)"
        elif kind == "ActionCommand":
            what = f"an action ({type(command.action).__name__.lower().rstrip('_')})"
        self.fail(
            f"expected rewrite, birewrite or rule, found {what}; a rule file only adds rules to the ruleset {RULESET}, "
            "so drop it"
        )

    def fail(self, message: str) -> None:
        raise RuleError(message, f"{self.path}:{self.line()}")


def _span(command: Any) -> Any:
    for holder in (command, getattr(command, "action", None), getattr(command, "schedule", None),
                   getattr(command, "config", None)):  # fmt: skip
        span = getattr(holder, "span", None)
        if span is not None and hasattr(span, "i"):
            return span
    return None


def _term(expr: Any) -> Term:
    kind = type(expr).__name__
    if kind == "Var":
        return Var(expr.name)
    if kind == "Lit":
        return Lit(getattr(expr.value, "value", None))
    return App(expr.name, tuple(_term(a) for a in expr.args))


def _fact(fact: Any) -> Term:
    return App("=", (_term(fact.left), _term(fact.right))) if type(fact).__name__ == "Eq" else _term(fact.expr)


def _bound_pattern(term: Term) -> tuple[str, App] | None:
    """``(= y (Map1 ...))`` or ``(Map1 ...)``: the variable, and the pattern."""
    if isinstance(term, App) and term.op in CONSTRUCTORS:
        return "", term
    if isinstance(term, App) and term.op == "=" and len(term.args) == 2:
        for a, b in (term.args, term.args[::-1]):
            if isinstance(a, Var) and isinstance(b, App) and b.op in CONSTRUCTORS:
                return a.name, b
    return None


def subterms(term: Term) -> Iterator[Term]:
    """A term and all terms in it."""
    yield term
    if isinstance(term, App):
        for a in term.args:
            yield from subterms(a)


def rational(term: Term) -> Fraction | None:
    """The constant that ``(bigrat (bigint a) (bigint b))`` stands for."""
    if isinstance(term, App) and term.op == "bigrat" and len(term.args) == 2:
        parts = []
        for a in term.args:
            if isinstance(a, App) and a.op in ("bigint", "from-string") and isinstance(a.args[0], Lit):
                parts.append(int(a.args[0].value))
        if len(parts) == 2 and parts[1]:
            return Fraction(parts[0], parts[1])
    return None


def _plain(text: str) -> str:
    """Text without comments, blanks collapsed; strings stay as they are."""
    out: list[str] = []
    quoted = comment = False
    escaped = False
    for c in text:
        if comment:
            comment = c != "\n"
            if not comment:
                out.append(" ")
        elif quoted:
            out.append(c)
            quoted = escaped or c != '"'
            escaped = c == "\\" and not escaped
        elif c == ";":
            comment = True
        elif c.isspace():
            out.append(" ")
        else:
            out.append(c)
            quoted = c == '"'
            escaped = False
    pieces = "".join(out).split('"')
    # blanks inside strings are part of them
    return '"'.join(" ".join(p.split(" ")) if k % 2 else _collapse(p) for k, p in enumerate(pieces)).strip()


def _collapse(text: str) -> str:
    inner = " ".join(text.split())
    return (" " if text[:1] == " " else "") + inner + (" " if text[-1:] == " " and inner else "")
