"""``tcpstore://``: queues and cells on a torch Store, which every torch job has already.

The lock itself is in :mod:`dprims.backends._tickets`, the bounded connections are in
:mod:`dprims.backends._lines`; here the two meet torch. A TCPStore keeps nothing: a server that is
gone takes every lock with it, and another one on the same port is another store. Each connection
therefore checks the mark that the first client left in the store, and the backend never goes on
quietly with an empty one.
"""

from __future__ import annotations

import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from concurrent import futures
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeVar
from urllib.parse import parse_qs, urlsplit

from dprims.backend import Backend, Guarantees, Place, Ticket, need
from dprims.exceptions import BackendError, BackendMisconfigured, BackendUnavailable
from dprims.torchstore import serve_store

from ._lines import Job, Lines
from ._tickets import CLOCK, NumberedTicket, Reading, Steps, Tickets, bell_of

T = TypeVar("T")

_FOR_EVER = timedelta(days=7)
_ABSENT = b"\0?"
_SLACK_S = 0.2
_GOODBYE_S = 1.0
_DIAL_S = 30.0
"""How long torch may take to connect: both ends look up names first. Nobody waits that long for it."""
_PARENTS: list[Any] = []
"""Clients of a parent process: never used here, and never closed here either."""


class _Broken(Exception):
    """A store operation failed: the connection is of no use any more."""


@dataclass(slots=True, eq=False)
class _StoreTicket(NumberedTicket):
    turn: threading.Event = field(default_factory=threading.Event)
    """Set when the ticket has a reason to ask the store how it stands."""
    changing: threading.Lock = field(default_factory=threading.Lock)
    """Held while its number changes or is given up."""
    listens_to: str = ""
    """The bell that is being waited for."""
    unwanted: bool = False
    """To be taken out of its queue by the next beat: what should have done so failed."""
    joining: futures.Future[None] | None = None
    """What gives it a number, which may still come after its time was up."""


@dataclass(slots=True)
class _Wait:
    """What somebody waits for on a line of its own."""

    key: str
    limit: timedelta
    wanted: Callable[[], bool]
    ended: threading.Event


class TCPStoreBackend(Backend):
    """Queues and cells on a TCPStore, a PrefixStore over one, or a HashStore for threads.

    ``tcpstore://host:port`` connects to a store that another process serves. ``tcpstore://:0?serve=1``
    serves one in this process for as long as the backend is open; ``url`` then names its port and an
    address under which other hosts reach this one (a host in the URL is taken as it is). *client* is
    a torch Store to use instead: only its address and prefix are, over connections of our own.

    ``?timeout=8`` (or *timeout*) bounds each operation in seconds; whatever takes longer raises
    :class:`~dprims.exceptions.BackendUnavailable`. After the server was restarted the backend is of
    no use: close it and connect again.
    """

    guarantees = Guarantees(
        scope="hosts",
        survives_restart=False,
        tokens_survive_restart=True,
        min_ttl=0.1,
        detects_killed_holder="within 1.25 ttl of its death or of the waiter's arrival, whichever is later",
        clock="each host times the others on its own monotonic clock; no two clocks are compared",
        limits=(
            "A server that is gone takes every lock with it (all grants are lost). Tokens of the next "
            "server are larger unless the wall clock of the first client to reach it had gone back. "
            "Three small keys stay for each name that was ever used."
        ),
    )

    def __init__(self, url: str = "", *, client: Any = None, timeout: float = 8.0) -> None:
        self._dist = need("torch.distributed", "torch")
        self._injected = client
        self._served: Any = None
        self._timeout = timeout
        if client is None:
            self._host, self._port = self._open_url(url)
        else:
            self._unwrap(client)
        if self.guarantees.scope == "hosts":
            self.url = f"tcpstore://{_bracketed(self._host)}:{self._port}"
        self._mark = b""
        self._in_doubt = client is None and self._served is None
        """Whether the next connection has to find out first if there is a server at all."""
        self._start()
        try:
            self._call(lambda store: None)
        except BaseException:
            self.disconnect()
            raise

    def _start(self) -> None:
        self._closed = False
        self._pid = os.getpid()
        self._session = uuid.uuid4().hex[:16]
        self._tickets = Tickets(self._session, self._base)
        self._lines = Lines(self._dial, repr(self))
        self._mutex = threading.Lock()
        self._open: set[_StoreTicket] = set()
        """What stands in some queue by our doing, and must not be left behind there."""
        self._waits: dict[futures.Future[None], _Wait] = {}

    # -- queues -------------------------------------------------------------------------------------

    def enqueue(self, name: str, ttl: float, record: bytes) -> Ticket:
        ticket = _StoreTicket(name, ttl, record)
        self._join(ticket)
        return ticket

    def await_turn(self, ticket: Ticket, timeout: float) -> bool:
        ticket = _ours(ticket)
        deadline = self.clock() + timeout
        if ticket.held:
            self._confirm(ticket)
        while not (ticket.held or ticket.gone):
            left = deadline - self.clock()
            if not ticket.turn.wait(max(0.0, left)):
                return False
            ticket.turn.clear()
            if not ticket.gone:
                self._confirm(ticket)
        return ticket.held

    def leave(self, ticket: Ticket) -> None:
        ticket = _ours(ticket)
        ticket.gone = True
        ticket.turn.set()
        with ticket.changing:
            self._end(ticket, lambda: self._tickets.leave(ticket))

    def release(self, ticket: Ticket) -> bool:
        ticket = _ours(ticket)
        if ticket.token is None or ticket not in self._open:
            return False
        tries = 0

        def steps() -> Steps[bool]:
            nonlocal tries
            tries += 1
            return self._tickets.release(ticket)

        freed = self._end(ticket, steps)
        ticket.gone = True
        return freed or tries > 1  # a try that broke off may have done it

    def beat(self, tickets: Sequence[Ticket], timeout: float) -> float | None:
        deadline = self.clock() + timeout
        ours = [_ours(ticket) for ticket in tickets]
        try:
            reading = self._run(lambda: self._tickets.beat(t.name for t in ours), timeout)
        except BackendError as error:
            for ticket in ours:
                if isinstance(error, _ServerGone):
                    ticket.gone = ticket.gone or ticket.token is not None
                if ticket.token is None and self.clock() >= ticket.proven + ticket.ttl:
                    ticket.turn.set()  # let it find out for itself, and say so
            raise
        for ticket in ours:
            self._judge(ticket, reading)
        self._give_up_lost()
        return self._look(ours, reading, max(deadline - self.clock(), timeout / 4))

    def queue(self, name: str) -> list[Place]:
        places = self._run(lambda: self._tickets.queue(name))
        return [Place(name, self._base + n if holds else None, record) for n, holds, record in places]

    def held(self, prefix: str) -> list[Place]:
        held = self._run(lambda: self._tickets.held(prefix))
        return [Place(name, self._base + number, record) for name, number, record in held]

    def evict(self, name: str, token: int) -> bool:
        return self._run(lambda: self._tickets.evict(name, token - self._base))

    def _join(self, ticket: _StoreTicket) -> None:
        with self._mutex:
            self._open.add(ticket)

        def job(store: Any) -> None:
            self._drive(self._tickets.join(ticket), store, lambda: ticket.unwanted)

        def start() -> futures.Future[None]:
            ticket.joining = self._lines.start(job)
            return ticket.joining

        try:
            self._bounded(start, self._limit(ticket))
        except BaseException:
            ticket.unwanted = True
            raise
        if not ticket.held:
            self._listen(ticket)

    def _end(self, ticket: _StoreTicket, steps: Callable[[], Steps[T]]) -> T:
        """Run what takes *ticket* out of its queue; should it fail, the next beat sees to it."""
        try:
            done = self._run(steps, self._limit(ticket))
        except BaseException:
            ticket.unwanted = True
            raise
        with self._mutex:
            self._open.discard(ticket)
        return done

    def _confirm(self, ticket: _StoreTicket) -> None:
        """Ask the store how *ticket* stands, and queue it again when it lost its place."""
        reading = self._run(lambda: self._tickets.beat([ticket.name]), self._limit(ticket))
        self._judge(ticket, reading, hold=True)
        if ticket.void:
            with ticket.changing:
                if not ticket.gone:
                    self._join(ticket)
        elif not ticket.held and not ticket.gone:
            self._listen(ticket)

    def _judge(self, ticket: _StoreTicket, reading: Reading, *, hold: bool = False) -> None:
        with self._mutex:  # two beats may be on their way at the same time
            if not ticket.gone:
                self._tickets.judge(ticket, reading, hold=hold)
            due = reading.heads[ticket.name].number == ticket.number
            if ticket.token is None and (ticket.void or due):
                ticket.turn.set()

    def _listen(self, ticket: _StoreTicket) -> None:
        """Wait for the ticket's bell on a line of its own, unless that is being done."""
        bell = bell_of(ticket)
        if ticket.listens_to == bell:
            return
        ticket.listens_to = bell

        def wanted() -> bool:
            return ticket.listens_to == bell and ticket.token is None and not ticket.gone

        def ended(_: object) -> None:
            if ticket.listens_to == bell:
                ticket.listens_to = ""

        waiting = self._wait_for(_Wait(bell, _FOR_EVER, wanted, ticket.turn))
        waiting.add_done_callback(ended)

    def _wait_for(self, wait: _Wait) -> futures.Future[None]:
        """Wait for a key on a line of its own."""

        def job(store: Any) -> None:
            if wait.wanted():
                _do(store, "wait", [wait.key], wait.limit)

        waiting = self._lines.start(job)
        self._waits[waiting] = wait

        def ended(_: object) -> None:
            self._waits.pop(waiting)
            wait.ended.set()

        waiting.add_done_callback(ended)
        return waiting

    def _end_unwanted_waits(self, store: Any) -> None:
        """A compare_set that fails on a missing key wakes who waits for it, on every torch so far."""
        for wait in list(self._waits.values()):
            if not wait.wanted():
                _peek(store, wait.key)

    def _give_up_lost(self) -> None:
        """Leave the queues in which a ticket stands that was lost, or that nobody knows how to leave.

        This session's beats keep it alive, so nobody else would ever pass it over.
        """
        with self._mutex:
            lost = [ticket for ticket in self._open if ticket.gone or ticket.unwanted]
        for ticket in lost:
            if ticket.joining is None or ticket.joining.done():
                self.leave(ticket)
        if any(not wait.wanted() for wait in list(self._waits.values())):
            self._call(self._end_unwanted_waits)

    def _look(self, tickets: list[_StoreTicket], reading: Reading, timeout: float) -> float | None:
        """Time those ahead of our waiters in each queue, all at once."""
        lasts: dict[str, int] = {}
        for ticket in tickets:
            if ticket.token is None and not ticket.gone:
                lasts[ticket.name] = max(lasts.get(ticket.name, 0), ticket.number)
        with self._mutex:  # not only *tickets*: a single one may be asked about in between
            waiting = {ticket.name for ticket in self._open if ticket.token is None}
        self._tickets.keep_sights_of(waiting)
        if not lasts:
            return None

        def steps() -> Steps[float]:
            wanted = []
            for name, last in lasts.items():
                wanted.append((yield from self._tickets.look(name, reading.heads[name], last)))
            return min(wanted)

        return self._run(steps, timeout)

    # -- cells --------------------------------------------------------------------------------------

    def get(self, key: str) -> bytes | None:
        return self._call(lambda store: _read_cell(store, _cell(key)))

    def compare_and_set(self, key: str, expected: bytes | None, value: bytes) -> bytes | None:
        return self._call(lambda store: _change_cell(store, _cell(key), expected, value))

    def wait(self, key: str, timeout: float) -> bytes | None:
        cell = _cell(key)
        deadline = self.clock() + timeout
        while True:
            value = self.get(key)
            left = deadline - self.clock()
            if self._closed:
                raise BackendUnavailable(f"{self!r} is closed")
            if value is not None or left <= 0:
                return value
            # A wait that runs out inside torch prints warnings: it is given longer, and ended otherwise.
            wait = _Wait(cell, timedelta(seconds=left + _SLACK_S), _yes, threading.Event())
            self._wait_for(wait)
            if not wait.ended.wait(left):
                wait.wanted = _no
                self._call(self._end_unwanted_waits)
                return self.get(key)

    def delete(self, key: str) -> None:
        self._call(lambda store: _do(store, "delete_key", _cell(key)))

    # -- life ---------------------------------------------------------------------------------------

    def disconnect(self) -> None:
        """Close every connection and thread, and the store itself where this process serves it."""
        if self._pid != os.getpid():
            return
        with self._mutex:
            tickets, self._open = list(self._open), set()
        for ticket in tickets:
            ticket.gone = True
            ticket.turn.set()
        waits, self._closed = list(self._waits.values()), True
        for wait in waits:
            wait.wanted = _no
            wait.ended.set()

        def wind_up(store: Any) -> None:
            for ticket in tickets:
                self._drive(self._tickets.leave(ticket), store)
            _do(store, "delete_key", f"beat/{self._session}")
            deadline = time.monotonic() + _GOODBYE_S
            while self._waits and time.monotonic() < deadline:  # some may only be about to begin
                self._end_unwanted_waits(store)
                time.sleep(0.001)

        with suppress(BackendError):
            self._call(wind_up, _GOODBYE_S)
        self._lines.close(_GOODBYE_S)
        self._served = None

    def reconnect_after_fork(self) -> None:
        if self.guarantees.scope != "hosts":
            raise BackendMisconfigured(
                f"{self!r} belongs to the parent process; use a backend that spans processes"
            )
        _PARENTS.append((self._served, self._lines, self._injected))
        self._served = None
        self._start()

    # -- torch --------------------------------------------------------------------------------------

    def _open_url(self, url: str) -> tuple[str, int]:
        expected = "expected tcpstore://host:port or tcpstore://host:0?serve=1"
        parts = urlsplit(url)
        options = parse_qs(parts.query, keep_blank_values=True)
        try:
            port = parts.port
            serve = options.pop("serve", ["0"]) == ["1"]
            self._timeout = float(options.pop("timeout", [self._timeout])[0])
        except ValueError as error:
            raise BackendMisconfigured(f"backend URL is {url!r}: {error}; {expected}") from None
        if parts.scheme != "tcpstore" or parts.path.strip("/") or options or port is None:
            raise BackendMisconfigured(f"backend URL is {url!r}; {expected}")
        if not 0 < self._timeout < 3600:
            raise BackendMisconfigured(f"backend URL is {url!r}; expected a timeout of 0 to 3600 s")
        host = parts.hostname or ""
        if not serve:
            if not host or not port:
                raise BackendMisconfigured(f"backend URL is {url!r}; {expected}")
            return host, port
        host = host or reachable_host()
        try:
            self._served = serve_store(host, port, timeout_s=self._timeout)
        except (OSError, RuntimeError) as error:
            raise BackendUnavailable(f"no store can be served at {url!r}: {_first_line(error)}") from error
        return host, self._served.port

    def _unwrap(self, client: Any) -> None:
        """Find the address of the store that was passed in, or that it lives in this process."""
        inner = client
        while isinstance(inner, self._dist.PrefixStore):
            inner = inner.underlying_store
        if isinstance(inner, self._dist.TCPStore):
            self._host, self._port = inner.host, inner.port
        elif isinstance(inner, self._dist.HashStore):
            self._host, self._port = "", 0
            self.guarantees = _IN_PROCESS
            self.url = f"hashstore:{id(inner):x}"
        else:
            raise BackendMisconfigured(
                f"client is a {type(inner).__name__}; expected a TCPStore, a HashStore, "
                "or a PrefixStore over one"
            )

    @property
    def _seconds(self) -> timedelta:
        return timedelta(seconds=self._timeout)

    @property
    def _base(self) -> int:
        return int(self._mark.split(b" ", 1)[0]) if self._mark else 0

    def _dial(self) -> Any:
        """A connection of our own, to the store that we know. Runs on the thread of its line."""
        store = self._injected
        if self.guarantees.scope == "hosts":
            # torch would retry, and print each failure; its server warns of a caller that goes at once
            with self._knock() if self._in_doubt else nullcontext():
                try:
                    store = self._connect()
                    store.set_timeout(self._seconds)
                except RuntimeError as error:
                    self._in_doubt = True
                    raise BackendUnavailable(f"{self.url} is no torch store: {_first_line(error)}") from error
        self._check_mark(store)
        self._in_doubt = False
        return store

    def _knock(self) -> socket.socket:
        """See whether anything listens."""
        try:
            return socket.create_connection((self._host, self._port), self._timeout)
        except ConnectionRefusedError as error:
            raise _ServerGone(f"nothing serves {self.url} any more, or yet: {error}") from error
        except OSError as error:
            raise BackendUnavailable(f"{self.url} cannot be reached: {error}") from error

    def _connect(self) -> Any:
        if isinstance(self._injected, self._dist.PrefixStore):
            return self._injected.clone()  # the only way to keep its prefix
        limit = timedelta(seconds=self._timeout if self._in_doubt else _DIAL_S)
        return self._dist.TCPStore(
            self._host, self._port, is_master=False, wait_for_workers=False, timeout=limit
        )

    def _check_mark(self, store: Any) -> None:
        if not self._mark:
            mark = f"{int(time.time() * 1000) << 20} {uuid.uuid4().hex}".encode()
            self._mark = _do(store, "compare_set", "dprims", b"", mark)
            self._tickets.base = self._base
        elif _peek(store, "dprims") != self._mark:
            raise _ServerGone(
                f"{self.url} is another store now: its server was restarted, and every lock and cell "
                "is gone; close this backend and connect again"
            )
        _do(store, "add", f"beat/{self._session}", 0)

    def _limit(self, ticket: Ticket) -> float:
        """How long one operation for *ticket* may take: after its ttl it would be of no use."""
        return min(self._timeout, max(ticket.ttl, 0.5))

    def _run(self, steps: Callable[[], Steps[T]], timeout: float | None = None) -> T:
        return self._call(lambda store: self._drive(steps(), store), timeout)

    def _drive(self, steps: Steps[T], store: Any, stop: Callable[[], bool] | None = None) -> T:
        reply = None
        while True:
            try:
                operation = steps.send(reply)
            except StopIteration as done:
                result: T = done.value
                return result
            if stop is not None and stop():
                raise BackendUnavailable(f"{self.url} answered too late")
            reply = self.clock() if operation is CLOCK else _do(store, *operation)

    def _call(self, job: Job[T], timeout: float | None = None) -> T:
        return self._bounded(lambda: self._lines.start(job), timeout)

    def _bounded(self, start: Callable[[], futures.Future[T]], timeout: float | None = None) -> T:
        """Wait for what *start* begins; once more on a new line when its connection proves broken."""
        if self._pid != os.getpid():
            self.reconnect_after_fork()
        deadline = time.monotonic() + (self._timeout if timeout is None else timeout)
        try:
            return self._lines.result(start(), deadline - time.monotonic())
        except BackendUnavailable:
            self._in_doubt = True
            raise
        except _Broken:
            self._in_doubt = True
            self._lines.drop_idle()
        try:
            return self._lines.result(start(), deadline - time.monotonic())
        except _Broken as error:
            raise BackendUnavailable(f"{self.url} broke off: {error}") from error


class _ServerGone(BackendUnavailable):
    """The server is not there any more, and with it every lock."""


_IN_PROCESS = Guarantees(
    scope="process",
    survives_restart=False,
    tokens_survive_restart=False,
    min_ttl=0.1,
    detects_killed_holder="ttl (a thread cannot be killed; one that stops beating lapses)",
    clock="this process",
    limits="a HashStore is seen by the threads of one process only; a forked child is refused",
)


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


def _do(store: Any, operation: str, *arguments: Any) -> Any:
    try:
        return getattr(store, operation)(*arguments)
    except RuntimeError as error:
        raise _Broken(f"{operation}: {_first_line(error)}") from error


def _peek(store: Any, key: str) -> bytes | None:
    """Read a key that may be missing: compare_set then answers with what was expected."""
    value: bytes = _do(store, "compare_set", key, _ABSENT, _ABSENT)
    return None if value == _ABSENT else value


def _cell(key: str) -> str:
    return f"cell/{key}"


def _read_cell(store: Any, cell: str) -> bytes | None:
    """The value of a cell. ``check`` first: a peek at a missing one would wake who waits for it."""
    value = _peek(store, cell) if _do(store, "check", [cell]) else None
    return None if value is None else value[1:]


def _change_cell(store: Any, cell: str, expected: bytes | None, value: bytes) -> bytes | None:
    """Compare and set; values are kept with a first byte, as torch cannot tell empty from missing."""
    new = b"=" + value
    if expected is None:
        return bytes(_do(store, "compare_set", cell, b"", new))[1:]
    old = b"=" + expected
    while True:
        if old == new:  # nothing to write, and torch would answer as if it stood
            return _read_cell(store, cell)
        stands: bytes = _do(store, "compare_set", cell, old, new)
        if stands != old:
            return stands[1:]
        if not _do(store, "check", [cell]):  # torch answers with what was expected
            return None


def _yes() -> bool:
    return True


def _no() -> bool:
    return False


def _ours(ticket: Ticket) -> _StoreTicket:
    if not isinstance(ticket, _StoreTicket):
        raise BackendMisconfigured(f"ticket for {ticket.name!r} comes from another backend")
    return ticket


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0]
