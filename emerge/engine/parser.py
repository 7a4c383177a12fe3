"""Parser of the Datalog subset: one file of text to the statements in it, components not yet expanded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NoReturn, TypeVar

from emerge.engine.lexer import AGGREGATES, Token, TokenStream, annotations_of, tokenise
from emerge.engine.syntax import (
    INT_MAX,
    INT_MIN,
    Agg,
    Atom,
    Body,
    Cmp,
    Literal,
    Neg,
    Nil,
    Num,
    Op,
    Pos,
    Rec,
    RelationDecl,
    SourceClause,
    Str,
    Term,
    TypeDecl,
    Var,
    Wild,
)
from emerge.util.errors import RuleError

_T = TypeVar("_T")
_COMPARISONS = ("=", "!=", "<", "<=", ">", ">=")
# Loosest first, as in Soufflé's grammar.
_PRECEDENCE = (("bor",), ("bxor",), ("band",), ("bshl", "bshr"), ("+", "-"), ("*", "/", "%"))


@dataclass(frozen=True, slots=True)
class Init:
    """``.init name = comp<args>``."""

    name: str
    comp: str
    args: tuple[str, ...]
    pos: Pos


@dataclass(slots=True)
class Scope:
    """Statements of a file or of a component, in order.

    Attributes:
        directives: (``input``/``output``/``printsize``, relation name, place).
        includes: (path as written, place).
    """

    types: list[TypeDecl] = field(default_factory=list)
    relations: list[RelationDecl] = field(default_factory=list)
    clauses: list[SourceClause] = field(default_factory=list)
    inits: list[Init] = field(default_factory=list)
    components: list[Component] = field(default_factory=list)
    directives: list[tuple[str, str, Pos]] = field(default_factory=list)
    includes: list[tuple[str, Pos]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Component:
    """``.comp name<params> : base<args> { ... }``."""

    name: str
    params: tuple[str, ...]
    bases: tuple[tuple[str, tuple[str, ...]], ...]
    scope: Scope
    pos: Pos


def parse(text: str, file: str) -> Scope:
    """Parse the text of one rule file; ``file`` is the name used in messages.

    Raises:
        RuleError: malformed text or a construct outside the subset, at ``file:line:col``.
    """
    return _Parser(tokenise(text, file)).file()


class _Parser:
    def __init__(self, stream: TokenStream) -> None:
        self.stream = stream
        self.tokens = stream.tokens
        self.at = 0
        # The clause a following undocumented clause may continue: (annotations, last line).
        self.previous: tuple[dict[str, str], int] | None = None

    # --- token access -------------------------------------------------------------------------------------------
    @property
    def token(self) -> Token:
        return self.tokens[self.at]

    def fail(self, expected: str, token: Token | None = None) -> NoReturn:
        token = token or self.token
        found = f"the string {token.text!r}" if token.kind == "string" else f"'{token.text}'"
        raise RuleError(f"expected {expected}, found {found if token.kind != 'end' else token.text}", str(token.pos))

    def peek(self, *texts: str) -> bool:
        return self.token.text in texts and self.token.kind in ("punct", "keyword", "directive")

    def accept(self, *texts: str) -> Token | None:
        if not self.peek(*texts):
            return None
        self.at += 1
        return self.tokens[self.at - 1]

    def expect(self, text: str, purpose: str = "") -> Token:
        return self.accept(text) or self.fail(f"'{text}'{purpose}")

    def ident(self, what: str) -> Token:
        if self.token.kind != "ident" or self.token.text == "_":
            self.fail(what)
        self.at += 1
        return self.tokens[self.at - 1]

    def qualified(self, what: str) -> tuple[str, Pos]:
        """A name such as ``inst.rel``; its dots touch both neighbours, which sets them apart from the final dot."""
        token = self.ident(what)
        name, pos = token.text, token.pos
        while self._dot_inside_name():
            self.at += 2
            part = self.tokens[self.at - 1]
            name += "." + part.text
        return name, pos

    def _dot_inside_name(self) -> bool:
        before, dot = self.tokens[self.at - 1], self.token
        if dot.text != "." or dot.kind != "punct":
            return False
        after = self.tokens[self.at + 1]
        touching = dot.offset == before.offset + len(before.text) and after.offset == dot.offset + 1
        return touching and after.kind == "ident" and after.text != "_"

    def separated(self, item: Callable[[], _T], separator: str = ",") -> list[_T]:
        items = [item()]
        while self.accept(separator):
            items.append(item())
        return items

    # --- statements ---------------------------------------------------------------------------------------------
    def file(self) -> Scope:
        scope = Scope()
        while self.token.kind != "end":
            self.statement(scope, top=True)
        return scope

    def statement(self, scope: Scope, top: bool) -> None:
        token = self.token
        if token.kind != "directive":
            if token.kind != "ident":
                self.fail("a clause or a directive")
            scope.clauses.append(self.clause())
            return
        self.previous = None
        self.at += 1
        match token.text:
            case ".type":
                scope.types.append(self.type_decl())
            case ".decl":
                scope.relations.append(self.relation(token))
            case ".input" | ".output" | ".printsize":
                for name, pos in self.separated(lambda: self.directive_target()):
                    scope.directives.append((token.text[1:], name, pos))
            case ".init":
                scope.inits.append(self.init())
            case ".comp" if top:
                scope.components.append(self.component(token))
            case ".include" if top:
                if self.token.kind != "string":
                    self.fail('a file name in quotes after .include, e.g. "lib/lists.dl"')
                scope.includes.append((self.token.text, token.pos))
                self.at += 1
            case ".plan":
                self.fail("a clause in front of .plan", token)
            case _:
                self.fail("a declaration or a clause (components and includes stand outside components)", token)

    def type_decl(self) -> TypeDecl:
        name = self.ident("a type name after .type")
        if self.accept("<:"):
            base, _ = self.qualified("the type it is a subtype of")
            decl = TypeDecl(name.text, base=base, strict=True, pos=name.pos)
        else:
            self.expect("=", " or '<:'")
            if self.accept("["):
                fields = tuple(self.separated(self.column)) if not self.peek("]") else ()
                close = self.expect("]")
                if not fields:
                    self.fail("at least one field in a record type", close)
                decl = TypeDecl(name.text, fields=fields, pos=name.pos)
            else:
                base, _ = self.qualified("a type name or a record type")
                decl = TypeDecl(name.text, base=base, pos=name.pos)
        if self.peek("|", "{"):
            self.fail("the end of the type (union and algebraic types are outside the Datalog subset)")
        return decl

    def column(self) -> tuple[str, str]:
        name = self.ident("a column name")
        self.expect(":", " and the type of the column")
        return name.text, self.qualified("a type name")[0]

    def relation(self, start: Token) -> RelationDecl:
        name = self.ident("a relation name after .decl")
        self.expect("(")
        columns = tuple(self.separated(self.column)) if not self.peek(")") else ()
        end = self.expect(")")
        if self.token.kind == "keyword" or self.peek(":", "="):
            self.fail("the end of the declaration (qualifiers and lattices are outside the Datalog subset)")
        if end.pos.line == self.token.pos.line and self.token.kind == "ident" and not self.looks_like_clause():
            self.fail("the end of the declaration (qualifiers are outside the Datalog subset)")
        doc = self.stream.doc_above(start.pos.line)
        return RelationDecl(name.text, columns, name.pos, doc, annotations_of(doc))

    def looks_like_clause(self) -> bool:
        at = self.at + 1
        while self.tokens[at].text == "." and self.tokens[at + 1].kind == "ident":
            at += 2
        return self.tokens[at].text == "("

    def directive_target(self) -> tuple[str, Pos]:
        name, pos = self.qualified("a relation name")
        if self.accept("("):  # IO parameters: the runner decides what goes in and out
            while not self.peek(")"):
                if self.token.kind == "end":
                    self.fail("')'")
                self.at += 1
            self.at += 1
        return name, pos

    def init(self) -> Init:
        name = self.ident("an instance name after .init")
        self.expect("=")
        comp, args = self.component_ref()
        return Init(name.text, comp, args, name.pos)

    def component_ref(self) -> tuple[str, tuple[str, ...]]:
        name = self.ident("a component name").text
        args: tuple[str, ...] = ()
        if self.accept("<"):
            args = tuple(self.separated(lambda: self.qualified("a type name")[0]))
            self.expect(">")
        return name, args

    def component(self, start: Token) -> Component:
        name, params = self.component_ref()
        bases = tuple(self.separated(self.component_ref)) if self.accept(":") else ()
        self.expect("{")
        scope = Scope()
        while not self.accept("}"):
            if self.token.kind == "end":
                self.fail("'}' at the end of the component")
            self.statement(scope, top=False)
        self.previous = None
        return Component(name, params, bases, scope, start.pos)

    # --- clauses ------------------------------------------------------------------------------------------------
    def clause(self) -> SourceClause:
        start = self.token
        heads = tuple(self.separated(self.atom))
        body = Body(((),))
        if self.accept(":-"):
            body = self.disjunction()
        elif len(heads) > 1:
            self.fail("':-' (several heads need a body)")
        if self.peek("<="):
            self.fail("':-' or '.' (subsumption is outside the Datalog subset)")
        end = self.expect(".", " at the end of the clause")
        plan = ""
        if self.accept(".plan"):
            plan, end = self.plan()
            if len(body.choices) != 1 or any(isinstance(item, Body) for item in body.choices[0]):
                raise RuleError("a .plan cannot order a disjunction; write one clause per choice", str(end.pos))
        doc = self.stream.doc_above(start.pos.line)
        if doc:
            annotations = annotations_of(doc)
        elif self.previous and self.stream.adjacent(self.previous[1], start.pos.line):
            annotations = dict(self.previous[0])
        else:
            annotations = {}
        self.previous = (annotations, end.pos.line)
        return SourceClause(heads, body, start.pos, plan, doc, annotations)

    def plan(self) -> tuple[str, Token]:
        """``0:(2,1), 1:(1,2)``; the lines are handed to Soufflé as they are."""

        def number() -> str:
            if self.token.kind != "number":
                self.fail("a number")
            self.at += 1
            return self.tokens[self.at - 1].text

        def version() -> str:
            which = number()
            self.expect(":")
            self.expect("(")
            order = self.separated(number) if not self.peek(")") else []
            self.expect(")")
            return f"{which}:({','.join(order)})"

        text = ", ".join(self.separated(version))
        return text, self.tokens[self.at - 1]

    def atom(self) -> Atom:
        name, pos = self.qualified("an atom")
        self.expect("(", f" after the relation name '{name}'")
        args = tuple(self.separated(self.term)) if not self.peek(")") else ()
        self.expect(")")
        return Atom(name, args, pos)

    def disjunction(self) -> Body:
        return Body(tuple(tuple(choice) for choice in self.separated(self.conjunction, ";")))

    def conjunction(self) -> list[Literal | Body]:
        return self.separated(self.literal)

    def literal(self) -> Literal | Body:
        token = self.token
        if bang := self.accept("!"):
            if self.token.kind != "ident" or not self.looks_like_clause():
                self.fail("an atom after '!' (only atoms can be negated in the Datalog subset)")
            return Neg(self.atom(), bang.pos)
        if token.kind == "ident" and self.looks_like_clause():
            return self.atom()
        if self.peek("("):
            return self.parenthesised()
        return self.comparison()

    def parenthesised(self) -> Literal | Body:
        """``(a(x) ; b(x))`` or a comparison whose left side starts with a parenthesis."""
        start = self.at
        try:
            self.at += 1
            body = self.disjunction()
            self.expect(")")
            return body
        except RuleError as first:
            reached, self.at = self.at, start
            try:
                return self.comparison()
            except RuleError:
                if self.at >= reached:
                    raise
                raise first from None

    def comparison(self) -> Cmp:
        left = self.term()
        operator = self.accept(*_COMPARISONS)
        if operator is None:
            self.fail("a comparison (= != < <= > >=)")
        return Cmp(operator.text, left, self.term(), operator.pos)

    # --- terms --------------------------------------------------------------------------------------------------
    def term(self, level: int = 0) -> Term:
        if level == len(_PRECEDENCE):
            return self.unary()
        left = self.term(level + 1)
        while operator := self.accept(*_PRECEDENCE[level]):
            left = Op(operator.text, (left, self.term(level + 1)), operator.pos)
        return left

    def unary(self) -> Term:
        token = self.token
        if self.accept("-"):
            if self.token.kind == "number":
                return self.number(negative=True)
            return Op("neg", (self.unary(),), token.pos)
        if self.accept("bnot"):
            return Op("bnot", (self.unary(),), token.pos)
        return self.primary()

    def number(self, negative: bool = False) -> Num:
        token = self.token
        self.at += 1
        value = int(token.text, 0 if token.text[:2] in ("0x", "0b") else 10)
        value = -value if negative else value
        if not INT_MIN <= value <= INT_MAX:
            raise RuleError(f"the constant {value} does not fit 32 bits; intern it as a symbol", str(token.pos))
        return Num(value, token.pos)

    def primary(self) -> Term:
        token = self.token
        if token.kind == "number":
            return self.number()
        if token.kind == "string":
            self.at += 1
            return Str(token.text, token.pos)
        if token.kind == "ident":
            self.at += 1
            if self.peek("("):
                self.fail("a term (user functors are outside the Datalog subset)", token)
            return Wild(token.pos) if token.text == "_" else Var(token.text, token.pos)
        if self.accept("nil"):
            return Nil(token.pos)
        if self.accept("("):
            inner = self.term()
            self.expect(")")
            return inner
        if self.accept("["):
            items = tuple(self.separated(self.term)) if not self.peek("]") else ()
            self.expect("]")
            if not items:
                self.fail("a field in the record (empty records are outside the Datalog subset)", token)
            return Rec(items, token.pos)
        if self.peek(*AGGREGATES):
            return self.min_max_functor() or self.aggregate()
        self.fail("a term")

    def min_max_functor(self) -> Term | None:
        """``min(a, b)``; None (and nothing consumed) when it is an aggregate such as ``min (a + b) : {...}``."""
        start, token = self.at, self.token
        self.at += 1
        if token.text in ("min", "max") and self.accept("("):
            args = self.separated(self.term)
            if len(args) > 1 and self.accept(")"):
                result = args[0]
                for arg in args[1:]:
                    result = Op(token.text, (result, arg), token.pos)
                return result
        self.at = start
        return None

    def aggregate(self) -> Agg:
        token = self.token
        self.at += 1
        target = None if token.text == "count" else self.term()
        self.expect(":", f" after the head of the aggregate '{token.text}'")
        if not self.accept("{"):
            return Agg(token.text, target, (self.atom(),), token.pos)
        body: list[Literal] = []
        for literal in self.conjunction():
            if isinstance(literal, Body):
                self.fail("a conjunction of literals (no parentheses inside an aggregate)", token)
            body.append(literal)
        if self.peek(";"):
            self.fail("'}' (disjunctions inside an aggregate are outside the Datalog subset)")
        self.expect("}", " at the end of the aggregate")
        return Agg(token.text, target, tuple(body), token.pos)
