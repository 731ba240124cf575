"""What goes on in a fleet, read from the backend alone: locks, rosters, refits. Changes nothing there.

::

    with dprims.connect("redis://h:6379") as backend:
        snapshot = Observer(backend).look()
    print(json.dumps(snapshot.to_json()))

A snapshot is not one moment: its parts are read one after the other, within ``took_s`` seconds. Ages that are
counted from another host's wall clock (``held_s``, ``age_s``) are as good as the two clocks agree.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from ._status_views import (
    FleetView,
    RosterEntry,
    RosterView,
    Shard,
    ShardState,
    Snapshot,
    StandingLock,
    check_record,
)
from .backend import Backend, Owner, Place, check_name, split_url
from .exceptions import RefitError
from .record import owner_of, payload_of
from .synchronizer._keys import current_key, decode_version, next_key
from .synchronizer._record import FleetRecord, decode_record, record_key

__all__ = ["FleetView", "Observer", "RosterEntry", "RosterView", "Shard", "Snapshot", "StandingLock"]

QUEUES = 256
"""Of how many locks the waiters are read in one look."""
USUAL_FLEET = "refit"


@dataclass
class Observer:
    """Looks at one namespace of a backend, once or again and again; reads only.

    *fleets* are shown even if nothing stands of them; the others are found by their rosters and leader
    locks. Not for several threads at a time. Raises what the backend raises: BackendUnavailable above all.
    """

    backend: Backend
    namespace: str = "dprims"
    fleets: Sequence[str] = ()
    wall: Callable[[], float] = time.time
    _first_seen: dict[str, tuple[int, float | None]] = field(default_factory=dict, repr=False)
    """Token of each lock, and when it appeared where another look had not found it; monotonic."""
    _looked: bool = field(default=False, repr=False)

    def __post_init__(self) -> None:
        check_name("namespace", self.namespace)
        for fleet in self.fleets:
            if "/" in check_name("fleet", fleet):
                raise RefitError(f"fleet is {fleet!r}; expected no slash")

    def look(self) -> Snapshot:
        """Read everything: a handful of round trips, and one for each lock that is no roster entry."""
        at, began = self.wall(), time.monotonic()
        notes: list[str] = []
        start = f"{self.namespace}/"
        try:
            held = self.backend.held(start)
        except NotImplementedError:
            held = []
            notes.append(f"{self.backend!r} cannot list locks: neither they nor the rosters are shown")
        silences = dict(
            zip((p.name for p in held), self.backend.silences([p.name for p in held]), strict=True)
        )
        held_s = self._held_s(held, at)
        entries = [place for place in held if place.name.startswith(f"{start}roster/")]
        others = [place for place in held if not place.name.startswith(f"{start}roster/")]
        if len(others) > QUEUES:
            notes.append(f"{len(others)} locks are held; the waiters of the first {QUEUES} are shown")
        locks = tuple(
            StandingLock(
                place.name.removeprefix(start),
                owner_of(place),
                held_s[place.name],
                silences[place.name],
                self._waiters(place) if number < QUEUES else (),
            )
            for number, place in enumerate(others)
        )
        rosters = self._rosters(entries, held_s, silences)
        fleets = self._fleets(locks, rosters)
        return Snapshot(
            url=bare(self.backend.url),
            namespace=self.namespace,
            at=at,
            took_s=time.monotonic() - began,
            locks=locks,
            rosters=rosters,
            fleets=fleets,
            notes=tuple(notes),
        )

    def _waiters(self, place: Place) -> tuple[Owner, ...]:
        return tuple(owner_of(one) for one in self.backend.queue(place.name) if one.token is None)

    def _held_s(self, held: Iterable[Place], at: float) -> dict[str, float]:
        now, ages, seen = time.monotonic(), {}, {}
        for place in held:
            token = place.token or 0
            known, since = self._first_seen.get(place.name, (0, None))
            if token != known:
                since = now if self._looked else None
            seen[place.name] = token, since
            asked = owner_of(place).since
            ages[place.name] = max(at - asked if asked else 0.0, 0.0) if since is None else now - since
        self._first_seen, self._looked = seen, True
        return ages

    def _rosters(
        self, entries: Iterable[Place], held_s: dict[str, float], silences: dict[str, float | None]
    ) -> tuple[RosterView, ...]:
        found: dict[str, list[RosterEntry]] = {}
        for place in entries:
            roster, _, member = place.name[len(f"{self.namespace}/roster/") :].partition("/")
            found.setdefault(roster, []).append(
                RosterEntry(
                    member,
                    place.token or 0,
                    owner_of(place),
                    payload_of(place),
                    held_s[place.name],
                    silences[place.name],
                )
            )
        return tuple(
            RosterView(name, tuple(sorted(members, key=lambda one: _by_number(one.name))))
            for name, members in sorted(found.items())
        )

    def _fleets(self, locks: Sequence[StandingLock], rosters: Sequence[RosterView]) -> tuple[FleetView, ...]:
        leaders = {
            lock.name.removesuffix("/leader"): lock
            for lock in locks
            if lock.name.endswith("/leader") and lock.name.count("/") == 1
        }
        members = {roster.name: roster.members for roster in rosters}
        names = {USUAL_FLEET, *self.fleets, *leaders, *(name for name in members if name)}
        views = (self._fleet(name, leaders.get(name), members.get(name, ())) for name in sorted(names))
        return tuple(view for view in views if view is not None)

    def _fleet(
        self, name: str, lock: StandingLock | None, members: Sequence[RosterEntry]
    ) -> FleetView | None:
        prefix, notes = f"{self.namespace}/{name}", list[str]()
        term, record = self._record(prefix, notes)
        silent = record is None and not notes
        current, reserved = (self._version(key(prefix), notes) for key in (current_key, next_key))
        nothing = silent and not notes and current is None and reserved is None
        if nothing and name not in self.fleets:
            return None  # a roster, or a lock, of something else
        if silent:
            notes.append("no leader has published a record here")
        if lock is None:
            notes.append("nobody leads: the leader lock is free")
        elif record is not None and lock.holder.token != term:
            notes.append("the leader has said nothing yet; what is shown is its predecessor's")
        seats = {int(one.name) for one in members if one.name.isdecimal()}
        trainers = () if record is None else tuple(range(record.train_world_size))
        return FleetView(
            name=name,
            leader=None if lock is None else lock.holder,
            standby=0 if lock is None else len(lock.waiters),
            version=current,
            reserved=reserved,
            record=record,
            record_term=term,
            age_s=None if record is None else max(self.wall() - record.at, 0.0),
            trainers=trainers,
            trainers_missing=tuple(seat for seat in trainers if seat not in seats),
            shards=() if record is None else _shards(record, seats),
            notes=tuple(notes),
        )

    def _record(self, prefix: str, notes: list[str]) -> tuple[int, FleetRecord | None]:
        term, data = self._cell(record_key(prefix), notes)
        try:
            record = decode_record(data) if data else None
            if record is not None:
                check_record(record)
            return term, record
        except RefitError as error:
            notes.append(str(error))
        except RecursionError:
            notes.append(f"not a status record: {data[:80]!r}")
        return term, None

    def _version(self, key: str, notes: list[str]) -> int | None:
        _, data = self._cell(key, notes)
        try:
            return decode_version(data).number if data else None
        except (RefitError, OverflowError, RecursionError):
            notes.append(f"{key} is {data[:80]!r}; expected a version")
            return None

    def _cell(self, key: str, notes: list[str]) -> tuple[int, bytes]:
        """Token and value of a fenced cell: 0 and nothing when it is not there, or of another program."""
        try:
            return self.backend.read_fenced(key) or (0, b"")
        except ValueError:
            notes.append(f"{key} is {(self.backend.get(key) or b'')[:80]!r}; expected a fenced cell")
            return 0, b""


def _shards(record: FleetRecord, seats: set[int]) -> tuple[Shard, ...]:
    starts = accumulate(record.shard_sizes, initial=record.train_world_size)
    members = set(record.members)
    shards = []
    for shard, (size, start) in enumerate(zip(record.shard_sizes, starts, strict=False)):
        mine = tuple(range(start, start + size))
        missing = tuple(seat for seat in mine if seat not in seats)
        state: ShardState
        if shard in members:
            state, reason = ("lost", "left the roster") if missing else ("serving", "")
        else:
            reason = record.absent.get(shard, "")
            state = "absent" if missing else "returning"
        shards.append(Shard(shard, state, mine, missing, reason))
    return tuple(shards)


def bare(url: str) -> str:
    """A URL without user, password and query, which may hold secrets."""
    parts = split_url(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"


def _by_number(name: str) -> tuple[int, str]:
    return (int(name), name) if name.isdecimal() else (1 << 63, name)
