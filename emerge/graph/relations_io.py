"""Reads and writes ``emerge.relations/1``, the JSON form of :class:`emerge.graph.relations.Relations`.

The format is described in docs/graph-format.md. Names are checked against graphs by :mod:`emerge.graph.source`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from emerge.graph.json_io import (
    Violation,
    decode_groups,
    describe,
    dump_lines,
    load_json,
    optional,
    required,
    typed,
    write_atomically,
)
from emerge.graph.relations import ConcatExpr, Cuts, Expr, Leaf, RelationEntry, Relations, SliceExpr
from emerge.util.errors import RelationError

SCHEMA = "emerge.relations/1"

_KINDS = ("replicated", "shard", "custom", "aligned")
_EXPECTED = ("refines", "bug", "unspecified")
_SECTIONS = ("inputs", "full_inputs", "expected_outputs", "extra_outputs")
_FLAGS = ("cut", "hint", "added", "violated")
_KEYS = frozenset(("schema", "case", "world_size", "description", "expected", "claimed_outputs", "groups", *_SECTIONS))
_ENTRY_KEYS = frozenset(
    ("seq", "kind", "dist", "dim", "expr", "also_equal", "alignment", "seq_cuts", "dist_cuts", "note", *_FLAGS)
)
#: key of ``Relations.extra`` that keeps unknown keys of entries: section -> reference name -> key -> value.
ENTRY_EXTRA = "entry_extra"


def _leaf(rank: Any, name: Any, world_size: int) -> Leaf:
    if type(rank) is not int or not 0 <= rank < world_size:
        raise Violation(
            f"expected a rank from 0 to {world_size - 1}, found {describe(rank)}; correct it or 'world_size'"
        )
    if type(name) is not str or not name:
        raise Violation(f"expected a tensor name, found {describe(name)}; correct it")
    return Leaf(rank, name)


def _dim(obj: dict[str, Any]) -> int:
    dim = required(obj, "dim", int, "an axis number >= 0")
    if dim < 0:
        raise Violation(f"expected an axis number >= 0 for 'dim', found {dim}; count axes from the left")
    return int(dim)


def _expr(obj: Any, world_size: int) -> Expr:
    if type(obj) is not dict:
        raise Violation(
            f"expected an object (concat, slice or {{rank, name}}) in an expression, found {describe(obj)}; correct it"
        )
    op = obj.get("op")
    if op is None:
        if set(obj) != {"rank", "name"}:
            raise Violation(
                f"expected 'op', or 'rank' and 'name', in an expression, found keys {sorted(obj)}; correct it"
            )
        return _leaf(obj["rank"], obj["name"], world_size)
    if op == "concat":
        args = required(obj, "args", list, "a list of expressions")
        if not args:
            raise Violation("a concat has no 'args'; give at least one expression")
        return ConcatExpr(_dim(obj), tuple(_expr(a, world_size) for a in args))
    if op == "slice":
        start, end = required(obj, "start", int, "an index"), required(obj, "end", int, "an index")
        if not 0 <= start < end:
            raise Violation(f"expected 0 <= start < end in a slice, found start {start} and end {end}; correct them")
        return SliceExpr(_dim(obj), start, end, _expr(obj.get("arg"), world_size))
    raise Violation(f"expected 'concat' or 'slice' as 'op' of an expression, found {describe(op)}; correct it")


def _cuts(obj: dict[str, Any], key: str) -> Cuts:
    out = []
    for item in optional(obj, key, list, "a list of [start, stop] pairs", []):
        good = type(item) is list and len(item) == 2 and all(type(n) is int for n in item) and 0 <= item[0] < item[1]
        if not good:
            raise Violation(f"expected [start, stop] with 0 <= start < stop in {key!r}, found {describe(item)}")
        out.append((item[0], item[1]))
    return tuple(out)


def leaves(expr: Expr) -> list[Leaf]:
    """The tensors an expression mentions, left to right, with repetitions."""
    if isinstance(expr, Leaf):
        return [expr]
    if isinstance(expr, ConcatExpr):
        return [leaf for a in expr.args for leaf in leaves(a)]
    return leaves(expr.arg)


def _entry(obj: Any, world_size: int, place: str) -> RelationEntry:
    if type(obj) is not dict:
        raise Violation(f"expected an object per relation, found {describe(obj)}; correct the entry")
    kind = required(obj, "kind", str, "one of " + ", ".join(_KINDS))
    if kind not in _KINDS:
        raise Violation(f"expected one of {', '.join(_KINDS)} for 'kind', found {kind!r}; correct it")
    dist = []
    for item in required(obj, "dist", list, "a list of [rank, name] pairs"):
        if type(item) is not list or len(item) != 2:
            raise Violation(f"expected [rank, name] in 'dist', found {describe(item)}; correct it")
        dist.append(_leaf(item[0], item[1], world_size))
    if not dist:
        raise Violation("'dist' is empty; list the implementation tensors as [rank, name]")
    if kind == "shard":
        dim = _dim(obj)
    elif obj.get("dim") is not None:
        raise Violation(f"'dim' has no meaning for kind {kind!r}; drop it, or use kind 'shard'")
    else:
        dim = None
    expr = None
    if kind == "custom":
        if obj.get("expr") is None:
            raise Violation(
                "kind 'custom' needs 'expr'; add the tree of concat and slice that gives the reference tensor"
            )
        expr = _expr(obj["expr"], world_size)
        missing = set(leaves(expr)) - set(dist)
        if missing:
            first = min(missing, key=lambda x: (x.rank, x.name))
            raise Violation(f"'expr' mentions [{first.rank}, {first.name!r}], which 'dist' does not list; add it there")
    elif obj.get("expr") is not None:
        raise Violation(f"'expr' has no meaning for kind {kind!r}; drop it, or use kind 'custom'")
    alignment = optional(obj, "alignment", str, "an alignment")
    if (alignment is not None) != (kind == "aligned"):
        raise Violation("kind 'aligned' and 'alignment', e.g. \"(tp a) b ~ b a\", belong together; correct the entry")
    also = []
    for group in optional(obj, "also_equal", list, "a list of groups of expressions", []):
        if type(group) is not list or len(group) < 2:
            raise Violation(
                f"expected groups of at least two expressions in 'also_equal', found {describe(group)}; correct it"
            )
        also.append(tuple(_expr(e, world_size) for e in group))
    flags = {f: optional(obj, f, bool, "true or false", False) for f in _FLAGS}
    seq = required(obj, "seq", str, "the name of the reference tensor")
    if not seq:
        raise Violation("'seq' is empty; give the name of the reference tensor")
    return RelationEntry(
        seq=seq,
        kind=kind,
        dist=tuple(dist),
        dim=dim,
        expr=expr,
        also_equal=tuple(also),
        alignment=alignment,
        seq_cuts=_cuts(obj, "seq_cuts"),
        dist_cuts=_cuts(obj, "dist_cuts"),
        note=optional(obj, "note", str, "a string", ""),
        place=place,
        **flags,
    )


def decode_relations(data: Any, path: str) -> Relations:
    """The relations of a decoded JSON document.

    Raises:
        RelationError: any violation of ``emerge.relations/1``.
    """
    place = path
    try:
        if type(data) is not dict:
            raise Violation(f"expected an object at the top, found {describe(data)}; give an emerge.relations/1 file")
        schema = data.get("schema", SCHEMA)
        if schema != SCHEMA:
            raise Violation(
                f"expected schema {SCHEMA!r}, found {describe(schema)}; give a relation file of this version"
            )
        world_size = required(data, "world_size", int, "the number of implementation ranks")
        if world_size < 1:
            raise Violation(f"expected 'world_size' >= 1, found {world_size}; correct it")
        expected = optional(data, "expected", str, "a string", "unspecified")
        if expected not in _EXPECTED:
            raise Violation(f"expected one of {', '.join(_EXPECTED)} for 'expected', found {expected!r}; correct it")
        extra = {k: v for k, v in data.items() if k not in _KEYS}
        sections: dict[str, list[RelationEntry] | None] = {}
        kept: dict[str, dict[str, dict[str, Any]]] = {}
        for section in _SECTIONS:
            place = path
            raw = (
                required(data, "inputs", list, "a list")
                if section == "inputs"
                else optional(data, section, list, "a list")
            )
            entries: list[RelationEntry] | None = None if raw is None else []
            for i, obj in enumerate(raw or ()):
                place = f"{path}: {section}[{i}]"
                entry = _entry(obj, world_size, place)
                assert entries is not None
                entries.append(entry)
                more = {k: v for k, v in obj.items() if k not in _ENTRY_KEYS}
                if more:
                    kept.setdefault(section, {}).setdefault(entry.seq, {}).update(more)
            sections[section] = entries
        if kept:
            extra[ENTRY_EXTRA] = kept
        place = path
        claimed = optional(data, "claimed_outputs", list, "a list of reference names")
        if claimed is not None:
            for name in claimed:
                typed(name, "claimed_outputs", str, "reference names")
        else:
            claimed = [e.seq for s in ("expected_outputs", "extra_outputs") for e in sections[s] or ()]
        groups = {}
        for side, value in optional(data, "groups", dict, "an object with 'seq' and 'dist'", {}).items():
            if side not in ("seq", "dist"):
                raise Violation(f"expected 'seq' and 'dist' in 'groups', found {side!r}; correct it")
            groups[side] = decode_groups(value, world_size)
        return Relations(
            case=optional(data, "case", str, "a string", Path(path).resolve().parent.name),
            world_size=world_size,
            inputs=sections["inputs"] or [],
            expected=expected,
            full_inputs=sections["full_inputs"],
            expected_outputs=sections["expected_outputs"] or [],
            extra_outputs=sections["extra_outputs"] or [],
            claimed_outputs=claimed,
            groups=groups,
            description=optional(data, "description", str, "a string", ""),
            path=path,
            extra=extra,
        )
    except Violation as e:
        raise RelationError(str(e), place) from None
    except RecursionError:
        raise RelationError(
            "expected expressions of moderate depth, found them nested too deeply; flatten them", place
        ) from None


def read_relations(path: str | Path) -> Relations:
    """Reads one ``emerge.relations/1`` file.

    Raises:
        RelationError: the file cannot be read, is not JSON, or violates the format.
    """
    path = Path(path)
    return decode_relations(load_json(path, RelationError), str(path))


def _encode_expr(expr: Expr) -> dict[str, Any]:
    if isinstance(expr, Leaf):
        return {"rank": expr.rank, "name": expr.name}
    if isinstance(expr, ConcatExpr):
        return {"op": "concat", "dim": expr.dim, "args": [_encode_expr(a) for a in expr.args]}
    return {"op": "slice", "dim": expr.dim, "start": expr.start, "end": expr.end, "arg": _encode_expr(expr.arg)}


def _encode_entry(e: RelationEntry, more: dict[str, Any]) -> dict[str, Any]:
    out: dict[str, Any] = {"seq": e.seq, "kind": e.kind, "dist": [[x.rank, x.name] for x in e.dist]}
    if e.dim is not None:
        out["dim"] = e.dim
    if e.expr is not None:
        out["expr"] = _encode_expr(e.expr)
    if e.also_equal:
        out["also_equal"] = [[_encode_expr(x) for x in group] for group in e.also_equal]
    if e.alignment is not None:
        out["alignment"] = e.alignment
    for key, cuts in (("seq_cuts", e.seq_cuts), ("dist_cuts", e.dist_cuts)):
        if cuts:
            out[key] = [list(c) for c in cuts]
    for flag in _FLAGS:
        if getattr(e, flag):
            out[flag] = True
    if e.note:
        out["note"] = e.note
    return out | more


def encode_relations(relations: Relations) -> dict[str, Any]:
    """The JSON document of a relation file; the inverse of :func:`decode_relations`."""
    extra = dict(relations.extra)
    kept = extra.pop(ENTRY_EXTRA, {})

    def section(name: str, entries: list[RelationEntry]) -> list[dict[str, Any]]:
        return [_encode_entry(e, kept.get(name, {}).get(e.seq, {})) for e in entries]

    out: dict[str, Any] = {
        "schema": SCHEMA,
        "case": relations.case,
        "world_size": relations.world_size,
        "description": relations.description,
        "groups": relations.groups,
        "inputs": section("inputs", relations.inputs),
    }
    if relations.full_inputs is not None:
        out["full_inputs"] = section("full_inputs", relations.full_inputs)
    out["expected"] = relations.expected
    out["expected_outputs"] = section("expected_outputs", relations.expected_outputs)
    if relations.extra_outputs:
        out["extra_outputs"] = section("extra_outputs", relations.extra_outputs)
    out["claimed_outputs"] = list(relations.claimed_outputs)
    return out | extra


def write_relations(relations: Relations, path: str | Path) -> None:
    """Writes one ``emerge.relations/1`` file, one relation per line, atomically.

    Raises:
        RelationError: an extra key has no JSON form, or the file cannot be written.
    """
    path = Path(path)
    try:
        body = dump_lines(encode_relations(relations), frozenset(_SECTIONS))
    except (TypeError, ValueError, RecursionError) as e:
        raise RelationError(
            f"expected JSON values in extra keys, found one that has no JSON form ({e}); convert it", str(path)
        ) from None
    write_atomically(path, body, RelationError)
