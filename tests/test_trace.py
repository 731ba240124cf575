"""Traces of refits: one clock, rows that a viewer can draw, and failed tries with their recovery."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dprims.engines.letters import read_report, write_report
from dprims.engines.local import LocalGeneration, LocalPolicy
from dprims.engines.spmd import SpmdRefit
from dprims.exceptions import RefitAborted, RefitError
from dprims.membership import Epoch, RefitMembership
from dprims.synchronizer import CollectiveWeightSynchronizer, RefitReport
from dprims.synchronizer.chrome import Bar, Sheet
from dprims.synchronizer.clocks import Exchange, Offset, Times, offset_of
from dprims.synchronizer.trace import LEADER, MOST, Journal
from dprims.testing.faults import Fault, FaultInjector
from dprims.testing.threads import ThreadGeneration, ThreadPolicy
from dprims.testing.weights import ToySink, ToySource

LIMIT_S = 60.0
STAGES = 2
Events = list[dict[str, Any]]


# -- one clock ------------------------------------------------------------------------------------------

seconds = st.floats(0, 10)
clocks = st.floats(-1e6, 1e6)


@settings(deadline=None)
@given(
    offset=clocks,
    trips=st.lists(st.tuples(clocks, seconds, seconds, seconds), min_size=1, max_size=8),
)
def test_the_true_offset_is_within_the_bound(
    offset: float, trips: list[tuple[float, float, float, float]]
) -> None:
    known = []
    for asked, there, work, back in trips:
        began = asked + there
        known.append(
            Exchange(asked, Times(began - offset, began + work - offset, "theirs"), began + work + back)
        )
    found = offset_of(known, "ours")
    assert found is not None
    assert abs(found.seconds - offset) <= found.error_s + 1e-6
    assert found.error_s <= min((there + back) / 2 for _, there, _, back in trips) + 1e-6


def test_one_clock_is_not_estimated_unless_it_contradicts_itself() -> None:
    exchange = Exchange(10.0, Times(10.1, 11.0, "boot"), 11.3)
    assert offset_of([exchange], "boot") == Offset(0.0, 0.0)
    assert offset_of([exchange], "other") == pytest.approx((0.1, 0.2))
    assert offset_of([exchange], "") == pytest.approx((0.1, 0.2))
    earlier = Exchange(10.0, Times(5.0, 6.0, "boot"), 11.3)  # it cannot have arrived before it was sent
    assert offset_of([exchange, earlier], "boot") != Offset(0.0, 0.0)
    assert offset_of([], "boot") is None


# -- what a viewer can draw ------------------------------------------------------------------------------


def check(document: dict[str, Any]) -> Events:
    """The drawn events, after all that the Trace Event Format and its viewers ask for has been checked."""
    assert json.loads(json.dumps(document)) == document
    events: Events = document["traceEvents"]
    named: set[tuple[int, int, str]] = set()
    rows: dict[tuple[int, int], Events] = {}
    for event in events:
        assert event["ph"] in ("X", "M", "i")
        assert type(event["pid"]) is int
        assert type(event["tid"]) is int
        if event["ph"] == "M":
            assert (event["pid"], event["tid"], event["name"]) not in named, "named twice"
            named.add((event["pid"], event["tid"], event["name"]))
            continue
        assert event["ts"] >= 0
        assert (event["pid"], 0, "process_name") in named
        assert (event["pid"], event["tid"], "thread_name") in named
        if event["ph"] == "X":
            assert event["dur"] >= 0
            rows.setdefault((event["pid"], event["tid"]), []).append(event)
    for row in rows.values():
        nests(row)
    return [event for event in events if event["ph"] != "M"]


def nests(row: Events) -> None:
    """Each of a row's spans lies inside another one or beside it."""
    open_until: list[float] = []
    for event in sorted(row, key=lambda one: (one["ts"], -one["dur"])):
        end = round(event["ts"] + event["dur"], 3)
        while open_until and open_until[-1] <= event["ts"]:
            open_until.pop()
        assert not open_until or end <= open_until[-1] + 0.002, f"{event} overlaps what it does not lie in"
        open_until.append(end)


@settings(deadline=None)
@given(st.lists(st.tuples(st.floats(0, 100), st.floats(0, 100)), max_size=30))
def test_bars_that_overlap_get_rows_of_their_own(spans: list[tuple[float, float]]) -> None:
    sheet = Sheet()
    sheet.process(7, "rank")
    sheet.flat(
        7, "wire", [Bar(f"wire {n}", start, start + length) for n, (start, length) in enumerate(spans)]
    )
    events = check(sheet.document())
    assert len(events) == len(spans)
    rows: dict[int, Events] = {}
    for event in events:
        rows.setdefault(event["tid"], []).append(event)
    for row in rows.values():
        row.sort(key=lambda one: (one["ts"], one["dur"]))
        for before, after in pairwise(row):
            assert before["ts"] + before["dur"] <= after["ts"] + 0.002


def test_the_check_sees_what_is_wrong() -> None:
    sheet = Sheet()
    sheet.process(1, "rank")
    sheet.nested(1, "row", [Bar("a", 0.0, 2.0), Bar("b", 1.0, 3.0)])
    with pytest.raises(AssertionError, match="overlaps"):
        check(sheet.document())


# -- a journal -------------------------------------------------------------------------------------------


def fleet() -> RefitMembership:
    return RefitMembership.full(train_world_size=3, shard_sizes=(1, 2), stage_heads=(0, 2))


def test_a_journal_keeps_what_failed_until_the_next_success() -> None:
    journal = Journal()
    with suppress(RefitError), journal.operation("sync_weights"):
        late = journal.called("recv", 3, 11)
        raise RefitError("no")
    with journal.operation("sync_weights"):
        journal.answered(late, Times(0.0, 1.0), "")  # what comes after the end changes nothing
        journal.answered(journal.called("recv", 4, 12), Times(0.0, 1.0))
        trace = journal.close(fleet())
    assert [(one.what, one.error) for one in trace.operations] == [
        ("sync_weights", "RefitError: no"),
        ("sync_weights", ""),
    ]
    names = [event["name"] for event in check(trace.to_json())]
    assert sorted(names) == ["sync_weights", "sync_weights FAILED", "transfer", "transfer LOST"]
    with journal.operation("sync_weights"):
        assert len(journal.close(fleet()).operations) == 1, "a success begins a new one"


def test_a_journal_of_a_fleet_that_fails_for_ever_stays_small() -> None:
    journal = Journal()
    for _ in range(3 * MOST):
        with pytest.raises(RefitError), journal.operation("sync_weights"):
            raise RefitError("no")
    assert len(journal.close(fleet()).operations) == MOST


def test_rows_are_called_by_role() -> None:
    journal = Journal()
    with journal.operation("sync_weights"):
        for seat in range(6):
            journal.called("ask", seat, 1)
        document = journal.close(fleet()).to_json()
    check(document)
    assert [e["args"]["name"] for e in document["traceEvents"] if e["name"] == "process_name"] == [
        "leader",
        "trainer 0, stage 0",
        "trainer 1",
        "trainer 2, stage 1",
        "shard 0",
        "shard 1, rank 0",
        "shard 1, rank 1",
    ]


def test_a_report_that_came_by_letter_has_no_trace(tmp_path: Path) -> None:
    with Journal().operation("sync_weights"):
        pass
    journal = Journal()
    report = RefitReport(
        version=1,
        epoch=Epoch(1, 1),
        members=(0,),
        absent={},
        nbytes=4,
        seconds=1.0,
        wire_s=0.5,
        rebuilt=False,
        trace=journal.close(fleet()),
    )
    back = read_report(json.loads(json.dumps(write_report(report))))
    assert back == report  # a trace is no part of what a report says
    with pytest.raises(RefitError, match="rank 0 of the trainers"):
        back.to_chrome_trace(tmp_path / "trace.json")


# -- refits ------------------------------------------------------------------------------------------------


@contextmanager
def threads(**options: Any) -> Iterator[tuple[CollectiveWeightSynchronizer, ThreadGeneration]]:
    policy = ThreadPolicy(ToySource, stages=STAGES)
    generation = ThreadGeneration(ToySink, STAGES, shard_sizes=(1, 2), train_world_size=STAGES)
    sync = CollectiveWeightSynchronizer(policy, generation, bucket_bytes=64 << 10, **options)
    try:
        sync.init_communicator(timeout=LIMIT_S)
        yield sync, generation
    finally:
        generation.close()
        policy.close()
        sync.shutdown()


def written(report: RefitReport, folder: Path) -> dict[str, Any]:
    report.to_chrome_trace(folder / "trace.json")
    document: dict[str, Any] = json.loads((folder / "trace.json").read_text())
    return document


def rows_of(document: dict[str, Any]) -> dict[tuple[str, str], Events]:
    """The spans by the names of process and thread; rows "wire", "wire (2)", ... as one."""
    named = {(e["pid"], e["tid"], e["name"]): e["args"] for e in document["traceEvents"] if e["ph"] == "M"}
    rows: dict[tuple[str, str], Events] = {}
    for event in document["traceEvents"]:
        if event["ph"] == "X":
            process = named[event["pid"], 0, "process_name"]["name"]
            thread = named[event["pid"], event["tid"], "thread_name"]["name"]
            rows.setdefault((process, thread.partition(" (")[0]), []).append(event)
    return rows


def inside(child: dict[str, Any], parents: Events) -> bool:
    return any(
        one["ts"] - 0.002 <= child["ts"] and child["ts"] + child["dur"] <= one["ts"] + one["dur"] + 0.002
        for one in parents
    )


def buckets_lie_in_transfers(rows: dict[tuple[str, str], Events]) -> None:
    for (process, lane), spans in rows.items():
        if process != "leader" and lane != "calls":
            transfers = [one for one in rows[process, "calls"] if one["name"].startswith("transfer")]
            assert spans
            assert all(inside(span, transfers) for span in spans), (process, lane)


def test_a_clean_refit_of_all_ranks(tmp_path: Path) -> None:
    with threads() as (sync, _):
        first = sync.sync_weights()
        sync.mark_stale()
        second = sync.refit()
    assert first.trace is not None
    assert [one.what for one in first.trace.operations] == ["init_communicator", "sync_weights"]
    document = written(second, tmp_path)
    check(document)
    rows = rows_of(document)
    shards = ["shard 0", "shard 1, rank 0", "shard 1, rank 1"]
    trainers = ["trainer 0, stage 0", "trainer 1, stage 1"]
    assert {process for process, _ in rows} == {"leader", *trainers, *shards}
    for name in trainers:
        assert {lane for process, lane in rows if process == name} == {
            "calls",
            "gather",
            "pack",
            "wire",
            "digest",
        }
    for name in shards:
        assert [call["name"] for call in rows[name, "calls"]] == [
            *("prepare", "transfer", "pause", "commit", "resume")
        ]
        assert {lane for process, lane in rows if process == name} >= {"calls", "wire", "digest", "unpack"}
    buckets_lie_in_transfers(rows)
    leader = rows["leader", "refit"]
    operations = [one for one in leader if "number" in one["args"]]
    assert [one["name"] for one in operations] == ["sync_weights"]
    assert all(inside(step, operations) for step in leader)
    assert {"prepare", "transfer", "commit", "publish"} <= {one["name"] for one in leader}
    # no span a tensor: both stages have eight tensors, a plan has as many buckets as its bytes need
    report = second.stages[0][0]
    assert len(report.spans) <= 8 * report.buckets
    assert all(one["error_s"] == 0.0 for one in document["otherData"]["ranks"])


def test_a_failed_try_and_what_mended_it_are_in_one_trace(tmp_path: Path) -> None:
    with threads() as (sync, generation):
        sync.sync_weights()
        generation.workers[STAGES + 1].faults = FaultInjector([Fault(action="raise", bucket=1)])
        with pytest.raises(RefitAborted):
            sync.sync_weights()
        assert sync.reconcile_communicator([], force=True)
        report = sync.sync_weights()
        later = sync.sync_weights()
    document = written(report, tmp_path)
    check(document)
    rows = rows_of(document)
    leader = [one["name"] for one in rows["leader", "refit"]]
    wanted = ["sync_weights FAILED", "settle", "reconcile_communicator", "rebuild", "sync_weights", "commit"]
    assert [name for name in leader if name in wanted] == wanted
    victim = [one["name"] for one in rows["shard 1, rank 0", "calls"]]
    assert [one for one in victim if one != "prepare"] == [
        *("transfer FAILED", "settle", "rebuild", "transfer", "pause", "commit", "resume")
    ]
    failed = next(one for one in rows["shard 1, rank 0", "calls"] if one["name"] == "transfer FAILED")
    assert "InjectedFault" in failed["args"]["error"]
    assert rows["shard 1, rank 0", "cut"], "what was under way when it failed is seen"
    buckets_lie_in_transfers(rows)
    assert later.trace is not None
    assert [one.what for one in later.trace.operations] == ["sync_weights"]


def test_a_killed_shard_is_seen_from_the_leader(tmp_path: Path) -> None:
    policy = LocalPolicy(ToySource, stages=1)
    generation = LocalGeneration(ToySink, 1, shard_sizes=(1, 1), train_world_size=1)
    sync = CollectiveWeightSynchronizer(policy, generation, bucket_bytes=64 << 10, roster_ttl_s=1.5)
    try:
        sync.init_communicator(timeout=LIMIT_S)
        sync.sync_weights()
        generation.process(1).call_now("arm", Fault(action="kill", bucket=1)).result(LIMIT_S)
        report = sync.refit(lambda: generation.dead_shards)
    finally:
        generation.close()
        policy.close()
        sync.shutdown()
    assert report.members == (0,)
    document = written(report, tmp_path)
    drawn = check(document)
    rows = rows_of(document)
    (lost,) = [one for one in rows["shard 1", "calls"] if one["name"] == "transfer LOST"]
    assert "SIGKILL" in lost["args"]["error"]
    (failed,) = [one for one in rows["leader", "refit"] if one["name"] == "sync_weights FAILED"]
    assert "SIGKILL" in failed["args"]["outcome"]
    assert inside(lost, [failed])
    assert [(one["name"], one["pid"]) for one in drawn if one["ph"] == "i"] == [("lost", 2 + 2)]
    first, *rest = [one["name"] for one in rows["shard 0", "calls"] if one["name"] != "prepare"]
    assert first.startswith("transfer")  # it may have had everything before the other one died
    assert rest == ["settle", "rebuild", "transfer", "pause", "commit", "resume"]


APART = 5000
RECEIVER = """
import sys
from dprims.engines.spmd import SpmdReceiver
from dprims.testing.weights import ToySink

with SpmdReceiver(ToySink(0, 0, 1), backend=sys.argv[1], shard=0, shard_sizes=(1,), fleet="apart"):
    sys.stdin.read()
"""


def test_a_rank_whose_clock_is_another_is_drawn_on_the_leaders(redis_server: Any, tmp_path: Path) -> None:
    apart = [
        shutil.which("unshare") or "unshare",
        "--time",
        "--monotonic",
        str(APART),
        "--fork",
        "--kill-child",
    ]
    try:
        subprocess.run([*apart, "true"], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"needs root, and unshare with --time: {error}")
    url = redis_server.url
    source = ToySource(0)
    with (
        subprocess.Popen([*apart, sys.executable, "-c", RECEIVER, url], stdin=subprocess.PIPE) as receiver,
        SpmdRefit(
            source, backend=url, fleet="apart", rank=0, world_size=1, stage=0, bucket_bytes=64 << 10
        ) as refit,
    ):
        try:
            refit.init_communicator(LIMIT_S)
            document = written(refit.sync_weights(), tmp_path)
        finally:
            receiver.communicate(timeout=LIMIT_S)
    check(document)
    trainer, shard = document["otherData"]["ranks"]
    assert (trainer["offset_s"], trainer["error_s"]) == (0.0, 0.0)
    assert abs(shard["offset_s"] + APART) <= shard["error_s"] < 1.0
    labels = [e["args"]["labels"] for e in document["traceEvents"] if e["name"] == "process_labels"]
    assert labels[0] == "the leader's clock"
    assert labels[1].startswith("clock within ")
    rows = rows_of(document)
    buckets_lie_in_transfers(rows)
    (transfer,) = [one for one in rows["leader", "refit"] if one["name"] == "transfer"]
    slack = shard["error_s"] * 1e6
    for one in rows["shard 0", "calls"]:
        if one["name"] == "transfer":
            assert transfer["ts"] - slack <= one["ts"]
            assert one["ts"] + one["dur"] <= transfer["ts"] + transfer["dur"] + slack
    assert LEADER in {event["pid"] for event in document["traceEvents"]}
