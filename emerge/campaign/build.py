"""From the graphs and relations of a pair to a problem for the derivation, with what has to be said about it."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path

from emerge.campaign.config import PairSpec, RelationSpec
from emerge.capture.loading import loading_relations, output_relations, packed_alignment
from emerge.capture.relations import CaptureRelations, by_label, placement_relations
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
    return load_spec(source, progress=tell)


def tell(line: str) -> None:
    """A line of progress on standard error."""
    print(f"  {line}", file=sys.stderr, flush=True)


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
        self.padded_rows: set[str] = set()  # reference outputs whose rows end in padding, which nothing is claimed about

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
        check_covered(claims, {n: t.shape for n, t in self.reference.types.items()}, self.padded_rows)
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
            split = self.split_between_stages(s)
            if split is not None:
                ranks = self.implementation.graph.value(s.implementation.name).ranks
                raise RelationError(
                    f"{s.implementation} exists on ranks {list(ranks)} only and cannot be split over {split!r}; "
                    "correct the relation",
                    s.place,
                )

    def split_between_stages(self, s: Statement) -> str | None:
        """A mesh axis over which a statement splits what exists at one place along it only."""
        fixed = self.mesh.fixed(self.implementation.graph.value(s.implementation.name).ranks) or {}
        split = [self.mesh.names[-1 - p.mesh.dim] for p in s.axes if p.mesh is not None and p.mesh.dim in fixed]
        return split[0] if split else None

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
            if entry.kind == "aligned":
                out.append(self.aligned(entry))
                continue
            shape = self.reference.types[entry.seq].shape
            found = entry_statements(entry, shape, self.implementation.graph, self.mesh)
            out.extend(replace(s, text=canonical_text(s.text, self.mesh, s.place)) for s in found)
        return out

    def aligned(self, entry: RelationEntry) -> Statement:
        """The statement of an entry that is written in the notation."""
        graph = self.implementation.graph
        try:
            families = {graph.family_of(leaf.rank, leaf.name) for leaf in entry.dist}
        except KeyError as exc:
            raise RelationError(
                f"names {exc.args[0]!r}, which is not in the implementation; correct the name", entry.place
            ) from None
        if len(families) != 1 or {leaf.rank for leaf in entry.dist} != set(range(self.mesh.ranks)):
            raise RelationError(
                f"an alignment of {entry.seq!r} needs one tensor of every rank, of one type; correct 'dist'",
                entry.place,
            )
        assert entry.alignment is not None
        return alignment_statement(
            canonical_text(entry.alignment, self.mesh, entry.place), self.reference.spec(entry.seq),
            self.implementation.spec(families.pop()), self.mesh, reference_cuts=entry.seq_cuts,
            implementation_cuts=entry.dist_cuts, place=entry.place,
        )  # fmt: skip

    def claims(self, relations: Relations | None) -> list[Statement]:
        spec = self.spec
        if spec.outputs is not None:
            return self.output_lines(spec.outputs)
        if relations is None:
            return self.captured_outputs()
        entries = [*relations.expected_outputs, *relations.extra_outputs]
        claims = self.entries(entries)
        missing = [n for n in dict.fromkeys(relations.claimed_outputs) if n not in {e.seq for e in entries}]
        if missing:
            pairs = pair_outputs(self.reference.graph, self.implementation.graph, relations.path)
            claims += self.default_outputs([self.paired(pairs, n, relations.path) for n in missing])
        return claims

    def captured_outputs(self) -> list[Statement]:
        """Claims from what a capture says its outputs hold; the other outputs correspond by name or position."""
        reference, implementation = self.reference.graph, self.implementation.graph
        held = output_relations(reference.graphs[0], implementation.graphs, self.mesh.axes)
        out = [replace(s, origin="placement") for s in self.entries(held.inputs)]
        for name, why in held.open.items():
            self.ambiguities.append(Ambiguity("outputs", name, held.partners.get(name, name), (), why))
        done = {e.seq for e in held.inputs} | set(held.open)
        self.padded_rows = held.padded
        if all(o.name is None or o.name in done for o in reference.outputs):
            return out
        pairs = pair_outputs(reference, implementation, self.spec.place)
        return out + self.default_outputs([p for p in pairs if p.reference not in done])

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
            packed = packed_alignment(
                self.implementation.graph.graphs[0], self.reference.types[pair.reference].shape,
                self.implementation.types[pair.implementation].shape,
            )  # fmt: skip
            if packed is not None:
                s, d = self.reference.spec(pair.reference), self.implementation.spec(pair.implementation)
                out.append(alignment_statement(packed, s, d, self.mesh, origin="given", place=self.spec.place))
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
        found = self.placements()
        out = self.placed(found)
        placed = {s.reference.name for s in out}
        reference, ranks = self.reference.graph.graphs[0], self.implementation.graph.graphs
        loaded = loading_relations(reference, ranks, self.mesh.axes)
        out += [replace(s, origin="placement") for s in self.entries(loaded.inputs)]
        placed |= {e.seq for e in loaded.inputs}
        for label, why in loaded.open.items():
            self.ambiguities.append(Ambiguity("relations", label, loaded.partners.get(label, label), (), why))
        by_name = {i.name: i for i in self.implementation.inputs()}
        # What a traced loading says of a parameter is all that is known: it may hold nothing that has its name.
        traced = {
            self.implementation.graph.family_of(rank, i.name)
            for rank, g in enumerate(ranks)
            for i in g.inputs
            if i.extra.get("loaded") is not None
        }
        undecided: dict[str, Ambiguity | None] = {}
        for inp in self.reference.inputs():
            if inp.const is not None or inp.name in placed:
                continue
            before = len(self.ambiguities)
            named_alike = self.partners(inp, by_name)
            partners = [p for p in named_alike if p.name not in traced]
            if named_alike and not partners:
                if inp.name not in loaded.open:
                    why = "its loading was traced, and no part of this weight was found in it"
                    label = inp.label or inp.name
                    self.ambiguities.append(Ambiguity("relations", label, named_alike[0].name, (), why))
                continue
            if not partners:
                named = inp.label or (None if _POSITIONAL.fullmatch(inp.name) else inp.name)
                why = "the capture has no label for it"
                undecided[inp.name] = None if named else Ambiguity("relations", inp.name, "?", (), why)
                undecided[inp.name] = self.ambiguities.pop() if len(self.ambiguities) > before else undecided[inp.name]
            for partner in partners:
                reading = self.by_name(inp, partner, found)
                if isinstance(reading, Statement):
                    out.append(reading)
                elif reading is not None:
                    undecided[inp.name] = reading
        return out + self.by_values(undecided, {s.implementation.name for s in out} | traced)

    def by_values(self, undecided: dict[str, Ambiguity | None], related: set[str]) -> list[Statement]:
        """Relations from the values of weights, where both captures carry them; what stays open is noted."""
        graphs = self.implementation.graph.graphs
        kept = [{i.name: i.values for i in g.inputs if i.values is not None} for g in graphs]
        reference = {
            i.name: i.values
            for i in self.reference.graph.graphs[0].inputs
            if i.name in undecided and i.values is not None
        }
        implementation = {}
        for f in self.implementation.inputs():
            fixed = self.mesh.fixed(f.ranks)
            if fixed is None or f.name in related or f.const is not None:
                continue
            if all(n in kept[r] for r, n in f.members.items()):  # other stages are taken to hold copies
                homes = [self.mesh.home(r, fixed) for r in range(self.mesh.ranks)]
                implementation[f.name] = [kept[r][f.members[r]] for r in homes]
        decided: list[Statement] = []
        if reference and implementation:
            from emerge.relate.by_values import value_statements

            decided, doubtful = value_statements(reference, implementation, self.mesh)
            decided = [s for s in decided if self.split_between_stages(s) is None]
            labels = {
                i.name: i.label or i.name for side in (self.reference, self.implementation) for i in side.inputs()
            }
            for name, statements in doubtful.items():
                lines = [_line_of(s, labels) for s in statements]
                why = "the values of weights fit several ways"
                others = ", ".join(sorted({s.implementation.name for s in statements}))
                undecided[name] = Ambiguity("relations", labels[name], others, tuple(lines), why)
        settled = {s.reference.name for s in decided}
        self.ambiguities += [a for name, a in undecided.items() if a is not None and name not in settled]
        return decided

    def placements(self) -> CaptureRelations:
        """What the captures recorded about where tensors lie."""
        ranks = self.implementation.graph.graphs
        if all(i.placement is None for g in ranks for i in g.inputs):
            return CaptureRelations()
        return placement_relations(self.reference.graph.graphs[0], ranks, self.mesh.axes)

    def placed(self, found: CaptureRelations) -> list[Statement]:
        """Statements from recorded placements; a parameter shared under two labels may be two tensors over there, and a
        label two tensors of different stages."""
        graph = self.implementation.graph
        ref, imp = by_label(self.reference.graph.graphs[0]), [by_label(g) for g in graph.graphs]
        out: dict[tuple[str, str], Statement] = {}
        for label, text in found.texts.items():
            families = dict.fromkeys(graph.family_of(r, t[label].name) for r, t in enumerate(imp) if label in t)
            if len(families) > 1 and self.without_partner():
                continue
            for name in families:
                key = (ref[label].name, name)
                if key in out:
                    continue
                made = alignment_statement(
                    text, self.reference.spec(key[0]), self.implementation.spec(name),
                    self.mesh, origin="placement", place=f"capture: {label}",
                )  # fmt: skip
                split = self.split_between_stages(made)
                if split is None:
                    out[key] = replace(made, text=canonical_text(text, self.mesh))
                else:
                    found.open[label] = f"its placement splits over {split!r}, and every stage along it has one of its own"
        return list(out.values())

    def by_name(self, inp: FamilyInput, partner: FamilyInput, found: CaptureRelations) -> Statement | Ambiguity | None:
        """The one contiguous block reading of two inputs of one name. Reasons that values cannot settle are noted."""
        label = inp.label or inp.name
        if partner.placement is not None:
            why = found.open.get(label, "its placement says nothing")
        elif self.mesh.fixed(partner.ranks) is None:
            why = f"its type or presence differs between ranks (found on {list(partner.ranks)})"
        else:
            s, d = self.reference.spec(inp.name), self.implementation.spec(partner.name)
            return default_reading(
                "relations", label, s, d, self.mesh, most=None, origin="name", ranks=partner.ranks
            )  # fmt: skip
        self.ambiguities.append(Ambiguity("relations", label, partner.name, (), why))
        return None

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


def _line_of(statement: Statement, labels: dict[str, str]) -> str:
    """A statement as an entry under ``relations:``."""
    left, right = (replace(p, name=labels.get(p.name, p.name)) for p in (statement.reference, statement.implementation))
    return f'"{left}": {{of: "{right}", is: "{statement.text}"}}'
