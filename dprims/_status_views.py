"""What ``dprims status`` shows, as values: locks, rosters and fleets as they were read, and their JSON."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from .backend import Owner
from .exceptions import RefitError
from .record import is_number
from .synchronizer._record import FleetRecord, Outage, SyncSummary

SCHEMA = 1
"""The version of what :meth:`Snapshot.to_json` returns: a higher one may lack or change fields."""

MAX_SEATS = 1 << 20
"""Ranks of a fleet: a record that tells of more is none."""

ShardState = Literal["serving", "lost", "returning", "absent"]


@dataclass(frozen=True, slots=True)
class StandingLock:
    """A lock that is held: by whom, and who waits, in the order in which they will have it."""

    name: str
    holder: Owner
    held_s: float
    """At most so long: since its holder asked, by its host's clock. An observer that saw the lock change
    hands counts from there, by its own clock."""
    silent_s: float | None
    """Since the holder's last heartbeat; None where that is not known (:meth:`Backend.silences`)."""
    waiters: tuple[Owner, ...]

    def to_json(self) -> dict[str, Any]:
        """The lock as JSON values."""
        return {
            "name": self.name,
            "holder": _owner_data(self.holder),
            "held_s": _rounded(self.held_s),
            "silent_s": _rounded(self.silent_s),
            "waiters": [_owner_data(waiter) for waiter in self.waiters],
        }


@dataclass(frozen=True, slots=True)
class RosterEntry:
    """A member of a roster."""

    name: str
    incarnation: int
    owner: Owner
    payload: Any
    in_s: float
    """Since it joined, as :attr:`StandingLock.held_s`."""
    silent_s: float | None

    def to_json(self) -> dict[str, Any]:
        """The member as JSON values."""
        return {
            "name": self.name,
            "incarnation": str(self.incarnation),
            "owner": _owner_data(self.owner),
            "payload": self.payload,
            "in_s": _rounded(self.in_s),
            "silent_s": _rounded(self.silent_s),
        }


@dataclass(frozen=True, slots=True)
class RosterView:
    """A roster and its live members, sorted by name, numbers as numbers."""

    name: str
    members: tuple[RosterEntry, ...]

    def to_json(self) -> dict[str, Any]:
        """The roster as JSON values."""
        return {"name": self.name, "members": [member.to_json() for member in self.members]}


@dataclass(frozen=True, slots=True)
class Shard:
    """A generation shard: what its leader said of it, and whether its ranks are in the roster now."""

    shard: int
    state: ShardState
    """``serving``: it serves the fleet's version. ``lost``: it did when its leader last said so, and a rank
    of it is not in the roster any more. ``returning``: all its ranks are in, and it waits for a sync.
    ``absent``: neither."""
    seats: tuple[int, ...]
    missing: tuple[int, ...]
    """The seats that are not in the roster."""
    reason: str

    def to_json(self) -> dict[str, Any]:
        """The shard as JSON values."""
        return {
            "shard": self.shard,
            "state": self.state,
            "seats": list(self.seats),
            "missing": list(self.missing),
            "reason": self.reason,
        }


@dataclass(frozen=True, slots=True)
class FleetView:
    """The refits of one fleet: what its leader published, beside what the roster says now."""

    name: str
    leader: Owner | None
    """Who holds the leader lock; None when nobody leads."""
    standby: int
    """How many controllers wait to lead."""
    version: int | None
    """The number in ``refit/current``; None before the first build."""
    reserved: int | None
    record: FleetRecord | None
    record_term: int
    age_s: float | None
    """Since the record was written, by its host's clock."""
    trainers: tuple[int, ...]
    """The trainer seats of the fleet."""
    trainers_missing: tuple[int, ...]
    shards: tuple[Shard, ...]
    notes: tuple[str, ...]

    def count(self, state: ShardState) -> int:
        """How many shards are in this state."""
        return sum(shard.state == state for shard in self.shards)

    def to_json(self) -> dict[str, Any]:
        """The fleet as JSON values."""
        record = self.record
        return {
            "name": self.name,
            "leader": None if self.leader is None else _owner_data(self.leader),
            "standby": self.standby,
            "version": self.version,
            "reserved": self.reserved,
            "epoch": record and str(record.epoch),
            "digest": record and record.digest,
            "stale": record and record.stale,
            "event": record and record.event,
            "age_s": _rounded(self.age_s),
            "members": [shard.shard for shard in self.shards if shard.state == "serving"],
            "absent": {str(shard.shard): shard.reason for shard in self.shards if shard.state != "serving"},
            "trainers": {"seats": list(self.trainers), "missing": list(self.trainers_missing)},
            "shards": [shard.to_json() for shard in self.shards],
            "syncs": record and record.syncs,
            "failures": record and record.failures,
            "rebuilds": record and record.rebuilds,
            "outage": record and _outage_data(record.outage),
            "last_outage": record and _outage_data(record.last_outage),
            "last_sync": record and _sync_data(record.last_sync),
            "last_error": (record and record.last_error) or None,
            "last_error_at": record and record.last_error_at,
            "carried": record and record.carried,
            "notes": list(self.notes),
        }


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All that :meth:`Observer.look` found."""

    url: str
    """The backend's, without user, password and options."""
    namespace: str
    at: float
    """Wall clock of the observer when it began to look."""
    took_s: float
    locks: tuple[StandingLock, ...]
    rosters: tuple[RosterView, ...]
    fleets: tuple[FleetView, ...]
    notes: tuple[str, ...]
    """What could not be seen, in words."""

    def knows(self, fleet: FleetView) -> bool:
        """Whether anything of *fleet* is on the backend: a leader, a member, or what a leader wrote."""
        written = fleet.record_term or fleet.version is not None or fleet.reserved is not None
        return bool(written or fleet.leader) or any(roster.name == fleet.name for roster in self.rosters)

    def to_json(self) -> dict[str, Any]:
        """Everything as JSON values. Tokens and incarnations are text: JavaScript and jq round large ints."""
        return {
            "schema": SCHEMA,
            "url": self.url,
            "namespace": self.namespace,
            "at": round(self.at, 3),
            "took_s": _rounded(self.took_s),
            "locks": [lock.to_json() for lock in self.locks],
            "rosters": [roster.to_json() for roster in self.rosters],
            "fleets": [fleet.to_json() for fleet in self.fleets],
            "notes": list(self.notes),
        }


def check_record(record: FleetRecord) -> None:
    """Refuse a record of which a field is not what a leader writes: RefitError names the first."""
    counts = ("version", "train_world_size", "syncs", "failures", "rebuilds")
    expected: list[tuple[object, str, Sequence[str]]] = [
        (record, "number", ("at",)),
        (record, "count", counts),
        (record, "text", ("event", "digest", "last_error")),
    ]
    if record.last_error_at is not None:
        expected.append((record, "number", ("last_error_at",)))
    for outage in (record.outage, record.last_outage):
        if outage is not None:
            times = ("began_at",) if outage.seconds is None else ("began_at", "seconds")
            expected += [
                (outage, "number", times),
                (outage, "count", ("failures",)),
                (outage, "text", ("why",)),
            ]
    if record.last_sync is not None:
        expected.append((record.last_sync, "number", ("at", "seconds", "wire_s", "gb_per_s")))
        expected.append((record.last_sync, "count", ("version", "nbytes")))
    for where, kind, names in expected:
        for name in names:
            _expect(name, getattr(where, name), kind)
    for size in record.shard_sizes:
        _expect("shard_sizes", size, "count")
    for reason in record.absent.values():
        _expect("absent", reason, "text")
    for seconds in () if record.last_sync is None else _phases(record.last_sync):
        _expect("phases", seconds, "number")
    if record.train_world_size + sum(record.shard_sizes) > MAX_SEATS:
        raise RefitError(f"status record of more than {MAX_SEATS} seats; expected a fleet")


def _phases(sync: SyncSummary) -> Iterable[object]:
    if not isinstance(sync.phases, Mapping):
        raise RefitError(f"status record whose phases is {sync.phases!r:.80}; expected an object")
    return sync.phases.values()


def _expect(name: str, value: object, kind: str) -> None:
    if kind == "text":
        good = isinstance(value, str)
    else:
        good = is_number(value) and (kind == "number" or (isinstance(value, int) and value >= 0))
    if not good:
        raise RefitError(f"status record whose {name} is {value!r:.80}; expected a {kind}")


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 3)


def _owner_data(owner: Owner) -> dict[str, Any]:
    return {
        "host": owner.host,
        "pid": owner.pid,
        "thread": owner.thread,
        "rank": owner.rank,
        "since": owner.since,
        "label": owner.label,
        "token": None if owner.token is None else str(owner.token),
    }


def _outage_data(outage: Outage | None) -> dict[str, Any] | None:
    if outage is None:
        return None
    return {
        "began_at": outage.began_at,
        "seconds": outage.seconds,
        "failures": outage.failures,
        "why": outage.why,
    }


def _sync_data(sync: SyncSummary | None) -> dict[str, Any] | None:
    if sync is None:
        return None
    return {
        "at": sync.at,
        "version": sync.version,
        "epoch": str(sync.epoch),
        "nbytes": sync.nbytes,
        "seconds": sync.seconds,
        "wire_s": sync.wire_s,
        "gb_per_s": sync.gb_per_s,
        "rebuilt": sync.rebuilt,
        "phases": dict(sync.phases),
    }
