"""Finds the graphs of one side of a comparison, or of a whole case directory, on disk."""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass
from pathlib import Path

from emerge.graph.fx_text import read_fx_text
from emerge.graph.json_io import Violation, decode_groups, read_graph
from emerge.graph.model import Graph
from emerge.graph.relations import RelationEntry, Relations
from emerge.graph.relations_io import read_relations
from emerge.util.errors import GraphError, RelationError

#: Endings of files that hold printed FX text; everything else is read as JSON.
TEXT_SUFFIXES = (".txt", ".py", ".log")
RELATIONS_FILE = "relations.json"

_RANK_FILE = re.compile(r"rank(0|[1-9]\d{0,8})(\.json|\.txt|\.py|\.log)")
_SEQ_FILE = re.compile(r"seq(\.json|\.txt|\.py|\.log)")


@dataclass(slots=True)
class Case:
    """A case directory: the reference graph, the implementation's rank graphs in rank order, and their relations."""

    reference: Graph
    ranks: list[Graph]
    relations: Relations
    path: str = ""


def read_any(path: Path) -> Graph:
    """One graph file, JSON or printed FX text by its ending.

    Raises:
        GraphError: the file cannot be read or is malformed.
    """
    return read_fx_text(path) if path.suffix in TEXT_SUFFIXES else read_graph(path)


def load_side(spec: str | Path) -> list[Graph]:
    """The graphs of one side, in rank order (one graph for a sequential side).

    Args:
        spec: a graph file; or a directory with ``seq.json``, with ``rank0.json`` .. ``rankN-1.json``, or with exactly
            one other graph file such as ``graph.json``. FX text (``.txt``, ``.py``, ``.log``) is accepted likewise.
            A single file of an SPMD program (``"spmd": true``) stands for all its ranks.

    Raises:
        GraphError: nothing or too much was found, a rank is missing, or a file contradicts its name or the others.
    """
    path = Path(spec)
    if path.is_dir():
        names = _names(path)
        ranks, seqs = _rank_files(path, names), [n for n in names if _SEQ_FILE.fullmatch(n)]
        if ranks and seqs:
            raise GraphError(
                f"expected one side, found both {seqs[0]} and rank files (a case directory); name {seqs[0]} itself, "
                "or compare the case directory alone",
                str(path),
            )
        if ranks:
            return _load_ranks(path, ranks)
        others = seqs or [
            n for n in names if n != RELATIONS_FILE and (n.endswith(".json") or n.endswith(TEXT_SUFFIXES))
        ]
        if len(others) != 1:
            found = ", ".join(others[:8]) or "no graph file"
            raise GraphError(
                f"expected seq.json, rank0.json.. or one graph file, found {found}; name the file itself", str(path)
            )
        path = path / others[0]
    return _whole_program(read_any(path))


def _names(path: Path) -> list[str]:
    try:
        return sorted(p.name for p in path.iterdir() if p.is_file())
    except OSError as e:
        raise GraphError(f"cannot read the directory ({e.strerror or e}); check its permissions", str(path)) from None


def _whole_program(graph: Graph) -> list[Graph]:
    """A single file must hold the whole program: one rank, or one SPMD program for all ranks."""
    if graph.world_size == 1:
        return [graph]
    if graph.spmd:
        return [dataclasses.replace(graph, rank=r) for r in range(graph.world_size)]
    raise GraphError(
        f"expected all {graph.world_size} ranks (its world_size), found this one of rank {graph.rank}; "
        "give the directory that holds the rank files",
        graph.path,
    )


def _rank_files(path: Path, names: list[str]) -> dict[int, Path]:
    out: dict[int, Path] = {}
    for name in names:
        found = _RANK_FILE.fullmatch(name)
        if found is None:
            if re.match(r"rank\d+\.(json|txt|py|log)$", name):
                raise GraphError(
                    f"expected rank files named rank0.json, rank1.json, .., found {name}; rename it", str(path)
                )
            continue
        rank = int(found.group(1))
        if rank in out:
            raise GraphError(
                f"expected one file per rank, found {out[rank].name} and {name}; remove one of them", str(path)
            )
        out[rank] = path / name
    return dict(sorted(out.items()))


def _load_ranks(path: Path, files: dict[int, Path]) -> list[Graph]:
    count = max(files) + 1
    if len(files) != count:
        missing = next(r for r in range(count) if r not in files)
        raise GraphError(
            f"expected rank0.json to rank{count - 1}.json, found {len(files)} of them; rank{missing}.json is missing",
            str(path),
        )
    graphs = []
    for rank, file in files.items():
        graph = read_any(file)
        if file.suffix in TEXT_SUFFIXES:  # printed text does not say which rank it is
            graph.rank, graph.world_size = rank, count
        if graph.world_size < count:
            raise GraphError(
                f"its world_size is {graph.world_size}, but {files[count - 1].name} lies beside it; "
                "correct world_size or remove the file",
                str(file),
            )
        if graph.rank != rank:
            raise GraphError(
                f"its rank is {graph.rank}, but the file is named {file.name}; correct one of them", str(file)
            )
        graphs.append(graph)
    first = graphs[0]
    for graph in graphs:
        if graph.world_size != first.world_size:
            raise GraphError(
                f"its world_size is {graph.world_size}, but that of {first.path} is {first.world_size}; correct one",
                graph.path,
            )
    if first.world_size != count:
        raise GraphError(
            f"expected rank0.json to rank{first.world_size - 1}.json (world_size is {first.world_size}), "
            f"found {count} of them; rank{count}.json is missing",
            str(path),
        )
    return graphs


def load_case(directory: str | Path) -> Case:
    """A case directory: ``seq.json``, ``rank0.json`` .. ``rankN-1.json`` and ``relations.json``.

    Process groups of the relation file are filled into graphs that have none of their own.

    Raises:
        GraphError: a graph file is missing, malformed, or contradicts the others.
        RelationError: the relation file is malformed, is for another number of ranks, or names unknown tensors.
    """
    path = Path(directory)
    if not path.is_dir():
        raise GraphError("expected a case directory, found none; check the path", str(path))
    names = _names(path)
    if RELATIONS_FILE not in names:
        raise RelationError(f"expected {RELATIONS_FILE} in a case directory, found none; add it", str(path))
    relations = read_relations(path / RELATIONS_FILE)
    seqs = [n for n in names if _SEQ_FILE.fullmatch(n)]
    if len(seqs) != 1:
        raise GraphError(f"expected one seq.json, found {', '.join(seqs) or 'none'}; add it or remove one", str(path))
    files = _rank_files(path, names)
    if not files:
        raise GraphError(
            "expected rank0.json in a case directory, found none; add the implementation's graphs", str(path)
        )
    reference, ranks = read_any(path / seqs[0]), _load_ranks(path, files)
    if reference.world_size != 1:
        raise GraphError(
            f"expected a reference of one rank, found world_size {reference.world_size}; correct it", reference.path
        )
    if relations.world_size != len(ranks):
        raise RelationError(
            f"world_size is {relations.world_size}, but {path} has {len(ranks)} rank files; correct it or add files",
            relations.path,
        )
    _check_names(relations, reference, ranks)
    for side, graphs in (("seq", [reference]), ("dist", ranks)):
        groups = relations.groups.get(side, {})
        for graph in graphs:
            if groups and not graph.groups:
                graph.groups = _checked_groups(groups, graph.world_size, relations.path, side)
    return Case(reference, ranks, relations, str(path))


def _checked_groups(
    groups: dict[str, list[list[int]]], world_size: int, path: str, side: str
) -> dict[str, list[list[int]]]:
    try:
        return decode_groups(groups, world_size)
    except Violation as e:
        raise RelationError(str(e), f"{path}: groups[{side!r}]") from None


def _check_names(relations: Relations, reference: Graph, ranks: list[Graph]) -> None:
    """Every tensor a relation names must exist in the graph it is said to be in."""

    def names(graph: Graph) -> set[str]:
        return {i.name for i in graph.inputs} | {n.name for n in graph.nodes}

    seq, dist = names(reference), [names(g) for g in ranks]
    entries: list[RelationEntry] = [
        *relations.inputs, *(relations.full_inputs or ()), *relations.expected_outputs, *relations.extra_outputs,
    ]  # fmt: skip
    for entry in entries:
        if entry.seq not in seq:
            raise RelationError(
                f"it names {entry.seq!r}, which {reference.path} does not have; correct the name", entry.place
            )
        for leaf in entry.dist:
            if leaf.name not in dist[leaf.rank]:
                raise RelationError(
                    f"it names {leaf.name!r}, which {ranks[leaf.rank].path} does not have; correct the name",
                    entry.place,
                )
    for name in relations.claimed_outputs:
        if name not in seq:
            raise RelationError(
                f"'claimed_outputs' names {name!r}, which {reference.path} does not have; correct the name",
                relations.path,
            )
