"""The transfer plan: layout, lanes, order, digest, encoding, differences."""

from __future__ import annotations

import subprocess
import sys
import time
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dprims.exceptions import HandshakeMismatch
from dprims.synchronizer.plan import ITEM_BYTES, KV_SCALES, Plan, TensorMeta

KIB = 1024


def meta(name: str, *shape: int, dtype: str = "float32", **more: object) -> TensorMeta:
    return TensorMeta(name, shape, dtype, **more)  # type: ignore[arg-type]


metas_st = st.lists(
    st.builds(
        lambda shape, dtype, strided: (tuple(shape), dtype, strided),
        st.lists(st.integers(0, 40), max_size=3),
        st.sampled_from(sorted(ITEM_BYTES)),
        st.booleans(),
    ),
    max_size=30,
).map(lambda rows: [TensorMeta(f"t{i}", s, d, None, x) for i, (s, d, x) in enumerate(rows)])


@given(
    metas_st,
    st.sampled_from([256, 1024, 4096, 64 * KIB]),
    st.sampled_from([16, 64, 256]),
    st.integers(1, 256),
)
def test_every_byte_travels_once_and_nothing_overlaps(
    metas: list[TensorMeta], bucket_bytes: int, align: int, direct_bytes: int
) -> None:
    plan = Plan.build(metas, bucket_bytes=bucket_bytes, align=align, direct_bytes=direct_bytes)
    assert plan.nbytes == sum(m.nbytes for m in metas)
    assert [b.index for b in plan.buckets] == list(range(len(plan.buckets)))
    seen: dict[int, list[tuple[int, int]]] = {i: [] for i in range(len(metas))}
    for bucket in plan.buckets:
        end = 0
        for piece in bucket.pieces:
            seen[piece.tensor].append((piece.start, piece.stop))
            assert piece.offset >= end, "pieces overlap in their bucket"
            assert piece.offset % align == 0
            end = piece.offset + piece.stop - piece.start
            if bucket.lane == "packed":
                assert (piece.start, piece.stop) == (0, metas[piece.tensor].nbytes), (
                    "packed tensors are whole"
                )
        assert end <= bucket.nbytes <= bucket_bytes
        assert bucket.whole == all((p.start, p.stop) == (0, metas[p.tensor].nbytes) for p in bucket.pieces)
    for index, ranges in seen.items():
        # in the order of the buckets, without a gap
        assert [start for start, _ in ranges] == [0, *(stop for _, stop in ranges[:-1])]
        assert ranges[-1][1] == metas[index].nbytes if ranges else metas[index].nbytes == 0


@given(metas_st, st.integers(1, 256))
def test_a_source_that_is_read_once_never_runs_ahead(metas: list[TensorMeta], direct_bytes: int) -> None:
    """Buckets come in the order in which their last tensor does: at most two are open at a time."""
    plan = Plan.build(metas, bucket_bytes=1024, direct_bytes=direct_bytes)
    last = [bucket.pieces[-1].tensor for bucket in plan.buckets]
    assert last == sorted(last)
    for lane in ("direct", "packed"):
        order = [p.tensor for b in plan.buckets if b.lane == lane for p in b.pieces]
        assert order == sorted(order)


@given(metas_st)
def test_encoding_brings_back_the_same_plan(metas: list[TensorMeta]) -> None:
    plan = Plan.build(metas, bucket_bytes=1024, kv_scales=["k.2", "k.1"])
    again = Plan.from_bytes(plan.to_bytes())
    assert again == plan
    assert again.digest == plan.digest
    assert again.to_bytes() == plan.to_bytes()
    assert again.first_difference(plan) is None


def test_lanes_follow_size_and_stride() -> None:
    plan = Plan.build(
        [
            meta("small", 8),
            meta("large", 512),
            meta("strided", 512, strided=True),
            meta("huge", 2048, strided=True),
        ],
        bucket_bytes=4096,
        direct_bytes=2048,
    )
    lanes = {plan.tensors[p.tensor].name: b.lane for b in plan.buckets for p in b.pieces}
    assert lanes == {"small": "packed", "large": "direct", "strided": "packed", "huge": "direct"}


def test_a_tensor_above_the_bucket_size_goes_in_chunks() -> None:
    plan = Plan.build([meta("a", 16), meta("big", 2500), meta("b", 16)], bucket_bytes=4096)
    chunks = [
        (p.start, p.stop) for b in plan.buckets for p in b.pieces if plan.tensors[p.tensor].name == "big"
    ]
    assert chunks == [(0, 4096), (4096, 8192), (8192, 10000)]


def test_one_exactly_of_bucket_size_goes_alone() -> None:
    plan = Plan.build([meta("a", 1024), meta("b", 1024)], bucket_bytes=4096)
    assert [(b.lane, len(b.pieces), b.nbytes) for b in plan.buckets] == [("direct", 1, 4096)] * 2


def test_direct_tensors_share_a_bucket_and_are_not_cut_to_fill_it() -> None:
    plan = Plan.build([meta(c, 300) for c in "abcd"], bucket_bytes=4096, direct_bytes=1024)
    assert [len(b.pieces) for b in plan.buckets] == [3, 1]
    assert all(p.start == 0 for b in plan.buckets for p in b.pieces)


def test_first_and_last_packed_buckets_are_small() -> None:
    plan = Plan.build([meta(f"t{i}", 64) for i in range(4096)], bucket_bytes=64 * KIB)
    sizes = [b.nbytes for b in plan.buckets]
    assert sizes[0] <= 8 * KIB
    assert sizes[-1] <= 8 * KIB
    assert max(sizes) == 64 * KIB
    assert sizes.count(64 * KIB) >= len(sizes) - 8


def test_zero_size_and_zero_dim_tensors_have_a_place() -> None:
    plan = Plan.build([meta("scalar"), meta("none", 0, 7), meta("end", 3)], bucket_bytes=4096)
    assert [(p.tensor, p.start, p.stop, p.offset) for p in plan.buckets[0].pieces] == [
        (0, 0, 4, 0),
        (1, 0, 0, 256),
        (2, 0, 12, 256),
    ]


def test_tied_tensors_travel_once() -> None:
    metas = [meta("head", 8, alias_of="embed"), meta("embed", 8)]
    plan = Plan.build(metas, bucket_bytes=1024)
    assert [m.name for m in plan.tensors] == ["embed"]
    assert plan.aliases == (("head", "embed"),)
    assert plan.nbytes == 32
    assert {m.name: m.alias_of for m in plan.metas} == {"embed": None, "head": "embed"}


def test_scales_come_last_sorted_as_one_tensor() -> None:
    plan = Plan.build([meta("w", 4)], bucket_bytes=1024, kv_scales=["v", "k"])
    assert plan.kv_scales == ("k", "v")
    assert plan.tensors[-1] == TensorMeta(KV_SCALES, (2,), "float32")
    assert plan.metas == (meta("w", 4), meta("k"), meta("v"))


def test_no_tensors_no_buckets() -> None:
    plan = Plan.build([], bucket_bytes=1024)
    assert plan.buckets == ()
    assert (plan.nbytes, plan.packed_bytes) == (0, 0)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"bucket_bytes": 2048}, "bucket_bytes is 1024 on rank 0 and 2048 on rank 1"),
        ({"align": 64}, "align is 256 on rank 0 and 64 on rank 1"),
        ({"direct_bytes": 512}, "direct_bytes is 1024 on rank 0 and 512 on rank 1"),
        ({"kv_scales": ["s"]}, "tensor 3, '__kv_scales__' float32[1], is there on rank 1 only"),
    ],
)
def test_first_difference_of_settings(change: dict[str, object], words: str) -> None:
    metas = [meta("a", 4), meta("b", 4), meta("c", 4)]
    ours = Plan.build(metas, bucket_bytes=1024)
    theirs = Plan.build(metas, **({"bucket_bytes": 1024} | change))  # type: ignore[arg-type]
    assert ours.digest != theirs.digest
    assert ours.first_difference(theirs, ours="rank 0", theirs="rank 1") == words


@pytest.mark.parametrize(
    ("metas", "words"),
    [
        ([meta("a", 4), meta("x", 4)], "tensor 1 is 'b' float32[4] on rank 0 and 'x' float32[4] on rank 1"),
        ([meta("a", 4), meta("b", 5)], "tensor 1 is 'b' float32[4] on rank 0 and 'b' float32[5] on rank 1"),
        (
            [meta("a", 4, dtype="int32"), meta("b", 4)],
            "tensor 0 is 'a' float32[4] on rank 0 and 'a' int32[4] on rank 1",
        ),
        (
            [meta("a", 4, strided=True), meta("b", 4)],
            "tensor 0 is 'a' float32[4] on rank 0 and 'a' float32[4] on rank 1 (contiguous on one side only)",
        ),
        ([meta("a", 4)], "tensor 1, 'b' float32[4], is there on rank 0 only"),
        ([meta("a", 4), meta("b", 4), meta("c", 1)], "tensor 2, 'c' float32[1], is there on rank 1 only"),
        (
            [meta("a", 4), meta("b", 4), meta("t", 4, alias_of="a")],
            "the alias 't' of 'a' is on rank 1 only",
        ),
    ],
)
def test_first_difference_of_tensors(metas: list[TensorMeta], words: str) -> None:
    ours = Plan.build([meta("a", 4), meta("b", 4)], bucket_bytes=1024)
    theirs = Plan.build(metas, bucket_bytes=1024)
    assert ours.digest != theirs.digest
    assert ours.first_difference(theirs, ours="rank 0", theirs="rank 1") == words


@pytest.mark.parametrize(
    ("metas", "settings", "words"),
    [
        ([meta("a", 1), meta("a", 2)], {}, "'a' is taken"),
        ([meta(KV_SCALES, 1)], {}, "is taken"),
        ([meta("a", 1, dtype="float7")], {}, "float7"),
        ([meta("a", -1)], {}, "extents"),
        ([meta("a", 1, alias_of="b")], {}, "no tensor of that name"),
        ([meta("a", 1), meta("b", 2, alias_of="a")], {}, "differs in shape"),
        (
            [meta("a", 1), meta("b", 1, alias_of="a"), meta("c", 1, alias_of="b")],
            {},
            "no tensor of that name",
        ),
        ([], {"bucket_bytes": 1000}, "multiple of align"),
        ([], {"bucket_bytes": 0}, "multiple of align"),
        ([], {"align": 24}, "power of two"),
        ([], {"align": 8}, "at least 16"),
        ([], {"direct_bytes": 0}, "direct_bytes is 0"),
        ([], {"direct_bytes": 4096}, "direct_bytes is 4096"),
        ([meta("a", 1)], {"kv_scales": ["a"]}, "scale name 'a'"),
        ([], {"kv_scales": ["k", "k"]}, "scale name 'k'"),
    ],
)
def test_input_that_cannot_be_planned(
    metas: list[TensorMeta], settings: dict[str, object], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        Plan.build(metas, **({"bucket_bytes": 1024} | settings))  # type: ignore[arg-type]


def test_bytes_that_are_no_plan() -> None:
    import json
    import zlib

    with pytest.raises(ValueError, match="no plan"):
        Plan.from_bytes(b"nonsense")
    with pytest.raises(ValueError, match="no plan"):
        Plan.from_bytes(zlib.compress(b"[]"))
    with pytest.raises(HandshakeMismatch, match="format 99"):
        Plan.from_bytes(zlib.compress(json.dumps({"format": 99}).encode()))


def test_names_of_a_bucket_are_few() -> None:
    plan = Plan.build([meta(f"t{i}", 1) for i in range(9)], bucket_bytes=4096, direct_bytes=4096)
    bucket = plan.buckets[-1]
    whole = replace(bucket, pieces=tuple(p for b in plan.buckets for p in b.pieces))
    assert plan.names(whole) == "'t0', 't1', 't2' and 6 more"
    assert "'t8'" in plan.names(replace(bucket, pieces=bucket.pieces[-1:]))


def test_planning_is_linear() -> None:
    """Ten times the tensors take about ten times as long, and the encoding stays small."""

    def seconds(count: int) -> tuple[float, Plan]:
        metas = [
            meta(f"model.layers.{i}.mlp.gate_proj.weight", 768, 2048, dtype="bfloat16") for i in range(count)
        ]
        start = time.thread_time()  # what others run beside this does not count
        plan = Plan.build(metas, bucket_bytes=1 << 30)
        return time.thread_time() - start, plan

    few = min(seconds(2_000)[0] for _ in range(3))
    many, plan = min((seconds(20_000) for _ in range(3)), key=lambda timed: timed[0])
    assert many < 40 * few
    assert len(plan.to_bytes()) < 1 << 20


def test_no_torch_is_needed() -> None:
    code = "import sys, dprims.synchronizer.plan; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
