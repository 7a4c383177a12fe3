"""Syntax trees of the Datalog subset (see ``docs/datalog-subset.md``) and their text form.

Every node knows where it was written. Equality of nodes ignores positions.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TypeAlias

INT_MIN, INT_MAX = -(2**31), 2**31 - 1


@dataclass(frozen=True, slots=True, order=True)
class Pos:
    """A place in a rule file; ``line`` and ``col`` count from 1."""

    file: str
    line: int
    col: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}:{self.col}"


@dataclass(frozen=True, slots=True)
class Var:
    """A variable. Names that are not identifiers come from lowering: ``(x + 1)``, ``_#1``, ``y@2``."""

    name: str
    pos: Pos = field(compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class Wild:
    """The anonymous variable ``_``."""

    pos: Pos = field(compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class Num:
    """A 32-bit integer constant."""

    value: int
    pos: Pos = field(compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class Str:
    """A symbol constant, unescaped."""

    value: str
    pos: Pos = field(compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class Nil:
    """The empty record ``nil``; it belongs to every record type."""

    pos: Pos = field(compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class Rec:
    """A record ``[a, b]``."""

    items: tuple[Term, ...]
    pos: Pos = field(compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class Op:
    """Arithmetic: ``op`` is one of ``+ - * / % band bor bxor bshl bshr min max`` (two operands), ``neg bnot`` (one)."""

    op: str
    args: tuple[Term, ...]
    pos: Pos = field(compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class Agg:
    """An aggregate ``op target : { body }``; ``target`` is None for ``count``."""

    op: str
    target: Term | None
    body: tuple[Literal, ...]
    pos: Pos = field(compare=False, repr=False)


Term: TypeAlias = "Var | Wild | Num | Str | Nil | Rec | Op | Agg"


@dataclass(frozen=True, slots=True)
class Atom:
    """A positive atom ``name(args)``."""

    name: str
    args: tuple[Term, ...]
    pos: Pos = field(compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class Neg:
    """A negated atom ``!name(args)``."""

    atom: Atom
    pos: Pos = field(compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class Cmp:
    """A comparison; ``op`` is one of ``= != < <= > >=``."""

    op: str
    left: Term
    right: Term
    pos: Pos = field(compare=False, repr=False)


Literal: TypeAlias = "Atom | Neg | Cmp"


@dataclass(frozen=True, slots=True)
class Body:
    """A body as written: a disjunction of conjunctions, nested by parentheses."""

    choices: tuple[tuple[Literal | Body, ...], ...]


@dataclass(frozen=True, slots=True)
class SourceClause:
    """A clause as written, before heads and disjunctions are split."""

    heads: tuple[Atom, ...]
    body: Body
    pos: Pos = field(compare=False, repr=False)
    plan: str = ""
    doc: str = ""
    annotations: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, eq=False)
class Clause:
    """One clause with one head and a conjunctive body; what is left of a written clause after splitting.

    Attributes:
        index: position in ``Program.clauses``.
        head, body: as written (arithmetic and aggregates still nested).
        pos: where the written clause starts; clauses split from one share it.
        plan: text of a ``.plan`` line, passed to Soufflé only.
        doc: the comment block directly above ("" when there is none of its own).
        annotations: ``@key`` lines of the doc, or of the clause above that it continues.
    """

    index: int
    head: Atom
    body: tuple[Literal, ...]
    pos: Pos
    plan: str = ""
    doc: str = ""
    annotations: dict[str, str] = field(default_factory=dict)

    @property
    def law(self) -> str | None:
        """Name given by ``@law``, None for bookkeeping."""
        return self.annotations.get("law")

    def __str__(self) -> str:
        return clause_text(self.head, self.body)


@dataclass(frozen=True, slots=True)
class RelationDecl:
    """A ``.decl``: its columns as (name, type name) with fully qualified type names."""

    name: str
    columns: tuple[tuple[str, str], ...]
    pos: Pos = field(compare=False, repr=False)
    doc: str = ""
    annotations: dict[str, str] = field(default_factory=dict)

    @property
    def arity(self) -> int:
        """Number of columns."""
        return len(self.columns)

    @property
    def types(self) -> tuple[str, ...]:
        """Type name of every column."""
        return tuple(t for _, t in self.columns)

    @property
    def semantic(self) -> str | None:
        """Name of the executable check given by ``@semantic``, None for bookkeeping relations."""
        return self.annotations.get("semantic")


@dataclass(frozen=True, slots=True)
class TypeDecl:
    """A ``.type``: ``<:`` (``base``, ``strict``), alias ``=`` (``base``), or a record (``fields``)."""

    name: str
    pos: Pos = field(compare=False, repr=False)
    base: str = ""
    strict: bool = False
    fields: tuple[tuple[str, str], ...] | None = None


_INFIX = {"+", "-", "*", "/", "%", "band", "bor", "bxor", "bshl", "bshr"}


def symbol_text(value: str) -> str:
    """``value`` as a string constant of the rule language."""
    for raw, escaped in (("\\", "\\\\"), ('"', '\\"'), ("\n", "\\n"), ("\t", "\\t"), ("\r", "\\r")):
        value = value.replace(raw, escaped)
    return f'"{value}"'


def term_text(term: Term) -> str:
    """``term`` in the rule language; operators are fully parenthesised."""
    match term:
        case Var():
            return term.name
        case Wild():
            return "_"
        case Num():
            return str(term.value)
        case Str():
            return symbol_text(term.value)
        case Nil():
            return "nil"
        case Rec():
            return f"[{', '.join(map(term_text, term.items))}]"
        case Op():
            args = [term_text(a) for a in term.args]
            if term.op in _INFIX:
                return f"({args[0]} {term.op} {args[1]})"
            if term.op in ("neg", "bnot"):
                return f"({'-' if term.op == 'neg' else 'bnot '}{args[0]})"
            return f"{term.op}({', '.join(args)})"
        case Agg():
            target = "" if term.target is None else " " + term_text(term.target)
            return f"{term.op}{target} : {{ {', '.join(map(literal_text, term.body))} }}"


def literal_text(literal: Literal) -> str:
    """``literal`` in the rule language."""
    match literal:
        case Atom():
            return f"{literal.name}({', '.join(map(term_text, literal.args))})"
        case Neg():
            return "!" + literal_text(literal.atom)
        case Cmp():
            return f"{term_text(literal.left)} {literal.op} {term_text(literal.right)}"


def clause_text(head: Atom, body: tuple[Literal, ...]) -> str:
    """A clause in the rule language, on one line."""
    if not body:
        return literal_text(head) + "."
    return f"{literal_text(head)} :- {', '.join(map(literal_text, body))}."


def subterms(term: Term, into_aggregates: bool = False) -> Iterator[Term]:
    """``term`` and all terms inside it, outermost first."""
    yield term
    if isinstance(term, Rec):
        for item in term.items:
            yield from subterms(item, into_aggregates)
    elif isinstance(term, Op):
        for arg in term.args:
            yield from subterms(arg, into_aggregates)
    elif isinstance(term, Agg) and into_aggregates:
        if term.target is not None:
            yield from subterms(term.target, True)
        for literal in term.body:
            for inner in literal_terms(literal):
                yield from subterms(inner, True)


def literal_terms(literal: Literal) -> tuple[Term, ...]:
    """The outermost terms of ``literal``."""
    match literal:
        case Atom():
            return literal.args
        case Neg():
            return literal.atom.args
        case Cmp():
            return (literal.left, literal.right)


def variables(term: Term, into_aggregates: bool = False) -> Iterator[Var]:
    """Variables of ``term`` in order of occurrence, repeated as often as they occur."""
    return (t for t in subterms(term, into_aggregates) if isinstance(t, Var))
