"""Tables that both sides compute from literals, or hold as constants: which of them are the same, bit for bit.

One program computes a rotary table, another one brings it along as a stored constant or computes it in other steps.
Sub-graphs without inputs are executed in their captured types, and values with equal types, shapes and bits are
equal for every input. Nothing else is: a table that is off by one ulp is another table.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from emerge.execute._torch import torch
from emerge.execute.constants import const_subgraph
from emerge.execute.lockstep import run_sequential
from emerge.execute.memory import estimate_peak
from emerge.facts.families import FamilyGraph
from emerge.facts.lower import Elements, Lowering, Tensor
from emerge.facts.ops.positions import range_along
from emerge.graph.model import Graph
from emerge.relate.derive import Derivation, Problem
from emerge.relate.statement import CONSTANT, AxisPlacement, Piece, Statement
from emerge.util.errors import EmergeError

#: dtype, shape, SHA-256 of the bytes, whether it is a causal mask, and its elements where they are one number or a range.
Digest = tuple[str, tuple[int, ...], str, bool, Elements | None]
#: Memory for executing the constants of one graph.
MOST_BYTES = 1 << 30
#: Pairs of one content that are related; more come from constants of few values.
MOST_PAIRS = 1024


def constant_digests(graph: Graph) -> dict[str, Digest]:
    """Node or input -> digest, for every tensor that depends on literals and stored constants alone."""
    out: dict[str, Digest] = {}
    for item in graph.inputs:
        digest = item.extra.get("digest")
        if isinstance(digest, str) and all(isinstance(n, int) for n in item.shape):
            out[item.name] = (item.dtype, tuple(int(n) for n in item.shape), digest, False, None)
    fixed = [i for i in graph.inputs if i.const is not None]
    alone = const_subgraph(replace(graph, inputs=fixed))
    names, nodes = {i.name for i in fixed}, []
    for node in graph.nodes:
        # ones_like(x) is constant, but its shape comes from an operand that is not
        if node.name in alone and all(r in names for r in node.refs()):
            names.add(node.name)
            nodes.append(node)
    part = replace(graph, inputs=fixed, nodes=nodes, outputs=[])
    try:
        if not nodes or estimate_peak(part).peak > MOST_BYTES:
            return out
        values = run_sequential(part, {}, keep="all")
    except EmergeError:
        return out  # an operator that is not executed: nothing is known
    for node in nodes:
        value = values.get(node.name)
        if isinstance(value, torch.Tensor) and node.dtype is not None and value.numel() > 1:
            exact = value.to(getattr(torch, node.dtype))  # it was computed in this type and widened when it was kept
            if torch.equal(exact.to(value.dtype), value):
                digest = digest_of(exact)
                out[node.name] = (node.dtype, tuple(value.shape), digest, is_causal(exact), _elements(exact))
    return out


def _elements(value: Any) -> Elements | None:
    """The number that all elements are, or the range that they are along one dimension."""
    if value.is_complex():
        return None
    first = value.reshape(-1)[0]
    if bool((value == first).all()):
        return Elements(first.item())
    varying = [d for d in range(value.dim()) if not bool((value == value.narrow(d, 0, 1)).all())]
    if value.dtype != torch.int64 or len(varying) != 1:
        return None
    along = value.movedim(varying[0], -1).reshape(-1, value.shape[varying[0]])[0]
    steps = along.diff()
    return Elements(first.item(), varying[0], int(steps[0])) if bool((steps == steps[0]).all()) else None


def is_causal(value: Any) -> bool:
    """A mask in which position i sees positions 0 to i, alike in all leading dimensions: True, or 0 beside -inf."""
    if value.dim() < 2 or min(value.shape[-2:]) < 2:
        return False
    lower = torch.ones(value.shape[-2:], dtype=torch.bool).tril()
    if value.dtype == torch.bool:
        return bool((value == lower).all())
    if not value.is_floating_point():
        return False
    return bool((value == torch.zeros(lower.shape, dtype=value.dtype).masked_fill(~lower, float("-inf"))).all())


def digest_of(value: Any) -> str:
    """As captures write it for stored constants."""
    data = value.detach().cpu().contiguous()
    raw = data.view(torch.uint8) if data.dim() else data
    return "sha256:" + hashlib.sha256(raw.numpy().tobytes()).hexdigest()


def with_constants(problem: Problem, derivation: Derivation) -> Problem | None:
    """The problem with what executing its constants says; None where that is nothing new.

    Constants with equal bits, the same on every rank, are equal; a mask that is the causal one is the causal flag; a tensor
    that holds one number is that number, and one that holds a range is that range.
    """
    ours, theirs = _families(problem.reference), _families(problem.implementation)
    known = {(s, d) for s, d, *_ in derivation.result.relations["aligned"]}
    names_of, others_of = _by_content(ours), _by_content(theirs)
    found: list[Statement] = []
    for content, names in names_of.items():
        others = others_of.get(content, [])
        if (content[4] is not None and content[4].dim is None) or len(names) * len(others) > MOST_PAIRS:
            continue
        for name in names:
            for other in others:
                s, d = derivation.reference.tensors.get(name), derivation.implementation.tensors.get(other)
                if isinstance(s, Tensor) and isinstance(d, Tensor) and (s.id, d.id) not in known:
                    found.append(_equal(name, other, content[1]))
    ref, imp = (frozenset(n for n, digest in side.items() if digest[3]) for side in (ours, theirs))
    seen = _unseen(ours, derivation.reference), _unseen(theirs, derivation.implementation)
    if not found and not ref and not imp and not any(seen):
        return None
    return replace(problem, inputs=[*problem.inputs, *found], causal_masks=(ref, imp), executed=seen)


def _unseen(digests: Mapping[str, Digest], low: Lowering) -> dict[str, Elements]:
    """Constants of one number, and ranges, that the derivation does not see as such."""
    out: dict[str, Elements] = {}
    for name, (*_, elements) in digests.items():
        tensor = low.tensors.get(name)
        if elements is None or not isinstance(tensor, Tensor) or tensor.constant is not None:
            continue
        seen = low.innermost(tensor).id in low.range_of if elements.dim is None else range_along(low, tensor) is not None
        if not seen:
            out[name] = elements
    return out


def _families(side: FamilyGraph) -> dict[str, Digest]:
    """Family -> content, where all ranks have it and hold the same."""
    found: dict[str, set[Digest]] = defaultdict(set)
    count: dict[str, int] = defaultdict(int)
    for rank, graph in enumerate(side.graphs):
        for name, digest in constant_digests(graph).items():
            try:
                family = side.family_of(rank, name)
            except KeyError:
                continue
            found[family].add(digest)
            count[family] += 1
    return {f: next(iter(d)) for f, d in found.items() if len(d) == 1 and count[f] == len(side.graphs)}


def _by_content(digests: Mapping[str, Digest]) -> dict[Digest, list[str]]:
    out: dict[Digest, list[str]] = defaultdict(list)
    for name, digest in digests.items():
        out[digest].append(name)
    return out


def _equal(name: str, other: str, shape: tuple[int, ...]) -> Statement:
    letters = [chr(ord("a") + d % 26) for d in range(len(shape))]
    axes = tuple(AxisPlacement(n, (d, 1), (d, 1), None, letters[d]) for d, n in enumerate(shape) if n > 1)
    sizes = " ".join("1" if n == 1 else letter for n, letter in zip(shape, letters))
    return Statement(Piece(name), Piece(other), axes, CONSTANT, f"{sizes} ~ {sizes}", "constants with equal bits")
