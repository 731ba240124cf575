from __future__ import annotations

from math import prod

from hypothesis import given, settings
from hypothesis import strategies as st

from dprims import LayoutError, ParallelLayout

AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")


@st.composite
def layouts(draw: st.DrawFn, largest: int = 4096) -> ParallelLayout:
    """Any layout of up to `largest` ranks, in any order, with or without experts."""
    left, degrees = largest, {}
    for axis in draw(st.permutations(AXES)):
        degrees[axis] = draw(st.integers(1, min(left, 6)))
        left //= degrees[axis]
    etp = draw(st.sampled_from([1, degrees["tp"]]))
    borrowed = degrees["dp_shard"] * degrees["cp"] * (1 if etp == degrees["tp"] > 1 else degrees["tp"])
    ep = draw(st.sampled_from([size for size in range(1, borrowed + 1) if borrowed % size == 0]))
    order = draw(st.one_of(st.just(AXES), st.permutations(AXES)))
    options = {"world_size": prod(degrees.values()), **degrees, "order": tuple(order)}
    try:
        return ParallelLayout(**options, ep=ep, etp=etp)
    except LayoutError:  # an order can keep the ranks of one expert group apart
        return ParallelLayout(**options)


def ranks_of(layout: ParallelLayout) -> st.SearchStrategy[int]:
    return st.integers(0, layout.world_size - 1)


@given(layouts())
def test_every_name_partitions_the_ranks(layout: ParallelLayout) -> None:
    for name in layout.names:
        groups = layout.groups(name)
        assert sorted(rank for group in groups for rank in group) == list(range(layout.world_size))
        assert {len(group) for group in groups} == {layout.size(name)}
        assert list(groups) == sorted(groups)
        assert all(list(group) == sorted(group) for group in groups)
        assert layout.heads(name) == tuple(group[0] for group in groups)


@given(st.data(), layouts())
def test_a_rank_is_asked_as_the_groups_say(data: st.DataObject, layout: ParallelLayout) -> None:
    rank = data.draw(ranks_of(layout))
    for name in layout.names:
        (expected,) = (group for group in layout.groups(name) if rank in group)
        assert layout.group_of(rank, name) == expected
        assert layout.head_of(rank, name) == expected[0]
        assert expected[layout.index_in(rank, name)] == rank


@given(st.data(), layouts())
def test_a_group_differs_on_its_own_axes_alone(data: st.DataObject, layout: ParallelLayout) -> None:
    """The definition, by brute force over coordinates."""
    rank = data.draw(ranks_of(layout))
    own = layout.coordinates(rank)
    name = data.draw(st.sampled_from([name for name in layout.names if name not in ("ep", "etp", "efsdp")]))
    expected = [
        other
        for other in range(layout.world_size)
        if all(
            layout.coordinates(other)[axis] == own[axis] for axis in AXES if axis not in layout.axes_of(name)
        )
    ]
    assert list(layout.group_of(rank, name)) == expected


@given(st.data(), layouts())
def test_experts_divide_what_they_borrow(data: st.DataObject, layout: ParallelLayout) -> None:
    """The definition, by brute force: ep is the fast part of the borrowed ranks, counted in axis order."""
    if layout.ep == 1:
        return
    borrowed = layout.axes_of("ep")
    rank = data.draw(ranks_of(layout))
    own = layout.coordinates(rank)
    region = [
        other
        for other in range(layout.world_size)
        if all(layout.coordinates(other)[axis] == own[axis] for axis in AXES if axis not in borrowed)
    ]
    place = region.index(rank)
    first = place - place % layout.ep
    assert list(layout.group_of(rank, "ep")) == region[first : first + layout.ep]
    assert list(layout.group_of(rank, "efsdp")) == region[place % layout.ep :: layout.ep]
    assert layout.group_of(rank, "etp") == (layout.group_of(rank, "tp") if layout.etp > 1 else (rank,))
    (grid,) = (grid for grid in layout.grids("ep_tp") if any(rank in row for row in grid))
    assert [row[0] for row in grid] == list(layout.group_of(grid[0][0], "ep"))
    assert all(row == layout.group_of(row[0], "etp") for row in grid)


@given(st.data(), layouts())
def test_coordinates_invert(data: st.DataObject, layout: ParallelLayout) -> None:
    rank = data.draw(ranks_of(layout))
    coordinates = layout.coordinates(rank)
    assert layout.rank_at(**coordinates) == rank
    assert tuple(coordinates) == layout.order
    numbers = [coordinates[axis] for axis in layout.order]
    if rank + 1 < layout.world_size:
        assert numbers < [layout.coordinates(rank + 1)[axis] for axis in layout.order]


@given(layouts(largest=131072))
def test_json_returns_the_layout(layout: ParallelLayout) -> None:
    assert ParallelLayout.from_json(layout.to_json()) == layout
    assert ParallelLayout.from_json(layout.to_json().encode()) == layout
    assert hash(ParallelLayout.from_json(layout.to_json())) == hash(layout)


@given(layouts(largest=131072))
def test_one_degree_can_always_be_inferred(layout: ParallelLayout) -> None:
    for axis in AXES:
        degrees = {**layout.sizes, axis: -1}
        assert ParallelLayout(world_size=layout.world_size, **degrees).sizes[axis] == layout.sizes[axis]


@given(st.integers(1, 300), st.lists(st.integers(-3, 9), min_size=5, max_size=5))
def test_a_layout_fits_its_world_or_says_what_would(world_size: int, sizes: list[int]) -> None:
    degrees = dict(zip(AXES, sizes, strict=True))
    error = ""
    try:
        layout = ParallelLayout(world_size=world_size, **degrees)
    except LayoutError as raised:
        error = str(raised)
    if error:
        assert "\n" not in error
        assert "work" in error or "only one degree" in error
    else:
        assert prod(layout.sizes.values()) == world_size
        assert all(size == degrees[axis] for axis, size in layout.sizes.items() if degrees[axis] != -1)


@settings(max_examples=50)
@given(st.data(), layouts(largest=131072))
def test_every_layout_can_be_drawn(data: st.DataObject, layout: ParallelLayout) -> None:
    rank = data.draw(st.one_of(st.none(), ranks_of(layout)))
    group = data.draw(st.sampled_from(layout.names))
    assert str(layout.world_size) in layout.render("text", rank=rank, group=group)
    assert layout.render("svg", rank=rank, group=group).startswith("<svg")
