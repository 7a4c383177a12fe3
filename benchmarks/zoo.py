"""Captured pairs with known verdicts: ``EMERGE_ZOO=DIR python benchmarks/zoo.py [CASE...] [--kind tp1]``.

``EMERGE_ZOO`` holds ``CASE/KIND/`` directories (``seq.json``, ``rank*.json``, ``relations.json``), KIND being e.g. ``tp1`` or
``tp2``. What is expected is read from ``relations.json``. Prints a table in Markdown: case, expected, got, seconds of
CPU, and the first place named.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from benchmarks.captured import chosen  # noqa: E402
from emerge.campaign.config import PairSpec  # noqa: E402
from emerge.campaign.run import RunOptions, run_pair  # noqa: E402

EXPECTED = {"refines": "EQUIVALENT", "bug": "NOT_EQUIVALENT"}


def row(folder: Path, engine: str) -> tuple[bool, str]:
    """Whether the verdict is the expected one, and the row of the table."""
    relations = json.loads((folder / "relations.json").read_text(encoding="utf-8"))
    expected = EXPECTED.get(relations.get("expected", ""), "?")
    started = time.process_time()
    result = run_pair(PairSpec(folder.parent.name, case=folder), RunOptions(engine=engine))
    seconds = time.process_time() - started
    first = next((f for f in result.findings if f.severity == "error"), None)
    where = f"{first.kind} {' '.join(first.reference_nodes)} {first.reference_source or ''}".strip() if first else ""
    right = result.verdict == expected
    got = result.verdict if right else f"**{result.verdict}**"
    return right, f"| {folder.parent.name} {folder.name} | {expected} | {got} | {seconds:.1f} | {where} |"


def main() -> None:
    """Decides every case given, or all of them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engine", default="embedded")
    options, folders = chosen(parser, "tp1")
    print("| case | expected | got | CPU s | first place |\n|---|---|---|---:|---|")
    right = 0
    for folder in folders:
        good, text = row(folder, options.engine)
        right += good
        print(text, flush=True)
    print(f"\n{right} of {len(folders)} as expected")


if __name__ == "__main__":
    main()
