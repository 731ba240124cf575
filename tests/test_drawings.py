"""The diagrams in docs/images are what docs/drawings.py draws, with the phases and calls of the code."""

from __future__ import annotations

import ast
from pathlib import Path
from runpy import run_path
from types import SimpleNamespace
from typing import get_args

import pytest

from dprims.synchronizer import _leader, _leader_state
from dprims.synchronizer._messages import Kind

from .helpers.pages import ROOT
from .test_layers import LAYERS, MODULES

drawings = SimpleNamespace(**run_path(str(ROOT / "docs" / "drawings.py")))


@pytest.mark.parametrize("name", drawings.PICTURES)
def test_a_picture_is_what_is_drawn(name: str) -> None:
    drawn = drawings.PICTURES[name](LAYERS, MODULES)
    assert (ROOT / "docs" / "images" / name).read_text() == drawn, "run python docs/drawings.py, and look"


def test_the_leaders_phases_are_those_of_the_code() -> None:
    assert {box.name for box in drawings.LEADER_BOXES} == phases()


def test_the_page_of_the_protocol_knows_every_phase() -> None:
    table = (ROOT / "docs" / "protocol.md").read_text().partition("## The leader")[2].partition("\n## ")[0]
    unnamed = {"exclude", "publish", "stopped"}  # the table has them as what idle, commit and any lead to
    assert all(f"| {phase}" in table or f", {phase} |" in table for phase in phases() - unnamed)


def test_a_ranks_picture_has_every_call_but_the_one_that_changes_nothing() -> None:
    said = " ".join(edge.label for edge in drawings.MEMBER_EDGES)
    assert [call for call in get_args(Kind) if call not in said] == ["ask"]


def test_a_layer_that_no_part_shows_is_known() -> None:
    owner = {
        name: next((one for one in LAYERS if drawings._matches(name, one.modules)), None) for name in MODULES
    }
    shown = {id(owner[module]) for *_, of in drawings.PARTS.values() for module in of}
    hidden = {layer.modules[0] for layer in LAYERS if id(layer) not in shown}
    outside = {"", "__main__", "backends._*", "engines.ray", "doctor.checks", "doctor.gather"}
    assert hidden == outside | {"synchronizer.kernels"}


def phases() -> set[str]:
    """Each text that the leader's code assigns to its phase."""
    found: set[str] = set()
    for module in (_leader, _leader_state):
        for node in ast.walk(ast.parse(Path(str(module.__file__)).read_text())):
            for target, value in assignments(node):
                if ast.unparse(target) == "self.phase" and isinstance(value, ast.Constant):
                    found.add(value.value)
    return found


def assignments(node: ast.AST) -> list[tuple[ast.expr, ast.expr]]:
    """Targets with their values; of ``a, b = c, d`` each pair."""
    if not isinstance(node, ast.Assign):
        return []
    pairs: list[tuple[ast.expr, ast.expr]] = []
    for target in node.targets:
        if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
            pairs += zip(target.elts, node.value.elts, strict=True)
        else:
            pairs.append((target, node.value))
    return pairs
