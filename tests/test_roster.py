"""Roster: who is alive right now, the same on every backend."""

from __future__ import annotations

import os
import threading
import uuid
from collections.abc import Iterator
from typing import Any

import pytest

import dprims
from dprims import BackendMisconfigured, LockLost, LockTimeout, NotHeld, Roster
from dprims.roster import RosterChange
from dprims.testing.lock_process import LockProcess

from .helpers.services import KINDS, LIMIT_S, Service, in_thread, until


@pytest.fixture
def backend(service: Service) -> Iterator[dprims.Backend]:
    with dprims.connect(service.url) as opened:
        yield opened


@pytest.fixture
def name() -> str:
    return f"fleet-{uuid.uuid4().hex[:10]}"


@pytest.fixture
def roster(service: Service, backend: dprims.Backend, name: str) -> Roster:
    return Roster(name, backend, ttl=service.ttl)


@pytest.fixture
def elsewhere(service: Service, name: str) -> Iterator[Roster]:
    """The same roster, as another process has it."""
    with dprims.connect(service.url) as opened:
        yield Roster(name, opened, ttl=service.ttl)


def test_members_come_and_go(roster: Roster, elsewhere: Roster) -> None:
    assert roster.members() == {}
    first = roster.join("shard-0", {"host": "a", "ranks": [0, 1]})
    second = elsewhere.join("shard-1")
    members = elsewhere.members()
    assert list(members) == ["shard-0", "shard-1"]
    shard = members["shard-0"]
    assert (shard.name, shard.incarnation, shard.payload) == (
        "shard-0",
        first.token,
        {"host": "a", "ranks": [0, 1]},
    )
    assert (shard.owner.pid, shard.owner.token) == (os.getpid(), first.token)
    assert members["shard-1"].payload is None
    roster.leave("shard-0")
    assert list(roster.members()) == ["shard-1"]
    again = roster.join("shard-0")
    assert again.token > first.token, "an incarnation is never used twice"
    roster.leave()
    elsewhere.leave()
    assert roster.members() == {}
    assert not second.lost


@pytest.mark.parametrize("service", ["memory", "tcpstore"], indirect=True)
def test_an_entry_is_kept_for_as_long_as_its_member_lives(
    service: Service, roster: Roster, elsewhere: Roster
) -> None:
    entry = roster.join("shard-0")
    threading.Event().wait(2 * service.ttl)
    assert elsewhere.members()["shard-0"].incarnation == entry.token
    assert not entry.lost
    roster.leave()


def test_rosters_and_their_members_are_apart(service: Service, backend: dprims.Backend, name: str) -> None:
    rosters = [Roster(name + tail, backend, ttl=30) for tail in ("", "-2")]
    rosters.append(Roster(name, backend, ttl=30, namespace="other"))
    for i, roster in enumerate(rosters):
        roster.join("a", i)
        roster.join("a/b é", i)
    for i, roster in enumerate(rosters):
        assert {member: entry.payload for member, entry in roster.members().items()} == {"a": i, "a/b é": i}
        roster.leave()


def test_a_name_that_is_taken(roster: Roster, elsewhere: Roster) -> None:
    entry = roster.join("shard-0")
    with pytest.raises(LockTimeout, match=f"shard-0.*{os.getpid()}"):
        elsewhere.join("shard-0", timeout=0.1)
    assert roster.members()["shard-0"].incarnation == entry.token
    waiting = in_thread(lambda: elsewhere.join("shard-0", timeout=LIMIT_S))
    roster.leave()
    successor = waiting()
    assert isinstance(successor, dprims.Grant)
    assert successor.token > entry.token
    elsewhere.leave()


def test_joining_again_is_a_new_incarnation(roster: Roster) -> None:
    first = roster.join("shard-0")
    second = roster.join("shard-0")
    assert second.token > first.token
    assert not second.lost
    assert list(roster.members()) == ["shard-0"]
    roster.leave()


def test_an_entry_can_be_replaced(roster: Roster, elsewhere: Roster) -> None:
    told = threading.Event()
    first = roster.join("shard-0", on_lost=told.set)
    second = elsewhere.join("shard-0", replace=True)
    assert second.token > first.token
    assert told.wait(LIMIT_S)
    assert first.lost
    roster.leave()
    assert elsewhere.members()["shard-0"].incarnation == second.token
    elsewhere.leave()


def test_an_evicted_member_learns_so_and_joins_anew(roster: Roster, elsewhere: Roster) -> None:
    incarnations: list[int] = []

    def rejoin() -> None:
        incarnations.append(roster.join("shard-0", on_lost=rejoin).token)

    rejoin()
    assert not elsewhere.evict("shard-0", incarnations[0] + 1)
    assert not elsewhere.evict("shard-1", incarnations[0])
    assert elsewhere.evict("shard-0", incarnations[0])
    until(lambda: len(incarnations) == 2, "a second incarnation")
    assert incarnations[1] > incarnations[0]
    assert not elsewhere.evict("shard-0", incarnations[0]), "only that incarnation is ended"
    assert elsewhere.members()["shard-0"].incarnation == incarnations[1]
    roster.leave()


def test_a_silent_member_lapses_and_learns_so(
    service: Service,
    backend: dprims.Backend,
    roster: Roster,
    elsewhere: Roster,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told = threading.Event()
    entry = roster.join("shard-0", on_lost=told.set)
    elsewhere.join("shard-1")
    beats = backend.beat
    monkeypatch.setattr(backend, "beat", lambda tickets, timeout: None)
    until(lambda: list(elsewhere.members()) == ["shard-1"], "the lapse")
    monkeypatch.setattr(backend, "beat", beats)
    assert told.wait(LIMIT_S)
    assert entry.lost
    with pytest.raises(LockLost):
        entry.check()
    assert roster.join("shard-0").token > entry.token
    roster.leave()
    elsewhere.leave()


def test_watching(service: Service, roster: Roster, elsewhere: Roster) -> None:
    changes: list[RosterChange] = []
    stop = threading.Event()

    def watch() -> None:
        for change in elsewhere.watch(stop=stop):
            changes.append(change)

    watching = in_thread(watch)
    until(lambda: changes, "who is there now")
    assert changes[0] == RosterChange((), (), {})
    entry = roster.join("shard-0", 1)
    until(lambda: len(changes) == 2, "the first to join")
    assert [(m.name, m.incarnation, m.payload) for m in changes[1].joined] == [("shard-0", entry.token, 1)]
    again = roster.join("shard-0", 2)
    until(lambda: changes[-1].members.get("shard-0", entry) and _stands(changes[-1], again.token), "anew")
    assert "shard-0" in {m.name for change in changes[2:] for m in change.left}
    roster.leave()
    until(lambda: changes[-1].members == {}, "an empty roster")
    stop.set()
    watching()
    assert list(elsewhere.watch(timeout=0)) == [RosterChange((), (), {})]


def _stands(change: RosterChange, incarnation: int) -> bool:
    member = change.members.get("shard-0")
    return member is not None and member.incarnation == incarnation


@pytest.mark.parametrize("service", KINDS[1:], indirect=True)
def test_a_killed_and_a_frozen_process(service: Service, name: str, elsewhere: Roster) -> None:
    with LockProcess(service.url) as killed, LockProcess(service.url) as frozen:
        for process, member in ((killed, "killed"), (frozen, "frozen")):
            process.acquire(f"roster/{name}/{member}", service.ttl).result(LIMIT_S)
        assert list(elsewhere.members()) == ["frozen", "killed"]
        killed.kill()
        frozen.freeze()
        until(lambda: elsewhere.members() == {}, "the lapse of both")
        frozen.thaw()
        assert frozen.lost(f"roster/{name}/frozen").result(LIMIT_S)
        threading.Event().wait(service.ttl / 2)
        assert elsewhere.members() == {}, "a thawed member is not back by itself"


@pytest.mark.parametrize("bad", ["", "a/b", "x" * 600, "line\n", 7])
def test_names_that_do_not_work(bad: str) -> None:
    with pytest.raises(BackendMisconfigured):
        Roster(bad, "memory://roster-names")
    if bad != "a/b":
        with pytest.raises(BackendMisconfigured):
            Roster("a", "memory://roster-names").join(bad)


def test_leaving_without_an_entry() -> None:
    roster = Roster("a", "memory://roster-leave")
    with pytest.raises(NotHeld, match="nobody"):
        roster.leave("nobody")
    roster.leave()


@pytest.mark.parametrize("ttl", [-1, 0, "5", None, True, float("nan"), float("inf")])
def test_a_ttl_that_is_no_time_is_refused_at_once(ttl: Any) -> None:
    with dprims.connect("memory://ttls") as backend, pytest.raises(BackendMisconfigured, match="ttl is"):
        dprims.Roster("fleet", backend, ttl=ttl)
