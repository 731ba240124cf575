"""A digest of a buffer that costs two reads of it, and sees position.

The bytes are taken as rows of `ROW` 8-byte words. The sum of each row (int64, wrapping) is kept as it is, so
rows that are swapped, or lie elsewhere, differ; the sum of each column, over all rows, is mixed and weighted
into one number, so words that are swapped within a row differ. Any change of one word changes its row. It is
no cryptographic hash: it finds accidents, not attacks.

Works on any device, and on CUDA never waits for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

__all__ = ["ROW", "Digests", "rows_of"]

ROW = 4096
ROW_BYTES = ROW * 8
BLOCK_ROWS = 16


def rows_of(nbytes: int) -> int:
    """How many rows `nbytes` take, the last one perhaps not full."""
    return -(-nbytes // ROW_BYTES)


class Digests:
    """The digests of a sequence of regions, filled in one after another, in memory that is taken once.

    Args:
        sizes: bytes of each region.
        device: where the regions are.
    """

    def __init__(self, sizes: Sequence[int], device: torch.device) -> None:
        self._starts = [0]
        for size in sizes:
            self._starts.append(self._starts[-1] + rows_of(size))
        self._rows = torch.zeros(self._starts[-1], dtype=torch.int64, device=device)
        self._columns = torch.zeros((len(sizes), ROW), dtype=torch.int64, device=device)

    def add(self, region: int, data: Tensor) -> None:
        """Take the digest of region number `region`: one-dimensional, contiguous, uint8.

        On CUDA it is enqueued on the current stream.
        """
        if data.storage_offset() % 8:
            data = data.clone()
        whole = data.numel() // ROW_BYTES
        start = self._starts[region]
        column = self._columns[region]
        if whole:
            words = data[: whole * ROW_BYTES].view(torch.int64).view(whole, ROW)
            # on a CPU in blocks that a core's cache holds: the second sum reads them there
            step = BLOCK_ROWS if data.device.type == "cpu" else whole
            for block in words.split(step):
                torch.sum(block, dim=1, out=self._rows[start : start + len(block)])
                column += block.sum(dim=0)
                start += len(block)
        rest = data[whole * ROW_BYTES :]
        if rest.numel() % 8:
            rest = torch.nn.functional.pad(rest, (0, 8 - rest.numel() % 8))
        if rest.numel():
            words = rest.view(torch.int64)
            torch.sum(words, dim=0, out=self._rows[start])
            column[: words.numel()] += words

    def finish(self) -> Tensor:
        """All rows, then one number a region, as one int64 tensor on the regions' device."""
        mixed = self._columns ^ (self._columns >> 32)
        return torch.cat([self._rows, (mixed * _weights(self._rows.device)).sum(dim=1)])

    def locate(self, index: int) -> tuple[int, int | None]:
        """What position `index` of `finish` speaks of: (region, row), or (region, None) for its columns."""
        rows = self._starts[-1]
        if index >= rows:
            return index - rows, None
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
