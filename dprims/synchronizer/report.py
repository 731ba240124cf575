"""``RefitReport``: what one sync moved, how long each part took, and who took part."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from dprims.membership import Epoch

from .transfer import TransferStats


@dataclass(frozen=True, slots=True)
class RefitReport:
    """The outcome of a successful :meth:`~dprims.synchronizer.WeightSynchronizer.sync_weights`.

    Times are seconds. ``seconds`` is the whole call, from dispatch to the last commit; ``wire_s`` is from
    the first bucket's dispatch to the last one's arrival, of the slowest stage. ``phases`` are the leader's
    own steps (``prepare``, ``build``, ``transfer``, ``commit``, ``publish``), one after the other.
    """

    version: int
    epoch: Epoch
    members: tuple[int, ...]
    """The shards that serve this version now."""
    absent: Mapping[int, str]
    """The shards that took no part, with the reason of each."""
    nbytes: int
    """Bytes of the tensors, once, over all stages."""
    seconds: float
    wire_s: float
    rebuilt: bool
    """Whether weight groups were built for this sync."""
    phases: Mapping[str, float] = field(default_factory=dict)
    stages: Mapping[int, Mapping[int, TransferStats]] = field(default_factory=dict, repr=False)
    """For each stage, what the transfer took on each seat."""

    @property
    def gb_per_s(self) -> float:
        """Payload over wire time, in 1e9 bytes a second."""
        return self.nbytes / self.wire_s / 1e9 if self.wire_s else 0.0

    def stage_s(self, stage: int) -> Mapping[str, float]:
        """Seconds of each phase (gather, pack, wire, digest, unpack) in a stage, the slowest rank's."""
        ranks = self.stages.get(stage, {}).values()
        names = {span.phase for stats in ranks for span in stats.spans}
        return {name: max(stats.phase_s(name) for stats in ranks) for name in sorted(names)}

    def to_chrome_trace(self, path: str | Path) -> None:
        """Write the buckets' phases in the Trace Event format, for Perfetto or chrome://tracing.

        One process a seat, one row a phase. Spans are on each host's monotonic clock, which the ranks of
        one host share.
        """
        spans = [
            (seat, stage, span)
            for stage, ranks in sorted(self.stages.items())
            for seat, stats in sorted(ranks.items())
            for span in stats.spans
        ]
        origin = min((span.start for _, _, span in spans), default=0.0)
        events: list[dict[str, object]] = [
            {"ph": "M", "pid": seat, "name": "process_name", "args": {"name": f"seat {seat}"}}
            for seat in sorted({seat for seat, _, _ in spans})
        ]
        events += [
            {
                "ph": "X",
                "pid": seat,
                "tid": span.phase,
                "name": f"{span.phase} {span.bucket}",
                "cat": f"stage {stage}",
                "ts": (span.start - origin) * 1e6,
                "dur": (span.stop - span.start) * 1e6,
            }
            for seat, stage, span in spans
        ]
        Path(path).write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))
