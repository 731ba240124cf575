"""How long a fleet is without new weights after a fault, as ratios within one run.

    pytest -s tests/benchmarks/refit_recovery.py

One trainer and three shards of one process each, 64 MB over gloo, on this machine. Every outage counts from
the strike itself, on the clock that the processes share, to the return of the refit that was tried again.
"""

from __future__ import annotations

import signal
import statistics
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path

import pytest

from dprims.engines.local import LocalGeneration, LocalPolicy
from dprims.synchronizer import CollectiveWeightSynchronizer
from dprims.synchronizer.settle import _settle_before_propagating
from dprims.testing.faults import Fault
from dprims.testing.recovery_bench import outage_with_a_deadline, read_stamp
from dprims.testing.weights import ToySink, ToySource

pytestmark = pytest.mark.timeout(600)

LIMIT_S = 60.0
SHARDS, LAYERS, WIDTH = 3, 16, 1024  # 64 MiB and 64 KiB of biases
NBYTES = LAYERS * WIDTH * WIDTH * 4
BUCKETS = 16
TTL_S, DEADLINE_S = 2.0, 5.0
ROUNDS = 7


class Fleet:
    def __init__(self, tmp_path: Path) -> None:
        self.stamp = tmp_path / "stamp"
        self.policy = LocalPolicy(ToySource, LAYERS, WIDTH)
        self.generation = LocalGeneration(ToySink, 1, LAYERS, WIDTH, shard_sizes=(1,) * SHARDS)
        self.sync = CollectiveWeightSynchronizer(
            self.policy,
            self.generation,
            refit_timeout_s=DEADLINE_S,
            roster_ttl_s=TTL_S,
            bucket_bytes=NBYTES // BUCKETS,
        )
        self.sync.init_communicator(timeout=LIMIT_S)

    def outage(self, action: str, members: tuple[int, ...]) -> float:
        """Seconds from the strike until a refit has returned; afterwards everybody is back."""
        self.sync.refit()
        fault = Fault(action=action, bucket=BUCKETS // 2)
        self.generation.process(1).call_now("arm", fault, stamp=str(self.stamp)).result(LIMIT_S)
        report = self.sync.refit()
        seconds = time.monotonic() - read_stamp(self.stamp)
        assert report.members == members
        self.generation.process(1).signal(signal.SIGCONT)
        if action in ("kill", "stop"):
            self.generation.restart(1)
        deadline = time.monotonic() + LIMIT_S
        while self.sync.refit().members != (0, 1, 2):
            assert time.monotonic() < deadline
        return seconds

    def close(self) -> None:
        self.generation.close()
        self.policy.close()
        self.sync.shutdown()


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    fleet = Fleet(tmp_path)
    try:
        yield fleet
    finally:
        fleet.close()


def say(what: str, seconds: list[float]) -> float:
    median = statistics.median(seconds)
    print(
        f"\n{what:52} median {median * 1e3:8.1f} ms  worst {max(seconds) * 1e3:8.1f} ms  of {len(seconds)}",
        end="",
    )
    return median


def test_a_killed_shard_costs_a_tenth_of_waiting_for_a_deadline(fleet: Fleet, tmp_path: Path) -> None:
    clean = say("a clean refit of 64 MB", [timed(fleet.sync.sync_weights) for _ in range(ROUNDS)])
    killed = say("outage after a SIGKILL", [fleet.outage("kill", (0, 2)) for _ in range(ROUNDS)])
    waited = say(
        f"outage of the way that waits for {DEADLINE_S:g} s",
        [
            outage_with_a_deadline(
                tmp_path / "plain", receivers=SHARDS, nbytes=NBYTES, buckets=BUCKETS, deadline_s=DEADLINE_S
            )
            for _ in range(3)
        ],
    )
    print(f"\nratio {killed / waited:.3f}; {killed / clean:.1f} clean refits")
    assert killed <= 0.1 * waited


def test_the_kernel_takes_its_time_to_end_a_process(fleet: Fleet) -> None:
    """The part of an outage that is nobody's: until then neither the pipe nor a socket is closed."""
    fleet.sync.sync_weights()

    def ended() -> float:
        victim = fleet.generation.process(1)
        began = time.monotonic()
        victim.signal(signal.SIGKILL)
        while victim.alive and time.monotonic() < began + LIMIT_S:
            time.sleep(0.0005)
        seconds = time.monotonic() - began
        fleet.generation.restart(1)
        while fleet.sync.refit().members != (0, 1, 2):
            assert time.monotonic() < began + LIMIT_S
        return seconds

    noticed = say("from a SIGKILL to the end of an idle rank", [ended() for _ in range(ROUNDS)])
    assert noticed <= 0.1 * DEADLINE_S


def test_a_raised_error_costs_no_more(fleet: Fleet) -> None:
    raised = say(
        "outage after an error in a loader", [fleet.outage("raise", (0, 1, 2)) for _ in range(ROUNDS)]
    )
    assert raised <= 0.1 * DEADLINE_S


def test_a_frozen_shard_costs_its_ttl(fleet: Fleet) -> None:
    frozen = say("outage after a SIGSTOP", [fleet.outage("stop", (0, 2)) for _ in range(3)])
    print(f"\nttl {TTL_S:g} s, deadline {DEADLINE_S:g} s")
    assert frozen <= min(TTL_S, DEADLINE_S) + 1.0


def test_a_rebuild_takes_little(fleet: Fleet) -> None:
    fleet.sync.sync_weights()
    rebuilt = say(
        "rebuild of a group of 4 ranks",
        [timed(lambda: fleet.sync.reconcile_communicator([], force=True)) for _ in range(21)],
    )
    assert rebuilt <= 0.05 * DEADLINE_S


def test_settling_ends_with_the_last_future() -> None:
    def one() -> float:
        futures: list[Future[None]] = [Future() for _ in range(64)]
        done: list[float] = []

        def finish() -> None:
            for future in futures:
                future.set_exception(RuntimeError("unwound"))
            done.append(time.monotonic())

        threading.Timer(0.05, finish).start()
        assert _settle_before_propagating(futures, LIMIT_S, "refit") == []
        return time.monotonic() - done[0] if done else 0.0

    late = say("settle after the last of 64 futures", [one() for _ in range(ROUNDS)])
    assert late <= 0.05


def timed(function: object) -> float:
    began = time.monotonic()
    function()  # type: ignore[operator]
    return time.monotonic() - began
