"""The etcd backend where it differs from the others: URLs, keys, leases, and what they cost."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

import dprims
from dprims.backends._etcd_url import EtcdUrl
from dprims.backends.etcd import EtcdBackend
from dprims.exceptions import BackendMisconfigured, BackendUnavailable
from dprims.session import Session
from dprims.testing.servers import EtcdServer

from .helpers.services import until

LIMIT = 30.0


@pytest.fixture
def backend(etcd_server: EtcdServer) -> Iterator[EtcdBackend]:
    with dprims.connect(etcd_server.url) as backend:
        yield backend


def metric(server: EtcdServer, name: str) -> int:
    """The sum of what the server says under *name*, with or without labels."""
    with urllib.request.urlopen(f"http://127.0.0.1:{server.port}/metrics", timeout=LIMIT) as reply:
        found = re.findall(rf"^{name}(?:{{.*}})? (\S+)$", reply.read().decode(), re.MULTILINE)
    return int(sum(map(float, found)))


def calls(server: EtcdServer, method: str) -> int:
    return metric(server, f'grpc_server_started_total{{grpc_method="{method}".*}}')


def live_leases(server: EtcdServer) -> int:
    return metric(server, "etcd_debugging_lease_granted_total") - metric(
        server, "etcd_debugging_lease_revoked_total"
    )


def keys(server: EtcdServer) -> int:
    return metric(server, "etcd_debugging_mvcc_keys_total")


# -- the stubs -------------------------------------------------------------------------------------


def test_loading_the_stubs_changes_nothing_for_others() -> None:
    """The matrix in tests/venvs goes through the versions; this is the one at hand."""
    program = """
import sys
from dprims.backends._etcd3_shim import load_etcdrpc
rpc = load_etcdrpc()
assert not [finder for finder in sys.meta_path if "dprims" in type(finder).__module__]
import etcd3, etcd3.etcdrpc
assert etcd3.etcdrpc is rpc is load_etcdrpc()
assert rpc.NOSPACE == rpc.AlarmType.Value("NOSPACE") == 1
request = rpc.TxnRequest(compare=[rpc.Compare(key=b"k", create_revision=7)])
assert rpc.TxnRequest.FromString(request.SerializeToString()) == request
from google.protobuf import descriptor_pool
try:
    descriptor_pool.Default().FindFileByName("kv.proto")
except KeyError:
    print("private")
"""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program], capture_output=True, text=True, timeout=LIMIT
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "private\n", "")


# -- URLs ------------------------------------------------------------------------------------------


def test_a_url_is_read() -> None:
    url = EtcdUrl.parse("etcd://us%40er:p%3Aw%2C@h1:1,[::1]:2,h3/a/b/?timeout=2.5")
    assert url.endpoints == ("h1:1", "[::1]:2", "h3:2379")
    assert (url.user, url.password, url.prefix, url.timeout, url.tls) == ("us@er", "p:w,", "a/b", 2.5, False)
    assert EtcdUrl.parse("etcds://h").tls
    assert EtcdUrl.parse("etcd://[::1]").endpoints == ("[::1]:2379",)


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("etcd://", "expected etcd://"),
        ("etcd://h:port", "'h:port'"),
        ("etcd://h:0", "'h:0'"),
        ("etcd://h:65536", "'h:65536'"),
        ("etcd://h1,,h2", "''"),
        ("etcd://::1:2379", "'::1:2379'"),
        ("etcd://user@h", "both user and password"),
        ("etcd://h?tiemout=1", "'tiemout'"),
        ("etcd://h?timeout=0", "'0'"),
        ("etcd://h?timeout=nan", "'nan'"),
        ("etcd://h?timeout=soon", "'soon'"),
        ("etcd://h?ca=x", "'ca'"),
        ("etcds://h?ca=/nowhere/ca.pem", "/nowhere/ca.pem"),
        ("etcds://h?cert=" + __file__, "both cert and key"),
    ],
)
def test_a_url_that_cannot_work_is_refused(url: str, says: str) -> None:
    with pytest.raises(BackendMisconfigured, match=re.escape(says)):
        dprims.connect(url)


def test_a_password_is_not_shown() -> None:
    with pytest.raises(BackendMisconfigured) as refused:
        dprims.connect("etcd://user:secret@h:port")
    assert "secret" not in str(refused.value)
    for mark in "/?#":
        with pytest.raises(BackendMisconfigured, match=r"etcd://user:\*\*\*@h.*%23") as refused:
            dprims.connect(f"etcd://user:sec{mark}ret@h")
        assert "sec" not in str(refused.value)
    with pytest.raises(BackendUnavailable) as silent:
        dprims.connect("etcd://user:secret@127.0.0.1:1?timeout=0.2")
    assert "secret" not in str(silent.value)


@pytest.mark.parametrize("place", ["127.0.0.1:1", "no-such-host.invalid:2379"])
def test_an_endpoint_that_does_not_answer_is_named_in_time(place: str) -> None:
    started = time.monotonic()
    with pytest.raises(BackendUnavailable, match=re.escape(place)):
        dprims.connect(f"etcd://{place}?timeout=1")
    assert time.monotonic() - started < 5


def test_neither_or_both_of_url_and_client() -> None:
    for arguments in ({}, {"url": "etcd://h", "client": object()}):
        with pytest.raises(BackendMisconfigured, match="either a URL or"):
            EtcdBackend(**arguments)


# -- keys, leases, cost ----------------------------------------------------------------------------


def test_a_process_that_ends_without_closing_says_nothing(
    etcd_server: EtcdServer, backend: EtcdBackend
) -> None:
    program = f"""
import dprims, threading
backend = dprims.connect({etcd_server.url!r})
dprims.DistributedLock("ends", backend, ttl=2).acquire()
lock = dprims.DistributedLock("ends", backend, ttl=2)
threading.Thread(target=lock.acquire, daemon=True).start()
while not lock.waiters(): pass
"""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program], capture_output=True, text=True, timeout=LIMIT
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    with dprims.DistributedLock("ends", backend, timeout=LIMIT):
        pass


def test_names_that_could_be_taken_for_one_another_are_different_locks(backend: EtcdBackend) -> None:
    names = ["n", "n/", "n/a", "n/a b", "n/é", "n0", "n//", "na", "n/a/b", "n/日本", "n/😀"]
    held = {name: backend.enqueue(name, 10, name.encode()) for name in names}
    assert all(ticket.held for ticket in held.values())
    for prefix in ("n", "n/", "n/a", "n//", "n/é", "nothing"):
        expected = sorted(name for name in names if name.startswith(prefix))
        assert [place.name for place in backend.held(prefix)] == expected
    for name, ticket in held.items():
        assert [place.record for place in backend.queue(name)] == [name.encode()]
        assert backend.release(ticket)


def test_a_token_is_the_create_revision_of_the_holders_key(backend: EtcdBackend) -> None:
    from dprims.backends import _etcd_wire as wire

    with dprims.DistributedLock("revision", backend) as grant:
        found = backend._life().read(wire.read_all(b"dprims/lock/dprims/revision\0")).kvs
        assert [kv.create_revision for kv in found] == [grant.token]


def test_two_backends_with_other_prefixes_do_not_meet(etcd_server: EtcdServer) -> None:
    with dprims.connect(f"{etcd_server.url}/one") as one, dprims.connect(f"{etcd_server.url}/two") as two:
        with dprims.DistributedLock("x", one), dprims.DistributedLock("x", two, timeout=0):
            pass
        one.write_once("cell", b"1")
        assert two.get("cell") is None
        one.delete("cell")


def test_the_shortest_ttl_is_the_servers(etcd_server: EtcdServer) -> None:
    with dprims.connect(etcd_server.url) as backend:
        assert backend.guarantees.min_ttl == 2.0
        with pytest.warns(UserWarning, match="raised to the backend's floor"):
            assert dprims.DistributedLock("x", backend, ttl=0.5).ttl == 2.0
        assert backend.enqueue("short", 0.5, b"").ttl == 2.0
    with EtcdServer(options=("--election-timeout", "3000")) as slow, dprims.connect(slow.url) as backend:
        assert backend.guarantees.min_ttl == 5.0


def test_many_locks_cost_one_lease_and_one_round_trip_a_beat(private_etcd: EtcdServer) -> None:
    with dprims.connect(private_etcd.url) as backend:
        tickets = [backend.enqueue(f"lock {number}", 60, b"") for number in range(250)]
        assert live_leases(private_etcd) == 2  # of the floor, and of these
        before = {method: calls(private_etcd, method) for method in ("Txn", "LeaseKeepAlive", "Range")}
        backend.beat(tickets, LIMIT)
        after = {method: calls(private_etcd, method) for method in before}
        assert {method: after[method] - before[method] for method in before} == {
            "Txn": 3,  # a hundred keys each, all on their way at once
            "LeaseKeepAlive": 1,
            "Range": 0,
        }
        assert not any(ticket.gone for ticket in tickets)
    until(lambda: live_leases(private_etcd) == 0)
    assert keys(private_etcd) == 0


@pytest.mark.parametrize("waiters", [2, 16])
def test_the_work_of_a_hand_over_does_not_grow_with_the_queue(private_etcd: EtcdServer, waiters: int) -> None:
    with dprims.connect(private_etcd.url) as backend:
        tickets = [backend.enqueue("x", 60, b"") for _ in range(waiters + 1)]
        with ThreadPoolExecutor(waiters) as pool:
            waits = [pool.submit(backend.await_turn, ticket, LIMIT) for ticket in tickets[1:]]
            until(lambda: len(backend._life().hub._started) == 2 * waiters)
            before = calls(private_etcd, "Txn")
            for number, ticket in enumerate(tickets):
                assert backend.release(ticket)
                if number < waiters:
                    assert waits[number].result(LIMIT)
        assert calls(private_etcd, "Txn") - before <= 2 * waiters + 1  # a delete, and one look of the next


def test_nothing_is_left_of_many_locks(private_etcd: EtcdServer) -> None:
    with dprims.connect(private_etcd.url) as backend, dprims.connect(private_etcd.url) as other:

        def pairs(count: int) -> None:
            for number in range(count):
                with dprims.DistributedLock(f"lock {number % 7}", backend):
                    if number % 50 == 0:
                        assert (
                            dprims.DistributedLock(f"lock {number % 7}", other, ttl=5).acquire(0.01) is None
                        )

        def left() -> list[int]:
            threads = [thread for thread in threading.enumerate() if thread.name != "dprims-session"]
            life = backend._life()
            assert not life.tickets
            assert not life._forgotten
            return [live_leases(private_etcd), len(threads), len(os.listdir("/proc/self/fd"))]

        pairs(60)
        before = left()
        pairs(int(os.environ.get("DPRIMS_TEST_PAIRS", "500")))
        until(lambda: keys(private_etcd) == 0)
        until(lambda: all(now <= then for now, then in zip(left(), before, strict=True)))  # idle leases end
        assert not Session.of(backend)._tickets


def test_what_the_server_refuses_is_not_tried_again(backend: EtcdBackend) -> None:
    for size in (1 << 20) + (3 << 19), 4 << 20:  # over etcd's own limit, and over that of its transport
        with pytest.raises(BackendMisconfigured, match="large"):
            backend.compare_and_set("large", None, b"x" * size)
