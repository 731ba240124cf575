"""What one device does of a refit by itself: packing, digests, copies into live tensors, and a sender's loop.

All against a copy of the same bytes on the same device, in the same run. The code behind ``dprims bench
pack``.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import Literal

import torch

from ..synchronizer.digest import Digests
from ..synchronizer.flights import BucketLayout
from ..synchronizer.group import CommGroup, leader_store
from ..synchronizer.guard import Guard
from ..synchronizer.packing import dtype_of, pack
from ..synchronizer.plan import Bucket, Plan, TensorMeta
from ..synchronizer.sources import DictSource
from ..synchronizer.transfer import send

__all__ = ["PackSpeed", "bench_pack"]

IN_A_ROW = 4
"""How many buckets follow one another: the host prepares one while the device has the one before."""

BUCKETS = 8
"""Into how many buckets the sender's loop cuts the same bytes."""

LIMIT_S = 120.0


@dataclass(frozen=True, slots=True)
class PackSpeed:
    """Medians, in bytes of payload a second and in seconds of the host.

    Attributes:
        nbytes: payload.
        tensors: in how many.
        copy_gb_per_s: a copy of the packed bytes.
        pack_gb_per_s: tensors into a buffer.
        adopt_gb_per_s: a buffer's tensors into live ones, as a module's sink commits them.
        digest_gb_per_s: the digest of a buffer.
        loop_gb_per_s: a sender's whole verified loop, over a group of its own.
        pack_us_per_tensor, unpack_us_per_tensor, adopt_us_per_tensor: the host's time to pack, to see a
            buffer's tensors, and to copy them into live ones.
        loop_us_per_bucket: the host's time a bucket, in the sender's loop.
        loop_us_allowed: what it may be: 100 us and 1 us a tensor.
    """

    nbytes: int
    tensors: int
    copy_gb_per_s: float
    pack_gb_per_s: float
    adopt_gb_per_s: float
    digest_gb_per_s: float
    loop_gb_per_s: float
    pack_us_per_tensor: float
    unpack_us_per_tensor: float
    adopt_us_per_tensor: float
    loop_us_per_bucket: float
    loop_us_allowed: float


def bench_pack(metas: Sequence[TensorMeta], *, device: str = "cpu", rounds: int = 9) -> PackSpeed:
    """Pack all of `metas` into one buffer, copy them from there into live tensors, digest it, and send them.

    In this process. The device's time is that of buckets that follow one another; the host's is taken apart
    from it. The sender's loop is a group of one rank: everything but the wire.
    """
    where = torch.device(device)
    tensors = {meta.name: torch.zeros(meta.shape, dtype=dtype_of(meta.dtype), device=where) for meta in metas}
    live = [torch.zeros_like(tensor) for tensor in tensors.values()]
    # as one bucket, and packed whatever the plan would do with it
    planned = Plan.build(metas, bucket_bytes=1 << 40)
    pieces = tuple(piece for bucket in planned.buckets for piece in bucket.pieces)
    offsets, end = [], 0
    for meta in metas:
        offsets.append(end)
        end += -(-meta.nbytes // 256) * 256
    bucket = Bucket(
        0,
        "packed",
        tuple(piece._replace(offset=at) for piece, at in zip(pieces, offsets, strict=True)),
        end,
        whole=True,
    )
    # each bucket of a refit has a table of its own, which is not used again before its end
    layouts = [BucketLayout.of(bucket, planned, None, where) for _ in range(IN_A_ROW)]
    layout, tables = layouts[0], cycle([one.table for one in layouts])
    buffer, other = (torch.empty(end, dtype=torch.uint8, device=where) for _ in range(2))
    digests = Digests([end], where)
    ordered = list(tensors.values())
    runs = [run for _, _, part in layout.parts for run in part]
    pack(buffer, ordered, offsets, runs, next(tables))
    views = list(layout.on(buffer).values())
    steps: dict[str, Callable[[], object]] = {
        "copy": lambda: other.copy_(buffer),
        "pack": lambda: pack(buffer, ordered, offsets, runs, next(tables)),
        "unpack": lambda: layout.on(buffer),
        "adopt": lambda: torch._foreach_copy_(live, views),
        "digest": lambda: digests.add(0, buffer),
    }
    device_s, host_s = _time(steps, where, rounds)
    nbytes = sum(meta.nbytes for meta in metas)
    speed = {name: nbytes / max(took, 1e-9) / 1e9 for name, took in device_s.items()}
    us = {name: took / len(metas) * 1e6 for name, took in host_s.items()}
    loop_s, host_loop_s, buckets = _loop(metas, DictSource(tensors), where, rounds)
    return PackSpeed(
        nbytes=nbytes,
        tensors=len(metas),
        copy_gb_per_s=speed["copy"],
        pack_gb_per_s=speed["pack"],
        adopt_gb_per_s=speed["adopt"],
        digest_gb_per_s=speed["digest"],
        loop_gb_per_s=nbytes / loop_s / 1e9,
        pack_us_per_tensor=us["pack"],
        unpack_us_per_tensor=us["unpack"],
        adopt_us_per_tensor=us["adopt"],
        loop_us_per_bucket=host_loop_s / buckets * 1e6,
        loop_us_allowed=100 + len(metas) / buckets,
    )


def _time(
    steps: dict[str, Callable[[], object]], where: torch.device, rounds: int
) -> tuple[dict[str, float], dict[str, float]]:
    """Median seconds of one of several in a row on the device, and of one by itself on the host."""
    device_s: dict[str, list[float]] = {name: [] for name in steps}
    host_s: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(1 + rounds):
        for name, step in steps.items():
            _synchronize(where)
            start = time.perf_counter()
            step()
            alone = time.perf_counter() - start
            _synchronize(where)
            start = time.perf_counter()
            for _ in range(IN_A_ROW):
                step()
            _synchronize(where)
            if number:
                host_s[name].append(alone)
                device_s[name].append((time.perf_counter() - start) / IN_A_ROW)
    return _medians(device_s), _medians(host_s)


def _loop(
    metas: Sequence[TensorMeta], source: DictSource, where: torch.device, rounds: int
) -> tuple[float, float, int]:
    """A sender alone: seconds of a transfer, and of the host's own work in it, medians; and the buckets."""
    total = sum(meta.nbytes for meta in metas)
    plan = Plan.build(metas, bucket_bytes=-(-total // BUCKETS // 4096 + 1) * 4096)
    store, _, _ = leader_store("localhost")
    backend: Literal["gloo", "nccl"] = "nccl" if where.type == "cuda" else "gloo"
    group = CommGroup.build(
        store, "alone", 0, 1, backend=backend, device=where, timeout_s=LIMIT_S, op_timeout_s=LIMIT_S
    )
    took: dict[str, list[float]] = {"wall": [], "host": []}
    try:
        for number in range(1 + rounds):
            start, busy = time.perf_counter(), time.thread_time()
            send(source, group, plan, Guard(deadline=time.monotonic() + LIMIT_S))
            if number:
                took["host"].append(time.thread_time() - busy)
                took["wall"].append(time.perf_counter() - start)
    finally:
        group.release()
    medians = _medians(took)
    return medians["wall"], medians["host"], len(plan.buckets)


def _medians(found: dict[str, list[float]]) -> dict[str, float]:
    return {name: statistics.median(values) for name, values in found.items()}


def _synchronize(where: torch.device) -> None:
    if where.type == "cuda":
        torch.cuda.synchronize(where)
