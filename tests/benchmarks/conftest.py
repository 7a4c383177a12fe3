"""Makes ``benchmarks`` and ``tests/support`` importable."""

import sys
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[2]
for _path in (str(_ROOT), str(_ROOT / "tests")):
    if _path not in sys.path:
        sys.path.insert(0, _path)
