"""RefitMembership: renumbering, changes, differences, bytes."""

from __future__ import annotations

import json
import pickle
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import dprims
from dprims import BelowQuorum, EpochConflict, MembershipError, RefitMembership, RootExcluded
from dprims.membership import Epoch

CASES = json.loads((Path(__file__).parent / "cases" / "mesh_cases.json").read_text())["membership"]["cases"]


@pytest.fixture
def full() -> RefitMembership:
    """Trainers 0, 1; shards (2, 3), (4, 5), (6, 7)."""
    return RefitMembership.full(train_world_size=2, shard_sizes=(2, 2, 2))


# ---- renumbering ------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_survivors_are_renumbered_as_in_the_reference_table(case: dict[str, Any]) -> None:
    whole = RefitMembership.full(
        train_world_size=case["train_world_size"],
        shard_sizes=[case["workers_per_shard"]] * case["shard_count"],
    )
    expected = case["expect"]
    if "error" in expected:
        with pytest.raises(BelowQuorum, match="no shard survives"):
            whole.without(*case["absent"])
        return
    m = whole.without(*case["absent"]) if case["absent"] else whole
    assert m.world_size == expected["world_size"]
    assert list(m.train_ranks) == expected["train_ranks"]
    assert m.root == expected["root"]
    assert {str(shard): list(m.ranks_of(shard)) for shard in m.surviving_shards} == expected["shard_ranks"]


def test_a_dead_shard_leaves_and_the_next_one_moves_down(full: RefitMembership) -> None:
    m = full.without(1, reason="killed")
    assert m.surviving_shards == (0, 2)
    assert m.ranks_of(2) == (4, 5)
    assert [m.shard_of(rank) for rank in range(6)] == [None, None, 0, 0, 2, 2]
    assert list(m.absent) == [1]
    assert m.absent[1] == "killed"
    assert m.epoch == (0, 1)
    with pytest.raises(MembershipError, match=r"shard 1 is absent \(killed\)"):
        m.ranks_of(1)


def test_unequal_shards(full: RefitMembership) -> None:
    m = RefitMembership.full(train_world_size=1, shard_sizes=(1, 4, 2)).without(0)
    assert m.ranks_of(1) == (1, 2, 3, 4)
    assert m.ranks_of(2) == (5, 6)
    assert m.world_size == 7


def test_each_stage_group_is_its_head_and_all_generation_ranks() -> None:
    m = RefitMembership.full(train_world_size=4, shard_sizes=(2, 1, 2), stage_heads=(0, 2)).without(1)
    assert m.group_ranks(0) == (0, 4, 5, 6, 7)
    assert m.group_ranks(1) == (2, 4, 5, 6, 7)
    assert [m.group_rank(1, rank) for rank in m.group_ranks(1)] == [0, 1, 2, 3, 4]
    with pytest.raises(MembershipError, match="trainer rank 1 is not in the group of stage 0"):
        m.group_rank(0, 1)
    with pytest.raises(MembershipError, match="stage 2"):
        m.group_ranks(2)
    assert RefitMembership.full(train_world_size=3, shard_sizes=(1,)).stage_heads == (0, 1, 2)


def test_seats_do_not_move(full: RefitMembership) -> None:
    m = full.without(0)
    assert m.seats_of(2) == full.ranks_of(2) == (6, 7)
    assert [m.seat_of(rank) for rank in range(m.world_size)] == [0, 1, 4, 5, 6, 7]
    assert [m.rank_at(seat) for seat in range(8)] == [0, 1, None, None, 2, 3, 4, 5]
    with pytest.raises(MembershipError, match="seat 8"):
        m.rank_at(8)


# ---- changes ----------------------------------------------------------------------------------------


def test_trainers_cannot_leave(full: RefitMembership) -> None:
    with pytest.raises(RootExcluded, match=r"0\.\.1"):
        full.without(full.shard_of(1))
    with pytest.raises(RootExcluded):
        RefitMembership.full(train_world_size=0, shard_sizes=(1,))


def test_a_shard_that_does_not_exist_is_refused_with_those_that_do(full: RefitMembership) -> None:
    for call in (full.ranks_of, full.without, full.seats_of):
        for shard in (3, -1):
            with pytest.raises(MembershipError, match=rf"shard {shard} does not exist; there are 0\.\.2"):
                call(shard)
    with pytest.raises(MembershipError, match=r"rank 8 is not in 0\.\.7"):
        full.shard_of(8)


def test_a_returning_shard_has_a_new_incarnation(full: RefitMembership) -> None:
    m = full.without(1).readmit(1, incarnation=7)
    assert m.absent == {}
    assert m.incarnations == ((0, 0), (7, 7), (0, 0))
    assert m.incarnation_of(5) == 7
    assert m.readmit(1, incarnation=(7, 9)).incarnations[1] == (7, 9)
    with pytest.raises(MembershipError, match=r"\(6, 6\) is an older one"):
        m.without(1).readmit(1, incarnation=6)
    with pytest.raises(MembershipError, match="2 ranks"):
        m.readmit(1, incarnation=(8,))
    with pytest.raises(MembershipError, match="only generation ranks"):
        m.incarnation_of(0)


def test_what_changes_nothing_is_the_same_value(full: RefitMembership) -> None:
    m = full.without(1)
    assert m.without(1, reason="still") is m
    assert full.readmit(1, incarnation=0) is full


def test_epochs_grow_and_never_fall(full: RefitMembership) -> None:
    assert full.epoch == Epoch(0, 0)
    assert full.without(0).without(1).readmit(0, incarnation=1).epoch == Epoch(0, 3)
    assert full.at((4, 2)).without(0).epoch == Epoch(4, 3)
    with pytest.raises(EpochConflict, match=r"4\.2, 3\.9 is behind"):
        full.at((4, 2)).at((3, 9))
    assert Epoch(1, 9) < Epoch(2, 0) < Epoch(2, 1)
    assert Epoch.parse(str(Epoch(12, 3))) == Epoch(12, 3)
    for wrong in ("", "1", "1.", ".1", "1.x", "-1.2"):
        with pytest.raises(ValueError, match="epoch"):
            Epoch.parse(wrong)


def test_too_few_shards(full: RefitMembership) -> None:
    m = full.without(0, 2, reason="frozen")
    assert m.require(1) is m
    with pytest.raises(BelowQuorum, match=r"1 of 3 shards.*2 are needed.*0: frozen, 2: frozen"):
        m.require(2)
    with pytest.raises(BelowQuorum):
        m.without(1)


@pytest.mark.parametrize(
    "wrong",
    [
        {"shard_sizes": ()},
        {"shard_sizes": (1, 0)},
        {"stage_heads": ()},
        {"stage_heads": (0, 0)},
        {"stage_heads": (2,)},
        {"incarnations": (1,)},
        {"incarnations": (1, (1, 2, 3))},
    ],
)
def test_a_fleet_that_cannot_be_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(MembershipError):
        RefitMembership.full(**{"train_world_size": 2, "shard_sizes": (2, 2), **wrong})


# ---- comparing --------------------------------------------------------------------------------------


def test_diff_names_who_left_who_joined_and_who_moved(full: RefitMembership) -> None:
    less = full.without(1)
    away = less.diff(full)
    assert (away.left, away.joined, away.moved) == ((1,), (), {6: 4, 7: 5})
    assert away.needs_rebuild
    back = less.readmit(1, incarnation=7).diff(less)
    assert (back.left, back.joined, back.moved) == ((), (1,), {4: 6, 5: 7})
    replaced = full.readmit(1, incarnation=7).diff(full)
    assert (replaced.left, replaced.joined, replaced.moved) == ((1,), (1,), {})
    same = full.at((9, 9)).diff(full)
    assert not same.needs_rebuild
    with pytest.raises(MembershipError, match="different fleets"):
        full.diff(RefitMembership.full(train_world_size=2, shard_sizes=(2, 2)))


def test_should_rebuild_compares_shards_and_incarnations_not_epochs(full: RefitMembership) -> None:
    def rebuild(
        desired: RefitMembership | None, built: RefitMembership | None, *, force: bool = False
    ) -> bool:
        return dprims.should_rebuild(desired=desired, built=built, force=force)

    assert not rebuild(full.at((5, 5)), full)
    assert rebuild(full, full, force=True)
    assert rebuild(full.without(0), full)
    assert rebuild(full.readmit(0, incarnation=1), full)  # died and was back before anybody looked
    assert rebuild(full, None)
    assert not rebuild(None, full, force=True)
    assert not rebuild(None, None)


# ---- bytes ------------------------------------------------------------------------------------------


def test_bytes_are_canonical_and_anything_else_is_refused(full: RefitMembership) -> None:
    m = full.without(1, reason="räumlich").at((3, 4))
    data = m.to_bytes()
    assert RefitMembership.from_bytes(data) == m
    assert RefitMembership.from_bytes(data).to_bytes() == data
    newer = data.replace(b'"format":1', b'"format":2')
    with pytest.raises(MembershipError, match="format 2, expected 1"):
        RefitMembership.from_bytes(newer)
    document = json.loads(data)
    broken = [b"", b"{}", b"[]", b"3", b"\xff", data[:-1]]
    broken += [json.dumps({**document, key: value}).encode() for key in document for value in (None, "x", -1)]
    for wrong in broken:
        with pytest.raises(MembershipError):
            RefitMembership.from_bytes(wrong)


def test_it_is_a_value(full: RefitMembership) -> None:
    m = full.without(1)
    assert hash(m) == hash(full.without(1))
    assert m == full.without(1) != full
    assert pickle.loads(pickle.dumps(m)) == m
    with pytest.raises(AttributeError):
        m.epoch = Epoch(9, 9)  # type: ignore[misc]


# ---- laws -------------------------------------------------------------------------------------------


@st.composite
def histories(draw: st.DrawFn) -> list[RefitMembership]:
    """Shards that are lost and come back, at random."""
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=5))
    m = RefitMembership.full(train_world_size=draw(st.integers(1, 4)), shard_sizes=sizes)
    history = [m]
    for number in range(draw(st.integers(0, 12))):
        shard = draw(st.integers(0, len(sizes) - 1))
        if shard in m.absent or draw(st.booleans()):
            m = m.readmit(shard, incarnation=number + 1)
        elif len(m.surviving_shards) > 1:
            m = m.without(shard)
        history.append(m)
    return history


@given(histories())
def test_ranks_have_no_gap_and_trainers_keep_theirs(history: list[RefitMembership]) -> None:
    for m in history:
        ranks = [*m.train_ranks, *(rank for shard in m.surviving_shards for rank in m.ranks_of(shard))]
        assert ranks == list(range(m.world_size))
        assert list(m.train_ranks) == list(history[0].train_ranks)
        for shard in m.surviving_shards:
            assert {m.shard_of(rank) for rank in m.ranks_of(shard)} == {shard}
            assert [m.seat_of(rank) for rank in m.ranks_of(shard)] == list(m.seats_of(shard))
        assert [m.rank_at(m.seat_of(rank)) for rank in ranks] == ranks
        for stage in range(len(m.stage_heads)):
            assert [m.group_rank(stage, r) for r in m.group_ranks(stage)] == list(
                range(len(m.group_ranks(stage)))
            )


@given(histories())
def test_diff_applied_to_the_old_gives_the_new(history: list[RefitMembership]) -> None:
    for old, new in pairwise(history):
        change = new.diff(old)
        shards = (set(old.surviving_shards) - set(change.left)) | set(change.joined)
        assert shards == set(new.surviving_shards)
        for shard in set(old.surviving_shards) - set(change.left):
            assert tuple(change.moved.get(rank, rank) for rank in old.ranks_of(shard)) == new.ranks_of(shard)
        assert change.needs_rebuild == (new is not old) == (new.epoch > old.epoch)


@given(histories())
def test_bytes_round_trip(history: list[RefitMembership]) -> None:
    for m in history:
        assert RefitMembership.from_bytes(m.to_bytes()) == m


@given(histories(), st.randoms())
def test_the_order_of_losses_does_not_matter(history: list[RefitMembership], random: Any) -> None:
    m = history[-1]
    gone = list(m.absent)
    random.shuffle(gone)
    other = history[0]
    for shard in gone:
        other = other.without(shard)
    assert {s: other.ranks_of(s) for s in other.surviving_shards} == {
        s: m.ranks_of(s) for s in m.surviving_shards
    }


@given(histories())
def test_leaving_and_coming_back_is_where_it_started(history: list[RefitMembership]) -> None:
    m = history[-1]
    if len(m.surviving_shards) > 1:
        shard = m.surviving_shards[0]
        back = m.without(shard).readmit(shard, incarnation=m.incarnations[shard])
        assert back.at((9, 99)) == m.at((9, 99))


@pytest.mark.parametrize(
    ("name", "fleet"),
    [
        ("train_world_size", {"train_world_size": "2", "shard_sizes": (1,)}),
        ("shard_sizes", {"train_world_size": 1, "shard_sizes": 3}),
        ("shard_sizes", {"train_world_size": 1, "shard_sizes": ("a",)}),
        ("shard_sizes", {"train_world_size": 1, "shard_sizes": (True,)}),
        ("stage_heads", {"train_world_size": 1, "shard_sizes": (1,), "stage_heads": (0.0,)}),
    ],
)
def test_what_is_no_integer_is_named(name: str, fleet: dict[str, Any]) -> None:
    with pytest.raises(MembershipError, match=f"{name}: expected integers, got"):
        RefitMembership.full(**fleet)


def test_a_shard_that_is_no_integer_is_refused() -> None:
    with pytest.raises(MembershipError, match="shard 'x' does not exist"):
        RefitMembership.full(train_world_size=1, shard_sizes=(1, 1)).without("x")  # type: ignore[arg-type]
