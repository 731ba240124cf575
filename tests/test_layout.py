from __future__ import annotations

import copy
import json
import pickle
import re
import subprocess
import sys
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from dprims import LayoutError, ParallelLayout

CASES = json.loads((Path(__file__).parent / "cases" / "mesh_cases.json").read_text())
DEFAULT_ORDER = ("pp", "dp_replicate", "dp_shard", "cp", "tp")


def layout_of(case: dict[str, Any]) -> ParallelLayout:
    return ParallelLayout(world_size=case["world_size"], **case["dims"])


def as_lists(value: Any) -> Any:
    return json.loads(json.dumps(value))


by_name = pytest.mark.parametrize("case", CASES["layouts"], ids=lambda case: case["name"])


@by_name
def test_groups_are_those_that_two_other_frameworks_make(case: dict[str, Any]) -> None:
    layout = layout_of(case)
    for name, expected in case["groups"].items():
        found = layout.grids(name) if name == "ep_tp" else layout.groups(name)
        assert as_lists(found) == expected, name
    assert set(layout.names) == case["groups"].keys() - {"ep_tp"}


@by_name
def test_rules_of_ranks(case: dict[str, Any]) -> None:
    layout = layout_of(case)
    ranks = range(layout.world_size)
    assert [list(layout.coordinates(rank).values()) for rank in ranks] == case["coordinates"]
    assert [layout.data_parallel_rank(rank) for rank in ranks] == case["data_parallel_rank"]
    assert list(layout.heads("pp_cp_tp")) == case["data_parallel_heads"]
    assert list(layout.stage_heads()) == case["pipeline_stage_heads"]
    assert list(layout.first_stage_ranks()) == case["first_stage_ranks"]
    assert list(layout.last_stage_ranks()) == case["last_stage_ranks"]
    loop, v = case["last_stage_holders"].values()
    assert list(layout.last_stage_ranks(schedule="loop")) == loop
    assert list(layout.last_stage_ranks(schedule="v")) == v
    assert layout.first_stage_ranks(schedule="v") == layout.first_stage_ranks()


@by_name
def test_numbers_of_a_layout(case: dict[str, Any]) -> None:
    layout = layout_of(case)
    assert layout.seq_len_divisor() == case["seq_len_divisor"]
    assert layout.seq_len_divisor(load_balanced=False) == case["seq_len_divisor"] // 2
    assert layout.context_and_model_parallel_size == case["context_and_model_parallel_size"]
    assert layout.gradient_divide_factor == case["fsdp_gradient_divide_factor"]
    assert layout.sizes == {axis: case["dims"][axis] for axis in DEFAULT_ORDER}


@pytest.mark.parametrize("case", CASES["infer_dp_shard"], ids=lambda case: str(case["dims"]))
def test_one_degree_is_inferred(case: dict[str, Any]) -> None:
    assert layout_of(case).dp_shard == case["expect"]["dp_shard"]


@pytest.mark.parametrize("axis", DEFAULT_ORDER)
def test_any_axis_can_be_inferred(axis: str) -> None:
    degrees = dict.fromkeys(DEFAULT_ORDER, 2) | {axis: -1}
    assert ParallelLayout(world_size=48, **degrees).sizes[axis] == 3


def test_an_inferred_ep_takes_all_that_it_can_borrow() -> None:
    assert ParallelLayout(world_size=16, pp=2, dp_shard=2, cp=2, tp=2, ep=-1).ep == 8
    assert ParallelLayout(world_size=16, pp=2, dp_shard=2, cp=2, tp=2, ep=-1, etp=2).ep == 4


@pytest.mark.parametrize("case", CASES["invalid"], ids=lambda case: case["why"])
def test_what_others_accept_or_assert_is_a_layout_error(case: dict[str, Any]) -> None:
    with pytest.raises(LayoutError) as caught:
        layout_of(case)
    assert any(f"{axis}={degree!r}" in str(caught.value) for axis, degree in case["dims"].items())


@pytest.mark.parametrize(
    ("degrees", "expected"),
    [
        ({"tp": 0, "dp_shard": 4}, "tp=0: a degree is an integer >= 1.*sizes that work.*tp=4"),
        ({"tp": -3, "dp_shard": -1}, "tp=-3: .*tp=1, 2, 4"),
        ({"tp": True, "dp_shard": 16}, r"tp=True \(bool\): .*tp=1$"),
        ({"tp": 2.0, "dp_shard": 8}, r"tp=2\.0 \(float\): .*tp=2$"),
        ({"tp": "2", "dp_shard": 8}, r"tp='2' \(str\): .*tp=2$"),
        ({"tp": None}, r"tp=None \(NoneType\)"),
        (
            {"cp": 3, "dp_shard": -1},
            r"dp_shard=-1 .*world_size=16 .*remainder 1.*world_size=15, 18; or cp=1, 2, 4",
        ),
        (
            {"tp": 4, "pp": 8},
            r"pp=8 \* tp=4 = 32 ranks, but world_size=16; .*world_size=32; or pp=4.*; or tp=2",
        ),
        ({"tp": 4}, "tp=4 ranks, but world_size=16; .*or dp_shard=4 \\(dp_shard=-1 infers it\\)"),
        ({}, "world_size=16; .*or dp_shard=16"),
        ({"tp": -1, "pp": -1}, "pp=-1 and tp=-1: only one degree"),
        ({"dp_shard": -1, "ep": -1}, "dp_shard=-1 and ep=-1: only one degree"),
        (
            {"dp_shard": 16, "ep": 5},
            "ep=5: does not divide.*dp_shard.cp.tp=16 ranks, nearest sizes that work: 2, 4, 8",
        ),
        ({"dp_shard": 16, "ep": 0}, "ep=0: a degree is an integer >= 1"),
        ({"dp_shard": 16, "ep": True}, r"ep=True \(bool\)"),
        (
            {"dp_shard": 4, "tp": 4, "ep": 8, "etp": 4},
            "ep=8: .*with etp=4 experts borrow dp_shard.cp=4 ranks.*: 1, 2, 4",
        ),
        ({"dp_shard": 4, "tp": 4, "etp": 2}, "etp=2: .*tp=4.*sizes that work: 1, 4"),
        ({"dp_shard": 16, "etp": True}, r"etp=True \(bool\)"),
    ],
)
def test_an_error_names_axis_value_and_the_nearest_sizes(degrees: dict[str, Any], expected: str) -> None:
    with pytest.raises(LayoutError, match=expected):
        ParallelLayout(world_size=16, **degrees)


@pytest.mark.parametrize("world_size", [0, -1, True, 2.0, "2", None])
def test_a_world_size_is_a_positive_int(world_size: Any) -> None:
    with pytest.raises(LayoutError, match="world_size="):
        ParallelLayout(world_size=world_size)


def test_a_layout_error_is_a_value_error() -> None:
    with pytest.raises(ValueError, match="tp=3"):
        ParallelLayout(world_size=8, tp=3)


def test_integers_of_other_libraries_are_degrees() -> None:
    numpy = pytest.importorskip("numpy")
    layout = ParallelLayout(world_size=numpy.int64(8), tp=numpy.int32(2), dp_shard=-1)
    assert layout == ParallelLayout(world_size=8, tp=2, dp_shard=4)
    assert type(layout.tp) is int


def test_every_subset_of_degrees_of_one_has_every_name() -> None:
    for sizes in product((1, 2), repeat=5):
        degrees = dict(zip(DEFAULT_ORDER, sizes, strict=True))
        world_size = 2 ** sum(size == 2 for size in sizes)
        for expert in ({}, {"ep": -1}, {"ep": -1, "etp": degrees["tp"]}):
            layout = ParallelLayout(world_size=world_size, **degrees, **expert)
            for name in (*layout.names, "dp_shard_cp", "loss"):
                assert sorted(rank for group in layout.groups(name) for rank in group) == [*range(world_size)]
            if layout.ep > 1:
                assert layout.groups("dp_shard_mod_ep") == layout.groups("efsdp")
                assert {rank for grid in layout.grids("ep_tp") for row in grid for rank in row} == {
                    *range(world_size)
                }


@pytest.mark.parametrize("name", ["typo", "", "PP", "ep", "efsdp", "dp_shard_mod_ep", None, 3])
def test_an_unknown_name_lists_the_names(name: Any) -> None:
    layout = ParallelLayout(world_size=4, dp_shard=4)
    for ask in (layout.groups, layout.heads, layout.size, lambda name: layout.group_of(0, name)):
        with pytest.raises(LayoutError, match="pp_cp_tp, stage, world"):
            ask(name)


def test_the_expert_grid_is_no_group_and_the_groups_no_grid() -> None:
    layout = ParallelLayout(world_size=8, dp_shard=4, tp=2, ep=2, etp=2)
    with pytest.raises(LayoutError, match="is a grid"):
        layout.groups("ep_tp")
    with pytest.raises(LayoutError, match="no grid 'ep'"):
        layout.grids("ep")
    with pytest.raises(LayoutError, match="with ep > 1"):
        ParallelLayout(world_size=8, dp_shard=8).grids("ep_tp")


@pytest.mark.parametrize("rank", [-1, 8, True])
def test_a_rank_has_to_be_in_the_layout(rank: int) -> None:
    layout = ParallelLayout(world_size=8, dp_shard=8)
    asked = (
        lambda: layout.group_of(rank, "tp"),
        lambda: layout.head_of(rank, "tp"),
        lambda: layout.coordinates(rank),
        lambda: layout.data_parallel_rank(rank),
        lambda: layout.render(rank=rank),
    )
    for ask in asked:
        with pytest.raises(LayoutError, match="0 to 7"):
            ask()


@pytest.mark.parametrize("rank", ["5", "tp", None, 5.0, True])
def test_a_rank_that_is_no_number_is_named_with_its_type(rank: Any) -> None:
    layout = ParallelLayout(world_size=8, tp=8)
    expected = re.escape(f"rank {rank!r} ({type(rank).__name__}): a rank is an integer, 0 to 7")
    for ask in (lambda: layout.group_of(rank, "tp"), lambda: layout.coordinates(rank)):
        with pytest.raises(LayoutError, match=expected):
            ask()


def test_coordinates_outside_an_axis() -> None:
    layout = ParallelLayout(world_size=8, pp=2, tp=4)
    assert layout.rank_at(pp=1) == 4
    for wrong in ({"pp": 2}, {"tp": -1}, {"dp_shard": 1}, {"tp": True}, {"ep": 0}):
        with pytest.raises(LayoutError, match=next(iter(wrong))):
            layout.rank_at(**wrong)
    with pytest.raises(LayoutError, match=r"tp='1' \(str\): a position is an integer, 0 to 3"):
        layout.rank_at(tp="1")  # type: ignore[arg-type]


def test_another_order_moves_every_group() -> None:
    layout = ParallelLayout(
        world_size=16, pp=2, dp_shard=2, cp=2, tp=2, order=("dp_replicate", "dp_shard", "pp", "cp", "tp")
    )
    assert layout.coordinates(8) == {"dp_replicate": 0, "dp_shard": 1, "pp": 0, "cp": 0, "tp": 0}
    assert layout.group_of(0, "pp_cp_tp") == (0, 1, 2, 3, 4, 5, 6, 7)
    assert layout.groups("stage") == ((0, 1, 2, 3, 8, 9, 10, 11), (4, 5, 6, 7, 12, 13, 14, 15))
    assert layout.stage_heads() == (0, 4)
    assert layout.last_stage_ranks() == (4, 5, 6, 7, 12, 13, 14, 15)
    assert layout.names[:5] == layout.order


@pytest.mark.parametrize(
    "order", [("pp", "tp"), "pp", (*DEFAULT_ORDER, "ep"), ("pp",) * 5, ("dp", *DEFAULT_ORDER[1:])]
)
def test_an_order_has_each_axis_once(order: Any) -> None:
    with pytest.raises(LayoutError, match="not an order of the axes"):
        ParallelLayout(world_size=1, order=order)


def test_experts_that_an_order_tears_apart_are_refused_with_sizes() -> None:
    order = ("pp", "cp", "dp_replicate", "dp_shard", "tp")
    options: dict[str, Any] = {"world_size": 36, "dp_replicate": 2, "dp_shard": 3, "cp": 6, "order": order}
    assert ParallelLayout(**options, ep=6).size("ep") == 6
    with pytest.raises(LayoutError, match=r"ep=2 does not cut 6 x 3 ranks.*nearest sizes that work: 1, 3"):
        ParallelLayout(**options, ep=2)


def test_layouts_are_values() -> None:
    one = ParallelLayout(world_size=16, pp=2, dp_shard=-1, tp=2)
    same = ParallelLayout(world_size=16, pp=2, dp_shard=4, tp=2)
    assert one == same
    assert hash(one) == hash(same)
    assert one != ParallelLayout(world_size=16, pp=4, dp_shard=2, tp=2)
    assert one != ParallelLayout(world_size=16, pp=2, dp_shard=4, tp=2, order=(*DEFAULT_ORDER[1:], "pp"))
    assert one != "ParallelLayout"
    assert eval(repr(one)) == one
    assert pickle.loads(pickle.dumps(one)) == one
    assert copy.deepcopy(one) == one
    with pytest.raises(AttributeError, match="immutable"):
        one.tp = 4
    with pytest.raises(AttributeError, match="immutable"):
        del one.tp
    with pytest.raises(AttributeError):
        one.note = "x"
    one.sizes["tp"] = 99
    assert one.sizes["tp"] == 2


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", "3", b"\xff"])
def test_other_text_is_no_layout(text: str | bytes) -> None:
    with pytest.raises(LayoutError, match="not the JSON of a layout"):
        ParallelLayout.from_json(text)


@pytest.mark.parametrize(
    "change",
    [{"format": 2}, {"pp": 2}, {"tp": "1"}, {"order": "pp"}, {"order": ["pp"]}, {"more": 1}, {"tp": True}],
)
def test_other_fields_are_refused(change: dict[str, Any]) -> None:
    fields = json.loads(ParallelLayout(world_size=1).to_json())
    with pytest.raises(LayoutError):
        ParallelLayout.from_json(json.dumps(fields | change))


def test_divisibility_is_named_with_sizes_that_work() -> None:
    layout = ParallelLayout(world_size=12, pp=3, tp=4)
    assert layout.require_divisible("num_attention_heads", 32, by="tp") == 8
    with pytest.raises(LayoutError, match=r"num_key_value_heads=6 is not divisible by tp=4.*: 2, 3, 6"):
        layout.require_divisible("num_key_value_heads", 6, by="tp")
    with pytest.raises(LayoutError, match="layers=40 is not divisible by pp=3"):
        layout.require_divisible("layers", 40, by="pp")
    for wrong in ("8", 8.0, None):
        with pytest.raises(LayoutError, match=r"heads=.* \(\w+\): an integer is expected"):
            layout.require_divisible("heads", wrong, by="tp")  # type: ignore[arg-type]


def test_tied_weights_are_refused_across_stages_only() -> None:
    ParallelLayout(world_size=2, tp=2).require_untied_weights(True)
    staged = ParallelLayout(world_size=2, pp=2)
    staged.require_untied_weights(False)
    staged.require_untied_weights(())
    with pytest.raises(LayoutError, match="pp=2 puts tied parameters"):
        staged.require_untied_weights(True)


def test_a_schedule_is_loop_or_v() -> None:
    layout = ParallelLayout(world_size=2, pp=2)
    for ask in (layout.first_stage_ranks, layout.last_stage_ranks):
        with pytest.raises(LayoutError, match="schedule='zbv'"):
            ask(schedule="zbv")  # type: ignore[arg-type]


def test_a_layout_costs_no_heavy_import() -> None:
    heavy = ("torch", "numpy", "asyncio", "dataclasses", "inspect", "importlib.metadata")
    code = (
        "import sys, dprims; dprims.ParallelLayout(world_size=8, dp_shard=-1, tp=2).groups('fsdp');"
        f"print(*[name for name in {heavy} if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.split() == []
