"""Refits over NCCL that lose a shard, with two stages and three shards on one GPU.

NCCL takes several ranks for several hosts when each names another host id; then they share a GPU and talk
through sockets, whose abort is the harder one. The variables are set in the ranks' own processes only.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest

from dprims.engines.local import LocalGeneration, LocalPolicy
from dprims.exceptions import PeerLost, RefitAborted, RefitTimeout, TornWeights, TransferCorrupt
from dprims.synchronizer import CollectiveWeightSynchronizer
from dprims.testing.faults import Fault
from dprims.testing.weights import ToySink, ToySource

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

LIMIT_S = 180.0
STAGES, SHARDS = 2, 3
LAYERS, WIDTH = 8, 1024  # 32 MiB a stage
BUCKET = 4 << 20
MIDDLE = 4
DEADLINE_S = 20.0
ABSENT_S = 30.0


def environment(seat: int) -> dict[str, str]:
    return {"NCCL_HOSTID": f"host-{seat}", "NCCL_SOCKET_IFNAME": "lo", "NCCL_NVLS_ENABLE": "0"}


class Fleet:
    def __init__(self, *, in_place: bool = False) -> None:
        options: dict[str, Any] = {"device": "cuda:0", "environment": environment}
        self.policy = LocalPolicy(ToySource, LAYERS, WIDTH, "cuda:0", stages=STAGES, **options)
        self.generation = LocalGeneration(
            ToySink, STAGES, LAYERS, WIDTH, in_place, "cuda:0",
            shard_sizes=(1,) * SHARDS, train_world_size=STAGES, **options,
        )  # fmt: skip
        self.sync = CollectiveWeightSynchronizer(
            self.policy,
            self.generation,
            refit_timeout_s=DEADLINE_S,
            stall_timeout_s=15.0,
            roster_ttl_s=3.0,
            bucket_bytes=BUCKET,
        )
        self.sync.init_communicator(timeout=LIMIT_S)

    def train(self) -> list[str]:
        self.sync.mark_stale()
        return [self.policy.call(rank, "step").result(LIMIT_S) for rank in range(STAGES)]

    def holds(self, shard: int) -> list[str]:
        return self.generation.call(shard, "checksums").result(LIMIT_S)

    def arm(self, shard: int, *faults: Fault) -> None:
        self.generation.process(shard).call_now("arm", *faults).result(LIMIT_S)

    def close(self) -> None:
        self.generation.close()
        self.policy.close()
        self.sync.shutdown()


@pytest.fixture
def fleet(request: pytest.FixtureRequest) -> Iterator[Fleet]:
    fleet = Fleet(in_place=getattr(request, "param", False))
    try:
        yield fleet
    finally:
        fleet.close()


FAULTS = {
    "kill": (Fault(action="kill", bucket=MIDDLE), PeerLost),
    "stop": (Fault(action="stop", bucket=MIDDLE), PeerLost),
    "raise": (Fault(action="raise", bucket=MIDDLE), RefitAborted),
    "corrupt": (Fault(action="corrupt", bucket=MIDDLE), TransferCorrupt),
    "absent": (Fault(action="delay", phase="bucket", bucket=0, seconds=ABSENT_S), RefitTimeout),
    "kill at the decision": (Fault(action="kill", phase="decision"), PeerLost),
}


@pytest.mark.parametrize("name", FAULTS)
def test_survivors_abort_build_again_and_take_the_lost_shard_back(fleet: Fleet, name: str) -> None:
    fault, error = FAULTS[name]
    old = fleet.train()
    assert fleet.sync.sync_weights().members == (0, 1, 2)
    assert [fleet.holds(shard) for shard in range(SHARDS)] == [old] * SHARDS

    new = fleet.train()
    fleet.arm(1, fault)
    with pytest.raises(error):
        fleet.sync.sync_weights()
    for shard in (0, 2):
        assert fleet.holds(shard) == old
        assert fleet.generation.may_serve(shard)

    lost = [1] if name in ("kill", "stop", "kill at the decision") else []
    members = tuple(shard for shard in range(SHARDS) if shard not in lost)
    report = fleet.sync.refit()
    assert report.members == members
    assert [fleet.holds(shard) for shard in members] == [new] * len(members)

    if lost:
        fleet.generation.process(1).signal(signal.SIGCONT)
        fleet.generation.restart(1)
        assert not fleet.generation.may_serve(1)
    newest = fleet.train()
    deadline = time.monotonic() + LIMIT_S
    while fleet.sync.refit().members != (0, 1, 2):
        assert time.monotonic() < deadline
    assert [fleet.holds(shard) for shard in range(SHARDS)] == [newest] * SHARDS
    assert all(fleet.generation.may_serve(shard) for shard in range(SHARDS))


def test_a_lost_trainer_ends_the_refit_and_may_come_back(fleet: Fleet) -> None:
    old = fleet.train()
    fleet.sync.sync_weights()
    fleet.train()
    fleet.policy.process(1).call_now("arm", Fault(action="kill", bucket=MIDDLE)).result(LIMIT_S)
    with pytest.raises(PeerLost, match="trainer-1"):
        fleet.sync.sync_weights()
    assert [fleet.holds(shard) for shard in range(SHARDS)] == [old] * SHARDS
    fleet.policy.restart(1)
    new = fleet.train()
    assert fleet.sync.refit().members == (0, 1, 2)
    assert [fleet.holds(shard) for shard in range(SHARDS)] == [new] * SHARDS


@pytest.mark.parametrize("fleet", [True], indirect=True, ids=["in place"])
def test_weights_received_in_place_are_torn_until_they_came_whole(fleet: Fleet) -> None:
    fleet.train()
    fleet.sync.sync_weights()
    new = fleet.train()
    fleet.arm(1, Fault(action="kill", bucket=MIDDLE))
    with pytest.raises((PeerLost, TornWeights)):
        fleet.sync.sync_weights()
    assert not any(fleet.generation.may_serve(shard) for shard in (0, 2))
    assert fleet.sync.refit().members == (0, 2)
    for shard in (0, 2):
        assert fleet.holds(shard) == new
        assert fleet.generation.may_serve(shard)


def test_twenty_rebuilds_leave_the_device_as_it_was(fleet: Fleet) -> None:
    fleet.train()
    fleet.sync.sync_weights()
    for _ in range(20):
        assert fleet.sync.reconcile_communicator([], force=True)
    new = fleet.train()
    assert fleet.sync.sync_weights().members == (0, 1, 2)
    assert [fleet.holds(shard) for shard in range(SHARDS)] == [new] * SHARDS
