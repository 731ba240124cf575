"""The rank's side of a refit: :class:`WeightSender` of a trainer, :class:`WeightReceiver` of a shard.

Around the shell of the protocol's machine, one thread builds groups and moves bytes, under a guard.
"""

from __future__ import annotations

import atexit
import hashlib
import queue
import threading
import time
import weakref
from contextlib import suppress
from typing import TYPE_CHECKING

from ..exceptions import RefitAborted, RefitError, TornWeights
from .calls import RankInfo, RefitCall
from .clients import Clients
from .group import CommGroup
from .guard import CancelFlag, Guard
from .interfaces import WeightSink, WeightSource
from .plan import Plan, TensorMeta
from .protocol import Broke, Cancel, Drop, Message, Performed
from .rendezvous import join_store
from .settle import join_all
from .shell import MemberShell, is_first_hand, why
from .transfer import TransferStats, lacks_memory, participate, receive, send

if TYPE_CHECKING:
    import torch

    from ..membership import RefitMembership
    from ..testing.faults import FaultInjector

GLOO_SLACK_S = 10.0
"""How much longer than the refit's own bound torch's timeout of a gloo group is."""
NCCL_SLACK = 10.0
"""The same for NCCL, as a factor: torch's watchdog must never be first, as it ends the process."""
NCCL_LEAST_S = 600.0


class _Task:
    """A build or receive that runs: what it was asked, and the flag that ends it."""

    def __init__(self, message: Message, call: RefitCall) -> None:
        self.message = message
        self.call = call
        self.cancel = CancelFlag()


class _Worker(MemberShell):
    """What senders and receivers share: the groups, and the thread that uses them."""

    def __init__(
        self,
        seat: int,
        *,
        sends: bool,
        device: torch.device | str = "cpu",
        faults: FaultInjector | None = None,
        address: str | None = None,
    ) -> None:
        import torch

        self.device = torch.device(device)
        self.faults = faults
        self.address = address
        self._tasks: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()
        self._running: _Task | None = None
        self._groups: dict[int, CommGroup] = {}
        self._plans: tuple[Plan, ...] = ()
        self._store: tuple[tuple[str, int], Clients] | None = None
        super().__init__(seat, sends=sends)
        self._mover = threading.Thread(target=self._run_tasks, name=f"dprims-transfer-{seat}", daemon=True)
        self._mover.start()
        _workers.add(self)

    # -- for the machine ---------------------------------------------------------------------------------

    def _begin(self, message: Message, call: RefitCall) -> None:
        self._running = _Task(message, call)
        self._tasks.put(self._running)

    def _cancel(self, action: Cancel) -> None:
        task = self._running
        if task is not None and task.message == action.message:
            task.cancel.set("the leader or the decision ended it", f"seat {self.seat}")

    def _before(self, message: Message) -> None:
        if message.kind == "rollback":
            self._strike("settle")

    def _end(self) -> None:
        if self._running is not None:
            self._running.cancel.set("this rank is closing", f"seat {self.seat}")
        self._tasks.put(None)

    # -- the thread that moves bytes --------------------------------------------------------------------

    def _run_tasks(self) -> None:
        while (task := self._tasks.get()) is not None:
            self._do(task)
        self._release_groups()

    def _do(self, task: _Task) -> None:
        """Do a task, and tell the machine how it went."""
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
                event = Performed(message)
            else:
                digest = self._transfer(call, guard, stats)
                guard.disarm()
                event = Performed(message, digest)
        except BaseException as error:  # noqa: BLE001 - it is the answer
            self._give_up()
            self._finished(Broke(message, why(error)), error, stats)
        else:
            self._finished(event, None, stats)

    def _build(self, call: RefitCall, guard: Guard) -> None:
        membership = call.membership
        if membership is None or call.rendezvous is None or call.plans is None:
            raise RefitError(f"the build of epoch {call.epoch} names no membership, rendezvous or plans")
        self._strike("rebuild")
        self._release_groups()
        self._plans = tuple(Plan.from_bytes(plan) for plan in call.plans)
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
                record={"epoch": str(call.epoch), "world": membership.world_size, "verify": call.verify},
                plan=self._plans[stage],
                members=[_member_name(membership, one) for one in membership.group_ranks(stage)],
                refusal=refusal,
                address=self.address,
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

    def _stages(self, membership: RefitMembership) -> list[int]:
        raise NotImplementedError

    def _transfer(self, call: RefitCall, guard: Guard, stats: dict[int, TransferStats]) -> str:
        raise NotImplementedError


class WeightSender(_Worker):
    """A trainer rank's part in refits: it heads a pipeline stage, or gathers along with one that does.

    *source* is asked for its metadata before each sync and read once in each. *stage* is the stage that
    this rank belongs to; *head* says whether it sends (one rank a stage does). *address* is the
    numeric address of this host that gloo listens on; None for gloo's choice: what the host name resolves to.
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
        address: str | None = None,
    ) -> None:
        self.source = source
        self.stage = stage
        self.head = head
        self._described: tuple[tuple[TensorMeta, ...], str] | None = None
        super().__init__(seat, sends=True, device=device, faults=faults, address=address)

    broadcast_weights_for_collective = _Worker.submit

    def _act(self, message: Message) -> None:
        """A trainer is not asked to pause, commit or resume."""
        raise RefitError(f"seat {self.seat} is a trainer's; it cannot {message.kind}")

    def _drop(self, action: Drop) -> None:
        """Nothing is staged on a trainer."""

    def _info(self, known: str) -> RankInfo:
        if not self.head:
            return super()._info(known)
        metas = tuple(self.source.metadata())
        if self._described is None or self._described[0] != metas:
            self._described = metas, hashlib.sha256(repr(metas).encode()).hexdigest()
        digest = self._described[1]
        return RankInfo(
            self.seat,
            self._member.incarnation,
            self.stage,
            None if digest == known else metas,
            digest,
            self.device.type,
        )

    def _stages(self, membership: RefitMembership) -> list[int]:
        return [self.stage] if self.head else []

    def _transfer(self, call: RefitCall, guard: Guard, stats: dict[int, TransferStats]) -> str:
        self._replan(call, guard)
        plan = self._plans[self.stage]
        if not self.head:
            participate(self.source, plan, guard, device=self.device)
            return ""
        stats[self.stage] = TransferStats()
        send(
            self.source,
            self._groups[self.stage],
            plan,
            guard,
            kv_scales=call.kv_scales,
            verify=call.verify,
            faults=self.faults,
            rank=self.seat,
            stats=stats[self.stage],
        )
        return stats[self.stage].content


class WeightReceiver(_Worker):
    """A generation rank's part in refits: it stages what comes, and swaps when it is told to.

    *sink* takes the weights; its optional ``pause()``, ``resume()`` and ``after_commit()`` are called around
    the commit. Ask :attr:`may_serve` for each request: it is False before the first commit, while paused, and
    from the moment at which this rank's roster entry may have lapsed. A shard may serve only if all its
    ranks may. *address* as for :class:`WeightSender`.
    """

    def __init__(
        self,
        seat: int,
        sink: WeightSink,
        *,
        device: torch.device | str = "cpu",
        faults: FaultInjector | None = None,
        address: str | None = None,
    ) -> None:
        self.sink = sink
        super().__init__(seat, sends=False, device=device, faults=faults, address=address)

    update_weights_from_collective = pause = commit = resume = _Worker.submit

    @property
    def may_serve(self) -> bool:
        """Whether this rank may answer a request now; no round trip."""
        entry = self._entry
        torn = getattr(self.sink, "torn", False)
        return not torn and self._member.may_serve(lease_valid=entry is not None and not entry.lost)

    def _sink(self) -> WeightSink | None:
        return self.sink

    def _stages(self, membership: RefitMembership) -> list[int]:
        return list(range(len(membership.stage_heads)))

    def _transfer(self, call: RefitCall, guard: Guard, stats: dict[int, TransferStats]) -> str:
        self._replan(call, guard)
        self.sink.begin(call.version.number, [meta for plan in self._plans for meta in plan.metas])
        try:
            for stage in sorted(self._groups):
                stats[stage] = TransferStats()
                receive(
                    self.sink,
                    self._groups[stage],
                    self._plans[stage],
                    guard,
                    verify=call.verify,
                    faults=self.faults,
                    rank=self.seat,
                    stats=stats[stage],
                )
        except BaseException as error:
            self.sink.rollback()
            if getattr(self.sink, "torn", False):
                torn = TornWeights(f"seat {self.seat}: an in-place receive was cut: {why(error)}")
                torn.first_hand = is_first_hand(error)
                raise torn from error
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


def _member_name(membership: RefitMembership, rank: int) -> str:
    shard = membership.shard_of(rank)
    where = "trainer" if shard is None else f"shard {shard}"
    return f"rank {rank} ({where}, seat {membership.seat_of(rank)})"


EXIT_S = 3.0
"""How long the interpreter's end waits for transfers that it cancels."""

_workers: weakref.WeakSet[_Worker] = weakref.WeakSet()


@atexit.register
def _see_out() -> None:
    """At the interpreter's end: a thread that comes back from torch after it ends the process by SIGABRT."""
    workers = list(_workers)
    for worker in workers:
        worker._end()
    join_all([worker._mover for worker in workers], EXIT_S)
