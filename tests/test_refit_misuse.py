"""The synchronizer used wrongly, and sources and sinks that misbehave: each said by name, nothing torn."""

from __future__ import annotations

import contextlib
import math
import threading
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from dprims.backend import connect
from dprims.engines.local import LocalGeneration, LocalPolicy
from dprims.exceptions import BackendMisconfigured, DprimsError, MembershipError, RefitAborted, RefitError
from dprims.synchronizer import CollectiveWeightSynchronizer
from dprims.testing.threads import ThreadGeneration, ThreadPolicy
from dprims.testing.weights import ToySink, ToySource

LIMIT_S = 60.0


@dataclass
class Fleet:
    policy: ThreadPolicy
    generation: ThreadGeneration
    sync: CollectiveWeightSynchronizer


@contextlib.contextmanager
def ending(policy: Any, generation: Any, sync: CollectiveWeightSynchronizer) -> Iterator[None]:
    """A fleet that ends with the body."""
    try:
        yield
    finally:
        generation.close()
        policy.close()
        sync.shutdown()


@pytest.fixture
def fleet() -> Iterator[Fleet]:
    """One trainer and two shards, as threads, at version 1."""
    policy = ThreadPolicy(ToySource)
    generation = ThreadGeneration(ToySink, 1, shard_sizes=(1, 1))
    sync = CollectiveWeightSynchronizer(policy, generation, roster_ttl_s=1.0, bucket_bytes=64 << 10)
    with ending(policy, generation, sync):
        sync.init_communicator()
        sync.sync_weights()
        yield Fleet(policy, generation, sync)


def boom(*_: Any) -> Any:
    raise ValueError("boom")


@pytest.mark.parametrize("method", ["commit", "after_commit", "resume"])
def test_a_shard_that_cannot_commit_is_named_with_its_reason(
    fleet: Fleet, method: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleet.generation.sinks[1], method, boom)
    report = fleet.sync.sync_weights()
    assert report.members == (0,)
    assert report.absent == {1: "ValueError: boom"}
    assert "shard 1 was left behind at version 2: ValueError: boom" in caplog.text
    assert not fleet.generation.workers[2].may_serve


def test_what_a_source_raises_is_said_with_its_seat(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(fleet.policy.sources[0], "metadata", boom)
        with pytest.raises(RefitAborted, match=r"seat 0 \(trainer\): prepare_refit_info: ValueError: boom"):
            fleet.sync.sync_weights()
    with monkeypatch.context() as patch:
        patch.setattr(fleet.generation.sinks[0], "write", boom)
        with pytest.raises(RefitAborted, match=r"seat 1 \(shard 0\): ValueError: boom"):
            fleet.sync.sync_weights()
    assert fleet.sync.sync_weights().members == (0, 1)


def test_initialising_twice_is_refused_and_again_after_shutdown_is_not(fleet: Fleet) -> None:
    with pytest.raises(RefitError, match="was called before"):
        fleet.sync.init_communicator()
    fleet.sync.shutdown()
    fleet.sync.shutdown()
    with pytest.raises(RefitError, match="call init_communicator first"):
        fleet.sync.sync_weights()


@contextlib.contextmanager
def sync_on_another_thread(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """One that has come to its pauses, and goes on behind the body."""
    inside, leave = threading.Event(), threading.Event()

    def pause() -> None:
        inside.set()
        leave.wait(LIMIT_S)

    with monkeypatch.context() as patch:
        patch.setattr(fleet.generation.sinks[0], "pause", pause)
        running = threading.Thread(target=fleet.sync.sync_weights)
        running.start()
        try:
            assert inside.wait(LIMIT_S)
            yield
        finally:
            leave.set()
            running.join(LIMIT_S)


def test_a_shutdown_beside_a_sync_is_refused(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    said = "shutdown was called while another thread drives"
    with sync_on_another_thread(fleet, monkeypatch), pytest.raises(RefitError, match=said):
        fleet.sync.shutdown()
    assert fleet.sync.version == 2


@pytest.mark.parametrize("only", [5, [None], [0, 1], [], ["x"], [True], "0"])
def test_only_is_one_shard(fleet: Fleet, only: Any) -> None:
    with pytest.raises(RefitError, match="only is"):
        fleet.sync.sync_weights(only=only)
    assert fleet.sync.version == 1


@pytest.mark.parametrize("absent", [["x"], "0", 5, None, [0.5], [True], [None], [2], [-1]])
def test_absent_shards_are_shards(fleet: Fleet, absent: Any) -> None:
    with pytest.raises(MembershipError, match=r"expected shards of 0\.\.1"):
        fleet.sync.reconcile_communicator(absent)


@pytest.mark.parametrize("scales", [{"a": "x"}, {"a": math.nan}, {1: 2.0}, {"a": True}])
def test_scales_are_finite_numbers_by_name(fleet: Fleet, scales: Any) -> None:
    with pytest.raises(RefitError, match="kv_scales is"):
        fleet.sync.sync_weights(kv_scales=scales)


@pytest.mark.parametrize(
    "option",
    [
        {"bucket_bytes": -5},
        {"bucket_bytes": 0},
        {"bucket_bytes": 300},
        {"bucket_bytes": "x"},
        {"min_shards": 0},
        {"min_shards": "x"},
        {"stall_timeout_s": None},
        {"stall_timeout_s": 0},
        {"refit_timeout_s": "3"},
        {"refit_timeout_s": 1e300},
        {"refit_timeout_s": math.nan},
        {"roster_ttl_s": 0},
        {"roster_ttl_s": math.inf},
        {"fleet": "a/b"},
        {"fleet": ""},
    ],
    ids=str,
)
def test_a_setting_that_cannot_work_is_refused_at_once(option: dict[str, Any]) -> None:
    with pytest.raises(DprimsError, match=next(iter(option))):
        CollectiveWeightSynchronizer(None, None, **option)  # type: ignore[arg-type]


def test_more_shards_are_not_asked_for_than_there_are(fleet: Fleet) -> None:
    with pytest.raises(RefitError, match="min_shards is 3; the generation has 2 shards"):
        CollectiveWeightSynchronizer(fleet.policy, fleet.generation, min_shards=3)


@pytest.mark.parametrize("url", ["foo://u:secret@x", "redis", ""])
def test_a_url_that_names_no_backend_is_refused_at_once(fleet: Fleet, url: str) -> None:
    with pytest.raises(BackendMisconfigured, match=r"expected .*one of etcd, etcds, memory") as refused:
        CollectiveWeightSynchronizer(fleet.policy, fleet.generation, backend=url)
    assert "secret" not in str(refused.value)


def test_each_side_is_what_it_is_to_be(fleet: Fleet) -> None:
    policy: Any = fleet.policy
    generation: Any = fleet.generation
    with pytest.raises(RefitError, match="policy is a ThreadGeneration, which has no broadcast_weights_for_"):
        CollectiveWeightSynchronizer(generation, policy)
    with pytest.raises(RefitError, match="policy is a NoneType, which has no prepare_refit_info"):
        CollectiveWeightSynchronizer(None, generation).init_communicator()  # type: ignore[arg-type]
    with pytest.raises(RefitError, match="generation is a ThreadPolicy, which has no update_weights_from_"):
        CollectiveWeightSynchronizer(policy, policy)


def test_a_refit_asks_a_function_who_is_absent(fleet: Fleet) -> None:
    with pytest.raises(RefitError, match=r"absent_shards is \[9\]; expected something to call"):
        fleet.sync.refit([9])  # type: ignore[arg-type]


def test_what_a_new_try_cannot_mend_is_raised_at_once(
    fleet: Fleet, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = "refit was called while another thread drives"
    with sync_on_another_thread(fleet, monkeypatch), pytest.raises(RefitError, match=said):
        fleet.sync.refit()
    fleet.sync.shutdown()
    with pytest.raises(RefitError, match="call init_communicator first"):
        fleet.sync.refit()
    assert "tries are left" not in caplog.text


def test_a_closed_side_is_said_at_once(caplog: pytest.LogCaptureFixture) -> None:
    policy, generation = LocalPolicy(ToySource), LocalGeneration(ToySink, 1)
    sync = CollectiveWeightSynchronizer(policy, generation, roster_ttl_s=1.0)
    with ending(policy, generation, sync):
        sync.init_communicator()
        sync.refit()
        generation.close()
        with pytest.raises(RefitError, match="the generation, a LocalGeneration, has been closed"):
            sync.refit()
        generation.restart(0)
        assert sync.refit().members == (0,)
        policy.close()
        with pytest.raises(RefitError, match="the policy, a LocalPolicy, has been closed"):
            sync.refit()
    assert "tries are left" not in caplog.text
    with pytest.raises(RefitError, match="has been closed"):
        sync.init_communicator()


@pytest.mark.parametrize("counted", [1, 3])
def test_the_generation_counts_the_trainers_that_there_are(counted: int) -> None:
    policy = LocalPolicy(ToySource, stages=2)
    generation = LocalGeneration(ToySink, 2, shard_sizes=(1, 1), train_world_size=counted)
    sync = CollectiveWeightSynchronizer(policy, generation)
    with ending(policy, generation, sync):
        said = f"counts {counted} trainer ranks, the policy has 2: give the generation train_world_size=2"
        with pytest.raises(MembershipError, match=said):
            sync.init_communicator()
        assert sync.rendezvous is None, "nothing was begun"


@pytest.mark.parametrize("given", ["URL", "Backend"])
def test_a_backend_that_other_processes_do_not_see_is_refused_where_ranks_are_in_some(given: str) -> None:
    policy, generation = LocalPolicy(ToySource), LocalGeneration(ToySink, 1)
    url = f"memory://{uuid.uuid4().hex}"
    with connect(url) as backend:
        sync = CollectiveWeightSynchronizer(
            policy, generation, backend=url if given == "URL" else backend, roster_ttl_s=1.0
        )
        with ending(policy, generation, sync):
            with pytest.raises(BackendMisconfigured, match=f"{url}', which is seen by the threads of one"):
                sync.init_communicator()
            assert sync.rendezvous is None, "nothing was begun"


def test_a_second_controller_with_a_store_of_its_own_is_told_of(
    fleet: Fleet, caplog: pytest.LogCaptureFixture
) -> None:
    with CollectiveWeightSynchronizer(fleet.policy, fleet.generation, roster_ttl_s=1.0) as second:
        second.init_communicator()
        assert second.sync_weights().members == (0, 1)
        for seat in range(3):
            assert f"rank at seat {seat} leaves fleet dprims/refit" in caplog.text
