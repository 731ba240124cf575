"""docs/requirements.md names code and tests that there are."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
REFERENCES = sorted(
    set(re.findall(r"`((?:dprims|tests)/[\w/]+\.py)::([\w.]+)`", (ROOT / "docs/requirements.md").read_text()))
)


@pytest.mark.parametrize(("path", "name"), REFERENCES)
def test_what_the_page_names_is_there(path: str, name: str) -> None:
    scope: ast.AST = ast.parse((ROOT / path).read_text())
    for part in name.split("."):
        scope = next(
            node
            for node in getattr(scope, "body", [])
            if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == part
        )


def test_the_page_names_code_and_a_test_in_each_row() -> None:
    rows = [
        line for line in (ROOT / "docs/requirements.md").read_text().splitlines() if line.startswith("| ")
    ]
    items = [row.split(" | ") for row in rows if not row.startswith("| item")]
    assert len(items) > 15
    for item, code, test, _ in items:
        assert "`dprims/" in code, item
        assert "`tests/" in test, item
