"""Spans as a file for Perfetto or chrome://tracing: the Trace Event Format, of which this uses little.

Complete events (``X``) with microseconds in ``ts`` and ``dur``, instants (``i``), and metadata (``M``) that
names processes and threads. A viewer draws spans of one thread inside each other, so spans that overlap
without that get rows of their own.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

Event = dict[str, Any]


class Bar(NamedTuple):
    """One span to draw: seconds on one clock that all bars of a sheet share."""

    name: str
    start: float
    stop: float
    args: Mapping[str, Any] = {}


class Sheet:
    """Collects what is to be drawn, and writes it. Times begin with the earliest one, at 0."""

    def __init__(self) -> None:
        self._about: list[Event] = []
        self._bars: list[tuple[int, int, Bar, str]] = []
        self._marks: list[tuple[int, float, str]] = []
        self._rows: dict[int, int] = {}

    def process(self, pid: int, name: str, label: str = "") -> None:
        """Name a process; those named first stand above. *label* stands beside the name."""
        self._meta(pid, 0, "process_name", {"name": name})
        self._meta(pid, 0, "process_sort_index", {"sort_index": len(self._rows)})
        if label:
            self._meta(pid, 0, "process_labels", {"labels": label})
        self._rows[pid] = 0

    def nested(self, pid: int, row: str, bars: Iterable[Bar], category: str = "") -> None:
        """Draw bars of which each lies inside another or beside it, in one row; earlier ones are outer."""
        tid = self._row(pid, row)
        self._bars += [(pid, tid, bar, category) for bar in bars]

    def flat(self, pid: int, row: str, bars: Iterable[Bar], category: str = "") -> None:
        """Draw bars side by side; those that overlap in a second, third, ... row of that name."""
        rows: list[tuple[int, float]] = []  # the thread of each row, and when it is free again
        for bar in sorted(bars, key=lambda one: (one.start, one.stop)):
            place = next((at for at, (_, free) in enumerate(rows) if free <= bar.start), len(rows))
            if place == len(rows):
                rows.append((self._row(pid, row if not rows else f"{row} ({place + 1})"), 0.0))
            rows[place] = (rows[place][0], bar.stop)
            self._bars.append((pid, rows[place][0], bar, category))

    def mark(self, pid: int, at: float, name: str) -> None:
        """Draw a moment across the rows of a process."""
        self._marks.append((pid, at, name))

    def events(self) -> list[Event]:
        """Everything, in the order of time."""
        moments = [bar.start for _, _, bar, _ in self._bars] + [at for _, at, _ in self._marks]
        origin = min(moments, default=0.0)
        drawn: list[Event] = [
            {
                "ph": "X",
                "pid": pid,
                "tid": tid,
                "name": bar.name,
                "cat": category or "refit",
                "ts": _us(bar.start - origin),
                "dur": max(_us(bar.stop - origin) - _us(bar.start - origin), 0.0),
                "args": dict(bar.args),
            }
            for pid, tid, bar, category in self._bars
        ]
        drawn += [
            {"ph": "i", "s": "p", "pid": pid, "tid": 1, "name": name, "cat": "event", "ts": _us(at - origin)}
            for pid, at, name in self._marks
        ]
        return [*self._about, *sorted(drawn, key=lambda event: float(event["ts"]))]

    def document(self, **about: Any) -> dict[str, Any]:
        """The whole file as a JSON value; *about* is what else there is to say."""
        return {"traceEvents": self.events(), "displayTimeUnit": "ms", "otherData": about}

    def write(self, path: str | Path, **about: Any) -> None:
        """Write the file."""
        Path(path).write_text(json.dumps(self.document(**about)), encoding="utf-8")

    def _row(self, pid: int, name: str) -> int:
        if pid not in self._rows:
            self.process(pid, f"process {pid}")
        self._rows[pid] += 1
        tid = self._rows[pid]
        self._meta(pid, tid, "thread_name", {"name": name})
        self._meta(pid, tid, "thread_sort_index", {"sort_index": tid})
        return tid

    def _meta(self, pid: int, tid: int, name: str, args: dict[str, Any]) -> None:
        self._about.append({"ph": "M", "pid": pid, "tid": tid, "name": name, "args": args})


def _us(seconds: float) -> float:
    return round(seconds * 1e6, 3)
