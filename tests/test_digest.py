"""The digest sees every change of a word, and of the place of a word, a row or a tensor."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dprims.synchronizer.digest import BLOCK_BYTES, ROW, ROW_BYTES, Digests

SIZES = [0, 1, 7, 8, 9, 4096, ROW_BYTES - 1, ROW_BYTES, ROW_BYTES + 1, 3 * ROW_BYTES + 13]


def noise(nbytes: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=generator)


def digest(*regions: torch.Tensor) -> torch.Tensor:
    digests = Digests([region.numel() for region in regions], torch.device("cpu"))
    for index, region in enumerate(regions):
        digests.add(index, region)
    return digests.finish()


@pytest.mark.parametrize("nbytes", SIZES)
def test_equal_bytes_have_equal_digests(nbytes: int) -> None:
    data = noise(nbytes)
    first = digest(data)
    assert first.numel() == (1 if nbytes else 0)
    assert torch.equal(first, digest(data.clone()))


@pytest.mark.parametrize("nbytes", [size for size in SIZES if size])
def test_each_flipped_bit_is_seen(nbytes: int) -> None:
    data = noise(nbytes)
    before = digest(data)
    for place in {0, nbytes // 2, nbytes - 1}:
        for bit in range(8):
            changed = data.clone()
            changed[place] ^= 1 << bit
            assert not torch.equal(before, digest(changed))


def test_a_long_region_has_a_number_for_each_block() -> None:
    data = noise(2 * BLOCK_BYTES + 1000)
    before = digest(data)
    assert before.numel() == 3
    for block in range(3):
        changed = data.clone()
        changed[block * BLOCK_BYTES + 500] ^= 1
        assert before.ne(digest(changed)).nonzero().flatten().tolist() == [block]


@pytest.mark.parametrize("rows", [1, 5, 511, 512, 513, 700])
def test_parts_add_up_to_the_whole(rows: int) -> None:
    data = noise(BLOCK_BYTES + 300 * ROW_BYTES + 77)
    digests = Digests([data.numel()], torch.device("cpu"))
    for row in range(0, data.numel() // ROW_BYTES + 1, rows):
        stop = (row + rows) * ROW_BYTES
        digests.add(0, data[row * ROW_BYTES : stop], row)
    assert torch.equal(digests.finish(), digest(data))


@given(st.integers(0, 3 * ROW - 1), st.integers(0, 3 * ROW - 1))
@settings(max_examples=60)
def test_two_swapped_words_are_seen(a: int, b: int) -> None:
    words = noise(3 * ROW_BYTES).view(torch.int64)
    before = digest(words.view(torch.uint8))
    swapped = words.clone()
    swapped[a], swapped[b] = words[b].clone(), words[a].clone()
    assert torch.equal(before, digest(swapped.view(torch.uint8))) == ((a - b) % ROW == 0)


def test_words_that_differ_in_the_top_bit_alone_are_seen_swapped() -> None:
    words = torch.ones(ROW, dtype=torch.int64)
    words[5] ^= torch.iinfo(torch.int64).min
    swapped = words.clone()
    swapped[5], swapped[99] = words[99].clone(), words[5].clone()
    assert not torch.equal(digest(words.view(torch.uint8)), digest(swapped.view(torch.uint8)))


@pytest.mark.parametrize("size", [256, 4096, 32 << 10, 256 << 10, 1 << 20, 5120 * 128, 14336 * 2, 27648 * 64])
def test_chunks_and_tensors_that_trade_places_are_seen(size: int) -> None:
    data = noise(4 * size)
    rows = data.view(4, size)
    assert not torch.equal(digest(data), digest(rows[[0, 2, 1, 3]].flatten()))
    assert not torch.equal(digest(data), digest(rows[[3, 1, 2, 0]].flatten()))
    assert not torch.equal(digest(rows[0], rows[1]), digest(rows[1], rows[0]))


@pytest.mark.parametrize("distance", [8, 256, 4096, 1 << 20])
def test_a_tensor_at_another_offset_is_seen(distance: int) -> None:
    one, two = (torch.zeros(2 << 20, dtype=torch.uint8) for _ in range(2))
    one[256:512] = 7
    two[256 + distance : 512 + distance] = 7
    assert not torch.equal(digest(one), digest(two))


def test_memory_at_an_odd_offset_has_the_same_digest() -> None:
    data = noise(ROW_BYTES + 100)
    assert torch.equal(digest(data[3:]), digest(data[3:].clone()))


def test_numbers_are_traced_back_to_regions_and_blocks() -> None:
    digests = Digests([2 * BLOCK_BYTES, 0, 10, BLOCK_BYTES + 1], torch.device("cpu"))
    assert [digests.locate(i) for i in range(5)] == [(0, 0), (0, 1), (2, 0), (3, 0), (3, 1)]
