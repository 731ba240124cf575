"""Which shards are well enough to take part in refits and to serve: a pure state machine a shard.

::

    HEALTHY <-> SUSPECT          failures in a row, successes in a row
       any   -> DEAD             suspect for too long, or known to be dead
      DEAD   -> RESTARTING       a restart was ordered, within the budget and after the pause
      DEAD, RESTARTING -> STALE  a new incarnation is in the roster
      STALE  -> HEALTHY          a refit of that incarnation was recorded: there is no other way back
       any   -> RETIRED          the restart budget is spent, or somebody said so; for good

A SUSPECT shard still takes part and serves; a STALE one takes part, so that a refit can reach it, and does
not serve. Time comes from the clock that is passed in; nothing here waits, and nothing is thread-safe.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum

from .exceptions import MembershipError

__all__ = ["FleetHealth", "HealthPolicy", "ShardState"]


class ShardState(Enum):
    """How a shard is."""

    HEALTHY = "healthy"
    SUSPECT = "suspect"
    DEAD = "dead"
    RESTARTING = "restarting"
    STALE = "stale"
    RETIRED = "retired"


_ABSENT = {ShardState.DEAD, ShardState.RESTARTING, ShardState.RETIRED}
_SERVING = {ShardState.HEALTHY, ShardState.SUSPECT}


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthPolicy:
    """When a shard changes state. Times are in seconds of the clock that the fleet was given."""

    suspect_after: int = 3
    """Failures in a row that make a healthy shard suspect."""
    trust_after: int = 2
    """Successes in a row that make a suspect shard healthy again."""
    suspect_s: float = 30.0
    """How long a shard may be suspect before it counts as dead."""
    max_deaths: int = 5
    """Deaths within ``window_s`` after which a shard is not restarted any more, but retired."""
    window_s: float = 3600.0
    """How long a death is remembered."""
    backoff_s: float = 1.0
    """Pause before the second restart within the window; it doubles with each further death."""

    def __post_init__(self) -> None:
        for name in ("suspect_after", "trust_after", "max_deaths"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, expected at least 1")
        for name in ("suspect_s", "window_s", "backoff_s"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} is {getattr(self, name)}, expected seconds >= 0")


@dataclass(slots=True)
class _Shard:
    state: ShardState
    since: float
    why: str = ""
    incarnation: int = 0
    version: int = 0
    failures: int = 0
    successes: int = 0
    deaths: list[float] = field(default_factory=list)


class FleetHealth:
    """The health of every shard of a fleet; all start STALE, since nothing was sent to them yet.

    ``clock`` returns seconds that never go back, as ``time.monotonic`` does.

    Each method that reports something returns the state that the shard has after it, and raises
    MembershipError for a shard that does not exist.
    """

    def __init__(
        self, shards: int, *, clock: Callable[[], float], policy: HealthPolicy | None = None
    ) -> None:
        if shards < 1:
            raise MembershipError(f"a fleet has at least one shard, got {shards}")
        self.policy = policy or HealthPolicy()
        self._clock = clock
        self._shards = [_Shard(ShardState.STALE, clock(), "new") for _ in range(shards)]

    # ---- reading ----------------------------------------------------------------------------------

    def state(self, shard: int) -> ShardState:
        """Return how a shard is now; a shard that was suspect for too long is dead."""
        one = self._known(shard)
        if one.state is ShardState.SUSPECT and self._clock() - one.since >= self.policy.suspect_s:
            self._die(one, f"suspect for {self.policy.suspect_s} s: {one.why}")
        return one.state

    def why(self, shard: int) -> str:
        """Return what brought the shard into its state."""
        self.state(shard)
        return self._known(shard).why

    def version(self, shard: int) -> int:
        """Return the number of the version that was last recorded for a shard, 0 for none."""
        return self._known(shard).version

    @property
    def absent(self) -> dict[int, str]:
        """The shards that take no part in refits, with the reason of each."""
        return {shard: self.why(shard) for shard in range(len(self._shards)) if self.state(shard) in _ABSENT}

    @property
    def serving(self) -> tuple[int, ...]:
        """The shards that requests may go to."""
        return tuple(shard for shard in range(len(self._shards)) if self.state(shard) in _SERVING)

    def restart_in(self, shard: int) -> float | None:
        """Return the seconds until a dead shard may be restarted (0: now); None when it is not dead."""
        if self.state(shard) is not ShardState.DEAD:
            return None
        one = self._known(shard)
        pause = 0.0 if len(one.deaths) < 2 else self.policy.backoff_s * 2.0 ** (len(one.deaths) - 2)
        return max(0.0, one.since + pause - self._clock())

    # ---- reports ----------------------------------------------------------------------------------

    def succeeded(self, shard: int) -> ShardState:
        """A probe or request of this shard succeeded. It cures suspicion, never death."""
        one = self._known(shard)
        self.state(shard)
        one.failures, one.successes = 0, one.successes + 1
        if one.state is ShardState.SUSPECT and one.successes >= self.policy.trust_after:
            self._move(one, ShardState.HEALTHY, f"{one.successes} successes in a row")
        return one.state

    def failed(self, shard: int, why: str) -> ShardState:
        """A probe or request of this shard failed, which may be the network's fault or a slow moment's."""
        one = self._known(shard)
        self.state(shard)
        one.failures, one.successes = one.failures + 1, 0
        if one.state is ShardState.HEALTHY and one.failures >= self.policy.suspect_after:
            self._move(one, ShardState.SUSPECT, f"{one.failures} failures in a row: {why}")
        return one.state

    def died(self, shard: int, why: str) -> ShardState:
        """This shard surely serves no more: a process ended, a roster entry lapsed, it was condemned.

        Once too many deaths fall into the window the shard is retired instead.
        """
        one = self._known(shard)
        if one.state not in (ShardState.DEAD, ShardState.RETIRED):
            self._die(one, why)
        return one.state

    def restarting(self, shard: int) -> bool:
        """A restart is wanted: True when it may go ahead, False before its pause is over.

        MembershipError unless the shard is dead.
        """
        pause = self.restart_in(shard)
        if pause is None:
            raise MembershipError(f"shard {shard} is {self.state(shard).value}, only a dead one is restarted")
        if pause > 0:
            return False
        self._move(self._known(shard), ShardState.RESTARTING, "restarting")
        return True

    def joined(self, shard: int, incarnation: int) -> ShardState:
        """A process of this shard is in the roster; one of a new incarnation is stale until it is refitted.

        An incarnation that is known already, or lower, changes nothing: it is late news.
        """
        one = self._known(shard)
        if incarnation > one.incarnation and self.state(shard) is not ShardState.RETIRED:
            one.incarnation = incarnation
            if one.state in _SERVING:  # it was restarted before anybody saw it die
                self._die(one, f"replaced by incarnation {incarnation}")
            if one.state is not ShardState.RETIRED:
                self._move(one, ShardState.STALE, f"incarnation {incarnation} has no weights yet")
        return one.state

    def refitted(self, shard: int, *, incarnation: int, version: int) -> ShardState:
        """A refit of this incarnation to this version was committed: the only way back to HEALTHY.

        MembershipError for a shard that took no part, another incarnation, or a version that goes back.
        """
        one = self._known(shard)
        if self.state(shard) in _ABSENT:
            raise MembershipError(f"shard {shard} is {one.state.value} ({one.why}): it took part in no refit")
        if incarnation != one.incarnation:
            raise MembershipError(
                f"shard {shard} is incarnation {one.incarnation}, the refit was of {incarnation}"
            )
        if version < one.version:
            raise MembershipError(f"shard {shard} has version {one.version}, it cannot go back to {version}")
        one.version = version
        if one.state is ShardState.STALE:
            one.failures = one.successes = 0
            self._move(one, ShardState.HEALTHY, f"refitted to version {version}")
        return one.state

    def retire(self, shard: int, why: str = "retired") -> ShardState:
        """Take this shard out for good."""
        one = self._known(shard)
        if one.state is not ShardState.RETIRED:
            self._move(one, ShardState.RETIRED, why)
        return one.state

    # ---- inside -----------------------------------------------------------------------------------

    def _known(self, shard: int) -> _Shard:
        if not 0 <= shard < len(self._shards):
            raise MembershipError(f"shard {shard} does not exist; there are 0..{len(self._shards) - 1}")
        return self._shards[shard]

    def _move(self, one: _Shard, state: ShardState, why: str) -> None:
        one.state, one.since, one.why = state, self._clock(), why

    def _die(self, one: _Shard, why: str) -> None:
        now = self._clock()
        one.deaths = [then for then in one.deaths if now - then < self.policy.window_s] + [now]
        if len(one.deaths) >= self.policy.max_deaths:
            self._move(
                one,
                ShardState.RETIRED,
                f"{len(one.deaths)} deaths within {self.policy.window_s} s, the last: {why}",
            )
        else:
            self._move(one, ShardState.DEAD, why)
