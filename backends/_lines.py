"""Bounded access to torch Stores, whose own operations are not.

A *line* is one connection and the one thread that uses it. A job runs on a line and is waited for;
when the wait runs out the job is left to itself, and the next one gets another line. A torch client
never reconnects, so a line on which a job fails is dropped.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from concurrent.futures import TimeoutError as NotDone
from typing import Any, TypeVar

from dprims.exceptions import BackendUnavailable

T = TypeVar("T")
Job = Callable[[Any], T]

KEEP = 64
"""How many idle lines are kept open.

Not few: whenever somebody connects, torch's server looks up that host's name, and a resolver that does
not answer stops it for everybody meanwhile.
"""

MAX_OVERDUE = 8
"""With how many jobs left to themselves no further one is begun."""


class NoThread(BackendUnavailable):
    """There is no thread for another line: the process has too many, or the interpreter ends."""


class Line:
    """One connection and its thread; the thread opens the connection when the first job comes."""

    def __init__(self, lines: Lines) -> None:
        self._lines = lines
        self._jobs: queue.SimpleQueue[tuple[Job[Any], Future[Any]] | None] = queue.SimpleQueue()
        self.dropped = False
        self.thread = threading.Thread(target=self._run, name="dprims-store-line", daemon=True)
        self.thread.start()

    def submit(self, job: Job[T]) -> Future[T]:
        """Run *job* with the connection; the future has its outcome."""
        future: Future[T] = Future()
        self._jobs.put((job, future))
        return future

    def drop(self) -> None:
        """Close the connection as soon as nothing runs on it."""
        self.dropped = True
        self._jobs.put(None)

    def _run(self) -> None:
        store: Any = None
        while (work := self._jobs.get()) is not None:
            job, future = work
            if not future.set_running_or_notify_cancel():
                self._lines.give_back(self)
                continue
            try:
                if store is None:
                    store = self._lines.dial()
                result = job(store)
            except BaseException as error:  # noqa: BLE001 - it belongs to whoever waits
                self.drop()
                future.set_exception(error)
            else:
                self._lines.give_back(self)  # first: who waits may want a line at once
                future.set_result(result)
                del result
            del work, job, future
        del store
        self._lines.ended(self)


class Lines:
    """The lines to one store: as many as there are jobs at the same time."""

    def __init__(self, dial: Callable[[], Any], who: str) -> None:
        self.dial = dial
        self._who = who
        self._lock = threading.Lock()
        self._idle: list[Line] = []
        self._all: set[Line] = set()
        self._overdue: set[Future[Any]] = set()
        self._closed = False

    def start(self, job: Job[T]) -> Future[T]:
        """Run *job* on a line that nobody else uses meanwhile."""
        with self._lock:
            if self._closed:
                raise BackendUnavailable(f"{self._who} is closed")
            if len(self._overdue) >= MAX_OVERDUE:
                raise BackendUnavailable(f"{self._who} has not answered {len(self._overdue)} earlier calls")
            if self._idle:
                line = self._idle.pop()
            else:
                try:
                    line = Line(self)
                except RuntimeError as error:
                    raise NoThread(f"{self._who} cannot be asked: {error}") from error
                self._all.add(line)
            return line.submit(job)

    def result(self, future: Future[T], timeout: float) -> T:
        """What :meth:`start` promised. After *timeout* seconds BackendUnavailable; the job may go on."""
        try:
            return future.result(timeout)
        except NotDone:
            if future.done():  # the job itself raised it
                raise
        except CancelledError:
            raise BackendUnavailable(f"{self._who} was closed meanwhile") from None
        if not future.cancel():
            with self._lock:
                self._overdue.add(future)
            future.add_done_callback(self._in_the_end)
        raise BackendUnavailable(f"{self._who} did not answer within {timeout:.3g} s")

    def drop_idle(self) -> None:
        """Close the idle lines: what they were open to is not there any more."""
        with self._lock:
            idle, self._idle = self._idle, []
        for line in idle:
            line.drop()

    def close(self, timeout: float) -> None:
        """Close every line and wait for their threads; one that hangs in the store is left behind."""
        with self._lock:
            self._closed = True
            self._idle = []
            lines = list(self._all)
        for line in lines:
            line.drop()
        deadline = time.monotonic() + timeout
        for line in lines:
            if line.thread is not threading.current_thread():
                line.thread.join(max(0.0, deadline - time.monotonic()))

    def give_back(self, line: Line) -> None:
        """Called by a line that has finished its job: keep it for the next one, or close it."""
        with self._lock:
            if not line.dropped and not self._closed and len(self._idle) < KEEP:
                self._idle.append(line)
                return
        line.drop()

    def ended(self, line: Line) -> None:
        """Called by a line whose thread ends."""
        with self._lock:
            self._all.discard(line)

    def _in_the_end(self, future: Future[Any]) -> None:
        with self._lock:
            self._overdue.discard(future)
