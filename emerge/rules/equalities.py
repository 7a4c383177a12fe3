"""Certificates of the algebra's rules (``rules/*.egg``).

``tested``: the rule is applied alone to random ground terms that match its left side, and all terms that it makes equal are
evaluated. They must be undefined at the same elements and have the same value elsewhere; classes of equal terms have no
direction, so a side that is defined where the other is not is refused, whichever it is. ``proved``: it passed those tests,
and holds over the extended reals symbolically (:mod:`emerge.rules.equality_proof`).
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from emerge.algebra.encode import dims as dims_text
from emerge.algebra.encode import free_facts
from emerge.algebra.rulefile import App, EqualityRule, Var
from emerge.algebra.saturate import Class, Classes, Node, read
from emerge.rules.certify import Refusal
from emerge.rules.equality_proof import TIMEOUT_MS, prove
from emerge.rules.movement_proof import METHOD, moves_only, same_elements
from emerge.rules.term_instances import SPECS, Instance, instances
from emerge.rules.term_values import NoMeaning, NoValue, Value, difference, evaluate, leaf
from emerge.util.resources import resource_dir

#: A rule must match on so many instances, and agree at so many elements where it is defined.
INSTANCES, MIN_MATCHES, MIN_ELEMENTS = 48, 8, 100
#: A campaign may ask for more ground terms, or for fewer down to this.
LEAST_SAMPLES = 24
#: Of the classes in which terms were made equal so many must have been compared at some element.
MIN_SHARE = 0.9
SPECIAL = (0.0, 1.0, -1.0, 2.0, -2.0, 0.5, -0.5, 3.0, 1e30, -1e30, 1e-30, -1e-30, float("inf"), float("-inf"))
DRAWS = ("normal", "integers", "special", "positive", "finite", "large", "special", "unit", "special", "holes")


@dataclass(frozen=True)
class Validation:
    """How rules are tested.

    Attributes:
        device: where terms are evaluated: ``auto`` (cuda where torch finds it), ``cpu`` or ``cuda``.
        samples: ground terms per rule. smt_seconds: for a proof.
    """

    device: str = "auto"
    samples: int = INSTANCES
    smt_seconds: float = TIMEOUT_MS / 1000


VALIDATION = Validation()


@dataclass(frozen=True)
class EqualityCertificate:
    """Why a rule is admitted.

    Attributes:
        instances: matched left sides. elements: compared elements that have a value.
        method: what was done; of a proof, over what.
    """

    law: str
    hash: str
    evidence: str
    instances: int
    elements: int
    method: str
    seed: int
    torch: str
    egglog: str
    device: str = "cpu"
    dtype: str = "float64"

    def as_json(self) -> dict[str, Any]:
        """All fields but the name."""
        return {k: v for k, v in asdict(self).items() if k != "law"}


def certify_rule(
    rule: EqualityRule, seed: int = 0, how: Validation = VALIDATION
) -> EqualityCertificate | Refusal:
    """Tests a rule and, where its terms work element by element, proves it.

    Raises:
        ExecutionError: a cuda device is asked for and torch finds none.
    """
    if rule.has_premise:
        return _proved_only(rule, seed, how)
    from emerge.execute.options import Options

    device = str(Options(device=how.device).torch_device())
    matches = elements = moved = 0
    moving = moves_only(rule)
    for side in _sides(rule):
        found = instances(side, seed, how.samples)
        if not found:
            return Refusal(rule.name, False, "no term that matches its left side could be made")
        test = _Test(rule, found, seed, device)
        outcome = test.run()
        if isinstance(outcome, Refusal):
            return outcome
        if outcome[0] < MIN_MATCHES or outcome[1] < MIN_ELEMENTS:
            return Refusal(
                rule.name, False,
                f"it matched {outcome[0]} of {len(found)} terms made for it and was compared at {outcome[1]} elements "
                f"with a value; at least {MIN_MATCHES} and {MIN_ELEMENTS} are needed",
            )  # fmt: skip
        matches, elements = matches + outcome[0], elements + outcome[1]
        if moving:
            shown = test.moved()
            moving, moved = shown >= MIN_MATCHES, moved + shown
    proof = prove(rule, how.smt_seconds)
    if proof.refuted:
        return Refusal(rule.name, True, proof.reason)
    if moving and not proof.holds:
        method = f"{METHOD}, {moved} pairs of terms"
        return _certificate(rule, "proved", matches, elements, method, seed, device)
    evidence = "proved" if proof.holds else "tested"
    return _certificate(rule, evidence, matches, elements, proof.reason, seed, device)


def _proved_only(rule: EqualityRule, seed: int, how: Validation) -> EqualityCertificate | Refusal:
    """A rule from equalities: no random values satisfy them, so nothing but a proof shows it."""
    proof = prove(rule, how.smt_seconds)
    if proof.holds:
        return _certificate(rule, "proved", 0, 0, proof.reason, seed, "cpu")
    if proof.refuted:
        return Refusal(rule.name, True, proof.reason)
    return Refusal(
        rule.name, False, "two of its patterns have one name, so it starts from an equality, and such a rule must be proved; "
        "it is not element by element, or z3 found no proof",
    )  # fmt: skip


def _certificate(
    rule: EqualityRule, evidence: str, matches: int, elements: int, method: str, seed: int, device: str
) -> EqualityCertificate:
    from importlib.metadata import version

    import torch

    return EqualityCertificate(
        rule.name, rule.hash, evidence, matches, elements, method, seed, str(torch.__version__), version("egglog"),
        device,
    )


def confirm(
    rule: EqualityRule, pool: Sequence[npt.NDArray[np.float64]], seed: int = 0, count: int = 2 * MIN_MATCHES
) -> int | Refusal:
    """Tries a certified rule with operands cut out of given rows of values; compared elements, or why it does not hold."""
    elements = 0
    for side in _sides(rule):
        outcome = _Test(rule, instances(side, seed + 1, count), seed, pool=pool).run()
        if isinstance(outcome, Refusal):
            return outcome
        elements += outcome[1]
    if not elements:
        return Refusal(rule.name, False, "has no value on them")
    return elements


def _sides(rule: EqualityRule) -> list[EqualityRule]:
    """A rule in both its directions: each side is the left side of a rewrite of its own."""
    if not rule.reverse:
        return [rule]
    left, right = rule.unions[0]
    assert isinstance(right, App)
    return [rule, replace(rule, patterns=(("", right),), unions=((right, left),))]


class _Failed(Exception):
    """A primitive on the right side has no value."""


class _Test:
    """One rule alone on its instances."""

    def __init__(
        self, rule: EqualityRule, found: list[Instance], seed: int, device: str = "cpu",
        pool: Sequence[npt.NDArray[np.float64]] = (),
    ) -> None:  # fmt: skip
        self.rule, self.found, self.seed, self.device, self.pool = rule, found, seed, device, pool
        self.seen: set[int] = set()
        self.classes = Classes()
        self.leaves = {n: x for i in found for n, x in i.leaves.items()}
        self.indices = {n: x for i in found for n, x in i.indices.items()}

    def run(self) -> tuple[int, int] | Refusal:
        """Matches and compared elements, or why the rule is refused."""
        import torch

        try:
            classes, matches = self.saturate()
        except _Failed as exc:
            return Refusal(self.rule.name, True, f"stops the saturation ({exc}); a condition must exclude that")
        self.classes = classes
        elements = 0
        for k, kind in enumerate(DRAWS):
            drawn = self.draw(kind, k)
            with torch.device(self.device):  # ranges are made where the operands are
                wrong = self.check(classes, drawn)
            if isinstance(wrong, Refusal):
                return wrong
            elements += wrong
        made_equal = {n for n, nodes in classes.nodes.items() if len(nodes) > 1}
        if len(self.seen) < MIN_SHARE * len(made_equal):
            return Refusal(
                self.rule.name, False,
                f"{len(self.seen)} of {len(made_equal)} equalities could be compared; float64 overflows in the others",
            )  # fmt: skip
        return matches, elements

    def moved(self) -> int:
        """After :meth:`run`: pairs of equal terms that hold the same symbolic elements; -1 where some do not."""
        return same_elements(self.classes, self.leaves, self.indices, self.seed)

    def saturate(self) -> tuple[Classes, int]:
        """The classes after the rule was applied, and how often it matched at first."""
        from egglog.bindings import EggSmolError, EGraph

        graph = EGraph()
        language = resource_dir("rules") / "language.egg"
        graph.run_program(*graph.parse_program(language.read_text(encoding="utf-8"), language.name))
        graph.run_program(*graph.parse_program(self.rule.text, self.rule.place))
        lines = [f"(set (shape (Leaf {n})) {dims_text(shape)})" for n, (_, shape) in self.leaves.items()]
        padded = {c.args[0].name for c in self.rule.conditions if isinstance(c, App) and c.op == "padding" and c.args
                  and isinstance(c.args[0], Var)}  # fmt: skip
        lines += [f"(padding (Leaf {n}))" for n, (name, _) in self.leaves.items() if name in padded]
        lines += [fact for spec in SPECS for fact in free_facts(spec)]
        lines += [f"(let $i{k}x{j} {t.text})" for k, i in enumerate(self.found) for j, t in enumerate(i.terms)]
        for k in range(0, len(lines), 100):
            graph.run_program(*graph.parse_program("\n".join(lines[k : k + 100])))
        step = graph.parse_program("(run-schedule (seq (saturate shapes) (run algebra) (saturate shapes)))")
        matches = 0
        for round_ in range(2):
            try:
                outs: list[Any] = list(graph.run_program(*step))
            except EggSmolError as exc:
                raise _Failed(" ".join(str(exc).split())) from None
            if not round_:
                matches = sum(
                    int(n) for r, n in outs[0].report.num_matches_per_rule.items()
                    if r.removesuffix("=>").removesuffix("<=") == self.rule.name
                )  # fmt: skip
        classes = Classes()
        read(graph, classes, shapes=True)
        return classes, matches

    def draw(self, kind: str, number: int) -> dict[int, Value]:
        """Values of all leaves."""
        import torch

        generator = torch.Generator().manual_seed(self.seed * 7919 + number * 101 + 5)
        rng = random.Random(self.seed * 7919 + number)
        out = {}
        for n, (_, shape) in self.leaves.items():
            if n in self.indices:
                out[n] = leaf(torch.randint(0, self.indices[n], shape, generator=generator).to(self.device, torch.float64))
                continue
            if self.pool:
                out[n] = leaf(self.cut_out(rng, shape).to(self.device))
                continue
            x = torch.randn(shape, generator=generator, dtype=torch.float64) * 2
            if kind == "integers":
                x = torch.randint(-3, 4, shape, generator=generator).to(torch.float64)
            elif kind in ("special", "finite"):
                pool = torch.tensor(SPECIAL if kind == "special" else SPECIAL[:8], dtype=torch.float64)
                x = pool[torch.randint(0, len(pool), shape, generator=generator)]
            elif kind == "positive":
                x = x.abs() + 0.01
            elif kind == "large":
                x = x * rng.choice((1e6, 1e30))
            elif kind == "unit":
                x = torch.rand(shape, generator=generator, dtype=torch.float64)
            out[n] = leaf(x.to(self.device))
            if kind == "holes":  # a variable stands for any tensor, also for one that is undefined somewhere
                out[n] = replace(out[n], undefined=torch.rand(shape, generator=generator).to(self.device) < 0.2)
        return out

    def cut_out(self, rng: random.Random, shape: tuple[int, ...]) -> Any:
        """A tensor of some shape from a place of one of the rows of values."""
        import torch

        row = self.pool[rng.randrange(len(self.pool))]
        wanted = int(np.prod(shape))
        return torch.from_numpy(np.resize(np.roll(row, -rng.randrange(row.size)), wanted).reshape(shape).copy())

    def check(self, classes: Classes, drawn: dict[int, Value]) -> int | Refusal:
        """Evaluates every term; compared elements, or the first difference."""
        values: dict[int, tuple[Value, Node]] = {}
        pending = [(number, node) for number, nodes in classes.nodes.items() for node in nodes]
        pending.sort(key=lambda p: p[1].op != "Leaf")
        elements = 0
        while pending:
            later = []
            for number, node in pending:
                args = [values.get(a.id) if isinstance(a, Class) else a for a in node.args]
                if any(a is None for a in args):
                    later.append((number, node))
                    continue
                try:
                    if node.op == "Leaf":
                        value = drawn[node.args[0]]
                    else:
                        value = evaluate(node.op, [a[0] if isinstance(a, tuple) and a and isinstance(a[0], Value) else a
                                                   for a in args])  # fmt: skip
                except NoMeaning as exc:
                    return Refusal(self.rule.name, False, str(exc))
                except NoValue as exc:
                    return self.refuse(classes, node, f"makes {self.text(classes, node)}, which has no value: {exc}")
                wrong = self.compare(classes, number, node, value, values, drawn)
                if isinstance(wrong, Refusal):
                    return wrong
                elements += wrong
            if len(later) == len(pending):
                return Refusal(self.rule.name, False, "it makes terms that are defined by themselves only")
            pending = later
        return elements

    def compare(
        self, classes: Classes, number: int, node: Node, value: Value, values: dict[int, tuple[Value, Node]],
        drawn: dict[int, Value],
    ) -> int | Refusal:  # fmt: skip
        shape = classes.shapes.get(number)
        if shape is not None and shape != value.shape:
            return self.refuse(
                classes, node,
                f"makes {self.text(classes, node)}, of shape {list(value.shape)}, equal to a term of shape {list(shape)}",
            )  # fmt: skip
        known = values.get(number)
        if known is None:
            values[number] = (value, node)
            return 0
        other, first = known
        if other.shape != value.shape:
            return self.refuse(
                classes, node,
                f"makes {self.text(classes, first)} of shape {list(other.shape)} and {self.text(classes, node)} of shape "
                f"{list(value.shape)} equal",
            )  # fmt: skip
        wrong = difference(other, value)
        if bool((~other.unsure & ~value.unsure).any()):
            self.seen.add(number)
        if wrong is None:
            return int((~other.unsure & ~value.unsure & ~value.undefined).sum())
        at, text = wrong
        return self.refuse(
            classes, node,
            f"makes {self.text(classes, first)} and {self.text(classes, node)} equal, which are {text} at element "
            f"{list(at)}{self.inputs(classes, (first, node), at, drawn, value.shape)}",
        )  # fmt: skip

    def refuse(self, classes: Classes, node: Node, reason: str) -> Refusal:
        return Refusal(self.rule.name, True, reason)

    def inputs(
        self, classes: Classes, nodes: tuple[Node, ...], at: tuple[int, ...], drawn: dict[int, Value], shape: Any
    ) -> str:
        """Operands at the element, where they lie at the same one."""
        shown = []
        for n in dict.fromkeys(n for node in nodes for n in _leaves(classes, node)):
            if drawn[n].shape == shape:
                shown.append(f"{self.leaves[n][0]} = {float(drawn[n].number[at]):g}")
            else:
                shown.append(f"{self.leaves[n][0]} of shape {list(drawn[n].shape)}")
        return f" for {', '.join(shown)}" if shown else ""

    def text(self, classes: Classes, node: Node, depth: int = 4) -> str:
        """A term with the rule's variables for leaves."""
        if node.op == "Leaf":
            return self.leaves[node.args[0]][0]
        parts = []
        for a in node.args:
            if isinstance(a, Class):
                inner = classes.nodes.get(a.id, [])
                best = min(inner, key=lambda n: (n.op != "Leaf", len(n.args)), default=None)
                parts.append("..." if best is None or not depth else self.text(classes, best, depth - 1))
            elif isinstance(a, str):
                parts.append(f'"{a}"')
            elif isinstance(a, tuple):
                parts.append(f"[{' '.join(map(str, a))}]")
            else:
                parts.append(str(a))
        return f"({node.op} {' '.join(parts)})"


def _leaves(classes: Classes, node: Node) -> Iterator[int]:
    seen: set[int] = set()
    work = [node]
    while work:
        at = work.pop()
        if at.op == "Leaf":
            yield at.args[0]
            continue
        for a in at.args:
            if isinstance(a, Class) and a.id not in seen:
                seen.add(a.id)
                work += sorted(classes.nodes.get(a.id, []), key=lambda n: n.op != "Leaf")[:1]
