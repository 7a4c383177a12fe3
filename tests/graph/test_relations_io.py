"""emerge.relations/1: round trips, and one test per way a file can be wrong."""

from __future__ import annotations

import contextlib
import copy
import json
import os
import random
from pathlib import Path
from typing import Any

import pytest

from emerge.graph.relations import ConcatExpr, Leaf, SliceExpr
from emerge.graph.relations_io import (
    decode_relations,
    encode_relations,
    leaves,
    read_relations,
    write_relations,
)
from emerge.util.errors import InputError, RelationError

SUITE = Path(os.environ.get("EMERGE_PEER_SUITE", Path(__file__).parents[2] / "../shared/peer_suite"))

EXPR = {
    "op": "concat", "dim": 1, "args": [
        {"op": "slice", "dim": 1, "start": 0, "end": 2, "arg": {"rank": 0, "name": "w"}},
        {"rank": 1, "name": "w"},
    ],
}  # fmt: skip
VALID: dict[str, Any] = {
    "schema": "emerge.relations/1",
    "case": "toy",
    "world_size": 2,
    "description": "words",
    "groups": {"seq": {}, "dist": {"3": [[0, 1]]}},
    "inputs": [
        {"seq": "x", "kind": "replicated", "dist": [[0, "x"], [1, "x"]], "label": "kept", "hint": True},
        {"seq": "w", "kind": "shard", "dim": 0, "dist": [[0, "w"], [1, "w"]], "note": "n"},
        {"seq": "q", "kind": "custom", "dist": [[0, "w"], [1, "w"]], "expr": EXPR,
         "also_equal": [[{"rank": 0, "name": "w"}, {"rank": 1, "name": "w"}]]},
    ],
    "full_inputs": [{"seq": "x", "kind": "replicated", "dist": [[0, "x"], [1, "x"]]}],
    "expected": "bug",
    "expected_outputs": [{"seq": "y", "kind": "replicated", "dist": [[0, "y"], [1, "y"]], "violated": True}],
    "claimed_outputs": ["y"],
    "caveats": ["kept"],
}  # fmt: skip


def test_every_field_arrives() -> None:
    r = decode_relations(VALID, "case/relations.json")
    assert (r.case, r.world_size, r.expected, r.claimed_outputs) == ("toy", 2, "bug", ["y"])
    assert r.inputs[0].hint
    assert r.inputs[1].dim == 0
    assert r.inputs[1].place == "case/relations.json: inputs[1]"
    assert r.inputs[2].expr == ConcatExpr(1, (SliceExpr(1, 0, 2, Leaf(0, "w")), Leaf(1, "w")))
    assert leaves(r.inputs[2].expr) == [Leaf(0, "w"), Leaf(1, "w")]
    assert r.inputs[2].also_equal == ((Leaf(0, "w"), Leaf(1, "w")),)
    assert r.expected_outputs[0].violated
    assert r.groups["dist"] == {"3": [[0, 1]]}
    assert [e.seq for e in r.usable_inputs()] == ["x"]  # full_inputs replaces inputs


def test_round_trip_is_exact(tmp_path: Path) -> None:
    path = tmp_path / "relations.json"
    write_relations(decode_relations(VALID, "x"), path)
    assert json.loads(path.read_text()) == VALID
    assert encode_relations(read_relations(path)) == VALID


def test_claims_default_to_the_stated_outputs() -> None:
    data = {k: v for k, v in VALID.items() if k not in ("claimed_outputs", "schema")}
    assert decode_relations(data, "r").claimed_outputs == ["y"]


CHANGES: list[tuple[str, Any, str]] = [
    ("schema", lambda d: d.update(schema="emerge.graph/1"), "expected schema 'emerge.relations/1'"),
    ("no world_size", lambda d: d.pop("world_size"), "'world_size' is missing"),
    ("no inputs", lambda d: d.pop("inputs"), "'inputs' is missing"),
    ("world_size 0", lambda d: d.update(world_size=0), "'world_size' >= 1"),
    ("expected", lambda d: d.update(expected="yes"), "refines, bug, unspecified"),
    ("kind", lambda d: d["inputs"][0].update(kind="split"), "inputs[0]: expected one of replicated, shard, custom"),
    ("no dim", lambda d: d["inputs"][1].pop("dim"), "inputs[1]: the key 'dim' is missing"),
    ("negative dim", lambda d: d["inputs"][1].update(dim=-1), "found -1"),
    ("dim of replicated", lambda d: d["inputs"][0].update(dim=0), "'dim' has no meaning for kind 'replicated'"),
    ("rank outside", lambda d: d["inputs"][0]["dist"].append([2, "x"]), "expected a rank from 0 to 1, found int 2"),
    ("empty dist", lambda d: d["inputs"][0].update(dist=[]), "'dist' is empty"),
    ("dist pair", lambda d: d["inputs"][0].update(dist=[["x"]]), "expected [rank, name]"),
    ("no expr", lambda d: d["inputs"][2].pop("expr"), "kind 'custom' needs 'expr'"),
    ("expr of shard", lambda d: d["inputs"][1].update(expr=EXPR), "'expr' has no meaning"),
    ("expr op", lambda d: d["inputs"][2].update(expr={"op": "sum", "args": []}), "expected 'concat' or 'slice'"),
    ("empty concat", lambda d: d["inputs"][2].update(expr={"op": "concat", "dim": 0, "args": []}), "no 'args'"),
    ("empty slice", lambda d: d["inputs"][2]["expr"]["args"][0].update(end=0), "0 <= start < end"),
    ("slice of nothing", lambda d: d["inputs"][2]["expr"]["args"][0].pop("arg"), "found null None"),
    ("leaf keys", lambda d: d["inputs"][2].update(expr={"rank": 0}), "expected 'op', or 'rank' and 'name'"),
    ("leaf not in dist", lambda d: d["inputs"][2].update(expr={"rank": 0, "name": "v"}), "'dist' does not list"),
    ("also_equal", lambda d: d["inputs"][2].update(also_equal=[[EXPR]]), "at least two expressions"),
    ("flag", lambda d: d["inputs"][0].update(cut="yes"), "expected true or false for 'cut'"),
    ("group side", lambda d: d.update(groups={"ref": {}}), "expected 'seq' and 'dist'"),
    ("group rank", lambda d: d.update(groups={"dist": {"3": [[0, 5]]}}), "group '3' holds int 5"),
    ("claim", lambda d: d.update(claimed_outputs=[1]), "reference names"),
    ("output entry", lambda d: d["expected_outputs"].append(3), "expected_outputs[1]: expected an object"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "message"), [c[1:] for c in CHANGES], ids=[c[0] for c in CHANGES])
def test_violations_name_place_and_mend(change: Any, message: str) -> None:
    data = copy.deepcopy(VALID)
    change(data)
    with pytest.raises(RelationError) as caught:
        decode_relations(data, "relations.json")
    assert message in str(caught.value)
    assert "relations.json" in caught.value.place


def test_deep_expression_is_refused() -> None:
    expr: Any = {"rank": 0, "name": "w"}
    for _ in range(3000):
        expr = {"op": "slice", "dim": 0, "start": 0, "end": 1, "arg": expr}
    data = copy.deepcopy(VALID)
    data["inputs"][2]["expr"] = expr
    with pytest.raises(RelationError, match="nested too deeply"):
        decode_relations(data, "r")


def test_mutated_bytes_load_or_raise_input_error(tmp_path: Path) -> None:
    rng = random.Random(3)
    raw = json.dumps(VALID).encode()
    path = tmp_path / "r.json"
    for _ in range(400):
        b = bytearray(raw)
        for _ in range(rng.randint(1, 3)):
            at = rng.randrange(len(b))
            if rng.random() < 0.5:
                b[at : at + rng.randint(1, 12)] = rng.choice([b"1", b"-1", b'"w"', b"[]", b"{}", b"null", b"", b"true"])
            else:
                b[at] = rng.randrange(32, 127)
        path.write_bytes(b)
        with contextlib.suppress(InputError):
            read_relations(path)


@pytest.mark.peer_suite
def test_peer_suite_relations_survive_a_round_trip(tmp_path: Path) -> None:
    files = sorted(SUITE.glob("*/relations.json"))
    if not files:
        pytest.skip(f"no captured graphs at {SUITE} (set EMERGE_PEER_SUITE)")
    for f in files:
        relations = read_relations(f)
        write_relations(relations, tmp_path / "relations.json")
        before, after = json.loads(f.read_text()), json.loads((tmp_path / "relations.json").read_text())
        for key, value in before.items():
            if key in ("inputs", "full_inputs", "expected_outputs", "extra_outputs"):
                # empty lists and false marks say the same as absent keys
                strip = [{k: v for k, v in e.items() if v not in ([], False)} | {"dim": e.get("dim")} for e in value]
                assert [e | {"dim": e.get("dim")} for e in after.get(key, [])] == strip, (f, key)
            else:
                assert after[key] == value, (f, key)
