"""The leader of refits as a pure state machine. ``docs/protocol.md`` has its table."""

from __future__ import annotations

from typing import ClassVar

from dprims.exceptions import MembershipError, RefitError

from ._leader_state import NOTHING, Goal, LeaderState
from ._messages import (
    ABORT,
    COMMIT,
    BuildRequested,
    Cause,
    CellRead,
    Condemned,
    Deposed,
    Elected,
    Fenced,
    Finish,
    Gone,
    Holding,
    Kind,
    LeaderAction,
    LeaderEvent,
    Publish,
    Replied,
    Reserve,
    SetCell,
    Silent,
    Stepped,
    SyncRequested,
    Version,
)

_SWITCH: tuple[Kind, ...] = ("pause", "commit", "resume")


class Leader(LeaderState):
    """One term of one leader: from its election to its end, or to the first sign of a higher term.

    ``handle(event)`` returns what to do; every Call, and every backend operation but a Call's, is
    answered by one event. Deterministic; no clock, no input or output. An event that no longer matters
    (an answer to a call that was given up) changes nothing.

    The driver sees to it that: requests come only while ``phase`` is ``"idle"`` (RefitError otherwise);
    the trainers do not step while a sync runs; a backend operation without an answer, and the loss of
    the leader lock, become Deposed. Such a leader is over; the same process may be elected again.
    """

    # ---- outside ----------------------------------------------------------------------------------

    def handle(self, event: LeaderEvent) -> list[LeaderAction]:
        """Take one event and return the actions that follow from it, in order."""
        if self.phase == "stopped":
            asked = isinstance(event, SyncRequested | BuildRequested)
            return [Finish(self.goal, self.cause)] if asked else []
        getattr(self, self._HANDLERS[type(event)])(event)
        self._advance()
        out, self._out = self._out, []
        return out

    _HANDLERS: ClassVar[dict[type, str]] = {
        Elected: "_on_elected",
        SyncRequested: "_on_sync",
        BuildRequested: "_on_build",
        Replied: "_on_replied",
        Silent: "_on_silent",
        Gone: "_on_gone",
        CellRead: "_on_cell",
        Fenced: "_on_fenced",
        Condemned: "_on_condemned",
        Stepped: "_on_stepped",
        Deposed: "_on_deposed",
    }

    # ---- moving on --------------------------------------------------------------------------------

    def _advance(self) -> None:
        """Leave each phase in which nothing is owed any more."""
        while not (self.calls or self.awaited or self.plan) and self.phase in self._NEXT:
            getattr(self, self._NEXT[self.phase])()

    _NEXT: ClassVar[dict[str, str]] = {
        "ask": "_seal",
        "seal": "_resolve",
        "resolve": "_publish",
        "exclude": "_reserve",
        "build": "_transfer",
        "transfer": "_decide",
        "commit": "_publish",
        "settle": "_fail",
    }

    # ---- recovery: after the election -------------------------------------------------------------

    def _on_elected(self, event: Elected) -> None:
        if self.phase != "off":
            raise RefitError(f"this leader has term {self.term} already; a new election needs a new one")
        self.phase, self.term, self.roster = "ask", event.term, event.roster
        self.version = event.current or NOTHING
        self.top = max(self.version.number, event.reserved.number if event.reserved else 0)
        for seat, incarnation in enumerate(self.roster):
            if incarnation:
                self._call(seat, "ask", self.epoch, NOTHING)
        for shard, seats in enumerate(self.seats):
            if not event.evicted.isdisjoint(seats):
                self._condemn(shard)

    def _seal(self) -> None:
        """Turn every decision that is still open into abort, and learn those that are not."""
        self.phase = "seal"
        for epoch, version in sorted({held.staged for held in self.holdings.values() if held.staged}):
            value = f"{ABORT}: sealed by the leader of term {self.term}"
            self._await(("cell", epoch, version.number), SetCell(epoch, version.number, value))

    def _resolve(self) -> None:
        """Bring every shard whose ranks all answered to the outcome; the others stay as they are."""
        self.phase = "resolve"
        self.version = max([self.version, *(held.live for held in self.holdings.values() if held.live)])
        self.top = max(self.top, self.version.number)
        for shard, seats in enumerate(self.seats):
            held = [self.holdings[seat] for seat in seats if seat in self.holdings]
            if len(held) < len(seats):
                continue
            decided = {version for one in held if (version := self._committed(one))}
            lives = {one.live for one in held}
            if decided:
                version = decided.pop()
                if all(version in (one.live, self._committed(one)) for one in held):
                    self.plan[shard] = _SWITCH
                    self.verdicts[shard] = version
                    self.version = max(self.version, version)
            elif len(lives) == 1 and (live := lives.pop()):
                waiting = any(one.staged or one.paused for one in held)
                self.plan[shard] = ("rollback", "resume") if waiting else ()
                self.verdicts[shard] = live
        for shard in sorted(self.plan):
            self._step(shard)

    def _committed(self, held: Holding) -> Version | None:
        """Return what a rank holds staged and was decided "commit"."""
        staged = held.staged
        if staged and self.outcomes[staged.epoch, staged.version.number] == COMMIT:
            return staged.version
        return None

    # ---- requests ---------------------------------------------------------------------------------

    def _on_sync(self, event: SyncRequested) -> None:
        self._begin("sync" if event.only is None else "only", event.roster)
        if event.only is None:
            self._admit(self._wanted())
            return
        shard = event.only
        why = self._not_only(shard)
        if why:
            self._finish(Cause("refused", None, f"shard {shard} cannot be brought up alone: {why}"))
        else:
            self._admit((shard,))

    def _not_only(self, shard: int) -> str:
        """Why a shard cannot be brought to the version of the others without them, or ""."""
        if shard not in range(len(self.seats)):
            return f"there are shards 0..{len(self.seats) - 1}"
        if not self._complete(shard) or shard in self.excluded:
            return "it is not in"
        if self.stepped:
            return "the trainers may hold other weights than the fleet serves"
        if not any(self._complete(other) for other in self.current - {shard}):
            return "no other shard serves the current version"
        return "it serves the current version" if shard in self.current else ""

    def _on_build(self, event: BuildRequested) -> None:
        unknown = event.absent.difference(range(len(self.seats)))
        if unknown:
            raise MembershipError(
                f"shards {sorted(unknown)} do not exist; there are 0..{len(self.seats) - 1}"
            )
        self._begin("build", event.roster)
        self.excluded = event.absent
        self.members = self._wanted()
        if event.force:
            self.built = None
        if self._incarnations() == self.built:
            self._finish(None)
        else:
            self._admit(self.members)

    def _begin(self, goal: Goal, roster: tuple[int, ...]) -> None:
        if self.phase != "idle":
            raise RefitError(f"leader of term {self.term} is in phase {self.phase!r}, not idle")
        before, self.goal = self.roster, goal
        self.roster = tuple(
            incarnation if incarnation > gone else 0
            for incarnation, gone in zip(roster, self.gone, strict=True)
        )
        # A shard that lacks a rank stays in: unless told that the rank is gone, we have to fence it.
        self.current = frozenset(
            shard
            for shard in self.current
            if not self._complete(shard)
            or all(self.roster[seat] == before[seat] for seat in self.seats[shard])
        )

    def _admit(self, members: tuple[int, ...]) -> None:
        """Check who takes part, and fence the shards that do not but may serve."""
        missing = [seat for seat in self.trainers if not self.roster[seat]]
        if missing:
            self._finish(Cause("lost", missing[0], f"trainer ranks {missing} are not in"))
            return
        if len(members) < (1 if self.goal == "only" else max(1, self.min_shards)):
            why = f"{len(members)} of {len(self.seats)} shards are in, {self.min_shards} are needed"
            self._finish(Cause("quorum", None, why))
            return
        self.members = members
        self.phase = "exclude"
        if self.goal != "only":
            for shard in sorted(self.current.difference(members)):
                self._condemn(shard)

    def _reserve(self) -> None:
        self.phase = "reserve"
        if self.goal == "only":
            self.target = self.version
        else:
            self.target = Version(self.top if self.unused else self.top + 1)
        self._await(("fenced",), Reserve(Version(max(self.top, self.target.number)), self.term))

    # ---- one sync ---------------------------------------------------------------------------------

    def _on_fenced(self, event: Fenced) -> None:
        self.awaited -= {("fenced",)}
        if not event.ok:
            self._stop(Cause("stale", None, f"a leader of a higher term than {self.term} has taken over"))
        elif self.phase == "publish":
            self._succeed()
        else:
            if self.goal != "only":
                self.top, self.unused = self.target.number, True
            self._open()

    def _open(self) -> None:
        """Build the groups unless those that stand are the ones wanted."""
        lost = [seat for seat in self._participants() if self.gone[seat] >= self.roster[seat]]
        if lost:
            self._finish(Cause("lost", lost[0], f"ranks at seats {lost} are gone"))
        elif self.goal != "only" and self._incarnations() == self.built:
            self._transfer()
        else:
            if self.goal != "only" and not self.current.issuperset(self.members):
                self.stale = True  # somebody is taken in who does not have the fleet's version
            self.phase, self.built, self.rebuilt = "build", None, True
            self.build += 1
            for seat in self._participants():
                self._call(seat, "build", self.epoch, self.target)

    def _transfer(self) -> None:
        if self.phase == "build" and self.goal != "only":
            self.built = self._incarnations()
            if self.goal == "build":
                self._publish()
                return
        self.phase = "transfer"
        for seat in self._participants():
            self._call(seat, "recv", self.epoch, self.target)

    def _decide(self) -> None:
        if len(self.digests) > 1:
            self._abort(Cause("mismatch", None, f"receivers have digests {sorted(self.digests)}"))
            return
        self.target = Version(self.target.number, *self.digests)
        self.phase = "decide"
        cell = self.epoch, self.target.number
        self._await(("cell", *cell), SetCell(*cell, COMMIT))

    def _abort(self, cause: Cause) -> None:
        self.phase, self.cause = "decide", cause
        self.calls.clear()
        cell = self.epoch, self.target.number
        self._await(("cell", *cell), SetCell(*cell, f"{ABORT}: {cause.why}"))

    def _on_cell(self, event: CellRead) -> None:
        cell = event.epoch, event.number
        if ("cell", *cell) in self.awaited:
            self.awaited -= {("cell", *cell)}
            if self.phase == "seal":
                self.outcomes[cell] = event.value
                return
        elif self.phase not in ("build", "transfer") or cell != (self.epoch, self.target.number):
            return
        self.calls.clear()
        if event.value == COMMIT:
            self._commit()
        else:
            self._settle(self.cause or Cause("aborted", None, event.value))

    def _settle(self, cause: Cause) -> None:
        """Have every rank out of the transfer before anybody may start the next."""
        self.phase, self.cause, self.built = "settle", cause, None
        for seat in self._participants():
            if self.gone[seat] < self.roster[seat]:
                self._call(seat, "rollback", self.epoch, self.target)

    def _fail(self) -> None:
        self._finish(self.cause)

    def _commit(self) -> None:
        self.phase, self.version = "commit", self.target
        if self.goal == "sync":
            self.unused = False
            self.current = frozenset()
        else:
            self.built = None
        for shard in self.members:
            if all(self.gone[seat] < self.roster[seat] for seat in self.seats[shard]):
                self.plan[shard] = _SWITCH
                self.verdicts[shard] = self.target
        for shard in sorted(self.plan):
            self._step(shard)

    def _publish(self) -> None:
        self.phase = "publish"
        self._await(("fenced",), Publish(self.version, self.term))

    def _succeed(self) -> None:
        if self.goal in ("recover", "build"):
            self._finish(None)
        elif not self.current.intersection(self.members):
            self._finish(Cause("quorum", None, f"no shard lived to serve version {self.version.number}"))
        else:
            if self.goal == "sync":
                self.stale = self.stepped = False
            self._finish(None)

    # ---- what ranks and the backend say -----------------------------------------------------------

    def _on_replied(self, event: Replied) -> None:
        seat, message, reply = event.seat, event.message, event.reply
        if reply.status == "refused" and reply.seen is not None and reply.seen.term > self.term:
            why = f"rank at seat {seat} follows term {reply.seen.term}, this leader has {self.term}"
            self._stop(Cause("stale", seat, why))
        elif self.calls.get(seat) == message:
            if reply.status != "ok":
                self._failed(seat, Cause("error", seat, reply.why), gone=False)
                return
            del self.calls[seat]
            if reply.holding is not None:
                self.holdings[seat] = reply.holding
            shard = self._shard_at.get(seat)
            if message.kind == "recv" and shard is not None:
                self.digests |= {reply.digest}
            elif shard in self.plan:
                self._step(shard)

    def _on_silent(self, event: Silent) -> None:
        if self.calls.get(event.seat) == event.message:
            why = f"rank at seat {event.seat} gave no answer to {event.message.kind}"
            self._failed(event.seat, Cause("timeout", event.seat, why), gone=False)

    def _on_gone(self, event: Gone) -> None:
        seat = event.seat
        self.gone = (*self.gone[:seat], max(self.gone[seat], event.incarnation), *self.gone[seat + 1 :])
        if self.roster[seat] == event.incarnation:
            self._failed(seat, Cause("lost", seat, event.why), gone=True)

    def _failed(self, seat: int, cause: Cause, *, gone: bool) -> None:
        """A rank did not do what it was asked, or is ``gone`` and needs no fence."""
        called = self.calls.pop(seat, None) is not None
        if self.phase in ("build", "transfer"):
            if called or seat in self._participants():
                self._abort(cause)
            return
        shard = self._shard_at.get(seat)
        if shard is None:
            return
        if gone:
            self._leave_out(shard)
        else:
            self._condemn(shard)

    def _on_condemned(self, event: Condemned) -> None:
        self.awaited -= {("condemned", event.shard)}
        seats = self.seats[event.shard]
        self.gone = tuple(
            max(gone, incarnation) if seat in seats else gone
            for seat, (gone, incarnation) in enumerate(zip(self.gone, self.roster, strict=True))
        )

    def _on_stepped(self, event: Stepped) -> None:
        self.stale = self.stepped = True

    def _on_deposed(self, event: Deposed) -> None:
        self._stop(Cause("stale", None, event.why))
