"""The captured pairs that the benchmarks zoo.py, coverage.py and synthesis.py decide.

``EMERGE_ZOO`` holds ``CASE/KIND/`` directories (``seq.json``, ``rank*.json``, ``relations.json``), KIND being e.g. ``tp1`` or
``tp2``.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path


def chosen(parser: argparse.ArgumentParser, kind: str) -> tuple[argparse.Namespace, list[Path]]:
    """The options of the command line, to which ``cases`` and ``--kind`` are added, and the directories they name."""
    parser.add_argument("cases", nargs="*")
    parser.add_argument("--kind", default=kind)
    options = parser.parse_args()
    root = os.environ.get("EMERGE_ZOO")
    if not root:
        sys.exit("EMERGE_ZOO is not set: name the folder of captured cases")
    folders = sorted(f.parent for f in Path(root).glob(f"*/{options.kind}/relations.json"))
    return options, [f for f in folders if not options.cases or f.parent.name in options.cases]
