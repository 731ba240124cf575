"""A fault injector: hold, kill, stop, delay, raise or corrupt, at bucket k of rank r in phase p.

A `Fault` is a value that survives `to_dict`/`from_dict`, so that it can travel to the process that it is to
hit. There a `FaultInjector` carries it out: code under test calls `faults.at(phase, rank, bucket)` at its
joints, and nothing happens unless a fault is meant for that joint. Each fault strikes once (`times`).

Phases of a refit, in order:

| phase       | when |
|-------------|------|
| `rebuild`   | before a weight group is built or rebuilt |
| `handshake` | before a rank says what it is about to do |
| `bucket`    | once a bucket: on the sender before it is sent, on a receiver when it has arrived |
| `decision`  | after the last bucket and before the rank acknowledges |
| `commit`    | before staged weights become the live ones |
| `settle`    | before a rank rolls back |
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

__all__ = ["ACTIONS", "PHASES", "Fault", "FaultInjector", "InjectedFault"]

ACTIONS = ("hold", "kill", "stop", "delay", "raise", "corrupt")
PHASES = ("rebuild", "handshake", "bucket", "decision", "commit", "settle")


class InjectedFault(Exception):
    """What the action `raise` raises."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One thing that shall go wrong.

    Args:
        action: `kill` and `stop` send SIGKILL and SIGSTOP to the own process; `raise` raises `InjectedFault`;
            `delay` sleeps `seconds`; `hold` waits for `FaultInjector.release`, at most `seconds`; `corrupt`
            flips one bit of the bucket's bytes, after the sender or before the receiver has taken its digest.
        phase: where, one of `PHASES`.
        rank: which rank it hits, as the caller of `at` counts; None for any.
        bucket: at which bucket; None for the first time that the phase is reached.
        seconds: for `delay` and `hold`.
        byte: for `corrupt`: which byte, counted modulo the size of the bucket.
        skip: how many times it lets pass what it is meant for, before it strikes.
        times: how often it strikes.
    """

    action: str
    phase: str = "bucket"
    rank: int | None = None
    bucket: int | None = None
    seconds: float = 60.0
    byte: int = 0
    skip: int = 0
    times: int = 1

    def __post_init__(self) -> None:
        if self.action not in ACTIONS:
            raise ValueError(f"the action is {self.action!r}; known are {', '.join(ACTIONS)}")
        if self.phase not in PHASES:
            raise ValueError(f"the phase is {self.phase!r}; known are {', '.join(PHASES)}")
        if self.action == "corrupt" and self.phase != "bucket":
            raise ValueError(f"corrupt works in phase bucket, not in {self.phase!r}")

    def to_dict(self) -> dict[str, Any]:
        """The fault as plain values."""
        return asdict(self)

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> Fault:
        """A fault from plain values. Raises ValueError for a key that there is not."""
        unknown = sorted(set(raw) - {f.name for f in fields(cls)})
        if unknown or "action" not in raw:
            raise ValueError(f"{dict(raw)} is no fault: {f'unknown {unknown}' if unknown else 'no action'}")
        return cls(**raw)


class FaultInjector:
    """Carries out faults where the code under test calls `at`. Thread-safe.

    Args:
        faults: faults, or dicts for `Fault.from_dict`.
        on_strike: called just before a fault strikes, such as to tell another process that it is about to.
    """

    def __init__(
        self,
        faults: Iterable[Fault | Mapping[str, Any]] = (),
        *,
        on_strike: Callable[[Fault], None] | None = None,
    ) -> None:
        self._faults = [fault if isinstance(fault, Fault) else Fault.from_dict(fault) for fault in faults]
        self._skips = [fault.skip for fault in self._faults]
        self._left = [fault.times for fault in self._faults]
        self._lock = threading.Lock()
        self._released = threading.Event()
        self._on_strike = on_strike

    def release(self) -> None:
        """Let everything that is held go on, and hold nothing any more."""
        self._released.set()

    def at(self, phase: str, rank: int, bucket: int | None = None, *, buffer: Any = None) -> None:
        """The code under test is at this joint.

        Args:
            phase: one of `PHASES`.
            rank: the calling rank.
            bucket: the bucket's index, in phase `bucket`.
            buffer: called for a one-dimensional, mutable array of bytes, when a fault wants to corrupt it.
        """
        for fault in self._due(phase, rank, bucket):
            if self._on_strike is not None:
                self._on_strike(fault)
            self._strike(fault, buffer)

    def _due(self, phase: str, rank: int, bucket: int | None) -> list[Fault]:
        due = []
        with self._lock:
            for index, fault in enumerate(self._faults):
                if not self._left[index] or not self._meant(fault, phase, rank, bucket):
                    continue
                if self._skips[index]:
                    self._skips[index] -= 1
                else:
                    self._left[index] -= 1
                    due.append(fault)
        return due

    @staticmethod
    def _meant(fault: Fault, phase: str, rank: int, bucket: int | None) -> bool:
        return fault.phase == phase and fault.rank in (None, rank) and fault.bucket in (None, bucket)

    def _strike(self, fault: Fault, buffer: Any) -> None:
        if fault.action == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif fault.action == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif fault.action == "delay":
            time.sleep(fault.seconds)
        elif fault.action == "hold":
            self._released.wait(fault.seconds)
        elif fault.action == "raise":
            raise InjectedFault(f"injected: {fault}")
        elif buffer is not None:
            target = buffer()
            if len(target):
                target[fault.byte % len(target)] ^= 0x10
