"""Process groups of a layout: agreed between the ranks first, then one for each distinct set of ranks."""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from .exceptions import RankMismatch

if TYPE_CHECKING:
    from datetime import timedelta

    from .layout import ParallelLayout

    Ranks = tuple[int, ...]
    Groups = dict[Ranks, dist.ProcessGroup]

_log = logging.getLogger("dprims.mesh")


def backends() -> dict[str, str]:
    """Return the backend of the default group for each device type."""
    return dict(part.split(":", 1) for part in str(dist.get_backend_config()).split(","))


def select_device(device_type: str) -> None:
    """Choose the launcher's device, as init_device_mesh does, unless the process uses one already."""
    module: Any = getattr(torch, device_type, None)
    chosen = os.environ.get("LOCAL_RANK")
    if chosen is None or device_type == "cpu" or not hasattr(module, "set_device"):
        return
    if module.is_available() and not module.is_initialized():
        module.set_device(int(chosen))


def lacks(device_type: str) -> str:
    """Return what keeps this process from using devices of a type that torch has, or nothing."""
    available = getattr(getattr(torch, device_type, None), "is_available", None)
    return f"torch.{device_type}.is_available() is False" if available and not available() else ""


def agree(mine: dict[str, Any], lacking: str) -> dict[int, str]:
    """Raise the same RankMismatch on all ranks unless all were given the same. Collective.

    Returns what each rank said that it is lacking, for those that said anything.
    """
    told = _from_all((mine, lacking))
    first = told[0][0]
    odd = [rank for rank, (given, _) in enumerate(told) if given != first]
    if odd:
        other = told[odd[0]][0]
        differing = [key for key in {**first, **other} if first.get(key) != other.get(key)]
        theirs, ours = (
            ", ".join(f"{key}={given.get(key)!r}" for key in differing) for given in (other, first)
        )
        raise RankMismatch(
            f"the ranks build different meshes: rank {odd[0]}: {theirs}; rank 0: {ours} "
            f"({len(odd)} of {len(told)} ranks differ from rank 0)"
        )
    return {rank: lacked for rank, (_, lacked) in enumerate(told) if lacked}


def _from_all(mine: Any) -> list[Any]:
    """Return what every rank passed. Collective over the default group."""
    told: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(told, mine)
    return told


def names_by_ranks(layout: ParallelLayout) -> dict[Ranks, list[str]]:
    """Return every distinct set of ranks with the names it goes by, each rank alone first, all ranks last."""
    names: dict[Ranks, list[str]] = {(rank,): [] for rank in range(layout.world_size)}
    for name in layout.names:
        for ranks in layout.groups(name):
            names.setdefault(ranks, []).append(name)
    return dict(sorted(names.items(), key=lambda item: (len(item[0]), item[0])))


def make_groups(
    names: dict[Ranks, list[str]], backend: str | None, timeout: timedelta | None
) -> tuple[Groups, list[dist.ProcessGroup]]:
    """Make one group for each set of ranks; return those of this rank, and the ones to destroy later.

    Only plain new_group calls, the same on every rank: use_local_synchronization waits forever on torch
    before 2.14 once ranks have made unequal numbers of groups.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    groups: Groups = {}
    made: list[dist.ProcessGroup] = []
    for number, (ranks, called) in enumerate(names.items()):
        default = dist.group.WORLD
        if len(ranks) == world and backend is None and default is not None:
            groups[ranks] = default
            continue
        if number == world:
            _level_group_numbers(groups[(rank,)])
        group = dist.new_group(list(ranks), timeout=timeout, backend=backend, group_desc=",".join(called))
        if rank in ranks:  # for all others torch returns a number that collectives take without a word
            groups[ranks] = group
            made.append(group)
    return groups, made


def _level_group_numbers(alone: dist.ProcessGroup) -> None:
    """Make the next group the same number for torch on every rank. Collective.

    torch names a group by how many this process made before. Once some ranks have made one among
    themselves by plain new_group, each later group goes by two names, and its ranks wait for each other
    forever. `alone`, the last group that waited for nobody, shows where this rank is; a call for a group of
    others only counts, so the ranks behind make such calls.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    name = alone.group_name
    if not name.isdigit():
        return  # named after its ranks
    mine = int(name) - rank
    numbers = _from_all(mine)
    most = max(numbers)
    if min(numbers) == most:
        return
    behind = [other for other, number in enumerate(numbers) if number < most]
    said = (
        f"{len(behind)} of {world} ranks, rank {behind[0]} first, had made fewer process groups than others"
    )
    if getattr(dist.group.WORLD, "bound_device_id", None) is not None:
        raise RankMismatch(f"{said}: with eager communicators every rank has to take part in each")
    for _ in range(most - mine):
        dist.new_group([(rank + 1) % world])
    _log.warning("%s; they are level now", said)
