"""A world around the product's Leader and Member, small enough to visit every state of it.

It holds what the machines do not: a backend (roster entries, fenced and write-once cells, the leader
lock), processes that run, are frozen or down, leases, and calls on their way. :meth:`World.successors`
gives every state that can follow a state: ordinary steps, and faults while the budget lasts. The rules
that the shells keep (``docs/protocol.md``) are kept here too. A broken invariant raises
:class:`Violation`.

States are flat tuples of small ints: each part of a state is interned once, and what the machines did
with an event is remembered, so that the product's code runs once for each (state, event) of one machine.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from dprims.membership import Epoch, RefitMembership
from dprims.synchronizer.protocol import (
    ABORT,
    Answer,
    Broke,
    BuildRequested,
    Call,
    CellRead,
    Condemn,
    Condemned,
    Drop,
    Elected,
    Fenced,
    Finish,
    Holding,
    Join,
    Joined,
    Leader,
    Member,
    Message,
    Perform,
    Performed,
    Publish,
    ReadTerm,
    Replied,
    Reply,
    Reserve,
    SetCell,
    Started,
    Stepped,
    TermRead,
    Version,
    WriteAbort,
)

from .invariants import Invariants
from .moves import Moves
from .parts import (
    DOWN,
    EVICTED,
    FROZEN,
    UP,
    Answered,
    Backend,
    Boss,
    Config,
    MachineTable,
    Rank,
    Request,
    Violation,
    Work,
)


class World(Moves, Invariants):
    """All states of one configuration. Mutations override its methods or pass other machines."""

    leader_class: type[Leader] = Leader
    member_class: type[Member] = Member

    def __init__(self, config: Config) -> None:
        self.config = config
        trainers = max(1, config.trainers)
        self.fleet = RefitMembership.full(train_world_size=trainers, shard_sizes=config.shards)
        self.shards = [self.fleet.seats_of(shard) for shard in range(len(config.shards))]
        self.yes_men = frozenset() if config.trainers else frozenset({0})
        self.trainers = frozenset(range(trainers))
        self.leaders = MachineTable(lambda: self.leader_class(self.fleet))
        self.members = MachineTable(self.member_class)
        self.senders = MachineTable(lambda: self.member_class(sends=True))
        self._parts: dict[Any, int] = {}
        self._values: list[Any] = []

    # ---- packing ----------------------------------------------------------------------------------

    def part(self, value: Any) -> int:
        found = self._parts.get(value)
        if found is None:
            found = self._parts[value] = len(self._values)
            self._values.append(value)
        return found

    def open(self, key: tuple[int, ...]) -> Work:
        values = self._values
        backend, cells, net, bosses, served, faults, steps, wishes, *ranks = key
        return Work(
            values[backend],
            dict(values[cells]),
            set(values[net]),
            list(values[bosses]),
            values[served],
            faults,
            steps,
            wishes,
            [values[rank] for rank in ranks],
        )

    def close(self, work: Work) -> tuple[int, ...]:
        self.tidy(work)
        self.check(work)
        part = self.part
        return (
            part(work.backend),
            part(tuple(sorted(work.cells.items()))),
            part(frozenset(work.net)),
            part(tuple(work.bosses)),
            part(work.served),
            work.faults,
            work.steps,
            work.wishes,
            *map(part, work.ranks),
        )

    def tidy(self, work: Work) -> None:
        """Forget what can change nothing any more."""
        if work.net:
            work.net = {item for item in work.net if not self.idle_talk(work, item)}
        for term, boss in enumerate(work.bosses):
            if boss.process != DOWN:
                break
            if boss.recovered:
                work.bosses[term] = boss._replace(recovered=False)
        if work.cells:
            alive = self.open_cells(work)
            work.cells = {cell: value for cell, value in work.cells.items() if cell in alive}

    def idle_talk(self, work: Work, item: Any) -> bool:
        """Whether a call or an answer can change nothing, whenever it arrives."""
        boss = work.bosses[item.term - 1]
        if boss.process == DOWN:
            return type(item) is Answered or self.spent(work, item)
        leader = self.leaders.views[boss.machine]
        if leader.calls.get(item.seat) == item.message:
            return False
        if type(item) is Answered:
            return item.reply.status != "refused" or leader.phase == "stopped"
        return self.spent(work, item)

    def open_cells(self, work: Work) -> set[Any]:
        """The cells that somebody may still act upon."""
        alive: set[Any] = {
            (item.message.epoch, item.message.version.number)
            for item in work.net
            if type(item) is Request and item.message.kind in ("build", "recv")
        }
        for boss in work.bosses:
            leader = self.leaders.views[boss.machine]
            if boss.process != DOWN and leader.phase != "idle":
                alive.add((leader.epoch, leader.target.number))
                alive.update(what[1:] for what in leader.awaited if what[0] == "cell")
                alive.update(leader.outcomes)
        for seat, rank in enumerate(work.ranks):
            member = self.table(seat).views[rank.machine]
            for held in (member.task, member.staged):
                if held:
                    alive.add((held.epoch, held.version.number))
        return alive

    def spent(self, work: Work, request: Request) -> bool:
        rank, message = work.ranks[request.seat], request.message
        member = self.table(request.seat).views[rank.machine]
        if not member.ready or rank.process == DOWN:
            return False
        old = message.incarnation < member.incarnation or message.epoch < member.seen
        return old and self.table(request.seat).step(rank.machine, message)[0] == rank.machine

    def table(self, seat: int) -> MachineTable:
        return self.senders if seat in self.trainers else self.members

    # ---- the start --------------------------------------------------------------------------------

    def initial(self) -> tuple[int, ...]:
        """Every shard serves version 1, and the trainers have stepped since (or a ``fresh`` start)."""
        seats = len(self.trainers) + sum(self.config.shards)
        blank = self.members.intern(self.member_class())
        sender = self.senders.intern(self.member_class(sends=True))
        ranks = [
            Rank(DOWN, False, sender if seat in self.trainers else blank, "", Epoch(0, 0))
            for seat in range(seats)
        ]
        roster = tuple(1 if seat in self.yes_men else 0 for seat in range(seats))
        work = Work(
            Backend(roster, roster, None, None), {}, set(), [], (None,) * len(self.shards), 0, 99, 0, ranks
        )
        for seat in range(seats):
            if seat not in self.yes_men:
                self.start(work, seat)
                while owed := work.ranks[seat].owed:
                    self.join(work, seat) if owed == "join" else self.read_term(work, seat, 0)
        self.elect(work)
        key = self.close(work)
        fresh = self.config.fresh
        while not (self.idle(key) if fresh else self.settled(key)):
            key = next(after for _, kind, after in self.successors(key) if kind == "step")
        work = self.open(key)
        if not fresh:
            self.tell(work, 1, Stepped())
        work.cells.clear()
        work.faults, work.steps, work.wishes = self.config.faults, self.config.steps, self.config.wishes
        return self.close(work)

    def weights(self, work: Work) -> str:
        """The digest of what the trainers hold: another one after each step."""
        return f"w{work.steps}"

    # ---- what can happen --------------------------------------------------------------------------

    def successors(self, key: tuple[int, ...]) -> Iterator[tuple[str, str, tuple[int, ...]]]:
        """Yield (what happens, "step" | "fault" | "luck", the state after it)."""
        here = self.open(key)
        for label, kind, name, *arguments in self.moves(here):
            work = here.copy()
            if kind == "fault":
                work.faults -= 1
            try:
                getattr(self, name)(work, *arguments)
                after = self.close(work)
            except Violation as violation:
                violation.args = (f"{violation}\n  after: {label}",)
                raise
            if after != key:
                yield label, kind, after

    # ---- the backend ------------------------------------------------------------------------------

    def read_cell(self, work: Work, term: int, cell: tuple[Epoch, int]) -> str | None:
        return work.cells.get(cell)

    def write_cell(self, work: Work, term: int, cell: tuple[Epoch, int], value: str) -> str:
        return work.cells.setdefault(cell, value)

    def fence(self, stands: tuple[int, Version | None] | None, term: int, action: Reserve | Publish) -> bool:
        return stands is None or stands[0] <= term

    def operate(self, work: Work, term: int, action: Any) -> None:
        boss = work.bosses[term - 1]
        owed = list(boss.owed)
        owed.remove(action)
        work.bosses[term - 1] = boss._replace(owed=tuple(owed))
        event: Any
        if isinstance(action, SetCell):
            cell = action.epoch, action.number
            event = CellRead(*cell, self.write_cell(work, term, cell, action.value.split(":")[0]))
        else:
            name = "reserved" if isinstance(action, Reserve) else "current"
            stands = getattr(work.backend, name)
            ok = self.fence(stands, term, action)
            if ok:
                self.check_record(term, name, stands, action.version)
                work.backend = work.backend._replace(**{name: (term, action.version)})
            event = Fenced(ok)
        self.tell(work, term, event)

    def claim(self, work: Work, term: int, name: str) -> None:
        """A leader that was just elected raises a fence and learns what stands there."""
        boss, stands = work.bosses[term - 1], getattr(work.backend, name)
        if stands and stands[0] > term:
            work.bosses[term - 1] = boss._replace(process=DOWN, owed=())
            return
        value = stands and stands[1]
        work.backend = work.backend._replace(**{name: (term, value)})
        work.bosses[term - 1] = boss._replace(owed=(*boss.owed, value))

    def begin(self, work: Work, term: int) -> None:
        boss = work.bosses[term - 1]
        work.bosses[term - 1] = boss._replace(owed=())
        evicted = frozenset(seat for seat, entry in enumerate(work.backend.roster) if entry == EVICTED)
        self.tell(work, term, Elected(term, *boss.owed, work.roster(), evicted))

    def evict(self, work: Work, term: int, action: Condemn) -> None:
        boss = work.bosses[term - 1]
        owed = tuple(Condemned(action.shard) if one == action else one for one in boss.owed)
        work.bosses[term - 1] = boss._replace(owed=owed)
        for seat, incarnation in action.entries:
            if work.backend.roster[seat] == incarnation:
                work.set_roster(seat, EVICTED)

    def ttl_passes(self, work: Work, term: int, event: Condemned) -> None:
        boss = work.bosses[term - 1]
        owed = list(boss.owed)
        owed.remove(event)
        work.bosses[term - 1] = boss._replace(owed=tuple(owed))
        for seat in self.shards[event.shard]:
            rank = work.ranks[seat]
            if self.members.views[rank.machine].incarnation != work.backend.roster[seat]:
                work.ranks[seat] = rank._replace(lease=False)
        self.tell(work, term, event)

    def lapse(self, work: Work, seat: int) -> None:
        if work.backend.roster[seat] > 0:
            work.set_roster(seat, 0)
        work.ranks[seat] = work.ranks[seat]._replace(lease=False)

    # ---- leaders ----------------------------------------------------------------------------------

    def elect(self, work: Work) -> None:
        work.bosses.append(Boss(UP, self.leaders.intern(self.leader_class(self.fleet)), (), False))

    def tell(self, work: Work, term: int, event: Any) -> None:
        events = [event]
        while events:
            event = events.pop(0)
            boss = work.bosses[term - 1]
            before = self.leaders.views[boss.machine]
            machine, actions = self.leaders.step(boss.machine, event)
            if isinstance(event, CellRead):
                self.check_outcome(work, (event.epoch, event.number), event.value)
            owed, recovered = boss.owed, boss.recovered
            if self.leaders.views[machine].phase == "stopped" and before.phase != "stopped":
                owed = ()
            for action in actions:
                if isinstance(action, Call):
                    seat, message = action.seat, action.message
                    if seat in self.yes_men:
                        holding = Holding(None, None, False) if message.kind == "ask" else None
                        events.append(Replied(seat, message, Reply("ok", holding=holding)))
                    else:
                        work.net.add(Request(term, seat, message))
                elif isinstance(action, Finish):
                    if action.cause is None:
                        recovered = True
                        if action.rebuilt or action.goal != "build":
                            self.check_success(work, term)
                    if action.forget:
                        self.check_forgotten(work, term, self.leaders.views[machine])
                else:
                    owed = (*owed, action)
            work.bosses[term - 1] = Boss(boss.process, machine, owed, recovered)

    def boss_process(self, work: Work, term: int, process: str) -> None:
        boss = work.bosses[term - 1]._replace(process=process)
        if process == DOWN:
            boss = Boss(DOWN, self.leaders.intern(self.leader_class(self.fleet)), (), boss.recovered)
        work.bosses[term - 1] = boss

    def wish(self, work: Work, absent: frozenset[int]) -> None:
        work.wishes -= 1
        self.tell(work, len(work.bosses), BuildRequested(work.roster(), absent))

    def trainers_step(self, work: Work) -> None:
        work.steps -= 1
        self.tell(work, len(work.bosses), Stepped())

    # ---- calls ------------------------------------------------------------------------------------

    def vanish(self, work: Work, item: Any) -> None:
        work.net.discard(item)

    def answer_arrives(self, work: Work, item: Answered) -> None:
        work.net.discard(item)
        self.tell(work, item.term, Replied(item.seat, item.message, item.reply))

    def deliver(
        self, work: Work, item: Request, last: bool = True, fail: tuple[str, ...] = (), lost: bool = False
    ) -> None:
        if last:
            work.net.discard(item)
        self.member_event(work, item.seat, item.message, fail, lost)

    # ---- ranks ------------------------------------------------------------------------------------

    def member_event(
        self, work: Work, seat: int, event: Any, fail: tuple[str, ...] = (), lost: bool = False
    ) -> None:
        events, answers = [event], []
        table = self.table(seat)
        while events:
            event = events.pop(0)
            rank = work.ranks[seat]
            before = table.views[rank.machine]
            machine, actions = table.step(rank.machine, event)
            after = table.views[machine]
            if isinstance(event, Message) and event.epoch < rank.highest and machine != rank.machine:
                raise Violation(f"I4: epoch {event.epoch} changed seat {seat}, which saw {rank.highest}")
            if after.staged != before.staged and after.staged and after.staged.epoch < rank.highest:
                raise Violation(f"I4: seat {seat}, which saw {rank.highest}, stages {after.staged}")
            owed = rank.owed
            for action in actions:
                if isinstance(action, Perform):
                    message = action.message
                    if message.kind in fail:
                        events.append(Broke(message, "failed"))
                    elif message.kind != "recv" or not self.config.split:
                        events.append(Performed(message, self.weights(work)))
                elif isinstance(action, Answer):
                    reply = action.reply._replace(why="")
                    answer = Answered(action.message.epoch.term, seat, action.message, reply)
                    process = work.bosses[answer.term - 1].process
                    if process == UP and self.config.eager and not lost:
                        answers.append(answer)
                    elif process != DOWN and not lost:
                        work.net.add(answer)
                elif isinstance(action, WriteAbort):
                    cell = action.epoch, action.number
                    self.write_cell(work, action.epoch.term, cell, ABORT)
                elif isinstance(action, Join):
                    owed = "join"
                elif isinstance(action, ReadTerm):
                    owed = "term"
                elif isinstance(action, Drop) and (isinstance(event, CellRead) or _is_rollback(event)):
                    self.check_rolled_back(work, seat, before.staged)
            if before.staged and after.live != before.live and after.live == before.staged.version:
                self.check_committed(work, seat, before.staged)
            work.ranks[seat] = rank._replace(
                machine=machine, owed=owed, highest=max(rank.highest, after.seen)
            )
        for answer in answers:
            self.answer_arrives(work, answer)

    def perform(self, work: Work, seat: int, task: Message, fail: bool = False, lost: bool = False) -> None:
        done = Broke(task, "failed") if fail else Performed(task, self.weights(work))
        self.member_event(work, seat, done, (), lost)

    def start(self, work: Work, seat: int) -> None:
        """A new process, or one that found its lease lost, begins anew."""
        rank = work.ranks[seat]
        if rank.process == DOWN:
            blank = self.table(seat).intern(self.member_class(sends=seat in self.trainers))
            work.ranks[seat] = Rank(UP, False, blank, "", rank.highest)
        work.ranks[seat] = work.ranks[seat]._replace(lease=False)
        self.member_event(work, seat, Started())

    def join(self, work: Work, seat: int) -> None:
        last = work.backend.last
        incarnation = last[seat] + 1
        work.backend = work.backend._replace(last=(*last[:seat], incarnation, *last[seat + 1 :]))
        work.set_roster(seat, incarnation)
        work.ranks[seat] = work.ranks[seat]._replace(lease=True, owed="")
        self.member_event(work, seat, Joined(incarnation))

    def read_term(self, work: Work, seat: int, term: int) -> None:
        work.ranks[seat] = work.ranks[seat]._replace(owed="")
        self.member_event(work, seat, TermRead(term))

    def crash(self, work: Work, seat: int) -> None:
        blank = self.table(seat).intern(self.member_class(sends=seat in self.trainers))
        work.ranks[seat] = Rank(DOWN, False, blank, "", work.ranks[seat].highest)

    def freeze(self, work: Work, seat: int) -> None:
        work.ranks[seat] = work.ranks[seat]._replace(process=FROZEN)

    def thaw(self, work: Work, seat: int) -> None:
        work.ranks[seat] = work.ranks[seat]._replace(process=UP)


def _is_rollback(event: Any) -> bool:
    return isinstance(event, Message) and event.kind == "rollback"
