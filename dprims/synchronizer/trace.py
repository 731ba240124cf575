"""What happened in a refit, on every rank and at the leader, on the leader's clock.

The synchronizer keeps a :class:`Journal`: a few moments a call, nothing a tensor. When a sync has succeeded
it becomes the :class:`Trace` of the report: all that was done since the last success, failed tries with it.
"""

from __future__ import annotations

import json
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .chrome import Bar, Sheet
from .clocks import Exchange, Offset, Times, offset_of, this_clock

if TYPE_CHECKING:
    from concurrent.futures import Future

    from ..membership import RefitMembership
    from .calls import RankInfo
    from .lanes import Span, TransferStats

MOST = 32
"""How many operations a journal keeps: a fleet that fails for ever fills no memory."""

LEADER = 1
"""The leader's process number in a trace; seat s has s + 2."""

_NAMES = {"recv": "transfer", "rollback": "settle"}
_LANES = ("gather", "pack", "wire", "digest", "unpack", "cut")

Rank = tuple[int, int]
"""A seat, and the incarnation of the process in it."""


@dataclass(slots=True)
class CallRecord:
    """One call to one rank. ``asked`` and ``answered`` are on the leader's clock, *times* on the rank's."""

    name: str
    seat: int
    incarnation: int
    asked: float
    answered: float | None = None
    """None: no answer came before the operation was over."""
    times: Times | None = None
    error: str = ""
    stats: Mapping[int, TransferStats] = field(default_factory=dict)
    operation: int = 0
    """The number of the journal's operation that it belongs to."""


@dataclass(slots=True)
class Operation:
    """One call of the synchronizer's user: its steps at the leader, its calls to ranks, what befell them."""

    what: str
    began: float
    ended: float | None = None
    error: str = ""
    steps: list[tuple[str, float, float]] = field(default_factory=list)
    calls: list[CallRecord] = field(default_factory=list)
    marks: list[tuple[float, int, str]] = field(default_factory=list)
    """When, at which seat, what."""


class Journal:
    """Operations since the last success. Any thread may write of the one that runs."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._done: deque[Operation] = deque(maxlen=MOST)
        self._now: Operation | None = None
        self._number = 0

    @contextmanager
    def operation(self, what: str) -> Iterator[None]:
        """Take down the body as one operation; what it raises is its outcome."""
        with self._lock:
            self._now, self._number = Operation(what, time.monotonic()), self._number + 1
        try:
            yield
        except BaseException as error:
            self._end(f"{type(error).__name__}: {error}")
            raise
        self._end("")

    def called(self, kind: str, seat: int, incarnation: int, asked: float | None = None) -> CallRecord:
        """A call goes out: now, or *asked* says when it did."""
        asked = time.monotonic() if asked is None else asked
        record = CallRecord(_NAMES.get(kind, kind), seat, incarnation, asked)
        with self._lock:
            record.operation = self._number
            if self._now is not None:
                self._now.calls.append(record)
        return record

    def answered(
        self,
        record: CallRecord,
        times: Times | None,
        error: str = "",
        stats: Mapping[int, TransferStats] | None = None,
    ) -> None:
        """Its answer is here now. One that comes after the operation's end changes nothing."""
        now = time.monotonic()
        with self._lock:
            if self._now is not None and record.operation == self._number:
                record.answered, record.times, record.error = now, times, error
                record.stats = stats or {}

    def introduced(self, record: CallRecord, future: Future[RankInfo]) -> None:
        """A rank said who it is, or its future failed."""
        error = future.exception()
        if error is not None:
            self.answered(record, None, f"{type(error).__name__}: {error}")
            return
        record.incarnation = future.result().incarnation
        self.answered(record, future.result().times, "" if record.incarnation else "not in the roster")

    def stepped(self, name: str, start: float, stop: float) -> None:
        """The leader was in this step; the same one again goes on."""
        with self._lock:
            if self._now is None:
                return
            steps = self._now.steps
            if steps and steps[-1][0] == name and steps[-1][2] == start:
                start = steps.pop()[1]
            steps.append((name, start, stop))

    def mark(self, seat: int, words: str) -> None:
        """Something befell a rank now."""
        with self._lock:
            if self._now is not None:
                self._now.marks.append((time.monotonic(), seat, words))

    def close(self, fleet: RefitMembership) -> Trace:
        """What was taken down until now, the running operation last; the journal begins anew."""
        self._end("")
        with self._lock:
            operations = tuple(self._done)
            self._done.clear()
        return Trace(operations, _names(fleet), this_clock())

    def _end(self, error: str) -> None:
        with self._lock:
            operation, self._now = self._now, None
            if operation is not None:
                operation.ended, operation.error = time.monotonic(), error
                self._done.append(operation)


@dataclass(frozen=True, slots=True)
class Trace:
    """A refit as it was, from the first try to the success. Times are seconds."""

    operations: tuple[Operation, ...]
    names: Mapping[int, str]
    clock: str = ""
    """The leader's clock, by name."""

    def offsets(self) -> dict[Rank, Offset]:
        """How far the clock of each rank that answered is from the leader's."""
        exchanges: dict[Rank, list[Exchange]] = {}
        for call in self._calls():
            if call.times is not None and call.answered is not None:
                exchange = Exchange(call.asked, call.times, call.answered)
                exchanges.setdefault((call.seat, call.incarnation), []).append(exchange)
        found = {rank: offset_of(known, self.clock) for rank, known in exchanges.items()}
        return {rank: offset for rank, offset in found.items() if offset is not None}

    def sheet(self) -> Sheet:
        """The trace drawn: one process the leader, one each rank; a row a lane."""
        sheet, offsets = Sheet(), self.offsets()
        sheet.process(LEADER, "leader")
        sheet.nested(LEADER, "refit", self._operations())
        by_seat: dict[int, list[tuple[Operation, CallRecord]]] = {}
        for operation in self.operations:
            for call in operation.calls:
                by_seat.setdefault(call.seat, []).append((operation, call))
        for seat, calls in sorted(by_seat.items()):
            ranks = {(seat, call.incarnation) for _, call in calls} & offsets.keys()
            known = [offsets[rank] for rank in ranks]
            sheet.process(seat + 2, self.names.get(seat, f"seat {seat}"), _precision(known))
            _draw_rank(sheet, seat, calls, offsets)
        for operation in self.operations:
            for at, seat, words in operation.marks:
                sheet.mark(seat + 2, at, words)
        return sheet

    def write(self, path: str | Path) -> None:
        """Write a file in the Trace Event Format."""
        Path(path).write_text(json.dumps(self.to_json()), encoding="utf-8")

    def to_json(self) -> dict[str, Any]:
        """The trace in the Trace Event Format, with the error bound of every rank's clock."""
        clocks = [
            {
                "seat": seat,
                "incarnation": incarnation,
                "offset_s": offset.seconds,
                "error_s": offset.error_s,
            }
            for (seat, incarnation), offset in sorted(self.offsets().items())
        ]
        return self.sheet().document(clock="the leader's monotonic clock", ranks=clocks)

    def _calls(self) -> list[CallRecord]:
        return [call for operation in self.operations for call in operation.calls]

    def _operations(self) -> Iterator[Bar]:
        for number, one in enumerate(self.operations, 1):
            end = one.began if one.ended is None else one.ended
            outcome = {"outcome": one.error or "done"}
            yield Bar(
                f"{one.what}{' FAILED' if one.error else ''}", one.began, end, {"number": number, **outcome}
            )
            for name, start, stop in one.steps:
                yield Bar(name, max(start, one.began), min(stop, end))


def _draw_rank(
    sheet: Sheet,
    seat: int,
    called: list[tuple[Operation, CallRecord]],
    offsets: Mapping[Rank, Offset],
) -> None:
    calls: list[Bar] = []
    lanes: dict[str, list[Bar]] = {}
    for operation, call in called:
        offset = offsets.get((seat, call.incarnation))
        if call.times is None or offset is None:
            calls.append(_unanswered(call, operation))
            continue
        start, stop = call.times.began + offset.seconds, call.times.ended + offset.seconds
        said = {"incarnation": call.incarnation} | ({"error": call.error} if call.error else {})
        calls.append(Bar(f"{call.name}{' FAILED' if call.error else ''}", start, stop, said))
        for stage, stats in sorted(call.stats.items()):
            for span in stats.spans:
                lanes.setdefault(span.phase, []).append(_bar(span, stage, offset.seconds, start, stop))
    sheet.flat(seat + 2, "calls", calls)
    for lane in sorted(lanes, key=lambda one: (_LANES.index(one) if one in _LANES else len(_LANES), one)):
        sheet.flat(seat + 2, lane, lanes[lane], lane)


def _names(fleet: RefitMembership) -> dict[int, str]:
    """What each seat is called: by its role, and its stage or shard."""
    names = {seat: f"trainer {seat}" for seat in fleet.train_ranks}
    for stage, seat in enumerate(fleet.stage_heads):
        names[seat] += f", stage {stage}"
    for shard, size in enumerate(fleet.shard_sizes):
        for worker, seat in enumerate(fleet.seats_of(shard)):
            names[seat] = f"shard {shard}" + (f", rank {worker}" if size > 1 else "")
    return names


def _bar(span: Span, stage: int, offset: float, first: float, last: float) -> Bar:
    """A bucket's phase within its call: a device's clock may be some microseconds beside the host's."""
    start = min(max(span.start + offset, first), last)
    stop = min(max(span.stop + offset, start), last)
    return Bar(f"{span.phase} {span.bucket}", start, stop, {"stage": stage, "bucket": span.bucket})


def _unanswered(call: CallRecord, operation: Operation) -> Bar:
    """A call of which only the leader knows: from when it was sent until it was given up."""
    end = call.answered if call.answered is not None else operation.ended
    said = {"seen by": "the leader", "error": call.error or "no answer"}
    return Bar(f"{call.name} LOST", call.asked, max(call.asked, end or call.asked), said)


def _precision(known: list[Offset]) -> str:
    if not known:
        return "never answered"
    worst = max(offset.error_s for offset in known)
    return f"clock within {worst * 1e3:.3g} ms of the leader's" if worst else "the leader's clock"
