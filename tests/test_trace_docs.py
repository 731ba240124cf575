"""docs/traces.md: its code runs, and its pictures can be drawn anew."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

DOCS = Path(__file__).parents[1] / "docs"
LIMIT_S = 100.0


def run(*arguments: str, cwd: Path) -> None:
    """Run a script, and wait for the fork server that it leaves: that ends by itself, a little later."""
    command = [sys.executable, *arguments]
    with subprocess.Popen(command, cwd=cwd, stderr=subprocess.DEVNULL, start_new_session=True) as process:
        assert process.wait(LIMIT_S) == 0
    deadline = time.monotonic() + LIMIT_S
    with contextlib.suppress(ProcessLookupError):
        while time.monotonic() < deadline:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(-process.pid, os.WNOHANG)  # its orphans are ours: see helpers/leftovers.py
            os.killpg(process.pid, 0)
            time.sleep(0.02)


def test_the_code_of_the_page_writes_a_trace(tmp_path: Path) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", (DOCS / "traces.md").read_text(), re.DOTALL)
    script = tmp_path / "page.py"
    script.write_text(code)
    run(str(script), cwd=tmp_path)
    events = json.loads((tmp_path / "refit.json").read_text())["traceEvents"]
    assert {"init_communicator", "sync_weights"} <= {one["name"] for one in events}


def test_the_pictures_are_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    run(str(DOCS / "trace_pictures.py"), str(tmp_path), "--traces", cwd=tmp_path)
    recovered = json.loads((tmp_path / "trace-recovered.json").read_text())["traceEvents"]
    assert {"sync_weights FAILED", "settle", "rebuild", "transfer LOST"} <= {one["name"] for one in recovered}
    for name in ("trace-clean", "trace-recovered"):
        assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")
        assert (DOCS / "images" / f"{name}.png").is_file()
