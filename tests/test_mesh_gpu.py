"""Meshes over NCCL; on a machine with GPUs: pytest -m gpu."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from dprims import MeshError, ParallelLayout
from dprims.testing.ranks import run_ranks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or not dist.is_nccl_available(), reason="needs CUDA and NCCL"
    ),
]


def over_nccl(rank: int, world_size: int, port: int, backend: str, eager: bool) -> dict[str, Any]:
    """Replace the gloo job by one over NCCL, and use every kind of group in it."""
    dist.destroy_process_group()
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    options = {"device_id": device} if eager else {}
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, **options)

    layout = ParallelLayout(world_size=world_size, tp=world_size)
    bare = layout.build("cuda")
    if "gloo" in backend:
        assert bare.cpu_group("tp") is bare.group("tp")
    else:
        with pytest.raises(MeshError, match="cpu_twins=True"):
            bare.cpu_group("tp")
    bare.close()

    with layout.build("cuda", cpu_twins=True) as meshes:
        meshes.warm_up()
        for name in layout.names:
            for group, where in ((meshes.group(name), device), (meshes.cpu_group(name), torch.device("cpu"))):
                total = torch.tensor([float(rank)], device=where)
                dist.all_reduce(total, group=group)
                assert total.item() == sum(layout.group_of(rank, name)), (name, where)
        batch = {"gpu": torch.arange(5, device=device), "cpu": torch.ones(600_000), "text": "x"}
        got = meshes.broadcast_from_head(batch if meshes.is_head("tp") else None, "tp")
        return {
            "devices": (got["gpu"].device == device, got["cpu"].device.type),
            "sums": (got["gpu"].sum().item(), got["cpu"].sum().item()),
        }


@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize("backend", ["nccl", "cuda:nccl", "cpu:gloo,cuda:nccl"])
def test_every_group_over_nccl(backend: str, eager: bool) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ranks = min(2, torch.cuda.device_count())
    for result in run_ranks(ranks, over_nccl, store.port, backend, eager, timeout=100):
        assert result == {"devices": (True, "cpu"), "sums": (10, 600_000.0)}
