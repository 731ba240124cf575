"""The code on the pages of the documentation: what there is, and one way to run it."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
LIMIT_S = 100.0

_BLOCK = re.compile(
    r"(?:^(?P<indent> *)<!-- (?P<word>before|not run):\s(?P<said>.*?)-->\n+)?"
    r"^(?P<in>(?:> )? *)```(?P<language>\w*)\n(?P<code>.*?)^(?P=in)```$",
    re.M | re.S,
)


@dataclass(frozen=True)
class Block:
    """One fenced block, and what the comment before it says."""

    line: int
    language: str
    code: str
    before: str = ""
    """Code that the block needs and the page does not show."""
    not_run: str = ""
    """Why it is not run."""

    @property
    def name(self) -> str:
        """What stands before the colon in a first line like ``# lock: on every rank``."""
        return self.code.partition("\n")[0].partition(":")[0].removeprefix("# ")

    @property
    def is_session(self) -> bool:
        """Whether it shows a session of the interpreter, which doctest runs."""
        return self.code.startswith(">>> ")


def pages() -> dict[str, Path]:
    """Every page by its path from the root."""
    found = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
    return {path.relative_to(ROOT).as_posix(): path for path in found}


def blocks(page: Path, *languages: str) -> list[Block]:
    """The blocks of a page, of these languages or of all."""
    text = page.read_text()
    found = []
    for block in _BLOCK.finditer(text):
        indent = len(block["in"])
        code = "".join(line[indent:] or "\n" for line in block["code"].splitlines(keepends=True))
        said = {"before": "", "not run": ""}
        if block["word"]:
            said[block["word"]] = block["said"].strip()
        line = text.count("\n", 0, block.start("language")) + 1
        found.append(Block(line, block["language"], code, said["before"], said["not run"]))
    return [block for block in found if not languages or block.language in languages]


def script(page: Path) -> str:
    """The python blocks of a page that are to be run, as one script; each where the page has it."""
    parts: list[str] = []
    for block in blocks(page, "python"):
        if not (block.is_session or block.not_run):
            lines_so_far = "\n".join(parts).count("\n") + bool(parts)
            parts += [block.before] if block.before else []
            parts.append("\n" * max(0, block.line - lines_so_far - block.before.count("\n") - 2) + block.code)
    return "\n".join(parts)


def start(
    *arguments: str, environment: dict[str, str] | None = None, cwd: Path | None = None
) -> subprocess.Popen[str]:
    """Start Python with these arguments; what it writes can be read from its stdout."""
    return subprocess.Popen(
        [sys.executable, *arguments],
        env=environment,
        cwd=cwd,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def finished(runs: Sequence[subprocess.Popen[str]]) -> list[str]:
    """What they wrote, when all have ended well and the fork servers that they left have ended, too."""
    try:
        said = [run.communicate(timeout=LIMIT_S)[0] for run in runs]
    finally:
        for run in runs:
            run.kill()
            run.wait()
    assert [run.returncode for run in runs] == [0] * len(runs), "\n".join(said)
    for run in runs:
        await_group(run.pid)
    return said


def await_group(pid: int) -> None:
    """Wait until every process of a session has ended: a fork server ends by itself, a little later."""
    deadline = time.monotonic() + LIMIT_S
    with contextlib.suppress(ProcessLookupError):
        while time.monotonic() < deadline:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(-pid, os.WNOHANG)  # its orphans are ours: see leftovers.py
            os.killpg(pid, 0)
            time.sleep(0.02)
