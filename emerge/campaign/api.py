"""Emerge from Python: compare two programs in a test or a notebook.

>>> import torch, emerge
>>> def reference(x, w): return torch.relu(x @ w)
>>> def implementation(x, w): return (x @ w).clamp(min=0)
>>> x, w = torch.randn(3, 4), torch.randn(4, 5)
>>> emerge.compare(reference, reference, inputs=(x, w)).verdict
'EQUIVALENT'
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from emerge.algebra.saturate import BASES
from emerge.campaign.config import (
    DEVICES,
    PairSpec,
    RelationSpec,
    SynthesisSpec,
    is_live,
    load_relation_lines,
    rule_files,
)
from emerge.campaign.run import RunOptions, run_pair
from emerge.capture.source import SourceSpec, parse_spec
from emerge.graph.model import Graph
from emerge.rules.equalities import Validation
from emerge.util.errors import EmergeError, InputError
from emerge.verdict.types import NOT_EQUIVALENT, UNKNOWN, Assumption, PairResult

Program = str | Path | Graph | Sequence[Graph] | Callable[..., Any]


class NotEquivalent(AssertionError):
    """Both programs were executed and differ; the message holds the findings. ``result`` is the whole result."""

    def __init__(self, result: PairResult) -> None:
        super().__init__(_message(result))
        self.result = result


class UnknownVerdict(EmergeError):
    """Neither a proof nor a counterexample was found. It says nothing about the programs; the message says what was missing.

    ``result`` is the whole result.
    """

    def __init__(self, result: PairResult) -> None:
        super().__init__(_message(result))
        self.result = result


def compare(
    reference: Program,
    implementation: Program,
    *,
    inputs: Sequence[Any] = (),
    relations: str | Mapping[str, Any] = "auto",
    outputs: Mapping[str, Any] | None = None,
    mesh: Mapping[str, int] | None = None,
    rules: Sequence[str | Path] = (),
    trust: Sequence[str] = (),
    engine: str = "auto",
    base: str = "full",
    synthesis: bool | str | Path = False,
    device: str = "auto",
    seed: int = 0,
    timeout: float | None = None,
) -> PairResult:
    """Compares two programs.

    Args:
        reference: a module or function (captured with ``inputs``), graphs, a path to graph files, or a source such as
            ``python:module:function``.
        implementation: likewise; with ``mesh`` a function ``build(mesh, rank)`` that returns the rank's program and its
            example inputs.
        inputs: example inputs of modules and functions; shapes matter, values do not. Arguments are related by name, and
            by position where names do not meet.
        relations: ``auto``, or reference tensor -> alignment, e.g. ``{"w": "(tp o) i ~ o i"}``.
        outputs: claimed alignments of outputs, by name or position; default as in a campaign.
        mesh: device axes of the implementation.
        rules, trust: rule files of your own, and laws of theirs admitted without certificate.
        base: shipped rules of the algebra, ``full`` or ``minimal`` (those about layout only).
        synthesis: synthesise rules where a proof falls short; a folder keeps them.
        device: where programs are executed and rules tested: ``auto`` (cuda where torch finds it), ``cpu`` or ``cuda``.
        timeout: seconds.

    Raises:
        InputError: a program cannot be captured or read, or the relations do not fit.

    >>> import torch, emerge
    >>> x = torch.zeros(3, 4)
    >>> result = emerge.compare(lambda x: x.exp().log(), lambda x: x + 1, inputs=(x,))
    >>> result.verdict
    'NOT_EQUIVALENT'
    >>> result.counterexample.sizes
    'captured'
    """
    axes = dict(mesh) if mesh else None
    sides = _program(reference, inputs, None, "reference"), _program(implementation, inputs, axes, "implementation")
    crossed: list[tuple[str, int, int]] = []
    if callable(reference) and callable(implementation) and axes is None:
        from emerge.capture.session import relate_by_position

        ours, theirs = sides
        assert isinstance(ours, list)
        assert isinstance(theirs, list)
        crossed = relate_by_position((reference, ours[0]), (implementation, theirs[0]), inputs)
    spec = PairSpec(
        "compare",
        reference=sides[0],
        implementation=sides[1],
        relations="auto" if isinstance(relations, str) else _lines(relations),
        outputs=None if outputs is None else _lines(outputs),
        mesh=axes,
        engine=engine,
        rules=rule_files([Path(r) for r in rules]),
        trust=list(trust),
        seed=seed,
        seconds=timeout,
        base=_base(base),
        synthesis=_synthesis(synthesis),
        validation=Validation(device=_device(device)),
    )
    result = run_pair(spec, RunOptions())
    if result.error is not None:
        raise InputError(result.error.message, result.error.place)
    if relations == "auto":
        result.assumptions += [
            Assumption(
                "argument_name",
                name,
                f"argument {place + 1} of the reference and {other + 1} of the implementation have one name and are "
                "related by it, not by their places; give relations= if places are meant",
            )
            for name, place, other in crossed
        ]
    return result


def assert_equivalent(reference: Program, implementation: Program, **options: Any) -> PairResult:
    """Like :func:`compare`, for tests.

    Raises:
        NotEquivalent: an ``AssertionError`` whose message is the findings.
        UnknownVerdict: no verdict was reached.
        InputError: see :func:`compare`.

    >>> import torch, emerge
    >>> def whole(x, w): return x @ w
    >>> def build(mesh, rank):  # every rank has a block of rows of w
    ...     def program(x, w):
    ...         y = x[:, 2 * rank:2 * rank + 2] @ w
    ...         torch.distributed.all_reduce(y)
    ...         return y
    ...     return program, (torch.zeros(3, 4), torch.zeros(2, 5))
    >>> relations = {"x": "a b ~ a b", "w": "(tp a) b ~ a b"}
    >>> inputs = (torch.zeros(3, 4), torch.zeros(4, 5))
    >>> emerge.assert_equivalent(whole, build, inputs=inputs, relations=relations, mesh={"tp": 2}).verdict
    'EQUIVALENT'
    """
    __tracebackhide__ = True  # pytest shows the findings, not this function
    result = compare(reference, implementation, **options)
    if result.verdict == NOT_EQUIVALENT:
        raise NotEquivalent(result)
    if result.verdict == UNKNOWN:
        raise UnknownVerdict(result)
    return result


def _program(
    program: Program, inputs: Sequence[Any], mesh: dict[str, int] | None, side: str
) -> Path | SourceSpec | list[Graph]:
    if isinstance(program, (str, Path)):
        return parse_spec(str(program), mesh=mesh) if is_live(str(program)) else Path(program)
    if isinstance(program, Graph):
        return [program]
    if not callable(program):
        return [g for g in program if isinstance(g, Graph)]
    from emerge.capture.distributed import capture_ranks
    from emerge.capture.trace import capture

    if mesh is not None:
        return capture_ranks(program, mesh, name=side)
    return [capture(program, _apart(inputs), name=side)]


def _apart(inputs: Sequence[Any]) -> tuple[Any, ...]:
    """Example inputs with a tensor of its own for every argument: one tensor given twice would tie two arguments."""
    seen: set[int] = set()
    out = []
    for value in inputs:
        again = id(value) in seen and hasattr(value, "clone")
        seen.add(id(value))
        out.append(value.clone() if again else value)
    return tuple(out)


def _base(name: str) -> str:
    if name not in BASES:
        raise InputError(f"unknown base {name!r}; use {' or '.join(BASES)}")
    return name


def _device(name: str) -> str:
    if name not in DEVICES:
        raise InputError(f"unknown device {name!r}; use {', '.join(DEVICES[:-1])} or {DEVICES[-1]}")
    return name


def _synthesis(wanted: bool | str | Path) -> SynthesisSpec | None:
    if isinstance(wanted, bool):
        return SynthesisSpec() if wanted else None
    return SynthesisSpec(folder=Path(wanted))


def _lines(relations: Mapping[str, Any]) -> list[RelationSpec]:
    """Relation lines from a mapping, read as the same lines of a file would be."""
    import yaml

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "relations.yaml"
        path.write_text(yaml.safe_dump(dict(relations), sort_keys=False), encoding="utf-8")
        return load_relation_lines(path)


def _message(result: PairResult) -> str:
    lines = [f"{result.verdict}: {result.reason}"]
    for f in result.findings:
        lines.append(f"{f.kind}: {f.message}")
        lines += [
            f"  {what}: {place}"
            for what, place in (("reference", f.reference_source), ("implementation", f.implementation_source))
            if place
        ]
        lines += [
            f"  {word}: {text}"
            for word, text in (("found", f.found), ("expected", f.expected), ("hint", f.hint))
            if text
        ]
    return "\n".join(lines)
