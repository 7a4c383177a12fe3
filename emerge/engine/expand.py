"""Includes and components: the files of a program become one flat list of types, relations and clauses."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from emerge.engine.parser import Component, Init, Scope, parse
from emerge.engine.syntax import (
    Agg,
    Atom,
    Body,
    Cmp,
    Literal,
    Neg,
    Op,
    Pos,
    Rec,
    RelationDecl,
    SourceClause,
    Term,
    TypeDecl,
)
from emerge.util.errors import RuleError

BUILTIN_TYPES = ("number", "symbol")
_MAX_DEPTH = 32
# Marks a type argument that was looked up where the component was instantiated; inside, its name may mean another type.
_RESOLVED = "="


@dataclass(slots=True)
class Flat:
    """A program without includes and components; all names are fully qualified (``inst.rel``)."""

    types: dict[str, TypeDecl] = field(default_factory=dict)
    relations: dict[str, RelationDecl] = field(default_factory=dict)
    clauses: list[SourceClause] = field(default_factory=list)
    directives: list[tuple[str, str, Pos]] = field(default_factory=list)
    files: list[Path] = field(default_factory=list)


def load_files(files: Sequence[Path]) -> Flat:
    """Read ``files`` and what they include (each file once, included files first where they are named).

    Raises:
        RuleError: a missing file, malformed text, or a name that is declared twice or not at all.
    """
    scopes: list[Scope] = []
    seen: dict[Path, None] = {}
    for file in files:
        _read(Path(file), None, seen, scopes, Path(file).resolve().parent)
    flat = flatten(scopes)
    flat.files = list(seen)
    return flat


def _read(path: Path, origin: Pos | None, seen: dict[Path, None], scopes: list[Scope], root: Path) -> None:
    resolved = path.resolve()
    if resolved in seen:
        return
    if not resolved.is_relative_to(root):
        raise RuleError(
            f"{str(path)!r} lies outside {str(root)!r}; a rule file includes files of its own folder", str(origin)
        )
    seen[resolved] = None
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise RuleError(f"the rule file {path} cannot be read ({reason})", str(origin or path)) from error
    scope = parse(text, str(path))
    for name, pos in scope.includes:
        _read(path.parent / name, pos, seen, scopes, root)
    scopes.append(scope)


@dataclass(slots=True)
class _Env:
    """Where names are looked up: an instance, then what encloses it."""

    prefix: str
    parent: _Env | None
    relations: set[str] = field(default_factory=set)
    types: set[str] = field(default_factory=set)
    inits: set[str] = field(default_factory=set)

    def relation(self, name: str) -> str:
        return self._lookup(name, "relations")

    def type(self, name: str) -> str:
        if name in BUILTIN_TYPES:
            return name
        if name.startswith(_RESOLVED):
            return name.removeprefix(_RESOLVED)
        return self._lookup(name, "types")

    def _lookup(self, name: str, which: str) -> str:
        head = name.split(".")[0]
        env: _Env | None = self
        while env is not None:
            if ("." not in name and head in getattr(env, which)) or ("." in name and head in env.inits):
                return env.prefix + name
            env = env.parent
        return name


def flatten(scopes: Iterable[Scope]) -> Flat:
    """Join the scopes of several files and expand their ``.init`` lines.

    Raises:
        RuleError: a name that is declared twice, or an unknown component.
    """
    whole = Scope()
    for scope in scopes:
        whole.types += scope.types
        whole.relations += scope.relations
        whole.clauses += scope.clauses
        whole.inits += scope.inits
        whole.components += scope.components
        whole.directives += scope.directives
    components: dict[str, Component] = {}
    for component in whole.components:
        if component.name in components:
            first = components[component.name].pos
            raise RuleError(f"the component '{component.name}' is declared twice; first at {first}", str(component.pos))
        components[component.name] = component
    flat = Flat()
    _expand(whole, _Env("", None), components, flat, 0)
    return flat


def _expand(scope: Scope, env: _Env, components: dict[str, Component], flat: Flat, depth: int) -> None:
    env.relations.update(r.name for r in scope.relations)
    env.types.update(t.name for t in scope.types)
    env.inits.update(i.name for i in scope.inits)
    for type_decl in scope.types:
        name = env.prefix + type_decl.name
        if name in flat.types or name in BUILTIN_TYPES:
            first = f"; first at {flat.types[name].pos}" if name in flat.types else " (it is built in)"
            raise RuleError(f"the type '{name}' is declared twice{first}", str(type_decl.pos))
        fields = type_decl.fields and tuple((n, env.type(t)) for n, t in type_decl.fields)
        base = type_decl.base and env.type(type_decl.base)
        flat.types[name] = replace(type_decl, name=name, base=base, fields=fields)
    for relation in scope.relations:
        name = env.prefix + relation.name
        if name in flat.relations:
            first_pos = flat.relations[name].pos
            raise RuleError(f"the relation '{name}' is declared twice; first at {first_pos}", str(relation.pos))
        columns = tuple((n, env.type(t)) for n, t in relation.columns)
        flat.relations[name] = replace(relation, name=name, columns=columns)
    for init in scope.inits:
        _instantiate(init, env, components, flat, depth)
    flat.clauses += [_rename_clause(clause, env) for clause in scope.clauses]
    flat.directives += [(kind, env.relation(name), pos) for kind, name, pos in scope.directives]


def _instantiate(init: Init, env: _Env, components: dict[str, Component], flat: Flat, depth: int) -> None:
    if depth >= _MAX_DEPTH:
        raise RuleError(f"components are nested deeper than {_MAX_DEPTH}; '{init.comp}' may hold itself", str(init.pos))
    inner = _Env(env.prefix + init.name + ".", env)
    scope = Scope()
    _inherit(init.comp, tuple(_RESOLVED + env.type(a) for a in init.args), init.pos, inner, components, scope, 0)
    _expand(scope, inner, components, flat, depth + 1)


def _inherit(
    name: str, args: tuple[str, ...], pos: Pos, env: _Env, components: dict[str, Component], into: Scope, depth: int
) -> None:
    """Collect the statements of a component and of its bases, bases first."""
    if name not in components:
        known = ", ".join(sorted(components)) or "none"
        raise RuleError(f"the component '{name}' is not declared; declared are: {known}", str(pos))
    component = components[name]
    if len(args) != len(component.params):
        raise RuleError(
            f"the component '{name}' takes {len(component.params)} type parameters, {len(args)} are given", str(pos)
        )
    if depth >= _MAX_DEPTH:
        raise RuleError(f"the component '{name}' inherits from itself", str(pos))
    params = dict(zip(component.params, args))
    for base, base_args in component.bases:
        _inherit(base, tuple(params.get(a, a) for a in base_args), component.pos, env, components, into, depth + 1)
    scope = component.scope
    into.types += [_substitute_type(t, params) for t in scope.types]
    into.relations += [replace(r, columns=tuple((n, params.get(t, t)) for n, t in r.columns)) for r in scope.relations]
    into.inits += [replace(i, args=tuple(params.get(a, a) for a in i.args)) for i in scope.inits]
    into.clauses += scope.clauses
    into.directives += scope.directives


def _substitute_type(decl: TypeDecl, params: dict[str, str]) -> TypeDecl:
    fields = decl.fields and tuple((n, params.get(t, t)) for n, t in decl.fields)
    return replace(decl, base=params.get(decl.base, decl.base), fields=fields)


def _rename_clause(clause: SourceClause, env: _Env) -> SourceClause:
    if env.parent is None and not env.inits:
        return clause
    return replace(clause, heads=tuple(_rename_atom(h, env) for h in clause.heads), body=_rename_body(clause.body, env))


def _rename_body(body: Body, env: _Env) -> Body:
    return Body(
        tuple(
            tuple(_rename_body(i, env) if isinstance(i, Body) else _rename_literal(i, env) for i in choice)
            for choice in body.choices
        )
    )


def _rename_literal(literal: Literal, env: _Env) -> Literal:
    match literal:
        case Atom():
            return _rename_atom(literal, env)
        case Neg():
            return replace(literal, atom=_rename_atom(literal.atom, env))
        case Cmp():
            return replace(literal, left=_rename_term(literal.left, env), right=_rename_term(literal.right, env))


def _rename_atom(atom: Atom, env: _Env) -> Atom:
    return replace(atom, name=env.relation(atom.name), args=tuple(_rename_term(a, env) for a in atom.args))


def _rename_term(term: Term, env: _Env) -> Term:
    """Only aggregates hold relation names."""
    match term:
        case Agg():
            target = None if term.target is None else _rename_term(term.target, env)
            return replace(term, target=target, body=tuple(_rename_literal(b, env) for b in term.body))
        case Op():
            return replace(term, args=tuple(_rename_term(a, env) for a in term.args))
        case Rec():
            return replace(term, items=tuple(_rename_term(a, env) for a in term.items))
        case _:
            return term
