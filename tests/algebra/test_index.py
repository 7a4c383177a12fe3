"""Look-ups by positions that may be negative, and example inputs given twice: pairs that once came out EQUIVALENT."""

from __future__ import annotations

from pathlib import Path

import pytest

import emerge

torch = pytest.importorskip("torch")


def test_negative_positions_count_from_the_end() -> None:
    x = torch.randn(4, 6)
    result = emerge.compare(
        lambda x: x + torch.arange(10).float()[torch.arange(6) - 2],
        lambda x: x + (torch.arange(6) - 2).float(),
        inputs=(x,),
    )
    assert result.verdict == "NOT_EQUIVALENT"


def test_computed_positions_may_be_negative() -> None:
    i = torch.tensor([0, 1, 3])
    result = emerge.compare(lambda i: torch.arange(10).float()[i - 1], lambda i: (i - 1).float(), inputs=(i,))
    assert result.verdict != "EQUIVALENT"


def test_positions_that_operators_count_from_zero_are_not_negative() -> None:
    """Rows in the order of a sort, as experts take them; the same order less one may count from the end."""
    x, order = torch.randn(12), torch.randn(12)
    tables = (lambda i: torch.arange(12).float()[i], lambda i: i.float())
    for make, right in (
        (lambda o: o.sort().indices, True), (lambda o: o.argsort() // 2, True), (lambda o: o.argsort() % 5, True),
        (lambda o: o.argsort() - 1, False), (lambda o: o.argsort() // 2 - 3, False),
    ):  # fmt: skip
        found = emerge.compare(
            lambda x, o, make=make: x + tables[0](make(o)), lambda x, o, make=make: x + tables[1](make(o)), inputs=(x, order)
        )
        assert (found.verdict == "EQUIVALENT") == right


def test_one_example_tensor_for_two_arguments_ties_nothing() -> None:
    a = torch.randn(3, 4)
    assert emerge.compare(lambda a, b: a + 2 * b, lambda a, b: b + 2 * a, inputs=(a, a)).verdict == "NOT_EQUIVALENT"


def test_one_module_name_in_two_folders_is_two_programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from emerge.capture.cache import entry_key
    from emerge.capture.source import SourceSpec

    keys = []
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
        monkeypatch.chdir(tmp_path / folder)
        keys.append(entry_key(SourceSpec("python", "model:build", base=".")))
    assert keys[0] != keys[1]
