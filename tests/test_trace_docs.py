"""docs/traces.md: its code runs, and its pictures can be drawn anew."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

DOCS = Path(__file__).parents[1] / "docs"
LIMIT_S = 100.0


def test_the_code_of_the_page_writes_a_trace(tmp_path: Path) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", (DOCS / "traces.md").read_text(), re.DOTALL)
    script = tmp_path / "page.py"
    script.write_text(code)
    subprocess.run([sys.executable, str(script)], cwd=tmp_path, check=True, timeout=LIMIT_S)
    events = json.loads((tmp_path / "refit.json").read_text())["traceEvents"]
    assert {"init_communicator", "reconcile_communicator", "sync_weights"} <= {one["name"] for one in events}


def test_the_pictures_are_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    command = [sys.executable, str(DOCS / "trace_pictures.py"), str(tmp_path), "--traces"]
    subprocess.run(command, check=True, timeout=LIMIT_S, capture_output=True)
    recovered = json.loads((tmp_path / "trace-recovered.json").read_text())["traceEvents"]
    assert {"sync_weights FAILED", "settle", "rebuild", "transfer LOST"} <= {one["name"] for one in recovered}
    for name in ("trace-clean", "trace-recovered"):
        assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")
        assert (DOCS / "images" / f"{name}.png").is_file()
