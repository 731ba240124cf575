"""What metrics and the status record cost, as ratios within one run.

    pytest -s tests/benchmarks/metrics.py

Both are measured in turns (with, without, with, ...), so that what else the machine does hits both alike.
"""

from __future__ import annotations

import statistics
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import closing

import pytest
from prometheus_client import CollectorRegistry

import dprims
from dprims import metrics
from dprims.engines.local import LocalGeneration, LocalPolicy
from dprims.synchronizer import CollectiveWeightSynchronizer
from dprims.synchronizer.chronicle import Publisher
from dprims.testing.servers import RedisServer
from dprims.testing.weights import ToySink, ToySource

ROUNDS = 15


def in_turns(calls: dict[str, Callable[[], float]], rounds: int) -> dict[str, float]:
    """The seconds of each, measured one after the other, again and again: of the least disturbed quarter."""
    taken: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            taken[name].append(call())
    return {name: statistics.median(sorted(seconds)[: rounds // 4]) for name, seconds in taken.items()}


@pytest.fixture
def quiet() -> Iterator[None]:
    metrics.disable()
    yield
    metrics.disable()


def test_metrics_that_are_off_cost_a_lock_nothing(quiet: None) -> None:
    """A look at one variable, against an acquire and release in memory: the quickest lock there is."""
    with dprims.connect(f"memory://{uuid.uuid4().hex}") as backend:
        lock = dprims.DistributedLock("x", backend)

        def locked(count: int = 300) -> float:
            began = time.perf_counter()
            for _ in range(count):
                with lock:
                    pass
            return (time.perf_counter() - began) / count

        def looked(count: int = 30_000) -> float:
            began = time.perf_counter()
            for _ in range(count):
                if metrics.recorder is not None:
                    raise AssertionError("metrics are on")
            return (time.perf_counter() - began) / count

        def on() -> float:
            metrics.enable(CollectorRegistry())
            try:
                return locked()
            finally:
                metrics.disable()

        locked()
        took = in_turns({"look": looked, "off": locked, "on": on}, ROUNDS)
    looks = 3  # in acquire, and twice in release
    print(
        f"\na look {took['look'] * 1e9:.0f} ns; a lock in memory {took['off'] * 1e6:.1f} us with metrics "
        f"off, {took['on'] * 1e6:.1f} us with metrics on"
    )
    assert looks * took["look"] < 0.02 * took["off"]
    assert took["on"] < 2 * took["off"]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", ["redis", "tcpstore"])
def test_the_record_does_not_slow_a_sync(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Syncs whose record is published, against syncs whose record is dropped."""
    publish = Publisher.publish
    with (
        RedisServer() as server,
        closing(LocalPolicy(ToySource, stages=1)) as policy,
        closing(LocalGeneration(ToySink, 1, shard_sizes=(1, 1), train_world_size=1)) as generation,
        CollectiveWeightSynchronizer(
            policy, generation, backend=server.url if kind == "redis" else None, roster_ttl_s=10.0
        ) as sync,
    ):
        sync.init_communicator()
        sync.sync_weights()

        def timed(record: bool) -> Callable[[], float]:
            def many() -> float:
                with monkeypatch.context() as patch:
                    if not record:
                        patch.setattr(Publisher, "publish", lambda self, record: None)
                    began = time.perf_counter()
                    for _ in range(20):  # some begin while the record of the one before is written
                        sync.sync_weights()
                    return (time.perf_counter() - began) / 20

            return many

        took = in_turns({"with": timed(True), "without": timed(False)}, 16)
    assert Publisher.publish is publish
    print(
        f"\n{kind}: a sync {took['with'] * 1e3:.2f} ms with its record, {took['without'] * 1e3:.2f} without"
    )
    assert took["with"] < 1.05 * took["without"]
