"""The local engine: a policy and a generation fleet of one process a rank, on this machine.

The embedded default, the tests' engine and the demo's. The processes come from a fork server that has
torch imported already, so that a rank starts, and restarts, in a fraction of a second. A rank that is
killed is noticed at once: its pipe closes.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from .fleet import Environment, FleetGeneration, FleetPolicy, environment_of, indexed, of_seat
from .process import WorkerProcess
from .rank import Rank


class LocalPolicy(FleetPolicy[WorkerProcess]):
    """Trainers as processes: satisfies :class:`~dprims.synchronizer.Policy`.

    ``make_source(stage, *args)`` is called in the process of each stage's head and returns a
    :class:`~dprims.synchronizer.WeightSource`; :meth:`call` reaches its other methods. One rank a stage.

    *device* is ``"cpu"``, ``"cuda"``, or one a seat, trainers first, as ``["cuda:0", "cuda:1"]``; ``"cuda"``
    deals out by seat the GPUs that a rank's process sees. *environment* is set in each process before torch's
    communication starts: a mapping, or a function of the seat.
    """

    host = "127.0.0.1"  # all ranks are on this machine

    def __init__(
        self,
        make_source: Callable[..., Any],
        *args: Any,
        stages: int = 1,
        device: str | Sequence[str] = "cpu",
        environment: Environment = None,
    ) -> None:
        super().__init__(stages)
        self._make_source, self._args = make_source, args
        self._device, self._environment = device, environment
        self._start_all()

    def _start(self, stage: int) -> WorkerProcess:
        device, environment = of_seat(self._device, stage), environment_of(self._environment, stage)
        return WorkerProcess(
            f"trainer-{stage}",
            _start_rank,
            ("sender", stage, self._make_source, (stage, *self._args), device, environment),
        )

    def call(self, rank: int, method: str, *args: Any, **kwargs: Any) -> Future[Any]:
        """Call a method of the source in the process of trainer *rank*."""
        return self.process(rank).call("app_call", method, args, kwargs)


class LocalGeneration(FleetGeneration[WorkerProcess]):
    """Generation shards as processes: satisfies :class:`~dprims.synchronizer.Generation`.

    ``make_sink(shard, worker, *args)`` is called in each rank's process and returns a
    :class:`~dprims.synchronizer.WeightSink`; :meth:`call` reaches its other methods. Seats follow those of
    *train_world_size* trainers. *device* and *environment* as for :class:`LocalPolicy`.
    """

    def __init__(
        self,
        make_sink: Callable[..., Any],
        *args: Any,
        shard_sizes: Iterable[int] = (1,),
        train_world_size: int = 1,
        device: str | Sequence[str] = "cpu",
        environment: Environment = None,
    ) -> None:
        super().__init__(shard_sizes, train_world_size)
        self._make_sink, self._args = make_sink, args
        self._device, self._environment = device, environment
        self._start_shards(self.worker_group.shards)

    def _start(self, shard: int, worker: int, seat: int) -> WorkerProcess:
        device, environment = of_seat(self._device, seat), environment_of(self._environment, seat)
        return WorkerProcess(
            f"shard-{shard}-{worker}",
            _start_rank,
            ("receiver", seat, self._make_sink, (shard, worker, *self._args), device, environment),
        )

    def call(self, shard: int, method: str, *args: Any, worker: int = 0, **kwargs: Any) -> Future[Any]:
        """Call a method of the sink in the process of a shard's rank."""
        return self.process(shard, worker).call("app_call", method, args, kwargs)


def _start_rank(
    role: str,
    seat: int,
    make: Callable[..., Any],
    args: tuple[Any, ...],
    device: str,
    environment: Mapping[str, str],
) -> Rank:
    """Build what lives in a rank's process."""
    os.environ.update(environment)  # this process is the engine's own
    import torch

    torch.set_num_threads(1)
    if device.startswith("cuda"):
        device = indexed(device, seat, torch.cuda.device_count())
        torch.cuda.set_device(device)  # before anything of the user's is made
    return Rank(role, seat, make(*args), device)


__all__ = ["LocalGeneration", "LocalPolicy"]
