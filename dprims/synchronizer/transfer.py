"""Sending and receiving the buckets of a plan over one group, under a guard.

Both sides keep a few buckets under way and wait only for the oldest, so that packing, the wire, digests and
unpacking overlap. A sender packs small tensors into reused wire buffers and sends large ones from where they
are. A receiver lets bytes arrive where they stay, in memory that the sink lends, and uses wire buffers and
`sink.write` for the rest. A sink's code runs only when its bucket has arrived, so it may block on the device.

Each bucket's digest is taken on both sides; the sender's come behind the last bucket in one small tensor.

When a transfer raises, its group is finished: over NCCL it was aborted, and nothing writes any more (or
`DeviceLost`); over gloo it was left behind with every buffer that it could still write into.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..exceptions import RefitError
from .flights import Flight, Loop, regions_of
from .group import CommGroup
from .guard import Guard
from .interfaces import LendingSink, WeightSink, WeightSource
from .lanes import TransferStats, lane_for
from .memory import free_bytes
from .packing import dtype_of, flat
from .plan import KV_SCALES, Bucket, Plan, TensorMeta
from .sources import in_plan_order

if TYPE_CHECKING:
    from ..testing.faults import FaultInjector

__all__ = ["TransferStats", "lacks_memory", "participate", "receive", "send"]


def send(
    source: WeightSource,
    group: CommGroup,
    plan: Plan,
    guard: Guard,
    *,
    kv_scales: Mapping[str, float] | None = None,
    verify: bool = True,
    faults: FaultInjector | None = None,
    rank: int | None = None,
    on_bucket: Callable[[int], None] | None = None,
    stats: TransferStats | None = None,
) -> TransferStats:
    """Send every tensor of `source` to all ranks of the group. Collective with `receive` on each of them.

    Args:
        source: yields the plan's tensors in the plan's order, on the group's device.
        group: this rank is its rank 0.
        plan: as agreed in the handshake.
        guard: bounds every wait.
        kv_scales: values for `plan.kv_scales`.
        verify: send digests; the same on all ranks.
        faults: a fault injector, called once a bucket and before returning.
        rank: what this rank is called towards `faults`; by default its rank in the group.
        on_bucket: called with a bucket's index when it has arrived everywhere that this rank sends to.
        stats: filled in and returned; also when this raises, as far as it came.

    Raises:
        RefitError: the source does not follow the plan; the tensor is named.
        RefitAborted, RefitTimeout, PeerLost, DeviceLost: from the guard, the wire and the device.
    """
    loop = Loop(group, plan, guard, verify, faults, rank, on_bucket, stats)
    tensors = in_plan_order(source, plan, group.device, kv_scales or {})
    # parameters go as they are: whatever reads them is not to be recorded
    with torch.no_grad(), loop.lane.here(), loop:
        pulled: dict[int, Tensor] = {}
        position = 0
        buffers = loop.wire_buffers()
        loop.lay_out()
        for bucket in plan.buckets:
            loop.make_room(bucket, buffers if bucket.lane == "packed" else None)
            with loop.on_host("gather", bucket.index):
                while position <= bucket.pieces[-1].tensor:
                    pulled[position] = next(tensors)
                    position += 1
            loop.lane.follow()
            parts = _parts(bucket, pulled, plan)
            with loop.lane.side():
                if bucket.lane == "packed":
                    buffer = buffers.take(bucket.nbytes)
                    loop.pack(bucket, buffer, parts)
                    # whatever was packed has been read by the time the bucket has left
                    flight = Flight(bucket, [buffer], parts, release=partial(buffers.give_back, buffer))
                    loop.corrupt_copy(flight)
                    loop.dispatch(flight)
                else:
                    regions = [part[p.start : p.stop] for part, p in zip(parts, bucket.pieces, strict=True)]
                    flight = Flight(bucket, regions.copy(), parts)
                    loop.corrupt_copy(flight)
                    loop.dispatch(flight)
                    loop.digest_beside(flight, regions)
        next(tensors, None)
        loop.land_all()
        loop.send_digests()
    return loop.stats


def receive(
    sink: WeightSink,
    group: CommGroup,
    plan: Plan,
    guard: Guard,
    *,
    verify: bool = True,
    faults: FaultInjector | None = None,
    rank: int | None = None,
    on_bucket: Callable[[int], None] | None = None,
    stats: TransferStats | None = None,
) -> TransferStats:
    """Receive every bucket into `sink`, whose `begin` has been called. Collective with `send` on rank 0.

    A sink of several stages is filled by one call for each. Commit and rollback are the caller's. Arguments
    as for `send`.

    Raises:
        TransferCorrupt: a bucket arrived with another digest than it was sent with; bucket and tensors are
            named.
        RefitAborted, RefitTimeout, PeerLost, DeviceLost: from the guard, the wire and the device.
        Whatever the sink raises.
    """
    loop = Loop(group, plan, guard, verify, faults, rank, on_bucket, stats)
    with loop.lane.here(), loop:
        desk = _Unloading(sink, loop)
        loop.lane.follow()
        for bucket in plan.buckets:
            desk.make_room(bucket)
            flight = desk.expect(bucket)
            with loop.lane.side():
                loop.dispatch(flight)
        loop.land_all()
        loop.compare_digests()
    return loop.stats


def participate(source: WeightSource, plan: Plan, guard: Guard, *, device: torch.device) -> None:
    """What a rank does that holds shards of the source and does not send: yield each tensor, in step.

    Collective with the sender's `send` through whatever the source gathers over, which the guard cannot cut.
    """
    with torch.no_grad():
        for index, _ in enumerate(in_plan_order(source, plan, device, dict.fromkeys(plan.kv_scales, 0.0))):
            guard.progress(f"tensor {index}")
            guard.check()


def lacks_memory(sink: WeightSink | None, plans: Sequence[Plan], device: torch.device) -> str | None:
    """In words, what this rank lacks to take part in transfers of `plans`; None when memory suffices.

    For the handshake's `refusal`, so that nothing is sent towards a rank that cannot take it.

    Args:
        sink: None on a sender.
        plans: one a stage; wire buffers are taken for one at a time, staging for all.
        device: where the tensors go.
    """
    free = free_bytes(device)
    if free is None:
        return None
    lending = sink if isinstance(sink, LendingSink) else None
    staging = sum(lending.staging_bytes(plan) for plan in plans) if lending else 0
    wire = max((lane_for(device).buffers * plan.packed_bytes for plan in plans), default=0)
    if staging + wire <= free:
        return None
    return f"{staging} bytes of staging and {wire} of wire buffers are needed on {device}, {free} are free"


def _parts(bucket: Bucket, pulled: dict[int, Tensor], plan: Plan) -> list[Tensor]:
    """The tensors of a bucket, flat in the direct lane; each leaves `pulled` with its last byte."""
    if bucket.lane == "packed":
        return [pulled.pop(piece.tensor) for piece in bucket.pieces]
    parts = []
    for piece in bucket.pieces:
        if piece.start == 0:
            # a strided tensor above the bucket size is copied once, not once a chunk
            pulled[piece.tensor] = flat(pulled[piece.tensor])
        whole = piece.stop == plan.tensors[piece.tensor].nbytes
        parts.append(pulled.pop(piece.tensor) if whole else pulled[piece.tensor])
    return parts


class _Unloading:
    """Where each bucket arrives, and how it gets to the sink from there."""

    def __init__(self, sink: WeightSink, loop: Loop) -> None:
        self._sink, self._loop, self._plan = sink, loop, loop.plan
        self._lender = sink if isinstance(sink, LendingSink) else None
        self._device = loop.group.device
        self._shared: dict[str, list[str]] = {}
        for alias, name in self._plan.aliases:
            self._shared.setdefault(name, []).append(alias)
        # an abandoned gloo receive can write later: never into live memory
        borrow = self._lender is not None and not (self._lender.in_place and loop.group.backend == "gloo")
        self._buckets: dict[int, Tensor] = {}
        self._tensors: dict[int, Tensor] = {}
        if borrow and self._lender is not None:
            self._borrow(self._lender)
        owed = any(b.lane == "packed" and b.index not in self._buckets for b in self._plan.buckets)
        self._buffers = loop.wire_buffers() if owed else None

    def _borrow(self, sink: LendingSink) -> None:
        """Take everything that the sink lends, before the first byte: if memory is short, it is now."""
        for bucket in self._plan.buckets:
            lent = sink.lend_bucket(self._plan, bucket) if bucket.whole else None
            if lent is not None:
                self._buckets[bucket.index] = self._sized(lent, bucket.nbytes, f"bucket {bucket.index}")
                continue
            for piece in bucket.pieces if bucket.lane == "direct" else ():
                meta = self._plan.tensors[piece.tensor]
                if piece.start:
                    continue
                held = next(filter(sink.holds, self._names_of(meta)), None)
                if held is not None:
                    lent = sink.lend_tensor(meta if held == meta.name else replace(meta, name=held))
                    if lent is not None:
                        self._tensors[piece.tensor] = self._sized(lent, meta.nbytes, str(meta))
        lent_bytes = sum(t.numel() for t in (*self._buckets.values(), *self._tensors.values()))
        self._loop.stats.staging_bytes = lent_bytes

    def _sized(self, lent: Tensor, nbytes: int, what: str) -> Tensor:
        if lent.dtype != torch.uint8 or lent.shape != (nbytes,) or not lent.is_contiguous():
            raise RefitError(
                f"the sink lent {lent.dtype}{list(lent.shape)} for {what}; flat uint8 of {nbytes} is needed"
            )
        if lent.device != self._device:
            raise RefitError(
                f"the sink lent memory on {lent.device} for {what}; the group is on {self._device}"
            )
        return lent

    def make_room(self, bucket: Bucket) -> None:
        lent = bucket.index in self._buckets
        buffers = self._buffers if bucket.lane == "packed" and not lent else None
        self._loop.make_room(bucket, buffers, lent=lent)

    def expect(self, bucket: Bucket) -> Flight:
        buffer = self._buckets.pop(bucket.index, None)
        lent, release = buffer is not None, None
        if buffer is None and self._buffers is not None and bucket.lane == "packed":
            buffer = self._buffers.take(bucket.nbytes)
            release = partial(self._buffers.give_back, buffer)
        if buffer is not None:
            regions = [buffer[start:stop] for start, stop in regions_of(bucket)]
            unload = partial(self._unpack, bucket, buffer, lent=lent)
            return Flight(bucket, regions, [buffer], release, unload, lent=lent)
        regions = [self._region(piece.tensor, piece.start, piece.stop) for piece in bucket.pieces]
        whole = {p.tensor: self._tensors[p.tensor] for p in bucket.pieces if p.tensor in self._tensors}
        return Flight(bucket, regions, list(whole.values()), None, partial(self._hand_over, bucket, whole))

    def _region(self, index: int, start: int, stop: int) -> Tensor:
        """Memory for one piece of a large tensor: the sink's, or one that lives until the tensor is whole."""
        meta = self._plan.tensors[index]
        if index not in self._tensors:
            if self._lender is not None and not any(map(self._lender.holds, self._written_as(meta))):
                return self._fresh(stop - start)
            self._tensors[index] = self._fresh(meta.nbytes)
        return self._tensors[index][start:stop]

    def _written_as(self, meta: TensorMeta) -> Sequence[str]:
        """The names under which the sink is handed what arrives as *meta*, or parts of it."""
        if meta.name == KV_SCALES:
            return self._plan.kv_scales
        return self._names_of(meta)

    def _names_of(self, meta: TensorMeta) -> tuple[str, ...]:
        """Its name, and those that the sender has tied to it."""
        return (meta.name, *self._shared.get(meta.name, ()))

    def _fresh(self, nbytes: int) -> Tensor:
        memory = self._loop.group.memory.take(nbytes)
        self._loop.lane.uses(memory)
        self._loop.lane.follow()
        return memory

    def _unpack(self, bucket: Bucket, buffer: Tensor, *, lent: bool) -> None:
        self._deliver(self._loop.layout(bucket).on(buffer), lent=lent)

    def _hand_over(self, bucket: Bucket, whole: dict[int, Tensor]) -> None:
        done: dict[str, Tensor] = {}
        for piece in bucket.pieces:
            meta = self._plan.tensors[piece.tensor]
            if piece.tensor in whole and piece.stop == meta.nbytes:
                done[meta.name] = whole.pop(piece.tensor).view(dtype_of(meta.dtype)).view(meta.shape)
                self._tensors.pop(piece.tensor, None)
        self._deliver(done, lent=False)

    def _deliver(self, tensors: dict[str, Tensor], *, lent: bool) -> None:
        """Hand what has come whole to the sink, under all its names; *lent*: all of it is in its memory."""
        scales = tensors.pop(KV_SCALES, None)
        self._write(tensors, lent=lent)
        # in one order on every rank: what a sink does with a tensor may be a collective
        self._write(
            {alias: tensor for name, tensor in tensors.items() for alias in self._shared.get(name, ())},
            lent=lent,
        )
        if scales is not None:
            self._write(dict(zip(self._plan.kv_scales, scales, strict=True)), lent=False)

    def _write(self, tensors: dict[str, Tensor], *, lent: bool) -> None:
        if self._lender is not None and tensors:
            self._lender.write_bucket(tensors, lent=lent)
            return
        for name, tensor in tensors.items():
            self._sink.write(name, tensor)
