"""A tiny model trained over the meshes gives the losses that it gives in one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from dprims import Meshes, ParallelLayout
from dprims.testing.ranks import run_ranks

BATCH, WIDTH, STEPS, MICROBATCHES = 16, 8, 4, 2


def model_of(stages: int) -> nn.Sequential:
    """Return the same model every time: a stack of blocks, one a stage."""
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Sequential(nn.Linear(WIDTH, 16), nn.Tanh(), nn.Linear(16, WIDTH)) for _ in range(stages))
    )


def batch_at(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    inputs = torch.randn(BATCH, WIDTH, generator=generator)
    return inputs, inputs.roll(1, dims=1) * 0.5


def losses_in_one_process(stages: int) -> list[float]:
    model = model_of(stages)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    losses = []
    for step in range(STEPS):
        inputs, targets = batch_at(step)
        loss = nn.functional.mse_loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def train(rank: int, world_size: int, options: dict[str, Any], shard_over: list[str]) -> list[float]:
    layout = ParallelLayout(world_size=world_size, **options)
    with layout.build("cpu") as meshes:
        stage = layout.coordinates(rank)["pp"]
        block = model_of(layout.pp)[stage]
        parallelize_module(block, meshes["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
        fully_shard(block, mesh=meshes[shard_over] if len(shard_over) > 1 else meshes[shard_over[0]])
        weight = block.get_parameter("0.weight")
        assert isinstance(weight, DTensor)
        assert weight.to_local().numel() == 16 * WIDTH // (layout.tp * layout.size(shard_over[-1]))
        optimizer = torch.optim.SGD(block.parameters(), lr=0.5)
        return [train_one(block, optimizer, step, rank, layout, meshes) for step in range(STEPS)]


def train_one(
    block: nn.Module,
    optimizer: torch.optim.Optimizer,
    step: int,
    rank: int,
    layout: ParallelLayout,
    meshes: Meshes,
) -> float:
    """Do one step, each data-parallel (and context-parallel) rank on its part of the batch."""
    batch = batch_at(step) if meshes.is_head("pp_cp_tp") else None
    part = layout.index_in(rank, "dp_cp")
    inputs, targets = (
        tensor.chunk(layout.size("dp_cp"))[part] for tensor in meshes.broadcast_from_head(batch, "pp_cp_tp")
    )
    loss = torch.zeros(())
    if layout.pp == 1:
        loss = nn.functional.mse_loss(block(inputs), targets)
        loss.backward()
    else:
        stage = PipelineStage(
            block, layout.coordinates(rank)["pp"], layout.pp, torch.device("cpu"), group=meshes.group("pp")
        )
        schedule = ScheduleGPipe(stage, MICROBATCHES, loss_fn=nn.functional.mse_loss)
        losses: list[torch.Tensor] = []
        if rank in layout.first_stage_ranks():
            schedule.step(inputs)
        else:
            schedule.step(target=targets, losses=losses)
            loss = torch.stack(losses).mean()
    optimizer.step()
    optimizer.zero_grad()
    mean = loss.detach().clone()
    dist.all_reduce(mean, group=meshes.group("dp_cp"))
    mean /= layout.size("dp_cp")
    last = layout.rank_at(**{**layout.coordinates(rank), "pp": layout.pp - 1})
    dist.broadcast(mean, src=last, group=meshes.group("pp"))
    return mean.item()


def shard_experts(rank: int, world_size: int, etp: int) -> None:
    """Split experts over ep, each of them over etp, and shard the rest with FSDP."""
    layout = ParallelLayout(world_size=world_size, dp_shard=4, tp=2, ep=2, etp=etp)
    with layout.build("cpu") as meshes:
        whole = torch.arange(16.0 * WIDTH * WIDTH).view(16, WIDTH, WIDTH)
        experts = nn.Module()
        experts.weight = nn.Parameter(distribute_tensor(whole, meshes["ep_tp"], [Shard(0), Shard(1)]))
        fully_shard(experts, mesh=meshes["efsdp"])
        assert isinstance(experts.weight, DTensor)
        assert experts.weight.to_local().numel() * world_size == whole.numel()
        assert torch.equal(experts.weight.full_tensor(), whole)


@pytest.mark.parametrize("etp", [1, 2])
def test_experts_combine_with_fsdp(etp: int) -> None:
    run_ranks(8, shard_experts, etp, timeout=100)


@pytest.mark.parametrize(
    ("options", "shard_over"),
    [
        ({"pp": 2, "dp_shard": 2, "tp": 2}, ["fsdp"]),
        ({"dp_shard": 2, "cp": 2, "tp": 2}, ["fsdp"]),
        ({"dp_replicate": 2, "dp_shard": 2, "tp": 2}, ["dp_replicate", "fsdp"]),
    ],
    ids=["fsdp x tp x pp", "fsdp over context ranks x tp", "hybrid fsdp x tp"],
)
def test_losses_are_those_of_one_process(options: dict[str, Any], shard_over: list[str]) -> None:
    expected = losses_in_one_process(options.get("pp", 1))
    assert expected[-1] < expected[0]
    for losses in run_ranks(8, train, options, shard_over, timeout=100):
        assert losses == pytest.approx(expected, rel=1e-4)
