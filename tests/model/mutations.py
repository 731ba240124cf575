"""Each rule of the protocol broken on purpose: one World apiece, in which a search must find harm.

A rule of the machines is broken by subclassing them, a rule of the shells or of the backend by
overriding what the World does for them. Nothing else is changed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dprims.synchronizer import protocol
from dprims.synchronizer.protocol import (
    ABORT,
    COMMIT,
    CellRead,
    Condemn,
    Condemned,
    Join,
    Joined,
    Leader,
    Member,
    Message,
    Perform,
    Performed,
    ReadTerm,
    Reserve,
    SetCell,
    Started,
    TermRead,
    Version,
)

from .parts import Config, Rank
from .world import World


class _Blind(World):
    """Judges by what shards serve and ranks do, not by what was written about it."""

    def check_outcome(self, work: Any, cell: Any, value: str) -> None:
        pass


class NoTermCheck(World):
    """A rank obeys lower epochs than it has seen."""

    class member_class(Member):
        def _objection(self, message: Message) -> Any:
            objection = super()._objection(message)
            return None if objection and objection[0] == "refused" else objection


class NoIncarnationCheck(World):
    """A call that was meant for a process reaches the one after it."""

    class member_class(Member):
        def _objection(self, message: Message) -> Any:
            return super()._objection(message._replace(incarnation=self.incarnation))

    def spent(self, work: Any, request: Any) -> bool:
        return False


class DecisionDiesWithLeader(_Blind):
    """F1 broken: the decision is in the leader's own store."""

    def write_cell(self, work: Any, term: int, cell: Any, value: str) -> str:
        return super().write_cell(work, term, (*cell, term), value)

    def open_cells(self, work: Any) -> set[Any]:
        return {(*cell, term) for cell in super().open_cells(work) for term in range(1, len(work.bosses) + 1)}

    def check_committed(self, work: Any, seat: int, staged: Any) -> None:
        pass

    check_rolled_back = check_committed


class PlainWrite(_Blind):
    """The decision cell is written, not set once."""

    def write_cell(self, work: Any, term: int, cell: Any, value: str) -> str:
        work.cells[cell] = value
        return value


class NoPause(World):
    """F2 broken: a shard commits while it serves."""

    class leader_class(Leader):
        def _step(self, shard: int) -> None:
            if self.plan[shard][:1] == ("pause",):
                self.plan[shard] = self.plan[shard][1:]
            super()._step(shard)

    class member_class(Member):
        def _commit(self, message: Message) -> None:
            paused, self.paused = self.paused, True
            super()._commit(message)
            self.paused = paused


class ResumesItself(World):
    """F2b broken: a rank that lost its leader resumes."""

    def rank_moves(self, work: Any, seat: int, rank: Rank, faulty: Any) -> Any:
        yield from super().rank_moves(work, seat, rank, faulty)
        member = self.table(seat).views[rank.machine]
        if member.paused and rank.process == "up" and work.bosses[-1].process != "up":
            yield f"{seat} resumes by itself", "step", "resume", seat

    def resume(self, work: Any, seat: int) -> None:
        member = self.members.views[work.ranks[seat].machine]
        message = Message("resume", member.seen, member.live, member.incarnation)
        self.member_event(work, seat, Performed(message))


class GivesUpItself(_Blind):
    """The in-doubt rule broken: a rank that lost its leader drops what it holds staged."""

    def rank_moves(self, work: Any, seat: int, rank: Rank, faulty: Any) -> Any:
        yield from super().rank_moves(work, seat, rank, faulty)
        member = self.table(seat).views[rank.machine]
        if member.staged and rank.process == "up" and work.bosses[-1].process != "up":
            cell = member.staged.epoch, member.staged.version.number
            yield f"{seat} gives up", "step", "give_up", seat, CellRead(*cell, ABORT)

    def give_up(self, work: Any, seat: int, event: Any) -> None:
        self.member_event(work, seat, event)
        member = self.members.views[work.ranks[seat].machine]
        if member.paused:
            message = Message("resume", member.seen, member.live, member.incarnation)
            self.member_event(work, seat, Performed(message))

    def check_rolled_back(self, work: Any, seat: int, staged: Any) -> None:
        pass


class NoCondemn(World):
    """F3 broken: a shard that failed to commit is counted absent and left alone."""

    def evict(self, work: Any, term: int, action: Condemn) -> None:
        roster = work.backend.roster
        super().evict(work, term, action)
        work.backend = work.backend._replace(roster=roster)

    def ttl_passes(self, work: Any, term: int, event: Condemned) -> None:
        boss = work.bosses[term - 1]
        work.bosses[term - 1] = boss._replace(owed=tuple(one for one in boss.owed if one != event))
        self.tell(work, term, event)


class NoTtlWait(World):
    """F3 half: the entries are deleted, and nobody waits for the leases to pass."""

    ttl_passes = NoCondemn.ttl_passes


class PlainNext(World):
    """F7 broken: numbers are reserved without a fence."""

    def fence(self, stands: Any, term: int, action: Any) -> bool:
        return isinstance(action, Reserve) or super().fence(stands, term, action)


class ReadThenJoin(PlainNext):
    """F4 broken: a rank reads the term first and joins the roster after.

    Alone it does no harm, since F7 stops a superseded leader before its first call; so F7 is broken too.
    """

    class member_class(Member):
        def _on_started(self, event: Started) -> None:
            super()._on_started(event)
            self._out[-1] = ReadTerm()

        def _on_term(self, event: TermRead) -> None:
            super()._on_term(event)
            self.ready = False
            self._out.append(Join())

        def _on_joined(self, event: Joined) -> None:
            self.incarnation, self.ready = event.incarnation, True

    def check_record(self, term: int, name: str, stands: Any, version: Version) -> None:
        pass


class ReadsUnclaimed(World):
    """A new leader reads the records without raising their fences."""

    def claim(self, work: Any, term: int, name: str) -> None:
        before = work.backend
        super().claim(work, term, name)
        work.backend = before


class PlainCurrent(World):
    """F5 broken: success is written without a fence."""

    def fence(self, stands: Any, term: int, action: Any) -> bool:
        return isinstance(action, protocol.Publish) or super().fence(stands, term, action)


class NotReserved(World):
    """F7 broken: numbers are not reserved at all."""

    def operate(self, work: Any, term: int, action: Any) -> None:
        before = work.backend.reserved
        super().operate(work, term, action)
        if isinstance(action, Reserve):
            work.backend = work.backend._replace(reserved=before)


class OnlyAfterStep(World):
    """F6 broken: one shard is brought up although the trainers have stepped."""

    class leader_class(Leader):
        def _not_only(self, shard: int) -> str:
            self.stepped = False
            return super()._not_only(shard)

        def _reserve(self) -> None:
            super()._reserve()
            if self.goal == "only":
                self.target = Version(self.target.number)


class LeaseIgnored(World):
    """A rank serves although its lease has passed."""

    class member_class(Member):
        def may_serve(self, *, lease_valid: bool) -> bool:
            return super().may_serve(lease_valid=True)


class PollsMembers(World):
    """In doubt, the successor asks who has committed instead of sealing the cell."""

    class leader_class(Leader):
        def _seal(self) -> None:
            super()._seal()
            lives = {held.live for held in self.holdings.values()}
            for held in self.holdings.values():
                if held.staged:
                    cell = held.staged.epoch, held.staged.version.number
                    self.outcomes[cell] = COMMIT if held.staged.version in lives else ABORT
                    self.awaited -= {("cell", *cell)}
            self._out = [action for action in self._out if not isinstance(action, SetCell)]

    check_outcome = _Blind.check_outcome


class ReadsWithoutSealing(World):
    """In doubt, the successor reads the cell and leaves it open."""

    def write_cell(self, work: Any, term: int, cell: Any, value: str) -> str:
        if cell[0].term != term:
            return work.cells.get(cell, value)
        return super().write_cell(work, term, cell, value)

    def open_cells(self, work: Any) -> set[Any]:
        return super().open_cells(work) | set(work.cells)

    check_outcome = _Blind.check_outcome


class EvictedForgotten(World):
    """A new leader takes a deleted roster entry for one that ran out."""

    def begin(self, work: Any, term: int) -> None:
        for seat, entry in enumerate(work.backend.roster):
            work.set_roster(seat, max(entry, 0))
        super().begin(work, term)


class OrderIgnored(World):
    """A call that arrives twice undoes what came after it in the same epoch."""

    class member_class(Member):
        def _objection(self, message: Message) -> Any:
            objection = super()._objection(message)
            over = objection and objection[0] == "error" and message.epoch == self.seen
            return None if over and message.incarnation == self.incarnation else objection


class GoneTooSoon(World):
    """A rank counts as gone as soon as a leader has deleted its entry, not when its ttl has passed."""

    def surely_gone(self, work: Any, seat: int, incarnation: int) -> bool:
        vanished = seat not in self.yes_men and work.backend.roster[seat] != incarnation
        return vanished or super().surely_gone(work, seat, incarnation)


class LeftAlone(World):
    """A shard that serves and is to stay out is not fenced."""

    class leader_class(Leader):
        def _admit(self, members: tuple[int, ...]) -> None:
            self.current &= frozenset(members)
            super()._admit(members)


class KeepsReceiving(World):
    """A rank that was asked by a new leader goes on receiving from the old one."""

    class member_class(Member):
        def _on_message(self, message: Message) -> None:
            task = self.task
            super()._on_message(message)
            if message.kind == "ask":
                self.task = task


class PausesLate(World):
    """A pause that arrives again after the commit pauses again."""

    class member_class(Member):
        def _pause(self, message: Message) -> None:
            self.paused = True
            self._out.append(Perform(message))


class NumberReused(World):
    """The number of a version that was committed is given out again."""

    class leader_class(Leader):
        def _commit(self) -> None:
            super()._commit()
            self.unused = True


class ForgetsTooMuch(World):
    """Old cells are deleted while somebody who took no part may still be in doubt about one."""

    class leader_class(Leader):
        def _all_took_part(self) -> bool:
            return True


@dataclass(frozen=True)
class Mutation:
    """A broken rule, and where to look for the harm."""

    world: type[World]
    config: Config


def _one(*kinds: str, shards: tuple[int, ...] = (2,), faults: int = 1, **rest: Any) -> Config:
    return Config(shards=shards, faults=faults, kinds=frozenset(kinds), **rest)


_BRIEF = {"split": False, "watch": False}

MUTATIONS = [
    Mutation(NoTermCheck, _one("leader freeze")),
    Mutation(NoIncarnationCheck, _one("crash", "slow", shards=(1,), faults=2, fresh=True)),
    Mutation(DecisionDiesWithLeader, _one("leader crash", shards=(1, 1))),
    Mutation(PlainWrite, _one("leader crash", shards=(1, 1))),
    Mutation(NoPause, _one("freeze")),
    Mutation(ResumesItself, _one("leader crash")),
    Mutation(GivesUpItself, _one("leader crash", shards=(1, 1))),
    Mutation(NoCondemn, _one("lose", shards=(1, 1))),
    Mutation(NoTtlWait, _one("lose", shards=(1, 1))),
    Mutation(ReadThenJoin, _one("leader freeze", "crash", shards=(1,), faults=2, **_BRIEF)),
    Mutation(ReadsUnclaimed, _one("leader freeze", "crash", shards=(1,), faults=2, **_BRIEF)),
    Mutation(PlainCurrent, _one("leader freeze", shards=(1,))),
    Mutation(PlainNext, _one("leader freeze", shards=(1,), steps=1, **_BRIEF)),
    Mutation(NotReserved, _one("leader crash", "crash", shards=(1,), faults=2, steps=1, **_BRIEF)),
    Mutation(OnlyAfterStep, _one("crash", shards=(1, 1), steps=1, **_BRIEF)),
    Mutation(LeaseIgnored, _one("freeze", shards=(1, 1), **_BRIEF)),
    Mutation(PollsMembers, _one("leader crash", "crash", shards=(1, 1), faults=2, **_BRIEF)),
    Mutation(ReadsWithoutSealing, _one("leader freeze", shards=(1, 1))),
    Mutation(EvictedForgotten, _one("leader freeze", shards=(1, 1), wishes=1, **_BRIEF)),
    Mutation(GoneTooSoon, _one("leader freeze", shards=(1, 1), wishes=1, **_BRIEF)),
    Mutation(LeftAlone, _one(shards=(1, 1), faults=0, wishes=1)),
    Mutation(KeepsReceiving, _one("leader crash", shards=(1, 1))),
    Mutation(PausesLate, _one("duplicate", shards=(1,))),
    Mutation(ForgetsTooMuch, _one("crash", shards=(2, 1), **_BRIEF)),
    Mutation(OrderIgnored, _one("duplicate", faults=2, steps=1, **_BRIEF)),
    Mutation(NumberReused, _one("crash", shards=(1, 1), steps=1, **_BRIEF)),
]
