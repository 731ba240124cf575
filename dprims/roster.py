"""``Roster``: who is alive right now. An entry is a held lock; its incarnation is that lock's token."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from .backend import Owner, Place, check_name, resolve
from .exceptions import BackendMisconfigured, LockTimeout, NotHeld
from .lock import DistributedLock, Grant, check_ttl
from .record import owner_of, payload_of


@dataclass(frozen=True, slots=True)
class Member:
    """One entry of a roster as it was read: *incarnation* grows each time the name is joined anew."""

    name: str
    incarnation: int
    payload: Any
    owner: Owner


@dataclass(frozen=True, slots=True)
class RosterChange:
    """What :meth:`Roster.watch` saw change. A name that was joined anew is in both tuples."""

    joined: tuple[Member, ...]
    left: tuple[Member, ...]
    members: dict[str, Member]


class Roster:
    """The live members of *name*: each holds a lock of its own for as long as it lives.

    An entry lapses within its *ttl* (seconds) after its process dies or freezes, and at once on :meth:`leave`
    or :meth:`evict`. Reading costs one or two round trips and says what held at that moment. All calls are
    local; each raises BackendUnavailable when the backend does not answer.
    """

    def __init__(
        self, name: str, backend: object = None, *, namespace: str = "dprims", ttl: float = 5.0
    ) -> None:
        self.name = check_name("roster name", name)
        if "/" in name:
            raise BackendMisconfigured(f"roster name is {name!r}; expected no slash")
        self.backend = resolve(backend)
        self.namespace = namespace
        self.ttl = max(check_ttl(ttl), self.backend.guarantees.min_ttl)
        self._entries: dict[str, Grant] = {}

    def join(
        self,
        member: str,
        payload: Any = None,
        *,
        timeout: float | None = None,
        replace: bool = False,
        on_lost: Callable[[], object] | None = None,
    ) -> Grant:
        """Enter the roster as *member* and stay in it; the grant's token is the incarnation.

        *payload* is any JSON value that others may read. An entry of the same name that still stands is
        waited for (*timeout* None: its ttl and half as much again; LockTimeout names its owner); with
        ``replace=True`` it is evicted first, for a caller who knows that its process is gone.
        *on_lost* is called on a thread of its own when the entry lapsed under us; joining again then
        gives a new incarnation.
        """
        lock = DistributedLock(
            f"roster/{self.name}/{check_name('member name', member)}",
            self.backend,
            namespace=self.namespace,
            ttl=self.ttl,
            on_lost=None if on_lost is None else lambda _: on_lost(),
            payload=payload,
        )
        if replace:
            for stands in self._read(member):
                self.evict(member, stands.incarnation)
        mine = self._entries.pop(member, None)
        if mine is not None and not mine.lost:
            mine.release()
        limit = lock.ttl * 1.5 if timeout is None else timeout
        grant = lock.acquire(limit)
        if grant is None:
            holder = lock.owner() or "taken"
            raise LockTimeout(f"roster {self.name!r}: member {member!r} is still {holder} after {limit:g} s")
        self._entries[member] = grant
        return grant

    def leave(self, member: str | None = None) -> None:
        """Give up the entry *member*, or every entry of this object. NotHeld when it has none such."""
        names = list(self._entries) if member is None else [member]
        for name in names:
            grant = self._entries.pop(name, None)
            if grant is None:
                raise NotHeld(f"roster {self.name!r}: {name!r} is not an entry of this object")
            if not grant.lost:
                grant.release()

    def members(self) -> dict[str, Member]:
        """Who is in, by name, sorted."""
        return {member.name: member for member in self._read("")}

    def evict(self, member: str, incarnation: int) -> bool:
        """End an entry as if its process had died; it learns so at its next beat. False if it was not so.

        Only this incarnation is ended: a member that has joined anew meanwhile stays.
        """
        return self.backend.evict(self._prefix + member, incarnation)

    def watch(
        self, timeout: float | None = None, stop: threading.Event | None = None
    ) -> Iterator[RosterChange]:
        """Yield the present members at once, then each change, for *timeout* seconds or until *stop* is set.

        Looks every quarter of the ttl: a lapse is a silence, which no server can announce sooner.
        """
        stop = stop or threading.Event()
        deadline = None if timeout is None else time.monotonic() + timeout
        known: dict[str, Member] = {}
        first = True
        while not stop.is_set():
            now = self.members()
            joined = tuple(m for name, m in now.items() if _incarnation(known, name) != m.incarnation)
            left = tuple(m for name, m in known.items() if _incarnation(now, name) != m.incarnation)
            if first or joined or left:
                yield RosterChange(joined, left, now)
            known, first = now, False
            pause = self.ttl / 4
            if deadline is not None:
                pause = min(pause, deadline - time.monotonic())
                if pause <= 0:
                    return
            stop.wait(pause)

    @property
    def _prefix(self) -> str:
        return f"{self.namespace}/roster/{self.name}/"

    def _read(self, member: str) -> list[Member]:
        places = self.backend.held(self._prefix + member)
        return [self._member(place) for place in places if not member or place.name == self._prefix + member]

    def _member(self, place: Place) -> Member:
        owner = owner_of(place)
        return Member(place.name[len(self._prefix) :], owner.token or 0, payload_of(place), owner)

    def __repr__(self) -> str:
        return f"<Roster {self.name!r} on {self.backend!r}>"


def _incarnation(members: dict[str, Member], name: str) -> int | None:
    return members[name].incarnation if name in members else None
