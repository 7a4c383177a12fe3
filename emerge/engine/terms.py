"""Python values to clingo symbols and back. Records are functions ``r(...)``, ``nil`` the constant ``nil``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any


class TermBuilder:
    """Builds symbols; equal values share one."""

    def __init__(self) -> None:
        import clingo

        self._function, self._number, self._string = clingo.Function, clingo.Number, clingo.String
        self._cache: dict[tuple[type, Any], Any] = {}
        self._nil = clingo.Function("nil", [])

    def symbol(self, value: Any) -> Any:
        """The symbol of an int, str, None or tuple; nesting of any depth."""
        if value is None:
            return self._nil
        found = self._cache.get((type(value), value))
        if found is not None:
            return found
        work = [value]
        while work:
            item = work[-1]
            if type(item) is int:
                found = self._number(item)
            elif type(item) is str:
                found = self._string(item)
            else:
                missing = [v for v in item if v is not None and (type(v), v) not in self._cache]
                if missing:
                    work.extend(missing)
                    continue
                fields = [self._nil if v is None else self._cache[type(v), v] for v in item]
                found = self._function("r", fields)
            self._cache[type(item), item] = found
            work.pop()
        return found

    def atoms(self, predicate: str, rows: Iterable[tuple[Any, ...]]) -> Iterator[Any]:
        """One symbol per row."""
        function, symbol = self._function, self.symbol
        for row in rows:
            yield function(predicate, [symbol(v) for v in row])


class TermReader:
    """Reads atoms of a grounded control. Converting each distinct symbol once keeps this as cheap as grounding."""

    def __init__(self, control: Any) -> None:
        self._atoms = control.symbolic_atoms
        self._values = _Values()

    def rows(self, predicate: str, arity: int) -> tuple[list[tuple[Any, ...]], tuple[Any, ...] | None]:
        """All rows of a predicate; and, where an atom is not a fact, that row (the list is then incomplete)."""
        try:
            from clingo._internal import _ffi, _lib

            values = self._values
            atoms = self._atoms._rep
        except (ImportError, AttributeError):  # another clingo 5.x: the public interface, about four times slower
            return self._rows_slowly(predicate, arity)
        return _rows_fast(_ffi, _lib, atoms, predicate, arity, values)

    def _rows_slowly(self, predicate: str, arity: int) -> tuple[list[tuple[Any, ...]], tuple[Any, ...] | None]:
        result: list[tuple[Any, ...]] = []
        for atom in self._atoms.by_signature(predicate, arity):
            row = tuple(self._values.value(a) for a in atom.symbol.arguments)
            if not atom.is_fact:
                return result, row
            result.append(row)
        return result, None


class _Values(dict[int, Any]):
    """clingo's 64-bit representation of a symbol -> Python value, filled on demand."""

    def __missing__(self, rep: int) -> Any:
        from clingo.symbol import Symbol

        return self.value(Symbol(rep))

    def value(self, symbol: Any) -> Any:
        """The Python value of a symbol; nesting of any depth, shared parts converted once."""
        from clingo import SymbolType

        work = [symbol]
        while work:
            item = work[-1]
            rep = item._rep
            if rep in self:
                work.pop()
            elif item.type == SymbolType.Number:
                self[rep] = item.number
            elif item.type == SymbolType.String:
                self[rep] = item.string
            else:
                arguments = item.arguments
                missing = [a for a in arguments if a._rep not in self]
                if missing:
                    work.extend(missing)
                else:  # nil is the only function without arguments: records have fields
                    self[rep] = tuple([self[a._rep] for a in arguments]) if arguments else None
        return self[symbol._rep]


def _rows_fast(
    ffi: Any, lib: Any, atoms: Any, predicate: str, arity: int, values: _Values
) -> tuple[list[tuple[Any, ...]], tuple[Any, ...] | None]:
    """As ``_rows_slowly``, through the C functions that clingo's own wrapper calls once per property."""
    from clingo._internal import _handle_error

    signature = ffi.new("clingo_signature_t*")
    _handle_error(lib.clingo_signature_create(predicate.encode(), arity, True, signature))
    position = ffi.new("clingo_symbolic_atom_iterator_t*")
    _handle_error(lib.clingo_symbolic_atoms_begin(atoms, signature, position))
    flag, symbol = ffi.new("bool*"), ffi.new("clingo_symbol_t*")
    arguments, size = ffi.new("clingo_symbol_t const**"), ffi.new("size_t*")
    is_valid, is_fact, symbol_of = (
        lib.clingo_symbolic_atoms_is_valid,
        lib.clingo_symbolic_atoms_is_fact,
        lib.clingo_symbolic_atoms_symbol,
    )
    arguments_of, advance = lib.clingo_symbol_arguments, lib.clingo_symbolic_atoms_next
    result: list[tuple[Any, ...]] = []
    unpack, value, append = ffi.unpack, values.__getitem__, result.append
    ok = True
    while True:
        at = position[0]
        ok &= is_valid(atoms, at, flag)
        if not flag[0]:
            break
        ok &= symbol_of(atoms, at, symbol)
        ok &= arguments_of(symbol[0], arguments, size)
        row = tuple(map(value, unpack(arguments[0], arity))) if arity else ()
        ok &= is_fact(atoms, at, flag)
        if not ok:
            break
        if not flag[0]:
            return result, row
        append(row)
        ok &= advance(atoms, at, position)
    _handle_error(ok)
    return result, None
