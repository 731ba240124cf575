"""The four services that a lock runs on, for tests that mean the same on each."""

from __future__ import annotations

import os
import sys
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass

import dprims
from dprims.testing.servers import Server

KINDS = ("memory", "tcpstore", "redis", "etcd")
LIMIT_S = 30.0
"""How long anything may take that has to happen: a bound on hangs."""

_SERVE = """
import sys, threading
import dprims
served = dprims.connect(f"tcpstore://127.0.0.1:{sys.argv[1]}?serve=1")
print("serving", served.url, flush=True)
threading.Event().wait()
"""


class TCPStoreServer(Server):
    """A process that serves a TCPStore, to be killed and frozen. It keeps nothing."""

    distribution = "torch"

    @classmethod
    def _find_program(cls) -> str:
        return sys.executable

    @property
    def url(self) -> str:
        return f"tcpstore://127.0.0.1:{self.port}"

    def _arguments(self) -> list[str]:
        root = os.path.dirname(os.path.dirname(dprims.__file__))
        return ["-c", f"import sys; sys.path.insert(0, {root!r})\n{_SERVE}", str(self.port)]

    def _launch(self, deadline: float) -> bool:
        self._log_path.unlink(missing_ok=True)
        return super()._launch(deadline)

    def _answers(self) -> bool:
        return f"serving {self.url}" in self.log


@dataclass(frozen=True)
class Service:
    """A running service and the ttl that suits tests on it."""

    kind: str
    url: str
    ttl: float

    def lock_name(self) -> str:
        """A name that no other test uses."""
        return f"lock-{uuid.uuid4().hex[:10]}"

    @property
    def takeover_s(self) -> float:
        """Within what a lock whose holder died is had, on a machine that is busy otherwise."""
        return self.ttl * 1.25 + 5.0


def until(condition: Callable[[], object], what: str, limit: float = LIMIT_S) -> None:
    """Wait for *condition*, and fail when it does not come."""
    deadline = time.monotonic() + limit
    while not condition():
        assert time.monotonic() < deadline, f"{what}: not within {limit:g} s"
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
