"""The programs of all ranks, captured one after another in one process.

A fake process group pretends to be rank r of N; no rank runs and nothing is sent. The factory of the user builds the
rank's program as it would on a real rank: hand-written parallelism with eager or functional collectives, DTensor
plans, FSDP2, pipeline stages with send and receive.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from math import prod
from typing import Any

from emerge.capture.base import CaptureError, Substitution
from emerge.graph.model import Graph

Progress = Callable[[str], None]
_ENVIRONMENT = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def capture_ranks(
    build: Callable[[Any, int], Any],
    mesh: dict[str, int],
    ranks: str | Sequence[int] = "all",
    *,
    name: str = "captured",
    mode: str = "eval",
    fake: bool = False,
    loss: Callable[[Any], Any] | None = None,
    substitutions: Sequence[Substitution] = (),
    progress: Progress | None = None,
    files: set[str] | None = None,
) -> list[Graph]:
    """One graph per rank of a parallel program.

    Args:
        build: ``build(mesh, rank)`` gives ``(module or callable, example inputs)`` of this rank; ``mesh`` is the torch
            ``DeviceMesh`` with the axes below. Weights drawn at random are the same on every rank.
        mesh: device axes, e.g. ``{"dp": 2, "tp": 4}``; ranks are row-major over them.
        ranks: ``"all"`` or some of them.
        progress: called with one line per rank. files: filled with the source files that take part.

    Raises:
        CaptureError: a rank's program cannot be captured; or torch.distributed is in use already.
    """
    from emerge.capture.session import Settings, run_capture

    world = prod(mesh.values())
    if world < 1 or any(type(n) is not int or n < 1 for n in mesh.values()):
        raise CaptureError(f"expected a mesh of positive sizes, found {mesh}; correct it")
    chosen: list[Any] = list(range(world)) if ranks == "all" else list(ranks)
    if any(type(r) is not int or not 0 <= r < world for r in chosen):
        raise CaptureError(f"expected ranks from 0 to {world - 1}, found {ranks!r}; correct them")
    graphs = []
    for rank in chosen:
        if progress is not None:
            progress(f"{name}: rank {rank} of {world}")
        with fake_rank(rank, world), device_mesh(mesh, fake) as torch_mesh:
            settings = Settings(f"{name}/rank{rank}", mode, fake, dict(mesh), rank, world, loss=loss)
            graphs.append(run_capture(lambda r=rank, m=torch_mesh: build(m, r), settings, substitutions))  # type: ignore[misc]
        if files is not None:
            files |= settings.files
    return graphs


@contextmanager
def fake_rank(rank: int, world: int) -> Iterator[None]:
    """This process pretends to be rank ``rank`` of ``world`` inside the block.

    Raises:
        CaptureError: a process group exists already.
    """
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if dist.is_initialized():
        raise CaptureError(
            "torch.distributed is initialised already; capture in a process of its own, without init_process_group"
        )
    saved = {k: os.environ.get(k) for k in _ENVIRONMENT}
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(world))
    os.environ.setdefault("MASTER_ADDR", "localhost")
    os.environ.setdefault("MASTER_PORT", "0")
    forget_rank()
    dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
    try:
        yield
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
        forget_rank()
        for key, value in saved.items():
            if value is None:
                os.environ.pop(key, None)
            else:
                os.environ[key] = value


def forget_rank() -> None:
    """Clears what DTensor caches by mesh: meshes of different ranks compare equal, so it would serve rank 0's entries.

    Every cache found under a known name is cleared; a torch version without one of them simply has none of it.
    """
    import importlib

    for module_name, attribute in _CACHES:
        try:
            clear = getattr(importlib.import_module(module_name), attribute)
        except (ImportError, AttributeError):
            continue
        clear()
    try:
        from torch.distributed.device_mesh import _mesh_resources
    except ImportError:
        return
    for table in (
        "child_to_root_mapping",
        "mesh_dim_group_options",
        "flatten_name_to_root_dims",
        "root_to_flatten_mapping",
    ):
        found = getattr(_mesh_resources, table, None)
        if isinstance(found, dict):
            found.clear()


_CACHES = (
    ("torch.distributed.tensor.debug", "_clear_sharding_prop_cache"),
    ("torch.distributed.tensor.debug", "_clear_fast_path_sharding_prop_cache"),
    ("torch.distributed.tensor.debug", "_clear_python_sharding_prop_cache"),
    ("torch.distributed.tensor._redistribute", "clear_redistribute_planner_cache"),
)


@contextmanager
def device_mesh(mesh: dict[str, int], fake: bool) -> Iterator[Any]:
    """The torch mesh with these axes; under ``fake`` meshes can be made and sliced inside the block too."""
    from torch.distributed.device_mesh import init_device_mesh

    with ExitStack() as stack:
        if fake:
            from emerge.capture.fsdp import shards_without_data

            stack.enter_context(real_meshes())
            stack.enter_context(shards_without_data())
        yield init_device_mesh("cpu", tuple(mesh.values()), mesh_dim_names=tuple(mesh))


@contextmanager
def real_meshes() -> Iterator[None]:
    """Device meshes hold real tensors of ranks; their methods run outside of fake mode inside the block."""
    import functools

    from torch._subclasses.fake_tensor import unset_fake_temporarily
    from torch.distributed.device_mesh import DeviceMesh

    saved: dict[str, Any] = {}

    def outside(method: Any) -> Any:
        @functools.wraps(method)
        def run(*args: Any, **kwargs: Any) -> Any:
            with unset_fake_temporarily():
                return method(*args, **kwargs)

        return run

    for key in (
        "__init__",
        "__getitem__",
        "_flatten",
        "_unflatten",
        "_get_all_submeshes",
        "_concatenate",
        "get_all_groups",
        "from_group",
    ):
        if callable(vars(DeviceMesh).get(key)):
            saved[key] = vars(DeviceMesh)[key]
            setattr(DeviceMesh, key, outside(saved[key]))
    try:
        yield
    finally:
        for key, method in saved.items():
            setattr(DeviceMesh, key, method)
