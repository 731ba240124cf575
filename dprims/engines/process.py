"""One worker process: an object that lives in it, and calls that return futures.

Death is a fact, not a timeout: when the process ends, its pipe closes, and every call that is open
fails with :class:`~dprims.exceptions.PeerLost` at once. A process that is only frozen keeps its calls
open; deadlines are the caller's business.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import multiprocessing
import os
import pickle
import queue
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from typing import Any

from ..exceptions import DprimsError, PeerLost

log = logging.getLogger("dprims.engines.process")

_PRELOAD = ("torch", "dprims.synchronizer.workers", "redis")
"""What the fork server imports once for all ranks; what is not installed is passed over."""
_END: Any = object()
_PR_SET_PDEATHSIG = 1


class WorkerProcess:
    """A process that builds ``factory(*args)`` and serves calls to the methods of what it returned.

    Calls are served one after the other on one thread, in the order in which they were made; those made
    with :meth:`call_now` are served beside them, and must not block. A method that returns a Future is
    answered when that is done. The process leaves without running exit handlers,
    since a collective that was given up may never end. It dies with the process that started it.
    """

    def __init__(self, name: str, factory: Callable[..., Any], args: Sequence[Any] = ()) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(list(_PRELOAD))
        ours, theirs = context.Pipe()
        self.name = name
        process = context.Process(target=_serve, args=(theirs, factory, tuple(args)), name=name, daemon=True)
        process.start()
        theirs.close()  # so that the pipe ends when the process does
        self._process: Any = process
        self._pid = process.pid or 0
        self._pipe: Connection = ours
        self._open: dict[int, Future[Any]] = {}
        self._lock = threading.Lock()
        self._next = 0
        self._exitcode: int | None = None
        self._lost: PeerLost | None = None
        self._outbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.ready: Future[Any] = self._future(0)
        """Done when the object has been built, or has failed to be."""
        # a frozen process must not block its callers
        self._sender = threading.Thread(target=self._send, name=f"dprims-{name}", daemon=True)
        self._sender.start()
        threading.Thread(target=self._receive, name=f"dprims-{name}", daemon=True).start()

    @property
    def pid(self) -> int:
        """The id of the process."""
        return self._pid

    @property
    def alive(self) -> bool:
        """Whether the process exists; a frozen one does."""
        process = self._process
        return self._lost is None and process is not None and bool(process.is_alive())

    def call(self, method: str, *args: Any, **kwargs: Any) -> Future[Any]:
        """Call *method* in the process, after the calls made before; the future has its result."""
        return self._call(method, args, kwargs, beside=False)

    def call_now(self, method: str, *args: Any, **kwargs: Any) -> Future[Any]:
        """Call *method* at once, whatever the process is busy with; it may not block there."""
        return self._call(method, args, kwargs, beside=True)

    def _call(
        self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any], *, beside: bool
    ) -> Future[Any]:
        with self._lock:
            self._next += 1
            number = self._next
        future = self._future(number)
        try:
            self._outbox.put(pickle.dumps((number, beside, method, args, kwargs)))
        except Exception as error:  # noqa: BLE001 - whatever cannot be pickled is the caller's to see
            self._settle(number, error)
        return future

    def _future(self, number: int) -> Future[Any]:
        future: Future[Any] = Future()
        with self._lock:
            if self._lost is None:
                self._open[number] = future
                return future
        future.set_exception(self._lost)
        return future

    def _settle(self, number: int, outcome: Any) -> None:
        with self._lock:
            future = self._open.pop(number, None)
        if future is None:
            return
        with contextlib.suppress(InvalidStateError):  # the caller has cancelled it
            if isinstance(outcome, BaseException):
                future.set_exception(outcome)
            else:
                future.set_result(outcome)

    def _send(self) -> None:
        while (message := self._outbox.get()) is not _END:
            try:
                self._pipe.send_bytes(message)
            except (OSError, ValueError):
                return

    def _receive(self) -> None:
        while True:
            try:
                number, outcome = pickle.loads(self._pipe.recv_bytes())
            except (EOFError, OSError):
                break
            except Exception as error:  # noqa: BLE001 - one reply is lost, the others are not
                log.warning("%s: a reply could not be read: %r", self.name, error)
                continue
            self._settle(number, outcome)
        # the pipe is closed: it is on its way out
        lost = PeerLost(f"{self.name} (pid {self.pid}) {_how_it_ended(self._join(1.0))}")
        with self._lock:
            self._lost = lost
            numbers = list(self._open)
        for number in numbers:
            self._settle(number, lost)
        self._outbox.put(_END)
        self._sender.join()
        self._pipe.close()  # not before nobody writes to it: the number of its descriptor is given away again

    def _join(self, timeout: float) -> int | None:
        """Wait for the process to end, let go of its descriptors, and return its exit code."""
        process = self._process
        if process is not None:
            process.join(timeout)
            self._exitcode = process.exitcode
            if self._exitcode is not None:
                self._process = None
        return self._exitcode

    def signal(self, number: int) -> None:
        """Send a signal to the process, if it is still there."""
        process = self._process
        with contextlib.suppress(ProcessLookupError):
            if process is not None and process.is_alive():
                os.kill(self.pid, number)

    def close(self, timeout: float = 5.0) -> None:
        """Ask the process to leave, and end it when it has not within *timeout* seconds. Idempotent."""
        self._outbox.put(pickle.dumps(None))
        self._join(timeout)
        self.kill()

    def kill(self) -> None:
        """End the process now, frozen or not, and wait until it is gone."""
        self.signal(signal.SIGKILL)
        self._join(10.0)
        self._outbox.put(_END)

    def __repr__(self) -> str:
        return f"<WorkerProcess {self.name} pid {self.pid} {'alive' if self.alive else 'gone'}>"


def _how_it_ended(code: int | None) -> str:
    if code is None:
        return "closed its pipe"
    if code < 0:
        return f"was ended by {signal.Signals(-code).name}"
    return f"ended with status {code}"


# -- inside the process -------------------------------------------------------------------------------


def _serve(pipe: Connection, factory: Callable[..., Any], args: tuple[Any, ...]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that started us
    _die_with_parent()
    replies = threading.Lock()

    def reply(number: int, outcome: Any) -> None:
        message = _portable(number, outcome)
        with replies, contextlib.suppress(OSError):
            pipe.send_bytes(message)

    def answer(number: int, call: Callable[[], Any]) -> None:
        try:
            outcome = call()
        except BaseException as error:  # noqa: BLE001 - whatever a call raises is its caller's to see
            outcome = error
        if isinstance(outcome, Future):
            outcome.add_done_callback(lambda done: reply(number, done.exception() or done.result()))
        else:
            reply(number, outcome)

    try:
        worker = factory(*args)
    except BaseException as error:  # noqa: BLE001 - it goes to whoever started us
        reply(0, error)
        _leave(1)
    reply(0, None)
    calls: queue.SimpleQueue[tuple[int, Callable[[], Any]]] = queue.SimpleQueue()
    threading.Thread(target=lambda: _drain(calls, answer), name="dprims-calls", daemon=True).start()
    while True:
        try:
            message = pickle.loads(pipe.recv_bytes())
        except (EOFError, OSError):  # whoever started us is gone
            _leave(0)
        if message is None:
            close = getattr(worker, "close", None)
            if close is not None:
                with contextlib.suppress(Exception):
                    close()
            _leave(0)
        number, beside, method, arguments, keywords = message

        def call(method: str = method, arguments: Any = arguments, keywords: Any = keywords) -> Any:
            return getattr(worker, method)(*arguments, **keywords)

        if beside:
            answer(number, call)
        else:
            calls.put((number, call))


def _drain(calls: queue.SimpleQueue[Any], answer: Callable[[int, Callable[[], Any]], None]) -> None:
    while True:
        number, call = calls.get()
        answer(number, call)


def _portable(number: int, outcome: Any) -> bytes:
    """The reply as bytes; an exception keeps its type where it can be pickled, else its text."""
    try:
        message = pickle.dumps((number, outcome))
        if isinstance(outcome, BaseException):
            pickle.loads(message)  # an exception may pickle and yet not come back
        return message
    except Exception as error:  # noqa: BLE001 - pickling runs code of any kind
        text = f"{type(outcome).__name__}: {outcome}" if isinstance(outcome, BaseException) else repr(error)
        return pickle.dumps((number, DprimsError(text)))


def _die_with_parent() -> None:
    """Be killed when the fork server ends, also while frozen (Linux; elsewhere the closed pipe has to do)."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    alive = getattr(forkserver._forkserver, "_forkserver_alive_fd", None)
    if alive is not None:  # a frozen child that keeps this open would keep the fork server
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, alive)
        os.close(null)


def _leave(status: int) -> None:
    """End this process without exit handlers: a collective that was given up may never return."""
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(status)
