"""Tensors of symbolic elements: what the facts about lowered operators say they compute, for any function in them.

Only what a law may rest on is interpreted: sums, products, constants, extrema, movement of elements and collectives. Any
other operator is a function about which its roles alone are known: along parallel axes it works position by position,
along whole axes it depends on the set of all positions and its own, along ordered axes on the list of all positions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fractions import Fraction
from math import prod
from typing import Any

from emerge.facts.base import FactBase
from emerge.facts.mesh import Mesh
from emerge.rules.bodies import NotEvaluable, _attributes, _movement, _spread
from emerge.rules.elements import Elements
from emerge.rules.lowered import Form, Lowered, Values
from emerge.rules.pair import Pair, local_value, placed

#: A form with more cells in its iteration space is not evaluated.
MOST_CELLS = 40_000
#: A pair with more different elements is not evaluated to its end.
MOST_ELEMENTS = 150_000
#: Kinds that may be applied in either order (law ``commutative``); those that are interpreted need no mention.
COMMUTATIVE = frozenset({"and", "or", "eq", "ne"})
REDUCING = ("sum", "max", "min", "prod")

Ties = dict[int, list[tuple[int, int, int, int, int]]]


class OperatorFacts:
    """What the facts say about the mesh axes of relocations and of sharded positions, and which described operators a
    rule file states to be linear.

    Args:
        linear: kind of a body -> operands (bits) that it is linear in, taken together.
    """

    def __init__(self, base: FactBase, linear: dict[str, int]) -> None:
        self.linear = linear
        self.relocation: dict[int, tuple[str, str]] = {o: (kind, how) for o, kind, how in base.facts["relocation"]}
        self.group: Ties = {}
        self.source: Ties = {}
        self.target: Ties = {}
        for o, d, od, n in base.facts["group_tie"]:
            self.group.setdefault(o, []).append((0, 1, d, od, n))
        for table, name in ((self.source, "from_mesh_tie"), (self.target, "to_mesh_tie")):
            for o, i, oi, d, od, n in base.facts[name]:
                table.setdefault(o, []).append((i, oi, d, od, n))


class SymbolicValues(Values):
    """Symbolic elements (int64 numbers of :class:`Elements`) of the lowered tensors of one side, per rank."""

    def __init__(
        self, lowered: Lowered, lowering: Any, family: Any, elements: Elements, mesh: Mesh, facts: OperatorFacts,
        inputs: list[dict[str, Any]], pair: Pair,
    ) -> None:  # fmt: skip
        super().__init__(lowered, lowering, family, inputs)
        self.elements, self.mesh, self.operator_facts, self.pair = elements, mesh, facts, pair

    def _compute(self, tensor: int, rank: int) -> Any:
        return self.from_operator(tensor, rank)

    def form(self, form: int, rank: int, *, exact: bool = False) -> Any:
        """What an operator form computes, element by element.

        Raises:
            NotEvaluable: it is not in the domain of symbolic elements.
        """
        f = self.lowered.forms[form]
        shape = self.lowered.shape(f.tensor)
        if f.kind == "input":
            return self._input(f, shape, rank)
        if prod(f.sizes) > MOST_CELLS or len(self.elements) > MOST_ELEMENTS:
            raise NotEvaluable("it has too many elements")
        if form in self.operator_facts.relocation and f.kind in ("collective", "rank_slice"):
            return self._relocated(f, shape, rank)
        args = [self.tensor(a, rank) for a in f.args]
        if f.kind == "dropout":
            return self._dropout(f, args[0], shape, rank)
        if f.kind in ("slice", "cat") or f.body.startswith("reshape"):
            moved = _movement(f, _attributes(f.body), args, shape)
            if moved is None:
                raise NotEvaluable(f"{f.body} is not movement of elements")
            return moved
        return self._collected(f, Cells(self, f, args, rank).values(), shape, rank)

    # ---- leaves --------------------------------------------------------------------------------------------------

    def _input(self, form: Form, shape: tuple[int, ...], rank: int) -> Any:
        for name in self.lowering.nodes_of.get(form.tensor, ()):
            value = self.of_node(name, rank)
            if value is not None and tuple(value.shape) == shape:
                return value
        raise NotEvaluable("it stands for no input of the graph")

    def _dropout(self, form: Form, x: Any, shape: tuple[int, ...], rank: int) -> Any:
        """The mask has one element per element of the whole tensor, sharded as the pair says (``dropout_masks``)."""
        import torch

        *body, call = _attributes(form.body)
        dims = self.pair.masks[int(call)] if int(call) < len(self.pair.masks) else (None,) * len(shape)
        sizes = [n * (self.pair.mesh[a] if a and self.lowered.side[form.tensor] == 2 else 1) for n, a in zip(shape, dims)]
        count = prod(sizes)
        whole = torch.tensor([self.elements.free("mask", call, k) for k in range(count)]).reshape(sizes)
        if self.lowered.side[form.tensor] == 2:
            whole = local_value(placed("mask", sizes, dims, self.pair.mesh), whole, shape, rank, self.mesh)
        name = ("dropout", form.body.split("#")[0], *body)
        return self._map(lambda e, m: self.elements.apply(name, [e, m]), [x, whole], shape)

    @staticmethod
    def _map(function: Callable[..., int], tensors: Sequence[Any], shape: Sequence[int]) -> Any:
        import torch

        rows = zip(*(t.expand(tuple(shape)).reshape(-1).tolist() for t in tensors))
        return torch.tensor([function(*row) for row in rows], dtype=torch.int64).reshape(tuple(shape))

    # ---- mesh ----------------------------------------------------------------------------------------------------

    def _iteration_index(self, form: Form, shape: tuple[int, ...], rank: int) -> list[Any]:
        """Iteration index of every element of the result on a rank; consumed dimensions are at 0."""
        import torch

        index: list[Any] = [torch.zeros([1] * len(shape), dtype=torch.int64) for _ in form.sizes]
        for i, oi, d, od, size in form.out_ties:
            grid = torch.arange(shape[d]).reshape([-1 if e == d else 1 for e in range(len(shape))])
            index[i] = index[i] + grid // od % size * oi
        for i, oi, d, od, size in self.operator_facts.target.get(form.id, ()):
            index[i] = index[i] + self.mesh.coordinate(rank, d) // od % size * oi
        return index

    def _collected(self, form: Form, value: Any, shape: tuple[int, ...], rank: int) -> Any:
        index = self._iteration_index(form, shape, rank)
        if not index:
            return value.reshape(shape)
        return value.expand(form.sizes)[tuple(i.expand(shape) for i in index)] if shape else value[tuple(
            i.reshape(()) for i in index)]  # fmt: skip

    def _relocated(self, form: Form, shape: tuple[int, ...], rank: int) -> Any:
        """A collective or rank slice: elements of the operand on the ranks of the group that the facts name."""
        import torch

        kind, how = self.operator_facts.relocation[form.id]
        group = self.operator_facts.group.get(form.id, [])
        index = [i.expand(shape) for i in self._iteration_index(form, shape, rank)]
        operand = self.lowered.shape(form.args[0])
        at: list[Any] = [torch.zeros(shape, dtype=torch.int64) for _ in operand]
        for i, oi, d, od, size in form.arg_ties.get(0, ()):
            at[d] = at[d] + index[i] // oi % size * od

        def read(source: int) -> Any:
            value = self.tensor(form.args[0], source)
            return value[tuple(at)] if at else value.reshape(shape)

        if kind in ("all_reduce", "reduce_scatter"):
            parts = [read(r) for r in self._ranks(rank, group)]
            return self.reduced("sum" if how == "avg" else how, torch.stack(parts, -1),
                                Fraction(1, len(parts)) if how == "avg" else Fraction(1))  # fmt: skip
        if kind in ("rank_slice", "all_gather", "all_to_all"):
            out = torch.zeros(shape, dtype=torch.int64)
            source = torch.full(shape, 0, dtype=torch.int64)
            moved = {d for _, _, d, _, _ in self.operator_facts.source.get(form.id, ())}
            base = [self.mesh.coordinate(rank, self.mesh.dim(a)) for a in range(len(self.mesh.sizes))]
            for a, (size, own) in enumerate(zip(self.mesh.sizes, base)):
                place = torch.full(shape, own, dtype=torch.int64)
                if self.mesh.dim(a) in moved:
                    for i, oi, d, od, n in self.operator_facts.source[form.id]:
                        if d == self.mesh.dim(a):
                            place = place - own // od % n * od + index[i] // oi % n * od
                source = source * size + place
            for r in sorted(set(source.reshape(-1).tolist())):
                out = torch.where(source == r, read(r), out)
            return out
        if kind in ("broadcast", "transfer"):
            # which rank's value arrives is not among the facts: some function of the values in the group that gives one
            # of them, hence their common value where they agree
            parts = torch.stack([read(r) for r in self._ranks(rank, group)], -1)
            rows = parts.reshape(-1, parts.shape[-1]).tolist()
            made = [r[0] if len(set(r)) == 1 else self.elements.apply(("one of", kind, rank), r) for r in rows]
            return torch.tensor(made, dtype=torch.int64).reshape(shape)
        raise NotEvaluable(f"the ranks that {kind} reads are not among the facts")

    def _ranks(self, rank: int, group: Sequence[tuple[int, int, int, int, int]]) -> list[int]:
        def outside(r: int) -> list[int]:
            found = []
            for a in range(len(self.mesh.sizes)):
                c = self.mesh.coordinate(r, self.mesh.dim(a))
                for _, _, d, od, n in group:
                    if d == self.mesh.dim(a):
                        c -= self.mesh.coordinate(r, d) // od % n * od
                found.append(c)
            return found

        return [r for r in range(self.mesh.ranks) if outside(r) == outside(rank)]

    def reduced(self, how: str, rows: Any, factor: Fraction = Fraction(1)) -> Any:
        """Reduces the last dimension."""
        import torch

        e = self.elements
        table: dict[str, Callable[[list[int]], int]] = {
            "sum": lambda row: e.scaled(e.total(row), factor),
            "prod": e.product_of,
            "max": lambda row: e.extremum("max", row),
            "min": lambda row: e.extremum("min", row),
        }
        if how not in table:
            raise NotEvaluable(f"no reduction {how}")
        flat = rows.reshape(-1, rows.shape[-1]).tolist()
        return torch.tensor([table[how](row) for row in flat], dtype=torch.int64).reshape(rows.shape[:-1])


class Cells:
    """Evaluates one body over its iteration space."""

    def __init__(self, values: SymbolicValues, form: Form, args: Sequence[Any], rank: int) -> None:
        self.form, self.rank, self.elements, self.owner = form, rank, values.elements, values
        self.args = [_spread(form, k, a) for k, a in enumerate(args)]
        self.attributes = [self._resolved(a) for a in _attributes(form.body)]

    def _resolved(self, text: str) -> str:
        """An attribute with one value per rank, on this rank."""
        if not text.startswith("("):
            return text
        import ast

        values = ast.literal_eval(text)
        return str(values[self.rank]) if isinstance(values, tuple) and len(values) > self.rank else text

    def _number(self, k: int = 0) -> Fraction:
        try:
            return Fraction(self.attributes[k])
        except (ValueError, IndexError) as exc:
            raise NotEvaluable(f"{self.form.body} has no number for attribute {k}") from exc

    def values(self) -> Any:
        """Elements over the iteration space; consumed dimensions have one position."""
        form, e = self.form, self.elements
        out = {i for i, *_ in form.out_ties} | {i for i, *_ in self.owner.operator_facts.target.get(form.id, ())}
        consumed = [i for i, r in enumerate(form.roles) if i not in out and form.sizes[i] > 1]
        if form.kind in ("dot", "lookup"):
            return self._contracted(consumed)
        if form.kind in REDUCING:
            return self._reduced(self.args[0], form.kind, consumed)
        if form.kind == "cumsum":
            return self._cumulative()
        if form.kind == "const":
            return self._constant()
        if form.kind == "one_hot":
            return self._one_hot()
        if form.kind == "rank_weight":
            factor = Fraction(self.attributes[0].split(",")[self.rank])
            return self._pointwise(lambda x: e.scaled(x, factor))
        if all(r == "p" for r in form.roles):
            return self._pointwise(self._function())
        return self._uninterpreted(consumed)

    def _pointwise(self, function: Callable[..., int]) -> Any:
        import torch

        tensors = torch.broadcast_tensors(*self.args) if self.args else []
        if not tensors:
            return torch.tensor(function(), dtype=torch.int64).reshape([1] * len(self.form.sizes))
        memo: dict[tuple[int, ...], int] = {}
        made = []
        for row in zip(*(t.reshape(-1).tolist() for t in tensors)):
            if row not in memo:
                memo[row] = function(*row)
            made.append(memo[row])
        return torch.tensor(made, dtype=torch.int64).reshape(tensors[0].shape)

    def _function(self) -> Callable[..., int]:
        e, kind = self.elements, self.form.kind
        one = Fraction(1)
        if kind == "add":
            alpha = self._number() if self.attributes else one
            return lambda x, y: e.total([x, e.scaled(y, alpha)])
        if kind == "sub" and not self.attributes:
            return lambda x, y: e.total([x, e.scaled(y, -one)])
        if kind == "mul":
            return e.product
        if kind == "keep":
            return e.product
        if kind == "fill0":
            return lambda x, m: e.product(x, e.apply("unless", [m]))
        if kind == "square":
            return lambda x: e.product(x, x)
        if kind == "neg":
            return lambda x: e.scaled(x, -one)
        if kind == "scale" and self.form.scale is not None:
            factor = self.form.scale
            return lambda x: e.scaled(x, factor)
        if kind == "mulc":
            return lambda x: e.scaled(x, self._number())
        if kind == "addc":
            return lambda x: e.total([x, e.number(self._number())])
        if kind == "div":
            return lambda x, y: e.product(x, e.apply("reciprocal of", [y]))
        if kind == "where":
            return lambda c, x, y: e.total(
                [e.product(e.apply("if", [c]), x), e.product(e.apply("unless", [c]), y)]
            )
        if kind in ("maximum", "minimum"):
            return lambda x, y: e.extremum(kind[:3], [x, y])
        name = self._name()
        mask = self.owner.operator_facts.linear.get(kind)
        if mask is not None:
            return lambda *args: self._linear(name, mask, args)
        return lambda *args: e.apply(name, args, kind in COMMUTATIVE)

    def _linear(self, name: Any, mask: int, args: Sequence[int]) -> int:
        """A function that is linear in some operands together: a sum of them with factors that depend on the others."""
        e = self.elements
        others = [a for k, a in enumerate(args) if not mask >> k & 1]
        held = [k for k in range(len(args)) if mask >> k & 1]
        return e.total([e.product(e.apply((name, "factor", k), others), args[k]) for k in held])

    def _name(self) -> Any:
        """The function of a body: its text with the numbers of this rank."""
        body = self.form.body
        name = body.rpartition("/")[0] if "/" in body and body.rpartition("/")[2].isdigit() else body
        name = "#".join([name.split("#")[0], *self.attributes])
        # the name alone where there is nothing else, for :data:`emerge.rules.elements.MONOTONE`
        return name if self.form.kind == name else (self.form.kind, name, str(self.form.scale))

    def _full(self, arg: Any, dims: Sequence[int]) -> Any:
        """An operand expanded along some dimensions, which come last, flattened."""
        n = len(self.form.sizes)
        arg = arg.expand([self.form.sizes[i] if i in dims else arg.shape[i] for i in range(n)])
        rest = [i for i in range(n) if i not in dims]
        arg = arg.permute([*rest, *dims])
        return arg.reshape([*(arg.shape[: len(rest)]), -1])

    def _placed(self, value: Any, dims: Sequence[int], tail: Sequence[int]) -> Any:
        """The inverse: the last dimension of ``value`` becomes ``dims`` with sizes ``tail``."""
        n = len(self.form.sizes)
        rest = [i for i in range(n) if i not in dims]
        value = value.reshape([*value.shape[:-1], *tail])
        order = [*rest, *dims]
        return value.permute([order.index(i) for i in range(n)])

    def _reduced(self, arg: Any, how: str, consumed: Sequence[int]) -> Any:
        if any(self.form.roles[i] != how for i in consumed):
            raise NotEvaluable(f"{self.form.body} consumes an axis of another role")
        if not consumed:
            return arg
        rows = self.owner.reduced(how, self._full(arg, consumed))
        return self._placed(rows.unsqueeze(-1), consumed, [1] * len(consumed))

    def _contracted(self, consumed: Sequence[int]) -> Any:
        import torch

        if any(self.form.roles[i] not in ("sum", "o") for i in consumed):
            raise NotEvaluable(f"{self.form.body} consumes an axis of another role")
        x, y = torch.broadcast_tensors(*(self._full(a, consumed) for a in self.args))
        e = self.elements
        shape = x.shape
        flat = zip(x.reshape(-1, shape[-1]).tolist(), y.reshape(-1, shape[-1]).tolist())
        made = [e.total([e.product(a, b) for a, b in zip(left, right)]) for left, right in flat]
        value = torch.tensor(made, dtype=torch.int64).reshape([*shape[:-1], 1])
        return self._placed(value, consumed, [1] * len(consumed))

    def _cumulative(self) -> Any:
        import torch

        (dim,) = [i for i, r in enumerate(self.form.roles) if r == "o"]
        rows = self._full(self.args[0], [dim])
        e = self.elements
        made = [[e.total(row[: k + 1]) for k in range(len(row))] for row in rows.reshape(-1, rows.shape[-1]).tolist()]
        value = torch.tensor(made, dtype=torch.int64).reshape(rows.shape)
        return self._placed(value, [dim], [rows.shape[-1]])

    def _constant(self) -> Any:
        import torch

        text = self.attributes[0]
        known = text not in ("inf", "-inf", "nan")
        value = self.elements.number(Fraction(text)) if known else self.elements.apply(("const", text), [])
        return torch.tensor(value).reshape([1] * len(self.form.sizes))

    def _one_hot(self) -> Any:
        """1 where the index is the position: a function of their difference."""
        import torch

        e, last = self.elements, len(self.form.sizes) - 1
        positions = torch.tensor([e.number(Fraction(k)) for k in range(self.form.sizes[last])])
        self.args.append(positions.reshape([1] * last + [-1]))
        return self._pointwise(lambda x, k: e.apply("is zero", [e.total([x, e.scaled(k, Fraction(-1))])]))

    def _uninterpreted(self, consumed: Sequence[int]) -> Any:
        """A function with whole and ordered axes, about which nothing else is known."""
        import torch

        form, e = self.form, self.elements
        ordered = [i for i, r in enumerate(form.roles) if r == "o"]
        whole = [i for i, r in enumerate(form.roles) if r == "w"]
        created = [i for i, r in enumerate(form.roles) if r == "pos"]
        if any(r not in ("p", "o", "w", "pos") for r in form.roles):
            raise NotEvaluable(f"{form.body} has an axis of another role")
        if form.kind in self.owner.operator_facts.linear or form.kind == "grouped_dot":
            raise NotEvaluable(f"{form.body} is linear, and not position by position")
        if form.kind in ("random", "unknown", "uninitialised"):
            raise NotEvaluable(f"{form.body} has no fixed value")
        o_sizes, w_sizes = [form.sizes[i] for i in ordered], [form.sizes[i] for i in whole]
        p_sizes = [form.sizes[i] for i in created]
        held = [i for i in (*ordered, *whole, *created) if i in consumed]
        kept_whole = [i not in held for i in whole if form.sizes[i] > 1]
        if any(kept_whole) and not all(kept_whole):
            raise NotEvaluable(f"{form.body} keeps some of its whole axes and consumes others")
        dims = [*ordered, *whole, *created]
        name = ("roles", self._name(), tuple(o_sizes))
        many_o, many_w, many_p = prod(o_sizes), prod(w_sizes), prod(p_sizes)
        if self.args:
            spread = [self._full(a, [*ordered, *whole]) for a in self.args]
            shape = torch.broadcast_shapes(*(s.shape[:-1] for s in spread))
            rest = [i for i in range(len(form.sizes)) if i not in dims]
            tables = [s.expand(*shape, s.shape[-1]).reshape(-1, s.shape[-1]).tolist() for s in spread]
            # created dimensions have one position in every operand
            lead = [shape[k] for k, i in enumerate([i for i in range(len(form.sizes)) if i not in (*ordered, *whole)])
                    if i in rest]  # fmt: skip
        else:
            rest = [i for i in range(len(form.sizes)) if i not in dims]
            tables, lead = [], [1] * len(rest)
        made: list[int] = []
        linear = form.kind == "copy" and len(tables) == 1 and not whole
        for cell in range(prod(lead)):
            rows = [t[cell] for t in tables]
            tuples = list(zip(*rows)) if rows else []
            summary = 0
            if rows and not linear:
                parts: list[int] = []
                for o in range(many_o):
                    group = sorted(tuples[o * many_w : (o + 1) * many_w])
                    parts.append(e.apply(("set", many_w), [x for row in group for x in row]))
                summary = e.apply(("list",), parts)
            for o in range(many_o):
                for w in range(many_w):
                    own = list(tuples[o * many_w + w]) if tuples and any(kept_whole) else []
                    for p in range(many_p):
                        where = (self._position(o, ordered, held), self._position(p, created, held))
                        if linear:
                            made.append(e.total([
                                e.product(e.apply((name, where, j), []), row[0]) for j, row in enumerate(tuples)
                            ]))  # fmt: skip
                        else:
                            made.append(e.apply((name, where), [summary, *own]))
        value = torch.tensor(made, dtype=torch.int64).reshape([*lead, -1])
        return self._placed(value, dims, [*o_sizes, *w_sizes, *p_sizes])

    def _position(self, flat: int, dims: Sequence[int], held: Sequence[int]) -> tuple[int, ...]:
        """Positions along the dimensions that the result keeps."""
        out = []
        for i in reversed(dims):
            flat, k = divmod(flat, self.form.sizes[i])
            if i not in held:
                out.append(k)
        return tuple(out)
