"""What CONTRIBUTING.md says about checks: pre-commit has those of ``make check``, each marker a target."""

from __future__ import annotations

import re
from typing import Any

from .helpers.pages import ROOT

MAKEFILE = (ROOT / "Makefile").read_text()


def recipe(target: str) -> list[str]:
    """The commands of a target, and of those that it needs first."""
    found = re.search(rf"^{target}:([^#\n]*).*\n((?:\t.*\n)*)", MAKEFILE, flags=re.M)
    assert found, target
    before = [command for needed in found[1].split() if needed.isalpha() for command in recipe(needed)]
    return before + [line.strip().replace("$(BIN)", ".venv/bin") for line in found[2].splitlines()]


def test_precommit_has_the_checks_of_make_check() -> None:
    config = (ROOT / ".pre-commit-config.yaml").read_text()
    entries = [
        line.replace(" --force-exclude", "") for line in re.findall(r"^ +entry: (.*)", config, flags=re.M)
    ]
    assert [command.removesuffix(" .") for command in recipe("check")] == entries


def test_every_marker_is_explained_and_has_a_target() -> None:
    contributing = (ROOT / "CONTRIBUTING.md").read_text()
    markers = re.findall(r'^    "(\w+): .*",$', (ROOT / "pyproject.toml").read_text(), flags=re.M)
    assert len(markers) >= 5
    for marker in markers:
        (target,) = re.findall(rf"^\| `{marker}` \|.*\| `make ([a-z-]+)` \|$", contributing, flags=re.M)
        assert any("pytest" in command.lower() and marker in command for command in recipe(target)), target


def test_ci_runs_targets_that_there_are() -> None:
    targets: list[Any] = re.findall(r"\bmake (?:--[a-z-]+ )?([a-z-]+)", (ROOT / ".ci" / "run").read_text())
    assert {"check", "docs", "test", "test-slow"} <= set(targets)
    assert all(recipe(target) for target in targets)
