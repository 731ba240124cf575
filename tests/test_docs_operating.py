"""docs/operating.md names every metric, every label, every logger and every line that is logged."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from dprims import metrics

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "docs" / "operating.md").read_text()
LEVELS = ("debug", "info", "warning", "error", "exception")


def sources() -> Iterator[Path]:
    for folder in ("dprims", "backends"):
        yield from (
            path for path in sorted((ROOT / folder).rglob("*.py")) if "dprims/backends" not in str(path)
        )


def logged() -> dict[str, set[str]]:
    """For each logger the levels at which something is logged there."""
    found: dict[str, set[str]] = {}
    for path in sources():
        tree = ast.parse(path.read_text())
        names = [
            node.args[0].value
            for node in ast.walk(tree)
            if isinstance(node, ast.Call)
            and ast.unparse(node.func) == "logging.getLogger"
            and isinstance(node.args[0], ast.Constant)
        ]
        for node in ast.walk(tree):
            is_call = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
            if is_call and ast.unparse(node.func.value) in ("log", "_log") and node.func.attr in LEVELS:
                found.setdefault(names[0], set()).add(node.func.attr)
    return found


def test_every_logger_and_level_is_on_the_page() -> None:
    missing = []
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in PAGE.splitlines() if "|" in line
    ]
    told: dict[str, set[str]] = {}
    loggers: list[str] = []
    for row in rows:
        if len(row) == 4:
            loggers = [one.strip(" `") for one in row[0].split(",")] if row[0] else loggers
            for logger in loggers:
                told.setdefault(logger, set()).update(row[1].replace(",", " ").split())
    found = logged()
    assert len(found) > 10
    for logger, levels in found.items():
        wanted = {"error" if level == "exception" else level for level in levels}
        missing += [f"{logger}: {level}" for level in wanted - told.get(logger, set())]
    assert missing == []


@pytest.fixture
def registry() -> Iterator[CollectorRegistry]:
    registry = CollectorRegistry()
    metrics.enable(registry)
    yield registry
    metrics.disable()


def test_every_metric_is_on_the_page_and_no_other(registry: CollectorRegistry) -> None:
    names = {family.name + ("_total" if family.type == "counter" else "") for family in registry.collect()}
    told = {word.strip("`,") for word in PAGE.split() if word.startswith("`dprims_")}
    assert told == names
