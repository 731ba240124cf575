"""Leader and Member of the refit protocol, a behaviour a test; all orders of events are the model's part."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from dprims.exceptions import MembershipError, RefitError
from dprims.membership import Epoch, RefitMembership
from dprims.synchronizer import protocol as p
from dprims.synchronizer.protocol import Leader, Member, Message, Reply, Version

FLEET = RefitMembership.full(train_world_size=1, shard_sizes=(2, 1))
TRAINER, A0, A1, B0 = range(4)


class Fleet:
    """A leader and four ranks. ``script`` answers in a rank's stead, loses a call (None), or lets it obey."""

    def __init__(self, **options: Any) -> None:
        self.ranks = [Member(sends=seat == TRAINER) for seat in range(4)]
        self.roster = [0] * 4
        for seat in range(4):
            self.restart(seat)
        self.options = options
        self.cells: dict[tuple[Epoch, int], str] = {}
        self.fences: dict[type, tuple[int, Version]] = {}
        self.script: Callable[[int, Message], Reply | str | None] = lambda seat, message: "obey"
        self.digest = "d1"
        self.log: list[Any] = []
        self.elect(1)

    def restart(self, seat: int) -> None:
        self.roster[seat] += 10
        self.ranks[seat] = Member(sends=seat == TRAINER)
        assert self.ranks[seat].handle(p.Started()) == [p.Join()]
        assert self.ranks[seat].handle(p.Joined(self.roster[seat])) == [p.ReadTerm()]
        fence = self.fences.get(p.Reserve, (0,))[0] if hasattr(self, "fences") else 0
        assert self.ranks[seat].handle(p.TermRead(fence)) == []

    def elect(self, term: int) -> p.Finish:
        found = [stands[1] for kind in (p.Reserve, p.Publish) for stands in [self.fences.get(kind)] if stands]
        reserved, current = found or (None, None)
        self.fences = {kind: (term, version) for kind, (_, version) in self.fences.items()}
        self.leader = Leader(FLEET, **self.options)
        return self.run(p.Elected(term, reserved, current, tuple(self.roster)))

    def sync(self, **what: Any) -> p.Finish:
        return self.run(p.SyncRequested(tuple(self.roster), **what))

    def build(self, **what: Any) -> p.Finish:
        return self.run(p.BuildRequested(tuple(self.roster), **what))

    def run(self, event: Any) -> p.Finish:
        """Hand in one event and do all that follows; the log has it."""
        self.log = []
        todo, finish = self.leader.handle(event), None
        while todo:
            action = todo.pop(0)
            self.log.append(action)
            if isinstance(action, p.Finish):
                finish = action
                continue
            for event in self.perform(action):
                todo += self.leader.handle(event)
        assert finish is not None, (self.leader.phase, self.leader.calls, self.leader.awaited)
        return finish

    def perform(self, action: Any) -> list[Any]:
        if isinstance(action, p.Call):
            answer = self.script(action.seat, action.message)
            if answer == "obey":
                answer = self.obey(action.seat, action.message)
            if answer is None:
                return [p.Silent(action.seat, action.message)]
            if isinstance(answer, str):
                return [p.Gone(action.seat, action.message.incarnation, answer)]
            return [p.Replied(action.seat, action.message, answer)]
        if isinstance(action, p.SetCell):
            cell = action.epoch, action.number
            return [p.CellRead(*cell, self.cells.setdefault(cell, action.value))]
        if isinstance(action, p.Condemn):
            for seat, incarnation in action.entries:
                assert self.roster[seat] == incarnation
                self.restart(seat)
            return [p.Condemned(action.shard)]
        stands = self.fences.get(type(action), (0,))[0]
        if stands <= action.term:
            self.fences[type(action)] = (action.term, action.version)
        return [p.Fenced(stands <= action.term)]

    def obey(self, seat: int, message: Message) -> Reply:
        answers = {}
        todo = self.ranks[seat].handle(message)
        while todo:
            action = todo.pop(0)
            if isinstance(action, p.Perform):
                todo += self.ranks[seat].handle(p.Performed(action.message, self.digest))
            elif isinstance(action, p.WriteAbort):
                self.cells.setdefault((action.epoch, action.number), f"abort: {action.why}")
            elif isinstance(action, p.Answer):
                answers[action.message] = action.reply
        return answers[message]

    def calls(self, kind: str) -> list[int]:
        return [a.seat for a in self.log if isinstance(a, p.Call) and a.message.kind == kind]

    @property
    def live(self) -> list[int | None]:
        return [rank.live and rank.live.number for rank in self.ranks[A0:]]


@pytest.fixture
def fleet() -> Fleet:
    """Everybody serves version 1, and the trainers have stepped."""
    fleet = Fleet()
    assert fleet.sync().cause is None
    fleet.leader.handle(p.Stepped())
    fleet.digest = "d2"
    return fleet


def test_old_decisions_are_kept_while_somebody_in_the_roster_took_no_part(fleet: Fleet) -> None:
    fleet.build(absent=frozenset({1}))  # condemned, and back in the roster as somebody new
    assert not fleet.sync().forget
    fleet.build(absent=frozenset())
    assert fleet.sync().forget


# ---- a sync ----------------------------------------------------------------------------------------


def test_a_first_sync_builds_sends_decides_and_switches_each_shard_paused() -> None:
    fleet = Fleet()
    assert fleet.leader.stale
    finish = fleet.sync()
    assert finish == p.Finish("sync", None, rebuilt=True, forget=True)
    kinds = [a.message.kind if isinstance(a, p.Call) else type(a).__name__ for a in fleet.log]
    assert kinds[0] == "Reserve"
    assert kinds[1:9] == ["build"] * 4 + ["recv"] * 4
    assert kinds[9] == "SetCell"
    assert fleet.calls("pause") == fleet.calls("commit") == fleet.calls("resume") == [A0, A1, B0]
    assert kinds[-2:] == ["Publish", "Finish"]
    assert kinds.index("commit") > max(i for i, kind in enumerate(kinds) if kind == "pause") - 1
    assert fleet.leader.version == Version(1, "d1")
    assert fleet.fences[p.Publish] == (1, Version(1, "d1"))
    assert fleet.live == [1, 1, 1]
    assert not fleet.leader.stale
    assert all(rank.may_serve(lease_valid=True) for rank in fleet.ranks[A0:])


def test_the_next_sync_uses_the_same_groups_and_the_next_number(fleet: Fleet) -> None:
    assert fleet.leader.stale
    assert fleet.sync() == p.Finish("sync", None, rebuilt=False, forget=True)
    assert fleet.calls("build") == []
    assert fleet.leader.epoch == (1, 1)
    assert fleet.live == [2, 2, 2]


@pytest.mark.parametrize("kind", ["build", "recv"])
@pytest.mark.parametrize(("answer", "what"), [("killed", "lost"), (Reply("error", "no memory"), "error")])
def test_a_failure_before_the_decision_aborts_everywhere_and_the_number_is_used_again(
    fleet: Fleet, kind: str, answer: Any, what: str
) -> None:
    fleet.restart(B0)  # so that there is something to build
    fleet.script = lambda seat, message: answer if (seat, message.kind) == (B0, kind) else "obey"
    finish = fleet.sync()
    assert finish.cause is not None
    assert (finish.cause.what, finish.cause.seat) == (what, B0)
    assert fleet.cells[Epoch(1, 2), 2].startswith("abort: ")
    assert fleet.calls("rollback") == ([TRAINER, A0, A1] if what == "lost" else [TRAINER, A0, A1, B0])
    assert fleet.live == [1, 1, None]
    assert fleet.leader.stale
    assert fleet.leader.built is None
    fleet.script = lambda seat, message: "obey"
    assert fleet.sync().cause is None
    assert fleet.leader.epoch == (1, 3)
    assert fleet.live == [2, 2, None if what == "lost" else 2]  # whose entry has not run out yet
    assert fleet.leader.version == Version(2, "d2")


def test_who_is_silent_in_a_transfer_is_asked_to_roll_back_and_condemned_when_silent_again(
    fleet: Fleet,
) -> None:
    fleet.script = lambda seat, message: None if seat == A1 else "obey"
    finish = fleet.sync()
    assert finish.cause == p.Cause("timeout", A1, "rank at seat 2 gave no answer to recv")
    assert fleet.calls("rollback") == [TRAINER, A0, A1, B0]
    assert [a.entries for a in fleet.log if isinstance(a, p.Condemn)] == [((A0, 10), (A1, 10))]
    assert fleet.live == [None, None, 1]


def test_a_silent_trainer_is_named_and_never_condemned(fleet: Fleet) -> None:
    fleet.script = lambda seat, message: None if seat == TRAINER else "obey"
    finish = fleet.sync()
    assert finish.cause is not None
    assert finish.cause.seat == TRAINER
    assert not [a for a in fleet.log if isinstance(a, p.Condemn)]
    fleet.roster[TRAINER] = 0
    assert fleet.sync().cause == p.Cause("lost", TRAINER, "trainer ranks [0] are not in")


def test_receivers_that_hold_different_weights_abort(fleet: Fleet) -> None:
    def other(seat: int, message: Message) -> Any:
        fleet.digest = "d3" if seat == B0 else "d2"
        return "obey"

    fleet.script = other
    finish = fleet.sync()
    assert finish.cause is not None
    assert finish.cause.what == "mismatch"
    assert "'d2', 'd3'" in finish.cause.why
    assert fleet.live == [1, 1, 1]


def test_an_abort_that_a_rank_wrote_ends_the_sync_as_soon_as_it_is_seen(fleet: Fleet) -> None:
    leader = fleet.leader
    leader.handle(p.SyncRequested(tuple(fleet.roster)))
    calls = leader.handle(p.Fenced(True))
    assert {call.message.kind for call in calls} == {"recv"}
    rollbacks = leader.handle(p.CellRead(Epoch(1, 1), 2, "abort: rank 3 saw a bad digest"))
    assert {call.message.kind for call in rollbacks} == {"rollback"}
    assert leader.handle(p.CellRead(Epoch(1, 1), 2, "abort: rank 3 saw a bad digest")) == []


@pytest.mark.parametrize("kind", ["pause", "commit", "resume"])
def test_a_shard_that_fails_to_switch_is_condemned_and_the_others_go_on(fleet: Fleet, kind: str) -> None:
    fleet.script = lambda seat, message: None if (seat, message.kind) == (A1, kind) else "obey"
    assert fleet.sync().cause is None
    assert [a.shard for a in fleet.log if isinstance(a, p.Condemn)] == [0]
    assert fleet.leader.current == {1}
    assert fleet.live == [None, None, 2]
    fleet.script = lambda seat, message: "obey"
    assert fleet.sync() == p.Finish("sync", None, rebuilt=True, forget=True)  # it came back as somebody new
    assert fleet.live == [3, 3, 3]


def test_a_rank_that_died_needs_no_fence(fleet: Fleet) -> None:
    fleet.script = lambda seat, message: "killed" if (seat, message.kind) == (A1, "commit") else "obey"
    assert fleet.sync().cause is None
    assert not [a for a in fleet.log if isinstance(a, p.Condemn)]
    assert fleet.leader.current == {1}


def test_a_sync_that_no_shard_lives_through_fails_and_its_number_is_gone(fleet: Fleet) -> None:
    fleet.script = lambda seat, message: None if message.kind == "resume" else "obey"
    finish = fleet.sync()
    assert finish.cause is not None
    assert finish.cause.what == "quorum"
    fleet.script = lambda seat, message: "obey"
    assert fleet.sync().cause is None
    assert fleet.live == [3, 3, 3]


def test_a_shard_that_does_not_exist_cannot_be_left_out(fleet: Fleet) -> None:
    with pytest.raises(MembershipError, match=r"shards \[2\] do not exist; there are 0\.\.1"):
        fleet.build(absent=frozenset({1, 2}))


def test_too_few_shards_are_refused_before_anything_is_called() -> None:
    fleet = Fleet(min_shards=2)
    fleet.roster[B0] = 0
    finish = fleet.sync()
    assert finish.cause == p.Cause("quorum", None, "1 of 2 shards are in, 2 are needed")
    assert fleet.log == [finish]


# ---- building without sending ------------------------------------------------------------------------


def test_reconcile_builds_only_what_differs(fleet: Fleet) -> None:
    assert fleet.build() == p.Finish("build", None, rebuilt=False)
    assert fleet.log == [p.Finish("build", None)]
    assert fleet.build(force=True).rebuilt
    fleet.restart(B0)  # died and came back before anybody looked
    assert fleet.build() == p.Finish("build", None, rebuilt=True)
    assert fleet.leader.stale
    assert fleet.sync() == p.Finish("sync", None, rebuilt=False, forget=True)
    assert fleet.live == [2, 2, 2]


def test_a_shard_that_the_user_wants_out_is_fenced_and_stays_out(fleet: Fleet) -> None:
    memberships = []

    def look(seat: int, message: Message) -> Any:
        memberships.append(fleet.leader.membership)
        return "obey"

    fleet.script = look
    assert fleet.build(absent=frozenset({0})) == p.Finish("build", None, rebuilt=True)
    assert [a.shard for a in fleet.log if isinstance(a, p.Condemn)] == [0]
    assert {(m.epoch, m.surviving_shards, m.absent[0]) for m in memberships} == {((1, 2), (1,), "excluded")}
    assert fleet.sync().cause is None
    assert fleet.live == [None, None, 2]
    assert not [a for a in fleet.log if isinstance(a, p.Condemn)]  # it serves nothing: no need
    assert fleet.build(absent=frozenset()).rebuilt
    assert fleet.sync().cause is None
    assert fleet.live == [3, 3, 3]
    with pytest.raises(RefitError, match="no refit runs"):
        _ = fleet.leader.membership


# ---- one shard ---------------------------------------------------------------------------------------


def test_one_shard_is_brought_up_in_an_epoch_of_its_own() -> None:
    fleet = Fleet()
    fleet.sync()
    fleet.restart(B0)
    assert fleet.sync(only=1) == p.Finish("only", None, rebuilt=True)
    assert fleet.calls("recv") == [TRAINER, B0]
    assert fleet.live == [1, 1, 1]
    assert fleet.leader.epoch == (1, 2)
    assert fleet.ranks[A0].seen == (1, 1)
    assert not fleet.leader.stale
    fleet.leader.handle(p.Stepped())
    assert fleet.sync() == p.Finish("sync", None, rebuilt=True, forget=True)
    assert fleet.live == [2, 2, 2]


def test_other_weights_than_the_fleet_serves_are_not_taken_for_its_version() -> None:
    fleet = Fleet()
    fleet.sync()
    fleet.restart(B0)
    fleet.digest = "stepped, and nobody said so"
    finish = fleet.sync(only=1)
    assert finish.cause is not None
    assert "expected d1" in finish.cause.why
    assert fleet.live == [1, 1, None]


def test_one_shard_is_refused_when_it_cannot_be_right(fleet: Fleet) -> None:
    def why(shard: int) -> str:
        finish = fleet.sync(only=shard)
        assert finish.cause is not None
        assert finish.cause.what == "refused"
        assert fleet.log == [finish]
        return finish.cause.why

    assert "other weights" in why(1)
    fleet.sync()
    assert "it serves the current version" in why(1)
    assert "shards 0..1" in why(7)
    fleet.roster[B0] = 0
    assert "not in" in why(1)
    fleet.restart(B0)
    fleet.restart(A0)
    assert "no other shard" in why(1)


# ---- leaders come and go -----------------------------------------------------------------------------


def _in_doubt(fleet: Fleet, last: str) -> None:
    """Let the leader vanish just before its first call or action of this kind."""

    class Vanished(Exception):
        pass

    def until(action: Any) -> list[Any]:
        kind = action.message.kind if isinstance(action, p.Call) else type(action).__name__
        if kind == last:
            raise Vanished
        return Fleet.perform(fleet, action)

    fleet.perform = until  # type: ignore[method-assign]
    with pytest.raises(Vanished):
        fleet.sync()
    del fleet.perform


@pytest.mark.parametrize(
    ("last", "after"),
    [
        ("recv", [1, 1, 1]),
        ("SetCell", [1, 1, 1]),
        ("pause", [2, 2, 2]),
        ("commit", [2, 2, 2]),
        ("resume", [2, 2, 2]),
        ("Publish", [2, 2, 2]),
    ],
)
def test_a_successor_settles_what_was_in_doubt_by_the_cell(fleet: Fleet, last: str, after: list[int]) -> None:
    _in_doubt(fleet, last)
    old = fleet.leader
    assert fleet.elect(2) == p.Finish("recover", None)
    assert fleet.live == after
    assert all(rank.may_serve(lease_valid=True) for rank in fleet.ranks[A0:])
    assert all(rank.staged is None for rank in fleet.ranks)
    assert fleet.leader.version.number == after[0]
    assert fleet.fences[p.Publish][1].number == after[0]
    assert fleet.leader.stale
    assert fleet.leader.current == {0, 1}
    assert fleet.sync().cause is None
    assert fleet.live == [3, 3, 3]  # number 2 was reserved, and may have been seen
    new, fleet.leader = fleet.leader, old
    late = Message("pause", Epoch(1, 1), Version(2, "d2"), 10)
    reply = fleet.obey(A0, late)
    assert (reply.status, reply.seen) == ("refused", new.epoch)
    finish = fleet.run(p.Replied(A0, late, reply))
    assert finish.cause is not None
    assert finish.cause.what == "stale"
    assert old.phase == "stopped"
    assert fleet.sync().cause == finish.cause


def test_a_shard_of_which_a_rank_is_new_is_left_as_it_is(fleet: Fleet) -> None:
    _in_doubt(fleet, "pause")
    fleet.restart(A1)
    fleet.elect(2)
    assert fleet.live == [1, None, 2]
    assert fleet.leader.current == {1}
    assert fleet.leader.version.number == 2


def test_a_rank_that_does_not_answer_a_new_leader_is_fenced_with_its_shard(fleet: Fleet) -> None:
    fleet.script = lambda seat, message: None if seat == A1 else "obey"
    assert fleet.elect(2).cause is None
    assert [a.entries for a in fleet.log if isinstance(a, p.Condemn)] == [((A0, 10), (A1, 10))]
    assert fleet.leader.current == {1}


def test_a_new_leader_waits_for_entries_that_an_old_one_deleted(fleet: Fleet) -> None:
    fleet.roster[A1] = 0
    new = Leader(FLEET)
    actions = new.handle(p.Elected(2, Version(1), Version(1, "d1"), tuple(fleet.roster), frozenset({A1})))
    assert p.Condemn(0, ((A0, 10),)) in actions
    assert {call.seat for call in actions if isinstance(call, p.Call)} == {TRAINER, A0, B0}


@pytest.mark.parametrize("kind", [p.Reserve, p.Publish])
def test_a_leader_that_meets_a_higher_term_stops(fleet: Fleet, kind: type) -> None:
    fleet.fences[kind] = (7, Version(9))
    finish = fleet.sync()
    assert finish.cause is not None
    assert finish.cause.what == "stale"
    assert fleet.leader.phase == "stopped"
    assert (fleet.calls("recv") == []) == (kind is p.Reserve)
    assert fleet.leader.handle(p.Stepped()) == []


def test_a_deposed_leader_stops_whatever_it_does(fleet: Fleet) -> None:
    assert fleet.leader.handle(p.Deposed("lock lost")) == []
    finish = fleet.sync()
    assert finish.cause == p.Cause("stale", None, "lock lost")
    running = Fleet().leader
    running.handle(p.SyncRequested((10, 10, 10, 10)))
    assert running.handle(p.Deposed("no answer")) == [p.Finish("sync", p.Cause("stale", None, "no answer"))]


def test_requests_out_of_turn_are_refused() -> None:
    with pytest.raises(RefitError, match="'off', not idle"):
        Leader(FLEET).handle(p.SyncRequested((10, 10, 10, 10)))
    leader = Fleet().leader
    with pytest.raises(RefitError, match="term 1 already"):
        leader.handle(p.Elected(2, None, None, (10, 10, 10, 10)))
    leader.handle(p.SyncRequested((10, 10, 10, 10)))
    with pytest.raises(RefitError, match="'reserve', not idle"):
        leader.handle(p.BuildRequested((10, 10, 10, 10)))


def test_a_snapshot_is_the_whole_state(fleet: Fleet) -> None:
    _in_doubt(fleet, "commit")
    for machine, blank in ((fleet.leader, Leader(FLEET)), (fleet.ranks[A0], Member())):
        snapshot = machine.snapshot()
        hash(snapshot)
        other = blank.restore(snapshot)
        assert other.snapshot() == snapshot
        for name in set(vars(machine)) - {"fleet", "min_shards", "trainers", "seats", "_shard_at", "sends"}:
            assert getattr(other, name) == getattr(machine, name), name


# ---- a rank ------------------------------------------------------------------------------------------


def _joined(incarnation: int = 5, term: int = 1, *, sends: bool = False) -> Member:
    member = Member(sends=sends)
    for event in (p.Started(), p.Joined(incarnation), p.TermRead(term)):
        member.handle(event)
    return member


def _message(kind: Any, build: int = 1, number: int = 1, digest: str = "", incarnation: int = 5) -> Message:
    return Message(kind, Epoch(1, build), Version(number, digest), incarnation)


def _do(member: Member, message: Message, digest: str = "d") -> Reply:
    """Hand in a message, perform it, return the answer."""
    actions = member.handle(message)
    if p.Perform(message) in actions:
        actions = member.handle(p.Performed(message, digest))
    (answer,) = [action for action in actions if isinstance(action, p.Answer)]
    return answer.reply


def _staged(**options: Any) -> Member:
    member = _joined(**options)
    assert _do(member, _message("build")).status == "ok"
    assert _do(member, _message("recv")).digest == "d"
    return member


def test_a_rank_that_is_not_in_or_not_meant_obeys_nobody() -> None:
    member = Member()
    member.handle(p.Started())
    member.handle(p.Joined(5))
    assert "still joining" in _do(member, _message("ask")).why
    member = _joined()
    before = member.snapshot()
    reply = _do(member, _message("build", incarnation=4))
    assert reply.status == "error"
    assert "incarnation 4, this is incarnation 5" in reply.why
    assert member.snapshot() == before


@pytest.mark.parametrize("kind", ["ask", "build", "recv", "pause", "commit", "resume", "rollback"])
def test_a_lower_epoch_is_refused_and_changes_nothing(kind: str) -> None:
    member = _staged()
    _do(member, _message("build", build=3))
    before = member.snapshot()
    reply = _do(member, _message(kind, build=2))
    assert (reply.status, reply.seen) == ("refused", (1, 3))
    assert member.snapshot() == before


@pytest.mark.parametrize("kind", ["recv", "pause", "commit", "resume", "rollback"])
def test_only_ask_and_build_open_an_epoch(kind: str) -> None:
    member = _staged()
    before = member.snapshot()
    assert "never announced" in _do(member, _message(kind, build=2)).why
    assert member.snapshot() == before


def test_a_rank_answers_what_it_holds() -> None:
    member = _staged()
    reply = _do(member, Message("ask", Epoch(2, 0), Version(0), 5))
    assert reply.holding == p.Holding(None, p.Staged(Epoch(1, 1), Version(1, "d")), False)


def test_a_rank_serves_after_pause_commit_resume_and_only_with_a_lease() -> None:
    member = _staged()
    version = {"digest": "d"}
    assert "not paused" in _do(member, _message("commit", **version)).why
    serves = []
    for kind in ("pause", "commit", "resume"):
        assert _do(member, _message(kind, **version)).status == "ok"
        serves.append(member.may_serve(lease_valid=True))
    assert serves == [False, False, True]
    assert not member.may_serve(lease_valid=False)
    assert member.live == Version(1, "d")
    assert member.staged is None


def test_a_commit_of_something_else_is_an_error_and_a_second_commit_is_none() -> None:
    member = _staged()
    _do(member, _message("pause", digest="d"))
    assert "neither staged nor live" in _do(member, _message("commit", digest="other")).why
    for _ in range(2):
        assert _do(member, _message("commit", digest="d")).status == "ok"


def test_a_commit_that_fails_half_way_leaves_nothing_to_serve() -> None:
    member = _staged()
    _do(member, _message("pause", digest="d"))
    commit = _message("commit", digest="d")
    member.handle(commit)
    (answer,) = member.handle(p.Broke(commit, "out of memory"))
    assert answer == p.Answer(commit, Reply("error", "out of memory", Epoch(1, 1)))
    assert (member.live, member.staged) == (None, None)


@pytest.mark.parametrize("kind", ["pause", "resume"])
def test_a_pause_or_resume_that_fails_leaves_the_rank_paused(kind: str) -> None:
    member = _staged()
    for done in ("pause", "commit")[: 2 if kind == "resume" else 0]:
        _do(member, _message(done, digest="d"))
    member.handle(_message(kind, digest="d"))
    member.handle(p.Broke(_message(kind, digest="d"), "engine stuck"))
    assert member.paused


def test_a_receive_needs_the_groups_of_its_epoch() -> None:
    member = _joined()
    _do(member, _message("ask"))
    assert "not built" in _do(member, _message("recv")).why


def test_a_receive_that_fails_writes_the_abort_before_it_answers() -> None:
    member = _joined()
    _do(member, _message("build"))
    recv = _message("recv")
    member.handle(recv)
    abort, answer = member.handle(p.Broke(recv, "bucket 3 is corrupt"))
    assert abort == p.WriteAbort(Epoch(1, 1), 1, "bucket 3 is corrupt")
    assert answer.reply.status == "error"


def test_a_rank_that_acknowledged_never_writes_an_abort() -> None:
    member = _staged()
    actions = member.handle(p.Broke(_message("recv"), "late"))
    assert not [action for action in actions if isinstance(action, p.WriteAbort)]
    assert member.staged


def test_weights_with_another_digest_than_expected_are_not_staged() -> None:
    member = _joined()
    _do(member, _message("build"))
    recv = _message("recv", digest="expected")
    member.handle(recv)
    abort, answer = member.handle(p.Performed(recv, "other"))
    assert isinstance(abort, p.WriteAbort)
    assert "other weights than those of version 1: the digest is other, expected expected" in answer.reply.why
    assert member.staged is None


def test_an_abort_in_the_cell_cancels_the_receive_or_drops_what_is_staged() -> None:
    member = _joined()
    _do(member, _message("build"))
    recv = _message("recv")
    member.handle(recv)
    assert member.handle(p.CellRead(Epoch(1, 1), 2, "abort: other")) == []
    assert member.handle(p.CellRead(Epoch(1, 1), 1, "abort: x")) == [p.Cancel(recv)]
    member = _staged()
    assert member.handle(p.CellRead(Epoch(1, 1), 1, "commit")) == []
    assert member.handle(p.CellRead(Epoch(1, 1), 1, "abort: x")) == [p.Drop()]
    assert member.staged is None


@pytest.mark.parametrize("kind", ["ask", "build"])
def test_a_newer_epoch_cuts_a_receive_short(kind: str) -> None:
    member = _joined()
    _do(member, _message("build"))
    recv = _message("recv")
    member.handle(recv)
    assert p.Cancel(recv) in member.handle(_message(kind, build=2))
    (late,) = member.handle(p.Performed(recv, "d"))
    assert late.reply.status == "error"
    assert member.staged is None
    assert "was never announced" not in _do(member, _message("recv", build=2)).why


def test_calls_that_arrive_twice_are_done_once() -> None:
    member = _joined()
    build, recv = _message("build"), _message("recv")
    assert member.handle(build) == [p.Perform(build)]
    assert member.handle(build) == []  # the answer to the first is the answer to both
    member.handle(p.Performed(build))
    assert _do(member, build).status == "ok"
    assert member.handle(recv) == [p.Perform(recv)]
    assert member.handle(recv) == []
    member.handle(p.Performed(recv, "d"))
    assert member.handle(recv) == [p.Answer(recv, Reply("ok", "", Epoch(1, 1), "d"))]
    pause = _message("pause", digest="d")
    for kind in ("pause", "commit", "resume"):
        _do(member, _message(kind, digest="d"))
    assert _do(member, pause).status == "ok"
    assert not member.paused
    _do(member, _message("recv", number=2))
    assert "is over" in _do(member, pause).why


def test_after_a_rollback_nothing_is_received_in_that_epoch() -> None:
    member = _staged()
    assert p.Drop() in member.handle(_message("rollback"))
    assert _do(member, _message("rollback")).status == "ok"
    assert "not built" in _do(member, _message("recv")).why


def test_a_rank_that_comes_back_is_stale_and_has_seen_the_term() -> None:
    member = _staged()
    for kind in ("pause", "commit", "resume"):
        _do(member, _message(kind, digest="d"))
    assert member.handle(p.Started()) == [p.Join()]
    assert not member.may_serve(lease_valid=True)
    member.handle(p.Joined(9))
    member.handle(p.TermRead(4))
    assert (member.live, member.staged, member.seen) == (None, None, (4, 0))
    assert _do(member, _message("build", build=9, incarnation=9)).status == "refused"


def test_a_trainer_sends_again_only_when_asked_anew() -> None:
    trainer = _joined(sends=True)
    _do(trainer, _message("build"))
    recv = _message("recv", digest="what the receivers must have")
    assert _do(trainer, recv, "mine").status == "ok"
    assert trainer.handle(recv) == [p.Answer(recv, Reply("ok", "", Epoch(1, 1), "mine"))]
    assert trainer.staged is None


# ---- keys --------------------------------------------------------------------------------------------


def test_keys_are_where_the_documentation_says() -> None:
    assert p.decision_key("ns", Epoch(3, 4), 5) == "ns/refit/3.4/5/decision"
    assert p.next_key("ns") == "ns/refit/next"
    assert p.current_key("ns") == "ns/refit/current"
    assert p.evicted_key("ns", 7) == "ns/roster/7/evicted"
    assert p.evicted_key("ns", 7) == "ns/roster/7/evicted"


def test_values_survive_their_encoding_and_anything_else_is_refused() -> None:
    for value in ("commit", "abort: rank 3 är tot"):
        assert p.decode_decision(p.encode_decision(value)) == value
    long = p.decode_decision(p.encode_decision("abort: " + "é" * 2000))
    assert long.startswith("abort: éé")
    version = Version(12, "0a1b")
    assert p.decode_version(p.encode_version(version)) == version
    for wrong in (b"", b"maybe", b"[1]", b"{}", b"\xff"):
        with pytest.raises(RefitError):
            p.decode_version(wrong)
        with pytest.raises(RefitError):
            p.decode_decision(wrong)
    with pytest.raises(RefitError, match="'maybe'"):
        p.encode_decision("maybe")


def test_the_protocol_needs_no_torch() -> None:
    code = "import sys, dprims.synchronizer.protocol; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0
