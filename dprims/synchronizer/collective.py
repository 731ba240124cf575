"""``CollectiveWeightSynchronizer``: the leader of a fleet's refits.

A thin shell around the pure :class:`~dprims.synchronizer.protocol.Leader`: it turns the machine's actions
into calls to the policy and the generation and into operations on the backend, and what comes of them into
events. Everything that takes time puts an event into one inbox, and one loop takes them out.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from ..backend import Backend, check_name, check_shared, check_url, connect, resolve
from ..exceptions import (
    BackendMisconfigured,
    DprimsError,
    LockTimeout,
    MembershipError,
    PeerLost,
    RefitAborted,
    RefitError,
    RefitTimeout,
    StaleLeader,
)
from ..lock import DistributedLock, Grant
from ..membership import RefitMembership, should_rebuild
from ..roster import Roster
from .calls import METHODS, RankInfo, RefitAnswer, RefitCall, RefitSite
from .chronicle import Chronicle
from .interfaces import Cluster, Generation, Policy, WeightSynchronizer
from .ledger import Ledger
from .protocol import (
    BuildRequested,
    Deposed,
    Elected,
    Epoch,
    Kind,
    Leader,
    Stepped,
    SyncRequested,
    Version,
    current_key,
    decode_version,
    next_key,
)
from .recovery import refit
from .rendezvous import forget_groups, leader_store
from .report import RefitReport
from .run import LAPSE_SLACK, Run
from .seats import LOOKS, Seats
from .settle import _settle_before_propagating, as_future
from .shell import why
from .stages import Stages
from .trace import Journal

if TYPE_CHECKING:
    from collections.abc import Iterator

    from .transfer import TransferStats

log = logging.getLogger("dprims.synchronizer.collective")


MAX_SECONDS = 1e7
"""The longest timeout: more is no bound."""


class CollectiveWeightSynchronizer(WeightSynchronizer):
    """Moves the weights of *policy* to *generation* through one weight group a pipeline stage.

    Every wait is bounded: a whole sync by *refit_timeout_s* (None disarms it: then a rank that is silent
    and yet in the roster blocks the sync until *stall_timeout_s*), the time without progress by
    *stall_timeout_s*. A killed rank, a lapsed roster entry or a raised error ends the sync at once. After
    any failure every shard is whole, at the old version or the new one, and the next
    :meth:`reconcile_communicator` or :meth:`sync_weights` goes on with those that live.

    *backend* (None, URL, client or Backend) keeps the leader lock, the roster and the decisions, and has
    to outlive this process for another leader to take over. With None they live in a store that this
    process serves at *host* (None: the policy's ``host`` where it has one, else an address that other hosts
    can reach): enough for one controller. Several controllers on one backend wait for each
    other; *fleet* names what they lead. *min_shards* is how few shards a sync may end with (BelowQuorum).
    *verify* compares the digest of every bucket on both sides. *bucket_bytes* is the size of a bucket, a
    multiple of 256 (None: the plan's own choice); *roster_ttl_s* how long a frozen rank counts as alive.
    Names that end in ``_s`` are seconds. RefitError or BackendMisconfigured for values that cannot work.

    All methods are local to the controller: no rank has to make a call of its own. Call them from one thread
    at a time; a call beside a running one raises RefitError.
    """

    def __init__(
        self,
        policy: Policy,
        generation: Generation,
        train_cluster: Cluster | None = None,
        inference_cluster: Cluster | None = None,
        refit_timeout_s: float | None = 120.0,
        *,
        stall_timeout_s: float = 30.0,
        backend: object = None,
        host: str | None = None,
        bucket_bytes: int | None = None,
        min_shards: int = 1,
        verify: bool = True,
        roster_ttl_s: float = 5.0,
        namespace: str = "dprims",
        fleet: str = "refit",
    ) -> None:
        if refit_timeout_s is not None:
            _check_seconds("refit_timeout_s", refit_timeout_s)
        _check_seconds("stall_timeout_s", stall_timeout_s)
        _check_seconds("roster_ttl_s", roster_ttl_s)
        if type(min_shards) is not int or min_shards < 1:
            raise RefitError(f"min_shards is {min_shards!r}; expected an int of at least 1")
        if bucket_bytes is not None and (
            type(bucket_bytes) is not int or bucket_bytes < 256 or bucket_bytes % 256
        ):
            raise RefitError(f"bucket_bytes is {bucket_bytes!r}; expected a multiple of 256 above 0, or None")
        if "/" in check_name("fleet", fleet):
            raise RefitError(f"fleet is {fleet!r}; expected no slash")
        if isinstance(backend, str):
            check_url(backend)
        if policy is not None:  # None is refused by init_communicator: before it nothing is called
            _check_side("policy", policy)
        if generation is not None:
            _check_side("generation", generation)
        sizes = getattr(getattr(generation, "worker_group", None), "sizes", ())
        if sizes and min_shards > len(sizes):
            raise RefitError(f"min_shards is {min_shards}; the generation has {len(sizes)} shards")
        self.policy = policy
        self.generation = generation
        self.train_cluster = train_cluster
        self.inference_cluster = inference_cluster
        self.refit_timeout_s = refit_timeout_s
        self.stall_timeout_s = stall_timeout_s
        self.min_shards = min_shards
        self.verify = verify
        self.stages = Stages(bucket_bytes)
        self._host = host
        self._given_backend = backend
        self._opened: Backend | None = None
        self._owns_backend = False
        self.site = RefitSite("", namespace, fleet, roster_ttl_s)
        self.chronicle = Chronicle(fleet)
        self._store: Any = None
        self.rendezvous: tuple[str, int] | None = None
        self._leader: Leader | None = None
        self._interrupted = ""
        self._grant: Grant | None = None
        self._seats: Seats | None = None
        self._membership: RefitMembership | None = None
        self._missed: set[int] = set()  # seats whose absence was logged
        self._busy = threading.Lock()
        self._run: Run | None = None
        self.journal = Journal()

    # -- what is known --------------------------------------------------------------------------------

    @property
    def is_stale(self) -> bool:
        """True until the first success, after mark_stale, a failed sync, and a build that took anyone in."""
        return self._leader is None or self._leader.stale

    @property
    def version(self) -> int:
        """The number of the version that the fleet serves; 0 before the first sync."""
        return 0 if self._leader is None else self._leader.version.number

    @property
    def epoch(self) -> Epoch:
        """The epoch of the newest build."""
        return Epoch(0, 0) if self._leader is None else self._leader.epoch

    @property
    def membership(self) -> RefitMembership | None:
        """Who was in the groups that were built last; None before the first build."""
        return self._membership

    @property
    def backend(self) -> Backend:
        """The backend that keeps lock, roster and decisions; RefitError before init_communicator."""
        if self._opened is None:
            raise RefitError("no communicator yet: call init_communicator first")
        return self._opened

    @property
    def seats(self) -> Seats:
        """The fleet's roster; RefitError before init_communicator."""
        if self._seats is None:
            raise RefitError("no communicator yet: call init_communicator first")
        return self._seats

    def mark_stale(self) -> None:
        """The trainers changed their weights: what the fleet serves is the version before."""
        if self._leader is not None and self._leader.phase != "stopped":
            self._leader.handle(Stepped())
            self.chronicle.stepped()

    # -- init -----------------------------------------------------------------------------------------

    def init_communicator(self, timeout: float | None = None) -> None:
        """Become the leader, settle what an earlier leader left in doubt, and build the weight groups.

        Waits at most *timeout* seconds for the leader lock while another controller holds it (None: for
        as long as that one lives). Metadata travels first, then the groups are built, over every shard
        that is in. LockTimeout, PeerLost, HandshakeMismatch, RefitTimeout or BackendError on failure;
        MembershipError, before anything is touched, where the generation counts more trainers, or fewer.
        """
        with self._alone("init_communicator"):
            if self._grant is not None and not self._grant.lost:
                raise RefitError("init_communicator was called before; call shutdown first")
            self._check_open()
            counted, there = getattr(self.generation, "train_world_size", None), self._train_world_size()
            if counted is not None and counted != there:
                raise MembershipError(
                    f"the generation counts {counted} trainer ranks, the policy has {there}: "
                    f"give the generation train_world_size={there}"
                )
            self._open_backend()
            lock = DistributedLock(
                f"{self.site.fleet}/leader",
                self._opened,
                namespace=self.site.namespace,
                ttl=max(2 * self.site.roster_ttl_s, 2.0),
                on_lost=lambda grant: self._depose(grant, "the leader lock was lost"),
                label="refit leader",
            )
            grant = lock.acquire(0)
            if grant is None:
                log.warning(
                    "fleet %r is led already, by %s: waiting for its end", self.site.prefix, lock._holder()
                )
                grant = lock.acquire(timeout)
            if grant is None:
                raise LockTimeout(f"another controller leads fleet {self.site.prefix!r}, after {timeout} s")
            self._retire()
            self._grant = grant
            try:
                self._seats = Seats(self._roster(), self._train_world_size() + self._inference_world_size())
                self._seats.watch(self._gone)
                reserved, current = self._raise_fences(grant.token)
                highest = max((info.version for info in self._prepare()), default=0)
                if highest > (reserved.number if reserved else 0):
                    # the backend has lost what it knew; numbers grow all the same
                    reserved = Version(highest)
                self.ledger = Ledger(self.backend, self.site.prefix)
                self._leader = Leader(self._fleet(), min_shards=self.min_shards)
                self.chronicle.lead(self.backend, self.site.prefix, grant.token)
                roster = self._who_is_in()
                evicted = self.ledger.marked(seat for seat, stands in enumerate(roster) if not stands)
                self._drive(Elected(grant.token, reserved, current, roster, frozenset(evicted)))
                self._build(frozenset(), force=False)
            except BaseException:
                self._retire()
                raise

    def _check_open(self) -> None:
        for name, side in (("policy", self.policy), ("generation", self.generation)):
            _check_side(name, side)
            if getattr(side, "closed", False) is True:
                raise RefitError(f"the {name}, a {type(side).__name__}, has been closed")

    def _raise_fences(self, term: int) -> tuple[Version | None, Version | None]:
        """Refuse every earlier leader's writes from now on; the versions reserved and current until now."""
        keys = next_key(self.site.prefix), current_key(self.site.prefix)
        found = [self.backend.raise_fence(key, term) for key in keys]
        if any(token > term for token, _ in found):
            raise StaleLeader(
                f"a leader of a higher term than {term} has taken over fleet {self.site.prefix!r}"
            )
        reserved, current = (decode_version(value) if value else None for _, value in found)
        return reserved, current

    def _open_backend(self) -> None:
        if self._opened is not None:
            return
        given = None if self._given_backend is None else resolve(self._given_backend)
        elsewhere = [side for side in (self.policy, self.generation) if getattr(side, "in_processes", False)]
        if given is not None and elsewhere:
            check_shared(given, type(elsewhere[0]).__name__)
        host = self._host or getattr(self.policy, "host", None)
        self._store, address, port = leader_store(host)
        self.rendezvous = (address, port)
        if given is None:
            self._opened = connect(
                f"tcpstore://[{address}]:{port}" if ":" in address else f"tcpstore://{address}:{port}"
            )
            self._owns_backend = True
        else:
            self._opened = given
        if not self._opened.url:
            raise BackendMisconfigured(
                f"{self._opened!r} has no URL that ranks could connect to; pass backend=URL"
            )
        # what is waited for after an eviction has to be what an entry really lasts
        ttl = max(self.site.roster_ttl_s, self._opened.guarantees.min_ttl)
        self.site = RefitSite(self._opened.url, self.site.namespace, self.site.fleet, ttl)

    def _roster(self) -> Roster:
        return Roster(
            self.site.fleet, self.backend, namespace=self.site.namespace, ttl=self.site.roster_ttl_s
        )

    def _fleet(self) -> RefitMembership:
        group = getattr(self.generation, "worker_group", None)
        sizes = (self._inference_world_size(),) if group is None else tuple(group.sizes)
        return RefitMembership.full(
            train_world_size=self._train_world_size(), shard_sizes=sizes, stage_heads=self.stages.heads
        )

    def _train_world_size(self) -> int:
        if self.train_cluster is not None:
            return self.train_cluster.world_size()
        return self.policy.world_size

    def _inference_world_size(self) -> int:
        group = getattr(self.generation, "worker_group", None)
        if group is not None:
            return sum(group.sizes)
        size = self.generation.get_inference_world_size()
        if size is not None:
            return size
        if self.inference_cluster is None:
            raise RefitError(
                "the generation does not know its world size, and no inference_cluster was given"
            )
        return self.inference_cluster.world_size()

    def _prepare(self) -> list[RankInfo]:
        """Have every rank in at this site, and learn what the trainers send. A dead rank is left out."""
        began = time.monotonic()
        before = dict(self.seats.known)  # a process that answers no more is none that joins after this
        handles = list(self.policy.prepare_refit_info(self.site, self.stages.known))
        trainers = len(handles)
        handles += self.generation.prepare_refit_info(self.site)
        asked = {seat: as_future(handle) for seat, handle in enumerate(handles)}
        for seat, future in asked.items():
            record = self.journal.called("prepare", seat, 0, began)
            future.add_done_callback(partial(self.journal.introduced, record))
        late = self._late(asked, before)
        infos: list[RankInfo] = []
        for seat, future in asked.items():
            error = (
                future.exception()
                if seat not in late
                else RefitTimeout(f"rank at seat {seat} did not answer prepare_refit_info")
            )
            if error is None:
                self._missed.discard(seat)
                infos.append(future.result())
            elif seat < trainers:
                raise (
                    error
                    if isinstance(error, DprimsError)
                    else RefitAborted(f"{self.name_of(seat)}: prepare_refit_info: {why(error)}")
                ) from error
            else:
                said = log.debug if seat in self._missed else log.warning
                said("seat %d takes no part: %s", seat, error)
                self._missed.add(seat)
                if isinstance(error, PeerLost):
                    self.seats.evict(seat, before.get(seat, 0))
        self.stages.note(infos)
        return infos

    def _who_is_in(self) -> tuple[int, ...]:
        """The roster, once every trainer is in it: one that has just lapsed, and answers, joins anew soon."""
        deadline = time.monotonic() + self.site.roster_ttl_s * (1 + LAPSE_SLACK)
        while not all((roster := self.seats.read())[: self._train_world_size()]):
            if time.monotonic() >= deadline:
                break
            time.sleep(self.site.roster_ttl_s / LOOKS)
        return roster

    def _late(self, asked: Mapping[int, Future[RankInfo]], before: Mapping[int, int]) -> set[int]:
        """Who has not answered in time. A generation rank whose entry *before* has gone is not waited for."""
        deadline = time.monotonic() + 2 * self.site.roster_ttl_s + self.stall_timeout_s
        late = set(asked)
        while late and time.monotonic() < deadline:
            wait([asked[seat] for seat in late], self.site.roster_ttl_s / LOOKS)
            late = {seat for seat in late if not asked[seat].done()}
            if late and all(self._was_in(seat) for seat in late):
                roster = self.seats.read()
                if not any(roster[seat] and roster[seat] == before.get(seat, roster[seat]) for seat in late):
                    break
        return late

    def _was_in(self, seat: int) -> bool:
        """Whether the process at *seat* has joined before; one that was started anew has not."""
        if seat < self._train_world_size():
            return False  # nothing goes without it, so it is waited for as one that was started anew
        group, leader = getattr(self.generation, "worker_group", None), self._leader
        shard = None if leader is None else leader.fleet.shard_of(seat)
        if group is None or leader is None or shard is None:
            return bool(self.seats.known.get(seat))
        return bool(group.incarnation(shard)[seat - leader.seats[shard][0]])

    # -- sync -----------------------------------------------------------------------------------------

    def sync_weights(
        self,
        timer: Any = None,
        kv_scales: Mapping[str, float] | None = None,
        *,
        only: Sequence[int] | None = None,
    ) -> RefitReport:
        """Send the trainers' weights to every shard that is in; commit on all of them, or on none.

        ``only=[shard]`` brings one shard that came back to the version that the others serve, without
        disturbing them; it is refused once the trainers have stepped. *kv_scales* travel after the weights.
        *timer* is anything with ``time(name)`` that gives a context manager.

        Raises the first error that any rank met, after all of them have unwound: PeerLost, RefitTimeout,
        TransferCorrupt, HandshakeMismatch, RefitAborted (its cause is what a source or sink raised),
        BelowQuorum, StaleLeader, BackendError. Then the fleet serves what it served before.
        """
        if only is not None and (not isinstance(only, Sequence) or list(map(type, only)) != [int]):
            raise RefitError(f"only is {only!r}; expected one shard, such as [1]")
        if not all(type(name) is str and _is_number(scale) for name, scale in (kv_scales or {}).items()):
            raise RefitError(f"kv_scales is {kv_scales!r}; expected finite numbers by name")
        span = getattr(timer, "time", None)
        timed: AbstractContextManager[Any] = (
            nullcontext() if span is None else span("prepare_for_generation/transfer_and_update_weights")
        )
        with self._alone("sync_weights"), timed:
            leader = self._lead()
            with self.chronicle.operation(leader, "sync" if only is None else "only"):
                began = time.monotonic()
                leader.stale |= only is None  # until this one has succeeded
                self._prepare()
                self.stages.plan(kv_scales or {})
                request = SyncRequested(self._who_is_in(), None if only is None else only[0])
                run = self._drive(request, kv_scales=kv_scales or {}, began=began)
                report = self._report(leader, run)
            self.chronicle.synced(leader, report)
            return report

    def _report(self, leader: Leader, run: Run) -> RefitReport:
        membership = run.membership
        if membership is None:
            raise RefitError("a sync succeeded without a membership")
        left_behind = run.left_behind()
        for shard, reason in left_behind.items():
            log.warning("shard %d was left behind at version %d: %s", shard, leader.version.number, reason)
        heads = [run.stats[seat][stage] for stage, seat in enumerate(membership.stage_heads)]
        stages: dict[int, dict[int, TransferStats]] = {}
        for seat, by_stage in run.stats.items():
            for stage, stats in by_stage.items():
                stages.setdefault(stage, {})[seat] = stats
        starts = [span.start for head in heads for span in head.spans if span.phase == "wire"]
        stops = [
            span.stop
            for ranks in run.stats.values()
            for s in ranks.values()
            for span in s.spans
            if span.phase == "wire"
        ]
        return RefitReport(
            version=leader.version.number,
            epoch=leader.epoch,
            members=tuple(sorted(leader.current)),
            absent={**membership.absent, **left_behind},
            nbytes=sum(stats.nbytes for stats in heads),
            seconds=time.monotonic() - run.began,
            wire_s=max(stops) - min(starts) if starts and stops else 0.0,
            rebuilt=run.rebuilt,
            phases=run.phases,
            stages=stages,
            trace=self.journal.close(leader.fleet),
        )

    def refit(
        self,
        absent_shards: Callable[[], Sequence[int]] | None = None,
        *,
        tries: int = 3,
        timer: Any = None,
        kv_scales: Mapping[str, float] | None = None,
    ) -> RefitReport:
        """For training loops: reconcile, sync, and after a failure the same again, at most *tries* times.

        *absent_shards* is asked before each try for the shards to leave out; a shard that is not in the
        roster is left out without being named, and so is, from then on, one that failed in two tries by what
        it raised or by silence, as long as enough others are left. Raises what the last try raised. Not
        tried again is what a new try cannot mend: StaleLeader, BelowQuorum, BackendMisconfigured and
        HandshakeMismatch, and RefitError for a policy or generation that was closed, and beside another call.
        """
        if absent_shards is not None and not callable(absent_shards):
            raise RefitError(f"absent_shards is {absent_shards!r}; expected something to call, or None")
        if self._busy.locked():
            raise RefitError("refit was called while another thread drives this synchronizer")
        self._lead()
        self._check_open()
        return refit(self, absent_shards, tries=tries, timer=timer, kv_scales=kv_scales)

    # -- reconcile ------------------------------------------------------------------------------------

    def reconcile_communicator(self, absent_shards: Sequence[int], force: bool = False) -> bool:
        """Rebuild the weight groups over the shards that live, less *absent_shards*; say whether it was done.

        False when nothing differs from what was built, unless *force* says that the groups are gone
        although the members are the same; forced with nobody absent it rebuilds only if every member answers,
        and returns False otherwise, so that the caller does not rebuild over a frozen rank. False, too, when
        the generation has no worker group. A shard that is no longer named is taken in again once its ranks
        are in the roster. A shard that fails during the rebuild is left out, and the rebuild is tried again.

        BelowQuorum when too few are left; what the build raised otherwise.
        """
        with self._alone("reconcile_communicator"):
            leader = self._lead()
            absent = self._check_shards(absent_shards)
            self._prepare()
            roster = self.seats.read()
            desired = self._desired_membership(
                sorted(absent | self._not_in(roster)), self._train_world_size()
            )
            if desired is None:
                return False
            built = self._membership if leader.built is not None else None
            if not should_rebuild(desired=desired, built=built, force=force):
                return False
            if force and not desired.absent and not self._all_answer(roster):
                return False
            return self._build(absent, force=force)

    def _desired_membership(
        self, absent_shards: Sequence[int], train_world_size: int
    ) -> RefitMembership | None:
        """The membership without *absent_shards*, or None for a generation that has no worker group."""
        if getattr(self.generation, "worker_group", None) is None:
            return None
        fleet = self._fleet()
        if train_world_size != fleet.train_world_size:
            raise MembershipError(
                f"train_world_size is {train_world_size}; the fleet has {fleet.train_world_size}"
            )
        desired = RefitMembership.full(
            train_world_size=train_world_size,
            shard_sizes=fleet.shard_sizes,
            stage_heads=fleet.stage_heads,
            incarnations=[
                tuple(self.seats.known.get(seat, 0) for seat in fleet.seats_of(shard))
                for shard in range(len(fleet.shard_sizes))
            ],
        )
        return desired.without(*absent_shards).require(self.min_shards) if absent_shards else desired

    def _excludes(self, shards: Sequence[int]) -> bool:
        """Whether exactly these shards are left out already because the caller wanted so."""
        return self._lead().excluded == self._check_shards(shards)

    def _check_shards(self, shards: Sequence[int]) -> frozenset[int]:
        count = len(self._fleet().shard_sizes)
        named = list(shards) if isinstance(shards, Iterable) else [shards]
        if not all(type(shard) is int and 0 <= shard < count for shard in named):
            raise MembershipError(f"absent_shards is {shards!r}; expected shards of 0..{count - 1}")
        return frozenset(named)

    def name_of(self, seat: int) -> str:
        """What to call a rank in messages."""
        trainers = self._train_world_size()
        if seat < trainers:
            return f"seat {seat} (trainer)"
        return f"seat {seat} (shard {self._fleet().shard_of(seat)})"

    def _not_in(self, roster: Sequence[int]) -> frozenset[int]:
        fleet = self._fleet()
        return frozenset(
            shard
            for shard in range(len(fleet.shard_sizes))
            if not all(roster[seat] for seat in fleet.seats_of(shard))
        )

    def _all_answer(self, roster: Sequence[int]) -> bool:
        """Whether every rank answers a call that changes nothing, within the grace."""
        seats = {seat: incarnation for seat, incarnation in enumerate(roster) if incarnation}
        futures = self.dispatch("ask", self.epoch, Version(0), seats).values()
        return not _settle_before_propagating(list(futures), self.stall_timeout_s, "ask")

    def _build(self, absent: frozenset[int], *, force: bool) -> bool:
        leader = self._lead()
        with self.chronicle.operation(leader, "build"):
            built = self._build_groups(absent, force=force)
        if built and self._membership is not None:
            self.chronicle.built(leader, self._membership.absent)
        return built

    def _build_groups(self, absent: frozenset[int], *, force: bool) -> bool:
        """Build, and build again without whoever failed in it; a failure always leaves somebody out."""
        self.stages.plan({})
        rounds = len(self._fleet().shard_sizes) + 1
        for left in reversed(range(rounds)):
            roster = self._who_is_in()
            try:
                return self._drive(BuildRequested(roster, absent, force)).rebuilt
            except (PeerLost, RefitTimeout) as error:
                if not left or not self._lost_a_shard(roster):
                    raise
                log.warning("the rebuild failed, trying again without who failed in it: %s", error)
        raise RefitError("unreachable: the last round either returns or raises")

    def _lost_a_shard(self, roster: Sequence[int]) -> bool:
        leader = self._lead()
        trainers = leader.trainers
        lost = [seat for seat, gone in enumerate(leader.gone) if roster[seat] and gone >= roster[seat]]
        return bool(lost) and not any(seat in trainers for seat in lost)

    def _settle_budget_s(self) -> float:
        """How long stragglers may take to unwind, from the dispatch: their own deadline, and a little."""
        return (self.refit_timeout_s or 60.0) + 30.0

    # -- shutdown -------------------------------------------------------------------------------------

    def shutdown(self) -> None:
        """Give up the leadership and let go of stores and connections. Bounded; idempotent. Ends no rank."""
        with self._alone("shutdown"):
            self._retire()
            backend, self._opened = self._opened, None
            if backend is not None and self._owns_backend:
                with suppress(DprimsError):
                    backend.close()
            self._owns_backend = False
            self._store = self.rendezvous = None

    def _retire(self) -> None:
        if self._seats is not None:
            self._seats.close()
        self.chronicle.close()
        grant, self._grant = self._grant, None
        if grant is not None and not grant.lost:
            with suppress(DprimsError):
                grant.release()
        self._leader, self._interrupted = None, ""

    def __enter__(self) -> CollectiveWeightSynchronizer:
        return self

    def __exit__(self, *exc: object) -> None:
        self.shutdown()

    # -- driving the machine --------------------------------------------------------------------------

    def _drive(
        self, event: Any, *, kv_scales: Mapping[str, float] | None = None, began: float | None = None
    ) -> Run:
        """Run one operation of the leader to its end; raise what made it fail."""
        run = self._run = Run(self, self._lead(), kv_scales or {}, began)
        try:
            run.to_the_end(event)
        except BaseException as error:
            if not run.ended:
                # such as KeyboardInterrupt: what the ranks do is for an election to find out
                phase = "" if self._leader is None else f" in its phase {self._leader.phase!r}"
                self._retire()
                self._interrupted = f"{type(error).__name__} ended an operation{phase}"
                log.warning("%s: the leadership was given up", self._interrupted)
            raise
        finally:
            self._run = None
            self.chronicle.broke_at = run.broke_at
        if run.rebuilt:
            self.chronicle.rebuilt()
            forget_groups(self._store, but=self.epoch)
        return run

    def dispatch(
        self, kind: Kind, epoch: Epoch, version: Version, seats: Mapping[int, int], **more: Any
    ) -> dict[int, Future[RefitAnswer]]:
        """Make one call to these seats, through the policy's and the generation's method for it."""
        futures: dict[int, Future[RefitAnswer]] = {}
        train_world_size = self._train_world_size()
        for side, target, mine in (
            ("policy", self.policy, {s: i for s, i in seats.items() if s < train_world_size}),
            ("generation", self.generation, {s: i for s, i in seats.items() if s >= train_world_size}),
        ):
            if mine:
                call = RefitCall(kind, epoch, version, mine, **more)
                handles = getattr(target, METHODS[side][kind])(call)
                if len(handles) != len(mine):
                    raise RefitError(
                        f"{side}.{METHODS[side][kind]} returned {len(handles)} futures for {len(mine)} ranks"
                    )
                futures.update(zip(mine, map(as_future, handles), strict=True))
        return futures

    def take_desired(self, membership: RefitMembership) -> None:
        """A build over *membership* is about to be dispatched."""
        self._membership = membership

    def _gone(self, seat: int, incarnation: int, why: str) -> None:
        run = self._run
        if run is not None:
            run.gone(seat, incarnation, why)

    def _depose(self, grant: Grant, why: str) -> None:
        run = self._run
        if run is not None and grant is self._grant:
            run.inbox.put(Deposed(why))

    def _lead(self) -> Leader:
        if self._leader is None:
            raise RefitError(f"{self._interrupted or 'no communicator yet'}: call init_communicator first")
        if self._grant is not None and self._grant.lost:
            self._leader.handle(Deposed("the leader lock was lost"))
            raise StaleLeader(f"term {self._leader.term} is over: the leader lock was lost")
        return self._leader

    @contextmanager
    def _alone(self, what: str) -> Iterator[None]:
        if not self._busy.acquire(blocking=False):
            raise RefitError(f"{what} was called while another thread drives this synchronizer")
        try:
            with self.journal.operation(what):
                yield
        finally:
            self._busy.release()


def _check_seconds(name: str, seconds: float) -> None:
    if not _is_number(seconds) or not 0 < seconds <= MAX_SECONDS:
        raise RefitError(f"{name} is {seconds!r}; expected seconds > 0")


def _check_side(name: str, side: object) -> None:
    """Refuse what lacks the methods that tell a policy from a generation."""
    for method in ("prepare_refit_info", METHODS[name]["recv"]):
        if not callable(getattr(side, method, None)):
            raise RefitError(f"{name} is a {type(side).__name__}, which has no {method}(); expected a {name}")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
