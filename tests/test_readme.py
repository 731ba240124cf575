"""The README's examples, run as they stand, one after the other."""

from __future__ import annotations

from pathlib import Path

from .helpers.pages import ROOT, blocks, finished, script, start


def test_the_examples_of_the_readme_run(tmp_path: Path) -> None:
    readme = ROOT / "README.md"
    assert len(blocks(readme, "python")) >= 5
    code = tmp_path / "readme.py"
    code.write_text(script(readme))
    (said,) = finished([start(str(code))])
    assert "1 (0, 1, 2)" in said
