"""The TCPStore lock keeps its promises in every reachable state, and each rule of it is needed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from dprims.backends import _tickets
from dprims.backends._tickets import CLOCK, Head, NumberedTicket, Reading, Steps, Tickets

from .model.tcpstore_lock import Violation, World, explore

# -- it holds -----------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    "world",
    [
        World(clients=2, crashes=0, freezes=0),
        World(clients=2, crashes=1, freezes=0, lapses=5),
        World(clients=2, crashes=0, freezes=1, lapses=3, whole_hearts="ab"),
        World(clients=2, crashes=0, freezes=1, lapses=3, whole_hearts="ab", gives_up=True),
    ],
    ids=["no fault", "a crash", "a freeze", "a freeze and a waiter that gives up"],
)
def test_exclusion_order_and_progress(world: World) -> None:
    assert explore(world) > 300


@pytest.mark.chaos
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "world",
    [
        World(crashes=0, freezes=0, whole_hearts="abc", gives_up=True),
        World(freezes=0, lapses=3, whole_hearts="abc"),
        World(crashes=0, lapses=3, whole_hearts="abc"),
        World(lapses=4, whole_hearts="abc", gives_up=True),
    ],
    ids=["no fault", "a crash", "a freeze", "a crash and a freeze"],
)
def test_three_clients(world: World) -> None:
    """Up to a million states each: the larger worlds are not seen to their end."""
    assert explore(world, limit=1_000_000) > 100_000


# -- and fails when a rule is broken ------------------------------------------------------------------


class OldBeatsCount(Tickets):
    """A beat counts though its reply came after the ticket's time was up."""

    def judge(self, ticket: NumberedTicket, reading: Reading, *, hold: bool = False) -> None:
        ticket.proven = max(ticket.proven, reading.sent)
        super().judge(ticket, reading, hold=hold)


class SleepersAreBelieved(Tickets):
    """A waiter uses its number though others may have taken it for dead."""

    def judge(self, ticket: NumberedTicket, reading: Reading, *, hold: bool = False) -> None:
        ticket.proven = reading.done
        super().judge(ticket, reading, hold=hold)


class LateNumbersCount(Tickets):
    """A number is used though it stood without an entry for so long that it counts as dead."""

    def _take_number(self, ticket: NumberedTicket) -> Steps[bool]:
        return (yield from _first_clock_only(super()._take_number(ticket)))


class SightsAreDatedEarly(Tickets):
    """What is seen of another counts from when it was asked for, not from when it was seen."""

    def look(self, name: str, head: Head, last: int) -> Steps[float]:
        return (yield from _first_clock_only(super().look(name, head, last)))


class ReleaseIsAnonymous(Tickets):
    """What stands in head does not say who moved it."""

    def _pass_on(self, name: str, head: Head, why: str) -> Steps[tuple[bool, Head]]:
        steps = super()._pass_on(name, head, why)
        operation = next(steps)
        try:
            while True:
                if operation[0] == "compare_set" and operation[1] == f"head/{name}" and b" " in operation[3]:
                    operation = (*operation[:3], operation[3].split(b" ")[0])
                    reply = yield operation
                    text = f"{reply.decode()} {why} {self.session}".encode()
                    operation = steps.send(text if reply == operation[3] else reply)
                else:
                    operation = steps.send((yield operation))
        except StopIteration as stop:
            moved, head = stop.value
            return moved, Head(head.number, b"%d" % head.number)


class NobodyIsRung(Tickets):
    """The lock is passed on without a bell."""

    def _pass_on(self, name: str, head: Head, why: str) -> Steps[tuple[bool, Head]]:
        target = b"%d %s %s" % (head.number + 1, why.encode(), self.session.encode())
        stands = yield "compare_set", f"head/{name}", head.text, target
        return stands == target, Head.parse(stands)


class TheDeadStay(Tickets):
    """Nobody looks at who is ahead."""

    def look(self, name: str, head: Head, last: int) -> Steps[float]:
        yield CLOCK
        self._sights[name] = {last: _tickets.Sight(None, None, 0.0)}
        return 1.0


class LeaversSayNothing(Tickets):
    """Who leaves just goes."""

    def leave(self, ticket: NumberedTicket) -> Steps[None]:
        yield CLOCK


class LateBellsStay(Tickets):
    """Who rings late does not take the bell away again."""

    def _pass_on(self, name: str, head: Head, why: str) -> Steps[tuple[bool, Head]]:
        steps, rung = super()._pass_on(name, head, why), False
        operation = next(steps)
        try:
            while True:
                reply = None if rung and operation[0] == "delete_key" else (yield operation)
                rung = rung or (operation[0:2] == ("compare_set", f"head/{name}") and b"?" in operation[3])
                operation = steps.send(reply)
        except StopIteration as stop:
            return stop.value


def _first_clock_only(steps: Steps[Any]) -> Steps[Any]:
    """The same steps with a clock that stands still."""
    operation, stands = next(steps), None
    try:
        while True:
            reply = yield operation
            if operation == CLOCK:
                stands = reply = reply if stands is None else stands
            operation = steps.send(reply)
    except StopIteration as stop:
        return stop.value


CRASH = World(clients=2, crashes=1, freezes=0, lapses=5, whole_hearts="ab", tidies_up=False)
FREEZE = World(clients=2, crashes=0, lapses=3, whole_hearts="ab", tidies_up=False)
# Where the harm lies in how two hearts meet, these come to it soonest.
MID_BEAT = replace(FREEZE, lapses=1, idle_lapses=1, faulty="a", faulty_in="beat", whole_hearts="")
MID_JOIN = replace(FREEZE, lapses=1, faulty="a", whole_hearts="a")
MID_LOOK = replace(
    FREEZE, lapses=1, idle_lapses=1, faulty="b", faulty_in="look", whole_hearts="a", thaws_mid_look=True
)
SLEEPER = replace(FREEZE, clients=3, faulty="b")

BROKEN = [
    (replace(FREEZE, believes_bells=True), "together|for ever"),
    (replace(MID_BEAT, tickets=OldBeatsCount), "together"),
    (replace(SLEEPER, tickets=SleepersAreBelieved), "together"),
    (replace(MID_JOIN, tickets=LateNumbersCount), "together"),
    (replace(FREEZE, tickets=ReleaseIsAnonymous), "another took"),
    (replace(CRASH, tickets=NobodyIsRung, ring_reaches_heart=False), "for ever"),
    (replace(CRASH, ring_reaches_heart=False), "for ever"),
    (replace(CRASH, tickets=TheDeadStay), "for ever"),
    (replace(FREEZE, tickets=LeaversSayNothing, gives_up=True, clients=3), "for ever"),
    (replace(FREEZE, tickets=LateBellsStay, freezes=0, tidies_up=True), "left behind"),
    pytest.param(replace(MID_LOOK, tickets=SightsAreDatedEarly), "together", marks=pytest.mark.chaos),
]


@pytest.mark.parametrize(
    ("world", "harm"), BROKEN, ids=lambda value: value.tickets.__name__ if isinstance(value, World) else value
)
def test_a_broken_rule_is_found_out(world: World, harm: str) -> None:
    with pytest.raises(Violation, match=harm):
        explore(world)
