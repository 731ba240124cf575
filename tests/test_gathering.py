"""Whole tensors out of sharded ones, in real gloo jobs, against torch's own way."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dprims.synchronizer.gathering import gather
from dprims.testing.ranks import run_ranks

LIMIT_S = 90.0


def test_every_way_to_cut_a_tensor_gives_it_back_whole() -> None:
    for counts in run_ranks(4, cuts, timeout=LIMIT_S):
        # one for all that is cut along a dimension of a mesh, one for each that is cut along two
        assert counts == {"flat": 1, "hybrid": 2, "both": 2, "one rank": 0}


def cuts(rank: int, world: int) -> dict[str, int]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor
    from torch.distributed.tensor.debug import CommDebugMode

    flat = init_device_mesh("cpu", (4,))
    square = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    alone = init_device_mesh("cpu", (4, 1), mesh_dim_names=("other", "one"))
    generator = torch.Generator().manual_seed(7)

    def tensor(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randint(0, 100, shape, generator=generator).to(dtype)

    batches: dict[str, list[tuple[Tensor, Any, list[Any]]]] = {
        "flat": [
            (tensor(8, 4), flat, [Shard(0)]),
            (tensor(8, 4, dtype=torch.bfloat16), flat, [Shard(1)]),
            (tensor(3), flat, [Shard(0)]),  # nothing on the last rank
            (tensor(5, 6, 7, dtype=torch.float64), flat, [Shard(1)]),  # unequal parts, in the middle
            (tensor(1, 5, dtype=torch.uint8), flat, [Shard(0)]),  # all on the first rank
            (tensor(2, 8, dtype=torch.float8_e4m3fn), flat, [Shard(1)]),
            (tensor(4, 4), flat, [Replicate()]),
        ],
        "hybrid": [
            (tensor(6, 2), square, [Replicate(), Shard(0)]),
            (tensor(2, 6), square, [Replicate(), Shard(1)]),
            (tensor(6, 6), square, [Shard(0), Replicate()]),
        ],
        "both": [(tensor(4, 6), square, [Shard(0), Shard(1)])],
        "one rank": [(tensor(4, 6), alone, [Replicate(), Shard(1)])],
    }
    counts = {}
    for name, cases in batches.items():
        sharded = [
            distribute_tensor(whole, mesh, placements, src_data_rank=None)
            for whole, mesh, placements in cases
        ]
        with CommDebugMode() as comm:
            found = gather([*sharded, torch.arange(3)])
        counts[name] = comm.get_total_counts()
        assert torch.equal(found.pop(), torch.arange(3))
        for (whole, _, placements), got in zip(cases, found, strict=True):
            assert got.dtype == whole.dtype
            assert torch.equal(got.view(torch.uint8), whole.view(torch.uint8)), (name, placements)
    return counts


def test_what_fsdp_has_sharded_is_whole_again() -> None:
    first, second = run_ranks(2, fsdp, timeout=LIMIT_S)
    assert first == second
    assert all(first.values())


def fsdp(rank: int, world: int) -> dict[str, bool]:
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(5, 7), nn.LayerNorm(7), nn.Linear(7, 3, bias=False))
    whole = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    fully_shard(model)
    sharded = model.state_dict()
    found = dict(zip(sharded, gather(list(sharded.values())), strict=True))
    return {name: torch.equal(found[name], tensor) for name, tensor in whole.items()}


@pytest.mark.parametrize("names", [["a", "c"], ["a"], ["a", "b", "d"], ["b", "a"]])
def test_batches_of_other_names_are_refused(names: list[str]) -> None:
    from dprims.exceptions import RefitError
    from dprims.synchronizer.sources import ModuleSource

    module = nn.ParameterDict({"a": torch.zeros(1), "b": torch.zeros(1)})
    with pytest.raises(RefitError, match="plan again"):
        ModuleSource(module).in_batches([names])
