"""All that can happen in a state: ordinary steps and, while the budget lasts, faults."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from dprims.synchronizer.protocol import (
    ABORT,
    CellRead,
    Condemn,
    Condemned,
    Gone,
    Message,
    Silent,
    SyncRequested,
)

from .parts import (
    DOWN,
    FROZEN,
    UP,
    Answered,
    Boss,
    Rank,
    Request,
    Work,
)

_RECORDS = ("reserved", "current")


class Moves:
    """The part of World that says what can happen next.

    Yields (label, "step" | "fault" | "luck" | "wish", name of the method that does it, its arguments).
    Luck is a receive that completes although a peer is missing: possible, and nothing to count on.
    """

    def moves(self, work: Work) -> Iterator[tuple[Any, ...]]:
        faulty = self.config.kinds if work.faults else frozenset()
        for term, boss in enumerate(work.bosses, 1):
            yield from self.leader_moves(work, term, boss, faulty)
        for item in work.net:
            if type(item) is Answered:
                if work.bosses[item.term - 1].process == UP:
                    yield f"{_name(item)} arrives", "step", "answer_arrives", item
                if "lose" in faulty:
                    yield f"{_name(item)} is lost", "fault", "vanish", item
            else:
                rank = work.ranks[item.seat]
                if rank.process == UP and not rank.owed:
                    yield f"{_name(item)} arrives", "step", "deliver", item
                    if "duplicate" in faulty:
                        yield f"{_name(item)} arrives, again later", "fault", "deliver", item, False
                    if "lose" in faulty and self.config.eager:
                        yield (
                            f"{_name(item)} arrives, its answer is lost",
                            "fault",
                            "deliver",
                            item,
                            True,
                            (),
                            True,
                        )
                    if "break" in faulty and item.message.kind == "build":
                        yield f"{_name(item)} fails", "fault", "deliver", item, True, ("build",)
                    if "engine" in faulty and item.message.kind in ("pause", "commit", "resume"):
                        yield f"{_name(item)} fails", "fault", "deliver", item, True, (item.message.kind,)
                if "lose" in faulty:
                    yield f"{_name(item)} is lost", "fault", "vanish", item
        for seat, rank in enumerate(work.ranks):
            if seat not in self.yes_men:
                yield from self.rank_moves(work, seat, rank, faulty)
        newest = work.bosses[-1]
        if newest.process != UP:
            yield f"leader {len(work.bosses) + 1} is elected", "step", "elect"
        elif self.leaders.views[newest.machine].phase == "idle":
            if work.steps and self.leaders.views[newest.machine].version.number:
                yield "the trainers step", "step", "trainers_step"
            if work.wishes:
                for absent in [frozenset(), *({shard} for shard in range(len(self.shards)))]:
                    yield f"reconcile without {sorted(absent)}", "wish", "wish", frozenset(absent)

    def leader_moves(
        self, work: Work, term: int, boss: Boss, faulty: frozenset[str]
    ) -> Iterator[tuple[Any, ...]]:
        name = f"leader {term}"
        if boss.process == FROZEN:
            yield f"{name} thaws", "step", "boss_process", term, UP
        if boss.process != UP:
            return
        if "leader crash" in faulty:
            yield f"{name} crashes", "fault", "boss_process", term, DOWN
        if "leader freeze" in faulty:
            yield f"{name} freezes", "fault", "boss_process", term, FROZEN
        leader = self.leaders.views[boss.machine]
        if leader.phase == "off":
            if len(boss.owed) < len(_RECORDS):
                yield (
                    f"{name} claims {_RECORDS[len(boss.owed)]}",
                    "step",
                    "claim",
                    term,
                    _RECORDS[len(boss.owed)],
                )
            else:
                yield f"{name} reads the roster", "step", "begin", term
            return
        quick = next((owed for owed in boss.owed if not isinstance(owed, Condemn | Condemned)), None)
        if quick:
            yield f"{name}: {type(quick).__name__}", "step", "operate", term, quick
        for owed in boss.owed:
            if isinstance(owed, Condemn):
                yield f"{name} evicts shard {owed.shard}", "step", "evict", term, owed
            elif isinstance(owed, Condemned):
                yield f"{name}: ttl of shard {owed.shard} passes", "step", "ttl_passes", term, owed
        for seat, message in leader.calls.items():
            if self.unanswerable(work, term, seat, message):
                yield (
                    f"{name}: {message.kind} to {seat} times out",
                    "step",
                    "tell",
                    term,
                    Silent(seat, message),
                )
            elif "slow" in faulty:
                yield (
                    f"{name}: {message.kind} to {seat} is late",
                    "fault",
                    "tell",
                    term,
                    Silent(seat, message),
                )
        for seat, incarnation in enumerate(leader.roster):
            if incarnation > leader.gone[seat] and self.surely_gone(work, seat, incarnation):
                yield f"{name}: {seat} is gone", "step", "tell", term, Gone(seat, incarnation, "")
        # Who retries while a trainer is silent does so for ever: that is left to the user.
        if leader.phase == "idle" and all(
            work.ranks[seat].process == UP for seat in self.trainers - self.yes_men
        ):
            roster = work.roster()
            known = [entry if entry > gone else 0 for entry, gone in zip(roster, leader.gone, strict=True)]
            complete = [
                shard
                for shard, seats in enumerate(self.shards)
                if all(known[seat] for seat in seats) and shard not in leader.excluded
            ]
            news = any(shard not in leader.current for shard in complete) or known != list(leader.roster)
            if leader.stale or news:
                yield f"{name}: sync", "step", "tell", term, SyncRequested(roster)
                for shard in complete:
                    if shard not in leader.current:
                        yield (
                            f"{name}: sync only {shard}",
                            "step",
                            "tell",
                            term,
                            SyncRequested(roster, shard),
                        )
        if self.config.watch and leader.phase in ("build", "transfer"):
            cell = leader.epoch, leader.target.number
            if self.read_cell(work, term, cell):
                yield f"{name} sees the abort", "step", "tell", term, CellRead(*cell, work.cells[cell])

    def rank_moves(
        self, work: Work, seat: int, rank: Rank, faulty: frozenset[str]
    ) -> Iterator[tuple[Any, ...]]:
        member, entry = self.table(seat).views[rank.machine], work.backend.roster[seat]
        if entry > 0 and member.incarnation != entry:
            yield f"entry of {seat} lapses", "step", "lapse", seat
        if rank.process == DOWN:
            yield f"{seat} restarts", "step", "start", seat
            return
        if "crash" in faulty:
            yield f"{seat} crashes", "fault", "crash", seat
        if rank.process == FROZEN:
            yield f"{seat} thaws", "step", "thaw", seat
            if rank.lease:
                yield f"entry of {seat} lapses", "step", "lapse", seat
            return
        if "freeze" in faulty:
            yield f"{seat} freezes", "fault", "freeze", seat
        if rank.owed == "join":
            if entry <= 0:
                yield f"{seat} joins", "step", "join", seat
            return
        if member.incarnation and entry != member.incarnation:
            yield f"{seat} finds its lease lost", "step", "start", seat
        if rank.owed == "term":
            fence = work.backend.reserved
            yield f"{seat} reads the term", "step", "read_term", seat, fence[0] if fence else 0
            return
        task, staged = member.task, member.staged
        if task:
            kind = "step" if self.peers_came(work, task) else "luck"
            yield f"{seat} has received", kind, "perform", seat, task
            if "lose" in faulty and self.config.eager:
                yield (
                    f"{seat} has received, its answer is lost",
                    "fault",
                    "perform",
                    seat,
                    task,
                    False,
                    True,
                )
            aborted = work.cells.get((task.epoch, task.version.number), "").startswith(ABORT)
            if aborted:
                yield f"{seat} sees the abort", "step", "perform", seat, task, True
            elif "break" in faulty:
                yield f"{seat} fails to receive", "fault", "perform", seat, task, True
        if self.config.watch and staged and not task:
            cell = staged.epoch, staged.version.number
            if work.cells.get(cell, "").startswith(ABORT):
                yield (
                    f"{seat} sees the abort",
                    "step",
                    "member_event",
                    seat,
                    CellRead(*cell, work.cells[cell]),
                )

    def surely_gone(self, work: Work, seat: int, incarnation: int) -> bool:
        rank = work.ranks[seat]
        if seat in self.yes_men or (work.backend.roster[seat] == incarnation and rank.process != DOWN):
            return False
        here = self.table(seat).views[rank.machine].incarnation == incarnation
        return rank.process == DOWN or not (here and rank.lease)

    def unanswerable(self, work: Work, term: int, seat: int, message: Message) -> bool:
        """Whether no answer to a call is on its way, or its rank is frozen."""
        rank = work.ranks[seat]
        if rank.process == DOWN or any(
            item.term == term and item.seat == seat and item.message == message
            for item in work.net
            if type(item) is Answered
        ):
            return False
        if rank.process == FROZEN:
            return True
        asked = Request(term, seat, message) in work.net
        return not asked and self.table(seat).views[rank.machine].task != message

    def peers_came(self, work: Work, task: Message) -> bool:
        """Whether all that a receive needs are in it: it then completes, sooner or later."""
        boss = work.bosses[task.epoch.term - 1]
        leader = self.leaders.views[boss.machine]
        if boss.process == DOWN or leader.epoch != task.epoch or leader.phase != "transfer":
            return False
        cell = task.epoch, task.version.number
        for seat in leader._participants():
            if seat in self.yes_men:
                continue
            peer = self.table(seat).views[work.ranks[seat].machine]
            came = [(one.epoch, one.version.number) for one in (peer.task, peer.staged) if one]
            if peer.done:
                came.append((peer.done[0].epoch, peer.done[0].version.number))
            if cell not in came:
                return False
        return True


def _name(item: Any) -> str:
    kind = "answer to " if type(item) is Answered else ""
    return f"{kind}{item.message.kind} {item.message.epoch} {item.term}->{item.seat}"
