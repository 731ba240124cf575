"""Whole transfers between real processes over gloo, and in one process over a group of one."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dprims.exceptions import HandshakeMismatch, RefitError
from dprims.synchronizer.group import CommGroup, join_store, leader_store
from dprims.synchronizer.guard import Guard
from dprims.synchronizer.interfaces import LendingSink, WeightSink, WeightSource
from dprims.synchronizer.lanes import CpuLane
from dprims.synchronizer.plan import Plan, TensorMeta
from dprims.synchronizer.sinks import DictSink, LoadWeightsSink
from dprims.synchronizer.sources import DictSource
from dprims.synchronizer.transfer import TransferStats, lacks_memory, participate, receive, send
from dprims.testing.transfer_rank import Outcome, TransferFleet, checksum, mixed_model

LIMIT_S = 60.0
BUCKET = 64 << 10


def plan_of(seed: int = 0, **settings: Any) -> Plan:
    return Plan.build(DictSource(mixed_model(seed)).metadata(), **({"bucket_bytes": BUCKET} | settings))


@pytest.fixture(scope="module")
def fleet() -> Iterator[TransferFleet]:
    with TransferFleet(3) as fleet:
        yield fleet


@pytest.fixture
def group() -> Iterator[CommGroup]:
    """A group of one rank: everything is real, and nobody else is there."""
    store, _, _ = leader_store("localhost")
    group = CommGroup.build(store, "one", 0, 1, backend="gloo", device="cpu", timeout_s=10, op_timeout_s=10)
    yield group
    group.release()


class Pair:
    """Two ranks on two threads of this process, for sinks and sources that a test looks into."""

    def __init__(self) -> None:
        self._store, host, port = leader_store("localhost")
        self._threads = ThreadPoolExecutor(2)
        self._versions = count(1)
        stores = [self._store, join_store(host, port)]
        self.groups = list(self._threads.map(self._build, stores, range(2)))

    @staticmethod
    def _build(store: Any, rank: int) -> CommGroup:
        return CommGroup.build(
            store, "pair", rank, 2, backend="gloo", device="cpu", timeout_s=20, op_timeout_s=20
        )

    def refit(
        self, source: Any, sink: Any, *, kv_scales: Mapping[str, float] | None = None, **settings: Any
    ) -> TransferStats:
        """One whole transfer, and its commit; what the receiver says of it."""
        plan = Plan.build(
            source.metadata(), kv_scales=kv_scales or (), **({"bucket_bytes": BUCKET} | settings)
        )
        version = next(self._versions)
        sent = self._threads.submit(send, source, self.groups[0], plan, guard(), kv_scales=kv_scales)

        def take() -> TransferStats:
            sink.begin(version, plan.metas)
            return receive(sink, self.groups[1], plan, guard())

        received = self._threads.submit(take)
        sent.result(LIMIT_S)
        stats = received.result(LIMIT_S)
        sink.commit(version)
        return stats

    def close(self) -> None:
        for group in self.groups:
            group.release()
        self._threads.shutdown()


@pytest.fixture(scope="module")
def pair() -> Iterator[Pair]:
    pair = Pair()
    yield pair
    pair.close()


def guard() -> Guard:
    return Guard(deadline=time.monotonic() + 20.0)


def results(futures: Any) -> list[Outcome]:
    return [future.result(LIMIT_S) for future in futures]


@pytest.mark.parametrize("sink", ["dict", "in place", "load", "load in place"])
@pytest.mark.parametrize("verify", [True, False])
def test_every_dtype_and_shape_arrives_bit_by_bit(fleet: TransferFleet, sink: str, verify: bool) -> None:
    plan = plan_of()
    assert {b.lane for b in plan.buckets} == {"direct", "packed"}
    outcomes = results(fleet.call("build", f"clean/{sink}/{verify}", plan=plan.to_bytes()))
    assert [outcome.error for outcome in outcomes] == [None] * 3
    for seed in (1, 2):
        outcomes = results(fleet.call("transfer", plan.to_bytes(), seed=seed, sink=sink, verify=verify))
        assert [outcome.error for outcome in outcomes] == [None] * 3
        assert {outcome.checksum for outcome in outcomes} == {checksum(mixed_model(seed))}
        assert not any(outcome.torn for outcome in outcomes)
        contents = {outcome.stats.content for outcome in outcomes if outcome.stats}
        assert len(contents) == 1
        assert bool(contents.pop()) == verify


@pytest.mark.parametrize(
    "settings",
    [
        {"bucket_bytes": 8192, "align": 256},
        {"bucket_bytes": 16 << 20},
        {"align": 16},
        {"direct_bytes": 1},
        {"bucket_bytes": 4 << 20, "direct_bytes": 4 << 20},
    ],
)
def test_every_way_to_lay_out_the_same_model(fleet: TransferFleet, settings: dict[str, int]) -> None:
    plan = plan_of(**settings).to_bytes()
    results(fleet.call("build", f"layout/{settings}", plan=plan))
    outcomes = results(fleet.call("transfer", plan, seed=3))
    assert [outcome.error for outcome in outcomes] == [None] * 3
    assert {outcome.checksum for outcome in outcomes} == {checksum(mixed_model(3))}


def test_equal_weights_have_equal_content_and_others_have_not(fleet: TransferFleet) -> None:
    plan = plan_of().to_bytes()
    results(fleet.call("build", "content", plan=plan))
    contents = []
    for seed in (5, 5, 6):
        outcome = results(fleet.call("transfer", plan, seed=seed))[0]
        assert outcome.stats is not None
        contents.append(outcome.stats.content)
    assert contents[0] == contents[1] != contents[2]


@pytest.mark.parametrize("sink", ["dict", "in place", "load"])
def test_scales_travel_after_the_weights(fleet: TransferFleet, sink: str) -> None:
    scales = {"layer.0.v_scale": 0.25, "layer.0.k_scale": 1.5}
    plan = plan_of(kv_scales=scales).to_bytes()
    results(fleet.call("build", f"scales/{sink}", plan=plan))
    outcomes = results(fleet.call("transfer", plan, seed=1, kv_scales=scales, sink=sink))
    assert [outcome.error for outcome in outcomes] == [None] * 3
    for rank in fleet.ranks[1:]:
        assert rank.call("scalars", list(scales)).result(LIMIT_S) == [0.25, 1.5]


def test_stats_explain_the_time(fleet: TransferFleet) -> None:
    plan = plan_of()
    results(fleet.call("build", "stats", plan=plan.to_bytes()))
    sender, receiver, _ = results(fleet.call("transfer", plan.to_bytes(), seed=1))
    for outcome in (sender, receiver):
        stats = outcome.stats
        assert stats is not None
        assert (stats.nbytes, stats.buckets) == (plan.nbytes, len(plan.buckets))
        assert 0 < stats.wire_s <= stats.seconds
        assert stats.gb_per_s > 0
        assert all(span.stop >= span.start for span in stats.spans)
        assert stats.phase_s("wire") > 0
        assert stats.phase_s("digest") > 0
    assert sender.stats.phase_s("pack") > 0
    assert sender.stats.buffer_bytes <= CpuLane.depth * BUCKET
    assert receiver.stats.buffer_bytes == 0, "bytes arrive where they are staged"
    assert receiver.stats.staging_bytes >= plan.nbytes


def flawed(**changes: Any) -> WeightSource:
    """A source that does not do what its plan says."""
    tensors = {f"w{i}": torch.full((100,), float(i)) for i in range(10)}

    class Flawed:
        def metadata(self) -> list[TensorMeta]:
            return list(DictSource(tensors).metadata())

        def __iter__(self) -> Iterator[tuple[str, Tensor]]:
            names = changes.get("names", list(tensors))
            for name in names:
                yield name, changes.get(name, tensors.get(name, torch.zeros(1)))

    return Flawed()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"names": ["w0", "w1", "w1", "w2"]}, "yields 'w1' as tensor 2, for the second time; due is 'w2'"),
        (
            {"names": ["w0", "w2", "w1"]},
            r"yields 'w2' as tensor 1, out of turn \(it is tensor 2\); due is 'w1'",
        ),
        ({"names": ["w0", "other"]}, "yields 'other' as tensor 1, which is not in the plan"),
        ({"names": ["w0", "w1"]}, r"ended before 'w2' float32\[100\]: 8 of 10 are missing"),
        ({"names": [*(f"w{i}" for i in range(10)), "more"]}, "'more' as tensor 10.*nothing is due any more"),
        ({"w3": torch.zeros(99)}, r"float32\[99\] for 'w3' float32\[100\]: plan again"),
        ({"w3": torch.zeros(100).half()}, r"float16\[100\] for 'w3' float32\[100\]: plan again"),
        ({"w3": torch.zeros(100, device="meta")}, "'w3'.* is on meta, the group is on cpu"),
    ],
)
@pytest.mark.parametrize("bucket_bytes", [512, 1 << 20])
def test_a_source_that_strays_from_the_plan_is_named(
    group: CommGroup, changes: dict[str, Any], words: str, bucket_bytes: int
) -> None:
    source = flawed(**changes)
    plan = Plan.build(source.metadata(), bucket_bytes=bucket_bytes)
    with pytest.raises(RefitError, match=words):
        send(source, group, plan, guard())
    with pytest.raises(RefitError, match=words):
        participate(source, plan, guard(), device=torch.device("cpu"))


def test_a_scale_without_a_value_is_named(group: CommGroup) -> None:
    plan = Plan.build([TensorMeta("w0", (100,), "float32")], bucket_bytes=512, kv_scales=["k", "v"])
    with pytest.raises(RefitError, match="no value for the scale 'v'"):
        send(DictSource({"w0": torch.zeros(100)}), group, plan, guard(), kv_scales={"k": 1.0})


def test_what_the_source_raises_comes_through_and_ends_the_group(group: CommGroup) -> None:
    class Broken:
        def metadata(self) -> list[TensorMeta]:
            return [TensorMeta("w", (4,), "float32")]

        def __iter__(self) -> Iterator[tuple[str, Tensor]]:
            raise OSError("the disk is gone")

    source = Broken()
    with pytest.raises(OSError, match="the disk is gone"):
        send(source, group, Plan.build(source.metadata(), bucket_bytes=512), guard())
    with pytest.raises(RefitError, match="the group carries nothing"):
        group.broadcast(torch.zeros(1))


def test_an_empty_plan_is_a_transfer_of_nothing(group: CommGroup) -> None:
    stats = send(DictSource({}), group, Plan.build([], bucket_bytes=512), guard())
    assert (stats.nbytes, stats.buckets, stats.gb_per_s) == (0, 0, 0.0)


def test_progress_is_told_bucket_by_bucket(group: CommGroup) -> None:
    plan = plan_of()
    seen: list[int] = []
    send(DictSource(mixed_model(0)), group, plan, guard(), on_bucket=seen.append)
    assert seen == list(range(len(plan.buckets)))


def test_a_receiver_without_memory_refuses() -> None:
    sink = DictSink({"huge": torch.empty(1 << 60, device="meta")})
    plan = Plan.build([TensorMeta("huge", (1 << 60,), "float32")], bucket_bytes=1 << 60)
    assert "bytes of staging" in str(lacks_memory(sink, [plan], torch.device("cpu")))
    assert lacks_memory(None, [plan], torch.device("cpu")) is None
    small = plan_of()
    assert lacks_memory(DictSink(mixed_model(0)), [small], torch.device("cpu")) is None


@pytest.mark.parametrize(
    ("coming", "words"),
    [
        (
            [TensorMeta("a", (4,), "float32")],
            r"the sink holds 'b' float32\[2\], which is not sent: 1 tensors are",
        ),
        (
            [TensorMeta("a", (5,), "float32"), TensorMeta("b", (2,), "float32")],
            r"holds 'a' float32\[4\], and 'a' float32\[5\] is sent",
        ),
        (
            [TensorMeta("a", (4,), "int32"), TensorMeta("b", (2,), "float32")],
            r"holds 'a' float32\[4\], and 'a' int32\[4\] is sent",
        ),
    ],
)
def test_a_sink_that_holds_something_else_refuses(coming: list[TensorMeta], words: str) -> None:
    sink = DictSink({"a": torch.zeros(4), "b": torch.zeros(2)})
    with pytest.raises(HandshakeMismatch, match=words):
        sink.begin(1, coming)


LANES = pytest.mark.parametrize("direct_bytes", [1, BUCKET], ids=["direct", "packed"])
IN_PLACE = pytest.mark.parametrize("in_place", [False, True], ids=["staged", "in place"])


@LANES
@IN_PLACE
@pytest.mark.parametrize("rows", [10, 1000], ids=["one bucket", "many"])
def test_a_stage_with_a_tied_head_alone_receives_it(
    pair: Pair, direct_bytes: int, in_place: bool, rows: int
) -> None:
    """A last pipeline stage holds the head and not the embedding, whose bytes are those that travel."""
    weight = torch.randn(rows, 100)
    live = {"norm": torch.zeros(3), "head": torch.zeros(rows, 100)}
    source = DictSource({"embed": weight, "head": weight, "norm": torch.ones(3), "other": torch.ones(500)})
    pair.refit(source, DictSink(live, in_place=in_place), direct_bytes=direct_bytes)
    assert live["head"].equal(weight)
    assert live["norm"].tolist() == [1.0] * 3
    assert set(live) == {"norm", "head"}


@LANES
@IN_PLACE
def test_every_name_of_a_shared_tensor_is_written(pair: Pair, direct_bytes: int, in_place: bool) -> None:
    weight = torch.randn(1000, 10)
    live = {name: torch.zeros(1000, 10) for name in ("c", "b")}
    pair.refit(
        DictSource({"a": weight, "b": weight, "c": weight}),
        DictSink(live, in_place=in_place),
        direct_bytes=direct_bytes,
    )
    assert live["b"].equal(weight)
    assert live["c"].equal(weight)


@LANES
@IN_PLACE
def test_an_engine_is_given_aliases_in_one_order_on_every_rank(
    pair: Pair, direct_bytes: int, in_place: bool
) -> None:
    """What it does with each may be a collective; that of a set of names differs between processes."""
    weights = {f"w{i}": torch.full((64,), float(i)) for i in range(12)}
    tensors = weights | {f"alias of {name}": tensor for name, tensor in weights.items()}
    seen: list[str] = []
    sink = LoadWeightsSink(
        lambda pairs: seen.extend(name for name, _ in pairs), device="cpu", in_place=in_place
    )
    pair.refit(DictSource(tensors), sink, direct_bytes=direct_bytes)
    assert [name for name in seen if name in weights] == list(weights)
    assert [name for name in seen if name not in weights] == [f"alias of {name}" for name in weights]


def test_an_engine_in_place_is_called_a_few_times_a_bucket(pair: Pair) -> None:
    weights = {f"w{i}": torch.full((64,), float(i)) for i in range(200)}
    tensors = weights | {f"alias of {name}": tensor for name, tensor in weights.items()}
    scales = {f"scale {i}": i / 8 for i in range(200)}
    calls: list[list[str]] = []
    sink = LoadWeightsSink(
        lambda pairs: calls.append([name for name, _ in pairs]), device="cpu", in_place=True
    )
    pair.refit(DictSource(tensors), sink, kv_scales=scales, bucket_bytes=1 << 20)
    assert sorted(name for names in calls for name in names) == sorted([*tensors, *scales])
    assert len(calls) < 20


@IN_PLACE
def test_so_many_scales_that_they_travel_direct_arrive(pair: Pair, in_place: bool) -> None:
    scales = {f"layer.{i}.scale": i / 8 for i in range(1100)}
    live = {"w": torch.zeros(3), **{name: torch.zeros(()) for name in scales}}
    sink = DictSink(live, in_place=in_place)
    pair.refit(DictSource({"w": torch.ones(3)}), sink, kv_scales=scales, bucket_bytes=4096)
    assert {name: live[name].item() for name in scales} == scales


@LANES
@IN_PLACE
def test_what_requires_grad_is_sent_and_received_into(pair: Pair, direct_bytes: int, in_place: bool) -> None:
    """Also by a source of the user's own, which yields parameters as they are."""
    weights = {f"w{i}": nn.Parameter(torch.randn(8, 64)) for i in range(4)}
    weights |= {"bias": nn.Parameter(torch.randn(7)), "strided": nn.Parameter(torch.randn(30, 20).t())}

    class Own:
        def metadata(self) -> Sequence[TensorMeta]:
            return DictSource(weights).metadata()

        def __iter__(self) -> Iterator[tuple[str, Tensor]]:
            return iter(weights.items())

    for source in (DictSource(weights), Own()):
        live: dict[str, Tensor] = {name: nn.Parameter(torch.zeros(w.shape)) for name, w in weights.items()}
        pair.refit(source, DictSink(live, in_place=in_place), direct_bytes=direct_bytes)
        assert all(live[name].equal(weight) for name, weight in weights.items())
        assert all(live[name].requires_grad == in_place for name in weights)
        assert all(weight.grad_fn is None for weight in live.values())


@LANES
@IN_PLACE
def test_what_is_lazily_negated_or_conjugated_arrives(pair: Pair, direct_bytes: int, in_place: bool) -> None:
    plain, turned = torch.randn(80, 64), torch.randn(80, 64, dtype=torch.complex64)
    weights = {"a": plain, "b": torch._neg_view(plain), "c": turned, "d": turned.conj()}
    weights["one"] = turned.flatten()[2::2][:1]
    live = {name: torch.zeros(tensor.shape, dtype=tensor.dtype) for name, tensor in weights.items()}
    pair.refit(DictSource(weights), DictSink(live, in_place=in_place), direct_bytes=direct_bytes)
    assert all(live[name].equal(tensor) for name, tensor in weights.items())


@LANES
def test_staging_is_announced_for_a_name_that_is_shared(pair: Pair, direct_bytes: int) -> None:
    """As many bytes as the sink holds afterwards, whichever of the names it holds."""
    weight, more = torch.randn(1024, 10), torch.ones(7)
    source = DictSource({"a": weight, "b": weight, "c": weight, "more": more})
    for names in (["a"], ["b"], ["b", "c"], ["a", "c"], []):
        live = {name: torch.zeros(1024, 10) for name in names}
        sink = DictSink(live)
        plan = Plan.build(source.metadata(), bucket_bytes=BUCKET, direct_bytes=direct_bytes)
        said = sink.staging_bytes(plan)
        pair.refit(source, sink, direct_bytes=direct_bytes)
        assert said == sum({tensor.data_ptr(): tensor.nbytes for tensor in live.values()}.values())


def test_the_protocols_are_satisfied() -> None:
    assert isinstance(DictSource({}), WeightSource)
    assert isinstance(DictSink({}), WeightSink)
    assert isinstance(DictSink({}), LendingSink)
