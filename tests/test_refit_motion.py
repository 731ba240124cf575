"""Fleets in motion: layouts of generation, in-place sinks, helpers for training loops, and long runs."""

from __future__ import annotations

import contextlib
import gc
import os
import random
import re
import signal
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
import torch

from dprims.engines.local import LocalGeneration, LocalPolicy
from dprims.exceptions import (
    BackendError,
    BelowQuorum,
    DprimsError,
    HandshakeMismatch,
    PeerLost,
    RefitAborted,
    RefitError,
    StaleLeader,
    TornWeights,
)
from dprims.synchronizer import CollectiveWeightSynchronizer
from dprims.synchronizer.graveyard import buried
from dprims.synchronizer.sinks import DictSink, LoadWeightsSink
from dprims.synchronizer.sources import DictSource
from dprims.testing.faults import Fault, FaultInjector
from dprims.testing.servers import RedisServer
from dprims.testing.threads import ThreadGeneration, ThreadPolicy
from dprims.testing.weights import ToySink, ToySource, toy_tensors

from .helpers.services import until

LIMIT_S = 60.0
BUCKET = 64 << 10
MIDDLE = 2


def synchronizer(
    policy: Any, generation: Any, backend: Any = None, **more: Any
) -> CollectiveWeightSynchronizer:
    options = {
        "refit_timeout_s": 20.0,
        "stall_timeout_s": 10.0,
        "roster_ttl_s": 3.0,
        "bucket_bytes": BUCKET,
        "fleet": f"fleet-{uuid.uuid4().hex[:8]}",
    }
    return CollectiveWeightSynchronizer(policy, generation, backend=backend, **{**options, **more})


@contextlib.contextmanager
def threads(
    sizes: tuple[int, ...], make_sink: Callable[..., Any], *args: Any, stages: int = 2, **options: Any
) -> Iterator[tuple[ThreadPolicy, ThreadGeneration, CollectiveWeightSynchronizer]]:
    """Ranks as threads of this process, over real groups."""
    policy = ThreadPolicy(ToySource, stages=stages)
    generation = ThreadGeneration(make_sink, *args, shard_sizes=sizes, train_world_size=stages)
    sync = synchronizer(policy, generation, **options)
    try:
        sync.init_communicator(timeout=LIMIT_S)
        yield policy, generation, sync
    finally:
        generation.close()
        policy.close()
        sync.shutdown()


def step(policy: ThreadPolicy, sync: CollectiveWeightSynchronizer) -> list[str]:
    sync.mark_stale()
    return [source.step() for source in policy.sources]


# -- layouts of generation ---------------------------------------------------------------------------


class PartSink(DictSink):
    """What one rank of a shard holds when generation is cut otherwise than training."""

    def __init__(self, shard: int, worker: int, parts: int, stages: int) -> None:
        every: dict[str, Any] = {}
        for stage in range(stages):
            every |= toy_tensors(stage, 4, 128)
        names = sorted(every)
        super().__init__(
            {name: every[name] for place, name in enumerate(names) if place % parts == worker % parts}
        )


@pytest.mark.parametrize(
    ("stages", "sizes", "parts"),
    [(2, (1, 3, 2), 1), (1, (3, 3), 3), (3, (2, 2), 2), (2, (4, 1), 1)],
    ids=[
        "unequal shards",
        "generation pp 3 of train pp 1",
        "generation pp 2 of train pp 3",
        "tp 4 beside tp 1",
    ],
)
def test_generation_has_a_layout_of_its_own(stages: int, sizes: tuple[int, ...], parts: int) -> None:
    with threads(sizes, PartSink, parts, stages, stages=stages) as (policy, generation, sync):
        for _ in range(2):
            step(policy, sync)
            assert sync.sync_weights().members == tuple(range(len(sizes)))
            sent = {name: tensor for source in policy.sources for name, tensor in source.tensors.items()}
            for sink in generation.sinks:
                assert all(tensor.equal(sent[name]) for name, tensor in sink.tensors.items())
            for first in range(0, len(generation.sinks) if parts > 1 else 0, parts):  # one shard holds all
                held = [name for sink in generation.sinks[first : first + parts] for name in sink.tensors]
                assert sorted(held) == sorted(sent)


def test_a_wide_shard_commits_on_all_its_ranks_or_serves_no_more() -> None:
    with threads((3, 1), ToySink, 2, roster_ttl_s=1.0) as (policy, generation, sync):
        old = step(policy, sync)
        sync.sync_weights()
        new = step(policy, sync)
        generation.workers[4].faults = FaultInjector([Fault(action="raise", phase="commit")])
        assert sync.sync_weights().members == (1,)
        assert generation.sinks[3].checksums() == new
        assert not any(generation.workers[seat].may_serve for seat in (2, 3, 4)), "one failed, so none serves"
        assert generation.sinks[2].checksums() == old
        until(lambda: sync.refit().members == (0, 1))
        assert [sink.checksums() for sink in generation.sinks] == [new] * 4


def local_norm(stage: int) -> DictSource:
    """A pipeline stage that numbers its layers by itself."""
    return DictSource({"layers.0.norm": torch.full((3 + stage,), float(stage))})


def test_a_name_of_two_stages_is_refused_before_anything_is_sent() -> None:
    policy = ThreadPolicy(local_norm, stages=2)
    got: dict[str, Any] = {}
    generation = ThreadGeneration(
        lambda shard, worker: LoadWeightsSink(got.update, device="cpu"), train_world_size=2
    )
    sync = synchronizer(policy, generation)
    said = r"stage 0 sends 'layers.0.norm' float32\[3\], and stage 1 sends 'layers.0.norm' float32\[4\]"
    try:
        with pytest.raises(HandshakeMismatch, match=said):
            sync.init_communicator(timeout=LIMIT_S)
        assert not got
    finally:
        generation.close()
        policy.close()
        sync.shutdown()


class BadSink(ToySink):
    """Shard 1 cannot store what it receives."""

    def __init__(self, shard: int, worker: int, stages: int) -> None:
        super().__init__(shard, worker, stages)
        self.shard = shard

    def begin(self, version: int, metas: Any) -> None:
        if self.shard == 1:
            raise OSError("disk full")
        super().begin(version, metas)


def test_a_shard_that_fails_again_and_again_is_left_out_by_refit() -> None:
    with threads((1, 1, 1), BadSink, 2) as (policy, generation, sync):
        new = step(policy, sync)
        with pytest.raises(RefitAborted, match="disk full") as failed:
            sync.sync_weights()
        assert failed.value.shards == (1,)
        assert sync.refit().members == (0, 2)
        assert [generation.sinks[shard].checksums() for shard in (0, 2)] == [new] * 2


def test_a_fleet_that_would_be_too_small_without_it_keeps_a_shard_that_fails() -> None:
    with threads((1, 1), BadSink, 2, min_shards=2) as (policy, _, sync):
        step(policy, sync)
        with pytest.raises(RefitAborted, match="disk full"):
            sync.refit()


@pytest.mark.parametrize("phase", ["bucket", "commit"])
def test_an_interrupted_refit_can_be_led_again(phase: str) -> None:
    class Interrupt(BaseException):
        pass

    def interrupt(*_: Any) -> None:
        raise Interrupt

    with threads((1, 1), ToySink, 2, roster_ttl_s=1.0) as (policy, generation, sync):
        new = step(policy, sync)
        place = {"bucket": MIDDLE} if phase == "bucket" else {}
        fault = Fault(action="delay", phase=phase, seconds=3.0, **place)  # type: ignore[arg-type]
        generation.workers[3].faults = FaultInjector([fault])
        before = signal.signal(signal.SIGALRM, interrupt)
        signal.setitimer(signal.ITIMER_REAL, 1.5)
        try:
            with pytest.raises(Interrupt):
                sync.sync_weights()
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0.0)
            signal.signal(signal.SIGALRM, before)
        with pytest.raises(RefitError, match=r"Interrupt ended an operation in its phase .*: call init_comm"):
            sync.refit()
        sync.init_communicator(timeout=LIMIT_S)
        until(lambda: sync.refit().members == (0, 1))
        assert [sink.checksums() for sink in generation.sinks] == [new] * 2
        assert all(worker.may_serve for worker in generation.workers.values())


def test_when_no_shard_can_commit_what_each_raised_is_told() -> None:
    with threads((1, 1), ToySink, 2, roster_ttl_s=1.0) as (policy, generation, sync):
        step(policy, sync)
        for seat in (2, 3):
            generation.workers[seat].faults = FaultInjector([Fault(action="raise", phase="commit")])
        with pytest.raises(BelowQuorum) as raised:
            sync.sync_weights()
        told = str(raised.value)
        assert all(re.search(rf"shard {shard}: InjectedFault: .*commit", told) for shard in (0, 1)), told


# -- weights that are received in place --------------------------------------------------------------


def test_weights_received_in_place_are_torn_until_the_next_commit() -> None:
    with threads((1, 1), ToySink, 2, 4, 128, True) as (policy, generation, sync):
        old = step(policy, sync)
        sync.sync_weights()
        assert all(worker.may_serve for worker in generation.workers.values())
        new = step(policy, sync)
        generation.workers[2].faults = FaultInjector([Fault(action="raise", bucket=MIDDLE)])
        with pytest.raises(TornWeights, match="seat 2: an in-place receive was cut: InjectedFault"):
            sync.sync_weights()
        assert sync.is_stale
        assert sync.version == 1
        assert not generation.workers[2].may_serve
        if generation.workers[3].may_serve:  # the refit ended before a byte had reached it
            assert generation.sinks[1].checksums() == old
        assert sync.sync_weights().version == 2
        assert all(worker.may_serve for worker in generation.workers.values())
        assert [sink.checksums() for sink in generation.sinks] == [new] * 2


def test_who_cut_weights_that_are_received_in_place_is_told() -> None:
    """The survivors are torn and say so; whom they lost is known to the controller alone."""
    policy = LocalPolicy(ToySource, 4, 128, stages=1)
    generation = LocalGeneration(ToySink, 1, 4, 128, True, shard_sizes=(1, 1, 1), train_world_size=1)
    sync = synchronizer(policy, generation)
    try:
        sync.init_communicator(timeout=LIMIT_S)
        sync.sync_weights()
        policy.call(0, "step").result(LIMIT_S)
        sync.mark_stale()
        generation.process(1).call_now("arm", Fault(action="kill", bucket=MIDDLE)).result(LIMIT_S)
        # a survivor that had got everything already is torn too, but its receive was not cut
        with pytest.raises((PeerLost, TornWeights), match=r"seat 2: shard-1-0 \(pid \d+\) was ended by SIG"):
            sync.sync_weights()
        assert not any(generation.may_serve(shard) for shard in (0, 2))
        assert sync.refit().members == (0, 2)
        assert all(generation.may_serve(shard) for shard in (0, 2))
    finally:
        generation.close()
        policy.close()
        sync.shutdown()


# -- versions ----------------------------------------------------------------------------------------


def test_versions_grow_also_when_the_backend_has_forgotten_everything(private_redis: RedisServer) -> None:
    with threads((1, 1), ToySink, 2, backend=private_redis.url, roster_ttl_s=1.0) as (
        policy,
        generation,
        sync,
    ):
        for version in (1, 2, 3):
            step(policy, sync)
            assert sync.sync_weights().version == version
        with redis.Redis.from_url(private_redis.url) as client:
            client.flushall()
        new = step(policy, sync)

        def back() -> bool:
            try:
                return sync.refit().members == (0, 1)
            except (BelowQuorum, PeerLost):  # the ranks have not noticed yet that they are out
                return False
            except (StaleLeader, BackendError):
                sync.init_communicator(timeout=LIMIT_S)
                return False

        until(back)
        assert sync.version > 3
        assert [sink.version for sink in generation.sinks] == [sync.version] * 2
        assert [sink.checksums() for sink in generation.sinks] == [new] * 2


# -- the helper for training loops -------------------------------------------------------------------


def test_a_refit_goes_on_without_a_shard_that_fails_once() -> None:
    with threads((1, 1), ToySink, 2) as (policy, generation, sync):
        new = step(policy, sync)
        generation.workers[3].faults = FaultInjector([Fault(action="raise", bucket=MIDDLE)])
        report = sync.refit()
        assert report.members == (0, 1)
        assert [sink.checksums() for sink in generation.sinks] == [new] * 2


def test_a_refit_asks_anew_who_is_absent_and_gives_up_in_time() -> None:
    with threads((1, 1), ToySink, 2) as (policy, generation, sync):
        step(policy, sync)
        asked: list[int] = []

        def absent() -> list[int]:
            asked.append(len(asked))
            return [] if len(asked) < 2 else [1]

        generation.workers[3].faults = FaultInjector([Fault(action="raise", bucket=MIDDLE, times=9)])
        assert sync.refit(absent).members == (0,)
        assert asked == [0, 1]
        generation.workers[2].faults = FaultInjector([Fault(action="raise", bucket=MIDDLE, times=9)])
        with pytest.raises(RefitAborted, match="InjectedFault"):
            sync.refit(lambda: [1], tries=2)
        assert generation.workers[2].faults._left == [7], "tried twice"
        with pytest.raises(BelowQuorum):
            sync.refit(lambda: [0, 1])
        with pytest.raises(RefitError, match="tries is 0"):
            sync.refit(tries=0)


# -- long runs ---------------------------------------------------------------------------------------


def usage(sync: CollectiveWeightSynchronizer, client: Any) -> dict[str, int]:
    """What could grow: threads, descriptors, resident memory in MiB, keys in both stores."""
    gc.collect()
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") >> 20
    return {
        "threads": threading.active_count(),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "MiB": resident,
        "keys at the leader": sync._store.num_keys(),
        "keys in the backend": client.dbsize(),
    }


def rebuild_often(times: int, server: RedisServer) -> None:
    with (
        threads((1, 2), ToySink, 2, backend=server.url) as (_, _, sync),
        redis.Redis.from_url(server.url) as client,
    ):
        for _ in range(20):
            assert sync.reconcile_communicator([], force=True)
        until(lambda: settled(sync, client))
        before, others = usage(sync, client), buried()  # what earlier tests gave up stays for its timeout
        for number in range(times):
            assert sync.reconcile_communicator([], force=True)
            if number % 10 == 0:
                sync.sync_weights()
                until(lambda: buried() <= others)  # one thread ends all these groups, 20 ms each
        slack = {"threads": 4, "descriptors": 40, "MiB": 32, "keys at the leader": 0}
        slack["keys in the backend"] = 8
        now: dict[str, int] = {}

        def flat() -> bool:
            now.update(usage(sync, client))
            return all(now[name] <= before[name] + slack[name] for name in before)

        until(flat, lambda: f"{before} became {now}")


def settled(sync: Any, client: Any) -> bool:
    first = usage(sync, client)
    time.sleep(0.1)  # a look at what moves by itself
    return first == usage(sync, client)


@pytest.mark.slow
def test_thirty_rebuilds_leave_nothing_behind(private_redis: RedisServer) -> None:
    rebuild_often(30, private_redis)


@pytest.mark.chaos
@pytest.mark.timeout(600)
def test_two_hundred_rebuilds_leave_nothing_behind(private_redis: RedisServer) -> None:
    rebuild_often(200, private_redis)


def sync_at_random(times: int, seed: int, server: RedisServer) -> None:
    """Faults drawn from *seed*: every shard is whole after each sync, and all are in at the end."""
    draw = random.Random(seed)
    policy = LocalPolicy(ToySource, stages=2)
    generation = LocalGeneration(ToySink, 2, shard_sizes=(1, 2, 1), train_world_size=2)
    sync = synchronizer(
        policy, generation, server.url, refit_timeout_s=3.0, stall_timeout_s=1.5, roster_ttl_s=1.0
    )
    known: list[list[str]] = []

    def call(side: Any, *args: Any, **kwargs: Any) -> Any:
        return side.call(*args, **kwargs).result(LIMIT_S)

    try:
        sync.init_communicator(timeout=LIMIT_S)
        version, leads = 0, True
        for _ in range(times):
            for stage in range(2):
                call(policy, stage, "step")
            sync.mark_stale()
            known.append([call(policy, stage, "checksum") for stage in range(2)])
            shard, worker = draw.choice([(0, 0), (1, 0), (1, 1), (2, 0)])
            rank = draw.choice([generation.process(shard, worker), policy.process(draw.randrange(2))])
            phase = draw.choice(["bucket", "bucket", "decision", "commit", "settle", "handshake"])
            action = draw.choice(["kill", "raise", "delay"] + (["corrupt"] if phase == "bucket" else []))
            if action == "kill" and rank.name.startswith("trainer"):
                action = "raise"
            bucket = draw.randrange(5) if phase == "bucket" else None
            fault = Fault(action=action, phase=phase, bucket=bucket, seconds=0.3)
            rank.call_now("arm", fault).result(LIMIT_S)
            try:
                if not leads:
                    sync.init_communicator(timeout=LIMIT_S)
                    leads = True
                report = sync.refit()
            except DprimsError as error:
                leads = leads and not isinstance(error, StaleLeader)
                continue
            finally:
                for shard in generation.dead_shards:
                    generation.restart(shard)
            assert report.version > version, f"{fault} at {rank.name}"
            version = report.version
            for shard in report.members:
                for worker in range(generation.worker_group.sizes[shard]):
                    assert call(generation, shard, "checksums", worker=worker) == known[-1], (
                        f"{fault} at {rank.name}"
                    )
        for side in (policy, generation):
            for process in side._ranks if isinstance(side._ranks, list) else side._ranks.values():
                process.call_now("arm").result(LIMIT_S)
        if not leads:
            sync.init_communicator(timeout=LIMIT_S)
        until(lambda: sync.refit().members == (0, 1, 2))
        assert {tuple(call(generation, shard, "checksums")) for shard in range(3)} == {tuple(known[-1])}
    finally:
        generation.close()
        policy.close()
        sync.shutdown()


def test_syncs_under_random_faults(private_redis: RedisServer) -> None:
    sync_at_random(15, 7, private_redis)


@pytest.mark.chaos
@pytest.mark.timeout(1800)
def test_five_hundred_syncs_under_random_faults(private_redis: RedisServer) -> None:
    sync_at_random(500, int(os.environ.get("DPRIMS_CHAOS_SEED", "1")), private_redis)
