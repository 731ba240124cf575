"""The etcd backend when the server dies, freezes or forgets, and when replies and streams are lost."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

import dprims
from dprims.backends import _etcd_watch, _etcd_wire
from dprims.backends._etcd_life import Life
from dprims.backends.etcd import EtcdBackend
from dprims.exceptions import BackendUnavailable, LockLost, NotHeld
from dprims.session import Session
from dprims.testing.servers import EtcdServer

from .helpers.services import until

LIMIT = 30.0
TTL = 2.0


def lock(backend: EtcdBackend, name: str = "x", **options: Any) -> dprims.DistributedLock:
    return dprims.DistributedLock(name, backend, **{"ttl": TTL, **options})


def places(backend: EtcdBackend, name: str = "x") -> list[dprims.Owner]:
    return backend.queue(f"dprims/{name}")


def leases(backend: EtcdBackend) -> list[int]:
    return [lease.id for lease in backend._life()._leases.values()]


def revoke(backend: EtcdBackend, lease: int) -> None:
    backend._life().link.endpoint.lease.LeaseRevoke(
        _etcd_wire.rpc.LeaseRevokeRequest(ID=lease), timeout=LIMIT
    )


def in_threads(count: int, call: Callable[[], Any]) -> list[Future[Any]]:
    with ThreadPoolExecutor(count) as pool:
        return [pool.submit(call) for _ in range(count)]


def answers(call: Callable[[], object]) -> bool:
    try:
        call()
    except BackendUnavailable:
        return False
    return True


class Proxy:
    """A TCP connection in between, to be cut, made deaf to the server, or shut."""

    def __init__(self, port: int) -> None:
        self._target = ("127.0.0.1", port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._sockets: set[socket.socket] = set()
        self.port = self._listener.getsockname()[1]
        self.url = f"etcd://127.0.0.1:{self.port}"
        self.deaf = False
        self.shut = False
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> None:
        for one in list(self._sockets):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.shut = True
        self._listener.close()
        self.cut()

    def _accept(self) -> None:
        while True:
            try:
                client = self._listener.accept()[0]
            except OSError:
                return
            try:
                server = socket.create_connection(self._target) if not self.shut else None
            except OSError:
                server = None
            if server is None:
                client.close()
                continue
            self._sockets |= {client, server}
            threading.Thread(target=self._pump, args=(client, server, False), daemon=True).start()
            threading.Thread(target=self._pump, args=(server, client, True), daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket, from_server: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                if not (from_server and self.deaf):
                    sink.sendall(data)
        for one in (source, sink):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
        source.close()
        self._sockets.discard(source)


@pytest.fixture
def proxy(etcd_server: EtcdServer) -> Iterator[Proxy]:
    proxy = Proxy(etcd_server.port)
    yield proxy
    proxy.close()


@pytest.fixture
def backend(private_etcd: EtcdServer) -> Iterator[EtcdBackend]:
    with dprims.connect(private_etcd.url) as backend:
        yield backend


# -- the server ------------------------------------------------------------------------------------


def test_a_killed_and_restarted_server_keeps_the_lock_and_the_order_of_its_waiters(
    private_etcd: EtcdServer, backend: EtcdBackend
) -> None:
    order: list[int] = []

    def wait(number: int) -> int:
        with lock(backend) as grant:
            order.append(number)
            return grant.token

    with ThreadPoolExecutor(3) as pool:
        with lock(backend, ttl=10) as grant:
            waits = []
            for number in range(3):
                waits.append(pool.submit(wait, number))
                until(lambda expected=number + 2: len(places(backend)) == expected)
            private_etcd.kill()
            private_etcd.start()
            grant.verify()
            assert not grant.lost
        tokens = [grant.token, *(done.result(LIMIT) for done in waits)]
    assert order == [0, 1, 2]
    assert tokens == sorted(set(tokens))


def test_a_server_frozen_for_longer_than_the_ttl_loses_the_lock_and_says_so(
    private_etcd: EtcdServer, backend: EtcdBackend
) -> None:
    lost = threading.Event()
    grant = lock(backend, on_lost=lambda _: lost.set()).acquire()
    private_etcd.freeze()
    until(lambda: grant.lost)
    assert lost.wait(LIMIT)
    private_etcd.thaw()
    with dprims.connect(private_etcd.url) as other:
        successor = lock(other).acquire(timeout=LIMIT)
        assert successor.token > grant.token
        with pytest.raises(LockLost):
            grant.release()
        successor.verify()
        successor.release()


def test_every_call_to_a_frozen_server_ends_in_time(private_etcd: EtcdServer) -> None:
    with dprims.connect(f"{private_etcd.url}?timeout=0.3") as backend:
        ticket = backend.enqueue("held", 10, b"")
        waiter = backend.enqueue("held", 10, b"")
        private_etcd.freeze()
        calls: list[Callable[[], object]] = [
            lambda: backend.enqueue("other", 10, b""),
            lambda: backend.await_turn(waiter, 1.0),
            lambda: backend.release(ticket),
            lambda: backend.leave(waiter),
            lambda: backend.beat([ticket], 0.5),
            lambda: backend.queue("held"),
            lambda: backend.held(""),
            lambda: backend.evict("held", ticket.token),
            lambda: backend.get("cell"),
            lambda: backend.compare_and_set("cell", None, b"1"),
            lambda: backend.wait("cell", 0.5),
            lambda: backend.delete("cell"),
            lambda: dprims.connect(f"{private_etcd.url}?timeout=0.3"),
        ]
        for call in calls:
            started = time.monotonic()
            with pytest.raises(BackendUnavailable, match=rf"127\.0\.0\.1:{private_etcd.port}"):
                call()
            assert time.monotonic() - started < 5
        with pytest.raises(BackendUnavailable):
            backend.await_turn(waiter, 0.01) or backend.leave(waiter)
        private_etcd.thaw()


def test_what_a_frozen_server_was_not_told_is_made_good_later(private_etcd: EtcdServer) -> None:
    """Neither a place nor a lock stays behind on the lease that other locks keep alive."""
    with (
        dprims.connect(private_etcd.url) as watcher,
        dprims.connect(f"{private_etcd.url}?timeout=0.3") as backend,
        lock(backend, "kept", ttl=20) as kept,
    ):
        given_up = lock(backend, "given up", ttl=20).acquire()
        waiter = backend.enqueue("dprims/kept", 20, b"")
        private_etcd.freeze()
        with pytest.raises(BackendUnavailable):
            backend.leave(waiter)
        with pytest.raises(BackendUnavailable):
            lock(backend, "asked for", ttl=20).acquire()
        with pytest.raises(BackendUnavailable):
            given_up.release()
        private_etcd.thaw()
        until(lambda: Session.of(backend).prove(kept._ticket) and not places(watcher, "given up"))
        until(lambda: Session.of(backend).prove(kept._ticket) and not places(watcher, "asked for"))
        until(lambda: Session.of(backend).prove(kept._ticket) and len(places(watcher, "kept")) == 1)
        until(lambda: answers(given_up.release))  # it finds nothing, which is what was wanted
        kept.verify()


def test_a_lock_that_is_lost_here_is_given_up_there_though_its_lease_is_kept(
    etcd_server: EtcdServer,
) -> None:
    """A frozen process that thaws before the server dropped its lease must not keep it for ever."""
    with dprims.connect(etcd_server.url) as backend:
        lost, kept = backend.enqueue("lost here", TTL, b""), backend.enqueue("kept", TTL, b"")
        until(lambda: backend.beat([kept], LIMIT) is None and not backend.queue("lost here"))
        assert backend.release(lost) is False
        assert backend.release(kept) is True


def test_a_wiped_server_is_noticed_by_holder_and_waiters(
    private_etcd: EtcdServer, backend: EtcdBackend
) -> None:
    for _ in range(50):  # a wiped server's revisions start again, far below those seen
        backend.compare_and_set("cell", backend.get("cell"), bytes([_]))
    grant = lock(backend).acquire()
    with ThreadPoolExecutor(1) as pool, dprims.connect(private_etcd.url) as other:
        waiting = pool.submit(lock(other).acquire, LIMIT)
        until(lambda: len(places(backend)) == 2)
        private_etcd.restart(wipe=True)
        next_grant = waiting.result(LIMIT)
        assert next_grant is not None
        until(lambda: grant.lost)
        with pytest.raises(LockLost):
            grant.release()
        next_grant.verify()
        next_grant.release()


# -- leases, keys and history ----------------------------------------------------------------------


def test_a_waiter_whose_lease_is_revoked_is_back_in_the_queue_within_a_second(
    etcd_server: EtcdServer,
) -> None:
    with dprims.connect(etcd_server.url) as one, dprims.connect(etcd_server.url) as two:
        holder = lock(one, "revoked", ttl=30).acquire()
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(lock(two, "revoked", ttl=30).acquire, LIMIT)
            until(lambda: len(two._life().hub._started) == 2)
            (before,) = [place.record for place in places(one, "revoked")[1:]]
            revoke(one, two._life()._leases[30].id)
            started = time.monotonic()
            until(lambda: [place.record for place in places(one, "revoked")[1:]] == [before])
            assert time.monotonic() - started < 1
            assert not waiting.done()
            holder.release()
            waiting.result(LIMIT).release()


def test_a_holder_whose_lease_is_revoked_is_told(etcd_server: EtcdServer) -> None:
    with dprims.connect(etcd_server.url) as backend:
        lost = threading.Event()
        grant = lock(backend, "told", on_lost=lambda _: lost.set()).acquire()
        for lease in leases(backend):
            revoke(backend, lease)
        assert lost.wait(LIMIT)
        with pytest.raises(LockLost):
            grant.release()
        with lock(backend, "told"):  # on a new lease
            pass


def test_nobody_who_left_or_whose_lease_ended_is_given_the_lock(etcd_server: EtcdServer) -> None:
    """The fault that Jepsen found in etcd's own lock: granted after waiting, on a lease that had ended."""
    with dprims.connect(etcd_server.url) as one, dprims.connect(etcd_server.url) as two:
        holder, waiter = one.enqueue("ended", 30, b""), two.enqueue("ended", 30, b"")
        third = one.enqueue("ended", 30, b"")
        for lease in leases(two):
            with contextlib.suppress(Exception):
                revoke(one, lease)
        assert one.release(holder)
        assert two.await_turn(waiter, 0.5) is False  # it is behind the third now
        assert one.await_turn(third, LIMIT)
        assert one.release(third)
        assert two.await_turn(waiter, LIMIT)
        assert waiter.token > third.token
        assert two.release(waiter)


def test_a_release_between_looking_and_watching_is_not_missed(
    etcd_server: EtcdServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    with dprims.connect(etcd_server.url) as backend:
        holder = backend.enqueue("missed", 20, b"")
        waiter = backend.enqueue("missed", 20, b"")
        watching = _etcd_watch.WatchHub.watching

        def release_first(*arguments: Any) -> Any:
            assert backend.release(holder)
            return watching(*arguments)

        monkeypatch.setattr(_etcd_watch.WatchHub, "watching", release_first)
        started = time.monotonic()
        assert backend.await_turn(waiter, LIMIT)
        assert time.monotonic() - started < 5
        backend.release(waiter)


def test_waiters_outlive_compaction_and_cut_streams(etcd_server: EtcdServer, proxy: Proxy) -> None:
    rpc = _etcd_wire.rpc
    with (
        dprims.connect(etcd_server.url) as holding,
        dprims.connect(proxy.url) as waiting,
        ThreadPoolExecutor(5) as pool,
    ):
        with lock(holding, "cut", ttl=20):
            waits = [pool.submit(lock(waiting, "cut", ttl=20).acquire, LIMIT) for _ in range(5)]
            until(lambda: len(places(holding, "cut")) == 6)
            until(lambda: len(waiting._life().hub._started) == 10)
            revision = holding._life().read(_etcd_wire.read(b"any")).header.revision
            holding.compare_and_set("moves the revision", None, b"1")
            holding.delete("moves the revision")
            proxy.cut()
            endpoint = holding._life().link.endpoint
            endpoint.kv.Compact(rpc.CompactionRequest(revision=revision + 1), timeout=LIMIT)
            proxy.cut()
        tokens = []
        while waits:  # each lets the next one in
            until(lambda: any(wait.done() for wait in waits))
            (done,) = [wait for wait in waits if wait.done()]
            waits.remove(done)
            tokens.append(done.result().token)
            done.result().release()
        assert tokens == sorted(tokens)


# -- lost replies ----------------------------------------------------------------------------------


def test_a_reply_that_is_lost_after_the_server_did_the_work_changes_nothing(
    etcd_server: EtcdServer, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    with dprims.connect(etcd_server.url) as watcher, dprims.connect(proxy.url) as backend:

        def lose_the_reply(call: Callable[[], Any], applied: Callable[[], object]) -> Any:
            proxy.deaf = True
            with ThreadPoolExecutor(1) as pool:
                done = pool.submit(call)
                until(applied)
                proxy.cut()
                proxy.deaf = False
                return done.result(LIMIT)

        backend.release(backend.enqueue("warm", 10, b""))
        ticket = lose_the_reply(
            lambda: backend.enqueue("lost reply", 10, b""), lambda: watcher.queue("lost reply")
        )
        assert ticket.held
        assert [place.token for place in watcher.queue("lost reply")] == [ticket.token]
        assert (
            lose_the_reply(lambda: backend.release(ticket), lambda: not watcher.queue("lost reply")) is True
        )
        assert (
            lose_the_reply(
                lambda: backend.compare_and_set("lost reply", None, b"1"), lambda: watcher.get("lost reply")
            )
            == b"1"
        )
        holder = backend.enqueue("lost reply", 10, b"")
        waiter = lose_the_reply(
            lambda: backend.enqueue("lost reply", 10, b""), lambda: len(watcher.queue("lost reply")) == 2
        )
        assert not waiter.held
        assert backend.release(holder)
        assert backend.await_turn(waiter, LIMIT)
        evict = Life.txn

        def deaf_from_here(*arguments: Any) -> Any:
            proxy.deaf = True
            return evict(*arguments)

        monkeypatch.setattr(Life, "txn", deaf_from_here)
        with ThreadPoolExecutor(1) as pool:
            evicted = pool.submit(backend.evict, "lost reply", waiter.token)
            until(lambda: not watcher.queue("lost reply"))
            proxy.cut()
            proxy.deaf = False
            assert evicted.result(LIMIT) is True
        monkeypatch.undo()
        watcher.delete("lost reply")


def test_a_key_is_used_again_unless_a_late_request_about_it_may_come(
    etcd_server: EtcdServer, proxy: Proxy
) -> None:
    """A server that is not compacted walks through the names of all deleted keys at each acquire."""
    with dprims.connect(etcd_server.url) as watcher, dprims.connect(proxy.url) as backend:
        first = backend.enqueue("again", 10, b"")
        key = first.key
        assert backend.release(first)
        second = backend.enqueue("again", 10, b"")
        assert second.key == key
        assert second.token > first.token
        assert backend.release(first) is False
        backend.leave(first)
        backend.beat([first, second], LIMIT)
        assert second.held
        watcher.evict("again", second.token)
        third = backend.enqueue("again", 10, b"")
        third_key = third.key
        assert third_key != key
        assert backend.release(second) is False
        backend.beat([third], LIMIT)
        assert third.held
        proxy.deaf = True
        with ThreadPoolExecutor(1) as pool:
            released = pool.submit(backend.release, third)
            until(lambda: not watcher.queue("again"))
            proxy.cut()
            proxy.deaf = False
            assert released.result(LIMIT) is True
        keys = [ticket.key for ticket in (backend.enqueue("again", 10, b"") for _ in range(3))]
        assert not {key, third_key} & set(keys)


def test_a_release_that_fails_once_may_be_tried_again(proxy: Proxy) -> None:
    with dprims.connect(f"{proxy.url}?timeout=0.5") as backend:
        mine = lock(backend, "again", ttl=20)
        grant = mine.acquire()
        proxy.shut = True
        proxy.cut()
        with pytest.raises(BackendUnavailable):
            grant.release()
        proxy.shut = False
        until(lambda: answers(grant.release))
        assert not places(backend, "again")
        with pytest.raises(NotHeld):
            grant.release()


# -- many ------------------------------------------------------------------------------------------


def test_sixty_four_threads_take_turns_on_one_backend(etcd_server: EtcdServer) -> None:
    counted = 0

    def add_one(_: int) -> None:
        nonlocal counted
        with lock(backend, "many", ttl=10):
            before = counted
            time.sleep(0)
            counted = before + 1

    with dprims.connect(etcd_server.url) as backend, ThreadPoolExecutor(64) as pool:
        list(pool.map(add_one, range(192)))
        assert counted == 192
        assert len(leases(backend)) <= 2
        until(lambda: not backend._life().hub._watches)


def test_a_hundred_waiters_that_gave_up_are_in_nobodys_way(etcd_server: EtcdServer) -> None:
    with dprims.connect(etcd_server.url) as backend:
        with lock(backend, "gave up"), ThreadPoolExecutor(100) as pool:
            tries = [pool.submit(lock(backend, "gave up").acquire, 0.2) for _ in range(100)]
            assert [done.result(LIMIT) for done in tries] == [None] * 100
            assert len(places(backend, "gave up")) == 1
        started = time.monotonic()
        with lock(backend, "gave up"):
            assert time.monotonic() - started < 1


def test_a_closed_backend_lets_go_of_everything_and_of_those_who_wait(etcd_server: EtcdServer) -> None:
    with dprims.connect(etcd_server.url) as other:
        backend = dprims.connect(etcd_server.url)
        holder = lock(other, "closing", ttl=20).acquire()
        lock(backend, "held when closing").acquire()
        with ThreadPoolExecutor(2) as pool:
            waits = [
                pool.submit(lock(backend, "closing").acquire, LIMIT),
                pool.submit(backend.wait, "none", LIMIT),
            ]
            until(lambda: len(backend._life().hub._started) == 3)
            started = time.monotonic()
            backend.close()
            for waiting in waits:
                with pytest.raises(BackendUnavailable):
                    waiting.result(LIMIT)
            assert time.monotonic() - started < 10
        assert [place.token for place in places(other, "closing")] == [holder.token]
        assert not places(other, "held when closing")
        holder.release()
        backend.close()
        with pytest.raises(BackendUnavailable, match="closed"):
            backend.get("cell")
