"""Refits without a controller: the mail, the trainers' collective calls, and real torchrun jobs."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from dprims.backend import Backend, connect
from dprims.engines import letters
from dprims.engines.mailbox import PART_BYTES, Channel, Letterbox, Post, done, mailbox_name
from dprims.engines.spmd import SpmdReceiver, SpmdRefit
from dprims.exceptions import (
    BackendMisconfigured,
    BelowQuorum,
    HandshakeMismatch,
    MembershipError,
    PeerLost,
    RefitAborted,
    RefitError,
    RefitTimeout,
    TransferCorrupt,
)
from dprims.membership import Epoch, RefitMembership
from dprims.synchronizer.calls import RankInfo, RefitAnswer, RefitCall
from dprims.synchronizer.lanes import Span
from dprims.synchronizer.plan import TensorMeta
from dprims.synchronizer.protocol import Holding, Reply, Staged, Version
from dprims.synchronizer.transfer import TransferStats
from dprims.testing.faults import Fault, FaultInjector
from dprims.testing.weights import ToySink, ToySource

from .helpers.services import until

pytestmark = pytest.mark.slow

EXAMPLE = Path(__file__).parent.parent / "examples" / "torchrun_refit.py"
LIMIT_S = 60.0
STAGES = 2
TTL_S = 2.0  # the least that etcd keeps


# -- letters --------------------------------------------------------------------------------------


def test_calls_answers_and_infos_come_back_equal() -> None:
    epoch, version = Epoch(7, 2), Version(3, "digest")
    membership = RefitMembership.full(train_world_size=2, shard_sizes=(1, 2), epoch=epoch).without(0)
    call = RefitCall(
        "build",
        epoch,
        version,
        {2: 11, 3: 12},
        membership,
        ("::1", 4000),
        (b"\0plan", b""),
        {"k": 0.1},
        2.5,
        None,
    )
    assert letters.read_call(through_json(letters.write_call(call))) == call
    bare = RefitCall("pause", epoch, version, {2: 11})
    assert letters.read_call(through_json(letters.write_call(bare))) == bare

    holding = Holding(Version(1, "a"), Staged(epoch, version), True)
    stats = {1: TransferStats(nbytes=8, wire_s=0.5, spans=[Span("wire", 0, 1.0, 2.0)])}
    answer = RefitAnswer(Reply("ok", "", epoch, "d", holding), None, stats)
    assert letters.read_answer(through_json(letters.write_answer(answer))) == answer

    metas = (TensorMeta("w", (2, 3), "float32"), TensorMeta("tied", (), "int8", "w", True))
    info = RankInfo(1, 9, 0, metas, "digest", "cuda")
    assert letters.read_info(through_json(letters.write_info(info))) == info
    assert letters.read_info(through_json(letters.write_info(RankInfo(4, 9)))) == RankInfo(4, 9)


def test_every_field_of_a_call_travels() -> None:
    written = letters.write_call(RefitCall("ask", Epoch(1, 1), Version(0), {}))
    assert set(written) == {field.name for field in fields(RefitCall)}


def test_errors_come_back_as_what_they_are() -> None:
    back = letters.read_error(letters.write_error(TransferCorrupt("bucket 3")))
    assert (type(back), str(back)) == (TransferCorrupt, "bucket 3")
    back = letters.read_error(letters.write_error(KeyError("lost")))
    assert (type(back), str(back)) == (RefitAborted, "KeyError: 'lost'")
    for name in ("annotations", "BaseException", "os", "__name__"):
        assert type(letters.read_error({"type": name, "message": ""})) is RefitAborted


def through_json(value: Any) -> Any:
    return json.loads(json.dumps(value))


# -- mail -----------------------------------------------------------------------------------------


@pytest.fixture
def cells() -> Iterator[Backend]:
    with connect(f"memory://{uuid.uuid4().hex}") as backend:
        yield backend


def test_a_channel_keeps_order_splits_what_is_large_and_leaves_nothing(cells: Backend) -> None:
    sent = [b"", b"12:", os.urandom(5 * PART_BYTES + 1), os.urandom(PART_BYTES), b"last"]
    writer, reader = Channel(cells, "mail"), Channel(cells, "mail")
    for letter in sent:
        writer.put(letter)
    assert [reader.take(0) for _ in sent] == list(enumerate(sent))
    assert reader.take(0) is None
    for number in range(len(sent)):
        assert cells.get(f"mail/{number}") is None
        assert cells.get(f"mail/{number}/1") is None


def test_a_letter_comes_as_soon_as_it_is_sent(cells: Backend) -> None:
    with ThreadPoolExecutor() as pool:
        taken = pool.submit(Channel(cells, "mail").take, LIMIT_S)
        Channel(cells, "mail").put(b"hello")
        assert taken.result(LIMIT_S) == (0, b"hello")


@contextlib.contextmanager
def attended(
    cells: Backend, handler: Callable[[Any], Future[Any]], incarnation: int = 5
) -> Iterator[Letterbox]:
    box = Letterbox(mailbox_name("fleet", 1, 0, incarnation), {"do": handler})
    thread = threading.Thread(target=box.serve, args=(cells, lambda: True))
    thread.start()
    try:
        yield
    finally:
        box.leave()
        thread.join(LIMIT_S)
        assert not thread.is_alive()


def test_answers_may_come_in_another_order_than_calls(cells: Backend) -> None:
    held: list[Future[Any]] = []

    def handler(body: Any) -> Future[Any]:
        if body == "now":
            return done("at once")
        held.append(Future())
        return held[-1]

    post = Post(cells, "fleet", 1)
    with attended(cells, handler):
        slow, quick = post.call(0, 5, "do", "later"), post.call(0, 5, "do", "now")
        assert quick.result(LIMIT_S) == "at once"
        assert not slow.done()
        held[0].set_result(["x", 1])
        assert slow.result(LIMIT_S) == ["x", 1]
    post.close()


def test_what_a_handler_raises_is_the_answer(cells: Backend) -> None:
    def handler(body: Any) -> Future[Any]:
        raise HandshakeMismatch("no")

    post = Post(cells, "fleet", 1)
    with attended(cells, handler):
        with pytest.raises(HandshakeMismatch, match="no"):
            post.call(0, 5, "do", None).result(LIMIT_S)
        with pytest.raises(RefitAborted, match="KeyError"):
            post.call(0, 5, "unheard of", None).result(LIMIT_S)
    post.close()


def test_a_call_to_a_process_never_reaches_its_successor(cells: Backend) -> None:
    post, taken = Post(cells, "fleet", 1), list[Any]()
    old = post.call(0, 5, "do", "for the old one")
    post.lost(0, 5, "its entry lapsed")
    with pytest.raises(PeerLost, match="its entry lapsed"):
        old.result(0)

    def handler(body: Any) -> Future[Any]:
        taken.append(body)
        return done(None)

    with attended(cells, handler, incarnation=6):
        post.call(0, 6, "do", "for the new one").result(LIMIT_S)
        with pytest.raises(PeerLost):
            post.call(0, 5, "do", "late").result(LIMIT_S)
    assert taken == ["for the new one"]
    post.close()
    assert cells.get(f"{mailbox_name('fleet', 1, 0, 5)}/call/0") is None, "withdrawn"


# -- trainers and generation ranks as threads ----------------------------------------------------------


class Fleet:
    """Trainers and generation ranks of one process, on one backend."""

    def __init__(self, url: str, sizes: tuple[int, ...], width: int) -> None:
        self.url, self.sizes, self.width = url, sizes, width
        self.name = f"spmd-{uuid.uuid4().hex[:8]}"
        self.pool = ThreadPoolExecutor(16)
        self.sources: list[ToySource] = []
        self.trainers: list[SpmdRefit] = []
        self.receivers: dict[tuple[int, int], SpmdReceiver] = {}

    def start(self) -> None:
        """Start the trainers' job, and the generation ranks unless they run."""
        self.sources = [ToySource(stage, width=self.width) for stage in range(STAGES)]
        self.trainers = [
            SpmdRefit(
                source,
                backend=self.url,
                fleet=self.name,
                rank=rank,
                world_size=STAGES,
                stage=rank,
                host="127.0.0.1",
                roster_ttl_s=TTL_S,
                bucket_bytes=16 << 10,
                refit_timeout_s=20.0,
                stall_timeout_s=10.0,
                gather_s=LIMIT_S,
                meet_timeout_s=LIMIT_S,
            )
            for rank, source in enumerate(self.sources)
        ]
        inits = [self.pool.submit(trainer.init_communicator, LIMIT_S) for trainer in self.trainers]
        if not self.receivers:
            joining = {
                (shard, worker): self.pool.submit(self.join, shard, worker)
                for shard, size in enumerate(self.sizes)
                for worker in range(size)
            }
            self.receivers = {who: future.result(LIMIT_S) for who, future in joining.items()}
        for init in inits:
            init.result(LIMIT_S)

    def join(self, shard: int, worker: int = 0) -> SpmdReceiver:
        return SpmdReceiver(
            ToySink(shard, worker, STAGES, width=self.width),
            backend=self.url,
            fleet=self.name,
            shard=shard,
            worker=worker,
            shard_sizes=self.sizes,
            roster_ttl_s=TTL_S,
            timeout=LIMIT_S,
        )

    def together(self, act: Callable[[SpmdRefit], Any]) -> list[Any]:
        """Have all trainers do something; what each returned, or raised."""
        futures = [self.pool.submit(act, trainer) for trainer in self.trainers]
        return [future.exception(LIMIT_S) or future.result() for future in futures]

    def train(self) -> list[str]:
        new = [source.step() for source in self.sources]
        for trainer in self.trainers:
            trainer.mark_stale()
        return new

    def held(self, who: tuple[int, int]) -> list[str]:
        sink: Any = self.receivers[who].receiver.sink
        return list(sink.checksums())

    def stop(self) -> None:
        list(self.pool.map(SpmdRefit.shutdown, self.trainers))

    def close(self) -> None:
        self.stop()
        for receiver in self.receivers.values():
            receiver.close()
        self.pool.shutdown()


@contextlib.contextmanager
def running(sizes: tuple[int, ...] = (1, 2), width: int = 32, url: str = "") -> Iterator[Fleet]:
    with served() if not url else contextlib.nullcontext(url) as shared:
        fleet = Fleet(shared, sizes, width)
        try:
            fleet.start()
            yield fleet
        finally:
            fleet.close()


@contextlib.contextmanager
def served() -> Iterator[str]:
    """The URL of a store that this process serves."""
    with connect("tcpstore://127.0.0.1:0?serve=1") as backend:
        yield backend.url


@pytest.fixture
def address(request: pytest.FixtureRequest) -> Iterator[str]:
    """A URL of each kind of backend."""
    if request.param == "tcpstore":
        with served() as url:
            yield url
    else:
        yield request.getfixturevalue(f"{request.param}_server").url


@pytest.mark.parametrize("address", ["tcpstore", "redis", "etcd"], indirect=True)
def test_trainers_get_the_same_report_and_every_rank_the_same_bytes(address: str) -> None:
    with running(url=address) as fleet:
        assert all(trainer.is_stale for trainer in fleet.trainers)
        for number in (1, 2, 3):
            new = fleet.train()
            reports = fleet.together(lambda trainer: trainer.sync_weights())
            assert [(r.version, r.members, dict(r.absent)) for r in reports] == [
                (number, (0, 1), {})
            ] * STAGES
            assert reports[0].stages
            assert {who: fleet.held(who) for who in fleet.receivers} == dict.fromkeys(fleet.receivers, new)
            assert all(receiver.may_serve for receiver in fleet.receivers.values())
            assert {receiver.version for receiver in fleet.receivers.values()} == {number}
        assert not any(trainer.is_stale for trainer in fleet.trainers)
        assert [trainer.version for trainer in fleet.trainers] == [3] * STAGES
        assert fleet.together(lambda trainer: trainer.reconcile_communicator()) == [False] * STAGES
        assert fleet.together(lambda trainer: trainer.reconcile_communicator([1])) == [True] * STAGES
        reports = fleet.together(lambda trainer: trainer.sync_weights())
        assert [report.members for report in reports] == [(0,)] * STAGES


def test_no_source_is_read_before_every_trainer_has_made_the_call() -> None:
    with running() as fleet:
        fleet.together(lambda trainer: trainer.sync_weights())
        first = fleet.pool.submit(fleet.trainers[0].sync_weights)
        meeting = fleet.trainers[1]._meeting
        until(lambda: meeting._called is not None and meeting._called[0] == 2, limit=LIMIT_S)
        new = fleet.train()  # rank 1 is in the middle of its step
        assert not first.done()
        second = fleet.pool.submit(fleet.trainers[1].sync_weights)
        assert first.result(LIMIT_S).version == second.result(LIMIT_S).version == 2
        assert fleet.held((0, 0)) == new


def test_an_error_is_raised_on_every_trainer_and_the_next_refit_works() -> None:
    with running() as fleet:
        fleet.together(lambda trainer: trainer.sync_weights())
        old = fleet.held((0, 0))
        new = fleet.train()
        fleet.receivers[1, 1].receiver.faults = FaultInjector([Fault(action="corrupt", bucket=1)])
        errors = fleet.together(lambda trainer: trainer.sync_weights())
        assert [type(error) for error in errors] == [TransferCorrupt] * STAGES
        assert {str(error) for error in errors} == {str(errors[0])}
        assert {tuple(fleet.held(who)) for who in fleet.receivers} == {tuple(old)}
        reports = fleet.together(lambda trainer: trainer.sync_weights())
        assert [report.version for report in reports] == [2] * STAGES
        assert {tuple(fleet.held(who)) for who in fleet.receivers} == {tuple(new)}


def test_different_calls_at_the_same_time_are_refused_on_both_sides() -> None:
    with running() as fleet:
        other = fleet.pool.submit(fleet.trainers[1].reconcile_communicator)
        with pytest.raises(RefitError, match="it is at call 1, reconcile_communicator"):
            fleet.trainers[0].sync_weights()
        with pytest.raises(RefitError, match="rank 0 at 1, sync_weights"):
            other.result(LIMIT_S)
        assert fleet.together(lambda trainer: trainer.sync_weights())[0].version == 1


def test_a_shard_that_left_is_taken_in_again_at_the_version_of_the_others() -> None:
    with running((1, 1)) as fleet:
        fleet.together(lambda trainer: trainer.sync_weights())
        new = fleet.train()
        fleet.receivers.pop((1, 0)).close()
        reports = fleet.together(lambda trainer: trainer.sync_weights())
        assert [report.members for report in reports] == [(0,)] * STAGES
        fleet.receivers[1, 0] = fleet.join(1)
        assert not fleet.receivers[1, 0].may_serve
        until(lambda: fleet.trainers[0].synchronizer.seats.read()[STAGES + 1] != 0, limit=LIMIT_S)
        reports = fleet.together(lambda trainer: trainer.sync_weights(only=[1]))
        assert [report.version for report in reports] == [2] * STAGES
        assert fleet.held((1, 0)) == fleet.held((0, 0)) == new
        assert fleet.receivers[1, 0].may_serve


def test_a_second_job_of_trainers_goes_on_where_the_first_ended() -> None:
    with running((1, 1)) as fleet:
        fleet.together(lambda trainer: trainer.sync_weights())
        first = fleet.trainers[0].synchronizer.epoch
        fleet.stop()
        assert all(receiver.may_serve for receiver in fleet.receivers.values())
        fleet.start()
        assert fleet.trainers[0].synchronizer.epoch > first
        new = fleet.train()
        assert [r.version for r in fleet.together(lambda trainer: trainer.sync_weights())] == [2] * STAGES
        assert {tuple(fleet.held(who)) for who in fleet.receivers} == {tuple(new)}


def test_a_trainer_that_is_gone_is_named_by_the_others() -> None:
    with running((1, 1)) as fleet:
        fleet.together(lambda trainer: trainer.sync_weights())
        fleet.trainers[1].shutdown()
        with pytest.raises(PeerLost, match="trainer rank 1"):
            fleet.trainers[0].sync_weights()
        assert fleet.held((0, 0)) == fleet.held((1, 0))
        assert fleet.receivers[0, 0].may_serve


@pytest.mark.parametrize("waits", [True, False], ids=["while it is waited for", "before the call"])
def test_a_leader_that_is_gone_is_named_by_the_others(waits: bool) -> None:
    with running((1, 1)) as fleet:
        fleet.together(lambda trainer: trainer.sync_weights())
        if waits:
            meeting = fleet.trainers[1]._meeting
            call = fleet.pool.submit(fleet.trainers[1].sync_weights)
            until(lambda: meeting._here is not None, limit=LIMIT_S)
        fleet.trainers[0].shutdown()
        if not waits:
            call = fleet.pool.submit(fleet.trainers[1].sync_weights)
        with pytest.raises(PeerLost, match="rank 0 of the trainers"):
            call.result(LIMIT_S)
        assert fleet.receivers[0, 0].may_serve


def test_ranks_of_another_fleets_shape_leave_by_themselves() -> None:
    with running((1, 1)) as fleet:
        fleet.stop()
        with SpmdRefit(
            ToySource(0, width=fleet.width),
            backend=fleet.url,
            fleet=fleet.name,
            rank=0,
            world_size=1,
            stage=0,
            host="127.0.0.1",
            roster_ttl_s=TTL_S,
            gather_s=5.0,
        ) as alone:
            starting = fleet.pool.submit(alone.init_communicator, LIMIT_S)
            until(
                lambda: all(receiver._attendant.closed for receiver in fleet.receivers.values()),
                limit=LIMIT_S,
            )
            assert not any(receiver.may_serve for receiver in fleet.receivers.values())
            assert starting.exception(LIMIT_S) is not None


def test_two_hundred_refits_leave_nothing_in_the_leaders_store() -> None:
    with running((1, 1), width=4) as fleet:
        store = fleet.trainers[0].synchronizer._store
        keys = []
        for count in (20, 180):
            for _ in range(count):
                reports = fleet.together(lambda trainer: trainer.sync_weights())
            assert reports[0].version == sum((20, 180)[: len(keys) + 1])
            keys.append(store.num_keys())
        assert keys[1] <= keys[0] + 2  # a letter may be on its way


def test_closing_ends_every_thread() -> None:
    before = set(threading.enumerate())
    with running():
        pass
    kept = ("dprims-graveyard",)
    until(lambda: all(t in before or t.name.startswith(kept) for t in threading.enumerate()), limit=LIMIT_S)


@pytest.mark.parametrize("address", ["tcpstore"], indirect=True)
def test_what_cannot_be_is_refused_before_anything_runs(address: str) -> None:
    url = address
    alone = f"memory://{uuid.uuid4().hex}"
    with pytest.raises(BackendMisconfigured, match="seen by the threads of one process alone"):
        SpmdRefit(ToySource(0), backend=alone, rank=0, world_size=1, stage=0)
    with pytest.raises(BackendMisconfigured, match="seen by the threads of one process alone"):
        SpmdReceiver(ToySink(0, 0, 1), backend=alone, shard=0, shard_sizes=(1,), timeout=LIMIT_S)
    with pytest.raises(MembershipError, match="shard_sizes is 2; expected"):
        SpmdReceiver(ToySink(0, 0, 1), backend=url, shard=0, shard_sizes=2)  # type: ignore[arg-type]
    with pytest.raises(MembershipError, match="rank is 2"):
        SpmdRefit(ToySource(0), backend=url, rank=2, world_size=2, stage=0)
    with pytest.raises(MembershipError, match="rank 0 leads"):
        SpmdRefit(ToySource(1), backend=url, rank=0, world_size=2, stage=1)
    with pytest.raises(MembershipError, match="rank 1 of shard 0"):
        SpmdReceiver(ToySink(0, 0, 1), backend=url, shard=0, worker=1, shard_sizes=(1,))
    with pytest.raises(ValueError, match="expected the URL"):
        SpmdReceiver(ToySink(0, 0, 1), backend=None, shard=0, shard_sizes=(1,))  # type: ignore[arg-type]
    with pytest.raises(RefitTimeout, match="none has said where it is"):
        SpmdReceiver(ToySink(0, 0, 1), backend=url, shard=0, shard_sizes=(1,), timeout=0.2)
    with (
        SpmdRefit(ToySource(0), backend=url, rank=0, world_size=1, stage=0, gather_s=0.2) as refit,
        pytest.raises(RefitTimeout, match="enrolled are nobody"),
    ):
        refit.init_communicator()


# -- processes ------------------------------------------------------------------------------------

TRAINER = """
import sys
from dprims.engines.spmd import SpmdRefit
from dprims.testing.faults import Fault, FaultInjector
from dprims.testing.weights import ToySource

url, fleet, phase = sys.argv[1:]
source = ToySource(0)
with SpmdRefit(
    source, backend=url, fleet=fleet, rank=0, world_size=1, stage=0, host="127.0.0.1", roster_ttl_s=2.0,
    bucket_bytes=64 << 10, gather_s=30.0,
) as refit:
    refit.init_communicator(30.0)
    print(refit.sync_weights().version, source.checksum(), flush=True)
    source.step()
    if phase:
        refit.sender.faults = FaultInjector([Fault(action="kill", phase=phase)])
    print(refit.sync_weights().version, source.checksum(), flush=True)
"""


def train(url: str, fleet: str, phase: str = "") -> tuple[int, list[tuple[int, str]]]:
    """Run a trainers' job of one rank; its exit code, and version and checksum of each refit."""
    run = subprocess.run(
        [sys.executable, "-c", TRAINER + "\nimport os; os._exit(0)", url, fleet, phase],
        env={**os.environ, "PYTHONPATH": str(EXAMPLE.parent.parent)},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    lines = [line.split() for line in run.stdout.splitlines()]
    return run.returncode, [(int(version), digest) for version, digest in lines]


@pytest.mark.parametrize("phase", ["bucket", "decision"])
def test_a_killed_leader_leaves_every_shard_whole_and_the_next_one_goes_on(
    redis_server: Any, phase: str
) -> None:
    url, fleet = redis_server.url, f"spmd-{uuid.uuid4().hex[:8]}"
    options: Any = {
        "backend": url,
        "fleet": fleet,
        "shard_sizes": (1, 1),
        "roster_ttl_s": TTL_S,
        "timeout": 100,
    }
    sinks = [ToySink(shard, 0, 1) for shard in range(2)]
    with ThreadPoolExecutor() as pool, contextlib.ExitStack() as stack:
        first = pool.submit(train, url, fleet, phase)
        joining = [
            pool.submit(SpmdReceiver, sink, shard=shard, **options) for shard, sink in enumerate(sinks)
        ]
        receivers = [stack.enter_context(one.result(LIMIT_S)) for one in joining]
        code, done_before = first.result()
        assert code == -signal.SIGKILL
        assert [version for version, _ in done_before] == [1]
        assert [sink.checksums() for sink in sinks] == [[done_before[0][1]]] * 2
        assert all(receiver.may_serve for receiver in receivers), "they serve on, without a leader"

        code, done_after = train(url, fleet)
        assert code == 0
        assert [version for version, _ in done_after] == sorted({version for version, _ in done_after})
        assert done_after[0][0] > 1
        assert [sink.checksums() for sink in sinks] == [[done_after[-1][1]]] * 2
        assert [receiver.version for receiver in receivers] == [done_after[-1][0]] * 2


RECEIVER = """
import logging, sys
from dprims.engines.spmd import SpmdReceiver
from dprims.testing.weights import ToySink

logging.basicConfig(level=logging.WARNING)
url, fleet = sys.argv[1:]
with SpmdReceiver(ToySink(0, 0, 1), backend=url, fleet=fleet, shard=0, shard_sizes=(1,), roster_ttl_s=2.0):
    print("in", flush=True)
    sys.stdin.read()
"""


class Receiver:
    """A generation rank in a process of its own."""

    def __init__(self, url: str, fleet: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", RECEIVER, url, fleet],
            env={**os.environ, "PYTHONPATH": str(EXAMPLE.parent.parent)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def kill(self) -> str:
        """End it as it is; what it said to stderr."""
        self.process.kill()
        return self.process.communicate(timeout=LIMIT_S)[1]


@contextlib.contextmanager
def trainer(url: str, fleet: str, **options: Any) -> Iterator[SpmdRefit]:
    """The only trainer, in this process; a rank that does not answer costs it *stall_timeout_s*."""
    with SpmdRefit(
        ToySource(0),
        backend=url,
        fleet=fleet,
        rank=0,
        world_size=1,
        stage=0,
        host="127.0.0.1",
        roster_ttl_s=TTL_S,
        gather_s=LIMIT_S,
        stall_timeout_s=LIMIT_S,
        **options,
    ) as refit:
        yield refit


@contextlib.contextmanager
def one_shard(url: str) -> Iterator[tuple[str, list[Receiver]]]:
    """A fleet's name and its only receiver; one that follows it must not be taken for the dead one."""
    fleet = f"spmd-{uuid.uuid4().hex[:8]}"
    receivers = [Receiver(url, fleet)]
    try:
        yield fleet, receivers
    finally:
        said = [receiver.kill() for receiver in receivers]
    assert "lapsed" not in said[-1], "the new rank was taken for the dead one"


def first_refit(refit: SpmdRefit) -> None:
    refit.init_communicator()
    assert refit.sync_weights().members == (0,)


def test_a_job_that_is_started_again_does_not_wait_for_the_dead_of_the_one_before(redis_server: Any) -> None:
    """Its receivers were killed a moment ago, so their entries still stand when the new leader looks."""
    url = redis_server.url
    with one_shard(url) as (fleet, receivers):
        with trainer(url, fleet) as refit:
            first_refit(refit)
        receivers[0].kill()
        receivers.append(Receiver(url, fleet))
        with trainer(url, fleet) as refit:
            began = time.monotonic()
            refit.init_communicator()
            assert time.monotonic() - began < LIMIT_S, "a stall timeout"
            assert refit.sync_weights().members == (0,)


def test_a_receiver_that_takes_a_dead_ones_place_keeps_it(redis_server: Any) -> None:
    url = redis_server.url
    with one_shard(url) as (fleet, receivers), trainer(url, fleet) as refit:
        first_refit(refit)
        receivers[0].kill()
        receivers.append(Receiver(url, fleet))
        deadline = time.monotonic() + LIMIT_S
        while True:
            refit.mark_stale()
            try:
                assert refit.sync_weights().members == (0,)
                break
            except (BelowQuorum, PeerLost):  # nobody is in while the dead one's entry lapses
                assert time.monotonic() < deadline


def test_ranks_that_disagree_about_the_shards_are_refused_once_none_of_them_can_be_a_dead_one() -> None:
    options: Any = {"fleet": "disagree", "shard": 0, "roster_ttl_s": 0.5, "timeout": 5.0}
    with (
        served() as url,
        ThreadPoolExecutor() as pool,
        SpmdRefit(
            ToySource(0), backend=url, fleet="disagree", rank=0, world_size=1, stage=0, host="127.0.0.1",
            roster_ttl_s=0.5, gather_s=2 * LIMIT_S,
        ) as refit,
    ):  # fmt: skip
        options["backend"] = url
        joining = [
            pool.submit(SpmdReceiver, ToySink(0, 0, 1), shard_sizes=(1,), **options),
            pool.submit(SpmdReceiver, ToySink(1, 0, 1), shard_sizes=(1, 1), **options | {"shard": 1}),
        ]
        began = time.monotonic()
        with pytest.raises(HandshakeMismatch, match=r"disagree about shard_sizes: \[\(1,\), \(1, 1\)\]"):
            refit.init_communicator()
        assert time.monotonic() - began < LIMIT_S, "what is known at once was waited for"
        for one in joining:
            assert isinstance(one.exception(LIMIT_S), RefitTimeout)


# -- torchrun -------------------------------------------------------------------------------------


def job(url: str, role: str, *, ranks: int) -> subprocess.Popen[str]:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    return subprocess.Popen(
        [*torchrun, str(EXAMPLE), role],
        env={**os.environ, "DPRIMS_BACKEND": url, "PYTHONPATH": str(EXAMPLE.parent.parent)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def ends(output: str) -> tuple[list[str], list[tuple[str, str]]]:
    """The checksum of each stage, and the version and checksums of each shard."""
    stages = sorted(re.findall(r"stage (\d) ends at version (\d+) with ([0-9a-f]{16})", output))
    shards = sorted(re.findall(r"shard (\d) ends at version (\d+) with ([0-9a-f]{16} [0-9a-f]{16})", output))
    return [digest for _, _, digest in stages], [(version, held) for _, version, held in shards]


def test_two_jobs_meet_on_one_url(redis_server: Any) -> None:
    jobs = [job(redis_server.url, role, ranks=2) for role in ("trainer", "generation")]
    try:
        outputs = [one.communicate(timeout=100)[0] for one in jobs]
    finally:
        for one in jobs:
            one.terminate()
            one.wait()
    output = "\n".join(outputs)
    assert [one.returncode for one in jobs] == [0, 0], output
    stages, shards = ends(output)
    assert len(set(stages)) == 2, output
    assert shards == [("4", " ".join(stages))] * 2, output
    assert "step 4: version 4 on shards (0, 1)" in output


def test_the_example_loses_a_shard_and_takes_it_back() -> None:
    run = subprocess.Popen(
        [sys.executable, str(EXAMPLE)],
        env={**os.environ, "PYTHONPATH": str(EXAMPLE.parent.parent)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        output, _ = run.communicate(timeout=100)
    finally:
        run.send_signal(signal.SIGTERM)
        run.wait()
    assert run.returncode == 0, output
    assert "failed (exitcode: -9)" in output, "torchrun saw the SIGKILL"
    assert re.search(r"step 2: PeerLost: .*seat 3", output), output
    assert "step 2: version 2 on shards (0,)" in output
    assert "shard 0 serves version 1" in output
    stages, shards = ends(output)
    assert len(set(stages)) == 2, output
    assert [held for _, held in shards] == [" ".join(stages)] * 2, output
    assert len({version for version, _ in shards}) == 1, output
