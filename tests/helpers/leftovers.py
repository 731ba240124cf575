"""The rule that a test leaves no process behind: a pytest plugin, taken over by conftest.py."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from typing import Any

import pytest

PR_SET_CHILD_SUBREAPER = 36
LEFT_S = 5.0

_outliving: list[Any] = []


@pytest.fixture(scope="session")
def outliving() -> list[Any]:
    """What lives longer than a test on purpose: add an object whose ``pids`` are its processes, now."""
    return _outliving


def pytest_sessionstart() -> None:
    """Become the parent of what the tests' own children leave behind, so that it is seen."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


@pytest.fixture(autouse=True)
def no_process_left() -> Iterator[None]:
    """Fail the test after which processes run, below this one, that did not run before it."""
    before = _descendants()
    yield
    deadline = time.monotonic() + LEFT_S
    while (left := _leftover(before)) and time.monotonic() < deadline:
        time.sleep(0.01)
    for pid in left:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    if left:
        pytest.fail("left running, and killed now: " + ", ".join(f"{p} ({c})" for p, c in left.items()))


def _leftover(before: set[int]) -> dict[int, str]:
    """Process id and command line of each process that has to be gone."""
    # Multiprocessing keeps these two for the life of this process; what they start has to end.
    kept = {forkserver._forkserver._forkserver_pid, resource_tracker._resource_tracker._pid}
    kept.update(*(server.pids for server in _outliving))
    commands = {pid: _read(f"/proc/{pid}/cmdline") for pid in _descendants() - before - kept}
    return {pid: command.replace("\0", " ").strip() for pid, command in commands.items() if command}


def _descendants() -> set[int]:
    """The ids of all processes below this one; none where there is no /proc."""
    children = defaultdict(list)
    for entry in Path("/proc").glob("[0-9]*"):
        # "pid (name) state parent ...", and a name may hold anything.
        if stat := _read(f"{entry}/stat"):
            children[int(stat.rpartition(")")[2].split()[1])].append(int(entry.name))
    found = {os.getpid()}
    parents = list(found)
    while parents:
        below = children[parents.pop()]
        found.update(below)
        parents += below
    return found - {os.getpid()}


def _read(path: str) -> str:
    """A file of a process: empty once that is gone, and the command line of a zombie is empty too."""
    try:
        return Path(path).read_text(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return ""
