"""Which definitions there are: the shipped ones and those of a user's rule files."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path

from emerge.kernels.syntax import SUFFIX, Definition, read_definitions
from emerge.util.errors import RuleError
from emerge.util.resources import resource_dir


def kernel_files(paths: Iterable[Path | str]) -> tuple[Path, ...]:
    """The ``.kernel`` files among files and folders."""
    out: list[Path] = []
    for path in map(Path, paths):
        out += sorted(path.rglob(f"*{SUFFIX}")) if path.is_dir() else [path] if path.suffix == SUFFIX else []
    return tuple(out)


@lru_cache(maxsize=8)
def _load(files: tuple[Path, ...]) -> Mapping[str, tuple[Definition, ...]]:
    shipped = sorted((resource_dir("rules") / "kernels").glob(f"*{SUFFIX}"))
    found: dict[str, list[Definition]] = {}
    for path, own in [*((p, True) for p in shipped), *((p, False) for p in files)]:
        for made in read_definitions(path, own):
            before = found.setdefault(made.operator, [])
            if any(d.shipped == own and d.place.rpartition(":")[0] != made.place.rpartition(":")[0] for d in before):
                raise RuleError(f"{made.operator} is already defined at {before[0].place}", made.place)
            if before and before[0].shipped and not own:
                raise RuleError(f"{made.operator} is defined by Emerge at {before[0].place}; drop the definition", made.place)
            before.append(made)
    return {op: tuple(made) for op, made in found.items()}


def definitions(rules: Sequence[Path | str] = ()) -> Mapping[str, tuple[Definition, ...]]:
    """Operator -> its definitions (several equal ways to compute it, in order of preference).

    Args:
        rules: rule files and folders of a user; those that are no ``.kernel`` files are passed over.
    Raises:
        RuleError: a malformed file, or an operator defined in two files.
    """
    return _load(kernel_files(rules))
