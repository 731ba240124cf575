"""An engine whose ranks are threads of this process: for tests, and for backends that one process sees.

The same workers as in any engine, over real gloo groups; only that no rank can be killed by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from typing import Any

from ..engines.fleet import WorkerGroup
from ..synchronizer.calls import RankInfo, RefitAnswer, RefitCall, RefitSite
from ..synchronizer.workers import WeightReceiver, WeightSender


class ThreadPolicy:
    """One trainer a stage; ``make_source(stage, *args)`` as for LocalPolicy."""

    def __init__(self, make_source: Callable[..., Any], *args: Any, stages: int = 1) -> None:
        self.world_size = stages
        self.host = "127.0.0.1"
        self.sources = [make_source(stage, *args) for stage in range(stages)]
        self.workers = [WeightSender(stage, source, stage=stage) for stage, source in enumerate(self.sources)]

    def prepare_refit_info(self, site: RefitSite, known: Mapping[int, str]) -> list[Future[RankInfo]]:
        """See :class:`~dprims.synchronizer.Policy`."""
        return [worker.prepare_refit_info(site, known.get(worker.seat, "")) for worker in self.workers]

    def _send(self, call: RefitCall) -> list[Future[RefitAnswer]]:
        return [self.workers[seat].submit(call) for seat in call.incarnations]

    ask = init_collective = broadcast_weights_for_collective = rollback = _send

    def close(self) -> None:
        """End the ranks' threads."""
        for worker in self.workers:
            worker.close()


class ThreadGeneration:
    """Generation shards; ``make_sink(shard, worker, *args)`` as for LocalGeneration."""

    def __init__(
        self,
        make_sink: Callable[..., Any],
        *args: Any,
        shard_sizes: Iterable[int] = (1,),
        train_world_size: int = 1,
    ) -> None:
        self.worker_group = WorkerGroup(tuple(shard_sizes))
        seats = [
            (shard, worker) for shard, size in enumerate(self.worker_group.sizes) for worker in range(size)
        ]
        self.sinks = [make_sink(shard, worker, *args) for shard, worker in seats]
        self.workers = {
            train_world_size + place: WeightReceiver(train_world_size + place, sink)
            for place, sink in enumerate(self.sinks)
        }

    def get_inference_world_size(self) -> int:
        """See :class:`~dprims.synchronizer.Generation`."""
        return sum(self.worker_group.sizes)

    def prepare_refit_info(self, site: RefitSite) -> list[Future[RankInfo]]:
        """See :class:`~dprims.synchronizer.Generation`."""
        return [worker.prepare_refit_info(site) for worker in self.workers.values()]

    def _send(self, call: RefitCall) -> list[Future[RefitAnswer]]:
        return [self.workers[seat].submit(call) for seat in call.incarnations]

    ask = init_collective = update_weights_from_collective = pause = commit = resume = rollback = _send

    def close(self) -> None:
        """End the ranks' threads."""
        for worker in self.workers.values():
            worker.close()
