"""Shard health: every way between the states, and the ways that do not exist."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from dprims.exceptions import MembershipError
from dprims.health import FleetHealth, HealthPolicy, ShardState

S = ShardState


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def fleet(clock: Clock) -> FleetHealth:
    """Two shards, refitted to version 1 under incarnations 11 and 12."""
    fleet = FleetHealth(2, clock=clock, policy=HealthPolicy(max_deaths=4, backoff_s=2.0))
    for shard in range(2):
        fleet.joined(shard, 11 + shard)
        fleet.refitted(shard, incarnation=11 + shard, version=1)
    return fleet


def test_a_new_fleet_is_stale_and_serves_after_its_first_refit(clock: Clock) -> None:
    fleet = FleetHealth(2, clock=clock)
    assert fleet.serving == ()
    assert fleet.absent == {}
    fleet.joined(0, 5)
    assert fleet.refitted(0, incarnation=5, version=1) is S.HEALTHY
    assert fleet.serving == (0,)


def test_failures_in_a_row_make_suspect_and_successes_in_a_row_cure_it(fleet: FleetHealth) -> None:
    assert [fleet.failed(0, "slow") for _ in range(2)] == [S.HEALTHY, S.HEALTHY]
    assert fleet.succeeded(0) is S.HEALTHY
    assert [fleet.failed(0, "slow") for _ in range(3)] == [S.HEALTHY, S.HEALTHY, S.SUSPECT]
    assert fleet.serving == (0, 1)
    assert fleet.succeeded(0) is S.SUSPECT
    assert fleet.failed(0, "slow") is S.SUSPECT
    assert [fleet.succeeded(0), fleet.succeeded(0)] == [S.SUSPECT, S.HEALTHY]


def test_a_shard_that_stays_suspect_is_dead(fleet: FleetHealth, clock: Clock) -> None:
    for _ in range(3):
        fleet.failed(0, "no answer")
    clock.now += 29.9
    assert fleet.state(0) is S.SUSPECT
    clock.now += 0.1
    assert fleet.state(0) is S.DEAD
    assert "no answer" in fleet.absent[0]


def test_only_a_recorded_refit_of_the_new_incarnation_leads_back(fleet: FleetHealth) -> None:
    fleet.died(0, "killed")
    assert fleet.succeeded(0) is S.DEAD
    with pytest.raises(MembershipError, match=r"dead.*killed"):
        fleet.refitted(0, incarnation=11, version=2)
    assert fleet.joined(0, 11) is S.DEAD  # news of the process that died
    assert fleet.restarting(0)
    assert fleet.absent == {0: "restarting"}
    assert fleet.joined(0, 13) is S.STALE
    assert fleet.absent == {}
    assert fleet.serving == (1,)
    with pytest.raises(MembershipError, match="incarnation 13"):
        fleet.refitted(0, incarnation=11, version=2)
    assert fleet.refitted(0, incarnation=13, version=2) is S.HEALTHY
    assert fleet.version(0) == 2


def test_a_shard_replaced_before_anybody_saw_it_die_has_died(fleet: FleetHealth) -> None:
    assert fleet.joined(0, 13) is S.STALE
    assert fleet.serving == (1,)
    fleet.died(0, "again")
    assert fleet.restart_in(0) == 2.0  # the second death


def test_restarts_pause_longer_with_each_death_and_the_budget_ends_them(
    fleet: FleetHealth, clock: Clock
) -> None:
    pauses = []
    for incarnation in (21, 22, 23):
        fleet.died(0, "flapping")
        pauses.append(fleet.restart_in(0))
        if pauses[-1]:
            assert not fleet.restarting(0)
        clock.now += pauses[-1]
        assert fleet.restarting(0)
        fleet.joined(0, incarnation)
        fleet.refitted(0, incarnation=incarnation, version=2)
    assert pauses == [0.0, 2.0, 4.0]
    assert fleet.died(0, "flapping") is S.RETIRED
    assert "4 deaths" in fleet.why(0)
    assert fleet.joined(0, 24) is S.RETIRED
    with pytest.raises(MembershipError, match="retired"):
        fleet.restarting(0)


def test_deaths_are_forgotten_after_the_window(fleet: FleetHealth, clock: Clock) -> None:
    for incarnation in range(21, 31):
        fleet.died(0, "once an hour")
        assert fleet.restart_in(0) == 0.0
        assert fleet.restarting(0)
        fleet.joined(0, incarnation)
        clock.now += 3600.0
    assert fleet.state(0) is S.STALE


def test_versions_do_not_go_back(fleet: FleetHealth) -> None:
    fleet.refitted(0, incarnation=11, version=5)
    with pytest.raises(MembershipError, match="version 5"):
        fleet.refitted(0, incarnation=11, version=4)


@pytest.mark.parametrize("shard", [-1, 2])
def test_an_unknown_shard_is_named(fleet: FleetHealth, shard: int) -> None:
    with pytest.raises(MembershipError, match=rf"shard {shard} .*0\.\.1"):
        fleet.died(shard, "?")


@pytest.mark.parametrize("wrong", [{"suspect_after": 0}, {"max_deaths": 0}, {"window_s": -1.0}])
def test_a_policy_that_cannot_work_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        HealthPolicy(**wrong)  # type: ignore[arg-type]


class AnyOrder(RuleBasedStateMachine):
    """Reports in any order: who serves was refitted under the incarnation that it has."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        self.fleet = FleetHealth(1, clock=self.clock, policy=HealthPolicy(max_deaths=4, window_s=50.0))
        self.incarnation = 0
        self.refitted: set[int] = set()
        self.before = S.STALE

    @rule(seconds=st.sampled_from([0.5, 31.0, 60.0]))
    def time_passes(self, seconds: float) -> None:
        self.clock.now += seconds

    @rule()
    def fails(self) -> None:
        self.fleet.failed(0, "x")

    @rule()
    def succeeds(self) -> None:
        self.fleet.succeeded(0)

    @rule()
    def dies(self) -> None:
        self.fleet.died(0, "x")

    @precondition(lambda self: self.fleet.state(0) is S.DEAD)
    @rule()
    def restarts(self) -> None:
        self.fleet.restarting(0)

    @rule(new=st.booleans())
    def joins(self, new: bool) -> None:
        self.incarnation += new
        self.fleet.joined(0, self.incarnation)

    @rule()
    def is_refitted(self) -> None:
        try:
            self.fleet.refitted(0, incarnation=self.incarnation, version=1)
        except MembershipError:
            return
        self.refitted.add(self.incarnation)

    @invariant()
    def serves_only_what_was_refitted(self) -> None:
        state = self.fleet.state(0)
        if state in (S.HEALTHY, S.SUSPECT):
            assert self.incarnation in self.refitted
        if self.before in (S.DEAD, S.RESTARTING):
            assert state not in (S.HEALTHY, S.SUSPECT)
        if self.before is S.RETIRED:
            assert state is S.RETIRED
        self.before = state


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
