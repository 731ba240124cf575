"""What a leader's operations came to: kept, published in the backend for ``dprims status``, counted.

A refit never waits for it: it notes what happened in memory and leaves the writing to a thread of its own,
which keeps the newest record only and gives up on any that cannot be written.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Literal

from .. import metrics
from ..backend import Backend
from ..exceptions import BackendError, RefitError
from ._record import (
    Event,
    FleetRecord,
    Outage,
    SyncSummary,
    cut,
    decode_record,
    encode_record,
    record_key,
)

if TYPE_CHECKING:
    from .protocol import Leader
    from .report import RefitReport

log = logging.getLogger("dprims.synchronizer.chronicle")

PAUSE_S = 0.5
"""The least time between two records: of syncs in quick succession only the last is written."""
CLOSE_S = 1.0
"""How long the end of a leadership waits for its last record to be written."""


class Chronicle:
    """The story of one leader of *fleet*; of it a successor takes over what came last."""

    def __init__(self, fleet: str) -> None:
        self.fleet = fleet
        self.broke_at: float | None = None
        """When the operation that runs, or ran last, first saw something wrong; monotonic."""
        self._publisher: Publisher | None = None
        self._start()

    def _start(self) -> None:
        self._syncs = self._failures = self._rebuilds = 0
        self._outage_from = 0.0
        self._outage: Outage | None = None
        self._last_outage: Outage | None = None
        self._last_sync: SyncSummary | None = None
        self._error, self._error_at = "", 0.0
        self._absent: Mapping[int, str] = {}
        self._members: frozenset[int] = frozenset()

    def lead(self, backend: Backend, prefix: str, term: int) -> None:
        """A term begins."""
        self.close()
        self._start()
        self._publisher = Publisher(backend, record_key(prefix), term)

    def close(self) -> None:
        """The term is over. Waits a moment for what is still to be written."""
        publisher, self._publisher = self._publisher, None
        if publisher is not None:
            publisher.close(CLOSE_S)

    def rebuilt(self) -> None:
        """Weight groups were built."""
        self._rebuilds += 1
        if metrics.recorder is not None:
            metrics.recorder.rebuilt(self.fleet)

    def stepped(self) -> None:
        """The trainers have stepped."""
        if metrics.recorder is not None:
            metrics.recorder.stale(self.fleet, True)

    @contextmanager
    def operation(self, leader: Leader, kind: Literal["sync", "only", "build"]) -> Iterator[None]:
        """Around one operation: note how it failed, if it does."""
        self.broke_at = None
        try:
            yield
        except Exception as error:
            self._failed(leader, error, kind)
            raise

    def built(self, leader: Leader, absent: Mapping[int, str]) -> None:
        """Groups were built; *absent* are the shards that are not in them, with the reason of each."""
        self._absent = absent
        self._tell("built", leader)

    def synced(self, leader: Leader, report: RefitReport) -> None:
        """A sync has succeeded, and is about to return."""
        self._syncs += 1
        self._last_sync = SyncSummary(
            at=time.time(),
            version=report.version,
            epoch=report.epoch,
            nbytes=report.nbytes,
            seconds=report.seconds,
            wire_s=report.wire_s,
            gb_per_s=report.gb_per_s,
            rebuilt=report.rebuilt,
            phases=report.phases,
        )
        outage, self._outage = self._outage, None
        seen = metrics.recorder
        if seen is not None:
            seen.synced(self.fleet, report.seconds, report.nbytes, report.gb_per_s)
        if outage is not None:
            seconds = time.monotonic() - self._outage_from
            self._last_outage = replace(outage, seconds=seconds)
            if seen is not None:
                seen.failing(self.fleet, seconds)
        self._absent = report.absent
        self._tell("synced", leader)

    def _failed(self, leader: Leader, error: Exception, kind: str) -> None:
        self._failures += 1
        self._error, self._error_at = cut(f"{type(error).__name__}: {error}"), time.time()
        seen = metrics.recorder
        if seen is not None and kind != "build":
            seen.failed(self.fleet, error)
        if kind == "sync" and self._outage is None:
            now = time.monotonic()
            self._outage_from = now if self.broke_at is None else self.broke_at
            began = time.time() - (now - self._outage_from)
            self._outage = Outage(began_at=began, seconds=None, failures=0, why=self._error)
            if seen is not None:
                seen.failing(self.fleet, None)
        if self._outage is not None:
            self._outage = replace(self._outage, failures=self._outage.failures + 1)
        dropped = dict.fromkeys(self._members - leader.current, "dropped out of a refit that failed")
        self._absent = {**self._absent, **dropped}
        if leader.phase != "stopped":  # else it has nothing more to say
            self._tell("failed", leader)

    def _tell(self, event: Event, leader: Leader) -> None:
        self._members, members = leader.current, tuple(sorted(leader.current))
        seen = metrics.recorder
        if seen is not None:
            seen.leads(
                self.fleet, leader.term, leader.build, leader.version.number, len(leader.seats), len(members)
            )
            seen.stale(self.fleet, leader.stale)
        if self._publisher is not None:
            self._publisher.publish(
                FleetRecord(
                    event=event,
                    at=time.time(),
                    epoch=leader.epoch,
                    version=leader.version.number,
                    digest=leader.version.digest,
                    stale=leader.stale,
                    train_world_size=len(leader.trainers),
                    shard_sizes=leader.fleet.shard_sizes,
                    members=members,
                    absent={
                        shard: self._absent.get(shard, "has not taken part in a sync yet")
                        for shard in range(len(leader.seats))
                        if shard not in leader.current
                    },
                    syncs=self._syncs,
                    failures=self._failures,
                    rebuilds=self._rebuilds,
                    outage=self._outage,
                    last_outage=self._last_outage,
                    last_sync=self._last_sync,
                    last_error=self._error,
                    last_error_at=self._error_at or None,
                )
            )


class Publisher:
    """Writes the newest record into a cell fenced by *term*, on a thread of its own; never raises."""

    def __init__(self, backend: Backend, key: str, term: int) -> None:
        self._backend, self._key, self._term = backend, key, term
        self._changed = threading.Condition()
        self._next: FleetRecord | None = None
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="dprims-status", daemon=True)
        self._thread.start()

    def publish(self, record: FleetRecord) -> None:
        """Have *record* written soon, unless a newer one comes before. Returns at once."""
        with self._changed:
            self._next = record
            self._changed.notify()

    def close(self, timeout: float) -> None:
        """Write what is left, for at most *timeout* seconds, and end the thread."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join(timeout)

    def _run(self) -> None:
        before: FleetRecord | None = None
        try:
            stands, found = self._backend.raise_fence(self._key, self._term)
            before = _read(found)
        except BackendError as error:
            log.warning("the status cell of term %d was not fenced: %s", self._term, error)
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._next is not None or self._closed)
                record, self._next = self._next, None
            if record is None:
                return
            try:
                stands = self._backend.write_fenced(
                    self._key, encode_record(_after(before, record)), self._term
                )
            except BackendError as error:
                log.warning("the status record of term %d was not written: %s", self._term, error)
                continue
            if stands > self._term:
                log.info("status records of term %d end: term %d has taken over", self._term, stands)
                return
            with self._changed:
                self._changed.wait_for(lambda: self._closed, PAUSE_S)


def _read(found: bytes) -> FleetRecord | None:
    try:
        return decode_record(found) if found else None
    except RefitError as error:
        log.info("the status record of an earlier term is left behind: %s", error)
        return None


def _after(before: FleetRecord | None, record: FleetRecord) -> FleetRecord:
    """*record* with the last sync and outage of an earlier leader where its own has had none."""
    if before is None or (record.last_sync is not None and record.last_outage is not None):
        return record
    return replace(
        record,
        last_sync=record.last_sync or before.last_sync,
        last_outage=record.last_outage or before.last_outage,
        carried=record.last_sync is None and before.last_sync is not None,
    )
