"""One worker process: an object that lives in it, and calls that return futures.

Death is a fact, not a timeout: when the process ends, or its pipe does, every call that is open
fails with :class:`~dprims.exceptions.PeerLost` at once, also where a process that it forked still holds
the pipe. A process that is only frozen keeps its calls open; deadlines are the caller's business.
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
import socket
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from multiprocessing import forkserver, popen_forkserver
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from typing import Any

from ..exceptions import DprimsError, PeerLost

log = logging.getLogger("dprims.engines.process")

_PRELOAD = ("torch", "dprims.synchronizer.workers", "redis")
"""What the fork server imports once for all ranks; what is not installed is passed over."""
_END: Any = object()
_PR_SET_PDEATHSIG = 1


class _Popen(popen_forkserver.Popen):
    """Polled by one thread at a time: the fork server says once how a process ended.

    multiprocessing polls as well, on whatever thread starts a process.
    """

    def __init__(self, process: Any) -> None:
        self._polling = threading.Lock()
        super().__init__(process)

    def poll(self, flag: int = os.WNOHANG) -> int | None:
        with self._polling:
            return super().poll(flag)


class _Process(ForkServerProcess):
    _Popen = staticmethod(_Popen)  # type: ignore[assignment]


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
        process = _Process(target=_serve, args=(theirs, factory, tuple(args)), name=name, daemon=True)
        process.start()
        theirs.close()  # so that the pipe ends when the process does
        self._pid = process.pid or 0
        self._pipe: Connection = ours
        self._open: dict[int, Future[Any]] = {}
        self._lock = threading.Lock()
        self._next = 0
        self._ended = threading.Event()
        self._lost: PeerLost | None = None
        self._outbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.ready: Future[Any] = self._future(0)
        """Done when the object has been built, or has failed to be."""
        # a frozen process must not block its callers
        self._sender = threading.Thread(target=self._send, name=f"dprims-{name}", daemon=True)
        self._sender.start()
        threading.Thread(target=self._receive, name=f"dprims-{name}", daemon=True).start()
        threading.Thread(target=self._watch, args=(process,), name=f"dprims-{name}", daemon=True).start()

    @property
    def pid(self) -> int:
        """The id of the process."""
        return self._pid

    @property
    def alive(self) -> bool:
        """Whether the process exists; a frozen one does."""
        return self._lost is None

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
        if future.done():  # it is lost, and nobody would take the message
            return future
        try:
            self._outbox.put((number, pickle.dumps((beside, method, args, kwargs))))
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
        try:
            if isinstance(outcome, BaseException):
                future.set_exception(outcome)
            else:
                future.set_result(outcome)
        except InvalidStateError:  # the caller has cancelled it
            pass
        except BaseException:  # what a callback raises must not keep the other calls open
            log.exception("%s: a callback of call %d failed", self.name, number)

    def _send(self) -> None:
        while (message := self._outbox.get()) is not _END:
            try:
                _write(self._pipe, *message)
            except (OSError, ValueError):
                return

    def _receive(self) -> None:
        while True:
            try:
                number, message = _read(self._pipe)
            except Exception:  # noqa: BLE001 - there is nothing more to be read, whatever the reason
                break
            try:
                outcome = pickle.loads(message)[1]
            except BaseException as error:  # noqa: BLE001 - unpickling runs code of any kind
                outcome = DprimsError(f"{self._who} sent a reply that could not be read: {error!r}")
                outcome.__cause__ = error
            self._settle(number, outcome)
        self._ended.wait(1.0)  # it is on its way out
        lost = self._lose("closed its pipe")
        with self._lock:
            numbers = list(self._open)
        for number in numbers:
            self._settle(number, lost)
        self._outbox.put(_END)
        self._sender.join()
        with self._lock:  # not while somebody uses the number of its descriptor, which is given away again
            self._pipe.close()

    def _watch(self, process: _Process) -> None:
        """Wait for the process to end, and end its pipe, which processes that it forked may still hold."""
        wait([process.sentinel])
        process.join()
        self._lose(_how_it_ended(process.exitcode or 0))
        self._ended.set()

    def _lose(self, how: str) -> PeerLost:
        """Let all later calls fail, and the threads come to the end of the pipe; what it holds is read."""
        with self._lock:
            if self._lost is None:
                self._lost = PeerLost(f"{self._who} {how}")
            with contextlib.suppress(OSError):  # it has been closed
                end = socket.socket(fileno=self._pipe.fileno())
                try:
                    end.shutdown(socket.SHUT_RDWR)
                finally:
                    end.detach()
            return self._lost

    @property
    def _who(self) -> str:
        return f"{self.name} (pid {self.pid})"

    def signal(self, number: int) -> None:
        """Send a signal to the process, if it is still there."""
        with contextlib.suppress(ProcessLookupError):
            if not self._ended.is_set():
                os.kill(self.pid, number)

    def close(self, timeout: float = 5.0) -> None:
        """Ask the process to leave, and end it when it has not within *timeout* seconds. Idempotent."""
        self._outbox.put((0, b""))
        self._ended.wait(timeout)
        self.kill()

    def kill(self) -> None:
        """End the process now, frozen or not, and wait until it is gone; what it forked is left alone."""
        self.signal(signal.SIGKILL)
        self._ended.wait(10.0)

    def __repr__(self) -> str:
        return f"<WorkerProcess {self.name} pid {self.pid} {'alive' if self.alive else 'gone'}>"


def _how_it_ended(code: int) -> str:
    if code >= 0:
        return f"ended with status {code}"
    try:
        return f"was ended by {signal.Signals(-code).name}"
    except ValueError:  # most of the real-time signals have no name
        return f"was ended by signal {-code}"


def _write(pipe: Connection, number: int, message: bytes) -> None:
    """Send the *message* for a call; its number goes apart, to be known though the rest is unreadable."""
    pipe.send_bytes(number.to_bytes(8, "big"))
    pipe.send_bytes(message)


def _read(pipe: Connection) -> tuple[int, bytes]:
    return int.from_bytes(pipe.recv_bytes(), "big"), pipe.recv_bytes()


# -- inside the process -------------------------------------------------------------------------------


def _serve(pipe: Connection, factory: Callable[..., Any], args: tuple[Any, ...]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that started us
    _die_with_parent()
    replies = threading.Lock()

    def reply(number: int, outcome: Any) -> None:
        message = _portable(number, outcome)
        with replies, contextlib.suppress(OSError):
            _write(pipe, number, message)

    def answer(number: int, call: Callable[[], Any]) -> None:
        try:
            outcome = call()
        except BaseException as error:  # noqa: BLE001 - whatever a call raises is its caller's to see
            outcome = error
        if isinstance(outcome, Future):
            outcome.add_done_callback(lambda done: answer(number, done.result))
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
            number, message = _read(pipe)
        except (EOFError, OSError):  # whoever started us is gone
            _leave(0)
        if not message:
            close = getattr(worker, "close", None)
            if close is not None:
                with contextlib.suppress(Exception):
                    close()
            _leave(0)
        try:
            beside, method, arguments, keywords = pickle.loads(message)
        except BaseException as error:  # noqa: BLE001 - unpickling runs code of any kind
            reply(number, error)
            continue

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
