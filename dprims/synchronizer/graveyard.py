"""Where process groups go that can neither be ended nor dropped.

The destructor of a gloo group blocks while one of its operations is stuck, until the group's own timeout; an
NCCL group's joins its threads. So the last reference to a group is never dropped on a working thread. A group
is buried with the works and the buffers that its stuck operations still use, and one daemon thread lets go of
them when every work has ended, or their time has passed. It does so soon: gloo's own thread spins on a
connection whose operation was given up in the middle of a write (it waits for room to write what nobody has
any more), and a group that is gone closes its connections, which ends what its peers have buried. An
interpreter that exits earlier waits for the burial under way, and leaves the others as they are.
"""

from __future__ import annotations

import atexit
import ctypes
import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

__all__ = ["buried", "bury"]

EXIT_S = 5.0
"""How long an interpreter that exits waits for a burial that has begun."""
IDLE_S = 60.0
"""How long the thread stays when there is nothing to bury."""
END_AFTER_S = 0.5
"""When works are ended from outside: by then everybody has heard, from whom it ought to, what went wrong."""
LOOK_S = 0.01
"""Pause between two looks at whether works have ended."""


@dataclass(eq=False, slots=True)
class _Grave:
    when: float
    remains: list[Any]
    works: list[Any]
    end: Callable[[], object] | None
    since: float = field(default_factory=time.monotonic)

    def overdue(self) -> bool:
        """Whether its works are to be ended now."""
        return bool(self.end and self.works) and time.monotonic() - self.since >= END_AFTER_S

    def ripe(self) -> bool:
        """Whether nothing of it is stuck, or its time has passed."""
        if self.when <= time.monotonic():
            return True
        return bool(self.works) and all(work.is_completed() for work in self.works)


_log = logging.getLogger("dprims.graveyard")
_changed = threading.Condition()
_graves: list[_Grave] = []
_reaper: threading.Thread | None = None
_closing = False


def bury(
    remains: list[Any],
    keep_s: float = 0.0,
    works: Sequence[Any] = (),
    end: Callable[[], object] | None = None,
) -> None:
    """Take over `remains`, and drop them on another thread. Returns at once.

    The list is emptied, so that the caller holds no reference through it.

    Args:
        remains: a group last dropped, so first in the list, and what its operations use.
        keep_s: they are dropped after so many seconds,
        works: or when each of these, torch's, has ended, well or not; if there are any.
        end: called once, after END_AFTER_S, to end those works that have not ended by themselves.
    """
    global _reaper
    with _changed:
        _graves.append(_Grave(time.monotonic() + keep_s, remains.copy(), list(works), end))
        remains.clear()
        if _reaper is None or not _reaper.is_alive():
            _reaper = threading.Thread(target=_reap, name="dprims-graveyard", daemon=True)
            _reaper.start()
        _changed.notify()


def buried() -> int:
    """How many graves are still occupied."""
    with _changed:
        return len(_graves)


def _reap() -> None:
    while (grave := _next()) is not None:
        end, grave.end = grave.end, None
        try:
            if not grave.ripe() and end is not None:
                end()
                continue
            grave.works.clear()
            while grave.remains:
                grave.remains.pop()
        except Exception:  # noqa: BLE001 - nobody waits for this thread, only the log is left
            _log.exception("dropping an abandoned group failed")
        with _changed:
            _graves.remove(grave)


def _next() -> _Grave | None:
    """A grave at which there is something to do, once there is one; None when this thread is to end."""
    global _reaper
    with _changed:
        while not _closing:
            for grave in _graves:
                if grave.ripe() or grave.overdue():
                    return grave
            if not _changed.wait(_pause()) and not _graves:
                _reaper = None
                break
        return None


def _pause() -> float:
    """How long nothing can become ripe."""
    if any(grave.works for grave in _graves):
        return LOOK_S
    return max(min(grave.when for grave in _graves) - time.monotonic(), 0.0) if _graves else IDLE_S


@atexit.register
def _close() -> None:
    """At exit: cut no destructor in its middle, and start none that would wait for a stuck operation."""
    global _closing
    deadline = time.monotonic() + EXIT_S
    with _changed:  # those that are due are quick: nothing of theirs is stuck
        while _reaper is not None and _reaper.is_alive() and _due() and time.monotonic() < deadline:
            _changed.wait(0.01)
        _closing = True
        _changed.notify_all()
        reaper, left = _reaper, [grave.remains for grave in _graves]
    if reaper is not None:
        reaper.join(max(deadline - time.monotonic(), 0.0))
    for remains in left:
        for one in remains:  # never dropped: the process ends with it
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(one))


def _due() -> bool:
    return any(grave.ripe() for grave in _graves)
