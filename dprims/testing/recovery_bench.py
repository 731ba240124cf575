"""The way that a refit recovers without dprims, to measure against: wait for the deadline, then start anew.

Each rank is a process that blocks in plain gloo broadcasts. When a peer dies, those that are wired to it hear
of it and the others wait for the group's timeout; the controller settles all of them, builds a group over the
survivors and sends again.
"""

from __future__ import annotations

import os
import signal
import struct
import time
from pathlib import Path
from typing import Any

import torch

from ..engines.process import WorkerProcess
from ..exceptions import PeerLost
from ..synchronizer.group import _gloo
from ..synchronizer.rendezvous import join_store, leader_store

__all__ = ["outage_with_a_deadline", "read_stamp"]

LIMIT_S = 120.0


class PlainRank:
    """One rank of a plain group: rank 0 sends."""

    def __init__(self, nbytes: int, buckets: int) -> None:
        torch.set_num_threads(1)
        self.buffers = [torch.zeros(nbytes // buckets, dtype=torch.uint8) for _ in range(buckets)]
        self._old: list[Any] = []  # a group that failed is never dropped: its end may block

    def build(self, where: tuple[str, int], prefix: str, rank: int, size: int, timeout_s: float) -> None:
        """Make a group, and keep it."""
        from torch.distributed import PrefixStore  # type: ignore[attr-defined]

        self.group, _ = _gloo(PrefixStore(prefix, join_store(*where)), rank, size, timeout_s, None)
        self._old.append(self.group)

    def transfer(self, die_at: int | None = None, stamp: str | None = None) -> None:
        """Broadcast every bucket, one after another."""
        from torch.distributed import BroadcastOptions

        for index, buffer in enumerate(self.buffers):
            if index == die_at and stamp is not None:
                Path(stamp).write_bytes(struct.pack("d", time.monotonic()))
                os.kill(os.getpid(), signal.SIGKILL)
            options = BroadcastOptions()
            options.rootRank = 0
            self.group.broadcast([buffer], options).wait()


def read_stamp(path: Path) -> float:
    """The moment that a process left in a file, on the monotonic clock."""
    moment: float = struct.unpack("d", path.read_bytes())[0]
    return moment


def outage_with_a_deadline(
    stamp: Path, *, receivers: int, nbytes: int, buckets: int, deadline_s: float
) -> float:
    """Seconds from the SIGKILL of a receiver in mid-transfer until the survivors have everything."""
    store, host, port = leader_store("127.0.0.1")
    ranks = [WorkerProcess(f"plain-{rank}", PlainRank, (nbytes, buckets)) for rank in range(receivers + 1)]
    try:
        for rank in ranks:
            rank.ready.result(LIMIT_S)
        _build(ranks, (host, port), "first", deadline_s)
        for future in [rank.call("transfer") for rank in ranks]:
            future.result(LIMIT_S)
        last = len(ranks) - 1
        asked = [
            rank.call("transfer", buckets // 2 if place == last else None, str(stamp))
            for place, rank in enumerate(ranks)
        ]
        for place, future in enumerate(asked):
            error = future.exception(LIMIT_S)
            if place == last and not isinstance(error, PeerLost):
                raise RuntimeError(f"the victim lives: {error!r}")
        survivors = ranks[:-1]
        _build(survivors, (host, port), "second", deadline_s)
        for future in [rank.call("transfer") for rank in survivors]:
            future.result(LIMIT_S)
        return time.monotonic() - read_stamp(stamp)
    finally:
        for rank in ranks:
            rank.kill()
        del store


def _build(ranks: list[WorkerProcess], where: tuple[str, int], prefix: str, timeout_s: float) -> None:
    built = [
        process.call("build", where, prefix, rank, len(ranks), timeout_s)
        for rank, process in enumerate(ranks)
    ]
    for future in built:
        future.result(LIMIT_S)
