"""What the parts of the conformance suite share: two connections, processes, and how a check fails."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as NotDone
from contextlib import contextmanager
from typing import TypeVar

from ..backend import Backend, Ticket
from ..lock import DistributedLock
from ..session import Session
from .lock_process import LockProcess

T = TypeVar("T")


class Suite:
    """Two backends on one service, with what a check needs around them."""

    ttl: float = 1.0
    """What the checks use, in seconds; raised to the backend's ``min_ttl``."""
    patience_s: float = 5.0
    """How much longer than it should anything may take before a check fails."""
    refuses_after_close: bool = False
    """Whether a closed backend raises BackendUnavailable, which is checked only where it is promised."""

    def make_backend(self) -> Backend:
        """A new backend object each time, connected to the same service; the checks close it."""
        raise NotImplementedError(f"{type(self).__name__} does not say how to make a backend")

    def setup_method(self) -> None:
        """Before each check."""
        self._backends: list[Backend] = []
        self._processes: list[LockProcess] = []
        self._pool = ThreadPoolExecutor(32, thread_name_prefix="conformance")
        self._run = uuid.uuid4().hex[:8]
        self.a, self.b = self._connect(), self._connect()
        self.ttl = max(self.ttl, self.a.guarantees.min_ttl)
        self.lapse_s = self.ttl * 1.25 + self.patience_s
        self.long_s = 6 * self.patience_s  # of a wait that something else should end
        self.name = self._name("lock")

    def teardown_method(self) -> None:
        """After each check: nothing stays behind."""
        for process in self._processes:
            process.close()
        for backend in self._backends:
            backend.close()
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _connect(self) -> Backend:
        backend = self.make_backend()
        self._backends.append(backend)
        return backend

    def _name(self, tail: str) -> str:
        return f"conformance/{self._run}/{tail}"

    def _either(self, i: int) -> Backend:
        return (self.a, self.b)[i % 2]

    def _join(
        self, backend: Backend, name: str | None = None, *, ttl: float | None = None, record: bytes = b"{}"
    ) -> Ticket:
        return backend.enqueue(name or self.name, ttl or self.ttl, record)

    def _join_for_long(self, backend: Backend) -> Ticket:
        return self._join(backend, ttl=20 * self.ttl)

    @contextmanager
    def _kept(self, backend: Backend, ticket: Ticket) -> Iterator[Ticket]:
        """Beat for *ticket*, as the session of a live process does."""
        session = Session.of(backend)
        session.keep(ticket, lambda: None)
        try:
            yield ticket
        finally:
            session.drop(ticket)

    def _lock(self) -> DistributedLock:
        return DistributedLock(self.name, self.a, ttl=self.ttl)

    def _wait_for_waiters(self, lock: DistributedLock, n: int) -> None:
        until(lambda: len(lock.waiters()) == n, 6 * self.patience_s, f"waiters in the queue: {n}")

    def _spawn(self, n: int) -> list[LockProcess]:
        """Processes that use the same service; none for a backend that stays within one process."""
        if self.a.guarantees.scope != "hosts":
            return []
        self._processes += (spawned := [LockProcess(self.a.url) for _ in range(n)])
        return spawned

    def _line_up(self, processes: list[LockProcess]) -> list[Future[int | None]]:
        """Have *processes* ask for the lock in order: the first holds it, the others wait."""
        lock, tokens = self._lock(), []
        for i, process in enumerate(processes):
            tokens.append(process.acquire(self.name, self.ttl))
            if i == 0:
                result(tokens[0], 6 * self.patience_s, "a process that asks for a free lock")
            else:
                self._wait_for_waiters(lock, i)
        return tokens


def expect(holds: bool, otherwise: str) -> None:
    if not holds:
        raise AssertionError(otherwise)


def done(future: Future[T], within: float) -> bool:
    try:
        future.exception(within)
    except NotDone:
        return False
    return True


def result(future: Future[T], within: float, what: str) -> T:
    expect(done(future, within), f"{what}: nothing within {within:.2f} s")
    return future.result()


def results(calls: Iterable[Future[T]]) -> list[T]:
    return [call.result(60) for call in list(calls)]


def until(condition: Callable[[], bool], within: float, what: str) -> None:
    deadline = time.monotonic() + within
    while not condition():
        expect(time.monotonic() < deadline, f"{what}: not within {within:.2f} s")
        time.sleep(0.01)
