"""Calls between a leader and its ranks that travel through cells, so that a fleet needs no RPC system.

The cells are those of the store that the leader serves for its groups anyway: whoever can join a group can be
called, nothing is left behind in the lock's backend, and the mail of a leader ends with the leader. A mailbox
belongs to one process of a rank: it is named by the incarnation, so a letter never reaches a successor.
"""

from __future__ import annotations

import json
import logging
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from contextlib import suppress
from typing import Any, TypeVar

from ..backend import Backend
from ..exceptions import BackendError, BackendMisconfigured, DprimsError, PeerLost, RefitError
from .letters import Document, read_error, write_error

log = logging.getLogger("dprims.engines.mailbox")

PART_BYTES = 48 << 10
"""What one cell takes of a letter; a backend promises 64 KiB."""
SLICE_S = 1.0
"""How long one wait for a letter lasts at most, before it is looked whether somebody is still there."""

T = TypeVar("T")

GOODBYE = "bye"
"""The last letter of a leader that leaves."""

Handler = Callable[[Any], "Future[Any]"]


class Channel:
    """Letters from one writer to one reader, in order, in the cells ``name/0``, ``name/1``, ...

    The reader deletes what it has taken. Each side has a Channel of its own. After a put that raised, the
    same letter may be put again, and no other.
    """

    def __init__(self, cells: Backend, name: str, at: int = 0) -> None:
        self.cells = cells
        self.name = name
        self.at = at
        """The number of the next letter."""

    def put(self, letter: bytes) -> int:
        """Write a letter and return its number. Its first part is written last: then it is whole."""
        number, parts = self.at, range(0, max(len(letter), 1), PART_BYTES)
        for index, start in reversed(list(enumerate(parts))):
            part = letter[start : start + PART_BYTES]
            stands = self.cells.write_once(
                self._cell(number, index), part if index else b"%d:" % len(parts) + part
            )
            if not stands.endswith(part):
                raise RefitError(f"{self._cell(number, index)} was written by somebody else")
        self.at += 1
        return number

    def take(self, timeout: float) -> tuple[int, bytes] | None:
        """The next letter and its number; None when none came within *timeout* seconds."""
        number = self.at
        head = self.cells.wait(self._cell(number, 0), timeout)
        if head is None:
            return None
        count, _, letter = head.partition(b":")
        for index in range(1, int(count)):
            part = self.cells.get(self._cell(number, index))
            if part is None:
                raise RefitError(f"part {index} of {int(count)} of {self._cell(number, 0)} is missing")
            letter += part
        self.at += 1
        self._delete(number, int(count))
        return number, letter

    def withdraw(self, number: int) -> None:
        """Delete a letter that nobody will read."""
        head = self.cells.get(self._cell(number, 0))
        if head is not None:
            self._delete(number, int(head.partition(b":")[0]))

    def _delete(self, number: int, count: int) -> None:
        for index in range(count):
            self.cells.delete(self._cell(number, index))

    def _cell(self, number: int, part: int) -> str:
        return f"{self.name}/{number}/{part}" if part else f"{self.name}/{number}"


def mailbox_name(prefix: str, term: int, seat: int, incarnation: int) -> str:
    """Where the letters of a leader to one process are."""
    return f"{prefix}/mail/{term}/{seat}.{incarnation}"


class Post:
    """The leader's side: calls to ranks, each a future."""

    def __init__(self, cells: Backend, prefix: str, term: int) -> None:
        self._cells, self._prefix, self._term = cells, prefix, term
        self._lock = threading.Lock()
        self._boxes: dict[int, _Box] = {}
        self._closed = False

    def call(self, seat: int, incarnation: int, what: str, body: Any) -> Future[Any]:
        """Send a letter to one process. The future has its answer, or the error that it came back with.

        PeerLost once :meth:`lost` said that the process is gone. Never blocks for an answer.
        """
        with self._lock:
            box = self._boxes.get(seat)
            if self._closed:
                return failed(RefitError(f"term {self._term} is over: nobody is called any more"))
            if box is None or box.incarnation < incarnation:
                if box is not None:
                    box.end(PeerLost(f"seat {seat}: another process is in its place"))
                name = mailbox_name(self._prefix, self._term, seat, incarnation)
                box = self._boxes[seat] = _Box(self._cells, name, incarnation)
            elif box.incarnation > incarnation:
                return failed(PeerLost(f"seat {seat}: another process is in its place"))
        return box.call(what, body)

    def lost(self, seat: int, incarnation: int, why: str) -> None:
        """A process is gone: its open calls fail with PeerLost, as do later ones."""
        box = self._boxes.get(seat)
        if box is not None and box.incarnation <= incarnation:
            box.end(PeerLost(why))

    def close(self) -> None:
        """Have every rank leave the store, for at most a second; fail what is open, and end the threads."""
        with self._lock:
            self._closed = True
            boxes = list(self._boxes.values())
        wait([box.call(GOODBYE, None) for box in boxes], SLICE_S)
        for box in boxes:
            box.end(RefitError(f"term {self._term} is over"))
        for box in boxes:
            box.thread.join(SLICE_S)


class _Box:
    """The mail of one process: letters out, and a thread that waits for those that come back."""

    def __init__(self, cells: Backend, name: str, incarnation: int) -> None:
        self.incarnation = incarnation
        self._calls, self._answers = Channel(cells, f"{name}/call"), Channel(cells, f"{name}/answer")
        self._lock = threading.Lock()
        self._open: dict[int, Future[Any]] = {}
        self._ended: DprimsError | None = None
        self.thread = threading.Thread(target=self._collect, name=f"dprims-mail-{name}", daemon=True)
        self.thread.start()

    def call(self, what: str, body: Any) -> Future[Any]:
        letter = json.dumps([what, body], separators=(",", ":")).encode()
        with self._lock:
            if self._ended is not None:
                return failed(self._ended)
            future: Future[Any] = Future()
            self._open[self._calls.at] = future  # before it can be answered
            try:
                self._calls.put(letter)
                return future
            except DprimsError as error:
                failure = error
        self.end(failure)  # letters are in order: after one that is lost none can follow
        return future

    def end(self, error: DprimsError) -> None:
        with self._lock:
            if self._ended is not None:
                return
            self._ended = error
            waiting, self._open = self._open, {}
        for number, future in waiting.items():
            future.set_exception(error)
            with suppress(DprimsError):
                self._calls.withdraw(number)
        with suppress(DprimsError):  # an answer that nobody gave, to wake the thread
            Channel(self._answers.cells, self._answers.name, self._answers.at).put(b"")

    def _collect(self) -> None:
        while self._ended is None:
            try:
                found = self._answers.take(SLICE_S)
                if found is not None:
                    self._deliver(json.loads(found[1]))
            except (DprimsError, ValueError, KeyError, TypeError) as error:
                if self._ended is None:
                    log.warning("%s: %s", self._answers.name, error)
                    self.end(error if isinstance(error, DprimsError) else RefitError(f"no answer: {error}"))
                return

    def _deliver(self, answer: Document) -> None:
        with self._lock:
            future = self._open.pop(answer["to"], None)
        if future is None:
            return
        if answer.get("error") is not None:
            future.set_exception(read_error(answer["error"]))
        else:
            future.set_result(answer["result"])


class Letterbox:
    """A rank's side of one leader's mail: takes letters while :meth:`serve` runs, and answers them.

    *handlers* are by the first word of a letter; each returns a future at once, whose result is JSON.
    """

    def __init__(self, name: str, handlers: dict[str, Handler]) -> None:
        self.name = name
        self.dismissed = False
        """Whether the leader has said goodbye."""
        self._handlers = {**handlers, GOODBYE: self._part}
        self._calls_at = self._answers_at = 0
        self._outbox: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._unsent = b""
        self._calls: Channel | None = None

    def serve(self, cells: Backend, stay: Callable[[], bool]) -> None:
        """Take letters for as long as *stay* says so; it is asked at least each second.

        Goes on after a BackendError where it stopped, when it is called again.
        """
        calls = self._calls = Channel(cells, f"{self.name}/call", self._calls_at)
        ended = threading.Event()
        thread = threading.Thread(
            target=self._send, args=(cells, ended), name=f"dprims-answers-{self.name}", daemon=True
        )
        thread.start()
        try:
            while not self.dismissed and stay():
                found = calls.take(SLICE_S)
                self._calls_at = calls.at
                if found is not None:
                    self._take(*found)
        finally:
            self._calls = None
            ended.set()
            self._outbox.put(b"")  # wakes the thread
            thread.join(2 * SLICE_S)

    def leave(self) -> None:
        """End :meth:`serve` now, for good; any thread may say so."""
        self.dismissed, calls = True, self._calls
        if calls is not None:
            with suppress(DprimsError):  # a goodbye to itself, to wake who waits
                Channel(calls.cells, calls.name, calls.at).put(json.dumps([GOODBYE, None]).encode())

    def _take(self, number: int, letter: bytes) -> None:
        try:
            what, body = json.loads(letter)
            future = self._handlers[what](body)
        except Exception as error:  # noqa: BLE001 - it is the answer
            future = failed(error)
        future.add_done_callback(lambda answered: self._answer(number, answered))

    def _part(self, body: Any) -> Future[Any]:
        self.dismissed = True
        return done(None)

    def _answer(self, number: int, answered: Future[Any]) -> None:
        error = answered.exception()
        answer: Document = {"to": number}
        if error is None:
            answer["result"] = answered.result()
        else:
            answer["error"] = write_error(error)
        self._outbox.put(json.dumps(answer, separators=(",", ":")).encode())

    def _send(self, cells: Backend, ended: threading.Event) -> None:
        answers = Channel(cells, f"{self.name}/answer", self._answers_at)
        while not (ended.is_set() and self._outbox.empty()):
            self._unsent = self._unsent or self._outbox.get()
            try:
                if self._unsent:
                    answers.put(self._unsent)
            except BackendError as error:
                log.warning("%s: an answer waits until its store is back: %s", self.name, error)
                return
            except RefitError as error:
                log.info("%s: the leader waits for no answer any more: %s", self.name, error)
                return
            self._unsent, self._answers_at = b"", answers.at


def done(result: T) -> Future[T]:
    """A future that has this result."""
    future: Future[T] = Future()
    future.set_result(result)
    return future


def failed(error: BaseException) -> Future[Any]:
    """A future that has this error."""
    future: Future[Any] = Future()
    future.set_exception(error)
    return future


def then(future: Future[Any], change: Callable[[Any], Any]) -> Future[Any]:
    """A future that has what *change* makes of the result; errors pass, those of *change* too."""
    changed: Future[Any] = Future()

    def pass_on(first: Future[Any]) -> None:
        try:
            changed.set_result(change(first.result()))
        except Exception as error:  # noqa: BLE001 - it is the outcome
            changed.set_exception(error)

    future.add_done_callback(pass_on)
    return changed


def check_url(backend: object) -> str:
    """The URL under which every rank finds the same backend; BackendMisconfigured for anything else."""
    if not isinstance(backend, str) or "://" not in backend:
        raise BackendMisconfigured(f"backend is {backend!r}; expected the URL that all ranks are given")
    return backend
