"""The README's examples, run as they stand, one after the other."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

README = Path(__file__).parent.parent / "README.md"


def test_the_examples_of_the_readme_run(tmp_path: Path) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", README.read_text(), flags=re.M | re.S)
    assert len(blocks) >= 5
    script = tmp_path / "readme.py"
    script.write_text("\n".join(blocks))
    run = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=90, check=False)
    assert run.returncode == 0, run.stderr
    assert "1 (0, 1, 2)" in run.stdout


def test_what_the_readme_points_to_is_there() -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", README.read_text()):
        assert (README.parent / target).exists(), target
