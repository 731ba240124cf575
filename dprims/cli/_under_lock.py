"""A command that runs while a lock is held, and is ended when the lock is lost.

POSIX. The command gets a process group of its own, so that it ends with all that it started; in the
foreground of a terminal it stays in ours, where job control and Ctrl-C find it. A group of its own is given
the terminal when a shell brings this process to the foreground later. A watchdog ends the command when this
process is killed, which would otherwise leave it running without the lock.
"""

from __future__ import annotations

import logging
import math
import os
import queue
import signal
import subprocess
import sys
import threading
import time
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
WITHDRAW_S = 20.0
"""How long a signal's 128+n may wait until the queue has been left; a server that is gone answers nothing."""
_FROM_TERMINAL = (signal.SIGINT, signal.SIGQUIT)
_ENDING = (signal.SIGTERM, signal.SIGHUP, *_FROM_TERMINAL)
_TOLD_ALREADY = (*_FROM_TERMINAL, signal.SIGCONT)
_NOTICED = (*_ENDING, signal.SIGUSR1, signal.SIGUSR2, signal.SIGCONT)


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
    """Have signals that would end this process, or have continued it, come into an inbox.

    Those that are ignored (nohup) stay so.
    """
    inbox: Inbox = queue.SimpleQueue()
    before = {number: signal.getsignal(number) for number in _NOTICED}
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
    stopped, until = 0, math.inf

    def look() -> None:
        if time.monotonic() >= until:  # a place that is not left lapses with its ttl
            raise typer.Exit(128 + stopped)

    while isinstance(came := _next(inbox, look), int):
        if not stopped and came != signal.SIGCONT:
            stopped, until = came, time.monotonic() + WITHDRAW_S
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
        with _Job(0 if in_foreground else group, process.pid, inbox) as job:
            while (number := _next(inbox, job.look)) is not None:
                # the terminal, or the shell, has told the command itself
                if not isinstance(number, int) or (in_foreground and number in _TOLD_ALREADY):
                    continue
                if number == signal.SIGTSTP:
                    job.stop()
                elif number == signal.SIGCONT:
                    job.go_on()
                else:
                    process.send_signal(number)
                if number in _ENDING:  # which a stopped command would not notice
                    _kill(everything, signal.SIGCONT)
            status = process.wait()
        ended.set()
        if lost.is_set() and not in_foreground:
            _kill(everything, signal.SIGKILL)  # what the command has left running
    return 128 - status if status < 0 else status


def _next(inbox: Inbox, meanwhile: Callable[[], object] = int) -> int | Grant | BaseException | None:
    """What comes next. A signal that strikes as a wait begins is handled when that is over: it is short."""
    while True:
        with suppress(queue.Empty):
            return inbox.get(timeout=SLICE_S)
        meanwhile()


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


_WATCHDOG = 'trap "" TERM INT HUP QUIT TTIN TTOU TSTP; read -r target && { read -r _; kill -9 "$target"; }'


@contextmanager
def _watchdog() -> Iterator[tuple[int, Callable[[int], object]]]:
    """A process that kills the target it is given when its stdin ends, which is when this process does.

    Gives the process group that it has made, for the command to join, and what takes the target.
    """
    reads, writes = os.pipe()
    watchdog = subprocess.Popen(
        ["/bin/sh", "-c", _WATCHDOG],
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


class _Job:
    """What a shell does with a job, done to a command in a *group* of its own; nothing for group 0.

    The command has the terminal from when it was stopped for want of it, and this process is in the
    foreground. It stops with this process, as Ctrl-Z asks, and goes on with it.
    """

    def __init__(self, group: int, pid: int, inbox: Inbox) -> None:
        self._group = group
        self._pid = pid
        self._inbox = inbox
        self._given = False
        self._before = signal.getsignal(signal.SIGTSTP)

    def __enter__(self) -> _Job:
        self._catch()
        return self

    def __exit__(self, *exc: object) -> None:
        self._take_back()
        signal.signal(signal.SIGTSTP, self._before)

    def look(self) -> None:
        """Give the command the terminal, or stop as it was stopped, if there is cause; called ever again."""
        if not self._group or not _is_stopped(self._pid):
            return
        if self._given:
            self._take_back()
            os.kill(0, signal.SIGTSTP)  # which the terminal has sent to the command alone
        elif _pass_terminal(os.getpgrp(), self._group):
            self._given = True
            _kill(-self._group, signal.SIGCONT)

    def stop(self) -> None:
        """Stop the command and this process, until somebody continues this process."""
        _kill(-self._group, signal.SIGTSTP)
        signal.signal(signal.SIGTSTP, signal.SIG_DFL)
        signal.raise_signal(signal.SIGTSTP)
        self._catch()
        self.go_on()

    def go_on(self) -> None:
        """Continue the command, with the terminal if it needs that and this process has it."""
        self.look()
        _kill(-self._group, signal.SIGCONT)

    def _catch(self) -> None:
        if self._group and self._before != signal.SIG_IGN:
            signal.signal(signal.SIGTSTP, lambda number, _: self._inbox.put(number))

    def _take_back(self) -> None:
        if self._given:
            self._given = False
            _pass_terminal(self._group, os.getpgrp())


def _is_stopped(pid: int) -> bool:
    """Whether a child of this process is stopped now; never where the system does not say."""
    if not hasattr(os, "waitid"):
        return False
    with suppress(ChildProcessError):
        return os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOHANG | os.WNOWAIT) is not None
    return False


def _in_foreground() -> bool:
    """Whether this process is in the foreground of its terminal."""
    return _pass_terminal(os.getpgrp(), None)


def _pass_terminal(source: int, target: int | None) -> bool:
    """Put *target* (None: nothing) in front of our terminal if *source* is there; whether it is."""
    try:
        terminal = os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY)
    except OSError:
        return False
    # who is in the background may take the terminal only so
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTTOU})
    try:
        if os.tcgetpgrp(terminal) != source:
            return False
        if target is not None:
            os.tcsetpgrp(terminal, target)
        return True
    except OSError:
        return False
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        os.close(terminal)


def _say(what: str) -> None:
    print("dprims lock run:", *what.split(), file=sys.stderr)
