"""Cutting a bucket into views: each tensor is the bytes that the plan says, whatever its neighbours are."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dprims.synchronizer.flights import BucketLayout
from dprims.synchronizer.packing import dtype_of, pack
from dprims.synchronizer.plan import Bucket, Plan, TensorMeta
from dprims.synchronizer.sinks import DictSink

DTYPES = ("uint8", "bfloat16", "float32", "float8_e4m3fn", "complex128", "int16")
EXTENTS = st.integers(0, 5)
SHAPES = st.one_of(
    st.lists(EXTENTS, max_size=3).map(tuple),
    st.tuples(EXTENTS, st.sampled_from([64, 256])),  # rows that leave no gap, so neighbours are one stack
    st.tuples(st.just(256), st.just(4)),
)


def metas_of(shapes: list[tuple[tuple[int, ...], str]]) -> list[TensorMeta]:
    return [TensorMeta(f"t{i}", shape, dtype) for i, (shape, dtype) in enumerate(shapes)]


def bucket_memory(nbytes: int) -> torch.Tensor:
    """Some bytes, inside a larger memory as a wire buffer is."""
    return (torch.arange(nbytes + 512) % 251).to(torch.uint8)[256 : 256 + nbytes]


@given(st.lists(st.tuples(SHAPES, st.sampled_from(DTYPES)), min_size=1, max_size=24))
def test_each_tensor_is_its_bytes(shapes: list[tuple[tuple[int, ...], str]]) -> None:
    plan = Plan.build(metas_of(shapes), bucket_bytes=4096)
    for bucket in plan.buckets:
        if not bucket.whole:
            continue
        memory = bucket_memory(bucket.nbytes)
        views = BucketLayout.of(bucket, plan, None).on(memory)
        assert list(views) == [plan.tensors[piece.tensor].name for piece in bucket.pieces]
        for piece in bucket.pieces:
            meta = plan.tensors[piece.tensor]
            view = views[meta.name]
            assert (view.shape, view.dtype) == (meta.shape, dtype_of(meta.dtype))
            assert view.is_contiguous()
            here = memory[piece.offset : piece.offset + piece.stop]
            assert view.reshape(-1).view(torch.uint8).equal(here)
            assert not view.numel() or view.data_ptr() == here.data_ptr()


def test_experts_are_cut_in_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    experts = [((rows, 64), "bfloat16") for rows in (8, 16, 8, 24) * 5]
    plan = Plan.build(metas_of([*experts, ((8, 32), "bfloat16"), ((4,), "float32")]), bucket_bytes=1 << 20)
    calls: list[tuple[int, ...]] = []
    split = torch.unsafe_split_with_sizes

    def counted(stack: torch.Tensor, rows: tuple[int, ...]) -> tuple[torch.Tensor, ...]:
        calls.append(rows)
        return split(stack, rows)

    monkeypatch.setattr(torch, "unsafe_split_with_sizes", counted)
    for bucket in plan.buckets:
        BucketLayout.of(bucket, plan, None).on(bucket_memory(bucket.nbytes))
    assert sum(map(len, calls)) == 20
    assert len(calls) <= len(plan.buckets)


def test_what_was_cut_can_be_written_to_and_trained() -> None:
    """A user of the weights need not know that they lie beside each other."""
    plan = Plan.build(metas_of([((4, 64), "float32")] * 3), bucket_bytes=4096)
    [bucket] = plan.buckets[-1:]
    views = BucketLayout.of(bucket, plan, None).on(torch.zeros(bucket.nbytes, dtype=torch.uint8))
    name, weight = next(iter(views.items()))
    factor = torch.ones(4, 64, requires_grad=True)
    weight.add_(factor)
    weight.sum().backward()
    assert factor.grad is not None
    assert all(not view.any() for other, view in views.items() if other != name)


class CountingSink(DictSink):
    """A user's sink with a `write` of its own."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        super().__init__(tensors)
        self.written: list[str] = []

    def write(self, name: str, tensor: torch.Tensor) -> None:
        self.written.append(name)
        super().write(name, tensor)


def arrive(sink: DictSink, names: Sequence[str] = ("a", "b")) -> None:
    """Tensors of sevens, all in one bucket that the sink lends, and their commit."""
    plan = Plan.build([TensorMeta(name, (2,), "float32") for name in names], bucket_bytes=1 << 16)
    sink.begin(1, plan.metas)
    [bucket] = plan.buckets
    memory = sink.lend_bucket(plan, bucket)
    assert memory is not None
    tensors = BucketLayout.of(bucket, plan, None).on(memory)
    for tensor in tensors.values():
        tensor.fill_(7)
    sink.write_bucket(tensors, lent=True)
    sink.commit(1)


def test_a_write_of_the_users_own_is_called_for_lent_tensors_too() -> None:
    sink = CountingSink({"a": torch.zeros(2), "b": torch.zeros(2)})
    arrive(sink)
    assert sink.written == ["a", "b"]
    assert [tensor.tolist() for tensor in sink.tensors.values()] == [[7.0] * 2] * 2


def test_a_write_that_was_set_on_one_sink_is_called_for_lent_tensors_too() -> None:
    sink = DictSink({"a": torch.zeros(2), "b": torch.zeros(2)})
    written: list[str] = []
    theirs = sink.write

    def write(name: str, tensor: torch.Tensor) -> None:
        written.append(name)
        theirs(name, tensor)

    sink.write = write  # type: ignore[method-assign]
    arrive(sink)
    assert written == ["a", "b"]
    assert [tensor.tolist() for tensor in sink.tensors.values()] == [[7.0] * 2] * 2


class GenerousSink(DictSink):
    """A user's sink that lends a bucket always: in place, and with tensors that it does not hold."""

    def lend_bucket(self, plan: Plan, bucket: Bucket) -> torch.Tensor:
        return self._lend(bucket.nbytes)


def test_what_was_lent_in_place_becomes_live() -> None:
    live = {"a": torch.zeros(2), "b": torch.zeros(2)}
    places = {name: tensor.data_ptr() for name, tensor in live.items()}
    arrive(GenerousSink(live, in_place=True))
    assert [tensor.tolist() for tensor in live.values()] == [[7.0] * 2] * 2
    assert {name: tensor.data_ptr() for name, tensor in live.items()} == places


@pytest.mark.parametrize("in_place", [False, True])
def test_what_was_lent_and_is_not_held_is_ignored(in_place: bool) -> None:
    live = {"a": torch.zeros(2)}
    arrive(GenerousSink(live, in_place=in_place))
    assert {name: tensor.tolist() for name, tensor in live.items()} == {"a": [7.0] * 2}


@given(st.lists(st.tuples(SHAPES, st.sampled_from(DTYPES)), min_size=1, max_size=24))
def test_what_was_packed_is_what_is_unpacked(shapes: list[tuple[tuple[int, ...], str]]) -> None:
    """By its runs as without them, in one part or many; gaps are zeros, whatever lay there."""
    plan = Plan.build(metas_of(shapes), bucket_bytes=4096)
    for bucket in plan.buckets:
        if bucket.lane != "packed":
            continue
        metas = [plan.tensors[piece.tensor] for piece in bucket.pieces]
        tensors = [
            bucket_memory(meta.nbytes + 256)[: meta.nbytes]
            .clone()
            .view(dtype_of(meta.dtype))
            .view(meta.shape)
            for meta in metas
        ]
        offsets = [piece.offset for piece in bucket.pieces]
        plain = torch.full((bucket.nbytes,), 255, dtype=torch.uint8)
        pack(plain, tensors, offsets)
        for part_bytes in (None, 256, 1024):
            layout = BucketLayout.of(bucket, plan, part_bytes)
            memory = torch.full((bucket.nbytes,), 255, dtype=torch.uint8)
            for first, last, runs in layout.parts:
                stop = offsets[last] if last < len(offsets) else bucket.nbytes
                pack(memory[:stop], tensors[first:last], offsets[first:last], runs)
            assert memory.equal(plain)
            for tensor, view in zip(tensors, layout.on(memory).values(), strict=True):
                assert view.reshape(-1).view(torch.uint8).equal(tensor.reshape(-1).view(torch.uint8))
