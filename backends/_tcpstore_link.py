"""How the TCPStore backend reaches torch: addresses, connections, and operations that end in time.

A TCPStore keeps nothing: a server that is gone takes everything with it, and another one on the same port
is another store. Each connection therefore checks the mark that the first client left in the store.
"""

from __future__ import annotations

import os
import socket
import threading
import time
import uuid
from collections.abc import Callable
from concurrent import futures
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar
from urllib.parse import parse_qs

from dprims.backend import boottime, need, split_url
from dprims.exceptions import BackendMisconfigured, BackendUnavailable
from dprims.torchstore import serve_store

from ._lines import Job, Lines, NoThread
from ._tickets import CLOCK, Steps
from ._urls import why_not, without_password

T = TypeVar("T")

ABSENT = b"\0?"
"""A value that never stands anywhere."""

_GOODBYE_S = 1.0
_DIAL_S = 30.0
"""How long torch may take to connect: both ends look up names first. Nobody waits that long for it."""

_PARENTS: list[Any] = []
"""Clients of a parent process: never used here, and never closed here either."""


class Broken(Exception):
    """A store operation failed: the connection is of no use any more."""


class ServerGone(BackendUnavailable):
    """The server is not there any more, and with it every lock."""


@dataclass(slots=True)
class Wait:
    """What somebody waits for on a line of its own."""

    key: str
    limit: timedelta
    wanted: Callable[[], bool]
    ended: threading.Event


class StoreLink:
    """One process's connections to one store, which is served here, somewhere else, or was passed in."""

    def __init__(self, url: str, client: Any, timeout: float) -> None:
        self._dist = need("torch.distributed", "torch")
        self._injected = client
        self.served: Any = None
        """The store, where this process serves it."""
        self.timeout = timeout
        """What bounds an operation, in seconds."""
        self.in_process = False
        """Whether the store lives in this process alone."""
        self._host, self._port = self._open(url) if client is None else self._unwrap(client)
        where = f"tcpstore://{_bracketed(self._host)}:{self._port}"
        self.url = f"hashstore:{self._host}" if self.in_process else where
        self._mark = b""
        self._in_doubt = client is None and self.served is None
        """Whether the next connection has to find out first if there is a server at all."""
        self._start()

    def _start(self) -> None:
        self.closed = False
        self._pid = os.getpid()
        self.session = uuid.uuid4().hex[:16]
        self._lines = Lines(self._dial, self.url)
        self._waits: dict[futures.Future[None], Wait] = {}
        self._beginning = threading.Lock()
        """Held while a wait begins, and while closing sees to it that none does any more."""

    @property
    def is_inherited(self) -> bool:
        """Whether this is a forked child, and the connections are its parent's."""
        return self._pid != os.getpid()

    @property
    def base(self) -> int:
        """What a number is counted from to make a token of this store, and larger than of an older one."""
        return int(self._mark.split(b" ", 1)[0])

    def renew(self) -> None:
        """In a forked child: leave the parent's connections alone, and open others when they are needed."""
        if self.in_process:
            raise BackendMisconfigured(
                f"{self.url} belongs to the parent process; use a backend that spans processes"
            )
        _PARENTS.append((self.served, self._lines, self._injected))
        self.served = None
        self._start()

    # -- operations -----------------------------------------------------------------------------------

    def call(self, job: Job[T], timeout: float | None = None) -> T:
        """Run *job* with a connection; BackendUnavailable after *timeout* seconds."""
        return self.bounded(lambda: self.start(job), timeout)

    def start(self, job: Job[T]) -> futures.Future[T]:
        """Begin to run *job* on a connection that nobody else uses meanwhile."""
        return self._lines.start(job)

    def bounded(self, start: Callable[[], futures.Future[T]], timeout: float | None = None) -> T:
        """Wait for what *start* begins; once more on a new line when its connection proves broken."""
        if self.is_inherited:
            raise BackendUnavailable(f"{self.url}: the connections are the parent process's")
        deadline = time.monotonic() + (self.timeout if timeout is None else timeout)
        try:
            return self._lines.result(start(), deadline - time.monotonic())
        except BackendUnavailable:
            self._in_doubt = True
            raise
        except Broken:
            self._in_doubt = True
            self._lines.drop_idle()
        try:
            return self._lines.result(start(), deadline - time.monotonic())
        except Broken as error:
            raise BackendUnavailable(f"{self.url} broke off: {error}") from error

    def wait_for(self, wait: Wait) -> futures.Future[None]:
        """Wait for a key on a line of its own; BackendUnavailable once this was closed."""

        def job(store: Any) -> None:
            if wait.wanted():
                do(store, "wait", [wait.key], wait.limit)

        with self._beginning:
            if self.closed:
                raise BackendUnavailable(f"{self.url}: this backend was closed")
            waiting = self.start(job)
            self._waits[waiting] = wait

        def ended(_: object) -> None:
            self._waits.pop(waiting)
            wait.ended.set()

        waiting.add_done_callback(ended)
        return waiting

    @property
    def has_unwanted_waits(self) -> bool:
        """Whether something is waited for that nobody wants any more."""
        return any(not wait.wanted() for wait in list(self._waits.values()))

    def end_unwanted_waits(self, store: Any) -> None:
        """End them: a compare_set that fails on a missing key wakes who waits for it, in every torch yet."""
        for wait in list(self._waits.values()):
            if not wait.wanted():
                peek(store, wait.key)

    def close(self, farewell: Job[None]) -> None:
        """End every wait, run *farewell*, and close every connection and what is served here."""
        with self._beginning:
            waits, self.closed = list(self._waits.values()), True
        for wait in waits:
            wait.wanted = no
            wait.ended.set()

        def wind_up(store: Any) -> None:
            farewell(store)
            do(store, "delete_key", f"beat/{self.session}")
            deadline = time.monotonic() + _GOODBYE_S
            while self._waits and time.monotonic() < deadline:  # some may only be about to begin
                self.end_unwanted_waits(store)
                time.sleep(0.001)

        try:
            self.call(wind_up, _GOODBYE_S)
        except NoThread:  # so it is done on this one, with a connection that is bounded by itself
            self._in_doubt = True
            with suppress(BackendUnavailable, Broken):
                wind_up(self._dial())
        except BackendUnavailable:
            pass  # what could not be given back ends with its ttl
        self._lines.close(_GOODBYE_S)
        self.served = None

    # -- connections ----------------------------------------------------------------------------------

    def _open(self, url: str) -> tuple[str, int]:
        expected = "expected tcpstore://host:port or tcpstore://host:0?serve=1"
        parts, shown = split_url(url), f"backend URL is {without_password(url)!r}"
        options = parse_qs(parts.query, keep_blank_values=True)
        try:
            port = parts.port
            serve = options.pop("serve", ["0"]) == ["1"]
            self.timeout = float(options.pop("timeout", [self.timeout])[0])
        except ValueError as error:
            raise BackendMisconfigured(f"{shown}: {why_not(url, error)}; {expected}") from None
        if parts.scheme != "tcpstore" or parts.path.strip("/") or options or port is None:
            raise BackendMisconfigured(f"{shown}; {expected}")
        if not 0 < self.timeout < 3600:
            raise BackendMisconfigured(f"{shown}; expected a timeout of 0 to 3600 s")
        host = parts.hostname or ""
        if not serve:
            if not host or not port:
                raise BackendMisconfigured(f"{shown}; {expected}")
            return host, port
        host = host or reachable_host()
        try:
            self.served = serve_store(host, port, timeout_s=self.timeout)
        except (OSError, RuntimeError) as error:
            raise BackendUnavailable(
                f"no store can be served at {without_password(url)!r}: {_first_line(error)}"
            ) from error
        return host, self.served.port

    def _unwrap(self, client: Any) -> tuple[str, int]:
        """Find the address of the store that was passed in, or that it lives in this process."""
        inner = client
        while isinstance(inner, self._dist.PrefixStore):
            inner = inner.underlying_store
        if isinstance(inner, self._dist.TCPStore):
            return inner.host, inner.port
        if isinstance(inner, self._dist.HashStore):
            self.in_process = True
            return f"{id(inner):x}", 0
        raise BackendMisconfigured(
            f"client is a {type(inner).__name__}; expected a TCPStore, a HashStore, or a PrefixStore over one"
        )

    def _dial(self) -> Any:
        """A connection of our own, to the store that we know. Runs on the thread of its line."""
        store = self._injected
        if not self.in_process:
            # torch would retry, and print each failure; its server warns of a caller that goes at once
            with self._knock() if self._in_doubt else nullcontext():
                try:
                    store = self._connect()
                    store.set_timeout(timedelta(seconds=self.timeout))
                except RuntimeError as error:
                    self._in_doubt = True
                    raise BackendUnavailable(f"{self.url} is no torch store: {_first_line(error)}") from error
        self._check_mark(store)
        self._in_doubt = False
        return store

    def _knock(self) -> socket.socket:
        """See whether anything listens."""
        try:
            return socket.create_connection((self._host, self._port), self.timeout)
        except ConnectionRefusedError as error:
            raise ServerGone(f"nothing serves {self.url} any more, or yet: {error}") from error
        except OSError as error:
            raise BackendUnavailable(f"{self.url} cannot be reached: {error}") from error

    def _connect(self) -> Any:
        if isinstance(self._injected, self._dist.PrefixStore):
            return self._injected.clone()  # the only way to keep its prefix
        limit = timedelta(seconds=self.timeout if self._in_doubt else _DIAL_S)
        return self._dist.TCPStore(
            self._host, self._port, is_master=False, wait_for_workers=False, timeout=limit
        )

    def _check_mark(self, store: Any) -> None:
        if not self._mark:
            mark = f"{int(time.time() * 1000) << 20} {uuid.uuid4().hex}".encode()
            self._mark = do(store, "compare_set", "dprims", b"", mark)
        elif peek(store, "dprims") != self._mark:
            raise ServerGone(
                f"{self.url} is another store now: its server was restarted, and every lock and cell "
                "is gone; close this backend and connect again"
            )
        do(store, "add", f"beat/{self.session}", 0)


def reachable_host() -> str:
    """An address of this host that others can reach: that of the default route, else loopback."""
    for family, target in ((socket.AF_INET, "10.255.255.255"), (socket.AF_INET6, "fd00::1")):
        try:
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect((target, 9))  # chooses a route; sends nothing
                return str(probe.getsockname()[0])
        except OSError:
            continue
    return "127.0.0.1"


def do(store: Any, operation: str, *arguments: Any) -> Any:
    try:
        return getattr(store, operation)(*arguments)
    except RuntimeError as error:
        raise Broken(f"{operation}: {_first_line(error)}") from error


def peek(store: Any, key: str) -> bytes | None:
    """Read a key that may be missing: compare_set then answers with what was expected."""
    value: bytes = do(store, "compare_set", key, ABSENT, ABSENT)
    return None if value == ABSENT else value


def drive(steps: Steps[T], store: Any, stop: Callable[[], bool] | None = None) -> T:
    """Run a procedure, one operation after the other, until its end or until *stop* says so."""
    reply = None
    while True:
        try:
            operation = steps.send(reply)
        except StopIteration as done:
            result: T = done.value
            return result
        if stop is not None and stop():
            raise BackendUnavailable("the store answered too late")
        reply = boottime() if operation is CLOCK else do(store, *operation)


def yes() -> bool:
    return True


def no() -> bool:
    return False


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0]
