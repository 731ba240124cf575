"""What differs between devices in a transfer: streams, when bytes have arrived, and time.

The transfer's loop is written once; it asks a lane for these. On a CPU everything happens in the order in
which it is written, and a work is waited for itself. On CUDA packing, digests and copies run on a side
stream, arrival is an event, and the host waits for nothing but events.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .guard import Query, Work

__all__ = ["CpuLane", "CudaLane", "Lane", "Span", "Timed", "TransferStats", "lane_for"]


class Span(NamedTuple):
    """One phase of one bucket, on the monotonic clock, in seconds."""

    phase: str
    bucket: int
    start: float
    stop: float


@dataclass(slots=True)
class TransferStats:
    """What one `send` or `receive` did. Seconds are summed over buckets, and phases overlap.

    Attributes:
        nbytes: bytes of the tensors that travelled.
        buckets: number of buckets.
        wire_s: from the first bucket's dispatch to the last one's arrival.
        seconds: the whole call.
        buffer_bytes: wire buffers taken.
        staging_bytes: memory that the sink lent.
        content: hex digest of all that travelled, equal for equal weights under one plan; empty when `verify`
            was off.
        spans: gather, pack, wire, digest and unpack of each bucket; ``cut`` is what was under way when a
            transfer failed, from its dispatch.
    """

    nbytes: int = 0
    buckets: int = 0
    wire_s: float = 0.0
    seconds: float = 0.0
    buffer_bytes: int = 0
    staging_bytes: int = 0
    content: str = ""
    spans: list[Span] = field(default_factory=list, repr=False)

    def phase_s(self, phase: str) -> float:
        """Seconds in one phase, over all buckets."""
        return sum(span.stop - span.start for span in self.spans if span.phase == phase)

    @property
    def gb_per_s(self) -> float:
        """Payload over wire time, in 1e9 bytes a second."""
        return self.nbytes / self.wire_s / 1e9 if self.wire_s else 0.0


class CpuLane:
    """Tensors in host memory, gloo."""

    depth = 6
    """How many buckets' worth of bytes may be under way at once."""

    buffers = 6
    """How many buckets' worth of wire buffers there are."""

    flights = 6
    """How many buckets may be under way at once, whatever their size."""

    cache_bytes: int | None = 1 << 20
    """What a core keeps at hand between two looks at it; None where that does not matter."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.spans: list[Span] = []

    def here(self) -> AbstractContextManager[Any]:
        """Where the whole transfer happens."""
        return contextlib.nullcontext()

    def side(self) -> AbstractContextManager[Any]:
        """Where packing, digests and copies happen."""
        return contextlib.nullcontext()

    def follow(self) -> None:
        """What comes on the side happens after all that was asked for so far."""

    def uses(self, memory: Tensor) -> None:
        """The side uses `memory`: when it is freed, it is taken again only after that."""

    def arrival(self, works: Sequence[Any]) -> Sequence[Work | Query]:
        """What to wait for until `works` are done."""
        return works

    def arrived(self, arrival: Sequence[Work | Query]) -> float:
        """When what `arrival` gave, and is done, was done."""
        return time.monotonic()

    def idle(self) -> Sequence[Work | Query]:
        """What to wait for until the side has done all that it was given."""
        return ()

    def span(self, phase: str, bucket: int) -> AbstractContextManager[None]:
        """Take the time of the body."""
        return Timed(self.spans, phase, bucket)

    def finish(self) -> list[Span]:
        """All spans so far."""
        return self.spans


class CudaLane:
    """Tensors on a CUDA device, NCCL. Nothing here makes the host wait. For the thread that makes it."""

    depth = 3
    buffers = 2
    flights = 8
    cache_bytes: int | None = None

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._current = self._callers = torch.cuda.current_stream(device)
        self._side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._landing = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._timed: list[tuple[str, int, Any, Any]] = []
        self._origin = _timing_event()
        self._origin.record(self._side)
        self._began = time.monotonic()

    def here(self) -> AbstractContextManager[Any]:
        """This thread's current device, which each thread has for itself."""
        return torch.cuda.device(self.device)

    def side(self) -> AbstractContextManager[Any]:
        """The stream for packing, digests and copies."""
        return self._on(self._side)

    def follow(self) -> None:
        """The side stream waits for the caller's."""
        self._side.wait_stream(self._callers)

    def uses(self, memory: Tensor) -> None:
        """Tell torch's allocator that the side stream uses `memory`."""
        memory.record_stream(self._side)

    def arrival(self, works: Sequence[Any]) -> Sequence[Work | Query]:
        """An event behind `works`, recorded on a stream that does nothing else."""
        with self._on(self._landing):
            for work in works:
                work.wait()
        event = _timing_event()
        event.record(self._landing)
        return [event]

    def arrived(self, arrival: Sequence[Any]) -> float:
        """The event's own time: the host may have been busy with the bucket before."""
        return float(self._began + self._origin.elapsed_time(arrival[0]) / 1e3)

    def idle(self) -> Sequence[Work | Query]:
        """An event behind all that the side stream was given."""
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(self._side)
        return [event]

    @contextlib.contextmanager
    def _on(self, stream: Any) -> Iterator[None]:
        """As `torch.cuda.stream`, which asks for the current stream and device each time."""
        before, self._current = self._current, stream
        torch.cuda.set_stream(stream)
        try:
            yield
        finally:
            self._current = before
            torch.cuda.set_stream(before)

    @contextlib.contextmanager
    def span(self, phase: str, bucket: int) -> Iterator[None]:
        """Take the time that the body's work takes on the side stream."""
        start, stop = _timing_event(), _timing_event()
        start.record(self._side)
        yield
        stop.record(self._side)
        self._timed.append((phase, bucket, start, stop))

    def finish(self) -> list[Span]:
        """All spans that have ended; those that run, or wait behind a wire that stands, are left out."""
        return [
            Span(
                phase,
                bucket,
                self._began + self._origin.elapsed_time(start) / 1e3,
                self._began + self._origin.elapsed_time(stop) / 1e3,
            )
            for phase, bucket, start, stop in self._timed
            if stop.query()
        ]


def _timing_event() -> Any:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


Lane = CpuLane | CudaLane


def lane_for(device: torch.device) -> Lane:
    """A fresh lane for one transfer over tensors on `device`."""
    return CudaLane(device) if device.type == "cuda" else CpuLane(device)


class Timed:
    """A context that appends the time that its body takes on the host."""

    __slots__ = ("_bucket", "_phase", "_spans", "_start")

    def __init__(self, spans: list[Span], phase: str, bucket: int) -> None:
        self._spans, self._phase, self._bucket = spans, phase, bucket

    def __enter__(self) -> None:
        self._start = time.monotonic()

    def __exit__(self, *_: object) -> None:
        self._spans.append(Span(self._phase, self._bucket, self._start, time.monotonic()))
