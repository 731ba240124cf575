"""Every kind of fault at every place of a refit to every kind of victim: what is left is whole, and goes on.

A cell is a fault, a phase and a victim. The cells in CI hold every pair of a fault and a phase and of a
fault and a victim, and the others run with ``-m chaos``. One fleet of two stages and three shards (of 1, 2
and 1 ranks) goes through all of them, so that what one cell leaves behind is found by the next.
"""

from __future__ import annotations

import contextlib
import gc
import os
import re
import signal
import threading
import time
import uuid
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from dprims.backend import resolve
from dprims.engines.local import LocalGeneration, LocalPolicy
from dprims.engines.process import WorkerProcess
from dprims.exceptions import (
    BackendError,
    BelowQuorum,
    DprimsError,
    PeerLost,
    RefitAborted,
    RefitTimeout,
    StaleLeader,
    TransferCorrupt,
)
from dprims.synchronizer import CollectiveWeightSynchronizer, RefitReport
from dprims.synchronizer.plan import Plan
from dprims.testing.controller import ControllerProcess
from dprims.testing.faults import Fault, InjectedFault
from dprims.testing.servers import RedisServer
from dprims.testing.weights import ToySink, ToySource

from .helpers.services import until

pytestmark = pytest.mark.slow

LIMIT_S = 60.0
BUCKET = 64 << 10
TTL_S = 2.0
DEADLINE_S, STALL_S = 1.8, 1.0
DELAY_S = 2.2
"""Longer than the deadline, and than what a call that moves no bytes is given."""
BOUND_S = 20.0
"""No operation of a cell takes longer, on a busy machine; about ten times what the deadlines add up to."""
STAGES, SIZES = 2, (1, 2, 1)
SHARDS = tuple(range(len(SIZES)))
SEATS = {0: (2,), 1: (3, 4), 2: (5,)}
KEPT = 8
"""Threads and descriptors that a process keeps for its next fleet: the graveyard's, the fork server's."""
WITNESS = 5
"""The rank that says when the moment has come to strike those that no fault can be armed in."""
LAST = len(Plan.build(ToySource(0).metadata(), bucket_bytes=BUCKET).buckets) - 1

FAULTS = ("kill", "stop", "raise in the loader", "raise in the source", "delay", "corrupt")
BUCKETS = {"first bucket": 0, "middle bucket": LAST // 2, "last bucket": LAST}
PHASES = ("rebuild", "handshake", *BUCKETS, "decision", "commit", "settle", "before the first sync")
RANKS: dict[str, tuple[int, ...]] = {
    "root trainer": (0,),
    "other head": (1,),
    "one rank of two": (4,),
    "two shards": (2, 5),
    "every shard": (2, 3, 4, 5),
}
VICTIMS = (*RANKS, "controller", "lock server")


class Cell(NamedTuple):
    fault: str
    phase: str
    victim: str

    def __str__(self) -> str:
        return ", ".join(self).replace(" ", "_")

    @property
    def seats(self) -> tuple[int, ...]:
        return RANKS.get(self.victim, ())


WITHOUT_MEANING = {
    "only generation ranks have a loader": lambda c: (
        c.fault == "raise in the loader" and (not c.seats or c.seats[0] < STAGES)
    ),
    "only trainers have a source": lambda c: (
        c.fault == "raise in the source" and (not c.seats or c.seats[0] >= STAGES)
    ),
    "no weights pass through a controller or a lock server": lambda c: c.fault == "corrupt" and not c.seats,
    "no bucket is under way then": lambda c: (
        c.fault == "corrupt" and c.phase not in (*BUCKETS, "before the first sync")
    ),
    "a trainer does nothing in a commit that could raise or be late": lambda c: (
        c.phase == "commit" and c.victim in ("root trainer", "other head") and c.fault not in ("kill", "stop")
    ),
}
"""Why a cell is left out."""


def reason_against(cell: Cell) -> str | None:
    return next((why for why, applies in WITHOUT_MEANING.items() if applies(cell)), None)


ALL = [cell for cell in map(Cell._make, product(FAULTS, PHASES, VICTIMS)) if reason_against(cell) is None]


def pairs(cell: Cell) -> set[tuple[str, str]]:
    return {(cell.fault, cell.phase), (cell.fault, cell.victim)}


def chosen() -> list[Cell]:
    """Greedily, and the same each time: the cell with the most pairs that no earlier one has."""
    left = set().union(*map(pairs, ALL))
    picked: list[Cell] = []
    while left:
        # what has run less often comes first, so that phases and victims meet in many ways
        best = max(
            ALL,
            key=lambda c: (
                len(pairs(c) & left),
                -sum((one.phase, one.victim) == (c.phase, c.victim) for one in picked),
                -sum(one.victim == c.victim for one in picked),
            ),
        )
        picked.append(best)
        left -= pairs(best)
    return picked


CHOSEN = chosen()


class Fleet:
    """The ranks, the controller in this process, and a lock server of their own."""

    def __init__(self) -> None:
        self.server = RedisServer(persist=True)
        self.server.start()
        self.policy = LocalPolicy(ToySource, stages=STAGES)
        self.generation = LocalGeneration(ToySink, STAGES, shard_sizes=SIZES, train_world_size=STAGES)
        self.sync = self.controller()
        self.sound = True
        self.sync.init_communicator(timeout=LIMIT_S)
        self.sync.sync_weights()

    def options(self) -> dict[str, Any]:
        self.name = f"fleet-{uuid.uuid4().hex[:8]}"
        return {
            "refit_timeout_s": DEADLINE_S,
            "stall_timeout_s": STALL_S,
            "roster_ttl_s": TTL_S,
            "bucket_bytes": BUCKET,
            "fleet": self.name,
            "backend": self.server.url,
        }

    def controller(self) -> CollectiveWeightSynchronizer:
        self.now = self.options()
        return CollectiveWeightSynchronizer(self.policy, self.generation, **self.now)

    @property
    def pids(self) -> set[int]:
        ranks = [self.process(seat).pid for seat in range(STAGES + sum(SIZES))]
        return {*ranks, *self.server.pids}

    def process(self, seat: int) -> WorkerProcess:
        return self.policy.process(seat) if seat < STAGES else self.generation._ranks[seat]

    def arm(self, seat: int, *faults: Fault, stamp: Path | None = None) -> None:
        armed = self.process(seat).call_now("arm", *faults, stamp=None if stamp is None else str(stamp))
        armed.result(LIMIT_S)

    def train(self) -> None:
        for future in [self.policy.call(rank, "step") for rank in range(STAGES)]:
            future.result(LIMIT_S)
        self.sync.mark_stale()

    def weights(self) -> list[str]:
        return [self.policy.call(rank, "checksum").result(LIMIT_S) for rank in range(STAGES)]

    def held(self, shards: Sequence[int] = SHARDS) -> dict[int, list[list[str]]]:
        """The checksums of each rank of these shards."""
        return {
            shard: [
                self.generation.call(shard, "checksums", worker=worker).result(LIMIT_S)
                for worker in range(SIZES[shard])
            ]
            for shard in shards
        }

    def close(self) -> None:
        self.generation.close()
        self.policy.close()
        self.sync.shutdown()
        resolve(self.server.url).close()
        self.server.close()


def descriptors() -> Counter[str]:
    """What this process has open."""
    found: Counter[str] = Counter()
    for entry in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found[re.sub(r"\d+", "N", os.readlink(f"/proc/self/fd/{entry}"))] += 1
    return found


def left(before: Counter[str]) -> str:
    return f"open: {descriptors() - before}; threads: {sorted(t.name for t in threading.enumerate())}"


def dprims_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("dprims")]


@pytest.fixture(scope="module")
def fleets(outliving: list[Any]) -> Iterator[list[Fleet]]:
    """The fleet that is in use, if there is one."""
    fleets: list[Fleet] = []
    threads, before = dprims_threads(), descriptors()
    yield fleets
    while fleets:
        outliving.remove(fleets[0])
        fleets.pop().close()
    until(lambda: len(dprims_threads()) <= len(threads) + KEPT, limit=LIMIT_S)
    until(
        lambda: gc.collect() >= 0 and descriptors().total() <= before.total() + KEPT,
        lambda: left(before),
        LIMIT_S,
    )


@pytest.fixture
def fleet(fleets: list[Fleet], outliving: list[Any]) -> Fleet:
    """One fleet for all cells, made anew after a cell that failed."""
    if fleets and not fleets[0].sound:
        broken = fleets.pop()
        outliving.remove(broken)
        broken.close()
    if not fleets:
        fleets.append(Fleet())
        outliving.append(fleets[0])
    return fleets[0]


@pytest.mark.parametrize("cell", CHOSEN, ids=str)
def test_a_fault(cell: Cell, fleet: Fleet, tmp_path: Path) -> None:
    examine(cell, fleet, tmp_path)


@pytest.mark.chaos
@pytest.mark.parametrize("cell", [cell for cell in ALL if cell not in CHOSEN], ids=str)
def test_every_other_fault(cell: Cell, fleet: Fleet, tmp_path: Path) -> None:
    examine(cell, fleet, tmp_path)


def test_no_pair_is_left_out() -> None:
    assert set().union(*map(pairs, ALL)) == set().union(*map(pairs, CHOSEN))
    every = set(map(Cell._make, product(FAULTS, PHASES, VICTIMS)))
    assert {reason_against(cell) for cell in every - set(ALL)} == set(WITHOUT_MEANING)
    assert {cell.victim for cell in ALL} == set(VICTIMS)


def examine(cell: Cell, fleet: Fleet, tmp_path: Path) -> None:
    fleet.sound = False
    case = Case(cell, fleet, tmp_path / "stamp")
    with contextlib.ExitStack() as stack:
        if cell.victim == "controller":
            fleet.sync.shutdown()
            stack.callback(case.close)
        case.prepare()
        began = time.monotonic()
        outcome = case.strike(stack)
        assert time.monotonic() - began < BOUND_S
        case.judge(outcome)
        case.recover()
    fleet.sound = True


class Case:
    """One cell at work."""

    def __init__(self, cell: Cell, fleet: Fleet, stamp: Path) -> None:
        self.cell, self.fleet, self.stamp = cell, fleet, stamp
        self.elsewhere: ControllerProcess | None = None
        self.version = 0

    def call(self, name: str, *args: Any, **kwargs: Any) -> Any:
        if self.elsewhere is not None:
            return self.elsewhere.call(name, *args, **kwargs).result(LIMIT_S)
        found = getattr(self.fleet.sync, name)
        return found(*args, **kwargs) if callable(found) else found

    def close(self) -> None:
        if self.elsewhere is not None:
            self.elsewhere.close()

    # -- before the fault -------------------------------------------------------------------------------

    def prepare(self) -> None:
        """Bring the fleet to where the fault is to strike."""
        fleet = self.fleet
        for seat in range(STAGES + sum(SIZES)):
            fleet.arm(seat)
        unsynced = self.cell.phase == "before the first sync"
        if unsynced:
            fleet.sync.shutdown()
            fleet.sync = fleet.controller()  # another fleet of the same processes: all of them join anew
        if self.cell.victim == "controller":
            self.elsewhere = ControllerProcess(fleet.policy, fleet.generation, **fleet.now)
        if unsynced or self.elsewhere is not None:
            self.call("init_communicator", LIMIT_S)
        if not unsynced:
            self.version = self.call("sync_weights").version
        self.old = fleet.weights()
        fleet.train()
        self.call("mark_stale")
        self.new = fleet.weights()
        self._arm()

    def _arm(self) -> None:
        cell, fleet = self.cell, self.fleet
        idle = cell.phase == "before the first sync"
        action = {"raise in the loader": "raise", "raise in the source": "raise"}.get(cell.fault, cell.fault)
        bucket = 0 if idle else BUCKETS.get(cell.phase)
        phase = "bucket" if bucket is not None else cell.phase
        self.signalled = action in ("kill", "stop") and idle
        faults: dict[int, list[Fault]] = {}
        if cell.phase == "settle":  # something has to be settled
            faults[0 if cell.victim == "other head" else 1] = [
                Fault(action="raise", bucket=BUCKETS["middle bucket"])
            ]
        if not cell.seats or (cell.phase == "commit" and cell.seats[0] < STAGES):
            # a rank that is at that place waits a moment, and says so; then the fault strikes
            self.signalled = True
            if not idle:
                faults.setdefault(WITNESS, []).append(
                    Fault(action="delay", phase=phase, bucket=bucket, seconds=0.5)
                )
        elif not self.signalled:
            for seat in cell.seats:
                faults.setdefault(seat, []).append(
                    Fault(action=action, phase=phase, bucket=bucket, seconds=DELAY_S)
                )
        for seat, some in faults.items():
            fleet.arm(seat, *some, stamp=self.stamp if self.signalled and seat == WITNESS else None)

    # -- the fault --------------------------------------------------------------------------------------

    def strike(self, stack: contextlib.ExitStack) -> Any:
        """Run the operation that the fault is meant for; what it returned or raised."""
        idle = self.cell.phase == "before the first sync"
        if self.signalled and idle:
            self._signal()
        pool = stack.enter_context(ThreadPoolExecutor(1))
        if self.cell.phase in ("rebuild", "handshake"):
            running = pool.submit(self.call, "reconcile_communicator", [], force=True)
        else:
            running = pool.submit(self.call, "sync_weights")
        if self.signalled and not idle:
            until(lambda: self.stamp.exists() or running.done(), limit=LIMIT_S)
            self._signal()
        return self._outcome(running, pool)

    def _outcome(self, running: Future[Any], pool: ThreadPoolExecutor) -> Any:
        cell = self.cell
        if self.signalled and cell.fault == "delay":
            time.sleep(DELAY_S)  # the fault itself
            self._thaw()
        elif cell == ("stop", cell.phase, "controller"):
            self._take_over()
            assert self.elsewhere is not None
            self.elsewhere.process.signal(signal.SIGCONT)
        return running.exception(LIMIT_S) or running.result()

    def _signal(self) -> None:
        cell, fleet = self.cell, self.fleet
        if cell.victim == "lock server":
            if cell.fault == "kill":
                fleet.server.kill()
            else:
                fleet.server.freeze()
            return
        number = signal.SIGKILL if cell.fault == "kill" else signal.SIGSTOP
        if self.elsewhere is not None:
            self.elsewhere.process.signal(number)
        for seat in cell.seats:
            fleet.process(seat).signal(number)

    def _thaw(self) -> None:
        fleet = self.fleet
        if self.cell.victim == "lock server":
            if self.cell.fault == "kill":
                fleet.server.start()
            else:
                fleet.server.thaw()
        if self.elsewhere is not None:
            self.elsewhere.process.signal(signal.SIGCONT)
        for seat in self.cell.seats:
            fleet.process(seat).signal(signal.SIGCONT)

    def _take_over(self) -> None:
        """The controller of this process goes on in the place of the other one."""
        self.fleet.sync.init_communicator(timeout=LIMIT_S)
        self.fleet.sync.mark_stale()

    # -- after it ---------------------------------------------------------------------------------------

    def judge(self, outcome: Any) -> None:
        """One named error, or a success without the condemned; and every shard that lives is whole."""
        cell, fleet = self.cell, self.fleet
        dead_or_frozen = cell.seats if cell.fault in ("kill", "stop") else ()
        alive = [shard for shard in SHARDS if not set(SEATS[shard]) & set(dead_or_frozen)]
        held = fleet.held(alive)
        for shard, ranks in held.items():
            assert all(rank in (self.old, self.new) for rank in ranks), f"shard {shard} holds a mixture"
            # a shard of which one rank failed to commit is condemned, and serves no more
            differ = any(rank != ranks[0] for rank in ranks)
            assert not (differ and fleet.generation.may_serve(shard)), f"the ranks of shard {shard} differ"
        if isinstance(outcome, BaseException):
            assert isinstance(outcome, DprimsError), repr(outcome)
            # what had to be settled is an error of its own, and the first one
            expected = (*ERRORS[self._named()], *((RefitAborted,) if cell.phase == "settle" else ()))
            assert isinstance(outcome, expected), repr(outcome)
            if "raise" in cell.fault and isinstance(outcome, RefitAborted):
                assert isinstance(outcome.__cause__, InjectedFault)
            if not isinstance(outcome, StaleLeader | BackendError) and self.elsewhere is None:
                self._at_one_version(held)
            return
        assert not (cell.phase in BUCKETS and cell.seats), f"{outcome} in spite of the fault"
        if isinstance(outcome, RefitReport) and self.elsewhere is None:
            for shard in outcome.members:
                assert not set(SEATS[shard]) & set(dead_or_frozen), f"shard {shard} is said to serve"
                assert held[shard][0] == self.new
                assert outcome.version > self.version

    def _named(self) -> str:
        return self.cell.fault if self.cell.seats else self.cell.victim

    def _at_one_version(self, held: dict[int, list[list[str]]]) -> None:
        serving = {shard: held[shard][0] for shard in held if self.fleet.generation.may_serve(shard)}
        assert len({tuple(one) for one in serving.values()}) <= 1, f"serving: {serving}"

    def recover(self) -> None:
        """Put back what is gone, and have everybody at the next version."""
        cell, fleet = self.cell, self.fleet
        for seat in range(STAGES + sum(SIZES)):
            if seat not in cell.seats or cell.fault != "kill":
                fleet.process(seat).signal(signal.SIGCONT)
        if cell.victim == "lock server":
            self._thaw()
        if self.elsewhere is not None:
            self._end_controller(self.elsewhere)
        if cell.fault == "kill":
            for seat in set(cell.seats) & set(range(STAGES)):
                fleet.policy.restart(seat)
            for shard in fleet.generation.dead_shards:
                fleet.generation.restart(shard)
        for seat in range(STAGES + sum(SIZES)):
            fleet.arm(seat)
        fleet.train()
        expected = fleet.weights()
        report = self._refit_all()
        assert report.version > self.version
        assert fleet.held() == {shard: [expected] * size for shard, size in enumerate(SIZES)}
        assert all(fleet.generation.may_serve(shard) for shard in SHARDS)
        assert not fleet.sync.is_stale

    def _end_controller(self, other: ControllerProcess) -> None:
        if self.cell.fault == "stop":
            for name in ("sync_weights", "reconcile_communicator"):
                with pytest.raises(StaleLeader):
                    other.call(name, *([[]] if name.startswith("rec") else [])).result(LIMIT_S)
            return
        if self.cell.fault == "delay":
            other.call("shutdown").result(LIMIT_S)
        self._take_over()

    def _refit_all(self) -> RefitReport:
        """Refit until everybody is in again: a rank that was condemned needs a moment to find out."""
        deadline = time.monotonic() + LIMIT_S
        while True:
            away: Any
            try:
                report = self.fleet.sync.refit()
                away = dict(report.absent)
            except (StaleLeader, BackendError) as error:
                self.fleet.sync.init_communicator(timeout=LIMIT_S)
                away = error
            except BelowQuorum as error:
                away = error
            if not away:
                return report
            assert time.monotonic() < deadline, f"not all are back: {away!r}"


ERRORS: dict[str, tuple[type[BaseException], ...]] = {
    "kill": (PeerLost, BelowQuorum),
    "stop": (PeerLost, RefitTimeout, BelowQuorum),
    "raise in the loader": (RefitAborted, BelowQuorum),
    "raise in the source": (RefitAborted,),
    "delay": (RefitTimeout, PeerLost, BelowQuorum),
    "corrupt": (TransferCorrupt,),
    "controller": (PeerLost, StaleLeader, RefitTimeout),
    "lock server": (StaleLeader, BackendError, PeerLost, RefitTimeout, BelowQuorum),
}
"""What an operation may raise, by fault or, where no rank is hit, by victim."""
