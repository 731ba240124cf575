"""``tcpstore://``: queues and cells on a torch Store, which every torch job has already.

The lock itself is in :mod:`dprims.backends._tickets`, the connections are in
:mod:`dprims.backends._tcpstore_link`; here the two meet, with the waits, the retries, and what must not be
left behind.
"""

from __future__ import annotations

import atexit
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent import futures
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeVar

from dprims.backend import Backend, Guarantees, Place, Ticket
from dprims.exceptions import BackendError, BackendMisconfigured, BackendUnavailable

from ._tcpstore_link import ServerGone, StoreLink, Wait, do, drive, no, peek, yes
from ._tickets import NumberedTicket, Reading, Steps, Tickets, bell_of

T = TypeVar("T")

_FOR_EVER = timedelta(days=7)
_SLACK_S = 0.2
_EXIT_S = 5.0
"""How long the end of the process waits for backends that nobody has closed."""


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
        self._link = StoreLink(url, client, timeout)
        self.url = self._link.url
        if self._link.in_process:
            self.guarantees = _IN_PROCESS
        try:
            self._link.call(lambda store: None)
        except BaseException:
            self._link.close(lambda store: None)
            raise
        self._start()
        _OPEN.add(self)

    def _start(self) -> None:
        self._tickets = Tickets(self._link.session, self._link.base)
        self._mutex = threading.Lock()
        self._open: set[_StoreTicket] = set()
        """What stands in some queue by our doing, and must not be left behind there."""
        self._closed = False

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
                if isinstance(error, ServerGone):
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
        return [Place(name, self._link.base + n if holds else None, record) for n, holds, record in places]

    def held(self, prefix: str) -> list[Place]:
        held = self._run(lambda: self._tickets.held(prefix))
        return [Place(name, self._link.base + number, record) for name, number, record in held]

    def silences(self, names: Sequence[str]) -> list[float | None]:
        now = self.clock()
        return [self._tickets.silence(name, now) for name in names]

    def evict(self, name: str, token: int) -> bool:
        return self._run(lambda: self._tickets.evict(name, token - self._link.base))

    def _join(self, ticket: _StoreTicket) -> None:
        with self._mutex:
            if self._closed:
                raise BackendUnavailable(f"{self!r}: this backend was closed")
            self._open.add(ticket)

        def job(store: Any) -> None:
            drive(self._tickets.join(ticket), store, lambda: ticket.unwanted)

        def start() -> futures.Future[None]:
            ticket.joining = self._link.start(job)
            return ticket.joining

        try:
            self._link.bounded(start, self._limit(ticket))
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

        waiting = self._link.wait_for(Wait(bell, _FOR_EVER, wanted, ticket.turn))
        waiting.add_done_callback(ended)

    def _give_up_lost(self) -> None:
        """Leave the queues in which a ticket stands that was lost, or that nobody knows how to leave.

        This session's beats keep it alive, so nobody else would ever pass it over.
        """
        with self._mutex:
            lost = [ticket for ticket in self._open if ticket.gone or ticket.unwanted]
        for ticket in lost:
            if ticket.joining is None or ticket.joining.done():
                self.leave(ticket)
        if self._link.has_unwanted_waits:
            self._call(self._link.end_unwanted_waits)

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
            if self._link.closed:
                raise BackendUnavailable(f"{self!r} is closed")
            if value is not None or left <= 0:
                return value
            # A wait that runs out inside torch prints warnings: it is given longer, and ended otherwise.
            wait = Wait(cell, timedelta(seconds=left + _SLACK_S), yes, threading.Event())
            self._link.wait_for(wait)
            if not wait.ended.wait(left):
                wait.wanted = no
                self._call(self._link.end_unwanted_waits)
                return self.get(key)

    def delete(self, key: str) -> None:
        self._call(lambda store: do(store, "delete_key", _cell(key)))

    # -- life ---------------------------------------------------------------------------------------

    def disconnect(self) -> None:
        """Close every connection and thread, and the store itself where this process serves it."""
        _OPEN.discard(self)
        if self._link.is_inherited:
            return
        with self._mutex:
            tickets, self._open, self._closed = list(self._open), set(), True
        for ticket in tickets:
            ticket.gone = ticket.unwanted = True
            ticket.turn.set()

        def leave_all(store: Any) -> None:
            joining = [ticket.joining for ticket in tickets if ticket.joining is not None]
            futures.wait(joining, _SLACK_S)  # who is about to get a number has it then, or never will
            for ticket in tickets:
                drive(self._tickets.leave(ticket), store)

        self._link.close(leave_all)

    def reconnect_after_fork(self) -> None:
        self._link.renew()
        self._start()

    def _run(self, steps: Callable[[], Steps[T]], timeout: float | None = None) -> T:
        return self._call(lambda store: drive(steps(), store), timeout)

    def _call(self, job: Callable[[Any], T], timeout: float | None = None) -> T:
        self._live()
        return self._link.call(job, timeout)

    def _live(self) -> None:
        if self._link.is_inherited:
            self.reconnect_after_fork()

    def _limit(self, ticket: Ticket) -> float:
        """How long one operation for *ticket* may take: after its ttl it would be of no use."""
        return min(self._link.timeout, max(ticket.ttl, 0.5))


_OPEN: weakref.WeakSet[TCPStoreBackend] = weakref.WeakSet()


@atexit.register
def _close_open() -> None:
    """Close what nobody has closed, first those who use a store, then those who serve one.

    A thread that still waits in a store while the interpreter ends would abort the process if the server
    died just then.
    """
    deadline = time.monotonic() + _EXIT_S
    for serving in (False, True):
        closing = []
        for backend in [one for one in list(_OPEN) if (one._link.served is not None) is serving]:
            thread = threading.Thread(target=_close_quietly, args=(backend,), daemon=True)
            try:
                thread.start()
                closing.append(thread)
            except RuntimeError:  # newer Pythons start no thread any more at this point
                if time.monotonic() < deadline:
                    _close_quietly(backend)
        for thread in closing:
            thread.join(max(0.0, deadline - time.monotonic()))


def _close_quietly(backend: TCPStoreBackend) -> None:
    with suppress(Exception):  # the process is ending; a ttl frees what could not be given back
        backend.close()


_IN_PROCESS = Guarantees(
    scope="process",
    survives_restart=False,
    tokens_survive_restart=False,
    min_ttl=0.1,
    detects_killed_holder="ttl (a thread cannot be killed; one that stops beating lapses)",
    clock="this process",
    limits="a HashStore is seen by the threads of one process only; a forked child is refused",
)


def _cell(key: str) -> str:
    return f"cell/{key}"


def _read_cell(store: Any, cell: str) -> bytes | None:
    """The value of a cell. ``check`` first: a peek at a missing one would wake who waits for it."""
    value = peek(store, cell) if do(store, "check", [cell]) else None
    return None if value is None else value[1:]


def _change_cell(store: Any, cell: str, expected: bytes | None, value: bytes) -> bytes | None:
    """Compare and set; values are kept with a first byte, as torch cannot tell empty from missing."""
    new = b"=" + value
    if expected is None:
        return bytes(do(store, "compare_set", cell, b"", new))[1:]
    old = b"=" + expected
    while True:
        if old == new:  # nothing to write, and torch would answer as if it stood
            return _read_cell(store, cell)
        stands: bytes = do(store, "compare_set", cell, old, new)
        if stands != old:
            return stands[1:]
        if not do(store, "check", [cell]):  # torch answers with what was expected
            return None


def _ours(ticket: Ticket) -> _StoreTicket:
    if not isinstance(ticket, _StoreTicket):
        raise BackendMisconfigured(f"ticket for {ticket.name!r} comes from another backend")
    return ticket
