"""Many sharded tensors, gathered together and one by one: a ratio within one run.

    pytest -s tests/benchmarks/gathering.py

Two ranks over gloo hold halves of 1,000 tensors of 16 KB; batches of 100, as buckets of a plan would be.
"""

from __future__ import annotations

import statistics
import time

import pytest
import torch
from torch import Tensor

from dprims.synchronizer.gathering import gather
from dprims.testing.ranks import run_ranks

pytestmark = pytest.mark.timeout(300)

COUNT, BATCH, ROUNDS = 1000, 100, 5


def test_together_is_faster_than_one_by_one() -> None:
    together, alone = run_ranks(2, both, timeout=240.0)[0]
    print(
        f"\n1,000 tensors of 16 KB: together {together * 1e3:.0f} ms, one by one {alone * 1e3:.0f} ms, ",
        end="",
    )
    print(f"{alone / together:.1f} times; {together / COUNT * 1e6:.0f} us a tensor")
    assert alone >= 2 * together


def both(rank: int, world: int) -> tuple[float, float]:
    """Median seconds of a round: in batches, and by torch's own way."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (world,))
    whole = torch.arange(4096, dtype=torch.float32).view(64, 64)
    sharded = [distribute_tensor(whole, mesh, [Shard(0)], src_data_rank=None) for _ in range(COUNT)]

    def batches() -> list[Tensor]:
        return [t for start in range(0, COUNT, BATCH) for t in gather(sharded[start : start + BATCH])]

    def singles() -> list[Tensor]:
        return [tensor.full_tensor() for tensor in sharded]

    seconds: dict[str, list[float]] = {"batches": [], "singles": []}
    for _ in range(ROUNDS):
        for way in (batches, singles):
            began = time.monotonic()
            found = way()
            seconds[way.__name__].append(time.monotonic() - began)
            if not all(torch.equal(tensor, whole) for tensor in found):
                raise RuntimeError(f"{way.__name__} gave something else")
    return statistics.median(seconds["batches"]), statistics.median(seconds["singles"])
