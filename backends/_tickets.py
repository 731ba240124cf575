"""A FIFO lock with fencing on a plain key-value store, written as single store operations.

Each procedure below is a generator: it yields one operation, is sent its reply, and keeps no other
tie to a store. The TCPStore backend drives it over a connection; a model checker drives it through
every interleaving. What is needed of a store is ``add``, ``append``, ``compare_set``, ``check``,
``multi_get``, ``set`` and ``delete_key``, each atomic.

Keys of a lock NAME::

    next/NAME       the last number that was given out
    head/NAME       "<number> <who moved it>": the number whose turn it is. Only ever grows.
    line/<b>/NAME   who took the numbers of block b: one line an entry, one a departure
    bell/<n>/NAME   "W" wakes number n; "A" says that n has left
    beat/SESSION    a counter that a live session moves in every beat
    names, name/<i> the names in use

A lock is held by number n exactly while ``head`` is n, so there is never more than one holder, and
passing it on is one compare-and-set that names who did it: its reply cannot be mistaken for that of
somebody else's. A bell has no authority; who hears it reads ``head``.

A session counts as dead when its counter stood still for a ttl on the *observer's* clock; then any
waiter behind moves ``head`` on. To be safe against one that was only frozen, a ticket is good for
one ttl from the moment its last beat was *sent*, and a beat counts only if its reply came before
that ran out: whoever could be taken for dead knows it by its own clock and never uses the number
again. No two clocks are compared. This is how DynamoDB's lock client and Kubernetes' leader
election time a lease.
"""

from __future__ import annotations

from base64 import b64decode, b64encode
from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from dprims.backend import Ticket
from dprims.exceptions import BackendUnavailable

T = TypeVar("T")
Steps = Generator[tuple[Any, ...], Any, T]

CLOCK = ("clock",)
"""The operation that reads this host's clock; everything else is the store's."""

GRACE_S = 1.0
"""How long a number may stand without an entry in the line before it counts as dead."""

BLOCK = 64
"""How many numbers share one ``line`` key."""

_RUNG, _LEFT = b"W", b"A"
_ABSENT = b"\0?"
"""A value that never stands anywhere."""

_TRIES = 5


@dataclass(slots=True, eq=False)
class NumberedTicket(Ticket):
    """A ticket and the number it has in its queue now."""

    number: int = 0
    head: bytes = b""
    """The exact value of ``head`` while it is this ticket's turn."""
    void: bool = False
    """A waiter that others may have taken for dead, or passed over: it needs a new number."""


@dataclass(frozen=True, slots=True)
class Head:
    """What stands in ``head``."""

    number: int
    text: bytes

    @classmethod
    def parse(cls, text: bytes) -> Head:
        return cls(int(text.split(b" ", 1)[0]), text)


@dataclass(frozen=True, slots=True)
class Reading:
    """What a beat read, and this host's clock before it was sent and after it was answered."""

    sent: float
    done: float
    heads: dict[str, Head]


@dataclass(frozen=True, slots=True)
class Entry:
    """What a ``line`` says about one number."""

    session: str
    ttl: float
    record: bytes


@dataclass(frozen=True, slots=True)
class Sight:
    """What was last seen of a number ahead, and since when it looks like that."""

    entry: Entry | None
    beat: bytes | None
    since: float
    came: bool = False
    """Whether an earlier look found something else there, so that it is new since ``since``."""

    @property
    def ttl(self) -> float:
        return GRACE_S if self.entry is None else self.entry.ttl


class Tickets:
    """The procedures of one session."""

    def __init__(self, session: str, base: int = 0) -> None:
        self.session = session
        self.base = base
        """What is added to a number to make it a token."""
        self._sights: dict[str, dict[int, Sight]] = {}
        self._holders: dict[str, tuple[int, Sight]] = {}

    # -- own tickets --------------------------------------------------------------------------------

    def join(self, ticket: NumberedTicket) -> Steps[None]:
        """Take a number; it holds the lock at once when it is its turn. An earlier number is given up."""
        yield from self.leave(ticket)
        for _ in range(_TRIES):
            if (yield from self._take_number(ticket)):
                return
        raise BackendUnavailable(
            f"lock {ticket.name!r}: the store is too slow for a ttl of {ticket.ttl:g} s; "
            f"{_TRIES} numbers were out of date when they arrived"
        )

    def _take_number(self, ticket: NumberedTicket) -> Steps[bool]:
        name = ticket.name
        asked = yield CLOCK
        ticket.number = number = yield "add", f"next/{name}", 1
        entry = Entry(self.session, ticket.ttl, ticket.record)
        yield "append", _line(name, number), _entry_line(number, entry)
        head = None if number == 1 else (yield from self._head(name))
        if head is None:  # or whoever had number 1 died before it came to this
            head = yield from self._open(name)
        now = yield CLOCK
        if head.number > number or now >= asked + min(GRACE_S, ticket.ttl):
            yield from self.leave(ticket)
            return False
        ticket.proven, ticket.void = asked, False
        if head.number == number:
            self._hold(ticket, head)
        return True

    def beat(self, names: Iterable[str]) -> Steps[Reading]:
        """Show that this session lives, and read whose turn it is in the queues *names*."""
        sent = yield CLOCK
        yield "add", f"beat/{self.session}", 1
        names = sorted(set(names))
        texts = (yield "multi_get", [f"head/{name}" for name in names]) if names else []
        done = yield CLOCK
        heads = {name: Head.parse(text) for name, text in zip(names, texts, strict=True)}
        return Reading(sent, done, heads)

    def judge(self, ticket: NumberedTicket, reading: Reading, *, hold: bool = False) -> None:
        """Apply what a beat read: ``proven``, or ``gone`` for a holder and ``void`` for a waiter.

        With *hold* a waiter whose turn it is holds the lock from now on.
        """
        head = reading.heads[ticket.name]
        if reading.done >= ticket.proven + ticket.ttl or head.number > ticket.number:
            if ticket.token is None:
                ticket.void = True
            else:
                ticket.gone = True
            return
        ticket.proven = max(ticket.proven, reading.sent)
        if hold and head.number == ticket.number and not ticket.void:
            self._hold(ticket, head)

    def _hold(self, ticket: NumberedTicket, head: Head) -> None:
        ticket.head, ticket.token = head.text, self.base + ticket.number

    def release(self, ticket: NumberedTicket) -> Steps[bool]:
        """Pass the lock on; False when it was not this ticket's. May be repeated."""
        moved, _ = yield from self._pass_on(ticket.name, Head(ticket.number, ticket.head), "released-by")
        return moved

    def leave(self, ticket: NumberedTicket) -> Steps[None]:
        """Give the number up, and the lock with it if it has come. May be repeated."""
        name, number = ticket.name, ticket.number
        if not number:
            return
        yield "compare_set", _bell(name, number), b"", _LEFT
        yield "append", _line(name, number), b"-%d\n" % number
        head = yield from self._head(name)
        if head is not None and head.number == number:
            yield from self._pass_on(name, head, "left-by")
        elif head is not None and head.number > number:
            yield "delete_key", _bell(name, number)
            if head.number // BLOCK > number // BLOCK:
                yield "delete_key", _line(name, number)

    # -- the tickets of others ----------------------------------------------------------------------

    def look(self, name: str, head: Head, last: int) -> Steps[float]:
        """Time everybody ahead of number *last*, and move ``head`` past who is dead.

        Returns within how many seconds to look again.
        """
        asked = yield CLOCK
        entries = yield from self._entries(name, head.number, last - 1)
        beats = yield from self._beats(entry for entry in entries.values() if entry is not None)
        now = yield CLOCK
        before = self._sights.get(name, {})
        sights: dict[int, Sight] = {}
        for number in range(head.number, last):
            entry = entries.get(number)
            beat = None if entry is None else beats[entry.session]
            seen = before.get(number)
            same = seen is not None and (seen.entry, seen.beat) == (entry, beat)
            sights[number] = seen if same and seen is not None else Sight(entry, beat, now)
        self._sights[name] = sights

        def passable(number: int) -> bool:
            left = number in entries and entries[number] is None
            return left or asked >= sights[number].since + sights[number].ttl

        while head.number < last and passable(head.number):
            _, head = yield from self._pass_on(name, head, "taken-for-dead-by")
        ahead = [sights[number] for number in range(head.number, last)]
        return min((min(s.ttl / 8, max(s.since + s.ttl - now, 0.0)) for s in ahead), default=GRACE_S)

    def keep_sights_of(self, names: Iterable[str]) -> None:
        """Forget what was seen of queues other than *names*: nothing of ours waits there."""
        self._sights = {name: self._sights[name] for name in names if name in self._sights}

    def evict(self, name: str, number: int) -> Steps[bool]:
        """Pass the lock on if *number* holds it."""
        head = yield from self._head(name)
        last = int((yield from self._peek(f"next/{name}")) or 0)
        if head is None or head.number != number or last < number:
            return False
        moved, _ = yield from self._pass_on(name, head, "evicted-by")
        return moved

    def queue(self, name: str) -> Steps[list[tuple[int, bool, bytes]]]:
        """Number, whether it is its turn, and record of everybody in the queue, in order."""
        head = yield from self._head(name)
        last = int((yield from self._peek(f"next/{name}")) or 0)
        if head is None:
            return []
        entries = yield from self._entries(name, head.number, last)
        places = sorted((number, entry) for number, entry in entries.items() if entry is not None)
        return [(number, number == head.number, entry.record) for number, entry in places]

    def held(self, prefix: str) -> Steps[list[tuple[str, int, bytes]]]:
        """Name, number and record of the holder of every lock whose name starts with *prefix*.

        Who was seen by an earlier call, and has not beaten since for its ttl, holds nothing any more.
        """
        asked = yield CLOCK
        count = int((yield from self._peek("names")) or 0)
        found = yield from self._read_lasting([f"name/{i}" for i in range(1, count + 1)])
        names = sorted({text.decode() for text in found if text is not None})
        names = [name for name in names if name.startswith(prefix)]
        heads = yield from self._read_lasting([f"head/{name}" for name in names])
        lasts = yield from self._read_lasting([f"next/{name}" for name in names])
        holders: list[tuple[str, int, Entry]] = []
        for name, text, last in zip(names, heads, lasts, strict=True):
            if text is None or last is None or (number := Head.parse(text).number) > int(last):
                continue
            entry = (yield from self._entries(name, number, number)).get(number)
            if entry is not None:
                holders.append((name, number, entry))
        beats = yield from self._beats(entry for _, _, entry in holders)
        now = yield CLOCK
        live = []
        for name, number, entry in holders:
            beat = beats[entry.session]
            before, seen = self._holders.get(name, (0, None))
            if seen is None or before != number or (seen.entry, seen.beat) != (entry, beat):
                seen = Sight(entry, beat, now, came=seen is not None)
            self._holders[name] = number, seen
            if asked < seen.since + seen.ttl:
                live.append((name, number, entry.record))
        for name in names:
            if name not in {holder for holder, _, _ in holders}:
                self._holders.pop(name, None)
        return live

    def silence(self, name: str, now: float) -> float | None:
        """How long ago the beat of *name*'s holder came, of those that :meth:`held` has seen come."""
        _, seen = self._holders.get(name, (0, None))
        return max(now - seen.since, 0.0) if seen is not None and seen.came else None

    # -- parts --------------------------------------------------------------------------------------

    def _pass_on(self, name: str, head: Head, why: str) -> Steps[tuple[bool, Head]]:
        """Move ``head`` on by one, and past those who left. Says whether the first step was ours."""
        moved = False
        while True:
            old, number = head.number, head.number + 1
            target = Head(number, f"{number} {why} {self.session}".encode())
            stands = yield "compare_set", f"head/{name}", head.text, target.text
            if stands != target.text:
                return moved, Head.parse(stands)
            moved, head = True, target
            waits = (yield "add", f"next/{name}", 0) >= number
            rung = (yield "compare_set", _bell(name, number), b"", _RUNG) if waits else _RUNG
            yield "delete_key", _bell(name, old)
            if number % BLOCK == 0:
                yield "delete_key", _line(name, old)
            if rung == _LEFT:
                continue
            if waits:  # it may have come and gone before the bell rang
                head = (yield from self._head(name)) or head
                if head.number > number:
                    yield "delete_key", _bell(name, number)
            return True, head

    def _open(self, name: str) -> Steps[Head]:
        """List *name*, then create ``head``: where there is a head, the name is listed."""
        place = yield "add", "names", 1
        yield "set", f"name/{place}", name
        return Head.parse((yield "compare_set", f"head/{name}", b"", b"1"))

    def _head(self, name: str) -> Steps[Head | None]:
        text = yield from self._peek(f"head/{name}")
        return None if text is None else Head.parse(text)

    def _entries(self, name: str, first: int, last: int) -> Steps[dict[int, Entry | None]]:
        """What the line says about the numbers from *first* to *last*; None for who left."""
        entries: dict[int, Entry | None] = {}
        for block in range(first // BLOCK, last // BLOCK + 1):
            text = yield from self._peek(_line(name, block * BLOCK))
            for number, entry in _parse_line(text or b""):
                if first <= number <= last:
                    entries[number] = entry
        return entries

    def _peek(self, key: str) -> Steps[bytes | None]:
        """Read a key that may be missing, in one operation that never waits.

        ``compare_set`` answers with what stands, or with what was expected where nothing does.
        """
        value: bytes = yield "compare_set", key, _ABSENT, _ABSENT
        return None if value == _ABSENT else value

    def _beats(self, entries: Iterable[Entry]) -> Steps[dict[str, bytes | None]]:
        """The counter of each session in *entries*, one by one: a session that ends deletes its own."""
        beats = {}
        for session in sorted({entry.session for entry in entries}):
            beats[session] = yield from self._peek(f"beat/{session}")
        return beats

    def _read_lasting(self, keys: Sequence[str]) -> Steps[list[bytes | None]]:
        """Read many keys; two operations when all are there, as they mostly are.

        Only for keys that nobody ever deletes: multi_get waits for one that has gone since it was checked.
        """
        if keys and (yield "check", list(keys)):
            return list((yield "multi_get", list(keys)))
        values = []
        for key in keys:
            values.append((yield from self._peek(key)))
        return values


def bell_of(ticket: NumberedTicket) -> str:
    """The key whose appearance wakes *ticket*."""
    return _bell(ticket.name, ticket.number)


def _bell(name: str, number: int) -> str:
    return f"bell/{number}/{name}"


def _line(name: str, number: int) -> str:
    return f"line/{number // BLOCK}/{name}"


def _entry_line(number: int, entry: Entry) -> bytes:
    return f"{number} {entry.session} {entry.ttl!r} ".encode() + b64encode(entry.record) + b"\n"


def _parse_line(text: bytes) -> Iterable[tuple[int, Entry | None]]:
    for line in text.splitlines():
        if line.startswith(b"-"):
            yield int(line[1:]), None
        else:
            number, session, ttl, record = line.split(b" ")
            yield int(number), Entry(session.decode(), float(ttl), b64decode(record))
