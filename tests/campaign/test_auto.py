"""``relations: auto``: from recorded placements, also of fused parameters, and from values."""

from __future__ import annotations

from typing import Any

import pytest

import emerge

torch = pytest.importorskip("torch", reason="capturing live programs needs torch")
dist = pytest.importorskip("torch.distributed")

from emerge.capture.distributed import capture_ranks  # noqa: E402
from emerge.capture.trace import capture  # noqa: E402


def fused(x: Any, gate_up: Any, down: Any) -> Any:
    gate, up = (x @ gate_up.t()).chunk(2, -1)
    return (torch.relu(gate) * up) @ down


def fused_on_a_rank(mesh: Any, rank: int) -> Any:
    def program(x: Any, gate_up: Any, down: Any) -> Any:
        y = fused(x, gate_up, down)
        dist.all_reduce(y)
        return y

    return program, (torch.zeros(3, 4), torch.zeros(6, 4), torch.zeros(3, 5))


@pytest.mark.parametrize(
    ("placement", "verdict"), [("StridedShard(0, 2)", "EQUIVALENT"), ("Shard(0)", "NOT_EQUIVALENT")]
)
def test_a_fused_parameter_is_a_strided_shard(placement: str, verdict: str) -> None:
    reference = capture(fused, (torch.zeros(3, 4), torch.zeros(12, 4), torch.zeros(6, 5)))
    ranks = capture_ranks(fused_on_a_rank, {"tp": 2})
    for g in ranks:
        for i in g.inputs:
            i.placement = {"gate_up": [placement], "down": ["Shard(0)"]}.get(i.label or "")
    result = emerge.compare(reference, ranks)
    assert result.verdict == verdict, result.reason
    assert {r.reference: r.origin for r in result.input_relations} == {
        "x": "name",
        "gate_up": "placement",
        "down": "placement",
    }


def test_a_placement_that_is_no_block_is_unknown() -> None:
    ranks = capture_ranks(fused_on_a_rank, {"tp": 2})
    for g in ranks:
        for i in g.inputs:
            i.placement = {"gate_up": ["Partial(sum)"], "down": ["Shard(0)"]}.get(i.label or "")
    reference = capture(fused, (torch.zeros(3, 4), torch.zeros(12, 4), torch.zeros(6, 5)))
    result = emerge.compare(reference, ranks)
    assert result.verdict == "UNKNOWN"
    assert "Partial(sum)" in result.reason


class Attention(torch.nn.Module):
    """A reference with weights of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k = torch.nn.Linear(6, 4, bias=False), torch.nn.Linear(6, 4, bias=False)
        self.scale = torch.nn.Parameter(torch.ones(4))

    def forward(self, x: Any) -> Any:
        return self.q(x) * self.k(x) * self.scale


class Ported(torch.nn.Module):
    """The same with other names: fused, and transposed."""

    def __init__(self, of: Attention, swapped: bool = False) -> None:
        super().__init__()
        parts = [of.k.weight, of.q.weight] if swapped else [of.q.weight, of.k.weight]
        self.qk = torch.nn.Parameter(torch.cat(parts).t().detach().clone())
        self.scale = torch.nn.Parameter(torch.ones(4))

    def forward(self, x: Any) -> Any:
        q, k = (x @ self.qk).chunk(2, -1)
        return q * k * self.scale


def test_weights_are_found_by_their_values() -> None:
    whole = Attention()
    result = emerge.compare(whole, Ported(whole), inputs=(torch.zeros(3, 6),))
    assert result.verdict == "EQUIVALENT", result.reason
    found = {(r.reference, r.implementation): (r.alignment, r.origin) for r in result.input_relations}
    assert found["q_weight", "qk[:,0:4]"] == ("a b ~ b a", "values")
    assert found["k_weight", "qk[:,4:8]"][1] == "values"
    assert found["scale", "scale"][1] == "name"


def test_the_ranks_of_a_parallel_port_are_found_too() -> None:
    whole = Attention()

    class Part(torch.nn.Module):
        def __init__(self, rank: int) -> None:
            super().__init__()
            rows = slice(2 * rank, 2 * rank + 2)
            self.weights = torch.nn.Parameter(torch.stack([whole.q.weight[rows], whole.k.weight[rows]]).detach())
            self.scale = torch.nn.Parameter(torch.ones(2))

        def forward(self, x: Any) -> Any:
            return (x @ self.weights[0].t()) * (x @ self.weights[1].t()) * self.scale

    result = emerge.compare(whole, lambda mesh, rank: (Part(rank), (torch.zeros(3, 6),)), inputs=(torch.zeros(3, 6),),
                            mesh={"tp": 2})  # fmt: skip
    assert result.verdict == "EQUIVALENT", result.reason
    found = {(r.reference, r.implementation): (r.alignment, r.origin) for r in result.input_relations}
    assert found["q_weight", "weights[0:1]"] == ("(tp b) c ~ 1 b c", "values")


def test_constant_weights_do_not_match_by_value() -> None:
    whole = Attention()
    port = Ported(whole)
    port.other, port.scale = port.scale, None
    port.forward = lambda x: (x @ port.qk).chunk(2, -1)[0] * (x @ port.qk).chunk(2, -1)[1] * port.other  # type: ignore
    result = emerge.compare(whole, port, inputs=(torch.zeros(3, 6),))
    assert result.verdict == "UNKNOWN"
    assert "scale" in result.unmatched["reference"]


def test_two_readings_by_value_are_unknown_and_name_the_lines() -> None:
    whole = Attention()
    with torch.no_grad():
        whole.k.weight.copy_(whole.q.weight)
    result = emerge.compare(whole, Ported(whole), inputs=(torch.zeros(3, 6),))
    assert result.verdict == "UNKNOWN"
    assert '"q.weight": {of: "qk[:,0:4]", is: "a b ~ b a"}' in result.reason
    assert '"q.weight": {of: "qk[:,4:8]", is: "a b ~ b a"}' in result.reason
