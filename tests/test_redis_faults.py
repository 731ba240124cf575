"""The Redis backend under faults: cut connections, lost replies, and servers that stop, freeze or forget."""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import redis

import dprims
from dprims.backends.redis import RedisBackend
from dprims.exceptions import BackendUnavailable, LockLost
from dprims.testing.servers import RedisServer

from .helpers.services import until

LIMIT = 30.0
ROOT = Path(__file__).resolve().parent.parent


class Proxy:
    """A TCP proxy in front of a server, which holds back or loses replies and cuts connections."""

    def __init__(self, port: int) -> None:
        self._target = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self.scripts = 0
        """How many scripts were called."""
        self.hold_until = 0
        """Replies are held back until so many were."""
        self.lose = 0
        """How many of the next replies are thrown away, with their connection."""
        self.deaf = False
        """True: what clients say goes nowhere, and nothing is said."""
        self._open: set[socket.socket] = set()
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    def cut(self) -> None:
        for side in list(self._open):
            try:
                side.shutdown(socket.SHUT_RDWR)
            except OSError:
                continue

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join(LIMIT)
        self._listener.close()
        self.cut()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        try:
            server = socket.create_connection(("127.0.0.1", self._target))
        except OSError:
            client.close()
            return
        with client, server:
            self._open |= {client, server}
            try:
                self._pump(client, server)
            except OSError:
                pass
            finally:
                self._open -= {client, server}

    def _pump(self, client: socket.socket, server: socket.socket) -> None:
        tail, held = b"", b""
        while True:
            for side in select.select([client, server], [], [])[0]:
                data = side.recv(65536)
                if not data:
                    return
                if side is server:
                    held += data
                    if self.lose > 0:
                        self.lose -= 1
                        return
                elif not self.deaf:
                    self.scripts += (tail + data).count(b"EVALSHA")
                    tail = data[-6:]
                    server.sendall(data)
            if self.scripts >= self.hold_until:
                client.sendall(held)
                held = b""


@pytest.fixture
def proxy(redis_server: RedisServer) -> Iterator[Proxy]:
    proxy = Proxy(redis_server.port)
    yield proxy
    proxy.close()


@pytest.fixture
def backend(proxy: Proxy) -> Iterator[RedisBackend]:
    with dprims.connect(f"redis://127.0.0.1:{proxy.port}/1?timeout=2") as backend:
        backend.get("warm")
        yield backend
        proxy.lose, proxy.deaf = 0, False


@pytest.fixture
def admin(redis_server: RedisServer) -> Iterator[redis.Redis]:
    with redis.Redis(port=redis_server.port, db=1) as client:
        client.flushdb()
        yield client


def in_thread(call: Callable[[], object]) -> tuple[threading.Thread, list[object]]:
    results: list[object] = []

    def run() -> None:
        try:
            results.append(call())
        except dprims.DprimsError as error:
            results.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, results


# -- replies that are lost ------------------------------------------------------------------------


@pytest.mark.parametrize("lost", [1, 2])
def test_an_acquire_whose_reply_is_lost_is_one_acquire(
    backend: RedisBackend, proxy: Proxy, admin: redis.Redis, lost: int
) -> None:
    proxy.lose = lost
    ticket = backend.enqueue("lost", 30, b"")
    assert proxy.lose == 0
    assert ticket.held
    assert [place.token for place in backend.queue("lost")] == [ticket.token]
    proxy.lose = lost
    waiter = backend.enqueue("lost", 30, b"")
    assert len(backend.queue("lost")) == 2
    assert backend.release(ticket)
    assert backend.await_turn(waiter, LIMIT)


def test_a_release_whose_reply_is_lost_is_a_success(backend: RedisBackend, proxy: Proxy) -> None:
    lock = dprims.DistributedLock("lost", backend)
    for _ in range(3):
        grant = lock.acquire(0)
        proxy.lose = 1
        grant.release()
        assert proxy.lose == 0
        assert lock.owner() is None


def test_a_release_that_failed_may_be_tried_again(backend: RedisBackend, proxy: Proxy) -> None:
    lock = dprims.DistributedLock("again", backend)
    grant = lock.acquire()
    proxy.deaf = True
    proxy.cut()
    with pytest.raises(BackendUnavailable, match=rf"127\.0\.0\.1:{proxy.port}.*release"):
        grant.release()
    proxy.deaf = False
    proxy.cut()
    grant.release()
    assert lock.owner() is None


@pytest.mark.parametrize("lost", [1, 2])
def test_cells_stand_though_replies_are_lost(backend: RedisBackend, proxy: Proxy, lost: int) -> None:
    proxy.lose = lost
    assert backend.compare_and_set(f"cell {lost}", None, b"v") == b"v"
    proxy.lose = lost
    backend.delete(f"cell {lost}")
    assert backend.get(f"cell {lost}") is None


# -- connections that are cut ---------------------------------------------------------------------


def test_a_holder_whose_connections_are_all_killed_keeps_its_lock(
    backend: RedisBackend, admin: redis.Redis
) -> None:
    lock = dprims.DistributedLock("killed", backend, ttl=1)
    with lock as grant:
        waiter, got = in_thread(lambda: lock.acquire(LIMIT).token)
        for _ in range(10):
            for client in admin.client_list():
                if client["db"] == "1" and client["id"] != str(admin.client_id()):
                    admin.client_kill_filter(_id=client["id"])
            grant.verify()
            assert not got
    waiter.join(LIMIT)
    assert got > [grant.token]


def test_a_holder_cut_off_for_its_ttl_knows(
    redis_server: RedisServer, proxy: Proxy, admin: redis.Redis
) -> None:
    lost = threading.Event()
    with (
        dprims.connect(f"redis://127.0.0.1:{proxy.port}/1") as cut_off,
        dprims.connect(f"redis://127.0.0.1:{redis_server.port}/1") as other,
    ):
        grant = dprims.DistributedLock("cut", cut_off, ttl=1, on_lost=lambda _: lost.set()).acquire()
        proxy.deaf = True
        proxy.cut()
        later = dprims.DistributedLock("cut", other, ttl=1).acquire(LIMIT)
        assert grant.lost  # computed, whether or not the heartbeat has noticed
        assert lost.wait(LIMIT)
        proxy.deaf = False
        proxy.cut()
        with pytest.raises(LockLost):
            grant.release()
        later.verify()
        later.release()


# -- work of the heartbeat ------------------------------------------------------------------------


def test_a_beat_is_one_round_trip_for_all_locks(backend: RedisBackend, proxy: Proxy) -> None:
    tickets = [backend.enqueue(f"many {n}", 60, b"") for n in range(100)]
    tickets += [backend.enqueue("many 0", 60, b"") for _ in range(3)]
    backend.beat(tickets, 5)
    asked = backend.clock()
    proxy.hold_until = proxy.scripts + len(tickets)
    backend.beat(tickets, 5)
    assert proxy.scripts == proxy.hold_until
    assert all(ticket.proven >= asked and not ticket.gone for ticket in tickets)


def test_a_beat_in_flight_while_its_ticket_leaves_brings_nothing_back(
    backend: RedisBackend, admin: redis.Redis
) -> None:
    holder, waiter = backend.enqueue("b", 60, b""), backend.enqueue("b", 60, b"")
    backend.leave(waiter)
    backend.beat([waiter], 5)
    assert [place.token for place in backend.queue("b")] == [holder.token]
    backend.release(holder)
    backend.beat([holder], 5)
    assert backend.queue("b") == []


# -- a server that stops answering ----------------------------------------------------------------


def test_a_frozen_server_is_unavailable_in_time(private_redis: RedisServer) -> None:
    with dprims.connect(f"{private_redis.url}?socket_timeout=0.5") as backend:
        lock = dprims.DistributedLock("frozen", backend, ttl=0.6)
        other = dprims.DistributedLock("frozen", backend, ttl=0.6)
        grant = lock.acquire()
        waiter, waited = in_thread(other.acquire)
        cell, cell_waited = in_thread(lambda: backend.wait("cell", LIMIT))
        until(lambda: lock.waiters())
        private_redis.freeze()
        calls: list[Callable[[], object]] = [
            lambda: backend.enqueue("x", 1, b""),
            lambda: backend.get("x"),
            lambda: backend.compare_and_set("x", None, b""),
            lambda: backend.delete("x"),
            lambda: backend.wait("x", 0.1),
            lambda: backend.queue("x"),
            lambda: backend.held("x"),
            lambda: backend.evict("x", 1),
            lambda: dprims.connect(f"{private_redis.url}?socket_timeout=0.5"),
        ]
        for call in calls:
            began = time.monotonic()
            with pytest.raises(BackendUnavailable, match=str(private_redis.port)):
                call()
            assert time.monotonic() - began < 5
        waiter.join(LIMIT)
        assert isinstance(waited[0], BackendUnavailable)
        until(lambda: grant.lost)
        private_redis.thaw()
        with pytest.raises(LockLost):
            grant.release()
        assert lock.acquire(LIMIT).token > grant.token
        lock.release()
        backend.compare_and_set("cell", None, b"thawed")
        cell.join(LIMIT)
        assert cell_waited == [b"thawed"] or isinstance(cell_waited[0], BackendUnavailable)


def test_a_restart_that_keeps_its_data_is_ridden_out(private_redis: RedisServer) -> None:
    with dprims.connect(private_redis.url) as backend:
        lock = dprims.DistributedLock("kept", backend, ttl=8)
        with lock as grant:
            backend.compare_and_set("cell", None, b"kept")
            waiter, got = in_thread(lambda: lock.acquire(LIMIT).token)
            cell, seen = in_thread(lambda: backend.wait("later", LIMIT))
            until(lambda: lock.waiters())
            private_redis.kill()
            private_redis.start()
            grant.verify()
            assert len(lock.waiters()) == 1
            assert backend.get("cell") == b"kept"
            backend.compare_and_set("later", None, b"seen")
        waiter.join(LIMIT)
        cell.join(LIMIT)
        assert got > [grant.token]
        assert seen == [b"seen"]


def test_a_restart_that_loses_its_data_is_noticed_and_tokens_grow() -> None:
    with RedisServer() as server, dprims.connect(server.url) as backend:
        lost = threading.Event()
        lock = dprims.DistributedLock("forgotten", backend, ttl=2, on_lost=lambda _: lost.set())
        grant = lock.acquire()
        waiter, got = in_thread(lambda: lock.acquire(LIMIT).token)
        until(lambda: lock.waiters())
        server.kill()
        server.start()
        assert lost.wait(LIMIT)
        waiter.join(LIMIT)
        assert got > [grant.token]
        with pytest.raises(LockLost):
            grant.release()


def test_a_wait_outlasts_a_server_that_is_away_for_less_than_its_bound(private_redis: RedisServer) -> None:
    with dprims.connect(f"{private_redis.url}?timeout=20") as backend:
        backend.compare_and_set("x", None, b"x")
        private_redis.kill()
        reader, read = in_thread(lambda: backend.get("x"))
        reader.join(0.3)
        assert reader.is_alive()
        private_redis.start()
        reader.join(LIMIT)
        assert read == [b"x"]


# -- processes that die or freeze -----------------------------------------------------------------

WORKER = """
import sys, dprims
url, name, ttl = sys.argv[1:]
lock = dprims.DistributedLock(name, url, ttl=float(ttl))
for line in sys.stdin:
    if line == "acquire\\n":
        grant = lock.acquire()
        print("token", grant.token, flush=True)
    elif line == "release\\n":
        try:
            grant.release()
            print("released", flush=True)
        except dprims.LockError as error:
            print(type(error).__name__, flush=True)
"""


class Worker:
    """A process that acquires and releases as it is told."""

    def __init__(self, url: str, name: str, ttl: float) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", WORKER, url, name, str(ttl)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )

    def tell(self, what: str) -> None:
        self._process.stdin.write(f"{what}\n")
        self._process.stdin.flush()

    def said(self) -> str:
        assert select.select([self._process.stdout], [], [], LIMIT)[0], "the worker says nothing"
        return self._process.stdout.readline().strip()

    def token(self) -> int:
        word, token = self.said().split()
        assert word == "token"
        return int(token)

    def signal(self, number: int) -> None:
        os.kill(self._process.pid, number)

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *exc: object) -> None:
        self._process.kill()
        self._process.wait()
        self._process.stdin.close()
        self._process.stdout.close()


def test_dead_and_frozen_waiters_are_skipped_and_a_thawed_one_does_not_believe_its_wake_up(
    redis_server: RedisServer, admin: redis.Redis
) -> None:
    url = f"redis://127.0.0.1:{redis_server.port}/1"
    ttl = 1.0
    with dprims.connect(url) as backend:
        mine = dprims.DistributedLock("order", backend, ttl=30)
        first = mine.acquire()
        with (
            Worker(url, "order", ttl) as dead,
            Worker(url, "order", ttl) as frozen,
            Worker(url, "order", ttl) as well,
        ):
            for n, worker in enumerate((dead, frozen, well), 1):
                worker.tell("acquire")
                until(lambda n=n: len(mine.waiters()) == n)
            dead.signal(signal.SIGKILL)
            frozen.signal(signal.SIGSTOP)
            # both are still in place, and the lock is handed to the dead one; its ttl passes it on
            first.release()
            token = well.token()
            assert token > first.token
            # 300 come and go while it is frozen
            well.tell("release")
            assert well.said() == "released"
            for _ in range(300):
                mine.acquire(LIMIT).release()
            well.tell("acquire")
            held = well.token()
            frozen.signal(signal.SIGCONT)
            until(lambda: len(mine.waiters()) == 1)
            assert mine.owner().token == held
            well.tell("release")
            assert well.said() == "released"
            assert frozen.token() > held


def test_a_frozen_holder_finds_its_lock_lost(redis_server: RedisServer, admin: redis.Redis) -> None:
    url = f"redis://127.0.0.1:{redis_server.port}/1"
    with dprims.connect(url) as backend, Worker(url, "thaw", 1.0) as frozen:
        frozen.tell("acquire")
        token = frozen.token()
        frozen.signal(signal.SIGSTOP)
        with dprims.DistributedLock("thaw", backend, ttl=30, timeout=LIMIT) as grant:
            assert grant.token > token
            frozen.signal(signal.SIGCONT)
            frozen.tell("release")
            assert frozen.said() == "LockLost"
            grant.verify()


def test_a_hundred_waiters_that_gave_up_cost_nothing(backend: RedisBackend, admin: redis.Redis) -> None:
    lock = dprims.DistributedLock("gave up", backend)
    with lock:
        threads = [in_thread(lambda: lock.acquire(0.2))[0] for _ in range(100)]
        for thread in threads:
            thread.join(LIMIT)
        assert lock.waiters() == []
    began = time.monotonic()
    lock.acquire(0).release()
    assert time.monotonic() - began < 5
    assert set(admin.keys("*")) <= {b"{dprims}:token"}
