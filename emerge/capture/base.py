"""What all of capture shares: its error, naming, and where in the user's code a node comes from."""

from __future__ import annotations

import linecache
import os
import re
import sys
import sysconfig
from dataclasses import dataclass, field
from functools import cache
from types import FrameType
from typing import Any

from emerge.util.errors import InputError

#: Constant tensors up to this many elements are written into the graph file; larger ones become inputs.
MAX_CONSTANT = 4096


class CaptureError(InputError):
    """A program could not be captured: it branches on data, uses something capture does not know, or fails itself.

    It says nothing about the equivalence of the pair.
    """


@dataclass(frozen=True)
class Substitution:
    """Something capture replaced in the program; written into the graph file and shown in reports."""

    what: str
    by: str
    why: str

    def as_json(self) -> dict[str, str]:
        """The entry of ``substitutions`` in a graph file."""
        return {"what": self.what, "by": self.by, "why": self.why}


class Names:
    """Gives out unique names made of letters, digits and underscores."""

    def __init__(self) -> None:
        self._used: set[str] = set()
        self._next: dict[str, int] = {}

    def new(self, wish: str) -> str:
        """``wish`` where it is free, else with the next free number appended."""
        stem = re.sub(r"\W+", "_", wish).strip("_") or "value"
        if stem[0].isdigit():
            stem = f"_{stem}"
        name = stem
        while name in self._used:
            self._next[stem] = self._next.get(stem, 0) + 1
            name = f"{stem}_{self._next[stem]}"
        self._used.add(name)
        return name


@cache
def _skipped_prefixes() -> tuple[str, ...]:
    """Directories whose frames are never user code: torch, the standard library, and this package."""
    import torch

    here = os.path.dirname(os.path.abspath(__file__))
    stdlib = sysconfig.get_paths()["stdlib"]
    return (os.path.dirname(os.path.abspath(torch.__file__)) + os.sep, here + os.sep, stdlib + os.sep)


@cache
def is_user_file(filename: str) -> bool:
    """True for files whose lines are worth showing: neither torch, nor the standard library, nor capture itself."""
    if filename.startswith("<"):
        return False
    if f"{os.sep}site-packages{os.sep}" in filename or f"{os.sep}dist-packages{os.sep}" in filename:
        return not filename.startswith(_skipped_prefixes()[:2])
    return not filename.startswith(_skipped_prefixes())


#: Installed code that stands between a model and torch: it wraps layers and says nothing about the model.
_WRAPPERS = (("transformers", "distributed"), ("transformers", "utils"), ("accelerate",), ("peft", "utils"))


@cache
def is_wrapper_file(filename: str) -> bool:
    """True for files of libraries that run a model's layers for it (tensor parallelism, hooks, decorators)."""
    parts = tuple(shown_path(filename).split(os.sep))
    installed = f"{os.sep}site-packages{os.sep}" in filename or f"{os.sep}dist-packages{os.sep}" in filename
    return installed and any(parts[: len(w)] == w for w in _WRAPPERS)


@cache
def shown_path(filename: str) -> str:
    """A path as graph files show it: from the package on, or from the working directory on, else absolute."""
    for mark in (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}"):
        if mark in filename:
            return filename.rsplit(mark, 1)[1]
    relative = os.path.relpath(filename) if not os.path.relpath(filename).startswith("..") else filename
    return relative


@dataclass(frozen=True)
class Place:
    """Where an operator call comes from.

    Attributes:
        source: ``file:line`` of the innermost frame of the model, beneath the libraries that wrap its layers;
            ``code``: the text of that line.
        module: path of the innermost ``nn.Module`` that runs.
        stack: index into the table of stacks, None where there is no user frame.
        phase: ``forward`` or ``backward``; None in graphs without gradients.
    """

    source: str | None = None
    code: str | None = None
    module: str | None = None
    stack: int | None = None
    phase: str | None = None


@dataclass
class Places:
    """Finds the place of the running operator call and collects the table of stacks.

    Attributes:
        modules: ``id(module)`` -> qualified name.
        stop: code objects at which the walk up the stack ends.
        override: the place of everything, while it is set (programs read from files).
        files: all source files that appear in stacks.
        default: file and line for calls that no user frame made (hooks of the outermost module).
    """

    modules: dict[int, str] = field(default_factory=dict)
    default: tuple[str, int] | None = None
    override: Place | None = None
    files: set[str] = field(default_factory=set)
    stop: set[Any] = field(default_factory=set)
    stacks: list[list[str]] = field(default_factory=list)
    _index: dict[tuple[str, ...], int] = field(default_factory=dict)

    def here(self, phase: str | None) -> Place:
        """The place of the call that is being recorded."""
        if self.override is not None:
            return self.override
        frame: FrameType | None = sys._getframe(2)
        user: list[tuple[str, int]] = []
        module: str | None = None
        while frame is not None and frame.f_code not in self.stop:
            code = frame.f_code
            if module is None and code.co_name == "_call_impl":
                module = self.modules.get(id(frame.f_locals.get("self")))
            # A tensor subclass hands every call on; the line that made the call says more.
            if code.co_name != "__torch_function__" and is_user_file(code.co_filename):
                user.append((code.co_filename, frame.f_lineno))
            frame = frame.f_back
        return self._place(user, module, phase)

    def of_frames(self, frames: list[tuple[str, int]], module: str | None) -> Place:
        """The place of recorded frames, outermost first."""
        return self._place([f for f in reversed(frames) if is_user_file(f[0])], module, None)

    def _place(self, user: list[tuple[str, int]], module: str | None, phase: str | None) -> Place:
        """``user``: frames, innermost first."""
        if not user and self.default is not None:
            user = [self.default]
        if not user:
            return Place(module=module, phase=phase)
        file, line = next(((f, n) for f, n in user if not is_wrapper_file(f)), user[0])
        key = tuple(f"{shown_path(f)}:{n}" for f, n in reversed(user))
        if key not in self._index:
            self._index[key] = len(self.stacks)
            self.stacks.append(list(key))
            self.files.update(f for f, _ in user)
        text = linecache.getline(file, line).strip()
        return Place(f"{shown_path(file)}:{line}", text or None, module, self._index[key], phase)
