"""PyTorch's DTensors, as files of torch.save have them: which box of a tensor a rank has.

A tensor is cut by the axes of a mesh of ranks, each by a placement of its own; what is cut by
several is cut by one after another. What is read here is what torch wrote of that on each rank
(torch 2.1 to 2.13, `torch.distributed.tensor`); nothing that is named is called.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

from rankxform.errors import FormatError
from rankxform.geometry.box import Shape
from rankxform.values import NamedTuple

from .dcp_containers import is_extent
from .pickles import GlobalName, UnbuiltObject

WRAPPER = "torch._utils._rebuild_wrapper_subclass"
_PACKAGES = "torch.distributed.tensor", "torch.distributed._tensor"
_CLASSES = {
    "DTensor": ("", "._api", ".api"),
    "DTensorSpec": ("._dtensor_spec", ".placement_types"),
    "TensorMeta": ("._dtensor_spec", ".placement_types"),
    "ShardOrderEntry": ("._dtensor_spec",),
    "Shard": (".placement_types",),
    "_StridedShard": (".placement_types",),
    "Replicate": (".placement_types",),
    "Partial": (".placement_types",),
    "_Partial": (".placement_types",),
    "DeviceMesh": (".device_mesh",),
}
DTENSOR_NAMES = frozenset((
    WRAPPER, "torch.distributed.device_mesh.DeviceMesh", "torch.serialization._get_layout",
    "torch.distributed._mesh_layout._MeshLayout", "torch.distributed._mesh_layout._FlatLayout",
    *(f"{package}{end}.{name}" for name, ends in _CLASSES.items() for end in ends
      for package in _PACKAGES),
))  # fmt: skip
"""What a pickle with DTensors may name beside tensors."""
_MOST_AXES = 16


class LocalPart(NamedTuple):
    """What a rank has of a tensor: the call that makes it, and where it lies in the whole."""

    call: UnbuiltObject
    shape: Shape  # of the whole, in elements
    start: Shape
    local_shape: Shape


def is_dtensor(kind: GlobalName) -> bool:
    """Tell whether a name is DTensor's, in any version of torch."""
    return kind in DTENSOR_NAMES and kind.endswith(".DTensor")


def local_part(state: Any) -> LocalPart:
    """Return what the state of a DTensor says. Raises FormatError, and others of nonsense."""
    _, members = state
    spec, local = members["_spec"], members["_local_tensor"]
    mesh, placements = spec.get("mesh"), spec.get("placements")
    shape = spec.get("tensor_meta").args[0]
    coordinates, layout = mesh.get("_coordinate_on_dim"), mesh.get("_layout")
    if layout is None:  # before torch 2.10 a mesh was a tensor of ranks
        sizes = tuple(mesh.get("mesh").args[2])
    else:
        axes = (axis.get("shape") for axis in layout.get("axes"))
        sizes = tuple(prod(axis) if type(axis) is tuple else axis for axis in axes)
    if coordinates is None:
        raise FormatError("lies on ranks of which this is none", "save it on all ranks")
    numbers = (*shape, *sizes, *coordinates)
    if not all(map(is_extent, numbers)) or not len(sizes) == len(coordinates) == len(placements):
        raise TypeError
    if len(sizes) > _MOST_AXES or any(not 0 <= c < n for c, n in zip(coordinates, sizes)):
        raise TypeError
    first, last = [0] * len(shape), [*shape]
    for axis, mesh_axes in _cuts(placements, sizes, len(shape)).items():
        for mesh_axis in mesh_axes:
            rows = -(-(last[axis] - first[axis]) // sizes[mesh_axis])
            first[axis] = min(first[axis] + rows * coordinates[mesh_axis], last[axis])
            last[axis] = min(first[axis] + rows, last[axis])
    local_shape = tuple(b - a for a, b in zip(first, last))
    return LocalPart(local, shape, tuple(first), local_shape)


def _cuts(
    placements: Sequence[UnbuiltObject], sizes: Sequence[int], axes: int
) -> dict[int, list[int]]:
    """Return by axis of a tensor the axes of the mesh that cut it, in their order.

    A strided shard is cut after those whose sizes make its split_factor, as where FSDP cuts what
    tensor parallelism has cut. Raises FormatError.
    """
    cuts: dict[int, list[int]] = {}
    for mesh_axis in reversed(range(len(placements))):
        placement = placements[mesh_axis]
        kind = placement.kind.rpartition(".")[2]
        if kind == "Replicate":
            continue
        if kind not in ("Shard", "_StridedShard"):
            raise FormatError(f"is stored as {kind}: a part of a sum", "save it redistributed")
        axis, factor = placement.get("dim"), placement.get("split_factor", 1)
        if type(axis) is not int or not 0 <= axis < axes or not is_extent(factor):
            raise TypeError
        order = cuts.setdefault(axis, [])
        places = [n for n in range(len(order) + 1) if prod(sizes[a] for a in order[:n]) == factor]
        if not places:
            raise FormatError(f"is cut in strides of {factor}, which no axes of its mesh make")
        order.insert(places[0], mesh_axis)
    return cuts
