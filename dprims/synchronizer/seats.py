"""The fleet's roster, read by seat: who is in, under which incarnation, and whose entry lapses."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from ..exceptions import BackendError
from ..roster import Roster

log = logging.getLogger("dprims.synchronizer.seats")

LOOKS = 20
"""How often the roster is looked at within one ttl while it is watched."""


class Seats:
    """The roster of a fleet of *size* ranks, whose members are named by seat."""

    def __init__(self, roster: Roster, size: int) -> None:
        self.roster = roster
        self.size = size
        self.known: dict[int, int] = {}
        """The incarnation under which each seat was last seen."""
        self._seen: set[tuple[int, int]] = set()
        """The entries that somebody has seen, and whose end was not told yet."""
        self._stop = threading.Event()

    def read(self) -> tuple[int, ...]:
        """The incarnation of each seat that is in, 0 for the others."""
        seats = [0] * self.size
        for name, member in self.roster.members().items():
            if name.isdecimal() and int(name) < self.size:
                seats[int(name)] = self.known[int(name)] = member.incarnation
                self._seen.add((int(name), member.incarnation))
        return tuple(seats)

    def evict(self, seat: int, incarnation: int) -> bool:
        """End the entry of a rank that is gone or condemned; whether it stood."""
        return bool(incarnation) and self.roster.evict(str(seat), incarnation)

    def watch(self, lapsed: Callable[[int, int, str], None]) -> None:
        """Call *lapsed* with seat, incarnation and words for every entry that ends, until :meth:`close`.

        Every entry counts that a call of :meth:`read` has seen, also when another stands in its place now.
        """

        def run() -> None:
            while not self._stop.wait(self.roster.ttl / LOOKS):
                seen = self._seen.copy()  # before the look: what is seen after it may be newer
                try:
                    now = self.read()
                except BackendError as error:
                    log.warning("the roster cannot be read: %s", error)
                    continue
                for seat, was in sorted(seen - set(enumerate(now))):
                    self._seen.discard((seat, was))
                    lapsed(seat, was, f"the roster entry of seat {seat} lapsed")

        threading.Thread(target=run, name="dprims-roster-watch", daemon=True).start()

    def close(self) -> None:
        """End the watch. What is in the roster stays."""
        self._stop.set()
