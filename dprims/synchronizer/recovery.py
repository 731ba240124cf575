"""Refits for training loops: reconcile, sync, and after a failure the same again, within bounds."""

from __future__ import annotations

import logging
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
    for left in reversed(range(tries)):
        try:
            absent = absent_shards() if absent_shards is not None else ()
            if not sync._excludes(absent):  # a sync builds what it lacks, with one look at the ranks less
                sync.reconcile_communicator(absent)
            return sync.sync_weights(timer, kv_scales)
        except FINAL:
            raise
        except DprimsError as error:
            if not left:
                raise
            log.warning("the refit failed, %d tries are left: %s: %s", left, type(error).__name__, error)
    raise RefitError("unreachable: the last try either returns or raises")
