"""A law as minimal pairs: programs that must be proved equal to the reference, and programs that must not be."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from support.build import GraphBuilder, build_ranks, build_reference
from support.pairs import Pair

Program = Callable[[GraphBuilder], Any]
Given = Mapping[str, "str | tuple[str, str]"]


@dataclass
class Twin:
    """An implementation that differs from its law's in more than the program."""

    program: Program
    reference: Program | None = None
    given: Given | None = None
    outputs: list[str] | None = None


@dataclass
class LawCase:
    """One law.

    Attributes:
        reference: writes the sequential graph; ``right``/``wrong``: what implementations are called -> how they go.
        given, outputs: notation, see :mod:`support.pairs`; "" = output that is not claimed.
        unproved: right implementation -> why it has no derivation yet. Such a pair must start to fail here (strict
            xfail) as soon as it is proved.
        ranges: exclusive upper bounds of integer inputs, for execution.
    """

    name: str
    mesh: dict[str, int]
    reference: Program
    right: Mapping[str, Program | Twin]
    wrong: Mapping[str, Program | Twin]
    given: Given
    outputs: list[str]
    unproved: Mapping[str, str] = field(default_factory=dict)
    ranges: Mapping[str, int] = field(default_factory=dict)

    def pair(self, variant: str) -> Pair:
        """The pair of one implementation, right or wrong."""
        found = self.right[variant] if variant in self.right else self.wrong[variant]
        twin = found if isinstance(found, Twin) else Twin(found)
        return Pair(
            self.mesh,
            build_reference(twin.reference or self.reference, f"{self.name}/seq"),
            build_ranks(self.mesh, lambda g, rank: twin.program(g), f"{self.name}/{variant}"),
            self.given if twin.given is None else twin.given,
            self.outputs if twin.outputs is None else twin.outputs,
            self.ranges,
        )
