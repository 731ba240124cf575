"""The wait for aborts of NCCL communicators: with stand-ins; tests/test_transfer_gpu.py has real ones."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import threading
import time
from typing import Any

import pytest
import torch

from dprims.exceptions import DeviceLost, RefitAborted
from dprims.synchronizer.aborts import abort_aside, wait_for_aborts
from dprims.synchronizer.guard import CancelFlag, Guard

HERE, THERE = torch.device("cuda", 0), torch.device("cuda", 1)
LIMIT_S = 20.0


class Group:
    def __init__(self) -> None:
        self.entered, self.leave = threading.Event(), threading.Event()

    def abort(self) -> None:
        self.entered.set()
        assert self.leave.wait(LIMIT_S)


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    group = Group()
    abort_aside(group, HERE, "old/1")  # type: ignore[arg-type]
    yield group
    group.leave.set()
    wait_for_aborts(HERE, Guard(), LIMIT_S)


def test_it_waits_for_the_device_that_is_meant_and_for_no_other(group: Group) -> None:
    assert group.entered.wait(LIMIT_S)
    wait_for_aborts(THERE, Guard(), 0.0)
    threading.Timer(0.05, group.leave.set).start()
    wait_for_aborts(HERE, Guard(), LIMIT_S)
    assert group.leave.is_set()


def test_an_abort_that_does_not_end_is_a_lost_device(group: Group) -> None:
    with pytest.raises(DeviceLost, match=r"a build: cuda:0 still aborts old/1 after 0\.05 s"):
        wait_for_aborts(HERE, Guard(what="a build"), 0.05)


def test_an_interpreter_that_ends_sees_an_abort_out() -> None:
    script = """
        import threading, time, torch
        from dprims.synchronizer.aborts import abort_aside

        class Group:
            def abort(self):
                time.sleep(0.3)
                print("aborted", flush=True)

            def __del__(self):
                print("dropped by", threading.current_thread().name, flush=True)

        torch.cuda.set_device = lambda device: None
        abort_aside(Group(), torch.device("cuda", 0), "old/1")
    """
    said = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, timeout=LIMIT_S
    )
    assert (said.returncode, said.stderr) == (0, "")
    assert said.stdout.splitlines() == ["aborted", "dropped by dprims-graveyard"]


def test_the_wait_can_be_cut_short(group: Group) -> None:
    cancel = CancelFlag()
    cancel.set("enough")
    start = time.monotonic()
    with pytest.raises(RefitAborted, match="enough"):
        wait_for_aborts(HERE, Guard(cancel), LIMIT_S)
    assert time.monotonic() - start < LIMIT_S / 2


def test_an_abort_that_fails_keeps_nobody(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(device: object) -> None:
        raise RuntimeError("no such device")

    monkeypatch.setattr(torch.cuda, "set_device", fail)
    abort_aside(Group(), HERE, "old/2")  # type: ignore[arg-type]
    wait_for_aborts(HERE, Guard(), LIMIT_S)
    assert "aborting old/2 on cuda:0 failed" in caplog.text


def test_an_abort_that_cannot_even_begin_holds_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    leave = threading.Event()

    def stuck(device: object) -> None:  # as set_device is while another call holds the context's lock
        assert leave.wait(LIMIT_S)

    monkeypatch.setattr(torch.cuda, "set_device", stuck)
    group = Group()
    group.leave.set()
    start = time.monotonic()
    abort_aside(group, HERE, "old/3")  # type: ignore[arg-type]
    assert time.monotonic() - start < LIMIT_S / 2
    assert not group.entered.is_set()
    leave.set()
    wait_for_aborts(HERE, Guard(), LIMIT_S)
    assert group.entered.is_set()
