"""Type inference of lowered rules, along Soufflé's rules: bodies give variables their types, heads are checked."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from emerge.engine.lower import Assign, Rule, Step
from emerge.engine.syntax import (
    Atom,
    Cmp,
    Neg,
    Nil,
    Num,
    Op,
    Pos,
    Rec,
    RelationDecl,
    Str,
    Term,
    Var,
    Wild,
    literal_terms,
    variables,
)
from emerge.engine.typetable import TypeTable
from emerge.util.errors import RuleError

# The type of arithmetic and integer constants: fits every number type, restricts none.
_ANY_NUMBER = "?number"
_ANY_SYMBOL = "?symbol"


def infer(rule: Rule, relations: Mapping[str, RelationDecl], types: TypeTable) -> dict[str, str]:
    """Type name of every variable of ``rule``, those of aggregates included.

    Raises:
        RuleError: two uses of a variable that no type satisfies, an operand of the wrong kind, or a head argument that
            is not of the declared type.
    """
    return _Inference(rule, relations, types).run()


class _Inference:
    def __init__(self, rule: Rule, relations: Mapping[str, RelationDecl], types: TypeTable) -> None:
        self.rule, self.relations, self.types = rule, relations, types
        self.steps = list(_all_steps(rule.body))
        self.leader: dict[str, str] = {}
        self.type_of: dict[str, str] = {}

    def run(self) -> dict[str, str]:
        for step in self.steps:
            if isinstance(step, Cmp) and isinstance(step.left, Var) and isinstance(step.right, Var):
                self._unify(step.left.name, step.right.name)
            if isinstance(step, Assign) and isinstance(step.agg.target, Var):
                self._unify(step.var.name, step.agg.target.name)
        for step in self.steps:
            match step:
                case Atom():
                    for arg, declared in zip(step.args, self.relations[step.name].types):
                        self._constrain(arg, self.types.canonical(declared))
                case Assign():
                    self._require(step.var, "number", "an aggregate")
                    if step.agg.target is not None:
                        self._arithmetic(step.agg.target, f"'{step.agg.op}'")
                case _:
                    pass
        changed = True
        while changed:
            before = dict(self.type_of)
            for step in self.steps:
                if isinstance(step, Cmp):
                    self._comparison(step)
            changed = before != self.type_of
        self._check()
        return {name: self._name(name) for name in self._all_variables()}

    # --- constraints from bodies --------------------------------------------------------------------------------
    def _find(self, name: str) -> str:
        while name in self.leader:
            name = self.leader[name]
        return name

    def _unify(self, a: str, b: str) -> None:
        a, b = self._find(a), self._find(b)
        if a != b:
            self.leader[b] = a

    def _meet(self, var: Var, type_name: str) -> None:
        leader = self._find(var.name)
        known = self.type_of.get(leader)
        if known is None:
            self.type_of[leader] = type_name
            return
        generic, other = (known, type_name) if known.startswith("?") else (type_name, known)
        if generic.startswith("?"):
            result = other if self._kind(other) == generic[1:] else None
        else:
            result = self.types.meet(known, type_name)
        if result is None:
            raise RuleError(
                f"'{_shown(var)}' is used both as {known.lstrip('?')} and as {type_name.lstrip('?')}, "
                "and no value is of both types; convert it explicitly (x + 0 is a plain number)",
                str(var.pos),
            )
        self.type_of[leader] = result

    def _kind(self, type_name: str) -> str:
        return type_name[1:] if type_name.startswith("?") else self.types.kind(type_name)

    def _constrain(self, term: Term, type_name: str) -> None:
        """``term`` stands where the body holds values of ``type_name``."""
        if isinstance(term, Var):
            self._meet(term, type_name)
        elif isinstance(term, Rec):
            for item, field_type in zip(term.items, self._fields(term, type_name)):
                self._constrain(item, field_type)
        else:
            self._constant(term, type_name)

    def _constant(self, term: Term, type_name: str) -> None:
        kind = self._kind(type_name)
        found = {Num: "number", Str: "symbol", Nil: "nil", Op: "number"}.get(type(term))
        if found is None or found == kind or (found == "nil" and kind in self.types.fields):
            return
        raise RuleError(
            f"expected a value of type {type_name.lstrip('?')} ({kind}), found a {found}", str(_pos_of(term))
        )

    def _fields(self, record: Rec, type_name: str) -> tuple[str, ...]:
        fields = self.types.fields.get(self._kind(type_name))
        if fields is None:
            raise RuleError(f"expected a value of type {type_name.lstrip('?')}, found a record", str(record.pos))
        if len(fields) != len(record.items):
            raise RuleError(
                f"the record type {type_name} has {len(fields)} fields, found {len(record.items)}", str(record.pos)
            )
        return fields

    def _require(self, var: Var, kind: str, where: str) -> None:
        known = self.type_of.get(self._find(var.name))
        if known is None:
            self.type_of[self._find(var.name)] = _ANY_NUMBER if kind == "number" else _ANY_SYMBOL
        elif self._kind(known) != kind:
            raise RuleError(f"'{_shown(var)}' is a {known.lstrip('?')} but {where} takes a {kind}", str(var.pos))

    def _arithmetic(self, term: Term, where: str) -> None:
        """All leaves of ``term`` must be numbers."""
        if isinstance(term, Op):
            for arg in term.args:
                self._arithmetic(arg, f"'{term.op}'")
        elif isinstance(term, Var):
            self._require(term, "number", where)
        elif not isinstance(term, Num):
            raise RuleError(f"{where} takes numbers, found a {_sort(term)}", str(_pos_of(term)))

    def _comparison(self, step: Cmp) -> None:
        if step.op not in ("=", "!="):
            # Soufflé orders symbols and records by internal numbers or text, the embedded engine differently.
            self._arithmetic(step.left, f"'{step.op}'")
            self._arithmetic(step.right, f"'{step.op}'")
            return
        for one, other in ((step.left, step.right), (step.right, step.left)):
            if isinstance(one, Op):
                self._arithmetic(one, f"'{one.op}'")
                if isinstance(other, Var):
                    self._require(other, "number", f"'{one.op}'")
                elif not isinstance(other, (Op, Num)):
                    raise RuleError(f"a number is compared with a {_sort(other)}", str(step.pos))
            elif isinstance(one, Num) and isinstance(other, Var):
                self._require(other, "number", f"'{step.op} {one.value}'")
            elif isinstance(one, Str) and isinstance(other, Var):
                self._require(other, "symbol", f"'{step.op}' with a string")
            elif isinstance(one, (Rec, Nil)) and isinstance(other, Var):
                known = self.type_of.get(self._find(other.name))
                if known is not None and isinstance(one, Rec):
                    for item, field_type in zip(one.items, self._fields(one, known)):
                        self._constrain(item, field_type)
                elif known is not None:
                    self._constant(one, known)
            elif not isinstance(one, Var) and not isinstance(other, Var) and _sort(one) != _sort(other):
                raise RuleError(f"a {_sort(one)} is compared with a {_sort(other)}", str(step.pos))

    # --- checks once types are known ----------------------------------------------------------------------------
    def _check(self) -> None:
        for step in self.steps:
            if isinstance(step, Neg):
                for arg, declared in zip(step.atom.args, self.relations[step.atom.name].types):
                    self._check_argument(arg, declared, exact=False)
            if isinstance(step, Cmp):
                for one, other in ((step.left, step.right), (step.right, step.left)):
                    if isinstance(one, (Rec, Nil)) and isinstance(other, Var) and not self._typed(other):
                        raise RuleError(
                            f"the record type of '{_shown(other)}' is not known; bind it in a positive atom",
                            str(other.pos),
                        )
        for arg, declared in zip(self.rule.head.args, self.relations[self.rule.head.name].types):
            self._check_argument(arg, declared, exact=True)

    def _typed(self, var: Var) -> bool:
        return self._find(var.name) in self.type_of

    def _check_argument(self, term: Term, declared: str, exact: bool) -> None:
        declared = self.types.canonical(declared)
        if isinstance(term, Wild):
            return
        if isinstance(term, Rec):
            for item, field_type in zip(term.items, self._fields(term, declared)):
                self._check_argument(item, field_type, exact)
        elif isinstance(term, Var):
            found = self.type_of.get(self._find(term.name))
            if found is None:
                raise RuleError(f"the type of '{_shown(term)}' is not known; bind it in an atom", str(term.pos))
            fits = self._kind(found) == self._kind(declared)
            if fits and exact and not found.startswith("?"):
                fits = self.types.is_subtype(found, declared)
            if not fits:
                raise RuleError(
                    f"'{_shown(term)}' is of type {found.lstrip('?')}, the column takes {declared}", str(term.pos)
                )
        else:
            self._constant(term, declared)

    def _all_variables(self) -> Iterable[str]:
        names: dict[str, None] = dict.fromkeys(self.rule.variables)
        for step in self.steps:
            if not isinstance(step, Assign):
                names.update((v.name, None) for t in literal_terms(step) for v in variables(t))
        return names

    def _name(self, name: str) -> str:
        found = self.type_of.get(self._find(name), _ANY_NUMBER)
        return found[1:] if found.startswith("?") else found


def _all_steps(steps: Iterable[Step]) -> Iterable[Step]:
    for step in steps:
        yield step
        if isinstance(step, Assign):
            yield from step.agg.body


def _sort(term: Term) -> str:
    return {Num: "number", Op: "number", Str: "symbol", Nil: "record", Rec: "record"}.get(type(term), "value")


def _pos_of(term: Term) -> Pos:
    return term.pos


def _shown(var: Var) -> str:
    return var.name.split("@")[0].split("#")[0]
