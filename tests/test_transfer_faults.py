"""Transfers that are hit in the middle: killed, frozen, raising, corrupted, cancelled, late."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dprims.exceptions import PeerLost, RefitAborted, RefitTimeout, TransferCorrupt
from dprims.synchronizer.plan import Plan
from dprims.synchronizer.sources import DictSource
from dprims.testing.faults import InjectedFault
from dprims.testing.transfer_rank import Outcome, TransferFleet, checksum, mixed_model

LIMIT_S = 60.0
PLAN = Plan.build(DictSource(mixed_model(0)).metadata(), bucket_bytes=64 << 10)
MIDDLE = len(PLAN.buckets) // 2
OLD, NEW = checksum(mixed_model(1)), checksum(mixed_model(2))


@pytest.fixture
def fleet() -> Iterator[TransferFleet]:
    """Three ranks that are at version 1."""
    with TransferFleet(3) as fleet:
        build(fleet, "first")
        assert [outcome.checksum for outcome in transfer(fleet, 1)] == [OLD] * 3
        yield fleet


def build(fleet: TransferFleet, prefix: str) -> None:
    for future in fleet.call("build", prefix, plan=PLAN.to_bytes()):
        assert future.result(LIMIT_S).error is None


def start(fleet: TransferFleet, seed: int, *faults: dict[str, Any], **options: Any) -> Any:
    return fleet.call("transfer", PLAN.to_bytes(), seed=seed, faults=faults, **options)


def transfer(fleet: TransferFleet, seed: int, *faults: dict[str, Any], **options: Any) -> list[Outcome]:
    return [future.result(LIMIT_S) for future in start(fleet, seed, *faults, **options)]


def transfer_hit(fleet: TransferFleet, rank: int, fault: dict[str, Any], **options: Any) -> list[Outcome]:
    """A transfer in which `rank` is hit, and the others are told as soon as it has given up."""
    futures = start(fleet, 2, fault | {"rank": rank}, timeout_s=LIMIT_S, **options)
    futures[rank].result(LIMIT_S)
    for other in fleet.ranks:
        other.call_now("cancel", f"rank {rank} gave up")
    return [future.result(LIMIT_S) for future in futures]


def wait_until_frozen(pid: int) -> None:
    deadline = time.monotonic() + LIMIT_S
    while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "T":
        assert time.monotonic() < deadline, f"{pid} was never stopped"
        time.sleep(0.002)


def still_old(*outcomes: Outcome) -> None:
    """Receivers that were cut hold what they held, whole."""
    for outcome in outcomes:
        assert outcome.checksum == OLD
        assert not outcome.torn


def test_a_killed_receiver_frees_the_sender_at_its_deadline(fleet: TransferFleet) -> None:
    futures = start(fleet, 2, {"action": "kill", "rank": 1, "bucket": MIDDLE}, timeout_s=3.0)
    with pytest.raises(PeerLost):
        futures[1].result(LIMIT_S)
    for rank in (0, 2):
        outcome = futures[rank].result(LIMIT_S)
        assert isinstance(outcome.error, (PeerLost, RefitTimeout))
        assert outcome.seconds < 13.0
    still_old(futures[2].result(LIMIT_S))
    fleet.replace(1)
    build(fleet, "again")
    assert {outcome.checksum for outcome in transfer(fleet, 2)} == {NEW}


def test_a_cancel_frees_the_others_at_once(fleet: TransferFleet) -> None:
    futures = start(fleet, 2, {"action": "kill", "rank": 1, "bucket": MIDDLE}, timeout_s=LIMIT_S)
    with pytest.raises(PeerLost):
        futures[1].result(LIMIT_S)
    told = time.monotonic()
    for rank in (0, 2):
        fleet.ranks[rank].call_now("cancel", "rank 1 was killed")
    outcomes = [futures[rank].result(LIMIT_S) for rank in (0, 2)]
    assert time.monotonic() - told < 5.0
    for outcome in outcomes:
        # who was wired to the dead rank may have seen it go before it was told
        assert isinstance(outcome.error, (RefitAborted, PeerLost))
    assert any("rank 1 was killed" in str(outcome.error) for outcome in outcomes) or all(
        isinstance(outcome.error, PeerLost) for outcome in outcomes
    )
    still_old(outcomes[1])


def test_a_frozen_receiver_frees_the_others_at_the_deadline_and_cannot_harm_them_later(
    fleet: TransferFleet,
) -> None:
    futures = start(fleet, 2, {"action": "stop", "rank": 1, "bucket": MIDDLE}, timeout_s=2.0)
    outcomes = [futures[rank].result(LIMIT_S) for rank in (0, 2)]
    for outcome in outcomes:
        assert isinstance(outcome.error, RefitTimeout)
        assert 2.0 <= outcome.seconds < 12.0
        assert outcome.buried >= 1
    still_old(outcomes[1])
    # the thawed rank finds itself late; what it then still sends or receives goes nowhere
    fleet.ranks[1].signal(signal.SIGCONT)
    late = futures[1].result(LIMIT_S)
    assert late.error is not None
    still_old(late)
    build(fleet, "again")
    assert {outcome.checksum for outcome in transfer(fleet, 2)} == {NEW}


def test_a_frozen_receiver_is_left_at_once_when_the_others_are_told(fleet: TransferFleet) -> None:
    futures = start(fleet, 2, {"action": "stop", "rank": 2, "bucket": MIDDLE}, timeout_s=LIMIT_S)
    wait_until_frozen(fleet.ranks[2].pid)
    told = time.monotonic()
    for rank in (0, 1):
        fleet.ranks[rank].call_now("cancel", "rank 2 is frozen")
    for rank in (0, 1):
        error = futures[rank].result(LIMIT_S).error
        assert isinstance(error, RefitAborted)
        assert "the test: rank 2 is frozen" in str(error)
    assert time.monotonic() - told < 5.0


def test_no_progress_is_noticed_long_before_the_deadline(fleet: TransferFleet) -> None:
    fault = {"action": "hold", "rank": 1, "bucket": MIDDLE, "seconds": LIMIT_S}
    futures = start(fleet, 2, fault, timeout_s=LIMIT_S, stall_timeout_s=0.5)
    error = futures[0].result(LIMIT_S).error
    assert isinstance(error, RefitTimeout)
    assert "has stood still" in str(error)
    assert "stall_timeout_s=0.5" in str(error)


@pytest.mark.parametrize("phase", ["bucket", "decision"])
@pytest.mark.parametrize("rank", [0, 1])
def test_what_a_rank_raises_is_its_own_and_everybody_can_go_on(
    fleet: TransferFleet, rank: int, phase: str
) -> None:
    fault: dict[str, Any] = {"action": "raise", "phase": phase}
    if phase == "bucket":
        fault["bucket"] = MIDDLE
    outcomes = transfer_hit(fleet, rank, fault)
    assert isinstance(outcomes[rank].error, InjectedFault)
    if rank:
        still_old(outcomes[rank])
    build(fleet, "again")
    assert {outcome.checksum for outcome in transfer(fleet, 2)} == {NEW}


@pytest.mark.parametrize("bucket", [0, MIDDLE, len(PLAN.buckets) - 1])
@pytest.mark.parametrize("rank", [0, 1])
def test_one_flipped_bit_is_found_and_located(fleet: TransferFleet, rank: int, bucket: int) -> None:
    fault = {"action": "corrupt", "rank": rank, "bucket": bucket, "byte": 777}
    outcomes = transfer(fleet, 2, fault)
    hit = outcomes[1:] if rank == 0 else outcomes[1:2]
    for outcome in hit:
        assert isinstance(outcome.error, TransferCorrupt)
        text = str(outcome.error)
        assert f"bucket {bucket} of {len(PLAN.buckets)}" in text
        assert any(repr(PLAN.tensors[p.tensor].name) in text for p in PLAN.buckets[bucket].pieces)
        still_old(outcome)
    for outcome in outcomes:
        if outcome not in hit:
            assert outcome.error is None
            assert outcome.checksum == NEW


def test_without_digests_a_flipped_bit_goes_unseen(fleet: TransferFleet) -> None:
    """What `verify=False` costs."""
    fault = {"action": "corrupt", "rank": 1, "bucket": MIDDLE}
    outcomes = transfer(fleet, 2, fault, verify=False)
    assert [outcome.error for outcome in outcomes] == [None] * 3
    assert outcomes[1].checksum not in (OLD, NEW)


def test_in_place_a_cut_transfer_says_that_it_left_a_mixture(fleet: TransferFleet) -> None:
    outcomes = transfer_hit(fleet, 1, {"action": "raise", "bucket": MIDDLE}, sink="in place")
    assert outcomes[1].torn
    assert outcomes[1].checksum not in (OLD, NEW)
    build(fleet, "again")
    outcomes = transfer(fleet, 2, sink="in place")
    assert {outcome.checksum for outcome in outcomes} == {NEW}
    assert not any(outcome.torn for outcome in outcomes)


def test_a_receiver_that_never_calls_receive(fleet: TransferFleet) -> None:
    futures = [fleet.ranks[rank].call("transfer", PLAN.to_bytes(), seed=2, timeout_s=1.5) for rank in (0, 2)]
    for future in futures:
        assert isinstance(future.result(LIMIT_S).error, RefitTimeout)


def test_a_sender_that_comes_late_is_waited_for(fleet: TransferFleet) -> None:
    fault = {"action": "delay", "rank": 0, "bucket": MIDDLE, "seconds": 0.5}
    assert {outcome.checksum for outcome in transfer(fleet, 2, fault)} == {NEW}


def test_a_rank_leaves_at_once_with_a_stuck_operation(fleet: TransferFleet) -> None:
    futures = start(fleet, 2, {"action": "stop", "rank": 1, "bucket": MIDDLE}, timeout_s=1.0)
    for rank in (0, 2):
        futures[rank].result(LIMIT_S)
    began = time.monotonic()
    fleet.ranks[0].close(timeout=LIMIT_S)
    assert time.monotonic() - began < 10.0
    assert not fleet.ranks[0].alive
    os.kill(fleet.ranks[1].pid, signal.SIGCONT)
