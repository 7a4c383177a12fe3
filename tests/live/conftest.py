"""Makes ``tests/support`` importable as ``support``, as a user's own package would be."""

import sys
from pathlib import Path

import pytest

TESTS = str(Path(__file__).resolve().parents[1])
if TESTS not in sys.path:
    sys.path.insert(0, TESTS)

pytest.importorskip("torch", reason="capturing live models needs torch")
pytest.importorskip("transformers", reason="needs the extra 'hf'")


@pytest.fixture(autouse=True, scope="session")
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> object:
    """References are captured once per session, and nothing is left in the user's cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EMERGE_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield
