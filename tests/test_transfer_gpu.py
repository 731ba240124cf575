"""Transfers over NCCL: what arrives, and what a hit rank does to the others. One GPU is enough."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dprims.exceptions import PeerLost, RefitAborted, RefitTimeout, TransferCorrupt
from dprims.synchronizer.packing import flat, pack
from dprims.synchronizer.plan import Plan
from dprims.synchronizer.sources import DictSource
from dprims.testing.faults import InjectedFault
from dprims.testing.transfer_rank import Outcome, TransferFleet, TransferRank, checksum, mixed_model

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

LIMIT_S = 120.0
PLAN = Plan.build(DictSource(mixed_model(0)).metadata(), bucket_bytes=64 << 10)
MIDDLE = len(PLAN.buckets) // 2
NEW = checksum(mixed_model(2))
RELEASED_S = 20.0
"""A bound on a hang, for a released rank: the abort itself takes about half a second."""


@pytest.fixture
def fleet() -> Iterator[TransferFleet]:
    with TransferFleet(3, "cuda") as fleet:
        build(fleet, "first")
        yield fleet


def build(fleet: TransferFleet, prefix: str) -> None:
    options = {"plan": PLAN.to_bytes(), "timeout_s": LIMIT_S, "op_timeout_s": 600.0}
    for future in [rank.call("build", prefix, **options) for rank in fleet.ranks]:
        assert future.result(LIMIT_S).error is None


def start(fleet: TransferFleet, seed: int, *faults: dict[str, Any], **options: Any) -> Any:
    return fleet.call("transfer", PLAN.to_bytes(), seed=seed, faults=faults, **options)


def transfer(fleet: TransferFleet, seed: int, *faults: dict[str, Any], **options: Any) -> list[Outcome]:
    return [future.result(LIMIT_S) for future in start(fleet, seed, *faults, **options)]


@pytest.mark.parametrize("sink", ["dict", "in place", "load", "load in place"])
def test_every_dtype_and_shape_arrives_bit_by_bit(fleet: TransferFleet, sink: str) -> None:
    for seed in (1, 2):
        outcomes = transfer(fleet, seed, sink=sink)
        assert [outcome.error for outcome in outcomes] == [None] * 3
        assert {outcome.checksum for outcome in outcomes} == {checksum(mixed_model(seed))}


@pytest.mark.parametrize("action", ["kill", "stop"])
def test_survivors_are_released_and_build_again(fleet: TransferFleet, action: str) -> None:
    old = transfer(fleet, 1)[2].checksum
    futures = start(fleet, 2, {"action": action, "rank": 1, "bucket": MIDDLE}, timeout_s=6.0)
    outcomes = [futures[rank].result(LIMIT_S) for rank in (0, 2)]
    # a rank before the lost one in NCCL's ring may have got and passed on all that it ever will
    assert any(outcome.error is not None for outcome in outcomes)
    for outcome in outcomes:
        assert isinstance(outcome.error, (PeerLost, RefitTimeout, type(None)))
        assert outcome.seconds < 6.0 + RELEASED_S
    assert outcomes[1].checksum == (NEW if outcomes[1].error is None else old)
    # the survivors' devices work: they meet a fresh rank in the lost one's place
    fleet.replace(1)
    build(fleet, "again")
    assert {outcome.checksum for outcome in transfer(fleet, 2)} == {NEW}


def test_a_cancel_releases_at_once(fleet: TransferFleet) -> None:
    futures = start(
        fleet, 2, {"action": "hold", "rank": 1, "bucket": MIDDLE, "seconds": 5.0}, timeout_s=LIMIT_S
    )
    told = time.monotonic()
    for rank in fleet.ranks:
        rank.call_now("cancel", "enough").result(LIMIT_S)
    errors = [future.result(LIMIT_S).error for future in futures]
    assert isinstance(errors[1], RefitAborted)
    # so few bytes lie in NCCL's own buffers: the others may have nothing left to do; or they may see that the
    # first one told is gone before they are told themselves
    assert all(isinstance(error, (RefitAborted, PeerLost, type(None))) for error in errors)
    assert time.monotonic() - told < 5.0 + RELEASED_S
    build(fleet, "again")
    assert {outcome.checksum for outcome in transfer(fleet, 2)} == {NEW}


def test_what_a_rank_raises_ends_the_group_and_the_next_one_works(fleet: TransferFleet) -> None:
    futures = start(fleet, 2, {"action": "raise", "rank": 1, "bucket": MIDDLE}, timeout_s=LIMIT_S)
    assert isinstance(futures[1].result(LIMIT_S).error, InjectedFault)
    for rank in (0, 2):
        fleet.ranks[rank].call_now("cancel", "rank 1 raised")
        # the rest lies in NCCL's own buffers, so they may have nothing left to do
        assert isinstance(futures[rank].result(LIMIT_S).error, (RefitAborted, PeerLost, type(None)))
    build(fleet, "again")
    assert {outcome.checksum for outcome in transfer(fleet, 2)} == {NEW}


@pytest.mark.parametrize("rank", [0, 1])
def test_one_flipped_bit_is_found(fleet: TransferFleet, rank: int) -> None:
    outcomes = transfer(fleet, 2, {"action": "corrupt", "rank": rank, "bucket": MIDDLE, "byte": 777})
    assert isinstance(outcomes[1].error, TransferCorrupt)
    assert f"bucket {MIDDLE} of" in str(outcomes[1].error)


def test_extra_memory_is_what_was_announced(fleet: TransferFleet) -> None:
    transfer(fleet, 1)
    for future in fleet.call("memory", PLAN.to_bytes(), 2):
        memory = future.result(LIMIT_S)
        # the sender makes its new weights within the call
        assert memory["took"] <= memory["said"] + PLAN.nbytes + (16 << 20)


@pytest.mark.parametrize("align", [16, 256])
def test_packing_on_the_device(align: int) -> None:
    tensors = mixed_model(1, "cuda")
    plan = Plan.build(DictSource(tensors).metadata(), bucket_bytes=4 << 20, align=align, direct_bytes=4 << 20)
    for bucket in plan.buckets:
        names = [plan.tensors[piece.tensor].name for piece in bucket.pieces]
        buffer = torch.empty(bucket.nbytes, dtype=torch.uint8, device="cuda")
        pack(buffer, [tensors[name] for name in names], [piece.offset for piece in bucket.pieces])
        for name, piece in zip(names, bucket.pieces, strict=True):
            place = buffer[piece.offset : piece.offset + piece.stop - piece.start]
            assert torch.equal(place, flat(tensors[name])), name


@pytest.mark.parametrize("count", [0, 1, 100, 40_000_000])
def test_the_device_takes_the_same_digest_as_the_host(count: int) -> None:
    from dprims.synchronizer.digest import Digests

    data = torch.randint(0, 256, (count,), dtype=torch.uint8)
    numbers = []
    for device in (torch.device("cpu"), torch.device("cuda")):
        digests = Digests([count], device)
        digests.add(0, data.to(device))
        numbers.append(digests.finish().cpu())
    assert torch.equal(*numbers)


class Watched(TransferRank):
    """A rank with a group of its training, and a torch that ends processes within seconds, not minutes."""

    def __init__(self, *arguments: Any) -> None:
        os.environ["TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC"] = "250"
        os.environ["TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC"] = "4"
        super().__init__(*arguments)
        self.training = dist.ProcessGroupNCCL(
            dist.HashStore(), 0, 1, timeout=timedelta(minutes=10)
        )  # the first group of a process, whose monitor ends it for all
        self.training.eager_connect_single_device(self.device)

    def outlive(self, seconds: float) -> str | None:
        """Be there for so long; what torch would do with a group that the training makes now."""
        time.sleep(seconds)
        return os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING")


def test_torchs_watchdog_does_not_end_survivors() -> None:
    with TransferFleet(3, "cuda", factory=Watched) as fleet:
        build(fleet, "first")
        futures = start(fleet, 2, {"action": "kill", "rank": 1, "bucket": MIDDLE}, timeout_s=LIMIT_S)
        with pytest.raises(PeerLost):
            futures[1].result(LIMIT_S)
        # torch's watchdog looks every 0.1 s, and sees what NCCL found before anybody aborts
        time.sleep(1.0)
        for rank in (0, 2):
            fleet.ranks[rank].call_now("cancel", "rank 1 is lost")
            futures[rank].result(LIMIT_S)
        for future in [fleet.ranks[rank].call("outlive", 12.0) for rank in (0, 2)]:
            assert future.result(LIMIT_S) is None
        fleet.replace(1)
        build(fleet, "again")
        assert {outcome.checksum for outcome in transfer(fleet, 2)} == {NEW}
