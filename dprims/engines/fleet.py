"""What the engines share: a policy and a generation over handles of ranks, wherever these live.

An engine says how a rank is started. Everything else (whom a call goes to, whose incarnation is known,
which shards have died, who is waited for and how long) is the same for all of them, and here.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, wait
from typing import Any, Generic, Protocol, TypeVar

from ..exceptions import MembershipError, PeerLost
from ..synchronizer.calls import RankInfo, RefitAnswer, RefitCall, RefitSite

START_LIMIT_S = 120.0
"""How long the processes of a fleet may take to come up: the first one imports torch."""
CLOSE_LIMIT_S = 20.0

Environment = Mapping[str, str] | Callable[[int], Mapping[str, str]] | None


class RankHandle(Protocol):
    """A rank's process, as an engine holds it. Calls return futures; once it has died, with PeerLost."""

    name: str
    ready: Future[Any]
    """Done when the rank can be called, or has failed to come up."""

    @property
    def pid(self) -> int:
        """The id of its process, on its own host."""
        ...

    @property
    def alive(self) -> bool:
        """Whether the process exists; a frozen one does."""
        ...

    def call(self, method: str, *args: Any, **kwargs: Any) -> Future[Any]:
        """Call *method* after the calls made before."""
        ...

    def call_now(self, method: str, *args: Any, **kwargs: Any) -> Future[Any]:
        """Call *method* at once, whatever the process is busy with."""
        ...

    def close(self) -> None:
        """Ask the process to leave, and see to it. Bounded; idempotent."""
        ...

    def kill(self) -> None:
        """End the process now. Bounded; idempotent."""
        ...


HandleT = TypeVar("HandleT", bound=RankHandle)


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


class FleetPolicy(ABC, Generic[HandleT]):
    """Trainers, one rank a stage: satisfies :class:`~dprims.synchronizer.Policy`."""

    host: str | None = None
    """Where the leader's store is reached by all ranks; None: the synchronizer finds an address."""
    in_processes = True
    """The ranks are in processes of their own, which see no ``memory://`` backend of this one."""

    def __init__(self, stages: int, *, start_timeout_s: float = START_LIMIT_S) -> None:
        if type(stages) is not int or stages < 1:
            raise MembershipError(f"stages is {stages!r}; expected an int of at least 1")
        self.world_size = stages
        self.closed = False
        """Whether :meth:`close` was called."""
        self._start_timeout_s = start_timeout_s
        self._ranks: list[HandleT] = []

    @abstractmethod
    def _start(self, stage: int) -> HandleT:
        """Start the rank of a stage; return without waiting for it."""

    def _start_all(self) -> None:
        start_together(map(self._start, range(self.world_size)), self._start_timeout_s, self._ranks)

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

    def process(self, rank: int) -> HandleT:
        """The handle of trainer *rank*'s process."""
        return self._ranks[place_of("rank", rank, self.world_size)]

    def restart(self, rank: int) -> None:
        """Put a fresh process in the place of trainer *rank*'s; return when it is up.

        Its source is made anew: to give it the weights of before is the caller's.
        """
        self.process(rank).kill()
        self.closed = False
        self._ranks[rank] = self._start(rank)
        await_ready([self._ranks[rank]], self._start_timeout_s)

    def close(self) -> None:
        """End every process. Bounded; idempotent."""
        self.closed = True
        close_all(self._ranks)


class FleetGeneration(ABC, Generic[HandleT]):
    """Generation shards: satisfies :class:`~dprims.synchronizer.Generation`.

    Seats follow those of *train_world_size* trainers.
    """

    in_processes = True
    """The ranks are in processes of their own, which see no ``memory://`` backend of this one."""

    def __init__(
        self, shard_sizes: Iterable[int], train_world_size: int, *, start_timeout_s: float = START_LIMIT_S
    ) -> None:
        self.worker_group = WorkerGroup(sizes_of(shard_sizes))
        if type(train_world_size) is not int or train_world_size < 1:
            raise MembershipError(f"train_world_size is {train_world_size!r}; expected an int of at least 1")
        self.train_world_size = train_world_size
        """How many trainer ranks the seats of the shards follow: as many as the policy has."""
        self.closed = False
        """Whether :meth:`close` was called."""
        self._start_timeout_s = start_timeout_s
        self._ranks: dict[int, HandleT] = {}

    @abstractmethod
    def _start(self, shard: int, worker: int, seat: int) -> HandleT:
        """Start one rank; return without waiting for it."""

    def _start_shards(self, shards: Iterable[int]) -> None:
        seats = [(shard, worker, seat) for shard in shards for worker, seat in enumerate(self._seats(shard))]
        for shard, _, _ in seats:
            self.worker_group._incarnations.pop(shard, None)
        started: list[HandleT] = []
        try:
            start_together((self._start(*seat) for seat in seats), self._start_timeout_s, started)
        finally:
            self._ranks.update(zip((seat for _, _, seat in seats), started, strict=False))

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

    def may_serve(self, shard: int, timeout: float = 5.0) -> bool:
        """Whether every rank of *shard* may answer requests now; False when one is dead or silent."""
        asked = [self._ranks[seat].call_now("may_serve") for seat in self._seats(shard)]
        done, late = wait(asked, timeout)
        return not late and all(future.exception() is None and future.result() for future in done)

    def process(self, shard: int, worker: int = 0) -> HandleT:
        """The handle of the process of a shard's rank."""
        seats = self._seats(shard)
        return self._ranks[seats[place_of("worker", worker, len(seats))]]

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
        self.closed = False
        self._start_shards([shard])

    def close(self) -> None:
        """End every process. Bounded; idempotent."""
        self.closed = True
        close_all(list(self._ranks.values()))

    def _seats(self, shard: int) -> range:
        place_of("shard", shard, len(self.worker_group.sizes))
        first = self.train_world_size + sum(self.worker_group.sizes[:shard])
        return range(first, first + self.worker_group.sizes[shard])

    def _note_incarnation(self, future: Future[RankInfo]) -> None:
        if future.cancelled() or future.exception() is not None:
            return
        info = future.result()
        for shard in self.worker_group.shards:
            seats = self._seats(shard)
            if info.seat in seats:
                known = list(self.worker_group.incarnation(shard))
                known[info.seat - seats.start] = info.incarnation
                self.worker_group._incarnations[shard] = tuple(known)


def sizes_of(shard_sizes: Iterable[int]) -> tuple[int, ...]:
    """The sizes of a fleet's shards. MembershipError unless these are ints of at least 1, and one or more."""
    sizes = tuple(shard_sizes) if isinstance(shard_sizes, Iterable) else ()
    if not sizes or not all(type(size) is int and size >= 1 for size in sizes):
        given = sizes or shard_sizes
        raise MembershipError(f"shard_sizes is {given!r}; expected one or more sizes of at least 1: (1, 1)")
    return sizes


def place_of(what: str, place: int, count: int) -> int:
    """*place*, where there is one. MembershipError says *what* it was to be, and which there are."""
    if type(place) is not int or not 0 <= place < count:
        raise MembershipError(f"{what} is {place!r}; there are {what}s 0..{count - 1}")
    return place


def of_seat(devices: str | Sequence[str], seat: int) -> str:
    """One device for all seats, or the one of *seat*."""
    if isinstance(devices, str):
        return devices
    if not isinstance(devices, Sequence) or not all(isinstance(device, str) for device in devices):
        raise MembershipError(f"device is {devices!r}; expected text, such as 'cuda', or one a seat")
    if seat >= len(devices):
        raise MembershipError(
            f"device is {devices!r}, which has none for seat {seat}; expected one a seat, trainers first"
        )
    return devices[seat]


def indexed(device: str, seat: int = 0, gpus: int = 1) -> str:
    """*device* with the index that torch wants: ``"cuda"`` is dealt out by *seat* among *gpus* GPUs."""
    return f"cuda:{seat % max(gpus, 1)}" if device == "cuda" else device


def environment_of(environment: Environment, seat: int) -> dict[str, str]:
    """The environment of *seat*: a mapping for all, a function of the seat, or nothing."""
    return dict(environment(seat) if callable(environment) else environment or {})


def start_together(starting: Iterable[HandleT], limit_s: float, started: list[HandleT]) -> None:
    """Start all, then wait for all; *started* has them as they come, and all are ended if one fails."""
    try:
        for rank in starting:
            started.append(rank)
    except BaseException:
        close_all(started)
        raise
    await_ready(started, limit_s)


def await_ready(ranks: Sequence[RankHandle], limit_s: float) -> None:
    """Return when every rank can be called; end them all and raise when one could not come up."""
    ready = {rank.ready: rank for rank in ranks}
    try:
        done, late = wait(ready, limit_s)
        failed = next((future.exception() for future in done if future.exception() is not None), None)
    except BaseException:
        close_all(ranks)
        raise
    if failed is None and not late:
        return
    late_names = ", ".join(ready[future].name for future in late)
    close_all(ranks)
    if failed is not None:
        raise failed
    raise PeerLost(f"{len(late)} of {len(ranks)} ranks were not up within {limit_s:g} s: {late_names}")


def close_all(ranks: Sequence[RankHandle]) -> None:
    """End them side by side, within a bound."""
    threads = [threading.Thread(target=rank.close, daemon=True) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(CLOSE_LIMIT_S)


__all__ = ["FleetGeneration", "FleetPolicy", "RankHandle", "WorkerGroup"]
