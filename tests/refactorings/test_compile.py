"""``torch.compile``: the graph before AOTAutograd against the one Inductor gets, and after a pass that is wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import emerge

torch = pytest.importorskip("torch")
nn, F = torch.nn, torch.nn.functional

from emerge.capture.compiled import compiled_graphs  # noqa: E402


class Block(nn.Module):  # type: ignore[misc]
    """Attention and a feed-forward part, with norms before them."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.qkv, self.out = nn.LayerNorm(16), nn.Linear(16, 48), nn.Linear(16, 16)
        self.norm2, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 40), nn.Linear(40, 16)

    def forward(self, x: Any) -> Any:
        batch, tokens, width = x.shape
        q, k, v = (y.view(batch, tokens, 2, 8).transpose(1, 2) for y in self.qkv(self.norm1(x)).chunk(3, -1))
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(a.transpose(1, 2).reshape(batch, tokens, width))
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))


def both(change: Callable[[Any], Any] | None = None) -> Any:
    return emerge.compare(*compiled_graphs(Block().eval(), (torch.randn(2, 5, 16),), change=change))


def replace_argument(target: str, find: Callable[[Any], bool], new: Any) -> Callable[[Any], None]:
    """A pass that changes one argument of one node, as a faulty one would."""

    def change(module: Any) -> None:
        for node in module.graph.nodes:
            if str(node.target) == target and any(find(a) for a in node.args):
                node.args = tuple(new if find(a) else a for a in node.args)
                return
        raise AssertionError(f"no {target} with such an argument: {[str(n.target) for n in module.graph.nodes]}")

    return change


def test_inductor_keeps_the_meaning() -> None:
    assert both().verdict == "EQUIVALENT"


WRONG = {
    "another epsilon": replace_argument("aten.add.Tensor", lambda a: a == 1e-5, 1e-3),
    "another factor": replace_argument("aten.mul.Tensor", lambda a: isinstance(a, float) and abs(a - 0.5) < 1e-9, 0.25),
    "parts exchanged": replace_argument("<built-in function getitem>", lambda a: a == 2, 1),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_pass_is_refuted(name: str) -> None:
    found = both(WRONG[name])
    assert found.verdict == "NOT_EQUIVALENT"
    assert found.findings
