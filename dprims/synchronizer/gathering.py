"""Whole tensors out of sharded ones, many at a time.

`DTensor.full_tensor` is one collective and some hundred microseconds of Python a tensor, which thousands of
small tensors wait for longer than for the wire. Here the shards of many lie side by side in one buffer, and
one all-gather brings all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import prod
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from .packing import pack

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["gather", "is_sharded"]

ALIGN = 16
"""Bytes at whose multiples shards lie, so that any dtype can be seen there."""


_PLAIN = frozenset((Tensor, torch.nn.Parameter))


def is_sharded(tensor: Tensor) -> bool:
    """Whether a tensor is a DTensor."""
    # an attribute that is not there takes long to look for
    return type(tensor) not in _PLAIN and hasattr(tensor, "full_tensor")


def gather(tensors: Sequence[Tensor], device: torch.device | None = None) -> list[Tensor]:
    """The whole tensors, in the same order; those that are not sharded are returned as they are.

    Collective of all ranks that hold a shard, which call it with the same tensors in the same order. DTensors
    that are split along one mesh dimension, and are the same along the others, travel together: one
    collective for each such dimension. All others take one each, and more.

    Args:
        tensors: DTensors, and tensors that every rank has whole.
        device: shards that are elsewhere (offloaded ones) are brought there first.
    """
    whole: list[Tensor | None] = [None if is_sharded(tensor) else tensor for tensor in tensors]
    together: dict[tuple[DeviceMesh, int], list[_Shard]] = {}
    for place, tensor in enumerate(tensors):
        if whole[place] is not None:
            continue
        shard = _as_shard(place, tensor, device)
        if shard is None:
            whole[place] = cast(Any, tensor).full_tensor()
        else:
            together.setdefault((cast(Any, tensor).device_mesh, shard.mesh_dim), []).append(shard)
    for (mesh, mesh_dim), shards in together.items():
        for shard, tensor in zip(shards, _gather_alike(shards, mesh, mesh_dim), strict=True):
            whole[shard.place] = tensor
    return cast("list[Tensor]", whole)


@dataclass(slots=True)
class _Shard:
    """What one rank holds of a tensor that is cut along `dim`, by the ranks along one mesh dimension."""

    place: int
    shape: torch.Size
    local: Tensor
    dim: int
    mesh_dim: int

    def extent(self, rank: int, ranks: int) -> int:
        """How much of `dim` a rank holds: equal parts, rounded up, as long as there is something left."""
        part = -(-self.shape[self.dim] // ranks)
        return max(0, min(part, self.shape[self.dim] - rank * part))

    def nbytes(self, ranks: int) -> int:
        """Bytes of the largest part, rounded up."""
        rest = prod(self.shape[: self.dim]) * prod(self.shape[self.dim + 1 :])
        nbytes = self.extent(0, ranks) * rest * self.local.element_size()
        return -(-nbytes // ALIGN) * ALIGN

    def join(self, rows: Tensor) -> Tensor:
        """The whole tensor out of one row of bytes a rank."""
        ranks = rows.shape[0]
        extents = [self.extent(rank, ranks) for rank in range(ranks)]
        shapes = [(*self.shape[: self.dim], extent, *self.shape[self.dim + 1 :]) for extent in extents]
        size = self.local.element_size()
        if len(set(extents)) == 1:
            alike = rows[:, : prod(shapes[0]) * size].view(self.local.dtype).view(ranks, *shapes[0])
            return alike.movedim(0, self.dim).reshape(self.shape).contiguous()
        parts = [
            row[: prod(shape) * size].view(self.local.dtype).view(shape)
            for row, shape in zip(rows, shapes, strict=True)
        ]
        return torch.cat(parts, self.dim)


def _as_shard(place: int, tensor: Any, device: torch.device | None) -> _Shard | None:
    """A tensor as one that can travel with others; None when its placements are of another kind."""
    from torch.distributed.tensor import Replicate, Shard

    cuts = [
        (mesh_dim, placement)
        for mesh_dim, placement in enumerate(tensor.placements)
        if type(placement) is not Replicate
    ]
    if len(cuts) != 1 or type(cuts[0][1]) is not Shard:
        return None
    mesh_dim, placement = cuts[0]
    local = tensor.to_local()
    if device is not None and local.device != device:
        local = local.to(device, non_blocking=device.type == "cuda")
    return _Shard(place, tensor.shape, local, placement.dim, mesh_dim)


def _gather_alike(shards: Sequence[_Shard], mesh: DeviceMesh, mesh_dim: int) -> list[Tensor]:
    """The whole tensors of shards that are cut among the same ranks: one all-gather."""
    import torch.distributed as dist

    ranks = mesh.size(mesh_dim)
    if ranks == 1:
        return [shard.local.view(shard.shape) for shard in shards]
    sizes = [shard.nbytes(ranks) for shard in shards]
    mine = torch.empty(sum(sizes), dtype=torch.uint8, device=shards[0].local.device)
    pack(mine, [shard.local for shard in shards], list(accumulate(sizes[:-1], initial=0)))
    rows = torch.empty(ranks, mine.numel(), dtype=torch.uint8, device=mine.device)
    # newer torch has it under another name, and warns of this one
    all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
    all_gather(rows.view(-1), mine, group=mesh.get_group(mesh_dim))
    return [shard.join(part) for shard, part in zip(shards, torch.split(rows, sizes, dim=1), strict=True)]
