"""The four services that a lock runs on, for tests that mean the same on each."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import dprims

KINDS = ("memory", "tcpstore", "redis", "etcd")
LIMIT_S = 30.0
"""How long anything may take that has to happen: a bound on hangs."""


class TCPStoreServer:
    """A process that serves a TCPStore, to be killed and frozen. It keeps nothing."""

    def __init__(self) -> None:
        self.port = 0
        self.start()

    @property
    def url(self) -> str:
        return f"tcpstore://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Serve, on the same port as before if there was one."""
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch.distributed"])
        ours, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(self.port, theirs), daemon=True)
        self._process.start()
        theirs.close()
        assert ours.poll(LIMIT_S), "the store's process says nothing"
        self.port = ours.recv()

    def kill(self) -> None:
        self._process.kill()
        self._process.join(LIMIT_S)

    def freeze(self) -> None:
        os.kill(self._process.pid or 0, signal.SIGSTOP)
        until(lambda: process_state(self._process.pid or 0) in "Tt", "a stopped store")

    def thaw(self) -> None:
        os.kill(self._process.pid or 0, signal.SIGCONT)

    def __enter__(self) -> TCPStoreServer:
        return self

    def __exit__(self, *exc: object) -> None:
        self.kill()


def _serve(port: int, pipe: Connection) -> None:
    served = dprims.connect(f"tcpstore://127.0.0.1:{port}?serve=1")
    pipe.send(int(served.url.rpartition(":")[2]))
    threading.Event().wait()


def process_state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


@dataclass(frozen=True)
class Service:
    """A running service and the ttl that suits tests on it."""

    kind: str
    url: str
    ttl: float

    @property
    def takeover_s(self) -> float:
        """Within what a lock whose holder died is had, on a machine that is busy otherwise."""
        return self.ttl * 1.25 + 5.0


def until(
    condition: Callable[[], object], what: str | Callable[[], str] = "it", limit: float = LIMIT_S
) -> None:
    """Wait for *condition*, and fail when it does not come, with *what* as it then is."""
    deadline = time.monotonic() + limit
    while not condition():
        late = time.monotonic() >= deadline
        assert not late, f"{what() if callable(what) else what}: not within {limit:g} s"
        time.sleep(0.005)


def in_thread(call: Callable[[], object]) -> Callable[[], object]:
    """Run *call* on a thread; what is returned waits for it, and returns or raises what it did."""
    outcome: list[object] = []

    def run() -> None:
        try:
            outcome.append(call())
        except BaseException as error:  # noqa: BLE001 - it is raised where it is waited for
            outcome.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()

    def result() -> object:
        thread.join(LIMIT_S)
        assert outcome, "the thread has not ended"
        if isinstance(outcome[0], BaseException):
            raise outcome[0]
        return outcome[0]

    return result
