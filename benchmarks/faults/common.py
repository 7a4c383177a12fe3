"""What all kinds of changes share: the sites of a case, the draw, and the record of what was done."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from benchmarks.faults.edit import Editor
from emerge.graph.model import Graph, Node
from emerge.graph.source import Case


@dataclass(frozen=True)
class Change:
    """One change that was made to the rank graphs.

    Attributes:
        what: one sentence.
        changed: nodes (or inputs) of the mutant that were changed, added, or now stand for a removed node.
        removed: nodes of the original that are gone.
        consumers: direct consumers of the changed or removed values, by their names in the original.
        ranks: ranks that were changed.
    """

    what: str
    changed: tuple[str, ...]
    removed: tuple[str, ...] = ()
    consumers: tuple[str, ...] = ()
    ranks: tuple[int, ...] = ()

    def places(self) -> set[str]:
        """Implementation nodes at which a finding is at the blame."""
        return {*self.changed, *self.removed, *self.consumers}


@dataclass
class Mutant:
    """Changed rank graphs and what was changed."""

    kind: str
    seed: int
    change: Change
    ranks: list[Graph] = field(repr=False)


#: One concrete change that could be made: a stable label and the edit.
Option = tuple[str, Callable[[], Change]]
Kind = Callable[["Plan"], list[Option]]


class Plan:
    """The rank graphs of a case, ready to be changed in place.

    Attributes:
        editors: one per rank. draw: for parameters of the chosen option.
    """

    def __init__(self, case: Case, draw: random.Random) -> None:
        self.editors = [Editor(g) for g in case.ranks]
        self.draw = draw
        self.world = len(self.editors)
        relations = case.relations
        self._claimed: list[set[str]] = [set() for _ in case.ranks]
        for entry in [*relations.expected_outputs, *relations.extra_outputs]:
            if entry.seq in relations.claimed_outputs or not relations.claimed_outputs:
                for leaf in entry.dist:
                    self._claimed[leaf.rank].add(leaf.name)
        self.live = [e.live(names) for e, names in zip(self.editors, self._claimed)]

    @property
    def first(self) -> Editor:
        """Rank 0, where sites are looked for."""
        return self.editors[0]

    @property
    def every(self) -> tuple[int, ...]:
        return tuple(range(self.world))

    def claimed(self, name: str) -> bool:
        """Is it itself a claimed output?"""
        return any(name in names for names in self._claimed)

    def alike(self, name: str) -> bool:
        """Does every rank have it, live, with the same operator and type?"""
        model = self.first.get(name)
        for editor, live in zip(self.editors, self.live):
            other = editor.get(name)
            if (
                other is None
                or name not in live
                or type(other) is not type(model)
                or self.first.type(name) != editor.type(name)
            ):
                return False
            if (
                isinstance(model, Node)
                and isinstance(other, Node)
                and (model.op != other.op or list(model.refs()) != list(other.refs()))
            ):
                return False
        return True

    def sites(self, *ops: str) -> list[Node]:
        """Nodes of rank 0 with one of these operators (the overload may be left out) that are alike and live."""
        return [
            n for n in self.first.graph.nodes if (n.op in ops or n.op.rsplit(".", 1)[0] in ops) and self.alike(n.name)
        ]

    def everywhere(self, edit: Callable[[Editor], None], ranks: Iterable[int] | None = None) -> None:
        """Applies an edit on all ranks, or on some."""
        for rank in self.every if ranks is None else ranks:
            edit(self.editors[rank])

    def waited(self, name: str) -> str:
        """The value of a collective once it is there: the ``wait_tensor`` behind it, or itself."""
        waits = [u for u in self.first.users(name) if u.op.endswith("wait_tensor.default")]
        return waits[0].name if len(waits) == 1 and len(self.first.users(name)) == 1 else name
