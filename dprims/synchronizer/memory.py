"""Flat memory for buckets, taken again and again; and how much of it is left.

On a CPU the first touch of fresh pages costs more than a whole transfer (the kernel clears each page), so
host
memory is recycled: a block comes back when the last tensor that uses it is gone, wherever it is held: by a
model, or by an operation that was abandoned. Nothing that is in use is ever handed out. On CUDA torch's own
allocator does the same.
"""

from __future__ import annotations

import ctypes
import weakref
from collections import deque
from pathlib import Path

import torch
from torch import Tensor

__all__ = ["Memory", "free_bytes"]


class Memory:
    """Takes flat uint8 tensors on one device, and takes back what is no longer used. Thread-safe."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._free: dict[int, deque[Tensor]] = {}

    def take(self, nbytes: int) -> Tensor:
        """Uninitialised memory of `nbytes` bytes."""
        if self.device.type != "cpu" or not nbytes:
            return torch.empty(nbytes, dtype=torch.uint8, device=self.device)
        free = self._free.setdefault(nbytes, deque())
        try:
            block = free.popleft()
        except IndexError:
            block = torch.empty(nbytes, dtype=torch.uint8)
        # torch holds on to the array for as long as any tensor uses the memory
        array = (ctypes.c_uint8 * nbytes).from_address(block.data_ptr())
        weakref.finalize(array, free.append, block).atexit = False
        return torch.frombuffer(array, dtype=torch.uint8)

    def trim(self) -> None:
        """Give back to the system what has come back and was not taken again."""
        for free in list(self._free.values()):
            free.clear()


def free_bytes(device: torch.device) -> int | None:
    """Memory that this process can still take on `device`; None where that is unknown."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(free + kept)
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        available = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration, ValueError):
        return None
    try:
        limit = int(Path("/sys/fs/cgroup/memory.max").read_text())
        used = int(Path("/sys/fs/cgroup/memory.current").read_text())
        stat = Path("/sys/fs/cgroup/memory.stat").read_text().splitlines()
        cache = next(int(line.split()[1]) for line in stat if line.startswith("inactive_file "))
    except (OSError, StopIteration, ValueError):
        # no limit ("max"), or another kind of cgroup
        return available
    return min(available, max(0, limit - used + cache))
