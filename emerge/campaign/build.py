"""From the graphs and relations of a pair to a problem for the derivation, with what has to be said about it."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path

from emerge.campaign.config import PairSpec, RelationSpec
from emerge.capture.relations import placement_relations
from emerge.capture.source import SourceSpec, load_spec
from emerge.facts.families import FamilyGraph, FamilyInput, mesh_from, zip_families
from emerge.facts.mesh import Mesh
from emerge.facts.shapes import check_graph
from emerge.graph.json_io import Violation, decode_groups
from emerge.graph.model import Graph
from emerge.graph.relations import RelationEntry, Relations
from emerge.graph.relations_io import read_relations
from emerge.graph.source import load_case, load_side
from emerge.relate.consistency import check_consistent, check_covered
from emerge.relate.derive import Problem
from emerge.relate.expected import Ambiguity, OutputPair, default_reading, pair_of, pair_outputs
from emerge.relate.notation import (
    TensorSpec,
    alignment_statement,
    canonical_text,
    closest,
    parse_piece,
    placements_text,
)
from emerge.relate.statement import Statement, entry_statements
from emerge.util.errors import ConfigError, GraphError, RelationError
from emerge.verdict.types import InputRelation

#: Names that capture gives to inputs by position; they say nothing about which tensor it is.
_POSITIONAL = re.compile(r"(primals|arg|args|getitem|input|p|b|c|tangents|param|parameter|x)[._]?\d+([._]\d+)*")


@dataclass
class Prepared:
    """A pair ready for the derivation.

    Attributes:
        outputs_not_claimed: reference outputs that nothing is claimed about.
        unmatched: inputs without a relation, per side.
        graph_problems: what did not fit between the rank graphs.
        seconds: ``capture`` (reading the graphs) and ``zip``.
    """

    problem: Problem
    input_relations: list[InputRelation]
    ambiguities: list[Ambiguity] = field(default_factory=list)
    outputs_not_claimed: int = 0
    unmatched: dict[str, list[str]] = field(default_factory=dict)
    graph_problems: list[str] = field(default_factory=list)
    stats: dict[str, int] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)


def prepare(spec: PairSpec) -> Prepared:
    """Reads and checks the graphs and relations of a pair.

    Raises:
        GraphError, RelationError, ConfigError: whatever is malformed or contradicts itself.
    """
    started = time.perf_counter()
    relations: Relations | None = None
    if spec.case is not None:
        case = load_case(spec.case)
        reference, ranks, relations = case.reference, case.ranks, case.relations
    else:
        reference, ranks = _sides(spec)
        if spec.relations is not None and not isinstance(spec.relations, (str, list)):
            relations = read_relations(spec.relations)
            _fit_relations(relations, reference, ranks)
    for graph in (reference, *ranks):
        check_graph(graph)
    read = time.perf_counter()
    mesh = _mesh(spec, ranks)
    builder = _Builder(spec, zip_families([reference]), zip_families(ranks, mesh.axes), mesh)
    prepared = builder.run(relations)
    prepared.seconds = {"capture": read - started, "zip": time.perf_counter() - read}
    prepared.stats = {
        "reference_nodes": len(reference.nodes),
        "implementation_nodes": sum(len(g.nodes) for g in ranks),
        "ranks": len(ranks),
    }
    return prepared


def _sides(spec: PairSpec) -> tuple[Graph, list[Graph]]:
    assert spec.reference is not None
    assert spec.implementation is not None
    reference = _load(spec.reference)
    if len(reference) != 1:
        raise GraphError(
            f"expected a reference of one rank, found {len(reference)} ranks; "
            "the distributed side is the implementation",
            str(spec.reference),
        )
    return reference[0], _load(spec.implementation)


def _load(source: Path | SourceSpec | list[Graph]) -> list[Graph]:
    """The graphs of one side, read or captured; captures tell their progress on standard error."""
    if isinstance(source, list):
        return source
    if isinstance(source, Path):
        return load_side(source)
    return load_spec(source, progress=lambda line: print(line, file=sys.stderr, flush=True))


def _mesh(spec: PairSpec, ranks: list[Graph]) -> Mesh:
    given = spec.mesh
    if given is None:
        given = ranks[0].mesh or None
        if any(g.mesh != ranks[0].mesh for g in ranks):
            raise GraphError(
                "its mesh differs from that of rank 0; correct one of them",
                next(g.path for g in ranks if g.mesh != ranks[0].mesh),
            )
    try:
        return Mesh(mesh_from(len(ranks), given))
    except ConfigError as e:
        raise ConfigError(e.message, spec.place or e.place) from None


def _fit_relations(relations: Relations, reference: Graph, ranks: list[Graph]) -> None:
    """A relation file given beside the graphs must be for as many ranks; its process groups fill in missing ones."""
    if relations.world_size != len(ranks):
        raise RelationError(
            f"world_size is {relations.world_size}, but the implementation has {len(ranks)} ranks; correct it",
            relations.path,
        )
    for side, graphs in (("seq", [reference]), ("dist", ranks)):
        groups = relations.groups.get(side, {})
        for graph in graphs:
            if groups and not graph.groups:
                try:
                    graph.groups = decode_groups(groups, graph.world_size)
                except Violation as e:
                    raise RelationError(str(e), f"{relations.path}: groups[{side!r}]") from None


class _Side:
    """The tensors of one side by name and by label."""

    def __init__(self, graph: FamilyGraph, what: str) -> None:
        self.graph, self.what = graph, what
        self.types = graph.types()
        self.labels: dict[str, list[str]] = {}
        for i in graph.inputs:
            if i.label:
                self.labels.setdefault(i.label, []).append(i.name)

    def spec(self, name: str) -> TensorSpec:
        t = self.types[name]
        return TensorSpec(name, t.shape, t.dtype)

    def inputs(self) -> list[FamilyInput]:
        return self.graph.inputs

    def constants(self) -> dict[str, set[str]]:
        """What the files say about the values of inputs: constants and digests of content, of all ranks."""
        found: dict[str, set[str]] = {}
        for rank, graph in enumerate(self.graph.graphs):
            for item in graph.inputs:
                said = found.setdefault(self.graph.family_of(rank, item.name), set())
                if item.const is not None:
                    said.add(f"the constant {item.const!r}")
                if item.extra.get("digest") is not None:
                    said.add(f"content with digest {item.extra['digest']}")
        return found

    def find(self, name: str, place: str) -> TensorSpec:
        """A tensor by label, else by name.

        Raises:
            RelationError: there is none, or the label names several.
        """
        found = self.labels.get(name, [])
        if len(found) > 1:
            raise RelationError(
                f"the label {name!r} names {', '.join(repr(f) for f in found)} of the {self.what}; write the name",
                place,
            )
        if not found and name in self.types:
            found = [name]
        if not found:
            known = [
                *self.labels,
                *(i.name for i in self.graph.inputs),
                *(o.name for o in self.graph.outputs if o.name),
            ]
            raise RelationError(f"the {self.what} has no tensor {name!r}; {closest(name, known)}", place)
        return self.spec(found[0])

    def matching(self, pattern: str) -> list[tuple[str, tuple[str, ...]]]:
        """Labels and input names that fit a pattern (``*`` is text without a dot), with what each ``*`` stands for."""
        regex = re.compile(
            "".join("([^.]+)" if part == "*" else re.escape(part) for part in re.split(r"(\*)", pattern))
        )
        labelled = {i.name for i in self.graph.inputs if i.label}
        names = [*self.labels, *(i.name for i in self.graph.inputs if i.name not in labelled)]
        return [(n, found.groups()) for n in names if (found := regex.fullmatch(n))]


class _Builder:
    def __init__(self, spec: PairSpec, reference: FamilyGraph, implementation: FamilyGraph, mesh: Mesh) -> None:
        self.spec, self.mesh = spec, mesh
        self.reference, self.implementation = _Side(reference, "reference"), _Side(implementation, "implementation")
        self.ambiguities: list[Ambiguity] = []

    def run(self, relations: Relations | None) -> Prepared:
        spec = self.spec
        if relations is not None:
            given = self.entries(relations.usable_inputs())
        elif spec.relations == "auto":
            given = self.auto()
        else:
            given = self.written(spec.relations if isinstance(spec.relations, list) else [])
        claims = self.claims(relations)
        shapes = {n: t.shape for n, t in self.implementation.types.items()}
        self.check_stages([*given, *claims])
        given = check_consistent(given, shapes, self.mesh)
        claims = check_consistent(claims, shapes, self.mesh, claims=True)
        self.check_constants(given)
        check_covered(claims, {n: t.shape for n, t in self.reference.types.items()})
        problem = Problem(self.reference.graph, self.implementation.graph, self.mesh, given, claims)
        claimed = {c.reference.name for c in claims} | {a.name for a in self.ambiguities if a.section == "outputs"}
        outputs = list(dict.fromkeys(o.name for o in self.reference.graph.outputs if o.name is not None))
        related = ({s.reference.name for s in given}, {s.implementation.name for s in given})
        return Prepared(
            problem,
            [InputRelation(str(s.reference), str(s.implementation), s.text, s.origin, s.place) for s in given],
            self.ambiguities,
            sum(o not in claimed for o in outputs),
            {
                "reference": [i.name for i in self.reference.inputs() if i.name not in related[0] and i.const is None],
                "implementation": [
                    i.name for i in self.implementation.inputs() if i.name not in related[1] and i.const is None
                ],
            },
            [*self.reference.graph.problems, *self.implementation.graph.problems],
        )

    def check_stages(self, statements: Iterable[Statement]) -> None:
        """What exists on one stage only cannot be split between stages.

        Raises:
            RelationError: a statement says so.
        """
        for s in statements:
            ranks = self.implementation.graph.value(s.implementation.name).ranks
            fixed = self.mesh.fixed(ranks) or {}
            split = [self.mesh.names[-1 - p.mesh.dim] for p in s.axes if p.mesh is not None and p.mesh.dim in fixed]
            if split:
                raise RelationError(
                    f"{s.implementation} exists on ranks {list(ranks)} only and cannot be split over {split[0]!r}; "
                    "correct the relation",
                    s.place,
                )

    def check_constants(self, given: Iterable[Statement]) -> None:
        """Inputs that a relation makes equal must not be different constants.

        Raises:
            RelationError: the files give them different values.
        """
        ours_of, theirs_of = self.reference.constants(), self.implementation.constants()
        for s in given:
            whole = not s.reference.cuts and not s.implementation.cuts and all(p.mesh is None for p in s.axes)
            same = whole and all(p.reference == p.implementation for p in s.axes)
            if not same:
                continue
            ours = ours_of.get(s.reference.name, set())
            theirs = theirs_of.get(s.implementation.name, set())
            if len(theirs) > 1 or (ours and theirs and ours != theirs):
                raise RelationError(
                    f"{s.reference} ~ {s.implementation} makes them equal, but the graph files give them "
                    f"{' and '.join(sorted(ours | theirs))}; drop the relation or correct the files",
                    s.place or "relations: auto",
                )

    # ---- relation files ---------------------------------------------------------------------------------------------

    def entries(self, entries: Iterable[RelationEntry]) -> list[Statement]:
        out: list[Statement] = []
        for entry in entries:
            if entry.seq not in self.reference.types:
                known = self.reference.types
                raise RelationError(
                    f"the reference has no tensor {entry.seq!r}; {closest(entry.seq, known)}", entry.place
                )
            shape = self.reference.types[entry.seq].shape
            found = entry_statements(entry, shape, self.implementation.graph, self.mesh)
            out.extend(replace(s, text=canonical_text(s.text, self.mesh, s.place)) for s in found)
        return out

    def claims(self, relations: Relations | None) -> list[Statement]:
        spec = self.spec
        if spec.outputs is not None:
            return self.output_lines(spec.outputs)
        if relations is None:
            return self.default_outputs(pair_outputs(self.reference.graph, self.implementation.graph, spec.place))
        entries = [*relations.expected_outputs, *relations.extra_outputs]
        claims = self.entries(entries)
        missing = [n for n in dict.fromkeys(relations.claimed_outputs) if n not in {e.seq for e in entries}]
        if missing:
            pairs = pair_outputs(self.reference.graph, self.implementation.graph, relations.path)
            claims += self.default_outputs([self.paired(pairs, n, relations.path) for n in missing])
        return claims

    def paired(self, pairs: list[OutputPair], name: str, place: str) -> OutputPair:
        found = pair_of(pairs, name)
        if found is None:
            outputs = [p.reference for p in pairs]
            raise RelationError(f"{name!r} is no output of the reference; {closest(name, outputs)}", place)
        return found

    def default_outputs(self, pairs: Iterable[OutputPair]) -> list[Statement]:
        out: list[Statement] = []
        for pair in pairs:
            if pair.reference not in self.reference.types or pair.implementation not in self.implementation.types:
                why = "it is not a single tensor"
                self.ambiguities.append(Ambiguity("outputs", pair.reference, pair.implementation, (), why))
                continue
            family = self.implementation.graph.value(pair.implementation)
            others = [
                o for o in self.implementation.graph.outputs if o.position == pair.position and o.name is not None
            ]
            whole = len(family.ranks) == self.mesh.ranks
            if not whole and (len(others) > 1 or not self.implementation.graph.of_stage(family.ranks)):
                why = f"its type or presence differs between ranks (found on {list(family.ranks)})"
                self.ambiguities.append(Ambiguity("outputs", pair.reference, pair.implementation, (), why))
                continue
            found = default_reading(
                "outputs",
                pair.reference,
                self.reference.spec(pair.reference),
                self.implementation.spec(pair.implementation),
                self.mesh,
                most=1,
                origin="given",
                place=self.spec.place,
                ranks=family.ranks,
            )
            self.keep(found, out)
        return out

    def keep(self, found: Statement | Ambiguity, out: list[Statement]) -> None:
        if isinstance(found, Ambiguity):
            self.ambiguities.append(found)
        else:
            out.append(found)

    # ---- written lines ----------------------------------------------------------------------------------------------

    def written(self, lines: Iterable[RelationSpec]) -> list[Statement]:
        out: list[Statement] = []
        for line in lines:
            key = str(line.key)
            if "*" not in key:
                out.append(self.line(line, key, line.of))
                continue
            if line.of is not None and line.of.count("*") != key.count("*"):
                raise RelationError(
                    f"{key!r} and {line.of!r} have different numbers of '*'; every '*' on the left stands in 'of' once",
                    line.place,
                )
            piece = parse_piece(key, line.place)
            matches = self.reference.matching(piece.name)
            if not matches:
                known = [*self.reference.labels, *(i.name for i in self.reference.inputs())]
                raise RelationError(f"no reference tensor matches {key!r}; {closest(key, known)}", line.place)
            suffix = key[len(piece.name) :] if piece.cuts else ""
            for name, parts in matches:
                of = line.of
                for part in parts:
                    of = of.replace("*", part, 1) if of is not None else None
                out.append(self.line(line, name + suffix, of))
        return out

    def line(self, line: RelationSpec, key: str, of: str | None, reference: TensorSpec | None = None,
             implementation: TensorSpec | None = None) -> Statement:  # fmt: skip
        """One statement; ``reference`` and ``implementation`` where the caller has already found them."""
        left = parse_piece(key, line.place)
        right = parse_piece(of, line.place) if of is not None else parse_piece(left.name, line.place)
        s = reference or self.reference.find(left.name, line.place)
        d = implementation or self.implementation.find(right.name, line.place)
        origin = "placement" if line.placements else "given"
        text = line.alignment or placements_text(dict(line.placements), s.shape, self.mesh, line.place)
        return alignment_statement(
            text,
            s,
            d,
            self.mesh,
            reference_cuts=left.cuts,
            implementation_cuts=right.cuts,
            origin=origin,
            place=line.place,
        )

    def output_lines(self, lines: Iterable[RelationSpec]) -> list[Statement]:
        """Lines under ``outputs:``. The key is an output's name or position."""
        ref_outputs = {o.position: o.name for o in self.reference.graph.outputs if o.name is not None}
        out = []
        for line in lines:
            key = line.key
            if isinstance(key, int):
                if key not in ref_outputs:
                    raise RelationError(
                        f"the reference has no output number {key}; it has {len(ref_outputs)}", line.place
                    )
                key = ref_outputs[key]
            piece = parse_piece(key, line.place)
            s = self.reference.find(piece.name, line.place)
            if s.name not in ref_outputs.values():
                raise RelationError(
                    f"{piece.name!r} is no output of the reference; {closest(piece.name, ref_outputs.values())}",
                    line.place,
                )
            if line.of is not None:
                out.append(self.line(line, key, line.of, s))
                continue
            pairs = pair_outputs(self.reference.graph, self.implementation.graph, line.place)
            pair = self.paired(pairs, s.name, line.place)
            d = self.implementation.spec(pair.implementation)
            out.append(self.line(line, key, None, s, d))
        return out

    # ---- auto -------------------------------------------------------------------------------------------------------

    def auto(self) -> list[Statement]:
        """Relations from recorded placements, else from names and shapes where one contiguous block reading fits."""
        out: list[Statement] = []
        placed: set[str] = set()
        reference, ranks = self.reference.graph.graphs[0], self.implementation.graph.graphs
        if any(i.placement is not None for g in ranks for i in g.inputs):
            found = placement_relations(reference, ranks)
            entries = [
                e
                for e in found.inputs
                if found.origins.get(label := e.place.removeprefix("capture: ")) == "placement"
                and not (len(self.implementation.labels.get(label, [])) > 1 and self.without_partner())
            ]
            out += [replace(s, origin="placement") for s in self.entries(entries)]
            placed = {e.seq for e in entries}
        by_name = {i.name: i for i in self.implementation.inputs()}
        for inp in self.reference.inputs():
            if inp.const is not None or inp.name in placed:
                continue
            for partner in self.partners(inp, by_name):
                self.by_name(inp, partner, out)
        for inp in self.reference.inputs():
            named = inp.label or (None if _POSITIONAL.fullmatch(inp.name) else inp.name)
            if named is None and inp.const is None and inp.name not in placed:
                why = "the capture has no label for it"
                self.ambiguities.append(Ambiguity("relations", inp.name, "?", (), why))
        return out

    def by_name(self, inp: FamilyInput, partner: FamilyInput, out: list[Statement]) -> None:
        """The relation of two inputs of one name: the recorded placement, else the one contiguous block reading."""
        label = inp.label or inp.name
        s, d = self.reference.spec(inp.name), self.implementation.spec(partner.name)
        placements = _placements(partner, self.mesh)
        if placements is not None:
            place = f"placement of {partner.name!r}"
            text = placements_text(placements, s.shape, self.mesh, place)
            out.append(alignment_statement(text, s, d, self.mesh, origin="placement", place=place))
            return
        if self.mesh.fixed(partner.ranks) is None:
            why = f"its type or presence differs between ranks (found on {list(partner.ranks)})"
            self.ambiguities.append(Ambiguity("relations", label, partner.name, (), why))
            return
        found = default_reading(
            "relations", label, s, d, self.mesh, most=None, origin="name", ranks=partner.ranks
        )  # fmt: skip
        self.keep(found, out)

    def partners(self, inp: FamilyInput, by_name: dict[str, FamilyInput]) -> list[FamilyInput]:
        """The implementation inputs of the same label, or of the same telling name.

        Stages of a pipeline may each have one: data that all of them read, or shared weights. Stages that count their
        layers from zero again use one label for different weights; then some reference inputs have no partner, and
        no repeated label is trusted.
        """
        if inp.label:
            names = self.implementation.labels.get(inp.label, [])
            found = [by_name[n] for n in names]
            ranks = [r for f in found for r in f.ranks]
            if len(found) > 1 and (len(ranks) > len(set(ranks)) or self.without_partner()):
                why = f"the label names {len(names)} implementation inputs ({', '.join(names[:4])})"
                self.ambiguities.append(Ambiguity("relations", inp.label, names[0], (), why))
                return []
            if found:
                return found
        name = inp.label or inp.name
        if _POSITIONAL.fullmatch(name) or name not in by_name:
            return []
        return [by_name[name]]

    def without_partner(self) -> bool:
        """Whether the reference has a label that the implementation does not have."""
        return any(i.label and i.label not in self.implementation.labels for i in self.reference.inputs())


def _placements(inp: FamilyInput, mesh: Mesh) -> dict[str, str] | None:
    """Placements recorded by the capture: one term per mesh axis, as a list or by name."""
    recorded = inp.placement
    if recorded is None:
        return None
    if isinstance(recorded, dict):
        return {str(a): str(p) for a, p in recorded.items()}
    if isinstance(recorded, list) and len(recorded) == len(mesh.names):
        return {a: str(p) for a, p in zip(mesh.names, recorded)}
    raise RelationError(
        f"the recorded placement {recorded!r} of {inp.name!r} does not fit the mesh {mesh.axes}; "
        "expected one term per mesh axis, capture the graph again",
    )
