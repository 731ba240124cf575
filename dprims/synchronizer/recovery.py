"""Refits for training loops: reconcile, sync, and after a failure the same again, within bounds."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..exceptions import (
    BackendMisconfigured,
    DprimsError,
    HandshakeMismatch,
    MembershipError,
    RefitError,
    StaleLeader,
)

if TYPE_CHECKING:
    from .collective import CollectiveWeightSynchronizer
    from .report import RefitReport

log = logging.getLogger("dprims.synchronizer.recovery")

FINAL = (StaleLeader, MembershipError, BackendMisconfigured, HandshakeMismatch)
"""What trying again cannot mend."""


def refit(
    sync: CollectiveWeightSynchronizer,
    absent_shards: Callable[[], Sequence[int]] | None = None,
    *,
    tries: int = 3,
    timer: Any = None,
    kv_scales: Mapping[str, float] | None = None,
) -> RefitReport:
    """See :meth:`~dprims.synchronizer.CollectiveWeightSynchronizer.refit`."""
    if tries < 1:
        raise RefitError(f"tries is {tries}; expected at least 1")
    failures: Counter[int] = Counter()
    for left in reversed(range(tries)):
        try:
            absent = absent_shards() if absent_shards is not None else ()
            absent = _without_failing(sync, absent, failures)
            if not sync._excludes(absent):  # a sync builds what it lacks, with one look at the ranks less
                sync.reconcile_communicator(absent)
            return sync.sync_weights(timer, kv_scales)
        except FINAL:
            raise
        except DprimsError as error:
            if not left:
                raise
            failures.update(getattr(error, "shards", ()))
            log.warning("the refit failed, %d tries are left: %s: %s", left, type(error).__name__, error)
    raise RefitError("unreachable: the last try either returns or raises")


def _without_failing(
    sync: CollectiveWeightSynchronizer, absent: Sequence[int], failures: Mapping[int, int]
) -> Sequence[int]:
    """The shards to leave out, with those that failed twice; not so many that too few are left."""
    failing = sorted({shard for shard, times in failures.items() if times > 1} - set(absent))
    if not failing or len(sync._fleet().shard_sizes) - len(absent) - len(failing) < max(1, sync.min_shards):
        return absent
    log.warning("shards %s failed twice in this refit, and are left out of it", failing)
    return [*absent, *failing]
