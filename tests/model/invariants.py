"""What must hold in every state, and in every step between two."""

from __future__ import annotations

from typing import Any

from dprims.membership import Epoch
from dprims.synchronizer.protocol import (
    COMMIT,
    Leader,
    Version,
)

from .parts import (
    DOWN,
    UP,
    Violation,
    Work,
)


class Invariants:
    """The part of World that judges: raises Violation, with the numbers of ``docs/protocol.md``."""

    def serving(self, work: Work, shard: int) -> set[Version]:
        """The versions that the ranks of a shard serve; empty unless all of them may."""
        found = set()
        for seat in self.shards[shard]:
            rank = work.ranks[seat]
            member = self.members.views[rank.machine]
            if rank.process != UP or not member.may_serve(lease_valid=rank.lease):
                return set()
            found.add(member.live)
        return found

    def check(self, work: Work) -> None:
        newest = self.leaders.views[work.bosses[-1].machine] if work.bosses else None
        idle = newest is not None and work.bosses[-1].process == UP and newest.phase == "idle"
        served = list(work.served)
        for shard in range(len(self.shards)):
            versions = self.serving(work, shard)
            if not versions:
                continue
            if len(versions) > 1:
                raise Violation(f"I1: shard {shard} serves {sorted(versions)}")
            version = versions.pop()
            if idle and version != newest.version:
                raise Violation(
                    f"I3: leader {newest.term} is idle at {newest.version}, shard {shard} serves {version}"
                )
            for other, highest in enumerate(served):
                if highest and highest.number == version.number and highest != version:
                    raise Violation(f"I7: shard {shard} serves {version}, shard {other} served {highest}")
            highest = served[shard]
            if highest and highest.number > version.number:
                raise Violation(f"I6: shard {shard} serves {version} after {highest}")
            served[shard] = version
        work.served = tuple(served)

    def check_success(self, work: Work, term: int) -> None:
        for later, boss in enumerate(work.bosses[term:], term + 1):
            if boss.recovered:
                raise Violation(f"I3: leader {term} succeeded after leader {later} had recovered")

    def check_forgotten(self, work: Work, term: int, leader: Leader) -> None:
        """Who is in the roster holds nothing staged whose cell this leader deletes now."""
        newest = leader.epoch, leader.version.number
        for seat, rank in enumerate(work.ranks):
            member = self.table(seat).views[rank.machine]
            if rank.process == DOWN or not 0 < member.incarnation == work.backend.roster[seat]:
                continue
            staged = member.staged
            if staged and staged.epoch.term <= term and (staged.epoch, staged.version.number) != newest:
                raise Violation(f"I9: leader {term} forgets the cell of {staged}, which seat {seat} holds")

    def check_record(self, term: int, name: str, stands: Any, version: Version) -> None:
        if stands and stands[1] and stands[1].number > version.number:
            raise Violation(f"I8: leader {term} turns {name} {stands} back to {version}")

    def check_outcome(self, work: Work, cell: tuple[Epoch, int], value: str) -> None:
        if work.cells[cell] != value:
            raise Violation(f"I2: {cell} is {work.cells[cell]!r} for one and {value!r} for another")

    def check_committed(self, work: Work, seat: int, staged: Any) -> None:
        stands = work.cells.get((staged.epoch, staged.version.number))
        if stands != COMMIT:
            raise Violation(f"I2: seat {seat} committed {staged}, decided was {stands!r}")

    def check_rolled_back(self, work: Work, seat: int, staged: Any) -> None:
        stands = work.cells.get((staged.epoch, staged.version.number))
        if stands is None or stands == COMMIT:
            raise Violation(f"I2: seat {seat} dropped {staged}, decided was {stands!r}")

    def idle(self, key: tuple[int, ...]) -> bool:
        boss = self.open(key).bosses[-1]
        return boss.process == UP and self.leaders.views[boss.machine].phase == "idle"

    def settled(self, key: tuple[int, ...]) -> bool:
        """Whether the newest leader has nothing left to do, and all shards that are wanted serve."""
        work = self.open(key)
        boss = work.bosses[-1]
        leader = self.leaders.views[boss.machine]
        return (
            boss.process == UP
            and leader.phase == "idle"
            and not leader.stale
            and all(
                shard in leader.excluded or self.serving(work, shard) == {leader.version}
                for shard in range(len(self.shards))
            )
        )
