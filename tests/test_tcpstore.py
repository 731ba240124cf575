"""The TCPStore backend: whose store it uses, what it costs, and what becomes of it under faults."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import dprims
from dprims import BackendMisconfigured, BackendUnavailable, DistributedLock, LockLost
from dprims.backends import _tcpstore_link
from dprims.backends._tcpstore_link import StoreLink
from dprims.backends._tickets import BLOCK
from dprims.backends.tcpstore import TCPStoreBackend
from dprims.testing.lock_process import LockProcess

from .helpers.services import LIMIT_S, TCPStoreServer, in_thread, until

TTL = 0.8


@pytest.fixture(scope="module")
def served() -> Iterator[dprims.Backend]:
    with dprims.connect("tcpstore://127.0.0.1:0?serve=1") as backend:
        yield backend


@pytest.fixture
def backend(served: dprims.Backend) -> Iterator[TCPStoreBackend]:
    with dprims.connect(served.url) as backend:
        assert isinstance(backend, TCPStoreBackend)
        yield backend


@pytest.fixture
def server() -> Iterator[TCPStoreServer]:
    with TCPStoreServer() as server:
        yield server


@pytest.fixture
def name() -> str:
    return f"lock-{uuid.uuid4().hex[:10]}"


# -- whose store ------------------------------------------------------------------------------------


def test_serving_names_a_url_for_others() -> None:
    with dprims.connect("tcpstore://:0?serve=1") as served:
        assert re.fullmatch(r"tcpstore://(\d+\.\d+\.\d+\.\d+|\[[0-9a-f:]+\]):\d+", served.url)
        with dprims.connect(served.url) as other, DistributedLock("a", served):
            assert DistributedLock("a", other).acquire(timeout=0) is None


@pytest.mark.parametrize(
    "url",
    [
        "tcpstore://",
        "tcpstore://localhost",
        "tcpstore://localhost:0",
        "tcpstore://:29500",
        "tcpstore://localhost:x",
        "tcpstore://localhost:99999",
        "tcpstore://localhost:29500/path",
        "tcpstore://localhost:29500?unknown=1",
        "tcpstore://localhost:29500?timeout=soon",
        "tcpstore://localhost:29500?timeout=-1",
    ],
)
def test_urls_that_cannot_work_are_named(url: str) -> None:
    with pytest.raises(BackendMisconfigured, match=re.escape(url)):
        dprims.connect(url)


@pytest.mark.parametrize("url", ["tcpstore://u:hunter2@h:x", "tcpstore://u:hunter2/3@h:1"])
def test_a_password_is_not_shown_though_none_is_used(url: str) -> None:
    with pytest.raises(BackendMisconfigured, match=r"tcpstore://u:\*\*\*@h") as refused:
        dprims.connect(url)
    assert "hunter2" not in str(refused.value)


def test_nothing_or_nobody_who_answers(capfd: pytest.CaptureFixture[str]) -> None:
    threads = set(threading.enumerate())
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        with pytest.raises(BackendUnavailable, match=f":{closed.getsockname()[1]}"):
            dprims.connect(f"tcpstore://127.0.0.1:{closed.getsockname()[1]}")
    assert capfd.readouterr().err == ""
    with pytest.raises(BackendUnavailable, match=r"no-such-host\.invalid"):
        dprims.connect("tcpstore://no-such-host.invalid:1")
    with socket.create_server(("127.0.0.1", 0)) as mute:
        port = mute.getsockname()[1]
        with pytest.raises(BackendUnavailable, match=f":{port}"):
            dprims.connect(f"tcpstore://127.0.0.1:{port}?timeout=0.3")
    until(lambda: set(threading.enumerate()) <= threads, "the end of the thread that tried")


def test_a_store_that_was_passed_in_is_reached_over_connections_of_our_own(
    served: dprims.Backend, name: str
) -> None:
    port = int(served.url.rpartition(":")[2])
    store = dist.TCPStore("127.0.0.1", port, wait_for_workers=False)
    first, second = dist.PrefixStore("one", store), dist.PrefixStore("two", dist.PrefixStore("one", store))
    with (
        TCPStoreBackend(client=store) as plain,
        TCPStoreBackend(client=first) as one,
        TCPStoreBackend(client=second) as two,
        TCPStoreBackend(client=dist.PrefixStore("one", store)) as again,
    ):
        waiting = threading.Thread(target=lambda: store.wait(["go"], timedelta(seconds=LIMIT_S)))
        waiting.start()  # keeps the store's own connection busy
        with DistributedLock(name, plain), DistributedLock(name, one), DistributedLock(name, two):
            assert DistributedLock(name, served).acquire(timeout=0) is None, "the same store"
            assert DistributedLock(name, again).acquire(timeout=0) is None, "the same prefix"
        dist.TCPStore("127.0.0.1", port, wait_for_workers=False).set("go", "")
        waiting.join(LIMIT_S)
    assert DistributedLock(name, store).backend is DistributedLock(name, store).backend
    DistributedLock(name, store).backend.close()


def test_a_hash_store_is_for_the_threads_of_one_process(name: str) -> None:
    store = dist.HashStore()
    with TCPStoreBackend(client=dist.PrefixStore("p", store)) as one, TCPStoreBackend(client=store) as two:
        assert one.guarantees.scope == "process"
        with DistributedLock(name, one), DistributedLock(name, two):
            result = in_thread(lambda: DistributedLock(name, one).acquire(timeout=LIMIT_S))
            until(lambda: DistributedLock(name, one).waiters(), "a waiter in the queue")
        assert result() is not None
        with pytest.raises(BackendMisconfigured, match="parent"):
            one.reconnect_after_fork()


def test_other_stores_are_refused(tmp_path: Path) -> None:
    with pytest.raises(BackendMisconfigured, match="FileStore"):
        TCPStoreBackend(client=dist.FileStore(str(tmp_path / "store"), 1))


def test_the_default_store_is_that_of_the_process_group(served: dprims.Backend, name: str) -> None:
    port = int(served.url.rpartition(":")[2])
    store = dist.PrefixStore(name, dist.TCPStore("127.0.0.1", port, wait_for_workers=False))
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        lock = DistributedLock(name)
        with lock as grant:
            owner = lock.owner()
            assert owner is not None
            assert (owner.rank, owner.token) == (0, grant.token)
        lock.backend.close()
    finally:
        dist.destroy_process_group()


def test_tokens_of_a_newer_store_are_larger(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = []
    for later in (0, 0.001):
        now = time.time() + later
        monkeypatch.setattr(_tcpstore_link.time, "time", lambda now=now: now)
        with TCPStoreBackend(client=dist.HashStore()) as backend, DistributedLock(name, backend) as grant:
            tokens.append(grant.token)
    assert tokens[0] < tokens[1] < 1 << 63


# -- what it costs ------------------------------------------------------------------------------------


class Counted:
    """A store that counts what is asked of it, and can be told to break off at some operation."""

    def __init__(self, store: Any) -> None:
        self.store = store
        self.counts: Counter[str] = Counter()
        self.hook: Callable[[str], Callable[[], None] | None] = lambda operation: None

    def __getattr__(self, operation: str) -> Any:
        method = getattr(self.store, operation)
        if operation in ("set_timeout", "timeout"):
            return method

        def counted(*args: Any) -> Any:
            self.counts[operation] += 1
            afterwards = self.hook(operation)
            result = method(*args)
            if afterwards is not None:
                afterwards()
            return result

        return counted


@pytest.fixture
def counted(served: dprims.Backend, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Any, list[Counted]]]:
    """A backend all of whose connections are counted."""
    stores: list[Counted] = []
    connect = StoreLink._connect

    def connect_counted(self: StoreLink) -> Counted:
        stores.append(Counted(connect(self)))
        return stores[-1]

    monkeypatch.setattr(StoreLink, "_connect", connect_counted)
    with dprims.connect(served.url) as backend:
        yield backend, stores


def operations(stores: list[Counted]) -> int:
    return sum(sum(store.counts.values()) for store in stores)


def test_an_uncontended_pair_takes_at_most_eight_operations(
    counted: tuple[Any, list[Counted]], name: str
) -> None:
    backend, stores = counted
    lock = DistributedLock(name, backend, ttl=60)
    for pairs, at_most in ((1, 8), (10 * BLOCK, 6.1 * 10 * BLOCK)):
        before = operations(stores)
        for _ in range(pairs):
            with lock:
                pass
        assert operations(stores) - before <= at_most


def test_idle_holders_cost_two_operations_a_beat_however_many_locks(
    counted: tuple[Any, list[Counted]], name: str
) -> None:
    backend, stores = counted
    tickets = [backend.enqueue(f"{name}/{i}", 60, b"{}") for i in range(20)]
    before = operations(stores)
    backend.beat(tickets, LIMIT_S)
    assert operations(stores) - before == 2


def test_work_per_acquisition_does_not_grow_with_the_queue(
    counted: tuple[Any, list[Counted]], name: str
) -> None:
    backend, stores = counted
    costs = {}
    for n in (2, 64):
        lock = DistributedLock(f"{name}/{n}", backend, ttl=60)

        def enter(lock: DistributedLock = lock) -> None:
            with lock:
                pass

        with lock:
            results = [in_thread(enter) for _ in range(n)]
            until(lambda lock=lock, n=n: len(lock.waiters()) == n, "waiters in the queue")
            time.sleep(0.2)  # their first looks at who is ahead
            before = operations(stores)
        for result in results:
            result()
        costs[n] = (operations(stores) - before) / n
    assert costs[64] <= costs[2] * 1.2


def test_ten_thousand_pairs_leave_nothing_behind(served: Any, backend: TCPStoreBackend, name: str) -> None:
    lock, other = DistributedLock(name, backend, ttl=60), DistributedLock(name, served, ttl=60)

    def footprint() -> tuple[int, int, int]:
        return (
            len(os.listdir("/proc/self/fd")),
            threading.active_count(),
            served._link.served.num_keys() - served._link.served.check([f"line/0/dprims/{name}"]),
        )

    def pairs(n: int) -> None:
        for _ in range(n):
            with lock:
                pass

    with lock:
        assert in_thread(lambda: other.acquire(timeout=0.05))() is None
    pairs(2 * BLOCK)
    before = footprint()
    pairs(10_000)
    assert footprint() <= before
    with lock:
        assert in_thread(lambda: other.acquire(timeout=0.05))() is None
    assert footprint()[0] <= before[0]
    assert footprint()[1] <= before[1]


def test_contention_leaves_nothing_behind(served: Any, backend: TCPStoreBackend, name: str) -> None:
    locks = [DistributedLock(name, where, ttl=60) for where in (served, backend)]

    def work(i: int) -> None:
        for _ in range(30):
            with locks[i % 2]:
                pass

    before = set(served._link.served.list_keys())
    for result in [in_thread(lambda i=i: work(i)) for i in range(8)]:
        result()
    new = {key.split("/")[0] for key in set(served._link.served.list_keys()) - before if name in key}
    assert new <= {"next", "head", "line", "name"}
    with dprims.connect(served.url) as gone:
        DistributedLock(name, gone).acquire(timeout=0)
        beats = [key for key in served._link.served.list_keys() if key.startswith("beat/")]
    assert len([key for key in served._link.served.list_keys() if key.startswith("beat/")]) == len(beats) - 1


def test_waiting_prints_nothing(
    backend: TCPStoreBackend, name: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with DistributedLock(name, backend):
        assert in_thread(lambda: DistributedLock(name, backend).acquire(timeout=0.1))() is None
    assert backend.wait(f"{name}/cell", 0.1) is None
    with dprims.connect(backend.url) as short:
        result = in_thread(lambda: short.wait(f"{name}/cell", LIMIT_S))
        until(lambda: short._link._waits, "a wait that has begun")
    with pytest.raises(BackendUnavailable):
        result()
    assert capfd.readouterr().err == ""


# -- the end ------------------------------------------------------------------------------------------


def test_a_wait_that_begins_while_the_backend_closes_is_refused(
    backend: TCPStoreBackend, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    link, about_to, begun = backend._link, threading.Event(), threading.Event()
    wait_for, call = link.wait_for, link.call

    def begin_late(wait: Any) -> Any:
        about_to.set()
        until(lambda: link.closed, "the closing")
        try:
            return wait_for(wait)
        finally:
            begun.set()

    def after_that(*arguments: Any) -> Any:
        assert not link.closed or begun.wait(LIMIT_S)
        return call(*arguments)

    monkeypatch.setattr(link, "wait_for", begin_late)
    monkeypatch.setattr(link, "call", after_that)
    result = in_thread(lambda: backend.wait(f"{name}/cell", 2 * LIMIT_S))
    assert about_to.wait(LIMIT_S)
    backend.close()
    with pytest.raises(BackendUnavailable, match="closed"):
        result()


def test_who_joins_a_queue_while_the_backend_closes_is_not_left_in_it(
    served: dprims.Backend, backend: TCPStoreBackend, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    outcomes: list[object] = []
    close = backend._link.close

    def join_first(farewell: Any) -> None:
        try:
            outcomes.append(backend.enqueue(name, 60, b"{}"))
        except BackendUnavailable as error:
            outcomes.append(error)
        close(farewell)

    monkeypatch.setattr(backend._link, "close", join_first)
    backend.disconnect()
    assert "closed" in str(outcomes[0])
    assert served.queue(name) == []


@pytest.mark.parametrize("threads", ["as many as it likes", "none at its end"])
def test_a_process_that_ends_without_closing_waits_in_no_store_any_more(
    server: TCPStoreServer, threads: str
) -> None:
    """Else the death of the server in that moment would abort it. Python 3.12 starts no threads then."""
    program = f"""
import atexit, os, signal, threading

@atexit.register  # before all others, so it runs after them
def die() -> None:
    print([thread.name for thread in threading.enumerate() if thread.name.startswith("dprims")])
    os.kill({server._process.pid}, {signal.SIGKILL.value})

import dprims
holder, backend = dprims.connect({server.url!r}), dprims.connect({server.url!r})
dprims.DistributedLock("lock", holder).acquire()
lock = dprims.DistributedLock("lock", backend)
threading.Thread(target=lambda: backend.wait("cell", 60), daemon=True).start()
threading.Thread(target=lock.acquire, daemon=True).start()
while len(backend._link._waits) < 2 or not lock.waiters(): pass
threading.excepthook = lambda _: None

def refuse(_: threading.Thread) -> None:
    raise RuntimeError("can't create new thread at interpreter shutdown")

if {threads == "none at its end"}:
    atexit.register(setattr, threading.Thread, "start", refuse)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=2 * LIMIT_S
    )
    assert (done.returncode, done.stdout) == (0, "[]\n"), done.stderr


# -- faults -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reply_is_lost", [False, True], ids=["not sent", "reply lost"])
@pytest.mark.parametrize("position", range(12))
def test_a_connection_that_breaks_at_any_operation(
    counted: tuple[Any, list[Counted]], served: dprims.Backend, name: str, position: int, reply_is_lost: bool
) -> None:
    """Broken once, somewhere between acquire and release, applied or not: nobody is ever locked out."""
    backend, stores = counted
    anchor = DistributedLock(f"{name}/anchor", backend, ttl=TTL)  # keeps the session's beats going
    lock, other = DistributedLock(name, backend, ttl=TTL), DistributedLock(name, served, ttl=TTL)
    with lock:
        pass
    left = [position]

    def break_off() -> None:
        raise RuntimeError("injected: connection reset")

    def hook(operation: str) -> Callable[[], None] | None:
        if threading.current_thread().name != "dprims-store-line" or left[0] < 0:
            return None
        left[0] -= 1
        if left[0] >= 0:
            return None
        if not reply_is_lost:
            break_off()
        return break_off

    with anchor:
        for store in stores:
            store.hook = hook
        with lock as grant:
            assert other.acquire(timeout=0) is None
            grant.check()
        with other as next_one:
            assert next_one.token > grant.token
        with lock:
            pass


@pytest.mark.parametrize("look", ["held", "beat"])
def test_a_session_that_ends_while_another_looks_holds_nobody_up(
    counted: tuple[Any, list[Counted]], served: dprims.Backend, name: str, look: str
) -> None:
    """It ends after each operation of the other's look in turn, and takes its counter with it."""
    backend, stores = counted
    left = -1

    def hook(_: str) -> Callable[[], None] | None:
        nonlocal left
        left -= 1
        return holder.close if left == 0 else None

    for position in range(1, 13):
        with dprims.connect(served.url) as holder:
            mine, queue = len(stores) - 1, f"{name}/{position}"
            holder.enqueue(queue, 60, b"{}")
            waiter = backend.enqueue(queue, 60, b"{}")
            for store in stores[:mine]:
                store.hook = hook
            left, started = position, time.monotonic()
            if look == "held":
                backend.held(queue)
            else:
                backend.beat([waiter], LIMIT_S)
            left = -1
            assert time.monotonic() - started < 4, f"operation {position} waited for the session that ended"
            backend.leave(waiter)


def test_every_connection_of_a_holder_cut_once(
    served: dprims.Backend, counted: tuple[Any, list[Counted]], name: str
) -> None:
    backend, _ = counted
    lock = DistributedLock(name, backend, ttl=3)
    with lock as grant:
        waiter = in_thread(lambda: DistributedLock(name, backend, ttl=3).acquire(timeout=LIMIT_S))
        until(lambda: lock.waiters(), "a waiter in the queue")
        _cut_connections_to(int(served.url.rpartition(":")[2]))
        proven = grant._ticket.proven
        until(lambda: grant._ticket.proven > proven, "a beat over a new connection")
        grant.verify()
    assert waiter() is not None


def _cut_connections_to(port: int) -> None:
    """Shut down every client connection of this process to the store at *port*."""
    for entry in os.listdir("/proc/self/fd"):
        try:
            cut = socket.socket(fileno=os.dup(int(entry)))
        except OSError:
            continue
        with cut:
            try:
                if cut.getpeername()[1] == port:
                    cut.shutdown(socket.SHUT_RDWR)
            except OSError:
                continue


def test_a_server_that_is_killed_takes_every_lock_with_it(server: TCPStoreServer, name: str) -> None:
    with dprims.connect(server.url) as backend, dprims.connect(server.url) as waits:
        told = threading.Event()
        lock = DistributedLock(name, backend, ttl=TTL, on_lost=lambda grant: told.set())
        grant = lock.acquire(timeout=LIMIT_S)
        assert grant is not None
        result = in_thread(lambda: DistributedLock(name, waits, ttl=TTL).acquire(timeout=None))
        until(lambda: lock.waiters(), "a waiter in the queue")
        server.kill()
        with pytest.raises(BackendUnavailable):
            result()
        assert told.wait(LIMIT_S)
        assert grant.lost
        with pytest.raises(LockLost):
            grant.check()
        with pytest.raises(BackendUnavailable):
            lock.acquire(timeout=0)
        server.start()
        for use in (lambda: lock.acquire(timeout=0), lambda: backend.get("x"), lambda: waits.get("x")):
            with pytest.raises(BackendUnavailable, match="another store"):
                use()
    with dprims.connect(server.url) as anew, DistributedLock(name, anew, ttl=TTL) as next_one:
        assert next_one.token > grant.token


def test_a_server_that_is_frozen_is_unavailable_in_time_and_usable_afterwards(
    server: TCPStoreServer, name: str
) -> None:
    with dprims.connect(f"{server.url}?timeout=0.5") as backend, dprims.connect(server.url) as waits:
        told = threading.Event()
        lock = DistributedLock(name, backend, ttl=TTL, on_lost=lambda grant: told.set())
        grant = lock.acquire(timeout=LIMIT_S)
        assert grant is not None
        patient = DistributedLock(name, waits, ttl=30)
        result = in_thread(lambda: patient.acquire(timeout=LIMIT_S))
        until(lambda: lock.waiters(), "a waiter in the queue")
        server.freeze()
        start = time.monotonic()
        for use in (
            lambda: backend.get("x"),
            lambda: backend.wait("x", 60),
            lambda: backend.compare_and_set("x", None, b""),
            lambda: backend.delete("x"),
            lambda: backend.queue(name),
            lambda: backend.held(""),
            lambda: backend.evict(name, 1),
            lambda: DistributedLock("other", backend, ttl=TTL).acquire(timeout=60),
            grant.verify,
        ):
            with pytest.raises((BackendUnavailable, LockLost)):
                use()
        assert time.monotonic() - start < LIMIT_S
        assert told.wait(LIMIT_S)
        assert grant.lost
        server.thaw()
        next_one = result()
        assert isinstance(next_one, dprims.Grant)
        assert next_one.token > grant.token
        patient.release()
        until(lambda: _answers(backend), "an answer")
        with DistributedLock("other", backend, ttl=TTL, timeout=LIMIT_S):
            pass


def _answers(backend: dprims.Backend) -> bool:
    try:
        backend.get("x")
    except BackendUnavailable:
        return False
    return True


def test_a_forked_child_with_a_store_that_was_passed_in(name: str, served: dprims.Backend) -> None:
    """It has connections of its own; its parent's are neither used nor closed."""
    port = int(served.url.rpartition(":")[2])
    store = dist.PrefixStore("p", dist.TCPStore("127.0.0.1", port, wait_for_workers=False))
    with TCPStoreBackend(client=store) as backend:
        backend.get("x")
        reads, writes = os.pipe()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of a fork with threads: that is the test
            child = os.fork()
        if child == 0:
            try:
                os.write(writes, b"%d" % (backend.write_once(name, b"child") == b"child"))
            finally:
                os._exit(0)
        os.close(writes)
        with os.fdopen(reads, "rb") as answer:
            assert answer.read() == b"1"
        os.waitpid(child, 0)
        assert backend.get(name) == b"child"


# -- processes ----------------------------------------------------------------------------------------


def test_a_waiter_frozen_while_three_hundred_others_come_and_go(
    served: dprims.Backend, backend: TCPStoreBackend, name: str
) -> None:
    lock = DistributedLock(name, backend, ttl=TTL)
    with LockProcess(served.url) as sleeper:
        with lock:
            asked = sleeper.acquire(name, TTL)
            until(lambda: lock.waiters(), "the sleeper in the queue")
            sleeper.freeze()
        with DistributedLock(name, served, ttl=TTL, timeout=LIMIT_S):  # past the sleeper, after a ttl
            pass
        for _ in range(300):
            with lock as grant:
                pass
        holder = lock.acquire(timeout=LIMIT_S)
        assert holder is not None
        sleeper.thaw()
        until(lambda: lock.waiters(), "the sleeper in the queue again")
        assert not asked.done()
        holder.verify()
        lock.release()
        token = asked.result(LIMIT_S)
        assert token is not None
        assert token > grant.token
        sleeper.release(name).result(LIMIT_S)
