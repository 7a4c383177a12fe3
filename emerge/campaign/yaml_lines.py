"""YAML with line numbers: plain dicts and lists that know where every entry was written. Nothing in a file is run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from emerge.util.errors import ConfigError

#: Nested collections deeper than this are refused.
MOST_DEPTH = 50


class Mapping(dict[Any, Any]):
    """A mapping; ``lines`` holds the line of every key, ``line`` its own, ``file`` the file it is in."""

    file: str = ""
    line: int = 0
    lines: dict[Any, int]

    def place(self, key: Any = None) -> str:
        """``file:line`` of a key, or of the mapping."""
        return f"{self.file}:{self.lines.get(key, self.line)}"


class Sequence(list[Any]):
    """A list; ``lines`` holds the line of every item."""

    file: str = ""
    line: int = 0
    lines: list[int]

    def place(self, index: int) -> str:
        """``file:line`` of an item."""
        return f"{self.file}:{self.lines[index]}"


def load_yaml(path: Path) -> Any:
    """The document of a YAML file.

    Raises:
        ConfigError: it cannot be read, is not YAML, repeats a key, or uses tags, aliases or merge keys.
    """
    import yaml

    try:
        text = path.read_text(encoding="utf-8")
    except OSError as e:
        raise ConfigError(f"cannot read the file ({e.strerror or e}); check the path", str(path)) from None
    except UnicodeDecodeError:
        raise ConfigError("expected UTF-8 text, found other bytes; save the file as UTF-8", str(path)) from None
    loader = yaml.SafeLoader(text)
    try:
        node = loader.get_single_node()
        return _convert(node, loader, str(path), 0, set()) if node is not None else None
    except yaml.MarkedYAMLError as e:
        mark = e.problem_mark or e.context_mark
        line = mark.line + 1 if mark is not None else 1
        raise ConfigError(f"not valid YAML: {e.problem or e.context}; correct the file", f"{path}:{line}") from None
    except yaml.YAMLError as e:
        raise ConfigError(f"not valid YAML: {' '.join(str(e).split())}; correct the file", str(path)) from None
    except RecursionError:
        raise ConfigError("nested too deeply; flatten the file", str(path)) from None
    finally:
        loader.dispose()


def _convert(node: Any, loader: Any, file: str, depth: int, seen: set[int]) -> Any:
    import yaml

    line = node.start_mark.line + 1
    place = f"{file}:{line}"
    if depth > MOST_DEPTH:
        raise ConfigError("nested too deeply; flatten the file", place)
    if id(node) in seen and not isinstance(node, yaml.ScalarNode):
        raise ConfigError("aliases (*name) of mappings and lists are not supported; write the value out", place)
    seen.add(id(node))
    plain = node.tag in ("tag:yaml.org,2002:seq", "tag:yaml.org,2002:map")
    if not plain and not isinstance(node, yaml.ScalarNode):
        raise ConfigError(f"the tag {node.tag!r} is not supported; write a plain value", place)
    if isinstance(node, yaml.ScalarNode):
        if not node.tag.startswith("tag:yaml.org,2002:"):
            raise ConfigError(f"the tag {node.tag!r} is not supported; write a plain value", place)
        try:
            return loader.construct_object(node)
        except ValueError as e:
            raise ConfigError(f"{node.value!r} is not a valid value ({e}); quote it", place) from None
    if isinstance(node, yaml.SequenceNode):
        items = Sequence(_convert(n, loader, file, depth + 1, seen) for n in node.value)
        items.file, items.line, items.lines = file, line, [n.start_mark.line + 1 for n in node.value]
        return items
    out = Mapping()
    out.file, out.line, out.lines = file, line, {}
    for key_node, value_node in node.value:
        where = f"{file}:{key_node.start_mark.line + 1}"
        if not isinstance(key_node, yaml.ScalarNode):
            raise ConfigError("expected a plain key, found a collection; correct it", where)
        if key_node.tag == "tag:yaml.org,2002:merge":
            raise ConfigError("merge keys (<<) are not supported; write the keys out", where)
        # A bare 'on' or 'no' is meant as text when it is a key.
        key = loader.construct_object(key_node) if key_node.tag.endswith(":int") else key_node.value
        if key in out:
            raise ConfigError(f"the key {key!r} stands twice (first in line {out.lines[key]}); drop one", where)
        out[key] = _convert(value_node, loader, file, depth + 1, seen)
        out.lines[key] = key_node.start_mark.line + 1
    return out
