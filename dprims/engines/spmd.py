"""Refits without a controller: trainers under torchrun and generation ranks, which share one backend URL.

Rank 0 of the trainers, the head of stage 0, hosts the leader that a controller would host: the same machine,
driven by the same synchronizer. Its calls travel through cells of the store that it serves
(:mod:`dprims.engines.mailbox`); it says in the backend, fenced by its term, where that store is. Generation
ranks enrol in a roster of the backend, which is how the leader learns the fleet's shape.

::

    refit = SpmdRefit(source, backend=URL, rank=RANK, world_size=WORLD_SIZE, stage=RANK)  # each trainer
    refit.init_communicator()
    refit.sync_weights()

    receiver = SpmdReceiver(sink, backend=URL, shard=0, shard_sizes=(1, 1))  # each generation rank
    receiver.may_serve
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from ..backend import Backend, check_shared, connect
from ..exceptions import (
    BackendError,
    BackendUnavailable,
    DprimsError,
    HandshakeMismatch,
    LockTimeout,
    MembershipError,
    PeerLost,
    RefitError,
    RefitTimeout,
)
from ..synchronizer import CollectiveWeightSynchronizer, WeightReceiver, WeightSender
from ..synchronizer.calls import RefitSite
from ._spmd_lead import Lead
from ._spmd_rank import LOOK_S, Address, Attendant, Waiting, address_key, enrolment, read_address
from .fleet import sizes_of
from .letters import Document, read_error, read_report, write_error, write_report
from .mailbox import SLICE_S, check_url, done

if TYPE_CHECKING:
    import torch

    from ..lock import Grant
    from ..synchronizer.interfaces import WeightSink, WeightSource
    from ..synchronizer.report import RefitReport
    from ..testing.faults import FaultInjector

__all__ = ["SpmdReceiver", "SpmdRefit"]

log = logging.getLogger("dprims.engines.spmd")

T = TypeVar("T")

FAREWELL_S = 10.0
"""How long the leader waits for the other trainers to take in an outcome."""


class SpmdReceiver:
    """A generation rank's part in refits: joins the fleet, and answers its leader on threads of its own.

    *shard_sizes* says how many ranks each shard has, and is the same on all ranks; this one is rank *worker*
    of shard *shard*. Waits at most *timeout* seconds for the trainers' leader, from whom it learns its seat;
    RefitTimeout when there is none by then. A later leader is found by itself. The rest, *sink* above all, is
    as for :class:`~dprims.synchronizer.WeightReceiver`. Close it, or use it as a context manager.
    BackendMisconfigured for a *backend* that other processes do not see.
    """

    def __init__(
        self,
        sink: WeightSink,
        *,
        backend: str,
        shard: int,
        shard_sizes: Sequence[int],
        worker: int = 0,
        namespace: str = "dprims",
        fleet: str = "refit",
        roster_ttl_s: float = 5.0,
        device: torch.device | str = "cpu",
        faults: FaultInjector | None = None,
        timeout: float = 600.0,
    ) -> None:
        self._sizes = sizes_of(shard_sizes)
        if shard not in range(len(self._sizes)) or worker not in range(self._sizes[shard]):
            raise MembershipError(
                f"this is rank {worker} of shard {shard}; shard_sizes are {self._sizes}, so there is none"
            )
        self.shard, self.worker = shard, worker
        self._site = RefitSite(check_url(backend), namespace, fleet, roster_ttl_s)
        self._backend = _connect(backend)
        self._enrolled: Grant | None = None
        self._roster = enrolment(self._site, self._backend)
        try:
            address = self._await_leader(timeout)
            self._site = replace(self._site, roster_ttl_s=address.roster_ttl_s)
            self.receiver = WeightReceiver(self._seat(address), sink, device=_indexed(device), faults=faults)
        except BaseException:
            self._backend.close()
            raise
        self._trainers = address.trainers
        self._attendant = Attendant(self.receiver, self._site, self._backend, upkeep=self._keep_up)

    @property
    def may_serve(self) -> bool:
        """Whether this rank may answer a request now; a shard may only if all its ranks may."""
        return self.receiver.may_serve and not self._attendant.closed

    @property
    def version(self) -> int:
        """The number of the version that is live here; 0 before the first commit."""
        live = self.receiver.version
        return 0 if live is None else live.number

    def close(self) -> None:
        """Leave the fleet and end the threads. Bounded; idempotent."""
        self._attendant.close()
        with suppress(DprimsError):
            self._backend.close()

    def __enter__(self) -> SpmdReceiver:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _enrol(self) -> None:
        """Be in the roster under what we are. One that a predecessor left is waited for until it lapses."""
        if self._enrolled is None or self._enrolled.lost:
            said = {"sizes": self._sizes}
            self._enrolled = self._roster.join(f"{self.shard}.{self.worker}", said)

    def _keep_up(self, address: Address | None) -> None:
        """Stay enrolled, and see to it that a new leader means this rank by the same seat."""
        self._enrol()
        if address is not None and (address.trainers, address.shard_sizes) != (self._trainers, self._sizes):
            self._roster.leave()
            raise HandshakeMismatch(
                f"this rank joined a fleet of {self._trainers} trainers and shards {self._sizes}; the leader "
                f"of term {address.term} has {address.trainers} and {address.shard_sizes}: start it anew"
            )

    def _await_leader(self, timeout: float) -> Address:
        """Enrol, and return the address of a leader that answers and counts on this rank."""
        deadline, said = time.monotonic() + timeout, "none has said where it is"
        waiting = Waiting(f"rank {self.worker} of shard {self.shard}, for a leader of {self._site.prefix!r},")
        while (left := deadline - time.monotonic()) > 0:
            try:
                self._enrol()
                address = read_address(self._backend, self._site)
                waiting.still(said)
                if address is None:
                    self._backend.wait(address_key(self._site), min(left, SLICE_S))
                    continue
                if address.shard_sizes == self._sizes:
                    connect(address.store).close()
                    return address
                said = f"that of term {address.term} has shards {address.shard_sizes}"
            except (LockTimeout, BackendUnavailable) as error:
                said = str(error)
            time.sleep(min(LOOK_S, left))
        raise RefitTimeout(
            f"rank {self.worker} of shard {self.shard} of {self._sizes} found no leader of fleet "
            f"{self._site.prefix!r} within {timeout:g} s: {said}"
        )

    def _seat(self, address: Address) -> int:
        return address.trainers + sum(self._sizes[: self.shard]) + self.worker


def _connect(url: str) -> Backend:
    """Open the backend that all ranks share; BackendMisconfigured for one that no other process sees."""
    backend = connect(url)
    try:
        check_shared(backend, "an SPMD fleet")
    except DprimsError:
        backend.close()
        raise
    return backend


def _indexed(device: torch.device | str) -> torch.device:
    """*device*, for ``"cuda"`` the GPU that this process has set: tensors are on one with an index."""
    import torch

    found = torch.device(device)
    if found.type == "cuda" and found.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return found


class _Meeting:
    """What a trainer that does not lead knows of the calls that all trainers make together."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._here: tuple[int, str] | None = None
        self._called: tuple[int, str, Future[Any]] | None = None
        self._outcome: tuple[int, Document] | None = None

    def meet(self, body: Any) -> Future[Any]:
        """The leader waits for this rank to make a call."""
        number, what = body
        future: Future[Any] = Future()
        with self._changed:
            self._called = (int(number), str(what), future)
            self._match()
            self._changed.notify_all()
        return future

    def end(self, body: Any) -> Future[Any]:
        """The leader says what came of a call."""
        with self._changed:
            self._outcome = (int(body[0]), body[1])
            self._changed.notify_all()
        return done(None)

    def take_part(self, number: int, what: str, patience_s: float, alive: Callable[[bool], bool]) -> Any:
        """Say that this rank is here, and return what came of the call, or raise it."""
        with self._changed:
            self._here = (number, what)
            try:
                self._match()
                outcome = self._await_outcome(number, what, time.monotonic() + patience_s, alive)
            finally:
                self._here = None
        if outcome["error"] is not None:
            raise read_error(outcome["error"])
        return outcome

    def _await_outcome(
        self, number: int, what: str, deadline: float, alive: Callable[[bool], bool]
    ) -> Document:
        while self._outcome is None or self._outcome[0] != number:
            at = None if self._called is None else self._called[0]
            if at is not None and at > number:
                raise RefitError(f"{what} is call {number} here, and rank 0 is at {at} already")
            if not alive(at == number):
                raise PeerLost(f"rank 0 of the trainers, which leads {what}, does not answer any more")
            if at != number and time.monotonic() > deadline:
                raise RefitTimeout(f"rank 0 did not call {what} in time")
            self._changed.wait(LOOK_S)
        return self._outcome[1]

    def _match(self) -> None:
        if self._here is None or self._called is None or self._called[2].done():
            return
        number, what, future = self._called
        if (number, what) == self._here:
            future.set_result(None)
        elif number <= self._here[0]:
            future.set_exception(
                RefitError(f"it is at call {self._here[0]}, {self._here[1]}; rank 0 at {number}, {what}")
            )


class SpmdRefit:
    """A trainer's part in refits without a controller; every trainer has one, and rank 0's leads.

    :meth:`init_communicator`, :meth:`sync_weights` and :meth:`reconcile_communicator` are
    collective over the trainers: all call them, in the same order, with what they mean given on rank 0, and
    all get what came of it, or raise the same error. Nothing is read from a source before every trainer has
    made the call, so none is read in the middle of a step.

    *source* has the weights of pipeline stage *stage*; *head* says whether this rank sends them (one rank a
    stage does, rank 0 for stage 0) or only gathers along. *backend* is the URL that generation ranks
    have, too, and other processes see (else BackendMisconfigured); it has to outlive rank 0 for a restarted
    job to go on where this one ended. *host* is where
    the other ranks reach rank 0. *gather_s* bounds how long the first build waits for the fleet to come in,
    *meet_timeout_s* how long trainers wait for each other. The other options, as *refit_timeout_s*,
    are those of :class:`~dprims.synchronizer.CollectiveWeightSynchronizer` and count on rank 0.

    The leader lock that rank 0 holds is the lock around group initialisation, its token the term, and
    stages are built in order under it. A trainer's death ends the run: torchrun starts all anew.
    """

    def __init__(
        self,
        source: WeightSource,
        *,
        backend: str,
        rank: int,
        world_size: int,
        stage: int,
        head: bool = True,
        device: torch.device | str = "cpu",
        faults: FaultInjector | None = None,
        namespace: str = "dprims",
        fleet: str = "refit",
        roster_ttl_s: float = 5.0,
        host: str | None = None,
        gather_s: float = 120.0,
        meet_timeout_s: float = 600.0,
        **options: Any,
    ) -> None:
        if not 0 <= rank < world_size:
            raise MembershipError(f"rank is {rank}, world_size {world_size}; expected 0 <= rank < world_size")
        if rank == 0 and not (head and stage == 0):
            raise MembershipError(f"rank 0 leads, so it has to be the head of stage 0, not {stage=}, {head=}")
        self.rank = rank
        self._meet_timeout_s = meet_timeout_s
        site = RefitSite(check_url(backend), namespace, fleet, roster_ttl_s)
        self._calls = 0
        self._outcome: Document = {"version": 0, "stale": True, "error": None}
        self._meeting = _Meeting()
        self._backend = _connect(backend)
        self._lead = (
            Lead(
                backend=self._backend,
                world_size=world_size,
                gather_s=gather_s,
                host=host,
                namespace=namespace,
                fleet=fleet,
                roster_ttl_s=roster_ttl_s,
                **options,
            )
            if rank == 0
            else None
        )
        self.sender = WeightSender(
            rank, source, stage=stage, head=head, device=_indexed(device), faults=faults
        )
        self._attendant = Attendant(
            self.sender, site, self._backend, {"meet": self._meeting.meet, "end": self._meeting.end}
        )
        self._world_size = world_size
        self._grace_s = 2 * roster_ttl_s

    # -- what is known ---------------------------------------------------------------------------------

    @property
    def version(self) -> int:
        """The number of the version that the fleet served after the last collective call."""
        return int(self._outcome["version"])

    @property
    def is_stale(self) -> bool:
        """As for the synchronizer; mark_stale on rank 0 is told to the others with the next call."""
        return bool(self._outcome["stale"] if self._lead is None else self._lead.is_stale)

    @property
    def synchronizer(self) -> CollectiveWeightSynchronizer:
        """What leads, on rank 0; RefitError on every other rank."""
        if self._lead is None:
            raise RefitError(f"rank {self.rank} does not lead: rank 0 does")
        return self._lead

    def mark_stale(self) -> None:
        """The trainers changed their weights. Local; it counts on rank 0, and may be called on all."""
        self._outcome["stale"] = True
        if self._lead is not None:
            self._lead.mark_stale()

    # -- collective ------------------------------------------------------------------------------------

    def init_communicator(self, timeout: float | None = None) -> None:
        """Become the leader on rank 0, settle what an earlier one left in doubt, and build the groups.

        Collective. *timeout* bounds the wait for an earlier leader's lock, which lapses with its process.
        """
        self._together("init_communicator", lambda lead: lead.init_communicator(timeout), lambda _: None)

    def sync_weights(
        self,
        timer: Any = None,
        kv_scales: Mapping[str, float] | None = None,
        *,
        only: Sequence[int] | None = None,
    ) -> RefitReport:
        """Send the weights to every shard that is in, and commit on all of them or on none. Collective.

        As :meth:`~dprims.synchronizer.CollectiveWeightSynchronizer.sync_weights`. Reports on ranks other
        than 0 lack ``stages`` and ``trace``.
        """
        return self._together(
            "sync_weights",
            lambda lead: lead.sync_weights(timer, kv_scales, only=only),
            write_report,
            read_report,
        )

    def reconcile_communicator(self, absent_shards: Sequence[int] = (), force: bool = False) -> bool:
        """Rebuild the groups over the shards that live, less *absent_shards*. Collective; see there."""
        return self._together(
            "reconcile_communicator",
            lambda lead: lead.reconcile_communicator(absent_shards, force),
            bool,
            bool,
        )

    # -- end -------------------------------------------------------------------------------------------

    def shutdown(self) -> None:
        """Give up the leadership, leave the roster, end the threads. Local, bounded, idempotent."""
        if self._lead is not None:
            self._lead.shutdown()
        self._attendant.close()
        with suppress(DprimsError):
            self._backend.close()

    def __enter__(self) -> SpmdRefit:
        return self

    def __exit__(self, *exc: object) -> None:
        self.shutdown()

    # -- together --------------------------------------------------------------------------------------

    def _together(
        self,
        what: str,
        act: Callable[[Lead], T],
        write: Callable[[T], Any],
        read: Callable[[Any], T] = lambda found: found,
    ) -> T:
        number, self._calls = self._calls, self._calls + 1
        if self._lead is None:
            self._outcome = self._meeting.take_part(number, what, self._meet_timeout_s, self._alive(number))
            return read(self._outcome["result"])
        lead = self._lead
        said: Document = {"result": None, "error": None}
        try:
            if what != "init_communicator":  # before that there is nobody to meet
                self._meet(lead, number, what)
            result = act(lead)
            said["result"] = write(result)
        except BaseException as error:
            said["error"] = write_error(error)
            raise
        finally:
            self._outcome = {**said, "version": lead.version, "stale": lead.is_stale}
            self._tell(lead, number)
        return result

    def _others(self, lead: Lead) -> dict[int, int]:
        roster = lead.seats.read()
        return {seat: roster[seat] for seat in range(1, self._world_size)}

    def _meet(self, lead: Lead, number: int, what: str) -> None:
        """Wait until every other trainer has made this call."""
        asked = {
            seat: lead.mail(seat, incarnation, "meet", [number, what])
            for seat, incarnation in self._others(lead).items()
        }
        ended, late = wait(asked.values(), self._meet_timeout_s, return_when=FIRST_EXCEPTION)
        for seat, future in asked.items():
            if future in ended and (error := future.exception()) is not None:
                raise type(error)(f"trainer rank {seat}: {error}") from error
        if late:
            ranks = [seat for seat, future in asked.items() if future in late]
            raise RefitTimeout(f"trainer ranks {ranks} did not call {what} in {self._meet_timeout_s:g} s")

    def _tell(self, lead: Lead, number: int) -> None:
        """Hand the outcome to the other trainers; one that cannot be reached finds out by itself."""
        if self._world_size == 1:
            return
        try:
            told = {
                seat: lead.mail(seat, incarnation, "end", [number, self._outcome])
                for seat, incarnation in self._others(lead).items()
                if incarnation
            }
        except (RefitError, BackendError) as error:
            log.warning("the other trainers cannot be told of call %d: %s", number, error)
            return
        ended, _ = wait(told.values(), FAREWELL_S)
        left = [seat for seat, one in told.items() if one not in ended or one.exception() is not None]
        if left:
            log.warning("trainer ranks %s did not take in the outcome of call %d", left, number)

    def _alive(self, number: int) -> Callable[[bool], bool]:
        """Whether the leader is still to be reached, as of each time it is asked; before the first, it is."""
        seen, attached = time.monotonic(), self._attendant.leader
        term = attached if attached is not None or number == 0 else 0

        def alive(met: bool) -> bool:
            nonlocal seen, term
            now, reached = time.monotonic(), self._attendant.leader
            if term is None or (reached is not None and (reached == term or not met)):
                seen, term = now, reached
            return now - seen < self._grace_s

        return alive
