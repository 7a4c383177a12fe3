"""Options that several commands share, their checks, and the way from an exception to an exit status."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import typer

from emerge.campaign.config import ENGINES, check_axis
from emerge.util.errors import ConfigError, EmergeError, EngineError, InputError

OK, FAILED, INPUT_ERROR, UNKNOWN, INTERNAL, INTERRUPTED = 0, 1, 2, 3, 4, 130
FORMATS = ("text", "json")
FORMATS_LATER = ("sarif", "junit")


def fail(message: str) -> None:
    """One sentence on stderr."""
    print(f"emerge: {' '.join(message.split())}", file=sys.stderr)


def emit(text: str) -> None:
    """Writes to stdout. A reader that went away (head, less) does not change the exit status of a verdict."""
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        _drop_stdout()


def _drop_stdout() -> None:
    sys.stdout = open(os.devnull, "w")  # noqa: SIM115  (kept open so that the interpreter can flush at exit)


def guarded(body: Callable[[], int], debug: bool) -> NoReturn:
    """Runs a command and turns what it raises into one sentence and an exit status.

    Raises:
        typer.Exit: always.
    """
    try:
        status = body()
        sys.stdout.flush()
    except KeyboardInterrupt:
        fail("interrupted")
        status = INTERRUPTED
    except BrokenPipeError:
        _drop_stdout()
        status = OK
    except EmergeError as e:
        if debug:
            traceback.print_exc()
        fail(str(e))
        status = INTERNAL if isinstance(e, EngineError) else INPUT_ERROR
    except Exception as e:
        if debug:
            traceback.print_exc()
        fail(f"internal error ({type(e).__name__}: {e}); run again with --debug and report it")
        status = INTERNAL
    raise typer.Exit(status)


def check_format(name: str) -> str:
    """The output format.

    Raises:
        InputError: it is not one, or not in this version.
    """
    if name in FORMATS_LATER:
        raise InputError(f"--format {name} is not in this version; use text or json")
    if name not in FORMATS:
        raise InputError(f"unknown --format {name!r}; use text or json")
    return name


def check_base(name: str) -> str:
    """The shipped rules of the algebra that are used.

    Raises:
        InputError: there is no such base.
    """
    from emerge.algebra.saturate import BASES

    if name not in BASES:
        raise InputError(f"unknown --base {name!r}; use {' or '.join(BASES)}")
    return name


def check_engine(name: str | None, place: str = "") -> str | None:
    """The Datalog engine, which must work here.

    Raises:
        InputError: it is unknown or not installed.
    """
    if name is None or name == "auto":
        return name
    if name not in ENGINES:
        raise InputError(f"unknown engine {name!r}; use one of {', '.join(ENGINES)}", place)
    from emerge.engine.run import available_engines

    if name not in available_engines():
        raise InputError(f"the engine {name!r} is not installed here; install it, or use the engine auto", place)
    return name


def parse_mesh(text: str | None) -> dict[str, int] | None:
    """``tp=2,dp=4`` -> ``{"tp": 2, "dp": 4}``.

    Raises:
        ConfigError: it is not of this form.
    """
    if text is None:
        return None
    axes: dict[str, int] = {}
    for part in text.split(","):
        name, equals, size = part.strip().partition("=")
        if not equals or not size.strip().isdecimal():
            raise ConfigError(f"expected name=size, found {part.strip()!r}; write e.g. tp=2,dp=4", "--mesh")
        name = name.strip()
        check_axis(name, int(size), "--mesh")
        if name in axes:
            raise ConfigError(f"the axis {name!r} stands twice; drop one", "--mesh")
        axes[name] = int(size)
    return axes


def positive(value: float | None, option: str) -> float | None:
    """A limit, which must be above zero.

    Raises:
        InputError: it is not.
    """
    if value is not None and not 0 < value < float("inf"):
        raise InputError(f"expected a number > 0 for {option}, found {value:g}; correct it")
    return value


def output_directory(out: Path | None, campaign: str) -> Path:
    """``--out``, else ``emerge-out/<campaign>``."""
    if out is not None:
        return out
    from emerge.report.document import file_stem

    return Path("emerge-out") / file_stem(campaign)


def check_device(name: str | None) -> str | None:
    """Where programs are executed; None leaves it to the campaign.

    Raises:
        InputError: there is no such device, here or at all.
    """
    from emerge.campaign.config import DEVICES

    if name is not None and name not in DEVICES:
        raise InputError(f"unknown --device {name!r}; use {', '.join(DEVICES[:-1])} or {DEVICES[-1]}")
    if name == "cuda":
        import torch

        if not torch.cuda.is_available():
            raise InputError("--device cuda was asked for, and torch finds no CUDA device; use auto or cpu")
    return name
