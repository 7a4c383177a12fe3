"""Types of the Datalog subset: ``number``, ``symbol``, their aliases and subtypes, and records."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from emerge.engine.expand import BUILTIN_TYPES
from emerge.engine.syntax import INT_MAX, INT_MIN, TypeDecl
from emerge.util.errors import RuleError

_OUTSIDE = {"float": "intern exact constants as symbols", "unsigned": "use number"}


class TypeTable:
    """Declared types, aliases resolved.

    A *kind* is what values look like: ``number``, ``symbol``, or the canonical name of a record type.
    """

    def __init__(self, decls: Mapping[str, TypeDecl]) -> None:
        """Raises RuleError for unknown, cyclic or unsupported types."""
        self._decls = dict(decls)
        self._canonical: dict[str, str] = {t: t for t in BUILTIN_TYPES}
        self._base: dict[str, str] = {}
        self._kind: dict[str, str] = {t: t for t in BUILTIN_TYPES}
        self.fields: dict[str, tuple[str, ...]] = {}
        for decl in decls.values():
            self._resolve(decl, ())
        for decl in decls.values():
            for _, field_type in decl.fields or ():
                self.require(field_type, str(decl.pos))
            if decl.fields is not None:
                self.fields[decl.name] = tuple(self._canonical[t] for _, t in decl.fields)

    def _resolve(self, decl: TypeDecl, above: tuple[str, ...]) -> None:
        name = decl.name
        if name in self._canonical:
            return
        if name in above:
            raise RuleError(f"the type '{name}' is defined by itself: {' -> '.join((*above, name))}", str(decl.pos))
        if decl.fields is not None:
            self._canonical[name] = self._kind[name] = name
            return
        if decl.base in self._decls:
            self._resolve(self._decls[decl.base], (*above, name))
        self.require(decl.base, str(decl.pos))
        base = self._canonical[decl.base]
        self._kind[name] = self._kind[base]
        if not decl.strict:
            self._canonical[name] = base
            return
        if self._kind[base] not in BUILTIN_TYPES:
            raise RuleError(f"'{name}' cannot be a subtype of the record type '{base}'; use '='", str(decl.pos))
        self._canonical[name] = name
        self._base[name] = base

    def require(self, name: str, place: str) -> None:
        """Raises RuleError when ``name`` is no type."""
        if name in self._canonical or name in self._decls:
            return
        if name in _OUTSIDE:
            raise RuleError(f"the type '{name}' is outside the Datalog subset; {_OUTSIDE[name]}", place)
        known = ", ".join(sorted({*BUILTIN_TYPES, *self._decls}))
        raise RuleError(f"the type '{name}' is not declared; declared are: {known}", place)

    def canonical(self, name: str) -> str:
        """The type an alias stands for."""
        return self._canonical[name]

    def kind(self, name: str) -> str:
        """``number``, ``symbol`` or the canonical name of a record type."""
        return self._kind[name]

    def is_subtype(self, sub: str, of: str) -> bool:
        """Whether every value of ``sub`` is declared to be one of ``of``."""
        current, target = self._canonical[sub], self._canonical[of]
        while current != target:
            if current not in self._base:
                return False
            current = self._base[current]
        return True

    def meet(self, a: str, b: str) -> str | None:
        """The more special of two types, None when they are unrelated."""
        if self.is_subtype(a, b):
            return self._canonical[a]
        return self._canonical[b] if self.is_subtype(b, a) else None

    def problem(self, value: Any, type_name: str) -> str:
        """Why the Python ``value`` is no value of the type ("" when it is one).

        Numbers are ``int``, symbols ``str``, records tuples of the fields, ``nil`` is None.
        """
        stack = [(value, self._canonical[type_name])]
        while stack:
            item, name = stack.pop()
            kind = self._kind[name]
            if kind == "number":
                if type(item) is not int:
                    return f"expected a number (int), found {item!r} ({type(item).__name__})"
                if not INT_MIN <= item <= INT_MAX:
                    return f"the number {item} does not fit 32 bits"
            elif kind == "symbol":
                if type(item) is not str:
                    return f"expected a symbol (str), found {item!r} ({type(item).__name__})"
                if not symbol_is_storable(item):
                    return f"the symbol {item!r} holds a NUL character or a lone surrogate"
            elif item is not None:
                fields = self.fields[kind]
                if type(item) is not tuple or len(item) != len(fields):
                    return f"expected a record {name} (tuple of {len(fields)}, or None), found {item!r}"
                stack.extend(zip(item, fields))
        return ""


def symbol_is_storable(text: str) -> bool:
    """Whether both engines can hold ``text`` (NUL ends a C string; a lone surrogate has no UTF-8 form)."""
    if text.isascii():
        return "\0" not in text
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return "\0" not in text
