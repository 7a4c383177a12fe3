"""All ranks of a program in one process, in lockstep, with the real meaning of their collectives."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from emerge.execute._torch import torch
from emerge.execute.collectives import Board, CollectiveMismatch, Waiting
from emerge.execute.interpreter import RankRun, with_rank_options
from emerge.execute.memory import estimate_peak
from emerge.execute.options import Options
from emerge.graph.model import Graph
from emerge.util.errors import BudgetExceeded, ExecutionError


@contextmanager
def torch_threads(count: int | None) -> Iterator[None]:
    """Limits torch's CPU threads inside the block; None leaves them alone."""
    if count is None:
        yield
        return
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def run_ranks(
    graphs: Sequence[Graph],
    inputs: Sequence[dict[str, Any]],
    groups: dict[str, list[list[int]]] | None = None,
    *,
    options: Options | Sequence[Options] | None = None,
    keep: Iterable[str] | Sequence[Iterable[str]] | str = (),
) -> list[dict[str, Any]]:
    """Run the programs of all ranks; position in ``graphs`` = global rank.

    Args:
        inputs: per rank, input name -> tensor of the declared shape.
        groups: process-group id -> rank lists, added to what the graphs carry.
        options: shared by all ranks, or one per rank (rank-dependent dropout masks).
        keep: names wanted besides the outputs: one list for all ranks, one list per rank, or ``"all"``.

    Returns:
        Per rank: values of the outputs and of ``keep`` by name. Floating tensors are float64 unless the options
        say otherwise; multi-output nodes are tuples. An input that the program overwrites has its new value.

    Raises:
        CollectiveMismatch: the ranks' communication does not fit together (never hangs).
        ExecutionError: an operator without semantics, missing inputs, a failing operator.
        BudgetExceeded: the estimated peak is above ``options.memory_limit``, or memory ran out.
    """
    if not graphs or len(graphs) != len(inputs):
        raise ExecutionError(f"expected one set of inputs per rank, got {len(inputs)} for {len(graphs)} graphs")
    per_rank = with_rank_options(options, len(graphs))
    kept = _keep_per_rank(keep, len(graphs))
    _check_memory(graphs, per_rank[0], kept)
    board = Board(graphs, groups)
    with torch_threads(per_rank[0].threads), torch.no_grad():
        runs = [
            RankRun(g, values, board, rank, per_rank[rank], kept[rank])
            for rank, (g, values) in enumerate(zip(graphs, inputs))
        ]
        return _drive(board, runs)


def run_sequential(
    graph: Graph,
    inputs: dict[str, Any],
    *,
    options: Options | None = None,
    keep: Iterable[str] | str = (),
) -> dict[str, Any]:
    """Run one graph alone; every process group has one rank, so collectives are identities.

    Returns and Raises: as :func:`run_ranks`.
    """
    wanted: Any = keep if isinstance(keep, str) else [list(keep)]
    return run_ranks([graph], [inputs], options=options, keep=wanted)[0]


def _keep_per_rank(keep: Any, count: int) -> list[Any]:
    if isinstance(keep, str):
        return [keep] * count
    listed = list(keep)
    if listed and not isinstance(listed[0], str):
        if len(listed) != count:
            raise ExecutionError(f"'keep' has {len(listed)} lists for {count} ranks, expected one per rank")
        return [list(k) if not isinstance(k, str) else k for k in listed]
    return [listed] * count


def _check_memory(graphs: Sequence[Graph], options: Options, kept: list[Any]) -> None:
    if options.memory_limit is None:
        return
    total = sum(estimate_peak(g, options.precision, k).peak for g, k in zip(graphs, kept))
    if total > options.memory_limit:
        raise BudgetExceeded(
            f"executing {len(graphs)} graph(s) needs an estimated {total / 2**30:.2f} GiB, "
            f"the limit is {options.memory_limit / 2**30:.2f} GiB; use smaller sizes or raise the limit",
            place=graphs[0].path or graphs[0].name,
        )


def _drive(board: Board, runs: list[RankRun]) -> list[dict[str, Any]]:
    steps = {run.rank: run.steps() for run in runs}
    results: list[dict[str, Any]] = [{} for _ in runs]
    waiting: dict[int, Waiting] = {}
    try:
        while steps:
            before = board.events
            finished = []
            for rank, generator in steps.items():
                try:
                    waiting[rank] = next(generator)
                except StopIteration as stop:
                    results[rank] = stop.value
                    finished.append(rank)
            for rank in finished:
                del steps[rank]
                waiting.pop(rank, None)
            if steps and not finished and board.events == before:
                # Results are delivered when the last call is issued, so a pass without one changes nothing.
                raise _deadlock([waiting[r] for r in sorted(steps)], len(runs))
    finally:
        for generator in steps.values():
            generator.close()
    left = board.leftovers()
    if left:
        words = "; ".join(f"rank {w.rank} node '{w.node}': {w.what}" for w in left[:4])
        raise CollectiveMismatch("unmatched", f"communication without counterpart at the end: {words}", left)
    return results


def _deadlock(waiting: list[Waiting], count: int) -> CollectiveMismatch:
    words = "; ".join(f"rank {w.rank} waits at node '{w.node}' for {w.what}" for w in waiting)
    done = sorted(set(range(count)) - {w.rank for w in waiting})
    rest = f"; rank(s) {done} have finished" if done else ""
    return CollectiveMismatch("deadlock", f"the ranks wait for each other: {words}{rest}", waiting)
