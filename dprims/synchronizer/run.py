"""One operation of the leader, driven from its request to its end.

The machine says what to do; this does it. Calls answer through callbacks into one inbox, so the loop never
waits for anything but the next event or the next deadline.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from itertools import groupby
from typing import TYPE_CHECKING, Any

from ..exceptions import (
    BackendError,
    BelowQuorum,
    DprimsError,
    PeerLost,
    RefitAborted,
    RefitError,
    RefitTimeout,
    StaleLeader,
    TornWeights,
    TransferCorrupt,
)
from ..membership import RefitMembership
from .calls import RefitAnswer
from .protocol import (
    Call,
    Cause,
    CellRead,
    Condemn,
    Condemned,
    Deposed,
    Fenced,
    Finish,
    Gone,
    Leader,
    LeaderAction,
    LeaderEvent,
    Message,
    Publish,
    Replied,
    Reply,
    Reserve,
    SetCell,
    Silent,
    current_key,
    encode_version,
    next_key,
)
from .settle import _settle_before_propagating
from .shell import is_first_hand, why
from .transfer import TransferStats

if TYPE_CHECKING:
    from .collective import CollectiveWeightSynchronizer
    from .trace import CallRecord

log = logging.getLogger("dprims.synchronizer.run")

GRACE_S = 1.0
"""How much longer than its ranks' own deadlines the leader waits: they know better what happened."""
LAPSE_SLACK = 0.25
"""The part of a ttl by which a lapse may be noticed late."""

_ERRORS: Mapping[str, type[DprimsError]] = {
    "lost": PeerLost,
    "timeout": RefitTimeout,
    "mismatch": TransferCorrupt,
    "quorum": BelowQuorum,
    "refused": RefitError,
    "stale": StaleLeader,
}


class Run:
    """What belongs to one operation: its inbox, its deadlines, who failed in it and how, its times."""

    def __init__(
        self,
        sync: CollectiveWeightSynchronizer,
        leader: Leader,
        kv_scales: Mapping[str, float],
        began: float | None,
    ) -> None:
        self.sync = sync
        self.leader = leader
        self.kv_scales = kv_scales
        self.began = time.monotonic() if began is None else began
        self.inbox: queue.SimpleQueue[LeaderEvent] = queue.SimpleQueue()
        self.stats: dict[int, Mapping[int, TransferStats]] = {}
        self.membership: RefitMembership | None = None
        self.rebuilt = False
        self.phases: dict[str, float] = {}
        self.broke_at: float | None = None
        """When the machine first saw that the operation fails; monotonic."""
        self._mark = self.began
        self._calls: dict[tuple[int, Message], CallRecord] = {}
        self._deadline = None if sync.refit_timeout_s is None else self.began + sync.refit_timeout_s
        self._open: dict[int, tuple[Message, float | None]] = {}
        self._unwound: dict[int, Future[None]] = {}
        self._errors: dict[int, BaseException] = {}
        self._lost: dict[int, str] = {}
        self._fenced: set[int] = set()
        self._silent: list[int] = []
        self._number = 0
        self.ended = False
        """Whether the machine has come to the operation's end."""

    def to_the_end(self, event: LeaderEvent) -> None:
        """Feed *event* and all that follows from it to the machine; raise what the operation failed with."""
        while True:
            phase = self.leader.phase
            actions = self.leader.handle(event)
            self._clock(phase)
            if self.broke_at is None and self.leader.cause is not None:
                self.broke_at = self._mark
            finish = self._perform(actions)
            if finish is not None:
                break
            event = self._next_event()
        self.rebuilt, self.ended = finish.rebuilt, True
        if finish.forget:
            self.sync.ledger.forget()
        if finish.cause is not None:
            error = self._error(finish.cause)
            if isinstance(error, RefitError):
                error.shards = self._blamed()
            raise error

    def gone(self, seat: int, incarnation: int, why: str) -> None:
        """A rank can surely not serve any more; any thread may say so."""
        self.inbox.put(Gone(seat, incarnation, why))
        _resolve(self._unwound.get(seat))

    # -- events -----------------------------------------------------------------------------------------

    def _next_event(self) -> LeaderEvent:
        overdue = min((due for _, due in self._open.values() if due is not None), default=None)
        try:
            event = self.inbox.get(timeout=None if overdue is None else max(overdue - time.monotonic(), 0.0))
        except queue.Empty:
            seat = min(self._open, key=lambda one: self._open[one][1] or float("inf"))
            message, _ = self._open.pop(seat)
            return Silent(seat, message)
        if isinstance(event, Replied | Silent):
            self._open.pop(event.seat, None)
        elif isinstance(event, Gone):
            self._open.pop(event.seat, None)
            if self.leader.roster[event.seat] == event.incarnation and event.seat not in self._fenced:
                if event.seat not in self._lost:
                    self.sync.journal.mark(event.seat, "lost")
                self._lost.setdefault(event.seat, event.why)
        return event

    def _answered(self, seat: int, message: Message, future: Future[RefitAnswer]) -> None:
        """A call came back, on whatever thread."""
        error = future.exception()
        self._note(seat, message, future, error)
        if isinstance(error, PeerLost):
            self.sync.seats.evict(seat, message.incarnation)
            self.gone(seat, message.incarnation, str(error))
            return
        if error is not None:
            self._errors.setdefault(seat, error)
            reply = Reply("error", why(error))
        else:
            answer = future.result()
            reply = answer.reply
            if answer.error is not None:
                self._errors.setdefault(seat, answer.error)
            if message.kind == "recv" and reply.status == "ok":
                self.stats[seat] = answer.stats
        self.inbox.put(Replied(seat, message, reply))
        _resolve(self._unwound.get(seat))

    def _note(
        self, seat: int, message: Message, future: Future[RefitAnswer], error: BaseException | None
    ) -> None:
        record = self._calls.pop((seat, message), None)
        if record is None:
            return
        if error is not None:
            self.sync.journal.answered(record, None, why(error))
            return
        answer = future.result()
        said = "" if answer.reply.status == "ok" else answer.reply.why or answer.reply.status
        self.sync.journal.answered(record, answer.times, said, answer.stats)

    # -- actions ----------------------------------------------------------------------------------------

    def _perform(self, actions: Sequence[LeaderAction]) -> Finish | None:
        finish = None
        for kind, group in groupby(
            actions, key=lambda action: action.message.kind if isinstance(action, Call) else ""
        ):
            batch = list(group)
            if kind:
                self._call([action for action in batch if isinstance(action, Call)])
                continue
            for action in batch:
                if isinstance(action, Finish):
                    finish = action
                elif isinstance(action, Condemn):
                    self._condemn(action)
                else:
                    self._ask_backend(action)
        return finish

    def _ask_backend(self, action: LeaderAction) -> None:
        try:
            self.inbox.put(self._at_backend(action))
        except BackendError as error:
            self._errors.setdefault(-1, error)
            self.inbox.put(Deposed(f"the backend gave no answer: {error}"))

    def _at_backend(self, action: LeaderAction) -> LeaderEvent:
        backend, prefix = self.sync.backend, self.sync.site.prefix
        if isinstance(action, SetCell):
            stands = self.sync.ledger.decide(action.epoch, action.number, action.value)
            return CellRead(action.epoch, action.number, stands)
        if isinstance(action, Reserve | Publish):
            key = next_key(prefix) if isinstance(action, Reserve) else current_key(prefix)
            return Fenced(
                backend.write_fenced(key, encode_version(action.version), action.term) == action.term
            )
        raise RefitError(f"the machine asks for {action!r}, which this driver does not know")

    def _condemn(self, action: Condemn) -> None:
        """Fence a shard: its entries go now, and after their ttl it surely knows."""
        errors = [self._errors[seat] for seat, _ in action.entries if seat in self._errors]
        told = [why(error) for error in errors if is_first_hand(error)]
        said = f" ({'; '.join(told)})" if told else ""
        log.warning("shard %d is condemned%s: its ranks leave the roster", action.shard, said)
        for seat, _ in action.entries:
            self.sync.journal.mark(seat, "condemned")
        self._fenced.update(seat for seat, _ in action.entries)  # that they go is no news
        ledger, mine = self.sync.ledger, dict(action.entries)
        try:
            # what an earlier leader deleted a moment ago may still be believed in by its rank
            found = ledger.marked(self.leader.seats[action.shard])
            unsure = bool(found)
            ledger.mark(mine)
            for seat, incarnation in mine.items():
                unsure |= self.sync.seats.evict(seat, incarnation)
        except BackendError as error:
            self.inbox.put(Deposed(f"the backend gave no answer: {error}"))
            return

        def over() -> None:
            ledger.unmark(found | mine)
            self.inbox.put(Condemned(action.shard))

        # an entry that was not there any more had lapsed, which its rank has known for as long
        timer = threading.Timer(self.sync.site.roster_ttl_s * (1 + LAPSE_SLACK) if unsure else 0.0, over)
        timer.daemon = True
        timer.start()

    def _call(self, calls: Sequence[Call]) -> None:
        message = calls[0].message
        self._number = message.version.number
        messages = {call.seat: call.message for call in calls}
        if message.kind == "rollback":
            self._settle(messages)
        now = time.monotonic()
        long = message.kind in ("build", "recv")
        timeout = self.sync.stall_timeout_s
        if long:
            timeout = float("inf") if self._deadline is None else max(self._deadline - now, 0.001)
            self._unwound.update({seat: Future() for seat in messages})
        due = None if timeout == float("inf") else now + timeout + GRACE_S
        self._open.update({seat: (one, due) for seat, one in messages.items()})
        more: dict[str, Any] = {}
        if long:
            more = self._baggage(message)
            more["timeout_s"] = None if timeout == float("inf") else timeout
        kind = _as_step(message.kind, message.epoch.build)
        self._calls.update(
            {
                (seat, one): self.sync.journal.called(kind, seat, one.incarnation)
                for seat, one in messages.items()
            }
        )
        try:
            futures = self.sync.dispatch(
                message.kind,
                message.epoch,
                message.version,
                {seat: one.incarnation for seat, one in messages.items()},
                **more,
            )
        except Exception as error:  # an engine's own error, on its way to the caller
            log.exception("%s could not be dispatched", message.kind)
            failed: Future[RefitAnswer] = Future()
            failed.set_exception(error)
            futures = dict.fromkeys(messages, failed)
        for seat, future in futures.items():
            future.add_done_callback(_bound(self._answered, seat, messages[seat]))

    def _baggage(self, message: Message) -> dict[str, Any]:
        sync = self.sync
        more: dict[str, Any] = {"stall_timeout_s": sync.stall_timeout_s, "verify": sync.verify}
        self.membership = self.leader.membership
        if message.kind == "build":
            more |= {"membership": self.membership, "rendezvous": sync.rendezvous}
            more["plans"] = sync.stages.to_send(again=True)
            sync.take_desired(self.membership)
        else:
            more |= {"kv_scales": self.kv_scales, "plans": sync.stages.to_send()}
        return more

    def _settle(self, messages: dict[int, Message]) -> None:
        """Have everybody out of the failed transfer; who does not come out is reported as silent."""
        waiting = {seat: future for seat, future in self._unwound.items() if seat in messages}
        budget = self.began + self.sync._settle_budget_s() - time.monotonic()
        stuck = _settle_before_propagating(list(waiting.values()), budget, "refit")
        for seat in (list(waiting)[place] for place in stuck):
            self._silent.append(seat)
            self.inbox.put(Silent(seat, messages.pop(seat)))

    # -- the end ----------------------------------------------------------------------------------------

    def _error(self, cause: Cause) -> BaseException:
        """The failure in the words of whoever knows best: the first to find something wrong, else who died.

        What the others report follows from that: that they were aborted, lost a peer, or waited in vain.
        """
        where = f"epoch {self.leader.epoch}, version {self._number}"
        seat, first = next(
            ((seat, error) for seat, error in self._errors.items() if is_first_hand(error)), (-1, None)
        )
        if cause.what in ("quorum", "refused", "stale"):
            failure: BaseException = _ERRORS[cause.what](cause.why + self._of_each_shard(cause))
        elif isinstance(first, DprimsError):
            return first
        else:
            failure = self._as_torn(self._unless_known(where, seat, first, cause))
        failure.__cause__ = failure.__cause__ or first or next(iter(self._errors.values()), None)
        return failure

    def _unless_known(
        self, where: str, seat: int, first: BaseException | None, cause: Cause
    ) -> BaseException:
        """The failure where no rank has an error of ours to show for it."""
        if self._lost:
            who = "; ".join(f"seat {seat}: {why}" for seat, why in sorted(self._lost.items()))
            return PeerLost(f"{where}: {who}")
        if first is not None:
            return RefitAborted(f"{where}: {self.sync.name_of(seat)}: {why(first)}")
        late = [error for error in self._errors.values() if isinstance(error, RefitTimeout)]
        silent = f"; seats {self._silent} never answered" if self._silent else ""
        kind = RefitTimeout if late else _ERRORS.get(cause.what, RefitAborted)
        return kind(f"{where}: {late[0] if late else cause.why}{silent}")

    def _blamed(self) -> tuple[int, ...]:
        """See `RefitError.shards`."""
        seats = {seat for seat, error in self._errors.items() if seat >= 0 and is_first_hand(error)}
        shards = map(self.leader.fleet.shard_of, seats.union(self._silent))
        return tuple(sorted({shard for shard in shards if shard is not None}))

    def _of_each_shard(self, cause: Cause) -> str:
        """What became of the shards, where too few are left."""
        told = self.left_behind() if cause.what == "quorum" else {}
        return "".join(f"; shard {shard}: {said}" for shard, said in told.items())

    def _as_torn(self, failure: BaseException) -> BaseException:
        """The failure, or, where it left weights that were received in place half way, TornWeights of it."""
        torn = sorted(seat for seat, error in self._errors.items() if isinstance(error, TornWeights))
        if not torn:
            return failure
        seats = f"seat {torn[0]} holds" if len(torn) == 1 else f"seats {torn} hold"
        wrapped = TornWeights(f"{why(failure)}; {seats} a mixture of versions until a refit succeeds")
        wrapped.__cause__ = failure
        return wrapped

    def left_behind(self) -> dict[int, str]:
        """The shards that took part and did not come to serve the version, with the reason of each."""
        members = () if self.membership is None else self.membership.surviving_shards
        reasons: dict[int, str] = {}
        for shard in set(members) - self.leader.current:
            seats = self.leader.seats[shard]
            said = [why(self._errors[seat]) for seat in seats if seat in self._errors]
            reasons[shard] = "; ".join(said + [self._lost[seat] for seat in seats if seat in self._lost])
        return {shard: reason or "condemned: it gave no answer" for shard, reason in reasons.items()}

    def _clock(self, phase: str) -> None:
        now = time.monotonic()
        phase = "prepare" if phase == "idle" else phase
        self.phases[phase] = self.phases.get(phase, 0.0) + now - self._mark
        self.sync.journal.stepped(_as_step(phase, self.leader.build), self._mark, now)
        self._mark = now


def _as_step(kind: str, build: int) -> str:
    """What a trace calls a call or phase: every build after the leader's first is a rebuild."""
    return "rebuild" if kind == "build" and build > 1 else kind


def _bound(function: Callable[..., None], *first: Any) -> Callable[[Any], None]:
    return lambda last: function(*first, last)


def _resolve(future: Future[None] | None) -> None:
    if future is not None and not future.done():
        future.set_result(None)
