"""Packing into flat buffers, and memory that is taken again and again."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import nn

from dprims.synchronizer import packing
from dprims.synchronizer.memory import Memory, free_bytes
from dprims.synchronizer.packing import flat, pack, raw
from dprims.synchronizer.plan import ITEM_BYTES, Plan
from dprims.synchronizer.sources import DictSource

CPU = torch.device("cpu")


def tensors_of_every_kind() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    tensors: dict[str, torch.Tensor] = {}
    for name in ITEM_BYTES:
        dtype = getattr(torch, name, None)
        if dtype is None:
            continue
        for count in (1, 3, 64, 1001):
            raw = torch.randint(0, 256, (count * dtype.itemsize,), dtype=torch.uint8, generator=generator)
            if dtype is torch.bool:
                raw = raw % 2
            tensors[f"{name}.{count}"] = raw.view(dtype)
    wide = torch.randn(40, 30, generator=generator)
    tensors |= {
        "scalar": torch.tensor(4.5),
        "none": torch.empty(0, 3),
        "transposed": wide.t(),
        "strided": wide[:, ::2],
        "expanded": torch.randn(1, 5, generator=generator).expand(4, 5),
        "odd place": torch.arange(100, dtype=torch.uint8)[1:97],
    }
    return tensors | unusual_tensors()


def unusual_tensors() -> dict[str, torch.Tensor]:
    """Not there in memory as they read: conjugated or negated lazily; and one element with a wide stride."""
    generator = torch.Generator().manual_seed(4)
    turned = torch.randn(8, 64, dtype=torch.complex64, generator=generator)
    plain = torch.randn(8, 64, generator=generator)
    return {
        "conjugated": turned.conj(),
        "conjugated and transposed": turned.mH,
        "imaginary part": turned.conj().imag,
        "negated": torch._neg_view(plain),
        "negated too": torch._neg_view(plain[:4]),
        "negated int8": torch._neg_view(torch.arange(64, dtype=torch.int8)),
    } | {
        f"one of {dtype}": torch.arange(6).to(dtype)[2::2][:1]
        for dtype in (torch.uint8, torch.bfloat16, torch.float32, torch.complex64, torch.complex128)
    }


@pytest.mark.parametrize("align", [16, 256])
def test_each_tensor_lies_at_its_offset_and_gaps_are_zero(align: int) -> None:
    tensors = tensors_of_every_kind()
    plan = Plan.build(DictSource(tensors).metadata(), bucket_bytes=1 << 20, align=align, direct_bytes=1 << 20)
    for bucket in plan.buckets:
        buffer = torch.full((bucket.nbytes,), 0xAA, dtype=torch.uint8)
        names = [plan.tensors[piece.tensor].name for piece in bucket.pieces]
        pack(buffer, [tensors[name] for name in names], [piece.offset for piece in bucket.pieces])
        covered = torch.zeros(bucket.nbytes, dtype=torch.bool)
        for name, piece in zip(names, bucket.pieces, strict=True):
            place = slice(piece.offset, piece.offset + piece.stop - piece.start)
            assert torch.equal(buffer[place], flat(tensors[name])), name
            covered[place] = True
        assert not buffer[~covered].any()


@pytest.mark.parametrize("name", unusual_tensors())
def test_the_bytes_are_those_of_the_values(name: str) -> None:
    tensor = unusual_tensors()[name]
    values = torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor)
    assert flat(tensor).view(tensor.dtype).view(tensor.shape).equal(values)
    assert raw(tensor) == raw(values) == bytes(flat(values).tolist())
    buffer = torch.full((tensor.nbytes + 16,), 7, dtype=torch.uint8)
    pack(buffer, [tensor], [0])
    assert buffer[: tensor.nbytes].equal(flat(values))


def test_parameters_are_packed_without_a_graph() -> None:
    """Stacked, one by one, and by a copy."""
    stacked = [nn.Parameter(torch.full((2, 64), float(i))) for i in range(3)]
    tensors = [*stacked, nn.Parameter(torch.ones(5, 4)), nn.Parameter(torch.ones(5, 8).t())]
    offsets = [i * 512 for i in range(5)]
    buffer = torch.zeros(5 * 512, dtype=torch.uint8)
    floats = buffer.view(torch.float32)
    pack(buffer, tensors, offsets)
    assert not floats.requires_grad
    for tensor, offset in zip(tensors, offsets, strict=True):
        assert buffer[offset : offset + tensor.nbytes].equal(flat(tensor.detach()))


@pytest.mark.parametrize("rows", [0, 3])
def test_long_gaps_are_zeros_and_cost_no_memory_that_stays(rows: int) -> None:
    """A rank that lacks rows of a sharded tensor leaves gaps of any length."""
    kept = kept_for_gaps()
    for gap in (*range(16, 1040, 16), 1 << 20):
        part = torch.full((rows, 64), 3.0)
        after = torch.full((5,), 2, dtype=torch.int64)
        offset = part.nbytes + gap
        buffer = torch.full((offset + after.nbytes + gap,), 7, dtype=torch.uint8)
        pack(buffer, [part, after], [0, offset])
        assert buffer[: part.nbytes].equal(flat(part))
        assert buffer[offset : offset + after.nbytes].equal(flat(after))
        assert not buffer[part.nbytes : offset].any()
        assert not buffer[offset + after.nbytes :].any()
    assert kept_for_gaps() - kept < 16 << 10


def kept_for_gaps() -> int:
    return sum(pad.nbytes for pad in packing._PADS.values())


def test_nothing_is_packed_for_an_empty_bucket() -> None:
    pack(torch.empty(0, dtype=torch.uint8), [torch.empty(0)], [0])


def test_memory_comes_back_when_the_last_view_is_gone() -> None:
    memory = Memory(CPU)
    block = memory.take(4096)
    place = block.data_ptr()
    view = block[16:32].view(torch.float32)
    del block
    gc.collect()
    other = memory.take(4096)
    assert other.data_ptr() != place, "a view still uses it"
    del view
    assert memory.take(4096).data_ptr() == place


def test_memory_of_another_size_is_not_mixed_up() -> None:
    memory = Memory(CPU)
    del_me = memory.take(4096)
    del del_me
    assert memory.take(8192).numel() == 8192
    assert memory.take(0).numel() == 0


def test_trimmed_memory_is_given_back() -> None:
    memory = Memory(CPU)
    used = memory.take(1 << 16)
    unused = memory.take(1 << 16)
    del unused
    memory.trim()
    assert not any(memory._free.values())
    used.fill_(1)
    assert int(used.sum()) == 1 << 16


def test_free_memory_is_known_here() -> None:
    free = free_bytes(CPU)
    assert free is not None
    assert free > 1 << 20
