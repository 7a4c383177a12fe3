"""A pytest plugin, registered when Emerge is installed: one fixture and one marker.

    @pytest.mark.emerge_slow                      # runs with --emerge-slow only
    def test_tensor_parallel(emerge_compare):
        emerge_compare(reference, build, inputs=(x, w), relations={..}, mesh={"tp": 2})

The fixture is :func:`emerge.assert_equivalent`; it also writes captures into the test's own folder instead of the user's
cache, so that tests do not see one another's. Nothing of Emerge is imported before the fixture is used.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest


def pytest_addoption(parser: Any) -> None:
    """Adds ``--emerge-slow``."""
    parser.getgroup("emerge").addoption(
        "--emerge-slow", action="store_true", help="run the tests marked emerge_slow (verifications that take long)"
    )


def pytest_configure(config: Any) -> None:
    """Declares the marker."""
    config.addinivalue_line("markers", "emerge_slow: a verification that takes long; runs with --emerge-slow only")


def pytest_collection_modifyitems(config: Any, items: Sequence[Any]) -> None:
    """Skips slow verifications unless they are asked for."""
    if config.getoption("--emerge-slow"):
        return
    for item in items:
        if item.get_closest_marker("emerge_slow") is not None:
            item.add_marker(pytest.mark.skip(reason="a slow verification; run with --emerge-slow"))


@pytest.fixture
def emerge_compare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """:func:`emerge.assert_equivalent`: returns the result, or fails the test with the findings."""
    import emerge

    monkeypatch.setenv("EMERGE_CACHE", str(tmp_path / "emerge-cache"))
    check: Callable[..., Any] = emerge.assert_equivalent
    return check
