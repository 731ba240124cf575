"""The local engine: a policy and a generation fleet of one process a rank, on this machine.

The embedded default, the tests' engine and the demo's. The processes come from a fork server that has
torch imported already, so that a rank starts, and restarts, in a fraction of a second. A rank that is
killed is noticed at once: its pipe closes.
"""

from __future__ import annotations

import os
import struct
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any

from ..exceptions import MembershipError, PeerLost
from ..synchronizer.calls import RankInfo, RefitAnswer, RefitCall, RefitSite
from .process import WorkerProcess

START_LIMIT_S = 120.0
"""How long the processes of a fleet may take to come up: the first one imports torch."""

Environment = Mapping[str, str] | Callable[[int], Mapping[str, str]] | None


class LocalPolicy:
    """Trainers as processes: satisfies :class:`~dprims.synchronizer.Policy`.

    ``make_source(stage, *args)`` is called in the process of each stage's head and returns a
    :class:`~dprims.synchronizer.WeightSource`; :meth:`call` reaches its other methods. One rank a stage.

    *device* is ``"cpu"``, ``"cuda"``, or one a rank. *environment* is set in each process before torch's
    communication starts: a mapping, or a function of the seat.
    """

    def __init__(
        self,
        make_source: Callable[..., Any],
        *args: Any,
        stages: int = 1,
        device: str | Sequence[str] = "cpu",
        environment: Environment = None,
    ) -> None:
        if stages < 1:
            raise MembershipError(f"stages is {stages}; expected at least 1")
        self.world_size = stages
        self.host = "127.0.0.1"  # where the leader's store is reached: all ranks are on this machine
        self._make_source, self._args = make_source, args
        self._device, self._environment = device, environment
        self._ranks = [self._start(stage) for stage in range(stages)]
        _await_ready(self._ranks)

    def _start(self, stage: int) -> WorkerProcess:
        return WorkerProcess(
            f"trainer-{stage}",
            RankProcess,
            (
                "sender",
                stage,
                self._make_source,
                (stage, *self._args),
                _of(self._device, stage),
                _environment(self._environment, stage),
            ),
        )

    def prepare_refit_info(
        self, site: RefitSite, known: Mapping[int, str] | None = None
    ) -> list[Future[RankInfo]]:
        """Ask every trainer to join at *site* and say what it sends; *known* digests need no answer again."""
        known = known or {}
        return [
            rank.call_now("prepare", site, known.get(stage, "")) for stage, rank in enumerate(self._ranks)
        ]

    def _send(self, call: RefitCall) -> list[Future[RefitAnswer]]:
        return [
            self._ranks[seat].call_now("submit", call) for seat in call.incarnations if seat < self.world_size
        ]

    ask = init_collective = broadcast_weights_for_collective = rollback = _send

    def call(self, rank: int, method: str, *args: Any, **kwargs: Any) -> Future[Any]:
        """Call a method of the source in the process of trainer *rank*."""
        return self._ranks[rank].call("app_call", method, args, kwargs)

    def process(self, rank: int) -> WorkerProcess:
        """The process of trainer *rank*."""
        return self._ranks[rank]

    def restart(self, rank: int) -> None:
        """Put a fresh process in the place of trainer *rank*'s; return when it is up.

        Its source is made anew: to give it the weights of before is the caller's.
        """
        self._ranks[rank].kill()
        self._ranks[rank] = self._start(rank)
        _await_ready([self._ranks[rank]])

    def close(self) -> None:
        """End every process. Bounded; idempotent."""
        _close(self._ranks)


class WorkerGroup:
    """The shards of a generation fleet, as the synchronizer asks for them."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self.sizes = tuple(sizes)
        self._incarnations: dict[int, tuple[int, ...]] = {}

    @property
    def shards(self) -> range:
        """The shard indexes, dead ones included."""
        return range(len(self.sizes))

    def incarnation(self, shard: int) -> tuple[int, ...]:
        """The incarnation of each rank of *shard*, as it was last known; zeros before it joined."""
        return self._incarnations.get(shard, (0,) * self.sizes[shard])


class LocalGeneration:
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
        self.worker_group = WorkerGroup(tuple(shard_sizes))
        if not self.worker_group.sizes or min(self.worker_group.sizes) < 1:
            raise MembershipError(
                f"shard_sizes is {self.worker_group.sizes}; expected one or more sizes of at least 1"
            )
        self._make_sink, self._args = make_sink, args
        self._first = train_world_size
        self._device, self._environment = device, environment
        self._ranks: dict[int, WorkerProcess] = {}
        for shard in self.worker_group.shards:
            self._start(shard)
        _await_ready(list(self._ranks.values()))

    def get_inference_world_size(self) -> int:
        """The number of generation ranks, dead ones included."""
        return sum(self.worker_group.sizes)

    def prepare_refit_info(self, site: RefitSite) -> list[Future[RankInfo]]:
        """Ask every rank to join at *site*; a dead rank's future has PeerLost."""
        futures = [rank.call_now("prepare", site, "") for _, rank in sorted(self._ranks.items())]
        for future in futures:
            future.add_done_callback(self._note_incarnation)
        return futures

    def _send(self, call: RefitCall) -> list[Future[RefitAnswer]]:
        return [
            self._ranks[seat].call_now("submit", call) for seat in call.incarnations if seat in self._ranks
        ]

    ask = init_collective = update_weights_from_collective = pause = commit = resume = rollback = _send

    def call(self, shard: int, method: str, *args: Any, worker: int = 0, **kwargs: Any) -> Future[Any]:
        """Call a method of the sink in the process of a shard's rank."""
        return self.process(shard, worker).call("app_call", method, args, kwargs)

    def may_serve(self, shard: int, timeout: float = 5.0) -> bool:
        """Whether every rank of *shard* may answer requests now; False when one is dead or silent."""
        asked = [self._ranks[seat].call_now("may_serve") for seat in self._seats(shard)]
        done, late = wait(asked, timeout)
        return not late and all(future.exception() is None and future.result() for future in done)

    def process(self, shard: int, worker: int = 0) -> WorkerProcess:
        """The process of a shard's rank."""
        return self._ranks[self._seats(shard)[worker]]

    @property
    def dead_shards(self) -> tuple[int, ...]:
        """The shards that have lost a process."""
        return tuple(
            shard
            for shard in self.worker_group.shards
            if not all(self._ranks[seat].alive for seat in self._seats(shard))
        )

    def restart(self, shard: int) -> None:
        """Put fresh processes in the place of a shard's; return when they are up."""
        for seat in self._seats(shard):
            self._ranks[seat].kill()
        self._start(shard)
        _await_ready([self._ranks[seat] for seat in self._seats(shard)])

    def close(self) -> None:
        """End every process. Bounded; idempotent."""
        _close(list(self._ranks.values()))

    def _seats(self, shard: int) -> range:
        if shard not in self.worker_group.shards:
            raise MembershipError(f"shard is {shard}; there are shards 0..{len(self.worker_group.sizes) - 1}")
        first = self._first + sum(self.worker_group.sizes[:shard])
        return range(first, first + self.worker_group.sizes[shard])

    def _start(self, shard: int) -> None:
        self.worker_group._incarnations.pop(shard, None)
        for worker, seat in enumerate(self._seats(shard)):
            self._ranks[seat] = WorkerProcess(
                f"shard-{shard}-{worker}",
                RankProcess,
                (
                    "receiver",
                    seat,
                    self._make_sink,
                    (shard, worker, *self._args),
                    _of(self._device, seat),
                    _environment(self._environment, seat),
                ),
            )

    def _note_incarnation(self, future: Future[RankInfo]) -> None:
        if future.exception() is not None:
            return
        info = future.result()
        for shard in self.worker_group.shards:
            seats = self._seats(shard)
            if info.seat in seats:
                known = list(self.worker_group.incarnation(shard))
                known[info.seat - seats.start] = info.incarnation
                self.worker_group._incarnations[shard] = tuple(known)


class RankProcess:
    """What lives in a rank's process: the user's source or sink, and the worker around it."""

    def __init__(
        self,
        role: str,
        seat: int,
        make: Callable[..., Any],
        args: tuple[Any, ...],
        device: str,
        environment: Mapping[str, str],
    ) -> None:
        os.environ.update(environment)  # this process is the engine's own
        import torch

        from ..synchronizer.workers import WeightReceiver, WeightSender
        from ..testing.faults import FaultInjector

        torch.set_num_threads(1)
        if device.startswith("cuda"):
            torch.cuda.set_device(device)
        self.faults = FaultInjector()
        self.app = make(*args)
        self.worker: Any = (
            WeightSender(seat, self.app, stage=seat, device=device)
            if role == "sender"
            else WeightReceiver(seat, self.app, device=device)
        )

    def prepare(self, site: RefitSite, known: str) -> Future[RankInfo]:
        """Join and say who this is."""
        future: Future[RankInfo] = self.worker.prepare_refit_info(site, known)
        return future

    def submit(self, call: RefitCall) -> Future[RefitAnswer]:
        """One call of the protocol."""
        future: Future[RefitAnswer] = self.worker.submit(call)
        return future

    def may_serve(self) -> bool:
        """Whether this rank may answer a request now."""
        return bool(self.worker.may_serve)

    def app_call(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A method of the user's own object."""
        return getattr(self.app, method)(*args, **kwargs)

    def arm(self, *faults: Any, stamp: str | None = None) -> None:
        """Have these faults strike in this rank's next refits, instead of those armed before.

        With *stamp*, the moment of each strike is left in that file: a double, on the monotonic clock.
        """
        from ..testing.faults import FaultInjector

        def note(fault: Any) -> None:
            if stamp is not None:
                Path(stamp).write_bytes(struct.pack("d", time.monotonic()))

        self.worker.faults = FaultInjector(faults, on_strike=note)

    def close(self) -> None:
        """Leave the roster."""
        self.worker.close()


def _of(device: str | Sequence[str], seat: int) -> str:
    return device if isinstance(device, str) else device[seat]


def _environment(environment: Environment, seat: int) -> dict[str, str]:
    return dict(environment(seat) if callable(environment) else environment or {})


def _await_ready(ranks: Sequence[WorkerProcess]) -> None:
    """Return when every process has built its object; end them all and raise when one could not."""
    done, late = wait([rank.ready for rank in ranks], START_LIMIT_S)
    failed = next((future.exception() for future in done if future.exception() is not None), None)
    if failed is None and not late:
        return
    _close(ranks)
    if failed is not None:
        raise failed
    raise PeerLost(f"{len(late)} of {len(ranks)} processes were not up within {START_LIMIT_S:g} s")


def _close(ranks: Sequence[WorkerProcess]) -> None:
    threads = [threading.Thread(target=rank.close, daemon=True) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20.0)


__all__ = ["LocalGeneration", "LocalPolicy", "WorkerGroup"]
