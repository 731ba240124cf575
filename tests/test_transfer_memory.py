"""A transfer takes wire buffers and staging, as it says, and no more."""

from __future__ import annotations

import gc
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from dprims.synchronizer.group import CommGroup, join_store, leader_store
from dprims.synchronizer.guard import Guard
from dprims.synchronizer.lanes import CpuLane
from dprims.synchronizer.plan import Plan
from dprims.synchronizer.sinks import DictSink
from dprims.synchronizer.sources import DictSource
from dprims.synchronizer.transfer import receive, send
from dprims.testing.ranks import run_ranks

MIB = 1 << 20
BUCKET = 4 * MIB
SLACK = 24 * MIB
"""Thread stacks, sockets, the allocator's rounding."""


def test_extra_memory_is_what_was_announced() -> None:
    sender, receiver = run_ranks(2, measure, timeout=100.0)
    for rank in (sender, receiver):
        assert rank["extra"] <= rank["announced"] + SLACK, rank
    assert sender["staging"] == 0
    assert sender["buffers"] <= CpuLane.depth * BUCKET
    # one model of staging, and no buffers: bytes arrive where they stay
    assert receiver["model"] <= receiver["staging"] <= 1.02 * receiver["model"]
    assert receiver["buffers"] == 0
    for rank in (sender, receiver):
        assert rank["after ten more"] <= rank["announced"] + rank["model"] + SLACK, rank


def peak() -> int:
    return status("VmHWM")


def status(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field + ":"))


def measure(rank: int, world: int) -> dict[str, int]:
    store: Any = None
    where: list[Any] = [None, None]
    if rank == 0:
        store, *where[:] = leader_store("localhost")
    dist.broadcast_object_list(where)
    group = CommGroup.build(
        store or join_store(*where),
        "memory",
        rank,
        2,
        backend="gloo",
        device="cpu",
        timeout_s=30.0,
        op_timeout_s=60.0,
    )
    tensors = {f"w{i}": torch.full((MIB // 16,), float(i)) for i in range(512)}
    tensors["large"] = torch.ones(8 * MIB)
    plan = Plan.build(DictSource(tensors).metadata(), bucket_bytes=BUCKET)
    sink = DictSink(tensors)

    def go(version: int) -> Any:
        guard = Guard(deadline=time.monotonic() + 60.0)
        if rank == 0:
            return send(DictSource(tensors), group, plan, guard)
        sink.begin(version, plan.metas)
        stats = receive(sink, group, plan, guard)
        sink.commit(version)
        return stats

    # what torch, gloo and Python load at their first use is not the transfer's
    warm_up = {"w": torch.zeros(MIB)}
    warm_plan = Plan.build(DictSource(warm_up).metadata(), bucket_bytes=MIB)
    guard = Guard(deadline=time.monotonic() + 60.0)
    if rank == 0:
        send(DictSource(warm_up), group, warm_plan, guard)
    else:
        small = DictSink(warm_up)
        small.begin(0, warm_plan.metas)
        receive(small, group, warm_plan, guard)
    gc.collect()
    before = status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    stats = go(1)
    extra = peak() - before
    for version in range(2, 12):
        go(version)
    return {
        "extra": extra,
        "announced": stats.staging_bytes + stats.buffer_bytes,
        "staging": stats.staging_bytes,
        "buffers": stats.buffer_bytes,
        "model": plan.nbytes,
        "after ten more": peak() - before,
    }
