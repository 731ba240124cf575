"""The model checker finds nothing wrong with the protocol, and something with every broken rule."""

from __future__ import annotations

import pytest

from .explore import Result, Stuck, explore
from .mutations import MUTATIONS, Mutation
from .parts import FAULTS, Config, Violation
from .world import World

pytestmark = pytest.mark.slow

# Complete searches, together well under a minute: configuration, and how many states it has at least.
BRIEF = {
    "two ranks": (Config(shards=(2,)), 20_000),
    "two shards": (Config(shards=(1, 1)), 20_000),
    "answers on their way": (Config(shards=(1,), eager=False), 2_000),
    "the first sync": (Config(shards=(1, 1), fresh=True, split=False, watch=False), 10_000),
    "a trainer that fails": (Config(shards=(1,), trainers=1), 5_000),
    "two faults": (
        Config(
            shards=(1,), faults=2, kinds=frozenset({"leader crash", "crash", "freeze", "lose"}), split=False
        ),
        20_000,
    ),
    "the trainers step": (
        Config(shards=(1, 1), steps=1, kinds=frozenset({"crash", "engine", "leader crash"})),
        2_000,
    ),
}

# Searches of minutes each; those with a limit are cut there and prove nothing beyond it.
DEEP = {
    "two shards of two and one": (Config(shards=(2, 1)), None),
    "two faults": (Config(shards=(1,), faults=2), None),
    "a shard is left out by the user": (Config(shards=(1, 1), wishes=1), None),
    "the trainers step": (Config(shards=(1, 1), steps=1), None),
    "answers on their way": (Config(shards=(1, 1), eager=False), None),
    "a trainer that fails": (Config(shards=(1, 1), trainers=1), None),
    "two shards of two": (Config(shards=(2, 2), split=False, watch=False), 1_000_000),
    "two shards, two faults": (Config(shards=(1, 1), faults=2, split=False, watch=False), 1_000_000),
    "two ranks, two faults": (Config(shards=(2,), faults=2, split=False, watch=False), 1_000_000),
    "three faults": (Config(shards=(1,), faults=3, split=False, watch=False), 1_000_000),
}


def _report(name: str, result: Result) -> None:
    print(
        f"{name}: {result.states} states, {result.edges} steps, {result.settled} settled, "
        f"{'complete' if result.complete else 'cut'}, {result.seconds:.1f} s"
    )


@pytest.mark.parametrize("name", BRIEF)
def test_no_reachable_state_breaks_an_invariant(name: str) -> None:
    config, least = BRIEF[name]
    result = explore(World(config))
    _report(name, result)
    assert result.complete
    assert result.states >= least, "the model has lost behaviour"
    assert result.settled


@pytest.mark.chaos
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", DEEP)
def test_no_state_reached_in_a_long_search_breaks_an_invariant(name: str) -> None:
    config, limit = DEEP[name]
    result = explore(World(config), limit=limit)
    _report(name, result)
    assert result.complete or result.states > (limit or 0)


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.world.__name__)
def test_a_broken_rule_is_found(mutation: Mutation) -> None:
    with pytest.raises((Violation, Stuck)) as found:
        explore(mutation.world(mutation.config), limit=100_000)
    print(found.value)


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.world.__name__)
def test_it_is_the_broken_rule_that_is_found(mutation: Mutation) -> None:
    """The same search finds nothing when the rule is kept (as far as it is carried here)."""
    explore(World(mutation.config), limit=3_000)


def test_every_kind_of_fault_happens() -> None:
    for kind in sorted(FAULTS):
        world = World(Config(shards=(1,), kinds=frozenset({kind})))
        assert explore(world).states > explore(World(Config(shards=(1,), faults=0))).states, kind
