"""The picture on docs/layouts.md; its code is run by tests/test_docs_code.py."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

from dprims import ParallelLayout

DOCS = Path(__file__).parent.parent / "docs"


def test_the_picture_on_the_page_is_what_is_drawn() -> None:
    picture = (DOCS / "images" / "layout-16.svg").read_text(encoding="utf-8")
    drawn = ParallelLayout(world_size=16, pp=2, dp_shard=2, cp=2, tp=2).render("svg", rank=5)
    assert ElementTree.canonicalize(picture) == ElementTree.canonicalize(drawn)
