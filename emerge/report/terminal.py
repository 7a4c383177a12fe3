"""The report for a terminal: one block per pair, then counts. Derived from the JSON document alone."""

from __future__ import annotations

import re
import shutil
import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

_COLOURS = {"EQUIVALENT": "32", "NOT_EQUIVALENT": "31", "UNKNOWN": "33", "ERROR": "31"}
#: Assumptions and outputs listed per pair before the rest is only counted.
MOST_LISTED = 6
MOST_FINDINGS = 4
#: What nodes rest on that no proved law covers, in words.
_REST = {
    "kernel_contracts": "definitions of kernels",
    "index_operators": "laws about indices",
    "other_laws": "other laws that are tested or assumed",
}
#: Columns that lines are wrapped at where the terminal's width is not known.
WIDTH = 120
#: Continuation lines of ``key:  text`` lines stand below the text.
_HANGING = re.compile(r"( +)([a-z]+: +)?")


def render(doc: dict[str, Any], *, colour: bool = False) -> str:
    """The text of a report.

    Args:
        colour: ANSI colours for verdicts; only for a tty.
    """
    width = max(shutil.get_terminal_size((WIDTH, 24)).columns, 60)
    return "\n".join(wrapped for line in _lines(doc, colour) for wrapped in _wrapped(line, width)) + "\n"


def _wrapped(line: str, width: int) -> list[str]:
    """A line as lines of at most ``width`` columns where words allow it."""
    found = _HANGING.match(line)
    if len(line) <= width or found is None:
        return [line]
    hanging = " " * (len(found[0]) if found[2] and len(found[0]) < width // 3 else len(found[1]) + 2)
    return textwrap.wrap(
        line, width, subsequent_indent=hanging, break_long_words=False, break_on_hyphens=False, drop_whitespace=True
    )


def _lines(doc: dict[str, Any], colour: bool) -> Iterator[str]:
    engine = doc["engine"]
    version = f" ({engine['version']})" if engine["version"] else ""
    yield (
        f"emerge {doc['emerge']}  campaign {doc['campaign']}  seed {doc['seed']}  config {doc['config_hash'][:12]}  "
        f"engine {engine['datalog']}{version}"
    )
    for pair in doc["pairs"]:
        yield ""
        yield from _pair_lines(pair, colour)
    yield ""
    yield from _summary(doc["pairs"])


def _paint(text: str, colour: bool) -> str:
    code = _COLOURS.get(text)
    return f"\x1b[{code}m{text}\x1b[0m" if colour and code else text


def _pair_lines(p: dict[str, Any], colour: bool) -> Iterator[str]:
    verdict = "ERROR" if p["error"] else p["verdict"]
    evidence = f" ({p['evidence']})" if p["evidence"] else ""
    unexpected = "" if p["expect"] == "equivalent" else f"  [expected: {p['expect']}]"
    mesh = " ".join(f"{a}={n}" for a, n in p["mesh"].items())
    proved = sum(o["proved"] for o in p["outputs"])
    counts = f"  {proved}/{len(p['outputs'])} outputs" if not p["error"] else ""
    mesh = f"  mesh {mesh}" if mesh else ""
    yield f"{p['id']}: {_paint(verdict, colour)}{evidence}{counts}{mesh}  {p['seconds']['total']:.2f} s{unexpected}"
    if p["error"]:
        place = f"{p['error']['place']}: " if p["error"]["place"] else ""
        yield f"  error: {place}{p['error']['message']}"
        return
    if p["reason"]:
        yield f"  reason: {p['reason']}"
    if verdict != "NOT_EQUIVALENT":
        yield from _limited(
            [f"  output {_output_name(o)}: {_shown(o['alignment'])}{_against(o)}" for o in p["outputs"]], "outputs"
        )
    for f in p["findings"][:MOST_FINDINGS]:
        yield from _finding_lines(f)
    if len(p["findings"]) > MOST_FINDINGS:
        yield f"  .. and {len(p['findings']) - MOST_FINDINGS} more findings in the report"
    if p["counterexample"]:
        c = p["counterexample"]
        size = c["max_abs_diff"] if isinstance(c["max_abs_diff"], str) else f"{c['max_abs_diff']:.6g}"
        difference = f"output {c['output']} differs by {size}"
        yield f"  counterexample: {difference} ({c['sizes']} sizes, seed {c['seed']}) {c['file']}".rstrip()
    if verdict == "EQUIVALENT":
        yield from _coverage_lines(p)
        names = Counter(a["name"] for a in p["assumptions"])
        if names:
            yield "  assumes: " + ", ".join(f"{n} ({k} places)" if k > 1 else n for n, k in names.items())
    if verdict == "EQUIVALENT" and p["rules"]["synthesised"]:
        yield f"  synthesised rules: {', '.join(p['rules']['synthesised'])}"
    for side in ("reference", "implementation"):
        names_of = p["unmatched"][side]
        if names_of:
            more = " .." if len(names_of) > MOST_LISTED else ""
            yield f"  {side} inputs without a relation: {', '.join(names_of[:MOST_LISTED])}{more}"


def _coverage_lines(p: dict[str, Any]) -> Iterator[str]:
    """How many reference nodes proved laws cover, and what the others rest on."""
    total, rest = sum(p["coverage"].values()), p.get("coverage_rest", {})
    if not total:
        return
    proved = p["coverage"]["proved"]
    parts = [f"{rest[kind]} on {text}" for kind, text in _REST.items() if rest.get(kind)]
    others = f"; of the others rest {', '.join(parts)}" if parts else ""
    yield f"  coverage: {proved} of {total} reference nodes ({100 * proved // total}%) by proved laws{others}"


def _output_name(o: dict[str, Any]) -> str:
    """The program's own name for an output, and the node."""
    label = o.get("label")
    return f"{label} ({o['reference']})" if label and label != o["reference"] else str(o["reference"])


def _against(o: dict[str, Any]) -> str:
    return "" if o["proved"] else f"  (expected {_shown(o['expected'])})"


def _shown(alignment: str | None) -> str:
    """An alignment of scalars has no axes to show."""
    if alignment is None:
        return "not derived"
    return "scalar ~ scalar" if alignment.strip() == "~" else alignment


def _limited(lines: list[str], what: str) -> Iterator[str]:
    yield from lines[:MOST_LISTED]
    if len(lines) > MOST_LISTED:
        yield f"  .. and {len(lines) - MOST_LISTED} more {what}"


def _finding_lines(f: dict[str, Any]) -> Iterator[str]:
    yield f"  {f['severity']} {f['kind']}: {f['message']}"
    if f["reference_nodes"]:
        yield f"    reference:      {', '.join(f['reference_nodes'])}  at {f['reference_source'] or 'no source line'}"
    if f["implementation_nodes"]:
        shown = _on_ranks(f["implementation_nodes"])
        yield f"    implementation: {shown}  at {f['implementation_source'] or 'no source line'}"
    for key in ("found", "expected", "hint"):
        if f[key]:
            yield f"    {key + ':':15} {f[key]}"


def _on_ranks(nodes: list[str]) -> str:
    """``RANK:NAME`` entries, shortly: one name with the ranks that have it, runs of ranks as ranges."""
    ranks: dict[str, list[int]] = {}
    for entry in nodes:
        rank, colon, name = entry.partition(":")
        if not colon or not rank.isdigit():
            return _some(nodes)
        ranks.setdefault(name, []).append(int(rank))
    return _some([f"{_ranges(sorted(of))}:{name}" for name, of in ranks.items()])


def _ranges(ranks: list[int]) -> str:
    parts: list[list[int]] = []
    for r in ranks:
        if parts and r == parts[-1][-1] + 1:
            parts[-1].append(r)
        else:
            parts.append([r])
    return ",".join(str(p[0]) if len(p) == 1 else f"{p[0]}-{p[-1]}" for p in parts)


def _some(names: Iterable[str]) -> str:
    listed = list(names)
    more = f" and {len(listed) - MOST_LISTED} more" if len(listed) > MOST_LISTED else ""
    return ", ".join(listed[:MOST_LISTED]) + more


def _summary(pairs: list[dict[str, Any]]) -> Iterator[str]:
    verdicts = Counter("ERROR" if p["error"] else p["verdict"] for p in pairs)
    order = ("EQUIVALENT", "NOT_EQUIVALENT", "UNKNOWN", "ERROR")
    listed = ", ".join(f"{verdicts[v]} {v}" for v in order if verdicts[v])
    yield f"{len(pairs)} pair{'' if len(pairs) == 1 else 's'}: {listed or 'none'}"
    claimed = sum(len(p["outputs"]) for p in pairs)
    proved = sum(o["proved"] for p in pairs for o in p["outputs"])
    not_claimed = sum(p["outputs_not_claimed"] for p in pairs)
    relations = sum(len(p["input_relations"]) for p in pairs)
    open_inputs = sum(len(p["unmatched"][s]) for p in pairs for s in ("reference", "implementation"))
    yield (
        f"outputs: {claimed} claimed, {proved} proved, {claimed - proved} not proved, {not_claimed} not claimed; "
        f"inputs: {relations} relations, {open_inputs} tensors unmatched"
    )
