"""``RefitReport``: what one sync moved, how long each part took, and who took part."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from dprims.membership import Epoch

from ..exceptions import RefitError
from .trace import Trace
from .transfer import TransferStats


@dataclass(frozen=True, slots=True)
class RefitReport:
    """The outcome of a successful :meth:`~dprims.synchronizer.WeightSynchronizer.sync_weights`.

    Times are seconds. ``seconds`` is the whole call, from dispatch to the last commit; ``wire_s`` is from
    the first bucket's dispatch to the last one's arrival, of the slowest stage. ``phases`` are the leader's
    own steps, one after the other: ``prepare``, ``reserve``, ``build`` where groups are built, ``transfer``,
    ``decide``, ``commit``, ``publish``.
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
    trace: Trace | None = field(default=None, repr=False, compare=False)
    """What was done since the last success, failed tries too; None where the report came by letter."""

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
        """Write what happened since the last success as a trace for Perfetto or chrome://tracing.

        One process the leader and one a rank, on the leader's clock; how far off a rank of another host may
        be is in the file. Failed tries are in it, and the recovery from them. RefitError on ranks that do
        not lead, whose reports came by letter.
        """
        if self.trace is None:
            raise RefitError("this report has no trace: only the leader's has (rank 0 of the trainers)")
        self.trace.write(path)
