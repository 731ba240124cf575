"""Refits through the synchronizer: real gloo groups, real processes, each backend."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import threading
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pytest

from dprims.backend import schemes
from dprims.engines.local import LocalGeneration, LocalPolicy
from dprims.exceptions import (
    BelowQuorum,
    LockTimeout,
    PeerLost,
    RefitAborted,
    RefitError,
    RefitTimeout,
    StaleLeader,
    TransferCorrupt,
)
from dprims.synchronizer import CollectiveWeightSynchronizer
from dprims.testing.faults import Fault, FaultInjector, InjectedFault
from dprims.testing.threads import ThreadGeneration, ThreadPolicy
from dprims.testing.weights import ToySink, ToySource

LIMIT_S = 60.0
STAGES, SHARDS = 2, 3
BUCKET = 64 << 10
MIDDLE = 2
TTL_S = 1.5


@dataclass
class Fleet:
    """Two trainer stages and three shards of one process each, at no version yet."""

    policy: LocalPolicy
    generation: LocalGeneration
    sync: CollectiveWeightSynchronizer

    def train(self) -> list[str]:
        """Make new weights; the checksum of each stage."""
        futures = [self.policy.call(rank, "step") for rank in range(STAGES)]
        self.sync.mark_stale()
        return [future.result(LIMIT_S) for future in futures]

    def weights(self) -> list[str]:
        return [self.policy.call(rank, "checksum").result(LIMIT_S) for rank in range(STAGES)]

    def holds(self, shard: int) -> list[str]:
        return self.generation.call(shard, "checksums").result(LIMIT_S)

    def arm(self, shard: int, action: str, phase: str = "bucket", **more: Any) -> None:
        fault = Fault(action=action, phase=phase, **({"bucket": MIDDLE} if phase == "bucket" else {}), **more)
        self.generation.process(shard).call_now("arm", fault).result(LIMIT_S)

    def all_at(self, expected: list[str], shards: Any = range(SHARDS)) -> None:
        for shard in shards:
            assert self.holds(shard) == expected, f"shard {shard} holds other weights"
            assert self.generation.may_serve(shard)


@contextlib.contextmanager
def running(backend: str | None = None, **options: Any) -> Iterator[Fleet]:
    policy = LocalPolicy(ToySource, stages=STAGES)
    generation = None
    sync = None
    try:
        generation = LocalGeneration(ToySink, STAGES, shard_sizes=(1,) * SHARDS, train_world_size=STAGES)
        sync = synchronizer(policy, generation, backend, **options)
        sync.init_communicator(timeout=LIMIT_S)
        yield Fleet(policy, generation, sync)
    finally:
        if generation is not None:
            generation.close()
        policy.close()
        if sync is not None:
            sync.shutdown()


def synchronizer(policy: Any, generation: Any, backend: Any, **options: Any) -> CollectiveWeightSynchronizer:
    settings = {
        "refit_timeout_s": 30.0,
        "stall_timeout_s": 20.0,
        "roster_ttl_s": TTL_S,
        "bucket_bytes": BUCKET,
        "fleet": f"fleet-{uuid.uuid4().hex[:8]}",
    }
    return CollectiveWeightSynchronizer(policy, generation, backend=backend, **{**settings, **options})


@pytest.fixture
def fleet() -> Iterator[Fleet]:
    with running() as fleet:
        yield fleet


@pytest.fixture
def address(request: pytest.FixtureRequest) -> str | None:
    """A URL for each scheme that names a kind of server of its own."""
    scheme = request.param
    if scheme == "redis":
        return request.getfixturevalue("redis_server").url
    if scheme == "etcd":
        return request.getfixturevalue("etcd_server").url
    return {"tcpstore": None, "memory": f"memory://{uuid.uuid4().hex}"}[scheme]


KINDS = sorted(set(schemes()) - {"rediss", "unix", "etcds"})
"""Every registered backend; the schemes left out are other ways to the same servers."""


@pytest.mark.parametrize("address", [kind for kind in KINDS if kind != "memory"], indirect=True)
def test_a_refit_survives_a_killed_shard_on_each_backend(address: str | None) -> None:
    with running(address, roster_ttl_s=3.0) as fleet:
        first = fleet.weights()
        assert fleet.sync.sync_weights().members == (0, 1, 2)
        fleet.all_at(first)

        second = fleet.train()
        fleet.arm(1, "kill")
        with pytest.raises(PeerLost, match=r"seat 3: shard-1-0 .* SIGKILL"):
            fleet.sync.sync_weights()
        assert fleet.sync.is_stale
        fleet.all_at(first, (0, 2))

        assert fleet.sync.reconcile_communicator(fleet.generation.dead_shards, force=True)
        report = fleet.sync.sync_weights()
        assert (report.version, report.members, list(report.absent)) == (2, (0, 2), [1])
        fleet.all_at(second, (0, 2))

        fleet.generation.restart(1)
        assert not fleet.generation.may_serve(1)
        assert fleet.sync.reconcile_communicator([])
        assert not fleet.generation.may_serve(1), "taken in, and yet without weights"
        assert fleet.sync.sync_weights(only=[1]).version == 2
        fleet.all_at(second)
        assert fleet.sync.sync_weights().members == (0, 1, 2)


@pytest.mark.parametrize("address", KINDS, indirect=True)
def test_a_refit_survives_a_raising_shard_on_each_backend(address: str | None) -> None:
    policy = ThreadPolicy(ToySource, stages=STAGES)
    generation = ThreadGeneration(ToySink, STAGES, shard_sizes=(1, 2), train_world_size=STAGES)
    sync = synchronizer(policy, generation, address, roster_ttl_s=5.0)
    try:
        sync.init_communicator(timeout=LIMIT_S)
        sync.sync_weights()
        old = [source.checksum() for source in policy.sources]
        new = [source.step() for source in policy.sources]
        generation.workers[STAGES + 1].faults = FaultInjector([Fault(action="raise", bucket=MIDDLE)])
        with pytest.raises(RefitAborted, match="InjectedFault") as failure:
            sync.sync_weights()
        assert isinstance(failure.value.__cause__, InjectedFault)
        assert [sink.checksums() for sink in generation.sinks] == [old] * 3
        assert sync.reconcile_communicator([], force=True)
        assert sync.sync_weights().members == (0, 1)
        assert [sink.checksums() for sink in generation.sinks] == [new] * 3
    finally:
        generation.close()
        policy.close()
        sync.shutdown()


def test_versions_staleness_and_reports(fleet: Fleet, tmp_path: Any) -> None:
    sync = fleet.sync
    assert sync.is_stale
    assert sync.version == 0
    report = sync.sync_weights(kv_scales={"layer.0.k": 0.5})
    assert not sync.is_stale
    assert (report.version, sync.version, report.members) == (1, 1, (0, 1, 2))
    assert report.nbytes == STAGES * 4 * (128 * 128 + 128) * 4 + 4
    assert 0 < report.wire_s <= report.seconds
    assert set(report.stages) == {0, 1}
    assert {"wire", "unpack"} <= set(report.stage_s(0))
    report.to_chrome_trace(tmp_path / "trace.json")
    assert b'"ph": "X"' in (tmp_path / "trace.json").read_bytes()
    sync.mark_stale()
    assert sync.is_stale
    assert fleet.generation.call(0, "history").result(LIMIT_S) == [
        "pause",
        "commit 1",
        "after_commit",
        "resume",
    ]


def test_the_next_sync_goes_on_by_itself_after_a_kill(fleet: Fleet) -> None:
    fleet.sync.sync_weights()
    expected = fleet.train()
    fleet.arm(2, "kill")
    with pytest.raises(PeerLost):
        fleet.sync.sync_weights()
    report = fleet.sync.sync_weights()
    assert report.members == (0, 1)
    assert report.rebuilt
    fleet.all_at(expected, (0, 1))


def test_a_frozen_shard_is_left_out_when_its_roster_entry_lapses(fleet: Fleet) -> None:
    fleet.sync.sync_weights()
    old = fleet.weights()
    expected = fleet.train()
    fleet.arm(0, "stop")
    with pytest.raises(PeerLost, match="roster entry of seat 2 lapsed"):
        fleet.sync.sync_weights()
    fleet.all_at(old, (1, 2))
    assert fleet.sync.reconcile_communicator([], force=True)
    assert fleet.sync.sync_weights().members == (1, 2)
    fleet.all_at(expected, (1, 2))

    fleet.generation.process(0).signal(signal.SIGCONT)  # it thaws, and knows that it is out
    assert not fleet.generation.may_serve(0)


def test_the_deadline_ends_a_refit_whose_rank_is_busy_elsewhere() -> None:
    with running(refit_timeout_s=3.0, stall_timeout_s=3.0) as fleet:
        fleet.sync.sync_weights()
        old = fleet.weights()
        fleet.train()
        fleet.arm(1, "delay", seconds=8.0)
        with pytest.raises(RefitTimeout):
            fleet.sync.sync_weights()
        fleet.all_at(old)


@pytest.mark.parametrize(
    ("action", "phase", "error"),
    [
        ("corrupt", "bucket", TransferCorrupt),
        ("raise", "bucket", RefitAborted),
        ("raise", "decision", RefitAborted),
        ("kill", "decision", PeerLost),
    ],
)
def test_survivors_keep_the_old_weights_whole(fleet: Fleet, action: str, phase: str, error: type) -> None:
    fleet.sync.sync_weights()
    old = fleet.weights()
    new = fleet.train()
    fleet.arm(1, action, phase)
    with pytest.raises(error):
        fleet.sync.sync_weights()
    alive = [shard for shard in range(SHARDS) if shard not in fleet.generation.dead_shards]
    fleet.all_at(old, alive)
    assert fleet.sync.sync_weights().members == tuple(alive)
    fleet.all_at(new, alive)


@pytest.mark.parametrize("action", ["raise", "kill"])
def test_a_shard_that_fails_to_commit_is_left_behind_and_the_others_go_on(fleet: Fleet, action: str) -> None:
    fleet.sync.sync_weights()
    new = fleet.train()
    fleet.arm(1, action, "commit")
    report = fleet.sync.sync_weights()
    assert report.members == (0, 2)
    fleet.all_at(new, (0, 2))
    assert not fleet.generation.may_serve(1)


def test_a_shard_killed_in_the_rebuild_is_left_out_of_the_next(fleet: Fleet) -> None:
    fleet.sync.sync_weights()
    fleet.arm(0, "kill", "handshake")
    assert fleet.sync.reconcile_communicator([2], force=True)
    assert fleet.sync.membership is not None
    assert fleet.sync.membership.surviving_shards == (1,)
    assert fleet.sync.sync_weights().members == (1,)


def test_a_killed_trainer_ends_the_run_by_name(fleet: Fleet) -> None:
    fleet.sync.sync_weights()
    old = fleet.weights()
    fleet.policy.process(1).call_now("arm", Fault(action="kill", bucket=0)).result(LIMIT_S)
    with pytest.raises(PeerLost, match="seat 1: trainer-1"):
        fleet.sync.sync_weights()
    fleet.all_at(old)
    with pytest.raises(PeerLost, match="trainer-1"):
        fleet.sync.sync_weights()


def test_too_few_shards_is_an_error_before_anything_is_sent() -> None:
    with running(min_shards=3) as fleet:
        fleet.sync.sync_weights()
        fleet.train()
        fleet.arm(1, "kill")
        with pytest.raises(PeerLost):
            fleet.sync.sync_weights()
        with pytest.raises(BelowQuorum, match="2 of 3 shards"):
            fleet.sync.sync_weights()
        with pytest.raises(BelowQuorum):
            fleet.sync.reconcile_communicator([1])
        fleet.generation.restart(1)
        assert fleet.sync.sync_weights().members == (0, 1, 2)


def test_reconcile_says_whether_there_was_anything_to_do(fleet: Fleet) -> None:
    sync = fleet.sync
    assert sync.reconcile_communicator([]) is False
    before = sync.epoch
    assert sync.reconcile_communicator([], force=True) is True
    assert sync.epoch > before
    assert sync.reconcile_communicator([2]) is True
    assert sync.reconcile_communicator([2]) is False
    with pytest.raises(BelowQuorum):
        sync.reconcile_communicator([0, 1, 2])


def test_one_shard_is_not_brought_up_alone_once_the_trainers_have_stepped(fleet: Fleet) -> None:
    fleet.sync.sync_weights()
    fleet.train()
    with pytest.raises(RefitError, match="shard 1 cannot be brought up alone"):
        fleet.sync.sync_weights(only=[1])


def test_a_second_leader_waits_takes_over_and_the_first_is_refused(redis_server: Any) -> None:
    with (
        running(redis_server.url, fleet="two-leaders", roster_ttl_s=2.0) as fleet,
        ThreadPoolExecutor(1) as other,
    ):
        fleet.sync.sync_weights()
        second = synchronizer(
            fleet.policy, fleet.generation, redis_server.url, fleet="two-leaders", roster_ttl_s=2.0
        )
        with pytest.raises(LockTimeout, match="another controller leads"):
            other.submit(second.init_communicator, 0.2).result(LIMIT_S)
        grant = fleet.sync._grant
        assert grant is not None
        fleet.sync.backend.evict(fleet.sync.site.leader_lock, grant.token)  # as if the first had been frozen
        other.submit(second.init_communicator, LIMIT_S).result(2 * LIMIT_S)
        try:
            assert second.version == 1
            with pytest.raises(StaleLeader):
                fleet.sync.sync_weights()
            new = fleet.train()
            second.mark_stale()
            assert second.sync_weights().version == 2
            fleet.all_at(new)
        finally:
            second.shutdown()


def test_a_call_beside_a_running_one_is_refused(fleet: Fleet) -> None:
    fleet.sync.sync_weights()
    fleet.arm(1, "delay", seconds=2.0)
    inside = threading.Thread(target=fleet.sync.sync_weights)
    inside.start()
    try:
        while inside.is_alive() and not fleet.sync._busy.locked():
            pass
        with pytest.raises(RefitError, match="another thread drives"):
            fleet.sync.reconcile_communicator([])
    finally:
        inside.join(LIMIT_S)


def test_a_new_tensor_is_planned_and_sent(fleet: Fleet) -> None:
    fleet.sync.sync_weights()
    assert fleet.sync.sync_weights(kv_scales={"k": 1.5}).nbytes == STAGES * 4 * (128 * 128 + 128) * 4 + 4
    assert fleet.sync.sync_weights().nbytes == STAGES * 4 * (128 * 128 + 128) * 4


@pytest.mark.parametrize("option", ["refit_timeout_s", "stall_timeout_s"])
def test_times_below_zero_are_refused(option: str) -> None:
    with pytest.raises(RefitError, match=option):
        synchronizer(None, None, None, **{option: -1.0})


def test_nothing_works_before_init_communicator() -> None:
    sync = synchronizer(None, None, None)
    with pytest.raises(RefitError, match="init_communicator"):
        sync.sync_weights()
    assert sync.membership is None
    sync.shutdown()


LEAVING = """
from dprims.synchronizer import CollectiveWeightSynchronizer
from dprims.testing.threads import ThreadGeneration, ThreadPolicy
from dprims.testing.weights import ToySink, ToySource
policy = ThreadPolicy(ToySource)
generation = ThreadGeneration(ToySink, 1, shard_sizes=(1, 1))
sync = CollectiveWeightSynchronizer(policy, generation)
sync.init_communicator()
sync.sync_weights()
generation.close(), policy.close(), sync.shutdown()
"""


def test_a_process_that_ends_right_after_a_refit_ends_well() -> None:
    run = subprocess.run(
        [sys.executable, "-c", LEAVING], capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    assert run.returncode == 0, run.stderr


def test_an_entry_is_waited_for_as_long_as_the_backend_keeps_it(etcd_server: Any) -> None:
    policy, generation = ThreadPolicy(ToySource), ThreadGeneration(ToySink, 1)
    sync = synchronizer(policy, generation, etcd_server.url, roster_ttl_s=0.5)
    try:
        sync.init_communicator(timeout=LIMIT_S)
        assert sync.site.roster_ttl_s == sync.backend.guarantees.min_ttl == 2.0
    finally:
        generation.close()
        policy.close()
        sync.shutdown()
