"""Where process groups go that can neither be ended nor dropped.

The destructor of a gloo group blocks while one of its operations is stuck, until the group's own timeout; an
NCCL group's joins its threads. So the last reference to a group is never dropped on a working thread. A group
is buried with the works and the buffers that its stuck operations still use, and one daemon thread lets go of
them when their time has passed. An interpreter that exits earlier waits for the burial under way, and leaves
the others as they are.
"""

from __future__ import annotations

import atexit
import ctypes
import logging
import threading
import time
from typing import Any

__all__ = ["buried", "bury"]

EXIT_S = 5.0
"""How long an interpreter that exits waits for a burial that has begun."""
IDLE_S = 60.0
"""How long the thread stays when there is nothing to bury."""

_log = logging.getLogger("dprims.graveyard")
_changed = threading.Condition()
_graves: list[tuple[float, list[Any]]] = []
_reaper: threading.Thread | None = None
_closing = False


def bury(remains: list[Any], keep_s: float = 0.0) -> None:
    """Take over `remains`, and drop them on another thread after `keep_s` seconds. Returns at once.

    The list is emptied, so that the caller holds no reference through it.
    """
    global _reaper
    with _changed:
        _graves.append((time.monotonic() + keep_s, remains.copy()))
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
    global _reaper
    while True:
        with _changed:
            if _closing:
                return
            while not _graves or _graves[0][0] > time.monotonic():
                told = _changed.wait(_graves[0][0] - time.monotonic() if _graves else IDLE_S)
                if not told and not _graves:
                    _reaper = None
                    return
                if _closing:
                    return
                _graves.sort(key=lambda grave: grave[0])
            _, remains = _graves[0]
        try:
            while remains:
                remains.pop()
        except Exception:  # noqa: BLE001 - nobody waits for this thread, only the log is left
            _log.exception("dropping an abandoned group failed")
        with _changed:
            del _graves[next(i for i, grave in enumerate(_graves) if grave[1] is remains)]


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
        reaper, left = _reaper, [remains for _, remains in _graves]
    if reaper is not None:
        reaper.join(max(deadline - time.monotonic(), 0.0))
    for remains in left:
        for one in remains:  # never dropped: the process ends with it
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(one))


def _due() -> bool:
    return any(when <= time.monotonic() for when, _ in _graves)
