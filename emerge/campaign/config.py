"""The campaign file: which pairs to compare, how, and what is expected. Every key is checked; nothing is guessed."""

from __future__ import annotations

import glob
import hashlib
import json
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NoReturn

from emerge.campaign.yaml_lines import Mapping, Sequence, load_yaml
from emerge.capture.base import CaptureError
from emerge.capture.source import SourceSpec, parse_spec
from emerge.graph.model import Graph
from emerge.graph.source import RELATIONS_FILE
from emerge.rules.equalities import LEAST_SAMPLES, VALIDATION, Validation
from emerge.util.errors import ConfigError

ENGINES = ("auto", "embedded", "souffle")
EXPECT = ("equivalent", "not_equivalent")
#: Keys of the campaign format that belong to parts this version does not have yet.
LATER = {
    "given": "implementation inputs without a reference tensor",
    "perturb": "perturbed relations",
}

_CAMPAIGN_KEYS = ("campaign", "mesh", "engine", "rules", "trust", "fail_on", "seed", "budget", "synthesis", "validate",
                  "pairs")  # fmt: skip
_PAIR_KEYS = (
    "id", "case", "cases", "reference", "implementation", "relations", "outputs", "mesh", "expect", "engine", "rules",
    "trust", "fail_on", "seed", "budget", "synthesis", "validate", "ignore",
)  # fmt: skip
_RELATION_KEYS = ("of", "is", "placements")
_BUDGET_KEYS = ("seconds", "memory_gb")
_SYNTHESIS_KEYS = ("enabled", "budget_seconds", "folder")
_VALIDATE_KEYS = ("device", "samples", "smt_seconds")
#: Where programs are executed and rules tested; ``auto`` is cuda where torch finds it.
DEVICES = ("auto", "cpu", "cuda")
_IGNORE_KEYS = ("finding", "reason", "issue")


@dataclass(frozen=True)
class RelationSpec:
    """One line under ``relations:`` or ``outputs:``.

    Attributes:
        key: reference tensor (name or label), maybe with ``*`` and a range; an output may be its position (int).
        of: implementation tensor, None for the same name (an output: its pair).
        alignment: in the notation, None where ``placements`` (mesh axis -> DTensor term) are given.
        place: ``file:line``.
    """

    key: str | int
    of: str | None = None
    alignment: str | None = None
    placements: tuple[tuple[str, str], ...] = ()
    place: str = ""


@dataclass(frozen=True)
class Ignore:
    """A finding that is not to be reported, with the reason and the issue that tracks it."""

    finding: str
    reason: str
    issue: str


@dataclass(frozen=True)
class SynthesisSpec:
    """Synthesis of rules where a proof falls short.

    Attributes:
        seconds: budget of a pair. folder: where rules go, None = ``rules/`` in the output directory.
    """

    seconds: float = 60.0
    folder: Path | None = None


@dataclass
class PairSpec:
    """One pair of a campaign.

    Attributes:
        case: case directory; else ``reference`` and ``implementation`` are graph files or directories, live models, or graphs.
        relations: ``auto``, lines, a relation file, or None (nothing is given).
        outputs: lines, or None for the relation file's claims or all outputs.
        mesh: None = the case's own, or one axis over the ranks.
        seconds, memory_gb: limits, None = none.
        synthesis: None = no rules are synthesised. validation: how rules are tested, and where programs are executed.
        base: shipped rules of the algebra, ``full`` or ``minimal``.
        place: ``file:line``.
    """

    id: str
    case: Path | None = None
    reference: Path | SourceSpec | list[Graph] | None = None
    implementation: Path | SourceSpec | list[Graph] | None = None
    relations: str | list[RelationSpec] | Path | None = None
    outputs: list[RelationSpec] | None = None
    mesh: dict[str, int] | None = None
    expect: str = "equivalent"
    engine: str = "auto"
    rules: list[Path] = field(default_factory=list)
    trust: list[str] = field(default_factory=list)
    fail_on: list[str] = field(default_factory=list)
    seed: int = 0
    seconds: float | None = None
    memory_gb: float | None = None
    ignore: list[Ignore] = field(default_factory=list)
    synthesis: SynthesisSpec | None = None
    validation: Validation = VALIDATION
    base: str = "full"
    place: str = ""


@dataclass
class Campaign:
    """A campaign file, checked. ``config_hash`` is the SHA-256 of its content in a normal form."""

    name: str
    pairs: list[PairSpec]
    engine: str = "auto"
    seed: int = 0
    fail_on: list[str] = field(default_factory=list)
    config_hash: str = ""
    path: str = ""


def load_campaign(path: str | Path) -> Campaign:
    """Reads a campaign file. Paths in it are relative to the file; environment variables are expanded in paths.

    Raises:
        ConfigError: an unknown key, a wrong value, or a path that does not exist, with ``file:line``.
    """
    file = Path(path)
    data = load_yaml(file)
    if not isinstance(data, Mapping):
        raise ConfigError("expected a mapping with 'pairs:' at the top; see docs/campaign.md", str(file))
    return _Reader(file, data).campaign()


def hash_of(value: Any) -> str:
    """SHA-256 of JSON-like values in a normal form."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()


class _Reader:
    def __init__(self, file: Path, data: Mapping) -> None:
        self.file, self.data = file, data
        self.base = file.resolve().parent

    # ---- checks -----------------------------------------------------------------------------------------------------

    def fail(self, what: str, at: Mapping, key: Any = None) -> NoReturn:
        raise ConfigError(what, at.place(key))

    def keys(self, at: Mapping, known: Iterable[str], what: str) -> None:
        names = list(known)
        for key in at:
            if key in names:
                continue
            if key in LATER:
                self.fail(f"{key!r} ({LATER[key]}) is not in this version; drop the key", at, key)
            near = get_close_matches(str(key), names, n=1, cutoff=0.5)
            tail = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(names)}"
            self.fail(f"unknown key {key!r} in {what}; {tail}", at, key)

    def text(self, at: Mapping, key: str, default: str = "") -> str:
        value = at.get(key, default)
        if not isinstance(value, str) or (key in at and not value):
            self.fail(f"expected text for {key!r}, found {value!r}; correct it", at, key)
        return value

    def choice(self, at: Mapping, key: str, choices: tuple[str, ...], default: str) -> str:
        value = at.get(key, default)
        if value not in choices:
            self.fail(f"expected one of {', '.join(choices)} for {key!r}, found {value!r}; correct it", at, key)
        return str(value)

    def integer(self, at: Mapping, key: str, default: int) -> int:
        value = at.get(key, default)
        if type(value) is not int or not 0 <= value < 2**63:
            self.fail(f"expected an integer >= 0 for {key!r}, found {value!r}; correct it", at, key)
        return value

    def names(self, at: Mapping, key: str) -> list[str]:
        value = at.get(key, [])
        if not isinstance(value, list) or not all(isinstance(v, str) and v for v in value):
            self.fail(f"expected a list of names for {key!r}, found {value!r}; write [name, ..]", at, key)
        return list(value)

    def mesh(self, at: Mapping) -> dict[str, int] | None:
        value = at.get("mesh")
        if value is None and "mesh" not in at:
            return None
        if not isinstance(value, Mapping):
            self.fail(f"expected mesh axes with sizes, e.g. {{tp: 2}}, found {value!r}; correct it", at, "mesh")
        for axis, size in value.items():
            check_axis(axis, size, value.place(axis))
        return dict(value)

    def budget(self, at: Mapping, seconds: float | None, memory: float | None) -> tuple[float | None, float | None]:
        value = at.get("budget")
        if "budget" not in at:
            return seconds, memory
        if not isinstance(value, Mapping):
            self.fail(
                f"expected {{seconds: 600, memory_gb: 8}} for 'budget', found {value!r}; correct it", at, "budget"
            )
        self.keys(value, _BUDGET_KEYS, "'budget'")
        for key, number in value.items():
            if isinstance(number, bool) or not isinstance(number, (int, float)) or not 0 < number < float("inf"):
                self.fail(f"expected a number > 0 for {key!r}, found {number!r}; correct it", value, key)
        return value.get("seconds", seconds), value.get("memory_gb", memory)

    def validation(self, at: Mapping, default: Validation) -> Validation:
        """``validate: {device, samples, smt_seconds}``."""
        if "validate" not in at:
            return default
        value = at["validate"]
        if not isinstance(value, Mapping):
            self.fail(
                f"expected {{device: auto, samples: 48, smt_seconds: 5}} for 'validate', found {value!r}; correct it",
                at, "validate",
            )  # fmt: skip
        self.keys(value, _VALIDATE_KEYS, "'validate'")
        samples = self.integer(value, "samples", default.samples)
        if samples < LEAST_SAMPLES:
            self.fail(f"expected at least {LEAST_SAMPLES} for 'samples', found {samples}; correct it", value, "samples")
        seconds = value.get("smt_seconds", default.smt_seconds)
        if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not 0 < seconds < float("inf"):
            self.fail(f"expected a number > 0 for 'smt_seconds', found {seconds!r}; correct it", value, "smt_seconds")
        return Validation(self.choice(value, "device", DEVICES, default.device), samples, float(seconds))

    def synthesis(self, at: Mapping, default: SynthesisSpec | None) -> SynthesisSpec | None:
        """``true``, ``false``, or a mapping (enabled unless it says otherwise)."""
        if "synthesis" not in at:
            return default
        value = at["synthesis"]
        if isinstance(value, bool):
            return (default or SynthesisSpec()) if value else None
        if not isinstance(value, Mapping):
            self.fail(
                f"expected true, false or {{budget_seconds: 60, folder: DIR}} for 'synthesis', found {value!r}; "
                "correct it",
                at,
                "synthesis",
            )
        self.keys(value, _SYNTHESIS_KEYS, "'synthesis'")
        enabled = value.get("enabled", True)
        if not isinstance(enabled, bool):
            self.fail(f"expected true or false for 'enabled', found {enabled!r}; correct it", value, "enabled")
        seconds = value.get("budget_seconds", default.seconds if default else SynthesisSpec.seconds)
        if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not 0 < seconds < float("inf"):
            self.fail(
                f"expected a number > 0 for 'budget_seconds', found {seconds!r}; correct it", value, "budget_seconds"
            )
        folder = default.folder if default else None
        if "folder" in value:
            folder = Path(self.path(self.text(value, "folder"), value.place("folder")))
        return SynthesisSpec(float(seconds), folder) if enabled else None

    def path(self, text: str, place: str) -> str:
        """A path of the file: environment variables expanded, relative to the file's folder."""

        def expand(found: re.Match[str]) -> str:
            name = found[1] or found[2]
            if name not in os.environ:
                raise ConfigError(f"the environment variable {name} is not set; set it, or write the path", place)
            return os.environ[name]

        expanded = os.path.expanduser(re.sub(r"\$(?:(\w+)|\{(\w+)\})", expand, text))
        return os.path.normpath(os.path.join(self.base, expanded))

    def existing(self, at: Mapping, key: str) -> Path:
        path = Path(self.path(self.text(at, key), at.place(key)))
        if not path.exists():
            self.fail(f"{key!r} names {str(path)!r}, which does not exist; correct the path", at, key)
        return path

    def rules(self, at: Mapping) -> list[Path]:
        out: list[Path] = []
        for name in self.names(at, "rules"):
            path = Path(self.path(name, at.place("rules")))
            if not path.exists():
                self.fail(f"the rule path {str(path)!r} does not exist; correct it", at, "rules")
            out.extend(rule_files([path], at.place("rules")))
        return out

    # ---- the file ---------------------------------------------------------------------------------------------------

    def campaign(self) -> Campaign:
        data = self.data
        self.keys(data, _CAMPAIGN_KEYS, "the campaign")
        name = self.text(data, "campaign", self.file.stem)
        engine = self.choice(data, "engine", ENGINES, "auto")
        seed = self.integer(data, "seed", 0)
        seconds, memory = self.budget(data, None, None)
        self.defaults = PairSpec(
            "",
            mesh=self.mesh(data),
            engine=engine,
            rules=self.rules(data),
            trust=self.names(data, "trust"),
            seed=seed,
            seconds=seconds,
            memory_gb=memory,
            synthesis=self.synthesis(data, None),
            validation=self.validation(data, VALIDATION),
        )
        pairs = data.get("pairs")
        if not isinstance(pairs, Sequence) or not pairs:
            self.fail("expected a list of pairs under 'pairs:'; add at least one", data, "pairs")
        specs: list[PairSpec] = []
        for index, item in enumerate(pairs):
            if not isinstance(item, Mapping):
                raise ConfigError(f"expected a pair as a mapping, found {item!r}; correct it", pairs.place(index))
            specs.extend(self.pairs(item))
        seen: dict[str, str] = {}
        for spec in specs:
            if spec.id in seen:
                raise ConfigError(
                    f"the pair id {spec.id!r} is used at {seen[spec.id]} too; give another 'id'", spec.place
                )
            seen[spec.id] = spec.place
        return Campaign(name, specs, engine, seed, self.names(data, "fail_on"), hash_of(data), str(self.file))

    def pairs(self, at: Mapping) -> list[PairSpec]:
        self.keys(at, _PAIR_KEYS, "the pair")
        kinds = [k for k in ("case", "cases") if k in at]
        kinds += ["reference and implementation"] if "reference" in at or "implementation" in at else []
        if len(kinds) != 1:
            found = " and ".join(kinds) or "none of them"
            self.fail(f"a pair has 'case', 'cases', or 'reference' with 'implementation'; found {found}", at)
        d = self.defaults
        seconds, memory = self.budget(at, d.seconds, d.memory_gb)
        spec = PairSpec(
            self.text(at, "id"),
            mesh=self.mesh(at),
            expect=self.choice(at, "expect", EXPECT, "equivalent"),
            engine=self.choice(at, "engine", ENGINES, d.engine),
            rules=[*d.rules, *self.rules(at)],
            trust=[*d.trust, *self.names(at, "trust")],
            fail_on=self.names(at, "fail_on"),
            seed=self.integer(at, "seed", d.seed),
            seconds=seconds,
            memory_gb=memory,
            ignore=self.ignores(at),
            synthesis=self.synthesis(at, d.synthesis),
            validation=self.validation(at, d.validation),
            place=at.place(),
        )
        if kinds[0] == "reference and implementation":
            return [self.graphs(at, spec)]
        for key in ("relations", "outputs"):
            if key in at:
                self.fail(f"{key!r} has no place beside {kinds[0]!r}, since a case brings its own; drop it", at, key)
        if kinds[0] == "case":
            spec.case = self.existing(at, "case")
            spec.id = spec.id or spec.case.name
            return [spec]
        return self.cases(at, spec)

    def cases(self, at: Mapping, spec: PairSpec) -> list[PairSpec]:
        pattern = self.path(self.text(at, "cases"), at.place("cases"))
        found = [Path(p) for p in sorted(glob.glob(pattern)) if (Path(p) / RELATIONS_FILE).is_file()]
        if not found:
            self.fail(f"no directory with a {RELATIONS_FILE} matches {pattern!r}; correct the pattern", at, "cases")
        prefix = f"{spec.id}/" if spec.id else ""
        return [_copy(spec, id=prefix + p.name, case=p) for p in found]

    def graphs(self, at: Mapping, spec: PairSpec) -> PairSpec:
        for side in ("reference", "implementation"):
            if side not in at:
                self.fail(f"the pair has no {side!r}; add it", at)
        spec.mesh = spec.mesh if "mesh" in at else self.defaults.mesh
        spec.reference = self.source(at, "reference", None)
        spec.implementation = self.source(at, "implementation", spec.mesh)
        spec.id = spec.id or f"{source_name(spec.reference)}-{source_name(spec.implementation)}"
        spec.relations = self.relations(at)
        if "outputs" in at:
            spec.outputs = self.lines(at, "outputs")
        return spec

    def source(self, at: Mapping, side: str, mesh: dict[str, int] | None) -> Path | SourceSpec:
        """One side: a path to graphs, or a live model (a mapping, ``python:module:function``, a ``.pt2`` archive)."""
        value = at[side]
        if isinstance(value, Mapping):
            given = plain(value)
            for key in ("weights", "python_env"):
                if isinstance(given.get(key), str):
                    given[key] = self.path(given[key], value.place(key))
            try:
                return parse_spec(given, base=self.base, mesh=mesh)
            except CaptureError as e:
                raise ConfigError(e.message, value.place()) from None
        if isinstance(value, str) and is_live(value):
            return parse_spec(value, base=self.base, mesh=mesh)
        return self.existing(at, side)

    def relations(self, at: Mapping) -> str | list[RelationSpec] | Path | None:
        value = at.get("relations")
        if "relations" not in at:
            self.fail("the pair has no 'relations'; write them, name a file, or write auto", at)
        if value == "auto":
            return "auto"
        if isinstance(value, Mapping):
            return self.lines(at, "relations")
        if not isinstance(value, str):
            self.fail(
                f"expected 'auto', a file or a mapping for 'relations', found {value!r}; correct it", at, "relations"
            )
        path = self.existing(at, "relations")
        return load_relation_lines(path) if path.suffix in (".yaml", ".yml") else path

    def lines(self, at: Mapping, key: str) -> list[RelationSpec]:
        value = at[key]
        if not isinstance(value, Mapping):
            self.fail(f"expected a mapping of tensors for {key!r}, found {value!r}; correct it", at, key)
        return relation_lines(value)

    def ignores(self, at: Mapping) -> list[Ignore]:
        value = at.get("ignore", [])
        out = []
        if not isinstance(value, list):
            self.fail("expected a list of {finding, reason, issue} for 'ignore'; correct it", at, "ignore")
        for item in value:
            if not isinstance(item, Mapping):
                self.fail("expected {finding, reason, issue} in 'ignore'; correct it", at, "ignore")
            self.keys(item, _IGNORE_KEYS, "'ignore'")
            missing = [k for k in _IGNORE_KEYS if not item.get(k)]
            if missing:
                self.fail(
                    f"'ignore' needs {' and '.join(repr(k) for k in missing)}; say why the finding is not wanted", item
                )
            out.append(Ignore(*(str(item[k]) for k in _IGNORE_KEYS)))
        return out


def is_live(text: str) -> bool:
    """Whether a source given as text is captured, not read."""
    return text.startswith(("python:", "hf:")) or text.endswith(".pt2")


def source_name(source: Path | SourceSpec) -> str:
    """Short name of a source, for pair ids."""
    if isinstance(source, Path):
        return source.stem
    target = source.target.get("architecture", source.kind) if isinstance(source.target, dict) else str(source.target)
    return re.sub(r"[^A-Za-z0-9_.]+", ".", str(source.name or target)).strip(".")


def plain(value: Any) -> Any:
    """A YAML value without line numbers."""
    if isinstance(value, dict):
        return {k: plain(v) for k, v in value.items()}
    return [plain(v) for v in value] if isinstance(value, list) else value


def _copy(spec: PairSpec, **changes: Any) -> PairSpec:
    from dataclasses import replace

    return replace(spec, **changes)


def check_axis(axis: Any, size: Any, place: str) -> None:
    """A mesh axis is a name with a size.

    Raises:
        ConfigError: it is not.
    """
    if not isinstance(axis, str) or not re.fullmatch(r"[^\W\d]\w*", axis) or axis == "partial":
        raise ConfigError(f"expected a name for a mesh axis, found {axis!r}; use letters, digits and _", place)
    if type(size) is not int or size < 1:
        raise ConfigError(f"expected a size >= 1 for mesh axis {axis!r}, found {size!r}; correct it", place)


def relation_lines(value: Mapping) -> list[RelationSpec]:
    """The lines of a ``relations:`` or ``outputs:`` mapping.

    Raises:
        ConfigError: a line is none of the three forms.
    """
    out = []
    for key, item in value.items():
        place = value.place(key)
        if isinstance(item, str):
            out.append(RelationSpec(key, None, item, (), place))
            continue
        if not isinstance(item, Mapping):
            raise ConfigError(
                f"expected an alignment, {{of: .., is: ..}} or {{placements: ..}} for {key!r}, found {item!r}; "
                "correct it",
                place,
            )
        for k in item:
            if k not in _RELATION_KEYS:
                near = get_close_matches(str(k), _RELATION_KEYS, n=1, cutoff=0.5)
                tail = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(_RELATION_KEYS)}"
                raise ConfigError(f"unknown key {k!r} in the relation of {key!r}; {tail}", item.place(k))
        of, text, placements = item.get("of"), item.get("is"), item.get("placements")
        if (text is None) == (placements is None):
            raise ConfigError(f"the relation of {key!r} needs either 'is' or 'placements'; write one of them", place)
        for word, part in (("of", of), ("is", text)):
            if part is not None and not isinstance(part, str):
                raise ConfigError(f"expected text for {word!r} of {key!r}, found {part!r}; quote it", item.place(word))
        if placements is not None and not isinstance(placements, Mapping):
            raise ConfigError(
                f"expected mesh axes for 'placements' of {key!r}, e.g. {{tp: Shard(0)}}, found {placements!r}; "
                "correct it",
                item.place("placements"),
            )
        terms = tuple((str(a), str(p)) for a, p in (placements or {}).items())
        out.append(RelationSpec(key, of, text, terms, place))
    return out


def load_relation_lines(path: Path) -> list[RelationSpec]:
    """A YAML file that holds a ``relations:`` mapping alone.

    Raises:
        ConfigError: it does not.
    """
    data = load_yaml(path)
    if not isinstance(data, Mapping):
        raise ConfigError("expected a mapping of reference tensors to alignments; correct the file", str(path))
    return relation_lines(data)


RULE_SUFFIXES = (".dl", ".egg", ".kernel")


def rule_files(paths: Iterable[Path], place: str = "") -> list[Path]:
    """Rule files behind files and folders (all ``.dl``, ``.egg`` and ``.kernel`` files of a folder, sorted).

    Raises:
        ConfigError: a path does not exist, or is no rule file.
    """
    out: list[Path] = []
    for path in paths:
        if path.is_dir():
            out.extend(sorted(p for p in path.rglob("*") if p.suffix in RULE_SUFFIXES))
        elif not path.exists():
            raise ConfigError(f"the rule path {str(path)!r} does not exist; correct it", place)
        elif path.suffix in RULE_SUFFIXES:
            out.append(path)
        else:
            raise ConfigError(
                f"expected a .dl, .egg or .kernel file or a folder, found {str(path)!r}; correct the path", place
            )
    return out
