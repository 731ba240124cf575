"""The guard: no wait of a refit is without a bound, and none hides from a cancel.

A collective whose peer is gone never ends by itself: NCCL's kernel spins, gloo waits for its own timeout.
So the working loop never blocks in a collective. It asks the guard, and the guard looks at three things
only: the work, the clock, and a flag that other threads set (the watcher of the decision, above all). It
makes no call that could block for longer than a slice.

Over gloo a wait is cut into slices of `SLICE_S`: a sliced wait wakes as soon as the work is done, where
polling each millisecond costs a third of the speed. Over NCCL events are queried every `POLL_S`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Protocol, TypeVar

from ..exceptions import DprimsError, PeerLost, RefitAborted, RefitTimeout

__all__ = ["CancelFlag", "Enqueueing", "Guard", "Query", "Work"]

SLICE_S = 0.02
"""Longest single wait on a gloo work, a thread or an event: how late a cancel may be seen."""

ENQUEUE_S = 0.2
"""How long a call that should not block may take, once the guard has seen the end."""

POLL_S = 75e-6
"""Pause between two queries of an accelerator's event."""

T = TypeVar("T")


class Work(Protocol):
    """The part of torch's `Work` that a guarded wait needs."""

    def wait(self, timeout: timedelta = ...) -> bool:
        """Block for at most `timeout`; raises when the work failed, and when the time ran out."""
        ...

    def is_completed(self) -> bool:
        """Whether the work has ended, well or badly."""
        ...


class Query(Protocol):
    """Something that completes on an accelerator, such as a `torch.cuda.Event`."""

    def query(self) -> bool:
        """Whether it has completed; never blocks."""
        ...


class CancelFlag:
    """A flag that is set once, with a reason. Setting and reading are thread-safe and never block."""

    def __init__(self) -> None:
        self._event = threading.Event()
        self._lock = threading.Lock()
        self._reason = ""

    def set(self, reason: str, who: str = "") -> bool:
        """Set the flag. The first reason stays; False when another came first.

        Args:
            reason: what went wrong, in words; it becomes the text of `RefitAborted`.
            who: the rank, shard or controller that found it.
        """
        with self._lock:
            if self._event.is_set():
                return False
            self._reason = f"{who}: {reason}" if who else reason
            self._event.set()
            return True

    def is_set(self) -> bool:
        """Whether anybody has set it."""
        return self._event.is_set()

    def wait(self, timeout: float) -> bool:
        """Wait for at most `timeout` seconds until it is set; whether it is."""
        return self._event.wait(timeout)

    @property
    def reason(self) -> str:
        """What the first canceller said; empty while nobody has."""
        return self._reason


class Guard:
    """Bounds every wait of one operation by a deadline, by a time without progress, and by a flag.

    For one working thread; other threads only set the flag. After `disarm` it raises nothing any more.

    Args:
        cancel: set by whoever sees the operation fail.
        deadline: when it ends at the latest, on `clock`; None for never.
        stall_timeout_s: longest time between two calls of `progress`; None for any.
        what: what is being guarded, to begin messages with, such as "refit 3.1/7 on rank 2".
    """

    def __init__(
        self,
        cancel: CancelFlag | None = None,
        deadline: float | None = None,
        stall_timeout_s: float | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        what: str = "refit",
    ) -> None:
        if stall_timeout_s is not None and stall_timeout_s <= 0:
            raise ValueError(f"stall_timeout_s is {stall_timeout_s}; it is above 0, or None")
        self.cancel = cancel if cancel is not None else CancelFlag()
        self.deadline = deadline
        self.stall_timeout_s = stall_timeout_s
        self.what = what
        self._clock = clock
        self._began = self._moved = clock()
        self._at = "the start"
        self._armed = True

    def check(self) -> None:
        """Return if all is well.

        Raises:
            RefitAborted: the flag is set; the text is its reason.
            RefitTimeout: the deadline has passed, or nothing moved for `stall_timeout_s`.
        """
        if not self._armed:
            return
        if self.cancel.is_set():
            raise RefitAborted(f"{self.what} was aborted at {self._at}: {self.cancel.reason}")
        now = self._clock()
        if self.deadline is not None and now >= self.deadline:
            raise RefitTimeout(
                f"{self.what} reached its deadline at {self._at}, after {now - self._began:.2f} s"
            )
        if self.stall_timeout_s is not None and now - self._moved >= self.stall_timeout_s:
            raise RefitTimeout(
                f"{self.what} has stood still at {self._at} for {now - self._moved:.2f} s "
                f"(stall_timeout_s={self.stall_timeout_s})"
            )

    def progress(self, at: int | str) -> None:
        """Something moved: the stall timer starts anew. `at` is a bucket's index, or what comes next."""
        self._moved = self._clock()
        self._at = f"bucket {at}" if isinstance(at, int) else at

    def disarm(self) -> None:
        """From now on raise nothing: what this rank does next is decided elsewhere."""
        self._armed = False

    def remaining(self, most: float) -> float:
        """Seconds until the deadline, between 0 and `most`."""
        if self.deadline is None:
            return most
        return max(0.0, min(most, self.deadline - self._clock()))

    def wait(self, work: Work | Query) -> None:
        """Wait until `work` is done. Whether it did what it should is for the digests to say.

        Raises what `check` raises, and `PeerLost` when the work itself failed.
        """
        if hasattr(work, "query"):
            while not work.query():
                self.check()
                time.sleep(POLL_S)
        else:
            self._wait_in_slices(work)
        if self._armed and self.cancel.is_set():
            # an aborted collective ends like any other: what it left behind is no bucket
            self.check()

    def _wait_in_slices(self, work: Work) -> None:
        ended = False
        while True:
            try:
                if work.wait(timedelta(seconds=SLICE_S)):
                    return
            except RuntimeError as error:
                # torch says the same for "not yet" and for "failed"; only a work that had ended has failed
                if ended:
                    self.check()
                    raise PeerLost(f"{self.what} lost a peer at {self._at}: {error}") from error
            self.check()
            ended = work.is_completed()

    def call(self, function: Callable[[], T], what: str) -> T:
        """Run something that may block on a daemon thread, and wait for it as for anything else.

        When the guard raises, the thread is left behind: `function` must be something that ends, or whose
        loss is bearable. `what` is named in the messages.
        """
        outcome: list[T] = []
        failure: list[BaseException] = []
        done = threading.Event()

        def run() -> None:
            try:
                outcome.append(function())
            except BaseException as error:  # noqa: BLE001 - raised again on the thread that waits
                failure.append(error)
            finally:
                done.set()

        self._at = what
        threading.Thread(target=run, name=f"dprims-{what.replace(' ', '-')}", daemon=True).start()
        while not done.wait(SLICE_S):
            self.check()
        if failure:
            raise failure[0]
        return outcome[0]


class Enqueueing:
    """Bounds calls that only enqueue work, but block in NCCL when a peer is gone at a bad moment.

    A context manager, entered by the working thread for each call. While `watch` is on, a daemon thread
    looks: when the guard would raise and one call has taken `ENQUEUE_S` since, it calls `interrupt`, once.
    """

    def __init__(self, guard: Guard, interrupt: Callable[[], object]) -> None:
        self._guard, self._interrupt = guard, interrupt
        self._since: float | None = None
        self._stopped = threading.Event()

    def watch(self) -> None:
        """Begin to look."""
        threading.Thread(target=self._look, name="dprims-enqueueing", daemon=True).start()

    def stop(self) -> None:
        """Look no longer. Returns at once."""
        self._stopped.set()

    def __enter__(self) -> None:
        self._since = time.monotonic()

    def __exit__(self, *_: object) -> None:
        self._since = None

    def _look(self) -> None:
        while not self._stopped.wait(SLICE_S):
            since = self._since
            if since is None or time.monotonic() - since < ENQUEUE_S:
                continue
            try:
                self._guard.check()
            except DprimsError:
                self._interrupt()
                return
