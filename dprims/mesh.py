"""Process groups and device meshes of a layout, inside a running job.

torch can make them from the same degrees with ``init_device_mesh`` and a flatten for each composed name.
`build` differs in four ways. It makes one group for each distinct set of ranks, so that ``fsdp`` and
``dp_shard`` are one communicator when ``cp`` is 1. It compares what every rank was given before it makes
anything, and what torch made with the layout afterwards. It hands out each mesh as one object, and never a
``None``, which torch would take for the whole world. And it knows when the job's process group was replaced
under it.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from .exceptions import MeshError, MissingExtra, RankMismatch, StaleMesh

try:
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh
except ModuleNotFoundError as error:
    raise MissingExtra("torch is not installed; pip install 'dprims[torch]'") from error

from ._mesh_broadcast import Route, broadcast
from ._mesh_groups import agree, backends, lacks, make_groups, names_by_ranks, select_device

__all__ = ["Meshes", "build"]

if TYPE_CHECKING:
    from types import TracebackType

    from ._mesh_groups import Groups
    from .layout import ParallelLayout

_log = logging.getLogger("dprims.mesh")


def build(
    layout: ParallelLayout, device_type: str, *, cpu_twins: bool = False, timeout: float | None = None
) -> Meshes:
    """Make the process groups and meshes of a layout. Collective: every rank of the job calls it.

    `device_type` is ``"cpu"``, ``"cuda"`` or another that the default process group has a backend for.
    With `cpu_twins` each group has a second one for CPU tensors (gloo), unless it carries those itself.
    `timeout`, in seconds, is that of the new groups; torch's default without it.

    The ranks first compare over the default group what each was given. They all raise the same
    RankMismatch, and make nothing, when layouts differ or the job has another number of ranks, and the same
    MeshError when a rank has no device of that type. Needs an initialised default group, and (for an
    accelerator) a device chosen by ``set_device`` or by the launcher's ``LOCAL_RANK``. Groups are made by
    plain ``new_group`` calls, in one order on all ranks; the group of all ranks is the job's default group.
    May be called again: each call makes groups of its own.
    """
    if not dist.is_initialized():
        raise MeshError(
            "no default process group: call torch.distributed.init_process_group on every rank first"
        )
    select_device(device_type)
    lacking = agree(
        {
            **json.loads(layout.to_json()),
            "device_type": device_type,
            "cpu_twins": cpu_twins,
            "timeout": timeout,
        },
        lacks(device_type),
    )
    if layout.world_size != dist.get_world_size():
        raise RankMismatch(
            f"{layout!r} in a job of {dist.get_world_size()} ranks: the world sizes have to agree"
        )
    carried = backends()
    if device_type not in carried:
        raise MeshError(
            f"device_type={device_type!r}: the default process group has backends for {', '.join(carried)}; "
            f"a type is named without an index"
        )
    if lacking:
        rank, what = next(iter(lacking.items()))
        raise MeshError(
            f"device_type={device_type!r}: {what} on rank {rank} ({len(lacking)} of {dist.get_world_size()} "
            f"ranks); expected a device of this type on every rank"
        )

    limit = None if timeout is None else timedelta(seconds=timeout)
    names = names_by_ranks(layout)
    groups, made = make_groups(names, None, limit)
    twins = groups
    if cpu_twins and "cpu" not in carried:
        twins, more = make_groups(names, "gloo", limit)
        made += more
    meshes = Meshes(layout, device_type, groups, twins if cpu_twins or "cpu" in carried else {}, made)
    _log.info("built %d groups on rank %d for %r", len(made), dist.get_rank(), layout)
    return meshes


class Meshes:
    """The groups and meshes of one layout, as this rank sees them. Made by `ParallelLayout.build`.

    ``meshes["fsdp"]`` is the one-dimensional ``DeviceMesh`` of a group name, ``meshes["dp_replicate",
    "fsdp"]`` a mesh of several, and ``meshes.root`` that of the five axes; each is always the same object.
    They are plain meshes for ``fully_shard``, ``parallelize_module`` and DTensor, and combine with each
    other as children of `root`, but for names whose ranks are no axis of any grid of the world, such as
    ``pp_cp_tp`` while there is data parallelism: those stand alone.

    Asking is local, `broadcast_from_head` and `warm_up` are collective over groups, `close` over the job.
    Every use raises StaleMesh after `close`, and after the job's default group was destroyed or replaced.
    """

    def __init__(
        self,
        layout: ParallelLayout,
        device_type: str,
        groups: Groups,
        twins: Groups,
        made: list[dist.ProcessGroup],
    ) -> None:
        self.layout = layout
        self.device_type = device_type
        self._rank = dist.get_rank()
        self._world = dist.group.WORLD
        self._groups, self._twins, self._made = groups, twins, made
        self._closed = False
        self._cache: dict[tuple[str, ...], DeviceMesh] = {}
        root = self._grid(layout.order)
        self._views = {layout.order: root}
        for dims in _view_dims(layout):
            self._views[dims] = _as_child(self._grid(dims), root)
        self._verify()

    # -- meshes and groups -----------------------------------------------------------------------------

    @property
    def root(self) -> DeviceMesh:
        """The mesh of the five axes, in the layout's order; those of size 1 are dimensions too."""
        self._check()
        return self._views[self.layout.order]

    def __getitem__(self, names: str | Sequence[str]) -> DeviceMesh:
        """Return the mesh of a group name, of several as dimensions, or of the grid ``ep_tp`` (ep by etp).

        LayoutError for a name that does not exist, MeshError for names that no grid of the world has side
        by side in this order.
        """
        self._check()
        if names == "ep_tp":
            self.layout.grids(names)
            names = ("ep", "etp")
        dims = tuple(self.layout.canonical(name) for name in ([names] if isinstance(names, str) else names))
        if dims not in self._cache:
            self._cache[dims] = self._slice(dims)
        return self._cache[dims]

    def group(self, name: str) -> dist.ProcessGroup:
        """Return this rank's process group of a name. Names with the same ranks share one group."""
        self._check()
        return self._groups[self.layout.group_of(self._rank, name)]

    def cpu_group(self, name: str) -> dist.ProcessGroup:
        """Return the group of the same ranks that carries CPU tensors: the group itself, or its twin.

        MeshError when it is neither: build with ``cpu_twins=True``.
        """
        self._check()
        ranks = self.layout.group_of(self._rank, name)
        if ranks not in self._twins:
            raise MeshError(f"group {name!r} carries no CPU tensors: build the meshes with cpu_twins=True")
        return self._twins[ranks]

    def is_head(self, name: str = "pp_cp_tp") -> bool:
        """Return whether this rank is the first of its group of a name."""
        self._check()
        return self.layout.head_of(self._rank, name) == self._rank

    # -- collectives -----------------------------------------------------------------------------------

    def broadcast_from_head(self, obj: Any, name: str = "pp_cp_tp") -> Any:
        """Return the object that the head of this rank's group passed. Collective over the group.

        Any picklable object, with plain dense tensors at any depth; what other ranks pass is ignored. The
        default name spans all pipeline, context and tensor ranks of one data-parallel rank, so that each
        works on the same batch. Tensors arrive on the device type that they had, as new tensors that
        require no gradient; the head gets its own object back. All ranks raise MeshError when the head's
        object cannot be sent. Bounded by the group's own timeout. Unpickles what the head sent.
        """
        self._check()
        ranks = self.layout.group_of(self._rank, name)
        group = self._groups[ranks]
        wires = {self.device_type: group}
        if ranks in self._twins:
            wires["cpu"] = self._twins[ranks]
        return broadcast(
            obj,
            Route(
                name=self.layout.canonical(name),
                ranks=ranks,
                is_head=ranks[0] == self._rank,
                device=self._device(),
                control=wires.get("cpu", group),
                wires=wires,
            ),
        )

    def warm_up(self) -> None:
        """Run one small collective in every group. Collective over the job.

        Makes the communicators now, in one order on all ranks, instead of in the middle of the first step;
        opt-in, since a network that cannot connect hangs here until the groups' timeout.
        """
        self._check()
        groups = [(ranks, group, self._device()) for ranks, group in self._groups.items()]
        groups += [
            (ranks, twin, torch.device("cpu"))
            for ranks, twin in self._twins.items()
            if twin is not self._groups[ranks]
        ]
        for ranks, group, device in groups:
            if len(ranks) > 1:
                dist.all_reduce(torch.ones(1, device=device), group=group)

    def close(self) -> None:
        """Destroy the groups that `build` made, never the job's default group. Collective over the job.

        May be called twice, and again after an error: groups that were destroyed are not destroyed again.
        Does nothing to them when the default group is gone, as torch took them with it.
        """
        self._closed = True
        if dist.group.WORLD is not self._world:
            self._made.clear()
        while self._made:
            dist.destroy_process_group(self._made[-1])
            self._made.pop()
        # A group's connections and threads end with the last reference to it.
        for kept in (self._groups, self._twins, self._cache, self._views):
            kept.clear()

    def __enter__(self) -> Meshes:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # -- inside ----------------------------------------------------------------------------------------

    def _check(self) -> None:
        if self._closed:
            raise StaleMesh(f"the meshes of {self.layout!r} were closed")
        if dist.group.WORLD is not self._world:
            what = "replaced" if dist.is_initialized() else "destroyed"
            raise StaleMesh(
                f"the default process group that {self.layout!r} was built on was {what}: build again"
            )

    def _device(self) -> torch.device:
        if self.device_type == "cpu":
            return torch.device("cpu")
        return torch.device(self.device_type, torch.get_device_module(self.device_type).current_device())

    def _grid(self, dims: Sequence[str]) -> DeviceMesh:
        """Return the world as a grid of these names, which are row-major in it."""
        ranks = torch.arange(self.layout.world_size, dtype=torch.int)
        shape = [self.layout.size(name) for name in dims]
        return self._mesh(dims, ranks.view(shape))

    def _mesh(self, dims: Sequence[str], ranks: torch.Tensor) -> DeviceMesh:
        groups = [self._groups[self.layout.group_of(self._rank, name)] for name in dims]
        return DeviceMesh.from_group(groups, self.device_type, mesh=ranks, mesh_dim_names=tuple(dims))

    def _slice(self, dims: tuple[str, ...]) -> DeviceMesh:
        for names, view in self._views.items():
            if [name for name in names if name in dims] == list(dims):
                return view[dims]
        if len(dims) == 1:
            return self._mesh(dims, torch.tensor(self.layout.group_of(self._rank, dims[0]), dtype=torch.int))
        if dims == ("ep", "etp"):
            (grid,) = (grid for grid in self.layout.grids("ep_tp") if any(self._rank in row for row in grid))
            return self._mesh(dims, torch.tensor(grid, dtype=torch.int))
        grids = "; ".join(", ".join(names) for names in self._views)
        raise MeshError(
            f"no grid of the world has the dimensions {', '.join(dims)} in this order; it has {grids}"
        )

    def _verify(self) -> None:
        """Compare every group and mesh with the layout, since torch takes most mistakes without a word."""
        for name in self.layout.names:
            expected = self.layout.group_of(self._rank, name)
            group = self._groups[expected]
            found = {
                "group": tuple(dist.get_process_group_ranks(group)),
                "mesh": tuple(self[name].mesh.tolist()),
                "the mesh's group": tuple(dist.get_process_group_ranks(self[name].get_group())),
            }
            for what, ranks in found.items():
                if ranks != expected:
                    raise RankMismatch(
                        f"{what} {name!r} on rank {self._rank} has {ranks}, expected {expected}"
                    )


def _view_dims(layout: ParallelLayout) -> list[tuple[str, ...]]:
    """Return, beside the axes, the ways to see the world as a grid that has a composed name as an axis."""
    candidates = [
        _replaced(layout, layout.axes_of(name), (name,)) for name in layout.names if name not in layout.order
    ]
    if layout.ep > 1:
        experts = _replaced(layout, layout.axes_of("ep"), ("efsdp", "ep"))
        tensor = tuple("etp" if axis == "tp" else axis for axis in experts)
        candidates.append(tensor if "tp" in experts else (*experts, "etp"))
    return [
        dims for dims in dict.fromkeys(candidates) if dims != layout.order and _is_row_major(layout, dims)
    ]


def _replaced(layout: ParallelLayout, axes: Sequence[str], names: tuple[str, ...]) -> tuple[str, ...]:
    """Return the axes with some of them replaced, at the place of the last that is larger than 1."""
    large = [axis for axis in axes if layout.size(axis) > 1] or list(axes)
    dims: list[str] = []
    for axis in layout.order:
        if axis not in axes:
            dims.append(axis)
        if axis in large[-1:]:
            dims += names
    return tuple(dims)


def _is_row_major(layout: ParallelLayout, dims: Sequence[str]) -> bool:
    """Return whether counting through these dimensions, the last fastest, counts the ranks."""
    stride = 1
    for name in reversed(dims):
        size = layout.size(name)
        if layout.group_of(0, name) != tuple(range(0, size * stride, stride)):
            return False
        stride *= size
    return stride == layout.world_size


def _as_child(view: DeviceMesh, root: DeviceMesh) -> DeviceMesh:
    """Make `view`, another grid of the same ranks in the same order, a child of `root`.

    The one place that touches a private attribute of torch. FSDP combines its mesh with a tensor parallel
    one only when both have the same root. torch's own way to a child with a composed name, ``_flatten``,
    is private too, and makes a second group for ranks that have one already.
    """
    view._root_mesh = root
    return view
