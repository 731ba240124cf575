from __future__ import annotations

import itertools
import re
from xml.etree import ElementTree

import pytest

from dprims import LayoutError, ParallelLayout

LAYOUT = ParallelLayout(world_size=16, pp=2, dp_shard=2, cp=2, tp=2, ep=2, etp=2)
SVG = "{http://www.w3.org/2000/svg}"


def svg_texts(picture: str) -> list[str]:
    return [element.text or "" for element in ElementTree.fromstring(picture).iter(f"{SVG}text")]


def test_text_shows_every_rank_its_head_and_the_groups_of_one() -> None:
    text = LAYOUT.render(rank=5)
    lines = text.splitlines()
    assert lines[0] == "16 ranks = pp 2 x dp_shard 2 x cp 2 x tp 2; experts: ep 2, etp 2"
    grid = "\n".join(line for line in lines if re.match(r"dp \d", line))
    assert [int(number) for number in re.findall(r"\d+", re.sub(r"dp \d", "", grid))] == [
        *(0, 1, 2, 3, 8, 9, 10, 11),
        *(4, 5, 6, 7, 12, 13, 14, 15),
    ]
    assert re.findall(r"(\d+)\*", grid) == ["0", "4"]
    assert re.findall(r"\[ *(\d+)", grid) == ["4", "5", "6", "7", "12", "13", "14", "15"]
    assert re.search(r"^pp_cp_tp +2 x 8 +4-7, 12-15 ", text, re.MULTILINE)
    assert re.search(r"^stage heads +0, 8$", text, re.MULTILINE)
    assert re.search(r"^last stage +8-15; of a V schedule 0-7$", text, re.MULTILINE)
    assert not any(line != line.rstrip() for line in lines)


def test_every_group_name_is_in_the_table() -> None:
    first_words = {line.split()[0] for line in LAYOUT.render().splitlines() if line.strip()}
    assert set(LAYOUT.names) <= first_words


def test_colours_are_only_there_when_asked_for_and_add_nothing_else() -> None:
    plain, colored = LAYOUT.render(rank=5), LAYOUT.render(rank=5, color=True)
    assert "\033" not in plain
    assert re.sub(r"\033\[[\d;]*m", "", colored).split() == plain.split()
    line = next(line for line in colored.splitlines() if line.startswith("dp 0"))
    assert len(set(re.findall(r"48;5;(\d+)m", line))) == 1, "one group, one colour"


def test_svg_shows_the_ranks_in_the_colours_of_their_groups() -> None:
    picture = LAYOUT.render("svg", rank=5, group="fsdp")
    root = ElementTree.fromstring(picture)
    elements = list(root)
    fill_of = {}
    for box, label in itertools.pairwise(elements):
        if box.tag == f"{SVG}rect" and label.tag == f"{SVG}text" and (label.text or "").isdigit():
            fill_of[int(label.text or "")] = box.get("fill")
    # A rank in one group with rank 5 has a line between its box and its number.
    assert fill_of.keys() == set(range(16)) - set(LAYOUT.group_of(5, "fsdp"))
    for group in LAYOUT.groups("fsdp"):
        assert len({fill_of[rank] for rank in group if rank in fill_of}) <= 1
    assert len(set(fill_of.values())) == 3
    assert {"stage 0", "stage 1", "cp 0", "dp 1", "head of its group"} <= set(svg_texts(picture))


def test_everything_drawn_lies_inside_the_picture() -> None:
    for layout in (
        LAYOUT,
        ParallelLayout(world_size=1),
        ParallelLayout(world_size=1024, pp=4, dp_shard=-1, cp=2, tp=8),
    ):
        root = ElementTree.fromstring(layout.render("svg", rank=0))
        width, height = float(root.get("width", "0")), float(root.get("height", "0"))
        for box in root.iter(f"{SVG}rect"):
            assert float(box.get("x", "0")) + float(box.get("width", "0")) <= width
            assert float(box.get("y", "0")) + float(box.get("height", "0")) <= height
        assert all(float(text.get("y", "0")) < height for text in root.iter(f"{SVG}text"))


def test_a_very_large_layout_is_drawn_by_its_edges() -> None:
    layout = ParallelLayout(world_size=131072, pp=16, dp_replicate=2, dp_shard=-1, cp=4, tp=8)
    text, picture = layout.render(), layout.render("svg")
    assert len(text) < 20_000
    assert "..." in text
    assert "131071" in text
    assert len(picture) < 2_000_000
    assert "131071" in svg_texts(picture)


def test_stages_wrap_where_a_line_ends() -> None:
    text = ParallelLayout(world_size=72, pp=9, tp=8).render()
    assert max(map(len, text.splitlines())) <= 120
    assert [f"stage {stage}" in text for stage in range(9)] == [True] * 6 + [False] + [True] * 2


@pytest.mark.parametrize(
    "wrong", [{"style": "png"}, {"group": "typo"}, {"group": "ep_tp"}, {"rank": 16}, {"rank": -1}]
)
def test_what_cannot_be_drawn(wrong: dict[str, object]) -> None:
    with pytest.raises(LayoutError):
        LAYOUT.render(**wrong)  # type: ignore[arg-type]


def test_no_fact_is_told_of_an_axis_that_is_not_split() -> None:
    shown = ParallelLayout(world_size=2, pp=2).render("text")
    assert "sequence length" not in shown
    assert "gradients" not in shown
    assert "sequence length  a multiple of 4\n" in ParallelLayout(world_size=4, tp=4).render("text")
    shown = ParallelLayout(world_size=8, cp=2, tp=2, dp_shard=2).render("text")
    assert "sequence length  a multiple of 8 when context ranks are balanced\n" in shown
    assert "gradients        a sum over 4 ranks, divided by as many\n" in shown
