"""The guard's bounds, the cancel flag, and the graveyard, without any process group."""

from __future__ import annotations

import threading
import time
import weakref
from datetime import timedelta

import pytest

from dprims.exceptions import PeerLost, RefitAborted, RefitTimeout
from dprims.synchronizer import graveyard
from dprims.synchronizer.guard import CancelFlag, Guard

LIMIT_S = 20.0


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class GlooWork:
    """Behaves as gloo's work does: a wait that runs out, and one that failed, raise the same type."""

    def __init__(self, slices: int, error: str | None = None) -> None:
        self.left, self.error = slices, error
        self.waited: list[timedelta] = []

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        self.waited.append(timeout)
        self.left -= 1
        if self.left >= 0:
            raise RuntimeError("Operation timed out!")
        if self.error is not None:
            raise RuntimeError(self.error)
        return True

    def is_completed(self) -> bool:
        return self.left <= 0


class Event:
    def __init__(self, queries: int) -> None:
        self.left = queries

    def query(self) -> bool:
        self.left -= 1
        return self.left < 0


def test_flag_keeps_the_first_reason() -> None:
    flag = CancelFlag()
    assert not flag.is_set()
    assert flag.reason == ""
    assert flag.set("bucket 3 is corrupt", "rank 2")
    assert not flag.set("too late", "rank 1")
    assert flag.is_set()
    assert flag.wait(0)
    assert flag.reason == "rank 2: bucket 3 is corrupt"


def test_flag_is_set_by_exactly_one_of_many_threads() -> None:
    flag = CancelFlag()
    start = threading.Barrier(8)
    won: list[int] = []

    def race(number: int) -> None:
        start.wait(LIMIT_S)
        if flag.set(str(number)):
            won.append(number)

    threads = [threading.Thread(target=race, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
    assert [str(n) for n in won] == [flag.reason]


def test_cancel_carries_its_reason_and_place() -> None:
    guard = Guard(what="refit 3.1/7 on rank 2")
    guard.check()
    guard.progress(4)
    guard.cancel.set("rank 1 died", "controller")
    with pytest.raises(
        RefitAborted, match=r"refit 3.1/7 on rank 2 was aborted at bucket 4: controller: rank 1 died"
    ):
        guard.check()


def test_deadline() -> None:
    clock = Clock()
    guard = Guard(deadline=130.0, clock=clock)
    assert guard.remaining(10.0) == 10.0
    clock.now = 129.5
    guard.check()
    assert guard.remaining(10.0) == 0.5
    clock.now = 130.0
    with pytest.raises(RefitTimeout, match=r"deadline at the start, after 30.00 s"):
        guard.check()
    assert guard.remaining(10.0) == 0.0


def test_stall_is_counted_from_the_last_progress() -> None:
    clock = Clock()
    guard = Guard(stall_timeout_s=5.0, clock=clock)
    for bucket in range(10):
        clock.now += 4.9
        guard.check()
        guard.progress(bucket)
    clock.now += 5.0
    with pytest.raises(RefitTimeout, match=r"stood still at bucket 9 for 5.00 s"):
        guard.check()


def test_no_bounds_no_errors() -> None:
    clock = Clock()
    guard = Guard(clock=clock)
    clock.now += 1e9
    guard.check()
    assert guard.remaining(3.0) == 3.0


def test_disarmed_it_raises_nothing() -> None:
    clock = Clock()
    guard = Guard(deadline=101.0, stall_timeout_s=1.0, clock=clock)
    clock.now += 10
    guard.cancel.set("late")
    guard.disarm()
    guard.check()
    guard.wait(Event(0))


def test_stall_timeout_of_zero_is_refused() -> None:
    with pytest.raises(ValueError, match="stall_timeout_s is 0"):
        Guard(stall_timeout_s=0)


@pytest.mark.parametrize("slices", [0, 1, 50])
def test_a_work_is_waited_for_in_bounded_slices(slices: int) -> None:
    work = GlooWork(slices)
    Guard(deadline=time.monotonic() + LIMIT_S).wait(work)
    assert len(work.waited) == slices + 1
    assert max(work.waited) <= timedelta(seconds=0.05)


@pytest.mark.parametrize("slices", [0, 1, 3])
def test_a_failed_work_is_a_lost_peer(slices: int) -> None:
    with pytest.raises(PeerLost, match="Connection closed by peer"):
        Guard().wait(GlooWork(slices, "Connection closed by peer [127.0.0.1]:4242"))


def test_a_cancel_ends_the_wait_for_a_work() -> None:
    guard = Guard()
    work = GlooWork(10**9)
    threading.Timer(0.1, guard.cancel.set, ("somebody died",)).start()
    with pytest.raises(RefitAborted, match="somebody died"):
        # the slices of this fake are as fast as a call
        guard.wait(work)


def test_an_event_is_polled() -> None:
    event = Event(25)
    Guard(deadline=time.monotonic() + LIMIT_S).wait(event)
    assert event.left == -1


def test_an_aborted_collective_that_ends_normally_is_not_believed() -> None:
    guard = Guard()
    guard.cancel.set("aborted")
    with pytest.raises(RefitAborted):
        guard.wait(Event(0))


def test_deadline_ends_the_wait_for_an_event() -> None:
    guard = Guard(deadline=time.monotonic() + 0.05)
    with pytest.raises(RefitTimeout):
        guard.wait(Event(10**9))


def test_call_returns_and_raises_what_the_function_does() -> None:
    guard = Guard(deadline=time.monotonic() + LIMIT_S)
    assert guard.call(lambda: threading.current_thread().daemon, "a look") is True
    with pytest.raises(ZeroDivisionError):
        guard.call(lambda: 1 // 0, "a division")


def test_call_leaves_behind_what_blocks() -> None:
    guard = Guard(deadline=time.monotonic() + 0.1)
    release = threading.Event()
    try:
        with pytest.raises(RefitTimeout, match="at connecting"):
            guard.call(lambda: release.wait(LIMIT_S), "connecting")
    finally:
        release.set()


class Slow:
    """Dropping it takes until it is told, as a stuck group's destructor does."""

    def __init__(self) -> None:
        self.let_go = threading.Event()
        self.gone = threading.Event()

    def __del__(self) -> None:
        self.let_go.wait(LIMIT_S)
        self.gone.set()


def test_the_graveyard_drops_elsewhere() -> None:
    body = Slow()
    let_go, gone = body.let_go, body.gone
    remains = [body]
    del body
    graveyard.bury(remains)
    assert remains == []
    assert graveyard.buried() >= 1
    assert not gone.is_set()
    let_go.set()
    assert gone.wait(LIMIT_S)


class Body:
    pass


def test_the_graveyard_keeps_for_as_long_as_it_is_told() -> None:
    kept, soon = Body(), Slow()
    soon.let_go.set()
    still_there, soon_gone = weakref.ref(kept), soon.gone
    graveyard.bury([kept], 3600.0)
    graveyard.bury([soon], 0.0)
    del kept, soon
    assert soon_gone.wait(LIMIT_S)
    assert still_there() is not None
