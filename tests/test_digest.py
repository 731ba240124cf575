"""The digest sees every change of a word, and of the place of a word, a row or a tensor."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dprims.synchronizer.digest import ROW, Digests, rows_of

ROW_BYTES = ROW * 8
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
    assert first.numel() == rows_of(nbytes) + 1
    assert torch.equal(first, digest(data.clone()))


@pytest.mark.parametrize("nbytes", [size for size in SIZES if size])
def test_each_flipped_bit_is_seen_in_its_own_row(nbytes: int) -> None:
    data = noise(nbytes)
    before = digest(data)
    for place in {0, nbytes // 2, nbytes - 1}:
        changed = data.clone()
        changed[place] ^= 0x80
        rows = before.ne(digest(changed)).nonzero().flatten().tolist()
        assert place // ROW_BYTES in rows
        assert not {r for r in rows if r < rows_of(nbytes)} - {place // ROW_BYTES}


@given(st.integers(0, 3 * ROW - 1), st.integers(0, 3 * ROW - 1))
@settings(max_examples=60)
def test_two_swapped_words_are_seen(a: int, b: int) -> None:
    words = noise(3 * ROW_BYTES).view(torch.int64)
    before = digest(words.view(torch.uint8))
    swapped = words.clone()
    swapped[a], swapped[b] = words[b].clone(), words[a].clone()
    assert torch.equal(before, digest(swapped.view(torch.uint8))) == (words[a] == words[b]).item()


def test_words_that_differ_in_the_top_bit_alone_are_seen_swapped() -> None:
    words = torch.ones(ROW, dtype=torch.int64)
    words[5] ^= torch.iinfo(torch.int64).min
    swapped = words.clone()
    swapped[5], swapped[99] = words[99].clone(), words[5].clone()
    assert not torch.equal(digest(words.view(torch.uint8)), digest(swapped.view(torch.uint8)))


def test_swapped_rows_and_swapped_regions_are_seen() -> None:
    data = noise(4 * ROW_BYTES)
    rows = data.view(4, ROW_BYTES)
    assert not torch.equal(digest(data), digest(rows[[0, 2, 1, 3]].flatten()))
    assert not torch.equal(digest(rows[0], rows[1]), digest(rows[1], rows[0]))


def test_a_tensor_at_another_offset_is_seen() -> None:
    one, two = torch.zeros(2 * ROW_BYTES, dtype=torch.uint8), torch.zeros(2 * ROW_BYTES, dtype=torch.uint8)
    one[256:512] = 7
    two[512:768] = 7
    assert not torch.equal(digest(one), digest(two))


def test_memory_at_an_odd_offset_has_the_same_digest() -> None:
    data = noise(ROW_BYTES + 100)
    assert torch.equal(digest(data[3:]), digest(data[3:].clone()))


def test_positions_are_traced_back_to_regions_and_rows() -> None:
    digests = Digests([2 * ROW_BYTES, 0, 10, ROW_BYTES + 1], torch.device("cpu"))
    assert [digests.locate(i) for i in range(9)] == [
        (0, 0),
        (0, 1),
        (2, 0),
        (3, 0),
        (3, 1),
        (0, None),
        (1, None),
        (2, None),
        (3, None),
    ]
