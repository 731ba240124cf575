"""The loop that sender and receiver share: buckets under way, waits, digests, faults, and the way out."""

from __future__ import annotations

import hashlib
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..exceptions import PeerLost, RefitError, TransferCorrupt
from .digest import BLOCK_BYTES, ROW_BYTES, Digests
from .group import CommGroup
from .guard import Enqueueing, Guard, Query, Work
from .lanes import Lane, Span, Timed, TransferStats, lane_for
from .packing import Run, dtype_of, pack, raw, runs_of, unpack
from .plan import Bucket, Plan
from .tables import PackTable

if TYPE_CHECKING:
    from ..testing.faults import FaultInjector

__all__ = ["BucketLayout", "Flight", "Loop", "WireBuffers", "regions_of"]


@dataclass(slots=True)
class Flight:
    """One bucket under way: the memory that travels, and what has to be kept until it has."""

    bucket: Bucket
    regions: list[Tensor]
    held: list[Tensor]
    release: Callable[[], None] | None = None
    unload: Callable[[], None] | None = None
    arrival: Sequence[Work | Query] = ()
    works: list[Any] = field(default_factory=list)
    began: float = 0.0
    lent: bool = False
    """Whether its memory is there anyway, and is no reason to let it wait for others."""


@dataclass(frozen=True, slots=True)
class BucketLayout:
    """What is known of a bucket's tensors: to look at thousands of them takes longer than the wire."""

    names: tuple[str, ...]
    parts: tuple[tuple[int, int, tuple[Run, ...]], ...]
    """The tensors [first, last) that are packed in one go, and their runs."""

    table: PackTable | None = None
    """How the bucket is packed where one call packs all of it."""

    @classmethod
    def of(
        cls, bucket: Bucket, plan: Plan, part_bytes: int | None, packed_on: torch.device | None = None
    ) -> BucketLayout:
        """Of a bucket whose pieces are whole tensors, in parts of about *part_bytes*, packed on a device."""
        metas = [plan.tensors[piece.tensor] for piece in bucket.pieces]
        dtypes, shapes = [dtype_of(meta.dtype) for meta in metas], [meta.shape for meta in metas]
        offsets = [piece.offset for piece in bucket.pieces]
        parts = tuple(
            (first, last, runs_of(dtypes[first:last], shapes[first:last], offsets[first:last]))
            for first, last in pairwise([0, *_part_ends(offsets, part_bytes)])
        )
        table = None
        if packed_on is not None and len(parts) == 1:
            room = [stop - start for start, stop in pairwise([*offsets, bucket.nbytes])]
            table = PackTable.of([meta.nbytes for meta in metas], offsets, room, set(dtypes), packed_on)
        return cls(tuple(meta.name for meta in metas), parts, table)

    def on(self, memory: Tensor) -> dict[str, Tensor]:
        """The tensors by name, in order, on the bytes of *memory*."""
        runs = [run for _, _, part in self.parts for run in part]
        return dict(zip(self.names, unpack(memory, runs), strict=True))


class Loop:
    """What sender and receiver share: flights, waits, digests, faults, times, and the way out."""

    def __init__(
        self,
        group: CommGroup,
        plan: Plan,
        guard: Guard,
        verify: bool,
        faults: FaultInjector | None,
        rank: int | None,
        on_bucket: Callable[[int], None] | None,
        stats: TransferStats | None = None,
    ) -> None:
        self.group, self.plan, self.guard, self.faults = group, plan, guard, faults
        self.rank = group.rank if rank is None else rank
        self.lane: Lane = lane_for(group.device)
        self.stats = TransferStats() if stats is None else stats
        self.stats.nbytes, self.stats.buckets = plan.nbytes, len(plan.buckets)
        self._spans: list[Span] = []
        self._flights: deque[Flight] = deque()
        self._on_bucket = on_bucket
        self._began = time.monotonic()
        self._first = self._last = self._began
        self._regions = [0]
        for bucket in plan.buckets:
            self._regions.append(self._regions[-1] + len(regions_of(bucket)))
        sizes = [stop - start for bucket in plan.buckets for start, stop in regions_of(bucket)]
        self._enqueueing = Enqueueing(guard, group.interrupt)
        self._digests = Digests(sizes, group.device) if verify else None

    def __enter__(self) -> Loop:
        if self.group.backend == "nccl":
            self._enqueueing.watch()
        self.guard.progress("the first bucket")
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._enqueueing.stop()
        if kind is not None:
            self._walk_away()
            return
        if self.faults is not None:
            try:
                self.faults.at("decision", self.rank)
                self.guard.check()
            except BaseException:
                self._walk_away()
                raise
        self._keep_times(self.lane.finish())

    def _keep_times(self, more: Sequence[Span]) -> None:
        """Put what was timed on the host, and *more*, into the stats."""
        self.stats.seconds = time.monotonic() - self._began
        self.stats.wire_s = self._last - self._first
        self.stats.spans = sorted([*self._spans, *more], key=lambda span: span.start)

    def _walk_away(self) -> None:
        now = time.monotonic()
        cut = [Span("cut", flight.bucket.index, flight.began, now) for flight in self._flights]
        self._keep_times(cut)
        flights, self._flights = self._flights, deque()

        # memory that is let go of must be written to neither by the wire nor by what runs beside it
        def pending() -> Sequence[Query]:
            awaited: list[Any] = [q for flight in flights for q in flight.arrival]
            return [q for q in (*awaited, *self.lane.idle()) if hasattr(q, "query")]

        works = [work for flight in flights for work in flight.works]
        held = [(flight.regions, flight.held) for flight in flights]
        self.group.abort(pending=pending, works=works, held=held)
        # a device answers now, where it is not lost
        with suppress(RuntimeError):
            self._keep_times([*cut, *self.lane.finish()])

    def on_host(self, phase: str, bucket: int) -> AbstractContextManager[None]:
        """Take the time that the body takes on the host."""
        return Timed(self._spans, phase, bucket)

    def wire_buffers(self) -> WireBuffers:
        """Memory for packed buckets."""
        sizes = [bucket.nbytes for bucket in self.plan.buckets if bucket.lane == "packed"]
        nbytes = min(self.lane.buffers, len(sizes)) * max(sizes, default=0)
        self.stats.buffer_bytes += nbytes
        return WireBuffers(self.group.memory.take(nbytes), max(sizes, default=0))

    def make_room(self, bucket: Bucket, buffers: WireBuffers | None = None, *, lent: bool = False) -> None:
        """Wait until one more bucket may be under way: small ones, and lent ones, keep nobody waiting.

        Args:
            bucket: the one that comes.
            buffers: where it is to find room, if it needs any.
            lent: whether it takes no memory.
        """
        self.guard.check()
        most = self.lane.depth * self.plan.bucket_bytes
        while self._flights and (
            len(self._flights) >= self.lane.flights
            or (not lent and bucket.nbytes + sum(f.bucket.nbytes for f in self._flights if not f.lent) > most)
            or (buffers is not None and not buffers.fits(bucket.nbytes))
        ):
            self._land(self._flights.popleft())

    def land_all(self) -> None:
        """Wait for everything that is under way, and for what was made of it."""
        while self._flights:
            self._land(self._flights.popleft())
        for query in self.lane.idle():
            self.guard.wait(query)

    def dispatch(self, flight: Flight) -> None:
        """Enqueue a bucket's broadcasts."""
        flight.began = time.monotonic()
        if flight.bucket.index == 0:
            self._first = flight.began
        # from here on the memory may be in use, whatever happens
        self._flights.append(flight)
        try:
            with self._enqueueing:
                if flight.bucket.lane == "direct":
                    with self.group.coalesced() as works:
                        flight.works = works
                        for region in flight.regions:
                            works.append(self.group.broadcast(region))  # each is known before the next
                elif flight.bucket.nbytes:
                    flight.works.append(self.group.broadcast(flight.regions[0]))
        except RuntimeError as error:
            # a backend that knows already that a peer is gone takes nothing more
            self.guard.check()
            raise PeerLost(f"{self.guard.what} cannot begin bucket {flight.bucket.index}: {error}") from error
        flight.arrival = self.lane.arrival(flight.works)

    def _land(self, flight: Flight) -> None:
        index = flight.bucket.index
        try:
            for query in flight.arrival:
                self.guard.wait(query)
            self._last = self.lane.arrived(flight.arrival)
            self._spans.append(Span("wire", index, flight.began, self._last))
            self.guard.progress(index)
            if flight.unload is not None:
                if self.faults is not None:
                    self.faults.at("bucket", self.rank, index, buffer=lambda: flight.regions[0])
                    self.guard.check()
                with self.lane.side():
                    self.digest(flight.bucket, flight.regions)
                    with self.lane.span("unpack", index):
                        flight.unload()
        except BaseException:
            self._flights.appendleft(flight)
            raise
        if flight.release is not None:
            flight.release()
        if self._on_bucket is not None:
            self._on_bucket(index)

    def corrupt_copy(self, flight: Flight) -> None:
        """On the sender: strike the faults that are due at this bucket; one that corrupts sends a copy."""
        if self.faults is None:
            return

        def copy() -> Tensor:
            flight.held.append(flight.regions[0])
            flight.regions[0] = flight.regions[0].clone()
            return flight.regions[0]

        self.faults.at("bucket", self.rank, flight.bucket.index, buffer=copy)
        self.guard.check()

    def layout(self, bucket: Bucket) -> BucketLayout:
        """How a bucket of whole tensors is laid out; worked out once a plan."""
        known = self.group.layouts(self.plan.digest)
        if bucket.index not in known:
            packed_on = self.group.device if self.group.rank == 0 else None
            known[bucket.index] = BucketLayout.of(bucket, self.plan, self.lane.cache_bytes, packed_on)
        return known[bucket.index]

    def lay_out(self) -> None:
        """Work out what packing needs, while nothing is on the wire: some of it takes memory on a GPU."""
        if self.group.device.type == "cuda":
            for bucket in self.plan.buckets:
                if bucket.lane == "packed":
                    self.layout(bucket)

    def pack(self, bucket: Bucket, buffer: Tensor, tensors: Sequence[Tensor]) -> None:
        """Pack a bucket and take its digest; on a CPU part by part, while each is in the core's cache."""
        region = self._regions[bucket.index]
        offsets = [piece.offset for piece in bucket.pieces]
        layout = self.layout(bucket)
        row = 0
        for first, last, runs in layout.parts:
            stop = offsets[last] if last < len(offsets) else bucket.nbytes
            with self.lane.span("pack", bucket.index):
                pack(buffer[:stop], tensors[first:last], offsets[first:last], runs, layout.table)
            if self._digests is not None:
                whole = stop if last == len(offsets) else stop // ROW_BYTES * ROW_BYTES
                with self.lane.span("digest", bucket.index):
                    self._digests.add(region, buffer[row * ROW_BYTES : whole], row)
                row = whole // ROW_BYTES

    def digest(self, bucket: Bucket, regions: Sequence[Tensor]) -> None:
        """Take the digests of a bucket's regions."""
        if self._digests is None:
            return
        with self.lane.span("digest", bucket.index):
            for number, region in enumerate(regions, self._regions[bucket.index]):
                self._digests.add(number, region)

    def digest_beside(self, flight: Flight, regions: Sequence[Tensor]) -> None:
        """Take the digests while the bucket is on the wire; it has left when both are done."""
        self.digest(flight.bucket, regions)
        flight.arrival = [*flight.arrival, *self.lane.idle()]

    def send_digests(self) -> None:
        """Broadcast all digests, behind the last bucket."""
        if self._digests is not None:
            with self.lane.side():
                mine = self._digests.finish()
                self._exchange(mine)
            self.stats.content = hashlib.sha256(raw(mine)).hexdigest()

    def compare_digests(self) -> None:
        """Receive the sender's digests, and compare. Raises TransferCorrupt."""
        if self._digests is None:
            return
        with self.lane.side():
            mine = self._digests.finish()
            sent = torch.empty_like(mine)
            self._exchange(sent)
            # read on the stream that it is made on
            differs = mine.ne(sent).nonzero().flatten().tolist()
        if differs:
            raise TransferCorrupt(self._explain(self._digests, differs[0], len(differs)))
        self.stats.content = hashlib.sha256(raw(mine)).hexdigest()

    def _exchange(self, digests: Tensor) -> None:
        if not digests.numel():
            return
        self.guard.progress("the digests")
        behind = Bucket(len(self.plan.buckets), "packed", (), digests.nbytes, whole=True)
        flight = Flight(behind, [digests], [])
        self.dispatch(flight)
        for query in (*flight.arrival, *self.lane.idle()):
            self.guard.wait(query)
        self._flights.pop()

    def _explain(self, digests: Digests, index: int, count: int) -> str:
        region, block = digests.locate(index)
        bucket = next(b for b in self.plan.buckets if region < self._regions[b.index + 1])
        start, stop = regions_of(bucket)[region - self._regions[bucket.index]]
        start += block * BLOCK_BYTES
        stop = min(stop, start + BLOCK_BYTES)
        hit = tuple(p for p in bucket.pieces if p.offset < stop and p.offset + p.stop - p.start > start)
        names = self.plan.names(replace(bucket, pieces=hit or bucket.pieces))
        return (
            f"rank {self.rank} of {self.group.name}: bucket {bucket.index} of {len(self.plan.buckets)} "
            f"({bucket.lane}, {bucket.nbytes} bytes) arrived with another digest than it was sent with: "
            f"bytes {start} to {stop}, in {names}; {count} of the digests differ in all"
        )


class WireBuffers:
    """Memory that packed buckets travel in, one after another.

    Large buckets have slots of `slot_bytes`; small ones lie side by side, so that many can be under way.
    """

    def __init__(self, memory: Tensor, slot_bytes: int) -> None:
        self._memory = memory
        self._slot_bytes = slot_bytes
        self._taken: dict[int, int] = {}

    def fits(self, nbytes: int) -> bool:
        """Whether so many bytes can be taken."""
        return self._place(nbytes) is not None

    def take(self, nbytes: int) -> Tensor:
        """Memory that nothing else uses."""
        place = self._place(nbytes)
        if place is None:
            raise RefitError(f"no wire buffer has {nbytes} bytes free of {self._memory.numel()}")
        if nbytes:
            self._taken[place] = place + nbytes
        return self._memory[place : place + nbytes]

    def give_back(self, buffer: Tensor) -> None:
        """What was taken is free again."""
        if buffer.numel():
            del self._taken[int(buffer.storage_offset() - self._memory.storage_offset())]

    def _place(self, nbytes: int) -> int | None:
        """Where so many bytes are free: for large buckets at the start of a slot, for small ones anywhere."""
        if not nbytes:
            return 0
        large = 2 * nbytes > self._slot_bytes
        places = range(0, self._memory.numel(), self._slot_bytes) if large else (0, *self._taken.values())
        for start in places:
            stop = start + nbytes
            if stop <= self._memory.numel() and not any(
                start < b and a < stop for a, b in self._taken.items()
            ):
                return start
        return None


def _part_ends(offsets: Sequence[int], nbytes: int | None) -> list[int]:
    """Where to cut a list of offsets into parts of about `nbytes`: the ends of the parts."""
    ends = []
    start = 0
    for index, offset in enumerate(offsets):
        if nbytes is not None and offset - start >= nbytes:
            ends.append(index)
            start = offset
    return [*ends, len(offsets)]


def regions_of(bucket: Bucket) -> list[tuple[int, int]]:
    """The byte ranges of a bucket that travel as one: all of a packed one, each piece of a direct one."""
    if bucket.lane == "packed":
        return [(0, bucket.nbytes)]
    return [(piece.offset, piece.offset + piece.stop - piece.start) for piece in bucket.pieces]
