"""A process that takes and releases locks on command, to be frozen and killed by tests.

::

    with LockProcess("redis://localhost") as holder:
        token = holder.acquire("name", ttl=1.0).result(10)
        holder.kill()
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import threading
import time
import warnings
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from ..exceptions import PeerLost

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    from ..lock import DistributedLock, Grant

__all__ = ["LockProcess"]

_END_S = 10.0


class LockProcess:
    """One process connected to *url*. Each command runs on a thread of its own, its result is a future.

    The futures raise what the command raised there, or :class:`~dprims.exceptions.PeerLost` when the
    process ended. POSIX only.
    """

    def __init__(self, url: str) -> None:
        context = multiprocessing.get_context("forkserver")
        if "torch" in sys.modules:  # else the import would be the slowest part of many tests
            context.set_forkserver_preload(["torch.distributed", __name__])
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(url, theirs), daemon=True)
        self._process.start()
        theirs.close()
        self._lock = threading.Lock()
        self._asked: dict[int, Future[Any]] = {}
        self._count = 0
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid or 0

    def acquire(self, name: str, ttl: float, timeout: float | None = None) -> Future[int | None]:
        """Acquire the lock *name*: its token, or None when *timeout* ran out."""
        return self._ask("acquire", name, ttl, timeout)

    def release(self, name: str) -> Future[None]:
        """Release it."""
        return self._ask("release", name)

    def lost(self, name: str) -> Future[bool]:
        """Whether its grant is lost."""
        return self._ask("lost", name)

    def reported(self, name: str) -> Future[int]:
        """The token with which ``on_lost`` is called, once it is."""
        return self._ask("reported", name)

    def fork(self, name: str, ttl: float) -> Future[dict[str, Any]]:
        """Fork, and say what the child saw of the grant of *name*, and whether it could lock for itself."""
        return self._ask("fork", name, ttl)

    def freeze(self) -> None:
        """SIGSTOP; returns when it has stopped."""
        os.kill(self.pid, signal.SIGSTOP)
        deadline = time.monotonic() + _END_S
        while _state(self.pid) not in "TtZ":
            if time.monotonic() > deadline:
                raise TimeoutError(f"process {self.pid} did not stop within {_END_S} s")
            time.sleep(0.001)

    def thaw(self) -> None:
        """SIGCONT."""
        os.kill(self.pid, signal.SIGCONT)

    def kill(self) -> None:
        """SIGKILL; returns when it is dead."""
        self._process.kill()
        self._process.join(_END_S)

    def close(self) -> None:
        """Kill it if it still runs, and forget it."""
        self.kill()
        self._reader.join(_END_S)
        self._process.close()

    def __enter__(self) -> LockProcess:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _ask(self, command: str, *args: Any) -> Future[Any]:
        future: Future[Any] = Future()
        with self._lock:
            self._count += 1
            self._asked[self._count] = future
            with contextlib.suppress(OSError):  # the reader sees the same, and says so
                self._pipe.send((self._count, command, args))
        return future

    def _read(self) -> None:
        try:
            while True:
                number, ok, value = self._pipe.recv()
                with self._lock:
                    future = self._asked.pop(number)
                if ok:
                    future.set_result(value)
                else:
                    future.set_exception(value)
        except (EOFError, OSError):
            with self._lock:
                asked, self._asked = self._asked, {}
                self._pipe.close()
        for future in asked.values():
            future.set_exception(PeerLost(f"process {self.pid} ended"))


def _state(pid: int) -> str:
    """The state of a process as the kernel names it: T when it is stopped. Needs /proc."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def _serve(url: str, pipe: Connection) -> None:
    served = _Served(url)
    sending = threading.Lock()

    def run(number: int, command: str, args: tuple[Any, ...]) -> None:
        try:
            reply = (number, True, getattr(served, command)(*args))
        except BaseException as error:  # noqa: BLE001 - it is raised where the command came from
            reply = (number, False, error)
        with sending, contextlib.suppress(OSError):
            pipe.send(reply)

    with contextlib.suppress(EOFError):
        while True:
            threading.Thread(target=run, args=pipe.recv(), daemon=True).start()
    os._exit(0)  # as a killed process would: nothing is given back


class _Served:
    def __init__(self, url: str) -> None:
        from ..backend import connect

        self._backend = connect(url)
        self._locks: dict[str, DistributedLock] = {}
        self._grants: dict[str, Grant] = {}
        self._reported: dict[str, Future[int]] = {}

    def acquire(self, name: str, ttl: float, timeout: float | None) -> int | None:
        from ..lock import DistributedLock

        reported: Future[int] = Future()
        lock = DistributedLock(
            name, self._backend, ttl=ttl, on_lost=lambda grant: reported.set_result(grant.token)
        )
        grant = lock.acquire(timeout)
        if grant is None:
            return None
        self._locks[name], self._grants[name], self._reported[name] = lock, grant, reported
        return grant.token

    def release(self, name: str) -> None:
        self._grants[name].release()

    def lost(self, name: str) -> bool:
        return self._grants[name].lost

    def reported(self, name: str) -> int:
        return self._reported[name].result()

    def fork(self, name: str, ttl: float) -> dict[str, Any]:
        ours, theirs = multiprocessing.Pipe()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # yes, this process has threads: that is the test
            child = os.fork()
        if child == 0:
            self._in_child(theirs, name, ttl)
        theirs.close()
        try:
            if not ours.poll(_END_S):
                return {"error": "the child did not answer"}
            saw: dict[str, Any] = ours.recv()
        finally:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        return saw

    def _in_child(self, pipe: Connection, name: str, ttl: float) -> NoReturn:
        saw: dict[str, Any] = {"lost": self._grants[name].lost}
        try:
            self._grants[name].release()
            saw["released"] = True
        except Exception as error:  # noqa: BLE001 - it is what the parent asks for
            saw["released"] = repr(error)
        try:
            saw["taken"] = self.acquire(name, ttl, 0.0)
            saw["own"] = self.acquire(f"{name}/child", ttl, _END_S)
        except Exception as error:  # noqa: BLE001 - it is what the parent asks for
            saw["error"] = repr(error)
        pipe.send(saw)
        time.sleep(_END_S)  # until the parent ends it
        os._exit(1)
