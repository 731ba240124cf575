"""Bounded access to torch Stores, whose own operations are not.

A *line* is one connection and the one thread that uses it. A job runs on a line and is waited for;
when the wait runs out the line is abandoned with whatever hangs in it, and the next job gets another.
A torch client never reconnects, so a line that fails is dropped too.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotDone
from typing import Any, TypeVar

from dprims.exceptions import BackendError, BackendUnavailable

T = TypeVar("T")
Job = Callable[[Any], T]

KEEP = 4
"""How many idle lines are kept open."""


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
    """The lines to one store: as many as there are jobs at the same time, few of them kept."""

    def __init__(self, dial: Callable[[], Any], who: str) -> None:
        self.dial = dial
        self._who = who
        self._lock = threading.Lock()
        self._idle: list[Line] = []
        self._all: set[Line] = set()
        self._closed = False

    def start(self, job: Job[T]) -> Future[T]:
        """Run *job* on a line of its own; the caller bounds the wait, or the job itself does."""
        return self._take().submit(job)

    def call(self, job: Job[T], timeout: float) -> T:
        """Run *job* and return its result. BackendUnavailable after *timeout* seconds."""
        line = self._take()
        future = line.submit(job)
        try:
            return future.result(timeout)
        except NotDone:
            if future.done():  # the job itself ended in a TimeoutError, or just now
                return future.result()
            line.drop()
            raise BackendUnavailable(f"{self._who} did not answer within {timeout:.3g} s") from None
        except BackendError:
            raise
        except BaseException:  # an interrupt: whatever the job still does, nobody waits for it
            line.drop()
            raise

    def drop_idle(self) -> None:
        """Close the idle lines: the server that they were open to is not there any more."""
        with self._lock:
            idle, self._idle = self._idle, []
        for line in idle:
            line.drop()

    def close(self, timeout: float) -> None:
        """Close every line and wait for their threads; one that hangs in the store is left behind."""
        with self._lock:
            self._closed = True
            lines = list(self._all)
            self._idle = []
        for line in lines:
            line.drop()
        deadline = time.monotonic() + timeout
        for line in lines:
            if line.thread is not threading.current_thread():
                line.thread.join(max(0.0, deadline - time.monotonic()))

    def _take(self) -> Line:
        with self._lock:
            if self._closed:
                raise BackendUnavailable(f"{self._who} is closed")
            if self._idle:
                return self._idle.pop()
            line = Line(self)
            self._all.add(line)
            return line

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
