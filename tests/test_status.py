"""What ``dprims.status`` sees of locks, rosters and refits, on every service; and what a leader publishes."""

from __future__ import annotations

import contextlib
import io
import json
import threading
import time
import uuid
from collections.abc import Iterator
from typing import Any

import pytest
from rich.console import Console

import dprims
from dprims.backend import Backend
from dprims.cli._status_text import render
from dprims.exceptions import BackendUnavailable, RefitAborted, RefitError
from dprims.status import FleetView, Observer, Snapshot, bare
from dprims.synchronizer import CollectiveWeightSynchronizer
from dprims.synchronizer._keys import current_key, next_key
from dprims.synchronizer._record import encode_record, record_key
from dprims.testing.faults import Fault, FaultInjector
from dprims.testing.threads import ThreadGeneration, ThreadPolicy
from dprims.testing.weights import ToySink, ToySource

from .helpers.services import LIMIT_S, Service, in_thread, until
from .test_status_record import RECORD

FLEET = "fleet"


@pytest.fixture
def namespace() -> str:
    return f"status-{uuid.uuid4().hex[:12]}"


@pytest.fixture
def backend(service: Service) -> Iterator[Backend]:
    with dprims.connect(service.url) as backend:
        yield backend


@contextlib.contextmanager
def fleet_on(url: str, namespace: str, *, shards: int = 2, **options: Any) -> Iterator[Any]:
    """A leader with one trainer and *shards* shards as threads, built and not yet synced."""
    policy = ThreadPolicy(ToySource, stages=1)
    generation = ThreadGeneration(ToySink, 1, shard_sizes=(1,) * shards, train_world_size=1)
    settings = {"roster_ttl_s": 5.0, "refit_timeout_s": 60.0, "fleet": FLEET, **options}
    sync = CollectiveWeightSynchronizer(policy, generation, backend=url, namespace=namespace, **settings)
    try:
        sync.init_communicator(timeout=LIMIT_S)
        yield sync
    finally:
        generation.close()
        policy.close()
        sync.shutdown()


def seen(observer: Observer, what: str, condition: Any) -> FleetView:
    """The fleet, once it satisfies *condition*: its record is written after the call has returned."""
    found: list[FleetView] = []

    def look() -> bool:
        found[:] = observer.look().fleets
        return bool(found) and found[0].record is not None and bool(condition(found[0]))

    until(look, what)
    return found[0]


def test_an_empty_backend(backend: Backend, namespace: str) -> None:
    snapshot = Observer(backend, namespace).look()
    assert (snapshot.locks, snapshot.rosters, snapshot.fleets, snapshot.notes) == ((), (), (), ())
    (fleet,) = Observer(backend, namespace, fleets=["asked for"]).look().fleets
    assert (fleet.name, fleet.leader, fleet.version, fleet.record, fleet.shards) == (
        "asked for",
        None,
        None,
        None,
        (),
    )
    assert fleet.notes == ("no leader has published a record here", "nobody leads: the leader lock is free")


def test_locks_and_their_waiters_in_order(backend: Backend, service: Service, namespace: str) -> None:
    lock = dprims.DistributedLock("a/b c", backend, namespace=namespace, ttl=20.0, label="first")
    other = dprims.DistributedLock("free", backend, namespace=namespace, ttl=20.0)
    grant = lock.acquire()
    assert grant is not None
    observer = Observer(backend, namespace)
    with contextlib.ExitStack() as stack:
        waiting = []
        for place in range(3):
            there = stack.enter_context(dprims.connect(service.url))
            waiter = dprims.DistributedLock("a/b c", there, namespace=namespace, ttl=20.0, label=f"w{place}")

            def hold(waiter: dprims.DistributedLock = waiter) -> None:
                with waiter:
                    pass

            waiting.append(in_thread(hold))
            until(lambda count=place + 1: len(lock.waiters()) == count, "a waiter")
        with other:
            pass
        (seen,) = observer.look().locks
        assert (seen.name, seen.holder.label, seen.holder.token) == ("a/b c", "first", grant.token)
        assert [waiter.label for waiter in seen.waiters] == ["w0", "w1", "w2"]
        assert 0 <= seen.held_s < LIMIT_S
        assert seen.silent_s is None or 0 <= seen.silent_s <= 21.0
        grant.release()
        for done in waiting:
            done()
    assert observer.look().locks == ()


def test_a_lock_that_changes_hands_is_held_from_then_on(
    backend: Backend, service: Service, namespace: str
) -> None:
    observer = Observer(backend, namespace)
    lock = dprims.DistributedLock("x", backend, namespace=namespace, ttl=20.0)
    with lock:
        pass
    observer.look()
    asked = time.monotonic()
    with lock:
        first = observer.look().locks[0].held_s
        second = observer.look().locks[0].held_s
        assert 0 <= first <= second <= time.monotonic() - asked


def test_the_age_of_heartbeats_is_learned_by_looking(service: Service, namespace: str) -> None:
    """At once where the server knows it; on a TCPStore after a beat has come between two looks."""
    with dprims.connect(service.url) as holder, dprims.connect(service.url) as looker:
        dprims.Roster("r", holder, namespace=namespace, ttl=service.ttl).join("a")
        observer = Observer(looker, namespace)

        def age() -> float | None:
            return observer.look().rosters[0].members[0].silent_s

        if service.kind != "tcpstore":
            assert age() is not None
        until(lambda: age() is not None, "a heartbeat that is seen")
        assert 0 <= (age() or 0.0) <= service.ttl * 1.25 + 1


def test_rosters_are_sorted_by_number(backend: Backend, namespace: str) -> None:
    roster = dprims.Roster("r", backend, namespace=namespace, ttl=20.0)
    grants = {name: roster.join(name, {"n": name}) for name in ("10", "9", "b/c", "a")}
    dprims.Roster("other", backend, namespace=namespace, ttl=20.0).join("x")
    snapshot = Observer(backend, namespace).look()
    assert snapshot.locks == (), "an entry of a roster is no lock to people"
    assert [one.name for one in snapshot.rosters] == ["other", "r"]
    members = snapshot.rosters[1].members
    assert [one.name for one in members] == ["9", "10", "a", "b/c"]
    assert [one.incarnation for one in members] == [grants[one.name].token for one in members]
    assert members[0].payload == {"n": "9"}
    assert snapshot.fleets == (), "a roster alone is no fleet"


@pytest.mark.slow
def test_a_fleet_from_its_build_to_its_end(backend: Backend, service: Service, namespace: str) -> None:
    observer = Observer(backend, namespace, fleets=[FLEET])  # to see what is left of it, too
    with fleet_on(service.url, namespace) as sync:
        fleet = seen(observer, "the build", lambda fleet: fleet.record.event == "built")
        assert (fleet.name, fleet.version, fleet.count("returning"), fleet.trainers) == (FLEET, 0, 2, (0,))
        assert fleet.leader is not None
        assert fleet.leader.token == sync.epoch.term

        report = sync.sync_weights()
        fleet = seen(observer, "the first sync", lambda fleet: fleet.record.syncs == 1)
        assert (fleet.version, fleet.record.epoch, fleet.record.stale) == (1, report.epoch, False)
        assert [shard.state for shard in fleet.shards] == ["serving", "serving"]
        assert [shard.seats for shard in fleet.shards] == [(1,), (2,)]
        sync_seen = fleet.record.last_sync
        assert (sync_seen.nbytes, sync_seen.version) == (report.nbytes, 1)
        assert sync_seen.seconds == pytest.approx(report.seconds, abs=1e-6)

        began = time.monotonic()
        sync.generation.workers[2].faults = FaultInjector([Fault(action="raise", bucket=0)])
        with pytest.raises(RefitAborted):
            sync.sync_weights()
        fleet = seen(observer, "the failure", lambda fleet: fleet.record.outage is not None)
        assert (fleet.version, fleet.record.event, fleet.record.failures) == (1, "failed", 1)
        assert (fleet.record.outage.seconds, fleet.record.outage.failures) == (None, 1)
        assert "InjectedFault" in fleet.record.outage.why
        assert "InjectedFault" in fleet.record.last_error

        report = sync.refit()
        took = time.monotonic() - began
        fleet = seen(observer, "the recovery", lambda fleet: fleet.record.last_outage is not None)
        assert fleet.record.outage is None
        assert report.seconds < fleet.record.last_outage.seconds < took
        assert (fleet.version, fleet.record.syncs, fleet.record.failures) == (2, 2, 1)

        sync.refit(lambda: [1])
        fleet = seen(observer, "a shard that was left out", lambda fleet: fleet.version == 3)
        assert fleet.shards[1].state in ("absent", "returning")
        assert fleet.shards[1].reason == "excluded"
        assert fleet.record.members == (0,)
        sync.generation.workers[1].close()
        fleet = seen(observer, "a lost shard", lambda fleet: fleet.count("lost") == 1)
        assert (fleet.shards[0].missing, fleet.shards[0].reason) == ((1,), "left the roster")
    fleet = seen(observer, "the end", lambda fleet: fleet.leader is None)
    assert "nobody leads: the leader lock is free" in fleet.notes
    assert fleet.trainers_missing == (0,)


@pytest.mark.slow
@pytest.mark.parametrize("service", ["redis"], indirect=True)
def test_a_successor_takes_over_the_story_and_the_cell(
    backend: Backend, service: Service, namespace: str
) -> None:
    observer = Observer(backend, namespace)
    with fleet_on(service.url, namespace) as first:
        first.generation.workers[1].faults = FaultInjector([Fault(action="raise", bucket=0)])
        with pytest.raises(RefitAborted):
            first.sync_weights()
        first.refit()
        old = seen(observer, "an outage", lambda fleet: fleet.record.last_outage is not None).record
        term, key = first.epoch.term, record_key(f"{namespace}/{FLEET}")
    with fleet_on(service.url, namespace) as second:
        fleet = seen(observer, "the successor's record", lambda fleet: fleet.record.epoch.term > term)
        assert fleet.record.carried
        assert (fleet.record.last_outage, fleet.record.last_sync) == (old.last_outage, old.last_sync)
        assert (fleet.record.syncs, fleet.record.rebuilds) == (0, 1)
        assert backend.write_fenced(key, b"late", term) == second.epoch.term, "an old leader could overwrite"
        second.sync_weights()
        fleet = seen(observer, "its own sync", lambda fleet: fleet.record.syncs == 1)
        assert not fleet.record.carried
        assert fleet.record.last_outage == old.last_outage


class Stuck(dprims.connect("memory://x").__class__):  # type: ignore[misc]
    """A memory backend that keeps whoever writes a status record waiting."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.let_go, self.came = threading.Event(), threading.Event()

    def compare_and_set(self, key: str, expected: bytes | None, value: bytes) -> bytes | None:
        if key.endswith("refit/status"):
            self.came.set()
            self.let_go.wait(LIMIT_S)
            raise BackendUnavailable("no answer")
        return super().compare_and_set(key, expected, value)


@pytest.mark.slow
def test_a_refit_does_not_wait_for_its_record(namespace: str, caplog: pytest.LogCaptureFixture) -> None:
    backend = Stuck(f"memory://{namespace}")
    with fleet_on(backend, namespace) as sync:  # type: ignore[arg-type]
        assert backend.came.wait(LIMIT_S)
        for version in (1, 2, 3):
            assert sync.sync_weights().version == version
        sync.shutdown()
        assert not backend.let_go.is_set(), "a record was waited for"
        backend.let_go.set()
    until(lambda: "was not written" in caplog.text, "a line that says so")


def test_a_record_of_another_schema_is_said_and_not_shown(
    service: Service, backend: Backend, namespace: str
) -> None:
    backend.write_fenced(record_key(f"{namespace}/{FLEET}"), b'{"schema": 99}', 5)
    (fleet,) = Observer(backend, namespace, fleets=[FLEET]).look().fleets
    assert fleet.record is None
    assert fleet.notes[0] == "status record of schema 99; this dprims reads 1"


@pytest.mark.parametrize(
    "cell",
    [b"garbage", b"", b"x:1", b"5:{", b"5:[]", b"5:{}", b"5:\xff", b"5:" + b"[" * 50_000, b"5:[1e999,1]"],
    ids=range(9),
)
@pytest.mark.parametrize("service", ["redis"], indirect=True)
def test_cells_of_another_program_are_said_and_not_shown(
    backend: Backend, namespace: str, cell: bytes
) -> None:
    with dprims.DistributedLock("a", backend, namespace=namespace):
        for key in (record_key, current_key, next_key):
            backend.compare_and_set(key(f"{namespace}/refit"), None, cell)
        snapshot = Observer(backend, namespace).look()
    (fleet,) = snapshot.fleets
    assert (fleet.record, fleet.version, fleet.reserved) == (None, None, None)
    assert len([note for note in fleet.notes if "expected" in note or "not a status record" in note]) == 3
    assert [lock.name for lock in snapshot.locks] == ["a"]
    json.dumps(snapshot.to_json())


@pytest.mark.parametrize("service", ["redis"], indirect=True)
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("at", "noon"),
        ("at", 10**400),
        ("counts", [1, None, 0]),
        ("train_world_size", -1),
        ("train_world_size", 10**15),
        ("shard_sizes", [["x", 2]]),
        ("absent", {}),
        ("last_error", [5, None]),
        ("outage", {"began_at": None, "seconds": None, "failures": 1, "why": ""}),
        ("last_outage", {"began_at": 1e300, "seconds": None, "failures": 1, "why": ""}),
    ],
    ids=range(10),
)
def test_a_record_with_a_broken_field_breaks_no_view(
    backend: Backend, namespace: str, field: str, value: Any
) -> None:
    record = json.loads(encode_record(RECORD))
    backend.write_fenced(record_key(f"{namespace}/refit"), json.dumps({**record, field: value}).encode(), 5)
    snapshot = Observer(backend, namespace).look()
    (fleet,) = snapshot.fleets
    assert (fleet.record is None) == (field not in ("absent", "last_outage"))
    assert fleet.record or field in fleet.notes[0] or "status record" in fleet.notes[0]
    json.dumps(snapshot.to_json())
    Console(file=io.StringIO()).print(render(snapshot))


@pytest.mark.slow
@pytest.mark.parametrize("service", ["redis"], indirect=True)
def test_the_json_is_json_and_has_the_promised_fields(
    backend: Backend, service: Service, namespace: str
) -> None:
    observer = Observer(backend, namespace)
    with fleet_on(service.url, namespace) as sync:
        sync.sync_weights()
        seen(observer, "a sync", lambda fleet: fleet.record.syncs == 1)
        snapshot = observer.look()
    data = json.loads(json.dumps(snapshot.to_json()))
    assert data["schema"] == 1
    assert shape(data) == SHAPE
    fleet = data["fleets"][0]
    assert fleet["members"] == [0, 1]
    assert fleet["epoch"].partition(".")[0] == fleet["leader"]["token"] == data["locks"][0]["holder"]["token"]


def shape(value: Any) -> Any:
    """What kind of value stands where: a list has the shape of its first item."""
    if isinstance(value, dict):
        return {key: shape(one) for key, one in value.items()}
    if isinstance(value, list):
        return [shape(value[0])] if value else []
    return "null" if value is None else "number" if type(value) in (int, float) else type(value).__name__


OWNER = {
    "host": "str",
    "pid": "number",
    "thread": "str",
    "rank": "null",
    "since": "number",
    "label": "str",
    "token": "str",
}
SHAPE = {
    "schema": "number",
    "url": "str",
    "namespace": "str",
    "at": "number",
    "took_s": "number",
    "locks": [{"name": "str", "holder": OWNER, "held_s": "number", "silent_s": "number", "waiters": []}],
    "rosters": [
        {
            "name": "str",
            "members": [
                {
                    "name": "str",
                    "incarnation": "str",
                    "owner": OWNER,
                    "payload": "null",
                    "in_s": "number",
                    "silent_s": "number",
                }
            ],
        }
    ],
    "fleets": [
        {
            "name": "str",
            "leader": OWNER,
            "standby": "number",
            "version": "number",
            "reserved": "number",
            "epoch": "str",
            "digest": "str",
            "stale": "bool",
            "event": "str",
            "age_s": "number",
            "members": ["number"],
            "absent": {},
            "trainers": {"seats": ["number"], "missing": []},
            "shards": [
                {"shard": "number", "state": "str", "seats": ["number"], "missing": [], "reason": "str"}
            ],
            "syncs": "number",
            "failures": "number",
            "rebuilds": "number",
            "outage": "null",
            "last_outage": "null",
            "last_sync": {
                "at": "number",
                "version": "number",
                "epoch": "str",
                "nbytes": "number",
                "seconds": "number",
                "wire_s": "number",
                "gb_per_s": "number",
                "rebuilt": "bool",
                "phases": dict.fromkeys(
                    ("prepare", "reserve", "transfer", "decide", "commit", "publish"), "number"
                ),
            },
            "last_error": "null",
            "last_error_at": "null",
            "carried": "bool",
            "notes": [],
        }
    ],
    "notes": [],
}


class Unlisted(dprims.connect("memory://x").__class__):  # type: ignore[misc]
    """A backend of a third party that cannot list its locks."""

    def held(self, prefix: str) -> list[Any]:
        raise NotImplementedError


def test_a_backend_that_cannot_list_is_said(namespace: str) -> None:
    snapshot: Snapshot = Observer(Unlisted(f"memory://{namespace}"), namespace).look()
    assert snapshot.notes == (
        f"<Unlisted memory://{namespace}> cannot list locks: neither they nor the rosters are shown",
    )


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://user:secret@h:6379/3?password=x", "redis://h:6379/3"),
        ("etcds://u:p@h1:1,h2:2/pre?key=/f", "etcds://h1:1,h2:2/pre"),
        ("tcpstore://[::1]:5?timeout=3", "tcpstore://[::1]:5"),
        ("unix:///run/redis.sock", "unix:///run/redis.sock"),
    ],
)
def test_a_url_is_shown_without_secrets(url: str, shown: str) -> None:
    assert bare(url) == shown


def test_names_are_checked() -> None:
    with dprims.connect("memory://x") as backend:
        with pytest.raises(dprims.BackendMisconfigured, match="namespace is ''"):
            Observer(backend, "")
        with pytest.raises(RefitError, match="expected no slash"):
            Observer(backend, fleets=["a/b"])
