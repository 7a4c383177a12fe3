"""Executed counterexamples as self-contained folders: graphs, inputs and statements, and running them again.

A folder holds ``counterexample.json`` (``emerge.execution/1``: seed, sizes, output, difference, statements),
``reference.json`` and ``rank*.json`` (``emerge.graph/1``, at the sizes that were run), ``inputs.npz``, and, where these
sizes are reduced ones, the captured graphs under ``captured/``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from emerge.execute._torch import torch
from emerge.execute.collectives import CollectiveMismatch
from emerge.execute.compare import compare_values
from emerge.execute.options import Options
from emerge.execute.placement import DropoutPair, DropoutPlan, OnMesh, Placement, Relation
from emerge.execute.refute import Refutation, Witness
from emerge.execute.setup import Setup
from emerge.execute.trial import (
    Draw,
    Inputs,
    Mismatch,
    claim_values,
    compare,
    describe,
    draw_inputs,
    responses,
    run_both,
)
from emerge.graph.json_io import load_json, read_graph, write_atomically, write_graph
from emerge.util.errors import ExecutionError, InputError

SCHEMA = "emerge.execution/1"
MANIFEST = "counterexample.json"


@dataclass(frozen=True)
class Replay:
    """What running a counterexample again gave.

    Attributes:
        differs: the difference is there again.
        message: one sentence.
        mismatches: claims that differ, the worst first.
        sizes: ``captured`` or ``reduced``.
    """

    differs: bool
    message: str
    mismatches: list[Mismatch]
    sizes: str


def save(refutation: Refutation, folder: str | Path) -> Path:
    """Writes the first witness of a refutation.

    Args:
        folder: created where it does not exist.

    Returns:
        The manifest's path.

    Raises:
        InputError: the refutation has no witness, or the folder cannot be written.
    """
    import numpy

    if not refutation.witnesses:
        raise InputError(f"nothing was refuted ({refutation.outcome}), so there is no counterexample to save")
    witness, out = refutation.witnesses[0], Path(folder)
    setup = witness.setup
    captured = refutation.captured if setup.reduced else None
    try:
        out.mkdir(parents=True, exist_ok=True)
        _write_graphs(setup, out)
        if captured is not None:
            (out / "captured").mkdir(exist_ok=True)
            _write_graphs(captured, out / "captured")
        arrays = {f"reference/{k}": v.numpy() for k, v in witness.inputs.reference.items()}
        arrays |= {f"rank{r}/{k}": v.numpy() for r, vs in enumerate(witness.inputs.ranks) for k, v in vs.items()}
        numpy.savez_compressed(out / "inputs.npz", **arrays)
    except OSError as error:
        raise InputError(f"cannot write the counterexample ({error.strerror or error})", str(out)) from None
    difference = refutation.difference
    document = {
        "schema": SCHEMA,
        "kind": witness.kind,
        "message": witness.message,
        "sizes": "reduced" if setup.reduced else "captured",
        "lengths": setup.lengths,
        "draw": asdict(witness.draw),
        "output": refutation.output,
        "implementation": refutation.implementation,
        "rank": refutation.rank,
        "difference": None
        if difference is None
        else {
            "max_abs_diff": difference.max_abs_diff if difference.max_abs_diff != float("inf") else "inf",
            "index": list(difference.index),
            "reference": repr(difference.reference),
            "implementation": repr(difference.implementation),
            "tolerance": difference.tolerance,
        },
        "setup": _encode_setup(setup),
        "captured": None if captured is None else _encode_setup(captured),
    }
    write_atomically(out / MANIFEST, json.dumps(document, indent=1) + "\n", InputError)
    return out / MANIFEST


def load(folder: str | Path, full: bool = False) -> tuple[dict[str, Any], Setup, Draw]:
    """The manifest, the pair (at captured sizes when ``full``) and what was drawn.

    Raises:
        InputError: the folder is incomplete or malformed, or holds no captured graphs.
    """
    path = Path(folder)
    document = load_json(path / MANIFEST, InputError)
    try:
        if document["schema"] != SCHEMA:
            raise InputError(f"expected schema {SCHEMA}, found {document['schema']!r}", str(path / MANIFEST))
        reduced = document["sizes"] == "reduced"
        if full and reduced and document["captured"] is None:
            raise InputError(
                "the captured graphs were not saved, only the reduced ones; replay without --full", str(path)
            )
        wanted = document["captured"] if full and reduced else document["setup"]
        where = path / "captured" if full and reduced else path
        setup = _decode_setup(wanted, where, reduced and not full)
        return document, setup, Draw(**document["draw"])
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise InputError(
            f"the counterexample is malformed ({type(error).__name__}: {error})", str(path / MANIFEST)
        ) from None


def replay(folder: str | Path, full: bool = False, *, device: str = "auto", memory_bytes: int | None = None) -> Replay:
    """Runs a saved counterexample again.

    Args:
        full: at captured sizes, with inputs drawn again from the seed.
        memory_bytes: limit of the estimated peak; None = no limit.

    Raises:
        InputError: see :func:`load`.
        ExecutionError, BudgetExceeded: it does not run.
    """
    document, setup, draw = load(folder, full)
    sizes = "captured" if full else document["sizes"]
    inputs = draw_inputs(setup, draw) if full and document["sizes"] == "reduced" else _read_inputs(Path(folder), setup)
    options = Options(device=device, memory_limit=memory_bytes)
    try:
        run = run_both(setup, inputs, draw, options)
    except CollectiveMismatch as error:
        return Replay(True, error.message, [], sizes)
    except ExecutionError as error:
        if document["kind"] == "OUT_OF_RANGE" and "out of" in error.message:
            return Replay(True, str(error), [], sizes)
        raise
    if document["kind"] == "UNINITIALISED":
        other = replace(draw, fill=draw.fill + 1)
        again = claim_values(setup, run_both(setup, inputs, other, options))
        found = [
            Mismatch(
                relation.number, relation.reference, str(relation.implementation[rank]), rank, difference, relation.text
            )
            for key, (_, actual, relation, rank) in claim_values(setup, run).items()
            if (difference := compare_values(actual, again[key][1], 0.0)) is not None
        ]
        words = "depends on uninitialised memory again" if found else "does not depend on uninitialised memory now"
        return Replay(bool(found), words, found, sizes)
    found = compare(setup, run)
    found = compare(setup, run, responses(setup, inputs, draw, options, run)) if found else found
    if not found:
        return Replay(False, "all claimed outputs agree", [], sizes)
    return Replay(True, describe(found[0]), found, sizes)


def _write_graphs(setup: Setup, folder: Path) -> None:
    write_graph(setup.reference, folder / "reference.json")
    for rank, graph in enumerate(setup.ranks):
        write_graph(graph, folder / f"rank{rank}.json")


def _read_inputs(folder: Path, setup: Setup) -> Inputs:
    import numpy

    reference: dict[str, Any] = {}
    ranks: list[dict[str, Any]] = [{} for _ in setup.ranks]
    try:
        with numpy.load(folder / "inputs.npz", allow_pickle=False) as stored:
            for key in stored.files:
                side, _, name = key.partition("/")
                target = reference if side == "reference" else ranks[int(side.removeprefix("rank"))]
                target[name] = torch.from_numpy(stored[key])
    except (OSError, ValueError, IndexError) as error:
        raise InputError(f"inputs.npz cannot be read ({error})", str(folder)) from None
    return Inputs(reference, ranks)


def _encode_setup(setup: Setup) -> dict[str, Any]:
    return {
        "ranks": len(setup.ranks),
        "bounds": setup.bounds,
        "inputs": [_encode_relation(r) for r in setup.inputs],
        "outputs": [_encode_relation(r) for r in setup.outputs],
        "dropout": [
            {
                "reference": p.reference,
                "implementation": p.implementation,
                "placement": None if p.placement is None else _encode_placement(p.placement),
                "sure": p.sure,
            }
            for p in setup.dropout.pairs
        ],
    }


def _decode_setup(data: Mapping[str, Any], folder: Path, reduced: bool) -> Setup:
    graphs = [read_graph(folder / f"rank{r}.json") for r in range(data["ranks"])]
    pairs = [
        DropoutPair(
            p["reference"],
            None if p["implementation"] is None else tuple(p["implementation"]),
            None if p["placement"] is None else _decode_placement(p["placement"]),
            p["sure"],
        )
        for p in data["dropout"]
    ]
    relations = [[_decode_relation(r) for r in data[k]] for k in ("inputs", "outputs")]
    bounds = {str(k): int(v) for k, v in data["bounds"].items()}
    return Setup(
        read_graph(folder / "reference.json"),
        graphs,
        relations[0],
        relations[1],
        DropoutPlan(pairs),
        reduced,
        bounds=bounds,
    )


def _encode_placement(p: Placement) -> dict[str, Any]:
    to = [{"step": t.step, "size": t.size} if isinstance(t, OnMesh) else t for t in p.to]
    return {"reference": p.reference, "implementation": p.implementation, "to": to}


def _decode_placement(data: Mapping[str, Any]) -> Placement:
    to = tuple(OnMesh(t["step"], t["size"]) if isinstance(t, dict) else int(t) for t in data["to"])
    return Placement(tuple(map(tuple, data["reference"])), tuple(map(tuple, data["implementation"])), to)


def _encode_relation(r: Relation) -> dict[str, Any]:
    return {
        "number": r.number,
        "reference": r.reference,
        "implementation": r.implementation,
        "placement": _encode_placement(r.placement),
        "reference_cuts": r.reference_cuts,
        "implementation_cuts": r.implementation_cuts,
        "text": r.text,
    }


def _decode_relation(data: Mapping[str, Any]) -> Relation:
    return Relation(
        data["number"],
        data["reference"],
        tuple(data["implementation"]),
        _decode_placement(data["placement"]),
        tuple((d, a, b) for d, a, b in data["reference_cuts"]),
        tuple((d, a, b) for d, a, b in data["implementation_cuts"]),
        data["text"],
    )


__all__ = ["MANIFEST", "SCHEMA", "Replay", "Witness", "load", "replay", "save"]
