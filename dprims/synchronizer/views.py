"""The tensors of a whole bucket as views of its bytes, at a fraction of a microsecond each.

With thousands of small tensors in a bucket the host is what a receiver waits for, and a view is what the
host spends on each. Neighbours that differ in their first extent alone, such as the experts of a layer, are
one tensor, which one call cuts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from .packing import dtype_of
from .plan import ITEM_BYTES, Bucket, TensorMeta

__all__ = ["BucketViews"]


class _Run(NamedTuple):
    """Neighbours without a gap, of one dtype and one shape but for the first extent, which is in `rows`."""

    dtype: str
    start: int
    stop: int
    rows: tuple[int, ...]
    rest: tuple[int, ...]


class _Single(NamedTuple):
    """A tensor by itself; its offset in elements."""

    dtype: str
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class BucketViews:
    """How one bucket is cut; made once a plan, used once a transfer."""

    names: tuple[str, ...]
    cuts: tuple[_Run | _Single, ...]

    @classmethod
    def of(cls, bucket: Bucket, tensors: Sequence[TensorMeta]) -> BucketViews:
        """For a bucket whose pieces are whole tensors of *tensors*."""
        cuts: list[_Run | _Single] = []
        run: list[TensorMeta] = []
        start = stop = 0

        def close() -> None:
            if len(run) > 1:
                rows = tuple(meta.shape[0] for meta in run)
                cuts.append(_Run(run[0].dtype, start, stop, rows, run[0].shape[1:]))
            elif run:
                offset = start // ITEM_BYTES[run[0].dtype]
                cuts.append(_Single(run[0].dtype, offset, run[0].shape, _strides(run[0].shape)))
            run.clear()

        for piece in bucket.pieces:
            meta = tensors[piece.tensor]
            if not (run and piece.offset == stop and _stack(run[0], meta)):
                close()
                start = piece.offset
            run.append(meta)
            stop = piece.offset + piece.stop
        close()
        return cls(tuple(tensors[piece.tensor].name for piece in bucket.pieces), tuple(cuts))

    def on(self, memory: Tensor) -> dict[str, Tensor]:
        """The tensors by name, in the plan's order, on the bytes of *memory*: flat uint8, as they arrived."""
        views: list[Tensor] = []
        typed: dict[str, tuple[Tensor, int]] = {}
        for cut in self.cuts:
            if isinstance(cut, _Run):
                stack = memory[cut.start : cut.stop].view(dtype_of(cut.dtype)).view(-1, *cut.rest)
                # unlike those of split, these may be written to while autograd records
                views += torch.unsafe_split_with_sizes(stack, cut.rows)
                continue
            if cut.dtype not in typed:
                base = memory.view(dtype_of(cut.dtype))
                typed[cut.dtype] = base, int(base.storage_offset())
            base, first = typed[cut.dtype]
            views.append(base.as_strided(cut.shape, cut.strides, first + cut.offset))
        return dict(zip(self.names, views, strict=True))


def _stack(first: TensorMeta, other: TensorMeta) -> bool:
    """Whether the two can be parts of one tensor, beside each other along the first axis."""
    return bool(
        first.shape
        and other.shape
        and first.dtype == other.dtype
        and first.shape[1:] == other.shape[1:]
        and math.prod(first.shape)
        and other.shape[0]
    )


def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Of a contiguous tensor."""
    strides, step = [], 1
    for extent in reversed(shape):
        strides.append(step)
        step *= extent
    return tuple(reversed(strides))
