from __future__ import annotations

import doctest
from pathlib import Path
from xml.etree import ElementTree

from dprims import ParallelLayout

DOCS = Path(__file__).parent.parent / "docs"


def test_what_the_page_shows_is_what_happens() -> None:
    result = doctest.testfile(str(DOCS / "layouts.md"), module_relative=False)
    assert result.attempted > 10
    assert result.failed == 0


def test_the_picture_on_the_page_is_what_is_drawn() -> None:
    picture = (DOCS / "images" / "layout-16.svg").read_text(encoding="utf-8")
    drawn = ParallelLayout(world_size=16, pp=2, dp_shard=2, cp=2, tp=2).render("svg", rank=5)
    assert ElementTree.canonicalize(picture) == ElementTree.canonicalize(drawn)
