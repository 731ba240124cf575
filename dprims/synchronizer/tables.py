"""Packing thousands of tensors on a CUDA device in one go, by a table of their addresses.

Torch's own call for many tensors takes the host 0.4 us a tensor where all are alike, and several where they
are not, since each has to be seen flat. Here the host reads one address a tensor, whatever its shape.

Where Triton is missing or cannot compile there are no tables, and torch's calls do the work.
"""

from __future__ import annotations

import ctypes
import logging
import struct
from collections.abc import Iterable, Sequence
from functools import cache
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

__all__ = ["PackTable", "warm"]

_log = logging.getLogger("dprims.tables")

TILE = 1 << 14
"""Bytes that one program of the kernel copies."""

_PLAIN = frozenset((Tensor, torch.nn.Parameter))
_LAZY = frozenset(
    (torch.float16, torch.float32, torch.float64, torch.complex32, torch.complex64, torch.complex128)
)
"""Dtypes of which a tensor may stand for the negative, or the conjugate, of what lies in memory."""


class PackTable:
    """Tensors of given sizes that are packed together, each time from the addresses that they then have.

    Args:
        sizes: bytes of each.
        places: where each goes in the buffer, in bytes.
        room: bytes that are written for each: its own, and zeros behind them.
        dtypes: all that occur.
        device: where everything is, CUDA.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        places: Sequence[int],
        room: Sequence[int],
        dtypes: Iterable[torch.dtype],
        device: torch.device,
    ) -> None:
        tiles = [-(-nbytes // TILE) for nbytes in room]
        firsts = list(accumulate(tiles, initial=0))
        self._lazy = not _LAZY.isdisjoint(dtypes)
        self._count = len(sizes)
        self._tiles = firsts[-1]
        self._kernel = _kernel(device)
        self._facts = torch.tensor([*places, *sizes, *room, *firsts[:-1]], dtype=torch.int64, device=device)
        owners = torch.repeat_interleave(torch.arange(self._count), torch.tensor(tiles, dtype=torch.int64))
        self._owners = owners.to(device=device, dtype=torch.int32)
        self._words = struct.Struct(f"{self._count}q")
        # to take pinned memory can make the host wait for all that runs on the device: here nothing does
        self._told = torch.empty(self._count, dtype=torch.int64, pin_memory=True)
        self._addresses = torch.empty(self._count, dtype=torch.int64, device=device)
        self._read: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]

    @classmethod
    def of(
        cls,
        sizes: Sequence[int],
        places: Sequence[int],
        room: Sequence[int],
        dtypes: Iterable[torch.dtype],
        device: torch.device,
    ) -> PackTable | None:
        """A table; None for another device than CUDA, and where there is no kernel. Arguments as above."""
        if device.type != "cuda" or not sizes or _kernel(device) is None:
            return None
        return cls(sizes, places, room, dtypes, device)

    def takes(self, tensors: Sequence[Tensor]) -> bool:
        """Whether each of *tensors*, of the table's dtypes, is what lies in memory from its address on."""
        return (
            _PLAIN.issuperset(map(type, tensors))
            and all(map(Tensor.is_contiguous, tensors))
            and not (self._lazy and (any(map(Tensor.is_neg, tensors)) or any(map(Tensor.is_conj, tensors))))
        )

    def pack(self, buffer: Tensor, tensors: Sequence[Tensor]) -> None:
        """Copy *tensors*, which it `takes`, into a buffer, on the current stream."""
        if not self._tiles:
            return
        if not self._read.query():
            # the device has not come to read what was written last
            self._told = torch.empty_like(self._told, pin_memory=True)
        page = (ctypes.c_char * self._words.size).from_address(self._told.data_ptr())
        self._words.pack_into(page, 0, *map(Tensor.data_ptr, tensors))
        self._addresses.copy_(self._told, non_blocking=True)
        self._read.record()
        _launch(
            self._kernel,
            self._tiles,
            buffer.data_ptr(),
            self._addresses,
            self._facts,
            self._owners,
            self._count,
        )


def warm(device: torch.device) -> None:
    """Compile and load what tables need on *device*, which can make the host wait for all that it does."""
    if device.type == "cuda":
        _kernel(device)


@cache
def _kernel(device: torch.device) -> Any:
    """The kernel, compiled and loaded; None where that cannot be done."""
    try:
        from .kernels import pack_tiles

        with torch.cuda.device(device):
            some = torch.zeros(4, dtype=torch.int64, device=device)
            # packs nothing: its room is 0
            _launch(pack_tiles, 1, some.data_ptr(), some, some, some.to(torch.int32), 1)
            torch.cuda.synchronize(device)
    except Exception as error:  # noqa: BLE001 - a compiler that is missing or fails, in whatever way
        _log.info("no kernel that packs by tables on %s, torch's calls are used: %s", device, error)
        return None
    return pack_tiles


def _launch(kernel: Any, tiles: int, *arguments: Any) -> None:
    kernel[(tiles,)](*arguments, TILE=TILE, BYTES=1024, num_warps=4)
