"""The lock examples do what they say."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


def run(*command: str, **environment: str) -> list[str]:
    """The lines that an example prints; it has to succeed."""
    done = subprocess.run(
        [sys.executable, *command],
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        cwd=ROOT / "examples",
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()


@pytest.mark.slow
@pytest.mark.parametrize("server", [[], ["redis"], ["etcd"]], ids=["torchrun's store", "redis", "etcd"])
def test_groups_are_built_one_at_a_time(server: list[str]) -> None:
    *pairs, verdict = run("lock.py", *server, "--ranks", "3")
    assert sorted(line[: len("pair 0")] for line in pairs) == ["pair 0", "pair 1"]
    assert verdict == "one at a time"


@pytest.mark.parametrize("backend", ["", "redis"])
def test_a_stale_holder_is_refused(backend: str, request: pytest.FixtureRequest) -> None:
    url = [request.getfixturevalue("redis_server").url] if backend else []
    lines = run("fenced.py", *url)
    assert "written" in lines[0]
    assert "thinks is lost: refused" in lines[3]
    assert lines[4] == "the ledger: ['slow: first', 'next: second']"
