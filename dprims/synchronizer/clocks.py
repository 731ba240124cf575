"""Whose clock a moment was read on, and how far it is from another one, as NTP finds it out.

Each host has a monotonic clock of its own, which says nothing about another host's. A call between the two
is read on both: it cannot arrive before it was sent, nor its answer before that left.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import NamedTuple


class Times(NamedTuple):
    """When a call arrived at a rank and when it was answered there, in seconds on that rank's clock."""

    began: float
    ended: float
    clock: str = ""
    """Which clock that is: :func:`this_clock` of the rank."""


class Exchange(NamedTuple):
    """One call, read on both sides, in seconds."""

    asked: float
    """When it was sent, on the caller's clock."""
    times: Times
    answered: float
    """When the answer was here, on the caller's clock."""


class Offset(NamedTuple):
    """What to add to a moment on a rank's clock to have it on the caller's, and by how much that may be off.

    The bound holds for the moment of the exchange that gave it; clocks drift by some 50 us a second at worst.
    """

    seconds: float
    error_s: float


@cache
def this_clock() -> str:
    """The name of this process's monotonic clock: processes that see the same one have the same name.

    Empty where the system does not say.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {Path('/proc/self/ns/time').readlink()}"
    except OSError:
        return ""


def offset_of(exchanges: Iterable[Exchange], clock: str = "") -> Offset | None:
    """The offset of a rank's clock from the caller's, which is named *clock*; None without an exchange.

    Nothing where both are one clock. Else the middle of what the quickest exchange allows, half of that being
    the error bound. Clocks of one name of which an exchange says otherwise (two machines that were started
    from one snapshot) are two.
    """
    known = list(exchanges)
    ranges = [(one.asked - one.times.began, one.answered - one.times.ended) for one in known]
    if not ranges:
        return None
    if clock and all(one.times.clock == clock for one in known) and all(lo <= 0 <= hi for lo, hi in ranges):
        return Offset(0.0, 0.0)
    low, high = min(ranges, key=lambda one: one[1] - one[0])
    return Offset((low + high) / 2, max(high - low, 0.0) / 2)
