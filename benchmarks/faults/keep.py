"""Changes that keep the meaning; each is an identity by construction, so the pair must stay proved."""

from __future__ import annotations

from collections.abc import Callable
from math import prod

from benchmarks.faults.common import Change, Option, Plan
from benchmarks.faults.edit import WAIT, Editor, mutates
from emerge.graph.model import Ref


def reordered(plan: Plan) -> list[Option]:
    """Independent nodes of one rank in another order; collectives and random operators keep theirs."""

    def make(rank: int, seed: int) -> Callable[[], Change]:
        def apply() -> Change:
            import random

            moved = plan.editors[rank].reorder(random.Random(seed))
            return Change(f"{moved} nodes of rank {rank} stand elsewhere (order {seed})", (), ranks=(rank,))

        return apply

    if any(mutates(e.graph) for e in plan.editors):
        return []
    return [(f"{r}/{s}", make(r, s)) for r in plan.every for s in range(5)]


def renamed(plan: Plan) -> list[Option]:
    """All nodes of one rank under other names (claimed outputs keep theirs, relations name them)."""

    def make(rank: int) -> Callable[[], Change]:
        def apply() -> Change:
            e = plan.editors[rank]
            names = [n.name for n in e.graph.nodes if not plan.claimed(n.name)]
            numbers = list(range(len(names)))
            plan.draw.shuffle(numbers)
            for name, number in zip(names, numbers):
                e.rename(name, f"v{number}")
            return Change(f"nodes of rank {rank} are renamed", (), ranks=(rank,))

        return apply

    return [(str(r), make(r)) for r in plan.every]


def reshape_factored(plan: Plan) -> list[Option]:
    """A reshape in two steps, the first to one flat axis or with two neighbouring axes merged."""
    e = plan.first

    def make(name: str, between: list[int]) -> Callable[[], Change]:
        def apply() -> Change:
            def edit(e: Editor) -> None:
                node = e.node(name)
                first = e.insert(e.position(name), "aten.view.default", node.args[0], list(between))
                node.args[0] = Ref(first)

            plan.everywhere(edit)
            return Change(f"{name} is reshaped through {between}", (name,), ranks=plan.every)

        return apply

    options: list[Option] = []
    for n in plan.sites("aten.view.default"):
        source = e.ref(n, 0)
        if source is None:
            continue
        shape = e.shape(source)
        options.append((f"{n.name}/flat", make(n.name, [prod(shape)])))
        options += [
            (f"{n.name}/{d}", make(n.name, [*shape[:d], shape[d] * shape[d + 1], *shape[d + 2 :]]))
            for d in range(len(shape) - 1)
        ]
    return options


def transposes_cancelled(plan: Plan) -> list[Option]:
    """Two equal transposes behind a value."""
    e = plan.first

    def make(name: str, a: int, b: int) -> Callable[[], Change]:
        def apply() -> Change:
            def edit(e: Editor) -> None:
                one = e.add(name, "aten.transpose.int", Ref(name), a, b)
                two = e.add(one, "aten.transpose.int", Ref(one), b, a)
                e.replace_uses(name, two, but=(one,))

            plan.everywhere(edit)
            return Change(f"{name} is transposed twice", (name,), ranks=plan.every)

        return apply

    options: list[Option] = []
    for n in e.graph.nodes:
        if (
            plan.alike(n.name)
            and not plan.claimed(n.name)
            and e.type(n.name)
            and len(e.shape(n.name)) > 1
            and not _collective(n.op)
        ):
            rank = len(e.shape(n.name))
            options += [(f"{n.name}/{a}-{b}", make(n.name, a, b)) for a in range(rank) for b in range(a + 1, rank)]
    return options


def _collective(op: str) -> bool:
    return "c10d" in op and op != WAIT


def commuted(plan: Plan) -> list[Option]:
    """The operands of a sum or a product exchanged."""
    return _commuted(plan, [plan.every])


def commuted_on_one_rank(plan: Plan) -> list[Option]:
    """The same on one rank only, so that the rank graphs differ in structure."""
    return _commuted(plan, [(r,) for r in plan.every])


def _commuted(plan: Plan, choices: list[tuple[int, ...]]) -> list[Option]:
    e = plan.first

    def make(name: str, ranks: tuple[int, ...]) -> Callable[[], Change]:
        def apply() -> Change:
            def edit(e: Editor) -> None:
                args = e.node(name).args
                args[0], args[1] = args[1], args[0]

            plan.everywhere(edit, ranks)
            return Change(f"operands of {name} are exchanged on ranks {list(ranks)}", (name,), ranks=ranks)

        return apply

    options: list[Option] = []
    for n in plan.sites("aten.add.Tensor", "aten.mul.Tensor"):
        a, b = e.ref(n, 0), e.ref(n, 1)
        if a is not None and b is not None and a != b and len(n.args) == 2 and not n.kwargs:
            options += [(f"{n.name}/{ranks}", make(n.name, ranks)) for ranks in choices]
    return options


def identity_inserted(plan: Plan) -> list[Option]:
    """A detach, clone or alias behind a value."""
    return _identity_inserted(plan, [plan.every])


def identity_on_one_rank(plan: Plan) -> list[Option]:
    """The same on one rank only, so that the rank graphs differ in structure."""
    return _identity_inserted(plan, [(r,) for r in plan.every])


def _identity_inserted(plan: Plan, choices: list[tuple[int, ...]]) -> list[Option]:
    e = plan.first

    def make(name: str, op: str, ranks: tuple[int, ...]) -> Callable[[], Change]:
        def apply() -> Change:
            def edit(e: Editor) -> None:
                made = e.add(name, op, Ref(name))
                e.replace_uses(name, made, but=(made,))

            plan.everywhere(edit, ranks)
            return Change(f"{op} behind {name} on ranks {list(ranks)}", (name,), ranks=ranks)

        return apply

    ops = ("aten.detach.default", "aten.clone.default", "aten.alias.default")
    return [
        (f"{n.name}/{op}/{ranks}", make(n.name, op, ranks))
        for n in e.graph.nodes
        if plan.alike(n.name) and not plan.claimed(n.name) and e.type(n.name) and not _collective(n.op)
        for op in ops
        for ranks in choices
    ]


def wait_split(plan: Plan) -> list[Option]:
    """A collective is waited for a second time, for some of what follows; or twice in a row."""
    e = plan.first

    def make(name: str, source: str, twice: bool) -> Callable[[], Change]:
        def apply() -> Change:
            def edit(e: Editor) -> None:
                if twice:
                    again = e.add(name, WAIT, Ref(name))
                    e.replace_uses(name, again, but=(again,))
                else:
                    users = [u.name for u in e.users(name)]
                    again = e.insert(e.position(users[-1]), WAIT, Ref(source))
                    e.replace_uses(name, again, only=users[-1:])

            plan.everywhere(edit)
            return Change(f"{name} is waited for {'twice in a row' if twice else 'again'}", (name,), ranks=plan.every)

        return apply

    options: list[Option] = []
    for n in plan.sites(WAIT):
        source = e.ref(n, 0)
        if source is not None and not plan.claimed(n.name) and e.users(n.name):
            options += [
                (f"{n.name}/twice", make(n.name, source, True)),
                (f"{n.name}/again", make(n.name, source, False)),
            ]
    return options


__all__ = [
    "commuted",
    "commuted_on_one_rank",
    "identity_inserted",
    "identity_on_one_rank",
    "renamed",
    "reordered",
    "reshape_factored",
    "transposes_cancelled",
    "wait_split",
]
