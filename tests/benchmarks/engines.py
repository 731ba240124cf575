"""What an engine costs: Ray's calls against the local engine's, and how soon a roster shows who is there.

    pytest -s tests/benchmarks/engines.py

The weights take the same way in both engines; what differs is the way of the calls. The two fleets live side
by side and take turns, so that both meet the same machine.
"""

from __future__ import annotations

import os
import statistics
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import ray

import dprims
from dprims.engines.local import LocalGeneration, LocalPolicy
from dprims.engines.ray import RayGeneration, RayPolicy
from dprims.synchronizer import CollectiveWeightSynchronizer
from dprims.testing.servers import RedisServer
from dprims.testing.weights import ToySink, ToySource

pytestmark = pytest.mark.timeout(600)

LIMIT_S = 120.0
LAYERS, WIDTH = 16, 1024  # 64 MiB and 64 KiB of biases
ROUNDS = 31
PLAIN = {"worker_niceness": 0}  # the local engine's processes are not at nice 15 either
OVERHEAD_S = 0.020
"""The most that a clean sync may take longer on Ray."""
MEMBERS = 64
DISCOVERY_S = 1.0


def start(
    stack: ExitStack, shards: int, policy_of: Any, generation_of: Any, **more: Any
) -> CollectiveWeightSynchronizer:
    policy = policy_of(ToySource, LAYERS, WIDTH, **more)
    stack.callback(policy.close)
    generation = generation_of(ToySink, 1, LAYERS, WIDTH, shard_sizes=(1,) * shards, **more)
    stack.callback(generation.close)
    sync = CollectiveWeightSynchronizer(policy, generation, bucket_bytes=4 << 20, roster_ttl_s=20.0)
    stack.callback(sync.shutdown)
    sync.init_communicator(timeout=LIMIT_S)
    return sync


@pytest.mark.parametrize("shards", [1, 2])
def test_ray_adds_little_to_a_clean_sync(shards: int) -> None:
    """64 MB over gloo: the median difference of syncs that follow each other."""
    seconds: dict[str, list[float]] = {"local": [], "ray": []}
    calls: dict[str, list[float]] = {"local": [], "ray": []}
    with ExitStack() as stack:
        stack.callback(ray.shutdown)
        ray.init(
            "local", include_dashboard=False, log_to_driver=False, logging_level="error", _system_config=PLAIN
        )
        fleets = {
            "local": start(stack, shards, LocalPolicy, LocalGeneration),
            "ray": start(stack, shards, RayPolicy, RayGeneration, options={"num_cpus": 0}),
        }
        for sync in fleets.values():
            sync.sync_weights()
        for _ in range(ROUNDS):
            for name, sync in fleets.items():
                began = time.monotonic()
                report = sync.sync_weights()
                seconds[name].append(time.monotonic() - began)
                assert report.members == tuple(range(shards))
                calls[name].append(seconds[name][-1] - report.wire_s)
    print()
    for name, taken in seconds.items():
        whole, beside = statistics.median(taken), statistics.median(calls[name])
        print(f"{name:6} sync {whole * 1e3:6.1f} ms   beside the wire {beside * 1e3:6.1f} ms")
    added = statistics.median(b - a for a, b in zip(seconds["local"], seconds["ray"], strict=True))
    load = os.getloadavg()[0]
    print(
        f"{shards} shards: Ray adds {added * 1e3:.1f} ms (bound {OVERHEAD_S * 1e3:.0f} ms; load {load:.1f})"
    )
    assert added < OVERHEAD_S


@pytest.fixture(params=["redis", "tcpstore"])
def url(request: pytest.FixtureRequest) -> Iterator[str]:
    if request.param == "redis":
        with RedisServer() as server:
            yield server.url
    else:
        with dprims.connect("tcpstore://127.0.0.1:0?serve=1") as served:
            yield served.url


def test_a_fleet_of_64_finds_itself(url: str) -> None:
    """All join at once, through eight connections, and one that looks on has seen all of them."""
    seconds, reads = [], []
    for turn in range(7):
        name = f"fleet-{turn}"
        with ExitStack() as stack:
            backends = [stack.enter_context(dprims.connect(url)) for _ in range(8)]
            rosters = [dprims.Roster(name, backend, ttl=20.0) for backend in backends]
            looks = dprims.Roster(name, stack.enter_context(dprims.connect(url)), ttl=20.0)
            looks.members()
            began = time.monotonic()
            threads = [
                threading.Thread(target=rosters[rank % 8].join, args=(f"rank-{rank}", {"port": rank}))
                for rank in range(MEMBERS)
            ]
            for thread in threads:
                thread.start()
            while len(looks.members()) < MEMBERS:
                assert time.monotonic() - began < LIMIT_S
            seconds.append(time.monotonic() - began)
            for thread in threads:
                thread.join(LIMIT_S)
            began = time.monotonic()
            looks.members()
            reads.append(time.monotonic() - began)
            for roster in rosters:
                roster.leave()
    found = statistics.median(seconds)
    read = statistics.median(reads)
    print(f"\n{url.partition(':')[0]:9} {MEMBERS} members joined and seen in {found * 1e3:.0f} ms")
    print(
        f"{'':9} all of them read again in {read * 1e3:.1f} ms (medians of 7; load {os.getloadavg()[0]:.1f})"
    )
    assert found < DISCOVERY_S
