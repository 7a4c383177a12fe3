"""emerge.graph/1: exact round trips, and one test per way a file can be wrong."""

from __future__ import annotations

import contextlib
import copy
import json
import math
import os
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from emerge.graph.json_io import decode_graph, encode_graph, read_graph, write_graph
from emerge.graph.model import DType, Graph, Input, Node, Ref, TensorType, TypedConst
from emerge.util.errors import GraphError, InputError

SUITE = Path(os.environ.get("EMERGE_PEER_SUITE", Path(__file__).parents[2] / "../shared/peer_suite"))

VALID: dict[str, Any] = {
    "schema": "emerge.graph/1",
    "name": "toy/rank0",
    "rank": 0,
    "world_size": 2,
    "format": "fx-aten",
    "direction": "fw",
    "mesh": {"tp": 2},
    "groups": {"7": [[0, 1]]},
    "inputs": [
        {"name": "x", "dtype": "float32", "shape": [4, 6], "label": "tokens", "note": "kept"},
        {"name": "w", "dtype": "bfloat16", "shape": [6, 2], "placement": [{"shard": 1}]},
        {"name": "c", "dtype": "float32", "shape": [], "const": {"float": "nan"}},
    ],
    "nodes": [
        {
            "name": "split", "op": "aten.split.Tensor", "args": [{"ref": "x"}, 2], "kwargs": {}, "dtype": None,
            "shape": None, "tuple": True, "elements": {"0": {"dtype": "float32", "shape": [2, 6]}},
        },
        {
            "name": "getitem", "op": "operator.getitem", "args": [{"ref": "split"}, 0], "kwargs": {},
            "dtype": "float32", "shape": [2, 6], "stack": 0,
        },
        {
            "name": "full", "op": "aten.full.default", "args": [[2, 6], {"float": "-inf"}],
            "kwargs": {"dtype": {"dtype": "float32"}, "device": {"device": "cuda:0"}, "pin": False},
            "dtype": "float32", "shape": [2, 6], "source": "m.py:3", "code": "y = z", "module": "m", "phase": "forward",
        },
        {
            "name": "sym", "op": "aten.sym_size.int", "args": [{"ref": "x"}, 0], "kwargs": {}, "dtype": None,
            "shape": None, "scalar": True, "val": "u0",
        },
        {
            "name": "add", "op": "aten.add.Tensor", "args": [{"ref": "getitem"}, {"ref": "full"}],
            "kwargs": {"alpha": -0.0}, "dtype": "float32", "shape": ["u0", 6],
        },
        {"name": "k", "op": "get_attr", "args": ["k"], "kwargs": {}, "dtype": "int64", "shape": [], "const": 0},
    ],
    "outputs": ["add", None, "x"],
    "stacks": [["m.py:1", "m.py:3"]],
    "origin": {"file": "somewhere"},
}  # fmt: skip


def variant(change: Any) -> dict[str, Any]:
    data = copy.deepcopy(VALID)
    change(data)
    return data


def refuse(data: Any) -> str:
    with pytest.raises(GraphError) as caught:
        decode_graph(data, "rank0.json")
    assert "rank0.json" in caught.value.place
    return str(caught.value)


def test_every_field_arrives() -> None:
    g = decode_graph(VALID, "rank0.json")
    assert (g.rank, g.world_size, g.mesh, g.groups) == (0, 2, {"tp": 2}, {"7": [[0, 1]]})
    assert g.inputs[0].label == "tokens"
    assert g.inputs[0].extra == {"note": "kept"}
    assert math.isnan(g.inputs[2].const)
    split, getitem, full, sym, add, k = g.nodes
    assert split.is_tuple
    assert split.elements == {0: TensorType("float32", (2, 6))}
    assert getitem.args == [Ref("split"), 0]
    assert full.args == [[2, 6], -math.inf]
    assert full.kwargs == {"dtype": DType("float32"), "device": TypedConst("device", "cuda:0"), "pin": False}
    assert sym.is_scalar
    assert sym.extra == {"val": "u0"}
    assert add.shape == ("u0", 6)
    assert math.copysign(1, add.kwargs["alpha"]) == -1  # type: ignore[arg-type]
    assert k.has_const
    assert k.const == 0
    assert g.outputs == ["add", None, "x"]
    assert g.extra == {"origin": {"file": "somewhere"}}


def test_round_trip_is_exact(tmp_path: Path) -> None:
    path = tmp_path / "g.json"
    write_graph(decode_graph(VALID, "x"), path)
    assert json.loads(path.read_text()) == VALID
    assert sum(line.startswith('{"name":"add"') for line in path.read_text().splitlines()) == 1
    again = read_graph(path)
    write_graph(again, tmp_path / "h.json")
    assert (tmp_path / "h.json").read_text() == path.read_text()
    assert [p.name for p in sorted(tmp_path.iterdir())] == ["g.json", "h.json"]  # no temporary files left


def test_missing_optional_keys_have_documented_defaults() -> None:
    g = decode_graph({"inputs": [], "nodes": [], "outputs": []}, "dir/seq.json")
    assert (g.name, g.rank, g.world_size, g.format, g.direction) == ("seq", 0, 1, "fx-aten", "fw")


CHANGES: list[tuple[str, Any, str]] = [
    ("schema", lambda d: d.update(schema="emerge.graph/9"), "expected schema 'emerge.graph/1'"),
    ("inputs missing", lambda d: d.pop("inputs"), "'inputs' is missing"),
    ("nodes not a list", lambda d: d.update(nodes={}), "expected a list for 'nodes'"),
    ("outputs missing", lambda d: d.pop("outputs"), "'outputs' is missing"),
    ("rank outside", lambda d: d.update(rank=2), "rank 2 and world_size 2"),
    ("rank bool", lambda d: d.update(rank=True), "expected an integer for 'rank'"),
    ("format", lambda d: d.update(format="onnx"), "fx-aten, hlo"),
    ("direction", lambda d: d.update(direction="up"), "fw, bw, both"),
    ("mesh product", lambda d: d.update(mesh={"tp": 1}), "'mesh' {'tp': 1} has 1 devices"),
    ("group rank", lambda d: d.update(groups={"7": [[0, 2]]}), "group '7' holds int 2"),
    ("group overlap", lambda d: d.update(groups={"7": [[0, 1], [1]]}), "each at most once"),
    ("input dtype", lambda d: d["inputs"][0].update(dtype="flot32"), "did you mean 'float32'?"),
    ("input no shape", lambda d: d["inputs"][1].pop("shape"), "input 'w': the key 'shape' is missing"),
    ("input twice", lambda d: d["inputs"][1].update(name="x"), "input 'x': the name 'x' is used twice"),
    ("node like input", lambda d: d["nodes"][2].update(name="x"), "node 'x': the name 'x' is used twice"),
    ("negative size", lambda d: d["nodes"][2].update(shape=[2, -1]), "node 'full': expected sizes >= 0"),
    ("bool size", lambda d: d["nodes"][2].update(shape=[True]), "found bool True"),
    ("float size", lambda d: d["nodes"][2].update(shape=[2.0]), "found float 2.0"),
    ("digit string size", lambda d: d["nodes"][2].update(shape=["16"]), "found string '16'"),
    ("no dtype", lambda d: d["nodes"][2].update(dtype=None), "it has no dtype"),
    ("unknown dtype", lambda d: d["nodes"][2].update(dtype="decimal"), "known: bool, uint8"),
    ("unknown dtype constant", lambda d: d["nodes"][2].update(args=[{"dtype": "qint"}]), "expected a known dtype"),
    ("no op", lambda d: d["nodes"][2].pop("op"), "node 'full': the key 'op' is missing"),
    ("no args", lambda d: d["nodes"][2].pop("args"), "the key 'args' is missing"),
    ("args not a list", lambda d: d["nodes"][2].update(args="x"), "expected a list for 'args'"),
    ("dangling", lambda d: d["nodes"][4]["args"].append({"ref": "fill"}), "'fill', which does not exist (did you"),
    ("dangling in kwargs", lambda d: d["nodes"][4]["kwargs"].update(o=[{"ref": "nope"}]), "refers to 'nope'"),
    ("later node", lambda d: d["nodes"][1]["args"].append({"ref": "add"}), "'add', which comes later (a cycle"),
    ("itself", lambda d: d["nodes"][4]["args"].append({"ref": "add"}), "it refers to itself"),
    ("bad output", lambda d: d["outputs"].append("ad"), "outputs[3]: expected null or the name"),
    ("bad typed constant", lambda d: d["nodes"][2].update(args=[{"float": "1.5"}]), "expected one of {'ref'}"),
    ("two keys", lambda d: d["nodes"][2].update(args=[{"ref": "x", "device": "cpu"}]), "expected one of {'ref'}"),
    ("ref in const", lambda d: d["nodes"][5].update(const={"ref": "x"}), "node 'k': expected one of"),
    ("tuple with type", lambda d: d["nodes"][0].update(dtype="float32"), "marked 'tuple'"),
    ("elements alone", lambda d: d["nodes"][0].update(tuple=False, scalar=True), "not marked \"tuple\""),
    ("element key", lambda d: d["nodes"][0].update(elements={"-1": {}}), "'elements', found '-1'"),
    ("getitem outside", lambda d: d["nodes"][1]["args"].__setitem__(1, 1), "it takes output 1 of 'split'"),
    ("getitem type", lambda d: d["nodes"][1].update(shape=[6, 2]), "contradicts element 0 of 'split'"),
    ("stack outside", lambda d: d["nodes"][1].update(stack=1), "'stack' is 1 but the file has 1 stacks"),
    ("source kind", lambda d: d["nodes"][1].update(source=3), "expected a string for 'source'"),
    ("node not an object", lambda d: d["nodes"].insert(0, 5), "nodes[0]: expected an object"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "message"), [c[1:] for c in CHANGES], ids=[c[0] for c in CHANGES])
def test_violations_name_place_and_mend(change: Any, message: str) -> None:
    text = refuse(variant(change))
    assert message in text
    assert ";" in text  # the mend


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"inputs": [],\n "nodes": [', "g.json:2: expected JSON"),
        ("", "g.json:1"),
        ("[1, 2]", "expected an object at the top, found list"),
        ('{"inputs": [], "inputs": [], "nodes": [], "outputs": []}', "the key 'inputs' twice"),
        ('{"inputs": [], "nodes": [], "outputs": [], "z": NaN}', '{"float": "inf"}'),
        ("[" * 100_000, "nested too deeply"),
        ('{"world_size": ' + "9" * 5000 + "}", "expected plain JSON"),
        ('{"inputs": [{"name":"c","dtype":"float32","shape":[],"const":1e999}], "nodes": [], "outputs": []}', "finite"),
    ],
)
def test_broken_text(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "g.json"
    path.write_text(text)
    with pytest.raises(GraphError) as caught:
        read_graph(path)
    assert message in str(caught.value)


def test_unreadable_files(tmp_path: Path) -> None:
    with pytest.raises(GraphError, match="found nothing; check the path"):
        read_graph(tmp_path / "none.json")
    with pytest.raises(GraphError, match="cannot read"):
        read_graph(tmp_path)
    (tmp_path / "b.json").write_bytes(b'{"name": "\xff"}')
    with pytest.raises(GraphError, match="expected UTF-8"):
        read_graph(tmp_path / "b.json")


def test_write_refuses_what_json_cannot_say(tmp_path: Path) -> None:
    graph = Graph("g", [], [Node("n", "op", [object()], dtype="float32", shape=())], ["n"])  # type: ignore[list-item]
    with pytest.raises(GraphError, match="node 'n'"):
        write_graph(graph, tmp_path / "g.json")
    with pytest.raises(GraphError, match="no JSON form"):
        write_graph(Graph("g", [Input("x", "int64", (), extra={"v": math.inf})], [], []), tmp_path / "g.json")
    with pytest.raises(GraphError, match="cannot write"):
        write_graph(Graph("g", [], [], []), tmp_path / "missing" / "g.json")
    assert not list(tmp_path.iterdir())


def test_a_failed_write_keeps_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "g.json"
    write_graph(decode_graph(VALID, "x"), path)
    before = path.read_text()

    def fail(*_: Any) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(GraphError, match="disk full"):
        write_graph(Graph("other", [], [], []), path)
    assert path.read_text() == before
    assert [p.name for p in tmp_path.iterdir()] == ["g.json"]


JUNK = st.one_of(
    st.none(), st.booleans(), st.integers(-3, 2**70), st.floats(), st.text(max_size=4),
    st.sampled_from(["x", "add", "getitem", "float32", {}, [], [[]], {"ref": "x"}, {"ref": "add"}, {"0": {}}, "u0"]),
)  # fmt: skip


def spots(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path] + [s for k, v in items for s in spots(v, (*path, k))]


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_mutated_documents_load_or_raise_input_error(data: st.DataObject) -> None:
    document = copy.deepcopy(VALID)
    for _ in range(data.draw(st.integers(1, 3))):
        spot = data.draw(st.sampled_from(spots(document)[1:]))
        parent = document
        for k in spot[:-1]:
            parent = parent[k]
        action = data.draw(st.sampled_from(["set", "delete", "rename"]))
        if action == "set":
            parent[spot[-1]] = copy.deepcopy(data.draw(JUNK))
        elif action == "delete" and len(spots(document)) > 2:
            del parent[spot[-1]]
        elif isinstance(parent, dict):
            parent[data.draw(st.text(max_size=3))] = parent.pop(spot[-1])
    try:
        graph = decode_graph(document, "f.json")
    except InputError:
        return
    assert encode_graph(decode_graph(encode_graph(graph), "f.json")) == encode_graph(graph)


def test_mutated_bytes_load_or_raise_input_error(tmp_path: Path) -> None:
    rng = random.Random(7)
    raw = json.dumps(VALID).encode()
    path = tmp_path / "f.json"
    for _ in range(400):
        b = bytearray(raw)
        for _ in range(rng.randint(1, 4)):
            at = rng.randrange(len(b))
            match rng.randrange(4):
                case 0:
                    b[at] = rng.randrange(256)
                case 1:
                    del b[at : at + rng.randint(1, 20)]
                case 2:
                    b[at:at] = rng.choice([b"[", b"}", b'"', b"null", b"-", b"1e400", b"\\ud800", b","])
                case _:
                    del b[at:]
            if not b:
                break
        path.write_bytes(b)
        with contextlib.suppress(InputError):
            read_graph(path)


@pytest.mark.peer_suite
def test_peer_suite_round_trips(tmp_path: Path) -> None:
    files = sorted(p for p in SUITE.glob("*/*.json") if p.name != "relations.json")
    if not files:
        pytest.skip(f"no captured graphs at {SUITE} (set EMERGE_PEER_SUITE)")
    for f in files:
        graph = read_graph(f)
        write_graph(graph, tmp_path / "g.json")
        assert json.loads((tmp_path / "g.json").read_text()) == json.loads(f.read_text()), f
        again = read_graph(tmp_path / "g.json")
        again.path = graph.path
        assert again == graph, f


def test_the_documented_example_is_a_valid_file() -> None:
    text = (Path(__file__).parents[2] / "docs" / "graph-format.md").read_text()
    graph = decode_graph(json.loads(text.split("```json\n")[1].split("```")[0]), "docs")
    assert [n.name for n in graph.nodes] == ["mm", "all_reduce"]
