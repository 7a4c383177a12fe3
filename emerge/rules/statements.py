"""The executable meaning of every semantic relation: is a derived fact true on executed values?

One function per check named by ``// @semantic CHECK`` in ``datalog/``; ``signature`` and ``linearity`` speak about an
operator rather than a pair and are checked in :mod:`emerge.rules.operators`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from emerge.facts.families import FamilyGraph
from emerge.relate.derive import Derivation
from emerge.rules.bodies import NotEvaluable
from emerge.rules.lowered import Lowered, Values
from emerge.rules.pair import Executed

#: Relative tolerance in float64; a false statement about distinct random values is off by far more.
RELATIVE = 1e-8
#: A tensor whose values are all smaller than this is compared on this scale (cancellation leaves rounding errors).
SMALL = 1e-4
#: Values beyond this come from overflow and say nothing.
HUGE = 1e100

Axis = tuple[int, int]


@dataclass(frozen=True)
class Outcome:
    """Whether a fact holds: True, False, or None where it cannot be evaluated; ``detail`` says why not."""

    holds: bool | None
    detail: str = ""


TRUE = Outcome(True)


def false(detail: str) -> Outcome:
    """A statement that does not hold."""
    return Outcome(False, detail)


def map_items(m: Any) -> list[tuple[Axis, Axis]]:
    """A ``Map`` record as a list."""
    out = []
    while m is not None:
        out.append((m[0], m[1]))
        m = m[2]
    return out


class Statements:
    """Decides facts of one derivation on one execution of its pair."""

    def __init__(self, derivation: Derivation, executed: Executed) -> None:
        self._setup(derivation)
        problem = derivation.problem
        families: dict[int, FamilyGraph] = {1: problem.reference, 2: problem.implementation}
        lowerings = {1: derivation.reference, 2: derivation.implementation}
        self.values = {s: Values(self.lowered, lowerings[s], families[s], executed.values[s]) for s in (1, 2)}

    def _setup(self, derivation: Derivation) -> None:
        """What the facts say about axes, names and the mesh."""
        self.derivation = derivation
        problem = derivation.problem
        self.mesh = problem.mesh
        self.lowered = Lowered(derivation.base)
        relations = derivation.result.relations
        self.atoms: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
        for x, d, s, n in relations["atom"]:
            self.atoms[x, d].append((s, n))
        for found in self.atoms.values():
            found.sort(reverse=True)
        self.names: dict[int, dict[Axis, set[Axis | None]]] = defaultdict(lambda: defaultdict(set))
        for v, d, s, x in relations["axis_at"]:
            self.names[v][d, s].add(x)
        self.root = dict(relations["root"])
        # (dimension, stride, size), in the order of ranks; an axis of the mesh without atoms is one atom without a bit
        self.mesh_atoms: list[tuple[int, int, int]] = []
        for axis, size in enumerate(self.mesh.sizes):
            d = self.mesh.dim(axis)
            known = self.atoms.get((0, d), [])
            whole = 1
            for _, n in known:
                whole *= n
            self.mesh_atoms += [(d, s, n) for s, n in known] if whole == size else [(d, 0, size)]
        self.bits: dict[Axis, int] = dict(relations["mesh_bit"])
        self.blocks = {number: blocks for blocks, number in derivation.base.blocks.items()}
        self._views: dict[int, Outcome] = {}
        self._atomic: dict[tuple[int, int], tuple[Any, list[Axis]]] = {}

    def equal(self, reference: Any, found: Any, amount: Any) -> Outcome:
        """:func:`equal`, of numbers here."""
        return equal(reference, found, amount)

    def check(self, relation: str, args: tuple[Any, ...]) -> Outcome:
        """Decides one fact."""
        function = _CHECKS.get(relation)
        if function is None:
            return Outcome(None, f"{relation} has no executable statement")
        try:
            return function(self, *args)
        except NotEvaluable as exc:
            return Outcome(None, str(exc))
        except (RuntimeError, IndexError) as exc:
            return false(f"its operands do not fit together: {str(exc).splitlines()[0]}")

    # ---- axes ---------------------------------------------------------------------------------------------------

    def rank_integer(self, value: tuple[int, int, int], rank: int) -> int:
        """A ``RankInt`` on a rank."""
        base, step, block = value
        if not block or not step:
            return base
        position = 0
        for b in self.blocks[block]:
            position = position * b.size + self.mesh.block_coordinate(rank, b)
        return base + step * position

    def dims(self, tensor: int) -> list[list[tuple[int, int]]]:
        """Atoms (stride, size) of every dimension, outermost first.

        Raises:
            NotEvaluable: a dimension has no atomic axes (boundaries that do not nest).
        """
        out = []
        for d, n in enumerate(self.lowered.shape(tensor)):
            atoms = self.atoms.get((tensor, d), []) if n > 1 else []
            size = 1
            for _, k in atoms:
                size *= k
            if size != n:
                raise NotEvaluable(f"dimension {d} of tensor {tensor} has no atomic axes")
            out.append(atoms)
        return out

    def atomic(self, root: int, side: int, rank: int) -> tuple[Any, list[Axis]]:
        """A root's value with one dimension per named axis, and the names; constant axes are taken at position 0."""
        value = self.values[side].tensor(root, rank)
        sizes, names = [], []
        for d, atoms in enumerate(self.dims(root)):
            for s, n in atoms:
                sizes.append(n)
                known = self.names[root].get((d, s), set())
                if len(known) != 1:
                    raise NotEvaluable(f"axis {(d, s)} of root {root} has {len(known)} names")
                names.append(next(iter(known)))
        value = value.reshape(sizes)
        for k in reversed(range(len(names))):
            if names[k] is None:
                value = value.select(k, 0)
        return value, [n for n in names if n is not None]

    # ---- the statements -----------------------------------------------------------------------------------------

    def aligned(self, s: int, d: int, m: Any, used: int, partial: int, reduction: str, scale: str) -> Outcome:
        """``S = C * reduce_R over the mesh atoms in P of D``, axis by axis; D replicated over unused atoms."""
        import torch

        left, left_names = self.atomic(s, 1, 0)
        pieces = [self.atomic(d, 2, r) for r in range(self.mesh.ranks)]
        right_names = pieces[0][1]
        items = map_items(m)
        where = dict(items)
        if len(where) != len(items) or set(where) != set(left_names):
            return false(f"places axes {sorted(where)} where the reference has {sorted(left_names)}")
        local = [y for y in where.values() if y[0] >= 0]
        if len(set(local)) != len(local) or set(local) != set(right_names):
            return false(f"uses axes {sorted(local)} where the implementation has {sorted(right_names)}")
        over = [y for y in where.values() if y[0] < 0]
        bits = sum(self.bits[y] for y in over)
        if len(set(over)) != len(over) or bits & partial or used != bits | partial:
            return false("a mesh atom serves two purposes, or the set of atoms in use is wrong")
        atoms = [(a[0], a[1]) for a in self.mesh_atoms]
        grid = [n for _, _, n in self.mesh_atoms]
        stack = torch.stack([p[0] for p in pieces])
        whole = stack.reshape(grid + list(stack.shape[1:]))
        reduced = [k for k, a in enumerate(atoms) if self.bits.get(a, 0) & partial]
        if reduced and reduction not in ("sum", "max", "min", "prod"):
            return false(f"is partial without a reduction ({reduction})")
        order: list[Axis] = [a for k, a in enumerate(atoms) if k not in reduced] + right_names
        goal = [where[x] for x in left_names]
        rest = [a for a in order if a not in goal]
        permutation = [order.index(y) for y in [*goal, *rest]]
        return self.agrees(left, whole, reduced, reduction, permutation, Fraction(scale))

    def agrees(
        self, target: Any, whole: Any, reduced: list[int], reduction: str, permutation: list[int], scale: Fraction
    ) -> Outcome:
        """``target = scale * reduce(whole)`` over the dimensions ``reduced``, the others permuted; more dimensions than
        those of ``target`` hold copies."""
        import torch

        target, whole = target.to(torch.float64), whole.to(torch.float64)
        amount = whole.abs()
        for k in reversed(reduced):
            name = {"sum": "sum", "max": "amax", "min": "amin", "prod": "prod"}[reduction]
            whole = getattr(whole, name)(k)
            amount = amount.sum(k) if reduction == "sum" else amount.amax(k)
        whole, amount = whole.permute(permutation), amount.permute(permutation)
        wrong = _extents(target, whole)
        if wrong is not None:
            return wrong
        factor = float(scale)
        return equal(
            target.reshape([*target.shape, *[1] * (whole.dim() - target.dim())]), whole * factor, amount * abs(factor)
        )

    def axis_at(self, v: int, d: int, s: int, x: Axis | None) -> Outcome:
        """Along stride ``s`` of dimension ``d`` the tensor moves along axis ``x`` of its root, or is constant."""
        side = self.lowered.side[v]
        for rank in range(self.values[side].ranks):
            if x is None:
                outcome = self._constant_along(v, d, s, side, rank)
                if outcome.holds is False:
                    return outcome
        root = self.root.get(v)
        if root is None:
            return Outcome(None, "the tensor has no root")
        if root == v:
            named = [y for names in self.names[v].values() for y in names if y is not None]
            return TRUE if len(named) == len(set(named)) else false("two axes of a root have one name")
        if v not in self._views:
            self._views[v] = self._rearranged(v, root, side)
        return self._views[v]

    def _constant_along(self, v: int, d: int, s: int, side: int, rank: int) -> Outcome:
        atoms = self.dims(v)
        value = self.values[side].tensor(v, rank)
        sizes = [n for dim in atoms for _, n in dim]
        position = [(e, t) for e, dim in enumerate(atoms) for t, _ in dim].index((d, s))
        value = value.reshape(sizes)
        return self.equal(value.select(position, 0).unsqueeze(position), value, value)

    def _rearranged(self, v: int, root: int, side: int) -> Outcome:
        """All axes of a tensor together: its value is its root's, element by element."""
        import torch

        names = self.names[v]
        place = {next(iter(xs)): k for k, xs in self.names[root].items() if len(xs) == 1}
        shape, source = self.lowered.shape(v), self.lowered.shape(root)
        index: list[Any] = [torch.zeros([1] * len(shape), dtype=torch.int64) for _ in source]
        seen: set[Axis] = set()
        for d, dim in enumerate(self.dims(v)):
            for s, n in dim:
                found = names.get((d, s), set())
                if len(found) > 1:
                    return false(f"stride {s} of dimension {d} of tensor {v} lies on {len(found)} axes of its root")
                if not found:
                    raise NotEvaluable(f"stride {s} of dimension {d} of tensor {v} lies nowhere")
                x = next(iter(found))
                if x is None:
                    continue
                if x not in place or x in seen:
                    return false(f"tensor {v} names axis {x}, which its root does not have once")
                seen.add(x)
                e, t = place[x]
                grid = torch.arange(shape[d]).reshape([-1 if k == d else 1 for k in range(len(shape))])
                index[e] = index[e] + grid // s % n * t
        for rank in range(self.values[side].ranks):
            value = self.values[side].tensor(v, rank)
            base = self.values[side].tensor(root, rank)
            moved = base[tuple(i.expand(shape) for i in index)].expand(shape)
            outcome = self.equal(value, moved, moved)
            if outcome.holds is False:
                return outcome
        return TRUE

    def index_fn(self, v: int, t: int, m: Any, interval: Any, a: int, b: Any, c: int, d: Any) -> Outcome:
        """``V = a*T + b`` where T lies in the interval, ``c*T + d`` elsewhere."""
        import torch

        side = self.lowered.side[v]
        for rank in range(self.values[side].ranks):
            value, source = self._follow(v, t, m, side, rank)
            if isinstance(source, Outcome):
                return source
            source = source.to(torch.int64)
            inside = torch.ones_like(source, dtype=torch.bool)
            if interval is not None:
                low, high = interval
                if low is not None:
                    inside &= source >= self.rank_integer(low, rank)
                if high is not None:
                    inside &= source < self.rank_integer(high, rank)
            expected = torch.where(
                inside, a * source + self.rank_integer(b, rank), c * source + self.rank_integer(d, rank)
            )
            wrong = (value.to(torch.int64) != expected).nonzero()
            if len(wrong):
                at = tuple(wrong[0].tolist())
                return false(
                    f"rank {rank}: T = {int(source[at])} gives {int(value[at])}, the fact says {int(expected[at])}"
                )
        return TRUE

    def _follow(self, v: int, t: int, m: Any, side: int, rank: int) -> tuple[Any, Any]:
        """Values of ``v`` and ``t`` with the axes of ``t`` in the order in which ``v`` has them."""
        value, names = self.atomic(v, side, rank)
        source, source_names = self.atomic(t, side, rank)
        # a row that lies on the mesh (a sharded arange) is the same rank for both tensors
        where = {x: y for x, y in map_items(m) if x != y or x[0] >= 0}
        if set(where) != set(source_names) or sorted(where.values()) != sorted(names):
            return value, false(
                f"maps axes {sorted(where)} of {sorted(source_names)} to {sorted(where.values())} of {sorted(names)}"
            )
        back = {y: x for x, y in where.items()}
        source = source.permute([source_names.index(back[y]) for y in names])
        if source.shape != value.shape:
            return value, false(f"relates extents {list(source.shape)} and {list(value.shape)}")
        return value, source

    def one_hot_of(self, h: int, t: int, m: Any, low: Any, n: int) -> Outcome:
        """``H[t, v] = 1`` where ``T[t] - low = v`` and 0 elsewhere, for ``0 <= v < n``."""
        import torch

        side = self.lowered.side[h]
        where = dict(map_items(m))
        for rank in range(self.values[side].ranks):
            value, names = self.atomic(h, side, rank)
            source, source_names = self.atomic(t, side, rank)
            if set(where) != set(source_names):
                return false(f"maps axes {sorted(where)} where the index has {sorted(source_names)}")
            positions = sorted((y for y in names if y not in where.values()), key=lambda y: y[1], reverse=True)
            front = [where[x] for x in source_names]
            if len(positions) + len(front) != len(names) or any(y not in names for y in front):
                return false(f"maps to axes {front} where the one-hot tensor has {names}")
            value = value.permute([names.index(y) for y in [*front, *positions]])
            value = value.reshape([*source.shape, -1])
            if value.shape[-1] != n:
                return false(f"says {n} positions where there are {value.shape[-1]}")
            shifted = source.to(torch.int64) - self.rank_integer(low, rank)
            expected = shifted.unsqueeze(-1) == torch.arange(n)
            if not torch.equal(value.to(torch.float64), expected.to(torch.float64)):
                return false(f"rank {rank}: ones in other places than index - {self.rank_integer(low, rank)}")
        return TRUE

    def same(self, v: int, w: int) -> Outcome:
        """Both tensors have the same value on every rank, and are undefined together."""
        side = self.lowered.side[v]
        if side != self.lowered.side[w]:
            return false("the tensors are of different sides")
        for rank in range(self.values[side].ranks):
            left, right = self.values[side].tensor(v, rank), self.values[side].tensor(w, rank)
            if left.shape != right.shape:
                return false(f"shapes {list(left.shape)} and {list(right.shape)}")
            for one, other in ((left, right), (right, left)):
                outcome = self.equal(one, other, other)
                if outcome.holds is False:
                    return outcome
        return TRUE

    def _vector(self, tensor: int, side: int, rank: int) -> Any:
        import torch

        return self.values[side].tensor(tensor, rank).to(torch.int64)

    def _experts(self, a: int, q: int, n: int, side: int, rank: int) -> tuple[Any, Any, Any]:
        """Row, expert (0 where there is none) and whether there is one, for every place."""
        import torch

        experts = self._vector(a, side, rank)
        rows = self._vector(q, side, rank) if q else torch.arange(len(experts))
        experts = experts[rows]
        inside = (experts >= 0) & (experts < n)
        return rows, torch.where(inside, experts, torch.zeros_like(experts)), inside

    def routed(self, v: int, z: int, a: int, q: int, n: int, other: str) -> Outcome:
        """``V[i, ..] = Z[q, .., A[q]]`` with ``q = Q[i]`` where ``0 <= A[q] < N``; zero elsewhere if so told."""
        import torch

        side = self.lowered.side[v]
        for rank in range(self.values[side].ranks):
            value, whole = self.values[side].tensor(v, rank), self.values[side].tensor(z, rank)
            rows, experts, inside = self._experts(a, q, n, side, rank)
            if whole.shape != (*value.shape, n) or len(rows) != len(value):
                return false(f"relates shapes {list(value.shape)} and {list(whole.shape)} for {len(rows)} rows of {n}")
            picked = whole[rows].movedim(-1, 1)[torch.arange(len(rows)), experts]
            if bool(inside.any()):
                left, right = (picked, value) if side == 2 else (value, picked)
                outcome = self.equal(left[inside], right[inside], right[inside])
                if outcome.holds is False:
                    return false(f"rank {rank}: {outcome.detail}")
            if other == "zero" and not bool((value[~inside] == 0).all()):
                return false(f"rank {rank}: rows of other experts are not zero")
        return TRUE

    def in_range(self, v: int, n: int) -> Outcome:
        """``0 <= V < N``."""
        side = self.lowered.side[v]
        for rank in range(self.values[side].ranks):
            value = self._vector(v, side, rank)
            if not bool(((value >= 0) & (value < n)).all()):
                return false(f"rank {rank}: values from {int(value.min())} to {int(value.max())}, not in [0, {n})")
        return TRUE

    def group_ends(self, f: int, s: int) -> Outcome:
        """Row i of the sorted vector S lies in ``F[S[i] - 1] <= i < F[S[i]]``, where S[i] is a position of F."""
        import torch

        side = self.lowered.side[f]
        for rank in range(self.values[side].ranks):
            ends, keys = self._vector(f, side, rank), self._vector(s, side, rank)
            starts = torch.cat([torch.zeros(1, dtype=torch.int64), ends[:-1]])
            inside = (keys >= 0) & (keys < len(ends))
            at, key = torch.arange(len(keys))[inside], keys[inside]
            if not bool(((starts[key] <= at) & (at < ends[key])).all()):
                return false(f"rank {rank}: groups end at {ends.tolist()} for {keys.tolist()}")
        return TRUE

    def routes(self, j: int, a: int, q: int, n: int, other: str) -> Outcome:
        """``J[i] = A[Q[i]]`` where that lies in [0, N); ``some``: J always does."""
        side = self.lowered.side[j]
        for rank in range(self.values[side].ranks):
            value = self._vector(j, side, rank)
            _, experts, inside = self._experts(a, q, n, side, rank)
            if not bool((value[inside] == experts[inside]).all()):
                return false(f"rank {rank}: {value.tolist()} are not the experts {experts.tolist()}")
            if other == "some" and not bool(((value >= 0) & (value < n)).all()):
                return false(f"rank {rank}: {value.tolist()} do not lie in [0, {n})")
        return TRUE

    def outside(self, k: int, a: int, q: int, n: int, which: str) -> Outcome:
        """The mask is false for rows with an expert; ``all``: and true for all others."""
        side = self.lowered.side[k]
        for rank in range(self.values[side].ranks):
            value = self.values[side].tensor(k, rank).bool()
            _, _, inside = self._experts(a, q, n, side, rank)
            if bool(value[inside].any()):
                return false(f"rank {rank}: it covers rows that have an expert")
            if which == "all" and not bool(value[~inside].all()):
                return false(f"rank {rank}: it does not cover all rows without an expert")
        return TRUE

    def admitted(self, form: int) -> Outcome:
        """The form computes the value of its tensor."""
        f = self.lowered.forms[form]
        if self.lowered.native.get(f.tensor) == form:
            return TRUE
        side = self.lowered.side[f.tensor]
        for rank in range(self.values[side].ranks):
            value = self.values[side].tensor(f.tensor, rank)
            made = self.values[side].form(form, rank)
            if made.shape != value.shape:
                return false(f"the form gives shape {list(made.shape)} where the tensor has {list(value.shape)}")
            outcome = self.equal(value, made, made)
            if outcome.holds is False:
                return outcome
        return TRUE


_CHECKS: dict[str, Callable[..., Outcome]] = {
    "aligned": Statements.aligned,
    "axis_at": Statements.axis_at,
    "index_fn": Statements.index_fn,
    "one_hot_of": Statements.one_hot_of,
    "admitted": Statements.admitted,
    "same": Statements.same,
    "routed": Statements.routed,
    "in_range": Statements.in_range,
    "group_ends": Statements.group_ends,
    "routes": Statements.routes,
    "outside": Statements.outside,
}
#: ``@semantic`` names of the declarations -> relation whose statement is executed here.
SEMANTIC_CHECKS = {
    "aligned": "aligned", "layout": "axis_at", "index_fn": "index_fn", "one_hot_of": "one_hot_of", "form": "admitted",
    "same": "same",
    "routed": "routed", "in_range": "in_range", "group_ends": "group_ends", "routes": "routes", "outside": "outside",
    "signature": "", "linearity": "",
}  # fmt: skip
#: Raised when a statement changes its meaning; certificates made under another version are void.
STATEMENTS_VERSION = 1


def _extents(target: Any, whole: Any) -> Outcome | None:
    if list(target.shape) == list(whole.shape[: target.dim()]):
        return None
    return false(f"relates extents {list(target.shape)} to {list(whole.shape[: target.dim()])}")


def equal(reference: Any, found: Any, amount: Any) -> Outcome:
    """``found`` equals ``reference`` wherever the reference is defined (NaN is undefined, overflow says nothing)."""
    import torch

    left, right = torch.broadcast_tensors(reference.to(torch.float64), found.to(torch.float64))
    size = torch.broadcast_to(amount.to(torch.float64).abs(), right.shape)
    claimed = ~torch.isnan(left) & ~(torch.isfinite(left) & (left.abs() > HUGE))
    same_infinity = torch.isinf(left) & (left == right)
    finite = torch.isfinite(left) & torch.isfinite(right)
    largest = float(left[torch.isfinite(left)].abs().max()) if bool(torch.isfinite(left).any()) else 0.0
    finite_size = torch.where(torch.isfinite(size), size, torch.zeros_like(size))
    bound = RELATIVE * torch.clamp(
        torch.maximum(finite_size, left.abs().nan_to_num(0, 0, 0)), min=min(max(largest, SMALL), 1.0)
    )
    close = finite & ((left - right).abs() <= bound)
    wrong = (claimed & ~same_infinity & ~close).nonzero()
    if not len(wrong):
        return (
            TRUE if bool(claimed.any()) or not left.numel() else Outcome(None, "the reference is undefined everywhere")
        )
    at = tuple(wrong[0].tolist())
    return false(
        f"at {list(at)}: {float(left[at]):.6g} in the reference, {float(right[at]):.6g} by the fact "
        f"({len(wrong)} of {left.numel()} elements)"
    )
