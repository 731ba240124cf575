"""Packing by a table of addresses, on a GPU, against torch's own calls: bit by bit, whatever is packed."""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from dprims.synchronizer import tables
from dprims.synchronizer.packing import pack, runs_of
from dprims.synchronizer.tables import TILE, PackTable

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda", 0)
DTYPES = (torch.bfloat16, torch.float32, torch.uint8, torch.float8_e4m3fn, torch.int64, torch.bool)


def bits(nbytes: int) -> Tensor:
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, device=DEVICE)


def some(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    if dtype is torch.bool:
        return torch.randint(0, 2, tuple(shape), device=DEVICE).bool()
    count = torch.Size(shape).numel()
    return bits(count * dtype.itemsize).view(dtype).view(shape)


def packed(tensors: Sequence[Tensor], places: Sequence[int], nbytes: int, *, by_table: bool) -> Tensor:
    buffer = torch.full((nbytes,), 0xAA, dtype=torch.uint8, device=DEVICE)
    table = None
    if by_table:
        sizes = [tensor.nbytes for tensor in tensors]
        room = [stop - start for start, stop in pairwise([*places, nbytes])]
        table = PackTable.of(sizes, places, room, {t.dtype for t in tensors}, DEVICE)
        assert table is not None
    runs = runs_of([t.dtype for t in tensors], [t.shape for t in tensors], places)
    pack(buffer, tensors, places, runs, table)
    return buffer


def laid_out(tensors: Sequence[Tensor], align: int = 256, more: int = 0) -> tuple[list[int], int]:
    places, end = [], 0
    for tensor in tensors:
        places.append(end)
        end += -(-(tensor.nbytes + more) // align) * align
    return places, end


@pytest.mark.parametrize("seed", range(6))
def test_packs_what_torch_packs(seed: int) -> None:
    draw = random.Random(seed)
    tensors = []
    for _ in range(200):
        shape = [draw.choice((0, 1, 2, 3, 7, 64, 129)) for _ in range(draw.randint(0, 3))]
        tensors.append(some(shape, draw.choice(DTYPES)))
    tensors += [some((TILE * 3 + draw.randint(0, 99),), torch.uint8), some((TILE,), torch.uint8)]
    draw.shuffle(tensors)
    places, nbytes = laid_out(tensors, more=draw.choice((0, 0, 300)))
    for _ in range(3):
        ours = packed(tensors, places, nbytes, by_table=True)
        assert torch.equal(ours, packed(tensors, places, nbytes, by_table=False))


def test_packs_what_does_not_lie_as_it_travels() -> None:
    base = bits(1 << 16)
    halves = torch.randn(64, 64, dtype=torch.complex64, device=DEVICE)
    tensors = [
        base[1:4098],  # an address that is a multiple of nothing
        base[4:8196].view(torch.int32),
        some((64, 32), torch.bfloat16).t(),
        some((8, 4, 16), torch.float32)[:, 1],
        halves.conj(),
        halves.conj().imag,
        torch.nn.Parameter(torch.randn(33, 5, device=DEVICE)),
        torch.randn((), device=DEVICE),
    ]
    places, nbytes = laid_out(tensors)
    assert torch.equal(
        packed(tensors, places, nbytes, by_table=True), packed(tensors, places, nbytes, by_table=False)
    )


def test_a_table_serves_tensors_that_move() -> None:
    sizes, places = [TILE * 2 + 16, 48, 5], [0, TILE * 4, TILE * 5]
    table = PackTable.of(sizes, places, sizes, [torch.uint8], DEVICE)
    assert table is not None
    buffer = torch.zeros(TILE * 6, dtype=torch.uint8, device=DEVICE)
    found = []
    for _ in range(50):  # none waits for the one before
        tensors = [bits(size) for size in sizes]
        table.pack(buffer, tensors)
        kept = [buffer[at : at + size].clone() for at, size in zip(places, sizes, strict=True)]
        found += zip(tensors, kept, strict=True)
    assert all(torch.equal(tensor, one) for tensor, one in found)


def test_without_a_compiler_torch_packs(monkeypatch: pytest.MonkeyPatch) -> None:
    tables._kernel.cache_clear()
    monkeypatch.setitem(sys.modules, "dprims.synchronizer.kernels", None)
    try:
        assert PackTable.of([4], [0], [4], [torch.uint8], DEVICE) is None
    finally:
        tables._kernel.cache_clear()
