"""``memory://name``: queues and cells in this process, for threads and for tests.

The reference for what a backend means, with nothing in the way: one lock, one condition, dicts.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from dprims.backend import Backend, Guarantees, Place, Ticket, split_url
from dprims.exceptions import BackendMisconfigured, BackendUnavailable

from ._urls import without_password


@dataclass
class _Space:
    """What a name in ``memory://name`` stands for; every backend of that name in the process shares it."""

    changed: threading.Condition = field(default_factory=threading.Condition)
    queues: dict[str, list[_MemoryTicket]] = field(default_factory=dict)
    cells: dict[str, bytes] = field(default_factory=dict)
    tokens: itertools.count[int] = field(default_factory=lambda: itertools.count(1))


@dataclass(slots=True, eq=False)
class _MemoryTicket(Ticket):
    turn: threading.Event = field(default_factory=threading.Event)
    granted: int | None = None
    """The token under which the queue has it as the holder; ``token`` once it has been told."""
    backend: MemoryBackend | None = None
    """Through which it joined, and with whose closing it ends."""


_SPACES: dict[str, _Space] = {}
_SPACES_LOCK = threading.Lock()


class MemoryBackend(Backend):
    """Queues and cells shared by the threads of one process; nothing of it outlives the process."""

    guarantees = Guarantees(
        scope="process",
        survives_restart=False,
        tokens_survive_restart=False,
        min_ttl=0.01,
        detects_killed_holder="ttl (a thread cannot be killed; one that stops beating lapses)",
        clock="this process",
        limits="seen by the threads of one process only; a forked child is refused",
    )

    def __init__(self, url: str = "memory://default") -> None:
        parts = split_url(url)
        if parts.scheme != "memory" or not parts.netloc or parts.path or parts.query:
            raise BackendMisconfigured(f"backend URL is {without_password(url)!r}; expected memory://name")
        self.url = url
        with _SPACES_LOCK:
            self._space = _SPACES.setdefault(parts.netloc, _Space())
        self._closed = False

    @contextmanager
    def _opened(self) -> Iterator[_Space]:
        """The space, for one thread alone; BackendUnavailable once this backend was closed."""
        with self._space.changed:
            self._refuse_if_closed()
            yield self._space

    def _refuse_if_closed(self) -> None:
        if self._closed:
            raise BackendUnavailable(f"{self!r}: this backend was closed")

    # -- queues -----------------------------------------------------------------------------------

    def enqueue(self, name: str, ttl: float, record: bytes) -> Ticket:
        ticket = _MemoryTicket(name, ttl, record, proven=self.clock(), backend=self)
        with self._opened() as space:
            space.queues.setdefault(name, []).append(ticket)
            self._settle(name)
            ticket.token = ticket.granted
        return ticket

    def await_turn(self, ticket: Ticket, timeout: float) -> bool:
        ticket = _ours(ticket)
        deadline = self.clock() + timeout
        while True:
            with self._opened() as space:
                queue = space.queues.setdefault(ticket.name, [])
                if ticket not in queue and not ticket.gone:  # dropped as dead while it was frozen
                    queue.append(ticket)
                ticket.proven = self.clock()
                self._settle(ticket.name)
                if not ticket.gone:
                    ticket.token = ticket.granted
                if ticket.held or ticket.gone:
                    return ticket.held
                ticket.turn.clear()
                ahead = queue[0]
            left = deadline - self.clock()
            if left <= 0:
                return False
            ticket.turn.wait(max(min(left, ahead.proven + ahead.ttl - self.clock(), ticket.ttl / 3), 0.001))

    def leave(self, ticket: Ticket) -> None:
        self._remove(_ours(ticket))

    def release(self, ticket: Ticket) -> bool:
        return self._remove(_ours(ticket))

    def beat(self, tickets: Sequence[Ticket], timeout: float) -> float | None:
        now = self.clock()
        with self._opened() as space:
            for ticket in tickets:
                if ticket in space.queues.get(ticket.name, ()):
                    ticket.proven = now
                elif ticket.token is not None:
                    ticket.gone = True
        return None

    def queue(self, name: str) -> list[Place]:
        with self._opened() as space:
            self._settle(name)
            return [Place(name, ticket.granted, ticket.record) for ticket in space.queues.get(name, ())]

    def held(self, prefix: str) -> list[Place]:
        with self._opened() as space:
            names = sorted(name for name in space.queues if name.startswith(prefix))
        return [place for name in names for place in self.queue(name)[:1]]

    def silences(self, names: Sequence[str]) -> list[float | None]:
        now = self.clock()
        with self._opened() as space:
            holders = [next(iter(space.queues.get(name, ())), None) for name in names]
            return [None if one is None else max(now - one.proven, 0.0) for one in holders]

    def evict(self, name: str, token: int) -> bool:
        with self._opened() as space:
            holder = next(iter(space.queues.get(name, ())), None)
            return holder is not None and holder.granted == token and self._remove(holder)

    def _remove(self, ticket: _MemoryTicket) -> bool:
        with self._space.changed:
            queue = self._space.queues.get(ticket.name, [])
            was_in = ticket in queue
            if was_in:
                queue.remove(ticket)
            ticket.gone = True
            ticket.turn.set()
            self._settle(ticket.name)
            return was_in

    def _settle(self, name: str) -> None:
        """Drop who has been silent for its ttl from the front, and grant the first who has not."""
        queue = self._space.queues.get(name, [])
        while queue and self.clock() >= queue[0].proven + queue[0].ttl:
            dead = queue.pop(0)
            dead.gone, dead.granted = dead.token is not None, None
        if not queue:
            self._space.queues.pop(name, None)
        elif queue[0].granted is None:
            queue[0].granted = next(self._space.tokens)
            queue[0].turn.set()

    # -- cells ------------------------------------------------------------------------------------

    def get(self, key: str) -> bytes | None:
        with self._opened() as space:
            return space.cells.get(key)

    def compare_and_set(self, key: str, expected: bytes | None, value: bytes) -> bytes | None:
        with self._opened() as space:
            if space.cells.get(key) == expected:
                space.cells[key] = value
                space.changed.notify_all()
            return space.cells.get(key)

    def wait(self, key: str, timeout: float) -> bytes | None:
        with self._opened() as space:
            space.changed.wait_for(lambda: key in space.cells or self._closed, timeout)
            self._refuse_if_closed()
            return space.cells.get(key)

    def delete(self, key: str) -> None:
        with self._opened() as space:
            space.cells.pop(key, None)

    # -- life -------------------------------------------------------------------------------------

    def disconnect(self) -> None:
        """End what was asked for through this backend; the space lives as long as the process."""
        with self._space.changed:
            self._closed = True
            mine = [one for queue in self._space.queues.values() for one in queue if one.backend is self]
            for ticket in mine:
                self._remove(ticket)
            self._space.changed.notify_all()

    def reconnect_after_fork(self) -> None:
        raise BackendMisconfigured(
            f"{self!r} belongs to the parent process; use a backend that spans processes"
        )


def _ours(ticket: Ticket) -> _MemoryTicket:
    if not isinstance(ticket, _MemoryTicket):
        raise BackendMisconfigured(f"ticket for {ticket.name!r} comes from another backend")
    return ticket
