"""DTensor placements as graph files hold them.

``placement`` lists one entry per axis of the graph's mesh: ``"Replicate"``, ``"Shard(0)"``,
``"StridedShard(1, 2)"`` (dimension, split factor), ``"Partial(sum)"``, or null where the tensor's own mesh does not
have that axis.
"""

from __future__ import annotations

from typing import Any


def local_part(tensor: Any) -> Any:
    """The plain tensor on this rank behind a DTensor or an asynchronous collective's result."""
    local = getattr(tensor, "_local_tensor", None)
    if local is not None:
        return local_part(local)
    if type(tensor).__name__ == "AsyncCollectiveTensor":
        return tensor.wait()
    return tensor


def placement_text(placement: Any) -> str:
    """One placement, e.g. ``Shard(0)``."""
    kind = type(placement).__name__
    if kind == "_StridedShard":
        return f"StridedShard({placement.dim}, {placement.split_factor})"
    if placement.is_shard():
        return f"Shard({placement.dim})"
    if placement.is_replicate():
        return "Replicate"
    if placement.is_partial():
        return f"Partial({placement.reduce_op})"
    return kind


def placement_of(tensor: Any, mesh: dict[str, int]) -> tuple[list[str | None] | None, list[int] | None]:
    """Placement per axis of ``mesh`` and global shape of a DTensor; (None, None) for other tensors."""
    own = getattr(tensor, "placements", None)
    if own is None or getattr(tensor, "_local_tensor", None) is None:
        return _megatron(tensor, mesh)
    device_mesh = tensor.device_mesh
    names = device_mesh.mesh_dim_names
    if names is None:
        names = tuple(mesh) if len(mesh) == device_mesh.ndim else ()
    known = {name: placement_text(p) for name, p in zip(names, own)}
    if len(names) != len(own) or not set(known) <= set(mesh):
        # axes that the graph's mesh does not name: match them by size where that is unambiguous
        known = _by_size(own, [device_mesh.size(i) for i in range(device_mesh.ndim)], mesh)
    return [known.get(axis) for axis in mesh], [int(s) for s in tensor.shape]


def _megatron(tensor: Any, mesh: dict[str, int]) -> tuple[list[str | None] | None, list[int] | None]:
    """Placement from the marks Megatron leaves: ``tensor_model_parallel``, ``partition_dim``, ``partition_stride``."""
    dim = getattr(tensor, "partition_dim", None)
    if not getattr(tensor, "tensor_model_parallel", False) or type(dim) is not int or dim < 0 or not mesh:
        return None, None
    axis = "tp" if "tp" in mesh else next(iter(mesh)) if len(mesh) == 1 else None
    if axis is None:
        return None, None
    stride = getattr(tensor, "partition_stride", 1)
    text = f"Shard({dim})" if stride == 1 else f"StridedShard({dim}, {stride})"
    whole = [int(s) * (mesh[axis] if d == dim else 1) for d, s in enumerate(tensor.shape)]
    return [text if a == axis else None for a in mesh], whole


def _by_size(own: Any, sizes: list[int], mesh: dict[str, int]) -> dict[str, str]:
    if sizes == list(mesh.values()):
        return {axis: placement_text(p) for axis, p in zip(mesh, own)}
    if len(sizes) == 1 and list(mesh.values()).count(sizes[0]) == 1:
        axis = next(a for a, n in mesh.items() if n == sizes[0])
        return {axis: placement_text(own[0])}
    return {}
