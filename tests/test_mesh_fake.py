"""Layouts against torch's own arithmetic: many with its fake backend, a few with real processes."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from math import prod
from typing import Any

import pytest
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from dprims import ParallelLayout
from dprims.testing.ranks import run_ranks

AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")


@contextmanager
def fake_job(rank: int, world_size: int) -> Iterator[None]:
    """Be one rank of a job that does not exist."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()
        gc.collect()


@st.composite
def layouts(draw: st.DrawFn, largest: int = 64) -> ParallelLayout:
    left, degrees = largest, {}
    for axis in draw(st.permutations(AXES)):
        degrees[axis] = draw(st.integers(1, min(left, 4)))
        left //= degrees[axis]
    options: dict[str, Any] = {"world_size": prod(degrees.values()), **degrees}
    order = draw(st.one_of(st.just(AXES), st.permutations(AXES)))
    if tuple(order) != AXES:
        return ParallelLayout(**options, order=tuple(order))
    etp = draw(st.sampled_from([1, degrees["tp"]]))
    borrowed = degrees["dp_shard"] * degrees["cp"] * (1 if etp == degrees["tp"] > 1 else degrees["tp"])
    ep = draw(st.sampled_from([size for size in range(1, borrowed + 1) if borrowed % size == 0]))
    return ParallelLayout(**options, ep=ep, etp=etp)


def torch_says(layout: ParallelLayout) -> dict[str, list[int]]:
    """Return this rank's groups as torch works them out, flattening its own mesh of the axes."""
    root = init_device_mesh("cpu", tuple(layout.sizes.values()), mesh_dim_names=layout.order)
    found: dict[str, list[int]] = {}
    for name in layout.names:
        if name in ("ep", "etp", "efsdp"):
            continue
        axes = layout.axes_of(name)
        mesh = root[axes] if len(axes) > 1 else root[axes[0]]
        found[name] = mesh._flatten(f"{name}_flat").mesh.flatten().tolist()
    if layout.ep > 1:
        shape = [
            *(layout.size(axis) for axis in ("pp", "dp_replicate")),
            *(layout.size(name) for name in ("efsdp", "ep", "etp")),
        ]
        names = ("pp", "dp_replicate", "efsdp", "ep", "etp")
        experts = init_device_mesh("cpu", tuple(shape), mesh_dim_names=names)
        found |= {name: experts[name].mesh.tolist() for name in ("ep", "etp", "efsdp")}
    return found


def check_agreement(layout: ParallelLayout, rank: int) -> None:
    expected = torch_says(layout)
    assert {name: list(layout.group_of(rank, name)) for name in layout.names} == expected
    meshes = layout.build("cpu")
    assert {name: meshes[name].mesh.tolist() for name in layout.names} == expected
    for name in layout.names:
        assert dist.get_process_group_ranks(meshes.group(name)) == expected[name]
    assert ParallelLayout.from_mesh(meshes.root, ep=layout.ep, etp=layout.etp) == layout
    meshes.close()


@pytest.mark.slow
@settings(deadline=None, max_examples=25)
@given(st.data(), layouts())
def test_torch_and_the_layout_agree(data: st.DataObject, layout: ParallelLayout) -> None:
    rank = data.draw(st.integers(0, layout.world_size - 1))
    with fake_job(rank, layout.world_size):
        check_agreement(layout, rank)


@pytest.mark.chaos
def test_every_subset_of_degrees_of_one_has_every_mesh() -> None:
    for sizes in product((1, 2), repeat=5):
        world_size = prod(sizes)
        layout = ParallelLayout(world_size=world_size, **dict(zip(AXES, sizes, strict=True)), ep=-1)
        with fake_job(world_size - 1, world_size):
            meshes = layout.build("cpu")
            for name in layout.names:
                assert meshes[name].mesh.tolist() == list(layout.group_of(world_size - 1, name))
            if layout.ep > 1:
                assert meshes["ep_tp"].mesh_dim_names == ("ep", "etp")


def agree_for_real(rank: int, world_size: int, layout: ParallelLayout) -> None:
    check_agreement(layout, rank)


@pytest.mark.parametrize(
    "layout",
    [
        ParallelLayout(world_size=16, pp=2, dp_shard=2, cp=2, tp=2, ep=4),
        ParallelLayout(
            world_size=12, pp=3, dp_replicate=2, tp=2, order=("tp", "dp_replicate", "cp", "dp_shard", "pp")
        ),
        ParallelLayout(world_size=8, dp_replicate=2, dp_shard=2, tp=2, ep=2, etp=2),
    ],
    ids=repr,
)
def test_torch_and_the_layout_agree_in_real_processes(layout: ParallelLayout) -> None:
    run_ranks(layout.world_size, agree_for_real, layout, timeout=90)
