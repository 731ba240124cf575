"""Metrics of locks and refits: real locks, a real refit with a killed shard, a real registry and a scrape."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
import urllib.request
import uuid
from collections.abc import Iterator
from contextlib import closing

import prometheus_client
import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

import dprims
from dprims import metrics
from dprims.engines.local import LocalGeneration, LocalPolicy
from dprims.exceptions import PeerLost
from dprims.synchronizer import CollectiveWeightSynchronizer
from dprims.testing.faults import Fault
from dprims.testing.servers import RedisServer
from dprims.testing.weights import ToySink, ToySource

from .helpers.services import LIMIT_S, Service, in_thread, until


@pytest.fixture
def registry() -> Iterator[CollectorRegistry]:
    registry = CollectorRegistry()
    metrics.enable(registry)
    yield registry
    metrics.disable()
    assert list(registry.collect()) == [], "disable left metrics behind"


@pytest.fixture
def name() -> str:
    return f"metrics {uuid.uuid4().hex}"


def value(registry: CollectorRegistry, sample: str, **labels: str) -> float:
    return registry.get_sample_value(f"dprims_{sample}", labels) or 0.0


def scrape(url: str) -> dict[str, dict[tuple[tuple[str, str], ...], float]]:
    """The samples of a page by name and labels."""
    with urllib.request.urlopen(url, timeout=LIMIT_S) as answer:
        page = answer.read().decode()
    found: dict[str, dict[tuple[tuple[str, str], ...], float]] = {}
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            found.setdefault(sample.name, {})[tuple(sorted(sample.labels.items()))] = sample.value
    return found


def test_waits_holds_and_hand_overs(service: Service, registry: CollectorRegistry, name: str) -> None:
    at = {"backend": service.kind, "use": "lock"}
    with dprims.connect(service.url) as one, dprims.connect(service.url) as other:
        first = dprims.DistributedLock(name, one, ttl=5.0)
        second = dprims.DistributedLock(name, other, ttl=5.0)
        first.acquire()
        assert value(registry, "lock_wait_seconds_count", outcome="granted", **at) == 1
        assert second.acquire(0) is None
        assert value(registry, "lock_wait_seconds_count", outcome="timeout", **at) == 1
        assert value(registry, "lock_hold_seconds_count", **at) == 0
        entered = threading.Event()

        def work() -> None:
            with second:
                entered.set()

        done = in_thread(work)
        until(first.waiters, "a waiter")
        first.release()
        done()
        assert entered.is_set()
    assert value(registry, "lock_wait_seconds_count", outcome="granted", **at) == 2
    assert value(registry, "lock_hold_seconds_count", **at) == 2
    assert value(registry, "lock_release_seconds_count", **at) == 2
    assert value(registry, "lock_hand_over_seconds_count", **at) == 1
    hand_over = value(registry, "lock_hand_over_seconds_sum", **at)
    waited = value(registry, "lock_wait_seconds_sum", outcome="granted", **at)
    assert 0 < hand_over < waited
    assert value(registry, "lock_losses_total", **at) == 0


def test_a_wait_that_fails(private_redis: RedisServer, registry: CollectorRegistry, name: str) -> None:
    with dprims.connect(f"{private_redis.url}?timeout=0.3") as backend:
        lock = dprims.DistributedLock(name, backend)
        private_redis.kill()
        with pytest.raises(dprims.BackendUnavailable):
            lock.acquire()
    sample = value(registry, "lock_wait_seconds_count", backend="redis", use="lock", outcome="failed")
    assert sample == 1


def test_a_loss_counts_once_however_it_is_learned(
    service: Service, registry: CollectorRegistry, name: str
) -> None:
    at = {"backend": service.kind, "use": "lock"}
    told = threading.Event()
    with dprims.connect(service.url) as backend:
        watched = dprims.DistributedLock(name, backend, ttl=service.ttl, on_lost=lambda _: told.set())
        grant = watched.acquire()
        assert grant is not None
        assert backend.evict(f"dprims/{name}", grant.token)
        assert told.wait(LIMIT_S)
        with pytest.raises(dprims.LockLost):
            grant.release()
        assert value(registry, "lock_losses_total", **at) == 1
        assert value(registry, "lock_hold_seconds_count", **at) == 1

        unwatched = dprims.DistributedLock(f"{name} b", backend, ttl=1000.0).acquire()
        assert unwatched is not None
        backend.evict(f"dprims/{name} b", unwatched.token)
        with pytest.raises(dprims.LockLost):  # long before the next heartbeat
            unwatched.release()
    assert value(registry, "lock_losses_total", **at) == 2


def test_renewals_and_rosters(private_redis: RedisServer, registry: CollectorRegistry, name: str) -> None:
    def renewals(outcome: str) -> float:
        return value(registry, "lock_renewals_total", backend="redis", outcome=outcome)

    with dprims.connect(f"{private_redis.url}?timeout=0.3") as backend:
        roster = dprims.Roster(name, backend, ttl=0.6)
        roster.join("a")
        roster.join("b")
        until(lambda: renewals("ok") >= 4, "two beats of two entries")
        assert (
            value(registry, "lock_wait_seconds_count", backend="redis", use="roster", outcome="granted") == 2
        )
        private_redis.kill()
        until(lambda: renewals("failed") >= 2, "beats that fail")
        until(
            lambda: value(registry, "lock_losses_total", backend="redis", use="roster") == 2,
            "two lapsed entries",
        )


def test_enabling_twice_moves_or_stays(registry: CollectorRegistry) -> None:
    first = metrics.recorder
    assert metrics.enable(registry) is metrics.enable() is first
    other = CollectorRegistry()
    assert metrics.enable(other) is metrics.recorder is not first
    assert list(registry.collect()) == []
    assert metrics.enable(registry).registry is registry
    assert list(other.collect()) == []


def test_nothing_is_imported_or_counted_until_it_is_enabled(name: str) -> None:
    code = f"""
import sys, dprims
with dprims.connect("memory://x") as backend, dprims.DistributedLock({name!r}, backend):
    pass
from dprims import metrics
assert metrics.recorder is None
assert "prometheus_client" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=LIMIT_S)


def test_without_the_extra_the_error_names_it() -> None:
    code = """
import sys
sys.modules["prometheus_client"] = None
import dprims, dprims.metrics
try:
    dprims.metrics.enable()
except dprims.MissingExtra as error:
    print(error)
"""
    ran = subprocess.run(
        [sys.executable, "-c", code], check=True, timeout=LIMIT_S, capture_output=True, text=True
    )
    assert ran.stdout == "prometheus_client is not installed; pip install 'dprims[metrics]'\n"


# -- refits ---------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_refit_that_loses_a_shard_is_scraped(
    redis_server: RedisServer, registry: CollectorRegistry
) -> None:
    fleet = f"fleet-{uuid.uuid4().hex[:8]}"
    server, thread = prometheus_client.start_http_server(0, "127.0.0.1", registry=registry)
    url = f"http://127.0.0.1:{server.server_port}/metrics"
    here = (("fleet", fleet),)

    def metric(sample: str, *labels: tuple[str, str]) -> float | None:
        return scrape(url).get(f"dprims_{sample}", {}).get(tuple(sorted((*here, *labels))))

    with (
        closing(LocalPolicy(ToySource, stages=1)) as policy,
        closing(LocalGeneration(ToySink, 1, shard_sizes=(1, 1, 1), train_world_size=1)) as generation,
        CollectiveWeightSynchronizer(
            policy, generation, backend=redis_server.url, fleet=fleet, refit_timeout_s=60.0, roster_ttl_s=3.0
        ) as sync,
    ):
        sync.init_communicator(timeout=LIMIT_S)
        assert (metric("refit_version"), metric("refit_stale"), metric("refit_rebuilds_total")) == (0, 1, 1)
        report = sync.sync_weights()
        assert metric("refits_total", ("outcome", "ok")) == 1
        assert metric("refit_bytes_total") == report.nbytes
        assert metric("refit_seconds_count") == 1
        assert metric("refit_seconds_sum") == pytest.approx(report.seconds)
        assert metric("refit_gb_per_second") == pytest.approx(report.gb_per_s)
        assert (metric("refit_version"), metric("refit_stale"), metric("refit_failing")) == (1, 0, None)
        assert (metric("refit_shards"), metric("refit_absent_shards")) == (3, 0)
        assert metric("refit_epoch_term") == sync.epoch.term

        sync.mark_stale()
        assert metric("refit_stale") == 1
        generation.process(1).call_now("arm", Fault(action="kill", phase="bucket", bucket=0)).result(LIMIT_S)
        began = time.monotonic()
        with pytest.raises(PeerLost):
            sync.sync_weights()
        assert metric("refits_total", ("outcome", "PeerLost")) == 1
        assert metric("refit_failing") == 1
        assert metric("refit_outage_seconds_count") is None
        report = sync.refit()
        assert report.members == (0, 2)
        assert metric("refit_failing") == 0
        assert metric("refit_outage_seconds_count") == 1
        outage = metric("refit_outage_seconds_sum")
        assert outage is not None
        assert report.seconds < outage < time.monotonic() - began
        assert (metric("refit_version"), metric("refit_absent_shards")) == (2, 1)
        assert metric("refit_epoch_build") == sync.epoch.build == 2
        assert metric("refit_rebuilds_total") == 2
        assert metric("refit_last_success_timestamp_seconds") == pytest.approx(time.time(), abs=LIMIT_S)

        generation.restart(1)
        sync.refit()
        assert (metric("refit_absent_shards"), metric("refit_version")) == (0, 3)
    assert {key for samples in scrape(url).values() for labels in samples for key, _ in labels} == {
        "backend",
        "fleet",
        "le",
        "outcome",
        "use",
    }
    server.shutdown()
    server.server_close()
    thread.join(LIMIT_S)
