"""A day of a large fleet on the real membership, health and protocol code, with a clock of its own.

    python tests/benchmarks/refit_simulation.py [--shards 1024] [--hours 24] [--sync-every 300]

No process, no socket, no tensor: the leader and every member are the state machines of the product, and what
happens between them takes the seconds that are written below. One shard fails each minute on average, at any
moment, also in the middle of a refit. Prints epochs, rebuilds, lost syncs and shares of time.
"""

from __future__ import annotations

import argparse
import heapq
import json
import random
import time
from collections import Counter, deque
from typing import Any

from dprims import RefitMembership
from dprims.health import FleetHealth, HealthPolicy, ShardState
from dprims.synchronizer import protocol as p

STEP_S = {
    "ask": 0.01,
    "build": 0.05,
    "recv": 5.0,
    "pause": 0.05,
    "commit": 0.05,
    "resume": 0.01,
    "rollback": 0.01,
}
"""How long the ranks take for a call, all of them at once."""
RESTART_S = 90.0
MINUTE, HOUR = 60.0, 3600.0


class Day:
    """The fleet, its leader and its clock."""

    def __init__(self, shards: int, seed: int) -> None:
        self.draw = random.Random(seed)
        self.now = 0.0
        self.shards = shards
        self.health = FleetHealth(shards, policy=HealthPolicy(max_deaths=8), clock=lambda: self.now)
        self.members = {seat: p.Member(sends=seat == 0) for seat in range(shards + 1)}
        self.entries = [0] * (shards + 1)
        self.cells: dict[tuple[Any, int], str] = {}
        self.last = 0
        self.counts: Counter[str] = Counter()
        self.downtime = 0.0
        self.refitting = 0.0
        self.events: list[tuple[float, str, int]] = []
        self.leader = p.Leader(RefitMembership.full(train_world_size=1, shard_sizes=(1,) * shards))
        for seat in self.members:
            self.join(seat)
        self.later(self.draw.expovariate(1 / MINUTE), "fail")
        self.drive(p.Elected(1, None, None, tuple(self.entries)))

    # -- what happens by itself -------------------------------------------------------------------------

    def later(self, seconds: float, what: str, shard: int = -1) -> None:
        heapq.heappush(self.events, (self.now + seconds, what, shard))

    def join(self, seat: int) -> None:
        self.last += 1
        member = self.members[seat]
        for event in (p.Started(), p.Joined(self.last), p.TermRead(self.leader.term)):
            member.handle(event)
        self.entries[seat] = self.last
        if seat:
            self.health.joined(seat - 1, self.last)

    def pass_time(self, seconds: float, *, refit: bool = False) -> list[int]:
        """Move the clock; the seats that died meanwhile."""
        until, died = self.now + seconds, []
        while self.events and self.events[0][0] <= until:
            then, what, shard = heapq.heappop(self.events)
            self._count(then - self.now, refit)
            self.now = then
            if what == "fail":
                died += self.fail()
            elif what == "restart" and self.health.state(shard) is ShardState.DEAD:
                pause = self.health.restart_in(shard) or 0.0
                if pause > 0:
                    self.later(pause, "restart", shard)
                elif self.health.restarting(shard):
                    self.later(RESTART_S, "up", shard)
            elif what == "up":
                self.join(shard + 1)
        self._count(until - self.now, refit)
        self.now = until
        return died

    def _count(self, seconds: float, refit: bool) -> None:
        serving = len(self.health.serving)
        self.downtime += seconds * (self.shards - serving)
        self.refitting += seconds * refit

    def fail(self) -> list[int]:
        self.later(self.draw.expovariate(1 / MINUTE), "fail")
        shard = self.draw.randrange(self.shards)
        if shard in self.health.absent:
            return []
        self.counts["failures"] += 1
        self.entries[shard + 1] = 0
        if self.health.died(shard, "its process ended") is ShardState.DEAD:
            self.later(0.0, "restart", shard)
        else:
            self.counts["retired"] += 1
        return [shard + 1]

    # -- refits -----------------------------------------------------------------------------------------

    def drive(self, event: Any) -> p.Finish:
        """One operation of the leader, to its end."""
        inbox = deque([event])
        finish = None
        while finish is None:
            actions = self.leader.handle(inbox.popleft())
            calls = [action for action in actions if isinstance(action, p.Call)]
            for action in actions:
                if isinstance(action, p.Finish):
                    finish = action
                elif not isinstance(action, p.Call):
                    inbox.append(self.at_backend(action))
            if calls and not self._stepping(calls):
                inbox.extend(self.make(calls))
            elif calls:
                inbox.extend(self.answers(calls))
        return finish

    def _stepping(self, calls: list[p.Call]) -> bool:
        """Later steps of a commit follow shard by shard, and take no more time than the first."""
        return calls[0].message.kind in ("commit", "resume")

    def make(self, calls: list[p.Call]) -> list[Any]:
        """Answer these calls once their time has passed, unless somebody dies meanwhile."""
        incarnation = {call.seat: call.message.incarnation for call in calls}
        died = self.pass_time(STEP_S[calls[0].message.kind], refit=True)
        gone = [p.Gone(seat, incarnation[seat], "its process ended") for seat in died if seat in incarnation]
        return [*gone, *self.answers(calls)]

    def answers(self, calls: list[p.Call]) -> list[Any]:
        found = []
        for call in calls:
            seat, message = call.seat, call.message
            if self.entries[seat] == message.incarnation:
                reply = self.ask(self.members[seat], message)
                found.append(p.Replied(seat, message, reply))
            else:
                found.append(p.Gone(seat, message.incarnation, "its process ended"))
        return found

    def ask(self, member: p.Member, message: p.Message) -> p.Reply:
        work = deque(member.handle(message))
        while work:
            action = work.popleft()
            if isinstance(action, p.Answer) and action.message == message:
                return action.reply
            if isinstance(action, p.Perform):
                digest = f"of {message.version.number}" if message.kind == "recv" else ""
                work.extend(member.handle(p.Performed(message, digest)))
        raise RuntimeError(f"{message} was not answered")

    def at_backend(self, action: Any) -> Any:
        if isinstance(action, p.SetCell):
            key = (action.epoch, action.number)
            return p.CellRead(*key, self.cells.setdefault(key, action.value))
        if isinstance(action, p.Condemn):
            self.counts["condemned"] += 1
            return p.Condemned(action.shard)
        return p.Fenced(True)

    def refit(self) -> None:
        """Sync, and after a failure once more, as ``refit`` does."""
        self.leader.handle(p.Stepped())
        for _ in range(5):
            self.counts["syncs"] += 1
            build = self.leader.build
            finish = self.drive(p.SyncRequested(tuple(self.entries)))
            self.counts["rebuilds"] += self.leader.build > build
            if finish.cause is None:
                for shard in self.leader.current:
                    if self.health.state(shard) in (ShardState.STALE, ShardState.HEALTHY):
                        entry = self.entries[shard + 1]
                        live = self.members[shard + 1].live
                        if entry and live is not None and live.number == self.leader.version.number:
                            self.health.refitted(shard, incarnation=entry, version=live.number)
                return
            self.counts["lost syncs"] += 1
        raise RuntimeError("five tries were not enough")


def simulate(shards: int, hours: float, sync_every_s: float, seed: int) -> dict[str, float]:
    began = time.process_time()
    day = Day(shards, seed)
    end = hours * HOUR
    while day.now < end:
        due = day.now + sync_every_s
        day.refit()
        serving = {day.members[shard + 1].live for shard in day.health.serving}
        if len(serving) > 1:
            raise RuntimeError(f"the fleet serves {serving}")
        day.pass_time(max(due - day.now, 0.0))
    return {
        "simulated hours": day.now / HOUR,
        "failures": day.counts["failures"],
        "versions": day.leader.version.number,
        "epochs": day.leader.build,
        "rebuilds": day.counts["rebuilds"],
        "syncs": day.counts["syncs"],
        "lost syncs": day.counts["lost syncs"],
        "condemned": day.counts["condemned"],
        "retired": day.counts["retired"],
        "share of time in refits": round(day.refitting / day.now, 5),
        "share of shard time not serving": round(day.downtime / (day.now * shards), 5),
        "CPU seconds that this took": round(time.process_time() - began, 1),
    }


def test_a_day_of_a_thousand_shards() -> None:
    found = simulate(1024, 24.0, 300.0, 1)
    show(found)
    assert found["CPU seconds that this took"] < 60
    assert found["versions"] >= 280
    assert found["share of shard time not serving"] < 0.01


def show(found: dict[str, float]) -> None:
    print()
    for name, value in found.items():
        print(f"{name:34} {value:>10g}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shards", type=int, default=1024)
    parser.add_argument("--hours", type=float, default=24.0)
    parser.add_argument("--sync-every", type=float, default=300.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    numbers = simulate(options.shards, options.hours, options.sync_every, options.seed)
    print(json.dumps(numbers)) if options.json else show(numbers)
