"""The fault injector strikes where it is told, once, and travels as plain values."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from dprims.testing.faults import ACTIONS, PHASES, Fault, FaultInjector, InjectedFault


def test_without_faults_nothing_happens() -> None:
    injector = FaultInjector()
    for phase in PHASES:
        injector.at(phase, 0, 0)


@pytest.mark.parametrize("phase", PHASES)
def test_a_fault_strikes_at_its_place_only_and_once(phase: str) -> None:
    injector = FaultInjector([Fault(action="raise", phase=phase, rank=2, bucket=3)])
    for other in PHASES:
        for rank in range(4):
            for bucket in range(6):
                if (other, rank, bucket) != (phase, 2, 3):
                    injector.at(other, rank, bucket)
    with pytest.raises(InjectedFault, match=phase):
        injector.at(phase, 2, 3)
    injector.at(phase, 2, 3)


def test_any_rank_any_bucket_several_times() -> None:
    injector = FaultInjector([Fault(action="raise", times=2)])
    for rank, bucket in ((5, 1), (0, 0)):
        with pytest.raises(InjectedFault):
            injector.at("bucket", rank, bucket)
    injector.at("bucket", 0, 0)


def test_the_first_ones_pass() -> None:
    injector = FaultInjector([Fault(action="raise", bucket=1, skip=2)])
    for bucket in (0, 1, 2, 1, 0):
        injector.at("bucket", 0, bucket)
    with pytest.raises(InjectedFault):
        injector.at("bucket", 0, 1)
    injector.at("bucket", 0, 1)


def test_a_fault_survives_the_way_to_another_process() -> None:
    fault = Fault(action="corrupt", rank=1, bucket=4, byte=77)
    raw = json.loads(json.dumps(fault.to_dict()))
    assert Fault.from_dict(raw) == fault
    data = bytearray(100)
    FaultInjector([raw]).at("bucket", 1, 4, buffer=lambda: data)
    assert [i for i, byte in enumerate(data) if byte] == [77]


def test_corrupt_changes_one_bit_of_whatever_is_there() -> None:
    data = bytearray(8)
    FaultInjector([{"action": "corrupt", "byte": 1003}]).at("bucket", 0, 0, buffer=lambda: data)
    assert sum(byte.bit_count() for byte in data) == 1
    FaultInjector([{"action": "corrupt"}]).at("bucket", 0, 0, buffer=bytearray)


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        ({"action": "explode"}, "'explode'; known are hold, kill"),
        ({"action": "kill", "phase": "lunch"}, "'lunch'; known are rebuild"),
        ({"action": "corrupt", "phase": "commit"}, "corrupt works in phase bucket"),
        ({"phase": "bucket"}, "no action"),
        ({"action": "kill", "when": 3}, "unknown.*when"),
    ],
)
def test_what_is_no_fault(raw: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Fault.from_dict(raw)


def test_who_watches_is_told_before_it_strikes() -> None:
    struck: list[Fault] = []
    injector = FaultInjector([Fault(action="raise")], on_strike=struck.append)
    with pytest.raises(InjectedFault):
        injector.at("bucket", 0, 0)
    assert [fault.action for fault in struck] == ["raise"]


def test_held_until_released() -> None:
    reached = threading.Event()
    injector = FaultInjector([Fault(action="hold", phase="commit")], on_strike=lambda _: reached.set())
    thread = threading.Thread(target=injector.at, args=("commit", 0))
    thread.start()
    assert reached.wait(20)
    assert thread.is_alive()
    injector.release()
    thread.join(20)
    assert not thread.is_alive()


def test_delay_and_hold_end_by_themselves() -> None:
    start = time.monotonic()
    injector = FaultInjector([Fault(action="delay", seconds=0.05), Fault(action="hold", seconds=0.05)])
    injector.at("bucket", 0, 0)
    assert time.monotonic() - start >= 0.1


@pytest.mark.parametrize(("action", "number"), [("kill", signal.SIGKILL), ("stop", signal.SIGSTOP)])
def test_signals_hit_the_own_process(action: str, number: signal.Signals) -> None:
    code = (
        f"from dprims.testing.faults import *; FaultInjector([{{'action': {action!r}}}]).at('bucket', 0, 0)"
    )
    process = subprocess.Popen([sys.executable, "-c", code])
    try:
        _, status = os.waitpid(process.pid, os.WUNTRACED)
        hit = os.WSTOPSIG(status) if os.WIFSTOPPED(status) else os.WTERMSIG(status)
        assert hit == number
        process.returncode = -number if os.WIFSIGNALED(status) else None
    finally:
        if process.returncode is None:
            process.kill()
            process.wait(20)


def test_every_action_is_documented() -> None:
    assert all(f"`{action}`" in (Fault.__doc__ or "") for action in ACTIONS)
