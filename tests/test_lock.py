"""DistributedLock within one process, the same on every backend."""

from __future__ import annotations

import asyncio
import ctypes
import logging
import os
import random
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

import pytest

import dprims
from dprims import (
    AlreadyHeld,
    BackendMisconfigured,
    BackendUnavailable,
    DistributedLock,
    FencedResource,
    Grant,
    LockLost,
    LockTimeout,
    NotHeld,
)
from dprims import lock as lock_module
from dprims.backend import split_url
from dprims.session import Session

from .helpers.services import LIMIT_S, Service, in_thread, until


@pytest.fixture
def backend(service: Service) -> Iterator[dprims.Backend]:
    with dprims.connect(service.url) as opened:
        yield opened


@pytest.fixture
def other(service: Service) -> Iterator[dprims.Backend]:
    """What another process would have."""
    with dprims.connect(service.url) as opened:
        yield opened


@pytest.fixture
def name() -> str:
    return f"lock-{uuid.uuid4().hex[:10]}"


# -- acquire and release ----------------------------------------------------------------------------


def test_acquire_and_release(backend: dprims.Backend, other: dprims.Backend, name: str) -> None:
    mine, theirs = DistributedLock(name, backend), DistributedLock(name, other)
    first = mine.acquire(timeout=0)
    assert first is not None
    assert not first.lost
    first.check()
    first.verify()
    assert theirs.acquire(timeout=0) is None
    first.release()
    second = theirs.acquire(timeout=LIMIT_S)
    assert second is not None
    assert second.token > first.token
    with pytest.raises(NotHeld):
        first.check()
    with pytest.raises(NotHeld):
        first.release()
    assert not first.lost, "a released grant is not a lost one"
    theirs.release()
    with mine as third:
        assert third.token > second.token
    with mine as fourth:
        assert fourth.token > third.token


def test_a_second_acquire_by_the_same_thread_is_an_error_at_once(backend: dprims.Backend, name: str) -> None:
    lock, same = DistributedLock(name, backend), DistributedLock(name, backend)
    with lock:
        for again in (lock, same):
            with pytest.raises(AlreadyHeld, match=name):
                again.acquire(timeout=LIMIT_S)
        with DistributedLock(name, backend, namespace="elsewhere") as elsewhere:
            assert not elsewhere.lost
        assert in_thread(lambda: lock.acquire(timeout=0))() is None, "another thread queues"
    with same:
        pass


def test_any_thread_may_release(backend: dprims.Backend, name: str) -> None:
    lock = DistributedLock(name, backend)
    grant = lock.acquire(timeout=LIMIT_S)
    assert grant is not None
    in_thread(lock.release)()
    with pytest.raises(NotHeld):
        lock.release()
    grant = lock.acquire(timeout=LIMIT_S)
    assert grant is not None
    in_thread(grant.release)()
    with pytest.raises(NotHeld):
        lock.release()


def test_release_of_what_was_never_held(backend: dprims.Backend, name: str) -> None:
    with pytest.raises(NotHeld, match=name):
        DistributedLock(name, backend).release()


def test_the_body_may_release(backend: dprims.Backend, other: dprims.Backend, name: str) -> None:
    lock = DistributedLock(name, backend)
    with lock as grant:
        grant.release()
        with DistributedLock(name, other, timeout=LIMIT_S) as taken:
            assert taken.token > grant.token
    with lock:
        lock.release()


def test_an_exception_in_the_body_frees_the_lock(
    backend: dprims.Backend, other: dprims.Backend, name: str
) -> None:
    with pytest.raises(ZeroDivisionError), DistributedLock(name, backend):
        raise ZeroDivisionError
    with DistributedLock(name, other, timeout=LIMIT_S):
        pass


def test_a_release_of_an_old_grant_leaves_the_new_one_alone(backend: dprims.Backend, name: str) -> None:
    lock = DistributedLock(name, backend)
    old = lock.acquire(timeout=LIMIT_S)
    assert old is not None
    assert backend.evict(f"dprims/{name}", old.token)
    with pytest.raises(LockLost):
        old.verify()
    new = lock.acquire(timeout=LIMIT_S)
    assert new is not None
    with pytest.raises(LockLost):
        old.release()
    new.verify()
    with pytest.raises(AlreadyHeld):
        lock.acquire(timeout=0)
    lock.release()


# -- waiting ----------------------------------------------------------------------------------------


def test_a_wait_ends_in_time_and_says_who_holds_it(
    backend: dprims.Backend, other: dprims.Backend, name: str
) -> None:
    with DistributedLock(name, backend, label="trainer"):
        waiter = DistributedLock(name, other, timeout=0.2)
        start = time.monotonic()
        assert waiter.acquire() is None
        assert waiter.acquire(timeout=0.1) is None
        assert 0.29 <= time.monotonic() - start < LIMIT_S
        with pytest.raises(LockTimeout, match=rf"{name}.*0\.2 s.*trainer pid {os.getpid()}"), waiter:
            pytest.fail("the body ran unlocked")


def test_a_wait_without_end_says_who_holds_it(
    backend: dprims.Backend,
    other: dprims.Backend,
    name: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(lock_module, "REPORT_EVERY_S", 0.1)
    caplog.set_level(logging.INFO, "dprims.lock")
    waiter = DistributedLock(name, other)
    with DistributedLock(name, backend, label="trainer"):
        entered = in_thread(lambda: waiter.acquire(timeout=None))
        until(lambda: "still waiting; held by trainer" in caplog.text, "a line in the log")
    assert entered() is not None
    waiter.release()


def test_first_come_first_served(backend: dprims.Backend, other: dprims.Backend, name: str) -> None:
    order: list[int] = []
    lock = DistributedLock(name, backend)

    def enter(i: int) -> None:
        with DistributedLock(name, (backend, other)[i % 2]):
            order.append(i)

    with lock:
        results = []
        for i in range(6):
            results.append(in_thread(lambda i=i: enter(i)))
            until(lambda i=i: len(lock.waiters()) == i + 1, f"waiter {i} in the queue")
    for result in results:
        result()
    assert order == [0, 1, 2, 3, 4, 5]


def test_sixty_four_threads_on_one_backend(backend: dprims.Backend, name: str) -> None:
    inside, overlaps = [0], [0]
    resource = FencedResource()
    lock = DistributedLock(name, backend, ttl=30)

    def work() -> None:
        with lock as grant:
            inside[0] += 1
            overlaps[0] += inside[0] != 1
            resource.check(grant.token)
            inside[0] -= 1

    for result in [in_thread(work) for _ in range(64)]:
        result()
    assert overlaps == [0]


def test_a_hundred_waiters_that_gave_up_are_in_nobodys_way(
    service: Service, backend: dprims.Backend, other: dprims.Backend, name: str
) -> None:
    lock = DistributedLock(name, backend, ttl=30)
    with lock:
        waiters = [DistributedLock(name, other, ttl=30) for _ in range(20)]
        for _ in range(5):
            for result in [in_thread(lambda w=w: w.acquire(timeout=0.05)) for w in waiters]:
                assert result() is None
        assert lock.waiters() == []
    start = time.monotonic()
    with DistributedLock(name, other, timeout=LIMIT_S):
        assert time.monotonic() - start < 5, "not the ttl of those who left"


def test_who_holds_it_and_who_waits(backend: dprims.Backend, other: dprims.Backend, name: str) -> None:
    lock = DistributedLock(name, backend, label="é", payload={"port": 1})
    assert lock.owner() is None
    assert lock.waiters() == []
    before = time.time()
    with lock as grant:
        owner = lock.owner()
        assert owner is not None
        assert (owner.pid, owner.token, owner.label) == (os.getpid(), grant.token, "é")
        assert before - 1 <= owner.since <= time.time() + 1
        assert owner.thread == threading.current_thread().name
        waiter = DistributedLock(name, other, label="next")
        result = in_thread(lambda: waiter.acquire(timeout=LIMIT_S))
        until(lambda: [w.label for w in lock.waiters()] == ["next"], "a waiter in the queue")
        assert [w.token for w in lock.waiters()] == [None]
    assert result() is not None
    waiter.release()
    until(lambda: lock.owner() is None, "a free lock")


# -- losing it --------------------------------------------------------------------------------------


def test_the_holder_of_a_lost_lock_is_told_and_may_use_the_lock(
    service: Service, backend: dprims.Backend, other: dprims.Backend, name: str
) -> None:
    told: list[tuple[Grant, Grant | None]] = []
    lock = DistributedLock(name, backend, ttl=service.ttl)
    lock.on_lost = lambda grant: told.append((grant, lock.acquire(timeout=LIMIT_S)))
    grant = lock.acquire(timeout=LIMIT_S)
    assert grant is not None
    assert other.evict(f"dprims/{name}", grant.token)
    until(lambda: told, "on_lost")
    assert grant.lost
    with pytest.raises(LockLost, match=name):
        grant.check()
    lost, again = told[0]
    assert lost is grant
    assert again is not None
    assert again.token > grant.token
    with pytest.raises(LockLost, match=name):
        grant.release()
    again.verify()
    again.release()
    assert len(told) == 1


def test_leaving_the_body_of_a_lost_lock_says_so(
    backend: dprims.Backend, other: dprims.Backend, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    def lose_it(error: Exception | None) -> None:
        with DistributedLock(name, backend) as grant:
            other.evict(f"dprims/{name}", grant.token)
            with suppress(LockLost):
                grant.verify()
            if error is not None:
                raise error

    with pytest.raises(LockLost):
        lose_it(None)
    with pytest.raises(ZeroDivisionError):
        lose_it(ZeroDivisionError())
    assert "while ZeroDivisionError was in flight" in caplog.text


@pytest.mark.parametrize("service", ["memory", "tcpstore", "redis"], indirect=True)
def test_a_holder_that_is_starved_knows_before_any_beat(
    service: Service, backend: dprims.Backend, name: str
) -> None:
    holds_the_gil = ctypes.PyDLL(None).usleep
    with DistributedLock(name, backend, ttl=service.ttl) as grant:
        holds_the_gil(int(service.ttl * 0.4e6))
        assert not grant.lost, "0.4 ttl is not a loss"
        until(lambda: grant._ticket.proven > backend.clock() - service.ttl / 4, "a beat")
        holds_the_gil(int(service.ttl * 1.1e6))
        assert grant.lost
        with pytest.raises(LockLost):
            grant.check()
        with pytest.raises(LockLost):
            grant.release()
    assert grant.lost, "sticky"


def test_verifying_one_lock_puts_off_nothing_of_another(
    service: Service, backend: dprims.Backend, other: dprims.Backend, name: str
) -> None:
    dead = other.enqueue(f"dprims/{name}", service.ttl, b"{}")
    with DistributedLock(f"{name}/other", backend, ttl=service.ttl) as grant:
        waiting = in_thread(lambda: DistributedLock(name, backend, ttl=service.ttl).acquire(timeout=LIMIT_S))
        until(lambda: grant.verify() or backend.queue(f"dprims/{name}")[0].token != dead.token, "the lapse")
    next_one = waiting()
    assert isinstance(next_one, Grant)
    next_one.release()


def test_verify_asks_the_server(backend: dprims.Backend, other: dprims.Backend, name: str) -> None:
    lock = DistributedLock(name, backend, ttl=30)
    grant = lock.acquire(timeout=LIMIT_S)
    assert grant is not None
    other.evict(f"dprims/{name}", grant.token)
    with pytest.raises(LockLost):
        grant.verify()
    assert grant.lost


def test_a_release_that_fails_may_be_tried_again(
    backend: dprims.Backend, other: dprims.Backend, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before it reached the server, and after."""
    for reaches in (False, True):
        lock = DistributedLock(name, backend, ttl=30)
        grant = lock.acquire(timeout=LIMIT_S)
        assert grant is not None

        def fails(ticket: Any, reaches: bool = reaches) -> bool:
            if reaches:
                type(backend).release(backend, ticket)
            raise BackendUnavailable("no answer")

        with monkeypatch.context() as patched:
            patched.setattr(backend, "release", fails)
            with pytest.raises(BackendUnavailable):
                lock.release()
        lock.release()
        with DistributedLock(name, other, timeout=LIMIT_S):
            pass
        with pytest.raises(NotHeld):
            lock.release()


def test_close_loses_what_is_held_and_ends_what_waits(service: Service, name: str) -> None:
    with dprims.connect(service.url) as backend, dprims.connect(service.url) as waits:
        held = DistributedLock(name, backend, ttl=30).acquire(timeout=LIMIT_S)
        assert held is not None
        result = in_thread(lambda: DistributedLock(name, waits, ttl=30).acquire(timeout=None))
        until(lambda: DistributedLock(name, backend).waiters(), "a waiter in the queue")
        waits.close()
        with pytest.raises(BackendUnavailable):
            result()
        backend.close()
        assert held.lost
        with pytest.raises(LockLost):
            held.check()


# -- asyncio ----------------------------------------------------------------------------------------


def test_async_with(backend: dprims.Backend, other: dprims.Backend, name: str) -> None:
    lock = DistributedLock(name, backend, timeout=LIMIT_S)
    order: list[str] = []

    async def task(who: str) -> None:
        async with lock as grant:
            assert lock.owner().thread == "MainThread"  # not the one that waited for it
            order.append(f"{who} in")
            grant.check()
            await asyncio.sleep(0.01)
            order.append(f"{who} out")

    async def main() -> None:
        with pytest.raises(AlreadyHeld):
            async with lock, lock:
                pass
        await asyncio.gather(task("a"), task("b"), task("c"))
        blocked = DistributedLock(name, other, timeout=0.05)
        async with lock:
            with pytest.raises(LockTimeout):
                async with blocked:
                    pass

    asyncio.run(main())
    assert [entry.split()[1] for entry in order] == ["in", "out"] * 3
    assert lock.owner() is None


def test_a_cancelled_task_keeps_neither_lock_nor_place(
    backend: dprims.Backend, other: dprims.Backend, name: str
) -> None:
    lock, holder = DistributedLock(name, backend, ttl=30), DistributedLock(name, other, ttl=30)

    async def enter() -> None:
        async with lock:
            pytest.fail("the body ran")

    async def main() -> None:
        tasks = [asyncio.create_task(enter()) for _ in range(20)]
        while len(await asyncio.to_thread(holder.waiters)) < 20:
            await asyncio.sleep(0.01)
        late = asyncio.create_task(enter())
        await asyncio.sleep(0)  # it has begun, and may not be in the queue yet
        for task in (*tasks, late):
            task.cancel()
        done = await asyncio.gather(*tasks, late, return_exceptions=True)
        assert all(isinstance(result, asyncio.CancelledError) for result in done)
        while await asyncio.to_thread(holder.waiters):
            await asyncio.sleep(0.01)

    with holder:
        asyncio.run(asyncio.wait_for(main(), LIMIT_S))
    with DistributedLock(name, other, timeout=LIMIT_S):
        pass


# -- bad input --------------------------------------------------------------------------------------


@pytest.mark.parametrize("good", ["a", "with space", "a/b/c", "ключ-锁-🔒", "%:{}*?#&", "x" * 500])
def test_names_that_work(backend: dprims.Backend, other: dprims.Backend, good: str) -> None:
    namespace = uuid.uuid4().hex[:8]
    with DistributedLock(good, backend, namespace=namespace):
        assert DistributedLock(good, other, namespace=namespace).acquire(timeout=0) is None
        assert DistributedLock(good + "/", other, namespace=namespace).acquire(timeout=0) is not None


@pytest.mark.parametrize("bad", ["", "x" * 513, "новый" * 60, "line\nfeed", "nul\0", "\ud800", 7, None, b"x"])
def test_names_that_do_not(bad: Any) -> None:
    with pytest.raises(BackendMisconfigured, match="name"):
        DistributedLock(bad, "memory://names")


@pytest.mark.parametrize("bad", [0, -1, float("nan"), float("inf"), "5", None, True])
def test_ttls_that_make_no_sense(bad: Any) -> None:
    with pytest.raises(BackendMisconfigured, match="ttl"):
        DistributedLock("a", "memory://ttls", ttl=bad)


def test_a_ttl_below_the_floor_is_raised_with_a_warning(backend: dprims.Backend, name: str) -> None:
    floor = backend.guarantees.min_ttl
    with pytest.warns(UserWarning, match=f"raised to .*{floor:g}"):
        lock = DistributedLock(name, backend, ttl=floor / 2)
    assert lock.ttl == floor


@pytest.mark.parametrize("bad", [-0.1, float("nan"), float("-inf"), "1", True])
def test_timeouts_that_make_no_sense(bad: Any) -> None:
    with pytest.raises(BackendMisconfigured, match="timeout"):
        DistributedLock("a", "memory://timeouts", timeout=bad)
    with pytest.raises(BackendMisconfigured, match="timeout"):
        DistributedLock("a", "memory://timeouts").acquire(timeout=bad)


@pytest.mark.parametrize("bad", [3, "stop", []])
def test_what_cannot_be_called_when_a_lock_is_lost(bad: Any) -> None:
    with pytest.raises(BackendMisconfigured, match=r"lock 'a': on_lost is .*; expected None or a function"):
        DistributedLock("a", "memory://on-lost", on_lost=bad)


def test_payloads_that_cannot_travel() -> None:
    for bad in (object(), "x" * 20_000):
        lock = DistributedLock("a", "memory://payloads", payload=bad)
        with pytest.raises(BackendMisconfigured):
            lock.acquire(timeout=0)


# -- where the backend comes from ---------------------------------------------------------------------


def test_the_backend_may_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DPRIMS_BACKEND", "memory://from-the-environment")
    lock = DistributedLock("a")
    assert lock.backend.url == "memory://from-the-environment"
    assert DistributedLock("b", "memory://from-the-environment").backend is lock.backend
    monkeypatch.delenv("DPRIMS_BACKEND")
    with pytest.raises(BackendMisconfigured, match="DPRIMS_BACKEND"):
        DistributedLock("a")
    lock.backend.close()
    assert DistributedLock("a", "memory://from-the-environment").backend is not lock.backend


@pytest.mark.parametrize("bad", ["nonsense", "http://localhost", 7, object()])
def test_backends_that_are_none(bad: object) -> None:
    with pytest.raises(BackendMisconfigured):
        DistributedLock("a", bad)


# -- cells ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "value", "token", "said"),
    [
        ("k", "text", 1, "cell 'k': value is a str; expected bytes"),
        ("k", b"v", "1", "cell 'k': token is '1'; expected the int"),
        ("k", b"v", None, "cell 'k': token is None; expected the int"),
        ("k", b"v", True, "cell 'k': token is True; expected the int"),
        (7, b"v", 1, "cell key is 7, a int; expected text"),
    ],
)
def test_what_no_cell_could_keep_is_refused(key: Any, value: Any, token: Any, said: str) -> None:
    with dprims.connect("memory://cells") as backend:
        with pytest.raises(BackendMisconfigured, match=said):
            backend.write_fenced(key, value, token)
        if value == b"v":
            with pytest.raises(BackendMisconfigured, match=said):
                backend.raise_fence(key, token)
        if type(token) is int:
            with pytest.raises(BackendMisconfigured, match=said):
                backend.write_once(key, value)
        assert backend.get("k") is None


# -- in general -------------------------------------------------------------------------------------


def test_a_fenced_resource_refuses_the_past() -> None:
    resource = FencedResource("register")
    for token in (3, 3, 8):
        resource.check(token)
    with pytest.raises(LockLost, match=r"register.*7.*8"):
        resource.check(7)
    assert resource.highest == 8


@pytest.mark.parametrize("service", ["memory"], indirect=True)
def test_a_heartbeat_outlives_what_its_backend_raises(
    backend: dprims.Backend, name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real, failures = backend.beat, [RuntimeError("a bug"), BackendUnavailable("no answer")]

    def beat(tickets: Any, timeout: float) -> float | None:
        if failures:
            raise failures.pop()
        return real(tickets, timeout)

    monkeypatch.setattr(backend, "beat", beat)
    with DistributedLock(name, backend, ttl=3) as grant:
        until(lambda: not failures, "failed beats")
        proven = grant._ticket.proven
        until(lambda: grant._ticket.proven > proven, "a beat that works")
    assert "a bug" in caplog.text
    assert "no answer" in caplog.text


@pytest.mark.parametrize("service", ["memory"], indirect=True)
def test_a_waiter_is_looked_after_at_once_though_a_beat_is_on_its_way(
    backend: dprims.Backend, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Backends time those ahead of a waiter from its first beat on: it may not be put off."""
    started, go_on, seen = threading.Event(), threading.Event(), threading.Event()
    real = backend.beat

    def beat(tickets: Any, timeout: float) -> float | None:
        if any(ticket.name == "late" for ticket in tickets):
            seen.set()
            return None
        started.set()
        go_on.wait(LIMIT_S)
        return None

    monkeypatch.setattr(backend, "beat", beat)
    session = Session.of(backend)
    first, late = backend.enqueue(name, 600, b"{}"), dprims.backend.Ticket("late", 600, b"{}")
    session.keep(dprims.backend.Ticket("first", 600, b"{}"), lambda: None)
    assert started.wait(LIMIT_S)
    session.keep(late, lambda: None)
    go_on.set()
    assert seen.wait(LIMIT_S)
    monkeypatch.setattr(backend, "beat", real)
    for ticket in list(session._tickets):
        session.drop(ticket)
    backend.release(first)


def test_heartbeats_leave_the_sequence_of_the_global_random_alone(
    service: Service, backend: dprims.Backend, name: str
) -> None:
    with dprims.DistributedLock(name, backend, ttl=service.ttl) as grant:
        before, start = random.getstate(), time.monotonic()
        until(lambda: time.monotonic() >= start + 1.5 * service.ttl, "a time that only beats outlive")
        grant.check()
        assert random.getstate() == before


@pytest.mark.parametrize("url", ["foo://", "foo://x"])
def test_a_scheme_that_nobody_knows_is_named(url: str) -> None:
    with pytest.raises(BackendMisconfigured, match="backend scheme is 'foo'; expected one of etcd"):
        dprims.connect(url)


@pytest.mark.parametrize("scheme", ["tcpstore", "redis", "rediss", "etcd", "etcds"])
def test_an_address_that_is_none_is_refused_by_name(scheme: str) -> None:
    for place in ("[::1", "[", "[nowhere]:x"):
        with pytest.raises(BackendMisconfigured, match="backend URL is"):
            dprims.connect(f"{scheme}://{place}")


@pytest.mark.parametrize(
    "url",
    [
        "redis://u:p%40w@h:1/2?a=b&c=d",
        "unix:///run/x.sock?db=1",
        "etcd://h1:1,h2:2/a/b/?timeout=1#f",
        "TCPSTORE://[::1]:5?serve=1",
        "memory://name",
        "memory://",
        "etcd://u@h?x=a/b",
    ],
)
def test_a_url_is_split_as_urllib_does(url: str) -> None:
    assert split_url(url) == urlsplit(url)
