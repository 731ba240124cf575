"""Futures of both sides: adapt them, and let every rank unwind before a failure reaches the caller."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable
from concurrent.futures import Future, wait
from typing import Any

log = logging.getLogger("dprims.synchronizer.settle")


def as_future(handle: Any) -> Future[Any]:
    """The ``concurrent.futures.Future`` behind what an engine returned: itself, or its ``.future()``.

    Ray's ObjectRef has the second. TypeError, naming the type, for anything else.
    """
    if isinstance(handle, Future):
        return handle
    made = handle.future() if hasattr(handle, "future") else None
    if not isinstance(made, Future):
        raise TypeError(
            f"a call returned a {type(handle).__name__}; expected a Future or an object with .future()"
        )
    return made


def join_all(threads: Iterable[threading.Thread], within_s: float) -> None:
    """Wait for the end of *all* threads, at most *within_s* seconds in all."""
    deadline = time.monotonic() + within_s
    for thread in threads:
        thread.join(max(deadline - time.monotonic(), 0.0))


def _settle_before_propagating(futures: Iterable[Any], budget_s: float, what: str) -> list[int]:
    """Wait for *all* futures, at most *budget_s* seconds in all; return the positions of those still open.

    A rebuild is itself a collective: dispatched while some rank is still inside the failed refit, it
    waits for a rank that comes late or never. What stragglers raise is swallowed, as they unwind from the
    failure that the caller already holds. When the budget is over the caller goes on regardless; who was
    still busy is logged and returned.
    """
    waited_for = [as_future(future) for future in futures]
    if not waited_for:
        return []
    _, still_open = wait(waited_for, timeout=max(budget_s, 0.0))
    stuck = [place for place, future in enumerate(waited_for) if future in still_open]
    if stuck:
        log.warning(
            "%d of %d %s rank(s) had not unwound after %.3g s: %s",
            len(stuck),
            len(waited_for),
            what,
            budget_s,
            stuck,
        )
    return stuck


class Budget:
    """Seconds that several waits share, counted from when it was made."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    @property
    def left(self) -> float:
        """Seconds left, never below zero."""
        return max(self._end - time.monotonic(), 0.0)
