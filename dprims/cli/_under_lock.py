"""A command that runs while a lock is held, and is ended when the lock is lost.

POSIX. The command gets a process group of its own, so that it ends with all that it started; in the
foreground of a terminal it stays in ours, where job control and Ctrl-C find it. A watchdog ends it when
this process is killed, which would otherwise leave it running without the lock.
"""

from __future__ import annotations

import logging
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import typer

from ..exceptions import BackendError, DprimsError, LockLost, LockTimeout
from ..lock import DistributedLock, Grant, _Attempt

STATUS_LOST = 75
"""``EX_TEMPFAIL`` of sysexits.h: trying again is sensible."""

SLICE_S = 0.1
_FROM_TERMINAL = (signal.SIGINT, signal.SIGQUIT)
_PASSED_ON = (signal.SIGTERM, signal.SIGHUP, *_FROM_TERMINAL, signal.SIGUSR1, signal.SIGUSR2)


@dataclass(frozen=True)
class Outcome:
    """How it went: ``status`` is the command's, or 75 when the lock was lost."""

    name: str
    token: int
    status: int
    lost: bool


Inbox: TypeAlias = "queue.SimpleQueue[int | Grant | BaseException | None]"
"""What the main thread waits for: the number of a signal, what an acquire came to, the end of the command.

Signal handlers only put numbers here, which is safe at any moment (``SimpleQueue.put`` is reentrant). One
that raised could strike in the middle of a call to the backend, and leave a lock or a place in its queue.
"""


@contextmanager
def signals() -> Iterator[Inbox]:
    """Have signals that would end this process come into an inbox, but for those that are ignored (nohup)."""
    inbox: Inbox = queue.SimpleQueue()
    before = {number: signal.getsignal(number) for number in _PASSED_ON}
    for number, old in before.items():
        if old != signal.SIG_IGN:
            signal.signal(number, lambda number, _: inbox.put(number))
    try:
        yield inbox
    finally:
        for number, old in before.items():
            signal.signal(number, old)


def run_under(lock: DistributedLock, command: Sequence[str], grace: float, inbox: Inbox) -> Outcome:
    """Acquire *lock*, run *command*, release. Raises LockTimeout when the lock is not had in time."""
    logging.getLogger("dprims").addHandler(logging.NullHandler())  # what matters is said here, once
    lost = threading.Event()
    lock.on_lost = lambda _: lost.set()
    grant = _acquire(lock, inbox)
    try:
        status = _run(command, grant, lost, grace, inbox)
    finally:
        if _was_lost(grant):
            lost.set()
    if lost.is_set():
        _say(f"lock {lock.name!r} (token {grant.token}) was lost; the command was ended")
        status = STATUS_LOST
    return Outcome(lock.name, grant.token, status, lost.is_set())


def _acquire(lock: DistributedLock, inbox: Inbox) -> Grant:
    """The grant; or Exit with 128+n when signal n came first: neither lock nor place in the queue is kept."""
    attempt = _Attempt()

    def acquire() -> None:
        try:
            inbox.put(lock._acquire(lock.timeout, attempt, attempt))
        except BaseException as error:  # noqa: BLE001 - it is the main thread's to raise
            inbox.put(error)

    def cancel() -> None:
        with suppress(DprimsError):  # without an answer the place lapses with its ttl
            attempt.cancel(lock.backend)

    _aside(acquire)
    stopped = 0
    while isinstance(came := _next(inbox), int):
        if not stopped:
            stopped = came
            _aside(cancel)
    if stopped:
        if isinstance(came, Grant):
            _was_lost(came)
        raise typer.Exit(128 + stopped)
    if isinstance(came, BaseException):
        raise came
    if came is None:
        raise LockTimeout(lock._timed_out())
    return came


def _run(command: Sequence[str], grant: Grant, lost: threading.Event, grace: float, inbox: Inbox) -> int:
    """Run *command*, pass on what comes into *inbox*, and return its status as a shell would."""
    in_foreground = _in_foreground()
    with _watchdog() as (group, watch):
        if not in_foreground:
            watch(-group)
        try:
            process = subprocess.Popen(
                command,
                env={**os.environ, "DPRIMS_TOKEN": str(grant.token)},
                **({} if in_foreground else _joining(group)),
            )
        except OSError as error:
            _say(f"{command[0]}: {error.strerror}")
            return 127 if isinstance(error, FileNotFoundError) else 126
        everything = process.pid if in_foreground else -group
        if in_foreground:
            watch(everything)
        ended = threading.Event()

        def until_it_ends() -> None:
            process.wait()
            inbox.put(None)

        _aside(lambda: _end_when_lost(everything, lost, ended, grace))
        _aside(until_it_ends)
        while (number := _next(inbox)) is not None:
            # the terminal has told the command itself
            if isinstance(number, int) and not (in_foreground and number in _FROM_TERMINAL):
                process.send_signal(number)
        status = process.wait()
        ended.set()
        if lost.is_set() and not in_foreground:
            _kill(everything, signal.SIGKILL)  # what the command has left running
    return 128 - status if status < 0 else status


def _next(inbox: Inbox) -> int | Grant | BaseException | None:
    """What comes next. A signal that strikes as a wait begins is handled when that is over: it is short."""
    while True:
        with suppress(queue.Empty):
            return inbox.get(timeout=SLICE_S)


def _aside(work: Callable[[], object]) -> None:
    threading.Thread(target=work, daemon=True).start()


def _end_when_lost(target: int, lost: threading.Event, ended: threading.Event, grace: float) -> None:
    lost.wait()
    if not ended.is_set():
        _kill(target, signal.SIGTERM)
        _kill(target, signal.SIGCONT)
        if not ended.wait(grace):
            _kill(target, signal.SIGKILL)


def _kill(target: int, number: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(target, number)


def _was_lost(grant: Grant) -> bool:
    try:
        grant.release()
    except LockLost:
        return True
    except BackendError as error:
        if grant.lost:
            return True
        _say(f"lock {grant.name!r} could not be released and lapses with its ttl: {error}")
    return False


@contextmanager
def _watchdog() -> Iterator[tuple[int, Callable[[int], object]]]:
    """A process that kills the target it is given when its stdin ends, which is when this process does.

    Gives the process group that it has made, for the command to join, and what takes the target.
    """
    reads, writes = os.pipe()
    watchdog = subprocess.Popen(
        ["/bin/sh", "-c", 'trap "" TERM INT HUP; read -r target && { read -r _; kill -9 "$target"; }'],
        stdin=reads,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        **_joining(0),
    )
    os.close(reads)
    try:
        yield watchdog.pid, lambda target: os.write(writes, b"%d\n" % target)
    finally:
        watchdog.kill()
        watchdog.wait()
        os.close(writes)


def _joining(group: int) -> dict[str, Any]:
    """What makes Popen put a process into *group*, or into one of its own for 0."""
    if sys.version_info >= (3, 11):
        return {"process_group": group}
    return {"preexec_fn": partial(os.setpgid, 0, group)}


def _in_foreground() -> bool:
    """Whether this process is in the foreground of its terminal."""
    try:
        terminal = os.open("/dev/tty", os.O_RDONLY)
    except OSError:
        return False
    try:
        return os.tcgetpgrp(terminal) == os.getpgrp()
    except OSError:
        return False
    finally:
        os.close(terminal)


def _say(what: str) -> None:
    print("dprims lock run:", *what.split(), file=sys.stderr)
