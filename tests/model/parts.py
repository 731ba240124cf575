"""What a state of the model is made of, and what may go wrong in it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from dprims.membership import Epoch
from dprims.synchronizer.protocol import (
    Cause,
    Message,
    Reply,
    Version,
)

UP, FROZEN, DOWN = "up", "frozen", "down"
EVICTED = -1

FAULTS = frozenset(
    {"crash", "freeze", "leader crash", "leader freeze", "lose", "slow", "duplicate", "break", "engine"}
)
"""What may go wrong, each time for one of the budget.

crash, freeze: of a rank. lose: a call or its answer. slow: a deadline passes although the call is on its way.
duplicate: a call arrives twice. break: a build or receive fails. engine: a pause, commit or resume fails.
"""


_CAUSE = Cause("error", None, "")
"""Stands for every cause: words do not tell states apart."""


class Violation(AssertionError):
    """An invariant does not hold."""


@dataclass(frozen=True)
class Config:
    """What is explored. ``trainers=0`` is one trainer that obeys everybody and never fails."""

    shards: tuple[int, ...] = (2, 1)
    faults: int = 1
    kinds: frozenset[str] = FAULTS
    trainers: int = 0
    steps: int = 0
    """How often the trainers step after the first sync that is explored."""
    split: bool = True
    """Whether a receive takes time, so that other things happen while it runs."""
    eager: bool = True
    """Whether an answer reaches a leader that runs at once. It commutes with all that others do."""
    watch: bool = True
    """Whether ranks and leaders notice an abort in a cell by themselves."""
    fresh: bool = False
    """Start before the first sync: nothing is built and nobody serves."""
    wishes: int = 0
    """How often the user may want a shard out, or in again."""


class Backend(NamedTuple):
    roster: tuple[int, ...]
    last: tuple[int, ...]
    reserved: tuple[int, Version | None] | None
    current: tuple[int, Version | None] | None


class Rank(NamedTuple):
    """One rank: its process, its lease by its own clock, its machine, and what the backend owes it."""

    process: str
    lease: bool
    machine: int
    owed: str
    highest: Epoch
    """The highest epoch that any process of this seat saw (nobody but the checker knows)."""


class Boss(NamedTuple):
    """One leader: its process, its machine, backend operations that were not done yet."""

    process: str
    machine: int
    owed: tuple[Any, ...]
    recovered: bool


class Request(NamedTuple):
    term: int
    seat: int
    message: Message


class Answered(NamedTuple):
    term: int
    seat: int
    message: Message
    reply: Reply


class MachineTable:
    """Interned machine states, and what each did with each event."""

    def __init__(self, blank: Any) -> None:
        self.blank = blank
        self.ids: dict[Any, int] = {}
        self.snapshots: list[Any] = []
        self.views: list[Any] = []
        self.steps: dict[Any, tuple[int, tuple[Any, ...]]] = {}

    def intern(self, machine: Any) -> int:
        snapshot = machine.snapshot()
        found = self.ids.get(snapshot)
        if found is None:
            found = self.ids[snapshot] = len(self.snapshots)
            self.snapshots.append(snapshot)
            self.views.append(self.blank().restore(snapshot))
        return found

    def step(self, state: int, event: Any) -> tuple[int, tuple[Any, ...]]:
        key = (state, event)
        done = self.steps.get(key)
        if done is None:
            machine = self.blank().restore(self.snapshots[state])
            actions = tuple(machine.handle(event))
            if getattr(machine, "cause", None) is not None:
                machine.cause = _CAUSE
            done = self.steps[key] = self.intern(machine), actions
        return done


class Work:
    """A state unpacked, to be changed."""

    __slots__ = ("backend", "bosses", "cells", "faults", "net", "ranks", "served", "steps", "wishes")

    def __init__(
        self,
        backend: Backend,
        cells: dict[tuple[Epoch, int], str],
        net: set[Any],
        bosses: list[Boss],
        served: tuple[Any, ...],
        faults: int,
        steps: int,
        wishes: int,
        ranks: list[Rank],
    ) -> None:
        self.backend = backend
        self.cells = cells
        self.net = net
        self.bosses = bosses
        self.served = served
        self.faults = faults
        self.steps = steps
        self.wishes = wishes
        self.ranks = ranks

    def copy(self) -> Work:
        return Work(
            self.backend,
            self.cells.copy(),
            self.net.copy(),
            self.bosses.copy(),
            self.served,
            self.faults,
            self.steps,
            self.wishes,
            self.ranks.copy(),
        )

    def roster(self) -> tuple[int, ...]:
        return tuple(max(entry, 0) for entry in self.backend.roster)

    def set_roster(self, seat: int, entry: int) -> None:
        roster = self.backend.roster
        self.backend = self.backend._replace(roster=(*roster[:seat], entry, *roster[seat + 1 :]))
