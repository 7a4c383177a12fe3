"""What rule synthesis finds by itself: ``EMERGE_ZOO=DIR python benchmarks/synthesis.py [CASE...] [--kind tp1-eager]``.

Every captured pair (``benchmarks/zoo.py``) is decided four times: with the shipped rules, with the minimal base alone, with
the minimal base and synthesis, and with the minimal base and the folder that the third run wrote. Prints two tables in
Markdown: the pairs, and the rules with the shipped ones that follow from them.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from benchmarks.captured import chosen  # noqa: E402
from emerge.algebra.rulefile import EqualityRule, egg_files, rules_of, shipped_files  # noqa: E402
from emerge.algebra.saturate import MINIMAL, rule_files  # noqa: E402
from emerge.campaign.build import prepare  # noqa: E402
from emerge.campaign.config import PairSpec, SynthesisSpec  # noqa: E402
from emerge.campaign.run import RunOptions, run_pair  # noqa: E402
from emerge.relate.derive import derive  # noqa: E402
from emerge.synthesis.implied import implied  # noqa: E402
from emerge.synthesis.store import FILE, Store  # noqa: E402
from emerge.synthesis.terms import constructors  # noqa: E402


def timed(spec: PairSpec, base: str) -> tuple[Any, float, float]:
    """A result, with seconds on the clock and on a processor."""
    wall, cpu = time.perf_counter(), time.process_time()
    result = run_pair(spec, RunOptions(base=base))
    return result, time.perf_counter() - wall, time.process_time() - cpu


def coverage(case: Path, rules: Sequence[Path]) -> str:
    """Share of the reference's nodes whose value has an alignment, with the minimal base and some rules."""
    problem = prepare(PairSpec("pair", case=case)).problem
    found = derive(problem, rules=tuple(rules), base_rules="minimal", start_with_algebra=True)
    aligned = {row[0] for row in found.result.relations["aligned"]}
    root = dict(found.result.relations["root"])
    ids = [t.id for t in found.reference.tensors.values() if hasattr(t, "id")]
    return f"{sum(root.get(i, i) in aligned for i in ids)} of {len(ids)}"


def sizes(rule: EqualityRule) -> tuple[int, int]:
    """Operators of the left and right side."""
    return tuple(sum(1 for _ in constructors(t)) for t in rule.unions[0])  # type: ignore[return-value]


def row(case: Path, folder: Path) -> tuple[bool, str, list[EqualityRule]]:
    """Whether the pair is as with the shipped rules, its row, and the rules synthesised for it."""
    name = f"{case.parent.name} {case.name}"
    shipped, wall0, _ = timed(PairSpec(name, case=case), "full")
    bare, _, _ = timed(PairSpec(name, case=case), "minimal")
    first, wall1, cpu1 = timed(PairSpec(name, case=case, synthesis=SynthesisSpec(folder=folder)), "minimal")
    files = egg_files([folder]) if folder.exists() else ()
    again, wall2, cpu2 = timed(
        PairSpec(name, case=case, rules=list(files), synthesis=SynthesisSpec(folder=folder / "again")), "minimal"
    )
    rules = list(rules_of(folder / FILE)) if files else []
    levels = Store(folder).certificates()
    proved = sum(levels[r.name]["evidence"] == "proved" for r in rules)
    operators = ", ".join(f"{left}/{right}" for left, right in map(sizes, rules))
    text = (
        f"| {name} | {shipped.verdict} | {bare.verdict} | {first.verdict} | {len(rules)} | {operators} | "
        f"{proved}/{len(rules) - proved} | {coverage(case, ())} | {coverage(case, files)} | {wall1:.0f} ({cpu1:.0f}) | "
        f"{again.verdict}, {len(again.rules_synthesised)} new | {wall2:.1f} ({cpu2:.1f}) | {wall0:.1f} |"
    )
    return first.verdict == shipped.verdict, text, rules


def rule_table(found: dict[str, tuple[EqualityRule, list[str]]]) -> None:
    """The synthesised rules, and what of the shipped base follows from each and from all."""
    hand = [r for path in shipped_files() if path.name not in MINIMAL for r in rules_of(path)]
    base = rule_files((), "minimal")
    open_ = [r for r in hand if not implied(r, base)]
    print("\n| synthesised rule | pairs | shipped rules that follow | follows from the shipped rules |\n|---|---:|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        every = Path(folder) / "all.egg"
        every.write_text("".join(_text(r) for r, _ in found.values()), encoding="utf-8")
        for rule, pairs in found.values():
            one = Path(folder) / f"{rule.name}.egg"
            one.write_text(_text(rule), encoding="utf-8")
            follows = ", ".join(r.name for r in open_ if implied(r, (*base, one)))
            known = "yes" if implied(rule, rule_files((), "full")) else "no"
            print(f"| {re.sub('[|]', chr(92) + '|', rule.meaning)} | {len(pairs)} | {follows} | {known} |")
        names = [r.name for r in open_ if implied(r, (*base, every))]
        print(f"\n{len(names)} of {len(open_)} shipped rules that the minimal base lacks follow from all: {', '.join(names)}")


def _text(rule: EqualityRule) -> str:
    return f"; @meaning {rule.meaning}\n{rule.text}\n"


def main() -> None:
    """Decides every case given, or all of them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--keep", help="folder for the synthesised rules, one folder a pair")
    options, folders = chosen(parser, "tp1-eager")
    print(
        "| pair | shipped rules | minimal base | with synthesis | rules | operators left/right | proved/tested "
        "| aligned, minimal | aligned | s (CPU s) | second run | s (CPU s) | s, shipped |"
    )
    print("|---|---|---|---|---:|---|---|---|---|---:|---|---:|---:|")
    found: dict[str, tuple[EqualityRule, list[str]]] = {}
    right = 0
    with tempfile.TemporaryDirectory() as private:
        for case in folders:
            good, text, rules = row(case, Path(options.keep or private) / case.parent.name)
            right += good
            print(text, flush=True)
            for rule in rules:
                found.setdefault(rule.name, (rule, []))[1].append(case.parent.name)
    print(f"\n{right} of {len(folders)} with the verdict of the shipped rules")
    rule_table(found)


if __name__ == "__main__":
    main()
