"""Runs the derivation: families and statements in, derived alignments and proved outputs out."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import lru_cache
from pathlib import Path
from typing import Any

from emerge.algebra.saturate import available, rule_files
from emerge.engine.run import Program, Result, run
from emerge.facts.base import IMPLEMENTATION, REFERENCE, FactBase, constant_text
from emerge.facts.families import FamilyGraph
from emerge.facts.kernels import Signature, signatures
from emerge.facts.lower import Elements, Lowering, Tensor, Unsupported
from emerge.facts.mesh import Mesh
from emerge.facts.number_types import write_types
from emerge.kernels.lowered import Meanings
from emerge.kernels.registry import definitions
from emerge.relate.consistency import uncovered
from emerge.relate.statement import Piece, Statement
from emerge.util.resources import resource_dir

#: At most so many views are singled out before all that remain are taken as operators.
MOST_GUILTY_VIEWS = 8
#: Relations read back after every derivation.
RESULTS = (
    "diagnosis",
    "precision",
    "aligned",
    "root",
    "frontier",
    "supports",
    "output_proved",
    "output_alignment",
    "axis_conflict",
    "axis_at",
    "atom",
    "mesh_axis",
    "mesh_bit",
)


@dataclass
class Problem:
    """A pair, ready to be derived.

    Attributes:
        inputs: what is given. outputs: what is claimed.
        causal_masks: per side, constants that were executed and are causal masks.
        executed: per side, constants that were executed and hold one number or a range.
    """

    reference: FamilyGraph
    implementation: FamilyGraph
    mesh: Mesh
    inputs: list[Statement]
    outputs: list[Statement]
    causal_masks: tuple[frozenset[str], frozenset[str]] = (frozenset(), frozenset())
    executed: tuple[Mapping[str, Elements], Mapping[str, Elements]] = field(default_factory=lambda: ({}, {}))


@dataclass
class Derivation:
    """What was derived for a problem.

    Attributes:
        reference, implementation: the lowered sides (names, unknown operators, assumptions).
        given, claims: statement behind each number in the facts ``given`` and ``expected``.
        unusable: statements that could not be turned into facts, with the reason.
        result: relations (see :data:`RESULTS`) and, when asked for, the derivation log.
        seconds: ``lower``, ``datalog`` and ``egglog``.
    """

    problem: Problem
    base: FactBase
    reference: Lowering
    implementation: Lowering
    given: dict[int, Statement]
    claims: dict[int, Statement]
    unusable: list[tuple[Statement, str]]
    result: Result
    seconds: dict[str, float] = field(default_factory=dict)

    def proved(self) -> set[int]:
        """Numbers of the claims that are proved."""
        return {g for g, _ in self.result.relations["output_proved"]}


@lru_cache(maxsize=8)
def load_program(extra: tuple[Path, ...] = ()) -> Program:
    """The alignment program with the rule files of the user."""
    return Program.load([resource_dir("datalog") / "alignment.dl"], extra=[p for p in extra if p.suffix == ".dl"])


def program_signatures(program: Program) -> dict[tuple[str, int], Signature]:
    """The facts ``operator_signature`` of a program."""
    found = []
    for clause in program.clauses:
        if clause.head.name == "operator_signature" and not clause.body:
            values = tuple(getattr(a, "value", None) for a in clause.head.args)
            found.append((values, clause.annotations.get("law", ""), str(clause.pos)))
    return signatures(found)


def lower_problem(
    problem: Problem,
    described: Mapping[tuple[str, int], Signature] | None = None,
    flat_views: tuple[frozenset[str], frozenset[str]] = (frozenset(), frozenset()),
    algebra: Sequence[Path] | None = None,
    meanings: Meanings | None = None,
) -> tuple[FactBase, Lowering, Lowering, dict[int, Statement], dict[int, Statement], list[tuple[Statement, str]]]:
    """Both sides and all statements as facts."""
    from emerge.facts.ops.sections import note_composites, note_sections

    base = FactBase()
    ref = Lowering(base, REFERENCE, Mesh({}), described, meanings)
    imp = Lowering(base, IMPLEMENTATION, problem.mesh, described, meanings)
    ref.flat_views, imp.flat_views = flat_views
    ref.padded_inputs = padded_inputs(problem)
    ref.sections = sections(problem.reference, (c.reference for c in problem.outputs))
    imp.sections = sections(problem.implementation, (c.implementation for c in problem.outputs))
    ref.causal_masks, imp.causal_masks = problem.causal_masks
    ref.executed, imp.executed = problem.executed
    ref.lower(problem.reference)
    imp.limits = index_limits(problem, ref.index_limits)
    imp.lower(problem.implementation)
    write_types(base, (ref.number_types, imp.number_types))
    for axis, size in enumerate(problem.mesh.sizes):
        base.add("extent", 0, problem.mesh.dim(axis), size)
    base.add_all("operand_bit", [(k, 1 << k) for k in range(30)])
    given: dict[int, Statement] = {}
    claims: dict[int, Statement] = {}
    unusable: list[tuple[Statement, str]] = []
    for kind, statements, numbers in (("given", problem.inputs, given), ("expected", problem.outputs, claims)):
        for statement in statements:
            try:
                s = piece_tensor(ref, statement.reference)
                d = piece_tensor(imp, statement.implementation)
            except Unsupported as exc:
                unusable.append((statement, str(exc)))
                continue
            number = len(given) + len(claims) + 1
            numbers[number] = statement
            write_statement(base, kind, number, s, d, statement)
    for low in (ref, imp):
        note_sections(low)
    if algebra is not None:
        from emerge.algebra.extend import extend

        for low in (ref, imp):
            if meanings is not None:
                meanings.expand(low)
                note_composites(low)
            low.extension = extend(low, algebra)
    write_scales(base, problem.mesh)
    return base, ref, imp, given, claims, unusable


def index_limits(problem: Problem, limits: Mapping[str, int]) -> dict[str, int]:
    """Implementation input -> n where all its elements are elements of reference inputs that lie in ``[0, n)``.

    Where the reference fails nothing is claimed, so its indices are in range on the implementation's side too.

    Args:
        limits: the same for reference inputs.
    """
    types = problem.implementation.types()
    found: dict[str, list[Statement]] = {}
    for statement in problem.inputs:
        if statement.reference.name in limits and statement.implementation.name in types:
            found.setdefault(statement.implementation.name, []).append(statement)
    out = {}
    for name, statements in found.items():
        whole = [limits[s.reference.name] for s in statements if not s.implementation.cuts]
        if whole:
            out[name] = min(whole)
        elif uncovered([s.implementation for s in statements], types[name].shape) is None:
            out[name] = max(limits[s.reference.name] for s in statements)
    return out


def sections(graph: FamilyGraph, claimed: Iterable[Piece]) -> set[tuple[int, int, int]]:
    """(size, start, stop) of the parts of dimensions that claims are about."""
    types = graph.types()
    found: set[tuple[int, int, int]] = set()
    for piece in claimed:
        for dim, start, stop in piece.cuts:
            size = types[piece.name].shape[dim]
            if isinstance(size, int):
                found.add((size, start, stop))
    return found


def padded_inputs(problem: Problem) -> dict[str, dict[int, int]]:
    """Reference inputs that a given statement relates with padding behind them: dimension -> size with padding."""
    types = problem.reference.types()
    found: dict[str, dict[int, int]] = {}
    for statement in problem.inputs:
        piece = statement.reference
        for dim, _, stop in piece.cuts:
            size = types[piece.name].shape[dim] if piece.name in types else None
            if isinstance(size, int) and stop > size:
                sizes = found.setdefault(piece.name, {})
                sizes[dim] = max(sizes.get(dim, 0), stop)
    return found


def piece_tensor(low: Lowering, piece: Piece) -> Tensor:
    """The lowered tensor of a piece; a box of a tensor becomes a slice of it.

    Raises:
        Unsupported: the tensor has no lowered form.
    """
    from emerge.facts.ops.layout import slice_plain

    tensor = low.tensors.get(piece.name)
    if not isinstance(tensor, Tensor):
        raise Unsupported(f"{piece.name!r} has no tensor value here")
    if any(stop > tensor.shape[dim] for dim, _, stop in piece.cuts):
        tensor = low.padded.get(piece.name, tensor)
    for dim, start, stop in piece.cuts:
        tensor = slice_plain(low, tensor, dim, start, stop, 1)
    return tensor


def write_statement(base: FactBase, kind: str, number: int, s: Tensor, d: Tensor, statement: Statement) -> None:
    """Facts ``given``/``expected`` of one statement."""
    base.add(kind, number, s.id, d.id)
    for p in statement.axes:
        if p.size == 1:
            continue
        if p.mesh is not None:
            base.add(f"{kind}_mesh_tie", number, *p.reference, p.mesh.dim, p.mesh.stride, p.size)
        elif p.implementation is not None:
            base.add(f"{kind}_tie", number, *p.reference, *p.implementation, p.size)


def write_scales(base: FactBase, mesh: Mesh) -> None:
    """The table of constants: scales that the mesh makes interesting are ratios of divisors of the number of ranks.

    ``scale_ratio(a, b, e, c)`` states a * b / e = c with c, and a or the constants of the graphs, in the table.
    """
    divisors = [n for n in range(1, mesh.ranks + 1) if mesh.ranks % n == 0]
    ratios = sorted({Fraction(a, b) for a in divisors for b in divisors})
    known = set(ratios)
    constants = {Fraction(c) for _, c in base.facts["scale_op"]} | {Fraction(1)}
    rows: set[tuple[str, str, str, str]] = set()

    def note(a: Fraction, b: Fraction, e: Fraction) -> None:
        c = a * b / e
        if c in known:
            rows.add((constant_text(a), constant_text(b), constant_text(e), constant_text(c)))

    for a in ratios:
        for e in known | constants:
            note(a, Fraction(1), e)
        for b in known:
            note(a, b, Fraction(1))
    for b in constants:
        for e in constants:
            if b / e in {x * y for x in known for y in known} or b == e:
                for a in ratios:
                    note(a, b, e)
    base.add_all("scale_ratio", sorted(rows))
    base.add_all("scale_extent", [(n, constant_text(n)) for n in divisors])


def derive(
    problem: Problem,
    *,
    engine: str = "auto",
    rules: Sequence[Path] = (),
    log: bool = False,
    timeout: float | None = None,
    results: Iterable[str] = RESULTS,
    use_algebra: bool = True,
    start_with_algebra: bool = False,
    base_rules: str = "full",
) -> Derivation:
    """Lowers a problem and derives its alignments.

    Args:
        engine: ``auto``, ``embedded`` or ``souffle``.
        rules: further ``.dl`` and ``.egg`` files.
        log: also read the derivation log.
        timeout: seconds for the Datalog engine.
        use_algebra: add equal forms where the plain derivation does not reach every output.
        start_with_algebra: add them at once.
        base_rules: ``full``, or ``minimal``: of the shipped rules of the algebra only those about layout.
    """
    program = load_program(tuple(rules))
    described = program_signatures(program)
    meanings = Meanings(definitions(rules))
    seconds = {"lower": 0.0, "datalog": 0.0, "egglog": 0.0}
    flat: tuple[frozenset[str], frozenset[str]] = (frozenset(), frozenset())
    use_algebra = use_algebra and available()
    algebra = rule_files(tuple(rules), base_rules) if start_with_algebra and use_algebra else None
    while True:
        started = time.perf_counter()
        base, ref, imp, given, claims, unusable = lower_problem(problem, described, flat, algebra, meanings)
        if algebra is None and use_algebra and bool(ref.defined) != bool(imp.defined):
            # kernels with a meaning of their own on one side only: the other side spells them out, in its own way
            algebra = rule_files(tuple(rules), base_rules)
            seconds["lower"] += time.perf_counter() - started
            continue
        lowered = time.perf_counter()
        facts: dict[str, list[tuple[Any, ...]]] = {k: v for k, v in base.facts.items() if k in program.relations}
        result = run(program, facts, results, engine=engine, log=log, timeout=timeout)
        saturation = sum(low.extension.seconds for low in (ref, imp) if low.extension is not None)
        seconds["egglog"] += saturation
        seconds["lower"] += lowered - started - saturation
        seconds["datalog"] += time.perf_counter() - lowered
        derivation = Derivation(problem, base, ref, imp, given, claims, unusable, result, seconds)
        if len(derivation.proved()) == len(claims):
            return derivation
        if algebra is None and use_algebra:
            # the plain derivation is cheap and mostly enough; equal forms are added where it is not
            algebra = rule_files(tuple(rules), base_rules)
            continue
        if any(flat) or not result.relations.get("axis_conflict"):
            return derivation
        flat = guilty_views(problem, described, derivation, engine, meanings)
        seconds["datalog"] += time.perf_counter() - started - (lowered - started)
        if not any(flat):
            return derivation


def guilty_views(
    problem: Problem,
    described: Mapping[tuple[str, int], Signature],
    derivation: Derivation,
    engine: str,
    meanings: Meanings | None = None,
) -> tuple[frozenset[str], frozenset[str]]:
    """Views to take as operators so that all other axes nest, per side.

    Views are admitted in graph order, reference first; one whose boundaries do not nest with those admitted before is
    left out. More views only divide axes further, so the first guilty one is found by bisection.
    """
    program = Program.load([resource_dir("datalog") / "axes.dl"])
    conflicts = {x for x, _ in derivation.result.relations["axis_conflict"]}
    order = [
        (side, name)
        for side, low in ((0, derivation.reference), (1, derivation.implementation))
        for name in conflicting_views(low, conflicts)
    ]
    flat: tuple[set[str], set[str]] = (set(), set())

    def nest(active: int) -> bool:
        """Whether axes nest when only the first ``active`` views of the list are views."""
        sides = [frozenset(flat[k] | {n for s, n in order[active:] if s == k}) for k in (0, 1)]
        base = lower_problem(problem, described, (sides[0], sides[1]), None, meanings)[0]
        facts = {k: v for k, v in base.facts.items() if k in program.relations}
        return not run(program, facts, ["axis_conflict"], engine=engine).relations["axis_conflict"]

    low = 0
    for _ in range(MOST_GUILTY_VIEWS):
        if nest(len(order)):
            break
        high = len(order)
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if nest(middle) else (low, middle)
        side, name = order[high - 1]
        flat[side].add(name)
    else:
        for side, name in order[low:]:
            flat[side].add(name)
    return frozenset(flat[0]), frozenset(flat[1])


def conflicting_views(low: Lowering, conflicts: set[int]) -> list[str]:
    """Nodes of views that touch a tensor or operator on which axes conflict, in graph order."""
    found = [
        low.layout_node[v]
        for v, a in low.base.facts["layout"]
        if v in low.layout_node and (v in conflicts or a in conflicts)
    ]
    return [name for name in dict.fromkeys(found) if name]
