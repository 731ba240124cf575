"""DistributedLock between processes that are killed, frozen and cut off, on every backend that spans them.

And what keeps one process's locks alive meanwhile: the heartbeat thread, and how closing ends it.
"""

from __future__ import annotations

import os
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any
from urllib.parse import urlsplit

import pytest

import dprims
from dprims import DistributedLock
from dprims.session import Session
from dprims.testing.lock_process import LockProcess
from dprims.testing.servers import EtcdServer, RedisServer

from .helpers.chaos import Cutter, History, Register, Section, Worker
from .helpers.services import KINDS, LIMIT_S, Service, TCPStoreServer, until

SERVERS: dict[str, Any] = {"tcpstore": TCPStoreServer, "redis": RedisServer, "etcd": EtcdServer}
SPANNING = pytest.mark.parametrize("service", KINDS[1:], indirect=True)
SEED = int(os.environ.get("DPRIMS_CHAOS_SEED", "7"))


@pytest.fixture
def name() -> str:
    return f"lock-{uuid.uuid4().hex[:10]}"


@pytest.fixture
def backend(service: Service) -> Iterator[dprims.Backend]:
    with dprims.connect(service.url) as opened:
        yield opened


@SPANNING
def test_death_and_frost_anywhere_in_the_queue(service: Service, backend: dprims.Backend, name: str) -> None:
    """Holder and waiters, several at once: the living come in in their order, the thawed at the end."""
    lock = DistributedLock(name, backend, ttl=service.ttl)
    with ExitStack() as stack:
        queue = [stack.enter_context(LockProcess(service.url)) for _ in range(6)]
        asked = []
        for i, process in enumerate(queue):
            asked.append(process.acquire(name, service.ttl))
            until(lambda i=i: len(lock.waiters()) == i and lock.owner(), f"process {i} in the queue")
        first = asked[0].result(LIMIT_S)
        queue[2].kill()
        queue[3].freeze()
        queue[0].kill()
        tokens = [first]
        for i in (1, 4, 5):
            tokens.append(asked[i].result(service.takeover_s))
            for later in range(i + 1, 6):
                assert later in (2, 3) or not asked[later].done(), f"{later} is in beside {i}"
            if i == 4:
                queue[3].thaw()
                until(lambda: [w.pid for w in lock.waiters()][-1:] == [queue[3].pid], "the thawed one")
            queue[i].release(name).result(LIMIT_S)
        tokens.append(asked[3].result(LIMIT_S))
        assert tokens == sorted(set(tokens))
        queue[3].release(name).result(LIMIT_S)


@pytest.mark.parametrize("kind", KINDS[1:])
def test_closing_does_not_wait_for_a_frozen_server_lock_by_lock(kind: str, name: str) -> None:
    with SERVERS[kind]() as server:
        backend = dprims.connect(server.url)
        roster = dprims.Roster(name, backend, ttl=60)
        entries = [roster.join(f"member {i}") for i in range(6)]
        server.freeze()
        started = time.monotonic()
        backend.close()
        took = time.monotonic() - started
        server.thaw()
        assert all(entry.lost for entry in entries)
        assert took < 7, f"it took {took:.1f} s"


# -- the heartbeat thread ---------------------------------------------------------------------------


@pytest.fixture
def local(name: str) -> Iterator[dprims.Backend]:
    with dprims.connect(f"memory://{name}") as opened:
        yield opened


def until_renewed(grant: dprims.Grant) -> None:
    proven = grant._ticket.proven
    until(lambda: grant._ticket.proven > proven, "a beat")


def test_a_ttl_longer_than_a_thread_can_wait_costs_no_other_lock_its_beats(local: dprims.Backend) -> None:
    with DistributedLock("for ever", local, ttl=1e11), DistributedLock("short", local, ttl=0.5) as short:
        until_renewed(short)
        until_renewed(short)


def test_a_process_that_is_out_of_threads_loses_no_other_lock_and_is_told_later(
    local: dprims.Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    told, refused = threading.Event(), threading.Event()
    start = threading.Thread.start

    def start_unless(thread: threading.Thread) -> None:
        if thread.name.startswith("dprims-lost") and not refused.is_set():
            refused.set()
            raise RuntimeError("can't start new thread")
        start(thread)

    with DistributedLock("kept", local, ttl=1) as kept:
        lost = DistributedLock("lost", local, ttl=1, on_lost=lambda _: told.set()).acquire()
        assert lost is not None
        monkeypatch.setattr(threading.Thread, "start", start_unless)
        local.evict("dprims/lost", lost.token)
        assert refused.wait(LIMIT_S)
        until_renewed(kept)
        assert told.wait(LIMIT_S)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_heartbeat_thread_that_was_ended_is_started_again(
    local: dprims.Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    def end(*_: object) -> None:
        raise SystemExit

    first = DistributedLock("first", local, ttl=1).acquire()
    assert first is not None
    thread = Session.of(local)._thread
    assert thread is not None
    with monkeypatch.context() as patched:
        patched.setattr(local, "beat", end)
        thread.join(LIMIT_S)
        assert not thread.is_alive()
    with DistributedLock("second", local, ttl=1) as second:
        until_renewed(second)


# -- histories --------------------------------------------------------------------------------------


def test_the_checker_sees_what_is_wrong() -> None:
    def history(*sections: Section, refused: tuple[int, ...] = ()) -> History:
        made = History.__new__(History)
        made.register, made.log = Register(), []
        made.workers = [Worker(0, None, list(sections), list(refused))]
        return made

    assert history(Section(0, 1, 0.0, 1.0), Section(0, 2, 1.1, 2.0)).check() == 2
    for wrong in (
        history(Section(0, 1, 0.0, 1.0), Section(1, 2, 0.9, 2.0)),
        history(Section(0, 2, 0.0, 1.0), Section(1, 1, 1.1, 2.0)),
        history(Section(0, 1, 0.0, 1.0), refused=(1,)),
    ):
        with pytest.raises(AssertionError):
            wrong.check()


FAULTS = {"kill": 0.6, "freeze": 1.2, "cut": 0.4, "stall": 0.2}


@pytest.mark.parametrize("kind", KINDS[1:])
def test_a_short_history_under_faults(kind: str, services: dict[str, Service]) -> None:
    service = services[kind]
    parts = urlsplit(service.url)
    assert parts.port is not None
    cutter = Cutter(parts.port)
    through = service.url.replace(f":{parts.port}", f":{cutter.port}")
    faults = {fault: rate for fault, rate in FAULTS.items() if fault != "stall"}
    history = History(through, service.ttl, 4, SEED)
    try:
        history.run(3.0, faults, cutter=cutter)
        history.settle()
    finally:
        history.close()
        cutter.close()
    assert history.check() > 5, history.log


@pytest.mark.chaos
@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", KINDS[1:])
def test_a_long_history_under_faults(kind: str) -> None:
    """A minute of everything; ``DPRIMS_CHAOS_SEED`` repeats or varies it."""
    servers = SERVERS | {"redis": lambda: RedisServer(persist=True)}
    with servers[kind]() as server:
        cutter = Cutter(server.port)
        through = server.url.replace(f":{server.port}", f":{cutter.port}")
        faults = FAULTS | ({} if kind == "tcpstore" else {"restart": 0.1})
        history = History(through, {"etcd": 2.0}.get(kind, 1.0), 6, SEED)
        try:
            history.run(60.0, faults, server, cutter)
            history.settle()
        finally:
            history.close()
            cutter.close()
    assert history.check() > 100, history.log
