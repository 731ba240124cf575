"""docs/traces.md: its code runs, and its pictures can be drawn anew."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from .helpers.pages import ROOT, finished, script, start

pytestmark = pytest.mark.slow

DOCS = ROOT / "docs"


def test_the_code_of_the_page_writes_a_trace(tmp_path: Path) -> None:
    code = tmp_path / "page.py"
    code.write_text(script(DOCS / "traces.md"))
    finished([start(str(code), cwd=tmp_path)])
    events = json.loads((tmp_path / "refit.json").read_text())["traceEvents"]
    assert {"init_communicator", "sync_weights"} <= {one["name"] for one in events}


def test_the_pictures_are_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    finished([start(str(DOCS / "trace_pictures.py"), str(tmp_path), "--traces", cwd=tmp_path)])
    recovered = json.loads((tmp_path / "trace-recovered.json").read_text())["traceEvents"]
    assert {"sync_weights FAILED", "settle", "rebuild", "transfer LOST"} <= {one["name"] for one in recovered}
    for name in ("trace-clean", "trace-recovered"):
        assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")
        assert (DOCS / "images" / f"{name}.png").is_file()
