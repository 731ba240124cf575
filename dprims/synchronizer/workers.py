"""The rank's side of a refit: :class:`WeightSender` of a trainer, :class:`WeightReceiver` of a shard.

Each is a thin shell around the pure :class:`~dprims.synchronizer.protocol.Member`. One thread owns the
machine and takes events from an inbox; one thread builds groups and moves bytes, under a guard; one watches
the decision. A call only puts a message in the inbox, so a call never blocks, and its future is done when
the machine answers.
"""

from __future__ import annotations

import hashlib
import logging
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from ..backend import Backend, connect
from ..exceptions import BackendError, DprimsError, RefitAborted, RefitError, TornWeights
from ..roster import Roster
from .calls import RankInfo, RefitAnswer, RefitCall, RefitSite
from .clients import Clients
from .group import CommGroup
from .guard import CancelFlag, Guard
from .interfaces import WeightSink, WeightSource
from .plan import Plan
from .protocol import (
    Answer,
    Broke,
    Cancel,
    CellRead,
    Drop,
    Holding,
    Join,
    Joined,
    Member,
    Message,
    Perform,
    Performed,
    ReadTerm,
    Reply,
    Started,
    TermRead,
    Version,
    WriteAbort,
    current_key,
    decision_key,
    decode_decision,
    encode_decision,
    next_key,
)
from .rendezvous import join_store
from .transfer import TransferStats, lacks_memory, participate, receive, send

if TYPE_CHECKING:
    import torch

    from ..lock import Grant
    from ..testing.faults import FaultInjector

log = logging.getLogger("dprims.synchronizer.workers")

GLOO_SLACK_S = 10.0
"""How much longer than the refit's own bound torch's timeout of a gloo group is."""
NCCL_SLACK = 10.0
"""The same for NCCL, as a factor: torch's watchdog must never be first, as it ends the process."""
NCCL_LEAST_S = 600.0
WATCH_SLICE_S = 10.0
REJOIN_S = 1.0
"""Pause before a rank whose entry lapsed tries again to join, when the backend does not answer."""


class _Task:
    """A build or receive that runs: what it was asked, and the flag that ends it."""

    def __init__(self, message: Message, call: RefitCall) -> None:
        self.message = message
        self.call = call
        self.cancel = CancelFlag()


class _Worker:
    """What senders and receivers share: the machine, its threads, the roster entry, the groups."""

    def __init__(
        self,
        seat: int,
        *,
        sends: bool,
        device: torch.device | str = "cpu",
        faults: FaultInjector | None = None,
    ) -> None:
        import torch

        self.seat = seat
        self.device = torch.device(device)
        self.faults = faults
        self._member = Member(sends=sends)
        self._site: RefitSite | None = None
        self._backend: Backend | None = None
        self._roster: Roster | None = None
        self._entry: Grant | None = None
        self._inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._tasks: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()
        self._running: _Task | None = None
        self._calls: dict[Message, RefitCall] = {}
        self._waiting: dict[Message, list[Future[RefitAnswer]]] = {}
        self._outcome: dict[Message, tuple[BaseException | None, dict[int, TransferStats]]] = {}
        self._groups: dict[int, CommGroup] = {}
        self._plans: tuple[Plan, ...] = ()
        self._epoch_call: RefitCall | None = None
        self._watched: set[tuple[Any, int]] = set()
        self._store: tuple[tuple[str, int], Clients] | None = None
        self._closed = False
        for target, name in ((self._run_machine, "machine"), (self._run_tasks, "transfer")):
            threading.Thread(target=target, name=f"dprims-{name}-{seat}", daemon=True).start()

    # -- calls: none of them blocks ---------------------------------------------------------------------

    def prepare_refit_info(self, site: RefitSite, known: str = "") -> Future[RankInfo]:
        """Join the roster at *site*, unless that is done, and say who this rank is and what it sends.

        *known* is the digest of the metadata that the caller has; equal metadata is not sent again.
        """
        future: Future[RankInfo] = Future()
        self._inbox.put(lambda: self._prepare(site, known, future))
        return future

    def submit(self, call: RefitCall) -> Future[RefitAnswer]:
        """Hand one call of the protocol to the machine; the future has its answer."""
        future: Future[RefitAnswer] = Future()
        message = call.message(self.seat)

        def take() -> None:
            if self._closed:
                future.set_exception(RefitError(f"rank at seat {self.seat} has been closed"))
                return
            self._calls[message] = call
            self._waiting.setdefault(message, []).append(future)
            try:
                if message.kind == "rollback":
                    self._strike("settle")
                self._handle(message)
            except Exception as error:  # noqa: BLE001 - it is the answer
                self._outcome[message] = (error, {})
                self._answer(Answer(message, Reply("error", _why(error), self._member.seen)))

        self._inbox.put(take)
        return future

    ask = init_collective = rollback = submit

    @property
    def holding(self) -> Holding:
        """What this rank has live and staged, and whether it is paused."""
        return Holding(self._member.live, self._member.staged, self._member.paused)

    @property
    def version(self) -> Version | None:
        """The version that is live here, or None."""
        return self._member.live

    @property
    def incarnation(self) -> int:
        """The token of this rank's roster entry; 0 while it is not in."""
        return self._member.incarnation

    def close(self) -> None:
        """Leave the roster and end the threads. What runs is cancelled. Idempotent, bounded."""
        done = threading.Event()

        def leave() -> None:
            self._closed = True
            if self._running is not None:
                self._running.cancel.set("this rank is closing", f"seat {self.seat}")
            self._tasks.put(None)
            if self._backend is not None:
                with suppress(DprimsError):
                    self._backend.close()
            self._inbox.put(None)
            done.set()

        self._inbox.put(leave)
        done.wait(10.0)

    # -- the machine's thread ----------------------------------------------------------------------------

    def _run_machine(self) -> None:
        while (step := self._inbox.get()) is not None:
            try:
                step()
            except Exception:
                log.exception("rank at seat %d: an event of the protocol failed", self.seat)

    def _handle(self, event: Any) -> None:
        for action in self._member.handle(event):
            getattr(self, self._ACTIONS[type(action)])(action)

    _ACTIONS: ClassVar = {
        Join: "_join",
        ReadTerm: "_read_term",
        Perform: "_perform",
        Cancel: "_cancel",
        Drop: "_drop",
        WriteAbort: "_write_abort",
        Answer: "_answer",
    }

    def _prepare(self, site: RefitSite, known: str, future: Future[RankInfo]) -> None:
        try:
            if self._site != site or self._backend is None:
                self._attach(site)
            if not self._member.ready or self._entry is None or self._entry.lost:
                self._handle(Started())
            future.set_result(self._info(known))
        except Exception as error:  # noqa: BLE001 - it is the answer
            future.set_exception(error)

    def _attach(self, site: RefitSite) -> None:
        old, self._backend = self._backend, None
        if old is not None:
            with suppress(DprimsError):
                old.close()
        self._backend = connect(site.backend)
        self._site = site
        self._roster = Roster(site.fleet, self._backend, namespace=site.namespace, ttl=site.roster_ttl_s)

    def _join(self, action: Join) -> None:
        roster = self._at_site(self._roster)
        self._entry = roster.join(str(self.seat), on_lost=lambda: self._inbox.put(self._lapsed))
        self._handle(Joined(self._entry.token))

    def _lapsed(self) -> None:
        """The roster entry is gone: stop serving, and come back as somebody new."""
        if self._closed or self._entry is None or not self._entry.lost:
            return
        log.warning("rank at seat %d: its roster entry lapsed; it joins again, stale", self.seat)
        try:
            self._handle(Started())
        except DprimsError as error:
            log.warning("rank at seat %d could not join again yet: %s", self.seat, error)
            timer = threading.Timer(REJOIN_S, lambda: self._inbox.put(self._lapsed))
            timer.daemon = True
            timer.start()

    def _read_term(self, action: ReadTerm) -> None:
        backend, site = self._at_site(self._backend), self._at_site(self._site)
        terms = [place.token or 0 for place in backend.queue(site.leader_lock)[:1]]
        for key in (next_key(site.prefix), current_key(site.prefix)):
            found = backend.read_fenced(key)
            if found is not None:
                terms.append(found[0])
        self._handle(TermRead(max(terms, default=0)))

    def _perform(self, action: Perform) -> None:
        message = action.message
        call = self._calls[message]
        if message.kind in ("build", "recv"):
            task = _Task(message, call)
            self._running = task
            self._watch(message)
            self._tasks.put(task)
            return
        try:
            self._act(message)
        except Exception as error:  # noqa: BLE001 - a sink's own error is the answer
            self._outcome[message] = (error, {})
            self._handle(Broke(message, _why(error)))
        else:
            self._handle(Performed(message))

    def _act(self, message: Message) -> None:
        raise NotImplementedError

    def _cancel(self, action: Cancel) -> None:
        task = self._running
        if task is not None and task.message == action.message:
            task.cancel.set("the leader or the decision ended it", f"seat {self.seat}")

    def _drop(self, action: Drop) -> None:
        """Nothing is staged on a trainer."""

    def _write_abort(self, action: WriteAbort) -> None:
        backend, site = self._at_site(self._backend), self._at_site(self._site)
        key = decision_key(site.prefix, action.epoch, action.number)
        try:
            backend.write_once(key, encode_decision(f"abort: rank at seat {self.seat}: {action.why}"))
        except BackendError as error:
            log.warning("rank at seat %d could not write the abort of %s: %s", self.seat, key, error)

    def _answer(self, action: Answer) -> None:
        error, stats = self._outcome.pop(action.message, (None, {}))
        self._calls.pop(action.message, None)
        answer = RefitAnswer(action.reply, error, stats)
        for future in self._waiting.pop(action.message, ()):
            future.set_result(answer)

    def _watch(self, message: Message) -> None:
        """Have the decision of this epoch and version told to the machine once it stands."""
        cell = (message.epoch, message.version.number)
        if cell in self._watched:
            return
        self._watched.add(cell)
        backend, site = self._at_site(self._backend), self._at_site(self._site)
        key = decision_key(site.prefix, *cell)

        def watch() -> None:
            while not self._closed and self._member.seen <= message.epoch:
                try:
                    value = backend.wait(key, WATCH_SLICE_S)
                except BackendError as error:
                    if self._closed:
                        return
                    log.warning("rank at seat %d cannot watch %s: %s", self.seat, key, error)
                    time.sleep(REJOIN_S)
                    continue
                if value is not None:
                    read = CellRead(cell[0], cell[1], decode_decision(value))
                    self._inbox.put(partial(self._handle, read))
                    break
            self._inbox.put(lambda: self._watched.discard(cell))

        threading.Thread(target=watch, name=f"dprims-watch-{self.seat}", daemon=True).start()

    @staticmethod
    def _at_site(value: Any) -> Any:
        if value is None:
            raise RefitError("this rank was never told where its fleet meets: call prepare_refit_info first")
        return value

    # -- the thread that moves bytes --------------------------------------------------------------------

    def _run_tasks(self) -> None:
        while (task := self._tasks.get()) is not None:
            self._inbox.put(self._finished(task))
        self._release_groups()

    def _finished(self, task: _Task) -> Callable[[], None]:
        """Do a task, and return what tells the machine how it went."""
        message, call = task.message, task.call
        stats: dict[int, TransferStats] = {}
        try:
            if task.cancel.is_set():
                raise RefitAborted(f"seat {self.seat}: cancelled before it began: {task.cancel.reason}")
            guard = Guard(
                task.cancel,
                None if call.timeout_s is None else time.monotonic() + call.timeout_s,
                call.stall_timeout_s,
                what=f"{message.kind} of version {message.version.number}, epoch {message.epoch}, "
                f"seat {self.seat}",
            )
            if message.kind == "build":
                self._build(call, guard)
                event: Performed | Broke = Performed(message)
            else:
                digest = self._transfer(call, guard, stats)
                guard.disarm()
                event = Performed(message, digest)
            error: BaseException | None = None
        except BaseException as failure:  # noqa: BLE001 - it is the answer
            self._give_up()
            error, event = failure, Broke(message, _why(failure))

        def tell() -> None:
            if self._running is task:
                self._running = None
            self._outcome[message] = (error, stats)
            self._handle(event)

        return tell

    def _build(self, call: RefitCall, guard: Guard) -> None:
        membership = call.membership
        if membership is None or call.rendezvous is None or call.plans is None:
            raise RefitError(f"the build of epoch {call.epoch} names no membership, rendezvous or plans")
        self._strike("rebuild")
        self._release_groups()
        self._plans = tuple(Plan.from_bytes(plan) for plan in call.plans)
        self._epoch_call = call
        rank = membership.rank_at(self.seat)
        if rank is None:
            raise RefitError(f"seat {self.seat} is not in the membership of epoch {call.epoch}")
        store = self._leader_store(call.rendezvous, guard)
        bound = call.timeout_s if call.timeout_s is not None else NCCL_LEAST_S
        refusal = lacks_memory(self._sink(), self._plans, self.device)
        for stage in self._stages(membership):  # in stage order, on this one thread
            self._strike("handshake")
            self._groups[stage] = CommGroup.build(
                store,
                f"refit/{call.epoch}/{stage}",
                membership.group_rank(stage, rank),
                len(membership.group_ranks(stage)),
                backend="nccl" if self.device.type == "cuda" else "gloo",
                device=self.device,
                timeout_s=bound,
                op_timeout_s=max(NCCL_SLACK * bound, NCCL_LEAST_S)
                if self.device.type == "cuda"
                else bound + GLOO_SLACK_S,
                guard=guard,
                record={"epoch": str(call.epoch), "world": membership.world_size},
                plan=self._plans[stage],
                members=[_member_name(membership, one) for one in membership.group_ranks(stage)],
                refusal=refusal,
            )

    def _replan(self, call: RefitCall, guard: Guard) -> None:
        """Take over plans that came with a transfer, and agree on them."""
        if call.plans is None:
            return
        self._plans = tuple(Plan.from_bytes(plan) for plan in call.plans)
        refusal = lacks_memory(self._sink(), self._plans, self.device)
        for stage in sorted(self._groups):
            self._groups[stage].handshake(
                {"epoch": str(call.epoch)}, guard=guard, plan=self._plans[stage], refusal=refusal
            )

    def _leader_store(self, where: tuple[str, int], guard: Guard) -> Clients:
        if self._store is None or self._store[0] != where:
            left = guard.remaining(30.0)
            store = guard.call(lambda: join_store(*where, timeout_s=left), "joining the leader's store")
            self._store = (where, Clients(store))
        return self._store[1]

    def _strike(self, phase: str) -> None:
        if self.faults is not None:
            self.faults.at(phase, self.seat)

    def _give_up(self) -> None:
        """After a failure no group of this epoch carries anything any more."""
        for group in self._groups.values():
            with suppress(RefitError):  # a group that was cut has said so already
                group.abort()
        self._groups.clear()

    def _release_groups(self) -> None:
        for group in self._groups.values():
            group.release()
        self._groups.clear()

    def _sink(self) -> WeightSink | None:
        return None

    def _stages(self, membership: Any) -> list[int]:
        raise NotImplementedError

    def _info(self, known: str) -> RankInfo:
        return RankInfo(self.seat, self._member.incarnation)

    def _transfer(self, call: RefitCall, guard: Guard, stats: dict[int, TransferStats]) -> str:
        raise NotImplementedError


class WeightSender(_Worker):
    """A trainer rank's part in refits: it heads a pipeline stage, or gathers along with one that does.

    *source* is asked for its metadata before each sync and read once in each. *stage* is the stage that
    this rank belongs to; *head* says whether it sends (one rank a stage does).
    """

    def __init__(
        self,
        seat: int,
        source: WeightSource,
        *,
        stage: int = 0,
        head: bool = True,
        device: torch.device | str = "cpu",
        faults: FaultInjector | None = None,
    ) -> None:
        self.source = source
        self.stage = stage
        self.head = head
        super().__init__(seat, sends=True, device=device, faults=faults)

    broadcast_weights_for_collective = _Worker.submit

    def _info(self, known: str) -> RankInfo:
        if not self.head:
            return RankInfo(self.seat, self._member.incarnation)
        metas = tuple(self.source.metadata())
        digest = hashlib.sha256(repr(metas).encode()).hexdigest()
        return RankInfo(
            self.seat, self._member.incarnation, self.stage, None if digest == known else metas, digest
        )

    def _stages(self, membership: Any) -> list[int]:
        return [self.stage] if self.head else []

    def _transfer(self, call: RefitCall, guard: Guard, stats: dict[int, TransferStats]) -> str:
        self._replan(call, guard)
        plan = self._plans[self.stage]
        if not self.head:
            participate(self.source, plan, guard, device=self.device)
            return ""
        stats[self.stage] = send(
            self.source,
            self._groups[self.stage],
            plan,
            guard,
            kv_scales=call.kv_scales,
            verify=call.verify,
            faults=self.faults,
            rank=self.seat,
        )
        return stats[self.stage].content


class WeightReceiver(_Worker):
    """A generation rank's part in refits: it stages what comes, and swaps when it is told to.

    *sink* takes the weights; its optional ``pause()``, ``resume()`` and ``after_commit()`` are called around
    the commit. Ask :attr:`may_serve` for each request: it is False before the first commit, while paused, and
    from the moment at which this rank's roster entry may have lapsed. A shard may serve only if all its
    ranks may.
    """

    def __init__(
        self,
        seat: int,
        sink: WeightSink,
        *,
        device: torch.device | str = "cpu",
        faults: FaultInjector | None = None,
    ) -> None:
        self.sink = sink
        super().__init__(seat, sends=False, device=device, faults=faults)

    update_weights_from_collective = pause = commit = resume = _Worker.submit

    @property
    def may_serve(self) -> bool:
        """Whether this rank may answer a request now; no round trip."""
        entry = self._entry
        torn = getattr(self.sink, "torn", False)
        return not torn and self._member.may_serve(lease_valid=entry is not None and not entry.lost)

    def _sink(self) -> WeightSink | None:
        return self.sink

    def _stages(self, membership: Any) -> list[int]:
        return list(range(len(membership.stage_heads)))

    def _transfer(self, call: RefitCall, guard: Guard, stats: dict[int, TransferStats]) -> str:
        self._replan(call, guard)
        self.sink.begin(call.version.number, [meta for plan in self._plans for meta in _metas(plan)])
        try:
            for stage in sorted(self._groups):
                stats[stage] = receive(
                    self.sink,
                    self._groups[stage],
                    self._plans[stage],
                    guard,
                    verify=call.verify,
                    faults=self.faults,
                    rank=self.seat,
                )
        except BaseException as error:
            self.sink.rollback()
            if getattr(self.sink, "torn", False):
                raise TornWeights(f"seat {self.seat}: an in-place receive was cut: {_why(error)}") from error
            raise
        contents = [stats[stage].content for stage in sorted(stats)]
        return hashlib.sha256("".join(contents).encode()).hexdigest() if all(contents) else ""

    def _drop(self, action: Drop) -> None:
        self.sink.rollback()

    def _act(self, message: Message) -> None:
        if message.kind == "pause":
            self._optional("pause")
        elif message.kind == "commit":
            self._strike("commit")
            self.sink.commit(message.version.number)
        elif message.kind == "resume":
            self._optional("after_commit")
            self._optional("resume")

    def _optional(self, name: str) -> None:
        hook = getattr(self.sink, name, None)
        if hook is not None:
            hook()


def _metas(plan: Plan) -> list[Any]:
    """All that a plan announces: what travels, and the aliases."""
    by_name = {meta.name: meta for meta in plan.tensors}
    aliases = [
        type(by_name[name])(alias, by_name[name].shape, by_name[name].dtype, name)
        for alias, name in plan.aliases
    ]
    return [*plan.tensors, *aliases]


def _member_name(membership: Any, rank: int) -> str:
    shard = membership.shard_of(rank)
    where = "trainer" if shard is None else f"shard {shard}"
    return f"rank {rank} ({where}, seat {membership.seat_of(rank)})"


def _why(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
