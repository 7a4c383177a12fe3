"""Validates definitions of kernels: the composite against the real operator, on random arguments in float64.

Arguments come from the definition's ``@example`` lines: ``tensor(2, 3)``, ``positive(2, 3)``, ``mask(2, 3)`` (truth values
with one that holds in every row), ``integers(4, high=7)``; a name in place of a size is a size of its own. The real
operator is torch's, or one that an installed library registered with torch. Where none runs here, the definition is
``assumed``: a contract that nothing here has tested.
"""

from __future__ import annotations

import ast
import itertools
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from emerge.kernels.interpret import Expressions, NotApplicable, evaluate
from emerge.kernels.syntax import Definition
from emerge.util.errors import RuleError
from emerge.util.resources import resource_dir

FORMAT = "emerge.kernels/1"
#: Scales of floating arguments: small ones show eps, large ones show soft caps.
SCALES = (1.0, 1e-3, 30.0)
DRAWS = 2
SIZES = (3, 5, 2, 7, 4, 6)
TOLERANCE = 1e-9


@dataclass(frozen=True)
class Checked:
    """What the check of a definition gave.

    Attributes:
        evidence: ``tested`` (agrees with the real operator), ``assumed`` (no real operator runs here), ``refuted``.
        samples: executed comparisons. reason: why it is refuted or assumed.
    """

    name: str
    hash: str
    evidence: str
    samples: int
    torch: str
    reason: str = ""


def check_definition(definition: Definition, seed: int = 0) -> Checked:
    """Compares a definition with the real operator on its examples."""
    import torch

    def result(evidence: str, samples: int, reason: str = "") -> Checked:
        return Checked(definition.name, definition.hash, evidence, samples, str(torch.__version__), reason)

    if not definition.examples:
        return result("assumed", 0, "it has no @example")
    real = _real(definition.operator)
    samples, ran, why = 0, False, f"this machine has no {definition.operator}"
    for number, example in enumerate(definition.examples):
        for draw, scale in itertools.product(range(DRAWS), SCALES):
            given = _Examples(seed + 1000 * number + draw, scale).arguments(example)
            try:
                made = _results(evaluate(definition, _backend(), [], _copied(given)))
            except NotApplicable as exc:
                return result("refuted", samples, f"its example {number + 1} is not valid: {exc}")
            if real is None:
                continue
            try:
                expected = _run(definition, real, _copied(given))
            except NotImplementedError:
                why = f"{definition.operator} does not run on this machine"
                continue
            except (RuntimeError, TypeError, ValueError, IndexError) as exc:
                found = (str(exc) or type(exc).__name__).splitlines()[0]
                return result("refuted", samples, f"the kernel refuses its example {number + 1}: {found}")
            wrong = _difference(made, expected)
            if wrong:
                shown = ", ".join(f"{k}={_text(v)}" for k, v in given.items())
                return result("refuted", samples, f"{wrong} for {shown} (scale {scale:g}, seed {seed})")
            samples, ran = samples + 1, True
    return result("tested", samples) if ran else result("assumed", 0, why)


def _backend() -> Any:
    from emerge.execute.ops.defined import TorchTensors

    return TorchTensors()


def _results(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _real(op: str) -> Any:
    """The operator itself: torch's, or one that a library registered; None where there is none."""
    import torch

    from emerge.execute.aliasing import resolve, split_op

    found = resolve(op)
    if found is not None:
        return found
    namespace, name, overload = split_op(op)
    if namespace == "emerge_vllm":
        return _own(op)
    try:
        return getattr(getattr(getattr(torch.ops, namespace), name), overload)
    except (AttributeError, RuntimeError):
        return None


def _own(op: str) -> Any:
    """An operator of Emerge's own: the executor's function is what it means."""
    from emerge.execute.ops.base import OPS, Call
    from emerge.execute.ops.defined import _REGISTERED
    from emerge.execute.options import Options
    from emerge.graph.model import Node

    run = OPS.get(op) or OPS.get(op.rpartition(".")[0])
    if run is None or op in _REGISTERED:
        return None

    def call(**kwargs: Any) -> Any:
        options = Options()
        return run(Call(Node("call", op, [], {}), [], kwargs, options, options.torch_device(), False, {}, 0, op))

    return call


def _run(definition: Definition, real: Any, given: dict[str, Any]) -> list[Any]:
    schema = getattr(real, "_schema", None)
    if schema is not None:
        defaults = {p.name: p.default for p in definition.function.parameters if p.default is not None}
        for p in schema.arguments:
            if p.name not in given and not p.has_default_value() and p.name in defaults:
                given[p.name] = ast.literal_eval(defaults[p.name])
    value = real(**given)
    if definition.writes:
        return [given[name] for name in definition.writes]
    return list(value) if isinstance(value, (list, tuple)) else [value]


def _copied(given: Mapping[str, Any]) -> dict[str, Any]:
    return {k: v.clone() if hasattr(v, "clone") else v for k, v in given.items()}


def _text(value: Any) -> str:
    return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}" if hasattr(value, "dtype") else repr(value)


def _difference(made: list[Any], expected: list[Any]) -> str:
    """How results differ, "" when they agree; results that the definition leaves open (None) are not compared."""
    import torch

    for k, (a, b) in enumerate(zip(made, expected)):
        if a is None:
            continue
        if not isinstance(b, torch.Tensor):
            return f"result {k} is no tensor"
        if list(a.shape) != list(b.shape):
            return f"result {k} has shape {list(a.shape)} where the kernel gives {list(b.shape)}"
        x, y = a.to(torch.float64), b.to(torch.float64)
        defined = ~y.isnan()  # where the kernel is undefined, anything goes
        gap = torch.where(defined & (x != y), (x - y).abs(), torch.zeros_like(y))
        gap = torch.where(defined & x.isnan(), torch.full_like(gap, float("inf")), gap)
        largest = torch.where(defined & y.isfinite(), y.abs(), torch.zeros_like(y))
        bound = TOLERANCE * float(largest.max()) if y.numel() else 0.0
        if y.numel() and float(gap.max()) > bound:
            return f"result {k} differs by {float(gap.max()):.3g} from the kernel"
    return ""


class _Examples(Expressions):
    """Evaluates the expressions of an example."""

    def __init__(self, seed: int, scale: float) -> None:
        import torch

        super().__init__(_backend())
        self.random = torch.Generator().manual_seed(seed)
        self.scale = scale
        self.sizes = itertools.chain(SIZES, itertools.count(8))

    def arguments(self, example: Mapping[str, ast.expr]) -> dict[str, Any]:
        """Values of the parameters that an example gives."""
        return {name: self.expr(value) for name, value in example.items()}

    def _name(self, node: ast.Name) -> Any:
        if node.id not in self.env and node.id not in ("inf", "pi"):
            self.env[node.id] = next(self.sizes)
        return super()._name(node)

    def function(self, name: str, args: list[Any], kwargs: dict[str, Any]) -> Any:
        import torch

        if name in ("tensor", "positive"):
            value = torch.randn(args, generator=self.random, dtype=torch.float64) * self.scale
            return value.abs() + 1e-3 * self.scale if name == "positive" else value
        if name == "mask":
            seen = torch.rand(args, generator=self.random) > 0.4
            seen[..., 0] = seen[..., 0] | ~seen.any(-1)
            return seen
        if name == "integers":
            return torch.randint(kwargs.get("low", 0), kwargs["high"], args, generator=self.random)
        return super().function(name, args, kwargs)


# ---- what is known of the definitions -----------------------------------------------------------------------------------


def shipped_path() -> Path:
    """Where the results for the shipped definitions are kept."""
    return resource_dir("rules") / "kernels" / "certificates.json"


def read_shipped(path: Path | None = None) -> dict[str, Checked]:
    """Name -> result of the last check; empty where the file is absent."""
    try:
        data = json.loads((path or shipped_path()).read_text())
    except (OSError, json.JSONDecodeError):
        return {}
    return {n: Checked(n, **entry) for n, entry in data.get("definitions", {}).items()} if data.get("format") == FORMAT else {}


def write_shipped(results: Iterable[Checked], path: Path | None = None) -> None:
    """Keeps the results, sorted by name."""
    entries = {r.name: {k: v for k, v in asdict(r).items() if k != "name"} for r in sorted(results, key=lambda r: r.name)}
    (path or shipped_path()).write_text(json.dumps({"format": FORMAT, "definitions": entries}, indent=1) + "\n")


def all_definitions(known: Mapping[str, Iterable[Definition]]) -> list[Definition]:
    """The definitions in the order of the files."""
    return [d for made in known.values() for d in made]


def standing(definition: Definition, shipped: Mapping[str, Checked]) -> Checked | None:
    """The result that holds for this text of a definition, None where there is none."""
    found = shipped.get(definition.name) if definition.shipped else _CHECKED.get(definition.hash)
    return found if found is not None and found.hash == definition.hash else None


_CHECKED: dict[str, Checked] = {}


def admit_definitions(known: Mapping[str, Iterable[Definition]]) -> dict[str, str]:
    """Name -> evidence of every definition; those of a user are checked now.

    Raises:
        RuleError: a shipped definition has changed since it was checked, or one that the real operator refutes.
    """
    shipped = read_shipped()
    levels = {}
    for definition in all_definitions(known):
        found = standing(definition, shipped)
        if found is None and definition.shipped:
            changed = "has changed since it was checked" if definition.name in shipped else "was never checked"
            raise RuleError(
                f"the shipped definition '{definition.name}' {changed}; run emerge rules check --update after review",
                definition.place,
            )
        if found is None:
            found = _CHECKED[definition.hash] = check_definition(definition)
        if found.evidence == "refuted":
            raise RuleError(f"the definition '{definition.name}' is refused: {found.reason}", definition.place)
        levels[definition.name] = found.evidence
    return levels
