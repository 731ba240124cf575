"""A snapshot as text for a terminal: one screen, whatever the size of the fleet."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from time import localtime, strftime
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ..backend import Owner
from ..status import FleetView, RosterView, Snapshot, StandingLock
from ..synchronizer._record import SyncSummary, ranges
from ._columns import one_line
from ._output import encodes

MANY = 16
"""How many members of a roster, waiters of a lock, or reasons of absence are listed one by one."""

_LOOKS = {
    "serving": ("■", "#", "green"),
    "returning": ("~", "~", "yellow"),
    "lost": ("x", "x", "bold red"),
    "absent": ("·", ".", "red"),
}
"""Of each state the glyph, the one where the output cannot show that, and the style."""


def render(snapshot: Snapshot) -> RenderableType:
    """Everything in *snapshot*."""
    head = Text()
    head.append(snapshot.url, "bold")
    head.append(f"  namespace {one_line(snapshot.namespace)}", "dim")
    head.append(f"  {strftime('%H:%M:%S', localtime(snapshot.at))}", "dim")
    parts: list[RenderableType] = [head, *(Text(f"! {note}", "yellow") for note in snapshot.notes)]
    for fleet in snapshot.fleets:
        parts += ["", *_fleet(fleet)]
    if not snapshot.fleets:
        parts += ["", Text("no refits: no fleet has a leader, a roster or a record here", "dim")]
    parts += ["", *_locks(snapshot.locks)]
    for roster in snapshot.rosters:
        parts += ["", *_roster(roster)]
    if not snapshot.rosters:
        parts += ["", Text("no rosters", "dim")]
    return Group(*parts)


def _fleet(fleet: FleetView) -> Iterable[RenderableType]:
    record = fleet.record
    head = Text()
    head.append(f"fleet {one_line(fleet.name)}", "bold cyan")
    head.append(f"  version {'-' if fleet.version is None else fleet.version}", "bold")
    if record is not None:
        head.append(f"  epoch {record.epoch}")
        head.append("  stale" if record.stale else "", "yellow")
    yield head
    leader = "nobody" if fleet.leader is None else _who(fleet.leader)
    yield Text(f"  leader   {leader}" + (f", {fleet.standby} standing by" if fleet.standby else ""))
    for note in fleet.notes:
        yield Text(f"  ! {one_line(note)}", "yellow")
    if record is None:
        return
    if fleet.trainers_missing:
        yield Text(f"  trainers {ranges(fleet.trainers_missing)} are not in the roster", "bold red")
    counts = Text("  shards   ")
    for state, (_, _, style) in _LOOKS.items():
        glyph = _glyph(state)
        count = fleet.count(state)  # type: ignore[arg-type]
        counts.append(f"{glyph} {count} {state}   ", style if count else "dim")
    yield counts
    yield _grid(fleet)
    yield from _missing(fleet)
    if record.outage is not None:
        since = ago(record.outage.began_at)
        yield Text(
            f"  OUTAGE   {_counted(record.outage.failures, 'failure')} since {since}: "
            f"{one_line(record.outage.why)}",
            "bold red",
        )
    if record.last_sync is not None:
        yield Text(f"  last sync    {_sync(record.last_sync)}{' (an earlier leader)' * record.carried}")
    if (outage := record.last_outage) is not None:
        yield Text(
            f"  last outage  {seconds(outage.seconds)}, {ago(outage.began_at)}, "
            f"{_counted(outage.failures, 'failure')}: {one_line(outage.why)}"
        )
    told_above = outage is not None and record.last_error == outage.why
    if record.last_error and record.last_error_at and not told_above:
        yield Text(f"  last error   {ago(record.last_error_at)}: {one_line(record.last_error)}", "dim")
    told = "" if fleet.age_s is None else f", told {seconds(fleet.age_s)} ago"
    yield Text(
        f"  this term    {_counted(record.syncs, 'sync')}, {_counted(record.failures, 'failure')}, "
        f"{_counted(record.rebuilds, 'build')}{told}",
        "dim",
    )


def _glyph(state: str) -> str:
    return _LOOKS[state][0 if encodes("■·") else 1]


def _grid(fleet: FleetView) -> Text:
    """A glyph a shard, 64 a row, with the number of the first."""
    grid = Text()
    wide = len(str(len(fleet.shards)))
    for first in range(0, len(fleet.shards), 64):
        grid.append(f"  {first:>{wide}} ", "dim")
        for shard in fleet.shards[first : first + 64]:
            grid.append(_glyph(shard.state), _LOOKS[shard.state][-1])
        if first + 64 < len(fleet.shards):
            grid.append("\n")
    return grid


def _missing(fleet: FleetView) -> Iterable[Text]:
    why: dict[tuple[str, str], list[int]] = {}
    for shard in fleet.shards:
        if shard.state != "serving":
            why.setdefault((shard.state, shard.reason), []).append(shard.shard)
    for (state, reason), shards in list(why.items())[:MANY]:
        yield Text(f"  {state:9} {ranges(shards)}: {one_line(reason)}", _LOOKS[state][-1])
    if len(why) > MANY:
        yield Text(f"  and {len(why) - MANY} more reasons", "dim")


def _locks(locks: Sequence[StandingLock]) -> Iterable[RenderableType]:
    if not locks:
        yield Text("no lock is held", "dim")
        return
    table = _table("LOCK", "HOLDER", "TOKEN", "HELD AT MOST", "HEARD FROM", "WAITING, IN ORDER")
    for lock in locks:
        waiters = [_who(waiter) for waiter in lock.waiters[:MANY]]
        if len(lock.waiters) > MANY:
            waiters.append(f"and {len(lock.waiters) - MANY} more")
        table.add_row(
            Text(one_line(lock.name), "bold"),
            Text(_who(lock.holder)),
            str(lock.holder.token),
            seconds(lock.held_s),
            _heard(lock.silent_s),
            Text("\n".join(f"{place}. {who}" for place, who in enumerate(waiters, 1)) or "-"),
        )
    yield table


def _roster(roster: RosterView) -> Iterable[RenderableType]:
    yield Text(f"roster {one_line(roster.name)}: {_counted(len(roster.members), 'member')}", "bold cyan")
    shown: Sequence[Any] = roster.members
    if len(shown) > MANY:
        shown = sorted(shown, key=lambda one: -(one.silent_s or 0.0))[:MANY]
        yield Text(f"  the {MANY} that were silent longest", "dim")
    table = _table("MEMBER", "INCARNATION", "IN FOR", "HEARD FROM", "PROCESS")
    for member in shown:
        table.add_row(
            Text(one_line(member.name)),
            str(member.incarnation),
            seconds(member.in_s),
            _heard(member.silent_s),
            Text(_who(member.owner)),
        )
    yield table


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for column in columns:
        table.add_column(column)
    return table


def _counted(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _who(owner: Owner) -> str:
    return one_line(str(owner))


def _heard(silent_s: float | None) -> str:
    return "?" if silent_s is None else f"{seconds(silent_s)} ago"


def _sync(sync: SyncSummary) -> str:
    built = ", groups rebuilt" if sync.rebuilt else ""
    return (
        f"version {sync.version}, {ago(sync.at)}: {size(sync.nbytes)} in {seconds(sync.seconds)}, "
        f"{sync.gb_per_s:.2f} GB/s on the wire{built}"
    )


def ago(at: float) -> str:
    """When that was, by the clock of the host that says so."""
    try:
        return strftime("%H:%M:%S", localtime(at))
    except (ValueError, OverflowError, OSError):  # no year that a calendar has
        return "?"


def seconds(length: float | None) -> str:
    """A length of time for people."""
    if length is None:
        return "?"
    for unit, one in (("d", 86400), ("h", 3600), ("min", 60)):
        if length >= 2 * one:
            return f"{length / one:.0f} {unit}"
    return (
        f"{length:.0f} s" if length >= 10 else f"{length:.1f} s" if length >= 1 else f"{length * 1e3:.0f} ms"
    )


def size(nbytes: int) -> str:
    """A number of bytes for people."""
    for unit, one in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= one:
            return f"{nbytes / one:.1f} {unit}"
    return f"{nbytes} B"
