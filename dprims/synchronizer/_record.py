"""What a leader says of its fleet to whoever asks the backend: one small cell, for people to look at.

Nothing in the protocol reads it. It is written after an operation has returned, in the background, fenced by
the term, and may be missing or late. Pure: no clock, no threads.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, Literal

from dprims.exceptions import RefitError
from dprims.membership import Epoch

SCHEMA = 1
WORDS = 200
"""To how many characters a reason or an error is cut."""
REASONS = 24
"""How many different reasons of absence are kept apart; the other shards have the last one's place."""
OTHER = "other reasons"

Event = Literal["built", "synced", "failed"]


def record_key(prefix: str) -> str:
    """Return the fenced cell of a fleet's record."""
    return f"{prefix}/refit/status"


@dataclass(frozen=True, slots=True, kw_only=True)
class Outage:
    """A time without a successful sync: from the first failure to the return of the sync that succeeded."""

    began_at: float
    """Wall clock of the leader's host."""
    seconds: float | None
    """On the leader's monotonic clock; None while it lasts."""
    failures: int
    why: str
    """The first error."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncSummary:
    """The numbers of a :class:`~dprims.synchronizer.RefitReport`; times in seconds, speed in 1e9 bytes/s."""

    at: float
    version: int
    epoch: Epoch
    nbytes: int
    seconds: float
    wire_s: float
    gb_per_s: float
    rebuilt: bool
    phases: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetRecord:
    """A fleet as its leader knew it right after an operation."""

    event: Event
    at: float
    """When it was written, on the wall clock of the leader's host."""
    epoch: Epoch
    version: int
    digest: str
    stale: bool
    """As it was then: that the trainers have stepped since is not written."""
    train_world_size: int
    shard_sizes: tuple[int, ...]
    members: tuple[int, ...]
    """The shards that serve the version."""
    absent: Mapping[int, str]
    """The shards that do not, with the reason of each."""
    syncs: int
    failures: int
    rebuilds: int
    """Counted within the term."""
    outage: Outage | None = None
    last_outage: Outage | None = None
    last_sync: SyncSummary | None = None
    last_error: str = ""
    last_error_at: float | None = None
    carried: bool = field(default=False, compare=False)
    """Whether ``last_sync`` and ``last_outage`` are an earlier leader's."""


def encode_record(record: FleetRecord) -> bytes:
    """Return a record as JSON: some 15 KiB at most with 1,024 shards."""
    reasons: dict[str, list[int]] = {}
    for shard, reason in sorted(record.absent.items()):
        text = cut(reason)
        full = len(reasons) >= REASONS and text not in reasons
        reasons.setdefault(OTHER if full else text, []).append(shard)
    sync = record.last_sync
    data: dict[str, Any] = {
        "schema": SCHEMA,
        "event": record.event,
        "at": round(record.at, 3),
        "epoch": str(record.epoch),
        "version": [record.version, record.digest],
        "stale": record.stale,
        "train_world_size": record.train_world_size,
        "shard_sizes": [[size, len(list(run))] for size, run in groupby(record.shard_sizes)],
        "members": ranges(record.members),
        "absent": {reason: ranges(shards) for reason, shards in reasons.items()},
        "counts": [record.syncs, record.failures, record.rebuilds],
        "outage": _outage_data(record.outage),
        "last_outage": _outage_data(record.last_outage),
        "last_sync": sync
        and {
            "at": round(sync.at, 3),
            "version": sync.version,
            "epoch": str(sync.epoch),
            "nbytes": sync.nbytes,
            "seconds": round(sync.seconds, 6),
            "wire_s": round(sync.wire_s, 6),
            "gb_per_s": round(sync.gb_per_s, 3),
            "rebuilt": sync.rebuilt,
            "phases": {name: round(seconds, 6) for name, seconds in sync.phases.items()},
        },
        "last_error": [cut(record.last_error), record.last_error_at],
        "carried": record.carried,
    }
    return json.dumps(data, separators=(",", ":"), ensure_ascii=False).encode(errors="replace")


def decode_record(data: bytes) -> FleetRecord:
    """Read a record; RefitError for one of another schema, or what is none."""
    try:
        found = json.loads(data)
        if found["schema"] != SCHEMA:
            raise RefitError(f"status record of schema {found['schema']}; this dprims reads {SCHEMA}")
        version, digest = found["version"]
        syncs, failures, rebuilds = found["counts"]
        sync = found["last_sync"]
        error, error_at = found["last_error"]
        return FleetRecord(
            event=found["event"],
            at=found["at"],
            epoch=Epoch.parse(found["epoch"]),
            version=version,
            digest=digest,
            stale=found["stale"],
            train_world_size=found["train_world_size"],
            shard_sizes=tuple(size for size, count in found["shard_sizes"] for _ in range(count)),
            members=tuple(shards_in(found["members"])),
            absent=dict(
                sorted(
                    (shard, reason)
                    for reason, shards in found["absent"].items()
                    for shard in shards_in(shards)
                )
            ),
            syncs=syncs,
            failures=failures,
            rebuilds=rebuilds,
            outage=_outage(found["outage"]),
            last_outage=_outage(found["last_outage"]),
            last_sync=sync and SyncSummary(**{**sync, "epoch": Epoch.parse(sync["epoch"])}),
            last_error=error,
            last_error_at=error_at,
            carried=found["carried"],
        )
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise RefitError(f"not a status record: {data[:80]!r}") from error


def ranges(numbers: Iterable[int]) -> str:
    """Return sorted numbers in short: ``0-2,5``; empty for none."""
    parts: list[list[int]] = []
    for number in sorted(numbers):
        if parts and number == parts[-1][1] + 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in parts)


def shards_in(text: str) -> list[int]:
    """Read what :func:`ranges` wrote."""
    shards: list[int] = []
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        shards += range(int(first), int(last or first) + 1)
    return shards


def cut(text: str) -> str:
    """Return *text* on one line, of at most :data:`WORDS` characters."""
    line = " ".join(text.split())
    return line if len(line) <= WORDS else line[: WORDS - 3] + "..."


def _outage_data(outage: Outage | None) -> dict[str, Any] | None:
    if outage is None:
        return None
    return {
        "began_at": round(outage.began_at, 3),
        "seconds": None if outage.seconds is None else round(outage.seconds, 6),
        "failures": outage.failures,
        "why": cut(outage.why),
    }


def _outage(data: dict[str, Any] | None) -> Outage | None:
    return None if data is None else Outage(**data)
