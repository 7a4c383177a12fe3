"""Faults of communication: all-reduce, all-gather, reduce-scatter, bias before a reduction, order of ranks."""

from __future__ import annotations

from collections.abc import Callable

from benchmarks.faults.common import Change, Option, Plan
from benchmarks.faults.edit import ALL_GATHER, ALL_REDUCE, HANDS_ON, REDUCE_SCATTER, WAIT, Editor, scalar_at
from emerge.graph.model import Node, Ref

OPS = {ALL_REDUCE: "all_reduce", ALL_GATHER: "all_gather", REDUCE_SCATTER: "reduce_scatter"}


def _communicates(plan: Plan, node: Node) -> bool:
    """Does every group of the collective hold more than one rank?"""
    group = next((a for a in reversed(node.args) if isinstance(a, str) and a in plan.first.graph.groups), None)
    return group is not None and all(len(g) > 1 for g in plan.first.graph.groups[group])


def _collectives(plan: Plan, op: str) -> list[Node]:
    return [n for n in plan.sites(op) if _communicates(plan, n)]


def is_shift(plan: Plan, reduce: Node) -> bool:
    """Is the reduced value only the shift of a log-sum-exp: a maximum of x that is only subtracted from x?

    log(sum(exp(x - m))) - (x_t - m) does not depend on m as long as all ranks use the same m. Changes that keep m the
    same on all ranks are therefore no faults.
    """
    e = plan.first
    source = e.ref(reduce, 0)
    if source is None:
        return False
    maximum = e.get(e.origin(source))
    if not isinstance(maximum, Node) or maximum.op not in ("aten.max.dim", "aten.amax.default"):
        return False
    x = e.ref(maximum, 0)
    ends = e.ends(reduce.name)
    return (
        x is not None
        and bool(ends)
        and all(
            n.op == "aten.sub.Tensor"
            and (a := e.ref(n, 0)) is not None
            and e.origin(a) == e.origin(x)
            and e.ref(n, 1) == used
            for n, used in ends
        )
    )


def is_one_hot_lookup(plan: Plan, reduce: Node) -> bool:
    """Does one rank hold the looked-up value and every other zero, while the sign of that value may be known?

    The sum of x and zeros is also their minimum where x <= 0, as for a logit minus the maximum, and their maximum where
    x >= 0. Only what is looked up in a parameter has both signs for certain.
    """
    e = plan.first
    source = e.ref(reduce, 0)
    for _ in range(20):
        node = e.get(e.origin(source)) if source is not None else None
        if not isinstance(node, Node) or not node.args:
            return False
        if node.op in ("aten.index.Tensor", "aten.embedding.default"):
            table = e.ref(node, 0)
            return table is None or not e.is_input(e.origin(table))
        if node.op.rsplit(".", 1)[0] not in (
            "aten.index_put",
            "aten.slice_scatter",
            "aten.masked_fill",
            "aten.where",
            "aten.mul",
        ):
            return False
        source = e.ref(node, 0)
    return False


# ---- all-reduce -----------------------------------------------------------------------------------------------------


def all_reduce_missing(plan: Plan) -> list[Option]:
    """The value is used as it is on each rank."""

    def make(node: Node) -> Callable[[], Change]:
        def apply() -> Change:
            done, source = plan.waited(node.name), plan.first.ref(node, 0)
            assert source is not None
            consumers = plan.first.handed(done)
            gone = tuple(dict.fromkeys((done, node.name)))

            def edit(e: Editor) -> None:
                e.replace_uses(done, source)
                e.remove(*gone)

            plan.everywhere(edit)
            return Change(f"all-reduce {node.name} is missing", (source,), gone, tuple(consumers), plan.every)

        return apply

    return [(n.name, make(n)) for n in _collectives(plan, ALL_REDUCE)]


def all_reduce_doubled(plan: Plan) -> list[Option]:
    """A second all-reduce behind the first: sums times the number of ranks. Not for max and min (same result)."""

    def make(node: Node) -> Callable[[], Change]:
        def apply() -> Change:
            done = plan.waited(node.name)
            consumers = plan.first.handed(done)
            new: list[str] = []

            def edit(e: Editor) -> None:
                again = e.add(done, ALL_REDUCE, Ref(done), *e.node(node.name).args[1:])
                wait = e.add(again, WAIT, Ref(again))
                e.replace_uses(done, wait, but=(again,))
                new[:] = [again, wait]

            plan.everywhere(edit)
            return Change(f"all-reduce {node.name} is done twice", (done, *new), (), tuple(consumers), plan.every)

        return apply

    return [(n.name, make(n)) for n in _collectives(plan, ALL_REDUCE) if n.args[1] == "sum" and not is_shift(plan, n)]


def all_reduce_wrong_group(plan: Plan) -> list[Option]:
    """Over groups of half the ranks, or of one."""

    def make(node: Node, size: int) -> Callable[[], Change]:
        def apply() -> Change:
            group = f"planted_groups_of_{size}"
            groups = [list(range(i, i + size)) for i in range(0, plan.world, size)]

            def edit(e: Editor) -> None:
                e.graph.groups[group] = [list(g) for g in groups]
                target = e.node(node.name)
                target.args = [*target.args[:2], group, *target.args[3:]]

            consumers = plan.first.handed(node.name)
            plan.everywhere(edit)
            return Change(
                f"all-reduce {node.name} runs over groups {groups}", (node.name,), (), tuple(consumers), plan.every
            )

        return apply

    sizes = sorted({1, plan.world // 2}) if plan.world % 2 == 0 else [1]
    return [(f"{n.name}/{s}", make(n, s)) for n in _collectives(plan, ALL_REDUCE) for s in sizes]


def _wrong_op(plan: Plan, op: str) -> list[Option]:
    def make(node: Node, how: str) -> Callable[[], Change]:
        def apply() -> Change:
            old = node.args[1]

            def edit(e: Editor) -> None:
                e.node(node.name).args[1] = how

            consumers = plan.first.handed(node.name)
            plan.everywhere(edit)
            return Change(
                f"{OPS[op]} {node.name} takes {how} instead of {old}", (node.name,), (), tuple(consumers), plan.every
            )

        return apply

    return [
        (f"{n.name}/{how}", make(n, how))
        for n in _collectives(plan, op)
        for how in ("sum", "max", "min", "avg")
        if how != n.args[1] and not is_shift(plan, n) and (how == "avg" or not is_one_hot_lookup(plan, n))
    ]


def all_reduce_wrong_op(plan: Plan) -> list[Option]:
    """Another reduction. Not for a log-sum-exp shift (any value that all ranks share will do there), and no minimum or
    maximum of a value that only one rank holds and whose sign may be known."""
    return _wrong_op(plan, ALL_REDUCE)


# ---- all-gather and reduce-scatter ----------------------------------------------------------------------------------


def all_gather_dropped(plan: Plan) -> list[Option]:
    """The local shard, repeated to the same shape. Shards of different ranks hold different data."""

    def make(node: Node) -> Callable[[], Change]:
        def apply() -> Change:
            done, source, count = plan.waited(node.name), plan.first.ref(node, 0), scalar_at(node, 1)
            assert source is not None
            assert isinstance(count, int)
            consumers = plan.first.handed(done)
            gone = tuple(dict.fromkeys((done, node.name)))
            new: list[str] = []

            def edit(e: Editor) -> None:
                made = e.add(done, "aten.cat.default", [Ref(source)] * count)
                e.replace_uses(done, made)
                e.remove(*gone)
                new[:] = [made]

            plan.everywhere(edit)
            return Change(
                f"all-gather {node.name} is replaced by the local shard, repeated",
                (source, *new),
                gone,
                tuple(consumers),
                plan.every,
            )

        return apply

    return [(n.name, make(n)) for n in _collectives(plan, ALL_GATHER)]


def all_gather_wrong_dim(plan: Plan) -> list[Option]:
    """Shards joined along another dimension and read in the expected shape: every element but few stands elsewhere.

    Needs more than one position per shard, otherwise rows in rank order are the same as columns in rank order.
    """

    def make(node: Node, dim: int) -> Callable[[], Change]:
        def apply() -> Change:
            done, shape = plan.waited(node.name), plan.first.shape(node.name)
            count = scalar_at(node, 1)
            assert isinstance(count, int)
            consumers = plan.first.handed(done)
            new: list[str] = []

            def edit(e: Editor) -> None:
                pieces = e.parts(done, "aten.split.Tensor", Ref(done), shape[0] // count)
                joined = e.add(pieces[-1], "aten.cat.default", [Ref(p) for p in pieces], dim)
                made = e.add(joined, "aten.reshape.default", Ref(joined), list(shape))
                e.replace_uses(
                    done,
                    made,
                    but=[u.name for u in e.users(done) if u.op == "aten.split.Tensor" and u.name.startswith("planted")],
                )
                new[:] = [*pieces, joined, made]

            plan.everywhere(edit)
            return Change(
                f"all-gather {node.name} joins along dimension {dim}",
                (node.name, done, *new),
                (),
                tuple(consumers),
                plan.every,
            )

        return apply

    options: list[Option] = []
    for n in _collectives(plan, ALL_GATHER):
        count, shape = scalar_at(n, 1), plan.first.shape(n.name)
        if isinstance(count, int) and shape[0] // count > 1:
            options += [(f"{n.name}/{d}", make(n, d)) for d in range(1, len(shape)) if shape[d] > 1]
    return options


def reduce_scatter_dropped(plan: Plan) -> list[Option]:
    """The rank's slice of the unreduced value (a partial sum on each rank)."""

    def make(node: Node) -> Callable[[], Change]:
        def apply() -> Change:
            done, source = plan.waited(node.name), plan.first.ref(node, 0)
            assert source is not None
            size = plan.first.shape(node.name)[0]
            consumers = plan.first.handed(done)
            gone = tuple(dict.fromkeys((done, node.name)))
            new: list[str] = []

            def edit(e: Editor) -> None:
                at = _place(e, node.name)
                made = e.add(done, "aten.slice.Tensor", Ref(source), 0, at * size, (at + 1) * size)
                e.replace_uses(done, made)
                e.remove(*gone)
                new[:] = [made]

            plan.everywhere(edit)
            return Change(
                f"reduce-scatter {node.name} is replaced by a slice", (source, *new), gone, tuple(consumers), plan.every
            )

        return apply

    return [(n.name, make(n)) for n in _collectives(plan, REDUCE_SCATTER)]


def _place(e: Editor, name: str) -> int:
    """Place of a rank in the process group of a collective."""
    group = e.node(name).args[-1]
    assert isinstance(group, str)
    return next(g.index(e.rank) for g in e.graph.groups[group] if e.rank in g)


def reduce_scatter_wrong_dim(plan: Plan) -> list[Option]:
    """Blocks of another dimension are scattered and read in the expected shape."""

    def make(node: Node, dim: int) -> Callable[[], Change]:
        def apply() -> Change:
            done, source, count = plan.waited(node.name), plan.first.ref(node, 0), scalar_at(node, 2)
            assert source is not None
            assert isinstance(count, int)
            before, after = plan.first.shape(source), plan.first.shape(node.name)
            consumers = plan.first.handed(done)
            gone = tuple(dict.fromkeys((done, node.name)))
            new: list[str] = []

            def edit(e: Editor) -> None:
                pieces = e.parts(source, "aten.split.Tensor", Ref(source), before[dim] // count, dim)
                joined = e.add(pieces[-1], "aten.cat.default", [Ref(p) for p in pieces])
                scattered = e.add(node.name, REDUCE_SCATTER, Ref(joined), *e.node(node.name).args[1:])
                waited = e.add(scattered, WAIT, Ref(scattered))
                made = e.add(waited, "aten.reshape.default", Ref(waited), list(after))
                e.replace_uses(done, made)
                e.remove(*gone)
                new[:] = [*pieces, joined, scattered, waited, made]

            plan.everywhere(edit)
            return Change(
                f"reduce-scatter {node.name} scatters dimension {dim}",
                (source, *new),
                gone,
                tuple(consumers),
                plan.every,
            )

        return apply

    options: list[Option] = []
    for n in _collectives(plan, REDUCE_SCATTER):
        source, count = plan.first.ref(n, 0), scalar_at(n, 2)
        if source is None or not isinstance(count, int):
            continue
        shape = plan.first.shape(source)
        options += [
            (f"{n.name}/{d}", make(n, d)) for d in range(1, len(shape)) if shape[d] > 1 and shape[d] % count == 0
        ]
    return options


def reduce_scatter_wrong_op(plan: Plan) -> list[Option]:
    """Another reduction."""
    return _wrong_op(plan, REDUCE_SCATTER)


# ---- bias -----------------------------------------------------------------------------------------------------------


def bias_on_every_rank(plan: Plan) -> list[Option]:
    """A bias that follows a summing collective is added before it, once per rank."""

    def make(node: Node, source: str, add: Node, bias: str, other: str) -> Callable[[], Change]:
        def apply() -> Change:
            consumers = plan.first.handed(add.name)
            new: list[str] = []

            def edit(e: Editor) -> None:
                early = e.insert(e.position(node.name), "aten.add.Tensor", Ref(source), Ref(bias))
                e.replace_uses(source, early, only=(node.name,))
                e.replace_uses(add.name, other)
                e.remove(add.name)
                new[:] = [early]

            plan.everywhere(edit)
            return Change(
                f"bias {bias} is added before {node.name} on every rank",
                (*new, node.name, other),
                (add.name,),
                tuple(consumers),
                plan.every,
            )

        return apply

    options: list[Option] = []
    e = plan.first
    for node in [*_collectives(plan, ALL_REDUCE), *_collectives(plan, REDUCE_SCATTER)]:
        source = e.ref(node, 0)
        if node.args[1] != "sum" or source is None:
            continue
        for add, used in e.ends(node.name):
            if add.op != "aten.add.Tensor" or len(add.args) != 2 or add.kwargs or e.shape(used) != e.shape(node.name):
                continue
            for position in (0, 1):
                bias = e.ref(add, position)
                fits = bias is not None and bias != used and e.is_input(bias) and len(e.shape(bias)) == 1
                if (
                    fits
                    and bias is not None
                    and e.shape(bias)[0] == e.shape(source)[-1]
                    and _only_copies(e, used, node.name)
                ):
                    options.append((f"{node.name}/{bias}", make(node, source, add, bias, used)))
    return options


def _only_copies(e: Editor, name: str, start: str) -> bool:
    """Is ``name`` the value ``start`` itself, only waited for, copied or viewed in its own shape?"""
    while name != start:
        node = e.get(name)
        if not isinstance(node, Node) or node.op not in HANDS_ON or e.shape(name) != e.shape(start):
            return False
        source = e.ref(node, HANDS_ON[node.op])
        if source is None:
            return False
        name = source
    return True


# ---- order of ranks -------------------------------------------------------------------------------------------------


def rank_order_swapped(plan: Plan) -> list[Option]:
    """Two ranks exchange places: in a gathered tensor, in a process group, or in the bounds of a rank's slice."""
    if plan.world < 2:
        return []
    a, b = sorted(plan.draw.sample(range(plan.world), 2))
    options: list[Option] = []

    def blocks(node: Node, count: int) -> Callable[[], Change]:
        def apply() -> Change:
            done, shape = plan.waited(node.name), plan.first.shape(node.name)
            consumers = plan.first.handed(done)
            new: list[str] = []

            def edit(e: Editor) -> None:
                pieces = e.parts(done, "aten.split.Tensor", Ref(done), shape[0] // count)
                order = list(pieces)
                order[a], order[b] = order[b], order[a]
                made = e.add(pieces[-1], "aten.cat.default", [Ref(p) for p in order])
                first = e.ref(e.node(pieces[0]), 0)
                e.replace_uses(done, made, but=[first] if first else [])
                new[:] = [*pieces, made]

            plan.everywhere(edit)
            return Change(
                f"blocks {a} and {b} of all-gather {node.name} are exchanged",
                (node.name, done, *new),
                (),
                tuple(consumers),
                plan.every,
            )

        return apply

    def order(node: Node, op: str) -> Callable[[], Change]:
        def apply() -> Change:
            members = list(range(plan.world))
            members[a], members[b] = members[b], members[a]

            def edit(e: Editor) -> None:
                e.graph.groups["planted_order"] = [list(members)]
                e.node(node.name).args[-1] = "planted_order"

            consumers = plan.first.handed(node.name)
            plan.everywhere(edit)
            return Change(
                f"{OPS[op]} {node.name} runs over the group {members}", (node.name,), (), tuple(consumers), plan.every
            )

        return apply

    def bounds(node: Node) -> Callable[[], Change]:
        def apply() -> Change:
            one, two = plan.editors[a].node(node.name), plan.editors[b].node(node.name)
            one.args[2:4], two.args[2:4] = two.args[2:4], one.args[2:4]
            consumers = plan.first.handed(node.name)
            return Change(
                f"the bounds of {node.name} are exchanged between ranks {a} and {b}",
                (node.name,),
                (),
                tuple(consumers),
                (a, b),
            )

        return apply

    for op in (ALL_GATHER, REDUCE_SCATTER):
        for node in _collectives(plan, op):
            group = node.args[-1]
            assert isinstance(group, str)
            if plan.first.graph.groups[group] == [list(plan.every)]:
                options.append((f"{node.name}/order", order(node, op)))
                if op == ALL_GATHER:
                    options.append((f"{node.name}/blocks", blocks(node, plan.world)))
    for node in plan.sites("aten.slice.Tensor"):
        found = [e.node(node.name).args[2:4] for e in plan.editors]
        if len({str(f) for f in found}) == plan.world:
            options.append((f"{node.name}/bounds", bounds(node)))
    return options
