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
        count, odd = divmod(data.numel(), 8)
        words = (data[: count * 8] if odd else data).view(torch.int64)
        whole, rest = divmod(count, ROW)
        # a view is a large part of what a small region costs: each of these is one
        position = int(words.storage_offset())
        self._add_rows(self._starts[region], words, position, whole, row)
        position += whole * ROW
        row += whole
        if odd:
            last = torch.nn.functional.pad(data[whole * ROW_BYTES :], (0, 8 - odd)).view(torch.int64)
            self._columns[self._starts[region] + row // ROWS, : rest + 1] += last
        elif rest:
            last = words.as_strided((rest,), (1,), position)
            self._columns[self._starts[region] + row // ROWS, :rest] += last

    def _add_rows(self, start: int, words: Tensor, position: int, left: int, row: int) -> None:
        """Add `left` whole rows from `position` on, the first of which is `row` of a region.

        `start` is the region's first block.
        """
        while left:
            block = start + row // ROWS
            blocks = left // ROWS
            if row % ROWS == 0 and blocks:
                taken = blocks * ROWS
                many = words.as_strided((blocks, ROWS, ROW), (ROWS * ROW, ROW, 1), position)
                torch.sum(many, dim=1, out=self._columns[block : block + blocks])
            else:
                taken = min(left, ROWS - row % ROWS)
                some = words.as_strided((taken, ROW), (ROW, 1), position)
                if row % ROWS:
                    self._columns[block] += some.sum(dim=0)
                else:
                    torch.sum(some, dim=0, out=self._columns[block])
            position += taken * ROW
            row += taken
            left -= taken

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
