"""The laws of a program: what they are made of, the conditions on them, the hash a certificate is bound to."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from emerge.engine.program import Program
from emerge.engine.syntax import Agg, Atom, Clause, Cmp, Literal, Neg, literal_terms, subterms
from emerge.rules.generate import GENERATOR_VERSION
from emerge.rules.proofs import CLASSES, PROOF_VERSION
from emerge.rules.statements import SEMANTIC_CHECKS, STATEMENTS_VERSION
from emerge.util.errors import RuleError
from emerge.util.resources import resource_dir

#: Relations whose facts are claims about a kind of body; tested on the spellings of the kind.
KIND_RELATIONS = ("linear_in", "linear_all", "monotone_in", "commutative", "extremum_of")
#: Relations whose facts are claims about one described operator.
OPERATOR_RELATIONS = ("operator_signature", "operator_linear")
#: Shipped bookkeeping relations that a user may add to: they prove nothing.
OPEN_RELATIONS = frozenset({"operator_definition", "diagnosis"})
#: Semantic relations that are read off the graphs: their absence is a fact, so laws may negate them.
STRUCTURAL_CHECKS = frozenset({"layout", "same"})
#: Semantic relations that are facts of the input, which no clause may derive.
INPUT_RELATIONS = frozenset({"same"})


@dataclass(frozen=True)
class Law:
    """A named law.

    Attributes:
        kind: ``clause`` (certified on generated pairs), ``kind`` (claims about kinds of bodies) or ``operator``
            (claims about described operators).
        proof: class of operators whose written argument (``docs/proofs.md``) makes small sizes stand for all; "" for none.
        hash: of its clauses and of every bookkeeping clause they rest on.
    """

    name: str
    meaning: str
    kind: str
    clauses: tuple[Clause, ...]
    place: str
    shipped: bool
    hash: str
    proof: str = ""


def shipped_file(file: str) -> bool:
    """True for a rule file of this installation."""
    return Path(file).resolve().is_relative_to(resource_dir("datalog").resolve())


def laws_of(program: Program, shipped: Iterable[str] | None = None) -> dict[str, Law]:
    """The laws of a program by name.

    Args:
        shipped: files that count as shipped; None = those of this installation.
    Raises:
        RuleError: one name for laws in two files.
    """
    groups: dict[str, list[Clause]] = {}
    for clause in program.clauses:
        if clause.law is not None:
            groups.setdefault(clause.law, []).append(clause)
    hasher = _Hasher(program)
    own = None if shipped is None else {str(Path(f).resolve()) for f in shipped}
    found = {}
    for name, clauses in groups.items():
        files = {c.pos.file for c in clauses}
        if len(files) > 1:
            raise RuleError(
                f"the law '{name}' exists already at {clauses[0].pos}; give this one another name",
                str(next(c.pos for c in clauses if c.pos.file != clauses[0].pos.file)),
            )
        # a definition below a signature continues its comment; it claims nothing by itself
        heads = {c.head.name for c in clauses} - {"operator_definition"}
        kind = "kind" if heads <= set(KIND_RELATIONS) else "operator" if heads <= set(OPERATOR_RELATIONS) else "clause"
        file = clauses[0].pos.file
        is_shipped = shipped_file(file) if own is None else str(Path(file).resolve()) in own
        meaning = clauses[0].annotations.get("meaning", "")
        found[name] = Law(name, " ".join(meaning.split()), kind, tuple(clauses), str(clauses[0].pos), is_shipped,
                          hasher.law(clauses), _proof_class(name, clauses))  # fmt: skip
    return found


def _proof_class(name: str, clauses: list[Clause]) -> str:
    """The argument that the author of a law names for it.

    Raises:
        RuleError: there is no such argument, or the clauses of the law name different ones.
    """
    named = {c.annotations["proof"] for c in clauses if "proof" in c.annotations}
    if len(named) > 1 or (named and not named <= set(CLASSES)):
        raise RuleError(
            f"the law '{name}' is annotated '@proof {', '.join(sorted(named))}'; write one of {', '.join(CLASSES)}",
            str(clauses[0].pos),
        )
    return named.pop() if named else ""


def body_atoms(body: Iterable[Literal]) -> Iterator[tuple[Atom, bool]]:
    """Atoms of a body and whether each is read as a whole relation (negated, or inside an aggregate)."""
    for literal in body:
        if isinstance(literal, Atom):
            yield literal, False
        elif isinstance(literal, Neg):
            yield literal.atom, True
        if isinstance(literal, (Atom, Cmp)):
            for term in literal_terms(literal):
                for inner in subterms(term):
                    if isinstance(inner, Agg):
                        for atom, _ in body_atoms(inner.body):
                            yield atom, True


class _Hasher:
    def __init__(self, program: Program) -> None:
        self.program = program
        self.texts: dict[str, list[str]] = {}
        self.uses: dict[str, set[str]] = {}
        for clause in program.clauses:
            if clause.law is None:
                self.texts.setdefault(clause.head.name, []).append(str(clause))
                self.uses.setdefault(clause.head.name, set()).update(a.name for a, _ in body_atoms(clause.body))
        self._reach: dict[str, frozenset[str]] = {}

    def reach(self, relation: str) -> frozenset[str]:
        """Relations that a relation rests on through clauses without a law, itself among them."""
        if relation not in self._reach:
            seen = {relation}
            work = [relation]
            while work:
                for used in self.uses.get(work.pop(), ()):
                    if used not in seen:
                        seen.add(used)
                        work.append(used)
            self._reach[relation] = frozenset(seen)
        return self._reach[relation]

    def law(self, clauses: list[Clause]) -> str:
        relations: set[str] = set()
        for clause in clauses:
            relations |= {clause.head.name}
            for atom, _ in body_atoms(clause.body):
                relations |= self.reach(atom.name)
        digest = hashlib.sha256()
        lines = [f"statements {STATEMENTS_VERSION} generator {GENERATOR_VERSION}", *sorted(map(str, clauses))]
        named = sorted({c.annotations["proof"] for c in clauses if "proof" in c.annotations})
        lines += [f"proof {n} {PROOF_VERSION}" for n in named]
        for relation in sorted(relations):
            decl = self.program.relations[relation]
            lines.append(f"{relation} {decl.columns} {decl.semantic}")
            lines += sorted(self.texts.get(relation, ()))
        lines += _definitions(clauses, self.program)
        digest.update("\n".join(lines).encode())
        return digest.hexdigest()


def _definitions(clauses: list[Clause], program: Program) -> list[str]:
    """Contents of the graphs that define the operators of these clauses."""
    names = {getattr(c.head.args[0], "value", None) for c in clauses if c.head.name in OPERATOR_RELATIONS}
    out = []
    for clause in program.clauses:
        if clause.head.name == "operator_definition" and getattr(clause.head.args[0], "value", "") in names:
            path = Path(clause.pos.file).parent / getattr(clause.head.args[1], "value", "")
            out.append(path.read_text() if path.is_file() else f"missing {path.name}")
    return out


def check_program(program: Program, shipped: Iterable[str] | None = None) -> None:
    """The static conditions on laws.

    Args:
        shipped: files that count as shipped; None = those of this installation.
    Raises:
        RuleError: a semantic head without a law, a clause for an input relation, a check that does not exist, a negated
            relation that rests on derived statements, or a user's clause for a shipped bookkeeping relation.
    """
    own = None if shipped is None else {str(Path(f).resolve()) for f in shipped}

    def is_shipped(pos: Any) -> bool:
        return shipped_file(pos.file) if own is None else str(Path(pos.file).resolve()) in own

    for decl in program.relations.values():
        if decl.semantic is None:
            continue
        if decl.semantic not in SEMANTIC_CHECKS:
            raise RuleError(
                f"the relation '{decl.name}' is declared @semantic {decl.semantic}, and there is no such check; known "
                f"are {', '.join(sorted(SEMANTIC_CHECKS))}", str(decl.pos)
            )  # fmt: skip
        if not is_shipped(decl.pos):
            raise RuleError(
                f"the relation '{decl.name}' is declared @semantic; rule files of a user add laws to the semantic "
                "relations that exist, so drop the annotation", str(decl.pos)
            )  # fmt: skip
    values = _resting_on_values(program)
    feeding = _feeding(program)
    for clause in program.clauses:
        head = clause.head.name
        decl = program.relations[head]
        claims = decl.semantic is not None or head in KIND_RELATIONS
        if head in INPUT_RELATIONS:
            raise RuleError(
                f"'{head}' is written by the algebra and derived by no clause; state equal tensors as a rule in an .egg file",
                str(clause.pos),
            )
        if claims and clause.law is None:
            raise RuleError(
                f"the clause states something about values ('{head}' is semantic) and has no name; write "
                "'// @law name' and '// @meaning ...' above it", str(clause.pos)
            )  # fmt: skip
        if not is_shipped(clause.pos) and is_shipped(decl.pos) and not claims and head not in OPEN_RELATIONS:
            raise RuleError(
                f"'{head}' is bookkeeping of the shipped rules, which a user's file cannot add to; add a law to a "
                "semantic relation, or declare a relation of your own", str(clause.pos)
            )  # fmt: skip
        if head not in feeding:
            continue
        for atom, whole in body_atoms(clause.body):
            if whole and atom.name in values:
                name = f"the law '{clause.law}'" if clause.law else f"a clause of '{head}', which laws rest on,"
                raise RuleError(
                    f"{name} negates or counts '{atom.name}', which rests on derived statements; what is not derived "
                    "yet may still be true, so only input facts and what follows from them alone can be negated",
                    str(atom.pos),
                )


def _dependencies(program: Program) -> dict[str, set[str]]:
    uses: dict[str, set[str]] = {}
    for clause in program.clauses:
        uses.setdefault(clause.head.name, set()).update(a.name for a, _ in body_atoms(clause.body))
    return uses


def _resting_on_values(program: Program) -> set[str]:
    """Relations that depend on a semantic relation which is not read off the graphs."""
    uses = _dependencies(program)
    found = {
        d.name for d in program.relations.values() if d.semantic is not None and d.semantic not in STRUCTURAL_CHECKS
    } - set(OPERATOR_RELATIONS)
    changed = True
    while changed:
        more = {h for h, used in uses.items() if h not in found and used & found}
        found |= more
        changed = bool(more)
    return found


def _feeding(program: Program) -> set[str]:
    """Relations that a semantic relation depends on, those themselves among them."""
    uses = _dependencies(program)
    seen = {d.name for d in program.relations.values() if d.semantic is not None}
    work = list(seen)
    while work:
        for used in uses.get(work.pop(), ()):
            if used not in seen:
                seen.add(used)
                work.append(used)
    return seen
