"""A digest of a buffer that costs one read of it, and sees position.

The bytes are taken as rows of `ROW` 8-byte words; the sums of the columns, over `ROWS` rows at a time, are
int64 and wrap. Any change of a word changes the sum of its column. Words that trade places change two,
unless they are a multiple of `ROW` words apart: since `ROW` is four times a prime that no tensor's extent
has for a factor, rows, chunks or tensors that trade places, or lie elsewhere, are seen. The sums of a block
are mixed and weighted into one number. It is no cryptographic hash: it finds accidents, not attacks.

Works on any device, and on CUDA never waits for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

__all__ = ["BLOCK_BYTES", "ROW_BYTES", "Digests"]

ROW = 4 * 1031
ROW_BYTES = ROW * 8
ROWS = 512
BLOCK_BYTES = ROW_BYTES * ROWS
"""What one number stands for: about 17 MB, or a whole region when that is smaller."""


class Digests:
    """The digests of a sequence of regions, filled in one after another, in memory that is taken once.

    Args:
        sizes: bytes of each region.
        device: where the regions are.
    """

    def __init__(self, sizes: Sequence[int], device: torch.device) -> None:
        self._starts = [0]
        for size in sizes:
            self._starts.append(self._starts[-1] + -(-size // BLOCK_BYTES))
        self._columns = torch.zeros((self._starts[-1], ROW), dtype=torch.int64, device=device)

    def add(self, region: int, data: Tensor, row: int = 0) -> None:
        """Take the digest of region number `region`, or of a part of it that begins with `row`.

        `data` is one-dimensional, contiguous, uint8; a part that is not the last one consists of whole rows.
        On CUDA it is enqueued on the current stream.
        """
        if data.storage_offset() % 8:
            data = data.clone()
        whole = data.numel() // ROW_BYTES
        rest = data[whole * ROW_BYTES :]
        if whole:
            words = data[: whole * ROW_BYTES].view(torch.int64).view(whole, ROW)
            self._add_rows(self._starts[region], words, row)
        if rest.numel():
            if rest.numel() % 8:
                rest = torch.nn.functional.pad(rest, (0, 8 - rest.numel() % 8))
            words = rest.view(torch.int64)
            self._columns[self._starts[region] + (row + whole) // ROWS, : words.numel()] += words

    def _add_rows(self, start: int, words: Tensor, row: int) -> None:
        """Add whole rows, the first of which is `row` of the region whose first block is `start`."""
        while words.numel():
            block = start + row // ROWS
            count = len(words) // ROWS
            if row % ROWS == 0 and count:
                taken = count * ROWS
                torch.sum(
                    words[:taken].view(count, ROWS, ROW), dim=1, out=self._columns[block : block + count]
                )
            else:
                taken = min(len(words), ROWS - row % ROWS)
                if row % ROWS:
                    self._columns[block] += words[:taken].sum(dim=0)
                else:
                    torch.sum(words[:taken], dim=0, out=self._columns[block])
            words = words[taken:]
            row += taken

    def finish(self) -> Tensor:
        """One number a block, as an int64 tensor on the regions' device."""
        mixed = self._columns ^ (self._columns >> 32)
        return (mixed * _weights(self._columns.device)).sum(dim=1)

    def locate(self, index: int) -> tuple[int, int]:
        """What number `index` of `finish` stands for: a region, and a block of `BLOCK_BYTES` within it."""
        region = next(i for i, stop in enumerate(self._starts[1:]) if index < stop)
        return region, index - self._starts[region]


@lru_cache(maxsize=16)
def _weights(device: torch.device) -> Tensor:
    """`ROW` odd pseudo-random numbers: splitmix64, Steele, Lea and Flood, OOPSLA 2014."""
    mask = (1 << 64) - 1
    values = []
    for i in range(1, ROW + 1):
        z = i * 0x9E3779B97F4A7C15 & mask
        z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & mask
        z = (z ^ z >> 27) * 0x94D049BB133111EB & mask
        z = (z ^ z >> 31) | 1
        values.append(z - (1 << 64) if z >> 63 else z)
    return torch.tensor(values, dtype=torch.int64, device=device)
