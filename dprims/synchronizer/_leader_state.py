"""What a leader knows, and the few things that it does to a shard; the course of events is in ``_leader``."""

from __future__ import annotations

from typing import Any, ClassVar, Literal, TypeVar

from dprims.exceptions import RefitError
from dprims.membership import Epoch, RefitMembership

from ._messages import (
    Call,
    Cause,
    Condemn,
    Finish,
    Holding,
    Kind,
    LeaderAction,
    Message,
    Version,
)

Goal = Literal["recover", "sync", "only", "build"]
_State = TypeVar("_State", bound="LeaderState")
NOTHING = Version(0)


class LeaderState:
    """The state of a :class:`~dprims.synchronizer.protocol.Leader`, which can be taken and restored."""

    _STATE: ClassVar = """
        phase goal term build version top unused roster gone built current excluded stale stepped calls
        awaited holdings outcomes plan verdicts digests target members rebuilt cause
    """.split()  # noqa: SIM905

    def __init__(self, fleet: RefitMembership, *, min_shards: int = 1) -> None:
        self.fleet = fleet
        self.min_shards = min_shards
        self.trainers = tuple(fleet.train_ranks)
        self.seats = tuple(fleet.seats_of(shard) for shard in range(len(fleet.shard_sizes)))
        self._shard_at = {seat: shard for shard, seats in enumerate(self.seats) for seat in seats}
        nobody = (0,) * (len(self.trainers) + len(self._shard_at))

        self.phase = "off"
        self.goal: Goal = "recover"
        self.term = 0
        self.build = 0
        self.version = NOTHING  # what the fleet serves, as far as this leader decided or found out
        self.top = 0  # the highest number that was ever reserved
        self.unused = False  # top is ours, and nobody has committed it or ever will
        self.roster = nobody  # the incarnation of each seat that we deal with, 0: none
        self.gone = nobody  # the highest incarnation of each seat that surely serves no more
        self.built: tuple[int, ...] | None = None  # the incarnations in the groups, 0: not in
        self.current: frozenset[int] = frozenset()  # shards that serve self.version
        self.excluded: frozenset[int] = frozenset()  # shards that the user wants out
        self.stale = True
        self.stepped = True  # the trainers' weights may differ from self.version
        self._out: list[LeaderAction] = []
        self._clear()

    def _clear(self) -> None:
        """Forget what belongs to one operation."""
        self.calls: dict[int, Message] = {}  # the call that each seat owes an answer to
        self.awaited: frozenset[tuple[object, ...]] = frozenset()  # answers of the backend that are owed
        self.holdings: dict[int, Holding] = {}
        self.outcomes: dict[tuple[Epoch, int], str] = {}
        self.plan: dict[int, tuple[Kind, ...]] = {}  # what each shard has still to do, step by step
        self.verdicts: dict[int, Version] = {}  # the version that these steps are about
        self.digests: frozenset[str] = frozenset()
        self.target = NOTHING
        self.members: tuple[int, ...] = ()  # the shards that take part
        self.rebuilt = False
        self.cause: Cause | None = None

    @property
    def epoch(self) -> Epoch:
        """The epoch of the newest build, or (term, 0) before the first."""
        return Epoch(self.term, self.build)

    @property
    def membership(self) -> RefitMembership:
        """Who takes part in the operation that runs (RefitError while none does), at its epoch."""
        if not self.members:
            raise RefitError(f"no refit runs at epoch {self.epoch}: phase {self.phase!r}")
        return RefitMembership(
            train_world_size=self.fleet.train_world_size,
            shard_sizes=self.fleet.shard_sizes,
            stage_heads=self.fleet.stage_heads,
            incarnations=tuple(tuple(self.roster[seat] for seat in seats) for seats in self.seats),
            departures=tuple(
                (shard, self._reason(shard)) for shard in range(len(self.seats)) if shard not in self.members
            ),
            epoch=self.epoch,
        )

    def snapshot(self) -> tuple[Any, ...]:
        """Return the whole state as a hashable value."""
        return tuple(
            tuple(sorted(value.items())) if isinstance(value, dict) else value
            for value in (getattr(self, name) for name in self._STATE)
        )

    def restore(self: _State, snapshot: tuple[Any, ...]) -> _State:
        """Take over a state that :meth:`snapshot` returned for the same fleet; returns itself."""
        for name, value in zip(self._STATE, snapshot, strict=True):
            setattr(self, name, dict(value) if isinstance(getattr(self, name), dict) else value)
        return self

    # ---- who is in --------------------------------------------------------------------------------

    def _complete(self, shard: int) -> bool:
        return all(self.roster[seat] for seat in self.seats[shard])

    def _wanted(self) -> tuple[int, ...]:
        return tuple(
            shard for shard in range(len(self.seats)) if self._complete(shard) and shard not in self.excluded
        )

    def _incarnations(self) -> tuple[int, ...]:
        """The members by incarnation: what is compared with ``built``."""
        seats = {*self.trainers, *(seat for shard in self.members for seat in self.seats[shard])}
        return tuple(inc if seat in seats else 0 for seat, inc in enumerate(self.roster))

    def _participants(self) -> list[int]:
        return [seat for seat, incarnation in enumerate(self._incarnations()) if incarnation]

    def _all_took_part(self) -> bool:
        """Whether nobody in the roster can hold what an earlier operation had staged."""
        alive = {
            seat
            for seat, incarnation in enumerate(self.roster)
            if incarnation and incarnation > self.gone[seat]
        }
        return alive.issubset(self._participants())

    def _reason(self, shard: int) -> str:
        if shard in self.excluded:
            return "excluded"
        return "not in the roster" if not self._complete(shard) else "not addressed"

    # ---- owing and owed ---------------------------------------------------------------------------

    def _call(self, seat: int, kind: Kind, epoch: Epoch, version: Version) -> None:
        message = Message(kind, epoch, version, self.roster[seat])
        self.calls[seat] = message
        self._out.append(Call(seat, message))

    def _await(self, what: tuple[object, ...], action: LeaderAction) -> None:
        self.awaited |= {what}
        self._out.append(action)

    def _step(self, shard: int) -> None:
        """Have all ranks of a shard do its next step, once all have done the one before."""
        seats = self.seats[shard]
        if any(seat in self.calls for seat in seats):
            return
        if not self.plan[shard]:
            del self.plan[shard]
            if self.verdicts[shard] == self.version:
                self.current |= {shard}
            return
        kind, *rest = self.plan[shard]
        self.plan[shard] = tuple(rest)
        for seat in seats:
            self._call(seat, kind, self.epoch, self.verdicts[shard])

    def _condemn(self, shard: int) -> None:
        """Fence a shard that may still serve: it counts as absent only once its leases have passed."""
        if ("condemned", shard) in self.awaited:
            return
        self._leave_out(shard)
        entries = []
        for seat in self.seats[shard]:
            self.calls.pop(seat, None)
            if self.roster[seat] > self.gone[seat]:
                entries.append((seat, self.roster[seat]))
        self._await(("condemned", shard), Condemn(shard, tuple(entries)))

    def _leave_out(self, shard: int) -> None:
        """Go on without a shard."""
        self.current -= {shard}
        stepping = self.plan.pop(shard, None) is not None
        for seat in self.seats[shard]:
            self.holdings.pop(seat, None)
            if stepping:
                self.calls.pop(seat, None)

    def _finish(self, cause: Cause | None) -> None:
        self.phase = "idle"
        if cause and self.goal == "sync":
            self.stale = True
        forget = cause is None and self.goal == "sync" and self._all_took_part()
        self._out.append(Finish(self.goal, cause, self.rebuilt and cause is None, forget))
        self._clear()

    def _stop(self, cause: Cause) -> None:
        if self.phase != "idle":
            self._out.append(Finish(self.goal, cause))
        self._clear()
        self.built, self.current = None, frozenset()
        self.phase, self.stale, self.cause = "stopped", True, cause
