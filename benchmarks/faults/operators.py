"""Faults of computation: vocabulary offsets, the split of fused projections, constants, axes, weights, residuals."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from benchmarks.faults.common import Change, Option, Plan
from benchmarks.faults.edit import HANDS_ON, Editor, scalar_at
from emerge.graph.model import Node, Ref

_ADDS = ("aten.add.Tensor",)
_MULTIPLIES = ("aten.mul.Tensor",)


# ---- vocabulary -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Lookup:
    """A vocab-parallel lookup: rank r owns tokens [start, end), ``below`` and ``above`` mask the others."""

    below: str
    above: str
    shift: str


def _lookups(plan: Plan) -> Iterator[_Lookup]:
    for below in plan.sites("aten.lt.Scalar"):
        token = plan.first.ref(below, 0)
        if token is None:
            continue
        for above in plan.sites("aten.ge.Scalar"):
            for shift in plan.sites("aten.sub.Tensor"):
                base = plan.first.ref(shift, 0)
                if (
                    plan.first.ref(above, 0) != token
                    or base is None
                    or plan.first.origin(base) != plan.first.origin(token)
                ):
                    continue
                bounds = [[scalar_at(e.node(n.name), 1) for n in (below, above, shift)] for e in plan.editors]
                if any(not isinstance(x, int) for row in bounds for x in row):
                    continue
                steps = {row[1] - row[0] for row in bounds if row[0] is not None and row[1] is not None}
                if len(steps) == 1 and all(
                    row == [r * (n := next(iter(steps))), (r + 1) * n, r * n] for r, row in enumerate(bounds)
                ):
                    yield _Lookup(below.name, above.name, shift.name)


def vocab_offset(plan: Plan) -> list[Option]:
    """One rank believes that its rows of the table start or end elsewhere.

    Every offered change takes tokens from a rank, gives it foreign tokens, or makes it read wrong rows. Not offered:
    a lower bound below the first token, an upper bound above the last one (no such tokens), and bounds that make a
    rank read beyond its rows (a crash, not a wrong value).
    """
    options: list[Option] = []

    def make(at: _Lookup, rank: int, variant: str, by: int) -> Callable[[], Change]:
        def apply() -> Change:
            e = plan.editors[rank]
            moved = {
                "shift": (at.shift,),
                "below": (at.below,),
                "above": (at.above,),
                "all": (at.below, at.above, at.shift),
            }[variant]
            consumers = [c for n in moved for c in e.looked_up(n)]
            for name in moved:
                value = scalar_at(e.node(name), 1)
                assert isinstance(value, int)
                e.node(name).args[1] = value + by
            return Change(
                f"vocabulary offset of rank {rank} is off by {by} in {', '.join(moved)}",
                moved,
                (),
                tuple(dict.fromkeys(consumers)),
                (rank,),
            )

        return apply

    for at in _lookups(plan):
        e = plan.first
        step = scalar_at(e.node(at.above), 1)
        assert isinstance(step, int)
        for by in sorted({1, max(1, step // 3), max(1, step // 2)}):
            if by >= step:
                continue
            for rank in plan.every:
                options += [
                    (f"{at.shift}/{rank}/shift+{by}", make(at, rank, "shift", by)),
                    (f"{at.below}/{rank}/below+{by}", make(at, rank, "below", by)),
                    (f"{at.above}/{rank}/above-{by}", make(at, rank, "above", -by)),
                    (f"{at.shift}/{rank}/all+{by}", make(at, rank, "all", by)),
                ]
                if rank > 0:
                    options.append((f"{at.shift}/{rank}/all-{by}", make(at, rank, "all", -by)))
    return options


# ---- fused projections ----------------------------------------------------------------------------------------------


def fused_split(plan: Plan) -> list[Option]:
    """Parts of a fused projection are taken in another order, or as contiguous blocks instead of per head.

    Not offered: parts that meet in one commutative operator, and contiguous blocks where a rank has one head.
    """
    options: list[Option] = []
    e = plan.first

    def order(split: str, one: Node, two: Node) -> Callable[[], Change]:
        def apply() -> Change:
            consumers = [c for n in (one.name, two.name) for c in e.handed(n)]

            def edit(e: Editor) -> None:
                a, b = e.node(one.name), e.node(two.name)
                a.args[1], b.args[1] = b.args[1], a.args[1]

            plan.everywhere(edit)
            return Change(
                f"parts {one.name} and {two.name} of {split} are exchanged",
                (split, one.name, two.name),
                (),
                tuple(dict.fromkeys(consumers)),
                plan.every,
            )

        return apply

    def blocks(split: Node, view: Node, source: str) -> Callable[[], Change]:
        def apply() -> Change:
            items = [u for u in e.users(split.name) if u.op == "operator.getitem"]
            consumers = [c for n in items for c in e.handed(n.name)]
            heads = e.shape(view.name)[-2]
            count, part = len(split.elements), e.shape(view.name)[-1] // len(split.elements)
            new: list[str] = []

            def edit(e: Editor) -> None:
                parts = e.parts(
                    source,
                    "aten.split_with_sizes.default",
                    Ref(source),
                    [heads * part] * count,
                    len(e.shape(source)) - 1,
                )
                for item in [e.node(i.name) for i in items]:
                    index = item.args[1]
                    assert isinstance(index, int)
                    made = e.add(parts[index], "aten.view.default", Ref(parts[index]), list(e.shape(item.name)))
                    e.replace_uses(item.name, made)
                    e.remove(item.name)
                    new.append(made)
                e.remove(split.name)
                new.extend(parts)

            plan.everywhere(edit)
            return Change(
                f"{split.name} takes contiguous blocks instead of parts of each head",
                tuple(dict.fromkeys((view.name, *new))),
                (split.name, *(i.name for i in items)),
                tuple(dict.fromkeys(consumers)),
                plan.every,
            )

        return apply

    for split in plan.sites("aten.split_with_sizes", "aten.split"):
        source = e.ref(split, 0)
        items = [n for n in e.users(split.name) if n.op == "operator.getitem" and plan.alike(n.name)]
        if source is None or len(items) < 2:
            continue
        for i, one in enumerate(items):
            for two in items[i + 1 :]:
                if one.shape == two.shape and not _meet(e, one.name, two.name):
                    options.append((f"{split.name}/{one.args[1]}-{two.args[1]}", order(split.name, one, two)))
        view = e.get(source)
        if (
            not isinstance(view, Node)
            or view.op != "aten.view.default"
            or len({t.shape for t in split.elements.values()}) != 1
        ):
            continue
        whole = e.ref(view, 0)
        shape = e.shape(source)
        last = split.args[2] if len(split.args) > 2 else 0
        merged = whole is not None and e.shape(whole) == (*shape[:-2], shape[-2] * shape[-1])
        if (
            merged
            and whole is not None
            and last in (-1, len(shape) - 1)
            and shape[-2] > 1
            and len(items) == len(split.elements) > 1
        ):
            options.append((f"{split.name}/blocks", blocks(split, view, whole)))
    return options


def _meet(e: Editor, one: str, two: str) -> bool:
    """Do two values meet in a commutative operator, only handed on before?"""
    first = {n.name for n, _ in e.ends(one) if n.op in _ADDS + _MULTIPLIES}
    return any(n.name in first for n, _ in e.ends(two))


# ---- constants ------------------------------------------------------------------------------------------------------


def constant(plan: Plan) -> list[Option]:
    """A scale, an epsilon, a mask value, a dropout probability or a variant of GELU is another one.

    A mask value only moves into the range of the scores (-10000 or -5000 both give exp = 0 in floating point). A factor
    in front of a norm is not changed: the norm takes it out again, up to its epsilon.
    """
    options: list[Option] = []
    e = plan.first

    def argument(node: Node, key: int | str, new: float | int | str) -> Option:
        def apply() -> Change:
            old = node.args[key] if isinstance(key, int) else node.kwargs.get(key, "default")
            consumers = e.handed(node.name)

            def edit(e: Editor) -> None:
                target = e.node(node.name)
                if isinstance(key, int):
                    target.args[key] = new
                else:
                    target.kwargs[key] = new

            plan.everywhere(edit)
            return Change(
                f"{node.name} ({node.op}) has {new!r} instead of {old!r}",
                (node.name,),
                (),
                tuple(consumers),
                plan.every,
            )

        return (f"{node.name}/{key}={new}", apply)

    for n in plan.sites("aten.baddbmm.default"):
        alpha = n.kwargs.get("alpha", 1)
        if isinstance(alpha, (int, float)) and alpha not in (0, 1):
            options += [argument(n, "alpha", v) for v in (1.0, alpha * alpha, alpha * 2)]
        if n.kwargs.get("beta") == 0.0:
            options.append(argument(n, "beta", 1.0))
    for n in plan.sites("apex.fused_layer_norm_affine_fwd", "aten.native_layer_norm"):
        eps = scalar_at(n, 4)
        if isinstance(eps, float):
            options += [argument(n, 4, v) for v in (eps / 10, eps * 10, eps * 1000)]
    for n in plan.sites("aten.masked_fill.Scalar"):
        value = scalar_at(n, 2)
        options += [argument(n, 2, v) for v in (0.0, -1.0, 0.5) if v != value]
    for n in plan.sites("aten.native_dropout"):
        p = scalar_at(n, 1)
        if isinstance(p, float) and 0 < p < 0.5 and n.args[2] is True:
            options += [argument(n, 1, v) for v in (p * 2, p / 2, 0.0)]
    for n in plan.sites("aten.gelu"):
        if n.kwargs.get("approximate", "none") == "none" and len(n.args) == 1:
            options.append(argument(n, "approximate", "tanh"))
    for n in plan.sites("aten.div.Tensor", "aten.mul.Tensor", "aten.div.Scalar", "aten.mul.Scalar"):
        factor = scalar_at(n, 1)
        ends = e.ends(n.name)
        if factor is None or not e.type(n.name) or (ends and all("norm" in u.op for u, _ in ends)):
            continue
        options += [argument(n, 1, v) for v in (factor * plan.world, factor + 1) if v != factor and factor != 0]
    return options


# ---- axes -----------------------------------------------------------------------------------------------------------


def softmax_axis(plan: Plan) -> list[Option]:
    """A softmax over another axis of more than one position."""
    e = plan.first

    def make(node: Node, dim: int) -> Callable[[], Change]:
        def apply() -> Change:
            def edit(e: Editor) -> None:
                e.node(node.name).args[1] = dim

            consumers = e.handed(node.name)
            plan.everywhere(edit)
            return Change(
                f"softmax {node.name} runs over dimension {dim}", (node.name,), (), tuple(consumers), plan.every
            )

        return apply

    options: list[Option] = []
    for n in plan.sites("aten._softmax", "aten.softmax", "aten._log_softmax"):
        shape, dim = e.shape(n.name), n.args[1]
        assert isinstance(dim, int)
        options += [(f"{n.name}/{d}", make(n, d)) for d in range(len(shape)) if d != dim % len(shape) and shape[d] > 1]
    return options


def norm_axis(plan: Plan) -> list[Option]:
    """A norm over another axis; only where one has the length of the normalised axis, which its weights fix."""
    e = plan.first

    def make(node: Node, dim: int, result: Node) -> Callable[[], Change]:
        def apply() -> Change:
            source = e.ref(node, 0)
            assert source is not None
            last = len(e.shape(source)) - 1
            consumers = [*e.handed(node.name), *e.handed(result.name)]
            new: list[str] = []

            def edit(e: Editor) -> None:
                before = e.add(source, "aten.transpose.int", Ref(source), dim, last)
                e.node(node.name).args[0] = Ref(before)
                after = e.add(result.name, "aten.transpose.int", Ref(result.name), dim, last)
                e.replace_uses(result.name, after, but=(after,))
                new[:] = [before, after]

            plan.everywhere(edit)
            return Change(
                f"norm {node.name} runs over dimension {dim}",
                (node.name, result.name, *new),
                (),
                tuple(dict.fromkeys(consumers)),
                plan.every,
            )

        return apply

    options: list[Option] = []
    for n in plan.sites("apex.fused_layer_norm_affine_fwd", "aten.native_layer_norm"):
        source = e.ref(n, 0)
        items = [u for u in e.users(n.name) if u.op == "operator.getitem" and u.name in plan.live[0]]
        if source is None or len(items) != 1 or items[0].args[1] != 0:
            continue
        shape = e.shape(source)
        if not isinstance(n.args[3 if "apex" in n.op else 1], list) or len(shape) < 2:
            continue
        options += [(f"{n.name}/{d}", make(n, d, items[0])) for d in range(len(shape) - 1) if shape[d] == shape[-1] > 1]
    return options


# ---- weights and residuals ------------------------------------------------------------------------------------------


def weights_exchanged(plan: Plan) -> list[Option]:
    """Two parameters of one shape stand in each other's place.

    Not offered: parameters that meet in one chain of additions (or multiplications), where their order does not matter.
    """
    e = plan.first

    def make(one: str, two: str) -> Callable[[], Change]:
        def apply() -> Change:
            consumers = tuple(dict.fromkeys([*e.handed(one), *e.handed(two)]))

            def edit(e: Editor) -> None:
                e.exchange(one, two)

            plan.everywhere(edit)
            return Change(f"weights {one} and {two} are exchanged", (one, two), (), consumers, plan.every)

        return apply

    weights = [i for i in e.graph.inputs if i.dtype.startswith(("float", "bfloat")) and plan.alike(i.name)]
    options: list[Option] = []
    for i, one in enumerate(weights):
        for two in weights[i + 1 :]:
            if one.shape == two.shape and one.dtype == two.dtype and not _same_chain(e, one.name, two.name):
                options.append((f"{one.name}-{two.name}", make(one.name, two.name)))
    return options


def _same_chain(e: Editor, one: str, two: str) -> bool:
    """Is there one operator kind (sum or product) through which alone both reach a common node, or the same readers?"""
    if {n.name for n in e.users(one)} & {n.name for n in e.users(two)} and all(
        n.op in _ADDS + _MULTIPLIES for n in e.users(one)
    ):
        return True
    return any(_chain(e, one, ops) & _chain(e, two, ops) for ops in (_ADDS, _MULTIPLIES))


def _chain(e: Editor, name: str, ops: tuple[str, ...]) -> set[str]:
    found: set[str] = set()
    work = [name]
    while work:
        for user in e.users(work.pop()):
            if user.name not in found and (user.op in ops or user.op in HANDS_ON):
                if user.op in ops:
                    found.add(user.name)
                work.append(user.name)
    return found


def residual_dropped(plan: Plan) -> list[Option]:
    """The sum of a branch and what it started from is replaced by the branch."""
    e = plan.first

    def make(add: Node, branch: str, residual: str) -> Callable[[], Change]:
        def apply() -> Change:
            consumers = e.handed(add.name)

            def edit(e: Editor) -> None:
                e.replace_uses(add.name, branch)
                e.remove(add.name)

            plan.everywhere(edit)
            return Change(
                f"residual {residual} is not added in {add.name}", (branch,), (add.name,), tuple(consumers), plan.every
            )

        return apply

    options: list[Option] = []
    for n in plan.sites(*_ADDS):
        a, b = e.ref(n, 0), e.ref(n, 1)
        if (
            a is None
            or b is None
            or a == b
            or plan.claimed(n.name)
            or e.type(a) != e.type(n.name)
            or e.type(b) != e.type(n.name)
        ):
            continue
        for residual, branch in ((a, b), (b, a)):
            if residual in e.live([branch]) and not e.is_input(branch):
                options.append((n.name, make(n, branch, residual)))
    return options
