"""Rows DTYPE of the corpus, and casts around norms and routers: EQUIVALENT, with a PRECISION finding that tells where."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import emerge
from emerge.cli.main import run_main

torch = pytest.importorskip("torch")

X, W = torch.randn(3, 16, dtype=torch.bfloat16), torch.randn(16, dtype=torch.bfloat16)
COS = torch.randn(3, 16)


def normed(x: Any) -> Any:
    y = x.float()
    return y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6)


def dtype_01(x: Any, w: Any) -> Any:
    """Gemma: the product with 1 + w in float32, one rounding at the end."""
    return (normed(x) * (1 + w.float())).to(x.dtype)


def dtype_01_wrong(x: Any, w: Any) -> Any:
    return normed(x).to(x.dtype) * (1 + w)


def rotated(n: Any, c: Any) -> Any:
    return n * c + torch.cat([-n[:, 8:], n[:, :8]], -1) * c


def dtype_05(x: Any, w: Any, c: Any) -> Any:
    """Qwen3 eager: the norm of queries is rounded to bfloat16 before the rotary embedding."""
    return rotated((w * normed(x).to(x.dtype)).float(), c)


def dtype_05_wrong(x: Any, w: Any, c: Any) -> Any:
    return rotated(w.float() * normed(x), c)


def plain(x: Any, w: Any) -> Any:
    """A norm whose statistics are computed in float32."""
    return w * normed(x).to(x.dtype)


def no_cast_before_the_norm(x: Any, w: Any) -> Any:
    return w * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


def router(x: Any, g: Any) -> Any:
    return torch.softmax(x.float() @ g.float().T, -1)


def router_in_bfloat16(x: Any, g: Any) -> Any:
    return torch.softmax((x @ g.T).float(), -1)


ROWS: dict[str, tuple[Callable[..., Any], Callable[..., Any], tuple[Any, ...], str]] = {
    "DTYPE-01": (dtype_01, dtype_01_wrong, (X, W), "warning"),
    "DTYPE-05": (dtype_05, dtype_05_wrong, (X, W, COS), "note"),
    "norm": (plain, no_cast_before_the_norm, (X, W), "warning"),
    "norm, the other way": (no_cast_before_the_norm, plain, (X, W), "note"),
    "router": (router, router_in_bfloat16, (X, torch.randn(4, 16, dtype=torch.bfloat16)), "warning"),
}


@pytest.mark.parametrize("row", ROWS)
def test_the_wrong_twin_has_a_finding_at_its_line(row: str) -> None:
    reference, wrong, inputs, severity = ROWS[row]
    found = emerge.compare(reference, wrong, inputs=inputs)
    assert found.verdict == "EQUIVALENT"
    assert 1 <= len(found.findings) <= 2  # DTYPE-01 rounds both factors
    lines, start = inspect.getsourcelines(wrong)
    helper, at = inspect.getsourcelines(normed)
    for finding in found.findings:
        assert (finding.kind, finding.severity) == ("PRECISION", severity)
        assert {finding.expected, finding.found} == {"float32", "bfloat16"}
        line = int((finding.implementation_source or ":0").rpartition(":")[2])
        assert start <= line < start + len(lines) or at <= line < at + len(helper)


@pytest.mark.parametrize("row", ROWS)
def test_the_right_twin_has_none(row: str) -> None:
    reference, _, inputs, _ = ROWS[row]
    found = emerge.compare(reference, reference, inputs=inputs)
    assert (found.verdict, found.findings) == ("EQUIVALENT", [])


def test_a_campaign_can_fail_on_it(tmp_path: Path) -> None:
    from emerge.capture.trace import capture
    from emerge.graph.json_io import write_graph

    for name, program in (("reference", plain), ("implementation", no_cast_before_the_norm)):
        write_graph(capture(program, (X, W), name=name), tmp_path / f"{name}.json")
    pair = "  - {id: norm, reference: reference.json, implementation: implementation.json, relations: auto}\n"
    for line, status in (("", 0), ("fail_on: [PRECISION]\n", 1)):
        campaign = tmp_path / "campaign.yaml"
        campaign.write_text(f"campaign: types\nengine: embedded\n{line}pairs:\n{pair}")
        assert run_main(["verify", str(campaign), "--out", str(tmp_path / "out")]) == status
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert report["pairs"][0]["verdict"] == "EQUIVALENT"
