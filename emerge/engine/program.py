"""A parsed and checked Datalog program."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from emerge.engine import checks
from emerge.engine.expand import Flat, flatten, load_files
from emerge.engine.lower import Rule, lower, split, with_named_wildcards
from emerge.engine.parser import parse
from emerge.engine.syntax import Clause, RelationDecl, TypeDecl
from emerge.engine.typetable import TypeTable
from emerge.engine.typing_rules import infer
from emerge.util.errors import RuleError


@dataclass(frozen=True, slots=True, eq=False)
class LogRule:
    """A clause whose instances a derivation log records.

    Attributes:
        name: relation that holds the instances, one column per variable.
        rule: the lowered clause, wildcards of its premises named.
        types: type name of every variable of ``rule.variables``.
    """

    name: str
    rule: Rule
    types: tuple[str, ...]


class Program:
    """Rules and declarations of one run, checked; immutable.

    Attributes:
        relations: declared relations by full name (``instance.relation`` for components).
        clauses: clauses with one head and no disjunction, in order of the files.
        types: type declarations by full name; ``type_table`` answers questions about them.
        rules: the lowered form of every clause (same order), what the engines run.
        inputs, outputs: relations named by ``.input`` / ``.output`` (for information: the runner decides).
        files: every file read, includes among them.
    """

    def __init__(self, flat: Flat) -> None:
        """Check an expanded program; use :meth:`load` or :meth:`from_text`.

        Raises:
            RuleError: the first problem, at ``file:line:col``.
        """
        self.files: tuple[Path, ...] = tuple(flat.files)
        self.types: dict[str, TypeDecl] = flat.types
        self.type_table = TypeTable(flat.types)
        self.relations: dict[str, RelationDecl] = flat.relations
        for decl in flat.relations.values():
            checks.check_declaration(decl)
            for _, type_name in decl.columns:
                self.type_table.require(type_name, str(decl.pos))
        named: dict[str, list[str]] = {"input": [], "output": [], "printsize": []}
        for kind, name, pos in flat.directives:
            if name not in self.relations:
                raise RuleError(f"the relation '{name}' is not declared", str(pos))
            named[kind].append(name)
        self.inputs, self.outputs = tuple(named["input"]), tuple(named["output"])
        self.clauses: list[Clause] = []
        self.rules: list[Rule] = []
        for source in flat.clauses:
            checks.check_singletons(source)
            for head, body in split(source):
                clause = Clause(len(self.clauses), head, body, source.pos, source.plan, source.doc, source.annotations)
                self._check(clause)
        checks.check_stratified(self.rules)

    def _check(self, clause: Clause) -> None:
        checks.check_atoms(checks.clause_atoms(clause), self.relations)
        rule = lower(clause)
        checks.check_grounded(rule)
        infer(rule, self.relations, self.type_table)
        checks.check_division(rule)
        self.clauses.append(clause)
        self.rules.append(rule)

    @classmethod
    def load(cls, files: Sequence[Path | str], *, extra: Sequence[Path | str] = ()) -> Program:
        """Read rule files, with their includes; every file is read once.

        Args:
            files: the program.
            extra: further files of rules, e.g. of a user.

        Raises:
            RuleError: a file that cannot be read, is malformed, is outside the subset or fails a check.
        """
        return cls(load_files([Path(f) for f in (*files, *extra)]))

    @classmethod
    def from_text(cls, text: str, file: str = "<text>") -> Program:
        """The program in ``text``; ``file`` is its name in messages. Includes are refused.

        Raises:
            RuleError: as for :meth:`load`.
        """
        scope = parse(text, file)
        if scope.includes:
            raise RuleError("a program given as text cannot include files; load it from a file", file)
        return cls(flatten([scope]))

    @cached_property
    def derivation_rules(self) -> tuple[LogRule, ...]:
        """The clauses a derivation log records.

        All clauses of a relation that has a clause with ``@law``, is declared ``@semantic``, or depends positively on
        such a relation.
        """
        positive, _ = checks.dependencies(self.rules)
        logged = {name for name, decl in self.relations.items() if decl.semantic is not None}
        logged |= {c.head.name for c in self.clauses if c.law is not None}
        changed = True
        while changed:
            more = {head for head, uses in positive.items() if head not in logged and uses & logged}
            logged |= more
            changed = bool(more)
        return tuple(self._log_rule(rule) for rule in self.rules if rule.head.name in logged)

    def _log_rule(self, rule: Rule) -> LogRule:
        named = with_named_wildcards(rule)
        types = infer(named, self.relations, self.type_table)
        return LogRule(f"log__{rule.clause.index}", named, tuple(types[v] for v in named.variables))

    def types_of(self, rule: Rule) -> dict[str, str]:
        """Type name of every variable of one of :attr:`rules`."""
        return infer(rule, self.relations, self.type_table)

    def check_facts(self, relation: str, rows: Iterable[tuple[object, ...]]) -> str:
        """What is wrong with the first bad row of ``relation`` ("" when nothing is)."""
        decl = self.relations[relation]
        columns = [(name, t, self.type_table.kind(t)) for name, t in decl.columns]
        for row in rows:
            if type(row) is not tuple or len(row) != len(columns):
                return f"expected tuples of {len(columns)} ({', '.join(n for n, _ in decl.columns)}), found {row!r}"
            for value, (name, type_name, kind) in zip(row, columns):
                # The two common cases without a call; everything else, and every error, goes the long way.
                if kind == "number" and type(value) is int and -0x80000000 <= value <= 0x7FFFFFFF:
                    continue
                if kind == "symbol" and type(value) is str and value.isascii() and "\0" not in value:
                    continue
                problem = self.type_table.problem(value, type_name)
                if problem:
                    return f"column '{name}' of {row!r}: {problem}"
        return ""
