"""One worker process: calls, death, freezing, leaving."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import CancelledError, Future
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from dprims.engines.fleet import indexed
from dprims.engines.local import LocalGeneration, LocalPolicy
from dprims.engines.process import WorkerProcess
from dprims.exceptions import DprimsError, MembershipError, PeerLost
from dprims.testing.weights import ToySink, ToySource

from .helpers.services import until

LIMIT_S = 60.0


@pytest.fixture
def worker() -> Iterator[WorkerProcess]:
    process = WorkerProcess("toy", ToySink, (0, 0, 1))
    try:
        process.ready.result(LIMIT_S)
        yield process
    finally:
        process.kill()


def test_a_call_returns_what_the_method_returned(worker: WorkerProcess) -> None:
    assert worker.call("history").result(LIMIT_S) == []
    worker.call("pause").result(LIMIT_S)
    assert worker.call("history").result(LIMIT_S) == ["pause"]
    assert worker.pid != os.getpid()


def test_an_exception_keeps_its_type(worker: WorkerProcess) -> None:
    with pytest.raises(AttributeError, match="no_such_method"):
        worker.call("no_such_method").result(LIMIT_S)
    with pytest.raises(TypeError):
        worker.call("history", 1, 2).result(LIMIT_S)


def test_what_cannot_travel_is_said() -> None:
    worker = WorkerProcess("toy", ToySource, (0,))
    try:
        with pytest.raises(Exception, match="pickle"):
            worker.call("checksum", lambda: None).result(LIMIT_S)
        with pytest.raises(DprimsError, match="pickle"):
            worker.call("__iter__").result(LIMIT_S)  # a generator
        assert worker.call("checksum").result(LIMIT_S) == ToySource(0).checksum()
    finally:
        worker.kill()


def test_a_killed_process_fails_its_open_calls_at_once_and_all_later_ones(worker: WorkerProcess) -> None:
    worker.signal(signal.SIGSTOP)  # so that the call stays open
    future = worker.call("history")
    worker.signal(signal.SIGKILL)
    with pytest.raises(PeerLost, match=rf"toy \(pid {worker.pid}\) was ended by SIGKILL"):
        future.result(LIMIT_S)
    assert not worker.alive
    with pytest.raises(PeerLost):
        worker.call("history").result(LIMIT_S)


def test_a_frozen_process_keeps_its_calls_open_and_blocks_nobody(worker: WorkerProcess) -> None:
    worker.signal(signal.SIGSTOP)
    futures = [worker.call("history", bytes(1 << 20)) for _ in range(4)]  # more than a pipe holds
    assert worker.alive
    assert not any(future.done() for future in futures)
    worker.signal(signal.SIGCONT)
    with pytest.raises(TypeError):
        futures[-1].result(LIMIT_S)


class Unreadable:
    """What pickles everywhere, and raises *error* where it is unpickled in the process *pid*."""

    def __init__(self, pid: int, error: BaseException) -> None:
        self.where = (pid, error)

    def __reduce__(self) -> tuple[Any, ...]:
        return _refuse, self.where


def _refuse(pid: int, error: BaseException) -> Unreadable:
    if os.getpid() == pid:
        raise error
    return Unreadable(pid, error)


class Toy:
    """Methods that go wrong, and one that leaves a process behind."""

    def ping(self) -> int:
        return os.getpid()

    def give(self, what: Any) -> Any:
        return what

    def cancelled(self) -> Future[None]:
        future: Future[None] = Future()
        future.cancel()
        return future

    def fork(self) -> int:
        pid = os.fork()
        while pid == 0:  # what holds the pipe must not run anything else
            signal.pause()
        return pid


def _loss_of(process: WorkerProcess) -> str:
    """What the calls of a process that is dying fail with."""
    until(lambda: not process.alive, "its end")
    error = process.call("ping").exception(LIMIT_S)
    assert isinstance(error, PeerLost)
    return str(error)


@pytest.fixture
def toy() -> Iterator[WorkerProcess]:
    process = WorkerProcess("toy", Toy)
    try:
        process.ready.result(LIMIT_S)
        yield process
    finally:
        process.kill()


@pytest.mark.parametrize(
    "error", [OSError("no way"), EOFError("no way"), ValueError("no way"), SystemExit(3)]
)
def test_what_cannot_be_read_costs_its_own_call_only(toy: WorkerProcess, error: BaseException) -> None:
    with pytest.raises(DprimsError, match=rf"toy \(pid {toy.pid}\) sent a reply .*{type(error).__name__}"):
        toy.call("give", Unreadable(os.getpid(), error)).result(LIMIT_S)
    with pytest.raises(type(error)):
        toy.call("give", Unreadable(toy.pid, error)).result(LIMIT_S)
    assert toy.call("ping").result(LIMIT_S) == toy.pid


def test_a_future_that_was_cancelled_in_the_process_does_not_stay_open(toy: WorkerProcess) -> None:
    with pytest.raises(CancelledError):
        toy.call("cancelled").result(LIMIT_S)


def test_a_callback_that_fails_keeps_no_call_open(toy: WorkerProcess) -> None:
    toy.signal(signal.SIGSTOP)
    first, second = toy.call("ping"), toy.call("ping")
    first.add_done_callback(lambda _: sys.exit("a callback"))
    toy.kill()
    with pytest.raises(PeerLost):
        second.result(LIMIT_S)


def test_a_death_by_a_signal_without_a_name_is_said(worker: WorkerProcess) -> None:
    number = signal.SIGRTMIN + 3
    worker.signal(number)
    assert f"was ended by signal {number}" in _loss_of(worker)


@pytest.fixture
def holder(toy: WorkerProcess) -> Iterator[int]:
    """A process that *toy* forked, and that holds its pipe."""
    pid = toy.call("fork").result(LIMIT_S)
    yield pid
    os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize("end", ["kill", "close", "from outside"])
def test_a_dead_process_is_lost_though_what_it_forked_holds_its_pipe(
    toy: WorkerProcess, holder: int, end: str
) -> None:
    toy.signal(signal.SIGSTOP)
    opened = [toy.call("give", bytes(1 << 20)) for _ in range(4)]  # more than a pipe holds
    if end == "kill":
        toy.kill()
    elif end == "close":
        toy.close(timeout=0.1)
    else:
        os.kill(toy.pid, signal.SIGKILL)
    for future in opened:
        with pytest.raises(PeerLost, match="was ended by SIGKILL"):
            future.result(LIMIT_S)
    assert not toy.alive
    assert isinstance(toy.call("ping").exception(0), PeerLost)
    until(lambda: toy._pipe.closed, "the pipe to be let go of")
    until(
        lambda: not any(thread.name == "dprims-toy" for thread in threading.enumerate()), "its threads to end"
    )
    assert _runs(holder)


def test_calls_after_a_kill_fail_at_once(toy: WorkerProcess) -> None:
    toy.kill()
    assert isinstance(toy.call("ping").exception(0), PeerLost)


def test_how_it_ended_is_known_however_many_ask_for_it() -> None:
    """The fork server says it once, and multiprocessing asks for all processes when one is started."""
    for _ in range(10):
        toy = WorkerProcess("toy", Toy)
        over = threading.Event()

        def ask(toy: WorkerProcess = toy, over: threading.Event = over) -> None:
            while not over.is_set():
                multiprocessing.active_children()
            toy.kill()

        askers = [threading.Thread(target=ask) for _ in range(4)]
        try:
            toy.ready.result(LIMIT_S)
            for asker in askers:
                asker.start()
            toy.signal(signal.SIGKILL)
            assert "was ended by SIGKILL" in _loss_of(toy)
        finally:
            over.set()
            toy.kill()
        for asker in askers:
            asker.join(LIMIT_S)


def test_closing_ends_a_frozen_process_too() -> None:
    process = WorkerProcess("toy", ToySink, (0, 0, 1))
    process.ready.result(LIMIT_S)
    process.signal(signal.SIGSTOP)
    process.close(timeout=0.1)
    assert not process.alive
    process.close()


def test_a_factory_that_fails_is_raised_and_leaves_nothing() -> None:
    with pytest.raises(TypeError):
        LocalPolicy(ToySource, "no layers", "no width", stages=2)
    with pytest.raises(TypeError):
        LocalGeneration(ToySink, "stages", shard_sizes=(1, 2))


@pytest.mark.parametrize("sizes", [(), (0,), (1, -1)])
def test_shards_have_at_least_one_rank(sizes: tuple[int, ...]) -> None:
    with pytest.raises(MembershipError):
        LocalGeneration(ToySink, 1, shard_sizes=sizes)
    with pytest.raises(MembershipError):
        LocalPolicy(ToySource, stages=0)


@pytest.mark.parametrize("sizes", [2, "2", (True,), (1.0,), (None,)])
def test_what_is_no_number_of_ranks_is_said(sizes: Any) -> None:
    with pytest.raises(MembershipError, match=r"shard_sizes is .*; expected one or more sizes"):
        LocalGeneration(ToySink, 1, shard_sizes=sizes)
    for number in ("2", 1.0, True, None):
        with pytest.raises(MembershipError, match=r"stages is .*; expected an int"):
            LocalPolicy(ToySource, stages=number)  # type: ignore[arg-type]
        with pytest.raises(MembershipError, match=r"train_world_size is .*; expected an int"):
            LocalGeneration(ToySink, 1, train_world_size=number)  # type: ignore[arg-type]


def test_devices_are_one_for_all_or_one_a_seat() -> None:
    with pytest.raises(MembershipError, match=r"device is \['cpu'\], which has none for seat 1"):
        LocalPolicy(ToySource, stages=2, device=["cpu"])
    with pytest.raises(MembershipError, match="device is 0; expected text"):
        LocalPolicy(ToySource, device=0)  # type: ignore[arg-type]
    with pytest.raises(MembershipError, match=r"device is \['cpu'\], which has none for seat 1"):
        LocalGeneration(ToySink, 1, device=["cpu"])


def test_cuda_gets_the_index_that_torch_wants() -> None:
    assert [indexed("cuda", seat, 2) for seat in range(4)] == ["cuda:0", "cuda:1", "cuda:0", "cuda:1"]
    assert indexed("cuda") == "cuda:0"
    assert indexed("cuda", 3, 0) == "cuda:0", "torch says itself that there is none"
    assert [indexed(device, 1, 2) for device in ("cpu", "cuda:0")] == ["cpu", "cuda:0"]


def test_a_rank_that_is_not_there_is_said() -> None:
    policy = LocalPolicy(ToySource)
    try:
        for rank in (5, -1, "0", None):
            for act in (partial(policy.call, rank, "step"), partial(policy.process, rank)):  # type: ignore[arg-type]
                with pytest.raises(MembershipError, match=r"rank is .*; there are ranks 0\.\.0"):
                    act()
            with pytest.raises(MembershipError, match="there are ranks"):
                policy.restart(rank)  # type: ignore[arg-type]
    finally:
        policy.close()
    assert policy.closed
    generation = LocalGeneration(ToySink, 1)
    try:
        with pytest.raises(MembershipError, match=r"worker is 1; there are workers 0\.\.0"):
            generation.call(0, "history", worker=1)
    finally:
        generation.close()


def test_a_restarted_shard_is_a_new_process() -> None:
    generation = LocalGeneration(ToySink, 1, shard_sizes=(2, 1))
    try:
        before = generation.process(0, 1).pid
        generation.process(0, 0).signal(signal.SIGKILL)
        until(lambda: generation.dead_shards == (0,))
        generation.restart(0)
        assert generation.dead_shards == ()
        assert generation.process(0, 1).pid != before
        assert not generation.may_serve(0)
        with pytest.raises(MembershipError, match=r"shards 0\.\.1"):
            generation.restart(2)
    finally:
        generation.close()


def test_what_was_closed_keeps_no_descriptors_though_somebody_keeps_it(worker: WorkerProcess) -> None:
    """The pipes of one that was closed, and of one that died by itself."""
    before = len(os.listdir("/proc/self/fd"))
    generation = LocalGeneration(ToySink, 1, shard_sizes=(1, 1))
    try:
        generation.process(1).signal(signal.SIGKILL)
        until(lambda: generation.dead_shards == (1,))
        generation.process(0).call("may_serve").result(LIMIT_S)
    finally:
        generation.close()
    until(lambda: len(os.listdir("/proc/self/fd")) <= before, "the descriptors to be closed")
    assert not generation.process(0).alive
    assert "gone" in repr(generation.process(1))
    with pytest.raises(PeerLost):
        generation.process(0).call("may_serve").result(LIMIT_S)


PARENT = """
import os, signal
from dprims.engines.process import WorkerProcess
from dprims.testing.weights import ToySink
workers = [WorkerProcess(f"toy-{i}", ToySink, (0, 0, 1)) for i in range(2)]
for worker in workers:
    worker.ready.result(60)
workers[1].signal(signal.SIGSTOP)
print(*(worker.pid for worker in workers), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_no_process_outlives_the_one_that_started_it(tmp_path: Path) -> None:
    script = tmp_path / "parent.py"
    script.write_text(
        f"if __name__ == '__main__':\n{''.join('    ' + line for line in PARENT.splitlines(True))}"
    )
    run = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    assert run.returncode == -signal.SIGKILL, run.stderr
    pids = [int(pid) for pid in run.stdout.split()]
    assert len(pids) == 2
    deadline = time.monotonic() + LIMIT_S
    while any(_runs(pid) for pid in pids):
        assert time.monotonic() < deadline, "a running and a frozen worker outlived their parent"


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False
