"""Groups of real processes: the handshake, and building again and again over one store."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.distributed import HashStore

from dprims.exceptions import DeviceLost, HandshakeMismatch, RefitAborted, RefitError, RefitTimeout
from dprims.synchronizer.clients import Clients
from dprims.synchronizer.group import CommGroup, leader_store
from dprims.synchronizer.guard import Guard
from dprims.synchronizer.handshake import handshake
from dprims.synchronizer.plan import Plan, TensorMeta
from dprims.testing.transfer_rank import Outcome, TransferFleet

LIMIT_S = 60.0
WEIGHTS = [TensorMeta(f"w{i}", (100,), "float32") for i in range(20)]


@pytest.fixture(scope="module")
def fleet() -> Iterator[TransferFleet]:
    with TransferFleet(3) as fleet:
        yield fleet


def results(futures: Any) -> list[Outcome]:
    return [future.result(LIMIT_S) for future in futures]


def meet(size: int, **each: dict[str, Any]) -> list[BaseException | None]:
    """One handshake between threads; what each of them raised."""
    store = HashStore()
    errors: list[BaseException | None] = [None] * size

    def run(rank: int) -> None:
        options = {"record": {"epoch": "1.1"}, "guard": Guard(deadline=time.monotonic() + 5.0)}
        options |= each.get(f"rank{rank}", {})
        try:
            handshake(Clients(_Cloned(store)), rank, size, **options)  # type: ignore[arg-type]
        except RefitError as error:
            errors[rank] = error

    absent = [rank for rank in range(size) if each.get(f"rank{rank}", {}).get("absent")]
    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size) if rank not in absent]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
        assert not thread.is_alive()
    return errors


class _Cloned:
    """A store of this process, whose clones are itself."""

    def __init__(self, store: HashStore) -> None:
        self.set, self.get, self.check = store.set, store.get, store.check

    def clone(self) -> _Cloned:
        return self


def test_all_agree() -> None:
    assert meet(4) == [None] * 4


@pytest.mark.parametrize(
    ("record", "words"),
    [
        ({"epoch": "1.2"}, "epoch is '1.2' there and '1.1' on rank 0"),
        ({"epoch": "1.1", "world": 5}, "world is 5 there and None on rank 0"),
        ({}, "epoch is None there and '1.1' on rank 0"),
        ({"protocol": 0, "epoch": "1.1"}, "protocol is 0 there and 1 on rank 0"),
    ],
)
def test_a_rank_that_differs_is_named_on_every_rank(record: dict[str, Any], words: str) -> None:
    names = ["trainer", "shard 0", "shard 1"]
    errors = meet(
        3, rank0={"members": names}, rank1={"members": names}, rank2={"members": names, "record": record}
    )
    for error in errors:
        assert isinstance(error, HandshakeMismatch)
        assert words in str(error)
        assert "rank 2 (shard 1 on " in str(error)


def test_all_that_differ_are_named() -> None:
    errors = meet(4, rank1={"record": {"epoch": "0.9"}}, rank3={"record": {"epoch": "0.8"}})
    assert {str(error) for error in errors} == {str(errors[0])}
    assert "'0.9'" in str(errors[0])
    assert "'0.8'" in str(errors[0])


@pytest.mark.parametrize(
    ("theirs", "words"),
    [
        (Plan.build(WEIGHTS, bucket_bytes=2048), "bucket_bytes is 2048 there and 1024 on rank 0"),
        (
            Plan.build([*WEIGHTS[:7], TensorMeta("w7", (99,), "float32"), *WEIGHTS[8:]], bucket_bytes=1024),
            "tensor 7 is 'w7' float32[99] on rank 1 and 'w7' float32[100] on rank 0",
        ),
        (
            Plan.build([TensorMeta("x", (100,), "float32"), *WEIGHTS[1:]], bucket_bytes=1024),
            "tensor 0 is 'x' float32[100] on rank 1 and 'w0' float32[100] on rank 0",
        ),
        (
            Plan.build([TensorMeta("w0", (100,), "int32"), *WEIGHTS[1:]], bucket_bytes=1024),
            "tensor 0 is 'w0' int32[100] on rank 1 and 'w0' float32[100] on rank 0",
        ),
    ],
)
def test_the_first_difference_of_two_plans_is_named_on_both_sides(theirs: Plan, words: str) -> None:
    errors = meet(2, rank0={"plan": Plan.build(WEIGHTS, bucket_bytes=1024)}, rank1={"plan": theirs})
    for error in errors:
        assert isinstance(error, HandshakeMismatch)
        assert words in str(error)


def test_a_plan_of_many_megabytes_is_compared() -> None:
    """Random names do not compress: the plan travels in several values of the store."""
    metas = [TensorMeta(os.urandom(256).hex(), (1,), "float32") for _ in range(20_000)]
    ours, theirs = Plan.build(metas, bucket_bytes=1 << 20), Plan.build(metas[:-1], bucket_bytes=1 << 20)
    assert len(theirs.to_bytes()) > 4 << 20
    errors = meet(
        2,
        rank0={"plan": ours, "guard": Guard(deadline=time.monotonic() + 30)},
        rank1={"plan": theirs, "guard": Guard(deadline=time.monotonic() + 30)},
    )
    for error in errors:
        assert isinstance(error, HandshakeMismatch)
        assert "tensor 19999" in str(error)


def test_a_refusal_is_told_to_everybody() -> None:
    errors = meet(3, rank1={"refusal": "5 bytes of staging are needed, 4 are free"})
    for error in errors:
        assert type(error) is RefitError
        assert "refuses: 5 bytes of staging are needed, 4 are free" in str(error)


@pytest.mark.parametrize("absent", [0, 2])
def test_who_does_not_come_is_named_by_who_did(absent: int) -> None:
    short = {"guard": Guard(deadline=time.monotonic() + 0.3)}
    errors = meet(3, **({f"rank{r}": dict(short) for r in range(3)} | {f"rank{absent}": {"absent": True}}))
    for rank, error in enumerate(errors):
        if rank != absent:
            assert isinstance(error, RefitTimeout)
            assert f"rank {absent} did not come" in str(error)


def test_a_cancel_ends_the_handshake() -> None:
    guard = Guard()
    threading.Timer(0.1, guard.cancel.set, ("rank 2 died",)).start()
    with pytest.raises(RefitAborted, match="rank 2 died"):
        handshake(Clients(_Cloned(HashStore())), 0, 2, {}, guard=guard)


def test_a_frozen_store_does_not_hold_anybody() -> None:
    class Frozen(_Cloned):
        def __init__(self) -> None:
            super().__init__(HashStore())
            self.melt = threading.Event()
            self.check = lambda keys: self.melt.wait(LIMIT_S)

    store = Frozen()
    try:
        with pytest.raises(RefitTimeout):
            handshake(Clients(store), 1, 2, {}, guard=Guard(deadline=time.monotonic() + 0.2))
    finally:
        store.melt.set()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"rank": 2}, "rank is 2 in a group of 2"),
        ({"backend": "nccl"}, "nccl needs cuda"),
        ({"device": "meta"}, "gloo needs cpu"),
    ],
)
def test_input_that_fits_no_group(options: dict[str, Any], words: str) -> None:
    given = {"rank": 0, "size": 2, "backend": "gloo", "device": "cpu", "timeout_s": 1.0, "op_timeout_s": 1.0}
    with pytest.raises(ValueError, match=words):
        CommGroup.build(HashStore(), "p", **(given | options))


def test_a_group_of_one_broadcasts_and_is_finished_once() -> None:
    store, _, _ = leader_store("localhost")
    group = CommGroup.build(
        store, "alone", 0, 1, backend="gloo", device="cpu", timeout_s=10.0, op_timeout_s=10.0
    )
    guard = Guard(deadline=time.monotonic() + 10)
    guard.wait(group.broadcast(torch.ones(3)))
    group.handshake({"round": 2}, guard=guard)
    group.release()
    group.release()
    group.abort()
    with pytest.raises(RefitAborted, match="rank 0 of alone: the group carries nothing, it was released"):
        group.broadcast(torch.ones(3))


class FakeGroup:
    """Stands in for a process group over NCCL: takes down what it is asked for."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.aborted = threading.Event()

    def broadcast(self, tensors: list[torch.Tensor], options: Any) -> str:
        assert options.asyncOp
        self.asked.append(f"broadcast {tensors[0].numel()} from {options.rootRank}")
        return f"work {len(self.asked)}"

    def _start_coalescing(self, device: torch.device) -> None:
        self.asked.append("start")

    def _end_coalescing(self, device: torch.device) -> str:
        self.asked.append("end")
        return "the one work"

    def abort(self) -> None:
        self.aborted.set()


def fake_nccl(monkeypatch: pytest.MonkeyPatch) -> tuple[CommGroup, FakeGroup]:
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    fake = FakeGroup()
    return CommGroup(fake, HashStore(), "fake", 0, 2, torch.device("cuda", 0), 600.0), fake  # type: ignore[arg-type]


def test_direct_pieces_go_in_one_group_call(monkeypatch: pytest.MonkeyPatch) -> None:
    group, fake = fake_nccl(monkeypatch)
    with group.coalesced() as works:
        works += [group.broadcast(torch.zeros(3)), group.broadcast(torch.zeros(4))]
    assert fake.asked == ["start", "broadcast 3 from 0", "broadcast 4 from 0", "end"]
    assert works == ["the one work"]


def test_a_body_that_raises_leaves_no_group_call_open(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL's group call belongs to the thread: left open, it would swallow what later groups enqueue."""
    group, fake = fake_nccl(monkeypatch)
    with pytest.raises(KeyError), group.coalesced():
        raise KeyError
    assert fake.asked == ["start", "end"]

    def fail(device: torch.device) -> str:
        fake.asked.append("end")
        raise RuntimeError("remote process exited")

    fake._end_coalescing = fail  # type: ignore[method-assign]
    with pytest.raises(KeyError), group.coalesced():
        raise KeyError
    assert fake.asked == ["start", "end"] * 2


def test_a_group_call_that_was_aborted_half_way_costs_its_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    group, fake = fake_nccl(monkeypatch)
    other, _ = fake_nccl(monkeypatch)
    seen: list[BaseException] = []

    def work() -> None:
        try:
            with group.coalesced():
                group.interrupt()
                raise RuntimeError("NCCL communicator was aborted")
        except RuntimeError:
            pass
        try:
            other.broadcast(torch.zeros(1))
        except DeviceLost as error:
            seen.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(LIMIT_S)
    assert fake.asked == ["start"]
    assert "a group call of fake was aborted half way" in str(seen[0])
    other.broadcast(torch.zeros(1))


class Pending:
    """An event that completes when the abort has come through, or never."""

    def __init__(self, after: threading.Event | None) -> None:
        self.after = after

    def query(self) -> bool:
        return self.after is not None and self.after.is_set()


def test_an_abort_returns_when_nothing_writes_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    group, fake = fake_nccl(monkeypatch)
    group.abort(20.0, pending=lambda: [Pending(fake.aborted)])
    assert fake.aborted.is_set()
    with pytest.raises(RefitAborted):
        group.broadcast(torch.zeros(1))


def test_a_device_that_does_not_come_back_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    group, _ = fake_nccl(monkeypatch)
    start = time.monotonic()
    with pytest.raises(DeviceLost, match=r"rank 0 of fake: cuda:0 did not come back within 0\.2 s"):
        group.abort(0.2, pending=lambda: [Pending(None)])
    assert time.monotonic() - start < 10.0


def test_an_abort_that_never_returns_holds_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    group, fake = fake_nccl(monkeypatch)
    release = threading.Event()
    fake.abort = lambda: release.wait(LIMIT_S)  # type: ignore[assignment, method-assign, return-value]
    try:
        start = time.monotonic()
        group.release()
        assert time.monotonic() - start < 5.0
    finally:
        release.set()


def test_groups_are_built_again_and_again_over_one_store(fleet: TransferFleet) -> None:
    for number in range(5):
        for outcome in results(fleet.call("build", f"again/{number}", record={"epoch": number})):
            assert outcome.error is None


def test_plans_are_compared_before_anybody_connects(fleet: TransferFleet) -> None:
    plan = Plan.build(WEIGHTS, bucket_bytes=1024).to_bytes()
    other = Plan.build(WEIGHTS, bucket_bytes=512).to_bytes()
    outcomes = results(fleet.call("build", "plans", each=[{"plan": plan}, {"plan": plan}, {"plan": other}]))
    for outcome in outcomes:
        assert isinstance(outcome.error, HandshakeMismatch)
        assert "bucket_bytes is 512 there and 1024 on rank 0" in str(outcome.error)


def test_a_frozen_rank_is_named_and_the_next_build_works(fleet: TransferFleet) -> None:
    frozen = fleet.ranks[1]
    frozen.signal(signal.SIGSTOP)
    try:
        futures = fleet.call("build", "frozen", timeout_s=1.0)
        for rank in (0, 2):
            error = futures[rank].result(LIMIT_S).error
            assert isinstance(error, RefitTimeout)
            assert "rank 1 did not come" in str(error)
    finally:
        frozen.signal(signal.SIGCONT)
    assert isinstance(futures[1].result(LIMIT_S).error, RefitTimeout)
    assert [outcome.error for outcome in results(fleet.call("build", "thawed"))] == [None] * 3
